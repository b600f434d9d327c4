"""`export`: writes a data set as the files that another trainer would have cached."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from itertools import chain
from pathlib import Path
from typing import Final

from cachestore.core.arguments import as_many, as_path, as_whole
from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed, naming_extras
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, as_array
from cachestore.core.words import in_short
from cachestore.files.marker import check_for_reading
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.reader import Reader
from cachestore.trainers.containers import write_npz, write_safetensors
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.export_target import Target
from cachestore.trainers.export_use import TrainerUse
from cachestore.trainers.export_values import ExportValues
from cachestore.trainers.exported import Listed, Named
from cachestore.trainers.families import family_named
from cachestore.trainers.format import Format
from cachestore.trainers.table import WEBDATASET, exported_format
from cachestore.trainers.trainer_settings import trainer_settings
from cachestore.trainers.webdataset.exporting import TarExport, refuse_given

_NAMED: Final = 1000
LEAVABLE: Final = ("flips", "masks")
"""What `leave_out` may name."""


@dataclass(frozen=True, slots=True, repr=False)
class ExportReport:
    """The result of an export, as `cachestore export --json` prints it."""

    format: str
    folder: str
    name: str
    generation: int
    samples: int
    written: int
    unchanged: int
    bytes: int
    """Size of the written files."""
    foreign: tuple[str, ...] = ()
    """Existing files with other bytes that no earlier export wrote; they were not changed."""
    failures: tuple[Mapping[str, str], ...] = ()
    """What could not be exported: sample, encoder and reason of each."""
    casts: tuple[str, ...] = ()
    """Which tensors are not written bit for bit as stored, and how they differ."""
    left_out: tuple[str, ...] = ()
    """What the format cannot hold, in words."""
    not_taken: tuple[str, ...] = ()
    """What was written, but the trainer will not find or cannot put into batches; in words, with counts."""
    remarks: tuple[str, ...] = ()
    """What else the user should know."""
    trainer_settings: tuple[str, ...] = ()
    """What must be set in the trainer's configuration so that it takes these files, as lines to copy."""

    @property
    def complete(self) -> bool:
        """Whether every value of every complete sample is in the folder, and the trainer will use it."""
        return not self.foreign and not self.failures and not self.not_taken

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the report as one JSON object."""
        listed = {name: list(getattr(self, name)) for name in ("foreign", "casts", "left_out", "not_taken", "remarks", "trainer_settings")}
        return {**asdict(self), "complete": self.complete, **listed, "failures": [dict(failure) for failure in self.failures]}


@naming_extras()
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

    Values are written bit for bit if the format has the same dtype and scaling state; the report's `casts` names all others. From stored
    moments, the sample of (seed 0, epoch 0, sample id) is written, or the mean if the trainer caches that. A second call writes only what
    is missing or different.

    Several resolutions, mirrored pictures and masks are written if the trainer can read them (docs/interop.md). Otherwise nothing is
    written, and the error names the argument that chooses. Each of several sources gets its own folder, named by its label.

    Args:
        store: the store's folder.
        name: the name of the data set.
        format: "sd-scripts", "simpletuner", "musubi", "ai-toolkit", "ltx" or "nemo-automodel"; or "webdataset", for tars with all that
            the data set has.
        folder: where to write; made if it does not exist. sd-scripts and ai-toolkit cache beside the pictures, so it may be DATA itself.
        generation: of the data set; the newest by default.
        family: such as "flux", if the data set does not say it. Latents alone may fit several families.
        resolution_only: export only this one of several resolutions.
        variant_only: export only this one of several random crops of each picture, counted from 0.
        leave_out: "flips", "masks" or both: do not write them, although the data set has them.
        replace: overwrite files that no earlier export wrote.

    Returns:
        What was written. Samples that are not complete in the store are not exported, and count as `failures`.

    Raises:
        StoreNotFound: there is no store there.
        BadInput: there is no such data set, or the format cannot hold it; nothing was written.
        WriteFailed: a file cannot be written; the same call goes on from there.
    """
    store, folder = as_path("store", store), as_path("folder", folder).absolute()
    resolution_only = None if resolution_only is None else as_whole("resolution_only", resolution_only, least=1)
    variant_only = None if variant_only is None else as_whole("variant_only", variant_only, least=0)
    leave_out = tuple(as_many("leave_out", leave_out, f"a list of {' and '.join(LEAVABLE)}"))
    if format == WEBDATASET:
        refuse_given({"family": family, "resolution_only": resolution_only, "variant_only": variant_only, "leave_out": leave_out})
        target = Target(folder, WEBDATASET, may_replace=replace)
        with Reader(store) as reader:
            tars = TarExport(reader, _catalog(reader, name, generation, format))
            tars.write(target)
            check_for_reading(reader.layout)
        return _report(target, tars.catalog, tars.failures)
    cache_format, writing = exported_format(format)
    if unknown := sorted(set(leave_out) - set(LEAVABLE)):
        raise BadInput(f"{unknown[0]!r} cannot be left out; {' and '.join(LEAVABLE)} can", option="leave_out")
    asked_family = None if family is None else family_named(family)
    with Reader(store) as reader:
        catalog = _catalog(reader, name, generation, format)
        command = shlex.join(["cachestore", "export", str(store), "--name", catalog.name, "--format", cache_format.name, "-o", str(folder)])
        layout = ExportLayout(catalog, cache_format, writing, asked_family, resolution_only, variant_only, leave_out, command)
        target, values, use = (
            Target(folder, cache_format.name, may_replace=replace),
            ExportValues(reader, layout),
            TrainerUse(layout, folder),
        )
        failures = _Export(layout, values, use, target).write()
        return changed(
            _report(target, catalog, failures),
            casts=tuple(values.casts),
            left_out=tuple(use.left_out()),
            not_taken=tuple(use.not_taken()),
            remarks=tuple(use.remarks()),
            trainer_settings=tuple(trainer_settings(use)),
        )


def _report(target: Target, catalog: Catalog, failures: Sequence[Mapping[str, str]]) -> ExportReport:
    return ExportReport(
        target.format,
        str(target.folder),
        catalog.name,
        catalog.generation,
        len(catalog),
        target.written,
        target.unchanged,
        target.size_bytes,
        tuple(target.foreign[:_NAMED]),
        tuple(failures),
    )


def _catalog(reader: Reader, name: str, generation: int | None, cache_format: str) -> Catalog:
    catalog = reader.dataset(name, generation).catalog
    if not catalog.has_sources:
        raise BadInput(
            f"the data set {name!r} has neither captions nor pictures, as a program published it: {cache_format} cannot hold it;"
            f" cs.open({str(reader.layout.root)!r}).dataset({name!r}) reads it",
            option="name",
        )
    return catalog


@dataclass(frozen=True, slots=True)
class _ExportedFile:
    """A file to write. Two with the same path are one file if they are made from the same."""

    encoder: str
    path: str
    made_from: tuple[object, ...]
    contents: Contents
    listed: Listed | None = None


@dataclass(frozen=True, slots=True)
class _Export:
    """Writes the files of a data set as another trainer's cache."""

    layout: ExportLayout
    values: ExportValues
    use: TrainerUse
    target: Target
    failures: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    listed: list[Listed] = field(default_factory=list[Listed])
    """The files of latents that have the right bytes."""

    def write(self) -> Sequence[Mapping[str, str]]:
        """Write all files, and the trainer's own lists of them. Return what failed. Raises BadInput before the first file, WriteFailed."""
        layout, target = self.layout, self.target
        layout.check()
        seen: dict[str, tuple[str, tuple[object, ...]]] = {}
        files = ((sample, file) for row, sample in enumerate(layout.catalog.ids) for file in self._files_of(row))
        for sample, file in chain(files, self._empty_caption()):
            first, made_from = seen.setdefault(file.path, (sample, file.made_from))
            if made_from != file.made_from:
                apart = f"{layout.format.name} tells the two apart only by this name, so rename one"
                self._fail(sample, file.encoder, EncodeFailed(f"{file.path} would also be the file of {first!r}: {apart}"))
            elif first == sample:
                try:
                    if target.put(file.path, _encoded(layout.format, file.contents)) and file.listed is not None:
                        self.listed.append(file.listed)
                except EncodeFailed as error:
                    self._fail(sample, file.encoder, error)
        if layout.writing.side_data is not None:
            for path, value in layout.writing.side_data(self.listed, layout.catalog.name, target.folder).items():
                target.put(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())
        check_for_reading(self.values.reader.layout)
        target.close()
        return self.failures

    def _fail(self, sample: str, encoder: str, error: Exception) -> None:
        self.failures.append({"sample": sample, "encoder": encoder, "reason": str(error)})

    def _files_of(self, row: int) -> Iterator[_ExportedFile]:
        """Yield the files of a row: of its text and of its picture or clips, or, if the trainer joins them, of each with the row's text."""
        if not self.layout.writing.is_joined:
            yield from self._texts(row)
            yield from self._latents(row)
            return
        failed, texts, visuals = len(self.failures), list(self._texts(row)), list(self._latents(row))
        if not (texts and visuals) and len(self.failures) == failed:
            lacking = "text" if visuals else "picture or video"
            self._fail(self.layout.catalog.ids[row], "", EncodeFailed(f"it has no {lacking}, but {self.layout.format.name} trains on both"))
        for text in texts[:1]:
            for file in visuals:
                both = Contents({**file.contents.tensors, **text.contents.tensors}, file.contents.values)
                yield changed(file, made_from=(*text.made_from, *file.made_from), contents=both)

    def _texts(self, row: int) -> Iterator[_ExportedFile]:
        """Yield the files of a row's first caption, or of all if a file is named by its caption."""
        layout, column = self.layout, self.layout.captions
        if column is None:
            return
        for index in range(column.at[row], column.at[row + 1])[: None if layout.writing.text_by == "caption" else 1]:
            try:
                key, stored, meta = self.values.entry(column, index)
                named = self.use.as_read(row, layout.named(row, column, index))
                path, contents = layout.writing.text(layout.family_of[column.encoder], named, self.values.text(column, stored, meta))
            except (CacheStoreError, OSError) as error:
                self._fail(layout.catalog.ids[row], column.encoder, error)
                continue
            for tree in layout.text_trees(row):
                yield _ExportedFile(column.encoder, layout.inside(tree, path), (key, named.caption), contents)

    def _empty_caption(self) -> Iterator[tuple[str, _ExportedFile]]:
        """Yield the text of the empty caption, if the trainer has a file for it, and the store has it but no sample does."""
        column, catalog = self.layout.captions, self.layout.catalog
        if column is None or not self.layout.writing.has_empty_caption or not len(catalog) or "" in catalog.captions:
            return
        key = caption_key(column.fingerprint, "")
        if key not in self.values.reader:
            return
        try:
            text = self.values.text(column, *self.values.stored(key))
        except (CacheStoreError, OSError) as error:
            self._fail("", column.encoder, error)
            return
        path, contents = self.layout.writing.text(self.layout.family_of[column.encoder], Named(""), text)
        yield "", _ExportedFile(column.encoder, path, (key,), contents)

    def _latents(self, row: int) -> Iterator[_ExportedFile]:
        """Yield the files of a row's picture or video, one for each variant or one for all."""
        layout = self.layout
        cells = [(column, index) for column in layout.visuals for index in layout.indices(row, column)]
        is_one_file = layout.writing.resolutions == "one file"
        for several in [cells] if is_one_file and cells else [[cell] for cell in cells]:
            column = several[0][0]
            family = layout.family_of[column.encoder]
            try:
                variants, keys = zip(*(self.values.variant(row, *cell) for cell in several), strict=True)
                path, contents = layout.writing.latents(family, variants)
            except (CacheStoreError, OSError) as error:
                self._fail(layout.catalog.ids[row], column.encoder, error)
                continue
            for variant, (of_column, _index) in zip(variants, several, strict=True):
                self.use.count(row, of_column, variant)
            source, named = layout.source(row), variants[0].named
            tree = layout.tree_of(source, column)
            path = layout.inside(tree, path)
            listed = Listed(path, tree, str(layout.root_of(source) / named.reference), named, family)
            yield _ExportedFile(column.encoder, path, keys, contents, listed)


def _encoded(cache_format: Format, contents: Contents) -> bytes:
    match cache_format.container:
        case "npz":
            return write_npz({name: as_array(raw) for name, raw in contents.tensors.items()})
        case "safetensors":
            return write_safetensors(contents.tensors, {name: str(value) for name, value in contents.values.items()})
        case "torch":
            from cachestore.trainers.torch_files import write_torch

            return write_torch(contents.tensors, contents.values)
