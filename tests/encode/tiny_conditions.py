"""Pipelines whose denoiser takes more than text and latents, with random weights of a few kilobytes."""

from typing import Any

from tests.encode import tiny, tiny_families
from tests.encode.tiny_families import of, t5, transformer


def clip_vision():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "projection_dim": 16}
    config = of("transformers", "CLIPVisionConfig", **sizes, image_size=28, patch_size=14)
    return of("transformers", "CLIPVisionModel", config=config).eval()


def wan_i2v(*, ends=1, is_shown=True, **options):
    """Wan 2.1 with one picture or two, or (without a vision encoder) Wan 2.2."""
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "cross_attn_norm": True}
    sizes = {
        "in_channels": 16 if options else 36,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 256,
        "ffn_dim": 32,
        "rope_max_seq_len": 32,
    }
    shown = {"image_dim": 16, "added_kv_proj_dim": 24, "pos_embed_seq_len": 5 * ends if ends > 1 else None} if is_shown else {}
    model = transformer("WanTransformer3DModel", patch_size=(1, 2, 2), qk_norm="rms_norm_across_heads", **heads, **sizes, **shown)
    parts = {"tokenizer": tiny.t5_tokenizer(), "text_encoder": t5(kind="UMT5"), "vae": tiny_families.wan_vae(), "transformer": model}
    processor = of("transformers", "CLIPImageProcessorPil", size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    parts |= (
        {"image_encoder": clip_vision(), "image_processor": processor} if is_shown else {"image_encoder": None, "image_processor": None}
    )
    return of("diffusers", "WanImageToVideoPipeline", **parts, **options, scheduler=tiny_families.scheduler())


def wan_vace():
    parts = {name: part for name, part in tiny_families.wan().components.items() if name not in {"transformer", "transformer_2"}}
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "cross_attn_norm": True}
    sizes = {"text_dim": 32, "freq_dim": 256, "ffn_dim": 32, "rope_max_seq_len": 32, "vace_layers": [0], "vace_in_channels": 96}
    model = transformer("WanVACETransformer3DModel", patch_size=(1, 2, 2), qk_norm="rms_norm_across_heads", **heads, **sizes)
    return of("diffusers", "WanVACEPipeline", **parts, transformer=model)


def ltx_i2v():
    plain = tiny_families.ltx()
    return of("diffusers", "LTXImageToVideoPipeline", **plain.components)


def ltx2_i2v():
    return of("diffusers", "LTX2ImageToVideoPipeline", **tiny_families.ltx2().components)


def siglip():
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = of("transformers", "SiglipVisionConfig", **sizes, image_size=28, patch_size=14)
    return of("transformers", "SiglipVisionModel", config=config).eval()


def hunyuan15_i2v():
    plain = tiny_families.hunyuanvideo15()
    processor = of("transformers", "SiglipImageProcessorPil", size={"height": 28, "width": 28})
    parts = {**plain.components, "image_encoder": siglip(), "feature_extractor": processor}
    return of("diffusers", "HunyuanVideo15ImageToVideoPipeline", **parts)


def llava():
    """A tokenizer with LLaVA's marks, and a LLaVA that sees a picture as 2 x 2 patches."""
    reader = tiny_families.gemma_tokenizer()
    reader.add_special_tokens({"additional_special_tokens": ["<image>", "<|end_header_id|>"]})
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**tiny_families.SMALL, "vocab_size": 400, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    parts = {"vision_config": of("transformers", "CLIPVisionConfig", **vision), "text_config": of("transformers", "LlamaConfig", **text)}
    config = of("transformers", "LlavaConfig", **parts, image_token_index=reader.convert_tokens_to_ids("<image>"), image_seq_length=4)
    config.pad_token_id = 0
    return {"tokenizer": reader, "text_encoder": of("transformers", "LlavaForConditionalGeneration", config=config).eval()}


LLAVA_TEMPLATE = {
    "template": "<|end_header_id|><image>a<|end_header_id|>{}xyz<|end_header_id|>\n",
    "crop_start": 5,
    "image_emb_start": 2,
    "image_emb_end": 6,
    "image_emb_len": 4,
}


def hunyuan_i2v(*, kind):
    plain = tiny_families.hunyuanvideo()
    sizes = {**plain.transformer.config, "in_channels": 9 if kind == "latent_concat" else 4, "image_condition_type": kind}
    sizes = {name: value for name, value in sizes.items() if not name.startswith("_")}
    processor = of("transformers", "CLIPImageProcessorPil", size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    parts = {**plain.components, **llava(), "image_processor": processor}
    parts["transformer"] = tiny_families.awake(transformer("HunyuanVideoTransformer3DModel", **sizes))
    return of("diffusers", "HunyuanVideoImageToVideoPipeline", **parts)


def sdxl_inpaint():
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 48 + 6 * 8}
    parts = {
        "vae": tiny.vae(scaling_factor=0.13025),
        "text_encoder": tiny_families.clip(),
        "text_encoder_2": tiny_families.clip(48, projected=True),
    }
    tokenizers = {"tokenizer": tiny.clip_tokenizer(), "tokenizer_2": tiny.clip_tokenizer(pad="!")}
    noise = of("diffusers", "EulerDiscreteScheduler")
    model = tiny_families.unet(80, **added, in_channels=9, out_channels=4)
    return of("diffusers", "StableDiffusionXLInpaintPipeline", **parts, **tokenizers, unet=model, scheduler=noise)


def flux_fill():
    plain = {name: part for name, part in tiny_families.flux().components.items() if name not in {"image_encoder", "feature_extractor"}}
    model = tiny_families.flux_transformer(channels=64 + 64 + 4 * 2**2, out_channels=64, pooled_projection_dim=32)
    return of("diffusers", "FluxFillPipeline", **{**plain, "transformer": model})


PIPELINES: dict[str, Any] = {
    "wan-i2v": (wan_i2v, {}, "transformer"),
    "wan-flf2v": (wan_i2v, {"ends": 2}, "transformer"),
    "wan22-i2v": (wan_i2v, {"is_shown": False}, "transformer"),
    "wan22-ti2v": (wan_i2v, {"is_shown": False, "expand_timesteps": True}, "transformer"),
    "wan-vace": (wan_vace, {}, "transformer"),
    "ltx-i2v": (ltx_i2v, {}, "transformer"),
    "ltx2-i2v": (ltx2_i2v, {}, "transformer"),
    "hunyuan15-i2v": (hunyuan15_i2v, {}, "transformer"),
    "hunyuan-i2v": (hunyuan_i2v, {"kind": "token_replace"}, "transformer"),
    "hunyuan-i2v-33ch": (hunyuan_i2v, {"kind": "latent_concat"}, "transformer"),
    "flux-fill": (flux_fill, {}, "transformer"),
    "sdxl-inpaint": (sdxl_inpaint, {}, "unet"),
}


def build(name, folder):
    """Build a pipeline, and save it without the weights of its denoiser."""
    import torch

    torch.manual_seed(0)
    make, options, denoiser = PIPELINES[name]
    pipeline = make(**options)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    (folder / denoiser / "diffusion_pytorch_model.safetensors").write_bytes(b"these are no weights")
    return pipeline
