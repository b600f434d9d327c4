"""Claims: files in which a worker says that it works on a partition. Numbered and never changed; they only save double work."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from cachestore.core.errors import FormatError
from cachestore.files.opening import names_in
from cachestore.files.paths import ClaimName, Layout, PassFolder, is_worker, parse_claim
from cachestore.files.publish import note
from cachestore.files.records import encode_record, read_record
from cachestore.work.choice import Held
from cachestore.work.workers import Life, Watch

FORMAT: Final = "cachestore-claim"
VERSION: Final = 1

Slot = tuple[int, int]
"""(recipe, partition). The reconciling of a round is claimed as partition 0 of the recipe after the last."""


@dataclass(slots=True)
class Claims:
    """The claims of one pass, written and read by one worker."""

    layout: Layout
    folder: PassFolder
    worker: str
    watch: Watch
    _holders: dict[ClaimName, str | None] = field(default_factory=dict[ClaimName, "str | None"])
    _taken: dict[tuple[int, Slot], ClaimName] = field(default_factory=dict[tuple[int, Slot], ClaimName])

    def newest(self, number: int) -> dict[Slot, ClaimName]:
        """Return the newest claim of each claimed partition of a round."""
        names = filter(None, map(parse_claim, names_in(self.folder.claims)))
        return {(name.recipe, name.partition): name for name in sorted(names, key=attrgetter("n")) if name.round == number}

    def take(self, number: int, slot: Slot, *, after: ClaimName | None = None) -> ClaimName | None:
        """Claim a partition, for the first time or after an earlier claim. Return None if another worker was faster."""
        name = ClaimName(number, *slot, after.n + 1 if after else 0)
        if not note(self.layout, self.folder.claim(name), encode_record(FORMAT, VERSION, {"worker": self.worker})):
            return None
        self._holders[name] = self.worker
        self._taken[number, slot] = name
        return name

    def holder(self, name: ClaimName) -> str | None:
        """Return the worker that made a claim; None if the file is damaged or gone."""
        if name not in self._holders:
            try:
                worker = read_record(self.folder.claim(name), FORMAT, VERSION).get("worker")
                self._holders[name] = worker if is_worker(worker) else None
            except (FormatError, OSError):
                self._holders[name] = None
        return self._holders[name]

    def life(self, name: ClaimName) -> Life:
        """Return whether a claim's holder lives. An unreadable claim, or this worker's own from before, is free: DEAD."""
        return self._life_of(self.holder(name))

    def _life_of(self, holder: str | None) -> Life:
        return Life.DEAD if holder is None or holder == self.worker else self.watch.look(holder)

    def look_at(self, names: Iterable[ClaimName]) -> list[Held]:
        """Return the state of each claim's holder, in order. A holder of several claims is looked at once."""
        holders = {name: self.holder(name) for name in names}
        lives = {holder: self._life_of(holder) for holder in set(holders.values())}
        watch = self.watch
        return [
            Held(
                name, holder, lives[holder], watch.still_seconds(holder) if holder else 0.0, is_slow=bool(holder) and watch.is_slow(holder)
            )
            for name, holder in holders.items()
        ]

    def died_before(self, number: int, slot: Slot) -> list[str]:
        """Return the workers that claimed a partition before this worker and provably died, in the order of their claims."""
        own = self._taken.get((number, slot))
        earlier = [self.holder(own._replace(n=n)) for n in range(own.n)] if own else []
        return [worker for worker in dict.fromkeys(earlier) if worker not in (None, self.worker) and self.watch.has_died(worker)]
