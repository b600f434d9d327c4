"""What identifies a value: keys, recipes and fingerprints. Identity uses SHA-256.

Everything that is hashed goes through one of two injective encodings: `canonical` (JSON with sorted keys and no spaces)
for settings, and length-prefixed parts for sequences of strings and bytes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from cachestore.core.arguments import as_mapping, as_text, refuse
from cachestore.core.errors import BadInput, EncodeFailed

if TYPE_CHECKING:
    from typing_extensions import Self

KEY_BYTES = 16
"""Length of a key: the first 128 bits of a SHA-256."""
INPUT_BYTES = 32
"""Length of an input's digest: a whole SHA-256."""
_BLOCK_BYTES = 1 << 18
Json = Any
"""A value that JSON can hold: None, bool, int, finite float, str, list or dict with str keys."""


class Key(bytes):
    """Sixteen bytes that name an entry. Prints as 32 lower-case hex digits; compares and hashes as its bytes."""

    __slots__ = ()

    def __new__(cls, raw: bytes | str) -> "Self":
        """Wrap exactly 16 bytes, or read 32 hex digits, as its repr has them. Raises BadInput for anything else."""
        try:
            length = len(raw)
            key = super().__new__(cls, raw)  # pyright: ignore[reportArgumentType, reportCallIssue] - a text is a TypeError
        except TypeError:
            if isinstance(raw, str):
                return cls.parse(raw)  # here, as most keys are made of bytes
            refuse("a key", f"made of {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits", raw)
        if length != KEY_BYTES:
            raise BadInput(f"a key has {KEY_BYTES} bytes, but this value has {length}: make keys with cs.key(...)")
        return key

    @classmethod
    def parse(cls, text: "str | bytes") -> "Self":
        """Read a key from its 32 hex digits, or from its 16 raw bytes. Raises BadInput for anything else."""
        if type(text) is cls:
            return text
        if isinstance(text, bytes):
            return cls(text)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
            refuse("a key", f"a cs.Key, its {KEY_BYTES} bytes or its {2 * KEY_BYTES} hex digits", text)
        try:
            return cls(bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else b"")
        except ValueError as error:
            known = "`cachestore ls STORE --keys` lists those in a store"
            raise BadInput(f"a key is 32 hex digits; {text!r} is not (cs.key({text!r}) makes one of this text; {known})") from error

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"Key({self.hex()!r})"


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: Json) -> bytes:
    """Encode a JSON value in its one canonical form: UTF-8, sorted keys, no spaces, no NaN. Raises BadInput if it is not JSON."""
    return canonical_text(value).encode("utf-8", "surrogatepass")


def canonical_text(value: Json) -> str:
    """As `canonical`, before it is encoded as UTF-8."""
    try:
        return _CANONICAL.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        why: object = error
        with suppress(TypeError, ValueError, RecursionError):
            json.dumps(value, allow_nan=False)
            why = "a dict has keys of several types"  # they cannot be sorted
        raise BadInput(
            f"a value cannot be written as JSON ({why}): use texts, finite numbers, bools, None, lists, and dicts with texts as keys"
        ) from error


def digest_parts(*parts: "str | bytes") -> bytes:
    """Return the SHA-256 of strings and bytes. It is injective: each part is preceded by its kind and its length."""
    state = hashlib.sha256()
    for part in parts:
        kind, raw = (b"s", part.encode("utf-8", "surrogatepass")) if isinstance(part, str) else (b"b", bytes(part))
        state.update(kind + len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()


def digest_bytes(data: "bytes | bytearray | memoryview") -> str:
    """Return the SHA-256 of raw bytes as 64 hex digits: the `input_digest` of a file."""
    return hashlib.sha256(data).hexdigest()


def digest_opened(file: BinaryIO) -> str:
    """As `digest_bytes`, for an open file of which nothing was read yet. It is never in memory as a whole."""
    state, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    while count := cast("Any", file).readinto(block):
        state.update(block[:count])
    return state.hexdigest()


def digest_text(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes as 64 hex digits: the `input_digest` of a caption."""
    return digest_bytes(text.encode("utf-8", "surrogatepass"))


def key(*parts: "str | bytes | os.PathLike[str]") -> Key:
    """Make a key for a value of your own from strings, bytes or paths (as text). The order of the parts and their boundaries count.

    No parts give a valid, fixed key. Raises BadInput for anything else, such as a number: pass `str(5)`.
    """
    plain = [os.fsencode(part) if isinstance(part, os.PathLike) else part for part in parts]
    for part in plain:
        if not isinstance(part, str | bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's
            refuse("a part of a key", "a text or bytes", part)
    return Key(digest_parts("cachestore-key", *plain)[:KEY_BYTES])


def by_key(answer: object) -> dict[Key, Any]:
    """Return by key what a caller's `encode` returned. Raises EncodeFailed if that is not a mapping, BadInput if it has an invalid key."""
    if not isinstance(answer, Mapping):
        raise EncodeFailed(f"encode must return {{key: {{name: tensor}}}}, not a value of the type {type(answer).__name__}")
    try:
        return {Key.parse(key): tensors for key, tensors in cast("Mapping[Any, Any]", answer).items()}
    except BadInput as error:
        raise BadInput(f"encode returned something else than the keys of its batch ({error}): return these as you got them") from error


def input_key(fingerprint: str, inputs: Mapping[str, str], transform: Mapping[str, Json]) -> Key:
    """Return the key of the value that a recipe makes from an input; `transform` is what is done to that before (bucket, crop, variant).

    `inputs` are digests (hex) by name. Their order counts, as an edit model sees its images in order.
    """
    return key("input", fingerprint, canonical([[name, digest] for name, digest in inputs.items()]), canonical(dict(transform)))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides tensors (`make`), and how to read them (`read`)."""

    encoder: str
    """What it makes: `text`, `latents`, or a name of your own. A catalog column is compared with earlier ones by this name."""
    make: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Kind, digests of model files by relative name, tokenizer length, transform, dtype, outputs, recipe version. In the fingerprint."""
    read: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How to normalise, join, pad and mask when reading. Not part of the fingerprint: it can be corrected without encoding again."""

    def __post_init__(self) -> None:
        as_text("encoder of a recipe", self.encoder)
        for name in ("make", "read"):
            as_mapping(f"{name} of a recipe", getattr(self, name), "a mapping of settings")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `encoder` and of `make` in canonical form, 64 hex digits."""
        return digest_parts("cachestore-recipe", self.encoder, canonical(dict(self.make))).hex()

    def as_json(self) -> dict[str, Json]:
        """Return the recipe as in `recipes/<fingerprint>.json` and in a catalog's header."""
        return {"encoder": self.encoder, "make": dict(self.make), "read": dict(self.read), "fingerprint": self.fingerprint}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> "Recipe":
        """Return the recipe that `as_json` wrote. Its fingerprint is computed again, never trusted."""
        return cls(encoder=str(value["encoder"]), make=dict(value["make"]), read=dict(value["read"]))
