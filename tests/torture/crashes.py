"""What a power cut may leave of a command, at any moment: unsynced bytes and names lost, torn, zeroed, or there before older ones.

A command is recorded once, call by call. For each prefix of its calls states are drawn that a disk may hold then:

* what was written to a file before its last sync is there; of what came after, all, nothing, a part, or zeros in its place;
* a name that was made, replaced or removed before its folder's last sync is so; of the rest each may be or not, in any order;
* what lies in a folder whose own name is lost is lost with it.

Each state is laid out as files and opened, without repair: what was acknowledged by then is there and right, everything else is right or
absent, catalogs name nothing that is absent. Of some states the same command is then run to its end.
"""

import hashlib
import json
import os
import secrets
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from threading import RLock
from typing import Any, Final

from cachestore.core.keys import Key
from tests.torture import calls, jobs
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.jobs import Job
from tests.torture.watching import Call, watch

STATES: Final = 6_000
FINISHED_EVERY: Final = 10
"""Of so many states one is given to the same command again."""
_BLOCK: Final = 512
_IN_VAIN: Final = 1_000
"""Drawing ends after so many states of a recording that were there before."""
_STRIDE: Final = 40
_FEW: Final = 4
_LIKELY: Final = (0.0, 0.1, 0.5, 0.9, 1.0)
"""How likely it is that something unsynced is there; one of these for a whole state."""
_DEAD_AFTER: Final = (40, 120, 200)
"""A first process of `fill` dies after so many calls, and a second one goes on: what it left unsynced is the second one's to sync."""

STORE: Final = "store"
_token = secrets.token_hex


# Recording


def record(job: Job, template: Path, folder: Path, *, dead_after: int | None = None) -> list[list[Any]]:
    """The calls of a command that change something, and what it acknowledged, in order: lists of a name and what it is about.

    With `dead_after` a first process dies after so many calls, and the recording goes on with a second one. Raises RuntimeError for a
    recording after which the disk would not hold what the folder holds: a call was missed.
    """
    area = folder / f"{job.name}.{dead_after}.recorded"
    lay_out(template, area)
    disk = Disk.of(area)
    log = folder / f"{area.name}.log"
    for dead in (dead_after, None) if dead_after is not None else (None,):
        pid = os.fork()
        if pid == 0:
            try:
                _be_recorded(job, area, log, dead)
            except BaseException:  # noqa: BLE001 - the boundary of a process
                traceback.print_exc()
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 0 and (dead is None or code != -signal.SIGKILL):
            raise RuntimeError(f"{job.name} ended with {code} while it was recorded")
    events = [[name, *(_relative(word, area) for word in words)] for name, *words in map(json.loads, log.read_text().splitlines())]
    for event in events:
        disk.do(*event)
    if missed := disk.differs_from(Disk.of(area)):
        raise RuntimeError(f"the recording of {job.name} missed a call: {missed} differ from what it says")
    return events


def lay_out(template: Path, area: Path) -> None:
    """A template's store, and what lies beside it, in a folder of their own."""
    area.mkdir()
    calls.copy(template, area / STORE)


def _be_recorded(job: Job, area: Path, log: Path, dead_after: int | None) -> None:
    jobs.hurry()
    os.environ["CACHESTORE_LAUNCH"] = "one launch"
    random = Random(f"{job.name} {dead_after}")
    secrets.token_hex = lambda nbytes=None: random.randbytes(nbytes or 32).hex()
    write = calls.say_to(log)
    made = 0
    one_call = RLock()
    """A call and its word are one, whatever the other threads do: a process must not die between the two of another thread."""

    def say(*words: Any) -> None:
        nonlocal made
        with one_call:
            write(json.dumps(words) + "\n")
            made += 1
            if made == dead_after:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(call: Call, real: Callable[[], Any]) -> Any:
        if not call.changes:
            return real()
        with one_call:
            return recorded(call, real)

    def recorded(call: Call, real: Callable[[], Any]) -> Any:
        found = real()
        if call.name == "write":
            say("write", call.path, bytes(call.data)[:found].decode("latin-1"))
        elif call.name == "lmdb.close":
            say("write", call.path, Path(call.path).read_bytes().decode("latin-1"))
        elif call.creates:
            say("create", call.path)
        elif call.changes and call.name not in {"chmod", "lmdb.commit"}:
            say(call.name, call.path, call.other)
        return found

    calls.tell_acknowledged(lambda keys: say("keys", [str(key) for key in keys]), lambda name, number: say("catalog", name, number))
    watch(area, around)
    job.act(area / STORE, 0, 1)
    os._exit(0)


# The disk


@dataclass(slots=True)
class File:
    """A file's bytes: those that are synced, and all."""

    synced: bytes = b""
    written: bytes = b""


@dataclass(slots=True)
class Change:
    """Names that change together, each to a file, a folder (True) or nothing."""

    names: Mapping[str, "File | bool | None"]
    is_synced: bool = False


@dataclass(slots=True)
class Disk:
    """What is on a disk, and what only in memory. Names are relative to the area."""

    names: dict[str, File | bool] = field(default_factory=dict[str, "File | bool"])
    """As the processes see them."""
    before: dict[str, File | bool] = field(default_factory=dict[str, "File | bool"])
    """As they were when the recording began: all of it synced."""
    changes: list[Change] = field(default_factory=list[Change])
    acknowledged: set[Key] = field(default_factory=set[Key])
    generations: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, area: Path) -> "Disk":
        """A folder as it is now, all of it synced."""
        names: dict[str, File | bool] = {}
        for path in sorted(area.rglob("*")):
            raw = b"" if path.is_dir() else path.read_bytes()
            names[str(path.relative_to(area))] = True if path.is_dir() else File(raw, raw)
        return cls(dict(names), dict(names))

    def differs_from(self, other: "Disk") -> list[str]:
        """The names, in order, that are not the same to the processes of both, or whose bytes are not."""

        def seen(disk: Disk) -> dict[str, bytes | None]:
            return {name: one.written if isinstance(one, File) else None for name, one in disk.names.items()}

        return sorted({name for name, _raw in seen(self).items() ^ seen(other).items()})

    def do(self, name: str, *words: Any) -> None:
        """Follow one call, or hear what was acknowledged. Raises ValueError for a call that it does not know."""
        match name:
            case "create":
                if words[0] not in self.names:
                    self._change({words[0]: File()})
            case "write":
                self._file(words[0]).written += words[1].encode("latin-1")
            case "fsync":
                self._sync(words[0])
            case "mkdir":
                self._change({words[0]: True})
            case "link":
                self._change({words[1]: self._file(words[0])})
            case "rename" | "replace":
                self._change({words[0]: None, words[1]: self._file(words[0])})
            case "unlink" | "remove" | "rmdir":
                self._change({words[0]: None})
            case "keys":
                self.acknowledged.update(map(Key.parse, words[0]))
            case "catalog":
                self.generations[words[0]] = words[1]
            case "truncate" | "ftruncate":
                pass  # of locks, which hold nothing
            case _:
                raise ValueError(f"nobody knows what {name!r} does to a disk")

    def _file(self, name: str) -> File:
        found = self.names[name]
        assert isinstance(found, File)
        return found

    def _change(self, names: Mapping[str, File | bool | None]) -> None:
        self.changes.append(Change(names))
        _apply(self.names, names)

    def _sync(self, name: str) -> None:
        found = self.names.get(name, True)
        if isinstance(found, File):
            found.synced = found.written
            return
        for change in self.changes:
            if any(os.path.dirname(changed) == name for changed in change.names):
                change.is_synced = True

    def draw(self, random: Random) -> dict[str, bytes | None]:
        """What a power cut may leave now: path -> bytes, or None for a folder."""
        likely = random.choice(_LIKELY)
        left = dict(self.before)
        for change in self.changes:
            if change.is_synced or random.random() < likely:
                _apply(left, change.names)
        bytes_of: dict[int, bytes] = {}  # a file under two names is one file
        found: dict[str, bytes | None] = {}
        for name in sorted(left):
            parent = os.path.dirname(name)
            if parent and found.get(parent, b"") is not None:
                continue  # its folder is lost
            one = left[name]
            if isinstance(one, File):
                found[name] = bytes_of.setdefault(id(one), _torn(one, likely, random))
            else:
                found[name] = None
        return found


def _apply(names: dict[str, File | bool], changed: Mapping[str, File | bool | None]) -> None:
    for name, one in changed.items():
        if one is None:
            names.pop(name, None)
        else:
            names[name] = one


def _torn(file: File, likely: float, random: Random) -> bytes:
    """What may be left of a file: as it was synced where nothing came after; else that, and of the rest all, nothing, a part, or zeros."""
    rest = file.written[len(file.synced) :]
    if not rest or random.random() < likely:
        return file.written
    match random.choice(("lost", "cut", "zeros", "holes")):
        case "lost":
            return file.synced
        case "cut":
            return file.synced + rest[: random.randrange(len(rest))]
        case "zeros":
            return file.synced + bytes(len(rest))
        case _:
            blocks = [rest[at : at + _BLOCK] for at in range(0, len(rest), _BLOCK)]
            return file.synced + b"".join(bytes(len(block)) if random.random() < 0.5 else block for block in blocks)


# States


@dataclass(frozen=True, slots=True)
class State:
    """One thing that a power cut may leave."""

    job: str
    recording: str
    call: int
    """After so many recorded calls."""
    files: Mapping[str, bytes | None]
    acknowledged: frozenset[Key]
    generations: Mapping[str, int]
    is_finished: bool
    """Whether the same command is run afterwards."""

    def __repr__(self) -> str:
        return f"{self.recording} cut off after call {self.call} ({len(self.files)} names left)"


def states(recordings: Mapping[str, tuple[str, Disk, Sequence[Sequence[Any]]]], number: int, seed: int) -> Iterator[State]:
    """So many different states, of each recording in turn; fewer only where drawing finds no new ones any more."""
    random = Random(f"crashes {seed}")
    seen: set[bytes] = set()
    drawing = [_drawn(name, *recording, random) for name, recording in recordings.items()]
    drawn = 0
    while drawing:
        for one in list(drawing):
            new = next((state for state in islice(one, _IN_VAIN) if _mark_of(state) not in seen), None)
            if new is None:
                drawing.remove(one)
                continue
            seen.add(_mark_of(new))
            yield State(*new, is_finished=drawn % FINISHED_EVERY == 0)
            drawn += 1
            if drawn == number:
                return


_Drawn = tuple[str, str, int, dict[str, bytes | None], frozenset[Key], dict[str, int]]


def _drawn(name: str, job: str, began: Disk, events: Sequence[Sequence[Any]], random: Random) -> Iterator[_Drawn]:
    """One state after each call of a recording, over and over; each time in another part of it, so that a few are spread over all of it."""
    while True:
        stride = random.randint(1, max(1, min(_STRIDE, len(events) // 4)))
        disk = Disk(dict(began.names), dict(began.before))
        for number, event in enumerate([*events, None]):
            if event is None or number % stride == 0:
                yield job, name, number, disk.draw(random), frozenset(disk.acknowledged), dict(disk.generations)
            if event is not None:
                disk.do(*event)


def _mark_of(state: _Drawn) -> bytes:
    """Tells states apart: by their files, and by what was acknowledged."""
    _job, _name, _number, files, acknowledged, generations = state
    mark = hashlib.sha256(repr((len(acknowledged), sorted(generations.items()))).encode())
    for path, raw in sorted(files.items()):
        mark.update(repr((path, raw)).encode())
    return mark.digest()


def judge(state: State, *, templates: Mapping[str, Path], before: Mapping[str, set[Key]], folder: Path) -> list[str]:
    """Lay a state out, open it, and say what does not hold."""
    area = folder / _token(8)
    area.mkdir()
    root = area / STORE
    try:
        for path, raw in state.files.items():
            if raw is None:
                (area / path).mkdir()
            else:
                (area / path).write_bytes(raw)
        job = jobs.job(state.job)
        found = calls.of_store(job, root, before[job.name] | state.acknowledged, state.generations)
        if state.is_finished and not found:
            jobs.start_again()
            found = calls.of_second_run(job, root, 1)
        return found
    finally:
        shutil.rmtree(area)


def recordings_of(names: Sequence[str], templates: Mapping[str, Path], folder: Path) -> dict[str, tuple[str, Disk, list[list[Any]]]]:
    """Each command's recording by name: (job, what was there, calls), with paths relative to the area."""
    found: dict[str, tuple[str, Disk, list[list[Any]]]] = {}
    for name in names:
        for dead_after in (None, *_DEAD_AFTER) if name == "fill" else (None,):
            events = record(jobs.job(name), templates[name], folder, dead_after=dead_after)
            area = folder / f"{name}.{dead_after}.before"
            lay_out(templates[name], area)
            title = name if dead_after is None else f"{name} by a second process, the first dead after call {dead_after},"
            found[title] = (name, Disk.of(area), events)
    return found


def _relative(word: Any, area: Path) -> Any:
    return word.removeprefix(str(area)).removeprefix("/") if isinstance(word, str) and word.startswith(str(area)) else word


def play(names: Sequence[str], number: int, seed: int) -> Outcome:
    """Judge so many different states of these jobs; a few are of a few jobs, as recording takes longer than judging."""
    names = Random(f"jobs {seed}").sample(names, min(len(names), max(1, number // _FEW)))
    with scratch() as folder:
        templates = {name: calls.prepare(jobs.job(name), folder) for name in names}
        before = {name: calls.held_before(jobs.job(name), template) for name, template in templates.items()}
        recordings = recordings_of(names, templates, folder)
        results = list(
            judged(states(recordings, number, seed), partial(judge, templates=templates, before=before, folder=folder), each=calls.EACH)
        )
    each = ", ".join(f"{name} {sum(state.job == name for state, _found in results)}" for name in names)
    finished = sum(state.is_finished for state, _found in results)
    return outcome_of(results, remarks=[f"all different; {each}; the same command finished {finished} of them"])


CAMPAIGNS: Final[Mapping[str, Campaign]] = {
    "crashes": Campaign(lambda number, seed: play([job.name for job in jobs.JOBS], number, seed), STATES),
}
