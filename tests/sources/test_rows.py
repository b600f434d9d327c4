"""Rows of manifests and of metadata files."""

import json

import pytest

from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_text
from tests.fakes import tells_of
from tests.sources.sources import captions, folder, ids, listed, manifest


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
    with pytest.raises(BadInput):
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
    folder(tmp_path, {"metadata.csv": content + "z.png,last\n" * ("file_name" in content)})
    try:
        [refused] = ((f"{place}: {reason}") for place, reason in listed(tmp_path).refused.items())
    except BadInput as error:
        refused = str(error)
        assert "file_name" not in content
    assert "metadata.csv, " + says in refused


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
    assert listed(manifest(tmp_path / "data/list.jsonl", {"image": "pictures/a.png"})).read("pictures/a.png")[0] == b"bytes"


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
        ({"image": "a.png", "caption": "x", "text": "y"}, "caption and text mean the same but differ ('x' and 'y')"),
        ({"image": "a.png", "caption": "", "text": "y"}, "caption and text mean the same but differ ('' and 'y')"),
        ({"image": "a.png", "path": "b.png"}, "image and path mean the same but differ ('a.png' and 'b.png')"),
        ({"video": "a.mp4", "path": "b.mp4"}, "video and path mean the same but differ"),
        ({"file_name": "a.png", "path": "a.mp4"}, "file_name and path mean the same but differ"),
        (
            {"imgae": "a.png", "captoin": "x"},
            "its columns are imgae, captoin; the known ones are caption, text, image, control, mask, video, reference, first_frame, ",
        ),
        ({"id": 7, "image": None, "caption": []}, "neither a picture, a video nor a caption: its columns are id, image, caption"),
        ({"path": {"bytes": "x"}}, "path must be a text or a list of texts"),
    ],
)
def test_a_row_that_says_two_things_or_nothing_is_refused(tmp_path, row, says):
    with pytest.raises(BadInput) as refused:
        listed(manifest(tmp_path / "m.jsonl", row))
    assert "m.jsonl, line 1: " in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("not json", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"id": [1], "caption": "a"}', "an id must be a text or a whole number"),
        ('{"id": true, "caption": "a"}', "an id must be a text or a whole number"),
        ('{"id": 1.5, "caption": "a"}', "an id must be a text or a whole number"),
        ('{"id": "", "caption": "a"}', "an id"),
        ('{"id": "x", "caption": 7}', "caption must be a text or a list of texts"),
        ('{"id": "x", "caption": ["a", 7]}', "caption must be a text or a list of texts"),
        ('{"id": "x", "image": {"path": "a.png"}}', "image must be a text or a list of texts"),
        ('{"id": "x", "image": ""}', "image"),
        ('{"id": "x", "video": 7}', "video must be a text or a list"),
        ('{"id": "x", "caption": "a", "prompt_embeds": 1}', "'prompt_embeds'"),
        ('{"id": "x", "score": NaN}', "not JSON"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, row, says):
    folder(tmp_path, {"data.jsonl": '{"image": "fine"}\n\n' + row + '\n{"image": "fine too"}\n'})
    listing = listed(tmp_path / "data.jsonl")
    [(place, reason)] = listing.refused.items()
    assert [sample.id for sample in listing.samples] == ["fine", "fine too"]
    assert "data.jsonl, line 3" in f"{place}: {reason}"
    assert says in reason


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
        ({"size": "large"}, r"size must be \[width, height\] of the picture in whole pixels, not 'large'"),
        ({"size": [100]}, "size must be"),
        ({"size": [100, 0]}, "size must be"),
        ({"size": [100.0, 70]}, "size must be"),
        ({"crop": [1, 2, 3]}, r"crop must be \[left, top, right, bottom\]"),
        ({"crop": [5, 0, 5, 9]}, "crop must be"),
        ({"crop": [-1, 0, 5, 9]}, "crop must be"),
        ({"crop": [0, 0, True, 9]}, "crop must be"),
        ({"crop": [0, 0, 101, 9], "size": [100, 70]}, "reaches beyond the size"),
        ({"crop": [0, 0, 9, 9], "image": None}, "this row has no image"),
    ],
)
def test_a_size_or_crop_that_cannot_be_is_named_by_file_and_line(tmp_path, columns, says):
    with pytest.raises(BadInput, match=r"m\.jsonl, line 1: .*" + says):
        listed(manifest(tmp_path / "m.jsonl", {"image": "a.png", "caption": "a", **columns}))


def test_a_manifest_that_is_not_utf_8_is_refused(tmp_path):
    folder(tmp_path, {"data.jsonl": b'{"id": "caf\xe9"}'})
    with pytest.raises(BadInput):
        listed(tmp_path / "data.jsonl")


def test_a_row_may_hold_unicode_separators(tmp_path):
    """JSON allows U+2028 and U+0085 unescaped inside a text; they end no line."""
    text = json.dumps({"id": "a", "caption": "one\u2028two\x85three"}, ensure_ascii=False)
    folder(tmp_path, {"data.jsonl": text + "\n"})
    assert captions(listed(tmp_path / "data.jsonl")) == {"a": ("one\u2028two\x85three",)}


@pytest.mark.parametrize("name", ["latents", "control_latents", "prompt_embeds", "sample_id", "target_size"])
def test_a_column_named_as_what_a_batch_holds_is_refused(tmp_path, name):
    with pytest.raises(BadInput, check=tells_of("m.jsonl, line 1", f"'{name}'")):
        list(listed(manifest(tmp_path / "m.jsonl", {"id": "x", "caption": "c", name: 1})).samples)
