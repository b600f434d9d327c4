"""Code that lies in a model's folder never runs, though its settings name it and somebody at the terminal says yes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cachestore.core.errors import BadInput
from cachestore.encode.models import folders as models
from cachestore.encode.models.modules import load_image_processor, load_module, load_processor, load_tokenizer

pytestmark = pytest.mark.torch

MAPPED = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", None],
    "AutoImageProcessor": "evil.Images",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a model whose classes are in its own `evil.py`; whoever is asked whether to run that says yes."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    code = f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\nclass Images: pass\n"
    (folder / "evil.py").write_text(code)
    settings = json.dumps({"model_type": "evil", "auto_map": MAPPED, "architectures": ["Model"], "image_processor_type": "Images"})
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        (folder / name).write_text(settings)
    (folder / "vocab.txt").write_text("a\n")
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    monkeypatch.setattr("builtins.input", lambda *_prompt: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def part(folder, kind, name, class_name):
    return {
        "tokenizer": lambda: models.tokenizer(name, folder, "transformers", class_name),
        "processor": lambda: models.processor(name, folder, "transformers", class_name),
        "images": lambda: models.image_processor(name, folder, "transformers", class_name),
        "module": lambda: models.module(name, folder, "transformers", class_name, None),
    }[kind]()


@pytest.mark.parametrize(
    ("load", "kind", "name", "class_name"),
    [
        (load_tokenizer, "tokenizer", "tokenizer", "AutoTokenizer"),
        (load_tokenizer, "processor", "processor", "EvilProcessor"),
        pytest.param(load_processor, "processor", "processor", "Qwen2VLProcessor", marks=pytest.mark.slow),
        (load_image_processor, "images", "image_processor", "AutoImageProcessor"),
        (lambda part: load_module(part, "float32", torch.device("cpu")), "module", "text_encoder", "AutoModel"),
        (lambda part: load_module(part, "float32", torch.device("cpu")), "module", "text_encoder", "AutoModelForCausalLM"),
    ],
)
def test_no_loader_runs_code_of_the_folder(folder, load, kind, name, class_name):
    with pytest.raises(BadInput):
        load(part(folder, kind, name, class_name))
    assert not Path(folder.parent / "marker").exists()


def test_a_model_that_names_a_library_of_its_own_is_refused(folder):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": ["evil", "Pipeline"], "vae": ["evil", "Model"]}))
    with pytest.raises(BadInput):
        models.component_class(models.Model(folder, "pipeline", "Pipeline", json.loads((folder / "model_index.json").read_text())), "vae")
    assert not (folder.parent / "marker").exists()
