"""Everything a trainer points at: folders, metadata files, manifests and prompt lists."""

import contextlib
import hashlib
import json
import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_parts, digest_text
from cachestore.source.combined import list_path
from cachestore.source.folders import UNTRUSTED, Remarks, _lines_of, list_source
from tests import fakes

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))


def files(root, **content):
    """Files below a folder; a name's `__` stands for `/`, and `_DOT_` is not needed: pass a mapping for odd names."""
    return folder(root, content)


def folder(root, content):
    root.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.encode() if isinstance(value, str) else value)
    return root


def manifest(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Listed:
    """A listing whose samples were gone through."""

    def __init__(self, listing):
        remarks = Remarks()
        self.samples = tuple(listing.samples(remarks))
        self.remarks = remarks.in_words()
        self.content, self.root = listing.content, listing.files.root
        self.read, self.stat, self.head = listing.read, listing.stat, listing.head


def listed(path, **options):
    return Listed(list_source(path, **options))


def ids(listing):
    return [sample.id for sample in listing.samples]


def captions(listing):
    return {sample.id: sample.captions for sample in listing.samples}


# Nothing


@pytest.mark.parametrize("name", ["manifest.jsonl", "prompts.txt"])
@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"], ids=["empty", "blank", "mark"])
def test_an_empty_file_lists_nothing(tmp_path, name, content):
    assert listed(folder(tmp_path, {name: content}) / name).samples == ()


def test_an_empty_folder_lists_nothing(tmp_path):
    listing = listed(tmp_path)
    assert (listing.samples, listing.remarks) == ((), ())


@pytest.mark.parametrize("name", ["missing", "missing.jsonl", "missing.txt", "photo.png", "table.csv"])
def test_what_is_no_source_is_refused(tmp_path, name):
    folder(tmp_path, {"photo.png": "p", "table.csv": "a,b"})
    with pytest.raises(BadInput, match=name.partition(".")[0]):
        listed(tmp_path / name)


# Folders of images


def test_a_folder_lists_its_images_by_their_relative_names_sorted(tmp_path):
    folder(tmp_path, dict.fromkeys(("b.png", "sub/deep/a.webp", "a.jpg", "sub/b.png", "B.JPG", "notes.md", "a.json"), "x"))
    assert ids(listed(tmp_path)) == ["B.JPG", "a.jpg", "b.png", "sub/b.png", "sub/deep/a.webp"]


def test_side_cars_are_the_captions(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": " one \n", "b.png": "", "b.caption": "two", "sub/a.png": "", "sub/a.txt": "three"})
    assert captions(listed(tmp_path)) == {"a.png": ("one",), "b.png": ("two",), "sub/a.png": ("three",)}


def test_a_txt_precedes_a_caption_file(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": "one", "a.caption": "two"})
    assert captions(listed(tmp_path)) == {"a.png": ("one",)}


def test_two_images_of_one_stem_are_two_samples_with_one_caption(tmp_path):
    folder(tmp_path, {"a.jpg": "1", "a.png": "2", "a.txt": "both"})
    assert captions(listed(tmp_path)) == {"a.jpg": ("both",), "a.png": ("both",)}


@pytest.mark.parametrize(
    "name", ["with space.png", "dots.in.the.name.png", "ünïcöde 写真.png", "UPPER.JPG", "-dash.png", "a%20b.png", "[x].png"]
)
def test_odd_names_keep_their_captions(tmp_path, name):
    stem = name.rpartition(".")[0]
    folder(tmp_path, {name: "x", f"{stem}.txt": "a caption"})
    assert captions(listed(tmp_path)) == {unicodedata.normalize("NFC", name): ("a caption",)}


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    folder(tmp_path, {".a.png": "", ".git/a.png": "", "._b.png": "", "b.png": ""})
    assert ids(listed(tmp_path)) == ["b.png"]


def test_a_linked_folder_is_followed_and_a_loop_is_not(tmp_path):
    folder(tmp_path / "data", {"a.png": "", "sub/b.png": ""})
    folder(tmp_path / "other", {"c.png": ""})
    (tmp_path / "data/linked").symlink_to(tmp_path / "other")
    (tmp_path / "data/sub/up").symlink_to(tmp_path / "data")
    assert ids(listed(tmp_path / "data")) == ["a.png", "linked/c.png", "sub/b.png"]


def test_each_real_folder_is_listed_once_by_its_own_name_else_by_its_first_link(tmp_path, monkeypatch):
    folder(tmp_path / "data", {"z/a.png": ""})
    folder(tmp_path / "other", {"deep/b.png": ""})
    for name, to in {"a": "data/z", "m": "other", "l": "other", "k": "other/deep", "up": "data"}.items():
        (tmp_path / "data" / name).symlink_to(tmp_path / to)
    listing = listed(tmp_path / "data", caption="x")
    assert ids(listing) == ["k/b.png", "z/a.png"]
    assert listing.remarks == (
        "4 folders are passed over, as they are listed under another name already or the source lies in them (a, l/deep, m, …)",
    )
    monkeypatch.setattr(os, "scandir", Backwards)
    assert listed(tmp_path / "data", caption="x").content == listing.content


class Backwards:
    """A folder in another order."""

    scandir = staticmethod(os.scandir)

    def __init__(self, path):
        with self.scandir(path) as entries:
            self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

    def __enter__(self):
        return self.entries

    def __exit__(self, *_error):
        pass


def test_a_lattice_of_links_is_gone_through_once(tmp_path, monkeypatch):
    """Each of 40 folders has two links to the next one: there are 2^40 ways to the last."""
    for number in range(40):
        folder(tmp_path / "data" / str(number), {"a.png": ""})
        for way in "lr" if number < 39 else "":
            (tmp_path / "data" / str(number) / way).symlink_to(tmp_path / "data" / str(number + 1))
    looked = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or real(path))
    assert len(listed(tmp_path / "data/0").samples) == 40
    assert len(looked) == 40


def test_links_that_lead_nowhere_are_passed_over_with_a_remark_and_fail_alone_where_they_are_named_like_pictures(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": "a cat"})
    for name, to in {"self": "self", "self.png": "self.png", "gone": "nowhere", "note.txt": "nowhere"}.items():
        (tmp_path / name).symlink_to(tmp_path / to)
    listing = listed(tmp_path, caption="x")
    assert ids(listing) == ["a.png", "self.png"]
    assert listing.remarks == ("2 links lead nowhere (gone, self): what they should lead to is not in the data set",)
    with pytest.raises(OSError, match="symbolic links"):
        listing.read("self.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_what_cannot_be_taken_of_a_folder_is_named_all_at_once(tmp_path, monkeypatch):
    folder(tmp_path, {f"{n:02}.png": "" for n in range(30)} | {"secret/x.png": "", "00.txt": b"\xff"})
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "01.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "02.caption").symlink_to("02.caption")
    (tmp_path / "linked").symlink_to(tmp_path / "secret")
    refuse_a_folder(monkeypatch, "secret")
    with pytest.raises(BadInput) as refused:
        list_source(tmp_path)
    named = str(refused.value)
    assert named.startswith(f"6 things in {tmp_path} cannot be used: ")
    for one in (
        "secret cannot be listed (Permission denied)",
        "fifo.png is no regular file",
        "00.txt is not UTF-8",
        "01.txt cannot be read",
    ):
        assert one in named
    assert "02.caption cannot be read" in named
    assert f"{tmp_path}/linked may not be looked at (Permission denied)" in named


def refuse_a_folder(monkeypatch, name):
    """Refuse to list a folder, and to look through links to it: tests run as root, whom no bits keep out."""
    scandir, is_dir = os.scandir, os.DirEntry.is_dir

    class Entry:
        def __init__(self, entry):
            self.entry = entry

        def __getattr__(self, attribute):
            return getattr(self.entry, attribute)

        def is_dir(self):
            if self.entry.is_symlink() and Path(os.readlink(self.entry.path)).name == name:
                raise PermissionError(13, "Permission denied", self.entry.path)
            return is_dir(self.entry)

    @contextlib.contextmanager
    def refusing(path):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        with scandir(path) as entries:
            yield map(Entry, entries)

    monkeypatch.setattr(os, "scandir", refusing)


def test_a_linked_image_is_listed_and_a_broken_link_too_so_that_its_loss_is_said(tmp_path):
    folder(tmp_path, {"a.png": "bytes"})
    (tmp_path / "b.png").symlink_to("a.png")
    (tmp_path / "c.png").symlink_to("gone.png")
    listing = listed(tmp_path)
    assert ids(listing) == ["a.png", "b.png", "c.png"]
    assert listing.read("b.png")[0] == b"bytes"
    assert listing.stat("c.png") is None
    with pytest.raises(FileNotFoundError):
        listing.read("c.png")


def test_a_store_inside_the_folder_is_passed_over(tmp_path):
    folder(tmp_path, {"a.png": "", "cache/cachestore.json": "{}", "cache/b.png": "", "cache/deep/c.png": ""})
    assert ids(listed(tmp_path)) == ["a.png"]


def test_a_folder_with_the_name_of_an_image_is_a_folder(tmp_path):
    folder(tmp_path, {"odd.png/a.png": ""})
    assert ids(listed(tmp_path)) == ["odd.png/a.png"]


def test_ids_are_composed_and_references_are_as_the_disk_has_them(tmp_path):
    folder(tmp_path, {DECOMPOSED: "bytes"})
    [sample] = listed(tmp_path).samples
    assert sample.id == COMPOSED
    assert listed(tmp_path).read(sample.images["image"][0])[0] == b"bytes"


def test_two_names_that_compose_to_one_id_are_refused_and_told_apart(tmp_path):
    folder(tmp_path, {COMPOSED: "1", DECOMPOSED: "2"})
    with pytest.raises(BadInput) as refused:
        listed(tmp_path)
    assert ascii(COMPOSED) in str(refused.value)
    assert ascii(DECOMPOSED) in str(refused.value)


def test_a_name_that_is_not_utf_8_is_listed(tmp_path):
    odd = os.fsdecode(b"caf\xe9.png")
    try:
        (tmp_path / odd).write_bytes(b"bytes")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    listing = listed(tmp_path)
    assert ids(listing) == [odd]
    assert listing.read(odd)[0] == b"bytes"


# Caption files


LINES = " first \n\n second\r\nthird\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [("whole", ("first \n\n second\r\nthird",)), ("each", ("first", "second", "third")), ("first", ("first",))],
)
def test_a_caption_file_is_read_as_asked(tmp_path, lines, expected):
    folder(tmp_path, {"a.png": "", "a.txt": LINES})
    assert captions(listed(tmp_path, caption_lines=lines)) == {"a.png": expected}


def test_a_caption_of_several_lines_is_said_only_where_it_is_taken_whole(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": LINES, "b.png": "", "b.txt": "one line\n"})
    [remark] = listed(tmp_path).remarks
    assert remark.startswith("1 captions of several lines (a.png)")
    assert listed(tmp_path, caption_lines="each").remarks == ()


@pytest.mark.parametrize("lines", ["whole", "each", "first"])
@pytest.mark.parametrize("content", ["", " \n\t\n", "\ufeff"], ids=["empty", "blank", "mark"])
def test_an_empty_caption_file_is_the_empty_caption_and_not_a_missing_one(tmp_path, lines, content):
    folder(tmp_path, {"a.png": "", "a.txt": content})
    listing = listed(tmp_path, caption_lines=lines, caption="given")
    assert captions(listing) == {"a.png": ("",)}
    assert listing.remarks == ()


def test_a_missing_caption_is_the_empty_one_and_is_said(tmp_path):
    folder(tmp_path, {f"{n}.png": "" for n in range(5)})
    listing = listed(tmp_path)
    assert set(captions(listing).values()) == {("",)}
    assert listing.remarks == ("5 without a caption (0.png, 1.png, 2.png, …): they get the empty one, or what --caption TEXT says",)


def test_a_missing_caption_may_be_given(tmp_path):
    folder(tmp_path, {"a.png": "", "b.png": "", "b.txt": "its own"})
    listing = listed(tmp_path, caption="given")
    assert captions(listing) == {"a.png": ("given",), "b.png": ("its own",)}
    assert listing.remarks == ()


def test_a_caption_file_that_is_not_utf_8_is_refused_by_name(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": b"caf\xe9"})
    with pytest.raises(BadInput, match=r"a\.txt is not UTF-8 \(byte 3\)"):
        listed(tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": b"\xef\xbb\xbfa caption"})
    assert captions(listed(tmp_path)) == {"a.png": ("a caption",)}


def test_other_separators_than_line_ends_are_part_of_a_caption(tmp_path):
    """Word processors leave U+2028 behind; it ends no line of a file."""
    folder(tmp_path, {"a.png": "", "a.txt": "one\u2028still one\x85and\x0con"})
    assert captions(listed(tmp_path, caption_lines="each")) == {"a.png": ("one\u2028still one\x85and\x0con",)}


# metadata.jsonl and metadata.csv


def test_metadata_names_files_and_texts_and_keeps_other_columns(tmp_path):
    manifest(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "one", "artist": "x", "score": 1.5}, {"file_name": "sub/b.png"})
    one, other = listed(tmp_path).samples
    assert (one.id, one.captions, dict(one.images), dict(one.extras)) == (
        "a.png",
        ("one",),
        {"image": ("a.png",)},
        {"artist": "x", "score": 1.5},
    )
    assert (other.id, other.captions) == ("sub/b.png", ("",))


def test_metadata_may_be_a_table(tmp_path):
    folder(tmp_path, {"metadata.csv": 'file_name,text,artist\na.png,"one, two",x\nb.png,,\n', "a.png": "", "b.png": ""})
    one, other = listed(tmp_path).samples
    assert (one.captions, dict(one.extras)) == (("one, two",), {"artist": "x"})
    assert other.captions == ("",)


def test_a_table_that_python_cannot_read_is_named_by_file_and_line(tmp_path):
    folder(tmp_path, {"metadata.csv": f"file_name,text\na.png,{'x' * 200_000}\n"})
    with pytest.raises(BadInput, match=r"metadata\.csv, line 2: field larger"):
        listed(tmp_path)


def test_an_empty_cell_of_a_reference_is_none(tmp_path):
    folder(tmp_path, {"metadata.csv": "file_name,text,mask,note\na.png,x,,\nb.png,y,m.png,n\n"})
    one, other = listed(tmp_path).samples
    assert (dict(one.images), dict(one.extras)) == ({"image": ("a.png",)}, {"note": ""})
    assert dict(other.images) == {"image": ("b.png",), "mask": ("m.png",)}


def test_jsonl_precedes_csv(tmp_path):
    folder(tmp_path, {"metadata.csv": "file_name,text\na.png,csv\n"})
    manifest(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "jsonl"})
    assert captions(listed(tmp_path)) == {"a.png": ("jsonl",)}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("file_name,text\na.png,x\n,y\n", "line 3: a row needs `file_name`"),
        ("name,text\na.png,x\n", "line 2: a row needs `file_name`"),
        ("file_name,text\na.png,x,surplus\n", "line 2"),
        ('file_name,text\na.png,"two\nlines"\n,y\n', "line 4: a row needs `file_name`"),
    ],
)
def test_a_malformed_row_of_a_table_is_named_by_file_and_line(tmp_path, content, says):
    folder(tmp_path, {"metadata.csv": content})
    with pytest.raises(BadInput) as refused:
        listed(tmp_path)
    assert "metadata.csv, " + says in str(refused.value)


# Manifests


def test_a_manifest_names_images_captions_controls_and_masks(tmp_path):
    path = manifest(
        tmp_path / "data.jsonl",
        {
            "id": "x",
            "image": "a.png",
            "caption": ["one", "two"],
            "control": ["c1.png", "c2.png"],
            "mask": "m.png",
            "artist": "y",
            "size": [4, 5],
        },
    )
    [sample] = listed(path).samples
    assert (sample.id, sample.captions) == ("x", ("one", "two"))
    assert dict(sample.images) == {"image": ("a.png",), "control": ("c1.png", "c2.png"), "mask": ("m.png",)}
    assert dict(sample.extras) == {"artist": "y", "size": [4, 5]}


def test_references_are_relative_to_the_manifest(tmp_path):
    folder(tmp_path / "data", {"pictures/a.png": "bytes"})
    path = manifest(tmp_path / "data/list.jsonl", {"image": "pictures/a.png"})
    assert listed(path).read("pictures/a.png")[0] == b"bytes"


def test_without_an_id_a_row_is_named_by_its_image_and_without_that_by_its_captions(tmp_path):
    path = manifest(tmp_path / "x.jsonl", {"image": "sub/a.png", "caption": "c"}, {"caption": "c"}, {"caption": ["c", "d"]})
    assert ids(listed(path)) == ["sub/a.png", digest_text("c"), digest_text("c\nd")]


def test_a_whole_number_is_an_id(tmp_path):
    assert ids(listed(manifest(tmp_path / "x.jsonl", {"id": 7, "caption": "a"}, {"id": "8", "caption": "a"}))) == ["7", "8"]


def test_null_is_like_a_missing_column(tmp_path):
    [sample] = listed(manifest(tmp_path / "x.jsonl", {"image": "a.png", "caption": None, "control": None, "id": None})).samples
    assert (sample.id, sample.captions, dict(sample.images)) == ("a.png", ("",), {"image": ("a.png",)})


def test_an_empty_caption_in_a_manifest_is_not_a_missing_one(tmp_path):
    path = manifest(tmp_path / "x.jsonl", {"id": "empty", "caption": ""}, {"image": "none"}, {"image": "no list", "caption": []})
    assert captions(listed(path, caption="given")) == {"empty": ("",), "none": ("given",), "no list": ("given",)}


@pytest.mark.parametrize("column", ["image", "file_name", "path"])
@pytest.mark.parametrize("text", ["caption", "text"])
def test_a_row_may_call_its_picture_and_its_caption_by_each_of_the_known_names(tmp_path, column, text):
    [sample] = listed(manifest(tmp_path / "m.jsonl", {column: "sub/a.png", text: ["one", "two"], "artist": "x"})).samples
    assert (sample.id, sample.captions, dict(sample.images)) == ("sub/a.png", ("one", "two"), {"image": ("sub/a.png",)})
    assert dict(sample.extras) == {"artist": "x"}


@pytest.mark.parametrize("name", ["m.jsonl", "metadata.jsonl"])
@pytest.mark.parametrize("column", ["file_name", "path", "video"])
def test_what_is_named_like_a_video_is_one(tmp_path, name, column):
    path = manifest(tmp_path / name, {column: "a.MP4", "text": "x"})
    [sample] = listed(path if name == "m.jsonl" else tmp_path).samples
    assert (sample.id, dict(sample.images)) == ("a.MP4", {"video": ("a.MP4",)})


def test_equal_values_under_two_names_are_one_and_null_is_none(tmp_path):
    one = {"image": "a.png", "path": "a.png", "file_name": ["a.png"], "caption": "x", "text": ["x"]}
    two = {"image": None, "path": "b.png", "caption": None, "text": "y"}
    samples = listed(manifest(tmp_path / "m.jsonl", one, two)).samples
    assert [(sample.id, sample.captions, sample.extras) for sample in samples] == [("a.png", ("x",), {}), ("b.png", ("y",), {})]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"image": "a.png", "caption": "x", "text": "y"}, "caption and text mean the same and differ ('x' and 'y')"),
        ({"image": "a.png", "caption": "", "text": "y"}, "caption and text mean the same and differ ('' and 'y')"),
        ({"image": "a.png", "path": "b.png"}, "image and path mean the same and differ ('a.png' and 'b.png')"),
        ({"video": "a.mp4", "path": "b.mp4"}, "video and path mean the same and differ"),
        ({"file_name": "a.png", "path": "a.mp4"}, "file_name and path mean the same and differ"),
        (
            {"imgae": "a.png", "captoin": "x"},
            "its columns are imgae, captoin; the known ones are caption, text, image, control, mask, video, file_",
        ),
        ({"id": 7, "image": None, "caption": []}, "neither a picture, a video nor a caption: its columns are id, image, caption"),
        ({"path": {"bytes": "x"}}, "path is a text or a list of texts"),
    ],
)
def test_a_row_that_says_two_things_or_nothing_is_refused(tmp_path, row, says):
    with pytest.raises(BadInput) as refused:
        listed(manifest(tmp_path / "m.jsonl", row))
    assert "m.jsonl, line 1: " in str(refused.value)
    assert says in str(refused.value)


def test_malformed_rows_are_named_all_at_once_the_first_twenty_and_a_count(tmp_path):
    rows = [row for n in range(25) for row in ({"image": 7}, {"image": f"{n}.png", "caption": "a"})]
    manifest(tmp_path / "m.jsonl", *rows)
    with pytest.raises(BadInput, match=r"25 things in .*m\.jsonl cannot be used: line 1: image is .*; line 39: .*; and 5 more$") as refused:
        listed(tmp_path / "m.jsonl")
    assert str(refused.value).count("line ") == 20


def test_a_manifest_that_is_read_otherwise_than_before_has_another_plan(tmp_path):
    """By the bytes alone a plan of the times when `text` was a column of the user's own would be found."""
    path = manifest(tmp_path / "m.jsonl", {"image": "a.png", "text": "a cat"})
    before = digest_parts("cachestore-content", ".jsonl", hashlib.sha256(path.read_bytes()).hexdigest(), b"").hex()
    assert list_source(path).content != before


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("not json", "not JSON"),
        ("[1]", "a row is an object, this is a list"),
        ("null", "a row is an object"),
        ('{"id": [1], "caption": "a"}', "an id is a text or a whole number"),
        ('{"id": true, "caption": "a"}', "an id is a text or a whole number"),
        ('{"id": 1.5, "caption": "a"}', "an id is a text or a whole number"),
        ('{"id": "", "caption": "a"}', "an id"),
        ('{"id": "x", "caption": 7}', "caption is a text or a list of texts"),
        ('{"id": "x", "caption": ["a", 7]}', "caption is a text or a list of texts"),
        ('{"id": "x", "image": {"path": "a.png"}}', "image is a text or a list of texts"),
        ('{"id": "x", "image": ""}', "image"),
        ('{"id": "x", "video": 7}', "video is a text or a list"),
        ('{"id": "x", "caption": "a", "prompt_embeds": 1}', "'prompt_embeds'"),
        ('{"id": "x", "score": NaN}', "not JSON"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, row, says):
    folder(tmp_path, {"data.jsonl": '{"image": "fine"}\n\n' + row + "\n"})
    with pytest.raises(BadInput) as refused:
        listed(tmp_path / "data.jsonl")
    assert "data.jsonl, line 3: " in str(refused.value)
    assert says in str(refused.value)


def test_size_and_crop_travel_beside_the_sample(tmp_path):
    rows = {"image": "a.png", "size": [100, 70], "crop": [0, 10, 100, 70]}, {"image": "b.png", "size": None}
    assert [sample.extras for sample in listed(manifest(tmp_path / "m.jsonl", *rows)).samples] == [
        {"size": [100, 70], "crop": [0, 10, 100, 70]},
        {},
    ]


def test_size_and_crop_of_a_table_are_spelled_as_json(tmp_path):
    folder(tmp_path, {"metadata.csv": 'file_name,text,size,crop\na.png,a,"[100, 70]","[0, 0, 9, 9]"\nb.png,b,,\n'})
    assert [sample.extras for sample in listed(tmp_path).samples] == [{"size": [100, 70], "crop": [0, 0, 9, 9]}, {}]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"size": "large"}, r"size is \[width, height\] of the picture in whole pixels, not 'large'"),
        ({"size": [100]}, "size is"),
        ({"size": [100, 0]}, "size is"),
        ({"size": [100.0, 70]}, "size is"),
        ({"crop": [1, 2, 3]}, r"crop is \[left, top, right, bottom\]"),
        ({"crop": [5, 0, 5, 9]}, "crop is"),
        ({"crop": [-1, 0, 5, 9]}, "crop is"),
        ({"crop": [0, 0, True, 9]}, "crop is"),
        ({"crop": [0, 0, 101, 9], "size": [100, 70]}, "sticks out of a picture of the size"),
        ({"crop": [0, 0, 9, 9], "image": None}, "this row has no image"),
    ],
)
def test_a_size_or_crop_that_cannot_be_is_named_by_file_and_line(tmp_path, columns, says):
    with pytest.raises(BadInput, match=r"m\.jsonl, line 1: .*" + says):
        listed(manifest(tmp_path / "m.jsonl", {"image": "a.png", "caption": "a", **columns}))


def test_a_manifest_that_is_not_utf_8_is_refused(tmp_path):
    folder(tmp_path, {"data.jsonl": b'{"id": "caf\xe9"}'})
    with pytest.raises(BadInput, match=r"data\.jsonl is not UTF-8"):
        listed(tmp_path / "data.jsonl")


def test_a_row_may_hold_unicode_separators(tmp_path):
    """JSON allows U+2028 and U+0085 unescaped inside a text; they end no line."""
    text = json.dumps({"id": "a", "caption": "one\u2028two\x85three"}, ensure_ascii=False)
    folder(tmp_path, {"data.jsonl": text + "\n"})
    assert captions(listed(tmp_path / "data.jsonl")) == {"a": ("one\u2028two\x85three",)}


def test_duplicate_ids_are_an_error_that_names_both(tmp_path):
    path = manifest(tmp_path / "x.jsonl", {"id": "same", "image": "a.png"}, {"id": "other"}, {"id": "same", "image": "b.png"})
    with pytest.raises(BadInput) as refused:
        listed(path)
    assert all(name in str(refused.value) for name in ("'same'", "'a.png'", "'b.png'"))


# Prompt lists


def test_prompts_are_one_a_line_without_blanks_and_duplicates(tmp_path):
    folder(tmp_path, {"p.txt": "a cat\n\n  a dog \na cat\r\na dog\n"})
    listing = listed(tmp_path / "p.txt")
    assert captions(listing) == {digest_text("a cat"): ("a cat",), digest_text("a dog"): ("a dog",)}
    assert listing.remarks == ("2 duplicate prompt lines collapsed",)
    assert all(not sample.images for sample in listing.samples)


def test_prompts_keep_their_order(tmp_path):
    folder(tmp_path, {"p.txt": "z\na\nm"})
    assert [sample.captions[0] for sample in listed(tmp_path / "p.txt").samples] == ["z", "a", "m"]


def test_a_form_feed_ends_no_prompt(tmp_path):
    folder(tmp_path, {"p.txt": "one\x0cstill one\u2028and on\n"})
    assert len(listed(tmp_path / "p.txt").samples) == 1


# Content


NAMES = st.lists(st.sampled_from(["a.png", "b.png", "sub/a.png", "é.png"]), unique=True)


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


# Reading


def test_a_file_comes_with_its_size_and_time(tmp_path):
    folder(tmp_path, {"a.png": "bytes"})
    os.utime(tmp_path / "a.png", ns=(5, 1_000_000_007))
    assert listed(tmp_path).read("a.png") == (b"bytes", (5, 1_000_000_007))


def test_the_time_of_a_file_that_was_modified_just_now_is_not_trusted(tmp_path):
    folder(tmp_path, {"a.png": "bytes"})
    assert listed(tmp_path).read("a.png") == (b"bytes", UNTRUSTED)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    folder(tmp_path, {"a.png": "bytes"})
    listing = listed(tmp_path)
    really, seen = os.fstat, []

    def fstat(descriptor):
        seen.append(descriptor)
        if len(seen) == 3:  # after it was seen to be a regular file, and looked at before it is read
            os.utime(tmp_path / "a.png", ns=(7, 7))
        return really(descriptor)

    monkeypatch.setattr("cachestore.source.folders.os.fstat", fstat)
    with pytest.raises(OSError, match="changed while it was read"):
        listing.read("a.png")


def test_the_head_of_a_file_is_read_alone(tmp_path):
    folder(tmp_path, {"a.png": "0123456789"})
    assert listed(tmp_path).head("a.png", 4) == b"0123"


def test_references_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    folder(tmp_path / "data", {"a.png": "bytes"})
    monkeypatch.chdir(tmp_path)
    listing = listed("data")
    monkeypatch.chdir("/")
    assert listing.read("a.png")[0] == b"bytes"


# A manifest is known by its bytes


def test_a_manifest_is_listed_without_reading_its_rows(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("this is no JSON")
    listing = list_source(path)
    assert len(listing.content) == 64
    with pytest.raises(BadInput, match="line 1"):
        list(listing.samples())


def test_the_content_of_a_manifest_is_that_of_its_bytes_its_kind_and_what_a_missing_caption_becomes(tmp_path):
    contents = set()
    for name in ("m.jsonl", "m.txt"):
        for text in ("", "{}\n"):
            (tmp_path / name).write_text(text)
            contents |= {list_source(tmp_path / name, caption=caption).content for caption in (None, "", "x")}
    assert len(contents) == 12


def test_a_manifest_that_changes_while_it_is_read_is_refused(tmp_path):
    listing = list_source(manifest(tmp_path / "m.jsonl", {"image": "a"}, {"image": "b"}))
    rows = listing.samples()
    next(rows)
    manifest(tmp_path / "m.jsonl", {"image": "a"}, {"image": "c"})
    with pytest.raises(BadInput, match="changed while it was read"):
        list(rows)


def test_a_line_that_is_not_utf_8_is_named_by_its_byte(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfa\nb\xff\n")
    with pytest.raises(BadInput, match="byte 6"):
        list(list_source(tmp_path / "p.txt").samples())


@given(st.lists(st.sampled_from(["a", "\r", "\n", "\r\n", "\u2028", " "]), max_size=8).map("".join))
def test_lines_are_split_as_those_of_a_text_file(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    expected = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = [line for _number, line in _lines_of(path)]
    assert [line for line in found if line] == [line for line in expected if line]
    assert [number for number, _line in _lines_of(path)] == list(range(1, len(found) + 1))


@pytest.mark.parametrize("name", ["latents", "control_latents", "prompt_embeds", "sample_id", "target_size"])
def test_a_column_named_as_what_a_batch_holds_is_refused(tmp_path, name):
    with pytest.raises(BadInput, match=f"a value of its own named '{name}'"):
        list(listed(manifest(tmp_path / "m.jsonl", {"id": "x", "caption": "c", name: 1})).samples)


# What must not be waited for


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_that_is_named_like_a_picture_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(BadInput, match=r"x\.png is no regular file"):
        list_source(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_in_the_place_of_captions_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(BadInput, match=r"a\.txt cannot be read"):
        list_source(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_that_a_manifest_names_cannot_be_read_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "m.jsonl").write_text('{"image": "x.png", "caption": "a"}\n')
    listing = list_source(tmp_path / "m.jsonl")
    for look in (listing.read, lambda reference: listing.head(reference, 10)):
        with pytest.raises(OSError, match="no regular file"):
            look("x.png")


def test_a_link_that_leads_nowhere_is_listed_and_fails_alone(tmp_path):
    (tmp_path / "x.png").symlink_to(tmp_path / "nothing")
    listing = list_source(tmp_path)
    assert [sample.id for sample in listing.samples()] == ["x.png"]
    with pytest.raises(FileNotFoundError):
        listing.read("x.png")


def test_a_folder_that_may_not_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a" / "secret").mkdir(parents=True)
    refuse_a_folder(monkeypatch, "secret")
    with pytest.raises(BadInput, match=r"the folder .*secret cannot be listed \(Permission denied\)"):
        list_source(tmp_path)


def test_a_source_that_may_not_be_looked_at_is_an_error_of_ours(tmp_path, monkeypatch):
    """As root tests are kept out of nothing: the system's own call refuses."""
    real = os.stat

    def stat(path, *args, **options):
        if isinstance(path, str | os.PathLike) and "secret" in os.fspath(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    for name in ("secret", "secret/m.jsonl", "secret/a.tar"):
        with pytest.raises(BadInput, match="does not exist"):
            list_path(tmp_path / name)


def test_captions_of_which_none_has_any_text_are_said(tmp_path):
    folder = fakes.captioned(tmp_path / "folder", 3)
    assert remarks_of(list_source(folder)) == ()
    for path in folder.glob("*.txt"):
        path.write_text(" \n")
    assert remarks_of(list_source(folder)) == (f"no caption has any text in 1 source ({folder}): every sample gets the empty caption",)
    assert remarks_of(list_source(folder, caption="")) == ()
    rows = manifest(tmp_path / "rows.jsonl", {"image": "a.png", "text": ""}, {"image": "b.png", "caption": " "})
    assert any("no caption has any text in 1 source" in words for words in remarks_of(list_source(rows)))


def remarks_of(listing):
    seen = Remarks()
    list(listing.samples(seen))
    return seen.in_words()


def test_a_link_to_a_folder_that_the_source_lies_in_is_passed_over(tmp_path):
    (tmp_path / "above").mkdir()
    folder = fakes.captioned(tmp_path / "above" / "data", 2)
    (tmp_path / "above" / "other.png").write_bytes(b"beside the source")
    (folder / "up").symlink_to("..")
    listing = list_source(folder)
    assert [sample.id for sample in listing.samples(Remarks())] == ["0.png", "1.png"]
    assert any("the source lies in them (up)" in words for words in remarks_of(listing))


def test_a_manifest_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"caption": "a"}\n')

    def refuse(*_given, **_named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInput, match=r"rows\.jsonl cannot be read: Permission denied; let this user read it"):
        list_source(rows)
