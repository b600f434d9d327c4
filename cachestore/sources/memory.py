"""List samples in the caller's memory: sequences of `Sample`, and data sets of Hugging Face.

No picture is kept here: each read asks the caller's sequence for it. A worker in another process gets the rows as a file (`write_rows`),
and the pictures through its source pipe.
"""

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from cachestore.core.arguments import as_many, as_mapping
from cachestore.core.errors import BadInput
from cachestore.core.inputs import Stat, stamp_of
from cachestore.core.keys import canonical, digest_parts
from cachestore.core.samples import BESIDE, IMAGE, ROLES, VIDEO, Sample
from cachestore.core.words import first_of
from cachestore.files.opening import open_foreign
from cachestore.files.paths import Layout
from cachestore.files.publish import make_folder
from cachestore.sources.files import Folder, Routed, SourceFiles
from cachestore.sources.listing import Listing, list_samples
from cachestore.sources.reading import PLAIN, ListingOptions
from cachestore.sources.remarks import Remarks, taken
from cachestore.sources.rows import check_row, from_row, named_row, names_of, refuse_reference

MEMORY: Final = "memory:"
"""Prefix of the reference of a picture that is not a file. Role, number and sample follow."""
_FORMAT: Final = "cachestore-rows/2"


@dataclass(frozen=True, slots=True)
class _PictureRef:
    row: int
    column: str
    number: int
    sample: str
    """The id of the sample in this row when it was listed."""


@dataclass(slots=True)
class Memory:
    """`SourceFiles` in the caller's memory. A part of their digest is the stamp of their stat records: equal ones are unchanged."""

    fetch: Callable[[_PictureRef], object]
    refs: dict[str, _PictureRef] = field(default_factory=dict[str, _PictureRef])
    _stats: dict[str, Stat] = field(default_factory=dict[str, Stat])

    def hold(self, refs: Mapping[str, _PictureRef]) -> None:
        """Add the pictures of a sample. Those of an earlier sample of the same id stay, as the later one fails."""
        for reference, ref in refs.items():
            self.refs.setdefault(reference, ref)

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes of a picture. One that is not a file yet is written as an uncompressed TIFF. Raises OSError."""
        found = self._found(reference)
        return Folder(Path.cwd()).read(str(found)) if isinstance(found, Path) else (found, self._stat_of(reference, found))

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """The picture as a file for seeking; for a path the file itself. Raises OSError."""
        found = self._found(reference)
        if isinstance(found, Path):
            return Folder(Path.cwd()).open(str(found))
        return nullcontext((io.BytesIO(found), self._stat_of(reference, found)))

    def stat(self, reference: str) -> Stat | None:
        """The stat record, or None if it is gone. Computed once: a sequence must not change during the work."""
        if reference in self._stats:
            return self._stats[reference]
        try:
            found = self._found(reference)
        except OSError:
            return None
        return Folder(Path.cwd()).stat(str(found)) if isinstance(found, Path) else self._stat_of(reference, found)

    def _stat_of(self, reference: str, data: bytes) -> Stat:
        self._stats[reference] = len(data), stamp_of(digest_parts("cachestore-memory", data))
        return self._stats[reference]

    def _found(self, reference: str) -> bytes | Path:
        if not reference.startswith(MEMORY):
            return Path(reference)
        if reference not in self.refs:
            raise FileNotFoundError(f"no sample has a picture {reference!r}: pass the same samples on every rank")
        return as_bytes(self.fetch(self.refs[reference]), reference)


def as_bytes(picture: Any, where: str) -> bytes | Path:
    """Return a picture as the bytes of a file or as a path. Takes bytes, paths, PIL images, and `{"bytes", "path"}`. Raises OSError."""
    stored: Mapping[str, Any] = cast("Mapping[str, Any]", picture) if isinstance(picture, Mapping) else {"bytes": picture}
    found: object = stored.get("path") if stored.get("bytes") is None else stored["bytes"]
    if isinstance(found, bytes | bytearray | memoryview):
        return bytes(cast("bytes", found))
    if isinstance(found, str | os.PathLike):
        return Path(cast("str | os.PathLike[str]", found))
    if _is_pil(found):
        return _as_tiff(found)
    raise OSError(f"{where} is {type(found).__name__}, but a picture must be bytes, a path, or a PIL image")


def _is_pil(picture: object) -> bool:
    return all(hasattr(picture, name) for name in ("save", "mode", "getexif", "has_transparency_data"))


def _as_tiff(picture: Any) -> bytes:
    """Write a PIL image without loss. The bytes are always the same; those of a PNG depend on the version of zlib."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(picture)
    if upright.has_transparency_data and upright.mode not in {"RGBA", "LA"}:
        upright = upright.convert("RGBA")
    buffer = io.BytesIO()
    try:
        upright.save(buffer, "TIFF", compression="raw", exif=b"")
    except (KeyError, ValueError) as error:
        raise OSError(
            f"a PIL image of mode {picture.mode!r} cannot be written: {error}; convert it, such as with picture.convert('RGB')"
        ) from error
    return buffer.getvalue()


def list_objects(data: object, how: ListingOptions = PLAIN) -> Listing:
    """List a sequence of `Sample`, or a Hugging Face data set with `Image(decode=False)`. Raises BadInput, also if two ids are equal."""
    if hasattr(data, "features") and hasattr(data, "column_names"):
        return _list_columns(data, how)
    if not isinstance(data, Sequence) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise BadInput(
            f"a source must be a path, a cs.Source, a sequence of cs.Sample or a Hugging Face data set, not {type(data).__name__}",
            option="data",
        )
    if isinstance(data, Mapping):
        names = first_of(map(repr, cast("Mapping[object, object]", data)), 5)
        raise BadInput(
            f"a source cannot be a mapping: choose one of its parts ({names}), or pass several as a list of cs.Source", option="data"
        )
    samples = cast("Sequence[Sample]", data)

    def fetch(ref: _PictureRef) -> object:
        sample = samples[ref.row]
        those = _several(sample.images.get(ref.column, ()))
        if sample.id != ref.sample or ref.number >= len(those):
            raise OSError(
                f"sample {ref.row} is {sample.id!r} with {len(those)} of {ref.column} now, but was {ref.sample!r} when the"
                " samples were listed: a sequence must give the same sample each time it is asked for an index"
            )
        return those[ref.number]

    memory = Memory(fetch)
    return list_samples(memory, partial(_from_samples, samples, memory, how), "the samples given", how)


def _several(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, tuple | list) else (value,)


def _from_samples(samples: Sequence[Sample], memory: Memory, how: ListingOptions, remarks: Remarks) -> Iterator[Sample]:
    def parse(row: int) -> Iterator[Sample]:
        sample = samples[row]
        if not isinstance(sample, Sample):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's
            advice = ": make each with cs.Sample(id, {'image': picture}, (caption,))" if row == 0 else ""  # once in the error for all rows
            raise BadInput(f"sample {row} is {type(sample).__name__}, not a cs.Sample{advice}")
        where = f"sample {row} ({sample.id!r:.200})"
        shown = as_mapping(f"{where}: images", sample.images, "a mapping from roles to pictures")
        refs: dict[str, _PictureRef] = {}
        images = {role: _references(refs, _PictureRef(row, role, 0, sample.id), value, where) for role, value in shown.items()}
        if unknown := next((role for role in images if role not in {*ROLES, *how.roles}), None):
            known = ", ".join((*ROLES, *how.roles))
            raise BadInput(f"{where}: images of the unknown role {unknown!r} cannot be encoded; roles are {known}; roles= names your own")
        captions = [sample.captions] if isinstance(sample.captions, str) else list(as_many(f"{where}: captions", sample.captions, "texts"))
        extras = as_mapping(f"{where}: extras", sample.extras, "a mapping of columns")
        sizes = {name: list(value) for name, value in (("size", sample.size), ("crop", sample.crop)) if value is not None}
        made = from_row({**extras, **sizes, **images, "id": sample.id, "caption": captions}, where, how, remarks)
        memory.hold(refs)
        yield made

    def names(row: int) -> list[str]:
        sample = samples[row]
        return names_of({"id": sample.id}) if isinstance(sample, Sample) else []  # pyright: ignore[reportUnnecessaryIsInstance] - as above

    return taken(((f"sample {row}", row) for row in range(len(samples))), parse, names, remarks)


def _references(refs: dict[str, _PictureRef], ref: _PictureRef, value: object, where: str) -> list[str]:
    """The references of a sample's pictures of one role; a path is its own reference. `ref` is that of the first picture."""
    found: list[str] = []
    for number, picture in enumerate(_several(value)):
        if isinstance(picture, str | os.PathLike):
            path = os.fsdecode(cast("str | os.PathLike[str]", picture))
            refuse_reference(path, where)
            found.append(f"./{path}" if path.startswith(MEMORY) else path)
        elif isinstance(picture, bytes | bytearray | memoryview | Mapping) or _is_pil(picture):
            found.append(_named(refs, replace(ref, number=number)))
        else:
            what = f"sample {ref.row} ({ref.sample!r}): {ref.column} is {type(picture).__name__}"
            raise BadInput(f"{what}; it must be a path, bytes or (of a picture) a PIL image, or several of them")
    return found


def _named(refs: dict[str, _PictureRef], ref: _PictureRef) -> str:
    reference = f"{MEMORY}{ref.column}.{ref.number}:{ref.sample}"
    refs[reference] = ref
    return reference


def _list_columns(data: Any, how: ListingOptions) -> Listing:
    if not hasattr(data, "__len__"):
        raise BadInput(
            "a streamed data set has no length, and may be different each time; load it (streaming=False), or save it as tars",
            option="data",
        )
    plain = data.with_format(None)
    columns = _picture_columns(plain.features, how.roles)
    pictures = {role: plain.select_columns([column]) for role, column in columns.items()}

    def fetch(ref: _PictureRef) -> object:
        return _several(pictures[ref.column][ref.row][columns[ref.column]])[ref.number]

    memory = Memory(fetch)
    others = [name for name in plain.column_names if name not in columns.values()]
    texts: Any = plain.select_columns(others) if others else [dict[str, Any]()] * len(plain)
    of_lists = {role for role, column in columns.items() if not hasattr(plain.features[column], "decode")}

    def parse(remarks: Remarks, numbered: "tuple[int, Mapping[str, Any] | BadInput]") -> Iterator[Sample]:
        row, values = numbered
        if isinstance(values, BadInput):
            raise values
        where, refs = remarks.origin, dict[str, _PictureRef]()
        found = dict(named_row(values, where, how))
        if found.get("id") is None:
            found["id"] = found.pop("file_name", None) or str(row)
        for role, column in columns.items():
            # Reads pictures only if a column holds several in a row.
            several: Any = pictures[role][row][column] if role in of_lists else (None,)
            found[role] = [_named(refs, _PictureRef(row, role, number, str(found["id"]))) for number in range(len(several or ()))]
        check_row(found, where, dict.fromkeys(plain.column_names), how.roles)
        made = from_row(found, where, how, remarks)
        memory.hold(refs)
        yield made

    def parse_all(remarks: Remarks) -> Iterator[Sample]:
        remarks.columns.update(dict.fromkeys(plain.column_names if len(plain) else ()))
        rows = ((f"row {row} of the data set", (row, values)) for row, values in enumerate(_rows_of(texts)))
        return taken(rows, partial(parse, remarks), lambda numbered: names_of(numbered[1]) or [str(numbered[0])], remarks)

    return list_samples(memory, parse_all, "the data set given", how)


def _rows_of(texts: Any) -> "Iterator[Mapping[str, Any] | BadInput]":
    """The rows of a data set; BadInput for one with text that is not UTF-8, which ends the iteration: the rest is read row by row."""
    row = 0
    try:
        for values in texts:
            yield values
            row += 1
    except UnicodeDecodeError:
        for number in range(row, len(texts)):
            try:
                values = texts[number]
            except UnicodeDecodeError:
                yield BadInput(f"row {number} of the data set: a text is not UTF-8; write it again")
                continue
            yield values


def _picture_columns(features: Mapping[str, Any], own: Sequence[str]) -> dict[str, str]:
    found = {name: kind for name, feature in features.items() if (kind := _picture_kind(feature)) is not None}
    for name, kind in found.items():
        if getattr(kind, "decode", False):
            raise BadInput(
                f"the column {name!r} decodes its files, but cachestore needs their bytes: data = data.cast_column({name!r},"
                f" datasets.{type(kind).__name__}(decode=False))",
                option="data",
            )
    roles: dict[str, str] = {}
    for role, kind_name, names in ((IMAGE, "Image", (IMAGE, *BESIDE, *own)), (VIDEO, "Video", (VIDEO,))):
        columns = [name for name, kind in found.items() if type(kind).__name__ == kind_name]
        roles |= {name: name for name in columns if name in names}
        others = [name for name in columns if name not in names]
        if role not in roles and len(others) == 1:
            roles[role] = others.pop()
        if others:
            raise BadInput(f"the column {others[0]!r} has {role}s: rename it to {' or '.join(names)}, or remove it")
    return roles


def _picture_kind(feature: Any) -> Any:
    listed = cast("list[Any]", feature) if isinstance(feature, list) else [getattr(feature, "feature", feature)]
    inner: Any = listed[0] if listed else None
    return inner if type(inner).__name__ in {"Image", "Video"} and hasattr(inner, "decode") else None


def write_rows(layout: Layout, listing: Listing, prefix: str) -> Path:
    """Write samples to a file under `tmp/`, which the caller removes. Workers ask for pictures in memory as `PREFIX/reference`."""
    make_folder(layout, layout.temporary)
    path, remarks = layout.new_temporary(), Remarks()
    samples = listing.samples(remarks)
    head = {"format": _FORMAT, "asked_as": prefix, "remarks": remarks.as_json()}
    with path.open("xb") as file:
        file.write(canonical(head) + b"\n")
        for sample in samples:
            images = {role: list(references) for role, references in sample.images.items()}
            file.write(canonical([sample.id, images, list(sample.captions), dict(sample.extras)]) + b"\n")
    return path


def list_rows(path: Path, files: SourceFiles | None) -> Listing:
    """List the samples of `write_rows` in a worker. Pictures in memory are asked for through `files`. Raises BadInput for another file."""
    with open_foreign(path) as file:
        head: Any = json.loads(file.readline() or b"null")
        if not isinstance(head, dict) or cast("dict[str, Any]", head).get("format") != _FORMAT:
            raise BadInput(f"{path} is not a list of samples that another process of cachestore wrote")
        rows = [json.loads(line) for line in file]
    body = cast("dict[str, Any]", head)

    def parse(remarks: Remarks) -> Iterator[Sample]:
        remarks.take(Remarks.from_json(body["remarks"]))
        for sample, images, captions, extras in rows:
            yield Sample(sample, {role: tuple(references) for role, references in images.items()}, tuple(captions), extras=extras)

    return list_samples(asked_files(files, body["asked_as"]), parse, path, PLAIN)


def asked_files(files: SourceFiles | None, prefix: str) -> SourceFiles:
    """The files of a source in another process's memory, in a worker: pictures in memory are asked for through `files`, by `prefix`."""

    def route(reference: str) -> tuple[SourceFiles, str]:
        if not reference.startswith(MEMORY):
            return folder, reference
        if files is None:
            raise OSError(f"{reference} is in the memory of another process, and there is no pipe to ask for it")
        return files, f"{prefix}/{reference}"

    folder = Folder(Path.cwd())
    return Routed(route)
