"""`import`: reads another trainer's cache into a store, as a pass whose encoders read files.

Imported values never share a key with encoded ones: the recipe contains the format and the model that the user declares, so its
fingerprint differs. `verify --recompute` checks what was declared.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from cachestore.core.arguments import as_many, as_mapping, as_path_str, check_calls
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, RecipeMismatch, naming_extras
from cachestore.core.inputs import WITHIN, framing_of, request_for
from cachestore.core.keys import Json, canonical, digest_parts
from cachestore.core.ranks import RankInfo
from cachestore.core.samples import CAPTION, IMAGE, VIDEO, Sample
from cachestore.core.words import plural
from cachestore.files.paths import Access, Layout, Mode
from cachestore.interop.file_encoder import FileEncoder
from cachestore.interop.formats.matching import ClipFrames, visuals_of
from cachestore.interop.formats.table import WEBDATASET, format_named
from cachestore.interop.import_encoders import declared_encoders, family_of_cache, file_encoders
from cachestore.interop.import_matching import CacheScan, look_for, remarks_of
from cachestore.interop.import_request import ImportReport, ImportRequest
from cachestore.interop.learned_buckets import buckets_in_words
from cachestore.interop.sandbox import CacheFiles, TorchFiles
from cachestore.interop.tar_exporting import refuse_given
from cachestore.interop.tar_importing import TarImport
from cachestore.jobs.option_types import RATE
from cachestore.jobs.pass_loop import run_pass
from cachestore.jobs.task import Cancel, Job, OnProgress
from cachestore.source.combined import list_path
from cachestore.source.reading import CaptionLines, ListingOptions
from cachestore.source.remarks import Remarks
from cachestore.source.unused import BROKEN_LINK, LISTED_TWICE, NO_FRAMES, REPLACED, unused_in_words
from cachestore.storage.catalog import Catalog, newest_catalog
from cachestore.storage.commit import create_store
from cachestore.storage.listing_numbers import number_if_there
from cachestore.work.pace import with_pace
from cachestore.work.plan import ColumnRequest, Plan, PlanColumn, Request, build_plan, is_published, publish_plan
from cachestore.work.progress import Observer

_NAMED: Final = 10_000


@naming_extras()
def import_cache(
    format: str,  # noqa: A002 - the word of the command
    folder: str | Path,
    *,
    store: str | Path,
    data: str | Path | None = None,
    model: str | Path | None = None,
    claims: Mapping[str, Json] | None = None,
    family: str | None = None,
    name: str = "train",
    encode: Sequence[str] = (),
    captions: Literal["first", "all"] = "first",
    caption_lines: CaptionLines = "whole",
    caption: str | None = None,
    trigger_word: str | None = None,
    fps: float | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    encode_args: Mapping[str, Json] | None = None,
    replace: bool = False,
    access: Access | None = None,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
) -> ImportReport:
    """Import what another trainer has cached into a store, with a data set that `CachedDataset` reads.

    Files are found by the trainer's own naming rules. Values that the store has already are not read again. A sample without a file, or
    with a file that cannot be read, is listed in `report.failures`; the others are imported. A second call goes on where the first stopped.

    Args:
        format: "sd-scripts", "simpletuner", "musubi", "ai-toolkit", "diffusion-pipe", "ltx", or "webdataset" for tars, which say
            what they hold.
        folder: the cache; for sd-scripts and ai-toolkit, which write beside the pictures, usually DATA itself.
        store: the store's folder; made if it does not exist.
        data: what the cache was made from, as for `precompute`; needed for all formats but tars. Pictures are read for their digests.
        model: the model that made it. Its files are digested and become part of the fingerprint; nothing is loaded.
        claims: settings that declare the model instead, such as `{"model": "FLUX.1-dev"}`; part of the fingerprint.
        family: such as "flux", if neither file names nor the model tell it, or if the folder holds several.
        name: of the data set. Its values of other encoders are kept, so you can import text and latents one after the other.
        encode: "text", "latents" or both; by default what the folder holds.
        captions: as for `precompute`; formats with one file for each picture have only the first caption.
        caption_lines: as for `precompute`. sd-scripts always encodes only the first line of a caption file.
        caption: the caption of samples without one; ai-toolkit's `default_caption`.
        trigger_word: ai-toolkit's trigger word, which it puts into every caption; the data set's captions then have it too.
        fps: the rate at which the trainer took frames of videos, if that is not the rate of each file.
        vae: the VAE, if it is not the model's own.
        text_encoder: the text encoder, if it is not the model's own.
        encode_args: the arguments of `encode_prompt`, if they were not the defaults; declared with the model.
        replace: replace other values under the same name.
        access: who may write a new store, as for `precompute`.
        on_progress: called about once a second with the counts that `precompute` gives.
        cancel: anything with `is_set()`; if set, the import stops and raises Incomplete.

    Raises:
        BadUsage: the folder holds no file of this trainer, or none that belongs to this source; or the source has nothing of that kind.
        BadInput: a folder, source, family or claim cannot be used.
        RecipeMismatch: the name is used for other values, and `replace` is not given.
        Incomplete: cancelled; the same call goes on from there.
        WriteFailed: a file cannot be written.
    """
    check_calls(on_progress, cancel)
    Mode.asked(access)  # raises now, not after reading the cache
    paths = {"model": model, "vae": vae, "text_encoder": text_encoder}
    models = {name: None if path is None else as_path_str(name, path, "a path or a hub id") for name, path in paths.items()}
    request = ImportRequest(
        format=format,
        folder=as_path_str("folder", folder),
        store=as_path_str("store", store),
        data="" if data is None else as_path_str("data", data),
        claims={} if claims is None else dict(as_mapping("claims", claims, "a mapping of settings")),
        family=family,
        name=name,
        encode=tuple(as_many("encode", encode, 'a list of names, such as ("text", "latents")')),
        captions=captions,
        caption_lines=caption_lines,
        caption=caption,
        trigger_word=trigger_word,
        fps=None if fps is None else _as_rate(fps),
        encode_arg={} if encode_args is None else dict(as_mapping("encode_args", encode_args, "a mapping of arguments")),
        replace=replace,
        access=access,
        **models,
    )
    with number_if_there(Layout.at(request.store), request.name) as number:
        return (_import_tars if format == WEBDATASET else _import)(request, on_progress, cancel, number)


def _import_tars(request: ImportRequest, on_progress: OnProgress | None, cancel: Cancel | None, number: int) -> ImportReport:
    plain = ImportRequest(request.format, request.folder, request.store, name=request.name, replace=request.replace, access=request.access)
    refuse_given({one.name: getattr(request, one.name) != getattr(plain, one.name) for one in fields(request)})
    mode = Mode.asked(request.access)
    return TarImport(Path(request.folder), Path(request.store), request.name, number, request.replace, mode, on_progress, cancel).run()


def _as_rate(fps: object) -> float:
    """Return a rate. Raises BadInput for anything else."""
    try:
        return RATE.read(fps)
    except (TypeError, ValueError):
        raise BadInput(f"fps must be {RATE.wanted}, not {fps!r}") from None


def _import(request: ImportRequest, on_progress: OnProgress | None, cancel: Cancel | None, number: int) -> ImportReport:
    wanted = format_named(request.format)
    _check(request)
    seen = Remarks()
    listing = list_path(request.data, ListingOptions(request.caption_lines, request.caption, wanted.has_videos))
    found = look_for(request, wanted, listing, seen)
    if wanted.is_beside:
        found.check_roots()
    layout = Layout.at(request.store)
    with TorchFiles() as torch_files:
        cache = CacheFiles(Path(request.folder), wanted, torch_files)
        found.match(cache)
        found.settle_videos(seen)
        older = found.leave_out_older()
        telling = found.read_sizes()
        matches = found.matches
        if not any((matches.text, matches.latents, matches.doubtful, matches.doubtful_latents)):
            raise BadUsage(found.nothing())
        made = declared_encoders(layout, request)
        family = family_of_cache(found, made)
        kinds = found.kinds(family)
        if "latents" in kinds and not visuals_of(found.samples):
            raise BadUsage(f"{request.data} lists no pictures, so no latents can belong to it: pass --encode text")
        encoders = file_encoders(cache, found, family, made, kinds)
        cached = digest_parts("cachestore-cache", canonical([list(file) for file in (*found.files, *telling)])).hex()
        plan = _plan(found, encoders, cached, seen)
        _check_name(plan, request, newest_catalog(layout, plan.catalog))
        shared: list[str] = []
        # Only now, so that a refused import leaves no store behind.
        layout = create_store(Path(request.store), mode=Mode.asked(request.access), say=shared.append)
        if not is_published(layout, plan.name):
            publish_plan(layout, plan)
        job = Job(
            layout,
            plan,
            encoders,
            listing,
            RankInfo(rank=None),
            f"own:{secrets.token_hex(8)}",
            request=request.hints(),
            cancel=cancel,
            on_progress=Observer(layout).following(with_pace(on_progress)) if on_progress else None,
            listing=number,
            compare=partial(_check_name, plan, request),
        )
        report = run_pass(job)
    seen = replace(seen, multi_line=[]) if found.encoded.cut else seen
    own = (*found.remarks(family, kinds), *remarks_of(encoders), *found.unreadable, *buckets_in_words(layout, plan.catalog))
    return ImportReport(
        report,
        wanted.name,
        family.name,
        {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in encoders},
        unmatched=tuple(found.unmatched(kinds)[:_NAMED]),
        stale=(*(older if "text" in kinds else ()), *found.stale(kinds))[:_NAMED],
        remarks=(*seen.in_words(), *_unused_words(seen), *own, *shared),
    )


def _unused_words(seen: Remarks) -> Iterator[str]:
    """Yield remarks on videos, and on links and members of the source that are not used. Other files there may be the cache itself."""
    rows = {str(row["reason"]): row for row in seen.unused.as_json()}
    if videos := rows.get(NO_FRAMES):
        yield plural(videos["count"], "video is ignored", "videos are ignored") + " (the cache holds nothing of videos)"
    yield from unused_in_words([rows[reason] for reason in (BROKEN_LINK, LISTED_TWICE, REPLACED) if reason in rows])


def _check(request: ImportRequest) -> None:
    if not request.data:
        raise BadUsage("pass --data with what the cache was made from")
    if not Path(request.folder).is_dir():
        raise BadInput(f"{request.folder} is not a folder; pass the folder in which {request.format} keeps its cache")
    if unknown := sorted(set(request.encode) - {"text", "latents"}):
        raise BadInput(f"cannot import {unknown[0]!r}; known are text and latents")
    if request.model is None and not request.claims:
        raise BadUsage(
            "files of other trainers do not say which model made them: pass --model with its folder, or --claim NAME=VALUE with what you"
            " know of it (such as model=FLUX.1-dev); either becomes part of the fingerprint"
        )


def _columns(found: CacheScan, encoders: Sequence[FileEncoder], cached: str) -> list[ColumnRequest]:
    """Return the columns of captions, pictures and videos. `cached` is an option of each: if a file changed, all are checked again."""
    columns: list[PlanColumn] = []
    for number, encoder in enumerate(encoders):
        roles = [role for role in (IMAGE, VIDEO) if any(sample.images.get(role) for sample in found.samples)]
        for role in [CAPTION] if encoder.role == CAPTION else roles:
            fps: dict[str, Json] = {"fps": found.request.fps} if role == VIDEO and found.request.fps is not None else {}
            columns.append(PlanColumn(number, encoder.recipe.encoder, role, {"cached": cached, **fps}))
    return [ColumnRequest(column, partial(_requests, column, found.spans)) for column in columns]


def _requests(column: PlanColumn, spans: Mapping[str, ClipFrames], sample: Sample) -> list[Request]:
    """Return the requests of a sample: its captions, its picture with its own crop, or its clip; empty without a picture or video."""
    if column.role == CAPTION:
        return [request_for(CAPTION, {}, value, {}) for value in sample.captions]
    own = {name: value for name, value in framing_of(sample.extras).items() if name == WITHIN}
    own |= {"fps": column.options["fps"]} if "fps" in column.options else {}
    if (span := spans.get(sample.id)) is not None:
        own |= {"start": span.start, "frames": [span.frames]}
    return [request_for(column.role, own, value, {}) for value in sample.images.get(column.role, ())[:1]]


def _plan(found: CacheScan, encoders: Sequence[FileEncoder], cached: str, seen: Remarks) -> Plan:
    """Return the plan; `cached` digests names and stat records of the cache's files, `seen` has what cannot be used of the source."""
    request, numbered = found.request, list(enumerate(encoders))
    fingerprints = [encoder.recipe.fingerprint for encoder in encoders]
    captions = canonical([list(sample.captions) for sample in found.samples])
    plan = build_plan(
        catalog=request.name,
        request=digest_parts("cachestore-import", request.name, request.captions, cached, str(request.fps), *fingerprints).hex(),
        content=digest_parts(found.listing.content, request.captions, captions).hex(),
        recipes=[encoder.recipe for encoder in encoders],
        samples=found.samples,
        columns=_columns(found, encoders, cached),
        texts=CaptionPolicy.parse(request.captions).encoding(),
        extra=[(number, {"caption": ""}) for number, encoder in numbered if encoder.role == CAPTION and "" in encoder.locations],
    )
    return replace(plan, refused=[(one.sample, one.reason) for one in seen.refused], refused_count=len(seen.refused))


def _check_name(plan: Plan, request: ImportRequest, previous: Catalog | None) -> None:
    """Raise RecipeMismatch if imported values would replace others under the same name."""
    if previous is None or request.replace:
        return
    for column in plan.columns:
        earlier = previous.column(column.encoder, column.role)
        if earlier is not None and earlier.fingerprint != plan.recipes[column.recipe].fingerprint:
            raise RecipeMismatch(
                f"the data set {plan.catalog!r} has {column.encoder} already, made, imported or declared otherwise: pass another"
                " --name, or --replace to replace it"
            )
    if previous.ids and plan.ids and not set(previous.ids) & set(plan.ids):
        raise RecipeMismatch(
            f"the data set {plan.catalog!r} has {plural(len(previous.ids), 'sample')}, and none of them is in {request.data}: pass another"
            " --name"
        )
