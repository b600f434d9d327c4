"""Work that two threads of one process share for as long as one call takes."""

import _thread
from collections.abc import Callable
from typing import Final

_LOOK_SECONDS: Final = 1.0


def run_side_by_side(work: Callable[[], None]) -> None:
    """Run `work` here and in a second thread at once; both have come to their end when this returns or raises.

    For work that two can take piece by piece from one place: who finds nothing left returns, so a second thread that gets no processor
    is not waited for longer than its last piece takes. Where no thread can be started, all is done here.

    Raises what `work` raised; here, where both did.
    """
    # Not threading.Thread, whose start waits until the other thread runs: twice the time of this, and a fifth of a batch of 8 MiB.
    turn = iter([work])
    ended = _thread.allocate_lock()
    ended.acquire()
    outcome: list[BaseException | None] = []

    def run_there() -> None:
        error = None
        try:
            for mine in turn:
                mine()
        except BaseException as raised:  # noqa: BLE001 - the border between two threads: it is raised in the other one
            error = raised
        finally:
            outcome.append(error)
            ended.release()

    is_started = False
    try:
        is_started = _start(run_there)
        work()
    finally:
        # An interruption may have come between the start and our knowing of it. Who took the turn must be waited for; a thread that
        # finds it taken touches nothing.
        is_begun = next(turn, None) is None
        if is_started or is_begun:
            _wait(outcome, ended)
    if outcome and outcome[0] is not None:
        raise outcome[0]


def _start(function: Callable[[], None]) -> bool:
    try:
        _thread.start_new_thread(function, ())
    except RuntimeError:  # as many threads as this user may have
        return False
    return True


def _wait(outcome: list[BaseException | None], ended: "_thread.LockType") -> None:
    """Wait for the other thread, which is at its last piece of work. A signal's exception is raised after that."""
    interruption = None
    while not outcome:
        try:
            ended.acquire(timeout=_LOOK_SECONDS)
        except BaseException as raised:  # noqa: BLE001 - raised below, when nobody writes to the caller's memory any more
            interruption = raised
    if interruption is not None:
        raise interruption
