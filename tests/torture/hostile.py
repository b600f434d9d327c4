"""What a stranger may put into a store, against every command: each thing, in place of or beside each kind of file, and of folders.

Links, fifos, sockets, devices and folders in place of files, files that are empty, endless, unreadable or of a newer format, and names of
others, some of which speak to terminals. Whatever is there, a command ends with a code that the documentation names, in time and without
a traceback, prints nothing that a terminal would obey, removes nothing that is not ours, and leaves readable what the thing has not hit.
"""

import contextlib
import json
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from cachestore.cli import printable
from cachestore.files.checksum import digest_of
from cachestore.files.container import build_header, parse_header
from cachestore.files.records import encode_record
from cachestore.files.table import encode_table
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.damage import KINDS, files_of, look_outside, make_socket, pairs_of, reads_of, run_command
from tests.torture.template import Template, build_template, fake_encoders, pictures

ESCAPE: Final = "\x1b]0;red\x07\x1b[31m\u202e"
NEWER: Final = 99
ENDLESS_BYTES: Final = 1 << 40
NOBODY: Final = 65_534
EXITS: Final = frozenset({0, 1, 3, 4, 10})
"""Of `docs/exit-codes.md`, without those of a wrong command line and of signals."""
UNVERSIONED: Final = frozenset({"index", "attempt", "dropped", "listing", "lock", "quarantined", "temporary"})
"""Kinds whose files say no format: they are derived, names alone, or nobody's."""
FOLDER: Final = "folder"
"""The kind of all folders of a store."""
BESIDE: Final = frozenset({"stranger", "escape"})
"""Things that stand beside a file, which stays as it is."""
HARMLESS: Final = frozenset({*BESIDE, "mode"})
"""Things after which every command ends as if they were not there."""


@dataclass(frozen=True, slots=True)
class Point:
    """One thing, where one kind of file is, before one command."""

    thing: str
    kind: str
    command: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Normal:
    """A store without strangers, and the code with which each command ends there."""

    template: Template
    codes: Mapping[str, int]
    files: Mapping[str, list[str]]


COMMANDS: Final[Mapping[str, list[str]]] = {
    "verify": ["verify", "STORE"],
    "verify quick": ["verify", "STORE", "--quick"],
    "repair": ["repair", "STORE"],
    "repair dry": ["repair", "STORE", "--dry-run"],
    "gc": ["gc", "STORE", "--apply"],
    "compact": ["compact", "STORE"],
    "stats": ["stats", "STORE"],
    "ls": ["ls", "STORE"],
    "show": ["show", "STORE", "1.png"],
    "status": ["status", "STORE"],
    "why": ["why", "STORE", "1.png"],
    "precompute": ["precompute", "DATA", "--model", "model", "--store", "STORE", "--name", "NAME"],
    "doctor": ["doctor", "STORE"],
    "report": ["report", "STORE", "-o", "OUT/page.html"],
    "export": ["export", "STORE", "train", "--format", "sd-scripts", "-o", "OUT/cache"],
    "read": [],
}


# Things


def _take_away(path: Path, outside: Path) -> Path:
    """Move a file or folder out of the store; returns where to."""
    return path.rename(outside / "kept")


def _link(path: Path, outside: Path) -> None:
    path.symlink_to(_take_away(path, outside))


def _dangling_link(path: Path, outside: Path) -> None:
    _take_away(path, outside)
    path.symlink_to(outside / "not there")


def _fifo(path: Path, outside: Path) -> None:
    _take_away(path, outside)
    os.mkfifo(path)


def _socket(path: Path, outside: Path) -> None:
    _take_away(path, outside)
    make_socket(path)


def _device(path: Path, outside: Path) -> None:
    """As /dev/zero, which never ends."""
    _take_away(path, outside)
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def _folder(path: Path, outside: Path) -> None:
    _take_away(path, outside)
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def _unreadable(path: Path, outside: Path) -> None:
    path.chmod(0)


def _endless(path: Path, outside: Path) -> None:
    """Grown by zeros that take no room."""
    path.chmod(0o644)
    os.truncate(path, ENDLESS_BYTES)


def _empty(path: Path, outside: Path) -> None:
    """An empty file; of a file, the same one without its bytes."""
    if path.is_dir():
        _take_away(path, outside)
        path.touch()
        return
    path.chmod(0o644)
    os.truncate(path, 0)


def _stranger(path: Path, outside: Path) -> None:
    path.with_name(f"copy of {path.name}").write_bytes(b"somebody's")


def _escape(path: Path, outside: Path) -> None:
    path.with_name(f"{ESCAPE}{path.name}").write_bytes(b"somebody's")


def _newer(path: Path, outside: Path) -> None:
    """The same, as a version to come may write it; a segment, whose name follows from its bytes, stands beside the old one."""
    raw = newer(path.read_bytes())
    if path.parent.parent.name == "segments":
        digest = digest_of([raw])
        path = path.parent.with_name(digest[:2]) / f"{digest}.safetensors"
        path.parent.mkdir(exist_ok=True)
    else:
        path.chmod(0o644)
    path.write_bytes(raw)


def newer(raw: bytes) -> bytes:
    """A file of ours in a format to come, under checksums that are right."""
    if raw[:1] == b"{":
        record = json.loads(raw)
        return encode_record(record["format"].partition("/")[0], NEWER, record["body"])
    header = parse_header(raw[8 : 8 + int.from_bytes(raw[:8], "little")], len(raw), where=Path("a file"))
    kind, data = header.metadata["format"].partition("/")[0], raw[header.data_start :]
    if "checksums" in header.metadata:
        columns = {name: (info.dtype, info.shape, data[info.start : info.end]) for name, info in header.tensors.items()}
        return b"".join(map(bytes, encode_table(kind, NEWER, json.loads(header.metadata["header"]), columns)))
    return build_header(header.tensors, {**header.metadata, "format": f"{kind}/{NEWER}"}) + data


def _mode(path: Path, outside: Path) -> None:
    path.chmod(0o6777)


THINGS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "link": _link,
    "dangling link": _dangling_link,
    "fifo": _fifo,
    "socket": _socket,
    "device": _device,
    "folder": _folder,
    "unreadable": _unreadable,
    "endless": _endless,
    "empty": _empty,
    "stranger": _stranger,
    "escape": _escape,
    "newer": _newer,
    "mode": _mode,
}


def points(*, has_devices: bool) -> list[Point]:
    """The whole table. A kind that says no format has no newer one, and a folder does not grow."""
    things = [thing for thing in THINGS if thing != "device" or has_devices]
    table = [Point(*each) for each in product(things, (*KINDS, FOLDER), COMMANDS)]
    nonsense = {*(("newer", kind) for kind in (*UNVERSIONED, FOLDER)), ("endless", FOLDER)}
    return [point for point in table if (point.thing, point.kind) not in nonsense]


def can_make_devices(folder: Path) -> bool:
    """Whether this user may, here."""
    try:
        os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        (folder / "device").unlink()
    except OSError:
        return False
    return True


# What must hold


def judge(normal: Normal, point: Point) -> list[str]:
    """Put the thing into a copy of the template, run the command, and look at what it said and left."""
    with fake_encoders(), scratch() as folder:
        copy, outside = folder / "copy", folder / "outside"
        shutil.copytree(normal.template.folder, copy)
        for made in (outside, folder / "out"):
            made.mkdir()
        path = copy / "store" / random.Random(repr(point)).choice(normal.files[point.kind])
        before = _identities(copy / "store")
        THINGS[point.thing](path, outside)
        put = _identities(copy / "store") - before or {(path.lstat().st_dev, path.lstat().st_ino)}
        content = look_outside(outside)
        with _as_somebody(folder, path) if point.thing == "unreadable" else contextlib.nullcontext():
            found = [*_commanded(normal, point, folder, path), *_left(normal, point, folder, path, put)]
        if content != look_outside(outside):
            found.append("something outside of the store was changed")
        return found


@contextmanager
def _as_somebody(folder: Path, path: Path) -> Generator[None]:
    """For the block, a superuser is somebody who owns all of this but that file: nothing is unreadable to a superuser."""
    if os.geteuid() != 0:
        yield
        return
    for each in (folder, *folder.rglob("*")):
        if each != path:
            os.chown(each, NOBODY, NOBODY, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _identities(store: Path) -> set[tuple[int, int]]:
    """(device, inode) of all that bears a name in a store."""
    found: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(store):
        for name in (*files, *folders):
            status = os.lstat(os.path.join(folder, name))
            found.add((status.st_dev, status.st_ino))
    return found


def arguments_of(point: Point, folder: Path) -> list[str]:
    """A command's arguments; every other one asks for JSON."""
    # Of a holder without a heartbeat or a lock nobody knows that it is dead before it has been silent for minutes.
    resumed = "train" if point.kind in {"lock", "worker"} else "half"
    data = folder / "copy" / ("data" if resumed == "train" else resumed)
    names = {"STORE": str(folder / "copy" / "store"), "DATA": str(data), "NAME": resumed}
    given = [names.get(word, word.replace("OUT", str(folder / "out"))) for word in COMMANDS[point.command]]
    return [*given, "--json"] if point.number % 2 else given


def _commanded(normal: Normal, point: Point, folder: Path, path: Path) -> Iterator[str]:
    """The command ends with a code of ours, one sentence where it is an error, and nothing that a terminal would obey."""
    if point.command == "read":
        return
    code, out = _run(point, folder)
    if code not in EXITS or (point.thing in HARMLESS and code != normal.codes[point.command]):
        yield f"it ended with {code}, and with {normal.codes[point.command]} without the stranger: {out[-200:]!r}"
    if "Traceback" in out or (code in {1, 10} and point.command != "doctor" and "cachestore: " not in out):
        yield f"it ended with {code} and said {out[-500:]!r}"
    if any(not line.isprintable() for line in out.split("\n")):
        yield f"it printed {printable(out)!r}"
    page = folder / "out" / "page.html"
    if page.exists() and not {"\x1b", "\x07"}.isdisjoint(page.read_text()):
        yield "the page speaks to terminals"
    if point.command == "repair" and code in {0, 4} and point.kind != FOLDER:
        yield from _reads(normal, point, folder, path)


def _run(point: Point, folder: Path) -> tuple[int, str]:
    """A command's exit code, and what it printed."""
    if point.command == "precompute":
        pictures(folder / "copy" / "data", 8)
        pictures(folder / "copy" / "half", 1, 2, 3)
    return run_command(*arguments_of(point, folder))


def _left(normal: Normal, point: Point, folder: Path, path: Path, put: set[tuple[int, int]]) -> Iterator[str]:
    """What was put there is still there, if elsewhere; what is newer is where it was. Whatever it has not hit is read right."""
    store = folder / "copy" / "store"
    if not put <= _identities(store):
        yield "what was put there is gone"
    if point.thing == "newer" and point.kind != "segment" and newer(_original(normal, store, path)) != path.read_bytes():
        yield "what is newer was changed"
    if point.thing in HARMLESS or point.kind not in {"marker", FOLDER}:
        yield from _reads(normal, point, folder, path)
    yield from pairs_of(normal.template, store)


def _original(normal: Normal, store: Path, path: Path) -> bytes:
    return (normal.template.store / path.relative_to(store)).read_bytes()


def _reads(normal: Normal, point: Point, folder: Path, path: Path) -> Iterator[str]:
    """Every value is right or an error of ours, and those with a copy in a segment that was not hit are right."""
    hit = path.stem if point.kind == "segment" and point.thing not in {*HARMLESS, "newer"} else ""
    copies = normal.template.copies.items()
    survivors = frozenset(str(key) for key, locations in copies if any(location.segment != hit for location in locations))
    yield from reads_of(normal.template, folder / "copy" / "store", survivors=survivors)


def look_at_normal(template: Template) -> Normal:
    """What every command ends with where nobody put anything. Run in this process, so that judges need import nothing."""
    folders = sorted(str(path.relative_to(template.store)) for path in template.store.rglob("*") if path.is_dir())
    normal = Normal(template, {}, files_of(template.store) | {FOLDER: folders})
    codes: dict[str, int] = {}
    for number, command in enumerate(COMMANDS):
        with fake_encoders(), scratch() as folder:
            shutil.copytree(template.folder, folder / "copy")
            (folder / "out").mkdir()
            point = Point("nothing", "recipe", command, number)
            codes[command] = _run(point, folder)[0] if command != "read" else 0
    return Normal(template, codes, normal.files)


def chosen(count: int, seed: int, *, has_devices: bool) -> list[Point]:
    """So many points of the table, in an order by the seed."""
    table = points(has_devices=has_devices)
    random.Random(f"hostile {seed}").shuffle(table)
    return [Point(point.thing, point.kind, point.command, number) for number, point in enumerate(table[:count])]


def play(count: int, seed: int) -> Outcome:
    """So many points of the table."""
    with scratch() as folder:
        normal = look_at_normal(build_template(folder))
        some = chosen(count, seed, has_devices=can_make_devices(folder))
        things = ", ".join(f"{thing} {number}" for thing, number in sorted(Counter(point.thing for point in some).items()))
        return outcome_of(judged(some, partial(judge, normal), each=8), remarks=[things])


WHOLE: Final = len(points(has_devices=True))

CAMPAIGNS: Final = {"hostile": Campaign(play, WHOLE)}
