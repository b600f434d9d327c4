"""`cachestore show`: one entry, or everything that belongs to a sample."""

import argparse
import unicodedata
from typing import TYPE_CHECKING, Any

from cachestore.cli import OK, add_store, human_bytes, print_json, say
from cachestore.errors import BadInput

if TYPE_CHECKING:
    from cachestore.reader import Reader

HELP = "show an entry by its key, or a sample by its id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("what", metavar="KEY|SAMPLE", help="32 hex digits, or a sample's id")


def run(arguments: argparse.Namespace) -> int:
    """Print one entry or sample."""
    from cachestore.keys import Key
    from cachestore.reader import Reader

    with Reader(arguments.store) as reader:
        try:
            key: Key | None = Key.parse(arguments.what)
        except BadInput:
            key = None
        if key is not None and key in reader:
            shown: dict[str, Any] = reader.describe(key).as_json()
        else:
            sample = unicodedata.normalize("NFC", arguments.what)
            shown = {"sample": sample, "in": _samples(reader, sample)}
    if arguments.json:
        print_json(shown)
    elif "in" in shown:
        for found in shown["in"]:
            _print_sample(found)
    else:
        _print_entry(shown)
    return OK


def _samples(reader: "Reader", sample: str) -> list[dict[str, Any]]:
    """The sample in every data set that lists it. Raises BadInput where none does."""
    from cachestore.storage.catalog import list_names, newest_catalog

    found: list[dict[str, Any]] = []
    for name in list_names(reader.layout):
        catalog = newest_catalog(reader.layout, name)
        if catalog is None or sample not in catalog.ids:
            continue
        row = list(catalog.ids).index(sample)
        names = [f"{column.encoder}/{column.role}" for column in catalog.columns]
        entries = {
            f"{name}@{column.options.get('resolution')}" if names.count(name) > 1 else name: [
                reader.describe(key).as_json() if key and key in reader else None for key in column.row_keys(row)
            ]
            for name, column in zip(names, catalog.columns, strict=True)
        }
        found.append({"name": name, "generation": catalog.generation, "captions": catalog.row_captions(row), "entries": entries})
    if not found:
        message = f"{sample!r} is neither a key in {reader.layout.root} nor a sample of its data sets (`cachestore ls`, `cachestore stats`)"
        raise BadInput(message)
    return found


def _print_sample(found: dict[str, Any]) -> None:
    say(f"data set {found['name']} (generation {found['generation']})")
    for caption in found["captions"]:
        say(f"  caption: {caption}")
    for column, entries in found["entries"].items():
        for entry in entries:
            say(f"  {column}:" + ("" if entry else " nothing, see `cachestore why`"))
            if entry:
                _print_entry(entry, indent="    ")


def _print_entry(entry: dict[str, Any], indent: str = "") -> None:
    say(f"{indent}{entry['key']}  {human_bytes(entry['bytes'])}  {entry['segment']}")
    for name, tensor in entry["tensors"].items():
        say(f"{indent}  {name} {tensor['dtype']} {tensor['shape']}")
    for name, value in entry["meta"].items():
        say(f"{indent}  {name}: {value}")
