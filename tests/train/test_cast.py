"""What `dtype=` casts: the floating point tensors of entries, in samples as in batches, and nothing else."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import cachestore as cs
from cachestore.encode.pictures.masks import mask_recipe
from cachestore.train.buffers import BatchBuffers
from tests.fakes import asks_for
from tests.train.stores import FLUX, PLAIN, SDXL, Row, agrees, make_store, recipes
from tests.train.test_read_batch import assert_read_straight, assert_same

pytestmark = pytest.mark.torch

ROWS = [Row("a"), Row("b", ("two words",)), Row("c", ("a third",))]
MASKED = [Row("a", has_mask=True, controls=[(64, 48)]), Row("b", controls=[(64, 48), (48, 64)])]


@pytest.fixture
def masked(tmp_path):
    """A store with masks, and with lists of control latents."""
    made = recipes()
    return make_store(tmp_path / "masked", MASKED, replace(made, masks=mask_recipe(8)))


def tensors(batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a batch or a sample with its name, also those in lists."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list):
            for one in value:
                yield from tensors({name: one})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", [SDXL, FLUX, PLAIN], ids=lambda family: family.name)
def test_each_floating_tensor_is_the_stored_one_cast_and_all_else_is_as_it_was(tmp_path, monkeypatch, family, dtype):
    store = make_store(tmp_path / "s", ROWS, recipes(family))
    plain, cast = cs.CachedDataset(store), cs.CachedDataset(store, dtype=dtype)
    expected = plain.read_batch([0, 1, 2])
    assert any(value.is_floating_point() for _name, value in tensors(expected))
    assert_same(cast.read_batch([0, 1, 2]), {name: as_cast(value, dtype) for name, value in expected.items()})
    assert_read_straight(cast, [0, 1, 2], monkeypatch)
    assert_same(cast[1], {name: as_cast(value, dtype) for name, value in plain[1].items()})
    assert_same(cast.prompt(""), {name: as_cast(value, dtype) for name, value in plain.prompt("").items()})


def as_cast(value: Any, dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def test_masks_and_lists_of_control_latents_are_cast_and_whole_numbers_are_not(masked, monkeypatch):
    data = cs.CachedDataset(masked, dtype=torch.float64)
    assert_read_straight(data, [0, 1], monkeypatch)
    dtypes = {name: value.dtype for name, value in tensors(data.read_batch([0, 1]))}
    assert dtypes.pop("mask") == dtypes["control_latents"] == dtypes["latents"] == torch.float64
    assert {name for name, dtype in dtypes.items() if dtype == torch.int64} == {"original_size", "crop_top_left", "target_size"}


@pytest.mark.parametrize("family", [SDXL, FLUX, PLAIN, None])
def test_features_have_the_dtype_that_is_cast_to(tmp_path, masked, family):
    for store in (make_store(tmp_path / "s", ROWS, recipes(family)), masked):
        data = cs.CachedDataset(store, dtype=torch.float16)
        agrees(data, [0, 1])
        assert data.features["latents"].dtype == data.dtype == torch.float16


def test_buffers_are_used_again_for_batches_that_are_cast(tmp_path):
    data, buffers = cs.CachedDataset(make_store(tmp_path / "s", ROWS, recipes()), dtype=torch.float64), BatchBuffers()
    first = data.read_batch([0, 1], into=buffers)
    second = data.read_batch([1, 2], into=buffers)
    assert first["latents"].data_ptr() == second["latents"].data_ptr()
    assert_same(second, data.read_batch([1, 2]))


def test_parts_and_pickled_copies_are_cast_too_and_a_cast_data_set_shares_the_epoch(tmp_path):
    plain = cs.CachedDataset(make_store(tmp_path / "s", ROWS, recipes()))
    cast = plain.with_dtype(torch.float64)
    plain.set_epoch(3)
    assert (cast.epoch, plain.dtype, plain[0]["latents"].dtype) == (3, None, torch.float32)
    for data in (cast.select([0]), pickle.loads(pickle.dumps(cast)), cs.MixedDataset([cast, cast])):
        assert data[0]["latents"].dtype == torch.float64
    assert cast.with_dtype(None).digest == cast.digest == plain.digest
    assert_same(cast.with_dtype(None)[0], plain[0])


def test_a_mix_is_cast_as_a_whole_or_not_at_all(tmp_path):
    plain = cs.CachedDataset(make_store(tmp_path / "s", ROWS, recipes()))
    mixed = cs.MixedDataset([plain, plain.select([0])], weights=[1, 2.5]).with_dtype(torch.float16)
    assert {value.dtype for name, value in tensors(mixed.read_batch(range(len(mixed)))) if name in mixed.datasets[0].fields} == {
        torch.float16
    }
    with pytest.raises(cs.BadInput, check=asks_for("dtype")):
        cs.MixedDataset([plain, plain.with_dtype(torch.float16)])


@pytest.mark.parametrize("options", [{}, {"ahead": 0}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("mix", [False, True])
def test_a_loader_casts_what_its_data_set_reads(tmp_path, mix, options):
    plain: Any = cs.CachedDataset(make_store(tmp_path / "s", ROWS, recipes()))
    data = cs.MixedDataset([plain]) if mix else plain
    stored = list(cs.make_loader(data, 1, "single", **options))
    cast = list(cs.make_loader(data, 1, "single", dtype=torch.float64, **options))
    for found, expected in zip(cast, stored, strict=True):
        assert_same(found, {name: as_cast(value, torch.float64) for name, value in expected.items()})


class Own:
    """A data set of the caller's own class."""

    buckets = {(): [0]}
    digest = ""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return index

    __getitems__ = collate = list


def test_a_data_set_of_the_callers_own_is_not_cast():
    with pytest.raises(cs.BadInput, check=asks_for("dtype")):
        cs.make_loader(cast("Any", Own()), 1, "single", dtype=torch.float16)
