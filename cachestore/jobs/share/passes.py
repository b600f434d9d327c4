"""Passes and rounds: a pass is one run over a plan, a round the units that it works on together. Files are never overwritten."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cachestore.core.errors import WRONG_FIELDS, FormatError
from cachestore.core.keys import Json
from cachestore.core.words import plural
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, PassFolder, damaged, encode_name, parse_pass, parse_round
from cachestore.files.publish import make_folder, publish
from cachestore.files.records import encode_record, read_record
from cachestore.jobs.share.partition import bounds, partition_count
from cachestore.jobs.share.plan import Plan

ROUND_FORMAT: Final = "cachestore-round"
DONE_FORMAT: Final = "cachestore-done"
VERSION: Final = 1

ROUND_LIMIT: Final = 3
"""A unit that is still missing after this many rounds has failed."""


@dataclass(frozen=True, slots=True)
class PassRef:
    """A pass over a plan."""

    plan: str
    number: int

    @property
    def origin(self) -> str:
        """The text by which a segment names the pass that wrote it."""
        return f"{self.plan}/{self.number}"

    def folder(self, layout: Layout) -> PassFolder:
        """The paths of the pass."""
        return PassFolder(layout.pass_folder(self.plan, self.number))


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a pass, and its units."""

    number: int
    units: tuple[Sequence[int], ...]
    """For each recipe, the indices of its units: sorted, or in the order in which a trainer needs them."""
    launch: str
    started: float
    """Seconds since the epoch, by the clock of the worker that began it; for reports only."""
    generation: int | None = None
    """The catalog from which the units left out of round 0 were taken."""
    workers: int = 1
    """For how many workers its ranges are cut. All that claim them cut alike, whatever world size they believe in."""

    def partition_count(self, recipe: int) -> int:
        """Return the number of a recipe's partitions in this round."""
        return partition_count(len(self.units[recipe]))

    def partition(self, recipe: int, number: int) -> Sequence[int]:
        """Return the unit indices of a partition."""
        start, end = bounds(len(self.units[recipe]), number)
        return self.units[recipe][start:end]

    @property
    def unit_count(self) -> int:
        """The number of units in the round."""
        return sum(len(units) for units in self.units)


@dataclass(frozen=True, slots=True)
class Done:
    """How a pass ended."""

    report: Mapping[str, Json]
    launches: tuple[str, ...]
    request: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The hints in the catalog's header, with which it can be built again."""


def list_passes(layout: Layout, plan: str) -> list[int]:
    """Return the numbers of a plan's passes, oldest first."""
    return sorted(number for number in map(parse_pass, names_in(layout.plan_folder(plan))) if number is not None)


def read_done(layout: Layout, ref: PassRef) -> Done | None:
    """Return how a pass ended; None if it has not ended, or if the file is damaged or of another plan. Looks by listing."""
    if not has_ended(layout, ref):
        return None
    try:
        body = read_record(ref.folder(layout).done, DONE_FORMAT, VERSION)
        done = Done(dict(body["report"]), tuple(map(str, body["launches"])), dict(body.get("request", {})))
        is_at_home = done.report["plan"] == ref.plan and _is_report(done.report)
    except (FormatError, FileNotFoundError, *WRONG_FIELDS):
        return None
    return done if is_at_home else None


def _is_report(report: Mapping[str, Any]) -> bool:
    """Whether the fields that others read have the right types. Raises KeyError, TypeError, or BadInput for an impossible name."""
    numbers = [report[name] for name in ("generation", "reused", "encoded", "failed")]
    rows = [(row["sample"], row["encoder"], row["reason"]) for row in report.get("failures", ())]
    if report["name"]:
        encode_name(report["name"])
    return all(type(number) is int for number in numbers) and all(isinstance(text, str) for row in rows for text in (*row, report["name"]))


def has_ended(layout: Layout, ref: PassRef) -> bool:
    """Return whether a pass has ended, by listing; the record itself may be damaged."""
    folder = ref.folder(layout)
    return folder.done.name in names_in(folder.root)


def publish_done(
    layout: Layout, ref: PassRef, report: Mapping[str, Json], launches: Sequence[str], request: Mapping[str, Json] | None = None
) -> Done:
    """End a pass. If it has ended already, return the end that was published first."""
    body: dict[str, Json] = {"report": dict(report), "launches": sorted(set(launches)), "request": dict(request or {})}
    publish(layout, ref.folder(layout).done, [encode_record(DONE_FORMAT, VERSION, body)])
    return read_done(layout, ref) or Done(report, tuple(launches), request or {})


def join_pass(layout: Layout, plan: str, launch: str) -> PassRef:
    """Return the newest pass if it is unfinished and sound, or ended under this launch. Else make the next; all workers share it."""
    newest = PassRef(plan, max(list_passes(layout, plan), default=0))
    if newest.number and not has_ended(layout, newest) and _is_sound(layout, newest):
        return _make(layout, newest)
    done = read_done(layout, newest)
    if done is not None and launch in done.launches:
        return newest
    return _make(layout, PassRef(plan, newest.number + 1))


def _is_sound(layout: Layout, ref: PassRef) -> bool:
    """Whether the rounds of a pass can be read. A pass with an unreadable round can never end."""
    try:
        for number in list_rounds(ref.folder(layout)):
            read_round_record(layout, ref, number)
    except FormatError:
        return False
    return True


def _make(layout: Layout, ref: PassRef) -> PassRef:
    folder = ref.folder(layout)
    for path in (folder.root, folder.rounds, folder.claims, folder.ledgers):
        make_folder(layout, path)
    return ref


def list_rounds(folder: PassFolder) -> list[int]:
    """Return the numbers of a pass's rounds, in order."""
    return sorted(number for number in map(parse_round, names_in(folder.rounds)) if number is not None)


def publish_round(layout: Layout, ref: PassRef, plan: Plan, opened: Round, request: Mapping[str, Json] | None = None) -> bool:
    """Begin a round. Return False if another worker did. A recipe with all its units in the round, sorted, is written as null.

    `request` are the hints that the catalog's header will have: a pass that does not end can be run again with them.
    """
    listed = [list(units) for units in opened.units]
    units = [None if each == list(plan.units_of(recipe)) else each for recipe, each in enumerate(listed)]
    body: dict[str, Json] = {"plan": ref.plan, "pass": ref.number, "round": opened.number, "units": units, "launch": opened.launch}
    body |= {"started": opened.started, "generation": opened.generation, "workers": opened.workers}
    body |= {"request": dict(request)} if request else {}
    return publish(layout, ref.folder(layout).round(opened.number), [encode_record(ROUND_FORMAT, VERSION, body)])


def read_round_record(layout: Layout, ref: PassRef, number: int) -> Mapping[str, Any]:
    """Return the record of a round. Raises FileNotFoundError, or FormatError if it is damaged or of another plan, pass or number."""
    path = ref.folder(layout).round(number)
    body: Mapping[str, Any] = read_record(path, ROUND_FORMAT, VERSION)
    own = {"plan": ref.plan, "pass": ref.number, "round": number}
    if any(body.get(name) != value for name, value in own.items()):
        raise damaged(f"{path} is the round of another pass", path)
    return body


@dataclass(frozen=True, slots=True)
class Begun:
    """How a pass began."""

    started: float
    """Seconds since the epoch, by the clock of the worker that began it."""
    request: Mapping[str, Json]
    """The hints of its request; empty for `fill`."""


def read_begun(layout: Layout, ref: PassRef) -> Begun | None:
    """Return how a pass began; None if its first round was not published yet, or is damaged."""
    try:
        body = read_round_record(layout, ref, 0)
        return Begun(float(body["started"]), dict(body.get("request", {})))
    except (FormatError, FileNotFoundError, *WRONG_FIELDS):
        return None


def read_round(layout: Layout, ref: PassRef, plan: Plan, number: int) -> Round:
    """Read a round. Raises FormatError, FileNotFoundError."""
    path = ref.folder(layout).round(number)
    body = read_round_record(layout, ref, number)
    generation = body.get("generation")
    try:
        units = tuple(_units_in(plan, recipe, listed) for recipe, listed in enumerate(body["units"]))
        generation = None if generation is None else int(generation)
        found = Round(number, units, str(body["launch"]), float(body["started"]), generation, max(1, int(body["workers"])))
    except WRONG_FIELDS as error:
        raise damaged(f"{path} names units that are not in its plan", path) from error
    if len(units) != len(plan.recipes):
        raise damaged(f"{path} has {plural(len(units), 'recipe')}, but its plan has {len(plan.recipes)}", path)
    return found


def _units_in(plan: Plan, recipe: int, listed: Sequence[int] | None) -> Sequence[int]:
    """A recipe's units in a round; `listed` is None for all of them. Raises ValueError for units of another recipe or plan."""
    there = plan.units_of(recipe)
    if listed is None:
        return there
    if any(type(index) is not int or index not in there for index in listed):
        raise ValueError("a unit of another recipe or plan")
    return tuple(listed)
