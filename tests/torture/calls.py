"""The k-th call of the file system, for every k: a process dies before it, within it or after it, or it fails, once or from then on.

Each point is a command over a store of its own, at 1, 2 or 4 ranks of which one is struck. Required afterwards: what was acknowledged is
there and right, nothing is wrong or damaged, who was not struck has finished, who was refused something said so in one sentence of ours
with path and reason, nobody hung, `verify` is content, and the same command goes through and leaves everything that it is to leave.
"""

import errno
import faulthandler
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import cachestore as cs
from cachestore.core.keys import Key
from cachestore.jobs.run import catalog_maker
from cachestore.store.format.findings import HARMLESS
from cachestore.store.write import append
from tests import fakes
from tests.torture import jobs
from tests.torture.campaign import HANG_SECONDS, Campaign, Outcome, judged, outcome_of, scratch, waited_seconds
from tests.torture.jobs import Job, Unfinished, held
from tests.torture.watching import Call, watch

WORLDS: Final = (1, 2, 4)
KILLS: Final = 2_400
ERRORS: Final = 3_600
FLIPS: Final = 1_200
_FEW: Final = 4
EACH: Final = 16
"""Points that one process judges: in another store each, so that nothing is remembered from one to the next."""
_LAUNCH: Final = "CACHESTORE_LAUNCH"
_LEFT_OUT: Final = "the next pass tries it again"

Kill = Literal["before", "within", "after"]

_OPENS: Final = {"open", "listdir", "scandir", "lmdb.create", "lmdb.open"}
_GROWS: Final = {"write", "mkdir", "link", "rename", "replace", "fsync", "lmdb.create", "lmdb.commit"}
_MAKES: Final = {"mkdir", "link", "rename", "replace", "unlink", "rmdir", "chmod", "lmdb.create"}
_WRONG: Final = "wrong write"
"""A write of which one bit arrives flipped, and nobody says so."""

APPLIES: Final[Mapping[str, Callable[[Call], bool]]] = {
    "ENOSPC": lambda call: call.creates or call.name in _GROWS,
    "EDQUOT": lambda call: call.creates or call.name in _GROWS,
    "EIO": lambda call: call.name != "flock",
    "EMFILE": lambda call: call.name in _OPENS,
    "EROFS": lambda call: call.creates or call.name in _MAKES,
    "EACCES": lambda call: call.name in _OPENS | _MAKES | {"stat", "lstat"},
    "ESTALE": lambda call: True,
    "short write": lambda call: call.name == "write",
    _WRONG: lambda call: call.name == "write",
}
"""Which calls an error can befall."""


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls a call."""

    kill: Kill | None = None
    error: str = ""
    is_sticky: bool = False

    def befalls(self, call: Call) -> bool:
        """Whether this can happen to a call."""
        if self.kill is None:
            return APPLIES[self.error](call)
        return call.name == "write" if self.kill == "within" else call.changes


@dataclass(frozen=True, slots=True)
class Point:
    """A strike on the first call, from a number on, that it can befall."""

    job: str
    world: int
    rank: int
    """Who is struck."""
    number: int
    strike: Strike

    def __repr__(self) -> str:
        strike = self.strike
        what = f"killed {strike.kill}" if strike.kill else f"{strike.error} {'from then on' if strike.is_sticky else 'once'}"
        return f"{self.job}, rank {self.rank} of {self.world}, call {self.number}, {what}"


# A process that is struck, and those beside it


@dataclass(slots=True)
class _Striker:
    point: Point
    note: Path
    numbers: "count[int]" = field(default_factory=count)
    has_struck: bool = False

    def __call__(self, call: Call, real: Callable[..., Any]) -> Any:
        strike = self.point.strike
        if next(self.numbers) < self.point.number or not strike.befalls(call) or (self.has_struck and not strike.is_sticky):
            return real()
        if not self.has_struck:
            self.has_struck = True
            self.note.write_text(f"{call.name} {call.path}")
        if strike.kill is None:
            return self._fail(call, real)
        if strike.kill == "within":
            real(bytes(call.data)[: len(call.data) // 2])
        elif strike.kill == "after":
            real()
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def _fail(self, call: Call, real: Callable[..., Any]) -> Any:
        if self.point.strike.error == "short write":
            return real(bytes(call.data)[: max(1, len(call.data) // 2)])
        if self.point.strike.error == _WRONG:
            wrong = bytearray(call.data)
            wrong[len(wrong) // 2] ^= 1
            return real(wrong)
        code = getattr(errno, self.point.strike.error)
        if call.name in {"write", "read", "pread", "preadv", "fsync", "fstat", "ftruncate", "flock"}:  # these know no name
            raise OSError(code, os.strerror(code))
        raise OSError(code, os.strerror(code), call.path)


@dataclass(frozen=True, slots=True)
class _Notes:
    """What the processes of a point leave beside the store."""

    root: Path

    def beside(self, name: str) -> Path:
        return self.root.with_name(f"{self.root.name}.{name}")

    def acknowledged(self) -> set[Key]:
        path = self.beside("acknowledged")
        return {Key.parse(line) for line in path.read_text().split()} if path.exists() else set()

    def generations(self) -> dict[str, int]:
        path = self.beside("generations")
        return {name: int(n) for n, name in (line.split(" ", 1) for line in path.read_text().splitlines())} if path.exists() else {}

    def ended(self, rank: int) -> dict[str, Any]:
        path = self.beside(f"ended.{rank}")
        return json.loads(path.read_text()) if path.exists() else {}


def tell_acknowledged(say: Callable[[Iterable[Key]], None], say_generation: Callable[[str, int], None]) -> None:
    """Have it said, in this process and from now on, when entries and catalogs are acknowledged."""
    write_segment, publish_draft = append.write_segment, catalog_maker.publish_draft

    def segment(*given: Any, **named: Any) -> append.Acknowledged:
        acknowledged = write_segment(*given, **named)
        say(acknowledged.keys)
        return acknowledged

    def catalog(layout: Any, draft: Any, *, after: int) -> bool:
        published = publish_draft(layout, draft, after=after)
        if published:
            say_generation(draft.catalog.name, after + 1)
        return published

    append.write_segment, catalog_maker.publish_draft = segment, catalog


def say_to(path: Path) -> Callable[[str], None]:
    """Adds text to a file, by calls that nobody watches."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write  # before it is watched

    def say(text: str) -> None:
        write(descriptor, text.encode())

    return say


def _be_rank(job: Job, root: Path, rank: int, world: int, around: Callable[..., Any] | None) -> None:
    """Be one process of a command, and leave word of how it ended."""
    notes = _Notes(root)
    faulthandler.register(signal.SIGUSR1, notes.beside(f"stack.{rank}").open("w"))
    os.environ[_LAUNCH] = "one launch"
    jobs.hurry()
    say, say_generation = say_to(notes.beside("acknowledged")), say_to(notes.beside("generations"))
    tell_acknowledged(lambda keys: say("".join(f"{key}\n" for key in keys)), lambda name, n: say_generation(f"{n} {name}\n"))
    if around is not None:
        watch(root, around)
    ended: dict[str, Any] = {"how": "finished", "text": ""}
    try:
        job.act(root, rank, world)
    except cs.CacheStoreError as error:
        ended = {"how": "refused", "text": str(error)}
    except Unfinished as error:
        ended = {"how": "unfinished", "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - the boundary of a process: this is what a user would see a traceback of
        ended = {"how": "raised", "text": f"{type(error).__name__}: {error}", "where": _where(error)}
    notes.beside(f"ended.{rank}").write_text(json.dumps(ended))


def _where(error: BaseException) -> str:
    """The innermost lines of the package that an error came through."""
    lines: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "cachestore/" in code.co_filename:
            lines.append(f"{Path(code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(lines[-4:]))


def _start(job: Job, root: Path, rank: int, world: int, around: Callable[..., Any] | None) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _be_rank(job, root, rank, world, around)
            code = 0
        finally:
            os._exit(code)
    return pid


def _wait(pids: Sequence[int], notes: _Notes) -> list[int | str]:
    """How each process ended: its exit code, or where it stood when it took too long."""
    began = time.monotonic()
    hanging: dict[int, str] = {}
    for rank, pid in enumerate(pids):
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # each stays until all ended, as it waited for others
            if time.monotonic() - began > HANG_SECONDS + waited_seconds(*pids):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.1)
                stack = notes.beside(f"stack.{rank}").read_text().splitlines()
                hanging[pid] = "hangs in " + " <- ".join(line.strip() for line in stack[1:8])
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.001)
    codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
    return [hanging.get(pid, codes[pid]) for pid in pids]


# Points


def prepare(job: Job, folder: Path) -> Path:
    """The store that a job is given, made once; in a process of its own, so that nothing of it is remembered here."""
    template = folder / f"{job.name}.template"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            jobs.hurry()
            job.prepare(template)
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"the store of {job.name} could not be made")
    return template


def copy(template: Path, root: Path) -> None:
    """A store like the template's, and what lies beside it."""
    for path in template.parent.glob(f"{template.name}*"):
        shutil.copytree(path, root.with_name(path.name.replace(template.name, root.name)))


def _calls(job: Job, world: int, template: Path, folder: Path) -> dict[int, list[Call]]:
    """The calls of the first and the last rank in an undisturbed run."""
    root = folder / f"{job.name}.{world}.counted"
    copy(template, root)
    ranks = sorted({0, world - 1})
    logs = {rank: root.with_name(f"{root.name}.calls.{rank}") for rank in ranks}

    def counting(log: Path) -> Callable[..., Any]:
        say = say_to(log)

        def around(call: Call, real: Callable[[], Any]) -> Any:
            say(f"{call.name} {int(call.creates)}\n")
            return real()

        return around

    pids = [_start(job, root, rank, world, counting(logs[rank]) if rank in logs else None) for rank in range(world)]
    codes = _wait(pids, _Notes(root))
    if any(codes) or any(_Notes(root).ended(rank)["how"] != "finished" for rank in range(world)):
        raise RuntimeError(
            f"{job.name} at {world} ranks does not finish undisturbed: {codes}, {[_Notes(root).ended(rank) for rank in range(world)]}"
        )
    found: dict[int, list[Call]] = {}
    for rank, log in logs.items():
        words = (line.split() for line in log.read_text().splitlines())
        found[rank] = [Call(name, "", creates=bool(int(creates))) for name, creates in words]
    return found


def _strikes_of_kills() -> list[Strike]:
    return [Strike(kill="before"), Strike(kill="within"), Strike(kill="after")]


def _strikes_of_errors() -> list[Strike]:
    return [Strike(error=error, is_sticky=is_sticky) for error in APPLIES if error != _WRONG for is_sticky in (False, True)]


def _all_points(job: Job, template: Path, folder: Path, strikes: Sequence[Strike], world: int) -> Iterator[Point]:
    for rank, calls in _calls(job, world, template, folder).items():
        for number, call in enumerate(calls):
            yield from (Point(job.name, world, rank, number, strike) for strike in strikes if strike.befalls(call))


def chosen(points: Sequence[Point], seed: int) -> Iterator[Point]:
    """These points in an order by the seed, of each job and world in turn as long as they have some."""
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.job, point.world), []).append(point)
    random = Random(f"calls {seed}")
    for group in groups.values():
        random.shuffle(group)
    while groups:
        for name in list(groups):
            yield groups[name].pop()
            if not groups[name]:
                del groups[name]


NOT_STRUCK: Final = "the run ended before"
"""What a point says that was none: with several ranks, who does what differs from run to run."""


def judge(point: Point, *, templates: Mapping[str, Path], before: Mapping[str, set[Key]], folder: Path) -> list[str]:
    """Play a point, and say what did not hold."""
    job = jobs.job(point.job)
    root = folder / secrets.token_hex(8)
    notes = _Notes(root)
    copy(templates[job.name], root)
    struck = notes.beside("struck")
    pids = [_start(job, root, rank, point.world, _Striker(point, struck) if rank == point.rank else None) for rank in range(point.world)]
    codes = _wait(pids, notes)
    try:
        if not struck.exists():
            return [NOT_STRUCK]
        found = _of_processes(point, codes, notes)
        if not any(isinstance(code, str) for code in codes):
            found += of_store(job, root, before[job.name] | notes.acknowledged(), notes.generations())
            found += of_second_run(job, root, point.world)
        return [*found, f"struck was {struck.read_text().replace(str(root), 'STORE')}"] if found else []
    finally:
        for path in folder.glob(f"{root.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _of_processes(point: Point, codes: Sequence[int | str], notes: _Notes) -> list[str]:
    found: list[str] = []
    for rank, code in enumerate(codes):
        is_struck = rank == point.rank
        if is_struck and point.strike.kill is not None and code == -signal.SIGKILL:
            continue
        if code != 0:
            found.append(f"rank {rank} {code if isinstance(code, str) else f'ended with {code}'}")
            continue
        ended = notes.ended(rank)
        if ended["how"] == "raised" or (ended["how"] != "finished" and not is_struck):
            found.append(f"rank {rank} {ended['how']}: {ended['text']} ({ended.get('where', '')})")
        elif ended["how"] == "refused":
            found += _of_words(point.strike.error, ended["text"], notes.root)
    return found


def _of_words(error: str, text: str, root: Path) -> list[str]:
    """What a sentence about a refused call lacks."""
    reason = "reads back differently" if error == _WRONG else os.strerror(getattr(errno, error, 0))
    lacks = [what for what, is_there in (("the path", str(root) in text), (f"the reason {reason!r}", reason in text)) if not is_there]
    return [f"{' and '.join(lacks)} is missing in: {text}"] if lacks else []


def of_store(job: Job, root: Path, acknowledged: set[Key], generations: Mapping[str, int]) -> list[str]:
    """What is wrong with a store as it was left."""
    right, damaged = held(root)
    found = [
        f"{len(keys)} {what}: {sorted(map(str, keys))[:2]}" for what, keys in _wrong(job, right, damaged, acknowledged).items() if keys
    ]
    if not (root / "cachestore.json").exists():
        return found
    for name, generation in generations.items():
        there = cs.stats(root).as_json()["catalogs"]
        if not any(each["name"] == name and each["generation"] >= generation for each in there):
            found.append(f"generation {generation} of {name!r} is gone: {there}")
    if not job.spoiled:
        kinds = {finding.kind for finding in cs.verify(root).findings} - HARMLESS
        found += [f"verify finds {sorted(kinds)}"] if kinds else []
    return found


def _wrong(job: Job, right: Mapping[Key, bool], damaged: set[Key], needed: set[Key]) -> dict[str, set[Key]]:
    return {
        "acknowledged and gone": needed - right.keys() - job.spoiled,
        "with a wrong value": {key for key, is_right in right.items() if not is_right},
        "damaged": damaged - job.spoiled,
    }


def of_second_run(job: Job, root: Path, world: int) -> list[str]:
    """What the same command, run again, does not do. Runs in this process, which has touched no store before."""
    jobs.hurry()
    try:
        _act_again(job, root, world)
        right, damaged = held(root)
        wanted = job.wanted(root)
    except (cs.CacheStoreError, Unfinished) as error:
        return [f"the same command again: {type(error).__name__}: {error}"]
    found = [f"{len(keys)} {what} after the same command again" for what, keys in _wrong(job, right, damaged, wanted).items() if keys]
    left = {(one.kind, one.key) for one in cs.verify(root).findings if one.kind not in HARMLESS}
    left -= {("missing-entry", str(key)) for key in job.spoiled}
    return [*found, *([f"verify finds {sorted(left)} after the same command again"] if left else [])]


def _act_again(job: Job, root: Path, world: int) -> None:
    """The same command. Where two workers died with one unit, by whatever they died of, it is left out once, and said so."""
    os.environ[_LAUNCH] = "another launch"
    try:
        job.act(root, 0, world)
    except Unfinished as error:
        if _LEFT_OUT not in str(error):
            raise
        os.environ[_LAUNCH] = "a third launch"
        job.act(root, 0, world)


def play(strikes: Sequence[Strike], names: Sequence[str], worlds: Sequence[int], number: int, seed: int) -> Outcome:
    """Judge so many points of these jobs; a few are of a few jobs, as counting their calls takes longer than judging."""
    fakes.warm_up()  # else each process of each point imports the same, which on a busy machine takes longer than a hang
    with scratch() as folder:
        templates = {name: prepare(jobs.job(name), folder) for name in names}
        before = {name: held_before(jobs.job(name), template) for name, template in templates.items()}
        groups = [(name, world) for name in names for world in worlds]
        Random(f"groups {seed}").shuffle(groups)
        points = [
            point
            for name, world in groups[: max(1, number // _FEW)]
            for point in _all_points(jobs.job(name), templates[name], folder, strikes, world)
        ]
        judging = partial(judge, templates=templates, before=before, folder=folder)
        with closing(judged(chosen(points, seed), judging, each=EACH)) as results:
            struck = list(islice(((point, found) for point, found in results if list(found) != [NOT_STRUCK]), number))
    each = ", ".join(f"{name} {sum(point.job == name for point, _found in struck)}" for name in names)
    return outcome_of(struck, remarks=[f"of {len(points):,} points that there are: {each}"])


def held_before(job: Job, template: Path) -> set[Key]:
    """What must stay readable throughout: what the store held; of one that is tidied up, what it is to hold afterwards."""
    with suppress(Unfinished):
        if job.is_tidying:
            return job.wanted(template)
    return set(held(template)[0])


def _every_job() -> list[str]:
    return [job.name for job in jobs.JOBS]


CAMPAIGNS: Final[Mapping[str, Campaign]] = {
    "kills": Campaign(lambda number, seed: play(_strikes_of_kills(), _every_job(), WORLDS, number, seed), KILLS),
    "errors": Campaign(lambda number, seed: play(_strikes_of_errors(), _every_job(), WORLDS, number, seed), ERRORS),
    "flips": Campaign(lambda number, seed: play([Strike(error=_WRONG)], _every_job(), WORLDS, number, seed), FLIPS),
}
