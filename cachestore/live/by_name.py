"""Values by the names that a trainer gives to its cache files, and what they depend on, for as long as the trainer has its encoders."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import ReferenceType, ref

from cachestore.core.keys import Json, Key
from cachestore.live.adapter import refuse
from cachestore.live.facts import fingerprint
from cachestore.live.names import ValueName
from cachestore.live.packing import pack, unpack
from cachestore.live.run import current
from cachestore.live.self_test import check_same, round_trip

_LOOK_SECONDS: Final = 1.0


class ByName:
    """A data backend of a trainer whose cache files are values in the store. What it is asked besides goes to the trainer's own.

    It answers `exists` and `torch_load` for names that were given a key, and there are no other cache files. Threads may share it.
    """

    def __init__(self, own: Any) -> None:
        """`own` is the trainer's backend."""
        self.own = own
        self.made: dict[Key, Any] = {}
        """What a writer of the trainer was given, for the adapter that called it."""
        self._keys: dict[str, Key] = {}
        self._held: dict[str, Any] = {}
        self._asked_at = 0.0
        self._known: list[tuple[list[ReferenceType[Any]], str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

    def named(self, name: str, key: Key) -> ValueName:
        """Give a name a key, and return it so that it knows that."""
        self._keys[name] = key
        return ValueName(key, name)

    def exists(self, name: str) -> bool:
        """Whether the store has the value of this name. What others made since is seen a second later at the latest."""
        if name in self._held or name not in self._keys:
            return name in self._held
        key, store, now = self._keys[name], current().store, time.monotonic()
        if key in store or now - self._asked_at < _LOOK_SECONDS:
            return key in store
        self._asked_at = now
        return not store.missing([key])

    def torch_load(self, name: str) -> Any:
        """Return the value of this name. Raises KeyError for a name without a key, and MissingEntry."""
        return unpack(self._held[name] if name in self._held else current().store.get(self._keys[name]))

    def list_files(self, *_args: Any, **_more: Any) -> list[Any]:
        """No cache file is on the disk."""
        return []

    def write_batch(self, names: Sequence[str], _values: Any) -> None:
        """Do nothing for what is in the store. Ends the run with exit code 2 for anything else."""
        if lacking := [name for name in names if not self.exists(name)]:
            refuse(f"the trainer writes {lacking[0]} by another way than those that the adapter replaces")

    def test(self, point: str, name: str, value: Any, read: Callable[[], Any]) -> None:
        """Self-test: what the trainer's reader returns under a name is what its writer was given. It goes through a temporary store."""
        import torch

        self._held[name] = {part: torch.as_tensor(array) for part, array in round_trip(pack(value)).items()}
        try:
            check_same(point, value, read())
        finally:
            del self._held[name]

    def depends_on(self, encoders: Sequence[Any], facts: Callable[[], Json]) -> str:
        """Return a text for what values depend on: facts, and digests of encoders, each of which is digested once.

        Without encoders, as when the trainer has unloaded them, it is the last that there was. Raises Refused.
        """
        there = [one for one in encoders if one is not None]
        if not there and not self._known:
            refuse("the trainer has no encoder from which can be told what its values depend on")
        for references, text in reversed(self._known):
            if not there or (len(there) == len(references) and all(one() is two for one, two in zip(references, there, strict=True))):
                return text
        text = json.dumps([facts(), *map(fingerprint, there)], sort_keys=True)
        self._known.append(([ref(one) for one in there], text))
        return text
