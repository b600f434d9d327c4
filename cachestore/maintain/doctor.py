"""Doctor: probes what cachestore builds on, on this machine and on a store's file system, and says what to do.

It tells what it sees from here: locks, for one, are probed on this machine alone, and nothing of cachestore is wrong where they do not
reach others. In the store it makes files in `tmp/` alone, under names of ours, and removes them. torch is asked in a process of its own,
and only when wanted; of JAX and the tokenizers it looks only whether this process has loaded them.
"""

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

from cachestore.core.errors import how_to_install
from cachestore.core.keys import Json
from cachestore.core.ranks import discover
from cachestore.files.locks import LifeLock
from cachestore.files.marker import check_for_reading
from cachestore.files.opening import descriptor_limit
from cachestore.files.paths import Layout
from cachestore.files.publish import make_folder, sync_folder
from cachestore.jobs.processes import gpu_count, processors
from cachestore.maintain.collect import lost_catalogs
from cachestore.storage.snapshot import open_layout

State = Literal["ok", "note", "problem"]
OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"

_NEEDED: Final = ("numpy", "safetensors", "lmdb", "filelock", "xxhash")
_ENCODING: Final = (
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "accelerate",
    "pillow",
    "ftfy",
    "beautifulsoup4",
    "simplejpeg",
    "av",
)
_CLEANERS: Final = ("ftfy", "beautifulsoup4")
_SHARED: Final = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "fuse", "fuse.sshfs", "cifs", "smb3", "beegfs", "9p"})
_ROOM_BYTES: Final = 1 << 30
_ROOM_FILES: Final = 10_000
_FILES: Final = 256
_SKEW_SECONDS: Final = 2.0
_TORCH_SECONDS: Final = 120.0
_TORCH: Final = """
import torch
names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
print("torch", torch.__version__, "with CUDA", torch.version.cuda, "sees", ", ".join(names) or "no GPU")
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    """"problem" stands in the way; a "note" is worth knowing."""
    found: str
    advice: str = ""
    """What to do, in words; empty where nothing is to be done."""

    def as_json(self) -> dict[str, Json]:
        """As `cachestore doctor --json` lists it."""
        return asdict(self)


def examine(store: str | Path | None = None, *, ask_torch: bool = False) -> list[Check]:
    """Look at this process, this machine and, where one is named, a store.

    Raises StoreNotFound where there is no store, FormatError where it is of a newer version.
    """
    layout = open_layout(Layout.at(store)) if store is not None else None
    checks = [*_versions(), *_process(os.environ, sys.modules), *_machine()]
    if ask_torch:
        checks.append(_ask_torch())
    return checks if layout is None else [*checks, *_store(layout)]


# Versions


def _versions() -> Iterator[Check]:
    yield Check("python", OK, f"{platform.python_version()} on {platform.platform()}")
    needed, encoding = _installed(_NEEDED), _installed(_ENCODING)
    missing = [name for name, number in needed.items() if number is None]
    yield Check(
        "packages",
        PROBLEM if missing else OK,
        _named(needed),
        f"install {', '.join(missing)}: `pip install .` in a clone of cachestore brings them" if missing else "",
    )
    yield _encoding(encoding)


def _installed(names: tuple[str, ...]) -> dict[str, str | None]:
    """Versions by name, without importing anything; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _encoding(found: Mapping[str, str | None]) -> Check:
    without = [name for name in _CLEANERS if found[name] is None]
    if found["torch"] is None or found["transformers"] is None:
        return Check(
            "encoding",
            NOTE,
            _named(found),
            f"{how_to_install('encode')}; reading as numpy needs none of it",
        )
    if without:
        advice = f"install {', '.join(without)}: without them some pipelines silently make other embeddings of the same captions"
        return Check("encoding", PROBLEM, _named(found), advice)
    return Check("encoding", OK, _named(found))


def _named(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {number or '-'}" for name, number in found.items())


# This process


def _process(environment: Mapping[str, str], modules: Mapping[str, ModuleType]) -> Iterator[Check]:
    """What matters when this process forks DataLoader workers."""
    method = default_start_method(sys.platform, sys.version_info[:2])
    threads = threading.active_count()
    advice = "stop what started them before workers are forked, or pass `multiprocessing_context='forkserver'` to the DataLoader"
    is_risky = method == "fork" and threads > 1
    yield Check(
        "start method",
        NOTE if is_risky else OK,
        f"DataLoader workers start by {method} unless told otherwise; {threads} threads here",
        advice if is_risky else "",
    )
    parallel = environment.get("TOKENIZERS_PARALLELISM", "")
    is_risky = "tokenizers" in modules and parallel.lower() not in {"", "false", "0", "off", "no"} and method == "fork"
    yield Check(
        "tokenizers",
        NOTE if is_risky else OK,
        f"{'loaded' if 'tokenizers' in modules else 'not loaded'} here, TOKENIZERS_PARALLELISM={parallel or 'unset'}",
        "set TOKENIZERS_PARALLELISM=false: with it on, a worker that is forked after a tokenizer was used hangs" if is_risky else "",
    )
    is_risky = "jax" in modules and method == "fork"
    yield Check(
        "jax",
        NOTE if is_risky else OK,
        "loaded here" if "jax" in modules else "not loaded here",
        "fork no worker after JAX has computed anything: pass `multiprocessing_context='forkserver'` to the DataLoader" if is_risky else "",
    )
    placement = discover(environment)
    rank = "no preferred rank" if placement.rank is None else f"rank {placement.rank} of {placement.world_size}"
    yield Check(
        "rank",
        NOTE if placement.conflict else OK,
        f"{rank} ({placement.found_in})",
        f"{placement.conflict}: pass --rank and --world-size" if placement.conflict else "",
    )


def default_start_method(system: str, python: tuple[int, ...]) -> str:
    """How Python starts worker processes by default."""
    if system in {"win32", "darwin"}:
        return "spawn"
    return "fork" if python < (3, 14) else "forkserver"


# This machine


def _machine() -> Iterator[Check]:
    yield Check("processors", OK, f"{processors()} usable")
    gpus = gpu_count()
    yield Check("gpu", OK if gpus else NOTE, f"{gpus} NVIDIA GPUs usable", "" if gpus else "encoding runs on the CPU (`--device cpu`)")
    limit = descriptor_limit()
    few = limit < 4 * _FILES
    yield Check(
        "open files",
        NOTE if few else OK,
        f"{limit} at once; at most {max(1, min(_FILES, limit // 4))} segments are held open",
        "raise `ulimit -n` to 1024 or more: segments are opened again and again otherwise" if few else "",
    )


def _ask_torch() -> Check:
    """What torch says of devices, in a process of its own, so that none of its threads or memory stays here."""
    try:
        ended = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        advice = "`nvidia-smi` shows whether the driver hangs"
        return Check("torch", PROBLEM, f"it did not start within {_TORCH_SECONDS:.0f} s", advice)
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Check("torch", PROBLEM, f"it could not be loaded: {said}", "mend the installation of torch")
    return Check("torch", OK, ended.stdout.strip())


# A store's file system


def _store(layout: Layout) -> Iterator[Check]:
    kind = file_system_of(layout.root, _mounts())
    is_shared = kind in _SHARED
    shared = "ranks on several machines may share it; a view of it is fresh after `refresh()`, and locks may not reach other machines"
    yield Check(
        "file system", NOTE if is_shared else OK, f"{layout.root} is on {kind}, mode {layout.mode.value}", shared if is_shared else ""
    )
    yield from _room(layout)
    try:
        make_folder(layout, layout.temporary)
        probes = [_probe("publish", layout, _probe_publish), _probe("rename", layout, _probe_rename), _probe("locks", layout, _probe_locks)]
        yield from (*probes, _probe("clock", layout, _probe_clock))
    except OSError as error:
        can = "reading works; to write, use an account that may, or mount it writable"
        yield Check("publish", PROBLEM, f"nothing can be written there: {error.strerror or error}", can)
    lost = lost_catalogs(layout)
    check_for_reading(layout)
    for told in lost:
        yield Check("catalogs", PROBLEM, f"generation {told.generation} of {told.name!r} is gone", f"run {layout.command('repair')}")


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(errors="replace")
    except OSError:
        return ""


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system that a path lies on, by a table as in `/proc/self/mounts`; "unknown" where it does not say."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:  # of two on one point, the later one is seen
            best, kind = len(point), fields[2]
    return kind


def _room(layout: Layout) -> Iterator[Check]:
    free = shutil.disk_usage(layout.root).free
    is_low = free < _ROOM_BYTES
    yield Check(
        "free space", NOTE if is_low else OK, f"{free} bytes", f"make room, or run {layout.command('gc --apply')}" if is_low else ""
    )
    if hasattr(os, "statvfs"):
        status = os.statvfs(layout.root)
        is_low = status.f_files > 0 and status.f_favail < _ROOM_FILES
        advice = f"a pass makes a few small files for each partition: make room, or run {layout.command('gc --apply')}" if is_low else ""
        yield Check("free files", NOTE if is_low else OK, f"{status.f_favail}" if status.f_files else "not limited", advice)


def _probe(name: str, layout: Layout, look: Callable[[Layout, Path, Path], Check]) -> Check:
    """Look at two files of our own in `tmp/`, the first of which is there, and remove both."""
    one, other = layout.new_temporary(), layout.new_temporary()
    try:
        one.write_bytes(name.encode())
        return look(layout, one, other)
    finally:
        for path in (one, other):
            path.unlink(missing_ok=True)


def _probe_publish(layout: Layout, one: Path, other: Path) -> Check:
    """Sync, link, link again (which must be refused), sync the folder, read back."""
    try:
        with one.open("rb+") as file:
            os.fsync(file.fileno())
        sync_folder(layout.temporary)
    except OSError as error:
        message = f"syncing is refused: {error.strerror or error}"
        return Check("publish", PROBLEM, message, "use another file system: nothing that is written here survives a power cut for certain")
    try:
        other.hardlink_to(one)
    except (OSError, NotImplementedError) as error:
        found = f"no hard links ({error}): files are placed by check and rename"
        return Check("publish", NOTE, found, "two ranks may do the same work twice now and then; nothing is lost")
    try:
        other.hardlink_to(one)
    except FileExistsError:
        is_same = other.read_bytes() == one.read_bytes()
        return Check("publish", OK if is_same else PROBLEM, "sync, link and read back work" if is_same else "a link reads back differently")
    return Check("publish", PROBLEM, "a name that was taken was linked again", "use another file system: this one replaces published files")


def _probe_rename(layout: Layout, one: Path, other: Path) -> Check:
    try:
        one.rename(other)
        sync_folder(layout.temporary)
    except OSError as error:
        return Check(
            "rename", PROBLEM, f"it is refused: {error.strerror or error}", "workers cannot show that they live: use another file system"
        )
    is_there = other.exists() and not one.exists()
    return Check("rename", OK if is_there else PROBLEM, "rename and sync of the folder work" if is_there else "the new name is not seen")


def _probe_locks(layout: Layout, one: Path, _other: Path) -> Check:
    with LifeLock(one, bits=layout.mode.file_bits) as first, LifeLock(one, bits=layout.mode.file_bits) as second:
        is_held, is_shared = first.is_held, second.is_held
    if is_held and not is_shared:
        return Check("locks", OK, "a held lock keeps others out, on this machine")
    found = "locks keep nobody out" if is_shared else "there are no locks"
    advice = "nothing is lost by that; a killed worker's part is taken over after minutes instead of at once"
    return Check("locks", NOTE, found, advice)


def _probe_clock(_layout: Layout, one: Path, _other: Path) -> Check:
    skew = one.stat().st_mtime - time.time()
    is_off = abs(skew) > _SKEW_SECONDS
    advice = "set both clocks: pictures modified just now may be read again, and `gc` reckons ages by them" if is_off else ""
    return Check("clock", NOTE if is_off else OK, f"the file system's is {skew:+.1f} s from this machine's", advice)
