"""Tars of pictures and captions, read where they lie."""

import io
import json
import os
import tarfile

import pytest

from cachestore.core.errors import BadInput
from cachestore.files.stat_record import stat_of
from cachestore.sources.combined import list_path
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.sources.tars import list_tars, tars_at


def pack(path, members, *, layout=tarfile.PAX_FORMAT, at=1):
    """A tar of (name, content) pairs, or of a mapping; modified long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=layout) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            raw = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    os.utime(path, (at, at))
    return path


def listed(*paths, **options):
    return {sample.id: sample for sample in list_tars(list(paths), ListingOptions(**options)).samples()}


# Nothing


def test_no_tars_and_tars_of_nothing_list_nothing(tmp_path):
    empty = tmp_path / "empty.tar"
    empty.touch()
    assert listed() == listed(empty) == listed(pack(tmp_path / "a.tar", {})) == {}


def test_a_folder_without_tars_is_left_to_others(tmp_path):
    assert tars_at(tmp_path) is None
    (tmp_path / "a.png").touch()
    (tmp_path / "a.tar").touch()
    assert tars_at(tmp_path) is None


# What belongs together


@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_of_one_name_are_one_sample(tmp_path, layout):
    row = json.dumps({"artist": "x"})
    path = pack(
        tmp_path / "a.tar", {"./sub/a.png": "p", "./sub/a.txt": " one \n", "./sub/a.json": row, "./sub/a.mask.png": "m"}, layout=layout
    )
    [sample] = listed(path).values()
    assert (sample.id, sample.captions, dict(sample.extras)) == ("sub/a.png", ("one",), {"artist": "x"})
    assert dict(sample.images) == {"image": ("sub/a.png",), "mask": ("sub/a.mask.png",)}


def test_long_and_odd_names_and_large_members_are_read_where_they_lie(tmp_path):
    names = ["x" * 180 + ".png", "ünïcöde 写真.png", "sub/" * 30 + "deep.png"]
    path = pack(tmp_path / "a.tar", {name: bytes([number]) * (10_000 + number) for number, name in enumerate(names)})
    listing = list_tars([path])
    for number, name in enumerate(names):
        data, stat = listing.read(name)
        assert data == bytes([number]) * (10_000 + number)
        assert stat == listing.stat(name) == (10_000 + number, stat_of(path.stat())[1])
        with listing.open(name) as (file, _stat):
            assert file.read(5) == bytes([number]) * 5


def test_a_control_video_belongs_to_its_clip_and_without_videos_all_are_counted(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.mp4": "v", "a.control.mkv": "c", "a.mask.png": "m", "b.png": "p", "b.control.mp4": "c"})
    images = {sample.id: dict(sample.images) for sample in list_tars([path], ListingOptions(videos=True)).samples()}
    clip = {"video": ("a.mp4",), "control": ("a.control.mkv",), "mask": ("a.mask.png",)}
    assert images == {"a.mp4": clip, "b.png": {"image": ("b.png",), "control": ("b.control.mp4",)}}
    remarks = Remarks()
    plain = {sample.id: dict(sample.images) for sample in list_tars([path]).samples(remarks)}
    assert (plain, remarks.unused.counts) == ({"b.png": {"image": ("b.png",)}}, {"video-without-frames": 4})


def test_several_control_images_are_in_the_order_of_their_names(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": "p", "a.control.2.png": "2", "a.control.1.png": "1"})
    assert listed(path)["a.png"].images["control"] == ("a.control.1.png", "a.control.2.png")


def test_a_row_may_hold_captions_and_a_text_precedes_them(tmp_path):
    rows = {"a.png": "", "a.json": '{"caption": ["one", "two"]}', "b.png": "", "b.json": '{"text": "three"}'}
    samples = listed(pack(tmp_path / "a.tar", {**rows, "c.png": "", "c.json": '{"caption": "row"}', "c.txt": "file"}))
    assert {name: sample.captions for name, sample in samples.items()} == {"a.png": ("one", "two"), "b.png": ("three",), "c.png": ("file",)}


@pytest.mark.parametrize(("lines", "expected"), [("whole", ("one\ntwo",)), ("each", ("one", "two")), ("first", ("one",))])
@pytest.mark.parametrize("member", ["a.txt", "a.json"])
def test_captions_of_several_lines_are_read_as_asked_and_reported_where_they_are_taken_whole(tmp_path, lines, expected, member):
    content = "one\ntwo" if member == "a.txt" else json.dumps({"caption": "one\ntwo"})
    listing = list_tars([pack(tmp_path / "a.tar", {"a.png": "", member: content})], ListingOptions(caption_lines=lines))
    remarks = Remarks()
    assert [sample.captions for sample in listing.samples(remarks)] == [expected]
    assert remarks.multi_line == (["a.png"] if lines == "whole" else [])


def test_a_missing_caption_is_the_empty_one_or_a_given_one(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": "", "b.png": "", "b.txt": ""})
    assert [sample.captions for sample in listed(path, caption="given").values()] == [("given",), ("",)]
    remarks = Remarks()
    list(list_tars([path]).samples(remarks))
    assert remarks.missing == ["a.png"]


def test_hidden_members_folders_and_what_is_no_picture_are_passed_over(tmp_path):
    path = pack(tmp_path / "a.tar", {"._a.png": "", "a.png": "", "a.cls": "7", "README": "x", "notes.txt": "alone", "info.json": "[1]"})
    assert list(listed(path)) == ["a.png"]


def test_of_two_members_of_one_name_the_later_one_counts_as_in_unpacking(tmp_path):
    """Of tars that were put one behind the other: the first picture is lost, and its caption the second one's, so it is said."""
    listing, remarks = list_tars([pack(tmp_path / "a.tar", [("a.png", "before"), ("a.txt", "one"), ("a.png", "after")])]), Remarks()
    assert [(sample.id, sample.captions) for sample in listing.samples(remarks)] == [("a.png", ("one",))]
    assert listing.read("a.png")[0] == b"after"
    assert remarks.unused.examples == {"replaced-member": ["a.png"]}


# Several tars


def test_a_folder_of_tars_and_a_range_of_them_are_one_source(tmp_path):
    for number in range(9, 12):
        pack(tmp_path / f"data/shard-{number:03}.tar", {"a.png": f"picture {number}"})
    folder, some = tars_at(tmp_path / "data"), tars_at(tmp_path / "data/shard-{009..011}.tar")
    assert folder == some
    listing = list_tars(folder or [])
    assert [sample.id for sample in listing.samples()] == ["shard-009.tar/a.png", "shard-010.tar/a.png", "shard-011.tar/a.png"]
    assert listing.read("shard-010.tar/a.png")[0] == b"picture 10"


def test_a_range_with_a_hole_names_what_is_missing(tmp_path):
    pack(tmp_path / "0.tar", {})
    with pytest.raises(BadInput):
        tars_at(tmp_path / "{0..2}.tar")


@pytest.mark.parametrize("name", ["{2..1}.tar", "{0..9999999}.tar"])
def test_a_range_that_cannot_be_meant_is_refused(tmp_path, name):
    with pytest.raises(BadInput):
        tars_at(tmp_path / name)


# What cannot be used


def test_a_compressed_tar_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(BadInput):
        listed(path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "A.TAR.ZST", "a.tar.xz", "shards-{000..003}.tar.gz"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_tar_that_is_called_compressed_is_said_to_be_to_unpack_and_why(tmp_path, name, is_there):
    if is_there:
        (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(BadInput):
        list_path(tmp_path / name)


def test_a_folder_of_compressed_tars_is_refused_and_one_beside_pictures_is_passed_over(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(BadInput):
        list_path(tmp_path)
    (tmp_path / "b.png").write_bytes(b"b")
    assert [sample.id for sample in list_path(tmp_path).samples()] == ["b.png"]


@pytest.mark.parametrize("cut", [700, 1536 + 100, 1024])
def test_a_tar_that_was_cut_is_refused(tmp_path, cut):
    whole = pack(tmp_path / "a.tar", {"a.png": b"x" * 600, "b.png": b"y" * 600}, layout=tarfile.USTAR_FORMAT).read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[:cut])
    with pytest.raises(BadInput):
        listed(tmp_path / "b.tar")


def test_a_damaged_header_within_a_tar_is_not_taken_for_its_end(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": b"x" * 600, "b.png": b"y" * 600}, layout=tarfile.USTAR_FORMAT)
    raw = bytearray(path.read_bytes())
    raw[1536] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(BadInput):
        listed(path)


def test_a_link_in_place_of_a_picture_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(BadInput):
        listed(path)


@pytest.mark.parametrize(
    ("member", "content", "says"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.json", "[1]", "must be a JSON object"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"video": 1}', "video must be a text"),
    ],
)
def test_a_member_that_cannot_be_used_is_named_with_its_tar(tmp_path, member, content, says):
    with pytest.raises(BadInput) as refused:
        listed(pack(tmp_path / "a.tar", {"a.png": "", member: content}))
    assert says in str(refused.value)
    assert str(tmp_path / "a.tar") in str(refused.value)


def test_a_tar_that_is_written_anew_is_not_read_at_the_old_offsets(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": "before"})
    listing = list_tars([path])
    before = listing.stat("a.png")
    pack(path, {"b.png": "other", "a.png": "after!"}, at=2)
    assert listing.stat("a.png") != before
    with pytest.raises(OSError):
        listing.read("a.png")


def test_a_tar_and_a_member_that_are_gone_have_no_time(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": ""})
    listing = list_tars([path])
    assert listing.stat("b.png") is None
    path.unlink()
    assert listing.stat("a.png") is None
    with pytest.raises(FileNotFoundError):
        listing.read("b.png")


# Columns, and what cannot be taken


def test_rows_of_which_none_has_a_caption_are_reported_with_their_columns(tmp_path):
    def reported(members):
        remarks = Remarks()
        list(list_tars([pack(tmp_path / "a.tar", members)]).samples(remarks))
        return remarks.uncaptioned

    row = json.dumps({"title": "a cat", "url": "x"})
    [words] = reported({"a.png": "", "a.json": row})
    assert "a.tar has a caption: its columns are title, url; a caption's column is called caption or text" in words
    assert reported({"a.png": "", "a.json": row, "b.png": "", "b.txt": "a dog"}) == reported({"a.png": ""}) == reported({}) == []


def test_a_row_that_says_two_captions_is_refused_and_a_name_of_a_file_stays_a_column(tmp_path):
    row = json.dumps({"text": "a cat", "caption": "a cat", "file_name": "original.png"})
    [sample] = listed(pack(tmp_path / "a.tar", {"a.png": "", "a.json": row})).values()
    assert (sample.captions, dict(sample.extras)) == (("a cat",), {"file_name": "original.png"})
    with pytest.raises(BadInput):
        listed(pack(tmp_path / "b.tar", {"a.png": "", "a.json": json.dumps({"text": "a cat", "caption": "a dog"})}))


def test_everything_that_cannot_be_taken_of_tars_is_named_at_once(tmp_path):
    bad = {"a.png": "", "a.json": "{", "b.png": "", "b.txt": b"\xff", "c.png": "", "c.txt": "fine"}
    seen = Remarks()
    assert [one.id for one in list_tars([pack(tmp_path / "a.tar", bad)]).samples(seen)] == ["c.png"]
    assert [(one.sample, "not JSON" in one.reason, "not UTF-8" in one.reason) for one in seen.refused] == [
        ("a.png", True, False),
        ("b.png", False, True),
    ]
    for name in ("1.tar", "2.tar"):
        (tmp_path / name).write_bytes(b"no tar" * 200)
    with pytest.raises(BadInput):
        listed(*(tmp_path / name for name in ("1.tar", "2.tar", "a.tar")))


def test_captions_of_megabytes_and_with_nul_fail_alone(tmp_path):
    texts = {"a.txt": "x" * (17 << 20), "b.txt": "a\0 \0c\0", "c.json": '{"caption": "\\ud83d"}', "d.txt": "a dog"}
    members = {f"{name}.png": "" for name in "abcd"} | texts
    seen = Remarks()
    assert [one.captions for one in list_tars([pack(tmp_path / "a.tar", members)]).samples(seen)] == [("a dog",)]
    assert [one.sample for one in seen.refused] == ["a.png", "b.png", "c.png"]


def test_a_link_fails_alone_beside_others(tmp_path):
    path = pack(tmp_path / "a.tar", {"b.png": ""})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "b.png"
        tar.addfile(link)
    seen = Remarks()
    assert [one.id for one in list_tars([path]).samples(seen)] == ["b.png"]
    assert [(one.sample, "is a link" in one.reason) for one in seen.refused] == [("a.png", True)]


def test_where_text_and_row_differ_the_text_is_taken_and_that_is_said(tmp_path):
    seen = Remarks()
    members = {"a.png": "", "a.txt": "a cat", "a.json": '{"caption": "a dog"}', "b.png": "", "b.txt": "b", "b.json": '{"caption": "b"}'}
    list(list_tars([pack(tmp_path / "a.tar", members)]).samples(seen))
    assert seen.differing == ["a.png: a.txt is taken, not a.json"]


def test_names_with_dots_belong_together_up_to_the_last_one_if_that_is_asked_for(tmp_path):
    names = ("22.05.png", "22.05.txt", "22.06.png", "22.06.json", "22.05.mask.png", "22.06.control.1.png")
    members = dict.fromkeys(names, "") | {"22.05.txt": "one", "22.06.json": '{"caption": "two"}'}
    path = pack(tmp_path / "a.tar", members)
    found = listed(path, tar_names="last-dot")
    assert {name: (one.captions, dict(one.images)) for name, one in found.items()} == {
        "22.05.png": (("one",), {"image": ("22.05.png",), "mask": ("22.05.mask.png",)}),
        "22.06.png": (("two",), {"image": ("22.06.png",), "control": ("22.06.control.1.png",)}),
    }
    seen = Remarks()
    list(list_tars([path]).samples(seen))
    assert any("last-dot" in words and "22.05.txt" in words for words in seen.in_words())
    assert listed(pack(tmp_path / "b.tar", {"a.png": "", "a.txt": "x", "a.mask.png": ""}), tar_names="last-dot").keys() == {"a.png"}


def test_a_row_in_a_tar_may_have_its_captions_in_another_field(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": "", "a.json": '{"prompt": "a cat", "seed": 7}'})
    [sample] = listed(path, caption_column="prompt").values()
    assert (sample.captions, dict(sample.extras)) == (("a cat",), {"seed": 7})


def test_who_names_a_field_of_the_json_gets_it_although_there_is_a_text(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": "", "a.txt": "short", "a.json": '{"long": "a long one"}', "b.png": "", "b.txt": "alone"})
    assert [one.captions for one in listed(path).values()] == [("short",), ("alone",)]
    assert [one.captions for one in listed(path, caption_column="long").values()] == [("a long one",), ("alone",)]
