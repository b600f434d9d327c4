"""The rows of text encoders, by the pipeline that they belong to. A new family is a new row; `family` says what one can hold.

What a pipeline's `__call__` passes to `encode_prompt` stands here, and so in the recipe, because `encode_prompt`'s own defaults differ
from it in 28 of 122 pipelines, and because planning must not import diffusers; tests hold the rows against the installed diffusers.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from cachestore.core.keys import Json
from cachestore.encode.family import (
    DEFAULT_OF_CALL,
    LIMIT,
    MAX_LENGTH_ARG,
    PAST_LIMIT,
    SKIP_ARG,
    ZERO_ROWS,
    ShownPictures,
    TextFamily,
    TextPart,
)

_POOLED: Mapping[str, Json] = {"prompt_embeds": {"from": "prompt_embeds"}, "pooled_prompt_embeds": {"from": "pooled_prompt_embeds"}}
_TWO = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def _padded(mask: str | None, length: Json = None, side: str = "right") -> dict[str, Json]:
    return {"dim": -2, "side": side, "length": length, "multiple": 1, "value": 0, "mask": mask}


PLAIN = TextFamily(
    name="plain",
    pipeline=None,
    max_tokens=512,
    returns=("prompt_embeds", "prompt_attention_mask"),
    pad={"prompt_embeds": _padded("prompt_attention_mask")},
    trims={"prompt_embeds": "prompt_attention_mask"},
    mask="prompt_attention_mask",
    args={MAX_LENGTH_ARG: None},
)

_MASKED = TextFamily(
    name="",
    pipeline=None,
    max_tokens=0,
    returns=("prompt_embeds", "prompt_attention_mask", None, None),
    pad={"prompt_embeds": _padded("prompt_attention_mask")},
    trims={"prompt_embeds": "prompt_attention_mask"},
    mask="prompt_attention_mask",
    text_dtype="bfloat16",
)
"""What rows share whose pipeline returns a mask of its rows: padding is dropped, and the batch carries the mask again."""

_FLUX = TextFamily(
    name="flux",
    pipeline="FluxPipeline",
    components=_TWO,
    tokenizer="tokenizer_2",
    max_tokens=512,
    returns=("prompt_embeds", "pooled_prompt_embeds", None),
    outputs=_POOLED,
    constants={"text_ids": {"kind": "zeros", "shape": ["S", 3], "like": "prompt_embeds"}},
    args={MAX_LENGTH_ARG: 512},
    parts={"text_encoder": TextPart(pooled="pooled_prompt_embeds"), "text_encoder_2": TextPart("prompt_embeds", args=(MAX_LENGTH_ARG,))},
    script_resizes="bilinear",
    vae_patch=2,
    text_dtype="bfloat16",
    vae_dtype="bfloat16",
)

_QWEN_EDIT = TextFamily(
    name="qwen-image-edit",
    pipeline="QwenImageEditPipeline",
    components=("text_encoder", "processor"),
    tokenizer="processor",
    max_tokens=131_072,  # the tokenizer's own: the pipeline cuts nothing, whatever max_sequence_length it is given
    returns=("prompt_embeds", "prompt_embeds_mask"),
    pad={"prompt_embeds": _padded("prompt_embeds_mask")},
    trims={"prompt_embeds": "prompt_embeds_mask"},
    mask="prompt_embeds_mask",
    pictures=ShownPictures(area=1024 * 1024, dropped=64, most=1),
    vae_patch=2,
    text_dtype="bfloat16",
    rewrites_captions=True,
)

_SD3_JOINT: Mapping[str, Json] = {"join": ["prompt_embeds.text_encoder", "prompt_embeds.text_encoder_2"], "dim": -1}
_SD3_POOLED: Mapping[str, Json] = {"join": ["pooled_prompt_embeds.text_encoder", "pooled_prompt_embeds.text_encoder_2"], "dim": -1}
_SD3_PARTS: Mapping[str, TextPart] = {
    "text_encoder": TextPart("prompt_embeds.text_encoder", "pooled_prompt_embeds.text_encoder", -2, (SKIP_ARG,)),
    "text_encoder_2": TextPart("prompt_embeds.text_encoder_2", "pooled_prompt_embeds.text_encoder_2", -2, (SKIP_ARG,)),
}
_SD3_WIDTH = "transformer.joint_attention_dim"

_SD3_WITHOUT_T5 = TextFamily(
    name="sd3-without-t5",
    pipeline="StableDiffusion3Pipeline",
    components=_TWO,
    max_tokens=77,
    returns=("prompt_embeds", None, "pooled_prompt_embeds", None),
    outputs={"prompt_embeds": {**_SD3_JOINT, "widen": _SD3_WIDTH}, "pooled_prompt_embeds": _SD3_POOLED},
    # CLIP's 77 rows, then as many zeros as T5 would have rows, which the denoiser attends.
    pad={"prompt_embeds": _padded(None, 77 + 256)},
    trims={"prompt_embeds": PAST_LIMIT},
    args={SKIP_ARG: None},
    parts=_SD3_PARTS,
    asks=(_SD3_WIDTH,),
    script_resizes="bilinear",
    vae_patch=2,
    text_dtype="bfloat16",
    vae_dtype="bfloat16",
)

_PIPELINES = (
    TextFamily(
        name="sd15",
        pipeline="StableDiffusionPipeline",
        max_tokens=77,
        returns=("prompt_embeds", None),
        args={SKIP_ARG: None},
    ),
    TextFamily(
        name="sdxl",
        pipeline="StableDiffusionXLPipeline",
        components=_TWO,
        max_tokens=77,
        returns=("prompt_embeds", None, "pooled_prompt_embeds", None),
        outputs={
            "prompt_embeds": {"join": ["prompt_embeds.text_encoder", "prompt_embeds.text_encoder_2"], "dim": -1},
            "pooled_prompt_embeds": {"from": "pooled_prompt_embeds"},
        },
        args={SKIP_ARG: None},
        parts={
            "text_encoder": TextPart("prompt_embeds.text_encoder", layer=-2, args=(SKIP_ARG,)),
            "text_encoder_2": TextPart("prompt_embeds.text_encoder_2", "pooled_prompt_embeds", -2, (SKIP_ARG,)),
        },
    ),
    TextFamily(
        name="sd3",
        pipeline="StableDiffusion3Pipeline",
        components=(*_TWO, "text_encoder_3", "tokenizer_3"),
        tokenizer="tokenizer_3",
        max_tokens=256,
        returns=("prompt_embeds", None, "pooled_prompt_embeds", None),
        outputs={
            "prompt_embeds": {
                "join": [
                    # CLIP's rows are as wide as T5's, filled up with zeros, and stand before them.
                    {**_SD3_JOINT, "widen": "text_encoder_3"},
                    "prompt_embeds.text_encoder_3",
                ],
                "dim": -2,
            },
            "pooled_prompt_embeds": _SD3_POOLED,
        },
        args={SKIP_ARG: None, MAX_LENGTH_ARG: 256},
        parts={**_SD3_PARTS, "text_encoder_3": TextPart("prompt_embeds.text_encoder_3", args=(MAX_LENGTH_ARG,))},
        without={"text_encoder_3": _SD3_WITHOUT_T5},
        script_args={MAX_LENGTH_ARG: 77},
        script_resizes="bilinear",
        vae_patch=2,
        text_dtype="bfloat16",
        vae_dtype="bfloat16",
    ),
    _FLUX,
    replace(_FLUX, name="flux-kontext", pipeline="FluxKontextPipeline"),
    TextFamily(
        name="flux2-klein",
        pipeline="Flux2KleinPipeline",
        max_tokens=512,
        returns=("prompt_embeds", None),
        # The denoiser is given no mask: padding is part of the embedding.
        constants={"text_ids": {"kind": "positions", "shape": ["B", "S", 4], "like": "prompt_embeds"}},
        args={MAX_LENGTH_ARG: 512, "text_encoder_out_layers": [9, 18, 27]},
        text_dtype="bfloat16",
        script_args={"text_encoder_out_layers": [10, 20, 30]},
        script_resizes="bilinear",
        vae_dtype="bfloat16",
        rewrites_captions=True,
    ),
    replace(
        _MASKED,
        name="pixart-sigma",
        pipeline="PixArtSigmaPipeline",
        max_tokens=300,
        args={"clean_caption": True, MAX_LENGTH_ARG: 300},
        cleaners=("beautifulsoup4", "ftfy"),
        script_args={"clean_caption": False},
        script_resizes="bilinear",
        vae_patch=2,
        is_masked=True,
        rewrites_captions=True,
    ),
    replace(
        _MASKED,
        name="sana",
        pipeline="SanaPipeline",
        max_tokens=300,
        args={
            "clean_caption": False,
            MAX_LENGTH_ARG: 300,
            "complex_human_instruction": {DEFAULT_OF_CALL: "0c2a85f2ced0eb140197686156669a7b37a6b4c3987df943940f218eac443adf"},
        },
        script_args={"complex_human_instruction": None},
        script_resizes="bilinear",
        vae_dtype="bfloat16",
        is_masked=True,
        rewrites_captions=True,
    ),
    replace(
        _MASKED,
        name="lumina2",
        pipeline="Lumina2Pipeline",
        max_tokens=256,
        args={"system_prompt": None, MAX_LENGTH_ARG: 256},
        vae_patch=2,
        vae_dtype="bfloat16",
        is_masked=True,
        rewrites_captions=True,
    ),
    TextFamily(
        name="wan",
        pipeline="WanPipeline",
        max_tokens=512,
        returns=("prompt_embeds", None),
        # The denoiser sees zeros up to this length, and no mask.
        pad={"prompt_embeds": _padded(None, LIMIT)},
        trims={"prompt_embeds": ZERO_ROWS},
        args={MAX_LENGTH_ARG: 512},
        cleaners=("ftfy",),
        text_dtype="bfloat16",
        vae_patch=2,
        is_masked=True,
        rewrites_captions=True,
    ),
    TextFamily(
        name="qwen-image",
        pipeline="QwenImagePipeline",
        max_tokens=512,
        returns=("prompt_embeds", "prompt_embeds_mask"),
        pad={"prompt_embeds": _padded("prompt_embeds_mask")},
        trims={"prompt_embeds": "prompt_embeds_mask"},
        mask="prompt_embeds_mask",
        args={MAX_LENGTH_ARG: 512},
        vae_patch=2,
        text_dtype="bfloat16",
        script_resizes="bilinear",
        is_masked=True,
        rewrites_captions=True,
        tokenizer_limit=1024,
    ),
    _QWEN_EDIT,
    replace(
        _QWEN_EDIT,
        name="qwen-image-edit-plus",
        pipeline="QwenImageEditPlusPipeline",
        pictures=ShownPictures(area=384 * 384, dropped=64),
    ),
    replace(
        _MASKED,
        name="ltx",
        pipeline="LTXPipeline",
        max_tokens=128,
        args={MAX_LENGTH_ARG: 128},
    ),
    TextFamily(
        name="cogvideox",
        pipeline="CogVideoXPipeline",
        max_tokens=226,
        returns=("prompt_embeds", None),
        args={MAX_LENGTH_ARG: 226},
        vae_patch=2,
        text_dtype="bfloat16",
        script_resizes="bicubic",
    ),
    TextFamily(
        name="z-image",
        pipeline="ZImagePipeline",
        max_tokens=512,
        returns=("prompt_embeds", None),
        # The pipeline takes a list of tensors without padding; the mask tells how to make it.
        pad={"prompt_embeds": _padded("prompt_attention_mask")},
        mask="prompt_attention_mask",
        args={MAX_LENGTH_ARG: 512},
        vae_patch=2,
        text_dtype="bfloat16",
        script_resizes="bilinear",
        vae_dtype="bfloat16",
        is_masked=True,
        rewrites_captions=True,
    ),
    TextFamily(
        name="chroma",
        pipeline="ChromaPipeline",
        max_tokens=512,
        returns=("prompt_embeds", None, "prompt_attention_mask", None, None, None),
        # The pipeline adds its mask, which is 1 where a row counts and 0 elsewhere, to the attention's logits: padding is attended too.
        outputs={"prompt_embeds": {"from": "prompt_embeds"}, "prompt_attention_mask": {"from": "prompt_attention_mask"}},
        constants={"text_ids": {"kind": "zeros", "shape": ["S", 3], "like": "prompt_embeds"}},
        mask="prompt_attention_mask",
        args={MAX_LENGTH_ARG: 512},
        vae_patch=2,
        text_dtype="bfloat16",
        vae_dtype="bfloat16",
    ),
    TextFamily(
        name="hunyuanvideo15",
        pipeline="HunyuanVideo15Pipeline",
        components=_TWO,
        max_tokens=1000,
        returns=("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2"),
        outputs={"prompt_embeds": {"from": "prompt_embeds"}, "prompt_embeds_2": {"from": "prompt_embeds_2"}},
        # The second is of quoted text alone, and has no row where nothing is quoted; a batch of such captions still needs rows.
        pad={"prompt_embeds": _padded("prompt_embeds_mask"), "prompt_embeds_2": _padded("prompt_embeds_mask_2", 256)},
        trims={"prompt_embeds": "prompt_embeds_mask", "prompt_embeds_2": "prompt_embeds_mask_2"},
        mask="prompt_embeds_mask",
        text_dtype="bfloat16",
        rewrites_captions=True,
        tokenizer_limit=1000,
    ),
    TextFamily(
        name="cogview4",
        pipeline="CogView4Pipeline",
        max_tokens=1024,
        returns=("prompt_embeds", None),
        pad={"prompt_embeds": _padded("prompt_attention_mask", side="left")},
        mask="prompt_attention_mask",
        args={MAX_LENGTH_ARG: 1024},
        length_step=16,
        vae_patch=2,
        text_dtype="bfloat16",
        vae_dtype="bfloat16",
    ),
    TextFamily(
        name="hunyuanvideo",
        pipeline="HunyuanVideoPipeline",
        components=_TWO,
        max_tokens=256,
        returns=("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"),
        outputs=_POOLED,
        pad={"prompt_embeds": _padded("prompt_attention_mask")},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={
            "prompt_template": {DEFAULT_OF_CALL: "02b92d9533b63219915b0a2c32e1db45517aa24bd801de1286625ed4b948f890"},
            MAX_LENGTH_ARG: 256,
        },
        text_dtype="bfloat16",
        vae_patch=2,
        is_masked=True,
        rewrites_captions=True,
    ),
    replace(
        _MASKED,
        name="mochi",
        pipeline="MochiPipeline",
        max_tokens=256,
        # The empty caption has no row at all, and a batch of it alone still needs some.
        pad={"prompt_embeds": _padded("prompt_attention_mask", LIMIT)},
        args={MAX_LENGTH_ARG: 256},
        settings=("force_zeros_for_empty_prompt",),
        alone=frozenset({""}),  # as the last of a batch it empties all of it
        vae_patch=2,
        is_masked=True,
    ),
    replace(
        _MASKED,
        name="auraflow",
        pipeline="AuraFlowPipeline",
        max_tokens=256,
        # The denoiser sees zeros up to this length; the mask is only asked for.
        pad={"prompt_embeds": _padded("prompt_attention_mask", LIMIT)},
        args={MAX_LENGTH_ARG: 256},
        vae_patch=2,
        is_masked=True,
    ),
)

TEXT_FAMILIES: Mapping[str, TextFamily] = MappingProxyType({row.pipeline: row for row in _PIPELINES if row.pipeline is not None})
