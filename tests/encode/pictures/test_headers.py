"""Metadata that is large or damaged fails no picture; damage to what decides pixels does."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import headers, images
from tests.encode import drawn_pictures
from tests.encode.drawn_pictures import SPACES, chunk, exif_of, icc_of, png, scene, shown, tiff
from tests.fakes import examples


def samples(channels=3):
    return scene(np.random.default_rng(7), channels, 256)


def picture(name, **options):
    return drawn_pictures.by_pillow(samples(), "RGB", name, **options)


def is_read(data, expected=None):
    expected = samples() if expected is None else expected
    made = np.asarray(images.decode(data)).astype(int)
    return images.measure(data) == made.shape[1::-1] and np.array_equal(made, expected)


def text_of(kind, keyword, text):
    packed = zlib.compress(text)
    return chunk(kind, keyword + {b"tEXt": b"\0" + text, b"zTXt": b"\0\0" + packed, b"iTXt": b"\0\1\0\0\0" + packed}[kind])


@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt"])
@pytest.mark.parametrize("is_late", [False, True])
def test_megabytes_of_text_in_a_png_fail_no_picture(kind, is_late):
    text = text_of(kind, b"workflow", b'{"nodes": []}' * 200_000)
    data = png(samples(), 8, 2, *([] if is_late else [text]))
    data = data[:-12] + (text if is_late else b"") + data[-12:]
    assert is_read(data)


def test_more_text_than_pillow_takes_in_all_fails_no_picture(monkeypatch):
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 1000)
    assert is_read(png(samples(), 8, 2, *(text_of(b"tEXt", b"prompt", b"x" * 400) for _ in range(9))))


def test_a_profile_that_unpacks_to_more_than_pillow_takes_is_used():
    profile = icc_of(SPACES["Display P3"])
    large = profile + bytes(3 << 20)
    large = struct.pack(">I", len(large)) + large[4:]
    data = png(samples(), 8, 2, chunk(b"iCCP", b"p\0\0" + zlib.compress(large)), text_of(b"zTXt", b"workflow", bytes(3 << 20)))
    assert np.abs(np.asarray(images.decode(data)) - shown(samples() / 255, SPACES["Display P3"])).max() < 1.5


OF_PILLOW = pytest.mark.filterwarnings("ignore::UserWarning")
"""Pillow warns of metadata that is damaged."""


ANCILLARY = [b"tEXt", b"zTXt", b"iTXt", b"tIME", b"eXIf", b"pHYs", b"iCCP", b"gAMA", b"cHRM", b"sRGB", b"cICP", b"bKGD", b"hIST", b"abCd"]


@pytest.mark.parametrize("kind", ANCILLARY)
@pytest.mark.parametrize("content", [b"", b"x", b"Comment\0\1broken", b"k\0\1\0\0\0nothing packed", bytes(40), b"\xff" * 40])
def test_an_ancillary_chunk_that_is_damaged_fails_no_png(kind, content):
    whole = chunk(kind, content)
    wrong = whole[:-1] + bytes([whole[-1] ^ 1])
    assert is_read(png(samples(), 8, 2, wrong))
    if kind not in (b"gAMA", b"cHRM", b"sRGB", b"cICP") or len(content) < 4:
        assert is_read(png(samples(), 8, 2, whole))
        data = png(samples(), 8, 2)
        assert is_read(data[:-12] + whole + data[-12:])


@pytest.mark.parametrize("kind", [b"IHDR", b"PLTE", b"IDAT", b"tRNS"])
def test_damage_to_what_decides_the_pixels_of_a_png_fails_it(kind):
    indexed = scene(np.random.default_rng(1), 1, 256)
    palette = np.random.default_rng(2).integers(0, 256, 768).astype(np.uint8).tobytes()
    data = bytearray(png(indexed, 8, 3, chunk(b"PLTE", palette), chunk(b"tRNS", bytes(256))))
    images.decode(bytes(data))
    data[data.index(kind) + 7] ^= 0x55
    with pytest.raises(EncodeFailed):
        images.decode(bytes(data))


def test_a_png_is_turned_though_another_chunk_of_it_is_damaged():
    broken = chunk(b"tEXt", b"Comment\0hello")[:-1] + b"\0"
    large = text_of(b"zTXt", b"workflow", bytes(2 << 20))
    xmp = b"<x:xmpmeta xmlns:tiff='t'><rdf:Description tiff:Orientation=\"6\"/></x:xmpmeta>"
    for other in (broken, large):
        for turning in (chunk(b"eXIf", exif_of(6)), text_of(b"iTXt", b"XML:com.adobe.xmp", xmp + b" " * (2 << 20))):
            assert is_read(png(samples(), 8, 2, other, turning), np.rot90(samples(), -1))


def segment(marker, content):
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


@OF_PILLOW
@pytest.mark.parametrize(
    "content",
    [
        b"Exif\0\0garbage instead of tags",
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\x7f",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(20),
        b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta \xff\xfe not closed",
        b"ICC_PROFILE\0",
        b"ICC_PROFILE\0\7\3of more than there are",
        b"MPF\0nonsense",
        b"Photoshop 3.0\x008BIM\4\4",
        b"Adobe",
        b"JFIF",
    ],
)
def test_a_segment_of_an_application_that_is_damaged_fails_no_jpeg(content):
    data = picture("JPEG", quality=90)
    plain = np.asarray(images.decode(data)).astype(int)
    marker = {b"JFIF": 0xE0, b"ICC_": 0xE2, b"MPF\0": 0xE2, b"Phot": 0xED, b"Adob": 0xEE}.get(content[:4], 0xE1)
    assert is_read(data[:2] + segment(marker, content) + data[2:], plain)


@OF_PILLOW
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_exif_that_is_damaged_fails_no_picture(name):
    options = {"WEBP": {"lossless": True}, "PNG": {}}.get(name, {"quality": 90})
    plain = np.asarray(images.decode(picture(name, **options))).astype(int)
    exif = Image.Exif()
    exif[0x010E] = "a description that stands at the end"
    whole = exif.tobytes()
    for damaged in (whole[:10] + b"\xff" * 20, whole[:6] + b"XX" + whole[8:], b"Exif\0\0" + b"\xff" * 60, whole[:-20]):
        if name == "AVIF":  # Pillow writes only what it can read
            data = picture(name, exif=whole, **options).replace(whole[6:], damaged[6:].ljust(len(whole) - 6, b"\0")[: len(whole) - 6])
        else:
            data = picture(name, exif=damaged, **options)
        assert is_read(data, plain), damaged


@pytest.mark.parametrize("kind", [b"EXIF", b"XMP "])
@pytest.mark.parametrize("size", [0, 1, 7, 10_000, 1 << 31, (1 << 32) - 1])
def test_a_chunk_of_metadata_whose_size_is_damaged_fails_no_webp(kind, size):
    data = picture("WEBP", lossless=True, exif=b"Exif\0\0" + exif_of(6), xmp=b"<x:xmpmeta/>" * 9)
    at = data.index(kind) + 4
    damaged = data[:at] + struct.pack("<I", size) + data[at + 4 :]
    upright = np.rot90(samples(), -1) if kind == b"XMP " else samples()
    assert is_read(damaged, upright)


def test_damage_to_the_pixels_of_a_webp_fails_it():
    data = picture("WEBP", lossless=True, exif=exif_of(6))
    at = data.index(b"VP8L") + 4
    for damaged in (data[: at + 400], data[:at] + struct.pack("<I", 300) + data[at + 4 :], data[: at + 4] + bytes(200) + data[at + 204 :]):
        with pytest.raises(EncodeFailed):
            images.decode(damaged)


@pytest.mark.parametrize("number", [282, 306, 315, 34665, 34853, 34675, 700])
@pytest.mark.parametrize("big", [False, True])
def test_a_tag_that_is_damaged_fails_no_tiff(number, big):
    data = tiff(samples(), 8, 2, big=big, profile=b"x" * 200)
    order = ">" if big else "<"
    at = data.index(struct.pack(f"{order}HH", 34675, 7))
    for kind, count, place in ((7, 1 << 30, 8), (7, 100, 1 << 31), (999, 5, 0), (2, 3, 1 << 30), (5, 1, len(data) - 2), (13, 2, 3)):
        damaged = data[:at] + struct.pack(f"{order}HHII", number, kind, count, place) + data[at + 12 :]
        assert is_read(damaged), (kind, count, place)


def test_a_tag_that_decides_the_pixels_of_a_tiff_still_fails_it():
    data = tiff(samples(), 8, 2)
    at = data.index(struct.pack("<HHI", 273, 4, 1))
    with pytest.raises(EncodeFailed):
        images.decode(data[: at + 8] + struct.pack("<I", 1 << 31) + data[at + 12 :])


@examples(60)
@given(st.sampled_from(["PNG", "JPEG", "TIFF", "WEBP", "AVIF", "JPEG2000", "BMP"]), st.data())
def test_readers_of_headers_take_any_bytes(name, data):
    raw = bytearray(picture(name)[: data.draw(st.integers(0, 900))])
    for _change in range(data.draw(st.integers(0, 8)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    whole = bytes(raw)
    for function in (headers.mended, headers.png_colours, headers.heif_colours, headers.jp2_colours, headers.bmp_profile):
        function(whole)
    headers.tiff_without_alpha(whole)


def test_a_damaged_file_is_not_mended_for_ever():
    data = png(samples(), 8, 2, text_of(b"tEXt", b"a", b"b"))
    mended = headers.mended(data)
    assert mended is not None
    assert headers.mended(mended) is None
    with Image.open(BytesIO(mended)) as opened:
        assert np.array_equal(np.asarray(opened), samples())
