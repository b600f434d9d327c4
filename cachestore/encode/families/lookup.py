"""Look up families of models (`text_families`, `vae_families`), and make the `read` blocks of recipes from their rows.

## The `read` block of a text recipe

It has everything a reader needs to make a batch from entries, without this module:

    {"format": 1,
     "family": "sdxl",
     "outputs": {FINAL: FORM, ...},
     "constants": {FINAL: {"kind": "zeros", "shape": ["S", 3], "like": FINAL_OUTPUT}, ...},
     "pad": {FINAL: {"dim": -2, "side": "right", "length": null, "multiple": 1, "value": 0, "mask": NAME or null}, ...},
     "mask_name": NAME or null}

* FINAL is a name in the batch. It is diffusers' own: `prompt_embeds`, `pooled_prompt_embeds`, ...
* FORM is `{"from": STORED}`, the stored tensor as it is, or `{"join": [STORED or FORM, ...], "dim": -1}`, a concatenation along
  `dim`. Tensors are stored without a batch axis. `dim` is negative, so it means the same axis with and without one.
  With `"widen": N` (SD3) the last axis of a join is then extended with zeros to N.
* `constants` are not stored. In a shape `"S"` is the length along dim -2 of the output `like`, and `"B"` is the batch size.
  A shape without `"B"` has no batch axis (FLUX's `text_ids`). The kind `zeros` has the dtype of `like`. The kind `positions` (FLUX.2)
  is int64, and zero except for the last number of each row, which counts from 0 along S.
* An output in `pad` has a different length in each entry, along `dim`. A batch pads each with `value`, on `side`, to `length`; if that
  is null, to the longest of the batch, rounded up to `multiple`. `mask` is the name of an int64 `[B, length]` tensor in the batch, 1 for
  each row that is not padding; null if the model wants none. Outputs that are not in `pad` have one fixed shape.
* `mask_name` repeats the mask of `prompt_embeds`. It is the name of the pipeline's argument.

A reader refuses unknown fields and another `format`: it is then too old, and skipping a step would give wrong tensors.

## The `read` block of a latents recipe

    {"format": 1, "stored": "moments", "channels": 16, "spatial_factor": 8, "temporal_factor": 1, "patchify": 1,
     "scaling_factor": 0.3611, "shift_factor": 0.1159, "latents_mean": null, "latents_std": null}

`stored` is the name of the stored tensor. It is the encoder's raw output: `moments` `[2C, h, w]` is mean and log-variance, concatenated
along dim 0 (clamp the log-variance to -30..20; std = exp(log-variance / 2)); `mean` and `sample` are `[C, h, w]`.
VAEs for videos add an axis of frames, `[C, t, h, w]`, with t = 1 for a picture. `channels` is C.
Let z be the mean or a sample. If `patchify` p is above 1, first fold p x p neighbours into channels, in the order (channel, patch)
(FLUX.2), or with `"patches_first": true` in the order (patch, channel) (Ideogram 4). Then compute, in the order of diffusers' training
scripts:

* with `latents_mean` and `latents_std` (lists, one number per channel, or for each channel one per latent frame, of which there may be more
  than z has): (z - latents_mean) * scaling_factor / latents_std
* without: (z - shift_factor) * scaling_factor

A null `scaling_factor` counts as 1, a null `shift_factor` as 0. `"scaled": true` marks imported latents that another trainer has
normalised: the stored tensor is returned as it is, and the constants are those with which it was made.

Latents of a condition also have `"name"`, their name in a batch. With `"marks": ["first"]` (or `["first", "last"]`) the batch gets
`temporal_factor` channels in front, one for each frame of a latent frame, as Wan's image-to-video pipeline makes them: 1 where the frame is
given (in the first latent frame, and in the last channel of the last one), else 0.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import cast

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.encode.families.row import LIMIT, TextFamily, VaeFamily, plain_forms
from cachestore.encode.families.text import TEXT_FAMILIES
from cachestore.encode.families.vae import VAE_FAMILIES

READ_FORMAT = 1
_STATISTICS = ("latents_mean", "latents_std")


def text_family(pipeline: str) -> TextFamily:
    """Return the row of a pipeline class. Raises BadInput, which lists the known classes, if there is none."""
    if pipeline not in TEXT_FAMILIES:
        raise BadInput(
            f"the pipeline class {pipeline!r} is not known; known are {', '.join(sorted(TEXT_FAMILIES))} and transformers encoders"
        )
    return TEXT_FAMILIES[pipeline]


def vae_family(class_name: str) -> VaeFamily:
    """Return the row of a VAE class. Raises BadInput, which lists the known classes, if there is none."""
    if class_name not in VAE_FAMILIES:
        raise BadInput(f"the VAE class {class_name!r} is not known; known are {', '.join(sorted(VAE_FAMILIES))}")
    return VAE_FAMILIES[class_name]


def as_it_comes(family: TextFamily, index: Mapping[str, Json], config_of: Callable[[str], Mapping[str, Json]]) -> TextFamily:
    """Return the row for a model by its model_index.json and its components' config.json: it may lack text encoders, or differ."""
    for name, row in family.without.items():
        entry = index.get(name)
        if not isinstance(entry, list) or entry[:1] == [None]:
            return row
    for name, row in family.configured.items():
        asked, _, value = name.partition("=")
        component, _, field = asked.partition(".")
        found = config_of(component).get(field)
        if found and value in ("", found):
            return row
    return family


def with_encoders(family: TextFamily, names: Collection[str]) -> TextFamily:
    """Return the row for some of a family's text encoders, called without the others; the family itself for all of them.

    Nothing is joined: each stored tensor is an output under its own name. BadInput names what can be encoded alone.
    """
    chosen = tuple(name for name in family.encoders if name in names)
    if chosen == family.encoders and set(names) == set(chosen):
        return family
    if not chosen or set(names) - set(chosen) or set(chosen) - set(family.parts):
        able = "; ".join(f"{row.pipeline}: {', '.join(row.parts)}" for row in TEXT_FAMILIES.values() if row.parts)
        has = f"it has {', '.join(family.encoders)}"
        raise BadInput(
            f"{family.pipeline or 'a text encoder that stands alone'} cannot encode"
            f" {', '.join(sorted(names)) or 'text of no encoder'} alone ({has}); pass {option('encode', 'text')}. These pipelines can:"
            f" {able}",
            option="encode",
        )
    parts = {name: family.parts[name] for name in chosen}
    stored = [name for part in parts.values() for name in (part.rows, part.pooled) if name is not None]
    tokenizers = {name: name.replace("text_encoder", "tokenizer") for name in chosen}
    counts = family.tokenizer if family.tokenizer in tokenizers.values() else tokenizers[chosen[0]]
    return replace(
        family,
        components=tuple(one for name in chosen for one in (name, tokenizers[name])),
        tokenizer=counts,
        returns=(),
        outputs=plain_forms(*stored),
        pad={name: pad for name, pad in family.pad.items() if name in stored},
        trims={name: trim for name, trim in family.trims.items() if name in stored},
        constants={name: constant for name, constant in family.constants.items() if constant["like"] in stored},
        args={name: value for name, value in family.args.items() if any(name in part.args for part in parts.values())},
        called=chosen,
    )


def stored_names(family: TextFamily) -> list[str]:
    """Return the names of a family's stored tensors, sorted."""
    return sorted(name for form in family.outputs.values() for name in form_names(form))


def form_names(form: Json) -> list[str]:
    """Return the names of the stored tensors that a form is made from, in order."""
    if isinstance(form, str):
        return [form]
    return [form["from"]] if "from" in form else [name for part in form["join"] for name in form_names(part)]


def text_read(family: TextFamily, *, limit: int | None = None, widths: Mapping[str, int] | None = None) -> dict[str, Json]:
    """Return the `read` block of a text recipe, from a caption's token limit, and the widths of encoders and of the row's `asks`."""
    pads = {name: {**pad, "length": limit if pad["length"] == LIMIT else pad["length"]} for name, pad in family.pad.items()}
    return {
        "format": READ_FORMAT,
        "family": family.name,
        "outputs": {name: _with_widths(form, widths or {}) for name, form in family.outputs.items()},
        "constants": dict(family.constants),
        "pad": pads,
        "mask_name": family.mask,
    }


def plain_read(name: str) -> dict[str, Json]:
    """Return the `read` block of embeddings that are stored and returned as they are."""
    return {"format": READ_FORMAT, "family": name, "outputs": plain_forms(name), "constants": {}, "pad": {}, "mask_name": None}


def _with_widths(form: Json, widths: Mapping[str, int]) -> Json:
    if isinstance(form, str) or "join" not in form:
        return form
    filled = {**form, "join": [_with_widths(part, widths) for part in form["join"]]}
    return {**filled, "widen": widths.get(form["widen"], form["widen"])} if "widen" in form else filled


def latents_read(
    family: VaeFamily, config: Mapping[str, Json], stored: str, statistics: Mapping[str, list[float]] | None = None
) -> dict[str, Json]:
    """Return the `read` block of latents, from the VAE's config.json and statistics in its weights.

    Raises BadInput if a field is missing.
    """
    if missing := sorted(set(family.required) - set(config)):
        raise BadInput(f"config.json of the VAE ({family.class_name}) does not set {', '.join(missing)}: download the model again")
    full: dict[str, Json] = {"shift_factor": None} | dict.fromkeys(_STATISTICS)
    full |= {**family.defaults, **{name: value for name, value in config.items() if name in {*family.defaults, *family.required}}}
    normalising = {name: full[name] for name in _STATISTICS}
    if statistics:
        std = statistics.get("std") or [sqrt(value + full["batch_norm_eps"]) for value in statistics["variance"]]
        normalising = {"latents_mean": statistics["mean"], "latents_std": std}
    return {
        "format": READ_FORMAT,
        "stored": stored if family.is_random else "mean",
        "channels": full[family.channels_field],
        "spatial_factor": _spatial_factor(family, full),
        "temporal_factor": _temporal_factor(family, full),
        "patchify": family.patchify,
        "scaling_factor": full.get("scaling_factor"),
        "shift_factor": full["shift_factor"],
        **normalising,
    }


def _temporal_factor(family: VaeFamily, config: Mapping[str, Json]) -> int:
    value = next((config[name] for name in family.temporal_fields if config[name] is not None), family.temporal_factor)
    if not isinstance(value, list | tuple):
        return int(value)
    numbers = cast("Sequence[int | bool]", value)
    if all(isinstance(number, bool) for number in numbers):
        return int(config.get("patch_size_t") or 1) * 2 ** sum(numbers)
    return prod(numbers)


def _spatial_factor(family: VaeFamily, config: Mapping[str, Json]) -> int:
    if family.factor == "scalings" and config["spatial_compression_ratio"] is not None:
        return int(config["spatial_compression_ratio"])
    value = config[family.factor_field]
    if family.factor == "ratio":
        return int(value)
    if family.factor == "scalings":
        return int(config["patch_size"]) * 2 ** sum(map(bool, value))
    halvings = len(value) - 1 if family.factor == "blocks" else len(value)
    return 2**halvings
