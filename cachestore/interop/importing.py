"""`import`: a cache that another trainer made, as entries and a catalog of ours. One more caller of the loop: its encoders read files.

What is imported is never taken for what was made: its recipe says from which format it came and what the user claims made it, so that
its fingerprint, and with it every key, is another. Whether the claim holds is found out by `verify --recompute`.
"""

import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from cachestore.core.arguments import as_many, as_mapping, as_place, check_calls
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, EncodeFailed, RecipeMismatch, naming_extras
from cachestore.core.inputs import WITHIN, framing_of, request_for
from cachestore.core.keys import Json, Recipe, canonical, digest_parts
from cachestore.core.ranks import Placement
from cachestore.core.samples import CAPTION, IMAGE, Sample
from cachestore.core.words import first_of, in_short
from cachestore.encode import families as recipes
from cachestore.encode.unit import Encoder
from cachestore.files.paths import MARKER, Layout
from cachestore.interop.caption_files import SUFFIXES, EncodedCaptions
from cachestore.interop.file_encoder import Captions, FileEncoder, Pictures
from cachestore.interop.formats import diffusion_pipe
from cachestore.interop.formats.families import SD_SCRIPTS, Family, Width, family_named, family_of_pipeline
from cachestore.interop.formats.matching import Added, Kind, Looks, Matches, Place, pictures_of
from cachestore.interop.formats.table import Format, format_named
from cachestore.interop.formats.text import THIRD
from cachestore.interop.sandbox import CacheFiles, TorchFiles, size_and_time
from cachestore.jobs.declared_model import IMPORTED, as_made
from cachestore.jobs.pass_loop import Job, OnProgress, Report, run_pass
from cachestore.jobs.planning import encoders_of
from cachestore.jobs.task import Cancel
from cachestore.source.captions import CaptionLines
from cachestore.source.combined import list_path
from cachestore.source.listing import Listing
from cachestore.source.remarks import Remarks
from cachestore.storage.catalog import Catalog, newest_catalog
from cachestore.storage.commit import create_store
from cachestore.storage.listing_numbers import number_if_there
from cachestore.storage.model_digests import load_digests
from cachestore.work.plan import ColumnRequest, Plan, PlanColumn, Request, build_plan, is_published, publish_plan
from cachestore.work.workers import host_name

VERSION: Final = 4
"""Raised when the code makes other tensors of the same files, or takes them for other samples'."""

_LIMITS: Final = {"wan": 512}
"""Rows that a family's text is filled up to with zeros, where its row in `encode/families` leaves that to the request."""
_TOLD_ELSEWHERE: Final = frozenset({"original_size", "crop_ltrb"})
_MASKS: Final = frozenset({"alpha_mask", "mask"})
_NAMED: Final = 10_000


@dataclass(frozen=True, slots=True, repr=False)
class ImportReport:
    """What became of an import: what `cachestore import --json` prints."""

    report: Report
    """Of the pass; `encoded` counts values that were imported by it."""
    format: str
    family: str
    fingerprints: Mapping[str, str]
    """By encoder."""
    unmatched: tuple[str, ...]
    """Files of the cache that are no sample's."""
    stale: tuple[str, ...]
    """Files older than the picture or caption they should be of."""
    remarks: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every sample's values were found and read, or no more failed than was allowed."""
        return self.report.complete

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The report of the pass, with what an import adds."""
        own = {name: list(getattr(self, name)) for name in ("unmatched", "stale", "remarks")}
        kept = {"format": self.format, "family": self.family, "fingerprints": dict(self.fingerprints)}
        return {**self.report.as_json(), "imported": self.report.encoded, **kept, **own}


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Everything that `import` takes: one field for each option of the command."""

    format: str
    folder: str
    store: str
    data: str
    model: str | None = None
    claims: Mapping[str, Json] = field(default_factory=dict[str, Json])
    family: str | None = None
    name: str = "train"
    encode: tuple[str, ...] = ()
    """Of `text` and `latents`; whatever the folder holds where empty."""
    captions: Literal["first", "all"] = "first"
    caption_lines: CaptionLines = "whole"
    caption: str | None = None
    trigger_word: str | None = None
    vae: str | None = None
    text_encoder: str | None = None
    encode_arg: Mapping[str, Json] = field(default_factory=dict[str, Json])
    replace: bool = False

    def hints(self) -> dict[str, Json]:
        """What a catalog's header keeps of it; paths are absolute."""
        body: dict[str, Json] = {name: value for name, value in asdict(self).items() if name not in {"store", "replace"}}
        for name in ("folder", "data", "model", "vae", "text_encoder"):
            if body[name] is not None and Path(body[name]).exists():
                body[name] = str(Path(body[name]).absolute())
        return {**body, "encode": list(self.encode), IMPORTED: self.format}


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
    files = _files(Path(request.folder), wanted)
    there, strangers = _kinds(files, wanted, request)
    encoded = _encoded_captions(request, wanted, listing)
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
        unreadable = _match(cache, [path for path, _size, _time in files], samples, request, matches)
        older = _leave_out_older(request, matches, listing)
        telling = _read_told(wanted, request, samples, matches)
        if not any((matches.text, matches.latents, matches.doubtful, matches.doubtful_latents)):
            raise BadUsage(_nothing(request, files, samples, strangers))
        made = _claimed(layout, request)
        family = _family(request, matches, made, there)
        kinds = _asked(request, matches, there, family)
        if "latents" in kinds and not any(sample.images.get(IMAGE) for sample in samples):
            raise BadUsage(f"{request.data} lists no pictures, so no latents can belong to it: pass --encode text")
        encoders = _encoders(cache, matches, family, _claimed_makes(request, made, kinds))
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
    used = _used(matches, counted)
    return ImportReport(
        report,
        wanted.name,
        family.name,
        {encoder.recipe.encoder: encoder.recipe.fingerprint for encoder in encoders},
        tuple(path for path, _size, _time in files if path not in used and not _is_table(path))[:_NAMED],
        (*(older if "text" in counted else ()), *_stale(request, matches, listing, samples, counted))[:_NAMED],
        (
            *(replace(seen, multi_line=[]) if encoded.cut else seen).in_words(of_videos="caches of videos are not imported"),
            *matches.remarks,
            *strangers,
            *encoded.remarks(),
            *_doubts(matches, counted),
            *_left_over(wanted, matches, [path for path, look in there.get("text", ()) if _may_be_of(look, family)], counted),
            *_kept(encoders),
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
    root, folder = _root(request).resolve(), Path(request.folder).resolve()
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


def _root(request: ImportRequest) -> Path:
    """The folder to which the references of the source are relative."""
    data = Path(request.data)
    return data if data.is_dir() else data.parent


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


# The cache


def _files(folder: Path, wanted: Format) -> list[tuple[str, int, int]]:
    """(relative path, size, mtime_ns) of the files that may be of a cache, sorted. Stores in the folder are passed over."""
    found: list[tuple[str, int, int]] = []
    for root, folders, names in os.walk(folder):
        if MARKER in names:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root) / name for name in names if not name.startswith(".")):
            relative = path.relative_to(folder).as_posix()
            if wanted.is_ours(relative):
                found.append((relative, *size_and_time(path)))
    return sorted(found)


_There = Mapping[Kind, Sequence[tuple[str, Looks]]]
"""By kind the files of a cache whose names tell what they hold."""


def _kinds(files: Sequence[tuple[str, int, int]], wanted: Format, request: ImportRequest) -> tuple[_There, list[str]]:
    """By kind the files of the family that is asked for, or of any, and a remark on files of families that are not known here."""
    only = None if request.family is None else family_named(request.family)
    there: dict[Kind, list[tuple[str, Looks]]] = {}
    strangers: dict[str, int] = {}
    for path, _size, _time in files:
        look = wanted.looks(path)
        if look is not None and look.named is not None and look.family is None:
            strangers[look.named] = strangers.get(look.named, 0) + 1
        elif look is not None and (only is None or look.family in (None, only)):
            there.setdefault(look.kind, []).append((path, look))
    names = ", ".join(sorted(strangers))
    return there, [f"{sum(strangers.values())} files belong to models that cannot be imported yet ({names})"] if strangers else []


def _asked(request: ImportRequest, matches: Matches, there: _There, family: Family) -> tuple[str, ...]:
    """The kinds to import: those asked for, else those of this family in the folder, whether or not they match a sample."""
    if request.encode:
        return request.encode
    matched = {"text": matches.text or matches.doubtful, "latents": matches.latents or matches.doubtful_latents}
    held = {kind for kind, those in there.items() if any(_may_be_of(look, family) for _path, look in those)}
    return tuple(kind for kind, places in matched.items() if places or kind in held)


def _may_be_of(look: Looks, family: Family) -> bool:
    """Whether a file is of a family, by name: a family that is imported has the widths of the model that is claimed."""
    return look.family is None or look.family.name == family.name


def _encoded_captions(request: ImportRequest, wanted: Format, listing: Listing) -> EncodedCaptions:
    files = listing if Path(request.data).is_dir() else None
    return EncodedCaptions(wanted, files, request.caption_lines, Added(request.trigger_word, request.caption))


def _left_over(wanted: Format, matches: Matches, paths: Sequence[str], counted: set[str]) -> Iterator[str]:
    """A remark on files of text that match no caption."""
    left = [path for path in paths if path not in matches.used]
    if left and "text" in counted and wanted.text_may_be:
        yield f"{len(left)} of {len(paths)} files of text match no caption of the source; they may belong to {wanted.text_may_be}"


def _match(cache: CacheFiles, paths: Sequence[str], samples: Sequence[Sample], request: ImportRequest, matches: Matches) -> list[str]:
    """Find whose files these are; remarks on those that could not be looked into."""
    if cache.format.match is not None:
        cache.format.match(paths, samples, matches)
        return []
    unreadable: list[str] = []
    items = list(_items(cache, paths, unreadable))
    diffusion_pipe.match(items, samples, matches)
    if matches.family is None:
        names = {part for path in paths for part in PurePosixPath(path).parts} | {Path(request.folder).absolute().name}
        for family in ("flux", "sdxl"):
            if family in names:
                matches.counts(family_named(family))
    return unreadable


def _read_told(wanted: Format, request: ImportRequest, samples: Sequence[Sample], matches: Matches) -> list[tuple[str, int, int]]:
    """Take in what further files beside the pictures and beside the cache say; (name, size, mtime_ns) of each. Raises BadInput."""
    if wanted.read_told is None:
        return []
    folders = dict.fromkeys((_root(request), Path(request.folder)))
    paths = [path for folder in folders for path in sorted(folder.iterdir()) if wanted.tells(path.name) and path.is_file()]
    references = pictures_of(samples)
    for path in dict.fromkeys(map(Path.resolve, paths)):
        wanted.read_told(str(path), path.read_bytes(), references.keys(), matches)
    return [(path.name, *size_and_time(path)) for path in paths]


def _items(cache: CacheFiles, paths: Sequence[str], unreadable: list[str]) -> Iterator[diffusion_pipe.Item]:
    """Each value of a cache of shards with what it says of itself; what cannot be read is remarked."""
    for path in paths:
        try:
            places = list(diffusion_pipe.places_in(cache.root, [path]))
        except EncodeFailed as error:
            unreadable.append(str(error))
            continue
        for place in places:
            try:
                contents = cache.contents(place, cache.bytes_at(place))
            except (EncodeFailed, OSError) as error:
                unreadable.append(f"{place.path}, byte {place.start}: {error}")
                continue
            yield diffusion_pipe.item_of(place, contents)


def _is_table(path: str) -> bool:
    return PurePosixPath(path).name == "metadata.db"


def _used(matches: Matches, counted: set[str]) -> set[str]:
    """Files that are some sample's, of what was asked for."""
    texts = chain.from_iterable(matches.text.values()) if "text" not in counted else ()
    text = {one.path for place in texts for one in (place, *place.more)}
    pictures = matches.latents.values() if "latents" not in counted else ()
    return matches.used - text - {one.path for place in pictures for one in (place, *place.rivals)}


def _stale(request: ImportRequest, matches: Matches, listing: Listing, samples: Iterable[Sample], counted: set[str]) -> Iterator[str]:
    """Files older than what they should be of: they may still be right, as copying a source makes it younger."""
    beside: dict[tuple[str, str], list[Place]] = {}
    for caption, places in matches.text.items():
        for place in places:
            if place.beside is not None:
                beside.setdefault((caption, place.beside), []).append(place)
    for sample in samples:
        reference = next(iter(sample.images.get(IMAGE, ())), None)
        if reference is None:
            continue
        source = listing.stat(reference)
        place = matches.latents.get(reference) if "latents" in counted else None
        if place is not None and source is not None and source[1] > _time_of(request, place):
            yield place.path
        texts = matches.text.get(sample.captions[0], ()) if "text" in counted and sample.captions else ()
        alone = [place for place in texts[:1] if place.beside is None]
        own = beside.get((sample.captions[0], reference), alone) if texts else alone
        yield from (place.path for place in own if _caption_time(listing, reference) > _time_of(request, place))


def _time_of(request: ImportRequest, place: Place) -> int:
    return size_and_time(Path(request.folder) / place.path)[1]


def _caption_time(listing: Listing, reference: str) -> int:
    """When the caption beside a picture was written; 0 where there is no such file."""
    found = (listing.stat(str(PurePosixPath(reference).with_suffix(suffix))) for suffix in SUFFIXES)
    return max((stat[1] for stat in found if stat is not None), default=0)


def _leave_out_older(request: ImportRequest, matches: Matches, listing: Listing) -> list[str]:
    """Of several files of one caption leave out those that are older than the caption beside their picture, which may have been another.

    Where all are, all count: a copied source is younger than its cache. Gives the paths of what is left out.
    """

    def is_older(place: Place) -> bool:
        return place.beside is not None and _caption_time(listing, place.beside) > _time_of(request, place)

    left_out: list[str] = []
    for caption, places in matches.text.items():
        if len(places) == 1:
            continue
        older: list[Place] = []
        fresh: list[Place] = []
        for place in places:
            (older if is_older(place) else fresh).append(place)
        if older and fresh:
            left_out += [place.path for place in older]
            matches.text[caption] = fresh
    return left_out


def _doubts(matches: Matches, counted: set[str]) -> list[str]:
    """One remark on text and one on latents of which nobody knows whose they are, each with the first reason; none where all is clear."""
    captions = [caption for caption in matches.doubtful if caption not in matches.text] if "text" in counted else []
    pictures = [one for one in matches.doubtful_latents if not matches.told.get(one)] if "latents" in counted else []
    remarks = [f"text of {len(captions)} captions is not taken: {matches.doubtful[captions[0]]}"] if captions else []
    if pictures:
        remarks.append(f"latents of {_named(pictures)} are not taken: {matches.doubtful_latents[pictures[0]]}")
    return remarks


def _named(pictures: Collection[str]) -> str:
    """How many pictures, and the first of them."""
    return f"{len(pictures)} pictures ({first_of(sorted(pictures))})"


def _kept(encoders: Iterable["FileEncoder"]) -> Iterator[str]:
    """Remarks on further resolutions, and on what lay beside latents: it comes out of an export again, and no training sees it.

    A mask cannot have a column: whether there is one is known when the file is opened, and a plan is laid out before.
    """
    for encoder in encoders:
        if not isinstance(encoder.values, Pictures):
            continue
        if encoder.values.several:
            yield f"{_named(encoder.values.several)} have latents of several resolutions, and the largest are taken"
        if encoder.values.turned and encoder.cache.format.name == SD_SCRIPTS:
            yield (
                f"{_named(encoder.values.turned)} are turned by their EXIF data, but sd-scripts does not turn them: it encoded them lying"
                " on their side, and they were imported like that; `cachestore precompute` encodes them upright"
            )
        for name, pictures in sorted(encoder.values.beside.items()):
            if name in _TOLD_ELSEWHERE:
                continue
            remark = f"{name} of {len(pictures)} pictures is kept beside their latents for an export, and no data set hands it out"
            yield f"{remark}: for masks in training `cachestore precompute` the source with its own" if name in _MASKS else remark


# What it is claimed to be


def _claimed(layout: Layout, request: ImportRequest) -> dict[str, Encoder]:
    """By encoder, who the user says made the cache; nothing without a model. Its files are digested, and nothing is loaded."""
    if request.model is None:
        return {}
    known = load_digests(layout, host_name())
    found: dict[str, Encoder] = {}
    refused: BadInput | None = None
    for encoder in request.encode or ("text", "latents"):
        try:
            made = encoders_of(as_made(request.hints(), encoder, store=request.store), known)
        except BadInput as error:
            if encoder in request.encode:
                raise
            refused = error  # a VAE alone has no text encoder, and says nothing of text
            continue
        found |= {one.recipe.encoder: one for one in made}
    if refused is not None and not found:
        raise refused
    return found


def _family(request: ImportRequest, matches: Matches, made: Mapping[str, Encoder], there: _There) -> Family:
    """The family of a cache, with the model's widths: as the user says, else as file names tell, else the model's.

    Names of files that match a sample come first, then those of all files. Raises BadInput where they contradict each other, or none tells.
    """
    held = {look.family.name: look.family for those in there.values() for _path, look in those if look.family is not None}
    named = matches.families or held
    pipeline = made["text"].recipe.make.get("pipeline") if "text" in made else _pipeline_of(request.model)
    told = family_of_pipeline(str(pipeline)) if pipeline is not None else None
    if matches.family is None and len(named) > 1:
        raise BadInput(f"{request.folder} holds caches of {', '.join(sorted(named))}: pass --family with the one to import")
    family = matches.family or next(iter(named.values()), None) or told
    if family is None:
        raise BadInput(
            f"neither the files of {request.folder} nor the model tell which family they are of: pass --family, such as sdxl or flux"
        )
    if told is not None and told != family:
        raise BadInput(
            f"the files of {request.folder} are of {family.name}, and {request.model} is of {told.name}: pass the model that made them"
        )
    if request.format not in family.states:
        family.written_as(request.format)  # raises
    return replace(family, widths={**family.widths, **_widths_of(made.get("text"), family)})


def _widths_of(encoder: Encoder | None, family: Family) -> dict[str, Width]:
    """How wide the text of the claimed model is, by its own configuration; nothing without one."""
    from cachestore.encode.setup import pooled_width, text_width
    from cachestore.encode.text import TextEncoder

    if not isinstance(encoder, TextEncoder):
        return {}
    parts = {name: part for name, part in encoder.setup.components.items() if name in family.widths}
    return {name: Width(text_width(part.config), pooled_width(part.config, part.class_name)) for name, part in parts.items()}


def _pipeline_of(model: str | None) -> str | None:
    """The pipeline whose folder a model is, where it is here; None of a VAE alone, which may be of several families."""
    from cachestore.encode import hub, models

    if model is None or not hub.is_here(model, None):
        return None
    try:
        found = hub.with_folder(model, models.read_model, encode=(), revision=None, variant=None)
    except BadInput:
        return None
    return found.class_name if found.kind == "pipeline" else None


def text_recipe(family: Family, wanted: Format, claims: Mapping[str, Json]) -> Recipe:
    """The recipe of imported text: read as the family's own is."""
    row = recipes.text_family(family.pipeline)
    widened = {THIRD: family.widths[THIRD].rows} if THIRD in family.widths else {}
    read = recipes.text_read(row, limit=_LIMITS.get(family.name), widths=widened)
    return Recipe("text", {**_make(family, wanted, claims), "outputs": recipes.stored_names(row)}, read)


def latents_recipe(family: Family, wanted: Format, claims: Mapping[str, Json], made: Recipe | None) -> Recipe:
    """The recipe of imported latents. The constants are those of the claimed VAE, else those of the family's released one."""
    state = family.states[wanted.name]
    released = {
        "scaling_factor": family.scale.factor,
        "shift_factor": family.scale.shift,
        "latent_channels": family.channels,
        "block_out_channels": [1] * 4,
    }
    read: dict[str, Json] = (
        {**made.read, "stored": state.kind}
        if made is not None
        else recipes.latents_read(recipes.vae_family(family.vae_class), released, state.kind)
    )
    if state.is_scaled:
        read["scaled"] = True
    return Recipe("latents", {**_make(family, wanted, claims), "scaled": state.is_scaled, "outputs": [state.kind]}, read)


def _make(family: Family, wanted: Format, claims: Mapping[str, Json]) -> dict[str, Json]:
    made = {"kind": IMPORTED, "provenance": IMPORTED, "version": VERSION}
    return {**made, "format": wanted.name, "family": family.name, "claimed": dict(claims)}


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What is claimed of the values of a kind, and the recipe of the model that is said to have made them."""

    claims: Mapping[str, Json]
    recipe: Recipe | None


def _claimed_makes(request: ImportRequest, made: Mapping[str, Encoder], kinds: Iterable[str]) -> dict[str, _Claimed]:
    """By kind that is imported, what is claimed of it."""
    return {kind: _Claimed(_claims(request, made.get(kind)), None if kind not in made else made[kind].recipe) for kind in kinds}


def _encoders(cache: CacheFiles, matches: Matches, family: Family, claimed: Mapping[str, _Claimed]) -> "tuple[FileEncoder, ...]":
    """The encoders that read the files of each kind that is claimed. Raises BadInput for text that is not understood."""
    found: list[FileEncoder] = []
    if "text" in claimed:
        if cache.format.name not in family.text:
            able = ", ".join(sorted(family.text)) or "none"
            raise BadInput(
                f"text of {family.name} is not understood in {cache.format.name}'s form (in that of {able}): pass --encode latents"
            )
        recipe = text_recipe(family, cache.format, claimed["text"].claims)
        found.append(FileEncoder(recipe, Captions(recipe, cache, matches.text, matches.doubtful, family), cache))
    if "latents" in claimed:
        recipe = latents_recipe(family, cache.format, claimed["latents"].claims, claimed["latents"].recipe)
        pictures = Pictures(recipe, cache, matches.latents, matches.doubtful_latents, matches.told, family)
        found.append(FileEncoder(recipe, pictures, cache))
    return tuple(found)


def _claims(request: ImportRequest, made: Encoder | None) -> dict[str, Json]:
    return {**request.claims, **({"recipe": dict(made.recipe.make)} if made is not None else {})}


# The plan


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
