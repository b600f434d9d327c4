"""The reader's end of its helper process: it starts the helper, sends requests and takes answers. Has no thread, and no network client.

A process has one helper, whatever stores it reads, and shares it with no other: a forked child starts its own at its first request. The
helper ends with the last data set that uses it. If it is killed, the next one gets the open requests again.
"""

import json
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from cachestore.children.kinds import HELPER
from cachestore.core.arguments import as_whole
from cachestore.core.errors import RemoteFailed
from cachestore.core.parent import is_orphan
from cachestore.files.frames import Frame, frame
from cachestore.remote.address import Address
from cachestore.remote.client import ClientLimits, ObjectRef
from cachestore.remote.process import LOOK_SECONDS, SLACK_SECONDS, Helper, HelperEnded, error_of

PARALLEL: Final = "CACHESTORE_IN_FLIGHT"
"""The variable with the number of requests that a helper sends at once."""
_PARALLEL: Final = 32
_LIMITS: Final = ClientLimits()
_SLACK_SECONDS: Final = SLACK_SECONDS
"""A helper that says nothing for so much longer than its own limits does not work."""
_STARTS: Final = 3
"""How many helpers may end one after the other without an answer."""
_ORPHAN: Final = "the process that started this worker has ended"


class HelperRequest:
    """A request, and its answer once there is one."""

    __slots__ = ("__weakref__", "body", "error", "head", "line", "number")

    def __init__(self, number: int, line: bytes) -> None:
        self.number = number
        self.line = line
        self.head: Mapping[str, Any] | None = None
        """None until the answer is here."""
        self.body: bytes = b""
        self.error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is no answer yet."""
        return self.head is None

    def result(self) -> bytes:
        """Return the bytes of the answer. Raises the helper's error."""
        if self.error is not None:
            raise self.error
        return self.body


class Downloads:
    """The helper of this process. Several threads may use it; each waits for its own answers."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._parent = os.getppid()
        self._turn = threading.Condition()
        """Held while anything below changes, and while a request is written."""
        self._is_reading = False
        """Whether a thread reads answers now; the others wait for it."""
        self._helper: Helper | None = None
        self._environment: dict[str, str] = {}
        """The environment in which the helper was started."""
        self._parallel = _PARALLEL
        self._open: weakref.WeakValueDictionary[int, HelperRequest] = weakref.WeakValueDictionary()
        """What waits for an answer. A request that nothing holds any more, as its data set is gone, is not sent to the next helper."""
        self._numbers = 0
        self._users = 0
        self._starts = 0
        """Helpers that were started since the last answer."""
        self._heard = 0.0
        """When an answer came last, or a part of one."""

    def hold(self, user: object) -> None:
        """Let the helper live as long as this object, at least. One that was started in another environment is replaced."""
        with self._turn:
            self._users += 1
            weakref.finalize(user, self._release)
            if self._environment != os.environ and not self._is_reading:
                self.end()  # endpoint or credentials may be other ones

    def _release(self) -> None:
        self._users -= 1
        if not self._users and self._pid == os.getpid():
            self._stop()

    def end(self) -> str:
        """End the helper, and return how it ended, in words. The next request starts another one."""
        helper, self._helper = self._helper, None
        return helper.end() if helper is not None else ""

    def _stop(self) -> None:
        """End the helper. While a thread reads its answers, only its process: the pipes are that thread's to close."""
        if not self._is_reading:
            self.end()
        elif self._helper is not None:
            self._helper.kill()

    def abandon(self) -> None:
        """In a forked child: close the inherited pipes. The helper is the parent's."""
        if self._helper is not None:
            self._helper.abandon()
            self._helper = None

    @property
    def helper_pid(self) -> int | None:
        """The pid of the helper, if one runs."""
        return self._helper.pid if self._helper is not None else None

    def send(self, body: Mapping[str, Any]) -> HelperRequest:
        """Send a request without waiting for the answer. Raises BadInput if `CACHESTORE_IN_FLIGHT` is no number.

        Raises RemoteFailed in a worker, such as a DataLoader's, that outlives its trainer: it would wait for a server in vain.
        """
        if is_orphan(self._parent):
            raise RemoteFailed(f"{_ORPHAN}; run the same command again")
        with self._turn:
            if self._helper is None:
                self._parallel = _parallel()
            self._numbers += 1
            line = frame({"n": self._numbers, **body})
            self._open[self._numbers] = request = HelperRequest(self._numbers, line)
            if self._helper is None:
                self._start()  # sends all that is open
            else:
                try:
                    self._write(line)
                except HelperEnded:
                    self._stop()
                    if not self._is_reading:  # or else the thread that reads starts the next one
                        self._start()
            return request

    def wait(self, requests: Iterable[HelperRequest]) -> None:
        """Wait until all these have an answer. The wait has a bound: after it, the answer is a RemoteFailed."""
        with self._turn:
            since = time.monotonic()
            for request in requests:
                while request.is_open:
                    if self._is_reading:
                        self._turn.wait(LOOK_SECONDS)
                        continue
                    if request.number not in self._open:  # another thread gave up on all of them
                        request.head, request.error = {}, RemoteFailed("the helper process was given up: run the same command again")
                        continue
                    self._read_once(since)

    def take(self) -> None:
        """Take the answers that are here already, without waiting."""
        with self._turn:
            while not self._is_reading and self._open and self._helper is not None and self._read_once(time.monotonic(), seconds=0.0):
                pass

    def _read_once(self, since: float, seconds: float = LOOK_SECONDS) -> bool:
        """Hand out what comes next, with `_turn` held at both ends. Gives up if nothing came for too long, counted from `since` on.

        Returns whether something came.
        """
        self._is_reading, helper = True, self._helper
        answers: Sequence[Frame] | None = ()
        has_ended = helper is None
        self._turn.release()
        try:
            answers = helper.receive(seconds) if helper is not None else ()
        except HelperEnded:
            has_ended = True
        finally:
            self._turn.acquire()
            self._is_reading = False
            self._turn.notify_all()
        if has_ended:
            if self._helper is helper:
                self._start()
            return True
        if answers is None and not seconds:
            return False
        if answers is None and is_orphan(self._parent):
            self._give_up(_ORPHAN)
        elif answers is None:
            silence = time.monotonic() - max(since, self._heard)
            if silence > sum(_LIMITS) + _SLACK_SECONDS:
                self._give_up(f"the helper process did not answer for {silence:.0f} s")
        else:
            self._heard = time.monotonic()
            for head, body in answers:
                request = self._open.pop(head["n"], None)
                if request is not None:
                    request.body = body
                    request.error = error_of(head)
                    request.head = head
                    self._starts = 0
        return answers is not None

    def _start(self) -> None:
        while True:
            reason = self.end()
            self._starts += 1
            if self._starts > _STARTS:
                self._give_up(f"{_STARTS} helper processes ended without an answer (the last one with {reason})")
                return
            try:
                self._environment = dict(os.environ)
                self._helper = Helper(HELPER, *_LIMITS, self._parallel)
                for request in list(self._open.values()):
                    self._write(request.line)
            except HelperEnded:
                continue
            except OSError as error:
                self._give_up(f"cannot start the helper process: {error}")
            return

    def _write(self, line: bytes) -> None:
        if self._helper is None:
            raise HelperEnded
        self._helper.send(line)

    def _give_up(self, reason: str) -> None:
        self.end()
        self._starts = 0
        for request in list(self._open.values()):
            request.error = RemoteFailed(f"{reason}; run the same command again: it continues from here")
            request.head = {}
        self._open.clear()


def _parallel() -> int:
    given = os.environ.get(PARALLEL, "")
    return as_whole(PARALLEL, int(given) if given.isdecimal() else given or _PARALLEL, least=1)


_current: Downloads | None = None
_making = threading.Lock()


def downloads() -> Downloads:
    """Return the helper of this process. It starts with the first request."""
    global _current  # noqa: PLW0603 - one for each process
    with _making:
        if _current is None:
            _current = Downloads()
        return _current


def _renew() -> None:
    global _current, _making
    if _current is not None:
        _current.abandon()
    _current, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class HelperClient:
    """The reading half of a `Client`, by the helper of this process."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def _ask(self, **body: Any) -> bytes:
        helper = downloads()
        request = helper.send({"address": str(self.address), **body})
        helper.wait([request])
        return request.result()

    def list(self, folder: str = "") -> Iterator[list[ObjectRef]]:
        """Yield all objects below a folder."""
        yield [ObjectRef(*found) for found in json.loads(self._ask(do="list", folder=folder))]

    def get(self, key: str) -> bytes:
        """Return a small object."""
        return self._ask(do="get", key=key)

    def get_range(self, key: str, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on; fewer only at the object's end."""
        return self._ask(do="range", key=key, start=start, size=size)
