"""The folder that an export writes to. Other programs may have files there too; a note in it says which files are ours."""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from cachestore.core import system
from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import Json
from cachestore.core.words import in_short
from cachestore.files import in_use
from cachestore.files.checksum import digest_of
from cachestore.files.opening import FOREIGN_LIMIT_BYTES, names_in, read_foreign, reason_of
from cachestore.files.portable import why_refused
from cachestore.files.publish import remove_leftovers, write_outside

NOTE: Final = ".cachestore-export.json"
"""A file in the exported folder. It lists the files that exports wrote, with their digests."""
_FORMAT: Final = "cachestore-export/1"
_LIMIT_BYTES: Final = 2 * FOREIGN_LIMIT_BYTES
"""More than a written file has: a tar gets no further sample above 256 MiB."""


class Written(NamedTuple):
    """A file that an export wrote."""

    digest: str
    format: str


@dataclass
class Target:
    """The folder that is written to."""

    folder: Path
    format: str
    may_replace: bool
    written: int = 0
    unchanged: int = 0
    size_bytes: int = 0
    """Size of the written files."""
    foreign: list[str] = field(default_factory=list[str])
    """Files with other bytes that no export wrote."""
    _tidied: set[Path] = field(default_factory=set[Path])
    """Folders without leftovers of killed exports."""

    @cached_property
    def _ours(self) -> dict[str, "Written"]:
        try:
            body = json.loads(read_foreign(self.folder / NOTE))
            files: dict[str, list[str]] = body["files"] if body["format"] == _FORMAT else {}
            return {path: Written(str(digest), str(written_as)) for path, (digest, written_as) in files.items()}
        except (OSError, RecursionError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def put(self, path: str, data: bytes) -> bool:
        """Write a file, unless one with other bytes exists that no export wrote. Return whether it has these bytes now.

        Raises WriteFailed, and EncodeFailed for a path outside of the folder.
        """
        final = self._inside(path)
        if final.parent not in self._tidied:
            remove_leftovers(final.parent)
            self._tidied.add(final.parent)
        digest = digest_of([data])
        found = _digest_there(final)
        if found == digest:
            self.unchanged += 1
        elif found is not None and not self.may_replace and (path not in self._ours or self._ours[path].digest != found):
            self.foreign.append(path)
            return False
        else:
            write_outside(final, data)
            self.written += 1
            self.size_bytes += len(data)
        self._ours[path] = Written(digest, self.format)
        return True

    def drop(self, names: re.Pattern[str], *, but: Collection[str]) -> None:
        """Remove what earlier exports wrote under such names, but for these files. Others' files of such names are listed as foreign."""
        there = names_in(self.folder, is_root=True)
        for name in set(self._ours).difference(there, but):  # removed by hand, or by an export that died before it wrote the note
            if names.fullmatch(name) is not None:
                self._ours.pop(name)
        for name in there:
            if names.fullmatch(name) is None or name in but:
                continue
            if name in self._ours and self._ours[name].digest == _digest_there(self.folder / name):
                in_use.unlink(self.folder / name, missing_ok=True)
                self._ours.pop(name)
            else:
                self.foreign.append(name)

    def _inside(self, path: str) -> Path:
        final = Path(os.path.normpath(self.folder / path))
        if not final.is_relative_to(self.folder) or final == self.folder:
            raise EncodeFailed(
                f"its id leads out of {self.folder} ({path}): give the sample another id, and run `cachestore precompute` again"
            )
        if system.IS_WINDOWS and (why := next((found for part in Path(path).parts if (found := why_refused(part))), "")):
            raise EncodeFailed(
                f"Windows refuses the name {path} ({why}): give the sample another id, and run `cachestore precompute` again"
            )
        return final

    def listed(self) -> "dict[str, Written]":
        """Return what exports wrote here, by path; empty without a note."""
        return dict(self._ours)

    def forget(self, paths: Collection[str]) -> None:
        """Take files out of the note; without others the note is removed."""
        for path in paths:
            self._ours.pop(path, None)
        if self._ours:
            self.close()
        else:
            in_use.unlink(self.folder / NOTE, missing_ok=True)

    def close(self) -> None:
        """Write the note of which files are ours."""
        body = {"format": _FORMAT, "files": dict(sorted(self._ours.items()))}
        write_outside(self.folder / NOTE, json.dumps(body, indent=0).encode())


@dataclass(frozen=True, slots=True, repr=False)
class RemovedExport:
    """What was removed of a folder's exports, or would be."""

    applied: bool
    folder: str
    removed: int
    formats: Mapping[str, int]
    """How many of these files each format wrote."""
    bytes: int
    """Size of these files."""
    gone: int
    """Files that were not there any more."""
    kept: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files that were kept, each with the reason."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore export --remove --json` prints."""
        return asdict(self)


def remove_export(folder: str | Path, trainer: str | None = None, *, apply: bool = True) -> RemovedExport:
    """Remove from a folder the files that exports wrote there, by the note that they left, and the sub-folders that are empty then.

    With a `trainer`, only the files of its format are removed. A file with other bytes than were written is kept, and so is everything that
    no export wrote. Without `apply` nothing is changed.

    Raises:
        BadInput: there is no such folder, or no note of an export in it.
        WriteFailed: the note of what was kept cannot be written.
    """
    root = as_path("folder", folder).absolute()
    target = Target(root, "", may_replace=False)
    ours = {path: one for path, one in target.listed().items() if trainer in (None, one.format)}
    if not ours:
        what = f"has no note of an export{f' for {trainer}' if trainer else ''}" if root.is_dir() else "is no folder"
        raise BadInput(f"{root} {what} ({NOTE}), so nothing was removed: give the folder that `cachestore export -o` wrote to")
    size_bytes = gone = 0
    removed, kept = Counter[str](), dict[str, str]()
    for path, one in ours.items():
        reason, size = _removable(root, path, one.digest)
        if reason is None:
            gone += 1
        elif reason:
            kept[path] = reason
        else:
            try:
                if apply:
                    in_use.unlink(root / path, missing_ok=True)
            except OSError as error:
                kept[path] = f"it cannot be removed ({reason_of(error)})"
                continue
            removed[one.format] += 1
            size_bytes += size
    if apply:
        folders = {parent for path in ours for parent in Path(path).parents if parent != Path()}
        for sub_folder in sorted(folders, key=lambda one: -len(one.parts)):
            with suppress(OSError):  # it has other files, is gone, or is a link
                (root / sub_folder).rmdir()
        target.forget(set(ours) - set(kept))
    return RemovedExport(apply, str(root), removed.total(), dict(sorted(removed.items())), size_bytes, gone, kept)


def _removable(root: Path, path: str, digest: str) -> tuple[str | None, int]:
    """Return why a file of an export is kept, and its size: "" if it may be removed, None if it is gone. A link is not followed out."""
    final = Path(os.path.normpath(root / path))
    inside = final.is_relative_to(root) and final != root and final.name != NOTE
    if not inside or not final.parent.resolve().is_relative_to(root.resolve()):
        return "it is not in this folder", 0
    found = _digest_there(final)
    if found is None:
        return None, 0
    return ("" if found == digest else "it was changed after the export"), final.lstat().st_size


def _digest_there(path: Path) -> str | None:
    """Return the digest of a file; None if there is none, empty if it is no file, cannot be read, or is larger than any that is written."""
    try:
        return digest_of([read_foreign(path, limit_bytes=_LIMIT_BYTES)])
    except FileNotFoundError:
        return None
    except OSError:
        return ""
