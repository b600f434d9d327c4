"""A probe or a model that fails is one failure, and the model is not loaded anew for each input."""

import shutil

import pytest
import torch
from PIL import Image

import cachestore as cs
import cachestore.encode.models.modules
import cachestore.encode.pictures.vae
import cachestore.encode.text.prompts
from cachestore.core.errors import BadInput
from tests.encode import tiny_families
from tests.fakes import raising

pytestmark = pytest.mark.torch


@pytest.fixture
def loads(monkeypatch):
    seen: list[str] = []
    load = cachestore.encode.models.modules.load_module

    def listed(component, dtype, device):
        seen.append(component.name)
        return load(component, dtype, device)

    for room in (cachestore.encode.text.prompts, cachestore.encode.pictures.vae):
        monkeypatch.setattr(room, "load_module", listed)
    return seen


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na bird on a tree\na fish\n")
    return tmp_path / "prompts.txt"


@pytest.fixture
def without_first_token(built, tmp_path):
    """CogView4 with a tokenizer that makes no token of the empty caption, of which its text encoder then makes nothing."""
    tiny_families.tiny.of_diffusers("CogView4Pipeline")
    folder = shutil.copytree(built("cogview4").folder, tmp_path / "model")
    shutil.rmtree(folder / "tokenizer")
    tiny_families.qwen_tokenizer("left").save_pretrained(folder / "tokenizer")
    index = (folder / "model_index.json").read_text()
    (folder / "model_index.json").write_text(index.replace(type(built("cogview4").pipeline.tokenizer).__name__, "Qwen2Tokenizer"))
    return folder


def precomputed(data, model, tmp_path, **options):
    return cs.precompute(data, model=model, store=tmp_path / "store", device="cpu", resolution=64, inline=True, **options)


def test_a_caption_of_the_probe_that_fails_fails_no_other_and_loads_nothing_again(without_first_token, prompts, tmp_path, loads, caplog):
    report = precomputed(prompts, without_first_token, tmp_path, encode=["text"])
    assert (report.encoded, report.failed, loads) == (4, 1, ["text_encoder"])
    assert report.failures[0]["sample"] == ""
    assert "CogView4Pipeline: the caption '' ends in " in caplog.text
    assert "captions are encoded one by one" in caplog.text


def test_a_model_that_encodes_no_caption_of_the_probe_is_one_error(built, prompts, tmp_path, loads, monkeypatch):
    monkeypatch.setattr(cachestore.encode.text.prompts, "_named", raising(RuntimeError("no kernel image is available")))
    with pytest.raises(BadInput):
        precomputed(prompts, built("sd15").folder, tmp_path, encode=["text"])
    assert loads == ["text_encoder"]


def test_captions_whose_batch_runs_out_of_memory_are_encoded_one_by_one(built, prompts, tmp_path, loads, monkeypatch):
    real = cachestore.encode.text.prompts._pipeline_call

    def small(*args):
        def call(payloads):
            if len(payloads) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return whole(payloads)

        whole = real(*args)
        return call

    monkeypatch.setattr(cachestore.encode.text.prompts, "_pipeline_call", small)
    report = precomputed(prompts, built("sd15").folder, tmp_path, encode=["text"])
    assert (report.encoded, report.failed, loads) == (5, 0, ["text_encoder"])


def test_a_model_that_does_not_fit_into_memory_is_one_error(built, prompts, tmp_path, loads, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")))
    with pytest.raises(BadInput):
        precomputed(prompts, built("sd15").folder, tmp_path, encode=["text"])
    assert loads == ["text_encoder"]


def test_a_vae_whose_probe_fails_is_loaded_once_and_tried_with_each_picture_alone(built, tmp_path, loads, monkeypatch):
    (tmp_path / "data").mkdir()
    for number in range(3):
        Image.effect_noise((64, 64), 30 + number).convert("RGB").save(tmp_path / "data" / f"{number}.png")
    real, calls = cachestore.encode.pictures.vae.Vae._encoded, []

    def failing_at_first(self, keys, pixels):
        calls.append(len(keys))
        if len(calls) == 1:
            raise RuntimeError("a transient fault")
        return real(self, keys, pixels)

    monkeypatch.setattr(cachestore.encode.pictures.vae.Vae, "_encoded", failing_at_first)
    report = precomputed(tmp_path / "data", built("sd15").folder, tmp_path, encode=["latents"])
    assert (report.encoded, report.failed, loads) == (3, 0, ["vae"])
    assert calls == [1, 1, 1, 1]
