"""Samples in memory: sequences, pictures of every kind, and what only looks like a data set of Hugging Face."""

import io
import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cachestore.core.errors import BadInput
from cachestore.core.samples import Sample as RealSample
from cachestore.encode.pictures import images
from cachestore.files.stat_record import stat_of
from cachestore.sources.memory import as_bytes, list_objects, list_rows, write_rows
from cachestore.sources.pipe import PipeFiles
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from cachestore.store.write.commit import create_store
from tests.fakes import asks_for, tells_of

Sample: Any = RealSample  # what a caller may leave out, such as the tuple around one caption, its types do not say


def samples(**pictures):
    return [Sample(name, {"image": (picture,)}, (f"caption of {name}",)) for name, picture in pictures.items()]


def bits(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


class Lazy:
    """A sized sequence that makes its samples when it is asked."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Sample(f"{index}.png", {"image": (b"picture %d" % index,)})


def decoded(data: Any) -> Any:
    return np.asarray(images.decode(data))


def read_all(listing):
    return {sample.id: [listing.read(ref)[0] for refs in sample.images.values() for ref in refs] for sample in listing.samples()}


# Nothing


@pytest.mark.parametrize("nothing", [[], (), Lazy(0)])
def test_nothing_lists_nothing(nothing):
    assert list(list_objects(nothing).samples()) == []


@pytest.mark.parametrize(("data", "what"), [(7, "int"), ({"a": 1}, "mapping"), (iter([]), "list_iterator")])
def test_what_is_no_sequence_of_samples_is_refused(data, what):
    with pytest.raises(BadInput, check=asks_for("data", what)):
        list_objects(data)


def test_what_is_no_sample_is_named_by_its_row():
    with pytest.raises(BadInput, check=tells_of("sample 0")):
        list_objects([1])


# Sequences


def test_a_sequence_is_asked_for_what_is_read_and_holds_nothing_else():
    assert read_all(list_objects(Lazy(3))) == {f"{n}.png": [b"picture %d" % n] for n in range(3)}


def test_bytes_paths_and_images_stand_alone_or_several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.png").write_bytes(b"from a file")
    [sample] = gathered = list(
        list_objects([Sample("a", {"image": b"x", "control": [bytearray(b"y"), "c.png", tmp_path / "c.png"]})]).samples()
    )
    listing = list_objects([Sample("a", {"image": b"x", "control": [bytearray(b"y"), "c.png", tmp_path / "c.png"]})])
    assert [len(refs) for refs in sample.images.values()] == [1, 3]
    assert read_all(listing) == {"a": [b"x", b"y", b"from a file", b"from a file"]}
    assert len(gathered) == 1


def test_columns_sizes_and_captions_are_those_of_a_manifest():
    [sample] = list_objects([Sample("e\u0301", {}, "one caption", size=(4, 5), extras={"artist": "x"})]).samples()
    assert (sample.id, sample.captions, dict(sample.extras)) == ("é", ("one caption",), {"artist": "x", "size": [4, 5]})


@pytest.mark.parametrize(("lines", "expected"), [("whole", ("a\nb",)), ("each", ("a", "b")), ("first", ("a",))])
def test_captions_of_several_lines_are_read_as_asked(lines, expected):
    remarks = Remarks()
    [sample] = list_objects([Sample("x", {}, ("a\nb",))], ListingOptions(caption_lines=lines)).samples(remarks)
    assert sample.captions == expected
    assert remarks.multi_line == (["x"] if lines == "whole" else [])


def test_a_sample_without_captions_has_the_empty_one_or_a_given_one():
    remarks = Remarks()
    assert [sample.captions for sample in list_objects([Sample("x", {}, ())]).samples(remarks)] == [("",)]
    assert remarks.missing == ["x"]
    assert [sample.captions for sample in list_objects([Sample("x", {}, ())], ListingOptions(caption="given")).samples()] == [("given",)]


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (Sample("a", {"image": (7,)}), "image is int"),
        (Sample("a", {"video": (7,)}), "video is int"),
        (Sample("a", {"depth": (b"",)}), "role 'depth'"),
        (Sample("a", extras={"when": object()}), "column 'when'"),
        (Sample("a", extras={"latents": 1}), "'latents'"),
        (Sample(""), "an id"),
    ],
)
def test_a_malformed_sample_is_named(sample, says):
    seen = Remarks()
    assert [one.id for one in list_objects([Sample("fine"), sample, Sample("too")]).samples(seen)] == ["fine", "too"]
    [refused] = seen.refused
    assert says in refused.reason
    assert refused.sample == (sample.id or "sample 1")
    assert "sample 1" in refused.reason


def test_of_two_samples_of_one_id_the_later_one_fails_and_the_first_keeps_its_picture():
    seen = Remarks()
    samples = [Sample("a", {"image": b"broken"}, ("nul \0",)), Sample("a", {"image": b"first"}), Sample("a", {"image": b"later"})]
    listing = list_objects(samples)
    [sample] = listing.samples(seen)
    assert listing.read(sample.images["image"][0])[0] == b"first"
    assert [one.sample for one in seen.refused] == ["a", "sample 2"]
    assert "sample 1" in seen.refused.named[1].reason
    assert "sample 2" in seen.refused.named[1].reason


@pytest.mark.parametrize("changed", ["cba", "cab", "-bc"])
def test_a_sequence_that_gives_another_sample_later_gives_nobodys_picture(changed):
    """A list that is shuffled meanwhile, or one that makes its samples anew: no sample gets the picture of another."""
    pictures = {"a": b"one", "b": b"two", "c": b"three"}
    rows = samples(**pictures)
    listing = list_objects(rows)
    references = {sample.id: sample.images["image"][0] for sample in listing.samples()}
    rows[:] = [Sample("a") if name == "-" else samples(**pictures)["abc".index(name)] for name in changed]
    with pytest.raises(OSError):
        listing.read(references["a"])
    for name, reference in references.items():
        with suppress(OSError):
            assert listing.read(reference)[0] == pictures[name]


# What stands for the time of what has none


def test_equal_bytes_are_known_to_be_unchanged_and_others_to_be_changed():
    before, same, other = (list_objects(samples(a=content)) for content in (b"one", b"one", b"two"))
    reference = next(iter(before.samples())).images["image"][0]
    assert before.stat(reference) == same.stat(reference) == before.read(reference)[1]
    assert other.stat(reference) != before.stat(reference)
    assert other.stat("memory:image.0:gone") is None


# PIL images


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_an_image_is_what_its_file_would_be_decoded_to(mode):
    picture = Image.fromarray(np.arange(7 * 5 * 3, dtype=np.uint8).reshape(5, 7, 3)).convert(mode if mode != "I;16" else "L")
    if mode == "I;16":
        picture = Image.fromarray((np.arange(35, dtype=np.uint16) * 1800).reshape(5, 7))
    expected = decoded(bits(picture, "TIFF" if mode == "CMYK" else "PNG"))
    assert np.array_equal(decoded(as_bytes(picture, "it")), expected)


def test_an_image_of_a_mode_that_no_file_has_is_an_error_of_its_sample():
    listing = list_objects([Sample("a", {"image": Image.new("HSV", (4, 4))})])
    with pytest.raises(OSError):
        listing.read("memory:image.0:a")


def test_an_image_that_lies_on_its_side_is_turned_as_its_file_is():
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = bits(Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)), "PNG", exif=exif)
    assert np.array_equal(decoded(as_bytes(Image.open(io.BytesIO(raw)), "it")), decoded(raw))


def test_a_transparent_palette_is_on_white_as_its_file_is():
    raw = bits(Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6)).convert("P"), "PNG", transparency=3)
    assert np.array_equal(decoded(as_bytes(Image.open(io.BytesIO(raw)), "it")), decoded(raw))


def test_equal_images_are_equal_bytes():
    picture = Image.new("RGB", (5, 4), "red")
    assert as_bytes(picture, "it") == as_bytes(picture.copy(), "it")


def test_what_is_no_picture_is_an_error_that_names_it():
    with pytest.raises(OSError):
        as_bytes(7, "the mask of a")
    with pytest.raises(OSError):
        as_bytes({"bytes": None, "path": None}, "it")


# For workers


def test_a_worker_lists_what_its_caller_holds(tmp_path):
    layout = create_store(tmp_path / "store")
    held = list_objects([*samples(a=b"1", b=b"2"), Sample("c", {}, ()), Sample("d", {}, "two\nlines")])
    theirs, before, after = list_rows(write_rows(layout, held, "0"), None), Remarks(), Remarks()
    assert theirs.content == held.content
    assert list(theirs.samples(after)) == list(held.samples(before))
    assert after == before
    with pytest.raises(OSError):
        theirs.read(next(iter(held.samples())).images["image"][0])


def test_a_worker_reads_files_itself(tmp_path):
    (tmp_path / "a.png").write_bytes(b"bytes")
    os.utime(tmp_path / "a.png", (1, 1))
    layout = create_store(tmp_path / "store")
    theirs = list_rows(write_rows(layout, list_objects(samples(a=str(tmp_path / "a.png"))), "0"), None)
    assert theirs.read(str(tmp_path / "a.png")) == (b"bytes", stat_of((tmp_path / "a.png").stat()))


def test_a_file_of_other_rows_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"{}\n")
    with pytest.raises(BadInput):
        list_rows(tmp_path / "x", PipeFiles(*os.pipe()))


# Columns


def hugging_face(**columns):
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


@pytest.mark.processes
def test_a_data_set_without_a_caption_is_reported_with_its_columns_also_in_a_worker(tmp_path):
    held = list_objects(hugging_face(control=["a.png", "b.png"], prompt=["a cat", "a dog"]))
    before, after = Remarks(), Remarks()
    list(held.samples(before))
    [words] = before.uncaptioned
    assert words.startswith(
        "no row of the data set given has a caption: its columns are control, prompt; a caption's column is called caption or text"
    )
    list(list_rows(write_rows(create_store(tmp_path / "store"), held, "0"), None).samples(after))
    assert after.uncaptioned == before.uncaptioned


@pytest.mark.torch
def test_a_row_of_a_data_set_says_one_caption_and_something_to_encode():
    assert [sample.captions for sample in list_objects(hugging_face(caption=["a"], text=["a"])).samples()] == [("a",)]
    with pytest.raises(BadInput):
        list_objects(hugging_face(caption=["a"], text=["b"]))
    seen = Remarks()
    assert len(list(list_objects(hugging_face(text=["a", None], label=[1, 2])).samples(seen))) == 1
    [refused] = seen.refused
    assert "row 1 of the data set: the row has neither a picture, a video nor a caption: its columns are text, label" in refused.reason


def test_malformed_samples_are_named_all_at_once():
    with pytest.raises(BadInput):
        list_objects([Sample("a", {"image": (7,)}), Sample("b", captions=("\0",)), Sample("c", {"depth": (b"",)})])
