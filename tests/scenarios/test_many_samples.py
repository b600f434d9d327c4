"""Ranks that spell the same folder in their own ways divide its pictures without leaving one out."""

import unicodedata
from collections import Counter
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from tests import fakes

pytestmark = pytest.mark.processes

NAME = unicodedata.normalize("NFC", "café")


def spellings(folder: Path, link: Path):
    """One folder as people write it; the second of each is where a process must stand for it."""
    return [
        (str(folder), "/"),
        (folder.name, str(folder.parent)),
        (f"{folder}/", "/"),
        (f"./{folder.name}", str(folder.parent)),
        (str(link), "/"),
        (f"{folder.parent}/./{folder.name}/.", "/"),
        (f"../{folder.parent.name}/{folder.name}", str(folder.parent)),
        (f"./{link.name}/", str(link.parent)),
    ]


def make_pictures(folder: Path, numbers):
    """Pictures by number, every one with its own bytes; the name of the first has an accent, decomposed as macOS writes it."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        name = unicodedata.normalize("NFD", "0 é") if number == 0 else f"{number:05}"
        (folder / f"{name}.png").write_bytes(b"picture %d" % number)


def encode(crowd, tmp_path, world, buckets, names=(NAME,)):
    """All ranks once, each with its own spelling of folder, store and name; the reports, which agree."""
    link = tmp_path / "link to pictures"
    store_link = tmp_path / "link to store"
    for path, target in ((link, "pictures"), (store_link, "store")):
        if not path.is_symlink():
            path.symlink_to(tmp_path / target)
    (tmp_path / "store").mkdir(exist_ok=True)
    data, stores = spellings(tmp_path / "pictures", link), spellings(tmp_path / "store", store_link)
    ranks = [
        {"data": data[rank][0], "store": stores[rank][0], "cwd": data[rank][1], "buckets": buckets, "rank": rank, "world_size": world}
        | {"name": names[rank % len(names)]}
        for rank in range(world)
    ]
    ended = crowd.run("tests.scenarios.parts:precompute", *ranks, CACHESTORE_LAUNCH=f"launch of {len(list(link.iterdir()))}")
    assert [code for code, _report in ended] == [0] * world
    return [report for _code, report in ended]


def holds_each_once(tmp_path, count):
    """Whether every picture has its own entry, under its own sample."""
    found = fakes.catalog(tmp_path / "store", NAME)
    keys = {key for row in range(len(found)) for key in found.columns[0].row_keys(row)}
    with cs.open(tmp_path / "store") as store:
        return len(found) == len(set(found.ids)) == count and keys == set(store.keys())


COUNTS = (2391, 2392, 2393)
SAMPLE = {(2392, 8, 9)}
"""What an ordinary run tries; the rest is slow."""


@pytest.mark.parametrize(
    ("count", "world", "buckets"),
    [
        pytest.param(count, world, buckets, marks=() if (count, world, buckets) in SAMPLE else pytest.mark.slow)
        for count in COUNTS
        for world in (1, 2, 8)
        for buckets in (1, 9)
    ],
)
def test_what_is_missing_of_2392_pictures_is_made_once_whoever_spells_the_folder_how(crowd, tmp_path, count, world, buckets):
    """SimpleTuner #522 and #433: `not_local` files, and a huge number of relevant jobs missing, with 2392 pictures on several ranks.

    Nine tenths are there beforehand, and what is missing stands together in the listing.
    """
    present = [number for number in range(count) if not 1000 <= number < 1240]
    make_pictures(tmp_path / "pictures", present)
    encode(crowd, tmp_path, 1, buckets)
    first = Counter(key for _pid, _encoder, key in crowd.made())
    assert (len(first), set(first.values())) == (len(present), {1})
    make_pictures(tmp_path / "pictures", range(1000, 1240))
    reports = encode(crowd, tmp_path, world, buckets)
    second = Counter(key for _pid, _encoder, key in crowd.made())
    assert (len(second), set(second.values())) == (240, {1})
    assert not set(first) & set(second)
    assert {(report["complete"], report["samples"], report["encoded"], report["reused"]) for report in reports} == {
        (True, count, 240, len(present))
    }
    assert holds_each_once(tmp_path, count)
    assert verify(tmp_path / "store").ok


@pytest.mark.slow
def test_a_name_that_is_composed_on_one_rank_and_decomposed_on_the_other_is_one_data_set(crowd, tmp_path):
    """SimpleTuner #522 again: two spellings of one thing are two things to whoever compares bytes."""
    make_pictures(tmp_path / "pictures", range(40))
    reports = encode(crowd, tmp_path, 2, 1, names=(NAME, unicodedata.normalize("NFD", NAME)))
    assert set(Counter(key for _pid, _encoder, key in crowd.made()).values()) == {1}
    assert len({report["plan"] for report in reports}) == 1
    assert holds_each_once(tmp_path, 40)
