"""Read, and make what is missing: for a trainer that encodes as it goes. Work that is known beforehand is `fill`'s.

Two processes that miss the same key at once both make it, which is harmless: a key has interchangeable values, of which readers take one.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, cast, get_args

from cachestore.core.arguments import as_pairs, as_word, check_function, refuse
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, EncodeFailed, MissingEntry
from cachestore.core.keys import Key, by_key
from cachestore.core.tensors import to_numpy, to_raw, to_torch
from cachestore.core.words import first_of
from cachestore.storage.append import Acknowledged, Appender, SegmentLimits
from cachestore.storage.commit import UNCOVERED_LIMIT
from cachestore.store.reader import AnyKey
from cachestore.store.writer import Store

OnMiss = Literal["raise", "encode", "skip"]
Encode = Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]

AGE_SECONDS: Final = 300.0
"""What was made is published by the first call after so long, so that a trainer's few misses a batch do not become a file each."""

_META: Final = {"encoder": "values"}
"""As `fill` writes it."""


class ReadThrough:
    """Values by key, with what is missing made in one call for a whole request.

        with cs.open("cache/", mode="a") as store, ReadThrough(store, encode, on_miss="encode") as read:
            embeds = [entry["embeds"] for entry in read([(cs.key("clip", path), path) for path in paths])]

    What was made can be read here at once. It is published, durable and found by others after their `refresh`, when 256 MiB are gathered,
    at the first call after 5 minutes, and by `close`; until then it is lost if this process is killed. Safe in several processes at once,
    each with a ReadThrough of its own; one belongs to one thread of one process. A forked child may read through an inherited one, and
    not make anything. Constructing it starts nothing.
    """

    def __init__(
        self, store: Store, encode: Encode | None = None, on_miss: OnMiss = "raise", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read through a store.

        Args:
            store: open; with `mode="a"` where something is to be made.
            encode: as `fill` has it: called in this thread with a list of (key, item), each key once; returns `{key: {name: tensor}}`
                for exactly these keys, torch tensors or numpy arrays. What it raises is raised by the call, and nothing of that
                request is kept.
            on_miss: what to do about keys that the store does not hold: "raise" MissingEntry, "encode" them, or "skip" them, which
                gives None in their place.
            clock: seconds that only rise.

        Raises:
            BadInput: another `on_miss`; or "encode" without a function, or with a store that is open for reading.
        """
        if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
            refuse("store", "what cs.open(path) returned", store)
        as_word("on_miss", on_miss, get_args(OnMiss))
        if encode is not None:
            check_function("encode", encode)
        if on_miss == "encode" and (encode is None or store.mode != "a"):
            raise BadInput(
                f'on_miss="encode" needs encode= and a store open with mode="a" in the process that encodes: {store.layout.root}'
            )
        self._store = store
        self._encode = encode
        self._on_miss: OnMiss = on_miss
        self._pid = os.getpid()
        self._appender = Appender(store.layout, limits=SegmentLimits(age_seconds=AGE_SECONDS), clock=clock)
        self._gathered: dict[Key, dict[str, RawTensor]] = {}
        """What was made here and is not published yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Elsewhere the store is open for reading, so one that encodes is refused there."""
        return ReadThrough, (self._store, self._encode, self._on_miss)

    def __repr__(self) -> str:
        return f"ReadThrough({self._store!r}, on_miss={self._on_miss!r})"

    def __call__(self, wanted: Iterable[tuple[AnyKey, Any]], *, as_numpy: bool = False) -> list[dict[str, Any] | None]:
        """The tensors of each (key, item), in the order of the request: writable, the caller's own, on the CPU, made or read alike.

        A key may come twice; its first item counts. With "skip" there is None for what is missing. Nothing gives nothing. `as_numpy` as in
        `Store.get`. Raises MissingEntry, CorruptEntry, BadInput, EncodeFailed for an answer that does not fit, WriteFailed.
        """
        items: dict[Key, Any] = {}
        keys: list[Key] = []
        for key, item in as_pairs("wanted", wanted):
            keys.append(Key.parse(key))
            items.setdefault(keys[-1], item)
        asked = [key for key in items if key not in self._gathered]
        # Where a missing key costs encoding, others' latest work is looked at before.
        missing = self._store.missing(asked, look_again=self._on_miss != "skip")
        if missing and self._on_miss == "raise":
            raise MissingEntry(
                f"{len(missing)} of {len(items)} keys are not in {self._store.layout.root}: {first_of(missing)}; encode them with"
                ' `cachestore.fill` first, or pass on_miss="encode" or on_miss="skip"'
            )
        made = self._make([(key, items[key]) for key in missing]) if missing and self._on_miss == "encode" else {}
        absent = set(missing)
        here = {key: self._gathered[key] for key in items if key in self._gathered} | made
        stored = [key for key in items if key not in here and key not in absent]
        read = dict(zip(stored, self._store.get_raw(stored), strict=True))
        if self._appender.is_due:
            self.close()
        convert = to_numpy if as_numpy else to_torch
        return [convert(raw) if raw is not None else None for raw in _handed_out(keys, here, read)]

    def _make(self, missing: list[tuple[Key, Any]]) -> dict[Key, dict[str, RawTensor]]:
        """Have the caller's function make these, and gather them. All are as they should be before the first is kept."""
        assert self._encode is not None
        self._appender.check_process()
        answer = by_key(self._encode(list(missing)))
        if set(answer) != {key for key, _item in missing}:
            raise EncodeFailed(f"encode returned {len(answer)} keys, which are not the {len(missing)} keys that it was asked for")
        made = {key: _copied(to_raw(_named(key, tensors))) for key, tensors in answer.items()}
        for key, _item in missing:
            closed = self._appender.put(key, made[key], _META)
            self._gathered[key] = made[key]
            self._forget_published(closed)
        return made

    def _forget_published(self, closed: Sequence[Acknowledged]) -> None:
        """From now on the store is asked for what is durable. Many segments are committed, so that others open the store fast."""
        if not closed:
            return
        self._store.refresh()
        for segment in closed:
            for key in segment.places:
                self._gathered.pop(key, None)
        if len(self._store.snapshot.uncovered) > UNCOVERED_LIMIT:
            self._store.commit()

    def close(self) -> None:
        """Publish what is gathered; does nothing where nothing is, or in a forked child, whose parent does it. May be used again after.

        Raises WriteFailed, keeping what is gathered: call it again when there is room.
        """
        if self._pid == os.getpid():
            self._forget_published(self._appender.close_segment())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Publish what is gathered, also after an error: what was made is as good as before."""
        self.close()


def _handed_out(
    keys: Sequence[Key], here: Mapping[Key, dict[str, RawTensor]], read: Mapping[Key, dict[str, RawTensor]]
) -> Iterator[dict[str, RawTensor] | None]:
    """What each key stands for, in memory of the caller's own: what was read is that already, but where it comes again or views a file."""
    fresh = dict(read)
    for key in keys:
        raw = fresh.pop(key, None)
        if raw is not None and not any(memoryview(buffer).readonly for _dtype, _shape, buffer in raw.values()):
            yield raw
        elif key in here or key in read:
            yield _copied(here[key] if key in here else read[key])
        else:
            yield None


def _named(key: Key, tensors: object) -> Mapping[str, Any]:
    if isinstance(tensors, Mapping) and all(isinstance(name, str) for name in cast("Mapping[object, object]", tensors)):
        return cast("Mapping[str, Any]", tensors)
    raise EncodeFailed(f"encode must return {{key: {{name: tensor}}}}, but did not for key {key}")


def _copied(raw: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    return {name: (dtype, shape, bytearray(buffer)) for name, (dtype, shape, buffer) in raw.items()}
