"""Files in a store that cachestore did not make, and temporary files that a dead process left. Removes nothing."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cachestore.files.opening import is_link, look_at, names_in
from cachestore.files.paths import FOLDERS, Layout, is_own_file, is_own_folder, is_temporary, parse_segment
from cachestore.storage.findings import Finding

STALE_SECONDS: Final = 3600.0


def strange_names(layout: Layout) -> Iterator[Finding]:
    """Findings for names that `files.paths` does not know. Reports links among segment folders; raises FormatError for other links."""
    for name in FOLDERS:
        if _is_no_folder(layout.root / name):
            message = f"{name} is not a folder, so nothing can be read or written there: move it away; nothing was moved"
            yield Finding("unreadable", name, message)
    yield from _below(layout, "")
    yield from _strange_segments(layout)
    yield from _stale_temporaries(layout)


def _below(layout: Layout, folder: str) -> Iterator[Finding]:
    """Findings for a folder, which is empty or ends in a slash. Segments and temporary files are checked elsewhere."""
    for name in names_in(layout.root / folder, is_root=not folder):
        where = f"{folder}{name}"
        if is_own_folder(where):
            yield from _below(layout, f"{where}/") if where not in {"segments", "tmp"} else ()
        elif not is_own_file(where):
            yield _foreign(where)


def _strange_segments(layout: Layout) -> Iterator[Finding]:
    for folder in names_in(layout.segments):
        path = layout.segments / folder
        if is_link(path):
            where = f"segments/{folder}"
            yield Finding(
                "unreadable", where, f"{where!a} is a link, and links inside a store are not followed: put the folder itself in its place"
            )
            continue
        status = look_at(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            yield _foreign(f"segments/{folder}")
        for name in names_in(layout.segments / folder):
            if (parse_segment(name) or "")[:2] != folder:
                yield _foreign(f"segments/{folder}/{name}")


def _stale_temporaries(layout: Layout) -> Iterator[Finding]:
    now = time.time()
    for name in names_in(layout.temporary):
        if not is_temporary(name):
            yield _foreign(f"tmp/{name}")
            continue
        try:
            age = now - (layout.temporary / name).lstat().st_mtime
        except OSError:
            continue
        if age > STALE_SECONDS:
            yield Finding("stale-temp", f"tmp/{name}", f"tmp/{name} was left {age / 3600:.0f} h ago by a process that died; it is harmless")


def _is_no_folder(path: Path) -> bool:
    status = look_at(path)
    return os.path.lexists(path) and (status is None or not stat.S_ISDIR(status.st_mode))


def _foreign(where: str) -> Finding:
    return Finding("foreign-file", where, f"{where!a} was not made by cachestore; it is left alone")
