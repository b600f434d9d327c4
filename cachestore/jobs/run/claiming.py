"""Claims partitions for a worker: free ones, those of a dead worker, and when idle that of the slowest living one. Encodes nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachestore.core.errors import Incomplete
from cachestore.core.words import plural
from cachestore.files.paths import ClaimName
from cachestore.jobs.run.task import Job, PartitionGroup
from cachestore.jobs.share.choice import GROUP_UNITS, Takeover, choose, parts_to_take, ranges_of
from cachestore.jobs.share.claims import Claims, Slot
from cachestore.jobs.share.ledgers import list_ledgers
from cachestore.jobs.share.passes import Round

STUCK_SECONDS: Final = 1800.0
"""After so long without any progress, waiting ends with an error that names the workers waited for."""

WINDOWS: Final = 4
"""A worker claims units for this many times `Encoder.window`, the units that may wait for a batch."""


class Claiming:
    """Claims partitions of a job's rounds, and bounds the time that a worker waits for others."""

    def __init__(self, job: Job, claims: Claims, *, renew: Callable[[], None], check_cancelled: Callable[[], None]) -> None:
        """`renew` is called after a partition was taken over, `check_cancelled` while other workers are faster."""
        self._job = job
        self._claims = claims
        self._renew = renew
        self._check_cancelled = check_cancelled
        self._lost: dict[tuple[int, int], set[int]] = {}
        """By round and recipe: partitions that others claimed though no listing shows it yet. On NFS that takes up to a minute."""

    def take(self, opened: Round, recipe: int, *, only: Sequence[int] | None = None, is_prefetch: bool = False) -> list[Slot]:
        """Claim and return a recipe's next partitions: free ones, else those of a dead worker, else one of the slowest living worker.

        With `is_prefetch`, while earlier ones are still being done, claim only free ones, and only if many are left. With `only`, claim
        none but these, as many at once as make whole batches, since this worker needs them all now.
        """
        count, world = opened.partition_count(recipe), self._job.rank_info.world_size if only is None else 1
        each = len(opened.units[recipe]) // max(1, count)
        units = max(GROUP_UNITS, WINDOWS * self._job.encoders[recipe].window)
        # What a trainer needs now is claimed partition by partition: ranks that need some of the same at once then share them.
        cut = ranges_of(count, each=each, workers=opened.workers, units=units)
        ranges = cut if only is None else [range(p, p + 1) for p in only]
        rank = self._job.rank_info.rank
        start = 0 if only is not None else int(self._claims.worker[:8], 16) if rank is None else rank
        lost = self._lost.setdefault((opened.number, recipe), set())
        while True:
            finished = {p for of, p in list_ledgers(self._claims.folder, opened.number) if of == recipe}
            newest = {p: claim for (of, p), claim in self._claims.newest(opened.number).items() if of == recipe}
            claimed = lost.union(newest)
            choice = choose(ranges, finished=finished, claimed=claimed, start=start, each=each, world_size=world, units=units)
            if is_prefetch and not choice.is_plenty:
                return []
            if not choice.free:
                lost.clear()
                held = self._claims.judge({(recipe, p): newest[p] for p in choice.held if p in newest})
                return self._take_over(opened, parts_to_take(held, each=each, workers=opened.workers, world_size=world, units=units))
            taken = [partitions for partitions in choice.free if self._claims.take(opened.number, recipe, partitions)]
            if taken:
                return [(recipe, p) for partitions in taken for p in partitions]
            lost.update(p for partitions in choice.free for p in partitions)
            self._check_cancelled()

    def _take_over(self, opened: Round, takeover: Takeover) -> list[Slot]:
        taken: list[Slot] = []
        for claim, partitions in takeover.parts:
            if taken and len(taken) + len(partitions) > takeover.most:
                break
            if self._claims.take(opened.number, claim.recipe, partitions, after=claim):
                taken += [(claim.recipe, p) for p in partitions]
        if taken:
            self._renew()
        return taken

    def group_of(self, opened: Round, slots: list[Slot]) -> PartitionGroup:
        """Return these partitions as one group, with the workers that died while they held one of them."""
        return PartitionGroup(opened, slots, self._claims.died_before(opened.number, slots[0][0], {p for _recipe, p in slots}))

    def how_they_died(self, dead: Sequence[str], alone: str) -> str:
        """Return why a unit is not tried again in this pass: the worker `alone` died when it encoded the unit alone."""
        watch, others = self._claims.watch, [worker for worker in dead if worker != alone]
        if not others:
            return f"a worker died encoding it alone: {watch.name_of(alone)}; the next run tries it again"
        among = f"{watch.name_of(others[0])} with it among others, {watch.name_of(alone)} with it alone"
        return f"two workers died encoding it: {among}; the next run tries it again"

    def check_patience(self, waits: "Patience", state: object, claims: Mapping[Slot, ClaimName]) -> None:
        """Raise Incomplete if `state`, these claims (there may be none) and their holders' counts have not changed for too long."""
        watch, seen = self._claims.watch, (state, tuple(sorted(claims.values())))
        holders = [holder for claim in claims.values() if (holder := self._claims.holder(claim)) is not None]
        bound = max([STUCK_SECONDS, *(2 * watch.patience(holder) for holder in holders)])
        if seen != waits.seen:
            waits.seen, waits.since = seen, watch.clock()
        if min([watch.clock() - waits.since, *map(watch.still_seconds, holders)]) > bound:
            raise Incomplete(
                f"{self._waits_for(claims)}; no progress for {bound / 60:.0f} minutes: look at `cachestore status`, then run the"
                " same command again"
            )

    def _waits_for(self, claims: Mapping[Slot, ClaimName]) -> str:
        named = [f"{self._name_of(slot)} held by {self._owner(claim)}" for slot, claim in list(claims.items())[:3]]
        what = f"{plural(len(claims), 'part')} of the work: {'; '.join(named)}" if named else "work that no process has claimed"
        return f"the run over {self._job.plan.catalog or 'values of your own'} in {self._job.layout.root} waits for {what}"

    def _name_of(self, slot: Slot) -> str:
        recipe, partition = slot
        if recipe == len(self._job.plan.recipes):
            return "the check at the end"
        return f"part {partition} of {self._job.plan.recipes[recipe].encoder}"

    def _owner(self, claim: ClaimName) -> str:
        holder = self._claims.holder(claim)
        return "an unknown worker (damaged claim)" if holder is None else f"{self._claims.watch.last_heartbeat(holder)} (worker {holder})"


@dataclass(slots=True)
class Patience:
    """What a waiting worker saw last, and since when it has been so."""

    seen: object = None
    since: float = 0.0
