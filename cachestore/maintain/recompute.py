"""Making again: what was lost (repair with refill), and what is there, to compare it (verify with recompute).

Knows the storage's repair and verify, and the whole job. torch is imported by the encoders alone, and only once something is encoded.
"""

import json
import logging
import os
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar

from cachestore.core.arguments import as_place, as_switch, as_whole
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed, FormatError, RecipeMismatch, naming_extras
from cachestore.core.inputs import cells_each, combined_digest, options_for, request_for
from cachestore.core.keys import Json, Key, Recipe, canonical
from cachestore.core.samples import CAPTION, Source
from cachestore.core.tensors import to_raw
from cachestore.core.words import first_of
from cachestore.encode.batches import Batches
from cachestore.encode.unit import Encoder, Resolved
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import MARKER, Layout
from cachestore.jobs.declared_model import claimed_encoder, find_claimed_difference, is_imported
from cachestore.jobs.options import PrecomputeRequest
from cachestore.jobs.planning import Wanted, encoders_of, files_of_request, look_at_request
from cachestore.jobs.precompute import precompute_here
from cachestore.jobs.reconcile import Reconciler
from cachestore.maintain import collect as upkeep
from cachestore.maintain.collect import look_further, lost_catalogs
from cachestore.source.combined import Moved, at_new_places, files_of, labels_of
from cachestore.source.files import Files
from cachestore.storage.catalog import NO_INPUT, Catalog, KeyColumn, list_generations, list_names, newest_catalog
from cachestore.storage.findings import HARMLESS, Finding
from cachestore.storage.losses import needed_by
from cachestore.storage.model_digests import load_digests
from cachestore.storage.repair import RepairReport, finish_report, note_unmade, repair_store
from cachestore.storage.snapshot import Snapshot, load_snapshot, open_layout
from cachestore.storage.verify import VerifyReport
from cachestore.store.reader import Reader
from cachestore.work.passes import read_done
from cachestore.work.plan import read_plan
from cachestore.work.retention import Told, generation_of_pass, told_catalogs
from cachestore.work.workers import host_name

T = TypeVar("T")

SEED: Final = 0
"""Samples that a remark names."""
_log = logging.getLogger("cachestore")
OnFinding = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class _Moved:
    """Where things are now that a request says were elsewhere."""

    source: Moved | None
    models: Mapping[str, str]
    """By field of a request."""

    @property
    def data(self) -> dict[str, str]:
        """The field of a request for the one source of a data set that has one; nothing where it did not move, or others did."""
        return {"data": os.fspath(self.source)} if isinstance(self.source, str | os.PathLike) else {}


# Repair with refill


@naming_extras()
def repair(
    path: str | Path,
    *,
    refill: bool = False,
    source: Moved | None = None,
    model: str | Path | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    dry_run: bool = False,
) -> RepairReport:
    """Make a store consistent, and with `refill` complete.

    Args:
        path: the store.
        refill: encode again what the data sets need and what has no valid copy, with the source and model they were made with.
        source: where the source is now, if it moved; of several a mapping, from what a source is called to its path. Without `refill` it
            counts only where a lost catalog is built again.
        model: with `refill`, where the model is now; it must have the fingerprint the data set was made with.
        vae: with `refill`, where the VAE is now.
        text_encoder: with `refill`, where the text encoder is now.
        dry_run: say what would be done and do nothing.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version; nothing was touched.
        RecipeMismatch: the moved model is another one.
        BadInput: the source or model cannot be found; pass where they are now.
    """
    refill, dry_run = as_switch("refill", refill), as_switch("dry_run", dry_run)
    moved = _moved(source, model=model, vae=vae, text_encoder=text_encoder)
    if not refill:
        _check_use(moved)
    report = repair_store(path, dry_run=dry_run, look_further=look_further)
    if dry_run and MARKER in report.rebuilt:
        return report  # what else is damaged cannot be told before
    layout = open_layout(Layout.at(path))
    lost = lost_catalogs(layout)
    if dry_run:
        return replace(report, rebuilt=(*report.rebuilt, *(told.name for told in lost)))
    _check_names((catalog for name in list_names(layout) if (catalog := newest_catalog(layout, name)) is not None), source)
    rebuilt = tuple(told.name for told in lost if _rebuild(layout, told, moved))
    report = replace(report, rebuilt=(*report.rebuilt, *rebuilt))
    if not refill:
        report = finish_report(layout.root, report, look_further=look_further) if lost else report
        check_for_reading(layout)
        return report
    refilled = 0
    for name in list_names(layout):
        catalog = newest_catalog(layout, name)
        if catalog is not None and (lacking := _lacking(layout, catalog)):
            refilled += _refill(layout, catalog, moved)
            note_unmade(layout, _unmade(layout, name, lacking))
    report = finish_report(layout.root, replace(report, refilled=refilled), look_further=look_further)
    check_for_reading(layout)
    return report


def _check_use(moved: _Moved) -> None:
    """Without refill: say that nothing looks at a model, and of a source where alone it counts."""
    if moved.models:
        _log.warning(
            "%s goes with `--refill`, which encodes again what was lost: without it no model is looked at", next(iter(moved.models))
        )
    if moved.source is not None:
        _log.warning("the source counts only where a data set's lost catalog is built again: without `--refill` nothing is encoded again")


def _rebuild(layout: Layout, told: Told, moved: _Moved) -> bool:
    """Build a catalog that is gone from the plan and ledgers of the pass that published it; False where that does not give the same one."""
    try:
        _rebuild_before(layout, told, moved)
        plan, done = read_plan(layout, told.ref.plan), read_done(layout, told.ref)
        hints: Mapping[str, Json] = done.request if done is not None else {}
        listing = int(done.report.get("listing", 0)) if done is not None else 0
        source = _files_of(hints, moved, layout)
        return Reconciler(layout, plan, told.ref, source, "repair", request=hints).rebuild_catalog(told.generation, told.digest, listing)
    except (FormatError, FileNotFoundError):
        return False


def _rebuild_before(layout: Layout, told: Told, moved: _Moved) -> None:
    """Build the generation that a pass took its units from, where that is gone too. Each is older than the one it is needed for."""
    earlier = generation_of_pass(layout, told.ref)
    if earlier is None or earlier >= told.generation or earlier in list_generations(layout, told.name):
        return
    same = (each for each in told_catalogs(layout) if (each.name, each.generation) == (told.name, earlier))
    for each in sorted(same, key=lambda each: (each.ended, each.ref.number)):
        if _rebuild(layout, each, moved):
            return


def _lacking(layout: Layout, catalog: Catalog) -> list[tuple[Key, str]]:
    """The entries that a catalog needs and that are not there, each with every sample that needs it."""
    needed = list(needed_by(catalog))
    with closing(load_snapshot(layout)) as snapshot:
        found = snapshot.find([key for key, _sample in needed])
    return [each for each, places in zip(needed, found, strict=True) if not places]


def _unmade(layout: Layout, name: str, lacking: Sequence[tuple[Key, str]]) -> dict[Key, tuple[str, str]]:
    """Of entries that were lacking, those of samples that the data set still lists, and for which something could not be made."""
    catalog = newest_catalog(layout, name)
    if catalog is None:
        return {}
    unmade = {sample for row, sample in enumerate(catalog.ids) if not catalog.is_complete(row)}
    named = {key for key, _sample in needed_by(catalog)}
    return {key: (name, sample) for key, sample in lacking if sample in unmade and key not in named}


def _refill(layout: Layout, catalog: Catalog, moved: _Moved) -> int:
    """Run the requests behind a catalog again, each once and for the encoders that are still its own; only what is missing is encoded."""
    encoders: dict[bytes, list[str]] = {}
    for encoder, hints in catalog.request.items():
        encoders.setdefault(canonical(hints), []).append(encoder)
    requests = {canonical(hints): PrecomputeRequest.from_hints(hints, store=str(layout.root)) for hints in catalog.request.values()}
    asked = [replace(_at(request, moved), encode=request.made_by(encoders[hints])) for hints, request in requests.items()]
    return sum(_run_again(layout, catalog, request) for request in asked)


def _moved(source: Moved | None, **places: str | Path | None) -> _Moved:
    if isinstance(source, Mapping):
        source = {name: as_place(f"source[{name!r}]", place) for name, place in source.items()}
    elif source is not None:
        source = as_place("source", source)
    models = {name: as_place(name, place, "a path or a hub id") for name, place in places.items() if place is not None}
    return _Moved(source, models)


def _check_names(catalogs: Iterable[Catalog], source: Moved | None) -> None:
    """Raise BadInput for a source that no data set was made of."""
    if not isinstance(source, Mapping):
        return
    told = [one for catalog in catalogs for hints in catalog.request.values() for one in (hints.get("sources") or ())]
    known = {label for one in told for label in labels_of([Source(**one)])}
    if unknown := sorted(set(source) - known):
        raise BadInput(
            f"no data set here was made of a source called {unknown[0]!r}; sources are {', '.join(sorted(known)) or 'not named'}"
        )


def _at(request: PrecomputeRequest, moved: _Moved) -> PrecomputeRequest:
    """A request with what moved where it is now. Raises BadInput for one path in place of several sources."""
    if moved.source is None:
        return replace(request, **moved.models)
    if request.sources:
        return replace(request, sources=at_new_places(request.sources, moved.source), **moved.models)
    return replace(request, **moved.models, **moved.data)


def _files_of(hints: Mapping[str, Json], moved: _Moved, layout: Layout) -> Files:
    """Where the files of a pass are, as far as it says so: who asks for those of a source in memory is told that they are gone."""
    try:
        return files_of_request(_at(PrecomputeRequest.from_hints(hints, store=str(layout.root)), moved))
    except BadInput:
        return files_of(moved.data.get("data") or str(hints.get("data", layout.root)))


def _run_again(layout: Layout, catalog: Catalog, request: PrecomputeRequest) -> int:
    made_with = {column.fingerprint for column in catalog.columns}
    wanted = look_at_request(layout, request)
    for encoder in wanted.encoders:
        if encoder.recipe.fingerprint not in made_with:
            made = f"{encoder.recipe.encoder} of {catalog.name!r}"
            raise RecipeMismatch(f"{request.model} is not the model that {made} was made with; pass --model with the right one")
    if gone := _gone(layout, catalog, wanted):
        raise BadInput(
            f"of {catalog.name!r} {len(gone)} samples that lack entries are not there any more ({first_of(gone)}),"
            " and a new pass would leave them out; nothing was encoded: put them back, or say by --source where they are"
            " (`cachestore precompute` goes on without)"
        )
    return precompute_here(request, store_id=layout.store_id).encoded_here


def _gone(layout: Layout, catalog: Catalog, wanted: Wanted) -> list[str]:
    """Samples that lack an entry, and that the source does not list any more or from which the picture behind the entry is gone."""
    lacking = {key for key, _sample in _lacking(layout, catalog)}
    listed = set(wanted.plan.ids)
    gone: dict[str, None] = {}
    for column in catalog.columns:
        at, references = catalog.images.get(column.role, ((), ()))
        for row, sample in enumerate(catalog.ids):
            if not lacking.isdisjoint(key for key in column.row_keys(row) if key is not None):
                made_of = references[at[row] : at[row + 1]] if at else ()
                if sample not in listed or any(wanted.listing.stat(reference) is None for reference in made_of):
                    gone[sample] = None
    return list(gone)


# Verify with recompute


@dataclass(frozen=True, slots=True)
class _Cell:
    """An entry that was chosen, and one sample that needs it."""

    key: Key
    segment: str
    catalog: Catalog
    column: KeyColumn
    row: int
    place: int
    """Of the cell in its column."""

    @property
    def sample(self) -> str:
        return self.catalog.ids[self.row]

    @property
    def request(self) -> Mapping[str, Json]:
        """What the encoder was asked to make, as the plan asked it."""
        role, each = self.column.role, cells_each(self.column.options)
        number, variant = divmod(self.place - self.column.at[self.row], each)
        images = {name: references[at[self.row] : at[self.row + 1]] for name, (at, references) in self.catalog.images.items()}
        value = (self.catalog.row_captions(self.row) if role == CAPTION else images[role])[number]
        options = options_for(self.column.options, json.loads(self.catalog.extras[self.row]))
        request = request_for(role, options, value, images, variant)
        if not is_imported(self.recipe):
            return request
        facts = self.column.cell(self.place).facts
        return {**request, "key": str(self.key), **{name: list(facts.get(name, ())) for name in ("bucket", "resized", "crop")}}

    @property
    def recipe(self) -> Recipe:
        """What it is said to be of."""
        return self.catalog.recipes[self.column.fingerprint]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Who makes the entries of some columns again, and where their files are now. Implements `unit.Read`."""

    encoder: Encoder
    files: Files
    name: str = ""
    """Of the first data set, for messages."""

    def __call__(self, reference: str, /) -> bytes:
        """The bytes behind a reference. Raises OSError."""
        return self.files.read(reference)[0]

    @contextmanager
    def open(self, reference: str) -> Generator[BinaryIO]:
        """What is behind a reference, to be read in places. Raises OSError."""
        with self.files.open(reference) as (file, _stat):
            yield file


@dataclass(slots=True)
class _Tally:
    """What became of the chosen entries: samples by outcome, and the findings."""

    equal: int = 0
    gone: list[str] = field(default_factory=list[str])
    changed: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])
    why_refused: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])

    def remarks(self) -> list[str]:
        """What was chosen and could not be compared, in words."""
        words: list[str] = []
        if self.gone:
            words.append(
                f"{len(self.gone)} could not be made again, as their source is gone ({first_of(self.gone)}); --source says where it is"
            )
        if self.changed:
            words.append(f"{len(self.changed)} could not be made again, as their file has changed since ({first_of(self.changed)})")
        if self.refused:
            words.append(f"{len(self.refused)} could not be made again ({first_of(self.refused)}): {self.why_refused}")
        return words


@naming_extras()
def verify(
    path: str | Path,
    level: Literal["full", "quick"] = "full",
    *,
    subset: tuple[int, int] | None = None,
    on_finding: OnFinding | None = None,
    recompute: int = 0,
    seed: int = SEED,
    source: Moved | None = None,
    model: str | Path | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
) -> VerifyReport:
    """Check a store and change nothing.

    Args:
        path: the store.
        level: "full" reads every byte, "quick" names, sizes and headers.
        subset: (n, t) reads the bytes of the n-th of t parts of the segments, 1 <= n <= t; the rest is checked as by "quick".
        on_finding: called with each finding as it is made.
        recompute: encode so many entries again, in this process, and compare them with what is stored, up to rounding. They are
            chosen evenly over data sets, encoders and segments.
        seed: of that choice.
        source: as for `repair`.
        model: where the model is now; it must have the fingerprint the data set was made with.
        vae: where the VAE is now.
        text_encoder: where the text encoder is now.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version.
        BadInput: there is no such part; the model cannot be found, so pass where it is now; or no entry can be encoded again.
        RecipeMismatch: the model is another one than the data set was made with; nothing was read or encoded.
    """
    recompute, seed = as_whole("recompute", recompute, least=0), as_whole("seed", seed, least=0)
    moved = _moved(source, model=model, vae=vae, text_encoder=text_encoder)
    if recompute == 0 and (given := [*moved.models, *(["source"] if source is not None else [])]):
        raise BadInput(f"{given[0]} is for encoding entries again and comparing them, which is done with recompute=N (`--recompute N`)")
    if recompute == 0:
        return upkeep.verify(path, level, subset=subset, on_finding=on_finding)
    started = time.monotonic()
    layout = open_layout(Layout.at(path))
    with _library_defaults():
        catalogs = [catalog for name in list_names(layout) if (catalog := newest_catalog(layout, name)) is not None]
        _check_names(catalogs, source)
        makers, unknown = _find_makers(layout, catalogs, moved)
        report = upkeep.verify(path, level, subset=subset, on_finding=on_finding)
        with closing(load_snapshot(layout)) as snapshot:
            wanted = _by_segment(catalogs, snapshot, makers)
        chosen = choose(wanted, recompute, seed)
        if not chosen and report.entries and report.ok:
            why = "; ".join(unknown) or "no data set has them"
            raise BadInput(f"none of the {report.entries} entries in {layout.root} can be encoded again and compared: {why}")
        tally = _remake_all(layout, chosen, makers)
    check_for_reading(layout)
    damaged = {finding.key for finding in report.findings}
    found = [finding for finding in tally.findings if finding.kind == "wrong-value" or finding.key not in damaged]
    for finding in found:
        if on_finding:
            on_finding(finding)
    findings = (*report.findings, *found)
    counts: dict[str, Json] = {
        "asked": recompute,
        "chosen": len(chosen),
        "of": len({cell.key for columns in wanted for segments in columns for cells in segments for cell in cells}),
        "seed": seed,
        "equal": tally.equal,
        "wrong": sum(finding.kind == "wrong-value" for finding in tally.findings),
        "source_gone": len(tally.gone),
        "source_changed": len(tally.changed),
        "refused": len(tally.refused),
        "remarks": [*unknown, *tally.remarks()],
    }
    is_ok = all(finding.kind in HARMLESS for finding in findings)
    return replace(report, ok=is_ok, findings=findings, seconds=round(time.monotonic() - started, 3), recomputed=counts)


@contextmanager
def _library_defaults() -> Generator[None]:
    """What tokenizers and models want in the environment; taken back afterwards, as this process is the caller's."""
    from cachestore.encode.environment import SETTINGS, set_library_defaults

    before = {name: os.environ.get(name) for name in SETTINGS}
    set_library_defaults(os.environ)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_ColumnName = tuple[str, int]
"""A catalog's name and the number of one of its key columns."""


def _find_makers(layout: Layout, catalogs: Sequence[Catalog], moved: _Moved) -> tuple[dict[_ColumnName, _Maker], list[str]]:
    """Who makes each column again, and remarks on those that do not say how they were made. Loads no weights.

    Raises RecipeMismatch where a model is another one now, BadInput where it is not found.
    """
    known = load_digests(layout, host_name())
    made: dict[bytes, tuple[Encoder, ...]] = {}
    makers: dict[_ColumnName, _Maker] = {}
    unknown: list[str] = []
    for catalog in catalogs:
        for number, column in enumerate(catalog.columns):
            try:
                if is_imported(catalog.recipes[column.fingerprint]):
                    makers[catalog.name, number] = _claimed_maker(layout, catalog, column, moved, known)
                    continue
                request = _request_of(layout, catalog, column.encoder, moved)
            except RecipeMismatch:
                raise
            except BadInput as error:
                unknown.append(f"{column.encoder} of the data set {catalog.name!r} was not looked at: {error}")
                continue
            name = canonical(request.hints())
            if name not in made:
                made[name] = encoders_of(request, known)
            encoder = _encoder_of(made[name], catalog, column, request)
            makers[catalog.name, number] = _Maker(encoder, files_of_request(request))
    return makers, unknown


def _claimed_maker(layout: Layout, catalog: Catalog, column: KeyColumn, moved: _Moved, known: MutableMapping[str, str]) -> _Maker:
    """Who is claimed to have made an imported column. Raises BadInput without a model, RecipeMismatch where it is not the claimed one."""
    hints = {**catalog.request.get(column.encoder, {}), **moved.models, **moved.data}
    encoder, claimed = claimed_encoder(catalog.recipes[column.fingerprint], hints, known, store=str(layout.root))
    now = encoder.encoder.recipe
    if claimed is not None and Recipe(column.encoder, claimed).fingerprint != now.fingerprint:
        raise RecipeMismatch(
            f"{hints['model']} is not what {column.encoder} of the data set {catalog.name!r} is claimed to be of"
            f" ({_changes(claimed, now.make)}); nothing was encoded; pass --model (or --vae, --text-encoder) with the right one"
        )
    return _Maker(encoder, files_of(str(hints["data"])))


def _request_of(layout: Layout, catalog: Catalog, encoder: str, moved: _Moved) -> PrecomputeRequest:
    """The request that made an encoder's columns, for what they hold alone. Raises BadInput where the catalog does not say."""
    request = PrecomputeRequest.from_hints(catalog.request.get(encoder, {}), store=str(layout.root))
    return replace(_at(request, moved), encode=request.made_by([encoder]))


def _encoder_of(encoders: Sequence[Encoder], catalog: Catalog, column: KeyColumn, request: PrecomputeRequest) -> Encoder:
    found = next((encoder for encoder in encoders if encoder.recipe.fingerprint == column.fingerprint), None)
    if found is not None:
        return found
    now = next((encoder.recipe for encoder in encoders if encoder.recipe.encoder == column.encoder), Recipe(column.encoder))
    changes = _changes(catalog.recipes[column.fingerprint].make, now.make)
    made = f"{column.encoder} of the data set {catalog.name!r}"
    raise RecipeMismatch(
        f"{request.model} is not what {made} was made with ({changes}); nothing was encoded;"
        " pass --model (or --vae, --text-encoder) with the right one"
    )


def _changes(before: Mapping[str, Json], now: Mapping[str, Json]) -> str:
    """The first files and settings in which two recipes differ."""
    files = (before.get("files", {}), now.get("files", {}))
    names = [f"other bytes in {name}" for name in sorted({*files[0], *files[1]}) if files[0].get(name) != files[1].get(name)]
    names += [f"another {name}" for name in sorted({*before, *now} - {"files"}) if before.get(name) != now.get(name)]
    return first_of(names)


_Groups = list[list[list[list[_Cell]]]]
"""Cells by catalog, column and segment."""


def _by_segment(catalogs: Sequence[Catalog], snapshot: Snapshot, makers: Mapping[_ColumnName, _Maker]) -> _Groups:
    """Every present entry that a column names and that can be made again, once a column."""
    groups: _Groups = []
    for catalog in catalogs:
        columns: list[list[list[_Cell]]] = []
        for number, column in enumerate(catalog.columns):
            if (catalog.name, number) in makers:
                columns.append(_segments_of(catalog, column, snapshot))
        groups.append(columns)
    return groups


def _segments_of(catalog: Catalog, column: KeyColumn, snapshot: Snapshot) -> list[list[_Cell]]:
    places: dict[Key, tuple[int, int]] = {}
    for row in range(len(catalog)):
        for number, key in enumerate(column.row_keys(row)):
            if key is not None:
                places.setdefault(key, (row, column.at[row] + number))
    segments: dict[str, list[_Cell]] = {}
    for (key, (row, place)), found in zip(places.items(), snapshot.find(list(places)), strict=True):
        if found:
            digest = found[0].segment.digest
            segments.setdefault(digest, []).append(_Cell(key, digest, catalog, column, row, place))
    return [segments[digest] for digest in sorted(segments)]


def choose(groups: Sequence[Sequence[Sequence[Sequence[_Cell]]]], count: int, seed: int) -> list[_Cell]:
    """So many cells of different keys, or all there are: evenly from catalogs, of each from its columns, of each from its segments."""
    draw = random.Random(seed)

    def shuffled(items: Sequence[T]) -> list[T]:
        return draw.sample(items, len(items))

    turns = _in_turn(
        [_in_turn([_in_turn([iter(shuffled(cells)) for cells in shuffled(segments)]) for segments in columns]) for columns in groups]
    )
    chosen: dict[Key, _Cell] = {}
    for cell in turns:
        if len(chosen) == count:
            break
        chosen.setdefault(cell.key, cell)
    return list(chosen.values())


def _in_turn(sources: Sequence[Iterator[T]]) -> Iterator[T]:
    """One of each, again and again, until none has any left."""
    waiting = list(sources)
    while waiting:
        left: list[Iterator[T]] = []
        for source in waiting:
            for item in source:
                yield item
                left.append(source)
                break
        waiting = left


def _remake_all(layout: Layout, chosen: Sequence[_Cell], makers: Mapping[_ColumnName, _Maker]) -> _Tally:
    """Make the chosen entries again, one model in memory at a time, and compare them. Nothing chosen loads nothing."""
    tally = _Tally()
    by_encoder: dict[int, list[tuple[_Cell, _Maker]]] = {}
    for cell in chosen:
        maker = makers[cell.catalog.name, cell.catalog.columns.index(cell.column)]
        by_encoder.setdefault(id(maker.encoder), []).append((cell, maker))
    with Reader(layout.root, verify="always") as reader:
        for cells in by_encoder.values():
            encoder = cells[0][1].encoder
            with closing(encoder):
                for batch in _batches(cells, reader, tally):
                    _remake(encoder, batch, reader, tally)
    return tally


_Ready = tuple[_Cell, Any]
"""A chosen entry, and what its encoder takes for it."""


def _batches(cells: Sequence[tuple[_Cell, _Maker]], reader: Reader, tally: _Tally) -> Iterator[list[_Ready]]:
    """Batches of one encoder's entries that can be made again; the others are tallied. At least one is given."""
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
            tally.refused.append(cell.sample)
            tally.why_refused = tally.why_refused or str(error)
            continue
        if batch := batches.add(prepared, (cell, prepared.payload)):
            yield batch
    yield from batches.rest()


def _is_the_same_input(cell: _Cell, resolved: Resolved, reader: Reader, tally: _Tally) -> bool:
    """Whether what the sample has now is what the catalog's cell and the entry itself say that they were made of."""
    digest = cell.column.inputs[cell.place]
    if digest not in (NO_INPUT, bytes.fromhex(combined_digest(resolved.inputs))):
        tally.changed.append(cell.sample)
        return False
    if resolved.key != cell.key:
        tally.findings.append(_wrong(cell, f"is paired with it, but makes entry {resolved.key}", "run `cachestore precompute` again"))
        return False
    try:
        said = reader.describe(cell.key).meta.get("input_digest")
    except (CacheStoreError, OSError):
        return True  # reading its bytes fails too, and is told there
    if said is not None and said != resolved.meta.get("input_digest"):
        tally.findings.append(_wrong(cell, "has another input than the one it says it was made of", _take_out(cell, reader)))
        return False
    return True


def _remake(encoder: Encoder, batch: Sequence[_Ready], reader: Reader, tally: _Tally) -> None:
    """Encode a batch and compare it; one that fails is taken apart, so that a bad input hides nobody else's."""
    try:
        made = encoder.submit([(cell.key, payload) for cell, payload in batch])()
        raw = {cell.key: to_raw(made[cell.key]) for cell, _payload in batch}
    except BadInput:
        raise  # a model that cannot be loaded makes nothing
    except Exception as error:  # noqa: BLE001 - the boundary to models: whatever one raises is told of its entry
        if len(batch) > 1:
            for one in batch:
                _remake(encoder, [one], reader, tally)
            return
        tally.refused.append(batch[0][0].sample)
        tally.why_refused = tally.why_refused or str(error) or type(error).__name__
        return
    for cell, _payload in batch:
        _compare(cell, raw[cell.key], encoder.recipe.encoder, reader, tally)


def _compare(cell: _Cell, made: Mapping[str, RawTensor], kind: str, reader: Reader, tally: _Tally) -> None:
    from cachestore.encode.compare import find_difference

    try:
        stored = reader.get_raw([cell.key])[0]
    except (CacheStoreError, OSError) as error:
        tally.findings.append(Finding("corrupt-entry", _where(cell, reader), str(error), str(cell.key), cell.sample))
        return

    def compare(one: Mapping[str, RawTensor], other: Mapping[str, RawTensor]) -> str | None:
        difference = find_difference(one, other, kind)
        return None if difference is None else f"{difference.tensor} {difference.words}"

    is_claim = is_imported(cell.recipe)
    words = find_claimed_difference(cell.recipe, stored, made, compare) if is_claim else compare(stored, made)
    if words is None:
        tally.equal += 1
        return
    advice = "it is not what it is claimed to be: make it with `cachestore precompute`" if is_claim else _take_out(cell, reader)
    tally.findings.append(_wrong(cell, f"makes something else: {words}", advice))


def _wrong(cell: _Cell, what: str, advice: str) -> Finding:
    input_name = "caption" if cell.column.role == CAPTION else cell.column.role
    message = f"entry {cell.key} is not of sample {cell.sample!r} of {cell.catalog.name!r}: its {input_name} {what}; {advice}"
    return Finding("wrong-value", f"segments/{cell.segment[:2]}/{cell.segment}.safetensors", message, str(cell.key), cell.sample)


def _where(cell: _Cell, reader: Reader) -> str:
    return str(reader.layout.segment(cell.segment).relative_to(reader.layout.root))


def _take_out(cell: _Cell, reader: Reader) -> str:
    return f"to make it anew, move {_where(cell, reader)} out of the store and run {reader.layout.command('repair --refill')}"
