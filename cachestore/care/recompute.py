"""`verify --recompute`: encode some entries again, and compare them with the stored ones."""

import json
import os
import random
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, BinaryIO, TypeVar

from cachestore.care.checks import StoreToCheck
from cachestore.care.moved import NewPaths, check_source_names, request_at
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed, RecipeMismatch
from cachestore.core.forked import in_one_thread
from cachestore.core.inputs import cells_each, combined_digest, options_for, own_captions, request_for
from cachestore.core.keys import Json, Key, Recipe, canonical
from cachestore.core.samples import CAPTION, images_of
from cachestore.core.spelling import option
from cachestore.core.tensors import to_raw
from cachestore.core.words import first_of, plural
from cachestore.encode.batching.batches import Batches
from cachestore.encode.batching.environment import library_defaults
from cachestore.encode.batching.unit import Encoder, Resolved
from cachestore.files.paths import Layout
from cachestore.jobs.plan.encoders import encoders_of
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.planning import files_of_request
from cachestore.jobs.share.workers import host_name
from cachestore.jobs.start.declared_model import declared_encoder, find_declared_difference, is_imported
from cachestore.sources.combined import files_of
from cachestore.sources.files import Files
from cachestore.store.format.catalog import MADE, NO_INPUT, Catalog, KeyColumn, list_names
from cachestore.store.format.findings import HARMLESS, DamagedEntry, Finding, one_each
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import Snapshot
from cachestore.store.read.unfinished import list_unfinished
from cachestore.store.write.model_digests import load_digests

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell of a key column whose entry may be encoded again."""

    key: Key
    segment: str
    catalog: Catalog
    column: KeyColumn
    row: int
    index: int
    """The index of the cell in its column."""

    @property
    def sample(self) -> str:
        return self.catalog.ids[self.row]

    @property
    def request(self) -> Mapping[str, Json]:
        """The request to the encoder, as in the plan."""
        role, each = self.column.role, cells_each(self.column.options)
        number, variant = divmod(self.index - self.column.at[self.row], each)
        images = {name: references[at[self.row] : at[self.row + 1]] for name, (at, references) in self.catalog.images.items()}
        value = (self.catalog.row_captions(self.row) if role == CAPTION else images_of(images, role))[number]
        extras: Mapping[str, Json] = json.loads(self.catalog.extras[self.row])
        options = options_for(self.column.options, extras)
        request = request_for(role, options, value, images, variant, captions=own_captions(extras))
        if not is_imported(self.recipe):
            return request
        facts = self.column.cell(self.index).facts
        return {**request, "key": str(self.key), **{name: list(facts.get(name, ())) for name in ("bucket", "resized", "crop", "start")}}

    @property
    def recipe(self) -> Recipe:
        return self.catalog.recipes[self.column.fingerprint]


@dataclass(frozen=True, slots=True)
class _Maker:
    """The encoder of some columns, and the files that it reads. Implements `unit.Read`."""

    encoder: Encoder
    files: Files

    def __call__(self, reference: str, /) -> bytes:
        return self.files.read(reference)[0]

    @contextmanager
    def open(self, reference: str) -> Generator[BinaryIO]:
        with self.files.open(reference) as (file, _stat):
            yield file


@dataclass(slots=True)
class _Tally:
    """The results for the chosen entries: equal ones, samples that could not be compared, and findings."""

    equal: int = 0
    gone: list[str] = field(default_factory=list[str])
    changed: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])
    why_refused: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])

    def remarks(self) -> list[str]:
        reasons = [
            (self.gone, f", as their source is missing ({first_of(self.gone)}); pass {option('source')} with its new path"),
            (self.changed, f", as their file has changed ({first_of(self.changed)})"),
            (self.refused, f" ({first_of(self.refused)}): {self.why_refused}"),
        ]
        return [f"{plural(len(samples), 'entry')} could not be encoded again{why}" for samples, why in reasons if samples]

    def refuse(self, cell: _Cell, why: str) -> None:
        self.refused.append(cell.sample)
        self.why_refused = self.why_refused or why


class Recomputation:
    """Encodes some entries again, as a check of `verify`."""

    def __init__(self, layout: Layout, name: str | None, moved: NewPaths, count: int, seed: int) -> None:
        """Find the models, but load no weights. Raises RecipeMismatch if one has changed, and BadInput if one is not found."""
        self._count, self._seed = count, seed
        self.counts: dict[str, Json] = {}
        """What became of the chosen entries, for the report."""
        with library_defaults(os.environ):
            names = [each for each in list_names(layout) if name in (None, each)]
            self._catalogs = [catalog for each in names if (catalog := newest_catalog(layout, each)) is not None]
            check_source_names(self._catalogs, moved.source)
            self._makers, self._unknown = _find_makers(layout, self._catalogs, moved)

    def check(self, store: StoreToCheck) -> list[Finding]:
        """Choose entries, encode them again, and compare. Raises BadInput if no entry of a sound store can be encoded again."""
        groups = [
            [
                _segments_of(catalog, column, store.snapshot)
                for number, column in enumerate(catalog.columns)
                if (catalog.name, number) in self._makers
            ]
            for catalog in self._catalogs
        ]
        chosen = choose(groups, self._count, self._seed)
        entries = sum(segment.entries for segment in store.segments)
        if not chosen and entries and all(finding.kind in HARMLESS for finding in store.findings):
            why = [*self._unknown, *(unfinished.in_words(store.layout) for unfinished in list_unfinished(store.layout))]
            none = f"none of {plural(entries, 'entry')} in {store.layout.root} can be encoded again and compared"
            without = f"without {option('recompute')}, `verify` checks the stored bytes"
            raise BadInput(f"{none}: {'; '.join(why) or 'no data set has them'}; {without}", option="recompute")
        with library_defaults(os.environ):
            tally = _remake_all(store.layout, chosen, self._makers)
        self.counts = {
            "asked": self._count,
            "chosen": len(chosen),
            "of": len({cell.key for columns in groups for segments in columns for cells in segments for cell in cells}),
            "seed": self._seed,
            "equal": tally.equal,
            "wrong": sum(finding.kind == "wrong-value" for finding in tally.findings),
            "source_gone": len(tally.gone),
            "source_changed": len(tally.changed),
            "refused": len(tally.refused),
            "remarks": [*self._unknown, *tally.remarks()],
        }
        reported = store.reported_keys()
        return one_each(finding for finding in tally.findings if finding.kind == "wrong-value" or finding.key not in reported)


_ColumnName = tuple[str, int]
"""The name of a catalog and the number of one of its key columns."""


def _find_makers(layout: Layout, catalogs: Sequence[Catalog], moved: NewPaths) -> tuple[dict[_ColumnName, _Maker], list[str]]:
    """Return what encodes each column again, and remarks on columns for which that is not known. Loads no weights.

    Raises RecipeMismatch if a model has changed, and BadInput if it is not found.
    """
    known = load_digests(layout, host_name())
    by_request: dict[bytes, tuple[Encoder, ...]] = {}
    makers: dict[_ColumnName, _Maker] = {}
    unknown = [f"the data set {one.name!r} was not checked: it was {MADE[one.made]}" for one in catalogs if not one.has_sources]
    with_sources = [catalog for catalog in catalogs if catalog.has_sources]
    columns = [(catalog, number, column) for catalog in with_sources for number, column in enumerate(catalog.columns)]
    for catalog, number, column in columns:
        what = f"{column.encoder} of the data set {catalog.name!r}"
        before = catalog.recipes[column.fingerprint]
        try:
            if is_imported(before):
                makers[catalog.name, number] = _declared_maker(layout, catalog, column, moved, known)
                continue
            request = PrecomputeRequest.from_hints(catalog.request.get(column.encoder, {}), store=str(layout.root))
            request = replace(request_at(request, moved), encode=request.made_by([column.encoder]))
        except RecipeMismatch:
            raise
        except BadInput as error:
            unknown.append(f"{what} was not checked: {error}")
            continue
        name = canonical(request.hints())
        if name not in by_request:
            by_request[name] = encoders_of(request, known)
        encoders = {encoder.recipe.fingerprint: encoder for encoder in reversed(by_request[name])}
        if column.fingerprint not in encoders:
            of_its_kind = (encoder.recipe for encoder in by_request[name] if encoder.recipe.encoder == column.encoder)
            now = next(of_its_kind, Recipe(column.encoder))
            raise _another_model(f"{request.model} is not the model that {what} was made with", before.make, now.make)
        makers[catalog.name, number] = _Maker(encoders[column.fingerprint], files_of_request(request))
    return makers, unknown


def _declared_maker(layout: Layout, catalog: Catalog, column: KeyColumn, moved: NewPaths, known: MutableMapping[str, str]) -> _Maker:
    """Return the declared model of an imported column. Raises BadInput if there is none, RecipeMismatch if another one was found."""
    hints = {**catalog.request.get(column.encoder, {}), **moved.models, **moved.data}
    encoder, declared = declared_encoder(catalog.recipes[column.fingerprint], hints, known, store=str(layout.root))
    now = encoder.encoder.recipe
    if declared is not None and Recipe(column.encoder, declared).fingerprint != now.fingerprint:
        made = f"{column.encoder} of the data set {catalog.name!r} is declared to be from"
        raise _another_model(f"{hints['model']} is not the model that {made}", declared, now.make)
    return _Maker(encoder, files_of(str(hints["data"])))


def _another_model(what: str, before: Mapping[str, Json], now: Mapping[str, Json]) -> RecipeMismatch:
    files = (before.get("files", {}), now.get("files", {}))
    names = [f"other bytes in {name}" for name in sorted({*files[0], *files[1]}) if files[0].get(name) != files[1].get(name)]
    names += [f"another {name}" for name in sorted({*before, *now} - {"files"}) if before.get(name) != now.get(name)]
    others = f"{option('vae')}, {option('text_encoder')}"
    advice = f"nothing was encoded; pass {option('model')} (or {others}) with the right one"
    return RecipeMismatch(f"{what} ({first_of(names)}); {advice}", option="model")


def _segments_of(catalog: Catalog, column: KeyColumn, snapshot: Snapshot) -> list[list[_Cell]]:
    """Group a column's entries that are present by segment, each once."""
    cells: dict[Key, tuple[int, int]] = {}
    for row in range(len(catalog)):
        for number, key in enumerate(column.row_keys(row)):
            if key is not None:
                cells.setdefault(key, (row, column.at[row] + number))
    segments: dict[str, list[_Cell]] = {}
    for (key, (row, index)), found in zip(cells.items(), snapshot.find(list(cells)), strict=True):
        if found:
            digest = found[0].segment.digest
            segments.setdefault(digest, []).append(_Cell(key, digest, catalog, column, row, index))
    return [segments[digest] for digest in sorted(segments)]


def choose(groups: Sequence[Sequence[Sequence[Sequence[_Cell]]]], count: int, seed: int) -> list[_Cell]:
    """Sample up to `count` cells with distinct keys: evenly from catalogs, then from their columns, then from segments."""
    draw = random.Random(seed)

    def shuffled(items: Sequence[T]) -> list[T]:
        return draw.sample(items, len(items))

    turns = _in_turn(_in_turn(_in_turn(map(shuffled, shuffled(segments))) for segments in columns) for columns in groups)
    chosen: dict[Key, _Cell] = {}
    for cell in turns:
        if len(chosen) == count:
            break
        chosen.setdefault(cell.key, cell)
    return list(chosen.values())


def _in_turn(sources: Iterable[Iterable[_Cell]]) -> Iterator[_Cell]:
    return (cell for turn in zip_longest(*sources) for cell in turn if cell is not None)


@in_one_thread
def _remake_all(layout: Layout, chosen: Sequence[_Cell], makers: Mapping[_ColumnName, _Maker]) -> _Tally:
    """Encode the chosen entries again and compare them. Only one model at a time is in memory."""
    tally = _Tally()
    by_encoder: dict[int, list[tuple[_Cell, _Maker]]] = {}
    for cell in chosen:
        maker = makers[cell.catalog.name, cell.catalog.columns.index(cell.column)]
        by_encoder.setdefault(id(maker.encoder), []).append((cell, maker))
    with Reader(layout.root, verify="always") as reader:
        for cells in by_encoder.values():
            with closing(cells[0][1].encoder) as encoder:
                for batch in _batches(cells, reader, tally):
                    _remake(encoder, batch, reader, tally)
    return tally


_Ready = tuple[_Cell, Any]
"""A chosen cell and its payload for the encoder."""


def _batches(cells: Sequence[tuple[_Cell, _Maker]], reader: Reader, tally: _Tally) -> Iterator[list[_Ready]]:
    """Yield batches of one encoder's cells. Those that cannot be encoded are counted in `tally`. `cells` must not be empty."""
    batches: Batches[_Ready] = Batches(cells[0][1].encoder.batch_limit)
    for cell, maker in cells:
        try:
            resolved = maker.encoder.resolve(cell.request, maker)
            if not _is_the_same_input(cell, resolved, reader, tally):
                continue
            prepared = maker.encoder.prepare(resolved)
        except OSError:
            tally.gone.append(cell.sample)
            continue
        except EncodeFailed as error:
            tally.refuse(cell, str(error))
            continue
        if batch := batches.add(prepared, (cell, prepared.payload)):
            yield batch
    yield from batches.rest()


def _is_the_same_input(cell: _Cell, resolved: Resolved, reader: Reader, tally: _Tally) -> bool:
    """Return whether the sample's input is still the one that the catalog and the entry record. If not, count it in `tally`."""
    digest = cell.column.inputs[cell.index]
    if digest not in (NO_INPUT, bytes.fromhex(combined_digest(resolved.inputs))):
        tally.changed.append(cell.sample)
        return False
    if resolved.key != cell.key:
        tally.findings.append(_wrong(cell, f"now makes entry {resolved.key}", "run `cachestore precompute` again"))
        return False
    try:
        recorded = reader.describe(cell.key).meta.get("input_digest")
    except (CacheStoreError, OSError):
        return True  # `_compare` will fail to read it too, and reports it
    if recorded is not None and recorded != resolved.meta.get("input_digest"):
        tally.findings.append(_wrong(cell, "is not the input that the entry says it was made from", _take_out(cell, reader)))
        return False
    return True


def _remake(encoder: Encoder, batch: Sequence[_Ready], reader: Reader, tally: _Tally) -> None:
    """Encode a batch and compare it. If that fails, each of its entries is encoded alone, so that one bad input affects no other."""
    try:
        made = encoder.submit([(cell.key, payload) for cell, payload in batch])()
        raw = {cell.key: to_raw(made[cell.key]) for cell, _payload in batch}
    except BadInput:
        raise  # the model cannot be loaded
    except Exception as error:  # noqa: BLE001 - a model may raise anything; it is reported with the entry
        if len(batch) == 1:
            tally.refuse(batch[0][0], str(error) or type(error).__name__)
            return
        for one in batch:
            _remake(encoder, [one], reader, tally)
        return
    for cell, _payload in batch:
        _compare(cell, raw[cell.key], encoder.recipe.encoder, reader, tally)


def _compare(cell: _Cell, made: Mapping[str, RawTensor], kind: str, reader: Reader, tally: _Tally) -> None:
    from cachestore.encode.batching.compare import find_difference

    try:
        stored = reader.get_raw([cell.key])[0]
    except (CacheStoreError, OSError) as error:
        entry = DamagedEntry(str(cell.key), cell.sample, has_copy=False)
        tally.findings.append(Finding("corrupt-entry", _where(cell, reader), str(error), "", entry.key, entry.sample, (entry,)))
        return

    def compare(before: Mapping[str, RawTensor], now: Mapping[str, RawTensor]) -> str | None:
        difference = find_difference(before, now, kind)
        return None if difference is None else f"{difference.tensor} {difference.words}"

    is_declared = is_imported(cell.recipe)
    words = find_declared_difference(cell.recipe, stored, made, compare) if is_declared else compare(stored, made)
    if words is None:
        tally.equal += 1
        return
    advice = "it is not from the declared model: encode it with `cachestore precompute`" if is_declared else _take_out(cell, reader)
    tally.findings.append(_wrong(cell, f"encodes to something else: {words}", advice))


def _wrong(cell: _Cell, why: str, advice: str) -> Finding:
    input_name = "caption" if cell.column.role == CAPTION else cell.column.role
    what = f"entry {cell.key} does not belong to sample {cell.sample!r} of {cell.catalog.name!r}: its {input_name} {why}"
    return Finding("wrong-value", f"segments/{cell.segment[:2]}/{cell.segment}.safetensors", what, advice, str(cell.key), cell.sample)


def _where(cell: _Cell, reader: Reader) -> str:
    return reader.layout.relative(reader.layout.segment(cell.segment))


def _take_out(cell: _Cell, reader: Reader) -> str:
    return f"to encode it again, move {_where(cell, reader)} out of the store and run {reader.layout.command('repair --refill')}"
