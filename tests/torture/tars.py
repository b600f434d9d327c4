"""Exchanged tars from somebody hostile: damaged at random, or forged with right checksums and digests.

Each import ends with a report or with a sentence that names the tar. Nothing appears beside the store. What was damaged at random is
refused, fails, or is what was exported; what was forged can be read, or ends in an error of ours.
"""

import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import cachestore as cs
from cachestore.core.errors import CacheStoreError
from tests.torture.campaign import Campaign, Outcome, judged, scratch
from tests.torture.damage import changed
from tests.torture.fuzz import mutated
from tests.train.stores import Row, make_store, recipes

NAME: Final = "train-000000.tar"
DAMAGE: Final = ("flip", "flips", "zero", "noise", "cut", "empty", "grow")
FORGERIES: Final = ("json", "tensors", "headers", "properties")
A_PROCESS: Final = 250
_BLOCK: Final = 512
ROWS: Final = (
    Row("a/one.png", ("a red fox", "snow"), controls=((64, 48),), extras='{"weight":0.5}'),
    Row("two.png", ("snow",), (48, 64)),
    Row("a prompt", ("a prompt",), None),
)
Entries = Mapping[str, Mapping[str, tuple[str, tuple[int, ...], bytes]]]


def exported(folder: Path) -> tuple[bytes, Entries]:
    """A tar of a small data set, and the entries that are in it."""
    store = make_store(folder / "exported store", ROWS, recipes())
    cs.export_cache(store, format="webdataset", folder=folder / "exported")
    return (folder / "exported" / NAME).read_bytes(), entries_of(store)


def entries_of(store: Path) -> Entries:
    """Every entry of a store, by key and name."""
    with cs.open(store) as reader:
        keys = sorted(reader.keys())
        found = reader.get_raw(keys)
    return {
        str(key): {name: (dtype, shape, bytes(buffer)) for name, (dtype, shape, buffer) in tensors.items()}
        for key, tensors in zip(keys, found, strict=True)
    }


def forged(raw: bytes, way: str, draw: random.Random) -> bytes:
    """The tar with something else in it, by somebody who knows the format."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        members = {one.name: tar.extractfile(one).read() for one in tar}  # pyright: ignore[reportOptionalMemberAccess]
    if way in {"json", "tensors"}:
        key = draw.choice([name for name in members if name.endswith(".json")]).removesuffix(".json")
        body = json.loads(members[f"{key}.json"])
        del body["sha256"]["json"]
        if way == "tensors":
            data = members[f"{key}.safetensors"]
            length = int.from_bytes(data[:8], "little")
            header = _as_json(mutated(json.loads(data[8 : 8 + length]), draw))
            members[f"{key}.safetensors"] = len(header).to_bytes(8, "little") + header + data[8 + length :]
            body["sha256"]["safetensors"] = hashlib.sha256(members[f"{key}.safetensors"]).hexdigest()
        else:
            body = mutated(body, draw) if draw.random() < 0.5 else _mutated_deeply(body, draw)
        members[f"{key}.json"] = _as_json(body)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if way == "properties" and draw.random() < 0.3:
                names = ("path", "size", "linkpath", "mtime", "GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.realsize", "comment")
                values = ("../../x.json", "/x.json", "-1", "0", str(2**70), "1,2,3", "a\0b", "x" * draw.choice((10, 5000, 2 << 20)))
                member.pax_headers = {draw.choice(names): draw.choice(values) for _n in range(draw.randint(1, 3))}
            tar.addfile(member, io.BytesIO(data))
    return _with_header(made.getvalue(), draw) if way == "headers" else made.getvalue()


def _mutated_deeply(body: Any, draw: random.Random) -> Any:
    """The JSON with something else in the recipes or values: they lie so deep that the rest is hit first."""
    name = draw.choice(("recipes", "values", "images", "columns", "texts", "captions"))
    return {**body, name: mutated(body.get(name, {}), draw)}


def _as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 100_000


def _with_header(raw: bytes, draw: random.Random) -> bytes:
    """The tar with another field in one of its members' headers, under the right checksum."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        at = draw.choice([one.offset for one in tar])
    header = bytearray(raw[at : at + _BLOCK])
    start, size, values = draw.choice(
        (
            (0, 100, (b"../../x.json", b"/x.json", b"00000000.json", b"a\\b.json", b"", b"\xff\xfe.json", b"x" * 100)),
            (124, 12, (b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"-0000000001\0", b"00000000000\0", b"99999999999\0", b"")),
            (156, 1, tuple(bytes([one]) for one in b"0123456789gxLKSDVMN\0\xff")),
            (157, 100, (b"/etc/passwd", b"../x")),
            (257, 8, (b"ustar  \0", b"ustar\x0000", b"", b"GNUtar ")),
            (345, 155, (b"../..", b"/", b"x" * 155)),
        )
    )
    header[start : start + size] = draw.choice(values).ljust(size, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return raw[:at] + bytes(header) + raw[at + _BLOCK :]


def judge(raw: bytes, before: Entries, seed: int, numbers: range) -> list[str]:
    """Import so many hostile tars; what did not hold."""
    found: list[str] = []
    with scratch() as folder:
        for number in numbers:
            draw = random.Random(f"tars {seed} {number}")
            way = draw.choice((*DAMAGE, *FORGERIES, *FORGERIES))
            other = forged(raw, way, draw) if way in FORGERIES else changed(raw, way, draw)
            found += [f"{number}: {way}: {one}" for one in imported(folder, other, before if way in DAMAGE else None)]
    return found


def imported(folder: Path, raw: bytes, before: Entries | None) -> Iterator[str]:
    """Import one tar, and read the data set that comes of it; what did not hold. `before` is what its entries must be."""
    tars, store = folder / "in" / "tars", folder / "in" / "store"
    tars.mkdir(parents=True)
    (tars / NAME).write_bytes(raw)
    try:
        reasons = [str(one["reason"]) for one in cs.import_cache("webdataset", tars, store=store).report.failures]
        yield from _read(store, before)
    except CacheStoreError as error:
        reasons = [str(error)]
        if store.exists():
            yield f"it was refused after a store was made: {error!s:.200}"
    except Exception as error:  # noqa: BLE001 - whatever else comes is what is looked for
        reasons = []
        yield f"{type(error).__name__}: {error!s:.200}"
    yield from (f"the sentence names no file: {reason:.200}" for reason in reasons if NAME not in reason and str(tars) not in reason)
    others = {path.name for path in (*folder.iterdir(), *(folder / "in").iterdir(), *tars.iterdir())} - {"in", "tars", "store", NAME}
    yield from (f"it wrote {other}" for other in others)
    shutil.rmtree(folder / "in")


def _read(store: Path, before: Entries | None) -> Iterator[str]:
    if before is not None:
        yield from (f"entry {key} is another" for key, tensors in entries_of(store).items() if before.get(key) != tensors)
    try:
        data = cs.CachedDataset(store)
        for index in range(len(data)):
            data.read_batch([index])
    except CacheStoreError:
        return


def play(count: int, seed: int) -> Outcome:
    """So many hostile tars."""
    batches = [range(start, min(count, start + A_PROCESS)) for start in range(0, count, A_PROCESS)]
    with scratch() as folder:
        raw, before = exported(folder)
        found = [one for _batch, those in judged(batches, partial(judge, raw, before, seed), seconds=600) for one in those]
    return Outcome(count, tuple(found))


CAMPAIGNS: Final = {"tars": Campaign(play, 20_000)}
