"""Pull: copy a store, or one generation of a data set, from an object store into a folder.

It reads catalogs first, then what they name, and publishes in the order of a job: segments, recipes, index, catalogs. So a catalog is
visible only when all that it names is. A killed pull leaves files that the same command finds; parts of files lie in `tmp/`.
"""

import secrets
from contextlib import closing
from functools import partial
from pathlib import Path

from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput, FormatError, Incomplete
from cachestore.core.keys import Recipe
from cachestore.files.checksum import digest_file
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import names_in, open_foreign, status_of
from cachestore.files.paths import MARKER, Access, Layout, Mode
from cachestore.files.publish import publish, publish_pieces
from cachestore.files.records import decode_record
from cachestore.remote.address import parse_address
from cachestore.remote.call import call_helper
from cachestore.remote.client import Client
from cachestore.remote.outline import (
    KEYS,
    choose_generations,
    digesting,
    draw_segments,
    fetch_catalog,
    fetch_index,
    key_of,
    remote_header,
    require_store,
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
    pieces_of_remote,
    run_transfer,
    segments_of,
)
from cachestore.store.format.catalog import HAVE_SOURCES, Catalog, read_catalog
from cachestore.store.format.line import Changes, LineEntry, add_changes, encode_entry, list_line, read_entry
from cachestore.store.read.snapshot import Snapshot, load_snapshot, open_layout
from cachestore.store.write.commit import RECIPE_FORMAT, RECIPE_VERSION, commit, create_store
from cachestore.store.write.made import read_lineage
from cachestore.store.write.session import Session
from cachestore.store.write.writer import Store


def pull(
    address: str,
    store: str | Path,
    *,
    name: str | None = None,
    generation: int | None = None,
    jobs: int = JOBS,
    check: bool = False,
    dry_run: bool = False,
    access: Access | None = None,
    on_progress: Shown | None = None,
) -> TransferReport:
    """Copy a store from an object store into a folder, or only one generation of a data set. The same call continues a stopped pull.

    The folder becomes a store, or is one: what it has stays, and what it lacks comes. Every segment is compared with its digest while it is
    written. Readers see a data set only when all its values are there.

    Args:
        address: where the store is: `s3://bucket/path`, `gs://…`, `az://…` or `file:///…`. Endpoint and credentials come from the
            environment.
        store: the folder; made if it does not exist.
        name: pull only this data set: its recipes, and the segments that hold its values.
        generation: of the data set; the newest by default.
        jobs: how many files come at once. Each takes 16 MiB of memory.
        check: compare the segments that the folder has with their digests; otherwise a file of the same size is the same.
        dry_run: change nothing; only say what would come.
        access: who may write a new store, as for `precompute`.
        on_progress: called in this thread with (what is done, bytes received, bytes in all).

    Raises:
        StoreNotFound: there is no store at the address.
        BadInput: there is no such data set, the folder has another generation of this number, or rows of a published data set that the
            address does not have, or has dropped it, or it is no store and not empty.
        MissingEntry: the store at the address lacks values: push it again.
        FormatError: a file there, or in the folder, is damaged.
        WriteFailed: the disk refused to write.
        RemoteFailed: the object store refuses, or does not answer.
        MissingExtra: the extra [objects] is not installed.
    """
    request = TransferRequest.checked(name, generation, jobs, check=check, dry_run=dry_run, on_progress=on_progress)
    Mode.asked(access)
    root = as_path("store", store)
    parse_address("address", address)
    options = request.as_json() | {"access": access}
    return TransferReport.from_json(call_helper("pull", address, store=str(root), on_progress=on_progress, **options))


def pull_from(client: Client, root: Path, request: TransferRequest) -> TransferReport:
    """`pull` with a client."""
    return run_transfer(_Pull, client, Layout(root.absolute()), request)


class _Pull(StoreTransfer):
    def __init__(self, client: Client, layout: Layout, request: TransferRequest, scratch: Path) -> None:
        require_store(client)
        super().__init__(client, layout, request, scratch)
        if MARKER in names_in(layout.root, is_root=True):
            self._layout = open_layout(layout)

    def plan(self) -> Moves:
        layout, there, request = self._layout, self._inventory, self._request
        plan = Moves(choose_generations(there.catalogs, request.name, request.generation, where=self._client.address))
        self._leave_out_dropped(plan)
        self._here = {name: self._require_one_line(name) for name in plan.generations}
        for name, generation in ((name, generation) for name, some in plan.generations.items() for generation in some):
            size = there.catalogs[name][generation]
            if layout.catalog(name, generation).name in names_in(layout.catalog_folder(name)):
                self._require_same(name, generation, size)
                plan.skipped += 1
            else:
                plan.catalogs.append((name, generation, FileRef(key_of(KEYS.catalog(name, generation)), size)))
        digests, fingerprints = (set(there.segments), set(there.recipes)) if request.name is None else self._of_data_set(plan)
        present: list[Path] = []
        for digest in sorted(digests):
            path, size = layout.segment(digest), there.segments[digest]
            status = status_of(path)
            if status is None:
                plan.segments.append(FileRef(key_of(KEYS.segment(digest)), size))
            elif status.st_size == size:
                present.append(path)
            else:
                raise self._damaged_here(path)
        if request.check:
            Mover(request.jobs, 0, request.on_progress).each("checking what is there", present, self._check_here)
        listed = names_in(layout.recipes)
        lacking = [fingerprint for fingerprint in sorted(fingerprints) if layout.recipe(fingerprint).name not in listed]
        plan.recipes = [FileRef(key_of(KEYS.recipe(fingerprint)), there.recipes[fingerprint]) for fingerprint in lacking]
        plan.skipped += len(present) + len(fingerprints) - len(lacking)
        return plan

    def _leave_out_dropped(self, plan: Moves) -> None:
        """Leave out generations that were dropped in the folder, and say so. Raises BadInput if only such a one was asked for."""
        for name, numbers in list(plan.generations.items()):
            dropped = list_line(self._layout, name).dropped
            kept = [number for number in numbers if number > dropped]
            if len(kept) == len(numbers):
                continue
            why = f"the data set {name!r} was dropped in {self._layout.root} up to number {dropped}"
            if self._request.name is not None:
                raise BadInput(f"{why}, so that generation {numbers[-1]} cannot come there: pull it into another folder", option="name")
            self._remarks.append(f"{why}: of it, generations up to that number were left out")
            plan.generations[name] = kept

    def _join_line(self, name: str, generation: int) -> None:
        """Take the number of a table that came above the rows that were here, and set again what sessions flushed below it meanwhile."""
        layout, here = self._layout, self._here.get(name, 0)
        lineage = read_lineage(layout, name)
        if lineage is None or lineage.made in HAVE_SOURCES or generation <= here:
            return
        fence = LineEntry("fence", secrets.token_hex(16))
        publish(layout, layout.entry(name, generation), encode_entry(name, generation, fence), read_only=True)
        changes = Changes()
        for number in (number for number in list_line(layout, name).entries if here < number <= generation):
            entry = read_entry(layout, name, number)
            if entry.what == "whole":
                meanwhile = f"entry {number} of {name!r} was published in {layout.root} while generation {generation} came, which hides it"
                raise Incomplete(f"{meanwhile}: publish it again")
            add_changes(changes, entry.changes)
        if changes:
            with Store(layout.root, mode="a") as store:
                Session(store, name, made=lineage.made).publish(changes)

    def _of_data_set(self, plan: Moves) -> tuple[set[str], set[str]]:
        [(name, [generation])] = plan.generations.items()
        is_here = not plan.catalogs
        path = self._layout.catalog(name, generation)
        catalog = read_catalog(path, generation=generation) if is_here else self._fetch_catalog(name, generation)
        fetch_index(self._client, self._inventory, self._outline)
        draw_segments(self._outline, self._inventory.segments, remote_header(self._client))
        with closing(load_snapshot(self._outline)) as snapshot:
            needed = self._require_values(catalog, snapshot)
        return needed, set(catalog.recipes) & set(self._inventory.recipes)

    def _require_values(self, catalog: Catalog, snapshot: Snapshot) -> set[str]:
        return segments_of(catalog, snapshot, where=self._client.address, command="push it again from a store that has it")

    def _fetch_catalog(self, name: str, generation: int) -> Catalog:
        return fetch_catalog(self._client, self._inventory, name, generation, self._outline)

    def _check_here(self, path: Path) -> None:
        if digest_file(path) != path.stem:
            raise self._damaged_here(path)

    def _damaged_here(self, path: Path) -> FormatError:
        return FormatError(f"{path} is damaged: {self._layout.command('repair')} moves it aside, and then this command brings it again")

    def move(self, plan: Moves, mover: Mover) -> None:
        layout = self._layout = create_store(self._layout.root, mode=Mode.asked(self._request.access), say=self._remarks.append)
        mover.each("receiving segments", plan.segments, lambda file: self._receive_segment(mover, file))
        mover.each("receiving recipes", plan.recipes, lambda file: self._receive_recipe(mover, file))
        for name, generation, _file in plan.catalogs:
            if not self._outline.catalog(name, generation).exists():
                self._fetch_catalog(name, generation)
        mover.show("writing the index")
        with closing(commit(layout)) as snapshot:
            for name, generation, file in plan.catalogs:
                mover.show("receiving catalogs")
                copy = self._outline.catalog(name, generation)
                self._require_values(read_catalog(copy, generation=generation), snapshot)
                with open_foreign(copy) as opened:
                    pieces = iter(partial(opened.read, 1 << 20), b"")
                    if not publish_pieces(layout, layout.catalog(name, generation), pieces, digest=digest_file(copy)):
                        self._require_same(name, generation, file.size)
                mover.moved(file.size)
        for name, numbers in plan.generations.items():
            if numbers:
                self._join_line(name, numbers[-1])
        # A `gc` that read the catalogs before these were published may have removed segments since.
        with closing(load_snapshot(layout)) as snapshot:
            for name, generation, _file in plan.catalogs:
                self._require_values(read_catalog(layout.catalog(name, generation), generation=generation), snapshot)
        check_for_writing(layout)

    def _receive_segment(self, mover: Mover, file: FileRef) -> None:
        path = Path(file.key)
        with digesting(self._client, path) as digested:
            publish_pieces(self._layout, self._layout.root / path, pieces_of_remote(digested, file, mover), digest=path.stem)

    def _receive_recipe(self, mover: Mover, file: FileRef) -> None:
        path = Path(file.key)
        with digesting(self._client, path) as digested:
            raw = digested.get(file.key)
            recipe = Recipe.from_json(decode_record(RECIPE_FORMAT, RECIPE_VERSION, raw, where=path))
            if recipe.fingerprint != path.stem:
                raise FormatError(f"{path} holds the recipe {recipe.fingerprint}")
        publish(self._layout, self._layout.root / path, [raw])
        mover.moved(len(raw))
