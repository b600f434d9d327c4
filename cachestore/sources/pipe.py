"""The source pipe: a worker asks the caller for pictures in the caller's memory, over two pipes.

The caller answers while it waits for its workers (`Answers.serve`). Neither side waits for the other forever. A question is a frame with
the head `{"do": "read", "reference": REFERENCE}`, or "stat". An answer has the head `{"stat": [SIZE, STAMP]}`, and the bytes behind it, or
`{"error": TEXT}`.
"""

import os
import selectors
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from io import BytesIO
from typing import Any, BinaryIO, Final, cast

from cachestore.core import system
from cachestore.core.inputs import Stat
from cachestore.files.frames import Frame, Frames, frame
from cachestore.sources.files import SourceFiles

PIPE: Final = "CACHESTORE_ASK"
"""Environment variable with the worker's descriptors: `<read>,<write>`."""
ANSWER_SECONDS: Final = 600.0
"""How long a worker waits for an answer. The caller may be busy in a callback of its own."""
_CHUNK: Final = 1 << 20


class Answers:
    """Answers the questions of workers, in the thread that calls `serve`."""

    def __init__(self, pictures: SourceFiles) -> None:
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

    def __init__(self, pictures: SourceFiles, selector: selectors.BaseSelector, questions: int, answers: int) -> None:
        self._pictures, self._selector = pictures, selector
        self._in, self._out = questions, answers
        self._questions = Frames()
        self._waiting = memoryview(b"")
        self._is_open = True
        os.set_blocking(answers, False)
        os.set_blocking(questions, False)
        selector.register(questions, selectors.EVENT_READ, self)

    def step(self, events: int) -> None:
        """Take in a question, or send more of an answer. Closes if the worker is gone."""
        try:
            with suppress(BlockingIOError):
                if events & selectors.EVENT_WRITE:
                    self._waiting = self._waiting[os.write(self._out, self._waiting[:_CHUNK]) :]
                    if not len(self._waiting):
                        self._selector.unregister(self._out)
                        self._selector.register(self._in, selectors.EVENT_READ, self)
                    return
                asked = os.read(self._in, _CHUNK)
                if not asked:
                    self.close()
                for question in self._questions.take(asked):  # one at most: a worker asks one thing at a time
                    self._waiting = memoryview(_answer(self._pictures, question.head))
                    self._selector.unregister(self._in)
                    self._selector.register(self._out, selectors.EVENT_WRITE, self)
        except (OSError, ValueError):  # the worker is gone, and the process that watches it reports why; or what it says is no frame
            self.close()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for descriptor in (self._in, self._out):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
            os.close(descriptor)


def _answer(pictures: SourceFiles, question: Mapping[str, Any]) -> bytes:
    try:
        if question["do"] == "stat":
            return frame({"stat": pictures.stat(question["reference"])})
        data, stat = pictures.read(question["reference"])
        return frame({"stat": stat}, data)
    except Exception as error:  # noqa: BLE001 - the caller's own code may raise anything: it costs one sample, which the worker names
        return frame({"error": str(error) or type(error).__name__})


class PipeFiles:
    """`SourceFiles` in the caller's memory, as a worker sees them over two pipes. Several threads may use it; they take turns."""

    def __init__(self, answers: int, questions: int, *, patience_seconds: float = ANSWER_SECONDS) -> None:
        """Ask over these descriptors, which stay open until the process ends."""
        self._in, self._out = answers, questions
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self._answers = Frames()
        self._broken = ""
        os.set_blocking(answers, False)

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes behind a reference. Raises OSError."""
        answer = self._ask("read", reference)
        size, stamp = answer.head["stat"]
        return answer.body, (size, stamp)

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `read`: asks for all bytes at once, and gives them as a file. Raises OSError."""
        data, stat = self.read(reference)
        return nullcontext((BytesIO(data), stat))

    def stat(self, reference: str) -> Stat | None:
        """The stat record now, or None if it is gone. Raises OSError if no answer comes."""
        stat: list[int] | None = self._ask("stat", reference).head["stat"]
        return None if stat is None else (stat[0], stat[1])

    def _ask(self, do: str, reference: str) -> Frame:
        with self._lock:
            if self._broken:
                raise OSError(self._broken)
            try:
                os.write(self._out, frame({"do": do, "reference": reference}))
                answer = self._next_answer(time.monotonic() + self._patience)
            except (OSError, ValueError) as error:
                # Half an answer may still come, and would be taken for the answer to a later question.
                self._broken = f"the process that holds the pictures does not answer: {error}"
                raise OSError(self._broken) from error
        if "error" in answer.head:
            raise OSError(str(answer.head["error"]))
        return answer

    def _next_answer(self, until: float) -> Frame:
        while system.is_readable(self._in, max(0.0, until - time.monotonic())):
            data = os.read(self._in, _CHUNK)
            if not data:
                raise BrokenPipeError("its end of the pipe is closed")
            for answer in self._answers.take(data):
                return answer
        raise TimeoutError(f"no answer for {self._patience:.0f} s")


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
