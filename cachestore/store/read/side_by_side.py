"""Share the work of one call between two threads."""

import _thread
import os
from collections.abc import Callable
from typing import Final

_LOOK_SECONDS: Final = 1.0

_HERE: Final = "here"
_THERE: Final = "there"


def run_side_by_side(work: Callable[[], None]) -> None:
    """Run `work` in this thread and in a second one. The second has ended when this returns or raises.

    Both threads take pieces of the work from one place until none is left. At the end this waits for the other's last piece, or for its
    start if it got no processor (or not the GIL) until then. If no thread can be started, all is done here.

    Raises what `work` raised; if both threads raised, this thread's error. An exception from a signal is raised when the other thread has
    ended. Raises RuntimeError in a child that a signal's handler forked during the call.
    """
    other = _Other(work)
    error: BaseException | None = None
    # A signal may raise after every call and every jump. Its exception is kept, and only the wait is left to do. Nothing is called where it
    # would be raised. With several signals at once the next one raises at the jump back, so there is a loop around the loop.
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
        failed = error = other.error_here = other.error_there = None  # else the exception would keep the caller's memory


class _Other:
    def __init__(self, work: Callable[[], None]) -> None:
        self.has_ended = False
        self.error_here: BaseException | None = None
        self.error_there: BaseException | None = None
        self._work = work
        self._is_to_work = True
        self._process = os.getpid()
        self._begun: dict[str, str] = {}
        """Which thread first decided whether the second one does anything. `setdefault` is atomic, and gives the same answer again."""
        self._is_started = False
        self._has_run: list[bool] = []
        self._running = _thread.allocate_lock()
        """Held until the thread has run. Waits are short, as a signal's exception may leave the lock with the waiting thread."""
        self._running.acquire()

    def work_and_wait(self) -> None:
        """Do the waiting thread's part. Called again, it only waits."""
        while not self.has_ended:
            try:
                if self._is_to_work:
                    self._is_to_work = False
                    self._start()
                    self._work()
                self._wait()
            except BaseException as raised:  # noqa: BLE001 - raised by the caller
                self.error_here = raised if self.error_here is None else self.error_here

    def _start(self) -> None:
        # Not threading.Thread, whose start waits until the other thread runs: that takes twice as long, a fifth of a batch of 8 MiB.
        try:
            _thread.start_new_thread(self._run, ())
            self._is_started = True
        except RuntimeError as error:  # this user has too many threads; a signal's handler may raise one of its own
            if "can't start" not in str(error):
                raise

    def _run(self) -> None:
        try:
            if self._begun.setdefault("by", _THERE) == _THERE:
                self._work()
        except BaseException as raised:  # noqa: BLE001 - the border between two threads: the other one raises it
            self.error_there = raised
        finally:
            self._has_run.append(True)
            self._running.release()

    def _wait(self) -> None:
        """Wait until the thread has ended. One that had not begun, and whose start an interruption hid from us, will do nothing."""
        if self._begun.setdefault("by", _HERE) == _THERE or self._is_started:
            while not self._has_run:
                self._check_process()
                self._running.acquire(timeout=_LOOK_SECONDS)
        self.has_ended = True

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked child, where the other thread does not exist."""
        if os.getpid() != self._process:
            self.has_ended = True
            raise RuntimeError(
                "this process was forked while two threads shared some work, and one of them is not in it; do the work again"
            )
