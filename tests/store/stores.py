"""Small stores to test with. An entry is a number: its key, its tensors and its JSON value follow from it."""

import os
from contextlib import closing

from cachestore.care.verify import verify
from cachestore.core.keys import Recipe, key
from cachestore.files.opening import names_in
from cachestore.files.publish import publish_file
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.format.entry import make_entry, split
from cachestore.store.format.findings import HARMLESS
from cachestore.store.format.index import build
from cachestore.store.format.segment import read_contents
from cachestore.store.read.fetch import Checked, Fetcher
from cachestore.store.read.snapshot import list_indexes, load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit

RECIPE = Recipe("own", {"x": 1})


def key_of(n):
    return key("entry", str(n))


def tensors_of(n, variant=0):
    """Three tensors: four-byte elements, single bytes that fill no multiple of anything, and nothing."""
    byte = bytes([n % 251, variant])
    return {"wide": ("F32", (2, 1), byte * 4), "narrow": ("U8", (3,), byte + b"!"), "none": ("F16", (0, 4), b"")}


def entry_of(n, variant=0):
    return make_entry(key_of(n), tensors_of(n, variant), {"n": n})


def put(layout, *numbers, origin="", variant=0, is_committed=False):
    """One more segment with these entries; returns its digest. Equal keys of another variant hold other bytes."""
    digest = publish_segment(layout, [entry_of(n, variant) for n in numbers], origin=origin).digest
    if is_committed:
        commit(layout).close()
    return digest


def location_of(layout, n, copy=0):
    with closing(load_snapshot(layout)) as snapshot:
        return snapshot.find([key_of(n)])[0][copy]


def damage(layout, n, copy=0):
    """Change a byte of an entry; returns its segment's path."""
    location = location_of(layout, n, copy)
    path = layout.segment(location.segment.digest)
    flip(path, location.offset)
    return path


def plain(tensors):
    return {name: (dtype, shape, bytes(raw)) for name, (dtype, shape, raw) in tensors.items()}


def read(layout, n, **options):
    """The tensors of an entry through a fresh snapshot: the first copy."""
    with closing(load_snapshot(layout)) as snapshot, closing(Fetcher(layout, Checked([]), **options)) as fetcher:
        location = snapshot.find([key_of(n)])[0][0]
        return plain(split(location.specs, fetcher.fetch(key_of(n), location)))


def flip(path, offset, mask=0xFF):
    """Change one byte of a published file in place, as a failing disk would."""
    path.chmod(0o644)
    descriptor = os.open(path, os.O_RDWR)
    try:
        [byte] = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ mask]), offset)
    finally:
        os.close(descriptor)


def forge_index(layout, *, entries=lambda entries: entries, segments=lambda segments: segments):
    """A newer index that is whole, and says what these make of what the newest said.

    Entries are key -> (segment's digest, ordinal, offset, specs, checksum).
    """
    with closing(load_snapshot(layout)) as snapshot:
        reported = {key: (locations[0].segment.digest, *locations[0][1:]) for key, locations in snapshot.index.items()}
        refs = list(snapshot.index.segments.values())
    forged = [(key, *location) for key, location in entries(reported).items()]
    number = list_indexes(layout)[0].number + 1
    temporary, name = build(layout, number, base=None, dropped=frozenset(), segments=segments(refs), entries=forged)
    publish_file(layout, temporary, layout.index(name))
    return name


def catalog_of(*numbers, name="train"):
    """A catalog whose sample "n" needs entry n."""
    ids = [str(n) for n in numbers]
    column = make_column("own", "caption", RECIPE.fingerprint, {}, [[Cell(key_of(n))] for n in numbers])
    return Catalog(name, {}, {RECIPE.fingerprint: RECIPE}, ids, list(range(len(ids) + 1)), ids, {}, ["{}"] * len(ids), (column,))


def segment_of(layout, n):
    for folder in names_in(layout.segments):
        for name in names_in(layout.segments / folder):
            path = layout.segments / folder / name
            for entry in read_contents(path).entries:
                if entry.key == key_of(n):
                    return path, entry
    raise LookupError(n)


def found(layout, *arguments, **options):
    """(kind, path, key, sample) of each finding."""
    report = verify(layout.root, *arguments, **options)
    assert report.ok == all(finding.kind in HARMLESS for finding in report.findings)
    return {(finding.kind, finding.path, finding.key, finding.sample) for finding in report.findings}


def where(layout, path):
    return str(path.relative_to(layout.root))
