"""Counts the buckets, captions and entries of a data set, from its catalog and the sizes of a store's entries."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final, cast

from cachestore.core.inputs import BUCKETS, OWN, READ_HERE
from cachestore.core.keys import Json, Key, Recipe
from cachestore.core.samples import CAPTION
from cachestore.core.words import first_of
from cachestore.report.numbers import Bin, Bucket, Buckets, Captions, ColumnNumbers, Long, Loss, Repeat
from cachestore.store.format.catalog import NO_KEY, Catalog, KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.train.facts import count_buckets

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_AT_ONCE: Final = 4096
_MOST_BINS: Final = 40
_REPEATS: Final = 3
_LONGEST: Final = 5


def sizes_of(reader: Reader) -> dict[Key, int]:
    """Return the bytes of each entry's tensors, of the copy that is read."""
    sizes: dict[Key, int] = {}
    every = reader.keys()
    while keys := list(islice(every, _AT_ONCE)):
        sizes.update(zip(keys, (specs.size_bytes for specs in reader.locate(keys).specs), strict=True))
    return sizes


def measure_buckets(catalog: Catalog, rows: Sequence[int], batch_size: int) -> tuple[Buckets, ...]:
    """Count the buckets of these rows for each resolution, and what full batches, each of one bucket, leave out."""
    measured: list[Buckets] = []
    for resolution, column, samples in count_buckets(catalog, rows):
        fullest = sorted(samples.items(), key=lambda item: (-item[1], item[0]))
        losses = {
            size: Loss(size, sum(count // size for count in samples.values()), sum(count % size for count in samples.values()))
            for size in sorted({*BATCH_SIZES, batch_size})
        }
        measured.append(
            Buckets(
                resolution=resolution if isinstance(resolution, int) else None,
                samples=samples.total(),
                left_over=losses[batch_size].left_over,
                buckets=tuple(Bucket(name, count, count // batch_size, count % batch_size) for name, count in fullest),
                losses=tuple(losses.values()),
                read_here=column.options.get(BUCKETS, OWN) in READ_HERE,
            )
        )
    return tuple(measured)


def measure_captions(catalog: Catalog) -> Captions:
    """Measure the distinct captions: in tokens if a column of text has them, else in characters."""
    different = Counter(catalog.captions)
    column = next((one for one in catalog.columns if one.role == CAPTION and "tokens" in one.facts), None)
    tokens = _tokens_of(catalog, column) if column is not None else {}
    lengths = tokens or {caption: len(caption) for caption in different}
    recipe = catalog.recipes.get(column.fingerprint) if column is not None and tokens else None
    known: Json = recipe.make.get("max_tokens") if recipe is not None else None
    limit = known if type(known) is int and known >= 0 else None
    ordered = sorted(lengths.values())
    cut = [caption for caption, length in lengths.items() if limit is not None and length > limit]
    return Captions(
        samples=sum(1 for row in range(len(catalog)) if catalog.captions_at[row + 1] > catalog.captions_at[row]),
        captions=len(catalog.captions),
        distinct=len(different),
        empty=different[""],
        unit="tokens" if tokens else "characters",
        limit=limit,
        truncated=len(cut),
        median=ordered[len(ordered) // 2] if ordered else 0,
        most=ordered[-1] if ordered else 0,
        bins=_bins_of(ordered, limit),
        longest=_longest_of(catalog, {caption: lengths[caption] for caption in cut}),
    )


def _tokens_of(catalog: Catalog, column: KeyColumn) -> dict[str, int]:
    known, found = column.facts["tokens"], dict[str, int]()
    for row in range(len(catalog)):
        captions = range(catalog.captions_at[row], catalog.captions_at[row + 1])
        for caption, cell in zip(captions, range(column.at[row], column.at[row + 1]), strict=False):
            if known[cell] >= 0:
                found[catalog.captions[caption]] = known[cell]
    return found


def _bins_of(ordered: Sequence[int], limit: int | None) -> tuple[Bin, ...]:
    if not ordered:
        return ()
    least, most = ordered[0], ordered[-1]
    width = -(-(most - least + 1) // _MOST_BINS)
    start = least - (least - (limit + 1 if limit is not None else least)) % width
    counted = Counter((length - start) // width for length in ordered)
    lows = range(start, most + 1, width)
    return tuple(Bin(max(0, low), low + width - 1, counted[number]) for number, low in enumerate(lows))


def _longest_of(catalog: Catalog, cut: Mapping[str, int]) -> tuple[Long, ...]:
    longest = dict(sorted(cut.items(), key=lambda item: (-item[1], item[0]))[:_LONGEST])
    samples: dict[str, str] = {}
    for row in range(len(catalog)) if longest else ():
        for caption in longest.keys() & catalog.row_captions(row):
            samples.setdefault(caption, catalog.ids[row])
    return tuple(Long(samples[caption], length, caption) for caption, length in longest.items())


def kind_of(catalog: Catalog, column: KeyColumn, sizes: Mapping[Key, int]) -> ColumnNumbers:
    """Return what a column's cells hold; `sizes` has the bytes of every entry that is there."""
    cells = Counter(bytes(raw) for raw in column.keys)
    missing = cells.pop(NO_KEY, 0)
    present = {raw: times for raw, times in cells.items() if Key(raw) in sizes}
    return ColumnNumbers(
        encoder=column.encoder,
        role=column.role,
        about=_describe(catalog.recipes.get(column.fingerprint), column),
        fingerprint=column.fingerprint,
        cells=len(column.keys),
        missing=missing,
        entries=len(cells),
        bytes=sum(sizes[Key(raw)] for raw in present),
        saved_bytes=sum(sizes[Key(raw)] * (times - 1) for raw, times in present.items()),
        repeats=_repeats_of(catalog, column, cells),
    )


def _describe(recipe: Recipe | None, column: KeyColumn) -> str:
    if recipe is None:
        return ""
    make, resolution = recipe.make, column.options.get("resolution")
    components: Any = make.get("components")
    module = cast("dict[str, Any]", components).get("vae") if isinstance(components, dict) else None
    what = recipe.read.get("family") or str(module or make.get("kind")).rpartition(".")[2]
    parts = [what, make.get("dtype"), recipe.read.get("stored"), f"resolution {resolution}" if resolution is not None else None]
    return ", ".join(one for one in parts if isinstance(one, str))


def _repeats_of(catalog: Catalog, column: KeyColumn, cells: Counter[bytes]) -> tuple[Repeat, ...]:
    most = [(raw, times) for raw, times in cells.most_common(_REPEATS) if times > 1]
    samples: dict[bytes, list[int]] = {raw: [] for raw, _times in most}
    for row in range(len(catalog)) if most else ():
        for key in column.row_keys(row):
            if key is not None and bytes(key) in samples:
                samples[bytes(key)].append(row)
    return tuple(Repeat(times, _what(catalog, column, Key(raw), samples[raw])) for raw, times in most)


def _what(catalog: Catalog, column: KeyColumn, key: Key, rows: Sequence[int]) -> str:
    captions = catalog.row_captions(rows[0])
    index = column.row_keys(rows[0]).index(key)
    if column.role == CAPTION and index < len(captions):
        return captions[index] or "(the empty caption)"
    return first_of(dict.fromkeys(catalog.ids[row] for row in rows))
