"""A model that the caller has in memory: a diffusers pipeline, or its components by name. Imports torch.

It is identified by its contents: the bytes of its weights, its configuration, and what its tokenizers save. The folder that a module was
loaded from is ignored, because the module may have been trained since, or an adapter may have been merged into it.
"""

import copy
import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, canonical, digest_bytes
from cachestore.encode.models.folders import Component, Model
from cachestore.files.scratch import scratch_folder

FOLDER = Path("(loaded model)")
"""Stands for the model's folder in messages, and for the model in the request that a catalog records."""
BLOCK_NUMBERS = 1 << 22
"""How many numbers of a tensor are copied to the CPU at once."""
_USED = ("text_encoder", "tokenizer", "processor", "text_processor", "connectors", "projection", "vae")
"""How the names of those components begin that are needed for encoding."""
_LIBRARIES = ("transformers", "diffusers")
_CLASS = "_class_name"
_NOT_CONFIG = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures", "name_or_path"})
"""Fields of a configuration that do not change the embeddings or latents. Fields that begin with `_` do not either."""
_SWITCHES = ("use_tiling", "use_slicing", "use_framewise_encoding", "use_framewise_decoding")
"""Switches that make a VAE work in tiles or slices. Tiles change its latents by a tenth or more."""
_ON_BY_DEFAULT = {"AutoencoderKLHunyuanVideo": ("use_framewise_encoding", "use_framewise_decoding")}
"""Those that are on in a VAE as it is loaded, by its class."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The caller's modules and tokenizers, by component name."""

    class_name: str | None
    """The class of the pipeline; None for a text encoder or VAE without one."""
    parts: Mapping[str, Any]
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Components of the pipeline that are not used for encoding, by name."""

    def model(self, kind: str) -> Model:
        """Return what `read_model` returns for a folder. Without a pipeline `kind` selects the part; BadInput if that is missing."""
        index: dict[str, Json] = {**self.settings, **{name: list(_class_of(name, part)) for name, part in self.parts.items()}}
        if self.class_name is not None:
            return _Held(FOLDER, "pipeline", self.class_name, index, whole=self)
        name = "vae" if kind == "latents" else "text_encoder"
        if name not in self.parts:
            raise BadInput(
                f"the loaded model has {', '.join(self.parts) or 'no component'}, and no {name}, which encodes {kind}:"
                f" load it too, or leave {kind} out of encode="
            )
        return _Held(FOLDER, "vae" if kind == "latents" else "text", index[name][1], _config(self.parts[name]), whole=self)

    def component(self, name: str) -> Component:
        """Return a component with digests of its contents. Raises BadInput if it is missing or cannot be fingerprinted."""
        part = self.parts.get(name, self.others.get(name))
        if part is None:
            raise BadInput(f"the loaded model has no {name!r}; it has {', '.join(self.parts) or 'no component'}: load it too")
        library, class_name = _class_of(name, part)
        if "ImageProcessor" in class_name:
            settings: dict[str, Json] = {field: value for field, value in part.to_dict().items() if not field.startswith("_")}
            return Component(name, library, class_name, FOLDER, {}, loaded=part, digests={"settings": digest_bytes(canonical(settings))})
        if not isinstance(part, nn.Module) and not hasattr(part, "model_max_length"):
            raise BadInput(
                f"{name} of the loaded model is a {class_name}, which cannot be fingerprinted here; save the model and give its folder"
            )
        if isinstance(part, nn.Module):
            config = _config(part)
            differing = _config(part, method="to_diff_dict")  # without defaults: transformers adds fields
            kept = {field: value for field, value in differing.items() if field not in _NOT_CONFIG and not field.startswith("_")}
            digests = {"config": digest_bytes(canonical(kept)), "weights": digest_state(name, part)}
        else:
            config, digests = {"model_max_length": int(part.model_max_length)}, {"saved": digest_tokenizer(part)}
        return Component(name, library, class_name, FOLDER, {}, config=config, loaded=part, digests=digests)

    def config(self, name: str) -> dict[str, Json]:
        """Return the configuration of any component, also of one that is not used for encoding. Raises BadInput if it is missing."""
        part = self.parts.get(name, self.others.get(name))
        if part is None:
            raise BadInput(f"the loaded model has no {name!r}: encoding text needs its configuration, so load it too")
        return _config(part)

    def outline(self) -> tuple[str, dict[str, str], dict[str, Mapping[str, Json]]]:
        """Return the pipeline's class, the classes of all components, and the configurations of those that have one."""
        everything = {**self.parts, **self.others}
        configs: dict[str, Mapping[str, Json]] = {
            name: _config(part) for name, part in everything.items() if isinstance(part, nn.Module) and hasattr(part, "config")
        }
        return self.class_name or "", {name: type(part).__name__ for name, part in everything.items()}, configs

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Put the modules into evaluation mode, with tiles and slices as in a VAE just loaded. Everything is restored at the end."""
        modules = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        training = [(module, module.training) for part in modules for module in part.modules()]
        switches = [(part, name, getattr(part, name)) for part in modules for name in _SWITCHES if isinstance(vars(part).get(name), bool)]
        layouts = [(tensor, tensor.stride()) for part in modules for tensor in part.parameters()]
        try:
            for module, _ in training:
                module.training = False
            for part, name, _ in switches:
                setattr(part, name, name in _ON_BY_DEFAULT.get(type(part).__name__, ()))
            yield
        finally:
            for module, was_training in training:
                module.training = was_training
            for part, name, value in switches:
                setattr(part, name, value)
            for tensor, stride in layouts:  # encoding may have changed a VAE to channels-last
                if tensor.stride() != stride:
                    tensor.data = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)


@dataclass(frozen=True, slots=True)
class _Held(Model):
    whole: LoadedModel = field(kw_only=True)

    def config_of(self, component: str) -> dict[str, Json]:
        return self.whole.config(component)

    def component(self, name: str, *_how: object) -> Component:
        return self.whole.component(name)


def read_loaded(model: object) -> LoadedModel:
    """Read what was passed as `model=`: a diffusers pipeline, or a mapping of component names to modules and tokenizers, else BadInput.

    A mapping has `_class_name` as model_index.json; without it, a text encoder with its tokenizer, a VAE, or both.
    """
    if isinstance(model, Mapping):
        given = {str(name): part for name, part in model.items() if part is not None}
        class_name = given.pop(_CLASS, None)
        settings = {name: part for name, part in given.items() if isinstance(part, bool | int | float | str)}
        parts = {name: part for name, part in given.items() if name not in settings}
        if class_name is None and set(parts) - {"text_encoder", "tokenizer", "vae"}:
            raise BadInput(
                f'a mapping with {", ".join(parts)} must say of which pipeline: {{"_class_name": "StableDiffusionXLPipeline", ...}}'
            )
        return LoadedModel(None if class_name is None else str(class_name), parts, settings)
    if not (hasattr(model, "components") and hasattr(model, "config")):
        raise BadInput(
            f"model= is a path, a hub id, a diffusers pipeline or a mapping of component names to modules, not {type(model).__name__}"
        )
    pipeline: Any = model
    given = {name: part for name, part in pipeline.components.items() if part is not None}
    parts = {name: part for name, part in given.items() if name.startswith(_USED)}
    settings = {name: value for name, value in pipeline.config.items() if isinstance(value, bool | int | float | str)}
    others = {name: part for name, part in given.items() if name not in parts}
    return LoadedModel(_class_of("model", pipeline)[1], parts, settings, others)


def common_dtype(components: Mapping[str, Component], option: str, asked: str) -> str:
    """Return the dtype of the loaded modules. Raises BadInput if they have several, or another than `asked`."""
    found = {
        str(component.loaded.dtype).removeprefix("torch.") for component in components.values() if isinstance(component.loaded, nn.Module)
    }
    if len(found) != 1 or asked not in ("auto", *found):
        raise BadInput(
            f"the loaded modules are {' and '.join(sorted(found))}, and cachestore does not convert them: convert them to one"
            f" dtype, and leave {option} out",
            option=option,
        )
    return found.pop()


def common_device(components: Mapping[str, Component], asked: str) -> str:
    """Return the device of the loaded modules. Raises BadInput if they are on several, or on another than `asked`."""
    modules = [component.loaded for component in components.values() if isinstance(component.loaded, nn.Module)]
    found = {str(one.device) for module in modules for one in module.parameters()}
    is_there = asked == "auto" or {torch.device(asked).type} == {torch.device(one).type for one in found}
    if len(found) != 1 or not is_there:
        raise BadInput(
            f"the loaded modules are on {' and '.join(sorted(found))}, and cachestore does not move them: move them to one"
            " device, and leave device out",
            option="device",
        )
    return found.pop()


def digest_state(name: str, module: nn.Module) -> str:
    """Return the SHA-256 of a module's weights and buffers: sorted names, dtypes, shapes and bytes. It does not depend on the device.

    Raises BadInput if weights are sharded, offloaded or quantised, and if there are adapters, as their scale is not among the weights.
    """
    if adapter := next((one for one in module.modules() if type(one).__module__.partition(".")[0] == "peft"), None):
        raise BadInput(
            f"{name} of the loaded model has adapters ({type(adapter).__name__}): merge them into its weights, then pass it again"
        )
    state = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        if type(value) is not Tensor or value.device.type == "meta":
            kind = "on no device" if isinstance(value, Tensor) and value.device.type == "meta" else f"a {type(value).__name__}"
            raise BadInput(
                f"{key} of the loaded {name} is {kind}: sharded, offloaded and quantised modules cannot be fingerprinted; give a folder"
            )
        header = canonical([key, str(value.dtype), list(value.shape)])
        state.update(len(header).to_bytes(8, "little") + header)
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), BLOCK_NUMBERS):
            state.update(flat[start : start + BLOCK_NUMBERS].cpu().view(torch.uint8).numpy().data)
    return state.hexdigest()


def digest_tokenizer(tokenizer: Any) -> str:
    """Return the SHA-256 of what a tokenizer saves, without its origin and the padding and truncation of its last call."""
    digests: dict[str, Json] = {}
    with scratch_folder() as folder:
        copy.deepcopy(tokenizer).save_pretrained(folder)
        for path in sorted(folder.iterdir()):
            content = path.read_bytes()
            if path.suffix == ".json" and isinstance(fields := json.loads(content), dict):
                state = {"truncation", "padding"} if path.name == "tokenizer.json" else _NOT_CONFIG
                content = canonical({name: value for name, value in fields.items() if name not in state})
            digests[path.name] = digest_bytes(content)
    return digest_bytes(canonical(digests))


def _class_of(name: str, part: object) -> tuple[str, str]:
    for one in type(part).__mro__:
        library = one.__module__.partition(".")[0]
        if library in _LIBRARIES:
            return library, one.__name__
    raise BadInput(
        f"{name!r} of the loaded model is a {type(part).__name__}, which is not a class of transformers or diffusers; if it is a"
        " wrapper, give the module inside it"
    )


def _config(part: Any, *, method: str = "to_dict") -> dict[str, Json]:
    config = part.config
    return json.loads(json.dumps(getattr(config, method)() if hasattr(config, method) else dict(config), default=str))
