"""ai-toolkit for `live_shallow.py`: its data set, which caches when it is made, and its batches."""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from conformance.trainer_ai_toolkit import DRIVER, AiToolkit
from conformance.trainers import Case

RESOLUTION = 256
STAND_INS = ("einops", "cv2_enumerate_cameras", "timm", "toml", "pytorch_fid", "k_diffusion", "sentencepiece")
_MORE = (
    {"qwen-image", "z-image"} if getattr(importlib.util.find_spec("torchvision"), "loader", None) is None else set()
)  # their modules import all of it
CASES = [case for case in AiToolkit.cases if case.family not in _MORE]
CACHE_FILE = r"_(latent|t_e|clip_vision)_cache/.*"
LOADERS = ((None, 0), ("fork", 2), ("spawn", 2))
EDITED = ()
SCANNED = ("*.py", "jobs/**/*.py", "toolkit/**/*.py", "extensions_built_in/**/*.py")
CACHE_PATH = r"latent_path|embeddings?_path|dop_path|blank_path|cond_path|cache_file|_cache['/]|embeds_unconditional"
LEFT_OUT = set[str]()
REPLACED = {"load_file", "save_file", "safe_open", "os.path.exists", "PromptEmbeds.load", "prompt_embeds.save"}
_MIXINS = "toolkit/dataloader_mixins.py"
CHANGES = (
    ("get_latent_path is renamed", _MIXINS, r"get_latent_path", "latent_path_of", ["get_latent_path"]),
    ("the folder of text embeddings is renamed", _MIXINS, r"'_t_e_cache'", "'_text_cache'", ["does not know", "_text_cache"]),
    ("get_latent transposes", _MIXINS, r"state_dict\['latent'\]$", "state_dict['latent'].transpose(-1, -2)", ["get_latent", "self-test"]),
    (
        "PromptEmbeds.load transposes",
        "toolkit/prompt_utils.py",
        r"text_embeds.append\(state_dict\[key\]\)",
        "text_embeds.append(state_dict[key].transpose(-1, -2))",
        ["load_prompt_embedding", "self-test"],
    ),
    (
        "text embeddings are saved past the adapter",
        "toolkit/prompt_utils.py",
        r"^        save_file\(state_dict, path\)",
        "        os.makedirs(os.path.dirname(path) + '/x'); torch.save(state_dict, path)",
        ["self-test"],
    ),
)


def prepare(driver: Any, case: Case, data: Path, asked: argparse.Namespace) -> Callable[[str | None, int], Iterator[dict[str, Any]]]:
    """Make the data set, which caches what is missing, and return what yields all batches as training reads them."""
    from toolkit.data_loader import dto_collation

    del asked
    dataset = driver._dataset(case, data, 2)

    def batches(method: str | None, workers: int) -> Iterator[dict[str, Any]]:
        options: dict[str, Any] = {"multiprocessing_context": method, "persistent_workers": True} if workers else {}
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=dto_collation, **options)
        for batch in loader:
            embeds = batch.prompt_embeds
            found = {"latents": batch.latents, "rows": embeds.text_embeds, "pooled": embeds.pooled_embeds, "mask": embeds.attention_mask}
            yield {name: value for name, value in found.items() if value is not None}

    return batches


__all__ = [
    "CACHE_FILE",
    "CACHE_PATH",
    "CASES",
    "CHANGES",
    "DRIVER",
    "EDITED",
    "LOADERS",
    "REPLACED",
    "RESOLUTION",
    "SCANNED",
    "STAND_INS",
    "prepare",
]
