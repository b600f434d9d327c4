"""Loading modules and tokenizers, each by its own class from its own folder, and onto which device. Imports torch.

A pipeline is never loaded through its base class: `DiffusionPipeline.from_pretrained(folder, transformer=None)` still loads the denoiser
of four Wan pipelines, 28 GB each. Nothing is downloaded here, and nothing is unpickled.
"""

import copy
import gc
import importlib
import inspect
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from cachestore.core import ranks, vector_math
from cachestore.core.errors import BadInput, naming_extras
from cachestore.core.keys import Json
from cachestore.encode.budget import is_lack_of_memory
from cachestore.encode.conversion import check_single_file, weights_folder
from cachestore.encode.models import TEXT_MODEL, Component
from cachestore.encode.processor import Processor

vector_math.settle()

Foreign = Any
"""An object of transformers or diffusers, which are typed in part only."""

_held: WeakSet[Foreign] = WeakSet()
"""Modules that were loaded here and have not gone yet."""

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_one_at_a_time = threading.Lock()
"""transformers and diffusers import their parts lazily, which two threads at once can catch half done."""
_MAY_BE_MISSING = ("pooler.", "position_ids")
"""Weights that `last_hidden_state` does not need, and that published encoders leave out."""


def choose_device(asked: str) -> torch.device:
    """The device as named; for `auto` the local rank's GPU, else xpu, mps, CPU. Raises BadInput for one that is unknown or not there."""
    if asked != "auto":
        try:
            device = torch.device(asked)
        except RuntimeError as error:
            raise BadInput(f"--device {asked} is no device of torch; use auto, cpu, cuda or cuda:N") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise BadInput(
                f"--device {asked}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices here; use auto or cpu"
            )
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", ranks.discover(os.environ).local_rank % torch.cuda.device_count())
    if torch.xpu.is_available():
        return torch.device("xpu")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


@contextmanager
def _loading(component: Component) -> "Generator[None]":
    """One load at a time, and any error of the libraries as BadInput: a model that cannot be loaded ends the run, not one sample."""
    with _one_at_a_time:
        try:
            with naming_extras():
                yield
        except BadInput:
            raise
        except Exception as error:
            if is_lack_of_memory(error):
                raise BadInput(
                    f"{component.name} from {component.place} does not fit into memory ({error or type(error).__name__}): make room, or use"
                    " another --device, a smaller dtype, or fewer --procs"
                ) from error
            raise BadInput(f"cannot load {component.name} from {component.place}: {type(error).__name__}: {error}") from error


def load_tokenizer(component: Component) -> Foreign:
    """A tokenizer of its own class: nobody else shares its state."""
    if component.loaded is not None:
        return copy.deepcopy(component.loaded)  # to cut and pad is a state of it, which is the caller's
    with _loading(component):
        return _class_of(component).from_pretrained(component.folder, local_files_only=True)


def load_processor(component: Component) -> Processor:
    """What reads captions and pictures for a text encoder, with a tokenizer of its own. Raises BadInput for a class that is not known."""
    with _loading(component):
        return Processor.of(component)


def load_module(component: Component, dtype: str, device: torch.device) -> Foreign:
    """A module in evaluation mode, without gradients, on its device. Raises BadInput where it cannot be loaded whole.

    One that the caller has loaded is what it is: its dtype and device were settled with the request.
    """
    if component.loaded is not None:
        return component.loaded
    with _loading(component), weights_folder(component, _class_of(component)) as folder:
        module, loading = _class_of(component).from_pretrained(
            folder,
            variant=component.variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **{_dtype_name(component.library): DTYPES[dtype], **_single_file_options(component)},
        )
    missing = sorted(key for key in loading["missing_keys"] if not any(part in key for part in _MAY_BE_MISSING))
    if missing:
        raise BadInput(f"the weights in {component.place} lack {len(missing)} tensors, such as {missing[0]}, which would get random values")
    if component.single_file is not None:
        check_single_file(component, loading)
    for parameter in module.parameters():  # transformers 4.54 and 4.57 leave weights of 8 bits as they are, and cannot compute with them
        if parameter.is_floating_point() and parameter.element_size() == 1:
            parameter.data = parameter.data.to(DTYPES[dtype])
    with _loading(component):  # where a GPU's memory ends
        ready = module.eval().requires_grad_(requires_grad=False).to(device)
    _held.add(ready)
    return ready


def build_pipeline(
    class_name: str, components: Mapping[str, Foreign], settings: Mapping[str, Json], asked: Mapping[str, Json] | None = None
) -> Foreign:
    """A pipeline object around these components and plain values, with None for everything else that it must be given.

    For each `COMPONENT.FIELD` in `asked`, something stands for that component whose config has this field.
    Raises BadInput where the installed diffusers has no such pipeline.
    """
    with _one_at_a_time:
        pipeline = _found("diffusers", class_name, "this model")
        parameters = list(inspect.signature(pipeline.__init__).parameters.values())[1:]
        plain = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        required = [one.name for one in plain if one.default is one.empty]
        given = {**settings, **components, **_stand_ins(asked or {})}
        try:
            return pipeline(**{**dict.fromkeys(required), **given})
        except AttributeError:  # HunyuanVideo 1.5 looks into its VAE, of which encode_prompt needs nothing; before 0.33 many do
            return pipeline(**{**dict.fromkeys(required, Absent()), **given})


@contextmanager
def clip_as_it_was(pipeline: Foreign) -> Generator[None]:
    """Let a pipeline find CLIP's layers below `text_model` meanwhile, where `clip_skip` of diffusers looks for the last norm.

    transformers 5.6 moved them up into CLIPTextModel itself. The name is set past torch's registration, so that no module contains
    itself, and it is gone afterwards.
    """
    modules = [part for name, part in pipeline.components.items() if name.startswith("text_encoder")]
    moved = [module for module in modules if type(module).__name__ == "CLIPTextModel" and not hasattr(module, "text_model")]
    for module in moved:
        object.__setattr__(module, "text_model", module)
    try:
        yield
    finally:
        for module in moved:
            object.__delattr__(module, "text_model")


class Absent:
    """Stands for a component that a pipeline looks into. It is false, and None in every field but those that are given.

    Two fields before diffusers 0.33 are not: Stable Diffusion's pipelines there count the VAE's levels and correct the scheduler's offset.
    """

    block_out_channels = ()
    steps_offset = 1

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> "Absent | None":
        if name.startswith("_"):
            raise AttributeError(name)
        return Absent() if name == "config" else None


def _stand_ins(asked: Mapping[str, Json]) -> dict[str, Foreign]:
    fields: dict[str, dict[str, Json]] = {}
    for name, value in asked.items():
        component, _, field = name.partition(".")
        fields.setdefault(component, {})[field] = value
    return {component: Absent(config=Absent(**known)) for component, known in fields.items()}


def free_memory() -> None:
    """Give memory of dropped modules back to the device.

    Most go with the last reference to them; looking for cycles among all objects of torch and diffusers, which takes a third of a second,
    is for those that are still there.
    """
    if _held:
        gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _dtype_name(library: str) -> str:
    """The argument of `from_pretrained` that says the dtype: transformers renamed it in 4.56, diffusers has not."""
    return "dtype" if library == "transformers" and _release(library) >= (4, 56) else "torch_dtype"


def _release(library: str) -> tuple[int, int]:
    first, second, *_ = importlib.import_module(library).__version__.split(".")
    return int(first), int(second)


def _single_file_options(component: Component) -> dict[str, bool]:
    """What makes the libraries report all that does not fit.

    A tensor of another shape is let through and found in what is reported: transformers would raise without naming it. diffusers 0.32
    says nothing of tensors that it has no place for, unless it makes a module with weights first.
    """
    if component.single_file is None:
        return {}
    if component.library == "transformers":
        return {"ignore_mismatched_sizes": True}
    return {"low_cpu_mem_usage": False} if _release(component.library) < (0, 33) else {}


def _class_of(component: Component) -> Foreign:
    if component.class_name == TEXT_MODEL:
        return _text_model_class(importlib.import_module(component.library), component)
    return _found(component.library, component.class_name, str(component.folder))


def _found(library: str, class_name: str, needed_by: str) -> Foreign:
    module = importlib.import_module(library)
    found = getattr(module, class_name, None)
    if found is None:
        raise BadInput(f"{needed_by} needs {class_name}, which {library} {module.__version__} does not have; pip install -U {library}")
    return found


def _text_model_class(transformers: Foreign, component: Component) -> Foreign:
    """Where a model has an encoder that is a class of its own (T5), that one, so that no decoder is loaded; else the plain model."""
    config = transformers.AutoConfig.from_pretrained(component.folder, local_files_only=True)
    encoders = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_TEXT_ENCODING_MAPPING
    return transformers.AutoModelForTextEncoding if type(config) in encoders else transformers.AutoModel
