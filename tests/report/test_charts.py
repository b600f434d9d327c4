"""Drawings: as many parts as there are numbers, a bounded size, and words for who cannot see them."""

import re

from cachestore.report.charts import MOST_SQUARES, bar, histogram, neighbours, segment_map
from cachestore.report.numbers import Bin, Segment


def segments(count, **states):
    return [Segment(f"{n:032x}", 10, 2, states.get(f"n{n}", "sound")) for n in range(count)]


def widths(drawn):
    return re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%"', drawn)


def test_a_bar_of_nothing_has_no_parts():
    assert widths(bar()) == widths(bar((0.0, "fill"))) == []


def test_the_parts_of_a_bar_follow_each_other():
    assert widths(bar((0.5, "fill"), (0.25, "lost"))) == [("0.00", "50.00"), ("50.00", "25.00")]


def test_the_map_of_no_segments_is_empty():
    assert "<g>" not in segment_map([])


def test_each_segment_has_its_square_and_what_is_not_sound_has_a_sign():
    drawn = segment_map(segments(130, n7="damaged", n9="gone"))
    assert drawn.count("<g>") == 130
    assert drawn.count('class="sign"') == 2
    assert "130 segments, 2 of them damaged or missing" in drawn


def test_very_many_segments_share_squares_that_show_the_worst_of_them():
    many = 5 * MOST_SQUARES + 1
    drawn = segment_map(segments(many, n12="unreadable", n13="damaged"))
    assert neighbours(many) == 6
    assert drawn.count("<g>") <= MOST_SQUARES
    assert drawn.count('class="damaged"') == 1
    assert "unreadable" not in drawn
    assert len(drawn) < 200_000


def test_a_histogram_marks_what_is_behind_the_limit():
    drawn = histogram([Bin(0, 9, 5), Bin(10, 19, 1), Bin(20, 29, 0), Bin(30, 39, 2)], "tokens", 19)
    assert len(re.findall(r'class="fill"', drawn)) == 2
    assert len(re.findall(r'class="lost"', drawn)) == 2
    assert '<line x1="50.00%"' in drawn
    assert "<title>30 to 39: 2</title>" in drawn


def test_a_histogram_without_a_limit_and_of_one_length_is_fine():
    drawn = histogram([Bin(7, 7, 3)], "characters", None)
    assert "from 7 to 7" in drawn
    assert "limit" not in drawn
