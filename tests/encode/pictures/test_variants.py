"""Which part of a picture a unit is made of."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import digest_bytes
from cachestore.encode.pictures.buckets import Size, crop_box
from cachestore.encode.pictures.variants import Variant, fit_of, variant_of

SIZE, DIGEST = Size(100, 70), digest_bytes(b"a picture")
PLAIN = {"image": "a.png", "role": "image", "resolution": 64, "step": 16}


def drawn(crop_number=0, seed=0, size=SIZE, digest=DIGEST, **more):
    return variant_of({**PLAIN, "crop": "random", "seed": seed, "variant": crop_number, **more}, size, digest)


def test_a_plain_request_is_the_centre_of_its_bucket_and_nothing_is_said_of_crops_or_sides():
    variant = variant_of(PLAIN, SIZE, DIGEST)
    assert variant == Variant.centred(SIZE, Size(80, 48))
    assert variant.transform() == {"bucket": [80, 48], "crop": "center"}
    assert variant.facts() == {"size": [100, 70], "bucket": [80, 48], "resized": [80, 56], "crop": [0, 4, 80, 52]}


def test_a_drawn_crop_depends_on_seed_digest_and_number_alone():
    boxes = {drawn(crop_number, seed, digest=digest).box for crop_number in range(4) for seed in (0, 1) for digest in (DIGEST, "00" * 32)}
    assert len(boxes) > 3
    assert drawn(2, 1) == drawn(2, 1)
    assert drawn(crop_number=3, seed=5).box.crop == (0, 1, 80, 49)


def test_a_drawn_crop_has_the_key_of_its_box_not_of_its_seed():
    by_box = {}
    for crop_number in range(40):
        variant = drawn(crop_number)
        by_box.setdefault(variant.box.crop, set()).add(str(variant.transform()))
    assert set(by_box) == {(0, top, 80, top + 48) for top in range(9)}
    assert all(len(transforms) == 1 for transforms in by_box.values())
    assert by_box[0, 4, 80, 52] == {str(variant_of(PLAIN, SIZE, DIGEST).transform())}


def test_a_drawn_crop_shows_the_same_part_at_every_resolution():
    size = Size(4000, 1000)
    fractions = [
        Fraction(variant.box.crop[0], variant.box.resized.width) for r in (512, 1024) if (variant := drawn(1, size=size, resolution=r))
    ]
    assert abs(fractions[0] - fractions[1]) < Fraction(1, 100)


def test_what_was_cut_of_a_mirrored_picture_is_given_in_the_mirrored_picture():
    size = Size(120, 60)
    plain, mirrored = drawn(1, size=size), drawn(1, size=size, flip=True)
    (left, top, right, bottom), width = plain.box.crop, plain.box.resized.width
    assert left != width - right
    assert mirrored.box == plain.box
    assert mirrored.facts()["crop"] == [width - right, top, width - left, bottom]
    assert (mirrored.facts()["flip"], mirrored.facts()["variant"]) == ([1], [1])
    assert mirrored.transform() == {**plain.transform(), "flip": True}


@given(width=st.integers(1, 3000), height=st.integers(1, 3000), fraction=st.fractions(0, Fraction(999, 1000)))
def test_a_crop_lies_inside_the_resized_picture_wherever_it_is_taken(width, height, fraction):
    size = Size(width, height)
    box = crop_box(size, fit_of({**PLAIN, "resolution": 512, "step": 64}, size).bucket, fraction)
    left, top, right, bottom = box.crop
    assert 0 <= left < right <= box.resized.width
    assert 0 <= top < bottom <= box.resized.height


@pytest.mark.parametrize(("size", "bucket"), [((700, 500), (640, 448)), ((2000, 1400), (1216, 832)), ((50, 600), (64, 576))])
def test_without_upscaling_a_small_picture_goes_to_a_bucket_of_its_own_size(size, bucket):
    """A side shorter than a step has no smaller bucket."""
    assert fit_of({"resolution": 1024, "upscale": False}, Size(*size)).bucket == bucket


def framed(within, size=SIZE, **more):
    return variant_of({**PLAIN, "within": list(within), **more}, size, DIGEST)


def test_a_part_of_a_picture_has_the_bucket_and_the_crop_of_a_picture_of_its_size():
    variant = framed((30, 10, 80, 60))
    assert (variant.bucket, variant.box) == (Size(64, 64), crop_box(Size(50, 50), Size(64, 64)))
    assert variant.transform() == {"bucket": [64, 64], "crop": "center", "within": [30, 10, 80, 60]}
    assert fit_of({**PLAIN, "within": [30, 10, 80, 60]}, SIZE).bucket == variant.bucket


def test_sizes_and_crop_of_a_part_are_given_in_the_whole_picture():
    """50 pixels became 64, so the whole of 100 x 70 would be 128 x 90, and the part begins at (38, 13) of it."""
    assert framed((30, 10, 80, 60)).facts() == {"size": [100, 70], "bucket": [64, 64], "resized": [128, 90], "crop": [38, 13, 102, 77]}
    assert framed((30, 10, 80, 60), flip=True).facts()["crop"] == [128 - 102, 13, 128 - 38, 77]


def test_a_part_that_is_all_of_the_picture_is_the_picture():
    assert framed((0, 0, 100, 70)) == variant_of(PLAIN, SIZE, DIGEST)


@pytest.mark.parametrize("within", [(0, 0, 101, 70), (0, 0, 100, 71), (-1, 0, 5, 5), (5, 5, 5, 9)])
def test_a_part_that_is_not_within_the_picture_is_refused(within):
    with pytest.raises(EncodeFailed):
        framed(within)


def test_a_stated_size_is_held_against_the_files_own():
    assert variant_of({**PLAIN, "stated": [100, 70]}, SIZE, DIGEST) == variant_of(PLAIN, SIZE, DIGEST)
    with pytest.raises(EncodeFailed):
        variant_of({**PLAIN, "stated": [70, 100]}, SIZE, DIGEST)


@given(
    size=st.tuples(st.integers(1, 2000), st.integers(1, 2000)),
    fractions=st.tuples(*[st.fractions(0, 1)] * 4),
    drawn=st.integers(0, 5),
    is_flipped=st.booleans(),
)
def test_the_crop_of_a_part_lies_inside_the_whole_picture(size, fractions, drawn, is_flipped):
    left, right = sorted(int(fraction * (size[0] - 1)) for fraction in fractions[:2])
    top, bottom = sorted(int(fraction * (size[1] - 1)) for fraction in fractions[2:])
    more = {"crop": "random", "seed": 0, "variant": drawn, "flip": is_flipped}
    facts = framed((left, top, right + 1, bottom + 1), Size(*size), **more).facts()
    (width, height), (one, two, three, four) = facts["resized"], facts["crop"]
    assert 0 <= one < three <= width
    assert 0 <= two < four <= height
    assert [three - one, four - two] == facts["bucket"]
