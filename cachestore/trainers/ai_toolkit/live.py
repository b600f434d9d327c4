"""ai-toolkit: latents, text embeddings and CLIP vision by the paths of its cache files, which are digests of what they depend on.

All models save and load with safetensors in folders of three names. Read: `toolkit/dataloader_mixins.py`, `toolkit/prompt_utils.py`,
`toolkit/advanced_prompt_embeds.py`, and what caches for itself under `extensions_built_in`.
"""

import os
from types import SimpleNamespace

from cachestore import live

adapter = live.Adapter("ai-toolkit", data_set="files")
_MIXINS = "toolkit.dataloader_mixins"
_PARTS = {"_latent_cache": "latents", "_t_e_cache": "text", "_clip_vision_cache": "clip vision"}


def _part(folder, _name):
    return _PARTS.get(os.path.basename(folder))


def _self_test(folder):
    import torch
    from toolkit import dataloader_mixins
    from toolkit.advanced_prompt_embeds import AdvancedPromptEmbeds
    from toolkit.data_transfer_object.data_loader import FileItemDTO
    from toolkit.prompt_utils import PromptEmbeds

    class Item(FileItemDTO):
        def __init__(self):  # all that is not named is None
            self.path, self.caption = os.path.join(folder, "a picture.png"), "a caption"
            self.is_latent_cached = self.is_text_embedding_cached = True
            self.tensor = torch.zeros(3, 32, 48)
            self.dataset_config = SimpleNamespace(caption_dropout_rate=0, __getattr__=None)

        def __getattr__(self, name):
            return None

        def cleanup(self):
            pass

    class Nothing:
        def __init__(self, **values):
            vars(self).update(values)

        def __getattr__(self, name):
            return None

    latents = torch.arange(4 * 4 * 6.0).view(4, 4, 6).bfloat16()
    cpu = torch.device("cpu")
    model = Nothing(torch_dtype=torch.bfloat16, device_torch=cpu, encode_images=lambda pixels: latents[None])
    item = Item()
    item.dataset_config = Nothing(caption_dropout_rate=0, fps=24)
    data_set = Nothing(sd=model, dataset_config=item.dataset_config)
    path = item.get_latent_path(recalculate=True)
    dataloader_mixins.LatentCachingMixin._cache_one_latent(data_set, item, path, None, True, True, False)
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
    live.check_same("PromptEmbeds.load", {"text_embeds": [text], "tokens": [tokens]}, {name: read[name] for name in ("text_embeds", "tokens")})


files = live.NamedFiles(adapter, holds=lambda folder: os.path.basename(folder) in _PARTS, part=_part, self_test=_self_test)
adapter.change("safetensors.torch", "load_file")(files.loading)
adapter.change("safetensors.torch", "save_file")(files.saving)
for _module in ("toolkit.prompt_utils", "toolkit.advanced_prompt_embeds"):
    adapter.change(_module, "safe_open")(files.opening)
adapter.change("extensions_built_in.*", "safe_open", optional=True)(files.opening)


@adapter.change("os", "makedirs")
def makedirs(own):
    """Make no folder for cache files, as the pictures' may be read-only."""

    def make(name, *args, **kwargs):
        if os.path.basename(os.path.abspath(name)) not in _PARTS:
            own(name, *args, **kwargs)

    return make


@adapter.replace(_MIXINS, "LatentCachingFileItemDTOMixin.get_latent_path")
def latents_path(own, self, recalculate=False):
    return files.check(own(self, recalculate))


@adapter.replace(_MIXINS, "TextEmbeddingFileItemDTOMixin._build_text_embedding_path")
def text_path(own, self, caption_override=None, text_only=False):
    return files.check(own(self, caption_override, text_only))


@adapter.replace(_MIXINS, "ClipImageFileItemDTOMixin.get_clip_vision_embeddings_path")
def clip_vision_path(own, self, recalculate=False):
    return files.check(own(self, recalculate))
