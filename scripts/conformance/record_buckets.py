"""Records how a trainer's own code puts pictures of 2,000 sizes into buckets, resizes and crops them: for tests/encode/buckets/.

    python3 scripts/conformance/record_buckets.py musubi --checkout ~/musubi-tuner --out tests/encode/buckets/musubi.npz

`diffusers` needs no checkout: it is what diffusers' training scripts do, with the transforms of torchvision that they call.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from conformance.trainers_code import commit_of, import_torchvision, use_checkout

Row = tuple[int, ...]
"""Width and height of the bucket, width and height of the resized picture, left and top of the crop."""
Decide = Callable[[int, int], Row]

_NONE: Row = (0, 0, 0, 0, 0, 0)
RESOLUTIONS = (512, 768, 1024)
COUNT = 2000


def sizes() -> list[tuple[int, int]]:
    """Return the sizes: of photographs, of any shape, small ones, those of buckets, and those beside them."""
    draw = random.Random(23)
    found: dict[tuple[int, int], None] = {}
    while len(found) < COUNT:
        kind = draw.random()
        if kind < 0.3:
            across, down = draw.choice([(3, 2), (4, 3), (16, 9), (1, 1), (5, 4), (2, 3), (3, 4), (9, 16), (21, 9)])
            unit = draw.uniform(40, 1500)
            size = (round(across * unit / 2), round(down * unit / 2))
        elif kind < 0.6:
            size = (draw.randint(200, 4000), draw.randint(200, 4000))
        elif kind < 0.75:
            size = (draw.randint(17, 700), draw.randint(17, 700))
        elif kind < 0.9:
            size = (16 * draw.randint(4, 128) + draw.choice([0, 0, -1, 1]), 16 * draw.randint(4, 128))
        else:
            side = draw.randint(100, 2000)
            size = (side, side + draw.randint(-12, 12))
        found[size] = None
    return list(found)


def sd_scripts() -> Iterator[tuple[str, Decide]]:
    """Its `BucketManager`, with its own limits and those that people set, as its data sets round them; the crop as its loader cuts it."""
    from library import config_util, train_util

    def decide(manager: Any, width: int, height: int) -> Row:
        bucket, resized, _error = manager.select_bucket(width, height)
        left, top = ((one - other) // 2 if one > other else 0 for one, other in zip(resized, bucket, strict=True))
        return *bucket, *resized, left, top

    both = config_util.DreamBoothDatasetParams.min_bucket_reso, config_util.DreamBoothDatasetParams.max_bucket_reso
    usual = [(resolution, step, *both) for resolution in RESOLUTIONS for step in (64, 32)]
    for resolution, step, least, most in (*usual, (256, 64, *both), (1024, 64, 256, 2048), (1024, 64, 512, 1536), (512, 64, 250, 1000)):
        square = (resolution, resolution)
        limits = train_util.BaseDataset.adjust_min_max_bucket_reso_by_steps(None, square, least, most, step)
        manager = train_util.BucketManager(False, square, *limits, step)
        manager.make_buckets()
        yield f"{resolution}/{step}/1/{least}/{most}", lambda width, height, manager=manager: decide(manager, width, height)
    for resolution in RESOLUTIONS:
        manager = train_util.BucketManager(True, (resolution, resolution), *both, 64)
        yield f"{resolution}/64/0", lambda width, height, manager=manager: decide(manager, width, height)


def musubi() -> Iterator[tuple[str, Decide]]:
    """Its `BucketSelector`, and its `resize_image_to_bucket`, which is watched while it resizes and cuts."""
    from musubi_tuner.dataset import bucket, media_utils

    def decide(selector: Any, width: int, height: int) -> Row:
        chosen = tuple(map(int, selector.get_bucket_resolution((width, height))))
        if min(chosen) == 0:
            return *chosen, 0, 0, 0, 0
        seen: dict[str, tuple[int, ...]] = {"resized": (width, height)}

        def resize(image: object, size: tuple[int, int], **_more: object) -> Any:
            del image
            seen["resized"] = size
            return Cut()

        class Cut:
            def __getitem__(self, rows: Any) -> "Cut":
                seen["at"] = (rows[1].start, rows[0].start)
                return self

        class Source:
            shape = (height, width, 3)

            def resize(self, size: tuple[int, int], *_filter: object) -> Any:
                return resize(self, size)

        media_utils.cv2 = SimpleNamespace(resize=resize, INTER_AREA=0)
        media_utils.Image = SimpleNamespace(Image=type("Image", (), {}), fromarray=lambda image: image, LANCZOS=0)
        media_utils.np = SimpleNamespace(array=lambda image: image, ndarray=np.ndarray)
        media_utils.resize_image_to_bucket(Source(), chosen)
        return *chosen, *seen["resized"], *seen.get("at", (0, 0))

    for resolution in RESOLUTIONS:
        for no_upscale in (False, True):
            selector = bucket.BucketSelector((resolution, resolution), True, no_upscale, "zi")
            yield f"{resolution}/16/{int(not no_upscale)}", lambda width, height, selector=selector: decide(selector, width, height)


def ai_toolkit() -> Iterator[tuple[str, Decide]]:
    """Its `BucketsMixin.setup_buckets`, for one picture at a time."""
    from toolkit import dataloader_mixins

    def decide(resolution: int, step: int, width: int, height: int) -> Row:
        config = SimpleNamespace(scale=1.0, square_crop=False, random_crop=False, resolution=resolution, bucket_tolerance=step)
        item = SimpleNamespace(width=width, height=height, dataset_config=config, has_point_of_interest=False, num_frames=1)
        data = dataloader_mixins.BucketsMixin()
        data.__dict__ |= {"file_list": [item], "dataset_config": config, "epoch_num": 0, "is_audio_model": False, "is_video": False}
        data.__dict__ |= {"shuffle_buckets": lambda: None, "build_batch_indices": lambda: None}
        data.setup_buckets(quiet=True)
        return item.crop_width, item.crop_height, item.scale_to_width, item.scale_to_height, item.crop_x, item.crop_y

    for resolution in RESOLUTIONS:
        for step in (16, 32):
            yield f"{resolution}/{step}/1", lambda *size, resolution=resolution, step=step: decide(resolution, step, *size)


def simpletuner() -> Iterator[tuple[str, Decide]]:
    """Its `TrainingSample` with `crop`, `crop_aspect=preserve`, `crop_style=center` and `resolution_type=pixel_area`.

    The table of sizes by aspect ratio, which it fills in the order of the pictures, is emptied for each picture.
    """
    from simpletuner.helpers.image_manipulation import training_sample
    from simpletuner.helpers.training.state_tracker import StateTracker

    model = SimpleNamespace(MAXIMUM_CANVAS_SIZE=None, get_transforms=lambda: None)
    StateTracker._save_to_disk = classmethod(lambda *_args, **_more: None)

    def decide(resolution: int, step: int, width: int, height: int) -> Row:
        config = {"crop": True, "crop_aspect": "preserve", "crop_style": "center", "resolution_type": "area"}
        config |= {"resolution": (resolution * resolution) / (1000**2)}
        StateTracker.get_args = classmethod(lambda _cls: SimpleNamespace(aspect_bucket_alignment=step, aspect_bucket_rounding=2))
        StateTracker.get_data_backend_config = classmethod(lambda _cls, _name: config)
        StateTracker.aspect_resolution_map = {}
        sample = training_sample.TrainingSample(None, "x", image_metadata={"original_size": (width, height)}, model=model)
        bucket, resized, _aspect = sample.calculate_target_size()
        sample.cropper.set_intermediary_size(*resized)
        _picture, (top, left) = sample.cropper.crop(*bucket)
        return *map(int, bucket), *map(int, resized), left, top

    for resolution in RESOLUTIONS:
        for step in (64, 16):
            yield f"{resolution}/{step}/1", lambda *size, resolution=resolution, step=step: decide(resolution, step, *size)


def diffusers() -> Iterator[tuple[str, Decide]]:
    """What `train_text_to_image_lora_sdxl.py --center_crop` does, by the arithmetic of torchvision's transforms."""
    from torchvision.transforms import functional
    from torchvision.transforms.functional import _compute_resized_output_size

    def decide(resolution: int, width: int, height: int) -> Row:
        down, across = _compute_resized_output_size((height, width), [resolution])
        seen: list[int] = []
        before = functional.crop
        functional.crop = lambda _image, top, left, _height, _width: seen.extend((left, top))
        functional.get_dimensions, dimensions = (lambda _image: (3, down, across)), functional.get_dimensions
        try:
            functional.center_crop(None, [resolution, resolution])
        finally:
            functional.crop, functional.get_dimensions = before, dimensions
        return resolution, resolution, across, down, seen[0], seen[1]

    for resolution in RESOLUTIONS:
        yield f"{resolution}/8/1", lambda *size, resolution=resolution: decide(resolution, *size)


RECORDERS = {
    "sd-scripts": (sd_scripts, ("library.sdxl_lpw_stable_diffusion", "library.lpw_stable_diffusion", "library.custom_train_functions")),
    "musubi": (musubi, ()),
    "simpletuner": (simpletuner, ("simpletuner.helpers.training.multi_process",)),
    "ai-toolkit": (ai_toolkit, ("torchaudio", "controlnet_aux", "albumentations", "lycoris", "optimum", "torchao")),
    "diffusers": (diffusers, ()),
}


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainer", choices=RECORDERS)
    parser.add_argument("--checkout", type=Path, help="a checkout of the trainer")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    asked = parser.parse_args()
    recorder, stand_ins = RECORDERS[asked.trainer]
    if asked.trainer == "diffusers":
        commit = ""
        import_torchvision()
    else:
        use_checkout(asked.trainer, asked.checkout, stand_ins)
        commit = commit_of(asked.checkout)
    taken = sizes()
    tables: dict[str, Any] = {}
    for name, decide in recorder():
        tables[name] = np.array([_row(decide, *size) for size in taken], np.int32).T
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(asked.out, commit=np.array(commit), sizes=np.array(taken, np.int32).T, **tables)
    print(f"{asked.out}: {len(tables)} settings of {len(taken)} sizes, {asked.out.stat().st_size} bytes")


def _row(decide: Decide, width: int, height: int) -> Row:
    """Return a row; zeros for a size that the trainer fails at, or whose bucket has no pixels."""
    try:
        row = decide(width, height)
        return row if min(row[:2]) > 0 else _NONE
    except ZeroDivisionError:
        return _NONE


if __name__ == "__main__":
    main()
