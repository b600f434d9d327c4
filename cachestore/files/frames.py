"""Frames: what our processes say to each other over pipes. A frame is a line with a JSON object, and as many bytes as its `body` says.

Knows nothing of who talks. The other side may be a stranger: what breaks the form or a limit is a ValueError, and nothing is read for it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, NamedTuple, cast

from cachestore.core.keys import Json, canonical

HEAD_BYTES: Final = 1 << 24
"""The longest line."""
_NO_LIMIT: Final = 1 << 62


class Frame(NamedTuple):
    """A head, and the bytes that came with it."""

    head: Mapping[str, Any]
    body: bytes = b""


def frame(head: Mapping[str, Json], body: "bytes | bytearray" = b"") -> bytes:
    """Return the bytes of a frame."""
    return head_line(head, len(body)) + body


def head_line(head: Mapping[str, Json], size: int) -> bytes:
    """Return the line of a frame behind which so many bytes are written. Raises BadInput if the head is not JSON."""
    return canonical({**head, "body": size}) + b"\n"


class Frames:
    """Puts frames together from what comes through a pipe, piece by piece."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._head: Mapping[str, Any] | None = None
        """The head whose body has not come whole."""
        self._size = 0

    def take(self, data: bytes) -> Iterator[Frame]:
        """Add what came, and yield the frames that are whole now. Raises ValueError for anything else than frames."""
        self._rest += data
        while True:
            if self._head is None:
                end = self._rest.find(b"\n")
                if end > HEAD_BYTES or end < 0 <= len(self._rest) - HEAD_BYTES:
                    raise ValueError("a line of impossible length")
                if end < 0:
                    return
                self._head, self._size = _parsed(bytes(self._rest[:end]), _NO_LIMIT)
                del self._rest[: end + 1]
            if len(self._rest) < self._size:
                return
            whole = Frame(self._head, bytes(memoryview(self._rest)[: self._size]))
            del self._rest[: self._size]
            self._head = None
            yield whole


def read_frame(pipe: IO[bytes], *, limit_bytes: int) -> Frame | None:
    """Wait for a frame with a body within the limit; None at the end. Raises OSError, EOFError within a frame, ValueError for none."""
    line = pipe.readline(HEAD_BYTES + 1)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise ValueError("a line of impossible length") if len(line) > HEAD_BYTES else EOFError
    head, size = _parsed(line, limit_bytes)
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    return Frame(head, body)


def _parsed(line: bytes, limit_bytes: int) -> tuple[Mapping[str, Any], int]:
    try:
        value: Any = json.loads(line)
    except RecursionError as error:
        raise ValueError("a head of impossible depth") from error
    head = cast("Mapping[str, Any]", value if isinstance(value, dict) else {})
    size = head.get("body")
    if type(size) is not int or not 0 <= size <= limit_bytes:
        raise ValueError("a head that is no object, or with a body of impossible size")
    return head, size
