"""A data set as a trainer reads it: one catalog, pinned, with the tensors behind its keys. Loads no model, takes no lock, writes nothing.

Of several resolutions one is handed out; the columns of the others count for which samples are complete. Of several views of a picture
(crops, mirrored or not) a sample has one in each epoch, and its mask and control images the same one.
"""

import json
import operator
import shlex
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from cachestore.core.arguments import as_many, as_text, as_whole, refuse
from cachestore.core.captions import CaptionPolicy, Choose
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, CacheStoreError, FormatError, MissingEntry, RecipeMismatch
from cachestore.core.inputs import SHOWN, SOURCE, SOURCE_WEIGHT, caption_key, cells_each
from cachestore.core.keys import Key, Recipe, digest_parts
from cachestore.core.samples import CONTROL, MASK
from cachestore.core.tensors import to_torch
from cachestore.files.paths import Layout
from cachestore.files.table import take
from cachestore.loading.assemble import ControlsPart, LatentsPart, MaskPart, Part, TextPart
from cachestore.loading.buffers import BatchBuffers
from cachestore.loading.check import differing_files
from cachestore.loading.collate import SampleDict, collate
from cachestore.loading.columns import (
    NO_EXTRAS,
    SIZES,
    Bucket,
    batch_clips,
    batch_sizes,
    cells_at,
    complete_rows,
    has_extras,
    is_one_a_bucket,
    keys_at,
    packed_buckets,
    sizes_of,
    unpacked,
)
from cachestore.loading.epoch import Epoch
from cachestore.loading.latents import LatentsAs, check_form, noise_for, noise_seed, read_latents
from cachestore.loading.masks import mask_shape, read_mask
from cachestore.loading.order import turn_of
from cachestore.loading.share import Share, read_share
from cachestore.loading.texts import read_outputs
from cachestore.loading.wanted import (
    CAPTION,
    LatentsColumn,
    MaskColumn,
    TextColumn,
    check_views,
    chosen_fields,
    chosen_resolution,
    latents_column,
    mask_column,
    text_columns,
    trained_column,
    views_of,
)
from cachestore.storage.catalog import Catalog, KeyColumn, list_generations, list_names, open_catalog, read_catalog
from cachestore.storage.fetch import Io, Verify
from cachestore.store.reader import Reader

CONTROL_LATENTS: Final = "control_latents"

SAMPLE_ID: Final = "sample_id"

LATENTS: Final = "latents"
"""What pictures give to a batch."""

_NAMED_FILES: Final = 5


@dataclass(frozen=True, slots=True)
class _Options:
    name: str
    generation: int
    latents: LatentsAs
    seed: int
    is_pinned: bool
    captions: CaptionPolicy | None
    fields: frozenset[str] | None
    resolution: int | None = None
    """None where there is but one."""
    selection: NDArray[np.int64] | None = None
    """Which of the complete samples; None for all."""


class _Asked(NamedTuple):
    """The samples of a batch, column by column."""

    rows: Sequence[int]
    ids: list[str]
    texts: Sequence[int | None]
    """Which of its captions each has now."""
    views: Sequence[int]
    """Which view of its picture."""


class CachedDataset(Dataset[SampleDict]):
    """The samples of one catalog for which every encoder succeeded. For torch's DataLoader, with workers of any start method.

        data = CachedDataset("cache/")
        loader = DataLoader(data, batch_sampler=BucketBatchSampler(data, batch_size=8), collate_fn=data.collate, num_workers=4)

    The catalog is the one that was newest when the data set was opened, or `generation`, for this object's life. A sample has
    `latents`, the text encoders' outputs by diffusers' names, `caption` (the one that its embeddings are of, by the policy `captions`),
    `sample_id`, `original_size`, `crop_top_left`, `target_size` ((height, width) and (top, left), int64), and the extra columns of its
    source. Where that has control images there is `control_latents`: [C, h, w] where each sample of the data set has exactly one and
    `buckets` keep them of one size, else a list of such, in a part (`select`) as in its whole. Where it has masks there is `mask`, float32
    [1, h, w] in 0..1, of the latents' height and width; of a sample without one it is 1 everywhere. Where it has videos there are
    `num_frames` (int64, as encoded, 1 of a picture beside them) and `fps` (float32, 0 of such a picture). Its tensors are writable and its
    own, without a batch axis, text at its own length; `collate` adds padding, masks and constants. With plain DataLoaders call `set_epoch`
    before each epoch, or every epoch draws the same latents; BucketBatchSampler does it for you.

    Belongs to one thread of one process; forked, spawned and pickled copies open their own files.
    """

    def __init__(
        self,
        path: str | Path,
        name: str = "train",
        *,
        latents: LatentsAs = "sample",
        captions: CaptionPolicy | Choose | None = None,
        fields: Collection[str] | None = None,
        generation: int | None = None,
        resolution: int | None = None,
        seed: int = 0,
        verify: Verify = "first",
        io: Io = "pread",
    ) -> None:
        """Open a data set of a store.

        Args:
            path: the store's folder.
            name: the data set's name.
            latents: "sample" draws from the stored moments by (seed, epoch, sample id); "mean" takes their mean; both are normalised as
                diffusers' training scripts do before the noise scheduler. Where only a mean, or one sample, is stored, "sample" is
                that one, normalised. "raw" is the mean as it left the VAE, not normalised; "moments" is mean and log-variance, as stored.
            captions: which caption a sample has in which epoch, and how often the empty one: a pure function of (seed, epoch, sample id).
                Give the policy that was given to `precompute`, or one that asks for no more; "first", "random" and "all" stand for a
                policy that chooses so. By default the first text of each sample.
            fields: what is handed out of `latents`, `control_latents`, `mask` and the text encoders' outputs; by default all of it. A
                component of a joined output has a name too, such as `prompt_embeds.text_encoder_2`, and comes as it was stored. Entries of
                which nothing is wanted are not read; of the others all bytes are, as their checksum covers all. Captions, ids and extra
                columns always come, sizes with the latents.
            generation: of the catalog; the newest by default. Several ranks pass the same.
            resolution: which one, where the samples were encoded at several; for all of them mix one data set of each (MixedDataset).
            seed: of the latents' noise, the choice of captions, and the turns of crops and mirrored pictures.
            verify: check each entry against its checksum the "first" time it is read here, "always" or "never".
            io: "pread", or "mmap", with which a truncated file kills the process (SIGBUS).

        Raises:
            StoreNotFound: no store is at that path.
            BadInput: no such name, generation, resolution or field, several resolutions and none chosen, latents that the store does
                not hold, or a policy whose captions were not encoded.
            MissingEntry: captions are to be dropped, and the empty one is not there.
            FormatError: the catalog is damaged, or was made by a newer version.
        """
        reader = Reader(path, verify=verify, io=io)
        generation = None if generation is None else as_whole("generation", generation, least=0)
        resolution = None if resolution is None else as_whole("resolution", resolution, least=1)
        seed = as_whole("seed", seed, least=0)
        found = _find_generation(reader.layout, as_text("name", name), generation)
        policy = None if captions is None else CaptionPolicy.parse(captions)
        with _Naming(reader.layout.root, name):
            catalog = read_catalog(reader.layout.catalog(name, found), generation=found)
            chosen = chosen_resolution(catalog, resolution)
            check_views(catalog)
            options = _Options(name, found, latents, seed, generation is not None, policy, _as_names(fields), chosen)
            self._show(reader, options, Epoch(), catalog, complete_rows(catalog))
            self._check_captions()

    def _show(
        self,
        reader: Reader,
        options: _Options,
        epoch: Epoch,
        catalog: Catalog,
        complete: NDArray[np.int64],
        *,
        has_one_control: bool | None = None,
    ) -> None:
        self._reader = reader
        self._options = options
        self._epoch = epoch
        self._catalog = catalog
        self._complete = complete
        self._rows = complete if options.selection is None else complete[options.selection]
        self._row_numbers: memoryview[int] = self._rows.data
        """The same, for a few of them at a time: an array takes longer than its numbers."""
        resolution = options.resolution
        self._pictures = trained_column(catalog, resolution)
        """What buckets come from, wanted or not."""
        texts, pictures, controls = text_columns(catalog), self._pictures, latents_column(catalog, CONTROL, resolution)
        masks = mask_column(catalog, resolution, pictures, options.latents)
        made = {name for name, column in ((LATENTS, pictures), (CONTROL_LATENTS, controls), (MASK, masks)) if column is not None}
        self._fields = chosen_fields(texts, made, options.fields)
        self._texts = [replace(text, block=text.block.only(self._fields)) for text in texts if set(text.block.fields()) & self._fields]
        self._latents = pictures if LATENTS in self._fields else None
        self._controls = controls if CONTROL_LATENTS in self._fields else None
        self._masks = masks if MASK in self._fields else None
        self._views = views_of(catalog, pictures, resolution)
        """How many views of each picture, or clip of each video, there are; by row where these differ."""
        check_form(None if self._latents is None else self._latents.block, options.latents)
        if has_one_control is None and self._controls is not None:
            has_one_control = is_one_a_bucket(self._controls.column, pictures.column if pictures is not None else None, self._rows)
        self._has_one_control = bool(has_one_control)
        self._has_extras = has_extras(catalog.extras)
        self._kept = CaptionPolicy() if options.captions is None else _encoded_for(catalog)

    def _check_captions(self) -> None:
        """Refuse a policy that asks for captions which were not encoded. Raises BadInput, MissingEntry, FormatError."""
        policy = self._options.captions
        if policy is None or not len(self._rows):
            return
        if difference := policy.differs_from(self._kept):
            raise BadInput(
                f"it was not encoded for this caption policy: {difference}; run `cachestore precompute` (or"
                " `cs.precompute`) again with captions= this policy, which encodes only what is new"
            )
        if any(list(text.column.at) != list(self._catalog.captions_at) for text in self._texts):
            raise FormatError("it does not have one entry for each caption; run `cachestore precompute` again")
        if policy.dropout:
            self._check_alone()
        if policy.dropout and not all(_caption_key(text, "") in self._reader for text in self._texts):
            raise MissingEntry("the caption policy drops captions, and the empty one is not encoded; run `cachestore precompute` again")

    def _check_alone(self) -> None:
        """Refuse what needs the embeddings of a caption alone, where text encoders were shown each sample's own pictures beside it."""
        if not any(SHOWN in text.column.options for text in self._texts):
            return
        raise BadInput(
            "its text encoder was shown each sample's own pictures, so no caption has embeddings without"
            " them; captions of your own, such as empty ones, are encoded from a manifest that has them in place of the samples' own,"
            " under another --name"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Where to read, what was asked for, the shared epoch, and what was found out of all rows: no rows, no descriptors."""
        found = {"digest": self._catalog.digest, "has_one_control": self._has_one_control}
        complete = None if len(self._complete) == len(self._catalog) else self._complete
        return {"reader": self._reader, "options": self._options, "epoch": self._epoch, "complete": complete, **found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look at the same catalog in another process, at the rows alone that are asked for: it was read and checked in this one."""
        reader, options = state["reader"], state["options"]
        path = reader.layout.catalog(options.name, options.generation)
        with _Naming(reader.layout.root, options.name):
            catalog = open_catalog(path, generation=options.generation, digest=state["digest"])
            complete = state["complete"] if state["complete"] is not None else np.arange(len(catalog), dtype=np.int64)
            self._show(reader, options, state["epoch"], catalog, complete, has_one_control=state["has_one_control"])

    def __len__(self) -> int:
        """How many samples every encoder succeeded for."""
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> SampleDict:
        """One sample. Raises IndexError, MissingEntry, CorruptEntry."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Many samples, read in the order of their places on disk: what a DataLoader calls for a batch. No indices give no samples."""
        rows = self._rows_at(indices)
        with self._named():
            return self._samples(rows)

    def _samples(self, rows: Sequence[int]) -> list[SampleDict]:
        chosen = [self._chosen_text(row) for row in rows]
        views = self._chosen_views(rows)
        keys = [self._row_keys(row, text, view) for row, text, view in zip(rows, chosen, views, strict=True)]
        uses = Counter(key for row_keys in keys for key in row_keys if key is not None)
        wanted = list(uses)
        entries = dict(zip(wanted, self._reader.get_raw(wanted), strict=True))
        uses_left = Counter(uses)
        samples: list[SampleDict] = []
        for row, text, view, row_keys in zip(rows, chosen, views, keys, strict=True):
            uses_left.subtract(key for key in row_keys if key is not None)
            stored = [None if key is None else _tensors(entries[key], copy=uses_left[key] > 0) for key in row_keys]
            samples.append(self._sample(row, text, view, stored))
        return samples

    def collate(self, samples: Sequence[SampleDict]) -> dict[str, Any]:
        """Samples to a batch: a plain dict of contiguous writable tensors and lists. Raises BadInput for none, or for mixed buckets."""
        return collate(samples, [text.block for text in self._texts])

    def read_batch(self, places: Sequence[SupportsIndex], *, into: BatchBuffers | None = None) -> dict[str, Any]:
        """`data.collate(data.__getitems__(places))`, bit for bit and faster: each tensor is read to where it belongs in the batch.

        With `into` the tensors are views of those buffers, good until the next batch is read into them; without, they are the
        caller's own. Several threads of one process may read from one data set at once, each into buffers of its own. Raises as
        `collate` and `__getitems__` do; the buffers then hold anything.
        """
        rows = self._rows_at(places)
        with self._named():
            share = self._share(rows) if rows else None
            batch = read_share(share, into if into is not None else BatchBuffers()) if share is not None else None
            if batch is not None:
                return batch
            batch = self.collate(self._samples(rows))
        return batch if into is None else into.keep(batch)

    def ask_ahead(self, places: Sequence[SupportsIndex]) -> None:
        """Have the entries of these samples brought into memory without waiting for the disk: the next batch, while this one is used.

        A hint that changes no answer: `read_batch` waits for what is not there yet.
        """
        rows = self._rows_at(places)
        chosen = zip(rows, self._chosen_texts(rows), self._chosen_views(rows), strict=True)
        self._reader.ask_ahead([key for row, text, view in chosen for key in self._row_keys(row, text, view) if key is not None])

    @staticmethod
    def make_buffers(*, pin: bool = False) -> BatchBuffers:
        """Memory to read batches into, one after the other; `pin` as for BatchBuffers."""
        return BatchBuffers(pin=pin)

    def _rows_at(self, places: Sequence[SupportsIndex]) -> list[int]:
        rows = self._row_numbers
        indices: list[int] = []
        try:
            indices += map(operator.index, places)
            return list(map(rows.__getitem__, indices))
        except TypeError:
            for place in places:
                _place(place, len(rows))  # raises, and says which
            raise
        except IndexError:
            count = len(rows)
            outside = next(index for index in indices if not -count <= index < count)
            raise IndexError(f"{self.called} has {count} samples, and none at {outside}") from None

    def share(self, places: Sequence[SupportsIndex]) -> Share | None:
        """What these samples, at least one, give to a batch, of other data sets too; None where they are not alike. Raises IndexError."""
        rows = self._rows_at(places)
        with self._named():
            return self._share(rows)

    def _share(self, rows: Sequence[int]) -> Share | None:
        asked = _Asked(rows, take(self._catalog.ids, rows), self._chosen_texts(rows), self._chosen_views(rows))
        parts = self._parts(asked)
        is_alike = all(len(part.keys) == len(rows) for part in parts if not isinstance(part, MaskPart | ControlsPart))
        made = {part.name for part in parts if not isinstance(part, TextPart)}
        pairs: Mapping[str, Sequence[int]] | None = {}
        clips: Mapping[str, torch.Tensor] | None = {}
        if self._latents is not None and LATENTS in made:
            pairs = batch_sizes(self._latents.column, rows, asked.views)
            clips = batch_clips(self._latents.column, rows, asked.views)
        if not is_alike or pairs is None or clips is None:
            return None
        plain: dict[str, list[Any]] = {CAPTION: self._captions(rows, asked.texts), SAMPLE_ID: asked.ids}
        extras = self._extras_beside(rows, {*made, *plain, *clips}) if self._has_extras else ()
        return Share(self._reader, parts, plain, pairs, clips, extras, [text.block for text in self._texts])

    def _extras_beside(self, rows: Sequence[int], made: Collection[str]) -> Sequence[Mapping[str, Any]]:
        """The columns of its own of each sample, under names that nothing else in the batch has; none where no sample has any."""
        if all(text == NO_EXTRAS for text in take(self._catalog.extras, rows)):
            return ()
        taken = {*made, *SIZES, *(name for text in self._texts for name in text.block.names())}
        return [self._extras(row, taken=taken) for row in rows]

    def _captions(self, rows: Sequence[int], chosen: Sequence[int | None]) -> list[str]:
        at, captions = self._catalog.captions_at, self._catalog.captions
        if self._options.captions is None:
            firsts = [at[row] for row in rows]
            if all(map(operator.lt, firsts, [at[row + 1] for row in rows])):
                return take(captions, firsts)
        return [self._caption(row, text) for row, text in zip(rows, chosen, strict=True)]

    def _parts(self, asked: _Asked) -> list[Part]:
        """What each column gives to a batch of these samples; columns that none of them has a cell in give nothing."""
        rows, ids, texts, views = asked
        parts: list[Part] = []
        if self._latents is not None:
            seed, epoch = self._options.seed, self._epoch.get()
            noise = [noise_seed(seed, epoch, sample_id) for sample_id in ids] if self._options.latents == "sample" else []
            keys = _view_keys(self._latents.column, rows, views)
            parts.append(LatentsPart(LATENTS, self._latents.block, self._options.latents, keys, noise))
        if self._masks is not None and (masks := self._mask_part(self._masks, rows, views)) is not None:
            parts.append(masks)
        if self._controls is not None:
            parts.append(self._controls_part(self._controls, rows, views))
        parts += [TextPart(text.block, self._text_keys(text, rows, texts)) for text in self._texts]
        return [part for part in parts if part.keys or isinstance(part, MaskPart | ControlsPart)]

    def _controls_part(self, controls: LatentsColumn, rows: Sequence[int], views: Sequence[int]) -> Part:
        """The control images of these samples: stacked where every sample of the data set has one, else a list of each."""
        column, form = controls.column, self._control_form(controls)
        if self._has_one_control:
            return LatentsPart(CONTROL_LATENTS, controls.block, form, _view_keys(column, rows, views), [])
        each = [_control_keys(column, row, view) for row, view in zip(rows, views, strict=True)]
        return ControlsPart(CONTROL_LATENTS, controls.block, form, [key for keys in each for key in keys], list(map(len, each)))

    def _mask_part(self, masks: MaskColumn, rows: Sequence[int], views: Sequence[int]) -> MaskPart | None:
        """The masks of these samples, and the shape of those that have none, where that is the same for all; None without pictures."""
        having = [place for place, row in enumerate(rows) if masks.column.count(row)]
        shapes = {self._shape_of_no_mask(masks, rows[place]) for place in {*range(len(rows))}.difference(having)}
        if not having and shapes == {None}:
            return None
        shape = shapes.pop() if len(shapes) == 1 else None
        return MaskPart(MASK, masks.patch, _view_keys(masks.column, rows, views), having, len(rows), shape)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch's latents are drawn from now on, here and in all DataLoader workers."""
        self._epoch.set(epoch)

    def prompt(self, caption: str) -> dict[str, Any]:
        """The embeddings of any caption that this data set's encoders have encoded, as a batch of one: `data.prompt("")`.

        Raises MissingEntry for one that was never encoded, BadInput for a data set without text, and for one whose text encoder was
        shown pictures beside each caption: no caption has embeddings of its own there.
        """
        with self._named():
            keys = self._keys_alone(caption)
            entries = self._read_alone(keys, caption)
            outputs = [read_outputs(text.block, _tensors(raw, copy=False)) for text, raw in zip(self._texts, entries, strict=True)]
            return self.collate([{name: tensor for found in outputs for name, tensor in found.items()}])

    def _keys_alone(self, caption: str) -> list[Key]:
        """The key of a caption by itself, of each text encoder. Raises BadInput where it has none."""
        if not self._texts:
            help_text = (
                "`fields` leaves them out" if text_columns(self._catalog) else "run `cachestore precompute` with --encode text,latents"
            )
            raise BadInput(f"it has no text embeddings; {help_text}")
        self._check_alone()
        as_text("caption", caption)
        return [_caption_key(text, caption) for text in self._texts]

    def _read_alone(self, keys: Sequence[Key], caption: str) -> list[Mapping[str, RawTensor]]:
        try:
            return list(self._reader.get_raw(keys))
        except MissingEntry as error:
            raise MissingEntry(
                f"the caption {caption[:60]!r} is not encoded; put it on a line of prompts.txt and run `cachestore precompute prompts.txt"
                " --encode text --name prompts` with the same --model and --store"
            ) from error

    def select(self, samples: Iterable[SupportsIndex | str]) -> "CachedDataset":
        """The data set of some samples, by place or id, in this order: with buckets, for a BucketBatchSampler; open files are shared.

        One that is named twice comes twice in an epoch; none at all is an empty data set. It has an epoch of its own. A part that torch
        has cut has the places: `data.select(part.indices)`. Raises IndexError, and for ids as `index` does.
        """
        if isinstance(samples, str):
            raise BadInput(f"select takes several samples; for one alone: data.select([{samples!r}])")
        listed = as_many("samples", samples, "several places or ids")
        places = [self.index(one) if isinstance(one, str) else _place(one, len(self._rows)) for one in listed]
        chosen = np.asarray(places, dtype=np.int64)
        selection = chosen if self._options.selection is None else self._options.selection[chosen]
        part = CachedDataset.__new__(CachedDataset)
        part._show(  # noqa: SLF001 - its own class
            self._reader,
            replace(self._options, selection=selection),
            Epoch(self.epoch),
            self._catalog,
            self._complete,
            has_one_control=self._has_one_control,  # as the whole hands them out, that parts may be mixed
        )
        return part

    def source_weights(self) -> tuple[list[float], list[list[int]]]:
        """How often the samples of each source come in an epoch by its `repeats` and `weight`, and their places; without sources 1 for all.

        Reads the columns of every sample. An empty data set has no sources.
        """
        places: dict[tuple[str, float], list[int]] = {}
        rows: list[int] = self._rows.tolist()
        for place, row in enumerate(rows):
            extras: Mapping[str, Any] = json.loads(self._catalog.extras[row])
            weight = extras.get(SOURCE_WEIGHT, 1.0)  # a manifest's own column of this name may hold anything
            owner = str(extras.get(SOURCE, "")), weight if isinstance(weight, float) and weight >= 0 else 1.0
            places.setdefault(owner, []).append(place)
        return [weight for _source, weight in places], list(places.values())

    def check(self, model: str | Path | None = None, *, vae: str | Path | None = None, text_encoder: str | Path | None = None) -> None:
        """Compare a model's files with those that made what this data set hands out. Loads nothing; reads each of these files once.

        Args:
            model: the model's folder. Of a hub model the folder that `snapshot_download` returns.
            vae: folder or file that `precompute` was given as `vae`, if it was.
            text_encoder: folder or file that it was given as `text_encoder`, if it was.

        Raises:
            RecipeMismatch: files differ or are missing; the message names them.
            BadInput: no such folder; or what made the data set had no files.
        """
        with self._named():
            found = differing_files(self.recipes_in_use, model=model, vae=vae, text_encoder=text_encoder)
        if found:
            named = "; ".join(found[:_NAMED_FILES]) + ("; …" if len(found) > _NAMED_FILES else "")
            raise RecipeMismatch(
                f"this is not the model that {self.called} was made with: {named}. Train with that model, or run"
                " `cachestore precompute --replace` with this one"
            )

    @property
    def name(self) -> str:
        """The data set's name."""
        return self._options.name

    @property
    def called(self) -> str:
        """What messages call it: its name and its store."""
        return _called(self._reader.layout.root, self.name)

    def _named(self) -> "_Naming":
        return _Naming(self._reader.layout.root, self.name)

    @property
    def generation(self) -> int:
        """Which generation of the catalog this is."""
        return self._catalog.generation

    @property
    def is_pinned(self) -> bool:
        """Whether the generation was asked for, as all ranks of one training must."""
        return self._options.is_pinned

    @property
    def resolution(self) -> int | None:
        """The resolution that is handed out; None of a data set without pictures, or one that does not say it."""
        return None if self._pictures is None else self._pictures.column.options.get("resolution")

    @property
    def digest(self) -> str:
        """Digest of the catalog: of its rows and recipes; and of the resolution and the samples that were chosen, where some were."""
        digest = self._catalog.digest
        if self._options.resolution is not None:
            digest = digest_parts("cachestore-resolution", digest, str(self._options.resolution)).hex()
        if self._options.selection is None:
            return digest
        return digest_parts("cachestore-selection", digest, self._options.selection.astype("<i8").tobytes()).hex()

    @property
    def epoch(self) -> int:
        """The epoch whose latents are drawn."""
        return self._epoch.get()

    @cached_property
    def ids(self) -> Sequence[str]:
        """The samples' ids, in order."""
        rows: list[int] = self._rows.tolist()
        return [self._catalog.ids[row] for row in rows]

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {sample_id: len(self.ids) - place for place, sample_id in enumerate(reversed(self.ids), 1)}  # the first of equal ones

    def index(self, sample_id: str) -> int:
        """The place of a sample. Raises BadInput for an unknown id, MissingEntry for a sample that an encoder failed for."""
        normal = unicodedata.normalize("NFC", as_text("sample_id", sample_id))
        if normal in self._places:
            return self._places[normal]
        row = next((row for row, found in enumerate(self._catalog.ids) if found == normal), None)
        if row is not None and not self._catalog.is_complete(row):
            command = self._reader.layout.command(f"why {shlex.quote(normal)}")
            raise MissingEntry(f"sample {sample_id!r} of {self.called} could not be encoded whole; {command} says why")
        whose = "this part of " if self._options.selection is not None else ""
        listed = f"`data.ids` lists them, the first is {next(iter(self.ids), None)!r}"
        raise BadInput(f"{whose}{self.called} has no sample {sample_id!r}; {listed}")

    @property
    def buckets(self) -> Mapping[Bucket, Sequence[int]]:
        """The places of the samples of each bucket, in order: pictures as (width, height), all samples without one as ()."""
        return self._groups

    @cached_property
    def _groups(self) -> Mapping[Bucket, Sequence[int]]:
        if len(self._rows) == 0:
            return {}
        if self._pictures is None:
            return {(): list(range(len(self._rows)))}
        packed = packed_buckets(self._pictures.column)[self._rows]
        order = np.argsort(packed, kind="stable")
        found, starts = np.unique(packed[order], return_index=True)
        groups = np.split(order, starts[1:])
        return {unpacked(bucket): group.tolist() for bucket, group in zip(found.tolist(), groups, strict=True)}

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipe of each encoder, by the encoder's name: `text`, `latents`."""
        return {column.encoder: self._catalog.recipes[column.fingerprint] for column in reversed(self._catalog.columns)}

    @property
    def recipes_in_use(self) -> Mapping[str, Recipe]:
        """As `recipes`, of the encoders whose tensors are handed out; masks are made without a model."""
        columns = [part.column for part in (*self._texts, self._latents, self._controls) if part is not None]
        return {column.encoder: self._catalog.recipes[column.fingerprint] for column in columns}

    @property
    def fields(self) -> frozenset[str]:
        """What is handed out of the latents and the text encoders' outputs: what `fields` asked for, else all outputs."""
        return self._fields

    @property
    def latents_form(self) -> LatentsAs:
        """The form in which latents are handed out."""
        return self._options.latents

    @property
    def has_control_lists(self) -> bool:
        """Whether samples have lists of control latents, as there is not exactly one for each."""
        return self._controls is not None and not self._has_one_control

    @property
    def mask_name(self) -> str | None:
        """The name of the mask that goes with `prompt_embeds`, as its pipeline calls it; None for models without one."""
        return next((text.block.mask_name for text in self._texts if text.block.mask_name is not None), None)

    def _chosen_text(self, row: int) -> int | None:
        """Which of a row's captions its sample has in this epoch; None for the empty one."""
        if self._options.captions is None:
            return 0
        count = self._catalog.captions_at[row + 1] - self._catalog.captions_at[row]
        options, sample_id = self._options, self._catalog.ids[row]
        return self._options.captions.place(count, self._kept, seed=options.seed, epoch=self._epoch.get(), sample_id=sample_id)

    def _chosen_texts(self, rows: Sequence[int]) -> list[int | None]:
        """As `_chosen_text` of each row."""
        return [0] * len(rows) if self._options.captions is None else [self._chosen_text(row) for row in rows]

    def _chosen_views(self, rows: Sequence[int]) -> list[int]:
        """Which view of its picture the sample of each row has in this epoch."""
        if isinstance(self._views, int) and self._views == 1:
            return [0] * len(rows)
        each: list[int] = [self._views] * len(rows) if isinstance(self._views, int) else self._views[list(rows)].tolist()
        seed, epoch = str(self._options.seed), self._epoch.get()
        ids = take(self._catalog.ids, rows)
        return [turn_of(views, epoch, "views", seed, sample_id) for views, sample_id in zip(each, ids, strict=True)]

    def _row_keys(self, row: int, text: int | None = 0, view: int = 0) -> list[Key | None]:
        """The key of each column handed out, of a text and a view that were chosen; None where this row has no cell."""
        keys = [self._text_key(one, row, text) for one in self._texts]
        for part in (self._latents, self._masks):
            if part is not None:
                column = part.column
                keys.append(Key(column.keys[column.at[row] + view]) if column.count(row) else None)
        return [*keys, *(_control_keys(self._controls.column, row, view) if self._controls is not None else ())]

    def _text_keys(self, texts: TextColumn, rows: Sequence[int], chosen: Sequence[int | None]) -> list[Key]:
        """As `_text_key` of each row, but for rows without one."""
        if self._options.captions is None:
            return _view_keys(texts.column, rows, [0] * len(rows))
        keys = (self._text_key(texts, row, text) for row, text in zip(rows, chosen, strict=True))
        return [key for key in keys if key is not None]

    def _text_key(self, texts: TextColumn, row: int, text: int | None) -> Key | None:
        if not texts.column.count(row):
            return None
        return _caption_key(texts, "") if text is None else Key(texts.column.keys[texts.column.at[row] + text])

    def _caption(self, row: int, text: int | None) -> str:
        captions = self._catalog.row_captions(row)
        return captions[text] if text is not None and captions else ""

    def _sample(self, row: int, text: int | None, view: int, stored: Sequence[Mapping[str, torch.Tensor] | None]) -> SampleDict:
        sample_id = self._catalog.ids[row]
        sample: SampleDict = {}
        rest = list(stored[len(self._texts) :])
        tensors = rest.pop(0) if self._latents is not None else None
        masked = rest.pop(0) if self._masks is not None else None
        if self._latents is not None and tensors is not None:
            noise = noise_for(self._options.seed, self._epoch.get(), sample_id)
            sample[LATENTS] = read_latents(self._latents.block, self._options.latents, tensors, noise)
        if self._masks is not None and (mask := self._mask(self._masks, row, masked)) is not None:
            sample[MASK] = mask
        if self._controls is not None:
            sample[CONTROL_LATENTS] = self._control_latents(self._controls, rest)
        for one, found in zip(self._texts, stored, strict=False):
            sample |= read_outputs(one.block, found) if found is not None else {}
        sample |= {CAPTION: self._caption(row, text), SAMPLE_ID: sample_id}
        if self._latents is not None and tensors is not None:
            sample |= sizes_of(self._latents.column, self._latents.column.at[row] + view)
        return sample | self._extras(row, taken={*sample, *SIZES, *(name for one in self._texts for name in one.block.names())})

    def _mask(self, masks: MaskColumn, row: int, stored: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
        """A sample's mask; 1 everywhere where it has none, and None where it has no picture either."""
        if stored is not None:
            return read_mask(masks.block, stored, masks.patch)
        shape = self._shape_of_no_mask(masks, row)
        return None if shape is None else torch.ones(shape, dtype=torch.float32)

    def _shape_of_no_mask(self, masks: MaskColumn, row: int) -> tuple[int, ...] | None:
        """Of the mask of a sample that has none; None where it has no picture either."""
        column = self._pictures.column if self._pictures is not None else None
        bucket = column.cell(column.at[row]).facts.get("bucket") if column is not None and column.count(row) else None
        if bucket is None:
            return None
        width, height = (side // masks.block.factor for side in bucket[:2])
        return mask_shape((1, height, width), masks.patch)

    def _control_form(self, controls: LatentsColumn) -> LatentsAs:
        """That of the latents, but never drawn: pipelines show the mean of a control image to their denoiser."""
        is_drawn = self._options.latents == "sample" and controls.block.stored == "moments"
        return "mean" if is_drawn else self._options.latents

    def _control_latents(
        self, controls: LatentsColumn, stored: Sequence[Mapping[str, torch.Tensor] | None]
    ) -> torch.Tensor | list[torch.Tensor]:
        form = self._control_form(controls)
        made = [read_latents(controls.block, form, found, torch.Generator()) for found in stored if found is not None]
        return made[0] if self._has_one_control else made

    def _extras(self, row: int, *, taken: set[str]) -> dict[str, Any]:
        extras: dict[str, Any] = json.loads(self._catalog.extras[row])
        clash = sorted(taken.intersection(extras))
        if clash:
            raise BadInput(
                f"sample {self._catalog.ids[row]!r} has a column {clash[0]!r} of its own, and a batch uses that name itself;"
                " rename the column in the manifest and run `cachestore precompute` again (nothing is encoded twice)"
            )
        return extras


def _called(root: Path, name: str) -> str:
    return f"the data set {name!r} of {root}"


class _Naming:
    """Lets our errors say which data set they are about, as a trainer may read several. Functions below say `it`.

    No generator, which would cost a batch more than all else that is done once for it.
    """

    __slots__ = ("name", "root")

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CacheStoreError):
            raise type(error)(f"{_called(self.root, self.name)}: {error}") from error


def _find_generation(layout: Layout, name: str, generation: int | None) -> int:
    generations = list_generations(layout, name)
    if not generations:
        names = ", ".join(map(repr, list_names(layout))) or "none"
        raise BadInput(f"{layout.root} has no data set {name!r}; it has {names} (`cachestore precompute --name` makes one)")
    if generation is None:
        return generations[-1]
    if generation not in generations:
        raise BadInput(f"{_called(layout.root, name)} has no generation {generation}; it has {', '.join(map(str, generations[-8:]))}")
    return generation


def _as_names(fields: Collection[str] | None) -> frozenset[str] | None:
    if isinstance(fields, str):
        raise BadInput(f"fields is a set of names: fields={{{fields!r}}}")
    return None if fields is None else frozenset(as_text("a field", name) for name in as_many("fields", fields, "a set of names"))


def _caption_key(texts: TextColumn, caption: str) -> Key:
    """The key of a caption that an encoder has encoded, or would."""
    return caption_key(texts.column.fingerprint, caption)


def _encoded_for(catalog: Catalog) -> CaptionPolicy:
    """The policy by which a catalog's texts were made; where it does not say so and has several of a sample, they are its captions."""
    has_several = bool((np.diff(np.asarray(catalog.captions_at, dtype=np.int64)) > 1).any())
    return CaptionPolicy.parse(catalog.texts or ("all" if has_several else "first"))


def _view_keys(column: KeyColumn, rows: Sequence[int], views: Sequence[int]) -> list[Key]:
    """The key of the chosen cell of each row, but for rows without one."""
    return keys_at(column, cells_at(column, rows, views))


def _control_keys(column: KeyColumn, row: int, view: int) -> list[Key]:
    """The keys of this view of each of a row's control images."""
    places = range(column.at[row] + view, column.at[row + 1], cells_each(column.options))
    return [Key(column.keys[place]) for place in places]


def _tensors(raw: Mapping[str, RawTensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """Stored bytes as writable tensors of the caller's own: copied where others will use them too, or where they are a view of a file."""
    return to_torch(
        {
            name: (dtype, shape, bytearray(buffer) if copy or memoryview(buffer).readonly else buffer)
            for name, (dtype, shape, buffer) in raw.items()
        }
    )


def _place(index: SupportsIndex, count: int) -> int:
    """A place from 0 on; negative ones count from the end. Raises IndexError, by which Python ends a loop over a sequence."""
    try:
        return range(count)[operator.index(index)]
    except TypeError:
        refuse("a place in the data set", "a whole number (of an id, data.index(sample_id))", index)
