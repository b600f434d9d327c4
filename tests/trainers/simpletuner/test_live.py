"""The live adapter of SimpleTuner, with a stand-in of the trainer's modules."""

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.live import arming
from cachestore.live import run as runs
from cachestore.live.adapter import Refused
from cachestore.trainers.simpletuner.live import TEXT, VAE, adapter
from tests.fakes import tells_of

pytestmark = pytest.mark.torch
NAME = "simpletuner/test"


class Model:
    """A model of the trainer, with one text encoder."""

    def __init__(self, trainer):
        self.trainer, self.config, self.tokenizers = trainer, trainer.config, []
        self.text_encoders = [trainer.text]

    def requires_text_embed_image_context(self):
        return self.trainer.sees_pictures

    def encode(self, prompts, is_negative):
        self.trainer.encoded += prompts
        _ = self.config.tokenizer_max_length, getattr(self.config, self.trainer.reads, None)
        rows = torch.tensor([[len(prompt) % 64, sum(map(ord, prompt)) % 64, int(is_negative)] for prompt in prompts])
        made: dict[str, Any] = {"prompt_embeds": self.text_encoders[0](rows), "pooled": None, "more": [rows.float()]}
        return made

    def encode_pictures(self, vae, pixels):
        self.trainer.pictures += len(pixels)
        return vae(pixels)

    def pack_text_embeddings_for_cache(self, embeddings):
        return embeddings

    def unpack_text_embeddings_from_cache(self, embeddings):
        return embeddings


class Trainer:
    """The stand-in, plugged, with three pictures."""

    def __init__(self, folder):
        self.folder, self.encoded, self.pictures, self.reads, self.sees_pictures = folder, [], 0, "t5_padding", False
        self.config = argparse.Namespace(tokenizer_max_length=77, t5_padding="zero", learning_rate=1, model_family="small")
        torch.manual_seed(0)
        self.text, self.vae = torch.nn.Embedding(64, 5), torch.nn.Conv2d(3, 4, 2)
        self.paths = [str(folder / f"{number}.png") for number in range(3)]
        for number, path in enumerate(self.paths):
            Path(path).write_bytes(bytes(range(number, number + 16)))
        self.state = importlib.import_module("simpletuner.helpers.training.state_tracker").StateTracker
        self.state.args, self.state.config, self.state.mappings = self.config, {"crop": True, "repeats": 2}, []
        self.state.images = self.paths
        self.state.metadata = {path: {"crop_coordinates": [0, 0]} for path in self.paths}
        self.records = [self.record(f"caption {number}", f"{number}.png") for number in range(3)]
        self.kind = "image"

    def record(self, prompt, place=""):
        return {"prompt": prompt, "key": prompt, "metadata": {"dataset_relative_path": place} if place else {}}

    def backend(self):
        return SimpleNamespace(id="text", type="local", read=lambda path: Path(path).read_bytes())

    def text_cache(self, split=lambda some: some):
        return importlib.import_module(TEXT).TextEmbeddingCache("text", self.backend(), Model(self), split)

    def vae_cache(self):
        accelerator = SimpleNamespace(device="cpu")
        cache = importlib.import_module(VAE).VAECache
        return cache("data", Model(self), self.vae, accelerator, None, None, self.backend(), dataset_type=self.kind)

    def texts(self, records=None, **how):
        """Start, and make text. Returns the cache, and what was encoded."""
        runs._runs.clear()
        self.encoded = []
        cache = self.text_cache()
        cache.compute_prompt_embeddings_with_model(records or self.records, return_concat=False, load_from_cache=False, **how)
        return cache, self.encoded

    def latents(self):
        """Start, and make latents. Returns the cache, and how many were encoded."""
        runs._runs.clear()
        self.pictures = 0
        cache = self.vae_cache()
        cache.discover_unprocessed_files()
        cache.process()
        return cache, self.pictures


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    setting = arming.Setting("cachestore.trainers.simpletuner.live", str(tmp_path / "store"), NAME)
    monkeypatch.setattr(arming, "_armed", [(setting, adapter)])
    monkeypatch.setattr(runs, "_runs", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "simpletuner"]:
        monkeypatch.delitem(sys.modules, name)
    for name in (TEXT, VAE):
        adapter.plug_into(importlib.import_module(name))
    yield Trainer(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "simpletuner"]:
        del sys.modules[name]
    for one in runs._runs:
        one.store.close()


def rows(trainer, part):
    with cs.open(trainer.folder / "store") as store:
        return [*store.dataset(f"{NAME}/{part}").ids]


def test_text_is_made_once_and_read_as_it_was_made(trainer):
    cache, encoded = trainer.texts()
    assert encoded == ["caption 0", "caption 1", "caption 2"]
    read = cache.compute_prompt_embeddings_with_model([trainer.records[1]])
    made = Model(trainer).encode(["caption 1"], False)
    assert torch.equal(read["prompt_embeds"], made["prompt_embeds"])
    assert torch.equal(read["more"][0], made["more"][0])
    assert read["pooled"] is None
    assert trainer.texts()[1] == []
    assert rows(trainer, "text") == ["0.png", "1.png", "2.png"]


def test_an_edited_caption_is_encoded_alone_and_takes_its_row(trainer):
    trainer.texts()
    trainer.records[1] = trainer.record("another", "1.png")
    assert trainer.texts()[1] == ["another"]
    assert rows(trainer, "text") == ["0.png", "1.png", "2.png"]


def test_several_captions_of_a_picture_are_rows_of_their_own(trainer):
    trainer.texts([trainer.record("one", "0.png"), trainer.record("two", "0.png"), trainer.record("for validation")])
    assert rows(trainer, "text") == ["0.png", "0.png (2)", "for validation"]


@pytest.mark.parametrize("change", [{"tokenizer_max_length": 64}, {"t5_padding": "unmodified"}, {"model_family": "other"}])
def test_a_setting_on_which_text_depends_makes_it_anew(trainer, change):
    trainer.texts()
    vars(trainer.config).update(change)
    assert len(trainer.texts()[1]) == 3


def test_another_encoder_makes_text_anew_and_another_setting_does_not(trainer):
    trainer.texts()
    trainer.config.learning_rate = 2
    assert trainer.texts()[1] == []
    trainer.text = torch.nn.Embedding(64, 5)
    assert len(trainer.texts()[1]) == 3


def test_a_setting_that_is_not_known_is_refused_by_name_and_nothing_is_stored(trainer):
    trainer.reads = "learning_rate"
    with pytest.raises(Refused, check=tells_of("learning_rate")):
        trainer.texts()
    assert type(trainer.config) is argparse.Namespace
    with cs.open(trainer.folder / "store") as store:
        assert len(store) == 0


def test_text_is_read_when_the_encoders_are_gone(trainer):
    cache, _encoded = trainer.texts()
    cache.text_encoders = cache.tokenizers = cache.model.text_encoders = cache.model.tokenizers = []
    assert cache.compute_prompt_embeddings_with_model([trainer.records[2]])["prompt_embeds"].shape == (1, 3, 5)


def test_a_negative_prompt_and_a_dropped_caption_are_values_of_their_own(trainer):
    def start():
        runs._runs.clear()
        trainer.encoded = []
        cache = trainer.text_cache()
        cache.encode_dropout_caption()
        return cache.encode_validation_negative_prompt("blurry")["more"], trainer.encoded

    made, encoded = start()
    assert made[0][0, 2] == 1
    assert encoded == ["", "blurry"]
    assert start()[1] == []
    assert rows(trainer, "text") == ["(no caption)", "blurry"]


def test_a_filtered_caption_is_what_the_filter_leaves(trainer):
    trainer.texts([trainer.record("forbidden cat"), trainer.record("unusable")])
    assert trainer.texts([trainer.record("cat")])[1] == []


def test_a_rank_makes_its_part_first_and_then_what_others_did_not(trainer):
    cache = trainer.text_cache(split=lambda some: some[2:])
    cache.compute_prompt_embeddings_with_model(trainer.records, return_concat=False, load_from_cache=False)
    assert trainer.encoded == ["caption 2", "caption 0", "caption 1"]


def test_text_that_is_missing_is_made_on_demand_or_is_an_error(trainer):
    cache = trainer.text_cache()
    with pytest.raises(cs.MissingEntry):
        cache.compute_prompt_embeddings_with_model([trainer.records[0]])
    cache.text_cache_ondemand = True
    assert cache.compute_prompt_embeddings_with_model([trainer.records[0]])["prompt_embeds"].shape == (1, 3, 5)
    assert trainer.encoded == ["caption 0"]


def test_text_that_depends_on_pictures_is_refused(trainer):
    trainer.sees_pictures = True
    with pytest.raises(Refused, check=tells_of("Model depends on pictures")):
        trainer.texts()


def test_a_reader_that_transposes_text_is_found_before_anything_is_encoded(trainer, monkeypatch):
    own = importlib.import_module(TEXT).TextEmbeddingCache.load_from_cache
    monkeypatch.setattr(
        importlib.import_module(TEXT).TextEmbeddingCache,
        "load_from_cache",
        lambda self, filename: {name: one.transpose(0, 1) for name, one in own(self, filename).items()},
    )
    with pytest.raises(Refused, check=tells_of("self-test", "TextEmbeddingCache")):
        trainer.texts()
    assert trainer.encoded == []


def test_a_model_that_shortens_text_for_the_cache_and_pads_it_when_read_is_not_refused(trainer, monkeypatch):
    monkeypatch.setattr(Model, "pack_text_embeddings_for_cache", lambda _self, made: made | {"prompt_embeds": made["prompt_embeds"][:, :2]})
    pad = torch.nn.functional.pad
    monkeypatch.setattr(
        Model, "unpack_text_embeddings_from_cache", lambda _self, read: read | {"prompt_embeds": pad(read["prompt_embeds"], (0, 0, 0, 1))}
    )
    cache, _encoded = trainer.texts()
    read = cache.compute_prompt_embeddings_with_model([trainer.records[1]])["prompt_embeds"]
    assert torch.equal(read[:, :2], Model(trainer).encode(["caption 1"], False)["prompt_embeds"][:, :2])
    assert read.shape == (1, 3, 5)


def test_what_a_record_says_besides_the_caption_makes_text_anew(trainer):
    trainer.texts()
    trainer.records[1]["metadata"]["lyrics"] = "la la"
    assert trainer.texts()[1] == ["caption 1"]
    trainer.records[1]["metadata"] |= {"image_path": "/elsewhere/1.png", "data_backend_id": "other"}
    assert trainer.texts()[1] == []


def test_pictures_that_are_not_on_this_machine_are_read_for_their_digests(trainer, monkeypatch):
    monkeypatch.setattr(Trainer, "backend", lambda self: SimpleNamespace(id="text", type="aws", read=lambda path: Path(path).read_bytes()))
    assert trainer.latents()[1] == 3
    Path(trainer.paths[0]).write_bytes(bytes(range(40, 56)))
    assert trainer.latents()[1] == 1


def test_latents_are_made_once_and_read_as_they_were_made(trainer):
    cache, made = trainer.latents()
    assert made == 3
    cache.vae = None
    pixels = torch.stack([torch.arange(number, number + 12.0).reshape(3, 2, 2) for number in (0, 1)])  # as in its batch
    assert torch.equal(cache.retrieve_from_cache(trainer.paths[1]), trainer.vae(pixels)[1])
    assert trainer.latents()[1] == 0
    assert rows(trainer, "latents") == trainer.paths


def test_a_replaced_picture_or_another_crop_is_encoded_alone(trainer):
    trainer.latents()
    Path(trainer.paths[0]).write_bytes(bytes(range(40, 56)))
    assert trainer.latents()[1] == 1
    trainer.state.metadata[trainer.paths[2]] = {"crop_coordinates": [0, 8]}
    assert trainer.latents()[1] == 1
    assert trainer.latents()[1] == 0


def test_what_latents_depend_on_makes_them_anew(trainer):
    trainer.latents()
    trainer.state.config, trainer.config.tokenizer_max_length = {"crop": True, "repeats": 3}, 64
    assert trainer.latents()[1] == 0
    trainer.state.config = {"crop": False, "repeats": 3}
    assert trainer.latents()[1] == 3
    trainer.vae = torch.nn.Conv2d(3, 4, 2)
    assert trainer.latents()[1] == 3


def test_equal_pictures_are_encoded_once(trainer):
    Path(trainer.paths[1]).write_bytes(Path(trainer.paths[0]).read_bytes())
    assert trainer.latents()[1] == 2


@pytest.mark.parametrize(("kind", "mappings", "words"), [("audio", [], "audio"), ("image", [("main", "data")], "conditions 'main'")])
def test_data_sets_that_it_does_not_know_are_refused_by_name(trainer, kind, mappings, words):
    trainer.kind, trainer.state.mappings = kind, mappings
    with pytest.raises(Refused, check=tells_of(words, "data")):
        trainer.latents()
    assert trainer.pictures == 0


def test_a_reader_that_transposes_latents_is_found_before_anything_is_encoded(trainer, monkeypatch):
    cache = importlib.import_module(VAE).VAECache
    monkeypatch.setattr(cache, "retrieve_from_cache", lambda self, path: self.encode_images([None], [path])[0].transpose(-1, -2))
    with pytest.raises(Refused, check=tells_of("self-test", "VAECache")):
        trainer.latents()
    assert trainer.pictures == 0
    with pytest.raises(Refused, check=tells_of("self-test", "VAECache")):
        trainer.texts()  # which come before latents
    assert trainer.encoded == []


def test_a_writer_that_is_not_replaced_is_found(trainer):
    cache, _made = trainer.latents()
    with pytest.raises(Refused, check=tells_of("vae/other.pt")):
        cache.cache_data_backend.write_batch(["vae/other.pt"], [np.ones(1)])


def test_no_cache_file_is_written(trainer):
    trainer.texts()
    trainer.latents()
    assert sorted(path.name for path in trainer.folder.iterdir()) == ["0.png", "1.png", "2.png", "store"]
