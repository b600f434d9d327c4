"""A helper process, which has the network client: how another process starts it, how it gets requests, how errors travel.

obstore starts threads that stay until their process ends, and that a fork would kill. So only helpers have them: one for each process that
trains from a bucket (`downloads`), and one for each push, pull and `ls` of an address (`cachestore.remote.call`).
"""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from cachestore.children.kinds import ChildKind
from cachestore.children.start import ChildProcess, reason_of, start
from cachestore.core import errors, system
from cachestore.core.errors import CacheStoreError, ReadFailed
from cachestore.files.frames import Frame, Frames

END_SECONDS: Final = 30.0
"""How long a killed helper is waited for."""
SLACK_SECONDS: Final = 30.0
"""A helper that takes no request for so long does not work."""
LOOK_SECONDS: Final = 1.0
_READ_BYTES: Final = 1 << 20


class HelperEnded(Exception):
    """The helper has ended, or closed its pipes."""


class Helper:
    """A helper of this process, and the wire to it. One thread at a time sends, and one receives."""

    def __init__(self, kind: ChildKind, *arguments: object) -> None:
        """Start it. Raises OSError."""
        self._child: ChildProcess = start(kind, os.getpid(), *arguments, bufsize=0)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._requests, self._answers = self._child.stdin, self._child.stdout
        self._frames = Frames()
        self._ended_with: str | None = None
        system.never_block(self._requests.fileno())
        with suppress(ImportError, AttributeError, OSError):  # Linux only
            import fcntl

            fcntl.fcntl(self._answers.fileno(), fcntl.F_SETPIPE_SZ, _READ_BYTES)

    @property
    def pid(self) -> int:
        """The pid of the helper."""
        return self._child.pid

    def send(self, line: bytes) -> None:
        """Write a frame. The helper always reads, so this hardly waits. Raises HelperEnded."""
        left, since = memoryview(line), time.monotonic()
        while left:
            try:
                left = left[os.write(self._requests.fileno(), left) :]
            except BlockingIOError:
                if time.monotonic() - since > SLACK_SECONDS:
                    raise HelperEnded from None
                system.wait_writable(self._requests.fileno(), LOOK_SECONDS)
            except (OSError, ValueError) as error:  # ValueError: another thread has closed the pipes
                raise HelperEnded from error

    def receive(self, seconds: float = LOOK_SECONDS) -> list[Frame] | None:
        """Return the frames that are whole after the next piece of answers; None if nothing came for so long. Raises HelperEnded."""
        try:
            if not system.is_readable(self._answers.fileno(), seconds):
                if seconds and self._child.poll() is not None:  # a process that was forked at the wrong moment holds the pipe open
                    raise HelperEnded
                return None
            data = os.read(self._answers.fileno(), _READ_BYTES)
        except (OSError, ValueError) as error:
            raise HelperEnded from error
        if not data:
            raise HelperEnded
        return list(self._frames.take(data))

    def wait(self, seconds: float) -> None:
        """Wait until it ends by itself, at most so long."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)

    def kill(self) -> None:
        """Kill it. Its pipes stay open, for a thread that reads them."""
        self._child.kill()

    def end(self) -> str:
        """End it, unless it has ended, and close its pipes. Returns how it ended, in words."""
        if self._ended_with is None:
            self._child.kill()
            self.wait(END_SECONDS)
            self._ended_with = reason_of(self._child)
            self._close()
        return self._ended_with

    def abandon(self) -> None:
        """In a forked child: close the inherited pipes. The helper is the parent's."""
        self._close()
        self._child.returncode = 0  # it is not a child of this process

    def _close(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def requests_of() -> Iterator[Mapping[str, Any]]:
    """In a helper: yield the heads of the frames of stdin until the process that started the helper closes it, or ends.

    A process that the other one forked may hold stdin open: `cachestore.core.parent` watches for the end itself.
    """
    frames = Frames()
    while data := os.read(0, _READ_BYTES):
        for request in frames.take(data):
            yield {name: value for name, value in request.head.items() if name != "body"}


def write_out(data: "bytes | bytearray") -> None:
    """In a helper: write all of this to stdout. Raises OSError if the process that started the helper is gone."""
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


def error_as_json(error: Exception) -> dict[str, Any]:
    """Return the fields of an answer that says that a request failed."""
    reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    words = str(error) if isinstance(error, CacheStoreError) else f"the helper process failed: {reason}"
    return {"error": type(error).__name__, "errno": getattr(error, "errno", None), "message": words}


def error_of(answer: Mapping[str, Any]) -> Exception | None:
    """Return the error that an answer tells of. None if it tells of none."""
    if "error" not in answer:
        return None
    kind = getattr(errors, answer["error"], None)
    error = kind(answer["message"]) if isinstance(kind, type) and issubclass(kind, CacheStoreError) else ReadFailed(answer["message"])
    if isinstance(error, OSError):
        error.errno = answer["errno"]
    return error
