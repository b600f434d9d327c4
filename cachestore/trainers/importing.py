"""`import`: reads another trainer's cache into a store, as a pass whose encoders read files.

Imported values never share a key with encoded ones: the recipe contains the format and the model that the user declares, so its
fingerprint differs. `verify --recompute` checks what was declared.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from cachestore.core.arguments import as_many, as_mapping, as_path_str, check_calls
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, naming_extras
from cachestore.core.inputs import WITHIN, framing_of, request_for
from cachestore.core.keys import Json, canonical, digest_parts
from cachestore.core.ranks import RankInfo
from cachestore.core.samples import CAPTION, IMAGE, VIDEO, Sample
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.files.paths import Access, Layout, Mode
from cachestore.jobs.plan.option_types import RATE
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.task import Cancel, Job, OnProgress
from cachestore.jobs.share.pace import followed
from cachestore.jobs.share.plan import ColumnRequest, Plan, PlanColumn, build_plan, publish_plan
from cachestore.sources.combined import list_path
from cachestore.sources.reading import CaptionLines, ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.sources.unused import BROKEN_LINK, LISTED_TWICE, NO_FRAMES, REPLACED, unused_in_words
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.rows import newest_catalog
from cachestore.store.write.commit import create_store
from cachestore.store.write.listing_numbers import number_if_there
from cachestore.store.write.made import check_no_session
from cachestore.trainers.cache_files import CacheFiles
from cachestore.trainers.cache_scan import CacheScan, remarks_of, scan_cache
from cachestore.trainers.file_encoder import FileEncoder
from cachestore.trainers.import_encoders import declared_encoders, family_of_cache, file_encoders
from cachestore.trainers.import_request import ImportReport, ImportRequest, has_no_sample_of, made_otherwise
from cachestore.trainers.learned_buckets import buckets_in_words
from cachestore.trainers.matching import ClipFrames
from cachestore.trainers.sandbox import TorchFiles
from cachestore.trainers.table import WEBDATASET, imported_format
from cachestore.trainers.webdataset.importing import import_tars

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
    with number_if_there(Layout.at(request.store), request.name) as listing_number:
        if format == WEBDATASET:
            return import_tars(request, on_progress, cancel, listing_number)
        return _import_trainer(request, on_progress, cancel, listing_number)


def _as_rate(fps: object) -> float:
    try:
        return RATE.read(fps)
    except (TypeError, ValueError):
        raise BadInput(f"{option('fps')} must be {RATE.wanted}, not {fps!r}", option="fps") from None


def _import_trainer(request: ImportRequest, on_progress: OnProgress | None, cancel: Cancel | None, listing_number: int) -> ImportReport:
    cache_format = imported_format(request.format)
    if not request.data:
        raise BadUsage(f"pass {option('data')} with what the cache was made from", option="data")
    if not Path(request.folder).is_dir():
        raise BadInput(f"{request.folder} is not a folder; pass the folder in which {request.format} keeps its cache", option="folder")
    if unknown := sorted(set(request.encode) - {"text", "latents"}):
        raise BadInput(f"cannot import {unknown[0]!r}; known are text and latents", option="encode")
    if request.model is None and not request.claims:
        raise BadUsage(
            f"files of other trainers do not say which model made them: pass {option('model')} with its folder, or"
            f" {option('claim', 'NAME=VALUE')} with what you know of it (such as model=FLUX.1-dev); either becomes part of the fingerprint",
            option="model",
        )
    about_source = Remarks()
    listing = list_path(request.data, ListingOptions(request.caption_lines, request.caption, cache_format.has_videos))
    scan = scan_cache(request, cache_format, listing, about_source)
    layout = Layout.at(request.store)
    with TorchFiles() as torch_files:
        cache = CacheFiles(Path(request.folder), cache_format, torch_files)
        scan.match(cache, about_source)
        declared = declared_encoders(layout, request)
        family = family_of_cache(scan, declared)
        kinds = scan.kinds_to_import(family)
        encoders = file_encoders(cache, scan, family, declared, kinds)
        plan = _plan(scan, encoders, about_source)
        check_no_session(layout, request.name)
        compare = partial(check_name, encoders, scan)
        if (previous := newest_catalog(layout, request.name)) is not None:
            compare(previous)
        about_store: list[str] = []
        # Only now, so that a refused import leaves no store behind.
        layout = create_store(Path(request.store), mode=Mode.asked(request.access), say=about_store.append)
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
            on_progress=followed(layout, on_progress),
            listing_number=listing_number,
            compare=compare,
        )
        report = run_pass(job)
    about_source = replace(about_source, multi_line=[]) if scan.encoded_captions.cut else about_source
    about_files = (*scan.remarks(family, kinds), *remarks_of(encoders), *scan.matches.unreadable)
    return ImportReport(
        report,
        cache_format.name,
        family.name,
        {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in encoders},
        unmatched=tuple(scan.unmatched(kinds)[:_NAMED]),
        stale=tuple(scan.stale(kinds))[:_NAMED],
        remarks=(
            *about_source.in_words(),
            *_unused_in_words(about_source),
            *about_files,
            *buckets_in_words(layout, request.name),
            *about_store,
        ),
    )


def _plan(scan: CacheScan, encoders: Sequence[FileEncoder], about_source: Remarks) -> Plan:
    request, numbered = scan.request, list(enumerate(encoders))
    # An option of each column: if one of the cache's files changed, all values are checked again.
    cached = digest_parts("cachestore-cache", canonical([list(file) for file in (*scan.files, *scan.side_files)])).hex()
    fps = request.fps if scan.matches.fps is None else scan.matches.fps
    columns: list[ColumnRequest] = []
    for number, encoder in numbered:
        visuals = [role for role in (IMAGE, VIDEO) if any(sample.images.get(role) for sample in scan.samples)]
        for role in [CAPTION] if encoder.role == CAPTION else visuals:
            rate: dict[str, Json] = {"fps": fps} if role == VIDEO and fps is not None else {}
            column = PlanColumn(number, encoder.recipe.encoder, role, {"cached": cached, **rate})
            columns.append(ColumnRequest(column, partial(_requests, column, scan.spans)))
    captions = canonical([list(sample.captions) for sample in scan.samples])
    fingerprints = [encoder.recipe.fingerprint for encoder in encoders]
    plan = build_plan(
        catalog=request.name,
        request=digest_parts("cachestore-import", request.name, request.captions, cached, str(fps), *fingerprints).hex(),
        content=digest_parts(scan.listing.content, request.captions, captions).hex(),
        recipes=[encoder.recipe for encoder in encoders],
        samples=scan.samples,
        columns=columns,
        texts=CaptionPolicy.parse(request.captions).encoding(),
        extra=[(number, {"caption": ""}) for number, encoder in numbered if encoder.role == CAPTION and "" in encoder.locations],
    )
    return replace(plan, refused=[(one.sample, one.reason) for one in about_source.refused], refused_count=len(about_source.refused))


def _requests(column: PlanColumn, spans: Mapping[str, ClipFrames], sample: Sample) -> list[Mapping[str, Json]]:
    """Return the requests of a sample: its captions, its picture with its own crop, or its clip; empty without a picture or video."""
    if column.role == CAPTION:
        return [request_for(CAPTION, {}, value, {}) for value in sample.captions]
    framing = {name: value for name, value in framing_of(sample.extras).items() if name == WITHIN}
    framing |= {"fps": column.options["fps"]} if "fps" in column.options else {}
    if (span := spans.get(sample.id)) is not None:
        framing |= {"start": span.start, "frames": [span.frames]}
    return [request_for(column.role, framing, value, {}) for value in sample.images.get(column.role, ())[:1]]


def check_name(encoders: Sequence[FileEncoder], scan: CacheScan, previous: Catalog) -> None:
    """Raise RecipeMismatch if imported values would replace others under the same name."""
    fingerprints = {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in encoders}
    for column in () if scan.request.replace else previous.columns:
        if fingerprints.get(column.encoder, column.fingerprint) != column.fingerprint:
            raise made_otherwise(previous.name, column.encoder)
    if not scan.request.replace and previous.ids and scan.samples and not {sample.id for sample in scan.samples} & set(previous.ids):
        raise has_no_sample_of(previous, scan.request.data)


def _unused_in_words(about_source: Remarks) -> Iterator[str]:
    """Yield remarks on videos, and on links and members of the source that are not used. Other files there may be the cache itself."""
    rows = {str(row["reason"]): row for row in about_source.unused.as_json()}
    if videos := rows.get(NO_FRAMES):
        yield plural(videos["count"], "video is ignored", "videos are ignored") + " (the cache holds nothing of videos)"
    yield from unused_in_words([rows[reason] for reason in (BROKEN_LINK, LISTED_TWICE, REPLACED) if reason in rows])
