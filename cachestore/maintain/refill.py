"""Repair a store; with `refill`, encode again what was lost, from the sources and models that made it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from cachestore.core.arguments import as_switch, check_calls
from cachestore.core.errors import BadInput, FormatError, RecipeMismatch, naming_extras
from cachestore.core.keys import Json, Key, canonical
from cachestore.core.ranks import RankInfo
from cachestore.core.words import first_of, plural
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import MARKER, Layout
from cachestore.jobs.columns import images_in
from cachestore.jobs.comparison import compare
from cachestore.jobs.options import PrecomputeRequest
from cachestore.jobs.pass_counts import OF_SOURCE
from cachestore.jobs.planning import Planned, list_request, plan_request, published
from cachestore.jobs.precompute import precompute_here
from cachestore.jobs.reconcile import Reconciler
from cachestore.jobs.recorded_paths import is_there, source_paths
from cachestore.jobs.task import Cancel, Job, OnProgress
from cachestore.maintain.collect import look_further, lost_catalogs
from cachestore.maintain.moved import NewPaths, check_names, files_where_they_are, new_paths, request_at
from cachestore.source.combined import Moved
from cachestore.storage.catalog import Catalog, list_generations, list_names, newest_catalog
from cachestore.storage.losses import needed_by
from cachestore.storage.repair import RepairReport, finish_report, foresee_repair, note_unmade, repair_store
from cachestore.storage.snapshot import load_snapshot, open_layout
from cachestore.store.unfinished import list_data_sets, not_there
from cachestore.work.pace import with_pace
from cachestore.work.passes import read_done
from cachestore.work.plan import Plan, read_plan
from cachestore.work.progress import Observer
from cachestore.work.retention import ReportedCatalog, generation_of_pass, reported_catalogs

_log = logging.getLogger("cachestore")


@naming_extras()
def repair(
    path: str | Path,
    *,
    refill: bool = False,
    source: Moved | None = None,
    model: str | Path | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    name: str | None = None,
) -> RepairReport:
    """Make a store consistent, and with `refill` complete.

    Args:
        path: the store.
        refill: encode again the entries that data sets need and that have no valid copy, with the same source and model. Samples and
            captions of a data set stay as they are: a source that lists others is refused.
        source: the new path of a source that was moved; for several sources a mapping from name to path. Without `refill` it is only
            used to build a lost catalog again.
        model: with `refill`, the new path of the model; it must have the fingerprint of the data set.
        vae: with `refill`, the new path of the VAE.
        text_encoder: with `refill`, the new path of the text encoder.
        dry_run: report what would be done and change nothing. With `refill`, the sources and models that would be needed are checked.
        on_progress: with `refill`, called about once a second with the counts that `precompute` gives.
        cancel: with `refill`, anything with `is_set()`. Once it is set, the work ends after the current batch: what is encoded is
            published, and Incomplete is raised.
        name: with `refill`, encode only what this data set lacks.

    Raises:
        Incomplete: cancelled; the same call continues from there.
        StoreNotFound: there is no store at this path.
        FormatError: the store was written by a newer version; nothing was changed.
        RecipeMismatch: the model is not the one of the data set.
        BadInput: the source or model cannot be found (pass its new path), or the source lists other samples or captions now.
    """
    refill, dry_run = as_switch("refill", refill), as_switch("dry_run", dry_run)
    check_calls(on_progress, cancel)
    moved = new_paths(source, model=model, vae=vae, text_encoder=text_encoder)
    if not refill:
        _check_use(moved)
    if name is not None:
        _check_name(path, name, refill=refill)
    if dry_run:
        return _foresee(path, moved, name, refill=refill)
    report = repair_store(path, look_further=look_further)
    layout = open_layout(Layout.at(path))
    lost = lost_catalogs(layout)
    check_names(_newest(layout), source)
    rebuilt = tuple(reported.name for reported in lost if _rebuild(layout, reported, moved))
    report = replace(report, rebuilt=(*report.rebuilt, *rebuilt))
    refilled = 0
    for catalog in _newest(layout, name) if refill else ():
        if lacking := _lacking(layout, catalog):
            for request in _requests(layout, catalog, moved):
                _look(layout, catalog, request, {key for key, _sample in _lacking(layout, catalog)})
                refilled += _run_again(layout, request, on_progress, cancel)
            note_unmade(layout, _unmade(layout, catalog.name, lacking))
    if refill or lost:
        report = finish_report(layout.root, replace(report, refilled=refilled), look_further=look_further)
    check_for_reading(layout)
    return report


def _foresee(path: str | Path, moved: NewPaths, name: str | None, *, refill: bool) -> RepairReport:
    """Return what `repair` would do. With `refill` this raises what it would raise about the sources and models; encodes nothing."""
    report, missing = foresee_repair(path, look_further=look_further)
    if MARKER in report.rebuilt:
        return report  # nothing else can be checked without the marker
    layout = open_layout(Layout.at(path))
    check_names(_newest(layout), moved.source)
    for catalog in _newest(layout, name) if refill else ():
        if not missing.isdisjoint(key for key, _sample in needed_by(catalog)):
            for request in _requests(layout, catalog, moved):
                _look(layout, catalog, request, missing, is_dry=True)
    return replace(report, rebuilt=(*report.rebuilt, *(reported.name for reported in lost_catalogs(layout))))


def _newest(layout: Layout, name: str | None = None) -> Iterator[Catalog]:
    """Yield the newest catalog of each data set, or only of the named one."""
    yield from filter(None, (newest_catalog(layout, one) for one in list_names(layout) if name in (None, one)))


def _check_use(moved: NewPaths) -> None:
    """Warn that without `refill` a model is not used, and a source only to build a lost catalog again."""
    if moved.models:
        given = next(iter(moved.models))
        _log.warning("%s needs `--refill`, which encodes again what was lost: without it no model is used", given)
    if moved.source is not None:
        _log.warning("--source without `--refill` is only used to rebuild a data set's lost catalog: nothing is encoded again")


def _check_name(path: str | Path, name: str, *, refill: bool) -> None:
    if not refill:
        raise BadInput("--name needs --refill: damaged files belong to the store, not to a data set")
    layout = open_layout(Layout.at(path))
    if name not in (there := list_data_sets(layout)):
        raise not_there(layout, name, there)


def _rebuild(layout: Layout, reported: ReportedCatalog, moved: NewPaths) -> bool:
    """Build a missing catalog again from the plan and ledgers of its pass. Returns False if the result is not the same."""
    try:
        _rebuild_before(layout, reported, moved)
        plan, done = read_plan(layout, reported.ref.plan), read_done(layout, reported.ref)
        hints: Mapping[str, Json] = done.request if done is not None else {}
        listing = int(done.report.get("listing", 0)) if done is not None else 0
        source = files_where_they_are(hints, moved, layout)
        job = Job(layout, plan, (), source, RankInfo(), "repair", request=hints)
        return Reconciler(job, reported.ref).rebuild_catalog(reported.generation, reported.digest, listing)
    except (FormatError, FileNotFoundError):
        return False


def _rebuild_before(layout: Layout, reported: ReportedCatalog, moved: NewPaths) -> None:
    """Build the earlier generation from which a pass took its units, if it is missing too."""
    earlier = generation_of_pass(layout, reported.ref)
    if earlier is None or earlier >= reported.generation or earlier in list_generations(layout, reported.name):
        return
    same = (each for each in reported_catalogs(layout) if (each.name, each.generation) == (reported.name, earlier))
    for each in sorted(same, key=lambda each: (each.ended, each.ref.number)):
        if _rebuild(layout, each, moved):
            return


def _lacking(layout: Layout, catalog: Catalog) -> list[tuple[Key, str]]:
    """Return the missing entries of a catalog: a pair of key and sample for each sample that needs one."""
    needed = list(needed_by(catalog))
    with closing(load_snapshot(layout)) as snapshot:
        found = snapshot.find([key for key, _sample in needed])
    return [each for each, locations in zip(needed, found, strict=True) if not locations]


def _unmade(layout: Layout, name: str, lacking: Sequence[tuple[Key, str]]) -> dict[Key, tuple[str, str]]:
    """Return the missing entries that could not be made and whose samples are still in the data set: its name and the sample, by key."""
    catalog = newest_catalog(layout, name)
    if catalog is None:
        return {}
    unmade = {sample for row, sample in enumerate(catalog.ids) if not catalog.is_complete(row)}
    named = {key for key, _sample in needed_by(catalog)}
    return {key: (name, sample) for key, sample in lacking if sample in unmade and key not in named}


def _requests(layout: Layout, catalog: Catalog, moved: NewPaths) -> list[PrecomputeRequest]:
    """Return each request that made a catalog, for the encoders whose columns it made, with the new paths."""
    encoders: dict[bytes, list[str]] = {}
    for encoder, hints in catalog.request.items():
        encoders.setdefault(canonical(hints), []).append(encoder)
    requests = {canonical(hints): PrecomputeRequest.from_hints(hints, store=str(layout.root)) for hints in catalog.request.values()}
    return [replace(request_at(request, moved), encode=request.made_by(encoders[hints])) for hints, request in requests.items()]


def _look(layout: Layout, catalog: Catalog, request: PrecomputeRequest, missing: AbstractSet[Key], *, is_dry: bool = False) -> None:
    """Raise what keeps a request from encoding a catalog's missing entries again: another source or model, or pictures that are gone."""
    if away := [path for path in source_paths({"": request.hints()}) if not is_there(path)]:
        raise BadInput(f"{first_of(away)} is not there; nothing was encoded: put it back, or pass --source with its new path")
    wanted = plan_request(layout, request, list_request(request), compare_with=partial(_check_unchanged, request), is_dry=is_dry)
    if not is_dry:
        wanted = published(wanted)
    if gone := _gone(catalog, wanted, missing):
        raise BadInput(
            f"the pictures of {plural(len(gone), 'sample')} of {catalog.name!r} with lost entries are gone ({first_of(gone)});"
            " nothing was encoded:"
            " put them back, or pass --source with their new path (`cachestore precompute` continues without them)"
        )


def _run_again(layout: Layout, request: PrecomputeRequest, on_progress: OnProgress | None, cancel: Cancel | None) -> int:
    """Encode what is missing; samples and captions stay."""
    unchanged = partial(_check_unchanged, request)
    follow = Observer(layout).following(with_pace(on_progress)) if on_progress else None
    found = precompute_here(request, store_id=layout.store_id, on_progress=follow, cancel=cancel, compare_with=unchanged)
    if refused := [failure for failure in found.failures if failure["encoder"] == OF_SOURCE]:
        named = first_of(str(failure["sample"]) for failure in refused)
        what = plural(len(refused), "row or file", "rows or files")
        _log.warning("%s of the source of %r cannot be used (%s): `cachestore why` says why", what, request.name, named)
    return found.encoded_here


def _check_unchanged(request: PrecomputeRequest, plan: Plan, catalog: Catalog | None) -> tuple[str, ...]:
    """Raise BadInput for a plan with other samples or captions than the catalog, RecipeMismatch for one of another model.

    What is encoded again must not change what a data set holds: half a source would shrink it.
    """
    if catalog is None:
        raise BadInput(f"the data set {request.name!r} is gone; nothing was replaced: run `cachestore precompute` to make it again")
    made_with = {column.fingerprint for column in catalog.columns}
    for recipe in plan.recipes:
        if recipe.fingerprint not in made_with:
            made = f"{recipe.encoder} of {catalog.name!r}"
            raise RecipeMismatch(f"{request.model} is not the model that {made} was made with; pass --model with the right one")
    changes = list(compare(plan, catalog, replace_allowed=True))
    if dict(plan.texts) != dict(catalog.texts):
        changes.append("captions are chosen in another way")
    if changes:
        listed, held = set(plan.ids), set(catalog.ids)
        differ = [sample for sample in (*catalog.ids, *plan.ids) if (sample in held) != (sample in listed)]
        named = f" ({first_of(differ)})" if differ else ""
        raise BadInput(
            f"{request.named_data} is not as it was when {catalog.name!r} was made: {'; '.join(changes)}{named}. --refill keeps the"
            " samples and captions of a data set: put back what is missing, or pass --source with its new path; or run `cachestore"
            " precompute`, which encodes what was lost and makes a next generation from the source as it is now"
        )
    return compare(plan, catalog, replace_allowed=False)


def _gone(catalog: Catalog, wanted: Planned, missing: AbstractSet[Key]) -> list[str]:
    """Return the samples with missing entries whose picture is gone."""
    gone: dict[str, None] = {}
    for column in catalog.columns:
        for row, sample in enumerate(catalog.ids):
            if not missing.isdisjoint(key for key in column.row_keys(row) if key is not None):
                made_of = images_in(catalog, row, column.role)
                if any(wanted.files.stat(reference) is None for reference in made_of):
                    gone[sample] = None
    return list(gone)
