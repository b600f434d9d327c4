"""Which part of a picture a unit is made of."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.encode.buckets import Size, placement
from cachestore.encode.views import View, bucket_of, view_of
from cachestore.keys import digest_bytes

SIZE, DIGEST = Size(100, 70), digest_bytes(b"a picture")
PLAIN = {"image": "a.png", "role": "image", "resolution": 64, "step": 16}


def drawn(variant=0, seed=0, size=SIZE, digest=DIGEST, **more):
    return view_of({**PLAIN, "crop": "random", "seed": seed, "variant": variant, **more}, size, digest)


def test_a_plain_request_is_the_centre_of_its_bucket_and_nothing_is_said_of_variants_or_sides():
    view = view_of(PLAIN, SIZE, DIGEST)
    assert view == View.centred(SIZE, Size(80, 48))
    assert view.transform() == {"bucket": [80, 48], "crop": "center"}
    assert view.facts() == {"size": [100, 70], "bucket": [80, 48], "resized": [80, 56], "crop": [0, 4, 80, 52]}


def test_a_drawn_crop_depends_on_seed_digest_and_variant_alone():
    places = {drawn(variant, seed, digest=digest).place for variant in range(4) for seed in (0, 1) for digest in (DIGEST, "00" * 32)}
    assert len(places) > 3
    assert drawn(2, 1) == drawn(2, 1)
    assert drawn(variant=3, seed=5).place.crop == (0, 1, 80, 49)


def test_a_drawn_crop_has_the_key_of_its_place_not_of_its_seed():
    by_place = {}
    for variant in range(40):
        view = drawn(variant)
        by_place.setdefault(view.place.crop, set()).add(str(view.transform()))
    assert set(by_place) == {(0, top, 80, top + 48) for top in range(9)}
    assert all(len(transforms) == 1 for transforms in by_place.values())
    assert by_place[0, 4, 80, 52] == {str(view_of(PLAIN, SIZE, DIGEST).transform())}


def test_a_variant_shows_the_same_part_at_every_resolution():
    size = Size(4000, 1000)
    shares = [Fraction(view.place.crop[0], view.place.resized.width) for r in (512, 1024) if (view := drawn(1, size=size, resolution=r))]
    assert abs(shares[0] - shares[1]) < Fraction(1, 100)


def test_what_was_cut_of_a_mirrored_picture_is_told_in_the_mirrored_picture():
    size = Size(120, 60)
    plain, mirrored = drawn(1, size=size), drawn(1, size=size, flip=True)
    (left, top, right, bottom), width = plain.place.crop, plain.place.resized.width
    assert left != width - right
    assert mirrored.place == plain.place
    assert mirrored.facts()["crop"] == [width - right, top, width - left, bottom]
    assert (mirrored.facts()["flip"], mirrored.facts()["variant"]) == ([1], [1])
    assert mirrored.transform() == {**plain.transform(), "flip": True}


@given(width=st.integers(1, 3000), height=st.integers(1, 3000), share=st.fractions(0, Fraction(999, 1000)))
def test_a_crop_lies_inside_the_resized_picture_wherever_it_is_taken(width, height, share):
    size = Size(width, height)
    place = placement(size, bucket_of({**PLAIN, "resolution": 512, "step": 64}, size), share)
    left, top, right, bottom = place.crop
    assert 0 <= left < right <= place.resized.width
    assert 0 <= top < bottom <= place.resized.height


@pytest.mark.parametrize(("size", "bucket"), [((700, 500), (640, 448)), ((2000, 1400), (1216, 832)), ((50, 600), (64, 576))])
def test_without_upscaling_a_small_picture_goes_to_a_bucket_of_its_own_size(size, bucket):
    """A side shorter than a step has no smaller bucket."""
    assert bucket_of({"resolution": 1024, "upscale": False}, Size(*size)) == bucket
