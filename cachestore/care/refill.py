"""`repair --refill`: encode again what was lost, from the sources and models that made it; and build a lost catalog again."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import replace
from functools import partial

from cachestore.care.losses import LOST_FORMAT, LOST_VERSION, needed_by, wanted_keys
from cachestore.care.moved import NewPaths, files_where_they_are, request_at
from cachestore.core.errors import BadInput, FormatError, RecipeMismatch
from cachestore.core.keys import Json, Key, canonical
from cachestore.core.ranks import RankInfo
from cachestore.core.spelling import option
from cachestore.core.words import first_of, plural
from cachestore.files.checksum import digest_of
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.files.records import encode_record
from cachestore.jobs.plan.columns import images_in
from cachestore.jobs.plan.comparison import compare
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.planning import Planned, list_request, plan_request, publish_if_new
from cachestore.jobs.plan.recorded_paths import is_there, source_paths
from cachestore.jobs.run.pass_counts import OF_SOURCE
from cachestore.jobs.run.reconcile import Reconciler
from cachestore.jobs.run.task import Cancel, Job, OnProgress
from cachestore.jobs.share.pace import followed
from cachestore.jobs.share.passes import read_done
from cachestore.jobs.share.plan import Plan, read_plan
from cachestore.jobs.share.retention import ReportedCatalog, generation_of_pass, reported_catalogs
from cachestore.jobs.start.here import precompute_here
from cachestore.store.format.catalog import Catalog, list_generations, list_names
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import load_snapshot

_log = logging.getLogger("cachestore")


def newest_catalogs(layout: Layout, name: str | None = None) -> Iterator[Catalog]:
    """Yield the newest catalog of each data set, or only of the named one."""
    yield from filter(None, (newest_catalog(layout, each) for each in list_names(layout) if name in (None, each)))


def refill_catalog(layout: Layout, catalog: Catalog, moved: NewPaths, on_progress: OnProgress | None, cancel: Cancel | None) -> int:
    """Encode again what a catalog lacks; samples and captions stay. Returns how many entries were encoded. Raises as `check_refill`."""
    refilled = 0
    lacking = _lacking(layout, catalog)
    for request in _requests(layout, catalog, moved) if lacking else ():
        _check_request(layout, catalog, request, {key for key, _sample in _lacking(layout, catalog)})
        unchanged = partial(_check_unchanged, request)
        follow = followed(layout, on_progress)
        report = precompute_here(request, store_id=layout.store_id, on_progress=follow, cancel=cancel, compare_with=unchanged)
        if refused := [failure for failure in report.failures if failure["encoder"] == OF_SOURCE]:
            named = first_of(str(failure["sample"]) for failure in refused)
            what = plural(len(refused), "row or file", "rows or files")
            _log.warning("%s of the source of %r cannot be used (%s): `cachestore why` says why", what, request.name, named)
        refilled += report.encoded_here
    if lacking:
        _note_unmade(layout, catalog.name, lacking)
    return refilled


def check_refill(layout: Layout, catalog: Catalog, moved: NewPaths, missing: AbstractSet[Key]) -> None:
    """Raise what would keep a catalog's missing entries from being encoded again; encode nothing."""
    if not missing.isdisjoint(key for key, _sample in needed_by(catalog)):
        for request in _requests(layout, catalog, moved):
            _check_request(layout, catalog, request, missing, is_dry=True)


def rebuild_catalog(layout: Layout, reported: ReportedCatalog, moved: NewPaths) -> bool:
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
        if rebuild_catalog(layout, each, moved):
            return


def _lacking(layout: Layout, catalog: Catalog) -> list[tuple[Key, str]]:
    """Return the missing entries of a catalog: a pair of key and sample for each sample that needs one."""
    needed = list(needed_by(catalog))
    with closing(load_snapshot(layout)) as snapshot:
        found = snapshot.find([key for key, _sample in needed])
    return [each for each, locations in zip(needed, found, strict=True) if not locations]


def _note_unmade(layout: Layout, name: str, lacking: Sequence[tuple[Key, str]]) -> None:
    """List the missing entries that could not be made and whose samples are still in the data set, unless a list has them already."""
    catalog = newest_catalog(layout, name)
    if catalog is None:
        return
    incomplete = {sample for row, sample in enumerate(catalog.ids) if not catalog.is_complete(row)}
    with closing(load_snapshot(layout)) as snapshot:
        known = wanted_keys(layout, snapshot)
    unmade = dict(sorted((key, sample) for key, sample in lacking if sample in incomplete and key not in known))
    if unmade:
        body: dict[str, Json] = {
            "keys": [str(key) for key in unmade],
            "needed": {str(key): [name, sample] for key, sample in unmade.items()},
        }
        digest = digest_of([canonical(body)])
        publish(layout, layout.lost_list(digest), [encode_record(LOST_FORMAT, LOST_VERSION, {"segment": digest, **body})])


def _requests(layout: Layout, catalog: Catalog, moved: NewPaths) -> list[PrecomputeRequest]:
    """Return each request that made a catalog, for the encoders whose columns it made, with the new paths."""
    encoders: dict[bytes, list[str]] = {}
    for encoder, hints in catalog.request.items():
        encoders.setdefault(canonical(hints), []).append(encoder)
    requests = {canonical(hints): PrecomputeRequest.from_hints(hints, store=str(layout.root)) for hints in catalog.request.values()}
    return [replace(request_at(request, moved), encode=request.made_by(encoders[hints])) for hints, request in requests.items()]


def _check_request(
    layout: Layout, catalog: Catalog, request: PrecomputeRequest, missing: AbstractSet[Key], *, is_dry: bool = False
) -> None:
    """Raise what keeps a request from encoding a catalog's missing entries again: another source or model, or pictures that are gone."""
    if away := [path for path in source_paths({"": request.hints()}) if not is_there(path)]:
        raise BadInput(
            f"{first_of(away)} is not there; nothing was encoded: put it back, or pass {option('source')} with its new path",
            option="source",
        )
    wanted = plan_request(layout, request, list_request(request), compare_with=partial(_check_unchanged, request), is_dry=is_dry)
    if not is_dry:
        wanted = publish_if_new(wanted)
    if gone := _gone(catalog, wanted, missing):
        raise BadInput(
            f"the pictures of {plural(len(gone), 'sample')} of {catalog.name!r} with lost entries are gone ({first_of(gone)}); nothing was"
            f" encoded: put them back, or pass {option('source')} with their new path (`cachestore precompute` continues without them)",
            option="source",
        )


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
            what = f"{request.model} is not the model that {made} was made with"
            raise RecipeMismatch(f"{what}; pass {option('model')} with the right one", option="model")
    changes = list(compare(plan, catalog, replace_allowed=True))
    if dict(plan.texts) != dict(catalog.texts):
        changes.append("captions are chosen in another way")
    if changes:
        listed, held = set(plan.ids), set(catalog.ids)
        differ = [sample for sample in (*catalog.ids, *plan.ids) if (sample in held) != (sample in listed)]
        named = f" ({first_of(differ)})" if differ else ""
        raise BadInput(
            f"{request.named_data} is not as it was when {catalog.name!r} was made: {'; '.join(changes)}{named}."
            f" {option('refill', value=True)} keeps the samples and captions of a data set: put back what is missing, or pass"
            f" {option('source')} with its new path; or run `cachestore precompute`, which encodes what was lost and makes a next"
            " generation from the source as it is now",
            option="source",
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
