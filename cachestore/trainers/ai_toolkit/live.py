"""ai-toolkit: latents, text embeddings and CLIP vision by the paths of its cache files, which are digests of what they depend on.

All models save and load with safetensors in folders of three names. Read: `toolkit/dataloader_mixins.py`, `toolkit/prompt_utils.py`,
`toolkit/advanced_prompt_embeds.py`, and what caches for itself under `extensions_built_in`.
"""

# pyright: basic, reportMissingImports=false
import os
from typing import Any

from cachestore import live

_TESTED = {
    "toolkit.dataloader_mixins": ["77911be00b42"],
    "toolkit.prompt_utils": ["d0c20d9ed5df"],
    "toolkit.advanced_prompt_embeds": ["dd6d2ee5d9aa"],
}
adapter = live.Adapter("ai-toolkit", data_set="files", tested=_TESTED, reads_exports=True)
_MIXINS = "toolkit.dataloader_mixins"
_PARTS = {"_latent_cache": "latents", "_t_e_cache": "text", "_clip_vision_cache": "clip vision"}


def _part(folder: str, _name: str) -> str | None:
    return _PARTS.get(os.path.basename(folder))


class _Any:
    """An object of which all that is not named is None."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return None


def _self_test(folder: str) -> None:
    import torch
    from toolkit import dataloader_mixins
    from toolkit.advanced_prompt_embeds import AdvancedPromptEmbeds
    from toolkit.data_transfer_object.data_loader import FileItemDTO
    from toolkit.prompt_utils import PromptEmbeds

    class MadeUpItem(FileItemDTO):
        __init__, __getattr__, cleanup = _Any.__init__, _Any.__getattr__, lambda _self: None

    latents = torch.arange(4 * 4 * 6.0).view(4, 4, 6).bfloat16()
    sd = _Any(torch_dtype=latents.dtype, device_torch=latents.device, encode_images=lambda _pixels: latents[None])
    config = _Any(caption_dropout_rate=0, fps=24)
    item = MadeUpItem(path=os.path.join(folder, "a picture.png"), caption="a caption", dataset_config=config, tensor=torch.zeros(3, 32, 48))
    item.is_latent_cached = item.is_text_embedding_cached = True
    path = item.get_latent_path(recalculate=True)
    dataloader_mixins.LatentCachingMixin._cache_one_latent(_Any(sd=sd, dataset_config=config), item, path, None, True, True, False)
    live.check_same("os.path.exists of a cache file", True, os.path.exists(path))
    live.check_same("FileItemDTO.get_latent", latents, item.get_latent())
    text, pooled, tokens = torch.arange(15.0).view(1, 3, 5).bfloat16(), torch.arange(4.0)[None], torch.arange(3)[None]
    path = item.get_text_embedding_path(recalculate=True)
    PromptEmbeds([text, pooled], attention_mask=tokens).save(path)
    item.load_prompt_embedding()
    read = [item.prompt_embeds.text_embeds, item.prompt_embeds.pooled_embeds, item.prompt_embeds.attention_mask]
    live.check_same("FileItemDTO.load_prompt_embedding", [text, pooled, tokens], read)
    AdvancedPromptEmbeds(text_embeds=text, tokens=tokens).save(path)
    read = PromptEmbeds.load(path)
    live.check_same("PromptEmbeds.load", [[text], [tokens]], [read["text_embeds"], read["tokens"]])


files = live.NamedFiles(adapter, holds=lambda folder: os.path.basename(folder) in _PARTS, part=_part, self_test=_self_test)
adapter.change("safetensors.torch", "load_file")(files.loading)
adapter.change("safetensors.torch", "save_file")(files.saving)
for _module in ("toolkit.prompt_utils", "toolkit.advanced_prompt_embeds"):
    adapter.change(_module, "safe_open")(files.opening)
adapter.change("extensions_built_in.*", "safe_open", optional=True)(files.opening)


@adapter.change("os", "makedirs")
def _makedirs(own: Any) -> Any:
    def make(name: Any, *args: Any, **kwargs: Any) -> None:  # no folder for cache files: the pictures' may be read-only
        if os.path.basename(os.path.abspath(name)) not in _PARTS:
            own(name, *args, **kwargs)

    return make


@adapter.replace(_MIXINS, "LatentCachingFileItemDTOMixin.get_latent_path")
def _latents_path(own: Any, self: Any, recalculate: bool = False) -> str:
    return files.check(own(self, recalculate))


@adapter.replace(_MIXINS, "TextEmbeddingFileItemDTOMixin._build_text_embedding_path")
def _text_path(own: Any, self: Any, caption_override: Any = None, text_only: bool = False) -> str:
    return files.check(own(self, caption_override, text_only))


@adapter.replace(_MIXINS, "ClipImageFileItemDTOMixin.get_clip_vision_embeddings_path")
def _clip_vision_path(own: Any, self: Any, recalculate: bool = False) -> str:
    return files.check(own(self, recalculate))
