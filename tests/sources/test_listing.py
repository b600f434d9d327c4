"""What is known of a source as a whole: its content, its ids, what no sample has."""

import hashlib
import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_parts
from cachestore.sources.folders import list_source
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from tests import fakes
from tests.fakes import raising
from tests.sources.sources import folder, ids, listed, manifest, remarks_of

NAMES = st.lists(st.sampled_from(["a.png", "b.png", "sub/a.png", "é.png"]), unique=True)
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))


def test_two_names_that_compose_to_one_id_fail_alone_and_are_told_apart(tmp_path):
    listing, remarks = list_source(folder(tmp_path, {COMPOSED: "1", DECOMPOSED: "2", "b.png": "3"})), Remarks()
    assert [sample.id for sample in listing.samples(remarks)] == ["b.png"]
    assert [one.sample for one in remarks.refused] == [COMPOSED, COMPOSED]
    assert all(ascii(name) in one.reason for one in remarks.refused for name in (COMPOSED, DECOMPOSED))


def test_a_manifest_that_is_read_otherwise_than_before_has_another_plan(tmp_path):
    """By the bytes alone a plan of the times when `text` was a column of the user's own would be found."""
    path = manifest(tmp_path / "m.jsonl", {"image": "a.png", "text": "a cat"})
    before = digest_parts("cachestore-content", ".jsonl", hashlib.sha256(path.read_bytes()).hexdigest(), b"").hex()
    assert list_source(path).content != before


def test_of_duplicate_ids_the_first_stays_and_each_later_one_fails_with_both_named(tmp_path):
    rows = [{"id": "same", "image": f"{name}.png"} for name in "abc"]
    listing = listed(manifest(tmp_path / "x.jsonl", rows[0], {"id": "other", "image": "o.png"}, *rows[1:]))
    assert {sample.id: sample.images["image"] for sample in listing.samples} == {"same": ("a.png",), "other": ("o.png",)}
    assert len(listing.refused) == 2
    for (_place, reason), later in zip(listing.refused.items(), ("line 3 ('b.png')", "line 4 ('c.png')"), strict=True):
        assert all(name in reason for name in ("'same'", "line 1 ('a.png')", later))


@given(names=NAMES, words=st.text(st.sampled_from("ab \n"), max_size=5), seed=st.randoms())
def test_the_content_is_the_same_for_any_order_root_and_times(tmp_path_factory, names, words, seed):
    found = []
    for number in range(2):
        root = tmp_path_factory.mktemp("data")
        ordered = list(names)
        seed.shuffle(ordered)
        folder(root, dict.fromkeys(ordered, "x") | {f"{name[:-4]}.txt": words for name in ordered})
        for name in names:
            os.utime(root / name, (number, number))
        found.append(listed(root))
    assert found[0].content == found[1].content
    assert ids(found[0]) == ids(found[1])


@pytest.mark.parametrize(
    "row",
    [
        {"id": "y", "image": "a.png", "caption": "c"},
        {"id": "x", "image": "b.png", "caption": "c"},
        {"id": "x", "image": "a.png", "caption": "d"},
        {"id": "x", "image": "a.png", "caption": ["c", "c"]},
        {"id": "x", "image": "a.png", "caption": "c", "artist": "z"},
        {"id": "x", "control": "a.png", "caption": "c"},
    ],
)
def test_another_id_image_caption_or_column_is_another_content(tmp_path, row):
    one = listed(manifest(tmp_path / "1.jsonl", {"id": "x", "image": "a.png", "caption": "c"}))
    assert listed(manifest(tmp_path / "2.jsonl", row)).content != one.content


def test_a_manifest_is_listed_without_reading_its_rows(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("this is no JSON")
    listing = list_source(path)
    assert len(listing.content) == 64
    with pytest.raises(BadInput):
        list(listing.samples())


def test_the_content_of_a_manifest_is_that_of_its_bytes_its_kind_and_what_a_missing_caption_becomes(tmp_path):
    contents = set()
    for name in ("m.jsonl", "m.txt"):
        for text in ("", "{}\n"):
            (tmp_path / name).write_text(text)
            contents |= {list_source(tmp_path / name, ListingOptions(caption=caption)).content for caption in (None, "", "x")}
    assert len(contents) == 12


def test_a_manifest_that_changes_while_it_is_read_is_refused(tmp_path):
    rows = list_source(manifest(tmp_path / "m.jsonl", {"image": "a"}, {"image": "b"})).samples()
    next(rows)
    manifest(tmp_path / "m.jsonl", {"image": "a"}, {"image": "c"})
    with pytest.raises(BadInput):
        list(rows)


def test_captions_of_which_none_has_any_text_are_reported(tmp_path):
    folder = fakes.captioned(tmp_path / "folder", 3)
    assert remarks_of(list_source(folder)) == ()
    for path in folder.glob("*.txt"):
        path.write_text(" \n")
    assert remarks_of(list_source(folder)) == (f"1 source ({folder}) has no caption with any text: its samples get the empty caption",)
    assert remarks_of(list_source(folder, ListingOptions(caption=""))) == ()
    rows = manifest(tmp_path / "rows.jsonl", {"image": "a.png", "text": ""}, {"image": "b.png", "caption": " "})
    assert any("has no caption with any text" in words for words in remarks_of(list_source(rows)))


def test_a_manifest_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"caption": "a"}\n')
    monkeypatch.setattr("cachestore.sources.listing.open_foreign", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(BadInput):
        list_source(rows)
