"""Counts of a data set: buckets, captions, sharing."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.keys import Key, Recipe, key
from cachestore.report.counting import _bins_of, kind_of, measure_buckets, measure_captions
from cachestore.store.format.catalog import Catalog, Cell, make_column

TEXT = Recipe("text", {"kind": "text", "max_tokens": 4}, {"family": "plain"})
LATENTS = Recipe("latents", {"kind": "latents", "dtype": "bfloat16", "components": {"vae": "diffusers.AutoencoderKL"}})


def catalog(captions, *columns):
    """A catalog of these captions, a list for each sample."""
    rows = len(captions)
    return Catalog(
        name="train",
        request={},
        recipes={recipe.fingerprint: recipe for recipe in (TEXT, LATENTS)},
        ids=[f"s{n}" for n in range(rows)],
        captions_at=np.cumsum([0, *map(len, captions)]).tolist(),
        captions=[caption for row in captions for caption in row],
        images={},
        extras=["{}"] * rows,
        columns=columns,
    )


def text(captions, *, tokens=True):
    cells = [[Cell(key(one), facts={"tokens": (len(one.split()),)} if tokens else {}) for one in row] for row in captions]
    return make_column("text", "caption", TEXT.fingerprint, {}, cells)


def pictures(*buckets, options=None):
    cells = [[Cell(key(str(n)), facts={"bucket": bucket})] for n, bucket in enumerate(buckets)]
    return make_column("latents", "image", LATENTS.fingerprint, options or {}, cells)


def test_an_empty_data_set_has_no_samples_in_buckets_and_no_captions():
    empty = catalog([], text([]), pictures())
    assert measure_buckets(empty, [], 8) == ()
    measured = measure_captions(empty)
    assert (measured.captions, measured.most, measured.bins, measured.longest) == (0, 0, (), ())
    assert kind_of(empty, empty.columns[0], {}).entries == 0


def test_buckets_tell_what_full_batches_leave_out_the_fullest_first():
    (found,) = measure_buckets(catalog([[]] * 6, pictures(*[(64, 48)] * 2, *[(64, 64)] * 4)), range(6), 3)
    assert [(one.name, one.samples, one.batches, one.left_over) for one in found.buckets] == [("64x64", 4, 1, 1), ("64x48", 2, 0, 2)]
    assert (found.resolution, found.samples, found.left_over) == (None, 6, 3)
    assert [(one.batch_size, one.batches, one.left_over) for one in found.losses[:4]] == [(1, 6, 0), (2, 3, 0), (3, 1, 3), (4, 1, 2)]


def test_each_resolution_has_its_buckets_and_control_images_have_none():
    small, large = (pictures((64, 48), options={"resolution": size}) for size in (512, 1024))
    control = make_column("latents", "control", LATENTS.fingerprint, {}, [[Cell(key("c"), facts={"bucket": (8, 8)})]])
    assert [one.resolution for one in measure_buckets(catalog([[]], control, small, large), range(1), 1)] == [512, 1024]


@pytest.mark.parametrize(("rule", "read_here"), [(None, True), ("diffusers", True), ("musubi", False)])
def test_buckets_by_the_rule_of_a_trainer_with_a_cache_of_its_own_are_not_read_here(rule, read_here):
    options = {} if rule is None else {"buckets": rule}
    [found] = measure_buckets(catalog([[]], pictures((64, 48), options=options)), range(1), 1)
    assert found.read_here is read_here


def test_videos_have_frames_in_their_buckets_and_unknown_ones_no_name():
    (found,) = measure_buckets(catalog([[]] * 2, pictures((64, 48, 9), ())), range(2), 1)
    assert {one.name for one in found.buckets} == {"64x48x9", ""}


def test_captions_are_measured_in_tokens_where_they_are_known_and_each_different_one_once():
    captions = [["a b"], ["a b", "a b c d e f"], [""]]
    measured = measure_captions(catalog(captions, text(captions)))
    assert (measured.unit, measured.limit, measured.samples, measured.captions, measured.distinct) == ("tokens", 4, 3, 4, 3)
    assert (measured.empty, measured.truncated, measured.median, measured.most) == (1, 1, 2, 6)
    assert [(one.sample, one.length, one.caption) for one in measured.longest] == [("s1", 6, "a b c d e f")]


def test_without_tokens_captions_are_measured_in_characters_and_nothing_is_called_truncated():
    captions = [["abc"], ["abcdefgh"]]
    measured = measure_captions(catalog(captions, text(captions, tokens=False)))
    assert (measured.unit, measured.limit, measured.truncated, measured.most) == ("characters", None, 0, 8)


@given(st.lists(st.integers(0, 5000), min_size=1), st.none() | st.integers(1, 600))
def test_every_length_is_in_one_bin_and_none_reaches_over_the_limit(lengths, limit):
    bins = _bins_of(sorted(lengths), limit)
    assert sum(one.captions for one in bins) == len(lengths)
    assert len(bins) <= 41
    assert all(before.high + 1 == after.low for before, after in pairwise(bins))
    assert bins[0].low <= min(lengths)
    assert bins[-1].high >= max(lengths)
    if limit is not None:
        assert not any(one.low <= limit < one.high for one in bins)


def test_shared_entries_are_counted_with_what_they_save_and_what_they_were_made_of():
    captions = [["same"], ["same"], ["same"], ["other"]]
    made = catalog(captions, text(captions))
    kind = kind_of(made, made.columns[0], {Key(key("same")): 100, Key(key("other")): 30})
    assert (kind.cells, kind.entries, kind.shared, kind.bytes, kind.saved_bytes) == (4, 2, 2, 130, 200)
    assert [(one.cells, one.what) for one in kind.repeats] == [(3, "same")]


def test_pictures_that_share_an_entry_are_named_by_their_samples():
    cells = [[Cell(key("one"))], [Cell(key("one"))], [Cell()]]
    made = catalog([[]] * 3, make_column("latents", "image", LATENTS.fingerprint, {"resolution": 512}, cells))
    kind = kind_of(made, made.columns[0], {})
    assert (kind.missing, kind.shared, kind.bytes) == (1, 1, 0)
    assert (kind.repeats[0].what, kind.about) == ("s0, s1", "AutoencoderKL, bfloat16, resolution 512")


@pytest.mark.parametrize("components", [None, [], {}, {"vae": None}, "x"])
def test_a_recipe_of_any_shape_is_described(components):
    recipe = Recipe("latents", {"kind": "mine", "components": components})
    column = make_column("latents", "image", recipe.fingerprint, {}, [])
    made = catalog([])
    made.recipes[recipe.fingerprint] = recipe  # pyright: ignore[reportIndexIssue]
    assert kind_of(made, column, {}).about == "mine"
