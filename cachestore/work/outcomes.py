"""What is known of every unit of a plan, as columns: a million of them take 100 MB, not a million objects.

Filled from an earlier catalog and from ledgers; whoever is read last counts. Numbers are int64, digests rows of bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json, Key
from cachestore.work.ledgers import Outcome, Result

UNKNOWN: Final = 0  # the only one that is false
MADE: Final = 1
FOUND: Final = 2
FAILED: Final = 3
_STATES: Final[Mapping[Result, int]] = {"made": MADE, "found": FOUND, "failed": FAILED}
_RESULTS: Final[Mapping[int, Result]] = {state: result for result, state in _STATES.items()}

_NO_KEY: Final = bytes(KEY_BYTES)
_NO_INPUT: Final = bytes(INPUT_BYTES)

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cells:
    """What is known of units or of a catalog's cells, row for row."""

    keys: Bytes
    inputs: Bytes
    stats: Numbers
    facts: Mapping[str, Numbers]

    def take(self, places: Numbers) -> "Cells":
        """The rows at these places; a place below 0 has a row of which nothing is known."""
        facts = {name: _take(values, places, -1) for name, values in self.facts.items()}
        return Cells(_take(self.keys, places, 0), _take(self.inputs, places, 0), _take(self.stats, places, -1), facts)


def _take(array: NDArray[Any], places: Numbers, empty: int) -> NDArray[Any]:
    there = places >= 0
    if there.all():
        return array[places]
    rows = np.full((len(places), *array.shape[1:]), empty, array.dtype)
    rows[there] = array[places[there]]
    return rows


def _filled(value: Json, width: int) -> list[int]:
    numbers: list[int] = np.array(value, np.int64).reshape(-1).tolist()
    return [*numbers[:width], *[-1] * (width - len(numbers))]


class Outcomes:
    """One row a unit, by its place in the plan."""

    def __init__(self, count: int, widths: Mapping[str, int]) -> None:
        """Nothing is known of `count` units. `widths` says which facts are kept, and how many numbers each has."""
        self.states: Bytes = np.zeros(count, np.uint8)
        self.transient: Mask = np.zeros(count, np.bool_)
        self.keys: Bytes = np.zeros((count, KEY_BYTES), np.uint8)
        """All zero where unknown."""
        self.inputs: Bytes = np.zeros((count, INPUT_BYTES), np.uint8)
        """SHA-256; all zero where unknown."""
        self.stats: Numbers = np.full((count, 2), -1, np.int64)
        self.facts: dict[str, Numbers] = {}
        """Only those that some unit has; -1 where unknown."""
        self.reasons: dict[int, str] = {}
        self._widths = widths

    def __len__(self) -> int:
        return len(self.states)

    @property
    def known(self) -> Mask:
        """Units of which anything is known."""
        return self.states != UNKNOWN

    @property
    def keyed(self) -> Mask:
        """Units whose key is known."""
        return np.asarray(self.keys.any(axis=1))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Take what a ledger says; facts without a column are passed over."""
        places = np.array([outcome.unit for outcome in outcomes], np.int64)
        keys = b"".join(outcome.key or _NO_KEY for outcome in outcomes)
        inputs = b"".join(bytes.fromhex(outcome.input) if outcome.input else _NO_INPUT for outcome in outcomes)
        self.states[places] = [_STATES[outcome.result] for outcome in outcomes]
        self.transient[places] = [outcome.is_transient for outcome in outcomes]
        self.keys[places] = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        self.inputs[places] = np.frombuffer(inputs, np.uint8).reshape(-1, INPUT_BYTES)
        self.stats[places] = np.array([outcome.stat for outcome in outcomes], np.int64).reshape(-1, 2)
        for name, width in self._widths.items():
            if name in self.facts or any(name in outcome.facts for outcome in outcomes):
                values = [_filled(outcome.facts.get(name, ()), width) for outcome in outcomes]
                self.column(name)[places] = np.array(values, np.int64).reshape(-1, width)
        for outcome in outcomes:
            self.reasons.pop(outcome.unit, None)
            if outcome.reason:
                self.reasons[outcome.unit] = outcome.reason

    def column(self, name: str) -> Numbers:
        """The column of a fact, made if no unit had it so far."""
        if name not in self.facts:
            self.facts[name] = np.full((len(self), self._widths[name]), -1, np.int64)
        return self.facts[name]

    def put(self, places: Numbers, cells: Cells) -> None:
        """Take what an earlier catalog holds of these units."""
        self.states[places] = FOUND
        self.keys[places] = cells.keys
        self.inputs[places] = cells.inputs
        self.stats[places] = cells.stats
        for name, values in cells.facts.items():
            self.column(name)[places] = values

    def cells(self, places: Numbers) -> Cells:
        """What is known of these units."""
        return Cells(self.keys, self.inputs, self.stats, self.facts).take(places)

    def forget(self, places: "Numbers | Mask") -> None:
        """Know nothing of these units any more."""
        self.states[places] = UNKNOWN
        self.transient[places] = False
        self.keys[places] = 0
        self.inputs[places] = 0
        self.stats[places] = -1
        for values in self.facts.values():
            values[places] = -1

    def key(self, place: int) -> Key | None:
        """The key of one unit, None where unknown."""
        raw = self.keys[place].tobytes()
        return Key(raw) if any(raw) else None

    def result(self, place: int) -> Result | None:
        """How one unit ended, None where nothing is known."""
        return _RESULTS.get(int(self.states[place]))

    def reason(self, place: int) -> str:
        """Why a unit that is still missing failed."""
        if self.states[place] == UNKNOWN:
            return "no worker could finish it"
        missing = f"it was encoded, but its entry {self.key(place)} is not in the store; look at `cachestore verify`"
        return self.reasons.get(place, missing)
