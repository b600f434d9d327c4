"""A trainer's cache files over a data set that `precompute --buckets TRAINER` made. Nothing is encoded, and nothing is written."""

import os
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from cachestore.core.errors import BadInput, CacheStoreError
from cachestore.core.words import first_of, plural
from cachestore.live.adapter import Refused
from cachestore.store.read.unfinished import again_in

_EXPORTED: Final = "cachestore.trainers.exported_files"
"""Has `exported`. It lies above, and is loaded by its name when a data set is read."""


class ReadOnlyFiles:
    """What `store.files` offers, by the paths at which the trainer looks for its cache files. Threads may share it, forked children too.

    A trainer that caches beside the pictures has absolute paths. Of others, a path is found by its end, and all found ones must lie in
    one folder. An error that a path or the data set raises ends the run with exit code 2.
    """

    def __init__(self, trainer: str, store: str, name: str, generation: int | None = None, *, below: tuple[str, ...] = ("",)) -> None:
        """List the files of a data set. `below` are folders of an export that the trainer keeps elsewhere, such as "vae/" and "text/".

        Raises StoreNotFound; BadInput if there is no such data set, or it was made for another trainer's buckets.
        """
        self.name, self._store, self._below = name, store, below
        self._files: Any = import_module(_EXPORTED).exported(store, trainer, name=name, generation=generation)
        if not self._files.has_its_buckets:
            raise BadInput(
                f"the pictures of {name!r} were not encoded for the buckets of {trainer}: run `cachestore precompute` with"
                f" --buckets {trainer}, into another data set"
            )
        self._deepest = 1 + max((path.count("/") for path in self._files), default=0)
        self._folders: dict[str, str] = {}
        """By folder of an export, where the trainer has it."""

    @property
    def lacking(self) -> str:
        """In words, what of the data set has no file; empty if nothing lacks."""
        failures = self._files.failures
        if not failures:
            return ""
        whose = first_of([str(one["sample"]) for one in failures])
        return f"{plural(len(failures), 'file')} of {self.name!r} cannot be made ({whose}: {failures[0]['reason']})"

    def exists(self, path: str | Path) -> bool:
        """Whether the data set has this file."""
        return self._find(path) is not None

    def load(self, path: str | Path) -> dict[str, Any]:
        """Return the arrays of a file: of npz numpy's, else torch tensors."""
        return self._read(path, "__getitem__")

    def metadata(self, path: str | Path) -> dict[str, Any]:
        """Return what is in a file beside its arrays."""
        return self._read(path, "metadata")

    def keys(self, path: str | Path) -> list[str]:
        """Return the names of a file's arrays, sorted."""
        return sorted(self._read(path, "__getitem__"))

    def caption(self, path: str | Path) -> str:
        """Return the caption whose text a file holds."""
        return self._read(path, "caption")

    def buckets(self, path: str | Path) -> set[tuple[int, int]]:
        """Return (width, height) in pixels of what a file of latents shows."""
        return self._read(path, "buckets")

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern, sorted. Only the part after the last slash may hold `*` and the like."""
        folder, _, wanted = os.path.normpath(pattern).rpartition(os.sep)
        for special in "[*?":
            folder = folder.replace(f"[{special}]", special)
        listed = [(path, str(Path(path).parent)) for path in self._files if fnmatchcase(Path(path).name, wanted)]
        paths = [f"{folder}/{Path(path).name}" for path, where in listed if where == "." or f"/{folder}".endswith(f"/{where}")]
        return sorted(path for path in dict.fromkeys(paths) if self._find(path) is not None)

    def save(self, path: str | Path, *_tensors: Any, **_more: Any) -> NoReturn:
        """Refuse it."""
        self.refuse(path, "the trainer wants to encode and save it")

    def remove(self, path: str | Path) -> NoReturn:
        """Refuse it."""
        self.refuse(path, "the trainer wants to remove it")

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def refuse(self, path: str | Path, why: str) -> NoReturn:
        """End the run with exit code 2, saying what to run."""
        lacking = f"; {self.lacking}" if self.lacking else ""
        what = "this run only reads" if self.exists(path) else f"the data set {self.name!r} does not have it"
        raise Refused(f"{path}: {why}, but {what}{lacking}. Run {again_in(Path(self._store), self.name)}, then start again")

    def _read(self, path: str | Path, how: str) -> Any:
        try:
            found = self._find(path)
            return getattr(self._files, how)(path if found is None else found)
        except CacheStoreError as error:
            raise Refused(str(error)) from error

    def _find(self, path: str | Path) -> str | None:
        """Return the path in an export of a file at which the trainer looks."""
        text = os.path.abspath(path)
        for one in (text, os.path.realpath(text)):
            if one in self._files:
                return one
        if self._files.is_beside:
            return None
        parts = Path(text).parts
        for count in range(min(self._deepest, len(parts) - 1), 0, -1):
            for folder in self._below:
                inside = folder + "/".join(parts[-count:])
                if inside in self._files:
                    where = str(Path(*parts[:-count]))
                    known = self._folders.setdefault(str(Path(inside).parent), where)
                    if known != where:
                        raise Refused(
                            f"the trainer looks for {inside} in {known} and in {where}, but {self.name!r} is one folder: give it one"
                        )
                    return inside
        return None
