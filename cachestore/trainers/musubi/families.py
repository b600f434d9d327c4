"""How musubi-tuner names and stores each family."""

from typing import Final

from cachestore.trainers.families import MEAN, RAW, RAW_MEAN, Cached, Trainer

MUSUBI: Final = Trainer(
    "musubi",
    {
        "flux": Cached(("fk", "flux_kontext")),
        "wan": Cached(("wan", "wan"), MEAN),
        "qwen-image": Cached(("qi", "qwen_image")),
        "z-image": Cached(("zi", "z_image"), RAW_MEAN),
        "flux2": Cached(("f2d", "flux_2_dev"), MEAN),
        "flux2-klein-4b": Cached(("f2k4b", "flux_2_klein_4b"), MEAN),
        "flux2-klein-9b": Cached(("f2k9b", "flux_2_klein_9b"), MEAN),
        "hunyuanvideo": Cached(("hv", "hunyuan_video"), RAW),
        "hunyuanvideo15": Cached(("hv15", "hunyuan_video_1_5"), RAW_MEAN, has_text=False),
    },
)
