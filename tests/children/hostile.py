"""A folder from strangers: each module that a Python may look for lies there, and says so when it runs."""

import sys
from pathlib import Path

OURS = (
    "cachestore",
    "torch",
    "numpy",
    "safetensors",
    "lmdb",
    "filelock",
    "xxhash",
    "rich",
    "obstore",
    "PIL",
    "sitecustomize",
    "usercustomize",
)
"""Beside the modules of the standard library."""


def make_hostile(folder: Path, marker: Path) -> Path:
    """Fill a new folder. Whatever runs there adds its name to the marker, which is not there before."""
    folder.mkdir()
    says = f"with open({str(marker)!r}, 'a') as file:\n    file.write(__name__ + '\\n')\n"
    for name in {*OURS, *sys.stdlib_module_names} - {*sys.builtin_module_names}:
        (folder / f"{name}.py").write_text(says)
    (folder / "cachestore").mkdir()
    (folder / "cachestore" / "__init__.py").write_text(says)
    (folder / "cachestore" / "__main__.py").write_text(says)
    return folder


def ran(marker: Path) -> list[str]:
    """The modules of the folder that ran."""
    return marker.read_text().splitlines() if marker.exists() else []
