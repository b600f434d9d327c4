"""Which numbers of a mask's file count: alpha, luminance, or none, as it cannot be told."""

from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageCms

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import images
from cachestore.encode.pictures.kinds import Masked
from cachestore.encode.pictures.levels import read_alpha, read_levels
from cachestore.encode.pictures.masks import MaskEncoder
from tests.encode.pictures import test_masks
from tests.encode.pictures.test_masks import grey, png, resolve

LEFT = np.zeros((48, 64), np.uint8)
LEFT[:, :32] = 255
"""White on the left."""
TOP = np.zeros((48, 64), np.uint8)
TOP[:24] = 255
FLAT = np.full((48, 64), 255, np.uint8)
PICTURE = grey(64, 48)


def saved(image, form="PNG", **options):
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def made(mask, picture, **more):
    """The stored mask of a picture of 64 x 48 pixels that is not scaled."""
    return test_masks.made(mask, picture, resolution=56, **more)


def rgba(colour, alpha):
    """A mask whose channels are all `colour`, with this alpha."""
    return np.stack([colour, colour, colour, alpha], axis=-1)


def of(data):
    """The levels of a mask."""
    return np.asarray(read_levels(data).grey)


def palette(**options):
    """A mask with a palette whose first colour is white and whose second is black."""
    image = Image.fromarray((LEFT == 0).astype(np.uint8), "L").copy()
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette([255, 255, 255, 0, 0, 0])
    return saved(image, **options)


def profiled(values, gamma):
    """A grey mask with a profile of this gamma, as paint programs write it; littleCMS has no writer of such, so its bytes are made here."""
    curve = b"curv\0\0\0\0\0\0\0\1" + round(gamma * 256).to_bytes(2, "big") + b"\0\0"
    white = b"XYZ \0\0\0\0" + b"".join(round(one * 65536).to_bytes(4, "big") for one in (0.9642, 1.0, 0.8249))
    text = b"desc\0\0\0\0" + (5).to_bytes(4, "big") + b"Grey\0" + bytes(78)
    parts, at, table = [(b"desc", text), (b"wtpt", white), (b"kTRC", curve)], 128 + 4 + 3 * 12, b""
    for name, body in parts:
        table += name + at.to_bytes(4, "big") + len(body).to_bytes(4, "big")
        at += len(body)
    head = at.to_bytes(4, "big") + b"lcms\2\x40\0\0mntrGRAYXYZ " + bytes(12) + b"acsp" + bytes(28)
    head += b"".join(round(one * 65536).to_bytes(4, "big") for one in (0.9642, 1.0, 0.8249))
    profile = head.ljust(128, b"\0") + (3).to_bytes(4, "big") + table + b"".join(body for _name, body in parts)
    read: Any = ImageCms.ImageCmsProfile(BytesIO(profile))
    assert read.profile.xcolor_space.strip() == "GRAY"
    return saved(Image.fromarray(values), icc_profile=profile)


ALPHA: dict[str, bytes] = {
    "white paint on nothing": png(rgba(FLAT, LEFT)),
    "white paint on nothing, whose colour is black": png(rgba(LEFT, LEFT)),
    "black with the mask in its alpha": png(rgba(np.zeros_like(FLAT), LEFT)),
    "red paint on nothing": png(np.stack([FLAT, FLAT * 0, FLAT * 0, LEFT], axis=-1)),
    "grey and alpha": saved(Image.merge("LA", [Image.fromarray(FLAT), Image.fromarray(LEFT)])),
    "a WebP": saved(Image.fromarray(rgba(FLAT, LEFT)), "WEBP", lossless=True, exact=True),
    "a TIFF": saved(Image.fromarray(rgba(LEFT, LEFT)), "TIFF"),
    "a palette with a transparent colour": palette(transparency=1),
    "a palette with an alpha for each colour": palette(transparency=bytes([255, 0])),
    "a GIF": palette(form="GIF", transparency=1),
    "grey with a transparent level": saved(Image.fromarray(FLAT - LEFT // 255), transparency=255),
}


@pytest.mark.parametrize("name", ALPHA)
def test_an_alpha_that_varies_is_the_mask(name):
    np.testing.assert_array_equal(of(ALPHA[name]), LEFT)
    expected = LEFT[::2, ::2]
    np.testing.assert_array_equal(made(ALPHA[name], PICTURE)[0], expected)


LUMINANCE: dict[str, bytes] = {
    "opaque": png(rgba(LEFT, FLAT)),
    "transparent everywhere": png(rgba(LEFT, FLAT * 0)),
    "half transparent everywhere": png(rgba(LEFT, FLAT // 2)),
    "grey": png(LEFT),
    "one bit": png(LEFT > 0),
    "one bit of a TIFF": saved(Image.fromarray(LEFT > 0), "TIFF", compression="group4"),
    "a palette": palette(),
    "16 bits": saved(Image.fromarray(LEFT.astype(np.uint16) * 257)),
    "16 bits of a TIFF": saved(Image.fromarray(LEFT.astype(np.uint16) * 257), "TIFF"),
    "rotated by EXIF": saved(Image.fromarray(LEFT).transpose(Image.Transpose.ROTATE_90), exif=Image.Exif()),
}
_turned = Image.Exif()
_turned[0x0112] = 6  # a viewer turns it by 90 degrees to the right
LUMINANCE["rotated by EXIF"] = saved(Image.fromarray(LEFT).transpose(Image.Transpose.ROTATE_90), exif=_turned)


@pytest.mark.parametrize("name", LUMINANCE)
def test_where_the_alpha_does_not_vary_the_luminance_is_the_mask(name):
    np.testing.assert_array_equal(of(LUMINANCE[name]), LEFT)
    np.testing.assert_array_equal(made(LUMINANCE[name], PICTURE)[0], LEFT[::2, ::2])


def test_a_jpeg_keeps_its_levels_about_and_a_tint_does_not_matter():
    tinted = np.stack([LEFT, LEFT, LEFT // 255 * 210], axis=-1)
    for data in (saved(Image.fromarray(LEFT), "JPEG"), saved(Image.fromarray(tinted), "JPEG")):
        assert np.abs(of(data).astype(int) - LEFT).max() <= 12


def test_the_levels_of_a_mask_are_numbers_that_no_profile_and_no_gamma_changes():
    values = np.repeat(np.arange(64, dtype=np.uint8)[None] * 4, 48, axis=0)
    data = profiled(values, 1.0)
    assert np.abs(np.asarray(images.decode(data).convert("L")).astype(int) - values).max() > 30  # a picture's colours do change
    np.testing.assert_array_equal(of(data), values)


CANNOT: dict[str, tuple[bytes, str]] = {
    "both vary": (png(rgba(TOP, LEFT)), "alpha varies, and so do its colours"),
    "a picture on nothing": (png(rgba(np.arange(48 * 64, dtype=np.uint8).reshape(48, 64), LEFT)), "alpha varies, and so do its colours"),
    "both vary in grey": (saved(Image.merge("LA", [Image.fromarray(TOP), Image.fromarray(LEFT)])), "alpha varies"),
    "0 and 1": (png(LEFT // 255), "values up to 1 of 255"),
    "0 and 1 in colours": (png(np.repeat(LEFT[..., None] // 255, 3, axis=2)), "values up to 1 of 255"),
    "0 and 1 in its alpha": (png(rgba(FLAT, LEFT // 255)), "values up to 1 of 255"),
    "1 everywhere": (png(FLAT // 255), "values up to 1 of 255"),
    "0 and 1 in 16 bits": (saved(Image.fromarray(LEFT.astype(np.uint16) // 255)), "values up to 1 of 65,535"),
    "0 to 255 in 16 bits": (saved(Image.fromarray(LEFT.astype(np.uint16))), "values up to 255 of 65,535"),
    "0 to 255 in 16 bits of a TIFF": (saved(Image.fromarray(LEFT.astype(np.uint16)), "TIFF"), "values up to 255 of 65,535"),
    "floating point": (saved(Image.fromarray(LEFT.astype(np.float32) / 255), "TIFF"), "no defined brightness"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_a_mask_that_cannot_be_told_is_refused_by_name(name):
    data, words = CANNOT[name]
    with pytest.raises(EncodeFailed, match=words):
        made(data, PICTURE)


def test_a_mask_that_is_black_everywhere_is_used_and_says_so():
    encoder = MaskEncoder(2)
    for mask, weight in ((LEFT * 0, 0), (LEFT, 1), (FLAT, 2)):
        prepared = encoder.prepare(resolve(png(mask), PICTURE, encoder))
        assert prepared.facts == {"weight": [weight]}
        assert prepared.payload.max() == mask.max()


def test_the_luminance_of_a_coloured_mask_counts_and_is_told():
    """Trainers differ: sd-scripts and diffusion-pipe read the red channel, others the luminance."""
    encoder = MaskEncoder(2)
    for mask, level in ((np.stack([LEFT, LEFT * 0, LEFT * 0], axis=-1), 76), (np.stack([LEFT * 0, LEFT, LEFT * 0], axis=-1), 150)):
        prepared = encoder.prepare(resolve(png(mask), PICTURE, encoder, resolution=56))
        assert prepared.facts == {"weight": [1], "coloured": [1]}
        np.testing.assert_array_equal(prepared.payload[0], LEFT[::2, ::2] // 255 * level)
    red_paint = encoder.prepare(resolve(ALPHA["red paint on nothing"], PICTURE, encoder))
    assert "coloured" not in red_paint.facts  # its alpha counts


@given(arrays(np.uint8, (5, 7)), arrays(np.uint8, (5, 7)), st.sampled_from([0, 3, 128, 255]))
def test_a_mask_is_its_alpha_or_its_luminance_or_is_refused(colour, alpha, level):
    """The law: what varies is the mask, and never both, and never less than 2 levels."""

    def read(mask):
        try:
            return of(png(mask))
        except EncodeFailed:
            return None

    flat = np.full_like(colour, level)
    as_mask = np.full_like(alpha, level) if (alpha == alpha[0, 0]).all() else alpha
    for expected, found in ((colour, read(rgba(colour, flat))), (as_mask, read(rgba(flat, alpha)))):
        assert (found is None) == (0 < expected.max() <= 1)
        assert found is None or (found == expected).all()


def _converted(image, mode):
    if mode != "LAB":
        return image.convert(mode)
    rgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    return ImageCms.profileToProfile(image.convert("RGB"), rgb, lab, outputMode="LAB")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "LAB", "I;16", "I", "F"])
@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG", "WEBP", "JPEG2000", "GIF", "BMP"])
def test_a_mask_of_any_mode_is_read_or_refused(mode, form):
    base = Image.fromarray(LEFT.astype(np.uint16) * 257 if mode == "I;16" else LEFT)
    try:
        data = saved(base if base.mode == mode else _converted(base, mode), form)
    except (OSError, ValueError):
        return  # no such file
    for read in (read_levels, read_alpha):
        with suppress(EncodeFailed):
            assert read(data).grey.mode == "L"


def test_the_mask_of_an_inpainting_model_is_read_by_the_same_rule():
    alpha, plain = ALPHA["black with the mask in its alpha"], png(LEFT)
    request = {"image": "m", "like": "p", "role": "mask", "resolution": 56, "step": 16}

    def seen(mask):
        read: Any = {"m": mask, "p": PICTURE}.__getitem__
        return Masked().read_files(request, read, "lanczos")

    np.testing.assert_array_equal(seen(alpha).shot.pixels(), seen(plain).shot.pixels())
    for encoder in (MaskEncoder(8, is_input=True), MaskEncoder(8)):
        one, other = (encoder.prepare(resolve(mask, PICTURE, encoder)).payload for mask in (alpha, plain))
        np.testing.assert_array_equal(one, other)
    with pytest.raises(EncodeFailed, match="up to 1 of 255"):
        seen(CANNOT["0 and 1"][0]).shot.pixels()


# A picture's own alpha


def test_the_alpha_of_a_picture_is_its_mask_where_that_is_asked_for():
    colours = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    cut, whole = png(np.concatenate([colours, LEFT[..., None]], axis=-1)), png(colours)
    own: dict[str, Any] = {"alpha": "mask", "image": "picture.png"}
    np.testing.assert_array_equal(made(b"", cut, **own)[0], LEFT[::2, ::2])
    np.testing.assert_array_equal(made(b"", cut, **own, flip=True)[0], LEFT[::2, ::-2])
    for plain in (whole, png(np.concatenate([colours, FLAT[..., None] // 3], axis=-1))):
        assert (made(b"", plain, **own) == 255).all()
    with pytest.raises(EncodeFailed, match="up to 1 of 255"):
        read_alpha(png(np.concatenate([colours, LEFT[..., None] // 255], axis=-1)))
    request = {"image": "p", "like": "p", "role": "mask", "resolution": 56, "step": 16, "alpha": "mask"}
    read: Any = {"p": cut}.__getitem__
    given = Masked().read_files(request, read, "lanczos").shot.pixels()[..., 3]
    np.testing.assert_array_equal(given, 255 - LEFT)  # of an inpainting model, what is opaque is painted anew
    with pytest.raises(EncodeFailed):  # without the option it is a mask like any other
        made(b"", cut, image="picture.png")
    assert (made(png(FLAT * 0), cut, alpha="mask") == 0).all()  # a mask of its own wins
