"""The wall around a process that reads what strangers wrote: once it stands, the process may compute, and use the pipes it has.

On Linux a filter of system calls (seccomp) allows a short list and refuses all others with EPERM, for good: no file is opened, made,
linked, renamed or removed, no socket is opened, no program started, no signal sent, no memory of another process read. Elsewhere only the
limits of `resource` hold. So import everything before, and read once what would be imported late.
"""

import ctypes
import errno
import os
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from cachestore.core.signals import leave_to_starter


class _Architecture(NamedTuple):
    audit: int
    """How the kernel names it in a filter."""
    seccomp: int
    prlimit64: int
    allowed: Mapping[str, int]


_NAMES: Final = (
    *("read", "write", "close", "mmap", "mprotect", "munmap", "mremap", "madvise", "brk", "futex", "sched_yield", "rt_sigreturn"),
    *(
        "rt_sigprocmask",
        "clock_gettime",
        "gettimeofday",
        "getrandom",
        "getpid",
        "gettid",
        "getrusage",
        "restart_syscall",
        "exit",
        "exit_group",
    ),
)
"""All that may be called: memory, time, pipes that are open, and the end. `prlimit64` may be, for the process itself."""
_X86_64: Final = (0, 1, 3, 9, 10, 11, 25, 28, 12, 202, 24, 15, 14, 228, 96, 318, 39, 186, 98, 219, 60, 231)
_AARCH64: Final = (63, 64, 57, 222, 226, 215, 216, 233, 214, 98, 124, 139, 135, 113, 169, 278, 172, 178, 165, 128, 93, 94)
_ARCHITECTURES: Final = {
    "x86_64": _Architecture(0xC000003E, 317, 302, dict(zip(_NAMES, _X86_64, strict=True))),
    "aarch64": _Architecture(0xC00000B7, 277, 261, dict(zip(_NAMES, _AARCH64, strict=True))),
}

# Of linux/filter.h: load a word of the call's data, compare it, return what to do.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _AUDIT, _FIRST_LOW, _FIRST_HIGH = 0, 4, 16, 20
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000

_SET_FILTER, _ACTION_AVAILABLE, _ALL_THREADS = 1, 2, 1
_NO_NEW_PRIVILEGES, _DEATH_SIGNAL = 38, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_available() -> bool:
    """Return whether this system can filter system calls."""
    found = _architecture()
    return found is not None and _call(found.seccomp, _ACTION_AVAILABLE, 0, struct.pack("=I", _REFUSE & 0xFFFF0000)) == 0


def build() -> bool:
    """Build the wall around this process, for good. Returns whether the filter stands; without it, only the limits of `resource` do.

    It ends when the thread that started it does, and leaves signals to the process that started it.
    """
    leave_to_starter()
    _forbid_descriptors_and_programs()
    found = _architecture()
    if found is None:
        return False
    control = _libc().prctl
    control(_DEATH_SIGNAL, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
    control(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    instructions = _filter(found)
    program = _Program(len(instructions) // 8, instructions)
    return _call(found.seccomp, _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0


def _architecture() -> _Architecture | None:
    """Return what is known of this machine; None if it is no Linux, or of another kind."""
    is_linux = sys.platform == "linux" and sys.maxsize > 1 << 32
    return _ARCHITECTURES.get(os.uname().machine) if is_linux else None


def _filter(machine: _Architecture) -> bytes:
    """Return the program that the kernel runs for each call: it allows by number, and refuses the rest."""
    lines = [(_LOAD, 0, 0, _AUDIT), (_IF_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for number in machine.allowed.values():
        lines += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    itself = [(_LOAD, 0, 0, _FIRST_LOW), (_IF_EQUAL, 0, 3, 0), (_LOAD, 0, 0, _FIRST_HIGH), (_IF_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_IF_EQUAL, 0, len(itself), machine.prlimit64), *itself, (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _call(number: int, *arguments: object) -> int:
    return _libc().syscall(ctypes.c_long(number), *(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _forbid_descriptors_and_programs() -> None:
    """Let nothing be opened, and no process be made, where the system counts them. Some systems refuse such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC"):
        try:
            resource.setrlimit(getattr(resource, name), (0, 0))
        except (AttributeError, OSError, ValueError):
            continue
