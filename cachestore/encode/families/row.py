"""The rows of the tables of families: `TextFamily` and `VaeFamily`. Plain values, without torch or files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cachestore.core.keys import Json
from cachestore.core.samples import CONTROL

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES: Final = {given: name for name, short in _SHORT.items() for given in (name, short)}
"""The canonical name of a dtype, by every name that a user may give it."""
MAX_LENGTH_ARG: Final = "max_sequence_length"
CONNECTORS: Final = "connectors"
"""The component of LTX-2 whose frozen projection is applied to the rows before they are stored."""
SKIP_ARG: Final = "clip_skip"
"""How many of CLIP's last layers are left out, as diffusers counts them: 1 here is 2 in kohya's scripts and in web UIs."""
EXACT_PADDING: Final = "exact_padding"
"""An `--encode-arg` of masked families, not passed to the pipeline. If true, captions are padded to the limit, as by the pipeline."""
LIMIT: Final = "limit"
"""In a row's `pad`, stands for the largest number of tokens of a caption, which depends on the request."""
ZERO_ROWS: Final = "zero rows"
"""In a row's `trims`, means that padding rows are zero, and that no mask is returned."""
PAST_LIMIT: Final = "past the limit"
"""In a row's `trims`, means that the first `max_tokens` rows are kept, and the zeros that the pipeline appends to them are dropped."""
DEFAULT_OF_CALL: Final = "default_of_call"
"""The argument `{DEFAULT_OF_CALL: DIGEST}` stands for the default of `__call__` in the installed diffusers, which must have this digest.
So instructions of several kilobytes are neither copied here nor written into every recipe."""


def is_text_encoder(name: str) -> bool:
    """Return whether an item of `encode` names one of a pipeline's text encoders (`text_encoder_2`)."""
    return name.startswith("text_encoder")


def encoder_of(name: str) -> str:
    """Return the encoder for an item of `encode`: `text` for the name of a single text encoder, else the item itself."""
    return "text" if is_text_encoder(name) else name


def plain_forms(*names: str) -> dict[str, Json]:
    """Return the forms of outputs that are stored as they are, each under its own name."""
    return {name: {"from": name} for name in names}


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """What one text encoder of a family makes if it is called alone. It makes the same together with the others."""

    rows: str | None = None
    """The stored name of its rows (one per token); None if only its pooled output is used."""
    pooled: str | None = None
    """The stored name of its pooled output; None if that is not used."""
    layer: int | None = None
    """The hidden states that are used as rows: an index from the end, before `clip_skip`; None for the last ones, which are normalised."""
    args: tuple[str, ...] = ()
    """The arguments among the family's `args` that it needs."""


@dataclass(frozen=True, slots=True)
class RowWidth:
    """How wide the rows of an output are. Only forecasts of sizes need it."""

    component: str
    layers: int | str = 1
    """How many layers' rows are stored for a token: a number, or a field of the component's config.json."""
    field: str | None = None
    """The field of its config.json with the width; None for the width of a text encoder's rows."""


@dataclass(frozen=True, slots=True)
class PictureInput:
    """How pictures are given to a text encoder together with a caption, as `image` of `encode_prompt`, prepared as in `__call__`."""

    area: int | None = None
    """Each picture is resized to about this many pixels and keeps its aspect ratio; None if it is passed as it is."""
    dropped: int = 0
    """How many tokens of the template in front of a caption are dropped from the output, if a processor reads the caption."""
    rows: int = 0
    """How many rows a picture makes besides those of the caption's tokens, if that does not depend on its size."""
    step: int = 32
    """Sides of the resized pictures are multiples of this, in pixels."""
    most: int | None = None
    """The largest number of pictures; None for any. At least one is needed. With 1 the picture itself is passed, otherwise a list."""
    role: str = CONTROL


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How one family of models makes text embeddings."""

    name: str
    pipeline: str | None
    """`_class_name` in model_index.json; None for a transformers text encoder without a pipeline."""
    max_tokens: int
    """The largest number of tokens, special tokens included, unless `args` or the tokenizer allows fewer."""
    returns: tuple[str | None, ...]
    """The names of what `encode_prompt` returns, in order. A value with the name None is not used."""
    components: tuple[str, ...] = ("text_encoder", "tokenizer")
    """The modules and tokenizers that are loaded. All other components of the pipeline are None."""
    tokenizer: str = "tokenizer"
    """The component that counts tokens to decide whether a caption is cut. A processor contains a tokenizer."""
    outputs: Mapping[str, Json] = field(default_factory=lambda: plain_forms("prompt_embeds"))
    """Forms by final name, see `families`. A joined output is stored as one tensor per component, named `OUTPUT.COMPONENT`."""
    constants: Mapping[str, Json] = field(default_factory=dict[str, Json])
    pad: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How to pad each output whose length differs from entry to entry. A `length` of LIMIT is filled in later."""
    trims: Mapping[str, str] = field(default_factory=dict[str, str])
    """How the padding of each output is found and dropped: by the name of a returned mask, or of cumulated lengths `[B + 1]`, by ZERO_ROWS,
    or by PAST_LIMIT. If an output is in `pad` but not here, the pipeline returns it without padding."""
    mask: str | None = None
    """The mask of `prompt_embeds` in a batch; None if the model wants none."""
    args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Further arguments of `encode_prompt`, with the values that `__call__` passes. `encode_args` may change them."""
    settings: tuple[str, ...] = ()
    """Plain values of model_index.json that change the embeddings."""
    cleaners: tuple[str, ...] = ()
    """Packages that clean captions. Without them a pipeline silently makes other embeddings, so their versions are in the recipe."""
    alone: frozenset[str] = frozenset()
    """Captions that must not share a batch, as they change the other captions in it."""
    length_step: int | None = None
    """Set if padding is neither masked nor of fixed length. Captions then share a batch only if their lengths, rounded up to a multiple of
    this, are equal. A caption encoded alone is padded to the same length."""
    parts: Mapping[str, EncoderPart] = field(default_factory=dict[str, EncoderPart])
    """The text encoders that can be called alone, by name. Empty if their outputs depend on each other, or if this was not examined."""
    captioned: tuple[str, ...] = ()
    """The text encoders that may each read a caption of its own: `encode_prompt` has a `prompt_2` for `text_encoder_2`. Empty if all of
    them read the same. HunyuanVideo's `encode_prompt` takes a `prompt_2` and ignores it."""
    called: tuple[str, ...] = ()
    """The names in `parts` that are called one by one; empty if `encode_prompt` is called."""
    without: Mapping[str, "TextFamily"] = field(default_factory=dict[str, "TextFamily"])
    """The text encoders that a model may lack, by name, each with the row that is then used instead of this one."""
    configured: Mapping[str, "TextFamily"] = field(default_factory=dict[str, "TextFamily"])
    """`COMPONENT.FIELD` or `COMPONENT.FIELD=VALUE`: fields in config.json of components, each with the row that is used instead of this one
    if the field is true, or has this value."""
    is_found: bool = False
    """Whether introspection made this row. What it assumes is checked when the model is loaded."""
    is_masked: bool = False
    """Whether the text encoder is given a mask, and rows of padding are dropped. Then a caption may be padded to any length by
    MAX_LENGTH_ARG; its rows change only by rounding."""
    rows: Mapping[str, RowWidth] = field(default_factory=dict[str, RowWidth])
    """The outputs with a row for each token, if that is not `prompt_embeds` alone, with one row of the encoder that counts tokens."""
    batch_axes: Mapping[str, int] = field(default_factory=dict[str, int])
    """The axis of the batch in what `encode_prompt` returns, by name, where it is not the first."""
    stand_ins: tuple[str, ...] = ()
    """Components that the pipeline would load by itself, and that encoding does not use."""
    rewrites_captions: bool = False
    """Whether a template, an instruction or cleaning changes a caption before it is tokenised. Then only the pipeline knows how many
    tokens it has."""
    template_tokens: str | None = None
    """Set if `encode_prompt` reads a caption without asking the tokenizer to cut it: the pipeline's attribute with the number of tokens of
    the template that it drops; "" if it drops none."""
    tokenizer_limit: int | None = None
    """The number of rows that the tokenizer leaves of a longer caption, if that is not MAX_LENGTH_ARG."""
    pictures: PictureInput | None = None
    """The pictures that the text encoder sees with a caption. Then each caption needs pictures and is encoded in a batch of its own."""
    script_args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The values of `args` in diffusers' own training script, where they differ."""
    script_resizes: str | None = None
    """The interpolation with which that script resizes pictures by default, if it is not Lanczos."""
    text_dtype: str = "float32"
    vae_dtype: str = "float32"
    vae_config: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Values that the pipeline uses in the place of those fields of the VAE's config.json."""
    patches_first: bool = False
    """Whether the VAE's patches are folded into channels in the order (patch, channel), and not (channel, patch)."""
    vae_patch: int = 1
    """The side of the patches in which the denoiser takes latents. The sides of latents are multiples of it."""

    @property
    def encoders(self) -> tuple[str, ...]:
        """The text encoders among the components."""
        return tuple(name for name in self.components if is_text_encoder(name))

    @property
    def asks(self) -> tuple[str, ...]:
        """The `COMPONENT.FIELD` that forms `widen` to: fields in config.json of components that are not loaded. The pipeline reads them."""
        return tuple(width for form in self.outputs.values() if "." in (width := form.get("widen", "")))


@dataclass(frozen=True, slots=True)
class VaeFamily:
    """How one class of VAEs is called and read, as far as its config does not say it."""

    class_name: str
    defaults: Mapping[str, Json]
    """The defaults of the class for fields that older config.json files lack."""
    required: tuple[str, ...] = ()
    """Further fields that config.json must have: they have no default, or a long one."""
    factor: Literal["blocks", "ratio", "halvings", "scalings"] = "blocks"
    """How the spatial factor follows from the config's field `factor_field`. "blocks": a list with one item more than there are halvings.
    "ratio": the factor itself. "halvings": a list with one item per halving. "scalings": a list of flags, true for each halving; the
    result is multiplied by the patch size."""
    factor_field: str = "block_out_channels"
    channels_field: str = "latent_channels"
    temporal_factor: int = 1
    """How many frames make one latent frame, after the first, unless a field of `temporal_fields` says it."""
    temporal_fields: tuple[str, ...] = ()
    """Fields of the config that say it; the first that is set counts. It is the number itself, a list of factors, or a list of flags,
    true for each halving, in which case the result is multiplied by `patch_size_t`."""
    patchify: int = 1
    has_frames: bool = False
    """Whether the VAE takes [B, 3, T, H, W]. A picture is then a video of one frame, and its latents keep the axis of frames."""
    is_of_pictures: bool = False
    """Whether it takes one frame at most, though it has an axis of frames."""
    has_alpha: bool = False
    """Whether the VAE takes pictures with a fourth channel. Here it is always opaque."""
    is_random: bool = True
    """Whether it returns mean and variance; otherwise it returns one latent, which is stored as the mean."""
    statistics: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names of the weights that normalise latents: `mean` and `std`, or `mean` and `variance`. The config's `batch_norm_eps` is added
    to the variance."""
    working: tuple[int, int, int] = (2560, 0, 0)
    """How many bytes the tensors of its encoder take at once in float32, for each pixel: of a picture; of a clip; and of a clip for each of
    its frames besides. `scripts/bench/vae_memory.py` computes them."""
