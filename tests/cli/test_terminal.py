"""`precompute` on a terminal, seen through an emulator: what it shows from the first moment, and that nothing of it is left behind."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pyte
import pytest

from cachestore.cli import FAILURES
from tests import fakes
from tests.fakes import Gate

pytestmark = pytest.mark.processes

DRAWN = {
    "bar": r"[━╸╺]+ +\d+%",
    "idle": r"(starting|finishing|stopping)  \d+:\d\d$",
    **{f"rank {n}": rf"rank {n}  (?!.*hung)" for n in range(3)},
}
"""Rows that are drawn over: each stands on the screen at most once, and not at all at the end."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command with a terminal of its own, whose screen is looked at after everything that it writes."""

    def __init__(self, width, *arguments, height=30, **environment):
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._written = b""
        self.frames = []
        """(seconds since the first output, rows)"""
        self._first_at = None
        self._end, tty = os.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        # A shell that leads a session and opens a terminal gets it as its own, so that ^C reaches its processes.
        command = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(tty), sys.executable, "-m", "cachestore", *map(str, arguments)]
        own = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        own |= {"PYTHONPATH": fakes.PATHS, "TERM": "xterm-256color", "FAKE_ENCODERS": "1", **environment}
        self.process = subprocess.Popen(command, cwd=fakes.ROOT, env=own, start_new_session=True)
        self._tty = tty

    def rows(self):
        return [row.rstrip() for row in self.screen.display if row.strip()]

    def until(self, words):
        """Read until a row of the screen matches."""
        while not any(re.search(words, row) for row in self.rows()):
            assert self._read(), f"ended without {words!r}: {self.rows()}"

    def press(self, key):
        os.write(self._end, key)

    def ended(self):
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        os.close(self._end)
        return self.process.wait(timeout=20)

    def _read(self):
        """Read what is there, for a while. False once the command has ended and all is read."""
        if not select.select([self._end], [], [], 0.05)[0]:
            if self.process.poll() is not None and self._tty is not None:
                os.close(self._tty)  # from here on reading ends
                self._tty = None
            return True
        try:
            written = os.read(self._end, 1 << 16)
        except OSError:
            return False
        self._first_at = self._first_at or time.monotonic()
        self._written += written
        self._stream.feed(written)
        self.frames.append((time.monotonic() - self._first_at, self.rows()))
        return bool(written)

    def check(self):
        """Each row of each screen is part of a line that was written; nothing that is drawn over stands twice, or at the end."""
        meant = {line.strip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", self._written.decode()))}
        lines = "\n".join(meant)
        for _seconds, rows in self.frames:
            for row in rows:
                assert row.strip() in lines, row
            for name, drawn in DRAWN.items():
                assert sum(bool(re.match(drawn, row)) for row in rows) <= 1, (name, rows)
        past = ["".join(line[column].data for column in sorted(line)).rstrip() for line in self.screen.history.top]
        for row in [*past, *self.rows()]:
            assert not any(re.match(drawn, row) for drawn in DRAWN.values()), row

    def text(self):
        """What is left at the end, with lines that were broken at the edge joined."""
        past = ["".join(line[column].data for column in sorted(line)) for line in self.screen.history.top]
        return "".join([*past, *self.screen.display]).replace(" ", "")


@pytest.fixture
def data(tmp_path):
    return fakes.captioned(tmp_path / "data", 20)


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.mark.parametrize("width", [pytest.param(40, marks=pytest.mark.slow), 80, pytest.param(200, marks=pytest.mark.slow)])
def test_ranks_are_interrupted_resumed_and_fail_on_a_picture_without_a_ghost(data, tmp_path, gate, width):
    (data / "bad.png").write_bytes(b"undecodable")
    asked = ["precompute", data, "--model", "model", "--store", tmp_path / "store", "--procs", "3"]
    first = Terminal(width, *asked, FAKE_ENCODER_GATE=str(gate.folder))
    first.until(r"rank 0  loading text")
    first.until(r"[━╸╺]+ +0%")
    first.press(b"\x03")
    first.until("stopping after the current batch")
    gate.open()
    assert first.ended() == 130
    first.check()
    assert any("starting" in row for _seconds, rows in first.frames for row in rows)
    assert "Continuewith:" in first.text()
    interrupted = re.search(r"(\d+)of42values:0reused,(\d+)encoded,0failed", first.text())
    assert interrupted is not None, first.text()
    assert interrupted[1] == interrupted[2]

    again = Terminal(width, *asked)
    assert again.ended() == FAILURES
    again.check()
    shown = "none" if interrupted[1] == "0" else interrupted[1]
    assert f"42values,{shown}ofthemin" in again.text(), "what the bar counted when it was stopped"
    assert f"{42 - int(interrupted[1])}toencode" in again.text()
    own = f"({41 - int(interrupted[1])}bythisprocess,{interrupted[1]}byearlierruns)" if int(interrupted[1]) else ""
    assert f"42values:0reused,41encoded{own},1failed;" in again.text()
    assert "failed:bad.png" in again.text()


def test_with_nothing_to_do_it_draws_and_leaves_only_the_result(data, tmp_path):
    asked = ["precompute", data, "--model", "model", "--store", tmp_path / "store"]
    with suppress(subprocess.TimeoutExpired):
        fakes.command(*asked).communicate(timeout=50)
    run = Terminal(80, *asked)
    assert run.ended() == 0
    run.check()
    assert "41values:41reused,0encoded,0failed;" in run.text()
