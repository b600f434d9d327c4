"""gc and drop with data sets that sessions publish: what a row names stays, what no row names any more goes, in two steps."""

import os
import time

import numpy as np
import pytest

import cachestore as cs
from cachestore.care.collect import collect, compact, drop
from cachestore.core.errors import BadInput, FormatError
from cachestore.store.format.line import list_line
from tests.care.test_collect import age_all
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
