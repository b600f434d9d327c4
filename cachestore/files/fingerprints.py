"""Fingerprints of model files: SHA-256 of their bytes, under names that do not depend on the folder they are in.

The caller passes in a mapping in which digests are kept, so that no file is read twice. It may be in a store. No torch, no model.
"""

import errno
import os
import stat
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from cachestore.core.arguments import as_many, as_path
from cachestore.core.errors import BadInput
from cachestore.core.inputs import NO_STAT
from cachestore.core.keys import Json, canonical, digest_opened, digest_parts
from cachestore.files.opening import open_foreign
from cachestore.files.stat_record import proof_of, stat_of

_LIMIT_BYTES = 1 << 40
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.EFBIG}
_remembered: dict[str, str] = {}


def _name_of(path: Path, status: os.stat_result) -> str:
    size, stamp = stat_of(status)
    return f"{path.absolute()}|{size}|{stamp}"


def digest_file(path: Path, cache: MutableMapping[str, str]) -> str:
    """Return the SHA-256 (64 hex digits) of a file's bytes, from the cache if it did not change since. Raises BadInput, OSError.

    One that changes while it is read, or changed within the last two seconds, is not cached.
    """
    try:
        with open_foreign(path, limit_bytes=_LIMIT_BYTES) as file:
            before = os.fstat(file.fileno())
            name, is_settled = _name_of(path, before), proof_of(before) != NO_STAT
            known = cache.get(name)
            if known is not None:
                return known
            digest = digest_opened(file)
            unchanged = _name_of(path, os.fstat(file.fileno())) == name
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise BadInput(f"cannot digest {path}: {error.strerror}; check the path, and whether you may read it") from error
    if unchanged and is_settled:
        cache[name] = digest
    return digest


def fingerprint(files: "Sequence[str | os.PathLike[str]]" = (), **settings: Json) -> str:
    """Digest model files and settings into 64 hex digits, to build keys with: `cs.key(fingerprint, ...)`.

    A file counts by its base name and contents. A folder counts by all files below it, with their paths relative to it. Names that begin
    with a dot are ignored, as download tools keep their own files there. So a model that was moved keeps its fingerprint. The order of
    `files` counts. Digests are cached for the life of the process. No files and no settings give a fixed value. Raises BadInput for a
    missing file, a folder without files or one that cannot be listed, and for settings that are not JSON.
    """
    paths = [as_path("a file", item) for item in as_many("files", files, "a list of paths")]
    contents = [[[name, digest_file(path, _remembered)] for name, path in _below(path)] for path in paths]
    return digest_parts("cachestore-fingerprint", canonical(contents), canonical(dict(settings))).hex()


def _below(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the files that count for a path, sorted by name."""
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except OSError as error:
        _refuse(error)
    if not is_folder:
        yield root.name, root
        return
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder) / name for name in names if not name.startswith(".")):
            found[path.relative_to(root).as_posix()] = path
    if not found:
        raise BadInput(f"cannot fingerprint {root}: the folder holds no files; check the path")
    yield from sorted(found.items())


def _refuse(error: OSError) -> NoReturn:  # without the files of a folder, another model could have the same fingerprint
    raise BadInput(f"cannot fingerprint {error.filename}: {error.strerror}; check the path, and whether you may read it") from error
