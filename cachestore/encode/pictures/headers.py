"""Bounded readers for what Pillow does not tell of a picture's file: colour chunks and boxes, and metadata that is damaged.

Each takes the bytes of a file, whole or its beginning, and never raises on damaged ones: what cannot be read is not there.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from cachestore.encode.pictures.colours import LARGEST_PROFILE

PNG_START: Final = b"\x89PNG\r\n\x1a\n"
_MOST_PARTS: Final = 20_000
"""Chunks of a PNG, boxes of a file, segments of a JPEG: more are not looked at."""
_NEEDED: Final = frozenset({b"tRNS", b"acTL", b"fcTL", b"fdAT"})
"""Chunks beside the critical ones that decide pixels: damaged, they make the picture fail."""
_KEPT: Final = frozenset({b"cICP", b"iCCP", b"sRGB", b"gAMA", b"cHRM", b"eXIf"})
_TURNING_TEXTS: Final = (b"Raw profile type exif\0", b"Raw profile type APP1\0", b"XML:com.adobe.xmp\0")
"""The texts that may say how a picture is turned."""
_TIFF_TAGS: Final = frozenset(
    (254, *range(256, 263), 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, *range(320, 327), 330, 332, 334, 338, 339, 347)
) | frozenset((*range(512, 522), *range(529, 533)))
"""What decides the pixels of a TIFF: sizes, bits, compression, palette, strips and tiles, orientation, alpha, JPEG and YCbCr."""
_ICC_TAG: Final = 34675
_EXTRA_TAG: Final = 338
_LARGEST_TEXT: Final = 64 << 20
_WEBP_PIXELS: Final = frozenset({b"VP8X", b"ICCP", b"ALPH", b"VP8 ", b"VP8L", b"ANIM", b"ANMF"})
_BLOCK: Final = 1 << 20
"""The size from which Pillow refuses a text or profile that was compressed."""


class Chunk(NamedTuple):
    """A chunk of a PNG: its four letters, and where it begins, its data begins, and it ends."""

    kind: bytes
    start: int
    data: int
    end: int


def png_chunks(data: bytes) -> Iterator[Chunk]:
    """Yield the chunks of a PNG that are whole, until one that is not."""
    at = len(PNG_START)
    for _ in range(_MOST_PARTS):
        kind, end = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4], "big")
        if len(kind) < 4 or not kind.isalpha() or end > len(data):
            return
        yield Chunk(kind, at, at + 8, end)
        at = end


def _is_sound(data: bytes, chunk: Chunk) -> bool:
    return zlib.crc32(memoryview(data)[chunk.start + 4 : chunk.end - 4]) == int.from_bytes(data[chunk.end - 4 : chunk.end], "big")


def png_colours(data: bytes) -> dict[bytes, bytes]:
    """Return the content of each sound colour chunk (cICP, iCCP, sRGB, gAMA, cHRM) before the pixels."""
    found = dict[bytes, bytes]()
    for chunk in png_chunks(data):
        if chunk.kind == b"IDAT":
            break
        if chunk.kind in _KEPT and _is_sound(data, chunk):
            found.setdefault(chunk.kind, data[chunk.data : chunk.end - 4])
    return found


def png_profile(content: bytes) -> bytes | None:
    """Return the profile of an iCCP chunk; None if it is damaged or larger than any real one."""
    _name, _end, rest = content.partition(b"\0")
    return _inflated(rest[1:], LARGEST_PROFILE) if rest[:1] == b"\0" else None


def _inflated(data: bytes, most: int) -> bytes | None:
    with suppress(zlib.error):
        stream = zlib.decompressobj()
        made = stream.decompress(data, most)
        return made if stream.eof else None
    return None


def mended(data: bytes) -> bytes | None:
    """Return a picture's file without the metadata that may make Pillow fail; None if there is none that can be left out."""
    made = None
    if data.startswith(PNG_START):
        made = _mended_png(data)
    elif data.startswith(b"\xff\xd8"):
        made = _mended_jpeg(data)
    elif data[:4] in (b"II*\0", b"MM\0*"):
        made = _mended_tiff(data)
    elif data[4:8] == b"ftyp":  # libavif does not know an item of this type
        made = re.sub(rb"(infe\x02.{7})Exif", rb"\1none", data, flags=re.DOTALL)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        made = _mended_webp(data)
    return None if made == data else made


def _mended_png(data: bytes) -> bytes:
    """Leave out texts, times and the like, and what has a wrong checksum. Texts that may say how the picture is turned are unpacked."""
    kept, at, is_before = [PNG_START], len(PNG_START), True
    for chunk in png_chunks(data):
        is_critical = not chunk.kind[0] & 0x20
        if is_critical or chunk.kind in _NEEDED:
            kept.append(data[chunk.start : chunk.end])
        elif not is_before or _is_sound(data, chunk):  # Pillow checks none behind the pixels
            kept.append(_small(chunk.kind, data[chunk.data : chunk.end - 4]))
        is_before = is_before and chunk.kind != b"IDAT"
        at = chunk.end
    return b"".join([*kept, data[at:]])


def _small(kind: bytes, content: bytes) -> bytes:
    """Return a chunk that Pillow reads without a limit or an error; nothing if it has no say in pixels, or is damaged."""
    if kind == b"iCCP":
        profile = png_profile(content)
        return b"" if profile is None or len(profile) >= _BLOCK else _chunk(kind, content)
    if kind in _KEPT:
        least = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"cICP": 4}.get(kind, 0)
        return _chunk(kind, content) if len(content) >= least else b""
    if not content.startswith(_TURNING_TEXTS):
        return b""
    keyword, _end, rest = content.partition(b"\0")
    if kind == b"zTXt":
        text = _inflated(rest[1:], _LARGEST_TEXT)
        return b"" if text is None else _chunk(b"tEXt", keyword + b"\0" + text)
    if kind == b"iTXt" and rest[:1] == b"\1":
        language, translated, packed = [*rest[2:].split(b"\0", 2), b"", b""][:3]
        text = _inflated(packed, _LARGEST_TEXT)
        return b"" if text is None else _chunk(kind, keyword + b"\0\0\0" + language + b"\0" + translated + b"\0" + text)
    return _chunk(kind, content)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _mended_jpeg(data: bytes) -> bytes:
    least = {b"JFIF": 14, b"ICC_": 14, b"Adob": 12, b"MPF\0": 1 << 16, b"Phot": 1 << 16}
    kept, at = [data[:2]], 2
    for _ in range(_MOST_PARTS):
        marker, size = data[at : at + 2], int.from_bytes(data[at + 2 : at + 4], "big")
        if len(marker) < 2 or marker[0] != 0xFF or marker[1] == 0xDA or size < 2:
            break
        if not (0xE0 <= marker[1] <= 0xEF and size - 2 < least.get(data[at + 4 : at + 8], 0)):
            kept.append(data[at : at + 2 + size])
        at += 2 + size
    return b"".join([*kept, data[at:]])


def _mended_webp(data: bytes) -> bytes:
    """Leave out XMP, EXIF that does not begin as it should, and all that cannot be read behind the picture."""
    kept, at = list[bytes](), 12
    for _ in range(_MOST_PARTS):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + size
        if len(data) < end or len(kind) < 4:
            break
        if kind in _WEBP_PIXELS or (kind == b"EXIF" and data[at + 8 : end].startswith((b"II*\0", b"MM\0*", b"Exif\0\0"))):
            kept.append(data[at:end] + bytes(size & 1))
        at = end + (size & 1)
    if kept and kept[0].startswith(b"VP8X") and len(kept[0]) > 8:
        flags = kept[0][8] & ~0x0C | (0x08 if kept[-1].startswith(b"EXIF") else 0)
        kept[0] = kept[0][:8] + bytes([flags]) + kept[0][9:]
    body = b"".join(kept)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _tiff_entries(data: bytes) -> tuple[str, int, list[bytes]]:
    """Return the byte order of a TIFF, and the place and the tags of its first directory; no tags if it is damaged."""
    order = "<" if data[:1] == b"I" else ">"
    with suppress(struct.error):
        start = struct.unpack_from(f"{order}I", data, 4)[0]
        count = struct.unpack_from(f"{order}H", data, start)[0]
        entries = [data[at : at + 12] for at in range(start + 2, start + 2 + 12 * count, 12)]
        return order, start, entries if all(len(entry) == 12 for entry in entries) else []
    return order, 0, []


def _mended_tiff(data: bytes) -> bytes:
    """Leave out the tags of the first picture that do not decide its pixels, and a profile that is not inside of the file."""
    order, start, entries = _tiff_entries(data)
    kept = list[bytes]()
    for entry in entries:
        tag, kind, count, offset = struct.unpack(f"{order}HHII", entry)
        if tag in _TIFF_TAGS or (tag == _ICC_TAG and kind in (1, 7) and count > 4 and offset + count <= len(data)):
            kept.append(entry)
    end = start + 2 + 12 * len(entries)
    body = struct.pack(f"{order}H", len(kept)) + b"".join(kept) + data[end : end + 4]
    return data[:start] + body.ljust(end + 4 - start, b"\0") + data[end + 4 :] if entries else data


def tiff_without_alpha(data: bytes) -> bytes | None:
    """Return a TIFF in which alpha counts as a channel without meaning, so that no colour is divided by it; None if it has no alpha."""
    order, start, entries = _tiff_entries(data)
    for number, entry in enumerate(entries):
        tag, _kind, count, value = struct.unpack(f"{order}HHIH2x", entry)
        if tag == _EXTRA_TAG and count == 1 and value:
            at = start + 2 + 12 * number + 8
            return data[:at] + bytes(4) + data[at + 4 :]
    return None


class Boxed(NamedTuple):
    """What the colour boxes of a file say: an ICC profile, or code points of H.273, or the number of a colour space of JPEG 2000."""

    profile: bytes | None = None
    codes: tuple[int, int] | None = None
    space: int | None = None


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    for _ in range(_MOST_PARTS):
        if start + 8 > end:
            return
        size, kind, content = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8], start + 8
        if size == 1:
            size, content = int.from_bytes(data[start + 8 : start + 16], "big"), start + 16
        last = end if size == 0 else start + size
        if last > end or last < content:
            return
        yield kind, content, last
        start = last


def _inside(data: bytes, path: tuple[bytes, ...], start: int, end: int) -> tuple[int, int] | None:
    for kind, content, last in _boxes(data, start, end):
        if kind == path[0]:
            skipped = content + (4 if kind == b"meta" else 0)
            return (skipped, last) if len(path) == 1 else _inside(data, path[1:], skipped, last)
    return None


def jp2_colours(data: bytes) -> Boxed:
    """Return the first colour box of a JPEG 2000 file that is known (ISO/IEC 15444-1, I.5.3.3)."""
    header = _inside(data, (b"jp2h",), 0, len(data))
    for kind, start, end in _boxes(data, *header) if header else ():
        if kind == b"colr" and data[start] == 1 and end - start >= 7:
            return Boxed(space=int.from_bytes(data[start + 3 : start + 7], "big"))
        if kind == b"colr" and data[start] in (2, 3):
            return Boxed(profile=data[start + 3 : end])
        if kind == b"colr" and data[start] == 5 and end - start >= 9:
            return Boxed(codes=(int.from_bytes(data[start + 3 : start + 5], "big"), int.from_bytes(data[start + 5 : start + 7], "big")))
    return Boxed()


def heif_colours(data: bytes) -> Boxed:
    """Return the colours of an AVIF's or HEIC's main picture (ISO/IEC 23008-12), not those of its gain map or alpha."""
    meta = _inside(data, (b"meta",), 0, len(data))
    main = _inside(data, (b"pitm",), *meta) if meta else None
    listed = _inside(data, (b"iprp", b"ipco"), *meta) if meta else None
    paired = _inside(data, (b"iprp", b"ipma"), *meta) if meta else None
    if main is None or listed is None or paired is None:
        return _sequence_colours(data)
    item = int.from_bytes(data[main[0] + 4 : main[0] + (6 if data[main[0]] == 0 else 8)], "big")
    properties = list(_boxes(data, *listed))
    found = Boxed()
    with suppress(IndexError):  # a list that ends early
        for number in _properties_of(data, item, *paired):
            kind, start, end = properties[number - 1]
            found = _colour_box(data, start, end, found) if kind == b"colr" else found
    return found


def _properties_of(data: bytes, item: int, start: int, end: int) -> list[int]:
    """Return the numbers (from 1) of an item's properties, from the content of `ipma`."""
    wide, at = data[start + 3] & 1, start + 8
    for _ in range(min(int.from_bytes(data[start + 4 : start + 8], "big"), _MOST_PARTS)):
        size = 2 if data[start] < 1 else 4
        found, count, at = int.from_bytes(data[at : at + size], "big"), data[at + size], at + size + 1
        if found == item:
            step = 2 if wide else 1
            numbers = (int.from_bytes(data[one : one + step], "big") for one in range(at, min(at + count * step, end), step))
            return [number & (0x7FFF if wide else 0x7F) for number in numbers if number & (0x7FFF if wide else 0x7F)]
        at += count * (2 if wide else 1)
    return []


def _sequence_colours(data: bytes) -> Boxed:
    """Return the colours of the first track, for a file that has no main picture."""
    found = Boxed()
    entries = _inside(data, (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"), 0, len(data))
    for _kind, start, end in _boxes(data, entries[0] + 8, entries[1]) if entries else ():
        for kind, first, last in _boxes(data, start + 78, end):  # behind the fixed fields of a visual entry
            found = _colour_box(data, first, last, found) if kind == b"colr" else found
    return found


def _colour_box(data: bytes, start: int, end: int, found: Boxed) -> Boxed:
    """Add what a `colr` box says. A file may have two: a profile, and code points."""
    kind = data[start : start + 4]
    if kind in (b"prof", b"rICC"):
        return found._replace(profile=data[start + 4 : end])
    if kind == b"nclx" and end - start >= 10:
        primaries, transfer = struct.unpack_from(">HH", data, start + 4)
        return found._replace(codes=(primaries, transfer))
    return found


def bmp_profile(data: bytes) -> bytes | None:
    """Return the profile that a BMP of version 5 holds."""
    if len(data) < 138 or int.from_bytes(data[14:18], "little") < 124 or data[70:74] != b"DEBM":
        return None
    at, size = struct.unpack_from("<II", data, 126)
    return data[14 + at : 14 + at + min(size, LARGEST_PROFILE)] or None
