"""Encoders that read another trainer's cached files instead of calling a model. `cache_scan` has matched the files to samples before."""

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Json, Key, Recipe, canonical, digest_text, input_key
from cachestore.core.raw_tensors import Latents, Misplaced, Text, numbers
from cachestore.core.samples import CAPTION, IMAGE, VIDEO
from cachestore.core.spelling import option
from cachestore.encode.batching.unit import Prepared, Read, Resolved, Result
from cachestore.store.format.catalog import IMPORTED
from cachestore.trainers.cache_files import CacheFiles
from cachestore.trainers.families import Family
from cachestore.trainers.matching import FileLocation, SideFacts
from cachestore.trainers.source_facts import read_source

_OF_A_SIZE: Final = re.compile(r"_\d+(x\d+)+(_[a-z0-9_]+)?$")
"""The end of a tensor's name that gives its size and dtype."""
_TOGETHER: Final = 64
_MAX_COMPARED: Final = 3
"""At most so many files of one caption are compared."""
_ROUNDING: Final = 0.1
"""The largest relative distance between two texts of one caption. Another batch size changes bfloat16 by some per cent."""


@dataclass
class FileEncoder:
    """What the encoders of imported values share: they implement `unit.Encoder` by reading files."""

    recipe: Recipe
    cache: CacheFiles
    family: Family
    locations: Mapping[str, Sequence[FileLocation]]
    """By caption or reference: the files that may belong to it."""
    doubtful: Mapping[str, str]
    """By caption or reference: why a file that may belong to it is not used."""
    role: ClassVar[str]
    window: int = _TOGETHER

    def batch_limit(self, _group: Hashable) -> int:
        """Return how many files are passed on together; each is read alone."""
        return _TOGETHER

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Return what was read."""
        return lambda: dict(batch)

    def close(self) -> None:
        """End the process that reads files with pickles."""
        self.cache.torch.close()

    def locations_of(self, what: str, words: str) -> Sequence[FileLocation]:
        """Return the files that may belong to a caption or picture. Raises EncodeFailed if there is none."""
        if what not in self.locations:
            lacking = f"{self.cache.root} has no file for the {words}; `cachestore precompute` encodes it"
            raise EncodeFailed(self.doubtful.get(what, lacking))
        return self.locations[what]

    def about(self, location: FileLocation, **more: Json) -> dict[str, Json]:
        """Return what the JSON value of an entry says about its origin."""
        origin = {"format": self.cache.format.name, "file": location.path, **more}
        return {"encoder": self.recipe.encoder, "provenance": IMPORTED, IMPORTED: origin}


class ImportedText(FileEncoder):
    """Imported text. Its key follows from the caption. If a caption has several files, up to three are opened until two agree."""

    role = CAPTION

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Return the key of a caption. Raises EncodeFailed if the cache has no file for it, or files that differ; OSError."""
        del read
        caption = str(request["caption"])
        locations = self.locations_of(caption, f"caption {caption[:80]!r}")
        location, text = (locations[0], None) if len(locations) == 1 else self._agreed(locations)
        digest = digest_text(caption)
        key = caption_key(self.recipe.fingerprint, caption)
        return Resolved(key, (location, text), {CAPTION: digest}, {"input_digest": digest, **self.about(location)})

    def prepare(self, resolved: Resolved) -> Prepared:
        """Read the file, unless that was done. Raises EncodeFailed, OSError."""
        location, text = resolved.item
        text = self.cache.text(location, self.family) if text is None else text
        return Prepared({**text.tensors, **text.others}, IMPORTED)

    def _agreed(self, locations: Sequence[FileLocation]) -> tuple[FileLocation, Text]:
        """Return the first of several files of one caption that agrees with another. Raises EncodeFailed if the readable ones differ.

        A file may belong to an earlier caption of its picture, and nothing in it says so. With three files, one such file does no harm.
        """
        read: list[tuple[FileLocation, Text]] = []
        refused: EncodeFailed | None = None
        for location in locations:
            try:
                text = self.cache.text(location, self.family)
            except EncodeFailed as error:
                refused = refused or error
                continue
            if (same := next((one for one in read if _are_alike(one[1], text)), None)) is not None:
                return same
            read.append((location, text))
            if len(read) == _MAX_COMPARED:
                break
        if refused is not None and not read:
            raise refused
        if len(read) > 1:
            names = " and ".join(location.path for location, _text in read)
            raise EncodeFailed(f"{names} all belong to its caption, but hold different values: keep only the right one in the folder")
        return read[0]


def _are_alike(one: Text, other: Text) -> bool:
    """Whether two texts belong to one caption: equal up to the rounding of another batch size."""
    for name, raw in one.tensors.items():
        if name not in other.tensors or other.tensors[name][1] != raw[1]:
            return False
        ours, theirs = numbers(raw), numbers(other.tensors[name])
        length = max(float(np.linalg.norm(ours)), float(np.linalg.norm(theirs)))
        if length and float(np.linalg.norm(ours - theirs)) / length > _ROUNDING:
            return False
    return True


@dataclass
class ImportedLatents(FileEncoder):
    """Imported latents. The key contains the digest of the file too, because a trainer's sample from the VAE is one of many."""

    side_facts: Mapping[str, Sequence[SideFacts]] = field(default_factory=dict[str, Sequence[SideFacts]])
    """By reference: what a trainer's side files report."""
    extra_tensors: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By the trainer's name of a tensor that was stored with latents: the pictures read here that had it."""
    several: set[str] = field(default_factory=set[str])
    """Pictures read here that also had latents of other resolutions."""
    turned: set[str] = field(default_factory=set[str])
    """Pictures read here that are turned by a quarter by their EXIF data."""
    role = IMAGE
    """Videos have a column of their own."""

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Read the picture or video, for its digest, and its file. A request for a clip of a video has its `start` and its `frames`.

        Raises EncodeFailed if the cache has nothing for it or for its crop; OSError.
        """
        reference = str(request.get(VIDEO) or request["image"])
        locations = self.locations_of(reference, f"{VIDEO if VIDEO in request else 'picture'} {reference!r}")
        if "start" in request:
            locations = [one for one in locations if one.span == (request["start"], *request["frames"])]
        source = read_source(request, read)
        location, data, latents = self._largest(reference, locations)
        factor, (height, width) = int(self.recipe.read["spatial_factor"]), latents.tensor[1][-2:]
        bucket = (width * factor, height * factor)
        side = self._side_facts_of(reference, bucket)
        if source.is_turned:
            self.turned.add(reference)
        source.check_size(f"{side.path} says that the picture has", side.facts)
        source.check_size(f"{location.path} is of a picture of", latents.facts)
        latent_frames = latents.tensor[1][1] if len(latents.tensor[1]) == 4 else 1
        frames = (latent_frames - 1) * int(self.recipe.read["temporal_factor"]) + 1
        facts: dict[str, Json] = {**side.facts, **latents.facts, "bucket": list(bucket)}
        source.check_crop(request, facts, location)
        facts = source.with_crop(facts) | source.clip_facts(location, frames, request.get("fps"))
        facts["bucket"] += [frames] if source.is_video else []
        for name in latents.others:
            self.extra_tensors.setdefault(_OF_A_SIZE.sub("", name.removeprefix(f"{self.cache.format.name}.")), set()).add(reference)
        cached = hashlib.sha256(data).hexdigest()
        role = VIDEO if source.is_video else IMAGE
        key = input_key(self.recipe.fingerprint, {role: source.digest}, {"cached": cached})
        info: dict[str, Json] = {"info": {**side.info, **latents.info}} if side.info or latents.info else {}
        meta = {"input_digest": source.digest, "bucket": facts["bucket"], **self.about(location, file_digest=cached, **info)}
        return Resolved(key, {latents.kind: latents.tensor, **latents.others}, {role: source.digest}, meta, facts)

    def prepare(self, resolved: Resolved) -> Prepared:
        """Return what `resolve` read."""
        return Prepared(resolved.item, IMPORTED)

    def _largest(self, reference: str, locations: Sequence[FileLocation]) -> tuple[FileLocation, bytes, Latents]:
        """Return location, bytes and latents of the file with a picture's largest latents. Files of other pictures are ignored.

        Raises EncodeFailed, also if two different files are equally large, because nothing says which crop is right; OSError.
        """
        channels = int(self.recipe.read["channels"])
        found: list[tuple[FileLocation, bytes, Latents]] = []
        misplaced: Misplaced | None = None
        for location in locations:
            data = self.cache.bytes_at(location)
            try:
                latents = self.cache.latents(location, data, self.family)
            except Misplaced as error:
                misplaced = misplaced or error
                continue
            if (own := latents.tensor[1][0]) != channels:
                raise EncodeFailed(
                    f"{location.path}: its latents have {own} channels, but those of {self.family.name} have {channels}: pass"
                    f" {option('family')} with that of the files"
                )
            found.append((location, data, latents))
        if misplaced is not None and not found:
            raise misplaced
        areas = [latents.tensor[1][-2] * latents.tensor[1][-1] for _location, _data, latents in found]
        largest = [one for one, area in zip(found, areas, strict=True) if area == max(areas)]
        if len({data for _location, data, _latents in largest}) > 1:
            names = " and ".join(
                f"{location.path} (byte {location.start})" if location.size else location.path for location, _data, _latents in largest[:3]
            )
            raise EncodeFailed(f"{names} all belong to {reference!r} and have the same size: keep only the right one in the folder")
        if len(set(areas)) > 1:
            self.several.add(reference)
        return largest[0]

    def _side_facts_of(self, reference: str, bucket: tuple[int, int]) -> SideFacts:
        """Return what side files report about a picture that was cut to this bucket; empty if there are none. Raises EncodeFailed.

        A file of another resolution says nothing about these latents. If none has their bucket, or it is doubtful, the crop is unknown.
        """
        those = self.side_facts.get(reference, ())
        if not those and reference in self.doubtful:
            raise EncodeFailed(self.doubtful[reference])
        fitting = [one for one in those if one.facts["bucket"] == list(bucket)]
        if those and not fitting:
            sizes = " and ".join("x".join(map(str, one.facts["bucket"])) for one in those[:3])
            raise EncodeFailed(
                f"{those[0].path} says that the picture was cropped to {sizes}, but its latents are of {bucket[0]}x{bucket[1]}:"
                " it is from another run; run `cachestore precompute` to encode the picture"
            )
        if len({canonical(dict(one.facts)) for one in fitting}) > 1:
            names = " and ".join(one.path for one in fitting[:3])
            raise EncodeFailed(f"{names} contradict each other about it: keep only the right one there")
        return fitting[0] if fitting else SideFacts("", {})
