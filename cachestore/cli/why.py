"""`cachestore why`: explain why a sample is or is not ready to train on, field by field."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cachestore.cli import DAMAGE, USAGE, add_store, near_to, shared_by, tell
from cachestore.cli.data_sets import add_name, all_unreadable, catalogs_of, made_in_words, row_of, unfinished_in_words
from cachestore.core.arguments import normal_id
from cachestore.core.errors import BadInput, FormatError
from cachestore.core.inputs import FRAMED, RANDOM, WITHIN, cells_each, framing_of
from cachestore.core.samples import IMAGE, VIDEO
from cachestore.core.words import noun, plural
from cachestore.files.opening import names_in
from cachestore.files.paths import FOLDERS, MARKER

if TYPE_CHECKING:
    from cachestore.store.format.catalog import Catalog
    from cachestore.store.read.reader import Reader

HELP = (
    "say which values of a sample are in the store, and why others are not; without SAMPLE, list all samples that lack a value; of a folder"
    " or another source, say which files are used, and why others are not"
)

_OF_LISTING: Final = ("roles", "caption_lines", "caption", "caption_column", "tar_names", "alpha")
"""The options that decide how a source is listed."""
_NO_PICTURE: Final = "no picture: add it to the source, or leave the sample out, and run `cachestore precompute` again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from cachestore.jobs.plan.options import PrecomputeRequest, in_command, option_of

    add_store(parser)
    parser.add_argument("sample", metavar="SAMPLE", nargs="?", help="a sample's id (default: all samples that are not ready)")
    add_name(parser, "only this data set (default: all)")
    group = parser.add_argument_group("instead of STORE, a source: a folder, a manifest or tars")
    group.add_argument("--frames", action="store_true", help="list videos too")
    for one in fields(PrecomputeRequest):
        if one.name in _OF_LISTING:
            option = option_of(one)
            group.add_argument(in_command(one.name), metavar=option.metavar, help="as for `cachestore precompute`")


def run(arguments: argparse.Namespace) -> int:
    """Print the state of each of the sample's cells, or what is not ready; of a source, the account of its files.

    Returns 4 if something is not ready, 2 if a run would stop over the names of the files.
    """
    from cachestore.store.read.reader import Reader

    if arguments.sample is None and arguments.name is None:
        path = Path(arguments.store)
        is_source = path.exists() or path.suffix == ".tar"
        if os.path.isdir(path):  # noqa: PTH112 - Path's raises if access is refused
            names = names_in(path, is_root=True)
            is_source = bool(names) and not {MARKER, *FOLDERS} & {*names}
        if is_source:
            return _tell_source(arguments)
    with Reader(arguments.store) as reader:
        catalogs = catalogs_of(reader.layout, arguments.name)
        if arguments.sample is None:
            return _tell_all(arguments, reader, catalogs)
        return _tell_one(arguments, reader, catalogs)


def _tell_source(arguments: argparse.Namespace) -> int:
    from cachestore.jobs.plan.options import PrecomputeRequest, in_command, parse_value
    from cachestore.sources.combined import list_path
    from cachestore.sources.remarks import Remarks
    from cachestore.sources.unused import unused_in_words

    known = {one.name: one for one in fields(PrecomputeRequest)}
    given = {name: getattr(arguments, name) for name in _OF_LISTING if name in known}
    values = {name: parse_value(known[name], text, in_command(name)) for name, text in given.items() if text is not None}
    reading = PrecomputeRequest(arguments.store, "", "", **values).reading
    listing = list_path(arguments.store, replace(reading, videos=arguments.frames))
    remarks, used, samples, captioned = Remarks(), dict[str, set[str]](), 0, 0
    for sample in listing.samples(remarks):
        samples += 1
        captioned += any(text.strip() for text in sample.captions)
        for role, references in sample.images.items():
            used.setdefault(role, set()).update(references)
    named = [*(reference for references in used.values() for reference in references), *(one.sample for one in remarks.refused)]
    unused = listing.unused(named)
    counts = {role: len(references) for role, references in used.items()} | ({"text": unused.texts} if unused.texts else {})
    rows, stops = unused.as_json(), [*remarks.asks, *remarks.captions_elsewhere]
    found = {
        "samples": samples,
        "captioned": captioned,
        "used": counts,
        "unused": rows,
        "remarks": list(remarks.in_words()),
        "stops": stops,
    }
    shown = ", ".join(f"{count} {role}" for role, count in counts.items()) or "none"
    lines = [f"{arguments.store}: {plural(samples, 'sample')}, {captioned} of them with a caption", f"files that are used: {shown}"]
    lines += [*unused_in_words(rows), *remarks.in_words(), *(f"a run would stop: {stop}" for stop in stops)]
    lines += [f"{one.sample} cannot be used: {one.reason}" for one in remarks.refused]
    return tell(arguments, found | {"refused": [asdict(one) for one in remarks.refused]}, lines, is_ok=not stops, otherwise=USAGE)


def _tell_one(arguments: argparse.Namespace, reader: "Reader", catalogs: "list[Catalog]") -> int:
    sample = normal_id(arguments.sample)
    listing = [catalog for catalog in catalogs if sample in catalog.ids]
    answers = [_answer(reader, catalog, list(catalog.ids).index(sample), _Reasons(reader, catalog)) for catalog in listing]
    asked = {sample, arguments.sample}  # the place of a row is as the disk has it
    answers += [one for catalog in catalogs for one in _Reasons(reader, catalog).refused() if one["sample"] in asked]
    if not answers:
        lists = reader.layout.command("stats")
        message = f"no data set in {reader.layout.root} contains the sample {sample!r} ({lists} lists the data sets)"
        message += near_to(sample, (catalog.ids for catalog in catalogs))
        raise BadInput("; ".join([message, *unfinished_in_words(reader.layout)]))
    unreadable = all_unreadable(reader.layout, catalogs, arguments.name)
    lines = [*(line for answer in answers for line in _lines_of(answer)), *unreadable]
    is_ready = all(answer["ready"] for answer in answers) and not unreadable
    return tell(arguments, {"sample": sample, "in": answers}, lines, is_ok=is_ready, otherwise=DAMAGE)


def _tell_all(arguments: argparse.Namespace, reader: "Reader", catalogs: "list[Catalog]") -> int:
    from cachestore.sources.unused import unused_in_words
    from cachestore.store.read.held import ready_rows

    lacking: list[dict[str, Any]] = []
    lines: list[str] = []
    unused: dict[str, list[dict[str, Any]]] = {}
    for catalog in catalogs:
        reasons = _Reasons(reader, catalog)
        ready = ready_rows(catalog, reader.snapshot).tolist()
        not_ready = [row for row, is_ready in enumerate(ready) if not is_ready or row in reasons.without_picture]
        for row in not_ready:
            answer = _answer(reader, catalog, row, reasons)
            answer["cells"] = [cell for cell in answer["cells"] if cell["state"] != "present"]
            lacking.append({"sample": catalog.ids[row], **answer})
            lines += [f"{catalog.name}  {catalog.ids[row]}: {what}" for what in (*_lacking_in_words(answer["cells"]), *answer["lacks"])]
        refused = reasons.refused()
        lacking += refused
        lines += [f"{catalog.name}  {one['sample']}: {what}" for one in refused for what in one["lacks"]]
        rows = row_of(catalog.made)
        state = (
            f"{len(not_ready)} of {plural(len(catalog), rows)} {noun(len(not_ready), 'is', 'are')} not ready"
            if not_ready
            else noun(len(catalog), f"its only {rows} is ready", f"all {len(catalog)} {rows}s are ready")
            if len(catalog)
            else f"it has no {rows}"
        )
        cannot = f"; {plural(len(refused), 'row or file', 'rows or files')} of its source cannot be used" if refused else ""
        lines.append(f"data set {catalog.name!r} (generation {catalog.generation}){made_in_words(catalog.made)}: {state}{cannot}")
        unused[catalog.name] = reasons.unused()
        lines += [f"  {line}" for line in unused_in_words(unused[catalog.name])]
    unfinished = [*unfinished_in_words(reader.layout, arguments.name), *all_unreadable(reader.layout, catalogs, arguments.name)]
    return tell(
        arguments,
        {"not_ready": lacking, "unused": unused},
        [*lines, *unfinished] or ["there is no data set here"],
        is_ok=not lacking and not unfinished,
        otherwise=DAMAGE,
    )


def _answer(reader: "Reader", catalog: "Catalog", row: int, reasons: "_Reasons") -> dict[str, Any]:
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
                    "recipe": column.fingerprint or None,
                    "options": dict(column.options),
                    "within": within if column.role in FRAMED else None,
                    "key": str(cell.key) if cell.key is not None else None,
                    "input_digest": cell.input.hex() if catalog.has_sources else None,
                    "facts": {name: list(values) for name, values in cell.facts.items()},
                    "state": "present" if present else "missing" if cell.key is not None else "not made",
                    "reason": "" if present else reasons.of(column.encoder, row, has_key=cell.key is not None),
                }
            )
    lacks = [_NO_PICTURE] if row in reasons.without_picture else []
    lacks += [f"no key of the part {part!r}: {reasons.of_part(row)}" for part in catalog.lacking_parts(row)]
    is_ready = not lacks and all(cell["state"] == "present" for cell in cells)
    about = {"name": catalog.name, "generation": catalog.generation, "made": catalog.made}
    return {**about, "ready": is_ready, "lacks": lacks, "cells": cells}


class _Reasons:
    """Why samples of a data set are not ready. The reports of its passes are read at the first question."""

    def __init__(self, reader: "Reader", catalog: "Catalog") -> None:
        from cachestore.jobs.plan.columns import rows_without_picture

        pictures = (column.at for column in catalog.columns if column.role in {IMAGE, VIDEO})
        self.without_picture = frozenset(rows_without_picture(pictures))
        """Rows that have no picture, in a data set in which others have one."""
        self._layout, self._catalog = reader.layout, catalog

    def of(self, encoder: str, row: int, *, has_key: bool) -> str:
        """Return why a cell is not ready; `has_key` says whether it was made once."""
        if has_key and not self._catalog.has_sources:
            what = "save or remove this file" if self._catalog.made == "files" else "put it again, or set or remove this row"
            return f"its value is not in the store: {what}"
        if has_key:
            return f"its entry has no valid copy: run {self._layout.command('repair --refill')}"
        return self._failures.get((self._catalog.ids[row], encoder), "it was not made yet: run `cachestore precompute` again")

    def of_part(self, row: int) -> str:
        """Return why a row of a published data set lacks a part."""
        from cachestore.store.format.line import FILLED

        failed = self._failures.get((self._catalog.ids[row], FILLED))
        return f"it could not be encoded ({failed}): call `fill_dataset` or `fill` again" if failed else "set it, or remove this row"

    def refused(self) -> list[dict[str, Any]]:
        """Return an answer for each row or file of the source that could not be used when the data set was last listed."""
        from cachestore.jobs.run.pass_counts import OF_SOURCE

        rows = [one for report in self._reports[-1:] for one in report["failures"] if one["encoder"] == OF_SOURCE]
        whole: dict[str, Any] = {"name": self._catalog.name, "generation": self._catalog.generation, "made": self._catalog.made}
        whole |= {"ready": False, "cells": []}
        return [{"sample": one["sample"], **whole, "lacks": [f"not used: {one['reason']}"]} for one in rows]

    def unused(self) -> list[dict[str, Any]]:
        """Return what was not used of the source when the data set was last listed: the rows of `Unused.as_json`."""
        return [row for report in self._reports[-1:] for row in report.get("unused", ())]

    @cached_property
    def _failures(self) -> dict[tuple[str, str], str]:
        # of several passes, the newest that reported one counts
        failures = [failure for report in self._reports for failure in report["failures"]]
        return {(failure["sample"], failure["encoder"]): str(failure["reason"]) for failure in failures}

    def _filled_by(self, plan: str) -> str | None:
        """Return the data set that `fill` published by a plan; its report has no name, as nothing is made again from its plan."""
        from cachestore.jobs.share.plan import read_outline

        if not self._catalog.has_sources:
            with suppress(FormatError, OSError):
                return read_outline(self._layout, plan).catalog
        return None

    @cached_property
    def _reports(self) -> list[Any]:
        """Of the data set's passes, oldest first."""
        from cachestore.jobs.share.passes import PassRef, list_passes, read_done
        from cachestore.jobs.share.retention import list_plans

        reports: list[tuple[int, int, int, Any]] = []
        for plan in list_plans(self._layout):
            for number in list_passes(self._layout, plan):
                done = read_done(self._layout, PassRef(plan, number))
                if done is not None and self._catalog.name in {done.report["name"], self._filled_by(plan)}:
                    report: Any = done.report
                    reports.append((report["generation"], report.get("listing", 0), number, report))
        reports.sort(key=lambda report: report[:3])
        return [report for *_which, report in reports]


def _column(cell: dict[str, Any]) -> str:
    return f"{cell['encoder']}/{cell['role']}" if cell["role"] else cell["encoder"]


def _which(cell: dict[str, Any]) -> str:
    """Return a cell in words: its column, and for pictures the resolution, and the crop and side if there are several."""
    options = cell["options"]
    variant = cell["number"] % cells_each(options)
    words = [_column(cell)]
    words += [f"at {options['resolution']}"] if "resolution" in options else []
    words += [f"of the part {cell['within']}"] if cell["within"] else []
    words += [f"crop {variant // (2 if options.get('flip') else 1)}"] if options.get("crop") == RANDOM else []
    return " ".join([*words, "mirrored"] if options.get("flip") and variant % 2 else words)


def _lines_of(answer: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a sample in one data set. Cells with equal lines are printed once, with their count."""
    made = made_in_words(answer["made"])
    yield f"data set {answer['name']} (generation {answer['generation']}){made}: {'ready' if answer['ready'] else 'NOT READY'}"
    yield from (f"  {what}" for what in answer["lacks"])
    yield from (f"  {what}" for what in _lacking_in_words(cell for cell in answer["cells"] if cell["state"] != "present"))
    counts = Counter((_which(cell), *_in_words(cell)) for cell in answer["cells"] if cell["state"] == "present")
    for (which, state, *more), count in counts.items():
        yield f"  {which}{shared_by(count, which)}: {state}"
        yield from (f"    {line}" for line in more)


def _lacking_in_words(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each state and reason of cells without a value: one broken file is one line, in however many ways it is encoded."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        alike.setdefault(_in_words(cell)[0], []).append(cell)
    several = {state: dict.fromkeys(map(_column, some)) for state, some in alike.items()}
    return [f"{_which(some[0]) if len(some) == 1 else ', '.join(several[state])} {state}" for state, some in alike.items()]


def _in_words(cell: dict[str, Any]) -> list[str]:
    state = cell["state"] + (f": {cell['reason']}" if cell["reason"] else "")
    key = [f"key {cell['key']}"] if cell["key"] is not None else []
    facts = ", ".join(f"{name} {values}" for name, values in cell["facts"].items())
    return [state, *key, *([facts] if facts else [])]
