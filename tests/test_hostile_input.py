"""What stands in a store that nobody of ours put there: links, fifos, files under others' names, forged records, other users."""

import ast
import json
import os
import shutil
import socket
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

import cachestore as cs
from cachestore.care.collect import collect, drop
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.cli import ERROR, OK, main
from cachestore.core.errors import BadInput, CorruptEntry, FormatError, NewerFormat, WriteFailed
from cachestore.core.tensors import to_numpy, to_raw
from cachestore.files.locks import locked
from cachestore.files.opening import names_in, read_whole
from cachestore.files.paths import ClaimName, Layout, LedgerName, Mode, PassFolder
from cachestore.files.publish import make_folder
from cachestore.files.records import decode_record, encode_record
from cachestore.files.table import digest_column, encode_table, number_column, read_table
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.ledgers import read_ledgers
from cachestore.jobs.share.passes import PassRef, join_pass, publish_done, read_done
from cachestore.jobs.share.plan import read_plan
from cachestore.jobs.share.workers import Heartbeat, Watch, read_heartbeat
from cachestore.store.format.catalog import list_generations, read_catalog
from cachestore.store.format.findings import HARMLESS
from cachestore.store.format.marked import list_marked
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.fakes import ROOT, FakeEncoder, captions, tells_of
from tests.store.stores import flip, key_of, put


def run(root, *texts, launch="launch"):
    """A pass over captions; returns what names it."""
    return PassRef(fakes.run(root, captions(*texts), FakeEncoder(), launch=launch).plan, 1)


def swap(one, other):
    for path in (one, other):
        path.chmod(0o644)
    mine, its = one.read_bytes(), other.read_bytes()
    one.write_bytes(its)
    other.write_bytes(mine)


def wrong(root):
    """(kind, path) of what verify finds, but for what is harmless."""
    return {(finding.kind, finding.path) for finding in verify(root).findings if finding.kind not in HARMLESS}


# Links, fifos, sockets


def test_a_linked_folder_is_refused_and_the_root_may_be_one(layout, tmp_path):
    put(layout, 1)
    (tmp_path / "elsewhere").symlink_to(layout.root)
    assert "cachestore.json" in names_in(tmp_path / "elsewhere", is_root=True)
    assert verify(tmp_path / "elsewhere").ok
    layout.segments.rename(tmp_path / "moved")
    layout.segments.symlink_to(tmp_path / "moved")
    for action in (cs.open, verify, repair, collect):
        with pytest.raises(FormatError, check=tells_of(layout.segments)):
            action(layout.root)


def test_what_lies_behind_a_linked_folder_of_segments_is_not_read(layout, tmp_path):
    path = layout.segment(put(layout, 1))
    path.parent.rename(tmp_path / "moved")
    path.parent.symlink_to(tmp_path / "moved")
    assert list_segments(layout) == frozenset()
    assert ("unreadable", f"segments/{path.parent.name}") in wrong(layout.root)
    assert repair(layout.root).quarantined == ()
    assert (tmp_path / "moved" / path.name).exists()


def test_writing_through_a_link_is_refused(layout, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    layout.segments.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteFailed, check=tells_of(layout.segments)):
        make_folder(layout, layout.segments / "ab")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_socket_is_no_regular_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
    with pytest.raises(FormatError, check=tells_of(tmp_path / "s")):
        read_whole(tmp_path / "s", limit_bytes=10)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).write_bytes(b"x")], ids=["fifo", "file"])
def test_what_stands_where_a_folder_should_be_is_reported_and_left_alone(layout, make):
    put(layout, 1)
    make(layout.root / "recipes")
    assert wrong(layout.root) == {("unreadable", "recipes")}
    repair(layout.root)
    assert os.path.lexists(layout.root / "recipes")


def test_foreign_files_in_plans_and_passes_are_listed_and_left_alone(root):
    folder = run(root, "a").folder(Layout(root))
    strange = [
        folder.root.parent / "notes",
        folder.root / "1.tmp",
        folder.claims / "x",
        folder.ledgers / "0.0.json",
        folder.rounds / "a.json",
    ]
    for path in strange:
        path.write_bytes(b"x")
    assert {finding.path for finding in verify(root).findings} == {str(path.relative_to(root)) for path in strange}
    repair(root)
    collect(root, apply=True, grace_seconds=0)
    assert all(path.exists() for path in strange)


# Files under the names of others


def test_a_flipped_version_is_damage_and_not_a_newer_version():
    raw = encode_record("thing", 1, {"a": 1})
    with pytest.raises(FormatError, check=lambda error: not isinstance(error, NewerFormat)):
        decode_record("thing", 1, raw.replace(b"thing/1", b"thing/3"), where=Path("f"))
    with pytest.raises(NewerFormat):
        decode_record("thing", 1, encode_record("thing", 3, {"a": 1}), where=Path("f"))


def test_a_table_whose_version_was_flipped_is_damaged_and_not_newer(tmp_path):
    for version, is_newer in ((1, False), (3, True)):
        raw = b"".join(map(bytes, encode_table("thing", version, {}, {})))
        (tmp_path / "t").write_bytes(raw.replace(b"thing/1", b"thing/3"))
        with pytest.raises(FormatError) as raised:
            read_table(tmp_path / "t", "thing", 1)
        assert isinstance(raised.value, NewerFormat) == is_newer


def test_a_catalog_under_the_name_of_another_generation_is_refused(root):
    for texts in (("a",), ("a", "b")):
        run(root, *texts, launch=str(texts))
    layout = Layout(root)
    one, two = (layout.catalog("train", n) for n in (1, 2))
    before = one.read_bytes(), two.read_bytes()
    swap(one, two)
    with pytest.raises(FormatError, check=tells_of("generation 2", "'train'")):
        read_catalog(one, generation=1)
    assert {kind for kind, _path in wrong(root)} == {"bad-catalog"}
    assert "train" in repair(root).rebuilt
    assert (one.read_bytes(), two.read_bytes()) == before
    assert wrong(root) == set()


def test_a_renamed_catalog_gets_its_own_name_back(root):
    run(root, "a")
    path = Layout(root).catalog("train", 1)
    before = path.read_bytes()
    path.rename(path.with_name("7.safetensors"))
    repair(root)
    assert list_generations(Layout(root), "train") == [1]
    assert path.read_bytes() == before


def test_both_generations_of_a_folder_that_is_gone_are_built_again(root):
    files = {"a.png": b"a", "b.png": b"b"}
    for names in (["a.png"], ["a.png", "b.png"]):
        fakes.run(root, fakes.pictures(*names), FakeEncoder("latents"), source=fakes.Pictures(files), launch=str(names))
    layout = Layout(root)
    before = layout.catalog("train", 2).read_bytes()
    shutil.rmtree(layout.catalog_folder("train"))
    repair(root)
    assert layout.catalog("train", 2).read_bytes() == before


def test_swapped_generations_come_back_without_their_plans(root):
    """Each is put aside before any is put back, as one holds the name of the other."""
    run(root, "a")
    run(root, "a", "b", launch="another")
    layout = Layout(root)
    paths = [layout.catalog("train", number) for number in (1, 2)]
    before = [path.read_bytes() for path in paths]
    swap(*paths)
    shutil.rmtree(layout.plans)
    assert repair(root).rebuilt.count("train") == 2
    assert [path.read_bytes() for path in paths] == before


def test_another_plan_under_its_name_is_refused_and_put_aside(root):
    one, two = run(root, "a"), run(root, "b", launch="another")
    layout = Layout(root)
    swap(layout.plan(one.plan), layout.plan(two.plan))
    with pytest.raises(FormatError, match="not the plan that its folder names"):
        read_plan(layout, one.plan)
    assert wrong(root) == {("bad-plan", f"plans/{ref.plan}/plan.safetensors") for ref in (one, two)}
    repair(root)
    assert wrong(root) == set()


def test_a_ledger_of_another_plan_is_left_out_and_its_end_ends_nothing(root):
    one, two = run(root, "a"), run(root, "b", launch="another")
    folders = [PassFolder(Layout(root).pass_folder(ref.plan, 1)) for ref in (one, two)]
    swap(*(folder.ledger(LedgerName(0, 0, 0, 0)) for folder in folders))
    assert [list(read_ledgers(folder, 0)) for folder in folders] == [[], []]
    layout = Layout(root)
    swap(one.folder(layout).done, two.folder(layout).done)
    assert (read_done(layout, one), read_done(layout, two)) == (None, None)


def test_the_heartbeat_of_another_worker_is_none(layout):
    with Heartbeat(layout, "", 0, "launch", 0, 1) as one, Heartbeat(layout, "", 0, "launch", 1, 2) as two:
        swap(layout.worker(one.worker), layout.worker(two.worker))
        assert (read_heartbeat(layout, one.worker), read_heartbeat(layout, two.worker)) == (None, None)


def test_a_list_of_what_goes_under_another_name_counts_for_nobody(root):
    run(root, "a")
    drop(root, "train")
    collect(root, apply=True)
    layout = Layout(root)
    [path] = layout.marked.iterdir()
    path.rename(layout.marked_list("0" * 32))
    assert list_marked(layout) == []
    assert wrong(root) == {("bad-list", f"marked/{'0' * 32}.json")}


def test_a_segment_that_lacks_what_the_index_says_is_corrupt(root):
    with cs.open(root, mode="a") as store:
        for n in range(2):
            with store.writer() as writer:
                writer.put(cs.key(str(n)), {"x": np.zeros(4)})
        store.commit()
        one, two = (Layout(root).segment(digest) for digest in sorted(list_segments(Layout(root))))
    with cs.open(root) as reader:
        swap(one, two)
        with pytest.raises(CorruptEntry, match="where it was published"):
            reader.describe(cs.key("0"))


# What records say


def forge(path, kind, **body):
    path.chmod(0o644) if path.exists() else None
    path.write_bytes(encode_record(kind, 1, body))


@pytest.mark.parametrize("worker", ["../../etc/passwd", "", None, 7, "a" * 31, "A" * 32, ["a" * 32]])
def test_a_claim_that_names_a_path_is_nobodys(layout, worker):
    folder = join_pass(layout, "0" * 32, "launch").folder(layout)
    name = ClaimName(0, 0, 0, 0, 0)
    forge(folder.claim(name), "cachestore-claim", worker=worker)
    assert Claims(layout, folder, "b" * 32, Watch(layout)).holder(name) is None


def test_a_heartbeat_without_what_others_look_at_is_none(layout):
    with Heartbeat(layout, "", 0, "launch", 0, 1) as heartbeat:
        body = json.loads(layout.worker(heartbeat.worker).read_bytes())["body"]
        shown = ({"units": {"text": [1]}}, {"units": [1]}, {"failures": [1]}, {"failures": "a"}, {"doing": 7}, {"failures_seen": True})
        for change in ({"plan": "../.."}, {"count": "1"}, {"pid": None}, {"updated": []}, *shown):
            forge(layout.worker(heartbeat.worker), "cachestore-worker", **{**body, **change})
            assert read_heartbeat(layout, heartbeat.worker) is None
        forge(layout.worker(heartbeat.worker), "cachestore-worker", **body)
        read = read_heartbeat(layout, heartbeat.worker)
        assert read is not None
        assert json.loads(json.dumps(read.as_json())) == body


@pytest.mark.parametrize("change", [{"name": 7}, {"name": "x" * 300}, {"generation": None}, {"encoded": "1"}, {"failures": [1]}])
def test_an_end_that_does_not_say_what_others_look_at_ends_nothing(layout, change):
    ref = join_pass(layout, "0" * 32, "launch")
    publish_done(layout, ref, fakes.ending(ref.plan), ["launch"])
    assert read_done(layout, ref) is not None
    forge(ref.folder(layout).done, "cachestore-done", report={**fakes.ending(ref.plan), **change}, launches=["launch"], request={})
    assert read_done(layout, ref) is None


STRINGS = {
    "no text": (b"\xff\xfe", [0, 2]),
    "an end behind the text": (b"ab", [0, 9]),
    "offsets that fall": (b"abc", [0, 3, 1, 3]),
    "a start that is not 0": (b"ab", [1, 2]),
    "a string that starts inside of a character": ("ü".encode(), [0, 1, 2]),
    "text without offsets": (b"ab", []),
}


@pytest.mark.parametrize("what", STRINGS)
def test_strings_that_do_not_fit_their_text_are_refused(tmp_path, what):
    text, offsets = STRINGS[what]
    columns = {"s.text": digest_column([text], width=len(text)), "s.offsets": number_column(offsets)}
    (tmp_path / "t").write_bytes(b"".join(map(bytes, encode_table("thing", 1, {}, columns))))
    with pytest.raises(FormatError, match="damaged strings"):
        read_table(tmp_path / "t", "thing", 1)


def test_bytes_of_a_bool_that_are_neither_0_nor_1_are_refused_on_both_ways():
    odd = np.array([0, 1, 7], np.uint8)
    with pytest.raises(BadInput, match="neither 0 nor 1"):
        to_raw({"flag": odd.view(np.bool_)})
    with pytest.raises(FormatError, match="neither 0 nor 1"):
        to_numpy({"flag": ("BOOL", (3,), odd.tobytes())})
    assert to_numpy({"flag": ("BOOL", (2,), b"\0\1")})["flag"].tolist() == [False, True]


# Repair of what stands beside the values


@pytest.mark.parametrize("mode", ["private", "group"])
def test_a_marker_that_is_damaged_is_made_anew_with_the_mode_that_the_folder_shows(tmp_path, mode):
    root = tmp_path / "store"
    cs.open(root, mode="a", access=mode).close()
    layout = Layout(root)
    put(layout, 1)
    layout.marker.write_bytes(b"{}")
    with pytest.raises(FormatError, match="cachestore repair"):
        cs.open(root)
    would = repair(root, dry_run=True)
    assert would.rebuilt == would.quarantined == ("cachestore.json",)
    report = repair(root)
    assert "cachestore.json" in report.rebuilt
    assert report.quarantined == ("cachestore.json",)
    with Reader(root) as reader:
        assert (reader.layout.mode, key_of(1) in reader) == (Mode(mode), True)


def test_a_marker_that_is_gone_is_made_anew_where_there_are_segments(root):
    layout = create_store(root)
    put(layout, 1)
    layout.marker.unlink()
    with pytest.raises(cs.StoreNotFound, match="cachestore repair"):
        verify(root)
    report = repair(root)
    assert "cachestore.json" in report.rebuilt
    assert report.quarantined == ()
    assert verify(root).ok


def test_a_marker_of_a_newer_version_is_never_made_anew(root):
    layout = create_store(root)
    newer = encode_record("cachestore-store", 2, {"mode": "private"})
    layout.marker.write_bytes(newer)
    with pytest.raises(NewerFormat):
        repair(root)
    assert layout.marker.read_bytes() == newer


def put_own(root, name):
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            writer.put(cs.key(name), {"x": np.arange(4)})
        store.commit()
    return cs.key(name)


def segment_of(root, key):
    with closing(load_snapshot(Layout(root))) as snapshot:
        [[location]] = snapshot.find([key])
    return Layout(root).segment(location.segment.digest), location


def test_own_values_of_a_segment_that_is_gone_stay_told_until_they_are_put_again(root):
    key = put_own(root, "own")
    path, _location = segment_of(root, key)
    path.unlink()
    for _time in range(2):
        assert [finding.key for finding in verify(root).findings if finding.kind == "missing-entry"] == [str(key)]
        repair(root)
    put_own(root, "own")
    assert verify(root).ok


def test_a_damaged_note_of_what_was_lost_is_gathered_again_from_the_segment_in_quarantine(root):
    path, location = segment_of(root, put_own(root, "own"))
    flip(path, location.offset)
    repair(root)
    [note] = Layout(root).quarantine.glob("*.lost.json")
    note.write_bytes(b"{")
    assert ("bad-list", f"quarantine/{note.name}") in wrong(root)
    repair(root)
    assert wrong(root) == {("missing-entry", f"quarantine/{note.name}")}


def test_gc_stops_while_a_plan_of_keys_stands_aside(root):
    with cs.open(root, mode="a") as store:
        wanted = [(cs.key("x"), "x")]

        def encode(batch):
            return {key: {"x": np.zeros(4)} for key, _item in batch}

        report = cs.fill(store, wanted, encode)
        path = Layout(root).plan(report.plan)
        flip(path, path.stat().st_size - 1)
        repair(root)
        with pytest.raises(FormatError, match="run the `fill`"):
            collect(root)
        cs.fill(store, wanted, encode)
    collect(root)


# Commands


def test_no_command_prints_but_through_what_escapes():
    """`say`, or `printable` around everything: names and texts in a store are anybody's."""
    own_ways = {"__init__", "progress"}
    for path in (path for path in (ROOT / "cachestore" / "cli").glob("*.py") if path.stem not in own_ways):
        name, tree = path.stem, ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"):
            inner = call.args[0] if call.args else None
            is_escaped = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "printable"
            counts_only = isinstance(inner, ast.JoinedStr) and name == "precompute"
            assert is_escaped or counts_only, f"{name}.py prints at line {call.lineno}"


def test_a_tensors_name_that_a_terminal_would_obey_is_escaped(root, capsys):
    from cachestore.store.format import entry, segment

    layout = create_store(root)
    made = entry.make_entry(key_of(1), {"x": ("U8", (1,), b"a")}, {})
    specs = entry.Specs(spec._replace(name="\x1b[31mred\n") for spec in made.specs)
    forged = entry.Entry(made.key, specs, made.buffers, made.meta, entry.checksum_of(made.key, specs, made.buffers))
    digest, chunks, _contents = segment.draft_of([forged]).build()
    make_folder(layout, layout.segment(digest).parent)
    layout.segment(digest).write_bytes(b"".join(map(bytes, chunks)))
    for command in (["ls", root], ["show", root, key_of(1)]):
        assert main([str(part) for part in command]) == OK
        assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_a_folder_that_may_not_be_listed_is_one_line_and_no_traceback(root, monkeypatch, capsys):
    create_store(root)
    real = os.listdir

    def refuse(path="."):
        if str(path).endswith("index"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert main(["stats", str(root)]) == ERROR
    assert capsys.readouterr().err.count("\n") == 1


# Users


def as_user(uid, gid, action):
    """Do something in a child that is another user; what went wrong there, in words."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        reported = ""
        try:
            os.umask(0o077)
            os.setgroups([gid])
            os.setgid(gid)
            os.setuid(uid)
            action()
        except BaseException as error:  # noqa: BLE001 - the boundary of a process: what went wrong is told to the test
            reported = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, reported.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        reported = file.read()
    os.waitpid(pid, 0)
    return reported


@pytest.fixture
def shared(tmp_path_factory):
    """A folder that every user may enter, made by one who may become another."""
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = tmp_path_factory.mktemp("shared")
    for path in (folder, *folder.parents):
        with suppress(OSError):
            if not path.stat().st_mode & 0o001 and path != Path("/"):
                path.chmod(path.stat().st_mode | 0o011)
    return folder


def work(root, name, access):
    def act():
        with cs.open(root, mode="a", access=access) as store:
            with store.writer() as writer:
                writer.put(cs.key(name), {"x": np.arange(4)})
            store.commit()
            with locked(store.layout.lock("commit"), seconds=1, mode=store.layout.mode):
                pass
        fakes.run(root, captions(name), FakeEncoder(), launch=name, listing_number=["one", "two", "three"].index(name) + 1)

    return act


def look(root, *names):
    def act():
        with cs.open(root) as store:
            assert all(store.get(cs.key(name), as_numpy=True)["x"].tolist() == [0, 1, 2, 3] for name in names)
        assert verify(root).ok

    return act


GROUP, OTHERS = 51_001, 51_999


@pytest.mark.processes
def test_two_users_of_a_group_share_a_store_and_a_third_one_reads_it(shared):
    os.chown(shared, 51_101, GROUP)
    shared.chmod(0o2775)
    root = shared / "store"
    assert as_user(51_101, GROUP, work(root, "one", "group")) == ""
    assert as_user(51_102, GROUP, work(root, "two", "group")) == ""
    assert {path.stat().st_gid for path in root.rglob("*")} == {GROUP}
    assert as_user(51_103, OTHERS, look(root, "one", "two")) == ""
    assert as_user(51_103, OTHERS, work(root, "three", "group")).startswith("WriteFailed")
    path, location = segment_of(root, cs.key("one"))
    flip(path, location.offset)
    path.chmod(0o444)
    assert as_user(51_102, GROUP, lambda: repair(root)) == ""
    assert as_user(51_101, GROUP, work(root, "one", "group")) == ""
    assert as_user(51_103, OTHERS, look(root, "one", "two")) == ""


@pytest.mark.processes
def test_a_private_store_is_written_by_its_owner_alone_and_read_by_all(shared):
    os.chown(shared, 51_101, GROUP)
    root = shared / "store"
    assert as_user(51_101, GROUP, work(root, "one", "private")) == ""
    assert {bits & 0o022 for bits in (path.stat().st_mode for path in root.rglob("*"))} == {0}
    assert as_user(51_102, GROUP, look(root, "one")) == ""
    assert as_user(51_102, GROUP, work(root, "two", "private")).startswith("WriteFailed")


def test_the_folder_of_locks_has_the_bits_of_the_store(tmp_path):
    before = os.umask(0o077)
    try:
        for mode in Mode:
            layout = create_store(tmp_path / mode.value, mode=mode)
            with locked(layout.lock("commit"), seconds=1, mode=mode):
                pass
            assert (layout.root / "locks").stat().st_mode & 0o7777 == mode.folder_bits
    finally:
        os.umask(before)
