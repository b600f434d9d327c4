"""Tests over many alike things: all of them in the slow run, a share in the ordinary one. Different tests take different shares."""

from collections.abc import Iterable
from typing import Any

import pytest


def share(values: Iterable[Any], of: int, at: int = 0) -> list[Any]:
    """Return the values as parameters of which every `of`-th is ordinary, beginning at `at`, and the others are slow."""
    return [value if number % of == at % of else pytest.param(value, marks=pytest.mark.slow) for number, value in enumerate(values)]
