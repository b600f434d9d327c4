"""Model folders: which files are found, and what is said where some are missing."""

import json
import os

import pytest

from cachestore.core.errors import BadInput
from cachestore.encode.models import folders as models
from cachestore.encode.models.folders import MissingFile
from tests.encode import tiny
from tests.fakes import tells_of


def names(component):
    return sorted(component.files)


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(MissingFile):
        models.read_model(tmp_path)


def test_folders_are_recognised(tmp_path):
    pipeline = models.read_model(tiny.look_alike(tmp_path / "pipeline"))
    text = models.read_model(tiny.look_alike_text(tmp_path / "text"))
    vae = models.read_model(tiny.look_alike_vae(tmp_path / "vae"))
    assert (pipeline.kind, pipeline.class_name) == ("pipeline", "StableDiffusionPipeline")
    assert (text.kind, text.class_name) == ("text", "BertModel")
    assert (vae.kind, vae.class_name) == ("vae", "AutoencoderKL")


@pytest.mark.parametrize("content", ["", "[]", "not json", "\x00"])
@pytest.mark.parametrize("name", ["model_index.json", "config.json"])
def test_a_damaged_description_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, check=tells_of(tmp_path / name)):
        models.read_model(tmp_path)


def test_a_description_of_nothing_known_is_refused(tmp_path):
    tiny.write(tmp_path / "config.json", {"name": "something else"})
    with pytest.raises(BadInput):
        models.read_model(tmp_path)
    tiny.write(tmp_path / "model_index.json", {"_class_name": ["my_pipeline", "MyPipeline"]})
    with pytest.raises(BadInput):
        models.read_model(tmp_path)


def test_a_components_files_are_its_config_and_its_weights(tmp_path):
    model = models.read_model(tiny.look_alike(tmp_path))
    tiny.write(tmp_path / "text_encoder" / "notes.json", {})
    assert names(model.component("text_encoder", None)) == ["config.json", "model.safetensors"]
    assert names(model.component("vae", None)) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert names(model.component("tokenizer", None)) == ["merges.txt", "tokenizer_config.json", "vocab.json"]


@pytest.mark.parametrize("entry", [None, [None, None], "text_encoder"])
def test_a_component_that_the_pipeline_lacks_is_named(tmp_path, entry):
    tiny.look_alike(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    tiny.write(tmp_path / "model_index.json", {**index, "text_encoder": entry})
    with pytest.raises(BadInput):
        models.read_model(tmp_path).component("text_encoder", None)


def test_a_component_with_code_of_its_own_is_refused(tmp_path):
    tiny.look_alike(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    tiny.write(tmp_path / "model_index.json", {**index, "text_encoder": ["my_encoder", "MyEncoder"]})
    with pytest.raises(BadInput):
        models.read_model(tmp_path).component("text_encoder", None)


def test_missing_files_are_named(tmp_path):
    def encoder():
        return models.module("text_encoder", tmp_path, "transformers", "BertModel", None)

    with pytest.raises(MissingFile):
        models.module("vae", tmp_path / "vae", "diffusers", "AutoencoderKL", None)
    with pytest.raises(MissingFile):
        encoder()
    tiny.write(tmp_path / "config.json", {})
    with pytest.raises(MissingFile):
        encoder()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadInput):
        encoder()
    with pytest.raises(MissingFile):
        models.tokenizer("tokenizer", tmp_path, "transformers", "AutoTokenizer")


def test_an_adapter_is_refused_as_its_weights_would_be_mixed_in(tmp_path):
    tiny.look_alike_text(tmp_path)
    tiny.write(tmp_path / "adapter_config.json", {})
    with pytest.raises(BadInput):
        models.module("text_encoder", tmp_path, "transformers", "BertModel", None)


def shards(folder, stem, *, part=""):
    tiny.write(folder / "config.json", {})
    files = [f"{stem}{part}-0000{index}-of-00002.safetensors" for index in (1, 2)]
    for file in files:
        tiny.write(folder / file, "weights")
    index = f"{stem}.safetensors.index{part}.json"
    tiny.write(folder / index, {"weight_map": {"a": files[0], "b": files[1], "c": files[0]}})
    return [index, *files]


def test_of_sharded_weights_the_index_and_its_shards_are_listed(tmp_path):
    files = shards(tmp_path, "model")
    component = models.module("text_encoder", tmp_path, "transformers", "BertModel", None)
    assert names(component) == sorted(["config.json", *files])
    (tmp_path / files[1]).unlink()
    with pytest.raises(MissingFile):
        models.module("text_encoder", tmp_path, "transformers", "BertModel", None)
    tiny.write(tmp_path / files[0], {})
    with pytest.raises(BadInput):
        models.module("text_encoder", tmp_path, "transformers", "BertModel", None)


@pytest.mark.parametrize(("library", "stem", "sharded"), [("transformers", "model", False), ("diffusers", "diffusion_pytorch_model", True)])
def test_where_shards_and_a_single_file_stand_together_the_librarys_choice_is_listed(tmp_path, library, stem, sharded):
    files = shards(tmp_path, stem)
    tiny.write(tmp_path / f"{stem}.safetensors", "weights")
    expected = files if sharded else [f"{stem}.safetensors"]
    assert names(models.module("m", tmp_path, library, "Class", None)) == sorted(["config.json", *expected])


def test_a_variant_is_taken_where_a_component_has_it(tmp_path):
    tiny.look_alike_text(tmp_path / "one")
    tiny.write(tmp_path / "one" / "model.fp16.safetensors", "half")
    files = shards(tmp_path / "two", "model", part=".fp16")
    one = models.module("text_encoder", tmp_path / "one", "transformers", "BertModel", "fp16")
    two = models.module("text_encoder", tmp_path / "two", "transformers", "BertModel", "fp16")
    other = models.module("text_encoder", tmp_path / "one", "transformers", "BertModel", "bf16")
    assert (names(one), one.variant) == (["config.json", "model.fp16.safetensors"], "fp16")
    assert (names(two), two.variant) == (sorted(["config.json", *files]), "fp16")
    assert (names(other), other.variant) == (["config.json", "model.safetensors"], None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
@pytest.mark.parametrize("name", ["tokenizer/vocab.json", "text_encoder/config.json", "text_encoder/generation_config.json", "vae/notes"])
@pytest.mark.parametrize("trap", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
def test_a_component_whose_folder_has_a_fifo_or_a_device_is_refused_before_a_library_waits_for_it(tmp_path, name, trap):
    model = models.read_model(tiny.look_alike(tmp_path))
    (tmp_path / name).unlink(missing_ok=True)
    trap(tmp_path / name)
    with pytest.raises(BadInput, check=tells_of(tmp_path / name)):
        model.component(name.partition("/")[0], None)
