"""The lines of `docs/datasets.md`, run where a store of a few samples stands."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import cachestore as cs
from cachestore.files.paths import Layout
from cachestore.sources.prompts import read_prompts
from tests import pages
from tests.fakes import publish_catalog
from tests.train.stores import Row, catalog_of, make_store, recipes_of_model

pytestmark = pytest.mark.torch

ROWS = [Row("cat.png", ("a, b, c",)), Row("dog.png", ("d",)), *(Row(f"{n}.png", (f"caption {n}",)) for n in range(110))]


def lines():
    return {title: some for title, [some] in pages.python_by_title("datasets.md").items()}


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the lines suppose: a store in this folder, and the model that it was made with."""
    monkeypatch.chdir(tmp_path)
    made = recipes_of_model(tmp_path / "path/of/the/model")
    make_store(tmp_path / "cache", ROWS, made)
    photos = cs.CachedDataset("cache/")
    return {"cs": cs, "made": made, "photos": photos, "drawings": photos.select([0, 1])}


def test_the_page_has_lines_for_each_of_these():
    assert list(lines()) == [
        "What a batch holds",
        "Captions",
        "Prompts for validation",
        "A part of what is stored",
        "Several data sets",
        "Resolutions, crops and mirrored pictures",
        "Inside a script that has a Hugging Face data set",
    ]


def test_the_lines_on_what_a_batch_holds_print_a_feature(names, capsys):
    exec(lines()["What a batch holds"], names)
    assert capsys.readouterr().out == "Feature(? [?, 4, ?, ?])\n"


def test_the_lines_on_captions_encode_and_choose(names, monkeypatch):
    def precompute(_data, *, model, store, captions):
        rows = [replace(row, captions=captions.texts(row.captions)) for row in ROWS]
        make_store(Path(store), rows, names["made"])
        catalog = replace(catalog_of(rows, names["made"], "train"), texts=captions.encoding())
        return SimpleNamespace(generation=publish_catalog(Layout(Path(store).absolute()), catalog)[0])

    monkeypatch.setattr(cs, "precompute", precompute)
    exec(lines()["Captions"], names)
    assert names["data"][0]["caption"] in {"", *names["captions"].texts(["a, b, c"])}


def test_the_lines_on_prompts_find_embeddings_of_each(names, monkeypatch, tmp_path):
    text = pages.text_of("datasets.md").partition("## Prompts for validation")[2]
    (tmp_path / "validation.txt").write_text(text.partition("```\n# validation.txt")[2].partition("\n")[2].partition("```")[0])

    def precompute(_data, *, model, store, prompts):
        pairs = read_prompts(tmp_path / prompts)
        make_store(tmp_path / store, ROWS, names["made"], prompts=[text for pair in pairs for text in pair])
        catalog = replace(catalog_of(ROWS, names["made"], "train"), prompts=pairs)
        return SimpleNamespace(generation=publish_catalog(Layout(Path(store).absolute()), catalog)[0])

    monkeypatch.setattr(cs, "precompute", precompute)
    exec(lines()["Prompts for validation"], names)
    assert names["data"].prompts == (("a photo of a cat on a mat", "blurry, low quality"), ("a photo of a dog", ""))
    assert names["positive_embeds"].keys() == names["negative_embeds"].keys()


def test_the_lines_on_parts_hand_out_parts(names):
    exec(lines()["A part of what is stored"], names)
    assert (len(names["train"]), list(names["held_out"].ids)) == (12, ["cat.png", "dog.png"])


def test_the_lines_on_several_data_sets_make_batches_of_all(names):
    exec(lines()["Several data sets"], names)
    assert len(names["mixed"]) == 117
    assert sum(len(batch["sample_id"]) for batch in names["loader"]) == 112


@pytest.mark.processes
@pytest.mark.skipif(find_spec("datasets") is None, reason="Hugging Face datasets is not installed")
def test_the_lines_on_a_data_set_of_hugging_face_read_its_rows(names):
    from datasets import Dataset
    from torch.utils.data import DataLoader

    data = cs.CachedDataset("cache/")
    names |= {
        "data": data,
        "photos_of_the_hub": Dataset.from_dict({"file_name": ["dog.png", "cat.png", "7.png"]}),
        "DataLoader": DataLoader,
    }
    exec(lines()["Inside a script that has a Hugging Face data set"], names)
    first, second = names["loader"]
    assert (first["sample_id"], second["sample_id"]) == (["dog.png", "cat.png"], ["7.png"])
    assert first["latents"].equal(data.read_batch([data.index("dog.png"), data.index("cat.png")])["latents"])
