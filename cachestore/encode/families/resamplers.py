"""The ways to resize pictures and videos that `--resample` names. Imports nothing that resizes; that is `resizing`.

A way is chosen when the work is planned, never by what is installed: all ranks make the same keys. A rank that cannot resize in this way
says so and encodes nothing.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

from cachestore.core.errors import BadInput, MissingExtra, how_to_install
from cachestore.core.spelling import option

Resample = Literal["lanczos", "area", "bicubic", "bilinear", "cv2-linear", "pillow"]
DEFAULT: Final[Resample] = "lanczos"


@dataclass(frozen=True, slots=True)
class Resampler:
    """A way to resize. Raise the numbers when its pixels change: equal keys must stay interchangeable."""

    name: Resample
    pictures: str
    """Names everything that turns the bytes of a picture into pixels. Stands in the recipe of latents, and so in every key."""
    videos: str
    """Names the same for a video. Stands in each video's key."""


RESAMPLERS: Final[Mapping[Resample, Resampler]] = {
    row.name: row
    for row in (
        Resampler("lanczos", "torch-lanczos-cover-center/1", "pyav-swscale-601-torch-lanczos/1"),
        Resampler("area", "opencv-area-cover-center/1", "pyav-swscale-601-opencv-area/1"),
        Resampler("bicubic", "torch-bicubic-cover-center/1", "pyav-swscale-601-torch-bicubic/1"),
        Resampler("bilinear", "torch-bilinear-cover-center/1", "pyav-swscale-601-torch-bilinear/1"),
        Resampler("cv2-linear", "opencv-linear-cover-center/1", "pyav-swscale-601-opencv-linear/1"),
        Resampler("pillow", "pillow-lanczos-cover-center/1", "pyav-swscale-601-pillow-lanczos/1"),
    )
}
_BY_OPENCV: Final = ("area", "cv2-linear")
_LEAST_TORCH: Final = (2, 12)
"""The first torch whose `interpolate` knows Lanczos."""


def check_resampler(name: Resample) -> None:
    """Raise BadInput if this way needs OpenCV or a newer torch than is installed. Without any torch, loading the model fails anyway."""
    if name in _BY_OPENCV and importlib.util.find_spec("cv2") is None:
        raise MissingExtra(
            f"{option('resample', name)} needs OpenCV, which is not installed here. {how_to_install('area')}. Without it pass another"
            f" {option('resample')}, such as lanczos: the pixels differ a little then",
            option="resample",
        )
    if name != "lanczos":
        return
    try:
        there = version("torch")
    except PackageNotFoundError:
        return
    if tuple(map(int, re.findall(r"\d+", there)[:2])) < _LEAST_TORCH:  # such as 2.13.0a0+git1234
        least = ".".join(map(str, _LEAST_TORCH))
        raise BadInput(
            f"{option('resample', 'lanczos')} needs torch {least} or newer, but torch {there} is installed here: install a newer one on"
            f" every rank. A new data set can also be made with {option('resample', 'bicubic')}, or with"
            f" {option('resample', 'pillow')}, which is Lanczos too, but slow",
            option="resample",
        )
