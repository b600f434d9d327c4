"""Programs of trainers, as processes of their own: each is a file that is run, with nothing of the tests in it but a data set."""

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout

from tests.fakes import ROOT
from tests.train.stores import Row, make_store, recipes

ROWS = [Row(f"{number}.png", (f"caption {number}",)) for number in range(24)]
LIMIT_SECONDS = 50.0


def data_set(path):
    """A store with text embeddings and latents of a few samples."""
    return make_store(path, ROWS, recipes())


def run_lines(body):
    """A part that runs a program as the main module of its process, with these `arguments`; returns its stdout."""
    sys.argv = ["trainer.py", *body.get("arguments", ())]
    with redirect_stdout(io.StringIO()) as said:
        exec(compile(body["source"], "trainer.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


class Hung(Exception):
    """The program did not end; the message holds what it had printed."""


def run_script(folder, source, *arguments, seconds=LIMIT_SECONDS, name="trainer.py", paths=(), **environment):
    """Run a program as a file; returns its stdout. Kills it with all it started, and raises Hung, where it does not end in time."""
    script = folder / name
    script.write_text(source)
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    own |= {"OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={variable: value for variable, value in own.items() if value != "(unset)"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as expired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise Hung(f"{name} did not end within {seconds:g} s:\n{out}\n{err}") from expired
    assert process.returncode == 0, f"{out}\n{err}"
    return out
