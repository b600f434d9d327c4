"""Stores to be pushed and pulled, and what lies at both ends."""

from contextlib import closing

from cachestore.care.verify import verify
from cachestore.core.errors import MissingEntry
from cachestore.files.paths import Layout
from cachestore.remote.transfer import TransferRequest, segments_of
from cachestore.store.format.catalog import list_generations, list_names, read_catalog
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.commit import commit, create_store, publish_recipe
from tests.fakes import publish_catalog
from tests.store.stores import RECIPE, catalog_of, put

MOVED = ("segments", "recipes", "catalogs")


def request(*, jobs=2, **given):
    return TransferRequest(jobs=jobs, **given)


def make(root, *segments, name="train"):
    """A store in which each segment has these numbers; a generation for each segment names all entries so far."""
    layout = create_store(root)
    publish_recipe(layout, RECIPE)
    there = []
    for numbers in segments:
        put(layout, *numbers)
        there += numbers
        publish_catalog(layout, catalog_of(*there, name=name))
    commit(layout).close()
    return layout


def files_of(root):
    """The bytes of all that moves, by its path in a store."""
    found = (path for top in MOVED for path in (root / top).rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def objects_of(client):
    """As `files_of`, of what a client sees."""
    found = [one.key for page in client.list() for one in page]
    return {key: client.get(key) for key in found if key.startswith(MOVED)}


def wrong_in(root):
    """What is wrong with a store: findings, and catalogs that name what is not there."""
    layout = Layout(root)
    found = [f"{finding.kind} {finding.path}" for finding in verify(root).findings if finding.kind != "stale-temp"]
    with closing(load_snapshot(layout)) as snapshot:
        for name in list_names(layout):
            for generation in list_generations(layout, name):
                try:
                    segments_of(
                        read_catalog(layout.catalog(name, generation), generation=generation), snapshot, where=root, command="nothing"
                    )
                except MissingEntry as error:
                    found.append(str(error))
    return found
