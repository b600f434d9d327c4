"""`report`: writes what is in a store and in one of its data sets as one page. Collects numbers and pictures; `document` makes the HTML.

It changes nothing in the store. It needs neither torch nor the models; Pillow only for originals and the colours fitted to them.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Literal

from cachestore import __version__
from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.inputs import WITHIN, framing_of
from cachestore.core.keys import Json
from cachestore.core.words import plural
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import Layout
from cachestore.files.publish import write_outside
from cachestore.files.records import read_record
from cachestore.jobs.forecast import TRAINING_BATCH
from cachestore.maintain.collect import verify
from cachestore.report.counting import count_buckets, kind_of, measure_captions, sizes_of
from cachestore.report.document import make_page
from cachestore.report.numbers import (
    Damage,
    Failure,
    FindingNumbers,
    Gallery,
    Pass,
    Picture,
    RankNumbers,
    ReportNumbers,
    Segment,
    Stage,
    State,
    Thumbnail,
    UnusedFiles,
)
from cachestore.report.originals import Original, SampleLatents, find_originals, references_of
from cachestore.report.png import encode_png
from cachestore.report.previews import Pixels, choose_rows, find_colours, picture_column, read_samples, reduce
from cachestore.source.combined import Moved
from cachestore.storage.catalog import Catalog, KeyColumn, list_names, newest_catalog
from cachestore.storage.snapshot import Snapshot
from cachestore.storage.verify import VerifyReport
from cachestore.store.reader import Reader
from cachestore.store.unfinished import not_there
from cachestore.work.passes import ROUND_FORMAT, VERSION, PassRef, list_passes, read_done
from cachestore.work.plan import read_outline
from cachestore.work.retention import list_plans
from cachestore.work.stages import STAGES, stage_fractions, sum_stages
from cachestore.work.workers import lived, read_heartbeats

DEFAULT_NAME: Final = "train"
_COUNTS: Final = ("reused", "encoded", "failed")
_RANK_FIELDS: Final = ("rank", "host", "pid", "encoded", "reused", "failed", "phase")
LONGEST_SIDE: Final = 128
"""Of a picture from latents, in pixels: 20 of them take at most 1.4 MB of the page."""
_BESIDE: Final = "The left picture is the part of the original that was encoded; the right one is made from its latents."
_WHY_NONE: Final = {
    "missing": "The original was not found.",
    "changed": "The original has changed since it was encoded.",
    "unreadable": "The original cannot be read: ",
}


def write_report(
    path: str | Path,
    output: str | Path,
    name: str | None = None,
    *,
    level: Literal["full", "quick"] = "quick",
    batch_size: int = TRAINING_BATCH,
    source: Moved | None = None,
) -> dict[str, Json]:
    """Write a report of a store and one of its data sets to a file, and return what it says as JSON. An existing file is replaced.

    Args:
        path: the store.
        output: the file, inside or outside of the store; its folder is made.
        name: the data set; by default `train`, else the first one. A store without data sets has a report too.
        level: as for `verify`: "full" reads every byte.
        batch_size: the batch size for counting the samples that buckets leave out.
        source: the new path of the data set's pictures if they moved, or paths by source name.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version.
        BadInput: there is no such data set, or the batch size is below 1.
        WriteFailed: the file cannot be written.
    """
    if batch_size < 1:
        raise BadInput(f"a batch must have at least one sample, not {batch_size}")
    target = as_path("output", output).absolute()
    with Reader(path) as reader:
        names = sorted(list_names(reader.layout))
        chosen = _choose_name(reader.layout, names, name)
        found = verify(path, level)
        catalog = newest_catalog(reader.layout, chosen) if chosen is not None else None
        others = tuple(one for one in names if one != chosen)
        numbers = _count_all(reader, catalog, found, batch_size=batch_size, store=str(path), other_names=others)
        gallery = _make_gallery(reader, catalog, source) if catalog is not None else Gallery()
        check_for_reading(reader.layout)
    page = make_page(numbers, gallery)
    write_outside(target, page)
    return asdict(numbers) | {"output": str(output), "page_bytes": len(page), "thumbnails": dict(gallery.about)}


def _choose_name(layout: Layout, names: Sequence[str], name: str | None) -> str | None:
    if name is None:
        return DEFAULT_NAME if DEFAULT_NAME in names else next(iter(names), None)
    if name not in names:
        raise not_there(layout, name, names)
    return name


def _count_all(reader: Reader, catalog: Catalog | None, found: VerifyReport, *, batch_size: int, **known: Any) -> ReportNumbers:
    """Collect the numbers of a report; `known` are the fields that the caller knows."""
    snapshot = reader.snapshot
    sizes, segments = sizes_of(snapshot), snapshot.segments()
    named = {raw for column in catalog.columns for raw in column.keys} if catalog is not None else set[bytes]()
    others = [size for key, size in sizes.items() if key not in named]
    numbers = ReportNumbers(
        written=time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()),
        version=__version__,
        entries=len(sizes),
        segments=len(segments),
        bytes=sum(ref.size_bytes for ref in segments),
        tensor_bytes=sum(sizes.values()),
        others=len(others),
        others_bytes=sum(others),
        batch_size=batch_size,
        damage=_map_damage(snapshot, found),
        **known,
    )
    if catalog is None:
        return numbers
    rows = [row for row in range(len(catalog)) if catalog.is_complete(row)]
    passes, failures, unused = _passes_of(reader.layout, catalog.name)
    return replace(
        numbers,
        name=catalog.name,
        generation=catalog.generation,
        samples=len(catalog),
        complete=len(rows),
        buckets=count_buckets(catalog, rows, batch_size),
        captions=measure_captions(catalog),
        kinds=tuple(kind_of(catalog, column, sizes) for column in catalog.columns),
        passes=passes,
        failures=failures,
        unused=unused,
    )


_Lists = tuple[tuple[Failure, ...], tuple[UnusedFiles, ...]]
"""What the report of a pass lists."""


def _passes_of(layout: Layout, name: str) -> tuple[tuple[Pass, ...], tuple[Failure, ...], tuple[UnusedFiles, ...]]:
    """Return the passes of a data set, newest first, and what the newest that ended lists. Unreadable passes are left out."""
    heartbeats = read_heartbeats(layout)
    found: list[tuple[Pass, _Lists]] = []
    for plan in list_plans(layout):
        with suppress(FormatError, OSError, KeyError, TypeError, ValueError):
            if read_outline(layout, plan).catalog == name:
                found += [_read_pass(layout, PassRef(plan, number), heartbeats) for number in list_passes(layout, plan)]
    found.sort(key=lambda item: (item[0].started, item[0].number), reverse=True)
    failures, unused = next((lists for one, lists in found if one.complete), ((), ()))
    return tuple(one for one, _lists in found), failures, unused


def _read_pass(layout: Layout, ref: PassRef, heartbeats: Sequence[Mapping[str, Any]]) -> tuple[Pass, _Lists]:
    done = read_done(layout, ref)
    own = [heartbeat for heartbeat in heartbeats if (heartbeat["plan"], heartbeat["pass"]) == (ref.plan, ref.number)]
    report: Mapping[str, Any] = done.report if done is not None else {}
    reused, encoded, failed = (int(report[name] if done else sum(heartbeat[name] for heartbeat in own)) for name in _COUNTS)
    stages: Mapping[str, Any] = report.get("stages") or sum_stages(own)
    fractions = stage_fractions(stages) if stages else {}
    in_order = sorted(own, key=lambda heartbeat: (heartbeat["rank"] is None, heartbeat["rank"], heartbeat["started"]))
    one = Pass(
        started=_started(layout, ref, own),
        plan=ref.plan,
        number=ref.number,
        complete=done is not None,
        seconds=float(report.get("seconds", 0.0)),
        wanted=int(report.get("wanted", 0)),
        reused=reused,
        encoded=encoded,
        failed=failed,
        bytes=int(report.get("bytes", 0)),
        stages=tuple(
            Stage(name, float(stages[name]["busy_seconds"]), float(stages[name]["wait_seconds"]), fractions[name])
            for name in STAGES
            if name in fractions
        ),
        limiting=str(stages.get("limiting", "")),
        ranks=tuple(
            RankNumbers(**{name: heartbeat[name] for name in _RANK_FIELDS}, seconds=round(lived(heartbeat), 3)) for heartbeat in in_order
        ),
    )
    failures = (Failure(str(each["sample"]), str(each["encoder"]), str(each["reason"])) for each in report.get("failures", ()))
    unused = (UnusedFiles(str(row["reason"]), int(row["count"]), (*map(str, row["examples"]),)) for row in report.get("unused", ()))
    return one, (tuple(failures), tuple(unused))


def _started(layout: Layout, ref: PassRef, heartbeats: Sequence[Mapping[str, Any]]) -> float:
    """Return when a pass began, by the clock of the process that began it."""
    with suppress(FormatError, OSError, KeyError):
        return float(read_record(ref.folder(layout).round(0), ROUND_FORMAT, VERSION)["started"])
    return min((float(heartbeat["started"]) for heartbeat in heartbeats), default=0.0)


def _map_damage(snapshot: Snapshot, found: VerifyReport) -> Damage:
    """Return each segment that is there, or was when the index was made, with what verify found in it."""
    states: dict[str, State] = {}
    for finding in found.findings:
        if finding.kind in {"corrupt-segment", "corrupt-entry"}:
            states[Path(finding.path).stem] = "damaged"
        elif finding.kind == "unreadable":
            states.setdefault(Path(finding.path).stem, "unreadable")
    known = {ref.digest: ref for ref in snapshot.segments()}
    gone = {ref.digest: ref for ref in snapshot.index.segments.values()} if snapshot.index is not None and not found.ok else {}
    segments: list[Segment] = []
    for digest in sorted({*snapshot.listed, *gone}):
        ref = known.get(digest) or gone.get(digest)
        state = states.get(digest, "sound" if digest in snapshot.listed else "gone")
        segments.append(Segment(digest, ref.size_bytes if ref else 0, ref.entries if ref else 0, state))
    findings = tuple(FindingNumbers(one.kind, one.path, one.message, one.sample) for one in found.findings)
    return Damage(found.level, found.ok, found.seconds, found.entries, found.bytes, tuple(segments), findings)


def _make_gallery(reader: Reader, catalog: Catalog, source: Moved | None) -> Gallery:
    column = picture_column(catalog)
    shown = read_samples(reader, catalog, column, choose_rows(catalog, column)) if column is not None else []
    if column is None or not shown:
        return Gallery()
    originals = find_originals(catalog, column, shown, source)
    colours = find_colours(shown, originals)
    states = Counter(one.state for one in originals)
    return Gallery(
        chosen=f"{len(shown)} of {plural(len(catalog), 'sample', form=',')}: those whose ids have the smallest digests.",
        beside=_BESIDE if states["missing"] < len(shown) else "",
        colours=colours.in_words(),
        thumbnails=tuple(
            _thumbnail(catalog, column, one, original, reduce(colours.paint(one.latents), LONGEST_SIDE))
            for one, original in zip(shown, originals, strict=True)
        ),
        about={
            "shown": len(shown),
            "originals": states["found"],
            "changed": [one.sample for one, original in zip(shown, originals, strict=True) if original.state == "changed"],
            "fitted_to": colours.fitted_to,
            "explained": round(colours.explained, 4),
        },
    )


def _thumbnail(catalog: Catalog, column: KeyColumn, one: SampleLatents, original: Original, painted: Pixels) -> Thumbnail:
    source = next(iter(references_of(catalog, column, one.row)), "")
    caption = next(iter(catalog.row_captions(one.row)), "")
    _channels, height, width = one.latents.shape
    size = "x".join(map(str, one.cell.facts.get("bucket", ()))) or f"{width}x{height} latents"
    within = framing_of(json.loads(catalog.extras[one.row])).get(WITHIN)
    size += f" of {within}" if within else ""
    return Thumbnail(
        sample=one.sample,
        source=source,
        caption=caption,
        size=size,
        latents=Picture("png", encode_png(painted), width, height),
        original=Picture("jpeg", original.jpeg, *original.size) if original.state == "found" else None,
        why_none=_WHY_NONE.get(original.state, "") + original.reason,
    )
