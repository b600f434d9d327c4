"""By what a picture is converted to sRGB, and what is refused."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageCms

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import images
from cachestore.encode.pictures.colours import adobe_rgb, judged, profile_of_codes
from tests.encode import drawn_pictures
from tests.encode.drawn_pictures import GREYS, P3, SPACES, SRGB, Space, chunk, icc, icc_of, png, power, scene, shown, srgb_light, tiff
from tests.fakes import tells_of


def samples(channels=3, levels=256):
    return scene(np.random.default_rng(5), channels, levels)


def iccp(profile):
    return chunk(b"iCCP", b"name\0\0" + zlib.compress(profile))


def differs(data, expected):
    return np.abs(np.asarray(images.decode(data)).astype(float) - expected).max()


def in_format(name, profile, channels=3):
    options = {"WEBP": {"lossless": True, "exact": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}, "TIFF": {}, "PNG": {}}[name]
    return drawn_pictures.by_pillow(samples(channels), ("", "L", "LA", "RGB", "RGBA")[channels], name, icc_profile=profile, **options)


def lying(space):
    """A profile of this space that calls itself sRGB."""
    return icc("sRGB IEC61966-2.1", space.curve, space.matrix)


@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "WEBP", "AVIF"])
@pytest.mark.parametrize("space", ["linear sRGB", "Display P3", "Rec. 2020", "Adobe RGB"])
def test_a_profile_that_calls_itself_srgb_and_is_not_is_converted(space, format_name):
    data = in_format(format_name, lying(SPACES[space]))
    with Image.open(BytesIO(data)) as opened:
        raw = np.asarray(opened) / 255
    assert differs(data, shown(raw, SPACES[space])) < 1.5


@pytest.mark.parametrize("name", ["sRGB IEC61966-2.1", "c2", "any name"])
def test_a_profile_that_is_srgb_changes_no_pixel_whatever_its_name(name):
    data = in_format("PNG", icc(name, srgb_light, SRGB.matrix))
    assert differs(data, samples()) == 0


def test_srgb_made_of_few_points_as_phones_and_scanners_write_it_stays_as_it_is():
    few = np.linspace(0, 1, 256)

    def rough(level):
        return np.interp(level, few, srgb_light(few))

    rounded = np.round(SRGB.matrix, 3)
    for matrix in (SRGB.matrix, rounded):
        data = in_format("PNG", icc("sRGB of a scanner", rough, matrix))
        assert differs(data, samples()) == 0


@pytest.mark.parametrize("grey", ["gamma 1.0", "gamma 1.8", "gamma 2.2"])
def test_a_profile_of_grey_counts_in_16_bits_and_beside_alpha(grey):
    profile = icc(grey, GREYS[grey])
    deep = samples(1, 65536)
    pale = samples(2)
    for data, expected in (
        (png(deep, 16, 0, iccp(profile)), shown(deep / 65535, grey=GREYS[grey])),
        (tiff(deep, 16, 1, profile=profile), shown(deep / 65535, grey=GREYS[grey])),
        (tiff(deep, 16, 1, profile=profile, big=True), shown(deep / 65535, grey=GREYS[grey])),
        (png(pale, 8, 4, iccp(profile)), shown(pale[..., :1] / 255, grey=GREYS[grey], alpha=pale[..., 1] / 255)),
        (tiff(pale, 8, 1, extra=2, profile=profile), shown(pale[..., :1] / 255, grey=GREYS[grey], alpha=pale[..., 1] / 255)),
    ):
        assert differs(data, expected) < 1.5


def test_a_profile_of_grey_that_is_srgbs_curve_changes_nothing_in_16_bits():
    deep = samples(1, 65536)
    plain, data = png(deep, 16, 0), png(deep, 16, 0, iccp(icc("grey", srgb_light)))
    np.testing.assert_array_equal(images.decode(data), images.decode(plain))


def test_a_grey_picture_may_have_a_profile_for_rgb():
    grey = samples(1)
    for name in ("JPEG", "PNG", "TIFF"):
        data = drawn_pictures.by_pillow(grey, "L", name, icc_profile=icc_of(SPACES["Adobe RGB"]))
        with Image.open(BytesIO(data)) as opened:
            raw = np.asarray(opened)[..., None] / 255
        assert differs(data, shown(raw, SPACES["Adobe RGB"])) < 1.5


def test_a_profile_for_other_colours_is_ignored():
    for profile in (icc("grey", power(1.0)), ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes(), b"none", bytes(500)):
        data = in_format("PNG", profile)
        assert differs(data, samples()) == 0


@pytest.mark.parametrize(
    ("chunks", "space"),
    [
        ({"gAMA": 100_000}, Space("", power(1.0))),
        ({"gAMA": 55_556}, Space("", power(1.8))),
        ({"gAMA": 45_455}, None),
        ({"gAMA": 45_455, "cHRM": "sRGB"}, None),
        ({"cHRM": "P3"}, SPACES["Display P3"]),
        ({"sRGB": 0, "gAMA": 100_000}, None),
        ({"cICP": (12, 13), "gAMA": 100_000}, SPACES["Display P3"]),
        ({"cICP": (1, 13), "iCCP": "P3"}, None),
        ({"cICP": (1, 1)}, None),
        ({"cICP": (1, 8)}, Space("", power(1.0))),
        ({"iCCP": "P3", "gAMA": 100_000}, SPACES["Display P3"]),
        ({"gAMA": 0}, None),
        ({"cHRM": "nonsense"}, None),
    ],
)
def test_the_colour_chunks_of_png_count_in_the_order_of_its_specification(chunks, space):
    gamuts = {"sRGB": (64000, 33000, 30000, 60000, 15000, 6000), "P3": (68000, 32000, 26500, 69000, 15000, 6000), "nonsense": (0,) * 6}
    written = {
        "gAMA": lambda value: struct.pack(">I", value),
        "cHRM": lambda value: struct.pack(">8I", 31270, 32900, *gamuts[value]),
        "sRGB": lambda value: bytes([value]),
        "cICP": lambda value: bytes([*value, 0, 1]),
        "iCCP": lambda _value: b"name\0\0" + zlib.compress(icc_of(SPACES["Display P3"])),
    }
    middle = [chunk(name.encode(), written[name](value)) for name, value in chunks.items()]
    data = png(samples(), 8, 2, *middle)
    assert differs(data, shown(samples() / 255, space)) < 1.5


def with_nclx(data, primaries, transfer):
    """The file with these code points, in each of its boxes for them."""
    parts = data.split(b"nclx")
    assert len(parts) > 1
    return parts[0] + b"".join(b"nclx" + struct.pack(">HH", primaries, transfer) + part[4:] for part in parts[1:])


def avif(**options):
    return drawn_pictures.by_pillow(samples(), "RGB", "AVIF", quality=100, subsampling="4:4:4", **options)


@pytest.mark.parametrize("transfer", [16, 18])
def test_pq_and_hlg_are_refused_in_avif_and_png(transfer):
    for data in (
        with_nclx(avif(), 9, transfer),
        with_nclx(avif(), 12, transfer),
        png(samples(), 8, 2, chunk(b"cICP", bytes([9, transfer, 0, 1]))),
        png(samples(3, 65536), 16, 2, chunk(b"cICP", bytes([9, transfer, 0, 1]))),
        png(samples(1), 8, 0, chunk(b"cICP", bytes([1, transfer, 0, 1])), iccp(icc("grey", power(2.2)))),
    ):
        for function in (images.decode, images.open_upright):
            with pytest.raises(EncodeFailed, match="HDR"):
                function(data)


def with_tag(profile, tag, content):
    """The profile with one more tag."""
    count = int.from_bytes(profile[128:132], "big")
    moved = bytearray(profile[132 : 132 + 12 * count])
    for at in range(4, len(moved), 12):
        moved[at : at + 4] = (int.from_bytes(moved[at : at + 4], "big") + 12).to_bytes(4, "big")
    table = bytes(moved) + tag + struct.pack(">II", len(profile) + 12, len(content))
    made = profile[:128] + struct.pack(">I", count + 1) + table + profile[132 + 12 * count :] + content
    return struct.pack(">I", len(made)) + made[4:]


@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "WEBP", "AVIF"])
def test_a_profile_that_says_pq_in_its_cicp_tag_is_refused(format_name):
    profile = with_tag(icc_of(SPACES["Rec. 2020"]), b"cicp", b"cicp\0\0\0\0" + bytes([9, 16, 0, 1]))
    with pytest.raises(EncodeFailed, match="HDR"):
        images.decode(in_format(format_name, profile))
    profile = with_tag(icc_of(SPACES["Display P3"]), b"cicp", b"cicp\0\0\0\0" + bytes([12, 13, 0, 1]))
    images.decode(in_format(format_name, profile))


def pq(level):
    root = level ** (1 / 78.84375)
    return (np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125)


def hlg(level):
    return np.where(level <= 0.5, level**2 / 3, (np.exp((level - 0.55991073) / 0.17883277) + 0.28466892) / 12)


@pytest.mark.parametrize("curve", [pq, hlg, lambda level: hlg(level) ** 1.2])
def test_a_profile_with_the_curve_of_pq_or_hlg_is_refused_whatever_its_name(curve):
    for space in (SPACES["Rec. 2020"], SPACES["Display P3"]):
        with pytest.raises(EncodeFailed, match="HDR"):
            images.decode(in_format("PNG", icc("sRGB", curve, space.matrix)))
    with pytest.raises(EncodeFailed, match="HDR"):
        images.decode(png(samples(1, 65536), 16, 0, iccp(icc("grey", curve))))


@pytest.mark.parametrize(("primaries", "transfer", "space"), [(12, 13, SPACES["Display P3"]), (1, 8, Space("", power(1.0))), (1, 1, None)])
def test_code_points_of_avif_that_are_not_srgb_are_converted(primaries, transfer, space):
    raw = drawn_pictures.by_pillow_raw(avif()) / 255
    data = with_nclx(avif(), primaries, transfer)
    assert differs(data, shown(raw, space)) < 1.5


def test_the_gain_map_of_an_avif_does_not_count():
    base = avif()
    at = base.index(b"ipco") - 4
    size = int.from_bytes(base[at : at + 4], "big")
    hdr = struct.pack(">I4s4sHHHB", 19, b"colr", b"nclx", 9, 16, 0, 128)  # a property of no item, as that of a gain map's picture
    grown = bytearray(base[: at + size] + hdr + base[at + size :])
    for box in (b"ipco", b"iprp", b"meta"):
        place = bytes(grown).index(box) - 4
        grown[place : place + 4] = (int.from_bytes(grown[place : place + 4], "big") + len(hdr)).to_bytes(4, "big")
    np.testing.assert_array_equal(images.decode(with_moved_data(bytes(grown), len(hdr))), images.decode(base))


def with_moved_data(data, by):
    """The file with its place of the pixels moved, for what was put in front of them: a box `iloc` of version 0 with offsets of 4 bytes."""
    at = data.index(b"iloc") + 4
    assert data[at] == 0
    assert data[at + 4] == 0x44
    items, moved, place = int.from_bytes(data[at + 6 : at + 8], "big"), bytearray(data), at + 8
    for _item in range(items):
        extents = int.from_bytes(data[place + 4 : place + 6], "big")
        for extent in range(extents):
            start = place + 6 + 8 * extent
            moved[start : start + 4] = (int.from_bytes(data[start : start + 4], "big") + by).to_bytes(4, "big")
        place += 6 + 8 * extents
    return bytes(moved)


def camera_exif(index, colour_space):
    """EXIF as cameras write it: a colour space, and the name of a rule of interoperability."""
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0xA001] = colour_space
    exif.get_ifd(0x8769)[0xA005] = {1: index}
    return exif.tobytes()


@pytest.mark.parametrize(("index", "space"), [("R03", SPACES["Adobe RGB"]), ("R98", None)])
def test_adobe_rgb_of_a_camera_without_a_profile_is_converted(index, space):
    data = drawn_pictures.by_pillow(samples(), "RGB", "JPEG", quality=95, exif=camera_exif(index, 65535))
    assert differs(data, shown(drawn_pictures.by_pillow_raw(data) / 255, space)) < 1.5


def test_a_camera_that_says_srgb_is_believed():
    data = drawn_pictures.by_pillow(samples(), "RGB", "JPEG", exif=camera_exif("R03", 1))
    assert differs(data, drawn_pictures.by_pillow_raw(data)) == 0


def jp2_with(method, content):
    data = drawn_pictures.by_pillow(samples(), "RGB", "JPEG2000")
    return data.replace(b"colr\x01\0\0\0\0\0\x10", b"colr" + bytes([method, 0, 0]) + content)


def test_colour_spaces_of_jpeg_2000_that_are_not_decoded_are_refused():
    images.decode(jp2_with(1, struct.pack(">I", 16)))
    for space in (14, 20, 21):
        with pytest.raises(EncodeFailed, check=tells_of("JPEG 2000", space)):
            images.decode(jp2_with(1, struct.pack(">I", space)))


def test_a_profile_in_jpeg_2000_or_bmp_is_converted():
    p3 = SPACES["Display P3"]
    for data in (
        drawn_pictures.with_jp2_profile(drawn_pictures.by_pillow(samples(), "RGB", "JPEG2000"), icc_of(p3)),
        drawn_pictures.bmp(samples(), icc_of(p3)),
    ):
        assert differs(data, shown(samples() / 255, p3)) < 1.5


def test_profiles_of_our_own_are_what_their_formulas_say():
    assert np.abs(np.asarray(profiled(adobe_rgb())) - shown(samples() / 255, SPACES["Adobe RGB"])).max() < 1.5
    for primaries, space in ((12, Space("", srgb_light, P3)), (9, Space("", srgb_light, SPACES["Rec. 2020"].primaries))):
        profile = profile_of_codes(primaries, 13)
        assert profile is not None
        assert np.abs(np.asarray(profiled(profile)) - shown(samples() / 255, space)).max() < 1.5
    assert profile_of_codes(1, 13) is None
    for codes in ((9, 16), (9, 18), (1, 9), (10, 13)):
        with pytest.raises(EncodeFailed):
            profile_of_codes(*codes)


def profiled(profile):
    return images.decode(in_format("PNG", profile))


def test_a_damaged_profile_is_ignored_or_converted_and_nothing_else():
    whole, rng = icc_of(SPACES["Display P3"]), np.random.default_rng(3)
    for _round in range(200):
        damaged = bytearray(whole[: rng.integers(1, len(whole) + 1)])
        for at in rng.integers(0, min(len(damaged), 300), rng.integers(0, 12)):
            damaged[at] = rng.integers(0, 256)
        found = judged(bytes(damaged), "RGB")
        assert found is None or 0 <= found.change <= 255
