"""Captions in files: decode their text, split it into lines, and read it as one caption or several."""

import codecs
import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from cachestore.core.arguments import refuse_caption
from cachestore.core.errors import BadInput
from cachestore.core.words import first_of
from cachestore.files.opening import FOREIGN_LIMIT_BYTES, open_foreign, read_foreign
from cachestore.sources.files import leads_nowhere
from cachestore.sources.reading import CaptionLines, ListingOptions
from cachestore.sources.remarks import Remarks

CAPTION_SUFFIXES: Final = (".txt", ".caption")
JSON_SUFFIX: Final = ".json"
MANIFEST_BYTES: Final = 16 << 30
"""The most bytes of a manifest: more than fifty million rows have."""
TEXT_BYTES: Final = 16 << 20
"""The most bytes of a caption file, or of one line of a manifest: far more than any text encoder reads."""
_FIELDS: Final = ("caption", "text", "prompt")
"""The fields of a `.json` beside a picture that hold its captions."""
_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""The byte order marks of UTF-16 and UTF-32: that of UTF-32 LE begins with that of UTF-16 LE."""


def side_car(files: Sequence[Path], how: ListingOptions, sample: str, remarks: Remarks) -> tuple[str, ...]:
    """The captions in the first of these files that has any: none if no file has, the empty caption if a text file is empty.

    Adds a remark if another one of the files has other captions, and for a `.json` without a field of captions. Raises BadInput for a file
    that cannot be read: the sample then fails alone. Who names a field of the JSON means the JSON, which then comes first.
    """
    if how.caption_column is not None:
        files = sorted(files, key=lambda one: one.suffix.casefold() != ".json")
    for number, beside in enumerate(files):
        captions = _captions_in(beside, how, sample, remarks)
        if captions is not None:
            if others := [one for one in files[number + 1 :] if remarks.compares and os.path.lexists(one)]:
                remarks.compare(sample, captions, beside.name, other_captions(others, how, sample))
            return captions
    return ()


def other_captions(files: Sequence[Path], how: ListingOptions, sample: str) -> Callable[[], Iterator[tuple[str, tuple[str, ...]]]]:
    """Return a function that yields (name, captions) of each of these files that has captions. What cannot be read is left out."""

    def read() -> Iterator[tuple[str, tuple[str, ...]]]:
        for beside in files:
            with suppress(BadInput):
                if (captions := _captions_in(beside, how, sample, Remarks())) is not None:
                    yield beside.name, captions

    return read


def _captions_in(beside: Path, how: ListingOptions, sample: str, remarks: Remarks) -> tuple[str, ...] | None:
    """The captions of one file, at least one; None if there is no such file or no field of captions in it. Raises BadInput.

    A JSON has them in a known field or in `caption_column`: a text, or a list of texts. Without it a remark names the fields that it has.
    """
    try:
        text = read_text(beside, limit_bytes=TEXT_BYTES)
    except OSError as error:
        if not os.path.lexists(beside):
            return None
        is_link = leads_nowhere(beside)
        is_folder = os.path.isdir(beside)  # noqa: PTH112
        why = "it is a link that leads nowhere" if is_link else "it is a folder" if is_folder else error.strerror or str(error)
        cure = "mend or remove it" if is_link else "move it" if is_folder else "let this user read it"
        raise BadInput(f"the captions {beside} cannot be read: {why}; {cure}") from error
    if not beside.name.lower().endswith(JSON_SUFFIX):
        return captions_in(text, how.caption_lines, sample, remarks, beside)
    value = parse_json(text, str(beside))
    fields: Mapping[str, object] = cast("Mapping[str, object]", value) if isinstance(value, dict) else dict[str, object]()
    for name in _FIELDS if how.caption_column is None else (how.caption_column,):
        found = fields.get(name)
        texts: list[object] = [*cast("list[object]", found)] if isinstance(found, list) else [found]
        if texts and all(isinstance(text, str) for text in texts):
            return tuple(
                one for text in texts for one in captions_in(cast("str", text), how.caption_lines, sample, remarks, f"{beside}: {name}")
            )
    remarks.fieldless.append(f"{beside} with the fields {first_of(fields)}" if fields else f"{beside} without fields")
    return None


def captions_in(text: str, caption_lines: CaptionLines, sample: str, remarks: Remarks, where: Path | str = "") -> tuple[str, ...]:
    """The captions in the text of a file, at least one. Blank text is the empty caption. Raises BadInput for one that cannot be encoded."""
    # U+2028, form feeds and similar characters do not end a line: captions contain them, and JSON allows them inside a string.
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()]
    if caption_lines == "whole":
        remarks.multi_line += [sample] if len(lines) > 1 else []
        captions = (text.strip(),)
    else:
        captions = tuple(lines[:1] if caption_lines == "first" else lines) or ("",)
    for caption in captions:
        refuse_caption(caption, where or f"the caption of {sample!r}")
    return captions


def read_text(path: Path, *, limit_bytes: int = FOREIGN_LIMIT_BYTES) -> str:
    """Read a UTF-8 file of at most so many bytes. Raises BadInput, OSError."""
    return decode_text(read_foreign(path, limit_bytes=limit_bytes), path)


def decode_text(raw: bytes, where: Path | str) -> str:
    """Decode UTF-8, with or without a byte order mark. Raises BadInput."""
    refuse_marks(raw, where)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{where} is not UTF-8 (byte {error.start}): save it as UTF-8") from error


def refuse_marks(raw: bytes, where: Path | str) -> None:
    """Raise BadInput for text that begins with the byte order mark of UTF-16 or UTF-32."""
    if raw.startswith(_MARKS):
        raise BadInput(f"{where} is UTF-16 or UTF-32, as its byte order mark says: save it as UTF-8")


def parse_json(text: str, where: str) -> Any:
    """Parse JSON, of which no number is infinite or NaN. Raises BadInput."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{where}: not JSON ({error}): correct it") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def normal(text: str) -> str:
    """Text in Unicode form NFC, as ids are written, so that one letter has one spelling."""
    return unicodedata.normalize("NFC", text)


def folded(text: str) -> str:
    """Return a name in the form in which names are compared: NFC, in small letters."""
    return text.lower() if text.isascii() else normal(text).casefold()


def by_spelling(text: str) -> tuple[str, str]:
    """The key by which names are sorted."""
    return normal(text), text


def lines_of(path: Path) -> Iterator[tuple[int, "str | BadInput"]]:
    """Yield (number, text) of each line of a UTF-8 file, or the BadInput that says why it cannot be read. Raises BadInput, OSError."""
    number = start = 0
    with open_foreign(path, limit_bytes=MANIFEST_BYTES) as file:
        while raw := file.readline(TEXT_BYTES + 1):
            if start == 0:
                refuse_marks(raw, path)
            part = raw.removeprefix(codecs.BOM_UTF8) if start == 0 else raw
            first = start + len(raw) - len(part)
            start += len(raw)
            if len(raw) > TEXT_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(TEXT_BYTES)
                    start += len(raw)
                number += 1
                yield number, BadInput(f"{path}, line {number}: more than {TEXT_BYTES >> 20} MiB, which is no text of a sample; correct it")
                continue
            try:
                text = part.decode("utf-8")
            except UnicodeDecodeError as error:
                number += 1
                yield number, BadInput(f"{path}, line {number}: it is not UTF-8 (byte {first + error.start} of the file): save it as UTF-8")
                continue
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                yield number, line
