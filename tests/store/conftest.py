"""Stores for tests: an empty one, and one with one of everything."""

import pytest

from cachestore.store.write.commit import commit, create_store, publish_recipe
from tests.fakes import publish_catalog
from tests.store.stores import RECIPE, catalog_of, put


@pytest.fixture
def layout(tmp_path):
    return create_store(tmp_path / "store")


@pytest.fixture
def full(layout):
    """A store with one of everything: two segments, an index, a recipe, a catalog that needs entries 1 to 3."""
    put(layout, 1, 2)
    put(layout, 3)
    publish_recipe(layout, RECIPE)
    commit(layout).close()
    publish_catalog(layout, catalog_of(1, 2, 3))
    return layout
