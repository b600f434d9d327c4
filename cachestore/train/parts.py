"""What each returned column adds to samples and batches: the keys of its entries, and how their tensors are read. Reads no entry."""

from collections.abc import Sequence
from dataclasses import dataclass

from cachestore.core.batch_shapes import LatentsAs
from cachestore.core.keys import Key
from cachestore.core.read_block import LatentsBlock, TextBlock


@dataclass(frozen=True, slots=True)
class TextPart:
    """What one text encoder adds to a batch."""

    block: TextBlock
    keys: Sequence[Key]
    """One for each sample."""
    stored: frozenset[str] = frozenset()
    """As for `TextColumn`."""


@dataclass(frozen=True, slots=True)
class LatentsPart:
    """What one VAE adds to a batch, under `name`."""

    name: str
    block: LatentsBlock
    form: LatentsAs
    keys: Sequence[Key]
    seeds: Sequence[int]
    """One for the noise of each sample."""


@dataclass(frozen=True, slots=True)
class MaskPart:
    """The masks of a batch. `name` is also their name in the entries."""

    name: str
    patch: int
    """As for `read_mask`."""
    has_frames: bool
    """As for `mask_shape`."""
    cells: Sequence[Key | None]
    """One for each sample. A sample without a mask gets ones."""
    shape: tuple[int, ...] | None
    """Shape of the missing masks in the batch. None if no mask is missing, or if the shapes differ."""

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of the samples that have a mask."""
        return [key for key in self.cells if key is not None]


@dataclass(frozen=True, slots=True)
class ControlsPart:
    """Several latents for each sample, under `name`, as a list for each, as sizes may differ."""

    name: str
    block: LatentsBlock
    form: LatentsAs
    """Not "sample" for stored moments: control latents are never drawn."""
    lists: Sequence[Sequence[Key]]
    """The keys of each sample."""

    @property
    def keys(self) -> Sequence[Key]:
        """Keys, concatenated in sample order."""
        return [key for keys in self.lists for key in keys]


Part = TextPart | LatentsPart | MaskPart | ControlsPart
