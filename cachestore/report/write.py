"""`report`: writes what is in a store and in one of its data sets as one page. Collects numbers and pictures; `document` makes the HTML.

It changes nothing in the store. It needs neither torch nor the models; Pillow only for originals and the colours fitted to them.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Literal

from cachestore import __version__
from cachestore.care.verify import VerifyReport, verify
from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.keys import Json
from cachestore.files.marker import check_for_reading
from cachestore.files.paths import Layout
from cachestore.files.publish import write_outside
from cachestore.files.records import read_record
from cachestore.jobs.share.passes import ROUND_FORMAT, VERSION, PassRef, list_passes, read_done
from cachestore.jobs.share.plan import read_outline
from cachestore.jobs.share.retention import list_plans
from cachestore.jobs.share.stages import STAGES, stage_fractions, sum_stages
from cachestore.jobs.share.workers import Beat, read_heartbeats
from cachestore.jobs.start.forecast import TRAINING_BATCH
from cachestore.report.counting import kind_of, measure_buckets, measure_captions, sizes_of
from cachestore.report.document import make_page
from cachestore.report.gallery import make_gallery
from cachestore.report.numbers import (
    Damage,
    Failure,
    FindingNumbers,
    Gallery,
    Pass,
    RankNumbers,
    ReportNumbers,
    Segment,
    Stage,
    State,
    UnfinishedNumbers,
    UnusedFiles,
)
from cachestore.sources.combined import Moved
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.opener import is_address, open_whole
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import Snapshot
from cachestore.store.read.unfinished import list_data_sets, list_unfinished, not_there, several_there

_COUNTS: Final = ("reused", "encoded", "failed")


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
        path: the store, or its address, where nothing is checked for damage.
        output: the file, inside or outside of the store; its folder is made.
        name: the data set; by default the only one. A store without data sets has a report too.
        level: as for `verify`: "full" reads every byte.
        batch_size: a batch size for which the page says how many samples cachestore's loader leaves out.
        source: the new path of the data set's pictures if they moved, or paths by source name.

    Raises:
        StoreNotFound: there is no store there.
        FormatError: the store was written by a newer version.
        BadInput: there is no such data set, there are several and no name is given, the batch size is below 1, or an address is to be
            read in full.
        WriteFailed: the file cannot be written.
        RemoteFailed: the address cannot be read.
    """
    if batch_size < 1:
        raise BadInput(f"a batch must have at least one sample, not {batch_size}", option="batch_size")
    target, is_here = as_path("output", output).absolute(), not is_address(path)
    if level == "full" and not is_here:
        help_text = f"leave --full out, or run `cachestore pull {path} FOLDER` first"
        raise BadInput(f"what lies at {path} is not checked: {help_text}", option="full")
    with open_whole(path, name) as reader:
        names = list_data_sets(reader.layout)
        if name is None and len(names) > 1:
            raise several_there(reader.layout, names)
        if name is not None and name not in names:
            raise not_there(reader.layout, name, names)
        chosen = next(iter(names), None) if name is None else name
        found = verify(path, level) if is_here else None
        catalog = newest_catalog(reader.layout, chosen) if chosen is not None else None
        others = tuple(one for one in names if one != chosen)
        numbers = _count_all(reader, catalog, found, batch_size=batch_size, store=str(path), other_names=others)
        gallery = make_gallery(reader, catalog, source) if catalog is not None else Gallery()
        if is_here:
            check_for_reading(reader.layout)
    page = make_page(numbers, gallery)
    write_outside(target, page)
    return asdict(numbers) | {"output": str(output), "page_bytes": len(page), "thumbnails": dict(gallery.about)}


def _count_all(reader: Reader, catalog: Catalog | None, found: VerifyReport | None, *, batch_size: int, **known: Any) -> ReportNumbers:
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
        damage=_map_damage(snapshot, found) if found is not None else None,
        unfinished=tuple(UnfinishedNumbers(**one.as_json(), words=one.in_words(reader.layout)) for one in list_unfinished(reader.layout)),
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
        made=catalog.made,
        samples=len(catalog),
        complete=len(rows),
        buckets=measure_buckets(catalog, rows, batch_size),
        captions=measure_captions(catalog),
        kinds=tuple(kind_of(catalog, column, sizes) for column in catalog.columns),
        passes=passes,
        failures=failures,
        unused=unused,
    )


_Lists = tuple[tuple[Failure, ...], tuple[UnusedFiles, ...]]
"""What the report of a pass lists."""


def _passes_of(layout: Layout, name: str) -> tuple[tuple[Pass, ...], tuple[Failure, ...], tuple[UnusedFiles, ...]]:
    heartbeats = read_heartbeats(layout)
    found: list[tuple[Pass, _Lists]] = []
    for plan in list_plans(layout):
        with suppress(FormatError, OSError, KeyError, TypeError, ValueError):
            if read_outline(layout, plan).catalog == name:
                found += [_read_pass(layout, PassRef(plan, number), heartbeats) for number in list_passes(layout, plan)]
    found.sort(key=lambda item: (item[0].started, item[0].number), reverse=True)
    failures, unused = next((lists for one, lists in found if one.complete), ((), ()))
    return tuple(one for one, _lists in found), failures, unused


def _read_pass(layout: Layout, ref: PassRef, heartbeats: Sequence[Beat]) -> tuple[Pass, _Lists]:
    done = read_done(layout, ref)
    own = [shown for shown in heartbeats if (shown.plan, shown.pass_number) == (ref.plan, ref.number)]
    report: Mapping[str, Any] = done.report if done is not None else {}
    reused, encoded, failed = (int(report[name] if done else sum(getattr(shown, name) for shown in own)) for name in _COUNTS)
    stages: Mapping[str, Any] = report.get("stages") or sum_stages(shown.stages for shown in own)
    fractions = stage_fractions(stages) if stages else {}
    in_order = sorted(own, key=lambda shown: (shown.rank is None, shown.rank, shown.started))
    started = min((shown.started for shown in own), default=0.0)
    with suppress(FormatError, OSError, KeyError):
        started = float(read_record(ref.folder(layout).round(0), ROUND_FORMAT, VERSION)["started"])
    one = Pass(
        started=started,
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
            RankNumbers(shown.rank, shown.host, shown.pid, shown.encoded, shown.reused, shown.failed, round(shown.lived, 3), shown.phase)
            for shown in in_order
        ),
    )
    failures = (Failure(str(each["sample"]), str(each["encoder"]), str(each["reason"])) for each in report.get("failures", ()))
    unused = (UnusedFiles(str(row["reason"]), int(row["count"]), (*map(str, row["examples"]),)) for row in report.get("unused", ()))
    return one, (tuple(failures), tuple(unused))


def _map_damage(snapshot: Snapshot, found: VerifyReport) -> Damage:
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
