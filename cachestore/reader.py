"""The read side with tensors out. Takes no lock, writes nothing, starts no thread, and survives fork, spawn and forkserver."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from cachestore.errors import BadInput, CorruptEntry, FormatError, MissingEntry
from cachestore.files.paths import Layout
from cachestore.keys import Json, Key
from cachestore.storage.entry import split
from cachestore.storage.fetch import Checked, Fetcher, Io, Verify, is_gone
from cachestore.storage.index import Verdict
from cachestore.storage.places import Place
from cachestore.storage.segment import read_contents
from cachestore.storage.snapshot import Snapshot, load_snapshot, open_layout
from cachestore.tensors import RawTensor, to_numpy, to_torch

AnyKey = Key | bytes | str
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of an entry without reading its tensors."""

    key: Key
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """(safetensors dtype, shape) by name."""
    meta: Mapping[str, Json]
    size_bytes: int
    segment: str
    """Path of the segment, relative to the store."""

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore ls --json` lists."""
        tensors = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.tensors.items()}
        return {"key": str(self.key), "bytes": self.size_bytes, "segment": self.segment, "tensors": tensors, "meta": dict(self.meta)}


class Reader:
    """A store as it was when it was opened, or last refreshed. Picklable: a worker gets the path and the index's verdict."""

    def __init__(self, path: str | Path, *, verify: Verify = "first", io: Io = "pread", verdict: Verdict | None = None) -> None:
        """Open a store for reading. Raises StoreNotFound, FormatError for a newer format."""
        if verify not in {"first", "always", "never"} or io not in {"pread", "mmap"}:
            message = f'verify is "first", "always" or "never" and io is "pread" or "mmap"; got {verify!r} and {io!r}'
            raise BadInput(message)
        self.layout = open_layout(Layout(Path(path).absolute()))
        self._verify: Verify = verify
        self._io: Io = io
        self._show(load_snapshot(self.layout, verdict=verdict))

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._fetcher = Fetcher(self.layout, Checked(snapshot.segments()), verify=self._verify, io=self._io)
        self._values: dict[str, dict[Key, Mapping[str, Json]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Path, options and the verdict on the index: no descriptor, no lock, no bytes."""
        verdict = self.snapshot.index.verdict if self.snapshot.index is not None else None
        return {"path": str(self.layout.root), "verify": self._verify, "io": self._io, "verdict": verdict}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same store in another process."""
        Reader.__init__(self, state["path"], verify=state["verify"], io=state["io"], verdict=state["verdict"])

    def refresh(self) -> None:
        """See what was published since this reader was opened."""
        before = self.snapshot
        self._fetcher.close()
        self._show(load_snapshot(self.layout, earlier=before))
        before.close()

    def get(self, key: AnyKey, *, as_numpy: bool = False) -> dict[str, Any]:
        """The tensors of one entry, writable and the caller's own. Raises MissingEntry, CorruptEntry."""
        return self.get_many([key], as_numpy=as_numpy)[0]

    def get_many(self, keys: Sequence[AnyKey], *, as_numpy: bool = False) -> list[dict[str, Any]]:
        """The tensors of many entries, in the order of `keys`; read in the order of their places. No keys give no entries.

        Raises MissingEntry naming the first missing keys and their count, or CorruptEntry.
        """
        convert = to_numpy if as_numpy else to_torch
        return [convert(raw) for raw in self.get_raw([Key.parse(key) for key in keys])]

    def get_raw(self, keys: Sequence[Key]) -> list[dict[str, RawTensor]]:
        """As `get_many`, with each tensor as (dtype, shape, buffer)."""
        found = self._find_all(keys)
        order = sorted(range(len(keys)), key=lambda n: (found[n][0].segment.digest, found[n][0].offset))
        entries: dict[int, dict[str, RawTensor]] = {n: self._read(keys[n], found[n], self._fetch) for n in order}
        return [entries[n] for n in range(len(keys))]

    def _find(self, keys: Sequence[Key]) -> list[list[Place]]:
        """Places in this snapshot; in a newer one where its index is gone before a forked child could open it, or damaged."""
        try:
            return self.snapshot.find(keys)
        except (FormatError, FileNotFoundError):
            self.refresh()
            return self.snapshot.find(keys)

    def _find_all(self, keys: Sequence[Key]) -> list[list[Place]]:
        found = self._find(keys)
        if not all(found):
            self.refresh()
            found = self._find(keys)
        missing = [key for key, places in zip(keys, found, strict=True) if not places]
        if missing:
            named = ", ".join(map(str, missing[:3]))
            help_text = "run `cachestore precompute` again, or `cachestore repair`"
            message = f"{len(missing)} of {len(keys)} keys are not in {self.layout.root}: {named}; {help_text}"
            raise MissingEntry(message)
        return found

    def _read(self, key: Key, places: list[Place], look: Callable[[Key, Place], T]) -> T:
        """Look at one entry: the first copy, else another, else once more in a newer snapshot."""
        try:
            return _look_at_any(key, places, look)
        except (CorruptEntry, FormatError, OSError) as error:
            if not is_gone(error):
                raise
        self.refresh()
        return _look_at_any(key, self._find_all([key])[0], look)

    def _fetch(self, key: Key, place: Place) -> dict[str, RawTensor]:
        return split(place.specs, self._fetcher.fetch(key, place))

    def describe(self, key: AnyKey) -> Description:
        """Names, dtypes, shapes and the JSON value of an entry. Raises MissingEntry, FormatError."""
        parsed = Key.parse(key)
        return self._read(parsed, self._find_all([parsed])[0], self._describe)

    def _describe(self, key: Key, place: Place) -> Description:
        digest = place.segment.digest
        path = self.layout.segment(digest)
        if digest not in self._values:
            self._values[digest] = {entry.key: entry.meta for entry in read_contents(path).entries}
        tensors = {spec.name: (spec.dtype, spec.shape) for spec in place.specs}
        return Description(key, tensors, self._values[digest][key], place.size_bytes, str(path.relative_to(self.layout.root)))

    def __contains__(self, key: AnyKey) -> bool:
        """Whether the store held this key when it was opened or refreshed."""
        return bool(self._find([Key.parse(key)])[0])

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self.snapshot)

    def keys(self) -> Iterator[Key]:
        """All keys, each once."""
        return self.snapshot.keys()

    @property
    def generation(self) -> int:
        """The number of the index this reader looks through, or -1 without one."""
        return self.snapshot.generation

    def close(self) -> None:
        """Close every file. Calling it twice is fine."""
        self._fetcher.close()
        self.snapshot.close()

    def __enter__(self) -> Self:
        """Return the open reader."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()


def _look_at_any(key: Key, places: list[Place], look: Callable[[Key, Place], T]) -> T:
    """What the first copy gives that is not gone or damaged; the last one's error where all are."""
    *others, last = places
    for place in others:
        try:
            return look(key, place)
        except (CorruptEntry, FormatError, OSError) as error:
            if not is_gone(error):
                raise
    return look(key, last)
