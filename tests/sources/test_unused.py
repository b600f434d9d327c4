"""The account of a source: every file is used, or has a reason."""

import re
import tarfile
import unicodedata
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.samples import Source
from cachestore.sources.combined import list_path, list_sources
from cachestore.sources.leftovers import Leftovers
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.sources.unused import REASONS, Unused, unused_in_words
from cachestore.sources.walk import Names
from tests.fakes import ROOT
from tests.sources.sources import captions, folder, ids, listed, manifest, unused

JPEG, TEXT = b"\xff\xd8\xff\xe0\0\x10JFIF", b"a cat"


def test_the_page_explains_each_reason_and_no_other():
    page = (ROOT / "docs/sources.md").read_text(encoding="utf-8")
    section = page.partition("### What is not used\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == list(REASONS)


def test_an_unknown_reason_is_an_error():
    with pytest.raises(KeyError):
        Unused().add("no-reason", "a")


def test_pictures_of_every_suffix_that_is_decoded_are_samples_and_others_are_named(tmp_path):
    read = [f"{n}{suffix}" for n, suffix in enumerate((".jpg", ".JFIF", ".jpe", ".jp2", ".ppm", ".apng", ".j2k", ".dib", ".pgm", ".mpo"))]
    left = ["a.svg", "b.psd", "c.exr", "d.CR2", "e.dng", "f.nef", "g.tga"]
    folder(tmp_path, dict.fromkeys((*read, *left), JPEG))
    assert ids(listed(tmp_path)) == sorted(read)
    assert unused(tmp_path) == {"no-decoder": left}


def test_a_cameras_raw_file_is_no_sample_whatever_it_holds(tmp_path):
    folder(tmp_path, {f"a{suffix}": b"II*\0" for suffix in (".dng", ".nef", ".arw", ".cr2", ".pef", ".3fr")} | {"b.tif": b"II*\0"})
    assert ids(listed(tmp_path)) == ["b.tif"]


def test_videos_of_every_suffix_are_counted_without_frames_with_what_belongs_to_them(tmp_path):
    videos = [f"{n}{suffix}" for n, suffix in enumerate((".m4v", ".ts", ".mpg", ".wmv", ".flv", ".3gp", ".ogv", ".M2TS"))]
    folder(tmp_path, dict.fromkeys((*videos, "0.mask.png"), b"") | {"a.png": b"", "1.txt": TEXT})
    assert unused(tmp_path) == {"video-without-frames": [*videos, "0.mask.png"], "caption-without-picture": ["1.txt"]}
    assert ids(listed(tmp_path, videos=True)) == [*videos, "a.png"]


def test_what_an_unknown_ending_hides_is_named_by_its_content_and_used_by_none(tmp_path):
    tar = BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.addfile(tarfile.TarInfo("x"))
    odd = {"a.jpg_large": JPEG, "b": b"\x89PNG\r\n\x1a\n", "c.download": b"\0\0\0\x18ftypmp42", "d.shard": tar.getvalue()}
    folder(tmp_path, odd | {"ok.png": b"", "Thumbs.db": b"\xd0\xcf\x11\xe0", "notes": TEXT, "empty": b""})
    assert ids(listed(tmp_path)) == ["ok.png"]
    assert unused(tmp_path) == {"unknown-ending": list(odd), "not-data": ["Thumbs.db", "empty", "notes"]}


def test_content_is_looked_at_for_a_hundred_files_at_most():
    looked: list[Path] = []
    left = Leftovers(Unused(), peek=lambda path: looked.append(path) or JPEG)
    names = [f"{n}.odd{n % 40}" for n in range(300)]
    left.sort(Names("", Path("data"), names), names)
    assert (len(looked), sum(left.unused.counts.values())) == (100, 300)


def test_hidden_files_stores_caches_and_what_is_no_data_count_once_each(tmp_path):
    folder(
        tmp_path,
        {".DS_Store": "", "._a.png": "", ".git/a.png": "", ".git/b.png": "", "cache/cachestore.json": "{}", "cache/b.png": "", "a.png": ""},
    )
    folder(
        tmp_path,
        {
            "a_te.npz": "",
            "a_sdxl.safetensors": "",
            "aspect_ratio_bucket_metadata_x.json": "",
            "README.md": "",
            "LICENSE": TEXT,
            "licence.txt": TEXT,
        },
    )
    assert unused(tmp_path) == {
        "hidden": [".DS_Store", "._a.png", ".git"],
        "store": ["cache/"],
        "trainer-cache": ["a_sdxl.safetensors", "a_te.npz", "aspect_ratio_bucket_metadata_x.json"],
        "not-data": ["LICENSE", "README.md", "licence.txt"],
    }


def test_archives_beside_pictures_are_named(tmp_path):
    folder(tmp_path, {"a.png": "", "shard-000.tar": "", "sub/more.tar": "", "old.zip": "PK", "x.tar.gz": ""})
    assert unused(tmp_path) == {"archive": ["old.zip", "shard-000.tar", "x.tar.gz", "sub/more.tar"]}


# Captions


@pytest.mark.parametrize(
    "name",
    ["a.txt", "a.TXT", "a.Caption", "A.txt", "a.png.txt", "a.PNG.TXT", "a.png.caption", "A.PNG.CAPTION"],
)
def test_a_caption_is_found_in_any_case_and_with_the_pictures_whole_name(tmp_path, name):
    folder(tmp_path, {"a.png": "", name: TEXT, "b.png": ""})
    assert captions(listed(tmp_path)) == {"a.png": ("a cat",), "b.png": ("",)}
    assert unused(tmp_path) == {}


def test_of_two_captions_that_differ_in_case_the_one_in_the_pictures_own_case_and_in_small_letters_counts(tmp_path):
    names = {"a.txt": "small", "a.TXT": "large", "A.txt": "other"}
    folder(tmp_path, {"a.png": "", **names})
    assert captions(listed(tmp_path)) == {"a.png": ("small",)}
    assert unused(tmp_path) == {"second-caption": ["A.txt", "a.TXT"]}


def test_a_caption_in_another_case_belongs_to_the_picture_that_has_it(tmp_path):
    folder(tmp_path, {"a.png": "", "A.jpg": "", "A.txt": "large"})
    assert captions(listed(tmp_path)) == {"A.jpg": ("large",), "a.png": ("",)}


@pytest.mark.parametrize(("picture", "caption"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_caption_is_found_in_the_other_unicode_form(tmp_path, picture, caption):
    folder(tmp_path, {unicodedata.normalize(picture, "café.png"): "", unicodedata.normalize(caption, "café.txt"): TEXT})
    folder(tmp_path, {unicodedata.normalize(caption, "café.mask.png"): ""})
    [sample] = listed(tmp_path).samples
    assert (sample.captions, set(sample.images)) == (("a cat",), {"image", "mask"})


def test_of_several_captions_of_a_picture_the_first_counts_and_the_others_are_named(tmp_path):
    folder(tmp_path, dict.fromkeys(("a.txt", "a.caption", "a.png.txt", "a.tags", "a_caption.txt"), TEXT) | {"a.png": ""})
    assert unused(tmp_path) == {"second-caption": ["a.caption", "a.png.txt", "a.tags", "a_caption.txt"]}


@pytest.mark.parametrize(
    "name",
    [
        *("a.text", "a.tags", "a.cap", "a.captions", "a.prompt", "a.md", "a.srt", "a.xml", "a.yaml", "a.odd"),
        *("a_caption.txt", "a-caption.txt", "a.caption.txt", "caption_a.txt", "a.jpg.txt", "a.TAGS"),
        *("captions/a.txt", "labels/a.text", "captions/sub/a.txt", "texts/a_caption.txt"),
    ],
)
def test_a_caption_of_another_spelling_is_named_and_stops_a_run_that_would_have_none(tmp_path, name):
    folder(tmp_path, {"a.png": "", "b.png": "", name: TEXT})
    listing = list_path(tmp_path)
    assert unused(tmp_path) == {"other-spelling": [name]}
    [words] = listing.seen.captions_elsewhere
    assert f"rename {name} to a.txt" in words
    assert "an empty caption" in words
    assert list_path(tmp_path, ListingOptions(caption="")).seen.captions_elsewhere == []


@pytest.mark.parametrize(
    "name", ["captions.csv", "labels.jsonl", "prompts.txt", "captions.json", "meta_cap.json", "data.tsv", "info.parquet"]
)
def test_a_table_that_nothing_reads_is_named_and_stops_a_run_without_captions(tmp_path, name):
    folder(tmp_path, {"a.png": "", name: TEXT})
    assert unused(tmp_path) == {"unread-table": [name]}
    assert name in list_path(tmp_path).seen.captions_elsewhere[0]


@pytest.mark.parametrize("name", ["README.md", "README.txt", "LICENSE", "a.xmp", "a.AAE", "a.cls", "a.wav", "b.md", "x.py", "a.npz"])
def test_what_is_no_caption_stops_no_run(tmp_path, name):
    folder(tmp_path, {"a.png": "", name: TEXT})
    assert list_path(tmp_path).seen.captions_elsewhere == []
    assert not {"other-spelling", "unread-table"} & unused(tmp_path).keys()


def test_where_half_of_the_samples_have_captions_others_are_only_named(tmp_path):
    folder(tmp_path, {"a.png": "", "a.txt": TEXT, "b.png": "", "b.text": TEXT})
    assert list_path(tmp_path).seen.captions_elsewhere == []
    assert unused(tmp_path) == {"other-spelling": ["b.text"]}


def test_captions_of_no_picture_stop_a_run_only_where_there_are_many_and_none_is_of_a_file_that_is_not_read(tmp_path):
    folder(tmp_path / "many", {"img1.png": "", "img2.png": "", "cap1.txt": TEXT, "cap2.txt": TEXT})
    folder(tmp_path / "few", {**{f"img{n}.png": "" for n in range(9)}, "notes.txt": TEXT})
    folder(tmp_path / "videos", {"a.png": "", "v.mp4": "", "v.txt": TEXT, "w.heic": "", "w.txt": TEXT})
    stops = {name: bool(list_path(tmp_path / name).seen.captions_elsewhere) for name in ("many", "few", "videos")}
    assert stops == {"many": True, "few": False, "videos": False}


def test_a_json_without_a_picture_is_a_caption_only_where_captions_are_in_such_files(tmp_path):
    folder(tmp_path / "json", {"a.png": "", "a.json": '{"caption": "x"}', "b.json": "{}"})
    folder(tmp_path / "text", {"a.png": "", "a.txt": TEXT, "config.json": "{}", "c.webp.json": "{}"})
    assert unused(tmp_path / "json") == {"caption-without-picture": ["b.json"]}
    assert unused(tmp_path / "text") == {"not-data": ["config.json"], "caption-without-picture": ["c.webp.json"]}


def test_of_pictures_with_one_name_a_caption_elsewhere_is_meant_for_the_nearest(tmp_path):
    folder(tmp_path, {"test/a.png": "", "train/a.png": "", "train/captions/a.txt": TEXT})
    assert "rename train/captions/a.txt to train/a.txt" in list_path(tmp_path).seen.captions_elsewhere[0]


def test_two_forms_of_one_name_fail_alone(tmp_path):
    one, other = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))
    folder(tmp_path, {one: "1", other: "2", "b.png": ""})
    remarks = Remarks()
    assert [sample.id for sample in list_path(tmp_path).samples(remarks)] == ["b.png"]
    assert [one.sample for one in remarks.refused] == [one, one]
    assert all("rename one of them" in refused.reason for refused in remarks.refused)


def test_a_broken_link_for_a_caption_fails_alone_or_is_named(tmp_path):
    folder(tmp_path, {"a.png": "", "b.png": "", "b.txt": TEXT})
    (tmp_path / "a.txt").symlink_to("gone")
    (tmp_path / "c.txt").symlink_to("gone")
    remarks = Remarks()
    assert [sample.id for sample in list_path(tmp_path).samples(remarks)] == ["b.png"]
    assert [one.sample for one in remarks.refused] == ["a.png"]
    assert unused(tmp_path) == {"broken-link": ["c.txt"]}


# Rows and tars


def test_pictures_without_a_row_and_captions_beside_rows_are_named(tmp_path):
    folder(tmp_path, dict.fromkeys(("a.png", "b.png", "c.png", "sub/d.png", "sub/e.png"), "") | {"a.txt": TEXT, "metadata.csv": "x"})
    manifest(tmp_path / "metadata.jsonl", *({"file_name": name, "text": "x"} for name in ("a.png", "./b.png", "sub/e.png")))
    assert unused(tmp_path) == {
        "picture-without-row": ["c.png", "sub/d.png"],
        "second-caption": ["a.txt"],
        "second-metadata": ["metadata.csv"],
    }


def test_metadata_where_none_is_read_is_a_table_that_nothing_reads(tmp_path):
    folder(tmp_path, {"a.png": "", "deep/down/metadata.jsonl": "{}", "deep/down/b.png": ""})
    assert unused(tmp_path) == {"unread-table": ["deep/down/metadata.jsonl"]}
    assert list_path(tmp_path).seen.captions_elsewhere


def test_a_manifest_answers_for_itself_alone(tmp_path):
    folder(tmp_path, {"a.png": "", "b.png": ""})
    assert unused(manifest(tmp_path / "rows.jsonl", {"image": "a.png", "text": "x"})) == {}


def pack(path, *names, content=TEXT):
    with tarfile.open(path, "w") as file:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, BytesIO(content))
    return path


def test_members_of_tars_that_are_not_used_have_their_reasons(tmp_path):
    names = [
        "1.jpg",
        "1.txt",
        "1.caption",
        "2.jpg",
        "2.text",
        "3.txt",
        "4.mp4",
        "4.json",
        "._1.jpg",
        "5.heic",
        "6.cls",
        "7.mask.png",
        "1.jpg",
    ]
    path = pack(tmp_path / "a.tar", *names)
    assert unused(path) == {
        "replaced-member": ["1.jpg"],
        "second-caption": ["1.caption"],
        "other-spelling": ["2.text"],
        "caption-without-picture": ["3.txt"],
        "video-without-frames": ["4.mp4"],
        "not-data": ["6.cls", "4.json"],
        "hidden": ["._1.jpg"],
        "no-decoder": ["5.heic"],
        "role-without-picture": ["7.mask.png"],
    }
    assert list_path(path).seen.captions_elsewhere == []
    assert list_path(pack(tmp_path / "b.tar", "1.jpg", "1.text")).seen.captions_elsewhere


def test_a_folder_of_tars_accounts_for_the_files_beside_them(tmp_path):
    folder(tmp_path, {"sub/a.png": "", "README.md": "", "b.heic": "", "c.txt": TEXT})
    pack(tmp_path / "x.tar", "1.jpg")
    assert ids_of(tmp_path) == ["1.jpg"]
    assert unused(tmp_path) == {
        "beside-tars": ["sub/a.png"],
        "not-data": ["README.md"],
        "no-decoder": ["b.heic"],
        "caption-without-picture": ["c.txt"],
    }


def ids_of(path):
    return [sample.id for sample in list_path(path).samples()]


def test_several_sources_name_their_files_after_their_labels(tmp_path):
    folder(tmp_path / "one", {"a.png": "", "b.heic": ""})
    folder(tmp_path / "two", {"c.png": "", "d.png": ""})
    manifest(tmp_path / "two/metadata.jsonl", {"file_name": "c.png", "text": "x"})
    listing = list_sources([Source(str(tmp_path / "one")), Source(str(tmp_path / "two"))], {})
    references = [reference for sample in listing.samples() for those in sample.images.values() for reference in those]
    assert listing.unused(references).examples == {"no-decoder": ["one/b.heic"], "picture-without-row": ["two/d.png"]}


# Laws

NAMES = [
    *("a.png", "a.jpg", "A.png", "b.jpg", "a.mask.png", "b.control.1.png", "v.mp4", "v.first_frame.png", "c.heic"),
    *("a.txt", "A.TXT", "a.json", "b.caption", "a.png.txt", "z.txt", "a_caption.txt", "a.text", "v.txt", "captions.csv"),
    *(".hidden", "README.md", "x.npz", "s.tar", "odd", "sub/a.png", "sub/b.txt", "masks/a.png", "masks/b.txt", "sub/.x"),
]
ROLES = [(), (("mask", "masks/"),), (("image", "masks/"),), (("control", "-cond"),)]


@given(st.sets(st.sampled_from(NAMES)), st.booleans(), st.sampled_from(ROLES))
def test_every_file_of_a_folder_is_used_once_or_has_one_reason(tmp_path_factory, names, videos, roles):
    root = tmp_path_factory.mktemp("account")
    folder(root, dict.fromkeys(names, '{"caption": "x"}') | {"k.png": ""})
    how = ListingOptions(videos=videos, locations=roles)
    remarks = Remarks()
    used = [one for sample in list_path(root, how).samples(remarks) for those in sample.images.values() for one in those]
    counts, examples = remarks.unused.counts, remarks.unused.examples
    assert not remarks.refused
    assert len({*used}) + remarks.unused.texts + sum(counts.values()) == len(names) + 1
    assert {name for those in examples.values() for name in those}.isdisjoint(used)


def test_lines_name_each_reason_with_its_files_and_put_what_is_no_data_into_one():
    found = Unused()
    for name in "abcde":
        found.add("no-decoder", f"{name}.heic")
    found.add("hidden", ".x")
    found.add("not-data", "README.md")
    first, last = unused_in_words(found.as_json())
    assert first.startswith("not used, no-decoder: 5 files (a.heic, b.heic, c.heic, d.heic, …): ")
    assert last == "not used, and no data: 1 hidden (.x); 1 not-data (README.md)"
