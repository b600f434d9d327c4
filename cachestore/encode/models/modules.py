"""Choose a device, and load modules and tokenizers, each by its own class from its own folder. Imports torch.

A pipeline is never loaded as a whole: `DiffusionPipeline.from_pretrained(folder, transformer=None)` still loads the denoiser of four Wan
pipelines, 28 GB each. Nothing is downloaded here, nothing is unpickled, and no code in a model's folder is imported: transformers
asks at the terminal whether to do that, unless it is answered beforehand.
"""

import copy
import gc
import importlib
import inspect
import os
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from cachestore.core import ranks, vector_math
from cachestore.core.errors import BadInput, naming_extras
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.encode.batching.budget import is_lack_of_memory
from cachestore.encode.batching.unit import LOADING
from cachestore.encode.models.conversion import weights_folder
from cachestore.encode.models.folders import PIPELINE_CLASSES, QUANTIZATION, TEXT_MODEL, Component
from cachestore.encode.models.leftovers import check_loaded
from cachestore.encode.models.processor import Processor

vector_math.settle()

Foreign = Any
"""An object of transformers or diffusers, which are only partly typed."""
_held: WeakSet[Foreign] = WeakSet()
"""Modules that were loaded here and are still in memory."""
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_one_at_a_time = threading.Lock()
"""transformers and diffusers import their parts lazily, which fails if two threads do it at once."""


def choose_device(asked: str) -> torch.device:
    """Return the named device; for `auto` the local rank's GPU, else xpu, mps or cpu. Raises BadInput if it is unknown or missing."""
    if asked != "auto":
        try:
            device = torch.device(asked)
        except RuntimeError as error:
            raise BadInput(f"{option('device', asked)} is no device of torch; use auto, cpu, cuda or cuda:N") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise BadInput(
                f"{option('device', asked)}: torch {torch.__version__} finds {plural(torch.cuda.device_count(), 'CUDA device')} here; use"
                " auto or cpu"
            )
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", ranks.discover(os.environ).local_rank % torch.cuda.device_count())
    if torch.xpu.is_available():
        return torch.device("xpu")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


@contextmanager
def loading(component: Component) -> "Generator[None]":
    """Load in one thread at a time, and turn any error into BadInput: a model that cannot be loaded ends the run, not one sample."""
    with _one_at_a_time:
        LOADING.get()(component.name)
        try:
            with naming_extras():
                yield
        except BadInput:
            raise
        except Exception as error:
            if is_lack_of_memory(error):
                raise BadInput(
                    f"{component.name} from {component.path} does not fit into memory ({error or type(error).__name__}): make room, or use"
                    f" another {option('device')}, a smaller dtype, or fewer {option('procs')}"
                ) from error
            quantised = component.config.get(QUANTIZATION) or {}
            how = f", whose weights are quantised as {quantised.get('quant_method')!r:.40}" if quantised else ""
            raise BadInput(
                f"cannot load {component.name} from {component.path}{how} ({type(error).__name__}: {error}): download the model again, or"
                " install the libraries in the versions that it needs"
            ) from error


def load_tokenizer(component: Component) -> Foreign:
    """Load a tokenizer, or copy the caller's, so that its state is not shared. Of a processor only the tokenizer is loaded."""
    if component.loaded is not None:
        return copy.deepcopy(component.loaded)  # cutting and padding change the state of a tokenizer
    with loading(component):
        if component.class_name.endswith("Processor"):
            return Processor.of_text(component)
        return _class_of(component).from_pretrained(component.folder, local_files_only=True, **_no_code(component))


def load_processor(component: Component) -> Processor:
    """Load a processor with a tokenizer of its own. Raises BadInput if its class is not known."""
    with loading(component):
        return Processor.of(component)


def load_image_processor(component: Component) -> Foreign:
    """Load an image processor: the one based on Pillow, as torchvision's rounds differently, and keys must not depend on it."""
    if component.loaded is not None:
        return component.loaded
    with loading(component):
        transformers: Any = importlib.import_module("transformers")
        name = component.class_name.removesuffix("Fast").removesuffix("Pil")
        return getattr(transformers, f"{name}Pil", getattr(transformers, name)).from_pretrained(
            component.folder, local_files_only=True, **_no_code(component)
        )


def load_module(component: Component, dtype: str, device: torch.device) -> Foreign:
    """Load a module in evaluation mode, without gradients, onto the device; the caller's own as it is.

    Raises BadInput if weights do not fit.

    Weights in 8 bits are multiplied with their scales, if any. Those that a library has quantised are left to it.
    """
    if component.loaded is not None:
        return component.loaded
    # transformers would raise for a tensor of another shape without naming it; diffusers 0.32 does not report unexpected tensors unless it
    # first creates the module with weights
    is_old = component.library == "diffusers" and _release(component.library) < (0, 33)
    reporting = {"ignore_mismatched_sizes": True} if component.library == "transformers" else {"low_cpu_mem_usage": False} if is_old else {}
    # transformers renamed the argument for the dtype in 4.56, diffusers did not
    dtype_name = "dtype" if component.library == "transformers" and _release(component.library) >= (4, 56) else "torch_dtype"
    with loading(component), weights_folder(component, _class_of(component), DTYPES[dtype]) as folder:
        module, info = _class_of(component).from_pretrained(
            folder,
            variant=component.variant,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **{dtype_name: DTYPES[dtype], **reporting, **_no_code(component)},
        )
        check_loaded(component, module, info)
    # transformers 4.54 and 4.57 do not convert 8-bit weights, and cannot compute with them
    for parameter in () if QUANTIZATION in component.config else module.parameters():
        if parameter.is_floating_point() and parameter.element_size() == 1:
            parameter.data = parameter.data.to(DTYPES[dtype])
    with loading(component):  # a GPU may run out of memory here
        ready = module.eval().requires_grad_(requires_grad=False).to(device)
    _held.add(ready)
    return ready


def build_pipeline(
    class_name: str,
    components: Mapping[str, Foreign],
    settings: Mapping[str, Json],
    asked: Mapping[str, Json] | None = None,
    stand_ins: Collection[str] = (),
) -> Foreign:
    """Build a pipeline from these components and plain values, with None for other required arguments.

    Raises BadInput if diffusers lacks it.

    For `COMPONENT.FIELD` in `asked`, the component is a stand-in whose config has this field. Those in `stand_ins` have none.
    """
    with _one_at_a_time:
        pipeline = _found("diffusers", class_name, "this model")
        parameters = list(inspect.signature(pipeline.__init__).parameters.values())[1:]
        plain = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        required = [one.name for one in plain if one.default is one.empty]
        fields: dict[str, dict[str, Json]] = {}
        for name, value in (asked or {}).items():
            component, _, field = name.partition(".")
            fields.setdefault(component, {})[field] = value
        absent = {component: Absent(config=Absent(**known)) for component, known in fields.items()}
        given = {**settings, **components, **absent, **{name: Absent() for name in stand_ins}}
        try:
            return pipeline(**{**dict.fromkeys(required), **given})
        except AttributeError:  # HunyuanVideo 1.5 reads fields of its VAE; before 0.33 many pipelines do
            return pipeline(**{**dict.fromkeys(required, Absent()), **given})


@contextmanager
def clip_as_it_was(pipeline: Foreign) -> Generator[None]:
    """Let a pipeline find CLIP's layers below `text_model` within the block, as `clip_skip` of diffusers looks for the last norm there.

    transformers 5.6 moved them into CLIPTextModel itself. torch does not register the name: no module contains itself.
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


def caching_configs(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return the configurations of language models that keep the keys and values of their layers, for `without_cache`."""
    configs = [getattr(part, "config", None) for module in modules for part in module.modules()]
    return list({id(config): config for config in configs if getattr(config, "use_cache", None) is True}.values())


@contextmanager
def without_cache(configs: Sequence[Any]) -> Generator[None]:
    """Keep no keys and values of layers within the block: only generating text needs them, and a GPU waits for each."""
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


class Absent:
    """A stand-in for a component whose fields a pipeline reads. It is false, and every field that is not given is None.

    There are two exceptions, for Stable Diffusion's pipelines before diffusers 0.33: they read the VAE's levels and the scheduler's offset.
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


def free_memory() -> None:
    """Release the memory of unused modules. Garbage collection, which takes a third of a second, runs only if some are left."""
    if _held:
        gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _no_code(component: Component) -> dict[str, bool]:
    """Return the argument with which a class that reads which class to load (`AutoModel`) never imports code beside the weights."""
    return {"trust_remote_code": False} if component.class_name.startswith("Auto") and component.library == "transformers" else {}


def _release(library: str) -> tuple[int, int]:
    first, second, *_ = importlib.import_module(library).__version__.split(".")
    return int(first), int(second)


def _class_of(component: Component) -> Foreign:
    if component.class_name == TEXT_MODEL:  # the encoder alone if a model has one (T5), so that no decoder is loaded
        transformers: Foreign = importlib.import_module(component.library)
        config = transformers.AutoConfig.from_pretrained(component.folder, local_files_only=True, trust_remote_code=False)
        encoders = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_TEXT_ENCODING_MAPPING
        return transformers.AutoModelForTextEncoding if type(config) in encoders else transformers.AutoModel
    return _found(component.library, component.class_name, str(component.folder))


def _found(library: str, class_name: str, needed_by: str) -> Foreign:
    module = importlib.import_module(library)
    found = getattr(importlib.import_module(PIPELINE_CLASSES.get(class_name, library)), class_name, None)
    if found is None:
        raise BadInput(f"{needed_by} needs {class_name}, which {library} {module.__version__} does not have; pip install -U {library}")
    return found
