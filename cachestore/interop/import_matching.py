"""The files of a cache: which samples they belong to, and which are older than their picture or caption."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import NO_STAT, Stat
from cachestore.core.samples import VIDEO, Sample
from cachestore.core.words import first_of, noun, plural
from cachestore.files.opening import read_foreign
from cachestore.files.paths import MARKER
from cachestore.files.stat_record import stat_of
from cachestore.interop.caption_files import SUFFIXES, EncodedCaptions
from cachestore.interop.file_encoder import FileEncoder, ImportedLatents
from cachestore.interop.formats import diffusion_pipe
from cachestore.interop.formats.families import SD_SCRIPTS, Family, family_named, family_of
from cachestore.interop.formats.matching import Added, ClipFrames, FileLocation, Kind, Matches, ParsedName, visual_of, visuals_of
from cachestore.interop.formats.table import Format
from cachestore.interop.import_request import ImportRequest
from cachestore.interop.sandbox import CacheFiles
from cachestore.source.listing import Listing
from cachestore.source.remarks import Remarks
from cachestore.source.tars import tars_at
from cachestore.source.unused import NO_FRAMES

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
    wanted: Format
    listing: Listing
    files: Sequence[FileOnDisk]
    """Files that may belong to a cache, sorted."""
    encoded: EncodedCaptions
    samples: Sequence[Sample]
    """Samples with the captions that the trainer encoded."""
    matches: Matches
    unreadable: list[str] = field(default_factory=list[str])
    """Remarks on files that could not be read."""
    spans: dict[str, ClipFrames] = field(default_factory=dict[str, ClipFrames])
    """By sample: the frames of its clip, if a file's name says them."""

    @cached_property
    def paths(self) -> Sequence[str]:
        """The files' paths."""
        return [path for path, _size, _stamp in self.files]

    @cached_property
    def names(self) -> Mapping[str, ParsedName]:
        """By path: what the file holds. Files whose names do not tell are left out."""
        parsed = {path: self.wanted.reading.parse_name(path) for path in self.paths}
        trainer, only = self.wanted.name, self.matches.family
        return {
            path: one if one.named is None else one._replace(family=family_of(trainer, one.named, only))
            for path, one in parsed.items()
            if one is not None
        }

    @cached_property
    def by_kind(self) -> Mapping[Kind, Sequence[tuple[str, ParsedName]]]:
        """By kind: the files of the requested family, else of all families that are known here."""
        only = self.matches.family
        there: dict[Kind, list[tuple[str, ParsedName]]] = {}
        for path, parsed in self.names.items():
            if (parsed.named is None or parsed.family is not None) and (only is None or parsed.family in (None, only)):
                there.setdefault(parsed.kind, []).append((path, parsed))
        return there

    @cached_property
    def strangers(self) -> Sequence[str]:
        """A remark on files of families that are not known here."""
        names = [parsed.named for parsed in self.names.values() if parsed.named is not None and parsed.family is None]
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
            advice = f", or {folder} as --data" if Path(self.request.data).is_dir() else ""
            raise BadInput(
                f"{self.wanted.name} caches beside the pictures, so the cache's folder and --data must be the same folder, but"
                f" {inside} lies in {outside}; pass {root} as the cache's folder{advice}"
            )

    def match(self, cache: CacheFiles) -> None:
        """Match the files to samples by name, or, for a cache of shards, by the metadata of each value."""
        found = (self.wanted.metadata_files.fullmatch(path.name) for path in self._metadata_files) if self.wanted.metadata_files else ()
        self.matches.ids = sorted({one["id"] for one in found if one is not None})
        if self.wanted.reading.match is not None:
            may_match = [sample for sample in self.samples if self.wanted.has_videos or VIDEO not in sample.images]
            self.wanted.reading.match(self.paths, may_match, self.matches)
            return
        diffusion_pipe.match(list(self._items(cache)), self.samples, self.matches)
        names = {part for path in self.paths for part in PurePosixPath(path).parts} | {Path(self.request.folder).absolute().name}
        models = diffusion_pipe.families_in(names)
        for family in models.values() if self.matches.family is None else ():
            self.matches.counts(family)
        if self.request.encode != ("text",) and any(VIDEO in one.images and visual_of(one) in self.matches.latents for one in self.samples):
            rate = diffusion_pipe.rate_of_videos(models, self.request.claims, self.request.fps)
            self.request = replace(self.request, fps=rate)

    def settle_videos(self, seen: Remarks) -> None:
        """Make a sample of each clip of a video. If the cache holds nothing of videos, they are left out, as `precompute` does."""
        latents = {*self.matches.latents, *self.matches.doubtful_latents}
        videos = [sample for sample in self.samples if VIDEO in sample.images]
        if not any(visual_of(one) in latents or (not latents and one.captions[0] in self.matches.text) for one in videos):
            for sample in videos:
                seen.unused.add(NO_FRAMES, sample.id)
            self.samples = [sample for sample in self.samples if VIDEO not in sample.images]
        spans = {sample.id: self.matches.spans(visual_of(sample)) for sample in self.samples}
        are_several = any(len(those) > 1 for those in spans.values())
        self.samples = [clip for sample in self.samples for clip in self._clips_of(sample, spans[sample.id], are_several=are_several)]

    def _clips_of(self, sample: Sample, spans: Sequence[ClipFrames], *, are_several: bool) -> Iterator[Sample]:
        """Yield a sample for each clip. If no video has several, each keeps the id of its video, so that `precompute` can add to it."""
        for span in spans:
            own = replace(sample, id=f"{sample.id}#{span.start:05d}-{span.frames:03d}") if are_several else sample
            self.spans[own.id] = span
            yield own
        if not spans:
            yield sample

    def _items(self, cache: CacheFiles) -> Iterator[diffusion_pipe.Item]:
        for path in filter(diffusion_pipe.is_table, self.paths):
            try:
                locations = diffusion_pipe.locations_in(cache.root, path)
            except EncodeFailed as error:
                self.unreadable.append(str(error))
                continue
            for location in locations:
                try:
                    yield diffusion_pipe.Item(location, cache.contents(location, cache.bytes_at(location)).values)
                except (EncodeFailed, OSError) as error:
                    self.unreadable.append(f"{location.path}, byte {location.start}: {error}; let diffusion-pipe make it again")

    @cached_property
    def _metadata_files(self) -> Sequence[Path]:
        """The side files beside the pictures and beside the cache."""
        wanted, folders = self.wanted.metadata_files, dict.fromkeys((self.root, Path(self.request.folder)))
        if wanted is None:
            return []
        return [path for folder in folders for path in sorted(folder.iterdir()) if wanted.fullmatch(path.name) and path.is_file()]

    def read_sizes(self) -> list[FileOnDisk]:
        """Read the side files beside the pictures and beside the cache, and return their names. Raises BadInput."""
        read_metadata, paths = self.wanted.read_metadata, self._metadata_files
        if read_metadata is None:
            return []
        references = visuals_of(self.samples)
        for path in dict.fromkeys(map(Path.resolve, paths)):
            read_metadata(str(path), read_foreign(path, limit_bytes=_SIDE_FILE_BYTES), references.keys(), self.matches)
        return [(path.name, *_record(path)) for path in paths]

    def leave_out_older(self) -> list[str]:
        """Of several files of one caption, leave out those older than the caption file beside their picture; return their paths.

        If all are older, all are kept, because copying a source makes it younger than its cache.
        """
        left_out: list[str] = []
        for caption, locations in self.matches.text.items():
            older = [self._is_older(location) for location in locations] if len(locations) > 1 else []
            if any(older) and not all(older):
                left_out += [location.path for location, is_older in zip(locations, older, strict=True) if is_older]
                self.matches.text[caption] = [location for location, is_older in zip(locations, older, strict=True) if not is_older]
        return left_out

    def _is_older(self, location: FileLocation) -> bool:
        return location.beside is not None and self._caption_time(location.beside) > self._time_of(location)

    def _time_of(self, location: FileLocation) -> int:
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
        """The source's tars by name; empty if it has none."""
        return {path.name: path for path in tars_at(self.request.data) or ()}

    @cached_property
    def _beside(self) -> Mapping[tuple[str, str], Sequence[FileLocation]]:
        """By caption and reference: text that was found by its picture's name."""
        beside: dict[tuple[str, str], list[FileLocation]] = {}
        for caption, locations in self.matches.text.items():
            for location in locations:
                if location.beside is not None:
                    beside.setdefault((caption, location.beside), []).append(location)
        return beside

    def stale(self, counted: Collection[str]) -> Iterator[str]:
        """Yield files older than their picture, video or caption. They may still be right, because copying a source makes it younger."""
        for sample in self.samples:
            for reference in filter(None, [visual_of(sample)]):
                span = self.spans.get(sample.id)
                latents = [one for one in self.matches.latents.get(reference, ()) if one.span == span] if "latents" in counted else []
                yield from (location.path for location in latents[:1] if self._source_time(reference) > self._time_of(location))
                for caption in sample.captions[:1] if "text" in counted else ():
                    alone = [location for location in self.matches.text.get(caption, ())[:1] if location.beside is None]
                    own = self._beside.get((caption, reference), alone)
                    yield from (location.path for location in own if self._caption_time(reference) > self._time_of(location))

    def kinds(self, family: Family) -> Sequence[str]:
        """Return the kinds to import: those requested, else those of this family in the folder, whether or not they match a sample."""
        if self.request.encode:
            return self.request.encode
        matched = {"text": self.matches.text or self.matches.doubtful, "latents": self.matches.latents or self.matches.doubtful_latents}
        held = {kind for kind, those in self.by_kind.items() if any(_may_be_of(parsed, family) for _path, parsed in those)}
        return [kind for kind, locations in matched.items() if locations or kind in held]

    def unmatched(self, counted: Collection[str]) -> list[str]:
        """Return the files that no sample uses for the kinds in `counted`."""
        used = set[str]().union(*(self.matches.used.get(kind, ()) for kind in counted))
        return [path for path in self.paths if path not in used and not diffusion_pipe.is_table(path)]

    def nothing(self) -> str:
        """Return why there is nothing to import, in words."""
        folder, data = self.request.folder, self.request.data
        if not self.files:
            return f"{folder} holds no file of {self.wanted.name}'s cache: pass the folder that it wrote"
        if not self.samples:
            return f"{data} lists no samples, so no file in {folder} can belong to one: pass as --data what the cache was made from"
        first, held = self.samples[0], ", ".join(map(repr, self.paths[:3]))
        sample = f"the source's first sample is {first.id!r}, its caption {first.captions[0][:60]!r}"
        message = f"no file in {folder} belongs to {data} by the naming rules of {self.wanted.name}: it holds {held}; {sample}"
        return "; ".join([message, *self.strangers])

    def remarks(self, family: Family, counted: Collection[str]) -> Iterator[str]:
        """Yield what the user should know about the files."""
        yield from (*self.matches.remarks, *self.strangers, *self.encoded.remarks())
        doubtful, doubtful_latents = self.matches.doubtful, self.matches.doubtful_latents
        captions = [caption for caption in doubtful if caption not in self.matches.text and "text" in counted]
        if captions:
            yield f"text of {plural(len(captions), 'caption')} is not imported: {doubtful[captions[0]]}"
        pictures = [one for one in doubtful_latents if not self.matches.metadata.get(one) and "latents" in counted]
        if pictures:
            yield f"latents of {_named(pictures, self.wanted)} are not imported: {doubtful_latents[pictures[0]]}"
        texts = [path for path, parsed in self.by_kind.get("text", ()) if _may_be_of(parsed, family)]
        left = [path for path in texts if path not in self.matches.used.get("text", ())]
        if left and "text" in counted and self.wanted.text_may_be:
            which = f"{len(left)} of {plural(len(texts), 'file')} of text {noun(len(left), 'matches', 'match')}"
            yield f"{which} no caption of the source, and may belong to {self.wanted.text_may_be}"


def look_for(request: ImportRequest, wanted: Format, listing: Listing, seen: Remarks) -> CacheScan:
    """Return the files of a cache and the samples of a source, not matched yet. Raises BadInput."""
    files = listing if Path(request.data).is_dir() else None
    encoded = EncodedCaptions(wanted, files, request.caption_lines, Added(request.trigger_word, request.caption))
    matches = Matches(None if request.family is None else family_named(request.family), encoded.read_as)
    found = CacheScan(request, wanted, listing, _list_files(Path(request.folder), wanted), encoded, (), matches)
    policy, has_text = CaptionPolicy.parse(request.captions), "text" in (request.encode or found.by_kind)
    found.samples = [
        replace(sample, captions=policy.texts(encoded.take(sample) if has_text else sample.captions)) for sample in listing.samples(seen)
    ]
    return found


def _list_files(folder: Path, wanted: Format) -> list[FileOnDisk]:
    """Return the files that may belong to the cache. Stores inside the folder are skipped."""
    found: list[FileOnDisk] = []
    for root, folders, names in os.walk(folder):
        if MARKER in names:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root) / name for name in names if not name.startswith(".")):
            relative = path.relative_to(folder).as_posix()
            if wanted.files.search(relative) is not None:
                found.append((relative, *_record(path)))
    return sorted(found)


def _record(path: Path) -> Stat:
    """Return the stat record of a file; NO_STAT if it is gone."""
    try:
        return stat_of(path.stat())
    except OSError:
        return NO_STAT


def _modified(path: Path) -> int:
    """Return the mtime_ns of a file; -1 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _may_be_of(parsed: ParsedName, family: Family) -> bool:
    """Whether a file may be of this family, compared by name: the imported one has the declared model's widths."""
    return parsed.family is None or parsed.family.name == family.name


def _counted(pictures: Collection[str], wanted: Format) -> str:
    """Count what the files are of: for trainers that cache videos, several clips may be of one."""
    return plural(len(pictures), "picture or video", "pictures or videos") if wanted.has_videos else plural(len(pictures), "picture")


def _named(pictures: Collection[str], wanted: Format) -> str:
    return f"{_counted(pictures, wanted)} ({first_of(sorted(pictures))})"


def remarks_of(encoders: Iterable[FileEncoder]) -> Iterator[str]:
    """Yield remarks on further resolutions and extra tensors. An export writes these again, but data sets do not return them.

    A mask cannot have a column: whether there is one is known when the file is opened, and the plan is made before.
    """
    for encoder in encoders:
        if not isinstance(encoder, ImportedLatents):
            continue
        if encoder.several:
            have = noun(len(encoder.several), "has", "have")
            yield f"{_named(encoder.several, encoder.cache.format)} {have} latents of several resolutions; the largest are imported"
        if encoder.turned and encoder.cache.format.name == SD_SCRIPTS:
            turned = f"{_named(encoder.turned, encoder.cache.format)} {noun(len(encoder.turned), 'is', 'are')} turned by EXIF data"
            yield (
                f"{turned}, but sd-scripts ignores that: it encoded them lying on their side, and they are imported like that; run"
                " `cachestore precompute` to encode them upright"
            )
        for name, pictures in sorted(encoder.beside.items()):
            if name in _IN_FACTS:
                continue
            remark = f"{name} of {_counted(pictures, encoder.cache.format)} is stored for a later export, but data sets do not return it"
            yield (
                f"{remark}: for masks in training, run `cachestore precompute` on the source with its own masks"
                if name in _MASKS
                else remark
            )
