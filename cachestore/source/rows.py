"""Read rows of manifests (`.jsonl`) and metadata files (`metadata.jsonl`, `metadata.csv`) as samples."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from cachestore.core.errors import BadInput
from cachestore.core.inputs import CROP, OWN_CAPTION, SIZE, are_whole
from cachestore.core.keys import Json, digest_text
from cachestore.core.samples import IMAGE, ROLES, SHOWN, VIDEO, Sample
from cachestore.core.words import NAMED, first_of, misspelt
from cachestore.source.animated import is_animated_path
from cachestore.source.captions import captions_in, lines_of, normal, read_text
from cachestore.source.files import VIDEO_SUFFIXES
from cachestore.source.reading import Reading
from cachestore.source.remarks import Remarks, taken

METADATA: Final = ("metadata.jsonl", "metadata.csv")
_CAPTIONS: Final = ("caption", "text")
"""Names of the caption column."""
_FILES: Final = ("file_name", "path")
"""Other names of the picture column `image`, or of the video column `video`."""
_MOST_COLUMNS: Final = 20
"""How many columns a message names at most."""
_KNOWN: Final = (*_CAPTIONS, *ROLES, *_FILES)
_EMPTY_IS_NONE: Final = frozenset({*ROLES, *_FILES, CROP, SIZE})
_BATCH_NAMES: Final = frozenset(
    {"latents", "prompt_embeds", "sample_id", "original_size", "crop_top_left", "target_size", *(f"{role}_latents" for role in SHOWN)}
)
_VIDEO_BATCH_NAMES: Final = frozenset({"num_frames", "fps"})


def from_manifest(path: Path, how: Reading, remarks: Remarks) -> Iterator[Sample]:
    """Read the rows of a manifest or of a metadata file. In a metadata file every row must name a file. Raises BadInput."""
    rows = _csv_rows(path) if path.suffix == ".csv" else ((number, text) for number, text in lines_of(path) if text.strip())
    is_metadata = path.name in METADATA

    def parse(line: tuple[int, Any]) -> tuple[Sample]:
        number, content = line
        where = f"{path}, line {number}"
        row = _cells(cast("dict[Any, Any]", content), where, how.roles) if isinstance(content, dict) else json_row(content, where)
        if is_metadata and not any(row.get(column) for column in (*_FILES, IMAGE, VIDEO)):
            raise BadInput(f"{where}: a row needs `file_name`; its columns are {_listed_columns(row)}")
        named = _with_file(named_row(row, where, remarks), where, path.parent if how.videos else None)
        check_row(named, where, row, how.roles)
        return (from_row(named, where, how, remarks),)

    return taken(rows, parse, path)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise BadInput(f"{path}, line {rows.reader.line_num}: {error}; correct this line") from error


def _cells(row: Mapping[Any, Any], where: str, roles: Sequence[str]) -> dict[str, Any]:
    """The values of a CSV row. A crop or size is parsed as a list; an empty cell of a reference, crop, size or own caption is left out."""
    if None in row:
        raise BadInput(f"{where}: more cells than the first line has columns; put cells that contain commas into quotes")
    left_out = {column for column in row if column in {*_EMPTY_IS_NONE, *roles} or column.startswith(OWN_CAPTION)}
    cells = {column: value for column, value in row.items() if value or column not in left_out}
    for column in cells.keys() & {CROP, SIZE}:
        with suppress(RecursionError, ValueError):
            cells[column] = json.loads(cells[column])
    return cells


def json_row(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object; `where` names it in errors. Raises BadInput for other JSON, and for text that is not JSON."""
    try:
        row = json.loads(text, parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{where}: not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise BadInput(f"{where}: each row must be a JSON object such as {{'image': 'a.png'}}, not a {type(row).__name__}")
    return cast("dict[str, Any]", row)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def named_row(row: Mapping[str, Any], where: str, remarks: Remarks) -> Mapping[str, Any]:
    """The row with its caption under `caption`, whichever name the column has. Raises BadInput if two of the names differ in value."""
    if not row.keys() <= remarks.columns.keys():
        remarks.columns.update(dict.fromkeys(row))
    return _under_one_name(row, _CAPTIONS, where)


def _with_file(row: Mapping[str, Any], where: str, folder: Path | None) -> Mapping[str, Any]:
    """The row with its picture under `image`, or its video under `video`. The suffix decides for `file_name` and `path`.

    With the `folder` of the files, an animation is a video.
    """
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


def look_at_columns(where: Path | str, remarks: Remarks, *, has_captions: bool, has_files: bool) -> None:
    """Add remarks if no row of a source has a caption or a picture, and on columns that are nearly called as known ones."""
    columns = _listed_columns(remarks.columns)
    if not has_captions:
        remarks.uncaptioned.append(
            f"no row of {where} has a caption: its columns are {columns}; a caption's column is called {' or '.join(_CAPTIONS)}: rename it,"
            " or pass --caption TEXT for what each sample gets ('' is the empty caption)"
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
        raise BadInput(f"{where}: {one} and {other} mean the same but differ ({examples}): remove one, or give it another name")
    named = {column: value for column, value in row.items() if column not in names}
    if found:
        named[names[0]] = list(next(iter(found.values())))
    return named


def from_row(row: Mapping[str, Any], where: str, how: Reading, remarks: Remarks) -> Sample:
    """Make a sample from one row. Unknown columns become extra columns. `where` names the row in errors. Raises BadInput."""
    known = (*ROLES, *how.roles)
    captions = _texts(row.get("caption"), f"{where}: caption")
    images = {role: references for role in known if (references := _texts(row.get(role), f"{where}: {role}"))}
    if empty := next((role for role, references in images.items() if "" in references), None):
        raise BadInput(f"{where}: the reference in the column {empty} is empty; leave the column out, or write null")
    if images.keys().isdisjoint((IMAGE, VIDEO)) and len(remarks.rows_without_picture) <= NAMED:
        remarks.rows_without_picture.append(f"{where} (columns {_listed_columns(row)})")
    given = row.get("id")
    if given is not None and (given == "" or isinstance(given, bool) or not isinstance(given, str | int)):
        raise BadInput(f"{where}: an id must be a text or a whole number, not {given!r}")
    default = next((images[role][0] for role in (IMAGE, VIDEO) if role in images), digest_text("\n".join(captions)))
    others: dict[str, Json] = {column: value for column, value in row.items() if column not in {"id", "caption", *known}}
    extras = _with_framing(others, where, has_picture=IMAGE in images)
    ours = {*_BATCH_NAMES, *(f"{role}_latents" for role in how.roles), *(_VIDEO_BATCH_NAMES if VIDEO in images else ())}
    if taken := sorted(ours & extras.keys()):
        raise BadInput(f"{where}: a batch uses the name {taken[0]!r} itself; give the column another name")
    sample = normal(default if given is None else str(given))
    if how.caption_lines != "whole":
        captions = tuple(one for caption in captions for one in captions_in(caption, how.caption_lines, sample, remarks))
    elif any("\n" in caption.strip() for caption in captions):
        remarks.multi_line.append(sample)
    return Sample(sample, images, captions, extras=extras)


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
        raise BadInput(f"{where} must be a text or a list of texts, not {value!r}")
    return tuple(map(str, values))
