"""Check, encode a batch, read: values that several processes ask for in any order, and of which each is made by one of them."""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.arguments import as_pairs, as_text, as_whole, check_function, refuse
from cachestore.core.errors import CacheStoreError, EncodeFailed, Incomplete
from cachestore.core.keys import Key, by_key
from cachestore.core.words import first_of, plural
from cachestore.files.marker import noticing_its_end
from cachestore.jobs.share.key_claims import KeyClaims
from cachestore.jobs.share.workers import Heartbeat, Watch
from cachestore.jobs.start.fill import VALUE, id_of
from cachestore.store.read.reader import AnyKey
from cachestore.store.write.commit import UNCOVERED_LIMIT
from cachestore.store.write.writer import Store, Writer

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestore.store.write.session import Session

Encode = Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]

PUBLISH_SECONDS: Final = 1.0
"""Values are published at the latest so long after they were made, between two batches: others wait for them."""
WAIT_SECONDS: Final = 3600.0
"""How long a call waits for others without any value becoming ready."""
_SHORTEST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5
_ENCODING: Final = "encoding"
_RESTING: Final = "waiting"


class EncodeOnce:
    """Values by key that many processes ask for, in batches and in any order. One of them makes each value, and the others wait for it.

        with cs.open("cache/", mode="a") as store, cs.EncodeOnce(store) as once:
            embeds = once([(cs.key("clip", text), text) for text in texts], encode)

    When a call returns, all that it asked for is durable, and there for every process. Nothing has to be agreed before: processes may be
    ranks or not, may come and go, and may ask for the same keys or for others. If a process is killed, those that wait for its values make
    them. One that gives no sign of life for 3 minutes counts as dead; if it was only slow, a value is made twice, which is harmless.

    With `publish_as` the values become rows of a data set, as with `fill`; a row whose item comes with another key gets that. Other
    rows stay.

    Threads may share it; one of them encodes at a time. A forked child reads, but does not encode. Constructing it starts nothing.
    """

    def __init__(
        self,
        store: Store,
        *,
        publish_as: str | None = None,
        wait_seconds: float = WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Share what is made in a store.

        Args:
            store: an open store; with `mode="a"` where something is to be encoded.
            publish_as: the name of the data set that the values become, part `value`. Items then have ids, as with `fill`.
            wait_seconds: how long a call waits for values of others while none becomes ready.
            clock: returns seconds that never decrease.

        Raises BadInput for another kind of store.
        """
        if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
            refuse("store", 'what cs.open(path, mode="a") returned', store)
        self._store, self._wait_seconds, self._clock = store, wait_seconds, clock
        self._name = None if publish_as is None else as_text("publish_as", publish_as)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._heartbeat: Heartbeat | None = None
        self._claims: KeyClaims | None = None
        self._sink: Writer | Session | None = None
        self._rows: dict[str, Key] | None = None
        """The rows of the data set, as far as they are known here."""
        self._unpublished: list[Key] = []
        """Claimed keys whose values are collected."""
        self._since = 0.0
        """When the first of them was."""

    def __repr__(self) -> str:
        return f"EncodeOnce({self._store!r})" if self._name is None else f"EncodeOnce({self._store!r}, publish_as={self._name!r})"

    def __call__(
        self,
        wanted: Iterable[tuple[AnyKey, Any]],
        encode: Encode,
        *,
        batch_size: int = 16,
        group_by: Callable[[Any], Hashable] | None = None,
        as_numpy: bool = False,
    ) -> list[dict[str, Any]]:
        """Make what is missing, as `make` does, and return the tensors of each pair in the order of the request: writable, on the CPU."""
        pairs = [(Key.parse(key), item) for key, item in as_pairs("wanted", wanted)]
        self.make(pairs, encode, batch_size=batch_size, group_by=group_by)
        return self._store.get_many([key for key, _item in pairs], as_numpy=as_numpy)

    def make(
        self,
        wanted: Iterable[tuple[AnyKey, Any]],
        encode: Encode,
        *,
        batch_size: int = 16,
        group_by: Callable[[Any], Hashable] | None = None,
    ) -> int:
        """Make what is missing. When this returns, all of it is durable and there for every process. Returns how many were made here.

        Args:
            wanted: (key, item) pairs. If a key comes twice, its first item counts.
            encode: called in this thread with a list of (key, item). Returns `{key: {name: tensor}}` for exactly these keys, as torch
                tensors or numpy arrays. If it raises, this call raises the same; what was made before stays, and others may try.
            batch_size: the most items in one call of `encode`.
            group_by: the items of one call have equal `group_by(item)`.

        Raises:
            BadInput: a malformed key or option; with `publish_as`, an item without an id.
            EncodeFailed: an answer that does not fit.
            Incomplete: others said that they make the rest, and for `wait_seconds` nothing came.
            WriteFailed: the disk refused.
            CacheStoreError: something is missing, and this process did not open the store to write.
        """
        check_function("encode", encode)
        limit = as_whole("batch_size", batch_size, least=1)
        items: dict[Key, Any] = {}
        for key, item in as_pairs("wanted", wanted):
            items.setdefault(Key.parse(key), item)
        if self._name is not None:
            for item in items.values():
                id_of(item)  # raises now, not after the work
        missing = self._store.missing(list(items))
        if not missing and not (self._name is not None and self._store.is_writable):
            return 0
        self._store.check_writable()
        with self._lock, noticing_its_end(self._store.layout):
            made = self._make(missing, items, encode, limit, group_by) if missing else 0
            self._set_rows(items)
        return made

    def close(self) -> None:
        """Say that this process makes nothing more. More values may be made afterwards. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with self._lock:
            sink, self._sink, self._rows = self._sink, None, None
            heartbeat, self._heartbeat, self._claims = self._heartbeat, None, None
            try:
                if sink is not None and not isinstance(sink, Writer):
                    sink.close()
            finally:
                if heartbeat is not None:
                    heartbeat.__exit__()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make(
        self, missing: list[Key], items: Mapping[Key, Any], encode: Encode, limit: int, group_by: Callable[[Any], Hashable] | None
    ) -> int:
        """Make all that is missing or wait for it: in each round it claims every key that no other process makes."""
        claims, made, pause, since = self._begin(), 0, _SHORTEST_PAUSE, self._clock()
        while missing:
            made_now = 0
            try:
                for group in _groups(missing, items, group_by):
                    made_now += self._make_group(claims, group, items, encode, limit)
            finally:
                self._publish(claims)
            made += made_now
            before, missing = len(missing), self._store.missing(missing)
            if len(missing) < before:
                pause, since = _SHORTEST_PAUSE, self._clock()
            elif self._clock() - since >= self._wait_seconds:
                raise Incomplete(
                    f"waited {self._wait_seconds:g} s for {plural(len(missing), 'value')} that others make: {first_of(missing)}, by"
                    f" {claims.holder(missing[0])}; end that process if it hangs, then run the same again"
                )
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return made

    def _make_group(self, claims: KeyClaims, group: list[Key], items: Mapping[Key, Any], encode: Encode, limit: int) -> int:
        made, batch = 0, list[Key]()
        for number, key in enumerate(group, 1):
            if claims.take(key):
                batch.append(key)
            if batch and (len(batch) == limit or number == len(group)):
                taken, batch = batch, []
                made += self._make_batch(claims, taken, items, encode)
        return made

    def _make_batch(self, claims: KeyClaims, batch: list[Key], items: Mapping[Key, Any], encode: Encode) -> int:
        """Make a batch of claimed keys, but for those that others published before their claims were free."""
        assert self._heartbeat is not None
        assert self._sink is not None
        began, done = time.monotonic(), list[Key]()
        try:
            absent = self._store.missing(batch)
            answer = by_key(encode([(key, items[key]) for key in absent])) if absent else {}
            if set(answer) != set(absent):
                given = f"not the {plural(len(absent), 'key')} that it was given: return tensors for each of those, and for no other"
                raise EncodeFailed(f"encode returned {plural(len(answer), 'key')}, {given}")
            for key in absent:
                if not isinstance(answer[key], Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise EncodeFailed(f"encode must return {{key: {{name: tensor}}}}, but did not for key {key}")
                self._sink.put(key, answer[key], {"encoder": "values"})
                self._since = self._since if self._unpublished else self._clock()
                self._unpublished.append(key)
                done.append(key)
        finally:
            claims.release(set(batch) - set(done))
        self._heartbeat.encoded += len(absent)
        self._heartbeat.batch_took(time.monotonic() - began)
        if self._unpublished and self._clock() - self._since >= PUBLISH_SECONDS:
            self._publish(claims)
        return len(absent)

    def _begin(self) -> KeyClaims:
        """Show that this process lives, as its claims need that."""
        if self._claims is None:
            layout = self._store.layout
            self._heartbeat = Heartbeat(layout, "", 0, "", None, 1)
            self._heartbeat.__enter__()
            self._claims = KeyClaims(layout, self._heartbeat.worker, Watch(layout))
        assert self._heartbeat is not None
        self._heartbeat.rise(phase=_ENCODING)
        if self._sink is None:
            self._sink = self._store.writer() if self._name is None else self._store.session(self._name)
        return self._claims

    def _publish(self, claims: KeyClaims) -> None:
        """Publish what is collected, then let others have the keys, also if that failed."""
        assert self._sink is not None
        keys, self._unpublished = self._unpublished, []
        try:
            if keys:
                self._sink.flush()
                if len(self._store.snapshot.uncovered) > UNCOVERED_LIMIT:
                    self._store.commit()
        finally:
            claims.release(keys)
            if self._heartbeat is not None:
                with suppress(CacheStoreError):  # the flush says that a disk is full
                    self._heartbeat.rise(phase=_RESTING)

    def _set_rows(self, items: Mapping[Key, Any]) -> None:
        """Name the values in the data set, where that is new."""
        if self._name is None:
            return
        if self._rows is None:
            self._rows = self._known_rows(self._name)
        new = {sample: key for key, item in items.items() if self._rows.get(sample := id_of(item)) != key}
        if not new:
            return
        if self._sink is None:
            self._sink = self._store.session(self._name)
        assert not isinstance(self._sink, Writer)
        for sample, key in new.items():
            self._sink.set(sample, **{VALUE: key})
        self._sink.flush()
        self._rows.update(new)

    def _known_rows(self, name: str) -> dict[str, Key]:
        if name not in self._store.names():
            return {}
        rows = self._store.dataset(name)
        if VALUE not in rows.parts:
            return {}
        at, keys = rows.lists(VALUE)
        return {sample: Key(keys[at[row]].tobytes()) for row, sample in enumerate(rows.ids) if at[row + 1] - at[row] == 1}


def _groups(keys: list[Key], items: Mapping[Key, Any], group_by: Callable[[Any], Hashable] | None) -> list[list[Key]]:
    if group_by is None:
        return [keys]
    groups: dict[Hashable, list[Key]] = {}
    for key in keys:
        groups.setdefault(group_by(items[key]), []).append(key)
    return list(groups.values())
