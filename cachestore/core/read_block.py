"""The `read` block of a recipe as typed values: how stored tensors become a batch.

The fields are described beside the families that make them, in `encode/families/lookup.py`. Unknown fields are errors here: a reader that
ignored one could return wrong tensors that look right.
"""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from cachestore.core.errors import WRONG_FIELDS, NewerFormat
from cachestore.core.keys import Json, Recipe

FORMAT: Final = 1
_TEXT: Final = frozenset({"format", "family", "outputs", "constants", "pad", "mask_name"})
_PADDING: Final = frozenset({"dim", "side", "length", "multiple", "value", "mask"})
_CONSTANT: Final = frozenset({"kind", "shape", "like"})
_MASK: Final = frozenset({"format", "stored", "factor"})
_SCALING: Final = frozenset({"scaling_factor", "shift_factor", "latents_mean", "latents_std", "scaled"})
_LAYOUT: Final = {"format", "stored", "channels", "spatial_factor", "temporal_factor", "patchify", "patches_first"}
MASK_BITS: Final = "mask_bits"
"""The name of a tensor with a mask in an entry of a condition: uint8, with eight channels in each number."""
_LATENTS: Final = _SCALING | _LAYOUT | {"name", "marks", "mask_channels"}
_COUNTS: Final = ("channels", "spatial_factor", "temporal_factor", "patchify", "mask_channels")
_MARKS: Final = (["first"], ["first", "last"])


@dataclass(frozen=True, slots=True)
class Form:
    """How an output is made from stored tensors: one as it is, or several concatenated along `dim`."""

    parts: tuple["str | Form", ...]
    dim: int | None
    """None if there is one part."""
    width: int | None = None
    """The width to which the last axis is padded with zeros, if any."""


@dataclass(frozen=True, slots=True)
class Padding:
    """How outputs of different lengths are padded to one length."""

    dim: int
    side: Literal["left", "right"]
    length: int | None
    multiple: int
    value: float
    mask: str | None


@dataclass(frozen=True, slots=True)
class Constant:
    """A model input that is not stored. `"S"` is the length of the output `like`, `"B"` the batch size."""

    shape: tuple[int | Literal["S", "B"], ...]
    like: str
    kind: Literal["zeros", "positions"] = "zeros"
    """`positions` are int64 zeros, except for the last number of each row, which counts along S."""


@dataclass(frozen=True, slots=True)
class TextBlock:
    """How text embeddings are read."""

    outputs: Mapping[str, Form]
    padding: Mapping[str, Padding]
    constants: Mapping[str, Constant]
    mask_name: str | None

    def names(self) -> set[str]:
        """Return every name that this block puts into a batch."""
        masks = {padding.mask for padding in self.padding.values() if padding.mask is not None}
        return {*self.outputs, *self.constants, *masks}

    def fields(self) -> dict[str, Form]:
        """Return what can be asked for by name: each output, and each stored part of an output that is joined and not padded."""
        joined = [form for name, form in self.outputs.items() if form.dim is not None and name not in self.padding]
        return {**{part: Form((part,), None) for form in joined for part in stored_parts(form)}, **self.outputs}

    def only(self, names: Collection[str]) -> "TextBlock":
        """Return the block with these fields alone, and with the masks and constants that belong to them."""
        outputs = {name: form for name, form in self.fields().items() if name in names}
        padding = {name: padding for name, padding in self.padding.items() if name in outputs}
        constants = {name: constant for name, constant in self.constants.items() if constant.like in outputs}
        masks = {padding.mask for padding in padding.values()}
        return TextBlock(outputs, padding, constants, self.mask_name if self.mask_name in masks else None)


@dataclass(frozen=True, slots=True)
class LatentsBlock:
    """How latents are read."""

    stored: Literal["moments", "mean", "sample"]
    patchify: int
    scaling_factor: float
    shift_factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    patches_first: bool = False
    """Whether patches are folded into channels in the order (patch, channel), and not (channel, patch)."""
    is_scaled: bool = False
    """Whether the stored latents are normalised already, as in another trainer's cache. The constants are the ones used for that."""
    name: str | None = None
    """The name in a batch of a condition's latents; None for plain latents."""
    marks: tuple[str, ...] = ()
    """The frames that are given. Then so many channels as `temporal_factor` come in front and say it."""
    mask_channels: int = 0
    """The channels of the mask, which come behind the latents. The entry has a bit for each number of them, in `MASK_BITS`."""
    temporal_factor: int = 1


@dataclass(frozen=True, slots=True)
class MaskBlock:
    """How masks are read."""

    stored: str
    factor: int
    """Side of the picture divided by side of the mask."""


def stored_parts(form: Form) -> Iterator[str]:
    """Yield the names of the stored tensors that make an output, in order."""
    for part in form.parts:
        yield from stored_parts(part) if isinstance(part, Form) else (part,)


class _Unknown(ValueError):
    pass


@contextmanager
def _reading(recipe: Recipe, kind: str, known: Collection[str]) -> Generator[Mapping[str, Json]]:
    """Yield the `read` block of a recipe. Raises FormatError for a field that is missing, wrong or not in `known`."""
    try:
        if recipe.read.get("format") != FORMAT:
            raise _Unknown(f"it has format {recipe.read.get('format')!r}, this version reads {FORMAT}")
        _check_fields(recipe.read, known)
        yield recipe.read
    except WRONG_FIELDS as error:
        what = error if isinstance(error, _Unknown) else f"a field of {kind} is missing or wrong ({type(error).__name__}: {error})"
        raise NewerFormat(
            f"this cachestore cannot read the {recipe.encoder!r} recipe {recipe.fingerprint[:12]}…: {what}; install a newer cachestore"
        ) from error


def parse_text(recipe: Recipe) -> TextBlock:
    """Return the `read` block of a text recipe. Raises FormatError if this version does not fully know it."""
    with _reading(recipe, "a text recipe", _TEXT) as read:
        outputs = {str(name): _parse_form(form) for name, form in read["outputs"].items()}
        padding = {str(name): _parse_padding(value) for name, value in read["pad"].items()}
        constants = {str(name): _parse_constant(value) for name, value in read["constants"].items()}
        unknown = {*padding, *(constant.like for constant in constants.values())} - set(outputs)
        if unknown:
            raise _Unknown(f"it refers to {', '.join(sorted(unknown))}, which it does not make")
        return TextBlock(outputs, padding, constants, read["mask_name"])


def parse_latents(recipe: Recipe) -> LatentsBlock:
    """Return the `read` block of a latents recipe. Raises FormatError if this version does not fully know it."""
    with _reading(recipe, "a latents recipe", _LATENTS) as read:
        stored, mean, std = read["stored"], read["latents_mean"], read["latents_std"]
        if stored not in {"moments", "mean", "sample"} or (mean is None) != (std is None):
            raise _Unknown(f"it keeps {stored!r}, with latents_mean {mean!r} and latents_std {std!r}")
        if read.get("scaled", False) not in {True, False} or (read.get("scaled") and stored == "moments"):
            raise _Unknown(f"it keeps {stored!r}, scaled: {read['scaled']!r}")
        if wrong := [name for name in _COUNTS if name in read and (type(read[name]) is not int or read[name] < 1)]:
            raise _Unknown(f"its {wrong[0]} is {read[wrong[0]]!r:.80}")
        if "marks" in read and (read["marks"] not in _MARKS or stored == "moments"):
            raise _Unknown(f"it keeps {stored!r}, marks: {read['marks']!r}")
        if ("marks" in read or "mask_channels" in read) and read["patchify"] != 1:
            raise _Unknown(f"it folds {read['patchify']} x {read['patchify']} neighbours of a condition")
        return LatentsBlock(
            stored=stored,
            patchify=int(read["patchify"]),
            patches_first=bool(read.get("patches_first", False)),
            scaling_factor=1.0 if read["scaling_factor"] is None else float(read["scaling_factor"]),
            shift_factor=None if read["shift_factor"] is None else float(read["shift_factor"]),
            mean=None if mean is None else tuple(map(float, mean)),
            std=None if std is None else tuple(map(float, std)),
            is_scaled=bool(read.get("scaled", False)),
            name=None if read.get("name") is None else str(read["name"]),
            marks=tuple(read.get("marks", ())),
            mask_channels=int(read.get("mask_channels", 0)),
            temporal_factor=int(read.get("temporal_factor", 1)),
        )


def parse_mask(recipe: Recipe) -> MaskBlock:
    """Return the `read` block of a mask recipe. Raises FormatError if this version does not fully know it."""
    with _reading(recipe, "a recipe of masks", _MASK) as read:
        return MaskBlock(str(read["stored"]), int(read["factor"]))


def _parse_form(form: Mapping[str, Json]) -> Form:
    if set(form) == {"from"}:
        return Form((str(form["from"]),), None)
    if set(form) - {"widen"} != {"join", "dim"}:
        raise _Unknown(f"it makes an output by {', '.join(sorted(form))}")
    parts = [part if isinstance(part, str) else _parse_form(part) for part in form["join"]]
    if not parts:
        raise _Unknown("it joins an empty list of tensors")
    return Form(tuple(parts), int(form["dim"]), int(form["widen"]) if "widen" in form else None)


def _parse_padding(value: Mapping[str, Json]) -> Padding:
    _check_fields(value, _PADDING)
    side, length, mask = value["side"], value["length"], value["mask"]
    if side not in {"left", "right"}:
        raise _Unknown(f"it pads on the side {side!r}")
    return Padding(
        dim=int(value["dim"]),
        side=side,
        length=None if length is None else int(length),
        multiple=int(value["multiple"]),
        value=float(value["value"]),
        mask=None if mask is None else str(mask),
    )


def _parse_constant(value: Mapping[str, Json]) -> Constant:
    _check_fields(value, _CONSTANT)
    shape, kind = value["shape"], value["kind"]
    if kind not in {"zeros", "positions"} or not all(isinstance(size, int) or size in {"S", "B"} for size in shape):
        raise _Unknown(f"it has a constant of kind {kind!r} and shape {shape}")
    if kind == "positions" and (len(shape) < 2 or shape[-2] != "S" or not isinstance(shape[-1], int) or shape[-1] < 1):
        raise _Unknown(f"it counts along the shape {shape}")
    return Constant(tuple(shape), str(value["like"]), kind)


def _check_fields(value: Mapping[str, Json], known: Collection[str]) -> None:
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise _Unknown(f"it has the unknown fields {', '.join(unknown)}")
