"""This process's part of a pass whose units are encoded when a trainer asks for them.

The pass is that of `precompute` with the same arguments: other ranks, and other processes that run `precompute`, share it by claims.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Key
from cachestore.core.words import first_of, plural
from cachestore.encode.batching.environment import set_library_defaults
from cachestore.encode.batching.pipeline import prefetch
from cachestore.files.marker import noticing_its_end
from cachestore.jobs.run.catalog_maker import make_catalog
from cachestore.jobs.run.presence import Presence
from cachestore.jobs.run.reconcile import Reconciler, key_without_reading, unknown_units
from cachestore.jobs.run.task import Job, UnitReader, outcome_of
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.agreement import check_agreement, wait_for_rank_0
from cachestore.jobs.share.invocations import invocation_of, numbered
from cachestore.jobs.share.ledgers import Outcome, read_ledgers
from cachestore.jobs.share.passes import Round, join_pass, list_rounds, read_round
from cachestore.jobs.share.plan import Plan
from cachestore.jobs.share.report import Report
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start.here import list_and_plan, precompute_here
from cachestore.jobs.start.ranks import find_rank, launch_of, threads_for
from cachestore.sources.combined import InMemory
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.held import held_keys
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.commit import publish_recipe

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel
    from cachestore.jobs.plan.options import PrecomputeRequest
    from cachestore.jobs.share.outcomes import Outcomes

_log = logging.getLogger("cachestore")

_WAITING: Final = "waiting for the trainer"


@dataclass(slots=True)
class _Open:
    """The pass while this process works on it."""

    stack: ExitStack
    heartbeat: Heartbeat
    worker: Worker
    round: Round
    partitions: NDArray[np.int64]
    """By unit index, its partition in the round; -1 if it is not in the round, as it was there before."""
    finished: NDArray[np.bool_]
    """Whether a unit needs no more work in this round."""


class JoinedPass:
    """The plan of a request, and this process's part of its pass. For use by one thread at a time."""

    def __init__(self, request: "PrecomputeRequest", loaded: "LoadedModel | None", in_memory: InMemory) -> None:
        """List the source, plan, and find the key of every unit: reads every file once. Raises as `precompute`."""
        set_library_defaults(os.environ)
        self._request, self._loaded, self._in_memory = request, loaded, in_memory
        self._rank_info = find_rank(request.rank, request.world_size)
        self._launch = launch_of(self._rank_info)
        self._open: _Open | None = None
        self._encoded_here = 0
        # `finish` takes the number of a listing of its own: it lists again what the data set will have.
        planning = list_and_plan(request, self._rank_info, self._launch, number=0, in_memory=in_memory, loaded=loaded)
        with planning as (planned, heartbeat, _number):
            self._wanted, self.layout, self.plan = planned, planned.layout, planned.plan
            self._alone = units_alone(self.plan)
            self._threads = threads_for(request.workers, self._rank_info.local_world_size)
            heartbeat.show(doing="reading the sources")
            self._find_keys(heartbeat)

    def _new_heartbeat(self) -> Heartbeat:
        return Heartbeat(self.layout, "", 0, self._launch, self._rank_info.rank, self._rank_info.world_size)

    def _find_keys(self, heartbeat: Heartbeat) -> None:
        reconciler, unknown = unknown_units(self._job(None), heartbeat.rise)
        outcomes = reconciler.outcomes()
        outcomes.forget(np.array(unknown, np.int64))
        self._unresolved: dict[int, str] = {}
        for outcome in prefetch(self._resolve, iter(unknown), threads=self._threads, depth=2 * self._threads):
            heartbeat.rise()
            if outcome.result == "failed":
                self._unresolved[outcome.unit] = outcome.reason
            else:
                outcomes.record([outcome])
        self._outcomes: Outcomes = outcomes
        with closing(load_snapshot(self.layout, for_planning=True)) as snapshot:
            is_lacking = ~held_keys(snapshot, outcomes.keys)
        is_lacking[list(self._unresolved)] = False
        self.lacking = int(is_lacking.sum())
        """How many units the store lacked when this was made."""

    def _resolve(self, index: int) -> Outcome:
        unit = self.plan.unit(index)
        reading = UnitReader(self._wanted.files)
        try:
            resolved = self._wanted.encoders[unit.recipe].resolve(unit.request, reading)
        except (EncodeFailed, OSError, MemoryError) as error:
            return Outcome(index, "failed", reason=str(error) or type(error).__name__)
        return outcome_of(unit, "found", resolved, (-1, -1), resolved.facts)

    def catalog(self) -> Catalog:
        """Return the catalog that the pass will publish if every unit can be encoded. Cells of unreadable inputs are empty."""
        job = replace(self._job(None), request=self._wanted.request.hints())
        presence = Presence(self.plan, self._wanted.files, is_recheck=self._request.recheck)
        return make_catalog(presence, job, self._outcomes, self._unresolved, newest_catalog(self.layout, self.plan.catalog))

    def _job(self, heartbeat: Heartbeat | None) -> Job:
        wanted, launch = self._wanted, numbered(self._launch, invocation_of(self.layout, self.plan.name, self._rank_info))
        return Job(
            self.layout,
            self.plan,
            wanted.encoders,
            wanted.files,
            self._rank_info,
            launch,
            request=wanted.request.hints(),
            threads=self._threads,
            heartbeat=heartbeat,
            unused=wanted.unused,
            is_recheck=self._request.recheck,
            compare=partial(wanted.compare, self.plan),
        )

    def units_of(self, rows: Iterable[int]) -> Iterator[int]:
        """Yield the units of these rows of the plan, after those that no row refers to, such as the empty caption."""
        yield from self._alone
        for row in rows:
            for at, units in self.plan.cells:
                yield from units[at[row] : at[row + 1]]

    # Encoding

    @property
    def is_open(self) -> bool:
        """Whether this process takes part in the pass now."""
        return self._open is not None

    def open(self, rows: Iterable[int]) -> None:
        """Take part in the pass. If this process begins it, units come in the order in which these rows need them.

        Raises BadInput if another rank of the launch has another source or model.
        """
        with ExitStack() as stack:
            heartbeat = stack.enter_context(self._new_heartbeat())
            heartbeat.detail = self._wanted.intent.as_json()
            heartbeat.write()
            check_agreement(self.layout, self._wanted.intent, heartbeat, _log.warning, strict=self._request.strict)
            job = self._job(heartbeat)
            ref = join_pass(self.layout, self.plan.name, job.launch)
            heartbeat.join(ref.plan, ref.number, job.launch)
            for recipe in self.plan.recipes:
                publish_recipe(self.layout, recipe)
            worker = stack.enter_context(closing(Worker(job, ref, heartbeat)))
            folder = ref.folder(self.layout)
            if heartbeat.rank not in {0, None}:
                wait_for_rank_0(self.layout, heartbeat, lambda: bool(list_rounds(folder)))
            reconciler = Reconciler(job, ref, key_without_reading(job.encoders), heartbeat.rise)
            reconciler.open_pass(worker.snapshot, list(dict.fromkeys(self.units_of(rows))))
            opened = read_round(self.layout, ref, self.plan, 0)
            partitions = partitions_of(opened, self.plan.unit_count)
            heartbeat.rise(phase="working", doing=_WAITING)
            self._open = _Open(stack.pop_all(), heartbeat, worker, opened, partitions, partitions < 0)

    def encode(self, units: Iterable[int]) -> None:
        """Encode these units and wait until they are in the store, by this process or another. Their models stay loaded.

        Raises WriteFailed if writing fails, Incomplete if another process that works on them makes no progress.
        """
        assert self._open is not None
        now = self._open
        wanted = np.array([unit for unit in units if not now.finished[unit]], np.int64)
        if not len(wanted):
            return
        only: list[list[int]] = [[] for _recipe in self.plan.recipes]
        for unit in wanted.tolist():
            only[self.plan.recipe_of(unit)].append(int(now.partitions[unit]))
        only = [list(dict.fromkeys(each)) for each in only]
        with noticing_its_end(self.layout), self._evaluating():
            now.worker.do_round(now.round, only)
        now.heartbeat.rise(doing=_WAITING)
        for recipe, each in enumerate(only):
            for partition in each:
                now.finished[list(now.round.partition(recipe, partition))] = True

    def _evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._loaded is None else self._loaded.evaluating()

    def key(self, unit: int) -> Key | None:
        """Return a unit's key; None if its input cannot be read."""
        return self._outcomes.key(unit)

    def reasons(self) -> Mapping[int, str]:
        """Return why units failed so far, by unit index."""
        assert self._open is not None
        ledgers = read_ledgers(self._open.worker.claims.folder, self._open.round.number)
        return self._unresolved | {one.unit: one.reason for ledger in ledgers for one in ledger.outcomes if one.result == "failed"}

    def close(self) -> None:
        """Release the models. What is encoded stays, and this process may join the pass again."""
        if self._open is not None:
            now, self._open = self._open, None
            now.stack.__exit__(*sys.exc_info())  # where an error ends the epoch, another one does not take its place
            self._encoded_here += now.heartbeat.encoded

    def finish(self) -> Report:
        """Encode what nobody asked for, and publish the data set; the same report on every rank. Raises as `precompute`."""
        if self._open is not None:
            with noticing_its_end(self.layout), self._evaluating():
                self._open.worker.do_round(self._open.round)
        self.close()
        with self._evaluating():
            report = precompute_here(self._request, loaded=self._loaded, in_memory=self._in_memory, launch=self._launch)
        if report.plan != self.plan.name:
            _log.warning(
                "the source changed while it was encoded: the data set has the %s that it lists now", plural(report.samples, "sample")
            )
        if not report.complete:
            named = first_of(sorted({repr(failure["sample"]) for failure in report.failures}))
            failed = plural(report.failed, "caption or picture", "captions and pictures")
            _log.warning(
                "%s could not be encoded (samples %s): from the next epoch on these samples are left out; `cachestore why` says why",
                failed,
                named,
            )
        return replace(report, encoded_here=report.encoded_here + self._encoded_here)


def units_alone(plan: Plan) -> Sequence[int]:
    """Return the units that no row refers to."""
    referenced = np.zeros(plan.unit_count, np.bool_)
    for _at, units in plan.cells:
        referenced[np.asarray(units, np.int64)] = True
    return np.flatnonzero(~referenced).tolist()


def partitions_of(opened: Round, count: int) -> NDArray[np.int64]:
    """Return the partition of each of a plan's `count` units in a round; -1 for those that are not in it."""
    partitions = np.full(count, -1, np.int64)
    for recipe, units in enumerate(opened.units):
        each: Any = np.asarray(units, np.int64)
        total = opened.partition_count(recipe)
        ends = [len(opened.partition(recipe, number)) for number in range(total)]
        partitions[each] = np.repeat(np.arange(total), ends)
    return partitions
