"""Segments marked for deletion, which `gc` will remove. They are read here; `gc` writes the lists and acts on them.

A list is a create-only record, named by the digest of its bytes. A listed segment stays marked for good, and its name is never given to
another file. It can still be read, but planning treats it as absent.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from cachestore.core.errors import WRONG_FIELDS, FormatError, NewerFormat
from cachestore.files.checksum import digest_of
from cachestore.files.opening import names_in, read_whole
from cachestore.files.paths import Layout, parse_marked, to_repair
from cachestore.files.records import RECORD_LIMIT_BYTES, decode_record

FORMAT: Final = "cachestore-marked"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class MarkedList:
    """A list of segments marked for deletion."""

    digest: str
    segments: frozenset[str]
    written: float
    """Seconds since the epoch, by the clock of the writer."""


def list_marked(layout: Layout) -> list[MarkedList]:
    """All lists that can be read, usually none. Damaged lists are ignored, as `gc` cannot act on them either.

    Raises FormatError for a list of a newer format, and ReadFailed for one that cannot be read: its segments must not be relied on.
    """
    found: list[MarkedList] = []
    for digest in filter(None, map(parse_marked, names_in(layout.marked))):
        try:
            found.append(read_marked(layout.marked_list(digest)))
        except NewerFormat:
            raise
        except (FormatError, FileNotFoundError):  # damaged, or removed by `gc` meanwhile
            continue
    return found


def marked_segments(layout: Layout) -> frozenset[str]:
    """Digests of all segments marked for deletion, whether they still exist or not. Raises as `list_marked`."""
    return frozenset[str]().union(*(each.segments for each in list_marked(layout)))


@lru_cache(256)
def read_marked(path: Path) -> MarkedList:
    """Read one list. Results are cached, as a name is never reused. Raises FormatError, OSError."""
    raw = read_whole(path, limit_bytes=RECORD_LIMIT_BYTES)
    body = decode_record(FORMAT, VERSION, raw, where=path)
    if digest_of([raw]) != path.stem:
        raise FormatError(f"{path} has a name that does not fit its contents; {to_repair(path)} moves it aside")
    try:
        return MarkedList(path.stem, frozenset(map(str, body["segments"])), float(body["written"]))
    except WRONG_FIELDS as error:
        raise FormatError(
            f"{path} is not a list of segments marked for deletion; {to_repair(path)} moves it aside, and nothing is lost"
        ) from error
