"""One worker's part of a pass: claim partitions, resolve units, encode what is missing, append, and write ledgers.

A worker waits for others only if nothing is left to do, and only for a limited time. Rank and world size decide the order alone.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.forked import in_one_thread
from cachestore.core.inputs import combined_stat
from cachestore.encode.batching.batches import Batches
from cachestore.encode.batching.pipeline import prefetch
from cachestore.encode.batching.unit import Encoder
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import ClaimName, LedgerName
from cachestore.jobs.run.claiming import Claiming, Patience
from cachestore.jobs.run.encoding import EncoderState, Encoding
from cachestore.jobs.run.known_entries import KnownEntries
from cachestore.jobs.run.task import DecodedUnit, Job, PartitionGroup, UnitReader, words_of
from cachestore.jobs.share.attempts import Attempts
from cachestore.jobs.share.choice import poll_seconds
from cachestore.jobs.share.claims import Claims, Slot
from cachestore.jobs.share.ledgers import Ledger, Outcome, list_ledgers, publish_ledger
from cachestore.jobs.share.partition import runs_of
from cachestore.jobs.share.passes import PassRef, Round
from cachestore.jobs.share.plan import Unit
from cachestore.jobs.share.stages import Stages
from cachestore.jobs.share.workers import Heartbeat, Watch
from cachestore.store.read.snapshot import Snapshot

WAITING_BYTES: Final = 1 << 30
"""While prepared units take more memory than this, no further one is begun; a few videos are enough."""

_Step = tuple[PartitionGroup, Unit | None]
"""A unit of a group; None at the group's end."""


class Worker:
    """Does one worker's part of rounds. For use in one thread; the threads that prefetch and append end before a call returns."""

    def __init__(
        self,
        job: Job,
        ref: PassRef,
        heartbeat: Heartbeat,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.job = job
        self.heartbeat = heartbeat
        self.claims = Claims(job.layout, ref.folder(job.layout), heartbeat.worker, Watch(job.layout, clock))
        self.attempts = Attempts(job.layout, self.claims.folder, heartbeat.worker)
        self._known = KnownEntries(job.layout, ref)
        self._stages = Stages(clock)
        self._encoding = Encoding(job, ref, heartbeat, self._known, self._stages, clock=clock)
        self._claiming = Claiming(job, self.claims, renew=self._known.renew, check_cancelled=self._encoding.check_cancelled)
        self._states = [EncoderState(n, encoder, Batches(encoder.batch_limit)) for n, encoder in enumerate(job.encoders)]
        self._sleep = sleep

    @property
    def snapshot(self) -> Snapshot:
        """This worker's latest snapshot of the store."""
        return self._known.snapshot

    def newer_snapshot(self) -> Snapshot:
        """Return a new snapshot of the store, without parsing headers that this worker knows. The caller closes it."""
        return self._known.newer_snapshot()

    def close(self) -> None:
        """Release models and files; discard entries that are not acknowledged."""
        self._encoding.discard()
        for encoder in self.job.encoders:
            encoder.close()
        self._known.close()

    @in_one_thread
    def do_round(self, opened: Round, only: Sequence[Sequence[int]] | None = None) -> None:
        """Work until every partition of a round has a ledger, by this worker or another; with `only`, those partitions of each recipe.

        With `only` the models stay loaded. Raises Incomplete if cancelled or if no progress is made any more, WriteFailed if writing fails.
        """
        counts = [range(opened.partition_count(recipe)) for recipe in range(len(self.job.plan.recipes))]
        for state in self._states:
            state.only = None if only is None else only[state.recipe]
        waits = Patience()
        if opened.number > 0:  # it was opened because something is missing: do not trust what was remembered
            self._known.forget()
        while True:
            worked = False
            for state in self._states:
                while taken := self._claiming.take(opened, state.recipe, only=state.only):
                    worked = True
                    self._do_group(state, self._claiming.group_of(opened, taken))
                if state.only is None:
                    state.encoder.close()
                    state.is_warm = False
            finished = list_ledgers(self.claims.folder, opened.number)
            missing = [(recipe, p) for recipe, wanted in enumerate(only or counts) for p in wanted if (recipe, p) not in finished]
            if not missing:
                return
            if not worked:
                newest = self.claims.newest(opened.number)
                self.wait(waits, len(finished), {slot: newest[slot] for slot in missing if slot in newest})

    def wait(self, waits: Patience, state: object, claims: Mapping[Slot, ClaimName]) -> None:
        """Wait for one poll, as others hold all that is left. `claims` may be empty.

        Raises Incomplete if cancelled, or if `state`, the claims and their holders' counts have not changed for too long.
        """
        self.heartbeat.show(doing="waiting for other ranks")
        self._claiming.check_patience(waits, state, claims)
        self._encoding.check_cancelled()
        self._encoding.report_progress()
        self._sleep(poll_seconds(self.job.rank_info.world_size))

    def _do_group(self, state: EncoderState, group: PartitionGroup) -> None:
        """Do a group of partitions, and further ones while many are free."""
        self.heartbeat.rise(phase="working", doing=f"encoding {state.encoder.recipe.encoder}" if state.is_warm else "reading")
        with self._encoding.behind(), self._stages.stretch(max(1, self.job.threads)):
            try:
                if group.dead:
                    self._do_one_by_one(state, group)
                else:
                    self._do_in_batches(state, group)
                self._encoding.finish()
            except (KeyboardInterrupt, SystemExit):
                self._encoding.publish_pending()
                raise
            except Exception:
                self._encoding.rescue()
                raise
        self._known.close_stale()
        self.heartbeat.stages = self._stages.seconds()
        self.heartbeat.write()

    def _do_in_batches(self, state: EncoderState, group: PartitionGroup) -> None:
        encoder, threads = state.encoder, self.job.threads
        decoded = prefetch(
            lambda step: (step[0], None if step[1] is None else self._decode(encoder, step[1])),
            self._units(state, group),
            threads=threads,
            depth=max(2 * threads, encoder.window),
            weigh=lambda step: step[1].waiting_bytes if isinstance(step[1], DecodedUnit) else 0,
            most=WAITING_BYTES,
        )
        with closing(decoded):  # its threads end here, also after an error
            for of, unit in decoded:
                self._encoding.check_cancelled()
                if unit is None:
                    self._finish(state, of)
                else:
                    self._encoding.add(state, of, unit)
                self.heartbeat.rise(phase="working")

    def _units(self, state: EncoderState, group: PartitionGroup) -> Iterator[_Step]:
        """Yield the units of a group and its end, then those of the next group, which is claimed only then."""
        while True:
            for _recipe, p in group.slots:
                yield from ((group, self.job.plan.unit(index)) for index in group.opened.partition(state.recipe, p))
            yield group, None
            taken = self._claiming.take(group.opened, state.recipe, only=state.only, is_prefetch=True)
            if not taken:
                return
            group = self._claiming.group_of(group.opened, taken)

    def _do_one_by_one(self, state: EncoderState, group: PartitionGroup) -> None:
        """Do partitions with which workers died: each unit alone, named in a file first. Units that dead workers named are failed."""
        named = self.attempts.last_units()
        deadly = {named[worker]: self._claiming.how_they_died(group.dead, worker) for worker in group.dead if worker in named}
        try:
            for index in (index for _recipe, p in group.slots for index in group.opened.partition(state.recipe, p)):
                self._encoding.check_cancelled()
                if index in deadly:
                    self._encoding.add(state, group, Outcome(index, "failed", reason=deadly[index]))
                    continue
                self.attempts.begin(index)
                self._encoding.add(state, group, self._decode(state.encoder, self.job.plan.unit(index)))
                self._encoding.encode_rest(state, group)
                self._encoding.land(0)
                self.heartbeat.rise(phase="working")
            self._finish(state, group)
        finally:
            self.attempts.end()

    def _finish(self, state: EncoderState, group: PartitionGroup) -> None:
        """Encode the batches that are not full, close the segment, then write the ledgers of the group."""
        self._encoding.encode_rest(state, group)
        self._encoding.after_all(partial(self._write_ledgers, state, group))

    def _write_ledgers(self, state: EncoderState, group: PartitionGroup) -> None:
        """Write the ledgers of a group, whose entries are acknowledged."""
        failpoint("worker.before_ledger")
        for run in runs_of(sorted(p for _recipe, p in group.slots)):
            outcomes = tuple(group.outcomes[index] for p in run for index in group.opened.partition(state.recipe, p))
            name = LedgerName(group.opened.number, state.recipe, run.start, run.stop - 1)
            publish_ledger(self.job.layout, self.claims.folder, Ledger(name, self.heartbeat.worker, self.job.launch, outcomes))
        found = group.repeated + sum(1 for outcome in group.outcomes.values() if outcome.result == "found")
        failed = sum(1 for outcome in group.outcomes.values() if outcome.result == "failed")
        self.heartbeat.reused += found
        self.heartbeat.failed += failed
        self.heartbeat.has_finished(state.encoder.recipe.encoder, units=found + failed)
        self.heartbeat.write()
        self._encoding.report_progress()
        self._known.commit_if_due()

    def _decode(self, encoder: Encoder, unit: Unit) -> DecodedUnit | Outcome:
        """Resolve a unit, and prepare it if its key is not in the store. Runs in threads, so it uses only what is safe there."""
        reading = UnitReader(self.job.files)
        try:
            with self._stages.busy("read"):
                resolved = encoder.resolve(unit.request, reading)
                stat = combined_stat(list(reading.stats))
                found = self._known.find(unit, resolved, stat)
            if found is not None:
                return found
            with self._stages.busy("prepare"):
                return DecodedUnit(unit, resolved, encoder.prepare(resolved), stat)
        except BadInput:
            raise  # the request or the model itself is wrong: every unit would fail
        except EncodeFailed as error:
            return Outcome(unit.index, "failed", reason=str(error))
        except (OSError, MemoryError) as error:
            return Outcome(unit.index, "failed", reason=words_of(error), is_transient=True)
