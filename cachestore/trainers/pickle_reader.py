"""The process that reads files with pickles for `sandbox`. It imports what it needs, builds a wall around itself, and answers.

It gets each file as the body of a frame through stdin and returns the tensors as that of a frame through stdout. Its first answer is empty,
and says that it is ready.
"""

import gzip
import io
import os
import sys
from collections.abc import Collection
from itertools import product
from typing import IO, Final

from cachestore.children import wall
from cachestore.core.errors import EncodeFailed
from cachestore.files.frames import head_line, read_frame
from cachestore.trainers.containers import LARGEST_BYTES

_ROOM_BYTES: Final = 2 * LARGEST_BYTES
"""Memory for the file and what it unpacks to, besides what Python and torch use."""
_CPU_SECONDS: Final = 100


def main(_arguments: list[str]) -> None:
    """Answer one file after the other until stdin ends."""
    serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Build the wall, say that it stands, then answer files until `requests` ends."""
    import torch

    from cachestore.trainers import torch_files

    torch.set_num_threads(1)
    _warm_up()
    confine()
    _answer(answers, head_line({}, 0), ())
    while (request := read_frame(requests, limit_bytes=LARGEST_BYTES)) is not None:
        _allow_seconds()
        try:
            contents = torch_files.read_torch(request.body)
            listed = [[name, dtype, list(shape), len(buffer)] for name, (dtype, shape, buffer) in contents.tensors.items()]
            buffers = [buffer for _dtype, _shape, buffer in contents.tensors.values()]
            line = head_line({"tensors": listed, "values": dict(contents.values)}, sum(map(len, buffers)))
        except (EncodeFailed, MemoryError, RuntimeError, ValueError) as error:  # torch raises RuntimeError for tensors without numbers
            line, buffers = head_line({"error": str(error) or "reading it takes more memory than a file may take"}, 0), []
        _answer(answers, line, buffers)


def _answer(answers: IO[bytes], line: bytes, buffers: Collection[bytes | bytearray | memoryview]) -> None:
    answers.write(line)
    for buffer in buffers:
        answers.write(buffer)
    answers.flush()


def confine() -> bool:
    """Limit memory, and let the process do nothing but compute and answer, for good. Returns whether the system's calls are filtered."""
    _limit()
    return wall.build()


def _warm_up() -> None:
    """Read a file of each kind, good and bad. What torch imports only then could not be imported behind the wall."""
    import torch

    from cachestore.trainers.torch_files import read_torch

    tensors = [torch.ones(2, dtype=getattr(torch, name)) for name in ("float32", "bfloat16", "int64", "bool")]
    for value, is_zip in product((tensors, torch.nn.Parameter(tensors[0]), tensors[0].to_sparse(), b"bytes"), (True, False)):
        buffer = io.BytesIO()
        torch.save({"a": value}, buffer, _use_new_zipfile_serialization=is_zip)
        whole = buffer.getvalue()
        for data in (whole, gzip.compress(whole), whole[:-20], whole[:20], b"no file"):
            try:
                read_torch(data)
            except (EncodeFailed, ValueError):  # as it should be
                continue


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if (taken := _address_space()) is not None:
        _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = _at_most(taken + _ROOM_BYTES + LARGEST_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _allow_seconds() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (_at_most(int(used.ru_utime + used.ru_stime) + _CPU_SECONDS, hard), hard))


def _at_most(wanted: int, hard: int) -> int:
    """Return a limit that the system grants: no more than the hard one, which is -1 if there is none."""
    return wanted if hard < 0 else min(wanted, hard)


def _address_space() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a file of the kernel's
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
