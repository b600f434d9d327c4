"""Mounts a folder as a badly cached network file system shows it: a name that was looked up leads to the same file for some seconds,
whatever others put in its place, and locks reach nobody on another mount. `python stale_folder.py FOLDER MOUNT SECONDS`; needs mfusepy."""

# pyright: reportIncompatibleMethodOverride=false
import os
import sys
import time
from typing import Any

import mfusepy

SHOWN = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino", "st_dev")
TIMES = ("st_atime", "st_mtime", "st_ctime")
ROOM = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")


class StaleFolder(mfusepy.Operations):
    """One machine's view of a folder."""

    use_ns = True

    def __init__(self, root, seconds):
        self.root = root
        self.seconds = seconds
        self.looked_up = {}

    def at(self, path):
        return self.root + path

    def known(self, path):
        """The file that this machine takes a name for, as an open descriptor."""
        found = self.looked_up.get(path)
        if found is None or time.monotonic() - found[0] > self.seconds:
            self.forget(path)
            found = self.looked_up[path] = (time.monotonic(), os.open(self.at(path), os.O_RDONLY))
        return found[1]

    def forget(self, path):
        if found := self.looked_up.pop(path, None):
            os.close(found[1])

    def getattr(self, path, fh=None):
        status = os.fstat(fh) if fh is not None else os.fstat(self.known(path))
        return {name: getattr(status, name) for name in SHOWN} | {name: getattr(status, f"{name}_ns") for name in TIMES}

    def readdir(self, path, _fh):
        return [".", "..", *os.listdir(self.at(path))]

    def open(self, path, flags):
        return os.dup(self.known(path)) if flags & os.O_ACCMODE == os.O_RDONLY else os.open(self.at(path), flags)

    def create(self, path, mode, _fi=None):
        self.forget(path)
        return os.open(self.at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, _path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, _path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def fsync(self, _path, _datasync, fh):
        os.fsync(fh)

    def release(self, _path, fh):
        os.close(fh)

    def rename(self, old, new):
        self.forget(old)
        self.forget(new)
        os.rename(self.at(old), self.at(new))

    def link(self, target, source):
        self.forget(target)
        os.link(self.at(source), self.at(target))

    def unlink(self, path):
        self.forget(path)
        os.unlink(self.at(path))

    def mkdir(self, path, mode):
        os.mkdir(self.at(path), mode)

    def chmod(self, path, mode):
        os.chmod(self.at(path), mode)

    def utimens(self, path, times=None):
        os.utime(self.at(path), ns=times or (time.time_ns(), time.time_ns()))

    def truncate(self, path, length, _fh=None):
        os.truncate(self.at(path), length)

    def statfs(self, path):
        status = os.statvfs(self.at(path))
        return {name: getattr(status, name) for name in ROOM}


if __name__ == "__main__":
    folder, mount, seconds = sys.argv[1:]
    quick: Any = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}  # what is remembered is remembered above
    mfusepy.FUSE(StaleFolder(folder, float(seconds)), mount, foreground=True, nothreads=True, direct_io=True, **quick)
