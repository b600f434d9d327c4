"""A data set as a trainer reads it: one catalog, pinned, with the tensors behind its keys. Loads no model, takes no lock, writes nothing.

Columns of other resolutions count for which samples are complete. A sample's mask and control images come in the same view as its picture.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, SupportsIndex

import numpy as np
from torch.utils.data import Dataset

from cachestore.core.arguments import as_many, as_text, as_whole
from cachestore.core.captions import CaptionPolicy, Choose
from cachestore.core.errors import BadInput, CacheStoreError, RecipeMismatch
from cachestore.core.keys import Recipe
from cachestore.files.paths import Layout
from cachestore.loading.buffers import BatchBuffers
from cachestore.loading.check import differing_files
from cachestore.loading.collate import SampleDict, collate
from cachestore.loading.columns import Bucket, complete_rows
from cachestore.loading.epoch import Epoch
from cachestore.loading.features import Feature, features_of
from cachestore.loading.latents import LatentsAs
from cachestore.loading.rows import Rows
from cachestore.loading.selection import Options, Selection, called, place_in
from cachestore.loading.share import Share, read_or
from cachestore.loading.wanted import check_views, chosen_resolution
from cachestore.storage.catalog import list_generations, list_names, open_catalog, read_catalog
from cachestore.storage.fetch import Io, Verify
from cachestore.store.reader import Reader

_NAMED_FILES: Final = 5


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
        with _Naming(called(reader.layout, name)):
            catalog = read_catalog(reader.layout.catalog(name, found), generation=found)
            chosen = chosen_resolution(catalog, resolution)
            check_views(catalog)
            is_pinned, names = generation is not None, _as_names(fields)
            options = Options(reader.layout, name, found, latents, seed, is_pinned, policy, names, chosen)
            self._show(reader, Selection(catalog, complete_rows(catalog), options, Epoch()))
            self._selection.check_captions(reader.__contains__)

    def _show(self, reader: Reader, selection: Selection) -> None:
        self._reader = reader
        self._selection = selection
        self._read = Rows(reader, selection)
        self._named = _Naming(self.called)

    def __getstate__(self) -> dict[str, Any]:
        """Where to read, what was asked for, the shared epoch, and what was found out of all rows: no rows, no descriptors."""
        found = {"digest": self._selection.catalog.digest, "has_one_control": self._selection.has_one_control}
        complete = None if len(self._selection.complete) == len(self._selection.catalog) else self._selection.complete
        return {"reader": self._reader, "options": self._selection.options, "epoch": self._selection.epoch, "complete": complete, **found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Look at the same catalog in another process, at the rows alone that are asked for: it was read and checked in this one."""
        reader, options = state["reader"], state["options"]
        path = reader.layout.catalog(options.name, options.generation)
        with _Naming(options.called):
            catalog = open_catalog(path, generation=options.generation, digest=state["digest"])
            complete = state["complete"] if state["complete"] is not None else np.arange(len(catalog), dtype=np.int64)
            selection = Selection(catalog, complete, options, state["epoch"], has_one_control=state["has_one_control"])
            self._show(reader, selection)

    def __repr__(self) -> str:
        place = str(self._reader.layout.root)
        return f"CachedDataset({place!r}, {self.name!r}, generation={self.generation}: {len(self)} samples)"

    def __len__(self) -> int:
        """How many samples every encoder succeeded for."""
        return len(self._selection.rows)

    def __getitem__(self, index: SupportsIndex) -> SampleDict:
        """One sample. Raises IndexError, MissingEntry, CorruptEntry."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Many samples, read in the order of their places on disk: what a DataLoader calls for a batch. No indices give no samples."""
        rows = self._selection.rows_at(indices)
        with self._named:
            return self._read.samples(rows)

    def collate(self, samples: Sequence[SampleDict]) -> dict[str, Any]:
        """Samples to a batch: a plain dict of contiguous writable tensors and lists. Raises BadInput for none, or for mixed buckets."""
        return collate(samples, [text.block for text in self._selection.texts])

    def read_batch(self, places: Sequence[SupportsIndex], *, into: BatchBuffers | None = None) -> dict[str, Any]:
        """`data.collate(data.__getitems__(places))`, bit for bit and faster: each tensor is read to where it belongs in the batch.

        With `into` the tensors are views of those buffers, good until the next batch is read into them; without, they are the
        caller's own. Several threads of one process may read from one data set at once, each into buffers of its own. Raises as
        `collate` and `__getitems__` do; the buffers then hold anything.
        """
        rows = self._selection.rows_at(places)
        with self._named:
            return read_or(self._read.share(rows) if rows else None, into, lambda: self.collate(self._read.samples(rows)))

    def ask_ahead(self, places: Sequence[SupportsIndex]) -> None:
        """Have the entries of these samples brought into memory without waiting: the next batch, while this one is used. Only a hint."""
        self._read.ask_ahead(self._selection.rows_at(places))

    @staticmethod
    def make_buffers(*, pin: bool = False) -> BatchBuffers:
        """Memory to read batches into, one after the other; `pin` as for BatchBuffers."""
        return BatchBuffers(pin=pin)

    def share(self, places: Sequence[SupportsIndex]) -> Share | None:
        """What these samples, at least one, give to a batch, of other data sets too; None where they are not alike. Raises IndexError."""
        rows = self._selection.rows_at(places)
        with self._named:
            return self._read.share(rows)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch's latents are drawn from now on, here and in all DataLoader workers."""
        self._selection.epoch.set(epoch)

    def prompt(self, caption: str) -> dict[str, Any]:
        """The embeddings of any caption that this data set's encoders have encoded, as a batch of one: `data.prompt("")`.

        Raises MissingEntry for one that was never encoded, BadInput for a data set without text, and for one whose text encoder was
        shown pictures beside each caption: no caption has embeddings of its own there.
        """
        with self._named:
            return self.collate([self._read.outputs_of(caption)])

    def select(self, samples: Iterable[SupportsIndex | str]) -> "CachedDataset":
        """The data set of some samples, by place or id, in this order: with buckets, for a BucketBatchSampler; open files are shared.

        One that is named twice comes twice in an epoch; none at all is an empty data set. It has an epoch of its own. A part that torch
        has cut has the places: `data.select(part.indices)`. Raises IndexError, and for ids as `index` does.
        """
        if isinstance(samples, str):
            raise BadInput(f"select takes several samples; for one sample: data.select([{samples!r}])")
        listed = as_many("samples", samples, "several indices or ids")
        places = [self.index(one) if isinstance(one, str) else place_in(one, len(self._selection.rows)) for one in listed]
        part = CachedDataset.__new__(CachedDataset)
        part._show(self._reader, self._selection.only(np.asarray(places, dtype=np.int64)))  # noqa: SLF001 - its own class
        return part

    def source_weights(self) -> tuple[list[float], list[list[int]]]:
        """How often the samples of each source come in an epoch by its `repeats` and `weight`, and their places; without sources 1 for all.

        Reads the columns of every sample. An empty data set has no sources.
        """
        return self._selection.source_weights()

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
        with self._named:
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
        return self._selection.options.name

    @property
    def called(self) -> str:
        """What messages call it: its name and its store."""
        return self._selection.options.called

    @property
    def generation(self) -> int:
        """Which generation of the catalog this is."""
        return self._selection.catalog.generation

    @property
    def is_pinned(self) -> bool:
        """Whether the generation was asked for, as all ranks of one training must."""
        return self._selection.options.is_pinned

    @property
    def resolution(self) -> int | None:
        """The resolution that is handed out; None of a data set without pictures, or one that does not say it."""
        return None if self._selection.pictures is None else self._selection.pictures.column.options.get("resolution")

    @property
    def digest(self) -> str:
        """Digest of the catalog: of its rows and recipes; and of the resolution and the samples that were chosen, where some were."""
        return self._selection.digest

    @property
    def epoch(self) -> int:
        """The epoch whose latents are drawn."""
        return self._selection.epoch.get()

    @property
    def ids(self) -> Sequence[str]:
        """The samples' ids, in order."""
        return self._selection.ids

    def index(self, sample_id: str) -> int:
        """The place of a sample. Raises BadInput for an unknown id, MissingEntry for a sample that an encoder failed for."""
        return self._selection.place_of(sample_id)

    @property
    def buckets(self) -> Mapping[Bucket, Sequence[int]]:
        """The places of the samples of each bucket, in order: pictures as (width, height), all samples without one as ()."""
        return self._selection.groups

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """The recipe of each encoder, by the encoder's name: `text`, `latents`."""
        return {column.encoder: self._selection.catalog.recipes[column.fingerprint] for column in reversed(self._selection.catalog.columns)}

    @property
    def recipes_in_use(self) -> Mapping[str, Recipe]:
        """As `recipes`, of the encoders whose tensors are handed out; masks are made without a model."""
        columns = [part.column for part in (*self._selection.texts, self._selection.latents, self._selection.controls) if part is not None]
        return {column.encoder: self._selection.catalog.recipes[column.fingerprint] for column in columns}

    @property
    def fields(self) -> frozenset[str]:
        """What is handed out of the latents and the text encoders' outputs: what `fields` asked for, else all outputs."""
        return self._selection.fields

    @property
    def features(self) -> dict[str, Feature]:
        """Dtype and shape of each tensor that a batch may hold, by name, as the recipes tell them; no entry is read.

        A sample has no first axis, and text at its own length; masks of text and constants come with the batch. Lists of control
        latents have the dtype of each, and no shape. A batch of samples that all lack something, such as a picture, lacks its name.
        """
        return features_of(self._selection)

    @property
    def latents_form(self) -> LatentsAs:
        """The form in which latents are handed out."""
        return self._selection.options.latents

    @property
    def has_control_lists(self) -> bool:
        """Whether samples have lists of control latents, as there is not exactly one for each."""
        return self._selection.controls is not None and not self._selection.has_one_control

    @property
    def mask_name(self) -> str | None:
        """The name of the mask that goes with `prompt_embeds`, as its pipeline calls it; None for models without one."""
        return next((text.block.mask_name for text in self._selection.texts if text.block.mask_name is not None), None)


class _Naming:
    """Lets our errors say which data set they are about, as a trainer may read several. Functions below say `it`.

    No generator, which would cost a batch more than all else that is done once for it.
    """

    __slots__ = ("called",)

    def __init__(self, called: str) -> None:
        self.called = called

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CacheStoreError):
            raise type(error)(f"{self.called}: {error}") from error


def _find_generation(layout: Layout, name: str, generation: int | None) -> int:
    generations = list_generations(layout, name)
    if not generations:
        names = ", ".join(map(repr, list_names(layout))) or "none"
        raise BadInput(f"{layout.root} has no data set {name!r}; it has {names} (`cachestore precompute --name` makes one)")
    if generation is None:
        return generations[-1]
    if generation not in generations:
        raise BadInput(f"{called(layout, name)} has no generation {generation}; it has {', '.join(map(str, generations[-8:]))}")
    return generation


def _as_names(fields: Collection[str] | None) -> frozenset[str] | None:
    if isinstance(fields, str):
        raise BadInput(f"fields must be a set of names: fields={{{fields!r}}}")
    return None if fields is None else frozenset(as_text("a field", name) for name in as_many("fields", fields, "a set of names"))
