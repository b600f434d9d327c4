"""ai-toolkit's cache files in a store: against a stand-in that has its functions at the plug points, with bodies of our own."""

# The trainer's modules are a stand-in.
# pyright: basic, reportMissingImports=false
import os

import pytest
import torch

from cachestore import live
from tests.trainers.live_stand_ins import armed_here

MIXINS = """
import os
from safetensors.torch import load_file, save_file

def _path(item, folder):
    return os.path.join(os.path.dirname(item.path), folder, os.path.basename(item.path) + "_digest.safetensors")

class LatentCachingFileItemDTOMixin:
    def get_latent_path(self, recalculate=False):
        return _path(self, "_latent_cache")

    def get_latent(self, device=None):
        return load_file(self.get_latent_path(), device="cpu")["latent"]

class TextEmbeddingFileItemDTOMixin:
    def _build_text_embedding_path(self, caption_override=None, text_only=False):
        return _path(self, "_t_e_cache")

    def get_text_embedding_path(self, recalculate=False):
        return self._build_text_embedding_path()

    def load_prompt_embedding(self, device=None):
        from toolkit.prompt_utils import PromptEmbeds
        self.prompt_embeds = PromptEmbeds.load(self.get_text_embedding_path())

class ClipImageFileItemDTOMixin:
    def get_clip_vision_embeddings_path(self, recalculate=False):
        return _path(self, "_clip_vision_cache")

class LatentCachingMixin:
    def _cache_one_latent(self, file_item, latent_path, cached_state_dict, needs_encode, to_disk, to_memory):
        os.makedirs(os.path.dirname(latent_path), exist_ok=True)
        save_file({"latent": self.sd.encode_images(file_item.tensor[None])[0].clone()}, latent_path, metadata={"a": "1"})
"""
ADVANCED = """
import os
from safetensors import safe_open
from safetensors.torch import load_file, save_file

class AdvancedPromptEmbeds(dict):
    def __init__(self, **kwargs):
        super().__init__({name: [tensor] for name, tensor in kwargs.items()})

    def save(self, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        save_file({name: one[0] for name, one in self.items()}, path, metadata={"class_name": "AdvancedPromptEmbeds"})

    @classmethod
    def load(cls, path=None):
        return cls(**load_file(path))
"""
PROMPT = """
import os
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toolkit.advanced_prompt_embeds import AdvancedPromptEmbeds

class PromptEmbeds:
    def __init__(self, args, attention_mask=None):
        (self.text_embeds, self.pooled_embeds), self.attention_mask = args, attention_mask

    def save(self, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        save_file({"text_embed": self.text_embeds, "pooled_embed": self.pooled_embeds, "attention_mask": self.attention_mask}, path)

    @classmethod
    def load(cls, path):
        f = safe_open(path, framework="pt")
        if (f.metadata() or {}).get("class_name") == "AdvancedPromptEmbeds":
            return AdvancedPromptEmbeds.load(path=path)
        tensors = load_file(path, device="cpu")
        return cls([tensors["text_embed"], tensors["pooled_embed"]], tensors["attention_mask"])
"""
LOADER = """
from toolkit.dataloader_mixins import *

class FileItemDTO(LatentCachingFileItemDTOMixin, TextEmbeddingFileItemDTOMixin, ClipImageFileItemDTOMixin):
    pass
"""
SOURCES = {
    "toolkit/dataloader_mixins.py": MIXINS,
    "toolkit/advanced_prompt_embeds.py": ADVANCED,
    "toolkit/prompt_utils.py": PROMPT,
    "toolkit/data_transfer_object/data_loader.py": LOADER,
}


def armed(monkeypatch, tmp_path, **changed):
    sources = {name: text.replace(*changed.get(name.split("/")[-1].removesuffix(".py"), ("", ""))) for name, text in SOURCES.items()}
    return armed_here(monkeypatch, tmp_path, "cachestore.trainers.ai_toolkit.live", sources)


def item_in(folder):
    from toolkit.data_transfer_object import data_loader

    item = data_loader.FileItemDTO()
    item.path = str(folder / "a cat.png")
    return item


def test_what_it_saves_is_what_it_loads_and_pictures_may_be_read_only(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path) as here:
        from toolkit.prompt_utils import PromptEmbeds

        pictures = tmp_path / "pictures"
        pictures.mkdir()
        item = item_in(pictures)
        path = item.get_text_embedding_path()
        text, pooled, mask = torch.randn(1, 3, 5).bfloat16(), torch.randn(1, 4), torch.ones(1, 3, dtype=torch.int64)
        assert not os.path.exists(path)
        PromptEmbeds([text, pooled], mask).save(path)
        assert os.path.exists(path)
        item.load_prompt_embedding()
        read = item.prompt_embeds
        assert [torch.equal(*pair) for pair in ((read.text_embeds, text), (read.pooled_embeds, pooled), (read.attention_mask, mask))] == [
            True
        ] * 3
        assert here.counts() == {"text": [0, 1]}
        assert not [*pictures.iterdir()]
    assert here.rows() == [path]


def test_folders_and_files_of_other_names_are_made_on_the_disk(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path) as here:
        from toolkit import dataloader_mixins

        os.makedirs(tmp_path / "output" / "lora")
        dataloader_mixins.save_file({"weight": torch.ones(2)}, tmp_path / "output" / "lora" / "lora.safetensors")
        assert torch.equal(dataloader_mixins.load_file(tmp_path / "output" / "lora" / "lora.safetensors")["weight"], torch.ones(2))
        assert not here.store.exists()


@pytest.mark.parametrize(
    ("module", "old", "new", "words"),
    [
        ("dataloader_mixins", '["latent"]', '["latent"].mT', "FileItemDTO.get_latent"),
        ("dataloader_mixins", '"_latent_cache"', '"_latents"', "does not know"),
        ("dataloader_mixins", "_build_text_embedding_path", "_text_path", "_build_text_embedding_path"),
        ("dataloader_mixins", "get_latent_path(self, recalculate=False)", "get_latent_path(self, again=False)", "recalculate"),
        ("prompt_utils", 'tensors["text_embed"],', 'tensors["text_embed"].mT,', "load_prompt_embedding"),
        ("prompt_utils", "import safe_open", "import safe_open as opened", "safe_open"),
        (
            "advanced_prompt_embeds",
            "cls(**load_file(path))",
            "cls(text_embeds=load_file(path)['text_embeds'].float(), tokens=load_file(path)['tokens'])",
            "PromptEmbeds.load",
        ),
    ],
)
def test_a_version_that_does_not_fit_is_refused_by_name(monkeypatch, tmp_path, module, old, new, words):
    with armed(monkeypatch, tmp_path, **{module: (old, new)}) as here, pytest.raises(live.Refused, match=words) as refused:
        os.path.exists(item_in(tmp_path).get_latent_path())
    assert refused.value.code == 2
    assert not here.store.exists()
