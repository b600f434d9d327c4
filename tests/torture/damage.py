"""Damage to every file of a store: bits flipped, cut, grown, zeroed, swapped, renamed, deleted, replaced by links, fifos and folders.

After each damage every read is what was stored or an error of ours, every command says what it has to say and ends, `verify` tells of
each changed byte under a checksum, and `repair` brings a store in which verify is ok but for values whose every copy was damaged. What
lies outside of the store is never touched.
"""

import contextlib
import io
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.cli import main, printable
from cachestore.core.errors import CacheStoreError, CorruptEntry, FormatError, MissingEntry, ReadFailed
from cachestore.files.checksum import digest_file
from cachestore.files.paths import (
    Layout,
    parse_attempt,
    parse_block,
    parse_catalog,
    parse_claim,
    parse_dropped,
    parse_entry,
    parse_index,
    parse_ledger,
    parse_listed,
    parse_listing,
    parse_lost,
    parse_marked,
    parse_recipe,
    parse_round,
    parse_segment,
    parse_worker,
    parse_worker_lock,
)
from cachestore.store.format.findings import HARMLESS
from cachestore.store.format.line import list_line
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import Rows, read_data_set
from cachestore.store.read.snapshot import list_segments
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch, timed
from tests.torture.template import PUBLISHED, Template, build_template, fake_encoders, pairing_of, pictures, plain, precompute

KINDS: Final[Mapping[str, Callable[[str], bool]]] = {
    "marker": lambda path: path == "cachestore.json",
    "segment": lambda path: _is(path, "segments", parse_segment),
    "index": lambda path: _is(path, "index", parse_index),
    "catalog": lambda path: _is(path, "catalogs", parse_catalog),
    "changes": lambda path: _is(path, "catalogs", lambda name: parse_entry(name) or parse_block(name)),
    "dropped": lambda path: _is(path, "catalogs", parse_dropped),
    "listing": lambda path: _is(path, "listings", parse_listing) or _is(path, "listings", parse_listed),
    "recipe": lambda path: _is(path, "recipes", parse_recipe),
    "plan": lambda path: path.endswith("/plan.safetensors"),
    "round": lambda path: "/rounds/" in path and _is(path, "plans", parse_round),
    "claim": lambda path: "/claims/" in path and _is(path, "plans", parse_claim),
    "ledger": lambda path: "/ledgers/" in path and _is(path, "plans", parse_ledger),
    "attempt": lambda path: "/attempts/" in path and _is(path, "plans", parse_attempt),
    "done": lambda path: path.endswith("/done.json"),
    "worker": lambda path: _is(path, "workers", parse_worker),
    "lock": lambda path: _is(path, "workers", parse_worker_lock) or path.startswith("locks/"),
    "digests": lambda path: path.startswith("digests/"),
    "marked": lambda path: _is(path, "marked", parse_marked),
    "lost": lambda path: _is(path, "quarantine", parse_lost),
    "quarantined": lambda path: path.startswith("quarantine/") and not _is(path, "quarantine", parse_lost),
    "temporary": lambda path: path.startswith("tmp/"),
}
CHECKED: Final = frozenset({"segment", "index"})
"""Of these every byte is under a checksum that `verify` looks at, spaces too."""
FOUND: Final = frozenset({*CHECKED, "catalog", "changes", "recipe", "marked", "plan", "lost"})
"""Of these `verify` tells what is not as it was, where it says something else now."""
WAYS: Final = ("flip", "flips", "zero", "noise", "cut", "empty", "grow", "swap", "copy", "rename", "delete")
STRANGE: Final = ("link", "dangling link", "fifo", "folder", "socket")
FOLDERS: Final = ("delete", "link", "fifo", "file")
READ_ONLY: Final = ("status", "verify", "stats", "ls", "show", "why", "gc", "compact", "doctor", "repair", "drop")
SAID: Final = 3
"""So many of the commands look at each damage."""
GOES_ON: Final = 4
"""After every so many damages the whole job is run again."""
EXITS: Final = frozenset({0, 1, 3, 4, 10})


def _is(path: str, folder: str, parse: Callable[[str], object]) -> bool:
    return path.startswith(f"{folder}/") and parse(path.rsplit("/", 1)[-1]) is not None


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage: what is done to which file or folder. The rest follows from the number."""

    kind: str
    path: str
    """Relative to the store."""
    way: str
    number: int


def kind_of(path: str) -> str:
    """Which kind of file a path of the store is. Raises LookupError for none, so that a new kind is not overlooked."""
    for kind, fits in KINDS.items():
        if fits(path):
            return kind
    raise LookupError(f"{path} is of no kind that is damaged")


def files_of(store: Path) -> dict[str, list[str]]:
    """All files of a store by kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        name = str(path.relative_to(store))
        found[kind_of(name)].append(name)
    return found


def choose_damages(template: Template, count: int, seed: int) -> Iterator[Damage]:
    """So many damages: kinds and ways in turn, so that even few have one of each kind; the rest by chance."""
    files = {kind: names for kind, names in files_of(template.store).items() if names}
    folders = sorted(str(path.relative_to(template.store)) for path in template.store.rglob("*") if path.is_dir())
    draw = random.Random(seed)
    kinds = [*files, "folder"]
    for number in range(count):
        kind = kinds[number % len(kinds)] if draw.random() < 0.7 else draw.choice(("segment", "index", "catalog"))
        if kind == "folder":
            yield Damage(kind, draw.choice(folders), draw.choice(FOLDERS), number)
        else:
            yield Damage(kind, draw.choice(files[kind]), draw.choice(WAYS if draw.random() < 0.75 else STRANGE), number)


def others_of(store: Path, kind: str, path: str) -> list[Path]:
    """The other files of a kind."""
    return [store / name for name in files_of(store)[kind] if name != path]


def strike(store: Path, damage: Damage, outside: Path) -> None:
    """Do it, as a failing disk, a careless copy or a hostile neighbour would: in place, by no call of ours."""
    draw = random.Random(f"{damage.number} {damage.path}")
    path = store / damage.path
    if path.is_dir():
        _strike_folder(path, damage.way, outside)
    elif damage.way in STRANGE:
        _replace(path, damage.way, outside)
    elif damage.way in {"swap", "copy", "rename"}:
        _mistake(store, path, damage, draw)
    elif damage.way == "delete":
        path.unlink()
    else:
        os.chmod(path, 0o644)
        path.write_bytes(changed(path.read_bytes(), damage.way, draw))


def changed(raw: bytes, way: str, draw: random.Random) -> bytes:
    """Bytes after a damage to them."""
    data = bytearray(raw)
    start = draw.randrange(len(data) or 1)
    end = min(len(data), start + draw.choice((1, 16, 64, 512, 4096)))
    if way in {"flip", "flips"}:
        for _time in range(1 if way == "flip" else draw.randint(2, 40)):
            if data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif way == "zero":
        data[start:end] = bytes(end - start)
    elif way == "noise":
        data[start:end] = draw.randbytes(end - start)
    elif way == "cut":
        del data[start:]
    elif way == "empty":
        data.clear()
    else:
        data += draw.choice((bytes, draw.randbytes))(draw.choice((1, 64, 5000)))
    return bytes(data)


def _mistake(store: Path, path: Path, damage: Damage, draw: random.Random) -> None:
    """Two files change places, one is copied over another, or one gets another's name."""
    others = others_of(store, damage.kind, damage.path)
    if damage.way == "rename" or not others:
        path.rename(path.with_name(renamed(path.name, draw)))
        return
    other = draw.choice(others)
    os.chmod(path, 0o644)
    os.chmod(other, 0o644)
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    if damage.way == "swap":
        other.write_bytes(mine)


def renamed(name: str, draw: random.Random) -> str:
    """Another name, which is of our pattern more often than not."""
    if draw.random() < 0.3:
        return draw.choice(("backup of " + name, name + ".1", "\x1b[31m" + name, "x" * 200))
    digits = [at for at, letter in enumerate(name) if letter in "0123456789"]
    if not digits:
        return name + "0"
    at = draw.choice(digits[2:] or digits)
    return name[:at] + draw.choice([d for d in "123456789" if d != name[at]]) + name[at + 1 :]


def _replace(path: Path, way: str, outside: Path) -> None:
    """Something that is no regular file takes the name; a link leads to the same bytes outside."""
    kept = outside / "kept"
    shutil.copy(path, kept)
    path.unlink()
    if way == "link":
        path.symlink_to(kept)
    elif way == "dangling link":
        path.symlink_to(outside / "not there")
    elif way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
        (path / "inside").write_bytes(b"x")
    else:
        make_socket(path)


def make_socket(path: Path) -> None:
    """A name bound from its folder, as socket names are short."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("s")
        os.rename("s", path.name)
    finally:
        os.chdir(before)


def _strike_folder(path: Path, way: str, outside: Path) -> None:
    """A folder goes, or something else takes its name; a link leads to the folder, moved outside."""
    if way == "link":
        shutil.move(path, outside / "moved")
        path.symlink_to(outside / "moved")
        return
    shutil.rmtree(path)
    if way == "fifo":
        os.mkfifo(path)
    elif way == "file":
        path.write_bytes(b"x")


# What must hold


def judge(template: Template, damage: Damage) -> list[str]:
    """Damage a copy of the template and look at everything; what did not hold, in words."""
    with fake_encoders(), scratch() as folder:
        shutil.copytree(template.folder, folder / "copy")
        outside = folder / "outside"
        outside.mkdir()
        (outside / "treasure").write_bytes(b"nobody touches this")
        store = folder / "copy" / "store"
        strike(store, damage, outside)
        before = look_outside(outside)
        survivors = surviving(template, store)
        found = [
            *reads_of(template, store, survivors=frozenset()),
            *pairs_of(template, store),
            *_commands(store, damage),
            *_detected(template, store, damage),
            *_repaired(template, store, damage, survivors),
        ]
        if look_outside(outside) != before:
            found.append("something outside of the store was changed")
        return found


def look_outside(outside: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
        for path in sorted(outside.rglob("*"))
    }


def surviving(template: Template, store: Path) -> frozenset[str]:
    """Keys (hex) with an undamaged copy that can still be found: by its segment's header, or by an index that is whole."""
    has_index = _has_whole_index(template, store)
    layout = Layout(store)
    found: set[str] = set()
    if layout.segments.is_symlink():
        return frozenset()
    for digest in list_segments(layout):
        path = layout.segment(digest)
        if path.is_symlink() or not path.is_file() or any(parent.is_symlink() for parent in (path.parent, path.parent.parent)):
            continue
        found |= _surviving_in(template, path.read_bytes(), digest, has_index=has_index)
    return frozenset(found)


def _has_whole_index(template: Template, store: Path) -> bool:
    newest = max((parse_index(path.name), path) for path in (template.store / "index").iterdir())[1]
    path = store / "index" / newest.name
    is_plain = path.is_file() and not path.is_symlink() and not path.parent.is_symlink()
    return is_plain and digest_file(path) == newest.stem.split("-")[1]


def _surviving_in(template: Template, raw: bytes, digest: str, *, has_index: bool) -> set[str]:
    """Keys whose bytes are whole in a file of this content and name. A file under another's name is told by its header."""
    found: set[str] = set()
    for origin, (start, whole) in template.segments.items():
        has_header = raw[:start] == whole[:start] and len(raw) == len(whole)
        if not (has_header or (has_index and origin == digest and origin in template.covered)):
            continue
        for key, copies in template.copies.items():
            if any(copy.segment == origin and raw[copy.start : copy.end] == whole[copy.start : copy.end] for copy in copies):
                found.add(str(key))
    return found


def reads_of(template: Template, store: Path, *, survivors: frozenset[str]) -> Iterator[str]:
    """Every value is right, or an error of ours; those that survived are right."""
    try:
        with timed(Reader, store) as reader:
            for key, value in template.values.items():
                yield from _read(reader, key, value, must=str(key) in survivors)
    except CacheStoreError as error:
        if survivors:
            yield f"the store does not open after repair: {error}"


def _read(reader: Reader, key, value, *, must: bool) -> Iterator[str]:
    try:
        if plain(timed(reader.get_raw, [key])[0]) != value:
            yield f"a wrong value under {key}"
    except (MissingEntry, CorruptEntry, FormatError, ReadFailed) as error:
        if must:
            yield f"{key} was not lost and cannot be read: {error}"


def pairs_of(template: Template, store: Path) -> Iterator[str]:
    """Every generation that can be read pairs what it always did."""
    layout = Layout(store)
    for name, generation in template.pairings:
        with contextlib.suppress(CacheStoreError, FileNotFoundError):
            if pairing_of(layout, name, generation) != template.pairings[name, generation]:
                yield f"generation {generation} of {name} pairs something else"


def _commands(store: Path, damage: Damage) -> Iterator[str]:
    """Every command that changes nothing ends with a code of ours and hands nothing to the terminal that it would obey."""
    more = {"show": ["1.png"], "why": ["1.png"], "drop": ["train", "--dry-run"], "repair": ["--dry-run"], "compact": ["--dry-run"]}
    before = _names(store)
    for command in random.Random(damage.number).sample(READ_ONLY, SAID):
        code, out = run_command(command, str(store), *more.get(command, []))
        if code not in EXITS:
            yield f"{command} ended with {code}"
        if any(not line.isprintable() for line in out.split("\n")):
            yield f"{command} printed {printable(out)!r}"
    if _names(store) - before - {"tmp"}:
        yield f"looking made {sorted(_names(store) - before)}"


def _names(store: Path) -> set[str]:
    return {str(path.relative_to(store)) for path in store.rglob("*")}


def run_command(*arguments: str) -> tuple[int, str]:
    """A command in this process: its exit code, and what it printed on both streams."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = timed(main, arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue()


def _detected(template: Template, store: Path, damage: Damage) -> Iterator[str]:
    """Verify tells of what is not as it was."""
    if damage.kind not in FOUND or damage.way in {"delete", "rename"} or not _says_something_else(template, store, damage):
        return
    try:
        if timed(verify, store).ok:
            yield "verify says that this is ok"
    except CacheStoreError:
        return


def _says_something_else(template: Template, store: Path, damage: Damage) -> bool:
    """Whether the file is another one now. Where spaces are not under a checksum, its meaning decides."""
    now, before = store / damage.path, template.store / damage.path
    if now.is_symlink() or not now.is_file():
        return True
    if damage.kind in CHECKED:
        return now.read_bytes() != before.read_bytes()
    return now.read_bytes() != before.read_bytes() and not _means_the_same(damage, now, before)


def _means_the_same(damage: Damage, now: Path, before: Path) -> bool:
    from cachestore.files.records import decode_record
    from cachestore.files.table import read_table

    if damage.kind in {"catalog", "changes", "plan"}:
        kind = "catalog" if damage.kind == "changes" and b"cachestore-catalog" in before.read_bytes() else damage.kind
        try:
            one, other = (read_table(path, f"cachestore-{kind}", 1) for path in (now, before))
        except FormatError:
            return False
        return (one.header, one.checksums) == (other.header, other.checksums)
    kind = f"cachestore-{damage.kind}"
    try:
        one, other = (decode_record(kind, 1, path.read_bytes(), where=path) for path in (now, before))
    except FormatError:
        return False
    return one == other


def _repaired(template: Template, store: Path, damage: Damage, survivors: frozenset[str]) -> Iterator[str]:
    """Repair, twice; then run the job again. Nothing that survived is lost, and nothing is wrong but what was lost."""
    if damage.kind == "folder" and damage.way != "delete":
        yield from _refused(template, store)
        return
    try:
        foretold = timed(repair, store, dry_run=True)
        done = timed(repair, store)
        left = [finding for finding in timed(verify, store).findings if finding.kind not in HARMLESS]
    except CacheStoreError as error:
        yield f"repair: {error}"
        return
    if "cachestore.json" not in foretold.rebuilt and foretold.missing != done.missing:
        yield f"{foretold.missing} were to be missing, and {done.missing} are"
    for finding in left:
        if finding.kind != "missing-entry" or finding.key in survivors:
            yield f"after repair: {finding.kind}: {finding.message}"
    yield from reads_of(template, store, survivors=survivors)
    yield from pairs_of(template, store)
    yield from _rows_left(template, store, damage, done.lost)
    if again := timed(repair, store).quarantined:
        yield f"repairing again moved {again}"
    if damage.number % GOES_ON == 0:
        yield from _goes_on(template, store, damage, survivors)


def _rows_left(template: Template, store: Path, damage: Damage, lost: Sequence[str]) -> Iterator[str]:
    """What a session published is as it was, unless repair says what is lost, or the last entry is gone, which leaves no trace."""
    entries = list_line(Layout(template.store), PUBLISHED).entries
    is_last = damage.path.endswith(f"/{entries[-1]}.changes") and damage.way in {"delete", "rename"}
    if lost or is_last or damage.kind == "folder":
        return
    before, now = ({one: rows[one] for one in rows} for rows in (read_rows(template.store), read_rows(store)))
    if before != now:
        yield f"rows of {PUBLISHED} are {now}, and were {before}"


def read_rows(store: Path) -> Rows:
    """What a session published."""
    return Rows.of(read_data_set(Layout(store), PUBLISHED))


def _refused(template: Template, store: Path) -> Iterator[str]:
    """Where something stands in a folder's place, repair and the job say so and touch nothing behind it; or do what can be done."""
    for action in (partial(repair, store), partial(precompute, store.parent, store.parent / "data", "train")):
        with contextlib.suppress(CacheStoreError):
            timed(action)
    yield from reads_of(template, store, survivors=frozenset())
    yield from pairs_of(template, store)


def _goes_on(template: Template, store: Path, damage: Damage, survivors: frozenset[str]) -> Iterator[str]:
    """The same command finishes, and every data set is whole again."""
    folder = store.parent
    for name, data in (("train", folder / "data"), ("other", folder / "other"), ("roles", folder / "roles" / "rows.jsonl")):
        try:
            timed(precompute, folder, data, name)
        except CacheStoreError as error:
            yield f"precompute again: {error}"
            return
    if damage.kind not in {
        "lock",
        "worker",
        "folder",
    }:  # of a holder without heartbeat or lock nobody knows that it is dead before it is silent
        timed(precompute, folder, pictures(folder / "half", 1, 2, 3), "half")
    made = (rows for (name, _generation), rows in template.pairings.items() if name != PUBLISHED)  # what a program put it puts again
    needed = {key for rows in made for _sample, keys in rows for key in keys}
    for finding in timed(verify, store).findings:
        if finding.kind not in HARMLESS and (finding.kind != "missing-entry" or finding.key in survivors or finding.key in needed):
            yield f"after precompute: {finding.kind}: {finding.message}"
    yield from reads_of(template, store, survivors=survivors | needed)


def play(count: int, seed: int) -> Outcome:
    """So many damages to copies of one template."""
    with fake_encoders(), scratch() as folder:
        template = build_template(folder)
        for _time in _commands(template.store, Damage("", "", "", 0)):  # imports what all judges need
            pass
        damages = list(choose_damages(template, count, seed))
        counts = Counter(damage.kind for damage in damages)
        results = judged(damages, partial(judge, template))
        return outcome_of(results, remarks=[", ".join(f"{kind} {number}" for kind, number in sorted(counts.items()))])


CAMPAIGNS: Final = {"damage": Campaign(play, 10_000)}
