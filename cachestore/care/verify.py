"""`verify`: find damage and change nothing. A mismatch is damage only if a second opening shows it again."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from cachestore.care.checks import CHECKS, Check, StoreToCheck, ownerless, read_segments, slow_lines
from cachestore.care.losses import Needed, needed_by
from cachestore.core.arguments import as_path, as_whole, as_word, check_function, refuse
from cachestore.core.errors import BadInput, naming_extras
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import in_short, plural
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import Layout
from cachestore.store.format.findings import HARMLESS, Finding
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import Snapshot, list_indexes, load_snapshot, open_layout
from cachestore.store.read.unfinished import check_there

if TYPE_CHECKING:
    from cachestore.sources.combined import Moved

Level = Literal["full", "quick"]
"""How much is read: every byte, or names, sizes and headers."""

SEED: Final = 0


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """The result of `verify`. `ok` is false for any finding except stale temporary files and foreign files."""

    ok: bool
    entries: int
    segments: int
    bytes: int
    seconds: float
    findings: tuple[Finding, ...]
    level: str = "full"
    recomputed: Mapping[str, Json] | None = None
    """Counts of the entries that were encoded again; None if none were to be."""
    remarks: tuple[str, ...] = ()
    """Sentences on what is not damage, but makes the store slower."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """The object that `cachestore verify --json` prints."""
        return asdict(self) | {"findings": [finding.as_json() for finding in self.findings], "remarks": list(self.remarks)}


@naming_extras()
def verify(
    path: str | Path,
    level: Level = "full",
    *,
    subset: tuple[int, int] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    recompute: int = 0,
    seed: int = SEED,
    source: "Moved | None" = None,
    model: str | Path | None = None,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    name: str | None = None,
) -> VerifyReport:
    """Check a store for damage. Changes nothing.

    Args:
        path: the store.
        level: "full" reads every byte; "quick" reads names, sizes and headers.
        subset: (n, t) reads all bytes of the n-th of t parts of the segments, 1 <= n <= t; the rest is checked as by "quick".
        on_finding: called with each finding as soon as it is made.
        recompute: encode this many entries again, in this process, and compare them with the stored ones, up to rounding. They are
            chosen evenly from data sets, encoders and segments.
        seed: the seed of that choice.
        source: the new path of the source, as for `repair`.
        model: the new path of the model; it must have the fingerprint of the data set.
        vae: the new path of the VAE.
        text_encoder: the new path of the text encoder.
        name: read the bytes of this data set's values alone, and encode only these again; the rest is checked as by "quick".

    Raises:
        StoreNotFound: there is no store at this path.
        FormatError: the store was written by a newer version.
        BadInput: there is no such part or data set; the model cannot be found (pass its new path); or no entry can be encoded again.
        RecipeMismatch: the model is not the one of the data set; nothing was read or encoded.
    """
    as_word("level", level, get_args(Level))
    _check_subset(subset)
    if on_finding is not None:
        check_function("on_finding", on_finding)
    recompute, seed = as_whole("recompute", recompute, least=0), as_whole("seed", seed, least=0)
    moved = {"source": source, "model": model, "vae": vae, "text_encoder": text_encoder}
    if recompute == 0 and (unused := next((argument for argument, new_path in moved.items() if new_path is not None), "")):
        needs = f"{option(unused)} needs {option('recompute', 'N')}"
        raise BadInput(f"{needs}, which encodes N entries again and compares them", option=unused)
    started = time.monotonic()
    layout = open_layout(Layout.at(as_path("path", path)))
    check_there(layout, name)
    checks: list[Check] = [*CHECKS]
    again = None
    if recompute:
        from cachestore.care.moved import new_paths  # only these load what encodes
        from cachestore.care.recompute import Recomputation

        again = Recomputation(layout, name, new_paths(source, model=model, vae=vae, text_encoder=text_encoder), recompute, seed)
        checks.append(again.check)
    # Catalogs are published after the segments that they need, so they are read before the segments are listed.
    needed = Needed.of(layout)
    with closing(load_snapshot(layout)) as snapshot:
        whole = _segments_to_read(snapshot, level, subset, name)
        store = StoreToCheck(layout, needed, snapshot, read_segments(layout, sorted(snapshot.listed), whole))
        for check in checks:
            for finding in check(store):
                store.findings.append(finding)
                if on_finding:
                    on_finding(finding)
        remarks = (*slow_lines(layout), *ownerless(store))
        if snapshot.listed and not list_indexes(layout):  # a damaged index would be a finding; segments can be read without one
            remark = f"there is no index, so opening the store reads the headers of its {plural(len(snapshot.listed), 'segment')}."
            remark += f" A pass, or a program that saves much, writes one. {layout.command('repair')} does so too, and does no harm"
            remarks = (remark, *remarks)
    check_for_reading(layout)  # a folder that is gone lists as empty, and nothing seems wrong
    return VerifyReport(
        ok=all(finding.kind in HARMLESS for finding in store.findings),
        entries=sum(segment.entries for segment in store.segments),
        segments=len(store.segments),
        bytes=sum(segment.size_bytes for segment in store.segments),
        seconds=round(time.monotonic() - started, 3),
        findings=tuple(store.findings),
        level=(level if subset is None else f"{subset[0]}/{subset[1]}") + ("" if name is None else f", of the data set {name!r}"),
        recomputed=None if again is None else again.counts,
        remarks=remarks,
    )


def _check_subset(subset: object) -> None:
    if subset is None:
        return
    if not isinstance(subset, tuple | list) or len(cast("Sequence[Any]", subset)) != 2:
        refuse("subset", "(n, t): the n-th of t parts", cast("object", subset))
    part, parts = (as_whole(f"subset[{index}]", number) for index, number in enumerate(cast("Sequence[Any]", subset)))
    if not 1 <= part <= parts:
        raise BadInput(f"there is no part {part} of {parts}: parts are counted from 1", option="subset")


def _segments_to_read(snapshot: Snapshot, level: Level, subset: tuple[int, int] | None, name: str | None) -> frozenset[str]:
    """Return the segments of which every byte is read."""
    if level == "quick":
        return frozenset()
    digests = sorted(snapshot.listed)
    chosen = frozenset(digests if subset is None else digests[subset[0] - 1 :: subset[1]])
    if name is None:
        return chosen
    catalog = newest_catalog(snapshot.layout, name)
    keys = [key for key, _sample in needed_by(catalog)] if catalog is not None else []
    return chosen & {location.segment.digest for locations in snapshot.find(keys) for location in locations}
