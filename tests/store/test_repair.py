"""Repair: copies before it moves, loses no valid entry, and is done after once."""

import errno
import os
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from cachestore.care import repair as repairing
from cachestore.care.losses import LOST_FORMAT
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.errors import CorruptEntry, NewerFormat, ReadFailed
from cachestore.core.keys import Recipe
from cachestore.files.checksum import digest_file
from cachestore.files.marker import FORMAT
from cachestore.files.opening import names_in
from cachestore.files.paths import IndexName
from cachestore.files.publish import publish
from cachestore.files.records import encode_record, read_record
from cachestore.store.format import segment as segments
from cachestore.store.format.catalog import Catalog, Cell, list_generations, make_column
from cachestore.store.format.entry import make_entry
from cachestore.store.format.index import build
from cachestore.store.format.line import SESSION
from cachestore.store.format.segment import read_contents
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, create_store, publish_recipe
from tests.fakes import publish_catalog, raising, refusing
from tests.store.stores import catalog_of, damage, entry_of, flip, key_of, location_of, put, read, tensors_of


def names(layout, folder):
    return sorted(str(path.relative_to(layout.root)) for path in folder.rglob("*") if path.is_file())


def flat(layout, path):
    return str(path.relative_to(layout.root)).replace("/", "_")


def outcome(report):
    return report.salvaged, list(report.quarantined), list(report.rebuilt), report.missing


def test_an_empty_store_needs_no_repair(layout):
    assert outcome(repair(layout.root)) == (0, [], [], 0)


def test_a_whole_store_is_left_as_it_is(layout):
    put(layout, 1, is_committed=True)
    before = names(layout, layout.root)
    report = repair(layout.root)
    assert (outcome(report), report.findings) == ((0, [], [], 0), ())
    assert names(layout, layout.root) == before


def test_a_newer_store_is_left_alone(layout):
    layout.marker.write_bytes(encode_record(FORMAT, 2, {"mode": "private"}))
    with pytest.raises(NewerFormat):
        repair(layout.root)


def test_good_entries_are_copied_out_and_the_damaged_file_is_kept_aside(layout):
    put(layout, 1, 2, 3, is_committed=True)
    path = damage(layout, 2)
    raw = path.read_bytes()
    report = repair(layout.root)
    assert outcome(report) == (2, [str(path.relative_to(layout.root))], ["index"], 1)
    assert [read(layout, n) for n in (1, 3)] == [tensors_of(1), tensors_of(3)]
    assert not path.exists()
    assert (layout.quarantine / flat(layout, path)).read_bytes() == raw
    assert {(finding.kind, finding.key) for finding in report.findings} == {("missing-entry", str(key_of(2)))}


def test_the_keys_that_were_lost_are_noted_beside_it(layout):
    digest = put(layout, 1, 2)
    damage(layout, 2)
    repair(layout.root)
    assert read_record(layout.quarantine / f"{digest}.lost.json", LOST_FORMAT, 1) == {"segment": digest, "keys": [str(key_of(2))]}


@pytest.mark.parametrize(
    ("origin", "meta", "is_reported"),
    [
        ("0" * 32 + "/1", {"input_digest": "0"}, False),
        ("merged", {"input_digest": "0"}, False),
        ("0" * 32 + "/1", {}, True),  # of fill
        ("", {"input_digest": "0"}, True),  # of a writer
        (f"{SESSION}/{0:032x}/train/own", {}, False),
        ("merged/train/own", {}, False),
    ],
)
@pytest.mark.parametrize("of", ["newest", "older", "nothing"])
def test_what_only_an_older_generation_needs_does_not_stay_missing(layout, origin, meta, is_reported, of):
    publish_segment(layout, [make_entry(key_of(n), tensors_of(n), meta) for n in (1, 2)], origin=origin)
    for number in {"newest": (1, 2), "older": (2, 1), "nothing": (1,)}[of]:
        publish_catalog(layout, catalog_of(number))
    damage(layout, 2)
    foretold = repair(layout.root, dry_run=True)
    done = repair(layout.root)
    assert done.missing == foretold.missing == int(is_reported or of == "newest")
    assert {one.key for one in verify(layout.root).findings} == ({str(key_of(2))} if done.missing else set())


def test_copied_entries_keep_their_values_and_checksums(layout):
    put(layout, 1, 2)
    before = location_of(layout, 1)
    damage(layout, 2)
    repair(layout.root)
    after = location_of(layout, 1)
    assert (after.checksum, after.specs) == (before.checksum, before.specs)
    assert read_contents(layout.segment(after.segment.digest)).entries.metas == ({"n": 1},)


@pytest.mark.parametrize(
    "damage_one", [damage, lambda layout, n: flip(layout.segment(location_of(layout, n).segment.digest), 9)], ids=["entry", "header"]
)
def test_a_second_repair_changes_nothing_more(layout, damage_one):
    put(layout, 1, 2, is_committed=True)
    damage_one(layout, 2)
    repair(layout.root)
    before = names(layout, layout.root)
    assert outcome(repair(layout.root))[:3] == (0, [], [])
    assert names(layout, layout.root) == before


def damaged_entry(layout):
    flip(layout.segment(location_of(layout, 1).segment.digest), location_of(layout, 1).offset)


def damaged_header(layout):
    flip(layout.segment(location_of(layout, 1).segment.digest), 100)


def bad_copies_everywhere(layout):
    with closing(load_snapshot(layout)) as snapshot:
        locations = [location for found in snapshot.find([key_of(1), key_of(4)]) for location in found]
    for location in locations:
        flip(layout.segment(location.segment.digest), location.offset)


def vanished(layout):
    layout.segment(location_of(layout, 1).segment.digest).unlink()


def renamed(layout):
    path = layout.segment(location_of(layout, 1).segment.digest)
    path.rename(path.with_name("backup"))


def lost_before(layout):
    damaged_entry(layout)
    repair(layout.root)


@pytest.mark.parametrize("strike", [damaged_entry, damaged_header, bad_copies_everywhere, vanished, renamed, lost_before])
@pytest.mark.parametrize("is_covered", [True, False])
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_dry_run_counts_the_missing_as_the_run_does(layout, strike, is_covered, is_copied):
    put(layout, 1, 2, 3)
    put(layout, 4, *((1,) if is_copied else ()))
    if is_covered:
        commit(layout).close()
    strike(layout)
    foretold = repair(layout.root, dry_run=True)
    done = repair(layout.root)
    assert (foretold.missing, foretold.salvaged) == (done.missing, done.salvaged)


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(layout):
    put(layout, 1, 2, is_committed=True)
    path = damage(layout, 2)
    flip(layout.index(list_indexes(layout)[0]), 5000)
    before = {each: each.read_bytes() for each in layout.root.rglob("*") if each.is_file()}
    report = repair(layout.root, dry_run=True)
    assert report.dry_run
    assert outcome(report)[:3] == (
        1,
        [str(path.relative_to(layout.root)), str(layout.index(list_indexes(layout)[0]).relative_to(layout.root))],
        ["index"],
    )
    assert {each: each.read_bytes() for each in layout.root.rglob("*") if each.is_file()} == before


def test_entries_with_another_good_copy_are_not_missing(layout):
    put(layout, 1, 2)
    put(layout, 2, variant=1)
    damage(layout, 2)
    assert repair(layout.root).missing == 0
    assert verify(layout.root).ok
    assert read(layout, 2) in (tensors_of(2), tensors_of(2, 1))


def test_a_segment_without_a_good_entry_is_moved_aside_whole(layout):
    put(layout, 1)
    damage(layout, 1)
    report = repair(layout.root)
    assert (report.salvaged, report.missing) == (0, 1)
    assert list_segments(layout) == frozenset()


def test_with_a_damaged_header_entries_are_saved_by_what_the_index_knows(layout):
    digest = put(layout, 1, 2, 3, is_committed=True)
    offset = location_of(layout, 2).offset
    flip(layout.segment(digest), 9)
    flip(layout.segment(digest), offset)
    report = repair(layout.root)
    assert (report.salvaged, report.missing) == (2, 1)
    assert [read(layout, n) for n in (1, 3)] == [tensors_of(1), tensors_of(3)]
    with Reader(layout.root) as reader:
        assert reader.describe(key_of(1)).meta == {"salvaged_from": digest}
        assert key_of(2) not in reader


def test_with_a_damaged_header_that_no_index_knows_the_file_is_kept_aside(layout):
    digest = put(layout, 1)
    flip(layout.segment(digest), 9)
    report = repair(layout.root)
    assert (report.salvaged, len(report.quarantined)) == (0, 1)
    assert names_in(layout.quarantine) == [flat(layout, layout.segment(digest))]


def test_a_cut_segment_gives_the_entries_before_the_cut(layout):
    digest = put(layout, *range(5), is_committed=True)
    order = sorted(range(5), key=lambda n: location_of(layout, n).offset)
    path = layout.segment(digest)
    path.chmod(0o644)
    os.truncate(path, location_of(layout, order[2]).offset + 1)
    report = repair(layout.root)
    assert (report.salvaged, report.missing) == (2, 3)
    assert [read(layout, n) for n in order[:2]] == [tensors_of(n) for n in order[:2]]


def test_every_flipped_byte_is_mended_without_losing_a_valid_entry(tmp_path):
    """Over a small segment, every seventh byte, with an index that knows the entries."""
    template = create_store(tmp_path / "template")
    digest = put(template, 1, 2)
    commit(template).close()
    size = template.segment(digest).stat().st_size
    locations = {n: location_of(template, n) for n in (1, 2)}
    for number, offset in enumerate(range(0, size, 7)):
        layout = create_store(tmp_path / str(number))
        put(layout, 1, 2, is_committed=True)
        flip(layout.segment(digest), offset, 0x02)
        hit = {n for n, location in locations.items() if location.offset <= offset < location.offset + location.size_bytes}
        report = repair(layout.root)
        assert len(report.quarantined) == 1, offset
        assert report.missing == len(hit), offset
        assert [read(layout, n) for n in {1, 2} - hit] == [tensors_of(n) for n in {1, 2} - hit]
        assert verify(layout.root).ok == (not hit)


def test_damage_between_the_entries_of_a_copy_that_repair_made_loses_nothing(layout):
    put(layout, 1, 2, 3)
    for _time in range(3):
        first, second = sorted((location_of(layout, n) for n in (1, 2, 3)), key=lambda location: location.offset)[:2]
        assert first.segment == second.segment
        flip(layout.segment(first.segment.digest), second.offset - 1)
        report = repair(layout.root)
        assert (report.salvaged, report.missing) == (3, 0)
        assert [read(layout, n) for n in (1, 2, 3)] == [tensors_of(n) for n in (1, 2, 3)]
    assert verify(layout.root).ok


@pytest.mark.parametrize("trap", ["link", "dangling link", "fifo", "folder"])
def test_what_is_no_regular_file_is_moved_aside_as_it_is(layout, tmp_path, trap):
    digest = put(layout, 1)
    put(layout, 2, is_committed=True)
    path = layout.segment(digest)
    path.rename(tmp_path / "elsewhere")
    if trap == "fifo":
        os.mkfifo(path)
    elif trap == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / ("elsewhere" if trap == "link" else "nothing"))
    report = repair(layout.root)
    assert (report.salvaged, report.missing) == (0, 1)
    assert (tmp_path / "elsewhere").exists()
    assert read(layout, 2) == tensors_of(2)
    assert not path.is_symlink()
    assert not path.exists()


def test_a_segment_of_a_newer_format_stops_repair_before_anything_moves(layout, monkeypatch):
    monkeypatch.setattr(segments, "VERSION", 2)
    put(layout, 1)
    monkeypatch.undo()
    put(layout, 2)
    damage(layout, 2)
    with pytest.raises(NewerFormat):
        repair(layout.root)
    assert names_in(layout.quarantine) == []


def test_a_damaged_version_is_damage(layout):
    digest = put(layout, 1, is_committed=True)
    raw = layout.segment(digest).read_bytes()
    flip(layout.segment(digest), raw.index(b"cachestore-segment/1") + len("cachestore-segment/"), 0x02)
    assert repair(layout.root).missing == 0
    assert read(layout, 1) == tensors_of(1)


@pytest.mark.parametrize("while_copying", [False, True])
def test_an_input_error_moves_nothing(layout, monkeypatch, while_copying):
    put(layout, 1, 2)
    path = damage(layout, 1)
    real = os.preadv

    def fail(descriptor, buffers, offset):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(*((repairing, "good_entries", refusing(errno.EIO)) if while_copying else (os, "preadv", fail)))
        report = repair(layout.root)
    assert (report.salvaged, report.quarantined) == (0, ())
    assert while_copying or {finding.kind for finding in report.findings} == {"unreadable"}
    assert path.exists()


def test_a_full_disk_moves_nothing(layout, monkeypatch):
    put(layout, 1, 2)
    path = damage(layout, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refusing(errno.ENOSPC))
        with pytest.raises(OSError):
            repair(layout.root)
    assert path.exists()
    assert repair(layout.root).salvaged == 1


def test_a_file_of_the_same_name_in_quarantine_is_not_replaced(layout):
    for expected in (1, 2, 3):
        path = layout.segment(put(layout, 1))
        flip(path, path.stat().st_size - 1)
        repair(layout.root)
        assert len([name for name in names_in(layout.quarantine) if name.startswith("segments")]) == expected


def test_a_strangers_file_beside_the_lists_of_what_was_lost_is_left_alone(layout):
    layout.quarantine.mkdir()
    stranger = layout.quarantine / f"copy of {'0' * 32}.lost.json"
    stranger.write_bytes(b"x")
    assert verify(layout.root).ok
    assert outcome(repair(layout.root)) == (0, [], [], 0)
    assert stranger.read_bytes() == b"x"


class TestDerivedFiles:
    def test_a_damaged_index_is_moved_aside_and_built_again(self, layout):
        put(layout, 1, is_committed=True)
        path = layout.index(list_indexes(layout)[0])
        flip(path, 5000)
        assert outcome(repair(layout.root)) == (0, [str(path.relative_to(layout.root))], ["index"], 0)
        assert verify(layout.root).ok
        with closing(load_snapshot(layout)) as snapshot:
            assert not snapshot.uncovered

    def test_an_index_that_lacks_entries_is_moved_aside_and_built_again(self, layout, monkeypatch):
        from cachestore.store.write import commit as committing

        put(layout, 1)
        with monkeypatch.context() as patch:
            patch.setattr(committing, "build", lambda *args, **reported: build(*args, **{**reported, "entries": ()}))
            commit(layout).close()
        repair(layout.root)
        assert verify(layout.root).ok
        assert read(layout, 1) == tensors_of(1)

    def test_without_an_index_one_is_built(self, layout):
        put(layout, 1)
        assert outcome(repair(layout.root)) == (0, [], ["index"], 0)

    def test_a_damaged_catalog_is_moved_aside_and_the_older_one_stays(self, layout):
        for n in (1, 2):
            publish_catalog(layout, Catalog("train", {}, {}, ["a"] * n, [0] * (n + 1), [], {}, ["{}"] * n, ()))
        flip(layout.catalog("train", 2), 500)
        assert list(repair(layout.root).quarantined) == ["catalogs/train/2.safetensors"]
        assert list_generations(layout, "train") == [1]
        assert names_in(layout.quarantine) == ["catalogs_train_2.safetensors"]

    def test_a_damaged_recipe_is_moved_aside(self, layout):
        recipe = Recipe("own", {})
        publish_recipe(layout, recipe)
        flip(layout.recipe(recipe.fingerprint), 20)
        assert list(repair(layout.root).quarantined) == [f"recipes/{recipe.fingerprint}.json"]
        assert verify(layout.root).ok

    def test_a_newer_recipe_is_not_ours_to_judge(self, layout):
        path = layout.recipe("0" * 64)
        layout.recipes.mkdir()
        publish(layout, path, [encode_record("cachestore-recipe", 2, {})])
        assert repair(layout.root).quarantined == ()
        assert path.exists()


def test_files_that_are_not_ours_stay(layout):
    put(layout, 1)
    strangers = [layout.root / "notes.txt", layout.segments / "readme", layout.temporary / "x", layout.new_temporary()]
    for path in strangers:
        path.write_bytes(b"precious")
    damage(layout, 1)
    repair(layout.root)
    assert [path.read_bytes() for path in strangers] == [b"precious"] * len(strangers)


def test_a_reader_that_was_open_before_finds_the_copy(layout):
    put(layout, 1, 2, is_committed=True)
    with Reader(layout.root, verify="always") as reader:
        damage(layout, 2)
        repair(layout.root)
        [tensors] = reader.get_raw([key_of(1)])
        assert bytes(tensors["narrow"][2]) == tensors_of(1)["narrow"][2]


def test_what_is_read_before_repair_is_right_or_an_error(layout):
    put(layout, 1, 2)
    damage(layout, 2)
    assert read(layout, 1) == tensors_of(1)
    with pytest.raises(CorruptEntry):
        read(layout, 2)


def test_missing_counts_what_catalogs_need(layout):
    put(layout, 1)
    column = make_column("own", "caption", "f", {}, [[Cell(key_of(1))], [Cell(key_of(2))]])
    publish_catalog(layout, Catalog("train", {}, {}, ["a", "b"], [0, 0, 0], [], {}, ["{}"] * 2, (column,)))
    report = repair(layout.root)
    assert report.missing == 1
    assert [finding.sample for finding in report.findings] == ["b"]


def test_entries_without_tensors_are_copied_too(layout):
    publish_segment(layout, [make_entry(key_of(1), {}, {"note": "x"}), entry_of(2)], origin="")
    damage(layout, 2)
    assert repair(layout.root).salvaged == 1
    with Reader(layout.root) as reader:
        assert reader.describe(key_of(1)).meta == {"note": "x"}


def test_the_report_is_json(layout):
    put(layout, 1, 2)
    damage(layout, 2)
    shown = repair(layout.root).as_json()
    assert (shown["salvaged"], shown["missing"], shown["refilled"]) == (1, 1, 0)
    assert shown["findings"][0]["kind"] == "missing-entry"


def test_two_repairs_at_once_both_end_and_lose_nothing(layout, monkeypatch):
    put(layout, 1, 2)
    put(layout, 3, is_committed=True)
    damage(layout, 1)
    path = layout.index(list_indexes(layout)[0])
    flip(path, path.stat().st_size // 2)
    really = repairing._find_damage

    def other_repair_first(store):
        found = really(store)
        monkeypatch.setattr(repairing, "_find_damage", really)
        assert repair(store.root).salvaged == 1
        return found

    monkeypatch.setattr(repairing, "_find_damage", other_repair_first)
    report = repair(layout.root)
    assert (report.salvaged, report.quarantined) == (0, ())  # the other repair did all
    assert [read(layout, n) for n in (2, 3)] == [tensors_of(2), tensors_of(3)]
    assert {(finding.kind, finding.key) for finding in verify(layout.root).findings} == {("missing-entry", str(key_of(1)))}


@pytest.mark.parametrize("call", ["open", "lmdb.open"])
def test_an_index_that_cannot_be_read_just_now_stops_it_as_it_may_know_what_a_header_lost(layout, monkeypatch, call):
    put(layout, 1, 2, is_committed=True)
    [digest] = list_segments(layout)
    flip(layout.segment(digest), 40)
    refuse = raising(lmdb.Error("Too many open files") if call == "lmdb.open" else OSError(errno.EIO, os.strerror(errno.EIO)))
    really = os.open
    with monkeypatch.context() as patch:
        if call == "lmdb.open":
            patch.setattr(lmdb, "open", refuse)
        else:
            patch.setattr(
                os, "open", lambda path, *rest, **named: (refuse if str(path).endswith(".lmdb") else really)(path, *rest, **named)
            )
        with pytest.raises(ReadFailed):
            repair(layout.root)
    assert list_segments(layout) == {digest}
    assert repair(layout.root).salvaged == 2
    assert [read(layout, n) for n in (1, 2)] == [tensors_of(1), tensors_of(2)]


@pytest.mark.parametrize("content", ["no LMDB file", "an LMDB file of somebody else"])
def test_a_file_with_the_name_of_an_index_and_another_content_is_put_aside(layout, tmp_path, content):
    put(layout, 1, 2, is_committed=True)
    strange = tmp_path / "strange"
    if content == "no LMDB file":
        strange.write_bytes(b"mine" * 1000)
    else:
        with lmdb.open(str(strange), subdir=False, lock=False) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"some", b"thing")
    name = IndexName(2, digest_file(strange))
    strange.rename(layout.index(name))
    assert {finding.kind for finding in verify(layout.root, "quick").findings} == {"bad-index"}
    assert repair(layout.root).quarantined == (f"index/{layout.index(name).name}",)
    assert verify(layout.root).ok
    assert [read(layout, n) for n in (1, 2)] == [tensors_of(1), tensors_of(2)]
