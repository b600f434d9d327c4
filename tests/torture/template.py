"""A store that has one of everything, and what is true of it: the template that campaigns copy and damage."""

import os
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

import cachestore as cs
import cachestore.jobs.plan.planning
from cachestore.care.collect import collect, drop
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.keys import Key
from cachestore.files.locks import locked
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share.attempts import Attempts
from cachestore.jobs.share.retention import open_passes
from cachestore.jobs.start.here import precompute_here
from cachestore.store.format.catalog import list_generations, list_names, read_catalog
from cachestore.store.format.segment import read_contents
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write.model_digests import publish_digests
from tests import fakes
from tests.store.stores import flip

PUBLISHED: Final = "published/by a session"
Value = Mapping[str, tuple[str, tuple[int, ...], bytes]]
Pairing = tuple[tuple[str, tuple[str, ...]], ...]
"""Sample after sample: its id, and the key of each of its cells, column after column."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Where a copy of an entry stands in the template."""

    segment: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Template:
    """A store, and what is true of it."""

    folder: Path
    """Holds the store, and the data that its data sets are made from."""
    values: Mapping[Key, Value] = field(repr=False)
    copies: Mapping[Key, tuple[Copy, ...]] = field(repr=False)
    segments: Mapping[str, tuple[int, bytes]] = field(repr=False)
    """Of each segment, where its data start, and its bytes."""
    pairings: Mapping[tuple[str, int], Pairing] = field(repr=False)
    covered: frozenset[str] = field(repr=False)
    """Segments that the newest index covers."""

    @property
    def store(self) -> Path:
        """The store's folder."""
        return self.folder / "store"


@contextmanager
def without_waiting() -> Generator[None]:
    """For the block: a sync costs 10 ms, and nobody cuts the power here."""
    with patch.object(os, "fsync", os.fstat):
        yield


@contextmanager
def fake_encoders() -> Generator[None]:
    """For the block: `precompute` makes its encoders without models, and nothing is synced."""
    with without_waiting(), patch.object(cachestore.jobs.plan.planning, "make_encoders", _makers):
        yield


def _makers(layout: Any, request: PrecomputeRequest, **how: Any) -> Any:
    """Fake encoders; those of masks and first frames only for the data set that has them."""
    return fakes.Makers(options={"limit": 2}, has_roles=bool(request.frames))(layout, request, **how)


def pictures(folder: Path, *numbers: int) -> Path:
    """A folder of pictures with captions, last changed long ago."""
    folder.mkdir(exist_ok=True)
    for n in numbers:
        (folder / f"{n}.png").write_bytes(f"picture {folder.name} {n}".encode())
        (folder / f"{n}.txt").write_text(f"caption {n}, {folder.name}")
        for name in (f"{n}.png", f"{n}.txt"):
            os.utime(folder / name, (fakes.YEAR_2000 // 10**9 + n, fakes.YEAR_2000 // 10**9 + n))
    return folder


def precompute(folder: Path, data: Path, name: str) -> None:
    """Make a data set, within `fake_encoders`. A manifest has every role."""
    frames = (5,) if data.suffix else ()
    precompute_here(PrecomputeRequest(str(data), "model", str(folder / "store"), name=name, frames=frames))


def build_template(folder: Path) -> Template:
    """Make the template in a folder: every kind of file that a store can have, two of most."""
    with fake_encoders():
        return _build_template(folder)


def _build_template(folder: Path) -> Template:
    root = folder / "store"
    precompute(folder, pictures(folder / "data", 1, 2, 3), "train")
    precompute(folder, pictures(folder / "data", 4), "train")
    precompute(folder, pictures(folder / "other", 5, 6), "other")
    precompute(folder, fakes.roles_manifest(folder / "roles"), "roles")
    for name in ("gone", "gone too"):
        precompute(folder, pictures(folder / name, 7), name)
        drop(root, name)
        collect(root, apply=True)
    with cs.open(root, mode="a") as store:
        cs.fill(store, [(cs.key("filled", str(n)), str(n)) for n in range(3)], _fill)
        for n in range(2):
            with store.writer() as writer:
                writer.put(cs.key("own", str(n)), {"wide": np.arange(5, dtype=np.float32), "flag": np.array([True, False])}, {"n": n})
        _publish_changes(store)
        store.commit()
    _lose_and_put_again(root)
    _leave_a_pass_unfinished(folder)
    layout = Layout(root)
    for n in range(2):
        publish_digests(layout, "host", {f"/model/{n}|1|2|3": "0" * 63 + str(n)})
    for word in ("commit", "rename"):
        with locked(layout.lock(word), seconds=1):
            pass
    (layout.temporary / f"{'0' * 32}.tmp").write_bytes(b"half a file")
    with cs.open(root, mode="a") as store, store.writer() as writer:
        writer.put(cs.key("late"), {"wide": np.arange(3, dtype=np.int64)}, {})
    assert verify(root).ok
    return look_at(folder)


def _fill(batch):
    return {key: {"value": np.frombuffer(bytes(key), np.uint8)} for key, _item in batch}


def _publish_changes(store: cs.Store) -> None:
    """A data set of a session: entries below a table, a whole table, and entries above it."""
    session = store.session(PUBLISHED)
    for n in range(5):
        session.put(cs.key("published", str(n)), {"wide": np.full(4, n, np.float32)})
        session.set(f"{n}", part=cs.key("published", str(n)))
        session.flush()
        if n == 1:
            session.close()
            session = store.session(PUBLISHED)
            store.publish(PUBLISHED, {"0": {"part": cs.key("own", "0")}}, update=True)


def _lose_and_put_again(root: Path) -> None:
    """What repair leaves of two damaged segments: the files in quarantine, and the lists of what was lost."""
    for n in range(2):
        key = cs.key("lost", str(n))
        for _time in range(2):
            with cs.open(root, mode="a") as store, store.writer() as writer:
                writer.put(key, {"value": np.full(4, n, np.uint8)}, {})
            if _time == 0:
                with closing(load_snapshot(Layout(root))) as snapshot:
                    [[location]] = snapshot.find([key])
                flip(Layout(root).segment(location.segment.digest), location.offset)
                repair(root)


def _leave_a_pass_unfinished(folder: Path) -> None:
    """A worker that dies in the middle of a pass, over pictures that are there already: claims, heartbeat, lock, ledgers, attempts."""
    data = pictures(folder / "half", 1, 2, 3)
    pid = os.fork()
    if pid == 0:
        try:
            fakes.plug_in({"limit": 1, "before_encode": lambda items: os._exit(0) if b"picture half 3" in items else None})
            sys.stderr.close()
            precompute(folder, data, "half")
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    shutil.rmtree(folder / "half")
    layout = Layout(folder / "store")
    [ref] = open_passes(layout, now=time.time())
    for n in range(2):  # notes of a worker that nobody has heard of
        Attempts(layout, ref.folder(layout), "0" * 31 + str(n)).begin(n)


def look_at(folder: Path) -> Template:
    """Find out what is true of a store that is whole."""
    layout = Layout(folder / "store")
    values: dict[Key, Value] = {}
    copies: dict[Key, tuple[Copy, ...]] = {}
    with Reader(layout.root, verify="always") as reader:
        for key in list(reader.keys()):
            values[key] = plain(reader.get_raw([key])[0])
            [locations] = reader.snapshot.find([key])
            copies[key] = tuple(Copy(p.segment.digest, p.offset, p.offset + p.size_bytes) for p in locations)
        index = reader.snapshot.index
        covered = frozenset(ref.digest for ref in index.segments.values()) if index is not None else frozenset[str]()
    segments: dict[str, tuple[int, bytes]] = {}
    for digest in list_segments(layout):
        raw = layout.segment(digest).read_bytes()
        segments[digest] = (min((e.offset for e in read_contents(layout.segment(digest)).entries), default=len(raw)), raw)
    return Template(folder, values, copies, segments, read_pairings(layout), covered)


def plain(tensors) -> Value:
    """Tensors that can be compared."""
    return {name: (dtype, tuple(shape), bytes(raw)) for name, (dtype, shape, raw) in tensors.items()}


def read_pairings(layout: Layout) -> dict[tuple[str, int], Pairing]:
    """Which keys every generation of every data set pairs with each sample. Raises as `read_catalog`."""
    return {
        (name, generation): pairing_of(layout, name, generation)
        for name in list_names(layout)
        for generation in list_generations(layout, name)
    }


def pairing_of(layout: Layout, name: str, generation: int) -> Pairing:
    """One generation's pairing. Raises as `read_catalog`."""
    catalog = read_catalog(layout.catalog(name, generation), generation=generation)
    return tuple(
        (sample, tuple(str(key) for column in catalog.columns for key in column.row_keys(row))) for row, sample in enumerate(catalog.ids)
    )
