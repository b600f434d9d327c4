"""`export`: a data set as the files that another trainer would have cached. Knows a store to read, and a folder to write.

A file is written under a temporary name beside its own, synced and renamed. What stands there already with the same bytes is left, and so
is any file that is not an earlier export's, unless `replace` is given. A note in the folder says which files are ours.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from cachestore.claims import scale_of
from cachestore.encode import families
from cachestore.errors import BadInput, CacheStoreError, EncodeFailed
from cachestore.files.checksum import digest_of
from cachestore.files.publish import write_outside
from cachestore.formats import simpletuner
from cachestore.formats.containers import write_npz, write_safetensors
from cachestore.formats.families import SIMPLETUNER, Family, family_named, family_of_pipeline
from cachestore.formats.matching import Named
from cachestore.formats.table import Format, Writing, format_named
from cachestore.formats.value import Contents, Latents, Raw, Text, as_array, cast, to_state
from cachestore.inputs import caption_key, cells_each
from cachestore.keys import Json, Key, Recipe
from cachestore.reader import Reader
from cachestore.samples import CAPTION, IMAGE
from cachestore.storage.catalog import Catalog, KeyColumn, list_generations, list_names, read_catalog

NOTE: Final = ".cachestore-export.json"
"""In an exported folder: which files are ours, and what was written to them."""
_FORMAT: Final = "cachestore-export/1"
_NAMED: Final = 1000


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What became of an export: what `cachestore export --json` prints."""

    format: str
    folder: str
    name: str
    generation: int
    samples: int
    written: int
    unchanged: int
    bytes: int
    """Of what was written."""
    foreign: tuple[str, ...] = ()
    """Files that are there with other bytes, and were left as they are not an earlier export's."""
    failures: tuple[Mapping[str, str], ...] = ()
    """What could not be exported: sample, encoder, reason."""
    casts: tuple[str, ...] = ()
    """Which tensors are not bit for bit what is stored, and how they were made of it; every other one is."""

    @property
    def complete(self) -> bool:
        """Whether each value of each complete sample stands in the folder."""
        return not self.foreign and not self.failures

    def as_json(self) -> dict[str, Json]:
        """The report as one JSON object."""
        listed = {name: list(getattr(self, name)) for name in ("foreign", "casts")}
        return {**asdict(self), "complete": self.complete, **listed, "failures": [dict(failure) for failure in self.failures]}


@dataclass(slots=True)
class _Tally:
    """What is counted on the way."""

    written: int = 0
    unchanged: int = 0
    size_bytes: int = 0
    foreign: list[str] = field(default_factory=list[str])
    failures: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    casts: dict[str, None] = field(default_factory=dict[str, None])

    def fail(self, sample: str, encoder: str, error: Exception) -> None:
        """Remember what could not be exported."""
        if len(self.failures) < _NAMED:
            self.failures.append({"sample": sample, "encoder": encoder, "reason": str(error)})


def export_cache(
    store: str | Path,
    name: str = "train",
    *,
    format: str,  # noqa: A002 - the word of the command
    folder: str | Path,
    generation: int | None = None,
    family: str | None = None,
    replace: bool = False,
) -> ExportReport:
    """Write a data set as another trainer caches it, so that the trainer finds everything cached.

    What is stored is written bit for bit where the format keeps its dtype and scaling state; `casts` of the report names all else. Of
    stored moments the sample of (seed 0, epoch 0, sample id) is written, or the mean where the trainer caches that. Run again, only what is
    missing or different is written.

    Args:
        store: the store's folder.
        name: of the data set.
        format: "sd-scripts", "simpletuner", "musubi" or "ai-toolkit".
        folder: where to; made if it does not exist. Of sd-scripts and ai-toolkit, which cache beside the pictures, it may be DATA itself.
        generation: of the data set; the newest by default.
        family: such as "flux", where the data set does not tell it: one of latents alone may be of several.
        replace: overwrite files that are not an earlier export's.

    Returns:
        What was written; samples that are not complete in the store are not exported, and count as `failures`.

    Raises:
        StoreNotFound: there is no store there.
        BadInput: no such data set, or one that the format has no form for; nothing was written.
        WriteFailed: the disk refuses; the same call goes on from there.
    """
    wanted = format_named(format)
    if wanted.writing is None:
        message = f"{format} can be imported, not exported: it throws away a cache that its own code did not make"
        raise BadInput(message)
    with Reader(store) as reader:
        catalog = _catalog(reader, name, generation)
        folder = Path(folder).absolute()
        tally = _Tally()
        export = _Export(reader, catalog, wanted, wanted.writing, tally, None if family is None else family_named(family))
        target = _Target(folder, tally, may_replace=replace)
        for row, encoder, path, contents in export.files():
            try:
                target.put(path, _encoded(wanted, contents))
            except EncodeFailed as error:
                tally.fail(catalog.ids[row], encoder, error)
        if (empty := export.empty_caption()) is not None:
            target.put(empty[0], _encoded(wanted, empty[1]))
        for path, value in export.side_data().items():
            target.put(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())
        target.close()
    return ExportReport(
        wanted.name,
        str(folder),
        catalog.name,
        catalog.generation,
        len(catalog),
        tally.written,
        tally.unchanged,
        tally.size_bytes,
        tuple(tally.foreign[:_NAMED]),
        tuple(tally.failures),
        tuple(tally.casts),
    )


def _catalog(reader: Reader, name: str, generation: int | None) -> Catalog:
    generations = list_generations(reader.layout, name)
    if not generations or (generation is not None and generation not in generations):
        names = ", ".join(map(repr, list_names(reader.layout))) or "none"
        what = f"data set {name!r}" if not generations else f"generation {generation} of {name!r}"
        message = f"{reader.layout.root} has no {what}; it has {names} (`cachestore stats` lists them)"
        raise BadInput(message)
    chosen = generations[-1] if generation is None else generation
    return read_catalog(reader.layout.catalog(name, chosen), generation=chosen)


def _encoded(wanted: Format, contents: Contents) -> bytes:
    """The bytes of a file. Raises EncodeFailed for what its container cannot hold."""
    match wanted.container:
        case "npz":
            return write_npz({name: as_array(raw) for name, raw in contents.tensors.items()})
        case "safetensors":
            return write_safetensors(contents.tensors, {name: str(value) for name, value in contents.values.items()})
        case "torch":
            from cachestore.formats.torch_files import write_torch

            return write_torch(contents.tensors)


# What is written


@dataclass(frozen=True)
class _Export:
    """A data set, looked at as another trainer's cache."""

    reader: Reader
    catalog: Catalog
    format: Format
    writing: Writing
    tally: _Tally
    said: Family | None
    """As the user says; None where the data set is to tell."""

    def files(self) -> Iterator[tuple[int, str, str, Contents]]:
        """(row, encoder, path, contents) of every file. Two that would have one name are failures, both named. Raises BadInput."""
        of = {column.encoder: self._family(column) for column in self._columns}
        self._check(of)
        seen: dict[str, tuple[str, tuple[Key, str]]] = {}
        for row in range(len(self.catalog)):
            for column in self._columns:
                for place in range(column.at[row], column.at[row + 1]):
                    number = place - column.at[row]
                    if not self._has_form(column, number):
                        continue
                    made = self._file(row, column, place, number, of[column.encoder])
                    if made is None:
                        continue
                    path, same, contents = made
                    sample, before = seen.setdefault(path, (self.catalog.ids[row], same))
                    if before != same:
                        error = EncodeFailed(f"{path} would be of {sample!r} too: {self.format.name} tells them apart by nothing else")
                        self.tally.fail(self.catalog.ids[row], column.encoder, error)
                    elif sample == self.catalog.ids[row] or column.role != CAPTION:
                        yield row, column.encoder, path, contents

    def _has_form(self, column: KeyColumn, number: int) -> bool:
        """Whether the format keeps a row's cell of this number: one caption a picture, but for SimpleTuner; and of no picture two crops."""
        if column.role == CAPTION:
            return number == 0 or self.format.name == SIMPLETUNER
        return number % cells_each(column.options) == 0

    def _file(self, row: int, column: KeyColumn, place: int, number: int, family: Family) -> tuple[str, tuple[Key, str], Contents] | None:
        """Path, what it is of, and contents of one cell; None where it failed, which is tallied."""
        sample, cell = self.catalog.ids[row], column.cell(place)
        try:
            if cell.key is None:
                message = "it was not made; `cachestore why` tells the reason"
                raise EncodeFailed(message)
            stored, meta = self.reader.get_raw([cell.key])[0], self.reader.describe(cell.key).meta
            named = self._named(row, number)
            recipe = self.catalog.recipes[column.fingerprint]
            if column.role == CAPTION:
                path, contents = self.writing.text(family, named, self._text(family, stored, meta))
            else:
                path, contents = self.writing.latents(family, named, self._latents(recipe, family, stored, meta, sample))
        except (CacheStoreError, OSError) as error:
            self.tally.fail(sample, column.encoder, error)
            return None
        return path, (cell.key, named.caption if column.role == CAPTION else ""), contents

    def empty_caption(self) -> tuple[str, Contents] | None:
        """Path and contents of the empty caption's text, to which SimpleTuner drops captions; one that cannot be read is tallied.

        None of other formats, without samples, where a sample has it already, and where the store does not hold it.
        """
        column = next((one for one in self._columns if one.role == CAPTION), None)
        if column is None or self.format.name != SIMPLETUNER or not len(self.catalog) or "" in self.catalog.captions:
            return None
        key = caption_key(column.fingerprint, "")
        if key not in self.reader:
            return None
        family = self._family(column)
        try:
            text = self._text(family, self.reader.get_raw([key])[0], self.reader.describe(key).meta)
        except (CacheStoreError, OSError) as error:
            self.tally.fail("", column.encoder, error)
            return None
        return self.writing.text(family, Named(""), text)

    def side_data(self) -> dict[str, object]:
        """Further files that a trainer needs, by their paths: SimpleTuner's of sizes and crops."""
        column = self._pictures
        if self.format.name != SIMPLETUNER or column is None:
            return {}
        root = self.catalog.request.get(column.encoder, {}).get("data", "")
        rows = [
            (str(Path(root) / (named := self._named(row, 0)).reference), named) for row in range(len(self.catalog)) if column.count(row)
        ]
        return dict(simpletuner.side_data(rows, self.catalog.name))

    @cached_property
    def _columns(self) -> tuple[KeyColumn, ...]:
        """The first column of captions, and the first of pictures."""
        found = (next((one for one in self.catalog.columns if one.role == role), None) for role in (CAPTION, IMAGE))
        return tuple(column for column in found if column is not None)

    @cached_property
    def _pictures(self) -> KeyColumn | None:
        return next((column for column in self._columns if column.role == IMAGE), None)

    def _check(self, of: Mapping[str, Family]) -> None:
        """Raise BadInput for a family that the format has no form for."""
        for column in self._columns:
            family = of[column.encoder]
            family.written_as(self.format.name)
            if column.role == CAPTION and self.format.name not in family.text:
                able = ", ".join(sorted(family.text)) or "none"
                message = f"text of {family.name} has no form in {self.format.name}; it has one in {able}"
                raise BadInput(message)

    def _family(self, column: KeyColumn) -> Family:
        """The family of a column's values: as imported, else of the text's pipeline. Raises BadInput where nothing tells it."""
        recipe = self.catalog.recipes[column.fingerprint]
        if self.said is not None:
            return self.said
        if "family" in recipe.make:
            return family_named(str(recipe.make["family"]))
        texts = [self.catalog.recipes[one.fingerprint] for one in self._columns if one.role == CAPTION]
        for one in (recipe, *texts):
            pipeline = one.make.get("pipeline")
            family = family_of_pipeline(str(pipeline)) if pipeline is not None else None
            if family is not None:
                return family
            if "family" in one.make:
                return family_named(str(one.make["family"]))
        return self._family_of_constants(recipe)

    def _family_of_constants(self, recipe: Recipe) -> Family:
        """The family whose VAE has these channels and constants, where the data set holds latents alone."""
        from cachestore.formats.families import FAMILIES

        scale, channels = scale_of(recipe.read), recipe.read.get("channels")
        alike = [
            family
            for family in FAMILIES
            if self.format.name in family.names
            and family.channels == channels
            and (family.scale.factor, family.scale.shift or None) == (scale.factor, scale.shift or None)
        ]
        if len(alike) != 1:
            message = f"nothing tells which family the latents of {self.catalog.name!r} are of, so pass --family"
            raise BadInput(message)
        return alike[0]

    def _named(self, row: int, number: int) -> Named:
        at, references = self.catalog.images.get(IMAGE, ([0] * (len(self.catalog) + 1), ()))
        reference = references[at[row]] if at[row] < at[row + 1] else self.catalog.ids[row]
        captions = self.catalog.row_captions(row)
        named = Named(reference, captions[number] if number < len(captions) else "")
        for column in self._columns:
            if column.count(row) == 0:
                continue
            facts = column.cell(column.at[row] + (number if column.role == CAPTION else 0)).facts
            told = {
                name: tuple(facts[name][: 4 if name == "crop" else 2]) for name in ("size", "bucket", "resized", "crop") if name in facts
            }
            told |= {"tokens": facts["tokens"][0]} if "tokens" in facts else {}
            named = replace(named, **told)  # pyright: ignore[reportArgumentType] - by the names and widths above
        return named

    def _text(self, family: Family, stored: Mapping[str, Raw], meta: Mapping[str, Any]) -> Text:
        """An entry's text, in the dtypes of the format. Raises EncodeFailed where it is not all of the family's."""
        own = families.stored_names(families.text_family(family.pipeline))
        if lacking := sorted(set(own) - set(stored)):
            message = f"it holds {', '.join(sorted(stored)) or 'nothing'}, and text of {family.name} needs {', '.join(lacking)} too"
            raise EncodeFailed(message)
        tensors = {name: self._cast(name, stored[name], self.writing.text_casts) for name in own}
        return Text(tensors, {name: raw for name, raw in stored.items() if name not in tensors}, _info(meta))

    def _latents(self, recipe: Recipe, family: Family, stored: Mapping[str, Raw], meta: Mapping[str, Any], sample: str) -> Latents:
        """An entry's latents, in the state and dtype of the format."""
        state = family.states[self.format.name]
        kind = str(recipe.read["stored"])
        others = {name: raw for name, raw in stored.items() if name != kind}
        if kind == "moments":
            raw = _drawn(stored[kind], sample if state.kind == "sample" else None)
            self._say("latents", f"{'drawn' if state.kind == 'sample' else 'the mean taken'} from stored moments")
        else:
            raw = stored[kind]
            if kind != state.kind:
                self._say("latents", f"a {kind}, where the trainer caches a {state.kind}")
        was_scaled = bool(recipe.read.get("scaled", False))
        if was_scaled != state.is_scaled:
            how = "normalised" if state.is_scaled else "normalising undone"
            self._say("latents", f"{how} in {'float64' if raw[0] == 'F64' else 'float32'}, then in the stored dtype {raw[0]}")
        made = to_state(raw, scale_of(recipe.read), was_scaled=was_scaled, is_scaled=state.is_scaled)
        tensor = self._cast("latents", cast(made, raw[0]), self.writing.latents_casts)
        return Latents(tensor, state.is_scaled, state.kind, others, {}, _info(meta))

    def _cast(self, name: str, raw: Raw, casts: Mapping[str, str]) -> Raw:
        dtype = casts.get(raw[0], raw[0])
        if dtype != raw[0]:
            self._say(
                name, f"{raw[0]} as {dtype}, which holds each of its numbers exactly" if raw[0] != "F64" else f"F64 rounded to {dtype}"
            )
        return cast(raw, dtype) if dtype != raw[0] else raw

    def _say(self, tensor: str, how: str) -> None:
        self.tally.casts[f"{tensor}: {how}"] = None


def _info(meta: Mapping[str, Any]) -> Mapping[str, Json]:
    """What the trainer wrote beside the tensors, where an entry was imported."""
    imported: Mapping[str, Any] = meta.get("imported") or {}
    return imported.get("info") or {}


def _drawn(moments: Raw, sample: str | None) -> Raw:
    """The raw latents that a data set draws of stored moments at seed 0 and epoch 0; their mean where no sample is named."""
    from cachestore.loading.latents import noise_for, read_latents
    from cachestore.loading.read_block import LatentsBlock
    from cachestore.tensors import to_raw, to_torch

    block = LatentsBlock("moments", 1, 1.0, None, None, None)
    dtype, shape, buffer = moments
    stored = to_torch({"moments": (dtype, shape, bytearray(buffer))})
    made = read_latents(block, "raw" if sample is None else "sample", stored, noise_for(0, 0, sample or ""))
    return to_raw({"latents": made})["latents"]


# Where it is written


@dataclass
class _Target:
    """A folder that belongs to somebody else as well."""

    folder: Path
    tally: _Tally
    may_replace: bool

    @cached_property
    def _ours(self) -> dict[str, str]:
        """Digests of what earlier exports wrote, by path; nothing where the note is missing or makes no sense."""
        try:
            body = json.loads((self.folder / NOTE).read_bytes())
            return {str(path): str(digest) for path, digest in body["files"].items()} if body["format"] == _FORMAT else {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def put(self, path: str, data: bytes) -> None:
        """Have a file hold these bytes, unless it is a stranger's. Raises WriteFailed, EncodeFailed for a path that leads elsewhere."""
        final = self._inside(path)
        digest = digest_of([data])
        found = _digest_there(final)
        if found == digest:
            self.tally.unchanged += 1
        elif found is not None and not self.may_replace and self._ours.get(path) != found:
            self.tally.foreign.append(path)
            return
        else:
            write_outside(final, data)
            self.tally.written += 1
            self.tally.size_bytes += len(data)
        self._ours[path] = digest

    def _inside(self, path: str) -> Path:
        """The file's place. A name from a catalog never leads out of the folder. Raises EncodeFailed."""
        final = Path(os.path.normpath(self.folder / path))
        if not final.is_relative_to(self.folder) or final == self.folder:
            message = f"{path} leads out of {self.folder}"
            raise EncodeFailed(message)
        return final

    def close(self) -> None:
        """Remember which files are ours."""
        body = {"format": _FORMAT, "files": dict(sorted(self._ours.items()))}
        write_outside(self.folder / NOTE, json.dumps(body, indent=0).encode())


def _digest_there(path: Path) -> str | None:
    """Digest of what stands at a path; None where nothing does, empty for what is no file."""
    try:
        return digest_of([path.read_bytes()])
    except FileNotFoundError:
        return None
    except OSError:
        return ""
