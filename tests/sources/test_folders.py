"""What a path names: folders of images, with links and odd names, and lists of prompts."""

import contextlib
import os
import re
import unicodedata
from pathlib import Path

import pytest

from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_text
from cachestore.sources.combined import list_path
from cachestore.sources.folders import list_source
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from tests import fakes
from tests.fakes import tells_of
from tests.sources.sources import captions, folder, ids, listed, unused

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))


def test_a_folder_that_this_user_may_not_enter_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    with pytest.raises(BadInput, check=tells_of(tmp_path)):
        list_path(tmp_path)


@pytest.mark.parametrize("name", ["manifest.jsonl", "prompts.txt"])
@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"], ids=["empty", "blank", "mark"])
def test_an_empty_file_lists_nothing(tmp_path, name, content):
    assert listed(folder(tmp_path, {name: content}) / name).samples == ()


@pytest.mark.parametrize(
    ("path", "files", "says"),
    [
        ("t.arrow", ("t.arrow",), "load_dataset('arrow'"),
        ("d", ("d/state.json", "d/dataset_info.json", "d/data.arrow"), "load_from_disk("),
        ("d", ("d/dataset_dict.json",), "load_from_disk("),
    ],
)
def test_files_of_hugging_face_data_sets_are_refused_with_the_call_that_loads_them(tmp_path, path, files, says):
    with pytest.raises(BadInput, match=re.escape(says)):
        list_source(folder(tmp_path, dict.fromkeys(files, "{}")) / path)


def test_an_empty_folder_lists_nothing(tmp_path):
    listing = listed(tmp_path)
    assert (listing.samples, listing.remarks) == ((), ())


@pytest.mark.parametrize("name", ["missing", "missing.jsonl", "missing.txt", "photo.png", "table.xlsx"])
def test_what_is_no_source_is_refused(tmp_path, name):
    folder(tmp_path, {"photo.png": "p", "table.xlsx": "a,b"})
    with pytest.raises(BadInput, check=tells_of(tmp_path / name)):
        listed(tmp_path / name)


def test_a_folder_lists_its_images_by_their_relative_names_sorted(tmp_path):
    folder(tmp_path, dict.fromkeys(("b.png", "sub/deep/a.webp", "a.jpg", "sub/b.png", "B.JPG", "notes.md", "list.json"), "x"))
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
    assert unused(tmp_path / "data") == {"listed-twice": ["a/", "l/deep/", "m/", "up/"]}
    monkeypatch.setattr(os, "scandir", Backwards)
    assert listed(tmp_path / "data", caption="x").content == listing.content


class Backwards:
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
    assert len(looked) == 40 + 3  # the folder and its two links are searched for metadata first


def test_links_that_lead_nowhere_are_passed_over_with_a_remark_and_fail_alone_where_they_are_named_like_pictures(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": "a cat"})
    for name, to in {"self": "self", "self.png": "self.png", "gone": "nowhere", "note.txt": "nowhere"}.items():
        (tmp_path / name).symlink_to(tmp_path / to)
    listing = listed(tmp_path, caption="x")
    assert ids(listing) == ["a.png", "self.png"]
    assert unused(tmp_path) == {"broken-link": ["gone", "self", "note.txt"]}
    with pytest.raises(OSError):
        listing.read("self.png")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_what_cannot_be_taken_of_a_folder_is_named_all_at_once(tmp_path, monkeypatch):
    folder(tmp_path, {f"{n:02}.png": "" for n in range(30)} | {"secret/x.png": ""})
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "linked").symlink_to(tmp_path / "secret")
    refuse_a_folder(monkeypatch, "secret")
    with pytest.raises(BadInput) as refused:
        list_source(tmp_path)
    named = str(refused.value)
    assert named.startswith(f"3 problems in {tmp_path}: ")
    for one in ("secret cannot be listed (Permission denied)", "fifo.png is not a regular file"):
        assert one in named
    assert f"{tmp_path}/linked (Permission denied)" in named


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


def test_a_linked_image_is_listed_and_a_broken_link_too_so_that_its_loss_is_reported(tmp_path):
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


def test_a_name_that_is_not_utf_8_is_listed(tmp_path):
    odd = os.fsdecode(b"caf\xe9.png")
    try:
        (tmp_path / odd).write_bytes(b"bytes")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    listing = listed(tmp_path)
    assert ids(listing) == [odd]
    assert listing.read(odd)[0] == b"bytes"


def test_prompts_are_one_a_line_without_blanks_and_duplicates(tmp_path):
    folder(tmp_path, {"p.txt": "a cat\n\n  a dog \na cat\r\na dog\n"})
    listing = listed(tmp_path / "p.txt")
    assert captions(listing) == {digest_text("a cat"): ("a cat",), digest_text("a dog"): ("a dog",)}
    assert listing.remarks == ("2 duplicate prompt lines are encoded once",)
    assert all(not sample.images for sample in listing.samples)


def test_prompts_keep_their_order(tmp_path):
    folder(tmp_path, {"p.txt": "z\na\nm"})
    assert [sample.captions[0] for sample in listed(tmp_path / "p.txt").samples] == ["z", "a", "m"]


def test_a_form_feed_ends_no_prompt(tmp_path):
    folder(tmp_path, {"p.txt": "one\x0cstill one\u2028and on\n"})
    assert len(listed(tmp_path / "p.txt").samples) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_that_is_named_like_a_picture_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(BadInput):
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
        with pytest.raises(BadInput):
            list_path(tmp_path / name)


def test_a_link_to_a_folder_that_the_source_lies_in_is_passed_over(tmp_path):
    (tmp_path / "above").mkdir()
    folder = fakes.captioned(tmp_path / "above" / "data", 2)
    (tmp_path / "above" / "other.png").write_bytes(b"beside the source")
    (folder / "up").symlink_to("..")
    listing = list_source(folder)
    assert [sample.id for sample in listing.samples(Remarks())] == ["0.png", "1.png"]
    assert unused(folder) == {"listed-twice": ["up/"]}


def test_a_files_name_gives_it_a_role_of_the_picture_or_video_of_the_same_name(tmp_path):
    names = (
        "a.png",
        "a.mask.png",
        "a.control.2.png",
        "a.control.1.JPG",
        "my.cat.webp",
        "my.cat.reference.png",
        "sub/b.mkv",
        "sub/b.mask.mp4",
        "a.reference.mkv",
    )
    folder(tmp_path, dict.fromkeys((*names, "sub/b.first_frame.png", "sub/b.last_frame.png", "alone.mask.png", "a.masked.png"), "x"))
    remarks = Remarks()
    samples = {sample.id: dict(sample.images) for sample in list_source(tmp_path, ListingOptions(videos=True)).samples(remarks)}
    assert samples == {
        "a.png": {
            "image": ("a.png",),
            "control": ("a.control.1.JPG", "a.control.2.png"),
            "mask": ("a.mask.png",),
            "reference": ("a.reference.mkv",),
        },
        "a.masked.png": {"image": ("a.masked.png",)},
        "alone.mask.png": {"image": ("alone.mask.png",)},  # of nothing
        "my.cat.webp": {"image": ("my.cat.webp",), "reference": ("my.cat.reference.png",)},
        "sub/b.mkv": {
            "video": ("sub/b.mkv",),
            "first_frame": ("sub/b.first_frame.png",),
            "last_frame": ("sub/b.last_frame.png",),
            "mask": ("sub/b.mask.mp4",),
        },
    }
    assert remarks.in_words()[-1].startswith("8 files are no samples of their own: by their names")
    remarks = Remarks()
    samples = {sample.id: set(sample.images) for sample in list_source(tmp_path).samples(remarks)}
    assert "sub/b.first_frame.png" not in samples
    assert samples["a.png"] == {"image", "control", "mask"}
    of_videos = ["a.reference.mkv", "sub/b.mask.mp4", "sub/b.mkv", "sub/b.first_frame.png", "sub/b.last_frame.png"]
    assert unused(tmp_path) == {"video-without-frames": of_videos}


def test_where_a_picture_and_a_video_have_one_name_each_gets_the_roles_that_follow_it(tmp_path):
    folder(tmp_path, dict.fromkeys(("a.png", "a.mkv", "a.mask.png", "a.first_frame.png"), "x"))
    samples = {sample.id: set(sample.images) for sample in list_source(tmp_path, ListingOptions(videos=True)).samples()}
    assert samples == {"a.png": {"image", "mask"}, "a.mkv": {"video", "first_frame"}}
