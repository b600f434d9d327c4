"""Calling text encoders: through their pipeline's `encode_prompt`, or a transformers model alone. Imports torch.

Whatever was called, the result is treated alike: rows that the mask calls padding are dropped, joined tensors are taken apart, and
each entry's tensors are copied out of the batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cachestore.encode.families import TextFamily
from cachestore.encode.modules import DTYPES, Foreign, build_pipeline, load_module, load_tokenizer
from cachestore.encode.setup import Payload, TextSetup, padded_length
from cachestore.errors import BadInput, EncodeFailed
from cachestore.keys import Json, Key

Batch = Sequence[tuple[Key, Payload]]
Call = Callable[[Sequence[Any]], Mapping[str, Tensor]]
"""From payloads to batched tensors by the family's names."""

CPU_TOKENS, GPU_TOKENS = 2_048, 32_768
"""Tokens of a batch, padding included, that keep a device busy without filling its memory."""


def text_batch(length: int, device: torch.device) -> int:
    """How many captions of this padded length make a good batch."""
    budget, most = (CPU_TOKENS, 32) if device.type == "cpu" else (GPU_TOKENS, 256)
    return max(1, min(most, budget // max(1, length)))


class TextModules:
    """A text encoder's modules, loaded. Use from one thread."""

    def __init__(self, setup: TextSetup, device: torch.device) -> None:
        """Load them onto the device."""
        parts = {
            name: load_tokenizer(component) if name.startswith("tokenizer") else load_module(component, setup.dtype, device)
            for name, component in setup.components.items()
        }
        self._family = setup.family
        self._dtype = DTYPES[setup.dtype]
        self._widths = {name: _width(part) for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        if setup.family.pipeline is None:
            self._call: Call = _model_call(parts, setup.max_tokens, device)
        else:
            self._call = _pipeline_call(build_pipeline(setup.family.pipeline, parts), setup, device)

    def encode(self, batch: Batch) -> dict[Key, dict[str, Tensor]]:
        """Embed (key, payload) pairs. Raises EncodeFailed where a value is not finite, naming the first such entry."""
        with torch.inference_mode():
            returned = {name: tensor.to("cpu") for name, tensor in self._call([payload for _, payload in batch]).items()}
        return {key: self._entry(key, payload, returned, row) for row, (key, payload) in enumerate(batch)}

    def _entry(self, key: Key, payload: Payload, returned: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        """The tensors of one entry, each with memory of its own. Outside inference mode, so that a caller may use them freely."""
        mask = None if self._family.mask is None else returned[self._family.mask][row].bool()
        entry: dict[str, Tensor] = {}
        for name, form in self._family.outputs.items():
            tensor = returned[name][row]
            if mask is not None and name in self._family.pad:
                tensor = tensor[mask]
            if not bool(torch.isfinite(tensor).all()):
                message = f"the text encoder made NaN or infinite numbers in {name!r} of entry {key} ({_shown(payload)}) in {self._dtype}"
                raise EncodeFailed(message)
            for stored, piece in _apart(form, tensor, self._widths).items():
                entry[stored] = piece.to(self._dtype).clone(memory_format=torch.contiguous_format)
        return entry


def _apart(form: Mapping[str, Json], tensor: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The stored tensors that a form makes this one from: the inverse of reading."""
    if "from" in form:
        return {form["from"]: tensor}
    names: list[str] = form["join"]
    sizes = [widths[name.rpartition(".")[2]] for name in names]
    return dict(zip(names, tensor.split(sizes, dim=form["dim"]), strict=True))


def _width(module: torch.nn.Module) -> int:
    config: Any = module.config
    return int(getattr(config, "hidden_size", None) or config.d_model)


def _shown(payload: Payload) -> str:
    return f"caption {payload[:60]!r}" if isinstance(payload, str) else f"{len(payload)} tokens"


def _pipeline_call(pipeline: Foreign, setup: TextSetup, device: torch.device) -> Call:
    """`encode_prompt` of a pipeline, with its results under the family's names."""

    def call(captions: Sequence[str]) -> dict[str, Tensor]:
        arguments = prompt_arguments(pipeline.encode_prompt, setup.args, len(captions), device)
        # A copy: Z-Image writes its chat template into the list it is given, and a second call would nest it.
        return _named(setup.family, pipeline.encode_prompt(list(captions), **arguments))

    return call


def prompt_arguments(encode_prompt: Callable[..., Any], args: Mapping[str, Json], count: int, device: torch.device) -> dict[str, Any]:
    """What `encode_prompt` is called with besides the captions: the recipe's arguments, the batch's, and None where it insists."""
    given = {
        "device": device,
        "num_images_per_prompt": 1,
        "num_videos_per_prompt": 1,
        "do_classifier_free_guidance": False,
        "batch_size": count,
        **args,
    }
    parameters = list(inspect.signature(encode_prompt).parameters.values())[1:]
    names = {parameter.name for parameter in parameters}
    unknown = sorted(set(args) - names)
    if unknown:
        message = f"encode_prompt of the installed diffusers takes no {', '.join(unknown)}; it takes {', '.join(sorted(names))}"
        raise BadInput(message)
    return {
        parameter.name: given.get(parameter.name)
        for parameter in parameters
        if parameter.name in given or parameter.default is parameter.empty
    }


def _named(family: TextFamily, returned: Foreign) -> dict[str, Tensor]:
    if not isinstance(returned, tuple | list) or len(returned) != len(family.returns):
        message = f"encode_prompt of {family.pipeline} should return {len(family.returns)} values; the installed diffusers does otherwise"
        raise BadInput(message)
    return {name: tensor for name, tensor in zip(family.returns, returned, strict=True) if name is not None}


def _model_call(parts: Mapping[str, Foreign], limit: int, device: torch.device) -> Call:
    """The last hidden states of a model, padded to the group's length so that values do not depend on the batch."""
    whole = parts["text_encoder"]
    model = whole.get_encoder() if getattr(whole.config, "is_encoder_decoder", False) else whole
    padding = parts["tokenizer"].pad_token_id or 0

    def call(payloads: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        length = padded_length(max(len(ids) for ids in payloads), limit)
        ids = torch.tensor([[*payload, *([padding] * (length - len(payload)))] for payload in payloads], device=device)
        real = torch.tensor([[1] * len(payload) + [0] * (length - len(payload)) for payload in payloads], device=device)
        states = model(input_ids=ids, attention_mask=real).last_hidden_state
        return {"prompt_embeds": states, "prompt_attention_mask": real}

    return call
