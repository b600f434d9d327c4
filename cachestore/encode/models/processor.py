"""Prepare captions and pictures for a text encoder by transformers' own tokenizer and image processor. Does not import torch itself.

Replaces transformers' processors, whose constructors need torchvision for pictures or videos that are not used here. Pictures are always
prepared by the image processor based on Pillow: torchvision's rounds differently, and a key must not depend on what is installed.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.errors import BadInput
from cachestore.encode.models.folders import Component

if TYPE_CHECKING:
    from typing_extensions import Self

_IMAGE_PROCESSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "Qwen2VLProcessor": ("Qwen2VLImageProcessorPil", "Qwen2VLImageProcessor"),
    "Qwen2_5_VLProcessor": ("Qwen2VLImageProcessorPil", "Qwen2VLImageProcessor"),
}
"""The image processors based on Pillow, by the class of the processor: the name since transformers 5, and the older one."""
_PICTURE: Final = "<|image_pad|>"
"""Stands for a picture in a text. It is repeated for each of the picture's merged patches before tokenisation."""


class Processor:
    """A tokenizer and an image processor, called like a processor of transformers. Other attributes are those of the tokenizer."""

    def __init__(self, tokenizer: Any, image_processor: Any = None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    @classmethod
    def of(cls, component: Component) -> "Self":
        """Load both from a processor's folder. Raises BadInput if the class of the processor is not known."""
        names = _IMAGE_PROCESSORS.get(component.class_name)
        if names is None:
            known = ", ".join(sorted(_IMAGE_PROCESSORS))
            raise BadInput(
                f"the processor in {component.folder} is a {component.class_name}, which is not supported; supported are {known}"
            )
        transformers: Any = importlib.import_module("transformers")
        image_processor = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
        tokenizer = transformers.AutoTokenizer.from_pretrained(component.folder, local_files_only=True, trust_remote_code=False)
        return cls(tokenizer, image_processor.from_pretrained(component.folder, local_files_only=True))

    @classmethod
    def of_text(cls, component: Component) -> "Self":
        """Load the tokenizer alone, for captions without pictures. The class of the processor does not matter."""
        transformers: Any = importlib.import_module("transformers")
        return cls(transformers.AutoTokenizer.from_pretrained(component.folder, local_files_only=True, trust_remote_code=False))

    def __call__(self, text: str | Sequence[str], images: Any = None, videos: None = None, **options: Any) -> Any:
        """Return a BatchFeature: token ids with their mask and, if there are images, pixels with their grids."""
        assert videos is None
        batch_feature: Any = importlib.import_module("transformers").BatchFeature
        texts = [text] if isinstance(text, str) else list(text)
        seen: Mapping[str, Any] = {} if images is None else self.image_processor(images=images, return_tensors="pt")
        patches = [int(grid.prod()) for grid in seen.get("image_grid_thw", ())]
        read = self.tokenizer(texts if images is None else self._expanded(texts, patches), **options)
        return batch_feature(data={**read, **seen})

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = False, return_dict: bool = True, **options: Any) -> Any:
        """Return the text of a conversation or of several, or their token ids. As in transformers, ids have an axis for the batch."""
        prompts = {name: options.pop(name) for name in ("add_generation_prompt", "continue_final_message") if name in options}
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **prompts)
        if not tokenize:
            return text
        first, start = text if isinstance(text, str) else text[0], self.tokenizer.bos_token
        if start is not None and first.startswith(start):
            options["add_special_tokens"] = False
        read = self(text, **options)
        return read if return_dict else read["input_ids"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in {"tokenizer", "image_processor"}:
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def count(self, text: str, images: Sequence[Any]) -> int:
        """Return how many tokens a text with these Pillow images has, by the sizes of the images."""
        patches = [int(self.image_processor.get_number_of_image_patches(image.height, image.width)) for image in images]
        return len(self.tokenizer(self._expanded([text], patches), verbose=False)["input_ids"][0])

    def _expanded(self, texts: Sequence[str], patches: Sequence[int]) -> list[str]:
        counts = iter([count // self.image_processor.merge_size**2 for count in patches])
        split = [text.split(_PICTURE) for text in texts]
        return [first + "".join(_PICTURE * next(counts, 1) + part for part in others) for first, *others in split]
