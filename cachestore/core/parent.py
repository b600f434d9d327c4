"""Notices that the process that started this one has ended. A process of ours then ends too, whatever it waits for.

A pid is watched and not a pipe, which stays open while a process that the other one forked holds it. Linux's PR_SET_PDEATHSIG would be of
no use: it is sent when the thread that started the process ends. On Windows a handle of the process is watched.
"""

import os
import signal
import sys
import threading
import time
from typing import Final

from cachestore.core import system
from cachestore.core.signals import heard

LOOK_SECONDS: Final = 0.5


def leave_with(starter: int, *, seconds: float, gone: threading.Event | None = None) -> None:
    """Watch the process with this pid, which started this one. When it has ended, or `gone` is set, end this process of ours.

    It gets a signal first, and exits so many seconds later; at once for 0. Then `gone` is set. The thread is a daemon.
    """
    threading.Thread(target=_leave_with, args=(starter, seconds, gone or threading.Event()), name="cachestore-parent", daemon=True).start()


def _leave_with(starter: int, seconds: float, gone: threading.Event) -> None:
    parent = system.StartingProcess(starter)
    while not parent.has_ended() and not gone.wait(LOOK_SECONDS):
        pass
    gone.set()
    if seconds:
        system.signal_self(heard())
        time.sleep(seconds)
    os._exit(128 + signal.SIGTERM)


def is_orphan(first: int) -> bool:
    """Return whether this process is a worker of multiprocessing, such as a DataLoader's, and the process that has it work has ended.

    `first` is the pid of its parent from before, which is Python's forkserver for some workers. Any other process may outlive its parent.
    """
    workers = sys.modules.get("multiprocessing.process")
    starter = workers.parent_process() if workers is not None else None
    if starter is None:
        return False
    if system.IS_WINDOWS:
        return not starter.is_alive()
    return os.getppid() != first or not _exists(starter.pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
