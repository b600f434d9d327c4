"""What a worker knows of the store while it works: its snapshot, and the segments it has published itself."""

from dataclasses import replace
from typing import Final

from cachestore.core.errors import CorruptEntry, FormatError
from cachestore.core.keys import Json, Key
from cachestore.core.samples import MASK
from cachestore.encode.batching.unit import Resolved
from cachestore.files.paths import Layout
from cachestore.jobs.run.task import outcome_of
from cachestore.jobs.share.ledgers import Outcome
from cachestore.jobs.share.passes import PassRef
from cachestore.jobs.share.plan import Unit
from cachestore.store.format.segment import SegmentContents, read_contents
from cachestore.store.read.snapshot import Snapshot, load_snapshot
from cachestore.store.write.append import Acknowledged
from cachestore.store.write.commit import UNCOVERED_LIMIT, commit_if_due

_OF_PREPARED: Final = ("tokens", "weight", "coloured")
"""Facts that are known only once an input is prepared: an entry has them in its JSON value."""


class KnownEntries:
    """Knows which keys have an entry. Threads may call `find` while the worker's own thread publishes and commits."""

    def __init__(self, layout: Layout, ref: PassRef) -> None:
        self._layout = layout
        self._ref = ref
        self.snapshot = load_snapshot(layout, for_planning=True)
        self._own: dict[Key, str] = {}
        """The segment of each key that this worker has published."""
        self._unseen: dict[str, SegmentContents] = {}
        """By digest, the segments that this worker has published since the snapshot was taken. Their headers need not be parsed."""
        self._stale: list[Snapshot] = []
        """Earlier snapshots that threads may still use."""
        self._recorded: dict[str, dict[Key, dict[str, Json]]] = {}

    def close(self) -> None:
        """Close all snapshots."""
        self.close_stale()
        self.snapshot.close()

    def forget(self) -> None:
        """Forget all that was remembered, and take a new snapshot."""
        self._own.clear()
        self._recorded.clear()
        self.renew()

    def renew(self) -> None:
        """Take a new snapshot, with what others have acknowledged. No thread may use the old one."""
        self._take_newer().close()

    def newer_snapshot(self) -> Snapshot:
        """Return a new snapshot, with what others have acknowledged. The caller closes it."""
        earlier = replace(self.snapshot, uncovered={**self.snapshot.uncovered, **self._unseen})
        return load_snapshot(self._layout, earlier=earlier, for_planning=True)

    def _take_newer(self) -> Snapshot:
        """Take a new snapshot, and return the old one."""
        before, self.snapshot = self.snapshot, self.newer_snapshot()
        self._unseen.clear()
        return before

    def is_own(self, key: Key) -> bool:
        """Return whether this worker has published an entry with this key."""
        return key in self._own

    def add(self, segment: Acknowledged) -> None:
        """Remember a segment of this worker that is durable now."""
        self._own.update(dict.fromkeys(segment.keys, segment.digest))
        self._unseen[segment.digest] = segment.contents

    def find(self, unit: Unit, resolved: Resolved, stat: tuple[int, int]) -> Outcome | None:
        """Return the outcome of a unit whose key is in the store or was published by this worker; else None."""
        own = self._own.get(resolved.key)
        segments = [] if own else [location.segment for location in self.snapshot.find([resolved.key])[0]]
        if not own and not segments:
            return None
        was_made_here = own is not None or any(segment.origin == self._ref.origin for segment in segments)
        is_in_entry = not resolved.facts or resolved.meta.get("encoder") == MASK
        facts = {**resolved.facts, **(self._stored_facts(resolved.key, own or segments[0].digest) if is_in_entry else {})}
        return outcome_of(unit, "made" if was_made_here else "found", resolved, stat, facts)

    def _stored_facts(self, key: Key, digest: str) -> dict[str, Json]:
        """Return the facts that are known only after an input was prepared, from its entry's JSON value."""
        if digest not in self._recorded:
            try:
                contents = self.snapshot.uncovered.get(digest) or read_contents(self._layout.segment(digest))
            except (FormatError, CorruptEntry, OSError):
                return {}
            self._recorded[digest] = {
                entry.key: kept
                for entry in contents.entries
                if (kept := {name: entry.meta[name] for name in _OF_PREPARED if name in entry.meta})
            }
        return dict(self._recorded[digest].get(key, {}))

    def commit_if_due(self) -> None:
        """Commit if the index lacks many segments. The old snapshot is closed later, as threads may still use it."""
        if len(self._unseen) > UNCOVERED_LIMIT:
            self._stale.append(self._take_newer())
        newer = commit_if_due(self._layout, self.snapshot)
        if newer is not self.snapshot:
            self._stale.append(self.snapshot)
            self.snapshot = newer

    def close_stale(self) -> None:
        """Close the earlier snapshots, which no thread may use any more."""
        while self._stale:
            self._stale.pop().close()
