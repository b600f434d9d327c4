"""This process's rank, how many processes to start, and the variables they get. Reads the environment; starts nothing."""

import logging
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.core.ranks import RankInfo, discover
from cachestore.core.spelling import option
from cachestore.files.paths import Access, Layout, Mode
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share.workers import host_name
from cachestore.jobs.start.processes import gpu_count, processors
from cachestore.store.read.snapshot import open_layout
from cachestore.store.write.commit import create_store

READ_THREADS: Final = 16
"""The most threads that read and decode, if the caller gives no number."""

_log = logging.getLogger("cachestore")

Say = Callable[[str], None]
"""Takes a line for a person."""


def find_rank(rank: int | None, world_size: int | None) -> RankInfo:
    """Return this process's rank and launch, from the environment. torch.distributed counts only if it is initialised already."""
    found: tuple[int, int] | None = None
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found = (distributed.get_rank(), distributed.get_world_size())
    return discover(os.environ, rank=rank, world_size=world_size, distributed=found)


_reported: set[str] = set()
"""Conflicts in this process's environment that were reported already: once is enough."""


def say_conflict(rank_info: RankInfo, say: Say) -> None:
    """If the environment contradicts itself, report it once in this process."""
    if rank_info.conflict and rank_info.conflict not in _reported:
        _reported.add(rank_info.conflict)
        say(rank_info.conflict)


def launch_of(rank_info: RankInfo) -> str:
    """Return the launch's name; under torchrun without a run id it is made from the agent's process, without a launcher at random."""
    if rank_info.launch:
        return rank_info.launch
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"agent:{host_name()}:{os.getppid()}:{_started(os.getppid())}"
    return f"own:{secrets.token_hex(8)}"


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty if the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def threads_for(asked: int | None, local_world_size: int) -> int:
    """Return how many threads read and decode: `asked`, else this process's part of the processors, from 1 to 16."""
    return max(1, min(READ_THREADS, processors() // local_world_size)) if asked is None else asked


def process_count(request: PrecomputeRequest) -> int:
    """Return how many processes to start: `procs`; else 1 under a launcher or if a device is given; else one for each GPU."""
    if request.procs is not None:
        if request.procs > 1 and request.rank is not None:
            got = f"{option('rank')}; got {request.procs}"
            raise BadInput(f"{option('procs')} starts local ranks, so it cannot be used with {got}", option="procs")
        return request.procs
    is_launched = request.rank is not None or find_rank(None, None).found_in != "single process"
    return 1 if is_launched or request.device != "auto" else max(1, gpu_count())


def own_rank(rank_info: RankInfo, launch: str) -> dict[str, str]:
    """Return launch and rank as variables for a worker of this rank: it cannot find them, as its parent is not the launcher's agent."""
    variables = {"CACHESTORE_LAUNCH": launch}
    if rank_info.rank is not None and rank_info.found_in != "single process":
        variables |= {"CACHESTORE_RANK": str(rank_info.rank), "CACHESTORE_WORLD_SIZE": str(rank_info.world_size)}
    return variables


_STORE: Final = "CACHESTORE_STORE"
"""The variable with a started worker's store: its id, a space and its path. The worker's own children may use other stores."""


def store_variables(layout: Layout) -> dict[str, str]:
    """Return the variables for workers that are started for a store: if it is gone by then, they must not make a new one."""
    return {_STORE: f"{layout.store_id} {layout.root}"}


def open_for_pass(path: str, store_id: str = "", *, access: Access | None = None, say: Say = _log.info) -> Layout:
    """Open the store at a path, or make one. If its id is known, from the caller or the starting process, open only that store.

    Raises ReadFailed if that store is gone; otherwise as `create_store`, whose `say` this is.
    """
    layout = Layout.at(path)
    passed, _, root = os.environ.get(_STORE, "").partition(" ")
    known = store_id or (passed if root == str(layout.root) else "")
    if known:
        return open_layout(replace(layout, store_id=known))
    return create_store(layout.root, mode=Mode.asked(access), say=say)
