"""Trainers read and fill the store themselves: `python -m cachestore.live TRAINER --store STORE SCRIPT ARGS...` (docs/live.md).

What an adapter needs, for a trainer that has none yet: docs/adapters.md. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachestore.live.adapter import Adapter as Adapter
    from cachestore.live.adapter import Refused as Refused
    from cachestore.live.arming import carry as carry
    from cachestore.live.facts import fingerprint as fingerprint
    from cachestore.live.facts import settings as settings
    from cachestore.live.names import ValueName as ValueName
    from cachestore.live.run import current as current
    from cachestore.live.self_test import check_same as check_same

_NAMES = {
    "adapter": "Adapter Refused",
    "arming": "carry",
    "facts": "fingerprint settings",
    "names": "ValueName",
    "run": "current",
    "self_test": "check_same",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - one list


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cachestore.live' has no attribute {name!r}")
    value = getattr(import_module(f"cachestore.live.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
