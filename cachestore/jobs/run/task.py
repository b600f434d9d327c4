"""What a pass works on: the job, and its units at each stage. Also reads the files that a unit refers to."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import combined_digest
from cachestore.core.keys import Json, Key
from cachestore.core.ranks import RankInfo
from cachestore.encode.batching.unit import Encoder, Prepared, Resolved
from cachestore.files.paths import Layout
from cachestore.jobs.share.claims import Slot
from cachestore.jobs.share.ledgers import Outcome, Result
from cachestore.jobs.share.passes import Round
from cachestore.jobs.share.plan import Plan, Unit
from cachestore.jobs.share.workers import Heartbeat
from cachestore.store.format.catalog import Catalog


class FileReader(Protocol):
    """Reads the files that units refer to."""

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Return the bytes and the stat record of a file. Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, tuple[int, int]]]:
        """Open a file to read parts of it; also gives its stat record. Raises OSError."""
        ...

    def stat(self, reference: str) -> tuple[int, int] | None:
        """Return the stat record of a file now; None if it is gone."""
        ...


class Cancel(Protocol):
    """Anything like a `threading.Event`. Once it is set, the work ends after the batch that is being encoded."""

    def is_set(self) -> bool:
        """Return whether to stop."""
        ...


OnProgress = Callable[[Mapping[str, Json]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What the pass loop needs: the plan, the encoders, the source of inputs, and this process's rank."""

    layout: Layout
    plan: Plan
    encoders: Sequence[Encoder]
    files: FileReader
    rank_info: RankInfo
    launch: str
    request: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The hints that the catalog's header keeps."""
    threads: int = 0
    """Threads that read and prepare units; one more appends. With 0 the caller's thread does all. They end before a call returns."""
    appends_beside: bool = False
    """Whether results are appended by threads of their own even if `threads` is 0."""
    cancel: Cancel | None = None
    on_progress: OnProgress | None = None
    on_open: Callable[[], None] | None = None
    """Called once the pass is open, before this worker begins; also if others have ended it by then."""
    on_loaded: Callable[[Encoder], None] | None = None
    """Called after an encoder's first batch was submitted, for which it loads its model. An error from this function ends the work."""
    heartbeat: Heartbeat | None = None
    """This worker's heartbeat if it has begun already; else one is made."""
    listing_number: int = 0
    """The number of this worker's own listing of the source (`store/write/listing_numbers`); 0 without a source."""
    unused: Sequence[Mapping[str, Json]] = ()
    """What is not used of the source: the rows of `Unused.as_json`. The pass's record keeps them."""
    is_recheck: bool = False
    """Whether every file is read again, also where its stat record says that it did not change."""
    publish: Callable[[Mapping[int, str]], int] | None = None
    """Publishes the rows of a plan of keys, given why units failed, by unit index. Returns the number of the data set's last entry."""
    compare: Callable[[Catalog], object] = lambda _previous: None
    """Compares the plan with the catalog that it would replace. Raises RecipeMismatch for a change that needs `--replace`."""


@dataclass(frozen=True, slots=True)
class DecodedUnit:
    """A unit that was read and is ready to be encoded."""

    unit: Unit
    resolved: Resolved
    prepared: Prepared
    stat: tuple[int, int]
    """The stat record of the file that it was read from."""

    @property
    def key(self) -> Key:
        """The key of its entry."""
        return self.resolved.key

    @property
    def facts(self) -> dict[str, Json]:
        """The facts about its entry, such as its crop."""
        return {**self.resolved.facts, **self.prepared.facts}

    @property
    def waiting_bytes(self) -> int:
        """The bytes of its array, which it takes while it waits for its batch; 0 for anything else, which is small."""
        return int(getattr(self.prepared.payload, "nbytes", 0))


@dataclass(slots=True)
class PartitionGroup:
    """Partitions that a worker claimed together, and the outcomes of their units so far."""

    opened: Round
    slots: list[Slot]
    dead: list[str]
    """Workers that died while they held one of these partitions."""
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    repeated: int = 0
    """Units whose entry this worker has published already, for another unit with the same key."""


def outcome_of(unit: Unit, result: Result, resolved: Resolved, stat: tuple[int, int], facts: Mapping[str, Json]) -> Outcome:
    """Return the outcome of a unit whose entry is in the store: "made" in this pass, or "found"."""
    return Outcome(unit.index, result, resolved.key, combined_digest(resolved.inputs), stat, facts)


class UnitReader:
    """Reads the files of one unit, and keeps their stat records. Implements `unit.Read`."""

    def __init__(self, files: FileReader) -> None:
        self._files = files
        self._opened: dict[str, tuple[int, int] | None] = {}
        self._stats: dict[str, tuple[int, int]] = {}

    def __call__(self, reference: str, /) -> bytes:
        """Return all bytes of a file."""
        data, stat = self._files.read(reference)
        self._stats[reference] = self._stats.get(reference, stat)
        return data

    @contextmanager
    def open(self, reference: str) -> Generator[BinaryIO]:
        """Open a file to read parts of it. Raises OSError if it has changed since it was first opened."""
        found = self._files.stat(reference)
        if self._opened.get(reference, found) != found:
            raise OSError(f"{reference} changed while it was read; run the same command again")
        with self._files.open(reference) as (file, stat):
            if reference not in self._opened:
                self._opened[reference] = found
                self._stats[reference] = self._stats.get(reference, stat)
            yield file

    @property
    def stats(self) -> list[tuple[int, int]]:
        """The stat records of the files that were read, in order; a file that is read twice counts once."""
        return list(self._stats.values())


def words_of(error: Exception) -> str:
    """Return the reason of a failure, for the unit's outcome."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, EncodeFailed | BadInput | OSError) else f"{type(error).__name__}: {text}"
