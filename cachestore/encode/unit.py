"""What an encoder promises to the worker that drives it. Values and one protocol; no torch, no files.

A unit goes through three steps, each cheaper to skip than the next: `resolve` (read the bytes, digest them, know the key),
`prepare` (decode, resize or tokenise, only if the key is not in the store yet) and `submit` (a batch at a time).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from cachestore.core.keys import Json, Key, Recipe


class Read(Protocol):
    """Reads what is behind a reference of the source; raises OSError. Whoever made it records size and time of what was read."""

    def __call__(self, reference: str, /) -> bytes:
        """All bytes."""
        ...

    def open(self, reference: str) -> AbstractContextManager[BinaryIO]:
        """The same to be read in places, for what is too large to be held. Opened twice, it is the same file, or an OSError."""
        ...


Result = Callable[[], Mapping[Key, Mapping[str, Any]]]
"""Called once, waits for a batch: named tensors without a batch axis, for exactly the keys that were asked for."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A unit whose key is known."""

    key: Key
    item: Any
    """What `prepare` needs: a caption, or encoded image bytes with the chosen bucket."""
    inputs: Mapping[str, str]
    """SHA-256 (hex) of what the encoder sees, by role, in order."""
    meta: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The entry's JSON value; holds at least `input_digest` and `encoder`."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the catalog keeps of it: `size` [w, h], `bucket` [w, h], `resized` [w, h], `crop` [l, t, r, b], `tokens`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A unit ready to be put into a batch."""

    payload: Any
    group: Hashable
    """Units of one group can share a batch: a bucket, a length."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Facts known only now (`tokens`); they are added to the entry's JSON value and to the catalog."""
    cost: int = 0
    """What the unit costs to encode, beside others of its encoder: tokens or pixels. The costliest batches are made first."""


class Encoder(Protocol):
    """Makes tensors from inputs. Constructing one loads nothing; the modules are loaded at the first `prepare` or `encode`."""

    recipe: Recipe

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find a unit's key. Raises EncodeFailed (for good) or OSError (may pass)."""
        ...

    def prepare(self, resolved: Resolved) -> Prepared:
        """Make a unit ready for a batch. Safe to call from several threads. Raises EncodeFailed or OSError."""
        ...

    @property
    def window(self) -> int:
        """How many prepared units may wait for a batch: few where each takes megabytes, many where they are to be sorted; at least 1."""
        ...

    def batch_limit(self, group: Hashable) -> int:
        """How many units of this group go into one batch at most; at least 1. May change from batch to batch."""
        ...

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, payload) pairs of one group; none give nothing. A GPU may still be at it when this returns."""
        ...

    def close(self) -> None:
        """Give back the modules' memory. Calling it twice, or before anything was loaded, is fine."""
        ...
