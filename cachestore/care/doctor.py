"""`cachestore doctor`: check what cachestore needs on this machine and on a store's file system, and say what to do.

It checks from this machine alone: whether locks work between machines is not tested, and cachestore also works without that. In the store
it creates temporary files in `tmp/` and removes them. torch is loaded only if wanted, in a process of its own. For JAX and tokenizers it
only checks whether this process has loaded them.
"""

import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

from cachestore.care.checks import lost_catalogs
from cachestore.children import wall
from cachestore.children.kinds import TORCH_PROBE
from cachestore.children.start import run
from cachestore.core import system
from cachestore.core.errors import how_to_install
from cachestore.core.keys import Json
from cachestore.core.ranks import discover
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.files import in_use
from cachestore.files.locks import LifeLock
from cachestore.files.marker import check_for_reading
from cachestore.files.opening import descriptor_limit
from cachestore.files.paths import Layout
from cachestore.files.publish import make_folder, sync_folder
from cachestore.jobs.start.processes import gpu_count, processors
from cachestore.store.read.snapshot import open_layout

State = Literal["ok", "note", "problem"]
OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"

_NEEDED: Final = ("numpy", "safetensors", "lmdb", "filelock", "xxhash", "rich", *(("tomli",) if sys.version_info < (3, 11) else ()))
_CLEANERS: Final = ("ftfy", "beautifulsoup4")
_ENCODING: Final = ("torch", "diffusers", "transformers", "tokenizers", "accelerate", "pillow", *_CLEANERS, "simplejpeg", "av")
_SHARED: Final = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "fuse", "fuse.sshfs", "cifs", "smb3", "beegfs", "9p"})
_ROOM_BYTES: Final = 1 << 30
_ROOM_FILES: Final = 10_000
_FILES: Final = 256
_SKEW_SECONDS: Final = 2.0
_TORCH_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    """A "problem" must be solved; a "note" is good to know."""
    found: str
    advice: str = ""
    """What to do, in words; empty if nothing."""

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore doctor --json` lists."""
        return asdict(self)


def _check(name: str, found: str, advice: str, *, is_bad: bool, state: State = NOTE) -> Check:
    return Check(name, state, found, advice) if is_bad else Check(name, OK, found)


def examine(store: str | Path | None = None, *, ask_torch: bool = False) -> list[Check]:
    """Check this process, this machine and, if one is named, a store.

    Raises StoreNotFound if there is no store, and FormatError if it was written by a newer version.
    """
    layout = open_layout(Layout.at(store)) if store is not None else None
    checks = [*_versions(), *_process(os.environ, sys.modules), *_machine()]
    if ask_torch:
        checks.append(_ask_torch())
    return checks if layout is None else [*checks, *_store(layout)]


def _versions() -> Iterator[Check]:
    yield Check("python", OK, f"{platform.python_version()} on {platform.platform()}")
    needed, encoding = _installed(_NEEDED), _installed(_ENCODING)
    missing = [name for name, number in needed.items() if number is None]
    advice = f"install {', '.join(missing)}: `pip install .` in a clone of cachestore brings them"
    yield _check("packages", _named(needed), advice, is_bad=bool(missing), state=PROBLEM)
    if encoding["torch"] is None or encoding["transformers"] is None:
        yield Check("encoding", NOTE, _named(encoding), f"{how_to_install('encode')}; reading as numpy does not need it")
        return
    without = [name for name in _CLEANERS if encoding[name] is None]
    advice = f"without {' and '.join(without)} some pipelines silently compute other embeddings. {how_to_install('encode')}"
    yield _check("encoding", _named(encoding), advice, is_bad=bool(without), state=PROBLEM)


def _installed(names: tuple[str, ...]) -> dict[str, str | None]:
    """Return versions by name; None for packages that are not installed. Imports none of them."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _named(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {number or '-'}" for name, number in found.items())


def _process(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> Iterator[Check]:
    method, threads = default_start_method(sys.platform, sys.version_info[:2]), threading.active_count()
    forks = method == "fork"
    start = f"DataLoader workers start by {method} by default; this process has {plural(threads, 'thread')}"
    advice = "end these threads before workers are forked, or pass `multiprocessing_context='forkserver'` to the DataLoader"
    yield _check("start method", start, advice, is_bad=forks and threads > 1)
    loaded = {name: "loaded here" if name in modules else "not loaded here" for name in ("tokenizers", "jax")}
    parallel = environment.get("TOKENIZERS_PARALLELISM", "")
    is_risky = forks and "tokenizers" in modules and parallel.lower() not in {"", "false", "0", "off", "no"}
    advice = "set TOKENIZERS_PARALLELISM=false: otherwise a worker hangs if it is forked after a tokenizer was used"
    yield _check("tokenizers", f"{loaded['tokenizers']}, TOKENIZERS_PARALLELISM={parallel or 'unset'}", advice, is_bad=is_risky)
    advice = "reading in a forked worker is safe, but JAX hangs there once it has computed: use nothing of it in a worker, or pass"
    advice += " `multiprocessing_context='forkserver'` to the DataLoader"
    yield _check("jax", loaded["jax"], advice, is_bad=forks and "jax" in modules)
    rank_info = discover(environment)
    rank = "no preferred rank" if rank_info.rank is None else f"rank {rank_info.rank} of {rank_info.world_size}"
    advice = f"{rank_info.conflict}: pass {option('rank')} and {option('world_size')}"
    yield _check("rank", f"{rank} ({rank_info.found_in})", advice, is_bad=bool(rank_info.conflict))


def default_start_method(system: str, python: tuple[int, ...]) -> str:
    """Return how Python starts worker processes by default: "fork", "spawn" or "forkserver"."""
    if system in {"win32", "darwin"}:
        return "spawn"
    return "fork" if python < (3, 14) else "forkserver"


def _machine() -> Iterator[Check]:
    yield Check("processors", OK, f"{processors()} usable")
    gpus = gpu_count()
    yield _check("gpu", f"{plural(gpus, 'NVIDIA GPU')} usable", "encoding runs on the CPU (`--device cpu`)", is_bad=not gpus)
    limit = descriptor_limit()
    held = f"{limit} at once; at most {max(1, min(_FILES, limit // 4))} segments are held open"
    advice = "raise `ulimit -n` to 1024 or more: otherwise segments are opened again and again"
    yield _check("open files", held, advice, is_bad=limit < 4 * _FILES)
    too_long = system.too_long_for_workers()
    advice = "set TMPDIR to a shorter one, such as /tmp, before a training that has workers"
    yield _check("temporary files", too_long or tempfile.gettempdir(), advice, is_bad=bool(too_long))
    has_wall = wall.is_available()
    found = f"files with pickles are read behind {'a filter of system calls' if has_wall else 'limits on memory and open files alone'}"
    yield _check("wall", found, "import such files of people whom you do not trust on Linux (x86-64 or ARM)", is_bad=not has_wall)


def _ask_torch() -> Check:
    """List torch's devices in a process of its own, so that none of its threads or memory stays here."""
    try:
        code, found = run(TORCH_PROBE, seconds=_TORCH_SECONDS)
    except TimeoutError:
        return Check("torch", PROBLEM, f"it did not start within {_TORCH_SECONDS:.0f} s", "`nvidia-smi` shows whether the driver hangs")
    except OSError as error:
        return Check("torch", PROBLEM, f"no process for it could be started: {error}", "free memory, or install Python again")
    if code:
        return Check("torch", PROBLEM, f"it could not be loaded: {found}", "free memory (see `ulimit -v`), or install torch again")
    return Check("torch", OK, found)


def _store(layout: Layout) -> Iterator[Check]:
    mounts = ""
    with suppress(OSError):
        mounts = Path("/proc/self/mounts").read_text(errors="replace")
    kind = file_system_of(layout.root, mounts)
    found = f"{layout.root} is on {kind}, mode {layout.mode.value}"
    shared = "ranks on several machines may share it; a reader sees new entries after `refresh()`, and locks may not work between machines"
    yield _check("file system", found, shared, is_bad=kind in _SHARED)
    free = shutil.disk_usage(layout.root).free
    advice = f"make room, or run {layout.command('gc --apply')}"
    yield _check("free space", f"{free} bytes", advice, is_bad=free < _ROOM_BYTES)
    if hasattr(os, "statvfs"):
        status = os.statvfs(layout.root)
        is_low = status.f_files > 0 and status.f_favail < _ROOM_FILES
        left = f"{status.f_favail}" if status.f_files else "not limited"
        yield _check("free files", left, f"a pass makes a few small files for each partition: {advice}", is_bad=is_low)
    try:
        make_folder(layout, layout.temporary)
        yield from [_probe(layout, probe) for probe in (_probe_publish, _probe_rename, _probe_locks, _probe_clock)]
    except OSError as error:
        can = "reading works; to write, use an account that may write, or mount it writable"
        yield Check("publish", PROBLEM, f"nothing can be written there: {error.strerror or error}", can)
    lost = lost_catalogs(layout)
    check_for_reading(layout)
    for reported in lost:
        yield Check(
            "catalogs", PROBLEM, f"generation {reported.generation} of {reported.name!r} is missing", f"run {layout.command('repair')}"
        )


def file_system_of(path: Path, mounts: str) -> str:
    """Return the kind of file system of a path, from a table like `/proc/self/mounts`; "unknown" if it is not there."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:  # of two mounts on one point, the later one is visible
            best, kind = len(point), fields[2]
    return kind


def _probe(layout: Layout, probe: Callable[[Layout, Path, Path], Check]) -> Check:
    """Run a check with two paths in `tmp/`, the first of which exists, and remove both."""
    one, other = layout.new_temporary(), layout.new_temporary()
    try:
        one.write_bytes(b"cachestore doctor")
        return probe(layout, one, other)
    finally:
        for path in (one, other):
            in_use.unlink(path, missing_ok=True)


def _probe_publish(layout: Layout, one: Path, other: Path) -> Check:
    try:
        with one.open("rb+") as file:
            os.fsync(file.fileno())
        sync_folder(layout.temporary)
    except OSError as error:
        advice = "use another file system: data written here may be lost in a power cut"
        return Check("publish", PROBLEM, f"syncing is refused: {error.strerror or error}", advice)
    try:
        other.hardlink_to(one)
    except (OSError, NotImplementedError) as error:
        found = f"no hard links ({error}): files are published by check and rename"
        return Check(
            "publish", NOTE, found, "each file takes two more calls, and a killed process may hold up others for a moment; nothing is lost"
        )
    try:
        other.hardlink_to(one)
    except FileExistsError:
        is_same = other.read_bytes() == one.read_bytes()
        return Check("publish", OK if is_same else PROBLEM, "sync, link and read back work" if is_same else "a link reads back differently")
    return Check(
        "publish", PROBLEM, "a hard link could replace an existing file", "use another file system: this one replaces published files"
    )


def _probe_rename(layout: Layout, one: Path, other: Path) -> Check:
    try:
        in_use.rename(one, other)
        sync_folder(layout.temporary)
    except OSError as error:
        advice = "workers cannot show that they are alive: use another file system"
        return Check("rename", PROBLEM, f"it is refused: {error.strerror or error}", advice)
    is_there = other.exists() and not one.exists()
    return Check("rename", OK if is_there else PROBLEM, "rename and sync of the folder work" if is_there else "the new name is not seen")


def _probe_locks(layout: Layout, one: Path, _other: Path) -> Check:
    with LifeLock(one, bits=layout.mode.file_bits) as first, LifeLock(one, bits=layout.mode.file_bits) as second:
        is_held, is_shared = first.is_held, second.is_held
    if is_held and not is_shared:
        return Check("locks", OK, "a held lock keeps other processes out, on this machine")
    found = "a held lock does not keep other processes out" if is_shared else "there are no locks"
    advice = "nothing is lost by that; a killed worker's part is taken over after minutes instead of at once"
    return Check("locks", NOTE, found, advice)


def _probe_clock(_layout: Layout, one: Path, _other: Path) -> Check:
    skew = one.stat().st_mtime - time.time()
    advice = "set both clocks: pictures modified just now may be read again, and `gc` computes ages from these clocks"
    return _check("clock", f"the file system's is {skew:+.1f} s from this machine's", advice, is_bad=abs(skew) > _SKEW_SECONDS)
