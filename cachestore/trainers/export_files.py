"""The files that an export of a data set has: their names, which are known without reading a value, and what fills each."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice

from cachestore.core.errors import CacheStoreError
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Key
from cachestore.core.raw_tensors import Contents
from cachestore.store.format.catalog import KeyColumn
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.export_use import TrainerUse
from cachestore.trainers.export_values import ExportValues
from cachestore.trainers.exported import ExportVariant, Listed, Named

EMPTY_CAPTION = -1
"""Stands for the row of the empty caption, which no sample has."""

FileNumber = tuple[int, int]
"""A row, and which of its files."""
Failures = list[Mapping[str, str]]
Filled = tuple[Contents, Sequence[tuple[KeyColumn, ExportVariant]]]
"""What is in a file, and the variants of a picture that it was made from, with their columns."""


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A file of an export. Two with the same path are one file if they are made from the same."""

    encoder: str
    path: str
    made_from: tuple[object, ...]
    named: tuple[Named, ...]
    """What each value in it shows; the first names it."""
    fill: Callable[[], Filled]
    """Reads what is in it. Raises EncodeFailed, and the errors of reading."""
    listed: Listed | None = None


def failure_of(sample: str, encoder: str, error: Exception | str) -> Mapping[str, str]:
    """Return a file that cannot be made as a report lists it."""
    return {"sample": sample, "encoder": encoder, "reason": str(error)}


@dataclass(frozen=True)
class ExportFiles:
    """The files of a data set as another trainer's cache."""

    layout: ExportLayout
    values: ExportValues
    use: TrainerUse | None = None
    """Knows the captions as the trainer reads them, which name some trainers' files of text. None if names do not matter."""
    contested: dict[str, str] = field(default_factory=dict[str, str])
    """By path that samples with different values share: why that cannot be."""

    def each(self, failures: Failures, samples: Collection[str] | None = None) -> Iterator[tuple[FileNumber, ExportFile]]:
        """Yield each file once, of all samples or these; add to `failures` what has no name, or another sample's."""
        layout, seen = self.layout, dict[str, tuple[str, tuple[object, ...]]]()
        for row in (*range(len(layout.catalog)), EMPTY_CAPTION):
            sample = self.sample(row)
            if samples is not None and row != EMPTY_CAPTION and sample not in samples:
                continue
            for number, file in enumerate(self.of_row(row, failures)):
                first, made_from = seen.setdefault(file.path, (sample, file.made_from))
                if made_from != file.made_from:
                    apart = f"{layout.format.name} tells the two apart only by this name, so rename one"
                    reason = f"{file.path} would also be the file of {first!r}: {apart}"
                    self.contested[file.path] = reason
                    failures.append(failure_of(sample, file.encoder, reason))
                elif first == sample:
                    yield (row, number), file

    def at(self, number: FileNumber) -> ExportFile:
        """Return a file that `each` yielded."""
        return next(islice(self.of_row(number[0], []), number[1], None))

    def sample(self, row: int) -> str:
        """Return the id of a row's sample."""
        return "" if row == EMPTY_CAPTION else self.layout.catalog.ids[row]

    def of_row(self, row: int, failures: Failures) -> Iterator[ExportFile]:
        """Yield the files of a row: of its text and of its picture or clips, or, if the trainer joins them, of each with the row's text."""
        if row == EMPTY_CAPTION:
            yield from self._empty_caption()
            return
        if not self.layout.writing.is_joined:
            yield from self._texts(row, failures)
            yield from self._latents(row, failures)
            return
        failed, texts, visuals = len(failures), list(self._texts(row, failures)), list(self._latents(row, failures))
        if not (texts and visuals) and len(failures) == failed:
            lacking = "text" if visuals else "picture or video"
            failures.append(failure_of(self.sample(row), "", f"it has no {lacking}, but {self.layout.format.name} trains on both"))
        for text in texts[:1]:
            for file in visuals:
                yield replace(file, made_from=(*text.made_from, *file.made_from), fill=partial(_joined, text, file))

    def _texts(self, row: int, failures: Failures) -> Iterator[ExportFile]:
        """Yield the files of a row's first caption, or of all if a file is named by its caption."""
        layout, column = self.layout, self.layout.captions
        if column is None:
            return
        for index in range(column.at[row], column.at[row + 1])[: None if layout.writing.text_by == "caption" else 1]:
            try:
                key, named = layout.key(column, index), layout.named(row, column, index)
                named = named if self.use is None else self.use.as_read(row, named)
                path = layout.writing.text_path(layout.family_of[column.encoder], named)
            except (CacheStoreError, OSError) as error:
                failures.append(failure_of(self.sample(row), column.encoder, error))
                continue
            fill = cache(partial(self._text, column, key, named))  # of several resolutions, all have the same
            for tree in layout.text_trees(row):
                yield ExportFile(column.encoder, layout.inside(tree, path), (key, named.caption), (named,), fill)

    def _empty_caption(self) -> Iterator[ExportFile]:
        """Yield the text of the empty caption, if the trainer has a file for it, and the store has it but no sample does."""
        column, catalog = self.layout.captions, self.layout.catalog
        if column is None or not self.layout.writing.has_empty_caption or not len(catalog) or "" in catalog.captions:
            return
        key, named = caption_key(column.fingerprint, ""), Named("")
        if key in self.values.reader:
            path = self.layout.writing.text_path(self.layout.family_of[column.encoder], named)
            yield ExportFile(column.encoder, path, (key,), (named,), partial(self._text, column, key, named))

    def _text(self, column: KeyColumn, key: Key, named: Named) -> Filled:
        text = self.values.text(column, self.values.stored(key))
        return self.layout.writing.text(self.layout.family_of[column.encoder], named, text), ()

    def _latents(self, row: int, failures: Failures) -> Iterator[ExportFile]:
        """Yield the files of a row's picture or video, one for each variant or one for all."""
        layout = self.layout
        cells = [(column, index) for column in layout.visuals for index in layout.indices(row, column)]
        is_one_file = layout.writing.resolutions == "one file"
        for several in [cells] if is_one_file and cells else [[cell] for cell in cells]:
            column = several[0][0]
            family = layout.family_of[column.encoder]
            try:
                keys = tuple(layout.key(*cell) for cell in several)
                for cell_column, _index in several:
                    layout.check_picture(row, cell_column)
                named = [self.values.named(row, *cell) for cell in several]
                path = layout.writing.latents_path(family, named[0])
            except (CacheStoreError, OSError) as error:
                failures.append(failure_of(self.sample(row), column.encoder, error))
                continue
            source = layout.source(row)
            tree = layout.tree_of(source, column)
            path = layout.inside(tree, path)
            listed = Listed(path, tree, str(layout.root_of(source) / named[0].reference), named[0], family)
            fill = partial(self._filled, row, several, named)
            yield ExportFile(column.encoder, path, keys, (*named,), fill, listed)

    def _filled(self, row: int, cells: Sequence[tuple[KeyColumn, int]], named: Sequence[Named]) -> Filled:
        variants = [self.values.variant(row, *cell, its) for cell, its in zip(cells, named, strict=True)]
        contents = self.layout.writing.latents(self.layout.family_of[cells[0][0].encoder], variants)
        return contents, [(column, variant) for (column, _index), variant in zip(cells, variants, strict=True)]


def _joined(text: ExportFile, visual: ExportFile) -> Filled:
    (contents, variants), (own, _none) = visual.fill(), text.fill()
    return Contents({**contents.tensors, **own.tensors}, contents.values), variants
