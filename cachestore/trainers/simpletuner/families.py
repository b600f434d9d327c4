"""How SimpleTuner names and stores each family."""

from typing import Final

from cachestore.trainers.families import MEAN, Cached, Trainer

SIMPLETUNER: Final = Trainer(
    "simpletuner",
    {
        "sd15": Cached(("sd1x",)),
        "sdxl": Cached(("sdxl",)),
        "sd3": Cached(("sd3",)),
        "flux": Cached(("flux",)),
        "wan": Cached(("wan",), MEAN),
        "qwen-image": Cached(("qwen_image",)),
        "z-image": Cached(("z_image",), has_text=False),
        "flux2": Cached(("flux2",), MEAN),
        "flux2-klein-4b": Cached(("flux2",), MEAN),
        "flux2-klein-9b": Cached(("flux2",), MEAN),
    },
)
