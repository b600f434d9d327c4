"""One pipeline of each family, with random weights of a few kilobytes and a denoiser that runs. Built from configs alone.

Byte-level tokenizers give every character tokens, so that empty, short and long captions differ as they do with real ones.
"""

import json
from dataclasses import dataclass
from typing import Any

from scripts.tiny_models import is_transformers_4, of_files
from tests.encode import tiny
from tests.encode.tiny import library

CONTENT = "(m['content'] if m['content'] is string else m['content'][0]['text'])"
QWEN_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + " + CONTENT + " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """How a tiny pipeline is built and run."""

    build: Any
    denoisers: tuple[str, ...] = ("transformer",)
    encode_args: Any = None
    """Arguments of `encode_prompt` and `__call__` where the family's defaults are too much for something so tiny."""
    run: Any = None
    """Arguments of `__call__`."""
    inputs: Any = None
    """Makes arguments of `__call__` of a pipeline and a batch, and what stands in the place of the pipeline's own attributes."""


def of(library_name, class_name, **config):
    made = tiny.of_diffusers(class_name) if library_name == "diffusers" else getattr(library(library_name), class_name)
    return made(**config)


def transformer(class_name, **config):
    return of("diffusers", class_name, **config)


def awake(model):
    """A denoiser whose last layers are not zero, as they are before training: there a caption makes no difference."""
    import torch

    for weights in model.parameters():
        if not weights.any():
            torch.nn.init.normal_(weights, std=0.1)
    return model


def scheduler(**config):
    return of("diffusers", "FlowMatchEulerDiscreteScheduler", **config)


# Tokenizers


def qwen_tokenizer(padding_side="right"):
    vocabulary = {symbol: index for index, symbol in enumerate(tiny.ALPHABET)}
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocabulary[token] = len(vocabulary)
    options = {"model_max_length": 131072, "padding_side": padding_side}
    if is_transformers_4():
        made = of_files("Qwen2Tokenizer", vocabulary, **options)
    else:
        made = of("transformers", "Qwen2Tokenizer", vocab=vocabulary, merges=[], **options)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = QWEN_TEMPLATE
    return made


def gemma_tokenizer(padding_side="right"):
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for code in range(33, 127):
        vocabulary.setdefault(chr(code), len(vocabulary))
    options = {"model_max_length": 8192, "padding_side": padding_side}
    if is_transformers_4():  # whose GemmaTokenizer wants SentencePiece; the pipelines that are published have the fast one
        tokenizers = library("tokenizers")
        model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        return of("transformers", "GemmaTokenizerFast", tokenizer_object=tokenizer, **options)
    made = of("transformers", "GemmaTokenizer", vocab=vocabulary, merges=[], **options)
    start = [("<bos>", vocabulary["<bos>"])]
    made.backend_tokenizer.post_processor = library("tokenizers").processors.TemplateProcessing(single="<bos> $A", special_tokens=start)
    return made


# Text encoders

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of captions padded to hundreds of tokens, attention takes most of the time, and as often as there are heads."""


def clip(width=32, *, projected=False, positions=77):
    return tiny.clip_text(width, projected=projected, positions=positions)


def t5(width=32, *, kind="T5", vocabulary=400):
    sizes = {"vocab_size": vocabulary, "d_model": width, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = of("transformers", f"{kind}Config", **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.1)
    return getattr(library("transformers"), f"{kind}EncoderModel")(config).eval()


def qwen3(layers=3, *, class_name="Qwen3Model"):
    config = of("transformers", "Qwen3Config", **SMALL, num_hidden_layers=layers, head_dim=8, vocab_size=300, max_position_embeddings=2048)
    return getattr(library("transformers"), class_name)(config).eval()


def qwen_vl(*, text_only=False):
    rope = {"rope_scaling": {"mrope_section": [2, 2, 4], "rope_type": "default", "type": "default"}, "rope_theta": 1e6}
    text = {**SMALL, **rope, "num_hidden_layers": 3, "vocab_size": 300, "max_position_embeddings": 4096}
    if text_only:
        return library("transformers").Qwen2_5_VLTextModel(of("transformers", "Qwen2_5_VLTextConfig", **text)).eval()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    marks = ("vision_end", "vision_start", "vision", "image", "video")
    tokens = {f"{mark}_token_id": number for number, mark in enumerate(marks, 295)}
    config = of("transformers", "Qwen2_5_VLConfig", text_config=text, vision_config=vision, hidden_size=32, vocab_size=300, **tokens)
    return library("transformers").Qwen2_5_VLForConditionalGeneration(config).eval()


def gemma2():
    config = of("transformers", "Gemma2Config", **SMALL, vocab_size=400, num_hidden_layers=3, head_dim=8, max_position_embeddings=8192)
    return library("transformers").Gemma2Model(config).eval()


def llama(class_name="LlamaModel"):
    sizes = {**SMALL, "vocab_size": 400, "num_hidden_layers": 4, "max_position_embeddings": 4096}
    config = of("transformers", "LlamaConfig", **sizes, pad_token_id=0, bos_token_id=2, eos_token_id=1)
    return getattr(library("transformers"), class_name)(config).eval()


def glm():
    sizes = {**SMALL, "vocab_size": 400, "num_hidden_layers": 3, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1}
    return library("transformers").GlmModel(of("transformers", "GlmConfig", **sizes)).eval()


# VAEs


def flux_vae():
    return tiny.vae(16, 0.3611, 0.1159, use_quant_conv=False, use_post_quant_conv=False)


def wan_vae(**options):
    sizes = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return of("diffusers", "AutoencoderKLWan", **{**sizes, **options}).eval()


def wan22_vae():
    statistics = {"z_dim": 8, "latents_mean": [i / 4 - 1 for i in range(8)], "latents_std": [0.5 + i / 4 for i in range(8)]}
    residual = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "base_dim": 8, "decoder_base_dim": 8}
    return wan_vae(**statistics, **residual, scale_factor_spatial=16, dim_mult=[1, 1, 1, 1])


def qwen21_vae():
    statistics = {"latents_mean": [0.1, -0.2, 0.3, -0.4], "latents_std": [0.5, 1.5, 2.5, 3.5]}
    sizes = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1, 1], "num_res_blocks": 1}
    return of("diffusers", "AutoencoderKLQwenImage21", **sizes, **statistics).eval()


def hunyuan_image_vae():
    channels = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
    more = {"spatial_compression_ratio": 8, "sample_size": 64, "scaling_factor": 0.75289}
    matches = {"downsample_match_channel": False, "upsample_match_channel": False}
    return of("diffusers", "AutoencoderKLHunyuanImage", **channels, **more, **matches).eval()


def cosmos_vae():
    statistics = {"latents_mean": [i / 20 - 1 for i in range(4 * 20)], "latents_std": [0.5 + i / 20 for i in range(4 * 20)]}
    widths = {"encoder_block_out_channels": (8, 8, 8, 8), "decode_block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "num_layers": 1}
    return of("diffusers", "AutoencoderKLCosmos", **widths, **statistics, attention_resolutions=(8,), resolution=64).eval()


def flux2_vae():
    import torch

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "block_out_channels": (8, 16)}
    quant = {"use_quant_conv": False, "use_post_quant_conv": False}
    made = of(
        "diffusers", "AutoencoderKLFlux2", **blocks, **quant, layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=32
    )
    # Statistics as training leaves them; fresh ones are 0 and 1, and would hide that they are not used.
    made.bn.running_mean.copy_(torch.linspace(-1, 1, 16))
    made.bn.running_var.copy_(torch.linspace(0.5, 3, 16))
    return made.eval()


def dc_vae():
    encoder = {"encoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8)}
    decoder = {"decoder_block_types": ("ResBlock", "EfficientViTBlock"), "decoder_block_out_channels": (8, 8)}
    layers = {"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": [1, 1], "latent_channels": 4, "attention_head_dim": 2}
    scales = {"encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)), "scaling_factor": 0.41407}
    ways = {"downsample_block_type": "conv", "upsample_block_type": "interpolate"}
    norms = {"decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"}
    return of("diffusers", "AutoencoderDC", in_channels=3, **encoder, **decoder, **layers, **scales, **ways, **norms).eval()


def qwen_vae():
    statistics = {"latents_mean": [0.1, -0.2, 0.3, -0.4], "latents_std": [0.5, 1.5, 2.5, 3.5]}
    sizes = {"base_dim": 24, "z_dim": 4, "dim_mult": [1, 2, 4], "num_res_blocks": 1, "temperal_downsample": [False, True]}
    return of("diffusers", "AutoencoderKLQwenImage", **sizes, **statistics).eval()


def ltx_vae():
    import torch

    sizes = {"latent_channels": 8, "block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4, "patch_size": 1}
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5, "decoder_inject_noise": (False,) * 5}
    scaling = {"spatio_temporal_scaling": (True, True, False, False), "decoder_spatio_temporal_scaling": (True, True, False, False)}
    up = {"upsample_residual": (False,) * 4, "upsample_factor": (1,) * 4, "timestep_conditioning": False}
    made = of(
        "diffusers", "AutoencoderKLLTXVideo", **sizes, **layers, **scaling, **up, patch_size_t=1, encoder_causal=True, decoder_causal=False
    )
    made.latents_mean.copy_(torch.linspace(-1, 1, 8))
    made.latents_std.copy_(torch.linspace(0.5, 3, 8))
    return made.eval()


def ltx2_vae():
    import torch

    blocks = {"latent_channels": 4, "block_out_channels": (8, 8, 8), "decoder_block_out_channels": (8, 8, 8), "patch_size": 1}
    layers = {"layers_per_block": (1,) * 4, "decoder_layers_per_block": (1,) * 4, "decoder_inject_noise": (False,) * 4}
    ways = dict.fromkeys(("downsample_type", "upsample_type"), ("spatial", "temporal", "spatiotemporal"))
    up = {"upsample_residual": (False,) * 3, "upsample_factor": (1,) * 3, "decoder_causal": False}
    scaling = dict.fromkeys(("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"), (True,) * 3)
    ratios = {"spatial_compression_ratio": 4, "temporal_compression_ratio": 4}
    made = of("diffusers", "AutoencoderKLLTX2Video", **blocks, **layers, **ways, **up, **scaling, **ratios)
    made.latents_mean.copy_(torch.linspace(-1, 1, 4))
    made.latents_std.copy_(torch.linspace(0.5, 3, 4))
    return made.eval()


def cogvideox_vae():
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    sizes = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}
    return of("diffusers", "AutoencoderKLCogVideoX", **blocks, **sizes, temporal_compression_ratio=4).eval()


def hunyuan_vae():
    blocks = {"down_block_types": ("HunyuanVideoDownBlock3D",) * 4, "up_block_types": ("HunyuanVideoUpBlock3D",) * 4}
    sizes = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
    return of("diffusers", "AutoencoderKLHunyuanVideo", **blocks, **sizes, act_fn="silu", mid_block_add_attention=True).eval()


def hunyuan15_vae():
    sizes = {"latent_channels": 4, "block_out_channels": (16, 16), "layers_per_block": 1}
    ratios = {"spatial_compression_ratio": 4, "temporal_compression_ratio": 2}
    matches = {"downsample_match_channel": False, "upsample_match_channel": False}
    return of("diffusers", "AutoencoderKLHunyuanVideo15", **sizes, **ratios, **matches).eval()


def mochi_vae():
    sizes = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4, "layers_per_block": (1,) * 5}
    return of("diffusers", "AutoencoderKLMochi", latent_channels=12, out_channels=3, **sizes).eval()


# Pipelines


def unet(width, **more):
    down = ("DownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16, "attention_head_dim": 8, "norm_num_groups": 8}
    return of("diffusers", "UNet2DConditionModel", **sizes, down_block_types=down, up_block_types=up, cross_attention_dim=width, **more)


def sd15():
    parts = {"vae": tiny.vae(), "text_encoder": clip(), "tokenizer": tiny.clip_tokenizer(), "unet": unet(32)}
    unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    noise = of("diffusers", "DDIMScheduler", steps_offset=1, clip_sample=False)
    return of("diffusers", "StableDiffusionPipeline", **parts, **unused, scheduler=noise)


def sdxl():
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 48 + 6 * 8}
    parts = {"vae": tiny.vae(scaling_factor=0.13025), "text_encoder": clip(), "text_encoder_2": clip(48, projected=True)}
    tokenizers = {"tokenizer": tiny.clip_tokenizer(), "tokenizer_2": tiny.clip_tokenizer(pad="!")}
    noise = of("diffusers", "EulerDiscreteScheduler")
    return of("diffusers", "StableDiffusionXLPipeline", **parts, **tokenizers, unet=unet(80, **added), scheduler=noise)


def sd3():
    heads = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32}
    sizes = {"sample_size": 32, "patch_size": 1, "in_channels": 16, "out_channels": 16}
    model = transformer("SD3Transformer2DModel", **heads, **sizes, joint_attention_dim=96, pooled_projection_dim=80)
    vae = tiny.vae(16, 1.5305, 0.0609, use_quant_conv=False, use_post_quant_conv=False)
    encoders = {"text_encoder": clip(projected=True), "text_encoder_2": clip(48, projected=True), "text_encoder_3": t5(96)}
    tokenizers = {"tokenizer": tiny.clip_tokenizer(), "tokenizer_2": tiny.clip_tokenizer(pad="!"), "tokenizer_3": tiny.t5_tokenizer()}
    return of("diffusers", "StableDiffusion3Pipeline", transformer=model, scheduler=scheduler(), vae=vae, **encoders, **tokenizers)


def flux_transformer(class_name="FluxTransformer2DModel", channels=64, **more):
    heads = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
    return transformer(class_name, patch_size=1, in_channels=channels, axes_dims_rope=[4, 4, 8], **heads, **more)


def flux(class_name="FluxPipeline"):
    encoders = {"vae": flux_vae(), "text_encoder": clip(), "text_encoder_2": t5()}
    tokenizers = {"tokenizer": tiny.clip_tokenizer(), "tokenizer_2": tiny.t5_tokenizer()}
    model = flux_transformer(pooled_projection_dim=32)
    return of("diffusers", class_name, scheduler=scheduler(), **encoders, **tokenizers, transformer=model)


def qwen3_vl(class_name="Qwen3VLModel", layers=36):
    rope = {"rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"}, "rope_theta": 1e6}
    text = {**SMALL, "num_hidden_layers": layers, "vocab_size": 310, "head_dim": 8, "max_position_embeddings": 4096, **rope}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    }
    config = of("transformers", "Qwen3VLConfig", text_config=text, vision_config=vision)
    return getattr(library("transformers"), class_name)(config).eval()


def mistral3(class_name="Mistral3ForConditionalGeneration", layers=31):
    text = {**SMALL, "vocab_size": 300, "num_hidden_layers": layers, "head_dim": 8, "max_position_embeddings": 4096}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    parts = {"text_config": {**text, "model_type": "mistral"}, "vision_config": {**vision, "patch_size": 14, "model_type": "pixtral"}}
    return of("transformers", class_name, config=of("transformers", "Mistral3Config", **parts)).eval()


def flux2(class_name="Flux2Pipeline", text=mistral3, **options):
    tiny.of_diffusers(class_name)
    heads = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 96}
    sizes = {"patch_size": 1, "in_channels": 16, "timestep_guidance_channels": 256, "axes_dims_rope": [4] * 4}
    parts = {"vae": flux2_vae(), "text_encoder": text(), "tokenizer": qwen_tokenizer()}
    model = transformer("Flux2Transformer2DModel", **heads, **sizes, guidance_embeds=not options)
    return of("diffusers", class_name, scheduler=scheduler(), **parts, transformer=model, **options)


def flux2klein():
    return flux2("Flux2KleinPipeline", lambda: qwen3(30, class_name="Qwen3ForCausalLM"), is_distilled=False)


def pixart():
    sizes = {"sample_size": 8, "num_layers": 1, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 3, "caption_channels": 32}
    norms = {"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6, "num_embeds_ada_norm": 1000}
    channels = {"in_channels": 4, "out_channels": 8, "cross_attention_dim": 24}
    more = {"attention_bias": True, "activation_fn": "gelu-approximate", "use_additional_conditions": False}
    model = transformer("PixArtTransformer2DModel", **sizes, **norms, **channels, **more)
    parts = {"tokenizer": tiny.t5_tokenizer(), "text_encoder": t5(), "vae": tiny.vae(), "transformer": model}
    return of("diffusers", "PixArtSigmaPipeline", **parts, scheduler=of("diffusers", "DDIMScheduler"))


def sana():
    heads = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 4, "num_cross_attention_heads": 2}
    widths = {"cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 32}
    model = transformer("SanaTransformer2DModel", patch_size=1, in_channels=4, out_channels=4, sample_size=32, **heads, **widths)
    parts = {"tokenizer": gemma_tokenizer(), "text_encoder": gemma2(), "vae": dc_vae(), "transformer": model}
    return of("diffusers", "SanaPipeline", **parts, scheduler=scheduler(shift=7.0))


def lumina2():
    sizes = {"sample_size": 4, "patch_size": 2, "in_channels": 16, "hidden_size": 8, "num_layers": 2, "multiple_of": 16, "cap_feat_dim": 32}
    heads = {"num_attention_heads": 1, "num_kv_heads": 1, "ffn_dim_multiplier": None, "scaling_factor": 1.0, "axes_dim_rope": [4, 2, 2]}
    model = transformer("Lumina2Transformer2DModel", **sizes, **heads)
    parts = {"transformer": model, "vae": flux_vae(), "text_encoder": gemma2(), "tokenizer": gemma_tokenizer()}
    return of("diffusers", "Lumina2Pipeline", **parts, scheduler=scheduler())


def wan(vae=None, channels=16):
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "cross_attn_norm": True}
    sizes = {"in_channels": channels, "out_channels": channels, "text_dim": 32, "freq_dim": 256, "ffn_dim": 32, "rope_max_seq_len": 32}
    model = transformer("WanTransformer3DModel", patch_size=(1, 2, 2), qk_norm="rms_norm_across_heads", **heads, **sizes)
    parts = {"tokenizer": tiny.t5_tokenizer(), "text_encoder": t5(kind="UMT5"), "vae": vae or wan_vae(), "transformer": model}
    return of("diffusers", "WanPipeline", **parts, scheduler=scheduler())


def qwenimage():
    heads = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 32, "axes_dims_rope": (8, 4, 4)}
    model = transformer("QwenImageTransformer2DModel", patch_size=2, in_channels=16, out_channels=4, guidance_embeds=False, **heads)
    parts = {"vae": qwen_vae(), "text_encoder": qwen_vl(), "tokenizer": qwen_tokenizer(), "transformer": model}
    return of("diffusers", "QwenImagePipeline", **parts, scheduler=scheduler())


def qwen_edit(class_name):
    """A pipeline whose text encoder sees pictures, with everything but its processor, which torchvision would have to help construct."""
    pipeline = qwenimage()
    reader = with_pictures(qwen_tokenizer())
    for field, token in PICTURE_MARKS.items():
        setattr(pipeline.text_encoder.config, field, reader.convert_tokens_to_ids(token))
    parts = {name: getattr(pipeline, name) for name in ("vae", "text_encoder", "transformer", "scheduler")}
    return of("diffusers", class_name, **parts, tokenizer=reader, processor=None)


PICTURE_MARKS = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>", "image_token_id": "<|image_pad|>"}


def with_pictures(reader):
    reader.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *PICTURE_MARKS.values()]})
    return reader


def qwen_processor(tokenizer, image_processor):
    """A Qwen2VLProcessor without what its constructor looks up: torchvision's video processor."""
    made = library("transformers").Qwen2VLProcessor.__new__(library("transformers").Qwen2VLProcessor)
    made.tokenizer, made.image_processor, made.video_processor, made.chat_template = (
        tokenizer,
        image_processor,
        None,
        tokenizer.chat_template,
    )
    made.image_token, made.video_token, made.video_token_id = "<|image_pad|>", "<|video_pad|>", -1
    made.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return made


def save_qwen_edit(pipeline, folder):
    """Give it a processor, and save it as the published ones are."""
    pictures = library("transformers").Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)
    pipeline.processor = qwen_processor(pipeline.tokenizer, pictures)
    save(Family(None), pipeline, folder)


def ltx():
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 1, "caption_channels": 32}
    model = transformer("LTXVideoTransformer3DModel", in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, **heads)
    parts = {"vae": ltx_vae(), "text_encoder": t5(), "tokenizer": tiny.t5_tokenizer(), "transformer": model}
    return of("diffusers", "LTXPipeline", **parts, scheduler=scheduler())


def gemma3(layers=3):
    text = {**SMALL, "vocab_size": 400, "num_hidden_layers": layers, "head_dim": 8, "max_position_embeddings": 2048, "sliding_window": 64}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    sizes = {"text_config": text, "vision_config": {**vision, "patch_size": 14}, "mm_tokens_per_image": 4, "image_token_index": 399}
    return of("transformers", "Gemma3ForConditionalGeneration", config=of("transformers", "Gemma3Config", **sizes)).eval()


def ltx2(**connected):
    tiny.of_diffusers("LTX2Pipeline")
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    rope = {"rope_double_precision": False, "rope_type": "split"}
    ways = {f"{way}_connector_{name}": size for way in ("video", "audio") for name, size in CONNECTOR.items()}
    connectors = LTX2TextConnectors(caption_channels=32, text_proj_in_factor=4, **ways, **rope, **connected)
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 1, "caption_channels": 32}
    audio = {"audio_num_attention_heads": 4, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 32}
    sizes = {"in_channels": 4, "out_channels": 4, "audio_in_channels": 4, "audio_out_channels": 4}
    model = transformer("LTX2VideoTransformer3DModel", **heads, **audio, **sizes, **rope)
    mel = {"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1, "resolution": 32, "latent_channels": 2, "mel_bins": 8}
    sound = {"audio_vae": of("diffusers", "AutoencoderKLLTX2Audio", **mel)}
    sound["vocoder"] = LTX2Vocoder(16, 32, 2, [4, 4], [2, 2], [3], [[1, 3, 5]], output_sampling_rate=16000)
    parts = {"vae": ltx2_vae(), "text_encoder": gemma3(), "tokenizer": gemma_tokenizer("left"), "connectors": connectors.eval()}
    return of("diffusers", "LTX2Pipeline", **parts, **sound, transformer=model, scheduler=scheduler())


def ltx2_inputs(pipeline, batch):
    """What a trainer does with a batch: it runs the connectors' transformers."""
    import torch

    connectors = pipeline.connectors

    def trained(embeds, mask, **_options):
        added = (mask[:, None, None].to(embeds.dtype) - 1) * torch.finfo(embeds.dtype).max
        video, _ = connectors.video_connector(embeds, added)
        audio, _ = connectors.audio_connector(batch.get("audio_prompt_embeds", embeds), added)
        return video, audio, torch.ones_like(mask)  # registers stand in the place of padding

    return {"connectors": trained}


def cogvideox():
    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "time_embed_dim": 2, "text_embed_dim": 32, "num_layers": 1}
    sizes = {"in_channels": 4, "out_channels": 4, "sample_width": 2, "sample_height": 2, "sample_frames": 9, "patch_size": 2}
    model = transformer("CogVideoXTransformer3DModel", **heads, **sizes, temporal_compression_ratio=4, max_text_seq_length=16)
    parts = {"tokenizer": tiny.t5_tokenizer(), "text_encoder": t5(), "vae": cogvideox_vae(), "transformer": model}
    return of("diffusers", "CogVideoXPipeline", **parts, scheduler=of("diffusers", "CogVideoXDDIMScheduler"))


def zimage():
    heads = {"n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "norm_eps": 1e-5, "qk_norm": True, "cap_feat_dim": 32}
    rope = {"rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": [8, 4, 4], "axes_lens": [1024, 32, 32]}
    model = transformer("ZImageTransformer2DModel", all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, **heads, **rope)
    parts = {"vae": flux_vae(), "text_encoder": qwen3(), "tokenizer": qwen_tokenizer(), "transformer": model}
    return of("diffusers", "ZImagePipeline", **parts, scheduler=scheduler())


def without_padding(_pipeline, batch):
    rows = zip(batch["prompt_embeds"], batch["prompt_attention_mask"].bool(), strict=True)
    return {"prompt_embeds": [row[mask] for row, mask in rows]}


def chroma():
    approximator = {"approximator_hidden_dim": 32, "approximator_layers": 1, "approximator_num_channels": 16}
    model = flux_transformer("ChromaTransformer2DModel", **approximator)
    parts = {"vae": flux_vae(), "text_encoder": t5(), "tokenizer": tiny.t5_tokenizer(), "transformer": model}
    return of("diffusers", "ChromaPipeline", **parts, scheduler=scheduler())


def hunyuanvideo():
    heads = {"num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    sizes = {"in_channels": 4, "out_channels": 4, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 32, "pooled_projection_dim": 32}
    model = transformer("HunyuanVideoTransformer3DModel", **heads, **sizes, guidance_embeds=True, rope_axes_dim=(2, 4, 4))
    parts = {"text_encoder": llama(), "tokenizer": gemma_tokenizer(), "transformer": model, "vae": hunyuan_vae()}
    pooled = {"text_encoder_2": clip(), "tokenizer_2": tiny.clip_tokenizer()}
    return of("diffusers", "HunyuanVideoPipeline", **parts, **pooled, scheduler=scheduler())


def hunyuanvideo15():
    tiny.of_diffusers("HunyuanVideo15Pipeline")
    from diffusers.guiders import ClassifierFreeGuidance

    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_refiner_layers": 1, "mlp_ratio": 2.0}
    widths = {"text_embed_dim": 32, "text_embed_2_dim": 32, "image_embed_dim": 12, "in_channels": 9, "out_channels": 4}
    sizes = {"patch_size": 1, "patch_size_t": 1, "rope_axes_dim": (2, 2, 4), "target_size": 16, "task_type": "t2v"}
    tokenizers = {"tokenizer": qwen_tokenizer(), "tokenizer_2": of("transformers", "ByT5Tokenizer")}
    text = qwen_vl(text_only=True)
    model = transformer("HunyuanVideo15Transformer3DModel", **heads, **widths, **sizes)
    parts = {"text_encoder": text, "transformer": model, "vae": hunyuan15_vae(), "text_encoder_2": t5(), **tokenizers}
    guider = ClassifierFreeGuidance(guidance_scale=1.0)
    return of("diffusers", "HunyuanVideo15Pipeline", **parts, scheduler=scheduler(), guider=guider)


def cogview4():
    heads = {"num_layers": 1, "attention_head_dim": 4, "num_attention_heads": 4, "text_embed_dim": 32, "time_embed_dim": 8}
    model = transformer("CogView4Transformer2DModel", patch_size=2, in_channels=16, out_channels=16, condition_dim=4, **heads)
    parts = {"tokenizer": gemma_tokenizer("left"), "text_encoder": glm(), "vae": tiny.vae(16, 1.0, 0.0), "transformer": model}
    return of("diffusers", "CogView4Pipeline", **parts, scheduler=scheduler())


def mochi():
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "pooled_projection_dim": 16, "qk_norm": "rms_norm"}
    sizes = {"patch_size": 2, "in_channels": 12, "text_embed_dim": 32, "time_embed_dim": 4, "max_sequence_length": 256}
    model = transformer("MochiTransformer3DModel", **heads, **sizes, activation_fn="swiglu")
    parts = {"vae": mochi_vae(), "text_encoder": t5(), "tokenizer": tiny.t5_tokenizer(), "transformer": model}
    return of("diffusers", "MochiPipeline", **parts, scheduler=scheduler(), force_zeros_for_empty_prompt=True)


def auraflow():
    heads = {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4}
    widths = {"caption_projection_dim": 32, "joint_attention_dim": 32, "out_channels": 4, "pos_embed_max_size": 256}
    model = transformer("AuraFlowTransformer2DModel", sample_size=32, patch_size=2, in_channels=4, **heads, **widths)
    parts = {"tokenizer": tiny.t5_tokenizer(), "text_encoder": t5(kind="UMT5"), "vae": tiny.vae(), "transformer": model}
    return of("diffusers", "AuraFlowPipeline", **parts, scheduler=scheduler())


def krea2():
    heads = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "axes_dims_rope": (4, 6, 6)}
    text = {"text_hidden_dim": 32, "text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 32}
    more = {"in_channels": 16, "intermediate_size": 32, "timestep_embed_dim": 16}
    model = transformer("Krea2Transformer2DModel", **heads, **text, **more)
    parts = {"vae": qwen_vae(), "text_encoder": qwen3_vl(), "tokenizer": qwen_tokenizer(), "transformer": model}
    return of("diffusers", "Krea2Pipeline", **parts, scheduler=scheduler())


def hidream():
    heads = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (8, 4, 4)}
    sizes = {"patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_channels": [32, 32], "text_emb_dim": 80}
    experts = {"num_routed_experts": 2, "num_activated_experts": 2, "llama_layers": [0, 1], "force_inference_output": True}
    model = transformer("HiDreamImageTransformer2DModel", **heads, **sizes, **experts, max_resolution=(32, 32))
    encoders = {"text_encoder": clip(projected=True, positions=128), "text_encoder_2": clip(48, projected=True, positions=128)}
    encoders |= {"text_encoder_3": t5(), "text_encoder_4": llama("LlamaForCausalLM"), "vae": flux_vae(), "transformer": model}
    tokenizers = {"tokenizer": tiny.clip_tokenizer(), "tokenizer_2": tiny.clip_tokenizer(), "tokenizer_3": tiny.t5_tokenizer()}
    return of("diffusers", "HiDreamImagePipeline", **encoders, **tokenizers, tokenizer_4=gemma_tokenizer(), scheduler=scheduler())


def hidream_inputs(_pipeline, batch):
    return {"prompt_embeds_llama3": batch["prompt_embeds_llama3"].transpose(0, 1)}


def ideogram4():
    heads = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "intermediate_size": 32, "adaln_dim": 16}
    sizes = {"in_channels": 16, "llm_features_dim": 13 * 32, "mrope_section": (4, 2, 2)}
    models = {name: transformer("Ideogram4Transformer2DModel", **heads, **sizes) for name in ("transformer", "unconditional_transformer")}
    parts = {"vae": flux2_vae(), "text_encoder": qwen3_vl(), "tokenizer": qwen_tokenizer()}
    return of("diffusers", "Ideogram4Pipeline", **parts, **models, scheduler=scheduler())


def ideogram4_inputs(pipeline, batch):
    """What a trainer does with a batch: it adds the picture's tokens to text and positions."""
    import torch

    embeds, mask, side = batch["prompt_embeds"], batch["prompt_attention_mask"], 16

    def encode_prompt(**_options):
        ids = pipeline._prepare_ids(mask.sum(1).tolist(), side, side, mask.shape[1], embeds.device)
        return torch.cat([embeds, embeds.new_zeros(len(embeds), side * side, embeds.shape[-1])], dim=1), *ids

    return {"encode_prompt": encode_prompt, "prompt": [""] * len(embeds), "max_sequence_length": mask.shape[1]}


def ernie():
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 32, "in_channels": 16, "out_channels": 16}
    model = awake(transformer("ErnieImageTransformer2DModel", **sizes, text_in_dim=32, rope_axes_dim=(8, 4, 4)))
    parts = {"vae": flux2_vae(), "text_encoder": mistral3("Mistral3Model", 3), "tokenizer": qwen_tokenizer(), "transformer": model}
    return of("diffusers", "ErnieImagePipeline", **parts, scheduler=scheduler())


def kandinsky5(class_name="Kandinsky5T2VPipeline", vae=hunyuan_vae, channels=4):
    dims = {"in_text_dim": 32, "in_text_dim2": 32, "time_dim": 16, "model_dim": 32, "ff_dim": 32, "axes_dims": (8, 4, 4)}
    sizes = {"in_visual_dim": channels, "out_visual_dim": channels, "patch_size": (1, 2, 2), "num_text_blocks": 1, "num_visual_blocks": 1}
    model = awake(transformer("Kandinsky5Transformer3DModel", **dims, **sizes))
    parts = {"vae": vae(), "text_encoder": qwen_vl(), "transformer": model, "text_encoder_2": clip()}
    reader = qwen_processor(with_pictures(qwen_tokenizer()), None)
    return of("diffusers", class_name, **parts, tokenizer=reader, tokenizer_2=tiny.clip_tokenizer(), scheduler=scheduler())


def kandinsky5_inputs(_pipeline, batch):
    import torch

    lengths = batch["prompt_attention_mask"].sum(1).cumsum(0)
    return {"prompt_cu_seqlens": torch.nn.functional.pad(lengths, (1, 0)).int()}


def hunyuanimage():
    tiny.of_diffusers("HunyuanImagePipeline")
    from diffusers.guiders import ClassifierFreeGuidance

    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    sizes = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "text_embed_2_dim": 32, "rope_axes_dim": (4, 4), "mlp_ratio": 2.0}
    model = transformer("HunyuanImageTransformer2DModel", **heads, **sizes)
    tokenizers = {"tokenizer": qwen_tokenizer(), "tokenizer_2": of("transformers", "ByT5Tokenizer")}
    parts = {"text_encoder": qwen_vl(), "transformer": model, "vae": hunyuan_image_vae(), "text_encoder_2": t5()}
    guider = ClassifierFreeGuidance(guidance_scale=1.0)
    return of("diffusers", "HunyuanImagePipeline", **parts, **tokenizers, scheduler=scheduler(), guider=guider)


def cosmos(class_name, vae, channels, **more):
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "mlp_ratio": 2, "adaln_lora_dim": 4}
    sizes = {"in_channels": channels, "out_channels": channels, "text_embed_dim": 32, "max_size": (4, 32, 32), "patch_size": (1, 2, 2)}
    model = transformer("CosmosTransformer3DModel", **heads, **sizes, **more, concat_padding_mask=False)  # which needs torchvision
    parts = {"text_encoder": t5(), "tokenizer": tiny.t5_tokenizer(), "transformer": model, "vae": vae()}
    noise = of("diffusers", "EDMEulerScheduler") if class_name == "CosmosTextToWorldPipeline" else scheduler(use_karras_sigmas=True)
    return of("diffusers", class_name, **parts, scheduler=noise, safety_checker=Harmless())


class Harmless:
    """Stands for Cosmos' safety checker, which is another package."""

    def to(self, _device):
        return self

    def check_text_safety(self, _prompt):
        return True


def qwenimage21():
    heads = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6), "mlp_ratio": 2}
    model = transformer("QwenImage21Transformer2DModel", in_channels=4, out_channels=4, context_in_dim=32, **heads)
    reader = qwen_processor(with_pictures(qwen_tokenizer()), None)
    parts = {"vae": qwen21_vae(), "text_encoder": qwen3_vl("Qwen3VLForConditionalGeneration", 3), "processor": reader, "transformer": model}
    return of("diffusers", "QwenImage21Pipeline", **parts, scheduler=scheduler())


def sanavideo(vae=wan_vae):
    heads = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "num_cross_attention_heads": 2}
    widths = {"cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 32}
    model = transformer(
        "SanaVideoTransformer3DModel", in_channels=16, out_channels=16, sample_size=8, rope_max_seq_len=32, **heads, **widths
    )
    parts = {"tokenizer": gemma_tokenizer(), "text_encoder": gemma2(), "vae": vae(), "transformer": model}
    return of("diffusers", "SanaVideoPipeline", **parts, scheduler=scheduler())


FRAMES = {"num_frames": 5}
LTX2_RUN = {"num_frames": 9, "audio_guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0}
COSMOS2 = {"rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
SANA_RUN = {"use_resolution_binning": False}
CONNECTOR = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 16}
PER_MODALITY = {"per_modality_projections": True, "video_hidden_dim": 32, "audio_hidden_dim": 32, "proj_bias": True}

FAMILIES = {
    "sd15": Family(sd15, ("unet",)),
    "sdxl": Family(sdxl, ("unet",)),
    "sd3": Family(sd3),
    "flux": Family(flux),
    "flux2": Family(flux2),
    "flux2klein": Family(flux2klein),
    "pixart": Family(pixart, run={"use_resolution_binning": False}),
    # Its own instruction is thousands of letters long, each of which is a token here.
    "sana": Family(sana, encode_args={"complex_human_instruction": ["Enhance this: "]}, run=SANA_RUN),
    "lumina2": Family(lumina2),
    "wan": Family(wan, run=FRAMES),
    "qwenimage": Family(qwenimage),
    "ltx": Family(ltx, run={"num_frames": 9}),
    "ltx2": Family(ltx2, encode_args={"max_sequence_length": 256}, run=LTX2_RUN, inputs=ltx2_inputs),
    "ltx2-audio": Family(lambda: ltx2(**PER_MODALITY), encode_args={"max_sequence_length": 256}, run=LTX2_RUN, inputs=ltx2_inputs),
    "cogvideox": Family(cogvideox, encode_args={"max_sequence_length": 16}, run={"num_frames": 9}),
    "zimage": Family(zimage, run={"guidance_scale": 0.0}, inputs=without_padding),
    "chroma": Family(chroma),
    # As with Sana. The first letters of the template are dropped from what is encoded.
    "hunyuanvideo": Family(hunyuanvideo, encode_args={"prompt_template": {"template": "Describe {}<eos>", "crop_start": 4}}, run=FRAMES),
    "hunyuanvideo15": Family(hunyuanvideo15, run=FRAMES),
    "wan22": Family(lambda: wan(wan22_vae(), 8), run=FRAMES),
    "krea2": Family(
        krea2, run={"guidance_scale": 0.0}, inputs=lambda _pipeline, batch: {"prompt_embeds_mask": batch["prompt_embeds_mask"].bool()}
    ),
    "hidream": Family(hidream, inputs=hidream_inputs),
    "ideogram4": Family(
        ideogram4, ("transformer", "unconditional_transformer"), {"max_sequence_length": 256}, {"guidance_schedule": None}, ideogram4_inputs
    ),
    "ernie": Family(ernie, inputs=without_padding),
    # Its template has 500 letters more than the 128 tokens that are dropped.
    "kandinsky5": Family(kandinsky5, encode_args={"max_sequence_length": 1024}, run=FRAMES, inputs=kandinsky5_inputs),
    "kandinsky5-t2i": Family(lambda: kandinsky5("Kandinsky5T2IPipeline", flux_vae, 16), inputs=kandinsky5_inputs),
    "hunyuanimage": Family(hunyuanimage),
    "cosmos": Family(lambda: cosmos("CosmosTextToWorldPipeline", cosmos_vae, 4), run={"num_frames": 9}),
    "cosmos2": Family(lambda: cosmos("Cosmos2TextToImagePipeline", wan_vae, 16, **COSMOS2)),
    "qwenimage21": Family(qwenimage21),
    "sanavideo": Family(sanavideo, encode_args={"complex_human_instruction": ["Enhance this: "]}, run={**SANA_RUN, "frames": 5}),
    "cogview4": Family(cogview4),
    "mochi": Family(mochi, run={"num_frames": 7, "num_inference_steps": 4}),
    "auraflow": Family(auraflow),
}


def save(family: Family, pipeline, folder):
    """Save a pipeline, and put denoisers that nobody can load in the place of its own."""
    readers = {name: part for name, part in pipeline.components.items() if type(part).__name__ == "Qwen2VLProcessor"}
    for name in readers:  # which save only what they are made of
        setattr(pipeline, name, None)
    pipeline.save_pretrained(folder)
    for name, reader in readers.items():
        setattr(pipeline, name, reader)
        reader.tokenizer.save_pretrained(folder / name)
        (reader.image_processor or library("transformers").Qwen2VLImageProcessorPil()).save_pretrained(folder / name)
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({**index, name: ["transformers", "Qwen2VLProcessor"]}))
    for name in family.denoisers:
        for path in (folder / name).iterdir():
            path.unlink()
        (folder / name / "config.json").write_text("this is no JSON")
        (folder / name / "diffusion_pytorch_model.safetensors").write_bytes(b"these are no weights")
