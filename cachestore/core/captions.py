"""Which captions of a sample are encoded, and which one it has in an epoch: `CaptionPolicy` decides both.

What is encoded depends on the captions alone. Which caption a sample has depends on (seed, epoch, sample id), so it is the same in every
worker, on every rank and in a resumed run. The orders of tags are computed here, not by a library.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle, islice, permutations, product
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from cachestore.core.arguments import as_number, as_switch, as_text, as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, digest_parts
from cachestore.core.words import listed

if TYPE_CHECKING:
    from typing_extensions import Self

Choose = Literal["first", "random", "all"]
CHOICES: Final = get_args(Choose)
_WORD: Final = 8
"""Bytes of one random draw."""
_WILDCARD: Final = re.compile(r"(?P<brace>\{\{|\}\})|\{(?P<choices>[^{}]+)\}")
_IDLE: Final = 64
"""After so many drawings of tags that give nothing new, a caption has no more variants. Independent of how many are wanted."""
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
    tag_dropout: float = 0.0
    """The probability, from 0 to 1, with which each tag of a caption is left out. `variants` drawings of each caption are encoded beside
    the whole caption, and each epoch draws one of them."""
    max_tags: int = 0
    """Instead of `tag_dropout`: each variant has so many tags of its caption, or all if it has fewer. 0 is no limit."""
    drop_tags: int = 0
    """Instead of `tag_dropout`: each variant lacks so many tags of its caption. One tag is always left."""
    variants: int = 4
    """With shuffled or dropped tags: how many variants of each caption are encoded; of shuffled ones, the original order is one. More
    variants take more time to encode and more disk space. A caption with fewer possible variants has fewer. Adding variants later keeps
    the existing ones."""
    keep_tokens: int = 0
    """With shuffled or dropped tags: how many of the first tags stay where they are, and are never dropped. `max_tags` does not count
    them."""
    separator: str = ", "
    """With shuffled or dropped tags: what stands between tags. A caption is split at the separator without its outer spaces, and joined
    with them."""
    wildcards: int = 0
    """How many texts are made of a caption with wildcards at most: `{red|blue} cat` gives `red cat` and `blue cat`, and each epoch draws
    one. Of captions with more combinations so many are drawn, and `precompute` counts these captions. `{{` and `}}` are plain braces. With
    0, braces are text like any other."""
    seed: int = 0
    """Another number draws other orders, other tags to drop, and other combinations of wildcards."""
    prefix: str = ""
    """A text before every caption, such as a trigger word: `"sks style, "`. It is used as given. A dropped caption has no prefix."""

    def __post_init__(self) -> None:
        if self.choose not in CHOICES:
            refuse("choose of a caption policy", listed((f'"{choice}"' for choice in CHOICES), "or"), self.choose)
        for name, fitted in _FITTED.items():
            object.__setattr__(self, name, fitted(f"{name} of a caption policy", getattr(self, name)))
        for name in ("dropout", "tag_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                refuse(f"{name} of a caption policy", "a number from 0 to 1", getattr(self, name))
        given = [name for name in ("tag_dropout", "max_tags", "drop_tags") if getattr(self, name)]
        if len(given) > 1:
            what = f"a caption policy drops tags in one way, but {listed(given)} are given"
            raise BadInput(f"{what}: leave all but one of them out", option=given[0])
        if not self.separator:
            refuse("separator of a caption policy", "a text of at least one character", self.separator)

    @classmethod
    def parse(cls, value: "str | Mapping[str, Json] | CaptionPolicy") -> "Self":
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
                what = f"{name} = {found!r} is not valid in a caption policy"
                raise BadInput(f"{what}: its fields are {', '.join(defaults)}", option=name)
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
            body |= {"shuffle_tags": self.shuffle_tags, "variants": self.variants, "keep_tokens": self.keep_tokens}
            body |= {"separator": self.separator, **self.tags_dropped}
        if self.wildcards:
            body["wildcards"] = self.wildcards
        if self.seed and (self.each > 1 or self.wildcards):
            body["seed"] = self.seed
        return body

    @property
    def tags_dropped(self) -> dict[str, Json]:
        """How tags are dropped, as JSON; empty if none is."""
        return {name: value for name in ("tag_dropout", "max_tags", "drop_tags") if (value := getattr(self, name))}

    @property
    def each(self) -> int:
        """How many texts each caption gives, its wildcards being replaced. If tags are dropped, the whole caption is one more."""
        return self.variants + 1 if self.tags_dropped else self.variants if self.shuffle_tags else 1

    def texts(self, captions: Sequence[str]) -> tuple[str, ...]:
        """Return the texts to encode for a sample: `each` for every caption that may be chosen, the original first. Some may be equal.

        With `wildcards` each caption is replaced by those that its wildcards give.
        """
        chosen = captions[:1] if self.choose == "first" else captions
        if self.wildcards:
            chosen = [text for caption in chosen for text in _expanded(caption, self.wildcards, self._name("wildcards", caption))]
        return tuple(self.prefix + text for caption in chosen for text in self._variants_of(caption))

    def _name(self, what: str, *parts: str) -> bytes:
        """A digest from which draws are made. The default seed adds nothing to it."""
        return digest_parts(f"cachestore-{what}", *parts, *([str(self.seed)] if self.seed else []))

    def _variants_of(self, caption: str) -> list[str]:
        if self.each == 1:
            return [caption]
        parts = [part for part in (part.strip() for part in caption.split(self.separator.strip() or self.separator)) if part]
        fixed, tags = parts[: self.keep_tokens], parts[self.keep_tokens :]
        if self.tags_dropped:
            return [caption, *self._lessened(fixed, tags)]
        found = {caption: None}
        written = self.separator.join(parts)
        for order in _orders(tags, _DRAWS * self.each, self._name("tags", *tags)):
            if len(found) == self.each:
                break
            text = self.separator.join([*fixed, *order])
            if text != written:
                found.setdefault(text)
        return list(islice(cycle(found), self.each))

    def _lessened(self, fixed: Sequence[str], tags: Sequence[str]) -> list[str]:
        name, found = self._name("tag-dropout", *tags), list[str]()
        limit = int(self.tag_dropout * (1 << 8 * _WORD))
        count = min(len(tags), self.max_tags) if self.max_tags else max(len(tags) - self.drop_tags, 0 if fixed else 1)
        idle = 0
        for number in itertools.count():
            if len(found) == self.variants or idle == _IDLE:
                break
            draws = [int.from_bytes(raw, "little") for raw in _drawn(name, number, 2 * len(tags))]
            order = sorted(range(len(tags)), key=draws.__getitem__) if self.shuffle_tags else range(len(tags))
            chances = draws[len(tags) :]
            ranked = sorted(range(len(tags)), key=chances.__getitem__)[:count]
            stay = {index for index in order if chances[index] >= limit} if self.tag_dropout else set(ranked)
            text = self.separator.join([*fixed, *(tags[index] for index in order if index in stay)])
            # Of a probability, equal drawings count: they make what happens often come often.
            is_new = bool(self.tag_dropout) or text not in found
            found += [text] if is_new else []
            idle = 0 if is_new else idle + 1
        return list(islice(cycle(found), self.variants))

    def has_more(self, captions: Sequence[str]) -> bool:
        """Return whether `texts` leaves out combinations of the wildcards of a caption that may be chosen."""
        chosen = captions[:1] if self.choose == "first" else captions
        return bool(self.wildcards) and any(_combinations(_choices(caption)) > self.wildcards for caption in chosen)

    def index(self, count: int, encoded: "CaptionPolicy", *, seed: int, epoch: int, sample_id: str) -> int | None:
        """Return the index of the text that a sample has in an epoch, of `count` that `encoded` made; None for the empty caption."""
        draws = digest_parts("cachestore-caption", str(seed), str(epoch), sample_id)
        dropped, drawn, order = (int.from_bytes(draws[at : at + _WORD], "little") for at in (0, _WORD, 2 * _WORD))
        captions = count // encoded.each
        if captions == 0 or dropped < int(self.dropout * (1 << 8 * _WORD)):
            return None
        if self.choose == "all":  # in turn; each sample starts at another caption
            drawn = epoch + int.from_bytes(digest_parts("cachestore-caption-turn", str(seed), sample_id)[:_WORD], "little")
        caption = 0 if self.choose == "first" and not self.wildcards else drawn % captions
        return caption * encoded.each + (1 + order % self.variants if self.tags_dropped else order % self.each)

    def differs_from(self, encoded: "CaptionPolicy") -> str:
        """Return why this policy may ask for texts that `encoded` did not encode; empty if it cannot."""
        if self.choose != "first" and encoded.choose == "first":
            return f"it chooses {self.choose!r} of a sample's captions, but only the first one was encoded"
        if self.prefix != encoded.prefix:
            return f"its prefix is {self.prefix!r}, but {encoded.prefix!r} was encoded"
        if self.wildcards != encoded.wildcards or (self.wildcards and self.seed != encoded.seed):
            ours, theirs = (f"wildcards={one.wildcards}, seed={one.seed}" for one in (self, encoded))
            return f"it expands wildcards with {ours}, but they were encoded with {theirs}"
        if self.wildcards and self.choose == "first" and encoded.choose != "first":
            return (
                "it chooses the first caption, but all were encoded, and which of these come from the first one's wildcards is not recorded"
            )
        return self._tags_differ_from(encoded) if self.each > 1 else ""

    def _tags_differ_from(self, encoded: "CaptionPolicy") -> str:
        if self.tags_dropped == encoded.tags_dropped and self.each > encoded.each:
            what = "variants" if self.tags_dropped else "orders"
            return f"it has {self.variants} {what} of each caption, but only {encoded.variants if encoded.each > 1 else 1} were encoded"
        if self.tag_settings != encoded.tag_settings:
            return f"it takes tags with {self.tag_settings}, but they were encoded with {encoded.tag_settings}"
        return ""

    @property
    def tag_settings(self) -> str:
        """What decides the variants of a caption, but for their number, in words."""
        names = ("shuffle_tags", *self.tags_dropped, "keep_tokens", "separator", *(["seed"] if self.seed else []))
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


_FITTED: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "dropout": as_number,
    "shuffle_tags": as_switch,
    "tag_dropout": as_number,
    "max_tags": partial(as_whole, least=0),
    "drop_tags": partial(as_whole, least=0),
    "variants": partial(as_whole, least=1),
    "keep_tokens": partial(as_whole, least=0),
    "separator": as_text,
    "wildcards": partial(as_whole, least=0),
    "seed": partial(as_whole, least=0),
    "prefix": as_text,
}
"""How each field is checked and converted: JSON needs Python's numbers, not numpy's."""


def _orders(tags: Sequence[str], most: int, name: bytes) -> Iterator[Sequence[str]]:
    """Yield orders of tags. Their `name` depends on the tags, so equal captions of two samples are encoded once. Orders may repeat."""
    if len(tags) <= _FEW:
        listed = enumerate(permutations(tags))
        yield from (order for _index, order in sorted(listed, key=lambda numbered: digest_parts(name, str(numbered[0]))))
        return
    for number in range(most):
        order = sorted((draw, index) for index, draw in enumerate(_drawn(name, number, len(tags))))
        yield [tags[index] for _draw, index in order]


def _drawn(name: bytes, number: int, count: int) -> list[bytes]:
    raw = hashlib.shake_256(name + number.to_bytes(8, "little")).digest(_WORD * count)
    return [raw[_WORD * index : _WORD * (index + 1)] for index in range(count)]


def has_wildcards(caption: str) -> bool:
    """Return whether a caption has a wildcard with several choices, such as `{red|blue}`."""
    return "|" in caption and _combinations(_choices(caption)) > 1


def _choices(caption: str) -> list[list[str]]:
    """Split a caption into parts, each with its choices: one for plain text. As sd-scripts, without wildcards in wildcards."""
    found: list[list[str]] = []
    end = 0
    for match in _WILDCARD.finditer(caption):
        plain = caption[end : match.start()]
        found += [[plain]] if plain else []
        found.append([match["brace"][0]] if match["brace"] else match["choices"].split("|"))
        end = match.end()
    return [*found, [caption[end:]]]


def _combinations(choices: Sequence[Sequence[str]]) -> int:
    return prod(map(len, choices))


def _expanded(caption: str, most: int, name: bytes) -> list[str]:
    """Return what a caption's wildcards give: all texts, or `most` of them, beginning with the one of all first choices."""
    choices = _choices(caption)
    if _combinations(choices) <= most:
        return list(dict.fromkeys("".join(parts) for parts in product(*choices)))
    found = {"".join(some[0] for some in choices): None}
    for number in range(_DRAWS * most):
        if len(found) >= most:
            break
        draws = _drawn(name, number, len(choices))
        found.setdefault("".join(some[int.from_bytes(raw, "little") % len(some)] for some, raw in zip(choices, draws, strict=True)))
    return list(found)
