"""Columns of tables as numpy arrays, without a copy if they are in one buffer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cachestore.files.table import run_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def rows(values: Sequence[bytes], width: int) -> Bytes:
    """Return digests as rows of uint8."""
    return np.frombuffer(run_of(values), np.uint8).reshape(-1, width)


def numbers(values: Sequence[int]) -> Numbers:
    """Return numbers as an int64 array."""
    if isinstance(values, range):
        return np.arange(values.start, values.stop, dtype=np.int64)
    return np.frombuffer(values, np.int64) if isinstance(values, memoryview) else np.array(values, np.int64)
