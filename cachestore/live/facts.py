"""What values depend on, taken from what the trainer really uses: its modules, tokenizers, and the fields of its strategies."""

import functools
from collections.abc import Collection, Mapping
from types import FunctionType
from typing import Any

from cachestore.core.keys import Json, canonical, digest_bytes
from cachestore.live.adapter import refuse


def fingerprint(thing: Any) -> str:
    """Digest a torch module or a tokenizer into 64 hex digits: its class, and its weights with their dtypes, or what it would save.

    Weights are read on the device on which they are. A module whose weights are sharded, offloaded or quantised ends the run with exit
    code 2 (Refused), as does an object of another kind.
    """
    import torch

    from cachestore.core.errors import BadInput
    from cachestore.encode.models.loaded import digest_state, digest_tokenizer

    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    try:
        if isinstance(thing, torch.nn.Module):
            flags: dict[str, Json] = {
                name: value for name, value in sorted(vars(thing).items()) if isinstance(value, bool | int | float | str)
            }
            flags.pop("training", None)
            return digest_bytes(canonical([kind, flags, digest_state(kind, thing)]))
        return digest_bytes(canonical([kind, digest_tokenizer(thing)]))
    except (BadInput, AttributeError, TypeError) as error:
        refuse(f"what the values depend on cannot be told from a {kind}: {error}")


def precision() -> dict[str, Json]:
    """The dtype of autocast in this thread, by device type; empty outside autocast."""
    import torch

    kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]
    return {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds}


def settings(thing: Any, values: Collection[str], others: Collection[str] = ()) -> dict[str, Json]:
    """Return the fields of an object on which values depend, with digests in place of tokenizers and modules.

    `values` are the fields that count, `others` those that do not. A field in neither list ends the run with exit code 2: values could
    depend on it. A field that is listed and not there is left out.
    """
    if unknown := sorted({*vars(thing)} - {*values} - {*others}):
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        refuse(f"{kind} has the {'field' if len(unknown) == 1 else 'fields'} {', '.join(unknown)}, on which values may depend")
    return {"class": type(thing).__qualname__} | {name: _plain(getattr(thing, name)) for name in sorted(values) if name in vars(thing)}


def _plain(value: Any) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, FunctionType | functools.partial):
        refuse(f"values depend on the function {value!r}, which cannot be digested")
    if type(value).__module__ == "torch" or type(value).__module__ == "numpy":
        return str(value)
    return fingerprint(value)
