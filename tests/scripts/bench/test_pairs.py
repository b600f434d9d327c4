"""The bench of two commits: each row gives a rate, the sides take turns, and the table shows the ratios of pairs."""

from functools import partial
from pathlib import Path
from typing import Any

import environment
import pytest
from bench import pairs, pairs_side
from bench.pairs import Measured, measure, table
from bench.pairs_side import Row, Side

pytestmark = pytest.mark.torch
SMALL = {"width": 96, "height": 64, "more": 8}


@pytest.fixture
def side(tmp_path):
    folders = [tmp_path / name for name in ("common", "own", "memory")]
    for folder in folders:
        folder.mkdir()
    return Side(*folders)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (partial(pairs_side.host_pictures, **SMALL), ["ours"]),
        (partial(pairs_side.host_pictures, **SMALL, pillow=True), ["ours"]),
        (partial(pairs_side.host_captions, on_disk=True, more=2), ["ours", "beside"]),
        pytest.param(partial(pairs_side.write_entries, size=1_000, few=4, more=20), ["ours", "beside"], marks=pytest.mark.slow),
        (partial(pairs_side.get_entries, size=1_024, count=20), ["ours", "beside", "beside"]),
    ],
    ids=["pictures", "pillow", "captions", "write", "get"],
)
def test_a_row_gives_a_rate_and_leaves_no_segment(side, row, parts):
    rates = [row(side, part) for part in parts]
    assert all(abs(rate) > 0 for rate in rates)  # start-up, which is taken off, may take longer than so few samples
    assert not [path for folder in (side.own, side.memory) for path in folder.iterdir() if path.name in {"written", "dd"}]
    assert not [path for folder in (side.own, side.memory) for path in folder.glob("store-*/store/segments")]


def test_a_pass_that_does_not_encode_everything_is_no_rate(side):
    few = pairs_side.pictures(side, 64, 64, 2)
    with pairs_side.free_model(), pytest.raises(RuntimeError, match="2 of 3 were encoded"):
        pairs_side.pass_seconds(few, pairs_side.vae_folder(side), "latents", side.own, 3)


@pytest.mark.slow
def test_a_side_measures_the_tree_that_it_was_given_and_ends(side):
    with pairs.running(environment.ROOT, side.common, side.memory, "after") as started:
        assert Path(started.package) == environment.ROOT / "cachestore"
        assert started.decoder in {"simplejpeg", "Pillow"}
        assert started.rate("get 1.5 KiB", "ours") > 0
    assert started.process.returncode == 0


def test_a_tree_whose_package_is_not_the_one_that_was_imported_is_refused(side, monkeypatch):
    (side.own / "side.py").write_text("""print('{"package": "/elsewhere/cachestore", "decoder": ""}')""")
    monkeypatch.setattr(pairs, "SIDE", side.own / "side.py")
    with pytest.raises(RuntimeError, match="would measure"), pairs.running(side.own, side.common, side.memory, "before"):
        pass


class Fake:
    """A side that notes its turns."""

    def __init__(self, name, turns):
        self.name, self.turns = name, turns

    def rate(self, _row, part):
        self.turns.append(f"{self.name} {part}")
        return float(len(self.turns))


def test_sides_take_turns_in_alternating_order_and_the_first_pair_warms_up():
    turns = []
    sides: Any = {name: Fake(name, turns) for name in ("before", "after")}
    found = measure("x", Row("a second", lambda _side, _part: 0, "dd"), sides, 2)
    one = ["before ours", "after ours", "after beside"]
    assert turns == [*reversed(one), *one, *reversed(one)]
    assert found.rates == {"before": [4.0, 9.0], "after": [5.0, 8.0], "beside": [6.0, 7.0]}


def test_the_table_has_the_median_of_each_pairs_ratio():
    both = Measured("write", "MiB/s", "dd", {"before": [10, 20, 40], "after": [20, 60, 40], "beside": [200, 200, 200]})
    alone = Measured("jpeg", "a second", "", {"after": [1234.5]})
    head, first, second = table([both, alone]).splitlines()
    assert head.split()[:4] == ["row", "unit", "before", "after"]
    assert "2.00 (1.00 to 3.00)" in first
    assert "0.20 (0.10 to 0.30)" in first
    assert second.split() == ["jpeg", "a", "second", "1,234"]
