"""The helper of one push, pull or `ls` of an address: it does all of it, as its network client has threads that stay. `call` starts it.

Its first frame on stdin is the call. It writes frames to stdout: how far it is, and at last the result or the error. Another frame on
stdin stops it, and so does the end of the process that started it. Then it removes what is
half written, unless a request that hangs keeps it from that.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cachestore.core.parent import leave_with
from cachestore.core.signals import leave_to_starter
from cachestore.files.frames import frame
from cachestore.files.paths import Layout
from cachestore.remote.address import parse_address
from cachestore.remote.client import Client
from cachestore.remote.listing import list_client
from cachestore.remote.process import error_as_json, requests_of, write_out
from cachestore.remote.pull import pull_from
from cachestore.remote.push import push_to
from cachestore.remote.transfer import TransferRequest
from cachestore.store.read.snapshot import open_layout

STOP_SECONDS: Final = 3.0
"""How long the helper cleans up after it is stopped, or after the process that started it has ended."""


def main(arguments: list[str]) -> None:
    """Do what the process with this pid asks for."""
    leave_to_starter()
    stop = threading.Event()

    def interrupt(_number: int, _frame: object) -> None:
        if stop.is_set():  # else the signal is from another process
            raise KeyboardInterrupt

    def wait_for_more() -> None:
        next(requests, None)
        stop.set()

    signal.signal(signal.SIGTERM, interrupt)
    leave_with(int(arguments[0]), seconds=STOP_SECONDS, gone=stop)
    requests = requests_of()
    try:
        call = next(requests, None)
        if call is not None:
            threading.Thread(target=wait_for_more, name="stop", daemon=True).start()
            answer = _answer(**call)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            write_out(frame(answer))
    except (KeyboardInterrupt, BrokenPipeError):  # it was stopped, and has cleaned up
        os._exit(1)
    os._exit(0)  # threads may still wait for the network


def _answer(do: str, address: str, *, store: str = "", shows: bool = False, **options: Any) -> Mapping[str, Any]:
    def show(doing: str, done: int, total: int) -> None:
        write_out(frame({"progress": [doing, done, total]}))

    try:
        client = Client(parse_address("address", address))
        if do == "ls":
            return {"result": list_client(client).as_json()}
        request = TransferRequest(**options, on_progress=show if shows else None)
        if do == "push":
            return {"result": push_to(client, open_layout(Layout.at(store, "store")), request).as_json()}
        return {"result": pull_from(client, Path(store), request).as_json()}
    except Exception as error:  # noqa: BLE001 - the caller gets it
        return error_as_json(error)


if __name__ == "__main__":
    main(sys.argv[1:])
