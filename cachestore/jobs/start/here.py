"""Does one process's part of a request: `list_and_plan` makes its plan, and `precompute_here` then takes part in the pass.

A worker takes over what its parent has planned (`planned_before`). Any other process lists the source and plans, once.
"""

import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cachestore.core.ranks import RankInfo
from cachestore.encode.batching.environment import set_library_defaults
from cachestore.files.marker import noticing_its_end
from cachestore.files.opening import status_of
from cachestore.files.paths import Layout
from cachestore.jobs.plan.comparison import Compare
from cachestore.jobs.plan.encoders import needs_of_request
from cachestore.jobs.plan.option_types import allowed_failures
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.planning import Planned, check_listing, list_request, plan_request, publish_if_new
from cachestore.jobs.run.pass_loop import end_complete_pass, run_pass
from cachestore.jobs.run.reconcile import unknown_units
from cachestore.jobs.run.task import Cancel, Job, OnProgress
from cachestore.jobs.share.agreement import check_agreement
from cachestore.jobs.share.report import Report, held_to
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start.forecast import check_room_again, tell_beforehand
from cachestore.jobs.start.ranks import Say, find_rank, launch_of, open_for_pass, say_conflict, threads_for
from cachestore.sources.combined import InMemory
from cachestore.store.write.listing_numbers import listing_number

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel

_log = logging.getLogger("cachestore")


@contextmanager
def list_and_plan(
    request: PrecomputeRequest,
    rank_info: RankInfo,
    launch: str,
    *,
    number: int | None = None,
    in_memory: InMemory | None = None,
    loaded: "LoadedModel | None" = None,
    planned_before: Mapping[str, Any] | None = None,
    compare_with: Compare | None = None,
    store_id: str = "",
    say: Say = _log.info,
    show: Callable[[], None] | None = None,
) -> Generator[tuple[Planned, Heartbeat, int]]:
    """List the source and publish its plan; yield the plan, the heartbeat of this process and the number of the listing.

    Makes the store if there is none, once the source was checked. `number` is the number of the caller's listing; without it this process
    takes a new one. `planned_before` is what `Planned.as_json` returned in the parent: then nothing is listed. `compare_with` as for
    `plan_request`. With a `store_id`, only that store is written, and none is made. `show` is called when the heartbeat was written.
    """
    listing = None
    if planned_before is None:
        if request.strict:
            needs_of_request(request, loaded)  # raises now, before a store is made
        if status_of(Layout.at(request.store).marker) is None:  # so that no store is made for a source that cannot be used
            listing = list_request(request, in_memory)
            check_listing(request, listing)
            number = number or 0  # where it was listed before there was a store, no catalog can be replaced
    layout = open_for_pass(request.store, store_id, access=request.access, say=say)
    numbered = nullcontext(number) if number is not None else listing_number(layout, request.name)
    context = Heartbeat(layout, "", 0, launch, rank_info.rank, rank_info.world_size, on_write=show)
    with noticing_its_end(layout), numbered as own_number, context as heartbeat:
        if planned_before is not None:
            planned = Planned.from_json(layout, request, planned_before, heartbeat)
        else:
            if listing is None:
                heartbeat.show(doing=f"listing {request.named_data}")
                listing = list_request(request, in_memory)
            planned = plan_request(layout, request, listing, loaded=loaded, heartbeat=heartbeat, compare_with=compare_with)
            planned = publish_if_new(planned)
        yield planned, heartbeat, own_number


def precompute_here(
    request: PrecomputeRequest,
    *,
    say: Say = _log.info,
    warn: Say = _log.warning,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    loaded: "LoadedModel | None" = None,
    in_memory: InMemory | None = None,
    number: int | None = None,
    planned_before: Mapping[str, Any] | None = None,
    store_id: str = "",
    launch: str = "",
    compare_with: Compare | None = None,
) -> Report:
    """Do one worker's part of `precompute` in this process; return the report. `say` and `warn` get lines for a person.

    `loaded` replaces the request's model; `in_memory` are the listings of its sources in memory. `launch` is this process's launch, if it
    is known. The other arguments are those of `list_and_plan`.
    """
    set_library_defaults(os.environ)
    rank_info = find_rank(request.rank, request.world_size)
    say_conflict(rank_info, say)
    with list_and_plan(
        request,
        rank_info,
        launch or launch_of(rank_info),
        number=number,
        in_memory=in_memory,
        loaded=loaded,
        planned_before=planned_before,
        compare_with=compare_with,
        store_id=store_id,
        say=say,
    ) as (planned, heartbeat, own_number):
        check_agreement(planned.layout, planned.intent, heartbeat, say, strict=request.strict)
        job = _job_of(planned, rank_info, heartbeat, own_number)
        report = run_pass(
            replace(
                job,
                cancel=cancel,
                on_progress=on_progress,
                on_open=partial(tell_beforehand, planned, heartbeat, say, warn) if rank_info.rank in {0, None} else None,
                on_loaded=partial(check_room_again, planned, heartbeat, say),
            )
        )
    return _of_request(report, planned)


def end_if_complete(planned: Planned, rank_info: RankInfo, heartbeat: Heartbeat, number: int, *, say: Say, warn: Say) -> Report | None:
    """If every unit is known to be present, end the pass and return its report; else None. Starts nothing; runs without torch."""
    job = _job_of(planned, rank_info, heartbeat, number)
    reconciler, missing = unknown_units(job, heartbeat.rise)
    if missing:
        return None
    check_agreement(planned.layout, planned.intent, heartbeat, say, strict=planned.request.strict)
    if rank_info.rank in {0, None}:
        job = replace(job, on_open=partial(tell_beforehand, planned, heartbeat, say, warn, reconciler))
    report = end_complete_pass(job, heartbeat, reconciler)
    return None if report is None else _of_request(report, planned)


def _job_of(planned: Planned, rank_info: RankInfo, heartbeat: Heartbeat, number: int) -> Job:
    request = planned.request
    return Job(
        planned.layout,
        planned.plan,
        planned.encoders,
        planned.files,
        rank_info,
        heartbeat.launch,
        request=request.hints(),
        threads=threads_for(request.workers, rank_info.local_world_size),
        heartbeat=heartbeat,
        listing_number=number,
        unused=planned.unused,
        is_recheck=request.recheck,
        compare=partial(planned.compare, planned.plan),
    )


def _of_request(report: Report, planned: Planned) -> Report:
    """Return the report with what only this request knows: whether so many failures are allowed, and what was planned."""
    request = planned.request
    return replace(
        held_to(report, allowed_failures(request.max_failures, report.wanted), strict=request.strict),
        not_made_here=planned.not_made_here,
        without_picture=planned.plan.without_picture,
        unused=planned.unused,
        rechecked={**report.rechecked, **planned.model_files},
    )
