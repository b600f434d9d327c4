"""Read rows of a data set with the tensors of their keys: as samples, or as a batch slice. Both are made of the same parts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cachestore.core.arguments import as_text
from cachestore.core.errors import BadInput, MissingEntry
from cachestore.core.forked import in_one_thread
from cachestore.core.samples import MASK
from cachestore.core.tensors import RawTensor, to_torch
from cachestore.store.read.reader import Reader
from cachestore.train.batch_slice import BatchSlice
from cachestore.train.cast import cast
from cachestore.train.cells import batch_clips, batch_sizes, control_keys, sizes_of, variant_keys
from cachestore.train.collate import ReadSample, SampleDict
from cachestore.train.joined import SAMPLE_ID
from cachestore.train.latents import mask_shape, noise_seed, read_latents, read_mask
from cachestore.train.parts import ControlsPart, LatentsPart, MaskPart, Part, TextPart
from cachestore.train.returned_columns import CAPTION, LATENTS, MaskColumn, text_columns
from cachestore.train.selection import Chosen, Selection, key_of_caption
from cachestore.train.texts import read_outputs


class RowReader:
    """Reads rows of a selection."""

    def __init__(self, reader: Reader, selection: Selection) -> None:
        self._reader = reader
        self._selection = selection

    def parts(self, chosen: Chosen, epoch: int) -> list[Part]:
        """Return what the returned columns add to a batch of these samples, with the keys of their entries. Reads no entry."""
        selection, (rows, ids, _captions, variants) = self._selection, chosen
        seed = selection.options.seed
        parts: list[Part] = []
        if (latents := selection.latents) is not None:
            seeds = [noise_seed(seed, epoch, sample_id) if latents.form == "sample" else 0 for sample_id in ids]
            parts.append(LatentsPart(LATENTS, latents.block, latents.form, variant_keys(latents.column, rows, variants), seeds))
        for one in selection.conditions:  # whose noise is not that of the sample's own latents
            seeds = [noise_seed(seed, epoch, f"{sample_id}/{one.name}") for sample_id in ids]
            parts.append(LatentsPart(one.name, one.block, one.form, variant_keys(one.column, rows, variants), seeds))
        if (masks := selection.masks) is not None:
            keys = iter(variant_keys(masks.column, rows, variants))
            cells = [next(keys) if masks.column.count(row) else None for row in rows]
            shapes = {self._empty_mask(masks, row) for row, key in zip(rows, cells, strict=True) if key is None}
            if shapes != {None} or any(cells):
                shape = shapes.pop() if len(shapes) == 1 else None
                parts.append(MaskPart(MASK, masks.patch, masks.temporal_factor > 1, cells, shape))
        for one in selection.controls:
            if one.name in selection.stacked:
                parts.append(LatentsPart(one.name, one.block, one.form, variant_keys(one.column, rows, variants), [0] * len(rows)))
            else:
                lists = [control_keys(one.column, row, variant) for row, variant in zip(rows, variants, strict=True)]
                parts.append(ControlsPart(one.name, one.block, one.form, lists))
        beside = (*selection.embeds, *selection.joined)
        parts += [TextPart(one.block, variant_keys(one.column, rows, variants), one.stored) for one in beside]
        parts += [TextPart(text.block, selection.text_keys(text, chosen)) for text in selection.texts]
        return [part for part in parts if part.keys or isinstance(part, MaskPart | ControlsPart)]

    def _empty_mask(self, masks: MaskColumn, row: int) -> tuple[int, ...] | None:
        """The shape of the mask that a sample lacks; None if it has no picture either."""
        column = self._selection.pictures.column if self._selection.pictures is not None else None
        bucket = column.cell(column.at[row]).facts.get("bucket") if column is not None and column.count(row) else None
        if bucket is None:
            return None
        width, height = (side // masks.block.factor for side in bucket[:2])
        frames = [(count - 1) // masks.temporal_factor + 1 for count in bucket[2:]]
        return mask_shape((1, *frames, height, width), masks.patch, has_frames=masks.temporal_factor > 1)

    def prefetch(self, rows: Sequence[int], epoch: int) -> None:
        """Ask the system to load the entries of these rows in an epoch, without waiting."""
        self._reader.prefetch([key for part in self.parts(self._selection.choose(rows, epoch), epoch) for key in part.keys])

    def batch_slice(self, rows: Sequence[int], epoch: int) -> BatchSlice | None:
        """Return the batch slice of these rows in an epoch, at least one. None if they differ in their fields."""
        selection, chosen = self._selection, self._selection.choose(rows, epoch)
        parts = self.parts(chosen, epoch)
        is_alike = all(len(part.keys) == len(rows) for part in parts if not isinstance(part, MaskPart | ControlsPart))
        names = {part.name for part in parts if not isinstance(part, TextPart)}
        sizes: Mapping[str, Sequence[int]] | None = {}
        clips: Mapping[str, torch.Tensor] | None = {}
        if selection.latents is not None and LATENTS in names:
            sizes = batch_sizes(selection.latents.column, rows, chosen.variants)
            clips = batch_clips(selection.latents.column, rows, chosen.variants)
        if not is_alike or sizes is None or clips is None:
            return None
        plain: dict[str, list[Any]] = {CAPTION: selection.captions_of(chosen), SAMPLE_ID: chosen.ids}
        extras = selection.extras_beside(rows, {*names, *plain, *clips}) if selection.has_extras else ()
        blocks = [text.block for text in selection.texts]
        return BatchSlice(self._reader, parts, plain, sizes, clips, extras, blocks, selection.options.dtype)

    @in_one_thread
    def samples(self, rows: Sequence[int], epoch: int) -> list[SampleDict]:
        """Return one sample for each row in an epoch. Raises MissingEntry, CorruptEntry."""
        alone = zip(*self._selection.choose(rows, epoch), strict=True)
        chosen = [Chosen([row], [sample_id], [caption], [variant]) for row, sample_id, caption, variant in alone]
        parts = [self.parts(one, epoch) for one in chosen]
        uses = Counter(key for those in parts for part in those for key in part.keys)
        entries = dict(zip(uses, self._reader.get_raw(list(uses)), strict=True))
        stored = ([[own_tensors(entries[key], copy=uses[key] > 1) for key in part.keys] for part in those] for those in parts)
        return [self._sample(*each) for each in zip(chosen, parts, stored, strict=True)]

    @in_one_thread
    def outputs_of(self, caption: str) -> dict[str, Any]:
        """Return the text encoders' outputs for one caption. Raises MissingEntry, BadInput."""
        texts = self._selection.texts
        if not texts:
            is_left_out = bool(text_columns(self._selection.catalog))
            help_text = "`fields` leaves them out" if is_left_out else "run `cachestore precompute` with --encode text,latents"
            raise BadInput(f"it has no text embeddings; {help_text}")
        self._selection.refuse_text_of_pictures()
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

    def _sample(self, chosen: Chosen, parts: Sequence[Part], stored: Sequence[Sequence[Mapping[str, torch.Tensor]]]) -> SampleDict:
        selection, ([row], [sample_id], _captions, [variant]) = self._selection, chosen
        sample: SampleDict = {}
        for part, entries in zip(parts, stored, strict=True):
            if isinstance(part, TextPart):
                if part.stored and part.stored != frozenset(entries[0]):
                    raise BadInput(_unlike(sample_id, part, entries[0]), option="join")
                sample |= read_outputs(part.block, entries[0])
            elif isinstance(part, LatentsPart):
                sample[part.name] = read_latents(part.block, part.form, entries[0], part.seeds[0])
            elif isinstance(part, ControlsPart):
                sample[part.name] = [read_latents(part.block, part.form, entry) for entry in entries]
            elif entries:
                sample[part.name] = read_mask(part.name, entries[0], part.patch, has_frames=part.has_frames)
            elif part.shape is not None:
                sample[part.name] = torch.ones(part.shape, dtype=torch.float32)
        sizes = sizes_of(selection.latents.column, row, variant) if selection.latents is not None and LATENTS in sample else {}
        sample = ReadSample(cast(sample, selection.options.dtype))
        sample |= {CAPTION: selection.captions_of(chosen)[0], SAMPLE_ID: sample_id, **sizes}
        for extras in selection.extras_beside([row], sample):
            sample |= extras
        return sample


def _unlike(sample_id: str, part: TextPart, entry: Mapping[str, torch.Tensor]) -> str:
    """Why an entry of a published part cannot be read: a batch would lack a tensor of it, or have one for some samples only."""
    holds, wanted = (", ".join(sorted(names)) or "no tensors" for names in (entry, part.stored))
    what = f"the sample {sample_id!r} has the entry {part.keys[0]} with {holds}, but the first entry of this published part has {wanted}"
    return f"{what}: publish entries with tensors of the same names in one part"


def own_tensors(raw: Mapping[str, RawTensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """Make writable tensors of stored bytes. Copies them if others use them too, or if they are a view of a file."""
    return to_torch(
        {
            name: (dtype, shape, bytearray(buffer) if copy or memoryview(buffer).readonly else buffer)
            for name, (dtype, shape, buffer) in raw.items()
        }
    )
