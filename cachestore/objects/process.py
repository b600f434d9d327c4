"""A helper process, which has the network client: how another process starts it, how it gets requests, how errors travel.

obstore starts threads that stay until their process ends, and that a fork would kill. So only helpers have them: one for each process that
trains from a bucket (`downloads`), and one for each push, pull and `ls` of an address (`cachestore.remote.call`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from cachestore.core import errors
from cachestore.core.errors import CacheStoreError, ReadFailed

END_SECONDS: Final = 30.0
"""How long a killed helper is waited for."""
_READ_BYTES: Final = 1 << 20


def start_helper(module: str, *arguments: object) -> "subprocess.Popen[bytes]":
    """Start a module as a helper of this process, with pipes for requests and answers. Raises OSError."""
    command = [sys.executable, "-m", module, str(os.getpid()), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def end_helper(helper: "subprocess.Popen[bytes]") -> None:
    """End a helper, unless it has ended, and close its pipes."""
    helper.kill()
    close_pipes(helper)
    with suppress(subprocess.TimeoutExpired):
        helper.wait(END_SECONDS)


def close_pipes(helper: "subprocess.Popen[bytes]") -> None:
    """Close this end of a helper's pipes."""
    for pipe in (helper.stdin, helper.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def requests_of() -> Iterator[bytes]:
    """In a helper: yield the lines of stdin until the process that started the helper closes it, or ends.

    A process that the other one forked may hold stdin open: `cachestore.core.parent` watches for the end itself.
    """
    rest = b""
    while data := os.read(0, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def error_as_json(error: Exception) -> dict[str, Any]:
    """Return the fields of an answer that says that a request failed."""
    words = str(error) if isinstance(error, CacheStoreError) else f"the helper process failed: {type(error).__name__}: {error}"
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
