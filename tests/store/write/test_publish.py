"""Sessions and whole tables against a model, beside each other, and where a process sleeps or the disk refuses."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
import unicodedata
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care import collect as collecting
from cachestore.care.collect import collect, drop
from cachestore.care.lines import tidy_line
from cachestore.core.errors import BadInput, CacheStoreError, WriteFailed
from cachestore.core.keys import Key
from cachestore.files.locks import locked
from cachestore.store.format.line import list_line, read_start
from cachestore.store.read.rows import Rows, read_data_set
from cachestore.store.write import folding, link
from cachestore.store.write import made as making
from cachestore.store.write import publish as publishing
from cachestore.store.write import session as sessions
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.folding import make_table, rows_above
from cachestore.store.write.link import end_line, link_fence
from tests import fakes
from tests.fakes import asks_for

KEYS = [cs.key("publish", str(number)) for number in range(4)]
MISSING = cs.key("publish", "missing")


@pytest.fixture
def store(tmp_path):
    return filled(tmp_path / "store")


def filled(root):
    store = cs.open(root, mode="a")
    with store.writer() as writer:
        for number, key in enumerate(KEYS):
            writer.put(key, {"x": np.full(3, number, np.float32)})
    return store


def rows(store, name="own", number=None):
    found = store.dataset(name, number)
    return {sample: found[sample] for sample in found}


def names(store, name="own"):
    return sorted(path.name for path in store.layout.catalog_folder(name).iterdir())


def test_what_was_flushed_is_there_for_everybody_and_the_rest_is_not(store):
    with store.session("own") as session:
        session.set("a", x=KEYS[0])
        number = session.flush()
        session.set("b", x=KEYS[1])
        assert rows(cs.open(store.layout.root)) == {"a": {"x": KEYS[0]}}
        assert rows(store, number=number) == {"a": {"x": KEYS[0]}}
    assert rows(store) == {"a": {"x": KEYS[0]}, "b": {"x": KEYS[1]}}


def test_a_generation_that_there_is_not_yet_or_no_more_is_named(store):
    fakes.run(store.layout.root, fakes.captions("a"), fakes.FakeEncoder())
    number = store.publish("own", {})
    for name, wanted in (("own", number + 1), ("train", 2)):
        with pytest.raises(BadInput, check=fakes.asks_for("generation", wanted)):
            store.dataset(name, wanted)


def test_a_block_that_raises_publishes_nothing_of_what_is_not_flushed(store):
    def interrupted():
        with store.session("own") as session:
            session.set("a", x=KEYS[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert rows(store) == {}


def test_values_that_a_session_puts_have_an_owner_and_are_there_when_flush_returns(store):
    with store.session("own") as session:
        session.put(MISSING, {"x": np.ones(2, np.float32)}, {"note": "kept"})
        session.set("a", x=MISSING)
        session.flush()
        with cs.open(store.layout.root) as other:
            assert other.describe(MISSING).meta == {"note": "kept"}


def test_keys_that_are_nowhere_are_named_and_nothing_is_published(store):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    session.set("b", x=MISSING)
    with pytest.raises(BadInput, match="'b'") as caught:
        session.flush()
    assert caught.value.option == "rows"
    assert rows(store) == {}
    session.remove("b")
    session.flush()
    assert list(rows(store)) == ["a"]


@pytest.mark.parametrize("update", [False, True])
def test_a_table_with_keys_that_are_nowhere_begins_no_data_set(store, update):
    with pytest.raises(BadInput, check=asks_for("rows")):
        store.publish("own", {"a": {"x": MISSING}}, update=update)
    assert store.names() == []


@pytest.mark.parametrize("update", [False, True])
def test_a_table_replaces_all_rows_or_is_laid_over_them(store, update):
    with store.session("own") as session:
        session.set("a", x=KEYS[0], y=[KEYS[0], KEYS[1]])
    given = Rows(["b", "a"], {"x": [KEYS[2], KEYS[3]]}, {"score": [0.5, 0.25]})
    generation = store.publish("own", given, update=update)
    assert generation in list_line(store.layout, "own").tables
    expected = {"a": {"x": KEYS[3], "y": KEYS[:2]}, "b": {"x": KEYS[2]}} if update else {"b": {"x": KEYS[2]}, "a": {"x": KEYS[3]}}
    assert list(rows(store).items()) == list(expected.items())
    assert list(store.dataset("own").columns["score"]) == ([0.25, 0.5] if update else [0.5, 0.25])


def test_a_table_takes_part_in_the_order_of_flushes(store):
    with store.session("own") as session:
        session.set("a", x=KEYS[0])
        session.flush()
        store.publish("own", {"b": {"x": KEYS[1]}})
        session.set("c", x=KEYS[2])
        session.flush()
        assert list(rows(store)) == ["b", "c"]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.sampled_from("abc")),
        st.tuples(st.just("flush"), st.integers(0, 1)),
        st.tuples(st.just("publish"), st.booleans(), st.sampled_from("abc"), st.integers(0, 3)),
        st.tuples(st.just("table")),
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(operations)
def test_two_sessions_and_whole_tables_give_the_rows_of_a_dict(tmp_path_factory, listed):
    store = filled(tmp_path_factory.mktemp("own") / "store")
    sessions = [store.session("own"), store.session("own")]
    model, pending = {}, [[], []]
    for number, (what, *arguments) in enumerate(listed):
        at = number % 2
        if what == "set":
            sample, part, key = arguments
            sessions[at].set(sample, **{part: KEYS[key]})
            pending[at].append((sample, {part: KEYS[key]}))
        elif what == "remove":
            sessions[at].remove(arguments[0])
            pending[at].append((arguments[0], None))
        elif what == "flush":
            sessions[arguments[0]].flush()
            for sample, parts in pending[arguments[0]]:
                if parts is None:
                    model.pop(sample, None)
                else:
                    model.setdefault(sample, {}).update(parts)
            pending[arguments[0]] = []
        elif what == "publish":
            update, sample, key = arguments
            store.publish("own", {sample: {"x": KEYS[key]}}, update=update)
            model = {**model, sample: {**model.get(sample, {}), "x": KEYS[key]}} if update else {sample: {"x": KEYS[key]}}
        else:
            make_table(store.layout, "own")
        assert list(rows(store).items()) == list(model.items())
    line = list_line(store.layout, "own")
    for table in line.tables[:-1]:  # whatever table one begins with, the rows are the same
        store.layout.catalog("own", line.tables[-1]).unlink()
        line = list_line(store.layout, "own")
        if table == line.tables[-1]:
            assert rows(store) == model


def test_tables_and_blocks_are_the_same_whoever_makes_them_and_a_lost_one_costs_nothing(store, monkeypatch):
    monkeypatch.setattr(folding, "BLOCKS", (4, 16))
    monkeypatch.setattr("cachestore.store.format.line.BLOCKS", (4, 16))
    session = store.session("own")
    session.flush()
    for number in range(40):
        session.set(f"s{number % 23}", x=KEYS[number % 4])
        if number % 5 == 0:
            session.remove(f"s{(number + 7) % 23}")
        session.flush()
    expected = rows(store)
    blocks = [name for name in names(store) if "-" in name]
    assert {"5-8.changes", "17-32.changes"} <= set(blocks)
    table = make_table(store.layout, "own")
    before = store.layout.catalog("own", table).read_bytes()
    store.layout.catalog("own", table).unlink()
    for name in blocks:
        (store.layout.catalog_folder("own") / name).unlink()
    assert rows(store) == expected
    make_table(store.layout, "own")
    assert store.layout.catalog("own", table).read_bytes() == before


@pytest.mark.parametrize("number", [0, 4])
def test_a_generation_that_there_never_was_is_refused(store, number):
    store.publish("own", {"a": {"x": KEYS[0]}})
    store.publish("own", {"a": {"x": KEYS[1]}})
    with pytest.raises(BadInput, check=fakes.asks_for("generation")):
        store.dataset("own", number)


def test_an_entry_that_is_gone_is_a_loss_that_is_named(store):
    session, number = store.session("own"), 0
    for sample in "abc":
        session.set(sample, x=KEYS[0])
        number = session.flush()
    store.layout.entry("own", number - 1).unlink()
    with pytest.raises(cs.FormatError):
        rows(store)


def test_a_flush_makes_a_table_when_half_of_the_rows_are_new_and_enough(store, monkeypatch):
    monkeypatch.setattr(sessions, "_TABLE_ROWS", 10)
    with store.session("own") as session:
        for number in range(100):
            session.set(f"s{number}", x=KEYS[0])
            session.flush()
        tables = list_line(store.layout, "own").tables
    assert 5 <= len(tables) <= 9
    assert len(rows(store)) == 100


def test_rows_above_a_table_are_counted_though_it_was_made_after_later_entries(store):
    """They were counted from an older table on, for ever, as long as others flushed: every flush made a table."""
    session = store.session("own")
    states = []
    for number in range(6):
        session.set(f"s{number}", x=KEYS[0])
        session.flush()
        states.append(read_data_set(store.layout, "own"))
    before = states[3]
    assert rows_above(store.layout, "own") == 6
    publish_draft(store.layout, draft_of(before), after=before.generation - 1)
    assert rows_above(store.layout, "own") == 2
    link_fence(store.layout, "own")
    assert rows_above(store.layout, "own") == 2
    make_table(store.layout, "own")
    assert rows_above(store.layout, "own") == 0
    session.set("more", x=KEYS[0])
    session.flush()
    assert rows_above(store.layout, "own") == 1


def test_a_flush_makes_no_table_while_another_process_makes_one(store, monkeypatch):
    monkeypatch.setattr(sessions, "_TABLE_ROWS", 1)
    session = store.session("own")
    session.set("a", x=KEYS[0])
    with locked(store.layout.lock("table"), seconds=0):
        session.flush()
        assert len(list_line(store.layout, "own").tables) == 1
    session.set("b", x=KEYS[0])
    session.flush()
    assert len(list_line(store.layout, "own").tables) == 2
    assert list(rows(store)) == ["a", "b"]


def test_the_end_of_a_session_waits_for_whoever_makes_a_table(store):
    """That table may lack the last rows: the session of the next row had to make one of all."""
    session, held, done = store.session("own"), threading.Event(), threading.Event()
    session.set("a", x=KEYS[0])

    def hold():
        with locked(store.layout.lock("table"), seconds=0):
            held.set()
            done.wait(0.2)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    session.close()
    done.set()
    holder.join(10)
    assert len(list_line(store.layout, "own").tables) == 2


def test_one_row_more_is_one_small_file(store):
    store.publish("own", Rows([f"s{n}" for n in range(1000)], {"x": [KEYS[0]] * 1000}))
    before = set(names(store))
    with store.session("own") as session:
        session.set("new", x=KEYS[1])
    [new] = set(names(store)) - before
    assert (store.layout.catalog_folder("own") / new).stat().st_size < 2000


# Kinds and ends


def test_a_name_that_a_precompute_made_is_refused_and_its_rows_stay(tmp_path):
    fakes.run(tmp_path / "store", fakes.captions("a"), fakes.FakeEncoder())
    store = filled(tmp_path / "store")
    for begin in (lambda: store.session("train"), lambda: store.publish("train", {})):
        with pytest.raises(BadInput) as caught:
            begin()
        assert caught.value.option == "name"
    assert names(store, "train") == ["1.safetensors"]


def test_a_session_of_a_dropped_data_set_is_told_and_the_next_one_begins_anew(store):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    session.flush()
    end = end_line(store.layout, "own")
    store.layout.dropped("own", end).touch()
    session.set("b", x=KEYS[1])
    with pytest.raises(BadInput):
        session.flush()
    with store.session("own") as anew:
        anew.set("c", x=KEYS[2])
    assert list(rows(store)) == ["c"]
    assert min(list_line(store.layout, "own").tables) > end


# Marks


def mark_all(store):
    from cachestore.care.gc import mark
    from cachestore.store.read.snapshot import list_segments

    marked = list_segments(store.layout)
    mark(store.layout, sorted(marked))
    return marked


def test_a_key_in_a_segment_that_is_marked_is_copied_out_of_it(store):
    marked = mark_all(store)
    with store.session("own") as session:
        session.set("a", x=KEYS[0])
    for digest in marked:
        store.layout.segment(digest).unlink()
    with cs.open(store.layout.root) as reader:
        assert reader.get(KEYS[0], as_numpy=True)["x"].tolist() == [0, 0, 0]


def test_a_flush_that_looked_before_a_fence_looks_again(store, monkeypatch):
    """A segment is marked, and a collector reads what is needed, while a flush is between its look and its link."""
    looks, checked = [], link.check_keys

    def check_then_sleep(*arguments):
        checked(*arguments)
        looks.append(1)
        if len(looks) == 1:
            mark_all(store)
            link_fence(store.layout, "own")

    with store.session("own") as session:
        monkeypatch.setattr(sessions, "check_keys", check_then_sleep)
        session.set("a", x=KEYS[0])
        session.flush()
    assert len(looks) >= 2
    from cachestore.store.read.snapshot import visible_segments

    assert visible_segments(store.layout), "the value was copied out of the marked segment"


# Processes that sleep, and disks that refuse


def test_an_entry_below_the_newest_is_read_by_nobody_and_its_process_publishes_again(store, monkeypatch):
    """Between its listing and its link, others went on, made a table, and gc removed what the table covers."""
    with store.session("own") as session:
        session.set("old", x=KEYS[0])
        low = session.flush()
    listed, slept = link.list_line, []

    def list_then_sleep(layout, name):
        found = listed(layout, name)
        if not slept:
            slept.append(1)
            with store.session("own") as other:
                for number in range(3):
                    other.set(f"other{number}", x=KEYS[1])
                    other.flush()
            make_table(store.layout, "own")
            for entry in range(low, low + 3):
                layout.entry("own", entry).unlink(missing_ok=True)
        return found

    sleeper = store.session("own")
    sleeper.set("late", x=KEYS[2])
    monkeypatch.setattr(link, "list_line", list_then_sleep)
    number = sleeper.flush()
    assert list(rows(store)) == ["old", "other0", "other1", "other2", "late"]
    assert number == list_line(store.layout, "own").highest


def test_a_flush_that_failed_after_its_link_is_not_published_twice(store, monkeypatch):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    published = link.publish

    def publish_then_fail(*arguments, **options):
        published(*arguments, **options)
        raise WriteFailed("the folder could not be synced")

    monkeypatch.setattr(link, "publish", publish_then_fail)
    with pytest.raises(WriteFailed):
        session.flush()
    monkeypatch.setattr(link, "publish", published)
    with store.session("own") as other:
        other.set("a", x=KEYS[1])
    session.flush()
    assert rows(store) == {"a": {"x": KEYS[1]}}


def test_a_number_of_the_newest_table_is_never_free_for_a_process_that_slept(store, monkeypatch):
    """Once gc had removed the fence of the newest table, such a process linked its entry there and acknowledged what nobody reads."""
    from tests.care.test_lines import later

    with store.session("own") as session:
        session.set("old", x=KEYS[0])
    listed, slept = link.list_line, []

    def list_then_sleep(layout, name):
        found = listed(layout, name)
        if not slept:
            slept.append(1)
            link_fence(layout, name)
            make_table(layout, name)
            later(store)
            collect(layout.root, apply=True, keep=1)
            assert found.highest < list_line(layout, name).highest
        return found

    sleeper = store.session("own")
    sleeper.set("late", x=KEYS[2])
    monkeypatch.setattr(link, "list_line", list_then_sleep)
    sleeper.flush()
    assert list(rows(store)) == ["old", "late"]


def test_an_entry_at_the_end_of_a_dropped_line_is_not_acknowledged(store, monkeypatch):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    listed, slept = link.list_line, []

    def list_then_sleep(layout, name):
        found = listed(layout, name)
        if not slept:
            slept.append(1)
            drop(layout.root, name)
        return found

    monkeypatch.setattr(link, "list_line", list_then_sleep)
    with pytest.raises(BadInput):
        session.flush()


def test_a_failed_entry_that_is_not_part_of_the_line_is_published_again(store, monkeypatch):
    """Its link was made and its folder not synced; and its number was free because gc had removed what others had published there."""
    session = store.session("own")
    session.set("a", x=KEYS[0])
    published = link.publish

    def sleep_then_fail(layout, path, *arguments, **options):
        monkeypatch.setattr(link, "publish", published)
        fences = [link_fence(layout, "own") for _time in range(3)]
        make_table(layout, "own")
        for fence in fences[:2]:
            layout.entry("own", fence).unlink()
        assert published(layout, path, *arguments, **options)
        raise WriteFailed("the folder could not be synced")

    monkeypatch.setattr(link, "publish", sleep_then_fail)
    with pytest.raises(WriteFailed):
        session.flush()
    session.flush()
    assert rows(store) == {"a": {"x": KEYS[0]}}


def test_a_session_begins_no_empty_table_above_one_that_takes_the_place_of_another(store, monkeypatch):
    """A session listed table 1; before it read that, gc made table 2 and removed the first. Its empty table 3 hid all rows."""
    session = store.session("own")
    session.set("a", x=KEYS[0])
    session.flush()
    listed, looks = making.list_line, []

    def list_then_sleep(layout, name):
        found = listed(layout, name)
        looks.append(1)
        if len(looks) == 2:
            make_table(layout, name)
            for number in found.tables:
                layout.catalog(name, number).unlink()
        return found

    monkeypatch.setattr(making, "list_line", list_then_sleep)
    store.session("own")
    assert rows(store) == {"a": {"x": KEYS[0]}}


def test_a_data_set_whose_tables_are_all_lost_is_not_begun_anew(store):
    with store.session("own") as session:
        session.set("a", x=KEYS[0])
    before = names(store)
    for number in list_line(store.layout, "own").tables:
        store.layout.catalog("own", number).unlink()
    with pytest.raises(cs.FormatError):
        store.session("own")
    assert set(names(store)) < set(before)


@pytest.mark.parametrize("call", ["flush", "close", "publish"])
def test_rows_that_are_published_count_though_no_table_can_be_made_of_them(store, monkeypatch, call):
    def refuse(*_arguments, **_options):
        raise WriteFailed("there is no room")

    session = store.session("own")
    monkeypatch.setattr(sessions, "_TABLE_ROWS", 1)
    monkeypatch.setattr(folding, "publish_draft", refuse)
    monkeypatch.setattr(link, "publish_link", refuse)
    session.set("a", x=KEYS[0])
    publish = {"flush": session.flush, "close": session.close, "publish": lambda: store.publish("own", {"a": {"x": KEYS[0]}})}[call]
    number = publish()
    monkeypatch.undo()
    assert rows(store, number=number) == {"a": {"x": KEYS[0]}}
    assert len(list_line(store.layout, "own").tables) == 1
    collect(store.layout.root, apply=True)
    assert len(list_line(store.layout, "own").tables) == 2, "a later fold makes it"
    assert rows(store) == {"a": {"x": KEYS[0]}}


@pytest.mark.parametrize("has_links", [True, False])
def test_eight_threads_publish_into_one_line_and_nothing_is_lost(store, has_links, monkeypatch):
    if not has_links:
        monkeypatch.delattr("os.link")

    def work(number):
        with cs.open(store.layout.root, mode="a") as own, own.session("own") as session:
            for step in range(3):
                session.set(f"{number}-{step}", x=KEYS[step % 4])
                session.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(rows(store)) == {f"{number}-{step}" for number in range(8) for step in range(3)}
    line = list_line(store.layout, "own")
    marks = [read_start(store.layout, "own", number) for number in line.entries]
    assert all(after.before == before.mark for before, after in pairwise(marks))


def test_a_killed_session_leaves_what_it_flushed(store):
    code = f"""
        import os, signal
        import cachestore as cs
        store = cs.open({str(store.layout.root)!r}, mode="a")
        session = store.session("own")
        session.set("a", x={str(KEYS[0])!r})
        session.flush()
        session.set("b", x={str(KEYS[1])!r})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert rows(store) == {"a": {"x": KEYS[0]}}


def test_a_session_belongs_to_its_process(store):
    session = store.session("own")
    session._appender._pid = -1
    for call in (lambda: session.set("a", x=KEYS[0]), lambda: session.remove("a"), session.flush):
        with pytest.raises(cs.CacheStoreError):
            call()


def test_the_end_of_a_line_whose_drop_was_killed_takes_nothing_and_the_next_session_begins_anew(store):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    session.flush()
    end = end_line(store.layout, "own")
    session.set("b", x=KEYS[1])
    with pytest.raises(BadInput, check=asks_for("name")):
        session.flush()
    with store.session("own") as anew:
        anew.set("c", x=KEYS[2])
    assert list(rows(store)) == ["c"]
    assert list_line(store.layout, "own").dropped == end
    with pytest.raises(BadInput, check=asks_for("generation")):
        store.dataset("own", end - 1)


def test_a_drop_leaves_the_session_that_begins_meanwhile(store, monkeypatch):
    store.publish("own", {"a": {"x": KEYS[0]}})

    def mark_then_begin(layout, name, end):
        marked(layout, name, end)
        with store.session("own") as session:
            session.set("b", x=KEYS[1])

    marked = collecting.mark_dropped
    monkeypatch.setattr(collecting, "mark_dropped", mark_then_begin)
    collecting.drop(store.layout.root, "own")
    assert list(rows(store)) == ["b"]


# Calls that fail half-way


def test_what_is_set_after_a_flush_that_failed_once_it_was_there_is_not_lost(store, monkeypatch):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    published = link.publish

    def publish_then_interrupt(*arguments, **options):
        published(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "publish", publish_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.flush()
    monkeypatch.setattr(link, "publish", published)
    session.set("b", x=KEYS[1])
    session.flush()
    assert rows(store) == {"a": {"x": KEYS[0]}, "b": {"x": KEYS[1]}}


def test_a_flush_that_fails_at_any_call_keeps_its_rows_and_publishes_them_once(tmp_path, monkeypatch):
    """The disk is full at the n-th file that is made, for every n that there is, before and after it is there."""
    monkeypatch.setattr(folding, "BLOCKS", (4,))
    monkeypatch.setattr(sessions, "_TABLE_ROWS", 1)
    published, failed = link.publish, 0
    for is_there in (False, True):
        for fatal in range(1, 20):
            store, left = filled(tmp_path / f"{is_there}{fatal}"), [fatal]

            def fails(*arguments, left=left, is_there=is_there, **options):
                left[0] -= 1
                done = True
                if is_there or left[0]:
                    done = published(*arguments, **options)
                if not left[0]:
                    raise WriteFailed("the disk is full")
                return done

            for module in (link, folding):
                monkeypatch.setattr(module, "publish", fails)
            session = store.session("own")
            for number in range(6):
                session.set(f"s{number}", x=KEYS[0])
                try:
                    session.flush()
                except WriteFailed:
                    failed += 1
                    with store.session("own") as other:
                        other.set(f"s{number}", y=KEYS[1])
                    session.flush()
            for module in (link, folding):
                monkeypatch.setattr(module, "publish", published)
            assert [(sample, "x" in cells) for sample, cells in rows(store).items()] == [(f"s{number}", True) for number in range(6)]
            if left[0] > 0:
                break
        else:
            pytest.fail("it makes more files than were looked at")
    assert failed >= 12


def test_a_flush_is_not_undone_by_a_table_that_cannot_be_made(store, monkeypatch):
    def refuses(*_arguments):
        raise WriteFailed("the disk is full")

    for module in (publishing, folding):
        monkeypatch.setattr(module, "make_table", refuses)
    store.publish("own", {"a": {"x": KEYS[0]}})
    with store.session("own") as session:
        session.set("b", x=KEYS[1])
    assert store.publish("own", {"c": {"x": KEYS[2]}}, update=True) == list_line(store.layout, "own").highest
    assert list(rows(store)) == ["a", "b", "c"]


def test_a_whole_entry_without_its_table_is_folded_by_the_next_that_tidies(store, monkeypatch):
    store.publish("own", {"a": {"x": KEYS[0]}})
    for whole in ({"b": {"x": KEYS[1]}}, {}):
        monkeypatch.setattr(link, "publish_link", lambda *_arguments: None)
        number = store.publish("own", whole)
        assert number not in list_line(store.layout, "own").tables
        tidy_line(store.layout, "own", with_fence=False)
        assert number in list_line(store.layout, "own").tables
        assert list(rows(store)) == list(whole)


def test_threads_may_share_a_session_and_files(store):
    session, files = store.session("own"), store.files("own files")

    def work(number):
        for step in range(20):
            session.set(f"{number}-{step}", x=KEYS[step % 4])
            if step % 5 == number:
                session.flush()
        files.save(f"{number}", {"x": np.full(2, number, np.float32)})
        assert files.exists(f"{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    session.flush()
    assert len(rows(store)) == 80
    assert files.glob() == ["0", "1", "2", "3"]


def test_an_update_of_keys_does_not_wait_for_sessions_and_one_of_columns_gives_up(store, monkeypatch):
    monkeypatch.setattr(publishing, "_TRIES", 3)
    store.publish("own", {"a": {"x": KEYS[0]}})
    numbers, really = iter(range(100)), publishing.read_data_set

    def read_then_flush(*arguments):
        found = really(*arguments)
        with store.session("own") as session:
            session.set(f"other{next(numbers)}", x=KEYS[1])
            session.flush()
        return found

    monkeypatch.setattr(publishing, "make_table", lambda *_arguments: 0)
    monkeypatch.setattr(publishing, "read_data_set", read_then_flush)
    store.publish("own", {"a": {"y": KEYS[2]}}, update=True)
    with pytest.raises(cs.CacheStoreError, match="run the same again"):
        store.publish("own", Rows(["a"], {}, {"score": [1]}), update=True)
    monkeypatch.setattr(publishing, "read_data_set", really)
    store.publish("own", Rows(["a"], {}, {"score": [1]}), update=True)
    assert rows(store)["a"] == {"x": KEYS[0], "y": KEYS[2]}
    assert store.dataset("own").columns["score"].tolist() == [1, 0, 0, 0]


# Rows


def test_an_update_leaves_what_it_does_not_name(store):
    store.publish("own", {"a": {"x": KEYS[0]}, "b": {"x": KEYS[1], "y": KEYS[1]}})
    store.publish("own", {"a": {}, "b": {"y": KEYS[2]}, "new": {}}, update=True)
    assert rows(store) == {"a": {"x": KEYS[0]}, "b": {"x": KEYS[1], "y": KEYS[2]}, "new": {}}
    store.publish("own", Rows(["b", "newer"], {}, {"score": [0.5, 1.5]}), update=True)
    assert list(rows(store)) == ["a", "b", "new", "newer"]
    assert store.dataset("own").columns["score"].tolist()[1::2] == [0.5, 1.5]
    with pytest.raises(BadInput, check=asks_for("rows")):
        store.publish("own", {"a": {"x": []}}, update=True)


def test_a_part_that_is_set_to_nothing_is_taken_away_and_its_row_stays(store):
    with store.session("own") as session:
        session.set("a", x=KEYS[0], y=KEYS[1])
        session.flush()
        session.set("a", x=[])
        session.flush()
        assert rows(store) == {"a": {"y": KEYS[1]}}
        session.set("a", y=[])
        session.set("b", x=[])
    assert rows(store) == {"a": {}, "b": {}}


def test_keys_come_in_any_form(store):
    raw = np.frombuffer(KEYS[0], np.uint8)
    forms = {"hex": str(KEYS[0]), "bytes": bytes(KEYS[0]), "array": raw, "bytearray": bytearray(KEYS[0]), "rows": np.stack([raw, raw])}
    with store.session("own") as session:
        session.set("a", **forms)
    assert rows(store) == {"a": {name: [KEYS[0]] * 2 if name == "rows" else KEYS[0] for name in forms}}
    session = store.session("own")
    for wrong in (bytes(16), np.zeros(16, np.uint8), b"short", None, 7, np.arange(16), {"x": KEYS[0]}, "", "0" * 32, [KEYS[0], bytes(16)]):
        with pytest.raises(BadInput):
            session.set("a", x=wrong)


@pytest.mark.parametrize("sample", ["a\0b", "\ud800", "/", "..", "é" * 300_000], ids=["nul", "surrogate", "slash", "dots", "long"])
def test_any_text_may_be_an_id(store, sample):
    with store.session("own") as session:
        session.set(sample, x=KEYS[0])
    store.publish("own", {f"{sample}2": {"x": KEYS[1]}}, update=True)
    assert rows(store) == {sample: {"x": KEYS[0]}, f"{sample}2": {"x": KEYS[1]}}


def test_a_generation_is_any_number_that_can_still_be_read(store):
    with store.session("own") as session:
        for number in range(3):
            session.set(f"s{number}", x=KEYS[0])
            session.flush()
    fence = link_fence(store.layout, "own")
    assert [len(rows(store, number=number)) for number in range(1, fence + 1)] == [0, 1, 2, 3, 3]
    make_table(store.layout, "own")
    store.layout.entry("own", 3).unlink()  # as `gc` does a day after a table covers it
    for gone in (0, 3, fence + 1, 999):
        with pytest.raises(BadInput, check=asks_for("generation")):
            store.dataset("own", gone)
    assert [len(rows(store, number=number)) for number in (2, 4)] == [1, 3]


@pytest.mark.parametrize(
    ("ids", "parts", "columns"),
    [
        (["a", "a"], {"x": KEYS[:2]}, {}),
        (["a", ""], {"x": KEYS[:2]}, {}),
        (["a"], {"x": KEYS[:2]}, {}),
        (["a"], {"x": np.zeros((1, 16), np.int64)}, {}),
        (["a"], {"x": KEYS[:1]}, {"c": [1, 2]}),
        (["a"], {"x": KEYS[:1]}, {"c": [None]}),
        (["a"], {"x": KEYS[:1]}, {"c": [2**63]}),
        (["a"], {"x": KEYS[:1]}, {"c": np.array([2**64 - 1], np.uint64)}),
        (["a", "b"], {"x": KEYS[:2]}, {"c": [10**400, 0.5]}),
        (["a"], {"x": KEYS[:1]}, {"c": [np.zeros(2)]}),
        (["a"], {"x": KEYS[:1]}, {"c": np.array(5)}),
        (["a"], {"x": KEYS[:1]}, [1]),
        ("ab", {"x": KEYS[:2]}, {}),
    ],
)
def test_rows_that_do_not_fit_are_refused(ids, parts, columns):
    with pytest.raises(BadInput):
        Rows(ids, parts, columns)


@pytest.mark.parametrize("update", [False, True])
def test_the_rows_of_a_pass_are_published_with_their_keys_and_without_empty_cells(tmp_path, update):
    fakes.run(tmp_path / "store", fakes.captions("a", "b"), fakes.FakeEncoder())
    with cs.open(tmp_path / "store", mode="a") as store:
        made = store.dataset("train")
        [column] = made.catalog.columns
        holed = Rows.of(replace(made.catalog, columns=(replace(column, keys=[bytes(16), *list(column.keys)[1:]]),)))
        for source in (made, holed):
            store.publish("copy", source, update=update)
            assert list(store.dataset("copy")) == list(made)
            expected = {} if source is holed and not update else made[made.ids[0]]
            assert [rows(store, "copy")[sample] for sample in made.ids] == [expected, made[made.ids[1]]]


def test_a_child_of_a_process_that_flushes_is_told_and_does_not_wait(store):
    """Another thread held the session's lock when the process was forked."""
    session = store.session("own")
    held, done = threading.Event(), threading.Event()

    def hold():
        with session.lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        told = 0
        for call in (lambda: session.set("a", x=KEYS[0]), lambda: session.remove("a"), lambda: session.put(KEYS[0], {}), session.flush):
            try:
                call()
            except cs.CacheStoreError:
                told += 1
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    done.set()
    thread.join(30)


def test_files_of_a_data_set_that_was_dropped_say_so(store):
    files = store.files("files")
    files.save("a", {"x": np.zeros(2, np.float32)})
    collecting.drop(store.layout.root, "files")
    for call in (lambda: files.exists("a"), lambda: files.save("b", {"x": np.ones(2, np.float32)}), lambda: files.remove("a")):
        with pytest.raises(BadInput, check=asks_for("name")):
            call()
    with store.files("files") as anew:
        assert anew.glob() == []


def test_columns_take_the_numbers_of_numpy_and_what_is_not_a_number(store):
    given = {"half": np.array([0.5], np.float16), "single": [np.float32(0.25)], "whole": [np.int64(-(2**63))], "none": [float("nan")]}
    store.publish("own", Rows(["a"], {"x": KEYS[:1]}, given))
    found = store.dataset("own").columns
    assert [found[name][0] for name in ("half", "single", "whole")] == [0.5, 0.25, -(2**63)]
    assert np.isnan(found["none"][0])


def test_rows_give_their_keys_as_arrays_with_zeros_where_a_part_is_missing():
    given = Rows(["a", "b"], {"x": np.stack([np.frombuffer(KEYS[0], np.uint8), np.zeros(16, np.uint8)])})
    assert given.keys("x").shape == (2, 16)
    assert bytes(given.keys("x")[1]) == bytes(16)
    assert (given["a"], given["b"]) == ({"x": KEYS[0]}, {})
    several = Rows.read({"a": {"x": [KEYS[0], KEYS[1]]}, "b": {"y": KEYS[2]}})
    assert several["a"] == {"x": [KEYS[0], KEYS[1]]}
    offsets, keys = several.lists("x")
    assert (offsets.tolist(), [Key(bytes(key)) for key in keys]) == ([0, 2, 2], KEYS[:2])
    with pytest.raises(BadInput):
        several.keys("x")
    with pytest.raises(BadInput):
        several.keys("z")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize("call", ["write", "fsync", "link", "unlink"])
def test_a_call_of_the_system_that_fails_within_a_flush_costs_no_row(store, monkeypatch, call, error):
    really, session, expected = getattr(os, call), store.session("own"), ["first"]
    session.set("first", x=KEYS[0])
    session.flush()
    for fatal in range(1, 20):
        left = [fatal]

        def fails(*arguments, left=left, **named):
            left[0] -= 1
            if not left[0]:
                raise error
            return really(*arguments, **named)

        key = cs.key("within a flush", call, str(fatal), str(type(error)))
        session.put(key, {"x": np.ones(2, np.float32)})
        session.set(f"put{fatal}", x=key)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fails)
            with suppress(WriteFailed, KeyboardInterrupt):
                session.flush()
        session.set(f"later{fatal}", x=KEYS[1])
        session.flush()
        expected += [f"put{fatal}", f"later{fatal}"]
        assert list(rows(store)) == expected
        assert cs.open(store.layout.root).get(key, as_numpy=True)["x"].tolist() == [1, 1]
        if left[0] > 0:
            return
    pytest.fail("a flush makes more calls than were looked at")


@pytest.mark.parametrize("name", ["a/b", "..", "/", "ü/é", "con", "a\\b", "x\0y"])
def test_any_name_is_a_data_set_of_its_own(store, name):
    with store.session(name) as session:
        session.set("a", x=KEYS[0])
    assert store.names() == [name]
    assert rows(store, name) == {"a": {"x": KEYS[0]}}


def test_names_that_differ_in_their_unicode_form_alone_are_one(store):
    for number, form in enumerate(("NFD", "NFC", "NFD")):
        with store.session(unicodedata.normalize(form, "né")) as session:
            session.set(f"s{number}", x=KEYS[0])
    store.publish(unicodedata.normalize("NFD", "né"), {"p": {"x": KEYS[0]}}, update=True)
    assert store.names() == [unicodedata.normalize("NFC", "né")]
    for form in ("NFD", "NFC"):
        assert list(rows(store, unicodedata.normalize(form, "né"))) == ["s0", "s1", "s2", "p"]


NFC, NFD = (unicodedata.normalize(form, "é/ö") for form in ("NFC", "NFD"))


def test_ids_that_differ_in_their_unicode_form_alone_are_one(store):
    with store.session("own") as session:
        session.set(NFD, x=KEYS[0])
        session.set(NFC, y=KEYS[1])
        session.flush()
        session.set("b", x=KEYS[2])
        session.remove(NFD)
        session.set(NFC, x=KEYS[3])
    assert rows(store) == {"b": {"x": KEYS[2]}, NFC: {"x": KEYS[3]}}
    store.publish("own", {NFD: {"y": KEYS[0]}}, update=True)
    store.publish("own", Rows([NFD], {"z": KEYS[:1]}, {"score": [1]}), update=True)
    found = store.dataset("own")
    assert rows(store) == {"b": {"x": KEYS[2]}, NFC: {"x": KEYS[3], "y": KEYS[0], "z": KEYS[0]}}
    assert found[NFD] == found[NFC]
    assert NFD in found
    with pytest.raises(BadInput, check=asks_for("rows")):
        store.publish("own", {NFD: {"y": []}}, update=True)


@pytest.mark.parametrize("table", [lambda: {NFC: {}, NFD: {}}, lambda: Rows([NFD, NFC], {})], ids=["mapping", "rows"])
def test_two_rows_whose_ids_become_one_are_refused(store, table):
    with pytest.raises(BadInput, check=asks_for("rows")):
        store.publish("own", table())
    assert store.names() == []


@pytest.mark.parametrize("wrong", ["", None, 7])
def test_what_cannot_be_an_id_is_refused_with_the_argument(store, wrong):
    session = store.session("own")
    for call, option in (
        (lambda: session.set(wrong, x=KEYS[0]), "sample"),
        (lambda: session.remove(wrong), "sample"),
        (lambda: store.publish("own", {wrong: {"x": KEYS[0]}}), "rows"),
        (lambda: Rows([wrong], {}), "rows"),
    ):
        with pytest.raises(BadInput, check=asks_for(option)):
            call()
    assert not session.has_changes


@pytest.mark.parametrize("name", ["", "a" * 300, "\ud800", " ", 5, None])
def test_a_name_that_no_folder_can_have_is_refused(store, name):
    for begin in (store.session, store.files, lambda name: store.publish(name, {})):
        with pytest.raises(BadInput, check=asks_for("name")):
            begin(name)
    assert store.names() == []


def test_rows_that_a_flush_refused_are_gone_and_the_others_stay(store):
    with store.session("own") as session:
        session.set("good", x=KEYS[0])
        session.set("bad", x=MISSING)
        session.remove("other")
        with pytest.raises(BadInput):
            session.flush()
        session.set("later", x=KEYS[1])
    assert rows(store) == {"good": {"x": KEYS[0]}, "later": {"x": KEYS[1]}}


def test_a_value_that_was_refused_leaves_nothing_in_a_session_or_a_writer(store):
    """One whose JSON value was too deep to be read again stopped every later flush."""
    deep = json.loads("[" * 800 + "]" * 800)
    with store.session("own") as session, store.writer() as writer:
        for one in (session, writer):
            for tensors, meta in (({"a/b": np.zeros(1, np.float32)}, None), ({"x": np.zeros(1, np.float32)}, {"a": deep})):
                with pytest.raises(BadInput):
                    one.put(MISSING, tensors, meta)
            one.flush()
        session.put(MISSING, {"x": np.zeros(1, np.float32)})
        session.set("a", x=MISSING)
    assert rows(store) == {"a": {"x": MISSING}}


def test_a_session_that_has_ended_takes_nothing_more(store):
    with store.session("own") as session:
        session.set("a", x=KEYS[0])
    closed = store.session("own")
    closed.close()
    closed.close()
    with pytest.raises(ZeroDivisionError), store.session("own") as raised:
        raise ZeroDivisionError
    left = store.session("own")
    store.close()
    for one in (session, closed, raised, left):
        with pytest.raises(CacheStoreError):
            one.put(MISSING, {"x": np.zeros(1)})
        with pytest.raises(CacheStoreError):
            one.set("b", x=KEYS[0])
        with pytest.raises(CacheStoreError):
            one.remove("a")
        with pytest.raises(CacheStoreError):
            one.flush()
    assert rows(cs.open(store.layout.root)) == {"a": {"x": KEYS[0]}}


def test_a_session_whose_data_set_was_dropped_says_so_once_for_what_it_set(store):
    with store.session("own") as session:
        drop(store.layout.root, "own")
        session.set("a", x=KEYS[0])
        session.remove("b")
        with pytest.raises(BadInput):
            session.flush()
    assert not list_line(store.layout, "own").is_there
