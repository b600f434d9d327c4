"""What push and pull have in common: their report, and files that move side by side."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from cachestore.core.arguments import as_switch, as_text, as_whole, check_calls
from cachestore.core.errors import BadInput, CacheStoreError, MissingEntry, WriteFailed, numbered
from cachestore.core.keys import Json, Key
from cachestore.core.spelling import option
from cachestore.core.words import in_short
from cachestore.files.opening import read_at, reason_of
from cachestore.files.paths import Access, Layout
from cachestore.files.scratch import MAKE_ROOM, scratch_folder
from cachestore.remote.address import Address
from cachestore.remote.client import PIECE_BYTES, Client, ReadingClient
from cachestore.remote.outline import ask_until_sure, catalog_digest, remote_start, take_inventory
from cachestore.store.format.catalog import NO_KEY, Catalog
from cachestore.store.format.line import Line, list_line
from cachestore.store.read.rows import read_data_set
from cachestore.store.read.snapshot import Snapshot
from cachestore.store.write.catalog_writer import draft_of
from cachestore.store.write.folding import rows_above
from cachestore.store.write.made import read_lineage

if TYPE_CHECKING:
    from typing_extensions import Self

JOBS: Final = 8
"""How many files move at once by default."""

_SHOW_SECONDS: Final = 0.25
_LOCATED_AT_ONCE: Final = 4096

T = TypeVar("T")
Shown = Callable[[str, int, int], object]
"""`on_progress`: what is done, in words; bytes that have moved; bytes in all."""


@dataclass(frozen=True, slots=True, repr=False)
class TransferReport:
    """What `push` or `pull` has moved, or with `dry_run` would move."""

    store: str
    address: str
    generations: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """By data set, the generations that are now at both ends."""
    files: int = 0
    """Files that were moved, small ones too."""
    bytes: int = 0
    """Their size."""
    skipped: int = 0
    """Files that were there already."""
    requests: int = 0
    """Requests that move the files; those that find out what is there are not counted."""
    seconds: float = 0.0
    applied: bool = True
    """False for a dry run."""
    remarks: tuple[str, ...] = ()
    """What else there is to say, such as that a new store is shared with a group."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `--json` prints."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Self":
        """Return the report from the JSON of `as_json`."""
        known = dict(body)
        known |= {"generations": {name: tuple(some) for name, some in body["generations"].items()}, "remarks": tuple(body["remarks"])}
        return cls(**known)


class FileRef(NamedTuple):
    """A file to be moved: its key, and its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What push and pull were asked to do."""

    name: str | None = None
    generation: int | None = None
    jobs: int = JOBS
    check: bool = False
    dry_run: bool = False
    on_progress: Shown | None = None
    access: Access | None = None
    """Of a new store that `pull` makes."""

    @classmethod
    def checked(
        cls, name: object, generation: object, jobs: object, *, check: object, dry_run: object, on_progress: Shown | None
    ) -> "Self":
        """Check a caller's arguments. Raises BadInput."""
        named = None if name is None else as_text("name", name)
        number = None if generation is None else as_whole("generation", generation, least=1)
        if number is not None and named is None:
            raise BadInput(f"{option('generation')} needs {option('name')}: each data set has generations of its own", option="name")
        check_calls(on_progress, None)
        return cls(named, number, as_whole("jobs", jobs, least=1), as_switch("check", check), as_switch("dry_run", dry_run), on_progress)

    def as_json(self) -> dict[str, Json]:
        """Return everything but `on_progress`."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "on_progress"}


@contextmanager
def working_folder() -> Generator[Path]:
    """Give the block a folder of its own below TMPDIR. Raises WriteFailed if the folder, or something in it, cannot be written."""
    with scratch_folder() as folder:
        try:
            yield folder
        except OSError as error:
            if isinstance(error, CacheStoreError | FileNotFoundError):
                raise
            raise numbered(WriteFailed(f"cannot write {error.filename or folder}: {reason_of(error)}; {MAKE_ROOM}"), error) from error


@dataclass(slots=True)
class Moves:
    """What is to be moved, in the order of writes."""

    generations: dict[str, list[int]]
    segments: list[FileRef] = field(default_factory=list[FileRef])
    recipes: list[FileRef] = field(default_factory=list[FileRef])
    catalogs: list[tuple[str, int, FileRef]] = field(default_factory=list[tuple[str, int, FileRef]])
    skipped: int = 0
    """Files that are there already."""

    def files(self) -> list[FileRef]:
        """Return all of them."""
        return [*self.segments, *self.recipes, *(file for _name, _generation, file in self.catalogs)]


def requests_down(file: FileRef) -> int:
    """Return how many requests bring a file: one for each piece."""
    return max(1, -(-file.size // PIECE_BYTES))


def requests_up(file: FileRef) -> int:
    """Return how many requests send a file: as many, and two around several pieces."""
    pieces = requests_down(file)
    return pieces if pieces == 1 else pieces + 2


class StoreTransfer:
    """One push or pull: it plans what moves, moves it, and reports. A subclass says in which direction."""

    def __init__(self, client: Client, layout: Layout, request: TransferRequest, scratch: Path) -> None:
        self._client, self._layout, self._request = client, layout, request
        self._outline = Layout(scratch / "outline")
        """A folder for what is brought of the store at the address."""
        self._inventory = take_inventory(client)
        self._remarks: list[str] = []

    def plan(self) -> Moves:
        """Return what is to be moved. Raises BadInput for a generation that is another one at the other end."""
        raise NotImplementedError

    def move(self, plan: Moves, mover: "Mover") -> None:
        """Move it, in the order in which a reader may see it."""
        raise NotImplementedError

    requests = staticmethod(requests_down)
    """How many requests a file takes."""

    def run(self, began: float) -> TransferReport:
        """Do it, and return the report."""
        plan = self.plan()
        files = plan.files()
        if not self._request.dry_run:
            self.move(plan, Mover(self._request.jobs, sum(file.size for file in files), self._request.on_progress))
        return TransferReport(
            store=str(self._layout.root),
            address=str(self._client.address),
            generations={name: tuple(numbers) for name, numbers in plan.generations.items()},
            files=len(files),
            bytes=sum(file.size for file in files),
            skipped=plan.skipped,
            requests=sum(map(self.requests, files)),
            seconds=time.monotonic() - began,
            applied=not self._request.dry_run,
            remarks=tuple(self._remarks),
        )

    def _require_one_line(self, name: str) -> int:
        """Return the number of the newest rows that the folder has of a data set; 0 if none.

        Raises BadInput if sessions published it and the two ends went different ways: then the higher number would hide the rows of the
        other end. They are one line if the older of the two newest states is a state of the other end too.
        """
        line = list_line(self._layout, name)
        there = {number: size for number, size in self._inventory.catalogs.get(name, {}).items() if number > line.dropped}
        lineage = read_lineage(self._layout, name)
        if lineage is None or not there:
            return 0
        here, newest = line.highest if rows_above(self._layout, name) else line.tables[-1], max(there)
        start = remote_start(self._client, name, newest, there[newest])
        if not start.line and not lineage.line:
            return here  # of passes: equal numbers alone are compared
        common = min(here, newest)
        is_one = start.line == lineage.line and common in there
        if is_one:
            with suppress(BadInput):  # those rows are not kept here any more
                is_one = remote_start(self._client, name, common, there[common]).digest == self._digest_here(line, common)
        if not is_one:
            raise BadInput(
                f"{self._client.address} and {self._layout.root} have different rows under {name!r} (up to number {newest} there and {here}"
                f" here), and neither takes the place of the other: `cachestore pull {self._client.address} FOLDER` brings those there into"
                " a new folder; publish one of them under another name",
                option="name",
            )
        return here

    def _digest_here(self, line: Line, number: int) -> str:
        if number in line.tables:
            return catalog_digest(self._layout.catalog(line.name, number))
        return draft_of(read_data_set(self._layout, line.name, number)).digest

    def _require_same(self, name: str, generation: int, size: int) -> None:
        there = remote_start(self._client, name, generation, size)
        if there.digest != catalog_digest(self._layout.catalog(name, generation)):
            raise BadInput(
                f"{self._client.address} has another generation {generation} of {name!r} than {self._layout.root}, and neither is replaced:"
                " use another address or folder, or encode one of them under another name (`cachestore precompute --name`)",
                option="name",
            )


def run_transfer(direction: type[StoreTransfer], client: Client, layout: Layout, request: TransferRequest) -> TransferReport:
    """Push or pull with a client: again, as long as it fails by what a wrong answer or a vanished file may cause."""
    began = time.monotonic()

    def attempt() -> TransferReport:
        with working_folder() as scratch:
            return direction(client, layout, request, scratch).run(began)

    return ask_until_sure(attempt)


def segments_of(catalog: Catalog, snapshot: Snapshot, *, where: Address | Path, command: str) -> set[str]:
    """Return the digests of the segments whose copies a reader of this catalog takes.

    Raises MissingEntry if a value is not there at all: no catalog moves without all that it names. `command` helps then.
    """
    found: set[str] = set()
    for several in (*(column.keys for column in catalog.columns), [key for key, _text in catalog.prompt_keys()]):
        for start in range(0, len(several), _LOCATED_AT_ONCE):
            keys = [Key(key) for key in several[start : start + _LOCATED_AT_ONCE] if key != NO_KEY]
            located = snapshot.locate(keys)
            if located is None:
                missing = next(key for key, locations in zip(keys, snapshot.find(keys), strict=True) if not locations)
                named = f"generation {catalog.generation} of {catalog.name!r}"
                raise MissingEntry(f"{where} lacks entries that {named} names, such as {missing}: {command}")
            found.update(ref.digest for ref in located.segments)
    return found


class _Ended(Exception):
    """Another file failed, or the command is interrupted: this one stops too."""


class Mover:
    """Moves files in threads of its own, which end with the call of `each`. One failure stops all."""

    def __init__(self, jobs: int, total: int, on_progress: Shown | None) -> None:
        self._jobs = jobs
        self._total = total
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.bytes = 0
        """Bytes that have moved."""

    def each(self, doing: str, items: Iterable[T], act: Callable[[T], object]) -> None:
        """Call `act` for every item. Raises what it raises first."""
        todo, running = iter(items), deque[Future[object]]()
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="cachestore-transfer") as threads:
            try:
                while True:
                    running.extend(threads.submit(act, item) for item in islice(todo, self._jobs - len(running)))
                    self.show(doing)
                    if not running:
                        return
                    for future in wait(running, timeout=_SHOW_SECONDS, return_when=FIRST_COMPLETED).done:
                        running.remove(future)
                        future.result()
            except BaseException:
                self._stop.set()  # before the threads are waited for
                raise

    def show(self, doing: str) -> None:
        """Report how far it is. For the caller's thread only."""
        if self._on_progress is not None:
            self._on_progress(doing, self.bytes, self._total)

    def moved(self, size: int) -> None:
        """Count bytes that have moved."""
        with self._lock:
            self.bytes += size

    def go_on(self) -> None:
        """Return, unless all of it should stop."""
        if self._stop.is_set():
            raise _Ended


class UploadedFile:
    """An open file as a client reads it while it uploads. What was read counts as moved; reading raises once the mover stops."""

    def __init__(self, descriptor: int, mover: Mover | None = None) -> None:
        self._descriptor = descriptor
        self._mover = mover
        self._position = 0

    def seek(self, position: int) -> int:
        """Set where the next `read` begins."""
        self._count(position - self._position)
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; all that follow if `size` is negative."""
        wanted = size if size >= 0 else max(0, os.fstat(self._descriptor).st_size - self._position)
        found = bytes(read_at(self._descriptor, wanted, self._position))
        self._count(len(found))
        self._position += len(found)
        return found

    def _count(self, size: int) -> None:
        if self._mover is not None:
            self._mover.go_on()
            self._mover.moved(size)


def pieces_of_remote(client: ReadingClient, file: FileRef, mover: Mover) -> Iterator[bytes]:
    """Yield an object piece by piece, and count its bytes."""
    for start in range(0, file.size, PIECE_BYTES):
        mover.go_on()
        piece = client.get_range(file.key, start, min(PIECE_BYTES, file.size - start))
        mover.moved(len(piece))
        yield piece
