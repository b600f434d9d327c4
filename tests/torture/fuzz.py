"""Fuzzing of every parser of bytes from disk: headers and small files, damaged at random or forged with right checksums.

Each input ends as a value or as an error of ours, within a second and 64 MiB. What is forged bears the checksums of somebody who knows
them, so that it gets past the first check. An index is looked at only as far as its digest: behind that stands LMDB.
"""

import json
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from cachestore.care.lines import read_known
from cachestore.care.losses import read_lost
from cachestore.core.errors import CacheStoreError
from cachestore.core.keys import Key, Recipe
from cachestore.files import paths
from cachestore.files.checksum import digest_of
from cachestore.files.container import TensorInfo, build_header, parse_header
from cachestore.files.paths import ClaimName, IndexName, Layout, PassFolder
from cachestore.files.records import encode_record, read_record
from cachestore.files.table import encode_table, read_header
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.ledgers import read_ledgers
from cachestore.jobs.share.passes import PassRef, list_passes, list_rounds, read_done, read_round
from cachestore.jobs.share.plan import read_outline, read_plan
from cachestore.jobs.share.progress import Observer
from cachestore.jobs.share.workers import Watch, read_heartbeat
from cachestore.store.format.catalog import open_catalog, read_catalog
from cachestore.store.format.index import check
from cachestore.store.format.line import read_entry, read_start
from cachestore.store.format.marked import read_marked
from cachestore.store.format.segment import read_contents
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import open_layout
from cachestore.store.write.model_digests import load_digests
from tests.torture.campaign import Campaign, Outcome, judged, scratch
from tests.torture.damage import WAYS, changed, files_of
from tests.torture.template import build_template

SECONDS: Final = 1.0
BYTES: Final = 64 << 20
A_PROCESS: Final = 500
"""Inputs that one process parses."""
HOSTILE: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**70,
    -(2**63),
    1e308,
    0.5,
    "",
    "\0",
    "\x1b[31m",
    "../../etc/passwd",
    "/etc/passwd",
    "\ud800",
    "0" * 32,
    "x" * 5000,
    [],
    {},
    [[]],
    {"a": {}},
    [0, 0],
)
PARSERS_OF_NAMES: Final = tuple(function for name, function in vars(paths).items() if name.startswith("parse_") or name == "decode_name")


@dataclass(frozen=True, slots=True)
class Shelf:
    """A store whose files are overwritten one by one, and what each held."""

    layout: Layout
    originals: Mapping[str, bytes]
    """By path."""
    by_kind: Mapping[str, Sequence[str]]


def mutated(value: Any, draw: random.Random) -> Any:
    """A JSON value in which something is another: a part replaced, dropped, doubled or put elsewhere."""
    if draw.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return draw.choice((*HOSTILE, _deep(draw.choice((10, 500, 5000)))))
    if isinstance(value, list):
        index = draw.randrange(len(value))
        if draw.random() < 0.3:
            return draw.choice((value[:index], value + [value[index]] * draw.choice((1, 50)), value[::-1]))
        return [mutated(item, draw) if n == index else item for n, item in enumerate(value)]
    name = draw.choice(list(value))
    if draw.random() < 0.25:
        return {key: item for key, item in value.items() if key != name} | draw.choice(({}, {draw.choice(("", "\0", "a/b")): value[name]}))
    return {**value, name: mutated(value[name], draw)}


def _deep(depth: int) -> Any:
    value: Any = 0
    for _level in range(depth):
        value = [value]
    return value


def forged(kind: str, raw: bytes, draw: random.Random) -> bytes:
    """The file with something else in it, under checksums that are right. Raises where that cannot be written at all."""
    if raw[:1] == b"{":
        record = json.loads(raw)
        name, _, version = record["format"].partition("/")
        return encode_record(name, int(version), mutated(record["body"], draw))
    header = parse_header(raw[8 : 8 + int.from_bytes(raw[:8], "little")], len(raw), where=Path(kind))
    data = raw[header.data_start :]
    if "checksums" in header.metadata:
        return _forged_table(header, data, draw)
    return _forged_segment(header, data, draw)


def _forged_table(header, data: bytes, draw: random.Random) -> bytes:
    name, _, version = header.metadata["format"].partition("/")
    columns = {n: (p.dtype, p.shape, data[p.start : p.end]) for n, p in header.tensors.items()}
    fields: Any = json.loads(header.metadata["header"])
    if draw.random() < 0.5 and columns:
        column = draw.choice(list(columns))
        dtype, _shape, held = columns[column]
        held = changed(held, draw.choice(("flip", "flips", "noise", "cut", "empty", "grow")), draw)
        width = 8 if dtype == "I64" else 1
        held = held[: len(held) // width * width]
        columns[column] = (dtype, (len(held) // width,), held)
        if draw.random() < 0.3:
            del columns[column]
    else:
        fields = mutated(fields, draw)
    return b"".join(bytes(chunk) for chunk in encode_table(name, int(version), fields, columns))


def _forged_segment(header, data: bytes, draw: random.Random) -> bytes:
    metadata = dict(header.metadata)
    tensors = dict(header.tensors)
    if draw.random() < 0.6:
        metadata["entries"] = json.dumps(mutated(json.loads(metadata["entries"]), draw))
        metadata["entries_checksum"] = digest_of([metadata["entries"].encode("utf-8", "surrogatepass")])
    elif tensors:
        name = draw.choice(list(tensors))
        info = tensors.pop(name)
        other = draw.choice((name, name.replace("/", "//"), "a/b", "\0", "filler/9", name.upper()))
        shape = draw.choice((info.shape, (0,), (2**40, 2**40, 0), (info.end - info.start,), ()))
        tensors[other] = TensorInfo(draw.choice((info.dtype, "U8", "BOOL", "Q4")), shape, info.start, info.end)
    return build_header(tensors, metadata) + data


def made(shelf: Shelf, number: int, seed: int) -> tuple[str, str, bytes]:
    """(kind, path, bytes) of an input. Nothing is written."""
    draw = random.Random(f"{seed} {number}")
    kinds = sorted(kind for kind in shelf.by_kind if kind in PARSERS)
    kind = kinds[number % len(kinds)]
    path = draw.choice(shelf.by_kind[kind])
    raw = shelf.originals[path]
    if draw.random() < 0.6:
        with suppress(CacheStoreError, ValueError, RecursionError, OverflowError, TypeError, KeyError, AttributeError):
            return kind, path, forged(kind, raw, draw)
    if draw.random() < 0.1:
        return kind, path, draw.randbytes(draw.choice((0, 1, 8, 9, 200, 4096)))
    ways = [way for way in WAYS if way not in {"swap", "copy", "rename", "delete"}]
    return kind, path, changed(raw, draw.choice(ways), draw)


# What reads each kind


def _read_segment(layout: Layout, path: Path) -> None:
    for entry in read_contents(path).entries:
        str(entry.key)
        assert entry.size_bytes <= path.stat().st_size


def _read_catalog(layout: Layout, path: Path) -> None:
    generation = int(path.stem)
    read_header(path, "cachestore-catalog", 1)
    catalog = read_catalog(path, generation=generation)
    for one in (catalog, open_catalog(path, generation=generation, digest=catalog.digest)):
        for row in range(len(one)):
            one.row_captions(row)
            one.is_complete(row)
            [column.row_cells(row) for column in one.columns]
            str(one.ids[row])


def _read_changes(layout: Layout, path: Path) -> None:
    name, number = paths.decode_name(path.parent.name), paths.parse_block(path.name) or paths.parse_entry(path.name)
    assert name is not None
    assert number is not None
    read_start(layout, name, number)
    entry = read_entry(layout, name, number)
    for sample, change in entry.changes.items():
        str((sample, change))
    with suppress(CacheStoreError):
        Reader(layout.root).dataset(name)
    read_known(layout, name)


def _read_plan(layout: Layout, path: Path) -> None:
    name = path.parent.name
    with suppress(CacheStoreError):
        read_outline(layout, name)
    plan = read_plan(layout, name)
    for index in range(plan.unit_count):
        with suppress(CacheStoreError):
            plan.unit(index)
    _look(layout)


def _look(layout: Layout) -> None:
    """Everything that `status` looks at."""
    for plan in paths.Layout(layout.root).plans.iterdir():
        Observer(layout).newest(plan.name)


def _read_round(layout: Layout, path: Path) -> None:
    plan, ref = path.parents[2].name, PassRef(path.parents[2].name, int(path.parents[1].name))
    _look(layout)
    read_round(layout, ref, read_plan(layout, plan), int(path.stem))


def _read_ledger(layout: Layout, path: Path) -> None:
    folder = PassFolder(path.parents[1])
    for number in list_rounds(folder):
        for ledger in read_ledgers(folder, number):
            [outcome.key for outcome in ledger.outcomes]


def _read_claim(layout: Layout, path: Path) -> None:
    claims = Claims(layout, PassFolder(path.parents[1]), "0" * 32, Watch(layout))
    name = paths.parse_claim(path.name)
    assert isinstance(name, ClaimName)
    claims.life(name)
    claims.judge({(name.recipe, name.first): name})


def _read_done(layout: Layout, path: Path) -> None:
    plan = path.parents[1].name
    for number in list_passes(layout, plan):
        read_done(layout, PassRef(plan, number))
    _look(layout)


def _read_worker(layout: Layout, path: Path) -> None:
    worker = path.stem
    read_heartbeat(layout, worker)
    watch = Watch(layout)
    watch.life_of(worker)
    watch.has_died(worker)
    watch.last_heartbeat(worker)
    _look(layout)


def _read_recipe(layout: Layout, path: Path) -> None:
    body = read_record(path, "cachestore-recipe", 1)
    with suppress(KeyError, TypeError, ValueError):
        str(Recipe.from_json(body).fingerprint)


def _read_index(layout: Layout, path: Path) -> None:
    name = paths.parse_index(path.name)
    assert isinstance(name, IndexName)
    check(layout, name)


PARSERS: Final[Mapping[str, Callable[[Layout, Path], object]]] = {
    "marker": lambda layout, _path: open_layout(layout),
    "segment": _read_segment,
    "index": _read_index,
    "catalog": _read_catalog,
    "changes": _read_changes,
    "plan": _read_plan,
    "round": _read_round,
    "claim": _read_claim,
    "ledger": _read_ledger,
    "done": _read_done,
    "worker": _read_worker,
    "recipe": _read_recipe,
    "digests": lambda layout, _path: load_digests(layout, "host"),
    "marked": lambda _layout, path: read_marked.__wrapped__(path),
    "lost": lambda _layout, path: read_lost(path),
}


def parse(shelf: Shelf, number: int, seed: int) -> Iterator[str]:
    """Write one input and parse it; what did not hold."""
    kind, name, raw = made(shelf, number, seed)
    path = shelf.layout.root / name
    path.chmod(0o644)
    path.write_bytes(raw)
    began = time.monotonic()
    try:
        PARSERS[kind](shelf.layout, path)
    except (CacheStoreError, FileNotFoundError):
        pass
    except MemoryError:
        yield f"{number}: {kind} {name} wants more than {BYTES} bytes"
    except Exception as error:  # noqa: BLE001 - whatever else comes is what is looked for
        yield f"{number}: {kind} {name}: {type(error).__name__}: {error!s:.200}"
    if time.monotonic() - began > SECONDS:
        yield f"{number}: {kind} {name} took {time.monotonic() - began:.1f} s"
    path.write_bytes(shelf.originals[name])
    yield from _parse_names(random.Random(f"{seed} {number}"))


def _parse_names(draw: random.Random) -> Iterator[str]:
    """One name that may be anything, given to every parser of names and of keys."""
    letters = "0123456789abcdef.-%\0/\x1b\ud800²\u0661 lmdbsafetnorj"
    name = "".join(draw.choices(letters, k=draw.choice((0, 1, 5, 32, 37, 44, 300))))
    for function in (*PARSERS_OF_NAMES, _key_or_not):
        try:
            function(name)
        except Exception as error:  # noqa: BLE001 - as above
            yield f"{function.__name__}({name!r}): {type(error).__name__}"


def _key_or_not(text: str) -> None:
    with suppress(CacheStoreError):
        Key.parse(text)


def opened_outside() -> list[str]:
    """Fills, from now on, with what this process opens or lists of the paths that forged files name."""
    found: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.listdir"} and "passwd" in str(arguments[0]):
            found.append(f"{event} of {arguments[0]}")

    sys.addaudithook(watch)
    return found


def judge(shelf_of: Path, seed: int, numbers: range) -> list[str]:
    """Parse inputs in a copy of the shelf, with little memory."""
    outside = opened_outside()
    with scratch() as folder:
        shutil.copytree(shelf_of, folder / "store")
        files = files_of(folder / "store")
        originals = {name: (folder / "store" / name).read_bytes() for names in files.values() for name in names}
        shelf = Shelf(Layout(folder / "store"), originals, {kind: names for kind, names in files.items() if names})
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + BYTES, resource.RLIM_INFINITY))
        return [violation for number in numbers for violation in parse(shelf, number, seed)] + outside


def address_space() -> int:
    """Bytes of address space that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def parsed(store: Path, count: int, seed: int) -> list[str]:
    """What did not hold of so many inputs, each kind of file in turn; `store` is copied for each process."""
    batches = [range(start, min(count, start + A_PROCESS)) for start in range(0, count, A_PROCESS)]
    return [violation for _batch, found in judged(batches, partial(judge, store, seed)) for violation in found]


def play(count: int, seed: int) -> Outcome:
    """So many inputs made of one template's files."""
    with scratch() as folder:
        found = parsed(build_template(folder).store, count, seed)
        return Outcome(count, tuple(found), (f"kinds: {', '.join(PARSERS)}",))


CAMPAIGNS: Final = {"fuzz": Campaign(play, 100_000)}
