"""Dying at every failpoint: what was acknowledged stays, what was not is absent or whole, and the same command goes on from there."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cachestore
from cachestore.care.collect import collect, compact
from cachestore.care.gc import mark
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.keys import key
from cachestore.files import failpoints
from cachestore.files.failpoints import VARIABLE, failpoint
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.format.entry import make_entry
from cachestore.store.format.findings import HARMLESS
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import create_store
from tests.fakes import publish_catalog
from tests.shares import share

WRITE = """
from cachestore.core.keys import Recipe, key
from cachestore.store.write.append import Appender
from cachestore.store.format.catalog import Catalog, Cell, make_column
from tests.fakes import publish_catalog
from cachestore.store.write.commit import commit, create_store, publish_recipe

def value(n):
    return {"a": ("U8", (5,), bytes([n]) * 5), "b": ("F32", (2,), bytes([n]) * 8)}

def work(root, say):
    layout = create_store(root)
    recipe = Recipe("own", {"x": 1})
    publish_recipe(layout, recipe)
    appender = Appender(layout)
    for n in range(0, 6, 2):
        appender.put(key(str(n)), value(n), {"n": n})
        appender.put(key(str(n + 1)), value(n + 1), {})
        appender.close_segment()
        say(n)
        if n != 2:
            commit(layout).close()
    cells = [[Cell(key(str(n)))] for n in range(6)]
    column = make_column("own", "caption", recipe.fingerprint, {}, cells)
    ids = [str(n) for n in range(6)]
    publish_catalog(layout, Catalog("train", {}, {recipe.fingerprint: recipe}, ids, list(range(7)), ids, {}, ["{}"] * 6, (column,)))
    say(100)
"""
"""Three segments of two entries, an index after the first and the last, then a catalog; says what was acknowledged."""

REPAIR = """
from cachestore.care.repair import repair

def work(root, say):
    repair(root)
    say(100)
"""

TIDY = """
from cachestore.care.collect import collect, compact

def work(root, say):
    compact(root)
    say(1)
    collect(root, apply=True, grace_seconds=0)
    collect(root, apply=True, grace_seconds=0)
    say(100)
"""

DRIVER = """
import json, os, shutil, signal, sys
from pathlib import Path

os.fsync = os.fstat  # a kill takes no page of the kernel's, so waiting for the disk would show nothing more
point, folder, template = sys.argv[1:]
lives = []
for count in range(1, 100):
    root = Path(folder) / str(count)
    if template:
        shutil.copytree(template, root)
    said, saying = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["CACHESTORE_FAILPOINT"] = f"{point}:{count}"
        work(root, lambda n: os.write(saying, b"%d " % n))
        os._exit(0)
    os.close(saying)
    status = os.waitpid(child, 0)[1]
    assert status in {0, signal.SIGKILL}
    if status == 0:
        break
    lives.append([str(root), [int(word) for word in os.read(said, 1000).split()]])
    os.close(said)
print(json.dumps(lives))
"""
"""Runs `work` in a child that is killed at the n-th passing of a failpoint, for every n there is; prints each store and what was said."""


def points_in(*rooms):
    """The named failpoints of some rooms, found in their source, so that a new one is tested without being listed here."""
    root = Path(cachestore.__path__[0])
    text = "".join(file.read_text() for room in rooms for file in (root / room).glob("*.py"))
    return sorted(set(re.findall(r'failpoint\("([a-z_.]+)"\)', text)))


def lives(program, folder, point, template=""):
    """The stores after runs killed at the n-th passing of a failpoint, for every n that there is, and what each run had said."""
    folder.mkdir()
    command = [sys.executable, "-c", program + DRIVER, point, str(folder), str(template)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found, f"{point} is never reached: {finished.stderr}"
    return [(Path(root), reported) for root, reported in found]


WRITER = {}
exec(WRITE, WRITER)


def write(root):
    WRITER["work"](root, lambda _reported: None)


def values_in(root, numbers):
    with Reader(root) as reader:
        found = reader.get_raw([key(str(n)) for n in numbers])
    return [{name: (dtype, shape, bytes(raw)) for name, (dtype, shape, raw) in each.items()} for each in found]


def values_of(numbers):
    return [WRITER["value"](n) for n in numbers]


@pytest.mark.processes
@pytest.mark.parametrize(
    "point", [point for point in points_in("files", "storage") if not point.startswith(("repair.", "gc.", "compact."))]
)
def test_after_dying_while_writing_everything_acknowledged_is_there_and_the_same_command_goes_on(tmp_path, point):
    for root, reported in lives(WRITE, tmp_path / "lives", point):
        acknowledged = [m for n in reported if n < 100 for m in (n, n + 1)]
        if (root / "cachestore.json").exists():
            assert {finding.kind for finding in verify(root).findings} <= HARMLESS
            assert values_in(root, acknowledged) == values_of(acknowledged)
        else:
            assert acknowledged == []
        write(root)
        assert verify(root).ok
        assert values_in(root, range(6)) == values_of(range(6))


@pytest.mark.processes
@pytest.mark.parametrize(
    "point", [point for point in points_in("files", "storage") if point.startswith(("repair.", "publish.", "segment."))]
)
def test_after_dying_while_repairing_no_valid_entry_is_lost_and_repair_goes_on(tmp_path, point):
    template = tmp_path / "template"
    write(template)
    with Reader(template) as reader:
        [[damaged]] = reader.snapshot.find([key("1")])
        path = reader.layout.segment(damaged.segment.digest)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(damaged.offset)
        file.write(b"\xff")
    valid = [0, 2, 3, 4, 5]
    for root, _reported in lives(REPAIR, tmp_path / "lives", point, template):
        assert values_in(root, valid) == values_of(valid)
        repair(root)
        assert values_in(root, valid) == values_of(valid)
        left = [finding for finding in verify(root).findings if finding.kind not in HARMLESS]
        assert {(finding.kind, finding.key) for finding in left} == {("missing-entry", str(key("1")))}


@pytest.mark.processes
@pytest.mark.parametrize(
    "point",
    share(
        [point for point in points_in("files", "storage") if point.startswith(("gc.", "compact.", "commit.", "publish.", "segment."))], 3
    ),
)
def test_after_dying_while_tidying_up_everything_needed_is_there_and_the_same_command_goes_on(tmp_path, point):
    template = tmp_path / "template"
    layout = create_store(template)
    write(template)
    for n in range(6, 10):  # what precomputes made, of which nothing names 8 and 9
        entry = make_entry(key(str(n)), WRITER["value"](n), {"input_digest": ""})
        publish_segment(layout, [entry], origin=f"{n:032x}/1")
    column = make_column("own", "caption", "f" * 64, {}, [[Cell(key("6")), Cell(key("7"))]])
    publish_catalog(layout, Catalog("other", {}, {}, ["a"], [0, 2], ["x", "y"], {}, ["{}"], (column,)))
    mark(layout, [publish_segment(layout, [make_entry(key("8"), WRITER["value"](8), {"input_digest": ""})], origin="a" * 32 + "/1").digest])
    taken_back = publish_segment(layout, [make_entry(key("7"), WRITER["value"](7), {"input_digest": ""})], origin="b" * 32 + "/1")
    layout.segment(next(d for d in holding(layout, "7") if d != taken_back.digest)).unlink()
    mark(layout, [taken_back.digest])  # it was marked before the catalog stood
    for root, _reported in lives(TIDY, tmp_path / "lives", point, template):
        assert values_in(root, range(8)) == values_of(range(8))
        assert {finding.kind for finding in verify(root).findings} <= HARMLESS
        for _again in range(2):
            compact(root)
            collect(root, apply=True, grace_seconds=0)
        assert values_in(root, range(8)) == values_of(range(8))
        assert verify(root).ok
        with Reader(root) as reader:
            assert set(reader.keys()) == {key(str(n)) for n in range(8)}


def holding(layout, name):
    with Reader(layout.root) as reader:
        return [location.segment.digest for location in reader.snapshot.find([key(name)])[0]]


def test_a_catalog_that_was_published_is_there(tmp_path):
    [(root, reported)] = lives(WRITE, tmp_path / "lives", "catalog.after_publish")
    assert reported == [0, 2, 4]
    with Reader(root) as reader:
        catalog = newest_catalog(reader.layout, "train")
    assert catalog is not None
    assert list(catalog.ids) == [str(n) for n in range(6)]


def test_a_failpoint_that_is_not_named_does_nothing(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    failpoint("here")
    monkeypatch.setenv(VARIABLE, "elsewhere")
    failpoint("here")


def test_a_failpoint_counts_its_passings_and_cannot_be_caught(monkeypatch):
    killed = []
    monkeypatch.setattr(failpoints, "_reached", {})
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setenv(VARIABLE, "here:2")
    for expected in (0, 1, 2):
        failpoint("here")
        assert killed == [(os.getpid(), signal.SIGKILL)] * expected


@pytest.mark.processes
def test_a_failpoint_kills_at_the_passing_that_is_asked_for():
    program = (
        "import sys\nfrom cachestore.files.failpoints import failpoint\nfor n in range(5):\n    print(n, flush=True)\n    failpoint('here')"
    )
    for wanted, reported in (("here", 1), ("here:1", 1), ("here:3", 3)):
        finished = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=30, check=False, env=os.environ | {VARIABLE: wanted}
        )
        assert finished.returncode == -signal.SIGKILL
        assert len(finished.stdout.split()) == reported
