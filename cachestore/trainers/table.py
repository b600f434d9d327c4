"""The trainers by name, each with its folder. A new one is a row here, and a folder with `format.py`, which is loaded when it is needed."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from cachestore.core.errors import BadInput
from cachestore.core.words import did_you_mean

if TYPE_CHECKING:
    from cachestore.trainers.format import Format, Writing


class _Trainer(NamedTuple):
    folder: str
    is_imported: bool = True
    is_exported: bool = True
    also_called: tuple[str, ...] = ()
    """Other names under which people know the trainer, for suggestions."""


_TRAINERS: Final[Mapping[str, _Trainer]] = {
    "sd-scripts": _Trainer("sd_scripts", also_called=("kohya", "kohya_ss")),
    "simpletuner": _Trainer("simpletuner"),
    "musubi": _Trainer("musubi"),
    "ai-toolkit": _Trainer("ai_toolkit", also_called=("ostris",)),
    "diffusion-pipe": _Trainer("diffusion_pipe", is_exported=False),
    "ltx": _Trainer("ltx"),
    "nemo-automodel": _Trainer("nemo", is_imported=False, also_called=("nemo", "automodel")),
}

WEBDATASET: Final = "webdataset"
"""The format of exchanged tars, which are no trainer's."""
IMPORTED: Final = (*(name for name, row in _TRAINERS.items() if row.is_imported), WEBDATASET)
"""The formats that can be imported."""
EXPORTED: Final = (*(name for name, row in _TRAINERS.items() if row.is_exported), WEBDATASET)
"""The formats that can be exported."""
_ALSO_CALLED: Final = {other: name for name, row in _TRAINERS.items() for other in row.also_called}


def load_format(name: str) -> "Format":
    """Return a trainer's format by its name."""
    return import_module(f"cachestore.trainers.{_TRAINERS[name].folder}.format").FORMAT


def load_formats() -> "list[Format]":
    """Return the formats of all trainers."""
    return [load_format(name) for name in _TRAINERS]


def imported_format(name: str) -> "Format":
    """Return a format that can be imported, by its name. Raises BadInput that lists those that can."""
    if name in _TRAINERS and _TRAINERS[name].is_imported:
        return load_format(name)
    if name in _TRAINERS:
        raise BadInput(f"{name} can be exported, but not imported; what can be imported is {', '.join(IMPORTED)}", option="format")
    meant = did_you_mean(name, IMPORTED, _ALSO_CALLED)
    raise BadInput(f"the format {name!r} is not known; known are {', '.join(IMPORTED)}{meant}", option="format")


def exported_format(name: str) -> "tuple[Format, Writing]":
    """Return a format that can be exported, by its name. Raises BadInput that lists those that can."""
    if name not in _TRAINERS:
        meant = did_you_mean(name, EXPORTED, _ALSO_CALLED)
        raise BadInput(f"the format {name!r} is not known; what can be exported is {', '.join(EXPORTED)}{meant}", option="format")
    made = load_format(name)
    if made.writing is None:
        able = ", ".join(one for one in EXPORTED if one != WEBDATASET)
        raise BadInput(
            f"{name} can be imported, but not exported: {made.why_not_written}. Train with a script that reads the store, or export for"
            f" {able}",
            option="format",
        )
    return made, made.writing
