"""Compares buckets and pixels with those of a trainer's own code, for `trainers.py --sizes N`. No model is needed.

Sizes are drawn anew, and each goes through the trainer's own classes and through `fit_box`, at the settings of `record_buckets.py`. Pixels
are those that the trainer would give to its VAE: read, resized and cropped by its own functions.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from conformance.record_buckets import RECORDERS, Row
from PIL import Image, ImageCms

from cachestore.core.errors import EncodeFailed
from cachestore.encode.pictures import images
from cachestore.encode.pictures.bucket_rules import RULES, BucketSettings, fit_box
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.shots import Still
from cachestore.encode.pictures.variants import variant_of

RESOLUTION = 512
_ORIENTATION = 0x0112
_TRIES = 6
"""How many pictures of each kind are compared."""

Prepare = Callable[[Path, tuple[int, int], tuple[int, int]], np.ndarray]
"""The trainer's own code, from a file to pixels: (path, bucket, resized)."""


@dataclass(frozen=True)
class Compared:
    """One line of the result."""

    what: str
    count: int
    differing: int
    deviation: float = 0.0
    """The mean difference, in standard deviations of the trainer's pixels."""
    most: int = 0
    """The largest difference of a pixel, in 255ths."""

    def __str__(self) -> str:
        pixels = f", by {self.deviation:.4f} standard deviations, at most {self.most} of 255" if self.most else ""
        return f"{self.what}: {self.differing} of {self.count} differ{pixels}"


def compare_sizes(trainer: Any, count: int, seed: int) -> Iterator[Compared]:
    """Compare bucket, resized size and crop of this many random sizes, for each of the recorded settings."""
    draw = random.Random(seed)
    sizes = [(draw.randint(64, 4000), draw.randint(64, 4000)) for _ in range(count)]
    for name, decide in RECORDERS[trainer][0]():
        resolution, step, upscales, *limits = map(int, name.split("/"))
        settings = BucketSettings(resolution, step, bool(upscales), *limits)
        differing = sum(_theirs(decide, *size) != _ours(trainer, Size(*size), settings) for size in sizes)
        yield Compared(f"buckets at {name}", count, differing)


def _theirs(decide: Callable[[int, int], Row], width: int, height: int) -> Row | None:
    try:
        row = decide(width, height)
    except ZeroDivisionError:
        return None
    return tuple(map(int, row)) if min(row[:2]) > 0 else None


def _ours(trainer: Any, size: Size, settings: BucketSettings) -> Row | None:
    try:
        bucket, box = fit_box(trainer, size, settings)
    except EncodeFailed:
        return None
    return *bucket, *box.resized, *box.crop[:2]


def compare_pixels(trainer: Any, folder: Path) -> Iterator[Compared]:
    """Compare pictures of several kinds, with the trainer's resizer: read as it reads them, then in this project's own way."""
    prepare = PREPARE[trainer]()
    folder.mkdir()
    for kind, make in KINDS.items():
        for reading in (RULES[trainer].reading, None):
            how = "own" if reading is None else "as-trainer"
            differences: list[np.ndarray] = []
            deviations: list[float] = []
            for seed in range(_TRIES):
                path = folder / f"{seed}"
                path = path.with_suffix(make(seed, path))
                data = path.read_bytes()
                settings = {"resolution": RESOLUTION, "buckets": trainer, "step": RULES[trainer].step(16)}
                if RULES[trainer].may_limit:
                    settings |= dict(zip(("bucket_min", "bucket_max"), RULES[trainer].limits, strict=True))
                variant = variant_of(settings, images.measure(data, reading), "")
                ours = Still(data, variant, RULES[trainer].resample, reading).pixels()
                its_own = variant_of(settings, images.measure(data, RULES[trainer].reading), "")
                theirs = prepare(path, its_own.bucket, its_own.box.resized)
                if ours.shape != theirs.shape:
                    ours = np.asarray(Image.fromarray(ours).resize(theirs.shape[1::-1]))
                differences.append(np.abs(ours.astype(int) - theirs.astype(int)))
                deviations.append(float(differences[-1].mean() / max(theirs.std(), 1.0)))
            differing = sum(bool(one.any()) for one in differences)
            most = max(int(one.max()) for one in differences)
            yield Compared(f"pixels, {kind}, --pixels {how}", _TRIES, differing, float(np.mean(deviations)), most)


def _photograph(seed: int, *, is_small: bool = False) -> Image.Image:
    """Return a picture with edges, gradients and grain, as a photograph has them."""
    draw = np.random.default_rng(seed)
    width, height = (int(one) for one in (draw.integers(200, 400, 2) if is_small else draw.integers(600, 1300, 2)))
    coarse = Image.fromarray(draw.integers(0, 256, (7, 9, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    grain = draw.normal(0, 12, (height, width, 3))
    rows, columns = np.mgrid[0:height, 0:width]
    edges = 40 * np.sin(columns / (3 + seed % 5))[..., None] * (rows > height / 2)[..., None]
    return Image.fromarray((np.asarray(coarse, float) + grain + edges).clip(0, 255).astype(np.uint8))


def _png(seed: int, path: Path) -> str:
    _photograph(seed).save(path.with_suffix(".png"), compress_level=1)
    return ".png"


def _small(seed: int, path: Path) -> str:
    _photograph(seed, is_small=True).save(path.with_suffix(".png"), compress_level=1)
    return ".png"


def _jpeg(seed: int, path: Path) -> str:
    _photograph(seed).save(path.with_suffix(".jpg"), quality=90)
    return ".jpg"


def _alpha(seed: int, path: Path) -> str:
    picture = _photograph(seed, is_small=seed % 2 == 1)
    veil = np.random.default_rng(seed).integers(0, 256, (4, 4), np.uint8)
    picture.putalpha(Image.fromarray(veil).resize(picture.size))
    picture.save(path.with_suffix(".png"), compress_level=1)
    return ".png"


def _profiled(seed: int, path: Path) -> str:
    """A wide-gamut picture: sRGB's own profile with the colours of Display P3."""
    from cachestore.encode.pictures.colours import profile_of_codes

    profile = profile_of_codes(12, 13)
    assert profile is not None
    assert ImageCms.ImageCmsProfile(BytesIO(profile))
    _photograph(seed).save(path.with_suffix(".png"), compress_level=1, icc_profile=profile)
    return ".png"


def _turned(seed: int, path: Path) -> str:
    exif = Image.Exif()
    exif[_ORIENTATION] = (6, 8, 3)[seed % 3]
    _photograph(seed).save(path.with_suffix(".jpg"), quality=90, exif=exif.tobytes())
    return ".jpg"


KINDS: Mapping[str, Callable[[int, Path], str]] = {
    "PNG": _png,
    "small PNG": _small,
    "JPEG": _jpeg,
    "PNG with alpha": _alpha,
    "PNG with the profile of Display P3": _profiled,
    "JPEG turned by EXIF": _turned,
}


def sd_scripts() -> Prepare:
    """Its `load_image` and `trim_and_resize_if_required`."""
    from library import train_util

    def prepare(path: Path, bucket: tuple[int, int], resized: tuple[int, int]) -> np.ndarray:
        picture = train_util.load_image(str(path))
        return train_util.trim_and_resize_if_required(False, picture, bucket, resized)[0]

    return prepare


def musubi() -> Prepare:
    """Its `ImageDirectoryDatasource` and `resize_image_to_bucket`; every script that caches takes the first three channels then."""
    from musubi_tuner.dataset import datasources, media_utils

    def prepare(path: Path, bucket: tuple[int, int], resized: tuple[int, int]) -> np.ndarray:
        del resized
        source = datasources.ImageDirectoryDatasource.__new__(datasources.ImageDirectoryDatasource)
        source.__dict__ |= {"image_paths": [str(path)], "multiple_target": False, "has_control": False, "caption_extension": None}
        source.get_caption = lambda _index: (str(path), "")
        _path, pictures, *_more = source.get_image_data(0)
        return media_utils.resize_image_to_bucket(pictures[0], bucket)[..., :3]

    return prepare


def ai_toolkit() -> Prepare:
    """Its `load_and_process_image`."""
    from toolkit import dataloader_mixins

    off = ("is_text_embedding_cached", "is_latent_cached", "is_audio_model", "is_video", "use_alpha_as_mask", "flip_x", "flip_y")
    more = ("has_control_image", "has_inpaint_image", "has_clip_image", "has_mask_image", "has_unconditional", "has_augmentations")

    def prepare(path: Path, bucket: tuple[int, int], resized: tuple[int, int]) -> np.ndarray:
        item = dataloader_mixins.ImageProcessingDTOMixin.__new__(dataloader_mixins.ImageProcessingDTOMixin)
        item.__dict__ |= dict.fromkeys((*off, *more), False) | {
            "augments": None,
            "path": str(path),
            "dataset_config": SimpleNamespace(buckets=True),
        }
        item.__dict__ |= {"scale_to_width": resized[0], "scale_to_height": resized[1], "crop_width": bucket[0], "crop_height": bucket[1]}
        item.__dict__ |= {"crop_x": (resized[0] - bucket[0]) // 2, "crop_y": (resized[1] - bucket[1]) // 2}
        item.load_and_process_image(np.asarray, only_load_latents=True)
        return item.tensor

    return prepare


def simpletuner() -> Prepare:
    """Its `load_image` and `TrainingSample.prepare`."""
    from simpletuner.helpers.image_manipulation import load, training_sample
    from simpletuner.helpers.training.state_tracker import StateTracker

    model = SimpleNamespace(MAXIMUM_CANVAS_SIZE=None, get_transforms=lambda: None)
    StateTracker._save_to_disk = classmethod(lambda *_args, **_more: None)
    config = {"crop": True, "crop_aspect": "preserve", "crop_style": "center", "resolution_type": "area"}
    config |= {"resolution": RESOLUTION * RESOLUTION / 1000**2}
    StateTracker.get_args = classmethod(lambda _cls: SimpleNamespace(aspect_bucket_alignment=64, aspect_bucket_rounding=2))
    StateTracker.get_data_backend_config = classmethod(lambda _cls, _name: config)

    def prepare(path: Path, bucket: tuple[int, int], resized: tuple[int, int]) -> np.ndarray:
        del bucket, resized
        StateTracker.aspect_resolution_map = {}
        picture = load.load_image(path.read_bytes())
        sample = training_sample.TrainingSample(picture, "x", image_metadata={"original_size": picture.size}, model=model)
        return np.asarray(sample.prepare().image)

    return prepare


PREPARE: Mapping[str, Callable[[], Prepare]] = {
    "sd-scripts": sd_scripts,
    "musubi": musubi,
    "ai-toolkit": ai_toolkit,
    "simpletuner": simpletuner,
}
