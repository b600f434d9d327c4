"""Rules of buckets against tables that `scripts/conformance/record_buckets.py` recorded from the trainers' own code."""

from fractions import Fraction
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import OWN, Buckets
from cachestore.encode.pictures.bucket_rules import RULES, BucketSettings, find_settings, fit_box, rule_named
from cachestore.encode.pictures.buckets import Size, choose, crop_box
from cachestore.encode.pictures.variants import Variant, fit_of, variant_of

TABLES = Path(__file__).with_name("buckets")
TRAINERS = [name for name in get_args(Buckets) if name != OWN]
NO_BUCKET = [0] * 6


def settings_of(name):
    """The settings in the name of a table: resolution/step/upscales, and the limits of the sides, if the trainer has any."""
    resolution, step, upscales, *limits = map(int, name.split("/"))
    return BucketSettings(resolution, step, bool(upscales), *limits)


def tables(trainer):
    """Sizes, and by settings the rows (bucket, resized, left and top of the crop) of each."""
    recorded = np.load(TABLES / f"{trainer}.npz")
    return [Size(*size) for size in recorded["sizes"].T.tolist()], {
        name: recorded[name].T.tolist() for name in recorded.files if "/" in name
    }


def row_of(trainer, size, settings):
    try:
        bucket, box = fit_box(trainer, size, settings)
    except EncodeFailed:
        return NO_BUCKET
    return [*bucket, *box.resized, *box.crop[:2]]


def differing(trainer, change):
    """How many rows of a trainer's tables differ, with changed settings."""
    sizes, recorded = tables(trainer)
    return sum(
        row_of(trainer, size, change(settings_of(name))) != row
        for name, rows in recorded.items()
        for size, row in zip(sizes, rows, strict=True)
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_recorded_picture_gets_the_trainers_bucket_size_and_crop(trainer):
    sizes, recorded = tables(trainer)
    assert len(set(sizes)) == 2000
    assert {settings_of(name).resolution for name in recorded} >= {512, 768, 1024}
    assert differing(trainer, lambda settings: settings) == 0


@pytest.mark.parametrize("trainer", ["sd-scripts", "musubi", "ai-toolkit", "simpletuner"])
def test_the_tables_tell_settings_apart(trainer):
    assert differing(trainer, lambda settings: settings._replace(step=2 * settings.step)) > 1000


def test_the_own_rule_is_as_before():
    for size in tables("musubi")[0][:200]:
        for upscales in (True, False):
            bucket, box = fit_box(OWN, size, BucketSettings(512, 64, upscales))
            assert bucket == choose(size, 512, 64, upscales=upscales)
            assert box == crop_box(size, bucket)


@pytest.mark.parametrize("trainer", ["sd-scripts", "musubi", "ai-toolkit", "simpletuner", "diffusers"])
def test_settings_are_found_from_the_buckets(trainer):
    sizes, recorded = tables(trainer)
    for name, rows in recorded.items():
        if name.endswith(("512/1536", "250/1000", "256/64/1/256/1024")):
            continue  # limits that nobody sets, and settings that others share
        pairs = {(size, Size(*row[:2])) for size, row in zip(sizes, rows, strict=True) if row != NO_BUCKET}
        found = find_settings(trainer, pairs)
        assert found is not None
        assert found.resolution == settings_of(name).resolution
        if trainer != "diffusers":  # whose square needs no step
            assert found == settings_of(name)


def test_no_settings_are_found_for_no_pictures_or_other_buckets():
    assert find_settings("musubi", set()) is None
    assert find_settings("musubi", {(Size(640, 480), Size(512, 512)), (Size(480, 640), Size(512, 512))}) is None


@given(
    trainer=st.sampled_from(TRAINERS),
    size=st.builds(Size, st.integers(1, 3000), st.integers(1, 3000)),
    at=st.none() | st.fractions(0, Fraction(999, 1000)),
)
def test_a_crop_is_the_bucket_and_lies_inside_the_resized_picture(trainer, size, at):
    settings = BucketSettings(512, RULES[trainer].step(16))
    try:
        bucket, box = fit_box(trainer, size, settings, at)
    except EncodeFailed:
        assert trainer == "simpletuner"
        assert size.width / size.height < 0.01
        return
    left, top, right, bottom = box.crop
    assert bucket == (right - left, bottom - top)
    assert 0 <= left < right <= box.resized.width
    assert 0 <= top < bottom <= box.resized.height


def test_a_picture_without_a_bucket_fails_with_its_size():
    with pytest.raises(EncodeFailed):
        fit_box("sd-scripts", Size(42, 125), BucketSettings(512, upscales=False))


def test_a_rule_of_a_newer_version_is_refused():
    with pytest.raises(BadInput):
        variant_of({"resolution": 512, "buckets": "onetrainer"}, Size(9, 9), "")
    assert rule_named("musubi") == "musubi"


def test_a_resolution_below_musubis_step_has_no_buckets():
    with pytest.raises(BadInput):
        fit_box("musubi", Size(9, 9), BucketSettings(8, 16))


def test_equal_crops_have_one_key_whichever_rule_made_them():
    size, wanted = Size(3000, 2000), {"resolution": 1024}
    one, other = (variant_of({**wanted, "buckets": name}, size, "") for name in (OWN, "sd-scripts"))
    assert one == other
    assert one.transform() == {"bucket": [1216, 832], "crop": "center"}


def test_a_transform_has_the_resized_size_if_it_is_not_the_usual_one():
    """ai-toolkit rounds the scaled side up."""
    size = Size(640, 480)
    variant = variant_of({"resolution": 512, "step": 16, "buckets": "ai-toolkit"}, size, "")
    assert variant.box.resized == (598, 448)
    assert variant.transform() == {"bucket": [576, 448], "crop": [11, 0, 587, 448], "resized": [598, 448]}
    assert variant.transform() != Variant.centred(size, variant.bucket).transform()
    assert fit_of({"resolution": 512, "step": 16, "buckets": "ai-toolkit"}, size).bucket == (576, 448)
