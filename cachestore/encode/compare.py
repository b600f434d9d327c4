"""Whether a tensor that was made again is the one that was stored, up to rounding. Pure functions of bytes, without torch.

Equal keys hold interchangeable values, not equal bits: batch shape, kernel, device and library version move them by rounding. What is
more than that is another value. `docs/numerics.md` says what was measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestore.core.raw_tensors import Raw, numbers

TOLERANCES: Final[Mapping[str, float]] = {"F64": 1e-4, "F32": 1e-4, "F16": 1e-2, "BF16": 3e-2}
"""Relative L2 distances by dtype that are rounding. Every other dtype is compared bit by bit."""
TF32_TOLERANCE: Final = 2e-3
"""Of float32 latents: torch lets convolutions of NVIDIA GPUs round to TF32, and no entry says where it was made."""
COSINE: Final = 0.999
"""The least cosine of what is the same."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor differs from the one that was stored."""

    tensor: str
    words: str


def tolerance_of(dtype: str, kind: str) -> float | None:
    """The relative L2 distance that is rounding for a dtype; None where every bit counts."""
    if kind == "latents" and dtype == "F32":
        return TF32_TOLERANCE
    return TOLERANCES.get(dtype)


def find_difference(stored: Mapping[str, Raw], made: Mapping[str, Raw], kind: str) -> Difference | None:
    """The first difference between an entry and what was made again; None where there is none but rounding.

    Names, dtypes and shapes must be equal, and so must masks and other whole numbers. Moments are also compared by their mean alone,
    as a log-variance that hardly differs from picture to picture would hide it. Nothing equals nothing.
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
    one, two = (numbers(raw).astype(np.float64).ravel() for raw in (stored, made))
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return "has NaN or infinite numbers"
    lengths = float(np.linalg.norm(one)), float(np.linalg.norm(two))
    distance = float(np.linalg.norm(one - two)) / max(lengths) if any(lengths) else 0.0
    cosine = float(one @ two) / (lengths[0] * lengths[1]) if lengths[0] * lengths[1] else 1.0  # the distance judges one of length 0
    if distance > allowed or cosine < COSINE:
        return f"differs by {distance:.2g} (rounding is below {allowed:g}), cosine {cosine:.4f}"
    return None


def _first_half(raw: Raw) -> Raw:
    dtype, (channels, *rest), buffer = raw
    view = memoryview(buffer)
    return dtype, (channels // 2, *rest), view[: len(view) // 2]
