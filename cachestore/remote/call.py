"""The caller's end of a push, pull or `ls`: it starts the helper process that does it, and ends it with the call. Has no network client."""

from contextlib import suppress
from typing import Any, Final

from cachestore.children.kinds import CALL_HELPER
from cachestore.core.errors import RemoteFailed, numbered
from cachestore.core.keys import Json
from cachestore.files.frames import frame
from cachestore.remote.process import Helper, HelperEnded, error_of
from cachestore.remote.transfer import Shown

_END_SECONDS: Final = 10.0
"""How long a helper that is to stop is waited for; then it is killed."""


def call_helper(do: str, address: str, *, on_progress: Shown | None = None, **given: Json) -> Any:
    """Let a helper process do a `push`, a `pull` or an `ls`, and return its result. The helper has ended when this ends, however it does.

    Raises what the helper raises; RemoteFailed if it cannot be started, or is killed.
    """
    call = {"do": do, "address": address, "shows": on_progress is not None, **given}
    try:
        helper = Helper(CALL_HELPER)
    except OSError as error:
        raise numbered(RemoteFailed(f"cannot start the helper process: {error}"), error) from error
    try:
        helper.send(frame(call))
        while True:
            for answer, _body in helper.receive() or ():
                if "progress" in answer and on_progress is not None:
                    on_progress(*answer["progress"])
                elif (failed := error_of(answer)) is not None:
                    raise failed
                elif "result" in answer:
                    return answer["result"]
    except HelperEnded:
        how = helper.end()
        raise RemoteFailed(
            f"the helper process ended without a result ({how}); run the same command again: it continues from here"
        ) from None
    finally:
        try:  # it stops in order, and is killed if it does not
            with suppress(HelperEnded):
                helper.send(frame({"do": "stop"}))
                helper.wait(_END_SECONDS)
        finally:
            helper.end()
