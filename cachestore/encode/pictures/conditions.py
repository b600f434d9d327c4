"""The table of conditions: what a model is trained with beside text and latents, and is made from further roles. Imports no torch.

A row says by a pipeline's class which conditions it takes, under the names of its pipeline, and of which of the `kinds` each is. The same
row says what is missing where the samples do not bring its role.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cachestore.core.keys import Json
from cachestore.core.samples import CONTROL, FIRST_FRAME, LAST_FRAME, MASK, REFERENCE, VIDEO
from cachestore.encode.pictures.kinds import Embedded, EndFrames, Filled, First, Guided, Kind, Masked

DENOISERS: Final = ("transformer", "unet")
"""The names of a denoiser among a pipeline's components. Only its config.json is read."""
VAE: Final = "vae"
AUDIO: Final = "audio latents, unless it is trained on pictures alone"


@dataclass(frozen=True, slots=True)
class Condition:
    """One input of a denoiser."""

    name: str
    """Its name in a batch, which is diffusers' own, and the name of its encoder."""
    role: str
    """The role of its column: the image that is encoded, or that decides what of the picture is."""
    kind: Kind
    words: str
    """What it is, for messages."""
    wants: tuple[str, ...] = ()
    """The roles of which a sample needs at least one, if that is not `role` itself."""


@dataclass(frozen=True, slots=True)
class PipelineOutline:
    """What configurations say of a pipeline."""

    class_name: str
    parts: Mapping[str, str]
    denoiser: Mapping[str, Json]
    """The denoiser's configuration; empty if it is not known."""
    channels: int | None
    """The channels of latents; None if they are not known."""

    @property
    def more_channels(self) -> int | None:
        """How many channels the denoiser takes beside those of latents; None if that is not known."""
        takes = self.denoiser.get("in_channels")
        return takes - self.channels if isinstance(takes, int) and self.channels else None


@dataclass(frozen=True, slots=True)
class ConditionRow:
    """The conditions of a pipeline."""

    plain: str
    """The pipeline whose text and latents it takes."""
    find: Callable[[PipelineOutline], tuple[Condition, ...]]
    lacks: tuple[str, ...] = ()
    """What training needs besides, and is not made here."""


def _masked(outline: PipelineOutline) -> tuple[Condition, ...]:
    """Latents of the masked picture, if the denoiser takes them and one channel for the mask."""
    is_known = outline.more_channels is not None
    if outline.more_channels != (outline.channels or 0) + 1 and (is_known or "Inpaint" not in outline.class_name):
        return ()
    return (Condition("masked_image_latents", MASK, Masked(), "latents of the masked picture, and its mask as the denoiser takes it"),)


def _filled(outline: PipelineOutline) -> tuple[Condition, ...]:
    """FLUX Fill: latents of the masked picture and all pixels of the mask, which its pipeline folds like the latents."""
    channels = outline.channels or 0
    if outline.more_channels != 23 * channels and (outline.class_name != "FluxFillPipeline" or outline.more_channels == 3 * channels):
        return ()
    return (Condition("masked_image_latents", MASK, Filled(), "latents of the masked picture, with its mask"),)


def _wan_ends(outline: PipelineOutline) -> tuple[Condition, ...]:
    """Wan 2.1 and 2.2: the first frame; with positions for two pictures (FLF2V) also the last."""
    if outline.more_channels == 0:  # Wan 2.2 TI2V-5B
        return _nothing_more(outline)
    has_last = outline.denoiser.get("pos_embed_seq_len") is not None
    roles = (FIRST_FRAME, LAST_FRAME) if has_last else (FIRST_FRAME,)
    frames = "the first and the last frame's" if has_last else "the first frame's"
    latents = Condition("condition", FIRST_FRAME, EndFrames(roles), f"{frames} latents")
    if "image_encoder" not in outline.parts or outline.denoiser.get("image_dim", 0) is None:
        return (latents,)
    shown = f"image embeddings (image_encoder, {outline.parts['image_encoder']})"
    return (latents, Condition("image_embeds", FIRST_FRAME, Embedded(roles, layer=-2), shown))


def _wan_vace(outline: PipelineOutline) -> tuple[Condition, ...]:
    del outline
    words = "latents of the control video, with its mask"
    return (Condition("conditioning_latents", VIDEO, Guided(), words, wants=(CONTROL, MASK, REFERENCE)),)


def _hunyuan_first(outline: PipelineOutline) -> tuple[Condition, ...]:
    """HunyuanVideo: the first frame's latents; in 1.5 also what a vision encoder makes of it."""
    latents = Condition("image_latents", FIRST_FRAME, First(), "the first frame's latents")
    if "image_encoder" not in outline.parts:  # its text encoder sees the frame
        return (latents,)
    shown = f"image embeddings (image_encoder, {outline.parts['image_encoder']})"
    return (latents, Condition("image_embeds", FIRST_FRAME, Embedded(parts=("image_encoder", "feature_extractor")), shown))


def _nothing_more(outline: PipelineOutline) -> tuple[Condition, ...]:
    """Nothing: the denoiser takes the first frame in place of the clip's own first latent frame, which a causal VAE makes of it alone."""
    del outline
    return ()


ROWS: Final[Mapping[str, ConditionRow]] = {
    "StableDiffusionPipeline": ConditionRow("StableDiffusionPipeline", _masked),
    "StableDiffusionInpaintPipeline": ConditionRow("StableDiffusionPipeline", _masked),
    "StableDiffusionXLPipeline": ConditionRow("StableDiffusionXLPipeline", _masked),
    "StableDiffusionXLInpaintPipeline": ConditionRow("StableDiffusionXLPipeline", _masked),
    "FluxPipeline": ConditionRow("FluxPipeline", _filled),
    "FluxFillPipeline": ConditionRow("FluxFillPipeline", _filled),
    "WanImageToVideoPipeline": ConditionRow("WanPipeline", _wan_ends),
    "WanVACEPipeline": ConditionRow("WanPipeline", _wan_vace),
    "LTXImageToVideoPipeline": ConditionRow("LTXPipeline", _nothing_more),
    "LTX2ImageToVideoPipeline": ConditionRow("LTX2Pipeline", _nothing_more, (AUDIO,)),
    "HunyuanVideo15ImageToVideoPipeline": ConditionRow("HunyuanVideo15Pipeline", _hunyuan_first),
    "HunyuanVideoImageToVideoPipeline": ConditionRow("HunyuanVideoImageToVideoPipeline", _hunyuan_first),
}


def plain_class(class_name: str) -> str:
    """Return the pipeline whose text and latents this one takes; itself if there is no row."""
    return ROWS[class_name].plain if class_name in ROWS else class_name


def conditions_of(outline: PipelineOutline) -> tuple[Condition, ...]:
    """Return the conditions that are made for a pipeline."""
    return ROWS[outline.class_name].find(outline) if outline.class_name in ROWS else ()


def outline_of(class_name: str, parts: Mapping[str, str], configs: Mapping[str, Mapping[str, Json]]) -> PipelineOutline:
    """Return what configurations say of a pipeline. `configs` has those of its denoiser and VAE that are known."""
    denoiser: Mapping[str, Json] = next((configs[name] for name in DENOISERS if name in configs), {})
    vae = configs.get(VAE, {})
    channels = vae.get("latent_channels", vae.get("z_dim"))
    return PipelineOutline(class_name, parts, denoiser, channels if isinstance(channels, int) and channels > 0 else None)
