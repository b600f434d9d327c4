"""An error about other settings names the options that a user types, with the values that they had."""

import pytest

from cachestore.core.errors import RecipeMismatch
from cachestore.core.keys import Recipe
from cachestore.core.spelling import for_command_line
from cachestore.jobs.plan.other_settings import OtherSetting, refusal
from cachestore.store.format.catalog import Catalog
from tests import fakes

INTERNAL = ("fingerprint", "transform", "outputs", "recipe", "upscale False", "components")
HINTS = {"data": "photos", "model": "flux", "resolution": 512, "latents": "moments", "resample": "lanczos", "bucket_step": 64}


def said(differences, asked, hints=HINTS, encoder="latents"):
    previous = Catalog("train", {encoder: hints} if hints else {}, {}, ["a"], [0, 0], [], {}, ["{}"], ())
    with for_command_line():
        return refusal(previous, [OtherSetting(encoder, *one) for one in differences], asked)


@pytest.mark.parametrize(
    ("differences", "before", "now", "wanted"),
    [
        ([("outputs", ["sample"], ["mean", "logvar"])], {"latents": "sample"}, {"latents": "moments"}, ["--latents sample", "Use this"]),
        (
            [("outputs", ["sample"], ["mean"]), ("transform.pixels", "x", "y")],
            {"latents": "sample", "resample": "area"},
            {"latents": "moments", "resample": "lanczos"},
            ["--latents sample --resample area", "Use these"],
        ),
        ([("resolution", 512, 1024)], {"resolution": 512}, {"resolution": 1024}, ["--resolution 512"]),
        ([("resolution", 512, 1024)], {"resolution": [512, 768]}, {"resolution": 1024}, ["--resolution 512,768"]),
        ([("flip", None, True)], {"flip": False}, {"flip": True}, ["without --flip", "Leave it out"]),
        ([("flip", True, None)], {"flip": True}, {"flip": False}, ["--flip. Use this"]),
        ([("upscale", False, None)], {"no_upscale": True}, {"no_upscale": False}, ["--no-upscale. Use this"]),
        (
            [("crop", "random", None), ("seed", 3, None)],
            {"crop": "random", "crop_seed": 3},
            {"crop": "center", "crop_seed": 0},
            ["--crop random --crop-seed 3"],
        ),
        ([("step", 32, 64)], {"bucket_step": 32}, {"bucket_step": 64}, ["--bucket-step 32"]),
        (
            [("buckets", "musubi", None), ("step", 16, 64)],
            {"buckets": "musubi", "bucket_step": 16},
            {"buckets": "cachestore", "bucket_step": 64},
            ["--buckets musubi"],
        ),
        ([("frames", [17, 49], [17])], {"frames": [17, 49]}, {"frames": [17]}, ["--frames 17,49"]),
        ([("fps", 16, None)], {"fps": 16}, {"fps": None}, ["--fps 16"]),
        ([("dtype", "float32", "bfloat16")], {"vae_dtype": "float32"}, {"vae_dtype": "auto"}, ["--vae-dtype float32"]),
        ([("files.vae/x.safetensors", "a", "b")], {"vae": None}, {"vae": "other/", "model": "flux"}, ["without --vae"]),
        ([("files.vae/x.safetensors", "a", "b")], {"model": "my flux/"}, {"model": "other/"}, ["--model 'my flux/'"]),
        ([("files.vae/x.safetensors", "a", "b")], {}, {"model": "flux"}, ["other files of flux", "vae/x.safetensors"]),
        ([("resolutions", {"a": 512}, None)], {"sources": [{"data": "a/", "resolution": 512}]}, {"sources": []}, ["--sources"]),
    ],
)
def test_each_difference_is_an_option_with_the_value_that_it_had(differences, before, now, wanted):
    text = said(differences, {**HINTS, **now}, {**HINTS, **before})
    assert all(one in text for one in wanted), text
    assert "--name keeps both" in text
    assert "--replace takes the new settings and encodes what differs" in text
    assert not any(word in text for word in INTERNAL), text


@pytest.mark.parametrize(
    ("difference", "wanted"),
    [
        (("packages.ftfy", "6.1", "6.2"), "ftfy 6.1, which is 6.2 now"),
        (("version", 1, 2), "another version of cachestore"),
        (("encode_args.clip_skip", 1, None), "--encode-arg clip_skip=1"),
        (("outputs", ["text_encoder_2.embeds"], ["embeds"]), "--encode text_encoder_2"),
    ],
)
def test_text_that_differs_is_named_too(difference, wanted):
    before = {**HINTS, "encode": ["text_encoder_2"], "encode_arg": {"clip_skip": 1}}
    assert wanted in said([difference], {**HINTS, "encode": ["text"], "encode_arg": {}}, before, encoder="text")


def test_all_differences_of_all_encoders_come_at_once(tmp_path, makers):
    import cachestore as cs

    data, store = fakes.captioned(tmp_path / "data", 2), tmp_path / "store"
    cs.precompute(data, model="m", store=store, inline=True, resolution=512, flip=True)
    with pytest.raises(RecipeMismatch) as refused:
        cs.precompute(data, model="n", store=store, inline=True)
    assert all(word in str(refused.value) for word in ('model="m"', "flip", "resolution=512"))
    assert Recipe("x", {"a": 1}).fingerprint not in str(refused.value)
