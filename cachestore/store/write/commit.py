"""Create a store, and commit: publish an index that covers all segments."""

import logging
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from cachestore.core.errors import BadInput, LockTimeout, StoreNotFound
from cachestore.core.keys import Recipe
from cachestore.core.spelling import option
from cachestore.core.words import first_of
from cachestore.files.failpoints import failpoint
from cachestore.files.locks import locked
from cachestore.files.marker import FORMAT, VERSION, noticing_its_end
from cachestore.files.opening import names_in, status_of
from cachestore.files.paths import FOLDERS, Layout, Mode
from cachestore.files.publish import make_folder, make_root, publish, publish_file
from cachestore.files.records import encode_record
from cachestore.store.format.index import build, check
from cachestore.store.read.snapshot import Snapshot, list_indexes, load_snapshot, open_layout, ref_of

_log = logging.getLogger("cachestore")
RECIPE_FORMAT: Final = "cachestore-recipe"
RECIPE_VERSION: Final = 1
STALE_SECONDS: Final = 60.0
"""How long a file system may still deny a listed file, because it cached that the file was missing."""
_LOOK_SECONDS: Final = 0.1
UNCOVERED_LIMIT: Final = 512
"""With more uncovered segments than this, any worker commits. So opening a store never reads many headers."""


def create_store(root: Path, *, mode: Mode | None = None, say: Callable[[str], None] = _log.info) -> Layout:
    """Make a store, or open the existing one. Without a `mode`, a new store takes it over from its folder (see `make_root`).

    `say` gets a line if it is shared with a group. BadInput for other contents and for another mode; WriteFailed.
    """
    layout = Layout(root.absolute(), mode or Mode.PRIVATE)
    names = names_in(root, is_root=True)
    if layout.marker.name in names:
        return _as_asked(_open_listed(layout), mode)
    foreign = [name for name in names if name not in FOLDERS]
    status = status_of(root)
    if foreign or (status is not None and not stat.S_ISDIR(status.st_mode)):
        raise BadInput(f"{root} is not a store and not an empty folder (it holds {first_of(foreign) or 'a file'}): pass another folder")
    publish_marker(make_root(layout, takes_over=mode is None))
    made = _as_asked(_open_listed(layout), mode)
    if made.mode is Mode.GROUP:
        why = "" if mode else f", as the folder's group and your umask say ({option('access', 'private')} keeps it to you)"
        say(f"{made.root} is shared with the group {_group_of(made.root)}: its members may write it{why}")
    return made


def _as_asked(layout: Layout, mode: Mode | None) -> Layout:
    if mode is None or mode is layout.mode:
        return layout
    raise BadInput(
        f"{layout.root} is a {layout.mode.value} store, and stays one: leave out {option('access')}, or make another store with it, by"
        " `cachestore precompute`, or by `cachestore push` and `cachestore pull` from this one",
        option="access",
    )


def _group_of(folder: Path) -> str:
    try:
        return folder.group()
    except (KeyError, NotImplementedError, OSError):
        return str(folder.stat().st_gid)


def publish_marker(layout: Layout) -> None:
    """Make a folder a store with the layout's mode and an id of its own. Leaves an existing store as it is."""
    body = {"store_id": secrets.token_hex(16), "mode": layout.mode.value}
    publish(layout, layout.marker, [encode_record(FORMAT, VERSION, body)])


def _open_listed(layout: Layout) -> Layout:
    """Open a store whose marker is listed. Another rank may have made it just now, and NFS may deny it for 30 s."""
    until = time.monotonic() + STALE_SECONDS
    while True:
        try:
            return open_layout(layout)
        except StoreNotFound:
            if time.monotonic() >= until or layout.marker.name not in names_in(layout.root, is_root=True):
                raise
        time.sleep(_LOOK_SECONDS)


def has_news(snapshot: Snapshot) -> bool:
    """Whether a commit would publish a new index."""
    return bool(snapshot.uncovered or snapshot.vanished or (snapshot.index is None and snapshot.listed))


def commit(layout: Layout, *, snapshot: Snapshot | None = None) -> Snapshot:
    """Publish an index that covers every readable segment, and return a snapshot with it. Does nothing if nothing is new.

    Two commits at once are harmless: each publishes a good index, and readers add what theirs lacks. The returned snapshot is for planning
    if `snapshot` is. The index also covers segments marked for deletion, as they are still read.
    """
    for_planning = snapshot is not None and snapshot.for_planning
    with noticing_its_end(layout):
        before = load_snapshot(layout, earlier=snapshot)
        if not has_news(before) and not for_planning:
            return before
        with closing(before):
            if not has_news(before):
                return load_snapshot(layout, earlier=before, for_planning=True)
            make_folder(layout, layout.temporary)
            number = max((name.number for name in list_indexes(layout)), default=0) + 1
            failpoint("commit.before_index")
            segments = [ref_of(digest, contents) for digest, contents in sorted(before.uncovered.items())]
            entries = (
                (entry.key, digest, entry.ordinal, entry.offset, entry.specs, entry.checksum)
                for digest, contents in before.uncovered.items()
                for entry in contents.entries
            )
            temporary, name = build(layout, number, base=before.index, dropped=before.vanished, segments=segments, entries=entries)
            publish_file(layout, temporary, layout.index(name))
            verdict = check(layout, name)
            failpoint("commit.after_index")
        return load_snapshot(layout, verdict=verdict, for_planning=for_planning)


def commit_if_due(layout: Layout, snapshot: Snapshot, *, part: int = 0) -> Snapshot:
    """Commit if many segments are uncovered and no other process is committing. Returns the snapshot to use from now on.

    With a `part`, only if they are at least one in so many of those that are covered: who publishes segments for hours, one by one, then
    writes an index that grows only so often.
    """
    covered = len(snapshot.index.segments) if part and snapshot.index is not None else 0
    if len(snapshot.uncovered) <= UNCOVERED_LIMIT or len(snapshot.uncovered) * part < covered:
        return snapshot
    try:
        with locked(layout.lock("commit"), seconds=0, mode=layout.mode):
            return commit(layout, snapshot=snapshot)
    except LockTimeout:
        return snapshot


def publish_recipe(layout: Layout, recipe: Recipe) -> None:
    """Store a recipe, unless it is already there."""
    path = layout.recipe(recipe.fingerprint)
    if path.name in names_in(layout.recipes):
        return
    publish(layout, path, [encode_record(RECIPE_FORMAT, RECIPE_VERSION, recipe.as_json())])
