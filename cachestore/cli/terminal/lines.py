"""The lines of Python that `precompute` prints at its end, to train from a store. Tests run them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachestore.core.batch_shapes import FPS, NUM_FRAMES, SIZES, Shape, batch_shape, text_shapes
from cachestore.core.captions import CaptionPolicy
from cachestore.core.dtypes import DTYPES
from cachestore.core.errors import FormatError
from cachestore.core.inputs import is_trained_on
from cachestore.core.read_block import LatentsBlock, TextBlock, parse_latents, parse_text, stored_parts
from cachestore.core.samples import IMAGE, MASK, VIDEO, Source
from cachestore.jobs.start.forecast import TRAINING_BATCH
from cachestore.store.format.catalog import Catalog, KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from cachestore.train.facts import count_buckets

if TYPE_CHECKING:
    from cachestore.jobs.share.report import Report

_MAX_ROWS: Final = 4096
_LEFT_OUT: Final = 4
"""One of so many samples may be left out with the batch size that is proposed."""
_VALIDATION: Final = (
    "for prompt, negative in data.prompts:",
    "    embeds, negative_embeds = data.prompt(prompt), data.prompt(negative)  # batches of one, for validation",
)


def training_lines(
    report: "Report", batch_size: int = TRAINING_BATCH, *, captions: CaptionPolicy | None = None, sources: Sequence[Source] = ()
) -> list[str]:
    """Return Python code that reads one epoch, with the names, dtypes and shapes of a batch; ? is a size that varies.

    The batch size is reduced until an epoch leaves out a quarter of the samples at most, and has at least one batch.
    `captions` and `sources` are those of the job: the code gets the same policy, and samples come as often as their source says.
    """
    least = min((source.share for source in sources if source.share), default=1)
    with Reader(report.store) as reader:
        catalog = newest_catalog(reader.layout, report.name)
        columns = () if catalog is None else catalog.columns
        buckets = [0]
        if catalog is not None:  # as its first rows say; a batch as large as the fullest bucket can be filled
            rows = [row for row in range(min(len(catalog), _MAX_ROWS)) if catalog.is_complete(row)]
            buckets = [count for one in count_buckets(catalog, rows) for count in one.samples.values()] or [len(rows)]
        batch_size = _fitting(buckets, max(1, min(batch_size, int(max(buckets) * min(1, least)))))
        is_one_size = len(buckets) == 1 and report.samples <= _MAX_ROWS
        tensors = {} if catalog is None else _tensors(reader, catalog, batch_size, is_one_size=is_one_size)
    trained = (column.options for column in columns if is_trained_on(column.role, column.options))
    sizes = list(dict.fromkeys(int(options["resolution"]) for options in trained if "resolution" in options))
    policy = "" if captions is None else ", ".join(f"{name}={value!r}" for name, value in captions.as_json().items())
    opened = _opened(report, sizes, has_policy=bool(policy), has_weights=any(source.share != 1 for source in sources))
    return [
        "import cachestore as cs",
        "",
        *([f"captions = cs.CaptionPolicy({policy})"] if policy else []),
        "# generation: this version of the data set, on every rank",
        f"data = {opened}",
        f"loader = cs.make_loader(data, batch_size={batch_size})",
        "for batch in loader:",
        f"    ...  # batch is a dict{'. Its tensors (? varies):' if tensors else ''}".rstrip(),
        *(f"    # {name}: {dtype} [{_axes(shape)}]" for name, (dtype, shape) in tensors.items()),
        *(_VALIDATION if catalog is not None and catalog.prompts and opened.startswith("cs.CachedDataset") else ()),
    ]


def _fitting(buckets: Sequence[int], most: int) -> int:
    """Return the largest batch size up to `most` with which an epoch leaves out a quarter of the samples at most.

    Halves are tried, as a larger learning rate is often chosen for a power of two; the fullest bucket alone may also be one batch.
    """
    halves = [most >> shift for shift in range(most.bit_length())]
    return next(size for size in halves if sum(count % size for count in buckets) * _LEFT_OUT <= sum(buckets))


def _opened(report: "Report", sizes: Sequence[int], *, has_policy: bool, has_weights: bool) -> str:
    one = f"cs.CachedDataset({str(Path(report.store))!r}, name={report.name!r}, generation={report.generation}"
    one += ", captions=captions" if has_policy else ""
    several = len(sizes) > 1
    opened = f"[{one}, resolution=size) for size in ({', '.join(map(str, sizes))})]" if several else f"{one})"
    if has_weights:
        return f"cs.MixedDataset.of_sources({opened})"
    return f"cs.MixedDataset({opened})" if several else opened


def _tensors(reader: Reader, catalog: Catalog, size: int, *, is_one_size: bool) -> dict[str, tuple[str, Shape | None]]:
    """Return dtype and shape of each tensor in a batch of this size, by name; `is_one_size` says that all pictures have one bucket.

    They follow from the recipe and the first entry of each column. None instead of a shape if that depends on the samples.
    """
    found: dict[str, tuple[str, Shape | None]] = {}
    for column in catalog.columns:
        keys = (key for row in range(len(column.at) - 1) for key in column.row_keys(row))
        if (key := next((key for key in keys if key is not None and key in reader), None)) is None:
            continue
        recipe, stored = catalog.recipes[column.fingerprint], reader.describe(key).tensors
        with suppress(FormatError):  # opening the data set says why its recipe cannot be read
            if "outputs" in recipe.read:
                found |= _texts(parse_text(recipe), stored, size)
            elif column.encoder == MASK:
                latents = found.get("latents", ("", None))[1]
                found[MASK] = ("float32", (size, 1, *((None, None) if latents is None else latents[2:])))
            else:
                found |= _latents(parse_latents(recipe), stored, column, size, is_one_size=is_one_size)
    return found


def _latents(
    block: LatentsBlock, stored: Mapping[str, tuple[str, Sequence[int]]], column: KeyColumn, size: int, *, is_one_size: bool
) -> dict[str, tuple[str, Shape | None]]:
    dtype, shape = stored[block.stored]
    if block.name is None and column.role not in (IMAGE, VIDEO):
        return {f"{column.role}_latents": (DTYPES[dtype].torch, None)}
    made: Shape = batch_shape(block, "sample", (size, *shape))
    shown = made if is_one_size else (*made[:2], *[None] * (len(made) - 2))
    found: dict[str, tuple[str, Shape | None]] = {block.name or "latents": (DTYPES[dtype].torch, shown)}
    if block.name is not None:
        return found
    found |= {name: ("int64", (size, 2)) for name, fact in SIZES.items() if fact in column.facts}
    return found | ({NUM_FRAMES: ("int64", (size,)), FPS: ("float32", (size,))} if "fps" in column.facts else {})


def _texts(block: TextBlock, stored: Mapping[str, tuple[str, Sequence[int]]], size: int) -> dict[str, tuple[str, Shape | None]]:
    dtypes = {name: DTYPES[stored[next(stored_parts(form))][0]].torch for name, form in block.outputs.items()}
    dtypes |= {name: dtypes[constant.like] for name, constant in block.constants.items() if constant.kind == "zeros"}
    shapes = text_shapes(block, {name: shape for name, (_dtype, shape) in stored.items()}, size)
    return {name: (dtypes.get(name, "int64"), shape) for name, shape in shapes.items()}


def _axes(shape: Shape | None) -> str:
    return "..." if shape is None else ", ".join("?" if axis is None else str(axis) for axis in shape)
