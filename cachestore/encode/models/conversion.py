"""Turn weights that a library cannot load as they are into a folder that it can. Imports torch, and diffusers to convert a layout.

Scales of weights in 8 bits are multiplied in first (`scales`), for folders and for single files. A single file in the library's own layout
is linked into a temporary folder beside its config.json, so that it is loaded exactly as from a folder. Other layouts, such as the
original ones of Stable Diffusion's VAE and of OpenCLIP, are first converted by diffusers' own code, without a network.
"""

import importlib
import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cachestore.core.errors import BadInput
from cachestore.core.words import plural
from cachestore.encode.models.folders import CONFIG, SCALES, Component, eight_bits, read_json
from cachestore.encode.models.scales import scales_among, with_scales
from cachestore.encode.models.single_file import Shapes, read_shapes, text_prefix, vae_prefix
from cachestore.files.scratch import scratch_folder

_OPEN_CLIP = "transformer.resblocks."
_CLIP_TEXT = "CLIPText"
_CLIP_BODY = "text_model."
Tensors = Mapping[str, Tensor]


@contextmanager
def weights_folder(component: Component, module_class: Any, dtype: torch.dtype) -> Generator[Path]:
    """Yield the folder that a component is loaded from: its own, or a temporary one in which weights with scales have this dtype."""
    is_scaled = eight_bits(component) == "scaled"
    if component.single_file is None and not is_scaled:
        yield component.folder
        return
    with scratch_folder() as scratch:
        shutil.copyfile(component.files[CONFIG], scratch / CONFIG)
        if component.single_file is None:
            _write_scaled(component, scratch, dtype)
        else:
            name = next(name for name in component.files if name != CONFIG)
            converted = _converted(component, module_class, _Weights(component.single_file, dtype, is_scaled=is_scaled))
            if converted is None:
                try:
                    (scratch / name).symlink_to(component.single_file.absolute())
                except OSError:
                    shutil.copyfile(component.single_file, scratch / name)
            else:
                _write(converted, scratch / name)
                del converted  # it is as large as the module
        yield scratch


def _write_scaled(component: Component, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights of a component's folder with their scales multiplied in, file by file. A scale may be in another file."""
    files = {name: path for name, path in component.files.items() if name.endswith(".safetensors")}
    names = [name for path in files.values() for name in _names_in(path)]
    scales: dict[str, Tensor] = {}
    for path in files.values():
        scales |= scales_among(_tensors(path, [name for name in _names_in(path) if name.endswith(SCALES)]), names)
    there: dict[str, str] = {}
    for name, path in files.items():
        written = with_scales(_tensors(path, _names_in(path)), scales, names, path, dtype)
        _write(written, folder / name)
        there |= dict.fromkeys(written, name)
    for name, path in component.files.items():
        if name not in files and name != CONFIG:  # the index of shards
            (folder / name).write_text(json.dumps({**read_json(path), "weight_map": there}), encoding="utf-8")


def _write(tensors: Tensors, path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


@dataclass(frozen=True, slots=True)
class _Weights:
    """A single weight file."""

    file: Path
    dtype: torch.dtype
    is_scaled: bool

    def read(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin so, by the rest of their names, with their scales multiplied in."""
        found = _tensors(self.file, [name for name in _names_in(self.file) if name.startswith(prefix)])
        tensors = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
        return with_scales(tensors, scales_among(tensors, tensors), tensors, self.file, self.dtype) if self.is_scaled else tensors


def _converted(component: Component, module_class: Any, weights: _Weights) -> Tensors | None:
    """Return a file's tensors under the names of the component's class; None if the file can be loaded as it is."""
    shapes = read_shapes(weights.file)
    if component.library == "diffusers":
        return _diffusers_tensors(component, module_class, weights, shapes)
    prefix = text_prefix(shapes, component.config) or ""
    if any(name.startswith(prefix + _OPEN_CLIP) for name in shapes):
        convert = importlib.import_module("diffusers.loaders.single_file_utils").convert_open_clip_checkpoint
        return convert(SimpleNamespace(config=SimpleNamespace(**component.config)), weights.read(prefix), prefix="")
    moved: dict[str, str] = {}
    if component.class_name.startswith(_CLIP_TEXT):  # before transformers 5.6 CLIP's layers are below `text_model`
        expected = _names_of(module_class, component)
        names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
        moved = {name: _CLIP_BODY + name for name in names if name not in expected and _CLIP_BODY + name in expected}
    if not prefix and not moved and not weights.is_scaled:
        return None
    return {moved.get(name, name): tensor for name, tensor in weights.read(prefix).items()}


def _diffusers_tensors(component: Component, module_class: Any, weights: _Weights, shapes: Shapes) -> Tensors | None:
    file, prefix = weights.file, vae_prefix(list(shapes))
    expected = _names_of(module_class, component)
    known = sum(prefix + name in shapes for name in expected)
    if 2 * known > len(expected):  # diffusers' own layout; if a few tensors are missing, loading reports them
        return weights.read(prefix) if prefix or weights.is_scaled else None
    loadable = importlib.import_module("diffusers.loaders.single_file_model").SINGLE_FILE_LOADABLE_CLASSES
    convert: Callable[..., Tensors] | None = loadable.get(component.class_name, {}).get("checkpoint_mapping_fn")
    if convert is None:
        raise BadInput(
            f"{file} is not a {component.class_name} in the layout of diffusers (it has {min(shapes)}, not {min(expected)}), and"
            " diffusers cannot convert it; save the VAE with diffusers' save_pretrained, and give that folder"
        )
    found = convert(config=dict(component.config), checkpoint=weights.read(prefix))
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


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _tensors(file: Path, names: Sequence[str]) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in names}
