"""Attempts: files that name the unit a worker is about to encode alone.

A unit that kills its worker kills the next one too. So the partition of a dead worker is encoded unit by unit, and a file names each
unit before it is read. If the worker dies, the file shows on which unit. Otherwise the worker removes it.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from cachestore.files import in_use
from cachestore.files.opening import names_in
from cachestore.files.paths import AttemptName, Layout, PassFolder, parse_attempt
from cachestore.files.publish import make_folder, note
from cachestore.files.records import encode_record

FORMAT: Final = "cachestore-attempt"
VERSION: Final = 1


@dataclass(slots=True)
class Attempts:
    """The attempts of one pass, written and read by one worker."""

    layout: Layout
    folder: PassFolder
    worker: str
    _count: int = 0
    _standing: list[AttemptName] = field(default_factory=list[AttemptName])

    def begin(self, unit: int) -> None:
        """Write that this worker is on a unit, given by its unit index; remove its earlier files. Raises WriteFailed."""
        make_folder(self.layout, self.folder.attempts)
        name = AttemptName(self.worker, self._count, unit)
        self._count += 1
        note(self.layout, self.folder.attempt(name), encode_record(FORMAT, VERSION, {"worker": self.worker, "unit": unit}))
        self.end()
        self._standing.append(name)

    def end(self) -> None:
        """Remove this worker's files. One that cannot be removed does no harm: the newest file counts."""
        while self._standing:
            with suppress(OSError):
                in_use.unlink(self.folder.attempt(self._standing.pop()))

    def last_units(self) -> dict[str, int]:
        """Return the unit index that each worker named last, by worker."""
        names = filter(None, map(parse_attempt, names_in(self.folder.attempts)))
        return {name.worker: name.unit for name in sorted(names, key=attrgetter("n"))}
