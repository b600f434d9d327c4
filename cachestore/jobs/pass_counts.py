"""What a pass has to report: what it made, what failed and for which samples, and which files changed meanwhile."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestore.core.inputs import (
    references_of,
)
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.files.table import Digests
from cachestore.jobs.columns import as_text, numbers
from cachestore.jobs.presence import Presence
from cachestore.storage.snapshot import Snapshot
from cachestore.work.outcomes import MADE, Outcomes
from cachestore.work.plan import Plan

_NAMED_FAILURES: Final = 10_000
_NAMED_CHANGES: Final = 100
_LOOK_SECONDS: Final = 5.0
_TOGETHER: Final = 65_536


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Counts the outcomes of a pass."""

    plan: Plan
    presence: Presence

    def changed(self, outcomes: Outcomes) -> list[Json]:
        """References whose file is another now than when it was read: the pass holds what it was. Looks for a few seconds at most.

        Of a unit of several files all are named, as which one it was is not recorded.
        """
        found: set[str] = set()
        until = time.monotonic() + _LOOK_SECONDS
        for place in np.flatnonzero(self.presence.of_files() & (outcomes.states == MADE) & (outcomes.stats[:, 0] >= 0)).tolist():
            if time.monotonic() > until or len(found) >= _NAMED_CHANGES:
                break
            if not self.presence.is_unchanged(place, outcomes):
                found.update(references_of(self.plan.unit(place).request))
        return list[Json](sorted(found))

    def made(self, outcomes: Outcomes, failed: Mapping[int, str], snapshot: Snapshot) -> tuple[int, int]:
        """How many keys this pass made, each once, and the bytes of their entries."""
        made = outcomes.states == MADE
        made[list(failed)] = False
        keys = np.unique(as_text(outcomes.keys[made]))
        count = size_bytes = 0
        for start in range(0, len(keys), _TOGETHER):
            some = Digests(memoryview(keys[start : start + _TOGETHER].tobytes()), KEY_BYTES)
            sizes = [places[0].size_bytes for places in snapshot.find([Key(raw) for raw in some]) if places]
            count, size_bytes = count + len(sizes), size_bytes + sum(sizes)
        return count, size_bytes

    def failures(self, failed: Mapping[int, str]) -> list[Json]:
        """A row for each sample affected; units that no sample refers to, such as the empty caption, stand with an empty sample.

        Where several units of a sample fail for one reason, as all views of a damaged picture do, it stands once.
        """
        if not failed:
            return []
        rows: dict[tuple[str, str, str], Json] = {}
        named: set[int] = set()
        for number, column in enumerate(self.plan.columns):
            at, units = self.plan.cells[number]
            for cell in np.flatnonzero(np.isin(numbers(units), list(failed))).tolist():
                row = int(np.searchsorted(numbers(at), cell, side="right")) - 1
                named.add(units[cell])
                sample, reason = self.plan.ids[row], failed[units[cell]]
                rows[sample, column.encoder, reason] = {"sample": sample, "encoder": column.encoder, "reason": reason}
        alone = [
            {"sample": self._name_alone(place), "encoder": self.plan.recipes[self.plan.recipe_of(place)].encoder, "reason": failed[place]}
            for place in sorted(set(failed) - named)
        ]
        return [*rows.values(), *alone][:_NAMED_FAILURES]

    def _name_alone(self, place: int) -> str:
        """What to call a unit that no sample refers to: its key for `fill`."""
        return self.plan.unit_ids[place].hex() if self.plan.ids_are_keys else ""
