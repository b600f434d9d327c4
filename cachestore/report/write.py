"""`report`: writes what is in a store and in one of its data sets as one page. Collects numbers and pictures; `document` makes the HTML.

It changes nothing in the store. It needs neither torch nor the models; Pillow only for originals and the colours fitted to them.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from cachestore import __version__
from cachestore.care.verify import VerifyReport, verify
from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json
from cachestore.files.marker import check_for_reading
from cachestore.files.publish import write_outside
from cachestore.jobs.share.history import passes_of
from cachestore.jobs.start.forecast import TRAINING_BATCH
from cachestore.report.counting import kind_of, measure_buckets, measure_captions, sizes_of
from cachestore.report.document import make_page
from cachestore.report.gallery import make_gallery
from cachestore.report.numbers import Damage, FindingNumbers, Gallery, ReportNumbers, Segment, State, UnfinishedNumbers
from cachestore.sources.combined import Moved
from cachestore.store.format.catalog import Catalog
from cachestore.store.read.opener import is_address, open_whole
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.unfinished import list_unfinished, not_there, several_there


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
        names = reader.names()
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
    sizes, segments = sizes_of(reader), reader.snapshot.segments()
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
        damage=_map_damage(reader, found) if found is not None else None,
        unfinished=tuple(UnfinishedNumbers(**one.as_json(), words=one.in_words(reader.layout)) for one in list_unfinished(reader.layout)),
        **known,
    )
    if catalog is None:
        return numbers
    rows = [row for row in range(len(catalog)) if catalog.is_complete(row)]
    passes, failures, unused = passes_of(reader.layout, catalog.name)
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


def _map_damage(reader: Reader, found: VerifyReport) -> Damage:
    snapshot, states = reader.snapshot, dict[str, State]()
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
