"""The folder that an export writes to, which belongs to somebody else as well.

A file is written under a temporary name beside its own, synced and renamed. What stands there already with the same bytes is left, and so
is any file that is not an earlier export's. A note in the folder says which files are ours.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from cachestore.core.errors import EncodeFailed
from cachestore.files.checksum import digest_of
from cachestore.files.publish import write_outside

NOTE: Final = ".cachestore-export.json"
"""In an exported folder: which files are ours, and what was written to them."""
_FORMAT: Final = "cachestore-export/1"


@dataclass
class Target:
    """A folder that belongs to somebody else as well."""

    folder: Path
    may_replace: bool
    written: int = 0
    unchanged: int = 0
    size_bytes: int = 0
    """Of what was written."""
    foreign: list[str] = field(default_factory=list[str])
    """Files of strangers."""

    @cached_property
    def _ours(self) -> dict[str, str]:
        """Digests of what earlier exports wrote, by path; nothing where the note is missing or makes no sense."""
        try:
            body = json.loads((self.folder / NOTE).read_bytes())
            return {str(path): str(digest) for path, digest in body["files"].items()} if body["format"] == _FORMAT else {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def put(self, path: str, data: bytes) -> bool:
        """Have a file hold these bytes, unless it is a stranger's: whether it does.

        Raises WriteFailed, EncodeFailed for a path that leads elsewhere.
        """
        final = self._inside(path)
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

    def _inside(self, path: str) -> Path:
        """The file's place. A name from a catalog never leads out of the folder. Raises EncodeFailed."""
        final = Path(os.path.normpath(self.folder / path))
        if not final.is_relative_to(self.folder) or final == self.folder:
            raise EncodeFailed(f"{path} leads out of {self.folder}")
        return final

    def close(self) -> None:
        """Remember which files are ours."""
        body = {"format": _FORMAT, "files": dict(sorted(self._ours.items()))}
        write_outside(self.folder / NOTE, json.dumps(body, indent=0).encode())


def _digest_there(path: Path) -> str | None:
    """Digest of what stands at a path; None where nothing does, empty for what is no file."""
    try:
        return digest_of([path.read_bytes()])
    except FileNotFoundError:
        return None
    except OSError:
        return ""
