"""Encoded bytes to upright RGB: every oddity that trainers' folders hold."""

import contextlib
import struct
import sys
import zlib
from io import BytesIO

import numpy as np
import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import input_key
from cachestore.encode.pictures import images
from cachestore.encode.pictures.buckets import Size, crop_box
from cachestore.encode.pictures.images import decode, measure
from cachestore.encode.pictures.resizing import fit
from cachestore.encode.pictures.shots import read_input
from tests.encode import drawn_pictures
from tests.encode.drawn_pictures import scene
from tests.encode.encoders import Files
from tests.fakes import examples

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image, name="PNG", **options):
    file = BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def flag(width=64, height=40):
    """Four colours, one in each quarter, so that every turn and flip shows."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste((90, 90, 90), (width // 2, height // 2, width, height))
    return image


def noise(width=64, height=48, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(image):
    return np.asarray(image).astype(int)


def far(left, right):
    return np.abs(pixels(left) - pixels(right)).mean()


def test_an_empty_file_is_refused_with_a_reason():
    for function in (measure, decode):
        with pytest.raises(EncodeFailed):
            function(b"")


@pytest.mark.parametrize(
    "data", [b"a caption that was saved as photo.png", b"\x00" * 100, b"<html>404 not found</html>", b"\x89PNG\r\n\x1a\n"]
)
def test_a_file_that_is_no_picture_is_refused_with_a_reason(data):
    for function in (measure, decode):
        with pytest.raises(EncodeFailed):
            function(data)


@pytest.mark.parametrize("width", [0, 3])
def test_a_picture_without_pixels_is_refused_with_a_reason(width):
    data = b"GIF89a" + width.to_bytes(2, "little") + bytes(5) + b"," + bytes(9) + b"\x02\x02\x4c\x01\x00;"
    with pytest.raises(EncodeFailed):
        measure(data)


def test_an_eps_file_is_refused_as_pillow_would_run_ghostscript_on_it():
    with pytest.raises(EncodeFailed):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_a_file_that_ends_early_is_refused_not_half_decoded(name):
    data = encoded(noise(), name)
    assert decode(data).size == measure(data) == (64, 48)
    for fraction in (0.1, 0.5, 0.9):
        with pytest.raises(EncodeFailed):
            decode(data[: int(len(data) * fraction)])


def test_a_progressive_jpeg_that_ends_between_scans_is_refused():
    data = encoded(noise(), "JPEG", progressive=True)
    for cut in range(20, len(data) - 2, 97):
        with pytest.raises(EncodeFailed):
            decode(data[:cut])


@examples(60)
@given(
    st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF"]),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_bytes_give_a_picture_or_our_error_and_nothing_else(name, changes):
    data = bytearray(encoded(noise(40, 30), name))
    for at, value in changes:
        data[at % len(data)] = value
    for function in (measure, decode):
        with contextlib.suppress(EncodeFailed):
            function(bytes(data))


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_set_upright_once(name, orientation):
    upright = flag()
    # What a camera stores: the picture turned such that applying the orientation sets it upright.
    inverse = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 5: Image.Transpose.TRANSPOSE, 7: Image.Transpose.TRANSVERSE}
    inverse |= {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    stored = upright.transpose(inverse[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, name, exif=exif.tobytes())
    assert measure(data) == (64, 40)
    assert decode(data).size == (64, 40)
    assert far(decode(data), upright) < 6


def test_a_png_that_carries_its_orientation_behind_the_pixels_is_turned_too():
    data = encoded(flag())
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\x00\x00")
    late = len(chunk[4:]).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    data = data[:-12] + late + data[-12:]
    assert measure(data) == (40, 64)
    assert decode(data).size == (40, 64)


def test_an_orientation_without_meaning_counts_as_upright():
    exif = Image.Exif()
    exif[0x0112] = 99
    data = encoded(flag(), "JPEG", exif=exif.tobytes())
    assert measure(data) == decode(data).size == (64, 40)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_are_white_whatever_colour_hides_below(mode):
    image = Image.new("RGBA", (8, 8), (200, 30, 30, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    picture = decode(encoded(image.convert(mode)))
    assert picture.getpixel((1, 1)) == (0, 0, 0)
    assert picture.getpixel((6, 6)) == WHITE


def test_a_half_transparent_pixel_is_mixed_with_white():
    assert decode(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128)))).getpixel((0, 0)) == (127, 127, 127)


def test_a_palette_with_transparency_is_composited_on_white():
    image = Image.new("P", (8, 8), 0)
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.paste(1, (0, 0, 4, 8))
    for transparency in (0, bytes([0, 255])):
        picture = decode(encoded(image, transparency=transparency))
        assert picture.getpixel((6, 6)) == WHITE
        assert picture.getpixel((1, 1)) == (200, 0, 0)


def test_a_colour_declared_transparent_becomes_white():
    picture = decode(encoded(flag(), transparency=BLUE))
    assert picture.getpixel((5, 35)) == WHITE
    assert picture.getpixel((5, 5)) == RED


def test_sixteen_bit_grey_is_scaled_not_clipped():
    levels = np.linspace(0, 65_535, 256).astype(np.uint16).reshape(1, 256)
    for name in ("PNG", "TIFF"):
        picture = pixels(decode(encoded(Image.fromarray(levels), name)))
        assert (picture[..., 0] == picture[..., 2]).all()
        assert np.abs(picture[0, :, 0] - np.arange(256)).max() <= 1


def test_floating_point_and_32_bit_pictures_are_refused_with_a_reason():
    for kind in (np.float32, np.int32):
        with pytest.raises(EncodeFailed):
            decode(encoded(Image.fromarray(np.ones((4, 4), kind)), "TIFF"))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode):
    if mode == "YCbCr" and int(PIL.__version__.partition(".")[0]) < 13:
        pytest.skip("Pillow before 13 cannot read TIFFs of this mode, its own included: they are failures with a reason")
    name = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    picture = decode(encoded(flag().convert(mode), name))
    assert (picture.mode, picture.size) == ("RGB", (64, 40))
    assert far(picture, flag().convert(mode).convert("RGB")) < 2


def test_a_cmyk_jpeg_keeps_its_colours():
    assert far(decode(encoded(flag().convert("CMYK"), "JPEG", quality=95)), flag()) < 8


def test_an_animated_gif_gives_its_first_frame():
    frames = [Image.new("P", (8, 8), 0), Image.new("P", (8, 8), 0)]
    for frame, colour in zip(frames, ((1, 2, 3), (200, 100, 0)), strict=True):
        frame.putpalette(colour)
    assert decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((0, 0)) == (1, 2, 3)


def test_an_unusable_colour_profile_is_ignored():
    for profile in (b"no profile at all", ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()):
        assert far(decode(encoded(flag(), icc_profile=profile)), flag()) == 0


def test_an_srgb_profile_changes_no_pixel():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert far(decode(encoded(noise(), icc_profile=profile)), noise()) == 0


def swapped_profile():
    """An RGB profile in which red and green have changed places: sRGB's own bytes with two tags renamed."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for at in range(132, 132 + 12 * int.from_bytes(data[128:132], "big"), 12):
        tag = bytes(data[at : at + 4])
        data[at : at + 4] = {b"rXYZ": b"gXYZ", b"gXYZ": b"rXYZ"}.get(tag, tag)
    return bytes(data).replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be")).replace(b"sRGB", b"swap")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_a_profile_other_than_srgb_is_converted_to_srgb(mode):
    picture = decode(encoded(Image.new("RGB", (8, 8), RED).convert(mode), icc_profile=swapped_profile()))
    assert np.abs(pixels(picture) - np.array(GREEN)).max() <= 3


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    header = encoded(Image.new("1", (1, 1)))
    size = (60_000).to_bytes(4, "big")
    chunk = b"IHDR" + size + size + header[24:29]
    bomb = header[:8] + (13).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + header[33:]
    for function in (measure, decode):
        with pytest.raises(EncodeFailed):
            function(bomb)


@pytest.mark.parametrize(("size", "bucket"), [((160, 120), (96, 64)), ((50, 200), (64, 128)), ((64, 64), (64, 64)), ((40, 30), (64, 64))])
def test_fitting_equals_resizing_the_whole_picture_and_cropping_it(size, bucket):
    # Mild noise, and two levels: Pillow takes the cheaper of its two passes first, and rounds and clips between them.
    picture = Image.fromarray((100 + pixels(noise(*size)) // 5).astype(np.uint8))
    found, box = fit(picture, Size(*bucket), None, "pillow"), crop_box(Size(*size), Size(*bucket))
    whole = picture.resize(box.resized, Image.Resampling.LANCZOS).crop(box.crop)
    assert (found.shape, found.dtype) == ((bucket[1], bucket[0], 3), np.uint8)
    assert found.flags.c_contiguous
    assert np.abs(found.astype(int) - pixels(whole)).max() <= 2


def test_a_picture_that_fits_exactly_is_not_touched():
    assert far(Image.fromarray(fit(noise(64, 48), Size(64, 48), None, "lanczos")), noise(64, 48)) == 0


def test_an_extremely_long_picture_needs_no_giant_in_between():
    assert crop_box(Size(60_000, 1), Size(256, 64)).resized == (3_840_000, 64)
    found = fit(Image.new("RGB", (60_000, 1), RED), Size(256, 64), None, "pillow")
    assert (found == np.array(RED)).all()


@examples(40)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([(16, 16), (32, 16), (16, 48)]))
def test_fitting_one_colour_gives_that_colour_at_every_size(width, height, bucket):
    found = fit(Image.new("RGB", (width, height), (12, 200, 99)), Size(*bucket), None, "pillow")
    assert (found == np.array((12, 200, 99))).all()


def test_measuring_does_not_decode(monkeypatch):
    data = encoded(flag())
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("measure decoded the picture"))
    assert measure(data) == (64, 40)


def test_upright_means_the_same_as_pillows_exif_transpose():
    exif = Image.Exif()
    exif[0x0112] = 7
    data = encoded(noise(), "JPEG", exif=exif.tobytes())
    with Image.open(BytesIO(data)) as opened:
        assert far(decode(data), ImageOps.exif_transpose(opened)) == 0


# JPEGs decoded by simplejpeg


def both(data):
    """What is made of a file with simplejpeg and by Pillow alone: pixels, or the reason why not."""
    return [attempt(data, decoder) for decoder in (images._fast_decoder(), None)]


def attempt(data, decoder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_fast_decoder", lambda: decoder)
        try:
            return pixels(decode(data)).tolist()
        except EncodeFailed as error:
            return str(error)


def test_simplejpeg_is_installed_where_tests_run_and_makes_pillows_pixels():
    assert images._fast_decoder() is not None


@examples(60)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 70)),
    st.integers(1, 100),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.integers(0, 8),
    st.integers(0, 10**6),
)
def test_either_decoder_makes_the_same_pixels(size, quality, subsampling, progressive, orientation, seed):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": quality, "subsampling": subsampling, "progressive": progressive, "exif": exif}
    one, other = both(encoded(noise(*size, seed=seed).resize((size[0], size[1])), "JPEG", **options))
    assert one == other


@examples(60)
@given(st.integers(0, 10**6), st.integers(0, 3), st.data())
def test_either_decoder_says_the_same_of_damaged_files(seed, changes, data):
    raw = bytearray(encoded(noise(seed=seed), "JPEG", quality=80))
    for _change in range(changes):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    one, other = both(bytes(raw[: data.draw(st.integers(1, len(raw)))]))
    assert one == other


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_only_three_plain_channels_are_given_to_simplejpeg(mode, monkeypatch):
    monkeypatch.setattr(images, "_fast_decoder", lambda: pytest.fail)
    assert decode(encoded(noise().convert(mode), "JPEG")).mode == "RGB"


def test_a_colour_profile_counts_whoever_decodes():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    one, other = both(encoded(flag(), "JPEG", icc_profile=profile.tobytes()))
    assert one == other


@pytest.mark.parametrize("missing", ["other pixels", "absent"])
def test_a_decoder_that_is_missing_or_makes_other_pixels_is_not_used(missing, monkeypatch):
    class Other:
        @staticmethod
        def decode_jpeg(data, **options):
            return np.zeros((61, 83, 3), np.uint8)

    monkeypatch.setitem(sys.modules, "simplejpeg", Other if missing == "other pixels" else None)
    assert images._fast_decoder.__wrapped__() is None


# Alpha, and colours that count as transparent


def half(channels=4, alpha=0):
    levels = scene(np.random.default_rng(3), channels, 256)
    levels[..., -1] = alpha
    return levels


def nothing_opaque(name):
    """A picture whose alpha is zero everywhere, and its colours."""
    levels = half()
    whole = {
        "BMP": lambda: drawn_pictures.bmp(levels),
        "TIFF": lambda: drawn_pictures.tiff(levels, 8, 2, extra=2),
        "TIFF, colours times alpha": lambda: drawn_pictures.tiff(levels, 8, 2, extra=1),
        "TIFF, 16 bits": lambda: drawn_pictures.tiff(levels * 257, 16, 2, extra=2),
        "TIFF, packed": lambda: drawn_pictures.by_pillow(levels, "RGBA", "TIFF", compression="tiff_adobe_deflate"),
        "WEBP": lambda: drawn_pictures.by_pillow(levels, "RGBA", "WEBP", lossless=True, exact=True),
        "PNG": lambda: drawn_pictures.by_pillow(levels, "RGBA", "PNG"),
        "AVIF": lambda: drawn_pictures.by_pillow(levels, "RGBA", "AVIF"),
        "JPEG2000": lambda: drawn_pictures.by_pillow(levels, "RGBA", "JPEG2000"),
    }[name]()
    return whole, levels[..., :3]


@pytest.mark.parametrize("name", ["BMP", "TIFF", "TIFF, colours times alpha", "TIFF, 16 bits", "TIFF, packed", "WEBP"])
def test_alpha_that_its_writer_left_at_zero_hides_nothing(name):
    data, colours = nothing_opaque(name)
    assert (pixels(decode(data)) == colours).all()
    assert images.open_upright(data).mode == "RGB"


@pytest.mark.parametrize("name", ["PNG", "AVIF", "JPEG2000"])
def test_a_picture_of_another_format_that_is_transparent_everywhere_is_white(name):
    data, _colours = nothing_opaque(name)
    assert (pixels(decode(data)) == 255).all()


def test_a_lossy_webp_with_alpha_left_at_zero_keeps_its_colours():
    opaque = drawn_pictures.by_pillow(half()[..., :3], "RGB", "WEBP", quality=90)
    blank = drawn_pictures.by_pillow(half(), "RGBA", "WEBP", quality=90, exact=True)
    assert b"ALPH" in blank
    assert far(decode(blank), decode(opaque)) < 4


@pytest.mark.parametrize("name", ["BMP", "TIFF", "WEBP"])
def test_one_pixel_that_is_not_transparent_makes_alpha_count(name):
    levels = half()
    levels[4, 5, 3] = 1
    options = {"lossless": True, "exact": True} if name == "WEBP" else {}
    write = {"BMP": lambda: drawn_pictures.bmp(levels), "TIFF": lambda: drawn_pictures.tiff(levels, 8, 2, extra=2)}
    data = write.get(name, lambda: drawn_pictures.by_pillow(levels, "RGBA", name, **options))()
    assert (pixels(decode(data))[0] == 255).all()


@pytest.mark.parametrize(("depth", "colour", "key"), [(2, 0, [2]), (4, 0, [11]), (16, 0, [0x1234]), (16, 2, [0x1234, 0x5678, 0x9ABC])])
def test_the_transparent_colour_of_a_png_is_found_at_every_depth(depth, colour, key):
    levels = np.zeros((3, 4, len(key)), int)
    levels[1, 2] = key
    data = drawn_pictures.png(levels, depth, colour, drawn_pictures.chunk(b"tRNS", np.array(key, ">u2").tobytes()))
    assert (pixels(decode(data)) == np.where((levels == key).all(axis=-1, keepdims=True), 255, 0)).all()


def test_a_picture_can_be_had_with_its_alpha():
    levels = half(alpha=90)
    exif = drawn_pictures.chunk(b"eXIf", drawn_pictures.exif_of(6))
    upright = images.open_upright(drawn_pictures.png(levels, 8, 6, exif))
    assert (upright.mode, upright.size) == ("RGBA", (levels.shape[0], levels.shape[1]))
    assert (pixels(upright) == np.rot90(levels, -1)).all()
    assert images.open_upright(encoded(flag())).mode == "RGB"


# Keys

SRGB_PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def stored(data):
    """A zlib stream of these bytes, the same whoever compresses."""
    return b"\x78\x01\x01" + struct.pack("<HH", len(data), len(data) ^ 0xFFFF) + data + struct.pack(">I", zlib.adler32(data))


def key_of(*middle):
    """The key of a PNG with these chunks, in a recipe whose fingerprint is all zeros."""
    rows = b"".join(b"\0" + bytes(range(192)) for _row in range(64))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)), *middle, (b"IDAT", stored(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(drawn_pictures.chunk(*part) for part in parts)
    found = read_input({"image": "a.png", "resolution": 64, "step": 64}, Files({"a.png": data}), "lanczos")
    return str(input_key(bytes(32).hex(), found.keyed, found.transform))


def profile_chunk(space):
    return b"iCCP", b"p\0\0" + stored(drawn_pictures.icc_of(drawn_pictures.SPACES[space]))


@pytest.mark.parametrize(
    ("chunks", "key"),
    [
        ((), "39cee69aec784a1871532a6680d15b21"),
        ((profile_chunk("sRGB"),), "e25674b874d9cacf26288e5c067d9da2"),
        ((profile_chunk("Display P3"),), "3b2900fb8be7e69383e3aca4518643a4"),
        (((b"gAMA", struct.pack(">I", 45_455)),), "66f0eee731e658c337e4e1409a0f2d79"),
    ],
)
def test_keys_stay_what_they_are(chunks, key):
    assert key_of(*chunks) == key


# Plugins


class Plugin:
    registered = 0

    @classmethod
    def register_heif_opener(cls):
        cls.registered += 1


def test_formats_of_installed_plugins_are_opened_and_no_others(monkeypatch):
    assert images._formats.__wrapped__() == images.FORMATS or images.picture_plugins()
    monkeypatch.setattr(images, "picture_plugins", lambda: {".heic": "pillow_heif", ".heif": "pillow_heif", ".jxl": "pillow_jxl"})
    monkeypatch.setitem(sys.modules, "pillow_heif", Plugin)
    monkeypatch.setitem(sys.modules, "pillow_jxl", None)  # importing it fails
    monkeypatch.setitem(Image.OPEN, "HEIF", (lambda file, name: None, lambda start: False))
    assert images._formats.__wrapped__() == (*images.FORMATS, "HEIF")
    assert Plugin.registered == 1
