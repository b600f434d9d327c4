"""Walk through a folder: the names in each folder below it that may be data. What is passed over on the way comes into the account."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cachestore.files.paths import MARKER
from cachestore.sources.files import MEDIA_SUFFIXES, TEXT_SUFFIXES, leads_nowhere
from cachestore.sources.remarks import Problems
from cachestore.sources.unused import BROKEN_LINK, HIDDEN, LISTED_TWICE, STORE, Unused


def split_name(name: str) -> tuple[str, str]:
    """Return (stem, suffix) of a file's name. The suffix begins with a dot and is in small letters; empty if the name has none."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, f".{suffix.lower()}") if dot and stem and suffix else (name, "")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the files in one folder."""

    prefix: str
    """The folder's path in the source: empty, or with `/` at its end."""
    path: Path
    files: list[str]
    """In order. Links that lead nowhere are among them if they are named like a picture, a video or a caption."""
    broken: list[str] = field(default_factory=list[str])
    """Those of them that lead nowhere."""


@dataclass(slots=True)
class Walk:
    """Walks through a folder, and enters each real folder once. Collects in `problems` what cannot be used."""

    unused: Unused
    problems: Problems = field(default_factory=Problems)
    _seen: set[str] = field(default_factory=set[str])
    _above: set[str] = field(default_factory=set[str])
    """The folders above the source. A link to one of them would add everything beside the source."""
    _links: list[tuple[str, Path]] = field(default_factory=list[tuple[str, Path]])
    """Links to folders that were not entered yet."""

    def folders_below(self, root: Path) -> Iterator[Names]:
        """Yield the names in each folder. Skips stores, hidden names, and links back into a folder around them.

        A folder with several names is listed under its own, else under the first link to it: so all ranks call it the same.
        """
        self._above = {os.path.realpath(folder) for folder in Path(os.path.realpath(root)).parents}
        self._links = [("", root)]
        while self._links:
            links, self._links = sorted(self._links), []
            for prefix, folder in links:
                yield from self._folders_of_tree(prefix, folder)

    def _folders_of_tree(self, prefix: str, folder: Path) -> Iterator[Names]:
        folders = [(prefix, folder)]
        while folders:
            prefix, folder = folders.pop()
            real = os.path.realpath(folder)
            if real in self._seen or real in self._above:
                self.unused.add(LISTED_TWICE, prefix)
                continue
            self._seen.add(real)
            entries = self._entries(folder)
            if any(entry.name == MARKER for entry in entries):
                self.unused.add(STORE, prefix or "./")
                continue
            there = Names(prefix, folder, [])
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    self.unused.add(HIDDEN, f"{prefix}{name}")
                elif self._is_folder(entry):
                    (self._links if entry.is_symlink() else folders).append((f"{prefix}{name}/", folder / name))
                elif self._is_usable(entry, there):
                    there.files.append(name)
            yield there

    def _entries(self, folder: Path) -> "list[os.DirEntry[str]]":
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.problems.add(
                f"the folder {folder} cannot be listed ({error.strerror or error}): let this user read it, or move it out of the source"
            )
            return []

    def _is_folder(self, entry: "os.DirEntry[str]") -> bool:
        try:
            return entry.is_dir()
        except OSError as error:
            if error.errno != errno.ELOOP and split_name(entry.name)[1] not in MEDIA_SUFFIXES:
                self.problems.add(
                    f"this user may not read {entry.path} ({error.strerror or error}): allow it, or move it out of the source"
                )
            return False

    def _is_usable(self, entry: "os.DirEntry[str]", there: Names) -> bool:
        """Whether a name may be that of data. A broken link that is named like a picture or a caption fails alone when it is read.

        Reading a fifo or device that is named like a picture might never end.
        """
        suffix = split_name(entry.name)[1]
        try:
            if entry.is_file():
                return True
        except OSError:
            pass
        if leads_nowhere(entry.path):
            if suffix not in MEDIA_SUFFIXES and suffix not in TEXT_SUFFIXES:
                self.unused.add(BROKEN_LINK, f"{there.prefix}{entry.name}")
                return False
            there.broken.append(entry.name)
        elif suffix in MEDIA_SUFFIXES:
            self.problems.add(f"{entry.path} is not a regular file but a fifo, a socket or a device: move it out of the folder")
            return False
        return True
