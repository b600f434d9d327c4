"""What the training of a model needs beside what is made of it here. A table and its look-up; reads configurations alone, no torch.

The pipeline's class decides, together with the number of channels that its denoiser takes: weights for inpainting are saved under the plain
class too, and plain weights under the class for inpainting. Components that nothing here encodes with are named as well.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachestore.core.keys import Json
from cachestore.core.samples import CONTROL
from cachestore.encode.text_families import TEXT_FAMILIES

DENOISERS: Final = ("transformer", "unet")
"""What a pipeline calls its denoiser, of which config.json alone is read."""
VAE: Final = "vae"
NOT_MADE: Final = "not made here:"
"""Begins the line that says what is missing."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a model is trained with, and that is not made here."""

    words: str
    role: str | None = None
    """The role of pictures that makes it where samples have one: nothing is missing then."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What the pipelines of some classes are trained with."""

    name: str
    """A regular expression that is searched in the class name."""
    needs: tuple[Need, ...]
    is_told_by_channels: bool = False
    """Whether nothing is needed if the denoiser takes the channels of latents alone."""


_FIRST_FRAME = Need("the first frame's latents")
_FRAMES = Need("latents of the frames from which the video continues")
_MASKED = Need("latents of the masked picture, and its mask as the denoiser takes it")
_CONTROL = Need("latents of the control picture (no sample has one in the column `control`, or latents are not encoded)", CONTROL)
_CONTROL_VIDEO = Need("latents of the control video")

_ROWS: Final = (
    _Row(r"^WanVACE", (Need("latents of the control video with its masks"), Need("latents of the reference pictures"))),
    _Row(r"^WanAnimate", (Need("latents of the reference picture, of the pose video and of its masks"), Need("the face video's pixels"))),
    _Row(r"^LTX2Condition|^LTXCondition|VideoToWorld|^Cosmos2_5_Predict", (_FRAMES,)),
    _Row(r"^LTX2(InContext|HDR)", (Need("latents of the reference video"),)),
    _Row(r"^CogVideoXFunControl|^EasyAnimateControl", (_CONTROL_VIDEO,)),
    _Row(r"^LucyEdit", (Need("latents of the video that is edited"),)),
    _Row(r"ImageToVideo|Image2Video|I2V|^PIA|^StableVideoDiffusion|^ChronoEdit|Framepack|SanaWM", (_FIRST_FRAME,)),
    _Row(r"Upscale|SuperResolution|ImageRefiner", (Need("the small picture that is scaled up"),)),
    _Row(r"Depth2Img", (Need("depth maps"),), is_told_by_channels=True),
    _Row(r"InstructPix2Pix|(Flux|CogView4)Control(?!Net)", (_CONTROL,), is_told_by_channels=True),
    _Row(r"^(JoyImageEdit|BriaFiboEdit|LongCatImageEdit)", (_CONTROL,)),
    _Row(r"^QwenImageLayered", (Need("latents of each picture's layers"),)),
    _Row(r"^FluxFill|Inpaint", (_MASKED,), is_told_by_channels=True),
    _Row(r"GLIGEN", (Need("boxes and phrases"),)),
    _Row(r"Audio|^AceStep|^MusicLDM", (Need("audio latents"),)),
)
"""The first row that fits a class name counts."""

_BY_CHANNELS: Final[Mapping[tuple[int, int], tuple[Need, ...]]] = {
    (1, 0): (),
    (4, 0): (),  # FLUX and others fold 2 x 2 of latents
    (2, 1): (_MASKED,),
    (24, 0): (_MASKED,),  # FLUX Fill: latents, those of the masked picture, and 8 x 8 pixels of the mask, all folded
    (2, 0): (_CONTROL,),
    (8, 0): (_CONTROL,),
    (2, 4): (_FIRST_FRAME,),
}
"""By (factor, more): what a denoiser that takes `factor * C + more` channels is given beside latents of C channels."""
_FILLED_WITH_ZEROS: Final = frozenset({"HunyuanVideo15Pipeline", "MotifVideoPipeline"})
"""Pipelines that take further channels and, from text alone, fill them with zeros."""

_PARTS: Final[Mapping[str, str]] = {
    r"image_encoder|siglip": "image embeddings",
    r"audio_vae": "audio latents",
    r"connectors": "the text after its connectors",
    r"controlnet.*|adapter": "the control pictures",
    r"movq|vqgan": "latents",
    r".*(encoder|embedder|vae)(_\d+)?": "the output of another encoder",
}
"""By an expression for a component's whole name, what it makes for training. The first that fits counts."""
_MADE = re.compile(r"text_encoder(_\d+)?|vae")


def needs_of(class_name: str, parts: Mapping[str, str], configs: Mapping[str, Mapping[str, Json]]) -> tuple[Need, ...]:
    """What a pipeline is trained with that is not made here; nothing for a plain one.

    `parts` are the classes of its components by name, those that it lacks left out; `configs` the configurations, as far as known, of its
    denoiser and VAE.
    """
    by_channels = _by_channels(class_name, configs)
    row = next((row for row in _ROWS if re.search(row.name, class_name)), None)
    is_plain = row is None or (row.is_told_by_channels and by_channels == ())
    found = by_channels or () if row is None or is_plain else row.needs
    if class_name in TEXT_FAMILIES:  # an adapter's image encoder is no part of the model
        return found
    return tuple(dict.fromkeys((*found, *_by_parts(parts))))


def _by_parts(parts: Mapping[str, str]) -> Sequence[Need]:
    first = {name: next((words for part, words in _PARTS.items() if re.fullmatch(part, name)), None) for name in parts}
    return [Need(f"{words} ({name}, {parts[name]})") for name, words in first.items() if words and not _MADE.fullmatch(name)]


def _by_channels(class_name: str, configs: Mapping[str, Mapping[str, Json]]) -> tuple[Need, ...] | None:
    """None where the channels are not known."""
    takes = next((configs[name].get("in_channels") for name in DENOISERS if name in configs), None)
    vae = configs.get(VAE, {})
    latents = vae.get("latent_channels", vae.get("z_dim"))
    if not isinstance(takes, int) or not isinstance(latents, int) or latents < 1:
        return None
    if takes <= latents or class_name in _FILLED_WITH_ZEROS:
        return ()
    other = (Need(f"the input for the other channels of its denoiser (it takes {takes}, latents have {latents})"),)
    return next((needs for (factor, more), needs in _BY_CHANNELS.items() if takes == factor * latents + more), other)


def in_words(needs: Sequence[str]) -> str:
    """The line that says what is not made, for at least one need."""
    return f"{NOT_MADE} {'; '.join(needs)}. Training this model needs that too, so the store alone is not enough"
