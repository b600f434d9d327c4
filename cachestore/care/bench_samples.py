"""Made-up JPEGs and captions to measure with. A picture costs what a photograph of its size costs: to read, to digest, to decode."""

import io
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from cachestore.core.inputs import NO_STAT, Stat
from cachestore.core.keys import digest_parts
from cachestore.core.samples import IMAGE, Sample
from cachestore.sources.listing import Listing
from cachestore.sources.remarks import Remarks

JPEG_QUALITY: Final = 92
_START: Final = 2
"""Bytes of a JPEG's first marker; a comment may follow it."""


@dataclass(frozen=True, slots=True)
class Copies:
    """One JPEG on disk under many names. Each copy has a comment of its own, so that no two have equal bytes. Implements `SourceFiles`."""

    path: Path

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `SourceFiles.read`."""
        data, comment = self.path.read_bytes(), reference.encode()
        marked = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        return b"".join((data[:_START], marked, data[_START:])), NO_STAT

    @contextmanager
    def open(self, reference: str) -> Generator[tuple[BinaryIO, Stat]]:
        """As `SourceFiles.open`."""
        data, stat = self.read(reference)
        yield io.BytesIO(data), stat

    def stat(self, reference: str) -> Stat | None:
        """As `SourceFiles.stat`."""
        del reference
        return NO_STAT


def write_jpeg(path: Path, width: int, height: int) -> None:
    """Write a picture with soft structure, about as large as a photograph of its size: noise that is scaled up eightfold."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path, "JPEG", quality=JPEG_QUALITY)


def list_pictures(path: Path, count: int) -> Listing:
    """Return a listing of `count` copies of a JPEG."""
    return _listed(path, [Sample(f"{number}.jpg", {IMAGE: (f"{number}.jpg",)}) for number in range(count)])


def list_captions(path: Path, count: int, words: int, vocabulary: int) -> Listing:
    """Return a listing of `count` captions without pictures, each of `words` words out of `w0`, `w1` and so on."""
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(vocabulary)}" for _word in range(words)) for _caption in range(count)]
    return _listed(path, [Sample(str(number), captions=(text,)) for number, text in enumerate(texts)])


def _listed(path: Path, samples: list[Sample]) -> Listing:
    def walk(remarks: Remarks) -> Iterator[Sample]:
        del remarks
        return iter(samples)

    return Listing(Copies(path), digest_parts("cachestore-bench", *(sample.id for sample in samples)).hex(), walk)
