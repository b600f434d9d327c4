"""Exports that are killed: no file is half-written under its final name, and the same command finishes as if nothing had happened."""

import json
import os
import shutil
import signal
import time
from itertools import count, product

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.files.checksum import digest_of
from cachestore.files.paths import Layout
from cachestore.store.read.rows import newest_catalog
from cachestore.trainers.export_target import NOTE
from cachestore.trainers.webdataset import exporting as tar_exporting
from tests.torture.test_calls import in_a_fork
from tests.torture.watching import watch
from tests.train.stores import Row, make_store, recipes

pytestmark = pytest.mark.processes

FORMATS = ("webdataset", "sd-scripts")
ROWS, MORE = [[Row(f"{n}.png", (f"caption {n}",), (64, 64), size=(64, 64), crop=(0, 0, 64, 64)) for n in some] for some in ((0, 1), (2,))]


@pytest.fixture(autouse=True)
def _small_tars(monkeypatch):
    monkeypatch.setattr(tar_exporting, "TAR_BYTES", 1)


def export(store, form, out):
    return main(["export", str(store), "--format", form, "-o", str(out), *([] if form == "webdataset" else ["--family", "sdxl"])])


def export_and_die(store, form, out, kill, number):
    """Export in another process that is killed at a call that it makes in the folder; returns the signal or exit code that ended it."""
    numbers = count()

    def around(call, real):
        if not (call.name == "write" if kill == "within" else call.changes) or next(numbers) != number:
            return real()
        try:
            if kill != "before":
                real(*([bytes(call.data)[: len(call.data) // 2]] if kill == "within" else []))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def act():
        watch(out, around)
        return export(store, form, out)

    return in_a_fork(act)


def files(folder):
    """The bytes of each file under a final name."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    left = [name for name in found if name.endswith(".cachestore-tmp")]
    assert len(left) <= 1, "one export writes one file at a time"
    return {name: data for name, data in found.items() if name not in left}


def digest_of_import(folder, store):
    assert cs.import_cache("webdataset", folder, store=store).complete
    catalog = newest_catalog(Layout(store), "train")
    assert catalog is not None
    return catalog.digest


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """An earlier and a later store whose data sets have the same samples with other values; the earlier one has one more."""
    folder = tmp_path_factory.mktemp("stores")
    made = recipes(stored="sample", scaling_factor=0.13025, shift_factor=None)
    earlier = make_store(folder / "earlier", [*ROWS, *MORE], made, dtype=np.float16)
    return {"earlier": earlier, "later": make_store(folder / "later", ROWS, made)}


CASES = list(product(FORMATS, (True, False), ("before", "within", "after")))
SOME = [(*case, 3 if "within" in case else 11) for case in CASES if case[1]]


@pytest.mark.parametrize(
    ("form", "is_over_another", "kill", "every"), [*SOME, *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in CASES)]
)
def test_an_export_that_is_killed_leaves_whole_files_and_the_same_command_finishes(tmp_path, stores, form, is_over_another, kill, every):
    template, undisturbed = tmp_path / "template", tmp_path / "undisturbed"
    template.mkdir()
    if is_over_another:
        assert export(stores["earlier"], form, template) == OK
    shutil.copytree(template, undisturbed)
    assert export(stores["later"], form, undisturbed) == OK
    before, wanted = files(template), files(undisturbed)
    digest = digest_of_import(undisturbed, tmp_path / "imported") if form == "webdataset" else ""
    deaths = 0
    for number in count(step=every):
        out = tmp_path / f"{number}"
        shutil.copytree(template, out)
        ended = export_and_die(stores["later"], form, out, kill, number)
        if ended == OK:
            break
        assert ended == signal.SIGKILL
        deaths += 1
        there, whole = files(out), {*before.items(), *wanted.items()}
        assert {(name, data) for name, data in there.items() if name != NOTE} <= whole
        note = json.loads(there[NOTE])["files"] if NOTE in there else {}
        assert {(name, digest) for name, (digest, _form) in note.items()} <= {(name, digest_of([data])) for name, data in whole}, (
            "nothing of somebody else is called ours"
        )
        assert export(stores["later"], form, out) == OK
        assert files(out) == wanted
        assert not digest or digest_of_import(out, tmp_path / f"{number} imported") == digest
    assert deaths > 1


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_removes_what_killed_ones_left_a_day_ago_and_nothing_else(tmp_path, stores, form):
    out = tmp_path / "out"
    assert export_and_die(stores["later"], form, out, "within", 0) == signal.SIGKILL
    [left] = out.iterdir()
    others = [out / ".old.tmp", out / ".new.cachestore-tmp"]
    for path in others:
        path.write_bytes(b"somebody's")
    for path in (left, others[0]):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    assert export(stores["later"], form, out) == OK
    assert not left.exists()
    assert all(path.exists() for path in others)
