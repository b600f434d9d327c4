"""`export`: writes a data set as the files that another trainer would have cached."""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import Final

from cachestore.core.arguments import as_path
from cachestore.core.errors import CacheStoreError, EncodeFailed, naming_extras
from cachestore.core.keys import Json
from cachestore.core.raw_tensors import Contents, as_array
from cachestore.core.words import in_short
from cachestore.files.marker import check_for_reading
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.reader import Reader
from cachestore.trainers.containers import write_npz, write_safetensors
from cachestore.trainers.export_files import ExportFiles, failure_of
from cachestore.trainers.export_target import Target
from cachestore.trainers.export_use import TrainerUse
from cachestore.trainers.export_values import ExportValues
from cachestore.trainers.exported import Listed
from cachestore.trainers.exported_files import ExportChoice, catalog_to_export
from cachestore.trainers.format import Format
from cachestore.trainers.table import WEBDATASET
from cachestore.trainers.trainer_settings import trainer_settings
from cachestore.trainers.webdataset.exporting import TarExport, refuse_given

_NAMED: Final = 1000


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
    if format == WEBDATASET:
        refuse_given({"family": family, "resolution_only": resolution_only, "variant_only": variant_only, "leave_out": leave_out})
        target = Target(folder, WEBDATASET, may_replace=replace)
        with Reader(store) as reader:
            tars = TarExport(reader, catalog_to_export(reader, name, generation, format))
            tars.write(target)
            check_for_reading(reader.layout)
        return _report(target, tars.catalog, tars.failures)
    choice = ExportChoice.of(format, family, resolution_only, variant_only, leave_out)
    with Reader(store) as reader:
        catalog = catalog_to_export(reader, name, generation, format)
        command = shlex.join(["cachestore", "export", str(store), "--name", catalog.name, "--format", format, "-o", str(folder)])
        layout = choice.layout(catalog, command)
        target, values, use = Target(folder, format, may_replace=replace), ExportValues(reader, layout), TrainerUse(layout, folder)
        failures = _Export(ExportFiles(layout, values, use), use, target).write()
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


@dataclass(frozen=True, slots=True)
class _Export:
    """Writes the files of a data set as another trainer's cache."""

    files: ExportFiles
    use: TrainerUse
    target: Target
    failures: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    listed: list[Listed] = field(default_factory=list[Listed])
    """The files of latents that have the right bytes."""

    def write(self) -> Sequence[Mapping[str, str]]:
        """Write all files, and the trainer's own lists of them. Return what failed. Raises BadInput before the first file, WriteFailed."""
        layout, target = self.files.layout, self.target
        layout.check()
        for (row, _number), file in self.files.each(self.failures):
            try:
                contents, variants = file.fill()
            except (CacheStoreError, OSError) as error:
                self.failures.append(failure_of(self.files.sample(row), file.encoder, error))
                continue
            for column, variant in variants:
                self.use.count(row, column, variant)
            try:
                if target.put(file.path, _encoded(layout.format, contents)) and file.listed is not None:
                    self.listed.append(file.listed)
            except EncodeFailed as error:  # its id leads out of the folder
                self.failures.append(failure_of(self.files.sample(row), file.encoder, error))
        if layout.writing.side_data is not None:
            for path, value in layout.writing.side_data(self.listed, layout.catalog.name, target.folder).items():
                target.put(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())
        check_for_reading(self.files.values.reader.layout)
        target.close()
        return self.failures


def _encoded(cache_format: Format, contents: Contents) -> bytes:
    match cache_format.container:
        case "npz":
            return write_npz({name: as_array(raw) for name, raw in contents.tensors.items()})
        case "safetensors":
            return write_safetensors(contents.tensors, {name: str(value) for name, value in contents.values.items()})
        case "torch":
            from cachestore.trainers.torch_files import write_torch

            return write_torch(contents.tensors, contents.values)
