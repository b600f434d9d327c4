"""Takes away from a process on Linux what Windows lacks, and refuses what Windows refuses. `site/sitecustomize.py` calls `emulate`.

What it is true to: calls and modules that are missing; descriptors of folders; read-only files and open files (of any process that is
emulated) under unlink, rename and replace; fsync of a descriptor that may not write; `os.kill`, which ends a process; parents whose pid
stays; `select` on pipes; no fork; locks by filelock, whose file goes when they are released.

What it is not true to: paths with backslashes and their lengths, names without case, text in a code page, flags of mmap (torch asks for
them by the system's name), the interpreter of a virtual environment, the times and speeds of Windows.
"""

import builtins
import errno
import fcntl
import os
import select
import signal
import stat
import sys
import time
import warnings
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

FOLDER = "AS_WINDOWS_FOLDER"
"""The variable with a folder in which each emulated process notes its pid: these see each other's open files."""

MISSING = (
    *("fork", "forkpty", "register_at_fork", "pread", "preadv", "pwrite", "pwritev", "readv", "writev", "sendfile", "copy_file_range"),
    *("getuid", "geteuid", "getgid", "getegid", "getgroups", "getpgid", "setsid", "killpg", "setpgid", "nice", "getloadavg"),
    *("statvfs", "fstatvfs", "fchmod", "fchown", "chown", "lchown", "mkfifo", "mknod", "sync", "fdatasync", "set_blocking"),
    *("sched_getaffinity", "posix_fadvise", "memfd_create", "lockf", "fchdir", "RWF_NOWAIT"),
    *("O_DIRECTORY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_SYNC", "O_DSYNC"),
)
SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGXFSZ", "SIGALRM")
_NO_MODULE = ("fcntl", "resource", "termios", "pwd", "grp")
_ASKING = ("cachestore", "filelock", "tempfile", "shutil", "__main__")
_FIONREAD = 0x541B

real = SimpleNamespace(
    **{name: getattr(os, name) for name in ("open", "unlink", "rename", "replace", "rmdir", "kill", "fsync", "stat", "statvfs")},
    ppid=os.getppid(),
    import_=builtins.__import__,
    select=select.select,
)


def refusal(winerror, number, words, *paths):
    """Return an error of the system, with the number that Windows gives."""
    error = OSError(number, words, *map(str, paths[:1]))
    error.winerror = winerror
    return error


def in_use(path):
    """Whether an emulated process has this file open, or mapped."""
    try:
        status = real.stat(path, follow_symlinks=False)
    except OSError:
        return False
    wanted = (status.st_dev, status.st_ino)
    return any(wanted in held_by(name) for name in os.listdir(os.environ[FOLDER]) if name.isdecimal())


def held_by(pid):
    """Yield device and inode of each file that a process has open or mapped."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                status = real.stat(f"/proc/{pid}/fd/{name}")
                yield status.st_dev, status.st_ino
            except OSError:
                continue
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                fields = line.split(None, 5)
                if fields[4] != "0":
                    major, minor = (int(part, 16) for part in fields[3].split(":"))
                    yield os.makedev(major, minor), int(fields[4])
    except OSError:  # it has ended
        return


def is_read_only(path):
    try:
        status = real.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IWUSR


def no_descriptor(**folders):
    if any(value is not None for value in folders.values()):
        raise NotImplementedError("dir_fd unavailable on this platform")


def _open(path, flags, mode=0o777, *, dir_fd=None):
    no_descriptor(dir_fd=dir_fd)
    if not flags & getattr(os, "O_TMPFILE", 0) and os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    if flags & (os.O_WRONLY | os.O_RDWR) and is_read_only(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    return real.open(path, flags | 0o2000000, mode)  # no child inherits it, as on Windows


def _unlink(path, *, dir_fd=None):
    no_descriptor(dir_fd=dir_fd)
    if is_read_only(path):
        raise refusal(5, errno.EACCES, "Access is denied", path)
    if in_use(path):
        raise refusal(32, errno.EACCES, "The process cannot access the file because it is being used by another process", path)
    real.unlink(path)


def _rename(source, target, *, src_dir_fd=None, dst_dir_fd=None, replaces=False):
    no_descriptor(src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    if os.path.lexists(target):
        if not replaces:
            raise refusal(183, errno.EEXIST, "Cannot create a file when that file already exists", source)
        if is_read_only(target) or in_use(target):
            raise refusal(5, errno.EACCES, "Access is denied", source)
    if in_use(source):
        raise refusal(32, errno.EACCES, "The process cannot access the file because it is being used by another process", source)
    real.replace(source, target)


def _replace(source, target, *, src_dir_fd=None, dst_dir_fd=None):
    _rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, replaces=True)


def _rmdir(path, *, dir_fd=None):
    no_descriptor(dir_fd=dir_fd)
    real.rmdir(path)


def _fsync(descriptor):
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real.fsync(number)


def _kill(pid, number):
    """End a process, whatever the signal. Signal 0 is Ctrl-C there, and would reach a whole group of processes: no code may send it."""
    if number == 0:
        raise AssertionError("os.kill(pid, 0) sends Ctrl-C on Windows")
    real.kill(pid, signal.SIGKILL)


def _select(readers, writers, others, timeout=None):
    for one in (*readers, *writers):
        number = one if isinstance(one, int) else one.fileno()
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            raise refusal(10038, errno.ENOTSOCK, "An operation was attempted on something that is not a socket")
    return real.select(readers, writers, others, timeout)


def _symlink(source, target, *_args, **_kwargs):
    raise refusal(1314, errno.EACCES, "A required privilege is not held by the client", source)


def _disk_usage(path):
    status = real.statvfs(path)
    return SimpleNamespace(total=status.f_blocks * status.f_frsize, used=0, free=status.f_bavail * status.f_frsize)


def has_ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _open_process(_access, _inherits, pid):
    if has_ended(pid):
        raise refusal(87, errno.EINVAL, "The parameter is incorrect")
    return pid


def _peek(handle, _size):
    import struct

    left = struct.unpack("i", fcntl.ioctl(handle, _FIONREAD, b"\0" * 4))[0]
    if not left and select.poll and _is_closed(handle):
        raise refusal(109, errno.EPIPE, "The pipe has been ended")
    return left, left


def _is_closed(handle):
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return any(event & select.POLLHUP for _handle, event in poll.poll(0))


WINDOWS_MODULES = {
    "_winapi": SimpleNamespace(
        OpenProcess=_open_process,
        WaitForSingleObject=lambda handle, _milliseconds: 0 if has_ended(handle) else 258,
        CloseHandle=lambda _handle: None,
        PeekNamedPipe=_peek,
    ),
    "msvcrt": SimpleNamespace(get_osfhandle=lambda descriptor: descriptor),
}


def _windows_module(name):
    try:
        return WINDOWS_MODULES[name]
    except KeyError:
        raise ImportError(name) from None


class _FileLock:
    """filelock's lock of Windows, as far as cachestore uses it: exclusive, of one handle, and its file goes with it."""

    def __init__(self, path, *, thread_local, mode, fallback_to_soft):
        self._path, self._mode, self._descriptor = path, mode, None

    def acquire(self, timeout=-1, poll_interval=0.05):
        from filelock import Timeout

        until = time.monotonic() + timeout
        while not self._try():
            if timeout >= 0 and time.monotonic() >= until:
                raise Timeout(str(self._path))
            time.sleep(poll_interval)

    def _try(self):
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, self._mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self):
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(self._path)


def _as_windows(module):
    module.IS_WINDOWS = True
    module.windows_module = _windows_module


def _spawns_only(module):
    """Windows has no other way to start a process of multiprocessing."""
    module._default_context._default_context = module._concrete_contexts["spawn"]
    for name in ("fork", "forkserver"):
        module._concrete_contexts.pop(name, None)


def _import(name, globals=None, *arguments, **named):  # noqa: A002 - Python's own name for it
    """Refuse modules that Windows lacks, but for libraries that ask for the system's name first."""
    importer = (globals or {}).get("__name__", "")
    if name in _NO_MODULE and importer.partition(".")[0] in _ASKING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real.import_(name, globals, *arguments, **named)


def _of_torch(name):
    """torch asks for the system's name and not for its calls: it gets the one that it registers at its import."""
    if name == "register_at_fork" and sys._getframe(1).f_globals.get("__name__", "").startswith("torch"):
        return lambda **_functions: None
    raise AttributeError(f"module 'os' has no attribute {name!r}")


AFTER = {
    "cachestore.core.system": _as_windows,
    "filelock": lambda module: setattr(module, "FileLock", _FileLock),
    "multiprocessing.context": _spawns_only,
}
"""What is done to a module once it is imported."""


class _Finder(MetaPathFinder):
    def __init__(self):
        self._busy = set()

    def find_spec(self, name, path=None, target=None):
        if name not in AFTER or name in self._busy:
            return None
        self._busy.add(name)
        try:
            found = find_spec(name)
        finally:
            self._busy.discard(name)
        if found is not None and found.loader is not None:
            run = found.loader.exec_module

            def exec_module(module):
                with warnings.catch_warnings():  # filelock's, that there is no fcntl
                    warnings.simplefilter("ignore")
                    run(module)
                AFTER[name](module)

            found.loader.exec_module = exec_module
        return found


def emulate():
    """Make this process as on Windows, for ever."""
    Path(os.environ[FOLDER], str(os.getpid())).touch()
    sys.meta_path.insert(0, _Finder())
    builtins.__import__ = _import
    for name in MISSING:
        if hasattr(os, name):
            delattr(os, name)
    for name in SIGNALS:
        if hasattr(signal, name):
            delattr(signal, name)
    for supported in (os.supports_dir_fd, os.supports_fd):
        supported.clear()
    os.open, os.unlink, os.remove, os.rmdir, os.rename, os.replace = _open, _unlink, _unlink, _rmdir, _rename, _replace
    os.fsync, os.kill, os.symlink, os.getppid = _fsync, _kill, _symlink, lambda: real.ppid
    os.__getattr__ = _of_torch
    import shutil

    shutil.disk_usage = _disk_usage
    setattr(shutil, "_use_fd_functions", False)  # noqa: B010 - a name that type checkers do not know
    os.environ.setdefault("USERNAME", "someone")
    select.select = _select
