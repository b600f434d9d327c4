"""What another trainer will do with an export: which files it finds, which latents it puts into one batch, which text it reads."""

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

from cachestore.core.inputs import BUCKETS, RESOLUTIONS, SOURCE, is_trained_on
from cachestore.core.samples import CAPTION, CONTROL, IMAGE, MASK, VIDEO
from cachestore.core.spelling import option
from cachestore.core.words import first_of, noun, plural
from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.sources.files import Folder
from cachestore.store.format.catalog import KeyColumn
from cachestore.trainers.caption_files import text_beside
from cachestore.trainers.export_layout import STEP, ExportLayout
from cachestore.trainers.exported import ExportVariant, Named
from cachestore.trainers.learned_buckets import learned_buckets
from cachestore.trainers.matching import CaptionSettings, same_words


@dataclass
class TrainerUse:
    """Compares the written files with what the trainer looks for."""

    layout: ExportLayout
    folder: Path
    """The folder that files are written to. If the trainer caches beside the pictures, it may contain their captions."""
    latents: int = 0
    """How many latents were compared with what the trainer looks for."""
    missed: list[str] = field(default_factory=list[str])
    """Samples whose latents the trainer does not look for."""
    batches: dict[Hashable, Counter[Hashable]] = field(default_factory=dict[Hashable, Counter[Hashable]])
    """For each group from which the trainer makes batches: how many latents have each shape."""
    reworded: list[str] = field(default_factory=list[str])
    """Samples whose caption file gives the trainer other text than was encoded."""
    unread: int = 0
    """How many captions have no caption file here."""

    def count(self, row: int, column: KeyColumn, variant: ExportVariant) -> None:
        """Count whether the trainer will look for these latents, and which latents it may put into one batch with them.

        Latents that the trainer itself cached are not counted, because it finds them.
        """
        recipe = self.layout.catalog.recipes[column.fingerprint]
        if recipe.make.get("format") == self.layout.format.name:
            return
        resolution = self.resolution_of(row, column)
        settings = BucketSettings.of(column.options, resolution)
        if self.layout.writing.finds is not None:
            self.latents += 1
            if not self.layout.writing.finds(self.layout.family_of[column.encoder], variant.named, settings):
                self.missed.append(self.layout.catalog.ids[row])
        stacks = self.layout.writing.stacks
        if stacks is not None or self.layout.writing.mixes_shapes:
            group, controls = None if stacks is None else stacks(variant.named, settings), tuple(raw[1] for raw in variant.controls)
            batch = (self.layout.tree_of(self.layout.source(row), column), group, controls)
            self.batches.setdefault(batch, Counter())[variant.latents.tensor[1]] += 1

    def resolution_of(self, row: int, column: KeyColumn) -> int:
        """Return the resolution at which the trainer would load a row's picture: the data set's, else a guess from its largest bucket."""
        of_source: Mapping[str, int] = column.options.get(RESOLUTIONS, {})
        source = str(json.loads(self.layout.catalog.extras[row]).get(SOURCE, "")) if of_source else ""
        known = of_source.get(source, column.options.get("resolution"))
        return int(known) if known is not None else self.guessed[column.encoder]

    @cached_property
    def guessed(self) -> Mapping[str, int]:
        """For each encoder, the resolution at which its trainer's rule gives these buckets, else one near the largest bucket's side."""
        guessed: dict[str, int] = {}
        for column in self.layout.visuals:
            settings = learned_buckets(column, self.layout.catalog.recipes[column.fingerprint])
            buckets = (column.cell(index).facts.get("bucket", (0, 0)) for index in range(len(column.keys)))
            largest = isqrt(max((width * height for width, height, *_frames in buckets), default=0))
            nearest = max(STEP, (largest + STEP // 2) // STEP * STEP)
            guessed[column.encoder] = nearest if settings is None else settings.resolution
        return guessed

    def as_read(self, row: int, named: Named) -> Named:
        """Add the caption as the trainer reads it from the file beside the picture, if text is named by the caption's digest."""
        captions_of = self.layout.format.captions_of
        if captions_of is None or self.layout.writing.text_by == "picture" or named.is_prompt:
            return named
        folders = [self.folder / self.layout.source(row)] if self.layout.format.is_beside else []
        folders += [root] if (root := self.layout.root_of(self.layout.source(row))) != Path() else []
        texts = (text_beside(Folder(folder), named.reference) for folder in folders)
        text = next((text for text in texts if text is not None), None)
        if text is None:
            self.unread += named.caption != ""
            return named
        read = next((one for one in captions_of(text, self.added) if same_words(one, named.caption)), None)
        if read is None:
            self.reworded.append(self.layout.catalog.ids[row])
        return replace(named, read_as=read)

    @cached_property
    def added(self) -> CaptionSettings:
        """The trigger word (or prefix) and the default caption that were added to the text of caption files."""
        hints: Mapping[str, Any] = {} if self.layout.captions is None else self.layout.catalog.request.get(self.layout.captions.encoder, {})
        prefix = str(self.layout.catalog.texts.get("prefix", "")).strip() or None
        return CaptionSettings(hints.get("trigger_word") or prefix, hints.get("caption") if "trigger_word" in hints else None)

    def left_out(self) -> Iterator[str]:
        """Yield what the format cannot hold, in words: control images, videos, text, further captions of a picture."""
        if self.layout.unwritten is not None:
            yield self.layout.unwritten
        pictures = [column for column in self.layout.visuals if column.role == IMAGE and "controls" in self.layout.writing.takes]
        shown = (column for column in self.layout.catalog.columns if column.role == CONTROL)
        rows = range(len(self.layout.catalog))
        if controls := sum(column.count(row) for column in shown for row in rows if not any(one.count(row) for one in pictures)):
            yield f"latents of {plural(controls, 'control image')}"
        columns = (column for column in self.layout.catalog.columns if column.role == VIDEO and is_trained_on(VIDEO, column.options))
        if (videos := sum(len(column.keys) for column in columns)) and "videos" not in self.layout.writing.takes:
            yield f"latents of {plural(videos, 'video')}"
        others = (one for one in self.layout.catalog.columns if one.role not in (CAPTION, CONTROL) and one.encoder != MASK)
        for one in others:
            if len(one.keys) and not is_trained_on(one.role, one.options):
                yield f"{plural(len(one.keys), 'value')} of {one.encoder}, made of the role {one.role}"
        column = self.layout.captions
        if column is None or self.layout.writing.text_by == "caption":
            return
        if further := len(column.keys) - sum(column.count(row) > 0 for row in rows):
            yield f"{plural(further, 'caption')} after the first one of their picture"

    def not_taken(self) -> Iterator[str]:
        """Yield what the trainer will not find or cannot put into batches, in words."""
        yield from self.torn_or_missed()
        trainer = self.layout.format.name
        if self.layout.writing.needs_text_and_latents and not (self.layout.captions and self.layout.visuals):
            lacking = "latents" if self.layout.captions else "text"
            needs = f"{trainer} uses only what has both text and latents, and this data set has no {lacking}"
            yield f"{needs}: add it with `cachestore precompute`"
        if self.reworded:
            files = f"the files of {plural(len(self.reworded), 'caption')}"
            yield f"{trainer} reads other text from {files}, and encodes that again itself ({first_of(self.reworded)})"

    def torn_or_missed(self) -> Iterator[str]:
        """Yield which latents have buckets that the trainer does not give them, in words."""
        trainer = self.layout.format.name
        if self.missed:
            yield (
                f"{trainer} will not find {len(self.missed)} of {self.latents} latents: it resizes and crops these pictures for"
                f" other buckets, and encodes them again ({first_of(self.missed)}){self._advice}"
            )
        torn = [] if self.layout.writing.mixes_shapes else [shapes for shapes in self.batches.values() if len(shapes) > 1]
        if torn:
            yield (
                f"{len(torn)} of {plural(len(self.batches), 'group')} from which {trainer} makes batches"
                f" {noun(len(torn), 'holds', 'hold')} latents of several shapes"
                f" ({plural(sum(shapes.total() for shapes in torn), 'file')}): {trainer} fails if its batch size is above 1"
                f"{self._advice}"
            )

    @property
    def _advice(self) -> str:
        """Which rule the trainer needs, in words; empty if the data set has that rule, or was not made here."""
        trainer, options = self.layout.format.name, [column.options for column in self.layout.visuals]
        has_rule = any(one.get(BUCKETS) == trainer or "resolution" not in one for one in options)
        return "" if has_rule else f": precompute with {option('buckets', trainer)} makes latents for its buckets"

    def remarks(self) -> Iterator[str]:
        """Yield what the user should know about the written files."""
        if self.unread:
            yield (
                f"{plural(self.unread, 'caption has', 'captions have')} no caption file here: {self.layout.format.name} finds their text"
                " only if each caption file holds exactly the caption, without spaces or a line end after it"
            )
        shapes = {shape for those in self.batches.values() for shape in those}
        if self.layout.writing.mixes_shapes and len(shapes) > 1:
            puts = f"{self.layout.format.name} puts any samples into one batch"
            yield f"the latents have {len(shapes)} shapes, and {puts}: train with a batch size of 1"
        if self.layout.writing.text_remark and self.layout.captions is not None and len(self.layout.catalog):
            yield self.layout.writing.text_remark
