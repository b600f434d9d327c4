"""Starts the workers of a request and returns their report. Knows no plan, and loads no numpy: workers start the sooner."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cachestore.core.ranks import RankInfo
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.options import PrecomputeRequest
from cachestore.jobs.processes import WORK, Care, joined_report, run_child, run_children
from cachestore.jobs.ranks import own_rank, process_count


def run_workers(request: PrecomputeRequest, rank_info: RankInfo, launch: str, care: Care, variables: Mapping[str, str]) -> dict[str, Any]:
    """Encode in other processes and return their report as JSON: one for this rank of a launch, or several that form a launch of their own.

    `variables` are environment variables for all of them. Raises the error that a worker reported, or Incomplete if none reached the end.
    """
    count = process_count(request)
    with handed_over(request) as work:
        if request.procs is None and count == 1:
            children = run_child(work, {**own_rank(rank_info, launch), **variables}, care)
        else:
            children = run_children(work, count, care, variables)
        return joined_report(children, warn=care.warn)


@contextmanager
def handed_over(request: PrecomputeRequest) -> Generator[list[str]]:
    """Yield the arguments with which a worker is started. The request is a JSON file, which is removed afterwards."""
    with scratch_folder() as folder:
        path = folder / "request.json"
        path.write_text(json.dumps(replace(request, procs=None).as_json()), encoding="utf-8")
        yield [WORK, str(path)]
