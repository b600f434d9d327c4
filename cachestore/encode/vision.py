"""The encoder of frames by a vision encoder, such as Wan's CLIP. `vision_model` has what needs torch."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.keys import Json, Key
from cachestore.encode.latents import PictureEncoder, resampled_recipe, resolved_from
from cachestore.encode.models import Component
from cachestore.encode.resamplers import FIRST, Resample, check_resampler
from cachestore.encode.setup import text_width
from cachestore.encode.shots import LookAtEnds
from cachestore.encode.unit import Prepared, Read, Resolved, Result

if TYPE_CHECKING:
    from cachestore.encode.vision_model import VisionModel

BATCH: Final = 32
"""How many prepared pictures, of 224 x 224 pixels, wait for a batch and go into one."""
_PATCH: Final = 14


@dataclass(frozen=True, slots=True)
class VisionSetup:
    """What must be loaded for a vision encoder, and which of its outputs is stored."""

    components: Mapping[str, Component]
    """The vision encoder and its image processor, in this order."""
    dtype: str
    layer: int | None
    """The index of the hidden states; None for the last ones, which are normalised."""
    name: str
    """The name of the tensor, in entries and in a batch."""
    resample: Resample = FIRST


class VisionEncoder(PictureEncoder[VisionSetup, LookAtEnds]):
    """Implements `unit.Encoder` for the frames with which a clip begins and ends.

    They are scaled and cropped to the clip's bucket first, as the VAE sees them, and then prepared by the model's own image processor. One
    frame makes [tokens, width], two make [2, tokens, width].
    """

    _processor: Any = None
    _model: "VisionModel | None" = None

    def resampled(self, name: Resample) -> "VisionEncoder":
        """Return this encoder for frames that are resized in the named way. Its recipe and all keys differ."""
        setup = replace(self.setup, resample=name)
        return VisionEncoder(resampled_recipe(self.recipe, name), setup, self._look, device=self._device, batch_size=self._batch_size)

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find the frames of a video, and the pictures that are brought instead. Raises EncodeFailed if one cannot be read."""
        return resolved_from(self._look(request, read, self.setup.resample), self.recipe.encoder, self._fingerprint)

    def prepare(self, resolved: Resolved) -> Prepared:
        """Decode the frames, and prepare them by the image processor: float32 [frames, 3, height, width]."""
        check_resampler(self.setup.resample)
        pixels = self._processed(list(resolved.item.frames(self.setup.resample)))
        return Prepared(pixels, pixels.shape, cost=len(pixels))

    def _processed(self, frames: Sequence[Any]) -> Any:
        from PIL import Image

        if self._processor is None:
            from cachestore.encode import modules

            self._processor = modules.load_image_processor(list(self.setup.components.values())[1])
        return self._processor(images=[Image.fromarray(frame) for frame in frames], return_tensors="np")["pixel_values"]

    @property
    def window(self) -> int:
        """One batch."""
        return BATCH

    def batch_limit(self, group: Hashable) -> int:
        """Return how many units go into one batch at most."""
        del group
        if self._model is not None and self._model.is_single:
            return 1
        return self._batch_size if isinstance(self._batch_size, int) else BATCH

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, pixels) pairs. The result raises EncodeFailed if embeddings are unusable, such as NaN."""
        if not batch:
            return dict
        if self._model is None:
            from cachestore.encode import modules, vision_model

            self._model = vision_model.VisionModel(self.setup, modules.choose_device(self._device))
        return self._model.submit(batch)

    def encode(self, batch: Sequence[tuple[Key, Any]]) -> Mapping[Key, Mapping[str, Any]]:
        """Encode as `submit`, and wait for the result."""
        return self.submit(batch)()

    def close(self) -> None:
        """Release the model's memory."""
        self._processor = None
        if self._model is not None:
            self._model = None
            from cachestore.encode import modules

            modules.free_memory()

    def entry_bytes(self, bucket: Sequence[int], frames: int = 1) -> int:
        """Return about how many bytes one entry takes; it does not depend on the bucket."""
        del bucket, frames
        config: Mapping[str, Any] = next(iter(self.setup.components.values())).config
        side = int(config.get("image_size") or 224) // int(config.get("patch_size") or _PATCH)
        ends, has_class = len(self.recipe.make["roles"]), "CLIP" in next(iter(self.setup.components.values())).class_name
        return ends * (side * side + has_class) * text_width(config) * (4 if self.setup.dtype == "float32" else 2)
