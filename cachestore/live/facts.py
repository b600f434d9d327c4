"""What values depend on, taken from what the trainer really uses: its modules, tokenizers, pictures and the fields of its strategies."""

import functools
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, cast

from cachestore.core.keys import Json, canonical, digest_bytes
from cachestore.files.fingerprints import digest_file
from cachestore.jobs.share.workers import host_name
from cachestore.live.adapter import refuse
from cachestore.live.run import current
from cachestore.store.write.model_digests import load_digests, publish_digests

if TYPE_CHECKING:
    import torch

THREADS: Final = min(8, os.cpu_count() or 1)
_BLOCK_NUMBERS: Final = 1 << 22
"""How many numbers of a tensor are copied to the CPU at once."""
_NO_VALUES: Final = frozenset({"training", "gradient_checkpointing", "name_or_path"})
"""Fields of modules on which values do not depend: encoders are in evaluation mode, and a model may lie anywhere."""


def fingerprint(thing: Any) -> str:
    """Digest a torch module or a tokenizer into 64 hex digits: classes, flags and weights with their dtypes, or what it would save.

    Weights are read on the device on which they are, by a few threads. A module whose weights are sharded, offloaded or quantised, or that
    has adapters, ends the run with exit code 2 (Refused), as does an object of another kind.
    """
    return _fingerprint(_kind(thing), thing)


def _fingerprint(where: str, thing: Any) -> str:
    import torch

    from cachestore.encode.models.loaded import digest_tokenizer

    kind = _kind(thing)
    if isinstance(thing, torch.nn.Module):
        modules: list[Json] = [[name, _kind(module), _flags(module)] for name, module in cast("Any", thing).named_modules()]
        return digest_bytes(canonical([kind, modules, _digest_weights(kind, thing)]))
    try:
        return digest_bytes(canonical([kind, digest_tokenizer(thing)]))
    except (AttributeError, TypeError) as error:
        refuse(f"values depend on {where}, a {type(thing).__name__}, which cannot be digested: {error}")


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _flags(module: object) -> dict[str, Json]:
    """Return the switches and numbers of a module, such as those of tiles, which its weights do not show."""
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in _NO_VALUES
    }


def _digest_weights(kind: str, module: "torch.nn.Module") -> dict[str, str]:
    """Return a digest of each weight and buffer, by name; of tied ones once."""
    import torch

    state: dict[str, Any] = module.state_dict()
    for name, value in state.items():
        if type(value) is not torch.Tensor or value.device.type == "meta":
            why = "is on no device" if isinstance(value, torch.Tensor) and value.is_meta else f"is a {type(value).__name__}"
            refuse(f"{name} of a {kind} {why}: the values of sharded, offloaded and quantised encoders cannot be told apart")
    if adapter := next((one for one in module.modules() if type(one).__module__.partition(".")[0] == "peft"), None):
        refuse(f"a {kind} has adapters ({type(adapter).__name__}), and how strong they are is not among its weights: merge them")
    ranges = {name: (value.data_ptr(), value.dtype, value.shape, value.stride(), str(value.device)) for name, value in state.items()}
    each = {where: state[name] for name, where in ranges.items()}
    with ThreadPoolExecutor(THREADS) as threads:
        digests = dict(zip(each, threads.map(_digest_tensor, each.values()), strict=True))
    return {name: digests[where] for name, where in sorted(ranges.items())}


def _digest_tensor(tensor: "torch.Tensor") -> str:
    import torch

    digest = hashlib.sha256(canonical([str(tensor.dtype), list(tensor.shape)]))
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK_NUMBERS):
        digest.update(flat[start : start + _BLOCK_NUMBERS].cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests(paths: Iterable[str], read: Callable[[str], bytes] | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file's bytes. A file that is unchanged since another start is not read again. Raises BadInput, OSError.

    With `read`, which returns the bytes of a path, files need not be on this machine, and all are read.
    """
    wanted = list(dict.fromkeys(paths))
    if read is not None:
        return {path: hashlib.sha256(read(path)).hexdigest() for path in wanted}
    if not wanted:
        return {}
    layout = current().store.layout
    known = load_digests(layout, host_name())
    before = {*known}
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(wanted, threads.map(digest_file, map(Path, wanted), repeat(known)), strict=True))
    publish_digests(layout, host_name(), {name: digest for name, digest in known.items() if name not in before})
    return found


def precision() -> dict[str, Json]:
    """The dtype of autocast in this thread, by device type; empty outside autocast."""
    import torch

    kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]
    return {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds}


def settings(thing: Any, values: Collection[str] | None = None, others: Collection[str] = ()) -> dict[str, Json]:
    """Return the fields of an object, or of a mapping, on which values depend, with digests in place of tokenizers and modules.

    `values` are the fields that count, `others` those that do not. A field in neither list ends the run with exit code 2: values could
    depend on it. A field that is listed and not there is left out. Without `values` all fields count but `others`, and one that cannot be
    written down ends the run.
    """
    kind = _kind(thing)
    given = _fields_of(thing)
    fields = {*given}
    counted = fields - {*others} if values is None else {*values}
    if unknown := sorted(fields - counted - {*others}):
        refuse(f"{kind} has the {'field' if len(unknown) == 1 else 'fields'} {', '.join(unknown)}, on which values may depend")
    return {"class": type(thing).__qualname__} | {name: _plain(f"{kind}.{name}", given[name]) for name in sorted(counted & fields)}


def _fields_of(thing: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", thing if isinstance(thing, Mapping) else vars(thing))


def _plain(name: str, value: Any) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, one) for one in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(name, one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, FunctionType | MethodType | functools.partial):
        refuse(f"values depend on {name}, a function, which cannot be digested")
    if _kind(value) in ("torch.dtype", "torch.device"):
        return str(value)
    return _fingerprint(name, value)


class KeyFields:
    """The fields of something that an encoder may see, as the key has them. One that is not here and that it reads ends the run (2)."""

    def __init__(self, thing: Any, fields: Collection[str], **more: Any) -> None:
        """Copy the named fields, and add others, such as `id`. What the encoder sets is kept here."""
        vars(self).update({name: getattr(thing, name) for name in fields}, **more)
        self._kind = _kind(thing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"the trainer's encoder reads the field {name} of a {self._kind}, on which values may depend")


def ids_of(paths: Iterable[str]) -> list[str]:
    """Return for each path its part below the folder that is common to all of them, with `/`: an id that a person knows."""
    whole = [Path(path).absolute() for path in paths]
    root = os.path.commonpath([path.parent for path in whole]) if whole else ""
    return [path.relative_to(root).as_posix() for path in whole]
