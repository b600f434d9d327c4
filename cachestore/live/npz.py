"""For trainers whose cache is npz: `numpy.savez` and `numpy.load` mean the store where they get the name of a value in place of a path."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cachestore.core.keys import Key
from cachestore.live.adapter import refuse
from cachestore.live.arming import armed
from cachestore.live.names import ValueName
from cachestore.live.run import current
from cachestore.live.self_test import called_once, check_among, check_same, round_trip

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.live.read_only import ReadOnlyFiles


class Arrays(dict[str, Any]):
    """The arrays of a value by name, as `numpy.load` returns them."""

    first_asked: str | None = None
    """The first name that a reader looked for."""

    @property
    def files(self) -> list[str]:
        """The names, as `NpzFile` has them."""
        return [*self]

    def __contains__(self, name: object) -> bool:
        self.first_asked = self.first_asked or str(name)
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        self.first_asked = self.first_asked or name
        raise KeyError(f"{name} is not a file in the archive")

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: there is no file."""


class NpzFiles:
    """What an adapter puts in the place of `numpy` and `os` where the trainer saves and loads npz files by path.

        files = live.NpzFiles()
        adapter.change("library.caching", "np")(files.numpy)

    What was saved under a `ValueName` is held in memory until the adapter takes it into the store, so `load` returns it before it is there.
    In a run that reads a data set of `precompute`, the paths of its files mean the store too. All other paths are files as ever.
    """

    def __init__(self) -> None:
        self._held: dict[Key, Arrays] = {}

    def numpy(self, own: Any) -> Any:
        """Return what takes the place of a module's global variable `np`."""
        return own if isinstance(own, _Numpy) else _Numpy(own, self._held)

    def os(self, own: Any) -> Any:
        """Return what takes the place of a module's global variable `os`: `os.path.exists` knows the files of a data set that is read."""

        def exists(path: Any) -> bool:
            return _files_with(path) is not None or own.path.exists(path)

        path = SimpleNamespace(**{**vars(own.path), "exists": exists})
        return SimpleNamespace(**{**vars(own), "path": path}) if own is os else own

    def is_held(self, name: ValueName) -> bool:
        """Whether a value was saved, and was not taken yet."""
        return name.key in self._held

    def take(self, kind: str, names: Iterable[ValueName], read: Callable[[ValueName], Any]) -> dict[Key, dict[str, Any]]:
        """Return what was saved under these names, for `encode` of `fill`; it is held no longer. `read` is of the trainer, as `kind` is.

        Ends the run with exit code 2 if nothing was saved under one of them, or if what `read` returns of the first is not what was saved.
        """
        names = [*names]
        for name in names:
            if name.key not in self._held:
                refuse(f"{kind} saved nothing for {name} by numpy.savez")
        for name in names[:1]:
            check_among(f"the reader of {kind}", self._held[name.key], read(name))
        return {name.key: self._held.pop(name.key) for name in names}

    def drop(self) -> None:
        """Hold nothing any more: another rank made these values."""
        self._held.clear()

    def test_writer(
        self, kind: str, prefix: str, given: Any, write: Callable[[ValueName, str], None], read: Callable[[ValueName], Any]
    ) -> None:
        """Put made-up values through the trainer's writer, a store and its reader. Ends the run with exit code 2 unless `given` comes back.

        `write` gets a name, and what the reader adds to `prefix` in the name of the array that it asks for first.
        """
        name = ValueName(Key(bytes([2] * 16)), str(Path(tempfile.gettempdir(), "cachestore-self-test")))
        asked = self._held[name.key] = Arrays()
        with suppress(LookupError, ValueError, OSError):
            read(name)
        del self._held[name.key]
        if asked.first_asked is None:
            refuse(f"self-test: the reader of {kind} does not read by numpy.load")
        write(name, asked.first_asked.removeprefix(prefix))
        self._put_through_store(kind, name)
        check_same(f"the reader of {kind}", given, read(name))
        del self._held[name.key]

    def test_encoder(
        self,
        kind: str,
        items: Iterable[tuple[ValueName, Any]],
        in_memory: Callable[[Any], Any],
        save: Callable[[Any], None],
        read: Callable[..., Any],
        *,
        once: tuple[Any, Sequence[str]] | None = None,
    ) -> None:
        """Compare what the trainer's reader returns with what its encoder leaves in memory, for the first value that the store lacks.

        It is held then. If nothing lacks, the first value is read and compared with what the store has. Both `in_memory` and `save` encode:
        the methods of the object that are named by `once` run in the first of them, and the second gets what they returned.
        """
        store, items = current().store, [*items]
        name, item = next(((name, item) for name, item in items if name.key not in store), items[0])
        if name.key in store:
            check_among(f"the reader of {kind}", current().get(name), read(name))
            return
        with nullcontext() if once is None else called_once(once[0], *once[1]):
            expected = in_memory(item)
            save(item)
        self._put_through_store(kind, name)
        check_same(f"the reader of {kind}", expected, read(name))

    def _put_through_store(self, kind: str, name: ValueName) -> None:
        """Replace what was saved under a name by what a store returns for it."""
        if name.key not in self._held:
            refuse(f"self-test: {kind} does not save by numpy.savez")
        self._held[name.key] = Arrays(round_trip(self._held[name.key]))


class _Numpy:
    """numpy, but for names of values."""

    def __init__(self, own: Any, held: dict[Key, Arrays]) -> None:
        self.own, self._held = own, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def savez(self, file: Any, *arrays: Any, **named: Any) -> None:
        if isinstance(file, ValueName):
            self._held[file.key] = Arrays({name: self.own.asanyarray(value) for name, value in named.items()})
        elif (files := _files_with(file)) is not None:
            files.save(file)
        else:
            self.own.savez(file, *arrays, **named)

    savez_compressed = savez

    def load(self, file: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(file, ValueName):
            files = _files_with(file)
            return self.own.load(file, *rest, **options) if files is None else Arrays(files.load(file))
        return self._held[file.key] if file.key in self._held else Arrays(current().get(file))


def _files_with(file: Any) -> "ReadOnlyFiles | None":
    """Return the files of the data set that this run reads, if this is one of them."""
    files = current().exported if armed() is not None and isinstance(file, str | Path) else None
    return files if files is not None and files.exists(file) else None
