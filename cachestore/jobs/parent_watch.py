"""In a worker: end with the process that started this one."""

import os
import signal
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

PARENT: Final = "CACHESTORE_PARENT"
"""Tells a worker the process that started it; the other end of its stdin is that process's alone."""

LEAVE_SECONDS: Final = 60.0
"""A worker whose parent is gone leaves after so long, published or not."""

PARENT_SECONDS: Final = 0.5


def watch_parent(environment: MutableMapping[str, str]) -> bool:
    """In a process that another one of ours started: stop as on SIGTERM when that one is gone, and leave for good 60 s later.

    Returns whether there is such a parent; without one, nothing is watched. The two threads that watch are this process's own and end
    with it. Stdin ends with the parent, unless a process that the parent forked holds the other end too: so the parent's number, which
    changes when it dies, is watched as well.
    """
    named = environment.pop(PARENT, "")
    if not named.isdecimal():
        return False
    gone = threading.Event()
    threading.Thread(target=_read_to_the_end, args=(gone,), name="cachestore-stdin", daemon=True).start()
    threading.Thread(target=_leave_with, args=(gone, os.getppid(), int(named)), name="cachestore-parent", daemon=True).start()
    return True


def _read_to_the_end(gone: threading.Event) -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    gone.set()


def _leave_with(gone: threading.Event, parent: int, named: int) -> None:
    was_gone_before = parent == 1 != named  # it died before this process could ask: init is the parent now
    while not was_gone_before and os.getppid() == parent and not gone.wait(PARENT_SECONDS):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_SECONDS)
    os._exit(128 + signal.SIGTERM)
