"""Claims on single keys: files in `tmp/` in which a worker says that it makes a value. They only save double work.

A claim is created under its name in one call, so one of several processes gets it. Its worker's heartbeat and lock say whether it lives,
as with the claims of a pass. The claim of a dead worker stays where it is, and the next worker gets the next number. A worker that releases
a claim removes those below it. One that got a claim looks into the store again: the worker before may have published the value meanwhile.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachestore.core.errors import FormatError
from cachestore.core.keys import Key
from cachestore.files import in_use
from cachestore.files.checksum import digest_of
from cachestore.files.paths import Layout, is_worker
from cachestore.files.publish import create
from cachestore.files.records import encode_record, read_record
from cachestore.jobs.share.claims import TORN_SECONDS
from cachestore.jobs.share.workers import Life, Watch

FORMAT: Final = "cachestore-key-claim"
VERSION: Final = 1
_MOST: Final = 1000
"""How many dead workers one key can have. `gc` removes their claims a day later."""


@dataclass(slots=True)
class KeyClaims:
    """The claims of one worker, and its view of those of others. Used by one thread at a time."""

    layout: Layout
    worker: str
    watch: Watch
    _held: dict[Key, int] = field(default_factory=dict[Key, int])
    """The numbers of this worker's claims."""
    _unread: dict[Path, float] = field(default_factory=dict[Path, float])
    """Since when each claim could not be read, by the watch's clock."""
    _others: dict[Key, str] = field(default_factory=dict[Key, str])
    """Who held a key when it was last asked for."""

    def take(self, key: Key) -> bool:
        """Claim a key. Returns False if a worker that lives has it, or had it a moment ago."""
        body = encode_record(FORMAT, VERSION, {"worker": self.worker})
        for number in range(_MOST):
            path = self._path(key, number)
            if create(self.layout, path, body):
                self._held[key] = number
                return True
            try:
                life = self._life(key, path)
            except FileNotFoundError:
                return False  # it was released between the two calls
            if life is Life.LIVE:
                return False
        return False

    def release(self, keys: Iterable[Key]) -> None:
        """Remove this worker's claims on these keys, and those of dead workers below them."""
        for key in keys:
            for number in range(self._held.pop(key, -1), -1, -1):
                with suppress(OSError):
                    in_use.unlink(self._path(key, number), missing_ok=True)

    def holder(self, key: Key) -> str:
        """Describe the worker that made the claim on a key, for a message."""
        worker = self._others.get(key)
        return "a process whose claim cannot be read" if worker is None else self.watch.last_heartbeat(worker)

    def _path(self, key: Key, number: int) -> Path:
        return self.layout.new_temporary(digest_of([b"claim", key, str(number).encode()]))

    def _life(self, key: Key, path: Path) -> Life:
        """Return whether the worker of a claim lives. Raises FileNotFoundError if the claim is gone."""
        try:
            worker = read_record(path, FORMAT, VERSION).get("worker")
        except FileNotFoundError:
            raise
        except (FormatError, OSError):
            worker = None
        if is_worker(worker):
            self._others[key] = str(worker)
            return self.watch.life_of(str(worker))
        since = self._unread.setdefault(path, self.watch.clock())
        return Life.DEAD if self.watch.clock() - since >= TORN_SECONDS else Life.LIVE
