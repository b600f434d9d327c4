"""Which frames a clip has: pure rules, held against brute force and against FFmpeg's own filter."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.encode.pictures.clips import Timeline, as_rate, check_frames, clip_of
from tests.fakes import asks_for

MS = Fraction(1, 1000)


def even(count, rate=10):
    times = np.array([round(1000 * number / rate) for number in range(count)])
    return Timeline(times, round(1000 * count / rate), MS)


@pytest.mark.parametrize(
    ("frames", "factor", "near"),
    [((80,), 4, "77 and 81"), ((17, 50), 4, "49 and 53"), ((81, 26), 8, "25 and 33"), ((2,), 8, "1 and 9"), ((0,), 4, "1 and 5")],
)
def test_a_count_that_the_vae_cannot_take_is_refused_with_the_nearest_ones(frames, factor, near):
    with pytest.raises(BadInput, check=asks_for("frames", near)):
        check_frames(frames, factor)


@pytest.mark.parametrize(("frames", "factor"), [((), 4), ((1,), 8), ((17, 49, 81), 4), ((9, 81, 121), 8), ((3, 50), 1)])
def test_counts_of_one_more_than_a_multiple_are_fine(frames, factor):
    check_frames(frames, factor)


@pytest.mark.parametrize(("there", "wanted"), [(17, 17), (48, 17), (49, 49), (80, 49), (81, 81), (5000, 81)])
def test_a_video_gets_the_largest_count_that_it_can_fill(there, wanted):
    assert clip_of({"frames": [81, 17, 49]}, even(there)) == (wanted, 0, None)


def test_a_video_that_fills_none_is_refused_with_what_it_has_and_what_it_needs():
    with pytest.raises(EncodeFailed):
        clip_of({"frames": [17, 49]}, even(16))
    with pytest.raises(EncodeFailed):
        clip_of({"frames": [17, 49], "fps": 8}, even(16))
    assert clip_of({"frames": [1, 17]}, even(16)) == (1, 0, None)


def test_clips_lie_evenly_between_beginning_and_end():
    assert [clip_of({"frames": [17], "clip": number, "clips": 4}, even(80))[1] for number in range(4)] == [0, 21, 42, 63]
    assert [clip_of({"frames": [17], "clip": number, "clips": 3}, even(17))[1] for number in range(3)] == [0, 0, 0]
    assert clip_of({"frames": [17], "clip": 0, "clips": 1}, even(80))[1] == 0


def test_at_a_lower_rate_a_longer_part_of_the_video_is_shown():
    frames, _start, rate = clip_of({"frames": [17, 49], "fps": 5}, even(100, rate=10))
    times = even(100, rate=10).take(rate, 0, frames)
    assert (frames, len(times), times[-1]) == (49, 49, 9600)


def test_stamps_that_are_rounded_to_milliseconds_take_every_frame_once():
    for rate in (Fraction(24_000, 1001), Fraction(30_000, 1001), Fraction(25), Fraction(60)):
        line = Timeline(np.array([round(1000 * number / rate) for number in range(200)]), round(200_000 / rate), MS)
        assert line.take(rate, 0, 200) == line.times.tolist()
        assert line.count(rate) == 200


@given(
    gaps=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    rate=st.sampled_from([Fraction(8), Fraction(16), Fraction(24_000, 1001), Fraction(60)]),
    start=st.integers(0, 20),
)
def test_each_frame_of_a_clip_is_the_last_one_due_before_half_its_length_has_passed(gaps, rate, start):
    times = np.cumsum([5, *gaps])
    for number, time in enumerate(Timeline(times, int(times[-1]) + 40, MS).take(rate, start, 12), start=start):
        assert time == [one for one in times.tolist() if (one - 5) * MS < (number + Fraction(1, 2)) / rate][-1]


@given(gaps=st.lists(st.integers(1, 300), max_size=40), rate=st.sampled_from([Fraction(8), Fraction(24), Fraction(60)]))
def test_a_video_has_as_many_frames_at_a_rate_as_its_length_holds(gaps, rate):
    times = np.cumsum([0, *gaps])
    line = Timeline(times, int(times[-1]) + 40, MS)
    assert line.count(rate) == max(1, int(line.seconds * rate + Fraction(1, 2)))
    assert line.count(None) == len(times)
    assert len(line.take(rate, 0, line.count(rate))) == line.count(rate)


def test_a_rate_is_taken_as_the_fraction_that_it_stands_for():
    assert as_rate(16) == 16
    assert as_rate(24_000 / 1001) == Fraction(24_000, 1001)
    assert as_rate(23.976) == Fraction(2997, 125)


def test_a_single_frame_without_a_length_has_no_rate_and_is_one_frame_at_any():
    line = Timeline(np.array([7]), 7, MS)
    assert (line.rate, line.seconds, line.count(Fraction(24)), line.count(None)) == (0, 0, 1, 1)
    assert line.take(Fraction(24), 0, 1) == [7]
