"""`import webdataset`: makes a data set of tars that `export --format webdataset` wrote, or somebody else in the same form.

Names, sizes and JSON of every member are checked before a store is made, the digest of a sample's tensors before they are stored. Keys and
recipes are those in the tars, so nothing has to be encoded again. A killed import leaves entries that the same call finds.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from cachestore.core.errors import BadInput, BadUsage, EncodeFailed, Incomplete
from cachestore.core.keys import Json, Key, Recipe, canonical, canonical_text, digest_parts
from cachestore.core.spelling import option
from cachestore.core.words import first_of, plural
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import Layout, Mode
from cachestore.files.table import offsets_of
from cachestore.jobs.plan.columns import count_complete
from cachestore.jobs.run.task import Cancel, OnProgress
from cachestore.jobs.share.report import Report
from cachestore.sources.tars import tars_at
from cachestore.store.format.catalog import IMPORTED, Catalog, Cell, make_column
from cachestore.store.read.rows import newest_catalog
from cachestore.store.write.append import Appender
from cachestore.store.write.commit import create_store
from cachestore.store.write.made import check_no_session
from cachestore.store.write.publish import publish_catalog
from cachestore.store.write.writer import Store
from cachestore.trainers.import_request import ImportReport, ImportRequest, has_no_sample_of, made_otherwise
from cachestore.trainers.table import WEBDATASET
from cachestore.trainers.webdataset.exporting import refuse_given
from cachestore.trainers.webdataset.groups import TarMembers, groups_in

_NAMED: Final = 10_000


def _apart() -> str:
    return f"import the tars of each data set from a folder of their own, under another {option('name')}"


@dataclass(frozen=True, slots=True)
class _TarRow:
    group: TarMembers
    id: str | None
    captions: Sequence[str]
    images: Mapping[str, Sequence[str]]
    extras: str
    cells: Mapping[int, Sequence[Cell]]
    """By number of the column."""

    @property
    def keys(self) -> list[Key]:
        return [cell.key for cells in self.cells.values() for cell in cells if cell.key is not None]


_Column = tuple[str, str, bytes, str]
"""Encoder, role, options in canonical form, fingerprint."""


@dataclass(slots=True)
class _TarsFound:
    rows: list[_TarRow] = field(default_factory=list[_TarRow])
    texts: list[_TarRow] = field(default_factory=list[_TarRow])
    columns: dict[_Column, int] = field(default_factory=dict[_Column, int])
    recipes: dict[str, Recipe] = field(default_factory=dict[str, Recipe])
    common: tuple[bytes, TarMembers] | None = None
    policy: Mapping[str, Json] = field(default_factory=dict[str, Json])
    prompts: Sequence[tuple[str, str]] = ()
    samples: int = 0
    ids: dict[str, TarMembers] = field(default_factory=dict[str, TarMembers])

    def add(self, group: TarMembers) -> None:
        """Add a sample. Raises BadInput if it is not of the data set of the others; OSError."""
        sample = group.sample()
        for encoder, fingerprint in {column.encoder: column.fingerprint for column in sample.columns}.items():
            other = next((one[3] for one in self.columns if one[0] == encoder), fingerprint)
            if other != fingerprint or len({column.fingerprint for column in sample.columns if column.encoder == encoder}) > 1:
                raise BadInput(f"{group.name}: its {encoder[:80]} was made in another way than that of the tars before: {_apart()}")
        common = canonical(dict(sample.texts))
        if self.common is not None and self.common[0] != common:
            raise BadInput(f"{group.name} and {self.common[1].name} are of data sets with other captions: {_apart()}")
        self.common, self.policy = self.common or (common, group), sample.texts
        self.recipes |= sample.recipes
        cells: dict[int, list[Cell]] = {}
        for column in sample.columns:
            named = (column.encoder, column.role, canonical(dict(column.options)), column.fingerprint)
            cells[self.columns.setdefault(named, len(self.columns))] = [one.cell for one in column.cells]
        row = _TarRow(group, sample.id, sample.captions, sample.images, canonical_text(dict(sample.extras)), cells)
        if sample.id is None:
            self.prompts = sample.prompts
            self.texts.append(row)
            return
        if (first := self.ids.setdefault(sample.id, group)) is not group:
            raise BadInput(f"{group.name} and {first.name} are both the sample {sample.id!r:.200}: remove the tars of an earlier export")
        self.samples = max(self.samples, sample.samples)
        self.rows.append(row)

    def catalog(self, name: str, request: Mapping[str, Json], lost: set[Key], listing: int) -> Catalog:
        """Return the data set's catalog; cells whose entries are `lost` are empty."""
        kept = [
            {n: [replace(cell, key=None) if cell.key in lost else cell for cell in cells] for n, cells in row.cells.items()}
            for row in self.rows
        ]
        columns = [
            make_column(encoder, role, fingerprint, json.loads(options), (cells.get(n, ()) for cells in kept))
            for (encoder, role, options, fingerprint), n in self.columns.items()
        ]
        images: dict[str, tuple[list[int], list[str]]] = {}
        for role in sorted({role for row in self.rows for role in row.images}):
            of_rows = [row.images.get(role, ()) for row in self.rows]
            images[role] = (list(offsets_of(map(len, of_rows))), [*chain.from_iterable(of_rows)])
        there = {one.fingerprint for one in columns}
        return Catalog(
            name=name,
            request=dict.fromkeys((one.encoder for one in columns), request),
            recipes={fingerprint: recipe for fingerprint, recipe in self.recipes.items() if fingerprint in there},
            ids=[str(row.id) for row in self.rows],
            captions_at=list(offsets_of(len(row.captions) for row in self.rows)),
            captions=[caption for row in self.rows for caption in row.captions],
            images=images,
            extras=[row.extras for row in self.rows],
            columns=tuple(sorted(columns, key=lambda one: (one.encoder, one.role))),
            texts=self.policy,
            prompts=self.prompts,
            listing=listing,
            made="imported",
        )


def import_tars(request: ImportRequest, on_progress: OnProgress | None, cancel: Cancel | None, number: int) -> ImportReport:
    """Import the tars of a folder. Raises as `import_cache`, and BadInput for options that tars do not need."""
    plain = ImportRequest(request.format, request.folder, request.store, name=request.name, replace=request.replace, access=request.access)
    refuse_given({one.name: getattr(request, one.name) != getattr(plain, one.name) for one in fields(request)})
    mode = Mode.asked(request.access)
    return TarImport(Path(request.folder), Path(request.store), request.name, number, request.replace, mode, on_progress, cancel).run()


@dataclass(slots=True)
class TarImport:
    """Imports the tars of a folder into a store."""

    folder: Path
    store: Path
    name: str
    listing: int
    may_replace: bool
    mode: Mode | None = None
    on_progress: OnProgress | None = None
    cancel: Cancel | None = None
    _failed: dict[Key, tuple[str, str, str]] = field(default_factory=dict[Key, tuple[str, str, str]])
    """By key: sample, encoder and reason."""
    _put: set[Key] = field(default_factory=set[Key])
    _bytes: int = 0

    def run(self) -> ImportReport:
        """Import. Raises BadInput for tars that cannot be imported, before anything is written; as `import_cache`."""
        began, others = time.monotonic(), list[str]()
        found = self._read(others)
        layout = Layout.at(self.store)
        check_no_session(layout, self.name)
        if (previous := newest_catalog(layout, self.name)) is not None:
            self._check_name(found, previous)
        shared: list[str] = []
        create_store(self.store, mode=self.mode, say=shared.append)
        wanted = {key for row in chain(found.rows, found.texts) for key in row.keys}
        request = {IMPORTED: WEBDATASET, "folder": str(self.folder.absolute())}
        with Store(self.store, mode="a") as store:
            lacking = set(store.missing([*wanted]))
            self._store(store, found, lacking)
            catalog = found.catalog(self.name, request, {*self._failed}, self.listing)
            catalog = publish_catalog(store, catalog, wanted - self._failed.keys(), partial(self._check_name, found))
        check_for_reading(layout)
        failed = dict.fromkeys(self._failed.values())
        failures: list[Mapping[str, Json]] = [{"sample": name, "encoder": encoder, "reason": why} for name, encoder, why in failed]
        report = Report(
            complete=not failures,
            samples=len(found.rows),
            wanted=len(wanted),
            reused=len(wanted) - len(lacking),
            encoded=len(self._put),
            failed=len(self._failed),
            missing=0,
            encoded_here=len(self._put),
            seconds=time.monotonic() - began,
            bytes=self._bytes,
            store=str(layout.root),
            name=self.name,
            plan="",
            generation=catalog.generation,
            failures=tuple(failures),
            catalog_digest=catalog.digest,
            usable=count_complete(catalog),
        )
        had = plural(found.samples, "sample")
        fewer = (
            [f"the data set had {had} when it was exported; {len(found.rows)} are in these tars"] if len(found.rows) < found.samples else []
        )
        fingerprints = {column.encoder: column.fingerprint for column in catalog.columns}
        return ImportReport(report, WEBDATASET, "", fingerprints, tuple(others[:_NAMED]), (), (*fewer, *shared))

    def _read(self, others: list[str]) -> _TarsFound:
        paths = tars_at(self.folder) if self.folder.exists() or self.folder.suffix else None
        if not paths:
            raise (BadUsage if self.folder.is_dir() else BadInput)(
                f"{self.folder} holds no tar: pass the folder that `cachestore export --format {WEBDATASET}` wrote, or a tar"
            )
        found = _TarsFound()
        try:
            for path in paths:
                for group in groups_in(path, others):
                    self._go_on("reading the tars", len(found.rows), 0)
                    found.add(group)
        except OSError as error:
            raise BadInput(f"a tar in {self.folder} cannot be read: {error}; check the path, and copy it again") from error
        if not found.rows:
            held = f": it holds {first_of(others)}" if others else ""
            raise BadUsage(f"no tar in {self.folder} has a sample with a .json and a .safetensors{held}; pass tars of `cachestore export`")
        return found

    def _check_name(self, found: _TarsFound, previous: Catalog) -> None:
        if self.may_replace:
            return
        ours = {(encoder, role): fingerprint for encoder, role, _options, fingerprint in found.columns}
        if other := [one for one in previous.columns if ours.get((one.encoder, one.role)) != one.fingerprint]:
            raise made_otherwise(self.name, other[0].encoder)
        if previous.ids and not set(previous.ids) & found.ids.keys():
            raise has_no_sample_of(previous, "the tars")

    def _store(self, store: Store, found: _TarsFound, lacking: set[Key]) -> None:
        origin = f"{digest_parts('cachestore-exchange', self.name).hex()[:32]}/0"  # of no pass, so that `gc` may remove it after a drop
        rows = [*found.rows, *found.texts]
        with Appender(store.layout, origin) as appender:
            try:
                for number, row in enumerate(rows):
                    self._go_on("importing", number, len(rows))
                    if not lacking.isdisjoint(row.keys):
                        self._take(found, row, appender, lacking)
            finally:
                appender.close_segment()
        store.commit()

    def _take(self, found: _TarsFound, row: _TarRow, appender: Appender, lacking: set[Key]) -> None:
        """Append the entries of a sample that are not there. What cannot be used is recorded as failed."""
        try:
            for key, tensors, meta in row.group.entries(row.keys):
                if key in lacking and key not in self._put:
                    appender.put(key, tensors, meta)
                    self._put.add(key)
                    self._bytes += sum(len(buffer) for _dtype, _shape, buffer in tensors.values())
        except (EncodeFailed, BadInput, OSError) as error:
            encoders = [encoder for encoder, _role, _options, _fingerprint in found.columns]
            failed = {cell.key: (row.id or "", encoders[n], str(error)) for n, cells in row.cells.items() for cell in cells}
            self._failed |= {key: why for key, why in failed.items() if key is not None and key in lacking and key not in self._failed}
        for key in self._put & self._failed.keys():
            del self._failed[key]

    def _go_on(self, doing: str, done: int, total: int) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise Incomplete("the import was cancelled; the same call goes on from there")
        if self.on_progress is not None:
            self.on_progress({"doing": doing, "done": done, "total": total})
