"""Which captions of a sample are encoded, and which one it has in an epoch: `CaptionPolicy` decides both.

What is encoded depends on the captions alone. Which caption a sample has depends on (seed, epoch, sample id), so it is the same in every
worker, on every rank and in a resumed run. The orders of tags are computed here, not by a library.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle, islice, permutations
from typing import Any, Final, Literal, Self, get_args

from cachestore.core.arguments import as_number, as_switch, as_text, as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, digest_parts

Choose = Literal["first", "random", "all"]
CHOICES: Final = get_args(Choose)

_WORD: Final = 8
"""Bytes of one random draw."""
_FEW: Final = 4
"""Up to this many tags, all orders are listed. With more tags, orders are drawn."""
_DRAWS: Final = 8
"""At most this many orders are drawn for each one that is wanted: repeated tags give equal orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionPolicy:
    """Which caption a sample has in which epoch. Give the same policy to `precompute` and to `CachedDataset`.

        captions = CaptionPolicy(choose="random", dropout=0.1, shuffle_tags=True, variants=8, keep_tokens=1, prefix="sks style, ")
        cs.precompute("images/", model="path-or-id", store="cache/", captions=captions)
        data = cs.CachedDataset("cache/", captions=captions)

    `precompute` encodes every text that the data set may ask for, and the empty caption. After a change of policy it encodes what is new.
    """

    choose: Choose = "first"
    """Which of a sample's captions: the "first"; one at "random" in each epoch; or "all" in turn, one in each epoch, with a start that
    differs between samples. "random" and "all" encode every caption."""
    dropout: float = 0.0
    """The fraction of samples, from 0 to 1, that get the empty caption (without the prefix). Each epoch drops other samples."""
    shuffle_tags: bool = False
    """Whether to split a caption at `separator` and put its tags in another order. `variants` orders of each caption are encoded, and each
    epoch draws one of them."""
    variants: int = 4
    """With `shuffle_tags`: how many orders of each caption are encoded, its original order included. More variants take more time to encode
    and more disk space. A caption with fewer possible orders has fewer variants. Adding variants later keeps the existing ones."""
    keep_tokens: int = 0
    """With `shuffle_tags`: how many of the first tags stay where they are."""
    separator: str = ", "
    """With `shuffle_tags`: what stands between tags. A caption is split at the separator without its outer spaces, and joined with them."""
    prefix: str = ""
    """A text before every caption, such as a trigger word: `"sks style, "`. It is used as given. A dropped caption has no prefix."""

    def __post_init__(self) -> None:
        if self.choose not in CHOICES:
            raise BadInput(f'the field choose of a caption policy must be "first", "random" or "all", not {self.choose!r}')
        for name, fitted in _FITTED.items():
            object.__setattr__(self, name, fitted(f"{name} of a caption policy", getattr(self, name)))
        if not 0 <= self.dropout <= 1:
            raise BadInput(f"the dropout of a caption policy must be a number from 0 to 1, not {self.dropout!r}")
        if not self.separator:
            refuse("separator of a caption policy", "a text of at least one character", self.separator)

    @classmethod
    def parse(cls, value: "str | Mapping[str, Json] | CaptionPolicy") -> Self:
        """Return the policy for `value`: "first", "random" or "all", or what `as_json` gave. Raises BadInput for anything else."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(choose=value)  # pyright: ignore[reportArgumentType] - checked in __post_init__
        defaults: dict[str, Any] = {one.name: one.default for one in fields(cls)}
        if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
            refuse("captions", 'a cs.CaptionPolicy, "first", "random" or "all"', value)
        given: dict[str, Any] = dict(value)
        for name, found in given.items():
            default = defaults.get(name)
            # The exact type: bool is a subclass of int, and True is not a number of variants.
            fits = type(found) is type(default) or (isinstance(default, float) and type(found) is int)
            if name not in defaults or not fits:
                raise BadInput(f"{name} = {found!r} is not valid in a caption policy: its fields are {', '.join(defaults)}")
        return cls(**given)

    def as_json(self) -> dict[str, Json]:
        """Return the fields that differ from their defaults, as a JSON object."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}

    def encoding(self) -> dict[str, Json]:
        """Return the part of `as_json` that decides `texts`; empty for the default. Policies with equal results encode equal texts."""
        body: dict[str, Json] = {} if self.choose == "first" else {"choose": "all"}
        if self.prefix:
            body["prefix"] = self.prefix
        if self.each > 1:
            body |= {"shuffle_tags": True, "variants": self.variants, "keep_tokens": self.keep_tokens, "separator": self.separator}
        return body

    @property
    def each(self) -> int:
        """How many texts each caption gives."""
        return self.variants if self.shuffle_tags else 1

    def texts(self, captions: Sequence[str]) -> tuple[str, ...]:
        """Return the texts to encode for a sample: `each` for every caption that may be chosen, the original first. Some may be equal."""
        chosen = captions[:1] if self.choose == "first" else captions
        return tuple(self.prefix + text for caption in chosen for text in self._reordered(caption))

    def _reordered(self, caption: str) -> list[str]:
        if self.each == 1:
            return [caption]
        parts = [part for part in (part.strip() for part in caption.split(self.separator.strip() or self.separator)) if part]
        fixed, tags = parts[: self.keep_tokens], parts[self.keep_tokens :]
        found = {caption: None}
        written = self.separator.join(parts)
        for order in _orders(tags, _DRAWS * self.each):
            if len(found) == self.each:
                break
            text = self.separator.join([*fixed, *order])
            if text != written:
                found.setdefault(text)
        return list(islice(cycle(found), self.each))

    def index(self, count: int, encoded: "CaptionPolicy", *, seed: int, epoch: int, sample_id: str) -> int | None:
        """Return the index of the text that a sample has in an epoch, of `count` that `encoded` made; None for the empty caption."""
        draws = digest_parts("cachestore-caption", str(seed), str(epoch), sample_id)
        dropped, drawn, order = (int.from_bytes(draws[at : at + _WORD], "little") for at in (0, _WORD, 2 * _WORD))
        captions = count // encoded.each
        if captions == 0 or dropped < int(self.dropout * (1 << 8 * _WORD)):
            return None
        if self.choose == "all":  # in turn; each sample starts at another caption
            drawn = epoch + int.from_bytes(digest_parts("cachestore-caption-turn", str(seed), sample_id)[:_WORD], "little")
        caption = 0 if self.choose == "first" else drawn % captions
        return caption * encoded.each + order % self.each

    def differs_from(self, encoded: "CaptionPolicy") -> str:
        """Return why this policy may ask for texts that `encoded` did not encode; empty if it cannot."""
        if self.choose != "first" and encoded.choose == "first":
            return f"it chooses {self.choose!r} of a sample's captions, but only the first one was encoded"
        if self.prefix != encoded.prefix:
            return f"its prefix is {self.prefix!r}, but {encoded.prefix!r} was encoded"
        if self.each > encoded.each:
            return f"it has {self.each} orders of each caption, but only {encoded.each} were encoded"
        if self.each > 1 and (self.keep_tokens, self.separator) != (encoded.keep_tokens, encoded.separator):
            ours, theirs = (f"keep_tokens={one.keep_tokens}, separator={one.separator!r}" for one in (self, encoded))
            return f"it shuffles tags with {ours}, but they were encoded with {theirs}"
        return ""


_FITTED: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "dropout": as_number,
    "shuffle_tags": as_switch,
    "variants": partial(as_whole, least=1),
    "keep_tokens": partial(as_whole, least=0),
    "separator": as_text,
    "prefix": as_text,
}
"""How each field is checked and converted: JSON needs Python's numbers, not numpy's."""


def _orders(tags: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """Yield orders of tags that depend on the tags alone, so that equal captions of two samples are encoded once. Orders may repeat."""
    name = digest_parts("cachestore-tags", *tags)
    if len(tags) <= _FEW:
        listed = enumerate(permutations(tags))
        yield from (order for _index, order in sorted(listed, key=lambda numbered: digest_parts(name, str(numbered[0]))))
        return
    for number in range(most):
        raw = hashlib.shake_256(name + number.to_bytes(8, "little")).digest(_WORD * len(tags))
        order = sorted((raw[_WORD * index : _WORD * (index + 1)], index) for index in range(len(tags)))
        yield [tags[index] for _draw, index in order]
