"""`export`: a data set as the files that another trainer would have cached. Knows a store to read, and a folder to write."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachestore.core.arguments import as_many, as_path, as_whole
from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed
from cachestore.core.raw_tensors import Contents, as_array
from cachestore.files.marker import check_for_reading
from cachestore.interop.export_layout import Choice, ExportLayout
from cachestore.interop.export_report import NAMED, ExportReport, Tally
from cachestore.interop.export_taken import Taken
from cachestore.interop.export_target import Target
from cachestore.interop.export_values import ExportValues
from cachestore.interop.formats import simpletuner
from cachestore.interop.formats.containers import write_npz, write_safetensors
from cachestore.interop.formats.families import SIMPLETUNER, family_named
from cachestore.interop.formats.table import Format, written_format
from cachestore.storage.catalog import Catalog, list_generations, list_names, read_catalog
from cachestore.store.reader import Reader

if TYPE_CHECKING:
    from cachestore.interop.formats.matching import Named

LEAVABLE: Final = ("flips", "masks")
"""What of a data set may be left out, where a format has no place for it."""


def export_cache(
    store: str | Path,
    name: str = "train",
    *,
    format: str,  # noqa: A002 - the word of the command
    folder: str | Path,
    generation: int | None = None,
    family: str | None = None,
    resolution_only: int | None = None,
    variant_only: int | None = None,
    leave_out: Collection[str] = (),
    replace: bool = False,
) -> ExportReport:
    """Write a data set as another trainer caches it, so that the trainer finds everything cached.

    What is stored is written bit for bit where the format keeps its dtype and scaling state; `casts` of the report names all else. Of
    stored moments the sample of (seed 0, epoch 0, sample id) is written, or the mean where the trainer caches that. Run again, only what is
    missing or different is written.

    Several resolutions, mirrored pictures and masks are written as far as the trainer can read them (docs/interop.md); where it cannot,
    nothing is written, and the error names the argument that chooses. Of several sources each has a tree of its own, named as it is called.

    Args:
        store: the store's folder.
        name: of the data set.
        format: "sd-scripts", "simpletuner", "musubi" or "ai-toolkit".
        folder: where to; made if it does not exist. Of sd-scripts and ai-toolkit, which cache beside the pictures, it may be DATA itself.
        generation: of the data set; the newest by default.
        family: such as "flux", where the data set does not tell it: one of latents alone may be of several.
        resolution_only: of several resolutions this one alone.
        variant_only: of several random crops of each picture this one, from 0 on.
        leave_out: "flips", "masks" or both: not to be written, although the data set has them.
        replace: overwrite files that are not an earlier export's.

    Returns:
        What was written; samples that are not complete in the store are not exported, and count as `failures`.

    Raises:
        StoreNotFound: there is no store there.
        BadInput: no such data set, or one that the format has no form for; nothing was written.
        WriteFailed: the disk refuses; the same call goes on from there.
    """
    store, folder = as_path("store", store), as_path("folder", folder).absolute()
    generation = None if generation is None else as_whole("generation", generation, least=0)
    resolution_only = None if resolution_only is None else as_whole("resolution_only", resolution_only, least=1)
    variant_only = None if variant_only is None else as_whole("variant_only", variant_only, least=0)
    leave_out = tuple(as_many("leave_out", leave_out, f"a list of {' and '.join(LEAVABLE)}"))
    wanted, writing = written_format(format)
    if unknown := sorted(set(leave_out) - set(LEAVABLE)):
        raise BadInput(f"{unknown[0]!r} cannot be left out; {' and '.join(LEAVABLE)} can")
    choice = Choice(resolution_only, variant_only, frozenset(leave_out))
    with Reader(store) as reader:
        catalog = _catalog(reader, name, generation)
        layout, tally = ExportLayout(catalog, wanted, writing, None if family is None else family_named(family), choice), Tally()
        export = _Export(layout, ExportValues(reader, layout, tally), Taken(layout, tally, folder), tally)
        _write(export, Target(folder, tally, may_replace=replace))
        left_out, not_taken, remarks = export.taken.left_out(), export.taken.not_taken(), export.taken.remarks()
    return ExportReport(
        wanted.name,
        str(folder),
        catalog.name,
        catalog.generation,
        len(catalog),
        tally.written,
        tally.unchanged,
        tally.size_bytes,
        tuple(tally.foreign[:NAMED]),
        tuple(tally.failures),
        tuple(tally.casts),
        tuple(left_out),
        tuple(not_taken),
        tuple(remarks),
    )


def _write(export: "_Export", target: Target) -> None:
    """Write every file, then what a trainer needs beside them, then the note of what is ours."""
    layout, tally = export.layout, export.tally
    for row, encoder, path, contents in export.files():
        try:
            if target.put(path, _encoded(layout.format, contents)):
                tally.there[path] = row
        except EncodeFailed as error:
            tally.fail(layout.catalog.ids[row], encoder, error)
    if (empty := export.values.empty_caption()) is not None:
        target.put(empty[0], _encoded(layout.format, empty[1]))
    for path, value in export.side_data().items():
        target.put(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())
    check_for_reading(export.values.reader.layout)
    target.close()


def _catalog(reader: Reader, name: str, generation: int | None) -> Catalog:
    generations = list_generations(reader.layout, name)
    if not generations or (generation is not None and generation not in generations):
        names = ", ".join(map(repr, list_names(reader.layout))) or "none"
        what = f"data set {name!r}" if not generations else f"generation {generation} of {name!r}"
        raise BadInput(f"{reader.layout.root} has no {what}; it has {names} (`cachestore stats` lists them)")
    chosen = generations[-1] if generation is None else generation
    return read_catalog(reader.layout.catalog(name, chosen), generation=chosen)


def _encoded(wanted: Format, contents: Contents) -> bytes:
    """The bytes of a file. Raises EncodeFailed for what its container cannot hold."""
    match wanted.container:
        case "npz":
            return write_npz({name: as_array(raw) for name, raw in contents.tensors.items()})
        case "safetensors":
            return write_safetensors(contents.tensors, {name: str(value) for name, value in contents.values.items()})
        case "torch":
            from cachestore.interop.formats.torch_files import write_torch

            return write_torch(contents.tensors)


@dataclass(frozen=True, slots=True)
class _Made:
    """A file that is to be, and what it is of: two of one name are one where that is the same."""

    encoder: str
    path: str
    of: tuple[object, ...]
    contents: Contents


@dataclass(frozen=True)
class _Export:
    """The files of a data set as another trainer's cache."""

    layout: ExportLayout
    values: ExportValues
    taken: Taken
    tally: Tally

    def files(self) -> Iterator[tuple[int, str, str, Contents]]:
        """(row, encoder, path, contents) of every file. Two that would have one name are failures, both named. Raises BadInput."""
        self.layout.check()
        seen: dict[str, tuple[str, tuple[object, ...]]] = {}
        for row, sample in enumerate(self.layout.catalog.ids):
            for made in chain(self._texts(row), self._latents_files(row)):
                first, before = seen.setdefault(made.path, (sample, made.of))
                if before != made.of:
                    trainer = self.layout.format.name
                    error = EncodeFailed(f"{made.path} would be of {first!r} too: {trainer} tells them apart by nothing else")
                    self.tally.fail(sample, made.encoder, error)
                elif first == sample:
                    yield row, made.encoder, made.path, made.contents

    def _texts(self, row: int) -> Iterator[_Made]:
        """The files of a row's captions: of its first one, or of all where a file is named by its caption. Failures are tallied."""
        column = self.layout.captions
        if column is None:
            return
        for place in range(column.at[row], column.at[row + 1])[: None if self.layout.writing.is_text_shared else 1]:
            try:
                key, stored, meta = self.values.entry(column, place)
                named = self.taken.as_read(row, self.layout.named(row, column, place))
                text = self.values.text(column, stored, meta)
                path, contents = self.layout.writing.text(self.layout.family_of[column.encoder], named, text)
            except (CacheStoreError, OSError) as error:
                self.tally.fail(self.layout.catalog.ids[row], column.encoder, error)
                continue
            for tree in self.layout.text_trees(row):
                yield _Made(column.encoder, f"{tree}{path}", (key, named.caption), contents)

    def _latents_files(self, row: int) -> Iterator[_Made]:
        """The files of a row's picture, by view or for all of them at once. Failures are tallied."""
        is_one_file = self.layout.writing.resolutions == "one file"
        cells = [(column, place) for column in self.layout.pictures for place in self.layout.places(row, column)]
        for several in [cells] if is_one_file and cells else [[cell] for cell in cells]:
            column = several[0][0]
            try:
                views, keys = zip(*(self.values.view(row, *cell) for cell in several), strict=True)
                path, contents = self.layout.writing.latents(self.layout.family_of[column.encoder], views)
            except (CacheStoreError, OSError) as error:
                self.tally.fail(self.layout.catalog.ids[row], column.encoder, error)
                continue
            for view, cell in zip(views, several, strict=True):
                self.taken.weigh(row, cell[0], view)
            yield _Made(column.encoder, f"{self.layout.tree(row, column)}{path}", keys, contents)

    def side_data(self) -> dict[str, object]:
        """Further files that a trainer needs, by their paths: SimpleTuner's of sizes and crops, for each of its data sets.

        They tell of the samples whose latents stand in the folder: of a file that another sample has they would tell the wrong crop.
        """
        if self.layout.format.name != SIMPLETUNER:
            return {}
        rows: dict[str, list[tuple[str, Named]]] = {}
        for row in range(len(self.layout.catalog)):
            for column in self.layout.pictures:
                for place in self.layout.places(row, column):
                    named, tree = self.layout.named(row, column, place), self.layout.tree(row, column)
                    if self.tally.there.get(f"{tree}{simpletuner.latents_path(named.reference)}") == row:
                        rows.setdefault(tree, []).append((str(self.layout.root(row) / named.reference), named))
        return {
            f"{tree}{path}": value
            for tree, those in rows.items()
            for path, value in simpletuner.side_data(those, "-".join([self.layout.catalog.name, *tree.split("/")[:-1]])).items()
        }
