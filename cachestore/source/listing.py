"""Listings: the samples of a source in order, a digest of them, and the files that their references lead to.

Equal listings have equal digests, whatever the order of the directory, the modification times or the absolute path of the root.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from cachestore.core.errors import BadInput
from cachestore.core.inputs import Stat
from cachestore.core.keys import canonical, digest_opened, digest_parts
from cachestore.core.samples import IMAGE, VIDEO, Sample
from cachestore.files.opening import open_foreign
from cachestore.source.captions import MANIFEST_BYTES, normal
from cachestore.source.files import Files, Folder
from cachestore.source.reading import Reading
from cachestore.source.remarks import Remarks
from cachestore.source.rows import METADATA, look_at_columns
from cachestore.source.unused import Unused

_ROWS_VERSION: Final = 3
"""Increase it when the same bytes of a manifest or metadata file become other samples: these then have another plan."""

Parse = Callable[["Remarks"], Iterator[Sample]]
"""Yields the samples of a source. `captions` is empty for samples without a caption."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source lists, and how its files are read."""

    files: Files
    """The files that references lead to."""
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

        A manifest is read again each time, so that its rows need not stay in memory. Raises BadInput, also if it changed since it was
        listed.
        """
        return self.walk(remarks or Remarks())

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """As `Files.read`."""
        return self.files.read(reference)

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, Stat]]:
        """As `Files.open`."""
        return self.files.open(reference)

    def stat(self, reference: str) -> Stat | None:
        """As `Files.stat`."""
        return self.files.stat(reference)


def list_samples(files: Files, parse: Parse, where: Path | str, caption: str | None) -> Listing:
    """List a source by parsing it now; the samples stay in memory. Raises BadInput if two samples have the same id."""
    seen = Remarks()
    samples = tuple(_checked(parse, where, caption, seen))

    def walk(remarks: Remarks) -> Iterator[Sample]:
        remarks.take(seen)
        return iter(samples)

    rows = (canonical([s.id, list(s.captions), {role: list(refs) for role, refs in s.images.items()}, dict(s.extras)]) for s in samples)
    return Listing(files, digest_parts("cachestore-content", *rows).hex(), walk, seen)


def list_manifest(path: Path, parse: Parse, how: Reading) -> Listing:
    """List a manifest by the digest of its bytes. So no row is read if there is already a plan for it."""
    before = _digest(path)

    def walk(remarks: Remarks) -> Iterator[Sample]:
        yield from _checked(parse, path, how.caption, remarks)
        if _digest(path) != before:
            raise BadInput(f"{path} changed while it was read; run the same command again")

    kind = path.name.lower() if path.name in METADATA else path.suffix.lower()
    version = "" if kind == ".txt" else f" {_ROWS_VERSION}"
    parts = [kind + version, before, b"" if how.caption is None else canonical(how.caption)]
    parts += [how.caption_lines] if how.caption_lines != "whole" else []
    parts += [canonical(["roles", *how.roles])] if how.roles else []
    return Listing(Folder(path.parent.absolute()), digest_parts("cachestore-content", *parts).hex(), walk)


def _digest(path: Path) -> str:
    try:
        with open_foreign(path, limit_bytes=MANIFEST_BYTES) as file:
            return digest_opened(file)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; let this user read it") from error


def _checked(parse: Parse, where: Path | str, caption: str | None, remarks: Remarks) -> Iterator[Sample]:
    ids: set[str] = set()
    has_captions, has_files, has_text = caption is not None, False, caption is not None
    for sample in parse(remarks):
        has_captions |= bool(sample.captions)
        has_text = has_text or any(text.strip() for text in sample.captions)
        has_files |= not sample.images.keys().isdisjoint((IMAGE, VIDEO))
        if sample.id in ids:
            one, two = _what(next(other for other in parse(Remarks()) if other.id == sample.id)), _what(sample)
            shown = ascii if normal(one) == normal(two) else repr  # two spellings of one letter look the same
            raise BadInput(
                f"two samples of {where} have the id {sample.id!r}: {shown(one)} and {shown(two)}; give one of them another id, in a"
                " column id"
            )
        ids.add(sample.id)
        remarks.missing += [sample.id] if not sample.captions and caption is None else []
        yield sample if sample.captions else replace(sample, captions=(caption or "",))
    if has_captions and not has_text and not remarks.missing:
        remarks.wordless.append(str(where))
    if ids and remarks.columns:
        look_at_columns(where, remarks, has_captions=has_captions, has_files=has_files)


def _what(sample: Sample) -> str:
    return next((refs[0] for refs in sample.images.values() if refs), (sample.captions or ("",))[0][:60])
