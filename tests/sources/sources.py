"""Folders and manifests on disk, and what listings of them hold."""

import json

from cachestore.sources.combined import list_path
from cachestore.sources.folders import list_source
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks


def folder(root, content):
    root.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.encode() if isinstance(value, str) else value)
    return root


def manifest(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Listed:
    """A listing whose samples were gone through."""

    def __init__(self, listing):
        remarks = Remarks()
        self.samples = tuple(listing.samples(remarks))
        self.remarks = remarks.in_words()
        self.refused = {one.sample: one.reason for one in remarks.refused}
        references = [reference for sample in self.samples for those in sample.images.values() for reference in those]
        self.unused = listing.unused(references).examples
        self.content, self.root = listing.content, listing.files.root
        self.read, self.open, self.stat = listing.read, listing.open, listing.stat


def listed(path, **options):
    return Listed(list_source(path, ListingOptions(**options)))


def ids(listing):
    return [sample.id for sample in listing.samples]


def captions(listing):
    return {sample.id: sample.captions for sample in listing.samples}


def remarks_of(listing):
    seen = Remarks()
    list(listing.samples(seen))
    return seen.in_words()


def unused(path, **options):
    """The names of the files of a source that are not used, by reason."""
    listing = list_path(path, ListingOptions(**options))
    references = [reference for sample in listing.samples() for those in sample.images.values() for reference in those]
    found = listing.unused(references)
    assert {reason: len(names) for reason, names in found.examples.items()} == found.counts, "only the first ten are named"
    return found.examples
