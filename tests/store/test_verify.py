"""Verify: every kind of damage is found and named, and nothing is changed."""

import errno
from dataclasses import replace

import lmdb
import pytest

from cachestore.care import checks
from cachestore.care import verify as verifying
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.cli import DAMAGE, main
from cachestore.core.errors import BadInput, CorruptEntry, NewerFormat
from cachestore.files.checksum import digest_of
from cachestore.files.marker import FORMAT
from cachestore.files.paths import IndexName
from cachestore.files.records import encode_record
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.format.entry import Specs, TensorSpec
from cachestore.store.format.index import build
from cachestore.store.read.snapshot import list_indexes
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, create_store
from tests.fakes import asks_for, publish_catalog, raising, refusing
from tests.store.stores import RECIPE, catalog_of, damage, flip, forge_index, found, key_of, put, read, segment_of, tensors_of, where


def state(layout):
    """Every file of a store with its content and times."""
    return {
        path: (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(layout.root.rglob("*"))
    }


def test_an_empty_store_is_whole(layout):
    report = verify(layout.root)
    assert (report.ok, report.entries, report.segments, report.bytes, report.findings, report.level) == (True, 0, 0, 0, (), "full")


def test_a_segment_without_entries_is_whole(layout):
    publish_segment(layout, [], origin="")
    assert verify(layout.root).ok


def test_a_whole_store_is_counted(full):
    report = verify(full.root)
    assert (report.ok, report.entries, report.segments, report.findings) == (True, 3, 2, ())
    assert report.bytes == sum(path.stat().st_size for path in full.segments.rglob("*.safetensors"))
    assert report.as_json()["findings"] == []


@pytest.mark.parametrize("level", ["full", "quick"])
def test_verifying_changes_nothing(full, level):
    damage(full, 1)
    (full.root / "foreign").touch()
    before = state(full)
    verify(full.root, level)
    assert state(full) == before


def test_a_newer_store_is_not_judged(layout):
    layout.marker.write_bytes(encode_record(FORMAT, 2, {"mode": "private"}))
    with pytest.raises(NewerFormat):
        verify(layout.root)


def test_findings_are_reported_as_they_are_made_and_every_message_says_what_to_do(full):
    damage(full, 1)
    reported = []
    report = verify(full.root, on_finding=reported.append)
    assert tuple(reported) == report.findings != ()
    other, _entry = segment_of(full, 3)
    flip(other, 9)
    flip(full.index(list_indexes(full)[0]), 5000)
    flip(full.recipe(RECIPE.fingerprint), 20)
    for finding in verify(full.root).findings:
        assert "cachestore repair" in finding.message, finding


class TestSubsets:
    def test_the_parts_together_find_what_full_finds(self, layout):
        for n in range(7):
            put(layout, n)
        damaged = {1, 2, 5}
        for n in damaged:
            path, entry = segment_of(layout, n)
            flip(path, entry.offset)
        whole = found(layout)
        parts = [found(layout, subset=(n, 3)) for n in (1, 2, 3)]
        assert len(whole) == len(damaged)
        assert set.union(*parts) == whole
        assert sum(map(len, parts)) == len(whole)

    def test_one_part_of_one_is_everything(self, full):
        damage(full, 1)
        assert found(full, subset=(1, 1)) == found(full)
        assert verify(full.root, subset=(1, 1)).level == "1/1"

    @pytest.mark.parametrize("subset", [(0, 3), (4, 3), (1, 0), (-1, 3)])
    def test_a_part_that_is_not_there_is_refused(self, full, subset):
        with pytest.raises(BadInput, check=asks_for("subset")):
            verify(full.root, subset=subset)


class TestIndexes:
    def test_a_damaged_one_is_a_bad_index(self, full):
        [name] = list_indexes(full)
        flip(full.index(name), 5000)
        assert found(full, "quick") == {("bad-index", where(full, full.index(name)), None, None)}

    def test_an_older_damaged_one_is_a_bad_index_too(self, full):
        [older] = list_indexes(full)
        put(full, 4)
        commit(full).close()
        flip(full.index(older), 5000)
        assert found(full) == {("bad-index", where(full, full.index(older)), None, None)}

    def test_one_that_cannot_be_read_is_unreadable(self, full, monkeypatch):
        [name] = list_indexes(full)
        monkeypatch.setattr(checks, "check_index", refusing(errno.EIO))
        assert found(full) == {("unreadable", where(full, full.index(name)), None, None)}

    def test_one_that_lacks_entries_of_its_segments_is_a_bad_index(self, full, monkeypatch):
        from cachestore.store.write import commit as committing

        with monkeypatch.context() as patch:
            patch.setattr(committing, "build", lambda *args, **reported: build(*args, **{**reported, "entries": ()}))
            put(full, 4)
            commit(full).close()
        newest = list_indexes(full)[0]
        assert found(full) == {("bad-index", where(full, full.index(newest)), None, None)}

    @pytest.mark.parametrize("level", ["full", "quick"])
    def test_one_that_exchanges_two_keys_locations_is_a_bad_index(self, full, level):
        name = forge_index(full, entries=lambda reported: reported | {key_of(1): reported[key_of(2)], key_of(2): reported[key_of(1)]})
        assert found(full, level) == {("bad-index", where(full, full.index(name)), None, None)}
        with pytest.raises(CorruptEntry):
            read(full, 1)
        assert str(full.index(name).relative_to(full.root)) in repair(full.root).quarantined
        assert verify(full.root).ok
        assert read(full, 1) == tensors_of(1)

    @pytest.mark.parametrize(
        ("field", "value"),
        [(1, 7), (2, 64), (3, Specs((TensorSpec("other", "U8", (19,)),))), (4, bytes(16))],
        ids=["ordinal", "offset", "layout", "checksum"],
    )
    def test_one_that_says_something_else_of_an_entry_is_a_bad_index(self, full, field, value):
        def change(reported):
            reported[key_of(3)] = (*reported[key_of(3)][:field], value, *reported[key_of(3)][field + 1 :])
            return reported

        name = forge_index(full, entries=change)
        assert found(full) == {("bad-index", where(full, full.index(name)), None, None)}

    @pytest.mark.parametrize("change", [{"origin": "0" * 32 + "/1"}, {"size_bytes": 1}, {"entries": 9}], ids=min)
    def test_one_that_says_something_else_of_a_segment_is_a_bad_index(self, full, change):
        name = forge_index(full, segments=lambda refs: [replace(ref, **change) for ref in refs])
        assert found(full) == {("bad-index", where(full, full.index(name)), None, None)}
        repair(full.root)
        assert verify(full.root).ok

    def test_one_with_a_key_that_no_segment_has_is_a_bad_index(self, full):
        name = forge_index(full, entries=lambda reported: reported | {key_of(9): reported[key_of(1)]})
        assert found(full) == {("bad-index", where(full, full.index(name)), None, None)}

    def test_one_that_bears_its_digest_and_is_no_database_is_bad(self, full):
        raw = b"no database" * 1000
        path = full.index(IndexName(9, digest_of([raw])))
        path.write_bytes(raw)
        assert found(full) == {("bad-index", where(full, path), None, None)}

    def test_one_that_cannot_be_opened_just_now_is_unreadable(self, full, monkeypatch):
        [path] = full.indexes.glob("*.lmdb")
        monkeypatch.setattr(lmdb, "open", raising(lmdb.Error("Too many open files")))
        assert ("unreadable", where(full, path), None, None) in found(full)

    def test_one_that_a_segments_damaged_header_contradicts_is_fine_and_the_segment_is_damaged(self, full):
        path, entry = segment_of(full, 3)
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b'"shape":[2,1]', b'"shape":[1,2]'))
        assert found(full, "quick") == {("corrupt-entry", where(full, path), str(entry.key), "3")}

    def test_of_a_segment_without_a_header_one_command_is_named_that_saves_what_the_index_knows(self, full, capsys):
        path, _entry = segment_of(full, 3)
        flip(path, 9)
        [found] = [one for one in verify(full.root).findings if one.kind == "corrupt-segment"]
        assert found.message.count(full.command("repair")) == 1
        assert main(["verify", str(full.root)]) == DAMAGE
        assert "no other copy" not in capsys.readouterr().out
        assert repair(full.root).missing == 0

    def test_one_that_covers_a_segment_without_entries_is_fine(self, full):
        put(full)
        commit(full).close()
        assert verify(full.root).ok

    def test_copies_of_an_entry_are_each_held_against_their_segment(self, full):
        put(full, 1, 3)
        commit(full).close()
        assert verify(full.root).ok

    def test_none_is_fine(self, full):
        for name in list_indexes(full):
            full.index(name).unlink()
        assert verify(full.root).ok


class TestRecipes:
    def test_a_damaged_one_is_a_bad_recipe(self, full):
        path = full.recipe(RECIPE.fingerprint)
        flip(path, 20)
        assert found(full, "quick") == {("bad-recipe", where(full, path), None, None)}

    def test_one_under_another_fingerprint_is_a_bad_recipe(self, full):
        path = full.recipe("0" * 64)
        full.recipe(RECIPE.fingerprint).rename(path)
        assert found(full) == {("bad-recipe", where(full, path), None, None)}

    def test_one_that_lacks_a_part_is_a_bad_recipe(self, full):
        path = full.recipe("0" * 64)
        path.write_bytes(encode_record("cachestore-recipe", 1, {"encoder": "x"}))
        assert found(full) == {("bad-recipe", where(full, path), None, None)}

    def test_one_that_cannot_be_read_is_unreadable(self, full, monkeypatch):
        monkeypatch.setattr(checks, "read_record", refusing(errno.EIO))
        assert ("unreadable", f"recipes/{RECIPE.fingerprint}.json", None, None) in found(full)


class TestCatalogs:
    def test_a_damaged_one_is_a_bad_catalog(self, full):
        path = full.catalog("train", 1)
        flip(path, 500)
        assert found(full, "quick") == {("bad-catalog", where(full, path), None, None)}

    def test_one_that_cannot_be_read_is_unreadable(self, full, monkeypatch):
        monkeypatch.setattr(checks, "read_catalog", refusing(errno.EIO))
        assert ("unreadable", "catalogs/train/1.safetensors", None, None) in found(full)

    def test_only_the_newest_of_a_name_says_what_is_needed(self, full):
        publish_catalog(full, catalog_of(1))
        path, _entry = segment_of(full, 3)
        path.unlink()
        assert not any(where.startswith("catalogs/") for _kind, where, _key, _sample in found(full))

    def test_a_key_that_two_data_sets_need_is_missing_once(self, full):
        publish_catalog(full, catalog_of(3, name="other"))
        path, _entry = segment_of(full, 3)
        path.unlink()
        assert len(found(full)) == 1

    def test_cells_where_nothing_was_made_need_nothing(self, full):
        column = make_column("own", "caption", RECIPE.fingerprint, {}, [[Cell()]])
        publish_catalog(full, Catalog("failed", {}, {}, ["a"], [0, 0], [], {}, ["{}"], (column,)))
        assert verify(full.root).ok

    def test_a_catalog_published_while_verify_runs_makes_nothing_missing(self, full, monkeypatch):
        real = verifying.load_snapshot

        def while_looking(layout):
            snapshot = real(layout)
            put(full, 4)
            publish_catalog(full, catalog_of(4))
            return snapshot

        monkeypatch.setattr(verifying, "load_snapshot", while_looking)
        assert found(full) == set()


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_store_whose_indexes_are_all_gone_is_ok_and_the_report_says_what_it_lacks(full, level):
    for name in list_indexes(full):
        full.index(name).unlink()
    report = verify(full.root, level)
    assert (report.ok, report.findings) == (True, ())
    [remark] = report.remarks
    assert "no index, so opening the store reads the headers of its 2 segments" in remark
    assert f"`cachestore repair {full.root}`" in remark
    assert report.as_json()["remarks"] == [remark]
    assert repair(full.root, dry_run=True).rebuilt == repair(full.root).rebuilt == ("index",)
    assert verify(full.root, level).remarks == ()


def test_neither_an_empty_store_nor_one_with_a_damaged_index_is_reported_to_have_none(layout, full, tmp_path):
    assert verify(create_store(tmp_path / "empty").root).remarks == ()
    [name] = list_indexes(full)
    flip(full.index(name), 100)
    report = verify(full.root)
    assert ([finding.kind for finding in report.findings], report.remarks) == (["bad-index"], ())
