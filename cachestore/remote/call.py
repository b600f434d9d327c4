"""The caller's end of a push, pull or `ls`: it starts the helper process that does it, and ends it with the call. Has no network client."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from cachestore.children.kinds import CALL_HELPER
from cachestore.children.start import ChildProcess
from cachestore.core import system
from cachestore.core.errors import RemoteFailed, numbered
from cachestore.core.keys import Json
from cachestore.files.frames import Frames, frame
from cachestore.objects.process import end_helper, error_of, start_helper
from cachestore.remote.transfer import Shown

_END_SECONDS: Final = 10.0
"""How long a helper that is to stop is waited for; then it is killed."""
_LOOK_SECONDS: Final = 1.0
_READ_BYTES: Final = 1 << 16


def call_helper(do: str, address: str, *, on_progress: Shown | None = None, **given: Json) -> Any:
    """Let a helper process do a `push`, a `pull` or an `ls`, and return its result. The helper has ended when this ends, however it does.

    Raises what the helper raises; RemoteFailed if it cannot be started, or is killed.
    """
    call = {"do": do, "address": address, "shows": on_progress is not None, **given}
    try:
        helper = start_helper(CALL_HELPER)
    except OSError as error:
        raise numbered(RemoteFailed(f"cannot start the helper process: {error}"), error) from error
    try:
        _send(helper, call)
        for answer in _answers(helper):
            if "progress" in answer and on_progress is not None:
                on_progress(*answer["progress"])
            elif (error := error_of(answer)) is not None:
                raise error
            elif "result" in answer:
                return answer["result"]
        raise RemoteFailed(
            f"the helper process ended without a result ({end_helper(helper)}); run the same command again: it continues from here"
        )
    finally:
        _stop(helper)


def _send(helper: ChildProcess, request: Mapping[str, Json]) -> None:
    left = memoryview(frame(request))
    with suppress(BrokenPipeError):  # it has ended, and `_answers` finds nothing
        while left and helper.stdin is not None:
            left = left[helper.stdin.write(left) :]


def _answers(helper: ChildProcess) -> Iterator[Mapping[str, Any]]:
    """Yield what a helper says, until it ends."""
    assert helper.stdout is not None
    answers = Frames()
    while True:
        # Another process, forked at the wrong moment, may hold the pipe open.
        if not system.is_readable(helper.stdout.fileno(), _LOOK_SECONDS):
            if helper.poll() is not None:
                return
            continue
        data = os.read(helper.stdout.fileno(), _READ_BYTES)
        if not data:
            return
        for answer in answers.take(data):
            yield answer.head


def _stop(helper: ChildProcess) -> None:
    """Let a helper stop in order, and kill it if it does not."""
    try:
        if helper.poll() is None:
            _send(helper, {"do": "stop"})
            helper.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        end_helper(helper)
