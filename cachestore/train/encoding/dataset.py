"""A data set whose samples are encoded when they are first read. Later epochs read as CachedDataset does."""

import logging
import operator
import os
import threading
from collections import deque
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, SupportsIndex

import torch

from cachestore.core.batch_shapes import LatentsAs
from cachestore.core.captions import CaptionPolicy, Choose
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import digest_parts
from cachestore.core.words import first_of, plural
from cachestore.jobs.share.report import Report
from cachestore.store.format.catalog import Catalog, read_catalog
from cachestore.store.read.fetch import Io, Verify
from cachestore.store.read.reader import Reader
from cachestore.store.write.catalog_writer import draft_of
from cachestore.train.batch_slice import BatchSlice
from cachestore.train.buffers import BatchBuffers
from cachestore.train.cast import as_dtype
from cachestore.train.collate import SampleDict
from cachestore.train.dataset import CachedDataset
from cachestore.train.encoding.joined_pass import JoinedPass
from cachestore.train.epoch import Epoch
from cachestore.train.order import Indices
from cachestore.train.planned import same_epoch
from cachestore.train.selection import DataOptions, Selection

_log = logging.getLogger("cachestore")

AT_ONCE: Final = 64
"""About so many samples are encoded together, also of the next batches: segments are then not tiny, and batches of the encoders full."""


_HERE_ALONE: Final = "it is not encoded yet, and is encoded in the process that opened it: use num_workers=0 in the first epoch"


@dataclass(frozen=True, slots=True)
class SeenAs:
    """The arguments of CachedDataset with which a data set is read."""

    latents: LatentsAs
    captions: CaptionPolicy | Choose | None
    fields: Collection[str] | None
    dtype: torch.dtype | None
    resolution: int | None
    seed: int
    verify: Verify
    io: Io


class _State:
    """What the data set and its casts share: the pass, and how far the training is."""

    def __init__(self, joined: JoinedPass) -> None:
        self.joined = joined
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.coming: deque[int] = deque()
        """Indices of this rank's samples in the order in which they will be read, as far as they are announced."""
        self.is_all_read = False
        """Whether every batch of an epoch was read that began with the data set's first sample."""
        self.failed: dict[int, str] = {}
        """By row, why it could not be encoded."""
        self.checked: set[int] = set()
        """Rows that were encoded, or that failed."""
        self.report: Report | None = None


class EncodingDataset(CachedDataset):
    """What `ReadThrough.of(model, store=...).open(data)` returns: a CachedDataset that encodes what its store lacks.

    In the first epoch the samples of a batch, and of the next ones, are encoded when the batch is read, in this process. At the end of that
    epoch what nobody asked for is encoded too, the data set is published as by `precompute`, and the models are released. From then on it
    is that data set. The order of batches is the one that the finished data set gives.

    A sample that cannot be encoded gives its place in the first epoch's batch to another one of this batch, with a warning; later epochs
    leave it out. Use it with `make_loader` without workers, or with a DataLoader of your own over a BucketBatchSampler.
    """

    def __init__(self, joined: JoinedPass, seen: SeenAs) -> None:
        """Use `ReadThrough.of` instead."""
        self._state = _State(joined)
        reader = Reader(joined.layout.root, verify=seen.verify, io=seen.io, store_id=joined.layout.store_id)
        catalog = joined.catalog()
        options = DataOptions.parse(
            reader.layout,
            catalog.name,
            0,
            latents=seen.latents,
            captions=seen.captions,
            fields=seen.fields,
            dtype=seen.dtype,
            resolution=seen.resolution,
            seed=seen.seed,
            is_pinned=True,
        )
        self._read_from(reader, Selection.of(catalog, options, Epoch()))
        self._selection.check_captions(lambda _key: True)  # what the policy drops to is encoded first
        if joined.plan.refused_count:
            what = plural(joined.plan.refused_count, "row or file", "rows or files")
            named = first_of(f"{sample!r} ({reason})" for sample, reason in joined.plan.refused)
            _log.warning("%s of the source cannot be used: %s", what, named)
        if not joined.lacking:
            self.finish()

    def __repr__(self) -> str:
        lacking = f"; {self.not_encoded}" if self.not_encoded else ""
        return f"EncodingDataset({self._reader.layout.shown!r}, {self.name!r}: {plural(len(self), 'sample')}{lacking})"

    @property
    def not_encoded(self) -> str:
        """How much of the source was not encoded when it was opened, as a sentence; empty once the data set is complete."""
        if self._state.report is not None:
            return ""
        lacking, count = self._state.joined.lacking, self._state.joined.plan.unit_count
        return (
            f"{lacking} of {plural(count, 'caption or picture', 'captions and pictures')} ({lacking / max(1, count):.0%}) are not in"
            f" {self._reader.layout.root} yet: the first epoch encodes them"
        )

    @property
    def report(self) -> Report | None:
        """The report of the pass, as `precompute` returns it, with the failures; None until the first epoch has ended."""
        return self._state.report

    # Reading

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """As CachedDataset's, after these samples are encoded."""
        return super().__getitems__(self._encoded(indices))

    def read_batch(self, indices: Sequence[SupportsIndex], *, into: BatchBuffers | None = None) -> dict[str, Any]:
        """As CachedDataset's, after these samples are encoded."""
        return super().read_batch(self._encoded(indices), into=into)

    def batch_slice(self, indices: Sequence[SupportsIndex]) -> BatchSlice | None:
        """As CachedDataset's. Raises BadInput until the data set is complete."""
        self._check_complete("mix it")
        return super().batch_slice(indices)

    def prompt(self, caption: str) -> dict[str, Any]:
        """As CachedDataset's, for captions that are encoded already and for the empty one."""
        if not caption and self._state.report is None:
            self._encode_rows([])
        return super().prompt(caption)

    def select(self, samples: Any) -> CachedDataset:
        """As CachedDataset's. Raises BadInput until the data set is complete."""
        self._check_complete("choose samples of it")
        return super().select(samples)

    def with_dtype(self, dtype: torch.dtype | None) -> "EncodingDataset":
        """As CachedDataset's. Both encode together."""
        other = EncodingDataset.__new__(EncodingDataset)
        other._state = self._state  # noqa: SLF001 - its own class
        other._read_from(self._reader, self._selection.cast(as_dtype(dtype)))  # noqa: SLF001 - as above
        return other

    @property
    def digest(self) -> str:
        """As CachedDataset's, but the same before and after encoding, if nothing fails: a saved position stays valid."""
        return digest_parts("cachestore-encoding", self._digest, str(self._selection.options.resolution)).hex()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the finished CachedDataset. Raises BadInput until the data set is complete."""
        if self._state.report is None:
            raise BadInput(_HERE_ALONE, option="num_workers")
        return _cached, (self.__getstate__(),)

    def _read_from(self, reader: Reader, selection: Selection) -> None:
        self._digest = _digest_of(selection.catalog)
        super()._read_from(reader, selection)

    def _check_complete(self, what: str) -> None:
        if self._state.report is None:
            raise BadInput(f"{self._selection.options.called} is not encoded yet: call its `finish()` before you {what}")

    # Encoding

    def set_epoch(self, epoch: int) -> None:
        """As CachedDataset's. If every batch of an epoch was read, this is the end of that epoch."""
        self._catch_up()
        if self._state.is_all_read and self._state.report is None:
            self.finish()
        super().set_epoch(epoch)

    @contextmanager
    def reading(self, rounds: Indices, own: Indices) -> Generator[None]:
        """Take part in the pass while an epoch is read. A BucketBatchSampler calls it with the batches of all ranks, and of this one."""
        state = self._state
        if state.report is not None:
            yield
            return
        state.coming = deque(own.ravel().tolist())
        state.is_all_read = False
        state.joined.open(self._selection.rows_at(rounds.ravel().tolist()))
        try:
            yield
            state.is_all_read = True
        finally:
            state.is_all_read = state.is_all_read or (own.size > 0 and not state.coming)
            if os.getpid() == state.pid:  # a forked child has a copy of the iteration, and the pass goes on in its parent
                state.joined.close()
        self.finish()

    def finish(self) -> Report:
        """Encode all that is left, and publish the data set; return the report. Every rank calls it. The loop over a loader ends with it.

        Raises as `precompute`.
        """
        state = self._state
        if state.report is None:
            state.report = state.joined.finish()
        self._catch_up()
        return state.report

    def _catch_up(self) -> None:
        report = self._state.report
        if report is None or self._selection.options.generation == report.generation:
            return
        path = self._reader.layout.catalog(self.name, report.generation)
        catalog = read_catalog(path, generation=report.generation)
        options = replace(self._selection.options, generation=report.generation)
        self._reader.refresh()
        self._read_from(self._reader, Selection.of(catalog, options, self._selection.epoch))

    def _encoded(self, indices: Sequence[SupportsIndex]) -> Sequence[SupportsIndex]:
        state = self._state
        if state.report is not None:
            return indices
        if os.getpid() != state.pid:
            raise BadInput(_HERE_ALONE, option="num_workers")
        with state.lock:
            rows = self._selection.rows_at(indices)
            if not state.checked.issuperset(rows):
                self._encode_rows(rows)
            while state.coming and self._selection.row_numbers[state.coming[0]] in state.checked:
                state.coming.popleft()
            failed = [row in state.failed for row in rows]
        if not any(failed):
            return indices
        good = [index for index, has_failed in zip(indices, failed, strict=True) if not has_failed]
        if not good:
            raise EncodeFailed(f"no sample of this batch could be encoded: {self._why(rows)}. Mend or remove them, then run it again")
        others = [
            good[number % len(good)] if has_failed else index
            for number, (index, has_failed) in enumerate(zip(indices, failed, strict=True))
        ]
        return same_epoch(map(operator.index, others), indices)

    def _encode_rows(self, rows: Sequence[int]) -> None:
        """Encode these rows and, until there are enough, those that will be read next. No rows encode the empty caption."""
        state = self._state
        wanted = dict.fromkeys(row for row in rows if row not in state.checked)
        numbers = self._selection.row_numbers
        for index in state.coming:
            if len(wanted) >= AT_ONCE:
                break
            if numbers[index] not in state.checked:
                wanted[numbers[index]] = None
        was_open = state.joined.is_open
        if not was_open:
            state.joined.open(wanted)
        try:
            state.joined.encode(state.joined.units_of(wanted))
            self._note_failures(list(wanted))
        finally:
            if not was_open:
                state.joined.close()
        state.checked.update(wanted)

    def _note_failures(self, rows: Sequence[int]) -> None:
        joined, failed = self._state.joined, self._state.failed
        keys = {unit: joined.key(unit) for row in rows for unit in joined.units_of([row])}
        missing = set(self._reader.missing([key for key in keys.values() if key is not None]))
        lacking = {unit for unit, key in keys.items() if key is None or key in missing}
        if not lacking:
            return
        reasons = joined.reasons()
        changed = "its value is not in the store; its file may have changed since this run began, so run it again"
        for row in rows:
            if own := [unit for unit in joined.units_of([row]) if unit in lacking]:
                failed[row] = reasons.get(own[0], changed)
        if named := [row for row in rows if row in failed]:
            _log.warning("%s could not be encoded: %s", plural(len(named), "sample"), self._why(named))

    def _why(self, rows: Sequence[int]) -> str:
        ids = self._selection.catalog.ids
        return first_of(f"{ids[row]!r} ({self._state.failed[row]})" for row in rows)


def _cached(state: dict[str, Any]) -> CachedDataset:
    data = CachedDataset.__new__(CachedDataset)
    data.__setstate__(state)
    return data


def _digest_of(catalog: Catalog) -> str:
    """The digest of what is known of a data set before anything is encoded: all but the numbers of tokens."""
    known = [replace(one, facts={name: values for name, values in one.facts.items() if name != "tokens"}) for one in catalog.columns]
    return draft_of(replace(catalog, columns=tuple(known))).digest
