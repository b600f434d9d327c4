"""The files of a cache, as `import` finds them: which samples they belong to, and which are older than their picture or caption."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage
from cachestore.core.inputs import NO_STAT
from cachestore.core.samples import VIDEO, Sample
from cachestore.core.spelling import option
from cachestore.core.words import first_of, noun, plural
from cachestore.files.opening import read_foreign
from cachestore.files.paths import MARKER
from cachestore.files.stat_record import stat_of
from cachestore.sources.listing import Listing
from cachestore.sources.remarks import Remarks
from cachestore.sources.tars import tars_at
from cachestore.sources.unused import NO_FRAMES
from cachestore.trainers.cache_files import CacheFiles
from cachestore.trainers.caption_files import SUFFIXES, EncodedCaptions
from cachestore.trainers.families import Family, family_named
from cachestore.trainers.file_encoder import FileEncoder, ImportedLatents
from cachestore.trainers.format import Format
from cachestore.trainers.import_request import ImportRequest
from cachestore.trainers.matching import (
    CacheListing,
    CaptionSettings,
    ClipFrames,
    FileLocation,
    Kind,
    Matches,
    ParsedName,
    visual_of,
    visuals_of,
)

_SIDE_FILE_BYTES: Final = 256 << 20
"""As much as a side file says of a million pictures."""
_IN_FACTS: Final = frozenset({"original_size", "crop_ltrb"})
_MASKS: Final = frozenset({"alpha_mask", "mask"})

FileOnDisk = tuple[str, int, int]
"""Path relative to the cache, or name; and its stat record: size in bytes, stamp."""


@dataclass
class CacheScan:
    """The files of a cache, and the samples that they may belong to."""

    request: ImportRequest
    format: Format
    listing: Listing
    files: Sequence[FileOnDisk]
    """Files that may belong to a cache, sorted."""
    encoded_captions: EncodedCaptions
    samples: Sequence[Sample]
    """Samples with the captions that the trainer encoded; once the files are matched, one for each clip of a video."""
    matches: Matches
    spans: dict[str, ClipFrames] = field(default_factory=dict[str, ClipFrames])
    """By sample: the frames of its clip, if a file's name says them."""
    side_files: list[FileOnDisk] = field(default_factory=list[FileOnDisk])
    """The trainer's side files, beside the pictures and beside the cache."""
    older: list[str] = field(default_factory=list[str])
    """Files of text that are not used, because they are older than their caption, and other files of it are not."""

    @cached_property
    def paths(self) -> Sequence[str]:
        """The files' paths."""
        return [path for path, _size, _stamp in self.files]

    @cached_property
    def by_kind(self) -> Mapping[Kind, Sequence[tuple[str, ParsedName]]]:
        """By kind: the files of the requested family, else of all families that are known here."""
        only = self.matches.family
        there: dict[Kind, list[tuple[str, ParsedName]]] = {}
        for path, parsed in self._parsed.items():
            if (parsed.named is None or parsed.family is not None) and (only is None or parsed.family in (None, only)):
                there.setdefault(parsed.kind, []).append((path, parsed))
        return there

    @cached_property
    def _parsed(self) -> Mapping[str, ParsedName]:
        """By path: what the file holds. Files whose names do not tell are left out."""
        trainer, parsed = self.format.trainer, {path: self.format.reading.parse_name(path) for path in self.paths}
        return {
            path: one if one.named is None else one._replace(family=trainer.family_called(one.named, self.matches.family))
            for path, one in parsed.items()
            if one is not None
        }

    def _unknown_families(self) -> list[str]:
        names = [parsed.named for parsed in self._parsed.values() if parsed.named is not None and parsed.family is None]
        belong = plural(len(names), "file belongs", "files belong")
        return [f"{belong} to models that cannot be imported yet ({', '.join(sorted(set(names)))})"] if names else []

    @property
    def root(self) -> Path:
        """The folder to which the references of the source are relative."""
        data = Path(self.request.data)
        return data if data.is_dir() else data.parent

    def check_roots(self) -> None:
        """Raise BadInput if a cache beside the pictures is above or below their root, and its paths could mean other pictures."""
        root, folder = self.root.resolve(), Path(self.request.folder).resolve()
        is_inside = folder.is_relative_to(root)
        if folder == root or not (is_inside or root.is_relative_to(folder)):
            return
        inside, outside, paths = (folder, root, visuals_of(self.samples)) if is_inside else (root, folder, self.paths)
        if any(PurePosixPath(path).is_relative_to(inside.relative_to(outside).as_posix()) for path in paths):
            data = option("data")
            advice = f", or {folder} as {data}" if Path(self.request.data).is_dir() else ""
            raise BadInput(
                f"{self.format.name} caches beside the pictures, so the cache's folder and {data} must be the same folder, but"
                f" {inside} lies in {outside}; pass {root} as the cache's folder{advice}",
                option="folder",
            )

    def match(self, cache: CacheFiles, about_source: Remarks) -> None:
        """Match the files to samples, make a sample of each clip of a video, and read the trainer's side files.

        Raises BadUsage if no file belongs to a sample, BadInput.
        """
        request, matches, side_file = self.request, self.matches, self.format.side_files
        beside: list[Path] = []
        if side_file is not None:
            folders = dict.fromkeys((self.root, cache.root))
            paths = [path for folder in folders for path in sorted(folder.iterdir())]
            found = {path: name for path in paths if (name := side_file.fullmatch(path.name)) and path.is_file()}
            beside, matches.ids = [*found], sorted({name["id"] for name in found.values()})
        listing = CacheListing(self.paths, cache.root, cache.read, request.encode != ("text",), request.claims, request.fps)
        may_match = [sample for sample in self.samples if self.format.has_videos or VIDEO not in sample.images]
        self.format.reading.match(listing, may_match, matches)
        self._split_videos(about_source)
        self._leave_out_older()
        if self.format.read_side_file is not None:
            for path in dict.fromkeys(path.resolve() for path in beside):
                data = read_foreign(path, limit_bytes=_SIDE_FILE_BYTES)
                self.format.read_side_file(str(path), data, visuals_of(self.samples).keys(), matches)
            self.side_files = [(path.name, *_stat_record(path)) for path in beside]
        if not any((matches.text, matches.latents, matches.doubtful, matches.doubtful_latents)):
            raise BadUsage(self._why_nothing())

    def _split_videos(self, about_source: Remarks) -> None:
        """Make a sample of each clip of a video. If the cache holds nothing of videos, they are left out, as `precompute` does."""
        latents = {*self.matches.latents, *self.matches.doubtful_latents}
        videos = [sample for sample in self.samples if VIDEO in sample.images]
        if not any(visual_of(one) in latents or (not latents and one.captions[0] in self.matches.text) for one in videos):
            for sample in videos:
                about_source.unused.add(NO_FRAMES, sample.id)
            self.samples = [sample for sample in self.samples if VIDEO not in sample.images]
        spans = {sample.id: self.matches.spans(visual_of(sample)) for sample in self.samples}
        are_several = any(len(those) > 1 for those in spans.values())
        clips: list[Sample] = []
        for sample in self.samples:
            for span in spans[sample.id]:
                # If no video has several clips, each keeps the id of its video, so that `precompute` can add to it.
                clips.append(replace(sample, id=f"{sample.id}#{span.start:05d}-{span.frames:03d}") if are_several else sample)
                self.spans[clips[-1].id] = span
            clips += [] if spans[sample.id] else [sample]
        self.samples = clips

    def _leave_out_older(self) -> None:
        """Of several files of one caption, leave out those older than the caption file beside their picture.

        If all are older, all are kept, because copying a source makes it younger than its cache.
        """
        for caption, locations in self.matches.text.items():
            if len(locations) == 1:
                continue
            are_older = [one.visual is not None and self._caption_time(one.visual) > self._file_time(one) for one in locations]
            if any(are_older) and not all(are_older):
                self.older += [one.path for one, is_older in zip(locations, are_older, strict=True) if is_older]
                self.matches.text[caption] = [one for one, is_older in zip(locations, are_older, strict=True) if not is_older]

    def _file_time(self, location: FileLocation) -> int:
        return _modified(Path(self.request.folder) / location.path)

    def _caption_time(self, reference: str) -> int:
        """Return the mtime_ns of the caption file beside a picture; 0 if there is none."""
        return max(0, *(self._source_time(str(PurePosixPath(reference).with_suffix(suffix))) for suffix in SUFFIXES))

    def _source_time(self, reference: str) -> int:
        """Return the mtime_ns of a file of the source, or of the tar that it is in; -1 if it is gone."""
        if self.listing.stat(reference) is None:
            return -1
        tar, alone = self._tars.get(reference.partition("/")[0]), next(iter(self._tars.values()), None)
        return _modified((alone if len(self._tars) == 1 else tar) or self.root / reference)

    @cached_property
    def _tars(self) -> Mapping[str, Path]:
        return {path.name: path for path in tars_at(self.request.data) or ()}

    def stale(self, kinds: Collection[str]) -> Iterator[str]:
        """Yield files older than their picture, video or caption. They may still be right, because copying a source makes it younger."""
        yield from self.older if "text" in kinds else ()
        texts: dict[tuple[str, str | None], list[FileLocation]] = {}
        for caption, locations in self.matches.text.items():
            for location in locations:
                texts.setdefault((caption, location.visual), []).append(location)
        for sample in self.samples:
            if (reference := visual_of(sample)) is None:
                continue
            span = self.spans.get(sample.id)
            latents = [one for one in self.matches.latents.get(reference, ()) if one.span == span] if "latents" in kinds else []
            yield from (location.path for location in latents[:1] if self._source_time(reference) > self._file_time(location))
            for caption in sample.captions[:1] if "text" in kinds else ():
                alone = [location for location in self.matches.text.get(caption, ())[:1] if location.visual is None]
                named = texts.get((caption, reference), alone)
                yield from (location.path for location in named if self._caption_time(reference) > self._file_time(location))

    def kinds_to_import(self, family: Family) -> Sequence[str]:
        """Return the kinds to import: those requested, else those of this family in the folder, whether or not they match a sample.

        Raises BadUsage for latents if the source has no pictures.
        """
        matched = {"text": self.matches.text or self.matches.doubtful, "latents": self.matches.latents or self.matches.doubtful_latents}
        held = {kind for kind, those in self.by_kind.items() if any(_may_be_of(parsed, family) for _path, parsed in those)}
        kinds = self.request.encode or [kind for kind, locations in matched.items() if locations or kind in held]
        if "latents" in kinds and not visuals_of(self.samples):
            raise BadUsage(
                f"{self.request.data} lists no pictures, so no latents can belong to it: pass {option('encode', 'text')}", option="encode"
            )
        return kinds

    def unmatched(self, kinds: Collection[str]) -> list[str]:
        """Return the files that no sample uses for these kinds."""
        used = set[str]().union(*(self.matches.used.get(kind, ()) for kind in kinds))
        return [path for path in self.paths if path not in used]

    def _why_nothing(self) -> str:
        folder, data = self.request.folder, self.request.data
        if not self.files:
            return f"{folder} holds no file of {self.format.name}'s cache: pass the folder that it wrote"
        if not self.samples:
            made_from = f"pass as {option('data')} what the cache was made from"
            return f"{data} lists no samples, so no file in {folder} can belong to one: {made_from}"
        first, held = self.samples[0], ", ".join(map(repr, self.paths[:3]))
        sample = f"the source's first sample is {first.id!r}, its caption {first.captions[0][:60]!r}"
        message = f"no file in {folder} belongs to {data} by the naming rules of {self.format.name}: it holds {held}; {sample}"
        return "; ".join([message, *self._unknown_families()])

    def remarks(self, family: Family, kinds: Collection[str]) -> Iterator[str]:
        """Yield what the user should know about the files."""
        matches = self.matches
        yield from (*matches.remarks, *self._unknown_families(), *self.encoded_captions.remarks())
        captions = [caption for caption in matches.doubtful if caption not in matches.text and "text" in kinds]
        if captions:
            yield f"text of {plural(len(captions), 'caption')} is not imported: {matches.doubtful[captions[0]]}"
        pictures = [one for one in matches.doubtful_latents if not matches.side_facts.get(one) and "latents" in kinds]
        if pictures:
            yield f"latents of {_named(pictures, self.format)} are not imported: {matches.doubtful_latents[pictures[0]]}"
        texts = [path for path, parsed in self.by_kind.get("text", ()) if _may_be_of(parsed, family)]
        left = [path for path in texts if path not in matches.used.get("text", ())]
        if left and "text" in kinds and self.format.text_may_be is not None:
            which = f"{len(left)} of {plural(len(texts), 'file')} of text {noun(len(left), 'matches', 'match')}"
            yield f"{which} no caption of the source, and may belong to {self.format.text_may_be()}"


def scan_cache(request: ImportRequest, cache_format: Format, listing: Listing, about_source: Remarks) -> CacheScan:
    """Return the files of a cache and the samples of a source, not matched yet. Stores inside the folder are skipped. Raises BadInput."""
    files: list[FileOnDisk] = []
    for root, folders, names in os.walk(request.folder):
        if MARKER in names:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root) / name for name in names if not name.startswith(".")):
            relative = path.relative_to(request.folder).as_posix()
            if cache_format.files.search(relative) is not None:
                files.append((relative, *_stat_record(path)))
    added = CaptionSettings(request.trigger_word, request.caption)
    captions = EncodedCaptions(cache_format, listing if Path(request.data).is_dir() else None, request.caption_lines, added)
    matches = Matches(None if request.family is None else family_named(request.family), captions.read_as)
    scan = CacheScan(request, cache_format, listing, sorted(files), captions, (), matches)
    policy, has_text = CaptionPolicy.parse(request.captions), "text" in (request.encode or scan.by_kind)
    scan.samples = [
        replace(sample, captions=policy.texts(captions.as_encoded(sample) if has_text else sample.captions))
        for sample in listing.samples(about_source)
    ]
    if cache_format.is_beside:
        scan.check_roots()
    return scan


def _stat_record(path: Path) -> tuple[int, int]:
    try:
        return stat_of(path.stat())
    except OSError:
        return NO_STAT


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _may_be_of(parsed: ParsedName, family: Family) -> bool:
    """Whether a file may be of this family, compared by name: the imported one has the declared model's widths."""
    return parsed.family is None or parsed.family.name == family.name


def _counted(pictures: Collection[str], cache_format: Format) -> str:
    """Count what the files are of: for trainers that cache videos, several clips may be of one."""
    return plural(len(pictures), "picture or video", "pictures or videos") if cache_format.has_videos else plural(len(pictures), "picture")


def _named(pictures: Collection[str], cache_format: Format) -> str:
    return f"{_counted(pictures, cache_format)} ({first_of(sorted(pictures))})"


def remarks_of(encoders: Iterable[FileEncoder]) -> Iterator[str]:
    """Yield remarks on further resolutions and extra tensors. An export writes these again, but data sets do not return them.

    A mask cannot have a column: whether there is one is known when the file is opened, and the plan is made before.
    """
    for encoder in encoders:
        if not isinstance(encoder, ImportedLatents):
            continue
        cache_format = encoder.cache.format
        if encoder.several:
            have = noun(len(encoder.several), "has", "have")
            yield f"{_named(encoder.several, cache_format)} {have} latents of several resolutions; the largest are imported"
        if encoder.turned and not cache_format.turns_pictures:
            turned = f"{_named(encoder.turned, cache_format)} {noun(len(encoder.turned), 'is', 'are')} turned by EXIF data"
            yield (
                f"{turned}, but {cache_format.name} ignores that: it encoded them lying on their side, and they are imported like that; run"
                " `cachestore precompute` to encode them upright"
            )
        for name, pictures in sorted(encoder.extra_tensors.items()):
            if name not in _IN_FACTS:
                masks = ": for masks in training, run `cachestore precompute` on the source with its own masks" if name in _MASKS else ""
                yield f"{name} of {_counted(pictures, cache_format)} is stored for a later export, but data sets do not return it{masks}"
