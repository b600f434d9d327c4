"""Reads entries and converts them to the scaling state and dtype of another trainer's cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cachestore.core.errors import EncodeFailed
from cachestore.core.forked import in_one_thread
from cachestore.core.inputs import cells_each
from cachestore.core.keys import Key
from cachestore.core.raw_tensors import Latents, Raw, Scale, Text, cast, folded, to_state
from cachestore.core.samples import CONTROL, MASK
from cachestore.encode.families import lookup as families
from cachestore.store.format.catalog import KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.exported import ExportVariant, Named


@dataclass(frozen=True)
class ExportValues:
    """Reads entries and converts them for a format."""

    reader: Reader
    layout: ExportLayout
    casts: dict[str, None] = field(default_factory=dict[str, None])
    """In words, how tensors differ from what is stored. A dict keeps the order, without repeats; its values are unused."""

    def named(self, row: int, column: KeyColumn, index: int) -> Named:
        """Return what the name of a cell's file is made from. Raises the errors of reading."""
        named = self.layout.named(row, column, index)
        is_own = self.layout.catalog.recipes[column.fingerprint].make.get("format") == self.layout.format.name
        if not (self.layout.writing.takes_info and is_own):
            return named
        imported: Mapping[str, Any] = self.reader.describe(self.layout.key(column, index)).meta.get("imported") or {}
        return replace(named, info=imported.get("info") or {})

    def variant(self, row: int, column: KeyColumn, index: int, named: Named) -> ExportVariant:
        """Return a cell as a variant for the format. Raises EncodeFailed, and the errors of reading."""
        latents = self.latents(column, self.stored(self.layout.key(column, index)), self.layout.catalog.ids[row])
        number = index - column.at[row]
        return ExportVariant(named, latents, self.mask(row, column, number), self.control_latents(row, column, number))

    def control_latents(self, row: int, column: KeyColumn, number: int) -> tuple[Raw, ...]:
        """Return the latents of a row's control images for one variant of its picture; empty if the format has none."""
        each = cells_each(column.options)
        those = (one for one in self.layout.catalog.columns if (one.role, dict(one.options)) == (CONTROL, dict(column.options)))
        controls = next(those, None) if "controls" in self.layout.writing.takes else None
        if controls is None:
            return ()
        indices = range(controls.at[row] + number, controls.at[row + 1], each)
        stored = (self.stored(self.layout.key(controls, index)) for index in indices)
        return tuple(self.latents(controls, tensors, self.layout.catalog.ids[row]).tensor for tensors in stored)

    def mask(self, row: int, column: KeyColumn, number: int) -> Raw | None:
        """Return the mask for one variant of a row's picture; None if there is none, or if masks are left out."""
        masks = next((one for one in self.layout.masks if dict(one.options) == dict(column.options)), None)
        if masks is None or not masks.count(row):
            return None
        self.note_cast("masks", "the mean of the mask over the pixels of each latent, as float32 from 0 to 1")
        return self.stored(self.layout.key(masks, masks.at[row] + number))[MASK]

    def stored(self, key: Key) -> Mapping[str, Raw]:
        """Return the tensors of an entry. Raises the errors of reading."""
        return self.reader.get_raw([key])[0]

    def text(self, column: KeyColumn, stored: Mapping[str, Raw]) -> Text:
        """Return an entry's text in the dtypes of the format. Raises EncodeFailed if a tensor of the family is missing."""
        family = self.layout.family_of[column.encoder]
        own = families.stored_names(families.text_family(family.pipeline))
        if lacking := sorted(set(own) - set(stored)):
            raise EncodeFailed(
                f"it holds {', '.join(sorted(stored)) or 'nothing'}, but text of {family.name} also needs {', '.join(lacking)}:"
                " encode it with the model that is trained"
            )
        tensors = {name: self.cast(name, stored[name], self.layout.writing.text_casts) for name in own}
        return Text(tensors, {name: raw for name, raw in stored.items() if name not in tensors})

    def latents(self, column: KeyColumn, stored: Mapping[str, Raw], sample: str) -> Latents:
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
        return Latents(tensor, state.is_scaled, state.kind, others)

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
