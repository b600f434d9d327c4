"""A data set as a trainer reads it: one generation of a catalog, with the tensors of its keys. Loads no model, writes nothing.

A sample is complete only if its columns for other resolutions are complete too. Masks and control images have the variant of their picture.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from cachestore.core.arguments import as_many, as_text, as_whole, as_word
from cachestore.core.batch_shapes import LatentsAs
from cachestore.core.captions import CaptionPolicy, Choose
from cachestore.core.errors import BadInput, CacheStoreError
from cachestore.core.keys import Recipe
from cachestore.core.words import plural
from cachestore.store.read.fetch import Io, Verify
from cachestore.store.read.opener import open_reader
from cachestore.store.read.reader import Reader
from cachestore.train.batch_slice import BatchSlice, read_slice_or_samples
from cachestore.train.buffers import BatchBuffers
from cachestore.train.cast import as_dtype
from cachestore.train.cells import Bucket
from cachestore.train.check import check_model
from cachestore.train.collate import SampleDict, collate, refuse_foreign_collate
from cachestore.train.epoch import Epoch
from cachestore.train.features import Feature, features_of
from cachestore.train.joined import Missing, parse_joins, read_joined, read_state, refuse_missing
from cachestore.train.rows import RowReader
from cachestore.train.selection import DataOptions, Selection, index_in, join_all
from cachestore.train.split import split_indices

_log = logging.getLogger(__name__)


class CachedDataset(Dataset[SampleDict]):
    """The samples of one catalog for which every encoder succeeded. For torch's DataLoader, with workers of any start method.

        data = CachedDataset("cache/")
        loader = make_loader(data, batch_size=8)

    It reads the newest catalog at the time of opening, or `generation`, and never changes to another one. A sample has:

    - `latents`, and the outputs of the text encoders under diffusers' names;
    - `caption`, the one of its embeddings, chosen by the policy `captions`; `sample_id`; and the extra columns of its source;
    - `original_size` and `target_size` (height, width), `crop_top_left` (top, left), int64;
    - with control images, `control_latents`: [C, h, w] if each sample of the data set has exactly one and `buckets` keep these of one
      size, else a list of such tensors. A part (`select`) has the form of the whole. The same for references and roles of your own;
    - with conditions, what the pipeline's denoiser takes, such as `condition` and `image_embeds` (docs/families.md);
    - with masks, `mask`: float32 [1, h, w] in 0..1, with the height and width of the latents; ones for a sample without a mask;
    - with videos, `num_frames` (int64, as encoded; 1 for a picture) and `fps` (float32; 0 for a picture).

    Tensors are writable and owned by the sample. They have no batch axis, and text has its own length; `collate` adds padding, masks and
    constants. With a plain DataLoader call `set_epoch` before each epoch, or every epoch draws the same latents; `make_loader` does it.
    Use it from one thread of one process. Forked, spawned and pickled copies open their own files.
    """

    def __init__(
        self,
        path: str | Path,
        name: str = "train",
        *,
        latents: LatentsAs = "sample",
        captions: CaptionPolicy | Choose | None = None,
        fields: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
        generation: int | None = None,
        resolution: int | None = None,
        seed: int = 0,
        verify: Verify = "first",
        io: Io = "pread",
        local: str | Path | None = None,
        limit: int | str | None = None,
        join: Mapping[str, str | tuple[str, int]] | None = None,
        missing: Missing = "error",
    ) -> None:
        """Open a data set of a store.

        Args:
            path: the store's folder, or its address in an object store, such as `s3://bucket/cache`.
            name: the data set's name.
            latents: "sample" draws from the stored moments by (seed, epoch, sample id), "mean" takes their mean; both are normalised as in
                diffusers' training scripts before the noise scheduler. If only a mean, or one sample, is stored, "sample" gives that,
                normalised. "raw" is the mean as the VAE returned it, not normalised; "moments" is mean and log-variance, as stored.
            captions: which caption a sample has in each epoch, and how often the empty one: a pure function of (seed, epoch, sample id).
                Pass the policy that `precompute` got, or one that needs no more captions; "first", "random" and "all" stand for a
                policy that chooses so. Default: the first caption of each sample.
            fields: which of `latents`, `control_latents`, `mask`, conditions and the text encoders' outputs to return; by default all. A
                component of a joined output has a name too, such as `prompt_embeds.text_encoder_2`, and is returned as stored. Only
                entries with a wanted field are read. Captions, ids and extra columns are always returned, sizes with the latents.
            dtype: cast the floating point tensors of entries to this one; by default they have the dtype in which they were stored.
            generation: the catalog's generation; by default the newest. Several ranks must pass the same.
            resolution: which one, if samples were encoded at several. To use all, mix one data set for each (MixedDataset).
            seed: for the noise of latents, the choice of captions, and the turns of crops and mirrored pictures.
            verify: check each entry against its checksum the "first" time it is read here, "always" or "never".
            io: "pread", or "mmap", with which a truncated file kills the process (SIGBUS).
            local: for an address: the folder for copies of what is read, for later epochs and other processes; default CACHESTORE_LOCAL.
            limit: for an address: most bytes in that folder, or a text such as "200GB"; 0 keeps no values. By default nine tenths of
                what is free on the disk. What has no room is downloaded in every epoch.
            join: published data sets of the same store whose tensors samples have too, by sample id: `{"dino": "train/dino"}`, or
                `{"dino": ("train/dino", 3)}` for its generation 3. A sample has the tensor as `dino`; several of an entry as
                `dino.NAME`, those of several parts as `dino.PART`. They are returned as stored, or in `dtype`.
            missing: "error" if a sample lacks a part of a joined data set, or "drop" to leave it out: `missing` then lists them.

        Raises:
            StoreNotFound: there is no store at that path.
            BadInput: the name, generation, resolution, field, joined data set or such latents do not exist; a sample lacks a part of a
                joined one; there are several resolutions and none was chosen; dtype is none to cast to; or the policy needs captions that
                were not encoded.
            MissingEntry: the policy drops captions, but the empty caption is not stored.
            FormatError: the catalog is damaged, or was made by a newer version.
            RemoteFailed: the object store refuses, or does not answer.
            WriteFailed: the local folder cannot be written.
            MissingExtra: for an address, the extra [objects] is not installed.
        """
        reader = open_reader(path, verify=verify, io=io, local=local, limit=limit)
        asked = None if generation is None else as_whole("generation", generation, least=0)
        joins = parse_joins(join)
        as_word("missing", missing, get_args(Missing))
        catalog = read_state(reader, as_text("name", name), asked)
        options = DataOptions.parse(
            reader.layout,
            name,
            catalog.generation,
            latents=latents,
            captions=captions,
            fields=fields,
            dtype=dtype,
            resolution=resolution,
            seed=seed,
            is_pinned=asked is not None and not any(isinstance(wanted, str) for wanted in joins.values()),
        )
        joined_catalogs = {called: read_joined(reader, wanted) for called, wanted in joins.items()}
        with _Naming(options.called):
            catalog, options = join_all(reader, catalog, options, joined_catalogs)
            self._read_from(reader, Selection.of(catalog, options, Epoch()))
            if self.missing and missing == "error":
                refuse_missing(self._selection.lacking)
            for lacking in self._selection.lacking if self.missing else ():
                _log.warning('%s: left out, as missing="drop" asks for: %s', options.called, lacking)
            self._selection.check_captions(reader.__contains__)
            joined = (one.column for join in options.joins for one in join.columns)
            reader.make_room_for([*catalog.columns, *joined], options.called)

    def _read_from(self, reader: Reader, selection: Selection) -> None:
        self._reader, self._selection = reader, selection
        self._rows, self._naming = RowReader(reader, selection), _Naming(selection.options.called)

    def _with(self, selection: Selection) -> "CachedDataset":
        """A data set of another selection of the same catalog. It shares the open files."""
        other = CachedDataset.__new__(CachedDataset)
        other._read_from(self._reader, selection)  # noqa: SLF001 - its own class
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Paths, options, the shared epoch, and what is known about all rows. No rows and no descriptors."""
        return {"reader": self._reader, "selection": self._selection.hand_over()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same catalog in another process."""
        with _Naming(state["selection"]["options"].called):
            self._read_from(state["reader"], Selection.take_over(state["selection"], state["reader"].layout))

    def __repr__(self) -> str:
        root = self._reader.layout.shown
        return f"CachedDataset({root!r}, {self.name!r}, generation={self.generation}: {plural(len(self), 'sample')})"

    def __len__(self) -> int:
        """How many samples are complete."""
        return len(self._selection.rows)

    def __getitem__(self, index: SupportsIndex) -> SampleDict:
        """Return one sample. Raises IndexError, MissingEntry, CorruptEntry."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Return the samples of a batch, read in the order in which they lie on disk. A DataLoader calls this; the list may be empty.

        They are of the epoch that a BucketBatchSampler gave the indices, else of the data set's.
        """
        refuse_foreign_collate(inspect.currentframe())
        rows, epoch = self._selection.rows_at(indices), self._selection.epoch.of(indices)
        with self._naming:
            return self._rows.samples(rows, epoch)

    def collate(self, samples: Sequence[SampleDict]) -> dict[str, Any]:
        """Make a batch: a plain dict of contiguous writable tensors and lists. Raises BadInput for no samples, or for mixed buckets."""
        return collate(samples, [text.block for text in self._selection.texts])

    def read_batch(self, indices: Sequence[SupportsIndex], *, into: BatchBuffers | None = None) -> dict[str, Any]:
        """Return `data.collate(data.__getitems__(indices))`, bit for bit but faster, as tensors are read straight into the batch.

        With `into` the tensors are views of those buffers, valid until the next batch; without, they are the caller's own. Several threads
        may read, each into its own buffers. Raises as `collate` and `__getitems__`; the contents of the buffers are then undefined.
        """
        rows, epoch = self._selection.rows_at(indices), self._selection.epoch.of(indices)
        with self._naming:
            batch_slice = self._rows.batch_slice(rows, epoch) if rows else None
            return read_slice_or_samples(batch_slice, into, lambda: self.collate(self._rows.samples(rows, epoch)))

    def prefetch(self, indices: Sequence[SupportsIndex]) -> None:
        """Ask the system to load the entries of these samples, without waiting. Use it for the next batch. Only a hint."""
        self._rows.prefetch(self._selection.rows_at(indices), self._selection.epoch.of(indices))

    def can_prefetch(self, batches: int) -> bool:
        """Whether `prefetch` may be called for a batch that is so many batches later. Never for a store in a folder."""
        return self._reader.can_prefetch(batches)

    def forget_prefetched(self) -> None:
        """Drop what was prefetched and not read."""
        self._reader.forget_prefetched()

    @staticmethod
    def make_buffers(*, pin: bool = False) -> BatchBuffers:
        """Make memory for reading batches one after the other; `pin` as in BatchBuffers."""
        return BatchBuffers(pin=pin)

    def batch_slice(self, indices: Sequence[SupportsIndex]) -> BatchSlice | None:
        """Return the batch slice of these samples, at least one. None if they differ in their fields. Raises IndexError."""
        rows, epoch = self._selection.rows_at(indices), self._selection.epoch.of(indices)
        with self._naming:
            return self._rows.batch_slice(rows, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose latents are drawn, here and in all DataLoader workers. Batches of a BucketBatchSampler have its epoch."""
        self._selection.epoch.set(epoch)

    @property
    def prompts(self) -> Sequence[tuple[str, str]]:
        """(prompt, negative prompt) of each prompt for validation (`precompute --prompts`). `prompt` gives the embeddings of each text."""
        return self._selection.catalog.prompts

    def prompt(self, caption: str) -> dict[str, Any]:
        """Return the embeddings of any encoded caption or prompt as a batch of one, such as `data.prompt("")`.

        Raises MissingEntry if the caption was not encoded, and BadInput without text, or if the encoder saw pictures with captions.
        """
        with self._naming:
            return self.collate([self._rows.outputs_of(caption)])

    def select(self, samples: Iterable[SupportsIndex | str]) -> "CachedDataset":
        """Return a data set of these samples, given by index or id, in this order. It has buckets and shares the open files.

        A sample named twice comes twice in an epoch; the list may be empty. The part has its own epoch. Raises IndexError, or as `index`.
        """
        if isinstance(samples, str):
            raise BadInput(f"select takes several samples; for one sample: data.select([{samples!r}])", option="samples")
        listed = as_many("samples", samples, "several indices or ids")
        indices = [self.index(one) if isinstance(one, str) else index_in(one, len(self._selection.rows)) for one in listed]
        return self._with(self._selection.select(np.asarray(indices, dtype=np.int64)))

    def split(self, share: float, by: str | Callable[[str], Any] = "id", seed: int = 0) -> "tuple[CachedDataset, CachedDataset]":
        """Return two parts, as `select` makes them: the samples that stay, and about this `share` of them, which is held out.

            train, held_out = data.split(0.02)

        A sample's side depends on `seed` and its id alone, or its group: the same on all ranks, and when samples are added. What is held
        out with a share is also held out with a larger one.

        Args:
            share: from 0 to 1; of groups, if `by` makes them.
            by: all samples with the same value come to one side: of "id"; of "caption", the first of each; of an extra column; or of what a
                function returns for an id, such as `lambda id: id.rsplit("/", 1)[0]` for the folder.
            seed: another one holds out others.

        Raises:
            BadInput: no such share, seed or column; or a sample that lacks the column.
        """
        with self._naming:
            stay, held_out = split_indices(self._selection, share, by, seed)
            return self._with(self._selection.select(stay)), self._with(self._selection.select(held_out))

    def with_dtype(self, dtype: torch.dtype | None) -> "CachedDataset":
        """Return this data set, cast to a dtype as with `dtype=`. It shares the epoch and the open files. Raises BadInput."""
        return self._with(self._selection.cast(as_dtype(dtype)))

    def source_weights(self) -> tuple[list[float], list[list[int]]]:
        """By source: how often its samples come in an epoch (by `repeats` and `weight`), and their indices. Without sources, 1 for all.

        Reads the extra columns of every sample. An empty data set has no sources.
        """
        return self._selection.source_weights()

    def check(self, model: str | Path | None = None, *, vae: str | Path | None = None, text_encoder: str | Path | None = None) -> None:
        """Compare a model's files with those that made the returned tensors. Loads no model; reads each of these files once.

        Args:
            model: the model's folder; for a hub model the folder that `snapshot_download` returns.
            vae: the folder or file that `precompute` got as `vae`, if any.
            text_encoder: the folder or file that it got as `text_encoder`, if any.

        Raises:
            RecipeMismatch: files differ or are missing; the message names them.
            BadInput: a path does not exist, or the data set was not made from model files.
        """
        with self._naming:
            if not self.recipes:
                raise BadInput("it was published without a model, so `check` has nothing to compare: leave the call out")
            check_model(self.recipes_in_use, model=model, vae=vae, text_encoder=text_encoder)

    @property
    def name(self) -> str:
        """The data set's name."""
        return self._selection.options.name

    @property
    def generation(self) -> int:
        """The generation of its catalog."""
        return self._selection.catalog.generation

    @property
    def missing(self) -> Mapping[str, Sequence[str]]:
        """By joined data set, the ids of samples that are left out, as it has no value for them, or one of what they were before."""
        return self._selection.missing

    @property
    def joined(self) -> Mapping[str, tuple[str, int]]:
        """By name, the joined data sets and their generations, as `join` takes them."""
        return {one.name: (one.data_set, one.generation) for one in self._selection.options.joins if one.name}

    @property
    def is_pinned(self) -> bool:
        """Whether `generation` was passed, and one for each joined data set, as all ranks of one training must do."""
        return self._selection.options.is_pinned

    @property
    def resolution(self) -> int | None:
        """The resolution in use. None without pictures, or if the data set does not record it."""
        return None if self._selection.pictures is None else self._selection.pictures.column.options.get("resolution")

    @property
    def digest(self) -> str:
        """Digest of the catalog's rows and recipes, and of the chosen resolution and samples, if any."""
        return self._selection.digest

    @property
    def content(self) -> Mapping[str, Any]:
        """What decides the values of its samples, by name, as JSON. Equal for equal stores, wherever they lie."""
        return self._selection.content | {"digest": self.digest}

    @property
    def epoch(self) -> int:
        """The epoch whose latents are drawn."""
        return self._selection.epoch.get()

    @property
    def ids(self) -> Sequence[str]:
        """The samples' ids, in order."""
        return self._selection.ids

    def index(self, sample_id: str) -> int:
        """The index of a sample. Raises BadInput for an unknown id, MissingEntry for a sample that an encoder failed on."""
        return self._selection.index_of(sample_id)

    @property
    def buckets(self) -> Mapping[Bucket, Sequence[int]]:
        """By bucket, the indices of its samples, in order. Pictures have (width, height); samples without one are under ()."""
        return self._selection.groups

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipe of each encoder, by the encoder's name (`text`, `latents`)."""
        return {column.encoder: self._selection.catalog.recipes[column.fingerprint] for column in reversed(self._selection.catalog.columns)}

    @property
    def recipes_in_use(self) -> Mapping[str, Recipe]:
        """As `recipes`, but only for encoders whose tensors are returned. Masks are made without a model."""
        return self._selection.recipes

    @property
    def fields(self) -> frozenset[str]:
        """The names of the latents and text outputs that are returned: the `fields` that were passed, else all outputs."""
        return self._selection.fields

    @property
    def features(self) -> dict[str, Feature]:
        """Dtype and shape of each tensor that a batch may have, by name, as the recipes say. Reads no entry.

        Shapes include the batch axis, which samples do not have; their text has its own length. Masks of text and constants come with the
        batch only. A list of control latents has no shape. What all samples of a batch lack, such as a picture, is missing in it.
        """
        return features_of(self._selection)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to which floating point tensors are cast; None for the stored one."""
        return self._selection.options.dtype

    @property
    def latents_form(self) -> LatentsAs:
        """The form of the returned latents."""
        return self._selection.options.latents

    @property
    def has_control_lists(self) -> bool:
        """Whether samples have lists of control latents, as not each has exactly one."""
        return self._selection.has_lists

    @property
    def mask_name(self) -> str | None:
        """The pipeline's name for the mask of `prompt_embeds`; None for models without one."""
        return next((text.block.mask_name for text in self._selection.texts if text.block.mask_name is not None), None)


def reader_of(data: CachedDataset) -> Reader:
    """Return the reader of the data set's store."""
    return data._reader  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - this module's own class


class _Naming:
    """Puts the data set's name before our error messages, as a trainer may read several. In messages below, `it` is the data set.

    Not a generator, which would take longer than all other steps that a batch does once.
    """

    __slots__ = ("called",)

    def __init__(self, called: str) -> None:
        self.called = called

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CacheStoreError):
            raise self._named(error) from error  # no local holds it: its traceback would keep the batch's memory until a collection

    def _named(self, error: CacheStoreError) -> CacheStoreError:
        named = type(error)(f"{self.called}: {error}")
        if isinstance(named, BadInput) and isinstance(error, BadInput):
            named.option = error.option
        return named
