"""The folder that an export writes to. Other programs may have files there too; a note in it says which files are ours."""

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from cachestore.core import system
from cachestore.core.errors import EncodeFailed
from cachestore.files import in_use
from cachestore.files.checksum import digest_of
from cachestore.files.opening import FOREIGN_LIMIT_BYTES, names_in, read_foreign
from cachestore.files.portable import why_refused
from cachestore.files.publish import remove_leftovers, write_outside

NOTE: Final = ".cachestore-export.json"
"""A file in the exported folder. It lists the files that exports wrote, with their digests."""
_FORMAT: Final = "cachestore-export/1"
_LIMIT_BYTES: Final = 2 * FOREIGN_LIMIT_BYTES
"""More than a written file has: a tar gets no further sample above 256 MiB."""


@dataclass
class Target:
    """The folder that is written to."""

    folder: Path
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
    def _ours(self) -> dict[str, str]:
        """Digests of what earlier exports wrote, by path; empty if the note is missing or invalid."""
        try:
            body = json.loads(read_foreign(self.folder / NOTE))
            return {str(path): str(digest) for path, digest in body["files"].items()} if body["format"] == _FORMAT else {}
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
        elif found is not None and not self.may_replace and self._ours.get(path) != found:
            self.foreign.append(path)
            return False
        else:
            write_outside(final, data)
            self.written += 1
            self.size_bytes += len(data)
        self._ours[path] = digest
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
            if self._ours.get(name) == _digest_there(self.folder / name):
                in_use.unlink(self.folder / name, missing_ok=True)
                self._ours.pop(name)
            else:
                self.foreign.append(name)

    def _inside(self, path: str) -> Path:
        """Return the path of a file. Raises EncodeFailed for a name that leads out of the folder, or that Windows refuses."""
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

    def close(self) -> None:
        """Write the note of which files are ours."""
        body = {"format": _FORMAT, "files": dict(sorted(self._ours.items()))}
        write_outside(self.folder / NOTE, json.dumps(body, indent=0).encode())


def _digest_there(path: Path) -> str | None:
    """Return the digest of a file; None if there is none, empty if it is no file, cannot be read, or is larger than any that is written."""
    try:
        return digest_of([read_foreign(path, limit_bytes=_LIMIT_BYTES)])
    except FileNotFoundError:
        return None
    except OSError:
        return ""
