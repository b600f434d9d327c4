"""What diffusers itself makes of an input: the calls of a pipeline, for one input at a time. Imports torch.

`cachestore doctor --model` compares the encoders of this package with it. Of those it shares how modules are loaded, and how a pipeline
is built without its denoiser; arguments are the defaults of the pipeline's `__call__`, not those of the tables.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cachestore.core.keys import Json
from cachestore.encode.families.row import CONNECTORS, SKIP_ARG, TextFamily
from cachestore.encode.families.text import PLAIN, TEXT_FAMILIES
from cachestore.encode.models.folders import INDEX, Model, read_model
from cachestore.encode.models.modules import Foreign, build_pipeline, choose_device, clip_as_it_was, load_image_processor, load_module
from cachestore.encode.models.setup import Caption, TextSetup, caption_at
from cachestore.encode.pictures.conditions import plain_class
from cachestore.encode.pictures.kinds import BLANK, COVERED, GIVEN, IN_FRONT, THRESHOLD, EndFrames, Guided, Kind, Masked
from cachestore.encode.pictures.latents import LatentsEncoder
from cachestore.encode.pictures.shots import Pixels, Shown
from cachestore.encode.pictures.vision import VisionEncoder
from cachestore.encode.text.prompts import load_part

Make = Callable[[Any], dict[str, Tensor]]
"""Makes the tensors of one input as diffusers does."""
PATCH_SIZE: Final = "transformer.patch_size"
"""What Wan VACE's pipeline reads of its denoiser's configuration to prepare masks."""
CLIP: Final = 4
"""The number of dimensions of a clip's pixels."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline by its class, with the plain values of its model_index.json."""

    class_name: str
    settings: Mapping[str, Json]
    model: Model

    def build(self, parts: Mapping[str, Foreign], asked: Mapping[str, Json] | None = None) -> Foreign:
        """Build it with these components and no denoiser; `asked` as for `build_pipeline`. Raises as that."""
        taken = inspect.signature(getattr(importlib.import_module("diffusers"), self.class_name).__init__).parameters
        settings = {name: value for name, value in self.settings.items() if name in taken}
        row = TEXT_FAMILIES.get(plain_class(self.class_name), PLAIN)
        return build_pipeline(self.class_name, parts, settings, asked, row.stand_ins)


def pipeline_in(folder: Path | None) -> Pipeline | None:
    """Return the pipeline of a model's folder; None for a text encoder or a VAE without a pipeline."""
    if folder is None or not (folder / INDEX).is_file():
        return None
    model = read_model(folder)
    plain = {name: value for name, value in model.index.items() if isinstance(value, bool | int | float | str)}
    settings = {name: value for name, value in plain.items() if not name.startswith("_")}
    return Pipeline(model.class_name, settings, model)


def texts_of(setup: TextSetup, given: Mapping[str, Json], pipeline: Pipeline | None, device: str) -> Make:
    """Return what makes the outputs of `TextEncoder.resolve`'s item, under the family's names. `given` are the user's own arguments."""
    where = choose_device(device)
    parts = {name: load_part(part, setup, where) for name, part in setup.components.items()}
    if pipeline is None:
        return lambda item: _states(parts, str(item[0]), setup.max_tokens, where)
    whole = pipeline.build(parts, setup.asked)
    fixed = _arguments_of(whole, setup.family, given, where)

    def make(item: tuple[Caption, Sequence[Shown]]) -> dict[str, Tensor]:
        caption, shown = item
        others = list(enumerate(setup.family.encoders))[1:] if setup.family.captioned else []
        prompts = {name.replace("text_encoder", "prompt"): caption_at(caption, index) for index, name in others}
        prompts |= _pictures_of(whole, setup.family, [one.picture() for one in shown])
        with nullcontext() if fixed.get(SKIP_ARG) is None else clip_as_it_was(whole), torch.inference_mode():
            found = whole.encode_prompt(prompt=caption_at(caption, 0), **fixed, **prompts)
            found = found if isinstance(found, tuple) else (found,)
            named = {name: value for name, value in zip(setup.family.returns, found, strict=True) if name is not None}
        return named | (_projected(whole.connectors, named) if CONNECTORS in setup.family.components else {})

    return make


def _pictures_of(pipeline: Foreign, family: TextFamily, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    if family.pictures is None:
        return {}
    resized = list(pictures)
    if area := family.pictures.area:
        sides: Any = inspect.getmodule(type(pipeline))
        sizes = [sides.calculate_dimensions(area, one.width / one.height)[:2] for one in pictures]
        resized = [pipeline.image_processor.resize(one, height, width) for one, (width, height) in zip(pictures, sizes, strict=True)]
    return {"image": resized[0] if family.pictures.most == 1 else resized}


def _states(parts: Mapping[str, Foreign], caption: str, most: int, device: torch.device) -> dict[str, Tensor]:
    whole = parts["text_encoder"]
    model = whole.get_encoder() if getattr(whole.config, "is_encoder_decoder", False) else whole
    with torch.inference_mode():
        read = parts["tokenizer"](caption, truncation=True, max_length=most, return_tensors="pt")
        given = {name: read[name].to(device) for name in ("input_ids", "attention_mask")}
        return {"prompt_embeds": model(**given).last_hidden_state}


def _arguments_of(pipeline: Foreign, family: TextFamily, given: Mapping[str, Json], device: torch.device) -> dict[str, Any]:
    """What `__call__` passes to `encode_prompt` by default, for one caption and no negative one."""
    called = inspect.signature(pipeline.__call__).parameters
    one = {"device": device, "num_images_per_prompt": 1, "num_videos_per_prompt": 1, "batch_size": 1, "do_classifier_free_guidance": False}
    left_out = {"prompt", "image", *(part.replace("text_encoder", "prompt") for part in family.captioned)}
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(pipeline.encode_prompt).parameters.items():
        if name in left_out:
            continue
        if name in one or name in given:
            found[name] = one.get(name, given.get(name))
        elif name in called and called[name].default is not parameter.empty and called[name].default is not None:
            found[name] = called[name].default
        elif name in called or parameter.default is parameter.empty:  # what `__call__` computes, such as Ideogram's grid
            found[name] = family.args.get(name)
    return found


def _projected(connectors: Foreign, named: Mapping[str, Any]) -> dict[str, Tensor]:
    """What LTX-2's connectors give to the two transformers in them, which are trained; looked at while they run as in the pipeline."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(_module: Foreign, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            seen[name] = arguments[0] if arguments else named["hidden_states"]

        return note

    outputs = {"prompt_embeds": "video_connector", "audio_prompt_embeds": "audio_connector"}
    hooks = [getattr(connectors, part).register_forward_pre_hook(watch(name), with_kwargs=True) for name, part in outputs.items()]
    try:
        connectors(named["prompt_embeds"], named["prompt_attention_mask"])
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def rows_of(family: TextFamily, output: str, made: Mapping[str, Any], count: int) -> Tensor:
    """Return an output of one caption without the batch's axis, and without what its pipeline says is padding.

    If there are more rows than the `count` that was stored, its own mask tells padding; without a mask, zeros are.
    """
    value = made[output]
    rows: Tensor = value[0] if isinstance(value, list) else value.select(family.batch_axes.get(output, 0), 0)
    if len(rows) == count:
        return rows
    mask = made.get(family.trims.get(output, ""))
    if isinstance(mask, Tensor) and mask.ndim == 1:  # Kandinsky's cumulated lengths
        return rows[: int(mask[1])]
    if isinstance(mask, Tensor):
        return rows[mask[0].reshape(len(rows), -1)[:, 0].bool()]
    return rows if rows[count:].any() else rows[:count]


class PlainVae:
    """A VAE and its pipeline. It makes latents of pixels as `LatentsEncoder.prepare` returns them, of one input at a time."""

    def __init__(self, encoder: LatentsEncoder, pipeline: Pipeline | None, device: str) -> None:
        """Load the VAE onto the device."""
        self._setup, self._kind = encoder.setup, encoder.kind
        self._device = choose_device(device)
        self._vae = load_module(self._setup.components["vae"], self._setup.dtype, self._device)
        self._pipeline: Foreign = None if pipeline is None else self._built(pipeline)
        kind: Any = importlib.import_module("diffusers.image_processor").VaeImageProcessor
        own = [getattr(self._pipeline, name, None) for name in ("video_processor", "image_processor")]
        self._processor = next((one for one in own if isinstance(one, kind)), None) or kind(vae_scale_factor=1)

    def _built(self, pipeline: Pipeline) -> Foreign:
        asked = {PATCH_SIZE: pipeline.model.config_of("transformer")["patch_size"]} if isinstance(self._kind, Guided) else None
        try:
            return pipeline.build({"vae": self._vae}, asked)
        except (AttributeError, TypeError):  # Qwen-Image 2.1 reads its tokenizer at once; of it, pictures need the processor alone
            if type(self._kind) is not Kind:
                raise
            return None

    def make(self, pixels: Pixels) -> dict[str, Tensor] | None:
        """Return `moments` and `mean`, or `final` for what the pipeline normalises too; None for what it makes in another way."""
        with torch.inference_mode():
            match self._kind:
                case Masked():
                    return self._masked(pixels)
                case EndFrames():
                    return self._ends(pixels)
                case Guided():
                    return self._guided(pixels)
                case _:
                    return self._encoded(pixels)

    def _encoded(self, pixels: Pixels, where: "Tensor | float" = 1.0) -> dict[str, Tensor]:
        given = self._preprocessed(pixels) * where
        given = torch.cat([given, torch.ones_like(given[:, :1])], dim=1) if self._setup.has_alpha else given
        given = given.unsqueeze(2) if self._setup.has_frames and pixels.ndim < CLIP else given
        encoded = self._vae.encode(given.to(self._device, self._vae.dtype))
        if not hasattr(encoded, "latent_dist"):
            return {"mean": encoded.latent[0]}
        return {"moments": encoded.latent_dist.parameters[0], "mean": encoded.latent_dist.mode()[0]}

    def _preprocessed(self, pixels: Pixels) -> Tensor:
        """The pixels of a picture or clip as the pipeline's own processor makes them: float32, with a batch axis."""
        height, width = pixels.shape[-3:-1]
        frames = [Image.fromarray(frame) for frame in (pixels if pixels.ndim == CLIP else pixels[None])]
        if pixels.ndim < CLIP:
            return self._processor.preprocess(frames[0], height=height, width=width)
        if hasattr(self._processor, "preprocess_video"):
            return self._processor.preprocess_video(frames, height=height, width=width)
        return torch.stack([self._processor.preprocess(one, height=height, width=width)[0] for one in frames], dim=1)[None]

    def _masked(self, pixels: Pixels) -> dict[str, Tensor]:
        """The picture without what its mask covers, as pipelines for inpainting make it."""
        white = Image.fromarray(np.where(pixels[..., 3] == COVERED, 255, 0).astype(np.uint8))
        mask = self._pipeline.mask_processor.preprocess(white, height=white.height, width=white.width)
        return self._encoded(pixels[..., :3], mask < THRESHOLD / 255)

    def _ends(self, pixels: Pixels) -> dict[str, Tensor]:
        """Wan's `condition`: the first frame, or the first and the last, with marks in front."""
        frames, (height, width) = len(pixels), pixels.shape[1:3]
        has_last = frames > 1 and pixels[-1, 0, 0, 3] == GIVEN
        first, last = (
            self._pipeline.video_processor.preprocess(Image.fromarray(one[..., :3]), height=height, width=width).to(self._device)
            for one in (pixels[0], pixels[-1])
        )
        where = (1, self._setup.channels, height, width, frames, torch.float32, self._device, None, None)
        return {"final": self._pipeline.prepare_latents(first, *where, last if has_last else None)[1][0]}

    def _guided(self, pixels: Pixels) -> dict[str, Tensor] | None:
        frames, (height, width) = len(pixels), pixels.shape[1:3]
        if np.isin(pixels[:, 0, 0, 3], (IN_FRONT, BLANK)).any():
            return None
        white = np.repeat(np.where(pixels[..., 3:] == COVERED, 255, 0).astype(np.uint8), 3, axis=-1)
        shown = ([Image.fromarray(frame) for frame in video] for video in (pixels[..., :3], white))
        made = self._pipeline.preprocess_conditions(*shown, None, 1, height, width, frames, torch.float32, self._device)
        video, mask, none = made
        parts = [self._pipeline.prepare_video_latents(video, mask, none), self._pipeline.prepare_masks(mask, none)]
        return {"final": torch.cat(parts, dim=1)[0]}


def shown_to(encoder: VisionEncoder, pipeline: Pipeline, device: str) -> Make:
    """Return what makes the embeddings of frames, uint8 [count, height, width, 3], by the pipeline's own `encode_image`."""
    where, (model, processor) = choose_device(device), encoder.setup.components.values()
    parts = {model.name: load_module(model, encoder.setup.dtype, where), processor.name: load_image_processor(processor)}
    whole = pipeline.build(parts)
    more = [1, where, whole.image_encoder.dtype] if "batch_size" in inspect.signature(whole.encode_image).parameters else [where]

    def make(frames: Pixels) -> dict[str, Tensor]:
        pictures = [Image.fromarray(frame) for frame in frames]
        with torch.inference_mode():
            made = whole.encode_image(pictures if len(pictures) > 1 else pictures[0], *more)
        return {encoder.setup.name: made if len(pictures) > 1 else made[0]}

    return make
