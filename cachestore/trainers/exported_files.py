"""`cs.exported`: the files that `export` would write, read from the store one at a time. Writes nothing and takes no lock."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachestore.core.arguments import as_many, as_path, as_text, as_whole
from cachestore.core.errors import BadInput, EncodeFailed, MissingEntry
from cachestore.core.inputs import BUCKETS
from cachestore.core.raw_tensors import Contents, Raw
from cachestore.core.spelling import option
from cachestore.core.tensors import to_numpy, to_torch
from cachestore.core.words import did_you_mean, plural
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.opener import open_reader
from cachestore.store.read.reader import Reader
from cachestore.store.read.unfinished import again_in
from cachestore.trainers.export_files import ExportFile, ExportFiles, FileNumber, failure_of
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.export_use import TrainerUse
from cachestore.trainers.export_values import ExportValues
from cachestore.trainers.families import Family, family_named
from cachestore.trainers.format import Format, Writing
from cachestore.trainers.table import WEBDATASET, exported_format

if TYPE_CHECKING:
    from cachestore.train.dataset import CachedDataset

LEAVABLE: Final = ("flips", "masks")
"""What `leave_out` may name."""
_COMPARED_NAMES: Final = 10_000
"""Among more names none is looked for that may have been meant."""


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """What a caller wants exported, and for whom."""

    format: Format
    writing: Writing
    family: Family | None
    resolution: int | None
    crop_number: int | None
    leave_out: tuple[str, ...]

    @classmethod
    def of(
        cls, trainer: str, family: str | None, resolution_only: int | None, variant_only: int | None, leave_out: Collection[str]
    ) -> "ExportChoice":
        """Parse a caller's arguments. Raises BadInput."""
        cache_format, writing = exported_format(trainer)
        left_out = tuple(as_many("leave_out", leave_out, f"a list of {' and '.join(LEAVABLE)}"))
        if unknown := sorted(set(left_out) - set(LEAVABLE)):
            raise BadInput(f"{unknown[0]!r} cannot be left out; {' and '.join(LEAVABLE)} can", option="leave_out")
        return cls(
            cache_format,
            writing,
            None if family is None else family_named(family),
            None if resolution_only is None else as_whole("resolution_only", resolution_only, least=1),
            None if variant_only is None else as_whole("variant_only", variant_only, least=0),
            left_out,
        )

    def layout(self, catalog: Catalog, command: str) -> ExportLayout:
        """Return the layout of a data set; `command` exports it."""
        return ExportLayout(catalog, self.format, self.writing, self.family, self.resolution, self.crop_number, self.leave_out, command)


def catalog_to_export(reader: Reader, name: str, generation: int | None, cache_format: str) -> Catalog:
    """Return the catalog of a data set that a trainer can read. Raises BadInput for one that a program published."""
    catalog = reader.dataset(name, generation).catalog
    if not catalog.has_sources:
        raise BadInput(
            f"the data set {name!r} has neither captions nor pictures, as a program published it: {cache_format} cannot hold it;"
            f" cs.open({str(reader.layout.root)!r}).dataset({name!r}) reads it",
            option="name",
        )
    return catalog


def exported(
    data: "CachedDataset | Reader | str | Path",
    format: str,  # noqa: A002 - the word of the command
    *,
    name: str | None = None,
    generation: int | None = None,
    folder: str | Path | None = None,
    family: str | None = None,
    resolution_only: int | None = None,
    variant_only: int | None = None,
    leave_out: Collection[str] = (),
) -> "ExportedFiles":
    """Return what a trainer's own cache files would hold, by their paths, without writing one: what `export_cache` would write.

        files = cs.exported(cs.CachedDataset("cache/"), "sd-scripts")
        files["cats/1_1216x0832_flux.npz"]["latents_104x152"]

    A file is made when it is asked for, bit for bit as an export has it: of npz as numpy arrays, else as torch tensors on the CPU. A file
    that is a single tensor has it as `value`. All are the caller's own. The lists of files that some trainers keep are not among them.

    Args:
        data: a data set, whose samples are taken; or a store or its path, of which `name` and `generation` choose all of one data set.
        format: as for `export_cache`, but for "webdataset".
        name: the data set's name in a store; "train" by default.
        generation: of the data set in a store; the newest by default.
        folder: where the trainer looks for its files, so that absolute paths are found. By default the folder of the pictures for
            sd-scripts and ai-toolkit, which cache beside these.
        family: as for `export_cache`, as are the arguments after it.
        resolution_only: only this one of several resolutions.
        variant_only: only this one of several random crops of each picture, counted from 0.
        leave_out: "flips", "masks" or both.

    Returns:
        A mapping. It can be pickled, and used after a fork. A path is a text or a `Path`, relative to the exported folder or absolute.

    Raises:
        StoreNotFound: there is no store there.
        BadInput: there is no such data set, or the format cannot hold it.
        FormatError: the catalog is damaged, or was made by a newer version.
    """
    if format == WEBDATASET:
        raise BadInput(f"{WEBDATASET} tars are no cache of a trainer: cs.CachedDataset reads the data set", option="format")
    choice = ExportChoice.of(format, family, resolution_only, variant_only, leave_out)
    where = None if folder is None else as_path("folder", folder).absolute()
    if isinstance(data, Reader | str | os.PathLike):
        reader = data if isinstance(data, Reader) else open_reader(data, verify="first", io="pread", local=None, limit=None)
        asked = None if generation is None else as_whole("generation", generation, least=0)
        catalog = catalog_to_export(reader, "train" if name is None else as_text("name", name), asked, format)
        return ExportedFiles(reader, catalog, choice, where, None)
    from cachestore.train.dataset import CachedDataset, reader_of

    if not isinstance(data, CachedDataset):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        wanted = "a CachedDataset, a store or its path"
        raise BadInput(f"{option('data')} must be {wanted}, not a {type(data).__name__}", option="data")
    for given, argument in ((name, "name"), (generation, "generation")):
        if given is not None:
            raise BadInput(f"the data set knows its own: leave {option(argument)} out", option=argument)
    reader = reader_of(data)
    return ExportedFiles(reader, catalog_to_export(reader, data.name, data.generation, format), choice, where, frozenset(data.ids))


class ExportedFiles(Mapping[str, dict[str, Any]]):
    """The arrays of a trainer's cache files by path, read from a store. `exported` makes it.

    Several threads may read. Another process gets the list of files, and reads the same generation.
    """

    def __init__(
        self, reader: Reader, catalog: Catalog, choice: ExportChoice, folder: Path | None, samples: Collection[str] | None
    ) -> None:
        """List the files, of all samples or these. Reads values only if they were imported. Raises BadInput."""
        self._reader, self._choice, self._folder = reader, choice, folder
        self.name, self.generation = catalog.name, catalog.generation
        self._files = self._of(catalog)
        layout = self._files.layout
        layout.check()
        failures: list[Mapping[str, str]] = []
        named = ExportFiles(layout, self._files.values, TrainerUse(layout, folder or layout.root_of("")))
        self._numbers: dict[str, FileNumber] = {}
        for number, file in named.each(failures, samples):
            path = os.path.normpath(file.path).replace(os.sep, "/")
            if path.startswith("../"):
                leads = f"its id leads out of the folder ({path}): give the sample another id, and run `cachestore precompute` again"
                failures.append(failure_of(named.sample(number[0]), file.encoder, leads))
            else:
                self._numbers[path] = number
        for path in named.contested:
            self._numbers.pop(path, None)
        self._contested = named.contested
        self.failures: tuple[Mapping[str, str], ...] = tuple(failures)
        """What has no file: sample, encoder and reason of each, as in an ExportReport."""

    def _of(self, catalog: Catalog) -> ExportFiles:
        layout = self._choice.layout(catalog, f"cs.exported(…, {self.format!r})")
        return ExportFiles(layout, ExportValues(self._reader, layout))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._files = self._of(catalog_to_export(self._reader, self.name, self.generation, self.format))

    @property
    def format(self) -> str:
        """The trainer's name."""
        return self._choice.format.name

    def __getitem__(self, path: str | Path) -> dict[str, Any]:
        """Return the arrays of a file. Raises MissingEntry if there is no such file, EncodeFailed if it cannot be made, CorruptEntry."""
        return self._arrays(self._contents(path).tensors)

    def metadata(self, path: str | Path) -> dict[str, Any]:
        """Return what is in a file beside its arrays: texts of a safetensors file, plain values of one of torch.save."""
        values = self._contents(path).values
        return {name: str(value) for name, value in values.items()} if self._choice.format.container == "safetensors" else dict(values)

    def caption(self, path: str | Path) -> str:
        """Return the caption that a file's text was made from; of a file of latents, the first of its sample. Raises MissingEntry."""
        return self._file(path).named[0].caption

    def buckets(self, path: str | Path) -> set[tuple[int, int]]:
        """Return (width, height) in pixels of what a file of latents shows; empty for text, or if it is unknown. Raises MissingEntry."""
        return {named.bucket[:2] for named in self._file(path).named if named.bucket is not None}

    @property
    def is_beside(self) -> bool:
        """Whether the trainer keeps these files beside the pictures."""
        return self._choice.format.is_beside

    @property
    def has_its_buckets(self) -> bool:
        """Whether the pictures were encoded for this trainer's buckets, or their latents were imported."""
        options = [column.options for column in self._files.layout.visuals]
        return all(one.get(BUCKETS) == self.format or "resolution" not in one for one in options)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str | Path) and self._inside(path) in self._numbers

    def __iter__(self) -> Iterator[str]:
        """The paths, relative to the exported folder."""
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def get(self, path: str | Path, default: Any = None) -> Any:
        """Return the arrays of a file, or the default if there is no such file."""
        return self[path] if path in self else default  # noqa: SIM401 - this is `get`

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - arrays are not compared
        return id(self)

    def __repr__(self) -> str:
        files, store = plural(len(self), "file"), self._reader.layout.shown
        return f"ExportedFiles({store!r}, {self.name!r}, generation={self.generation}, {self.format!r}: {files})"

    def _contents(self, path: str | Path) -> Contents:
        try:
            return self._file(path).fill()[0]
        except EncodeFailed as error:
            raise EncodeFailed(f"{os.fspath(path)}, as {self.format} would have it: {error}") from error

    def _file(self, path: str | Path) -> ExportFile:
        inside = self._inside(path)
        if inside in self._numbers:
            return self._files.at(self._numbers[inside])
        if inside in self._contested:
            raise EncodeFailed(self._contested[inside])
        raise MissingEntry(f"{self.name!r} in {self._reader.layout.shown} {self._lacks(inside)}")

    def _lacks(self, inside: str) -> str:
        """Return why there is no file, and what to run."""
        lacks = f"has no file {inside!r} of {self.format}"
        folders = ", ".join(str(root) for root, _tree in self._roots) or "unknown"
        if Path(inside).is_absolute():
            where = f"its folder is {folders}: pass {option('folder')}, or run `cachestore relocate` if the pictures were moved"
            return f"{lacks}, as {where}"
        near = did_you_mean(inside, self._numbers) if len(self) <= _COMPARED_NAMES else ""
        first = next((f" ({one['sample']}: {one['reason']})" for one in self.failures), "")
        failed = f"; {plural(len(self.failures), 'file')} cannot be made{first}" if first else ""
        return f"{lacks}{near}{failed}; if its picture is new, run {again_in(self._reader.layout.root, self.name)}"

    def _inside(self, path: str | Path) -> str:
        """Return a path relative to the exported folder; unchanged if it lies outside."""
        text = os.path.normpath(str(path))
        if Path(text).is_absolute():
            for root, tree in self._roots:
                if text.startswith(f"{root}{os.sep}"):
                    text = f"{tree}{text[len(str(root)) + 1 :]}"
                    break
        return text.replace(os.sep, "/")

    @cached_property
    def _roots(self) -> list[tuple[Path, str]]:
        """The folders in which the trainer looks for its files, and what of an export lies there; those inside of others first."""
        layout = self._files.layout
        if self._folder is not None:
            return [(self._folder, "")]
        if not self._choice.format.is_beside:
            return []
        roots = [(root, f"{label}/") for label, root in layout.roots.items()] or [(layout.root_of(""), "")]
        roots += [(root.resolve(), tree) for root, tree in roots if root.is_absolute()]
        return sorted(((root, tree) for root, tree in roots if root.is_absolute()), key=lambda one: -len(one[0].parts))

    def _arrays(self, tensors: Mapping[str, Raw]) -> dict[str, Any]:
        """Return tensors as arrays that share nothing with each other."""
        own, used = dict[str, Raw](), set[int]()
        for name, (dtype, shape, buffer) in tensors.items():
            is_shared = id(buffer) in used or memoryview(buffer).readonly
            used.add(id(buffer))
            own[name] = dtype, shape, bytearray(buffer) if is_shared else buffer
        return to_numpy(own) if self._choice.format.container == "npz" else to_torch(own)
