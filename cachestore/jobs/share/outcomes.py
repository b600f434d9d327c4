"""What is known of every unit of a plan, as arrays: a million units take 100 MB and not a million objects.

Filled from an earlier catalog and from ledgers; what is read last counts. Numbers are int64; keys and digests are rows of uint8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json, Key
from cachestore.jobs.share.ledgers import Outcome, Result
from cachestore.store.format.arrays import Bytes, Mask, Numbers

UNKNOWN: Final = 0  # the only state that is false
MADE: Final = 1
FOUND: Final = 2
FAILED: Final = 3
_STATES: Final[Mapping[Result, int]] = {"made": MADE, "found": FOUND, "failed": FAILED}
_RESULTS: Final[Mapping[int, Result]] = {state: result for result, state in _STATES.items()}

_NO_KEY: Final = bytes(KEY_BYTES)
_NO_INPUT: Final = bytes(INPUT_BYTES)


@dataclass(frozen=True, slots=True)
class Cells:
    """What is known of units or of a catalog's cells, one row each."""

    keys: Bytes
    inputs: Bytes
    stats: Numbers
    facts: Mapping[str, Numbers]

    def take(self, indices: Numbers) -> "Cells":
        """Return the rows with these indices; an index below 0 gives a row of which nothing is known."""
        facts = {name: _take(values, indices, -1) for name, values in self.facts.items()}
        return Cells(_take(self.keys, indices, 0), _take(self.inputs, indices, 0), _take(self.stats, indices, -1), facts)


def _take(array: NDArray[Any], indices: Numbers, empty: int) -> NDArray[Any]:
    there = indices >= 0
    if there.all():
        return array[indices]
    rows = np.full((len(indices), *array.shape[1:]), empty, array.dtype)
    rows[there] = array[indices[there]]
    return rows


def _filled(value: Json, width: int) -> list[int]:
    numbers: list[int] = np.array(value, np.int64).reshape(-1).tolist()
    return [*numbers[:width], *[-1] * (width - len(numbers))]


class Outcomes:
    """One row per unit, by its unit index."""

    def __init__(self, count: int, widths: Mapping[str, int]) -> None:
        """Make `count` rows of which nothing is known. `widths`: which facts are kept, and how many numbers each has."""
        self.states: Bytes = np.zeros(count, np.uint8)
        self.transient: Mask = np.zeros(count, np.bool_)
        self.keys: Bytes = np.zeros((count, KEY_BYTES), np.uint8)
        """All zero if unknown."""
        self.inputs: Bytes = np.zeros((count, INPUT_BYTES), np.uint8)
        """SHA-256; all zero if unknown."""
        self.stats: Numbers = np.full((count, 2), -1, np.int64)
        self.facts: dict[str, Numbers] = {}
        """Only facts that some unit has; -1 if unknown."""
        self.reasons: dict[int, str] = {}
        self._widths = widths

    def __len__(self) -> int:
        return len(self.states)

    @property
    def known(self) -> Mask:
        """Mask of the units of which anything is known."""
        return self.states != UNKNOWN

    @property
    def keyed(self) -> Mask:
        """Mask of the units whose key is known."""
        return np.asarray(self.keys.any(axis=1))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Store the outcomes of a ledger; facts that are not in `widths` are left out."""
        indices = np.array([outcome.unit for outcome in outcomes], np.int64)
        keys = b"".join(outcome.key or _NO_KEY for outcome in outcomes)
        inputs = b"".join(bytes.fromhex(outcome.input) if outcome.input else _NO_INPUT for outcome in outcomes)
        self.states[indices] = [_STATES[outcome.result] for outcome in outcomes]
        self.transient[indices] = [outcome.is_transient for outcome in outcomes]
        self.keys[indices] = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        self.inputs[indices] = np.frombuffer(inputs, np.uint8).reshape(-1, INPUT_BYTES)
        self.stats[indices] = np.array([outcome.stat for outcome in outcomes], np.int64).reshape(-1, 2)
        for name, width in self._widths.items():
            if name in self.facts or any(name in outcome.facts for outcome in outcomes):
                values = [_filled(outcome.facts.get(name, ()), width) for outcome in outcomes]
                self.column(name)[indices] = np.array(values, np.int64).reshape(-1, width)
        for outcome in outcomes:
            self.reasons.pop(outcome.unit, None)
            if outcome.reason:
                self.reasons[outcome.unit] = outcome.reason

    def column(self, name: str) -> Numbers:
        """Return the column of a fact. It is made if no unit had the fact so far."""
        if name not in self.facts:
            self.facts[name] = np.full((len(self), self._widths[name]), -1, np.int64)
        return self.facts[name]

    def put(self, indices: Numbers, cells: Cells) -> None:
        """Store what an earlier catalog holds for these units."""
        self.states[indices] = FOUND
        self.keys[indices] = cells.keys
        self.inputs[indices] = cells.inputs
        self.stats[indices] = cells.stats
        for name, values in cells.facts.items():
            self.column(name)[indices] = values

    def cells(self, indices: Numbers) -> Cells:
        """Return what is known of these units."""
        return Cells(self.keys, self.inputs, self.stats, self.facts).take(indices)

    def forget(self, indices: "Numbers | Mask") -> None:
        """Remove everything that is known of these units."""
        self.states[indices] = UNKNOWN
        self.transient[indices] = False
        self.keys[indices] = 0
        self.inputs[indices] = 0
        self.stats[indices] = -1
        for values in self.facts.values():
            values[indices] = -1

    def key(self, index: int) -> Key | None:
        """Return the key of a unit; None if it is unknown."""
        raw = self.keys[index].tobytes()
        return Key(raw) if any(raw) else None

    def result(self, index: int) -> Result | None:
        """Return how a unit ended; None if nothing is known."""
        return _RESULTS.get(int(self.states[index]))

    def reason(self, index: int) -> str:
        """Return why a missing unit failed."""
        if self.states[index] == UNKNOWN:
            return "no worker could finish it"
        missing = f"it was encoded, but its entry {self.key(index)} is not in the store; look at `cachestore verify`"
        return self.reasons.get(index, missing)
