"""Two runs that overtake each other: each is stopped at calls of its own, the source changes meanwhile, and any of them may go on first.

What must hold, whatever the order: the newest generation is that of the newest listing among the runs that were not refused, no generation
takes the place of one that planning would have compared otherwise, and whoever is refused has lost nothing.
"""

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, Final

import cachestore as cs
from cachestore.core.keys import Key
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.run import reconcile
from cachestore.jobs.start import here as run
from cachestore.store.format.catalog import Catalog, list_generations, read_catalog
from cachestore.store.read.rows import newest_catalog
from tests import fakes
from tests.torture import jobs
from tests.torture.calls import say_to, tell_acknowledged
from tests.torture.campaign import HANG_SECONDS, Campaign, Outcome, judged, outcome_of, scratch, waited_seconds
from tests.torture.watching import Call, watch

KINDS: Final = ("requests", "listings", "replaced", "encoders")
"""What differs: the resolution, what is listed, both with --replace, or which encoders work for one data set."""
CALLS: Final = 420
"""An undisturbed run makes about so many calls."""
TURN_SECONDS: Final = 0.7
"""Who waits for one that is stopped gets so long before the other goes on."""
ROUNDS: Final = 400


@dataclass(frozen=True, slots=True)
class Round:
    """Two runs, at which of their calls each is stopped, and the seed of what happens meanwhile."""

    kind: str
    stops: tuple[tuple[int, ...], tuple[int, ...]]
    seed: int
    is_new: bool
    """Whether the store is not there before."""


@dataclass(slots=True)
class _Run:
    """A run as its parent sees it."""

    pid: int
    notes: Path
    waited: float = 0.0
    """For how long it was ready to run, and others ran instead."""
    has_ended: bool = False
    reported: dict[str, Any] = field(default_factory=dict[str, Any])


def rounds(seed: int) -> Iterator[Round]:
    """Rounds without end, of each kind in turn."""
    random = Random(f"overtaking {seed}")
    for number in count():
        stops = [tuple(sorted(random.sample(range(CALLS), random.randint(0, 3)))) for _run in range(2)]
        yield Round(KINDS[number % len(KINDS)], (stops[0], stops[1]), random.randrange(1 << 30), random.random() < 0.5)


def _request(kind: str, number: int, source: Path, root: Path) -> PrecomputeRequest:
    resolution = 512 if number and kind in {"requests", "replaced"} else 1024
    encode = (("text",), ("latents",))[number] if kind == "encoders" else ("text", "latents")
    options: dict[str, Any] = {"resolution": resolution, "encode": encode, "replace": kind == "replaced", "workers": 0}
    return PrecomputeRequest(str(source), "model", str(root), **options)


def _change(source: Path, number: int) -> None:
    """One more picture, and one fewer after a while."""
    (source / f"new {number}.png").write_bytes(b"new picture %d" % number)
    (source / f"new {number}.txt").write_text(f"new caption {number}")
    if number % 3 == 2:
        (source / f"{number % 4}.png").unlink(missing_ok=True)


def _be(request: PrecomputeRequest, notes: Path, stops: Sequence[int]) -> None:
    """Run `precompute` in this process, stopped at these calls, and leave word of how it ended."""
    jobs.hurry()
    fakes.plug_in({"limit": 2, "answer": jobs.encode})
    reported: dict[str, Any] = {"how": "finished", "text": "", "listing": 0, "rows": [], "resolution": str(request.resolution)}
    acknowledged = say_to(notes.with_suffix(".keys"))
    tell_acknowledged(lambda keys: acknowledged("".join(f"{key}\n" for key in keys)), lambda _name, _generation: None)
    really = reconcile.publish_catalog

    def publish(presence: Any, job: Any, *others: Any) -> Any:
        reported.update(listing=job.listing_number, rows=list(job.plan.ids))
        return really(presence, job, *others)

    reconcile.publish_catalog = publish
    numbers = count()

    def around(_call: Call, real: Callable[[], Any]) -> Any:
        if next(numbers) in stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real()

    watch(Path(request.store), around)
    try:
        report = run.precompute_here(request)
        reported |= {"generation": report.generation, "text": str(report.failures)}  # a picture that is gone by now may fail
    except (cs.RecipeMismatch, cs.Superseded) as error:
        reported |= {"how": type(error).__name__, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - the boundary of a process: this is what a user would see a traceback of
        reported |= {"how": "raised", "text": f"{type(error).__name__}: {error}"}
    notes.write_text(json.dumps(reported))


def _start(request: PrecomputeRequest, notes: Path, stops: Sequence[int]) -> _Run:
    pid = os.fork()
    if pid:
        return _Run(pid, notes)
    try:
        _be(request, notes, stops)
    finally:
        os._exit(0)


def _go_on(one: _Run) -> None:
    """Let a run go on until it is stopped, ends, or waits for the other."""
    with suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGCONT)
    deadline = time.monotonic() + TURN_SECONDS
    while time.monotonic() < deadline:
        one.waited = waited_seconds(one.pid)
        pid, status = os.waitpid(one.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            return
        if pid:
            one.has_ended = True
            one.reported = json.loads(one.notes.read_text()) if one.notes.exists() else {"how": "raised", "text": f"it ended with {status}"}
            return
        time.sleep(0.001)


def judge(one: Round, *, folder: Path) -> list[str]:
    """Play a round, and say what did not hold."""
    root = folder / secrets.token_hex(8)
    source = root.with_name(f"{root.name}.source")
    random = Random(one.seed)
    jobs._make_source(root)
    if not one.is_new:
        _in_a_fork(lambda: _be(_request("listings", 0, source, root), root.with_name(f"{root.name}.before"), ()))
    requests = [_request(one.kind, number, source, root) for number in range(2)]
    runs = [_start(request, root.with_name(f"{root.name}.{number}"), one.stops[number]) for number, request in enumerate(requests)]
    try:
        deadline, changes = time.monotonic() + 2 * HANG_SECONDS, 0
        while left := [each for each in runs if not each.has_ended]:
            if time.monotonic() > deadline + sum(each.waited for each in runs):
                return [f"{len(left)} runs do not end"]
            _go_on(random.choice(left))
            if one.kind in {"listings", "replaced"} and random.random() < 0.5:
                _change(source, changes)
                changes += 1
        return [*_of_runs(one, runs), *_of_generations(one, root, runs), *_of_next_run(root, source, requests[0], runs)]
    finally:
        for each in runs:
            if not each.has_ended:
                os.kill(each.pid, signal.SIGKILL)
                os.waitpid(each.pid, 0)
        for path in folder.glob(f"{root.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _in_a_fork(act: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _of_runs(one: Round, runs: Sequence[_Run]) -> list[str]:
    """How runs ended that should not have ended so."""
    allowed = {"finished", *(["RecipeMismatch"] if one.kind == "requests" else []), *(["Superseded"] if one.kind != "encoders" else [])}
    found = [f"{each.reported['how']}: {each.reported['text']}" for each in runs if each.reported["how"] not in allowed]
    if one.is_new and not any(each.reported["how"] == "finished" for each in runs):
        found.append(f"both were refused: {[each.reported for each in runs]}")
    return found


def _of_generations(one: Round, root: Path, runs: Sequence[_Run]) -> list[str]:
    """What is wrong with the order of the generations, and with what the newest holds."""
    layout = Layout(root)
    catalogs = [read_catalog(layout.catalog("train", n), generation=n) for n in list_generations(layout, "train")]
    listings = [catalog.listing for catalog in catalogs]
    found = [f"generations are of the listings {listings}"] if listings != sorted(listings) else []
    asked = [sorted({str(column.options.get("resolution")) for column in catalog.columns} - {"None"}) for catalog in catalogs]
    if one.kind == "requests" and len(set(map(tuple, asked))) > 1:
        found.append(f"generations are of the resolutions {asked}")
    finished = [each.reported for each in runs if each.reported["how"] == "finished"]
    if published := [reported for reported in finished if reported["rows"]]:  # who joined the other's pass published nothing of its own
        latest = max(published, key=lambda reported: int(reported["listing"]))
        newest = newest_catalog(layout, "train")
        if newest is None or list(newest.ids) != latest["rows"]:
            found.append(f"the newest generation lists {newest and list(newest.ids)}, the newest listing is {latest}")
        elif one.kind == "replaced" and asked[-1] != [latest["resolution"]]:
            found.append(f"the newest generation is of the resolution {asked[-1]}, the newest listing is {latest}")
    if one.kind == "encoders" and len(finished) == 2 and {column.encoder for column in catalogs[-1].columns} != {"text", "latents"}:
        found.append("the newest generation lacks an encoder")
    lost = _acknowledged(runs) - set(cs.open(root).keys())
    return [*found, *([f"{len(lost)} acknowledged entries are gone"] if lost else [])]


def _acknowledged(runs: Sequence[_Run]) -> set[Key]:
    paths = [each.notes.with_suffix(".keys") for each in runs]
    return {Key.parse(line) for path in paths if path.exists() for line in path.read_text().split()}


def _of_next_run(root: Path, source: Path, request: PrecomputeRequest, runs: Sequence[_Run]) -> list[str]:
    """What the same command does not do once the runs have ended: a run that was superseded lists anew, and its listing is published."""
    if not any(each.reported["how"] == "Superseded" for each in runs):
        return []
    notes = root.with_name(f"{root.name}.again")
    _in_a_fork(lambda: _be(request, notes, ()))
    reported = json.loads(notes.read_text())
    newest = newest_catalog(Layout(root), "train")
    is_listed = newest is not None and _pictures(newest) == {path.name for path in source.glob("*.png")}
    return [] if is_listed or reported["how"] == "RecipeMismatch" else [f"the same command again: {reported}"]


def _pictures(catalog: Catalog) -> set[str]:
    return set(catalog.ids)


def play(number: int, seed: int) -> Outcome:
    """Play so many rounds."""
    with scratch() as folder, closing(judged(islice(rounds(seed), number), partial(judge, folder=folder))) as results:
        found = list(results)
    each = ", ".join(f"{kind} {sum(one.kind == kind for one, _found in found)}" for kind in KINDS)
    return outcome_of(found, remarks=[each])


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"overtaking": Campaign(play, ROUNDS)}
