"""Entries that are lost: they are told of until they are made again, or nobody needs them."""

from contextlib import closing

from cachestore.care.losses import needed_samples, wanted_keys
from cachestore.care.repair import repair
from cachestore.files.opening import names_in
from cachestore.store.read.snapshot import load_snapshot
from tests.store.stores import damage, flip, found, key_of, put, segment_of


def test_what_repair_could_not_save_stays_missing_until_it_is_made_again(layout):
    put(layout, 1, 2)
    path, entry = segment_of(layout, 1)
    flip(path, entry.offset)
    repair(layout.root)
    assert {(kind, key) for kind, _path, key, _sample in found(layout)} == {("missing-entry", str(key_of(1)))}
    put(layout, 1)
    assert found(layout) == set()


def test_a_damaged_note_is_reported(layout):
    put(layout, 1)
    damage(layout, 1)
    repair(layout.root)
    [note] = [name for name in names_in(layout.quarantine) if name.endswith(".json")]
    flip(layout.quarantine / note, 20)
    assert found(layout) == {("bad-list", f"quarantine/{note}", None, None)}


def test_keys_that_a_catalog_needs_come_with_the_first_sample_that_does(full):
    assert needed_samples(full, {key_of(2), key_of(9)}) == {key_of(2): ("train", "2")}
    assert needed_samples(full, set()) == {}


def test_what_a_catalog_needs_and_what_was_lost_is_wanted(full):
    put(full, 7)
    damage(full, 7)
    repair(full.root)
    with closing(load_snapshot(full)) as snapshot:
        assert wanted_keys(full, snapshot) == {key_of(1), key_of(2), key_of(3), key_of(7)}
