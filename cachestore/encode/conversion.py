"""Turn a single weight file into a folder that a library can load. Imports torch, and diffusers if a layout must be converted.

A file in the library's own layout is linked into a temporary folder beside its config.json, so that it is loaded exactly as from a
folder. Other layouts, such as the original ones of Stable Diffusion's VAE and of OpenCLIP, are first converted by diffusers' own code,
without a network.
"""

import importlib
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachestore.core.errors import BadInput
from cachestore.core.words import plural
from cachestore.encode.models import CONFIG, Component
from cachestore.encode.single_file import Shapes, read_shapes, text_prefix, vae_prefix

_MAY_BE_MORE = ("position_ids", "logit_scale", "text_projection.weight", "spiece_model")
"""How the names of tensors end that a published file may hold in addition. The encoder's rows do not depend on them."""
_OPEN_CLIP = "transformer.resblocks."
_CLIP_TEXT = "CLIPText"
_CLIP_BODY = "text_model."

Tensors = Mapping[str, Tensor]


@contextmanager
def weights_folder(component: Component, module_class: Any) -> Generator[Path]:
    """Yield the folder that a component is loaded from: its own, or a temporary one for a single file, which is removed afterwards."""
    if component.single_file is None:
        yield component.folder
        return
    name = next(name for name in component.files if name != CONFIG)
    with TemporaryDirectory(prefix="cachestore-", ignore_cleanup_errors=True) as scratch:
        shutil.copyfile(component.files[CONFIG], Path(scratch, CONFIG))
        converted = _converted(component, module_class, component.single_file)
        if converted is None:
            _link(component.single_file, Path(scratch, name))
        else:
            save_file({name: tensor.contiguous() for name, tensor in converted.items()}, Path(scratch, name), {"format": "pt"})
            del converted  # it is as large as the module
        yield Path(scratch)


def check_single_file(component: Component, loading: Mapping[str, Any]) -> None:
    """Raise BadInput if a single file has tensors that the module lacks, or has in another shape. The message names the first."""
    more = sorted(key for key in loading["unexpected_keys"] if not key.endswith(_MAY_BE_MORE))
    other = sorted(str(key if isinstance(key, str) else key[0]) for key in loading["mismatched_keys"])
    if more or other:
        what = f"with another shape, such as {other[0]}" if other else f"that it does not have, such as {more[0]}"
        raise BadInput(
            f"{component.single_file} does not fit the {component.class_name} that config.json in {component.folder} describes:"
            f" the file has {plural(len(other or more), 'tensor')} {what}; give the weights of this component, or a folder with their own"
            " config.json"
        )


def _converted(component: Component, module_class: Any, file: Path) -> Tensors | None:
    """Return a file's tensors under the names of the component's class; None if the file can be loaded as it is."""
    shapes = read_shapes(file)
    if component.library == "diffusers":
        return _diffusers_tensors(component, module_class, file, shapes)
    prefix = text_prefix(shapes, component.config) or ""
    if any(name.startswith(prefix + _OPEN_CLIP) for name in shapes):
        convert = importlib.import_module("diffusers.loaders.single_file_utils").convert_open_clip_checkpoint
        return convert(SimpleNamespace(config=SimpleNamespace(**component.config)), _read(file, prefix), prefix="")
    if component.class_name.startswith(_CLIP_TEXT):
        return _clip_tensors(component, module_class, file, shapes, prefix)
    return _read(file, prefix) if prefix else None


def _clip_tensors(component: Component, module_class: Any, file: Path, shapes: Shapes, prefix: str) -> Tensors | None:
    """Return CLIP's tensors under the names of the installed transformers: before 5.6 the layers are below `text_model`."""
    expected = _names_of(module_class, component)
    names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
    moved = {name: _CLIP_BODY + name for name in names if name not in expected and _CLIP_BODY + name in expected}
    if not prefix and not moved:
        return None
    return {moved.get(name, name): tensor for name, tensor in _read(file, prefix).items()}


def _diffusers_tensors(component: Component, module_class: Any, file: Path, shapes: Shapes) -> Tensors | None:
    prefix = vae_prefix(list(shapes))
    expected = _names_of(module_class, component)
    known = sum(prefix + name in shapes for name in expected)
    if 2 * known > len(expected):  # diffusers' own layout; if a few tensors are missing, loading reports them
        return _read(file, prefix) if prefix else None
    loadable = importlib.import_module("diffusers.loaders.single_file_model").SINGLE_FILE_LOADABLE_CLASSES
    convert: Callable[..., Tensors] | None = loadable.get(component.class_name, {}).get("checkpoint_mapping_fn")
    if convert is None:
        raise BadInput(
            f"{file} is not a {component.class_name} in the layout of diffusers (it has {min(shapes)}, not {min(expected)}), and"
            " diffusers cannot convert it; save the VAE with diffusers' save_pretrained, and give that folder"
        )
    found = convert(config=dict(component.config), checkpoint=_read(file, prefix))
    lacking = sorted(expected - set(found))
    if lacking:
        raise BadInput(
            f"{file} is not the {component.class_name} that config.json in {component.folder} describes, neither in the layout of"
            f" diffusers nor in the original one: it lacks {plural(len(lacking), 'tensor')}, such as {lacking[0]}; give the weights of"
            " this component, or a folder with their own config.json"
        )
    return found


def _names_of(module_class: Any, component: Component) -> set[str]:
    config = dict(component.config)
    with importlib.import_module("accelerate").init_empty_weights():
        is_ours = component.library == "diffusers"
        made = module_class.from_config(config) if is_ours else module_class(module_class.config_class.from_dict(config))
    return set(made.state_dict())


def _read(file: Path, prefix: str) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name.removeprefix(prefix): opened.get_tensor(name) for name in opened.keys() if name.startswith(prefix)}  # noqa: SIM118 - no mapping


def _link(file: Path, name: Path) -> None:
    try:
        name.symlink_to(file.absolute())
    except OSError:
        shutil.copyfile(file, name)
