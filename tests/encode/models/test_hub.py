"""From a name to a folder: paths, the hub's cache, and downloads. Nothing here goes to a network."""

from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from cachestore.core.errors import BadInput
from cachestore.encode.models.folders import MissingFile
from cachestore.encode.models.hub import files_to_fetch, is_here, with_folder
from tests.fakes import raising

FLUX = [
    "README.md",
    "flux1-dev.safetensors",
    "ae.safetensors",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder_2/config.json",
    "text_encoder_2/model-00001-of-00002.safetensors",
    "text_encoder_2/model-00002-of-00002.safetensors",
    "text_encoder_2/model.safetensors.index.json",
    "tokenizer/vocab.json",
    "tokenizer_2/spiece.model",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]


def fetch(name, read, **options):
    arguments: Any = {"encode": ["text", "latents"], "revision": None, "variant": None, **options}
    return with_folder(name, read, **arguments)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one model; `hub.asked` are the patterns of the downloads."""

    class Hub:
        cached = None
        asked: list = []

        def snapshot(self, name, *, revision=None, local_files_only=False, allow_patterns=None):
            if local_files_only:
                if self.cached is None:
                    raise LocalEntryNotFoundError("not cached")
                return str(self.cached)
            self.asked.append(allow_patterns)
            (tmp_path / "fetched").mkdir(exist_ok=True)
            return str(tmp_path / "fetched")

        def info(self, name):
            if name == "no/such-model":
                raise HfHubHTTPError(f"404: there is no {name}", response=SimpleNamespace(headers={}, request=None))  # pyright: ignore[reportArgumentType]
            if name != "black-forest-labs/FLUX.1-dev":
                raise ConnectionError(f"no route to {name}")

    made = Hub()
    made.asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda _api, name, revision=None, timeout=None: made.info(name))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _api, name, revision=None: FLUX)
    return made


def test_nothing_is_fetched_of_an_empty_listing():
    assert files_to_fetch([], ["text"], None) == []


def test_the_denoiser_pickles_and_single_file_checkpoints_are_never_fetched():
    wanted = files_to_fetch(FLUX, ["text", "latents"], None)
    assert [name for name in wanted if name.startswith(("transformer/", "scheduler/"))] == ["transformer/config.json"]
    assert not [name for name in wanted if name.endswith(".bin")]
    assert not {"flux1-dev.safetensors", "ae.safetensors", "README.md"} & set(wanted)
    assert {"model_index.json", "text_encoder_2/model-00002-of-00002.safetensors", "tokenizer_2/spiece.model", "vae/config.json"} <= set(
        wanted
    )


def test_only_the_wanted_parts_are_fetched():
    configs = ["model_index.json", "transformer/config.json", "vae/config.json"]  # which tell what else the denoiser takes
    assert files_to_fetch(FLUX, ["latents"], None) == [*configs, "vae/diffusion_pytorch_model.safetensors"]
    assert [name for name in files_to_fetch(FLUX, ["text"], None) if name.startswith("vae")] == ["vae/config.json"]


def test_a_processor_is_fetched_with_the_text_encoder_that_it_prepares_pictures_for():
    names = ["model_index.json", "processor/preprocessor_config.json", "processor/vocab.json", "text_encoder/config.json"]
    assert files_to_fetch(names, ["text"], None) == names
    assert files_to_fetch(names, ["latents"], None) == ["model_index.json"]


def test_one_variant_of_the_weights_is_fetched():
    plain, half = (files_to_fetch(FLUX, ["text"], variant) for variant in (None, "fp16"))
    assert "text_encoder/model.safetensors" in plain
    assert "text_encoder/model.fp16.safetensors" not in plain
    assert "text_encoder/model.fp16.safetensors" in half
    assert "text_encoder/model.safetensors" not in half
    assert "text_encoder_2/model-00001-of-00002.safetensors" in half


def test_of_a_flat_model_only_the_files_at_its_top_are_fetched():
    names = [
        "config.json",
        "model.safetensors",
        "onnx/model.onnx",
        "tokenizer.json",
        "vocab.txt",
        "1_Pooling/config.json",
        "pytorch_model.bin",
    ]
    assert files_to_fetch(names, ["text"], None) == ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]


def test_a_folder_is_used_as_it_is(tmp_path, hub):
    assert fetch(str(tmp_path), lambda folder: folder) == tmp_path
    assert hub.asked == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "~/no-such-model", "a/b/c", "two words"])
def test_a_missing_path_is_named_and_not_looked_up(hub, name):
    with pytest.raises(BadInput):
        fetch(name, pytest.fail)
    assert hub.asked == []


def test_a_file_is_no_model(tmp_path, hub):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.ckpt").touch()
    with pytest.raises(BadInput):
        fetch(str(tmp_path / "model.safetensors"), pytest.fail)
    with pytest.raises(BadInput):
        fetch(str(tmp_path / "model.ckpt"), pytest.fail)


def test_a_cached_model_is_used_without_asking_the_hub(tmp_path, hub):
    hub.cached = tmp_path
    assert fetch("black-forest-labs/FLUX.1-dev", lambda folder: folder) == tmp_path
    assert hub.asked == []


def test_a_model_that_is_not_cached_is_downloaded(tmp_path, hub):
    assert fetch("black-forest-labs/FLUX.1-dev", lambda folder: folder) == tmp_path / "fetched"
    assert hub.asked == [files_to_fetch(FLUX, ["text", "latents"], None)]


def test_what_a_cached_model_lacks_is_downloaded(tmp_path, hub):
    hub.cached = tmp_path / "cached"

    def read(folder):
        if folder == hub.cached:
            raise MissingFile("vae is missing")
        return folder

    assert fetch("black-forest-labs/FLUX.1-dev", read) == tmp_path / "fetched"
    assert len(hub.asked) == 1


def test_another_error_of_a_cached_model_is_not_hidden_by_a_download(tmp_path, hub):
    hub.cached = tmp_path
    with pytest.raises(BadInput):
        fetch("black-forest-labs/FLUX.1-dev", raising(BadInput("unknown pipeline")))
    assert hub.asked == []


def test_a_model_that_cannot_be_had_is_bad_input_with_the_hubs_reason(hub):
    with pytest.raises(BadInput):
        fetch("no/such-model", pytest.fail)


def test_a_hub_that_cannot_be_reached_is_reported_at_once(hub, monkeypatch):
    """Listing files would be tried for 24 s."""
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_arguments, **_options: pytest.fail("asked again"))
    with pytest.raises(BadInput):
        fetch("nobody/nothing", pytest.fail)


def test_a_name_in_a_folder_that_is_here_is_a_misspelt_path_unless_it_is_cached(hub, tmp_path, monkeypatch):
    (tmp_path / "black-forest-labs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput):
        fetch("black-forest-labs/FLUX.1-dev", pytest.fail)
    assert hub.asked == []
    assert is_here("black-forest-labs/FLUX.1-dev", None)
    hub.cached = tmp_path
    assert fetch("black-forest-labs/FLUX.1-dev", lambda folder: folder) == tmp_path
