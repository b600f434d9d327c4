"""Which formats of pictures can be read here because a plugin of Pillow's is installed. Imports no plugin.

Without a plugin nothing changes. `encode.images` registers those that are installed when it first opens a picture.
"""

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Final

PLUGINS: Final[Mapping[str, str]] = {".heic": "pillow_heif", ".heif": "pillow_heif", ".hif": "pillow_heif", ".jxl": "pillow_jxl"}
"""The module that reads files of each suffix."""


@cache
def picture_plugins() -> Mapping[str, str]:
    """Return `PLUGINS` without the modules that are not installed: suffix -> module."""
    installed = {module for module in set(PLUGINS.values()) if importlib.util.find_spec(module) is not None}
    return {suffix: module for suffix, module in PLUGINS.items() if module in installed}
