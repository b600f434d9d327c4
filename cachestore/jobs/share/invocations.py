"""Counts the invocations of this process that have ended: a second call in one launch must not get the report of the first."""

from pathlib import Path

from cachestore.core.ranks import RankInfo
from cachestore.files.paths import Layout

Invocation = tuple[Path, str, int | None]
"""(store, name of the plan, rank): the invocations with equal values are counted together."""

_invocations: dict[Invocation, int] = {}
"""How many invocations of this process have ended."""


def invocation_of(layout: Layout, plan: str, rank_info: RankInfo) -> Invocation:
    """Return the values by which this process counts its invocations; `plan` is the plan's name."""
    return layout.root, plan, rank_info.rank


def numbered(launch: str, invocation: Invocation) -> str:
    """Return the launch's name for this invocation: with `#` and a number from the second one on."""
    return f"{launch}#{_invocations[invocation]}" if _invocations.get(invocation) else launch


def count_invocation(invocation: Invocation) -> None:
    """Count an invocation that has ended."""
    _invocations[invocation] = _invocations.get(invocation, 0) + 1
