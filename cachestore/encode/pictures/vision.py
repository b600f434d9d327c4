"""The encoder of frames by a vision encoder, such as Wan's CLIP. Imports torch once a model is loaded."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from PIL import Image

from cachestore.core.keys import Json, Key, Recipe
from cachestore.encode.batching.unit import Prepared, Read, Resolved, Result
from cachestore.encode.families.resamplers import DEFAULT, Resample, check_resampler
from cachestore.encode.models.folders import Component
from cachestore.encode.models.setup import text_width
from cachestore.encode.pictures.kinds import Embedded
from cachestore.encode.pictures.latents import resampled_recipe, resolved_from

if TYPE_CHECKING:
    import torch

    from cachestore.encode.batching.outputs import Entries

_log = logging.getLogger(__name__)
Batch = Sequence[tuple[Key, Any]]
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
    resample: Resample = DEFAULT


class VisionEncoder:
    """Implements `unit.Encoder` for the frames with which a clip begins and ends.

    They are scaled and cropped to the clip's bucket first, as the VAE sees them, and then prepared by the model's own image processor. One
    frame makes [tokens, width], two make [2, tokens, width].
    """

    def __init__(
        self, recipe: Recipe, setup: VisionSetup, kind: Embedded, *, device: str = "auto", batch_size: int | Literal["auto"] = "auto"
    ) -> None:
        self.recipe = recipe
        self.setup = setup
        self.kind = kind
        self._fingerprint = recipe.fingerprint
        self._device = device
        self._batch_size: int | Literal["auto"] = batch_size
        self._processor: Any = None
        self._model: VisionModel | None = None

    def resampled(self, name: Resample) -> "VisionEncoder":
        """Return this encoder for frames that are resized in the named way. Its recipe and all keys differ."""
        setup = replace(self.setup, resample=name)
        return VisionEncoder(resampled_recipe(self.recipe, name), setup, self.kind, device=self._device, batch_size=self._batch_size)

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """Find the frames of a video, and the pictures that are brought instead. Raises EncodeFailed if one cannot be read."""
        return resolved_from(self.kind.read_files(request, read, self.setup.resample), self.recipe.encoder, self._fingerprint)

    def prepare(self, resolved: Resolved) -> Prepared:
        """Decode the frames, and prepare them by the image processor: float32 [frames, 3, height, width]."""
        check_resampler(self.setup.resample)
        frames = [Image.fromarray(frame) for frame in resolved.item.frames()]
        if self._processor is None:
            from cachestore.encode.models import modules

            self._processor = modules.load_image_processor(list(self.setup.components.values())[1])
        pixels = self._processor(images=frames, return_tensors="np")["pixel_values"]
        return Prepared(pixels, pixels.shape, cost=len(pixels))

    @property
    def window(self) -> int:
        """One batch."""
        return BATCH

    def batch_limit(self, _group: Hashable) -> int:
        """Return how many units go into one batch at most."""
        if self._model is not None and self._model.is_single:
            return 1
        return self._batch_size if isinstance(self._batch_size, int) else BATCH

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Begin to encode (key, pixels) pairs. The result raises EncodeFailed if embeddings are unusable, such as NaN."""
        if not batch:
            return dict
        if self._model is None:
            from cachestore.encode.models import modules

            self._model = VisionModel(self.setup, modules.choose_device(self._device))
        return self._model.submit(batch)

    def close(self) -> None:
        """Release the model's memory."""
        self._processor = None
        if self._model is not None:
            self._model = None
            from cachestore.encode.models import modules

            modules.free_memory()

    def entry_bytes(self, _bucket: Sequence[int], _frames: int = 1) -> int:
        """Return about how many bytes one entry takes; it does not depend on the bucket."""
        config: Mapping[str, Any] = next(iter(self.setup.components.values())).config
        side = int(config.get("image_size") or 224) // int(config.get("patch_size") or _PATCH)
        ends, has_class = len(self.kind.roles), "CLIP" in next(iter(self.setup.components.values())).class_name
        return ends * (side * side + has_class) * text_width(config) * (4 if self.setup.dtype == "float32" else 2)


class VisionModel:
    """A loaded vision encoder. Use it from one thread."""

    def __init__(self, setup: VisionSetup, device: "torch.device") -> None:
        """Load it onto the device, and probe it with a batch of two."""
        from cachestore.encode.batching.outputs import difference, tolerance
        from cachestore.encode.batching.transfer import Transfer
        from cachestore.encode.models.modules import DTYPES, load_module

        component = next(iter(setup.components.values()))
        self._model = load_module(component, setup.dtype, device)
        self._setup, self._dtype = setup, DTYPES[setup.dtype]
        self._transfer = Transfer(device)
        side = int(component.config.get("image_size") or 224)
        noise = np.random.default_rng(0).standard_normal((2, 1, 3, side, side), dtype=np.float32)
        pairs = [(Key(bytes([number] * 16)), pixels) for number, pixels in enumerate(noise)]
        alone = [self._begin([pair])()[pair[0]] for pair in pairs]
        together = self._begin(pairs)()
        allowed = tolerance(setup.dtype, device)
        differing = filter(None, (difference(made, together[key], allowed) for made, (key, _pixels) in zip(alone, pairs, strict=True)))
        why = next(differing, None)
        self.is_single = why is not None
        """Whether pictures are encoded one by one."""
        if why is not None:
            _log.warning("%s gives other embeddings in a batch than alone: %s; pictures are encoded one by one", component.class_name, why)

    def submit(self, batch: Batch) -> Result:
        """Begin to encode pictures, as `VisionEncoder.submit`."""
        from cachestore.encode.batching.outputs import make_sound

        begun = self._begin(batch)
        return lambda: make_sound("the vision encoder", batch, begun(), lambda some: self._begin(some)(), [self._model])

    def _begin(self, batch: Batch) -> "Callable[[], Entries]":
        """Begin to encode pixels [frames, 3, height, width]. Call the returned function for the entries, on the CPU."""
        import torch

        from cachestore.encode.batching.outputs import Made, fetch

        name = self._setup.name
        with torch.inference_mode():
            pixels = self._transfer.to_device(self._transfer.stacked([pixels for _key, pixels in batch])).to(self._model.dtype)
            layer = self._setup.layer
            made = self._model(pixel_values=pixels.flatten(0, 1), output_hidden_states=layer is not None)
            states = made.last_hidden_state if layer is None else made.hidden_states[layer]
            rows: torch.Tensor = states.unflatten(0, pixels.shape[:2]).to(self._dtype)
            rows = (rows[:, 0] if pixels.shape[1] == 1 else rows).contiguous()
            begun = fetch(self._transfer, {name: rows}, [name], len(batch))

        def finish() -> "Entries":
            copied, finite = begun()
            made = [Made({name: row}, is_finite=one) for row, one in zip(copied[name], finite, strict=True)]
            return {key: entry for (key, _pixels), entry in zip(batch, made, strict=True)}

        return finish
