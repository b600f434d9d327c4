"""The child of `cachestore live --check`: imports a trainer's modules from a checkout, and says what is at each plug point."""

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.live.adapter import Adapter, PlugPoint, trouble_of
from cachestore.live.arming import load_adapter

_BELOW: Final = ("", "src")
"""Where the modules of a checkout begin."""
THERE: Final = "there"
NOT_NEEDED: Final = "no module has such a name, and none needs it"
UNTOLD: Final = "cannot be told"
"""How the state of a plug point begins whose module needs a package that is not installed here."""


def main(arguments: Sequence[str]) -> int:
    """Print as JSON the state of each plug point. The arguments: the adapter, the checkout, and a folder for an adapter's module."""
    name, checkout, *folders = arguments
    sys.path[:0] = [str(Path(checkout, below).absolute()) for below in _BELOW]
    sys.path += folders
    with redirect_stdout(sys.stderr):  # modules may print while they are imported
        try:
            adapter = load_adapter(name)
            result: dict[str, object] = {"points": [*_states(adapter, checkout)]}
        except BadInput as error:
            result = {"error": str(error)}
    print(json.dumps(result))
    return 0


def _states(adapter: Adapter, checkout: str) -> Iterator[dict[str, object]]:
    for point in adapter.points:
        for name in _modules(point, checkout) or [point.module]:
            yield {"module": name, "name": point.name, **_state(adapter, point, name, checkout)}


def _modules(point: PlugPoint, checkout: str) -> list[str]:
    if "*" not in point.module:
        return [point.module]
    roots = [Path(checkout, below) for below in _BELOW]
    files = [(root, file) for root in roots for file in root.glob(f"{point.module.replace('.', '/')}.py")]
    return sorted({".".join(file.relative_to(root).with_suffix("").parts) for root, file in files})


def _state(adapter: Adapter, point: PlugPoint, name: str, checkout: str) -> dict[str, object]:
    if "*" in name:
        return {"state": NOT_NEEDED if point.is_optional else "missing: no module has such a name", "version": None}
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever stands in the trainer's module
        lacking = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
        if lacking == name.partition(".")[0]:
            return {"state": f"is not in {checkout}: give the folder of a checkout of {adapter.name}", "version": None}
        if lacking is not None:
            return {"state": f"{UNTOLD}: the package {lacking!r} is not installed here ({sys.executable})", "version": None}
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"state": f"cannot be imported: {reason}", "version": None}
    return {"state": trouble_of(module, point) or THERE, "version": adapter.version(module)}
