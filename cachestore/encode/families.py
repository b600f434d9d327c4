"""What is known of each family of models: a table and its look-up. A new family is a new row.

A row says which components `encode_prompt` uses, what it returns, how that is kept and put together again, and what its pipeline's
`__call__` passes to it by default. Those defaults stand here, and so in the recipe, because `encode_prompt`'s own differ from them in
28 of 122 pipelines, and because planning must not import diffusers; tests hold the rows against the installed diffusers. What a row may
say stands in `family`.

## The `read` block of a text recipe

Everything a reader needs to make a batch from entries, without this module:

    {"format": 1,
     "family": "sdxl",
     "outputs": {FINAL: FORM, ...},
     "constants": {FINAL: {"kind": "zeros", "shape": ["S", 3], "like": FINAL_OUTPUT}, ...},
     "pad": {FINAL: {"dim": -2, "side": "right", "length": null, "multiple": 1, "value": 0, "mask": NAME or null}, ...},
     "mask_name": NAME or null}

* FINAL is a name in the batch, by diffusers' words: `prompt_embeds`, `pooled_prompt_embeds`, ...
* FORM is `{"from": STORED}`, the stored tensor as it is, or `{"join": [STORED or FORM, ...], "dim": -1}`, a concatenation along
  `dim`. Tensors are stored without a batch axis, so a `dim` is negative and holds with and without one.
  A join whose last axis is then extended with zeros to N (SD3) says so by `"widen": N`.
* `constants` are not stored. A shape's letters are `"S"`, the length along dim -2 of the output `like`, and `"B"`, the batch size;
  a shape without `"B"` has no batch axis (FLUX's `text_ids`). Zeros have the dtype of `like`. Of the kind `positions` (FLUX.2) they
  are int64, and the last number of each row counts from 0 along S.
* An output in `pad` differs in length from entry to entry along `dim`. A batch extends each to `length`, or to the longest of the
  batch where that is null, rounded up to `multiple`, with `value`, on `side`. `mask` is the name under which the batch carries an
  int64 `[B, length]` tensor, 1 where a row is real; null where the model wants none. Outputs not in `pad` have one fixed shape.
* `mask_name` repeats the mask of `prompt_embeds`: the pipeline argument's own name.

Unknown fields, or another `format`, mean that the reader is too old: it refuses, as skipping a step gives wrong tensors.

## The `read` block of a latents recipe

    {"format": 1, "stored": "moments", "channels": 16, "spatial_factor": 8, "temporal_factor": 1, "patchify": 1,
     "scaling_factor": 0.3611, "shift_factor": 0.1159, "latents_mean": null, "latents_std": null}

The stored tensor bears the name in `stored` and is raw, straight from the encoder: `moments` `[2C, h, w]` is mean and log-variance
one after the other along dim 0 (clamp the log-variance to -30..20; std = exp(half of it)), `mean` and `sample` are `[C, h, w]`.
Of VAEs for videos they have an axis of frames, `[C, t, h, w]`, which is 1 for a picture. `channels` is C.
Let z be the mean or a sample. First, where `patchify` p is above 1, fold p x p neighbours into channels (FLUX.2). Then, in
the order in which diffusers' training scripts compute:

* with `latents_mean` and `latents_std` (lists, one number a channel): (z - latents_mean) * scaling_factor / latents_std
* without: (z - shift_factor) * scaling_factor

A null `scaling_factor` counts as 1, a null `shift_factor` as 0. With `"scaled": true`, of latents that another trainer normalised and
that were imported, the stored tensor is handed out as it is; the constants are those by which it was made.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from types import MappingProxyType
from typing import cast

from cachestore.core.errors import BadInput
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
    VaeFamily,
)

READ_FORMAT = 1

_WHOLE: Mapping[str, Json] = {"prompt_embeds": {"from": "prompt_embeds"}}
_POOLED: Mapping[str, Json] = {**_WHOLE, "pooled_prompt_embeds": {"from": "pooled_prompt_embeds"}}
_ONE = ("text_encoder", "tokenizer")
_TWO = (*_ONE, "text_encoder_2", "tokenizer_2")


def _padded(mask: str | None, length: Json = None, side: str = "right") -> dict[str, Json]:
    return {"dim": -2, "side": side, "length": length, "multiple": 1, "value": 0, "mask": mask}


PLAIN = TextFamily(
    name="plain",
    pipeline=None,
    components=_ONE,
    tokenizer="tokenizer",
    max_tokens=512,
    returns=("prompt_embeds", "prompt_attention_mask"),
    outputs=_WHOLE,
    pad={"prompt_embeds": _padded("prompt_attention_mask")},
    trims={"prompt_embeds": "prompt_attention_mask"},
    mask="prompt_attention_mask",
    args={MAX_LENGTH_ARG: None},
)

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
    outputs=_WHOLE,
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
    tokenizer="tokenizer",
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
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=77,
        returns=("prompt_embeds", None),
        outputs=_WHOLE,
        args={SKIP_ARG: None},
    ),
    TextFamily(
        name="sdxl",
        pipeline="StableDiffusionXLPipeline",
        components=_TWO,
        tokenizer="tokenizer",
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
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=512,
        returns=("prompt_embeds", None),
        # The denoiser is given no mask: padding is part of the embedding.
        outputs=_WHOLE,
        constants={"text_ids": {"kind": "positions", "shape": ["B", "S", 4], "like": "prompt_embeds"}},
        args={MAX_LENGTH_ARG: 512, "text_encoder_out_layers": [9, 18, 27]},
        text_dtype="bfloat16",
        script_args={"text_encoder_out_layers": [10, 20, 30]},
        script_resizes="bilinear",
        vae_dtype="bfloat16",
        rewrites_captions=True,
    ),
    TextFamily(
        name="pixart-sigma",
        pipeline="PixArtSigmaPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=300,
        returns=("prompt_embeds", "prompt_attention_mask", None, None),
        outputs=_WHOLE,
        pad={"prompt_embeds": _padded("prompt_attention_mask")},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={"clean_caption": True, MAX_LENGTH_ARG: 300},
        cleaners=("beautifulsoup4", "ftfy"),
        text_dtype="bfloat16",
        script_args={"clean_caption": False},
        script_resizes="bilinear",
        vae_patch=2,
        is_masked=True,
        rewrites_captions=True,
    ),
    TextFamily(
        name="sana",
        pipeline="SanaPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=300,
        returns=("prompt_embeds", "prompt_attention_mask", None, None),
        outputs=_WHOLE,
        pad={"prompt_embeds": _padded("prompt_attention_mask")},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={
            "clean_caption": False,
            MAX_LENGTH_ARG: 300,
            "complex_human_instruction": {DEFAULT_OF_CALL: "0c2a85f2ced0eb140197686156669a7b37a6b4c3987df943940f218eac443adf"},
        },
        text_dtype="bfloat16",
        script_args={"complex_human_instruction": None},
        script_resizes="bilinear",
        vae_dtype="bfloat16",
        is_masked=True,
        rewrites_captions=True,
    ),
    TextFamily(
        name="lumina2",
        pipeline="Lumina2Pipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=256,
        returns=("prompt_embeds", "prompt_attention_mask", None, None),
        outputs=_WHOLE,
        pad={"prompt_embeds": _padded("prompt_attention_mask")},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={"system_prompt": None, MAX_LENGTH_ARG: 256},
        vae_patch=2,
        text_dtype="bfloat16",
        vae_dtype="bfloat16",
        is_masked=True,
        rewrites_captions=True,
    ),
    TextFamily(
        name="wan",
        pipeline="WanPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=512,
        returns=("prompt_embeds", None),
        outputs=_WHOLE,
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
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=512,
        returns=("prompt_embeds", "prompt_embeds_mask"),
        outputs=_WHOLE,
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
    TextFamily(
        name="ltx",
        pipeline="LTXPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=128,
        returns=("prompt_embeds", "prompt_attention_mask", None, None),
        outputs=_WHOLE,
        pad={"prompt_embeds": _padded("prompt_attention_mask")},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={MAX_LENGTH_ARG: 128},
        text_dtype="bfloat16",
    ),
    TextFamily(
        name="cogvideox",
        pipeline="CogVideoXPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=226,
        returns=("prompt_embeds", None),
        outputs=_WHOLE,
        args={MAX_LENGTH_ARG: 226},
        vae_patch=2,
        text_dtype="bfloat16",
        script_resizes="bicubic",
    ),
    TextFamily(
        name="z-image",
        pipeline="ZImagePipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=512,
        returns=("prompt_embeds", None),
        outputs=_WHOLE,
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
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=512,
        returns=("prompt_embeds", None, "prompt_attention_mask", None, None, None),
        # The pipeline adds its mask, which is 1 where a row counts and 0 elsewhere, to the attention's logits: padding is attended too.
        outputs={**_WHOLE, "prompt_attention_mask": {"from": "prompt_attention_mask"}},
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
        tokenizer="tokenizer",
        max_tokens=1000,
        returns=("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2"),
        outputs={**_WHOLE, "prompt_embeds_2": {"from": "prompt_embeds_2"}},
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
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=1024,
        returns=("prompt_embeds", None),
        outputs=_WHOLE,
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
        tokenizer="tokenizer",
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
    TextFamily(
        name="mochi",
        pipeline="MochiPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=256,
        returns=("prompt_embeds", "prompt_attention_mask", None, None),
        outputs=_WHOLE,
        # The empty caption has no row at all, and a batch of it alone still needs some.
        pad={"prompt_embeds": _padded("prompt_attention_mask", LIMIT)},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={MAX_LENGTH_ARG: 256},
        settings=("force_zeros_for_empty_prompt",),
        alone=frozenset({""}),  # as the last of a batch it empties all of it
        text_dtype="bfloat16",
        vae_patch=2,
        is_masked=True,
    ),
    TextFamily(
        name="auraflow",
        pipeline="AuraFlowPipeline",
        components=_ONE,
        tokenizer="tokenizer",
        max_tokens=256,
        returns=("prompt_embeds", "prompt_attention_mask", None, None),
        outputs=_WHOLE,
        # The denoiser sees zeros up to this length; the mask is only asked for.
        pad={"prompt_embeds": _padded("prompt_attention_mask", LIMIT)},
        trims={"prompt_embeds": "prompt_attention_mask"},
        mask="prompt_attention_mask",
        args={MAX_LENGTH_ARG: 256},
        text_dtype="bfloat16",
        vae_patch=2,
        is_masked=True,
    ),
)

_PLAIN_SCALE: Mapping[str, Json] = {"shift_factor": None, "latents_mean": None, "latents_std": None}
_WAN_MEAN = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497,
    0.2503, -0.2921,
]  # fmt: skip
_WAN_STD = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
]  # fmt: skip
_MOCHI_MEAN = [
    -0.06730895953510081, -0.038011381506090416, -0.07477820912866141, -0.05565264470995561, 0.012767231469026969, -0.04703542746246419,
    0.043896967884726704, -0.09346305707025976, -0.09918314763016893, -0.008729793427399178, -0.011931556316503654, -0.0321993391887285,
]  # fmt: skip
_MOCHI_STD = [
    0.9263795028493863, 0.9248894543193766, 0.9393059390890617, 0.959253732819592, 0.8244560132752793, 0.917259975397747,
    0.9294154431013696, 1.3720942357788521, 0.881393668867029, 0.9168315692124348, 0.9185249279345552, 0.9274757570805041,
]  # fmt: skip

_VAES = (
    VaeFamily(
        class_name="AutoencoderKL",
        defaults={
            "scaling_factor": 0.18215,
            "shift_factor": None,
            "latents_mean": None,
            "latents_std": None,
            "latent_channels": 4,
            "block_out_channels": [64],
        },
    ),
    VaeFamily(
        class_name="AutoencoderKLFlux2",
        defaults={"latent_channels": 32, "block_out_channels": [128, 256, 512, 512], "batch_norm_eps": 0.0001},
        patchify=2,
        statistics={"mean": "bn.running_mean", "variance": "bn.running_var"},
    ),
    VaeFamily(
        class_name="AutoencoderDC",
        defaults={"latent_channels": 32, "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "scaling_factor": 1.0},
        factor_field="encoder_block_out_channels",
        is_random=False,
    ),
    VaeFamily(
        class_name="AutoencoderKLWan",
        defaults={
            "z_dim": 16,
            "scale_factor_spatial": 8,
            "temperal_downsample": [False, True, True],
            "latents_mean": _WAN_MEAN,
            "latents_std": _WAN_STD,
        },
        factor="ratio",
        factor_field="scale_factor_spatial",
        channels_field="z_dim",
        temporal_factor=4,
        temporal_fields=("temperal_downsample",),
        has_frames=True,
    ),
    VaeFamily(
        class_name="AutoencoderKLQwenImage",
        defaults={"z_dim": 16, "temperal_downsample": [False, True, True], "latents_mean": _WAN_MEAN, "latents_std": _WAN_STD},
        factor="halvings",
        factor_field="temperal_downsample",
        channels_field="z_dim",
        temporal_factor=4,
        temporal_fields=("temperal_downsample",),
        has_frames=True,
    ),
    VaeFamily(
        class_name="AutoencoderKLLTXVideo",
        defaults={
            "latent_channels": 128,
            "spatio_temporal_scaling": [True, True, True, False],
            "patch_size": 4,
            "patch_size_t": 1,
            "spatial_compression_ratio": None,
            "temporal_compression_ratio": None,
            "scaling_factor": 1.0,
        },
        factor="scalings",
        factor_field="spatio_temporal_scaling",
        temporal_factor=8,
        temporal_fields=("temporal_compression_ratio", "spatio_temporal_scaling"),
        has_frames=True,
        statistics={"mean": "latents_mean", "std": "latents_std"},
    ),
    VaeFamily(
        class_name="AutoencoderKLCogVideoX",
        defaults={
            "latent_channels": 16,
            "block_out_channels": [128, 256, 256, 512],
            "temporal_compression_ratio": 4,
            "scaling_factor": 1.15258426,
        },
        temporal_factor=4,
        temporal_fields=("temporal_compression_ratio",),
        has_frames=True,
    ),
    VaeFamily(
        class_name="AutoencoderKLHunyuanVideo",
        defaults={"latent_channels": 16, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4, "scaling_factor": 0.476986},
        factor="ratio",
        factor_field="spatial_compression_ratio",
        temporal_factor=4,
        temporal_fields=("temporal_compression_ratio",),
        has_frames=True,
    ),
    VaeFamily(
        class_name="AutoencoderKLHunyuanVideo15",
        defaults={"latent_channels": 32, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "scaling_factor": 1.03682},
        factor="ratio",
        factor_field="spatial_compression_ratio",
        temporal_factor=4,
        temporal_fields=("temporal_compression_ratio",),
        has_frames=True,
    ),
    VaeFamily(
        class_name="AutoencoderKLMochi",
        defaults={
            "latent_channels": 12,
            "encoder_block_out_channels": [64, 128, 256, 384],
            "temporal_expansions": [1, 2, 3],
            "scaling_factor": 1.0,
            "latents_mean": _MOCHI_MEAN,
            "latents_std": _MOCHI_STD,
        },
        factor_field="encoder_block_out_channels",
        temporal_factor=6,
        temporal_fields=("temporal_expansions",),
        has_frames=True,
    ),
)

TEXT_FAMILIES: Mapping[str, TextFamily] = MappingProxyType({row.pipeline: row for row in _PIPELINES if row.pipeline is not None})
VAE_FAMILIES: Mapping[str, VaeFamily] = MappingProxyType({row.class_name: row for row in _VAES})


def text_family(pipeline: str) -> TextFamily:
    """The row of a pipeline class. Raises BadInput that lists the known ones."""
    if pipeline not in TEXT_FAMILIES:
        raise BadInput(
            f"the pipeline class {pipeline!r} is not known; known are {', '.join(sorted(TEXT_FAMILIES))} and transformers encoders"
        )
    return TEXT_FAMILIES[pipeline]


def vae_family(class_name: str) -> VaeFamily:
    """The row of a VAE class. Raises BadInput that lists the known ones."""
    if class_name not in VAE_FAMILIES:
        raise BadInput(f"the VAE class {class_name!r} is not known; known are {', '.join(sorted(VAE_FAMILIES))}")
    return VAE_FAMILIES[class_name]


def as_it_comes(family: TextFamily, index: Mapping[str, Json]) -> TextFamily:
    """A family's row for a model that may lack text encoders, as its model_index.json says; the row itself where it lacks none."""
    for name, row in family.without.items():
        entry = index.get(name)
        if not isinstance(entry, list) or entry[:1] == [None]:
            return row
    return family


def with_encoders(family: TextFamily, names: Collection[str]) -> TextFamily:
    """A family's row for some of its text encoders, called without the others; all of them give the row itself.

    Each stored tensor is an output under its own name, as nothing is joined whose other part is missing. No name at all is refused as
    are unknown ones: BadInput names what can be made alone.
    """
    chosen = tuple(name for name in family.encoders if name in names)
    if chosen == family.encoders and set(names) == set(chosen):
        return family
    if not chosen or set(names) - set(chosen) or set(chosen) - set(family.parts):
        able = "; ".join(f"{row.pipeline}: {', '.join(row.parts)}" for row in TEXT_FAMILIES.values() if row.parts)
        has = f"it has {', '.join(family.encoders)}"
        raise BadInput(
            f"{family.pipeline or 'a text encoder that stands alone'} cannot make {', '.join(sorted(names)) or 'text of no encoder'} alone "
            f"({has}); pass --encode text. These can: {able}"
        )
    parts = {name: family.parts[name] for name in chosen}
    stored = [name for part in parts.values() for name in (part.rows, part.pooled) if name is not None]
    tokenizers = {name: name.replace("text_encoder", "tokenizer") for name in chosen}
    counts = family.tokenizer if family.tokenizer in tokenizers.values() else tokenizers[chosen[0]]
    return replace(
        family,
        components=tuple(one for name in chosen for one in (name, tokenizers[name])),
        tokenizer=counts,
        returns=(),
        outputs={name: {"from": name} for name in stored},
        pad={name: pad for name, pad in family.pad.items() if name in stored},
        trims={name: trim for name, trim in family.trims.items() if name in stored},
        asks=(),
        constants={name: constant for name, constant in family.constants.items() if constant["like"] in stored},
        args={name: value for name, value in family.args.items() if any(name in part.args for part in parts.values())},
        called=chosen,
    )


def stored_names(family: TextFamily) -> list[str]:
    """The names under which a family's tensors are kept, sorted."""
    return sorted(name for form in family.outputs.values() for name in form_names(form))


def form_names(form: Json) -> list[str]:
    """The stored tensors that a form is made of, in order."""
    if isinstance(form, str):
        return [form]
    return [form["from"]] if "from" in form else [name for part in form["join"] for name in form_names(part)]


def text_read(family: TextFamily, *, limit: int | None = None, widths: Mapping[str, int] | None = None) -> dict[str, Json]:
    """The `read` block of a text recipe.

    `limit` is the most tokens a caption can have, `widths` those of the text encoders by component and what a row `asks`: what rows leave
    open.
    """
    pads = {name: {**pad, "length": limit if pad["length"] == LIMIT else pad["length"]} for name, pad in family.pad.items()}
    return {
        "format": READ_FORMAT,
        "family": family.name,
        "outputs": {name: _with_widths(form, widths or {}) for name, form in family.outputs.items()},
        "constants": dict(family.constants),
        "pad": pads,
        "mask_name": family.mask,
    }


def _with_widths(form: Json, widths: Mapping[str, int]) -> Json:
    """A form in which `widen` is a number, where the row names a component."""
    if isinstance(form, str) or "join" not in form:
        return form
    filled = {**form, "join": [_with_widths(part, widths) for part in form["join"]]}
    return {**filled, "widen": widths.get(form["widen"], form["widen"])} if "widen" in form else filled


def latents_read(
    family: VaeFamily, config: Mapping[str, Json], stored: str, statistics: Mapping[str, list[float]] | None = None
) -> dict[str, Json]:
    """The `read` block of a latents recipe, from the VAE's config.json, and from the weights that normalise where it has such."""
    full = {**_PLAIN_SCALE, **family.defaults, **{name: value for name, value in config.items() if name in family.defaults}}
    return {
        "format": READ_FORMAT,
        "stored": stored if family.is_random else "mean",
        "channels": full[family.channels_field],
        "spatial_factor": _spatial_factor(family, full),
        "temporal_factor": _temporal_factor(family, full),
        "patchify": family.patchify,
        "scaling_factor": full.get("scaling_factor"),
        "shift_factor": full["shift_factor"],
        **({name: full[name] for name in ("latents_mean", "latents_std")} | _normalising(full, statistics)),
    }


def _normalising(config: Mapping[str, Json], statistics: Mapping[str, list[float]] | None) -> dict[str, Json]:
    """Mean and standard deviation from weights; nothing for a VAE whose config says them, or whose weights were not read."""
    if not statistics:
        return {}
    if "variance" not in statistics:
        return {"latents_mean": statistics["mean"], "latents_std": statistics["std"]}
    std = [sqrt(value + config["batch_norm_eps"]) for value in statistics["variance"]]
    return {"latents_mean": statistics["mean"], "latents_std": std}


def _temporal_factor(family: VaeFamily, config: Mapping[str, Json]) -> int:
    value = next((config[name] for name in family.temporal_fields if config[name] is not None), family.temporal_factor)
    if not isinstance(value, list | tuple):
        return int(value)
    numbers = cast("Sequence[int | bool]", value)
    if all(isinstance(number, bool) for number in numbers):
        return int(config.get("patch_size_t") or 1) * 2 ** sum(numbers)
    return prod(numbers)


def _spatial_factor(family: VaeFamily, config: Mapping[str, Json]) -> int:
    if family.factor == "scalings" and config["spatial_compression_ratio"] is not None:
        return int(config["spatial_compression_ratio"])
    value = config[family.factor_field]
    match family.factor:
        case "blocks":
            return 2 ** (len(value) - 1)
        case "ratio":
            return int(value)
        case "halvings":
            return 2 ** len(value)
        case "scalings":
            return int(config["patch_size"]) * 2 ** sum(map(bool, value))
