"""What made a data set: a pass, an import, or sessions. One name has one kind until it is dropped (docs/design/publish.md)."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cachestore.core.errors import BadInput, FormatError
from cachestore.files.paths import Layout
from cachestore.files.table import read_header
from cachestore.store.format.catalog import FORMAT, HAVE_SOURCES, MADE, VERSION, Made
from cachestore.store.format.line import empty_table, list_line
from cachestore.store.read.unfinished import list_unfinished
from cachestore.store.write.catalog_writer import draft_of, mark_dropped, publish_draft
from cachestore.store.write.link import last_entry, new_mark

_TRIES: Final = 20
"""How often it is looked what there is, while others begin, fold and drop it."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What made a data set, and which line it is."""

    made: Made
    line: str
    """The id of its line; empty for what a pass made."""
    number: int
    """The highest number of the line. If the line has ended since, it is another data set."""


def read_lineage(layout: Layout, name: str, *passed_over: type[Exception]) -> Lineage | None:
    """Return what the newest table says that made a data set; None if there is none. Raises FormatError, OSError if it is damaged.

    A table of which the reading raises one of the errors that are `passed_over` counts as missing: then an older one says it.
    """
    for _try in range(_TRIES):
        line = list_line(layout, name)
        for number in reversed(line.tables):
            with suppress(FileNotFoundError, *passed_over):  # a newer one has taken its place: list again
                header = read_header(layout.catalog(name, number), FORMAT, VERSION)
                return Lineage(header["made"], header.get("line", ""), line.highest)
        if not line.tables:
            break
    return None


def what_made(layout: Layout, name: str) -> Made | None:
    """Return what made a data set; None if there is none. Raises as `read_lineage`."""
    lineage = read_lineage(layout, name)
    return None if lineage is None else lineage.made


def has_sources(layout: Layout, name: str, *, if_damaged: bool) -> bool:
    """Whether a pass or an import made a data set; `if_damaged` if its newest table cannot be read."""
    with suppress(FormatError, OSError):
        return what_made(layout, name) in HAVE_SOURCES
    return if_damaged


def check_made(layout: Layout, name: str, made: Made | None, kinds: Collection[Made]) -> None:
    """Raise BadInput if there is a data set of this name, and none of these kinds `made` it."""
    if made is not None and made not in kinds:
        raise BadInput(f"the data set {name!r} in {layout.root} was {MADE[made]}: choose another name, or drop it", option="name")


def check_no_session(layout: Layout, name: str) -> None:
    """Raise BadInput if sessions made the data set of this name: a pass cannot publish under it. Damaged tables do not hide that."""
    lineage, line = read_lineage(layout, name, FormatError, OSError), list_line(layout, name)
    without_tables: Made | None = "published" if line.entries or line.blocks else None
    check_made(layout, name, without_tables if lineage is None else lineage.made, HAVE_SOURCES)


def begin(layout: Layout, name: str, made: Made) -> Lineage:
    """Return the data set of this name and kind, which is begun with an empty table if there is none.

    Raises BadInput if something else made it, or is making it, and FormatError if all its tables are lost: an empty one above its entries
    would hide them.
    """
    for _try in range(_TRIES):
        line, lineage = list_line(layout, name), read_lineage(layout, name)
        if lineage is not None:
            if last_entry(layout, line).what == "dropped":
                mark_dropped(layout, name, line.highest)  # `drop` was killed after it ended the line
                continue
            check_made(layout, name, lineage.made, {made})
            return lineage
        if line.is_there:  # dropped meanwhile
            continue
        if unfinished := next((one for one in list_unfinished(layout) if one.name == name), None):
            raise BadInput(f"{layout.root}: {unfinished.in_words(layout)}; choose another name for what you publish", option="name")
        publish_draft(layout, draft_of(empty_table(name, made, new_mark())), after=line.highest)
    lost = f"the data set {name!r} in {layout.root} has entries, but every generation of it is gone"
    raise FormatError(f"{lost}: run {layout.command('repair')}, or put one back from a copy of the store")
