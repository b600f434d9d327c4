"""What plans and catalogs say of their rows, with numpy, and whether they list the same samples."""

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cachestore.core.inputs import CROP, FRAMED, OWN_CAPTION, SIZE, framing_of, own_captions
from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json
from cachestore.core.samples import CAPTION, MASK, VIDEO, role_of
from cachestore.files.table import Digests, offsets_of
from cachestore.jobs.share.outcomes import Cells
from cachestore.jobs.share.plan import Plan, PlanColumn
from cachestore.store.format.arrays import Bytes, Mask, Numbers, numbers, rows
from cachestore.store.format.catalog import FACTS, Catalog, KeyColumn


def inputs(rows: Plan | Catalog, role: str) -> tuple[Sequence[int], Sequence[str]]:
    """Return where each row's captions (or references of a role) start, and all of these captions or references.

    Where a row brings no image of a role that `is_own`, its video stands for it, as for `images_of`.
    """
    if role == CAPTION:
        return rows.captions_at, rows.captions
    found = rows.images.get(role, ([0] * (len(rows.ids) + 1), ()))
    own = rows.images.get(VIDEO) if role_of(role).is_own else None
    if own is None or not len(found[1]):
        return found if own is None else own
    each = [_references(found, row) or _references(own, row) for row in range(len(rows.ids))]
    return list(offsets_of(map(len, each))), [reference for some in each for reference in some]


def mask_rows(rows: Plan | Catalog, role: str) -> Mask:
    """Return which rows have cells in the column of masks with this role, as a mask; as `has_mask`."""
    has = {name: np.diff(numbers(rows.images[name][0])) > 0 for name in (MASK, VIDEO) if name in rows.images}
    none = np.zeros(len(rows.ids), np.bool_)
    return has.get(MASK, none) & (has.get(VIDEO, none) == (role == VIDEO))


def images_in(rows: Plan | Catalog, row: int, role: str) -> list[str]:
    """Return the references of a role in a row."""
    found = _references(rows.images[role], row) if role in rows.images else []
    return _references(rows.images[VIDEO], row) if not found and role_of(role).is_own and VIDEO in rows.images else found


def _references(images: tuple[Sequence[int], Sequence[str]], row: int) -> list[str]:
    at, references = images
    return [references[index] for index in range(at[row], at[row + 1])]


def has_same_texts(plan: Plan, catalog: Catalog, *columns: str) -> bool:
    """Return whether these text columns have equal checksums, so are the same row by row."""
    names = (f"{column}{part}" for column in columns for part in (".text", ".offsets"))
    return bool(plan.checksums) and all(plan.checksums.get(name) == catalog.checksums.get(name) for name in names)


def has_same_rows(plan: Plan, catalog: Catalog, role: str) -> bool:
    """Return whether the sample ids and a role's inputs have equal checksums, so are the same row by row."""
    inputs = "captions" if role == CAPTION else f"images/{role}"
    starts = f"{inputs}/at"
    return has_same_texts(plan, catalog, "ids", inputs) and plan.checksums.get(starts) == catalog.checksums.get(starts)


def lists_the_same(plan: Plan, catalog: Catalog) -> bool:
    """Return whether samples, inputs and further columns of plan and catalog have equal checksums."""
    same_inputs = set(plan.images) == set(catalog.images) and all(has_same_rows(plan, catalog, role) for role in (CAPTION, *plan.images))
    return same_inputs and has_same_texts(plan, catalog, "extras")


def has_own_inputs(role: str) -> bool:
    """Return whether `own_inputs` may be other than empty for this role."""
    return role == CAPTION or role in FRAMED


def own_inputs(rows: Plan | Catalog, row: int, role: str) -> Mapping[str, Json]:
    """Return what a row's own columns decide of a role's cells: crop and size of its picture, or the captions of single text encoders.

    Most rows have none, and their JSON is not parsed.
    """
    text = rows.extras[row]
    if role == CAPTION:
        return own_captions(json.loads(text)) if f'"{OWN_CAPTION}' in text else {}
    return framing_of(json.loads(text)) if any(f'"{column}"' in text for column in (CROP, SIZE)) else {}


def cells_of(column: KeyColumn) -> Cells:
    """Return a catalog's key column as arrays."""
    facts = {name: numbers(values).reshape(-1, FACTS[name]) for name, values in column.facts.items()}
    return Cells(rows(column.keys, KEY_BYTES), rows(column.inputs, INPUT_BYTES), numbers(column.stats).reshape(-1, 2), facts)


def key_column(column: PlanColumn | KeyColumn, fingerprint: str, at: Sequence[int], cells: Cells) -> KeyColumn:
    """Return a key column from arrays; facts that no cell has are left out."""
    return KeyColumn(
        column.encoder,
        column.role,
        fingerprint,
        column.options,
        at,
        Digests(_flat(cells.keys), KEY_BYTES),
        Digests(_flat(cells.inputs), INPUT_BYTES),
        _flat(cells.stats).cast("q"),
        {name: _flat(cells.facts[name]).cast("q") for name in FACTS if name in cells.facts and (cells.facts[name] >= 0).any()},
    )


def count_complete(catalog: Catalog) -> int:
    """Return how many rows have no empty cell in any column."""
    complete = np.ones(len(catalog), np.bool_)
    for column in catalog.columns:
        empty = np.concatenate([[0], np.cumsum(~rows(column.keys, KEY_BYTES).any(axis=1))])
        at = numbers(column.at)
        complete &= empty[at[1:]] == empty[at[:-1]]
    return int(complete.sum())


def rows_without_picture(starts: Iterable[Sequence[int]]) -> list[int]:
    """Return the rows that have no cell in any of these columns, if other rows have one. `starts` says where a column's rows start."""
    has_picture = rows_with_any(starts)
    return np.flatnonzero(~has_picture).tolist() if has_picture.any() else []


def rows_with_any(starts: Iterable[Sequence[int]]) -> Mask:
    """Return which rows have something in one of these columns, as a mask; empty without columns. `starts`: as above."""
    each = [np.diff(numbers(at)) > 0 for at in starts]
    return np.logical_or.reduce(each) if each else np.zeros(0, np.bool_)


def _flat(array: Bytes | Numbers) -> memoryview:
    return memoryview(array.tobytes())
