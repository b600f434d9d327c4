"""Which captions of a sample are encoded, and which one a trainer is given: one frozen value for both.

What is encoded depends on the captions alone; what is handed out on (seed, epoch, sample id), so it is the same in every worker, on
every rank and in a resumed run. The orders of tags are this project's own, not a library's.
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
"""Bytes of one draw."""
_FEW: Final = 4
"""Up to so many tags their orders are listed; of more some are drawn."""
_DRAWS: Final = 8
"""For each order that is wanted at most so many are drawn: tags that repeat have fewer orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionPolicy:
    """Which caption a sample has in which epoch. Give the same one to `precompute` and to `CachedDataset`.

        captions = CaptionPolicy(choose="random", dropout=0.1, shuffle_tags=True, variants=8, keep_tokens=1, prefix="sks style, ")
        cs.precompute("images/", model="path-or-id", store="cache/", captions=captions)
        data = cs.CachedDataset("cache/", captions=captions)

    `precompute` encodes every text that the data set may ask for, and the empty caption; when a policy is changed, what is new.
    """

    choose: Choose = "first"
    """Of a sample's captions: the "first"; one at "random" in each epoch; or "all" in turn, another one in each epoch, beginning
    anywhere. For the last two all of them are encoded."""
    dropout: float = 0.0
    """The share of samples, from 0 to 1, that have the empty caption instead, without the prefix: others in each epoch."""
    shuffle_tags: bool = False
    """Whether a caption is taken apart at `separator`, and its tags put together in another order. Not every order can be encoded, so
    there are `variants` of each caption, of which each epoch draws one."""
    variants: int = 4
    """With `shuffle_tags`: into how many orders a caption is put, the one it is written in included. What costs is encoding, and room
    in the store. A caption that has fewer orders has fewer variants. Adding variants later keeps those that are there."""
    keep_tokens: int = 0
    """With `shuffle_tags`: so many of the first tags stay where they are."""
    separator: str = ", "
    """With `shuffle_tags`: between the tags. They are found without the space around it, and put together with it."""
    prefix: str = ""
    """Stands before every caption exactly as it is given, as a trigger word: `"sks style, "`. Not before one that is dropped."""

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
        """A policy from what stands for one: "first", "random" or "all"; or what `as_json` gave. Raises BadInput for anything else."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(choose=value)  # pyright: ignore[reportArgumentType] - looked at when it is made
        defaults: dict[str, Any] = {one.name: one.default for one in fields(cls)}
        if not isinstance(value, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
            refuse("captions", 'a cs.CaptionPolicy, "first", "random" or "all"', value)
        given: dict[str, Any] = dict(value)
        for name, found in given.items():
            default = defaults.get(name)
            # By exact type: Python's bool is an int, and True is no number of variants.
            fits = type(found) is type(default) or (isinstance(default, float) and type(found) is int)
            if name not in defaults or not fits:
                raise BadInput(f"{name} = {found!r} is not valid in a caption policy: its fields are {', '.join(defaults)}")
        return cls(**given)

    def as_json(self) -> dict[str, Json]:
        """What differs from the default, as a JSON object."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}

    def encoding(self) -> dict[str, Json]:
        """The part of `as_json` that decides `texts`: equal for policies that have the same texts encoded. Empty for the default."""
        body: dict[str, Json] = {} if self.choose == "first" else {"choose": "all"}
        if self.prefix:
            body["prefix"] = self.prefix
        if self.each > 1:
            body |= {"shuffle_tags": True, "variants": self.variants, "keep_tokens": self.keep_tokens, "separator": self.separator}
        return body

    @property
    def each(self) -> int:
        """How many texts come of one caption."""
        return self.variants if self.shuffle_tags else 1

    def texts(self, captions: Sequence[str]) -> tuple[str, ...]:
        """What is encoded of a sample's captions: of each that may be chosen `each` texts, the one as written first. Some may be equal."""
        chosen = captions[:1] if self.choose == "first" else captions
        return tuple(self.prefix + text for caption in chosen for text in self._variants(caption))

    def _variants(self, caption: str) -> list[str]:
        if self.each == 1:
            return [caption]
        parts = [part for part in (part.strip() for part in caption.split(self.separator.strip() or self.separator)) if part]
        kept, tags = parts[: self.keep_tokens], parts[self.keep_tokens :]
        found = {caption: None}
        written = self.separator.join(parts)
        for order in _orders(tags, _DRAWS * self.each):
            if len(found) == self.each:
                break
            text = self.separator.join([*kept, *order])
            if text != written:
                found.setdefault(text)
        return list(islice(cycle(found), self.each))

    def place(self, count: int, kept: "CaptionPolicy", *, seed: int, epoch: int, sample_id: str) -> int | None:
        """Which of a sample's `count` texts, made by the policy `kept`, it has in an epoch; None for the empty caption."""
        draws = digest_parts("cachestore-caption", str(seed), str(epoch), sample_id)
        dropped, drawn, variant = (int.from_bytes(draws[at : at + _WORD], "little") for at in (0, _WORD, 2 * _WORD))
        captions = count // kept.each
        if captions == 0 or dropped < int(self.dropout * (1 << 8 * _WORD)):
            return None
        if self.choose == "all":  # in turn, beginning anywhere
            drawn = epoch + int.from_bytes(digest_parts("cachestore-caption-turn", str(seed), sample_id)[:_WORD], "little")
        caption = 0 if self.choose == "first" else drawn % captions
        return caption * kept.each + variant % self.each

    def differs_from(self, kept: "CaptionPolicy") -> str:
        """Why this policy may ask for texts that one which encoded for `kept` did not; empty where it asks for none."""
        if self.choose != "first" and kept.choose == "first":
            return f"it chooses {self.choose!r} of a sample's captions, but only the first one was encoded"
        if self.prefix != kept.prefix:
            return f"its prefix is {self.prefix!r}, but {kept.prefix!r} was encoded"
        if self.each > kept.each:
            return f"it has {self.each} variants of each caption, but only {kept.each} were encoded"
        if self.each > 1 and (self.keep_tokens, self.separator) != (kept.keep_tokens, kept.separator):
            ours, theirs = (f"keep_tokens={one.keep_tokens}, separator={one.separator!r}" for one in (self, kept))
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
"""How each setting is read: numpy's numbers become Python's own, as JSON needs them."""


def _orders(tags: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """Orders of tags that follow from the tags alone, so that one caption of two samples is encoded once; some may come again."""
    name = digest_parts("cachestore-tags", *tags)
    if len(tags) <= _FEW:
        listed = enumerate(permutations(tags))
        yield from (order for _place, order in sorted(listed, key=lambda numbered: digest_parts(name, str(numbered[0]))))
        return
    for number in range(most):
        raw = hashlib.shake_256(name + number.to_bytes(8, "little")).digest(_WORD * len(tags))
        order = sorted((raw[_WORD * place : _WORD * (place + 1)], place) for place in range(len(tags)))
        yield [tags[place] for _draw, place in order]
