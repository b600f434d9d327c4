"""`import`: a cache that another trainer made, as entries and a catalog of ours. One more caller of the loop: its encoders read files.

What is imported is never taken for what was made: its recipe says from which format it came and what the user claims made it, so that
its fingerprint, and with it every key, is another. Whether the claim holds is found out by `verify --recompute`.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from cachestore.core.arguments import as_many, as_mapping, as_place, check_calls
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, RecipeMismatch, naming_extras
from cachestore.core.inputs import WITHIN, framing_of, request_for
from cachestore.core.keys import Json, canonical, digest_parts
from cachestore.core.ranks import Placement
from cachestore.core.samples import CAPTION, IMAGE, Sample
from cachestore.files.paths import Layout
from cachestore.interop.file_encoder import FileEncoder
from cachestore.interop.formats.families import family_named
from cachestore.interop.formats.matching import Matches, pictures_of
from cachestore.interop.formats.table import format_named
from cachestore.interop.import_claims import claimed_encoders, claimed_makes, family_of_cache, file_encoders
from cachestore.interop.import_matching import (
    asked_kinds,
    doubts_of,
    encoded_captions,
    files_by_kind,
    is_table,
    kept_apart,
    leave_out_older,
    left_over,
    list_files,
    match_files,
    may_be_of,
    read_sizes,
    root_of,
    stale_paths,
    used_paths,
)
from cachestore.interop.import_request import ImportReport, ImportRequest
from cachestore.interop.sandbox import CacheFiles, TorchFiles
from cachestore.jobs.pass_loop import run_pass
from cachestore.jobs.task import Cancel, Job, OnProgress
from cachestore.source.captions import CaptionLines
from cachestore.source.combined import list_path
from cachestore.source.listing import Listing
from cachestore.source.remarks import Remarks
from cachestore.storage.catalog import Catalog, newest_catalog
from cachestore.storage.commit import create_store
from cachestore.storage.listing_numbers import number_if_there
from cachestore.work.plan import ColumnRequest, Plan, PlanColumn, Request, build_plan, is_published, publish_plan

_NAMED: Final = 10_000


@naming_extras()
def import_cache(
    format: str,  # noqa: A002 - the word of the command
    folder: str | Path,
    *,
    store: str | Path,
    data: str | Path,
    model: str | Path | None = None,
    claims: Mapping[str, Json] | None = None,
    family: str | None = None,
    name: str = "train",
    encode: Sequence[str] = (),
    captions: Literal["first", "all"] = "first",
    caption_lines: CaptionLines = "whole",
    caption: str | None = None,
    trigger_word: str | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    encode_args: Mapping[str, Json] | None = None,
    replace: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
) -> ImportReport:
    """Take what another trainer has cached into a store, with a data set that `CachedDataset` reads.

    Files are found by the trainer's own naming rules. What the store holds already is not read again; a file that cannot be read, and a
    sample without one, is listed in `report.failures`, and hides nobody else. Run again, it goes on where it stopped.

    Args:
        format: "sd-scripts", "simpletuner", "musubi", "ai-toolkit" or "diffusion-pipe".
        folder: the cache; of sd-scripts and ai-toolkit, which write beside the pictures, usually DATA itself.
        store: the store's folder; made if it does not exist.
        data: what the cache was made from, as for `precompute`. Pictures are read for their digests.
        model: which model made it. Its files are digested and become part of the fingerprint; nothing is loaded.
        claims: settings that say so in place of a model, such as `{"model": "FLUX.1-dev"}`; part of the fingerprint.
        family: such as "flux", where neither file names nor the model tell it, or where the folder holds several.
        name: of the data set. What it holds of other encoders is kept, so text and latents may be imported one after the other.
        encode: "text", "latents" or both; by default what the folder holds.
        captions: as for `precompute`; formats with one file a picture know the first caption only.
        caption_lines: as for `precompute`. sd-scripts encodes the first line of a caption file alone, whatever this is.
        caption: what a sample without a caption gets; ai-toolkit's `default_caption`.
        trigger_word: ai-toolkit's trigger word, which it puts into every caption; the data set's captions then have it too.
        vae: the VAE, where it is not the model's own.
        text_encoder: the text encoder, where it is not the model's own.
        encode_args: what `encode_prompt` was given, where that was not the default; part of the claim.
        replace: let it take the place of other values under the same name.
        on_progress: called with the pass's counts, as for `precompute`.
        cancel: anything with `is_set()`; set, it stops, and Incomplete is raised.

    Raises:
        BadUsage: the folder holds no file of this trainer, or none that belongs to this source; or the source has nothing of that kind.
        BadInput: a folder, source, family or claim that cannot be used.
        RecipeMismatch: the name is used for other values, and `replace` is not given.
        Incomplete: cancelled; the same call goes on from there.
        WriteFailed: the disk refuses.
    """
    check_calls(on_progress, cancel)
    places = {"model": model, "vae": vae, "text_encoder": text_encoder}
    models = {name: None if place is None else as_place(name, place, "a path or a hub id") for name, place in places.items()}
    request = ImportRequest(
        format=format,
        folder=as_place("folder", folder),
        store=as_place("store", store),
        data=as_place("data", data),
        claims={} if claims is None else dict(as_mapping("claims", claims, "a mapping of settings")),
        family=family,
        name=name,
        encode=tuple(as_many("encode", encode, 'a list of names, such as ("text", "latents")')),
        captions=captions,
        caption_lines=caption_lines,
        caption=caption,
        trigger_word=trigger_word,
        encode_arg={} if encode_args is None else dict(as_mapping("encode_args", encode_args, "a mapping of arguments")),
        replace=replace,
        **models,
    )
    return run_import(request, on_progress=on_progress, cancel=cancel)


def run_import(request: ImportRequest, *, on_progress: OnProgress | None = None, cancel: Cancel | None = None) -> ImportReport:
    """As `import_cache`, of a request."""
    with number_if_there(Layout.at(request.store), request.name) as number:
        return _import(request, on_progress, cancel, number)


def _import(request: ImportRequest, on_progress: OnProgress | None, cancel: Cancel | None, number: int) -> ImportReport:
    """Import under the number of this listing."""
    wanted = format_named(request.format)
    _check(request)
    policy = CaptionPolicy.parse(request.captions)
    listing = list_path(request.data, caption_lines=request.caption_lines, caption=request.caption)
    seen = Remarks()
    files = list_files(Path(request.folder), wanted)
    there, strangers = files_by_kind(files, wanted, request)
    encoded = encoded_captions(request, wanted, listing)
    has_text = "text" in (request.encode or there)
    samples = [
        replace(sample, captions=policy.texts(encoded.take(sample) if has_text else sample.captions)) for sample in listing.samples(seen)
    ]
    if wanted.is_beside:
        _check_roots(request, [path for path, _size, _time in files], samples)
    layout = Layout.at(request.store)
    with ExitStack() as stack:
        cache = CacheFiles(Path(request.folder), wanted, stack.enter_context(TorchFiles()))
        matches = Matches(None if request.family is None else family_named(request.family), encoded.read_as)
        unreadable = match_files(cache, [path for path, _size, _time in files], samples, request, matches)
        older = leave_out_older(request, matches, listing)
        telling = read_sizes(wanted, request, samples, matches)
        if not any((matches.text, matches.latents, matches.doubtful, matches.doubtful_latents)):
            raise BadUsage(_nothing(request, files, samples, strangers))
        made = claimed_encoders(layout, request)
        family = family_of_cache(request, matches, made, there)
        kinds = asked_kinds(request, matches, there, family)
        if "latents" in kinds and not any(sample.images.get(IMAGE) for sample in samples):
            raise BadUsage(f"{request.data} lists no pictures, so no latents can belong to it: pass --encode text")
        encoders = file_encoders(cache, matches, family, claimed_makes(request, made, kinds))
        cached = digest_parts("cachestore-cache", canonical([list(file) for file in (*files, *telling)])).hex()
        plan = _plan(request, listing, samples, encoders, cached)
        _check_name(plan, request, newest_catalog(layout, plan.catalog))
        layout = create_store(Path(request.store))  # not before the input was matched: what is refused leaves nothing behind
        if not is_published(layout, plan.name):
            publish_plan(layout, plan)
        job = Job(
            layout,
            plan,
            encoders,
            listing,
            Placement(rank=None),
            f"own:{secrets.token_hex(8)}",
            request=request.hints(),
            cancel=cancel,
            on_progress=on_progress,
            listing=number,
            compare=partial(_check_name, plan, request),
        )
        report = run_pass(job)
    counted = {encoder.recipe.encoder for encoder in encoders}
    used = used_paths(matches, counted)
    return ImportReport(
        report,
        wanted.name,
        family.name,
        {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in encoders},
        tuple(path for path, _size, _time in files if path not in used and not is_table(path))[:_NAMED],
        (*(older if "text" in counted else ()), *stale_paths(request, matches, listing, samples, counted))[:_NAMED],
        (
            *(replace(seen, multi_line=[]) if encoded.cut else seen).in_words(of_videos="caches of videos are not imported"),
            *matches.remarks,
            *strangers,
            *encoded.remarks(),
            *doubts_of(matches, counted),
            *left_over(wanted, matches, [path for path, look in there.get("text", ()) if may_be_of(look, family)], counted),
            *kept_apart(encoders),
            *unreadable,
        ),
    )


def _check(request: ImportRequest) -> None:
    if not Path(request.folder).is_dir():
        raise BadInput(f"{request.folder} is no folder; pass the folder in which {request.format} keeps its cache")
    if unknown := sorted(set(request.encode) - {"text", "latents"}):
        raise BadInput(f"cannot import {unknown[0]!r}; known are text and latents")
    if request.model is None and not request.claims:
        raise BadInput(
            "files of other trainers do not say which model made them: pass --model with its folder, or --claim NAME=VALUE with what you"
            " know of it (such as model=FLUX.1-dev); either becomes part of the fingerprint"
        )


def _check_roots(request: ImportRequest, files: Sequence[str], samples: Iterable[Sample]) -> None:
    """Refuse a cache that lies beside the pictures and is looked at from above or below their root: paths then are others' paths.

    Raises BadInput.
    """
    root, folder = root_of(request).resolve(), Path(request.folder).resolve()
    if folder != root and folder.is_relative_to(root):
        inner, paths = folder.relative_to(root), list(pictures_of(samples))
    elif folder != root and root.is_relative_to(folder):
        inner, paths = root.relative_to(folder), files
    else:
        return
    if any(PurePosixPath(path).is_relative_to(inner.as_posix()) for path in paths):
        inside, outside = (folder, root) if folder.is_relative_to(root) else (root, folder)
        advice = f", or {folder} as --data" if Path(request.data).is_dir() else ""
        raise BadInput(
            f"{request.format} caches beside the pictures, and {inside} lies in {outside}: paths in the one are other pictures' paths in"
            f" the other; pass {root} as the cache's folder{advice}"
        )


def _nothing(request: ImportRequest, files: Sequence[tuple[str, int, int]], samples: Sequence[Sample], strangers: Sequence[str]) -> str:
    if not files:
        return f"{request.folder} holds no file of {request.format}'s cache: pass the folder that it wrote"
    if not samples:
        return f"{request.data} lists no samples, so no file in {request.folder} can be of one: pass as --data what the cache was made from"
    names = ", ".join(repr(path) for path, _size, _time in files[:3])
    return (
        f"nothing in {request.folder} is of {request.data} by the naming rules of {request.format}: it holds {names}; the source's first"
        f" sample is {samples[0].id!r}, its caption {samples[0].captions[0][:60]!r}{''.join(f'; {one}' for one in strangers)}"
    )


def _columns(encoders: Sequence[FileEncoder], cached: str) -> list[ColumnRequest]:
    """A column for each encoder. As an option stands what the cache was: where a file of it changed, all are looked at again."""
    columns: list[ColumnRequest] = []
    for number, encoder in enumerate(encoders):
        role = encoder.values.role
        columns.append(ColumnRequest(PlanColumn(number, encoder.recipe.encoder, role, {"cached": cached}), partial(_requests, role)))
    return columns


def _requests(role: str, sample: Sample) -> list[Request]:
    """Its captions, or its picture with its own crop where it has one; of a sample without a picture nothing."""
    if role == CAPTION:
        return [request_for(role, {}, value, {}) for value in sample.captions]
    own = {name: value for name, value in framing_of(sample.extras).items() if name == WITHIN}
    return [request_for(role, own, value, {}) for value in sample.images.get(role, ())[:1]]


def _plan(request: ImportRequest, listing: Listing, samples: Sequence[Sample], encoders: Sequence[FileEncoder], cached: str) -> Plan:
    """Lay out the plan; `cached` digests names, sizes and times of the cache's files."""
    columns = _columns(encoders, cached)
    fingerprints = [encoder.recipe.fingerprint for encoder in encoders]
    empty = [number for number, encoder in enumerate(encoders) if encoder.values.role == CAPTION and "" in encoder.values.places]
    return build_plan(
        catalog=request.name,
        request=digest_parts("cachestore-import", request.name, request.captions, cached, *fingerprints).hex(),
        content=digest_parts(listing.content, request.captions, canonical([list(sample.captions) for sample in samples])).hex(),
        recipes=[encoder.recipe for encoder in encoders],
        samples=samples,
        columns=columns,
        texts=CaptionPolicy.parse(request.captions).encoding(),
        extra=[(number, {"caption": ""}) for number in empty],
    )


def _check_name(plan: Plan, request: ImportRequest, previous: Catalog | None) -> None:
    """Refuse to put imported values in the place of others under the same name. Raises RecipeMismatch."""
    if previous is None or request.replace:
        return
    for column in plan.columns:
        earlier = previous.column(column.encoder, column.role)
        if earlier is not None and earlier.fingerprint != plan.recipes[column.recipe].fingerprint:
            raise RecipeMismatch(
                f"{column.encoder} of the data set {plan.catalog!r} is there already and was made, imported or claimed otherwise:"
                " pass another --name, or --replace to let this take its place"
            )
    if previous.ids and plan.ids and not set(previous.ids) & set(plan.ids):
        raise RecipeMismatch(
            f"the data set {plan.catalog!r} has {len(previous.ids)} samples, and none of them is in {request.data}: pass another --name"
        )
