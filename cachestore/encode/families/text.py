"""The table of text encoders, by pipeline class. A new family is a new row; `family` describes its fields.

A row has the arguments that the pipeline's `__call__` passes to `encode_prompt`, whose own defaults differ from them in 28 of 122
pipelines. They are part of the recipe. Planning must not import diffusers; tests compare the rows with the installed one.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cachestore.core.keys import Json
from cachestore.core.samples import FIRST_FRAME
from cachestore.encode.families.row import (
    CONNECTORS,
    DEFAULT_OF_CALL,
    LIMIT,
    MAX_LENGTH_ARG,
    PAST_LIMIT,
    SKIP_ARG,
    ZERO_ROWS,
    EncoderPart,
    PictureInput,
    RowWidth,
    TextFamily,
    plain_forms,
)

_MASK, _QWEN_MASK = "prompt_attention_mask", "prompt_embeds_mask"
_EMBEDS = ("prompt_embeds", None)
_EMBEDS_AND_POOLED = ("prompt_embeds", None, "pooled_prompt_embeds", None)
_POOLED = plain_forms("prompt_embeds", "pooled_prompt_embeds")
_TWO = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")


def _row(like: TextFamily, who: tuple[str, str, int], **changes: Any) -> TextFamily:
    name, pipeline, max_tokens = who
    return replace(like, name=name, pipeline=pipeline, max_tokens=max_tokens, **changes)


def _padded(mask: str | None, length: Json = None, side: str = "right") -> dict[str, Json]:
    return {"dim": -2, "side": side, "length": length, "multiple": 1, "value": 0, "mask": mask}


def _dropped(mask: str) -> dict[str, Any]:
    return {"pad": {"prompt_embeds": _padded(mask)}, "trims": {"prompt_embeds": mask}, "mask": mask}


def _of_both_clips(output: str) -> dict[str, Json]:
    return {"join": [f"{output}.text_encoder", f"{output}.text_encoder_2"], "dim": -1}


def _quoted(length: int) -> dict[str, Json]:
    # the second is of quoted text alone: without quotes it has no rows, but a batch of such captions still needs some
    return {"prompt_embeds": _padded(_QWEN_MASK), "prompt_embeds_2": _padded("prompt_embeds_mask_2", length)}


def _sana_args(instruction: str) -> dict[str, Json]:
    return {"clean_caption": False, MAX_LENGTH_ARG: 300, "complex_human_instruction": {DEFAULT_OF_CALL: instruction}}


PLAIN = TextFamily("plain", None, 512, ("prompt_embeds", _MASK), args={MAX_LENGTH_ARG: None}, **_dropped(_MASK))

# what rows share: text in 16 bits; latents too; a mask by which padding is dropped; a template or cleaning of captions
_HALF = TextFamily("", None, 0, _EMBEDS, text_dtype="bfloat16", vae_patch=2)
_BOTH_HALF = replace(_HALF, vae_dtype="bfloat16")
_MASKED = replace(_HALF, returns=("prompt_embeds", _MASK, None, None), is_masked=True, **_dropped(_MASK))
_REWRITTEN = replace(_MASKED, rewrites_captions=True)
_FLUX = _row(
    _BOTH_HALF,
    ("flux", "FluxPipeline", 512),
    components=_TWO,
    captioned=_ENCODERS[:2],
    tokenizer="tokenizer_2",
    returns=("prompt_embeds", "pooled_prompt_embeds", None),
    outputs=_POOLED,
    constants={"text_ids": {"kind": "zeros", "shape": ["S", 3], "like": "prompt_embeds"}},
    args={MAX_LENGTH_ARG: 512},
    parts={
        "text_encoder": EncoderPart(pooled="pooled_prompt_embeds"),
        "text_encoder_2": EncoderPart("prompt_embeds", args=(MAX_LENGTH_ARG,)),
    },
    script_resizes="bilinear",
)
_FLUX2 = replace(
    _BOTH_HALF,
    # the denoiser gets no mask: padding is part of the embedding
    constants={"text_ids": {"kind": "positions", "shape": ["B", "S", 4], "like": "prompt_embeds"}},
    vae_patch=1,
    rewrites_captions=True,
    script_resizes="bilinear",
)

# the denoiser gets zeros up to this length, and no mask
_ZERO_FILLED = replace(_HALF, pad={"prompt_embeds": _padded(None, LIMIT)}, trims={"prompt_embeds": ZERO_ROWS}, is_masked=True)
_QWEN = replace(_HALF, returns=("prompt_embeds", _QWEN_MASK), rewrites_captions=True, **_dropped(_QWEN_MASK))
_QUOTED = replace(
    _QWEN,
    components=_TWO,
    returns=("prompt_embeds", _QWEN_MASK, "prompt_embeds_2", "prompt_embeds_mask_2"),
    outputs=plain_forms("prompt_embeds", "prompt_embeds_2"),
    trims={"prompt_embeds": _QWEN_MASK, "prompt_embeds_2": "prompt_embeds_mask_2"},
    tokenizer_limit=1000,
    vae_patch=1,
)
_QWEN_EDIT = _row(
    _QWEN,
    # the tokenizer's own limit, as the pipeline ignores max_sequence_length and cuts nothing
    ("qwen-image-edit", "QwenImageEditPipeline", 131_072),
    components=("text_encoder", "processor"),
    tokenizer="processor",
    pictures=PictureInput(area=1024 * 1024, dropped=64, most=1),
)
_SD3_JOINT, _SD3_POOLED = _of_both_clips("prompt_embeds"), _of_both_clips("pooled_prompt_embeds")
_SD3_PARTS: Mapping[str, EncoderPart] = {
    name: EncoderPart(f"prompt_embeds.{name}", f"pooled_prompt_embeds.{name}", -2, (SKIP_ARG,))
    for name in ("text_encoder", "text_encoder_2")
}
_SD3 = replace(_BOTH_HALF, pipeline="StableDiffusion3Pipeline", returns=_EMBEDS_AND_POOLED, script_resizes="bilinear")
_SD3_WITHOUT_T5 = replace(
    _SD3,
    name="sd3-without-t5",
    max_tokens=77,
    components=_TWO,
    captioned=_ENCODERS[:2],
    outputs={"prompt_embeds": {**_SD3_JOINT, "widen": "transformer.joint_attention_dim"}, "pooled_prompt_embeds": _SD3_POOLED},
    # the 77 rows of CLIP, then zeros for the rows of T5, to which the denoiser attends
    pad={"prompt_embeds": _padded(None, 77 + 256)},
    trims={"prompt_embeds": PAST_LIMIT},
    args={SKIP_ARG: None},
    parts=_SD3_PARTS,
)
_SD3_ROWS = [{**_SD3_JOINT, "widen": "text_encoder_3"}, "prompt_embeds.text_encoder_3"]
"""The rows of CLIP, extended with zeros to the width of T5, then the rows of T5."""

# the denoiser gets no mask: captions of one batch should be equally long
_KANDINSKY = replace(
    _HALF,
    components=_TWO,
    returns=("prompt_embeds_qwen", "prompt_embeds_clip", "prompt_cu_seqlens"),
    outputs=plain_forms("prompt_embeds_qwen", "prompt_embeds_clip"),
    pad={"prompt_embeds_qwen": _padded(_MASK)},
    trims={"prompt_embeds_qwen": "prompt_cu_seqlens"},
    rows={"prompt_embeds_qwen": RowWidth("text_encoder")},
    mask=_MASK,
    args={MAX_LENGTH_ARG: 512},
    cleaners=("ftfy",),
    template_tokens="prompt_template_encode_start_idx",
    rewrites_captions=True,
)

# what the connectors' transformers take in training: they put registers in the place of padding, up to the limit
_LTX2_TEXT = _row(
    _REWRITTEN,
    ("ltx2", "LTX2Pipeline", 1024),
    components=("text_encoder", "tokenizer", CONNECTORS),
    pad={"prompt_embeds": _padded(_MASK, LIMIT, side="left")},
    args={MAX_LENGTH_ARG: 1024},
    vae_patch=1,
)
_LTX2_AUDIO = replace(  # LTX-2.3
    _LTX2_TEXT,
    name="ltx2-audio",
    outputs=plain_forms("prompt_embeds", "audio_prompt_embeds"),
    pad={**_LTX2_TEXT.pad, "audio_prompt_embeds": _padded(None, LIMIT, side="left")},
    trims={"prompt_embeds": _MASK, "audio_prompt_embeds": _MASK},
    rows={
        "prompt_embeds": RowWidth(CONNECTORS, field="video_hidden_dim"),
        "audio_prompt_embeds": RowWidth(CONNECTORS, field="audio_hidden_dim"),
    },
)
_LTX2 = replace(_LTX2_TEXT, configured={"connectors.per_modality_projections": _LTX2_AUDIO})
_HUNYUAN = _row(
    _REWRITTEN,
    ("hunyuanvideo", "HunyuanVideoPipeline", 256),
    components=_TWO,
    returns=("prompt_embeds", "pooled_prompt_embeds", _MASK),
    outputs=_POOLED,
    args={
        "prompt_template": {DEFAULT_OF_CALL: "02b92d9533b63219915b0a2c32e1db45517aa24bd801de1286625ed4b948f890"},
        MAX_LENGTH_ARG: 256,
    },
)


def _hunyuan_i2v(name: str, every: int) -> TextFamily:
    """LLaVA sees the first frame as 24 x 24 patches. One of so many makes a row."""
    template = {DEFAULT_OF_CALL: "ddaef1a06cf03753a34e1d21a8c7462bc1ff3be7cc4f1842b309af8b8c8869ea"}
    return _row(
        _HUNYUAN,
        (name, "HunyuanVideoImageToVideoPipeline", 256),
        components=(*_TWO, "image_processor"),
        is_masked=False,
        pictures=PictureInput(rows=24 * 24 // every, most=1, role=FIRST_FRAME),
        args={"prompt_template": template, MAX_LENGTH_ARG: 256, "image_embed_interleave": every},
    )


_HUNYUAN_I2V = replace(
    _hunyuan_i2v("hunyuanvideo-i2v-33ch", 2),
    configured={"transformer.image_condition_type=token_replace": _hunyuan_i2v("hunyuanvideo-i2v", 4)},
)
_PIPELINES = (
    TextFamily("sd15", "StableDiffusionPipeline", 77, _EMBEDS, args={SKIP_ARG: None}),
    TextFamily(
        "sdxl",
        "StableDiffusionXLPipeline",
        77,
        _EMBEDS_AND_POOLED,
        _TWO,
        outputs={**_POOLED, "prompt_embeds": _of_both_clips("prompt_embeds")},
        args={SKIP_ARG: None},
        captioned=_ENCODERS[:2],
        parts={
            "text_encoder": EncoderPart("prompt_embeds.text_encoder", layer=-2, args=(SKIP_ARG,)),
            "text_encoder_2": EncoderPart("prompt_embeds.text_encoder_2", "pooled_prompt_embeds", -2, (SKIP_ARG,)),
        },
    ),
    replace(
        _SD3,
        name="sd3",
        max_tokens=256,
        components=(*_TWO, "text_encoder_3", "tokenizer_3"),
        captioned=_ENCODERS[:3],
        tokenizer="tokenizer_3",
        outputs={"prompt_embeds": {"join": _SD3_ROWS, "dim": -2}, "pooled_prompt_embeds": _SD3_POOLED},
        args={SKIP_ARG: None, MAX_LENGTH_ARG: 256},
        parts={**_SD3_PARTS, "text_encoder_3": EncoderPart("prompt_embeds.text_encoder_3", args=(MAX_LENGTH_ARG,))},
        without={"text_encoder_3": _SD3_WITHOUT_T5},
        script_args={MAX_LENGTH_ARG: 77},
    ),
    _FLUX,
    replace(_FLUX, name="flux-kontext", pipeline="FluxKontextPipeline"),
    replace(_FLUX, name="flux-fill", pipeline="FluxFillPipeline"),
    replace(_FLUX, name="flux-control", pipeline="FluxControlPipeline"),
    _row(_FLUX2, ("flux2", "Flux2Pipeline", 512), args={MAX_LENGTH_ARG: 512, "text_encoder_out_layers": [10, 20, 30]}),
    _row(
        _FLUX2,
        ("flux2-klein", "Flux2KleinPipeline", 512),
        args={MAX_LENGTH_ARG: 512, "text_encoder_out_layers": [9, 18, 27]},
        script_args={"text_encoder_out_layers": [10, 20, 30]},
    ),
    _row(
        _REWRITTEN,
        ("pixart-sigma", "PixArtSigmaPipeline", 300),
        args={"clean_caption": True, MAX_LENGTH_ARG: 300},
        cleaners=("beautifulsoup4", "ftfy"),
        script_args={"clean_caption": False},
        script_resizes="bilinear",
    ),
    _row(
        replace(_REWRITTEN, vae_patch=1, vae_dtype="bfloat16", script_resizes="bilinear"),
        ("sana", "SanaPipeline", 300),
        args=_sana_args("0c2a85f2ced0eb140197686156669a7b37a6b4c3987df943940f218eac443adf"),
        script_args={"complex_human_instruction": None},
    ),
    _row(
        _REWRITTEN,
        ("sana-video", "SanaVideoPipeline", 300),
        args=_sana_args("afbe331656279a82ca7c7fc670923bf3da5ad27854e10376441509884ad4b16e"),
    ),
    _row(_REWRITTEN, ("lumina2", "Lumina2Pipeline", 256), args={"system_prompt": None, MAX_LENGTH_ARG: 256}, vae_dtype="bfloat16"),
    _row(_ZERO_FILLED, ("wan", "WanPipeline", 512), args={MAX_LENGTH_ARG: 512}, cleaners=("ftfy",), rewrites_captions=True),
    _row(_ZERO_FILLED, ("cosmos", "CosmosTextToWorldPipeline", 512), args={MAX_LENGTH_ARG: 512}, stand_ins=("safety_checker",)),
    _row(_ZERO_FILLED, ("cosmos2", "Cosmos2TextToImagePipeline", 512), args={MAX_LENGTH_ARG: 512}, stand_ins=("safety_checker",)),
    _row(
        replace(_QWEN, is_masked=True, tokenizer_limit=1024, script_resizes="bilinear"),
        ("qwen-image", "QwenImagePipeline", 512),
        args={MAX_LENGTH_ARG: 512},
    ),
    _QWEN_EDIT,
    _row(_QWEN_EDIT, ("qwen-image-edit-plus", "QwenImageEditPlusPipeline", 131_072), pictures=PictureInput(area=384 * 384, dropped=64)),
    _row(_MASKED, ("ltx", "LTXPipeline", 128), args={MAX_LENGTH_ARG: 128}, is_masked=False, vae_patch=1),
    _LTX2,
    _row(_HALF, ("cogvideox", "CogVideoXPipeline", 226), args={MAX_LENGTH_ARG: 226}, script_resizes="bicubic"),
    _row(
        replace(_BOTH_HALF, is_masked=True, rewrites_captions=True, script_resizes="bilinear"),
        ("z-image", "ZImagePipeline", 512),
        # the pipeline takes a list of tensors without padding, which can be made by the mask
        pad={"prompt_embeds": _padded(_MASK)},
        mask=_MASK,
        args={MAX_LENGTH_ARG: 512},
    ),
    _row(
        _BOTH_HALF,
        ("chroma", "ChromaPipeline", 512),
        returns=("prompt_embeds", None, _MASK, None, None, None),
        # the pipeline adds its mask (1 or 0) to the logits of the attention, so padding is attended to as well
        outputs=plain_forms("prompt_embeds", _MASK),
        constants=_FLUX.constants,
        mask=_MASK,
        args={MAX_LENGTH_ARG: 512},
    ),
    _row(_QUOTED, ("hunyuanvideo15", "HunyuanVideo15Pipeline", 1000), pad=_quoted(256)),
    _row(_QUOTED, ("hunyuanimage", "HunyuanImagePipeline", 1000), pad=_quoted(128)),
    _row(
        _BOTH_HALF,
        ("cogview4", "CogView4Pipeline", 1024),
        pad={"prompt_embeds": _padded(_MASK, side="left")},
        mask=_MASK,
        args={MAX_LENGTH_ARG: 1024},
        length_step=16,
    ),
    _HUNYUAN,
    _HUNYUAN_I2V,
    _row(
        _MASKED,
        ("mochi", "MochiPipeline", 256),
        # the empty caption has no rows, but a batch of it alone still needs some
        pad={"prompt_embeds": _padded(_MASK, LIMIT)},
        args={MAX_LENGTH_ARG: 256},
        settings=("force_zeros_for_empty_prompt",),
        alone=frozenset({""}),  # as the last of a batch it makes all others empty
    ),
    _row(
        replace(_QWEN, is_masked=True),
        ("krea2", "Krea2Pipeline", 512),
        # the pipeline pads between the caption and the end of its template; the denoiser gives all of them one position
        pad={"prompt_embeds": {**_padded(_QWEN_MASK), "dim": -3}},
        args={MAX_LENGTH_ARG: 512},
        settings=("text_encoder_select_layers",),
        rows={"prompt_embeds": RowWidth("text_encoder", 12)},
    ),
    _row(
        _BOTH_HALF,
        ("hidream", "HiDreamImagePipeline", 128),
        components=(*_TWO, "text_encoder_3", "tokenizer_3", "text_encoder_4", "tokenizer_4"),
        captioned=_ENCODERS,
        tokenizer="tokenizer_4",
        returns=("prompt_embeds_t5", None, "prompt_embeds_llama3", None, "pooled_prompt_embeds", None),
        # the denoiser gets no mask: padding is part of the embeddings
        outputs=plain_forms("prompt_embeds_t5", "prompt_embeds_llama3", "pooled_prompt_embeds"),
        batch_axes={"prompt_embeds_llama3": 1},
        rows={"prompt_embeds_t5": RowWidth("text_encoder_3"), "prompt_embeds_llama3": RowWidth("text_encoder_4", "num_hidden_layers")},
        args={MAX_LENGTH_ARG: 128},
    ),
    _row(
        _REWRITTEN,
        ("ideogram4", "Ideogram4Pipeline", 2048),
        # the mask is the pipeline's `indicator`, without a picture, whose tokens would follow
        returns=("prompt_embeds", None, None, _MASK),
        pad={"prompt_embeds": _padded(_MASK, side="left")},
        args={"grid_h": 0, "grid_w": 0, MAX_LENGTH_ARG: 2048},
        rows={"prompt_embeds": RowWidth("text_encoder", 13)},
        template_tokens="",
        vae_patch=1,
        vae_dtype="bfloat16",
        patches_first=True,
    ),
    _row(
        replace(_BOTH_HALF, vae_patch=1),
        # the tokenizer's own limit; captions are encoded one by one and returned as a list
        ("ernie-image", "ErnieImagePipeline", 131_072),
        returns=("prompt_embeds",),
        pad={"prompt_embeds": _padded(_MASK)},
        mask=_MASK,
        vae_config={"batch_norm_eps": 1e-5},
    ),
    _row(_KANDINSKY, ("kandinsky5", "Kandinsky5T2VPipeline", 512)),
    _row(_KANDINSKY, ("kandinsky5-t2i", "Kandinsky5T2IPipeline", 512), vae_dtype="bfloat16", vae_config={"shift_factor": None}),
    _row(
        replace(_QWEN, vae_patch=1),
        ("qwen-image-2.1", "QwenImage21Pipeline", 131_072),
        components=("text_encoder", "processor"),
        tokenizer="processor",
        returns=("prompt_embeds", _QWEN_MASK, None),
        template_tokens="_drop_idx",
    ),
    # the denoiser gets zeros up to this length; the mask is required, but not used
    _row(_MASKED, ("auraflow", "AuraFlowPipeline", 256), args={MAX_LENGTH_ARG: 256}, pad={"prompt_embeds": _padded(_MASK, LIMIT)}),
)
TEXT_FAMILIES: Mapping[str, TextFamily] = MappingProxyType({row.pipeline: row for row in _PIPELINES if row.pipeline is not None})
