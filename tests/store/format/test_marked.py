"""Segments that are marked for deletion: hidden from who plans, shown to who reads, and never given back."""

import errno
import os
from contextlib import closing

import pytest

from cachestore.care.gc import mark
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.errors import NewerFormat, ReadFailed
from cachestore.files.opening import names_in
from cachestore.files.records import encode_record
from cachestore.store.format.marked import FORMAT, list_marked, marked_segments, read_marked
from cachestore.store.read.snapshot import list_segments, load_snapshot, visible_segments
from cachestore.store.write.commit import commit
from tests.fakes import refusing
from tests.store.stores import flip, key_of, put, read, tensors_of


def planned(layout, *numbers, **options):
    with closing(load_snapshot(layout, for_planning=True, **options)) as snapshot:
        return [n for n in numbers if key_of(n) in snapshot]


def test_without_lists_nothing_is_marked(layout):
    assert (list_marked(layout), marked_segments(layout), mark(layout, [])) == ([], frozenset(), None)
    assert names_in(layout.marked) == []


def test_what_is_marked_is_hidden_from_who_plans_and_shown_to_who_reads(layout):
    gone, _kept = put(layout, 1), put(layout, 2)
    mark(layout, [gone])
    assert planned(layout, 1, 2) == [2]
    assert read(layout, 1) == tensors_of(1)
    commit(layout).close()
    assert planned(layout, 1, 2) == [2]
    assert read(layout, 1) == tensors_of(1)


def test_a_copy_elsewhere_is_counted_on(layout):
    mark(layout, [put(layout, 1)])
    put(layout, 1, 2)
    assert planned(layout, 1, 2) == [1, 2]


def test_a_snapshot_for_planning_stays_one_when_it_is_committed(layout):
    mark(layout, [put(layout, 1)])
    put(layout, 2)
    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        for _again in range(2):
            with closing(commit(layout, snapshot=snapshot)) as after:
                assert (after.for_planning, key_of(1) in after, key_of(2) in after) == (True, False, True)


def test_the_same_entries_put_again_get_a_name_that_is_not_marked(layout):
    old = put(layout, 1)
    mark(layout, [old])
    new = put(layout, 1)
    assert new != old
    assert visible_segments(layout) == {new}
    layout.segment(old).unlink()
    assert put(layout, 1) == new
    assert list_segments(layout) == {new}


def test_lists_add_up(layout):
    digests = [put(layout, n) for n in range(3)]
    lists = [mark(layout, [digest]) for digest in digests[:2]]
    assert sorted(each.digest for each in list_marked(layout)) == sorted(map(str, lists))
    assert marked_segments(layout) == set(digests[:2])


def test_a_damaged_list_counts_for_nobody_is_reported_and_put_aside(layout):
    path = layout.marked_list(str(mark(layout, [put(layout, 1)])))
    flip(path, 30)
    read_marked.cache_clear()
    assert planned(layout, 1) == [1]
    assert [finding.kind for finding in verify(layout.root).findings] == ["bad-list"]
    assert repair(layout.root).quarantined == (f"marked/{path.name}",)
    assert verify(layout.root).ok


def test_a_list_of_a_newer_format_is_refused_as_nobody_knows_what_it_says(layout):
    mark(layout, [put(layout, 1)])
    layout.marked_list("f" * 32).write_bytes(encode_record(FORMAT, 2, {"segments": []}))
    with pytest.raises(NewerFormat):
        load_snapshot(layout, for_planning=True)
    load_snapshot(layout).close()
    assert repair(layout.root).quarantined == ()


def test_a_list_that_cannot_be_read_lets_nobody_plan_as_others_act_on_it(layout, monkeypatch):
    digest = put(layout, 1)
    mark(layout, [digest])
    read_marked.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refusing(errno.EIO))
        with pytest.raises(ReadFailed):
            marked_segments(layout)
    assert marked_segments(layout) == {digest}


def test_a_foreign_file_beside_the_lists_is_reported_and_left(layout):
    mark(layout, [put(layout, 1)])
    (layout.marked / "notes.txt").write_text("mine")
    assert [(finding.kind, finding.path) for finding in verify(layout.root).findings] == [("foreign-file", "marked/notes.txt")]
