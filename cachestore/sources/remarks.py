"""What is collected while the samples of a source are read: remarks for the user, what fails alone, and problems that end the listing."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from cachestore.core.errors import BadInput
from cachestore.core.samples import Sample
from cachestore.core.spelling import option
from cachestore.core.words import first_of, plural
from cachestore.sources.unused import Unused

Item = TypeVar("Item")
_NAMED: Final = 20
_KEPT: Final = 10_000
"""How many of those that fail alone are kept by name; the rest is counted."""
_LONGEST: Final = 500
"""The most characters of a reason: it may quote a value."""
_COMPARED: Final = 300
"""Of so many samples two places with captions are compared, as each comparison reads another file."""
_FORMS: Final = re.compile(r"\[([^\[|]*)\|([^\]]*)\]")
"""A form of one, and that of several."""


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """A row, member or file that cannot be used. It fails alone, and the other samples go on."""

    sample: str
    """The sample's id; where it has none, its place: the file and the line."""
    reason: str
    has_id: bool = True
    """Whether `sample` is an id, before which the name of its source is put."""


@dataclass(slots=True)
class Refusals:
    """What fails alone: the first 10,000 by name, and how many there are."""

    named: list[RefusedItem] = field(default_factory=list[RefusedItem])
    count: int = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[RefusedItem]:
        return iter(self.named)

    def append(self, one: RefusedItem) -> None:
        """Add one; a long reason is cut."""
        self.count += 1
        if len(self.named) < _KEPT:
            is_long = len(one.reason) > _LONGEST
            self.named.append(replace(one, reason=f"{one.reason[:_LONGEST]}…") if is_long else one)

    def add(self, other: "Refusals", prefix: str = "") -> None:
        """Add those of one of several sources; `prefix` is put before ids."""
        for one in other.named:
            self.append(replace(one, sample=f"{prefix}{one.sample}") if one.has_id else one)
        self.count += other.count - len(other.named)

    def refuse_all(self, where: object) -> None:
        """Raise one BadInput that names the first twenty, if there are any. For a source of which nothing else is left."""
        first = self.named[:_NAMED]
        named = [one.reason if one.has_id or one.sample in one.reason else f"{one.sample}: {one.reason}" for one in first]
        problems = Problems(named, self.count)
        problems.refuse(where)


@dataclass(slots=True)
class Remarks:
    """What is counted while samples are read."""

    unused: Unused = field(default_factory=Unused)
    refused: Refusals = field(default_factory=Refusals)
    origin: str = ""
    """Where the sample that was yielded last is from: its file and line. Empty if its reference says that."""
    differing: list[str] = field(default_factory=list[str])
    """Samples with captions in two places that differ, with the place that is taken."""
    compared: int = 0
    """Of how many samples two places with captions were compared."""
    fieldless: list[str] = field(default_factory=list[str])
    """JSON beside pictures without a known field of captions, with the fields that it has."""
    dotted: list[str] = field(default_factory=list[str])
    """Captions in tars whose names have several dots, so that they belong to nothing."""

    missing: list[str] = field(default_factory=list[str])
    wordless: list[str] = field(default_factory=list[str])
    """Sources that have captions, all of them blank: writing them may have failed."""
    multi_line: list[str] = field(default_factory=list[str])
    collapsed: int = 0
    empty: list[str] = field(default_factory=list[str])
    """Labels of the sources that list nothing, if there are several sources."""
    beside: list[str] = field(default_factory=list[str])
    """Pictures of a folder that belong to another file, by their names."""
    asks: list[str] = field(default_factory=list[str])
    """One sentence for each source with names that may be of masks: the run stops until the user says what they are."""
    captions_elsewhere: list[str] = field(default_factory=list[str])
    """One sentence for each source of which most samples have no caption, although files look like captions."""
    nowhere: list[str] = field(default_factory=list[str])
    """Entries of --roles where no file is."""
    same_names: list[str] = field(default_factory=list[str])
    """Two folders of which one has only names that the other has too."""
    columns: dict[str, None] = field(default_factory=dict[str, None])
    uncaptioned: list[str] = field(default_factory=list[str])
    """One sentence for each source whose rows have no caption at all."""
    pictureless: list[str] = field(default_factory=list[str])
    """One sentence for each source whose rows have no picture or video at all: a column may be misspelt."""
    rows_without_picture: list[str] = field(default_factory=list[str])
    """Where the first rows without a picture or video are, with their columns."""
    misspelt: list[str] = field(default_factory=list[str])
    """One sentence for each column that is nearly called as a known one."""
    masks: list[str] = field(default_factory=list[str])
    """With `--alpha mask`: samples that bring a mask, which counts instead of an alpha."""
    wildcards: list[str] = field(default_factory=list[str])
    """Samples whose captions have wildcards that are not expanded."""
    combinations: list[str] = field(default_factory=list[str])
    """Samples with a caption whose wildcards have more combinations than are encoded."""

    @property
    def compares(self) -> bool:
        """Whether further samples with captions in two places are compared."""
        return self.compared < _COMPARED

    def compare(self, sample: str, taken: Sequence[str], name: str, others: Callable[[], Iterable[tuple[str, Sequence[str]]]]) -> None:
        """Compare the captions that a sample has with those of other places, (name, captions) of each; `name` is the place that is taken.

        Only for the first few hundred samples: `others` is not called for the rest.
        """
        if not self.compares:
            return
        found = list(others())
        self.compared += bool(found)
        other = next((other for other, captions in found if [*map(str.strip, captions)] != [*map(str.strip, taken)]), None)
        if other is not None:
            self.differing.append(f"{sample}: {name} is taken, not {other}")

    def as_json(self) -> dict[str, Any]:
        """Return what a worker needs of the remarks of its caller; `from_json` is the inverse."""
        # A worker lists the samples again, which finds anew what a source lacks as a whole.
        return asdict(replace(self, columns={}, wordless=[]))

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Remarks":
        """Return the remarks for the result of `as_json`."""
        refused = Refusals([RefusedItem(**one) for one in body["refused"]["named"]], body["refused"]["count"])
        fields: dict[str, Any] = {**body, "unused": Unused(**body["unused"]), "refused": refused}
        return cls(**fields)

    def take(self, other: "Remarks") -> None:
        """Replace all counts by those of an earlier listing."""
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))

    def add(self, other: "Remarks", prefix: str = "", before_ids: str = "") -> None:
        """Add the counts of one of several sources. `prefix` is put before the names of its samples, `before_ids` before their ids."""
        self.unused.include(other.unused, prefix)
        self.refused.add(other.refused, before_ids)
        for name in ("missing", "multi_line", "beside", "nowhere", "same_names", "differing", "dotted"):
            getattr(self, name).extend(f"{prefix}{one}" for one in getattr(other, name))
        of_sources = ("wordless", "uncaptioned", "pictureless", "rows_without_picture", "misspelt", "asks", "captions_elsewhere")
        for name in (*of_sources, "collapsed", "fieldless"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def in_words(self) -> tuple[str, ...]:
        """What the user should know before encoding, but for the files that are not used."""
        of_roles = f"if one holds masks or other images of the other's pictures, say so, as with {option('roles', 'mask=masks/')}"
        empty = f"the empty one; {option('caption', 'TEXT')} sets another"
        column, roles, wildcards = option("caption_column", "NAME"), option("roles"), f"`wildcards` in {option('captions')}"
        first = f" (only the first {_COMPARED} samples with two were compared)" if not self.compares else ""
        lines: list[str] = []

        def say(some: Sequence[object], words: str) -> None:  # [of one|of several]
            if some:
                form = _FORMS.sub(r"\1" if len(some) == 1 else r"\2", words)
                lines.append(f"{len(some)} {form.format(first_of([*map(str, some[:4])]))}")

        say(self.missing, f"[sample has|samples have] no caption ({{}}): [it gets|they get] {empty}")
        say(self.wordless, "[source|sources] ({}) [has|have] no caption with any text: [its|their] samples get the empty caption")
        several = f"[the|each] whole text is one caption (see {option('caption_lines')})"
        say(self.multi_line, f"[caption has|captions have] several lines ({{}}): {several}")
        owned = "[it belongs to another file|they belong to other files] ({})"
        own = "[file is no sample of its|files are no samples of their] own: by [its name|their names], as cat.mask.png to cat.png,"
        say(self.beside, f"{own} {owned}")
        say(self.differing, f"[sample has|samples have] captions in two places that differ ({{}}){first}")
        lacks = "[file beside a picture has|files beside pictures have] no field caption, text or prompt ({})"
        say(self.fieldless, f"{lacks}: {column} says which field it is")
        dots = "[caption in a tar belongs to nothing, as its name has|captions in tars belong to nothing, as their names have] several dots"
        say(self.dotted, f"{dots} ({{}}): pass {option('tar_names', 'last-dot')}")
        as_text = "[sample has|samples have] wildcards such as {{a|b}} in [a caption|captions] ({}), encoded as text"
        say(self.wildcards, f"{as_text}: to expand them, set {wildcards}")
        say(
            self.combinations,
            f"[sample has|samples have] more combinations of wildcards than {wildcards} ({{}}): that many are drawn and encoded",
        )
        bring = "[sample brings a mask|samples bring masks] ({}): [it counts|these count]"
        say(self.masks, f"{bring}, and not an alpha of the [picture itself|pictures themselves]")
        say(range(self.collapsed), "duplicate prompt [line is|lines are] encoded once")
        say(self.empty, "[source lists|sources list] no samples ({})")
        say(self.nowhere, f"[entry of {roles} names|entries of {roles} name] no file of the source ({{}})")
        say(self.same_names, f"[pair of folders has|pairs of folders have] pictures of the same names ({{}}): {of_roles}")
        return (*lines, *self.misspelt)


@dataclass(slots=True)
class Problems:
    """Collects what cannot be used in a source, so that one error names all of it."""

    named: list[str] = field(default_factory=list[str])
    count: int = 0

    def add(self, problem: object) -> None:
        """Add a problem: a sentence, or an error."""
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(str(problem))

    def refuse(self, where: object) -> None:
        """Raise BadInput if there are problems: the first ones, and their number."""
        if self.count == 1:
            raise BadInput(self.named[0])
        if self.count:
            more = f"; and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
            named = "; ".join(one.removeprefix(f"{where}, ") for one in self.named)
            raise BadInput(f"{plural(self.count, 'problem')} in {where}: {named}{more}")


def taken(
    items: Iterable[tuple[str, Item]], parse: Callable[[Item], Iterable[Sample]], names: Callable[[Item], Sequence[str]], remarks: Remarks
) -> Iterator[Sample]:
    """Yield the samples of all items, each with its place. One that `parse` refuses fails alone, under the ids that `names` tells."""
    for origin, item in items:
        remarks.origin = origin
        try:
            samples = list(parse(item))
        except BadInput as error:
            alone = RefusedItem(origin, str(error).removeprefix(f"{origin}: "), has_id=False)
            refused = [RefusedItem(name, str(error)) for name in names(item)] or [alone]
            for one in refused:
                remarks.refused.append(one)
            continue
        yield from samples
