"""What a data set returns from its catalog: rows, columns, the caption and variant of each sample in an epoch, and their keys.

Reads no entry; `rows` does.
"""

import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

from cachestore.core import system
from cachestore.core.arguments import as_many, as_text, as_whole, normal_id, refuse
from cachestore.core.batch_shapes import SIZES, LatentsAs
from cachestore.core.captions import CaptionPolicy, Choose
from cachestore.core.errors import BadInput, FormatError, MissingEntry
from cachestore.core.inputs import IMAGES, SOURCE, SOURCE_WEIGHT, caption_key
from cachestore.core.keys import Key, Recipe, digest_parts
from cachestore.core.samples import MASK
from cachestore.core.words import plural
from cachestore.files.paths import Layout
from cachestore.files.table import Strings, take
from cachestore.store.format.catalog import HAVE_SOURCES, Catalog, open_catalog
from cachestore.store.read.reader import Reader
from cachestore.train.cast import as_dtype
from cachestore.train.cells import Bucket, bucket_groups, can_be_stacked, complete_rows, variant_keys
from cachestore.train.epoch import Epoch
from cachestore.train.joined import Join, check_names, without_parts
from cachestore.train.latents import check_form
from cachestore.train.order import turn_of
from cachestore.train.returned_columns import (
    LATENTS,
    TextColumn,
    check_variants,
    chosen_fields,
    chosen_resolution,
    condition_columns,
    control_columns,
    count_variants,
    mask_column,
    text_columns,
    trained_column,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_NO_EXTRAS: Final = "{}"
"""The catalog's text for a sample without extra columns."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The options with which a data set was opened."""

    layout: Layout
    """The store's layout."""
    name: str
    generation: int
    latents: LatentsAs
    seed: int
    is_pinned: bool
    captions: CaptionPolicy | None
    fields: frozenset[str] | None
    resolution: int | None = None
    """The one that is asked for; of a selection None if there is only one."""
    part: NDArray[np.int64] | None = None
    """Indices of the chosen samples among the complete ones; None for all."""
    dtype: torch.dtype | None = None
    """The dtype of floating point tensors; None for the stored one."""
    joins: tuple[Join, ...] = ()
    """What is read beside the rows: joined data sets, and the parts of a published one."""

    @classmethod
    def parse(
        cls,
        layout: Layout,
        name: str,
        generation: int,
        *,
        latents: LatentsAs,
        captions: CaptionPolicy | Choose | None,
        fields: Collection[str] | None,
        dtype: torch.dtype | None,
        resolution: int | None,
        seed: int,
        is_pinned: bool,
    ) -> "Self":
        """Parse the arguments of a CachedDataset. Raises BadInput."""
        if isinstance(fields, str):
            raise BadInput(f"fields must be a set of names: fields={{{fields!r}}}", option="fields")
        return cls(
            layout,
            name,
            generation,
            latents,
            as_whole("seed", seed, least=0),
            is_pinned,
            captions=None if captions is None else CaptionPolicy.parse(captions),
            fields=None if fields is None else frozenset(as_text("a field", one) for one in as_many("fields", fields, "a set of names")),
            resolution=None if resolution is None else as_whole("resolution", resolution, least=1),
            dtype=as_dtype(dtype),
        )

    @property
    def called(self) -> str:
        """The data set's name and store, for messages."""
        return called(self.layout, self.name)


def called(layout: Layout, name: str) -> str:
    """The name of a data set and its store, for messages."""
    return f"the data set {name!r} of {layout.shown}"


def join_all(reader: Reader, catalog: Catalog, options: DataOptions, joined: Mapping[str, Catalog]) -> tuple[Catalog, DataOptions]:
    """Join data sets to a catalog. Returns the catalog as rows and columns, and the options with the joins. Raises as `Join.of`."""
    found: list[Join] = []
    counts: int | NDArray[np.int64] = 1
    resolution: int | None = None
    if catalog.made not in HAVE_SOURCES:
        own, catalog = Join.of_itself(reader, catalog), without_parts(catalog)
        found = [own] if own.columns else []
    elif joined:
        resolution = chosen_resolution(catalog, options.resolution)
        counts = count_variants(catalog, trained_column(catalog, resolution, options.latents), resolution)
    found += [Join.of(reader, name, one, catalog, counts, resolution=resolution) for name, one in joined.items()]
    return catalog, replace(options, joins=tuple(found))


class Chosen(NamedTuple):
    """The samples of a batch in an epoch, by column."""

    rows: Sequence[int]
    ids: list[str]
    captions: Sequence[int | None]
    """Number of each sample's caption; None for the empty one."""
    variants: Sequence[int]
    """Number of the picture's variant for each sample."""


class Selection:
    """The rows and columns of one catalog that a data set returns."""

    def __init__(
        self, catalog: Catalog, complete: NDArray[np.int64], options: DataOptions, epoch: Epoch, *, stacked: frozenset[str] | None = None
    ) -> None:
        """Select from the `complete` rows, for which every encoder succeeded. `stacked` is None if not known yet."""
        self.options = options
        self.epoch = epoch
        self.catalog = catalog
        self.complete = complete
        self.rows = complete if options.part is None else complete[options.part]
        self.row_numbers: memoryview[int] = self.rows.data
        """The same rows, faster to read a few at a time."""
        resolution, form = options.resolution, options.latents
        self.pictures = trained_column(catalog, resolution, form)
        """The column that buckets come from, even if it is not returned."""
        beside = [column for join in options.joins for column in join.columns]
        texts, pictures, controls = text_columns(catalog), self.pictures, control_columns(catalog, resolution, form)
        masks, (conditions, embeds) = mask_column(catalog, resolution, pictures), condition_columns(catalog, resolution)
        of_pictures = {name for name, column in ((LATENTS, pictures), (MASK, masks)) if column is not None}
        of_pictures |= {one.name for one in (*controls, *conditions)}
        of_texts = {name for one in (*texts, *embeds) for name in one.block.names()}
        check_names([name for column in beside for name in column.tensors], of_pictures | of_texts)
        self.fields = chosen_fields([*texts, *embeds, *beside], of_pictures, options.fields)
        self.texts = self._returned(texts)
        self.embeds = self._returned(embeds)
        """Embeddings of images, whose variants are those of the picture or video."""
        self.joined = self._returned(beside)
        """Parts of joined data sets, whose variants are those too."""
        self.latents = pictures if LATENTS in self.fields else None
        self.conditions = [one for one in conditions if one.name in self.fields]
        self.controls = [one for one in controls if one.name in self.fields]
        """Latents of control images and references, of which a sample may have several."""
        self.masks = masks if MASK in self.fields else None
        self.variant_counts = count_variants(catalog, pictures, resolution)
        """Number of variants of each picture, or of clips of each video; an array by row if these differ."""
        check_form(None if self.latents is None else self.latents.block, form)
        if stacked is None:
            decides = pictures.column if pictures is not None else None
            stacked = frozenset(one.name for one in self.controls if can_be_stacked(one.column, decides, self.rows))
        self.stacked = stacked
        """The names of `controls` of which each sample has exactly one, so that they can be stacked."""
        extras = catalog.extras
        if isinstance(extras, Strings):
            self.has_extras = extras.size_bytes > len(_NO_EXTRAS) * len(extras)  # any other text is longer
        else:
            self.has_extras = bool(catalog.values) or any(text != _NO_EXTRAS for text in extras)
        self.encoded = CaptionPolicy()
        """The policy with which the catalog was encoded, if there is one to choose captions."""
        if options.captions is not None:  # if the catalog does not record it: "all" if a sample has several captions, else "first"
            has_several = bool((np.diff(np.asarray(catalog.captions_at, dtype=np.int64)) > 1).any())
            self.encoded = CaptionPolicy.parse(catalog.texts or ("all" if has_several else "first"))

    @classmethod
    def of(cls, catalog: Catalog, options: DataOptions, epoch: Epoch) -> "Selection":
        """Select all complete rows, at the resolution that is asked for. Raises BadInput, FormatError."""
        check_variants(catalog)
        options = replace(options, resolution=chosen_resolution(catalog, options.resolution))
        complete = complete_rows(catalog)
        for join in options.joins:
            complete = complete[join.is_there[complete]]
        return cls(catalog, complete, options, epoch)

    @cached_property
    def missing(self) -> Mapping[str, Sequence[str]]:
        """By joined data set, the ids of samples that are complete but for its parts."""
        complete, ids = complete_rows(self.catalog), self.catalog.ids
        found: dict[str, dict[str, None]] = {}
        for join in self.options.joins:
            rows: list[int] = complete[~join.is_there[complete]].tolist()
            if rows:
                lack = found.setdefault(join.data_set, dict[str, None]())  # which may be joined twice, in two generations
                lack.update((ids[row], None) for row in rows)
        return {data_set: list(lack) for data_set, lack in found.items()}

    @property
    def lacking(self) -> list[str]:
        """Which samples are complete but for the parts of joined data sets, and why, in words."""
        complete, ids = complete_rows(self.catalog), self.catalog.ids
        return [text for join in self.options.joins for text in join.lacking(complete, ids)]

    def hand_over(self) -> dict[str, Any]:
        """What `take_over` needs in another process: options, the shared epoch, and what is known about all rows. No rows."""
        complete = None if len(self.complete) == len(self.catalog) else self.complete
        return {
            "options": self.options,
            "epoch": self.epoch,
            "catalog": None if self.catalog.made in HAVE_SOURCES else self.catalog,  # its state may lie between two files
            "digest": self.catalog.digest,
            "complete": complete,
            "stacked": self.stacked,
        }

    @classmethod
    def take_over(cls, state: Mapping[str, Any], layout: Layout) -> "Selection":
        """Open the same catalog. It was checked already, so rows are read when they are used. Raises FormatError for another catalog."""
        options: DataOptions = state["options"]
        path, catalog = layout.catalog(options.name, options.generation), state["catalog"]
        if catalog is None:
            catalog = open_catalog(path, generation=options.generation, digest=state["digest"])
        complete = state["complete"] if state["complete"] is not None else np.arange(len(catalog), dtype=np.int64)
        return cls(catalog, complete, options, state["epoch"], stacked=state["stacked"])

    @property
    def recipes(self) -> dict[str, Recipe]:
        """By encoder, the recipes of the returned tensors."""
        returned = (*self.texts, self.latents, *self.conditions, *self.embeds, *self.controls)
        return {part.column.encoder: self.catalog.recipes[part.column.fingerprint] for part in returned if part is not None}

    @property
    def has_lists(self) -> bool:
        """Whether samples have lists of control latents or references, as not each has exactly one."""
        return any(one.name not in self.stacked for one in self.controls)

    def _returned(self, columns: Sequence[TextColumn]) -> list[TextColumn]:
        return [replace(one, block=one.block.only(self.fields)) for one in columns if set(one.block.fields()) & self.fields]

    def select(self, indices: NDArray[np.int64]) -> "Selection":
        """The samples at these indices, with their own epoch. Controls keep the form of the whole, so that parts can be mixed."""
        part = indices if self.options.part is None else self.options.part[indices]
        options = replace(self.options, part=part)
        return Selection(self.catalog, self.complete, options, Epoch(self.epoch.get()), stacked=self.stacked)

    def cast(self, dtype: torch.dtype | None) -> "Selection":
        """The same samples in another dtype, with the same epoch."""
        options = replace(self.options, dtype=dtype)
        return Selection(self.catalog, self.complete, options, self.epoch, stacked=self.stacked)

    def check_captions(self, holds: Callable[[Key], bool]) -> None:
        """Check that the policy needs only encoded captions. Raises BadInput, MissingEntry, FormatError."""
        policy = self.options.captions
        if policy is None or not len(self.rows):
            return
        if difference := policy.differs_from(self.encoded):
            raise BadInput(
                f"the caption policy needs texts that were not encoded: {difference}; run `cachestore precompute` (or `cs.precompute`)"
                " again with this policy as captions=, which encodes only what is new",
                option="captions",
            )
        if any(list(text.column.at) != list(self.catalog.captions_at) for text in self.texts):
            raise FormatError("it does not have one entry for each caption; run `cachestore precompute` again")
        if policy.dropout:
            self.refuse_text_of_pictures()
        if policy.dropout and not all(holds(key_of_caption(text, "")) for text in self.texts):
            raise MissingEntry(
                "the caption policy drops captions, but the empty caption is not encoded; run `cachestore precompute` with it as --captions"
            )

    def refuse_text_of_pictures(self) -> None:
        """Raise BadInput if text encoders saw each sample's pictures, so that captions have no embeddings of their own."""
        if not any(IMAGES in text.column.options for text in self.texts):
            return
        raise BadInput(
            "its text encoder saw each sample's own pictures, so captions have no embeddings without them; to use other captions,"
            " such as empty ones, encode a manifest that has them instead of the samples' own, under another --name"
        )

    @property
    def digest(self) -> str:
        """As `CachedDataset.digest`."""
        options, digest = self.options, self.catalog.digest
        if options.resolution is not None:
            digest = digest_parts("cachestore-resolution", digest, str(options.resolution)).hex()
        if options.joins:
            digest = digest_parts("cachestore-joins", digest, *(join.digest for join in options.joins)).hex()
        if options.part is not None:
            digest = digest_parts("cachestore-selection", digest, options.part.astype("<i8").tobytes()).hex()
        return digest

    @property
    def content(self) -> dict[str, Any]:
        """What decides the values of its samples, by name, as JSON."""
        options = self.options
        policy = None if options.captions is None else {one.name: getattr(options.captions, one.name) for one in fields(options.captions)}
        return {
            "digest": self.digest,
            "resolution": options.resolution,
            "joined data sets": {join.name: [join.data_set, join.generation, join.digest] for join in options.joins},
            "captions": policy,
            "latents": options.latents,
            "fields": sorted(self.fields),
            "dtype": None if options.dtype is None else str(options.dtype),
            "seed": options.seed,
        }

    def source_weights(self) -> tuple[list[float], list[list[int]]]:
        """As `CachedDataset.source_weights`."""
        indices: dict[tuple[str, float], list[int]] = {}
        rows: list[int] = self.rows.tolist()
        for index, row in enumerate(rows):
            extras: Mapping[str, Any] = json.loads(self.catalog.extras[row])
            weight = extras.get(SOURCE_WEIGHT, 1.0)  # a manifest may have a column of this name, with any value
            owner = str(extras.get(SOURCE, "")), weight if isinstance(weight, float) and weight >= 0 else 1.0
            indices.setdefault(owner, []).append(index)
        return [weight for _source, weight in indices], list(indices.values())

    def rows_at(self, indices: Sequence[SupportsIndex]) -> list[int]:
        """The rows of these samples. Raises IndexError if there is no such sample, BadInput if it is not an index."""
        rows = self.row_numbers
        numbers: list[int] = []
        try:
            numbers += map(operator.index, indices)
            return list(map(rows.__getitem__, numbers))
        except TypeError:
            for index in indices:
                index_in(index, len(rows))  # raises, and names it
            raise
        except IndexError:
            count = len(rows)
            outside = next(number for number in numbers if not -count <= number < count)
            raise IndexError(f"{self.options.called} has {plural(count, 'sample')}, but none at {outside}: the first is at 0") from None

    @cached_property
    def ids(self) -> Sequence[str]:
        """The samples' ids, in order."""
        rows: list[int] = self.rows.tolist()
        return [self.catalog.ids[row] for row in rows]

    @cached_property
    def _indices(self) -> Mapping[str, int]:
        return {sample_id: len(self.ids) - index for index, sample_id in enumerate(reversed(self.ids), 1)}  # the first of equal ones

    def index_of(self, sample_id: str) -> int:
        """The index of a sample. Raises BadInput for an unknown id, MissingEntry for a sample that an encoder failed on."""
        normal = normal_id(as_text("sample_id", sample_id))
        if normal in self._indices:
            return self._indices[normal]
        if lacks := next((data_set for data_set, ids in self.missing.items() if normal in ids), None):
            raise MissingEntry(f"sample {sample_id!r} of {self.options.called} is left out, as {lacks!r} has no value that was made for it")
        row = next((row for row, found in enumerate(self.catalog.ids) if found == normal), None)
        if row is not None and not self.catalog.is_complete(row):
            command = self.options.layout.command(f"why {system.quoted(normal)}")
            raise MissingEntry(
                f"sample {sample_id!r} of {self.options.called} could not be encoded completely; run {command} for the reason"
            )
        whose = "this part of " if self.options.part is not None else ""
        listed = f"`data.ids` lists them, the first is {next(iter(self.ids), None)!r}"
        raise BadInput(f"{whose}{self.options.called} has no sample {sample_id!r}; {listed}")

    def choose(self, rows: Sequence[int], epoch: int) -> Chosen:
        """The ids, captions and variants of these rows in an epoch."""
        ids = take(self.catalog.ids, rows)
        policy, at, seed = self.options.captions, self.catalog.captions_at, self.options.seed
        captions: list[int | None] = [0] * len(rows)
        if policy is not None:
            captions = [
                policy.index(at[row + 1] - at[row], self.encoded, seed=seed, epoch=epoch, sample_id=sample_id)
                for row, sample_id in zip(rows, ids, strict=True)
            ]
        if isinstance(self.variant_counts, int) and self.variant_counts == 1:
            return Chosen(rows, ids, captions, [0] * len(rows))
        each = self.variant_counts
        counts: list[int] = [each] * len(rows) if isinstance(each, int) else each[list(rows)].tolist()
        variants = [turn_of(count, epoch, "views", str(seed), sample_id) for count, sample_id in zip(counts, ids, strict=True)]
        return Chosen(rows, ids, captions, variants)

    def text_keys(self, text: TextColumn, chosen: Chosen) -> list[Key]:
        """The key of each row's chosen caption, or of the empty caption. Skips rows without captions."""
        column, rows = text.column, chosen.rows
        if self.options.captions is None:
            return variant_keys(column, rows, [0] * len(rows))
        having = [(row, number) for row, number in zip(rows, chosen.captions, strict=True) if column.count(row)]
        return [key_of_caption(text, "") if number is None else Key(column.keys[column.at[row] + number]) for row, number in having]

    def captions_of(self, chosen: Chosen) -> list[str]:
        """The captions of the embeddings."""
        at, rows = self.catalog.captions_at, chosen.rows
        firsts = [at[row] for row in rows]
        if self.options.captions is None and all(map(operator.lt, firsts, [at[row + 1] for row in rows])):
            return take(self.catalog.captions, firsts)
        those = zip(map(self.catalog.row_captions, rows), chosen.captions, strict=True)
        return [captions[number] if number is not None and captions else "" for captions, number in those]

    def extras_beside(self, rows: Sequence[int], names: Collection[str]) -> Sequence[Mapping[str, Any]]:
        """The extra columns of each sample; empty if none has any. Raises BadInput for one of these names, or another that a batch has."""
        texts = take(self.catalog.extras, rows)
        values = self.catalog.values
        if not values and all(text == _NO_EXTRAS for text in texts):
            return ()
        columns: list[dict[str, Any]] = [json.loads(text) for text in texts]
        for name, column in values.items():
            for row, extras in zip(rows, columns, strict=True):
                extras[name] = column[row]
        used = {*names, *SIZES, *(name for text in (*self.texts, *self.embeds, *self.joined) for name in text.block.names())}
        for row, extras in zip(rows, columns, strict=True):
            if clash := sorted(used.intersection(extras)):
                what = f"sample {self.catalog.ids[row]!r} has its own column {clash[0]!r}, but a batch uses that name itself"
                if self.catalog.made not in HAVE_SOURCES:
                    raise BadInput(f"{what}; publish the column under another name", option="name")
                if clash[0] in {name for text in self.joined for name in text.block.names()}:
                    raise BadInput(f"{what}; choose another name in join", option="join")
                raise BadInput(
                    f"{what}; rename the column in the manifest and run `cachestore precompute` again (nothing is encoded twice)"
                )
        return columns

    @cached_property
    def groups(self) -> Mapping[Bucket, Sequence[int]]:
        """By bucket, the indices of its samples, in order."""
        if len(self.rows) == 0:
            return {}
        if self.pictures is None:
            return {(): list(range(len(self.rows)))}
        return bucket_groups(self.pictures.column, self.rows)


def key_of_caption(text: TextColumn, caption: str) -> Key:
    """The key of a caption for this text encoder, encoded or not."""
    return caption_key(text.column.fingerprint, caption)


def index_in(index: SupportsIndex, count: int) -> int:
    """Turn an index into one from 0 on; negative ones count from the end. Raises IndexError, which ends a loop over a sequence."""
    try:
        return range(count)[operator.index(index)]
    except TypeError:
        refuse("an index of the data set", "a whole number (for an id, data.index(sample_id))", index)
