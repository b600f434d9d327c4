"""Sources of which a part is broken: folders, manifests, tables, tars, prompts and samples in memory, with names, bytes and values changed.

Each is listed and planned, some by the command itself. Either it is refused by an error of ours, because the file as a whole was broken or
nothing else was left, or its account is whole: every sample that nobody touched is listed with its captions, every other row, member and
file is a sample or is named. No traceback, and none takes longer than a few seconds.
"""

import csv
import io
import json
import os
import random
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import CacheStoreError
from cachestore.core.keys import digest_text
from cachestore.core.samples import Sample
from cachestore.files.paths import Layout
from cachestore.jobs.share.plan import publish_plan, read_plan
from cachestore.sources.combined import list_path
from cachestore.sources.files import IMAGE_SUFFIXES
from cachestore.sources.listing import Listing
from cachestore.sources.memory import list_objects, list_rows, write_rows
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.store.write.commit import create_store
from tests.fakes import FakeEncoder, plan_of
from tests.torture.campaign import Campaign, Hang, Outcome, judged, scratch, timed
from tests.torture.damage import changed
from tests.torture.fuzz import HOSTILE, mutated


def picture() -> bytes:
    """A small PNG of one colour."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress((b"\0" + b"\x80" * 64) * 64)),
        (b"IEND", b""),
    )
    packed = (struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


A_PROCESS: Final = 250
BY_COMMAND: Final = 1000
"""Of so many points one is given to the command itself."""
COMMAND_SECONDS: Final = 120
LONGEST: Final = 255
"""The longest name of a file, in bytes."""
PICTURE: Final = picture()
WORDS: Final = ("a cat", "un café, s'il vous plaît", "猫と犬", 'he said "no"', "two\nlines", "a; b | c\td", " spaces ", "🦊 fox")
NAMES: Final = (
    "-r.png",
    "a b.png",
    "q?*.png",
    "new\nline.png",
    "é.png",
    "e\u0301.png",
    "🦊.png",
    "x.tar.png",
    "p..png",
    "UP.PNG",
    "n" * 251 + ".png",
    os.fsdecode(b"\xff\xfe.png"),
    "sub/deep/er.png",
    "\x1b[31m.png",
)
ENCODINGS: Final = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "cp037")
BYTES: Final = ("flip", "flips", "zero", "noise", "cut", "empty", "grow")


@dataclass(slots=True)
class Source:
    """What is listed, and what must come of it."""

    data: Any
    """A path, or samples."""
    expected: dict[str, tuple[str, ...]]
    """The captions of each sample that nobody touched, by id."""
    parts: int
    """How many samples, rows or members with pictures there are in all."""
    is_whole_broken: bool = False
    """Whether the file was broken as a whole: then it may be refused, and nothing is known of what is in it."""
    named: list[str] = field(default_factory=list[str])
    """Files that must be named as not used."""
    how: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of the listing."""


def row_of(number: int, draw: random.Random) -> dict[str, Any]:
    """A row of a manifest that is right."""
    row: dict[str, Any] = {"file_name": f"{number:02}.png", "text": f"{draw.choice(WORDS)} {number}"}
    return row | draw.choice(({}, {"id": f"id {number}"}, {"score": 0.5}, {"note": {"deep": [1, None]}}, {"licence": "CC0"}))


def id_of(row: Mapping[str, Any], below: str = "") -> str:
    """The id of a row that is right."""
    return below + str(row.get("id", row["file_name"]))


def hostile_text(draw: random.Random) -> str:
    """A text that few programs expect."""
    long = draw.choice((300, 5_000, 100_001, 1_000_000 if draw.random() < 0.1 else 200_000))
    return draw.choice(
        ("", " ", "\0", "a\0b", "\ud83d", "x\udcffy", "\x1b[31m", "../../etc/passwd", "{", "[" * 1000, "x" * long, "é" * long)
    )


def hostile_row(row: Mapping[str, Any], draw: random.Random) -> Any:
    """The row with something else in it, or something else instead of it."""
    name = draw.choice((*row, "text", "file_name", "id", "mask", "crop", "size", "latents", "caption.text_encoder_2", "", "\0"))
    match draw.randrange(6):
        case 0:
            return mutated(dict(row), draw)
        case 1:
            return {key: value for key, value in row.items() if key != name}
        case 2:
            return {**row, name: draw.choice((*HOSTILE, float("nan"), float("inf"), [hostile_text(draw)], {"bytes": "x"}))}
        case 3:
            return draw.choice(HOSTILE)
        case _:
            return {**row, name: hostile_text(draw)}


def hostile_line(row: Mapping[str, Any], draw: random.Random) -> bytes:
    """A line with something else than the row."""
    if draw.random() < 0.5:
        try:
            return json.dumps(hostile_row(row, draw)).encode("utf-8", "surrogatepass")
        except RecursionError:
            return b'{"text": ' + b"[" * 100_000
    raw = json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()
    if draw.random() < 0.3:
        return raw.decode().encode(draw.choice(("utf-16-le", "utf-16-be", "utf-16", "utf-7", "cp037")), "replace").replace(b"\n", b" ")
    return b" " + (changed(raw, draw.choice(BYTES), draw).replace(b"\n", b" ").replace(b"\r", b" ").strip() or b"{")


def hostile_caption(draw: random.Random) -> bytes:
    """The bytes of a caption file that cannot be used, or of one that nobody expects."""
    text = draw.choice(WORDS)
    return draw.choice(
        (
            text.encode(draw.choice(("utf-16", "utf-16-le", "utf-32", "utf-16-be"))),
            b"caf\xe9",
            b"\xff" * 9,
            b"nul \0",
            changed(text.encode(), draw.choice(BYTES), draw),
            hostile_text(draw).encode("utf-8", "surrogatepass"),
            bytes(draw.randrange(256) for _n in range(40)),
            b"",
        )
    )


# Kinds of sources


def a_folder(folder: Path, draw: random.Random) -> Source:
    """A folder of pictures with caption files."""
    names = [f"{number:02}.png" for number in range(draw.randint(2, 7))]
    names += draw.sample([name for name in NAMES if "\u0301" not in name], draw.randint(0, 3))
    expected: dict[str, tuple[str, ...]] = {}
    touched = {name for name in names if draw.random() < 0.3}
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURE)
        beside = path.with_suffix(draw.choice((".txt", ".caption")))
        text = draw.choice(WORDS)
        if len(os.fsencode(beside.name)) > LONGEST:
            expected[name] = ("",)
            continue
        if name in touched:
            _strike_captions(path, beside, draw)
        else:
            beside.write_text(text)
            expected[name] = (text.strip(),)
    return Source(folder, expected, sum(path.suffix.lower() in IMAGE_SUFFIXES for path in _files_below(folder)))


def _strike_captions(path: Path, beside: Path, draw: random.Random) -> None:
    match draw.randrange(9):
        case 0:
            beside.symlink_to(draw.choice(("nowhere", beside.name, "/dev/null", str(path.name))))
        case 1:
            beside.mkdir()
        case 2:
            os.mkfifo(beside)
        case 3:
            path.unlink()
            path.symlink_to("nowhere")
        case 4:
            for suffix in (".txt", ".caption"):
                if len(os.fsencode(path.with_suffix(suffix).name)) <= LONGEST:
                    path.with_suffix(suffix).write_bytes(hostile_caption(draw))
        case _:
            beside.write_bytes(hostile_caption(draw))


def _files_below(folder: Path) -> Iterator[Path]:
    for root, _folders, files in os.walk(folder):
        yield from (Path(root) / name for name in files if not name.startswith("."))


def rows_in(folder: Path, draw: random.Random, write: Callable[[Path, list[Any], set[int], random.Random], Path], name: str) -> Source:
    """A folder with metadata, or with a manifest that is DATA itself. Some rows are touched."""
    rows = [row_of(number, draw) for number in range(draw.randint(2, 8))]
    most = 1 if name.lower().endswith(("csv", "tsv")) else 3  # rows between two stray quotes are one cell
    touched = set(draw.sample(range(len(rows)), draw.randint(1, min(most, len(rows) - 1))))
    below = draw.choice(("", "", "train/")) if name.startswith("metadata") else ""
    path = write(folder / below / name, rows, touched, draw)
    made = Source(path if draw.random() < 0.5 and not below else folder, {}, len(rows))
    if not name.lower().startswith("metadata"):
        made.data = path
    made.is_whole_broken = path.read_bytes()[:2] in {b"\xff\xfe", b"\xfe\xff"}
    made.expected = {id_of(row, below): (row["text"],) for number, row in enumerate(rows) if number not in touched}
    for number in range(len(rows)):
        (path.parent / f"{number:02}.png").write_bytes(PICTURE)
    if made.data == folder and draw.random() < 0.2:
        other = path.with_name("metadata.json" if path.suffix.lower() != ".json" else "Metadata.json")
        if not any(one.name.lower() == other.name.lower() for one in path.parent.iterdir()):
            other.write_text("[]")
            made.named.append(f"{below}{other.name}")
    return made


def _write_lines(path: Path, rows: list[Any], touched: set[int], draw: random.Random) -> Path:
    lines = [hostile_line(row, draw) if number in touched else json.dumps(row).encode() for number, row in enumerate(rows)]
    if draw.random() < 0.2 and (later := max(touched)) > min(range(len(rows))):
        lines[later] = json.dumps({**rows[later], "id": id_of(rows[draw.randrange(later)])}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(draw.choice((b"\n", b"\r\n")).join(lines))
    return path


def _write_json(path: Path, rows: list[Any], touched: set[int], draw: random.Random) -> Path:
    made = [hostile_row(row, draw) if number in touched else row for number, row in enumerate(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = json.dumps(made).replace("NaN", "null").replace("Infinity", "null")
        json.loads(text)
    except (RecursionError, ValueError):
        text = json.dumps([7 if number in touched else row for number, row in enumerate(rows)])
    path.write_text(text)
    return path


def _write_cells(path: Path, rows: list[Any], touched: set[int], draw: random.Random) -> Path:
    columns = list(dict.fromkeys(column for row in rows for column in row if column not in {"note", "id"}))
    for row in rows:
        row.pop("id", None)
        row.pop("note", None)
    text, delimiter = io.StringIO(newline=""), draw.choice(",;\t|")
    writer = csv.DictWriter(text, columns, restval="", delimiter=delimiter, lineterminator=draw.choice(("\n", "\r\n")))
    writer.writeheader()
    pieces: list[bytes] = [text.getvalue().encode()]
    for number, row in enumerate(rows):
        text.seek(0)
        text.truncate()
        writer.writerow(row)
        raw = text.getvalue().encode()
        pieces.append(_hostile_cells(raw, row, columns, delimiter, draw) if number in touched else raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(draw.choice((b"", b"\xef\xbb\xbf")) + b"".join(pieces))
    return path


def _hostile_cells(raw: bytes, row: Mapping[str, Any], columns: Sequence[str], delimiter: str, draw: random.Random) -> bytes:
    """One record with something else in it, on one line."""
    if draw.random() < 0.5:
        cells = [str(row.get(column, "")) for column in columns]
        cells[draw.randrange(len(cells))] = hostile_text(draw).replace("\n", " ")
        record = delimiter.join(cells[: draw.choice((len(cells), 1))]) + draw.choice(("", delimiter * 3, '"'))
        return b"-" + record.replace("\n", " ").encode("utf-8", "surrogatepass") + b"\n"
    return b"-" + changed(raw, draw.choice(BYTES), draw).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"


def _write_parquet(path: Path, rows: list[Any], touched: set[int], draw: random.Random) -> Path:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = ("file_name", "text", "id")
    made = [{column: row.get(column) for column in columns} for row in rows]
    for number in touched:
        column = draw.choice(columns)
        made[number][column] = draw.choice((None, "", "\0", "x" * 200_000, "../x", "n" * 300 + ".png"))
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table({column: arrow.array([row[column] for row in made], arrow.string()) for column in columns}), path)
    return path


def prompts(folder: Path, draw: random.Random) -> Source:
    """A list of prompts."""
    lines = [f"{draw.choice(WORDS).strip()} {number}".replace("\n", " ") for number in range(draw.randint(2, 8))]
    touched = set(draw.sample(range(len(lines)), draw.randint(1, len(lines) - 1)))
    raw = [
        hostile_caption(draw).replace(b"\n", b"").replace(b"\r", b"") + b"!" if n in touched else line.encode()
        for n, line in enumerate(lines)
    ]
    (folder / "prompts.txt").write_bytes(b"\n".join(raw))
    expected = {digest_text(line): (line,) for number, line in enumerate(lines) if number not in touched}
    return Source(folder / "prompts.txt", expected, len(lines), is_whole_broken=raw[0][:2] in {b"\xff\xfe", b"\xfe\xff"})


def a_tar(folder: Path, draw: random.Random) -> Source:
    """A tar of pictures, texts and rows. Some texts, rows, names or headers are touched."""
    names = [f"{number:02}" for number in range(draw.randint(2, 7))]
    touched = {name for name in names if draw.random() < 0.4}
    expected: dict[str, tuple[str, ...]] = {}
    path = folder / "a.tar"
    with tarfile.open(path, "w", format=draw.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as tar:
        for name in names:
            text = draw.choice(WORDS)
            members = {f"{name}.png": PICTURE}
            as_json = draw.random() < 0.5
            if name in touched:
                row = {"file_name": f"{name}.png", "text": text}
                members[f"{name}.json" if as_json else f"{name}.txt"] = hostile_line(row, draw) if as_json else hostile_caption(draw)
            else:
                members[f"{name}.json" if as_json else f"{name}.txt"] = json.dumps({"caption": text}).encode() if as_json else text.encode()
                expected[f"{name}.png"] = (text,) if as_json else (text.strip(),)
            for member, raw in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(raw)
                if name in touched and draw.random() < 0.1:
                    info.type, info.linkname, info.size = draw.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)), "00.png", 0
                tar.addfile(info, io.BytesIO(raw))
    return Source(path, expected, len(names))


def in_memory(_folder: Path, draw: random.Random) -> Source:
    """Samples in memory."""
    samples: list[Any] = []
    expected: dict[str, tuple[str, ...]] = {}
    for number in range(draw.randint(2, 7)):
        text = draw.choice(WORDS)
        if draw.random() < 0.6:
            samples.append(Sample(str(number), {"image": PICTURE}, (text,), extras={"note": [1]}))
            expected[str(number)] = (text,)
            continue
        wrong: Any = draw.choice((*HOSTILE, hostile_text(draw), object(), b"x"))
        fields: dict[str, Any] = {"id": f"x{number}", "images": {"image": PICTURE}, "captions": (text,), "extras": {}}
        name = draw.choice(tuple(fields))
        fields[name] = {draw.choice(("image", "note", "")): wrong} if name in {"images", "extras"} else wrong
        samples.append(draw.choice((Sample(**fields), Sample(**fields), Sample(**fields), wrong)))
    return Source(samples, expected, len(samples))


def broken_whole(kind: str, folder: Path, draw: random.Random) -> Source:
    """A file of which any bytes are changed, or that is saved in another encoding."""
    made = KINDS[kind](folder, draw)
    path = next(path for path in sorted(_files_below(folder)) if path.suffix.lower() != ".png")
    raw = path.read_bytes()
    if draw.random() < 0.3 and path.suffix.lower() not in {".tar", ".parquet"}:
        raw = raw.decode("utf-8", "replace").encode(draw.choice(ENCODINGS), "replace")
    else:
        raw = changed(raw, draw.choice(BYTES), draw) if draw.random() < 0.8 else raw[: draw.randrange(len(raw) + 1)] + raw[::-1]
    path.write_bytes(raw)
    made.is_whole_broken = True
    return made


KINDS: Final[Mapping[str, Callable[[Path, random.Random], Source]]] = {
    "folder": a_folder,
    "metadata.jsonl": partial(rows_in, write=_write_lines, name="metadata.jsonl"),
    "rows.jsonl": partial(rows_in, write=_write_lines, name="rows.jsonl"),
    "Metadata.CSV": partial(rows_in, write=_write_cells, name="Metadata.CSV"),
    "rows.tsv": partial(rows_in, write=_write_cells, name="rows.tsv"),
    "metadata.json": partial(rows_in, write=_write_json, name="metadata.json"),
    "metadata.parquet": partial(rows_in, write=_write_parquet, name="metadata.parquet"),
    "prompts": prompts,
    "tar": a_tar,
    "memory": in_memory,
}
OF_FILES: Final = tuple(kind for kind in KINDS if kind not in {"folder", "memory"})


def make(number: int, seed: int, folder: Path) -> tuple[str, Source]:
    """A source by its number: its kind, and what must come of it."""
    draw = random.Random(f"sources {seed} {number}")
    if draw.random() < 0.25:
        kind = draw.choice(OF_FILES)
        return f"{kind}, broken as a whole", broken_whole(kind, folder, draw)
    kind = draw.choice(tuple(KINDS))
    return kind, KINDS[kind](folder, draw)


# What must hold


def judge(seed: int, model: Path | None, numbers: range) -> list[str]:
    """List so many sources; what did not hold."""
    found: list[str] = []
    with scratch() as folder:
        layout = create_store(folder / "store")
        for number in numbers:
            data = folder / str(number)
            data.mkdir()
            kind, source = make(number, seed, data)
            try:
                wrong = [*timed(lambda given=source: list(_violations(given, layout)))]
                if model is not None and number % BY_COMMAND == 0 and isinstance(source.data, Path):
                    wrong += _by_command(source, folder / f"store {number}", model)
            except CacheStoreError as error:
                wrong = [] if source.is_whole_broken or not source.expected else [f"one bad part ended all: {error!s:.300}"]
            except Hang as error:
                wrong = [str(error)]
            except Exception as error:  # noqa: BLE001 - whatever else comes is what is looked for
                wrong = [f"{type(error).__name__}: {error!s:.300}"]
            found += [f"{number}: {kind}: {one}" for one in wrong]
    return found


def _violations(source: Source, layout: Layout) -> Iterator[str]:
    seen = Remarks()
    how = ListingOptions(**source.how)
    is_path = isinstance(source.data, Path)
    listing = list_path(source.data, how) if is_path else list_objects(source.data, how)
    samples = {sample.id: sample for sample in listing.samples(seen)}
    account = listing.unused(reference for one in samples.values() for those in one.images.values() for reference in those)
    json.dumps([*seen.in_words(), account.as_json(), *(one.reason for one in seen.refused)]).encode()
    yield from _wrong_plan(list(samples.values()), seen, layout)
    if not is_path:
        yield from _wrong_in_worker(listing, samples, seen, layout)
    if source.is_whole_broken:
        return
    again = " ".join(one.reason for one in seen.refused if "two samples have the id" in one.reason)
    for name, captions in source.expected.items():
        if name not in samples:
            yield f"the sample {name!r:.80}, which nobody touched, is not listed"
        elif samples[name].captions != captions and repr(name) not in again:
            yield f"the sample {name!r:.80} has the captions {samples[name].captions!r:.100}, not {captions!r:.100}"
    accounted = len(samples) + len(seen.refused) + seen.collapsed
    if accounted < source.parts:
        yield f"of {source.parts} parts only {len(samples)} are listed, and {len(seen.refused)} fail alone"
    unused = [name for names in account.examples.values() for name in names]
    yield from (f"{name} is not used and not named" for name in source.named if name not in unused)


def _wrong_plan(samples: Sequence[Sample], seen: Remarks, layout: Layout) -> Iterator[str]:
    """Plan the samples, and read what is published of them."""
    encoder = FakeEncoder("text")
    refused = [(one.sample, one.reason) for one in seen.refused]
    plan = replace(plan_of(samples, [encoder]), refused=refused, refused_count=len(refused))
    publish_plan(layout, plan)
    read = read_plan(layout, plan.name)
    if (list(read.ids), list(read.refused), read.refused_count) != ([sample.id for sample in samples], refused, len(refused)):
        yield "the plan that is read is another"
    for path in layout.plan_folder(plan.name).iterdir():
        path.unlink()


def _wrong_in_worker(listing: Listing, samples: Mapping[str, Sample], seen: Remarks, layout: Layout) -> Iterator[str]:
    path, there = write_rows(layout, listing, "0"), Remarks()
    found = {sample.id: sample for sample in list_rows(path, None).samples(there)}
    path.unlink()
    if (found.keys(), list(there.refused)) != (samples.keys(), list(seen.refused)):
        yield "a worker lists something else"


def _by_command(source: Source, store: Path, model: Path) -> list[str]:
    """Encode a source by the command; what is wrong with how it ended."""
    command = [sys.executable, "-m", "cachestore", "precompute", str(source.data), "--model", str(model), "--store", str(store)]
    command += ["--resolution", "64", "--json", "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS, env=_environment())
    if "Traceback" in ended.stderr or ended.returncode not in {0, 1, 2, 3}:
        return [f"the command ended with {ended.returncode}: {ended.stderr[-500:]}"]
    if ended.returncode in {1, 2}:
        return [] if source.is_whole_broken or not source.expected else [f"one bad part ended the command: {ended.stderr[-300:]}"]
    report = json.loads(ended.stdout)
    if report["wanted"] != report["reused"] + report["encoded"] + report["failed"] + report["missing"]:
        return ["the report does not add up"]
    return []


def _environment() -> dict[str, str]:
    """The environment of a child that imports what this process imports: a copy of the package too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _tiny_model(folder: Path) -> Path:
    """A model of a few kilobytes, made in a process of its own, as this one forks."""
    program = "import sys, tiny_models; tiny_models.sdxl().save_pretrained(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, capture_output=True, timeout=COMMAND_SECONDS, env=_environment()
    )
    return folder


def play(count: int, seed: int) -> Outcome:
    """So many sources."""
    batches = [range(start, min(count, start + A_PROCESS)) for start in range(0, count, A_PROCESS)]
    with scratch() as folder:
        model = _tiny_model(folder / "model") if count >= BY_COMMAND else None
        found = [one for _batch, those in judged(batches, partial(judge, seed, model), seconds=600) for one in those]
    return Outcome(count, tuple(found))


CAMPAIGNS: Final = {"sources": Campaign(play, 20_000)}
