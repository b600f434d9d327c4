"""What is known of each family of models: a table, no code. A new family is a new row.

A row says which components `encode_prompt` uses, what it returns, how that is kept and put together again, and what its pipeline's
`__call__` passes to it by default. Those defaults stand here, and so in the recipe, because `encode_prompt`'s own differ from them in
28 of 122 pipelines, and because planning must not import diffusers; tests hold the rows against the installed diffusers.

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
  A form that later needs its last axis extended with zeros (SD3) says so by `"widen": N`, applied after the join.
* `constants` are not stored. A shape's letters are `"S"`, the length along dim -2 of the output `like`, and `"B"`, the batch size;
  a shape without `"B"` has no batch axis (FLUX's `text_ids`). The dtype is that of `like`.
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
Let z be the mean or a sample. First, where `patchify` p is above 1, fold p x p neighbours into channels (FLUX.2). Then, in
the order in which diffusers' training scripts compute:

* with `latents_mean` and `latents_std` (lists, one number a channel): (z - latents_mean) * scaling_factor / latents_std
* without: (z - shift_factor) * scaling_factor

A null `scaling_factor` counts as 1, a null `shift_factor` as 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cachestore.errors import BadInput
from cachestore.keys import Json

READ_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How one family of models makes text embeddings."""

    name: str
    pipeline: str | None
    """`_class_name` in model_index.json; None for a transformers text encoder that stands alone."""
    components: tuple[str, ...]
    """The modules and tokenizers that are loaded; everything else of the pipeline is None."""
    tokenizer: str
    """The component whose count of tokens decides whether a caption is cut."""
    max_tokens: int
    """What fits, special tokens included, where neither `args` nor the tokenizer says less."""
    returns: tuple[str | None, ...]
    """Names of what `encode_prompt` returns, in order; None is thrown away."""
    outputs: Mapping[str, Json]
    """Forms by final name, see above. A joined output is kept as one tensor per component, named `OUTPUT.COMPONENT`."""
    constants: Mapping[str, Json] = field(default_factory=dict[str, Json])
    pad: Mapping[str, Json] = field(default_factory=dict[str, Json])
    mask: str | None = None
    """The returned mask by which padding is trimmed; None where padding is part of the embedding and is kept."""
    args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What `encode_prompt` is given besides the captions, at the values that `__call__` passes; `encode_args` may change these."""
    text_dtype: str = "float32"
    vae_dtype: str = "float32"
    vae_patch: int = 1
    """The denoiser takes latents in patches of this side, so a picture's sides are multiples of this many latent pixels."""


@dataclass(frozen=True, slots=True)
class VaeFamily:
    """How one class of VAEs is read: what its config leaves out."""

    class_name: str
    defaults: Mapping[str, Json]
    """The class's own defaults for fields that older config.json files do not hold."""


MAX_LENGTH_ARG = "max_sequence_length"

PLAIN = TextFamily(
    name="plain",
    pipeline=None,
    components=("text_encoder", "tokenizer"),
    tokenizer="tokenizer",
    max_tokens=512,
    returns=("prompt_embeds", "prompt_attention_mask"),
    outputs={"prompt_embeds": {"from": "prompt_embeds"}},
    pad={"prompt_embeds": {"dim": -2, "side": "right", "length": None, "multiple": 1, "value": 0, "mask": "prompt_attention_mask"}},
    mask="prompt_attention_mask",
    args={MAX_LENGTH_ARG: None},
)

_PIPELINES = (
    TextFamily(
        name="sd15",
        pipeline="StableDiffusionPipeline",
        components=("text_encoder", "tokenizer"),
        tokenizer="tokenizer",
        max_tokens=77,
        returns=("prompt_embeds", None),
        outputs={"prompt_embeds": {"from": "prompt_embeds"}},
        args={"clip_skip": None},
    ),
    TextFamily(
        name="sdxl",
        pipeline="StableDiffusionXLPipeline",
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer="tokenizer",
        max_tokens=77,
        returns=("prompt_embeds", None, "pooled_prompt_embeds", None),
        outputs={
            "prompt_embeds": {"join": ["prompt_embeds.text_encoder", "prompt_embeds.text_encoder_2"], "dim": -1},
            "pooled_prompt_embeds": {"from": "pooled_prompt_embeds"},
        },
        args={"clip_skip": None},
    ),
    TextFamily(
        name="flux",
        pipeline="FluxPipeline",
        components=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        tokenizer="tokenizer_2",
        max_tokens=512,
        returns=("prompt_embeds", "pooled_prompt_embeds", None),
        outputs={"prompt_embeds": {"from": "prompt_embeds"}, "pooled_prompt_embeds": {"from": "pooled_prompt_embeds"}},
        constants={"text_ids": {"kind": "zeros", "shape": ["S", 3], "like": "prompt_embeds"}},
        args={MAX_LENGTH_ARG: 512},
        text_dtype="bfloat16",
        vae_dtype="bfloat16",
        vae_patch=2,
    ),
)

_VAES = (
    VaeFamily(
        class_name="AutoencoderKL",
        defaults={
            "scaling_factor": 0.18215,
            "shift_factor": None,
            "latents_mean": None,
            "latents_std": None,
            "latent_channels": 4,
            "block_out_channels": [64],
        },
    ),
)

TEXT_FAMILIES: Mapping[str, TextFamily] = MappingProxyType({row.pipeline: row for row in _PIPELINES if row.pipeline is not None})
VAE_FAMILIES: Mapping[str, VaeFamily] = MappingProxyType({row.class_name: row for row in _VAES})


def text_family(pipeline: str) -> TextFamily:
    """The row of a pipeline class. Raises BadInput that lists the known ones."""
    if pipeline not in TEXT_FAMILIES:
        message = f"the pipeline class {pipeline!r} is not known; known are {', '.join(sorted(TEXT_FAMILIES))} and transformers encoders"
        raise BadInput(message)
    return TEXT_FAMILIES[pipeline]


def vae_family(class_name: str) -> VaeFamily:
    """The row of a VAE class. Raises BadInput that lists the known ones."""
    if class_name not in VAE_FAMILIES:
        message = f"the VAE class {class_name!r} is not known; known are {', '.join(sorted(VAE_FAMILIES))}"
        raise BadInput(message)
    return VAE_FAMILIES[class_name]


def stored_names(family: TextFamily) -> list[str]:
    """The names under which a family's tensors are kept, sorted."""
    return sorted(name for form in family.outputs.values() for name in form.get("join", [form.get("from")]))


def text_read(family: TextFamily) -> dict[str, Json]:
    """The `read` block of a text recipe."""
    return {
        "format": READ_FORMAT,
        "family": family.name,
        "outputs": dict(family.outputs),
        "constants": dict(family.constants),
        "pad": dict(family.pad),
        "mask_name": family.mask,
    }


def latents_read(family: VaeFamily, config: Mapping[str, Json], stored: str) -> dict[str, Json]:
    """The `read` block of a latents recipe, from the VAE's config.json."""
    full = {**family.defaults, **{name: value for name, value in config.items() if name in family.defaults}}
    return {
        "format": READ_FORMAT,
        "stored": stored,
        "channels": full["latent_channels"],
        "spatial_factor": 2 ** (len(full["block_out_channels"]) - 1),
        "temporal_factor": 1,
        "patchify": 1,
        "scaling_factor": full["scaling_factor"],
        "shift_factor": full["shift_factor"],
        "latents_mean": full["latents_mean"],
        "latents_std": full["latents_std"],
    }
