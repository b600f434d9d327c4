"""The helper of a process that trains: it talks to object stores. `downloads` starts it.

It gets frames through stdin and answers each with one on stdout, in any order. By their heads:

    {"n": 1, "do": "list", "address": "s3://…", "folder": "segments"}                     -> {"n": 1} and JSON: [[key, size], …]
    {"n": 2, "do": "get", "address": …, "key": …}                                         -> {"n": 2} and the object
    {"n": 3, "do": "range", "address": …, "key": …, "start": 0, "size": 9, "soon": false} -> {"n": 3} and the bytes
    {"n": 4, …, "part": {"path": …, "have": …, "bytes": …, "ordinals": […]}}              -> {"n": 4}; the bytes are in the part
    a request that fails                                                   -> {"n": 5, "error": kind, "errno": …, "message": …}

Ranges that are not needed `soon` wait for those that are. With "both" the bytes are written and sent. If the part cannot be written, the
bytes are sent, and the answer has "full".

It ends when its reader does.
"""

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import RemoteFailed
from cachestore.core.parent import leave_with
from cachestore.core.signals import leave_to_starter
from cachestore.files import in_use
from cachestore.files.frames import head_line
from cachestore.remote.address import parse_address
from cachestore.remote.cache import make_way
from cachestore.remote.client import PIECE_BYTES, Client, ClientLimits
from cachestore.remote.process import error_as_json, requests_of, write_out

_WRITE_FLAGS: Final = in_use.WRITE_FLAGS | os.O_CREAT

Answer = tuple[Mapping[str, Any], bytes | bytearray]


def main(arguments: list[str]) -> None:
    """Serve the process with this pid until it ends. Arguments: its pid, seconds for a request, seconds for retries, requests at once."""
    reader, request_seconds, retry_seconds, parallel = int(arguments[0]), float(arguments[1]), float(arguments[2]), int(arguments[3])
    leave_to_starter()
    leave_with(reader, seconds=0.0)
    server = _Server(ClientLimits(request_seconds, retry_seconds))
    for number in range(parallel):
        threading.Thread(target=server.work, name=f"range-{number}", daemon=True).start()
    threading.Thread(target=server.send, name="send", daemon=True).start()
    for request in requests_of():
        server.take(request)
    os._exit(0)  # threads may still wait for the network


class _Server:
    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._requests: queue.PriorityQueue[tuple[bool, int, Mapping[str, Any]]] = queue.PriorityQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._clients: dict[str, Client] = {}
        self._guard = threading.Lock()
        self._answered = -math.inf
        """When a store answered last."""

    def take(self, request: Mapping[str, Any]) -> None:
        """Queue a request: those that are needed soon first, then by number."""
        self._requests.put((not request.get("soon", True), request["n"], request))

    def work(self) -> None:
        """Answer requests, one after the other."""
        while True:
            self.work_once()

    def work_once(self) -> None:
        """Answer one request. If it was in vain until the limit, and no other was answered meanwhile, all that wait get its error."""
        _later, number, request = self._requests.get()
        began = time.monotonic()
        try:
            head, body = self._answer(request)
            self._answered = time.monotonic()
        except Exception as error:  # noqa: BLE001 - every request gets an answer
            head, body = error_as_json(error), b""
            if self._answered < began and time.monotonic() - began >= self._limits.retry_seconds:
                with suppress(queue.Empty):
                    while True:
                        self._answers.put(({"n": self._requests.get_nowait()[1], **head}, b""))
        self._answers.put(({"n": number, **head}, body))

    def send(self) -> None:
        """Write answers to stdout until the reader is gone."""
        with suppress(OSError):
            while True:
                head, body = self._answers.get()
                write_out(head_line(head, len(body)))
                write_out(body)
        os._exit(0)

    def _answer(self, request: Mapping[str, Any]) -> Answer:
        address = request["address"]
        with self._guard:
            if address not in self._clients:
                self._clients[address] = Client(parse_address("path", address), limits=self._limits)
            client = self._clients[address]
        match request["do"]:
            case "list":
                return {}, json.dumps([found for page in client.list(request["folder"]) for found in page]).encode()
            case "get":
                return {}, client.get(request["key"])
            case _:
                return _range(client, request)


def _range(client: Client, request: Mapping[str, Any]) -> Answer:
    part: Mapping[str, Any] | None = request.get("part")
    if part is None:
        return {}, b"".join(data for _at, data in _pieces(client, request))
    body = bytearray()
    try:
        for at, data in _pieces(client, request):
            _write(part["path"], data, at, size=part["bytes"])
            if request.get("both"):
                body += data
        for ordinal in part["ordinals"]:
            _write(part["have"], b"\1", ordinal)
    except RemoteFailed:
        raise
    except OSError as error:  # no room, or the folder was removed: the reader gets the bytes
        head, body = _range(client, {**request, "part": None})
        return {**head, "full": error.strerror or str(error)}, body
    return {}, body


def _pieces(client: Client, request: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    end = request["start"] + request["size"]
    for at in range(request["start"], end, PIECE_BYTES):
        yield at, client.get_range(request["key"], at, min(PIECE_BYTES, end - at))


def _write(path: str, data: bytes, at: int, *, size: int = 0) -> None:
    """Write into a sparse file of this size, which is made if it does not exist. Follows no link."""
    make_way(Path(path))
    descriptor = os.open(path, _WRITE_FLAGS, 0o644)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        left = memoryview(data)
        while left:
            count = in_use.write_at(descriptor, left, at)
            left, at = left[count:], at + count
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1:])
