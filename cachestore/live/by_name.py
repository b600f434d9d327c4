"""Values by the names that a trainer gives to its cache files: made once by all its processes, and found where it looks for a file."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

from cachestore.core.errors import MissingEntry
from cachestore.core.keys import Json, Key
from cachestore.live.adapter import refuse
from cachestore.live.facts import fingerprint, precision
from cachestore.live.packing import pack, unpack
from cachestore.live.run import current
from cachestore.live.self_test import check_same, round_trip
from cachestore.live.watching import watched

_LOOK_SECONDS: Final = 1.0
Wanted: TypeAlias = Sequence[tuple[Key, Mapping[str, Any]]]
"""(key, item) pairs; an item has `id`, its row in the data set, and `name`, that of its cache file."""


class ByName:
    """A data backend of a trainer whose cache files are values in the store. What it is asked besides goes to the trainer's own.

    A name has the value that was last asked for under it, by `make` or `lacking`. There are no other cache files. Threads may share it.
    """

    def __init__(
        self,
        own: Any,
        part: str,
        settings: Sequence[Any],
        values: Collection[str],
        others: Collection[str],
        *,
        wait: Callable[[], object] | None = None,
    ) -> None:
        """Put values in the place of files.

        Args:
            own: the trainer's backend.
            part: values become rows of the data set `NAME/PART`.
            settings: the objects with the trainer's settings. While it encodes, reading a field of theirs that is in neither of the next
                two ends the run with exit code 2, naming the field.
            values: the fields on which values depend, as the first of the objects has them.
            others: fields that encoders read and on which values do not depend.
            wait: returns when the trainer's writer has saved what was encoded. Without it, encoding returns the values.
        """
        self.own, self.part, self._wait = own, part, wait
        self._settings, self._values, self._others = settings, values, others
        self._keys: dict[str, Key] = {}
        self._saved: dict[str, Any] | None = None
        """What the trainer's writer was given, while it is to write."""
        self._held: dict[str, Any] = {}
        self._asked_at = 0.0
        self._known: list[tuple[list[ReferenceType[Any]], str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

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
        """Return the value of this name. Raises MissingEntry, also for a name that nothing asked for."""
        if name in self._held:
            return unpack(self._held[name])
        if name not in self._keys:
            raise MissingEntry(f"this run did not ask for {name} when it made what is missing")
        return unpack(current().store.get(self._keys[name]))

    def torch_save(self, value: Any, name: str) -> None:
        """Take a value that was to be made. Does nothing for what is in the store; ends the run with exit code 2 for anything else."""
        if self._saved is not None:
            self._saved[name] = value
        elif not self.exists(name):
            refuse(f"the trainer writes {name} by another way than those that the adapter replaces")

    def write_batch(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Save several values."""
        for name, value in zip(names, values, strict=True):
            self.torch_save(value, name)

    def list_files(self, *_args: Any, **_more: Any) -> list[Any]:
        """No cache file is on the disk."""
        return []

    def make(
        self,
        wanted: Wanted,
        encode: Callable[[list[Any]], Any],
        *,
        batch_size: int,
        part_of: Callable[[Wanted], Wanted] | None = None,
    ) -> None:
        """Make what the store lacks: when this returns, all that is wanted is there for every process.

        `encode` gets items, and has the trainer save each under its name, or returns their values. `part_of` picks what this process makes
        first: then it makes what others were to make and did not.
        """

        def encode_batch(batch: Wanted) -> Mapping[Any, Mapping[str, Any]]:
            with watched(self._settings, self._values, self._others):
                values, saved = self._saving(lambda: encode([item for _key, item in batch]))
            made = values if self._wait is None else [saved[item["name"]] for _key, item in batch]
            return {key: pack(value) for (key, _item), value in zip(batch, made, strict=True)}

        self._keys.update({item["name"]: key for key, item in wanted})
        for some in (wanted,) if part_of is None else (part_of(wanted), wanted):
            current().make(self.part, some, encode_batch, batch_size=batch_size)

    def lacking(self, wanted: Wanted) -> list[Any]:
        """Return the items whose values the store lacks. The others become rows of the data set."""
        missing = {*current().store.missing([key for key, _item in wanted])}
        self._keys.update({item["name"]: key for key, item in wanted})
        current().make(self.part, [(key, item) for key, item in wanted if key not in missing], lambda _batch: {})
        return [item for key, item in wanted if key in missing]

    def test(
        self,
        point: str,
        save: Callable[[Any], object],
        read: Callable[[], Any],
        shown: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        """Self-test: `read` returns what `save` saves, after it went through a temporary store. `save` gets a made-up tensor `[1, 4, 6]`.

        `shown` is what the trainer makes of a value that it has loaded.
        """
        import torch

        _returned, saved = self._saving(lambda: save(torch.arange(24.0).reshape(1, 4, 6)))
        [(name, value)] = saved.items()
        self._held[name] = {part: torch.as_tensor(array) for part, array in round_trip(pack(value)).items()}
        try:
            check_same(point, shown(value), read())
        finally:
            del self._held[name]

    def _saving(self, do: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Return what a call returns, and by name what it has the trainer's writer save."""
        self._saved = saved = dict[str, Any]()
        try:
            returned = do()
            if self._wait is not None:
                self._wait()
        finally:
            self._saved = None
        return returned, saved

    def depends_on(self, encoders: Sequence[Any], *facts: Json) -> str:
        """Return a text for what values depend on: facts, settings, precision, and digests of encoders, each of which is digested once.

        Without encoders, as when the trainer has unloaded them, it is the last that there was. Raises Refused.
        """
        there = [one for one in encoders if one is not None]
        if not there and not self._known:
            refuse("the trainer has no encoder from which can be told what its values depend on")
        for references, text in reversed(self._known):
            if not there or (len(there) == len(references) and all(one() is two for one, two in zip(references, there, strict=True))):
                return text
        settings = {name: str(getattr(self._settings[0], name, None)) for name in self._values}
        text = json.dumps([facts, settings, precision(), *map(fingerprint, there)], sort_keys=True)
        self._known.append(([ref(one) for one in there], text))
        return text
