"""Reads entries and converts them to the scaling state and dtype of another trainer's cache."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cachestore.core.errors import EncodeFailed
from cachestore.core.forked import in_one_thread
from cachestore.core.inputs import WITHIN, cells_each, framing_of, sides_each
from cachestore.core.keys import Json, Key
from cachestore.core.raw_tensors import Latents, Raw, Scale, Text, cast, folded, to_state
from cachestore.core.samples import CONTROL, MASK
from cachestore.core.words import plural
from cachestore.encode.families import lookup as families
from cachestore.store.format.catalog import KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.exported import ExportVariant


@dataclass(frozen=True)
class ExportValues:
    """Reads entries and converts them for a format."""

    reader: Reader
    layout: ExportLayout
    casts: dict[str, None] = field(default_factory=dict[str, None])
    """In words, how tensors differ from what is stored. A dict keeps the order, without repeats; its values are unused."""

    def variant(self, row: int, column: KeyColumn, index: int) -> tuple[ExportVariant, Key]:
        """Return a cell as a variant for the format, and its key. Raises EncodeFailed, and the errors of reading."""
        key, stored, meta = self.entry(column, index)
        trainer, pictures = self.layout.format.name, column.count(row) // cells_each(column.options)
        if pictures > 1:
            raise EncodeFailed(f"it has {plural(pictures, 'picture')}, but {trainer} keeps one for each sample: give each a row of its own")
        if "own crops" not in self.layout.writing.takes and WITHIN in framing_of(json.loads(self.layout.catalog.extras[row])):
            raise EncodeFailed(f"it has its own crop, but {trainer} puts whole pictures into buckets: crop the file itself")
        number = index - column.at[row]
        is_flipped = number % sides_each(column.options) == 1
        latents = self.latents(column, stored, meta, self.layout.catalog.ids[row])
        controls = self.control_latents(row, column, number)
        return ExportVariant(self.layout.named(row, column, index), latents, is_flipped, self.mask(row, column, number), controls), key

    def control_latents(self, row: int, column: KeyColumn, number: int) -> tuple[Raw, ...]:
        """Return the latents of a row's control images for one variant of its picture; empty if the format has none."""
        each = cells_each(column.options)
        those = (one for one in self.layout.catalog.columns if (one.role, dict(one.options)) == (CONTROL, dict(column.options)))
        controls = next(those, None) if "controls" in self.layout.writing.takes else None
        if controls is None:
            return ()
        indices = range(controls.at[row] + number, controls.at[row + 1], each)
        return tuple(self.latents(controls, *self.entry(controls, index)[1:], self.layout.catalog.ids[row]).tensor for index in indices)

    def mask(self, row: int, column: KeyColumn, number: int) -> Raw | None:
        """Return the mask for one variant of a row's picture; None if there is none, or if masks are left out."""
        masks = next((one for one in self.layout.masks if dict(one.options) == dict(column.options)), None)
        if masks is None or not masks.count(row):
            return None
        self.note_cast("masks", "the mean of the mask over the pixels of each latent, as float32 from 0 to 1")
        return self.entry(masks, masks.at[row] + number)[1][MASK]

    def entry(self, column: KeyColumn, index: int) -> tuple[Key, Mapping[str, Raw], Mapping[str, Any]]:
        """Return key, tensors and JSON value of a cell. Raises EncodeFailed if it was not encoded, and the errors of reading."""
        key = column.cell(index).key
        if key is None:
            raise EncodeFailed("it was not encoded; `cachestore why STORE SAMPLE` says why")
        return key, *self.stored(key)

    def stored(self, key: Key) -> tuple[Mapping[str, Raw], Mapping[str, Any]]:
        """Return the tensors and the JSON value of an entry. Raises the errors of reading."""
        return self.reader.get_raw([key])[0], self.reader.describe(key).meta

    def text(self, column: KeyColumn, stored: Mapping[str, Raw], meta: Mapping[str, Any]) -> Text:
        """Return an entry's text in the dtypes of the format. Raises EncodeFailed if a tensor of the family is missing."""
        family = self.layout.family_of[column.encoder]
        own = families.stored_names(families.text_family(family.pipeline))
        if lacking := sorted(set(own) - set(stored)):
            raise EncodeFailed(
                f"it holds {', '.join(sorted(stored)) or 'nothing'}, but text of {family.name} also needs {', '.join(lacking)}:"
                " encode it with the model that is trained"
            )
        tensors = {name: self.cast(name, stored[name], self.layout.writing.text_casts) for name in own}
        return Text(tensors, {name: raw for name, raw in stored.items() if name not in tensors}, _info(meta))

    def latents(self, column: KeyColumn, stored: Mapping[str, Raw], meta: Mapping[str, Any], sample: str) -> Latents:
        """Return an entry's latents in the scaling state and dtype of the format."""
        recipe, family = self.layout.catalog.recipes[column.fingerprint], self.layout.family_of[column.encoder]
        state = self.layout.format.trainer.cached[family.name].state
        kind = str(recipe.read["stored"])
        others = {name: raw for name, raw in stored.items() if name != kind}
        if kind == "moments":
            raw = _drawn(stored[kind], sample if state.kind == "sample" else None)
            self.note_cast("latents", f"{'drawn' if state.kind == 'sample' else 'the mean taken'} from stored moments")
        else:
            raw = stored[kind]
            if kind != state.kind:
                self.note_cast("latents", f"a {kind}, but the trainer caches a {state.kind}")
        raw = folded(raw, int(recipe.read["patchify"])) if state.is_scaled else raw
        was_scaled = bool(recipe.read.get("scaled", False))
        if was_scaled != state.is_scaled:
            how = "are normalised, as this trainer has them" if state.is_scaled else "are not normalised, as this trainer has them"
            self.note_cast("latents", f"they {how}; computed in {'float64' if raw[0] == 'F64' else 'float32'} and rounded to {raw[0]}")
        made = to_state(raw, Scale.of(recipe.read), was_scaled=was_scaled, is_scaled=state.is_scaled)
        tensor = self.cast("latents", cast(made, raw[0]), self.layout.writing.latents_casts)
        return Latents(tensor, state.is_scaled, state.kind, others, {}, _info(meta))

    def cast(self, name: str, raw: Raw, casts: Mapping[str, str]) -> Raw:
        """Return a tensor in the dtype of the format; note in `casts` if that is another one."""
        dtype = casts.get(raw[0], raw[0])
        if dtype != raw[0]:
            exact = f"{raw[0]} as {dtype}, which holds each of its numbers exactly"
            self.note_cast(name, f"F64 rounded to {dtype}" if raw[0] == "F64" else exact)
        return cast(raw, dtype)

    def note_cast(self, tensor: str, how: str) -> None:
        """Note that a tensor is not written bit for bit as stored."""
        self.casts[f"{tensor}: {how}"] = None


def _info(meta: Mapping[str, Any]) -> Mapping[str, Json]:
    imported: Mapping[str, Any] = meta.get("imported") or {}
    return imported.get("info") or {}


@in_one_thread
def _drawn(moments: Raw, sample: str | None) -> Raw:
    """Return the raw latents that a data set samples from stored moments at seed 0 and epoch 0; their mean without a sample id."""
    from cachestore.core.read_block import LatentsBlock
    from cachestore.core.tensors import to_raw, to_torch
    from cachestore.train.latents import noise_seed, read_latents

    block = LatentsBlock("moments", 1, 1.0, None, None, None)
    dtype, shape, buffer = moments
    stored = to_torch({"moments": (dtype, shape, bytearray(buffer))})
    made = read_latents(block, "raw" if sample is None else "sample", stored, noise_seed(0, 0, sample or ""))
    return to_raw({"latents": made})["latents"]
