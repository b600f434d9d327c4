"""Processes that publish one data set, in turns, with `gc --apply` three days later and `compact` beside, and one of them struck.

Two or three processes begin sessions, put, set, remove, flush, end, begin anew, and publish whole tables; one tidies up, one reads. What
each flush is to do is noted down before it, and every link into the data set's folder as it is made. So there is a model: the flushes in
the order of their numbers. What must hold: every state that is read is that of the model at its number; what was acknowledged before a read
began is in it; numbers follow the order of calls that came one after the other; what is named can be read, and has the right value; an
error is one of ours, and came of the strike or of days that passed; and afterwards anybody can go on.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, product
from pathlib import Path
from random import Random
from typing import Any, Final

import cachestore as cs
from cachestore.care import collect as upkeep
from cachestore.core.errors import BadInput, MissingEntry
from cachestore.core.keys import Key
from cachestore.store.format.findings import HARMLESS
from cachestore.store.write import folding
from cachestore.store.write import session as sessions
from cachestore.store.write.commit import create_store
from tests.torture import jobs
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.turns import Blow, Note, Played, Round, Seat, Sleep, play

NAME: Final = "own"
POINTS: Final = 1_000
EACH: Final = 8
DAYS: Final = 3 * 86_400.0
SAMPLES: Final = "abcde"
BASE: Final = tuple(jobs.own(n) for n in range(3))
"""Keys that a writer put: they stay whatever happens."""
OWN: Final = tuple(jobs.own(n) for n in range(10, 16))
"""Keys that sessions put, over and over."""
FIRST_FLUSH: Final = range(64, 92)
"""After one of so many calls, about, the first flush of a process has looked at the marks and has linked nothing yet, or is near it."""
CALLS: Final = {"writer": 700, "tidying": 900, "reader": 400}
"""About so many calls each process makes."""
TEMPLATES: Final = ("new", "short", "long", "worn")
"""Of "worn", no row names the values that its sessions put: the next `gc` marks them, while the first process names one of them."""
_TRIES: Final = 5
_MOST_DOUBTFUL: Final = 8

Cells = Mapping[str, Sequence[str]]
"""The keys of a row's parts, as texts."""


def rounds(seed: int) -> Iterator[Round]:
    """Rounds without end."""
    random = Random(f"publish {seed}")
    for number in count():
        template = TEMPLATES[number % len(TEMPLATES)]
        writers = random.choice((1, 2) if template == "worn" else (2, 2, 3))
        calls = [*[CALLS["writer"]] * writers, CALLS["tidying"], CALLS["reader"]]
        sleep = Sleep(random.randrange(writers), random.randrange(CALLS["writer"] // 2)) if random.random() < 0.5 else None
        blow = Blow.drawn(random, calls)
        if template == "worn":
            sleep, blow = Sleep(0, random.choice(FIRST_FLUSH), is_first=True), random.choice((blow, None))
        yield Round(template, writers, random.randrange(1 << 30), blow, sleep)


def hurry() -> None:
    """Let tables and blocks come after a few rows and entries, in this process, and nothing be synced: nobody cuts the power here."""
    jobs._patch(sessions, "_TABLE_ROWS", 5)
    jobs._patch(folding, "BLOCKS", (4, 16))
    os.fsync = os.fstat


# Processes


def write(seat: Seat, *, is_sure: bool = False) -> None:
    """Flush so many times, by one session after the other, and by whole tables. Who `is_sure` only names a value that others put."""
    ops = count()
    with _opened(seat.root, seat) as store:
        session = _tried(seat, lambda: store.session(NAME))
        for _step in range(1 if is_sure else seat.random.randint(3, 6)):
            what = seat.random.choice(("flush", "flush", "flush", "flush", "update", "table"))
            changes = _changes(seat.random, what)
            if is_sure:
                what, changes = "flush", [("sure", {"x": [str(seat.random.choice(OWN))]}, 0)]
            seat.say("begin", op=next(ops), what=what, changes=changes)
            if what == "flush":
                is_done = _flush(seat, session, changes, puts=not is_sure and seat.random.random() < 0.5)
            else:
                is_done = _publish(seat, store, session, what, changes)
            if not is_done or seat.random.random() < 0.3:
                if is_done:
                    _tried(seat, session.close)
                session = _tried(seat, lambda: store.session(NAME))


def _opened(root: Path, seat: Seat) -> cs.Store:
    return _tried(seat, lambda: cs.open(root, mode="a"))


def _tried(seat: Seat, call: Callable[[], Any]) -> Any:
    """Make a call, and again where it was refused. Raises what it raises at last."""
    for _try in range(_TRIES - 1):
        try:
            return call()
        except cs.CacheStoreError as error:
            seat.say("refused", text=f"{type(error).__name__}: {error}", is_absent=isinstance(error, BadInput))
    return call()


def _changes(random: Random, what: str) -> list[tuple[str, dict[str, list[str]] | None, int]]:
    """What a flush or a table sets and removes: (sample, keys by part or None, score)."""

    def keys() -> list[str]:
        return [str(key) for key in random.sample((*BASE, *OWN), random.choice((1, 1, 1, 2)))]

    samples = random.sample(SAMPLES, random.randint(1, 3))
    changes: list[tuple[str, dict[str, list[str]] | None, int]] = []
    for sample in samples:
        parts = {part: keys() for part in random.choice(("x", "x", "xy", "y"))}
        is_removed = what == "flush" and random.random() < 0.3
        changes.append((sample, None if is_removed else parts, random.randint(1, 9) if what != "flush" else 0))
    if what == "flush" and random.random() < 0.2:  # removed and set anew in one flush
        changes += [(samples[0], None, 0), (samples[0], {"x": keys()}, 0)]
    return changes


def _keys_of(changes: Sequence[tuple[str, Cells | None, int]]) -> list[Key]:
    return [Key.parse(text) for _sample, parts, _score in changes for keys in (parts or {}).values() for text in keys]


def _put(seat: Seat, session: Any, changes: Sequence[Any]) -> None:
    seat.say("puts")
    for key in _keys_of(changes):
        if key in OWN:
            session.put(key, jobs.value_of(key))


def _flush(seat: Seat, session: Any, changes: Sequence[Any], *, puts: bool) -> bool:
    def set_all() -> None:
        session.discard()  # of a flush that was refused the other rows are there, and the refused ones must not come after them
        for sample, parts, _score in changes:
            if parts is None:
                session.remove(sample)
            else:
                session.set(sample, **parts)

    set_all()
    return _until_published(seat, session, changes, session.flush, puts=puts, again=set_all)


def _publish(seat: Seat, store: cs.Store, session: Any, what: str, changes: Sequence[Any]) -> bool:
    parts = sorted({part for _sample, parts, _score in changes for part in parts})
    if all(len(keys) == 1 for _sample, cells, _score in changes for keys in cells.values()):
        columns = {part: [Key.parse(cells[part][0]) if part in cells else bytes(16) for _s, cells, _score in changes] for part in parts}
        columns = {part: [bytes(key) for key in keys] for part, keys in columns.items()}
        ids, scores = [sample for sample, _cells, _score in changes], [score for *_rest, score in changes]
        rows: Any = cs.Rows(ids, {part: _stacked(keys) for part, keys in columns.items()}, {"score": scores})
        seat.say("scored")
    else:
        rows = {sample: cells for sample, cells, _score in changes}

    def publish() -> int:
        session.flush()  # the values
        return store.publish(NAME, rows, update=what == "update")

    return _until_published(seat, session, changes, publish, puts=seat.random.random() < 0.5)


def _stacked(keys: Sequence[bytes]) -> Any:
    import numpy as np

    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def _until_published(
    seat: Seat,
    session: Any,
    changes: Sequence[Any],
    publish: Callable[[], int],
    *,
    puts: bool,
    again: Callable[[], None] = lambda: None,
) -> bool:
    if puts:
        with suppress(cs.CacheStoreError):
            _put(seat, session, changes)
    for _try in range(_TRIES):
        try:
            number = publish()
        except BadInput as error:
            seat.say("refused", text=f"BadInput: {error}", is_absent=True)
            with suppress(cs.CacheStoreError):
                again()
                _put(seat, session, changes)
        except cs.CacheStoreError as error:
            seat.say("refused", text=f"{type(error).__name__}: {error}")
        else:
            seat.say("published", n=number)
            return True
    seat.say("given up")
    return False


def tidy(seat: Seat, *, is_busy: bool = False) -> None:
    """Collect, mostly days later, and compact; who `is_busy` only collects, each time days later."""
    shift, now = 0.0, time.time
    time.time = lambda: now() + shift
    for _step in range(seat.random.randint(2, 5)):
        what = "gc" if is_busy else seat.random.choice(("gc", "gc", "gc", "compact"))
        if is_busy or seat.random.random() < 0.8:
            shift += DAYS
        seat.say("tidies", what=what, days=shift > 0)
        keep = seat.random.choice((None, 1))
        if what == "gc":
            _tried(seat, partial(upkeep.collect, seat.root, apply=True, grace_seconds=0, keep=keep))
        else:
            _tried(seat, partial(upkeep.compact, seat.root))


def read(seat: Seat) -> None:
    """Read the data set as it is, as it was, and the values that it names."""
    with closing(_tried(seat, lambda: cs.open(seat.root, verify="always"))) as store:
        seen: list[int] = []
        for _step in range(seat.random.randint(3, 6)):
            earlier = seat.random.choice(seen) if seen and seat.random.random() < 0.3 else None
            seat.say("reads", earlier=earlier)
            try:
                rows = store.dataset(NAME, earlier)
            except cs.CacheStoreError as error:
                seat.say("unread", text=f"{type(error).__name__}: {error}", is_absent=isinstance(error, BadInput))
                continue
            seat.say("read", n=rows.generation, rows=listed(rows))
            seen.append(rows.generation)
            if earlier is None and (wrong := wrong_values(store, rows)):
                seat.say("wrong", text=wrong)


def listed(rows: cs.Rows) -> list[Any]:
    """Rows as they are noted down: sample, keys by part, score."""
    scores = rows.columns.get("score", [0] * len(rows))
    cells = [{part: [str(key) for key in ([keys] if isinstance(keys, bytes) else keys)] for part, keys in rows[s].items()} for s in rows]
    return [[sample, parts, score] for sample, parts, score in zip(rows, cells, scores, strict=True)]


def wrong_values(store: cs.Store, rows: cs.Rows) -> str:
    """What is wrong with the values that rows name, if they are still those of the data set; empty if nothing is."""
    keys = {Key.parse(text) for _sample, parts, _score in listed(rows) for texts in parts.values() for text in texts}
    for key in sorted(keys):
        try:
            value = store.get(key, as_numpy=True)
        except MissingEntry as error:
            if store.dataset(NAME).generation == rows.generation:
                return f"{error}, though the data set names it at {rows.generation}"
            return ""  # it was replaced since, and days passed
        if not jobs.is_right(key, value):
            return f"{key} has another value"
    return ""


# The model


@dataclass(slots=True)
class Operation:
    """A flush or a table, as it was noted down."""

    what: str
    changes: Sequence[Any]
    began: int
    """Where in the log."""
    is_scored: bool = False
    links: list[int] = field(default_factory=list[int])
    """Every number under which an entry of it was linked."""
    number: int = 0
    """What was returned."""
    ended: int = 0


Rows = dict[str, tuple[dict[str, list[str]], int]]


def apply(rows: Rows, operation: Operation) -> Rows:
    """The rows after an operation."""
    after: Rows = {} if operation.what == "table" else {sample: ({**cells}, score) for sample, (cells, score) in rows.items()}
    for sample, parts, score in operation.changes:
        if parts is None:
            after.pop(sample, None)
            continue
        cells, before = after.get(sample, ({}, 0))
        after[sample] = ({**cells, **parts}, score if operation.is_scored else before)
    return after


def as_listed(rows: Rows) -> list[Any]:
    """As `listed`."""
    return [[sample, {part: cells[part] for part in sorted(cells)}, score] for sample, (cells, score) in rows.items()]


def operations_of(notes: Sequence[Note], began: Sequence[Operation] = ()) -> list[Operation]:
    """The operations of a log, after those of the template."""
    found = list(began)
    current: dict[int, Operation] = {}
    for at, note in enumerate(notes):
        match note["e"]:
            case "begin":
                current[note["p"]] = Operation(note["what"], note["changes"], at)
                found.append(current[note["p"]])
            case "scored":
                current[note["p"]].is_scored = True
            case "link" if note["p"] in current and (number := _number_of(note["path"])):
                current[note["p"]].links.append(number)
            case "published":
                current[note["p"]].ended = at
                current[note["p"]].number = _linked_number(current[note["p"]], note["n"])
            case _:
                pass
    return found


def _linked_number(operation: Operation, returned: int) -> int:
    """The number of the entry that was acknowledged. Rows that are laid over others return a generation that has later entries too."""
    linked = [number for number in operation.links if number <= returned]
    return linked[-1] if operation.what == "update" and linked else returned


def _number_of(path: str) -> int:
    folder, _, name = path.rpartition("/")
    stem, _, ending = name.partition(".")
    return int(stem) if folder == f"catalogs/{NAME}" and ending == "changes" and stem.isdigit() else 0


def wrong_states(operations: Sequence[Operation], reads: Sequence[tuple[int, Any]]) -> list[str]:
    """Which read states, (number, rows), no order of the operations explains. Those that were not acknowledged may count or not."""
    sure = [(each.number, each) for each in operations if each.number]
    doubtful = [(n, each) for each in operations for n in each.links if n != each.number]
    if len({n for n, _each in sure}) < len(sure):
        return [f"a number was returned twice: {sorted(n for n, _each in sure)}"]
    doubtful = doubtful[-_MOST_DOUBTFUL:]
    fewest: list[str] | None = None
    for chosen in product((True, False), repeat=len(doubtful)):
        entries = sorted([*sure, *(each for each, counts in zip(doubtful, chosen, strict=True) if counts)], key=lambda entry: entry[0])
        if len({n for n, _each in entries}) < len(entries):
            continue
        wrong = [f"at {n} it is {rows}, not {model}" for n, rows in reads if (model := _state(entries, n)) != rows]
        if fewest is None or len(wrong) < len(fewest):
            fewest = wrong
        if not wrong:
            return []
    return fewest or []


def _state(entries: Sequence[tuple[int, Operation]], number: int) -> list[Any]:
    rows: Rows = {}
    for n, each in entries:
        if n <= number:
            rows = apply(rows, each)
    return as_listed(rows)


def wrong_order(operations: Sequence[Operation], notes: Sequence[Note]) -> list[str]:
    """Where a number does not follow the order of calls: of publishing, or of a read that began when something was acknowledged."""
    found: list[str] = []
    done = sorted((each.ended, each) for each in operations if each.number and each.ended)
    for each in operations:
        before = max((other.number for ended, other in done if ended < each.began), default=0)
        if each.number and before >= each.number:
            found.append(f"{each.number} was returned after {before}")
        if each.number and each.ended and each.number not in each.links:
            found.append(f"{each.number} was returned, though {each.links} were linked")
    began = 0
    for at, note in enumerate(notes):
        if note["e"] == "reads":
            began = at
        if note["e"] in {"read", "unread"} and notes[began]["earlier"] is None:
            before = max((other.number for ended, other in done if ended < began), default=0)
            if before > note.get("n", 0 if note.get("is_absent") else before):
                found.append(f"{note.get('n', 'nothing')} was read after {before} was returned: {note.get('text', '')}")
    return found


def wrong_refusals(played: Played, round_: Round) -> list[str]:
    """Refusals for which nothing was the reason: neither a strike nor days that passed, nor that somebody else's value is gone."""
    found: list[str] = []
    days, puts, read_at = -1, dict[int, int](), dict[int, int]()
    first_read: dict[int, int] = {}
    for at, note in enumerate(played.notes):
        is_struck = bool(played.struck) and round_.blow is not None and note["p"] == round_.blow.player
        match note["e"]:
            case "tidies" if note["days"]:
                days = at
            case "begin":
                puts[note["p"]] = -1
            case "puts":
                puts[note["p"]] = at
            case "reads":
                read_at[note["p"]] = note["earlier"] or 0
            case "read":
                first_read.setdefault(note["n"], at)
            case "refused" if not is_struck and note["p"] < round_.writers:
                if puts.get(note["p"], -1) >= 0 > days or ("is_absent" not in note and days < 0):
                    found.append(f"refused for nothing: {note['text']}")
            case "refused" if not is_struck:
                found.append(f"tidying was refused: {note['text']}")
            case "unread" if not is_struck and not note["is_absent"] and days < first_read.get(read_at[note["p"]], at):
                found.append(f"not read: {note['text']}")
            case "wrong" if not is_struck:
                found.append(note["text"])
            case _:
                pass
    return found


# Points


def prepare(template: str, root: Path) -> list[Operation]:
    """Make a store, and say what was published in it."""
    random, operations = Random(f"publish {template}"), list[Operation]()
    create_store(root)
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            for key in BASE:
                writer.put(key, jobs.value_of(key))
        if template == "worn":
            with store.session(NAME) as session:
                for key in OWN:
                    session.put(key, jobs.value_of(key))
                    session.set("worn", x=key)
                    operations.append(Operation("flush", [("worn", {"x": [str(key)]}, 0)], -1, False, [number := session.flush()], number))
                session.set("worn", x=BASE[0])
                operations.append(Operation("flush", [("worn", {"x": [str(BASE[0])]}, 0)], -1, False, [number := session.flush()], number))
        for _session in range({"new": 0, "short": 1, "long": 4, "worn": 0}[template]):
            with store.session(NAME) as session:
                for _flush in range(2):
                    changes = _changes(random, "flush")
                    for key in _keys_of(changes):
                        if key in OWN:
                            session.put(key, jobs.value_of(key))
                    for sample, parts, _score in changes:
                        session.remove(sample) if parts is None else session.set(sample, **parts)
                    number = session.flush()
                    operations.append(Operation("flush", changes, -1, False, [number], number))
        store.commit()
    return operations


def judge(one: Round, *, templates: Mapping[str, tuple[Path, Sequence[Operation]]], folder: Path, counts: Path) -> list[str]:
    """Play a round, and say what did not hold."""
    hurry()
    root = folder / secrets.token_hex(8)
    template, before = templates[one.template]
    shutil.copytree(template, root)
    try:
        is_worn = one.template == "worn"
        writers = [partial(write, is_sure=is_worn and not number) for number in range(one.writers)]
        played = play([*writers, partial(tidy, is_busy=is_worn), read], root, one.seed, one.blow, one.sleep)
        if played.struck:
            with counts.open("a") as file:
                file.write("kill\n" if one.blow and one.blow.strike.kill else "error\n")
        if played.violations:
            return [*played.violations, *([f"struck was {played.struck}"] if played.struck else [])]
        operations = operations_of(played.notes, before)
        found = [*wrong_order(operations, played.notes), *wrong_refusals(played, one)]
        reads = [(note["n"], note["rows"]) for note in played.notes if note["e"] == "read"]
        found += wrong_afterwards(root, operations, reads)
        return [*found, f"struck was {played.struck or 'nothing'}"] if found else []
    finally:
        for path in folder.glob(f"{root.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def wrong_afterwards(root: Path, operations: Sequence[Operation], reads: list[tuple[int, Any]]) -> list[str]:
    """What is wrong with a store as it was left, with what one more session makes of it, and with what is there after `gc` days later."""
    found: list[str] = []
    now = time.time
    try:
        with cs.open(root, mode="a", verify="always") as store:
            for step in range(2):
                if step or any(each.links for each in operations):
                    rows = store.dataset(NAME)
                    reads.append((rows.generation, listed(rows)))
                    found += filter(None, [wrong_values(store, rows)])
                if not step:
                    last = Operation("flush", [("last", {"x": [str(OWN[0])]}, 0)], 0)
                    with store.session(NAME) as session:
                        session.put(OWN[0], jobs.value_of(OWN[0]))
                        session.set("last", x=OWN[0])
                        last.number = session.flush()
                    operations = [*operations, last]
                    for days in (1, 2):
                        time.time = lambda days=days: now() + days * DAYS
                        upkeep.collect(root, apply=True, grace_seconds=0, keep=1)
                    time.time = now
                    store.refresh()
    except cs.CacheStoreError as error:
        found.append(f"afterwards: {type(error).__name__}: {error}")
    finally:
        time.time = now
    if kinds := {finding.kind for finding in cs.verify(root).findings} - HARMLESS:
        found.append(f"verify finds {sorted(kinds)}")
    return [*found, *wrong_states(operations, reads)]


def play_rounds(number: int, seed: int) -> Outcome:
    """Play so many rounds."""
    with scratch() as folder:
        templates: dict[str, tuple[Path, Sequence[Operation]]] = {}
        for name in TEMPLATES:
            templates[name] = folder / name, prepare(name, folder / name)
        counts = folder / "counts"
        counts.touch()
        judging = partial(judge, templates=templates, folder=folder, counts=counts)
        with closing(judged(islice(rounds(seed), number), judging, each=EACH)) as results:
            found = list(results)
        struck = counts.read_text().split()
    return outcome_of(found, remarks=[f"killed {struck.count('kill')}, refused a call {struck.count('error')}"])


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"publish": Campaign(play_rounds, POINTS)}
