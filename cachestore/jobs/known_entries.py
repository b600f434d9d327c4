"""What a worker knows of the store while it works: its snapshot, and the segments it has published itself."""

from cachestore.core.errors import CorruptEntry, FormatError
from cachestore.core.keys import Json, Key
from cachestore.encode.unit import Resolved
from cachestore.files.paths import Layout
from cachestore.jobs.task import outcome_of
from cachestore.storage.append import Acknowledged
from cachestore.storage.commit import UNCOVERED_LIMIT, commit_if_due
from cachestore.storage.segment import read_contents
from cachestore.storage.snapshot import Snapshot, load_snapshot
from cachestore.work.ledgers import Outcome
from cachestore.work.passes import PassRef
from cachestore.work.plan import Unit


class KnownEntries:
    """Says of a key whether its entry is there. Reading threads may ask while the worker's own thread publishes and commits."""

    def __init__(self, layout: Layout, ref: PassRef) -> None:
        self._layout = layout
        self._ref = ref
        self.snapshot = load_snapshot(layout, for_planning=True)
        self._own: dict[Key, str] = {}
        """Segments of the keys that this worker has published."""
        self._published = 0
        """Segments since the snapshot was taken."""
        self._stale: list[Snapshot] = []
        """Earlier snapshots, into which reading threads may still look."""
        self._tokens: dict[str, dict[Key, Json]] = {}

    def close(self) -> None:
        """Close every snapshot."""
        self.close_stale()
        self.snapshot.close()

    def forget(self) -> None:
        """Believe nothing remembered, and look at what is there."""
        self._own.clear()
        self._tokens.clear()
        self.look_again()

    def look_again(self) -> None:
        """See what others have acknowledged. Nobody reads meanwhile."""
        before = self.snapshot
        self.snapshot = load_snapshot(self._layout, earlier=before, for_planning=True)
        before.close()

    def is_own(self, key: Key) -> bool:
        """Whether this worker has published an entry of this key."""
        return key in self._own

    def add(self, segment: Acknowledged) -> None:
        """Remember a segment of this worker's own that is durable now."""
        self._own.update(dict.fromkeys(segment.places, segment.digest))
        self._published += 1

    def find(self, unit: Unit, resolved: Resolved, stat: tuple[int, int]) -> Outcome | None:
        """The outcome of a unit whose key the store holds, or this worker has acknowledged."""
        own = self._own.get(resolved.key)
        segments = [] if own else [place.segment for place in self.snapshot.find([resolved.key])[0]]
        if not own and not segments:
            return None
        was_made_here = own is not None or any(segment.origin == self._ref.origin for segment in segments)
        facts = resolved.facts or self._stored_facts(resolved.key, own or segments[0].digest)
        return outcome_of(unit, "made" if was_made_here else "found", resolved, stat, facts)

    def _stored_facts(self, key: Key, digest: str) -> dict[str, Json]:
        """Facts known only when a caption was encoded, from its entry's JSON value."""
        if digest not in self._tokens:
            try:
                contents = self.snapshot.uncovered.get(digest) or read_contents(self._layout.segment(digest))
            except (FormatError, CorruptEntry, OSError):
                return {}
            self._tokens[digest] = {entry.key: entry.meta["tokens"] for entry in contents.entries if "tokens" in entry.meta}
        tokens = self._tokens[digest].get(key)
        return {} if tokens is None else {"tokens": tokens}

    def commit_if_due(self) -> None:
        """Commit when many segments are uncovered. Reading threads may still look into the snapshot that was; it is closed later."""
        before = self.snapshot
        if self._published > UNCOVERED_LIMIT:
            self._published = 0
            self.snapshot = load_snapshot(self._layout, earlier=before, for_planning=True)
            self._stale.append(before)
        newer = commit_if_due(self._layout, self.snapshot)
        if newer is not self.snapshot:
            self._stale.append(self.snapshot)
            self.snapshot = newer

    def close_stale(self) -> None:
        """Close the snapshots that nobody looks into any more."""
        while self._stale:
            self._stale.pop().close()
