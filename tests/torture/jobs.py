"""The commands that faults strike, over small stores. What is stored under a key follows from the key, so a wrong value is always seen."""

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

import cachestore as cs
from cachestore.care import collect as upkeep
from cachestore.care.gc import mark
from cachestore.core.dtypes import RawTensor
from cachestore.core.keys import Key
from cachestore.core.tensors import to_raw
from cachestore.files.failpoints import VARIABLE
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share import agreement, choice, workers
from cachestore.jobs.start.here import precompute_here
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.format.entry import Entry, make_entry
from cachestore.store.format.segment import read_contents
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import list_indexes, load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, create_store
from tests import fakes
from tests.fakes import publish_catalog

FILLED: Final = range(12)
KEPT: Final = range(8)
"""What a store that is tidied up must go on holding."""
DAMAGED: Final = 1


def own(number: int) -> Key:
    """The n-th key of our own."""
    return cs.key("torture", str(number))


def value_of(key: Key) -> dict[str, np.ndarray]:
    """What is stored under a key, whoever makes it: bytes that follow from it, and a few wide numbers."""
    block = sha256(bytes(key)).digest()
    return {"long": np.frombuffer(block * (1 + key[0] % 40), np.uint8), "wide": np.frombuffer(block, np.int64)}


def raw_of(key: Key) -> Mapping[str, RawTensor]:
    """The same as the storage knows it."""
    return {name: (dtype, shape, bytes(raw)) for name, (dtype, shape, raw) in to_raw(value_of(key)).items()}


def encode(batch: Iterable[tuple[Key, Any]]) -> dict[Key, dict[str, np.ndarray]]:
    """An encoder of one's own."""
    return {key: value_of(key) for key, _item in batch}


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and the store that it is given."""

    name: str
    prepare: Callable[[Path], None]
    """Makes the store, and beside it what the command reads."""
    act: Callable[[Path, int, int], None]
    """Store, rank and world size. Raises what the command raises, and Unfinished where it says that it did not finish."""
    wanted: Callable[[Path], set[Key]]
    """What the store must hold when the command has finished."""
    spoiled: frozenset[Key] = frozenset()
    """Keys that are damaged from the start."""
    is_tidying: bool = False
    """Whether it takes away what nothing needs."""

    def __repr__(self) -> str:
        return self.name


class Unfinished(Exception):
    """A command ended with a report that says it is not complete."""


def _patch(module: ModuleType, name: str, value: object) -> None:
    """Replace something that must be there: what patches what nobody reads would test nothing."""
    if not hasattr(module, name):
        raise AttributeError(f"{module.__name__} has no {name} any more")
    setattr(module, name, value)


def hurry() -> None:
    """Let waits of seconds take hundredths, in this process: no fault that is played here is a slow one."""
    _patch(choice, "POLL_SECONDS", 0.01)
    _patch(agreement, "LOOK_SECONDS", 0.01)
    _patch(agreement, "STILL_SECONDS", 0.5)


def start_again() -> None:
    """Presume those dead soon, in this process, whose heartbeats or locks a power cut took; else that takes three minutes."""
    _patch(workers, "SILENT_SECONDS", 0.2)
    _patch(workers, "FIRST_BATCH_SECONDS", 0.05)


def _nothing(root: Path) -> None:
    del root


# Writing


def _put(root: Path, rank: int, world: int) -> None:
    with cs.open(root, mode="a") as store:
        for numbers in (FILLED[:3], FILLED[3:6]):
            with store.writer() as writer:
                for n in numbers:
                    writer.put(own(n), value_of(own(n)), {"n": n})
        store.commit()


def _fill(root: Path, rank: int, world: int) -> None:
    with cs.open(root, mode="a") as store:
        report = cs.fill(store, [(own(n), n) for n in FILLED], encode, batch_size=3, rank=rank, world_size=world)
    if not report.complete:
        raise Unfinished(report.failures)


def _source(root: Path) -> Path:
    return root.with_name(f"{root.name}.source")


def _make_source(root: Path) -> None:
    folder = _source(root)
    folder.mkdir(exist_ok=True)
    for n in range(4):
        (folder / f"{n}.png").write_bytes(b"picture %d" % n)
        (folder / f"{n}.txt").write_text(f"caption {n % 3}")


def _precompute(root: Path, rank: int, world: int) -> None:
    fakes.plug_in({"limit": 2, "answer": encode})
    threads = 2 if world == 1 else 0
    request = PrecomputeRequest(str(_source(root)), "model", str(root), rank=rank, world_size=world, workers=threads)
    report = precompute_here(request)
    if not report.complete:
        raise Unfinished(report.failures)


def _make_roles(root: Path) -> None:
    fakes.roles_manifest(_source(root))


def _precompute_roles(root: Path, rank: int, world: int) -> None:
    """A data set whose samples have every role: pictures with control images, masks and references, videos and first frames."""
    fakes.plug_in({"limit": 2, "answer": encode}, has_roles=True)
    threads = 2 if world == 1 else 0
    source = str(_source(root) / "rows.jsonl")
    report = precompute_here(PrecomputeRequest(source, "model", str(root), rank=rank, world_size=world, workers=threads, frames=(5,)))
    if not report.complete:
        raise Unfinished(report.failures)


def _in_catalog_of_roles(root: Path) -> set[Key]:
    catalog = newest_catalog(Layout(root), "train")
    roles = sorted(column.role for column in catalog.columns) if catalog is not None else []
    if catalog is None or roles != ["caption", "control", "first_frame", "image", "mask", "reference", "video"]:
        raise Unfinished(f"the catalog is not whole: it has {roles}")
    found = _in_catalog_of_any(root)
    if len(found) != 4 + 6 + 4 + 4 + 2 + 2 + 4:
        raise Unfinished(f"the catalog names {len(found)} keys")
    return found


def _in_catalog(root: Path) -> set[Key]:
    """The keys that the newest catalog names: each sample has one of each encoder."""
    catalog = newest_catalog(Layout(root), "train")
    if catalog is None or len(catalog) != 4 or len(catalog.columns) != 2:
        raise Unfinished(f"the catalog is not whole: {catalog}")
    found = {key for column in catalog.columns for row in range(len(catalog)) for key in column.row_keys(row) if key is not None}
    if len(found) != 7:
        raise Unfinished(f"the catalog names {len(found)} keys, not four pictures and three captions")
    return found


def _precomputed_before(root: Path) -> None:
    """A data set that is complete, of which a picture and a caption were changed since."""
    _make_source(root)
    _precompute(root, 0, 1)
    (_source(root) / "1.png").write_bytes(b"another picture")
    (_source(root) / "3.txt").write_text("caption 7")


def _changed(root: Path) -> set[Key]:
    found = _in_catalog_of_any(root)
    if len(found) != 8:
        raise Unfinished(f"the catalog names {len(found)} keys, not four pictures and four captions")
    return found


def _in_catalog_of_any(root: Path) -> set[Key]:
    catalog = newest_catalog(Layout(root), "train")
    columns = catalog.columns if catalog is not None else ()
    return {key for column in columns for row in range(len(catalog or ())) for key in column.row_keys(row) if key is not None}


def _lost_before_the_end(root: Path) -> None:
    """A pass whose ledgers are all there, that died before it committed, and that lost a segment since: reconcile must open a round."""
    pid = os.fork()
    if pid == 0:
        os.environ[VARIABLE] = "reconcile.before_commit"
        with suppress(BaseException):
            _fill(root, 0, 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    first = min(path for path in Layout(root).segments.rglob("*.safetensors"))
    first.unlink()


def _uncovered(root: Path) -> None:
    """An index that covers one segment of three."""
    layout = create_store(root)
    for numbers in (range(4), range(4, 8), range(8, 12)):
        publish_segment(layout, [_entry(n) for n in numbers], origin="")
        if 0 in numbers:
            commit(layout).close()


def _commit(root: Path, rank: int, world: int) -> None:
    with cs.open(root, mode="a") as store:
        store.commit()


def _entry(number: int, **meta: str) -> Entry:
    return make_entry(own(number), raw_of(own(number)), {"n": number, **meta})


def _of_pass(number: int) -> Entry:
    """An entry as a precompute makes it: it may go where nothing names it."""
    return _entry(number, input_digest="")


# Mending and tidying


def _damaged(root: Path) -> None:
    """Three segments, one with a damaged entry, one whose header is damaged though the index knows it; and a damaged newest index."""
    layout = create_store(root)
    digests = [publish_segment(layout, [_entry(n) for n in (n, n + 1)], origin="").digest for n in (0, 2, 4)]
    commit(layout).close()
    with closing(load_snapshot(layout)) as snapshot:
        [[location]] = snapshot.find([own(DAMAGED)])
    _flip(layout.segment(location.segment.digest), location.offset)
    _flip(layout.segment(digests[1]), 40)
    publish_segment(layout, [_entry(n) for n in (6, 7)], origin="")
    commit(layout).close()
    newest = layout.index(list_indexes(layout)[0])
    _flip(newest, 8192)


def _flip(path: Path, offset: int) -> None:
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0xFF
    path.write_bytes(raw)


def _repair(root: Path, rank: int, world: int) -> None:
    cs.repair(root)


def _untidy(root: Path) -> None:
    """What writers put (0 to 5), what passes made and a catalog names (6, 7), of which 7 only in a marked segment, and what may go."""
    layout = create_store(root)
    for n in range(0, 6, 2):
        publish_segment(layout, [_entry(n), _entry(n + 1)], origin="")
    for n in (6, 8, 9):
        publish_segment(layout, [_of_pass(n)], origin=f"{n:032x}/1")
    commit(layout).close()
    column = make_column("own", "caption", "f" * 64, {}, [[Cell(own(6)), Cell(own(7))]])
    publish_catalog(layout, Catalog("other", {}, {}, ["a"], [0, 2], ["x", "y"], {}, ["{}"], (column,)))
    for n, origin in ((10, "a"), (7, "b")):
        mark(layout, [publish_segment(layout, [_of_pass(n)], origin=origin * 32 + "/1").digest])


def _collect(root: Path, rank: int, world: int) -> None:
    upkeep.collect(root, apply=True, grace_seconds=0)


def _compact(root: Path, rank: int, world: int) -> None:
    upkeep.compact(root)


def _keys(numbers: Iterable[int]) -> Callable[[Path], set[Key]]:
    keys = {own(n) for n in numbers}
    return lambda _root: set(keys)


JOBS: Final[Sequence[Job]] = (
    Job("put", _nothing, _put, _keys(FILLED[:6])),
    Job("fill", _nothing, _fill, _keys(FILLED)),
    Job("reconcile", _lost_before_the_end, _fill, _keys(FILLED)),
    Job("precompute", _make_source, _precompute, _in_catalog),
    Job("precompute-roles", _make_roles, _precompute_roles, _in_catalog_of_roles),
    Job("precompute-again", _precomputed_before, _precompute, _changed),
    Job("commit", _uncovered, _commit, _keys(FILLED)),
    Job("repair", _damaged, _repair, _keys(set(KEPT) - {DAMAGED}), frozenset({own(DAMAGED)})),
    Job("gc", _untidy, _collect, _keys(KEPT), is_tidying=True),
    Job("compact", _untidy, _compact, _keys(KEPT), is_tidying=True),
)


def job(name: str) -> Job:
    """A job by name."""
    return next(one for one in JOBS if one.name == name)


def held(root: Path) -> tuple[dict[Key, bool], set[Key]]:
    """(key -> whether its value is the right one, damaged keys) of everything that a store shows; nothing of no store."""
    right: dict[Key, bool] = {}
    damaged: set[Key] = set()
    try:
        store = cs.open(root, verify="always")
    except cs.StoreNotFound:
        return right, damaged
    with store:
        for key in list(store.keys()):
            try:
                found = store.get(key, as_numpy=True)
            except cs.CorruptEntry:
                damaged.add(key)
            except cs.MissingEntry:
                continue
            else:
                right[key] = is_right(key, found)
    return right, damaged


def is_right(key: Key, found: Mapping[str, np.ndarray]) -> bool:
    """Whether this is what is stored under a key."""
    made = value_of(key)
    return set(found) == set(made) and all(found[name].tobytes() == made[name].tobytes() for name in made)


def entries_of(root: Path) -> set[Key]:
    """The keys in all segments of a store whose header can be read."""
    found: set[Key] = set()
    for path in Layout(root).segments.rglob("*.safetensors"):
        with suppress(cs.FormatError):
            found.update(entry.key for entry in read_contents(path).entries)
    return found
