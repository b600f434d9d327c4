"""Scale and crop pictures to their bucket by each of the `resamplers`. Imports torch and OpenCV when they are first needed.

The result depends on pixels and sizes alone: equal bits in every thread and process, whatever the number of threads. torch's antialiased
kernels for uint8 are Pillow's filters with 16-bit weights; `docs/numerics.md` says how much the two differ.
"""

from functools import cache
from typing import Any, Final

import numpy as np
from PIL import Image

from cachestore.core.errors import importing
from cachestore.encode.batching.pipeline import is_prefetching
from cachestore.encode.families.resamplers import Resample
from cachestore.encode.pictures.buckets import CropBox, Size, crop_box
from cachestore.encode.pictures.images import Picture, Pixels, as_image, as_pixels, resize_crop

_FILTERS: Final[dict[Resample, Image.Resampling]] = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "cv2-linear": Image.Resampling.BILINEAR,
}
"""Pillow's filters; Lanczos for all others."""
_MOST_CROPPED: Final = 2
"""If a scaled picture had more than this many times the pixels of its bucket, Pillow resizes it, which computes only the crop. In a bucket
of 256 x 2048, a picture of 1 x 100,000 pixels would be scaled to 6.6 billion."""


def fit(picture: Picture, bucket: Size, box: CropBox | None, resample: Resample) -> Pixels:
    """Scale a picture to cover the bucket and crop it as `box` says, else at the centre: uint8 [height, width, 3]."""
    size = size_of(picture)
    box = crop_box(size, bucket) if box is None else box
    resized = box.resized
    if resized == size:
        return _cropped(as_pixels(picture), box)
    is_larger = resized.width > size.width or resized.height > size.height
    if resample == "area" and not is_larger:
        return _cropped(_by_opencv(as_pixels(picture), resized, resample), box)
    is_mostly_cropped = resized.width * resized.height > _MOST_CROPPED * bucket.width * bucket.height
    if resample in {"area", "pillow"} or is_mostly_cropped:
        return resize_crop(as_image(picture), bucket, box, _FILTERS.get(resample, Image.Resampling.LANCZOS))
    if resample == "cv2-linear":
        return _cropped(_by_opencv(as_pixels(picture), resized, resample), box)
    return _cropped(_by_torch(as_pixels(picture), resized, resample), box)


def size_of(picture: Picture) -> Size:
    """Return a picture's width and height."""
    return Size(*picture.size) if isinstance(picture, Image.Image) else Size(picture.shape[1], picture.shape[0])


def mirror(pixels: Pixels) -> Pixels:
    """Exchange left and right in pixels [..., height, width, 3]."""
    torch = _torch()
    return torch.from_numpy(pixels).flip(-2).numpy()  # at 1216 x 832 0.5 ms, by numpy 4


def letterbox(image: Image.Image, bucket: Size) -> Pixels:
    """Scale a picture until it fits into the bucket as a whole, and put it on white, as Wan VACE's pipeline does with reference pictures.

    It first makes the sides multiples of 8, and then interpolates without antialiasing. Here the result is rounded to 8 bits.
    """
    even = image.resize((max(8, image.width // 8 * 8), max(8, image.height // 8 * 8)), Image.Resampling.LANCZOS)
    scale = min(bucket.height / even.height, bucket.width / even.width)
    height, width = max(1, int(even.height * scale)), max(1, int(even.width * scale))
    torch = _torch()
    batch = torch.from_numpy(np.array(even)).permute(2, 0, 1)[None].float()
    made = torch.nn.functional.interpolate(batch, (height, width), mode="bilinear", align_corners=False)
    canvas = np.full((bucket.height, bucket.width, 3), 255, np.uint8)
    top, left = (bucket.height - height) // 2, (bucket.width - width) // 2
    canvas[top : top + height, left : left + width] = made[0].permute(1, 2, 0).round().numpy()
    return canvas


def _cropped(pixels: Pixels, box: CropBox) -> Pixels:
    left, top, right, bottom = box.crop
    found = pixels[top:bottom, left:right]
    return np.ascontiguousarray(pixels) if found.shape == pixels.shape else found.copy()


def _by_torch(pixels: Pixels, size: Size, mode: str) -> Pixels:
    torch = _torch()
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    made = torch.nn.functional.interpolate(batch, (size.height, size.width), mode=mode, antialias=True)
    return made.permute(0, 2, 3, 1)[0].numpy()


def _by_opencv(pixels: Pixels, size: Size, resample: Resample) -> Pixels:
    """Resize by OpenCV: shrink to the mean of the area that each pixel covers, or interpolate between the four nearest pixels."""
    opencv = _opencv()
    return opencv.resize(pixels, tuple(size), interpolation=opencv.INTER_AREA if resample == "area" else opencv.INTER_LINEAR)


def _torch() -> Any:
    """Return torch. In a thread that prefetches it uses that thread alone: there are as many of them as processors."""
    with importing("torch"):
        import torch

    if is_prefetching():
        from cachestore.encode.batching.torch_threads import use_this_thread_alone

        use_this_thread_alone()
    return torch


@cache
def _opencv() -> Any:
    """Return OpenCV, without its own threads: pictures are prepared on as many threads as there are processors."""
    with importing("OpenCV"):
        import cv2

    cv2.setNumThreads(0)
    return cv2
