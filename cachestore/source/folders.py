"""List folders of images, metadata files, manifests and prompt lists as samples."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.core.samples import BESIDE, IMAGE, VIDEO, Sample, goes_with
from cachestore.files.paths import MARKER
from cachestore.source.animated import is_animated_path
from cachestore.source.captions import CAPTION_SUFFIXES, by_spelling, normal, side_car
from cachestore.source.files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Folder
from cachestore.source.listing import Listing, list_samples, list_tables
from cachestore.source.reading import PLAIN, Reading
from cachestore.source.remarks import Problems, Refused, Remarks
from cachestore.source.rows import from_manifest, from_metadata, from_prompts
from cachestore.source.tables import TABLE_SUFFIXES, metadata_of

_SUFFIXES: Final = IMAGE_SUFFIXES | VIDEO_SUFFIXES


def list_source(data: str | Path, how: Reading = PLAIN) -> Listing:
    """List a folder, a file of rows (such as `.jsonl`) or a prompt list (`.txt`). The listing may be empty.

    Raises BadInput for a missing path, an unknown kind of file, or a source of which nothing can be used.
    """
    path = Path(data)
    if os.path.isdir(path):  # noqa: PTH112 - as below
        if not os.access(path, os.R_OK | os.X_OK):
            raise BadInput(f"{path} cannot be read: let this user read and enter the folder")
        if found := metadata_of(path):
            return list_tables(path, [one.path for one in found], partial(from_metadata, found, how), how)
        _refuse_arrow(path)
        return list_samples(Folder(path.absolute()), partial(_from_folder, path, how), path, how)
    suffix = path.suffix.lower()
    if suffix == ".txt" and os.path.isfile(path):  # noqa: PTH113
        own = replace(how, caption_lines="whole", roles=(), caption_column=None)
        return list_tables(path.parent, [path], partial(from_prompts, path), own)
    if suffix in TABLE_SUFFIXES and os.path.isfile(path):  # noqa: PTH113
        return list_tables(path.parent, [path], partial(from_manifest, path, how), how)
    if not os.path.exists(path):  # noqa: PTH110 - Path's raises if access is refused
        raise BadInput(f"{path} does not exist, or this user may not read it: check the path")
    if suffix == ".arrow":
        raise BadInput(f"{path}: pass it to cs.precompute as datasets.load_dataset('arrow', data_files={str(path)!r}, split='train')")
    kinds = ", ".join(TABLE_SUFFIXES)
    raise BadInput(f"{path} is not a folder of images, a file of rows ({kinds}), a list of prompts (.txt) or a tar")


def _refuse_arrow(folder: Path) -> None:
    """Raise BadInput for a folder that `save_to_disk` of datasets wrote: it has pictures, but in tables."""
    there = {name for name in ("state.json", "dataset_info.json", "dataset_dict.json") if (folder / name).is_file()}
    if "dataset_dict.json" in there or len(there) == 2:
        raise BadInput(f"{folder} was written by save_to_disk of datasets: pass datasets.load_from_disk({str(folder)!r}) to cs.precompute")


def _from_folder(root: Path, how: Reading, remarks: Remarks) -> Iterator[Sample]:
    walk = _Walk(remarks)
    found = sorted(walk.files_below(root), key=lambda item: by_spelling(item[0]))
    kinds: dict[str, set[str]] = {}
    kind = {reference: _kind_of(path, how) for reference, path in found}
    for reference, _path in found:
        kinds.setdefault(_stem(reference), set()).add(kind[reference])
    beside: dict[str, dict[str, list[str]]] = {}
    for reference, path in found:
        may_be_beside = how.videos or path.suffix.lower() in IMAGE_SUFFIXES
        if may_be_beside and (named := _named_role(_stem(reference), how.roles)) is not None and named[0] in kinds:
            beside.setdefault(named[0], {}).setdefault(named[1], []).append(reference)
            remarks.beside.append(reference)
    others = set(remarks.beside)
    for reference, path in found:
        role = kind[reference]
        if reference in others:
            continue
        if role == VIDEO and not how.videos:
            remarks.videos += 1
            continue
        sample = normal(reference)
        try:
            captions = side_car([path.with_suffix(suffix) for suffix in CAPTION_SUFFIXES], how, sample, remarks)
        except BadInput as error:
            remarks.refused.append(Refused(sample, str(error)))
            continue
        stem = _stem(reference)
        own = {name: tuple(those) for name, those in beside.get(stem, {}).items() if goes_with(name, role, kinds[stem])}
        yield Sample(sample, {role: (reference,), **own}, captions)
    walk.problems.refuse(root)


def _kind_of(path: Path, how: Reading) -> str:
    """Whether a file is a picture or a video; an animation is a video where videos are asked for."""
    return VIDEO if path.suffix.lower() in VIDEO_SUFFIXES or (how.videos and is_animated_path(path)) else IMAGE


def _stem(reference: str) -> str:
    return reference.rpartition(".")[0]


def _named_role(stem: str, roles: Sequence[str]) -> tuple[str, str] | None:
    """What the name of a picture or video says, `cat.mask` or `cat.control.1`: the file that it belongs to, and its role there."""
    name, _dot, role = stem.rpartition(".")
    if role.isdecimal():
        name, _dot, role = name.rpartition(".")
    return (name, role.lower()) if name and role.lower() in {*BESIDE, *roles} else None


@dataclass(slots=True)
class _Walk:
    """Walks through a folder, and enters each real folder once. Collects in `problems` what cannot be used."""

    remarks: Remarks
    problems: Problems = field(default_factory=Problems)
    _seen: set[str] = field(default_factory=set[str])
    _above: set[str] = field(default_factory=set[str])
    """The folders above the source. A link to one of them would add everything beside the source."""
    _links: list[tuple[str, Path]] = field(default_factory=list[tuple[str, Path]])
    """Links to folders that were not entered yet."""

    def files_below(self, root: Path) -> Iterator[tuple[str, Path]]:
        """Yield (reference, path) of every image and video. Skips stores and hidden names.

        A folder with several names is listed under its own name, else under the first link to it in the order of names. So all ranks call
        it the same. Its other names, and links back into a folder around them, are skipped with a remark.
        """
        self._above = {os.path.realpath(folder) for folder in Path(os.path.realpath(root)).parents}
        self._links = [("", root)]
        while self._links:
            links, self._links = sorted(self._links), []
            for prefix, folder in links:
                yield from self._files_of_tree(prefix, folder)

    def _files_of_tree(self, prefix: str, folder: Path) -> Iterator[tuple[str, Path]]:
        folders = [(prefix, folder)]
        while folders:
            prefix, folder = folders.pop()
            real = os.path.realpath(folder)
            if real in self._seen or real in self._above:
                self.remarks.again.append(prefix.removesuffix("/"))
                continue
            self._seen.add(real)
            for entry in self._entries(folder):
                name, path = f"{prefix}{entry.name}", folder / entry.name
                if self._is_folder(entry, name):
                    (self._links if entry.is_symlink() else folders).append((f"{name}/", path))
                elif _is_named_like_one(entry) and self._is_usable(entry):
                    yield name, path

    def _entries(self, folder: Path) -> "list[os.DirEntry[str]]":
        try:
            if (folder / MARKER).exists():  # a store
                return []
            with os.scandir(folder) as entries:
                return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
        except OSError as error:
            self.problems.add(
                f"the folder {folder} cannot be listed ({error.strerror or error}): let this user read it, or move it out of the source"
            )
            return []

    def _is_folder(self, entry: "os.DirEntry[str]", name: str) -> bool:
        """Whether this is a folder or a link to one. Adds a remark for a broken link, and a problem if it cannot be examined."""
        try:
            if entry.is_dir():
                return True
            leads_nowhere = entry.is_symlink() and not Path(entry.path).exists()
        except OSError as error:
            leads_nowhere = error.errno == errno.ELOOP
            if not leads_nowhere and not _is_named_like_one(entry):
                self.problems.add(
                    f"this user may not read {entry.path} ({error.strerror or error}): allow it, or move it out of the source"
                )
        # A broken link named like a picture fails alone when it is read. One named like a caption file is reported with its picture.
        if leads_nowhere and Path(entry.name).suffix.lower() not in {*_SUFFIXES, *CAPTION_SUFFIXES}:
            self.remarks.dead.append(name)
        return False

    def _is_usable(self, entry: "os.DirEntry[str]") -> bool:
        """Whether a file named like a picture may be read. Reading a fifo or device might never end; anything else fails alone."""
        try:
            is_usable = entry.is_file() or (entry.is_symlink() and not Path(entry.path).exists())
        except OSError:
            return True
        if not is_usable:
            self.problems.add(f"{entry.path} is not a regular file but a fifo, a socket or a device: move it out of the folder")
        return is_usable


def _is_named_like_one(entry: "os.DirEntry[str]") -> bool:
    return Path(entry.name).suffix.lower() in _SUFFIXES
