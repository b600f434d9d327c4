"""Claims: files in which a worker says that it works on a range of partitions. Numbered and never changed; they only save double work.

A claim is created under its final name in one call. So a reader may see it before its content is written, or for ever without it if its
worker was killed in between: what cannot be read counts as held for a moment, and as free afterwards.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from cachestore.core.errors import FormatError
from cachestore.files.opening import names_in
from cachestore.files.paths import ClaimName, Layout, PassFolder, is_worker, parse_claim
from cachestore.files.publish import create
from cachestore.files.records import encode_record, read_record
from cachestore.jobs.share.choice import Held
from cachestore.jobs.share.plan import Plan
from cachestore.jobs.share.workers import Life, Watch

FORMAT: Final = "cachestore-claim"
VERSION: Final = 1

TORN_SECONDS: Final = 2.0
"""For how long a claim that cannot be read counts as one that is being written."""

Slot = tuple[int, int]
"""(recipe, partition)."""


def end_slot(plan: Plan) -> Slot:
    """Return the slot by which the reconciling of a round is claimed: partition 0 of the recipe after the last."""
    return len(plan.recipes), 0


@dataclass(slots=True)
class Claims:
    """The claims of one pass, written and read by one worker."""

    layout: Layout
    folder: PassFolder
    worker: str
    watch: Watch
    _holders: dict[ClaimName, str] = field(default_factory=dict[ClaimName, str])
    _retaken: dict[tuple[int, Slot], int] = field(default_factory=dict[tuple[int, Slot], int])
    """The numbers of this worker's claims on partitions that were claimed before, by round and partition."""
    _unread: dict[ClaimName, float] = field(default_factory=dict[ClaimName, float])
    """Since when each claim could not be read, by the watch's clock."""

    def names(self, number: int) -> list[ClaimName]:
        """Return the claims of a round, oldest of each partition first."""
        names = (name for name in map(parse_claim, names_in(self.folder.claims)) if name is not None and name.round == number)
        return sorted(names, key=lambda name: (name.n, name))

    def newest(self, number: int) -> dict[Slot, ClaimName]:
        """Return the newest claim of each claimed partition of a round."""
        return {(name.recipe, partition): name for name in self.names(number) for partition in name.partitions}

    def take(self, number: int, recipe: int, partitions: range, *, after: ClaimName | None = None) -> ClaimName | None:
        """Claim a range of partitions, for the first time or after an earlier claim. Return None if another worker was faster."""
        name = ClaimName(number, recipe, partitions.start, partitions.stop - 1, after.n + 1 if after else 0)
        if not create(self.layout, self.folder.claim(name), encode_record(FORMAT, VERSION, {"worker": self.worker})):
            return None
        self._holders[name] = self.worker
        if after is not None:
            self._retaken.update(dict.fromkeys(((number, (recipe, p)) for p in partitions), name.n))
        return name

    def holder(self, name: ClaimName) -> str | None:
        """Return the worker that made a claim; None if the file is damaged, not complete yet, or gone."""
        if name not in self._holders:
            try:
                worker = read_record(self.folder.claim(name), FORMAT, VERSION).get("worker")
            except (FormatError, OSError):
                return None
            if not is_worker(worker):
                return None
            self._holders[name] = str(worker)
        return self._holders[name]

    def life(self, name: ClaimName) -> Life:
        """Return whether a claim's holder lives. This worker's own claim from before is free: DEAD."""
        holder = self.holder(name)
        if holder is not None:
            return Life.DEAD if holder == self.worker else self.watch.life_of(holder)
        since = self._unread.setdefault(name, self.watch.clock())
        return Life.DEAD if self.watch.clock() - since >= TORN_SECONDS else Life.LIVE

    def judge(self, claims: Mapping[Slot, ClaimName]) -> list[Held]:
        """Return the state of each claim's holder, in order; `claims` has the newest claim of each unfinished partition of one recipe."""
        partitions: dict[ClaimName, list[int]] = {}
        for (_recipe, partition), name in claims.items():
            partitions.setdefault(name, []).append(partition)
        lives: dict[str, Life] = {}  # a holder of several claims is judged once
        judged: list[Held] = []
        for name, some in partitions.items():
            holder = self.holder(name)
            life = lives[holder] if holder in lives else self.life(name)
            if holder is not None:
                lives[holder] = life
            still = self.watch.still_seconds(holder) if holder else 0.0
            judged.append(Held(name, sorted(some), holder, life, still, is_slow=holder is not None and self.watch.is_slow(holder)))
        return judged

    def died_before(self, number: int, recipe: int, partitions: Collection[int]) -> list[str]:
        """Return the workers that claimed some of these partitions before this worker and provably died, in the order of their claims."""
        own = {p: self._retaken[number, (recipe, p)] for p in partitions if (number, (recipe, p)) in self._retaken}
        names = [name for name in self.names(number) if name.recipe == recipe] if own else []
        earlier = [self.holder(name) for name in names if any(name.n < own.get(p, 0) for p in name.partitions)]
        return [worker for worker in dict.fromkeys(earlier) if worker not in (None, self.worker) and self.watch.has_died(worker)]
