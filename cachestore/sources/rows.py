"""Read rows of manifests and metadata files as samples. `tables.py` knows the kinds of files; here are the columns."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, Final, cast

from cachestore.core.arguments import refuse_caption
from cachestore.core.errors import BadInput
from cachestore.core.inputs import CROP, OWN_CAPTION, SIZE, are_whole
from cachestore.core.keys import Json, digest_text
from cachestore.core.samples import IMAGE, ROLES, SHOWN, VIDEO, Sample
from cachestore.core.spelling import option
from cachestore.core.words import NAMED, first_of, misspelt
from cachestore.sources.animated import is_animated_path
from cachestore.sources.captions import CAPTION_SUFFIXES, captions_in, lines_of, normal, other_captions
from cachestore.sources.files import VIDEO_SUFFIXES
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks, taken
from cachestore.sources.tables import FILE_COLUMN, MetadataFile, Row, is_metadata, rows_of

_CAPTIONS: Final = ("caption", "text")
_FILES: Final = (FILE_COLUMN, "path", "file_names")
"""Other names of the picture column `image`, or of the video column `video`."""
_OF_ROLE: Final = ("_file_name", "_file_names")
"""How other names of a role's column end: `mask_file_name`."""
_MOST_COLUMNS: Final = 20
"""How many columns a message names at most."""
_KNOWN: Final = (*_CAPTIONS, *ROLES, *_FILES)
_EMPTY_IS_NONE: Final = frozenset({*ROLES, *_FILES, CROP, SIZE})
_BATCH_NAMES: Final = frozenset(
    {"latents", "prompt_embeds", "sample_id", "original_size", "crop_top_left", "target_size", *(f"{role}_latents" for role in SHOWN)}
)
_VIDEO_BATCH_NAMES: Final = frozenset({"num_frames", "fps"})
_FIRST_ROWS: Final = 300
"""Beside the pictures of so many rows another caption is looked for."""
_NAME_BYTES: Final = 255
"""The longest name of a file that file systems take."""
_PATH_BYTES: Final = 4096
"""The longest path that systems take, and the longest id."""
_LARGEST: Final = 10**19
_DEEPEST: Final = 50
"""How deep lists and objects in a column may lie in each other. Python's own limit depends on who reads them."""


def from_metadata(found: Sequence[MetadataFile], how: ListingOptions, remarks: Remarks) -> Iterator[Sample]:
    """Read the metadata of a folder or of its sub-folders. Of several files side by side the first is taken."""
    for one in found:
        others = {
            other.name: {sample.id: sample.captions for sample in _first_rows(other, how, one.below)}
            for other in one.others
            if other.parent == one.path.parent
        }
        for sample in from_manifest(one.path, how, remarks, one.below):
            remarks.compare(sample.id, sample.captions, one.path.name, lambda of=sample.id, among=others: _captions_of(of, among))
            yield sample


def _first_rows(path: Path, how: ListingOptions, below: str) -> Iterator[Sample]:
    with suppress(BadInput, OSError):
        yield from islice(from_manifest(path, how, Remarks(), below), _FIRST_ROWS)


def _captions_of(sample: str, others: Mapping[str, Mapping[str, tuple[str, ...]]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    return ((name, found[sample]) for name, found in others.items() if sample in found)


def from_manifest(path: Path, how: ListingOptions, remarks: Remarks, below: str = "") -> Iterator[Sample]:
    """Read a manifest or metadata file. A bad row fails alone. `below` is put before ids and references.

    Raises BadInput if it cannot be read.
    """
    needs_file, compared = is_metadata(path), 0
    is_cells = path.suffix.lower() in {".csv", ".tsv"}
    of_files = (*_FILES, IMAGE, VIDEO, *(f"{IMAGE}{end}" for end in _OF_ROLE))

    may_be_empty = {*_EMPTY_IS_NONE, *how.roles, *(f"{role}{end}" for role in (*ROLES, *how.roles) for end in _OF_ROLE)}

    def cells_of(row: Row) -> dict[str, Any]:
        # an empty cell of a reference, crop, size or own caption is left out, and a crop or size is parsed as a list
        cells = {name: value for name, value in row.items() if value or not (name in may_be_empty or name.startswith(OWN_CAPTION))}
        for column in cells.keys() & {CROP, SIZE}:
            with suppress(RecursionError, ValueError):
                cells[column] = json.loads(cells[column])
        return cells

    def parse(row: "Row | BadInput") -> tuple[Sample]:
        if isinstance(row, BadInput):
            raise row
        where = remarks.origin
        cells = cells_of(row) if is_cells else row
        if needs_file and not any(map(row.get, of_files)):
            raise BadInput(f"{where}: a row needs `{FILE_COLUMN}`; its columns are {_listed_columns(row)}")
        named = _with_files(named_row(cells, where, how), where, how.roles, path.parent if how.videos else None)
        check_row(named, where, row, how.roles)
        sample = from_row(_located(named, where, how.roles, below), where, how, remarks)
        note_columns(cells, remarks)
        return (sample,)

    try:
        rows = rows_of(path, ("id", *_KNOWN, *how.roles, CROP, SIZE, *filter(None, [how.caption_column])))
        for sample in taken(rows, parse, lambda row: [f"{below}{name}" for name in names_of(row)], remarks):
            if compared < _FIRST_ROWS and (shown := sample.images.get(IMAGE) or sample.images.get(VIDEO)):
                compared += 1
                beside = path.parent / shown[0].removeprefix(below)
                files = [beside.with_suffix(suffix) for suffix in CAPTION_SUFFIXES]
                remarks.compare(sample.id, sample.captions, path.name, other_captions(files, how, sample.id))
            yield sample
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; let this user read it") from error


def from_prompts(path: Path, remarks: Remarks) -> Iterator[Sample]:
    """Read a list of prompts, one on each line. Equal ones are one sample. A line that cannot be encoded fails alone."""
    seen: set[str] = set()

    def parse(line: "str | BadInput") -> Iterator[Sample]:
        if isinstance(line, BadInput):
            raise line
        prompt = line.strip()
        if prompt in seen:
            remarks.collapsed += 1
        elif prompt:
            refuse_caption(prompt, remarks.origin)
            seen.add(prompt)
            yield Sample(digest_text(prompt), captions=(prompt,))

    return taken(((f"{path}, line {number}", line) for number, line in lines_of(path)), parse, lambda _line: (), remarks)


def names_of(row: object) -> list[str]:
    """The id that a row asks for, else the file that it names; empty if it has neither, or none that may be an id."""
    if not isinstance(row, Mapping):
        return []
    cells = cast("Mapping[str, object]", row)
    given = cells.get("id")
    found = given if isinstance(given, int) and not isinstance(given, bool) and abs(given) < 1 << 64 else None
    several = (cast("list[object]", one) if isinstance(one, list) else [one] for one in map(cells.get, ("id", IMAGE, VIDEO, *_FILES)))
    name = str(found) if found is not None else next((one for some in several for one in some[:1] if isinstance(one, str) and one), "")
    with suppress(BadInput):
        _refuse_name(name, "")
        return [normal(name)] if name else []
    return []


def _refuse_name(name: str, what: str) -> None:
    if "\0" in name:
        raise BadInput(f"{what} has a NUL character in it ({name[:60]!r}): write it again")
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise BadInput(f"{what} has half a character in it ({name[:60]!r}): write the character again") from None
    if size > _PATH_BYTES:
        raise BadInput(f"{what} has {size:,} bytes, more than {_PATH_BYTES:,}: shorten it")


def refuse_reference(reference: str, where: str) -> None:
    """Raise BadInput for a reference that no system takes as a path."""
    if len(reference) <= _NAME_BYTES and reference.isascii() and "\0" not in reference:
        return
    _refuse_name(reference, f"{where}: the path")
    if len(reference) > _NAME_BYTES // 4 and (
        long := next((one for one in reference.split("/") if len(os.fsencode(one)) > _NAME_BYTES), "")
    ):
        raise BadInput(f"{where}: no system takes a name as long as {long[:60]!r}… in a path: shorten it")


def _located(row: Mapping[str, Any], where: str, roles: Sequence[str], below: str) -> Mapping[str, Any]:
    """The row with the references and the id of a file in the folder `below`. Raises BadInput for references that are no paths."""
    located: dict[str, Any] = {}
    for role in row.keys() & {*ROLES, *roles}:
        references = _texts(row[role], f"{where}: {role}")
        for reference in references:
            refuse_reference(reference, where)
        if below and references:
            located[role] = [one if os.path.isabs(one) or not one else f"{below}{one}" for one in references]  # noqa: PTH117
    if below and isinstance(row.get("id"), str | int):
        located["id"] = f"{below}{row['id']}"
    return {**row, **located} if located else row


def named_row(row: Mapping[str, Any], where: str, how: ListingOptions) -> Mapping[str, Any]:
    """The row with its caption under `caption`, whichever name the column has. Raises BadInput if two of the names differ in value."""
    if how.caption_column is None:
        return _under_one_name(row, _CAPTIONS, where)
    others = {column: value for column, value in row.items() if column not in {how.caption_column, "caption"}}
    return {**others, "caption": row.get(how.caption_column)}


def note_columns(row: Mapping[str, Any], remarks: Remarks) -> None:
    """Note the columns of a row that can be used: those of a row that fails say nothing of its source."""
    if not row.keys() <= remarks.columns.keys():
        remarks.columns.update(dict.fromkeys(row))


def _with_files(row: Mapping[str, Any], where: str, roles: Sequence[str], folder: Path | None) -> Mapping[str, Any]:
    """The row with its picture under `image`, or its video under `video`. The suffix decides for `file_name` and `path`.

    With the `folder` of the files, an animation is a video. Other roles may be called as in folders of Hugging Face: `mask_file_name`.
    """
    if any(column.endswith(_OF_ROLE) for column in row):
        for role in (*ROLES, *roles):
            row = _under_one_name(row, (role, *(f"{role}{end}" for end in _OF_ROLE)), where)
    if row.keys().isdisjoint(_FILES):
        return row
    references = [Path(reference) for column in _FILES for reference in _texts(row.get(column), f"{where}: {column}")]
    is_clip = any(one.suffix.lower() in VIDEO_SUFFIXES or (folder is not None and is_animated_path(folder / one)) for one in references)
    role = VIDEO if is_clip else IMAGE
    return _under_one_name(row, (role, *_FILES), where)


def check_row(named: Mapping[str, Any], where: str, row: Mapping[str, Any], roles: Sequence[str] = ()) -> None:
    """Raise BadInput for a row without file and caption: a column may be misspelt. `row` is the row as it was written."""
    if named.get("caption") in (None, []) and all(named.get(column) in (None, []) for column in (*ROLES, *roles)):
        raise BadInput(
            f"{where}: the row has neither a picture, a video nor a caption: its columns are {_listed_columns(row)}; the known"
            f" ones are {', '.join((*_KNOWN, *roles))}"
        )


def check_columns(where: Path | str, how: ListingOptions, remarks: Remarks, *, has_captions: bool, has_files: bool) -> None:
    """Add remarks if no row of a source has a caption or a picture, and on columns that are nearly called as known ones."""
    columns = _listed_columns(remarks.columns)
    if not has_captions:
        called = " or ".join(_CAPTIONS) if how.caption_column is None else how.caption_column
        remarks.uncaptioned.append(
            f"no row of {where} has a caption: its columns are {columns}; a caption's column is called {called}: rename it,"
            f" or pass {option('caption_column', 'NAME')}, or {option('caption', 'TEXT')} for what each sample gets ('' is the empty"
            " caption)"
        )
    if not has_files and remarks.columns.keys() - {"id", *_CAPTIONS}:  # captions alone are meant as such
        known = ", ".join(name for name in _KNOWN if name not in _CAPTIONS)
        remarks.pictureless.append(f"no row of {where} has a picture or a video: its columns are {columns}; the known ones are {known}")
    known = ("id", *_KNOWN, CROP, SIZE)
    slips = {column: meant for column in remarks.columns.keys() - known if (meant := misspelt(column, known))}
    remarks.misspelt += [f"{where} has a column {column!r}; did you mean {meant!r}?" for column, meant in sorted(slips.items())]


def _listed_columns(columns: Iterable[str]) -> str:
    return first_of(columns, _MOST_COLUMNS) or "none"


def _under_one_name(row: Mapping[str, Any], names: Sequence[str], where: str) -> Mapping[str, Any]:
    if row.keys().isdisjoint(names[1:]):
        return row
    found = {name: texts for name in names if (texts := _texts(row.get(name), f"{where}: {name}"))}
    if len(set(found.values())) > 1:
        one, other = list(found)[:2]
        examples = " and ".join(first_of([repr(text[:60]) for text in found[name]], 2) for name in (one, other))
        raise BadInput(f"{where}: {one} and {other} mean the same but differ ({examples}): remove one of the two, or rename it")
    named = {column: value for column, value in row.items() if column not in names}
    if found:
        named[names[0]] = list(next(iter(found.values())))
    return named


def from_row(row: Mapping[str, Any], where: str, how: ListingOptions, remarks: Remarks) -> Sample:
    """Make a sample from one row. Unknown columns become extra columns. `where` names the row in errors. Raises BadInput."""
    known = (*ROLES, *how.roles)
    captions = _texts(row.get("caption"), f"{where}: caption")
    images = {role: references for role in known if (references := _texts(row.get(role), f"{where}: {role}"))}
    if empty := next((role for role, references in images.items() if "" in references), None):
        raise BadInput(f"{where}: the reference in the column {empty} is empty; leave the column out, or write null")
    default = next((images[role][0] for role in (IMAGE, VIDEO) if role in images), digest_text("\n".join(captions)))
    sample = normal(_given_id(row.get("id"), where) or default)
    others = {column: value for column, value in row.items() if column not in {"id", "caption", *known}}
    extras = _with_framing(_kept(others, where), where, has_picture=IMAGE in images)
    ours = {*_BATCH_NAMES, *(f"{role}_latents" for role in how.roles), *(_VIDEO_BATCH_NAMES if VIDEO in images else ())}
    if taken := sorted(ours & extras.keys()):
        raise BadInput(f"{where}: a batch uses the name {taken[0]!r} itself; give the column another name")
    if how.caption_lines != "whole":
        of_row = f"{where}: the caption"
        captions = tuple(one for caption in captions for one in captions_in(caption, how.caption_lines, sample, remarks, of_row))
    else:
        for caption in captions:
            refuse_caption(caption, f"{where}: the caption")
        remarks.multi_line += [sample] if any("\n" in caption.strip() for caption in captions) else []
    if images.keys().isdisjoint((IMAGE, VIDEO)) and len(remarks.rows_without_picture) <= NAMED:
        remarks.rows_without_picture.append(f"{where} (columns {_listed_columns(row)})")
    return Sample(sample, images, captions, extras=extras)


def _given_id(given: object, where: str) -> str:
    if given is None:
        return ""
    if given == "" or isinstance(given, bool) or not isinstance(given, str | int):
        raise BadInput(f"{where}: an id must be a text or a whole number, not {given!r:.200}")
    if isinstance(given, int) and abs(given) >= _LARGEST:
        raise BadInput(f"{where}: the id is a number of more than 19 digits: shorten it, or write it as a text")
    _refuse_name(str(given), f"{where}: the id")
    return str(given)


def _kept(extras: Mapping[str, Any], where: str) -> Mapping[str, Json]:
    for column, value in extras.items():
        if isinstance(value, str):
            if column.startswith(OWN_CAPTION):
                refuse_caption(value, f"{where}: {column}")
        elif why := _why_not_kept(value):
            raise BadInput(f"{where}: the column {column!r} cannot be kept beside the sample ({why}); leave it out, or make it a text")
    return extras


def _why_not_kept(value: object, depth: int = 0) -> str:
    """Why a value of a column of the user's own cannot be kept beside the sample; empty if it can."""
    if isinstance(value, float):
        return "" if isfinite(value) else f"the number {value} is not finite"
    if value is None or isinstance(value, str | bool | int):
        return ""
    if not isinstance(value, list | dict):
        return f"a value of the type {type(value).__name__}"
    if depth >= _DEEPEST:
        return f"lists and objects are more than {_DEEPEST} deep in each other"
    fields: dict[object, object] = cast("dict[object, object]", value) if isinstance(value, dict) else {}
    if not all(isinstance(name, str) for name in fields):
        return "a name in it is no text"
    several = fields.values() if isinstance(value, dict) else cast("list[object]", value)
    return next(filter(None, (_why_not_kept(one, depth + 1) for one in several)), "")


def _with_framing(extras: Mapping[str, Json], where: str, *, has_picture: bool) -> dict[str, Json]:
    extras = {column: value for column, value in extras.items() if value is not None or column not in {CROP, SIZE}}
    size, crop = extras.get(SIZE), extras.get(CROP)
    if size is not None and not (are_whole(size, 2) and min(size) >= 1):
        raise BadInput(
            f"{where}: size must be [width, height] of the picture in whole pixels, not {size!r}; if this is your own column, rename it"
        )
    if crop is None:
        return extras
    if not are_whole(crop, 4) or not (0 <= crop[0] < crop[2] and 0 <= crop[1] < crop[3]):
        raise BadInput(f"{where}: crop must be [left, top, right, bottom] in whole pixels of the picture, not {crop!r}")
    if not has_picture:
        raise BadInput(f"{where}: crop is a part of the picture, but this row has no image: add it, or leave out crop")
    if size is not None and (crop[2] > size[0] or crop[3] > size[1]):
        raise BadInput(f"{where}: the crop {crop} reaches beyond the size {size}: correct one of the two")
    return extras


def _texts(value: object, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    values: list[object] = [*value] if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise BadInput(f"{where} must be a text or a list of texts, not {value!r:.200}")
    return tuple(map(str, values))
