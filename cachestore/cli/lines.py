"""The lines of Python that `precompute` prints at its end, to train from a store. Tests run them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachestore.core.captions import CaptionPolicy
from cachestore.core.samples import CONTROL, IMAGE, Source
from cachestore.jobs.forecast import TRAINING_BATCH
from cachestore.report.counting import count_buckets
from cachestore.storage.catalog import Catalog, KeyColumn, newest_catalog
from cachestore.store.reader import Reader

if TYPE_CHECKING:
    from cachestore.jobs.pass_loop import Report

_MAX_ROWS: Final = 4096


def training_lines(
    report: "Report", batch_size: int = TRAINING_BATCH, *, captions: CaptionPolicy | None = None, sources: Sequence[Source] = ()
) -> list[str]:
    """Return Python code that reads one epoch, with the names and shapes that are stored.

    With few samples the batch size is reduced, so that there is at least one batch. `captions` and `sources` are those of the job: the code
    gets the same policy, and samples come as often as their source says.
    """
    least = min((source.share for source in sources if source.share), default=1)
    with Reader(report.store) as reader:
        catalog = newest_catalog(reader.layout, report.name)
        fullest = 0 if catalog is None else _fullest_bucket(catalog)
        columns = () if catalog is None else catalog.columns
        stored = list(filter(None, (_stored(reader, column) for column in columns))) or ["nothing has been encoded yet"]
    sizes = [int(column.options["resolution"]) for column in columns if column.role == IMAGE and "resolution" in column.options]
    batch_size = max(1, min(batch_size, int(fullest * min(1, least))))
    policy = "" if captions is None else ", ".join(f"{name}={value!r}" for name, value in captions.as_json().items())
    return [
        "import cachestore as cs",
        "",
        *([f"captions = cs.CaptionPolicy({policy})"] if policy else []),
        "# generation: this version of the data set, on every rank",
        f"data = {_opened(report, sizes, has_policy=bool(policy), has_weights=any(source.share != 1 for source in sources))}",
        f"loader = cs.make_loader(data, batch_size={batch_size})",
        "for batch in loader:",
        "    ...  # a dict; " + "; ".join(stored),
    ]


def _opened(report: "Report", sizes: Sequence[int], *, has_policy: bool, has_weights: bool) -> str:
    """Return the expression that opens the data set, at every resolution and with the weights of its sources."""
    one = f"cs.CachedDataset({str(Path(report.store))!r}, name={report.name!r}, generation={report.generation}"
    one += ", captions=captions" if has_policy else ""
    several = len(sizes) > 1
    opened = f"[{one}, resolution=size) for size in ({', '.join(map(str, sizes))})]" if several else f"{one})"
    if has_weights:
        return f"cs.MixedDataset.of_sources({opened})"
    return f"cs.MixedDataset({opened})" if several else opened


def _fullest_bucket(catalog: Catalog) -> int:
    """Return the size of the fullest bucket, by a data set's first 4,096 rows. Batches of that size give at least one batch."""
    rows = [row for row in range(min(len(catalog), _MAX_ROWS)) if catalog.is_complete(row)]
    return max((bucket.samples for one in count_buckets(catalog, rows, 1) for bucket in one.buckets), default=len(rows))


def _stored(reader: Reader, column: KeyColumn) -> str:
    """Return what a column's first entry holds; empty if it has none."""
    keys = (key for row in range(len(column.at) - 1) for key in column.row_keys(row))
    key = next((key for key in keys if key is not None and key in reader), None)
    if key is None:
        return ""
    tensors = (f"{tensor} {dtype} {list(shape)}" for tensor, (dtype, shape) in reader.describe(key).tensors.items())
    return f"{f'control_{column.encoder}' if column.role == CONTROL else column.encoder} from {', '.join(tensors)}"
