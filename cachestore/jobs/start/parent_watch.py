"""Ends a worker when the process that started it is gone."""

import os
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

from cachestore.core import system
from cachestore.core.parent import leave_with
from cachestore.core.signals import heard

PARENT: Final = "CACHESTORE_PARENT"
"""The variable with the pid of the process that started a worker. That process alone holds the other end of the worker's stdin."""

LEAVE_SECONDS: Final = 60.0
"""How long after its parent's end a worker exits, even if it has not published."""


def watch_parent(environment: MutableMapping[str, str]) -> bool:
    """Watch the `cachestore` process that started this one: send this process a signal when it is gone, and exit 60 s later.

    Return whether there is such a parent; without one, nothing is watched. Two daemon threads watch: one reads stdin, which ends at once
    with the parent, unless a process that the parent forked holds the other end too; the other one watches the parent's pid.
    """
    named = environment.pop(PARENT, "")
    if not named.isdecimal():
        return False
    gone = threading.Event()
    threading.Thread(target=_read_to_the_end, args=(gone,), name="cachestore-stdin", daemon=True).start()
    leave_with(int(named), seconds=LEAVE_SECONDS, gone=gone)
    return True


def _read_to_the_end(gone: threading.Event) -> None:
    with suppress(OSError):
        while os.read(0, 4096):  # on Windows, which has no signals, the parent asks to stop so
            system.signal_self(heard())
    gone.set()
