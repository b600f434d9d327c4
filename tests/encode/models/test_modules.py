"""Giving back what was loaded."""

import weakref
from typing import Any

import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.encode.models import modules
from cachestore.encode.models.folders import Component
from tests.encode.encoders import batch_for, encoder_of
from tests.encode.tiny import of_diffusers

pytestmark = pytest.mark.torch


def loaded(folder):
    vae = of_diffusers("AutoencoderKL")(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1)
    vae.save_pretrained(folder)
    return modules.load_module(Component("vae", "diffusers", "AutoencoderKL", folder, {}), "float32", torch.device("cpu"))


class TestFreeingMemory:
    def test_nothing_loaded_is_nothing_to_free(self):
        modules.free_memory()

    @pytest.mark.parametrize("holds_itself", [False, True])
    def test_a_module_that_nobody_holds_is_gone_at_once(self, tmp_path, holds_itself):
        module = loaded(tmp_path)
        module.itself = [module] if holds_itself else []
        left = weakref.ref(module)
        del module
        modules.free_memory()
        assert left() is None

    def test_a_module_that_is_still_in_use_stays(self, tmp_path):
        module = loaded(tmp_path)
        modules.free_memory()
        assert next(module.parameters()).numel() > 0


def test_language_models_keep_no_cache_while_captions_are_encoded_and_do_so_again_afterwards(built, digest):
    encoder = encoder_of(built("lumina2"), digest, "text")
    batch = batch_for(encoder, ["a cat"])
    encoder.submit(batch)()
    model, kept = encoder._modules._modules[0], []
    model.register_forward_hook(lambda _model, _given, made: kept.append(made.past_key_values))
    encoder.submit(batch)()
    assert kept == [None]
    assert model.config.use_cache
    with pytest.raises(EncodeFailed), modules.without_cache(modules.caching_configs([model, model])):
        raise EncodeFailed("broken")
    assert model.config.use_cache
    assert modules.caching_configs([]) == []


def test_a_gpu_that_is_not_there_is_refused_with_what_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput):
        modules.choose_device("cuda:1")


def test_models_go_to_the_device_that_was_asked_for_and_batches_are_on_the_cpu(built, tmp_path, monkeypatch):
    """`cpu:0` stands for a second GPU: torch takes it as another device than `cpu`, on which nobody else puts a model here."""
    moved = set[str]()
    real = torch.nn.Module.to

    def to(module: Any, *places: Any, **more: Any):
        moved.update({type(module).__name__} if torch.device("cpu:0") in places else ())
        return real(module, *places, **more)

    def chosen(asked):
        assert asked == "cuda:1"
        return torch.device("cpu:0")

    monkeypatch.setattr(torch.nn.Module, "to", to)
    monkeypatch.setattr(modules, "choose_device", chosen)
    few = [cs.Sample(str(n), {"image": Image.new("RGB", (64, 64), (n, 90, 200))}, (f"photo {n}",)) for n in range(3)]
    data = cs.ReadThrough.of(str(built("sdxl").folder), store=tmp_path / "store", resolution=64, device="cuda:1").open(few)
    batches = list(cs.make_loader(data, batch_size=3))
    assert moved >= {"CLIPTextModel", "CLIPTextModelWithProjection", "AutoencoderKL"}
    assert {value.device for batch in batches for value in batch.values() if isinstance(value, torch.Tensor)} == {torch.device("cpu")}
