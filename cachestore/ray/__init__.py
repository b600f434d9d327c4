"""cachestore on a Ray cluster: each rank is an actor. Needs the extra [ray], and a folder for the store that all nodes mount at one path.

import cachestore.ray

report = cachestore.ray.precompute("/mnt/photos", model="/mnt/sdxl", store="/mnt/cache", workers=8, num_gpus=1)
"""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from cachestore.core.arguments import as_whole, check_calls, check_function
from cachestore.core.errors import BadInput, naming_extras
from cachestore.core.keys import Json, Key
from cachestore.files.paths import Layout
from cachestore.jobs.plan.option_types import allowed_failures
from cachestore.jobs.plan.options import PrecomputeRequest, SharedOptions
from cachestore.jobs.run.task import Cancel, OnProgress
from cachestore.jobs.share.pace import with_pace
from cachestore.jobs.share.progress import Observer
from cachestore.jobs.share.report import Report, held_to
from cachestore.jobs.start.fill import fill as fill_here
from cachestore.jobs.start.here import precompute_here
from cachestore.jobs.start.precompute import read_arguments
from cachestore.store.read.reader import AnyKey
from cachestore.store.write.writer import Store

if TYPE_CHECKING:
    from typing_extensions import Unpack

with naming_extras():
    from cachestore.ray.actors import run_ranks

__all__ = ["fill", "precompute"]

MakeJob = Callable[[], tuple[Store, Iterable[tuple[AnyKey, Any]], Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]]]
"""Returns the first arguments of `cs.fill`: a store open with mode="a", the wanted (key, item) pairs, and the function that encodes."""


def precompute(
    data: object,
    *,
    model: str | os.PathLike[str],
    store: str | os.PathLike[str],
    workers: int = 8,
    num_gpus: float | None = None,
    num_cpus: float = 4,
    encode: str | Iterable[str] = ("text", "latents"),
    encode_args: Mapping[str, Json] | None = None,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
    **options: "Unpack[SharedOptions]",
) -> Report:
    """Encode a data set on the actors of a Ray cluster. Entries that are already in the store are not encoded again.

    Call it in the driver after `ray.init()`. Ranks share the work through claims in the store, not through Ray's scheduler. If a node dies,
    its rank is started again where there is room; meanwhile the other ranks do its work.

    Args:
        data: as in `cs.precompute`, but paths only: a folder, manifest, tars or prompts that every node can read.
        model: a folder that every node can read, or a hub id.
        store: a folder that every node can write.
        workers: the number of ranks, each an actor.
        num_gpus: GPUs for each rank; 0 encodes on CPUs. By default 1 if the cluster has any GPU, else 0.
        num_cpus: CPUs for each rank. Pictures are read and decoded by `num_cpus - 1` threads.
        encode: as in `cs.precompute`.
        encode_args: as in `cs.precompute`.
        max_failures: as in `cs.precompute`.
        on_progress: called in this thread, about once a second and at the end, with the units published so far by all ranks:
            `{"plan", "pass", "reused", "encoded", "failed", "total"}`.
        **options: the other options of `cs.precompute`, except procs, workers, rank and world_size.

    Returns:
        The report of the pass. It comes as soon as one rank has it; the others are then ended.

    Raises:
        The errors of `cs.precompute`. Incomplete: ranks died, found no room, or made no progress; the same call continues from there.
        KeyboardInterrupt: after Ctrl-C, when the ranks have published what they had encoded.
    """
    own = sorted({"procs", "rank", "world_size"} & set(options))
    if own:
        raise BadInput(f"{own[0]} is decided by Ray: pass workers= for the number of ranks")
    check_calls(on_progress, None)
    workers = as_whole("workers", workers, least=1)
    asked = {"encode": encode, "encode_arg": encode_args, "max_failures": max_failures, **options}
    request, held, loaded = read_arguments("cachestore.ray.precompute", data, model, store, asked)
    if held or loaded is not None:
        what = "data" if held else "a model"
        raise BadInput(f"other nodes cannot read {what} in this process's memory: write it to a shared folder, and pass the path")
    body = request.absolute().as_json() | {"world_size": workers, "workers": max(1, int(num_cpus) - 1)}
    works = [partial(_precompute, {**body, "rank": rank}) for rank in range(workers)]
    report = run_ranks(works, num_gpus=num_gpus, num_cpus=num_cpus, on_progress=on_progress)
    return held_to(report, allowed_failures(request.max_failures, report.wanted), strict=request.strict)


def fill(
    make_job: MakeJob,
    *,
    workers: int = 8,
    num_gpus: float | None = None,
    num_cpus: float = 4,
    batch_size: int | Literal["auto"] = "auto",
    group_by: Callable[[Any], Hashable] | None = None,
    strict: bool = False,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
) -> Report:
    """Encode values of your own on the actors of a Ray cluster. Values that are already in the store are not encoded again.

        def make_job():
            encoder = load_my_encoder()
            return cs.open("/mnt/cache", mode="a"), pairs(), encoder

        report = cachestore.ray.fill(make_job, workers=8, batch_size=32)

    Args:
        make_job: called once in each actor, so that models are loaded there. It returns `(store, wanted, encode)`, as `cs.fill` takes
            them: the same keys on every rank. Paths in it must be absolute, as actors have another current folder.
        workers: the number of ranks, each an actor.
        num_gpus: GPUs for each rank, as in `precompute`.
        num_cpus: processors for each rank.
        batch_size: as in `cs.fill`.
        group_by: as in `cs.fill`.
        strict: as in `cs.fill`.
        max_failures: as in `cs.fill`.
        on_progress: as in `precompute`.

    Returns:
        The report of the pass.

    Raises:
        The errors of `cs.fill` and Incomplete, as `precompute`; what `make_job` raises, as Ray reports it.
    """
    check_function("make_job", make_job)
    check_calls(on_progress, None)
    workers = as_whole("workers", workers, least=1)
    options = {"batch_size": batch_size, "group_by": group_by, "strict": strict, "max_failures": max_failures}
    works = [partial(_fill, make_job, {**options, "rank": rank, "world_size": workers}) for rank in range(workers)]
    return run_ranks(works, num_gpus=num_gpus, num_cpus=num_cpus, on_progress=on_progress)


def _precompute(request: Mapping[str, Any], cancel: Cancel, on_progress: OnProgress) -> Report:
    asked = PrecomputeRequest.from_json(request)
    observer = Observer(Layout.at(asked.store))
    tell = with_pace(on_progress)
    report = precompute_here(asked, cancel=cancel, on_progress=observer.following(tell))
    if (ended := observer.newest(report.plan)) is not None:
        tell(ended)
    return report


def _fill(make_job: MakeJob, options: Mapping[str, Any], cancel: Cancel, on_progress: OnProgress) -> Report:
    store, wanted, encode = make_job()
    with store:
        return fill_here(store, wanted, encode, cancel=cancel, on_progress=on_progress, **options)
