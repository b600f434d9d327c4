"""Which units go into one batch: those of one group. Pure: no threads, no torch, no clock."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cachestore.encode.unit import Prepared

Item = TypeVar("Item")


@dataclass(slots=True)
class Batches(Generic[Item]):
    """Gathers items into batches of one group each."""

    allowed: Callable[[Hashable], int]
    """How many items of a group go into a batch, asked each time."""
    _waiting: dict[Hashable, list[Item]] = field(default_factory=dict[Hashable, "list[Item]"])
    _costs: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    _caps: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def add(self, prepared: Prepared, item: Item) -> list[Item]:
        """Gather an item; returns the batch that is full with it, else an empty list."""
        group = prepared.group
        batch = self._waiting.setdefault(group, [])
        self._costs[group] = prepared.cost
        batch.append(item)
        return self._take(group) if len(batch) >= self.limit(group) else []

    def rest(self) -> Iterator[list[Item]]:
        """What is left, a batch of each group, the costliest first, so that a lack of memory shows early. Empties it."""
        for group in sorted(self._waiting, key=lambda group: -self._costs[group]):
            yield self._take(group)

    def _take(self, group: Hashable) -> list[Item]:
        del self._costs[group]
        return self._waiting.pop(group)

    def limit(self, group: Hashable) -> int:
        """How many items of a group go into a batch: what is allowed, or what fitted after a larger one did not."""
        return min(self.allowed(group), self._caps.get(group, 1 << 30))

    def did_not_fit(self, group: Hashable, count: int) -> int:
        """Remember that a batch of so many ran out of memory: half of it is the most from now on, which is returned; at least 1."""
        self._caps[group] = max(1, count // 2)
        return self._caps[group]
