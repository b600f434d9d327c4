"""Counting what is in a store."""

import pytest

from cachestore.errors import StoreNotFound
from cachestore.keys import Recipe, key
from cachestore.storage.catalog import Catalog, Cell, make_column
from cachestore.storage.catalog_writer import publish_catalog
from cachestore.storage.commit import commit, create_store, publish_recipe
from cachestore.storage.stats import stats
from tests.storage.stores import flip, put


@pytest.fixture
def layout(tmp_path):
    return create_store(tmp_path / "store")


def test_an_empty_store_holds_nothing(layout):
    assert stats(layout.root).as_json() == {"entries": 0, "segments": 0, "bytes": 0, "generation": -1, "recipes": (), "catalogs": ()}


def test_where_there_is_no_store_it_is_said(tmp_path):
    with pytest.raises(StoreNotFound):
        stats(tmp_path)


def test_entries_segments_and_bytes_are_counted(layout):
    digests = [put(layout, 1, 2), put(layout, 2, 3)]
    commit(layout).close()
    digests.append(put(layout, 4))
    found = stats(layout.root)
    assert (found.entries, found.segments, found.generation) == (4, 3, 1)
    assert found.bytes == sum(layout.segment(digest).stat().st_size for digest in digests)


def test_recipes_and_catalogs_are_listed(layout):
    recipe = Recipe("text", {"a": 1})
    publish_recipe(layout, recipe)
    column = make_column("text", "caption", recipe.fingerprint, {}, [[Cell(key("a"))], [Cell()]])
    publish_catalog(layout, Catalog("train", {}, {recipe.fingerprint: recipe}, ["a", "b"], [0, 0, 0], [], {}, ["{}"] * 2, (column,)))
    found = stats(layout.root).as_json()
    assert found["recipes"] == (recipe.fingerprint,)
    [shown] = found["catalogs"]
    assert {"name": "train", "generation": 1, "samples": 2, "complete": 1}.items() <= shown.items()
    assert list(shown["columns"]) == ["text/caption"]


def test_a_data_set_without_a_catalog_that_can_be_read_is_left_out(layout):
    publish_catalog(layout, Catalog("train", {}, {}, [], [0], [], {}, [], ()))
    flip(layout.catalog("train", 1), 200)
    assert stats(layout.root).catalogs == ()
