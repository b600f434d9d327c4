"""Checks that the ranks of a launch have the same plan, and lets them wait for rank 0 to make it.

Each invocation writes into its heartbeat what its plan follows from. Without this check, ranks that list different files or load
different models would each do all the work, and the last one's catalog would stand. Rank 0 builds the plan and opens the pass. The
others wait for it for a limited time and then do it themselves: publishing twice is harmless.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json
from cachestore.core.samples import Sample
from cachestore.core.words import first_of
from cachestore.files.paths import Layout, parse_plan
from cachestore.jobs.share.passes import PassRef, read_done
from cachestore.jobs.share.plan import Plan, is_published, read_plan
from cachestore.jobs.share.workers import PLANNING, Beat, Heartbeat, Life, Watch, read_heartbeats

NAMED: Final = 5
LOOK_SECONDS: Final = 0.1
STILL_SECONDS: Final = 5.0
COUNTED_SAMPLES: Final = 1000


@dataclass(frozen=True, slots=True)
class Intent:
    """What an invocation is about to work on."""

    asked: str
    """Digest of the catalog's name and of the arguments that change keys."""
    fingerprints: Mapping[str, str]
    """The recipe's fingerprint of each encoder, by the encoder's name."""
    content: str
    """Digest of what the source lists."""
    plan: str

    def as_json(self) -> dict[str, Json]:
        """The fields that a heartbeat contains."""
        return asdict(self)

    @classmethod
    def of(cls, shown: Beat) -> "Intent | None":
        """Return what another invocation is about to work on, by its heartbeat; None if that does not say so."""
        body = shown.detail
        is_whole = all(isinstance(body.get(name), str) for name in ("asked", "content", "plan"))
        if not is_whole or not isinstance(body.get("fingerprints"), dict) or parse_plan(body["plan"]) is None:
            return None
        fingerprints = cast("dict[str, Any]", body["fingerprints"])
        return cls(body["asked"], {name: str(value) for name, value in fingerprints.items()}, body["content"], body["plan"])


def who_differs(layout: Layout, mine: Intent, *, worker: str) -> list[tuple[Beat, Intent]]:
    """Return the living workers that have the same arguments but another plan. `worker` is this invocation's own."""
    watch = Watch(layout)
    others = [(shown, theirs) for shown in read_heartbeats(layout) if (theirs := Intent.of(shown)) is not None]
    return [
        (shown, theirs)
        for shown, theirs in others
        if shown.worker != worker
        and not shown.has_ended
        and theirs.asked == mine.asked
        and theirs.plan != mine.plan
        and watch.life_of(shown.worker) is Life.LIVE
        and not (shown.plan and read_done(layout, PassRef(shown.plan, shown.pass_number)))  # its pass has ended
    ]


def is_same_launch(one: str, other: str) -> bool:
    """Return whether two names are of one launch; the number of the invocation, after `#`, may differ."""
    return one.partition("#")[0] == other.partition("#")[0]


def in_words(layout: Layout, mine: Intent, shown: Beat, theirs: Intent) -> str:
    """Describe how another invocation's plan differs: other fingerprints, or up to five samples."""
    who = f"rank {shown.rank} ({shown})"
    if theirs.fingerprints != mine.fingerprints:
        models = [f"{name}: {mine.fingerprints.get(name, 'none')[:12]} here, {its[:12]} there" for name, its in theirs.fingerprints.items()]
        return f"{who} has other models, by their fingerprints: {'; '.join(models[:NAMED])}"
    here, there = _published(layout, mine.plan), _published(layout, theirs.plan)
    if here is None or there is None:
        return f"{who} lists another source: content {theirs.content[:12]} there, {mine.content[:12]} here"
    only_here, only_there = _named(_new(here, there)), _named(_new(there, here))
    differences = [f"only here: {only_here}"] * bool(only_here) + [f"only there: {only_there}"] * bool(only_there)
    differences = differences or [f"other captions or files for {_named(_changed(here, there)) or 'the same samples, in another order'}"]
    return f"{who} lists another source: {'; '.join(differences)}"


def check_agreement(layout: Layout, mine: Intent, heartbeat: Heartbeat, say: Callable[[str], None], *, strict: bool) -> None:
    """Compare this plan with those of others. A difference raises BadInput within one launch or if `strict`; else it goes to `say`."""
    for other, theirs in who_differs(layout, mine, worker=heartbeat.worker):
        words = in_words(layout, mine, other, theirs)
        if strict or is_same_launch(other.launch, heartbeat.launch):
            raise BadInput(f"{words}. Give every rank the same source and model; this rank encoded nothing")
        say(f"another run works on the same data set: {words}. Both continue; the one that listed its source last publishes the data set")


def wait_for_rank_0(
    layout: Layout,
    heartbeat: Heartbeat,
    is_done: Callable[[], bool],
    *,
    unseen_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until `is_done`: rank 0 of this launch, or of this plan, has then done its part of planning. Return whether it has.

    Gives up when rank 0's count has not risen for 5 s, or for `unseen_seconds` if no living rank 0 is planning.
    """
    watch, since, count = Watch(layout), clock(), -1
    while not is_done():
        planning = [
            shown
            for shown in read_heartbeats(layout)
            if shown.rank == 0 and shown.phase == PLANNING and _is_with(heartbeat, shown) and watch.life_of(shown.worker) is Life.LIVE
        ]
        risen = max((shown.count for shown in planning), default=-1)
        if risen > count:
            since, count = clock(), risen
        if clock() - since >= (STILL_SECONDS if planning else unseen_seconds):
            return False
        sleep(LOOK_SECONDS)
    return True


def _is_with(heartbeat: Heartbeat, other: Beat) -> bool:
    """Whether two invocations belong together: they have the same launch or, if started by hand, the same plan."""
    is_same_plan = "plan" in other.detail and other.detail["plan"] == heartbeat.detail.get("plan")
    return is_same_plan or is_same_launch(other.launch, heartbeat.launch)


def counted(samples: Iterable[Sample], heartbeat: Heartbeat) -> Iterator[Sample]:
    """Yield the samples, and raise the heartbeat's count now and then: a million take longer than others wait for a silent worker."""
    for number, sample in enumerate(samples):
        if number % COUNTED_SAMPLES == 0:
            heartbeat.rise()
        yield sample


def _published(layout: Layout, name: str) -> Plan | None:
    try:
        return read_plan(layout, name) if is_published(layout, name) else None
    except (FormatError, FileNotFoundError):
        return None


def _names(plan: Plan) -> Iterable[str]:
    """The sample ids of a plan, or its keys if it has no samples."""
    return (uid.hex() for uid in plan.unit_ids) if plan.ids_are_keys else plan.ids


def _new(plan: Plan, other: Plan) -> Iterator[str]:
    known = set(_names(other))
    return (name for name in _names(plan) if name not in known)


def _changed(plan: Plan, other: Plan) -> Iterator[str]:
    theirs = dict(zip(other.ids, _rows(other), strict=True))
    return (sample for sample, row in zip(plan.ids, _rows(plan), strict=True) if theirs.get(sample) != row)


def _rows(plan: Plan) -> Iterator[Sequence[Any]]:
    for row in range(len(plan.ids)):
        images = {role: list(references[at[row] : at[row + 1]]) for role, (at, references) in plan.images.items()}
        yield plan.captions[plan.captions_at[row] : plan.captions_at[row + 1]], images, plan.extras[row]


def _named(names: Iterator[str]) -> str:
    return first_of(map(repr, names), NAMED)
