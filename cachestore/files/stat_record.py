"""Stat records: what the file system says of a file, as two numbers: its size, and a stamp over its times and its inode.

Equal stat records prove that a file has the same bytes, without reading them. They do so where the kernel or a server keeps the change time
(ctime), which no program can set: on local file systems of Linux and macOS, on NFS and on other network file systems. The inode tells two
files apart that changed in the same step of the clock. Where there is no such change time, as on Windows, on FAT and on many mounts of
object stores (FUSE), the stamp proves as much as the modification time does; `precompute --recheck` reads the bytes.

Stat records that differ prove nothing: `chmod`, a further link, a copied folder or a restored backup change the stamp alone. Then the bytes
are read, and their digest decides.

No number of the device is in it: it may be another one after each mount, and on each node.
"""

import hashlib
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Final

from cachestore.core import system
from cachestore.core.inputs import NO_STAT, Stat, stamp_of

WRITTEN_SECONDS: Final = 2.0
"""A file modified less than this ago may change again with the same modification time: FAT counts in steps of two seconds."""
CHANGED_SECONDS: Final = 2.0
"""The same for the change time, whose steps are milliseconds on local disks, and up to a second on servers."""
_SKEW_SECONDS: Final = 86_400.0
"""How far a server's clock may be ahead. A time further in the future was set by a program."""
_MOUNTS: Final = Path("/proc/self/mountinfo")
_MADE_UP: Final = frozenset({"fuse", "fuseblk", "vfat", "msdos", "exfat"})
"""File systems of Linux that may number their files anew at each mount, or whenever they look one up."""


def stat_of(status: os.stat_result) -> Stat:
    """Return the stat record of a file: (size, stamp)."""
    changed = _changed_ns(status)
    inode = status.st_ino if changed is None or _has_lasting_inodes(status.st_dev) else 0
    digest = hashlib.blake2b(f"{status.st_mtime_ns}|{changed}|{inode}".encode(), digest_size=8).digest()
    return status.st_size, stamp_of(digest)


def proof_of(status: os.stat_result) -> Stat:
    """Return the stat record of a file that is about to be read; NO_STAT if it is so new that it may change and keep its stat record."""
    changed, now = _changed_ns(status), time.time_ns()
    is_fresh = _is_fresh(now - status.st_mtime_ns, WRITTEN_SECONDS) or (changed is not None and _is_fresh(now - changed, CHANGED_SECONDS))
    return NO_STAT if is_fresh else stat_of(status)


def _is_fresh(age_ns: int, seconds: float) -> bool:
    return -_SKEW_SECONDS < age_ns / 1e9 < seconds


def _changed_ns(status: os.stat_result) -> int | None:
    """Return the change time; None on Windows, where Python gives the time at which the file was made."""
    return None if system.IS_WINDOWS else status.st_ctime_ns


@lru_cache(maxsize=256)
def _has_lasting_inodes(device: int) -> bool:
    """Return whether files of this device keep their inodes, as far as the system says what is mounted there."""
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    named = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split(" ")[0] for line in mounts if line.split(" ")[2:3] == [named]]
    return all(kind.partition(".")[0] not in _MADE_UP for kind in kinds)
