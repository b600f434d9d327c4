"""Check one segment: its header, its bytes against its name, each entry against its checksum."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cachestore.care.usage import values_by_owner
from cachestore.core.errors import FormatError, NewerFormat
from cachestore.core.keys import Key
from cachestore.core.words import noun, plural
from cachestore.files.checksum import Checksum, read_blocks
from cachestore.files.opening import opened, read_into, reason_of
from cachestore.files.paths import Layout
from cachestore.store.format.entry import Entry, begin_checksum, checksum_of, split, text_of
from cachestore.store.format.findings import Finding
from cachestore.store.format.index import digest_table
from cachestore.store.format.locations import SegmentRef
from cachestore.store.format.segment import SegmentContents, StoredEntry, read_contents
from cachestore.store.read.snapshot import ref_of


@dataclass(slots=True)
class SegmentCheck:
    """The result of checking one segment."""

    digest: str
    size_bytes: int = 0
    entries: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    good: frozenset[Key] = frozenset()
    is_unreadable: bool = False
    bad: tuple[Key, ...] | None = ()
    """The damaged entries; None if the header cannot be read, so that all of them are."""
    owners: Mapping[str, int] = field(default_factory=dict[str, int])
    """By data set of a session, how many of its values it has; empty if something is wrong with it."""
    summary: tuple[SegmentRef, bytes] | None = None
    """By its header, what the index should say of it: `ref_of` and `digest_table`. None if something is wrong with it."""


def check_segment(layout: Layout, digest: str, *, every_byte: bool) -> SegmentCheck:
    """Check one segment. A mismatch counts only if a second opening shows it again; an I/O error is `unreadable`."""
    first = _check_once(layout, digest, every_byte=every_byte)
    return _check_once(layout, digest, every_byte=every_byte) if first.findings else first


def _check_once(layout: Layout, digest: str, *, every_byte: bool) -> SegmentCheck:
    path = layout.segment(digest)
    where = layout.relative(path)
    try:
        contents = read_contents(path)
        keys = frozenset(contents.entries.keys)
        summary = (ref_of(digest, contents), digest_table(contents.entries))
        bad = _bad_entries(path, digest, contents) if every_byte else None
    except FormatError as error:
        # `checks` adds what to run, as it knows which entries have copies.
        damage = Finding("corrupt-segment", where, error.what or str(error), is_newer=isinstance(error, NewerFormat))
        return SegmentCheck(digest, 0, 0, [damage], bad=None)
    except OSError as error:
        return SegmentCheck(
            digest, 0, 0, [Finding("unreadable", where, f"{where}: {reason_of(error)}; nothing was moved")], is_unreadable=True
        )
    if bad is None:
        return SegmentCheck(digest, contents.size_bytes, len(keys), [], keys, owners=values_by_owner(contents), summary=summary)
    if not bad:
        message = f"{where} does not match the digest in its name, though its entries are intact"
        return SegmentCheck(digest, contents.size_bytes, len(keys), [Finding("corrupt-segment", where, message)], keys)
    which = f"entry {bad[0].key} does not match its checksum"
    if len(bad) > 1:
        which = (
            f"{len(bad)} of {plural(len(keys), 'entry')} {noun(len(bad), 'does not match its checksum', 'do not match their checksums')}"
        )
    found = Finding("corrupt-entry", where, f"{which} in {where}", key=str(bad[0].key))
    damaged = tuple(entry.key for entry in bad)
    return SegmentCheck(digest, contents.size_bytes, len(keys), [found], keys - {*damaged}, bad=damaged)


def _bad_entries(path: Path, digest: str, contents: SegmentContents) -> list[StoredEntry] | None:
    """The damaged entries of a segment. None if the whole file is intact; empty if only bytes between entries changed."""
    whole = Checksum()
    entries = _EntriesInPassing(contents.entries)
    with opened(path) as (descriptor, _status):
        for offset, block in read_blocks(descriptor):
            whole.update(block)
            entries.pass_by(offset, block)
    bad = entries.finish()
    return None if not bad and whole.hexdigest() == digest else bad


class _EntriesInPassing:
    """Checks entries while the file is read in blocks. So bytes are read once, and hashed while they are in the CPU cache."""

    def __init__(self, entries: Iterable[StoredEntry]) -> None:
        self._waiting = sorted(entries, key=lambda entry: (entry.offset, entry.ordinal), reverse=True)
        self._state: Checksum | None = None
        self._bad: list[StoredEntry] = []

    def pass_by(self, offset: int, block: memoryview) -> None:
        end = offset + len(block)
        while self._waiting and self._waiting[-1].offset < end:
            entry = self._waiting[-1]
            state = self._state or begin_checksum(entry.key, entry.specs)
            last = entry.offset + entry.size_bytes
            state.update(block[max(entry.offset, offset) - offset : min(last, end) - offset])
            if last > end:
                self._state = state
                return
            self._state = None
            self._waiting.pop()
            if state.digest() != entry.checksum:
                self._bad.append(entry)

    def finish(self) -> list[StoredEntry]:
        """The damaged entries, after the whole file was read. An entry whose bytes did not all come is damaged."""
        rest = reversed(self._waiting)
        return self._bad + [entry for entry in rest if begin_checksum(entry.key, entry.specs).digest() != entry.checksum]


def good_entries(path: Path, copies: Iterable[StoredEntry]) -> list[Entry]:
    """Read the undamaged entries of a segment, ready to be written again. Empty if it is not a regular file.

    `copies` may name several locations of a key; the first good one is taken. Raises FileNotFoundError, ReadFailed.
    """
    saved: dict[Key, Entry] = {}
    with suppress(FormatError), opened(path) as (descriptor, _status):
        for entry in copies:
            if entry.key in saved:
                continue
            run = bytearray(entry.size_bytes)
            count = read_into(descriptor, memoryview(run), entry.offset)
            if count == len(run) and checksum_of(entry.key, entry.specs, [run]) == entry.checksum:
                buffers = tuple(raw for _dtype, _shape, raw in split(entry.specs, memoryview(run)).values())
                saved[entry.key] = Entry(entry.key, entry.specs, buffers, text_of(entry.meta), entry.checksum)
    return list(saved.values())
