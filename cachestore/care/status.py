"""Report the progress of a store's passes, from the heartbeats of their workers. Changes nothing."""

from dataclasses import dataclass
from pathlib import Path

from cachestore.core.arguments import as_path
from cachestore.core.keys import Json
from cachestore.core.words import in_short
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import Layout
from cachestore.jobs.share.progress import PassStatus, all_status
from cachestore.store.read.snapshot import open_layout
from cachestore.store.read.unfinished import list_data_sets


@dataclass(frozen=True, slots=True, repr=False)
class StatusReport:
    """The newest pass of every plan in a store."""

    plans: tuple[PassStatus, ...]
    """Empty if no pass was ever begun."""
    without_runs: tuple[str, ...] = ()
    """The other data sets: a program published them, or nothing is left of the runs that made them."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore status --json` prints."""
        return {"plans": [status.as_json() for status in self.plans], "without_runs": [*self.without_runs]}


def status(path: str | Path) -> StatusReport:
    """Return the progress of running and unfinished passes, and their workers. Damaged plans are left out.

    Raises StoreNotFound if there is no store, and ReadFailed if it disappears meanwhile.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    found = all_status(layout)
    without_runs = [name for name in list_data_sets(layout) if all(one.name != name for one in found)]
    check_for_reading(layout)
    return StatusReport(tuple(found), tuple(without_runs))
