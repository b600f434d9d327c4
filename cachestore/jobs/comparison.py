"""Compares a plan with the newest catalog of its name: what changes, and which changes need `--replace`.

Called when a plan is built, and again before its catalog replaces one that was published meanwhile.
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, count, zip_longest
from typing import Final, cast

import numpy as np

from cachestore.core.errors import RecipeMismatch
from cachestore.core.inputs import ALPHA, RESOLUTIONS, SOURCE, options_for
from cachestore.core.keys import Json
from cachestore.core.samples import CAPTION
from cachestore.core.words import first_of, noun, plural
from cachestore.jobs.columns import has_same_rows, has_same_texts, inputs, numbers, own_inputs
from cachestore.storage.catalog import Catalog, KeyColumn
from cachestore.work.plan import Plan

Compare = Callable[[Plan, Catalog | None], tuple[str, ...]]
"""Describes what a plan changes in a catalog. Raises CacheStoreError if the plan may not replace it."""

_OPTIONS: Final = {"transform.pixels": "--resample"}
"""The option that decides a setting of a recipe, if its name says more to a user."""


def compare(plan: Plan, previous: Catalog | None, *, replace_allowed: bool) -> tuple[str, ...]:
    """Describe what a plan changes in the newest catalog of its name. Raises RecipeMismatch if that needs `--replace`."""
    if previous is None:
        return ()
    words: list[str] = []
    is_same = has_same_texts(plan, previous, "ids")
    ids, before = (set[str](), set[str]()) if is_same else (set(plan.ids), set(previous.ids))
    if before and not ids & before and not replace_allowed:
        raise RecipeMismatch(
            f"the data set {plan.catalog!r} has {plural(len(before), 'sample')}, and none of them is in this source, which lists"
            f" {len(ids)}: pass another --name, or --replace to replace them with this source"
        )
    for column in () if replace_allowed else previous.columns:
        _compare_column(plan, column, previous)
    if ids - before:
        words.append(f"{plural(len(ids - before), 'new sample')} under the name {plan.catalog!r}")
    if changed := [*_of_changed_captions(plan, previous), *_of_changed_own_captions(plan, previous)]:
        samples = [*dict.fromkeys(changed)]
        words.append(f"{plural(len(changed), 'caption')} changed, of {noun(len(samples), 'sample')} {first_of(samples)}")
    words += _prompts_in_words(plan, previous)
    if before - ids:
        leave = plural(len(before - ids), "sample is no longer listed and leaves", "samples are no longer listed and leave")
        words.append(f"{leave} {plan.catalog!r}")
    return tuple(words)


def _prompts_in_words(plan: Plan, previous: Catalog) -> Iterator[str]:
    """Describe which prompts come and go; a plan without text leaves them as they are."""
    if all(column.role != CAPTION for column in plan.columns):
        return
    now, before = set(plan.prompts), {(prompt, negative) for prompt, negative in previous.request.get("text", {}).get("prompts", ())}
    if now - before:
        yield f"{plural(len(now - before), 'new prompt')} for validation under the name {plan.catalog!r}"
    if before - now:
        leave = plural(len(before - now), "prompt is no longer in --prompts and leaves", "prompts are no longer in --prompts and leave")
        yield f"{leave} {plan.catalog!r}"


def _of_changed_captions(plan: Plan, previous: Catalog) -> Iterator[str]:
    """Yield, for each caption that differs, its sample, if that is in both; none if captions were chosen in another way before."""
    if has_same_rows(plan, previous, CAPTION) or dict(plan.texts) != dict(previous.texts):
        return
    at, captions = inputs(plan, CAPTION)
    if has_same_texts(plan, previous, "ids") and np.array_equal(numbers(at), numbers(previous.captions_at)):
        changed = compress(count(), map(operator.ne, captions, previous.captions))  # faster than a look-up for each row
        yield from (plan.ids[int(row)] for row in np.searchsorted(numbers(at), [*changed], side="right") - 1)
        return
    for sample, row, earlier in _in_both(plan, previous):
        both = zip_longest(captions[at[row] : at[row + 1]], previous.row_captions(earlier))
        yield from (sample for now, before in both if now != before)


def _of_changed_own_captions(plan: Plan, previous: Catalog) -> Iterator[str]:
    """Yield the samples that are in both and have other captions of single text encoders."""
    if has_same_texts(plan, previous, "extras") or all(column.role != CAPTION for column in plan.columns):
        return
    for sample, row, earlier in _in_both(plan, previous):
        if own_inputs(plan, row, CAPTION) != own_inputs(previous, earlier, CAPTION):
            yield sample


def _in_both(plan: Plan, previous: Catalog) -> Iterator[tuple[str, int, int]]:
    """Yield each sample that is in both, with its rows."""
    rows = {sample: row for row, sample in enumerate(previous.ids)}
    for row, sample in enumerate(plan.ids):
        if (earlier := rows.get(sample)) is not None:
            yield sample, row, earlier


def _compare_column(plan: Plan, earlier: KeyColumn, previous: Catalog) -> None:
    """Raise RecipeMismatch if a column of the plan would lose values of the earlier one. An added resolution loses nothing."""
    columns = [column for column in plan.columns if (column.encoder, column.role) == (earlier.encoder, earlier.role)]
    if not columns:
        return
    column = next((column for column in columns if _covers(plan, column.options, previous, earlier.options)), columns[0])
    now = plan.recipes[column.recipe]
    if earlier.fingerprint != now.fingerprint:
        changed = [_OPTIONS.get(name, name) for name in _differences(previous.recipes[earlier.fingerprint].make, now.make)]
        differs = f"were made with another model or other settings ({first_of(changed, 5)})"
    elif not _covers(plan, column.options, previous, earlier.options):
        names = sorted(name for name in {*earlier.options, *column.options} if earlier.options.get(name) != column.options.get(name))
        before, after = (", ".join(f"{name} {some.get(name)}" for name in names) for some in (earlier.options, column.options))
        differs = f"have {before}, and this run asks for {after}"
    else:
        return
    raise RecipeMismatch(
        f"the {column.encoder} values of the data set {plan.catalog!r} {differs}: pass --replace to encode them again, or another --name"
    )


def _sources_in(extras: Sequence[str]) -> set[str]:
    """The labels of the samples' sources; "" for a single source."""
    return {str(json.loads(text).get(SOURCE, "")) for text in set(extras)}


def _covers(plan: Plan, now: Mapping[str, Json], previous: Catalog, before: Mapping[str, Json]) -> bool:
    """Whether a column with options `now` contains all of one with options `before`; more variants, a flip or alphas only add to it."""
    one, other = ({name: option for name, option in some.items() if name not in {"variants", "flip", ALPHA}} for some in (now, before))
    is_no_less = int(now.get("variants", 1)) >= int(before.get("variants", 1))
    is_no_less = is_no_less and all(bool(now.get(name)) >= bool(before.get(name)) for name in ("flip", ALPHA))
    if is_no_less and one != other and (RESOLUTIONS in now or RESOLUTIONS in before):
        # Only sources that are in both are compared.
        both = _sources_in(plan.extras) & _sources_in(previous.extras)
        return all(options_for(one, {SOURCE: label}) == options_for(other, {SOURCE: label}) for label in both)
    return is_no_less and one == other


def _differences(before: Mapping[str, Json], now: Mapping[str, Json], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name in sorted({*before, *now}):
        one, other = before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += _differences(cast("Mapping[str, Json]", one), cast("Mapping[str, Json]", other), f"{prefix}{name}.")
        elif one != other:
            found.append(f"{prefix}{name}")
    return found
