"""Damage under open readers: a store is struck while `get`, `get_many` and `read_batch` have it open. The right value, or an error of ours.

Files are struck in place, but for an index: LMDB has it mapped, and what is changed under a mapping nobody can check. It is replaced, as
a copy or a restored backup does.
"""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

import cachestore as cs
import cachestore.jobs.plan.planning
from cachestore.core.errors import CacheStoreError
from cachestore.core.keys import Key
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.store.read.snapshot import list_indexes, list_segments
from tests import fakes
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch, timed
from tests.torture.damage import FOLDERS, STRANGE, WAYS, Damage, strike
from tests.torture.template import without_waiting
from tests.train.encoders import FRAMES, ReadableEncoder
from tests.train.stores import Row, make_store, recipes

ROWS: Final = 12
GENERATION: Final = 3
"""The newest, which has all rows: without it an older one is opened, with other rows."""
LOOKS: Final = 3
KINDS: Final = {
    "pictures": [n for n in range(ROWS) if n % 3 < 2],
    "videos with a first frame": [n for n in range(ROWS) if n % 3 == 2 and n % 2],
    "videos": [n for n in range(ROWS) if n % 3 == 2 and not n % 2],
}
"""The samples of `fakes.roles_manifest` by what they have."""
LISTS: Final = ("control_latents", "reference_latents")
"""What a batch holds as a list of tensors for each sample."""
MADE_OF: Final = {
    "pictures": ("latents", "control_latents", "reference_latents", "mask"),
    "videos with a first frame": ("latents", "first_frame"),
    "videos": ("latents", "first_frame"),
}


@dataclass(frozen=True, slots=True)
class Truth:
    """A store whose every value and batch is known."""

    store: Path
    values: dict[Key, dict[str, bytes]]
    batch: dict[str, Any]
    roles: dict[str, dict[str, Any]]
    """By kind of sample, a batch of the data set that has every role."""
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """What is open while the store is struck. What was checked once is not checked again, unless that is asked for."""

    reader: Any
    data: Any
    roles: Any


def build(folder: Path, count: int, seed: int) -> Truth:
    """A store with a data set in three segments, an index that covers two of them, and what is to happen to it."""
    store, made = folder / "store", recipes()
    for start in (0, 4):
        make_store(store, [Row(f"{n}.png", (f"caption {n}",)) for n in range(start, start + 4)], made)
    with cs.open(store, mode="a") as uncovered, uncovered.writer() as writer:
        writer.put(cs.key("late"), {"wide": np.arange(64)})
    make_store(store, [Row(f"{n}.png", (f"caption {n}",)) for n in range(ROWS)], made)
    makers = fakes.Makers(make=ReadableEncoder, has_roles=True)
    manifest = str(fakes.roles_manifest(folder / "roles", ROWS))
    with patch.object(cachestore.jobs.plan.planning, "make_encoders", makers):
        precompute_here(PrecomputeRequest(manifest, "model", str(store), name="roles", frames=(FRAMES,)))
    data, roles = cs.CachedDataset(store), cs.CachedDataset(store, "roles")
    with cs.open(store) as reader:
        values = {key: _bytes_of(reader.get(key, as_numpy=True)) for key in sorted(reader.keys())}
        batch = data.read_batch(range(ROWS))
    batches = {name: roles.read_batch(indices) for name, indices in KINDS.items()}
    assert all(set(MADE_OF[name]) <= set(batch) for name, batch in batches.items())
    return Truth(store, values, batch, batches, tuple(_choose(store, count, seed)))


def _choose(store: Path, count: int, seed: int) -> Iterator[Damage]:
    layout, draw = Layout(store), random.Random(seed)
    files = {
        "segment": [layout.segment(digest) for digest in sorted(list_segments(layout))],
        "index": [layout.index(name) for name in list_indexes(layout)],
        "catalog": sorted(path for name in ("train", "roles") for path in layout.catalog_folder(name).iterdir()),
        "folder": [layout.segments, layout.indexes, layout.catalogs, *sorted(layout.segments.iterdir())],
    }
    for number in range(count):
        kind = draw.choice(("segment", "segment", "segment", "index", "catalog", "folder"))
        ways = FOLDERS if kind == "folder" else (*WAYS, *STRANGE)
        yield Damage(kind, str(draw.choice(files[kind]).relative_to(store)), draw.choice(ways), number)


def _bytes_of(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(tensor).tobytes() for name, tensor in tensors.items()}


def judge(truth: Truth, damage: Damage) -> list[str]:
    """Open, strike, look: through what was open before, again after a refresh, and through what is opened now."""
    import torch

    torch.set_num_threads(1)
    with without_waiting(), scratch() as folder:
        store, outside = folder / "store", folder / "outside"
        shutil.copytree(truth.store, store)
        outside.mkdir()
        with cs.open(store, verify="always") as always:
            those = Open(always, cs.CachedDataset(store, verify="always"), cs.CachedDataset(store, "roles", verify="always"))
            if damage.number % 2 and (found := list(_look(truth, those))):
                return found
            _strike(store, damage, outside)
            found = [violation for _time in range(LOOKS) for violation in _look(truth, those)]
            with suppress(CacheStoreError):
                timed(always.refresh)
            found += _look(truth, those)
        return [*found, *_open_again(truth, store)]


def _strike(store: Path, damage: Damage, outside: Path) -> None:
    """Strike a file; an index in a copy that takes its place, as LMDB has the file itself mapped."""
    path = store / damage.path
    if damage.kind == "index":
        copy = outside / "copy"
        shutil.copy(path, copy)
        path.unlink()
        os.rename(copy, path)
    strike(store, damage, outside)


def _open_again(truth: Truth, store: Path) -> Iterator[str]:
    try:
        with timed(cs.open, store) as reader:
            train = timed(cs.CachedDataset, store, generation=GENERATION)
            yield from _look(truth, Open(reader, train, timed(cs.CachedDataset, store, "roles", generation=1)))
    except CacheStoreError:
        return


def _look(truth: Truth, those: Open) -> Iterator[str]:
    """Every key alone and all together, and a batch of each kind of sample."""
    for key, value in truth.values.items():
        yield from _same(f"get {key}", value, lambda key=key: _bytes_of(those.reader.get(key, as_numpy=True)))
    keys = list(truth.values)
    yield from _same(
        "get_many", [truth.values[key] for key in keys], lambda: [_bytes_of(one) for one in those.reader.get_many(keys, as_numpy=True)]
    )
    yield from _same("read_batch", None, lambda: _different(truth.batch, those.data.read_batch(range(ROWS))))
    for name, batch in truth.roles.items():
        yield from _same(
            f"read_batch of {name}", None, lambda name=name, batch=batch: _different(batch, those.roles.read_batch(KINDS[name]))
        )


def _same(what: str, wanted: Any, read: Any) -> Iterator[str]:
    try:
        found = timed(read)
    except CacheStoreError:
        return
    if found != wanted:
        yield f"{what}: a wrong value" + (f" in {found}" if isinstance(found, str) else "")


def _different(wanted: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The name of the first field that is another, and of how many numbers; None where none is."""
    for name, value in wanted.items():
        other = found.get(name)
        if name in LISTS:
            if other is None or any(bool((one != its).any()) for one, its in zip(chain(*value), chain(*other), strict=True)):
                return name
        elif not hasattr(value, "dtype"):
            if value != other:
                return name
        elif other is None or (other.dtype, other.shape) != (value.dtype, value.shape):
            return f"{name}, which is another kind of tensor"
        elif not bool((value == other).all()):
            return f"{name}: {int((value != other).sum())} of {value.numel()} numbers, the farthest {(value - other).abs().max()} off"
    return None


def play(count: int, seed: int) -> Outcome:
    """So many damages under open readers."""
    with scratch() as folder:
        with without_waiting():
            truth = build(folder, count, seed)
        return outcome_of(judged(truth.damages, partial(judge, truth)))


CAMPAIGNS: Final = {"readers": Campaign(play, 500)}
