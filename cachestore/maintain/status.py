"""How far the passes of a store are, as seen from any process. Reads what workers show of themselves, and changes nothing."""

from dataclasses import dataclass
from pathlib import Path

from cachestore.core.arguments import as_path
from cachestore.core.keys import Json
from cachestore.core.words import in_short
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import Layout
from cachestore.storage.snapshot import open_layout
from cachestore.work.progress import PassStatus, all_status


@dataclass(frozen=True, slots=True, repr=False)
class StatusReport:
    """The newest pass of every plan in a store."""

    plans: tuple[PassStatus, ...]
    """Empty where no pass was ever begun."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore status --json` prints."""
        return {"plans": [status.as_json() for status in self.plans]}


def status(path: str | Path) -> StatusReport:
    """How far running and unfinished passes are, and who works on them.

    Raises StoreNotFound where there is no store, ReadFailed where it is gone meanwhile. A damaged plan is passed over.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    found = all_status(layout)
    check_for_reading(layout)
    return StatusReport(tuple(found))
