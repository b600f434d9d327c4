"""The files of a cache: which of them are of which sample, and which are older than what they were made of."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Final

from cachestore.core.errors import EncodeFailed
from cachestore.core.samples import IMAGE, Sample
from cachestore.core.words import first_of
from cachestore.files.paths import MARKER
from cachestore.interop.caption_files import SUFFIXES, EncodedCaptions
from cachestore.interop.file_encoder import FileEncoder, Pictures
from cachestore.interop.formats import diffusion_pipe
from cachestore.interop.formats.families import SD_SCRIPTS, Family, family_named
from cachestore.interop.formats.matching import Added, Kind, Looks, Matches, Place, pictures_of
from cachestore.interop.formats.table import Format
from cachestore.interop.import_request import ImportRequest
from cachestore.interop.sandbox import CacheFiles, size_and_time
from cachestore.source.listing import Listing

_TOLD_ELSEWHERE: Final = frozenset({"original_size", "crop_ltrb"})

_MASKS: Final = frozenset({"alpha_mask", "mask"})


def root_of(request: ImportRequest) -> Path:
    """The folder to which the references of the source are relative."""
    data = Path(request.data)
    return data if data.is_dir() else data.parent


def list_files(folder: Path, wanted: Format) -> list[tuple[str, int, int]]:
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


FilesByKind = Mapping[Kind, Sequence[tuple[str, Looks]]]
"""By kind the files of a cache whose names tell what they hold."""


def files_by_kind(files: Sequence[tuple[str, int, int]], wanted: Format, request: ImportRequest) -> tuple[FilesByKind, list[str]]:
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


def asked_kinds(request: ImportRequest, matches: Matches, there: FilesByKind, family: Family) -> tuple[str, ...]:
    """The kinds to import: those asked for, else those of this family in the folder, whether or not they match a sample."""
    if request.encode:
        return request.encode
    matched = {"text": matches.text or matches.doubtful, "latents": matches.latents or matches.doubtful_latents}
    held = {kind for kind, those in there.items() if any(may_be_of(look, family) for _path, look in those)}
    return tuple(kind for kind, places in matched.items() if places or kind in held)


def may_be_of(look: Looks, family: Family) -> bool:
    """Whether a file is of a family, by name: a family that is imported has the widths of the model that is claimed."""
    return look.family is None or look.family.name == family.name


def encoded_captions(request: ImportRequest, wanted: Format, listing: Listing) -> EncodedCaptions:
    """The captions as the trainer encoded them, which the names of its files are digests of."""
    files = listing if Path(request.data).is_dir() else None
    return EncodedCaptions(wanted, files, request.caption_lines, Added(request.trigger_word, request.caption))


def left_over(wanted: Format, matches: Matches, paths: Sequence[str], counted: set[str]) -> Iterator[str]:
    """A remark on files of text that match no caption."""
    left = [path for path in paths if path not in matches.used]
    if left and "text" in counted and wanted.text_may_be:
        yield f"{len(left)} of {len(paths)} files of text match no caption of the source; they may belong to {wanted.text_may_be}"


def match_files(cache: CacheFiles, paths: Sequence[str], samples: Sequence[Sample], request: ImportRequest, matches: Matches) -> list[str]:
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


def read_sizes(wanted: Format, request: ImportRequest, samples: Sequence[Sample], matches: Matches) -> list[tuple[str, int, int]]:
    """Take in what further files beside the pictures and beside the cache say; (name, size, mtime_ns) of each. Raises BadInput."""
    if wanted.read_told is None:
        return []
    folders = dict.fromkeys((root_of(request), Path(request.folder)))
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


def is_table(path: str) -> bool:
    """Whether a file says of others what they are of."""
    return PurePosixPath(path).name == "metadata.db"


def used_paths(matches: Matches, counted: set[str]) -> set[str]:
    """Files that are some sample's, of what was asked for."""
    texts = chain.from_iterable(matches.text.values()) if "text" not in counted else ()
    text = {one.path for place in texts for one in (place, *place.more)}
    pictures = matches.latents.values() if "latents" not in counted else ()
    return matches.used - text - {one.path for place in pictures for one in (place, *place.rivals)}


def stale_paths(request: ImportRequest, matches: Matches, listing: Listing, samples: Iterable[Sample], counted: set[str]) -> Iterator[str]:
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


def leave_out_older(request: ImportRequest, matches: Matches, listing: Listing) -> list[str]:
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


def doubts_of(matches: Matches, counted: set[str]) -> list[str]:
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


def kept_apart(encoders: Iterable["FileEncoder"]) -> Iterator[str]:
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
