"""How NeMo Automodel names and stores each family."""

from typing import Final

from cachestore.trainers.families import MEAN, Cached, Trainer

NEMO: Final = Trainer(
    "nemo-automodel",
    {
        "flux": Cached(("flux",)),
        "wan": Cached(("wan",), MEAN),
        "qwen-image": Cached(("qwen_image",)),
        "flux2": Cached(("flux2",), MEAN),
    },
)
