"""`cachestore show`: print one entry, or all entries of a sample; with `--png` also make a picture of its latents."""

import argparse
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cachestore.cli import add_source, add_store, catalogs_of, near_to, shared_by, source_of, tell
from cachestore.core.errors import BadInput
from cachestore.core.words import human_bytes

if TYPE_CHECKING:
    from cachestore.store.reader import Reader

HELP = "show an entry by its key, or a sample by its id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("what", metavar="KEY|SAMPLE", help="32 hex digits, or a sample's id")
    png = "write the sample's latents as a picture, one pixel for each latent position; its folder is made if it does not exist"
    parser.add_argument("--png", metavar="FILE", help=png)
    add_source(parser.add_argument, ": --png uses these pictures to choose the colours of FILE")


def run(arguments: argparse.Namespace) -> int:
    """Print one entry or sample."""
    from cachestore.store.reader import Reader

    if arguments.source is not None and arguments.png is None:
        raise BadInput("--source is read for the colours of --png alone: add --png FILE, or leave --source out")
    with Reader(arguments.store) as reader:
        shown = _find(reader, arguments.what)
        if arguments.png is not None:
            shown["png"] = _draw(reader, arguments)
    lines = [line for found in shown["in"] for line in _of_sample(found)] if "in" in shown else _of_entry(shown)
    if "png" in shown:
        width, height = shown["png"]["size"]
        lines += [f"{shown['png']['path']}: {width}x{height} pixels. {shown['png']['colours']}"]
    return tell(arguments, shown, lines)


def _find(reader: "Reader", what: str) -> dict[str, Any]:
    """Return an entry by its key, else a sample. Raises BadInput if `what` is neither."""
    from cachestore.core.keys import Key

    with suppress(BadInput):
        if (key := Key.parse(what)) in reader:
            return reader.describe(key).as_json()
    sample = unicodedata.normalize("NFC", what)
    return {"sample": sample, "in": _samples(reader, sample)}


def _draw(reader: "Reader", arguments: argparse.Namespace) -> dict[str, Any]:
    """Write a sample's picture. Raises BadInput if no data set has latents of it."""
    from cachestore.core.arguments import as_path
    from cachestore.files.publish import write_outside
    from cachestore.report.png import encode_png
    from cachestore.report.previews import preview_sample
    from cachestore.storage.catalog import list_names

    sample = unicodedata.normalize("NFC", arguments.what)
    preview = preview_sample(reader, sorted(list_names(reader.layout)), sample, source_of(arguments.source))
    write_outside(as_path("--png", arguments.png).absolute(), encode_png(preview.pixels))
    height, width = preview.pixels.shape[:2]
    return {"path": arguments.png, "name": preview.name, "size": [width, height], "colours": preview.colours.in_words()}


def _samples(reader: "Reader", sample: str) -> list[dict[str, Any]]:
    """Return the sample in every data set that lists it. Raises BadInput if none does."""
    from cachestore.core.samples import CAPTION
    from cachestore.jobs.columns import own_inputs

    found: list[dict[str, Any]] = []
    catalogs = catalogs_of(reader.layout, None)
    for catalog in catalogs:
        if sample not in catalog.ids:
            continue
        row = list(catalog.ids).index(sample)
        entries = {
            name: [reader.describe(key).as_json() if key and key in reader else None for key in column.row_keys(row)]
            for name, column in zip(catalog.column_names(), catalog.columns, strict=True)
        }
        about = {"name": catalog.name, "generation": catalog.generation, "captions": catalog.row_captions(row)}
        own = own_inputs(catalog, row, CAPTION)
        found.append({**about, **({"own_captions": own} if own else {}), "entries": entries})
    if not found:
        lists = f"{reader.layout.command('ls')} and {reader.layout.command('stats')} list them"
        message = f"{sample!r} is neither a key in {reader.layout.root} nor a sample of its data sets ({lists})"
        raise BadInput(message + near_to(sample, (catalog.ids for catalog in catalogs)))
    return found


def _of_sample(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a sample in one data set. Equal captions and entries are printed once, with their count."""
    yield f"data set {found['name']} (generation {found['generation']})"
    captions: list[str] = found["captions"]
    for caption, count in Counter(captions).items():
        yield f"  caption: {caption}" + (f" ({count} times)" if count > 1 else "")
    yield from (f"  caption.{encoder}: {caption}" for encoder, caption in found.get("own_captions", {}).items())
    for column, entries in found["entries"].items():
        by_key = {entry["key"] if entry else None: entry for entry in entries}
        for key, count in Counter(entry["key"] if entry else None for entry in entries).items():
            title = f"  {column}{shared_by(count, column)}:"
            entry = by_key[key]
            yield title if entry else f"{title} no entry, run `cachestore why`"
            yield from _of_entry(entry, indent="    ") if entry else ()


def _of_entry(entry: dict[str, Any], indent: str = "") -> list[str]:
    return [
        f"{indent}{entry['key']}  {human_bytes(entry['bytes'])}  {entry['segment']}",
        *(f"{indent}  {name} {tensor['dtype']} {tensor['shape']}" for name, tensor in entry["tensors"].items()),
        *(f"{indent}  {name}: {value}" for name, value in entry["meta"].items()),
    ]
