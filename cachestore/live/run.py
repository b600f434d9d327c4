"""What an armed process works with: the store, the values of one trainer's run, and how many were reused or made."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.ranks import discover
from cachestore.jobs.start.fill import fill
from cachestore.live.adapter import refuse
from cachestore.live.arming import Setting, armed, load_adapter
from cachestore.live.read_only import ReadOnlyFiles
from cachestore.store.write.writer import Store, open_store

if TYPE_CHECKING:
    from cachestore.core.keys import Key
    from cachestore.jobs.share.report import Report
    from cachestore.live.names import ValueName
    from cachestore.train.encoding.encode_once import EncodeOnce

_SAYS_SECONDS: Final = 30.0


class Run:
    """The store as this process sees it. A forked child gets its own."""

    def __init__(self, setting: Setting) -> None:
        """`setting` is what this process was armed with."""
        self.setting, self.name, self.pid = setting, setting.name, os.getpid()
        self.counts: dict[str, list[int]] = {}
        """By part: values that were there, values that this launch made."""
        self._calls: dict[str, int] = {}
        self._once: dict[str, tuple[EncodeOnce, set[Key]]] = {}
        self._unfinished: dict[str, None] = {}
        """The parts that are being made, or were when an error or Ctrl-C ended that."""
        """By part: what shares the making of values, and the keys that were asked for."""

    @cached_property
    def store(self) -> Store:
        """The store, open for writing. Ends the run with exit code 2 if it only reads a data set."""
        if self.exported is not None:
            self.exported.refuse(self.setting.store, "the trainer wants to encode")
        return open_store(self.setting.store, mode="a")

    @cached_property
    def reader(self) -> Store:
        """The store, open for reading, unless this process writes anyway."""
        return self.store if "store" in vars(self) else open_store(self.setting.store)

    @cached_property
    def exported(self) -> ReadOnlyFiles | None:
        """The trainer's cache files over the data set that this run only reads; None if it fills the store. Raises as ReadOnlyFiles."""
        if not self.setting.source:
            return None
        return ReadOnlyFiles(load_adapter(self.setting.adapter).name, self.setting.store, self.setting.source, self.setting.generation)

    def get(self, name: "ValueName") -> dict[str, Any]:
        """Return the arrays of a value, as numpy."""
        return self.reader.get(name.key, as_numpy=True)

    def fill(
        self,
        part: str,
        wanted: Iterable[tuple["Key", Any]],
        encode: Callable[[list[tuple["Key", Any]]], Mapping[Any, Mapping[str, Any]]],
        *,
        batch_size: int,
        group_by: Callable[[Any], Hashable] | None = None,
    ) -> "Report":
        """Make what the store lacks, shared with all ranks (`cs.fill`), and publish all of it as the data set `NAME/PART`.

        Every rank passes the same keys. When it returns, every value is there for every process; one that cannot be made is an error.
        A second call for a part in one run makes `NAME/PART-2`.
        """
        count = self._calls[part] = self._calls.get(part, 0) + 1
        name = f"{self.name}/{part}" if count == 1 else f"{self.name}/{part}-{count}"
        tell = _telling(part) if discover(os.environ).rank in {0, None} else None
        self._unfinished[part] = None
        report = fill(self.store, wanted, encode, batch_size=batch_size, group_by=group_by, strict=True, publish_as=name, on_progress=tell)
        self._unfinished.pop(part, None)
        self.count(part, report.reused, report.encoded)
        return report

    def make(
        self,
        part: str,
        wanted: Iterable[tuple["Key", Any]],
        encode: Callable[[list[tuple["Key", Any]]], Mapping[Any, Mapping[str, Any]]],
        *,
        batch_size: int = 1,
    ) -> None:
        """Make what the store lacks of some values, in a trainer's own loop (`cs.EncodeOnce`): rows of the data set `NAME/PART`.

        Any process may ask for any keys. When it returns, all of them are there for every process. Items are mappings with an `id`; those
        that have the id of one before them become rows "ID (2)" and so on.
        """
        from cachestore.train.encoding.encode_once import EncodeOnce

        counted: dict[str, int] = {}
        pairs: list[tuple[Key, Any]] = []
        for key, item in wanted:
            counted[item["id"]] = count = counted.get(item["id"], 0) + 1
            pairs.append((key, item if count == 1 else {**item, "id": f"{item['id']} ({count})"}))
        if part not in self._once:
            self._once.setdefault(part, (EncodeOnce(self.store, publish_as=f"{self.name}/{part}"), set()))
        once, seen = self._once[part]
        self._unfinished[part] = None
        made = once.make(pairs, encode, batch_size=batch_size)
        self._unfinished.pop(part, None)
        new = {key for key, _item in pairs} - seen
        seen |= new
        self.count(part, max(0, len(new) - made), made)

    def count(self, part: str, reused: int = 0, encoded: int = 0) -> None:
        """Count values for the line at the end."""
        counts = self.counts.setdefault(part, [0, 0])
        counts[0] += reused
        counts[1] += encoded

    def last_line(self) -> str:
        """What this run took from the store and what it made."""
        parts = [f"{part}: {reused} reused, {encoded} encoded" for part, (reused, encoded) in self.counts.items()]
        parts += [f"{part}: ended before all was there; start the same again, which encodes the rest" for part in self._unfinished]
        what = "; ".join(parts) if parts else "the trainer asked for no cached value"
        made = [repr(f"{self.name}/{part}") for part in (*self._calls, *self._once)] or [repr(self.name)]
        data_sets = f"{self.setting.source!r}, which was only read," if self.setting.source else " and ".join(made)
        return f"{what} (data set{'s' if len(made) > 1 else ''} {data_sets} in {self.setting.store})"


def _telling(part: str) -> Callable[[Mapping[str, Any]], None]:
    """Return what says every 30 seconds how far all ranks are."""
    reported_at = time.monotonic()

    def tell(counts: Mapping[str, Any]) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _SAYS_SECONDS:
            reported_at = time.monotonic()
            print(f"cachestore.live: {part}: {counts['done']} of {counts['total']}", file=sys.stderr, flush=True)

    return tell


_runs: list[Run] = []


@contextmanager
def trial() -> Generator[None]:
    """Let the run of this process have an empty store for a while, which goes at the end: for a self-test."""
    before = current()
    with tempfile.TemporaryDirectory(prefix="cachestore-self-test-") as folder:
        _runs[:] = [Run(replace(before.setting, store=str(Path(folder, "store")), source="", generation=None))]
        try:
            yield
        finally:
            _runs[0].store.close()
            _runs[:] = [before]


def current() -> Run:
    """Return the run of this process. Ends the process with exit code 2 if it is not one that `cachestore.live` started."""
    setting = armed()
    if setting is None:
        refuse("this process was not started by cachestore.live")
    if not _runs or _runs[0].pid != os.getpid():
        listed = {name: value for run in _runs for name, value in vars(run).items() if name == "exported"}  # by the parent
        _runs[:] = [Run(setting)]
        vars(_runs[0]).update(listed)
    return _runs[0]
