"""Which captions are encoded and which one a sample has: a pure function, and one that asks for nothing that was not encoded."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput
from tests.fakes import asks_for

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
dropped = st.sampled_from([{}, {}, {"tag_dropout": 0.3}, {"tag_dropout": 1.0}, {"max_tags": 2}, {"drop_tags": 1}, {"drop_tags": 99}])
policies = st.builds(
    lambda drop, **options: CaptionPolicy(**drop, **options),
    dropped,
    choose=st.sampled_from(["first", "random", "all"]),
    dropout=st.sampled_from([0, 0.0, 0.1, 1.0]),
    shuffle_tags=st.booleans(),
    variants=st.integers(1, 9),
    keep_tokens=st.integers(0, 3),
    separator=st.sampled_from([", ", ",", "\n", " | "]),
    prefix=words,
    wildcards=st.sampled_from([0, 0, 1, 3, 50]),
    seed=st.integers(0, 1),
)
TAGS = "sks cat, red, small, on a table, photo"


def shuffling(variants: int = 4, **options: Any):
    return CaptionPolicy(shuffle_tags=True, variants=variants, **options)


def indices(policy, count, kept=None, *, epochs: Iterable[int] = range(1), samples: Iterable[int] = range(1), seed=0) -> list[Any]:
    return [
        policy.index(count, kept or policy, seed=seed, epoch=epoch, sample_id=f"{sample}.png") for epoch in epochs for sample in samples
    ]


# What is encoded


@given(policies)
def test_no_captions_have_no_texts_and_a_sample_without_any_has_the_empty_caption(policy):
    assert policy.texts([]) == ()
    assert indices(policy, 0) == [None]


def test_by_default_the_first_caption_is_encoded_as_it_is():
    assert CaptionPolicy().texts(["a, b", "c"]) == ("a, b",)
    assert CaptionPolicy().encoding() == CaptionPolicy().as_json() == {}


@pytest.mark.parametrize("choose", ["random", "all"])
def test_where_any_caption_may_be_chosen_all_are_encoded(choose):
    assert CaptionPolicy(choose=choose).texts(["a", "b", "a"]) == ("a", "b", "a")


def test_a_prefix_stands_before_each_caption_also_before_an_empty_one():
    assert CaptionPolicy(choose="all", prefix="sks, ").texts(["a", ""]) == ("sks, a", "sks, ")


def test_orders_of_the_same_tags_are_different_and_the_first_is_as_written():
    texts = shuffling(8).texts([TAGS.replace(", small", ",small")])
    assert texts[0] == TAGS.replace(", small", ",small")
    assert len(set(texts)) == 8
    assert {tuple(sorted(text.split(", "))) for text in texts[1:]} == {tuple(sorted(TAGS.split(", ")))}


def test_kept_tokens_stay_in_front():
    texts = shuffling(6, keep_tokens=2).texts([TAGS])
    assert len(set(texts)) == 6
    assert all(text.startswith("sks cat, red, ") for text in texts)


def test_more_orders_keep_those_that_were_encoded_before():
    assert shuffling(9).texts([TAGS])[:5] == shuffling(5).texts([TAGS])


@pytest.mark.parametrize(
    ("caption", "orders"), [("", 1), ("one tag", 1), ("a, b", 2), ("a, b, c", 6), ("a, a, b", 3), ("x, x, x, x, x, x", 1)]
)
def test_a_caption_of_few_orders_has_them_all_again_and_again(caption, orders):
    texts = shuffling(12).texts([caption])
    assert len(texts) == 12
    assert len(set(texts)) == orders


@given(policies, st.lists(words, max_size=3))
def test_each_caption_has_equally_many_texts_whatever_it_says(policy, captions):
    chosen = captions[:1] if policy.choose == "first" else captions
    expanded = [text for one in chosen for text in CaptionPolicy(choose="all", wildcards=policy.wildcards, seed=policy.seed).texts([one])]
    assert len(policy.texts(captions)) == policy.each * len(expanded)
    assert policy.wildcards or len(expanded) == len(chosen)


@given(policies, policies, st.lists(words, max_size=3))
def test_equal_encodings_have_equal_texts(one, other, captions):
    if one.encoding() == other.encoding():
        assert one.texts(captions) == other.texts(captions)


def test_the_orders_do_not_change_from_one_version_to_the_next():
    """Stores hold what they were: other orders would have to be encoded again."""
    assert shuffling(3).texts([TAGS])[1:] == ("red, sks cat, small, photo, on a table", "photo, sks cat, small, on a table, red")
    assert shuffling(3).texts(["a, b, c"])[1:] == ("b, c, a", "c, a, b")


# Tags that are dropped


def tags_of(text, separator=", "):
    return [tag for tag in text.split(separator) if tag]


@given(policies.filter(lambda policy: policy.tags_dropped), st.lists(st.sampled_from("abcdefgh"), max_size=8))
def test_each_variant_lacks_some_tags_and_never_the_first_tokens(policy, tags):
    policy = replace(policy, prefix="", separator=", ", wildcards=0)
    written, fixed = ", ".join(tags), tags[: policy.keep_tokens]
    whole, *variants = policy.texts([written])
    assert whole == written
    assert len(variants) == policy.variants
    rest = len(tags) - len(fixed)
    for text in variants:
        found = tags_of(text)
        assert found[: len(fixed)] == fixed
        assert not Counter(found) - Counter(tags)
        if not policy.shuffle_tags:
            left = iter(tags)
            assert all(tag in left for tag in found), "the others stay in their order"
        if policy.max_tags:
            assert len(found) - len(fixed) == min(policy.max_tags, rest)
        if policy.drop_tags:
            assert len(found) - len(fixed) == max(rest - policy.drop_tags, min(rest, 0 if fixed else 1))


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_as_many_tags_are_dropped_as_their_probability_says(rate):
    captions = [", ".join(f"{number} {tag}" for tag in range(10)) for number in range(100)]
    policy = CaptionPolicy(choose="all", tag_dropout=rate, variants=4)
    texts = policy.texts(captions)
    left = sum(len(tags_of(text)) for index, text in enumerate(texts) if index % policy.each)
    assert abs(left / 4000 - (1 - rate)) < 0.03


def test_more_variants_and_the_same_version_keep_what_was_encoded():
    """Stores hold what they were: other drawings would have to be encoded again."""
    every: list[dict[str, Any]] = [{"tag_dropout": 0.5}, {"max_tags": 2, "keep_tokens": 1}, {"drop_tags": 1, "shuffle_tags": True}]
    for options in every:
        few, many = (CaptionPolicy(variants=count, **options).texts([TAGS]) for count in (2, 9))
        assert many[: len(few)] == few
        assert CaptionPolicy(variants=9, seed=1, **options).texts([TAGS]) != many
    assert CaptionPolicy(tag_dropout=0.5, variants=2).texts([TAGS])[1:] == ("sks cat, red, small, photo", "small, on a table")
    assert CaptionPolicy(max_tags=2, variants=1, keep_tokens=1).texts([TAGS])[1:] == ("sks cat, red, photo",)


def test_every_epoch_draws_a_variant_and_never_the_whole_caption():
    policy = CaptionPolicy(choose="random", drop_tags=1, variants=3)
    assert {index % policy.each for index in indices(policy, 8, epochs=range(100))} == {1, 2, 3}
    assert {index % policy.each for index in indices(CaptionPolicy(), 8, policy, epochs=range(9))} == {0}


def test_tags_are_dropped_in_one_way_only():
    with pytest.raises(BadInput, check=asks_for("tag_dropout")):
        CaptionPolicy(tag_dropout=0.1, drop_tags=1)
    with pytest.raises(BadInput, check=asks_for("tag_dropout")):
        CaptionPolicy(tag_dropout=2)


# Wildcards


@pytest.mark.parametrize(
    ("caption", "texts"),
    [
        ("a {red|blue} cat", ("a red cat", "a blue cat")),
        ("{a|b}{c|d}", ("ac", "ad", "bc", "bd")),
        ("{a|} cat", ("a cat", " cat")),
        ("{a|a} cat", ("a cat",)),
        ("a {red} cat", ("a red cat",)),
        ("{{a|b}} {c|d}", ("{a|b} c", "{a|b} d")),
        ("{{{a|b}}}", ("{a}", "{b}")),
        ("{} { a | b", ("{} { a | b",)),
        ("", ("",)),
    ],
)
def test_wildcards_give_every_combination_as_sd_scripts_draws_them(caption, texts):
    assert CaptionPolicy(wildcards=9).texts([caption, "not the first"]) == texts
    assert CaptionPolicy().texts([caption]) == (caption,)


def test_of_more_combinations_than_wanted_some_are_drawn_which_is_reported():
    caption, policy = "a {1|2|3|4} b {1|2|3} c {1|2}", CaptionPolicy(choose="all", wildcards=7)
    every = CaptionPolicy(wildcards=24).texts([caption])
    texts = policy.texts([caption, "plain"])
    assert len(set(every)) == 24
    assert len(set(texts)) == 8
    assert set(texts) < {*every, "plain"}
    assert texts[0] == every[0]
    assert policy.has_more(["plain", caption])
    assert not CaptionPolicy(wildcards=7).has_more(["plain", caption])
    assert not CaptionPolicy(wildcards=24).has_more([caption])
    assert CaptionPolicy(wildcards=7, seed=1).texts([caption]) != texts[:7]
    assert CaptionPolicy(wildcards=3).texts(["a {red|blue|green} {cat|dog}"]) == ("a red cat", "a blue dog", "a green dog")


def test_the_texts_of_a_caption_come_evenly():
    drawn = indices(CaptionPolicy(wildcards=5), 5, epochs=range(20), samples=range(100))
    assert all(300 < count < 500 for count in Counter(drawn).values())


def test_wildcards_come_before_tags_and_prefix():
    policy = CaptionPolicy(wildcards=2, shuffle_tags=True, variants=2, prefix="sks, ")
    assert policy.texts(["{a, b|c, d}"]) == ("sks, a, b", "sks, b, a", "sks, c, d", "sks, d, c")


# What a sample has


@given(policies, policies, st.integers(1, 4), st.integers(0, 5))
def test_nothing_is_asked_for_that_was_not_encoded(policy, kept, captions, epoch):
    if policy.differs_from(kept):
        return
    listed = [f"{number}, x, {{y|z}}, {{w|v|u}}, t" for number in range(captions)]
    encoded, asked = kept.texts(listed), set(policy.texts(listed))
    for index in indices(policy, len(encoded), kept, epochs=[epoch], samples=range(5)):
        assert index is None or encoded[index] in asked


@given(policies)
def test_a_policy_asks_for_what_it_has_encoded_and_nothing_else(policy):
    assert policy.differs_from(policy) == ""


def test_a_choice_depends_on_seed_epoch_and_sample_and_comes_out_evenly():
    policy = CaptionPolicy(choose="random")
    drawn = indices(policy, 5, epochs=range(20), samples=range(100))
    assert drawn == indices(policy, 5, epochs=range(20), samples=range(100))
    assert drawn != indices(policy, 5, epochs=range(20), samples=range(100), seed=1)
    assert drawn[:100] != drawn[100:200]
    assert all(300 < count < 500 for count in Counter(drawn).values())


def test_all_captions_come_in_turn_and_not_all_samples_begin_with_the_same():
    by_sample = [indices(CaptionPolicy(choose="all"), 3, epochs=range(6), samples=[sample]) for sample in range(20)]
    assert all(set(turn[:3]) == {0, 1, 2} and turn[:3] == turn[3:] for turn in by_sample)
    assert {turn[0] for turn in by_sample} == {0, 1, 2}


@pytest.mark.parametrize(("dropout", "least", "most"), [(0.0, 0, 0), (0.1, 150, 250), (1.0, 2000, 2000)])
def test_as_many_captions_are_dropped_as_was_asked(dropout, least, most):
    drawn = indices(CaptionPolicy(choose="random", dropout=dropout), 4, epochs=range(2), samples=range(1000))
    assert least <= drawn.count(None) <= most


def test_which_samples_are_dropped_does_not_decide_which_captions_the_others_have():
    kept, some = (indices(CaptionPolicy(choose="random", dropout=fraction), 4, samples=range(200)) for fraction in (0.0, 0.5))
    assert [one for one, other in zip(kept, some, strict=True) if other is not None] == [one for one in some if one is not None]


def test_fewer_orders_than_were_encoded_are_those_of_their_own_caption():
    policy, kept = shuffling(2, choose="random"), shuffling(5, choose="all")
    assert policy.differs_from(kept) == ""
    assert {index % 5 for index in indices(policy, 15, kept, samples=range(200))} == {0, 1}
    assert {index // 5 for index in indices(policy, 15, kept, samples=range(200))} == {0, 1, 2}


@pytest.mark.parametrize(
    ("policy", "kept", "says"),
    [
        (CaptionPolicy(choose="random"), CaptionPolicy(), "only the first"),
        (CaptionPolicy(prefix="sks "), CaptionPolicy(), "'sks '"),
        (CaptionPolicy(), CaptionPolicy(prefix="sks "), "'sks '"),
        (shuffling(5), shuffling(4), "5 orders"),
        (shuffling(4), CaptionPolicy(choose="all"), "1 were encoded"),
        (shuffling(4, keep_tokens=1), shuffling(4), "keep_tokens=1"),
        (shuffling(4, separator="|"), shuffling(4), "'|'"),
        (shuffling(4, seed=1), shuffling(4), "seed=1"),
        (CaptionPolicy(tag_dropout=0.1), shuffling(4), "tag_dropout=0.1"),
        (CaptionPolicy(drop_tags=1, variants=5), CaptionPolicy(drop_tags=1), "5 variants"),
        (CaptionPolicy(drop_tags=1), CaptionPolicy(drop_tags=2), "drop_tags=1"),
        (CaptionPolicy(wildcards=4), CaptionPolicy(), "wildcards=4"),
        (CaptionPolicy(wildcards=4), CaptionPolicy(wildcards=4, seed=1), "seed=1"),
        (CaptionPolicy(wildcards=4), CaptionPolicy(wildcards=4, choose="all"), "is not recorded"),
    ],
)
def test_a_policy_that_asks_for_more_than_was_encoded_says_what(policy, kept, says):
    assert says in policy.differs_from(kept)


# As JSON


@given(policies)
def test_a_policy_survives_the_way_through_json(policy):
    assert CaptionPolicy.parse(json.loads(json.dumps(policy.as_json()))) == policy
    again = CaptionPolicy.parse(json.loads(json.dumps(policy.encoding())))
    assert (again.encoding(), again.each, again.prefix) == (policy.encoding(), policy.each, policy.prefix)


@pytest.mark.parametrize("value", ["last", {"droput": 0.1}, {"dropout": "0.1"}, {"variants": True}, {"shuffle_tags": 1}, 3, ["all"], None])
def test_what_is_no_policy_is_refused(value):
    with pytest.raises(BadInput):
        CaptionPolicy.parse(value)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": -0.1},
        {"dropout": 1.1},
        {"dropout": float("nan")},
        {"dropout": "0.1"},
        {"dropout": True},
        {"variants": 0},
        {"variants": "4"},
        {"variants": 2.5},
        {"keep_tokens": -1},
        {"separator": ""},
        {"separator": 5},
        {"prefix": None},
        {"shuffle_tags": "no"},
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_its_name(options):
    with pytest.raises(BadInput, check=asks_for(next(iter(options)))):
        CaptionPolicy(**options)


def test_numbers_of_numpy_are_kept_as_what_json_can_hold():
    given: Any = {"dropout": np.float32(0.5), "shuffle_tags": np.True_, "variants": np.int64(3), "keep_tokens": np.uint8(1)}
    found = json.loads(json.dumps(CaptionPolicy(**given).as_json()))
    assert found == {"dropout": 0.5, "shuffle_tags": True, "variants": 3, "keep_tokens": 1}


@pytest.mark.parametrize("value", [3, None, ["all"]])
def test_what_stands_for_no_policy_is_told_what_does(value):
    with pytest.raises(BadInput, check=asks_for("captions")):
        CaptionPolicy.parse(value)
