"""Read what a store has and encode what it lacks, for a trainer that encodes as it goes.

`ReadThrough` has values by key, and an encoder of your own; `ReadThrough.of(model)` the samples of a source. If there is time before the
training, use `fill` or `precompute`.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from cachestore.core.arguments import as_pairs, as_word, check_function, refuse
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, EncodeFailed, MissingEntry, naming_extras
from cachestore.core.keys import Json, Key, by_key
from cachestore.core.spelling import option
from cachestore.core.tensors import to_numpy, to_raw, to_torch
from cachestore.core.words import first_of, noun, plural
from cachestore.store.read.reader import AnyKey
from cachestore.store.write.append import Acknowledged, Appender, SegmentLimits
from cachestore.store.write.commit import UNCOVERED_LIMIT
from cachestore.store.write.writer import Store

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self, Unpack

    from cachestore.core.batch_shapes import LatentsAs
    from cachestore.core.captions import CaptionPolicy, Choose
    from cachestore.jobs.plan.options import Options
    from cachestore.store.read.fetch import Io, Verify
    from cachestore.train.encoding.dataset import EncodingDataset

OnMiss = Literal["raise", "encode", "skip"]
Encode = Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]

AGE_SECONDS: Final = 300.0
"""New values are published by the first call after this time, so that a few misses in each batch do not become a file each."""

_META: Final = {"encoder": "values"}
"""The same as `fill` writes."""


class ReadThrough:
    """Values by key. All that a request misses is encoded in one call.

        with cs.open("cache/", mode="a") as store, ReadThrough(store, encode, on_miss="encode") as read:
            embeds = [entry["embeds"] for entry in read([(cs.key("clip", path), path) for path in paths])]

    New values can be read here at once. They are published when 64 MiB are collected, at the first call after 5 minutes, and by `close`.
    From then on they are durable, and others find them after their `refresh`. Until then they are lost if this process is killed.

    Several processes may read through one store at once, each with its own ReadThrough; each belongs to one thread. A forked child may read
    through an inherited one, but not encode. Constructing it starts nothing. Two processes that miss the same key at once both encode it,
    which is harmless: the values of a key are interchangeable.

    To encode pictures and captions with a model's own encoders, see `of`.
    """

    def __init__(
        self, store: Store, encode: Encode | None = None, on_miss: OnMiss = "raise", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read through a store.

        Args:
            store: an open store; with `mode="a"` if something is to be encoded.
            encode: as in `fill`: called in this thread with a list of (key, item), each key once; returns `{key: {name: tensor}}`
                for exactly these keys, torch tensors or numpy arrays. If it raises, the call raises the same, and nothing of that
                request is kept.
            on_miss: what to do about keys that are not in the store: "raise" MissingEntry, "encode" them, or "skip" them, which
                gives None in their place.
            clock: returns seconds that never decrease.

        Raises:
            BadInput: another `on_miss`; or "encode" without a function, or with a store that is open for reading.
        """
        if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
            refuse("store", "what cs.open(path) returned", store)
        as_word("on_miss", on_miss, get_args(OnMiss))
        if encode is not None:
            check_function("encode", encode)
        if on_miss == "encode" and (encode is None or store.mode != "a"):
            needs = f'needs encode=, and {store.layout.root} opened with mode="a" in the process that encodes'
            raise BadInput(f"{option('on_miss', 'encode')} {needs}", option="on_miss")
        self._store = store
        self._encode = encode
        self._on_miss: OnMiss = on_miss
        self._pid = os.getpid()
        self._appender = Appender(store.layout, limits=SegmentLimits(age_seconds=AGE_SECONDS), clock=clock)
        self._pending: dict[Key, dict[str, RawTensor]] = {}
        """Values that were encoded here and are not published yet."""

    @staticmethod
    def of(
        model: object,
        *,
        store: str | Path,
        encode: str | Iterable[str] = ("text", "latents"),
        encode_args: Mapping[str, Json] | None = None,
        max_failures: int | str = 0,
        **options: "Unpack[Options]",
    ) -> "ModelReadThrough":
        """Encode a source with the encoders of a model while a trainer reads it. Takes the arguments of `precompute`; loads nothing.

            through = cs.ReadThrough.of("sdxl/", store="cache/", resolution=1024)
            loader = cs.make_loader(through.open("photos/"), batch_size=8)

        Raises BadInput for an option that does not exist or cannot be used.
        """
        return ModelReadThrough(model, store, {"encode": encode, "encode_arg": encode_args, "max_failures": max_failures, **options})

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the store for reading, so one with `on_miss="encode"` is refused there."""
        return ReadThrough, (self._store, self._encode, self._on_miss)

    def __repr__(self) -> str:
        return f"ReadThrough({self._store!r}, on_miss={self._on_miss!r})"

    def __call__(self, wanted: Iterable[tuple[AnyKey, Any]], *, as_numpy: bool = False) -> list[dict[str, Any] | None]:
        """Return the tensors of each (key, item), in the order of the request: writable, the caller's own, on the CPU.

        If a key comes twice, its first item counts. With "skip", missing keys give None. An empty request gives an empty list. `as_numpy`
        is as in `Store.get`. Raises MissingEntry, CorruptEntry, BadInput, EncodeFailed for an answer that does not fit, WriteFailed.
        """
        items: dict[Key, Any] = {}
        keys: list[Key] = []
        for key, item in as_pairs("wanted", wanted):
            keys.append(Key.parse(key))
            items.setdefault(keys[-1], item)
        asked = [key for key in items if key not in self._pending]
        # Before encoding or raising, look for what others have published since.
        missing = self._store.missing(asked, refresh=self._on_miss != "skip")
        if missing and self._on_miss == "raise":
            raise MissingEntry(
                f"{len(missing)} of {plural(len(items), 'key')} {noun(len(missing), 'is', 'are')} not in"
                f" {self._store.layout.root}: {first_of(missing)}; encode them with"
                ' `cachestore.fill` first, or pass on_miss="encode" or on_miss="skip"'
            )
        made = self._make([(key, items[key]) for key in missing]) if missing and self._on_miss == "encode" else {}
        absent = set(missing)
        here = {key: self._pending[key] for key in items if key in self._pending} | made
        stored = [key for key in items if key not in here and key not in absent]
        read = dict(zip(stored, self._store.get_raw(stored), strict=True))
        if self._appender.is_due:
            self.close()
        convert = to_numpy if as_numpy else to_torch
        return [convert(raw) if raw is not None else None for raw in _handed_out(keys, here, read)]

    def _make(self, missing: list[tuple[Key, Any]]) -> dict[Key, dict[str, RawTensor]]:
        assert self._encode is not None
        self._appender.check_process()
        answer = by_key(self._encode(list(missing)))
        if set(answer) != {key for key, _item in missing}:
            given = f"not the {plural(len(missing), 'key')} that it was given: return tensors for each of those, and for no other"
            raise EncodeFailed(f"encode returned {plural(len(answer), 'key')}, {given}")
        made = {key: _copied(to_raw(_named(key, tensors))) for key, tensors in answer.items()}
        for key, _item in missing:
            closed = self._appender.put(key, made[key], _META)
            self._pending[key] = made[key]
            self._forget_published(closed)
        return made

    def _forget_published(self, closed: Sequence[Acknowledged]) -> None:
        """Read published values from the store from now on. After many segments commit an index, so that others open the store fast."""
        if not closed:
            return
        self._store.refresh()
        for segment in closed:
            for key in segment.locations:
                self._pending.pop(key, None)
        if len(self._store.snapshot.uncovered) > UNCOVERED_LIMIT:
            self._store.commit()

    def close(self) -> None:
        """Publish what is collected. Does nothing in a forked child, whose parent publishes it. More values may be encoded afterwards.

        Raises WriteFailed and keeps what is collected: call it again when there is room.
        """
        if self._pid == os.getpid():
            self._forget_published(self._appender.close_segment())

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Publish what is collected, also after an error: the values are good."""
        self.close()


class ModelReadThrough:
    """A model and a store, with options: what `ReadThrough.of` returns."""

    def __init__(self, model: object, store: str | Path, options: Mapping[str, object]) -> None:
        """Use `ReadThrough.of` instead."""
        self._model, self._store, self._options = model, store, dict(options)
        self._read("data")

    def __repr__(self) -> str:
        return (
            f"ReadThrough.of({self._model if isinstance(self._model, str) else type(self._model).__name__!r}, store={str(self._store)!r})"
        )

    @naming_extras()
    def _read(self, data: object) -> Any:
        from cachestore.jobs.start.precompute import read_arguments

        request, held, loaded = read_arguments("ReadThrough.of", data, self._model, self._store, self._options)
        if request.procs is not None:
            starts = "starts processes that encode, but here the processes that train encode: leave it out"
            raise BadInput(f"{option('procs')} {starts}", option="procs")
        return request, held, loaded

    @naming_extras()
    def open(
        self,
        data: object,
        *,
        latents: "LatentsAs" = "sample",
        captions: "CaptionPolicy | Choose | None" = None,
        fields: Collection[str] | None = None,
        dtype: "torch.dtype | None" = None,
        resolution: int | None = None,
        seed: int = 0,
        verify: "Verify" = "first",
        io: "Io" = "pread",
    ) -> "EncodingDataset":
        """Return a source as a data set for `make_loader`: the first epoch encodes what the store lacks, later epochs only read.

        Reads every file of the source once, as keys are digests of files; loads no model yet. Every rank calls it with the same arguments.

        Args:
            data: as for `precompute`.
            latents: this and all further arguments are those of `CachedDataset`.
            captions: as there. The texts that it may ask for are those that `ReadThrough.of(captions=...)` encodes.
            fields: as there.
            dtype: as there.
            resolution: as there.
            seed: as there.
            verify: as there.
            io: as there.

        Raises:
            BadInput, BadUsage, RecipeMismatch, MissingExtra: as `precompute`, and as `CachedDataset`.
        """
        from cachestore.sources.combined import list_in_memory
        from cachestore.train.encoding.dataset import EncodingDataset, SeenAs
        from cachestore.train.encoding.joined_pass import JoinedPass

        request, held, loaded = self._read(data)
        in_memory = list_in_memory(request.sources, held, request.reading)
        seen = SeenAs(latents, captions, fields, dtype, resolution, seed, verify, io)
        return EncodingDataset(JoinedPass(replace(request), loaded, in_memory), seen)


def _handed_out(
    keys: Sequence[Key], here: Mapping[Key, dict[str, RawTensor]], read: Mapping[Key, dict[str, RawTensor]]
) -> Iterator[dict[str, RawTensor] | None]:
    """Yield each key's tensors in memory of the caller's own. What was read is copied only if its key comes again or it views a file."""
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
