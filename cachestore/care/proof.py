"""`cachestore doctor --model M --data D`: does this package make of these samples, with these weights, what diffusers itself makes?

A few samples are encoded twice: by the encoders of `precompute`, in batches, and one by one by the model's own pipeline
(`encode/plain`). The tolerances are those of `verify --recompute`. Nothing is kept.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import BUCKET_MAX, BUCKET_MIN, BUCKETS, OWN
from cachestore.core.inputs import PIXELS as READ_AS
from cachestore.core.keys import Json, Key, digest_parts
from cachestore.core.raw_tensors import Raw
from cachestore.core.samples import IMAGE, VIDEO, Sample
from cachestore.core.spelling import option
from cachestore.core.tensors import to_raw
from cachestore.core.words import plural
from cachestore.encode.batching.batches import Batches
from cachestore.encode.batching.compare import PIXELS, distance_of, find_difference, tolerance_of
from cachestore.encode.batching.unit import Encoder
from cachestore.encode.families.resamplers import DEFAULT
from cachestore.encode.pictures.bucket_rules import STEP
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.plan.options import LATENTS, PrecomputeRequest
from cachestore.jobs.plan.planning import Planned, list_request, plan_request
from cachestore.jobs.run.task import UnitReader, words_of
from cachestore.jobs.start.fits import samples_of
from cachestore.jobs.start.forecast import Glances
from cachestore.sources.listing import Listing
from cachestore.store.write.commit import create_store

if TYPE_CHECKING:
    from cachestore.encode.pictures.latents import LatentsEncoder
    from cachestore.encode.pictures.shots import Pixels, Still
    from cachestore.encode.pictures.vision import VisionEncoder
    from cachestore.encode.plain import Pipeline
    from cachestore.encode.text.encoder import TextEncoder

COUNT: Final = 8
"""How many samples are compared."""
_CHOSEN: Final = frozenset({BUCKETS, BUCKET_MIN, BUCKET_MAX, READ_AS, "step"})
_UNCHOSEN: Final[Mapping[str, Json]] = {BUCKETS: OWN, "step": STEP}
"""What a request has in place of these where `--buckets` is not given."""
_CANDIDATES: Final = 64
"""Of how many samples these are chosen."""


@dataclass(slots=True)
class ComparedTensor:
    """One tensor, over all samples."""

    what: str
    """The encoder and the tensor: `text: prompt_embeds`."""
    dtype: str
    allowed: float | None
    """The largest relative L2 distance that counts as rounding; None if all bits must be equal."""
    compared: int = 0
    equal: int = 0
    """Values with equal bits."""
    distance: float = 0.0
    """The largest relative L2 distance; infinite for another shape."""
    differs: list[dict[str, Json]] = field(default_factory=list[dict[str, Json]])
    """Values that differ by more than rounding: `sample` and `reason`."""

    def as_json(self) -> dict[str, Json]:
        """Return the row as `doctor --json` lists it."""
        distance = self.distance if math.isfinite(self.distance) else None
        return {**asdict(self), "distance": distance, "ok": not self.differs}


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared."""

    model: str
    samples: tuple[str, ...]
    rows: tuple[ComparedTensor, ...]
    not_compared: tuple[str, ...]
    """What was made but could not be compared, and why."""
    failures: tuple[Mapping[str, Json], ...]
    """Samples that could not be encoded: `sample`, `encoder` and `reason`."""
    trainer: str
    """The trainer of `--buckets`; empty without it."""
    habits: tuple[str, ...]
    """How that trainer reads and resizes pictures, and which of it `--pixels` and `--resample` do here."""
    differences: tuple[Mapping[str, Json], ...]
    """What that trainer does differently from cachestore without `--buckets`, by sample."""

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that made the values."""
        return {name: version(name) for name in ("diffusers", "transformers", "torch")}

    @property
    def ok(self) -> bool:
        """Whether something was compared, and every difference is rounding."""
        return bool(self.rows) and not any(row.differs for row in self.rows)

    def as_json(self) -> dict[str, Json]:
        """Return one JSON object."""
        return {
            "ok": self.ok,
            "model": self.model,
            "versions": self.versions,
            "samples": list(self.samples),
            "rows": [row.as_json() for row in self.rows],
            "not_compared": list(self.not_compared),
            "failures": list(self.failures),
            "trainer": self.trainer or None,
            "habits": list(self.habits),
            "differences": list(self.differences),
        }


@dataclass(frozen=True, slots=True)
class _Value:
    """A unit that was encoded here."""

    sample: str
    item: Any
    """What was found before it was decoded: `Resolved.item`."""
    payload: Any
    made: Mapping[str, Any]


@dataclass(slots=True)
class _Findings:
    rows: dict[str, ComparedTensor] = field(default_factory=dict[str, ComparedTensor])
    not_compared: dict[str, None] = field(default_factory=dict[str, None])
    failures: list[Mapping[str, Json]] = field(default_factory=list[Mapping[str, Json]])

    def add(self, what: str, sample: str, ours: Any, theirs: Any, kind: str) -> None:
        """Compare a tensor that was made here with that of diffusers."""
        mine, other = (next(iter(to_raw({what: one}).values())) for one in (ours, theirs))
        allowed, name = tolerance_of(mine[0], kind), what.rpartition(" ")[2]
        row = self.rows.setdefault(what, ComparedTensor(what, mine[0], allowed))
        row.compared += 1
        row.equal += _are_equal(mine, other)
        if allowed is not None:
            row.distance = max(row.distance, distance_of(other, mine)[0] if tuple(mine[1]) == tuple(other[1]) else math.inf)
        if (found := find_difference({name: other}, {name: mine}, kind)) is not None:
            row.differs.append({"sample": sample, "reason": found.words})


def _are_equal(one: Raw, other: Raw) -> bool:
    return one[0] == other[0] and tuple(one[1]) == tuple(other[1]) and bytes(one[2]) == bytes(other[2])


def prove(request: PrecomputeRequest, count: int = COUNT, say: Callable[[str], None] = lambda _line: None) -> Proof:
    """Compare what is made of `count` samples of a request's source. The store that it names is not used.

    Raises BadInput as `precompute`, and if the source has no sample.
    """
    from cachestore.encode.models.hub import find_here
    from cachestore.encode.plain import pipeline_in

    with scratch_folder() as folder:
        layout = create_store(folder / "store")
        # `mean` and `sample` are made of the moments, and noise cannot be compared
        request = replace(request, store=str(layout.root), latents="moments", prompts=())
        listing = _some(list_request(request), count)
        wanted = plan_request(layout, request, listing, is_dry=True)
        pipeline = pipeline_in(find_here(request.model, request.revision))
        findings = _Findings()
        for number, encoder in enumerate(wanted.encoders):
            units = list(wanted.plan.units_of(number))
            if not units:
                continue
            say(f"{encoder.recipe.encoder}: {plural(len(units), 'value')} with cachestore …")
            with closing(encoder):
                values = _encoded(encoder, wanted, units, findings)
            if values:
                say(f"{encoder.recipe.encoder}: the same with diffusers' own calls, one by one …")
                _compare(encoder, values, request, pipeline, findings)
        differences = () if request.buckets == OWN else tuple(_unlike_trainer(wanted))
    trainer = "" if request.buckets == OWN else request.buckets
    samples, rows = tuple(wanted.plan.ids), tuple(findings.rows.values())
    habits = wanted.how if trainer else ()
    return Proof(request.model, samples, rows, tuple(findings.not_compared), tuple(findings.failures), trainer, habits, differences)


def _some(listing: Listing, count: int) -> Listing:
    """Return a listing of `count` samples: half of them by the shape of their pictures, the others by the length of their captions.

    Each half is spread from the least to the greatest, over up to 64 samples that are spread over the listing.
    """
    spread = _spread(list(listing.samples()), max(_CANDIDATES, count))
    glances = Glances(listing)

    def shape(sample: Sample) -> tuple[float, int]:
        try:
            if videos := sample.images.get(VIDEO):
                width, height = glances.glance(videos[0]).size
            elif pictures := sample.images.get(IMAGE):
                width, height = glances.measure(pictures[0], None)
            else:
                return 0.0, 0
        except (EncodeFailed, OSError):  # encoding it says why
            return 0.0, 0
        return width / height, width * height

    chosen = _spread(sorted(spread, key=shape), (count + 1) // 2)
    names = {sample.id for sample in chosen}
    rest = sorted((one for one in spread if one.id not in names), key=lambda one: sum(map(len, one.captions)))
    chosen += _spread(rest, count - len(chosen))
    digest = digest_parts(listing.content, *(sample.id for sample in chosen)).hex()
    return Listing(listing.files, digest, lambda _remarks: iter(chosen))


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples, evenly spread, the first and the last among them; all if there are no more."""
    if len(samples) <= count:
        return list(samples)
    return [samples[number * (len(samples) - 1) // max(1, count - 1)] for number in range(count)]


_Ready = tuple[Key, Any, Any, str]
"""A unit that is ready: its key, payload and item, and its sample."""


def _encoded(encoder: Encoder, wanted: Planned, units: Sequence[int], findings: _Findings) -> list[_Value]:
    """Encode units in batches, as a worker does. What cannot be encoded is among the failures."""
    names = samples_of(wanted.plan, units)
    batches: Batches[_Ready] = Batches(encoder.batch_limit)
    values: dict[Key, _Value] = {}
    for index in units:
        unit, sample = wanted.plan.unit(index), next(iter(names.get(index, ())), "(the empty caption)")
        try:
            resolved = encoder.resolve(unit.request, UnitReader(wanted.files))
            prepared = encoder.prepare(resolved)
        except (EncodeFailed, OSError) as error:
            findings.failures.append({"sample": sample, "encoder": encoder.recipe.encoder, "reason": words_of(error)})
            continue
        if batch := batches.add(prepared, (resolved.key, prepared.payload, resolved.item, sample)):
            values |= _submitted(encoder, batch, findings)
    for batch in batches.rest():
        values |= _submitted(encoder, batch, findings)
    return list(values.values())


def _submitted(encoder: Encoder, batch: Sequence[_Ready], findings: _Findings) -> dict[Key, _Value]:
    """Encode a batch. If that fails, each of its inputs is encoded alone, so that one bad input affects no other."""
    try:
        made = encoder.submit([(key, payload) for key, payload, _item, _sample in batch])()
    except BadInput:
        raise  # the model cannot be loaded
    except Exception as error:  # noqa: BLE001 - a model may raise anything; it is named with the sample
        if len(batch) == 1:
            findings.failures.append({"sample": batch[0][3], "encoder": encoder.recipe.encoder, "reason": words_of(error)})
            return {}
        alone = [_submitted(encoder, [one], findings) for one in batch]
        return {key: value for some in alone for key, value in some.items()}
    return {key: _Value(sample, item, payload, made[key]) for key, payload, item, sample in batch}


def _compare(
    encoder: Encoder, values: Sequence[_Value], request: PrecomputeRequest, pipeline: "Pipeline | None", findings: _Findings
) -> None:
    """Make the same values by diffusers' own calls, and compare; or say why that cannot be."""
    from cachestore.encode.pictures.latents import LatentsEncoder
    from cachestore.encode.pictures.vision import VisionEncoder
    from cachestore.encode.text.encoder import TextEncoder

    kind = encoder.recipe.encoder
    try:
        match encoder:
            case TextEncoder():
                _compare_texts(encoder, values, request, pipeline, findings)
            case LatentsEncoder():
                _compare_latents(encoder, values, request, pipeline, findings)
                _compare_pixels(encoder, values, findings)
            case VisionEncoder() if pipeline is not None:
                _compare_shown(encoder, values, request, pipeline, findings)
            case _:
                findings.not_compared[f"{kind}: it is made without a model"] = None
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - the installed diffusers may raise anything in its own call
        findings.not_compared[f"{kind}: diffusers' own call ends in {words_of(error)}"] = None
    from cachestore.encode.models.modules import free_memory

    free_memory()


def _compare_texts(
    encoder: "TextEncoder", values: Sequence[_Value], request: PrecomputeRequest, pipeline: "Pipeline | None", findings: _Findings
) -> None:
    from cachestore.core.read_block import parse_text
    from cachestore.encode.plain import rows_of, texts_of
    from cachestore.train.texts import read_outputs

    family = encoder.setup.family
    if family.called:
        why = f"text: {option('encode')} asks for {', '.join(family.called)} alone"
        why += f", and encode_prompt of {family.pipeline} calls all text encoders"
        findings.not_compared[why] = None
        return
    given = {name: encoder.setup.args[name] for name in request.encode_arg if name in encoder.setup.args}
    make, block = texts_of(encoder.setup, given, pipeline, request.device), parse_text(encoder.recipe)
    for value in values:
        made = make(value.item)
        for output, ours in read_outputs(block, value.made).items():
            theirs = rows_of(family, output, made, len(ours)).cpu()
            findings.add(f"text: {output}", value.sample, ours, theirs.to(ours.dtype), "text")


def _compare_latents(
    encoder: "LatentsEncoder", values: Sequence[_Value], request: PrecomputeRequest, pipeline: "Pipeline | None", findings: _Findings
) -> None:
    from cachestore.core.read_block import parse_latents
    from cachestore.encode.plain import PlainVae
    from cachestore.train.latents import read_latents

    name, block = encoder.recipe.encoder, parse_latents(encoder.recipe)
    vae = PlainVae(encoder, pipeline, request.device)
    for value in values:
        made = vae.make(value.payload)
        if made is None:
            findings.not_compared[f"{name} of samples with reference pictures, or without control and mask"] = None
            continue
        if "final" in made:  # the pipeline's own method normalises as well
            ours = {name: read_latents(block, "mean", {one: tensor.clone() for one, tensor in value.made.items()})}
            theirs = {name: made["final"]}
        else:
            ours, theirs = {block.stored: value.made[block.stored]}, made
        for tensor, mine in ours.items():
            label = name if tensor == name else f"{name}: {tensor}"
            findings.add(label, value.sample, mine, theirs[tensor].cpu().to(mine.dtype), LATENTS)


def _compare_shown(
    encoder: "VisionEncoder", values: Sequence[_Value], request: PrecomputeRequest, pipeline: "Pipeline", findings: _Findings
) -> None:
    from cachestore.encode.plain import shown_to

    make = shown_to(encoder, pipeline, request.device)
    for value in values:
        made = make(value.item.frames())
        for name, mine in value.made.items():
            findings.add(name, value.sample, mine, made[name].cpu().to(mine.dtype), "text")


def _compare_pixels(encoder: "LatentsEncoder", values: Sequence[_Value], findings: _Findings) -> None:
    """Compare pixels with those of diffusers' `load_image`, resized by Pillow. Clips are left to scripts/conformance/videos.py."""
    from cachestore.encode.pictures.images import is_decorated
    from cachestore.encode.pictures.shots import Still

    if encoder.recipe.encoder != LATENTS:
        return
    name = {"pillow": "lanczos"}.get(encoder.setup.resample, encoder.setup.resample)
    for value in values:
        if not isinstance(value.item, Still):
            findings.not_compared["pixels of videos: docs/numerics.md compares them with what FFmpeg decodes"] = None
        elif name == "area":
            findings.not_compared[f"pixels: {option('resample', 'area')} is OpenCV's own filter, which diffusers does not use"] = None
        elif is_decorated(value.item.data):
            why = "pixels of pictures with a profile or transparency: diffusers takes neither into account"
            findings.not_compared[why] = None
        else:
            theirs = _plain_pixels(value.item, name)
            findings.add(PIXELS, value.sample, value.payload.astype(np.float32), theirs.astype(np.float32), PIXELS)


def _plain_pixels(shot: "Still", name: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    from importlib import import_module

    from PIL import Image, ImageOps

    load_image: Any = import_module("diffusers.utils").load_image
    picture: Image.Image = load_image(Image.open(BytesIO(shot.data)))
    variant = shot.variant
    picture = picture if variant.within is None else picture.crop(variant.within)
    picture = picture.resize(variant.box.resized, Image.Resampling[name.upper()]).crop(variant.box.crop)
    return np.array(ImageOps.mirror(picture) if variant.is_flipped else picture)


def _unlike_trainer(wanted: Planned) -> Iterator[Mapping[str, Json]]:
    """Yield what the trainer of `--buckets`, and cachestore without that option, do to the size and the pixels of each picture and clip."""
    from cachestore.encode.pictures.latents import LatentsEncoder

    for number, encoder in enumerate(wanted.encoders):
        if not isinstance(encoder, LatentsEncoder) or encoder.recipe.encoder != LATENTS:
            continue
        plain = encoder.resampled(DEFAULT)
        for index in wanted.plan.units_of(number):
            request, reader = wanted.plan.unit(index).request, UnitReader(wanted.files)
            try:
                theirs = encoder.resolve(request, reader)
                unchosen = {name: value for name, value in request.items() if name not in _CHOSEN}
                ours = plain.resolve({**unchosen, **_UNCHOSEN}, reader)
                far = _levels_apart(theirs.item.pixels(), ours.item.pixels())
            except (EncodeFailed, OSError):  # it is among the failures
                continue
            fits: list[Json] = [{name: list(one.facts[name]) for name in ("bucket", "resized")} for one in (theirs, ours)]
            for sample in samples_of(wanted.plan, [index]).get(index, ()):
                size = list(theirs.facts["size"])
                yield {"sample": sample, "size": size, "trainer": fits[0], "cachestore": fits[1], "levels": far}


def _levels_apart(one: "Pixels", other: "Pixels") -> float | None:
    """The mean difference of pixels, in levels of 255; None if their shapes differ."""
    if one.shape != other.shape:
        return None
    return round(float(np.abs(one.astype(np.int16) - other).mean()), 3)
