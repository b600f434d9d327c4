"""Processes that save, load and remove files of one name, in turns, with `gc --apply` three days later and `compact` beside.

Two or three processes save and remove the same few paths, and each looks at what the others did; one tidies up, one only looks, one of them
is struck. Links into the folder of the files are noted down as they are made, so there is a model: the calls in the order of their
numbers. What must hold: what a call sees is what is there at some moment between its begin and its end, whole and right; an error is one of
ours, and came of the strike, of days that passed, or of a path that nobody saved; and afterwards anybody can go on.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

import cachestore as cs
from cachestore.care import collect as upkeep
from cachestore.core.errors import BadInput, MissingEntry
from cachestore.store.format.findings import HARMLESS
from cachestore.store.write.commit import create_store
from tests.torture import publish
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.turns import Blow, Note, Played, Round, Seat, Sleep, play

POINTS: Final = 1_000
PATHS: Final = ("a", "b/c", "b/d")
VALUES: Final = 4
"""So many different values are saved, over and over: a value that went comes back."""
CALLS: Final = {"saver": 700, "tidying": 900, "looker": 500}
TEMPLATES: Final = ("new", "long")


def rounds(seed: int) -> Iterator[Round]:
    """Rounds without end."""
    random = Random(f"files {seed}")
    for number in count():
        savers = random.choice((2, 2, 3))
        calls = [*[CALLS["saver"]] * savers, CALLS["tidying"], CALLS["looker"]]
        sleep = Sleep(random.randrange(savers), random.randrange(CALLS["saver"] // 2)) if random.random() < 0.5 else None
        yield Round(TEMPLATES[number % len(TEMPLATES)], savers, random.randrange(1 << 30), Blow.drawn(random, calls), sleep)


def value_of(value: int) -> dict[str, np.ndarray]:
    """What is saved as a value: one follows from the other, so that a wrong one is always seen."""
    return {"x": np.full((2, 3), value, np.float32), "long": np.full(40 * value, value, np.int64)}


# Processes


def save(seat: Seat) -> None:
    """Save, remove, and look at what others did."""
    with publish._opened(seat.root, seat) as store:
        files = publish._tried(seat, lambda: store.files(publish.NAME))
        for _step in range(seat.random.randint(4, 8)):
            path = seat.random.choice(PATHS)
            match seat.random.choice(("save", "save", "save", "remove", "look", "close")):
                case "save":
                    value = seat.random.randrange(VALUES)
                    seat.say("begin", path=path, value=value)
                    _until_done(seat, partial(files.save, path, value_of(value), {"value": value}))
                case "remove":
                    seat.say("begin", path=path, value=None)
                    _until_done(seat, partial(files.remove, path))
                case "look":
                    _look(seat, files, path)
                case _:
                    _until_done(seat, files.close)
                    files = publish._tried(seat, lambda: store.files(publish.NAME))


def _until_done(seat: Seat, call: Callable[[], None]) -> None:
    for _try in range(publish._TRIES):
        try:
            call()
        except cs.CacheStoreError as error:
            seat.say("refused", text=f"{type(error).__name__}: {error}", is_absent=isinstance(error, BadInput))
        else:
            seat.say("done")
            return
    seat.say("given up")


def look(seat: Seat) -> None:
    """Only look."""
    with publish._opened(seat.root, seat) as store:
        files = publish._tried(seat, lambda: store.files(publish.NAME))
        for _step in range(seat.random.randint(6, 12)):
            _look(seat, files, seat.random.choice(PATHS))


def _look(seat: Seat, files: Any, path: str) -> None:
    what = seat.random.choice(("exists", "load", "load", "metadata", "glob"))
    seat.say("looks", what=what, path=path)
    try:
        match what:
            case "exists":
                seat.say("seen", exists=files.exists(path))
            case "load":
                loaded = {name: tensor.numpy() for name, tensor in files.load(path).items()}
                value = int(loaded["x"][0, 0])
                made = value_of(value)
                is_whole = set(loaded) == set(made) and all(np.array_equal(loaded[name], made[name]) for name in made)
                seat.say("seen", value=value if is_whole else -1)
            case "metadata":
                seat.say("seen", value=files.metadata(path)["value"])
            case _:
                seat.say("seen", paths=files.glob())
    except MissingEntry as error:
        seat.say("seen", value=None, text=str(error))
    except cs.CacheStoreError as error:
        seat.say("not seen", text=f"{type(error).__name__}: {error}")


# The model


@dataclass(slots=True)
class Call:
    """A save or a removal, as it was noted down."""

    path: str
    value: int | None
    began: int
    links: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Every (number, place in the log) at which an entry of it was linked."""
    ended: int = 0
    """Where in the log it returned; 0 if it never did."""

    @property
    def number(self) -> int:
        """The number that counts, if it returned; else 0."""
        return self.links[-1][0] if self.ended and self.links else 0


@dataclass(frozen=True, slots=True)
class Look:
    """What a process saw, between two places in the log."""

    note: Note
    seen: Note
    began: int
    ended: int


def calls_of(notes: Sequence[Note], began: Sequence[Call]) -> list[Call]:
    """The saves and removals of a log, after those of the template."""
    found = list(began)
    current: dict[int, Call] = {}
    for at, note in enumerate(notes):
        match note["e"]:
            case "begin":
                current[note["p"]] = Call(note["path"], note["value"], at)
                found.append(current[note["p"]])
            case "link" if note["p"] in current and (number := publish._number_of(note["path"])):
                current[note["p"]].links.append((number, at))
            case "done" | "given up":
                call = current.pop(note["p"], None)
                if call is not None and note["e"] == "done":
                    call.ended = at
            case _:
                pass
    return found


def looks_of(notes: Sequence[Note]) -> list[Look]:
    """What was seen."""
    found: list[Look] = []
    began: dict[int, tuple[int, Note]] = {}
    for at, note in enumerate(notes):
        if note["e"] == "looks":
            began[note["p"]] = at, note
        elif note["e"] == "seen":
            start, asked = began[note["p"]]
            found.append(Look(asked, note, start, at))
    return found


def wrong_looks(calls: Sequence[Call], looks: Sequence[Look], last: Mapping[str, int]) -> list[str]:
    """Which looks no order of the calls explains, `last` being what is there in the end. Calls that never returned may count or not."""
    found = [f"{each.path} was saved as {each.value} without an entry" for each in calls if each.ended and not each.links]
    sure = [(each.number, each) for each in calls if each.number]
    doubtful = [(n, each) for each in calls for n, _at in each.links if n != each.number]
    if len({n for n, _each in sure}) < len(sure):
        return [*found, f"a number counts twice: {sorted(n for n, _each in sure)}"]
    fewest: list[str] | None = None
    for chosen in product((True, False), repeat=min(len(doubtful), publish._MOST_DOUBTFUL)):
        entries = sorted([*sure, *(each for each, counts in zip(doubtful, chosen, strict=False) if counts)], key=lambda entry: entry[0])
        states: list[tuple[int, dict[str, int]]] = [(0, {})]
        for n, each in entries:
            after = {path: value for path, value in states[-1][1].items() if path != each.path}
            states.append((n, after if each.value is None else {**after, each.path: each.value}))
        wrong = [text for look in looks if (text := _wrong_look(calls, states, look))]
        if states[-1][1] != last:
            wrong.append(f"in the end there is {last}, not {states[-1][1]}")
        if fewest is None or len(wrong) < len(fewest):
            fewest = wrong
        if not wrong:
            break
    return [*found, *(fewest or [])]


def _wrong_look(calls: Sequence[Call], states: Sequence[tuple[int, Mapping[str, int]]], look: Look) -> str:
    lowest = max((each.number for each in calls if each.number and each.ended < look.began), default=0)
    highest = max((n for each in calls for n, at in each.links if at < look.ended), default=0)
    first = max(index for index, (n, _state) in enumerate(states) if n <= lowest)
    possible = [state for n, state in states[first:] if n <= highest or n == states[first][0]]
    path = look.note["path"]
    match look.note["what"]:
        case "exists":
            is_right = any((path in state) == look.seen["exists"] for state in possible)
        case "glob":
            is_right = any(sorted(state) == look.seen["paths"] for state in possible)
        case _:
            is_right = any(state.get(path) == look.seen["value"] for state in possible)
    return "" if is_right else f"{look.note} gave {look.seen}, though it was {possible}"


def wrong_refusals(played: Played, one: Round) -> list[str]:
    """Refusals for which neither a strike nor days that passed were the reason; that a value is gone, only days since the call began."""
    found: list[str] = []
    have_days_passed = False
    began, tidied = dict[int, int](), -1
    for at, note in enumerate(played.notes):
        is_struck = bool(played.struck) and one.blow is not None and note["p"] == one.blow.player
        have_days_passed |= note["e"] == "tidies" and note["days"]
        is_tidying = note["p"] == one.writers
        tidied = at if is_tidying else tidied
        if note["e"] == "begin":
            began[note["p"]] = at
        if note["e"] in {"refused", "not seen", "given up"} and not is_struck and (is_tidying or not have_days_passed):
            found.append(f"process {note['p']} was refused for nothing: {note.get('text', note['e'])}")
        elif note["e"] == "given up" and not is_struck:
            found.append(f"process {note['p']} gave up")
        elif note["e"] == "refused" and not is_struck and note.get("is_absent") and tidied < began.get(note["p"], -1):
            found.append(f"a file could not be saved: {note['text']}")
    return found


# Points


def prepare(template: str, root: Path) -> list[Call]:
    """Make a store, and say what was saved in it."""
    random, calls = Random(f"files {template}"), list[Call]()
    create_store(root)
    with cs.open(root, mode="a") as store:
        for _session in range({"new": 0, "long": 3}[template]):
            with store.files(publish.NAME) as files:
                for _step in range(3):
                    path, value = random.choice(PATHS), random.randrange(VALUES)
                    files.save(path, value_of(value), {"value": value})
                    calls.append(Call(path, value, -1, [(files._session.flush(), -1)], -1))
        store.commit()
    return calls


def judge(one: Round, *, templates: Mapping[str, tuple[Path, Sequence[Call]]], folder: Path, counts: Path) -> list[str]:
    """Play a round, and say what did not hold."""
    publish.hurry()
    root = folder / secrets.token_hex(8)
    template, before = templates[one.template]
    shutil.copytree(template, root)
    try:
        played = play([*[save] * one.writers, publish.tidy, look], root, one.seed, one.blow, one.sleep)
        if played.struck:
            with counts.open("a") as file:
                file.write("kill\n" if one.blow and one.blow.strike.kill else "error\n")
        if played.violations:
            return [*played.violations, *([f"struck was {played.struck}"] if played.struck else [])]
        found = wrong_refusals(played, one)
        last = dict[str, int]()
        found += _wrong_afterwards(root, last)
        found += wrong_looks(calls_of(played.notes, before), looks_of(played.notes), last)
        return [*found, f"struck was {played.struck or 'nothing'}"] if found else []
    finally:
        for path in folder.glob(f"{root.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _wrong_afterwards(root: Path, last: dict[str, int]) -> list[str]:
    """What is wrong with the files as they were left, and after `gc` days later; fills in what they were."""
    found: list[str] = []
    now = time.time
    try:
        with cs.open(root, mode="a", verify="always") as store:
            files = store.files(publish.NAME)
            for step in range(2):
                values = {path: files.metadata(path)["value"] for path in files.glob()}
                found += [f"{path} is not what was saved" for path, value in values.items() if not _is_right(files.load(path), value)]
                if step and values != {**last, "last": 1}:
                    found.append(f"after gc there is {values}, before it {last}")
                if not step:
                    last.update(values)
                    files.save("last", value_of(1), {"value": 1})
                    for days in (1, 2):
                        time.time = lambda days=days: now() + days * publish.DAYS
                        upkeep.collect(root, apply=True, grace_seconds=0, keep=1)
                    time.time = now
    except cs.CacheStoreError as error:
        found.append(f"afterwards: {type(error).__name__}: {error}")
    finally:
        time.time = now
    if kinds := {finding.kind for finding in cs.verify(root).findings} - HARMLESS:
        found.append(f"verify finds {sorted(kinds)}")
    return found


def _is_right(loaded: Mapping[str, Any], value: int) -> bool:
    made = value_of(value)
    return set(loaded) == set(made) and all(np.array_equal(loaded[name].numpy(), made[name]) for name in made)


def play_rounds(number: int, seed: int) -> Outcome:
    """Play so many rounds."""
    with scratch() as folder:
        templates: dict[str, tuple[Path, Sequence[Call]]] = {}
        for name in TEMPLATES:
            templates[name] = folder / name, prepare(name, folder / name)
        counts = folder / "counts"
        counts.touch()
        judging = partial(judge, templates=templates, folder=folder, counts=counts)
        with closing(judged(islice(rounds(seed), number), judging, each=publish.EACH)) as results:
            found = list(results)
        struck = counts.read_text().split()
    return outcome_of(found, remarks=[f"killed {struck.count('kill')}, refused a call {struck.count('error')}"])


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"files": Campaign(play_rounds, POINTS)}
