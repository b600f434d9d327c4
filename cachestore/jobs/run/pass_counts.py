"""What a pass reports: what it made, which samples failed, and which files changed meanwhile."""

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cachestore.core.inputs import ALPHA, references_of
from cachestore.core.keys import KEY_BYTES, Json, Key
from cachestore.core.samples import CAPTION, IMAGE, MASK, NOTHING, SOME, VIDEO
from cachestore.core.words import first_of, named_prompt, plural
from cachestore.files.table import Digests
from cachestore.jobs.plan.columns import images_in
from cachestore.jobs.run.presence import Presence
from cachestore.jobs.share.outcomes import MADE, Outcomes
from cachestore.jobs.share.plan import Plan
from cachestore.store.format.arrays import Mask, numbers
from cachestore.store.read.held import as_text
from cachestore.store.read.snapshot import Snapshot

_NAMED_FAILURES: Final = 10_000
_NAMED_CHANGES: Final = 100
_LOOK_SECONDS: Final = 5.0
_TOGETHER: Final = 65_536


def list_changed(presence: Presence, outcomes: Outcomes) -> list[Json]:
    """Return the references of files with other bytes than when the pass read them. Looks for 5 seconds at most.

    If a unit has several files, all are named, as it is not recorded which one changed.
    """
    found: set[str] = set()
    until = time.monotonic() + _LOOK_SECONDS
    for index in np.flatnonzero(presence.of_files() & (outcomes.states == MADE) & (outcomes.stats[:, 0] >= 0)).tolist():
        if time.monotonic() > until or len(found) >= _NAMED_CHANGES:
            break
        if not presence.is_unchanged(index, outcomes) and presence.has_other_bytes(index, outcomes):
            found.update(references_of(presence.plan.unit(index).request))
    return list[Json](sorted(found))


def recheck_of(plan: Plan, read: Mask, changed: Mask) -> dict[str, Json]:
    """Return how many samples have units among those that were `read` again and among the `changed` ones, and the names of these.

    Names 100 samples at most.
    """
    rows = _rows_of(plan, changed)
    names = [plan.ids[row] for row in rows[:_NAMED_CHANGES]]
    return {"samples": len(_rows_of(plan, read)), "changed": len(rows), "names": names}


def _rows_of(plan: Plan, units: Mask) -> list[int]:
    """The rows with a cell of one of these units."""
    each = [np.repeat(np.arange(len(plan.ids)), np.diff(numbers(at)))[units[numbers(of)]] for at, of in plan.cells]
    return np.unique(np.concatenate(each)).tolist() if each else []


def count_masks(plan: Plan, outcomes: Outcomes) -> dict[str, Json]:
    """Return the samples of whose mask nothing counts (`empty`), and those whose mask has colours (`coloured`): up to 100 names of each.

    With `--alpha mask` also of how many samples the `alpha` is the mask, and how many of these are `varying`. Empty without masks.
    """
    weights = outcomes.facts.get("weight")
    if weights is None:
        return {}
    colours = outcomes.facts.get("coloured", np.zeros_like(weights))
    empty, coloured, alpha, varying = set[int](), set[int](), set[int](), set[int]()
    is_asked = False
    for column, (at, units) in zip(plan.columns, plan.cells, strict=True):
        if column.encoder != MASK:
            continue
        rows = np.repeat(np.arange(len(plan.ids)), np.diff(numbers(at)))
        found = weights[numbers(units), 0]
        empty.update(rows[found == NOTHING].tolist())
        coloured.update(rows[colours[numbers(units), 0] > 0].tolist())
        if column.options.get(ALPHA) == MASK:
            is_asked = True
            own = np.array([_is_own(plan, row) for row in range(len(plan.ids))], np.bool_)
            alpha.update(rows[own[rows] & (found >= 0)].tolist())
            varying.update(rows[own[rows] & ((found == NOTHING) | (found == SOME))].tolist())
    named: dict[str, Json] = {}
    for name, those in (("empty", empty), ("coloured", coloured)):
        named |= {name: len(those), f"{name}_names": [plan.ids[row] for row in sorted(those)[:_NAMED_CHANGES]]}
    return named | ({"alpha": len(alpha), "varying": len(varying)} if is_asked else {})


def _is_own(plan: Plan, row: int) -> bool:
    """Whether a row's mask is its own picture or video."""
    own = images_in(plan, row, VIDEO) or images_in(plan, row, IMAGE)
    return bool(own) and images_in(plan, row, MASK) == own


def masks_in_words(found: Mapping[str, Any]) -> list[str]:
    """Return what `count_masks` found as lines for a person."""
    lines: list[str] = []
    if found.get("empty"):
        mask = plural(int(found["empty"]), "mask is", "masks are")
        lines.append(f"{mask} black everywhere, so nothing of these samples counts ({first_of(found['empty_names'])})")
    if found.get("coloured"):
        mask = plural(int(found["coloured"]), "mask has", "masks have")
        lines.append(f"{mask} colours, of which the luminance counts: red is 0.3 ({first_of(found['coloured_names'])})")
    if "alpha" in found:
        of = plural(int(found["alpha"]), "picture or clip", "pictures and clips")
        none = " so all of each counts: is --alpha mask meant?" if found["alpha"] and not found["varying"] else ""
        lines.append(f"the alpha of {found['varying'] or 'none'} of {of} leaves a part out{',' if none else ''}{none}")
    return lines


def recheck_in_words(found: Mapping[str, Any]) -> str:
    """Return what `--recheck` found as a line for a person."""
    samples, files = int(found["samples"]), int(found.get("model_files", 0))
    names = f" ({first_of(found['names'])})" if found["names"] else ""
    model = f"; {plural(files, 'file')} of the model, {found['model_files_changed'] or 'none'} of them changed" if files else ""
    return f"read again: the files of {plural(samples, 'sample')}, {found['changed'] or 'none'} of them changed{names}{model}"


def count_made(outcomes: Outcomes, failed: Mapping[int, str], snapshot: Snapshot) -> tuple[int, int]:
    """Return how many distinct keys a pass made, and the bytes of their entries."""
    made = outcomes.states == MADE
    made[list(failed)] = False
    keys = np.unique(as_text(outcomes.keys[made]))
    count = size_bytes = 0
    for start in range(0, len(keys), _TOGETHER):
        some = Digests(memoryview(keys[start : start + _TOGETHER].tobytes()), KEY_BYTES)
        sizes = [locations[0].size_bytes for locations in snapshot.find([Key(raw) for raw in some]) if locations]
        count, size_bytes = count + len(sizes), size_bytes + sum(sizes)
    return count, size_bytes


OF_SOURCE: Final = "source"
"""In place of an encoder, in the failures of what the source has and is no sample."""


def list_refused(plan: Plan) -> list[Json]:
    """Return rows of sample (or place), encoder and reason for what the source has and cannot be used."""
    return [{"sample": sample, "encoder": OF_SOURCE, "reason": reason} for sample, reason in plan.refused]


def list_failures(plan: Plan, failed: Mapping[int, str]) -> list[Json]:
    """Return rows of sample, encoder and reason: first what the source has and cannot be used, then the failed units."""
    return [*list_refused(plan)[:_NAMED_FAILURES], *list_failed(plan, failed)]


def list_failed(plan: Plan, failed: Mapping[int, str]) -> list[Json]:
    """Return rows of sample, encoder and reason of failed units, each once: all variants of a damaged picture give one row.

    A failed unit that no sample refers to has "" as its sample if it is the empty caption, and "(prompt) TEXT" if it is a prompt; with
    `fill` it has its key.
    """
    if not failed:
        return []
    rows: dict[tuple[str, str, str], None] = {}
    named: set[int] = set()
    for column, (at, units) in zip(plan.columns, plan.cells, strict=True):
        for cell in np.flatnonzero(np.isin(numbers(units), list(failed))).tolist():
            row = int(np.searchsorted(numbers(at), cell, side="right")) - 1
            named.add(units[cell])
            rows[plan.ids[row], column.encoder, failed[units[cell]]] = None
    alone = [
        (_name_alone(plan, index), plan.recipes[plan.recipe_of(index)].encoder, failed[index]) for index in sorted(set(failed) - named)
    ]
    listed = [*rows, *alone][:_NAMED_FAILURES]
    return [{"sample": sample, "encoder": encoder, "reason": reason} for sample, encoder, reason in listed]


def _name_alone(plan: Plan, index: int) -> str:
    if plan.ids_are_keys:
        return plan.unit_ids[index].hex()
    text = str(plan.unit(index).request.get(CAPTION, ""))
    return named_prompt(text) if text else ""
