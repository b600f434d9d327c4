"""Condemned segments: those that garbage collection will remove. Read here; `gc` writes the lists and acts on them.

A list is a create-only record, named by the digest of its bytes. What it names is condemned for good, and the name is never given to
another file. A condemned segment stays readable, and counts as absent for whoever plans what to encode.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from cachestore.core.errors import FormatError
from cachestore.files.checksum import digest_of
from cachestore.files.opening import names_in, read_whole
from cachestore.files.paths import Layout, parse_condemned, to_repair
from cachestore.files.records import RECORD_LIMIT_BYTES, decode_record

FORMAT: Final = "cachestore-condemned"
VERSION: Final = 1
NEWER: Final = "install a newer one"
"""What the refusal of a newer format says."""


@dataclass(frozen=True, slots=True)
class CondemnedList:
    """One list."""

    digest: str
    segments: frozenset[str]
    written: float
    """Seconds since the epoch, by the clock of who wrote it."""


def list_condemned(layout: Layout) -> list[CondemnedList]:
    """All lists that can be read; none is the usual case. A damaged one counts for nobody, as nobody can act on it either.

    Raises FormatError for a list of a newer format, ReadFailed for one that the file system refuses: what it condemns must not be
    counted on.
    """
    found: list[CondemnedList] = []
    for digest in filter(None, map(parse_condemned, names_in(layout.condemned))):
        try:
            found.append(read_condemned(layout.condemned_list(digest)))
        except FormatError as error:
            if NEWER in str(error):
                raise
        except FileNotFoundError:  # it was spent, and went meanwhile
            continue
    return found


def condemned_segments(layout: Layout) -> frozenset[str]:
    """Digests of all condemned segments, whether they are still there or not. Raises as `list_condemned`."""
    return frozenset[str]().union(*(each.segments for each in list_condemned(layout)))


@lru_cache(256)
def read_condemned(path: Path) -> CondemnedList:
    """One list; a name is never reused, so it is read once. Raises FormatError, OSError."""
    raw = read_whole(path, limit_bytes=RECORD_LIMIT_BYTES)
    body = decode_record(FORMAT, VERSION, raw, where=path)
    if digest_of([raw]) != path.stem:
        raise FormatError(f"{path} has a name that does not fit its contents; {to_repair(path)} moves it aside")
    try:
        return CondemnedList(path.stem, frozenset(map(str, body["segments"])), float(body["written"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path} is not a list of segments marked for deletion; {to_repair(path)} moves it aside, and nothing is lost"
        ) from error
