"""The families of models as trainers cache them, and what caches do not say: the VAE's constants and the state of latents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Latents, Raw, Scale, reshaped, without_batch
from cachestore.core.words import did_you_mean


@dataclass(frozen=True, slots=True)
class State:
    """How a trainer stores a family's latents."""

    is_scaled: bool
    kind: Literal["sample", "mean"] = "sample"


SCALED: Final = State(is_scaled=True)
RAW: Final = State(is_scaled=False)
MEAN: Final = State(is_scaled=True, kind="mean")
RAW_MEAN: Final = State(is_scaled=False, kind="mean")


class Width(NamedTuple):
    """The width of one text encoder's output."""

    rows: int
    pooled: int = 0


_CLIP_L, _BIG_G, _T5 = Width(768, 768), Width(1280, 1280), Width(4096)


@dataclass(frozen=True, slots=True)
class Family:
    """One family as other trainers cache it."""

    name: str
    pipeline: str
    """The diffusers pipeline that encodes its text. `encode/families/lookup` knows by this name how to read it."""
    channels: int
    scale: Scale
    """The VAE's constants; empty if only the model's own configuration has them."""
    vae_class: str = "AutoencoderKL"
    vae_config: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Fields of the released VAE's configuration that are not those of its class by default."""
    has_frames: bool = False
    widths: Mapping[str, Width] = field(default_factory=dict[str, Width])
    """By text encoder, of the released model. The cache of a model with other widths has those."""


FAMILIES: Final = (
    Family("sd15", "StableDiffusionPipeline", 4, Scale(0.18215), widths={"text_encoder": Width(768)}),
    Family("sdxl", "StableDiffusionXLPipeline", 4, Scale(0.13025), widths={"text_encoder": _CLIP_L, "text_encoder_2": _BIG_G}),
    Family(
        "sd3",
        "StableDiffusion3Pipeline",
        16,
        Scale(1.5305, 0.0609),
        widths={"text_encoder": _CLIP_L, "text_encoder_2": _BIG_G, "text_encoder_3": _T5},
    ),
    Family("flux", "FluxPipeline", 16, Scale(0.3611, 0.1159), widths={"text_encoder": _CLIP_L, "text_encoder_2": _T5}),
    Family("wan", "WanPipeline", 16, Scale(), "AutoencoderKLWan", has_frames=True),
    Family("qwen-image", "QwenImagePipeline", 16, Scale(), "AutoencoderKLQwenImage", has_frames=True),
    Family("z-image", "ZImagePipeline", 16, Scale(0.3611, 0.1159)),
    Family("flux2", "Flux2Pipeline", 32, Scale(), "AutoencoderKLFlux2"),
    Family("flux2-klein-4b", "Flux2KleinPipeline", 32, Scale(), "AutoencoderKLFlux2"),
    Family("flux2-klein-9b", "Flux2KleinPipeline", 32, Scale(), "AutoencoderKLFlux2"),
    Family("hunyuanvideo", "HunyuanVideoPipeline", 16, Scale(0.476986), "AutoencoderKLHunyuanVideo", has_frames=True),
    Family("hunyuanvideo15", "HunyuanVideo15Pipeline", 32, Scale(1.03682), "AutoencoderKLHunyuanVideo15", has_frames=True),
    Family(
        "ltx2",
        "LTX2Pipeline",
        128,
        Scale(),
        "AutoencoderKLLTX2Video",
        {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        has_frames=True,
    ),
)

_BY_NAME: Final = {family.name: family for family in FAMILIES}


def family_named(name: str) -> Family:
    """Return a family by its name. Raises BadInput that lists the known ones."""
    if name not in _BY_NAME:
        raise BadInput(
            f"caches of the family {name!r} are not known; known are {', '.join(_BY_NAME)}{did_you_mean(name, _BY_NAME)}", option="family"
        )
    return _BY_NAME[name]


def families_of_pipeline(pipeline: str) -> list[Family]:
    """Return the families of a diffusers pipeline: two for FLUX.2 klein, which has two sizes. FLUX.1 Kontext is cached like FLUX.1."""
    wanted = "FluxPipeline" if pipeline == "FluxKontextPipeline" else pipeline
    return [family for family in FAMILIES if family.pipeline == wanted]


@dataclass(frozen=True, slots=True)
class Cached:
    """How a trainer caches a family."""

    names: tuple[str, ...]
    """Its names in the trainer's files: the first one is written, all are read."""
    state: State = SCALED
    has_text: bool = True
    """Whether the trainer's text of this family can be read and written."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer's name, and how it caches each family."""

    name: str
    cached: Mapping[str, Cached]
    """By name of the family."""

    def families(self) -> Sequence[Family]:
        """Return the families that it caches."""
        return [family for family in FAMILIES if family.name in self.cached]

    def families_with_text(self) -> Sequence[Family]:
        """Return the families whose text can be read and written."""
        return [family for family in self.families() if self.cached[family.name].has_text]

    def has_text(self, family: Family) -> bool:
        """Whether its text of this family can be read and written."""
        return family.name in self.cached and self.cached[family.name].has_text

    def families_called(self, name: str) -> Sequence[Family]:
        """Return the families that it writes under this name."""
        return [family for family in self.families() if name in self.cached[family.name].names]

    def family_called(self, name: str, wanted: Family | None = None) -> Family | None:
        """Return the family that it writes under this name: `wanted`, if it is one of several; None for an unknown name."""
        those = self.families_called(name)
        return wanted if wanted in those else next(iter(those), None)

    def written_as(self, family: Family) -> str:
        """Return a family's name in the trainer's files. Raises BadInput if it has none."""
        if family.name not in self.cached:
            known = ", ".join(one.name for one in self.families())
            raise BadInput(f"caches of {family.name} are not known for {self.name}; known are {known}", option="family")
        return self.cached[family.name].names[0]

    def stored_latents(self, family: Family, tensor: Raw, others: Mapping[str, Raw], facts: Mapping[str, Json]) -> Latents:
        """Return latents in the state in which the trainer stores them, with the tensors stored beside them."""
        state = self.cached[family.name].state
        return Latents(tensor, state.is_scaled, state.kind, others, facts)

    def marked(self, tensors: Mapping[str, Raw]) -> dict[str, Raw]:
        """Return the tensors that the trainer stores beside a value, under the names that they have in an entry."""
        return {f"{self.name}.{name}": raw for name, raw in tensors.items()}

    def own_of(self, others: Mapping[str, Raw]) -> dict[str, Raw]:
        """Return the tensors that this trainer stored beside a value, under its own names: the inverse of `marked`."""
        return {name.removeprefix(f"{self.name}."): raw for name, raw in others.items() if name.startswith(f"{self.name}.")}


def unframed(raw: Raw) -> Raw:
    """Return latents as `[C, h, w]`, without an axis of one frame and a batch axis of 1. Raises EncodeFailed for another shape."""
    return reshaped(raw, (raw[1][0], *raw[1][2:])) if len(raw[1]) == 4 and raw[1][1] == 1 else without_batch("latents", raw, 3)


def framed(family: Family, raw: Raw) -> Raw:
    """Return latents as a data set has them: `[C, F, h, w]` of a video model, where one frame may come without an axis, else `[C, h, w]`.

    Raises EncodeFailed for another shape.
    """
    if not family.has_frames:
        return without_batch("latents", raw, 3)
    return reshaped(raw, (raw[1][0], 1, *raw[1][1:])) if len(raw[1]) == 3 else without_batch("latents", raw, 4)


def as_picture(family: Family, raw: Raw) -> Raw:
    """Return latents as most trainers cache them: those of a picture without an axis of frames, unless Wan made them."""
    return unframed(raw) if family.name == "qwen-image" and raw[1][1:2] == (1,) else raw
