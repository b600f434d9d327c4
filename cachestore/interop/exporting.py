"""`export`: a data set as the files that another trainer would have cached. Knows a store to read, and a folder to write.

A file is written under a temporary name beside its own, synced and renamed. What stands there already with the same bytes is left, and so
is any file that is not an earlier export's, unless `replace` is given. A note in the folder says which files are ours.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import isqrt
from pathlib import Path
from typing import Any, Final

from cachestore.core.arguments import as_many, as_path, as_whole
from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed
from cachestore.core.inputs import RANDOM, RESOLUTIONS, SOURCE, WITHIN, caption_key, cells_each, framing_of, sides_each
from cachestore.core.keys import Json, Key, Recipe
from cachestore.core.raw_tensors import Contents, Latents, Raw, Text, as_array, cast, to_state
from cachestore.core.samples import CAPTION, CONTROL, IMAGE, MASK, VIDEO, Source
from cachestore.core.words import first_of, in_short
from cachestore.encode import families
from cachestore.files.checksum import digest_of
from cachestore.files.marker import check_for_reading
from cachestore.files.publish import write_outside
from cachestore.interop.caption_files import captions_of, text_beside
from cachestore.interop.formats import simpletuner
from cachestore.interop.formats.containers import write_npz, write_safetensors
from cachestore.interop.formats.families import AI_TOOLKIT, SIMPLETUNER, Family, family_named, family_of_pipeline
from cachestore.interop.formats.matching import Added, Named, Rule, View, same_words
from cachestore.interop.formats.table import Extra, Format, Writing, written_format
from cachestore.jobs.declared_model import scale_of
from cachestore.source.combined import is_alone, labels_of
from cachestore.source.files import Folder
from cachestore.source.memory import MEMORY
from cachestore.storage.catalog import Catalog, KeyColumn, list_generations, list_names, read_catalog
from cachestore.store.reader import Reader

NOTE: Final = ".cachestore-export.json"
"""In an exported folder: which files are ours, and what was written to them."""
_FORMAT: Final = "cachestore-export/1"
_NAMED: Final = 1000
_STEP: Final = 64
"""Of the sides of buckets, where a data set does not say."""
LEAVABLE: Final = ("flips", "masks")
"""What of a data set may be left out, where a format has no place for it."""


@dataclass(frozen=True, slots=True, repr=False)
class ExportReport:
    """What became of an export: what `cachestore export --json` prints."""

    format: str
    folder: str
    name: str
    generation: int
    samples: int
    written: int
    unchanged: int
    bytes: int
    """Of what was written."""
    foreign: tuple[str, ...] = ()
    """Files that are there with other bytes, and were left as they are not an earlier export's."""
    failures: tuple[Mapping[str, str], ...] = ()
    """What could not be exported: sample, encoder, reason."""
    casts: tuple[str, ...] = ()
    """Which tensors are not bit for bit what is stored, and how they were made of it; every other one is."""
    left_out: tuple[str, ...] = ()
    """What of the data set has no place in the files, in words."""
    not_taken: tuple[str, ...] = ()
    """What was written, but the trainer will not find or cannot put into batches, in words with counts."""
    remarks: tuple[str, ...] = ()
    """What a user should know of the rest."""

    @property
    def complete(self) -> bool:
        """Whether each value of each complete sample is in the folder, and the trainer will take it from there."""
        return not self.foreign and not self.failures and not self.not_taken

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The report as one JSON object."""
        listed = {name: list(getattr(self, name)) for name in ("foreign", "casts", "left_out", "not_taken", "remarks")}
        return {**asdict(self), "complete": self.complete, **listed, "failures": [dict(failure) for failure in self.failures]}


@dataclass(slots=True)
class _Tally:
    """What is counted on the way."""

    written: int = 0
    unchanged: int = 0
    size_bytes: int = 0
    foreign: list[str] = field(default_factory=list[str])
    failures: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    casts: dict[str, None] = field(default_factory=dict[str, None])
    there: dict[str, int] = field(default_factory=dict[str, int])
    """By path of each file that is as it should be the row that it is of."""
    latents: int = 0
    """How many latents were compared with what the trainer looks for."""
    missed: list[str] = field(default_factory=list[str])
    """Samples whose latents the trainer does not look for."""
    batches: dict[Hashable, Counter[Hashable]] = field(default_factory=dict[Hashable, Counter[Hashable]])
    """For each group from which the trainer makes batches, how many latents have which shape."""
    reworded: list[str] = field(default_factory=list[str])
    """Samples with a caption for which the trainer reads other text in the file."""
    unread: int = 0
    """Captions whose files are not here."""

    def fail(self, sample: str, encoder: str, error: Exception) -> None:
        """Remember what could not be exported."""
        if len(self.failures) < _NAMED:
            self.failures.append({"sample": sample, "encoder": encoder, "reason": str(error)})


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
    choice = _Choice(resolution_only, variant_only, frozenset(leave_out))
    with Reader(store) as reader:
        catalog = _catalog(reader, name, generation)
        tally = _Tally()
        export = _Export(reader, catalog, wanted, writing, tally, None if family is None else family_named(family), choice, folder)
        target = _Target(folder, tally, may_replace=replace)
        for row, encoder, path, contents in export.files():
            try:
                if target.put(path, _encoded(wanted, contents)):
                    tally.there[path] = row
            except EncodeFailed as error:
                tally.fail(catalog.ids[row], encoder, error)
        if (empty := export.empty_caption()) is not None:
            target.put(empty[0], _encoded(wanted, empty[1]))
        for path, value in export.side_data().items():
            target.put(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())
        check_for_reading(reader.layout)
        target.close()
        left_out, not_taken, remarks = export.left_out(), export.not_taken(), export.remarks()
    return ExportReport(
        wanted.name,
        str(folder),
        catalog.name,
        catalog.generation,
        len(catalog),
        tally.written,
        tally.unchanged,
        tally.size_bytes,
        tuple(tally.foreign[:_NAMED]),
        tuple(tally.failures),
        tuple(tally.casts),
        tuple(left_out),
        tuple(not_taken),
        tuple(remarks),
    )


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


# What is written


@dataclass(frozen=True, slots=True)
class _Choice:
    """What of a data set is exported, where the format does not keep all of it."""

    resolution: int | None = None
    variant: int | None = None
    leave_out: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Made:
    """A file that is to be, and what it is of: two of one name are one where that is the same."""

    encoder: str
    path: str
    of: tuple[object, ...]
    contents: Contents


@dataclass(frozen=True)
class _Export:
    """A data set, looked at as another trainer's cache."""

    reader: Reader
    catalog: Catalog
    format: Format
    writing: Writing
    tally: _Tally
    said: Family | None
    """As the user says; None where the data set is to tell."""
    choice: _Choice
    folder: Path
    """Where files are written to. If the trainer caches beside the pictures, it may hold their captions."""

    def files(self) -> Iterator[tuple[int, str, str, Contents]]:
        """(row, encoder, path, contents) of every file. Two that would have one name are failures, both named. Raises BadInput."""
        self._check()
        seen: dict[str, tuple[str, tuple[object, ...]]] = {}
        for row, sample in enumerate(self.catalog.ids):
            for made in chain(self._texts(row), self._latents_files(row)):
                first, before = seen.setdefault(made.path, (sample, made.of))
                if before != made.of:
                    error = EncodeFailed(f"{made.path} would be of {first!r} too: {self.format.name} tells them apart by nothing else")
                    self.tally.fail(sample, made.encoder, error)
                elif first == sample:
                    yield row, made.encoder, made.path, made.contents

    def _texts(self, row: int) -> Iterator[_Made]:
        """The files of a row's captions: of its first one, or of all where a file is named by its caption. Failures are tallied."""
        column = self._captions
        if column is None:
            return
        for place in range(column.at[row], column.at[row + 1])[: None if self.writing.is_text_shared else 1]:
            try:
                key, stored, meta = self._entry(column, place)
                named = self._named(row, column, place)
                named = self._as_read(row, named)
                path, contents = self.writing.text(self._family_of[column.encoder], named, self._text(column, stored, meta))
            except (CacheStoreError, OSError) as error:
                self.tally.fail(self.catalog.ids[row], column.encoder, error)
                continue
            for tree in self._text_trees(row):
                yield _Made(column.encoder, f"{tree}{path}", (key, named.caption), contents)

    def _latents_files(self, row: int) -> Iterator[_Made]:
        """The files of a row's picture, by view or for all of them at once. Failures are tallied."""
        is_one_file = self.writing.resolutions == "one file"
        cells = [(column, place) for column in self._pictures for place in self._places(row, column)]
        for several in [cells] if is_one_file and cells else [[cell] for cell in cells]:
            column = several[0][0]
            try:
                views, keys = zip(*(self._view(row, *cell) for cell in several), strict=True)
                path, contents = self.writing.latents(self._family_of[column.encoder], views)
            except (CacheStoreError, OSError) as error:
                self.tally.fail(self.catalog.ids[row], column.encoder, error)
                continue
            for view, cell in zip(views, several, strict=True):
                self._weigh(row, cell[0], view)
            yield _Made(column.encoder, f"{self._tree(row, column)}{path}", keys, contents)

    def _weigh(self, row: int, column: KeyColumn, view: View) -> None:
        """Count whether the trainer would look for latents like these, and what it would put into one batch with them.

        What the trainer itself cached is not counted, as it finds that.
        """
        recipe = self.catalog.recipes[column.fingerprint]
        if recipe.make.get("format") == self.format.name:
            return
        resolution = self._looked_at(row, column)
        rule = Rule(resolution, int(column.options.get("step", _STEP)), bool(column.options.get("upscale", True)))
        if self.writing.finds is not None:
            self.tally.latents += 1
            if not self.writing.finds(self._family_of[column.encoder], view.named, rule):
                self.tally.missed.append(self.catalog.ids[row])
        if self.writing.stacks is not None:
            controls = tuple(raw[1] for raw in view.controls)
            batch = (self._tree(row, column), self.writing.stacks(view.named, resolution), controls)
            self.tally.batches.setdefault(batch, Counter())[view.latents.tensor[1]] += 1

    def _looked_at(self, row: int, column: KeyColumn) -> int:
        """The resolution at which the trainer would look at a row's picture: the data set's, else what its largest bucket tells."""
        of_source: Mapping[str, int] = column.options.get(RESOLUTIONS, {})
        source = str(json.loads(self.catalog.extras[row]).get(SOURCE, "")) if of_source else ""
        known = of_source.get(source, column.options.get("resolution"))
        return int(known) if known is not None else self._guessed[column.encoder]

    @cached_property
    def _guessed(self) -> Mapping[str, int]:
        """By encoder, the resolution in steps of 64 that fits its largest bucket."""
        guessed: dict[str, int] = {}
        for column in self._pictures:
            buckets = (column.cell(place).facts.get("bucket", (0, 0)) for place in range(len(column.keys)))
            largest = isqrt(max((width * height for width, height in buckets), default=0))
            guessed[column.encoder] = max(_STEP, (largest + _STEP // 2) // _STEP * _STEP)
        return guessed

    def _as_read(self, row: int, named: Named) -> Named:
        """Add the caption as the trainer reads it from the file beside the picture, if the name of text is its digest."""
        if not self.writing.is_text_digested or named.is_prompt:
            return named
        folders = [self.folder / self._source(row)] if self.format.name == AI_TOOLKIT else []
        folders += [root] if (root := self._root(row)) != Path() else []
        texts = (text_beside(Folder(folder), named.reference) for folder in folders)
        text = next((text for text in texts if text is not None), None)
        if text is None:
            self.tally.unread += named.caption != ""
            return named
        read = next((one for one in captions_of(self.format, text, self._added) if same_words(one, named.caption)), None)
        if read is None:
            self.tally.reworded.append(self.catalog.ids[row])
        return replace(named, read_as=read)

    @cached_property
    def _added(self) -> Added:
        """What stands in each caption of the data set besides what its file holds."""
        hints: Mapping[str, Any] = {} if self._captions is None else self.catalog.request.get(self._captions.encoder, {})
        prefix = str(self.catalog.texts.get("prefix", "")).strip() or None
        return Added(hints.get("trigger_word") or prefix, hints.get("caption") if "trigger_word" in hints else None)

    def _places(self, row: int, column: KeyColumn) -> Sequence[int]:
        """The cells of a row's first picture that are exported: of one crop, and of that one mirrored."""
        first = column.at[row] + (self.choice.variant or 0) * sides_each(column.options)
        count = 1 if "flips" in self.choice.leave_out else sides_each(column.options)
        return range(first, first + count) if column.count(row) else ()

    def _view(self, row: int, column: KeyColumn, place: int) -> tuple[View, Key]:
        """A cell as the format takes it, and its key. Raises EncodeFailed, and whatever reading raises."""
        key, stored, meta = self._entry(column, place)
        if column.count(row) > cells_each(column.options):
            raise EncodeFailed(
                f"it has {column.count(row) // cells_each(column.options)} pictures, and {self.format.name} keeps one of a sample"
            )
        if "own crops" not in self.writing.takes and WITHIN in framing_of(json.loads(self.catalog.extras[row])):
            raise EncodeFailed(f"it has a crop of its own, and {self.format.name} puts whole pictures into buckets: cut the file itself")
        number = place - column.at[row]
        is_flipped = number % sides_each(column.options) == 1
        latents = self._latents(column, stored, meta, self.catalog.ids[row])
        controls = self._control_latents(row, column, number)
        return View(self._named(row, column, place), latents, is_flipped, self._mask(row, column, number), controls), key

    def _control_latents(self, row: int, column: KeyColumn, number: int) -> tuple[Raw, ...]:
        """The latents of a row's control images that go with a view of its picture; none where the format keeps none."""
        each = cells_each(column.options)
        those = (one for one in self.catalog.columns if (one.role, dict(one.options)) == (CONTROL, dict(column.options)))
        controls = next(those, None) if "controls" in self.writing.takes else None
        if controls is None:
            return ()
        places = range(controls.at[row] + number, controls.at[row + 1], each)
        return tuple(self._latents(controls, *self._entry(controls, place)[1:], self.catalog.ids[row]).tensor for place in places)

    def _mask(self, row: int, column: KeyColumn, number: int) -> Raw | None:
        """The mask of a view of a row's picture; None where there is none, or it is not wanted."""
        masks = next((one for one in self._masks if dict(one.options) == dict(column.options)), None)
        if masks is None or not masks.count(row):
            return None
        self._say("masks", "each latent's share of what counts, as float32 from 0 to 1 over the pixels that it stands for")
        return self._entry(masks, masks.at[row] + number)[1][MASK]

    def _entry(self, column: KeyColumn, place: int) -> tuple[Key, Mapping[str, Raw], Mapping[str, Any]]:
        """Key, tensors and JSON value of a cell. Raises EncodeFailed where it was not made, and whatever reading raises."""
        key = column.cell(place).key
        if key is None:
            raise EncodeFailed("it was not made; `cachestore why` tells the reason")
        return key, self.reader.get_raw([key])[0], self.reader.describe(key).meta

    def left_out(self) -> list[str]:
        """What has no place in the files and needs no choice, in words."""
        words: list[str] = []
        controls = sum(len(column.keys) for column in self.catalog.columns if column.role == CONTROL)
        if controls and "controls" not in self.writing.takes:
            words.append(f"{controls} latents of control images")
        videos = sum(len(column.keys) for column in self.catalog.columns if column.role == VIDEO)
        words += [f"{videos} latents of videos"] if videos else []
        column = self._captions
        if column is not None and not self.writing.is_text_shared:
            further = len(column.keys) - sum(1 for row in range(len(self.catalog)) if column.count(row))
            words += [f"{further} captions after the first of their pictures"] if further else []
        return words

    def not_taken(self) -> list[str]:
        """What the trainer will not find, or cannot put into batches, in words."""
        words: list[str] = []
        missed, trainer = self.tally.missed, self.format.name
        if missed:
            words.append(
                f"{trainer} will not find {len(missed)} of {self.tally.latents} latents: it scales and cuts these pictures to other"
                f" buckets, and encodes them again ({first_of(missed)})"
            )
        torn = [shapes for shapes in self.tally.batches.values() if len(shapes) > 1]
        if torn:
            count = sum(shapes.total() for shapes in torn)
            words.append(
                f"{len(torn)} of the {len(self.tally.batches)} groups from which {trainer} makes batches hold latents of several shapes"
                f" ({count} pictures): it ends with an error if its batch size is above 1"
            )
        if self.tally.reworded:
            words.append(
                f"{trainer} reads other text in the files of {len(self.tally.reworded)} captions, and encodes that itself"
                f" ({first_of(self.tally.reworded)})"
            )
        return words

    def remarks(self) -> list[str]:
        """What a user should know of what is written."""
        words: list[str] = []
        if self.tally.unread:
            words.append(
                f"{self.tally.unread} captions have no caption file here: {self.format.name} finds their text only if each file holds the"
                " caption alone, with no space or line end behind it"
            )
        if self.format.name == AI_TOOLKIT and self._captions is not None and len(self.catalog):
            words.append("with caption_dropout_rate above 0 ai-toolkit encodes the empty caption itself, once for each picture")
        return words

    def empty_caption(self) -> tuple[str, Contents] | None:
        """Path and contents of the empty caption's text, to which SimpleTuner drops captions; one that cannot be read is tallied.

        None of other formats, without samples, where a sample has it already, and where the store does not hold it.
        """
        column = self._captions
        if column is None or self.format.name != SIMPLETUNER or not len(self.catalog) or "" in self.catalog.captions:
            return None
        key = caption_key(column.fingerprint, "")
        if key not in self.reader:
            return None
        try:
            text = self._text(column, self.reader.get_raw([key])[0], self.reader.describe(key).meta)
        except (CacheStoreError, OSError) as error:
            self.tally.fail("", column.encoder, error)
            return None
        return self.writing.text(self._family_of[column.encoder], Named(""), text)

    def side_data(self) -> dict[str, object]:
        """Further files that a trainer needs, by their paths: SimpleTuner's of sizes and crops, for each of its data sets.

        They tell of the samples whose latents stand in the folder: of a file that another sample has they would tell the wrong crop.
        """
        if self.format.name != SIMPLETUNER:
            return {}
        rows: dict[str, list[tuple[str, Named]]] = {}
        for row in range(len(self.catalog)):
            for column in self._pictures:
                for place in self._places(row, column):
                    named, tree = self._named(row, column, place), self._tree(row, column)
                    if self.tally.there.get(f"{tree}{simpletuner.latents_path(named.reference)}") == row:
                        rows.setdefault(tree, []).append((str(self._root(row) / named.reference), named))
        return {
            f"{tree}{path}": value
            for tree, those in rows.items()
            for path, value in simpletuner.side_data(those, "-".join([self.catalog.name, *tree.split("/")[:-1]])).items()
        }

    @cached_property
    def _captions(self) -> KeyColumn | None:
        """The column of captions, where there is one."""
        return next((one for one in self.catalog.columns if one.role == CAPTION), None)

    @cached_property
    def _pictures(self) -> tuple[KeyColumn, ...]:
        """The columns of pictures, one for each resolution that is exported."""
        found = tuple(one for one in self.catalog.columns if one.role == IMAGE)
        if self.choice.resolution is None:
            return found
        chosen = tuple(one for one in found if _resolution(one) == self.choice.resolution)
        if not chosen:
            known = ", ".join(str(_resolution(one)) for one in found if _resolution(one) is not None) or "none that is known"
            raise BadInput(f"{self.catalog.name!r} has no latents at the resolution {self.choice.resolution}; it has {known}")
        return chosen

    @cached_property
    def _masks(self) -> tuple[KeyColumn, ...]:
        """The columns of masks that are exported."""
        return () if "masks" in self.choice.leave_out else tuple(one for one in self.catalog.columns if one.role == MASK)

    @cached_property
    def _columns(self) -> tuple[KeyColumn, ...]:
        return (*(() if self._captions is None else (self._captions,)), *self._pictures)

    @cached_property
    def _family_of(self) -> Mapping[str, Family]:
        """By encoder."""
        return {column.encoder: self._family(column) for column in self._columns}

    @cached_property
    def _roots(self) -> Mapping[str, Path]:
        """Where each of several sources is, by what it is called; nothing of one alone."""
        hints = (self.catalog.request.get(column.encoder, {}) for column in self._columns)
        told = next((hint["sources"] for hint in hints if hint.get("sources")), ())
        sources = [Source(**source) for source in told]
        return {} if is_alone(sources) else {label: _folder(one.data) for label, one in zip(labels_of(sources), sources, strict=True)}

    def _source(self, row: int) -> str:
        """What the source of a row is called; nothing where there is one alone."""
        return str(json.loads(self.catalog.extras[row]).get(SOURCE, "")) if self._roots else ""

    def _root(self, row: int) -> Path:
        """The folder to which a row's references are relative."""
        column = self._columns[-1]
        return self._roots.get(self._source(row)) or _folder(str(self.catalog.request.get(column.encoder, {}).get("data", "")))

    def _tree(self, row: int, column: KeyColumn) -> str:
        """The folder, with `/` behind it, in which a cell's file lies: of its source, and of its resolution where each has one."""
        has_each = self.writing.resolutions == "a folder each" and len(self._pictures) > 1
        return "".join(f"{part}/" for part in (self._source(row), str(_resolution(column)) if has_each else "") if part)

    def _text_trees(self, row: int) -> Sequence[str]:
        """The folders in which a row's text is looked for."""
        if self.writing.is_text_shared:
            return ("",)
        source = self._source(row)
        return tuple(dict.fromkeys(self._tree(row, column) for column in self._pictures)) or (f"{source}/" if source else "",)

    def _check(self) -> None:
        """Raise BadInput for a family, or something in the data set, that the format has no form for."""
        for column in self._columns:
            family = self._family_of[column.encoder]
            family.written_as(self.format.name)
            if column.role == CAPTION and self.format.name not in family.text:
                able = ", ".join(sorted(family.text)) or "none"
                raise BadInput(f"text of {family.name} has no form in {self.format.name}; it has one in {able}")
        for column in self._pictures:
            self._check_views(column)
        is_one = len(self._pictures) <= 1 or self._family_of[self._pictures[0].encoder].name not in self.writing.one_resolution
        if not is_one:
            several = ", ".join(str(_resolution(column)) for column in self._pictures)
            raise BadInput(
                f"{self.format.name} keeps one resolution of this family in a file: pass --resolution-only with one of {several}"
            )
        if any(len(masks.keys) for masks in self._masks):
            self._check_takes("masks", "masks, which it reads from their own files")

    def _check_views(self, column: KeyColumn) -> None:
        """Raise BadInput for views of pictures that the format has no form for."""
        options = column.options
        if sides_each(options) > 1 and "flips" not in self.choice.leave_out:
            self._check_takes("flips", "mirrored pictures")
        if options.get("crop") == RANDOM and "drawn crops" not in self.writing.takes:
            raise BadInput(
                f"{self.format.name} looks for a picture's file by the crop that it would make itself, at the centre, and never finds one"
                " that was drawn: precompute with --crop center under another --name, and export that"
            )
        variants, variant = cells_each(options) // sides_each(options), self.choice.variant
        if variants > 1 and variant is None:
            of = f"{self.format.name} keeps one crop of a picture, and {self.catalog.name!r} has {variants}"
            raise BadInput(f"{of}: pass --variant-only with a number from 0 to {variants - 1}")
        if variant is not None and not 0 <= variant < variants:
            raise BadInput(f"--variant-only is a number from 0 to {variants - 1} for {self.catalog.name!r}, not {variant}")

    def _check_takes(self, what: Extra, words: str) -> None:
        if what not in self.writing.takes:
            raise BadInput(f"{self.format.name} caches no {words}: pass --leave-out {what} to export the rest")

    def _family(self, column: KeyColumn) -> Family:
        """The family of a column's values: as imported, else of the text's pipeline. Raises BadInput where nothing tells it."""
        recipe = self.catalog.recipes[column.fingerprint]
        if self.said is not None:
            return self.said
        if "family" in recipe.make:
            return family_named(str(recipe.make["family"]))
        texts = [self.catalog.recipes[one.fingerprint] for one in self._columns if one.role == CAPTION]
        for one in (recipe, *texts):
            pipeline = one.make.get("pipeline")
            family = family_of_pipeline(str(pipeline)) if pipeline is not None else None
            if family is not None:
                return family
            if "family" in one.make:
                return family_named(str(one.make["family"]))
        return self._family_of_constants(recipe)

    def _family_of_constants(self, recipe: Recipe) -> Family:
        """The family whose VAE has these channels and constants, where the data set holds latents alone."""
        from cachestore.interop.formats.families import FAMILIES

        scale, channels = scale_of(recipe.read), recipe.read.get("channels")
        alike = [
            family
            for family in FAMILIES
            if self.format.name in family.names
            and family.channels == channels
            and (family.scale.factor, family.scale.shift or None) == (scale.factor, scale.shift or None)
        ]
        if len(alike) != 1:
            raise BadInput(f"nothing tells which family the latents of {self.catalog.name!r} are of, so pass --family")
        return alike[0]

    def _named(self, row: int, column: KeyColumn, place: int) -> Named:
        """What the name of a cell's file is made of."""
        at, references = self.catalog.images.get(IMAGE, ([0] * (len(self.catalog) + 1), ()))
        reference = references[at[row]] if at[row] < at[row + 1] else self.catalog.ids[row]
        source = self._source(row)
        captions = self.catalog.row_captions(row)
        number = place - column.at[row] if column.role == CAPTION else 0
        facts = column.cell(place).facts
        told: dict[str, Any] = {
            name: tuple(facts[name][: 4 if name == "crop" else 2]) for name in ("size", "bucket", "resized", "crop") if name in facts
        }
        told |= {"tokens": facts["tokens"][0]} if "tokens" in facts else {}
        told |= {"is_part": WITHIN in framing_of(json.loads(self.catalog.extras[row])), "is_prompt": at[row] == at[row + 1]}
        caption = captions[number] if number < len(captions) else ""
        if reference.removeprefix(f"{source}/").startswith(MEMORY):
            reference = self.catalog.ids[row]
        return Named(reference.removeprefix(f"{source}/") if source else reference, caption, **told)

    def _text(self, column: KeyColumn, stored: Mapping[str, Raw], meta: Mapping[str, Any]) -> Text:
        """An entry's text, in the dtypes of the format. Raises EncodeFailed where it is not all of the family's."""
        family = self._family_of[column.encoder]
        own = families.stored_names(families.text_family(family.pipeline))
        if lacking := sorted(set(own) - set(stored)):
            raise EncodeFailed(
                f"it holds {', '.join(sorted(stored)) or 'nothing'}, and text of {family.name} needs {', '.join(lacking)} too"
            )
        tensors = {name: self._cast(name, stored[name], self.writing.text_casts) for name in own}
        return Text(tensors, {name: raw for name, raw in stored.items() if name not in tensors}, _info(meta))

    def _latents(self, column: KeyColumn, stored: Mapping[str, Raw], meta: Mapping[str, Any], sample: str) -> Latents:
        """An entry's latents, in the state and dtype of the format."""
        recipe, family = self.catalog.recipes[column.fingerprint], self._family_of[column.encoder]
        state = family.states[self.format.name]
        kind = str(recipe.read["stored"])
        others = {name: raw for name, raw in stored.items() if name != kind}
        if kind == "moments":
            raw = _drawn(stored[kind], sample if state.kind == "sample" else None)
            self._say("latents", f"{'drawn' if state.kind == 'sample' else 'the mean taken'} from stored moments")
        else:
            raw = stored[kind]
            if kind != state.kind:
                self._say("latents", f"a {kind}, where the trainer caches a {state.kind}")
        was_scaled = bool(recipe.read.get("scaled", False))
        if was_scaled != state.is_scaled:
            how = "normalised" if state.is_scaled else "normalising undone"
            self._say("latents", f"{how} in {'float64' if raw[0] == 'F64' else 'float32'}, then in the stored dtype {raw[0]}")
        made = to_state(raw, scale_of(recipe.read), was_scaled=was_scaled, is_scaled=state.is_scaled)
        tensor = self._cast("latents", cast(made, raw[0]), self.writing.latents_casts)
        return Latents(tensor, state.is_scaled, state.kind, others, {}, _info(meta))

    def _cast(self, name: str, raw: Raw, casts: Mapping[str, str]) -> Raw:
        dtype = casts.get(raw[0], raw[0])
        if dtype != raw[0]:
            self._say(
                name, f"{raw[0]} as {dtype}, which holds each of its numbers exactly" if raw[0] != "F64" else f"F64 rounded to {dtype}"
            )
        return cast(raw, dtype) if dtype != raw[0] else raw

    def _say(self, tensor: str, how: str) -> None:
        self.tally.casts[f"{tensor}: {how}"] = None


def _resolution(column: KeyColumn) -> int | None:
    """The resolution of a column of pictures; None where it was imported, and where each source has its own."""
    return None if RESOLUTIONS in column.options else column.options.get("resolution")


def _folder(data: str) -> Path:
    """The folder to which the references of a source are relative: a manifest's own."""
    path = Path(data)
    return path.parent if path.suffix.lower() == ".jsonl" and not path.is_dir() else path


def _info(meta: Mapping[str, Any]) -> Mapping[str, Json]:
    """What the trainer wrote beside the tensors, where an entry was imported."""
    imported: Mapping[str, Any] = meta.get("imported") or {}
    return imported.get("info") or {}


def _drawn(moments: Raw, sample: str | None) -> Raw:
    """The raw latents that a data set draws of stored moments at seed 0 and epoch 0; their mean where no sample is named."""
    from cachestore.core.read_block import LatentsBlock
    from cachestore.core.tensors import to_raw, to_torch
    from cachestore.loading.latents import noise_for, read_latents

    block = LatentsBlock("moments", 1, 1.0, None, None, None)
    dtype, shape, buffer = moments
    stored = to_torch({"moments": (dtype, shape, bytearray(buffer))})
    made = read_latents(block, "raw" if sample is None else "sample", stored, noise_for(0, 0, sample or ""))
    return to_raw({"latents": made})["latents"]


# Where it is written


@dataclass
class _Target:
    """A folder that belongs to somebody else as well."""

    folder: Path
    tally: _Tally
    may_replace: bool

    @cached_property
    def _ours(self) -> dict[str, str]:
        """Digests of what earlier exports wrote, by path; nothing where the note is missing or makes no sense."""
        try:
            body = json.loads((self.folder / NOTE).read_bytes())
            return {str(path): str(digest) for path, digest in body["files"].items()} if body["format"] == _FORMAT else {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def put(self, path: str, data: bytes) -> bool:
        """Have a file hold these bytes, unless it is a stranger's: whether it does.

        Raises WriteFailed, EncodeFailed for a path that leads elsewhere.
        """
        final = self._inside(path)
        digest = digest_of([data])
        found = _digest_there(final)
        if found == digest:
            self.tally.unchanged += 1
        elif found is not None and not self.may_replace and self._ours.get(path) != found:
            self.tally.foreign.append(path)
            return False
        else:
            write_outside(final, data)
            self.tally.written += 1
            self.tally.size_bytes += len(data)
        self._ours[path] = digest
        return True

    def _inside(self, path: str) -> Path:
        """The file's place. A name from a catalog never leads out of the folder. Raises EncodeFailed."""
        final = Path(os.path.normpath(self.folder / path))
        if not final.is_relative_to(self.folder) or final == self.folder:
            raise EncodeFailed(f"{path} leads out of {self.folder}")
        return final

    def close(self) -> None:
        """Remember which files are ours."""
        body = {"format": _FORMAT, "files": dict(sorted(self._ours.items()))}
        write_outside(self.folder / NOTE, json.dumps(body, indent=0).encode())


def _digest_there(path: Path) -> str | None:
    """Digest of what stands at a path; None where nothing does, empty for what is no file."""
    try:
        return digest_of([path.read_bytes()])
    except FileNotFoundError:
        return None
    except OSError:
        return ""
