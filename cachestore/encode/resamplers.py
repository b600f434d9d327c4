"""The ways to resize pictures and videos that `--resample` names. Imports nothing that resizes; `resizing` does the work.

A way is chosen by name when the work is planned, never by what is installed: all ranks make the same keys, and one that cannot resize in
this way says so and encodes nothing.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

from cachestore.core.errors import BadInput, MissingExtra, how_to_install
from cachestore.core.keys import Json

Resample = Literal["lanczos", "area", "bicubic", "bilinear", "pillow"]

NEW: Final[Resample] = "lanczos"
"""How new data sets resize."""
FIRST: Final[Resample] = "pillow"
"""How data sets resize that were made before there was a choice, and what imported values are compared with."""


@dataclass(frozen=True, slots=True)
class Resampler:
    """A way to resize. Raise the numbers when its pixels change: equal keys must stay interchangeable."""

    name: Resample
    pictures: str
    """Names everything that turns the bytes of a picture into pixels. Stands in the recipe of latents, and so in every key."""
    videos: str
    """Likewise for videos. Stands in each video's key."""


RESAMPLERS: Final[Mapping[str, Resampler]] = {
    row.name: row
    for row in (
        Resampler("lanczos", "torch-lanczos-cover-center/1", "pyav-swscale-601-torch-lanczos/1"),
        Resampler("area", "opencv-area-cover-center/1", "pyav-swscale-601-opencv-area/1"),
        Resampler("bicubic", "torch-bicubic-cover-center/1", "pyav-swscale-601-torch-bicubic/1"),
        Resampler("bilinear", "torch-bilinear-cover-center/1", "pyav-swscale-601-torch-bilinear/1"),
        Resampler("pillow", "pillow-lanczos-cover-center/1", "pyav-swscale-601-pillow-lanczos/1"),
    )
}
_BY_TRANSFORM: Final = {row.pictures: row.name for row in RESAMPLERS.values()}

_LEAST_TORCH: Final = (2, 12)
"""The first torch whose `interpolate` knows Lanczos."""


def resample_of(make: Mapping[str, Json]) -> Resample | None:
    """How a recipe's pictures are resized, by its `make` block; None if it does not say, or names a way of a newer cachestore."""
    transform: Mapping[str, Json] = make.get("transform") or {}
    return _BY_TRANSFORM.get(str(transform.get("pixels")))


def check_resampler(name: Resample) -> None:
    """Raise BadInput if what is installed here cannot resize in this way. A torch that is not installed at all is not its concern."""
    if name == "area" and importlib.util.find_spec("cv2") is None:
        raise MissingExtra(f"--resample area needs OpenCV, which is not installed here. {how_to_install('area')}")
    found = _torch_version()
    if name == "lanczos" and found is not None and _numbers(found) < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        raise BadInput(
            f"--resample lanczos needs torch {least} or newer, but here is torch {found}: update torch on every rank. A new data set can also"
            " be made with --resample pillow, which is slower, or bicubic"
        )


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, such as of `2.13.0a0+git1234`."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
