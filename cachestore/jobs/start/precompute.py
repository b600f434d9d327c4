"""`precompute` encodes a data set, in this process or in workers that it starts. `plan` reports beforehand what it would do.

`precompute_here` and `precompute_in_processes` are the two ways; in each, a process lists the source and plans once.
Workers take over what their parent planned; without that, or for samples in memory, each worker lists for itself.
"""

import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from cachestore.core.arguments import as_mapping, as_path_str, check_calls
from cachestore.core.errors import BadInput, WriteFailed, naming_extras
from cachestore.core.keys import Json
from cachestore.core.ranks import RankInfo
from cachestore.core.words import did_you_mean, human_bytes
from cachestore.encode.batching.environment import library_defaults, set_library_defaults
from cachestore.encode.batching.unit import Encoder
from cachestore.files import in_use
from cachestore.files.marker import noticing_its_end
from cachestore.files.opening import status_of
from cachestore.files.paths import Layout
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.plan.comparison import Compare
from cachestore.jobs.plan.option_types import allowed_failures
from cachestore.jobs.plan.options import CHOSEN, LOADED, Options, PrecomputeRequest
from cachestore.jobs.plan.planning import Planned, check_listing, list_request, needs_of_request, plan_request, published, taken_over
from cachestore.jobs.run.complete import complete_report
from cachestore.jobs.run.pass_loop import count_invocation, invocation_of, key_without_reading, numbered, run_pass
from cachestore.jobs.run.reconcile import Reconciler
from cachestore.jobs.run.task import Cancel, Job, OnProgress
from cachestore.jobs.share.agreement import check_agreement
from cachestore.jobs.share.pace import with_pace
from cachestore.jobs.share.passes import PassRef, list_passes, read_done
from cachestore.jobs.share.progress import Observer
from cachestore.jobs.share.report import Report, held_to
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start.launching import run_workers
from cachestore.jobs.start.processes import LISTING, Care, showing
from cachestore.jobs.start.ranks import Say, find_rank, handed_on, launch_of, open_for_pass, say_conflict, threads_for
from cachestore.sources.combined import InMemory, as_sources, files_in_memory, list_in_memory
from cachestore.sources.listing import Listing
from cachestore.sources.memory import write_rows
from cachestore.store.format.catalog import newest_catalog
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.listing_numbers import listing_number, number_if_there

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cachestore.encode.models.loaded import LoadedModel
    from cachestore.jobs.start.forecast import Forecast

_FEW: Final = 10_000
"""How many samples are looked at by the command itself before it starts workers: fewer take less time than a worker's start."""

_log = logging.getLogger("cachestore")


@naming_extras()
def precompute(
    data: object,
    *,
    model: object,
    store: str | Path,
    encode: str | Iterable[str] = ("text", "latents"),
    encode_args: Mapping[str, Json] | None = None,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    inline: bool = False,
    **options: "Unpack[Options]",
) -> Report:
    """Encode a data set into a store, on any number of ranks. What the store holds already is not encoded again.

    Args:
        data: one of these, or a list of several sources and paths, which become one data set (docs/sources.md):
            the path of a folder of images or videos, a manifest `.jsonl`, a list of prompts `.txt`, or tars;
            a sequence of `cs.Sample` or a Hugging Face data set, whose pictures in memory this process passes to the workers;
            a `cs.Source` around any of these.
        model: a diffusers folder or hub id, or a transformers text encoder; the denoiser's weights are never read. Or a model in memory:
            a diffusers pipeline, or a mapping such as `{"_class_name": "FluxPipeline", "text_encoder": module, "tokenizer": ...}`. It is
            used in this process (`inline`), on its device and in its dtype, and identified by its contents (docs/numerics.md). It is
            left unchanged, and no reference to it is kept.
        store: the store's folder; made if it does not exist.
        encode: "text", "latents" or both. Instead of "text", names of some of the model's text encoders ("text_encoder_2"), if its
            family can call them alone. Several are a list, or one text with commas.
        encode_args: arguments for the pipeline's `encode_prompt`.
        max_failures: how many units may fail (a count, or a share such as "2%"). If more fail, `complete` is False.
        on_progress: called in the calling thread, about once a second and at the end, with the counts of values over all ranks:
            `{"plan", "pass", "reused", "encoded", "failed", "done", "total"}`, and `doing`, such as "encoding latents"; `rate`, in values a
            second, and `seconds_left`, both None until they are known. docs/into-your-own-loop.md logs them.
        cancel: anything with `is_set()`. Once it is set, the work ends after the current batch: what is encoded is published, and
            Incomplete is raised.
        inline: encode in this process. Otherwise `python -m cachestore` is started, so that no thread, GPU memory or tokenizer stays in
            the caller: one process for each rank of a launcher, else `procs` of them, else one for each GPU. If nothing has to be
            encoded, no process is started and torch is not loaded. The workers stop when this process dies.
        **options: all other options of `cachestore precompute`, with underscores: resolution (a number, or several of
            them), variants, crop, crop_seed, flip, buckets, bucket_step, bucket_min, bucket_max, no_upscale, resample, pixels ("own",
            "as-trainer"), frames (a number, or several), fps, clips, name, alpha ("mask": the transparency of pictures and videos is
            their mask),
            captions ("first", "all", or a CaptionPolicy: all texts that it may ask for are encoded), caption_lines, caption,
            caption_column, tar_names ("first-dot", "last-dot"), prompts
            (a file, or a list of texts or of (prompt, negative prompt)), roles, access,
            vae, text_encoder, revision, variant, text_dtype, vae_dtype, latents, procs, device, batch_size, compile, workers, rank,
            world_size, strict, replace, recheck (read every input and every file of the model again).

    Returns:
        The report of the pass, the same on every rank.

    Raises:
        BadInput: a source, model or option that cannot be used.
        BadUsage: a source with nothing to encode; with `strict`, a model that also needs inputs which are not made here.
        RecipeMismatch: the name is used already for another model or resolution.
        EncodeFailed: with `strict`, if more units failed than `max_failures`.
        Incomplete: cancelled, or every worker died; the same call continues from there.
        Superseded: another run listed the source later and has published it; what was encoded stays in the store.
        MissingExtra: a package of the extra [encode] is not installed.
        WriteFailed: writing failed, for example because the disk is full.
    """
    check_calls(on_progress, cancel)
    asked = {"encode": encode, "encode_arg": encode_args, "max_failures": max_failures, **options}
    request, held, loaded = read_arguments("precompute", data, model, store, asked)
    rank_info = find_rank(request.rank, request.world_size)  # raises now, before a store is made
    observer = Observer(Layout.at(request.store))
    tell = with_pace(on_progress) if on_progress else None
    with number_if_there(Layout.at(request.store), request.name) as number:
        in_memory = list_in_memory(request.sources, held, request.reading)
        if inline or loaded is not None:
            follow = observer.following(tell) if tell else None
            with _unchanged(loaded):
                report = precompute_here(request, on_progress=follow, cancel=cancel, loaded=loaded, in_memory=in_memory, number=number)
        else:
            care = Care(observer.status_of_processes, showing(tell), cancel=cancel)
            plans_here = not request.recheck and _is_model_here(request)  # else it is downloaded: the hub's client starts threads
            report = precompute_in_processes(request, rank_info, care, number, in_memory=in_memory, plans_here=plans_here)
    if tell and (ended := observer.newest(report.plan)) is not None:
        tell(ended)
    return report


@naming_extras()
def plan(
    data: object,
    *,
    model: object,
    store: str | Path,
    encode: str | Iterable[str] = ("text", "latents"),
    encode_args: Mapping[str, Json] | None = None,
    **options: "Unpack[Options]",
) -> "Forecast":
    """Return what `precompute` would do with the same arguments, as `cachestore precompute --plan-only` prints it. Encodes nothing.

    Reads every caption and the header of every picture. If the store exists, the plan is published in it; otherwise no store is made.

    Returns:
        Counts of samples, units and buckets, estimated bytes and seconds, and inputs that the model needs but that are not made.

    Raises:
        BadInput, BadUsage, RecipeMismatch, MissingExtra: as `precompute`.
    """
    asked = {"encode": encode, "encode_arg": encode_args, **options}
    request, held, loaded = read_arguments("plan", data, model, store, asked)
    with library_defaults(os.environ):
        in_memory = list_in_memory(request.sources, held, request.reading)
        return forecast_of(request, loaded, in_memory)


def read_arguments(
    caller: str, data: object, model: object, store: object, asked: Mapping[str, object]
) -> "tuple[PrecomputeRequest, dict[int, object], LoadedModel | None]":
    """Return the request, its sources in memory by number, and a model in memory; checks the arguments of `caller`. Raises BadInput."""
    known = {one.name for one in fields(PrecomputeRequest)}
    if unknown := sorted(set(asked) - known):
        names = sorted(known - {"data", "sources", "model", "store", "encode_arg"} | {"encode_args"})
        meant = did_you_mean(unknown[0], names)
        raise BadInput(f"{caller} has no option {unknown[0]!r}{meant}; it has {', '.join(names)}", option=unknown[0])
    loaded = None
    if isinstance(model, str | os.PathLike):
        named = as_path_str("model", cast("object", model), "a path or a hub id")
    else:
        from cachestore.encode.models.loaded import read_loaded

        loaded = read_loaded(model)
        named = f"{LOADED}{loaded.class_name or 'model'})"
    path, sources, held = as_sources(data)
    given = asked["encode_arg"]
    arguments: Mapping[str, Any] = {} if given is None else as_mapping("encode_args", given, "a mapping of arguments")
    fixed: dict[str, Any] = {
        "data": path,
        "sources": sources,
        "model": named,
        "store": as_path_str("store", store),
        "encode_arg": arguments,
    }
    request = PrecomputeRequest.from_json({**asked, **fixed})
    request.check()
    return request, held, loaded


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

    `loaded` replaces the request's model; `in_memory` are the listings of its sources in memory. `number` is the number of the caller's
    listing; without it this process takes a new number. `planned_before` is what the caller's `Planned.handed_on` returned: this process
    then lists nothing. With a `store_id`, only that store is written, and none is made. `launch` is this process's launch, if it is known.
    `compare_with` as for `plan_request`.
    """
    set_library_defaults(os.environ)
    if request.strict:
        needs_of_request(request, loaded)  # raises now, before a store is made
    listing = list_before_store(request, in_memory)
    layout = open_for_pass(request.store, store_id, access=request.access, say=say)
    rank_info = find_rank(request.rank, request.world_size)
    say_conflict(rank_info, say)
    if listing is not None:  # it was listed before there was a store
        number = number or 0
    numbers = nullcontext(number) if number is not None else listing_number(layout, request.name)
    context = Heartbeat(layout, "", 0, launch or launch_of(rank_info), rank_info.rank, rank_info.world_size)
    with noticing_its_end(layout), numbers as listed, context as heartbeat:
        planned = taken_over(layout, request, planned_before, heartbeat) if planned_before is not None else None
        if planned is None:
            listing = listing or list_shown(request, in_memory, heartbeat)
            planned = published(plan_request(layout, request, listing, loaded=loaded, heartbeat=heartbeat, compare_with=compare_with))
        check_agreement(layout, planned.intent, heartbeat, say, strict=request.strict)
        before = partial(_tell_beforehand, planned, heartbeat, say, warn)
        job = _job_of(planned, rank_info, heartbeat, listed, before, on_progress=on_progress, cancel=cancel)
        report = run_pass(replace(job, on_loaded=partial(_check_room_again, planned, heartbeat, say)))
    return _of_request(report, planned)


def precompute_in_processes(
    request: PrecomputeRequest,
    rank_info: RankInfo,
    care: Care,
    number: int,
    *,
    in_memory: InMemory,
    plans_here: bool,
    say: Say = _log.info,
    warn: Say = _log.warning,
) -> Report:
    """Encode in other processes: one for this rank of a launch, or several that form a launch of their own. Runs without torch.

    With `plans_here` this process lists and plans for all of them, and starts none if nothing has to be encoded. `number` is the number of
    the listing. For sources in memory they get the rows as files, and ask for the pictures.
    """
    layout, launch, planned = Layout.at(request.store), launch_of(rank_info), None
    if plans_here and request.strict:
        needs_of_request(request)  # raises now, before a store is made
    listing = list_before_store(request, in_memory) if plans_here or in_memory else None
    if plans_here or in_memory or status_of(layout.marker) is not None:  # else workers make the store, once they have listed the source
        layout = open_for_pass(request.store, access=request.access, say=lambda line: care.words(f"{line}\n"))
    if plans_here:
        context = Heartbeat(layout, "", 0, launch, rank_info.rank, rank_info.world_size)
        with library_defaults(os.environ), noticing_its_end(layout), context as heartbeat:
            listing = listing or list_shown(request, in_memory, heartbeat)
            planned = published(plan_request(layout, request, listing, heartbeat=heartbeat))
            check_agreement(layout, planned.intent, heartbeat, say, strict=request.strict)
            heartbeat.launch = launch = numbered(launch, invocation_of(layout, planned.plan, rank_info))
            reconciler, missing = unknown_units(planned, heartbeat.rise)
            if not missing:
                before = partial(_tell_beforehand, planned, heartbeat, say, warn, reconciler)
                report = complete_report(_job_of(planned, rank_info, heartbeat, number, before), heartbeat)
                if report is not None:
                    return _of_request(report, planned)
        request = planned.request
    variables = {LISTING: str(number), **(handed_on(layout) if layout.store_id else {})}
    care = replace(care, pictures=files_in_memory(in_memory) if in_memory else None)
    handed = planned.handed_on() if planned is not None and not in_memory else None
    with _with_rows_as_files(layout, request, in_memory) as written:
        report = Report.from_json(run_workers(written, rank_info, launch, care, variables, planned=handed))
    count_invocation((Path(request.store).absolute(), report.plan, rank_info.rank))
    return held_to(report, allowed_failures(request.max_failures, report.wanted), strict=request.strict)


def _job_of(
    planned: Planned,
    rank_info: RankInfo,
    heartbeat: Heartbeat,
    number: int,
    tell_beforehand: Callable[[], None],
    *,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
) -> Job:
    """Return the part in the pass of the worker of this heartbeat. `number` is the number of the listing."""
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
        cancel=cancel,
        on_progress=on_progress,
        on_open=tell_beforehand if rank_info.rank in {0, None} else None,
        heartbeat=heartbeat,
        listing=number,
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


@contextmanager
def _unchanged(loaded: "LoadedModel | None") -> Generator[None]:
    """Leave a model in memory, and then also the environment, as they were."""
    if loaded is None:
        yield
        return
    with loaded.evaluating(), library_defaults(os.environ):
        yield


@contextmanager
def _with_rows_as_files(layout: Layout, request: PrecomputeRequest, in_memory: InMemory) -> Generator[PrecomputeRequest]:
    """Yield the request with the rows of sources in memory as files, which are removed afterwards."""
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


def list_before_store(request: PrecomputeRequest, in_memory: InMemory | None) -> Listing | None:
    """Return the listing of the sources if there is no store yet, so that none is made for an unusable source; else None."""
    if status_of(Layout.at(request.store).marker) is not None:
        return None
    listing = list_request(request, in_memory)
    check_listing(request, listing)
    return listing


def list_shown(request: PrecomputeRequest, in_memory: InMemory | None, heartbeat: Heartbeat) -> Listing:
    """Return the listing of the sources; `status` shows meanwhile that they are listed."""
    heartbeat.show(doing=f"listing {request.named_data}")
    return list_request(request, in_memory)


def _is_model_here(request: PrecomputeRequest) -> bool:
    from cachestore.encode.models.hub import is_here

    return all(is_here(name, request.revision) for name in (request.model, request.vae, request.text_encoder) if name is not None)


def is_made(request: PrecomputeRequest) -> bool:
    """Whether this request has made the data set, and it is small: a process that looks whether something changed may spare the workers."""
    layout = Layout.at(request.store)
    if request.recheck or not _is_model_here(request):
        return False
    catalog = newest_catalog(layout, request.name, io="mmap")
    if catalog is None or len(catalog) > _FEW:
        return False
    hints = request.hints()
    # Of options that are chosen at planning, a catalog records what was chosen.
    chosen = [{name: one[name] for name in CHOSEN if hints.get(name) is None and name in one} for one in catalog.request.values()]
    return any({**hints, **some} == one for some, one in zip(chosen, catalog.request.values(), strict=True))


# Forecasts


def unknown_units(planned: Planned, rise: Callable[[], None], launch: str = "") -> tuple[Reconciler, list[int]]:
    """Return the reconciler of the pass that a run would join or begin, and the units not known to be present when `launch` joined it.

    Begins no pass.
    """
    reconciler = _reconciler_of(planned, rise, launch)
    with closing(load_snapshot(planned.layout, for_planning=True)) as snapshot:
        return reconciler, reconciler.unknown(snapshot)


def _reconciler_of(planned: Planned, rise: Callable[[], None], launch: str) -> Reconciler:
    numbers = list_passes(planned.layout, planned.plan.name)
    ref = PassRef(planned.plan.name, numbers[-1] if numbers else 0)
    ended = read_done(planned.layout, ref) if numbers else None
    if ended is not None and (not launch or launch not in ended.launches):
        ref = PassRef(ref.plan, ref.number + 1)
    job = Job(planned.layout, planned.plan, planned.encoders, planned.files, RankInfo(), "", is_recheck=planned.request.recheck)
    return Reconciler(job, ref, key_without_reading(planned.encoders), rise, ignored_launch=launch)


def forecast_of(request: PrecomputeRequest, loaded: "LoadedModel | None" = None, in_memory: InMemory | None = None) -> "Forecast":
    """Return what `precompute` would do. Reads all captions and headers; opens no pass. Raises as `precompute`.

    If there is no store yet, it uses an empty temporary one, so that nothing is left behind.
    """
    set_library_defaults(os.environ)
    root = Path(request.store).absolute()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        layout = open_for_pass(request.store, access=request.access)
        return _whole_forecast(published(plan_request(layout, request, list_request(request, in_memory), loaded=loaded)))
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    with scratch_folder() as scratch:
        layout = open_for_pass(str(scratch))
        forecast = _whole_forecast(plan_request(layout, request, list_request(request, in_memory), loaded=loaded))
        return replace(forecast, free_bytes=shutil.disk_usage(there).free)


def _whole_forecast(planned: Planned) -> "Forecast":
    """Return what a run would do, of all units. With `recheck` every file is read again."""
    from cachestore.jobs.start.forecast import make_forecast

    if not planned.request.recheck:
        return make_forecast(planned, *unknown_units(planned, lambda: None), look_at_all=True)
    reconciler = _reconciler_of(planned, lambda: None, "")
    with closing(load_snapshot(planned.layout, for_planning=True)) as snapshot:
        missing, found = reconciler.read_again(snapshot, threads_for(planned.request.workers, 1))
    return make_forecast(planned, reconciler, missing, look_at_all=True, rechecked={**found, **planned.model_files})


def _forecast_of_launch(planned: Planned, heartbeat: Heartbeat, complete: Reconciler | None = None) -> "Forecast":
    """Return what the launch of this worker has to do. `complete` is the reconciler that has just found every unit present, if one has."""
    from cachestore.jobs.start.forecast import make_forecast

    reconciler, missing = unknown_units(planned, heartbeat.rise, heartbeat.launch) if complete is None else (complete, list[int]())
    return make_forecast(planned, reconciler, missing, look_at_all=False)


def _tell_beforehand(planned: Planned, heartbeat: Heartbeat, say: Say, warn: Say, complete: Reconciler | None = None) -> None:
    """Print the forecast; raise WriteFailed if the disk has not enough space."""
    from cachestore.encode.needs import in_words as not_made
    from cachestore.jobs.start.forecast import in_words

    if planned.not_made_here:
        warn(not_made(planned.not_made_here))
    forecast = _forecast_of_launch(planned, heartbeat, complete)
    for line in in_words(forecast, planned.layout.root, with_reasons=False):
        say(line)
    if heartbeat.plan:  # else others have ended the pass already, and nothing has to be written
        _check_room(planned.layout, forecast)


def _check_room_again(planned: Planned, heartbeat: Heartbeat, say: Say, encoder: Encoder) -> None:
    """If only loading shows an entry's size, print the bytes needed; raise WriteFailed if the disk has not enough space."""
    from cachestore.jobs.start.forecast import room_in_words

    if getattr(encoder, "found_bytes", None) is not None:
        forecast = _forecast_of_launch(planned, heartbeat)
        say(f"now that the text encoder is loaded: {room_in_words(forecast, planned.layout.root)}")
        _check_room(planned.layout, forecast)


def _check_room(layout: Layout, forecast: "Forecast") -> None:
    if forecast.estimated_bytes > forecast.free_bytes:
        need = f"about {human_bytes(forecast.estimated_bytes)} are needed, {human_bytes(forecast.free_bytes)} are free"
        raise WriteFailed(f"{need} at {layout.root}; make room, then run the same command again")
