"""Captions in files: how their text is decoded, split into lines, and read as one caption or several."""

import codecs
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from cachestore.core.errors import BadInput
from cachestore.source.files import open_regular
from cachestore.source.remarks import Remarks

CaptionLines = Literal["whole", "each", "first"]

CAPTION_SUFFIXES: Final = (".txt", ".caption")


def side_car(path: Path, caption_lines: CaptionLines, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions in the file beside an image; none if there is no such file, the empty one if it is empty."""
    for suffix in CAPTION_SUFFIXES:
        beside = path.with_suffix(suffix)
        try:
            text = read_text(beside)
        except OSError as error:
            if os.path.isdir(beside) or not os.path.lexists(beside):  # noqa: PTH112 - Path's raise where it is refused
                continue
            raise BadInput(f"the captions {beside} cannot be read: {error.strerror or error}") from error
        return captions_in(text, caption_lines, sample, remarks)
    return ()


def captions_in(text: str, caption_lines: CaptionLines, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions that the text of a file is, at least one; blank text is the empty caption."""
    # U+2028, form feeds and the like end no line: captions hold them, and JSON allows them inside a text.
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
    if caption_lines == "whole":
        remarks.multi_line += [sample] if len(lines) > 1 else []
        return (text.strip(),)
    return tuple(lines[:1] if caption_lines == "first" else lines) or ("",)


def read_text(path: Path) -> str:
    """The text of a file. Raises BadInput, OSError."""
    with open_regular(path) as file:
        return decode_text(file.read(), path)


def decode_text(raw: bytes, where: Path | str) -> str:
    """Text of UTF-8, with or without a mark in front. Raises BadInput."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{where} is not UTF-8 (byte {error.start}): save it as UTF-8") from error


def normal(text: str) -> str:
    """Text as ids are spelled: NFC, so that one letter has one spelling."""
    return unicodedata.normalize("NFC", text)


def by_spelling(text: str) -> tuple[str, str]:
    """What names are sorted by."""
    return normal(text), text


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1 on, without holding the file."""
    number = start = 0
    with path.open("rb") as file:
        for raw in file:
            part = raw.removeprefix(codecs.BOM_UTF8) if start == 0 else raw
            try:
                text = part.decode("utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(f"{path} is not UTF-8 (byte {start + len(raw) - len(part) + error.start}): save it as UTF-8") from error
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                yield number, line
            start += len(raw)
