"""Collect units into batches. All units of a batch belong to one group. Uses no threads, no torch and no clock."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cachestore.encode.batching.unit import Prepared

Item = TypeVar("Item")


@dataclass(slots=True)
class Batches(Generic[Item]):
    """Collects items into batches. All items of a batch belong to one group."""

    allowed: Callable[[Hashable], int]
    """Returns how many items of a group go into a batch. It is called for each item, as the answer may change."""
    _waiting: dict[Hashable, list[Item]] = field(default_factory=dict[Hashable, "list[Item]"])
    _costs: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    _caps: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def add(self, prepared: Prepared, item: Item) -> list[Item]:
        """Add an item. Returns the batch if this item fills it, else an empty list."""
        group = prepared.group
        batch = self._waiting.setdefault(group, [])
        self._costs[group] = prepared.cost
        batch.append(item)
        return self._take(group) if len(batch) >= self.limit(group) else []

    def rest(self) -> Iterator[list[Item]]:
        """Remove and yield the rest, one batch for each group. The costliest comes first, so that a lack of memory shows early."""
        for group in sorted(self._waiting, key=lambda group: -self._costs[group]):
            yield self._take(group)

    def _take(self, group: Hashable) -> list[Item]:
        del self._costs[group]
        return self._waiting.pop(group)

    def limit(self, group: Hashable) -> int:
        """Return how many items of a group go into a batch: what `allowed` says, or less if a batch ran out of memory."""
        return min(self.allowed(group), self._caps.get(group, 1 << 30))

    def did_not_fit(self, group: Hashable, count: int) -> int:
        """Record that a batch of `count` items ran out of memory. Returns the new limit of the group: half of `count`, at least 1."""
        self._caps[group] = max(1, count // 2)
        return self._caps[group]
