"""Starts the workers of a request and returns their report. Knows no plan, and loads no numpy: workers start the sooner."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cachestore.core.keys import Json
from cachestore.core.ranks import RankInfo
from cachestore.core.spelling import is_typed
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.processes import WORK, Care, joined_report, run_child, run_children
from cachestore.jobs.start.ranks import own_rank, process_count

PLANNED: Final = "planned"
"""The field of a worker's request with what its parent has planned (`Planned.handed_on`); null if the worker plans itself."""

TYPED: Final = "typed"
"""The field that says whether messages spell options as on the command line."""


def run_workers(
    request: PrecomputeRequest,
    rank_info: RankInfo,
    launch: str,
    care: Care,
    variables: Mapping[str, str],
    *,
    planned: Mapping[str, Json] | None = None,
) -> dict[str, Any]:
    """Encode in other processes and return their report as JSON: one for this rank of a launch, or several that form a launch of their own.

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
