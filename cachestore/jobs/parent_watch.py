"""Ends a worker when the process that started it is gone."""

import os
import signal
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

from cachestore.core.signals import heard

PARENT: Final = "CACHESTORE_PARENT"
"""The variable with the pid of the process that started a worker. That process alone holds the other end of the worker's stdin."""

LEAVE_SECONDS: Final = 60.0
"""How long after its parent's end a worker exits, even if it has not published."""

PARENT_SECONDS: Final = 0.5


def watch_parent(environment: MutableMapping[str, str]) -> bool:
    """Watch the `cachestore` process that started this one: send this process a signal when it is gone, and exit 60 s later.

    Return whether there is such a parent; without one, nothing is watched. Two daemon threads watch. One reads stdin, which ends with the
    parent, unless a process that the parent forked holds the other end too. So the other thread watches the parent's pid, which changes
    when the parent dies.
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
    os.kill(os.getpid(), heard())
    time.sleep(LEAVE_SECONDS)
    os._exit(128 + signal.SIGTERM)
