"""The contents of a file of any trainer's cache in one form: named tensors as (dtype, shape, bytes), without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from cachestore.core.dtypes import DTYPES, NUMPY_NAMES, RawTensor
from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Json
from cachestore.core.spelling import option

Raw = RawTensor
Array = np.ndarray[Any, Any]
_NUMPY: Final = {name: np.dtype(dtype.numpy).newbyteorder("<") for name, dtype in DTYPES.items() if name != "C64"}
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Contents:
    """A file of a cache after its container was read: tensors and plain values under the trainer's own names."""

    tensors: Mapping[str, Raw]
    values: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Plain values beside the tensors, and the container's metadata."""


@dataclass(frozen=True, slots=True)
class Latents:
    """Latents of one picture."""

    tensor: Raw
    """`[C, h, w]`, or `[C, F, h, w]` for video models."""
    is_scaled: bool
    """Whether it is scaled for the denoiser. If not, it is as the VAE returned it."""
    kind: Literal["sample", "mean"]
    others: Mapping[str, Raw] = field(default_factory=dict[str, Raw])
    """Everything else in the file, under the trainer's own names."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """`size`, `resized` (width, height) and `crop` (left, top, right, bottom) in pixels, if the file has them."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the trainer wrote beside the tensors."""


@dataclass(frozen=True, slots=True)
class Text:
    """Embeddings of one caption, under the tensor names of the family, without a batch axis."""

    tensors: Mapping[str, Raw]
    others: Mapping[str, Raw] = field(default_factory=dict[str, Raw])
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


class Misplaced(EncodeFailed):
    """The file is for another picture, for the mirrored picture or for another model. A file beside it may be the right one."""


def refuse(what: str) -> EncodeFailed:
    """Return the error for a file that is not what its name says."""
    return EncodeFailed(what)


def as_array(raw: Raw) -> Array:
    """Return a tensor as a numpy array that shares its memory; bfloat16 as uint16, float8 as uint8. Raises EncodeFailed for C64."""
    dtype, shape, buffer = raw
    if dtype not in _NUMPY:
        raise EncodeFailed(f"tensors of dtype {dtype} are not supported; supported are {', '.join(_NUMPY)}")
    return np.frombuffer(buffer, _NUMPY[dtype]).reshape(shape)


def from_array(array: Array, dtype: str | None = None) -> Raw:
    """Return a numpy array as a tensor. `dtype` names what uint16 or uint8 bits stand for. Raises EncodeFailed for other dtypes."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    name = dtype or NUMPY_NAMES.get(little.dtype.name)
    if name not in _NUMPY:
        raise EncodeFailed(f"an array of dtype {array.dtype} cannot be stored; dtypes that can be are {', '.join(_NUMPY)}")
    return name, tuple(array.shape), little.tobytes()


def numbers(raw: Raw) -> Array:
    """Return a floating-point tensor as float32 (float64 stays): smaller formats fit exactly. Raises EncodeFailed for other dtypes."""
    dtype, shape, buffer = raw
    if dtype == "BF16":
        bits = np.frombuffer(buffer, "<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(shape)
    if dtype not in FLOATS:
        raise EncodeFailed(f"its numbers are of dtype {dtype}, where floating-point numbers are needed")
    array = as_array(raw)
    return array if dtype == "F64" else array.astype(np.float32)


def rounded(array: Array, dtype: str) -> Raw:
    """Return numbers in a floating-point dtype, rounded to nearest, ties to even."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return from_array(array.astype(_NUMPY[dtype]))
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    upper = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    upper = np.where(np.isnan(array), np.uint16(0x7FC0), upper)
    return from_array(upper, "BF16")


def cast(raw: Raw, dtype: str) -> Raw:
    """Return a floating-point tensor in another dtype; unchanged if it already has that dtype."""
    if raw[0] == "BF16" and dtype == "F32":
        return dtype, raw[1], numbers(raw).reshape(-1).view(np.uint8).data  # without another copy, as text is large
    return raw if raw[0] == dtype else rounded(numbers(raw), dtype)


def is_zero(raw: Raw) -> bool:
    """Whether every number is 0 (of either sign)."""
    return not as_array(raw).any() if raw[0] not in FLOATS else not numbers(raw).any()


def reshaped(raw: Raw, shape: Sequence[int]) -> Raw:
    """Return the same bytes in another shape of the same size."""
    return raw[0], tuple(shape), raw[2]


def without_batch(name: str, raw: Raw, rank: int) -> Raw:
    """Return a tensor of `rank` axes; a batch axis of 1 in front is dropped. Raises EncodeFailed for another shape."""
    shape = raw[1]
    if len(shape) == rank:
        return raw
    if len(shape) == rank + 1 and shape[0] == 1:
        return reshaped(raw, shape[1:])
    raise EncodeFailed(f"{name} has the shape {list(shape)}; expected {rank} axes, with or without a batch axis of 1 in front")


def columns(raw: Raw, start: int, stop: int) -> Raw:
    """Return a slice of a tensor's last axis, as a copy."""
    return from_array(as_array(raw)[..., start:stop], raw[0])


def rows(raw: Raw, start: int, stop: int | None = None) -> Raw:
    """Return a slice of the axis before the last, as a copy."""
    return from_array(as_array(raw)[..., start:stop, :], raw[0])


def folded(raw: Raw, patch: int) -> Raw:
    """Fold patch x patch neighbours of latents `[C, h, w]` into channels, in the order (channel, patch)."""
    if patch == 1:
        return raw
    channels, height, width = raw[1]
    split = as_array(raw).reshape(channels, height // patch, patch, width // patch, patch).transpose(0, 2, 4, 1, 3)
    return from_array(split.reshape(-1, height // patch, width // patch), raw[0])


def joined(parts: Sequence[Raw], axis: int) -> Raw:
    """Concatenate tensors along an axis. If their dtypes differ, the result is float32 (exact for smaller ones)."""
    dtypes = {part[0] for part in parts}
    same = parts if len(dtypes) == 1 else [cast(part, "F32") for part in parts]
    return from_array(np.concatenate([as_array(part) for part in same], axis=axis), same[0][0])


def widened(raw: Raw, width: int) -> Raw:
    """Return a tensor whose last axis is padded with zeros to `width`."""
    array = as_array(raw)
    return from_array(np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]), raw[0])


def is_finite(raw: Raw) -> bool:
    """Whether a tensor holds no NaN and no infinity; True for dtypes that are not floating-point."""
    return raw[0] not in FLOATS or bool(np.isfinite(numbers(raw)).all())


@dataclass(frozen=True, slots=True)
class Scale:
    """The constants of a VAE that turn its output into what the denoiser is trained on."""

    factor: float | None = None
    shift: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @classmethod
    def of(cls, read: Mapping[str, Json]) -> "Scale":
        """Return the constants in a `read` block of latents."""
        mean, std = (None if read.get(name) is None else tuple(map(float, read[name])) for name in ("latents_mean", "latents_std"))
        return cls(read.get("scaling_factor"), read.get("shift_factor"), mean, std)

    @property
    def is_known(self) -> bool:
        """Whether there are constants to convert with."""
        return self.factor is not None or self.mean is not None

    def apply(self, latents: Array) -> Array:
        """Scale raw latents, with diffusers' order of operations and in the array's own precision."""
        mean, factor, std = self._terms(latents)
        return (latents - mean) * factor / std

    def undo(self, latents: Array) -> Array:
        """Undo `apply`, up to rounding."""
        mean, factor, std = self._terms(latents)
        return latents * std / factor + mean

    def _terms(self, latents: Array) -> tuple[Array, Array, Array]:
        """Return mean (or shift), factor and std, shaped to broadcast over the channels of latents."""
        factor = 1.0 if self.factor is None else self.factor
        mean, std = ([self.shift or 0.0], [1.0]) if self.mean is None or self.std is None else (self.mean, self.std)
        each = [np.array(values, latents.dtype).reshape(-1, *[1] * (latents.ndim - 1)) for values in (mean, [factor], std)]
        return each[0], each[1], each[2]


def to_state(raw: Raw, scale: Scale, *, was_scaled: bool, is_scaled: bool) -> Raw:
    """Return latents scaled or unscaled: unchanged if they are so, else float32 (float64 stays). Raises EncodeFailed without constants."""
    if was_scaled == is_scaled:
        return raw
    if not scale.is_known:
        raise EncodeFailed(
            f"the scaling constants of these latents are not known, so they cannot be converted; import them again with {option('model')}"
        )
    array = numbers(raw)
    return from_array(scale.apply(array) if is_scaled else scale.undo(array))
