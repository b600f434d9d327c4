"""Work that two threads of one process share for as long as one call takes."""

import _thread
import os
from collections.abc import Callable
from typing import Final

_LOOK_SECONDS: Final = 1.0

_HERE: Final = "here"
_THERE: Final = "there"


def run_side_by_side(work: Callable[[], None]) -> None:
    """Run `work` here and in a second thread at once; the thread has ended when this returns or raises.

    For work that two can take piece by piece from one place, so that who finds nothing left returns: what is waited for at the end is
    the other's last piece, or its start where it got no processor (or not the interpreter's lock) until then. Where no thread can be
    started, all is done here.

    Raises what `work` raised; here, where both did. A signal's exception is raised when the other thread is at work no more. Raises
    RuntimeError in a child that was forked inside of the call, by a signal's handler.
    """
    other = _Other(work)
    error: BaseException | None = None
    # A signal's exception may come after every call and every jump: it is kept, and what is left to do then is to wait. Nothing is called
    # where it would be raised. Of several signals at once the next is raised at the jump back, so there is a loop around the loop.
    while not other.has_ended:
        try:
            other.work_and_wait()
        except BaseException as raised:  # noqa: BLE001 - raised below
            error = raised if error is None else error
    try:
        for failed in (other.error_here, error, other.error_there):
            if failed is not None:
                raise failed
    finally:
        failed = error = other.error_here = other.error_there = None  # or what was raised would keep the caller's memory


class _Other:
    def __init__(self, work: Callable[[], None]) -> None:
        self.has_ended = False
        self.error_here: BaseException | None = None
        self.error_there: BaseException | None = None
        self._work = work
        self._is_to_work = True
        self._process = os.getpid()
        self._begun: dict[str, str] = {}
        """Who was first to say whether this thread does anything; `setdefault` is one step, and says the same again."""
        self._is_started = False
        self._has_run: list[bool] = []
        self._running = _thread.allocate_lock()
        """Held until the thread has run; waited for a little at a time, as a signal's exception may leave it with the one who waited."""
        self._running.acquire()

    def work_and_wait(self) -> None:
        """Do the part of the thread that waits; called again it only waits."""
        while not self.has_ended:
            try:
                if self._is_to_work:
                    self._is_to_work = False
                    self._start()
                    self._work()
                self._wait()
            except BaseException as raised:  # noqa: BLE001 - raised by who called
                self.error_here = raised if self.error_here is None else self.error_here

    def _start(self) -> None:
        # Not threading.Thread, whose start waits until the other thread runs: twice the time of this, and a fifth of a batch of 8 MiB.
        try:
            _thread.start_new_thread(self._run, ())
            self._is_started = True
        except RuntimeError as error:  # as many threads as this user may have; a signal's handler may raise one of its own
            if "can't start" not in str(error):
                raise

    def _run(self) -> None:
        try:
            if self._begun.setdefault("by", _THERE) == _THERE:
                self._work()
        except BaseException as raised:  # noqa: BLE001 - the border between two threads: it is raised in the other one
            self.error_there = raised
        finally:
            self._has_run.append(True)
            self._running.release()

    def _wait(self) -> None:
        """Until the thread has ended; one that had not begun, and that an interruption kept us from knowing of, will touch nothing."""
        if self._begun.setdefault("by", _HERE) == _THERE or self._is_started:
            while not self._has_run:
                self._check_process()
                self._running.acquire(timeout=_LOOK_SECONDS)
        self.has_ended = True

    def _check_process(self) -> None:
        """In a forked child the thread is not there, nor what it was to do."""
        if os.getpid() != self._process:
            self.has_ended = True
            raise RuntimeError(
                "this process was forked while two threads shared some work, and one of them is not in it; do the work again"
            )
