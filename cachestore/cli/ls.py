"""`cachestore ls`: list the entries of a store, or the samples of its data sets; of one in an object store, its data sets."""

import argparse
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from cachestore.cli import add_store, tell
from cachestore.cli.data_sets import add_name, all_unreadable, catalogs_of
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cachestore.core.keys import Key
    from cachestore.store.format.catalog import Catalog
    from cachestore.store.format.locations import Location
    from cachestore.store.read.reader import Reader

HELP = "list the entries of a store, or with --samples the samples of its data sets; for an address (s3://…), list its data sets"

_AT_ONCE: Final = 4096
"""How many keys are looked up at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser, may_be_address=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keys", action="store_true", help="print only the keys, one per line")
    what.add_argument(
        "--samples",
        action="store_true",
        help="list the samples of data sets (id, caption, bucket, scale, cut, and whether they are ready), and the prompts for validation",
    )
    add_name(parser, "only the entries or samples of this data set (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print the entries, sorted by key; with `--samples` the samples, in the order of their data set."""
    from cachestore.store.read.opener import is_address
    from cachestore.store.read.reader import Reader
    from cachestore.store.read.unfinished import list_unfinished

    if is_address(arguments.store):
        return _list_address(arguments)
    with Reader(arguments.store) as reader:
        catalogs = catalogs_of(reader.layout, arguments.name) if arguments.samples or arguments.name is not None else []
        unfinished = list_unfinished(reader.layout) if arguments.name is None else []
        about = {"unfinished": [one.as_json() for one in unfinished]}
        last = [one.in_words(reader.layout) for one in unfinished]
        if arguments.samples:
            samples = chain.from_iterable(_samples(reader, catalog) for catalog in catalogs)
            prompts = [prompt for catalog in catalogs for prompt in _prompts(reader, catalog)]
            if arguments.json:
                return tell(arguments, {"samples": [*samples], "prompts": prompts, **about}, ())
            unreadable = all_unreadable(reader.layout, catalogs, arguments.name)
            return tell(arguments, None, chain(map(_sample_in_a_line, samples), map(_prompt_in_a_line, prompts), unreadable, last))
        if arguments.keys and not arguments.json:
            keys = reader.keys() if arguments.name is None else (key for key, _location in _entries(reader, catalogs))
            return tell(arguments, None, map(str, keys))
        entries = _entries(reader, catalogs if arguments.name is not None else None)
        if arguments.json:
            return tell(arguments, {"entries": _described(reader, entries), **about}, ())
        return tell(arguments, None, chain((_in_a_line(key, location) for key, location in entries), last))


def _entries(reader: "Reader", catalogs: "list[Catalog] | None") -> "Iterator[tuple[Key, Location]]":
    """Yield each entry of the store, or each that these data sets need and that is there, with its first location, sorted by key."""
    from cachestore.care.losses import keys_needed_by
    from cachestore.core.keys import Key

    if catalogs is None:
        yield from ((key, locations[0]) for key, locations in reader.snapshot.items())
        return
    needed = keys_needed_by(catalogs)
    for start in range(0, len(needed), _AT_ONCE):
        keys = [Key(raw.tobytes()) for raw in needed[start : start + _AT_ONCE]]
        yield from ((key, locations[0]) for key, locations in zip(keys, reader.snapshot.find(keys), strict=True) if locations)


def _described(reader: "Reader", entries: "Iterable[tuple[Key, Location]]") -> list[dict[str, Any]]:
    """Describe entries, sorted by key. Headers are read in the order of segments, each once."""
    in_order = sorted(entries, key=lambda entry: (entry[1].segment.digest, entry[1].ordinal))
    return sorted((reader.describe(key).as_json() for key, _location in in_order), key=itemgetter("key"))


def _list_address(arguments: argparse.Namespace) -> int:
    from cachestore.cli.transfer import say_whom
    from cachestore.remote.listing import list_address

    if arguments.keys or arguments.samples or arguments.name is not None:
        raise BadInput(f"--keys, --samples and --name need a folder: run `cachestore pull {arguments.store} FOLDER` first")
    say_whom(arguments.store)
    found = list_address(arguments.store)
    lines = [f"{one.name}  generation {one.generation}  {one.samples} samples  catalog {human_bytes(one.bytes)}" for one in found.catalogs]
    return tell(arguments, found.as_json(), [*lines, f"{found.segments} segments, {human_bytes(found.bytes)}"])


def _samples(reader: "Reader", catalog: "Catalog") -> "Iterator[dict[str, Any]]":
    from cachestore.core.samples import CAPTION, IMAGE, VIDEO
    from cachestore.jobs.plan.columns import own_inputs
    from cachestore.store.read.held import ready_rows
    from cachestore.train.facts import cut_of

    ready = ready_rows(catalog, reader.snapshot)
    pictures = [column for column in catalog.columns if column.role in {IMAGE, VIDEO} and "bucket" in column.facts]
    for row, sample in enumerate(catalog.ids):
        firsts = [column.cell(column.at[row]) for column in pictures if column.count(row)]
        buckets = ["x".join(map(str, bucket)) for cell in firsts if (bucket := cell.facts.get("bucket"))]
        cuts = map(cut_of, firsts)
        fits = [{"scale": round(scale, 3), "cut": round(cut, 3)} for scale, cut, _sides in cuts if scale is not None and cut is not None]
        about = {"name": catalog.name, "id": sample, "captions": catalog.row_captions(row)}
        about |= {"own_captions": own} if (own := own_inputs(catalog, row, CAPTION)) else {}
        about |= {"buckets": list(dict.fromkeys(buckets)), "fits": [fit for at, fit in enumerate(fits) if fit not in fits[:at]]}
        if not catalog.has_sources:
            parts = zip(catalog.column_names(), catalog.columns, strict=True)
            about |= {"made": catalog.made, "parts": {part: count for part, column in parts if (count := column.count(row))}}
            about |= {"columns": {name: values[row] for name, values in catalog.values.items()}}
        yield about | {"ready": bool(ready[row])}


def _prompts(reader: "Reader", catalog: "Catalog") -> list[dict[str, Any]]:
    lacking = {text for key, text in catalog.prompt_keys() if key not in reader}
    return [
        {"name": catalog.name, "prompt": prompt, "negative_prompt": negative, "ready": lacking.isdisjoint((prompt, negative))}
        for prompt, negative in catalog.prompts
    ]


def _state(row: dict[str, Any]) -> str:
    return "ready" if row["ready"] else "NOT READY"


def _sample_in_a_line(sample: dict[str, Any]) -> str:
    captions: list[str] = sample["captions"]
    caption = (captions[0] if captions else "") + (f" (and {len(captions) - 1} more)" if len(captions) > 1 else "")
    own = "".join(f"  caption.{encoder}: {text}" for encoder, text in sample.get("own_captions", {}).items())
    if "parts" in sample:
        parts = ", ".join(part if count == 1 else f"{part} ({count})" for part, count in sample["parts"].items())
        columns = "".join(f"  {name}: {value}" for name, value in sample["columns"].items())
        return f"{sample['name']}  {sample['id']}  {parts or '-'}  {_state(sample)}{columns}"
    fits = "".join(f"  scaled {fit['scale']:.2f} times, {fit['cut']:.0%} cut off" for fit in sample["fits"])
    return f"{sample['name']}  {sample['id']}  {','.join(sample['buckets']) or '-'}{fits}  {_state(sample)}  {caption}{own}"


def _prompt_in_a_line(one: dict[str, Any]) -> str:
    negative = f"  negative: {one['negative_prompt']}" if one["negative_prompt"] else ""
    return f"{one['name']}  (prompt)  -  {_state(one)}  {one['prompt']}{negative}"


def _in_a_line(key: "Key", location: "Location") -> str:
    tensors = ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in location.specs)
    return f"{key}  {human_bytes(location.size_bytes):>10}  {tensors}"
