"""Families of models looked up (`text_families`, `vae_families`), and the `read` blocks that recipes get from their rows.

## The `read` block of a text recipe

Everything a reader needs to make a batch from entries, without this module:

    {"format": 1,
     "family": "sdxl",
     "outputs": {FINAL: FORM, ...},
     "constants": {FINAL: {"kind": "zeros", "shape": ["S", 3], "like": FINAL_OUTPUT}, ...},
     "pad": {FINAL: {"dim": -2, "side": "right", "length": null, "multiple": 1, "value": 0, "mask": NAME or null}, ...},
     "mask_name": NAME or null}

* FINAL is a name in the batch, by diffusers' words: `prompt_embeds`, `pooled_prompt_embeds`, ...
* FORM is `{"from": STORED}`, the stored tensor as it is, or `{"join": [STORED or FORM, ...], "dim": -1}`, a concatenation along
  `dim`. Tensors are stored without a batch axis, so a `dim` is negative and holds with and without one.
  A join whose last axis is then extended with zeros to N (SD3) says so by `"widen": N`.
* `constants` are not stored. A shape's letters are `"S"`, the length along dim -2 of the output `like`, and `"B"`, the batch size;
  a shape without `"B"` has no batch axis (FLUX's `text_ids`). Zeros have the dtype of `like`. Of the kind `positions` (FLUX.2) they
  are int64, and the last number of each row counts from 0 along S.
* An output in `pad` differs in length from entry to entry along `dim`. A batch extends each to `length`, or to the longest of the
  batch where that is null, rounded up to `multiple`, with `value`, on `side`. `mask` is the name under which the batch carries an
  int64 `[B, length]` tensor, 1 where a row is real; null where the model wants none. Outputs not in `pad` have one fixed shape.
* `mask_name` repeats the mask of `prompt_embeds`: the pipeline argument's own name.

Unknown fields, or another `format`, mean that the reader is too old: it refuses, as skipping a step gives wrong tensors.

## The `read` block of a latents recipe

    {"format": 1, "stored": "moments", "channels": 16, "spatial_factor": 8, "temporal_factor": 1, "patchify": 1,
     "scaling_factor": 0.3611, "shift_factor": 0.1159, "latents_mean": null, "latents_std": null}

The stored tensor bears the name in `stored` and is raw, straight from the encoder: `moments` `[2C, h, w]` is mean and log-variance
one after the other along dim 0 (clamp the log-variance to -30..20; std = exp(half of it)), `mean` and `sample` are `[C, h, w]`.
Of VAEs for videos they have an axis of frames, `[C, t, h, w]`, which is 1 for a picture. `channels` is C.
Let z be the mean or a sample. First, where `patchify` p is above 1, fold p x p neighbours into channels (FLUX.2). Then, in
the order in which diffusers' training scripts compute:

* with `latents_mean` and `latents_std` (lists, one number a channel): (z - latents_mean) * scaling_factor / latents_std
* without: (z - shift_factor) * scaling_factor

A null `scaling_factor` counts as 1, a null `shift_factor` as 0. With `"scaled": true`, of latents that another trainer normalised and
that were imported, the stored tensor is handed out as it is; the constants are those by which it was made.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import cast

from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.encode.family import LIMIT, TextFamily, VaeFamily, plain_forms
from cachestore.encode.text_families import TEXT_FAMILIES
from cachestore.encode.vae_families import VAE_FAMILIES

READ_FORMAT = 1

_STATISTICS = ("latents_mean", "latents_std")


def text_family(pipeline: str) -> TextFamily:
    """The row of a pipeline class. Raises BadInput that lists the known ones."""
    if pipeline not in TEXT_FAMILIES:
        raise BadInput(
            f"the pipeline class {pipeline!r} is not known; known are {', '.join(sorted(TEXT_FAMILIES))} and transformers encoders"
        )
    return TEXT_FAMILIES[pipeline]


def vae_family(class_name: str) -> VaeFamily:
    """The row of a VAE class. Raises BadInput that lists the known ones."""
    if class_name not in VAE_FAMILIES:
        raise BadInput(f"the VAE class {class_name!r} is not known; known are {', '.join(sorted(VAE_FAMILIES))}")
    return VAE_FAMILIES[class_name]


def as_it_comes(family: TextFamily, index: Mapping[str, Json]) -> TextFamily:
    """A family's row for a model that may lack text encoders, as its model_index.json says; the row itself where it lacks none."""
    for name, row in family.without.items():
        entry = index.get(name)
        if not isinstance(entry, list) or entry[:1] == [None]:
            return row
    return family


def with_encoders(family: TextFamily, names: Collection[str]) -> TextFamily:
    """A family's row for some of its text encoders, called without the others; all of them give the row itself.

    Each stored tensor is an output under its own name, as nothing is joined whose other part is missing. No name at all is refused as
    are unknown ones: BadInput names what can be made alone.
    """
    chosen = tuple(name for name in family.encoders if name in names)
    if chosen == family.encoders and set(names) == set(chosen):
        return family
    if not chosen or set(names) - set(chosen) or set(chosen) - set(family.parts):
        able = "; ".join(f"{row.pipeline}: {', '.join(row.parts)}" for row in TEXT_FAMILIES.values() if row.parts)
        has = f"it has {', '.join(family.encoders)}"
        raise BadInput(
            f"{family.pipeline or 'a text encoder that stands alone'} cannot encode"
            f" {', '.join(sorted(names)) or 'text of no encoder'} alone ({has}); pass --encode text. These pipelines can: {able}"
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
        asks=(),
        constants={name: constant for name, constant in family.constants.items() if constant["like"] in stored},
        args={name: value for name, value in family.args.items() if any(name in part.args for part in parts.values())},
        called=chosen,
    )


def stored_names(family: TextFamily) -> list[str]:
    """The names under which a family's tensors are kept, sorted."""
    return sorted(name for form in family.outputs.values() for name in form_names(form))


def form_names(form: Json) -> list[str]:
    """The stored tensors that a form is made of, in order."""
    if isinstance(form, str):
        return [form]
    return [form["from"]] if "from" in form else [name for part in form["join"] for name in form_names(part)]


def text_read(family: TextFamily, *, limit: int | None = None, widths: Mapping[str, int] | None = None) -> dict[str, Json]:
    """The `read` block of a text recipe: `limit` is a caption's most tokens, `widths` those of encoders and of what the row `asks`."""
    pads = {name: {**pad, "length": limit if pad["length"] == LIMIT else pad["length"]} for name, pad in family.pad.items()}
    return {
        "format": READ_FORMAT,
        "family": family.name,
        "outputs": {name: _with_widths(form, widths or {}) for name, form in family.outputs.items()},
        "constants": dict(family.constants),
        "pad": pads,
        "mask_name": family.mask,
    }


def _with_widths(form: Json, widths: Mapping[str, int]) -> Json:
    if isinstance(form, str) or "join" not in form:
        return form
    filled = {**form, "join": [_with_widths(part, widths) for part in form["join"]]}
    return {**filled, "widen": widths.get(form["widen"], form["widen"])} if "widen" in form else filled


def latents_read(
    family: VaeFamily, config: Mapping[str, Json], stored: str, statistics: Mapping[str, list[float]] | None = None
) -> dict[str, Json]:
    """The `read` block of a latents recipe, from the VAE's config.json, and from the weights that normalise where it has such."""
    full = {"shift_factor": None} | dict.fromkeys(_STATISTICS)
    full |= {**family.defaults, **{name: value for name, value in config.items() if name in family.defaults}}
    return {
        "format": READ_FORMAT,
        "stored": stored if family.is_random else "mean",
        "channels": full[family.channels_field],
        "spatial_factor": _spatial_factor(family, full),
        "temporal_factor": _temporal_factor(family, full),
        "patchify": family.patchify,
        "scaling_factor": full.get("scaling_factor"),
        "shift_factor": full["shift_factor"],
        **({name: full[name] for name in _STATISTICS} | _normalising(full, statistics)),
    }


def _normalising(config: Mapping[str, Json], statistics: Mapping[str, list[float]] | None) -> dict[str, Json]:
    """Mean and standard deviation from weights; nothing for a VAE whose config says them, or whose weights were not read."""
    if not statistics:
        return {}
    std = statistics.get("std") or [sqrt(value + config["batch_norm_eps"]) for value in statistics["variance"]]
    return {"latents_mean": statistics["mean"], "latents_std": std}


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
