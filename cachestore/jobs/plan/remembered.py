"""The commands that made a data set, as the store records them: in the header of its catalog, and where a run began that has not ended."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import first_of, listed
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_plan
from cachestore.jobs.plan.options import CHOSEN, LATENTS, PrecomputeRequest
from cachestore.jobs.plan.typed import in_line, typed, without_chosen
from cachestore.jobs.share.passes import PassRef, has_ended, list_passes, read_begun
from cachestore.jobs.share.plan import read_outline
from cachestore.store.format.catalog import HAVE_SOURCES, MADE, Made, no_data_set
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.unfinished import again_in, list_data_sets, list_unfinished
from cachestore.store.write.made import what_made

_ENCODERS: Final = ("text", LATENTS)
"""The order in which `--encode` names what several commands have made."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The commands of a data set."""

    name: str
    requests: tuple[PrecomputeRequest, ...]
    """What was asked for, the last command first: usually one. Options of running are not recorded, and have their defaults."""
    without: tuple[str, ...]
    """Why other parts of the data set cannot be made again by a command, such as "this was imported from ..."."""
    is_finished: bool
    """Whether the last command has ended."""

    def lines(self) -> list[str]:
        """Return each command in one line for a shell."""
        return [in_line(["cachestore", "precompute", *typed(request)]) for request in self.requests]


def remember(layout: Layout, name: str) -> Remembered:
    """Return the commands of a data set. Raises BadInput if there is no such data set, or if none of it was made by a command."""
    catalog, begun = newest_catalog(layout, name, io="mmap"), _last_begun(layout, name)
    if catalog is None and begun is None:
        raise no_data_set(layout, name, name_all(layout))
    if catalog is not None and not catalog.has_sources:
        raise BadInput(f"the data set {name!r} was {MADE[catalog.made]}: no command makes it again", option="name")
    hints = [] if catalog is None else [dict(one) for one in catalog.request.values()]
    asked = dict(begun.request) if begun is not None else {}
    is_finished = catalog is not None and (begun is None or begun.is_finished)
    commands = _together([one for one in hints if one.get("encode") == asked.get("encode")] + hints) if is_finished else [asked]
    requests: list[PrecomputeRequest] = []
    without: list[str] = []
    for one in commands:
        try:
            requests.append(without_chosen(PrecomputeRequest.from_hints({**one, "name": name}, store=str(layout.root))))
        except BadInput as error:
            without.append(str(error))
    if not requests:
        raise BadInput(f"the data set {name!r} cannot be made again by a command: {'; '.join(dict.fromkeys(without))}")
    return Remembered(name, tuple(requests), tuple(dict.fromkeys(without)), is_finished)


def remember_one(layout: Layout, name: str | None) -> Remembered:
    """Return the commands of the named data set; without a name, of the only one. Raises BadInput if there is none, or several."""
    names = name_made(layout)
    if name is None and len(names) == 1:
        name = names[0]
    if name is not None:
        return remember(layout, name)
    if not names:
        none = f"{layout.root} has no data set that a command made, so there is none to repeat"
        raise BadInput(f"{none}: run `cachestore precompute DATA --model MODEL`")
    lines = listed([again_in(layout.root, one) for one in names], "or")
    raise BadInput(
        f"{layout.root} has {len(names)} data sets: add {option('name')} with {listed(names, 'or')}, as in {lines}", option="name"
    )


def name_made(layout: Layout) -> list[str]:
    """Return the names of the data sets that a command can add to: programs published the others."""
    names: list[str] = []
    for name in name_all(layout):
        made: Made | None = None
        with suppress(FormatError):
            made = what_made(layout, name)
        names += [name] if made in {None, *HAVE_SOURCES} else []
    return names


def name_all(layout: Layout) -> list[str]:
    """Return the names of the data sets, also of those that are not finished."""
    return sorted({*list_data_sets(layout), *(one.name for one in list_unfinished(layout))})


@dataclass(frozen=True, slots=True)
class _Begun:
    started: float
    request: Mapping[str, Json]
    is_finished: bool


def _last_begun(layout: Layout, name: str) -> _Begun | None:
    """Return the run over a data set that began last; None if none is recorded: plans are removed once nothing needs them."""
    found: list[_Begun] = []
    for plan in filter(None, map(parse_plan, names_in(layout.plans))):
        with suppress(FormatError, OSError):
            if read_outline(layout, plan).catalog == name and (numbers := list_passes(layout, plan)):
                ref = PassRef(plan, numbers[-1])
                if (begun := read_begun(layout, ref)) is not None:
                    found.append(_Begun(begun.started, begun.request, has_ended(layout, ref)))
    return max(found, key=lambda one: one.started, default=None)


def _together(hints: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join what different commands recorded for each encoder, if one command gives the same: they differ in `encode` alone."""
    joined: list[dict[str, Any]] = []
    for one in hints:
        other = next((some for some in joined if _is_alike(some, one)), None)
        if other is None:
            joined.append(dict(one))
            continue
        names = [*dict.fromkeys((*other.get("encode", ()), *one.get("encode", ())))]
        chosen = one if LATENTS in one.get("encode", ()) else other
        other |= {name: chosen[name] for name in CHOSEN if name in chosen}
        other |= {"encode": sorted(names, key=lambda name: _ENCODERS.index(name) if name in _ENCODERS else -1)} if names else {}
    return joined


def _is_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two commands differ only in what they encode. What planning chooses belongs to latents alone."""
    both = all(LATENTS in some.get("encode", ()) for some in (one, other))
    ignored = {"encode", *(() if both else CHOSEN)}
    return all(one.get(name) == other.get(name) for name in {*one, *other} - ignored)


def say_rest(found: Remembered) -> str:
    """Return a line on what `--again` does not repeat; empty if it repeats all."""
    others = [f"another command made a part of it ({line})" for line in found.lines()[1:]]
    rest = first_of([*others, *found.without])
    return f"not repeated of {found.name!r}: {rest}" if rest else ""
