"""Read rows of a data set with the tensors of their keys: as samples, or as a batch slice."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from cachestore.core.arguments import as_text
from cachestore.core.errors import BadInput, MissingEntry
from cachestore.core.forked import in_one_thread
from cachestore.core.samples import MASK
from cachestore.core.tensors import RawTensor, to_torch
from cachestore.store.read.reader import Reader
from cachestore.train.assemble import ControlsPart, LatentsPart, MaskPart, Part, TextPart
from cachestore.train.batch_slice import BatchSlice
from cachestore.train.cast import cast
from cachestore.train.collate import ReadSample, SampleDict
from cachestore.train.columns import batch_clips, batch_sizes, control_keys, sizes_of, variant_keys
from cachestore.train.latents import mask_shape, noise_seed, read_latents, read_mask
from cachestore.train.selection import SAMPLE_ID, Chosen, Selection, key_of_caption
from cachestore.train.texts import read_outputs
from cachestore.train.wanted import CAPTION, LATENTS, LatentsColumn, MaskColumn, text_columns


class RowReader:
    """Reads rows of a selection."""

    def __init__(self, reader: Reader, selection: Selection) -> None:
        self._reader = reader
        self._selection = selection

    @in_one_thread
    def samples(self, rows: Sequence[int], epoch: int | None = None) -> list[SampleDict]:
        """Return one sample for each row in an epoch (default: the data set's). Raises MissingEntry, CorruptEntry."""
        epoch = self._selection.epoch.get() if epoch is None else epoch
        chosen = self._selection.choose(rows, epoch)
        keys = self._selection.row_keys(chosen)
        uses = Counter(key for row_keys in keys for key in row_keys if key is not None)
        entries = dict(zip(uses, self._reader.get_raw(list(uses)), strict=True))
        stored = ([None if key is None else own_tensors(entries[key], copy=uses[key] > 1) for key in row_keys] for row_keys in keys)
        return [self._sample(*each, epoch=epoch) for each in zip(*chosen, stored, strict=True)]

    def prefetch(self, rows: Sequence[int], epoch: int) -> None:
        """Ask the system to load the entries of these rows in an epoch, without waiting."""
        keys = self._selection.row_keys(self._selection.choose(rows, epoch))
        self._reader.prefetch([key for row_keys in keys for key in row_keys if key is not None])

    def batch_slice(self, rows: Sequence[int], epoch: int) -> BatchSlice | None:
        """Return the batch slice of these rows in an epoch, at least one. None if they differ in their fields."""
        selection, chosen = self._selection, self._selection.choose(rows, epoch)
        parts = self._parts(chosen, epoch)
        is_alike = all(len(part.keys) == len(rows) for part in parts if not isinstance(part, MaskPart | ControlsPart))
        made = {part.name for part in parts if not isinstance(part, TextPart)}
        pairs: Mapping[str, Sequence[int]] | None = {}
        clips: Mapping[str, torch.Tensor] | None = {}
        if selection.latents is not None and LATENTS in made:
            pairs = batch_sizes(selection.latents.column, rows, chosen.variants)
            clips = batch_clips(selection.latents.column, rows, chosen.variants)
        if not is_alike or pairs is None or clips is None:
            return None
        plain: dict[str, list[Any]] = {CAPTION: selection.captions(rows, chosen.texts), SAMPLE_ID: chosen.ids}
        extras = selection.extras_beside(rows, {*made, *plain, *clips}) if selection.has_extras else ()
        blocks = [text.block for text in selection.texts]
        return BatchSlice(self._reader, parts, plain, pairs, clips, extras, blocks, selection.options.dtype)

    @in_one_thread
    def outputs_of(self, caption: str) -> dict[str, Any]:
        """Return the text encoders' outputs for one caption. Raises MissingEntry, BadInput."""
        texts = self._selection.texts
        if not texts:
            is_left_out = bool(text_columns(self._selection.catalog))
            help_text = "`fields` leaves them out" if is_left_out else "run `cachestore precompute` with --encode text,latents"
            raise BadInput(f"it has no text embeddings; {help_text}")
        self._selection.check_alone()
        as_text("caption", caption)
        try:
            entries = self._reader.get_raw([key_of_caption(text, caption) for text in texts])
        except MissingEntry as error:
            raise MissingEntry(
                f"the caption {caption[:60]!r} is not encoded; put it on a line of prompts.txt and run the same `cachestore precompute`"
                " again with --prompts prompts.txt: it encodes only what is new"
            ) from error
        found: dict[str, Any] = {}
        for text, raw in zip(texts, entries, strict=True):
            found |= read_outputs(text.block, own_tensors(raw, copy=False))
        return cast(found, self._selection.options.dtype)

    def _parts(self, chosen: Chosen, epoch: int) -> list[Part]:
        selection, (rows, ids, texts, variants) = self._selection, chosen
        parts: list[Part] = []
        if (latents := selection.latents) is not None:
            seed = selection.options.seed
            noise = [noise_seed(seed, epoch, sample_id) if latents.form == "sample" else 0 for sample_id in ids]
            parts.append(LatentsPart(LATENTS, latents.block, latents.form, variant_keys(latents.column, rows, variants), noise))
        for one in selection.conditions:
            noise = [self._noise(one, sample_id, epoch) for sample_id in ids]
            parts.append(LatentsPart(one.name, one.block, one.form, variant_keys(one.column, rows, variants), noise))
        if selection.masks is not None and (masks := self._mask_part(selection.masks, rows, variants)) is not None:
            parts.append(masks)
        for one in selection.shown:
            if one.name in selection.stacked:
                parts.append(LatentsPart(one.name, one.block, one.form, variant_keys(one.column, rows, variants), [0] * len(rows)))
            else:
                cells = [control_keys(one.column, row, variant) for row, variant in zip(rows, variants, strict=True)]
                parts.append(ControlsPart(one.name, one.block, one.form, cells))
        parts += [TextPart(one.block, variant_keys(one.column, rows, variants)) for one in selection.embeds]
        parts += [TextPart(text.block, selection.text_keys(text, rows, texts)) for text in selection.texts]
        return [part for part in parts if part.keys or isinstance(part, MaskPart | ControlsPart)]

    def _noise(self, latents: LatentsColumn, sample_id: str, epoch: int) -> int:
        """The seed of a condition's noise, which is not that of the sample's own latents."""
        return noise_seed(self._selection.options.seed, epoch, f"{sample_id}/{latents.name}")

    def _mask_part(self, masks: MaskColumn, rows: Sequence[int], variants: Sequence[int]) -> MaskPart | None:
        keys = iter(variant_keys(masks.column, rows, variants))
        cells = [next(keys) if masks.column.count(row) else None for row in rows]
        shapes = {self._empty_mask(masks, row) for row, key in zip(rows, cells, strict=True) if key is None}
        if shapes == {None} and not any(cells):
            return None
        return MaskPart(MASK, masks.patch, masks.temporal_factor > 1, cells, shapes.pop() if len(shapes) == 1 else None)

    def _sample(
        self, row: int, sample_id: str, text: int | None, variant: int, stored: Sequence[Mapping[str, torch.Tensor] | None], *, epoch: int
    ) -> SampleDict:
        selection, rest = self._selection, iter(stored[len(self._selection.texts) :])
        sample: SampleDict = {}
        sizes: dict[str, torch.Tensor] = {}
        if selection.latents is not None and (tensors := next(rest)) is not None:
            seed = noise_seed(selection.options.seed, epoch, sample_id)
            sample[LATENTS] = read_latents(selection.latents.block, selection.latents.form, tensors, seed)
            sizes = sizes_of(selection.latents.column, row, variant)
        if (masks := selection.masks) is not None:
            if (found := next(rest)) is not None:
                sample[MASK] = read_mask(masks.block, found, masks.patch, has_frames=masks.temporal_factor > 1)
            elif (shape := self._empty_mask(masks, row)) is not None:
                sample[MASK] = torch.ones(shape, dtype=torch.float32)
        for one, found in zip(selection.conditions, rest, strict=False):
            sample |= {} if found is None else {one.name: read_latents(one.block, one.form, found, self._noise(one, sample_id, epoch))}
        for one, found in zip(selection.embeds, rest, strict=False):
            sample |= {} if found is None else read_outputs(one.block, found)
        for one in selection.shown:
            count = len(control_keys(one.column, row, variant))
            made = [read_latents(one.block, one.form, found) for found in islice(rest, count) if found is not None]
            sample[one.name] = made[0] if one.name in selection.stacked else made
        for one, found in zip(selection.texts, stored, strict=False):
            sample |= read_outputs(one.block, found) if found is not None else {}
        sample = ReadSample(cast(sample, selection.options.dtype))
        sample |= {CAPTION: selection.captions([row], [text])[0], SAMPLE_ID: sample_id, **sizes}
        for extras in selection.extras_beside([row], sample):
            sample |= extras
        return sample

    def _empty_mask(self, masks: MaskColumn, row: int) -> tuple[int, ...] | None:
        """The shape of the mask that a sample lacks; None if it has no picture either."""
        column = self._selection.pictures.column if self._selection.pictures is not None else None
        bucket = column.cell(column.at[row]).facts.get("bucket") if column is not None and column.count(row) else None
        if bucket is None:
            return None
        width, height = (side // masks.block.factor for side in bucket[:2])
        frames = [(count - 1) // masks.temporal_factor + 1 for count in bucket[2:]]
        return mask_shape((1, *frames, height, width), masks.patch, has_frames=masks.temporal_factor > 1)


def own_tensors(raw: Mapping[str, RawTensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """Make writable tensors of stored bytes. Copies them if others use them too, or if they are a view of a file."""
    return to_torch(
        {
            name: (dtype, shape, bytearray(buffer) if copy or memoryview(buffer).readonly else buffer)
            for name, (dtype, shape, buffer) in raw.items()
        }
    )
