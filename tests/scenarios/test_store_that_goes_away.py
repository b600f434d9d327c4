"""A store whose folder goes away, or gives way to another store, while it is open: nothing is acknowledged, nothing looks empty."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import cachestore as cs
from cachestore.care import collect as upkeep
from cachestore.care import doctor
from cachestore.files import publish as publishing
from cachestore.files.marker import check_for_reading, check_for_writing
from cachestore.files.removal import remove_file
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start import ranks as run
from cachestore.store.read.snapshot import load_snapshot, open_layout
from tests.fakes import ROOT

KEYS = [cs.key("gone", str(n)) for n in range(4)]
VALUE = {"value": np.arange(8)}
GONE = r"is not there any more \(was its disk unmounted, or the folder moved\?\)"
ANOTHER = r"is not the one that was opened"


def encode(batch):
    return {key: VALUE for key, _item in batch}


def put(store, key):
    with store.writer() as writer:
        writer.put(key, VALUE)


def fill(store, key):
    cs.fill(store, [(key, 0)], encode)


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def make(path, *keys):
    with cs.open(path, mode="a") as store:
        for key in keys:
            put(store, key)
        store.commit()
    return path


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "store", KEYS[0])


@pytest.fixture(params=["gone", "an empty folder", "another store"])
def leave(request, root):
    """Takes the store away from its path; what is reported then."""

    def go():
        root.rename(root.with_name("kept"))
        if request.param == "an empty folder":
            root.mkdir()
        if request.param == "another store":
            make(root, KEYS[3])
        return ANOTHER if request.param == "another store" else GONE

    return go


def come_back(root):
    if root.exists():
        root.rename(root.with_name("strange"))
    root.with_name("kept").rename(root)


class TestWriting:
    @pytest.mark.parametrize("write", [put, fill])
    def test_nothing_is_acknowledged_and_nothing_made_there(self, root, leave, write):
        with cs.open(root, mode="a") as store:
            reported = leave()
            before = files_in(root)
            with pytest.raises((cs.WriteFailed, cs.ReadFailed), match=reported):
                write(store, KEYS[1])
            assert (files_in(root), root.exists()) == (before, reported == ANOTHER or root.is_dir())

    @pytest.mark.parametrize("write", [put, fill])
    def test_the_handle_goes_on_when_the_store_is_back(self, root, leave, write):
        with cs.open(root, mode="a") as store:
            leave()
            with pytest.raises((cs.WriteFailed, cs.ReadFailed)):
                write(store, KEYS[1])
            come_back(root)
            write(store, KEYS[1])
            assert store.missing(KEYS[:2]) == []
        assert cs.verify(root).ok

    def test_a_file_that_was_published_just_as_the_store_went_away_is_not_acknowledged(self, root, leave, monkeypatch):
        link = publishing._link

        def link_then_leave(*given):
            published = link(*given)
            if not reported:
                reported.append("")
                reported.append(leave())
            return published

        reported = []
        with cs.open(root, mode="a") as store, monkeypatch.context() as patch:
            publishing.make_folder(store.layout, store.layout.recipes)
            patch.setattr(publishing, "_link", link_then_leave)
            with pytest.raises(cs.WriteFailed):
                publishing.publish(store.layout, store.layout.recipe("0" * 64), [b"x"])
        assert reported

    def test_a_file_that_went_to_another_store_that_was_there_for_a_moment_is_not_acknowledged(self, root, monkeypatch):
        with cs.open(root, mode="a") as store:
            root.rename(root.with_name("kept"))
            make(root, KEYS[3])
            other = store.layout.recipe("0" * 64)
            other.parent.mkdir(exist_ok=True)
            other.write_bytes(b"written in the other one")
            come_back(root)
            with pytest.raises(cs.WriteFailed, match=r"is not in the store that was opened"):
                check_for_writing(store.layout, other)

    def test_a_worker_shows_no_heartbeat_in_a_strange_store(self, root, leave):
        layout = open_layout(run.Layout.at(root))
        heartbeat = Heartbeat(layout, "", 0, "launch", 0, 1)
        publishing.make_folder(layout, layout.workers)
        heartbeat.write()
        reported = leave()
        before = files_in(root)
        with pytest.raises(cs.WriteFailed, match=reported):
            heartbeat.write()
        assert files_in(root) == before

    def test_nothing_is_removed_from_a_strange_store(self, root, leave):
        layout = open_layout(run.Layout.at(root))
        reported = leave()
        layout.quarantine.mkdir(parents=True, exist_ok=True)
        (layout.quarantine / "file").write_bytes(b"")
        with pytest.raises(cs.WriteFailed, match=reported):
            remove_file(layout, layout.quarantine / "file")
        assert (layout.quarantine / "file").exists()

    @pytest.mark.torch
    def test_a_read_through_publishes_nothing(self, root, leave):
        with cs.open(root, mode="a") as store:
            read = cs.ReadThrough(store, encode, on_miss="encode")
            read([(KEYS[1], 0)])
            with pytest.raises(cs.WriteFailed, match=leave()):
                read.close()
            come_back(root)
            read.close()
            assert store.missing([KEYS[1]]) == []

    def test_workers_that_are_started_make_no_other_store(self, root, leave, monkeypatch):
        layout = open_layout(run.Layout.at(root))
        for name, value in run.store_variables(layout).items():
            monkeypatch.setenv(name, value)
        assert run.open_for_pass(str(root)) == layout
        with pytest.raises(cs.ReadFailed, match=leave()):
            run.open_for_pass(str(root))
        assert run.open_for_pass(str(root.with_name("another"))).store_id != layout.store_id


class TestReading:
    def test_a_store_that_is_gone_does_not_look_empty(self, root, leave):
        with cs.open(root) as store:
            reported = leave()
            looks = (
                store.refresh,
                lambda: store.missing(KEYS),
                lambda: store.missing(KEYS[:1]),
                lambda: store.get(KEYS[0], as_numpy=True),
                lambda: store.get(KEYS[1], as_numpy=True),
                lambda: load_snapshot(store.layout),
            )
            for look in looks:
                with pytest.raises(cs.ReadFailed, match=reported):
                    look()
            come_back(root)
            assert store.get(KEYS[0], as_numpy=True)["value"].tolist() == VALUE["value"].tolist()

    def test_a_handle_on_its_way_to_another_process_refuses_another_store(self, root, leave):
        with cs.open(root) as store:
            packed = pickle.dumps(store)
        with pytest.raises(cs.ReadFailed, match=leave()):
            pickle.loads(packed)
        come_back(root)
        with pickle.loads(packed) as store:
            assert KEYS[0] in store

    @pytest.mark.parametrize(
        ("command", "step"),
        [
            (cs.verify, "cachestore.care.verify.load_snapshot"),
            (upkeep.collect, "cachestore.care.collect.survey"),
            (upkeep.compact, "cachestore.care.collect.choose_groups"),
            (lambda root: upkeep.drop(root, "train", apply=False), "cachestore.care.collect.plans_of"),
            (cs.repair, "cachestore.care.repair.good_entries"),
            (cs.repair, "cachestore.care.repair._find_damage"),
            (cs.stats, "cachestore.store.read.stats.list_data_sets"),
            (doctor.examine, "cachestore.care.doctor.lost_catalogs"),
        ],
        ids=["verify", "gc", "compact", "drop", "repair a segment", "repair", "stats", "doctor"],
    )
    def test_a_command_says_no_good_of_a_store_that_went_away_meanwhile(self, root, leave, command, step, monkeypatch):
        if step.endswith("good_entries"):
            damage(root)
        module, _, name = step.rpartition(".")
        really = getattr(sys.modules[module], name)
        reported = []

        def leave_first(*given, **named):
            if not reported:
                reported.append(leave())
            return really(*given, **named)

        monkeypatch.setattr(step, leave_first)
        with pytest.raises((cs.ReadFailed, cs.WriteFailed)):
            list(command(root))
        assert reported


def damage(root):
    """Spoil the one segment of a store."""
    [path] = run.Layout.at(root).segments.rglob("*.safetensors")
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0xFF
    path.write_bytes(raw)


def test_device_and_inode_play_no_part(root, tmp_path):
    """As on NFS and autofs: the same store, copied, is the same store."""
    with cs.open(root, mode="a") as store:
        root.rename(tmp_path / "before")
        subprocess.run(["cp", "-r", str(tmp_path / "before"), str(root)], check=True)
        put(store, KEYS[1])
        check_for_reading(store.layout)
        assert store.missing(KEYS[:2]) == []


def test_a_marker_made_anew_ends_handles_that_were_open_before(root):
    with cs.open(root, mode="a") as store:
        store.layout.marker.unlink()
        with pytest.raises(cs.WriteFailed, match=GONE):
            put(store, KEYS[1])
        assert cs.repair(root).rebuilt == ("cachestore.json",)
        with pytest.raises(cs.WriteFailed, match=r"is not the one that was opened .+ open this one"):
            put(store, KEYS[1])
    with cs.open(root, mode="a") as store:
        put(store, KEYS[1])
        assert store.missing(KEYS[:2]) == []


MOUNTED = """
import json, os, subprocess, sys
from pathlib import Path
import numpy as np
import cachestore as cs
folder, point = Path(sys.argv[1]), Path(sys.argv[2])
def mount(*words):
    subprocess.run(["mount", *words, str(point)], check=True)
def unmount():
    subprocess.run(["umount", "-l", str(point)], check=True)
def put(store, n):
    with store.writer() as writer:
        writer.put(cs.key("k", str(n)), {"value": np.arange(4)})
def refused(act):
    try:
        act()
    except (cs.WriteFailed, cs.ReadFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "acknowledged"
fill = lambda store, n: cs.fill(store, [(cs.key("k", str(n)), 0)], lambda batch: {key: {"value": np.arange(4)} for key, _ in batch})
reported = {}
mount("-t", "tmpfs", "none")
with cs.open(point / "cache", mode="a") as store:
    put(store, 0)
    unmount()
    reported["tmpfs, put"], reported["tmpfs, fill"] = refused(lambda: put(store, 1)), refused(lambda: fill(store, 2))
    reported["tmpfs, refresh"] = refused(store.refresh)
reported["made below the mount point"] = sorted(os.listdir(point))
mount("--bind", str(folder))
with cs.open(point / "cache", mode="a") as store:
    put(store, 0)
    unmount()
    reported["bind, put"] = refused(lambda: put(store, 1))
    mount("-t", "tmpfs", "none")
    with cs.open(point / "cache", mode="a") as other:
        put(other, 7)
    reported["another, put"], reported["another, fill"] = refused(lambda: put(store, 1)), refused(lambda: fill(store, 2))
    reported["another holds"] = len(cs.open(point / "cache"))
    unmount()
    mount("--bind", str(folder))
    put(store, 1), fill(store, 2)
    reported["back"] = [len(store), cs.verify(point / "cache").ok]
unmount()
reported["kept"] = len(cs.open(folder / "cache"))
print(json.dumps(reported))
"""


def can_mount():
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    ended = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False)
    return f"mounting is not allowed here: {ended.stderr.strip()}" if ended.returncode else ""


def test_a_disk_that_is_unmounted_takes_no_entry_below_its_mount_point(tmp_path):
    if why := can_mount():
        pytest.skip(why)
    folder, point = tmp_path / "disk", tmp_path / "point"
    folder.mkdir()
    point.mkdir()
    command = ["unshare", "-m", sys.executable, "-c", MOUNTED, str(folder), str(point)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=50)
    assert ended.returncode == 0, ended.stderr
    reported = json.loads(ended.stdout)
    for what in ("tmpfs, put", "tmpfs, fill", "bind, put"):
        assert reported[what].startswith("WriteFailed"), reported
        assert "is not there any more" in reported[what]
    assert reported["tmpfs, refresh"].startswith("ReadFailed")
    assert reported["made below the mount point"] == []
    for what in ("another, put", "another, fill"):
        assert reported[what].startswith("WriteFailed"), reported
        assert "is not the one that was opened" in reported[what]
    assert (reported["another holds"], reported["back"], reported["kept"]) == (1, [3, True], 3)
