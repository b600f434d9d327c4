"""Attempts: which unit a worker does alone, noted before it begins.

A unit that kills its worker kills the next one too. So the partition of a worker that died is done unit by unit, and whoever dies
then leaves a note that names the unit it was on. A note is withdrawn once the next one stands or the worker is done with it.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from cachestore.files.opening import names_in
from cachestore.files.paths import AttemptName, Layout, PassFolder, parse_attempt
from cachestore.files.publish import make_folder, note
from cachestore.files.records import encode_record

FORMAT: Final = "cachestore-attempt"
VERSION: Final = 1


@dataclass(slots=True)
class Attempts:
    """The attempts of one pass, as one worker makes and sees them."""

    layout: Layout
    folder: PassFolder
    worker: str
    _count: int = 0
    _standing: list[AttemptName] = field(default_factory=list[AttemptName])

    def begin(self, unit: int) -> None:
        """Note that this worker is on a unit, by its place in the plan, and on none that it named before. Raises WriteFailed."""
        make_folder(self.layout, self.folder.attempts)
        name = AttemptName(self.worker, self._count, unit)
        self._count += 1
        note(self.layout, self.folder.attempt(name), encode_record(FORMAT, VERSION, {"worker": self.worker, "unit": unit}))
        self.end()
        self._standing.append(name)

    def end(self) -> None:
        """Withdraw what this worker noted; nothing where there is nothing. A note that stays is outdone by the next one."""
        while self._standing:
            with suppress(OSError):
                self.folder.attempt(self._standing.pop()).unlink()

    def last_units(self) -> dict[str, int]:
        """The unit that each worker named last, by worker. Without the folder, nobody named one."""
        names = filter(None, map(parse_attempt, names_in(self.folder.attempts)))
        return {name.worker: name.unit for name in sorted(names, key=attrgetter("n"))}
