"""What each trainer itself would look for, scale to, or put into one batch: the numbers were read off the trainers' own code."""

from dataclasses import replace

import pytest

from cachestore.encode.pictures.bucket_rules import BucketSettings
from cachestore.trainers.ai_toolkit import format as ai_toolkit
from cachestore.trainers.exported import Named
from cachestore.trainers.families import family_named
from cachestore.trainers.matching import CaptionSettings
from cachestore.trainers.musubi import format as musubi
from cachestore.trainers.sd_scripts import format as sd_scripts
from cachestore.trainers.simpletuner import format as simpletuner
from cachestore.trainers.table import load_format


def test_musubi_makes_batches_of_its_own_buckets():
    assert musubi.stacks(Named("x.png", size=(1600, 1200)), BucketSettings(1024)) == (1184, 880)
    assert musubi.stacks(Named("x.png", size=(600, 480)), BucketSettings(1024, 64, upscales=False)) == (592, 480)


def test_ai_toolkit_finds_latents_of_its_own_resizing_and_crop_alone():
    named = Named("x.png", size=(640, 470), bucket=(592, 432), resized=(592, 435), crop=(0, 1, 592, 433))
    assert ai_toolkit.finds(family_named("sdxl"), named, BucketSettings(512))
    assert not ai_toolkit.finds(family_named("flux"), named, BucketSettings(512)), "its buckets have other steps"
    assert not ai_toolkit.finds(family_named("sdxl"), replace(named, resized=(592, 434)), BucketSettings(512))
    assert not ai_toolkit.finds(family_named("sdxl"), replace(named, size=None), BucketSettings(512))


def test_sd_scripts_takes_latents_of_its_own_bucket_alone():
    flux = family_named("flux")
    assert sd_scripts.finds(flux, Named("x.png", size=(384, 255), bucket=(640, 384)), BucketSettings(512))
    assert not sd_scripts.finds(flux, Named("x.png", size=(384, 255), bucket=(624, 416)), BucketSettings(512))
    assert sd_scripts.finds(flux, Named("x.png", size=(384, 255), bucket=(384, 192)), BucketSettings(512, upscales=False))
    assert sd_scripts.finds(flux, Named("x.png", size=(1600, 1200), bucket=(512, 384)), BucketSettings(512, upscales=False))
    assert not sd_scripts.finds(flux, Named("x.png", size=(90, 2999), bucket=(64, 1024)), BucketSettings(512, upscales=False))
    assert sd_scripts.finds(flux, Named("x.png", bucket=(512, 512)), BucketSettings(512)), "where the size is not known"


def test_simpletuner_puts_pictures_of_one_rounded_aspect_ratio_together():
    assert simpletuner.stacks(Named("x.png", bucket=(1024, 1024)), BucketSettings(1024)) == simpletuner.stacks(
        Named("y.png", bucket=(512, 512)), BucketSettings(1024)
    )
    assert simpletuner.stacks(Named("x.png"), BucketSettings(1024)) is None


@pytest.mark.parametrize(
    ("kind", "text", "added", "captions"),
    [
        ("ai-toolkit", "a, b,c\r\n", CaptionSettings(), ["a,  b, c\n"]),
        ("ai-toolkit", "a [name], [trigger]", CaptionSettings("sks"), ["a sks,  sks"]),
        ("ai-toolkit", "a", CaptionSettings("sks"), ["sks a"]),
        ("ai-toolkit", " \n", CaptionSettings(None, "b"), ["b"]),
        ("sd-scripts", "\ufeffone \r\ntwo", CaptionSettings("sks", "b"), ["\ufeffone"]),
        ("sd-scripts", "\n\ntwo", CaptionSettings(), [""]),
        ("simpletuner", " a \r\nb\n\n", CaptionSettings(), [" a \r", "b"]),
        ("simpletuner", " a ", CaptionSettings(), [" a "]),
    ],
)
def test_captions_are_what_a_trainer_makes_of_a_files_text(kind, text, added, captions):
    read = load_format(kind).captions_of
    assert read is not None
    assert read(text, added) == captions


@pytest.mark.parametrize(
    ("kind", "path", "expected"),
    [
        ("sd-scripts", "a/b_te_outputs.npz", ("text", "sdxl")),
        ("sd-scripts", "a/b_0100x0080_flux.npz", ("latents", "flux")),
        ("sd-scripts", "a/b_0100x0080_lumina.npz", ("latents", None)),
        ("sd-scripts", "a/b_anima_te.npz", ("text", None)),
        ("sd-scripts", "a/b.npz", None),
        ("simpletuner", f"{'0' * 32}-sdxl.pt", ("text", "sdxl")),
        ("simpletuner", f"{'0' * 32}-krea2.pt", ("text", None)),
        ("simpletuner", f"a/{'0' * 64}.pt", ("latents", None)),
        ("simpletuner", "a/b.pt", None),
        ("musubi", "b_0100x0080_hv15.safetensors", ("latents", "hunyuanvideo15")),
        ("musubi", "b_0100x0080_fp.safetensors", ("latents", None)),
        ("musubi", "b_wan_te.safetensors", ("text", "wan")),
        ("ai-toolkit", "a/_t_e_cache/b.safetensors", ("text", None)),
        ("ai-toolkit", "a/_latent_cache/b.safetensors", ("latents", None)),
        ("diffusion-pipe", "c/text_embeddings_1/shard_0.bin", ("text", None)),
        ("diffusion-pipe", "c/latents/metadata.db", ("latents", None)),
    ],
)
def test_a_files_name_says_what_it_holds(kind, path, expected):
    found = load_format(kind).reading.parse_name(path)
    assert (None if found is None else (found.kind, None if found.family is None else found.family.name)) == expected
