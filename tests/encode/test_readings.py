"""Pictures read as by a trainer: its profile, alpha and orientation, its resizer and its limits, through a store."""

from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.core.inputs import OWN
from cachestore.encode.families.resamplers import RESAMPLERS
from cachestore.encode.pictures import images
from cachestore.encode.pictures.bucket_rules import RULES, BucketRule
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.colours import profile_of_codes
from cachestore.encode.pictures.shots import Still
from cachestore.encode.pictures.variants import variant_of
from cachestore.files.paths import Layout
from cachestore.store.read.rows import newest_catalog
from tests.fakes import asks_for

TRAINERS = [name for name in RULES if name != OWN]
TURNS = {"sd-scripts": False, "musubi": False, "simpletuner": False, "ai-toolkit": True, "diffusers": True}
SIZE = (90, 61)
ENCODED: dict[str, Any] = {"encode": ("latents",), "resolution": 64, "bucket_step": 16, "vae_dtype": "float32"}
LIMITS: dict[str, Any] = {"bucket_min": 32, "bucket_max": 128}


def colours(size=SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


def saved(picture, name="PNG", **options):
    file = BytesIO()
    picture.save(file, name, **options)
    return file.getvalue()


def with_profile(seed=0):
    """A picture whose colours are those of Display P3."""
    return saved(Image.fromarray(colours(seed=seed)), icc_profile=profile_of_codes(12, 13))


def with_alpha(seed=0):
    picture = Image.fromarray(colours(seed=seed))
    picture.putalpha(Image.fromarray(colours(seed=seed + 1)[..., 0]))
    return saved(picture)


def turned(orientation=6, seed=0):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(colours(seed=seed)), exif=exif.tobytes())


def read(data, trainer):
    return images.as_pixels(images.decode_picture(data, RULES[trainer].reading))[..., :3]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_converts_no_profile_and_shows_the_colour_below_transparent_pixels(trainer):
    for make in (with_profile, with_alpha):
        assert np.array_equal(read(make(), trainer), colours())
        assert not np.array_equal(images.as_pixels(images.decode(make())), colours())


@pytest.mark.parametrize(("trainer", "turns"), TURNS.items())
def test_a_trainer_turns_pictures_by_exif_or_leaves_them_lying(trainer, turns):
    expected = np.rot90(colours(), -1) if turns else colours()
    assert np.array_equal(read(turned(), trainer), expected)
    assert images.measure(turned(), RULES[trainer].reading) == (expected.shape[1], expected.shape[0])
    assert images.measure(turned()) == Size(*reversed(SIZE))


def test_every_trainer_is_known_by_its_reading():
    assert TURNS.keys() == set(TRAINERS)
    assert RULES[OWN].reading is None


def pixels_of(data, trainer):
    """What is given to the VAE at 64 pixels, as this trainer makes it."""
    rule: BucketRule = RULES[trainer]
    options = {"resolution": 64, "buckets": trainer, "step": 16, **(LIMITS if rule.may_limit else {})}
    variant = variant_of(options, images.measure(data, rule.reading), "")
    return variant, Still(data, variant, rule.resample, rule.reading).pixels()


def cropped(pixels, variant):
    left, top, right, bottom = variant.box.crop
    return pixels[top:bottom, left:right]


@pytest.mark.parametrize(
    ("trainer", "interpolation"), [("sd-scripts", "INTER_AREA"), ("musubi", "INTER_AREA"), ("simpletuner", "INTER_LINEAR")]
)
@pytest.mark.parametrize("make", [with_profile, with_alpha, turned])
def test_the_pixels_of_a_shrunk_picture_are_those_of_opencv(trainer, interpolation, make):
    opencv = pytest.importorskip("cv2")
    variant, made = pixels_of(make(), trainer)
    whole = opencv.resize(colours(), tuple(variant.box.resized), interpolation=getattr(opencv, interpolation))
    assert np.array_equal(made, cropped(whole, variant))


def test_an_enlarged_picture_keeps_its_alpha_until_it_is_resized_only_for_musubi():
    """Pillow multiplies colours by alpha while it resizes RGBA, so musubi's and sd-scripts' pixels differ."""
    small = Image.fromarray(colours((40, 30)))
    small.putalpha(Image.fromarray(colours((40, 30), 1)[..., 0]))
    found = {trainer: pixels_of(saved(small), trainer) for trainer in ("musubi", "sd-scripts")}
    for trainer, source in (("musubi", small), ("sd-scripts", small.convert("RGB"))):
        variant, made = found[trainer]
        whole = np.asarray(source.resize(variant.box.resized, Image.Resampling.LANCZOS))[..., :3]
        assert np.abs(made.astype(int) - cropped(whole, variant)).max() <= 4
    assert np.abs(found["musubi"][1].astype(int) - found["sd-scripts"][1]).max() > 40


def test_a_very_long_picture_by_linear_interpolation_needs_no_giant_in_between():
    variant = variant_of({"resolution": 64, "step": 16}, Size(1, 40_000), "")
    data = saved(Image.new("RGB", (1, 40_000), (1, 2, 3)))
    assert (Still(data, variant, "cv2-linear").pixels() == (1, 2, 3)).all()


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    made = {"profile": with_profile(), "alpha": with_alpha(), "turned": turned(), "plain": saved(Image.fromarray(colours()))}
    for name, content in made.items():
        (folder / f"{name}.png").write_bytes(content)
    return folder


@pytest.fixture
def run(built, data, tmp_path):
    """Calls `precompute` with the tiny VAE into the one store."""

    def call(name="train", **options):
        pytest.importorskip("cv2")
        return cs.precompute(data, model=built("flux").folder, store=tmp_path / "store", name=name, inline=True, **ENCODED | options)

    return call


def column_of(tmp_path, name="train"):
    catalog = newest_catalog(Layout.at(tmp_path / "store"), name)
    assert catalog is not None
    (column,) = (one for one in catalog.columns if one.role == "image")
    return catalog, column


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
class TestStored:
    """Through a store, with a tiny VAE."""

    def test_values_read_as_a_trainer_have_other_keys_under_any_name(self, run, tmp_path):
        assert run(buckets="sd-scripts", **LIMITS).encoded == 4
        again = run("theirs", buckets="sd-scripts", pixels="as-trainer", **LIMITS)
        assert (again.encoded, again.reused) == (4, 0)
        catalog, column = column_of(tmp_path, "theirs")
        assert {"pixels": "as-trainer", "buckets": "sd-scripts", **LIMITS}.items() <= column.options.items()
        assert tuple(column.cell(catalog.ids.index("turned.png")).facts["size"]) == SIZE
        (recipe,) = catalog.recipes.values()
        assert recipe.make["transform"]["pixels"] == RESAMPLERS["area"].pictures
        assert run("theirs", buckets="sd-scripts", pixels="as-trainer", **LIMITS).encoded == 0

    def test_values_read_as_a_trainer_are_checked_and_refilled_alike(self, run, tmp_path):
        assert run(buckets="ai-toolkit", bucket_step=32, pixels="as-trainer").encoded == 4
        before = values_in(tmp_path)
        assert cs.verify(tmp_path / "store", recompute=4).ok
        for segment in (tmp_path / "store" / "segments").rglob("*.safetensors"):
            segment.unlink()
        assert cs.repair(tmp_path / "store", refill=True).refilled == 4
        assert values_in(tmp_path) == before

    def test_a_forecast_says_what_is_done_as_the_trainer_does_it(self, plan):
        said = " ".join(plan(buckets="sd-scripts", pixels="as-trainer", **LIMITS).remarks)
        assert 'resample="area"' in said
        assert "colour profiles are ignored" in said
        said = " ".join(plan(buckets="ai-toolkit", bucket_step=32, resample="lanczos").remarks)
        assert "while ai-toolkit resizes by bicubic" in said
        assert 'pixels="as-trainer" does as ai-toolkit' in said

    def test_sd_scripts_limits_are_its_own_unless_others_are_given(self, data, plan):
        for path in data.iterdir():
            path.unlink()
        (data / "long.png").write_bytes(saved(Image.new("RGB", (3000, 300))))
        fixed: dict[str, Any] = {"buckets": "sd-scripts", "bucket_step": 64}
        assert plan(resolution=512, **fixed).buckets.keys() == {"1024x256"}
        assert plan(resolution=1024, **fixed).buckets.keys() == {"1024x256"}
        assert plan(resolution=1024, bucket_max=2048, **fixed).buckets.keys() == {"2048x256"}
        assert plan(resolution=512, bucket_min=64, bucket_max=2048, **fixed).buckets.keys() == {"1408x128"}
        with pytest.raises(BadInput, check=asks_for("resolution", 1536, 256, 1024)):
            plan(resolution=1536, **fixed)

    def test_a_data_set_keeps_the_limits_and_the_resizer_that_it_was_made_with(self, run, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setitem(RULES, "sd-scripts", replace(RULES["sd-scripts"], limits=(None, None), resample="lanczos"))  # type: ignore[arg-type]
            assert run(buckets="sd-scripts").encoded == 4
        assert run(buckets="sd-scripts").encoded == 0
        catalog, column = column_of(tmp_path)
        assert not {"bucket_min", "bucket_max"} & column.options.keys()
        assert catalog.request["latents"]["resample"] == "lanczos"
        with pytest.raises(RecipeMismatch):
            run(buckets="sd-scripts", **LIMITS)

    def test_a_mask_on_a_picture_that_the_trainer_does_not_turn_fails_alone(self, run, data):
        (data / "turned.mask.png").write_bytes(saved(Image.new("L", (SIZE[1], SIZE[0]), 255)))
        made = run(buckets="musubi", bucket_step=None, pixels="as-trainer")
        assert [(one["sample"], "turn the picture itself" in one["reason"]) for one in made.failures] == [("turned.png", True)]


@pytest.fixture
def plan(built, data, tmp_path):
    """Calls `cs.plan` for the one store."""

    def call(name="new", **options):
        pytest.importorskip("cv2")
        return cs.plan(data, model=built("flux").folder, store=tmp_path / "store", name=name, **ENCODED | options)

    return call


def values_in(tmp_path):
    opened = cs.open(tmp_path / "store")
    return {key: {name: value.tobytes() for name, value in opened.get(key, as_numpy=True).items()} for key in sorted(opened.keys())}
