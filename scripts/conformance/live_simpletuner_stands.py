"""Makes SimpleTuner's caching code importable from a checkout, for `live_simpletuner.py`: small stand-ins for what is not installed."""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import contextlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from conformance.trainers_code import import_torchvision, use_checkout
from PIL import Image

_EMPTY = (
    "torchaudio",
    "lycoris",
    "peft",
    "bitsandbytes",
    "torchao",
    "optimum",
    "wandb",
    "torchsde",
    "boto3",
    "botocore",
    "fastapi",
    "toml",
)
EMPTY = (*_EMPTY, "sentencepiece", "httpx", "lxml", "starlette", "simpletuner.simpletuner_sdk.server.services.prompt_library_service")


@contextlib.contextmanager
def atomic_write(path: str, mode: str = "wb", **_more: object) -> Generator[Any]:
    """Write beside the file, sync and rename, as the package does."""
    beside = f"{path}.{secrets.token_hex(4)}.tmp"
    with open(beside, mode) as file:  # noqa: PTH123
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)  # noqa: PTH105


def _resized(images: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    return [np.asarray(Image.fromarray(one).resize(size, Image.Resampling.LANCZOS)) for one, size in zip(images, sizes, strict=True)]


def _cropped(images: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    found = []
    for one, (width, height) in zip(images, sizes, strict=True):
        top, left = (one.shape[0] - height) // 2, (one.shape[1] - width) // 2
        found.append(one[top : top + height, left : left + width])
    return found


def _decoded(data: Any, flag: int) -> Any:
    import cv2

    return cv2.imdecode(np.frombuffer(data, np.uint8), flag)


def _converted(image: Any, code: int) -> np.ndarray:
    import cv2

    return cv2.cvtColor(image, code)


class _Compose:
    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = steps

    def __call__(self, image: Any) -> Any:
        for step in self.steps:
            image = step(image)
        return image


class _ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        array = np.array(image)
        array = array if array.ndim == 3 else array[..., None]
        return torch.from_numpy(array).permute(2, 0, 1).float() / 255


class _Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float], **_more: object) -> None:
        self.mean, self.std = (torch.tensor(list(one))[:, None, None] for one in (mean, std))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor - self.mean) / self.std


def _module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.util.spec_from_loader(name, None)
    made.__path__ = []
    vars(made).update(names)
    sys.modules[name] = made
    return made


def use_simpletuner(checkout: Path) -> list[str]:
    """Make SimpleTuner importable from a checkout, and return what has stand-ins."""
    import diffusers
    import transformers

    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    # Before there is a stand-in: these look for torchvision when they are loaded.
    for library, names in ((transformers, "PreTrainedModel CLIPTextModel CLIPTokenizer CLIPImageProcessor T5EncoderModel"),):
        for name in names.split():
            getattr(library, name)
    _ = diffusers.AutoencoderKL, diffusers.StableDiffusionXLPipeline, diffusers.FluxPipeline
    lacking = [name for name in ("torchvision", "trainingsample", "atomicwrites") if importlib.util.find_spec(name) is None]
    if "torchvision" in lacking:
        transforms = _module("torchvision.transforms", Compose=_Compose, ToTensor=_ToTensor, Normalize=_Normalize)
        transforms.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
        _module("torchvision", transforms=transforms)
        for name in ("io", "io.video_reader", "transforms.functional"):
            _module(f"torchvision.{name}").__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]
    if "trainingsample" in lacking:
        calls = {"batch_resize_images": _resized, "batch_center_crop_images": _cropped, "batch_random_crop_images": _cropped}
        _module("trainingsample", imdecode_py=_decoded, cvt_color_py=_converted, **calls)
    if "atomicwrites" in lacking:
        _module("atomicwrites", atomic_write=atomic_write)
    return [*lacking, *use_checkout("simpletuner", checkout, EMPTY)]
