"""Compare a stored tensor with one that was encoded again: are they equal up to rounding? Does not import torch.

Values of equal keys are interchangeable, but not equal bit for bit: batch shape, kernel, device and library version change the rounding.
A larger difference means another value. `docs/numerics.md` has the measurements.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestore.core.raw_tensors import Raw, numbers

TOLERANCES: Final[Mapping[str, float]] = {"F64": 1e-4, "F32": 1e-4, "F16": 1e-2, "BF16": 3e-2}
"""The largest relative L2 distance that counts as rounding, by dtype. Other dtypes are compared bit by bit."""
TF32_TOLERANCE: Final = 2e-3
"""The same for float32 latents: on NVIDIA GPUs torch lets convolutions round to TF32, and an entry does not say where it was made."""
PIXELS: Final = "pixels"
PIXELS_TOLERANCE: Final = 2e-2
"""The same for pixels that were resized by two libraries, as levels of 0 to 255. In noise the order of the axes makes 1.6e-2."""
COSINE: Final = 0.999
"""The smallest cosine similarity that counts as equal."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor differs from the one that was stored."""

    tensor: str
    words: str


def tolerance_of(dtype: str, kind: str) -> float | None:
    """Return the largest relative L2 distance that counts as rounding; None if the tensors must be equal bit for bit."""
    if dtype == "F32" and kind in {"latents", PIXELS}:
        return TF32_TOLERANCE if kind == "latents" else PIXELS_TOLERANCE
    return TOLERANCES.get(dtype)


def find_difference(stored: Mapping[str, Raw], made: Mapping[str, Raw], kind: str) -> Difference | None:
    """Return the first difference between a stored entry and one that was made again; None if they differ only by rounding.

    Integer tensors must be equal. Of moments the mean is also compared alone: the log-variance of all pictures is nearly the same.
    """
    for name in sorted({*stored, *made}):
        if name not in stored or name not in made:
            return Difference(name, f"is {'not stored' if name not in stored else 'stored, but not made now'}")
        words = _compare(stored[name], made[name], kind)
        if words is None and name == "moments":
            words = _compare(_first_half(stored[name]), _first_half(made[name]), kind)
        if words is not None:
            return Difference(name, words)
    return None


def _compare(stored: Raw, made: Raw, kind: str) -> str | None:
    (dtype, shape, was), (dtype_now, shape_now, now) = stored, made
    if (dtype, tuple(shape)) != (dtype_now, tuple(shape_now)):
        return f"is stored as {dtype} {list(shape)}, but is now {dtype_now} {list(shape_now)}"
    allowed = tolerance_of(dtype, kind)
    if allowed is None:
        return None if bytes(was) == bytes(now) else f"({dtype}) differs"
    distance, cosine = distance_of(stored, made)
    if distance != distance:  # noqa: PLR0124 - NaN alone differs from itself
        return "has NaN or infinite numbers"
    if distance > allowed or cosine < COSINE:
        return f"differs by {distance:.2g} (rounding is below {allowed:g}), cosine {cosine:.4f}"
    return None


def distance_of(stored: Raw, made: Raw) -> tuple[float, float]:
    """Return the relative L2 distance and the cosine of two floating-point tensors of one size; NaN if a number is not finite."""
    one, two = (numbers(raw).astype(np.float64).ravel() for raw in (stored, made))
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return np.nan, np.nan
    lengths = float(np.linalg.norm(one)), float(np.linalg.norm(two))
    distance = float(np.linalg.norm(one - two)) / max(lengths) if any(lengths) else 0.0
    cosine = float(one @ two) / (lengths[0] * lengths[1]) if lengths[0] * lengths[1] else 1.0  # at length 0 only the distance counts
    return distance, cosine


def _first_half(raw: Raw) -> Raw:
    dtype, (channels, *rest), buffer = raw
    view = memoryview(buffer)
    return dtype, (channels // 2, *rest), view[: len(view) // 2]
