"""Keeps what reads or encodes in a forked process out of torch's threads, which do not exist there. Imports no torch.

torch divides large operations among threads that it starts once and keeps: `exp` of 2,048 numbers and more, copies and sums of 32,768. A
forked process has its parent's list of these threads without the threads, and its first such operation waits for them for ever (pytorch
issue 17199). One thread for each operation is no list and no waiting: so a DataLoader sets it in its workers, which are forked too.

A process that was not forked pays one look at a variable for each call, and a forked one that does not read pays nothing.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FORKED_WITHOUT_EXEC: Final = 0x40
"""PF_FORKNOEXEC among the flags of a process, as the kernel keeps them."""


def _began_as_fork() -> bool:
    """Whether this process was forked and runs its parent's program still. Only Linux tells; False elsewhere."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _FORKED_WITHOUT_EXEC)


def _has_torch() -> bool:
    return sys.modules.get("torch") is not None


# A child may be the first to import this, after its parent has used torch.
_is_forked = _has_torch() and _began_as_fork()
"""Whether torch may have been in use when this process was forked."""
_has_read = False
"""Whether this process has read or encoded since it was forked."""


def _note_fork() -> None:
    global _is_forked, _has_read
    _is_forked, _has_read = _has_torch(), False


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_note_fork)


def in_one_thread(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function use one thread of torch in a forked process. Nothing changes in any other.

    The first call sets that for the process, so that what the caller does with the tensors does not hang either. A later number holds.
    """

    @wraps(read)
    def reading(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return _alone(read, *args, **kwargs) if _is_forked else read(*args, **kwargs)

    return reading


def _alone(read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    global _has_read
    torch: Any = sys.modules["torch"]
    was_set_here, _has_read = _has_read, True
    number: int = torch.get_num_threads()
    if number == 1 or not torch.backends.openmp.is_available():
        return read(*args, **kwargs)
    torch.set_num_threads(1)
    try:
        return read(*args, **kwargs)
    finally:
        if was_set_here:
            torch.set_num_threads(number)
