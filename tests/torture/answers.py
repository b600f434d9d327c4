"""Every answer of an object server is wrong once, every file of the local cache is damaged, and its disk is full at every size.

A point lets one command meet one fault. Required: it ends in time, with the right tensors and files, or with an error of ours; what that
says to do is then done, and helps. No error of a fault on the way may say that the object itself is damaged.
"""

import gc
import json
import logging
import os
import pickle
import secrets
import shutil
import subprocess
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final

from cachestore.core.errors import CacheStoreError, RemoteFailed, WriteFailed
from cachestore.files.paths import Layout
from cachestore.remote import downloads
from cachestore.remote.address import parse_address
from cachestore.remote.client import Client, ClientLimits
from cachestore.remote.listing import list_client
from cachestore.remote.pull import pull_from
from cachestore.remote.push import push_to
from cachestore.store.write.commit import publish_recipe
from tests.remote.copies import files_of, request, wrong_in
from tests.remote.server import Server, served
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch, timed

POINTS: Final = 2_000
ADDRESS: Final = "s3://bucket/cache"
LIMITS: Final = ClientLimits(request_seconds=1.0, retry_seconds=6.0)
_SETTINGS: Final = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_EACH: Final = 25
_GENERATION: Final = 3
_PAGE: Final = 4096
_DISK_BYTES: Final = 90 * _PAGE
"""More than the cache of the store takes."""
_GOLDEN: Final = 0.618
_NAMES: Final = 40
"""More files and folders than that cache has."""

Changed = tuple[int, bytes, dict[str, Any]]


# Wrong answers


def _flipped(chance: Random, _path: str, _server: Server, right: Changed) -> Changed:
    status, body, headers = right
    if not body:
        return right
    at = chance.randrange(len(body))
    return status, body[:at] + bytes([body[at] ^ 1 << chance.randrange(8)]) + body[at + 1 :], headers


def _short(chance: Random, _path: str, _server: Server, right: Changed) -> Changed:
    status, body, headers = right
    some = body[: chance.randrange(len(body))] if body else b""
    return status, some, {**headers, "Content-Length": len(some)}


def _other(chance: Random, path: str, server: Server, right: Changed) -> Changed:
    """What another object holds, as much of it as was asked for; of a listing, another folder's."""
    status, body, headers = right
    if "list-type" in path:
        return status, body.replace(b"cache/", b"cash/"), {**headers}
    others = sorted(key for key in server.objects if key not in path)
    data = server.objects[chance.choice(others)] if others else b""
    some = data[: len(body)] if status == 206 else data
    where = {"Content-Range": f"bytes 0-{max(len(some) - 1, 0)}/{len(data)}"} if status == 206 else {}
    return status, some, {**headers, **where, "Content-Length": len(some)}


def _old(chance: Random, path: str, _server: Server, right: Changed) -> Changed:
    """A listing as it was before some objects were made; another answer as if the object was not there."""
    status, body, headers = right
    if "list-type" not in path:
        return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
    parts = body.split(b"<Contents>")
    kept = [part for part in parts[1:-1] if chance.random() < 0.5]
    return status, b"<Contents>".join([parts[0], *kept]) + (b"" if len(parts) == 1 else b"</ListBucketResult>"), {**headers}


def _elsewhere(_chance: Random, _path: str, _server: Server, _right: Changed) -> Changed:
    return 307, b"", {"Location": "/bucket/elsewhere"}


def _range(_chance: Random, _path: str, _server: Server, right: Changed) -> Changed:
    status, body, headers = right
    return status, body, {**headers, "Content-Range": "bytes 7-19/20"}


def _whole(_chance: Random, path: str, server: Server, right: Changed) -> Changed:
    """The server does not know of ranges."""
    status, body, headers = right
    data = next((data for key, data in server.objects.items() if status == 206 and path.endswith(key)), body)
    return 200, data, {name: value for name, value in headers.items() if name != "Content-Range"} | {"Content-Length": len(data)}


def _empty(_chance: Random, _path: str, _server: Server, right: Changed) -> Changed:
    return right[0], b"", {**right[2], "Content-Length": 0}


_CHANGES: Final = {
    "flipped": _flipped,
    "flipped again": _flipped,
    "short": _short,
    "other": _other,
    "old": _old,
    "elsewhere": _elsewhere,
    "range": _range,
    "whole": _whole,
    "empty": _empty,
}
_FAULTS: Final[tuple[str, ...]] = (*_CHANGES, "cut", "reset", "stall", "lost", "301", "403", "404", "409", "429", "500", "503")
_REFUSED: Final = {"301", "403", "elsewhere"}
"""What is reported at once."""
_PUT_ONLY: Final = {"lost"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A command of which the request with this number, counted from 0, gets a wrong answer."""

    command: str
    number: int
    fault: str
    seed: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A file or folder of the local cache, by its number in order, that is damaged; `at` is where, of 0 to 1."""

    number: int
    damage: str
    at: float
    is_handed_over: bool
    """Whether an open data set is then copied into another process, instead of being opened anew."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk for the local cache of so many bytes or files, full from the second opening on."""

    size: int
    files: int
    is_read_only: bool


Point = Answer | Copy | Disk


# What is judged


@dataclass(slots=True)
class _World:
    """The server of a judge, and what must come."""

    origin: Path
    folder: Path
    server: Server
    objects: Mapping[str, bytes]
    own: list[dict[str, Any]]
    held: list[object] = field(default_factory=list[object])

    def client(self) -> Client:
        return Client(parse_address("address", ADDRESS), limits=LIMITS)

    def new_folder(self) -> Path:
        path = self.folder / secrets.token_hex(8)
        path.mkdir()
        return path

    def opened(self, local: Path, limit: int | str = "1GB") -> Any:
        import cachestore as cs

        return cs.CachedDataset(ADDRESS, generation=_GENERATION, local=local, limit=limit)

    def is_right(self, data: Any) -> bool:
        """Whether every tensor of an epoch is the one of the folder."""
        rows = range(len(self.own))
        found: list[dict[str, Any]] = []
        for start in rows[::4]:
            data.prefetch(rows[start + 4 : start + 8])
            found += data.__getitems__(rows[start : start + 4])
        return len(data) == len(self.own) and all(map(_equal, found, self.own))


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name] for name, value in one.items()
    )


def _make_origin(root: Path) -> None:
    """A store of three generations: two segments are in its index, one is not."""
    from cachestore.store.write.writer import open_store
    from tests.fakes import publish_catalog
    from tests.train.stores import Row, catalog_of, make_store, picture_key, recipes, stored_latents

    made = recipes()
    rows = [Row(f"{n}.png", (f"caption {n % 4}",), bucket=(128, 96)) for n in range(10)]
    for count in (4, 7):
        make_store(root, rows[:count], made)
    with open_store(root, mode="a") as store:
        for recipe in (made.text, made.latents):
            publish_recipe(store.layout, recipe)
        with store.writer() as writer:
            for row in rows[7:]:
                writer.put(picture_key(made.latents, row.id), stored_latents(made.latents, row.id, (128, 96)))
        publish_catalog(store.layout, catalog_of(rows, made, "train"))


_worlds: Final[dict[Path, _World]] = {}


def _world(origin: Path, folder: Path) -> _World:
    """The one of this process. Its server ends with the process."""
    if origin not in _worlds:
        import torch

        import cachestore as cs

        torch.set_num_threads(1)
        logging.getLogger("cachestore").setLevel(logging.ERROR)  # it warns of limits
        serving = ExitStack()
        server, url = serving.enter_context(served())
        os.environ.update({**_SETTINGS, "AWS_ENDPOINT_URL": url})
        downloads._LIMITS = LIMITS  # pyright: ignore[reportAttributeAccessIssue]
        for path in origin.rglob("*"):
            if path.is_file() and path.relative_to(origin).parts[0] in {"cachestore.json", "segments", "index", "catalogs", "recipes"}:
                server.objects[f"cache/{path.relative_to(origin).as_posix()}"] = path.read_bytes()
        own = cs.CachedDataset(origin, generation=_GENERATION)
        world = _worlds[origin] = _World(origin, folder, server, dict(server.objects), own.__getitems__(range(len(own))))
        world.held += [serving, world.opened(world.new_folder())]  # the server; and a data set, so that the helper stays
    world = _worlds[origin]
    world.server.objects.clear()
    world.server.objects.update(world.objects)
    world.server.faults.clear()
    return world


Judged = Generator[Callable[[], bool]]
"""A command that is ready: calling it says whether its result is right."""


@contextmanager
def _open(world: _World, limit: int | str = "1GB") -> Judged:
    local = world.new_folder()
    yield lambda: len(world.opened(local, limit)) == len(world.own)


@contextmanager
def _open_again(world: _World) -> Judged:
    local = world.new_folder()
    world.opened(local)
    yield lambda: world.is_right(world.opened(local))


@contextmanager
def _epoch(world: _World, limit: int | str = "1GB") -> Judged:
    data = world.opened(world.new_folder(), limit)
    yield lambda: world.is_right(data)


@contextmanager
def _ls(world: _World) -> Judged:
    right = list_client(world.client())
    yield lambda: list_client(world.client()) == right


@contextmanager
def _pull(world: _World, name: str | None = None, generation: int | None = None) -> Judged:
    store = world.new_folder() / "pulled"

    def pull() -> bool:
        pull_from(world.client(), store, request(jobs=1, name=name, generation=generation))
        files, right = files_of(store), files_of(world.origin)
        return not wrong_in(store) and (files == right if name is None else f"catalogs/train/{_GENERATION}.safetensors" in files)

    yield pull


@contextmanager
def _push(world: _World, left: int = 0) -> Judged:
    """With `left`, so many of the files that a push makes are there already."""
    world.server.objects.clear()
    world.server.objects.update(dict(sorted(world.objects.items(), reverse=True)[:left]))

    def push() -> bool:
        push_to(world.client(), Layout(world.origin), request(jobs=1))
        there = world.new_folder()
        for key, data in world.server.objects.items():
            path = there / key.removeprefix("cache/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return not wrong_in(there) and files_of(there) == files_of(world.origin)

    yield push


COMMANDS: Final[Mapping[str, Callable[[_World], Any]]] = {
    "open": _open,
    "open again": _open_again,
    "epoch": _epoch,
    "epoch without room": partial(_epoch, limit=0),
    "ls": _ls,
    "pull": _pull,
    "pull one": partial(_pull, name="train", generation=_GENERATION),
    "push": _push,
    "push the rest": partial(_push, left=5),
}
_MAY_BE_OLD: Final = {"ls", "pull"}
"""What was not told a generation may give an older one, if a listing lacks the newest."""


def judge(point: Point, *, origin: Path, folder: Path) -> list[str]:
    """What does not hold at a point."""
    world = _world(origin, folder)
    try:
        match point:
            case Answer():
                return _judge_answer(world, point)
            case Copy():
                return _judge_copy(world, point)
            case Disk():
                return _judge_disk(world, point)
    finally:
        gc.collect()
        for path in folder.glob("*/"):
            if not path.name.startswith("keep"):
                shutil.rmtree(path, ignore_errors=True)


def _judge_answer(world: _World, point: Answer) -> list[str]:
    asked: list[str] = []
    with COMMANDS[point.command](world) as act:
        world.server.faults[:] = [None] * point.number + [_fault_of(world, point, asked)]
        may_be_old = point.command in _MAY_BE_OLD
        found = _met(act, is_old_fine=lambda: may_be_old and "list-type" in "".join(asked), is_refused=point.fault in _REFUSED)
        world.server.faults.clear()
        return found + [f"then: {one}" for one in _met(act)]


def _fault_of(world: _World, point: Answer, asked: list[str]) -> Any:
    """What the server does instead of answering; `asked` gets the path of the request."""
    if point.fault not in _CHANGES:
        return int(point.fault) if point.fault.isdecimal() else point.fault
    chance, change = Random(point.seed), _CHANGES[point.fault]

    def changed(_method: str, path: str, status: int, body: bytes, headers: dict[str, Any]) -> Changed:
        asked.append(path)
        return change(chance, path, world.server, (status, body, headers))

    return changed


def _met(act: Callable[[], bool], *, is_old_fine: Callable[[], bool] = lambda: False, is_refused: bool = False) -> list[str]:
    """What is wrong with how a command ended."""
    try:
        return [] if timed(act) or is_old_fine() else ["the result is wrong"]
    except RemoteFailed as error:
        return [] if is_refused and "remove it" not in str(error) else [f"RemoteFailed: {error}"]
    except CacheStoreError as error:
        return [f"{type(error).__name__}: {error}"]


# The cache


def _things(local: Path) -> list[Path]:
    """Every file and folder of a cache, in an order that does not follow from the store's id."""
    return sorted((path for path in local.rglob("*") if path.parent.name != "tmp"), key=lambda path: path.relative_to(local).parts[::-1])


_DAMAGES: Final = ("empty", "removed", "folder", "full folder", "fifo", "link", "file")
"""Of files and folders."""


def _template(world: _World) -> Path:
    """A cache with everything in it."""
    local = world.folder / f"keep {os.getpid()}"
    if not local.exists():
        assert world.is_right(world.opened(local))
    return local


def _strike(path: Path, damage: str, at: float, others: Sequence[Path]) -> None:
    """Damage a file or folder. A file is replaced by the damaged one, as one that is mapped must not be changed."""
    data = path.read_bytes() if path.is_file() else b""
    other = others[int(at * len(others))].read_bytes()
    position = int(at * len(data))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    match damage:
        case "flipped":
            path.write_bytes(data[:position] + bytes(byte ^ 0x10 for byte in data[position : position + 1]) + data[position + 1 :])
        case "cut":
            path.write_bytes(data[:position])
        case "other":
            path.write_bytes(other)
        case "empty" | "file":
            path.write_bytes(b"")
        case "folder" | "full folder":
            path.mkdir()
            if damage == "full folder":
                (path / "mine.txt").write_text("mine")
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/passwd")
        case _:
            pass


def _judge_copy(world: _World, point: Copy) -> list[str]:
    local = world.new_folder() / "local"
    shutil.copytree(_template(world), local)
    raw = b""
    if point.is_handed_over:
        raw = pickle.dumps(world.opened(local))
        gc.collect()  # its index is closed
    things = _things(local)
    path = things[point.number % len(things)]
    others = [one for one in things if one.is_file() and one != path]
    _strike(path, point.damage, point.at, others)
    found = _met(lambda: world.is_right(pickle.loads(raw) if raw else world.opened(local)))
    found += [f"opened anew: {one}" for one in _met(lambda: world.is_right(world.opened(local)))]
    world.server.requests.clear()
    found += [f"at last: {one}" for one in _met(lambda: world.is_right(world.opened(local)))]
    again = sorted(path for _method, path in world.server.requests if "/index/" in path or ("/segments/" in path and "range" in path))
    found += [f"it was not mended: {again[0]} was downloaded again"] if again else []
    return [f"{path.relative_to(local)}: {one}" for one in found]


# The disk


@contextmanager
def _mounted(where: Path, options: str) -> Generator[bool]:
    """A file system of its own at a path, if this user may mount one."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
    done = shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(where)], check=True)


def may_mount() -> bool:
    """Whether this user may mount a file system."""
    with scratch() as folder, _mounted(folder / "disk", "size=64k") as done:
        return done


def _judge_disk(world: _World, point: Disk) -> list[str]:
    folder = world.new_folder()
    disk, local = folder / "disk", folder / "disk" / "local"
    with _mounted(disk, f"size={max(point.size, 1)},nr_inodes={point.files}") as done:
        assert done, "nothing can be mounted any more"
        found = _on_disk(world, local, folder / "elsewhere")
        with suppress(OSError), (disk / "ballast").open("wb") as file:
            while True:
                file.write(bytes(_PAGE))
                file.flush()
        if point.is_read_only:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        found += [f"once it is full: {one}" for one in _on_disk(world, local, folder / "elsewhere, too")]
        gc.collect()
        return found


def _on_disk(world: _World, local: Path, elsewhere: Path) -> list[str]:
    """Open and read; if it is refused, do what the error says."""
    try:
        return [] if timed(lambda: world.is_right(world.opened(local))) else ["the result is wrong"]
    except WriteFailed as error:
        if "pass another folder as local" not in str(error) or str(local) not in str(error):
            return [f"WriteFailed: {error}"]
        return [f"in another folder: {one}" for one in _met(lambda: world.is_right(world.opened(elsewhere)))]
    except CacheStoreError as error:
        return [f"{type(error).__name__}: {error}"]


# The campaign


def _count_requests(origin: Path, folder: Path) -> tuple[dict[str, int], list[bool]]:
    """How many requests each command sends undisturbed, and of each thing in a cache whether it is a file.

    In a process of its own, as the server has threads.
    """
    log = folder / "counted"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            world, counted = _world(origin, folder), dict[str, int]()
            for name, make in COMMANDS.items():
                _world(origin, folder)
                with make(world) as act:
                    world.server.requests.clear()
                    assert act(), f"{name} does not work undisturbed"
                    counted[name] = len(world.server.requests)
            log.write_text(json.dumps([counted, [path.is_file() for path in _things(_template(world))]]))
            code = 0
        except BaseException:  # noqa: BLE001 - the boundary of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    counted, are_files = json.loads(log.read_text())
    return counted, are_files


def _points(counted: Mapping[str, int], are_files: Sequence[bool], random: Random, *, disks: bool) -> list[list[Point]]:
    kinds: list[list[Point]] = []
    for command in COMMANDS:
        some: list[Point] = [
            Answer(command, number, fault, random.randrange(10**9))
            for number in range(counted[command])
            for fault in _FAULTS
            if command.startswith("push") or fault not in _PUT_ONLY
        ]
        kinds.append(random.sample(some, len(some)))
    files = [number for number, is_file in enumerate(are_files) if is_file]
    for handed_over in (False, True):
        rounds = [(0.7 + turn * _GOLDEN) % 1 for turn in range(24)]  # in each round each file once, at another place
        flips: list[Point] = [Copy(number, "flipped", at, handed_over) for at in rounds for number in random.sample(files, len(files))]
        others: list[Point] = [Copy(number, one, random.random(), handed_over) for number in files for one in ("cut", "other") * 4]
        whole: list[Point] = [Copy(number, one, 0.0, handed_over) for number in range(len(are_files)) for one in _DAMAGES]
        kinds += [flips, random.sample(others + whole, len(others + whole))]
    if disks:
        sizes: list[Point] = [Disk(size, 1000, bool(n % 2)) for n, size in enumerate(range(_PAGE, _DISK_BYTES, _PAGE))]
        numbers: list[Point] = [Disk(_DISK_BYTES * 2, files, bool(files % 2)) for files in range(2, _NAMES)]
        kinds += [random.sample(sizes, len(sizes)), random.sample(numbers, len(numbers))]
    return kinds


@cache
def _import_torch() -> None:
    """Before judges are forked, so that each need not. It starts no thread."""
    import torch  # noqa: F401 # pyright: ignore[reportUnusedImport]

    import cachestore.train.dataset  # noqa: F401 # pyright: ignore[reportUnusedImport]


def play(number: int, seed: int) -> Outcome:
    """Judge so many points, of every kind alike."""
    _import_torch()
    disks = may_mount()
    with scratch() as folder:
        origin = folder / "origin"
        _make_origin(origin)
        (folder / "points").mkdir()
        kinds = _points(*_count_requests(origin, folder / "points"), Random(f"answers {seed}"), disks=disks)
        points = [point for point in chain.from_iterable(zip_longest(*kinds)) if point is not None][:number]
        judges = partial(_in_its_folder, origin=origin, folder=folder / "points")
        remarks = [] if disks else ["no file system can be mounted here, so no disk was full"]
        return outcome_of(judged(points, judges, each=_EACH), remarks=remarks)


def _in_its_folder(point: Point, *, origin: Path, folder: Path) -> list[str]:
    own = folder / f"judge {os.getpid()}"
    own.mkdir(exist_ok=True)
    return judge(point, origin=origin, folder=own)


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"answers": Campaign(play, POINTS)}
