"""Text as HTML: nothing from outside becomes markup."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.report.html import DASH, Html, attribute, duration, in_percent, plural, prose, size, table, words


def test_nothing_is_empty_text_and_no_rows_are_no_table():
    assert words("") == "<bdi></bdi>"
    assert table("empty", [("A", "k")], []) == ""


def test_markup_in_a_caption_is_shown_and_not_obeyed():
    assert words("<script>alert('x')</script> & \"q\"") == (
        "<bdi>&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;q&quot;</bdi>"
    )


def test_long_text_is_cut_before_it_is_escaped():
    assert html.unescape(attribute("&" * 50, 10)) == "&" * 9 + "…"


def test_controls_and_lone_surrogates_become_signs_and_joiners_stay():
    assert words("a\nb\x00\ud800") == "<bdi>a↵ b\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}</bdi>"
    family = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}"
    assert words(family) == f"<bdi>{family}</bdi>"


@given(st.text(st.characters(codec=None), max_size=400))
def test_any_text_is_one_element_that_can_be_written_as_utf_8(text):
    shown = words(text)
    assert re.fullmatch(r"<bdi>[^<>\"']*</bdi>", shown, re.DOTALL)
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (in_percent(0, 0), DASH),
        (in_percent(1, 3), "33.3&nbsp;%"),
        (in_percent(1, 100_000), "&lt;0.1&nbsp;%"),
        (size(0), "0&nbsp;B"),
        (size(1536), "1.5&nbsp;KiB"),
        (size(3 * 1024**5), "3072.0&nbsp;TiB"),
        (duration(1.25), "1.2&nbsp;s"),
        (duration(61), "1&nbsp;min&nbsp;01&nbsp;s"),
        (duration(3 * 3600 + 120), "3&nbsp;h&nbsp;02&nbsp;min"),
        (plural(1, "entry", "entries"), "1 entry"),
        (plural(1200, "sample"), "1,200 samples"),
    ],
)
def test_figures_are_written_for_people(made, text):
    assert made == text


def test_a_tables_first_column_names_its_rows():
    made = table("Sizes <of> things", [("Name", "k"), ("Bytes", "n")], [[Html("a"), Html("1")]])
    assert "<caption>Sizes &lt;of&gt; things</caption>" in made
    assert '<th scope="row" class="k">a</th><td class="n">1</td>' in made


def test_of_a_table_that_is_too_wide_for_a_phone_or_has_text_each_cell_says_its_column():
    columns = [("Kind", "k"), ("", "bar"), *((f"N{n}", "n") for n in range(4))]
    made = table("Wide", columns, [[Html(str(n)) for n in range(6)]])
    assert '<table class="fold">' in made
    assert re.findall(r'data-of="(\w+)">(\d)', made) == [(f"N{n}", str(n + 2)) for n in range(4)]
    assert "data-of" not in table("Narrow", columns[:5], [[Html("1")] * 5])
    assert "data-of" in table("Text", [("Sample", "k"), ("Reason", "t")], [[Html("1")] * 2])


def test_what_stands_in_backticks_of_a_sentence_is_code():
    assert prose("run `a <b>` now") == "<bdi>run <code>a &lt;b&gt;</code> now</bdi>"
