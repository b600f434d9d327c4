"""The source pipe: a worker asks the caller for pictures in the caller's memory, over two pipes.

The caller answers while it waits for its workers (`Answers.serve`). Neither side waits for the other forever. A question is one line of
JSON, `["read", REFERENCE]` or `["stat", REFERENCE]`. An answer is one line of JSON, `{"size": N, "stat": [SIZE, STAMP]}` or `{"error":
TEXT}`, followed by N bytes.
"""

import json
import os
import selectors
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from io import BytesIO
from typing import Any, BinaryIO, Final, cast

from cachestore.core.inputs import Stat
from cachestore.source.files import Files

PIPE: Final = "CACHESTORE_ASK"
"""Environment variable with the worker's descriptors: `<read>,<write>`."""

ANSWER_SECONDS: Final = 600.0
"""How long a worker waits for an answer. The caller may be busy in a callback of its own."""

_CHUNK: Final = 1 << 20
_LINE_LIMIT: Final = 1 << 20


# In the caller


class Answers:
    """Answers the questions of workers, in the thread that calls `serve`."""

    def __init__(self, pictures: Files) -> None:
        self._pictures = pictures
        self._selector = selectors.DefaultSelector()
        self._lines: list[_Line] = []

    def new_line(self) -> tuple[int, int]:
        """Make two pipes for one worker; returns its ends (read, write). Hand them to the worker, then close them here."""
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._lines.append(_Line(self._pictures, self._selector, ours_in, ours_out))
        return theirs_in, theirs_out

    def serve(self, seconds: float) -> None:
        """Answer questions for this many seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._selector.get_map():
                time.sleep(left)
                return
            for key, events in self._selector.select(left):
                cast("_Line", key.data).step(events)

    def close(self) -> None:
        """Close the caller's ends. A waiting worker then sees the end of its pipe. May be called twice."""
        for line in self._lines:
            line.close()
        self._selector.close()


class _Line:
    """The caller's ends of one worker's pipes. Never blocks: what the worker does not take yet waits here."""

    def __init__(self, pictures: Files, selector: selectors.BaseSelector, questions: int, answers: int) -> None:
        self._pictures, self._selector = pictures, selector
        self._in, self._out = questions, answers
        self._question = bytearray()
        self._waiting = memoryview(b"")
        self._is_open = True
        os.set_blocking(answers, False)
        os.set_blocking(questions, False)
        selector.register(questions, selectors.EVENT_READ, self)

    def step(self, events: int) -> None:
        """Take in a question, or send more of an answer. Closes if the worker is gone."""
        go_on = self._hand_out if events & selectors.EVENT_WRITE else self._take_in
        try:
            with suppress(BlockingIOError):
                go_on()
        except OSError:  # the worker is gone; the process that watches it reports why
            self.close()

    def _take_in(self) -> None:
        asked = os.read(self._in, _CHUNK)
        self._question += asked
        if not asked or len(self._question) > _LINE_LIMIT:
            self.close()
            return
        if b"\n" in asked:  # a worker asks one thing at a time
            line, self._question = bytes(self._question), bytearray()
            self._waiting = memoryview(_answer(self._pictures, line))
            self._selector.unregister(self._in)
            self._selector.register(self._out, selectors.EVENT_WRITE, self)

    def _hand_out(self) -> None:
        self._waiting = self._waiting[os.write(self._out, self._waiting[:_CHUNK]) :]
        if not len(self._waiting):
            self._selector.unregister(self._out)
            self._selector.register(self._in, selectors.EVENT_READ, self)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for descriptor in (self._in, self._out):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
            os.close(descriptor)


def _answer(pictures: Files, line: bytes) -> bytes:
    data = b""
    try:
        kind, reference = cast("tuple[str, str]", json.loads(line))
        if kind == "stat":
            head: dict[str, object] = {"size": 0, "stat": pictures.stat(reference)}
        else:
            data, stat = pictures.read(reference)
            head = {"size": len(data), "stat": stat}
    except Exception as error:  # noqa: BLE001 - the caller's own code may raise anything: it costs one sample, which the worker names
        data = b""
        head = {"error": str(error) or type(error).__name__}
    return json.dumps(head).encode() + b"\n" + data


# In a worker


class PipeFiles:
    """`Files` in the caller's memory, as a worker sees them over two pipes. Several threads may use it; they take turns."""

    def __init__(self, answers: int, questions: int, *, patience_seconds: float = ANSWER_SECONDS) -> None:
        """Ask over these descriptors, which stay open until the process ends."""
        self._in, self._out = answers, questions
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._broken = ""
        os.set_blocking(answers, False)

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes behind a reference. Raises OSError."""
        head, data = self._ask("read", reference)
        return data, (head["stat"][0], head["stat"][1])

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `read`: asks for all bytes at once, and gives them as a file. Raises OSError."""
        data, stat = self.read(reference)
        return nullcontext((BytesIO(data), stat))

    def stat(self, reference: str) -> Stat | None:
        """The stat record now, or None if it is gone. Raises OSError if no answer comes."""
        head, _data = self._ask("stat", reference)
        return None if head["stat"] is None else (head["stat"][0], head["stat"][1])

    def _ask(self, kind: str, reference: str) -> tuple[Mapping[str, Any], bytes]:
        with self._lock:
            if self._broken:
                raise OSError(self._broken)
            try:
                os.write(self._out, json.dumps([kind, reference]).encode() + b"\n")
                until = time.monotonic() + self._patience
                head: dict[str, Any] = json.loads(self._take_line(until))
                data = self._take(int(head.get("size", 0)), until)
            except OSError as error:
                # Half an answer may still come, and would be taken for the answer to a later question.
                self._broken = f"the process that holds the pictures does not answer: {error}"
                raise OSError(self._broken) from error
        if "error" in head:
            raise OSError(str(head["error"]))
        return head, data

    def _take_line(self, until: float) -> bytes:
        while b"\n" not in self._buffer:
            self._fill(until)
        return self._take(self._buffer.index(b"\n") + 1, until)

    def _take(self, size: int, until: float) -> bytes:
        while len(self._buffer) < size:
            self._fill(until)
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _fill(self, until: float) -> None:
        """Wait for more bytes. Raises OSError at the end of the pipe, and after `patience_seconds`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._in, selectors.EVENT_READ)
            if not selector.select(max(0.0, until - time.monotonic())):
                raise TimeoutError(f"no answer for {self._patience:.0f} s")
        more = os.read(self._in, _CHUNK)
        if not more:
            raise BrokenPipeError("its end of the pipe is closed")
        self._buffer += more


_pipes: dict[str, PipeFiles] = {}
"""By the value of the environment variable. A process has only one pair of descriptors."""


def pipe_files(environment: Mapping[str, str]) -> PipeFiles | None:
    """The pictures in the caller's memory, or None if this process has no source pipe."""
    named = environment.get(PIPE, "")
    if named and named not in _pipes:
        answers, questions = map(int, named.split(","))
        for descriptor in (answers, questions):
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - the system's own name for it
        _pipes[named] = PipeFiles(answers, questions)
    return _pipes.get(named)
