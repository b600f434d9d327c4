"""SimpleTuner's text of models that edit pictures: a file is named by the data set's id, the picture's path and the caption."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import EncodeFailed
from cachestore.core.raw_tensors import Contents, from_array
from cachestore.core.samples import Sample
from cachestore.trainers.exported import Named
from cachestore.trainers.families import family_named
from cachestore.trainers.matching import CacheListing, FileLocation, Matches
from cachestore.trainers.simpletuner import format as simpletuner
from tests.fakes import examples

QWEN = family_named("qwen-image")
IDS = ("train", "old")


def name_of(data_set, reference, caption, *, is_older=False):
    text = f"{data_set}:{reference}" + ("" if is_older or not caption else f"\0prompt\0{caption}")
    return f"text/{hashlib.md5(text.encode()).hexdigest()}-qwen_image.pt"


rows = st.lists(
    st.tuples(st.sampled_from(["1.png", "a/1.png", "2.png", "b.c.png"]), st.sampled_from(["one", "other", ""]), st.sampled_from(IDS)),
    max_size=4,
    unique_by=lambda row: row[0],
)


@examples(60)
@given(rows, st.booleans(), st.sets(st.sampled_from(IDS)))
def test_a_text_is_of_its_own_caption_and_of_one_picture_alone(rows, is_older, ids):
    written = {name_of(data_set, reference, caption, is_older=is_older): row for row in rows for reference, caption, data_set in [row]}
    samples = [Sample(reference, {"image": (reference,)}, (caption,)) for reference, caption, _data_set in rows]
    matches = Matches(None, ids=sorted(ids))
    simpletuner.match(CacheListing(sorted(written)), samples, matches)
    known = {path: row for path, row in written.items() if row[2] in ids}
    for caption in {row[1] for row in rows}:
        pictures = {path: row[0] for path, row in known.items() if row[1] == caption}
        found = {location.path: location.visual for location in matches.text.get(caption, ())}
        assert found == (pictures if len(pictures) == 1 else {})
        assert (caption in matches.doubtful) == (len(pictures) > 1)
    assert matches.families.keys() == ({"qwen-image"} if known else set())


def test_the_text_to_which_captions_are_dropped_is_that_of_the_empty_caption():
    path = f"{hashlib.md5(b'__caption_dropout__').hexdigest()}-qwen_image.pt"
    matches = Matches(None, ids=["train"])
    simpletuner.match(CacheListing([path]), [Sample("1", {"image": ("1.png",)}, ("one",))], matches)
    assert matches.text == {"": [FileLocation(path)]}


def text(mask, rows):
    return Contents({"prompt_embeds": from_array(np.asarray(rows, np.float32)[None]), "attention_masks": from_array(np.asarray([mask]))})


def test_rows_of_padding_are_no_text_and_come_back_in_an_export():
    contents = text([1, 1, 0], [[1, 2], [3, 4], [0, 0]])
    read = simpletuner.read_text(contents, QWEN, FileLocation("x.pt"))
    assert read.tensors["prompt_embeds"] == from_array(np.asarray([[1, 2], [3, 4]], np.float32))
    written = simpletuner.text_file(QWEN, Named("1.png"), type(read)(read.tensors, {f"simpletuner.{k}": v for k, v in read.others.items()}))
    assert written.tensors == contents.tensors


@pytest.mark.parametrize(
    ("mask", "rows"),
    [([1, 0, 1], [[1], [0], [1]]), ([0, 1, 1], [[0], [1], [1]]), ([1, 1, 0], [[1], [1], [1]]), ([1, 1], [[1], [1], [0]])],
    ids=["a hole", "padded before", "no zeros as padding", "another length"],
)
def test_another_mask_is_refused(mask, rows):
    with pytest.raises(EncodeFailed):
        simpletuner.read_text(text(mask, rows), QWEN, FileLocation("x.pt"))
