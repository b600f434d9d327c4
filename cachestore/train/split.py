"""Which samples of a data set are held out: by a digest of each one's id or group, so that added samples change no other's side."""

import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachestore.core.arguments import as_number, as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import canonical, digest_parts
from cachestore.core.words import did_you_mean, first_of, noun, plural
from cachestore.files.table import take
from cachestore.store.format.catalog import Catalog
from cachestore.train.selection import Selection

ID = "id"
CAPTION = "caption"


def split_indices(
    selection: Selection, fraction: object, by: str | Callable[[str], Any], seed: object
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the samples that stay, and of those that are held out; both in order. Raises BadInput."""
    part, number = as_number("share", fraction), as_whole("seed", seed, least=0)
    if not 0 <= part <= 1:
        refuse("share", "a part of the samples from 0 to 1, such as 0.02", fraction)
    limit, sides = int(part * 2**64), dict[Hashable, bool]()
    is_held = np.zeros(len(selection.rows), np.bool_)
    for index, group in enumerate(_groups(selection, by)):
        if group not in sides:
            sides[group] = int.from_bytes(digest_parts("cachestore-split", str(number), group)[:8], "big") < limit
        is_held[index] = sides[group]
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _groups(selection: Selection, by: str | Callable[[str], Any]) -> Iterator[str | bytes]:
    """The group of each sample: all samples of one come to the same side."""
    catalog = selection.catalog
    rows: list[int] = selection.rows.tolist()
    if callable(by):
        yield from (_as_group(by(sample), "what the function `by` returns") for sample in selection.ids)
    elif not isinstance(by, str):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        refuse("by", 'a column, such as "id" or "caption", or a function of the id', by)
    elif by == ID:
        yield from selection.ids
    elif by == CAPTION and len(catalog.captions):
        at = catalog.captions_at
        yield from (catalog.captions[at[row]] if at[row] < at[row + 1] else "" for row in rows)
    elif by in catalog.values:
        yield from (_as_group(value, f"the column {by!r}") for value in take(catalog.values[by], rows))
    else:
        columns: list[dict[str, Any]] = [json.loads(text) for text in take(catalog.extras, rows)]
        lacking = [sample for sample, row in zip(selection.ids, columns, strict=True) if by not in row]
        if lacking:
            raise _no_column(catalog, by, lacking, sorted({name for row in columns for name in row}))
        yield from (_as_group(row[by], f"the column {by!r}") for row in columns)


def _as_group(value: object, what: str) -> str | bytes:
    try:
        return value if isinstance(value, str) else canonical(value)  # pyright: ignore[reportArgumentType] - refused if it is not JSON
    except BadInput as error:
        raise BadInput(f"{what}: {error}", option="by") from error


def _no_column(catalog: Catalog, by: str, lacking: list[str], extras: list[str]) -> BadInput:
    known = [ID, *[CAPTION] * bool(len(catalog.captions)), *catalog.values, *extras]
    samples = f"{plural(len(lacking), 'sample')} ({first_of(map(repr, lacking))}) {noun(len(lacking), 'has', 'have')} no column {by!r}"
    return BadInput(f"{samples}; the columns are {', '.join(known)}{did_you_mean(by, known)}", option="by")
