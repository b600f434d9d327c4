"""Remarks for the user, and problems that end the listing. Both are collected while the samples of a source are read."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Final, TypeVar

from cachestore.core.errors import BadInput
from cachestore.core.samples import Sample
from cachestore.core.words import first_of, plural
from cachestore.source.unused import Unused

Item = TypeVar("Item")

_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class Refused:
    """A row, member or file that cannot be used. It fails alone, and the other samples go on."""

    sample: str
    """The sample's id; where it has none, its place: the file and the line."""
    reason: str


@dataclass(slots=True)
class Remarks:
    """What is counted while samples are read."""

    unused: Unused = field(default_factory=Unused)
    refused: list[Refused] = field(default_factory=list[Refused])

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
    """The columns of the rows of one source."""
    uncaptioned: list[str] = field(default_factory=list[str])
    """One sentence for each source whose rows have no caption at all."""
    pictureless: list[str] = field(default_factory=list[str])
    """One sentence for each source whose rows have no picture or video at all: a column may be misspelt."""
    rows_without_picture: list[str] = field(default_factory=list[str])
    """Where the first rows without a picture or video are, with their columns."""
    misspelt: list[str] = field(default_factory=list[str])
    """One sentence for each column that is nearly called as a known one."""
    wildcards: list[str] = field(default_factory=list[str])
    """Samples whose captions have wildcards that are not expanded."""
    combinations: list[str] = field(default_factory=list[str])
    """Samples with a caption whose wildcards have more combinations than are encoded."""

    def take(self, other: "Remarks") -> None:
        """Replace all counts by those of an earlier listing."""
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))

    def add(self, other: "Remarks", prefix: str = "") -> None:
        """Add the counts of one of several sources. `prefix` is put before the ids of its samples."""
        self.unused.include(other.unused, prefix)
        for name in ("missing", "multi_line", "beside", "nowhere", "same_names"):
            getattr(self, name).extend(f"{prefix}{one}" for one in getattr(other, name))
        for name in (
            "wordless",
            "uncaptioned",
            "pictureless",
            "rows_without_picture",
            "misspelt",
            "collapsed",
            "asks",
            "captions_elsewhere",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def in_words(self) -> tuple[str, ...]:
        """What the user should know before encoding, but for the files that are not used."""
        of_roles = "if one holds masks or other images of the other's pictures, say so, as with --roles mask=masks/"
        empty = "the empty one; --caption TEXT sets another"
        lines = (
            (self.missing, f"sample has no caption ({{}}): it gets {empty}", f"samples have no caption ({{}}): they get {empty}"),
            (
                self.wordless,
                "source ({}) has no caption with any text: its samples get the empty caption",
                "sources ({}) have no caption with any text: their samples get the empty caption",
            ),
            (
                self.multi_line,
                "caption has several lines ({}): the whole text is one caption (see --caption-lines)",
                "captions have several lines ({}): each whole text is one caption (see --caption-lines)",
            ),
            (
                self.beside,
                "file is no sample of its own: by its name, as cat.mask.png to cat.png, it belongs to another file ({})",
                "files are no samples of their own: by their names, as cat.mask.png to cat.png, they belong to other files ({})",
            ),
            (
                self.wildcards,
                "sample has wildcards such as {{a|b}} in a caption ({}), encoded as text: to expand them, set `wildcards` in --captions",
                "samples have wildcards such as {{a|b}} in captions ({}), encoded as text: to expand them, set `wildcards` in --captions",
            ),
            (
                self.combinations,
                "sample has more combinations of wildcards than `wildcards` in --captions ({}): that many are drawn and encoded",
                "samples have more combinations of wildcards than `wildcards` in --captions ({}): that many are drawn and encoded",
            ),
            (range(self.collapsed), "duplicate prompt line is encoded once", "duplicate prompt lines are encoded once"),
            (self.empty, "source lists no samples ({})", "sources list no samples ({})"),
            (self.nowhere, "entry of --roles names no file of the source ({})", "entries of --roles name no file of the source ({})"),
            (
                self.same_names,
                f"pair of folders has the same names in both ({{}}): {of_roles}",
                f"pairs of folders have the same names in both ({{}}): {of_roles}",
            ),
        )
        counted = ((some, plural(len(some), one, many)) for some, one, many in lines if some)
        return (*(words.format(first_of([*map(str, some[:4])])) for some, words in counted), *self.misspelt)


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


def taken(items: Iterable[Item], parse: Callable[[Item], Iterable[Sample]], where: object) -> Iterator[Sample]:
    """Yield the samples of all items. At the end raises one BadInput for all items that `parse` refused."""
    problems = Problems()
    for item in items:
        try:
            samples = list(parse(item))
        except BadInput as error:
            problems.add(error)
            continue
        yield from samples
    problems.refuse(where)
