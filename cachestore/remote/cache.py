"""The local cache: a folder with copies of what readers need of stores in object stores.

    LOCAL/cachestore-cache.json                    the marker of such a folder; it is no store
    LOCAL/<store id>/origin.json                   the address of the store
    LOCAL/<store id>/catalogs/…  index/…           copies, under the paths that they have in a store; each was compared with its checksum
    LOCAL/<store id>/parts/<segment's digest>      sparse, of the segment's size: an entry lies where it lies in the segment
    LOCAL/<store id>/have/<segment's digest>       one byte for each entry: 1 if it was written into the part
    LOCAL/<store id>/tmp/                          copies that are being made

Any number of processes read and write it at once, without locks. `have` is a hint: a reader compares each entry with its checksum, and
fetches it again if it differs. So nothing here is synced, and whatever a killed process left behind is harmless.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from cachestore.core.errors import BadInput, FormatError, NewerFormat, ReadFailed, WriteFailed, numbered
from cachestore.core.keys import Json
from cachestore.core.words import in_short
from cachestore.files import in_use
from cachestore.files.opening import FileIdentity, free_bytes, is_link, names_in, read_whole, reason_of
from cachestore.files.paths import CACHE_MARKER, MARKER, decode_name, parse_catalog
from cachestore.files.records import decode_record, encode_record

FORMAT: Final = "cachestore-cache"
ORIGIN_FORMAT: Final = "cachestore-origin"
VERSION: Final = 1
LOCAL: Final = "CACHESTORE_LOCAL"
"""The variable with the folder for caches, where the code does not name one."""

TOUCH_SECONDS: Final = 600.0
"""A reader touches the parts that it uses at most so often."""
_IN_USE_SECONDS: Final = 3600.0
"""What was touched since then is in use, and is never removed to make room."""
_STALE_SECONDS: Final = 86400.0
_FREE_FRACTION: Final = 0.9
"""How much of a disk's free space a cache takes if it has no limit."""
_GRANTS: Final = 64
"""A process takes a 64th of the room that is left, and measures again when that is used up: so several processes keep the limit."""
_EDGES: Final = 8192
"""What the blocks at both ends of a range may take beyond its bytes."""
_LIMIT_BYTES: Final = 1 << 20
_DIGEST: Final = re.compile("[0-9a-f]{32}")
_KINDS: Final = ("have", "parts")
"""In the order in which they are removed: without its bytes in `have`, a part counts as empty."""


class CachedPart(NamedTuple):
    """The local copy of a segment's values."""

    store: str
    digest: str
    bytes: int
    """What it takes on the disk."""
    used_at: float
    """When a reader used it last, by the file's time."""


@dataclass(frozen=True, slots=True)
class CachedStore:
    """What a cache holds of one store."""

    store: str
    """The store's id."""
    address: str
    """Where it is; empty if that is not known."""
    datasets: dict[str, list[int]]
    """The generations of which the catalog is here."""
    segments: int
    """Segments of which values are here."""
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class CacheReport:
    """What is in a local cache."""

    folder: str
    stores: tuple[CachedStore, ...]
    bytes: int
    """What all of it takes on the disk."""
    freed_bytes: int = 0

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore cache --json` prints."""
        return asdict(self)


def is_store_id(text: object) -> bool:
    """Whether a text can be a store's id. Paths are made of it."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def open_cache(folder: Path) -> None:
    """Make a folder a cache. What else lies in it stays. Raises BadInput for a store, FormatError for a newer cache, WriteFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = names_in(folder, is_root=True)
        if MARKER in names:
            raise BadInput(f"{folder} is a store, not a folder for copies of other stores: pass another folder as local", option="local")
        marker = folder / CACHE_MARKER
        here = identity_of(marker)
        try:
            decode_record(FORMAT, VERSION, read_whole(marker, limit_bytes=_LIMIT_BYTES), where=marker)
        except NewerFormat:
            raise
        except (FormatError, OSError):  # there is none, or anything may have happened to it
            copy_file(marker, folder, encode_record(FORMAT, VERSION, {}), instead_of=here)
    except FileNotFoundError as error:
        raise ReadFailed(f"{folder} was removed while it was opened: run the same command again") from error
    except OSError as error:
        raise _refusal(folder, error) from error


def _refusal(path: Path, error: OSError) -> OSError:
    if isinstance(error, ReadFailed | WriteFailed):
        return error
    help_text = "make room there, or pass another folder as local, then run the same command again"
    return numbered(WriteFailed(f"cannot write {path}: {reason_of(error)}; {help_text}"), error)


def identity_of(path: Path) -> FileIdentity | None:
    """Return what lies under a name, whatever it is; None if nothing does."""
    try:
        return FileIdentity.of(path.lstat())
    except OSError:
        return None


def copy_file(
    final: Path, temporary_folder: Path, data: bytes | Callable[[Path], object], *, instead_of: FileIdentity | None = None
) -> None:
    """Put a file under its final name, complete when visible, unless one is there. `data` may be a function that makes a file.

    With `instead_of` it takes the place of this one, which is damaged; a folder is renamed, and keeps what is in it. Raises WriteFailed.
    """
    temporary = temporary_folder / f"{os.getpid()}-{os.urandom(8).hex()}.tmp"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            temporary.write_bytes(data)
        else:
            data(temporary)
        if instead_of is not None and identity_of(final) == instead_of:
            set_aside_folder(final)
            in_use.replace(temporary, final)
        else:  # another process may have made it meanwhile
            with suppress(FileExistsError):
                os.link(temporary, final)
    except OSError as error:
        raise _refusal(final, error) from error
    finally:
        with suppress(OSError):
            in_use.unlink(temporary)


def make_folder(folder: Path) -> None:
    """Make a folder in the cache. A link, or anything else under its name, is renamed. Raises OSError."""
    if os.path.lexists(folder) and (is_link(folder) or not folder.is_dir()):
        in_use.rename(folder, _aside(folder))
    folder.mkdir(exist_ok=True)


def set_aside_folder(path: Path) -> None:
    """Rename a folder that lies where a file belongs, unless it is empty; somebody may want what is in it. Raises OSError."""
    if path.is_dir() and not is_link(path):
        aside = _aside(path)
        in_use.rename(path, aside)
        with suppress(OSError):
            aside.rmdir()


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}.aside")


def make_way(path: Path) -> None:
    """Remove or rename what cannot be a copy: a folder, a link, a fifo, a device, an unreadable file. Does nothing if the disk refuses."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            set_aside_folder(path)
        elif not stat.S_ISREG(status.st_mode) or not os.access(path, os.R_OK):
            in_use.unlink(path, seconds=0.0)


@dataclass(frozen=True, slots=True)
class StoreCache:
    """The folder of one store in a cache."""

    folder: Path
    """The cache."""
    store_id: str

    @property
    def root(self) -> Path:
        """The folder of the store's copies."""
        return self.folder / self.store_id

    @property
    def temporary(self) -> Path:
        """Where copies are made."""
        return self.root / "tmp"

    def part(self, digest: str) -> Path:
        """The values of a segment."""
        return self.root / "parts" / digest

    def have(self, digest: str) -> Path:
        """One byte for each entry of a segment."""
        return self.root / "have" / digest

    def open(self, address: str) -> None:
        """Make the folders, note the address, and remove what killed processes left half made a day ago. Raises as `open_cache`.

        What cannot be written here is not needed to read: values are then read through.
        """
        open_cache(self.folder)
        self.make_folders()
        with suppress(OSError):
            origin = self.root / "origin.json"
            if not _address_in(self.root):
                record = encode_record(ORIGIN_FORMAT, VERSION, {"address": address})
                copy_file(origin, self.temporary, record, instead_of=identity_of(origin))
        for name in _names(self.temporary):
            path = self.temporary / name
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path) if path.is_dir() else in_use.unlink(path, seconds=0.0)

    def make_folders(self) -> None:
        """Make those that are missing, also where something else is in their place, unless the disk refuses it."""
        with suppress(OSError):
            for folder in (self.root, *(self.root / name for name in (*_KINDS, "catalogs", "index", "tmp"))):
                make_folder(folder)


def _names(folder: Path) -> list[str]:
    try:
        return names_in(folder)
    except (FormatError, ReadFailed):
        return []


def _address_in(root: Path) -> str:
    with suppress(FormatError, OSError):
        found = decode_record(ORIGIN_FORMAT, VERSION, read_whole(root / "origin.json", limit_bytes=_LIMIT_BYTES), where=root)
        return str(found.get("address", ""))
    return ""


def parts_in(folder: Path) -> Iterator[CachedPart]:
    """Yield the parts in a cache, of all stores."""
    for store in filter(is_store_id, names_in(folder, is_root=True)):
        for digest in filter(_DIGEST.fullmatch, _names(folder / store / "parts")):
            with suppress(OSError):
                status = (folder / store / "parts" / digest).stat()
                used_at = status.st_mtime
                with suppress(OSError):
                    used_at = max(used_at, (folder / store / "have" / digest).stat().st_mtime)
                yield CachedPart(store, digest, _blocks(status), used_at)


def _blocks(status: os.stat_result) -> int:
    return getattr(status, "st_blocks", -(-status.st_size // 512)) * 512


def used_bytes(folder: Path) -> int:
    """Return what the copies in a cache take on the disk."""
    total = 0
    for store in filter(is_store_id, names_in(folder, is_root=True)):
        for top, _folders, files in os.walk(folder / store):
            for name in files:
                with suppress(OSError):
                    total += _blocks(Path(top, name).lstat())
    return total


def default_limit(folder: Path) -> int:
    """Return the limit of a cache for which none was given: what it takes now, and nine tenths of what is free."""
    return used_bytes(folder) + int(_FREE_FRACTION * free_bytes(folder))


def make_room(folder: Path, size: int, limit: int, keep: Collection[tuple[str, str]]) -> int:
    """Remove parts until `size` bytes more fit below the limit, those first that were not used for longest. Returns the bytes that fit.

    Parts in `keep`, by (store id, digest), stay, and so do those that some reader used in the last hour. A process that has a
    removed one open can still read it.
    """
    left = limit - used_bytes(folder)
    if left < size:
        for part in sorted(parts_in(folder), key=lambda part: part.used_at):
            if left >= size:
                break
            if (part.store, part.digest) not in keep and time.time() - part.used_at > _IN_USE_SECONDS:
                left += part.bytes if _remove(folder / part.store, part.digest) else 0
    return max(0, left)


def _remove(root: Path, digest: str) -> bool:
    try:
        for kind in _KINDS:
            in_use.unlink(root / kind / digest, missing_ok=True, seconds=0.0)
    except OSError:
        return False
    return True


class Room:
    """How much this process may still write into a cache. The limit counts what the files take on the disk."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._granted = 0
        self._pending = 0
        """Bytes that were taken and are not written yet."""
        self.is_full = limit <= 0
        """Whether nothing more is written. That stays so until the data set is opened again."""

    def take(self, size: int) -> bool:
        """Return whether so many bytes may be written, and count them. Call `written` later."""
        if self._granted < size + _EDGES and not self.is_full:
            left = self._limit - used_bytes(self._folder) - self._pending
            self._granted = max(left // _GRANTS, size + _EDGES)
            self.is_full = left < size + _EDGES
        if self.is_full:
            return False
        self._granted -= size + _EDGES
        self._pending += size + _EDGES
        return True

    def written(self, size: int) -> None:
        """Note that bytes that were taken are on the disk, or that writing them failed."""
        self._pending -= size + _EDGES


def read_cache(folder: Path, *, clear: bool = False) -> CacheReport:
    """Return what is in a cache; with `clear`, after its copies were removed. Raises BadInput for a folder that is none, ReadFailed."""
    names = names_in(folder, is_root=True)
    if CACHE_MARKER not in names:
        raise BadInput(f"{folder} is no folder with copies of stores (no {CACHE_MARKER} in it): give the folder that you passed as local=")
    freed = 0
    if clear:
        before = used_bytes(folder)
        for part in parts_in(folder):
            _remove(folder / part.store, part.digest)
        for store in filter(is_store_id, names):
            _clear(folder / store)
        freed = before - used_bytes(folder)
    stores: list[CachedStore] = []
    for store in filter(is_store_id, names_in(folder, is_root=True)):
        catalogs, datasets = folder / store / "catalogs", dict[str, list[int]]()
        for encoded in _names(catalogs):
            numbers = sorted(number for number in map(parse_catalog, _names(catalogs / encoded)) if number is not None)
            if numbers and (name := decode_name(encoded)) is not None:
                datasets[name] = numbers
        sizes = [part.bytes for part in parts_in(folder) if part.store == store]
        stores.append(CachedStore(store, _address_in(folder / store), datasets, len(sizes), sum(sizes)))
    return CacheReport(str(folder), tuple(stores), used_bytes(folder), freed)


def _clear(root: Path) -> None:
    """Remove the files of a store's copies: those that are ours by name. Folders with anything else in them stay."""
    for pattern in ("have/*", "parts/*", "index/*.lmdb", "catalogs/*/*.safetensors", "tmp/*", "origin.json"):
        for path in root.glob(pattern):
            with suppress(OSError):
                if pattern not in {"have/*", "parts/*"} or _DIGEST.fullmatch(path.name):
                    in_use.unlink(path, seconds=0.0)
    for path in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
        with suppress(OSError):
            path.rmdir()
    with suppress(OSError):
        root.rmdir()
