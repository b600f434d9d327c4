"""Import where several rows of a manifest have one picture, or a part of one: what a file may be of several is of none, in any order."""

import dataclasses
import json
from itertools import permutations

import pytest
import torch

import cachestore as cs
from cachestore.core.errors import BadUsage
from cachestore.encode.pictures.buckets import Size, crop_box
from cachestore.encode.pictures.variants import Variant
from cachestore.trainers import families
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import write_ai_toolkit
from tests.trainers.caches import bring, equal
from tests.trainers.diffusion_pipe.files import write_diffusion_pipe
from tests.trainers.musubi.files import musubi_text, write_musubi
from tests.trainers.sd_scripts.files import write_sd_scripts
from tests.trainers.simpletuner.files import write_simpletuner
from tests.trainers.trainers import PICTURES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

BIRD = PICTURES[1]
"""64x64 pixels, whole in its bucket."""
FORMATS = ("sd-scripts", "simpletuner", "musubi", "ai-toolkit", "diffusion-pipe")
BY_PICTURE = ("sd-scripts", "musubi", "diffusion-pipe")
"""Whose text is found by the picture's name alone."""
PART = (0, 0, 32, 32)


def row(name, caption=BIRD.caption, picture=BIRD, **columns):
    return {"id": name, "image": picture.reference, "caption": caption, **columns}


def write_cache(kind, data, pictures=PICTURES):
    """A cache of these pictures, and the folder to import it from."""
    match kind:
        case "sd-scripts":
            write_sd_scripts(data, "flux", pictures)
        case "simpletuner":
            write_simpletuner(data / "cache" / "text", data / "cache" / "vae", "flux", pictures)
        case "musubi":
            write_musubi(data / "cache", "flux", pictures)
        case "ai-toolkit":
            write_ai_toolkit(data, "flux", pictures)
        case _:
            write_diffusion_pipe(data / "cache" / "flux", pictures=pictures)
    return data if kind in {"sd-scripts", "ai-toolkit"} else data / "cache"


def bring_rows(kind, data, store, rows, pictures=PICTURES, **options):
    manifest = data / "rows.jsonl"
    manifest.write_text("\n".join(json.dumps(one) for one in rows))
    return bring(kind, write_cache(kind, data, pictures), store, manifest, family="flux", **options)


def failures_of(report, encoder):
    return {one["sample"]: one["reason"] for one in report.report.failures if one["encoder"] == encoder}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_manifest_without_rows_is_refused(data, store, kind):
    with pytest.raises(BadUsage):
        bring_rows(kind, data, store, [])
    assert not store.exists()


def fox_of(kind):
    """Text of the first picture's caption, in the dtype of this cache."""
    if kind == "musubi":
        return musubi_text(PICTURES[0], "flux", torch.float32)
    return trainers.text_of(PICTURES[0].caption, "flux", torch.bfloat16 if kind == "diffusion-pipe" else torch.float32)["prompt"]


@pytest.mark.parametrize("kind", FORMATS)
def test_text_of_another_width_than_the_models_is_a_failure_in_every_format(data, store, kind, monkeypatch):
    """What SD3's or another model's T5 made may bear the same name, and is as long."""
    monkeypatch.setattr("cachestore.trainers.import_encoders._widths_of", lambda _made, _family: {"text_encoder_2": families.Width(2048)})
    report = bring_rows(kind, data, store, [row("m0")], encode=["text"])
    assert "but its last axis should be 2048" in failures_of(report, "text")["m0"]
    assert report.report.encoded == 0


@pytest.mark.parametrize("kind", BY_PICTURE)
def test_text_named_by_a_picture_that_rows_with_other_captions_share_is_nobodys_in_any_order(tmp_path, data, kind):
    own = row("fox", PICTURES[0].caption, PICTURES[0])
    for number, rows in enumerate(permutations([row("m0"), row("m0face", "a face"), row("m0other", "something else")])):
        store = tmp_path / f"store{number}"
        folder = data if number == 0 else trainers.make_source(tmp_path / f"data{number}")
        report = bring_rows(kind, folder, store, [own, *rows])
        failed = failures_of(report, "text")
        assert failed.keys() == {"m0", "m0face", "m0other"}
        for reason in failed.values():
            assert all(name in reason for name in failed)
            assert ("shard_0.bin" if kind == "diffusion-pipe" else "two_") in reason
        assert failures_of(report, "latents") == {}
        assert any("so it is not used" in remark or "so they are not used" in remark for remark in report.remarks)
        assert kind == "diffusion-pipe" or any("two_" in path and "te" in path for path in report.unmatched)
        assert [equal(sample["prompt_embeds"], fox_of(kind)) for sample in cs.CachedDataset(store)] == [True]


@pytest.mark.parametrize("kind", BY_PICTURE)
def test_where_all_text_may_be_of_several_nothing_of_it_is_taken_and_each_row_says_why(data, store, kind):
    report = bring_rows(kind, data, store, [row("m0"), row("m0face", "a face")], encode=["text"])
    assert (report.report.encoded, failures_of(report, "text").keys()) == (0, {"m0", "m0face"})


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_one_picture_and_one_caption_share_its_text_and_latents(data, store, kind):
    assert bring_rows(kind, data, store, [row("m0"), row("again")]).complete
    cached = cs.CachedDataset(store)
    one, other = (cached[cached.index(name)] for name in ("m0", "again"))
    assert equal(one["latents"], other["latents"])
    assert equal(one["prompt_embeds"], other["prompt_embeds"])


@pytest.mark.parametrize("kind", ["simpletuner", "ai-toolkit"])
def test_text_named_by_its_caption_is_that_rows_though_its_picture_is_shared(data, store, kind):
    pictures = [BIRD, dataclasses.replace(BIRD, caption="a face")]
    for rows in permutations([row("m0"), row("m0face", "a face")]):
        report = bring_rows(kind, data, store, rows, pictures)
        assert (report.complete, report.unmatched) == (True, ())
    cached = cs.CachedDataset(store)
    for name, picture in zip(("m0", "m0face"), pictures, strict=True):
        made = trainers.text_of(picture.caption, "flux", torch.bfloat16)
        assert equal(cached[cached.index(name)]["prompt_embeds"], made["prompt"])


@pytest.mark.parametrize("kind", FORMATS)
def test_latents_of_a_whole_picture_are_not_of_a_row_with_its_own_crop(data, store, kind):
    report = bring_rows(kind, data, store, [row("m0"), row("m0face", crop=list(PART)), row("all", crop=[0, 0, *BIRD.size])])
    failed = failures_of(report, "latents")
    assert failed.keys() == {"m0face"}
    assert "its own crop [0, 0, 32, 32]" in failed["m0face"]
    assert "of the whole picture" in failed["m0face"]
    assert failures_of(report, "text") == {}
    assert len(cs.CachedDataset(store)) == 2


def note(data, facts):
    """SimpleTuner's file of sizes, that says so of the bird."""
    left, top, _right, _bottom = facts["crop"]
    sizes = {"original_size": facts["size"], "intermediary_size": facts["resized"], "target_size": facts["bucket"]}
    reported = {f"/elsewhere/{BIRD.reference}": {**sizes, "crop_coordinates": [top, left]}}
    (data / "aspect_ratio_bucket_metadata_x.json").write_text(json.dumps(reported))


@pytest.mark.parametrize(("moved", "is_taken"), [(0, True), (1, False)])
def test_latents_whose_note_tells_the_very_crop_of_a_row_are_its_own(data, store, moved, is_taken):
    bucket = Size(64, 64)
    facts = Variant(Size(*BIRD.size), bucket, crop_box(Size(32, 32), bucket), is_flipped=False, crop_number=None, within=PART).facts()
    note(data, {**facts, "crop": [side + moved for side in facts["crop"]]})
    report = bring_rows("simpletuner", data, store, [row("m0face", crop=list(PART))])
    assert (failures_of(report, "latents") == {}) is is_taken
    if is_taken:
        sample = cs.CachedDataset(store)[0]
        assert equal(sample["latents"], trainers.latents_of(BIRD, "flux", torch.bfloat16))
        assert sample["original_size"].tolist() == [64, 64]


def test_a_crop_that_a_row_gets_later_takes_its_latents_away_again(data, store):
    assert bring_rows("sd-scripts", data, store, [row("m0")]).complete
    assert failures_of(bring_rows("sd-scripts", data, store, [row("m0", crop=list(PART))]), "latents").keys() == {"m0"}
    assert len(cs.CachedDataset(store)) == 0
