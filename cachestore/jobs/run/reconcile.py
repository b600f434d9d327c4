"""Reconcile: compare what is wanted with what is present. What is missing goes into a new round; if nothing is, commit.

Any worker may do it: files are never overwritten, and what is present is read from the segments, not from ledgers. It works on arrays,
so that a pass over a million units that are present takes seconds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np

from cachestore.core.errors import BadInput, EncodeFailed, FormatError
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.encode.batching.pipeline import prefetch
from cachestore.encode.batching.unit import Encoder
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import PARTITION_LIMIT
from cachestore.jobs.plan.columns import count_complete
from cachestore.jobs.run.catalog_maker import make_catalog, publish_catalog
from cachestore.jobs.run.pass_counts import count_made, count_masks, list_changed, list_failures, recheck_of
from cachestore.jobs.run.presence import Presence
from cachestore.jobs.run.task import Job
from cachestore.jobs.share.choice import LEAST_WORKERS
from cachestore.jobs.share.ledgers import read_ledgers
from cachestore.jobs.share.outcomes import FAILED, Outcomes
from cachestore.jobs.share.passes import (
    ROUND_LIMIT,
    Done,
    PassRef,
    Round,
    list_passes,
    list_rounds,
    publish_done,
    publish_round,
    read_done,
    read_round,
)
from cachestore.jobs.share.plan import Unit
from cachestore.jobs.share.stages import sum_stages
from cachestore.jobs.share.workers import read_heartbeats, seconds_of_pass
from cachestore.store.format.arrays import Mask, numbers
from cachestore.store.format.catalog import FACTS, Catalog, list_generations, read_catalog
from cachestore.store.read.held import held_keys
from cachestore.store.read.snapshot import Snapshot, load_snapshot, visible_segments
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.commit import commit


@dataclass(slots=True)
class _History:
    outcomes: Outcomes
    earlier: Mask
    """Units recorded before this launch opened a round: their files may have changed, and failed ones may succeed now."""
    tries: "np.ndarray[Any, np.dtype[np.int8]]"
    """In how many rounds each unit was."""


@dataclass(slots=True)
class Reconciler:
    """Opens and closes the rounds of one pass."""

    job: Job
    ref: PassRef
    key_of: Callable[[Unit], Key | None] = lambda _unit: None
    """Returns a unit's key if it is known without reading a file, as for captions; else None."""
    rise: Callable[[], None] = lambda: None
    """Called now and then while files and ledgers are read, so that others see that this worker lives."""
    seconds: Callable[[], float] = lambda: 0.0
    """Returns the seconds that the pass has taken, as far as this worker knows."""
    ignored_launch: str = ""
    """The launch whose ledgers are left out: a forecast is of the pass as it was when its launch joined it."""
    _presence: Presence = field(init=False)
    _read: Catalog | None = field(init=False, default=None)
    """The catalog that was read last."""
    _before: tuple[Catalog | None, Mask] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._presence = Presence(self.job.plan, self.job.files, self.key_of, self.rise, is_recheck=self.job.is_recheck)

    def open_pass(self, snapshot: Snapshot, order: Sequence[int] = ()) -> None:
        """Begin round 0 with the units that the newest catalog does not show to be present and unchanged, those of `order` first."""
        if 0 in list_rounds(self.ref.folder(self.job.layout)):
            return
        catalog, reusable = self._reusable_before(snapshot)
        generation = catalog.generation if catalog is not None and reusable.any() else None
        # A trainer claims partition by partition what it needs next: then all do.
        workers = PARTITION_LIMIT if order else max(LEAST_WORKERS, self.job.rank_info.world_size)
        self._publish_round(0, ~reusable, generation, workers, order)

    def unknown(self, snapshot: Snapshot) -> list[int]:
        """Return the units that neither an unfinished pass nor the newest catalog shows to be present. Reads no source file."""
        if list_rounds(self.ref.folder(self.job.layout)):
            known = self._history().outcomes
            reusable = self._presence.present(known, snapshot) & (known.states != FAILED)
        else:
            _catalog, reusable = self._reusable_before(snapshot)
        return np.flatnonzero(~reusable).tolist()

    def _reusable_before(self, snapshot: Snapshot) -> tuple[Catalog | None, Mask]:
        """The newest catalog before round 0, and which units it shows to be present and unchanged. Files are looked at once."""
        if self._before is None:
            catalog = self._newest()
            self._before = catalog, self._presence.reusable(self._presence.known_before(catalog), snapshot)
        return self._before

    def read_again(self, snapshot: Snapshot, threads: int) -> tuple[list[int], dict[str, Json]]:
        """Read every file again. Return the units that are not present or whose files changed, and what `recheck_of` says of them."""
        known, presence = self.outcomes(), self._presence
        present = presence.present(known, snapshot) & (known.states != FAILED)
        wanted = np.flatnonzero(present & presence.of_files()).tolist()
        changed = np.zeros(len(known), np.bool_)
        found = prefetch(lambda index: presence.has_other_bytes(index, known), iter(wanted), threads=threads, depth=2 * threads)
        for index, is_changed in zip(wanted, found, strict=True):
            self.rise()
            changed[index] = is_changed
        read = np.zeros(len(known), np.bool_)
        read[wanted] = True
        return np.flatnonzero(~present | changed).tolist(), recheck_of(self.job.plan, read, changed)

    def held_elsewhere(self, indices: Sequence[int], snapshot: Snapshot) -> list[int]:
        """Return those of these units whose entry is in the store by another pass all the same, such as captions of another data set.

        Checks only units whose key is known without reading a file.
        """
        keys = ((index, self.key_of(self.job.plan.unit(index))) for index in indices)
        known = {index: key for index, key in keys if key is not None}
        held = held_keys(snapshot, np.frombuffer(b"".join(known.values()), np.uint8).reshape(-1, KEY_BYTES))
        found = [index for index, is_held in zip(known, held.tolist(), strict=True) if is_held]
        if not list_rounds(self.ref.folder(self.job.layout)):
            return found
        located = zip(found, snapshot.find([known[index] for index in found]), strict=True)
        return [index for index, locations in located if all(location.segment.origin != self.ref.origin for location in locations)]

    def outcomes(self) -> Outcomes:
        """Return what is known of each unit: from the ledgers and what round 0 left out; before round 0, from the newest catalog."""
        if list_rounds(self.ref.folder(self.job.layout)):
            return self._history().outcomes
        return self._presence.known_before(self._newest())

    def close_round(self, opened: Round, snapshot: Snapshot) -> Done | None:
        """Open a round for what is missing and return None; or commit, publish the catalog and end the pass.

        Every partition of the round must have a ledger. Also returns None if a segment disappeared meanwhile, such as by garbage
        collection: call again with a newer snapshot.
        """
        history = self._history()
        outcomes, presence = history.outcomes, self._presence
        missing = ~presence.present(outcomes, snapshot) | (outcomes.states == FAILED)
        # Files with a new stat record that were recorded before this launch are digested again.
        for index in np.flatnonzero(history.earlier & ~missing & presence.of_files()).tolist():
            self.rise()
            if not presence.is_trusted(index, outcomes) and presence.has_other_bytes(index, outcomes):
                missing[index] = True
        # Not units that failed for good in this launch, nor those that had three rounds.
        is_final = (outcomes.states == FAILED) & ~outcomes.transient
        reopened = missing & (history.earlier | (~is_final & (history.tries < ROUND_LIMIT)))
        if reopened.any():
            self._publish_round(opened.number + 1, reopened, opened.generation, opened.workers)
            return None
        failed = {index: outcomes.reason(index) for index in np.flatnonzero(missing).tolist()}
        return self._finish(outcomes, failed, snapshot)

    def _publish_round(self, number: int, chosen: Mask, generation: int | None, workers: int, order: Sequence[int] = ()) -> None:
        plan = self.job.plan
        listed = np.array([*dict.fromkeys((*order, *np.flatnonzero(chosen).tolist()))], np.int64)
        listed = listed[chosen[listed]]
        recipes = np.searchsorted([plan.units_of(recipe).stop for recipe in range(len(plan.recipes))], listed, side="right")
        units = tuple(listed[recipes == recipe].tolist() for recipe in range(len(plan.recipes)))
        request = self.job.request if number == 0 else None
        opened = Round(number, units, self.job.launch, time.time(), generation, workers)
        publish_round(self.job.layout, self.ref, plan, opened, request)

    # What is known

    def _newest(self) -> Catalog | None:
        """Return the newest readable catalog of the plan's name, or None."""
        for generation in reversed(list_generations(self.job.layout, self.job.plan.catalog) if self.job.plan.catalog else []):
            with suppress(OSError):
                if (catalog := self._catalog(generation)) is not None:
                    return catalog
        return None

    def _catalog(self, generation: int | None) -> Catalog | None:
        """Return a generation of the plan's catalog; None if it is gone or damaged: its units then count as missing."""
        if generation is not None and (self._read is None or self._read.generation != generation):
            with suppress(FormatError, FileNotFoundError):
                self._read = read_catalog(self.job.layout.catalog(self.job.plan.catalog, generation), generation=generation, io="mmap")
        return self._read if self._read is not None and self._read.generation == generation else None

    def _history(self) -> _History:
        folder, count = self.ref.folder(self.job.layout), self.job.plan.unit_count
        history = _History(Outcomes(count, FACTS), np.zeros(count, np.bool_), np.zeros(count, np.int8))
        began = False
        for number in list_rounds(folder):
            opened = read_round(self.job.layout, self.ref, self.job.plan, number)
            if opened.launch == self.job.launch and not began:
                # This launch checked everything when it opened the round. If it checked the later ledgers of others again each time,
                # two launches at once would reopen permanent failures for ever.
                began = True
                history.earlier[:] = False
            worked = np.zeros(count, np.bool_)
            for units in opened.units:
                worked[numbers(units)] = True
            if number == 0 and not worked.all():
                history.outcomes = self._presence.known_before(self._catalog(opened.generation))
                history.outcomes.forget(worked)
                history.earlier = history.outcomes.known & (not began)
            history.tries += worked
            succeeded = np.zeros(count, np.bool_)  # a unit may be in the ledgers of two workers
            for ledger in read_ledgers(folder, number):
                self.rise()
                if self.ignored_launch and ledger.launch == self.ignored_launch:
                    continue
                indices = [outcome.unit for outcome in ledger.outcomes]
                if max(indices, default=0) >= max(count, 1):  # of another plan: its units count as missing
                    continue
                counted = [outcome for outcome in ledger.outcomes if outcome.result != "failed" or not succeeded[outcome.unit]]
                succeeded[[outcome.unit for outcome in counted if outcome.result != "failed"]] = True
                history.outcomes.record(counted)
                history.earlier[indices] = not (began or ledger.launch == self.job.launch)
        return history

    # The end

    def _finish(self, outcomes: Outcomes, failed: Mapping[int, str], snapshot: Snapshot) -> Done | None:
        """Commit, publish the catalog and end the pass. Return None if a segment disappeared or was marked for deletion meanwhile."""
        failpoint("reconcile.before_commit")
        with closing(commit(self.job.layout, snapshot=snapshot)) as committed:
            failpoint("reconcile.after_commit")
            generation, digest, usable, listing = committed.generation, "", None, 0
            before = self._presence.known_before(self._newest()) if self.job.is_recheck else None
            if self.job.publish is not None:
                generation = self.job.publish(failed)
            elif self.job.plan.catalog:
                catalog, generation, digest = publish_catalog(self._presence, self.job, outcomes, failed, self._newest)
                usable, listing = count_complete(catalog), catalog.listing
            failpoint("reconcile.before_done")
            # gc marks segments for deletion before it reads what catalogs need. This code reads what is marked after its catalog is
            # published. So one of the two sees the other, however long either pauses in between.
            if not snapshot.listed <= visible_segments(self.job.layout):
                return None
            report = self._report(outcomes, failed, generation, digest, committed)
            if before is not None:
                read = self._presence.of_files() & outcomes.known & (outcomes.states != FAILED)
                changed = read & before.keyed & (before.inputs != outcomes.inputs).any(axis=1)
                report["rechecked"] = recheck_of(self.job.plan, read, changed)
        heartbeats = read_heartbeats(self.job.layout, plan=self.job.plan.name, number=self.ref.number)
        began = min((shown.started for shown in heartbeats if shown.launch == self.job.launch), default=0.0)
        now = [shown.encoded for shown in heartbeats if shown.updated >= began]
        earlier = max(0, int(report["encoded"]) - sum(now)) if len(now) < len(heartbeats) else 0
        stages = sum_stages(shown.stages for shown in heartbeats)
        report |= {"stages": stages, "usable": usable, "listing": listing, "encoded_earlier": earlier}
        launches = [*(shown.launch for shown in heartbeats), self.job.launch]
        return publish_done(self.job.layout, self.ref, report, launches, self.job.request)

    def rebuild_catalog(self, generation: int, digest: str, listing: int) -> bool:
        """Publish again, from plan and ledgers, the generation with which this pass ended.

        Return False, and publish nothing, if the catalog made now does not have `digest`.
        """
        outcomes = self._history().outcomes
        without = (outcomes.states == FAILED) | ~outcomes.keyed
        failed = dict.fromkeys(np.flatnonzero(without).tolist(), "")
        catalog = make_catalog(self._presence, self.job, outcomes, failed, self._newest())
        draft = draft_of(replace(catalog, listing=listing))
        if draft.digest == digest:
            publish_draft(self.job.layout, draft, after=generation - 1)
        return draft.digest == digest

    def _report(self, outcomes: Outcomes, failed: Mapping[int, str], generation: int, digest: str, snapshot: Snapshot) -> dict[str, Json]:
        made, size_bytes = count_made(outcomes, failed, snapshot)
        refused = self.job.plan.refused_count
        return {
            "complete": not failed and not refused,
            "samples": len(self.job.plan.ids) + refused,
            "wanted": self.job.plan.unit_count + refused,
            "reused": self.job.plan.unit_count - made - len(failed),
            "encoded": made,
            "failed": len(failed) + refused,
            "missing": 0,
            "seconds": round(max(self.seconds(), seconds_of_pass(self.job.layout, self.ref.plan, self.ref.number)), 3),
            "bytes": size_bytes,
            "store": str(self.job.layout.root),
            # What a pass publishes as a session does is not rebuilt from its plan: entries of the data set's line are.
            "name": "" if self.job.plan.ids_are_keys else self.job.plan.catalog,
            "plan": self.job.plan.name,
            "pass": self.ref.number,
            "generation": generation,
            "catalog_digest": digest,
            "failures": list_failures(self.job.plan, failed),
            "changed": list_changed(self._presence, outcomes),
            "masks": count_masks(self.job.plan, outcomes),
            "unused": [dict(row) for row in self.job.unused],
        }


def unknown_units(job: Job, rise: Callable[[], None], ignored_launch: str = "") -> tuple[Reconciler, list[int]]:
    """Return the reconciler of the pass that a run would join or begin, and the units that are not known to be present; begins no pass.

    With an `ignored_launch`, as they were when that launch joined the pass.
    """
    reconciler = reconciler_of_next(job, rise, ignored_launch)
    with closing(load_snapshot(job.layout, for_planning=True)) as snapshot:
        return reconciler, reconciler.unknown(snapshot)


def reconciler_of_next(job: Job, rise: Callable[[], None], ignored_launch: str = "") -> Reconciler:
    """Return the reconciler of the pass that a run would join or begin: the newest one, or the next if that has ended."""
    numbers = list_passes(job.layout, job.plan.name)
    ref = PassRef(job.plan.name, numbers[-1] if numbers else 0)
    ended = read_done(job.layout, ref) if numbers else None
    if ended is not None and (not ignored_launch or ignored_launch not in ended.launches):
        ref = PassRef(ref.plan, ref.number + 1)
    return Reconciler(job, ref, key_without_reading(job.encoders), rise, ignored_launch=ignored_launch)


def key_without_reading(encoders: Sequence[Encoder]) -> Callable[[Unit], Key | None]:
    """Return a function that gives a unit's key, or None if that takes reading a file or resolving fails."""

    def key_of(unit: Unit) -> Key | None:
        try:
            return encoders[unit.recipe].resolve(unit.request, _Unread()).key
        except (OSError, EncodeFailed, BadInput):
            return None

    return key_of


class _Unread:
    """Refuses to read. Implements `unit.Read`."""

    def __call__(self, reference: str, /) -> bytes:
        raise OSError(reference)

    def open(self, reference: str) -> AbstractContextManager[BinaryIO]:
        raise OSError(reference)
