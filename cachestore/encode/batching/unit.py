"""The protocol of encoders, and the values that they exchange with a worker. Uses no torch and no files.

A unit goes through three steps: `resolve` (read and digest its bytes, find the key), `prepare` (decode and resize, or tokenise; only if
the store lacks the key) and `submit` (encode a batch).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Protocol

from cachestore.core.keys import Json, Key, Recipe


class Read(Protocol):
    """Reads what a reference of the source names. Raises OSError. The code that made it records size and time of what was read."""

    def __call__(self, reference: str, /) -> bytes:
        """Return all bytes."""
        ...

    def open(self, reference: str) -> AbstractContextManager[BinaryIO]:
        """Open a file that may be too large for memory. Raises OSError if it changed since it was last opened."""
        ...


LOADING: Final[ContextVar[Callable[[str], None]]] = ContextVar("LOADING", default=lambda _component: None)
"""Called with the name of each component of a model, such as "text_encoder_2", before it is loaded."""
Result = Callable[[], Mapping[Key, Mapping[str, Any]]]
"""Waits for a batch and returns named tensors without a batch axis, for exactly the keys that were asked for. Called once."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A unit whose key is known."""

    key: Key
    item: Any
    """What `prepare` needs: a caption, or the bytes of an image file with the chosen bucket."""
    inputs: Mapping[str, str]
    """SHA-256 (hex) of each input, by role, in order."""
    meta: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The entry's JSON value. It has at least `input_digest` and `encoder`."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the catalog records: `size` [w, h], `bucket` [w, h], `resized` [w, h], `crop` [l, t, r, b], `tokens`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A unit that is ready for a batch."""

    payload: Any
    group: Hashable
    """Units of one group can share a batch. Example: a bucket, or a length."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Facts that are known only now (`tokens`). They are added to the entry's JSON value and to the catalog."""
    cost: int = 0
    """What the unit costs to encode, in tokens or pixels. At the end, incomplete batches are encoded, the costliest first."""


class Encoder(Protocol):
    """Makes tensors from inputs. Its constructor loads nothing; modules are loaded at the first `prepare` or `submit`."""

    recipe: Recipe

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find a unit's key. Raises EncodeFailed (permanent) or OSError (a retry may work)."""
        ...

    def prepare(self, resolved: Resolved) -> Prepared:
        """Make a unit ready for a batch. Safe to call from several threads. Raises EncodeFailed or OSError."""
        ...

    @property
    def window(self) -> int:
        """How many prepared units may wait for a batch, at least 1: few if each takes megabytes, many if they are sorted by length."""
        ...

    def batch_limit(self, group: Hashable, /) -> int:
        """Return how many units of this group go into one batch at most; at least 1. May change from batch to batch."""
        ...

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, payload) pairs of one group. A GPU may still be computing when this returns."""
        ...

    def close(self) -> None:
        """Release the modules' memory. It may be called twice, or before anything was loaded."""
        ...
