"""Aspect buckets: properties first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.encode.pictures.buckets import Size, aspect_error, bucket_list, choose, crop_box

sides = st.integers(1, 20_000)
sizes = st.builds(Size, sides, sides)
steps = st.sampled_from([1, 2, 8, 16, 32, 64, 128])


@st.composite
def resolutions_and_steps(draw):
    step = draw(steps)
    # A step of 1 at a high resolution has tens of thousands of buckets, which says nothing new.
    return draw(st.integers(step, min(2_048, 40 * step))), step


@pytest.mark.parametrize(("resolution", "step"), [(0, 64), (63, 64), (512, 0), (-1, 1), (512, -64)])
def test_a_resolution_below_the_step_has_no_buckets(resolution, step):
    with pytest.raises(BadInput):
        bucket_list(resolution, step)


@given(resolutions_and_steps())
def test_every_bucket_is_a_multiple_of_the_step_and_no_larger_than_the_resolution_squared(given_pair):
    resolution, step = given_pair
    buckets = bucket_list(resolution, step)
    assert buckets
    for width, height in buckets:
        assert width % step == height % step == 0
        assert step <= width <= 2 * resolution
        assert step <= height <= 2 * resolution
        assert width * height <= resolution * resolution


@given(resolutions_and_steps())
def test_the_buckets_are_sorted_distinct_symmetric_and_hold_the_square(given_pair):
    resolution, step = given_pair
    buckets = bucket_list(resolution, step)
    assert list(buckets) == sorted(set(buckets))
    assert {(height, width) for width, height in buckets} == set(buckets)
    assert Size(resolution // step * step, resolution // step * step) in buckets


@given(sizes, resolutions_and_steps())
def test_no_bucket_is_nearer_in_aspect_than_the_chosen_one(size, given_pair):
    chosen = choose(size, *given_pair)
    assert chosen in bucket_list(*given_pair)
    assert aspect_error(size, chosen) == min(aspect_error(size, bucket) for bucket in bucket_list(*given_pair))


@given(sizes, resolutions_and_steps())
def test_the_resized_picture_covers_the_bucket_and_touches_it_on_one_side(size, given_pair):
    bucket = choose(size, *given_pair)
    box = crop_box(size, bucket)
    assert box.resized.width >= bucket.width
    assert box.resized.height >= bucket.height
    assert box.resized.width == bucket.width or box.resized.height == bucket.height


@given(sizes, resolutions_and_steps())
def test_the_crop_is_as_large_as_the_bucket_inside_the_resized_picture_and_centred(size, given_pair):
    bucket = choose(size, *given_pair)
    box = crop_box(size, bucket)
    left, top, right, bottom = box.crop
    assert (right - left, bottom - top) == bucket
    assert left >= 0
    assert top >= 0
    assert 0 <= box.resized.width - right - left <= 1
    assert 0 <= box.resized.height - bottom - top <= 1


@given(sizes, resolutions_and_steps())
def test_resizing_keeps_the_aspect_to_half_a_pixel(size, given_pair):
    box = crop_box(size, choose(size, *given_pair))
    wide, high = size.width * box.resized.height, size.height * box.resized.width
    assert abs(wide - high) * 2 <= max(size.width, size.height)


def kohya_buckets(resolution, shortest, longest, step):
    """`make_bucket_resolutions` of sd-scripts, as published."""
    area, found = resolution * resolution, {(resolution // step * step,) * 2}
    for width in range(shortest, longest + 1, step):
        height = min(longest, (area // width) // step * step)
        if height >= shortest:
            found |= {(width, height), (height, width)}
    return sorted(found)


@pytest.mark.parametrize(("resolution", "longest"), [(512, 1024), (1024, 2048)])
def test_the_usual_resolutions_have_kohyas_buckets(resolution, longest):
    assert list(bucket_list(resolution, 64)) == kohya_buckets(resolution, 256, longest, 64)


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((1024, 1024), (1024, 1024)),
        ((3000, 2000), (1216, 832)),
        ((2000, 3000), (832, 1216)),
        ((4000, 1), (2048, 256)),
        ((1, 4000), (256, 2048)),
        ((64, 64), (1024, 1024)),
    ],
)
def test_pictures_go_to_the_buckets_kohya_gives_them_at_1024(size, bucket):
    assert choose(Size(*size), 1024, 64) == bucket


def test_a_picture_of_exactly_a_buckets_size_is_neither_scaled_nor_cropped():
    for bucket in bucket_list(512, 64):
        assert choose(bucket, 512, 64) == bucket
        assert crop_box(bucket, bucket).resized == bucket
        assert crop_box(bucket, bucket).crop == (0, 0, *bucket)


@pytest.mark.parametrize(("size", "larger", "smaller"), [((7, 24), (64, 256), (64, 192)), ((2, 1), (128, 128), (192, 64))])
def test_of_two_equally_near_buckets_the_larger_wins(size, larger, smaller):
    assert aspect_error(Size(*size), Size(*larger)) == aspect_error(Size(*size), Size(*smaller))
    assert choose(Size(*size), 128, 64) == larger


@pytest.mark.parametrize("resolution", [64, 96, 100, 128, 192, 256])
def test_small_resolutions_have_buckets(resolution):
    assert choose(Size(640, 480), resolution, 64) in bucket_list(resolution, 64)
