"""Names that Windows refuses, and those that Windows and macOS take for one. A store may be copied there, so the rules hold everywhere."""

import re
from collections.abc import Iterable
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.files.paths import encode_name

_DEVICES: Final = frozenset(
    {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$", *(f"{port}{n}" for port in ("COM", "LPT") for n in "0123456789¹²³")}
)
_CHARACTERS: Final = re.compile(r'[<>:"|?*\\\x00-\x1f]')


def why_refused(name: str) -> str:
    """Return why no file or folder of Windows can have this name, as a clause; empty if one can."""
    if name.partition(".")[0].rstrip(" ").upper() in _DEVICES:
        return "it is the name of a device"
    if name.endswith((".", " ")):
        return "a dot or space at the end is dropped"
    found = _CHARACTERS.search(name)
    return f"{found[0]!r} is not allowed" if found else ""


def check_new_name(name: str, known: Iterable[str]) -> None:
    """Raise BadInput for the name of a new data set whose folder Windows refuses, or that differs from a known one by case alone."""
    encoded = encode_name(name)
    if why := why_refused(encoded):
        raise BadInput(
            f"no folder of Windows can be called {name!r} ({why}), and stores are copied there: give the data set another name",
            option="name",
        )
    for other in known:
        if other != name and encode_name(other).lower() == encoded.lower():
            raise BadInput(
                f"there is a data set {other!r}, and Windows and macOS take {name!r} for it: take that name, or another one", option="name"
            )
