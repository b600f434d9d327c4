"""A data set that hands out a part of what is stored, and reads nothing of what it leaves out."""

import pickle

import numpy as np
import pytest

import cachestore as cs
from tests.fakes import asks_for
from tests.train.stores import FLUX, PLAIN, Row, make_store, recipes, stored_text
from tests.train.test_dataset import ROWS, batch_of, equal

pytestmark = pytest.mark.torch

ALWAYS = {"caption", "sample_id"}
SIZES = {"original_size", "crop_top_left", "target_size"}
SDXL_ALL = {"latents", "prompt_embeds", "pooled_prompt_embeds"}


def reads(data, monkeypatch):
    """The keys that are read from now on."""
    keys = []
    read = data._reader.get_raw
    monkeypatch.setattr(data._reader, "get_raw", lambda wanted: keys.extend(wanted) or read(wanted))
    return keys


def test_an_empty_data_set_has_its_fields_and_no_samples(path):
    data = cs.CachedDataset(make_store(path, [], recipes()), fields={"latents"})
    assert (len(data), data.fields, data.__getitems__([])) == (0, {"latents"}, [])


def test_by_default_every_output_is_handed_out(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    assert data.fields == SDXL_ALL
    assert set(batch_of(data, 0, 1)) == SDXL_ALL | SIZES | ALWAYS


def test_no_fields_are_captions_and_ids(path, monkeypatch):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()), fields=())
    keys = reads(data, monkeypatch)
    assert (set(batch_of(data, 0, 1)), keys) == (ALWAYS, [])
    assert equal(data.read_batch([0, 1]), batch_of(data, 0, 1))


def test_latents_alone_read_no_text_and_keep_everything_else_as_it_was(path, monkeypatch):
    whole = cs.CachedDataset(make_store(path, ROWS, recipes()))
    data = cs.CachedDataset(path, fields={"latents"})
    keys = reads(data, monkeypatch)
    batch = batch_of(data, 0, 1)
    assert len(keys) == 2
    assert set(batch) == {"latents"} | SIZES | ALWAYS
    assert equal(batch, {name: value for name, value in batch_of(whole, 0, 1).items() if name in batch})
    assert (data.buckets, data.digest, data.ids) == (whole.buckets, whole.digest, whole.ids)


def test_text_alone_keeps_the_buckets_of_the_pictures(path, monkeypatch):
    whole = cs.CachedDataset(make_store(path, ROWS, recipes()))
    data = cs.CachedDataset(path, fields=["prompt_embeds", "pooled_prompt_embeds"])
    keys = reads(data, monkeypatch)
    assert set(batch_of(data, 0, 1)) == {"prompt_embeds", "pooled_prompt_embeds"} | ALWAYS
    assert len(keys) == 2
    assert data.buckets == whole.buckets
    assert equal(data.prompt(""), whole.prompt(""))


def test_a_component_comes_as_it_is_stored_without_the_one_that_is_trained(path):
    made = recipes()
    data = cs.CachedDataset(make_store(path, ROWS, made), fields={"latents", "prompt_embeds.text_encoder_2", "pooled_prompt_embeds"})
    batch = batch_of(data, 0, 1)
    stored = [stored_text(made.text, caption)["prompt_embeds.text_encoder_2"] for caption in ("a photo", "a dog")]
    assert (batch["prompt_embeds.text_encoder_2"].numpy() == np.stack(stored)).all()
    assert "prompt_embeds" not in batch
    assert equal(data.read_batch([0, 1]), batch)


def test_masks_and_constants_come_with_what_they_belong_to_and_go_with_it(path):
    make_store(path, ROWS, recipes(PLAIN))
    assert cs.CachedDataset(path, fields={"latents"}).mask_name is None
    whole = cs.CachedDataset(path, fields={"prompt_embeds"})
    assert whole.mask_name in batch_of(whole, 0, 1)
    make_store(path, ROWS, recipes(FLUX), name="flux")
    assert "text_ids" in batch_of(cs.CachedDataset(path, "flux", fields={"prompt_embeds"}), 0, 1)
    assert "text_ids" not in batch_of(cs.CachedDataset(path, "flux", fields={"pooled_prompt_embeds"}), 0, 1)


def test_an_extra_column_may_have_the_name_of_an_output_that_is_left_out(path):
    make_store(path, [Row("a", extras='{"pooled_prompt_embeds": 7}')], recipes())
    assert cs.CachedDataset(path, fields={"latents"})[0]["pooled_prompt_embeds"] == 7


def test_an_unknown_field_is_an_error_that_names_the_known_ones(path):
    make_store(path, ROWS, recipes())
    known = "latents, pooled_prompt_embeds, prompt_embeds, prompt_embeds.text_encoder, prompt_embeds.text_encoder_2"
    with pytest.raises(cs.BadInput, check=asks_for("fields", known)):
        cs.CachedDataset(path, fields={"promt_embeds"})
    with pytest.raises(cs.BadInput, check=asks_for("fields")):
        cs.CachedDataset(path, fields="latents")


def test_embeddings_that_are_left_out_are_no_answer_to_a_prompt(path):
    with pytest.raises(cs.BadInput):
        cs.CachedDataset(make_store(path, ROWS, recipes()), fields={"latents"}).prompt("")


def test_a_form_of_latents_that_is_not_stored_does_not_matter_where_none_are_wanted(path):
    make_store(path, ROWS, recipes(stored="mean"))
    assert len(cs.CachedDataset(path, latents="moments", fields={"prompt_embeds"})) == 4


def test_a_pickled_data_set_keeps_its_fields(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()), fields={"latents"})
    assert set(batch_of(pickle.loads(pickle.dumps(data)), 0, 1)) == {"latents"} | SIZES | ALWAYS
