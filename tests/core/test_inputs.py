"""What a unit is made from: requests, the files they name, and one digest and one time for several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.inputs import (
    IMAGES,
    NO_STAT,
    cells_each,
    combined_digest,
    combined_stat,
    companions,
    digests_of,
    is_of_files,
    references_of,
    request_for,
)
from cachestore.core.keys import digest_bytes, digest_text

EDIT = {"caption": "redder", "images": {"control": ["a.png", "b.png"]}}
A, B, C, M = (digest_bytes(one) for one in (b"a", b"b", b"B", b"m"))
stats = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 62)), max_size=4)


def test_nothing_has_no_digest_and_no_time():
    assert combined_digest({}) == ""
    assert combined_stat([]) == NO_STAT


def test_a_caption_alone_is_made_from_no_file():
    request = request_for("caption", {}, "a cat", {"control": ["a.png"]})
    assert request == {"caption": "a cat"}
    assert references_of(request) == []
    assert digests_of(request, []) == {"caption": digest_text("a cat")}
    assert not is_of_files("caption", {})


def test_an_image_is_made_from_its_file_in_its_role():
    request = request_for("control", {"resolution": 64}, "a.png", {})
    assert request == {"image": "a.png", "role": "control", "resolution": 64}
    assert references_of(request) == ["a.png"]
    assert digests_of(request, [A]) == {"control": digest_bytes(b"a")}
    assert is_of_files("control", {})


def test_a_caption_comes_with_the_images_that_are_shown_beside_it_in_order():
    request = request_for("caption", {IMAGES: "control"}, "redder", {"control": ["a.png", "b.png"], "image": ["c.png"]})
    assert request == EDIT
    assert references_of(request) == ["a.png", "b.png"]
    digests = digests_of(request, [A, B])
    assert list(digests.items()) == [("caption", digest_text("redder")), ("control", digest_bytes(b"a")), ("control.2", digest_bytes(b"b"))]
    assert is_of_files("caption", {IMAGES: "control"})


VARIANTS = {"resolution": 64, "crop": "random", "seed": 7, "variants": 2, "flip": True}


def test_an_input_has_a_cell_for_each_crop_each_followed_by_its_mirrored_one():
    assert [cells_each(options) for options in ({}, {"flip": True}, {"variants": 3}, VARIANTS)] == [1, 2, 3, 4]
    plain = {"image": "a.png", "role": "image", "resolution": 64, "crop": "random", "seed": 7}
    assert [request_for("image", VARIANTS, "a.png", {"image": ["a.png"]}, number) for number in range(4)] == [
        {**plain, "variant": 0},
        {**plain, "variant": 0, "flip": True},
        {**plain, "variant": 1},
        {**plain, "variant": 1, "flip": True},
    ]


def test_a_mask_and_a_control_image_whose_crop_is_drawn_come_with_their_picture():
    images = {"image": ["a.png"], "control": ["c.png"]}
    mask = request_for("mask", {"resolution": 64}, "m.png", images)
    assert mask == {"image": "m.png", "role": "mask", "resolution": 64, "like": "a.png"}
    assert references_of(mask) == ["m.png", "a.png"]
    assert digests_of(mask, [M, A]) == {"mask": digest_bytes(b"m"), "image": digest_bytes(b"a")}
    assert request_for("control", VARIANTS, "c.png", images)["like"] == "a.png"
    assert "like" not in request_for("control", {"resolution": 64}, "c.png", images)
    assert "like" not in request_for("control", VARIANTS, "c.png", {})
    assert [companions(role, VARIANTS) for role in ("image", "control", "mask", "caption")] == [(), ("image",), ("image",), ()]


def test_a_sample_without_such_images_asks_for_none():
    assert request_for("caption", {IMAGES: "control"}, "redder", {}) == {"caption": "redder", "images": {"control": []}}


def test_one_input_is_told_by_its_own_digest_and_several_by_another():
    assert combined_digest({"image": "ab" * 32}) == "ab" * 32
    several = combined_digest(digests_of(EDIT, [A, B]))
    assert len(bytes.fromhex(several)) == 32
    assert several not in digests_of(EDIT, [A, B]).values()


@pytest.mark.parametrize("digests", [[B, A], [A, A], [A, C]])
def test_other_bytes_or_another_order_of_files_have_another_digest(digests):
    assert combined_digest(digests_of(EDIT, digests)) != combined_digest(digests_of(EDIT, [A, B]))


@given(one=stats, other=stats)
def test_files_of_other_sizes_or_times_have_another_combined_one(one, other):
    assert (combined_stat(one) == combined_stat(other)) == (one == other)
    assert all(0 <= number < 1 << 63 for number in combined_stat(one)) or not one


def test_a_time_that_proves_nothing_spoils_all():
    assert combined_stat([(3, 4), NO_STAT]) == NO_STAT
