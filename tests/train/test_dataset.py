"""The data set that a trainer reads: what it holds, what a batch looks like, and that it survives every way of starting workers."""

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import cachestore as cs
import cachestore.files.table
from cachestore.core.keys import Recipe
from cachestore.core.read_block import LatentsBlock, parse_latents
from cachestore.files.opening import read_at
from cachestore.train.epoch import Epoch
from cachestore.train.latents import noise_seed, read_latents
from tests.fakes import asks_for, tells_of
from tests.shares import share
from tests.train.stores import (
    FLUX,
    LENGTH,
    PLAIN,
    Recipes,
    Row,
    caption_key,
    control_of,
    make_store,
    recipes,
    stored_latents,
    stored_text,
)

pytestmark = [
    pytest.mark.torch,
    # Python 3.12 and later warn of any fork beside torch's own threads; that it works is what is tested here.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

ROWS = [Row("a.png", ("a photo",)), Row("b.png", ("a dog",)), Row("c.png", ("two cats",), bucket=(48, 64)), Row("d.png", ("a photo",))]


def loader(data, **options):
    return DataLoader(data, collate_fn=data.collate, **options)


def batch_of(data, *indices):
    return data.collate(data.__getitems__(indices))


def samples_of(data):
    return [data[index] for index in range(len(data))]


def equal(one, other):
    same = {
        name: torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name] for name, value in one.items()
    }
    return list(one) == list(other) and all(same.values())


# What it holds


@pytest.mark.parametrize(
    "made", [recipes(), recipes(family=None), recipes(stored=None), Recipes()], ids=["both", "latents", "text", "neither"]
)
def test_an_empty_data_set_has_no_samples_no_buckets_and_no_batches(path, made):
    data = cs.CachedDataset(make_store(path, [], made))
    assert (len(data), samples_of(data), list(data.ids), dict(data.buckets), data.__getitems__([])) == (0, [], [], {}, [])
    for make in (cs.BucketBatchSampler, cs.make_loader):
        with pytest.raises(cs.BadInput):
            make(data)


def test_a_sample_holds_everything_by_diffusers_names_without_a_batch_axis(path):
    sample = cs.CachedDataset(make_store(path, ROWS, recipes()), latents="mean")[0]
    assert {name: list(value.shape) for name, value in sample.items() if hasattr(value, "shape")} == {
        "latents": [4, 6, 8],
        "prompt_embeds": [LENGTH, 9],
        "pooled_prompt_embeds": [5],
        "original_size": [2],
        "crop_top_left": [2],
        "target_size": [2],
    }
    assert (sample["caption"], sample["sample_id"]) == ("a photo", "a.png")


def test_components_are_joined_in_order_when_they_are_read(path):
    made = recipes()
    data = cs.CachedDataset(make_store(path, ROWS, made))
    stored = stored_text(made.text, "a dog")
    joined = np.concatenate([stored["prompt_embeds.text_encoder"], stored["prompt_embeds.text_encoder_2"]], axis=-1)
    assert (data[1]["prompt_embeds"].numpy() == joined).all()
    assert (data[1]["pooled_prompt_embeds"].numpy() == stored["pooled_prompt_embeds"]).all()


def test_sizes_are_height_and_width_so_that_concatenated_they_are_the_time_ids_of_sdxl(path):
    rows = [Row("a", size=(1200, 800), crop=(30, 20, 94, 68)), Row("b", size=(90, 80))]
    batch = batch_of(cs.CachedDataset(make_store(path, rows, recipes())), 0, 1)
    time_ids = torch.cat([batch["original_size"], batch["crop_top_left"], batch["target_size"]], dim=1)
    assert time_ids.tolist() == [[800, 1200, 20, 30, 48, 64], [80, 90, 2, 3, 48, 64]]
    assert time_ids.dtype == torch.int64


def test_every_tensor_of_a_batch_is_contiguous_and_writable_and_everything_else_is_a_list(path):
    for name, value in batch_of(cs.CachedDataset(make_store(path, ROWS, recipes(FLUX)), io="mmap"), 0, 1, 3, 3).items():
        if not isinstance(value, torch.Tensor):
            assert isinstance(value, list)
            continue
        assert value.is_contiguous(), name
        assert len(value) == (LENGTH if name == "text_ids" else 4), name
        value.add_(1)


def test_constants_of_the_family_are_made_for_the_batch(path):
    batch = batch_of(cs.CachedDataset(make_store(path, ROWS, recipes(FLUX), dtype=np.float16)), 0, 1)
    assert (list(batch["text_ids"].shape), batch["text_ids"].dtype) == ([LENGTH, 3], batch["prompt_embeds"].dtype)
    assert not batch["text_ids"].any()


def test_text_of_different_lengths_is_padded_and_its_mask_has_the_pipelines_name(path):
    rows = [Row("a", ("12345",)), Row("b", ("",)), Row("c", ("123",))]
    made = recipes(PLAIN, stored=None)
    data = cs.CachedDataset(make_store(path, rows, made))
    batch = batch_of(data, 0, 1, 2)
    assert data.mask_name == "prompt_attention_mask"
    assert batch[data.mask_name].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert (batch["prompt_embeds"][2, :3].numpy() == stored_text(made.text, "123")["prompt_embeds"]).all()
    assert not batch["prompt_embeds"][2, 3:].any()
    assert not batch["prompt_embeds"][1].any()


def test_a_data_set_of_prompts_alone_has_one_bucket_and_no_latents(path):
    data = cs.CachedDataset(make_store(path, [Row("p", ("a",), bucket=None), Row("q", ("b",), bucket=None)], recipes(stored=None)))
    assert data.buckets == {(): [0, 1]}
    assert sorted(batch_of(data, 0, 1)) == ["caption", "pooled_prompt_embeds", "prompt_embeds", "sample_id"]


def test_a_data_set_of_latents_alone_has_captions_and_no_embeddings(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(family=None)))
    assert data.buckets == {(48, 64): [2], (64, 48): [0, 1, 3]}
    assert sorted(data[0]) == ["caption", "crop_top_left", "latents", "original_size", "sample_id", "target_size"]
    assert data.mask_name is None
    with pytest.raises(cs.BadInput):
        data.prompt("")


def test_samples_with_and_without_a_picture_are_in_different_buckets(path):
    data = cs.CachedDataset(make_store(path, [Row("a"), Row("prompt", bucket=None)], recipes()))
    assert data.buckets == {(): [1], (64, 48): [0]}
    with pytest.raises(cs.BadInput, check=tells_of("'a'", "'prompt'", "BucketBatchSampler")):
        batch_of(data, 0, 1)
    assert "latents" not in batch_of(data, 1)


def test_a_sample_that_an_encoder_failed_for_is_left_out(path):
    data = cs.CachedDataset(make_store(path, [Row("a"), Row("broken", fails=True), Row("c", bucket=(48, 64))], recipes()))
    assert (len(data), list(data.ids), data.buckets) == (2, ["a", "c"], {(64, 48): [0], (48, 64): [1]})
    assert (data[1]["sample_id"], data[-1]["sample_id"], data.index("c")) == ("c", "c", 1)
    with pytest.raises(cs.MissingEntry, check=tells_of("`cachestore why ", " broken`")):
        data.index("broken")
    with pytest.raises(cs.BadInput, check=tells_of("'z'")):
        data.index("z")
    with pytest.raises(IndexError):
        data[2]


def test_of_several_captions_the_first_is_handed_out_with_its_own_embeddings(path):
    made = recipes(PLAIN)
    data = cs.CachedDataset(make_store(path, [Row("a", ("one", "second")), Row("b", ("three", "four"))], made))
    assert batch_of(data, 0, 1)["caption"] == ["one", "three"]
    assert (data[1]["prompt_embeds"].numpy() == stored_text(made.text, "three")["prompt_embeds"]).all()


def test_pictures_of_unknown_size_are_in_one_bucket_and_fit_together_only_where_their_latents_do(path):
    rows = [Row("a", is_measured=False), Row("b", is_measured=False), Row("c", bucket=(48, 64), is_measured=False)]
    data = cs.CachedDataset(make_store(path, rows, recipes()))
    assert data.buckets == {(): [0, 1, 2]}
    assert "target_size" not in batch_of(data, 0, 1)
    with pytest.raises(cs.BadInput, check=tells_of("'a'", [4, 6, 8], "'c'", [4, 8, 6])):
        batch_of(data, 0, 2)


def test_extra_columns_come_out_as_lists_with_none_where_a_sample_has_no_such_column(path):
    rows = [Row("a", extras='{"score": 3, "tags": ["x"]}'), Row("b", extras='{"score": 4}')]
    batch = batch_of(cs.CachedDataset(make_store(path, rows, recipes())), 0, 1)
    assert (batch["score"], batch["tags"]) == ([3, 4], [["x"], None])


@pytest.mark.parametrize("name", ["latents", "target_size", "text_ids", "sample_id"])
def test_an_extra_column_under_a_name_of_the_batch_is_an_error_that_names_both(path, name):
    data = cs.CachedDataset(make_store(path, [Row("a", extras=f'{{"{name}": 1}}')], recipes(FLUX)))
    with pytest.raises(cs.BadInput, check=tells_of("'a'", f"'{name}'")):
        data[0]


def test_recipes_are_named_by_their_encoder(path):
    made = recipes()
    assert dict(cs.CachedDataset(make_store(path, ROWS, made)).recipes) == {"text": made.text, "latents": made.latents}


# Latents


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "vae", [{"shift_factor": None}, {}, {"latents_mean": [1, 2, 3, 4.5], "latents_std": [2, 3, 4, 5]}], ids=["scale", "shift", "channels"]
)
def test_a_drawn_sample_equals_what_diffusers_own_training_scripts_compute_from_the_same_noise(path, dtype, vae):
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    recipe = recipes(**vae).latents
    moments = torch.from_numpy(stored_latents(recipe, "a", (64, 48))["moments"]).to(getattr(torch, dtype)) * 9
    drawn = DiagonalGaussianDistribution(moments[None]).sample(generator=torch.Generator().manual_seed(noise_seed(0, 0, "a")))
    if "latents_mean" in vae:
        mean, std = (torch.tensor(vae[name]).view(1, 4, 1, 1).to(drawn) for name in ("latents_mean", "latents_std"))
        expected = (drawn - mean) * 0.3611 / std
    else:
        expected = (drawn - (0.0 if vae else 0.1159)) * 0.3611
    assert torch.equal(read_latents(parse_latents(recipe), "sample", {"moments": moments}, noise_seed(0, 0, "a"))[None], expected)


def test_latents_come_as_they_are_asked_for(path):
    made = recipes()
    make_store(path, ROWS, made)
    moments = stored_latents(made.latents, "a.png", (64, 48))["moments"]
    by_form = {form: cs.CachedDataset(path, latents=form)[0]["latents"] for form in ("sample", "mean", "raw", "moments")}
    assert (by_form["moments"].numpy() == moments).all()
    assert (by_form["raw"].numpy() == moments[:4]).all()
    assert np.allclose(by_form["mean"].numpy(), (moments[:4] - 0.1159) * 0.3611, atol=1e-6)
    assert by_form["sample"].shape == by_form["mean"].shape
    assert not np.allclose(by_form["sample"].numpy(), by_form["mean"].numpy(), atol=0.1)


@pytest.mark.parametrize("stored", ["mean", "sample"])
def test_where_no_moments_are_stored_a_sample_is_what_is_stored_normalised(path, stored):
    made = recipes(stored=stored)
    make_store(path, ROWS, made)
    raw = stored_latents(made.latents, "a.png", (64, 48))[stored]
    assert np.allclose(cs.CachedDataset(path)[0]["latents"].numpy(), (raw - 0.1159) * 0.3611, atol=1e-6)
    assert (cs.CachedDataset(path, latents="raw")[0]["latents"].numpy() == raw).all()
    with pytest.raises(cs.BadInput, check=asks_for("latents")):
        cs.CachedDataset(path, latents="moments")


def test_a_mean_cannot_be_had_from_one_stored_sample_and_an_unknown_form_is_refused(path):
    make_store(path, ROWS, recipes(stored="sample"))
    with pytest.raises(cs.BadInput, check=asks_for("latents")):
        cs.CachedDataset(path, latents="mean")
    unknown: Any = "noise"
    with pytest.raises(cs.BadInput):
        cs.CachedDataset(path, latents=unknown)
    make_store(path, ROWS, recipes(stored=None), name="texts")
    with pytest.raises(cs.BadInput):
        cs.CachedDataset(path, "texts", latents=unknown)


def test_of_ideogram_4_the_patch_comes_before_the_channel():
    block = LatentsBlock("mean", 2, 1.0, None, (0.0,) * 8, (1.0,) * 8, patches_first=True)
    stored = torch.arange(2 * 2 * 4.0).reshape(2, 2, 4)
    folded = read_latents(block, "mean", {"mean": stored})
    assert folded.shape == (8, 1, 2)
    assert folded[:, 0, 0].tolist() == [0, 8, 1, 9, 4, 12, 5, 13]


def test_folding_into_channels_is_that_of_flux_2_and_comes_before_normalising():
    latents = torch.randn(3, 4, 6)
    block = LatentsBlock("mean", 2, 1.0, None, tuple(range(12)), (1.0,) * 12)
    folded = latents.view(3, 2, 2, 3, 2).permute(0, 2, 4, 1, 3).reshape(12, 2, 3)
    assert torch.equal(read_latents(block, "mean", {"mean": latents}), folded - torch.arange(12).view(12, 1, 1))
    video = torch.stack([latents, latents * 2], dim=1)
    assert torch.equal(read_latents(block, "mean", {"mean": video})[:, 1], folded * 2 - torch.arange(12).view(12, 1, 1))


def test_a_draw_depends_on_seed_epoch_and_sample_and_on_nothing_else(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    first = data[0]["latents"].tolist()
    assert batch_of(data, 3, 1, 0)["latents"][2].tolist() == first
    assert cs.CachedDataset(path)[0]["latents"].tolist() == first
    assert cs.CachedDataset(path, seed=1)[0]["latents"].tolist() != first
    data.set_epoch(1)
    assert data[0]["latents"].tolist() != first
    data.set_epoch(0)
    assert data[0]["latents"].tolist() == first


# Opening


def test_a_store_or_name_that_is_not_there_is_reported_with_what_is(path):
    with pytest.raises(cs.StoreNotFound):
        cs.CachedDataset(path)
    make_store(path, ROWS, recipes(), name="cats")
    with pytest.raises(cs.BadInput, check=asks_for("name")):
        cs.CachedDataset(path)


def test_the_newest_catalog_is_kept_for_life_and_an_older_one_can_be_asked_for(path):
    made = recipes()
    make_store(path, ROWS[:1], made)
    old = cs.CachedDataset(path)
    make_store(path, ROWS, made)
    assert (len(old), old.generation, len(pickle.loads(pickle.dumps(old)))) == (1, 1, 1)
    new = cs.CachedDataset(path)
    assert (len(new), new.generation, len(cs.CachedDataset(path, generation=1))) == (4, 2, 1)
    assert new.digest != old.digest
    with pytest.raises(cs.BadInput, check=asks_for("generation")):
        cs.CachedDataset(path, generation=7)


def test_a_damaged_newest_catalog_is_an_error_and_never_an_older_pairing(path):
    made = recipes()
    make_store(path, ROWS[:1], made)
    make_store(path, ROWS, made)
    file = path / "catalogs" / "train" / "2.safetensors"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(cs.FormatError):
        cs.CachedDataset(path)
    assert len(cs.CachedDataset(path, generation=1)) == 1


def test_a_recipe_that_says_more_than_is_known_here_is_refused(path):
    recipe = recipes().text
    make_store(path, [], Recipes(Recipe("text", recipe.make, {**recipe.read, "rotate": 90})))
    with pytest.raises(cs.FormatError):
        cs.CachedDataset(path)


# Reading


def test_a_batch_is_one_read_in_which_each_key_comes_once(path, monkeypatch):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    asked = []
    read = data._reader.get_raw
    monkeypatch.setattr(data._reader, "get_raw", lambda keys: asked.append(list(keys)) or read(keys))
    samples = data.__getitems__([0, 3, 0])
    assert (len(asked), len(asked[0]), len(set(asked[0]))) == (1, 3, 3)
    assert [sample["sample_id"] for sample in samples] == ["a.png", "d.png", "a.png"]


@pytest.mark.parametrize("latents", ["sample", "mean", "raw", "moments"])
def test_samples_of_one_read_share_no_memory(path, latents):
    samples = cs.CachedDataset(make_store(path, ROWS, recipes(FLUX)), latents=latents).__getitems__([0, 3, 0])
    before = [{name: value.tolist() for name, value in sample.items() if hasattr(value, "tolist")} for sample in samples]
    for value in samples[0].values():
        if hasattr(value, "fill_"):
            value.fill_(77)
    assert [{name: samples[n][name].tolist() for name in before[n]} for n in (1, 2)] == before[1:]


def test_any_encoded_caption_can_be_had_as_a_batch_of_one(path):
    made = recipes(PLAIN)
    data = cs.CachedDataset(make_store(path, ROWS, made, prompts=("", "a validation prompt")))
    found = data.prompt("a validation prompt")
    assert (found["prompt_embeds"][0].numpy() == stored_text(made.text, "a validation prompt")["prompt_embeds"]).all()
    assert found["prompt_attention_mask"].tolist() == [[1] * 19]
    assert list(data.prompt("")["prompt_embeds"].shape) == [1, 0, 6]


def test_a_caption_that_was_never_encoded_is_missing_and_the_error_names_the_command(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    with pytest.raises(cs.MissingEntry, check=tells_of("'unheard of'", "--prompts prompts.txt")):
        data.prompt("unheard of")


def test_an_entry_that_is_gone_or_damaged_is_an_error(path):
    made = recipes()
    data = cs.CachedDataset(make_store(path, ROWS, made, leave_out=["a dog"]))
    with pytest.raises(cs.MissingEntry, check=tells_of(caption_key(made.text, "a dog"))):
        data[1]
    for segment in (path / "segments").rglob("*.safetensors"):
        segment.chmod(0o644)
        raw = bytearray(segment.read_bytes())
        raw[-4:] = b"flip"
        segment.write_bytes(raw)
    with pytest.raises(cs.CorruptEntry):
        data.__getitems__([0, 2, 3])


def test_reading_writes_nothing_to_the_store(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert len(samples_of(data)) == 4
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_an_empty_or_mixed_list_is_no_batch_and_of_an_index_that_is_not_there_it_is_said_how_many_there_are(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    with pytest.raises(cs.BadInput):
        data.collate([])
    with pytest.raises(cs.BadInput, check=tells_of("'b.png' (bucket 64x48)", "'c.png' (bucket 48x64)", "BucketBatchSampler")):
        batch_of(data, 1, 2)
    empty = data.select([])
    for some, index in ((empty, 0), (empty, -1), (data, len(data)), (data, -len(data) - 1)):
        with pytest.raises(IndexError, check=tells_of(f"{len(some)} samples", f"at {index}")):
            some.read_batch([index])


WRONG: dict[str, Any] = {
    "a missing entry": lambda data, _path: data[1],
    "a batch": lambda data, _path: data.read_batch([0, 1]),
    "an index in a batch": lambda data, _path: data.read_batch([7]),
    "an index": lambda data, _path: data[7],
    "a prompt": lambda data, _path: data.prompt("unheard of"),
    "an id": lambda data, _path: data.index("z"),
    "no model": lambda data, path: data.check(model=path / "nothing"),
    "another model": lambda data, path: data.check(model=path),
    "a field": lambda _data, path: cs.CachedDataset(path, "cats", fields={"noise"}),
    "a form": lambda _data, path: cs.CachedDataset(path, "cats", latents="mean"),
    "a resolution": lambda _data, path: cs.CachedDataset(path, "cats", resolution=3),
    "a generation": lambda _data, path: cs.CachedDataset(path, "cats", generation=3),
    "captions": lambda _data, path: cs.CachedDataset(path, "cats", captions=cs.CaptionPolicy(choose="all")),
    "a copy elsewhere": lambda data, _path: pickle.loads(pickle.dumps(data))[1],
}


@pytest.mark.parametrize("what", list(WRONG))
def test_an_error_says_which_data_set_of_which_store_it_is_about(path, what):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(stored="sample"), name="cats", leave_out=["a dog"]), "cats")
    with pytest.raises((cs.CacheStoreError, IndexError)) as refused:
        WRONG[what](data, path)
    assert str(refused.value).count(f"the data set 'cats' of {path}") == 1


def test_what_an_error_is_and_what_it_came_from_stay_as_they_are(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(), leave_out=["a dog"]))
    with pytest.raises(cs.MissingEntry) as refused:
        data[1]
    assert type(refused.value.__cause__) is cs.MissingEntry
    assert str(refused.value).endswith(str(refused.value.__cause__))


# Processes


def test_a_pickled_data_set_is_a_path_and_options_and_has_an_epoch_of_its_own(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()), latents="mean", seed=3)
    assert data[0]["sample_id"] == "a.png"
    data.set_epoch(5)
    raw = pickle.dumps(data)
    assert len(raw) < 2_000
    for twin in (pickle.loads(raw), copy.deepcopy(data)):
        assert equal(batch_of(twin, 0, 1), batch_of(data, 0, 1))
        assert (twin.epoch, twin.generation, len(twin)) == (5, 1, 4)
        twin.set_epoch(6)
    assert data.epoch == 5


@pytest.mark.parametrize("method", share(["fork", "spawn", "forkserver"], 3))
def test_workers_of_every_start_method_read_what_the_parent_reads_and_see_every_epoch(path, method):
    """The pictures are so large that torch uses threads on them: in a forked process those of the parent are missing."""
    rows = [Row(f"{n}.png", (f"caption {n % 3}",), bucket=(1024, 768) if n % 2 else (768, 1024)) for n in range(12)]
    data = cs.CachedDataset(make_store(path, rows, recipes(PLAIN)))
    sampler = cs.BucketBatchSampler(data, batch_size=2)
    here = [list(loader(data, batch_sampler=sampler)) for _epoch in range(2)]
    sampler.set_epoch(0)
    there = loader(data, batch_sampler=sampler, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    for expected in here:
        found = list(there)
        assert len(found) == len(expected) == 6
        assert all(map(equal, found, expected))


def test_an_error_in_a_worker_reaches_the_trainer_as_what_it_is(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(), leave_out=["a dog"]))
    with pytest.raises(cs.MissingEntry):
        list(loader(data, batch_sampler=[[1]], num_workers=1, multiprocessing_context="fork"))


def test_forked_workers_see_an_epoch_that_is_set_after_the_data_set_was_also_given_to_spawned_ones(path):
    """As torch moves the number to other memory for the spawned ones."""
    epoch = Epoch()
    forked, reported = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(forked[0], 1)
        os.write(reported[1], bytes([epoch.get()]))
        os._exit(0)
    epoch._tensor.share_memory_()
    assert epoch._tensor.is_shared()
    epoch.set(9)
    os.write(forked[1], b"!")
    assert os.read(reported[0], 1) == bytes([9])
    os.waitpid(child, 0)
    assert epoch.get() == 9


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="native threads are counted by the proc file system")
def test_opening_and_reading_start_no_thread(path):
    make_store(path, ROWS, recipes())
    before = set(Path("/proc/self/task").iterdir())
    assert len(samples_of(cs.CachedDataset(path))) == 4
    assert set(Path("/proc/self/task").iterdir()) <= before


# Control images


EDITS = [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(64, 48)]), Row("c.png", bucket=(48, 64), controls=[(48, 64)])]


def control_mean(made, row, number=0):
    """The normalised mean of a control image, as FLUX.1 Kontext's pipeline makes it."""
    stored = stored_latents(made.latents, control_of(row, number), row.controls[number])["moments"]
    return (stored[:4] - np.float32(0.1159)) * np.float32(0.3611)


def test_a_data_set_without_control_images_has_no_name_for_them(path):
    assert "control_latents" not in cs.CachedDataset(make_store(path, ROWS, recipes()))[0]


def test_one_control_image_for_each_sample_is_stacked_and_never_drawn(path):
    made = recipes()
    data = cs.CachedDataset(make_store(path, EDITS, made))
    batch = batch_of(data, 0, 1)
    assert batch["control_latents"].shape == (2, 4, 6, 8)
    for index, row in enumerate(EDITS[:2]):
        np.testing.assert_allclose(batch["control_latents"][index].numpy(), control_mean(made, row), rtol=1e-6)
    assert not np.allclose(batch["latents"][0].numpy(), batch["control_latents"][0].numpy())
    assert batch_of(data, 2)["control_latents"].shape == (1, 4, 8, 6)
    assert batch["target_size"].tolist() == [[48, 64], [48, 64]]
    assert data.buckets == {(48, 64): [2], (64, 48): [0, 1]}


@pytest.mark.parametrize(
    "rows",
    [
        [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(64, 48), (48, 64)])],
        [Row("a.png", controls=[(64, 48)]), Row("b.png")],
        [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(48, 64)])],
        [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(64, 48)], is_measured=False)],
    ],
    ids=["several", "none", "another size", "size not known"],
)
def test_control_images_that_cannot_always_be_stacked_come_as_a_list_for_each_sample(path, rows):
    made = recipes()
    data = cs.CachedDataset(make_store(path, rows, made))
    controls = (
        data.collate([data[0], data[1]])["control_latents"] if rows[1].is_measured else [s["control_latents"] for s in samples_of(data)]
    )
    assert [[tuple(one.shape) for one in of_sample] for of_sample in controls] == [
        [(4, height // 8, width // 8) for width, height in row.controls] for row in rows
    ]
    for of_sample, row in zip(controls, rows, strict=True):
        for number, one in enumerate(of_sample):
            np.testing.assert_allclose(one.numpy(), control_mean(made, row, number), rtol=1e-6)
    alone = [data.collate([sample])["control_latents"] for sample in samples_of(data)]
    assert all(isinstance(one, list) for one in alone), "a batch of one has another form"


@pytest.mark.parametrize(("stored", "latents"), [("moments", "moments"), ("moments", "raw"), ("mean", "sample"), ("sample", "sample")])
def test_control_images_come_in_the_form_of_the_latents(path, stored, latents):
    made = recipes(stored=stored)
    data = cs.CachedDataset(make_store(path, EDITS[:1], made), latents=latents)
    raw = stored_latents(made.latents, control_of(EDITS[0], 0), (64, 48))[stored]
    expected = {"moments": raw, "raw": raw[:4]}.get(latents, (raw[:4] - np.float32(0.1159)) * np.float32(0.3611))
    np.testing.assert_allclose(data[0]["control_latents"].numpy(), expected, rtol=1e-6)


def test_a_sample_whose_control_image_failed_is_not_among_the_samples(path):
    rows = [EDITS[0], Row("broken.png", controls=[(64, 48)], control_fails=True)]
    assert cs.CachedDataset(make_store(path, rows, recipes())).ids == ["a.png"]


def test_control_images_survive_workers_and_pickling(path):
    data = cs.CachedDataset(make_store(path, EDITS, recipes()))
    again = pickle.loads(pickle.dumps(data))
    assert equal(batch_of(data, 0, 1), batch_of(again, 0, 1))
    [batch] = loader(data, batch_sampler=[[0, 1]], num_workers=1)
    assert equal(batch, batch_of(data, 0, 1))


def test_a_pickled_copy_reads_of_the_catalog_only_the_rows_that_it_is_asked_for(path, monkeypatch):
    rows = [Row(f"{n:04}.png", (f"caption {n}",)) for n in range(300)]
    data, sizes = cs.CachedDataset(make_store(path, rows, recipes()), latents="mean"), []
    handed = pickle.dumps(data)

    def refuse(*_arguments, **_options):
        pytest.fail("the whole catalog was read")

    monkeypatch.setattr(cachestore.files.table, "read_whole", refuse)
    monkeypatch.setattr(cachestore.files.table, "read_at", lambda fd, size, start: sizes.append(size) or read_at(fd, size, start))
    twin = pickle.loads(handed)
    assert sizes == []
    assert equal(batch_of(twin, 3, 299), batch_of(data, 3, 299))
    assert equal(twin.read_batch([5, 6]), batch_of(data, 5, 6))
    assert max(sizes) < 100
    assert twin.buckets == data.buckets


# What cannot be meant


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": None}, "path must be a path"),
        ({"path": ""}, "path must be a path"),
        ({"name": None}, "name must be a text, not None"),
        ({"latents": ["sample"]}, 'latents must be "sample", "mean", "moments" or "raw"'),
        ({"captions": 5}, "captions must be a cs.CaptionPolicy"),
        ({"captions": "last"}, 'must be "first", "random" or "all", not \'last\''),
        ({"fields": 5}, "fields must be a set of names, not 5"),
        ({"fields": [5]}, "a field must be a text, not 5"),
        ({"generation": "1"}, "generation must be a whole number of at least 0, not '1'"),
        ({"generation": True}, "generation must be a whole number of at least 0, not True"),
        ({"resolution": "64"}, "resolution must be a whole number of at least 1"),
        ({"seed": "x"}, "seed must be a whole number of at least 0, not 'x'"),
        ({"seed": None}, "seed must be a whole number of at least 0, not None"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_meant_is_refused_by_its_name(path, options: Any, says):
    make_store(path, [Row("a")], recipes())
    asked: Any = {"path": path, **options}
    with pytest.raises(cs.BadInput) as refused:
        cs.CachedDataset(**asked)
    assert says in str(refused.value)


def test_calls_with_what_cannot_be_meant_are_refused_by_name(path):
    data: Any = cs.CachedDataset(make_store(path, [Row("a")], recipes()))
    wrong: Any = ["a"]
    number: Any = 1
    calls = {
        "epoch must be a whole number of at least 0, not -1": lambda: data.set_epoch(-1),
        "epoch must be a whole number of at least 0, not 'x'": lambda: data.set_epoch("x"),
        "caption must be a text, not None": lambda: data.prompt(None),
        "sample_id must be a text, not 5": lambda: data.index(5),
        "samples must be several indices or ids, not None": lambda: data.select(None),
        "an index of the data set must be a whole number": lambda: data["a"],
        r"an index of the data set must be a whole number .*, not slice\(0, 1, None\)": lambda: data.read_batch([slice(0, 1)]),
        "model must be a path": lambda: data.check(5),
        "datasets must be a list of CachedDatasets": lambda: cs.MixedDataset(data),
        r"weights\[0\] must be a number, not 'a'": lambda: cs.MixedDataset([data], wrong),
        "weights must be a list of numbers": lambda: cs.MixedDataset([data], number),
        "seed must be a whole number": lambda: cs.MixedDataset([data], seed=wrong[0]),
    }
    for says, call in calls.items():
        with pytest.raises(cs.BadInput, match=says):
            call()


def test_an_epoch_and_a_generation_may_be_numbers_of_numpy(path):
    numbers: Any = {"generation": np.int64(1), "seed": np.int32(3)}
    data: Any = cs.CachedDataset(make_store(path, [Row("a")], recipes()), **numbers)
    data.set_epoch(np.int64(2))
    assert (data.epoch, data.generation) == (2, 1)


@pytest.mark.parametrize("options", share([{"batch_size": 1}, {"batch_size": 2, "num_workers": 1}], 2), ids=str)
@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, [0, 1]), lambda data: cs.MixedDataset([data])], ids=("whole", "part", "mix")
)
def test_torchs_own_collate_is_refused_with_what_to_pass_instead(tmp_path, wrap, options):
    data = cs.CachedDataset(make_store(tmp_path / "store", [Row("a"), Row("b")], recipes()))
    with pytest.raises(cs.BadInput, check=tells_of("cachestore.make_loader", "collate_fn=data.collate")):
        next(iter(DataLoader(wrap(data), **options)))
    (batch,) = DataLoader(wrap(data), batch_size=2, collate_fn=data.collate)
    assert batch["sample_id"] == ["a", "b"]
