"""`push` and `pull` are killed with SIGKILL before or after the k-th request, or before the k-th call of the file system, for every k.

Each point is a command at 1 or 3 files at once. Required at that moment: no catalog is visible, at either end, without all that it names,
and `verify` finds nothing. The same command then goes through, and both ends are equal.
"""

import os
import secrets
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import quote, unquote

from cachestore.files.paths import MARKER, Layout
from cachestore.remote.pull import pull_from
from cachestore.remote.push import push_to
from tests.remote.copies import files_of, make, objects_of, request, wrong_in
from tests.remote.fake import Bucket
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.watching import Call, watch

POINTS: Final = 600
_JOBS: Final = (1, 3)
_EACH: Final = 8


class _Folder(MutableMapping[str, bytes]):
    """The objects of a bucket as files, so that they outlive a killed process. An object is complete once it is there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._root / quote(key, safe="")

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, data: bytes) -> None:
        temporary = self._root.with_name(f"{self._root.name}.{secrets.token_hex(8)}")
        temporary.write_bytes(data)
        temporary.rename(self._path(key))

    def __delitem__(self, key: str) -> None:
        self._path(key).unlink()

    def __iter__(self) -> Iterator[str]:
        return map(unquote, os.listdir(self._root))

    def __len__(self) -> int:
        return len(os.listdir(self._root))


def _bucket(root: Path) -> Bucket:
    return Bucket(_Folder(root))


@dataclass(frozen=True, slots=True)
class Point:
    """The process dies at an event of a command, counted from 0."""

    command: str
    jobs: int
    moment: str
    """`before` or `after` a request, or before a `call` of the file system."""
    number: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """A store in a folder and one in a bucket."""

    store: Path
    bucket: Path

    def run(self, command: str, jobs: int, **hooks: Any) -> None:
        client = _bucket(self.bucket).client(page=3, **hooks)
        if command == "push":
            push_to(client, Layout(self.store), request(jobs=jobs))
        else:
            pull_from(client, self.store, request(jobs=jobs, name="train" if command == "pull one" else None))


COMMANDS: Final = ("push", "pull", "pull one")


def _prepare(folder: Path) -> _Ends:
    """The store that is pushed, and the bucket that is pulled from: two data sets, five generations, five segments."""
    ends = _Ends(folder / "origin", folder / "bucket")
    make(ends.store, [1, 2], [3], [4, 5])
    make(ends.store, [2, 6], [7], name="second")
    ends.run("push", 1)
    return ends


def _fresh(whole: _Ends, command: str, folder: Path) -> _Ends:
    """What a command starts with."""
    name = secrets.token_hex(8)
    return _Ends(whole.store, folder / f"{name}.bucket") if command == "push" else _Ends(folder / name, whole.bucket)


def _count_events(whole: _Ends, command: str, folder: Path) -> dict[str, int]:
    """How many events of each moment an undisturbed run has, in a process of its own, as its calls are watched."""
    ends, log = _fresh(whole, command, folder), folder / f"{command}.events"
    pid = _fork(lambda: _struck(ends, Point(command, 1, "", 0), log))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"{command} does not finish undisturbed"
    return {moment: log.read_text().split().count(moment) for moment in ("before", "after", "call")}


def _fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return pid


def _struck(ends: _Ends, point: Point, log: Path | None = None) -> None:
    """Run a command, and die at its point."""
    lock, seen = threading.Lock(), Counter[str]()

    def strike(moment: str) -> None:
        with lock:
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{moment}\n")
            if (moment, seen[moment]) == (point.moment, point.number):
                os.kill(os.getpid(), signal.SIGKILL)
            seen[moment] += 1

    def around(call: Call, real: Callable[[], Any]) -> Any:
        if call.changes:
            strike("call")
        return real()

    watch(ends.store, around)
    ends.run(point.command, point.jobs, before=lambda _verb, _key: strike("before"), after=lambda _verb, _key: strike("after"))


def judge(point: Point, *, whole: _Ends, folder: Path) -> list[str]:
    """Let a command die at a point, look at what it left, and run it again."""
    ends = _fresh(whole, point.command, folder)
    code = os.waitstatus_to_exitcode(os.waitpid(_fork(lambda: _struck(ends, point)), 0)[1])
    found = [] if code in {0, -signal.SIGKILL} else [f"it ended with {code}"]
    found += _wrong(ends, folder)
    ends.run(point.command, point.jobs)
    found += [f"after the second run: {one}" for one in _wrong(ends, folder)]
    here, there = files_of(ends.store), objects_of(_bucket(ends.bucket).client())
    is_equal = here.items() <= there.items() if point.command == "pull one" else here == there
    if not is_equal or not any(path.startswith("catalogs/train/3") for path in here.keys() & there.keys()):
        found.append("the ends differ")
    for path in {ends.store, ends.bucket} - {whole.store, whole.bucket}:
        shutil.rmtree(path)
    return found


def _wrong(ends: _Ends, folder: Path) -> list[str]:
    """What is wrong at both ends; the bucket is looked at as the folder that its objects make."""
    copy = folder / secrets.token_hex(8)
    for key, data in _Folder(ends.bucket).items():
        path = copy / key.removeprefix("cache/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    found = [f"{root.name}: {one}" for root in (copy, ends.store) if (root / MARKER).exists() for one in wrong_in(root)]
    found += ["objects without a marker"] * (copy.exists() and not (copy / MARKER).exists())
    shutil.rmtree(copy, ignore_errors=True)
    return found


def play(number: int, seed: int) -> Outcome:
    """Judge so many points, of every command and moment alike."""
    random = Random(f"transfers {seed}")
    with scratch() as folder:
        whole = _prepare(folder)
        kinds: list[list[Point]] = []
        for command in COMMANDS:
            for moment, count in _count_events(whole, command, folder).items():
                some = [Point(command, jobs, moment, n) for jobs in _JOBS for n in range(count)]
                random.shuffle(some)
                kinds.append(some)
        points = [point for point in chain.from_iterable(zip_longest(*kinds)) if point is not None][:number]
        return outcome_of(judged(points, partial(judge, whole=whole, folder=folder), each=_EACH))


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"transfers": Campaign(play, POINTS)}
