"""Sessions and whole tables against a model, beside each other, and where a process sleeps or the disk refuses."""

import subprocess
import sys
import textwrap
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.core.errors import BadInput, WriteFailed
from cachestore.core.keys import Key
from cachestore.store.format.line import list_line, read_start
from cachestore.store.read.rows import Rows
from cachestore.store.write import publish as publishing
from cachestore.store.write.publish import make_table, publish_bare
from tests import fakes

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
            assert other.describe(MISSING).meta == {"note": "kept", "owner": "own"}


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
    monkeypatch.setattr(publishing, "BLOCKS", (4, 16))
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
    monkeypatch.setattr(publishing, "_TABLE_ROWS", 10)
    with store.session("own") as session:
        for number in range(100):
            session.set(f"s{number}", x=KEYS[0])
            session.flush()
        tables = list_line(store.layout, "own").tables
    assert 5 <= len(tables) <= 9
    assert len(rows(store)) == 100


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
    end = publish_bare(store.layout, "own", "dropped")
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
    looks, checked = [], publishing._check_keys

    def check_then_sleep(*arguments):
        checked(*arguments)
        looks.append(1)
        if len(looks) == 1:
            mark_all(store)
            publish_bare(store.layout, "own", "fence")

    with store.session("own") as session:
        monkeypatch.setattr(publishing, "_check_keys", check_then_sleep)
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
    listed, slept = publishing.list_line, []

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
    monkeypatch.setattr(publishing, "list_line", list_then_sleep)
    number = sleeper.flush()
    assert list(rows(store)) == ["old", "other0", "other1", "other2", "late"]
    assert number == list_line(store.layout, "own").highest


def test_a_flush_that_failed_after_its_link_is_not_published_twice(store, monkeypatch):
    session = store.session("own")
    session.set("a", x=KEYS[0])
    published = publishing.publish

    def publish_then_fail(*arguments, **options):
        published(*arguments, **options)
        raise WriteFailed("the folder could not be synced")

    monkeypatch.setattr(publishing, "publish", publish_then_fail)
    with pytest.raises(WriteFailed):
        session.flush()
    monkeypatch.setattr(publishing, "publish", published)
    with store.session("own") as other:
        other.set("a", x=KEYS[1])
    session.flush()
    assert rows(store) == {"a": {"x": KEYS[1]}}


def test_eight_threads_publish_into_one_line_and_nothing_is_lost(store):
    def work(number):
        with cs.open(store.layout.root, mode="a") as own, own.session("own") as session:
            for step in range(6):
                session.set(f"{number}-{step}", x=KEYS[step % 4])
                session.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(rows(store)) == {f"{number}-{step}" for number in range(8) for step in range(6)}
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


# Rows


@pytest.mark.parametrize(
    ("ids", "parts", "columns"),
    [
        (["a", "a"], {"x": KEYS[:2]}, {}),
        (["a", ""], {"x": KEYS[:2]}, {}),
        (["a"], {"x": KEYS[:2]}, {}),
        (["a"], {"x": np.zeros((1, 16), np.int64)}, {}),
        (["a"], {"x": KEYS[:1]}, {"c": [1, 2]}),
        (["a"], {"x": KEYS[:1]}, {"c": [None]}),
    ],
)
def test_rows_that_do_not_fit_are_refused(ids, parts, columns):
    with pytest.raises(BadInput):
        Rows(ids, parts, columns)


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
