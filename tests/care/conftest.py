"""Stores for tests, as the tests of the store have them."""

from tests.store.conftest import full, layout

__all__ = ["full", "layout"]
