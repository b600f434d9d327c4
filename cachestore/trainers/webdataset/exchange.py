"""The JSON beside a sample's tensors in an exported tar: what each tensor is, of which sample, and which recipe made it. Pure.

docs/design/trainers.md lists the fields. Whatever bytes are parsed, the result is a sound sample or BadInput.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from cachestore.core.captions import CaptionPolicy
from cachestore.core.dtypes import RawTensor
from cachestore.core.errors import BadInput, CacheStoreError, EncodeFailed
from cachestore.core.inputs import BUCKETS, IMAGES, RESOLUTIONS, caption_key, cells_each
from cachestore.core.keys import INPUT_BYTES, Json, Key, Recipe, canonical, digest_bytes, input_key
from cachestore.core.raw_tensors import is_finite
from cachestore.core.read_block import MASK_BITS, Form, parse_latents, parse_mask, parse_text, stored_parts
from cachestore.core.samples import CAPTION, IMAGE, MASK, VIDEO, images_of
from cachestore.store.format.catalog import FACTS, Cell

FORMAT: Final = "cachestore-exchange/1"
LATENTS: Final = "latents"
_WHOLE: Final = ("resolution", "step", "variants", "clips")
"""Options of a column that are whole numbers."""
_MOST: Final = 1 << 62
_MEND: Final = "export the data set again"


@dataclass(frozen=True, slots=True)
class ExchangedCell:
    """One value of a sample."""

    cell: Cell
    tensors: Mapping[str, str]
    """By the name in a store: the name in the file."""
    meta: Mapping[str, Json]
    """The entry's JSON value."""

    @property
    def key(self) -> Key:
        """The value's key."""
        assert self.cell.key is not None
        return self.cell.key


@dataclass(frozen=True, slots=True)
class ExchangedColumn:
    """A sample's values from one encoder and role."""

    encoder: str
    role: str
    options: Mapping[str, Json]
    fingerprint: str
    cells: Sequence[ExchangedCell]


@dataclass(frozen=True, slots=True)
class ExchangedSample:
    """A sample with its values, or a text that belongs to the data set and to none of its samples."""

    id: str | None
    """None for a text alone: the empty caption, or a prompt for validation."""
    captions: Sequence[str]
    images: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    extras: Mapping[str, Json] = field(default_factory=dict[str, Json])
    texts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How the data set's captions were chosen (`Catalog.texts`)."""
    prompts: Sequence[tuple[str, str]] = ()
    samples: int = 0
    """How many samples the data set has; 0 if unknown."""
    columns: Sequence[ExchangedColumn] = ()
    recipes: Mapping[str, Recipe] = field(default_factory=dict[str, Recipe])
    """By fingerprint."""
    digest: str = ""
    """SHA-256 of the file with the tensors."""


def file_names(column: ExchangedColumn, recipe: Recipe, stored: Sequence[str], used: set[str]) -> dict[str, str]:
    """Return by name in the store the names of an entry's tensors in the file, as batches name them; they are added to `used`.

    A name that is taken ends in `.2`, `.3`, ...: for further captions, resolutions or variants.
    """
    if "outputs" in recipe.read or column.encoder == MASK:
        bases = {name: name for name in stored}
    else:
        own = LATENTS if column.role in (IMAGE, VIDEO) else f"{column.role}_{LATENTS}"
        name = own if column.encoder == LATENTS else str(recipe.read.get("name") or column.encoder)
        bases = {one: name if one == recipe.read.get("stored") != "moments" else f"{name}.{one}" for one in stored}
    names: dict[str, str] = {}
    for one, base in bases.items():
        names[one] = next(name for name in (base if n == 1 else f"{base}.{n}" for n in count(1)) if name not in used)
        used.add(names[one])
    return names


def write_sample(sample: ExchangedSample) -> bytes:
    """Return the JSON of a sample."""
    body: dict[str, Json] = {
        "format": FORMAT,
        "captions": list(sample.captions),
        "values": [
            {
                "encoder": column.encoder,
                "role": column.role,
                "options": dict(column.options),
                "recipe": column.fingerprint,
                "cells": [
                    {
                        "key": str(one.key),
                        "input": one.cell.input.hex(),
                        **{name: list(numbers) for name, numbers in one.cell.facts.items()},
                        "tensors": dict(one.tensors),
                        "meta": dict(one.meta),
                    }
                    for one in column.cells
                ],
            }
            for column in sample.columns
        ],
        "recipes": {name: {"encoder": one.encoder, "make": dict(one.make), "read": dict(one.read)} for name, one in sample.recipes.items()},
        "sha256": {"safetensors": sample.digest},
    }
    if sample.id is not None:
        body |= {"id": sample.id, "columns": dict(sample.extras), "images": {role: list(some) for role, some in sample.images.items()}}
    body |= {"texts": dict(sample.texts)} if sample.texts else {}
    body |= {"prompts": [list(pair) for pair in sample.prompts]} if sample.prompts else {}
    body |= {"samples": sample.samples} if sample.samples else {}
    return canonical({**body, "sha256": {**body["sha256"], "json": digest_bytes(canonical(body))}})


def parse_sample(raw: bytes, where: str) -> ExchangedSample:
    """Return the sample of a JSON file. Raises BadInput, whose sentence begins with `where`."""
    try:
        return _parse(_mapping(json.loads(raw.decode("utf-8", "surrogatepass"), parse_constant=_no_constant)))
    except (_Wrong, CacheStoreError) as error:
        reason = str(error)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"a field is missing or wrong ({type(error).__name__}: {error})"
    raise BadInput(f"{where} cannot be imported: {reason:.1000}; docs/design/trainers.md lists what it must hold")


class _Wrong(ValueError):
    pass


def _no_constant(name: str) -> None:
    raise _Wrong(f"{name} is not JSON")


def _parse(body: dict[str, Any]) -> ExchangedSample:
    if body.get("format") != FORMAT:
        raise _Wrong(f'it does not say what the tensors are, which needs "format": "{FORMAT}"')
    digests = _mapping(body["sha256"])
    sample, digest = body.get("id"), _text(digests.pop("safetensors"))
    body["sha256"] = {"safetensors": digest}
    if digests.pop("json", None) not in (None, digest_bytes(canonical(body))):
        raise _Wrong("it has another SHA-256 than it states: copy the tar again")
    if sample is not None and not _text(sample):
        raise _Wrong("the id is empty")
    if len(bytes.fromhex(digest)) != INPUT_BYTES:
        raise _Wrong("sha256 is no SHA-256")
    captions = [_text(one) for one in _list(body["captions"])]
    images = {_text(role): tuple(_text(one) for one in _list(some)) for role, some in _mapping(body.get("images", {})).items()}
    recipes: dict[str, Recipe] = {}
    for name, value in _mapping(body["recipes"]).items():
        recipe = Recipe(_text(value["encoder"]), _mapping(value["make"]), _mapping(value["read"]))
        if recipe.fingerprint != name:
            raise _Wrong(f"the recipe {name!r:.80} has the fingerprint {recipe.fingerprint}: it was changed")
        recipes[name] = recipe
    texts = _mapping(body.get("texts", {}))
    CaptionPolicy.parse(texts)
    extras = _mapping(body.get("columns", {}))
    canonical(extras)
    prompts = [(_text(prompt), _text(negative)) for prompt, negative in _list(body.get("prompts", []))]
    samples = _number(body.get("samples", 0))
    draft = ExchangedSample(sample, captions, images, extras, texts, prompts, samples, (), recipes, digest)
    columns = [_parse_column(value, draft) for value in _list(body["values"])]
    named = [canonical([column.encoder, column.role, dict(column.options)]) for column in columns]
    tensors = [name for column in columns for one in column.cells for name in one.tensors.values()]
    if len({*named}) != len(named) or len({*tensors}) != len(tensors):
        raise _Wrong("two values are the same, or have the same tensor")
    if sample is None and any(column.role != CAPTION for column in columns):
        raise _Wrong("it has no id, but values of pictures")
    return replace(draft, columns=columns)


def _parse_column(value: Mapping[str, Any], sample: ExchangedSample) -> ExchangedColumn:
    encoder, role, options = _text(value["encoder"]), _text(value["role"]), _mapping(value.get("options", {}))
    recipe = sample.recipes[value["recipe"]]
    if recipe.encoder != encoder:
        raise _Wrong(f"the recipe of {encoder!r:.80} is one of {recipe.encoder!r:.80}")
    _check_options(options)
    listed, is_alone = _list(value["cells"]), role == CAPTION and IMAGES not in options
    each, inputs = cells_each(options), len(sample.captions) if role == CAPTION else len(images_of(sample.images, role))
    wanted = inputs if role == CAPTION else inputs * each
    if not listed or (len(listed) != wanted if wanted else len(listed) != each):
        raise _Wrong(f"{encoder!r:.80} has {len(listed)} values of the role {role!r:.80}, where {wanted or each} belong")
    cells: list[ExchangedCell] = []
    for number, one in enumerate(listed):
        own = caption_key(recipe.fingerprint, sample.captions[number]) if is_alone else None
        stated = one.get("key")
        if stated is not None and own not in (None, Key.parse(_text(stated))):
            raise _Wrong(f"the key {stated!r:.80} is not that of its caption")
        which: dict[str, Json] = {"id": sample.id, "role": role, "options": options, "number": number}
        derived = own or input_key(recipe.fingerprint, {"exchanged": sample.digest}, which)
        cells.append(_parse_cell(one, derived if stated is None else Key.parse(stated), recipe, encoder))
    return ExchangedColumn(encoder, role, options, recipe.fingerprint, cells)


def _parse_cell(value: Mapping[str, Any], key: Key, recipe: Recipe, encoder: str) -> ExchangedCell:
    tensors = {_text(name): _text(name_there) for name, name_there in _mapping(value["tensors"]).items()}
    stored = stored_names(recipe)
    if lacking := sorted(stored - tensors.keys()):
        raise _Wrong(f"{encoder!r:.80} has no tensor {lacking[0]!r:.80}, which its recipe names")
    facts = {name: tuple(_number(one) for one in _list(value[name])) for name in FACTS if name in value}
    if wrong := [name for name, numbers in facts.items() if len(numbers) not in ({2, 3} if name == "bucket" else {FACTS[name]})]:
        raise _Wrong(f"{wrong[0]} has {len(facts[wrong[0]])} numbers")
    digest = bytes.fromhex(_text(value.get("input", "00" * INPUT_BYTES)))
    if len(digest) != INPUT_BYTES:
        raise _Wrong("an input is no SHA-256")
    meta = _mapping(value.get("meta", {"encoder": encoder, "input_digest": digest.hex()}))
    canonical(meta)
    return ExchangedCell(Cell(key, digest, facts=facts), tensors, meta)


def stored_names(recipe: Recipe) -> set[str]:
    """Return the tensors without which an entry cannot be read. Raises FormatError for a recipe that this version cannot read."""
    if recipe.encoder == MASK:
        return {parse_mask(recipe).stored}
    if "outputs" in recipe.read:
        return {part for form in parse_text(recipe).outputs.values() for part in stored_parts(form)}
    block = parse_latents(recipe)
    return {block.stored, MASK_BITS} if block.mask_channels else {block.stored}


def check_tensors(column: ExchangedColumn, one: ExchangedCell, recipe: Recipe, tensors: Mapping[str, RawTensor]) -> None:
    """Raise EncodeFailed if an entry's tensors are not as its recipe and its facts say."""
    if bad := [name for name, raw in tensors.items() if not is_finite(raw)]:
        raise EncodeFailed(f"{one.tensors[bad[0]]} holds NaN or infinite numbers; {_MEND}")
    if "outputs" in recipe.read:
        shapes = {name: raw[1] for name, raw in tensors.items()}
        for name, form in parse_text(recipe).outputs.items():
            joined: list[int] = []
            with suppress(IndexError, _Wrong):
                joined = _joined_shape(form, shapes)
            if not joined:
                raise EncodeFailed(f"its tensors cannot be joined to {name!r:.80}: they have the shapes {shapes}; {_MEND}")
        return
    stored = str(recipe.read["stored"])
    shape, factor = tensors[stored][1], recipe.read.get("factor", recipe.read.get("spatial_factor"))
    channels = 1 if column.encoder == MASK else recipe.read.get("channels", 0) * (2 if stored == "moments" else 1)
    bucket = one.cell.facts.get("bucket")
    fits = len(shape) in (3, 4) and shape[0] == channels and all(shape)
    if not fits or (bucket and isinstance(factor, int) and [side * factor for side in shape[:-3:-1]] != [*bucket[:2]]):
        what = f"{one.tensors[stored]} has the shape {list(shape)}"
        raise EncodeFailed(f"{what}, which does not fit its recipe ({channels} channels) and its bucket {list(bucket or ())}; {_MEND}")


def _joined_shape(form: Form, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    parts = [_joined_shape(part, shapes) if isinstance(part, Form) else list(shapes[part]) for part in form.parts]
    if form.dim is None:
        return parts[0]
    length = sum(part[form.dim] for part in parts)
    for part in parts:
        part[form.dim] = length
    if any(part != parts[0] for part in parts) or (form.width is not None and parts[0][-1] > form.width):
        raise _Wrong
    return [*parts[0][:-1], form.width or parts[0][-1]]


def _check_options(options: dict[str, Any]) -> None:
    canonical(options)
    for name in _WHOLE:
        if name in options and not 0 <= _number(options[name]) < 1 << 31:
            raise _Wrong(f"the option {name} is {options[name]!r:.80}")
    for side in _mapping(options.get(RESOLUTIONS, {})).values():
        _number(side)
    shown = options.get(IMAGES, "")
    _text(options.get(BUCKETS, ""))
    for role in [shown] if isinstance(shown, str) else _list(shown):
        _text(role)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{value!r:.80} is no text")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{value!r:.80} is no object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{value!r:.80} is no list")
    return value  # pyright: ignore[reportUnknownVariableType]


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise _Wrong(f"{value!r:.80} is no whole number from 0 on")
    return value
