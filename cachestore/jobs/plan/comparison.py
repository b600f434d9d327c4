"""Compares a plan with the newest catalog of its name: what changes, and which changes need `--replace`.

Called when a plan is built, and again before its catalog replaces one that was published meanwhile.
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, count, zip_longest
from typing import cast

import numpy as np

from cachestore.core.errors import RecipeMismatch
from cachestore.core.inputs import ALPHA, RESOLUTIONS, SOURCE, options_for
from cachestore.core.keys import Json
from cachestore.core.samples import CAPTION
from cachestore.core.spelling import option
from cachestore.core.words import first_of, noun, plural
from cachestore.jobs.plan.columns import has_same_rows, has_same_texts, inputs, own_inputs
from cachestore.jobs.plan.other_settings import OtherSetting, refusal
from cachestore.jobs.plan.recorded_paths import source_paths
from cachestore.jobs.share.plan import Plan
from cachestore.store.format.arrays import numbers
from cachestore.store.format.catalog import Catalog, KeyColumn

Compare = Callable[[Plan, Catalog | None], tuple[str, ...]]
"""Describes what a plan changes in a catalog. Raises CacheStoreError if the plan may not replace it."""


def compare(plan: Plan, previous: Catalog | None, *, replace_allowed: bool, asked: Mapping[str, Json] | None = None) -> tuple[str, ...]:
    """Describe what a plan changes in the newest catalog of its name. Raises RecipeMismatch if that needs `--replace`.

    `asked` are the options of the run, as a catalog records them: the error names those that were others, with the values they had.
    """
    if previous is None:
        return ()
    words: list[str] = []
    is_same = has_same_texts(plan, previous, "ids")
    ids, before = (set[str](), set[str]()) if is_same else (set(plan.ids), set(previous.ids))
    if before and not ids & before and not replace_allowed:
        paths = source_paths(previous.request)
        made_from = f"; they are from {first_of(paths)}" if paths else ""
        raise RecipeMismatch(
            f"the data set {plan.catalog!r} has {plural(len(before), 'sample')}, and none of them is in this source, which lists"
            f" {len(ids)}: pass another {option('name')}, or {option('replace', value=True)} to replace them with this source{made_from}",
            option="replace",
        )
    if not replace_allowed:
        differences = [one for column in previous.columns for one in _differences_of(plan, column, previous)]
        if differences:
            raise RecipeMismatch(refusal(previous, differences, asked or {}), option="replace")
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


def _differences_of(plan: Plan, earlier: KeyColumn, previous: Catalog) -> list[OtherSetting]:
    """Return why the plan would lose values of an earlier column; empty if it keeps them. An added resolution loses nothing."""
    columns = [column for column in plan.columns if (column.encoder, column.role) == (earlier.encoder, earlier.role)]
    if not columns:
        return []
    column = next((column for column in columns if _covers(plan, column.options, previous, earlier.options)), columns[0])
    now, before = plan.recipes[column.recipe].make, previous.recipes[earlier.fingerprint].make
    found: list[OtherSetting] = []
    if earlier.fingerprint != plan.recipes[column.recipe].fingerprint:
        settings = _differences(before, now) or ["version"]
        found += [OtherSetting(earlier.encoder, name, _value_of(before, name), _value_of(now, name)) for name in settings]
    if not _covers(plan, column.options, previous, earlier.options):
        names = sorted(name for name in {*earlier.options, *column.options} if earlier.options.get(name) != column.options.get(name))
        found += [OtherSetting(earlier.encoder, name, earlier.options.get(name), column.options.get(name)) for name in names]
    return found


def _value_of(make: Mapping[str, Json], setting: str) -> Json:
    """The value of a setting such as `transform.pixels`; None if there is none. File names contain dots too."""
    outer, dot, inner = setting.partition(".")
    within = make.get(outer)
    return cast("Mapping[str, Json]", within).get(inner) if dot and isinstance(within, Mapping) else within


def _prompts_in_words(plan: Plan, previous: Catalog) -> Iterator[str]:
    """Describe which prompts come and go; a plan without text leaves them as they are."""
    if all(column.role != CAPTION for column in plan.columns):
        return
    now, before = set(plan.prompts), {(prompt, negative) for prompt, negative in previous.request.get("text", {}).get("prompts", ())}
    if now - before:
        yield f"{plural(len(now - before), 'new prompt')} for validation under the name {plan.catalog!r}"
    if before - now:
        prompts = option("prompts")
        leave = plural(len(before - now), f"prompt is no longer in {prompts} and leaves", f"prompts are no longer in {prompts} and leave")
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
