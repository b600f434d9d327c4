"""Push: copy a store, or one generation of a data set, from a folder into an object store.

    marker -> segments -> recipes -> index -> catalogs, the lowest generation first

So a catalog is visible only when all that it names is. Files that are named by their contents never change: one of the same size is there
already. A killed push leaves a store that lacks the last catalogs; the same command sends the rest.
"""

import secrets
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from cachestore.care.lines import tidy_line
from cachestore.core.errors import CacheStoreError, FormatError, MissingEntry, ReadFailed
from cachestore.files import in_use
from cachestore.files.checksum import digest_file, digest_of, read_blocks
from cachestore.files.marker import FORMAT, VERSION, check_for_reading
from cachestore.files.opening import names_in, opened, read_at, read_whole, status_of
from cachestore.files.paths import MARKER, Layout, parse_recipe
from cachestore.files.records import RECORD_LIMIT_BYTES, encode_record
from cachestore.files.table import TABLE_LIMIT_BYTES
from cachestore.remote.address import parse_address
from cachestore.remote.call import call_helper
from cachestore.remote.client import Client
from cachestore.remote.outline import (
    KEYS,
    choose_generations,
    draw_segments,
    fetch_index,
    key_of,
    read_remote_marker,
    remote_header,
    start_of,
    take_inventory,
)
from cachestore.remote.transfer import (
    JOBS,
    FileRef,
    Mover,
    Moves,
    Shown,
    StoreTransfer,
    TransferReport,
    TransferRequest,
    UploadedFile,
    pieces_of_remote,
    requests_up,
    run_transfer,
    segments_of,
)
from cachestore.store.format.catalog import list_names, read_catalog
from cachestore.store.format.index import check as check_index
from cachestore.store.format.line import list_line
from cachestore.store.format.marked import marked_segments
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot, open_layout
from cachestore.store.read.unfinished import check_there, list_unfinished
from cachestore.store.write.commit import commit, has_news


def push(
    store: str | Path,
    address: str,
    *,
    name: str | None = None,
    generation: int | None = None,
    jobs: int = JOBS,
    check: bool = False,
    dry_run: bool = False,
    on_progress: Shown | None = None,
) -> TransferReport:
    """Copy a store into an object store, or only one generation of a data set. The same call continues a push that was stopped.

    What is at the address already stays: two stores pushed to one address become one store with the data sets of both. Readers see a data
    set only when all its values are there.

    Args:
        store: the store's folder.
        address: where it goes: `s3://bucket/path`, `gs://…`, `az://…` or `file:///…`. Endpoint and credentials come from the environment.
        name: push only this data set: its recipes, and the segments that hold its values.
        generation: of the data set; the newest by default.
        jobs: how many files are sent at once. Each takes 16 MiB of memory.
        check: read what is there already, and compare digests; otherwise a file of the same size is the same. Files to be sent are
            compared with their digests, too.
        dry_run: send nothing; only say what would be sent.
        on_progress: called in this thread with (what is done, bytes sent, bytes in all).

    Raises:
        StoreNotFound: there is no store in the folder.
        BadInput: there is no such data set, the address has another generation of this number, or rows of a published data set that the
            store does not have.
        MissingEntry, FormatError: the store is damaged: run `cachestore repair`.
        RemoteFailed: the object store refuses, or does not answer.
        MissingExtra: the extra [objects] is not installed.
    """
    request = TransferRequest.checked(name, generation, jobs, check=check, dry_run=dry_run, on_progress=on_progress)
    layout = open_layout(Layout.at(store, "store"))
    parse_address("address", address)
    check_there(layout, name)
    report = TransferReport.from_json(call_helper("push", address, store=str(store), on_progress=on_progress, **request.as_json()))
    unfinished = list_unfinished(layout) if name is None else []
    return replace(report, remarks=(*report.remarks, *(one.in_words(layout) for one in unfinished)))


def push_to(client: Client, layout: Layout, request: TransferRequest) -> TransferReport:
    """`push` with a client."""
    try:
        return run_transfer(_Push, client, layout, request)  # if `gc` or `compact` has removed a file, what it held is elsewhere by now
    except FileNotFoundError as error:
        if isinstance(error, CacheStoreError):
            raise
        raise ReadFailed(f"{error.filename} existed a moment ago and is missing now; run the same command again") from error


class _Push(StoreTransfer):
    requests = staticmethod(requests_up)

    def __init__(self, client: Client, layout: Layout, request: TransferRequest, scratch: Path) -> None:
        check_for_reading(layout)
        super().__init__(client, layout, request, scratch)
        self._marker = read_remote_marker(client)  # refuses one of a newer format before anything is sent
        self._needed: dict[str, int] = {}
        """Size of each segment that has to be there before the catalogs are."""

    def plan(self) -> Moves:
        layout, there, request = self._layout, self._inventory, self._request
        for name in list_names(layout):
            if request.name in {None, name}:
                tidy_line(layout, name, with_fence=False)  # tables are sent, not entries
        generations = {name: numbers for name in list_names(layout) if (numbers := list_line(layout, name).tables)}
        plan = Moves(choose_generations(generations, request.name, request.generation, where=layout.root))
        for name in plan.generations:
            self._require_one_line(name)
        digests, fingerprints = set[str](), set[str]()
        with closing(load_snapshot(layout)) as snapshot:
            for name, generation in ((name, generation) for name, some in plan.generations.items() for generation in some):
                catalog = read_catalog(layout.catalog(name, generation), generation=generation)
                digests |= segments_of(catalog, snapshot, where=layout.root, command=f"run {layout.command('repair --refill')}")
                fingerprints.update(catalog.recipes)
                if generation in there.catalogs.get(name, ()):
                    self._require_same(name, generation, there.catalogs[name][generation])
                    plan.skipped += 1
                else:
                    plan.catalogs.append((name, generation, self._file(KEYS.catalog(name, generation))))
            if request.name is None:
                if snapshot.unreadable:
                    raise FormatError(f"{next(iter(snapshot.unreadable.values()))}; nothing was sent")
                digests |= list_segments(layout) - marked_segments(layout)
                fingerprints.update(filter(None, map(parse_recipe, names_in(layout.recipes))))
        files = {digest: self._file(KEYS.segment(digest)) for digest in sorted(digests)}
        self._needed = {digest: file.size for digest, file in files.items()}
        good = {digest for digest, file in files.items() if there.segments.get(digest) == file.size}
        good -= self._damaged(good) if request.check else set()
        plan.segments = [file for digest, file in files.items() if digest not in good]
        listed = names_in(layout.recipes)
        recipes = [fingerprint for fingerprint in sorted(fingerprints) if layout.recipe(fingerprint).name in listed]
        plan.recipes = [self._file(KEYS.recipe(fingerprint)) for fingerprint in recipes if fingerprint not in there.recipes]
        plan.skipped += len(good) + len(recipes) - len(plan.recipes)
        return plan

    def move(self, plan: Moves, mover: Mover) -> None:
        if self._marker is None:
            body = {"store_id": secrets.token_hex(16), "mode": self._layout.mode.value}
            self._client.put_new(MARKER, encode_record(FORMAT, VERSION, body))
        mover.each("sending segments", plan.segments, lambda file: self._send_segment(mover, file))
        mover.each("sending recipes", plan.recipes, lambda file: self._send_new(mover, file, RECORD_LIMIT_BYTES))
        if plan.segments or plan.catalogs or not self._inventory.indexes:
            self._send_index(plan)
        check_for_reading(self._layout)
        if plan.catalogs:
            # The first listing may have been wrong, and what it named may have been removed since.
            self._inventory = take_inventory(self._client)
            there = self._inventory.segments
            if lacking := next((digest for digest, size in self._needed.items() if there.get(digest) != size), None):
                where = self._client.address.of(key_of(KEYS.segment(lacking)))
                raise MissingEntry(f"{where} was there, or was sent, and is not listed; run the same command again")
        for name in {name for name, _generation, _file in plan.catalogs}:
            self._require_one_line(name)  # another push may have ended meanwhile
        for name, generation, file in plan.catalogs:
            mover.show("sending catalogs")
            if not self._send_new(mover, file, TABLE_LIMIT_BYTES):
                self._require_same(name, generation, self._client.head(file.key) or 0)

    def _file(self, path: Path) -> FileRef:
        status = status_of(self._layout.root / path)
        if status is None:
            raise FileNotFoundError(2, "No such file", str(self._layout.root / path))
        return FileRef(key_of(path), status.st_size)

    def _damaged(self, digests: Collection[str]) -> set[str]:
        wrong: set[str] = set()
        files = {digest: FileRef(key_of(KEYS.segment(digest)), self._inventory.segments[digest]) for digest in digests}
        mover = Mover(self._request.jobs, sum(file.size for file in files.values()), self._request.on_progress)

        def compare(digest: str) -> None:
            if digest_of(pieces_of_remote(self._client, files[digest], mover)) != digest:
                wrong.add(digest)

        mover.each("checking what is there", files, compare)
        return wrong

    def _send_segment(self, mover: Mover, file: FileRef) -> None:
        path = self._layout.root / file.key
        if self._request.check and digest_file(path) != path.stem:
            raise FormatError(f"{path} does not match the digest in its name, and was not sent: run {self._layout.command('repair')}")
        with opened(path) as (descriptor, _status):
            self._client.put(file.key, UploadedFile(descriptor, mover), file.size)

    def _send_new(self, mover: Mover, file: FileRef, limit_bytes: int) -> bool:
        is_new = self._client.put_new(file.key, bytes(read_whole(self._layout.root / file.key, limit_bytes=limit_bytes)))
        mover.moved(file.size)
        return is_new

    def _send_index(self, plan: Moves) -> None:
        """Publish an index that covers what is at the address now. Other pushers' newer segments are read without it."""
        outline = self._outline
        fetch_index(self._client, self._inventory, outline)
        for index in list_indexes(self._layout) if not list_indexes(outline) else ():
            outline.indexes.mkdir(parents=True, exist_ok=True)
            with suppress(FormatError):
                with opened(self._layout.index(index)) as (descriptor, _status), outline.index(index).open("wb") as copy:
                    copy.writelines(block for _offset, block in read_blocks(descriptor))
                check_index(outline, index)
                break
            in_use.unlink(outline.index(index))
        sent = {Path(file.key).stem: file.size for file in plan.segments}
        draw_segments(outline, {**self._inventory.segments, **sent}, self._header_of)
        with closing(load_snapshot(outline)) as snapshot:
            if has_news(snapshot):
                commit(outline, snapshot=snapshot).close()
        newest = list_indexes(outline)[:1]
        for index in newest if newest and newest[0] not in self._inventory.indexes else ():
            with opened(outline.index(index)) as (descriptor, status):
                self._client.put(key_of(KEYS.index(index)), UploadedFile(descriptor), status.st_size)

    def _header_of(self, digest: str, size: int) -> bytes:
        with suppress(FileNotFoundError), opened(self._layout.segment(digest)) as (descriptor, status):
            if status.st_size == size:
                return start_of(lambda start, count: bytes(read_at(descriptor, count, start)), size)
        return remote_header(self._client)(digest, size)
