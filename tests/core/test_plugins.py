"""Optional formats of pictures."""

import importlib.util

from cachestore.core import plugins


def test_only_installed_plugins_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "pillow_jxl" else None)
    assert dict(plugins.picture_plugins.__wrapped__()) == {".jxl": "pillow_jxl"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dict(plugins.picture_plugins.__wrapped__()) == {}
