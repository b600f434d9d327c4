"""`--config FILE.toml`: options of `precompute` in a file. Options on the command line override it.

model = "path-or-id"
store = "cache/"
resolution = 1024

[[source]]
data = "photos/"

[[source]]
data = "faces/{000..012}.tar"
name = "faces"
repeats = 10
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, cast

from cachestore.core.arguments import refuse_address
from cachestore.core.errors import BadInput
from cachestore.core.samples import Source
from cachestore.core.words import nearest
from cachestore.files.opening import read_foreign
from cachestore.jobs.plan.options import PrecomputeRequest, option_of, parse_value, read_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE: Final = "source"
_LIMIT_BYTES: Final = 1 << 20


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the fields of a PrecomputeRequest that a file gives. Relative paths start at the current folder, as on the command line.

    Raises BadInput with file, table and field.
    """
    refuse_address("--config", str(path))
    try:
        found = tomllib.loads(read_foreign(Path(path), limit_bytes=_LIMIT_BYTES).decode())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{path} is not TOML: {error}; correct it there") from error
    values = {name.replace("-", "_"): value for name, value in found.items()}
    tables = values.pop(_TABLE, None)
    known = {one.name: one for one in fields(PrecomputeRequest) if option_of(one).is_for_files}
    _refuse_unknown(values, [*known, _TABLE], str(path))
    checked: dict[str, Any] = {}
    for name, value in values.items():
        read = parse_value if isinstance(value, str) else read_value
        checked[name] = read(known[name], value, f"{path}: {name}")
    if tables is not None:
        checked["sources"] = _sources(tables, path)
    return checked


def _sources(tables: object, path: str | Path) -> tuple[Source, ...]:
    listed = cast("list[dict[str, Any]]", tables)
    if not isinstance(tables, list) or not all(type(table) is dict for table in listed):
        raise BadInput(f"{path}: {_TABLE} must be an array of tables: write [[{_TABLE}]]")
    found: list[Source] = []
    for number, table in enumerate(listed, start=1):
        where = f"{path}, [[{_TABLE}]] {number}"
        values = {name.replace("-", "_"): value for name, value in table.items()}
        _refuse_unknown(values, [one.name for one in fields(Source)], where)
        if not isinstance(values.get("data"), str) or not values["data"]:
            wrong = f"not {values['data']!r}" if "data" in values else "and is missing"
            raise BadInput(f"{where}: data must be a path, {wrong}")
        try:
            found.append(Source(**values))
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from error
    return tuple(found)


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := next((name for name in values if name not in known), None):
        meant = nearest(unknown, known)
        shown = f"[[{meant}]]" if meant == _TABLE else meant
        hint = f" (did you mean {shown}?)" if meant is not None else ""
        raise BadInput(f"{where}: unknown field {unknown!r}{hint}; known fields are {', '.join(known)}")
