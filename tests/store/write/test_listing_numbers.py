"""Listing numbers: they only rise, whoever takes them at once, and none is left behind but the highest."""

import os
import threading

from cachestore.care.verify import verify
from cachestore.files.paths import Layout
from cachestore.store.write.listing_numbers import listing_number, listing_numbers, number_if_there, spent_numbers
from tests.fakes import publish_catalog
from tests.store.format.test_catalog import small

DAYS = 24 * 3600.0


def test_each_listing_has_a_higher_number_than_those_that_began_before(layout):
    found = []
    for _run in range(3):
        with listing_number(layout, "train") as number:
            found.append(number)
    assert found == sorted(set(found))


def test_data_sets_count_for_themselves(layout):
    with listing_number(layout, "train"), listing_number(layout, "a/b") as other:
        assert (listing_numbers(layout, "train"), listing_numbers(layout, "a/b"), other) == ([1], [1], 1)


def test_a_number_goes_with_its_run_and_is_not_used_again(layout):
    with listing_number(layout, "train") as first:
        with listing_number(layout, "train") as second:
            assert listing_numbers(layout, "train") == [first, second]
        assert listing_numbers(layout, "train") == [first]
        with listing_number(layout, "train") as third:
            assert third > second
    assert listing_numbers(layout, "train") == []
    assert [path.name for path in layout.listing_folder("train").iterdir()] == [f"{third}.ended"]


def test_many_who_begin_at_once_have_different_numbers(layout):
    found, barrier = [], threading.Barrier(16)

    def take():
        barrier.wait()
        with listing_number(layout, "train") as number:
            found.append(number)
            barrier.wait()

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16


def test_a_number_is_above_that_of_the_newest_catalog_where_the_folder_of_numbers_is_gone(layout):
    publish_catalog(layout, small(listing=41))
    with listing_number(layout, "train") as number:
        assert number == 42


def test_where_there_is_no_store_there_is_no_number_and_nothing_is_made(tmp_path):
    with number_if_there(Layout.at(tmp_path / "none"), "train") as number:
        assert number == 0
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_dead_runs_left_go_after_30_days_but_for_the_highest(layout):
    contexts = [listing_number(layout, "train") for _ in range(3)]
    numbers = [context.__enter__() for context in contexts]
    paths = [layout.listing("train", number) for number in numbers]
    os.utime(paths[0], (1, 1))
    os.utime(paths[2], (1, 1))
    assert spent_numbers(layout, now=40 * DAYS) == [paths[0]]


def test_verify_knows_the_numbers_and_tells_of_strangers_beside_them(layout):
    with listing_number(layout, "train"):
        assert verify(layout.root).findings == ()
    (layout.listings / "train" / "notes.txt").touch()
    assert [finding.path for finding in verify(layout.root).findings] == ["listings/train/notes.txt"]
