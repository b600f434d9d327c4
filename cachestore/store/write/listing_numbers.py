"""Listing numbers: the order in which runs list a source, so that an older listing never replaces a newer one.

A run takes the next number (`<n>.json`) before it lists its source, and stores it in the catalog that it publishes. If there is no store
yet, the number is 0. When the run ends, it returns the number (`<n>.ended`). No clock is used, and no number is used again.
"""

import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachestore.core.errors import CacheStoreError, FormatError, StoreNotFound
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, decode_name, parse_listed, parse_listing
from cachestore.files.portable import check_new_name
from cachestore.files.publish import make_folder, note
from cachestore.files.records import encode_record
from cachestore.files.removal import is_older, remove_file
from cachestore.files.table import read_header
from cachestore.store.format.catalog import FORMAT as CATALOG_FORMAT
from cachestore.store.format.catalog import VERSION as CATALOG_VERSION
from cachestore.store.format.catalog import list_generations, list_names
from cachestore.store.read.snapshot import open_layout

FORMAT: Final = "cachestore-listing"
VERSION: Final = 1
_MOST_LOST: Final = 16
_SPENT_SECONDS: Final = 30 * 24 * 3600.0


@contextmanager
def listing_number(layout: Layout, name: str) -> Generator[int]:
    """Take the next number of a data set, before its source is listed.

    Raises WriteFailed, and BadInput for a new name that others cannot have.
    """
    if name not in (known := list_names(layout)):
        check_new_name(name, known)
    make_folder(layout, layout.temporary, layout.listing_folder(name))
    record = encode_record(FORMAT, VERSION, {"name": name})
    number = lost = 0
    while not number or not note(layout, layout.listing(name, number), record):
        highest = max(*listing_numbers(layout, name), *_ended(layout, name), _published(layout, name), 0)
        number = highest + 1 + secrets.randbelow(1 << lost)  # spreads ranks that start together
        lost = min(lost + 1, _MOST_LOST)
    try:
        yield number
    finally:
        with suppress(CacheStoreError):  # a leftover number costs at most a generation; `gc` removes it
            note(layout, layout.listed(name, number), record)
            remove_file(layout, layout.listing(name, number))
            for lower in _ended(layout, name)[:-1]:
                remove_file(layout, layout.listed(name, lower))


@contextmanager
def number_if_there(layout: Layout, name: str) -> Generator[int]:
    """As `listing_number`, but 0 if there is no store yet, where no catalog can be replaced. Raises BadInput, FormatError, WriteFailed."""
    try:
        opened = open_layout(layout)
    except StoreNotFound:
        check_new_name(name, ())
        yield 0
        return
    with listing_number(opened, name) as number:
        yield number


def listing_numbers(layout: Layout, name: str) -> list[int]:
    """The numbers of runs that still work or that died, lowest first."""
    return sorted(number for number in map(parse_listing, names_in(layout.listing_folder(name))) if number is not None)


def _ended(layout: Layout, name: str) -> list[int]:
    """The returned numbers, lowest first. The highest is never removed, so that no number is used again."""
    return sorted(number for number in map(parse_listed, names_in(layout.listing_folder(name))) if number is not None)


def spent_numbers(layout: Layout, *, now: float) -> list[Path]:
    """Paths of numbers that dead runs left: at least 30 days old at `now` (seconds since the epoch), and not the highest."""
    spent: list[Path] = []
    for name in filter(None, map(decode_name, names_in(layout.listings))):
        paths = [layout.listing(name, number) for number in listing_numbers(layout, name)[:-1]]
        spent += [path for path in paths if is_older(path, _SPENT_SECONDS, now=now)]
    return spent


def _published(layout: Layout, name: str) -> int:
    """The number in the newest catalog. It counts if the folder of numbers was lost."""
    for generation in reversed(list_generations(layout, name)):
        with suppress(FormatError, FileNotFoundError):
            number = read_header(layout.catalog(name, generation), CATALOG_FORMAT, CATALOG_VERSION).get("listing")
            if type(number) is int:
                return number
    return 0
