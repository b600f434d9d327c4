"""The one way into workers, for `cs.precompute` and the command: list and plan once for all of them, start them, return their report.

Importing this loads no numpy, and neither does starting workers that have to plan themselves.
"""

import json
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.keys import Json
from cachestore.core.ranks import RankInfo
from cachestore.core.spelling import is_typed
from cachestore.files import in_use
from cachestore.files.opening import status_of
from cachestore.files.paths import Layout
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.plan.option_types import allowed_failures
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share.invocations import count_invocation, invocation_of, numbered
from cachestore.jobs.share.report import Report, held_to
from cachestore.jobs.start.processes import LISTING, WORK, Care, joined_report, run_child, run_children
from cachestore.jobs.start.ranks import launch_of, open_for_pass, own_rank, process_count, store_variables

if TYPE_CHECKING:
    from cachestore.sources.combined import InMemory

PLANNED: Final = "planned"
"""The field of a worker's request with what its parent has planned (`Planned.as_json`); null if the worker plans itself."""

TYPED: Final = "typed"
"""The field that says whether messages spell options as on the command line."""


def precompute_in_processes(
    request: PrecomputeRequest, rank_info: RankInfo, care: Care, number: int, *, in_memory: "InMemory | None" = None
) -> Report:
    """Encode in other processes: one for this rank of a launch, or several that form a launch of their own. Runs without torch.

    This process lists and plans for all of them, and starts none if nothing has to be encoded. `number` is the number of the listing. For
    sources in memory, whose listings are `in_memory`, workers ask for the pictures.
    """
    layout, launch, in_memory = Layout.at(request.store), launch_of(rank_info), in_memory or {}
    is_heard = not care.is_quiet and rank_info.rank in {0, None}
    say, warn = (care.say, care.warn) if is_heard else (_be_silent, _be_silent)
    planned: Mapping[str, Json] | None = None
    if _is_model_here(request):
        from cachestore.encode.batching.environment import library_defaults
        from cachestore.jobs.start.here import end_if_complete, list_and_plan

        def show() -> None:
            if care.show is not None:
                care.show(care.status_of([os.getpid()]))

        planning = list_and_plan(request, rank_info, launch, number=number, in_memory=in_memory, say=say, show=show)
        with library_defaults(os.environ), planning as (found, heartbeat, _number):
            layout = found.layout
            heartbeat.launch = launch = numbered(launch, invocation_of(layout, found.plan.name, rank_info))
            report = end_if_complete(found, rank_info, heartbeat, number, say=say, warn=warn)
            if report is not None:
                return report
            request, planned = found.request, found.as_json()
            del found  # the workers read it from the store
    elif in_memory or status_of(layout.marker) is not None:
        # A worker downloads the model, as the hub's client starts threads, so each worker plans, and makes the store if there is none.
        if in_memory and status_of(layout.marker) is None:
            from cachestore.jobs.plan.planning import check_listing, list_request

            check_listing(request, list_request(request, in_memory))
        layout = open_for_pass(request.store, access=request.access, say=say)
    variables = {LISTING: str(number), **(store_variables(layout) if layout.store_id else {})}
    with ExitStack() as stack:
        if in_memory:
            from cachestore.sources.combined import files_in_memory

            care = replace(care, pictures=files_in_memory(in_memory))
            request = request if planned is not None else stack.enter_context(_rows_as_files(layout, request, in_memory))
        report = Report.from_json(run_workers(request, rank_info, launch, care, variables, planned=planned))
    count_invocation(invocation_of(layout, report.plan, rank_info))
    return held_to(report, allowed_failures(request.max_failures, report.wanted), strict=request.strict)


def run_workers(
    request: PrecomputeRequest,
    rank_info: RankInfo,
    launch: str,
    care: Care,
    variables: Mapping[str, str],
    *,
    planned: Mapping[str, Json] | None = None,
) -> dict[str, Any]:
    """Start the workers and return their report as JSON: one for this rank of a launch, or several that form a launch of their own.

    `variables` are environment variables for all of them. Raises the error that a worker reported, or Incomplete if none reached the end.
    """
    count = process_count(request)
    body = {**replace(request, procs=None).as_json(), PLANNED: planned, TYPED: is_typed()}
    with scratch_folder() as folder:
        path = folder / "request.json"
        path.write_text(json.dumps(body), encoding="utf-8")
        if request.procs is None and count == 1:
            children = run_child([WORK, str(path)], {**own_rank(rank_info, launch), **variables}, care)
        else:
            children = run_children([WORK, str(path)], count, care, variables)
    return joined_report(children, warn=care.warn)


def _is_model_here(request: PrecomputeRequest) -> bool:
    from cachestore.encode.models.hub import is_here

    return all(is_here(name, request.revision) for name in (request.model, request.vae, request.text_encoder) if name is not None)


@contextmanager
def _rows_as_files(layout: Layout, request: PrecomputeRequest, in_memory: "InMemory") -> Generator[PrecomputeRequest]:
    """Yield the request with the rows of sources in memory as files, which are removed afterwards."""
    from cachestore.sources.memory import write_rows

    sources, paths = list(request.sources), list[Path]()
    try:
        for number, listing in in_memory.items():
            path = write_rows(layout, listing, str(number))
            paths.append(path)
            sources[number] = replace(sources[number], data=str(path))
        yield replace(request, sources=tuple(sources))
    finally:
        for path in paths:
            in_use.unlink(path, missing_ok=True)


def _be_silent(_line: str) -> None:
    pass
