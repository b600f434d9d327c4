"""Data sets that sessions publish, between folders and addresses: nobody's rows are hidden by another line of the same name."""

import pickle

import numpy as np
import pytest

import cachestore as cs
from cachestore.care.collect import drop
from cachestore.care.lines import tidy_line
from cachestore.core.errors import BadInput, Incomplete
from cachestore.remote import pull as pulling
from cachestore.remote.listing import list_client
from cachestore.remote.pull import pull_from
from cachestore.remote.push import push_to
from cachestore.remote.reader import open_address
from cachestore.store.format.line import list_line
from cachestore.store.write import link
from cachestore.store.write.folding import make_table
from tests.fakes import asks_for
from tests.remote.copies import make, request, wrong_in
from tests.remote.fake import Bucket

KEYS = {sample: cs.key("published", sample) for sample in "abcdefg"}


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def store(tmp_path):
    return flushed(tmp_path / "store", "a", "b")


def flushed(root, *samples):
    """A store into whose data set a session has flushed these rows, one by one."""
    store = cs.open(root, mode="a")
    session = store.session("own")
    for sample in samples:
        session.put(KEYS[sample], {"x": np.full(2, ord(sample), np.float32)})
        session.set(sample, x=KEYS[sample])
        session.flush()
    return store


def push(store, bucket, **named):
    return push_to(bucket.client(), store.layout, request(**named))


def pull(root, bucket, **named):
    return pull_from(bucket.client(), root, request(**named))


def rows(root):
    with cs.open(root) as reader:
        table = reader.dataset("own")
        assert all(reader.get(KEYS[sample], as_numpy=True)["x"][0] == ord(sample) for sample in table)
        return list(table)


def both_ends(bucket, root):
    return dict(bucket.objects), {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.parent.name != "locks"}


def test_a_data_set_goes_to_an_address_and_into_a_new_store_as_tables_alone(store, bucket, tmp_path):
    report = push(store, bucket)
    assert report.generations["own"][-1] == list_line(store.layout, "own").tables[-1]
    assert not [key for key in bucket.objects if key.endswith(".changes")]
    listed = [(found.name, found.generation, found.samples) for found in list_client(bucket.client()).catalogs]
    assert listed == [("own", 1, 0), ("own", 3, 2)]
    pull(tmp_path / "copy", bucket)
    assert rows(tmp_path / "copy") == ["a", "b"]
    assert wrong_in(tmp_path / "copy") == []
    assert pull(tmp_path / "copy", bucket).files == push(store, bucket).files == 0


@pytest.mark.parametrize("name", [None, "own"])
def test_an_older_state_of_a_line_goes_on_and_both_stores_take_turns(store, bucket, tmp_path, name):
    push(store, bucket, name=name)
    copy = tmp_path / "copy"
    pull(copy, bucket, name=name)
    flushed(store.layout.root, "c", "d")
    push(store, bucket, name=name)
    for _run in range(5):  # as `gc` does, which is no other line
        tidy_line(cs.open(copy).layout, "own", with_fence=True)
    pull(copy, bucket, name=name)
    assert rows(copy) == ["a", "b", "c", "d"]
    flushed(copy, "e")
    push(cs.open(copy), bucket, name=name)
    pull(store.layout.root, bucket, name=name)
    assert rows(store.layout.root) == ["a", "b", "c", "d", "e"]
    flushed(store.layout.root, "f")
    assert rows(store.layout.root) == ["a", "b", "c", "d", "e", "f"]
    assert wrong_in(copy) == wrong_in(store.layout.root) == []


@pytest.mark.parametrize("samples", ["a", "ab", "cdef"], ids=["fewer", "equal", "more"])
def test_another_line_of_the_name_is_refused_both_ways_and_nothing_changes(store, bucket, tmp_path, samples):
    push(store, bucket)
    other = flushed(tmp_path / "other", *samples)
    tidy_line(other.layout, "own", with_fence=False)
    before = both_ends(bucket, other.layout.root)
    for move in (lambda: push(other, bucket), lambda: pull(other.layout.root, bucket), lambda: pull(other.layout.root, bucket, name="own")):
        with pytest.raises(BadInput, check=asks_for("name")):
            move()
    assert both_ends(bucket, other.layout.root) == before
    assert rows(other.layout.root) == list(samples)


@pytest.mark.parametrize("more", ["c", "cde"], ids=["behind", "ahead"])
def test_two_stores_of_one_line_that_went_different_ways_are_refused(store, bucket, tmp_path, more):
    push(store, bucket)
    copy = tmp_path / "copy"
    pull(copy, bucket)
    flushed(copy, *more)
    flushed(store.layout.root, "f", "g")
    push(store, bucket)
    before = bucket.objects.copy()
    for move in (lambda: push(cs.open(copy), bucket), lambda: pull(copy, bucket)):
        with pytest.raises(BadInput, check=asks_for("name")):
            move()
    assert bucket.objects == before
    assert rows(copy) == ["a", "b", *more]


def test_a_store_that_is_behind_the_address_has_nothing_to_send(store, bucket, tmp_path):
    push(store, bucket)
    copy = tmp_path / "copy"
    pull(copy, bucket)
    flushed(store.layout.root, "c")
    push(store, bucket)
    assert push(cs.open(copy), bucket).files == 0


def test_rows_that_the_store_no_longer_keeps_do_not_stop_the_next_push(store, bucket, tmp_path):
    push(store, bucket)
    flushed(store.layout.root, "c", "d")
    make_table(store.layout, "own")
    for number in range(1, 5):  # as `gc` does later
        store.layout.entry("own", number).unlink(missing_ok=True)
        store.layout.catalog("own", number).unlink(missing_ok=True)
    push(store, bucket)
    pull(tmp_path / "copy", bucket, name="own")
    assert rows(tmp_path / "copy") == ["a", "b", "c", "d"]


def test_another_line_is_known_by_its_id_where_its_older_rows_are_gone(store, bucket, tmp_path):
    push(store, bucket, name="own")
    other = flushed(tmp_path / "other", "c", "d", "e", "f")
    newest = make_table(other.layout, "own")
    for number in range(1, newest):
        other.layout.entry("own", number).unlink(missing_ok=True)
        other.layout.catalog("own", number).unlink(missing_ok=True)
    with pytest.raises(BadInput, check=asks_for("name")):
        push(other, bucket, name="own")


def test_a_push_that_was_overtaken_by_another_line_hides_nothing(store, bucket, tmp_path):
    other = flushed(tmp_path / "other", "c", "d", "e")

    def before(verb, key):
        if verb == "put" and key.startswith("segments/") and not meanwhile:
            meanwhile.append(push(other, bucket, name="own"))

    meanwhile = []
    with pytest.raises(BadInput, check=asks_for("name")):
        push_to(bucket.client(before=before), store.layout, request(name="own"))
    pull(tmp_path / "copy", bucket)
    assert rows(tmp_path / "copy") == ["c", "d", "e"]


def test_what_was_dropped_can_be_published_and_pushed_anew_and_does_not_come_back(store, bucket, tmp_path):
    push(store, bucket)
    drop(store.layout.root, "own")
    with pytest.raises(BadInput, check=asks_for("name")):
        pull(store.layout.root, bucket, name="own")
    assert "left out" in pull(store.layout.root, bucket).remarks[0]
    assert store.names() == []
    flushed(store.layout.root, "c")
    push(store, bucket)
    pull(tmp_path / "copy", bucket)
    assert rows(tmp_path / "copy") == ["c"]


def test_a_data_set_that_a_pass_made_is_no_line_of_a_session(store, bucket, tmp_path):
    make(tmp_path / "pass", [1, 2], [3], [4], name="own")
    push(cs.open(tmp_path / "pass"), bucket)
    for move in (lambda: push(store, bucket), lambda: pull(store.layout.root, bucket)):
        with pytest.raises(BadInput, check=asks_for("name")):
            move()


@pytest.mark.parametrize("more", ["c", "cde"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_rows_that_are_flushed_while_a_newer_state_comes_lie_over_it(store, bucket, tmp_path, monkeypatch, moment, more):
    """A session of the folder flushes between the look at both ends and the table; or it sleeps before its link until the table came."""
    push(store, bucket)
    copy = tmp_path / "copy"
    pull(copy, bucket)
    flushed(store.layout.root, *more)
    push(store, bucket)
    published, slept = pulling.publish_pieces, link.publish

    def flush_then_place(layout, final, *arguments, **named):
        if final.parent.parent.name == "catalogs" and moment == "before":
            flushed(copy, "f")
        return published(layout, final, *arguments, **named)

    def sleep_then_link(layout, final, *arguments, **named):
        if final.suffix == ".changes" and moment == "after":
            monkeypatch.setattr(link, "publish", slept)
            pull(copy, bucket)
        return slept(layout, final, *arguments, **named)

    monkeypatch.setattr(pulling, "publish_pieces", flush_then_place)
    monkeypatch.setattr(link, "publish", sleep_then_link)
    if moment == "before":
        pull(copy, bucket)
    else:
        flushed(copy, "f")
    assert rows(copy) == ["a", "b", *more, "f"]


def test_a_table_that_is_published_while_a_newer_state_comes_is_named(store, bucket, tmp_path, monkeypatch):
    push(store, bucket)
    copy = tmp_path / "copy"
    pull(copy, bucket)
    flushed(store.layout.root, "c", "d", "e")
    push(store, bucket)
    published = pulling.publish_pieces

    def publish_then_place(layout, final, *arguments, **named):
        if final.parent.parent.name == "catalogs":
            with cs.open(copy, mode="a") as own:
                own.publish("own", {"a": {"x": KEYS["a"]}})
        return published(layout, final, *arguments, **named)

    monkeypatch.setattr(pulling, "publish_pieces", publish_then_place)
    with pytest.raises(Incomplete):
        pull(copy, bucket)


def test_a_pull_that_is_killed_at_any_call_leaves_rows_of_one_state_and_goes_on(store, bucket, tmp_path):
    push(store, bucket)
    old = dict(bucket.objects)
    flushed(store.layout.root, "c", "d")
    push(store, bucket)
    for fatal in range(1, 40):
        copy, left = tmp_path / f"copy{fatal}", [fatal]
        pull_from(Bucket(dict(old)).client(), copy, request())

        def strike(_verb, _key, left=left):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        try:
            pull_from(bucket.client(after=strike), copy, request(jobs=1))
        except KeyboardInterrupt:
            assert rows(copy) in (["a", "b"], ["a", "b", "c", "d"])
        pull(copy, bucket)
        assert rows(copy) == ["a", "b", "c", "d"]
        if left[0] > 0:
            break
    else:
        pytest.fail("it makes more calls than were looked at")


@pytest.mark.processes
def test_a_reader_of_an_address_lists_and_reads_published_data_sets(store, tmp_path):
    address = f"file://{tmp_path / 'there'}"
    (tmp_path / "there").mkdir()
    cs.push(store.layout.root, address)
    flushed(store.layout.root, "c")
    cs.push(store.layout.root, address)
    with open_address(address, verify="first", io="pread", local=tmp_path / "local", limit=None) as reader:
        assert reader.names() == ["own"]
        assert list(reader.dataset("own")) == ["a", "b", "c"]
        assert [len(reader.dataset("own", number)) for number in (1, 3)] == [0, 2]
        for wrong in (lambda: reader.dataset("own", 99), lambda: reader.dataset("owl"), lambda: reader.dataset("own", 2)):
            with pytest.raises(BadInput):
                wrong()
        packed = pickle.dumps(reader)
    with pickle.loads(packed) as copy:
        assert copy.names() == ["own"]
        assert list(copy.dataset("own")) == ["a", "b", "c"]
    with pytest.raises(cs.CacheStoreError):
        reader.names()
