"""Trainers read and fill the store themselves: `python -m cachestore.live TRAINER --store STORE SCRIPT ARGS...` (docs/live.md).

What an adapter needs, for a trainer that has none yet: docs/adapters.md. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachestore.live.adapter import Adapter as Adapter
    from cachestore.live.adapter import Refused as Refused
    from cachestore.live.by_name import ByName as ByName
    from cachestore.live.facts import KeyFields as KeyFields
    from cachestore.live.facts import digests as digests
    from cachestore.live.facts import fingerprint as fingerprint
    from cachestore.live.facts import ids_of as ids_of
    from cachestore.live.facts import precision as precision
    from cachestore.live.facts import settings as settings
    from cachestore.live.named_files import NamedFiles as NamedFiles
    from cachestore.live.names import ValueName as ValueName
    from cachestore.live.npz import NpzFiles as NpzFiles
    from cachestore.live.packing import key_of as key_of
    from cachestore.live.packing import pack as pack
    from cachestore.live.packing import unpack as unpack
    from cachestore.live.run import current as current
    from cachestore.live.self_test import check_same as check_same
    from cachestore.live.shared_count import SharedCount as SharedCount
    from cachestore.live.tested import SelfTest as SelfTest

_NAMES = {
    "adapter": "Adapter Refused",
    "by_name": "ByName",
    "facts": "KeyFields digests fingerprint ids_of precision settings",
    "named_files": "NamedFiles",
    "names": "ValueName",
    "npz": "NpzFiles",
    "packing": "key_of pack unpack",
    "run": "current",
    "self_test": "check_same",
    "shared_count": "SharedCount",
    "tested": "SelfTest",
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
