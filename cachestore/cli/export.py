"""`cachestore export`: write a data set as another trainer's cache."""

import argparse
from pathlib import Path

from cachestore.cli import FAILURES, add_store, failed_values, options_of, tell, words_of
from cachestore.cli.data_sets import add_name, choose, given_name
from cachestore.cli.terminal.question import ask
from cachestore.cli.terminal.stopping import in_shell, to_stderr
from cachestore.core.errors import BadInput, BadUsage
from cachestore.core.words import first_of, human_bytes, listed, noun, plural
from cachestore.trainers.table import EXPORTED, WEBDATASET, exported_format

HELP = "write a data set as another trainer's cache, or as tars; with --remove, remove what exports wrote"
_MAX_LISTED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = (
        "cachestore export STORE [NAME] --format FORMAT -o FOLDER [options]\n"
        "       cachestore export --remove FOLDER [--format FORMAT] [--dry-run]"
    )
    add_store(parser, is_optional=True)
    add_name(parser, "the data set (default: the only one that has captions or pictures)", positional=True)
    formats = f"{listed(EXPORTED, 'or')}; {WEBDATASET} writes the whole data set as tars"
    parser.add_argument("--format", metavar="FORMAT", help=formats)
    output = "the folder to write to, made if it does not exist; for trainers that cache beside the pictures it can be their folder"
    parser.add_argument("-o", "--output", dest="folder", metavar="FOLDER", help=output)
    parser.add_argument("--generation", metavar="N", type=int, help="generation of the data set (default: the newest)")
    parser.add_argument("--family", metavar="FAMILY", help="the model family, such as flux, if the data set does not say it")
    parser.add_argument("--resolution-only", metavar="R", type=int, help="export only this one of several resolutions")
    parser.add_argument(
        "--variant-only", metavar="N", type=int, help="export only this one of several random crops of each picture, counted from 0"
    )
    left_out = "flips, masks or both: export the rest without them"
    parser.add_argument("--leave-out", metavar="LIST", type=words_of, default=(), help=left_out)
    parser.add_argument(
        "--replace", action="store_true", help="also overwrite files that no earlier export wrote (otherwise they are kept and listed)"
    )
    remove = "remove from FOLDER the files that exports wrote there, and nothing else; those that were changed since are kept and listed"
    parser.add_argument("--remove", metavar="FOLDER", help=remove)
    parser.add_argument("--dry-run", action="store_true", help="with --remove: show what would be removed, and change nothing")


def run(arguments: argparse.Namespace) -> int:
    """Print what was written. Returns 3 if something failed, exists with other contents, or cannot be used by the trainer."""
    if arguments.remove is not None:
        return _remove(arguments)
    asked = {"STORE": arguments.store, "--format": arguments.format, "-o FOLDER": arguments.folder}
    if missing := [name for name, value in asked.items() if value is None]:
        raise BadUsage(f"{listed(missing)} {noun(len(missing), 'is', 'are')} missing: cachestore export STORE --format FORMAT -o FOLDER")
    if arguments.dry_run:
        raise BadUsage("--dry-run is for --remove: add --remove FOLDER, or leave it out")
    from cachestore.files.paths import Layout
    from cachestore.store.read.snapshot import open_layout
    from cachestore.trainers.exporting import export_cache

    if arguments.format != WEBDATASET:
        exported_format(arguments.format)  # raises for one that is not known
    name = choose(open_layout(Layout.at(arguments.store)), given_name(arguments), with_sources=True)
    made = _make_target(arguments)
    report = export_cache(**options_of(arguments, name=name, without=("named", "remove", "dry_run")))
    lines = failed_values(report.failures)
    if report.foreign:
        foreign = f"{plural(len(report.foreign), 'file')} with other contents kept, not written by an export (--replace overwrites)"
        lines += [f"{foreign}: {first_of(report.foreign, _MAX_LISTED)}"]
    lines += [f"written in another form than in the store: {cast}" for cast in report.casts]
    lines += [f"the trainer cannot use all of it: {what}" for what in report.not_taken]
    lines += [f"note: {remark}" for remark in report.remarks]
    lines += [f"not exported: {what}" for what in report.left_out]
    counts = f"{plural(report.written, 'file')} written ({human_bytes(report.bytes)}), {report.unchanged} were already there"
    new = ", a new folder" if made else ""
    lines += [f"{report.name!r}, generation {report.generation}, to {report.folder}{new}: {counts}"]
    if report.trainer_settings:
        lines += [f"for {report.format} to take these files, set in its configuration:", *report.trainer_settings]
    return tell(arguments, report.as_json(), lines, is_ok=report.complete, otherwise=FAILURES)


def _make_target(arguments: argparse.Namespace) -> bool:
    """Whether the folder is new. On a terminal, ask before one is made whose name is close to another's, or that should have pictures.

    Raises BadInput if its parent does not exist either.
    """
    from cachestore.core.words import nearest
    from cachestore.trainers.table import load_format

    folder = Path(arguments.folder).absolute()
    if folder.exists():
        return False
    parent = folder.parent
    if not parent.is_dir():
        there = next(one for one in folder.parents if one.is_dir())
        wrong = folder.relative_to(there).parts[0]
        near = nearest(wrong, [one.name for one in there.iterdir() if one.is_dir()])
        hint = f"; did you mean {str(there / near)!r}?" if near is not None else ""
        raise BadInput(f"there is no folder {parent}, so {folder.name!r} was not made in it: check the path, or make {parent} first{hint}")
    near = nearest(folder.name, [one.name for one in parent.iterdir() if one.is_dir()])
    is_beside = arguments.format != WEBDATASET and load_format(arguments.format).is_beside
    if (is_beside or near is not None) and not arguments.json:
        meant = f" Did you mean {near!r}?" if near is not None else f" {arguments.format} looks beside the pictures."
        answers = {"y": "make it", "n": "stop"}
        if ask(f"There is no folder {folder}.{meant} Make it (y), or stop (n)?", answers, default="n") == "n":
            raise BadInput(f"there is no folder {folder}, and none was made: nothing was written")
    if not arguments.json:
        undo = in_shell(["export", "--remove", str(folder)])
        instead = f"; there is a folder {near!r} beside it: if that one was meant, run `{undo}`, then export again"
        to_stderr(f"{folder} does not exist: it is made new{instead if near is not None else ''}")
    return True


def _remove(arguments: argparse.Namespace) -> int:
    from cachestore.trainers.export_target import remove_export

    given = {"STORE": arguments.store, "NAME": arguments.named, "--name": arguments.name, "-o": arguments.folder}
    if more := [name for name, value in given.items() if value is not None]:
        raise BadUsage(f"--remove takes the exported folder, and --format for the files of one trainer alone: leave {listed(more)} out")
    if arguments.format is not None and arguments.format != WEBDATASET:
        exported_format(arguments.format)  # raises for one that is not known
    report = remove_export(arguments.remove, arguments.format, apply=not arguments.dry_run)
    would = "" if report.applied else "would be "
    of_formats = f": {', '.join(f'{count} of {name}' for name, count in report.formats.items())}" if report.formats else ""
    lines = [f"kept: {path}: {reason}" for path, reason in report.kept.items()]
    lines += [f"{report.folder}: {plural(report.removed, 'file')} of exports {would}removed ({human_bytes(report.bytes)}){of_formats}"]
    if report.gone:
        lines += [f"{plural(report.gone, 'file')} that exports wrote {noun(report.gone, 'was', 'were')} gone already"]
    return tell(arguments, report.as_json(), lines, is_ok=not report.kept, otherwise=FAILURES)
