"""Counting what is in a store."""

from itertools import accumulate

import pytest

from cachestore.core.keys import Recipe
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.read.stats import stats
from cachestore.store.write.commit import commit, publish_recipe
from tests.fakes import publish_catalog
from tests.store.stores import flip, key_of, put


def test_an_empty_store_holds_nothing(layout):
    counts = {"entries": 0, "segments": 0, "bytes": 0, "generation": -1}
    assert stats(layout.root).as_json() == {**counts, "recipes": (), "catalogs": (), "unreadable": ()}


def test_entries_segments_and_bytes_are_counted(layout):
    digests = [put(layout, 1, 2), put(layout, 2, 3)]
    commit(layout).close()
    digests.append(put(layout, 4))
    found = stats(layout.root)
    assert (found.entries, found.segments, found.generation) == (4, 3, 1)
    assert found.bytes == sum(layout.segment(digest).stat().st_size for digest in digests)


def publish(layout, *rows):
    """A data set "train" whose samples have these entries of captions; None for a caption that could not be encoded."""
    recipe = Recipe("text", {"a": 1})
    publish_recipe(layout, recipe)
    cells = [[Cell() if n is None else Cell(key_of(n)) for n in row] for row in rows]
    ids, at = [str(n) for n in range(len(rows))], [0, *accumulate(map(len, rows))]
    column = make_column("text", "caption", recipe.fingerprint, {}, cells)
    captions = [f"caption {n}" for n in range(at[-1])]
    publish_catalog(layout, Catalog("train", {}, {recipe.fingerprint: recipe}, ids, at, captions, {}, ["{}"] * len(rows), (column,)))
    return recipe.fingerprint


def test_recipes_and_catalogs_are_listed(layout):
    put(layout, 1)
    fingerprint = publish(layout, [1], [None])
    found = stats(layout.root).as_json()
    assert found["recipes"] == (fingerprint,)
    [shown] = found["catalogs"]
    assert {"name": "train", "generation": 1, "samples": 2, "complete": 1}.items() <= shown.items()
    assert list(shown["columns"]) == ["text/caption"]


def test_columns_of_several_resolutions_are_told_apart(layout):
    recipe = Recipe("latents", {"a": 1})
    columns = [make_column("latents", "image", recipe.fingerprint, {"resolution": size}, []) for size in (64, 32)]
    columns.append(make_column("latents", "control", recipe.fingerprint, {"resolution": 64}, []))
    publish_catalog(layout, Catalog("train", {}, {recipe.fingerprint: recipe}, [], [0], [], {}, [], tuple(columns)))
    assert stats(layout.root).catalogs[0].columns == ("latents/image@64", "latents/image@32", "latents/control")


@pytest.mark.parametrize("is_covered", [True, False])
def test_a_sample_of_which_an_entry_was_lost_is_not_complete(layout, is_covered):
    digests = [put(layout, n) for n in (1, 2, 3)]
    if is_covered:
        commit(layout).close()
    publish(layout, [1], [1, 2], [2, 3], [3, None], [])
    assert stats(layout.root).catalogs[0].complete == 4
    layout.segment(digests[1]).unlink()
    assert stats(layout.root).catalogs[0].complete == 2


def test_a_data_set_without_a_catalog_that_can_be_read_is_left_out(layout):
    publish_catalog(layout, Catalog("train", {}, {}, [], [0], [], {}, [], ()))
    flip(layout.catalog("train", 1), 200)
    assert stats(layout.root).catalogs == ()
