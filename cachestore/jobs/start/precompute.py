"""`precompute` encodes a data set, in workers (`launching`) or in this process (`here`). `plan` reports beforehand what it would do."""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cachestore.core.arguments import as_mapping, as_path_str, check_calls
from cachestore.core.errors import BadInput, naming_extras
from cachestore.core.keys import Json
from cachestore.core.words import did_you_mean
from cachestore.encode.batching.environment import library_defaults
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import LOADED, Options, PrecomputeRequest
from cachestore.jobs.run.task import Cancel, OnProgress
from cachestore.jobs.share.pace import with_pace
from cachestore.jobs.share.progress import Observer
from cachestore.jobs.share.report import Report
from cachestore.jobs.start.forecast import Forecast, forecast_of
from cachestore.jobs.start.here import precompute_here
from cachestore.jobs.start.launching import precompute_in_processes
from cachestore.jobs.start.processes import Care, showing
from cachestore.jobs.start.ranks import find_rank
from cachestore.sources.combined import as_sources, list_in_memory
from cachestore.store.write.listing_numbers import number_if_there

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cachestore.encode.models.loaded import LoadedModel


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
            report = precompute_in_processes(request, rank_info, care, number, in_memory=in_memory)
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
) -> Forecast:
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


@contextmanager
def _unchanged(loaded: "LoadedModel | None") -> Generator[None]:
    """Leave a model in memory, and then also the environment, as they were."""
    if loaded is None:
        yield
        return
    with loaded.evaluating(), library_defaults(os.environ):
        yield
