"""What is said of a source while its samples are gone through: remarks for the user, and problems that end the listing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Final, TypeVar

from cachestore.core.errors import BadInput
from cachestore.core.samples import Sample
from cachestore.core.words import first_of

Item = TypeVar("Item")

_NAMED: Final = 20


@dataclass(slots=True)
class Remarks:
    """What is counted while samples are gone through."""

    missing: list[str] = field(default_factory=list[str])
    wordless: list[str] = field(default_factory=list[str])
    """Sources that have captions, with no text in any of them: writing them may have failed."""
    multi_line: list[str] = field(default_factory=list[str])
    collapsed: int = 0
    empty: list[str] = field(default_factory=list[str])
    """Of several sources those that list nothing, by what they are called."""
    videos: int = 0
    """Files of a folder that are passed over."""
    replaced: list[str] = field(default_factory=list[str])
    """Members of tars after which another one of their name comes."""
    again: list[str] = field(default_factory=list[str])
    """Folders that are passed over, as they are listed under another name."""
    dead: list[str] = field(default_factory=list[str])
    """Links that lead nowhere and have no picture's name."""
    columns: dict[str, None] = field(default_factory=dict[str, None])
    """The columns of rows; of one source alone."""
    uncaptioned: list[str] = field(default_factory=list[str])
    """For each source whose rows have no caption at all, a sentence that says so."""
    pictureless: list[str] = field(default_factory=list[str])
    """For each source whose rows have no picture or video at all, a sentence that says so: a column may be misspelt."""

    def take(self, other: "Remarks") -> None:
        """Remember what was counted before."""
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))

    def add(self, other: "Remarks", prefix: str = "") -> None:
        """Count what was counted of one of several sources, too; `prefix` stands before the ids of its samples."""
        for name in ("missing", "multi_line", "replaced", "again", "dead"):
            getattr(self, name).extend(f"{prefix}{one}" for one in getattr(other, name))
        for name in ("wordless", "uncaptioned", "pictureless", "collapsed", "videos"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def in_words(self, *, of_videos: str = "pass --frames to say how many frames of each to encode") -> tuple[str, ...]:
        """What a user should know before encoding; `of_videos` is what is said of videos that are passed over."""
        told = (
            (self.missing, "{} without a caption ({}): they get the empty caption, or the one that --caption TEXT gives"),
            (self.wordless, "no caption has any text in {} source(s) ({}): their samples get the empty caption"),
            (self.multi_line, "{} captions have several lines ({}): each whole text is one caption (see --caption-lines)"),
            (range(self.collapsed), "{} duplicate prompt lines are encoded once"),
            (self.empty, "{} of the sources list no samples ({})"),
            (self.replaced, "{} members of tars are ignored, as a later member has the same name ({})"),
            (self.again, "{} folders are ignored, as they are listed under another name already or contain the source itself ({})"),
            (self.dead, "{} broken links are ignored ({})"),
            (range(self.videos), "{} videos are ignored (" + of_videos + ")"),
        )
        return (*(words.format(len(some), first_of([*map(str, some[:4])])) for some, words in told if some), *self.pictureless)


@dataclass(slots=True)
class Problems:
    """What cannot be used in a source, gathered so that one error names all of it."""

    named: list[str] = field(default_factory=list[str])
    count: int = 0

    def add(self, problem: object) -> None:
        """Remember one: a sentence, or an error with it."""
        self.count += 1
        if len(self.named) < _NAMED:
            self.named.append(str(problem))

    def refuse(self, where: object) -> None:
        """Raise BadInput if there is any: the first ones, and how many there are."""
        if self.count == 1:
            raise BadInput(self.named[0])
        if self.count:
            more = f"; and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
            named = "; ".join(one.removeprefix(f"{where}, ") for one in self.named)
            raise BadInput(f"{self.count} problems in {where}: {named}{more}")


def taken(items: Iterable[Item], parse: Callable[[Item], Iterable[Sample]], where: object) -> Iterator[Sample]:
    """The samples of all items. Raises BadInput at the end: one error for all items that `parse` refused."""
    problems = Problems()
    for item in items:
        try:
            samples = list(parse(item))
        except BadInput as error:
            problems.add(error)
            continue
        yield from samples
    problems.refuse(where)
