"""Cache files of a trainer that saves and loads by path: they are named tensors in the store (`store.files`), and none is on the disk.

The trainer's names, and its rules for what is out of date, stay. Paths that are no cache files go to the functions that they went to.
"""

import atexit
import fnmatch
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Final, cast

from cachestore.core.errors import BadInput, MissingEntry
from cachestore.live.adapter import Adapter, refuse
from cachestore.live.run import current
from cachestore.live.tested import SelfTest

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.live.read_only import ReadOnlyFiles
    from cachestore.store.write.files import Files

_SUFFIX: Final = ".safetensors"
_OPENS: Final = ("open", "os.rename")


class NamedFiles:
    """What an adapter puts in the place of `safetensors` and `os` for the paths of cache files. Threads may share it."""

    def __init__(
        self,
        adapter: Adapter,
        *,
        holds: Callable[[str], bool],
        part: Callable[[str, str], str | None],
        self_test: Callable[[str], None],
    ) -> None:
        """Replace what looks for, lists and removes files by path in all of Python, for paths of cache files.

        `holds` says whether a folder, an absolute path, is one where the trainer keeps cache files. `part` gets such a folder and a name
        that ends in `.safetensors`, and returns what the file holds, such as "latents", or None if the trainer does not name its cache
        files so. `self_test` is run by a `live.SelfTest`, before the first file is looked for.
        """
        self._holds, self._part_of = holds, part
        self._self_test = SelfTest(self_test, after=self.close)
        self._lock = threading.RLock()
        self._files: Files | None = None
        self._pid = 0
        self._is_watching = False
        self._counted: dict[str, str] = {}
        for name, new in (("path.exists", self._finding), ("path.isfile", self._finding), ("remove", self._removing)):
            adapter.change("os", name)(new)
        adapter.change("os", "unlink")(self._removing)
        adapter.change("glob", "glob")(self._listing)

    def owns(self, path: Any) -> bool:
        """Whether this is the path of a cache file."""
        return self._part(path) is not None

    def check(self, path: str) -> str:
        """Return a path that the trainer made for a cache file. Ends the run with exit code 2 if it is not named like one."""
        if not self.owns(path):
            refuse(f"the trainer names a cache file {path!r}, which the adapter does not know as one")
        self.begin()
        return path

    def begin(self) -> None:
        """Run the self-test, unless it was run in this process, and refuse from then on what opens a cache file's path on the disk."""
        self._self_test()
        if not self._is_watching and not self._self_test.is_running:
            self._is_watching = True
            sys.addaudithook(self._refuse_to_open)

    def exists(self, path: "str | os.PathLike[str]") -> bool:
        """Whether the store has this cache file."""
        self.begin()
        is_there = self._opened().exists(_named(path))
        if is_there:
            self._count(path, "reused")
        return is_there

    def load_file(self, filename: "str | os.PathLike[str]", device: Any = "cpu", **options: Any) -> dict[str, Any]:
        """As `safetensors.torch.load_file`. Raises FileNotFoundError."""
        del options
        self.begin()
        tensors = _found(self._opened().load, filename)
        self._count(filename, "reused")
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def save_file(
        self, tensors: Mapping[str, Any], filename: "str | os.PathLike[str]", metadata: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """As `safetensors.torch.save_file`. Every process sees the file when this returns, and a crash does not tear or undo it."""
        del options
        self.begin()
        self._opened().save(_named(filename), {name: tensor.detach().cpu() for name, tensor in tensors.items()}, metadata)
        self._count(filename, "encoded")

    def safe_open(self, filename: "str | os.PathLike[str]", *_framework: Any, device: Any = "cpu", **_options: Any) -> "OpenFile":
        """As `safetensors.safe_open`. Raises FileNotFoundError."""
        self.begin()
        return OpenFile(self, filename, device)

    def metadata(self, path: "str | os.PathLike[str]") -> dict[str, str] | None:
        """Return the texts that were saved with a file; None if there are none. Raises FileNotFoundError."""
        self.begin()
        return _found(self._opened().metadata, path) or None

    def keys(self, path: "str | os.PathLike[str]") -> list[str]:
        """Return the names of a file's tensors, sorted, without reading them. Raises FileNotFoundError."""
        self.begin()
        return _found(self._opened().keys, path)

    def remove(self, path: "str | os.PathLike[str]") -> None:
        """As `os.remove`. Raises FileNotFoundError."""
        self.begin()
        if not self._opened().exists(_named(path)):
            raise FileNotFoundError(f"there is no cache file {os.fspath(path)!r} in the store")
        self._opened().remove(_named(path))
        self._count(path, "")

    def glob(self, pattern: str) -> list[str]:
        """Return the paths of cache files that match, sorted. As in the shell, `*` does not match a slash."""
        self.begin()
        folder, name = os.path.split(pattern)
        there = (os.path.split(path) for path in self._opened().glob(f"{_escaped(_named(folder))}/*"))
        found = sorted(one for where, one in there if where == _named(folder) and fnmatch.fnmatchcase(one, name))
        paths = [path for one in found if self.owns(path := os.path.join(folder, one))]
        for path in paths:
            self._count(path, "reused")
        return paths

    def loading(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `load_file` that reads cache files from the store, and calls the trainer's for all others."""

        def load_file(filename: Any, *args: Any, **options: Any) -> Any:
            return (self.load_file if self.owns(filename) else own)(filename, *args, **options)

        return load_file

    def saving(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `save_file` that puts cache files into the store, and calls the trainer's for all others."""

        def save_file(tensors: Any, filename: Any, *args: Any, **options: Any) -> Any:
            return (self.save_file if self.owns(filename) else own)(tensors, filename, *args, **options)

        return save_file

    def opening(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `safe_open` that opens cache files in the store, and calls the trainer's for all others."""

        def safe_open(filename: Any, *args: Any, **options: Any) -> Any:
            return (self.safe_open if self.owns(filename) else own)(filename, *args, **options)

        return safe_open

    def _finding(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def exists(path: Any) -> bool:
            return self.exists(path) if self.owns(path) else own(path)

        return exists

    def _removing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, **options: Any) -> None:
            return self.remove(path) if self.owns(path) else own(path, **options)

        return remove

    def _listing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def glob(pathname: Any, **options: Any) -> list[Any]:
            if not isinstance(pathname, str) or options or not pathname.endswith(_SUFFIX):
                return own(pathname, **options)
            on_disk = own(pathname)
            if not self._holds(os.path.dirname(_named(pathname))):
                return on_disk
            return [path for path in on_disk if not self.owns(path)] + self.glob(pathname)

        return glob

    def _refuse_to_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OPENS and isinstance(arguments[0], str) and self.owns(arguments[0]):
            refuse(f"the trainer opens the cache file {arguments[0]!r} on the disk, past the adapter")

    def _part(self, path: Any) -> str | None:
        text = str(cast("object", path)) if isinstance(path, str | os.PathLike) else ""
        if not text.endswith(_SUFFIX):
            return None
        folder, name = os.path.split(_named(text))
        return self._part_of(folder, name) if self._holds(folder) else None

    def _opened(self) -> "Files | ReadOnlyFiles":
        if (files := current().exported) is not None:
            return files
        if self._files is not None and self._pid == os.getpid():
            return self._files
        with self._lock:
            run = current()
            try:  # a worker reads; if there is nothing to read yet, it is like any other process
                self._files = (run.store if parent_process() is None else run.reader).files(run.name)
            except BadInput:
                self._files = run.store.files(run.name)
            self._pid = os.getpid()
            atexit.register(self.close)
        return self._files

    def close(self) -> None:
        """End what this process has open. The next call opens it again."""
        if self._files is not None and self._pid == os.getpid():
            self._files.close()
        self._files = None

    def _count(self, path: "str | os.PathLike[str]", way: str) -> None:
        """Count each file once: as encoded if this process saved it, and not at all if it removed it."""
        if self._self_test.is_running:
            return
        name = _named(path)
        with self._lock:
            before = self._counted.get(name, "")
            if way == before or (before, way) == ("encoded", "reused"):
                return
            self._counted[name] = way
            change = {one: (one == way) - (one == before) for one in ("reused", "encoded")}
            current().count(self._part(name) or "files", **change)


class OpenFile:
    """One cache file, as `safetensors.safe_open` gives it."""

    def __init__(self, files: NamedFiles, path: "str | os.PathLike[str]", device: Any) -> None:
        self._files, self._path, self._device = files, path, device
        if not files.exists(path):
            raise FileNotFoundError(f"there is no cache file {os.fspath(path)!r} in the store")

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_error: object) -> None:
        """There is nothing to close."""

    def metadata(self) -> dict[str, str] | None:
        """Return the texts that were saved with the file; None if there are none."""
        return self._files.metadata(self._path)

    def keys(self) -> list[str]:
        """Return the names of its tensors, sorted."""
        return self._files.keys(self._path)

    def get_tensor(self, key: str, device: Any = None, dtype: Any = None) -> Any:
        """Return a tensor."""
        return self._files.load_file(self._path)[key].to(device=device or self._device, dtype=dtype)

    get_slice = get_tensor


def _named(path: "str | os.PathLike[str]") -> str:
    return os.path.abspath(path)


def _escaped(text: str) -> str:
    return text.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


def _found(read: Callable[[Any], Any], path: "str | os.PathLike[str]") -> Any:
    try:
        return read(_named(path))
    except MissingEntry as error:
        raise FileNotFoundError(f"there is no cache file {os.fspath(path)!r} in the store") from error
