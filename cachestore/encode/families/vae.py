"""The table of VAEs, by class: what their config.json does not say. A new class is a new row; `family` describes its fields."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from cachestore.encode.families.row import VaeFamily

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
_RATIO = VaeFamily("", {}, temporal_factor=4, temporal_fields=("temporal_compression_ratio",), has_frames=True)
_HUNYUAN = replace(_RATIO, factor="ratio", factor_field="spatial_compression_ratio")
_WAN = replace(_RATIO, channels_field="z_dim", temporal_fields=("temperal_downsample",))
_WAN_DEFAULTS = {"z_dim": 16, "temperal_downsample": [False, True, True], "latents_mean": _WAN_MEAN, "latents_std": _WAN_STD}
_LTX = replace(
    _RATIO,
    factor="scalings",
    factor_field="spatio_temporal_scaling",
    temporal_fields=("temporal_compression_ratio", "spatio_temporal_scaling"),
    statistics={"mean": "latents_mean", "std": "latents_std"},
)
_LTX_DEFAULTS = {"latent_channels": 128, "scaling_factor": 1.0, "patch_size": 4, "patch_size_t": 1} | dict.fromkeys(
    ("spatial_compression_ratio", "temporal_compression_ratio")
)
_VAES = (
    VaeFamily(
        "AutoencoderKLHunyuanImage",
        {"scaling_factor": None},
        factor="ratio",
        factor_field="spatial_compression_ratio",
        required=("latent_channels", "spatial_compression_ratio"),
        working=(1536, 0, 0),
    ),
    replace(
        _WAN,
        class_name="AutoencoderKLQwenImage21",
        defaults={"z_dim": 64, "temperal_downsample": [False, True, True, True], "scale_factor_spatial": 16},
        required=("latents_mean", "latents_std"),
        factor="ratio",
        factor_field="scale_factor_spatial",
        is_of_pictures=True,
        has_alpha=True,
        working=(4270, 0, 0),
    ),
    replace(
        _HUNYUAN,
        class_name="AutoencoderKLCosmos",
        defaults={"latent_channels": 16, "spatial_compression_ratio": 8, "temporal_compression_ratio": 8, "scaling_factor": 1.0},
        required=("latents_mean", "latents_std"),
        is_random=False,
        working=(4600, 4600, 210),
    ),
    VaeFamily(
        "AutoencoderKL",
        {"scaling_factor": 0.18215, "latent_channels": 4, "block_out_channels": [64]}
        | dict.fromkeys(("shift_factor", "latents_mean", "latents_std")),
    ),
    VaeFamily(
        "AutoencoderKLFlux2",
        {"latent_channels": 32, "block_out_channels": [128, 256, 512, 512], "batch_norm_eps": 0.0001},
        patchify=2,
        statistics={"mean": "bn.running_mean", "variance": "bn.running_var"},
    ),
    VaeFamily(
        "AutoencoderDC",
        {"latent_channels": 32, "encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "scaling_factor": 1.0},
        factor_field="encoder_block_out_channels",
        is_random=False,
        working=(3584, 0, 0),
    ),
    replace(
        _WAN,
        class_name="AutoencoderKLWan",
        defaults={**_WAN_DEFAULTS, "scale_factor_spatial": 8},
        factor="ratio",
        factor_field="scale_factor_spatial",
        working=(4150, 15_000, 13),
    ),
    replace(
        _WAN,
        class_name="AutoencoderKLQwenImage",
        defaults=_WAN_DEFAULTS,
        factor="halvings",
        factor_field="temperal_downsample",
        working=(4150, 15_000, 13),
    ),
    replace(
        _LTX,
        class_name="AutoencoderKLLTXVideo",
        defaults={**_LTX_DEFAULTS, "spatio_temporal_scaling": [True, True, True, False]},
        working=(300, 0, 240),
    ),
    replace(
        _LTX,
        class_name="AutoencoderKLLTX2Video",
        defaults={**_LTX_DEFAULTS, "spatio_temporal_scaling": [True] * 4},
        working=(370, 130, 172),
    ),
    replace(
        _RATIO,
        class_name="AutoencoderKLCogVideoX",
        defaults={
            "latent_channels": 16,
            "block_out_channels": [128, 256, 256, 512],
            "temporal_compression_ratio": 4,
            "scaling_factor": 1.15258426,
        },
        working=(10_660, 38_200, 13),
    ),
    replace(
        _HUNYUAN,
        class_name="AutoencoderKLHunyuanVideo",
        defaults={"latent_channels": 16, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4, "scaling_factor": 0.476986},
        working=(3600, 44_700, 13),
    ),
    replace(
        _HUNYUAN,
        class_name="AutoencoderKLHunyuanVideo15",
        defaults={"latent_channels": 32, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "scaling_factor": 1.03682},
        working=(3600, 200, 3600),
    ),
    VaeFamily(
        "AutoencoderKLMochi",
        {"latent_channels": 12, "encoder_block_out_channels": [64, 128, 256, 384], "temporal_expansions": [1, 2, 3]}
        | {"scaling_factor": 1.0, "latents_mean": _MOCHI_MEAN, "latents_std": _MOCHI_STD},
        factor_field="encoder_block_out_channels",
        temporal_factor=6,
        temporal_fields=("temporal_expansions",),
        has_frames=True,
        working=(1810, 0, 1870),
    ),
)
VAE_FAMILIES: Mapping[str, VaeFamily] = MappingProxyType({row.class_name: row for row in _VAES})
