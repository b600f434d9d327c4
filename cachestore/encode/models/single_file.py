"""Find out by its header which component a single `.safetensors` file without a configuration belongs to. Does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.encode.models.folders import opened_weights
from cachestore.encode.models.setup import text_width

Shapes = Mapping[str, tuple[int, ...]]
SUFFIX = ".safetensors"
VAE_PREFIXES = ("first_stage_model.", "vae.")
"""How the names of a VAE's tensors begin in a checkpoint."""
TEXT_PREFIXES = (
    "cond_stage_model.transformer.",
    "cond_stage_model.model.",
    "conditioner.embedders.0.transformer.",
    "conditioner.embedders.0.model.",
    "conditioner.embedders.1.model.",
    "text_encoders.clip_l.transformer.",
    "text_encoders.clip_g.transformer.",
    "text_encoders.t5xxl.transformer.",
)
"""How the names of a text encoder's tensors begin in a checkpoint."""
TOKENS = ("token_embedding.weight", "embed_tokens.weight", "shared.weight", "word_embeddings.weight")
"""How the names of token embeddings end."""
_CHECKPOINTS = {
    "conditioner.embedders.": "StableDiffusionXLPipeline",
    "cond_stage_model.": "StableDiffusionPipeline",
    "model.diffusion_model.joint_blocks.": "StableDiffusion3Pipeline",
}
"""How tensor names begin that only a checkpoint of a whole pipeline has, and the class that can read it."""
_DENOISERS = (
    "model.diffusion_model.",
    "double_blocks.",
    "joint_blocks.",
    "transformer_blocks.",
    "down_blocks.",
    "input_blocks.",
    "blocks.",
)
_ADAPTERS = ("lora_", ".lora", ".hada_", ".lokr_")


def is_single_file(name: str) -> bool:
    """Return whether a name is that of a single weight file, which need not exist, rather than of a folder or a hub id."""
    path = Path(name).expanduser()
    return path.suffix == SUFFIX and not path.is_dir()


def read_shapes(path: Path) -> Shapes:
    """Return the shapes of a file's tensors by name. Raises BadInput if it cannot be read, or is an adapter."""
    try:
        with opened_weights(path) as (_descriptor, header):
            tensors = header.tensors
    except FormatError as error:
        raise BadInput(f"{path} is no .safetensors file: its header is damaged, or it was not copied whole; copy it again") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; check the path, and whether you may read it") from error
    if not tensors:
        raise BadInput(f"{path} holds no tensors; download it again")
    if any(part in name for name in tensors for part in _ADAPTERS):
        raise BadInput(f"{path} is an adapter (LoRA); merge it into the weights first, and save those")
    return {name: info.shape for name, info in tensors.items()}


def vae_prefix(names: Sequence[str]) -> str:
    """Return how the names of the VAE's tensors begin; "" if the file has a VAE alone."""
    return next((prefix for prefix in VAE_PREFIXES if any(name.startswith(prefix) for name in names)), "")


def text_prefix(shapes: Shapes, config: Mapping[str, Json]) -> str | None:
    """Return how the names of a text encoder's tensors begin; None if no token embedding has the shape that `config` says."""
    inner: Mapping[str, Json] = config.get("text_config") or {}
    wanted = (config.get("vocab_size") or inner.get("vocab_size"), text_width(config))
    found = next((name for name in sorted(shapes) if name.endswith(TOKENS) and tuple(shapes[name]) == wanted), None)
    if found is None:
        return None
    return next((prefix for prefix in TEXT_PREFIXES if found.startswith(prefix)), "")


def token_embeddings(shapes: Shapes) -> dict[str, list[int]]:
    """Return the shapes of a file's token embeddings by name. They distinguish text encoders."""
    return {name: list(shape) for name, shape in sorted(shapes.items()) if name.endswith(TOKENS)}


def why_no_model(path: Path) -> str:
    """Say why a single file cannot be `--model`, and what to do with it. Raises BadInput if it cannot be read."""
    names, model = sorted(read_shapes(path)), option("model")

    def has(*prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in names)

    pipeline = next((class_name for prefix, class_name in _CHECKPOINTS.items() if has(prefix)), None)
    if pipeline is not None:
        convert = f"from diffusers import {pipeline} as P; P.from_single_file({str(path)!r}).save_pretrained('FOLDER')"
        return f'{path} is a whole checkpoint in one file; make a folder of it, and give that as {model}: python -c "{convert}"'
    component = option("vae") if has("encoder.conv", "encoder.down", "encoder.stages", *VAE_PREFIXES) else None
    component = option("text_encoder") if any(name.endswith(TOKENS) for name in names) else component
    if component is not None and not has("model.diffusion_model."):
        return f"{path} holds one component and no config.json; give it as {component}, and the folder or id of its pipeline as {model}"
    if has(*_DENOISERS):
        return f"{path} is a denoiser alone, which encodes nothing; give the folder or id of its pipeline as {model}"
    return f"{path} holds tensors such as {names[0]}, which is no model known here; give a model's folder or hub id"
