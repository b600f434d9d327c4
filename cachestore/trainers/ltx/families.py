"""How ltx-trainer names and stores each family."""

from typing import Final

from cachestore.trainers.families import MEAN, Cached, Trainer

LTX: Final = Trainer(
    "ltx",
    {
        "ltx2": Cached(("ltx2",), MEAN),
    },
)
