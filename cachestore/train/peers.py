"""Compares what the ranks of a training are about to read, before the first batch, by the key-value store of their process group.

Each rank puts a small record there and reads those of the others: no collective, which would hang beside others, and no thread. What a
record says is the sampler's.
"""

import json
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import Any, Final

from cachestore.core.errors import BadInput, RanksDiffer
from cachestore.core.keys import canonical, digest_parts
from cachestore.core.words import first_of, listed, plural
from cachestore.train.callers import package_of
from cachestore.train.seats import Seat

_log = logging.getLogger(__name__)

DEADLINE_SECONDS: float = 30.0
"""So long a rank waits for the records of all others together."""
_TURN_SECONDS: Final = 1.0
"""A wait is cut into turns, so that Ctrl-C is heard and other users of the store are not kept waiting."""
_GRACE_SECONDS: Final = 5.0
"""So long a rank that found a difference waits for others to read of it: rank 0 may hold the store, which ends with it."""
_LAUNCHING: Final = {
    "cachestore", "torch", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "ray",
    "multiprocessing", "concurrent", "threading", "runpy",
}  # fmt: skip
"""Packages whose lines say nothing of where a sampler is made: they start ranks, some of them rank 0 in another way than the others."""
_KEPT: Final = 64
"""So many of its latest records a rank leaves in the store."""
_NAMED: Final = 3
"""So many differences a message names."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What a rank says of itself."""

    digest: str
    """Of what all ranks must have in common."""
    host: str
    seat: Seat | None
    """None if unknown."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: bytes) -> "_Record":
        found = json.loads(text)
        return cls(found["digest"], found["host"], None if found["seat"] is None else Seat(**found["seat"]))


@dataclass(frozen=True, slots=True)
class _ProcessGroup:
    """The process group, with its key-value store and the name of one comparison. Errors of the store are RuntimeErrors."""

    store: Any
    name: str
    rank: int
    world: int

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def key(self, what: str, rank: int) -> str:
        return f"{self.name}/{what}/{rank}"

    def say(self, what: str, value: str) -> None:
        self.store.set(self.key(what, self.rank), value)

    def wait(self, what: str, ranks: Sequence[int], seconds: float) -> list[int]:
        """Wait for what these ranks say, all within so many seconds; return those that said nothing."""
        keys, deadline = [self.key(what, rank) for rank in ranks], time.monotonic() + seconds
        while keys:
            began = time.monotonic()
            turn = max(0.001, min(_TURN_SECONDS, deadline - began))
            try:
                self.store.wait(keys, timedelta(seconds=turn))
            except RuntimeError:
                now = time.monotonic()
                if now < deadline and now - began > turn / 2:
                    continue
                return [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]
            return []
        return []

    def read(self, what: str, ranks: Sequence[int]) -> list[bytes]:
        """What these ranks said, which did."""
        keys = [self.key(what, rank) for rank in ranks]
        return list(self.store.multi_get(keys)) if self.store.has_extended_api() else [self.store.get(key) for key in keys]

    def forget(self, key: str) -> None:
        """Remove what this rank said."""
        with suppress(RuntimeError):  # some stores cannot
            self.store.delete_key(key)


def origin_of(frame: FrameType | None) -> str:
    """A name for the lines of a script that make a sampler, equal on all ranks that run the same lines."""
    lines: list[str] = []
    while frame is not None:
        if package_of(frame) not in _LAUNCHING:
            name = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return digest_parts(*lines).hex()[:16]


_made: Final[dict[str, "count[int]"]] = {}
"""By origin (`origin_of`), the number of the next sampler that is made there."""
_silent: Final[set[str]] = set()
"""Origins of samplers of which some ranks said nothing: they are not waited for again."""
_posted: Final[deque[str]] = deque()
"""Keys of this rank's latest records."""


def next_number(origin: str) -> int:
    """How many samplers have this origin."""
    return next(_made.setdefault(origin, count()))


def compare(origin: str, turn: str, common: Mapping[str, Any], seat: Seat | None, about: str, *, is_required: bool) -> None:
    """Compare with the other ranks what they must have in common, and which batches each takes.

    Ranks that say nothing within the deadline are a remark, or with `is_required` an error. Without a process group nothing is compared.

    Args:
        origin: the name of the lines that made the sampler, from `origin_of`.
        turn: what tells this comparison from others of the same origin.
        common: what must be equal on all ranks, as JSON by name.
        seat: which batches this rank takes; None if unknown.
        about: what this rank reads, in words.
        is_required: whether ranks must be compared.

    Raises:
        RanksDiffer: ranks differ, on every rank; or a rank says nothing.
        BadInput: there is no process group, and ranks must be compared.
    """
    group = _find_group(f"{origin}/{turn}")
    if group is None and is_required:
        raise BadInput(
            "check_ranks=True compares the ranks by the process group of torch.distributed, but there is none: begin it before the"
            " first batch, or leave check_ranks out"
        )
    if group is None or group.world == 1:
        return
    ours = _Record(digest_parts(canonical(dict(common))).hex(), socket.gethostname(), seat)
    try:
        records, silent = _exchange(group, ours, origin)
    except RuntimeError as error:
        records, silent = {group.rank: ours}, group.others
        _log.warning("the ranks cannot be compared: the store of the process group does not answer (%s)", error)
    reference = min(records)
    other = next((rank for rank in sorted(records) if records[rank].digest != records[reference].digest), None)
    if other is not None:
        raise RanksDiffer(_difference(group, records, (reference, other), {"about": about, "common": dict(common)}))
    if problem := _seat_problem(records, is_complete=not silent):
        _linger(group, records)
        raise RanksDiffer(problem)
    if silent and is_required:
        raise RanksDiffer(
            f"{_named(silent)} did not begin this loader within {DEADLINE_SECONDS:g} s of this rank: make and begin it on every rank, at"
            " the same lines of the script, or leave check_ranks=True out"
        )
    if silent and origin not in _silent:
        _silent.add(origin)
        _log.warning(
            "%s did not begin this loader within %g s of this rank, so what they read was not compared; for a loader that belongs to some"
            " ranks alone, pass check_ranks=False, which does not wait",
            _named(silent),
            DEADLINE_SECONDS,
        )
    if not silent and group.rank == reference:
        _remark_shared(records)


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first_of(ranks)}"


def _find_group(name: str) -> _ProcessGroup | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    core = getattr(distributed, "distributed_c10d", None)
    # There is no public way to the group's own store; torch's elastic agents and FSDP take it from here.
    store = None if core is None else core._get_default_store()  # noqa: SLF001
    if store is None:
        return None
    rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
    return _ProcessGroup(distributed.PrefixStore("cachestore", store), name, rank, world)


def _exchange(group: _ProcessGroup, ours: _Record, origin: str) -> tuple[dict[int, _Record], list[int]]:
    group.say("record", ours.encode())
    _posted.append(group.key("record", group.rank))
    if len(_posted) > _KEPT:  # all have read it: loaders that are made anew in each epoch do not fill the store
        group.forget(_posted.popleft())
    silent = group.wait("record", group.others, 0 if origin in _silent else DEADLINE_SECONDS)
    there = [rank for rank in group.others if rank not in silent]
    found = zip(there, map(_Record.parse, group.read("record", there)), strict=True) if there else ()
    return {group.rank: ours, **dict(found)}, silent


def _difference(group: _ProcessGroup, records: Mapping[int, _Record], pair: tuple[int, int], ours: Mapping[str, Any]) -> str:
    """The message for two ranks that differ. Each of them says here what its record is the digest of."""
    values: list[dict[str, Any]] = []
    try:
        if group.rank in pair:
            group.say("whole", json.dumps(ours))
        if not group.wait("whole", pair, _GRACE_SECONDS):
            values = [json.loads(text) for text in group.read("whole", pair)]
    except RuntimeError:
        values = []
    _linger(group, records)
    names = [f"rank {rank} (host {records[rank].host})" for rank in pair]
    if not values:
        return f"{names[0]} and {names[1]} are about to read different batches, and one of them ended before it said what; {_ADVICE}"
    one, other = (value["common"] for value in values)
    differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    sentences = [
        f"{name} is {_shown(one.get(name))} on rank {pair[0]}, but {_shown(other.get(name))} on rank {pair[1]}" for name in differing
    ]
    return (
        f"{names[0]} and {names[1]} are about to read different batches: {first_of(sentences, _NAMED)}. Rank {pair[0]} reads"
        f" {values[0]['about']}, rank {pair[1]} {values[1]['about']}; {_ADVICE}"
    )


_ADVICE: Final = (
    "open the same data set and generation= with the same options on every rank, and resume all ranks from the same state. If they are"
    " meant to differ, pass check_ranks=False"
)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _linger(group: _ProcessGroup, records: Mapping[int, _Record]) -> None:
    """Before an error, wait a moment until the others have found it too."""
    try:
        group.say("found", "")
        group.wait("found", sorted(records), _GRACE_SECONDS)
    except RuntimeError:
        return


def _seat_problem(records: Mapping[int, _Record], *, is_complete: bool) -> str | None:
    """What is wrong with the batches that ranks take, as a sentence. None if nothing is, or if a rank does not know its own."""
    held: dict[int, list[int]] = {}
    for rank, record in sorted(records.items()):
        if record.seat is None:
            return None
        held.setdefault(record.seat.first, []).append(rank)
    replicas = max(record.seat.replicas for record in records.values() if record.seat is not None)
    hosts = {rank: f"{rank} (host {record.host})" for rank, record in records.items()}
    number, first = max(held.items(), key=lambda one: len(one[1]))
    is_meant = all(record.seat is not None and record.seat.is_joint for record in records.values())
    is_uneven = len({len(ranks) for ranks in held.values()}) > 1
    if len(first) > 1 and not is_meant and (replicas == 1 or (is_complete and is_uneven)):
        both = f"ranks {listed(hosts[rank] for rank in first[:2])} both take the batches of rank {number} of {replicas}"
        return (
            f"{both}, so they train on the same ones. Give each rank its own: make_loader finds them, or pass rank= and num_replicas=."
            ' If it is meant: mesh= for ranks that share batches, framework="single" or check_ranks=False where each process takes all'
        )
    if is_complete and (missing := sorted({*range(replicas)} - held.keys())):
        return (
            f"no process takes the batches of rank {missing[0]} of {replicas}: {plural(len(records), 'process', 'processes')} train"
            " together; pass the num_replicas= of the ranks that are there, or leave rank and num_replicas out"
        )
    return None


def _remark_shared(records: Mapping[int, _Record]) -> None:
    """Log that ranks take the same batches by explicit numbers: those of a mesh mean it, numbers within a machine do not."""
    seats = {rank: record.seat for rank, record in sorted(records.items())}
    known = [(rank, seat) for rank, seat in seats.items() if seat is not None and not seat.is_joint]
    same = [rank for rank, seat in known if seat == known[0][1]]
    if len(same) > 1:
        seat = known[0][1]
        what = "ranks %s all take the batches of rank %d of %d: if they do not belong together, pass each rank a number of its own; mesh="
        _log.warning(what + " says that they do", first_of(same), seat.rank, seat.replicas)
