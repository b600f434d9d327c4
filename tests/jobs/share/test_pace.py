"""The rate and the time left: of the present run alone, by encoder, without jumps."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cachestore.jobs.share.pace import FIRST_SECONDS, Pace, with_pace
from cachestore.jobs.share.progress import EncoderStatus, PassStatus, RankStatus


def rank(doing):
    who: dict[str, Any] = {"rank": 0, "host": "h", "pid": 1, "worker": "w", "launch": "l", "phase": "working", "alive": True}
    counts: dict[str, Any] = {"done": 0, "reused": 0, "encoded": 0, "failed": 0, "count": 1}
    return RankStatus(rate=0.0, beat_age_seconds=0.0, slowest_batch=0.0, still_seconds=0.0, doing=doing, **who, **counts)


EMPTY = PassStatus("p", 1, "train", 0, 0, 0, 0, 0, 0, False, 0, 0, 0, ())


def status(doing, **encoders):
    """A pass whose only rank does this; encoders are (total, done) or (total, done, unpublished)."""
    found = tuple(EncoderStatus(name, *counts, *(0,) * (3 - len(counts))) for name, counts in encoders.items())
    return replace(EMPTY, ranks=(rank(doing),), encoders=found)


def test_a_pass_without_units_has_no_rate_and_nothing_left():
    pace = Pace()
    pace.see(EMPTY, 0.0)
    assert (pace.rate, pace.seconds_left(EMPTY)) == (None, 0.0)


def test_what_was_done_before_the_first_look_does_not_count():
    pace, seen = Pace(), EMPTY
    for second in range(6):
        pace.see(seen := status("encoding latents", latents=(1000, 900 + 2 * second)), float(second))
    assert pace.rate == pytest.approx(2.0)
    assert pace.seconds_left(seen) == pytest.approx(45.0)


def test_the_first_seconds_say_nothing():
    pace = Pace()
    for second in range(int(FIRST_SECONDS)):
        pace.see(seen := status("encoding latents", latents=(100, 10 * second)), float(second))
        assert (pace.rate, pace.seconds_left(seen)) == (None, None)


def test_loading_and_waiting_take_no_time_from_the_rate():
    pace = Pace()
    pace.see(status("loading vae", latents=(100, 0)), 0.0)
    for second in range(100, 105):
        pace.see(status("encoding latents", latents=(100, second - 100)), float(second))
    for second in range(105, 200):
        pace.see(status("waiting for other ranks", latents=(100, 4)), float(second))
    pace.see(status("encoding latents", latents=(100, 4)), 200.0)
    pace.see(seen := status("encoding latents", latents=(100, 5)), 201.0)
    assert pace.rate == pytest.approx(5 / 6, rel=0.05)
    assert pace.seconds_left(seen) == pytest.approx(95 * 6 / 5, rel=0.05)


def test_units_count_when_they_are_encoded_so_that_publishing_them_together_is_no_jump():
    pace, left = Pace(), []
    for second in range(100):
        published = second // 30 * 30
        pace.see(seen := status("encoding latents", latents=(1000, published, second - published)), float(second))
        left.append(pace.seconds_left(seen))
    known = [seconds for seconds in left if seconds is not None]
    assert len(known) > 90
    assert all(before - 1.5 < after < before for before, after in pairwise(known)), "it falls by a second each second"


def test_the_time_left_is_unknown_while_an_encoder_that_has_units_left_was_not_seen_at_work():
    pace, seen = Pace(), EMPTY
    for second in range(10):
        pace.see(seen := status("encoding text", text=(100, second), latents=(50, 0)), float(second))
    assert pace.rate == pytest.approx(1.0)
    assert pace.seconds_left(seen) is None
    for second in range(10, 20):
        pace.see(seen := status("encoding latents", text=(100, 100), latents=(50, 2 * (second - 10))), float(second))
    assert pace.rate == pytest.approx(2.0)
    assert pace.seconds_left(seen) == pytest.approx(16.0)


def test_after_a_minute_the_present_rate_counts_more_than_the_earlier_one():
    pace, done = Pace(), 0
    for second in range(60):
        done += 10
        pace.see(status("encoding latents", latents=(10_000, done)), float(second))
    for second in range(60, 180):
        done += 1
        pace.see(status("encoding latents", latents=(10_000, done)), float(second))
    assert pace.rate is not None
    assert 1.0 < pace.rate < 2.5


def test_on_progress_gets_the_rate_and_the_seconds_left_once_they_are_known():
    told, seconds = [], iter(range(9))
    tell = with_pace(told.append, lambda: float(next(seconds)))
    for done in range(0, 10, 2):
        tell(replace(status("encoding latents", latents=(10, done)), total=10, encoded=done))
    assert (told[0]["rate"], told[0]["seconds_left"]) == (None, None)
    assert (told[-1]["done"], told[-1]["rate"], told[-1]["seconds_left"]) == (8, pytest.approx(2.0), pytest.approx(1.0))
    tell(replace(EMPTY, complete=True))
    assert told[-1]["seconds_left"] == 0.0
