"""What is done in another way on Windows, for processes; `files/in_use` has what is about files. All that asks for Windows asks here.

Windows has no signals: `os.kill` ends a process at once, also with signal 0. A process's parent stays the same pid after its end. Only
sockets can be waited for by `select`. And the `python.exe` of a virtual environment starts another process, which has another pid.
"""

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

IS_WINDOWS: Final[bool] = os.name == "nt"
_SYNCHRONIZE: Final = 0x100000
_ENDED: Final = 0
"""What waiting for a process says once it has ended: WAIT_OBJECT_0."""
_POLL_SECONDS: Final = 0.005
_MOST_OF_TMPDIR: Final = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes that Linux allows for the name of a socket, less what multiprocessing adds to TMPDIR for one of its own."""
_LAUNCHER: Final = "__PYVENV_LAUNCHER__"
"""The variable by which the base interpreter knows the virtual environment that it runs for."""


def windows_module(module: str) -> Any:
    """A module that only Windows has."""
    return import_module(module)


class StartingProcess:
    """The process that started this one, by its pid. On Windows its handle is open, so that no other process gets the pid."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        if IS_WINDOWS:
            with suppress(OSError):  # it has ended already
                self._handle = windows_module("_winapi").OpenProcess(_SYNCHRONIZE, False, pid)  # noqa: FBT003 - the system's own arguments

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        if not IS_WINDOWS:
            return os.getppid() != self._pid
        return self._handle is None or windows_module("_winapi").WaitForSingleObject(self._handle, 0) == _ENDED


def signal_self(number: int) -> None:
    """Send this process a signal, from any thread. On Windows a handler of Python's is called as for one; without a handler it ends."""
    if not IS_WINDOWS:
        os.kill(os.getpid(), number)
    elif signal.getsignal(number) == signal.SIG_DFL:
        os._exit(128 + number)
    else:
        import_module("_thread").interrupt_main(number)


def send_stop(send_signal: Callable[[int], object], number: int, stdin: int) -> None:
    """Ask a child to stop: by a signal, or on Windows by a line on its stdin, of which this descriptor is the other end."""
    if not IS_WINDOWS:
        send_signal(number)
        return
    with suppress(OSError):  # it has ended
        os.write(stdin, b"stop\n")


def interpreter() -> tuple[str, dict[str, str]]:
    """Return the program that children run, and variables for it: on Windows the base interpreter, so that a child is one process."""
    base = str(getattr(sys, "_base_executable", sys.executable))
    if not IS_WINDOWS or Path(base) == Path(sys.executable):
        return sys.executable, {}
    return base, {_LAUNCHER: sys.executable}


def is_readable(descriptor: int, seconds: float) -> bool:
    """Return whether a pipe has something to read, or has ended, within so many seconds."""
    if not IS_WINDOWS:
        import select

        return bool(select.select([descriptor], [], [], seconds)[0])
    handle, until = windows_module("msvcrt").get_osfhandle(descriptor), time.monotonic() + seconds
    while True:
        try:
            if windows_module("_winapi").PeekNamedPipe(handle, 0)[0]:
                return True
        except OSError:  # the other end is closed
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)


def wait_writable(descriptor: int, seconds: float) -> None:
    """Wait until a pipe that does not block may take more, at most so many seconds."""
    if IS_WINDOWS:
        time.sleep(_POLL_SECONDS)
    else:
        import select

        select.select([], [descriptor], [], seconds)


def never_block(descriptor: int) -> None:
    """Let a full pipe raise BlockingIOError. On Windows, where Python could not until 3.12, writing waits."""
    if not IS_WINDOWS:
        os.set_blocking(descriptor, False)


def too_long_for_workers() -> str:
    """Return what is wrong with a TMPDIR in which workers of a DataLoader cannot make their sockets; "" if they can.

    torch does not notice that they failed: the training would wait for ever.
    """
    from multiprocessing import util  # noqa: TID251 - asked how it works, not to start something

    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    takes_another = hasattr(util, "_get_base_temp_dir")  # Python 3.14 goes to /tmp instead
    if sys.platform != "linux" or length <= _MOST_OF_TMPDIR or takes_another:
        return ""
    return f"TMPDIR is {length} bytes long ({folder}), and workers of a DataLoader can make sockets below at most {_MOST_OF_TMPDIR} bytes"


def in_shell(words: Sequence[str]) -> str:
    """Return a command line of these words, ready to paste into a shell of this system."""
    if not IS_WINDOWS:
        return shlex.join(words)
    from subprocess import list2cmdline

    return list2cmdline(words)


def quoted(word: str) -> str:
    """Return one word of a command line, ready to paste."""
    return in_shell([word])
