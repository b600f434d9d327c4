"""How trainers name the families of `encode/families`, and what caches do not say: the VAE's constants and the state of latents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Latents, Raw, Scale, reshaped, without_batch
from cachestore.core.words import did_you_mean

SD_SCRIPTS: Final = "sd-scripts"
SIMPLETUNER: Final = "simpletuner"
MUSUBI: Final = "musubi"
AI_TOOLKIT: Final = "ai-toolkit"
DIFFUSION_PIPE: Final = "diffusion-pipe"
LTX: Final = "ltx"
NEMO: Final = "nemo-automodel"

Kind = Literal["sample", "mean"]


@dataclass(frozen=True, slots=True)
class State:
    """How a trainer stores a family's latents."""

    is_scaled: bool
    kind: Kind = "sample"


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
    """The diffusers pipeline that encodes its text. `encode/families` knows by this name how to read it."""
    channels: int
    scale: Scale
    """The VAE's constants; empty if only the model's own configuration has them."""
    names: Mapping[str, tuple[str, ...]]
    """By trainer: the first name is written, all are read."""
    states: Mapping[str, State]
    vae_class: str = "AutoencoderKL"
    vae_config: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Fields of the released VAE's configuration that are not those of its class by default."""
    has_frames: bool = False
    text: frozenset[str] = field(default_factory=frozenset[str])
    """The trainers whose text of this family can be read."""
    widths: Mapping[str, Width] = field(default_factory=dict[str, Width])
    """By text encoder, of the released model. The cache of a model with other widths has those."""

    def written_as(self, trainer: str) -> str:
        """Return the family's name in a trainer's files. Raises BadInput if it has none."""
        if trainer not in self.names:
            known = ", ".join(family.name for family in FAMILIES if trainer in family.names)
            raise BadInput(f"caches of {self.name} are not known for {trainer}; known are {known}")
        return self.names[trainer][0]

    def latents(self, trainer: str, tensor: Raw, others: Mapping[str, Raw], facts: Mapping[str, Json]) -> Latents:
        """Return latents in the state in which a trainer stores them, with the tensors stored beside them."""
        state = self.states[trainer]
        return Latents(tensor, state.is_scaled, state.kind, others, facts)


_SCALED, _RAW, _MEAN = State(is_scaled=True), State(is_scaled=False), State(is_scaled=True, kind="mean")
_ALL: Final = frozenset({SD_SCRIPTS, SIMPLETUNER, AI_TOOLKIT})

FAMILIES: Final = (
    Family(
        name="sd15",
        pipeline="StableDiffusionPipeline",
        channels=4,
        scale=Scale(0.18215),
        names={SD_SCRIPTS: ("sd",), SIMPLETUNER: ("sd1x",), AI_TOOLKIT: ("sd1",)},
        states={SD_SCRIPTS: _RAW, SIMPLETUNER: _SCALED, AI_TOOLKIT: _SCALED},
        text=frozenset({SIMPLETUNER, AI_TOOLKIT}),
        widths={"text_encoder": Width(768)},
    ),
    Family(
        name="sdxl",
        pipeline="StableDiffusionXLPipeline",
        channels=4,
        scale=Scale(0.13025),
        names={SD_SCRIPTS: ("sdxl",), SIMPLETUNER: ("sdxl",), AI_TOOLKIT: ("sdxl",), DIFFUSION_PIPE: ("sdxl",)},
        states={SD_SCRIPTS: _RAW, SIMPLETUNER: _SCALED, AI_TOOLKIT: _SCALED, DIFFUSION_PIPE: _SCALED},
        text=_ALL,
        widths={"text_encoder": _CLIP_L, "text_encoder_2": _BIG_G},
    ),
    Family(
        name="sd3",
        pipeline="StableDiffusion3Pipeline",
        channels=16,
        scale=Scale(1.5305, 0.0609),
        names={SD_SCRIPTS: ("sd3",), SIMPLETUNER: ("sd3",), AI_TOOLKIT: ("sd3",)},
        states={SD_SCRIPTS: _RAW, SIMPLETUNER: _SCALED, AI_TOOLKIT: _SCALED},
        text=_ALL,
        widths={"text_encoder": _CLIP_L, "text_encoder_2": _BIG_G, "text_encoder_3": _T5},
    ),
    Family(
        name="flux",
        pipeline="FluxPipeline",
        channels=16,
        scale=Scale(0.3611, 0.1159),
        names={
            SD_SCRIPTS: ("flux",),
            SIMPLETUNER: ("flux",),
            MUSUBI: ("fk", "flux_kontext"),
            AI_TOOLKIT: ("flux1", "flux"),
            DIFFUSION_PIPE: ("flux",),
            NEMO: ("flux",),
        },
        states=dict.fromkeys((SD_SCRIPTS, SIMPLETUNER, MUSUBI, AI_TOOLKIT, DIFFUSION_PIPE, NEMO), _SCALED),
        text=_ALL | {MUSUBI, DIFFUSION_PIPE, NEMO},
        widths={"text_encoder": _CLIP_L, "text_encoder_2": _T5},
    ),
    Family(
        name="wan",
        pipeline="WanPipeline",
        vae_class="AutoencoderKLWan",
        channels=16,
        scale=Scale(),
        names={
            MUSUBI: ("wan", "wan"),
            SIMPLETUNER: ("wan",),
            AI_TOOLKIT: ("wan21", "wan21_i2v", "wan22_14b", "wan22_14b_i2v"),
            DIFFUSION_PIPE: ("wan", "wan_i2v", "wan_flf2v", "wan2.2_i2v", "wan2.2_5b", "skyreels_v2", "skyreels_v2_i2v"),
            NEMO: ("wan",),
        },
        states={**dict.fromkeys((MUSUBI, SIMPLETUNER, DIFFUSION_PIPE, NEMO), _MEAN), AI_TOOLKIT: _SCALED},
        has_frames=True,
        text=frozenset({MUSUBI, SIMPLETUNER, AI_TOOLKIT, DIFFUSION_PIPE, NEMO}),
    ),
    Family(
        name="qwen-image",
        pipeline="QwenImagePipeline",
        vae_class="AutoencoderKLQwenImage",
        channels=16,
        scale=Scale(),
        names={MUSUBI: ("qi", "qwen_image"), SIMPLETUNER: ("qwen_image",), AI_TOOLKIT: ("qwen_image",), NEMO: ("qwen_image",)},
        states=dict.fromkeys((MUSUBI, SIMPLETUNER, AI_TOOLKIT, NEMO), _SCALED),
        has_frames=True,
        text=frozenset({MUSUBI, SIMPLETUNER, AI_TOOLKIT, NEMO}),
    ),
    Family(
        name="z-image",
        pipeline="ZImagePipeline",
        channels=16,
        scale=Scale(0.3611, 0.1159),
        names={MUSUBI: ("zi", "z_image"), SIMPLETUNER: ("z_image",), AI_TOOLKIT: ("zimage",)},
        states={MUSUBI: State(is_scaled=False, kind="mean"), SIMPLETUNER: _SCALED, AI_TOOLKIT: _SCALED},
        text=frozenset({MUSUBI, AI_TOOLKIT}),
    ),
    Family(
        name="flux2",
        pipeline="Flux2Pipeline",
        vae_class="AutoencoderKLFlux2",
        channels=32,
        scale=Scale(),
        names={MUSUBI: ("f2d", "flux_2_dev"), SIMPLETUNER: ("flux2",), NEMO: ("flux2",)},
        states=dict.fromkeys((MUSUBI, SIMPLETUNER, NEMO), _MEAN),
        text=frozenset({MUSUBI, SIMPLETUNER, NEMO}),
    ),
    *(
        Family(
            name=f"flux2-klein-{size}",
            pipeline="Flux2KleinPipeline",
            vae_class="AutoencoderKLFlux2",
            channels=32,
            scale=Scale(),
            names={MUSUBI: (f"f2k{size}", f"flux_2_klein_{size}"), SIMPLETUNER: ("flux2",)},
            states=dict.fromkeys((MUSUBI, SIMPLETUNER), _MEAN),
            text=frozenset({MUSUBI, SIMPLETUNER}),
        )
        for size in ("4b", "9b")
    ),
    Family(
        name="hunyuanvideo",
        pipeline="HunyuanVideoPipeline",
        vae_class="AutoencoderKLHunyuanVideo",
        channels=16,
        scale=Scale(0.476986),
        names={MUSUBI: ("hv", "hunyuan_video")},
        states={MUSUBI: _RAW},
        has_frames=True,
        text=frozenset({MUSUBI}),
    ),
    Family(
        name="hunyuanvideo15",
        pipeline="HunyuanVideo15Pipeline",
        vae_class="AutoencoderKLHunyuanVideo15",
        channels=32,
        scale=Scale(1.03682),
        names={MUSUBI: ("hv15", "hunyuan_video_1_5")},
        states={MUSUBI: State(is_scaled=False, kind="mean")},
        has_frames=True,
    ),
    Family(
        name="ltx2",
        pipeline="LTX2Pipeline",
        vae_class="AutoencoderKLLTX2Video",
        vae_config={"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
        channels=128,
        scale=Scale(),
        names={LTX: ("ltx2",)},
        states={LTX: _MEAN},
        has_frames=True,
        text=frozenset({LTX}),
    ),
)

_BY_NAME: Final = {family.name: family for family in FAMILIES}


def family_named(name: str) -> Family:
    """Return a family by its name. Raises BadInput that lists the known ones."""
    if name not in _BY_NAME:
        raise BadInput(f"caches of the family {name!r} are not known; known are {', '.join(_BY_NAME)}{did_you_mean(name, _BY_NAME)}")
    return _BY_NAME[name]


def family_of(trainer: str, name: str, wanted: Family | None = None) -> Family | None:
    """Return the family that a trainer writes under this name: `wanted`, if it is one of several; None for an unknown name."""
    those = families_called(trainer, name)
    return wanted if wanted in those else next(iter(those), None)


def families_called(trainer: str, name: str) -> list[Family]:
    """Return the families that a trainer writes under this name."""
    return [family for family in FAMILIES if name in family.names.get(trainer, ())]


def families_of_pipeline(pipeline: str) -> list[Family]:
    """Return the families of a diffusers pipeline: two for FLUX.2 klein, which has two sizes. FLUX.1 Kontext is cached like FLUX.1."""
    wanted = "FluxPipeline" if pipeline == "FluxKontextPipeline" else pipeline
    return [family for family in FAMILIES if family.pipeline == wanted]


def marked(trainer: str, tensors: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return the tensors that a trainer stores beside a value, under the names that they have in an entry."""
    return {f"{trainer}.{name}": raw for name, raw in tensors.items()}


def own_of(trainer: str, others: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return the tensors that this trainer stored beside a value, under its own names."""
    return {name.removeprefix(f"{trainer}."): raw for name, raw in others.items() if name.startswith(f"{trainer}.")}


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
    """Return latents as trainers other than musubi-tuner cache them: those of a picture without an axis of frames, unless Wan made them."""
    return unframed(raw) if family.name == "qwen-image" and raw[1][1:2] == (1,) else raw
