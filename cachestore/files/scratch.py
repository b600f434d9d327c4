"""Folders for temporary files, outside of any store. Knows nothing of what is put there."""

import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cachestore.core.errors import WriteFailed, numbered
from cachestore.files.locks import LifeLock, is_locked
from cachestore.files.opening import names_in, reason_of

MAKE_ROOM: Final = "make room there, or set TMPDIR to another folder, then run the same command again"
_NAME: Final = "cachestore-"
_LOCK: Final = "lock"
_FILES: Final = "files"
_YOUNG_SECONDS: Final = 60.0
"""A younger folder may have been made just now: its process has not taken the lock yet."""


@contextmanager
def scratch_folder(above: Path | None = None) -> Generator[Path]:
    """Give the block an empty folder below `above`, by default below TMPDIR, which ends with the block. Raises WriteFailed.

    What killed processes of this user and machine left there is removed first: locks of others may not be seen from here.
    """
    mine = f"{_NAME}{socket.gethostname()}-"
    try:
        above = above or Path(tempfile.gettempdir())
        for folder in [above / name for name in names_in(above, is_root=True) if name.startswith(mine)]:
            with suppress(OSError):  # a free lock: its process has ended
                if _is_own_and_old(folder.lstat()) and is_locked(folder / _LOCK) is False:
                    shutil.rmtree(folder)
        made = tempfile.TemporaryDirectory(prefix=mine, dir=above, ignore_cleanup_errors=True)
    except OSError as error:
        where = above or "there is no folder for temporary files"
        raise numbered(WriteFailed(f"cannot write {where}: {reason_of(error)}; {MAKE_ROOM}"), error) from error
    with made as name, LifeLock(Path(name, _LOCK)):
        folder = Path(name, _FILES)
        folder.mkdir()
        yield folder


def _is_own_and_old(status: os.stat_result) -> bool:
    is_own = stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid())
    return is_own and status.st_mtime < time.time() - _YOUNG_SECONDS
