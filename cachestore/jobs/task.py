"""What a pass is given to work on, and the stages of a unit on its way through it. Values, and reading what a unit refers to."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import combined_digest
from cachestore.core.keys import Json, Key
from cachestore.core.ranks import Placement
from cachestore.encode.unit import Encoder, Prepared, Resolved
from cachestore.files.paths import Layout
from cachestore.storage.catalog import Catalog
from cachestore.work.claims import Slot
from cachestore.work.ledgers import Outcome, Result
from cachestore.work.passes import Round
from cachestore.work.plan import Plan, Unit
from cachestore.work.workers import Beat


class Source(Protocol):
    """Reads what units refer to."""

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Bytes and (size, mtime_ns) of a reference. Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, tuple[int, int]]]:
        """The same to be read in places. Raises OSError."""
        ...

    def stat(self, reference: str) -> tuple[int, int] | None:
        """(size, mtime_ns) now; None where the file is gone."""
        ...


class Cancel(Protocol):
    """Anything like a `threading.Event`: set, it ends the work after the batch that is being encoded."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


OnProgress = Callable[[Mapping[str, Json]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What the pass loop needs: a plan, who encodes, where inputs come from, and who this process is."""

    layout: Layout
    plan: Plan
    encoders: Sequence[Encoder]
    source: Source
    placement: Placement
    launch: str
    request: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the catalog's header keeps as hints."""
    threads: int = 0
    """Threads that read and prepare units, beside one that appends; 0 does all of it in the caller's. They end before a call returns."""
    cancel: Cancel | None = None
    on_progress: OnProgress | None = None
    on_open: Callable[[], None] | None = None
    """Called once the pass is open, before this worker begins."""
    on_loaded: Callable[[Encoder], None] | None = None
    """Called when an encoder has taken its first batch, for which it loads its model. What it raises ends the work."""
    beat: Beat | None = None
    """This worker's, where it has begun already; else one is made."""
    listing: int = 0
    """The number of this worker's own listing of the source (`storage/listing_numbers`); 0 where there is no source."""
    compare: Callable[[Catalog], object] = lambda _previous: None
    """Compares the plan with the catalog that it would replace. Raises RecipeMismatch where that was not asked for."""


@dataclass(frozen=True, slots=True)
class DecodedUnit:
    """A unit that was read and is ready to be encoded."""

    unit: Unit
    resolved: Resolved
    prepared: Prepared
    stat: tuple[int, int]
    """(size, mtime_ns) of what it was read from."""

    @property
    def key(self) -> Key:
        """The key of its entry."""
        return self.resolved.key

    @property
    def facts(self) -> dict[str, Json]:
        """What is known of its entry beside its values."""
        return {**self.resolved.facts, **self.prepared.facts}

    @property
    def waiting_bytes(self) -> int:
        """What it takes while it waits for its batch: the bytes of an array, nothing of what is small."""
        return int(getattr(self.prepared.payload, "nbytes", 0))


@dataclass(slots=True)
class PartitionGroup:
    """Partitions that a worker claimed together, and what became of their units so far."""

    opened: Round
    slots: list[Slot]
    dead: list[str]
    """Workers that died with one of these partitions."""
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])


def outcome_of(unit: Unit, result: Result, resolved: Resolved, stat: tuple[int, int], facts: Mapping[str, Json]) -> Outcome:
    """What became of a unit whose entry is there: "made" in this pass, or "found"."""
    return Outcome(unit.place, result, resolved.key, combined_digest(resolved.inputs), stat, facts)


class Reading:
    """What one unit is read from, and what that was. Implements `unit.Read`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._opened: dict[str, tuple[int, int] | None] = {}
        self.stats: list[tuple[int, int]] = []
        """(size, mtime_ns) of what was read, in order; of what was opened twice once."""

    def __call__(self, reference: str, /) -> bytes:
        """All bytes of a file."""
        data, stat = self._source.read(reference)
        self.stats.append(stat)
        return data

    @contextmanager
    def open(self, reference: str) -> Generator[BinaryIO]:
        """A file to be read in places. Raises OSError where it is not the one that was opened before."""
        found = self._source.stat(reference)
        if self._opened.get(reference, found) != found:
            raise OSError(f"{reference} changed while it was read")
        with self._source.open(reference) as (file, stat):
            if reference not in self._opened:
                self._opened[reference] = found
                self.stats.append(stat)
            yield file


def words_of(error: Exception) -> str:
    """Why a unit failed, for its outcome."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, EncodeFailed | BadInput | OSError) else f"{type(error).__name__}: {text}"
