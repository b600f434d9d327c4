"""Encoders that read what another trainer has cached in place of calling a model. Whose file is whose was found out before (`formats`)."""

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from cachestore.core.errors import EncodeFailed
from cachestore.core.inputs import WITHIN, caption_key
from cachestore.core.keys import Json, Key, Recipe, canonical, digest_bytes, digest_text, input_key
from cachestore.core.raw_tensors import Array, Latents, Misplaced, Text, numbers
from cachestore.core.samples import CAPTION, IMAGE
from cachestore.encode.unit import Prepared, Read, Resolved, Result
from cachestore.interop.formats.families import Family
from cachestore.interop.formats.matching import Place, Told
from cachestore.interop.sandbox import CacheFiles
from cachestore.jobs.declared_model import IMPORTED

_OF_A_SIZE: Final = re.compile(r"_\d+(x\d+)+(_[a-z0-9_]+)?$")
"""What stands behind the name of a tensor for one size and dtype."""
_TOGETHER: Final = 64
_LOOKED_AT: Final = 3
"""So many of the files of one caption are compared at most."""
_ROUNDING: Final = 0.1
"""Text of one caption from another batch is nearer, relative to its length: bfloat16 leaves some percent. Text of others is not."""


@dataclass
class FileEncoder:
    """What implements `unit.Encoder` for imported values has in common: files are read in place of a model's being called."""

    recipe: Recipe
    cache: CacheFiles
    family: Family
    places: Mapping[str, Sequence[Place]]
    """By caption or reference, the files that may be of it."""
    doubtful: Mapping[str, str]
    """By caption or reference, why a file that may be of it is not taken."""
    role: ClassVar[str]
    window: int = _TOGETHER

    def batch_limit(self, group: Hashable) -> int:
        """Files are read one by one; so many are handed on together."""
        del group
        return _TOGETHER

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """What was read."""
        return lambda: dict(batch)

    def close(self) -> None:
        """End the process that reads files with pickles."""
        self.cache.torch.close()

    def places_of(self, what: str, words: str) -> Sequence[Place]:
        """The files that may be of a caption or picture. Raises EncodeFailed where there is none."""
        if what not in self.places:
            raise EncodeFailed(self.doubtful.get(what, f"{self.cache.root} has no file for the {words}"))
        return self.places[what]

    def about(self, place: Place, **more: Json) -> dict[str, Json]:
        """What an entry's JSON value says of where it came from."""
        told = {"format": self.cache.format.name, "file": place.path, **more}
        return {"encoder": self.recipe.encoder, "provenance": IMPORTED, IMPORTED: told}


class Captions(FileEncoder):
    """Imported text. Its key follows from the caption; of several files of one caption up to three are opened, to see that two agree."""

    role = CAPTION

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """The key of a caption. Raises EncodeFailed where the cache has none of it, or several that differ; then OSError too."""
        del read
        caption = str(request["caption"])
        places = self.places_of(caption, f"caption {caption[:80]!r}")
        place, text = (places[0], None) if len(places) == 1 else self._agreed(places)
        digest = digest_text(caption)
        key = caption_key(self.recipe.fingerprint, caption)
        return Resolved(key, (place, text), {CAPTION: digest}, {"input_digest": digest, **self.about(place)})

    def prepare(self, resolved: Resolved) -> Prepared:
        """Read the file, where that was not done. Raises EncodeFailed, OSError."""
        place, text = resolved.item
        text = self.cache.text(place, self.family) if text is None else text
        return Prepared({**text.tensors, **text.others}, IMPORTED)

    def _agreed(self, places: Sequence[Place]) -> tuple[Place, Text]:
        """The first of several files of one caption that says the same as another. Raises EncodeFailed where those that can be read differ.

        One may be of what its picture's caption was before, and nothing in it says so. Three are looked at, that one alone spoils nothing.
        """
        read: list[tuple[Place, Text]] = []
        refused: EncodeFailed | None = None
        for place in places:
            try:
                text = self.cache.text(place, self.family)
            except EncodeFailed as error:
                refused = refused or error
                continue
            if (same := next((one for one in read if _are_alike(one[1], text)), None)) is not None:
                return same
            read.append((place, text))
            if len(read) == _LOOKED_AT:
                break
        if refused is not None and not read:
            raise refused
        if len(read) > 1:
            names = " and ".join(place.path for place, _text in read)
            raise EncodeFailed(f"{names} all belong to its caption, but hold different values: keep only the right one in the folder")
        return read[0]


def _are_alike(one: Text, other: Text) -> bool:
    """Whether two texts are of one caption, as far as batches of another size round otherwise."""
    pairs = [(one.tensors[name], other.tensors.get(name)) for name in one.tensors]
    return all(raw is not None and raw[1] == own[1] and _distance(numbers(own), numbers(raw)) <= _ROUNDING for own, raw in pairs)


def _distance(one: Array, other: Array) -> float:
    """Relative."""
    length = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
    return float(np.linalg.norm(one - other)) / length if length else 0.0


@dataclass
class Pictures(FileEncoder):
    """Imported latents. A key holds the digest of the file too, as a trainer's sample is one of many."""

    told: Mapping[str, Sequence[Told]] = field(default_factory=dict[str, Sequence[Told]])
    """What further files say of each picture."""
    beside: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By the trainer's name of what lay beside latents, the pictures whose files held it: those that were read here."""
    several: set[str] = field(default_factory=set[str])
    """Pictures that had latents of other resolutions too: those that were read here."""
    turned: set[str] = field(default_factory=set[str])
    """Pictures that their EXIF data turn by a quarter: those that were read here."""
    role = IMAGE

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Read the picture for its digest, and the file. Raises EncodeFailed where the cache has none of it or of its crop, OSError."""
        reference = str(request["image"])
        places = self.places_of(reference, f"picture {reference!r}")
        picture = read(reference)
        digest = digest_bytes(picture)
        place, data, latents = self._largest(reference, places)
        factor, (height, width) = int(self.recipe.read["spatial_factor"]), latents.tensor[1][-2:]
        bucket = (width * factor, height * factor)
        told, measured = self._told(reference, bucket), _measured(picture)
        if measured is not None and measured.upright != measured.stored:
            self.turned.add(reference)
        _check_size(f"{told.path} says that the picture has", told.facts, measured)
        _check_size(f"{place.path} is of a picture of", latents.facts, measured)
        facts: dict[str, Json] = {**told.facts, **latents.facts, "bucket": list(bucket)}
        _check_crop(request, facts, measured, place)
        facts = _placed(facts, measured)
        for name in latents.others:
            self.beside.setdefault(_OF_A_SIZE.sub("", name.removeprefix(f"{self.cache.format.name}.")), set()).add(reference)
        cached = hashlib.sha256(data).hexdigest()
        key = input_key(self.recipe.fingerprint, {"image": digest}, {"cached": cached})
        info: dict[str, Json] = {"info": {**told.info, **latents.info}} if told.info or latents.info else {}
        meta = {"input_digest": digest, "bucket": facts["bucket"], **self.about(place, file_digest=cached, **info)}
        return Resolved(key, {latents.kind: latents.tensor, **latents.others}, {str(request.get("role", IMAGE)): digest}, meta, facts)

    def prepare(self, resolved: Resolved) -> Prepared:
        """What was read already."""
        return Prepared(resolved.item, IMPORTED)

    def _largest(self, reference: str, places: Sequence[Place]) -> tuple[Place, bytes, Latents]:
        """The latents of a picture and their file, of several resolutions the largest; others' are passed over.

        Raises EncodeFailed, also where two are as large: they were cut otherwise, and nothing says which count. OSError.
        """
        channels = int(self.recipe.read["channels"])
        found: list[tuple[Place, bytes, Latents]] = []
        misplaced: Misplaced | None = None
        for place in places:
            data = self.cache.bytes_at(place)
            try:
                latents = self.cache.latents(place, data, self.family)
            except Misplaced as error:
                misplaced = misplaced or error
                continue
            if (own := latents.tensor[1][0]) != channels:
                raise EncodeFailed(f"{place.path}: its latents have {own} channels, but those of {self.family.name} have {channels}")
            found.append((place, data, latents))
        if misplaced is not None and not found:
            raise misplaced
        areas = [latents.tensor[1][-2] * latents.tensor[1][-1] for _place, _data, latents in found]
        largest = [one for one, area in zip(found, areas, strict=True) if area == max(areas)]
        if len({data for _place, data, _latents in largest}) > 1:
            names = " and ".join(
                f"{place.path} (byte {place.start})" if place.size else place.path for place, _data, _latents in largest[:3]
            )
            raise EncodeFailed(f"{names} all belong to {reference!r} and have the same size: keep only the right one in the folder")
        if len(set(areas)) > 1:
            self.several.add(reference)
        return largest[0]

    def _told(self, reference: str, bucket: tuple[int, int]) -> Told:
        """What further files say of a picture that was cut to this bucket; nothing where none does. Raises EncodeFailed.

        A file of another resolution says nothing of these latents; where none is of theirs, or what may be is doubtful, nobody knows how
        they were cut.
        """
        those = self.told.get(reference, ())
        if not those and reference in self.doubtful:
            raise EncodeFailed(self.doubtful[reference])
        fitting = [one for one in those if one.facts["bucket"] == list(bucket)]
        if those and not fitting:
            sizes = " and ".join("x".join(map(str, one.facts["bucket"])) for one in those[:3])
            raise EncodeFailed(
                f"{those[0].path} says that the picture was cropped to {sizes}, but its latents are of {bucket[0]}x{bucket[1]}:"
                " it is from another run"
            )
        if len({canonical(dict(one.facts)) for one in fitting}) > 1:
            names = " and ".join(one.path for one in fitting[:3])
            raise EncodeFailed(f"{names} contradict each other about it: keep only the right one there")
        return fitting[0] if fitting else Told("", {})


def _placed(told: Mapping[str, Json], measured: "_Measured | None") -> dict[str, Json]:
    """Facts for the catalog: what the file tells, else what follows for a picture that covers its bucket and is cut at the centre."""
    facts = dict(told)
    if "size" not in facts and measured is not None:
        facts["size"] = list(measured.upright)
    if "size" in facts and not {"resized", "crop"} <= facts.keys():
        from cachestore.encode.buckets import Size, placement

        place = placement(Size(*facts["size"]), Size(*facts["bucket"]))
        facts |= {"resized": list(place.resized), "crop": list(place.crop)}
    return facts


def _check_size(said: str, told: Mapping[str, Json], measured: "_Measured | None") -> None:
    """Refuse what is said to be of a picture of another size: it is of an earlier one under this name. Raises EncodeFailed.

    `said` begins the sentence, up to the size. Trainers take the size before or after they turn a picture upright.
    """
    if "size" not in told or measured is None or tuple(told["size"]) in measured:
        return
    (width, height), own = told["size"], measured.upright
    raise EncodeFailed(
        f"{said} {width} x {height} pixels, but it has {own[0]} x {own[1]}: the file may be of an earlier picture of this name;"
        " run `cachestore precompute` to encode this one"
    )


def _check_crop(request: Mapping[str, Json], told: Mapping[str, Json], measured: "_Measured | None", place: Place) -> None:
    """Refuse latents of a whole picture for a sample with its own crop, unless something tells that they are of that part.

    Raises EncodeFailed.
    """
    if WITHIN not in request:
        return
    if measured is not None:
        from cachestore.encode.buckets import Size
        from cachestore.encode.views import within_of

        within = within_of(request, Size(*measured.upright))
        if within is None or ({"resized", "crop"} <= told.keys() and _is_within(told, within, Size(*measured.upright))):
            return
    raise EncodeFailed(
        f"it has its own crop {list(request[WITHIN])}, but the latents in {place.path} are taken to be of the whole picture; run"
        " `cachestore precompute` to encode the crop"
    )


def _is_within(told: Mapping[str, Json], within: tuple[int, int, int, int], size: tuple[int, int]) -> bool:
    """Whether what is told is a view of this part of a picture: scaled so that the part covers the bucket, and cut out of the part."""
    from cachestore.encode.buckets import Placement, Size, placement
    from cachestore.encode.views import View

    part, bucket = Size(within[2] - within[0], within[3] - within[1]), Size(*told["bucket"])
    scaled = placement(part, bucket).resized
    all_of_it = View(
        Size(*size), bucket, Placement(scaled, (0, 0, scaled.width, scaled.height)), is_flipped=False, variant=None, within=within
    ).facts()
    (left, top, right, bottom), (least, first, most, last) = told["crop"], all_of_it["crop"]
    is_inside = least <= left and first <= top and right <= most and bottom <= last
    return is_inside and list(told["resized"]) == all_of_it["resized"] and (right - left, bottom - top) == tuple(bucket)


class _Measured(NamedTuple):
    """(width, height) of a picture in pixels."""

    upright: tuple[int, int]
    stored: tuple[int, int]
    """Before it is turned as its EXIF data say."""


def _measured(picture: bytes) -> _Measured | None:
    """The size of a picture by its header; None without Pillow, or for what is no picture."""
    try:
        from cachestore.encode import images

        return _Measured(images.measure(picture), images.measure_stored(picture))
    except (ImportError, EncodeFailed):
        return None
