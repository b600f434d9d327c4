"""Caption files: decode their text, split it into lines, and read it as one caption or several."""

import codecs
import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.files.opening import FOREIGN_LIMIT_BYTES, open_foreign, read_foreign
from cachestore.source.reading import CaptionLines, Reading
from cachestore.source.remarks import Remarks

CAPTION_SUFFIXES: Final = (".txt", ".caption")
MANIFEST_BYTES: Final = 16 << 30
"""The most bytes of a manifest: more than fifty million rows have."""
_TEXT_BYTES: Final = 16 << 20
"""The most bytes of a caption file, or of one line of a manifest: far more than any text encoder reads."""


def side_car(files: Sequence[Path], how: Reading, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions in the first of these files that exists: none if there is no such file, the empty caption if it is empty."""
    for beside in files:
        try:
            text = read_text(beside, limit_bytes=_TEXT_BYTES)
        except OSError as error:
            if os.path.isdir(beside) or not os.path.lexists(beside):  # noqa: PTH112 - Path's raise if access is refused
                continue
            raise BadInput(f"the captions {beside} cannot be read: {error.strerror or error}; let this user read it") from error
        return captions_in(text, how.caption_lines, sample, remarks)
    return ()


def captions_in(text: str, caption_lines: CaptionLines, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions in the text of a file, at least one. Blank text is the empty caption."""
    # U+2028, form feeds and similar characters do not end a line: captions contain them, and JSON allows them inside a string.
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
    if caption_lines == "whole":
        remarks.multi_line += [sample] if len(lines) > 1 else []
        return (text.strip(),)
    return tuple(lines[:1] if caption_lines == "first" else lines) or ("",)


def read_text(path: Path, *, limit_bytes: int = FOREIGN_LIMIT_BYTES) -> str:
    """Read a UTF-8 file of at most so many bytes. Raises BadInput, OSError."""
    return decode_text(read_foreign(path, limit_bytes=limit_bytes), path)


def decode_text(raw: bytes, where: Path | str) -> str:
    """Decode UTF-8, with or without a byte order mark. Raises BadInput."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{where} is not UTF-8 (byte {error.start}): save it as UTF-8") from error


def normal(text: str) -> str:
    """Text in Unicode form NFC, as ids are written, so that one letter has one spelling."""
    return unicodedata.normalize("NFC", text)


def by_spelling(text: str) -> tuple[str, str]:
    """The key by which names are sorted."""
    return normal(text), text


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line of a UTF-8 file, from 1 on, without reading the whole file. Raises BadInput, OSError."""
    number = start = 0
    with open_foreign(path, limit_bytes=MANIFEST_BYTES) as file:
        while raw := file.readline(_TEXT_BYTES + 1):
            if len(raw) > _TEXT_BYTES:
                raise BadInput(f"{path}, line {number + 1}: more than {_TEXT_BYTES >> 20} MiB, which is no text of a sample; correct it")
            part = raw.removeprefix(codecs.BOM_UTF8) if start == 0 else raw
            try:
                text = part.decode("utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(f"{path} is not UTF-8 (byte {start + len(raw) - len(part) + error.start}): save it as UTF-8") from error
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                yield number, line
            start += len(raw)
