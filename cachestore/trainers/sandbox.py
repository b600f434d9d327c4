"""Reads untrusted files with pickles one at a time, in a separate process that may do nothing else (`pickle_reader`).

Even with `weights_only=True`, a hostile file can make torch allocate without end, crash or hang. So the child gets the bytes through its
stdin and returns tensors through its stdout. It gets no path and no credentials, and has a limit on memory and a deadline for each file.
If it dies, only that file fails: the next one gets a new child. If it cannot start, no file can be read, and the import ends.
"""

import subprocess
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Final

from cachestore.children.kinds import PICKLE_READER
from cachestore.children.start import ChildProcess, reason_of, start
from cachestore.core.errors import EncodeFailed, Incomplete
from cachestore.core.raw_tensors import Contents, Raw
from cachestore.files.frames import Frame, frame, read_frame
from cachestore.trainers.containers import LARGEST_BYTES

SECONDS: Final = 120.0
"""The time limit for a file, and for the child to start. Importing torch from a slow disk takes most of it."""
_STARTS: Final = 2
"""How often a child that ends before it is ready is started again."""
_END_SECONDS: Final = 10.0
_VARIABLES: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class TorchFiles(AbstractContextManager["TorchFiles"]):
    """Reads files of `torch.save` one after the other. The first one starts the child. For one thread only."""

    def __init__(self, *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._child: ChildProcess | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def read(self, data: bytes) -> Contents:
        """Return the tensors and plain values of one file. Raises EncodeFailed if it is refused or too large, or if the child fails.

        Raises Incomplete if no child can start here: then every file would fail.
        """
        if len(data) > LARGEST_BYTES:
            raise EncodeFailed(f"it has more than {LARGEST_BYTES >> 20} MiB")
        child = self._started()
        with self._deadline(child) as late:
            try:
                answer = _exchange(child, data)
            except (OSError, EOFError, ValueError) as error:
                reason = self._end(child, _patience(error))
                how = f"was not read within {self._seconds:.0f} s" if late.is_set() else f"crashed the process that read it ({reason})"
                raise EncodeFailed(f"it {how}, so it is not used") from error
        if isinstance(answer, str):
            raise EncodeFailed(answer)
        return answer

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._end(self._child, 0.0)

    def _end(self, child: ChildProcess, seconds: float) -> str:
        """End a child that does not end by itself within some seconds, and return how it ended in words."""
        self._child = None
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
        child.kill()
        child.wait()
        reason = reason_of(child)
        with suppress(OSError), child:  # closes its pipes; unwritten data is dropped
            pass
        return reason

    def _started(self) -> ChildProcess:
        reason = ""
        for _time in range(_STARTS if self._child is None else 0):
            try:
                child = start(PICKLE_READER, variables=_VARIABLES)
            except OSError as error:
                reason = str(error)
                continue
            with self._deadline(child) as late:
                try:
                    _next_frame(child)
                except (OSError, EOFError, ValueError) as error:
                    ended = self._end(child, _patience(error))
                    reason = f"it was not ready within {self._seconds:.0f} s" if late.is_set() else ended
                else:
                    self._child = child
                    break
        if self._child is None:
            raise Incomplete(
                f"the process that reads files with pickles cannot start ({reason}): free memory, or install torch again, then run the same"
                " command again"
            )
        return self._child

    @contextmanager
    def _deadline(self, child: ChildProcess) -> Generator[threading.Event]:
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        watch = threading.Timer(self._seconds, stop)
        watch.start()
        try:
            yield late
        finally:
            watch.cancel()
            watch.join()


def _patience(error: Exception) -> float:
    """Return how long to wait for the end of a child: one that has closed its pipes is about to end, and has its own reason."""
    return 0.0 if isinstance(error, ValueError) else _END_SECONDS


def _exchange(child: ChildProcess, data: bytes) -> Contents | str:
    """Return the contents of a file, or why the child refused it. Raises OSError, EOFError or ValueError if the child fails.

    A file may have taken the child over, so its answer is a stranger's too.
    """
    assert child.stdin is not None
    child.stdin.write(frame({}, data))
    child.stdin.flush()
    head, body = _next_frame(child)
    if "error" in head:
        return str(head["error"])
    tensors, start, left = dict[str, Raw](), 0, memoryview(body)
    try:
        for name, dtype, shape, size in head["tensors"]:
            end = start + int(size)
            if not start <= end <= len(body):
                raise ValueError("an answer of impossible size")
            tensors[str(name)] = (str(dtype), tuple(map(int, shape)), left[start:end])
            start = end
        return Contents(tensors, dict(head["values"]))
    except (LookupError, TypeError) as error:
        raise ValueError("an answer of an impossible form") from error


def _next_frame(child: ChildProcess) -> Frame:
    assert child.stdout is not None
    answer = read_frame(child.stdout, limit_bytes=2 * LARGEST_BYTES)
    if answer is None:
        raise EOFError
    return answer
