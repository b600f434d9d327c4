"""Call a vision encoder and its image processor. Imports torch."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cachestore.core.keys import Key
from cachestore.encode.modules import DTYPES, load_module
from cachestore.encode.outputs import Entries, Made, difference, fetch, make_sound, tolerance
from cachestore.encode.transfer import Transfer
from cachestore.encode.unit import Result
from cachestore.encode.vision import VisionSetup

_log = logging.getLogger(__name__)

Batch = Sequence[tuple[Key, Any]]


class VisionModel:
    """A loaded vision encoder. Use it from one thread."""

    def __init__(self, setup: VisionSetup, device: torch.device) -> None:
        """Load it onto the device, and probe it with a batch of two."""
        component = next(iter(setup.components.values()))
        self._model = load_module(component, setup.dtype, device)
        self._setup, self._dtype = setup, DTYPES[setup.dtype]
        self._transfer = Transfer(device)
        side = int(component.config.get("image_size") or 224)
        noise = np.random.default_rng(0).standard_normal((2, 1, 3, side, side), dtype=np.float32)
        pairs = [(Key(bytes([number] * 16)), pixels) for number, pixels in enumerate(noise)]
        alone = [self._begin([pair])()[pair[0]] for pair in pairs]
        together = self._begin(pairs)()
        found = [difference(one, together[key], tolerance(setup.dtype, device)) for one, (key, _pixels) in zip(alone, pairs, strict=True)]
        self.is_single = any(found)
        """Whether pictures are encoded one by one."""
        if self.is_single:
            why = next(filter(None, found))
            _log.warning("%s gives other embeddings in a batch than alone: %s; pictures are encoded one by one", component.class_name, why)

    def submit(self, batch: Batch) -> Result:
        """Begin to encode pictures, as `VisionEncoder.submit`."""
        begun = self._begin(batch)
        return lambda: make_sound("the vision encoder", batch, begun(), lambda some: self._begin(some)(), [self._model])

    def _begin(self, batch: Batch) -> Callable[[], Entries]:
        """Begin to encode pixels [frames, 3, height, width]. Call the returned function for the entries, on the CPU."""
        name = self._setup.name
        with torch.inference_mode():
            pixels = self._transfer.to_device(self._transfer.stacked([pixels for _key, pixels in batch])).to(self._model.dtype)
            layer = self._setup.layer
            made = self._model(pixel_values=pixels.flatten(0, 1), output_hidden_states=layer is not None)
            states = made.last_hidden_state if layer is None else made.hidden_states[layer]
            rows: Tensor = states.unflatten(0, pixels.shape[:2]).to(self._dtype)
            rows = (rows[:, 0] if pixels.shape[1] == 1 else rows).contiguous()
            begun = fetch(self._transfer, {name: rows}, [name], len(batch))

        def finish() -> Entries:
            copied, finite = begun()
            made = [Made({name: row}, is_finite=one) for row, one in zip(copied[name], finite, strict=True)]
            return {key: entry for (key, _pixels), entry in zip(batch, made, strict=True)}

        return finish
