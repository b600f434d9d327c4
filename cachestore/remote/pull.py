"""Pull: copy a store, or one generation of a data set, from an object store into a folder.

It reads catalogs first, then what they name, and publishes in the order of a job: segments, recipes, index, catalogs. So a catalog is
visible only when all that it names is. A killed pull leaves files that the same command finds; parts of files lie in `tmp/`.
"""

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from cachestore.core.arguments import as_path
from cachestore.core.errors import FormatError
from cachestore.core.keys import Recipe
from cachestore.files.checksum import digest_file
from cachestore.files.marker import check_for_writing
from cachestore.files.opening import names_in, open_foreign, status_of
from cachestore.files.paths import MARKER, Access, Layout, Mode
from cachestore.files.publish import publish, publish_pieces
from cachestore.files.records import decode_record
from cachestore.objects.address import parse_address
from cachestore.objects.client import Client
from cachestore.remote.call import call_helper
from cachestore.remote.transfer import (
    JOBS,
    FileRef,
    Mover,
    Shown,
    TransferReport,
    TransferRequest,
    choose,
    other_catalog,
    pieces_of_remote,
    report_of,
    requests_down,
    segments_of,
    working_folder,
)
from cachestore.storage.catalog import Catalog, read_catalog
from cachestore.storage.commit import RECIPE_FORMAT, RECIPE_VERSION, commit, create_store
from cachestore.storage.snapshot import Snapshot, load_snapshot, open_layout
from cachestore.store.outline import (
    KEYS,
    ask_again,
    catalog_digest,
    digesting,
    draw_segments,
    fetch_catalog,
    fetch_index,
    key_of,
    remote_header,
    remote_start,
    require_store,
    take_inventory,
)


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
        BadInput: there is no such data set, the folder has another generation of this number, or it is no store and not empty.
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
    began = time.monotonic()

    def look() -> TransferReport:
        require_store(client)
        with working_folder() as scratch:
            return _Pull(client, root, request, scratch).run(began)

    return ask_again(look)


@dataclass(slots=True)
class _ToReceive:
    """What is to be received, in the order of writes."""

    generations: dict[str, list[int]]
    segments: list[FileRef] = field(default_factory=list[FileRef])
    recipes: list[FileRef] = field(default_factory=list[FileRef])
    catalogs: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    skipped: int = 0


class _Pull:
    def __init__(self, client: Client, root: Path, request: TransferRequest, scratch: Path) -> None:
        self._client = client
        self._request = request
        self._layout = Layout(root.absolute())
        if MARKER in names_in(root, is_root=True):
            self._layout = open_layout(self._layout)
        self._remarks: list[str] = []
        self._outline = Layout(scratch / "outline")
        self._inventory = take_inventory(client)

    def run(self, began: float) -> TransferReport:
        plan = self._plan()
        catalogs = [FileRef(key_of(KEYS.catalog(*one)), self._inventory.catalogs[one[0]][one[1]]) for one in plan.catalogs]
        files = [*plan.segments, *plan.recipes, *catalogs]
        if not self._request.dry_run:
            mover = Mover(self._request.jobs, sum(file.size for file in files), self._request.on_progress)
            self._receive(plan, mover)
        report = report_of(
            self._request,
            files,
            requests_down,
            store=self._layout.root,
            address=self._client.address,
            generations=plan.generations,
            skipped=plan.skipped,
            began=began,
        )
        return replace(report, remarks=tuple(self._remarks))

    def _plan(self) -> _ToReceive:
        there = self._inventory
        plan = _ToReceive(choose(there.catalogs, self._request.name, self._request.generation, where=self._client.address))
        for name, some in plan.generations.items():
            listed = names_in(self._layout.catalog_folder(name))
            for generation in some:
                if self._layout.catalog(name, generation).name in listed:
                    self._require_same(name, generation)
                    plan.skipped += 1
                else:
                    plan.catalogs.append((name, generation))
        digests, fingerprints = (set(there.segments), set(there.recipes)) if self._request.name is None else self._of_data_set(plan)
        self._plan_files(plan, sorted(digests), sorted(fingerprints))
        return plan

    def _require_same(self, name: str, generation: int) -> None:
        """Raise BadInput if the folder has other rows under this generation."""
        there = remote_start(self._client, name, generation, self._inventory.catalogs[name][generation])
        if catalog_digest(self._layout.catalog(name, generation)) != there.digest:
            raise other_catalog(name, generation, there=self._layout.root, here=self._client.address)

    def _of_data_set(self, plan: _ToReceive) -> tuple[set[str], set[str]]:
        """Return the segments and recipes that the chosen generation needs, by the index at the address and the headers it lacks."""
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

    def _plan_files(self, plan: _ToReceive, digests: Iterable[str], fingerprints: Iterable[str]) -> None:
        present: list[Path] = []
        for digest in digests:
            file = FileRef(key_of(KEYS.segment(digest)), self._inventory.segments[digest])
            status = status_of(self._layout.segment(digest))
            if status is None:
                plan.segments.append(file)
                continue
            if status.st_size != file.size:
                raise self._damaged_here(self._layout.segment(digest))
            present.append(self._layout.segment(digest))
        if self._request.check:
            mover = Mover(self._request.jobs, 0, self._request.on_progress)
            mover.each("checking what is there", present, self._check_here)
        listed = names_in(self._layout.recipes)
        for fingerprint in fingerprints:
            if self._layout.recipe(fingerprint).name in listed:
                plan.skipped += 1
            else:
                plan.recipes.append(FileRef(key_of(KEYS.recipe(fingerprint)), self._inventory.recipes[fingerprint]))
        plan.skipped += len(present)

    def _check_here(self, path: Path) -> None:
        if digest_file(path) != path.stem:
            raise self._damaged_here(path)

    def _damaged_here(self, path: Path) -> FormatError:
        return FormatError(f"{path} is damaged: {self._layout.command('repair')} moves it aside, and then this command brings it again")

    def _receive(self, plan: _ToReceive, mover: Mover) -> None:
        layout = self._layout = create_store(self._layout.root, mode=Mode.asked(self._request.access), say=self._remarks.append)
        mover.each("receiving segments", plan.segments, lambda file: self._receive_segment(mover, file))
        mover.each("receiving recipes", plan.recipes, lambda file: self._receive_recipe(mover, file))
        for name, generation in plan.catalogs:
            if not self._outline.catalog(name, generation).exists():
                self._fetch_catalog(name, generation)
        mover.show("writing the index")
        with closing(commit(layout)) as snapshot:
            for name, generation in plan.catalogs:
                mover.show("receiving catalogs")
                self._publish_catalog(name, generation, snapshot)
                mover.moved(self._inventory.catalogs[name][generation])
        # A `gc` that read the catalogs before these were published may have removed segments since.
        with closing(load_snapshot(layout)) as snapshot:
            for name, generation in plan.catalogs:
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

    def _publish_catalog(self, name: str, generation: int, snapshot: Snapshot) -> None:
        """Publish a catalog that was fetched, if all it names is here."""
        copy, final = self._outline.catalog(name, generation), self._layout.catalog(name, generation)
        self._require_values(read_catalog(copy, generation=generation), snapshot)
        with open_foreign(copy) as file:
            pieces = iter(lambda: file.read(1 << 20), b"")
            if not publish_pieces(self._layout, final, pieces, digest=digest_file(copy)):
                self._require_same(name, generation)
