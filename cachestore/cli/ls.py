"""`cachestore ls`: list the entries of a store, or the samples of its data sets; of one in an object store, its data sets."""

import argparse
from typing import TYPE_CHECKING, Any

from cachestore.cli import add_store, tell, tensors_of
from cachestore.cli.data_sets import add_name, all_unreadable, catalogs_of
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from cachestore.store.format.catalog import Catalog
    from cachestore.store.read.reader import Reader

HELP = "list the entries of a store, or with --samples the samples of its data sets; for an address (s3://…), list its data sets"


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
    from cachestore.care.losses import needed_by
    from cachestore.store.read.opener import is_address
    from cachestore.store.read.reader import Reader
    from cachestore.store.read.unfinished import list_unfinished

    if is_address(arguments.store):
        return _list_address(arguments)
    with Reader(arguments.store) as reader:
        catalogs = catalogs_of(reader.layout, arguments.name) if arguments.samples or arguments.name is not None else []
        unfinished = list_unfinished(reader.layout) if arguments.name is None else []
        if arguments.samples:
            samples = [sample for catalog in catalogs for sample in _samples(reader, catalog)]
            prompts = [prompt for catalog in catalogs for prompt in _prompts(reader, catalog)]
            lines = list(map(_sample_in_a_line, samples))
            for one in prompts:
                negative = f"  negative: {one['negative_prompt']}" if one["negative_prompt"] else ""
                lines += [f"{one['name']}  (prompt)  -  {_state(one)}  {one['prompt']}{negative}"]
            unreadable = all_unreadable(reader.layout, catalogs, arguments.name)
            lines += [*unreadable, *(one.in_words(reader.layout) for one in unfinished)]
            found = {"samples": samples, "prompts": prompts, "unfinished": [one.as_json() for one in unfinished]}
            return tell(arguments, found, lines)
        needed = {key for catalog in catalogs for key, _sample in needed_by(catalog)}
        keys = sorted(reader.keys() if arguments.name is None else (key for key in needed if key in reader))
        if arguments.keys and not arguments.json:
            return tell(arguments, None, map(str, keys))
        entries = [reader.describe(key).as_json() for key in keys]
        found = {"entries": entries, "unfinished": [one.as_json() for one in unfinished]}
        return tell(arguments, found, [*map(_in_a_line, entries), *(one.in_words(reader.layout) for one in unfinished)])


def _list_address(arguments: argparse.Namespace) -> int:
    from cachestore.cli.transfer import say_whom
    from cachestore.remote.listing import list_address

    if arguments.keys or arguments.samples or arguments.name is not None:
        raise BadInput(f"--keys, --samples and --name need a folder: run `cachestore pull {arguments.store} FOLDER` first")
    say_whom(arguments.store)
    found = list_address(arguments.store)
    lines = [f"{one.name}  generation {one.generation}  {one.samples} samples  catalog {human_bytes(one.bytes)}" for one in found.catalogs]
    return tell(arguments, found.as_json(), [*lines, f"{found.segments} segments, {human_bytes(found.bytes)}"])


def _samples(reader: "Reader", catalog: "Catalog") -> list[dict[str, Any]]:
    from cachestore.core.samples import CAPTION, IMAGE, VIDEO
    from cachestore.jobs.plan.columns import own_inputs
    from cachestore.jobs.run.presence import ready_rows
    from cachestore.train.facts import cut_of

    ready = ready_rows(catalog, reader.snapshot)
    pictures = [column for column in catalog.columns if column.role in {IMAGE, VIDEO} and "bucket" in column.facts]
    found: list[dict[str, Any]] = []
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
        found.append(about | {"ready": bool(ready[row])})
    return found


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


def _in_a_line(entry: dict[str, Any]) -> str:
    return f"{entry['key']}  {human_bytes(entry['bytes']):>10}  {', '.join(tensors_of(entry))}"
