"""Scales of weights in 8 bits, as ComfyUI writes them beside the weights (`fp8_scaled`). Imports torch.

`X.weight` stands for its values times `X.scale_weight` (or `X.weight_scale`), which is one number, or one for each row. `X.scale_input` and
`X.input_scale` are for products in 8 bits. Everything is computed in more bits here, so these are not needed, and are left out.
`quantization_config` in config.json is another thing: it is for the library, which then reads the weights itself.
"""

import json
from collections.abc import Collection, Mapping

from torch import Tensor, dtype, float32

from cachestore.core.errors import WRONG_FIELDS, BadInput
from cachestore.core.words import first_of, plural
from cachestore.encode.models.folders import INPUT_SCALES, QUANTIZED_AS, SCALES, is_scale_mark
from cachestore.encode.models.single_file import TOKENS

_EIGHT_BITS = ("torch.float8_e4m3fn", "torch.float8_e5m2")


def with_scales(
    tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor], names: Collection[str], where: object, to: dtype
) -> dict[str, Tensor]:
    """Return tensors with their scales multiplied in, in float32, and cast to a dtype. What belongs to the scales is left out.

    `scales` are those of all files of a component, from `scales_among`; `names` are all names in these files. Without scales, the tensors
    are returned as they are. Raises BadInput for a scale that does not fit its weight, for a weight in 8 bits that has no scale although
    others have one, and for values in another form.
    """
    if not scales:
        return dict(tensors)
    # ComfyUI's format has scales for matrices in 8 bits alone, and none for token embeddings
    matrices = (name for name, tensor in tensors.items() if str(tensor.dtype) in _EIGHT_BITS and tensor.ndim > 1)
    if lacking := sorted(name for name in matrices if name not in scales and not name.endswith(TOKENS)):
        raise BadInput(
            f"{where}: {plural(len(lacking), 'weight')} in 8 bits {'has' if len(lacking) == 1 else 'have'} no scale, but others have one:"
            f" {first_of(lacking)}; download the file again"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in scales:
            found[name] = (tensor.to(float32) * _fitting(name, tensor, scales[name], where)).to(to)
        elif name.endswith(QUANTIZED_AS):
            _check_form(name, tensor, where)
        elif not is_scale_mark(name) and weight_of(name, (*SCALES, *INPUT_SCALES)) not in names:
            found[name] = tensor
    return found


def scales_among(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return the scales among tensors by the name of their weight, which must be one of `names`."""
    pairs = ((weight_of(name, SCALES), tensor) for name, tensor in tensors.items() if name.endswith(SCALES))
    return {weight: tensor for weight, tensor in pairs if weight in names}


def weight_of(name: str, suffixes: tuple[str, ...]) -> str:
    """Return the name of the weight that a scale is for; empty if it is no scale."""
    return next((f"{name.removesuffix(suffix)}.weight" for suffix in suffixes if name.endswith(suffix)), "")


def _fitting(name: str, weight: Tensor, scale: Tensor, where: object) -> Tensor:
    scale = scale.to(float32)
    if weight.is_floating_point() and scale.numel() == 1:
        return scale.reshape(())
    if weight.is_floating_point() and weight.ndim > 0 and tuple(scale.shape) == (len(weight), *[1] * (scale.ndim - 1)):
        return scale.reshape(-1, *[1] * (weight.ndim - 1))
    raise BadInput(
        f"{where}: {name} ({weight.dtype}, {list(weight.shape)}) has a scale of shape {list(scale.shape)}, but only scales of whole weights"
        " and of their rows are known here; give the weights in 16 bits"
    )


def _check_form(name: str, tensor: Tensor, where: object) -> None:
    try:
        form = json.loads(bytes(tensor.tolist()))["format"]
    except WRONG_FIELDS as error:
        raise BadInput(f"{where}: {name} does not say how its weight is written; give the weights in 16 bits") from error
    if not str(form).startswith("float8"):
        raise BadInput(
            f"{where}: {name} says that its weight is written as {form!r:.40}, which is not known here; give the weights in 16 bits"
        )
