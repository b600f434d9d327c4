"""Makes and publishes the catalog of a pass: the plan's key columns, and those that other encoders made earlier under the same name."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from cachestore.core.errors import Superseded
from cachestore.core.inputs import CAPTIONS, NO_STAT, Stat, cells_each, companions, is_of_files, references_of, request_for
from cachestore.core.keys import Json
from cachestore.core.samples import CAPTION, IMAGE, MASK
from cachestore.core.words import plural
from cachestore.jobs.plan.columns import cells_of, images_in, inputs, key_column, lists_the_same, mask_rows
from cachestore.jobs.plan.recorded_paths import gone_paths
from cachestore.jobs.run.presence import Presence
from cachestore.jobs.run.task import Job
from cachestore.jobs.share.outcomes import Outcomes
from cachestore.jobs.share.plan import Plan
from cachestore.store.format.arrays import numbers
from cachestore.store.format.catalog import Catalog, KeyColumn, made_by
from cachestore.store.format.line import list_line
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.listing_numbers import listing_numbers
from cachestore.store.write.made import check_no_session


def make_catalog(presence: Presence, job: Job, outcomes: Outcomes, failed: Mapping[int, str], previous: Catalog | None) -> Catalog:
    """Return the catalog after a pass: the plan's columns, and the previous catalog's columns of other encoders."""
    plan = job.plan
    columns = [_column(plan, number, outcomes, failed) for number in range(len(plan.columns))]
    made = {column.encoder for column in columns}
    # Masks and other conditions are made together with their pictures.
    are_whole = any(column.role == IMAGE for column in columns)
    request: dict[str, Json] = {column.encoder: dict(job.request) for column in columns}
    recipes = {column.fingerprint: plan.recipes[one.recipe] for column, one in zip(columns, plan.columns, strict=True)}
    if previous is not None:
        for column in previous.columns:
            if column.encoder in made or (are_whole and column.role != CAPTION):
                continue
            columns.append(_reused_column(presence, previous, column))
            request[column.encoder] = previous.request.get(column.encoder, {})
            recipes[column.fingerprint] = previous.recipes[column.fingerprint]
    return Catalog(
        name=plan.catalog,
        request=request,
        recipes=recipes,
        ids=plan.ids,
        captions_at=plan.captions_at,
        captions=plan.captions,
        images=plan.images,
        extras=plan.extras,
        columns=tuple(sorted(columns, key=lambda column: (column.encoder, column.role))),
        texts=plan.texts,
        prompts=_prompts(plan, failed) if "text" in made or previous is None else previous.prompts,
        listing=max(job.listing_number, previous.listing if previous is not None else 0),
        made=made_by(request),
    )


def publish_catalog(
    presence: Presence, job: Job, outcomes: Outcomes, failed: Mapping[int, str], newest: Callable[[], Catalog | None]
) -> tuple[Catalog, int, str]:
    """Publish the catalog as the generation after the one that it was compared with; return catalog, generation and digest.

    If another generation was published meanwhile, compare with that one, too: `newest` reads it. A catalog equal to the newest one is
    published only if a source or model has moved since, so that the new path is recorded. Raises RecipeMismatch, Superseded, and BadInput
    if a session has begun a data set of this name.
    """
    while True:
        # Before `newest`: if a generation is published from here on, the number that is tried below is taken.
        last = list_line(job.layout, job.plan.catalog).highest
        check_no_session(job.layout, job.plan.catalog)
        previous = newest()
        if previous is not None:
            job.compare(previous)
        draft = draft_of(make_catalog(presence, job, outcomes, failed, previous))
        if previous is not None:
            may_follow = _may_follow(job, previous)
            has_moved = bool(gone_paths(previous.request, draft.catalog.request))
            # While a run may still publish a listing between these two, an equal catalog is published all the same: that run must find
            # a newer listing than its own.
            is_awaited = any(previous.listing < number < job.listing_number for number in listing_numbers(job.layout, previous.name))
            is_same = draft.is_same_as(previous) and not has_moved and not is_awaited
            if is_same or (draft.digest == previous.digest and not may_follow):
                return draft.catalog, previous.generation, previous.digest
            if not may_follow:
                raise Superseded(
                    f"another run listed the source of the data set {previous.name!r} after this run did, and published it as"
                    f" generation {previous.generation} ({plural(len(previous.ids), 'sample')}; this run lists"
                    f" {len(job.plan.ids)}). This run replaced nothing; what it encoded is in the store. Run the same"
                    " command again to list the source as it is now"
                )
        if publish_draft(job.layout, draft, after=last):
            return draft.catalog, last + 1, draft.digest


def _may_follow(job: Job, previous: Catalog) -> bool:
    """Whether this listing may replace an earlier catalog: if it is newer, or if it is this pass's own.

    An older listing may add an encoder to the same samples: then it replaces nothing of the newer one.
    """
    if job.listing_number > previous.listing:
        return True
    made = {column.encoder for column in job.plan.columns}
    adds = made.isdisjoint(column.encoder for column in previous.columns)
    return lists_the_same(job.plan, previous) and (adds or 0 < job.listing_number == previous.listing)


def _prompts(plan: Plan, failed: Mapping[int, str]) -> list[tuple[str, str]]:
    """The plan's prompts without those of which a text could not be encoded."""
    requests = [plan.unit(index).request for index in failed] if plan.prompts else []
    lost = {str(request.get(CAPTION)) for request in requests if CAPTIONS not in request}
    return [pair for pair in plan.prompts if lost.isdisjoint(pair)]


def _column(plan: Plan, number: int, outcomes: Outcomes, failed: Mapping[int, str]) -> KeyColumn:
    """A key column of this plan; a failed cell keeps its input and has no key."""
    column = plan.columns[number]
    at, units = plan.cells[number]
    indices = numbers(units)
    cells = outcomes.cells(indices)
    cells.keys[np.isin(indices, list(failed))] = 0
    return key_column(column, plan.recipes[column.recipe].fingerprint, at, cells)


def _reused_column(presence: Presence, previous: Catalog, column: KeyColumn) -> KeyColumn:
    """A column of the previous catalog; a cell stays only if the sample's input is still the same."""
    inputs_at, values = inputs(presence.plan, column.role)
    each, at = cells_each(column.options), inputs_at
    if each > 1 or column.encoder == MASK:
        counts = np.diff(numbers(inputs_at)) * each
        at = [0, *np.cumsum(counts * mask_rows(presence.plan, column.role) if column.encoder == MASK else counts).tolist()]
    indices = presence.earlier_cells(previous, column, at)
    cells = cells_of(column).take(indices)
    if is_of_files(column.role, column.options):
        for cell in np.flatnonzero(indices >= 0).tolist():
            presence.rise()
            row = int(np.searchsorted(numbers(at), cell, side="right")) - 1
            others = (role for role in companions(column.role, column.options) if role in presence.plan.images)
            images = {role: images_in(presence.plan, row, role) for role in others}
            number, variant = divmod(cell - at[row], each)
            request = request_for(column.role, column.options, values[inputs_at[row] + number], images, variant)
            stat = (int(cells.stats[cell, 0]), int(cells.stats[cell, 1]))
            now = _record_of_same(presence, request, stat, cells.inputs[cell].tobytes())
            indices[cell], cells.stats[cell] = (-1, NO_STAT) if now is None else (indices[cell], now)
        cells = replace(cells_of(column).take(indices), stats=cells.stats)
    return key_column(column, column.fingerprint, at, cells)


def _record_of_same(presence: Presence, request: Mapping[str, Json], stat: Stat, digest: bytes) -> Stat | None:
    """The stat record of a request's files if they have the same bytes as when `stat` and `digest` were taken, else None."""
    if not presence.is_recheck and stat != NO_STAT and presence.stat(references_of(request)) == stat:
        return stat
    try:
        found, now = presence.digest(request)
    except OSError:
        return None
    return now if found == digest else None
