"""Listings: the samples of a source in order, a digest of them, and the files that their references lead to.

Equal listings have equal digests, whatever the order of the directory, the modification times or the absolute path of the root.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from cachestore.core.errors import BadInput
from cachestore.core.inputs import Stat
from cachestore.core.keys import canonical, digest_opened, digest_parts
from cachestore.core.samples import IMAGE, MASK, VIDEO, Sample
from cachestore.files.opening import open_foreign
from cachestore.sources.captions import MANIFEST_BYTES, normal
from cachestore.sources.files import Folder, SourceFiles
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import RefusedItem, Remarks
from cachestore.sources.rows import check_columns
from cachestore.sources.tables import is_metadata
from cachestore.sources.unused import Unused

_ROWS_VERSION: Final = 4
"""Increase it when the same bytes of a manifest, metadata file or list of prompts become other samples: these then have another plan."""
Parse = Callable[["Remarks"], Iterator[Sample]]
"""Yields the samples of a source. `captions` is empty for samples without a caption."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source lists, and how its files are read."""

    files: SourceFiles
    content: str
    """Digest of a manifest's bytes, or of the ids, captions and references of a folder."""
    walk: Parse
    seen: Remarks = field(default_factory=Remarks)
    """What was found when the source was listed; empty if its rows are read each time."""
    left: Callable[[Iterable[str]], Unused] | None = None
    """Accounts for what is not used, from the references of all samples, if the listing itself does not know them."""

    def unused(self, references: Iterable[str]) -> Unused:
        """Return the account of what is not used of the source now; `references` are those of all samples."""
        return self.seen.unused if self.left is None else self.left(references)

    def samples(self, remarks: "Remarks | None" = None) -> Iterator[Sample]:
        """Yield the samples in order. Afterwards `remarks` holds what the user should know about them.

        A manifest is read again each time, so that its rows need not stay in memory. BadInput, also if it changed since.
        """
        return self.walk(remarks or Remarks())

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `SourceFiles.read`."""
        return self.files.read(reference)

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `SourceFiles.open`."""
        return self.files.open(reference)

    def stat(self, reference: str) -> Stat | None:
        """As `SourceFiles.stat`."""
        return self.files.stat(reference)


def with_alpha(listing: Listing) -> Listing:
    """Return the listing with each picture or video that has no mask as its own mask; its alpha is then read."""

    def walk(remarks: Remarks) -> Iterator[Sample]:
        masked: list[str] = []
        for sample in listing.walk(remarks):
            own = sample.images.get(VIDEO) or sample.images.get(IMAGE)
            given = sample.images.get(MASK)
            masked += [sample.id] if given and given != own else []
            yield sample if given or not own else replace(sample, images={**sample.images, MASK: own})
        remarks.masks = masked

    return replace(listing, content=digest_parts("cachestore-alpha", listing.content).hex(), walk=walk)


def list_samples(files: SourceFiles, parse: Parse, where: Path | str, how: ListingOptions) -> Listing:
    """List a source by parsing it now; the samples stay in memory. Raises BadInput if it has samples and none of them can be used."""
    seen = Remarks()
    samples = tuple(_checked(parse, where, how, seen))

    def walk(remarks: Remarks) -> Iterator[Sample]:
        remarks.take(seen)
        return iter(samples)

    rows = (canonical([s.id, list(s.captions), {role: list(refs) for role, refs in s.images.items()}, dict(s.extras)]) for s in samples)
    refused = [canonical(["refused", seen.refused.count, *([one.sample, one.reason] for one in seen.refused)])] if seen.refused else []
    return Listing(files, digest_parts("cachestore-content", *rows, *refused).hex(), walk, seen)


def list_tables(root: Path, paths: Sequence[Path], parse: Parse, how: ListingOptions) -> Listing:
    """List files with rows, or prompts, by the digest of their bytes: no row is read if they have a plan. References begin at `root`."""
    before = [_digest(path) for path in paths]
    where = paths[0] if len(paths) == 1 else f"{len(paths)} metadata files in {root}"

    def walk(remarks: Remarks) -> Iterator[Sample]:
        yield from _checked(parse, where, how, remarks)
        for path, digest in zip(paths, before, strict=True):
            if _digest(path) != digest:
                raise BadInput(f"{path} changed while it was read; run the same command again")

    parts: list[str | bytes] = []
    for path, digest in zip(paths, before, strict=True):
        kind = path.relative_to(root).as_posix().lower() if is_metadata(path) else path.suffix.lower()
        parts += [f"{kind} {_ROWS_VERSION}", digest]
    parts += [b"" if how.caption is None else canonical(how.caption)]
    parts += [how.caption_lines] if how.caption_lines != "whole" else []
    parts += [canonical(["roles", *how.roles])] if how.roles else []
    parts += [canonical(["caption_column", how.caption_column])] if how.caption_column is not None else []
    return Listing(Folder(root.absolute()), digest_parts("cachestore-content", *parts).hex(), walk)


def _digest(path: Path) -> str:
    try:
        with open_foreign(path, limit_bytes=MANIFEST_BYTES) as file:
            return digest_opened(file)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; let this user read it") from error


def _checked(parse: Parse, where: Path | str, how: ListingOptions, remarks: Remarks) -> Iterator[Sample]:
    """Yield the samples of which each id is the first, with the caption of those that have none."""
    ids: set[str] = set()
    again: list[tuple[str, str, str]] = []
    caption = how.caption
    has_captions, has_files, has_text = caption is not None, False, caption is not None
    for sample in parse(remarks):
        if sample.id in ids:
            again.append((sample.id, remarks.origin or _what_of(sample), _origin_of(sample, remarks)))
            continue
        has_captions |= bool(sample.captions)
        has_text = has_text or any(text.strip() for text in sample.captions)
        has_files |= not sample.images.keys().isdisjoint((IMAGE, VIDEO))
        ids.add(sample.id)
        remarks.missing += [sample.id] if not sample.captions and caption is None else []
        yield sample if sample.captions else replace(sample, captions=(caption or "",))
    if again:
        _refuse_again(parse, again, remarks)
    if not ids:
        remarks.refused.refuse_all(where)
    if has_captions and not has_text and not remarks.missing:
        remarks.wordless.append(str(where))
    if ids and remarks.columns:
        check_columns(where, how, remarks, has_captions=has_captions, has_files=has_files)


def _refuse_again(parse: Parse, again: Sequence[tuple[str, str, str]], remarks: Remarks) -> None:
    """Let each later sample of an id fail alone, and name the first one. To find these, the source is read once more."""
    wanted, first = {name for name, *_origins in again}, dict[str, str]()
    seen = Remarks()
    for sample in parse(seen):
        if sample.id in wanted:
            first.setdefault(sample.id, _origin_of(sample, seen))
    for name, origin, other in again:
        one = first.get(name, "an earlier one")
        shown = ascii if one != other and normal(one) == normal(other) else str  # two spellings of one letter look the same
        reason = f"two samples have the id {name!r}: {shown(one)}, which is taken, and {shown(other)}; give one of them another id"
        remarks.refused.append(RefusedItem(origin, f"{reason} in the column id", has_id=False))


def _origin_of(sample: Sample, remarks: Remarks) -> str:
    return f"{remarks.origin} ({_what_of(sample)!r})" if remarks.origin else _what_of(sample)


def _what_of(sample: Sample) -> str:
    """What a sample is made of: its first reference, else the beginning of its caption."""
    return next((refs[0] for refs in sample.images.values() if refs), (sample.captions or ("",))[0][:60])
