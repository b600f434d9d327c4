"""Reading a batch straight into place: the same as collating samples, bit for bit, and what its buffers promise."""

import gc
import json
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.core.batch_shapes import batch_shape
from cachestore.core.keys import Recipe
from cachestore.core.read_block import LatentsBlock
from cachestore.encode.families import lookup as families
from cachestore.encode.pictures.masks import mask_recipe
from cachestore.files import opening
from cachestore.files.paths import Layout
from cachestore.store.format.entry import make_entry
from cachestore.store.read import fetch
from cachestore.store.write.append import publish_segment
from cachestore.train import batch_slice
from cachestore.train.buffers import BatchBuffers
from cachestore.train.latents import noise_seed, read_latents, read_latents_into
from tests.fakes import asks_for, tells_of
from tests.train.stores import CHANNELS, FLUX, PLAIN, SDXL, VAE, Recipes, Row, caption_key, make_store, recipes, stored_text

pytestmark = pytest.mark.torch

ROWS = [Row("a.png", ("a photo",)), Row("b.png", ("a dog",)), Row("c.png", ("two cats",), bucket=(48, 64)), Row("d.png", ("a photo",))]
ALIKE = [0, 3, 1, 0]


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        if name == "control_latents" and isinstance(value, list):
            assert list(map(len, found[name])) == list(map(len, value))
            for ours, theirs in zip(found[name], value, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert_equal_bits(one, other, name)
        elif isinstance(value, torch.Tensor):
            assert_equal_bits(found[name], value, name)
        else:
            assert found[name] == value


def assert_equal_bits(found, expected, name):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert found.is_contiguous(), name
    assert torch.equal(found.view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)), name


def assert_read_straight(data, indices, monkeypatch, into=None):
    """Read without ever making samples, and compare with the batch that samples make."""
    expected = data.collate(data.__getitems__(indices))
    with monkeypatch.context() as patch:
        patch.setattr(type(data), "__getitems__", None)
        assert_same(data.read_batch(indices, into=into), expected)


def family_of(text) -> Recipes:
    latents = Recipe("latents", {"vae": 1}, families.latents_read(families.vae_family("AutoencoderKL"), VAE, "moments"))
    return Recipes(text, latents)


def test_no_indices_make_no_batch_and_others_are_counted_as_by_getitem(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    with pytest.raises(cs.BadInput):
        data.read_batch([])
    data.prefetch([])
    assert data.read_batch([-1, np.int64(1)])["sample_id"] == ["d.png", "b.png"]
    for call in (data.read_batch, data.prefetch):
        with pytest.raises(IndexError):
            call([4])


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("family", [SDXL, FLUX, PLAIN], ids=lambda family: family.name)
@pytest.mark.parametrize("latents", ["sample", "mean", "raw", "moments"])
def test_a_batch_is_the_one_that_its_samples_make(path, monkeypatch, family, latents, io):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(family)), latents=latents, io=io)
    buffers = BatchBuffers()
    for indices in ([0], ALIKE, [2], ALIKE, [2, 2]):
        assert_read_straight(data, indices, monkeypatch)
        assert_read_straight(data, indices, monkeypatch, into=buffers)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("size", [(8, 8), (72, 40), (1024, 1016)], ids=str)
@pytest.mark.parametrize(
    "vae", [{"shift_factor": None}, {}, {"latents_mean": [1, 2, 3, 4.5], "latents_std": [2, 3, 4, 5]}], ids=["scale", "shift", "channels"]
)
def test_drawing_and_normalising_a_whole_batch_gives_the_bits_of_one_after_the_other(path, monkeypatch, dtype, size, vae):
    make_store(path, [Row(f"{n}.png", bucket=size) for n in range(3)], recipes(None, **vae), dtype=dtype)
    for latents in ("sample", "mean"):
        data = cs.CachedDataset(path, latents=latents, seed=5)
        data.set_epoch(3)
        assert_read_straight(data, [2, 0, 1], monkeypatch)


@pytest.mark.parametrize("wanted", ["sample", "mean", "raw"])
@pytest.mark.parametrize("shape", [(2 * CHANNELS, 6, 8), (2 * CHANNELS, 3, 2, 4)], ids=["picture", "video"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folded_latents_of_a_whole_batch_have_the_bits_of_one_after_the_other(wanted, shape, dtype):
    block = LatentsBlock("moments", 2, 0.5, None, tuple(range(4 * CHANNELS)), (3.0,) * (4 * CHANNELS))
    stored = torch.randn(3, *shape).to(getattr(torch, dtype))
    seeds = [noise_seed(0, 1, str(n)) for n in range(3)]
    rows = [read_latents(block, wanted, {"moments": row.clone()}, seed) for row, seed in zip(stored, seeds, strict=True)]
    out = torch.empty(batch_shape(block, wanted, stored.shape), dtype=stored.dtype)
    read_latents_into(block, wanted, stored, seeds, out)
    assert torch.equal(out, torch.stack(rows))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [{}, {"length": 20}, {"multiple": 8}, {"value": -1}, {"mask": None}], ids=str)
def test_ragged_text_is_padded_as_collate_does(path, monkeypatch, side, pad):
    read = families.text_read(PLAIN)
    padding = {**read["pad"]["prompt_embeds"], "side": side, **pad}
    text = Recipe("text", {"model": "x"}, {**read, "pad": {"prompt_embeds": padding}})
    rows = [Row(str(n), (caption,), bucket=None) for n, caption in enumerate(["", "a", "a long caption", "a", "two"])]
    data, buffers = cs.CachedDataset(make_store(path, rows, Recipes(text))), BatchBuffers()
    for indices in ([2, 0, 1], [0], [4, 3, 1], [0, 0], [2]):
        assert_read_straight(data, indices, monkeypatch, into=buffers)


def test_a_caption_longer_than_its_recipe_allows_is_the_error_that_collate_gives(path):
    read = families.text_read(PLAIN)
    text = Recipe("text", {"model": "x"}, {**read, "pad": {"prompt_embeds": {**read["pad"]["prompt_embeds"], "length": 3}}})
    data = cs.CachedDataset(make_store(path, [Row("a", ("longer",), bucket=None)], Recipes(text)))
    with pytest.raises(cs.FormatError):
        data.read_batch([0])


def test_samples_that_do_not_fit_together_are_the_error_that_collate_gives(path):
    rows = [Row("a"), Row("b", bucket=(48, 64)), Row("prompt", bucket=None), Row("c", is_measured=False)]
    data = cs.CachedDataset(make_store(path, rows, recipes()))
    for indices in ([0, 1], [0, 2], [0, 3]):
        with pytest.raises(cs.BadInput, match="BucketBatchSampler"):
            data.read_batch(indices)


def test_samples_without_picture_sizes_text_or_anything_at_all_make_their_batch(path, monkeypatch):
    rows = [Row("a", is_measured=False, extras='{"score": 3}'), Row("b", is_measured=False, extras='{"tags": ["x"]}')]
    for name, made in {"both": recipes(), "latents": recipes(family=None), "text": recipes(stored=None), "none": Recipes()}.items():
        assert_read_straight(cs.CachedDataset(make_store(path, rows, made, name=name), name), [1, 0], monkeypatch)
    rows = [Row("p", bucket=None), Row("q", bucket=None)]
    assert_read_straight(cs.CachedDataset(make_store(path, rows, recipes(), name="p"), "p"), [1, 0], monkeypatch)


@pytest.mark.parametrize("latents", ["sample", "mean", "raw", "moments"])
def test_control_latents_are_read_straight_too_where_there_is_one_for_each_sample(path, monkeypatch, latents):
    rows = [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(64, 48)])]
    data = cs.CachedDataset(make_store(path, rows, recipes(FLUX)), latents=latents)
    data.prefetch([1, 0])
    assert_read_straight(data, [1, 0, 1], monkeypatch, into=data.make_buffers())


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.parametrize("latents", ["sample", "mean", "raw", "moments"])
def test_control_latents_that_come_as_lists_are_read_straight_too(path, monkeypatch, latents, io):
    rows = [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(64, 48), (48, 64)]), Row("c.png")]
    data = cs.CachedDataset(make_store(path, rows, recipes(FLUX)), latents=latents, io=io)
    for indices in ([1, 0], [2], [0, 2, 1, 1]):
        assert_read_straight(data, indices, monkeypatch, into=data.make_buffers())


@pytest.mark.parametrize("latents", ["mean", "moments"])
def test_lists_of_control_latents_are_the_callers_own(path, latents):
    rows = [Row("a.png", controls=[(64, 48)] * 2), Row("b.png", controls=[(64, 48)] * 2), Row("c.png", controls=[(64, 48)])]
    data = cs.CachedDataset(make_store(path, rows, recipes(FLUX)), latents=latents)
    buffers = data.make_buffers()
    kept = data.read_batch([0], into=buffers)["control_latents"]
    before = kept[0][0].clone()
    held = buffers.size_bytes
    other = data.read_batch([1], into=buffers)["control_latents"]
    assert buffers.size_bytes == held, "the same memory was read into"
    assert not other[0][0].equal(before)
    assert kept[0][0].equal(before)


def test_an_extra_column_under_a_name_of_the_batch_is_an_error(path):
    data = cs.CachedDataset(make_store(path, [Row("a", extras='{"prompt_embeds": 1}')], recipes()))
    with pytest.raises(cs.BadInput, check=tells_of("'a'", "'prompt_embeds'")):
        data.read_batch([0])


def test_a_key_that_is_asked_for_twice_is_read_once(path, monkeypatch):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(FLUX)))
    asked: list[Any] = []
    fill = data._reader.fill
    monkeypatch.setattr(data._reader, "fill", lambda keys, *rest, **options: asked.append(keys) or fill(keys, *rest, **options))
    data.read_batch(ALIKE)
    assert (len(asked), len(asked[0]), len(set(asked[0]))) == (1, 5, 5)


# Buffers


def test_a_batch_in_buffers_is_overwritten_by_the_next_and_one_without_is_the_callers_own(path):
    data, buffers = cs.CachedDataset(make_store(path, ROWS, recipes(PLAIN)), latents="mean"), BatchBuffers()
    own, first = data.read_batch([0, 1]), data.read_batch([0, 1], into=buffers)
    addresses = {name: value.data_ptr() for name, value in first.items() if hasattr(value, "data_ptr")}
    held = buffers.size_bytes
    second = data.read_batch([1, 0], into=buffers)
    assert {name: second[name].data_ptr() for name in addresses} == addresses
    assert buffers.size_bytes == held
    assert (first["latents"][0] == second["latents"][0]).all()
    assert (own["latents"][0] == second["latents"][1]).all()
    assert own["latents"].untyped_storage().nbytes() == own["latents"].nbytes


def test_a_batch_whose_tensors_were_given_another_shape_or_grad_leaves_the_next_one_as_it_is(path):
    data, buffers = cs.CachedDataset(make_store(path, ROWS, recipes(PLAIN)), latents="mean"), BatchBuffers()
    expected = data.read_batch([0, 1])
    for change in ("t_", "squeeze_", "flatten", "requires_grad_"):
        batch = data.read_batch([0, 1], into=buffers)
        assert_same(batch, expected)
        assert not batch["latents"].requires_grad
        if change == "t_":
            batch["latents"].transpose_(2, 3)
        elif change == "squeeze_":
            batch["latents"].unsqueeze_(0)
        elif change == "flatten":
            batch["latents"].resize_(1)
        else:
            batch["latents"].requires_grad_()
    last = data.read_batch([0, 1], into=buffers)
    assert_same(last, expected)
    assert not last["latents"].requires_grad


def test_buffers_grow_for_a_longer_batch_and_are_kept_for_a_shorter_one(path):
    rows = [Row("short", ("x",), bucket=None), Row("long", ("x" * 300,), bucket=None)]
    data, buffers = cs.CachedDataset(make_store(path, rows, recipes(PLAIN, stored=None))), BatchBuffers()
    sizes = []
    for index in (0, 1, 0, 1):
        assert data.read_batch([index], into=buffers)["prompt_embeds"].shape[1] == [1, 300][index]
        sizes.append(buffers.size_bytes)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]


def test_a_batch_that_was_put_together_otherwise_is_in_the_buffers_too(path, monkeypatch):
    data, buffers = cs.CachedDataset(make_store(path, ROWS, recipes(FLUX))), BatchBuffers()
    straight = data.read_batch(ALIKE, into=buffers)
    addresses = {name: value.data_ptr() for name, value in straight.items() if hasattr(value, "data_ptr")}
    expected = data.collate(data.__getitems__(ALIKE))
    monkeypatch.setattr(batch_slice, "read_slice", lambda *_arguments: None)
    other = data.read_batch(ALIKE, into=buffers)
    assert_same(other, expected)
    assert {name: other[name].data_ptr() for name in addresses} == addresses


def masked(path, *has_mask, **vae):
    made = replace(recipes(**vae), masks=mask_recipe(8))
    rows = [Row(f"{n}.png", has_mask=has, bucket=None if has is None else (64, 48)) for n, has in enumerate(has_mask)]
    return cs.CachedDataset(make_store(path, rows, made))


def test_masks_of_all_of_some_and_of_no_samples_are_read_straight(path, monkeypatch):
    data = masked(path, True, False, True, False)
    buffers = data.make_buffers()
    for indices in ([0, 2], [2, 1, 0], [1, 3], [0, 0, 1]):
        for into in (None, buffers):
            assert_read_straight(data, indices, monkeypatch, into=into)
    assert float(data.read_batch([1, 3])["mask"].min()) == 1


def test_samples_without_a_picture_have_no_mask_and_make_no_batch_with_others(path, monkeypatch):
    data = masked(path, True, None, None, False)
    assert_read_straight(data, [1, 2], monkeypatch)
    assert "mask" not in data.read_batch([1, 2])
    alone = cs.CachedDataset(path, fields=["mask"])
    for both in ([0, 1], [3, 1]):
        with pytest.raises(cs.BadInput, match="has mask, but"):
            alone.read_batch(both)


def test_samples_whose_masks_are_of_several_shapes_make_no_batch_of_a_mix_either(tmp_path):
    made = replace(recipes(), masks=mask_recipe(8))
    rows = [Row("a"), Row("b", bucket=(128, 96)), Row("c", bucket=None), Row("d", has_mask=True)]
    whole = cs.CachedDataset(make_store(tmp_path / "whole", rows, made), fields=["mask", "prompt_embeds"])
    other = cs.CachedDataset(make_store(tmp_path / "other", rows[3:], made), fields=["mask", "prompt_embeds"])
    mixed = cs.MixedDataset([whole, other])
    for indices in ([0, 1, 4], [0, 2, 4]):
        with pytest.raises(cs.BadInput, match=r"mask of|has mask, but"):
            mixed.read_batch(indices)


@pytest.mark.parametrize("indices", [[0, 2], [0, 1], [1, 3]], ids=str)
def test_masks_are_float32_whatever_torchs_default_is(path, monkeypatch, indices):
    data = masked(path, True, False, True, False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_read_straight(data, indices, monkeypatch)
        assert data.read_batch(indices)["mask"].dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_masks_of_several_data_sets_are_read_straight(tmp_path, monkeypatch):
    mixed = cs.MixedDataset([masked(tmp_path / "a", True, False), masked(tmp_path / "b", False, False), masked(tmp_path / "c", True, True)])
    for indices in ([3, 0, 1, 2], [1, 3], [5, 0, 4], [4, 2]):
        assert_read_straight(mixed, indices, monkeypatch)


def test_pinned_buffers_without_an_accelerator_are_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(cs.BadInput, check=asks_for("pin")):
        BatchBuffers(pin=True)


# Faults


def damage_entry(data, row):
    """Change a byte of this sample's picture on disk."""
    [key] = data._rows.parts(data._selection.choose([row], 0), 0)[0].keys
    location = data._reader.locate([key]).location(0)
    file = data._reader.layout.segment(location.segment.digest)
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(location.offset)
        byte = opened.read(1)[0]
        opened.seek(location.offset)
        opened.write(bytes([byte ^ 255]))
    return key


def test_a_damaged_entry_is_a_corrupt_entry_and_its_other_copy_is_read_where_there_is_one(path, monkeypatch):
    made = recipes()
    data = cs.CachedDataset(make_store(path, ROWS, made))
    expected = data.read_batch(ALIKE)
    key = damage_entry(data, 1)
    again = cs.CachedDataset(path)
    with pytest.raises(cs.CorruptEntry, check=tells_of(key, "cachestore repair")):
        again.read_batch(ALIKE)
    make_store(path, ROWS[1:2], made, name="copy", leave_out=["a dog", ""])
    assert_same(cs.CachedDataset(path).read_batch(ALIKE), expected)
    assert_same(again.read_batch(ALIKE), expected)


@pytest.mark.parametrize("family", [SDXL, PLAIN], ids=lambda family: family.name)
@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_bool_that_is_neither_0_nor_1_is_the_error_that_get_gives(path, monkeypatch, family, verify):
    made = recipes(family)
    make_store(path, ROWS, made, leave_out=["a dog", "two cats"])
    for caption, byte in (("a dog", b"\2"), ("two cats", b"\1")):
        tensors = {name: ("BOOL", array.shape, byte * array.size) for name, array in stored_text(made.text, caption).items()}
        publish_segment(Layout(path), [make_entry(caption_key(made.text, caption), tensors, {})], origin="")
    data = cs.CachedDataset(path, verify=verify)
    assert_read_straight(data, [2], monkeypatch)
    with pytest.raises(cs.FormatError):
        data.read_batch([1])


def test_a_missing_entry_is_named(path):
    made = recipes()
    data = cs.CachedDataset(make_store(path, ROWS, made, leave_out=["a dog"]))
    data.prefetch([0, 1])
    with pytest.raises(cs.MissingEntry, check=tells_of(caption_key(made.text, "a dog"))):
        data.read_batch([0, 1])


def test_a_segment_cut_short_under_the_reader_is_a_corrupt_entry(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    data.read_batch(ALIKE)
    for segment in (path / "segments").rglob("*.safetensors"):
        segment.chmod(0o644)
        os.truncate(segment, segment.stat().st_size // 2)
    with pytest.raises(cs.CorruptEntry):
        data.read_batch(ALIKE)


def test_an_entry_of_another_shape_than_its_neighbours_is_left_to_collate(path, monkeypatch):
    rows = [Row("a", is_measured=False), Row("b", is_measured=False, bucket=(48, 64))]
    data = cs.CachedDataset(make_store(path, rows, recipes()))
    with pytest.raises(cs.BadInput, check=tells_of("'a'", [4, 6, 8], "'b'", [4, 8, 6])):
        data.read_batch([0, 1])


def test_prefetching_changes_no_answer_and_passes_over_what_is_gone(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    expected = data.collate(data.__getitems__(ALIKE))
    data.prefetch(ALIKE)
    assert_same(data.read_batch(ALIKE), expected)
    twin = cs.CachedDataset(path)
    for segment in (path / "segments").rglob("*.safetensors"):
        segment.unlink()
    twin.prefetch(ALIKE)
    with pytest.raises(cs.MissingEntry):
        twin.read_batch(ALIKE)


def test_threads_with_buffers_of_their_own_read_from_one_data_set(path):
    rows = [Row(f"{n}.png", (f"caption {n % 5}",), extras=json.dumps({"n": n})) for n in range(24)]
    data = cs.CachedDataset(make_store(path, rows, recipes(PLAIN)))
    batches = [[n, (n * 7) % 24, (n * 5 + 1) % 24] for n in range(24)]
    expected = [data.collate(data.__getitems__(indices)) for indices in batches]

    def read_all(start):
        buffers = BatchBuffers()
        for n in range(start, start + 24):
            data.prefetch(batches[(n + 1) % 24])
            assert_same(data.read_batch(batches[n % 24], into=buffers), expected[n % 24])
            if n % 8 == 0:
                data._reader.refresh()
        return True

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(read_all, (0, 9, 17)))


@pytest.fixture
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("latents", ["sample", "mean", "raw", "moments"])
@pytest.mark.parametrize("family", [SDXL, FLUX], ids=lambda family: family.name)
def test_a_batches_memory_goes_with_the_batch_and_not_with_the_next_collection(path, family, latents):
    rows = [Row("a.png", controls=[(64, 48)]), Row("b.png", controls=[(64, 48), (64, 48)])]
    data = cs.CachedDataset(make_store(path, rows, recipes(family)), latents=latents)
    buffers = BatchBuffers()
    data.read_batch([1, 0], into=buffers)
    memory = weakref.ref(buffers)
    del buffers
    assert memory() is None


# Two threads


@pytest.fixture
def shared(monkeypatch):
    """How often two threads read, however little."""
    monkeypatch.setattr(fetch, "SHARED_BYTES", 0)
    counted, real = [], fetch.run_side_by_side
    monkeypatch.setattr(fetch, "run_side_by_side", lambda work: counted.append(1) or real(work))
    return counted


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("io", ["pread", "mmap"])
def test_a_batch_that_two_threads_read_is_the_one_that_its_samples_make(path, tmp_path, monkeypatch, shared, threads, io):
    threads(2)
    rows = [Row(f"{n}.png", (f"caption {n}",), bucket=(512, 512)) for n in range(8)]
    one, other = (cs.CachedDataset(make_store(at, rows, recipes()), io=io) for at in (path, tmp_path / "other"))
    for _epoch in range(2):
        assert_read_straight(one, [5, 0, 7, 1, 3, 3], monkeypatch)
        assert_read_straight(cs.MixedDataset([one, other]), [5, 0, 15, 8, 3, 3], monkeypatch)
    assert len(shared) == 6, "one for each store that is read"


def test_a_damaged_entry_that_two_threads_meet_is_an_error_that_says_what_to_run(path, shared, threads):
    threads(2)
    data = cs.CachedDataset(make_store(path, [Row(f"{n}.png", bucket=(512, 512)) for n in range(6)], recipes(None)))
    flip_all(path)
    with pytest.raises(cs.CorruptEntry):
        data.read_batch(range(6))
    assert shared


@pytest.mark.usefixtures("_no_collection")
def test_the_memory_of_a_batch_that_failed_goes_with_the_error(path, shared, threads):
    threads(2)
    data = cs.CachedDataset(make_store(path, [Row(f"{n}.png", bucket=(512, 512)) for n in range(6)], recipes(None)))
    flip_all(path)
    for _batch in range(10):
        buffers = BatchBuffers()
        memory = weakref.ref(buffers)
        with pytest.raises(cs.CorruptEntry) as caught:
            data.read_batch(range(6), into=buffers)
        del buffers, caught
        assert memory() is None
    assert len(shared) == 10


def flip_all(path):
    """Damage the last byte of every segment."""
    for segment in path.glob("segments/*/*.safetensors"):
        segment.chmod(0o644)
        content = bytearray(segment.read_bytes())
        content[-1] ^= 1
        segment.write_bytes(content)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="native threads are counted by the proc file system")
def test_no_thread_is_left_after_a_batch_that_two_threads_read(path, shared, threads):
    threads(2)
    rows = [Row(f"{n}.png", bucket=(512, 512)) for n in range(6)]
    # As stored: torch's own threads have nothing to compute.
    data, before = cs.CachedDataset(make_store(path, rows, recipes(None)), latents="moments"), set(os.listdir("/proc/self/task"))
    for _batch in range(20):
        data.read_batch(range(6))
    deadline = time.monotonic() + 30
    while set(os.listdir("/proc/self/task")) - before and time.monotonic() < deadline:
        time.sleep(0.001)  # what has ended is listed for an instant more
    assert set(os.listdir("/proc/self/task")) <= before
    assert len(shared) == 20


def test_two_threads_read_right_where_there_are_no_positional_reads(path, monkeypatch, shared, threads):
    threads(2)
    rows = [Row(f"{n}.png", bucket=(512, 512)) for n in range(12)]
    data = cs.CachedDataset(make_store(path, rows, recipes(None)), verify="always")
    data.read_batch(range(12))  # LMDB reads too
    for name in ("preadv", "pread"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(opening, "_PRESENT_ONLY", 0)
    for _batch in range(10):
        assert_read_straight(data, range(12), monkeypatch)
    assert len(shared) == 11


def test_one_thread_reads_where_torch_may_use_one(path, shared, threads):
    threads(1)
    cs.CachedDataset(make_store(path, ROWS, recipes())).read_batch(ALIKE)
    assert not shared


def test_one_thread_reads_in_a_worker_of_a_data_loader(path, monkeypatch, threads):
    threads(2)
    monkeypatch.setattr(fetch, "SHARED_BYTES", 0)
    monkeypatch.setattr(fetch, "run_side_by_side", lambda _work: pytest.fail("two threads"))
    data = cs.CachedDataset(make_store(path, ROWS, recipes()))
    with pytest.raises(pytest.fail.Exception, match="two threads"):
        data.read_batch(ALIKE)
    loader = cs.make_loader(data, batch_size=1, num_workers=1)
    loader.multiprocessing_context = "fork"  # which inherits the patches
    assert len(list(loader)) == 4
