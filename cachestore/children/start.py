"""Starts child processes: the one place that makes the command and the environment of a child.

No code of the current folder runs in a child, whatever files lie there and whatever `PYTHONPATH` says. Python itself puts that folder first
for `-m` and `-c`, and for an empty or relative entry of a path variable. A child imports the very `cachestore` that its parent has.
"""

import errno
import os
import re
import site
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Final, TypeAlias

from cachestore.children.kinds import ChildKind
from cachestore.core import system

ChildProcess: TypeAlias = "subprocess.Popen[bytes]"

_BOOT: Final = """\
import sys
sys.path[:] = [path for path in sys.path if path]  # until Python 3.11 the current folder, as ''
import importlib.machinery, importlib.util, os
_, root, paths, module, *sys.argv[1:] = sys.argv
sys.path[:0] = filter(None, paths.split(os.pathsep))
try:
    found = importlib.machinery.PathFinder.find_spec("cachestore", [root])
    if found is None:
        raise ImportError(f"no cachestore in {root}")
    sys.modules["cachestore"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules["cachestore"])
    sys.exit(importlib.import_module(module).main(sys.argv[1:]))
except (ImportError, MemoryError, OSError) as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"))
"""
"""What a child runs. Its arguments: the folder (or zip) of its `cachestore`, folders for `sys.path`, a module, and what that gets."""

_FOLDERS: Final = (
    *("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX"),
)
"""Variables with folders from which code is loaded. An empty or relative entry would mean the current folder, or one in it."""
_DROPPED: Final = frozenset({"PYTHONSTARTUP", "PYTHONINSPECT"})
"""They are for a person at a prompt."""
KEPT: Final = frozenset(
    {
        "PATH",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "DYLD_FALLBACK_LIBRARY_PATH",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "SYSTEMROOT",
        "TEMP",
        "TMP",
    }
)
"""All that an isolated child gets of its caller's environment: what is needed to find and load libraries."""
_AS_UTF8: Final = ("-X", "utf8") if system.IS_WINDOWS else ()
"""A child there would print in the code page of its console, and its parent reads UTF-8."""
_FLAGS: Final = {"ignore_environment": "-E", "no_user_site": "-s"}
_WORDS_BYTES: Final = 4000
_NOISE: Final = re.compile(r"\s|Traceback|Current thread|Thread 0x|<no Python frame>|Extension modules|Python runtime state")


def start(
    kind: ChildKind,
    *arguments: object,
    stdin: int = subprocess.PIPE,
    stdout: "int | IO[bytes]" = subprocess.PIPE,
    stderr: "IO[bytes] | None" = None,
    variables: Mapping[str, str] | None = None,
    pass_fds: Collection[int] = (),
    bufsize: int = -1,
) -> ChildProcess:
    """Start a child. It inherits no descriptor but these. `variables` are added to its environment.

    Without `stderr` its words go to a file in memory, the `stderr` of the result: `reason_of` reads it, and the caller closes it. Raises
    OSError if the child cannot be started; what goes wrong later is told by its exit code and its words.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise FileNotFoundError(errno.ENOENT, "this program does not know the Python it runs in", sys.executable)
    words = stderr if stderr is not None else _file_for_words()
    try:
        child = subprocess.Popen(
            command_of(kind, arguments),
            stdin=stdin,
            stdout=stdout,
            stderr=words,
            env={**environment_of(kind, os.environ), **(variables or {})},
            cwd=None if kind.keeps_folder else os.path.abspath(os.sep),  # noqa: PTH100 - on Windows the root of a drive
            pass_fds=tuple(pass_fds),
            bufsize=bufsize,
        )
    except BaseException:
        if stderr is None:
            words.close()
        raise
    if stderr is None:
        child.stderr = words
    return child


def run(kind: ChildKind, *, seconds: float) -> tuple[int, str]:
    """Run a child to its end. Returns its exit code, and what it printed; if the code is not 0, how it ended in words.

    Raises OSError if it cannot be started, TimeoutError if it takes too long.
    """
    with _file_for_words() as printed, start(kind, stdin=subprocess.DEVNULL, stdout=printed) as child:
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            child.kill()
        return code, reason_of(child) if code else _end_of(printed).strip()


def command_of(kind: ChildKind, arguments: Collection[object] = ()) -> list[str]:
    """Return the command of a child. `-I` of an isolated one also ignores PYTHONPATH, so the folders named there are arguments."""
    flags, paths = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name)], ""
    if kind.is_isolated:
        listed = "" if sys.flags.ignore_environment else absolute_entries(os.environ.get("PYTHONPATH", ""))
        own = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
        flags, paths = ["-I"], os.pathsep.join(filter(None, (listed, own)))
    root = Path(__file__).absolute().parents[2]
    return [system.interpreter()[0], *flags, *_AS_UTF8, "-c", _BOOT, str(root), paths, kind.module, *map(str, arguments)]


def environment_of(kind: ChildKind, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child whose caller has this one."""
    safe = without_current_folder(environment)
    if kind.is_isolated:
        safe = {name: value for name, value in safe.items() if name in KEPT}
    return {**safe, **system.interpreter()[1], "PYTHONSAFEPATH": "1"}  # also for what the child starts


def without_current_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose path variables name absolute folders alone: programs and libraries of the current one are not found."""
    safe = {name: value for name, value in environment.items() if name not in _DROPPED}
    for name in _FOLDERS:
        if name in safe and (entries := absolute_entries(safe.pop(name))):
            safe[name] = entries
    return safe


def absolute_entries(paths: str) -> str:
    """Return a path variable without its empty and relative entries."""
    return os.pathsep.join(path for path in paths.split(os.pathsep) if os.path.isabs(path))  # noqa: PTH117 - of any system's text


def _file_for_words() -> IO[bytes]:
    """Return a file for what a child writes to stderr. In memory if possible: a full disk must not keep a child from starting."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("cachestore-stderr"), "w+b")
    return tempfile.TemporaryFile()


def reason_of(child: ChildProcess) -> str:
    """Return how a child ended and the last line of its own words, without a traceback, as a part of a sentence. Does not wait for it."""
    code = child.poll()
    if code is None:
        return "it still runs"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    words = "" if child.stderr is None or child.stderr.closed else last_line(_end_of(child.stderr))
    return f"{how}: {words}" if words else how


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - _WORDS_BYTES))  # moves the child's end too, but it has ended
    return file.read().decode("utf-8", "replace")


def last_line(words: str) -> str:
    """Return the last line that says what went wrong: that of an exception, without the lines of its traceback."""
    lines = [line.strip() for line in words.splitlines() if line and not _NOISE.match(line)]
    return lines[-1] if lines else ""
