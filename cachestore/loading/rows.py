"""Rows of a data set with the tensors behind their keys: as samples, or as what they give to a batch. Knows no places and no ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cachestore.core.arguments import as_text
from cachestore.core.errors import BadInput, MissingEntry
from cachestore.core.keys import Key
from cachestore.core.samples import MASK
from cachestore.core.tensors import RawTensor, to_torch
from cachestore.files.table import take
from cachestore.loading.assemble import ControlsPart, LatentsPart, MaskPart, Part, TextPart
from cachestore.loading.collate import SampleDict
from cachestore.loading.columns import (
    SIZES,
    batch_clips,
    batch_sizes,
    sizes_of,
)
from cachestore.loading.latents import noise_for, noise_seed, read_latents
from cachestore.loading.masks import read_mask
from cachestore.loading.selection import CONTROL_LATENTS, LATENTS, SAMPLE_ID, Selection, control_keys, key_of_caption, view_keys
from cachestore.loading.share import Share
from cachestore.loading.texts import read_outputs
from cachestore.loading.wanted import (
    CAPTION,
    LatentsColumn,
    MaskColumn,
    text_columns,
)
from cachestore.store.reader import Reader


class _Asked(NamedTuple):
    """The samples of a batch, column by column."""

    rows: Sequence[int]
    ids: list[str]
    texts: Sequence[int | None]
    """Which of its captions each has now."""
    views: Sequence[int]
    """Which view of its picture."""


class Rows:
    """Reads rows of a selection."""

    def __init__(self, reader: Reader, selection: Selection) -> None:
        """Open nothing: the reader is the data set's own."""
        self._reader = reader
        self._selection = selection

    def samples(self, rows: Sequence[int]) -> list[SampleDict]:
        """One sample for each row, its tensors its own. Raises MissingEntry, CorruptEntry."""
        chosen = [self._selection.chosen_text(row) for row in rows]
        views = self._selection.chosen_views(rows)
        keys = [self._selection.row_keys(row, text, view) for row, text, view in zip(rows, chosen, views, strict=True)]
        uses = Counter(key for row_keys in keys for key in row_keys if key is not None)
        wanted = list(uses)
        entries = dict(zip(wanted, self._reader.get_raw(wanted), strict=True))
        uses_left = Counter(uses)
        samples: list[SampleDict] = []
        for row, text, view, row_keys in zip(rows, chosen, views, keys, strict=True):
            uses_left.subtract(key for key in row_keys if key is not None)
            stored = [None if key is None else own_tensors(entries[key], copy=uses_left[key] > 0) for key in row_keys]
            samples.append(self._sample(row, text, view, stored))
        return samples

    def share(self, rows: Sequence[int]) -> Share | None:
        """What these rows, at least one, give to a batch; None where they are not alike."""
        selection = self._selection
        asked = _Asked(rows, take(selection.catalog.ids, rows), selection.chosen_texts(rows), selection.chosen_views(rows))
        parts = self._parts(asked)
        is_alike = all(len(part.keys) == len(rows) for part in parts if not isinstance(part, MaskPart | ControlsPart))
        made = {part.name for part in parts if not isinstance(part, TextPart)}
        pairs: Mapping[str, Sequence[int]] | None = {}
        clips: Mapping[str, torch.Tensor] | None = {}
        if self._selection.latents is not None and LATENTS in made:
            pairs = batch_sizes(self._selection.latents.column, rows, asked.views)
            clips = batch_clips(self._selection.latents.column, rows, asked.views)
        if not is_alike or pairs is None or clips is None:
            return None
        plain: dict[str, list[Any]] = {CAPTION: self._selection.captions(rows, asked.texts), SAMPLE_ID: asked.ids}
        extras = self._selection.extras_beside(rows, {*made, *plain, *clips}) if self._selection.has_extras else ()
        return Share(self._reader, parts, plain, pairs, clips, extras, [text.block for text in self._selection.texts])

    def outputs_of(self, caption: str) -> dict[str, Any]:
        """What the text encoders made of a caption by itself. Raises MissingEntry, BadInput."""
        entries = self._read_alone(self._keys_alone(caption), caption)
        found: dict[str, Any] = {}
        for text, raw in zip(self._selection.texts, entries, strict=True):
            found |= read_outputs(text.block, own_tensors(raw, copy=False))
        return found

    def _keys_alone(self, caption: str) -> list[Key]:
        """The key of a caption by itself, of each text encoder. Raises BadInput where it has none."""
        if not self._selection.texts:
            help_text = (
                "`fields` leaves them out"
                if text_columns(self._selection.catalog)
                else "run `cachestore precompute` with --encode text,latents"
            )
            raise BadInput(f"it has no text embeddings; {help_text}")
        self._selection.check_alone()
        as_text("caption", caption)
        return [key_of_caption(text, caption) for text in self._selection.texts]

    def _read_alone(self, keys: Sequence[Key], caption: str) -> list[Mapping[str, RawTensor]]:
        try:
            return list(self._reader.get_raw(keys))
        except MissingEntry as error:
            raise MissingEntry(
                f"the caption {caption[:60]!r} is not encoded; put it on a line of prompts.txt and run `cachestore precompute prompts.txt"
                " --encode text --name prompts` with the same --model and --store"
            ) from error

    def _parts(self, asked: _Asked) -> list[Part]:
        """What each column gives to a batch of these samples; columns that none of them has a cell in give nothing."""
        rows, ids, texts, views = asked
        parts: list[Part] = []
        if self._selection.latents is not None:
            seed, epoch = self._selection.options.seed, self._selection.epoch.get()
            noise = [noise_seed(seed, epoch, sample_id) for sample_id in ids] if self._selection.options.latents == "sample" else []
            keys = view_keys(self._selection.latents.column, rows, views)
            parts.append(LatentsPart(LATENTS, self._selection.latents.block, self._selection.options.latents, keys, noise))
        if self._selection.masks is not None and (masks := self._mask_part(self._selection.masks, rows, views)) is not None:
            parts.append(masks)
        if self._selection.controls is not None:
            parts.append(self._controls_part(self._selection.controls, rows, views))
        parts += [TextPart(text.block, self._selection.text_keys(text, rows, texts)) for text in self._selection.texts]
        return [part for part in parts if part.keys or isinstance(part, MaskPart | ControlsPart)]

    def _controls_part(self, controls: LatentsColumn, rows: Sequence[int], views: Sequence[int]) -> Part:
        """The control images of these samples: stacked where every sample of the data set has one, else a list of each."""
        column, form = controls.column, self._selection.control_form(controls)
        if self._selection.has_one_control:
            return LatentsPart(CONTROL_LATENTS, controls.block, form, view_keys(column, rows, views), [])
        each = [control_keys(column, row, view) for row, view in zip(rows, views, strict=True)]
        return ControlsPart(CONTROL_LATENTS, controls.block, form, [key for keys in each for key in keys], list(map(len, each)))

    def _mask_part(self, masks: MaskColumn, rows: Sequence[int], views: Sequence[int]) -> MaskPart | None:
        """The masks of these samples, and the shape of those that have none, where that is the same for all; None without pictures."""
        having = [place for place, row in enumerate(rows) if masks.column.count(row)]
        shapes = {self._selection.shape_of_no_mask(masks, rows[place]) for place in {*range(len(rows))}.difference(having)}
        if not having and shapes == {None}:
            return None
        shape = shapes.pop() if len(shapes) == 1 else None
        return MaskPart(MASK, masks.patch, view_keys(masks.column, rows, views), having, len(rows), shape)

    def _sample(self, row: int, text: int | None, view: int, stored: Sequence[Mapping[str, torch.Tensor] | None]) -> SampleDict:
        sample_id = self._selection.catalog.ids[row]
        sample: SampleDict = {}
        rest = list(stored[len(self._selection.texts) :])
        tensors = rest.pop(0) if self._selection.latents is not None else None
        masked = rest.pop(0) if self._selection.masks is not None else None
        if self._selection.latents is not None and tensors is not None:
            noise = noise_for(self._selection.options.seed, self._selection.epoch.get(), sample_id)
            sample[LATENTS] = read_latents(self._selection.latents.block, self._selection.options.latents, tensors, noise)
        if self._selection.masks is not None and (mask := self._mask(self._selection.masks, row, masked)) is not None:
            sample[MASK] = mask
        if self._selection.controls is not None:
            sample[CONTROL_LATENTS] = self._control_latents(self._selection.controls, rest)
        for one, found in zip(self._selection.texts, stored, strict=False):
            sample |= read_outputs(one.block, found) if found is not None else {}
        sample |= {CAPTION: self._selection.caption(row, text), SAMPLE_ID: sample_id}
        if self._selection.latents is not None and tensors is not None:
            sample |= sizes_of(self._selection.latents.column, self._selection.latents.column.at[row] + view)
        taken = {*sample, *SIZES, *(name for one in self._selection.texts for name in one.block.names())}
        return sample | self._selection.extras(row, taken=taken)

    def _mask(self, masks: MaskColumn, row: int, stored: Mapping[str, torch.Tensor] | None) -> torch.Tensor | None:
        """A sample's mask; 1 everywhere where it has none, and None where it has no picture either."""
        if stored is not None:
            return read_mask(masks.block, stored, masks.patch)
        shape = self._selection.shape_of_no_mask(masks, row)
        return None if shape is None else torch.ones(shape, dtype=torch.float32)

    def _control_latents(
        self, controls: LatentsColumn, stored: Sequence[Mapping[str, torch.Tensor] | None]
    ) -> torch.Tensor | list[torch.Tensor]:
        form = self._selection.control_form(controls)
        made = [read_latents(controls.block, form, found, torch.Generator()) for found in stored if found is not None]
        return made[0] if self._selection.has_one_control else made


def own_tensors(raw: Mapping[str, RawTensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """Stored bytes as writable tensors of the caller's own: copied where others will use them too, or where they are a view of a file."""
    return to_torch(
        {
            name: (dtype, shape, bytearray(buffer) if copy or memoryview(buffer).readonly else buffer)
            for name, (dtype, shape, buffer) in raw.items()
        }
    )
