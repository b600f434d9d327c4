"""Opens untrusted files one at a time. Files with pickles are read in a separate process that may do nothing else.

That process is `python -m cachestore read-torch-files`. Even with `weights_only=True`, a hostile file can make torch allocate without end,
crash or hang. So the child gets the bytes through its stdin and returns tensors through its stdout. It gets no path, may create no file,
and has a limit on memory and a deadline for each file. If it dies, only that file fails: the next one gets a new child.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, TypeVar

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import canonical
from cachestore.core.raw_tensors import Contents, Latents, Misplaced, Raw, Text, is_finite
from cachestore.core.signals import leave_to_starter
from cachestore.interop.formats.containers import LARGEST_BYTES, read_npz, read_safetensors
from cachestore.interop.formats.families import Family, marked
from cachestore.interop.formats.matching import FileLocation
from cachestore.interop.formats.table import Format
from cachestore.interop.formats.text import check_widths
from cachestore.source.files import open_regular

SECONDS: Final = 120.0
"""The time limit for a file, and for the child to start. Importing torch from a slow disk takes most of it."""
_LENGTH_BYTES: Final = 8
_HEADER_BYTES: Final = 1 << 24
_ROOM_BYTES: Final = 2 * LARGEST_BYTES
"""Memory for the file and what it unpacks to, besides what Python and torch use."""
_CPU_SECONDS: Final = 100

_Value = TypeVar("_Value", Latents, Text)


class TorchFiles(AbstractContextManager["TorchFiles"]):
    """Reads files of `torch.save` one after the other. The first one starts the child. For one thread only."""

    def __init__(self, *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def read(self, data: bytes) -> Contents:
        """Return the tensors and plain values of one file. Raises EncodeFailed if it is refused or too large, or if the child fails."""
        if len(data) > LARGEST_BYTES:
            raise EncodeFailed(f"it has more than {LARGEST_BYTES >> 20} MiB")
        child = self._started()
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        watch = threading.Timer(self._seconds, stop)
        watch.start()
        try:
            answer = _exchange(child, data)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            how = f"was not read within {self._seconds:.0f} s" if late.is_set() else f"crashed the process that read it ({_how(child)})"
            raise EncodeFailed(f"it {how}, so it is not used") from error
        finally:
            watch.cancel()
            watch.join()
        if isinstance(answer, str):
            raise EncodeFailed(answer)
        return answer

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(OSError), child:  # closes its pipes; unwritten data is dropped
                pass

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            environment = {**os.environ, **one, "CUDA_VISIBLE_DEVICES": ""}
            command, pipe = [sys.executable, "-m", "cachestore", "read-torch-files"], subprocess.PIPE
            self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        return self._child


def _how(child: "subprocess.Popen[bytes]") -> str:
    code = child.returncode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _exchange(child: "subprocess.Popen[bytes]", data: bytes) -> Contents | str:
    """Return the contents of a file, or why the child refused it. Raises OSError, EOFError or ValueError if the child fails."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    child.stdin.flush()
    length = int.from_bytes(_read(child.stdout, _LENGTH_BYTES), "little")
    if length > _HEADER_BYTES:
        raise ValueError("an answer of impossible length")
    head: Mapping[str, Any] = json.loads(_read(child.stdout, length))
    if "error" in head:
        return str(head["error"])
    if sum(int(size) for _name, _dtype, _shape, size in head["tensors"]) > 2 * LARGEST_BYTES:
        raise ValueError("an answer of impossible size")
    tensors: dict[str, Raw] = {
        str(name): (str(dtype), tuple(map(int, shape)), _read(child.stdout, int(size))) for name, dtype, shape, size in head["tensors"]
    }
    return Contents(tensors, dict(head["values"]))


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Run the child: set its limits, then answer one file after the other until stdin ends."""
    import torch

    from cachestore.interop.formats.torch_files import read_torch

    leave_to_starter()
    torch.set_num_threads(1)
    _limit()
    while head := requests.read(_LENGTH_BYTES):
        data = _read(requests, int.from_bytes(head, "little"))
        _allow_seconds()
        try:
            contents = read_torch(data)
            listed = [[name, dtype, list(shape), len(buffer)] for name, (dtype, shape, buffer) in contents.tensors.items()]
            buffers = [buffer for _dtype, _shape, buffer in contents.tensors.values()]
            text = canonical({"tensors": listed, "values": dict(contents.values)})
        except (EncodeFailed, MemoryError, ValueError) as error:
            text, buffers = canonical({"error": str(error) or "reading it takes more memory than a file may take"}), []
        answers.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for buffer in buffers:
            answers.write(buffer)
        answers.flush()


def _limit() -> None:
    """Forbid new files and core dumps, and limit memory, if the system has such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if (taken := _address_space()) is not None:
        most = taken + _ROOM_BYTES + LARGEST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _allow_seconds() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + _CPU_SECONDS, hard))


def _address_space() -> int | None:
    """Return the bytes of address space in use; None if the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a file of the kernel's
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


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
            found = read(self.contents(location, data), family, location)
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
        return replace(found, others=marked(self.format.name, found.others))

    @property
    def _mend(self) -> str:
        return f"let {self.format.name} make it again, or encode it with `cachestore precompute`"

    def contents(self, location: FileLocation, data: bytes) -> Contents:
        """Return what is at a file location and its further ones, by the trainer's own names. Raises EncodeFailed, OSError."""
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
        with open_regular(self.root / location.path) as file:
            length = os.fstat(file.fileno()).st_size
            size = length if location.size is None else location.size
            if size > LARGEST_BYTES or location.start + size > length:
                raise EncodeFailed(
                    f"{location.path}: it should have {size} bytes from byte {location.start} on, which is more than the file has, or"
                    f" than a value may have; {self._mend}"
                )
            file.seek(location.start)
            return file.read(size)
