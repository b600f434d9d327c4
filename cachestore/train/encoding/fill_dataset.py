"""`fill_dataset`: encodes the samples of a data set with a function of your own, and publishes a data set beside it, with their ids.

A sample has one key, which is of its whole pictures; or, where the encoder gets pixels, one for each cell of its latents, in their order.
"""

import json
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from cachestore.core.arguments import as_switch, as_text, as_whole, check_function, refuse
from cachestore.core.errors import BadInput, EncodeFailed, naming_extras
from cachestore.core.inputs import (
    NO_STAT,
    cells_each,
    combined_digest,
    combined_stat,
    digests_of,
    options_for,
    references_of,
    request_for,
)
from cachestore.core.keys import KEY_BYTES, Json, Key, by_key, canonical, digest_opened, digest_parts
from cachestore.core.samples import images_of
from cachestore.core.system import quoted
from cachestore.core.words import plural
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.planning import files_of_request
from cachestore.jobs.plan.recorded_paths import is_there, source_paths
from cachestore.jobs.run.task import Cancel, OnProgress, UnitReader
from cachestore.jobs.share.report import Report
from cachestore.jobs.start.fill import Publishing, fill_values
from cachestore.sources.combined import files_of
from cachestore.sources.files import Folder, Routed, SourceFiles
from cachestore.store.format.catalog import HAVE_SOURCES, IMPORTED, Catalog, Cell, KeyColumn
from cachestore.store.read.rows import read_data_set
from cachestore.store.write.writer import Store
from cachestore.train.made_of import (
    MADE_OF,
    SEEN_BYTES,
    SHOWN_FACTS,
    Shows,
    as_bytes,
    pixels_of,
    seen_by_cell,
    seen_by_row,
    with_rows,
)
from cachestore.train.returned_columns import LATENTS, chosen_resolution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cachestore.encode.families.resamplers import Resample

_THREADS: Final = 8
_log = logging.getLogger("cachestore")


@dataclass(frozen=True, slots=True)
class FillSample:
    """A sample as the function that `fill_dataset` calls gets it."""

    id: str
    captions: tuple[str, ...]
    images: Mapping[str, tuple[str, ...]]
    """By role, such as `image`, `video` or `control`, the references of its files as the source lists them."""
    paths: Mapping[str, tuple[str, ...]]
    """By role, the paths of the same files. Without those in tars and in memory: `read` reads them."""
    columns: Mapping[str, Json]
    """The extra columns of its source."""
    pixels: "np.ndarray[Any, np.dtype[np.uint8]] | None" = None
    """uint8 [height, width, 3], of a video [frames, height, width, 3]: what a cell of its latents was made of: a crop, a mirrored one,
    a clip. None if not asked for."""
    _files: SourceFiles | None = field(default=None, repr=False, compare=False)

    def read(self, role: str = "image") -> bytes:
        """Return the bytes of its first file of a role. Raises BadInput if it has none, OSError if it cannot be read."""
        if self._files is None or not self.images.get(role):
            there = ", ".join(self.images) if self._files is not None else "none that can be read"
            raise BadInput(f"the sample {self.id!r} has no file of the role {role!r}; it has {there or 'none'}", option="role")
        return self._files.read(self.images[role][0])[0]


Encode = Callable[[list[tuple[Key, FillSample]]], Mapping[Any, Mapping[str, Any]]]


@naming_extras()
def fill_dataset(
    store: Store,
    name: str,
    encode: Encode,
    *,
    like: str = "train",
    generation: int | None = None,
    resolution: int | None = None,
    pixels: bool = False,
    captions: bool = True,
    fingerprint: str = "",
    batch_size: int | Literal["auto"] = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    strict: bool = False,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
) -> Report:
    """Encode the samples of a data set with your own function, on any number of ranks, and publish what it makes under another name.

        def encode(batch):
            features = dino(torch.stack([to_input(sample.pixels) for _key, sample in batch]))
            return {key: {"features": row} for (key, _sample), row in zip(batch, features)}

        report = cs.fill_dataset(store, "train/dino", encode, like="train", pixels=True, fingerprint=cs.fingerprint(files=["dino/"]))

    `CachedDataset(join={"dino": "train/dino"})` then has it as `dino`: the name `features` counts only beside other tensors of a value.
    What fails is logged, and is in `report.failures`; if nothing can be encoded, the data set stays as it was.

    Called again, it encodes what is new or changed: a sample with other captions, files, pixels or another id, or all for another
    `fingerprint`. Samples that left the other data set leave this one. A sample has one value, of its whole pictures; with `pixels` one for
    each cell of its latents (crops, mirrored ones, clips), in their order. Cells that are alike are encoded once.

    Args:
        store: a store opened with `mode="a"`.
        name: the data set to publish, such as "train/dino".
        encode: called in this process and thread with a list of (key, FillSample). Returns `{key: {name: tensor}}` for exactly these keys.
            Errors as for `fill`. With `pixels` all samples of a call have pixels of one shape.
        like: the data set whose samples these are; `precompute` or an import has made it.
        generation: the generation of it; by default the newest. Several ranks must see the same.
        resolution: of the latents, if there are several.
        pixels: whether the function gets the pixels that latents were made of, cropped and scaled as these.
        captions: whether the function gets captions. Without, an edited caption encodes nothing again.
        fingerprint: what else decides the values, as a text: the encoder, its settings, its version; `cs.fingerprint` makes one.
        batch_size: the most samples in one call. "auto" is 16.
        rank: as for `fill`.
        world_size: as for `fill`.
        strict: as for `fill`.
        max_failures: as for `fill`.
        on_progress: as for `fill`.
        cancel: as for `fill`.

    Returns:
        The report of the pass, the same on every rank; `failures` names samples. `generation` is that of the new data set.

    Raises:
        BadInput: no such data set, or one without sources; pixels are asked for and there are no latents, or imported ones; or as `fill`.
        EncodeFailed, Incomplete, WriteFailed: as `fill`.
    """
    if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        refuse("store", 'what cs.open(path, mode="a") returned', store)
    check_function("encode", encode)
    number = None if generation is None else as_whole("generation", generation, least=1)
    catalog = read_data_set(store.layout, as_text("like", like), number)
    if catalog.made not in HAVE_SOURCES:
        has_none = f"the data set {like!r} in {store.layout.root} has no captions and files"
        raise BadInput(f"{has_none}: choose one that precompute made", option="like")
    chosen = None if resolution is None else as_whole("resolution", resolution, least=1)
    shows = Shows(pixels=as_switch("pixels", pixels), captions=as_switch("captions", captions))
    own = as_text("name", name), as_text("fingerprint", fingerprint), canonical(shows.as_json())
    seed = digest_parts("cachestore-fill-dataset", *own)
    samples = _Samples.of(store, catalog, chosen, seed, shows)
    wanted = [(samples.key(item), item) for item in samples.items()]
    if lacking := len(catalog) - len({item.id for _key, item in wanted}):
        left_out = f"{plural(lacking, 'sample')} of {len(catalog)} in {like!r} were not encoded there"
        _log.warning("%s: left out of %r", left_out, name)
    return fill_values(
        store,
        wanted,
        lambda batch: by_key(encode(samples.shown(batch))),
        batch_size=batch_size,
        group_by=_shape_of,
        rank=rank,
        world_size=world_size,
        strict=strict,
        max_failures=max_failures,
        on_progress=on_progress,
        cancel=cancel,
        publishing=Publishing(name, {MADE_OF: shows.as_json()}),
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """A value to make: of a row, or of one of its cells."""

    id: str
    row: int
    column: KeyColumn | None = None
    index: int = 0
    """The index of the cell in its column."""
    number: int = 0
    """That of the column among those that are trained on."""


def _shape_of(item: _Item) -> Hashable:
    return None if item.column is None else item.column.cell(item.index).facts.get("bucket")


@dataclass(slots=True)
class _Samples:
    """The samples of a data set, and where their files are."""

    catalog: Catalog
    files: SourceFiles | None
    seed: bytes
    shows: Shows
    latents: list[KeyColumn]
    trained: list[KeyColumn]
    """The columns of the latents that are trained on: of pictures, and of videos."""
    ends: "list[NDArray[np.uint8]]"
    """The ends of the keys: of each column that is trained on by cell; without pixels one array by row."""
    _digests: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, store: Store, catalog: Catalog, resolution: int | None, seed: bytes, shows: Shows) -> "_Samples":
        """Find the latents and files of a data set. Raises BadInput."""
        try:
            size = chosen_resolution(catalog, resolution) if shows.pixels or resolution is not None else None
        except BadInput as error:
            sizes = dict.fromkeys(str(column.options.get("resolution")) for column in pixels_of(catalog, None))
            which = f"it was encoded at {' and '.join(sizes)}: choose one, and a name for each" if resolution is None else str(error)
            raise BadInput(f"the data set {catalog.name!r} in {store.layout.root}: {which}", option=error.option) from error
        latents, trained = [column for column in catalog.columns if column.encoder == LATENTS], pixels_of(catalog, size)
        if shows.pixels and not trained:
            raise BadInput(f"the data set {catalog.name!r} has no latents, so their pixels are not known", option="pixels")
        hints = cast("Mapping[str, Any]", catalog.request.get(LATENTS) or [*catalog.request.values(), {}][0])
        if shows.pixels and any(IMPORTED in catalog.request.get(column.encoder, {}) for column in trained):
            raise BadInput(f"the latents of {catalog.name!r} were imported: their pixels are not known exactly", option="pixels")
        files = _files_of(hints, str(store.layout.root)) if catalog.images else None
        gone = [path for path in source_paths(catalog.request) if not is_there(path)]
        if catalog.images and gone and catalog.made != "imported":
            moves = store.layout.command(f"relocate --source {quoted(gone[0])}=NEW")
            raise BadInput(
                f"the source {gone[0]} of the data set {catalog.name!r} is gone; if it has moved, run {moves} first", option="like"
            )
        if shows.pixels and files is None:
            raise BadInput(f"the pictures of {catalog.name!r} were in memory: they cannot be read again", option="pixels")
        by_row = seen_by_row(catalog, captions=shows.captions)
        seen = [with_rows(by_row, seen_by_cell(catalog, column), column.at) for column in trained] if shows.pixels else [by_row]
        return cls(catalog, files, seed, shows, latents, trained, [*map(as_bytes, seen)])

    def items(self) -> Iterator[_Item]:
        """Yield what is to be made, in the order of rows. Rows that an encoder failed on are left out."""
        for row, sample in enumerate(self.catalog.ids):
            if not self.catalog.is_complete(row):
                continue
            if not self.shows.pixels:
                yield _Item(sample, row)
                continue
            for number, column in enumerate(self.trained):
                yield from (_Item(sample, row, column, index, number) for index in range(column.at[row], column.at[row + 1]))

    def key(self, item: _Item) -> Key:
        """Return the key of a value: it follows from all that its encoder sees. Its end follows from what a join compares."""
        texts = self.catalog.row_captions(item.row) if self.shows.captions else []
        parts: list[Json] = [item.id, [*texts], json.loads(self.catalog.extras[item.row])]
        if item.column is not None:
            cell = item.column.cell(item.index)
            make = self.catalog.recipes[item.column.fingerprint].make
            facts: dict[str, Json] = {name: list(cell.facts[name]) for name in SHOWN_FACTS if name in cell.facts}
            parts += [cell.input.hex(), facts, make.get("transform")]
        for role, listed in self._images(item.row).items():
            parts.append([role, [self._digest(item.row, role, number, reference) for number, reference in enumerate(listed)]])
        end = self.ends[item.number][item.row if item.column is None else item.index]
        return Key(digest_parts("cachestore-fill-sample", self.seed, canonical(parts))[: KEY_BYTES - SEEN_BYTES] + end.tobytes())

    def shown(self, batch: list[tuple[Key, _Item]]) -> list[tuple[Key, FillSample]]:
        """Return the samples of a batch. Raises EncodeFailed for a file that changed, OSError for one that is gone."""
        if not self.shows.pixels or len(batch) == 1:
            return [(key, self._sample(item)) for key, item in batch]
        with ThreadPoolExecutor(min(_THREADS, len(batch), os.cpu_count() or 1)) as threads:
            return list(zip([key for key, _item in batch], threads.map(self._sample, [item for _key, item in batch]), strict=True))

    def _sample(self, item: _Item) -> FillSample:
        images, pixels = self._images(item.row), None
        if item.column is not None:
            pixels = self._pixels(item.column, item)
        elif self.files is not None and IMPORTED not in self.catalog.request.get(LATENTS, {}):
            for column in self.trained:
                self._check(column, item)
        paths = {role: tuple(filter(None, (_path_of(self.files, one) for one in listed))) for role, listed in images.items()}
        captions = tuple(self.catalog.row_captions(item.row)) if self.shows.captions else ()
        extras: Mapping[str, Json] = json.loads(self.catalog.extras[item.row])
        return FillSample(item.id, captions, images, paths, extras, pixels, self.files)

    def _images(self, row: int) -> dict[str, tuple[str, ...]]:
        images = {role: tuple(references[at[row] : at[row + 1]]) for role, (at, references) in self.catalog.images.items()}
        return {role: listed for role, listed in images.items() if listed}

    def _request(self, column: KeyColumn, item: _Item, index: int) -> dict[str, Json]:
        """Return the request that made a cell, as in its plan."""
        number, variant = divmod(index - column.at[item.row], cells_each(column.options))
        images = self._images(item.row)
        options = options_for(column.options, json.loads(self.catalog.extras[item.row]))
        return request_for(column.role, options, images_of(images, column.role)[number], images, variant)

    def _pixels(self, column: KeyColumn, item: _Item) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        from cachestore.encode.pictures.shots import read_input

        assert self.files is not None
        cell = column.cell(item.index)
        examined = read_input(self._request(column, item, item.index), UnitReader(self.files), _resample_of(self.catalog, column))
        _check_input(self.catalog, cell, combined_digest(examined.inputs))
        return examined.shot.pixels()

    def _check(self, column: KeyColumn, item: _Item) -> None:
        """Raise EncodeFailed if a file of a row is another one than the catalog knows, and OSError if it is gone."""
        assert self.files is not None
        for index in range(column.at[item.row], column.at[item.row + 1], cells_each(column.options)):
            request, cell = self._request(column, item, index), column.cell(index)
            stats = [stat for stat in map(self.files.stat, references_of(request)) if stat is not None]
            if cell.stat != NO_STAT and len(stats) == len(references_of(request)) and combined_stat(stats) == cell.stat:
                continue
            digests = digests_of(request, [self._read_digest(reference) for reference in references_of(request)])
            _check_input(self.catalog, cell, combined_digest(digests))

    def _digest(self, row: int, role: str, number: int, reference: str) -> str:
        """Return the digest of a file as the catalog knows it; of a file that no latents are made of, as it is now."""
        for column in self.latents:
            index = column.at[row] + number * cells_each(column.options)
            if column.role == role and index < column.at[row + 1]:
                return column.cell(index).input.hex()
        try:
            return "" if self.files is None else self._read_digest(reference)
        except OSError:
            return ""  # encoding it fails, and says why

    def _read_digest(self, reference: str) -> str:
        assert self.files is not None
        if reference not in self._digests:
            with self.files.open(reference) as (file, _stat):
                self._digests[reference] = digest_opened(file)
        return self._digests[reference]


def _check_input(catalog: Catalog, cell: Cell, digest: str) -> None:
    if cell.input.hex() != digest:
        changed = f"its file changed since the data set {catalog.name!r} was made"
        raise EncodeFailed(f"{changed}: run the same `cachestore precompute` again first")


def _resample_of(catalog: Catalog, column: KeyColumn) -> "Resample":
    """Return how the pictures of a column were resized."""
    from cachestore.encode.families.resamplers import DEFAULT, RESAMPLERS

    transform = cast("Mapping[str, Json]", catalog.recipes[column.fingerprint].make.get("transform") or {})
    for name, row in RESAMPLERS.items():
        if row.pictures == transform.get("pixels"):
            return name
    return DEFAULT


def _files_of(hints: Mapping[str, Any], store: str) -> SourceFiles | None:
    """Return the files of a data set's source; None if they were in memory."""
    try:
        return files_of_request(PrecomputeRequest.from_hints(hints, store=store))
    except BadInput:
        data = hints.get("data")
        return files_of(data) if isinstance(data, str) and os.path.isabs(data) else None  # noqa: PTH117 - a text, not a path


def _path_of(files: SourceFiles | None, reference: str) -> str:
    """Return the path of a file; empty if it is in a tar or in memory."""
    while isinstance(files, Routed):
        files, reference = files.route(reference)
    return str(files.root / reference) if isinstance(files, Folder) else ""
