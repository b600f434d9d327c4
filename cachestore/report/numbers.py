"""What a report says of a store and of one of its data sets, in numbers. Plain values, for the page and for `--json` alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cachestore.core.keys import Json

State = Literal["sound", "damaged", "unreadable", "gone"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket."""

    name: str
    """`<width>x<height>`, of videos `x<frames>` more; empty where the catalog does not know it."""
    samples: int
    batches: int
    """Full ones."""
    left_over: int
    """Samples that are in no full batch of an epoch."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a batch size costs over all buckets."""

    batch_size: int
    batches: int
    left_over: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of a data set at one resolution, of complete samples alone."""

    resolution: int | None
    """None where the catalog does not say."""
    samples: int
    left_over: int
    buckets: tuple[Bucket, ...]
    """The fullest first."""
    losses: tuple[Loss, ...]
    """By batch size."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Captions whose length is in [low, high]."""

    low: int
    high: int
    captions: int


@dataclass(frozen=True, slots=True)
class Long:
    """A caption that the encoder does not read to its end."""

    sample: str
    length: int
    caption: str


@dataclass(frozen=True, slots=True)
class Captions:
    """The captions of a data set; each distinct one counts once in the lengths."""

    samples: int
    """That have one, the empty one included."""
    captions: int
    distinct: int
    empty: int
    unit: Literal["tokens", "characters"]
    """Tokens as the encoder reads them, where the catalog knows them."""
    limit: int | None
    """So many tokens are read; None where nobody says."""
    truncated: int
    median: int
    most: int
    bins: tuple[Bin, ...]
    longest: tuple[Long, ...]
    """The longest of those that are truncated."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """An entry that several cells share."""

    cells: int
    what: str
    """The caption, or the ids of the first samples."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What one key column of the data set holds."""

    encoder: str
    role: str
    about: str
    """Family, dtype and the like, as the recipe says them."""
    fingerprint: str
    cells: int
    """Captions or pictures of the samples."""
    missing: int
    """Cells for which nothing was made."""
    entries: int
    """Distinct keys."""
    bytes: int
    """Of their tensors."""
    saved_bytes: int
    """What the same tensors would take besides, if each cell had its own."""
    repeats: tuple[Repeat, ...] = ()
    """The most shared entries."""

    @property
    def shared(self) -> int:
        """Cells that took an entry another cell has too."""
        return self.cells - self.missing - self.entries

    @property
    def name(self) -> str:
        """What people call it: the encoder, with the role where that is not the usual one."""
        return self.encoder if self.role in {"caption", "image", self.encoder} else f"{self.encoder} of {self.role}"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a plan of the data set."""

    started: float
    """Seconds since the epoch, by the clock of who began it."""
    plan: str
    number: int
    complete: bool
    seconds: float
    wanted: int
    reused: int
    encoded: int
    failed: int
    bytes: int
    stages: tuple["Stage", ...] = ()
    limiting: str = ""
    ranks: tuple["Rank", ...] = ()
    """Those whose beats are still there."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of encoding, over all workers of a pass."""

    name: str
    busy_seconds: float
    wait_seconds: float
    share: float
    """Of its threads' time, how much it was busy."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker did."""

    rank: int | None
    host: str
    pid: int
    encoded: int
    reused: int
    failed: int
    seconds: float
    phase: str


@dataclass(frozen=True, slots=True)
class Found:
    """One finding of verify."""

    kind: str
    path: str
    message: str
    sample: str | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment in the map of damage."""

    digest: str
    bytes: int
    """0 where its header cannot be read."""
    entries: int
    state: State


@dataclass(frozen=True, slots=True)
class Damage:
    """What verify found."""

    level: str
    ok: bool
    seconds: float
    entries: int
    bytes: int
    map: tuple[Segment, ...]
    findings: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that an encoder could not do."""

    sample: str
    encoder: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Everything a report says, but for its pictures."""

    store: str
    written: str
    """When, in UTC."""
    version: str
    name: str = ""
    """Of the data set; where the store has none, what is said of it is empty."""
    generation: int = 0
    samples: int = 0
    complete: int = 0
    entries: int
    segments: int
    bytes: int
    """Of all segments."""
    tensor_bytes: int
    """Of the entries' tensors, each once."""
    others: int
    """Entries that this data set does not name."""
    others_bytes: int
    batch_size: int
    buckets: tuple[Buckets, ...] = ()
    """For each resolution."""
    captions: Captions | None = None
    kinds: tuple[Kind, ...] = ()
    passes: tuple[Pass, ...] = ()
    """Newest first."""
    failures: tuple[Failure, ...] = ()
    """Of the newest pass that ended."""
    damage: Damage
    other_names: tuple[str, ...] = ()
    """The store's other data sets."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A picture made from latents."""

    sample: str
    source: str
    """The reference of the picture that was encoded."""
    caption: str
    size: str
    """Of the bucket."""
    png: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Gallery:
    """The thumbnails of a report, and how they were made."""

    chosen: str = ""
    """By which rule, of how many samples."""
    colours: str = ""
    """Where the colours come from."""
    thumbnails: tuple[Thumbnail, ...] = ()
    about: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The same in numbers."""
