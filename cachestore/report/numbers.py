"""The numbers of a report on a store and one of its data sets. Plain values, for the page and for `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cachestore.core.keys import Json
from cachestore.jobs.share.history import Failure, Pass, UnusedFiles
from cachestore.store.format.catalog import Made

State = Literal["sound", "damaged", "unreadable", "gone"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket and its samples."""

    name: str
    """`<width>x<height>`, for videos also `x<frames>`; empty if the catalog does not know it."""
    samples: int
    batches: int
    """Full batches."""
    left_over: int
    """Samples that are in no full batch of an epoch."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a batch size leaves out over all buckets."""

    batch_size: int
    batches: int
    left_over: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of a data set at one resolution; only complete samples count."""

    resolution: int | None
    """None if the catalog does not say."""
    samples: int
    left_over: int
    buckets: tuple[Bucket, ...]
    """Fullest first."""
    losses: tuple[Loss, ...]
    """One for each batch size."""
    read_here: bool = True
    """Whether cachestore's loader reads them, and not another trainer by whose rule the buckets were chosen."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Captions whose length is in [low, high]."""

    low: int
    high: int
    captions: int


@dataclass(frozen=True, slots=True)
class Long:
    """A caption that the encoder truncates."""

    sample: str
    length: int
    caption: str


@dataclass(frozen=True, slots=True)
class Captions:
    """The captions of a data set; each distinct one counts once in the lengths."""

    samples: int
    """Samples that have a caption; the empty one counts."""
    captions: int
    distinct: int
    empty: int
    unit: Literal["tokens", "characters"]
    """Tokens as the encoder reads them, if the catalog knows them."""
    limit: int | None
    """How many tokens the encoder reads; None if unknown."""
    truncated: int
    median: int
    most: int
    bins: tuple[Bin, ...]
    longest: tuple[Long, ...]
    """The longest truncated captions."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """An entry that several cells share."""

    cells: int
    what: str
    """The caption, or the ids of the first samples."""


@dataclass(frozen=True, slots=True)
class ColumnNumbers:
    """What one key column of the data set holds."""

    encoder: str
    role: str
    about: str
    """Family, dtype and so on, from the recipe."""
    fingerprint: str
    cells: int
    """Captions or pictures of the samples."""
    missing: int
    """Cells without a value."""
    entries: int
    """Distinct keys."""
    bytes: int
    """Size of their tensors."""
    saved_bytes: int
    """How much larger it would be if each cell had its own tensors."""
    repeats: tuple[Repeat, ...] = ()
    """The most shared entries."""

    @property
    def shared(self) -> int:
        """Cells whose entry another cell has too, without the first cell of each entry."""
        return self.cells - self.missing - self.entries

    @property
    def name(self) -> str:
        """The encoder, with the role if that is not the usual one."""
        return self.encoder if self.role in {"", "caption", "image", self.encoder} else f"{self.encoder} of {self.role}"


@dataclass(frozen=True, slots=True)
class FindingNumbers:
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
    """0 if its header cannot be read."""
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
    findings: tuple[FindingNumbers, ...]


@dataclass(frozen=True, slots=True)
class UnfinishedNumbers:
    """A data set that no run has finished yet."""

    name: str
    done: int
    total: int
    at_work: bool
    words: str
    """How far it is, and how it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportNumbers:
    """Everything in a report except its pictures."""

    store: str
    written: str
    """The time in UTC."""
    version: str
    name: str = ""
    """The data set; if the store has none, this and what describes it are empty."""
    generation: int = 0
    made: Made = "precompute"
    """What made it: one that a program published has no pictures, captions and runs to show."""
    samples: int = 0
    complete: int = 0
    entries: int
    segments: int
    bytes: int
    """Size of all segments."""
    tensor_bytes: int
    """Size of all entries' tensors, each entry once."""
    others: int
    """Entries that do not belong to this data set."""
    others_bytes: int
    batch_size: int
    buckets: tuple[Buckets, ...] = ()
    """One for each resolution."""
    captions: Captions | None = None
    kinds: tuple[ColumnNumbers, ...] = ()
    passes: tuple[Pass, ...] = ()
    """Newest first."""
    failures: tuple[Failure, ...] = ()
    """Failures of the newest pass that ended."""
    unused: tuple[UnusedFiles, ...] = ()
    """What was not used of the source, by the newest pass that ended."""
    damage: Damage | None
    """None for a store at an address: what is there is not checked."""
    other_names: tuple[str, ...] = ()
    """The store's other data sets."""
    unfinished: tuple[UnfinishedNumbers, ...] = ()
    """The store's data sets that are not finished."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture file inside the page."""

    kind: Literal["png", "jpeg"]
    data: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ClipFile:
    """What the file of a clip says."""

    rate: float
    """Frames a second; 0 if it is not known."""
    repeated: int
    """How many frames of the clip are the same frame of the file as the one before, as the file has fewer a second."""
    has_sound: bool


@dataclass(frozen=True, slots=True)
class Framing:
    """What was encoded of a picture or clip. What the catalog does not say is None, or empty."""

    sample: str
    bucket: tuple[int, ...]
    """Width and height, of a clip also frames."""
    size: tuple[int, ...] = ()
    """Width and height of the whole picture."""
    scale: float | None = None
    """How many times longer its sides became; below 1 it was made smaller."""
    cut: float | None = None
    """The share of its area that was cut off, 0 to 1."""
    cut_at: tuple[str, ...] = ()
    """The sides at which it was cut."""
    within: tuple[int, ...] = ()
    """The crop (left, top, right, bottom) that the source gives."""
    fps: float | None = None
    """Of a clip, the frames a second that were encoded."""
    file: ClipFile | None = None
    """Of a clip whose file was found."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A sample's original beside the picture made from its latents; of a clip several frames."""

    framing: Framing
    source: str
    """The reference of the original."""
    caption: str
    latents: tuple[Picture, ...]
    originals: tuple[Picture, ...]
    """Empty if it cannot be shown."""
    why_none: str = ""
    """Why it cannot be shown, as a sentence."""

    @property
    def is_clip(self) -> bool:
        """Whether it is a clip."""
        return len(self.framing.bucket) > 2


@dataclass(frozen=True, slots=True)
class Gallery:
    """The thumbnails of a report, and how they were made."""

    samples: int = 0
    """How many the data set has."""
    has_originals: bool = False
    """Whether any original was found."""
    colours: tuple[str, ...] = ()
    """Where the colours come from, as sentences."""
    thumbnails: tuple[Thumbnail, ...] = ()
    about: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """The same as numbers."""
