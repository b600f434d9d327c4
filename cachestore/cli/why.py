"""`cachestore why`: explain why a sample is or is not ready to train on, field by field."""

import argparse
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cachestore.cli import DAMAGE, add_store, near_to, shared_by, tell
from cachestore.core.errors import BadInput
from cachestore.core.inputs import FRAMED, RANDOM, WITHIN, cells_each, framing_of

if TYPE_CHECKING:
    from cachestore.storage.catalog import Catalog
    from cachestore.store.reader import Reader

HELP = "explain why a sample is or is not ready: its keys, recipes, inputs and failures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("sample", metavar="SAMPLE", help="a sample's id")


def run(arguments: argparse.Namespace) -> int:
    """Print the state of each of the sample's cells. Returns 4 if one is missing."""
    from cachestore.storage.catalog import list_names, newest_catalog
    from cachestore.store.reader import Reader

    sample = unicodedata.normalize("NFC", arguments.sample)
    with Reader(arguments.store) as reader:
        catalogs = [catalog for name in list_names(reader.layout) if (catalog := newest_catalog(reader.layout, name)) is not None]
        listing = [catalog for catalog in catalogs if sample in catalog.ids]
        answers = [_answer(reader, catalog, list(catalog.ids).index(sample)) for catalog in listing]
        if not answers:
            message = (
                f"no data set in {reader.layout.root} contains the sample {sample!r} ({reader.layout.command('stats')} lists the data sets)"
            )
            raise BadInput(message + near_to(sample, (catalog.ids for catalog in catalogs)))
    lines = (line for answer in answers for line in _lines_of(answer))
    is_ready = all(answer["ready"] for answer in answers)
    return tell(arguments, {"sample": sample, "in": answers}, lines, is_ok=is_ready, otherwise=DAMAGE)


def _answer(reader: "Reader", catalog: "Catalog", row: int) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    within = framing_of(json.loads(catalog.extras[row])).get(WITHIN)
    for column in catalog.columns:
        for number, cell in enumerate(column.row_cells(row)):
            present = cell.key is not None and cell.key in reader
            cells.append(
                {
                    "encoder": column.encoder,
                    "role": column.role,
                    "number": number,
                    "recipe": column.fingerprint,
                    "options": dict(column.options),
                    "within": within if column.role in FRAMED else None,
                    "key": str(cell.key) if cell.key is not None else None,
                    "input_digest": cell.input.hex(),
                    "facts": {name: list(values) for name, values in cell.facts.items()},
                    "state": "present" if present else "missing" if cell.key is not None else "not made",
                    "reason": "" if present else _reason(reader, catalog, column.encoder, row, has_key=cell.key is not None),
                }
            )
    is_ready = all(cell["state"] == "present" for cell in cells)
    return {"name": catalog.name, "generation": catalog.generation, "ready": is_ready, "cells": cells}


def _reason(reader: "Reader", catalog: "Catalog", encoder: str, row: int, *, has_key: bool) -> str:
    if has_key:
        return f"its entry has no valid copy: run {reader.layout.command('repair --refill')}"
    from cachestore.files.opening import names_in
    from cachestore.files.paths import parse_plan
    from cachestore.work.passes import PassRef, list_passes, read_done

    newest, reason = (-1, -1), "it was not made yet: run `cachestore precompute` again"
    for plan in filter(None, map(parse_plan, names_in(reader.layout.plans))):
        for number in list_passes(reader.layout, plan):
            done = read_done(reader.layout, PassRef(plan, number))
            if done is None or done.report["name"] != catalog.name or (done.report["generation"], number) < newest:
                continue
            for failure in done.report["failures"]:
                if failure["sample"] == catalog.ids[row] and failure["encoder"] == encoder:
                    newest, reason = (done.report["generation"], number), str(failure["reason"])
    return reason


def _which(cell: dict[str, Any]) -> str:
    """Return a cell in words: its column, and for pictures the resolution, and the crop and side if there are several."""
    options = cell["options"]
    variant = cell["number"] % cells_each(options)
    words = [f"{cell['encoder']}/{cell['role']}"]
    words += [f"at {options['resolution']}"] if "resolution" in options else []
    words += [f"of the part {cell['within']}"] if cell["within"] else []
    words += [f"crop {variant // (2 if options.get('flip') else 1)}"] if options.get("crop") == RANDOM else []
    return " ".join([*words, "mirrored"] if options.get("flip") and variant % 2 else words)


def _lines_of(answer: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a sample in one data set. Cells with equal lines are printed once, with their count."""
    yield f"data set {answer['name']} (generation {answer['generation']}): {'ready' if answer['ready'] else 'NOT READY'}"
    counts = Counter((_which(cell), *_in_words(cell)) for cell in answer["cells"])
    for (which, state, *more), count in counts.items():
        yield f"  {which}{shared_by(count, which)}: {state}"
        yield from (f"    {line}" for line in more)


def _in_words(cell: dict[str, Any]) -> list[str]:
    state = cell["state"] + (f": {cell['reason']}" if cell["reason"] else "")
    origin = f"key {cell['key']}, recipe {cell['recipe'][:16]}…, made from {cell['input_digest'][:16]}…"
    facts = ", ".join(f"{name} {values}" for name, values in cell["facts"].items())
    return [state, origin, facts] if facts else [state, origin]
