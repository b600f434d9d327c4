"""Caches of other trainers from somebody hostile: files that the trainers' own code wrote, damaged at random or forged.

Each value is read as `import` reads it: files with pickles in the process for them. It ends as a value or as `EncodeFailed`, in time, and
nothing in it is executed: pickles would make a folder. What takes too long is ended with its judge: the process for pickles has a time
limit of its own, in which it imports torch.
"""

import io
import json
import os
import pickle
import random
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import EncodeFailed
from cachestore.trainers.cache_files import CacheFiles
from cachestore.trainers.diffusion_pipe import format as diffusion_pipe
from cachestore.trainers.families import Family
from cachestore.trainers.format import Format
from cachestore.trainers.matching import FileLocation
from cachestore.trainers.sandbox import TorchFiles
from cachestore.trainers.table import load_formats
from tests.fakes import ROOT
from tests.torture.campaign import Campaign, Outcome, judged, scratch
from tests.torture.damage import changed
from tests.torture.fuzz import mutated

TRAINERS: Final = ROOT / "tests" / "trainers"
DAMAGE: Final = ("flip", "flips", "zero", "noise", "cut", "empty", "grow")
FORGERIES: Final = ("header", "pickle", "members")
SHARDS: Final = "diffusion-pipe"
"""Its files hold many values."""
A_PROCESS: Final = 500
"""Values that one process reads."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One file of a recorded cache."""

    format: Format
    case: str
    path: str
    """Relative to the cache."""
    data: bytes

    @property
    def folder(self) -> tuple[str, str, Path]:
        """The folder in which its trainer keeps it: a shard and its table are in one."""
        return self.format.name, self.case, Path(self.path).parent


class _Executed:
    """Pickles to a call that makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def recorded_files() -> list[Recorded]:
    """The files of every recorded case."""
    found: list[Recorded] = []
    for one in (one for one in load_formats() if one.reads is not None):
        with tarfile.open(TRAINERS / one.name.replace("-", "_") / "recorded.tar.xz") as tar:
            for member in tar:
                case, _, name = member.name.partition("/")
                folder, _, path = name.partition("/")
                file = tar.extractfile(member) if member.isfile() and folder in {"cache", "data"} and one.files.search(path) else None
                if file is not None:
                    found.append(Recorded(one, case, path, file.read()))
    return found


def forged(file: Recorded, way: str, marker: Path, draw: random.Random) -> bytes:
    """The file with something else in it, by somebody who knows its container. Damaged at random where that cannot be."""
    if way == "header" and file.format.container == "safetensors":
        length = int.from_bytes(file.data[:8], "little")
        try:
            header = json.dumps(mutated(json.loads(file.data[8 : 8 + length]), draw)).encode("utf-8", "surrogatepass")
        except RecursionError:
            header = b"[" * draw.randint(1, 100_000)
        return len(header).to_bytes(8, "little") + header + file.data[8 + length :]
    if way == "pickle":
        return _with_member(file.data, ("data.pkl", ".npy"), pickle.dumps({"latents": _Executed(marker)}, 2)) or pickle.dumps(
            _Executed(marker)
        )
    if way == "members":
        some = _with_member(file.data, (draw.choice(("version", "data.pkl", "/data/0", ".npy")),), changed(file.data[:4096], "flips", draw))
        return some or changed(file.data, "noise", draw)
    return changed(file.data, "flips", draw)


def _with_member(data: bytes, ends: Sequence[str], other: bytes) -> bytes:
    """A zip file with another member in place of the first whose name ends so; empty if it is no zip file, or has none."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return b""
    made, is_done = io.BytesIO(), False
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for member in old.infolist():
            is_it = not is_done and any(member.filename.endswith(end) for end in ends)
            new.writestr(member.filename, other if is_it else old.read(member))
            is_done |= is_it
    return made.getvalue() if is_done else b""


def _values(cache: CacheFiles, file: Recorded, family: Family) -> Iterator[object]:
    """Read everything in a file, as `import` does."""
    parsed = file.format.reading.parse_name(file.path)
    if file.format.name == SHARDS:  # the table says where the values are; a text has parts in several shards
        table = str(Path(file.path).with_name("metadata.db"))
        for location in diffusion_pipe.locations_in(cache.root, table)[:3]:
            yield cache.read(location)
            if parsed is not None and parsed.kind == "latents":
                yield cache.latents(location, cache.bytes_at(location), family)
    elif parsed is not None and parsed.kind == "text":
        yield cache.text(FileLocation(file.path), family)
    else:
        location = FileLocation(file.path)
        yield cache.latents(location, cache.bytes_at(location), family)


def judge(files: Sequence[Recorded], seed: int, numbers: range) -> list[str]:
    """Read so many hostile files; what did not hold."""
    found: list[str] = []
    with scratch() as folder, TorchFiles() as torch_files:
        for number in numbers:
            draw = random.Random(f"caches {seed} {number}")
            file, way = draw.choice(files), draw.choice((*DAMAGE, *FORGERIES, *FORGERIES))
            seen = _read(files, file, way, folder, draw, torch_files)
            found += [f"{number}: {file.format.name} {file.case} {file.path}, {way}: {one}" for one in seen]
    return found


def _read(files: Sequence[Recorded], file: Recorded, way: str, folder: Path, draw: random.Random, torch_files: TorchFiles) -> Iterator[str]:
    """Write one hostile file among those of its folder, and read it; what did not hold."""
    marker, path = folder / "executed", folder / "cache" / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in files:
        if other.folder == file.folder and file.format.name == SHARDS:
            (folder / "cache" / other.path).write_bytes(other.data)
    path.write_bytes(forged(file, way, marker, draw) if way in FORGERIES else changed(file.data, way, draw))
    cache = CacheFiles(folder / "cache", file.format, torch_files)
    try:
        list(_values(cache, file, draw.choice(file.format.trainer.families_with_text())))
    except EncodeFailed as error:
        if not str(error):
            yield "the error says nothing"
    except Exception as error:  # noqa: BLE001 - whatever else comes is what is looked for
        yield f"{type(error).__name__}: {error!s:.200}"
    if marker.exists():
        yield "what was in it was executed"
        marker.rmdir()
    shutil.rmtree(path.parent)


def play(count: int, seed: int) -> Outcome:
    """So many hostile files."""
    files = recorded_files()
    batches = [range(start, min(count, start + A_PROCESS)) for start in range(0, count, A_PROCESS)]
    found = [one for _batch, those in judged(batches, partial(judge, files, seed)) for one in those]
    return Outcome(count, tuple(found), (f"formats: {', '.join(sorted({file.format.name for file in files}))}",))


CAMPAIGNS: Final = {"caches": Campaign(play, 20_000)}
