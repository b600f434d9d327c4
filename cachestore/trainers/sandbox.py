"""Opens untrusted files one at a time. Files with pickles are read in a separate process that may do nothing else (`pickle_reader`).

Even with `weights_only=True`, a hostile file can make torch allocate without end, crash or hang. So the child gets the bytes through its
stdin and returns tensors through its stdout. It gets no path and no credentials, and has a limit on memory and a deadline for each file.
If it dies, only that file fails: the next one gets a new child. If it cannot start, no file can be read, and the import ends.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from cachestore.children.kinds import PICKLE_READER
from cachestore.children.start import ChildProcess, reason_of, start
from cachestore.core.errors import EncodeFailed, Incomplete
from cachestore.core.raw_tensors import Contents, Latents, Misplaced, Raw, Text, is_finite
from cachestore.files.frames import Frame, frame, read_frame
from cachestore.files.opening import open_foreign
from cachestore.trainers.containers import LARGEST_BYTES, read_npz, read_safetensors
from cachestore.trainers.families import Family
from cachestore.trainers.format import Format
from cachestore.trainers.matching import FileLocation
from cachestore.trainers.text import check_widths

SECONDS: Final = 120.0
"""The time limit for a file, and for the child to start. Importing torch from a slow disk takes most of it."""
_STARTS: Final = 2
"""How often a child that ends before it is ready is started again."""
_END_SECONDS: Final = 10.0
_VARIABLES: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

_Value = TypeVar("_Value", Latents, Text)


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


@dataclass(frozen=True, slots=True)
class CacheFiles:
    """The files of a cache, opened one at a time."""

    root: Path
    format: Format
    torch: TorchFiles

    def latents(self, location: FileLocation, data: bytes, family: Family) -> Latents:
        """Return the latents of a picture. Raises OSError, and EncodeFailed that names the file."""
        return self._read(self.format.reading.latents, location, data, family)

    def text(self, location: FileLocation, family: Family) -> Text:
        """Return the text of a caption. Raises as `latents`."""
        return self._read(self.format.reading.text, location, self.bytes_at(location), family)

    def _read(
        self, read: Callable[[Contents, Family, FileLocation], _Value], location: FileLocation, data: bytes, family: Family
    ) -> _Value:
        """Read latents or text; check widths and for NaN. Names of extra tensors get the trainer's name in front."""
        try:
            found = read(self._contents(location, data), family, location)
            if isinstance(found, Text):
                check_widths(family, found.tensors)
        except Misplaced as error:
            raise Misplaced(f"{location.path}: {error}") from error
        except EncodeFailed as error:
            raise EncodeFailed(f"{location.path}: {error}; {self._mend}") from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a file may hold any shapes and values
            fault = f"it is not as {self.format.name} writes it ({type(error).__name__}: {error})"
            raise EncodeFailed(f"{location.path}: {fault}; {self._mend}") from error
        tensors = found.tensors if isinstance(found, Text) else {"latents": found.tensor}
        if bad := [name for name, raw in tensors.items() if not is_finite(raw)]:
            raise EncodeFailed(f"{location.path}: {bad[0]} holds NaN or infinite numbers; {self._mend}")
        return replace(found, others=self.format.trainer.marked(found.others))

    @property
    def _mend(self) -> str:
        return f"let {self.format.name} make it again, or encode it with `cachestore precompute`"

    def read(self, location: FileLocation) -> Contents:
        """Return what is at a file location, by the trainer's own names. Raises EncodeFailed, OSError."""
        return self._contents(location, self.bytes_at(location))

    def _contents(self, location: FileLocation, data: bytes) -> Contents:
        parts = [self._decoded(data), *(self._decoded(self.bytes_at(other)) for other in location.more)]
        tensors = {name: raw for part in reversed(parts) for name, raw in part.tensors.items()}
        return Contents(tensors, {name: value for part in reversed(parts) for name, value in part.values.items()})

    def _decoded(self, data: bytes) -> Contents:
        match self.format.container:
            case "npz":
                return read_npz(data)
            case "safetensors":
                return read_safetensors(data)
            case "torch":
                return self.torch.read(data)

    def bytes_at(self, location: FileLocation) -> bytes:
        """Return the bytes at a file location. Raises OSError, also for no regular file; EncodeFailed if it is too large or cut short."""
        with open_foreign(self.root / location.path) as file:
            length = os.fstat(file.fileno()).st_size
            size = length if location.size is None else location.size
            if size > LARGEST_BYTES or location.start + size > length:
                raise EncodeFailed(
                    f"{location.path}: it should have {size} bytes from byte {location.start} on, which is more than the file has, or"
                    f" than a value may have; {self._mend}"
                )
            file.seek(location.start)
            return file.read(size)
