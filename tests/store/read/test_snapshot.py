"""Snapshots: index and tail together equal what the listed segments hold, whatever indexes there are."""

import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError, NewerFormat, StoreNotFound
from cachestore.files.marker import FORMAT
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, Mode
from cachestore.files.records import encode_record
from cachestore.store.format.locations import Located
from cachestore.store.format.segment import read_contents
from cachestore.store.read import snapshot as snapshots
from cachestore.store.read.snapshot import Snapshot, list_indexes, list_segments, load_snapshot, open_layout
from cachestore.store.write.commit import commit, create_store
from tests.fakes import examples
from tests.store.stores import flip, key_of, put

KEYS = range(6)


def expected(layout):
    """The truth, from nothing but the segments: each key's copies in the order of their segments' names."""
    copies = {}
    for digest in sorted(list_segments(layout)):
        for each in read_contents(layout.segment(digest)).entries:
            copies.setdefault(each.key, []).append((digest, each.ordinal, each.offset, each.specs, each.checksum))
    return copies


def assert_equals_the_segments(layout, snapshot):
    truth = expected(layout)
    assert list(snapshot.keys()) == sorted(truth)
    assert [(key, [location.segment.digest for location in locations]) for key, locations in snapshot.items()] == [
        (key, [copy[0] for copy in truth[key]]) for key in sorted(truth)
    ]
    assert len(snapshot) == len(truth)
    found = snapshot.find([key_of(n) for n in KEYS])
    for n, locations in zip(KEYS, found, strict=True):
        seen = [(location.segment.digest, location.ordinal, location.offset, location.specs, location.checksum) for location in locations]
        assert seen == truth.get(key_of(n), [])
        assert (key_of(n) in snapshot) == (key_of(n) in truth)
    present = [locations for locations in found if locations]
    assert snapshot.locate([key_of(n) for n in KEYS if key_of(n) in truth]) == Located.of([locations[0] for locations in present])
    assert (snapshot.locate([key_of(n) for n in KEYS]) is None) == (len(present) < len(KEYS))
    assert {ref.digest for ref in snapshot.segments()} == list_segments(layout)
    assert snapshot.listed == list_segments(layout)


def test_a_store_without_entries_has_an_empty_snapshot(layout):
    with closing(load_snapshot(layout)) as snapshot:
        assert (len(snapshot), list(snapshot.keys()), snapshot.generation, snapshot.segments()) == (0, [], -1, [])
        assert snapshot.find([]) == []
        assert snapshot.find([key_of(1)]) == [[]]


def test_an_index_without_entries_is_an_index(layout):
    layout.segment(put(layout, 1, is_committed=True)).unlink()
    with closing(commit(layout)) as snapshot:
        assert (snapshot.generation, len(snapshot), list(snapshot.keys())) == (2, 0, [])
        assert snapshot.find([key_of(1)]) == [[]]
        with closing(commit(layout, snapshot=snapshot)) as again:
            assert again.generation == 2


steps = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 1)), min_size=1, max_size=3).map(lambda entries: ("put", entries)),
        st.just(("commit", None)),
        st.integers(0, 9).map(lambda n: ("remove a segment", n)),
        st.integers(0, 9).map(lambda n: ("delete an index", n)),
    ),
    max_size=12,
)


@examples(60)
@given(steps=steps, dropped=st.sets(st.integers(0, 5)))
def test_whatever_was_committed_removed_and_deleted_a_snapshot_equals_the_segments(steps, dropped):
    with tempfile.TemporaryDirectory() as folder:
        layout = create_store(Path(folder))
        snapshot = load_snapshot(layout)
        for what, argument in steps:
            if what == "put":
                for variant in (0, 1):
                    if numbers := sorted({n for n, v in argument if v == variant}):
                        put(layout, *numbers, variant=variant)
            elif what == "commit":
                newer = commit(layout, snapshot=snapshot)
                snapshot.close()
                snapshot = newer
            elif what == "remove a segment":
                for digest in sorted(list_segments(layout))[argument : argument + 1]:
                    layout.segment(digest).unlink()
            else:
                for name in list_indexes(layout)[argument : argument + 1]:
                    layout.index(name).unlink()
            newer = load_snapshot(layout, earlier=snapshot)
            snapshot.close()
            snapshot = newer
            assert_equals_the_segments(layout, snapshot)
        snapshot.close()
        for number, name in enumerate(list_indexes(layout)):
            if number in dropped:
                layout.index(name).unlink()
        with closing(load_snapshot(layout)) as last:
            assert_equals_the_segments(layout, last)


def test_a_damaged_index_is_passed_over_for_an_older_one(layout):
    put(layout, 1, is_committed=True)
    put(layout, 2, is_committed=True)
    newest, _older = list_indexes(layout)
    flip(layout.index(newest), 5000)
    with closing(load_snapshot(layout)) as snapshot:
        assert snapshot.generation == 1
        assert_equals_the_segments(layout, snapshot)


def test_without_a_good_index_all_segments_are_read(layout):
    put(layout, 1)
    put(layout, 2, is_committed=True)
    [name] = list_indexes(layout)
    flip(layout.index(name), 5000)
    with closing(load_snapshot(layout)) as snapshot:
        assert snapshot.generation == -1
        assert_equals_the_segments(layout, snapshot)


def test_a_segment_whose_header_is_damaged_is_left_out_and_reported(layout):
    bad, good = put(layout, 1), put(layout, 2)
    flip(layout.segment(bad), 20)
    with closing(load_snapshot(layout)) as snapshot:
        assert set(snapshot.unreadable) == {bad}
        assert list(snapshot.keys()) == [key_of(2)]
        assert [ref.digest for ref in snapshot.segments()] == [good]


@pytest.mark.parametrize("change", ["cut", "grown", "link", "gone"])
def test_where_it_decides_what_to_encode_a_covered_segment_of_another_size_counts_as_vanished(layout, change):
    path = layout.segment(put(layout, 1))
    put(layout, 2, is_committed=True)
    path.chmod(0o644)
    if change in {"link", "gone"}:
        path.unlink()
    if change == "link":
        path.symlink_to("nothing")
    if change in {"cut", "grown"}:
        os.truncate(path, path.stat().st_size + (1 if change == "grown" else -1))
    with closing(load_snapshot(layout, for_planning=True)) as careful, closing(load_snapshot(layout)) as quick:
        assert list(careful.keys()) == [key_of(2)]
        assert (key_of(1) in quick) == (change != "gone")


def test_a_key_in_the_index_and_in_the_tail_is_listed_once(layout):
    put(layout, 1, 2, is_committed=True)
    put(layout, 2, 3)
    with closing(load_snapshot(layout)) as snapshot:
        assert sorted(snapshot.keys()) == sorted(key_of(n) for n in (1, 2, 3))
        assert len(snapshot) == 3


def test_files_that_are_not_ours_are_not_listed(layout):
    digest = put(layout, 1)
    (layout.segment(digest).parent / "notes.txt").touch()
    (layout.segments / "zz").mkdir()
    layout.segment(digest).rename(layout.segments / "zz" / layout.segment(digest).name)
    (layout.segments / "file").touch()
    assert list_segments(layout) == frozenset()


def test_a_segment_and_an_index_published_while_a_snapshot_is_taken_are_not_mistaken_for_lost(layout, monkeypatch):
    put(layout, 1)
    real = snapshots.list_segments

    def while_listing(layout):
        listed = real(layout)
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "list_segments", real)
            put(layout, 2, is_committed=True)
        return listed

    monkeypatch.setattr(snapshots, "list_segments", while_listing)
    with closing(load_snapshot(layout)) as snapshot:
        assert snapshot.vanished == frozenset()
        assert key_of(1) in snapshot


def test_a_newer_snapshot_does_not_count_or_read_again_what_the_earlier_one_holds(layout, monkeypatch):
    put(layout, 1, is_committed=True)
    put(layout, 2)
    with closing(load_snapshot(layout)) as earlier:
        put(layout, 3)
        read = []
        monkeypatch.setattr(Snapshot, "__len__", None)
        monkeypatch.setattr(snapshots, "read_contents", lambda path: read.append(path) or read_contents(path))
        monkeypatch.setattr(snapshots, "check", None)
        with closing(load_snapshot(layout, earlier=earlier)) as newer:
            assert len(read) == 1
            assert all(newer.find([key_of(n) for n in (1, 2, 3)]))


def test_an_old_snapshot_is_as_it_was_after_a_newer_one_was_taken(layout):
    put(layout, 1)
    with closing(load_snapshot(layout)) as old:
        put(layout, 2, is_committed=True)
        assert list(old.keys()) == [key_of(1)]


def test_copies_in_the_index_and_in_the_tail_are_joined_in_the_order_of_names(layout):
    digests = [put(layout, 1, variant=0), put(layout, 1, variant=1)]
    commit(layout).close()
    digests += [put(layout, 1, variant=2), put(layout, 1, variant=3)]
    with closing(load_snapshot(layout)) as snapshot:
        assert [location.segment.digest for location in snapshot.find([key_of(1)])[0]] == sorted(digests)


class TestOpening:
    def test_a_store_has_the_mode_it_was_made_with(self, tmp_path):
        create_store(tmp_path / "store", mode=Mode.GROUP)
        assert open_layout(Layout(tmp_path / "store")).mode is Mode.GROUP

    @pytest.mark.parametrize("path", ["missing", "missing/too", "file", "file/below", "empty"])
    def test_where_there_is_no_store_it_is_reported(self, tmp_path, path):
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        with pytest.raises(StoreNotFound):
            open_layout(Layout(tmp_path / path))
        assert names_in(tmp_path) == ["empty", "file"]

    def test_a_newer_store_is_refused_with_the_way_out(self, layout):
        layout.marker.write_bytes(encode_record(FORMAT, 2, {"store_id": "0", "mode": "private"}))
        with pytest.raises(NewerFormat):
            open_layout(Layout(layout.root))

    @pytest.mark.parametrize(
        "body",
        [{}, {"mode": "secret", "store_id": "0"}, {"mode": None, "store_id": "0"}, {"mode": "private"}, {"mode": "private", "store_id": 1}],
        ids=str,
    )
    def test_a_marker_without_an_id_and_a_mode_that_is_known_is_a_format_error(self, layout, body):
        layout.marker.write_bytes(encode_record(FORMAT, 1, body))
        with pytest.raises(FormatError):
            open_layout(Layout(layout.root))

    def test_a_damaged_marker_is_a_format_error(self, layout):
        flip(layout.marker, 12)
        with pytest.raises(FormatError):
            open_layout(Layout(layout.root))
