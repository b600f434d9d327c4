"""How trainers read the caption files beside pictures. Their white space decides file names, and some trainers encode other words."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from cachestore.core.errors import BadInput
from cachestore.core.samples import Sample
from cachestore.core.spelling import option
from cachestore.core.words import first_of, plural
from cachestore.sources.captions import captions_in
from cachestore.sources.files import SourceFiles
from cachestore.sources.reading import CaptionLines
from cachestore.sources.remarks import Remarks
from cachestore.trainers.format import Format
from cachestore.trainers.matching import CaptionSettings, same_words, visual_of

SUFFIXES: Final = (".txt", ".caption")
_MARK: Final = "\ufeff"
"""A byte order mark that may start a UTF-8 file. Trainers keep it in the caption."""


def text_beside(files: SourceFiles, reference: str) -> str | None:
    """Return the exact text of the caption file beside a picture; None if no such file can be read."""
    for suffix in SUFFIXES:
        try:
            return files.read(str(PurePosixPath(reference).with_suffix(suffix)))[0].decode("utf-8")
        except (OSError, ValueError):
            continue
    return None


@dataclass
class EncodedCaptions:
    """Compares the captions of a source with those that a trainer read from the same files and encoded."""

    format: Format
    files: SourceFiles | None
    """The source's files, if its captions are in separate files; else None."""
    caption_lines: CaptionLines
    added: CaptionSettings
    read_as: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """For each caption, the forms in which the trainer reads it, with its own white space."""
    cut: list[str] = field(default_factory=list[str])
    """Ids of samples whose caption has several lines, of which the trainer encoded only one."""
    other: list[str] = field(default_factory=list[str])
    """Ids of samples for which the trainer encoded other words than the source has."""

    def as_encoded(self, sample: Sample) -> tuple[str, ...]:
        """Return a sample's captions for the data set: the source's own, or what the trainer encoded if the words differ."""
        text = self._text_of(sample)
        if self.format.captions_of is None or not sample.captions or (text is None and self.format.changes_only_caption_files):
            return sample.captions
        whole = sample.captions[0]
        read = self.format.captions_of(whole if text is None else text, self.added)
        captions = sample.captions
        if self.format.is_one_caption:  # written as in the source if only white space differs
            same = next((one.strip() for one in (whole, *whole.splitlines()) if same_words(one, read[0])), None)
            if same is None:
                self.other.append(sample.id)
            elif same != whole:
                self.cut.append(sample.id)
            captions = (" ".join(read[0].split()) if same is None else same,)
        for caption in captions:
            self.read_as.setdefault(caption, []).extend(one for one in read if same_words(one, caption))
        return captions

    def _text_of(self, sample: Sample) -> str | None:
        """Return the text of the file that a sample's captions were read from; None if they came from elsewhere."""
        reference = visual_of(sample)
        text = None if reference is None or self.files is None else text_beside(self.files, reference)
        own = None
        with suppress(BadInput):  # a caption that cannot be encoded is not the sample's
            own = None if text is None else captions_in(text.removeprefix(_MARK), self.caption_lines, sample.id, Remarks())
        return text if own == sample.captions else None

    def remarks(self) -> Iterator[str]:
        """Yield remarks on captions that differ from the source's."""
        if self.cut:
            yield (
                f"{plural(len(self.cut), 'caption has', 'captions have')} several lines. {self.format.name} encodes only the first line, so"
                f" this import does too ({first_of(self.cut)}): pass {option('caption_lines', 'first')} if you run precompute with the same"
                f" {option('name')}"
            )
        if self.other:
            yield (
                f"{plural(len(self.other), 'caption file has', 'caption files have')} other words than {self.format.name} encoded; the"
                f" import keeps what was encoded ({first_of(self.other)})"
            )
