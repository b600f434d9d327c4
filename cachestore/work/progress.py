"""How far a pass is, seen from outside: from rounds, claims, ledgers and the workers' beats. Changes nothing.

Units are counted when published: a worker's beat counts what is acknowledged, never what is merely encoded.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cachestore.errors import FormatError
from cachestore.files.locks import is_locked
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, parse_claim, parse_plan
from cachestore.keys import Json
from cachestore.work.ledgers import list_ledgers
from cachestore.work.passes import PassRef, Round, list_passes, list_rounds, read_done, read_round
from cachestore.work.plan import read_plan
from cachestore.work.workers import boot_id, host_name, read_beats


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One worker of a pass."""

    rank: int | None
    host: str
    pid: int
    rate: float
    """Units it finished a second, since it started."""
    done: int
    beat_age_seconds: float
    """By this machine's clock; compares two clocks where the worker runs elsewhere."""
    phase: str
    reused: int
    encoded: int
    failed: int
    alive: bool | None
    """None where this machine cannot tell."""


@dataclass(frozen=True, slots=True)
class PassStatus:
    """One plan's newest pass."""

    plan: str
    number: int
    name: str
    partitions: int
    """Of the newest round."""
    finished: int
    claimed: int
    """Claimed and not finished."""
    reused: int
    encoded: int
    failed: int
    complete: bool
    total: int
    """Units of the plan."""
    units: int
    """Units the newest round works on."""
    round: int
    ranks: tuple[RankStatus, ...]

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore status --json` lists."""
        body = asdict(self)
        body["pass"] = body.pop("number")
        return body


def all_status(layout: Layout) -> list[PassStatus]:
    """The newest pass of every plan in a store; a damaged plan is passed over."""
    found: list[PassStatus] = []
    for plan in filter(None, map(parse_plan, names_in(layout.plans))):
        numbers = list_passes(layout, plan)
        try:
            if numbers:
                found.append(pass_status(layout, PassRef(plan, numbers[-1])))
        except (FormatError, FileNotFoundError):
            continue
    return found


def pass_status(layout: Layout, ref: PassRef) -> PassStatus:
    """How far one pass is. Raises FormatError, FileNotFoundError for a plan that cannot be read."""
    plan = read_plan(layout, ref.plan)
    folder = ref.folder(layout)
    rounds = list_rounds(folder)
    opened = read_round(layout, ref, plan, rounds[-1]) if rounds else Round(0, tuple(() for _recipe in plan.recipes), "", 0.0)
    partitions = sum(opened.partition_count(recipe) for recipe in range(len(plan.recipes)))
    finished = list_ledgers(folder, opened.number)
    claims = [
        name
        for name in map(parse_claim, names_in(folder.claims))
        if name and name.round == opened.number and name.recipe < len(plan.recipes)
    ]
    done = read_done(layout, ref)
    ranks = tuple(_rank_status(layout, beat) for beat in read_beats(layout, plan=ref.plan) if beat["pass"] == ref.number)
    kept = plan.unit_count - read_round(layout, ref, plan, 0).unit_count if rounds else 0
    counts = done.report if done else _sum(ranks, kept)
    return PassStatus(
        plan=ref.plan,
        number=ref.number,
        name=plan.catalog,
        partitions=partitions,
        finished=len(finished),
        claimed=len({(name.recipe, name.partition) for name in claims} - finished),
        reused=counts["reused"],
        encoded=counts["encoded"],
        failed=counts["failed"],
        complete=done is not None,
        total=plan.unit_count,
        units=opened.unit_count,
        round=opened.number,
        ranks=ranks,
    )


def _sum(ranks: tuple[RankStatus, ...], kept: int) -> Mapping[str, Any]:
    return {
        "reused": kept + sum(rank.reused for rank in ranks),
        "encoded": sum(rank.encoded for rank in ranks),
        "failed": sum(rank.failed for rank in ranks),
    }


def _rank_status(layout: Layout, beat: Mapping[str, Any]) -> RankStatus:
    now = time.time()
    done = beat["reused"] + beat["encoded"] + beat["failed"]
    is_here = beat["host"] == host_name() and beat["boot"] == boot_id()
    alive = is_locked(layout.worker_lock(beat["worker"])) if is_here else None
    return RankStatus(
        rank=beat["rank"],
        host=beat["host"],
        pid=beat["pid"],
        rate=round(done / max(beat["updated"] - beat["started"], 0.001), 2),
        done=done,
        beat_age_seconds=round(max(0.0, now - beat["updated"]), 1),
        phase=beat["phase"],
        reused=beat["reused"],
        encoded=beat["encoded"],
        failed=beat["failed"],
        alive=alive,
    )
