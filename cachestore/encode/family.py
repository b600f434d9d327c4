"""What a row of the table of families says. Values alone: no torch, no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cachestore.core.keys import Json
from cachestore.core.samples import CONTROL

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES: Final = {given: name for name, short in _SHORT.items() for given in (name, short)}
"""What a user may call the dtype of a model, and its canonical name."""

MAX_LENGTH_ARG: Final = "max_sequence_length"

SKIP_ARG: Final = "clip_skip"
"""How many of CLIP's last layers are left out, as diffusers counts: its 1 is the 2 of kohya's scripts and of web UIs."""

EXACT_PADDING: Final = "exact_padding"
"""An `--encode-arg` of masked families that no pipeline gets: true pads captions as the pipeline itself would, to the limit."""

LIMIT: Final = "limit"
"""Stands in a row's `pad` for the most tokens a caption can have, which is settled with a request."""

ZERO_ROWS: Final = "zero rows"
"""Stands in a row's `trims` where no mask is returned and padding was set to zero."""

PAST_LIMIT: Final = "past the limit"
"""Stands in a row's `trims` where the pipeline adds zeros to as many rows as the tokenizer always makes, which are kept whole."""

DEFAULT_OF_CALL: Final = "default_of_call"
"""`{DEFAULT_OF_CALL: DIGEST}` as an argument is what `__call__` of the installed diffusers has as its default, if that is the one with
this digest: instructions of several kilobytes are neither copied here nor written into every recipe."""


def is_text_encoder(name: str) -> bool:
    """Whether something to encode names one of a pipeline's text encoders (`text_encoder_2`)."""
    return name.startswith("text_encoder")


def encoder_of(name: str) -> str:
    """The encoder that makes what is asked for by this name: some of a pipeline's text encoders are `text` too."""
    return "text" if is_text_encoder(name) else name


def plain_forms(*names: str) -> dict[str, Json]:
    """Outputs that are kept as they are, each under its own name."""
    return {name: {"from": name} for name in names}


@dataclass(frozen=True, slots=True)
class TextPart:
    """What one text encoder of a family makes when it is called without the others: what it makes beside them."""

    rows: str | None = None
    """The stored name of its rows; None where only what it pools is used."""
    pooled: str | None = None
    layer: int | None = None
    """Which of the hidden states its rows are, counted from the end, before `clip_skip`; None for its last, normalised ones."""
    args: tuple[str, ...] = ()
    """Those of the family's `args` that concern it."""


@dataclass(frozen=True, slots=True)
class ShownPictures:
    """Pictures that a text encoder is shown beside each caption, prepared as the pipeline's `__call__` does it."""

    area: int
    """Each is resized to about so many pixels, in its own shape."""
    dropped: int
    """Tokens of the template in front of a caption whose rows are not kept."""
    step: int = 32
    """The sides are then multiples of so many pixels."""
    most: int | None = None
    """How many there can be, at least one; any number where None. A single one is passed as it is, others as a list."""
    argument: str = "image"
    """The argument of `encode_prompt`."""
    role: str = CONTROL
    """Which of a sample's pictures they are."""


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How one family of models makes text embeddings."""

    name: str
    pipeline: str | None
    """`_class_name` in model_index.json; None for a transformers text encoder that stands alone."""
    max_tokens: int
    """What fits, special tokens included, where neither `args` nor the tokenizer says less."""
    returns: tuple[str | None, ...]
    """Names of what `encode_prompt` returns, in order; None is thrown away."""
    components: tuple[str, ...] = ("text_encoder", "tokenizer")
    """The modules and tokenizers that are loaded; everything else of the pipeline is None."""
    tokenizer: str = "tokenizer"
    """The component whose count of tokens decides whether a caption is cut; a processor holds a tokenizer."""
    outputs: Mapping[str, Json] = field(default_factory=lambda: plain_forms("prompt_embeds"))
    """Forms by final name, see `families`. A joined output is kept as one tensor per component, named `OUTPUT.COMPONENT`."""
    constants: Mapping[str, Json] = field(default_factory=dict[str, Json])
    pad: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Outputs whose length differs from entry to entry. A `length` of LIMIT is filled in."""
    trims: Mapping[str, str] = field(default_factory=dict[str, str])
    """By output, how its padding is found and dropped: the returned mask that names its real rows, ZERO_ROWS, or PAST_LIMIT. An output in
    `pad` and not here is returned without padding."""
    mask: str | None = None
    """The mask of `prompt_embeds` in a batch; None where the model wants none."""
    args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What `encode_prompt` is given besides the captions, at the values that `__call__` passes; `encode_args` may change these."""
    settings: tuple[str, ...] = ()
    """Plain values of model_index.json that change the embeddings."""
    cleaners: tuple[str, ...] = ()
    """Packages that clean captions, and change them silently where they are absent; their versions are in the recipe."""
    alone: frozenset[str] = frozenset()
    """Captions that change those they share a batch with."""
    length_step: int | None = None
    """Where padding is neither masked nor of fixed length: captions share a batch only where their lengths, rounded up to a multiple of
    this, are equal, as each is padded to that alone too."""
    parts: Mapping[str, TextPart] = field(default_factory=dict[str, TextPart])
    """By name the text encoders that can be called alone; none where their outputs depend on each other, or nobody looked."""
    called: tuple[str, ...] = ()
    """Of `parts` those that are called, one by one; none where `encode_prompt` is."""
    without: Mapping[str, "TextFamily"] = field(default_factory=dict[str, "TextFamily"])
    """By name text encoders that a model may come without, each with the row that then takes the place of this one."""
    asks: tuple[str, ...] = ()
    """`COMPONENT.FIELD` of config.json of components that are not loaded: the pipeline asks for them, and a form may `widen` to one."""
    is_found: bool = False
    """Whether this row was found by introspection, not written down: what it supposes is probed when the model is loaded."""
    is_masked: bool = False
    """Whether the text encoder is given a mask, and what it makes of padding is dropped. A caption may then be padded to any length by
    MAX_LENGTH_ARG: its rows stay the same but for rounding."""
    rewrites_captions: bool = False
    """Whether a template, an instruction or cleaning changes a caption before it is tokenised: only the pipeline then knows how many
    tokens it has."""
    tokenizer_limit: int | None = None
    """The most rows that the tokenizer's own cut leaves, where that is not MAX_LENGTH_ARG."""
    pictures: ShownPictures | None = None
    """What the text encoder sees besides the caption. A caption is then encoded alone, and no caption is encoded without pictures."""
    script_args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Of `args` those to which diffusers' own training script gives another value, and that value."""
    script_resizes: str | None = None
    """How that script resizes pictures by default, in a word, where it is not by Lanczos."""
    text_dtype: str = "float32"
    vae_dtype: str = "float32"
    vae_patch: int = 1
    """The denoiser takes latents in patches of this side, so a picture's sides are multiples of this many latent pixels."""

    @property
    def encoders(self) -> tuple[str, ...]:
        """The text encoders among the components."""
        return tuple(name for name in self.components if is_text_encoder(name))


@dataclass(frozen=True, slots=True)
class VaeFamily:
    """How one class of VAEs is called and read: what its config leaves out."""

    class_name: str
    defaults: Mapping[str, Json]
    """The class's own defaults for fields that older config.json files do not hold."""
    factor: Literal["blocks", "ratio", "halvings", "scalings"] = "blocks"
    """How the spatial factor follows from the config's field `factor_field`: a list with one level more than there are halvings, the
    number itself, a list with one item for each halving, or a list of flags that are set for halvings, times the patch size."""
    factor_field: str = "block_out_channels"
    channels_field: str = "latent_channels"
    temporal_factor: int = 1
    """So many frames make one of latents after the first, where the config's fields do not say it."""
    temporal_fields: tuple[str, ...] = ()
    """Fields of the config that say it, the first that is set counts: the number itself; a list of flags that are set for halvings,
    times `patch_size_t`; or a list of factors."""
    patchify: int = 1
    has_frames: bool = False
    """Takes [B, 3, T, H, W]: a picture is a video of one frame, and its latents keep their axis of frames."""
    is_random: bool = True
    """Whether it gives mean and variance; else one latent, which is kept as the mean."""
    statistics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tensors among the weights that normalise, by what they are: `mean` with `std`, or `mean` with `variance`, to which the config's
    `batch_norm_eps` is added."""
