"""How ai-toolkit names and stores each family."""

from typing import Final

from cachestore.trainers.families import Cached, Trainer

AI_TOOLKIT: Final = Trainer(
    "ai-toolkit",
    {
        "sd15": Cached(("sd1",)),
        "sdxl": Cached(("sdxl",)),
        "sd3": Cached(("sd3",)),
        "flux": Cached(("flux1", "flux")),
        "wan": Cached(("wan21", "wan21_i2v", "wan22_14b", "wan22_14b_i2v")),
        "qwen-image": Cached(("qwen_image",)),
        "z-image": Cached(("zimage",)),
    },
)
