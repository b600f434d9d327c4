"""How a file becomes visible: complete, durable, under a name that is never reused.

    temporary file in tmp/ -> write -> permission bits -> fsync -> read back and compare -> make the folder
    -> check that the store at the path is the one that was opened
    -> place without replacing (link) -> remove the temporary name -> fsync the folder -> check again -> only then acknowledge

The checks are needed because a disk may be unmounted, or a folder moved: files can still be made at that path, but no reader of the
store finds them. One more check, before the first byte, avoids writing in vain.

The comparison finds faults of memory and file system, not of the disk. A failed fsync is never tried again on the same descriptor:
the kernel has marked the pages clean, so a second one would report success. All files of a store are made here.
"""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from cachestore.core import system
from cachestore.core.errors import FormatError, RemoteFailed, WriteFailed, numbered
from cachestore.files import in_use
from cachestore.files.checksum import Buffer, Checksum, digest_file, digest_of
from cachestore.files.failpoints import failpoint
from cachestore.files.locks import LifeLock, is_dead, process_mark
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import is_link, read_whole, reason_of, status_of
from cachestore.files.paths import Layout, Mode
from cachestore.files.removal import is_older

_CREATE_FLAGS: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
_NO_RIGHT: Final = {errno.EACCES, errno.EPERM}
_NO_FOLDER_FSYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_BLOCK_BYTES: Final = 256 * 1024
_OUTSIDE: Final = ".cachestore-tmp"
"""How temporary files outside a store end."""
_LEFTOVER_SECONDS: Final = 86_400.0
_CLAIM_SECONDS: Final = 30.0
"""How long another process is waited for that places a file of the same name, where there are no hard links."""
_CLAIM_PAUSE: Final = 0.02
_CLAIM_BYTES: Final = 1000
_SHARED_BITS: Final = stat.S_ISGID | stat.S_IRWXG
_durable: Final[set[Path]] = set()
"""Folders whose names this process has synced."""


def make_root(layout: Layout, *, takes_over: bool = False) -> Layout:
    """Make a store's `tmp/`, root and the folders above it, durably; existing ones are fine. Returns the layout with the store's mode.

    If it `takes_over` the mode, the system decides with the bits that it gives to `tmp/`: GROUP if the group may write it and its files
    are the group's. So it is if a folder above is setgid and the umask (or the folder's ACL) lets the group write.

    Only creating a store does this. Anything else that did could write where no store is: below the mount point of an unmounted disk.
    """
    made: list[Path] = []
    folder = layout.root
    while not _is_folder(folder):
        made.insert(0, folder)
        folder = folder.parent
    for path in made:
        _make_bare(layout, path)
        _sync_above(path.parent)
    if not takes_over:
        _set_bits(layout.mode, layout.root)
    made += [layout.temporary] * _make_bare(layout, layout.temporary)
    if takes_over:
        layout = replace(layout, mode=Mode.GROUP if _is_shared(layout.temporary) else Mode.PRIVATE)
    for path in made if takes_over and layout.mode is Mode.PRIVATE else {*made, layout.temporary, layout.root}:
        _set_bits(layout.mode, path)
    sync_folder(layout.root)
    return layout


def _is_shared(folder: Path) -> bool:
    status = status_of(folder)
    return status is not None and status.st_mode & _SHARED_BITS == _SHARED_BITS


def _set_bits(mode: Mode, folder: Path) -> None:
    """Give a folder the bits of a store. Another user's stays as it is; raises WriteFailed if this one's group may then not write it."""
    try:
        folder.chmod(mode.folder_bits)
    except PermissionError as error:
        if mode is Mode.GROUP and not _is_shared(folder):
            command = f"`chmod g+rwxs {system.quoted(str(folder))}`"
            words = f"the group may not write {folder}, which is another user's: let them run {command}, then run the same command again"
            raise numbered(WriteFailed(words), error) from error
    except OSError as error:
        _refuse(folder, error)


def make_folder(layout: Layout, *folders: Path) -> None:
    """Make folders below the store's root and those between, durably, with the store's permission bits. Existing ones are fine.

    Raises WriteFailed, also if the store's root is gone or belongs to another store.
    """
    for folder in folders:
        unsure: list[Path] = []
        # The process that made an existing folder may have died before it synced the name, so each process syncs it once.
        while folder != layout.root and (folder not in _durable or not _is_folder(folder)):
            unsure.append(folder)
            folder = folder.parent  # noqa: PLW2901
        if unsure:
            check_for_writing(layout)
            if layout.root not in _durable:
                _sync_above(layout.root.parent)
                _durable.add(layout.root)
        for path in reversed(unsure):
            # A process that was killed before it set the bits leaves a folder that only its owner can write: the owner sets them later.
            if _make_bare(layout, path) or (layout.mode is Mode.GROUP and not _is_shared(path)):
                _set_bits(layout.mode, path)
            sync_folder(path.parent)
            _durable.add(path)


def _make_bare(layout: Layout, path: Path) -> bool:
    """Make a folder, with the bits that the system gives it. Returns False if it was there."""
    try:
        if is_link(path) and path != layout.root and path.is_relative_to(layout.root):
            raise OSError(errno.ELOOP, "it is a link, and links inside a store are refused")  # noqa: TRY301 - reported as any OSError
        if _is_folder(path):
            return False
        path.mkdir()
    except OSError as error:
        if not (isinstance(error, FileExistsError) and _is_folder(path)):
            _refuse(path, error)
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Does nothing where folders cannot be opened (Windows) or synced (some network file systems).

    Raises WriteFailed, also if this user may not open the folder: then its files cannot be acknowledged.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _refuse(folder, error)
    try:
        in_use.sync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            _refuse(folder, error)
    finally:
        os.close(descriptor)


def _sync_above(folder: Path) -> None:
    """Make the store's own name durable if possible: a user may be allowed to make files above it, but not to list them."""
    try:
        sync_folder(folder)
    except WriteFailed as error:
        if error.errno not in _NO_RIGHT:
            raise


def _is_folder(path: Path) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def publish(layout: Layout, final: Path, chunks: Iterable[Buffer], *, digest: str | None = None, read_only: bool = False) -> bool:
    """Publish a file durably under a name of its own. Returns True if this call placed it, False if the name was taken already.

    Makes missing folders below the store's root, also `tmp/`. `digest` is that of all chunks, if the caller knows it. Raises WriteFailed
    with path and reason. The temporary file is then removed if possible, and nothing is acknowledged. The caller may call again, which
    writes a new temporary file.
    """
    chunks = list(chunks)
    make_folder(layout, layout.temporary)
    with _made_visible(layout, final, size_bytes=sum(memoryview(chunk).nbytes for chunk in chunks)) as temporary:
        _write(temporary, _blocks(chunks), in_use.read_only_bits() if read_only else layout.mode.file_bits)
        _check_written(final, temporary, digest or digest_of(chunks))
        return _finish(layout, temporary, final)


def _check_written(final: Path, temporary: Path, digest: str) -> None:
    if digest_file(temporary) != digest:
        raise WriteFailed(
            f"{final}: what was written to {temporary} reads back differently; the memory or the file system is at fault: check both, then"
            " run the same command again"
        )


@contextlib.contextmanager
def _made_visible(layout: Layout, final: Path, *, size_bytes: int = 0, temporary: Path | None = None) -> Generator[Path]:
    """Yield a path in `tmp/` for the file that becomes `final`, and remove it afterwards. Errors of the system become WriteFailed."""
    temporary = temporary or layout.new_temporary()
    try:
        check_for_writing(layout)
        yield temporary
    except OSError as error:
        _refuse(final, error, size_bytes=size_bytes)
    finally:
        _remove(temporary)


def publish_file(layout: Layout, temporary: Path, final: Path) -> bool:
    """Publish a file that was built at a temporary path of `layout`, else as `publish`. The temporary name is gone afterwards."""
    with _made_visible(layout, final, temporary=temporary):
        in_use.sync_file(temporary, in_use.read_only_bits())
        return _finish(layout, temporary, final)


def publish_link(layout: Layout, source: Path, final: Path) -> bool:
    """Publish a file of the store under a second name, else as `publish`. Without hard links its bytes are written again."""
    if not hasattr(os, "link"):
        return publish(layout, final, [read_whole(source, limit_bytes=1 << 40)], read_only=True)
    with _made_visible(layout, final) as temporary:
        make_folder(layout, layout.temporary)
        try:
            temporary.hardlink_to(source)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return publish(layout, final, [read_whole(source, limit_bytes=1 << 40)], read_only=True)
        return _finish(layout, temporary, final)


def publish_pieces(layout: Layout, final: Path, pieces: Iterable[Buffer], *, digest: str) -> bool:
    """Publish a read-only file whose pieces come one after the other, else as `publish`. Only one piece at a time is in memory.

    Raises FormatError, and publishes nothing, if the pieces have another digest. What the iterator raises is raised unchanged, unless it
    is an OSError of the system, which becomes WriteFailed.
    """
    make_folder(layout, layout.temporary)
    with _made_visible(layout, final) as temporary:
        state = Checksum()

        def counted() -> Iterator[Buffer]:
            for block in _blocks(pieces):
                state.update(block)
                yield block

        _write(temporary, counted(), in_use.read_only_bits())
        if state.hexdigest() != digest:
            raise FormatError(
                f"what was to become {final} does not have the digest {digest}; nothing was published: run the same command again"
            )
        _check_written(final, temporary, digest)
        return _finish(layout, temporary, final)


def note(layout: Layout, final: Path, data: Buffer) -> bool:
    """Create a small advisory file: complete when visible, but not synced, so a power cut may lose it. Returns True if this call made it.

    It acknowledges nothing, so the store is checked only before. That check keeps a worker from claiming forever in another store.
    """
    with _made_visible(layout, final, size_bytes=memoryview(data).nbytes) as temporary:
        _write(temporary, [data], layout.mode.file_bits, is_durable=False)
        return _link(layout, temporary, final)


def create(layout: Layout, final: Path, data: Buffer) -> bool:
    """Create a claim under its final name, in one call on names. Returns True if this call made it. Raises WriteFailed.

    Unlike all other files it may be seen before it is complete, and nothing is checked or synced: a claim only saves work.
    """
    bits = layout.mode.file_bits
    try:
        descriptor = os.open(final, _CREATE_FLAGS, bits)
    except FileExistsError:
        return False
    except OSError as error:
        check_for_writing(layout)
        _refuse(final, error)
    try:
        if hasattr(os, "fchmod") and stat.S_IMODE(os.fstat(descriptor).st_mode) != bits:
            os.fchmod(descriptor, bits)
        _write_all(descriptor, data)
    except OSError as error:
        _remove(final)
        _refuse(final, error, size_bytes=memoryview(data).nbytes)
    finally:
        os.close(descriptor)
    return True


def overwrite(layout: Layout, final: Path, data: Buffer) -> None:
    """Replace a worker's heartbeat atomically and without syncing. No other file of a store is ever overwritten.

    As in `note`, the store is checked only before, so that a worker shows no heartbeats in another store.
    """
    with _made_visible(layout, final, size_bytes=memoryview(data).nbytes) as temporary:
        _write(temporary, [data], layout.mode.file_bits, is_durable=False)
        in_use.replace(temporary, final)


def write_outside(final: Path, data: Buffer) -> None:
    """Write a file outside a store: into a temporary file beside it, synced, then renamed over the old file. Raises WriteFailed."""
    temporary = final.parent / f".{secrets.token_hex(8)}{_OUTSIDE}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, _CREATE_FLAGS, 0o666)
        try:
            _write_all(descriptor, data)
            in_use.sync(descriptor)
        finally:
            os.close(descriptor)
        in_use.replace(temporary, final)
    except OSError as error:
        raise WriteFailed(
            f"cannot write {final}: {reason_of(error)}; the earlier contents are unchanged; correct that, then run the same command again"
        ) from error
    finally:
        _remove(temporary)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed `write_outside` left in a folder, once it is a day old: a younger file may still be written to.

    Never raises: who cannot remove them can still write.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - names are wanted, not paths: a trainer's folder has a million of them
            if name.endswith(_OUTSIDE) and is_older(folder / name, _LEFTOVER_SECONDS, now=time.time()):
                in_use.unlink(folder / name, missing_ok=True)


def move(layout: Layout, source: Path, target: Path) -> None:
    """Move a file to another folder of the store durably, without replacing a file there. If another process moved it, do nothing."""
    check_for_writing(layout)
    try:
        if _link(layout, source, target):
            sync_folder(target.parent)  # before the old name goes, or a power cut could take both
            check_for_writing(layout, target)
            in_use.unlink(source, missing_ok=True)
        sync_folder(source.parent)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and status_of(source) is None:
            return
        _refuse(target, error)


def _write(temporary: Path, blocks: Iterable[Buffer], bits: int, *, is_durable: bool = True) -> None:
    descriptor = os.open(temporary, _CREATE_FLAGS, 0o600)
    try:
        for block in blocks:
            _write_all(descriptor, block)
        temporary.chmod(bits)
        if is_durable:
            failpoint("publish.before_fsync")
            in_use.sync(descriptor)
            failpoint("publish.after_fsync")
    finally:
        os.close(descriptor)


def _blocks(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the bytes of these chunks in blocks of one size, but for the last; each is valid until the next.

    Linux keeps a file in memory in pieces of the size that was written at once, up to 2 MiB. For 1 GiB of new files on ext4 it took 1.0 to
    2.7 s of processor time to allocate pieces of 2 MiB, and 0.3 s for pieces of 256 KiB; these are read at 0.92 to 0.95 of the
    speed. Each block begins at a multiple of its size; otherwise Linux uses smaller pieces.
    """
    block, filled = memoryview(bytearray(_BLOCK_BYTES)), 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            some = rest[: _BLOCK_BYTES - filled]
            rest = rest[len(some) :]
            if len(some) == _BLOCK_BYTES:
                yield some
                continue
            block[filled : filled + len(some)] = some
            filled += len(some)
            if filled == _BLOCK_BYTES:
                yield block
                filled = 0
    if filled:
        yield block[:filled]


def _write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


def _finish(layout: Layout, temporary: Path, final: Path) -> bool:
    make_folder(layout, final.parent)
    failpoint("publish.before_link")
    # After this check, another store that appears at the path cannot get the file: it does not have the temporary file to link.
    check_for_writing(layout)
    published = _link(layout, temporary, final)
    failpoint("publish.after_link")
    _remove(temporary)
    sync_folder(final.parent)
    check_for_writing(layout, final)  # if this fails, the placed file stays, as another writer may already count on it
    failpoint("publish.after_folder_fsync")
    return published


def _link(layout: Layout, temporary: Path, final: Path) -> bool:
    """Give a file its final name without replacing: by `link`, or without links by a claim, a check and a rename."""
    if not hasattr(os, "link"):
        return _rename(layout, temporary, final)
    try:
        final.hardlink_to(temporary)
    except FileExistsError:
        # NFS may answer a repeated request with "exists" although the first one made the link.
        return final.exists() and final.samefile(temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename(layout, temporary, final)
    return True


def _rename(layout: Layout, temporary: Path, final: Path) -> bool:
    """Place without links: check and rename while a claim on the name is held, which is created with O_EXCL. Returns False if it is taken.

    A claim that a killed process left goes by proof of its death, or as any file in `tmp/` a day later. A process that sleeps for so long
    finds its temporary file gone too. So nobody replaces a file.
    """
    claim = layout.new_temporary(digest_of([layout.relative(final).encode()]))
    make_folder(layout, claim.parent)
    since = time.monotonic()
    while not final.exists():
        if create(layout, claim, process_mark(os.getpid()).encode()):
            try:
                if final.exists():
                    return False
                in_use.rename(temporary, final)
                return True
            finally:
                _remove(claim)
        _remove_of_the_dead(layout, claim)
        if time.monotonic() - since > _CLAIM_SECONDS:
            claimed = f"another process has claimed that name for {_CLAIM_SECONDS:g} s, and cannot be proved dead from here"
            raise WriteFailed(
                f"cannot write {final}: {claimed}; run the same command again once it has ended; if none is at work any more,"
                f" remove {claim} first (`cachestore gc` does a day later)"
            )
        time.sleep(_CLAIM_PAUSE)
    return False


def _remove_of_the_dead(layout: Layout, claim: Path) -> None:
    """Remove a claim if its process is proved dead: only under a lock, so that none which was made since is removed."""
    with contextlib.suppress(OSError, ValueError), LifeLock(layout.lock("rename"), bits=layout.mode.file_bits) as lock:
        if lock.is_held and is_dead(bytes(read_whole(claim, limit_bytes=_CLAIM_BYTES)).decode()):
            _remove(claim)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        in_use.unlink(path)


def _refuse(path: Path, error: OSError, *, size_bytes: int = 0) -> NoReturn:
    if isinstance(error, WriteFailed | RemoteFailed):
        raise error
    room = f"make room for {size_bytes} bytes" if size_bytes else "make room"
    help_text = {
        errno.ENOSPC: room,
        errno.EDQUOT: f"{room}, or have the quota raised",
        errno.EROFS: "mount the file system for writing",
        errno.EACCES: "let this user write there",
        errno.EMFILE: "raise `ulimit -n`",
        errno.EEXIST: "move what lies there away",
        errno.ENOTDIR: "move the file that lies in the way away",
    }.get(error.errno or 0, "correct that")
    words = (
        f"cannot write {path}: {reason_of(error)}; nothing was reported as stored. First {help_text}, then run the same command again: it"
        " continues from here"
    )
    raise numbered(WriteFailed(words), error) from error
