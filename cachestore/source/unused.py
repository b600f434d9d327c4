"""What is not used of a source, and why. The reasons are a fixed list of words, explained in docs/sources.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cachestore.core.keys import Json

REASONS: Final[Mapping[str, str]] = {}
"""Each reason, with what it says of one file."""

_NAMED: Final = 10
"""How many files of each reason are named."""


@dataclass(slots=True)
class Unused:
    """Counts the files that are not used, by reason, and keeps the first names of each."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, reason: str, name: str) -> None:
        """Count a file. `name` is its path in the source."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.examples.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(name)

    def include(self, other: "Unused", prefix: str = "") -> None:
        """Add the counts of one of several sources, with `prefix` before the names."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            named = self.examples.setdefault(reason, [])
            named += [f"{prefix}{name}" for name in other.examples[reason][: _NAMED - len(named)]]

    def as_json(self) -> list[Json]:
        """Return the table as JSON: reason, count and examples of each."""
        return [{"reason": reason, "count": count, "examples": list(self.examples[reason])} for reason, count in self.counts.items()]
