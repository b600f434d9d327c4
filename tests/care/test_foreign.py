"""Files that cachestore did not make: they are reported and left alone."""

import os
import time
from pathlib import Path

import pytest

from cachestore.care import foreign
from cachestore.care.foreign import STALE_SECONDS
from cachestore.care.verify import verify
from tests.store.stores import found, segment_of, where

NAMES = (
    "notes.txt",
    "index/a.lmdb",
    "index/1-x.lmdb-lock",
    "recipes/readme",
    "plans/readme",
    "catalogs/.hidden",
    "catalogs/train/01.safetensors",
    "segments/readme",
    "segments/ab/x.safetensors",
    "workers/readme",
    "tmp/readme",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_ours_is_foreign_and_harmless(full, name):
    path = full.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    report = verify(full.root)
    assert report.ok
    assert [(finding.kind, finding.path) for finding in report.findings] == [("foreign-file", name)]


def test_a_segment_in_another_segments_folder_is_foreign(full):
    path, _entry = segment_of(full, 3)
    folder = full.segments / ("00" if path.parent.name != "00" else "01")
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)
    assert ("foreign-file", where(full, folder / path.name), None, None) in found(full)


@pytest.mark.parametrize("folder", ["", "catalogs", "segments", "recipes", "tmp"])
def test_a_name_that_is_not_utf8_is_foreign_and_can_be_printed(full, folder):
    Path(os.fsdecode(bytes(full.root / folder) + b"/\xff\x1b[31m")).touch()
    report = verify(full.root)
    assert report.ok
    assert [finding.kind for finding in report.findings] == ["foreign-file"]
    assert report.findings[0].message.isascii()
    assert report.findings[0].message.isprintable()


def test_the_folders_of_a_store_are_its_own(full):
    for folder in ("locks", "quarantine", "digests", "workers", "plans"):
        (full.root / folder).mkdir(exist_ok=True)
    (full.segments / "ab").mkdir(exist_ok=True)
    (full.root / "locks" / "commit.lock").touch()
    (full.workers / f"{'0' * 32}.lock").touch()
    (full.workers / f"{'0' * 32}.json").touch()
    (full.plans / ("0" * 32)).mkdir()
    assert found(full) == set()


def test_a_temporary_file_is_stale_after_an_hour(full):
    fresh, stale = full.new_temporary(), full.new_temporary()
    fresh.touch()
    stale.touch()
    os.utime(stale, (time.time(), time.time() - STALE_SECONDS - 60))
    assert found(full) == {("stale-temp", where(full, stale), None, None)}


def test_a_temporary_file_that_goes_while_verify_runs_is_fine(full, monkeypatch):
    real = foreign.names_in
    monkeypatch.setattr(
        foreign,
        "names_in",
        lambda folder, **options: (
            [*real(folder), *[f"{'0' * 32}.tmp"] * (folder == full.temporary)] if not options else real(folder, **options)
        ),
    )
    assert found(full) == set()
