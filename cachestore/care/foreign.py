"""Files in a store that cachestore did not make, and temporary files that a dead process left. Removes nothing."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachestore.files.opening import is_link, names_in, status_of
from cachestore.files.paths import FOLDERS, Layout, is_own_file, is_own_folder, is_temporary, parse_segment
from cachestore.store.format.findings import Finding

STALE_SECONDS: Final = 3600.0


def foreign_files(layout: Layout) -> Iterator[Finding]:
    """Findings for names that `files.paths` does not know. Reports links among segment folders; raises FormatError for other links."""
    for name in FOLDERS:
        if os.path.lexists(layout.root / name) and not _is_folder(layout.root / name):
            what = f"{name} is not a folder, so nothing can be read or written there: move it away"
            yield Finding("unreadable", name, what, "nothing was moved")
    yield from _foreign_in(layout, "")
    for folder in names_in(layout.segments):
        path, where = layout.segments / folder, f"segments/{folder}"
        if is_link(path):
            what = f"{where!a} is a link, and links inside a store are not followed: put the folder itself in its place"
            yield Finding("unreadable", where, what)
            continue
        if not _is_folder(path):
            yield _foreign_file(where)
        for name in names_in(path):
            if (parse_segment(name) or "")[:2] != folder:
                yield _foreign_file(f"{where}/{name}")
    now = time.time()
    for name in names_in(layout.temporary):
        if not is_temporary(name):
            yield _foreign_file(f"tmp/{name}")
            continue
        with suppress(OSError):  # it is gone
            age = now - (layout.temporary / name).lstat().st_mtime
            if age > STALE_SECONDS:
                what = f"tmp/{name} was left {age / 3600:.0f} h ago by a process that died"
                yield Finding("stale-temp", f"tmp/{name}", what, "it is harmless")


def _foreign_in(layout: Layout, folder: str) -> Iterator[Finding]:
    """Findings for a folder, which is empty or ends in a slash, and those in it. Segments and temporary files are checked elsewhere."""
    for name in names_in(layout.root / folder, is_root=not folder):
        where = f"{folder}{name}"
        if is_own_folder(where):
            yield from _foreign_in(layout, f"{where}/") if where not in {"segments", "tmp"} else ()
        elif not is_own_file(where):
            yield _foreign_file(where)


def _is_folder(path: Path) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _foreign_file(where: str) -> Finding:
    return Finding("foreign-file", where, f"{where!a} was not made by cachestore; it is left alone")
