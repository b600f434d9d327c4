"""Whether a model on disk is the one that made a data set: by its files, without an encoder."""

from dataclasses import replace

import pytest

import cachestore as cs
from cachestore.core.keys import digest_bytes
from cachestore.train.check import differing_files
from tests.fakes import asks_for, tells_of
from tests.train.stores import PLAIN, Recipes, Row, make_store, recipes

pytestmark = pytest.mark.torch

TEXT = {"text_encoder/config.json": b"{}", "text_encoder/model.safetensors": b"text", "tokenizer/vocab.json": b"words"}
VAE = {"vae/config.json": b"{1}", "vae/diffusion_pytorch_model.safetensors": b"vae"}


def made_of(text=TEXT, vae=VAE):
    """Recipes that were made with these files."""
    plain = recipes(PLAIN)
    named = [
        replace(recipe, make={**recipe.make, "files": {name: digest_bytes(content) for name, content in files.items()}})
        for recipe, files in ((plain.text, text), (plain.latents, vae))
    ]
    return Recipes(*named)


@pytest.fixture
def model(tmp_path):
    for name, content in {**TEXT, **VAE}.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


@pytest.fixture
def path(tmp_path):
    return make_store(tmp_path / "store", [Row("a")], made_of())


def test_no_recipes_differ_in_nothing(model):
    assert differing_files({}, model=model) == []


def test_the_model_that_made_it_passes(path, model):
    cs.CachedDataset(path).check(model=model)
    cs.CachedDataset(path).check(str(model))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("vae/diffusion_pytorch_model.safetensors", b"VAE", r"diffusion_pytorch_model.safetensors \(latents\) has other contents"),
        ("tokenizer/vocab.json", b"Words", r"vocab.json \(text\) has other contents"),
        ("text_encoder/config.json", None, r"text_encoder/config.json \(text\) is missing"),
    ],
)
def test_a_file_that_differs_or_is_missing_is_named(path, model, name, content, says):
    data = cs.CachedDataset(path)
    data.check(model)
    (model / name).unlink() if content is None else (model / name).write_bytes(content)
    with pytest.raises(cs.RecipeMismatch, match=says) as refused:
        data.check(model)
    assert "--replace" in str(refused.value)
    assert str(refused.value).count("other contents") + str(refused.value).count("missing") == 1


def test_what_is_not_handed_out_is_not_compared(path, model):
    (model / "tokenizer/vocab.json").write_bytes(b"trained meanwhile")
    cs.CachedDataset(path, fields={"latents"}).check(model)
    with pytest.raises(cs.RecipeMismatch):
        cs.CachedDataset(path, fields={"prompt_embeds"}).check(model)


def test_a_vae_and_a_text_encoder_of_their_own_are_looked_at_first(path, model, tmp_path):
    vae = (model / "vae").rename(tmp_path / "another vae")
    encoder = (model / "text_encoder").rename(tmp_path / "another encoder")
    data = cs.CachedDataset(path)
    with pytest.raises(cs.RecipeMismatch):
        data.check(model)
    data.check(model, vae=vae, text_encoder=encoder)
    (vae / "config.json").write_bytes(b"{2}")
    with pytest.raises(cs.RecipeMismatch, check=tells_of(vae)):
        data.check(model, vae=vae, text_encoder=encoder)


def test_a_text_encoder_that_stands_alone_has_its_files_in_its_folder(tmp_path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/config.json").write_bytes(b"{}")
    data = cs.CachedDataset(make_store(tmp_path / "store", [Row("a")], made_of(text={"config.json": b"{}"})), fields={"prompt_embeds"})
    data.check(model=tmp_path / "encoder")
    data.check(text_encoder=tmp_path / "encoder")


def test_many_files_are_named_up_to_a_few(tmp_path):
    files = {f"text_encoder/model-{n}.safetensors": b"?" for n in range(20)}
    data = cs.CachedDataset(make_store(tmp_path / "store", [Row("a")], made_of(text=files)))
    with pytest.raises(cs.RecipeMismatch) as refused:
        data.check(model=tmp_path)
    assert str(refused.value).count("is missing") == 5


def test_nothing_to_compare_with_is_reported(path, model, tmp_path):
    with pytest.raises(cs.BadInput, check=tells_of("some/model-on-the-hub", "snapshot_download")):
        cs.CachedDataset(path).check(model="some/model-on-the-hub")
    with pytest.raises(cs.BadInput, check=asks_for("model")):
        cs.CachedDataset(path).check()
    with pytest.raises(cs.BadInput):
        cs.CachedDataset(make_store(tmp_path / "other", [Row("a")], recipes())).check(model)
