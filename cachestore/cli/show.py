"""`cachestore show`: print one entry, or all entries of a sample; with `--png` also make a picture of its latents."""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachestore.cli import add_source, add_store, near_to, shared_by, source_of, tell, tensors_of
from cachestore.cli.data_sets import add_name, all_unreadable, catalogs_of, made_in_words, unfinished_in_words
from cachestore.core.arguments import normal_id
from cachestore.core.errors import BadInput, BadUsage
from cachestore.core.samples import IMAGE, MASK, VIDEO
from cachestore.core.words import human_bytes, listed, plural

if TYPE_CHECKING:
    from cachestore.store.format.catalog import Catalog
    from cachestore.store.read.reader import Reader

HELP = "show an entry by its key, or a sample by its id; with --command the command that made a data set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("what", metavar="KEY|SAMPLE", nargs="?", help="32 hex digits, or a sample's id")
    add_name(parser, "look only in this data set (default: all)")
    command = "print the command that made the data set, in one line to copy; `precompute --again` runs it"
    parser.add_argument("--command", dest="shows_command", action="store_true", help=command)
    png = "write the sample's latents as a picture, one pixel for each latent position; its folder is made if it does not exist"
    parser.add_argument("--png", metavar="FILE", help=png)
    add_source(parser.add_argument, ": --png uses these pictures to choose the colours of FILE")


def run(arguments: argparse.Namespace) -> int:
    """Print one entry or sample."""
    from cachestore.core.keys import Key
    from cachestore.store.read.reader import Reader

    if arguments.source is not None and arguments.png is None:
        raise BadInput("--source is read for the colours of --png alone: add --png FILE, or leave --source out")
    if arguments.shows_command:
        if arguments.what is not None or arguments.png is not None:
            raise BadUsage("--command is about a data set: leave KEY|SAMPLE and --png out, and name the data set with --name")
        return _show_commands(arguments)
    if arguments.what is None:
        raise BadUsage("say what to show: a key, a sample's id, or --command")
    with Reader(arguments.store) as reader:
        shown: dict[str, Any] = {}
        with suppress(BadInput):  # it is no key, so it may be a sample
            if (key := Key.parse(arguments.what)) in reader:
                shown = reader.describe(key).as_json()
        unreadable: list[str] = []
        if not shown:
            sample = normal_id(arguments.what)
            catalogs = catalogs_of(reader.layout, arguments.name)
            unreadable = all_unreadable(reader.layout, catalogs, arguments.name)
            shown = {"sample": sample, "in": _samples(reader, sample, catalogs, arguments.name)}
        if arguments.png is not None:
            shown["png"] = _draw(reader, arguments)
    if "in" in shown:
        lines = [line for one in shown["in"] for line in _of_sample(one)] + unreadable
    else:
        lines = [f"{shown['key']}  {human_bytes(shown['bytes'])}  {shown['segment']}", *(f"  {line}" for line in tensors_of(shown))]
        lines += [f"  {name}: {value}" for name, value in shown["meta"].items()]
    if "png" in shown:
        width, height = shown["png"]["size"]
        lines += [f"{shown['png']['path']}: {width}x{height} pixels. {shown['png']['colours']}"]
    return tell(arguments, shown, lines)


def _show_commands(arguments: argparse.Namespace) -> int:
    from cachestore.files.paths import Layout
    from cachestore.jobs.plan.remembered import name_all, remember
    from cachestore.store.read.snapshot import open_layout

    layout = open_layout(Layout.at(arguments.store))
    names = name_all(layout) if arguments.name is None else [arguments.name]
    if not names:
        raise BadInput(f"{layout.root} has no data set: `cachestore precompute` makes one")
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    for name in names:
        try:
            one = remember(layout, name)
        except BadInput as error:
            if len(names) == 1:
                raise
            found.append({"name": name, "commands": [], "notes": [str(error)]})
            lines += [f"# {name}: {error}"]
            continue
        found.append({"name": name, "finished": one.is_finished, "commands": one.lines(), "notes": list(one.without)})
        lines += [f"# {name}"] * (len(names) > 1) + one.lines() + [f"# {note}" for note in one.without]
    return tell(arguments, {"data_sets": found}, lines)


def _draw(reader: "Reader", arguments: argparse.Namespace) -> dict[str, Any]:
    from cachestore.core.arguments import as_path
    from cachestore.files.publish import write_outside
    from cachestore.report.png import encode_png
    from cachestore.report.previews import preview_sample
    from cachestore.store.read.unfinished import list_data_sets

    sample = normal_id(arguments.what)
    names = list_data_sets(reader.layout) if arguments.name is None else [arguments.name]
    preview = preview_sample(reader, names, sample, source_of(arguments.source))
    write_outside(as_path("--png", arguments.png).absolute(), encode_png(preview.pixels))
    height, width = preview.pixels.shape[:2]
    return {"path": arguments.png, "name": preview.name, "size": [width, height], "colours": preview.colours.in_words()}


def _samples(reader: "Reader", sample: str, catalogs: "list[Catalog]", name: str | None) -> list[dict[str, Any]]:
    from cachestore.core.samples import CAPTION
    from cachestore.jobs.plan.columns import images_in, own_inputs

    found: list[dict[str, Any]] = []
    for catalog in catalogs:
        if sample not in catalog.ids:
            continue
        row = list(catalog.ids).index(sample)
        columns = dict(zip(catalog.column_names(), catalog.columns, strict=True))
        entries = {
            name: [reader.describe(key).as_json() if key and key in reader else None for key in column.row_keys(row)]
            for name, column in columns.items()
        }
        facts = {
            name: [{fact: [*numbers] for fact, numbers in cell.facts.items()} for cell in column.row_cells(row)]
            for name, column in columns.items()
        }
        images = {role: _paths(catalog, images_in(catalog, row, role)) for role in catalog.images}
        about = {"name": catalog.name, "generation": catalog.generation, "captions": catalog.row_captions(row)}
        own = own_inputs(catalog, row, CAPTION)
        about |= {"own_captions": own} if own else {}
        about |= {"made": catalog.made, "columns": {name: values[row] for name, values in catalog.values.items()}}
        found.append(about | {"images": {role: paths for role, paths in images.items() if paths}, "entries": entries, "facts": facts})
    if not found:
        lists = f"{reader.layout.command('ls')} and {reader.layout.command('stats')} list them"
        of = "its data sets" if name is None else f"the data set {name!r}"
        message = f"{sample!r} is neither a key in {reader.layout.root} nor a sample of {of} ({lists})"
        message += near_to(sample, (catalog.ids for catalog in catalogs))
        raise BadInput("; ".join([message, *unfinished_in_words(reader.layout, name)]))
    return found


def _paths(catalog: "Catalog", references: Iterable[str]) -> list[str]:
    """Return where the files with these references are: under the folder that was given as DATA, else as the source names them."""
    hints = [dict(one) for one in catalog.request.values()]
    data = next((str(one["data"]) for one in hints if "data" in one), "")
    return [str(Path(data, one)) if Path(data).is_dir() else one for one in references]


def _of_sample(found: dict[str, Any]) -> Iterator[str]:
    yield f"data set {found['name']} (generation {found['generation']}){made_in_words(found['made'])}"
    yield from (f"  {name}: {value}" for name, value in found["columns"].items())
    facts: dict[str, list[dict[str, list[int]]]] = {}
    """By the role whose files they are about: the masks of videos stand beside them."""
    for column, cells in found["facts"].items():
        encoder, _slash, role = column.partition("@")[0].partition("/")
        facts.setdefault(MASK if encoder == MASK else role, []).extend(filter(None, cells))
    for role, paths in sorted(found["images"].items(), key=lambda one: one[0] not in {IMAGE, VIDEO}):
        yield from (f"  {'picture' if role == IMAGE else role.replace('_', ' ')}: {path}" for path in paths)
        yield from dict.fromkeys(f"    {_fit(one)}" for one in facts.get(role, ()) if not one.get("flip"))
        yield from ["    also mirrored"] if any(one.get("flip") for one in facts.get(role, ())) else []
    captions: list[str] = found["captions"]
    texts = (entries for name, entries in found["entries"].items() if name.endswith("/caption"))
    made = {caption: entry["meta"] for entries in texts for caption, entry in zip(captions, entries, strict=False) if entry}
    for caption, count in Counter(captions).items():
        yield f"  caption: {caption}" + (f" ({count} times)" if count > 1 else "")
        if "tokens" in made.get(caption, {}):
            more = ", more than the encoder reads: truncated" if made[caption].get("truncated") else ""
            yield f"    {plural(made[caption]['tokens'], 'token')}{more}"
    yield from (f"  caption.{encoder}: {caption}" for encoder, caption in found.get("own_captions", {}).items())
    for column, entries in found["entries"].items():
        by_key = {entry["key"] if entry else None: entry for entry in entries}
        for key, count in Counter(entry["key"] if entry else None for entry in entries).items():
            entry, value = by_key[key], "no value, run `cachestore why`"
            if entry is not None:
                value = f"{entry['key']}  {human_bytes(entry['bytes'])}  {', '.join(tensors_of(entry))}"
            yield f"  {column}{shared_by(count, column) if key else ''}: {value}"
            if entry is not None and found["made"] == "files":
                yield from (f"    {name}: {one}" for name, one in entry["meta"].items())


def _fit(facts: dict[str, list[int]]) -> str:
    if "weight" in facts:
        return ("nothing of it counts", "a part counts", "all of it counts")[facts["weight"][0]]
    if not {"size", "crop", "resized", "bucket"} <= {*facts} or min(*facts["size"], *facts["resized"]) < 1:  # or nonsense, of an import
        return ", ".join(f"{name} {numbers}" for name, numbers in facts.items())
    (width, height), (left, top, right, bottom), scaled = facts["size"], facts["crop"], facts["resized"]
    across, down, *frames = facts["bucket"]
    words = [f"{width}x{height} pixels, scaled {scaled[0] / width:.2f} times to {scaled[0]}x{scaled[1]}"]
    sides = {"left": left, "top": top, "right": scaled[0] - right, "bottom": scaled[1] - bottom}
    lost = [f"{pixels} at the {side}" for side, pixels in sides.items() if pixels]
    fraction = 1 - (right - left) * (bottom - top) / (scaled[0] * scaled[1])
    words += [f"cut off {listed(lost)} ({fraction:.0%} of it)" if lost else "nothing cut off", f"bucket {across}x{down}"]
    if frames:
        rate = facts["fps"][0] / facts["fps"][1] if all(facts.get("fps", [0])) else 0
        long = f" at {rate:g} a second ({frames[0] / rate:.2f} s)" if rate else ""
        words += [f"{plural(frames[0], 'frame')}{long} from frame {facts.get('start', [0])[0]} on"]
    return ", ".join(words)
