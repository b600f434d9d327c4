"""A small stand-in of torchvision's transforms, for an environment that lacks torchvision: what trainers' data sets do to pictures."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch


class Compose:
    """Calls one after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class ToTensor:
    """Makes `[3, H, W]` in 0 to 1 of a picture."""

    def __call__(self, picture: Any) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(picture))
        return (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)).float() / 255


class Normalize:
    """Subtracts the mean and divides by the deviation, by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(one).view(-1, 1, 1) for one in (mean, std))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor - self.mean) / self.std


class Unused:
    """A transform that no case asks for."""

    def __init__(self, *_values: object, **_options: object) -> None: ...

    def __call__(self, _value: object) -> Any:
        raise NotImplementedError("this transform has no stand-in")


def use_stand_in() -> None:
    """Let `torchvision.transforms` be these classes."""
    root, transforms, functional = (ModuleType(f"torchvision{one}") for one in ("", ".transforms", ".transforms.functional"))
    vars(functional).update(to_tensor=ToTensor(), InterpolationMode=Unused)
    vars(transforms).update(Compose=Compose, ToTensor=ToTensor, Normalize=Normalize, functional=functional, transforms=transforms)
    for name in ("ColorJitter", "RandomEqualize", "CenterCrop", "RandomCrop", "Resize", "InterpolationMode", "Lambda"):
        setattr(transforms, name, Unused)
    vars(root).update(transforms=transforms, models=ModuleType("torchvision.models"), __path__=[])
    for module in (root, transforms, functional, root.models):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
