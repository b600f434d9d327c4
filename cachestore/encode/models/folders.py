"""Find which files of a model folder each component is loaded from. Loads none of them and does not import torch.

Reads `model_index.json` and `config.json`, and finds each component's configuration, safetensors weights (one file, or the shards that an
index names) and tokenizer files. The denoiser's weights are never opened. Pickled weights (`.bin`) are refused, because unpickling a file
can run any code.
"""

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cachestore.core.errors import BadInput, EncodeFailed, FormatError
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import numbers
from cachestore.files.container import Header, read_header
from cachestore.files.opening import open_foreign, read_at, read_foreign

INDEX = "model_index.json"
CONFIG = "config.json"
TEXT_MODEL = "AutoModel"
"""Stands for the class of a text encoder without a pipeline. transformers finds the class by config.json."""
_VOCABULARIES = {"sentencepiece.bpe.model", "spiece.model", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}
_SETTINGS = {"added_tokens.json", "chat_template.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json"}
TOKENIZER_FILES = _VOCABULARIES | _SETTINGS | {"merges.txt"}
"""All files that a tokenizer may be loaded from. Those that are present are digested."""
PICTURE_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of an image processor. transformers 5 writes the second one alone; earlier versions may write both."""
IMAGE_PROCESSOR = "image_processor"
"""The name of an image processor, among a pipeline's components and in the settings of a processor."""
_JSON_BYTES = 64 << 20
"""Far more than the index of the shards of any model has."""
_WITHOUT_VOCABULARY = {"ByT5Tokenizer"}
"""Tokenizers that need no vocabulary, as their tokens are bytes."""
_WEIGHTS = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
PIPELINE_CLASSES = {"LTX2TextConnectors": "diffusers.pipelines.ltx2"}
"""Classes of diffusers that model_index.json calls a pipeline's own, with the modules that have them."""
Kind = Literal["pipeline", "text", "vae"]
SCALES = (".scale_weight", ".weight_scale")
"""How the name of a weight's scale ends, in ComfyUI's files: that of `X.weight` is `X.scale_weight`."""
INPUT_SCALES = (".scale_input", ".input_scale")
"""The same for scales of a layer's input, which only products in 8 bits need."""
QUANTIZED_AS = ".comfy_quant"
"""How the name of a tensor ends that says in JSON how a weight is written."""
_MARK = "scaled_fp8"
"""The name of an empty tensor that says that the weights have scales."""
QUANTIZATION = "quantization_config"
"""The field of config.json that says how a library has quantised the weights."""


class MissingFile(BadInput):
    """A model folder lacks a needed file. A download may bring it."""


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a model, and exactly the files that it is loaded from."""

    name: str
    library: str
    class_name: str
    folder: Path
    files: Mapping[str, Path]
    """Paths by file name within the component's folder."""
    variant: str | None = None
    """The variant of the weights; None if none was asked for, or the component lacks it."""
    config: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """config.json, or tokenizer_config.json."""
    single_file: Path | None = None
    """The file of the weights, if they are not in `folder`, which then has the configuration alone."""
    loaded: Any = None
    """The caller's own module or tokenizer. Then there are no files."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 digests of the contents of `loaded`."""

    @property
    def path(self) -> Path:
        """The path of the weights or the tokenizer, for messages."""
        return self.single_file or self.folder


@dataclass(frozen=True, slots=True)
class Model:
    """A recognised model folder."""

    folder: Path
    kind: Kind
    class_name: str
    """The class of the pipeline or VAE; for a text encoder its architecture."""
    index: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """model_index.json of a pipeline, else config.json."""

    def config_of(self, component: str) -> dict[str, Json]:
        """Read config.json of a pipeline's component. Raises BadInput as `read_json`."""
        return read_json(self.folder / component / CONFIG)

    def component(self, name: str, variant: str | None = None, override: "Model | Path | None" = None, /) -> Component:
        """Return a component by its name in model_index.json; from the folder or the weight file `override`, if given."""
        folder = override.folder if isinstance(override, Model) else self.folder / name if self.kind == "pipeline" else self.folder
        library, class_name = "diffusers", self.class_name
        if self.kind == "pipeline":
            library, class_name = component_class(self, name)
        elif self.kind == "text":
            library, class_name = "transformers", "AutoTokenizer" if name.startswith("tokenizer") else TEXT_MODEL
        if name.startswith("tokenizer"):
            return tokenizer(name, folder, library, class_name)
        if name.startswith("processor"):
            return processor(name, folder, library, class_name)
        if "ImageProcessor" in class_name:
            return image_processor(name, folder, library, class_name)
        return module(name, folder, library, class_name, variant, file=override if isinstance(override, Path) else None)


def read_model(folder: Path) -> Model:
    """Read a model folder: a diffusers pipeline, a transformers text encoder, or a VAE. Raises BadInput for anything else."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        class_name = index.get("_class_name")
        if not isinstance(class_name, str):
            raise BadInput(
                f"{folder / INDEX} names no pipeline of diffusers (`_class_name` is {class_name!r}). A pipeline's own code is not run: give"
                " the folder of its text encoder or VAE, or a model with a pipeline of diffusers"
            )
        return Model(folder, "pipeline", class_name, index)
    if not (folder / CONFIG).is_file():
        raise MissingFile(
            f"{folder} is no model folder: it holds neither {INDEX} (diffusers) nor {CONFIG} (transformers); give a model's folder"
        )
    config = read_json(folder / CONFIG)
    if "_class_name" in config:
        return Model(folder, "vae", str(config["_class_name"]), config)
    if "model_type" not in config:
        raise BadInput(
            f"{folder / CONFIG} describes neither a transformers model (`model_type`) nor a diffusers one"
            " (`_class_name`); give another folder"
        )
    return Model(folder, "text", str((config.get("architectures") or [TEXT_MODEL])[0]), config)


def component_class(model: Model, name: str) -> tuple[str, str]:
    """Return the library and class of a component by model_index.json. Raises BadInput if they are missing or not supported."""
    entry = model.index.get(name)
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] is None:
        raise BadInput(f"{model.folder} has no {name!r}: {INDEX} says {entry!r}; give a model that has it")
    library, class_name = entry
    library = "diffusers" if class_name in PIPELINE_CLASSES else library
    if library not in _WEIGHTS:
        loaded = "only classes of diffusers and transformers are loaded: give a model with one of these"
        raise BadInput(f"{name!r} of {model.folder} comes from {library!r}; {loaded}")
    return str(library), str(class_name)


def module(name: str, folder: Path, library: str, class_name: str, variant: str | None, *, file: Path | None = None) -> Component:
    """Return a component with weights: config.json and safetensors. `file` has the weights if they are not in `folder`.

    It is recorded under the name that it would have in a folder, so that equal bytes give equal keys wherever they are.
    """
    if file is not None:
        files = {CONFIG: folder / CONFIG, weight_names(_WEIGHTS[library], None)[0]: file}
        return Component(name, library, class_name, folder, files, config=read_json(folder / CONFIG), single_file=file)
    names = _names(folder)
    if CONFIG not in names:
        raise MissingFile(f"{folder} has no {CONFIG}, which {name!r} needs; download the model again")
    if "adapter_config.json" in names:
        raise BadInput(f"{folder} holds an adapter (adapter_config.json); merge it into the weights first, and save those")
    weights, found_variant = _weights(folder, names, library, variant)
    files = {file: folder / file for file in (CONFIG, *weights)}
    return Component(name, library, class_name, folder, files, found_variant, read_json(folder / CONFIG))


def tokenizer(name: str, folder: Path, library: str, class_name: str) -> Component:
    """Return a tokenizer as a component, with those of its files that are present."""
    files = {file: folder / file for file in sorted(_names(folder).intersection(TOKENIZER_FILES))}
    if not _VOCABULARIES.intersection(files) and class_name not in _WITHOUT_VOCABULARY:
        raise MissingFile(
            f"{folder} lacks the files of {name!r} ({' or '.join(sorted(_VOCABULARIES))}): copy them from the model that it was made from"
        )
    config = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    return Component(name, library, class_name, folder, files, config=config)


def processor(name: str, folder: Path, library: str, class_name: str) -> Component:
    """Return a processor as a component: a tokenizer, and the settings of its image processor. `config` has those of both."""
    held, shown = tokenizer(name, folder, library, class_name), image_processor(name, folder, library, class_name)
    return replace(held, files={**shown.files, **held.files}, config={**shown.config, **held.config})


def image_processor(name: str, folder: Path, library: str, class_name: str) -> Component:
    """Return an image processor as a component. Raises MissingFile if its settings are not there."""
    there = _names(folder)
    files = {file: folder / file for file in PICTURE_FILES if file in there}
    if not files:
        raise MissingFile(f"{folder} needs {' or '.join(PICTURE_FILES)}, to prepare pictures for {name!r}: download the model again")
    settings = [read_json(path) for path in files.values()]
    return Component(name, library, class_name, folder, files, config=settings[0].get(IMAGE_PROCESSOR, settings[0]))


def read_numbers(component: Component, names: Mapping[str, str]) -> dict[str, list[float]]:
    """Return small tensors of the weights as lists, by the keys of `names`; its values are tensor names.

    Raises BadInput if one cannot be read.
    """
    state = component.loaded.state_dict() if names and component.loaded is not None else {}
    found = {given: state[name].detach().double().cpu().tolist() for given, name in names.items() if name in state}
    for path in [path for file, path in component.files.items() if file.endswith(".safetensors")] if names else []:
        try:
            with opened_weights(path) as (descriptor, header):
                for given, info in ((given, header.tensors.get(name)) for given, name in names.items() if given not in found):
                    if info is not None:
                        raw = read_at(descriptor, info.end - info.start, header.data_start + info.start)
                        found[given] = numbers((info.dtype, info.shape, raw)).ravel().tolist()
        except (EncodeFailed, FormatError, OSError) as error:
            raise BadInput(f"cannot read the weights of {component.name} in {path} ({error}); download the model again") from error
    lacking = sorted(name for given, name in names.items() if given not in found)
    if lacking:
        raise BadInput(
            f"the weights of {component.name} in {component.folder} lack {', '.join(lacking)}, which normalise its latents; give another"
            " VAE"
        )
    return found


def is_scale_mark(name: str) -> bool:
    """Return whether a tensor only says that the weights of its file have scales."""
    return name == _MARK or name.endswith(f".{_MARK}")


def eight_bits(component: Component) -> Literal["", "plain", "scaled"]:
    """Return whether weights have 8 bits, and scales, by headers; "" if damaged, or quantised by a library, which reads them itself."""
    tensors: dict[str, str] = {}
    for path in (path for file, path in component.files.items() if file.endswith(".safetensors")):
        with suppress(FormatError, OSError), opened_weights(path) as (_descriptor, header):
            tensors |= {name: info.dtype for name, info in header.tensors.items()}
    if QUANTIZATION in component.config:
        return ""
    if any(is_scale_mark(name) or name.endswith((*SCALES, QUANTIZED_AS)) for name in tensors):
        return "scaled"
    return "plain" if any(dtype.startswith("F8_") for dtype in tensors.values()) else ""


@contextmanager
def opened_weights(path: Path) -> Generator[tuple[int, Header]]:
    """Open a safetensors file, or a link to one as in the hub's cache, and yield descriptor and header. Raises FormatError, OSError."""
    with open_foreign(path) as file:
        yield file.fileno(), read_header(file.fileno(), os.fstat(file.fileno()).st_size, where=path)


def read_json(path: Path) -> dict[str, Json]:
    """Read a model's JSON file. Raises BadInput if it is missing, damaged, or no object."""
    try:
        value = json.loads(read_foreign(path, limit_bytes=_JSON_BYTES))
    except FileNotFoundError as error:
        raise MissingFile(f"{path} is missing; download the model again") from error
    except (OSError, RecursionError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds no JSON object; download the model again")
    return value


def _names(folder: Path) -> set[str]:
    """Return the names in a folder. Raises MissingFile, and BadInput for a fifo or device, which a library might open and wait for."""
    try:
        found = list(folder.iterdir())
        strange = [path for path in found if not (path.is_file() or path.is_dir()) and path.exists()]
    except OSError as error:
        raise MissingFile(f"{folder} cannot be listed: {error.strerror}; check the path, and whether you may read it") from error
    if strange:
        raise BadInput(f"{strange[0]} is not a regular file but a fifo, a socket or a device: move it out of the model's folder")
    return {path.name for path in found}


def _weights(folder: Path, names: set[str], library: str, variant: str | None) -> tuple[list[str], str | None]:
    stem = _WEIGHTS[library]
    for wanted in (variant, None) if variant else (None,):
        single, index = weight_names(stem, wanted)
        # if a folder has both, diffusers takes the shards, transformers the single file
        for name in (index, single) if library == "diffusers" else (single, index):
            if name in names:
                shards = list(_shards(folder, name, names)) if name == index else []
                return [name, *shards], wanted
    if any(name.endswith(".bin") for name in names):
        raise MissingFile(f"{folder} has its weights only as pickle (.bin), which can run code when read; save them as safetensors")
    raise MissingFile(
        f"{folder} has no weights: neither {stem}.safetensors nor {stem}.safetensors.index.json is there; download the model again"
    )


def weight_names(stem: str, variant: str | None) -> tuple[str, str]:
    """Return the file names of the single weight file and of the index of shards."""
    part = f".{variant}" if variant else ""
    return f"{stem}{part}.safetensors", f"{stem}.safetensors.index{part}.json"


def _shards(folder: Path, index: str, names: set[str]) -> Iterator[str]:
    shards = read_json(folder / index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise BadInput(f"{folder / index} names no shards (`weight_map`); download the model again")
    for shard in sorted({str(value) for value in shards.values()}):
        if shard not in names:
            raise MissingFile(f"{folder} lacks {shard}, which {index} names; download the model again")
        yield shard
