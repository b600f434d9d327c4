"""How diffusion-pipe names and stores each family."""

from typing import Final

from cachestore.trainers.families import MEAN, Cached, Trainer

DIFFUSION_PIPE: Final = Trainer(
    "diffusion-pipe",
    {
        "sdxl": Cached(("sdxl",), has_text=False),
        "flux": Cached(("flux",)),
        "wan": Cached(("wan", "wan_i2v", "wan_flf2v", "wan2.2_i2v", "wan2.2_5b", "skyreels_v2", "skyreels_v2_i2v"), MEAN),
    },
)
