"""How sd-scripts names and stores each family."""

from typing import Final

from cachestore.trainers.families import RAW, Cached, Trainer

SD_SCRIPTS: Final = Trainer(
    "sd-scripts",
    {
        "sd15": Cached(("sd",), RAW, has_text=False),
        "sdxl": Cached(("sdxl",), RAW),
        "sd3": Cached(("sd3",), RAW),
        "flux": Cached(("flux",)),
    },
)
