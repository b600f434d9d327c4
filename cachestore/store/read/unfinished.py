"""The data sets of a store by name, and those that are not finished: no run over them has ended, so they have no generation to read."""

import shlex
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import first_of, listed
from cachestore.files.paths import Layout
from cachestore.store.format.catalog import list_generations, list_names, no_data_set
from cachestore.store.format.line import list_line


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A data set without a generation, and how far its newest run is."""

    name: str
    done: int
    """Values that are published, found or failed."""
    total: int
    at_work: bool
    """Whether a worker is working on it."""

    def in_words(self, layout: Layout) -> str:
        """Return how far it is and how it is finished, as a sentence without a full stop."""
        if self.at_work:
            far = f"{self.done} of {self.total} values so far: {layout.command('status')} follows it"
            return f"a run is working on the data set {self.name!r} ({far})"
        far = f"the data set {self.name!r} is not finished ({self.done} of {self.total} values)"
        return f"{far}. If no run is working on it, run the same precompute again, or {again_in(layout.root, self.name)}"

    def as_json(self) -> dict[str, Json]:
        """Return the object that commands print with `--json`."""
        return asdict(self)


def again_in(store: Path, name: str) -> str:
    """Return the command that repeats the last command of a data set, in backticks."""
    return f"`cachestore precompute --again --store {shlex.quote(str(store))} --name {shlex.quote(name)}`"


def list_data_sets(layout: Layout) -> list[str]:
    """Return the names of the data sets, sorted: those that have a generation, or entries. Those that were dropped have none."""
    return sorted(name for name in list_names(layout) if list_line(layout, name).is_there)


def list_unfinished(layout: Layout) -> list[Unfinished]:
    """Return the data sets that are not finished, sorted by name."""
    # A trainer's workers must not load what claims and locks; only who asks for a data set that is not there comes here.
    progress = import_module("cachestore.jobs.share.progress")
    there = set(list_data_sets(layout))
    statuses: list[Any] = [one for one in progress.all_status(layout) if one.name and one.name not in there and not one.complete]
    newest: dict[str, Any] = {}
    for one in statuses:
        other = newest.get(one.name)
        if other is None or bool(one.at_work) > bool(other.at_work) or one.done > other.done:
            newest[one.name] = one
    return [Unfinished(name, one.done, one.total, bool(one.at_work)) for name, one in sorted(newest.items())]


def find_generation(layout: Layout, name: str, asked: int | None) -> int:
    """Return the generation to read of a data set: the one that is asked for, else the newest. Raises BadInput if there is none."""
    generations = list_generations(layout, name)
    if not generations:
        raise not_there(layout, name, list_data_sets(layout))
    if asked is not None and asked not in generations:
        there = first_of(map(str, reversed(generations)))
        raise BadInput(f"the data set {name!r} of {layout.shown} has no generation {asked}; it has {there}", option="generation")
    return generations[-1] if asked is None else asked


def check_there(layout: Layout, name: str | None) -> None:
    """Raise BadInput if a name is given and no data set that is finished has it."""
    if name is not None and name not in (there := list_data_sets(layout)):
        raise not_there(layout, name, there)


def not_there(layout: Layout, name: str, names: Collection[str]) -> BadInput:
    """Return the error for a name that no data set has: one of this name may be unfinished. `names` are those that there are."""
    found = next((one for one in list_unfinished(layout) if one.name == name), None)
    return no_data_set(layout, name, names) if found is None else BadInput(f"{layout.root}: {found.in_words(layout)}", option="name")


def several_there(layout: Layout, names: Collection[str]) -> BadInput:
    """Return the error for a command on one data set that does not say which of several."""
    add = f"add {option('name')} with {listed(names, 'or')}"
    return BadInput(f"{layout.shown} has {len(names)} data sets: {add}", option="name")
