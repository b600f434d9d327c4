"""A helper process, which has the network client: how another process starts it, how it gets requests, how errors travel.

obstore starts threads that stay until their process ends, and that a fork would kill. So only helpers have them: one for each process that
trains from a bucket (`downloads`), and one for each push, pull and `ls` of an address (`cachestore.remote.call`).
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from cachestore.children.kinds import ChildKind
from cachestore.children.start import ChildProcess, reason_of, start
from cachestore.core import errors
from cachestore.core.errors import CacheStoreError, ReadFailed
from cachestore.files.frames import Frames

END_SECONDS: Final = 30.0
"""How long a killed helper is waited for."""
_READ_BYTES: Final = 1 << 20


def start_helper(kind: ChildKind, *arguments: object) -> ChildProcess:
    """Start a helper of this process, with pipes for requests and answers. Raises OSError."""
    return start(kind, os.getpid(), *arguments, bufsize=0)


def end_helper(helper: ChildProcess) -> str:
    """End a helper, unless it has ended, and close its pipes. Returns how it ended, in words."""
    helper.kill()
    with suppress(subprocess.TimeoutExpired):
        helper.wait(END_SECONDS)
    reason = reason_of(helper)
    close_pipes(helper)
    return reason


def close_pipes(helper: ChildProcess) -> None:
    """Close this end of a helper's pipes, and the file with its words."""
    for pipe in (helper.stdin, helper.stdout, helper.stderr):
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
