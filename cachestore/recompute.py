"""Making again what was lost: repair with refill. Knows the storage's repair and the whole job."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from cachestore.errors import RecipeMismatch
from cachestore.files.paths import Layout
from cachestore.keys import canonical
from cachestore.request import PrecomputeRequest, look_at_request
from cachestore.run import precompute_here
from cachestore.storage.catalog import Catalog, list_names, newest_catalog
from cachestore.storage.repair import RepairReport, finish_report, repair_store
from cachestore.storage.snapshot import load_snapshot, open_layout
from cachestore.storage.verify import needed_by


def repair(
    path: str | Path,
    *,
    refill: bool = False,
    source: str | Path | None = None,
    model: str | Path | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    dry_run: bool = False,
) -> RepairReport:
    """Make a store consistent, and with `refill` complete.

    Args:
        path: the store.
        refill: encode again what the data sets need and what has no valid copy, with the source and model they were made with.
        source: where the source is now, if it moved.
        model: where the model is now; it must have the fingerprint the data set was made with.
        vae: where the VAE is now.
        text_encoder: where the text encoder is now.
        dry_run: say what would be done and do nothing.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version; nothing was touched.
        RecipeMismatch: the moved model is another one.
        BadInput: the source or model cannot be found; pass where they are now.
    """
    report = repair_store(path, dry_run=dry_run)
    if dry_run or not refill:
        return report
    layout = open_layout(Layout(Path(path).absolute()))
    moved = {"data": source, "model": model, "vae": vae, "text_encoder": text_encoder}
    refilled = 0
    for name in list_names(layout):
        catalog = newest_catalog(layout, name)
        if catalog is not None and _lacks_entries(layout, catalog):
            refilled += _refill(layout, catalog, {option: str(place) for option, place in moved.items() if place is not None})
    return finish_report(layout.root, replace(report, refilled=refilled))


def _lacks_entries(layout: Layout, catalog: Catalog) -> bool:
    with closing(load_snapshot(layout)) as snapshot:
        keys = [key for key, _sample in needed_by(catalog)]
        return not all(snapshot.find(keys))


def _refill(layout: Layout, catalog: Catalog, moved: dict[str, str]) -> int:
    """Run the requests behind a catalog again, each once; only what is missing is encoded."""
    requests = {canonical(hints): hints for hints in catalog.request.values()}
    asked = [replace(PrecomputeRequest.from_hints(hints, store=str(layout.root)), **moved) for hints in requests.values()]
    return sum(_run_again(layout, catalog, request) for request in asked)


def _run_again(layout: Layout, catalog: Catalog, request: PrecomputeRequest) -> int:
    made_with = {column.fingerprint for column in catalog.columns}
    for encoder in look_at_request(layout, request).encoders:
        if encoder.recipe.fingerprint not in made_with:
            made = f"{encoder.recipe.encoder} of {catalog.name!r}"
            message = f"{request.model} is not the model that {made} was made with; pass --model with the right one"
            raise RecipeMismatch(message)
    return precompute_here(request).encoded_here
