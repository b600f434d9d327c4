"""gc and drop with data sets that sessions publish: what a row names stays, what no row names any more goes, in two steps."""

import os
import shutil
import time

import numpy as np
import pytest

import cachestore as cs
from cachestore.care.collect import collect, compact, drop
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.errors import BadInput, FormatError
from cachestore.store.format.line import list_line
from cachestore.store.write.catalog_writer import mark_dropped
from cachestore.store.write.folding import make_table
from cachestore.store.write.link import end_line
from tests.care.test_collect import age_all
from tests.fakes import asks_for
from tests.store.write.test_publish import names, rows


def key(text):
    return cs.key("lines", text)


def put(session, sample, text):
    session.put(key(text), {"x": np.full(8, len(text), np.float32)})
    session.set(sample, x=key(text))


def later(store, days=3):
    """Let days pass for all files of a store."""
    age_all(store.layout, days)
    for folder, _folders, files in os.walk(store.layout.root):
        for name in files:
            path = os.path.join(folder, name)
            then = time.time() - days * 86_400
            os.utime(path, (then, then))


def collected(store, times=2, **options):
    reports = []
    for _time in range(times):
        later(store)
        reports.append(collect(store.layout.root, apply=True, grace_seconds=0, **options))
    store.refresh()
    return reports[-1]


@pytest.fixture
def store(tmp_path):
    return cs.open(tmp_path / "store", mode="a")


def test_what_no_row_names_any_more_goes_and_the_rest_stays(store):
    with store.session("own") as session:
        put(session, "b", "other")
    for number in range(20):
        with store.session("own") as session:
            put(session, "a", f"edit {number}")
    assert len(store) == 21
    collected(store, 3, keep=1)
    assert sorted(store.snapshot.keys()) == sorted([key("edit 19"), key("other")])
    assert rows(store) == {"a": {"x": key("edit 19")}, "b": {"x": key("other")}}
    assert store.get(key("edit 19"), as_numpy=True)["x"].shape == (8,)


def test_a_dry_run_counts_the_generations_that_stay_once_it_is_applied(store):
    session = store.session("own")
    put(session, "a", "one")
    session.flush()  # an entry above the first table
    dry = collect(store.layout.root, apply=False).generations
    assert dry == collect(store.layout.root, apply=True).generations == {"own": 2}


def test_what_only_an_older_generation_names_stays_as_long_as_it(store):
    store.publish("own", {})
    with store.session("own") as session:
        put(session, "a", "first")
    first = store.publish("own", {"b": {"x": key("first")}}, update=True)
    store.publish("own", {})
    collected(store)
    assert key("first") in store
    assert rows(store, number=first) == {"a": {"x": key("first")}, "b": {"x": key("first")}}


def test_values_that_a_session_did_not_name_yet_stay_for_a_day(store):
    session = store.session("own")
    session.put(key("late"), {"x": np.ones(2, np.float32)})
    session._show(session._appender.close_segment())
    for _time in range(2):
        collect(store.layout.root, apply=True, grace_seconds=0)
    session.set("a", x=key("late"))
    session.flush()
    assert rows(store) == {"a": {"x": key("late")}}
    abandoned = store.session("own")
    abandoned.put(key("never named"), {"x": np.ones(3, np.float32)})
    abandoned._show(abandoned._appender.close_segment())
    collected(store)
    assert list(store.snapshot.keys()) == [key("late")]


def test_compact_leaves_values_that_a_session_did_not_name_yet(store):
    """It left them behind in segments that it marked, and the next gc removed them."""
    sessions = [store.session("own"), store.session("own")]
    for number, session in enumerate(sessions):
        session.put(key(f"late {number}"), {"x": np.ones(2, np.float32)})
        session._show(session._appender.close_segment())
    compact(store.layout.root)
    collect(store.layout.root, apply=True, grace_seconds=0)
    for number, session in enumerate(sessions):
        session.set(f"{number}", x=key(f"late {number}"))
        session.flush()
    assert rows(store) == {f"{number}": {"x": key(f"late {number}")} for number in range(2)}


def test_a_session_whose_values_are_gone_is_told(store):
    session = store.session("own")
    session.put(key("late"), {"x": np.ones(2, np.float32)})
    session._show(session._appender.close_segment())
    collected(store)
    session.set("a", x=key("late"))
    with pytest.raises(BadInput):
        session.flush()
    session.put(key("late"), {"x": np.ones(2, np.float32)})
    session.set("a", x=key("late"))
    session.flush()
    assert rows(store) == {"a": {"x": key("late")}}


def test_values_of_a_writer_stay_whatever_names_them(store):
    with store.writer() as writer:
        writer.put(key("mine"), {"x": np.ones(2, np.float32)})
    with store.session("own") as session:
        session.set("a", x=key("mine"))
        session.flush()
        session.remove("a")
    collected(store, keep=1)
    assert key("mine") in store


def test_entries_go_when_tables_cover_them_and_the_rows_stay(store):
    for step in range(4):
        with store.session("own") as session:
            for number in range(5):
                put(session, f"{step}-{number}", f"{step}-{number}")
                session.flush()
    before = rows(store)
    collected(store)
    assert rows(store) == before
    line = list_line(store.layout, "own")
    assert line.entries
    assert min(line.entries) > line.tables[-2]
    collected(store, keep=1)
    assert rows(store) == before


def test_gc_stops_where_an_entry_is_gone(store):
    session, number = store.session("own"), 0
    for sample in "abc":
        put(session, sample, sample)
        number = session.flush()
    store.layout.entry("own", number - 1).unlink()
    with pytest.raises(FormatError):
        collect(store.layout.root, apply=True)


def test_a_dropped_data_set_is_gone_with_its_entries_and_its_values_go(store):
    with store.session("own") as session:
        put(session, "a", "first")
    living = store.session("own")
    report = drop(store.layout.root, "own")
    assert report.generations
    assert [name for name in names(store) if not name.endswith(".dropped")] == []
    assert store.names() == []
    living.set("b", x=key("first"))
    with pytest.raises(BadInput):
        living.flush()
    with pytest.raises(BadInput):
        store.dataset("own")
    collected(store)
    assert len(store) == 0
    with store.session("own") as anew:
        put(anew, "c", "new")
    assert rows(store) == {"c": {"x": key("new")}}


def test_gc_of_a_store_without_changes_makes_no_entry(store):
    with store.session("own") as session:
        put(session, "a", "first")
    collect(store.layout.root, apply=True)
    before = names(store)
    collect(store.layout.root, apply=True)
    assert names(store) == before


def long_line(store):
    """A line with an empty table, five entries, a table over them, a whole table, and three entries above it."""
    with store.session("own") as session:
        for number in range(5):
            put(session, f"{number}", f"first {number}")
            session.flush()
    make_table(store.layout, "own")
    with store.writer() as writer:
        writer.put(key("whole"), {"x": np.ones(3, np.float32)})
    store.publish("own", {"9": {"x": key("whole")}}, update=True)
    session = store.session("own")
    for number in range(3):
        put(session, f"{number}", f"second {number}")
        session.remove("3")
        session.flush()
    return session


def flip(path):
    path.chmod(0o600)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.unlink()  # other names of the file stay as they are
    path.write_bytes(raw)


HARM = {"gone": lambda path: path.unlink(), "flipped": flip}
TABLES = ("1.safetensors", "6.safetensors", "7.safetensors")
CHANGES = ("3.changes", "7.changes", "8.changes", "10.changes")


def test_the_files_of_a_long_line_are_those_that_are_harmed_here(store):
    long_line(store)
    assert {*TABLES, *CHANGES} <= {*names(store)}
    assert names(store)[-1] == "9.changes"


@pytest.mark.parametrize("name", TABLES + CHANGES)
@pytest.mark.parametrize("harm", HARM)
def test_repair_gives_all_rows_again_or_says_what_is_lost(store, name, harm):
    session = long_line(store)
    before, highest = rows(store), list_line(store.layout, "own").highest
    HARM[harm](store.layout.catalog_folder("own") / name)
    found = verify(store.layout.root)
    foreseen = repair(store.layout.root, dry_run=True)
    report = repair(store.layout.root)
    assert (report.lost, report.quarantined) == (foreseen.lost, foreseen.quarantined)
    assert set(report.rebuilt) >= {"own"} & set(foreseen.rebuilt)
    leaves_no_trace = name == "10.changes" and harm == "gone"
    assert found.ok == (harm == "gone" and name != "8.changes")
    assert bool(report.lost) == (name in {"8.changes", "10.changes"} and not leaves_no_trace)
    of_lost = {"8.changes": {"0": {"x": key("first 0")}}, "10.changes": {"2": {"x": key("first 2")}}}
    left = {**before, **of_lost.get(name, {})}
    assert rows(store) == left
    after = verify(store.layout.root)
    assert (after.ok, [remark for remark in after.remarks if "own" in remark]) == (True, [])
    again = repair(store.layout.root)
    assert (again.lost, again.quarantined, "own" in again.rebuilt) == ((), (), False)
    put(session, "new", "new")
    assert session.flush() > highest - leaves_no_trace
    assert rows(store) == {**left, "new": {"x": key("new")}}
    collected(store)
    assert rows(store) == {**left, "new": {"x": key("new")}}


def test_a_table_that_is_missing_is_remarked_and_made_again(store):
    session = long_line(store)
    before = rows(store)
    for number in (1, 6, 7):
        store.layout.catalog("own", number).unlink()
    found = verify(store.layout.root)
    assert [(finding.kind, finding.path) for finding in found.findings] == [("bad-catalog", "catalogs/own/10.safetensors")]
    assert store.names() == ["own"]
    with pytest.raises(FormatError):
        store.dataset("own")
    assert repair(store.layout.root).rebuilt == ("index", "own")
    assert rows(store) == before
    put(session, "new", "new")
    session.flush()
    line = list_line(store.layout, "own")
    make_table(store.layout, "own")
    put(session, "newer", "newer")
    session.flush()
    store.layout.catalog("own", line.highest).unlink()
    found = verify(store.layout.root)
    assert found.ok
    assert any("generation 11" in remark for remark in found.remarks)
    assert repair(store.layout.root).rebuilt == ("index", "own")
    assert not any("'own'" in remark for remark in verify(store.layout.root).remarks)


@pytest.mark.parametrize("made", ["files", "published"])
def test_a_data_set_without_any_table_keeps_its_kind_and_its_rows(store, made):
    if made == "files":
        with store.files("own") as files:
            files.save("a", {"x": np.ones(2, np.float32)})
    else:
        with store.session("own") as session:
            put(session, "a", "first")
    before = rows(store)
    for number in list_line(store.layout, "own").tables:
        store.layout.catalog("own", number).unlink()
    report = repair(store.layout.root)
    assert ("own" in report.rebuilt, report.lost) == (True, ())
    assert rows(store) == before
    assert store.dataset("own").made == made


def test_rows_that_name_a_value_that_is_not_there_are_found_with_what_helps(store):
    with store.session("own") as session:
        put(session, "a", "first")
    for path in store.layout.segments.glob("*/*"):
        path.unlink()
    [finding] = verify(store.layout.root).findings
    assert (finding.kind, finding.key, finding.sample) == ("missing-entry", str(key("first")), "a")
    assert "--refill" not in finding.advice
    report = repair(store.layout.root, refill=True)
    assert (report.missing, report.refilled) == (1, 0)
    with store.session("own") as session:
        put(session, "a", "first")
    assert verify(store.layout.root).ok


def test_a_data_set_whose_newest_files_are_damaged_can_be_dropped(store):
    long_line(store)
    for name in ("7.safetensors", "10.changes"):
        flip(store.layout.catalog_folder("own") / name)
    drop(store.layout.root, "own")
    assert store.names() == []
    assert [name for name in names(store) if not name.endswith(".dropped")] == []


def test_what_an_interrupted_drop_left_is_removed_by_the_next_one(store):
    long_line(store)
    end_line(store.layout, "own")
    mark_dropped(store.layout, "own", list_line(store.layout, "own").highest)
    assert store.names() == []
    drop(store.layout.root, "own")
    assert [name for name in names(store) if not name.endswith(".dropped")] == []
    with pytest.raises(BadInput):
        drop(store.layout.root, "own")


def test_a_data_set_that_has_lost_nearly_everything_is_left_as_it_is_and_its_values_stay(store):
    long_line(store)
    collected(store, keep=1)
    harmed = [name for name in names(store) if not name.endswith("11.changes")]
    for name in harmed:
        flip(store.layout.catalog_folder("own") / name)
    there = names(store)
    assert [finding.kind for finding in verify(store.layout.root).findings if "11" in finding.path]
    report = repair(store.layout.root)
    assert (report.lost, names(store)) == ((), there)
    assert "bad-catalog" in {finding.kind for finding in report.findings}
    for _time in range(2):
        with pytest.raises(FormatError):
            collected(store)
    assert key("second 0") in store
    with pytest.raises(FormatError):
        store.session("own")
    drop(store.layout.root, "own")
    assert store.names() == []


def test_values_of_a_data_set_whose_folder_vanished_stay_and_are_named_until_it_is_dropped(store):
    root = store.layout.root
    with store.session("gone") as session:
        put(session, "a", "of gone")
        put(session, "b", "old")
        session.flush()
        put(session, "b", "new")
    with store.session("own") as session:
        put(session, "a", "of own")
    drop(root, "own")
    with store.writer() as writer:
        writer.put(key("mine"), {"x": np.zeros(2, np.float32)}, {"owner": "me"})
    shutil.rmtree(store.layout.catalog_folder("gone"))
    report = verify(root)
    assert report.ok
    assert [remark for remark in report.remarks if "3 values of the data set 'gone'" in remark and "drop" in remark]
    report = collected(store, 3, keep=1)
    assert any("'gone'" in remark for remark in report.remarks)
    assert (compact(root).entries, len(store)) == (3, 4)
    with pytest.raises(BadInput, check=asks_for("name")):
        drop(root, "never")
    with pytest.raises(BadInput, check=asks_for("name")):
        drop(root, "me")
    assert drop(root, "gone", apply=False).generations == drop(root, "gone").generations == ()
    with pytest.raises(BadInput, check=asks_for("name")):
        drop(root, "gone")
    assert not any("'gone'" in remark for remark in verify(root).remarks)
    collected(store, 4, keep=1)
    assert sorted(store.snapshot.keys()) == [key("mine")]
    with store.session("gone") as session:
        put(session, "a", "again")
    assert list(store.dataset("gone")) == ["a"]


def test_compact_joins_on_the_first_day_what_rows_name_and_says_what_it_leaves(store):
    """It left all segments of sessions for a day, and published a generation all the same."""
    root = store.layout.root
    files = store.files("trainer")
    for number in range(6):
        files.save(f"{number}", {"x": np.full(2, number, np.float32)})
    session = store.session("own")
    put_alone = key("not named yet")
    session.put(put_alone, {"x": np.ones(5, np.float32)})
    session._show(session._appender.close_segment())
    done = compact(root)
    assert (done.segments, done.written, done.entries) == (6, 1, 6)
    assert any("1 value in 1 segment" in remark for remark in done.remarks)
    store.put(key("late"), {"x": np.zeros(7, np.float32)})
    session.set("a", x=key("late"))
    session.flush()
    before = list_line(store.layout, "own")
    again = compact(root)
    assert (again.segments, list_line(store.layout, "own")) == (0, before)
    assert collect(root).young == 1
    collected(store, 2, keep=1)
    assert [files.load(f"{number}")["x"][0].item() for number in range(6)] == [*range(6)]
    assert put_alone not in store
