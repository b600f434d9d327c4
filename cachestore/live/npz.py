"""For trainers whose cache is npz: `numpy.savez` and `numpy.load` mean the store where they get the name of a value in place of a path.

What was saved is held in memory until the adapter takes it into the store, so `load` returns it before it is there.
"""

from collections.abc import Callable, Iterable
from typing import Any

from cachestore.core.keys import Key
from cachestore.live.adapter import refuse
from cachestore.live.names import ValueName
from cachestore.live.run import current
from cachestore.live.self_test import check_among, round_trip


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

    def __enter__(self) -> "Arrays":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: there is no file."""


_held: dict[Key, Arrays] = {}


class _Numpy:
    """numpy, but for names of values."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def savez(self, file: Any, *arrays: Any, **named: Any) -> None:
        if isinstance(file, ValueName):
            _held[file.key] = Arrays({name: self.own.asanyarray(value) for name, value in named.items()})
        else:
            self.own.savez(file, *arrays, **named)

    savez_compressed = savez

    def load(self, file: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(file, ValueName):
            return self.own.load(file, *rest, **options)
        return _held[file.key] if file.key in _held else Arrays(current().get(file))


def numpy_for_names(own: Any) -> Any:
    """Return what takes the place of a module's global variable `np`."""
    return own if isinstance(own, _Numpy) else _Numpy(own)


def is_held(name: ValueName) -> bool:
    """Whether a value was saved, and was not taken yet."""
    return name.key in _held


def take(writer: str, names: Iterable[ValueName], read: Callable[[ValueName], Any]) -> dict[Key, dict[str, Any]]:
    """Return what was saved under these names, for `encode` of `fill`; it is held no longer. `writer` and `read` are of the trainer.

    Ends the run with exit code 2 if nothing was saved under one of them, or if what `read` returns of the first is not what was saved.
    """
    names = [*names]
    for name in names:
        if name.key not in _held:
            refuse(f"{writer} saved nothing for {name} by numpy.savez")
    for name in names[:1]:
        check_among(f"the reader of what {writer} saves", _held[name.key], read(name))
    return {name.key: _held.pop(name.key) for name in names}


def drop() -> None:
    """Hold nothing any more: another rank made these values."""
    _held.clear()


def first_asked(reader: str, name: ValueName, read: Callable[[ValueName], Any]) -> str:
    """Return which array a reader of the trainer asks for first, so that an adapter learns how it calls them. Refused if it asks for none."""
    asked = _held[name.key] = Arrays()
    try:
        read(name)
    except (LookupError, ValueError, OSError):
        pass
    finally:
        _held.pop(name.key, None)
    if asked.first_asked is None:
        refuse(f"self-test: {reader} does not read by numpy.load")
    return asked.first_asked


def put_through_store(writer: str, name: ValueName) -> None:
    """Replace what was saved under a name by what a store returns for it. Refused if nothing was saved."""
    if name.key not in _held:
        refuse(f"self-test: {writer} does not save by numpy.savez")
    _held[name.key] = Arrays(round_trip(_held[name.key]))
