"""Ranks as processes that take milliseconds to start: one interpreter that has everything imported, and forks a process for each part.

A part is a function of a module, called with a mapping; what it returns comes back as JSON. Nothing here waits without a bound.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.fakes import ROOT

END_SECONDS = 50.0
"""Parts that have not ended by then hang."""

PARENT = """
import importlib, json, os, sys, traceback
from pathlib import Path

from tests import fakes

fakes.warm_up()
for name in sys.argv[1:]:
    importlib.import_module(name)
os.fsync = os.fstat
for line in sys.stdin:
    pids = []
    for body in json.loads(line):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update(body["environment"])
                os.chdir(body["cwd"])
                module, name = body["part"].split(":")
                Path(body["out"]).write_text(json.dumps(getattr(importlib.import_module(module), name)(body)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Crowd:
    """Starts parts as processes. What jobs import, and `modules`, are imported before the first fork."""

    def __init__(self, folder: Path, *modules: str, end_seconds: float = END_SECONDS, **environment: str):
        self.folder = folder
        self.end_seconds = end_seconds
        self.pids: list[int] = []
        self._count = 0
        self._outs: list[Path] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **environment},
        )

    def begin(self, part, *bodies, **environment):
        """Start one process for each mapping, which may bring its own `environment` and `cwd`."""
        assert self._process.stdin is not None
        self._outs, orders = [], []
        for body in bodies:
            self._count += 1
            self._outs.append(self.folder / f"part {self._count}.json")
            own = {"part": part, "out": str(self._outs[-1]), "cwd": str(ROOT), **body}
            orders.append({**own, "environment": {**environment, **body.get("environment", {})}})
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()
        self.pids = json.loads(self._line())

    def end(self):
        """Wait for all of them: (exit code, what the part returned or None) of each."""
        codes = json.loads(self._line())
        return [(code, json.loads(out.read_text()) if code == 0 else None) for code, out in zip(codes, self._outs, strict=True)]

    def run(self, part, *bodies, **environment):
        """Start processes at once and wait for all of them."""
        self.begin(part, *bodies, **environment)
        return self.end()

    def _line(self):
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            if not waiting.select(self.end_seconds):
                for pid in self.pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
                if waiting.select(self.end_seconds):
                    self._process.stdout.readline()  # how these ended, or the next who asks is told it
                raise TimeoutError(f"processes {self.pids} had not ended after {self.end_seconds:g} s")
        return self._process.stdout.readline()

    def close(self):
        """End the interpreter."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(self.end_seconds)
        self._process.stdout.close()


def until(is_so, what, seconds=40.0):
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.01)
