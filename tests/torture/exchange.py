"""Files that are whole and say something else: a key with another's bytes, in an index or in a segment, and links in place of files.

Every digest over a whole file is right, so only what an entry itself is bound to can tell. Reading gives what was stored or an error of
ours, and never what a link leads to.
"""

import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Final

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.store.format.entry import make_entry
from cachestore.store.format.segment import draft_of, read_contents
from cachestore.store.read.snapshot import list_segments
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, create_store
from tests.store.stores import forge_index
from tests.torture.campaign import Campaign, Outcome, judged, outcome_of, scratch
from tests.torture.jobs import own, raw_of, value_of

_NUMBERS: Final = range(8)


@dataclass(frozen=True, slots=True)
class Point:
    """One exchange between two entries; for a link, the first one's segment."""

    way: str
    one: int
    other: int


def _exchange_in_index(layout: Layout, one: int, other: int) -> None:
    """A newer index in which each of two keys has the other's location."""
    forge_index(layout, entries=lambda reported: reported | {own(one): reported[own(other)], own(other): reported[own(one)]})


def _exchange_in_segment(layout: Layout, one: int, other: int) -> None:
    """A segment in which each of two keys stands with the other's tensors and checksum, in place of all that there were."""
    entries = {n: make_entry(own(n), raw_of(own(n)), {"n": n}) for n in _NUMBERS}
    entries[one], entries[other] = entries[other]._replace(key=own(one)), entries[one]._replace(key=own(other))
    for folder in (layout.segments, layout.indexes):
        shutil.rmtree(folder)
    digest, chunks, _contents = draft_of(entries.values()).build()
    layout.segment(digest).parent.mkdir(parents=True)
    publish(layout, layout.segment(digest), chunks, read_only=True)


def _exchange_bytes(layout: Layout, one: int, other: int) -> None:
    """The first bytes of two entries change places, and nothing else is changed: only their own checksums can tell."""
    for digest in list_segments(layout):
        path = layout.segment(digest)
        at = {entry.key: entry.offset for entry in read_contents(path).entries}
        raw = bytearray(path.read_bytes())
        here, there = at[own(one)], at[own(other)]
        raw[here : here + 32], raw[there : there + 32] = raw[there : there + 32], raw[here : here + 32]
        path.chmod(0o644)
        path.write_bytes(raw)


def _link(layout: Layout, one: int, other: int) -> None:
    """A link to the same bytes outside of the store stands where the segment was."""
    for digest in list_segments(layout):
        path = layout.segment(digest)
        outside = layout.root.with_name(f"{layout.root.name}.outside.{digest}")
        path.rename(outside)
        path.symlink_to(outside)


WAYS: Final[Mapping[str, Callable[[Layout, int, int], None]]] = {
    "index": _exchange_in_index,
    "segment": _exchange_in_segment,
    "bytes": _exchange_bytes,
    "link": _link,
}


def judge(point: Point, *, folder: Path) -> list[str]:
    """Make the exchange, read every entry, and say what was handed out that should not be."""
    root = folder / secrets.token_hex(8)
    layout = create_store(root)
    publish_segment(layout, [make_entry(own(n), raw_of(own(n)), {"n": n}) for n in _NUMBERS], origin="")
    commit(layout).close()
    WAYS[point.way](layout, point.one, point.other)
    found: list[str] = []
    unread = 0
    with cs.open(root, verify="always") as store:
        for n in _NUMBERS:
            unread += 1
            with suppress(cs.CorruptEntry, cs.MissingEntry, cs.FormatError):
                value = store.get(own(n), as_numpy=True)
                unread -= 1
                if any(value[name].tobytes() != made.tobytes() for name, made in value_of(own(n)).items()):
                    found.append(f"entry {n} has a wrong value")
                if point.way == "link":
                    found.append(f"entry {n} was read through a link")
    if point.way == "index" and {finding.kind for finding in verify(root, "quick").findings} != {"bad-index"}:
        found.append("verify does not tell of the index")
    shutil.rmtree(root)
    return found if unread or found else ["nothing was exchanged"]


def play(number: int, seed: int) -> Outcome:
    """Judge so many exchanges, of every way alike."""
    points = [Point(way, one, other) for (one, other), way in product(permutations(_NUMBERS, 2), WAYS)]
    Random(f"exchange {seed}").shuffle(points)
    with scratch() as folder:
        return outcome_of(judged(points[:number], partial(judge, folder=folder), each=16))


CAMPAIGNS: Final[Mapping[str, Campaign]] = {"exchange": Campaign(play, len(WAYS) * len(_NUMBERS) * (len(_NUMBERS) - 1))}
