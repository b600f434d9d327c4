"""What became of an export: its report, and what is counted on the way."""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from cachestore.core.keys import Json
from cachestore.core.words import in_short

NAMED: Final = 1000


@dataclass(frozen=True, slots=True, repr=False)
class ExportReport:
    """What became of an export: what `cachestore export --json` prints."""

    format: str
    folder: str
    name: str
    generation: int
    samples: int
    written: int
    unchanged: int
    bytes: int
    """Of what was written."""
    foreign: tuple[str, ...] = ()
    """Files that are there with other bytes, and were left as they are not an earlier export's."""
    failures: tuple[Mapping[str, str], ...] = ()
    """What could not be exported: sample, encoder, reason."""
    casts: tuple[str, ...] = ()
    """Which tensors are not bit for bit what is stored, and how they were made of it; every other one is."""
    left_out: tuple[str, ...] = ()
    """What of the data set has no place in the files, in words."""
    not_taken: tuple[str, ...] = ()
    """What was written, but the trainer will not find or cannot put into batches, in words with counts."""
    remarks: tuple[str, ...] = ()
    """What a user should know of the rest."""

    @property
    def complete(self) -> bool:
        """Whether each value of each complete sample is in the folder, and the trainer will take it from there."""
        return not self.foreign and not self.failures and not self.not_taken

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The report as one JSON object."""
        listed = {name: list(getattr(self, name)) for name in ("foreign", "casts", "left_out", "not_taken", "remarks")}
        return {**asdict(self), "complete": self.complete, **listed, "failures": [dict(failure) for failure in self.failures]}


@dataclass(slots=True)
class Tally:
    """What is counted on the way."""

    written: int = 0
    unchanged: int = 0
    size_bytes: int = 0
    foreign: list[str] = field(default_factory=list[str])
    failures: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    casts: dict[str, None] = field(default_factory=dict[str, None])
    there: dict[str, int] = field(default_factory=dict[str, int])
    """By path of each file that is as it should be the row that it is of."""
    latents: int = 0
    """How many latents were compared with what the trainer looks for."""
    missed: list[str] = field(default_factory=list[str])
    """Samples whose latents the trainer does not look for."""
    batches: dict[Hashable, Counter[Hashable]] = field(default_factory=dict[Hashable, Counter[Hashable]])
    """For each group from which the trainer makes batches, how many latents have which shape."""
    reworded: list[str] = field(default_factory=list[str])
    """Samples with a caption for which the trainer reads other text in the file."""
    unread: int = 0
    """Captions whose files are not here."""

    def fail(self, sample: str, encoder: str, error: Exception) -> None:
        """Remember what could not be exported."""
        if len(self.failures) < NAMED:
            self.failures.append({"sample": sample, "encoder": encoder, "reason": str(error)})
