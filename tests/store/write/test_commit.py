"""Creating a store and committing."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest

from cachestore.care.verify import verify
from cachestore.core.errors import BadInput, StoreNotFound, WriteFailed
from cachestore.core.keys import Recipe
from cachestore.files.locks import LifeLock
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, Mode
from cachestore.files.records import read_record
from cachestore.store.format.segment import read_contents
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot, open_layout
from cachestore.store.write import commit as committing
from cachestore.store.write.commit import RECIPE_FORMAT, commit, commit_if_due, create_store, publish_recipe
from tests.fakes import overtaken, raising, refusing
from tests.store.stores import flip, key_of, put, read, tensors_of


class TestCreating:
    @pytest.mark.parametrize("path", ["new", "new/below", "empty"])
    def test_a_store_is_made_where_there_is_nothing(self, tmp_path, path):
        (tmp_path / "empty").mkdir()
        layout = create_store(tmp_path / path)
        assert open_layout(Layout(tmp_path / path)) == layout
        assert verify(layout.root).ok

    def test_a_store_that_is_there_is_opened_as_it_is(self, tmp_path):
        first = create_store(tmp_path / "store", mode=Mode.GROUP)
        raw = first.marker.read_bytes()
        assert create_store(tmp_path / "store") == first
        assert first.marker.read_bytes() == raw

    def test_two_stores_have_two_ids(self, tmp_path):
        ids = {read_record(create_store(tmp_path / name).marker, "cachestore-store", 1)["store_id"] for name in ("a", "b")}
        assert len(ids) == 2

    def test_a_relative_path_is_made_absolute(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert create_store(tmp_path.relative_to(tmp_path) / "store").root == tmp_path / "store"

    def test_a_store_that_a_stale_view_still_denies_is_opened_once_it_shows(self, layout, monkeypatch):
        """NFS denies a name that was looked up in vain for up to 30 s, while a listing shows it."""
        denied, real, slept = [1, 2, 3], committing.open_layout, []

        def stale(layout):
            if denied:
                denied.pop()
                raise StoreNotFound("no store yet")
            return real(layout)

        monkeypatch.setattr(committing, "open_layout", stale)
        monkeypatch.setattr(committing.time, "sleep", slept.append)
        assert create_store(layout.root) == layout
        assert len(slept) == 3

    def test_a_store_that_stays_denied_is_an_error_after_a_while(self, layout, monkeypatch):
        monkeypatch.setattr(committing, "open_layout", raising(StoreNotFound("no store yet")))
        monkeypatch.setattr(committing, "STALE_SECONDS", 0.0)
        with pytest.raises(StoreNotFound):
            create_store(layout.root)

    def test_a_folder_that_holds_something_else_is_left_alone(self, tmp_path):
        (tmp_path / "photo.jpg").touch()
        with pytest.raises(BadInput):
            create_store(tmp_path)
        assert names_in(tmp_path) == ["photo.jpg"]

    def test_a_file_in_its_place_is_refused(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(BadInput):
            create_store(tmp_path / "file")

    def test_what_a_killed_creation_left_is_completed(self, tmp_path):
        (tmp_path / "store" / "tmp").mkdir(parents=True)
        (tmp_path / "store" / "tmp" / f"{'0' * 32}.tmp").touch()
        assert create_store(tmp_path / "store").marker.exists()

    def test_who_loses_the_race_to_create_takes_the_winners_store(self, tmp_path, monkeypatch):
        overtaken(monkeypatch, committing, "publish", lambda: create_store(tmp_path / "store", mode=Mode.GROUP))
        assert create_store(tmp_path / "store").mode is Mode.GROUP

    def test_a_marker_that_a_look_up_does_not_see_yet_is_found_in_the_listing(self, tmp_path, monkeypatch):
        """NFS answers "not there" from its cache for 30 s after another node made a file."""
        create_store(tmp_path / "store", mode=Mode.GROUP)
        monkeypatch.setattr(Path, "exists", lambda _path: False)
        assert create_store(tmp_path / "store").mode is Mode.GROUP

    def test_a_refused_write_is_a_write_failed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "write", refusing(errno.ENOSPC))
        with pytest.raises(WriteFailed):
            create_store(tmp_path / "store")
        assert names_in(tmp_path / "store" / "tmp") == []


class TestCommitting:
    def test_an_empty_store_needs_no_index(self, layout):
        with closing(commit(layout)) as snapshot:
            assert snapshot.generation == -1
        assert list_indexes(layout) == []

    def test_an_index_covers_every_segment(self, layout):
        digests = {put(layout, 1), put(layout, 2)}
        with closing(commit(layout)) as snapshot:
            assert snapshot.generation == 1
            assert not snapshot.uncovered
            assert {ref.digest for ref in snapshot.index.segments.values()} == digests

    def test_nothing_new_makes_no_newer_index(self, layout):
        put(layout, 1)
        for _time in range(3):
            commit(layout).close()
        assert [name.number for name in list_indexes(layout)] == [1]

    def test_a_newer_index_extends_the_newest(self, layout):
        put(layout, 1, is_committed=True)
        put(layout, 2)
        with closing(commit(layout)) as snapshot:
            assert snapshot.generation == 2
            assert len(snapshot) == 2
            assert not snapshot.uncovered

    def test_a_segment_that_is_gone_leaves_the_next_index(self, layout):
        gone = put(layout, 1)
        put(layout, 2, is_committed=True)
        layout.segment(gone).unlink()
        with closing(commit(layout)) as snapshot:
            assert list(snapshot.keys()) == [key_of(2)]
            assert not snapshot.vanished

    def test_a_segment_that_comes_back_is_covered_again(self, layout, tmp_path):
        path = layout.segment(put(layout, 1))
        commit(layout).close()
        path.rename(tmp_path / "away")
        commit(layout).close()
        (tmp_path / "away").rename(path)
        with closing(commit(layout)) as snapshot:
            assert (snapshot.generation, list(snapshot.keys())) == (3, [key_of(1)])

    def test_a_damaged_newest_index_is_succeeded_by_one_with_a_higher_number(self, layout):
        put(layout, 1, is_committed=True)
        flip(layout.index(list_indexes(layout)[0]), 5000)
        with closing(commit(layout)) as snapshot:
            assert snapshot.generation == 2

    def test_a_segment_that_cannot_be_read_is_not_covered_and_does_not_make_index_after_index(self, layout):
        bad = put(layout, 1)
        flip(layout.segment(bad), 20)
        for _time in range(2):
            with closing(commit(layout)) as snapshot:
                assert set(snapshot.unreadable) == {bad}
        assert len(list_indexes(layout)) == 1

    def test_two_commits_at_once_tie_harmlessly(self, layout, monkeypatch):
        put(layout, 1)
        overtaken(monkeypatch, committing, "build", lambda: put(layout, 2, is_committed=True))
        with closing(commit(layout)) as snapshot:
            assert sorted(snapshot.keys()) == sorted([key_of(1), key_of(2)])
        assert [name.number for name in list_indexes(layout)] == [1, 1]
        with closing(commit(layout)) as snapshot:
            assert not snapshot.uncovered
            assert len(snapshot) == 2

    def test_equal_commits_at_once_make_one_file(self, layout, monkeypatch):
        put(layout, 1)
        overtaken(monkeypatch, committing, "build", lambda: commit(layout).close())
        with closing(commit(layout)) as snapshot:
            assert snapshot.generation == 1
        assert len(list_indexes(layout)) == 1

    def test_entries_read_the_same_before_and_after(self, layout):
        put(layout, 1, 2)
        before = read(layout, 1)
        commit(layout).close()
        assert read(layout, 1) == before == tensors_of(1)

    def test_a_refused_write_leaves_the_store_as_it_was(self, layout, monkeypatch):
        put(layout, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refusing(errno.ENOSPC))
            with pytest.raises(WriteFailed):
                commit(layout)
        assert list_indexes(layout) == []
        assert names_in(layout.temporary) == []
        assert verify(layout.root).ok


class TestCommittingWhenDue:
    @pytest.fixture(autouse=True)
    def low_limit(self, monkeypatch):
        monkeypatch.setattr(committing, "UNCOVERED_LIMIT", 2)

    def test_few_uncovered_segments_are_left_uncovered(self, layout):
        put(layout, 1)
        put(layout, 2)
        with closing(load_snapshot(layout)) as snapshot:
            assert commit_if_due(layout, snapshot) is snapshot
        assert list_indexes(layout) == []

    def test_many_uncovered_segments_are_covered(self, layout):
        for n in range(3):
            put(layout, n)
        with closing(load_snapshot(layout)) as snapshot, closing(commit_if_due(layout, snapshot)) as newer:
            assert not newer.uncovered
            assert newer.generation == 1

    def test_while_another_is_at_it_nothing_is_done(self, layout):
        for n in range(3):
            put(layout, n)
        layout.lock("commit").parent.mkdir()
        with closing(load_snapshot(layout)) as snapshot, LifeLock(layout.lock("commit")):
            assert commit_if_due(layout, snapshot) is snapshot
        assert list_indexes(layout) == []


class TestRecipes:
    def test_one_is_kept_under_its_fingerprint(self, layout):
        recipe = Recipe("text", {"a": 1}, {"b": 2})
        publish_recipe(layout, recipe)
        assert Recipe.from_json(read_record(layout.recipe(recipe.fingerprint), RECIPE_FORMAT, 1)) == recipe

    def test_one_that_is_there_is_left_as_it_is(self, layout):
        publish_recipe(layout, Recipe("text", {"a": 1}, {"b": 2}))
        publish_recipe(layout, Recipe("text", {"a": 1}, {"b": 3}))
        [name] = names_in(layout.recipes)
        assert read_record(layout.recipes / name, RECIPE_FORMAT, 1)["read"] == {"b": 2}


def test_the_arranged_segments_are_there(layout):
    digest = put(layout, 1, 2)
    assert list_segments(layout) == {digest}
    assert {entry.key for entry in read_contents(layout.segment(digest)).entries} == {key_of(1), key_of(2)}
