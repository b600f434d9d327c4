"""Training from the store gives the losses of training while encoding on the fly, and would not with other captions or pictures."""

import json
import math

import example_train
import pytest
from example_train import FAMILIES, STEPS, compare, largest_difference

from cachestore.encode.batching.environment import SETTINGS
from tests.shares import share


def test_no_losses_are_not_the_same_losses():
    assert largest_difference([], []) == math.inf
    assert largest_difference([1.0], [1.0, 2.0]) == math.inf


def test_the_largest_difference_is_relative_and_nan_is_infinite():
    assert largest_difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert largest_difference([1.0, 2.0], [1.0, 1.0]) == 0.5
    assert largest_difference([1.0, math.nan], [1.0, math.nan]) == math.inf
    assert largest_difference([math.inf], [math.inf]) == math.inf


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield


@pytest.mark.torch
@pytest.mark.parametrize("family", share(FAMILIES, 2), ids=lambda family: family.name)
def test_the_losses_from_the_store_are_those_of_encoding_on_the_fly(tmp_path, family):
    result = compare(family, tmp_path)
    assert result["ok"], result
    assert result["steps"] == STEPS == len(set(result["cached"]))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_one_other_caption_is_noticed(tmp_path, family):
    example_train.lay_out(tmp_path / "pictures")
    captions = {path.with_suffix(".png").name: path.read_text() for path in (tmp_path / "pictures").glob("*.txt")}
    changed = {**captions, "01.png": "an old red house near quiet water under tall trees"}
    assert captions["01.png"] == "a cat"
    result = compare(family, tmp_path, changed)
    assert not result["ok"]
    assert result["largest_difference"] > 2 * family.tolerance


@pytest.mark.torch
@pytest.mark.slow
def test_the_script_exits_0_only_if_all_families_have_the_same_losses(capsys, monkeypatch):
    assert example_train.main(["--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], [family["family"] for family in result["families"]]) == (True, ["sdxl", "flux"])
    monkeypatch.setattr(example_train, "compare", lambda family, folder: {**result["families"][0], "ok": family.name != "flux"})
    assert example_train.main([]) == 1
    assert "FAILED: other losses" in capsys.readouterr().out
