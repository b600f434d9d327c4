"""Find out what else training a model needs that cachestore does not make. Reads configurations alone and does not import torch.

This depends on the pipeline's class and on the number of channels that its denoiser takes, as inpainting weights are also saved under the
plain class, and plain weights under the inpainting class. Components that are not used for encoding here are named as well.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachestore.core.keys import Json
from cachestore.core.samples import CONTROL, role_of
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.pictures.conditions import AUDIO, ROWS, Condition, PipelineOutline, conditions_of, outline_of


@dataclass(frozen=True, slots=True)
class Need:
    """Something that training a model needs and that is not made here."""

    words: str
    role: str | None = None
    """If samples have images of this role, it is made from them, and nothing is missing."""
    wants: tuple[str, ...] = ()
    """The roles of which a sample needs at least one, if that is not `role` itself."""
    what: str = ""
    """What is missing where some samples have such images and others do not."""


@dataclass(frozen=True, slots=True)
class _Input:
    name: str
    """A regular expression that is searched in the class name."""
    needs: tuple[Need, ...]
    depends_on_channels: bool = False
    """Whether nothing is needed if the denoiser's input channels are those of latents alone."""


_FIRST_FRAME = Need("the first frame's latents")
_FRAMES = Need("latents of the frames from which the video continues")
_MASKED = Need("latents of the masked picture, and its mask as the denoiser takes it")
_CONTROL_WORDS = "latents of the control picture"
_CONTROL = Need(f"{_CONTROL_WORDS} (no sample has one in the column `control`, or latents are not encoded)", CONTROL, what=_CONTROL_WORDS)
_CONTROL_VIDEO = Need("latents of the control video")
_ROWS: Final = (
    _Input(r"^WanAnimate", (Need("latents of the reference picture, of the pose video and of its masks"), Need("the face video's pixels"))),
    _Input(r"^LTX2Condition|^LTXCondition|VideoToWorld|^Cosmos2_5_Predict", (_FRAMES,)),
    _Input(r"^LTX2(InContext|HDR)", (Need("latents of the reference video"),)),
    _Input(r"^LTX2Pipeline$", (Need(AUDIO),)),
    _Input(r"^CogVideoXFunControl|^EasyAnimateControl", (_CONTROL_VIDEO,)),
    _Input(r"^LucyEdit", (Need("latents of the video that is edited"),)),
    _Input(r"ImageToVideo|Image2Video|I2V|^PIA|^StableVideoDiffusion|^ChronoEdit|Framepack|SanaWM", (_FIRST_FRAME,)),
    _Input(r"Upscale|SuperResolution|ImageRefiner", (Need("the small picture that is scaled up"),)),
    _Input(r"Depth2Img", (Need("depth maps"),), depends_on_channels=True),
    _Input(r"InstructPix2Pix|(Flux|CogView4)Control(?!Net)", (_CONTROL,), depends_on_channels=True),
    _Input(r"^(FluxKontext|QwenImageEdit|JoyImageEdit|BriaFiboEdit|LongCatImageEdit)", (_CONTROL,)),
    _Input(r"^QwenImageLayered", (Need("latents of each picture's layers"),)),
    _Input(r"^FluxFill|Inpaint", (_MASKED,), depends_on_channels=True),
    _Input(r"GLIGEN", (Need("boxes and phrases"),)),
    _Input(r"Audio|^AceStep|^MusicLDM", (Need("audio latents"),)),
)
"""The first row that matches a class name counts."""
_BY_CHANNELS: Final[Mapping[tuple[int, int], tuple[Need, ...]]] = {
    (1, 0): (),
    (4, 0): (),  # FLUX and others fold 2 x 2 latent pixels
    (2, 1): (_MASKED,),
    (24, 0): (_MASKED,),  # FLUX Fill: latents, latents of the masked picture, and 8 x 8 mask pixels, all folded
    (2, 0): (_CONTROL,),
    (8, 0): (_CONTROL,),
    (2, 4): (_FIRST_FRAME,),
}
"""What a denoiser with `factor * C + more` input channels gets besides latents of C channels, by (factor, more)."""
_FILLED_WITH_ZEROS: Final = frozenset({"HunyuanVideo15Pipeline", "MotifVideoPipeline"})
"""Pipelines that fill the further channels with zeros if they generate from text alone."""
_PARTS: Final[Mapping[str, str]] = {
    r"image_encoder|siglip": "image embeddings",
    r"audio_vae": "audio latents",
    r"connectors": "the text after its connectors",
    r"controlnet.*|adapter": "the control pictures",
    r"movq|vqgan": "latents",
    r".*(encoder|embedder|vae)(_\d+)?": "the output of another encoder",
}
"""What a component makes for training, by a regular expression for its full name. The first that matches counts."""
_MADE = re.compile(r"text_encoder(_\d+)?|vae")


def needs_of(class_name: str, parts: Mapping[str, str], configs: Mapping[str, Mapping[str, Json]]) -> tuple[Need, ...]:
    """Return what training this pipeline needs that is not made here. `configs` are the known ones of its denoiser and VAE."""
    outline = outline_of(class_name, parts, configs)
    by_channels, made = _by_channels(outline), conditions_of(outline)
    if made or (class_name in ROWS and by_channels == ()):
        return (*map(_of, made), *map(Need, ROWS[class_name].lacks))
    row = next((row for row in _ROWS if re.search(row.name, class_name)), None)
    is_plain = row is None or (row.depends_on_channels and by_channels == ())
    found = by_channels or () if row is None or is_plain else row.needs
    if class_name in TEXT_FAMILIES:  # an image encoder among its parts belongs to an adapter
        return found
    named = {name: next((words for part, words in _PARTS.items() if re.fullmatch(part, name)), None) for name in parts}
    others = (Need(f"{words} ({name}, {parts[name]})") for name, words in named.items() if words and not _MADE.fullmatch(name))
    return tuple(dict.fromkeys((*found, *others)))


def _of(condition: Condition) -> Need:
    named = " or ".join(f"`{role}`" for role in condition.wants or (condition.role,))
    lacks = "a video" if role_of(condition.role).is_own else f"one in the column {named}"
    why = f"(role {named}, no sample has {lacks}, or latents are not encoded)"
    return Need(f"{condition.words} {why}", condition.role, condition.wants, condition.words)


def _by_channels(outline: PipelineOutline) -> tuple[Need, ...] | None:
    takes, latents = outline.denoiser.get("in_channels"), outline.channels
    if not isinstance(takes, int) or latents is None:
        return None
    if takes <= latents or outline.class_name in _FILLED_WITH_ZEROS:
        return ()
    other = (Need(f"the input for the other channels of its denoiser (it takes {takes}, latents have {latents})"),)
    return next((needs for (factor, more), needs in _BY_CHANNELS.items() if takes == factor * latents + more), other)


def in_words(needs: Sequence[str]) -> str:
    """Return the line that says what is not made. `needs` must not be empty."""
    return f"not made here: {'; '.join(needs)}. Training this model needs that too, so the store alone is not enough"
