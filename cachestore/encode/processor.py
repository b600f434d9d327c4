"""Captions and pictures to what a text encoder takes, by transformers' own tokenizer and image processor. Imports no torch itself.

Stands in the place of `Qwen2VLProcessor`, whose constructor wants torchvision for videos that nobody has here. Pictures are always
prepared by the image processor that runs on Pillow: torchvision's rounds otherwise, and a key must not depend on what is installed.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from cachestore.core.errors import BadInput
from cachestore.encode.models import Component

_IMAGE_PROCESSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "Qwen2VLProcessor": ("Qwen2VLImageProcessorPil", "Qwen2VLImageProcessor"),
    "Qwen2_5_VLProcessor": ("Qwen2VLImageProcessorPil", "Qwen2VLImageProcessor"),
}
"""By class of a processor those of its image processor that run on Pillow: the name since transformers 5, and the one before."""

_PICTURE: Final = "<|image_pad|>"
"""Stands in a text for a picture; the text encoder finds one in the place of each of the picture's merged patches."""


class Processor:
    """A tokenizer and an image processor, called as a processor of transformers is."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    @classmethod
    def of(cls, component: Component) -> Self:
        """Load both from a processor's folder. Raises BadInput for a class of processors that is not known."""
        names = _IMAGE_PROCESSORS.get(component.class_name)
        if names is None:
            known = ", ".join(sorted(_IMAGE_PROCESSORS))
            raise BadInput(
                f"the processor in {component.folder} is a {component.class_name}, which is not supported; supported are {known}"
            )
        transformers: Any = importlib.import_module("transformers")
        image_processor = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
        tokenizer = transformers.AutoTokenizer.from_pretrained(component.folder, local_files_only=True)
        return cls(tokenizer, image_processor.from_pretrained(component.folder, local_files_only=True))

    def __call__(self, text: Sequence[str], images: Any = None, *, padding: bool = False, return_tensors: str = "pt") -> Any:
        """Token ids with their mask, and pixels with their grids where there are images: a BatchFeature, as the processor's own."""
        batch_feature: Any = importlib.import_module("transformers").BatchFeature
        seen: Mapping[str, Any] = {} if images is None else self.image_processor(images=images, return_tensors=return_tensors)
        patches = [int(grid.prod()) for grid in seen.get("image_grid_thw", ())]
        read = self.tokenizer(self._expanded(text, patches), padding=padding, return_tensors=return_tensors)
        return batch_feature(data={**read, **seen})

    def count(self, text: str, images: Sequence[Any]) -> int:
        """How many tokens a text with these Pillow images has; their pixels are not looked at."""
        patches = [int(self.image_processor.get_number_of_image_patches(image.height, image.width)) for image in images]
        return len(self.tokenizer(self._expanded([text], patches), verbose=False)["input_ids"][0])

    def _expanded(self, texts: Sequence[str], patches: Sequence[int]) -> list[str]:
        """The texts with a token for each merged patch, for as many pictures as there are, in order."""
        counts = iter([count // self.image_processor.merge_size**2 for count in patches])
        split = [text.split(_PICTURE) for text in texts]
        return [first + "".join(_PICTURE * next(counts, 1) + part for part in others) for first, *others in split]
