"""Import: caches of each trainer become data sets, bit for bit; what is no sample's, or cannot be read, is named and hides nobody else."""

import dataclasses
import json
import os
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import cachestore as cs
from cachestore.cli import ERROR, FAILURES, OK, USAGE, main
from cachestore.core.errors import BadInput, BadUsage, RecipeMismatch
from cachestore.core.keys import Recipe, digest_bytes
from cachestore.store.format.catalog import IMPORTED
from cachestore.store.read.rows import newest_catalog
from cachestore.trainers.cache_scan import CacheScan
from cachestore.trainers.families import Width, family_named
from cachestore.trainers.import_request import ImportRequest
from cachestore.trainers.matching import Matches
from cachestore.trainers.table import imported_format
from tests.fakes import asks_for, tells_of
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_info, aitk_paths, write_ai_toolkit
from tests.trainers.caches import CLAIMS, bring, equal
from tests.trainers.diffusion_pipe.files import write_diffusion_pipe
from tests.trainers.musubi.files import musubi_text, write_musubi
from tests.trainers.sd_scripts.files import sd_latents_path, write_sd_scripts
from tests.trainers.simpletuner.files import st_sizes, st_text_path, write_simpletuner, write_st_sizes
from tests.trainers.trainers import PICTURES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

ONE = PICTURES[:1]


def sample_of(store, picture, name="train", **options):
    data = cs.CachedDataset(store, name, **options)
    return data[data.index(picture.reference)]


def entry(store, picture, column="latents", name="train"):
    """An entry of a picture's, with its JSON value."""
    with cs.open(store) as reader:
        catalog = newest_catalog(reader.layout, name)
        found = next(one for one in catalog.columns if one.encoder == column)
        key = found.row_keys(list(catalog.ids).index(picture.reference))[0]
        assert key is not None
        return reader.get(key), reader.describe(key).meta


def check_text(sample, picture, family, dtype):
    made = trainers.text_of(picture.caption, family, dtype)
    assert equal(sample["prompt_embeds"], made["prompt"])
    assert equal(sample["pooled_prompt_embeds"], made["pooled"])


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_what_sd_scripts_cached_comes_out_bit_for_bit(data, store, family):
    write_sd_scripts(data, family)
    report = bring("sd-scripts", data, store, data)
    assert (report.family, report.report.encoded, report.unmatched, report.complete) == (family, 6, (), True)
    for picture in PICTURES:
        sample = sample_of(store, picture, latents="raw" if family != "flux" else "sample")
        assert equal(sample["latents"], trainers.latents_of(picture, family))
        check_text(sample, picture, family, torch.float32)
        assert sample["original_size"].tolist() == [picture.size[1], picture.size[0]]
        assert sample["target_size"].tolist() == [8 * side for side in picture.latent]
        assert sample["caption"] == picture.caption
        stored, _meta = entry(store, picture)
        assert torch.equal(stored["sd-scripts.latents_flipped"], trainers.latents_of(picture, family).flip(-1))


def test_an_import_is_recorded_as_one_and_keeps_its_name_from_sessions_as_they_keep_theirs(data, store):
    write_sd_scripts(data, "sdxl", ONE)
    with cs.open(store, mode="a") as opened:
        opened.publish("own", {})
        with pytest.raises(BadInput, check=asks_for("name")):
            bring("sd-scripts", data, store, data, name="own")
        bring("sd-scripts", data, store, data, encode=["latents"])
        assert opened.dataset("train").made == "imported"
        with pytest.raises(BadInput, check=asks_for("name")):
            opened.session("train")


def test_progress_of_an_import_has_the_counts_that_precompute_gives(data, store):
    write_sd_scripts(data, "sd3", ONE)
    told = []
    bring("sd-scripts", data, store, data, on_progress=told.append)
    assert {"done", "total", "doing", "rate", "seconds_left"} <= set(told[-1])


def test_raw_latents_of_sd_scripts_are_normalised_when_they_are_read(data, store):
    write_sd_scripts(data, "sd3", ONE)
    bring("sd-scripts", data, store, data)
    raw = trainers.latents_of(ONE[0], "sd3")
    assert torch.equal(sample_of(store, ONE[0])["latents"], (raw - 0.0609) * 1.5305)


def test_keys_with_their_size_and_older_names_of_sd_scripts_are_read_too(data, store):
    write_sd_scripts(data, "sdxl", ONE, bare=False)
    sd_latents_path(data, ONE[0], "sdxl").rename(data / f"{ONE[0].stem}.npz")
    report = bring("sd-scripts", data, store, data, encode=["latents"], family="sdxl")
    assert report.report.encoded == 1
    assert [failure["sample"] for failure in report.report.failures] == [picture.reference for picture in sorted(PICTURES[1:], key=str)]
    assert torch.equal(sample_of(store, ONE[0], latents="raw")["latents"], trainers.latents_of(ONE[0], "sdxl"))


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
@pytest.mark.parametrize("compress", [False, True])
def test_what_simpletuner_cached_comes_out_bit_for_bit(tmp_path, data, store, family, compress):
    text, vae = tmp_path / "text", tmp_path / "vae"
    write_simpletuner(text, vae, family, compress=compress)
    bring("simpletuner", text, store, data)
    report = bring("simpletuner", vae, store, data, family=family)
    assert (report.report.encoded, report.unmatched) == (3, ())
    for picture in PICTURES:
        sample = sample_of(store, picture)
        assert equal(sample["latents"], trainers.latents_of(picture, family, torch.bfloat16))
        check_text(sample, picture, family, torch.bfloat16)
    dropped = cs.CachedDataset(store, captions=cs.CaptionPolicy(dropout=1.0))
    assert equal(dropped[0]["prompt_embeds"], trainers.text_of("", family, torch.bfloat16)["prompt"])


def test_both_caches_of_simpletuner_in_one_folder_come_at_once(tmp_path, data, store):
    """As an export writes them. The names of text tell the family of the latents."""
    write_simpletuner(tmp_path / "both" / "text", tmp_path / "both" / "vae", "sdxl")
    report = bring("simpletuner", tmp_path / "both", store, data)
    assert (report.report.encoded, report.unmatched, report.family) == (6, (), "sdxl")


def test_older_tuples_and_names_of_simpletuner_are_read_too(tmp_path, data, store):
    made = trainers.text_of(ONE[0].caption, "sdxl", torch.bfloat16)
    text = st_text_path(tmp_path / "cache", ONE[0].caption, "sdxl")
    text.parent.mkdir()
    torch.save((made["prompt"][None], made["pooled"][None]), text)
    (tmp_path / "cache" / "a").mkdir()
    torch.save(trainers.latents_of(ONE[0], "sdxl"), tmp_path / "cache" / "a" / "one.pt")
    bring("simpletuner", tmp_path / "cache", store, data)
    sample = sample_of(store, ONE[0])
    assert equal(sample["latents"], trainers.latents_of(ONE[0], "sdxl"))
    check_text(sample, ONE[0], "sdxl", torch.bfloat16)


def sizes_of(sample):
    return [sample[name].tolist() for name in ("original_size", "crop_top_left", "target_size")]


def test_sizes_and_crops_are_those_that_simpletuner_noted_beside_the_pictures(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    write_st_sizes(data, "train")
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    assert (report.complete, report.remarks, report.unmatched) == (True, (), ())
    for picture in PICTURES:
        height, width = (8 * side for side in picture.latent)
        assert sizes_of(sample_of(store, picture)) == [list(reversed(picture.size)), [3, 10], [height, width]]
        assert entry(store, picture)[1]["imported"]["info"]["luminance"] == 93.5


def test_a_changed_note_of_crops_is_taken_over_by_the_next_import(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    centred = sizes_of(sample_of(store, ONE[0]))
    write_st_sizes(data, "train")
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    assert (report.report.encoded, report.report.reused) == (0, 3)
    assert sizes_of(sample_of(store, ONE[0]))[1] == [3, 10] != centred[1]


def test_of_the_notes_of_several_resolutions_that_of_the_latents_counts(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    write_st_sizes(data, "fitting", left=2)
    write_st_sizes(data, "larger", [dataclasses.replace(picture, latent=(16, 16)) for picture in PICTURES])
    assert bring("simpletuner", tmp_path / "vae", store, data, family="sdxl").complete
    assert sizes_of(sample_of(store, ONE[0]))[1] == [3, 12]


def test_latents_that_no_note_fits_and_notes_that_differ_are_failures_that_name_them(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    write_st_sizes(data, "larger", [dataclasses.replace(PICTURES[0], latent=(16, 16))])
    write_st_sizes(data, "one", PICTURES[1:])
    write_st_sizes(data, "other", PICTURES[1:2], left=4)
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    reasons = {failure["sample"]: failure["reason"] for failure in report.report.failures}
    assert "says that the picture was cropped to 128x128, but its latents are of 64x48" in reasons[PICTURES[0].reference]
    assert "contradict each other" in reasons[PICTURES[1].reference]
    assert len(reasons) == 2
    assert any("1 picture in no bucket" in remark for remark in report.remarks)


@pytest.mark.parametrize("entry", [None, {}, {"original_size": [1, 2]}, {**st_sizes(ONE[0]), "target_size": [0, 8]}])
def test_a_note_without_sense_is_remarked_and_the_crop_is_taken_to_be_at_the_centre(tmp_path, data, store, entry):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    bring("simpletuner", tmp_path / "vae", store, data, family="sdxl", name="without")
    (data / "aspect_ratio_bucket_metadata_x.json").write_text(json.dumps({f"/x/{ONE[0].reference}": entry}))
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    assert ["1 entry of" in remark for remark in report.remarks] == [True]
    assert sizes_of(sample_of(store, ONE[0])) == sizes_of(sample_of(store, ONE[0], "without"))


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_note_that_is_no_json_is_an_error_that_names_it(tmp_path, data, store, text):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    (data / "aspect_ratio_bucket_metadata_x.json").write_text(text)
    with pytest.raises(BadInput):
        bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")


def test_a_refused_import_leaves_no_store_behind(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    for options in ({"family": "z-image", "encode": ["text"]}, {}, {"family": "sdxl", "model": str(tmp_path / "no-model")}):
        with pytest.raises(BadInput):
            bring("simpletuner", tmp_path / "vae", store, data, **options)
        assert not store.exists()


@pytest.mark.parametrize("family", ["flux", "wan", "qwen-image", "z-image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_musubi_cached_comes_out_bit_for_bit(tmp_path, data, store, family, dtype):
    write_musubi(tmp_path / "cache", family, dtype=dtype)
    report = bring("musubi", tmp_path / "cache", store, data)
    assert (report.family, report.report.encoded, report.unmatched) == (family, 6, ())
    frames = 1 if family in {"wan", "qwen-image"} else None
    for picture in PICTURES:
        sample = sample_of(store, picture, latents="raw" if family == "z-image" else "sample")
        assert equal(sample["latents"], trainers.latents_of(picture, family, dtype, frames=frames))
        assert equal(sample["prompt_embeds"], musubi_text(picture, family, dtype))


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_what_ai_toolkit_cached_comes_out_bit_for_bit(data, store, family):
    write_ai_toolkit(data, family)
    report = bring("ai-toolkit", data, store, data)
    assert (report.family, report.report.encoded, report.unmatched) == (family, 6, ())
    for picture in PICTURES:
        sample = sample_of(store, picture)
        assert equal(sample["latents"], trainers.latents_of(picture, family, torch.bfloat16))
        check_text(sample, picture, family, torch.bfloat16)
        info = aitk_info(picture, family)
        assert sample["crop_top_left"].tolist() == [info["crop_y"], info["crop_x"]]


def test_what_diffusion_pipe_cached_comes_out_bit_for_bit(tmp_path, data, store):
    write_diffusion_pipe(tmp_path / "cache" / "flux")
    report = bring("diffusion-pipe", tmp_path / "cache" / "flux", store, data)
    assert (report.family, report.report.encoded, report.unmatched) == ("flux", 6, ())
    for picture in PICTURES:
        sample = sample_of(store, picture)
        assert equal(sample["latents"], trainers.latents_of(picture, "flux", torch.bfloat16))
        check_text(sample, picture, "flux", torch.bfloat16)


@pytest.mark.parametrize("kind", ["sd-scripts", "simpletuner", "musubi", "ai-toolkit", "diffusion-pipe"])
def test_a_folder_without_a_file_of_the_trainer_is_refused_and_no_store_is_made(tmp_path, data, store, kind, capsys):
    (tmp_path / "nothing").mkdir()
    arguments = ["import", kind, str(tmp_path / "nothing"), "--store", str(store), "--data", str(data), "--claim", "model=x"]
    assert main(arguments) == USAGE
    assert f"holds no file of {kind}'s cache" in capsys.readouterr().err
    assert not store.exists()


def test_text_files_that_match_nobody_are_counted_and_listed_and_every_sample_fails(tmp_path, data, store):
    """Which encoders are imported follows from the files that are there, not from those that matched."""
    both = tmp_path / "both"
    write_simpletuner(both / "text", both / "vae", "sdxl")
    for picture in PICTURES:
        (data / f"{picture.stem}.txt").write_text("a caption that was edited")
    st_text_path(both / "text", "", "sdxl").unlink()
    report = bring("simpletuner", both, store, data)
    assert (report.complete, report.report.encoded, report.report.failed) == (False, 3, 1)
    assert {(one["sample"], one["encoder"]) for one in report.report.failures} == {(one.reference, "text") for one in PICTURES}
    assert len(report.unmatched) == 2
    assert any("2 of 2 files of text match no caption of the source" in remark for remark in report.remarks)


def test_latents_that_match_nobody_are_counted_and_listed_and_every_sample_fails(tmp_path, data, store):
    both = tmp_path / "both"
    elsewhere = [dataclasses.replace(one, reference=f"elsewhere-{one.reference.replace('/', '-')}") for one in PICTURES]
    write_simpletuner(both / "text", both / "vae", "sdxl", elsewhere)
    report = bring("simpletuner", both, store, data)
    assert (report.complete, report.report.encoded) == (False, 3)
    assert {(one["sample"], one["encoder"]) for one in report.report.failures} == {(one.reference, "latents") for one in PICTURES}
    assert len(report.unmatched) == 3


def test_latents_are_not_imported_for_a_list_of_prompts(tmp_path, data, store):
    both = tmp_path / "both"
    write_simpletuner(both / "text", both / "vae", "sdxl")
    (tmp_path / "prompts.txt").write_text(f"{PICTURES[0].caption}\n")
    with pytest.raises(BadUsage, check=asks_for("encode")):
        bring("simpletuner", both, store, tmp_path / "prompts.txt")
    assert bring("simpletuner", both, store, tmp_path / "prompts.txt", encode=["text"]).report.encoded == 2


def test_files_of_families_that_are_not_known_are_reported(tmp_path, data, store):
    """Some of SimpleTuner's models key text by the picture's name: none of it is taken for a caption's."""
    text, vae = tmp_path / "both" / "text", tmp_path / "both" / "vae"
    write_simpletuner(text, vae, "sdxl")
    known = st_text_path(text, PICTURES[0].caption, "sdxl")
    shutil.copy(known, known.with_name(known.name.replace("sdxl", "krea2")))
    report = bring("simpletuner", tmp_path / "both", store, data)
    assert "1 file belongs to models that cannot be imported yet (krea2)" in report.remarks
    assert report.unmatched == (f"text/{known.name.replace('sdxl', 'krea2')}",)


def test_text_of_ai_toolkit_is_found_with_commas_final_newlines_and_line_ends_of_windows(data, store):
    texts = ["cat,looking up\n", "one, two, \r\nthree\r\n", " \n"]
    pictures = [dataclasses.replace(one, caption=text.replace("\r\n", "\n")) for one, text in zip(PICTURES, texts, strict=True)]
    for picture, text in zip(pictures, texts, strict=True):
        (data / f"{picture.stem}.txt").write_bytes(text.encode())
    write_ai_toolkit(data, "flux", pictures)
    report = bring("ai-toolkit", data, store, data)
    assert (report.complete, report.report.encoded, report.unmatched) == (True, 6, ())
    for picture, caption in zip(pictures, ["cat, looking up", "one, two, \r\nthree", ""], strict=True):
        sample = sample_of(store, picture)
        assert sample["caption"] == caption
        assert equal(sample["prompt_embeds"], trainers.text_of(picture.caption, "flux", torch.bfloat16)["prompt"])


@pytest.mark.parametrize(
    ("text", "options", "encoded", "caption"),
    [
        ("a [trigger] cat", {}, "a  cat", "a cat"),
        ("a [trigger] cat", {"trigger_word": "sks"}, "a sks cat", "a sks cat"),
        ("a cat\n", {"trigger_word": "sks"}, "sks a cat\n", "sks a cat"),
        ("\n", {"caption": "a default"}, "a default", "a default"),
    ],
)
def test_captions_that_ai_toolkit_encodes_in_other_words_are_those_of_the_data_set(data, store, text, options, encoded, caption):
    (data / f"{ONE[0].stem}.txt").write_text(text)
    made = dataclasses.replace(ONE[0], caption=encoded)
    for other in PICTURES[1:]:
        (data / other.reference).unlink()
    write_ai_toolkit(data, "flux", [made])
    report = bring("ai-toolkit", data, store, data, **options)
    assert (report.complete, report.report.encoded) == (True, 2)
    assert sample_of(store, made)["caption"] == caption
    assert any("has other words than ai-toolkit encoded" in remark for remark in report.remarks)


def test_a_trigger_word_that_is_not_named_leaves_text_unpaired_and_says_what_may_be(data, store):
    write_ai_toolkit(data, "flux", [dataclasses.replace(one, caption=f"sks {one.caption}") for one in PICTURES])
    report = bring("ai-toolkit", data, store, data, family="flux")
    assert (report.complete, report.report.encoded) == (False, 3)
    assert any("3 of 3 files of text" in remark and "trigger_word" in remark for remark in report.remarks)


def test_text_that_ai_toolkit_keeps_for_dropped_captions_is_the_empty_captions(data, store):
    write_ai_toolkit(data, "flux", PICTURES[:2])
    (data / PICTURES[2].reference).unlink()
    for picture in PICTURES[:2]:
        path = aitk_paths(data, dataclasses.replace(picture, caption=""), "flux")[1]
        made = trainers.text_of("", "flux", torch.bfloat16)
        save_file({"text_embed": made["prompt"][None].clone(), "pooled_embed": made["pooled"][None].clone()}, path)
    report = bring("ai-toolkit", data, store, data)
    assert (report.complete, report.report.encoded, report.unmatched) == (True, 5, ())
    dropped = cs.CachedDataset(store, captions=cs.CaptionPolicy(dropout=1.0))
    assert equal(dropped[0]["prompt_embeds"], trainers.text_of("", "flux", torch.bfloat16)["prompt"])


@pytest.mark.parametrize(("text", "first"), [("the first line \nthe second\n", "the first line"), ("\nthe second", "")])
def test_sd_scripts_text_is_of_the_first_line_which_is_the_caption_then(data, store, text, first):
    (data / f"{ONE[0].stem}.txt").write_text(text)
    pictures = [dataclasses.replace(ONE[0], caption=first), *PICTURES[1:]]
    write_sd_scripts(data, "flux", pictures)
    report = bring("sd-scripts", data, store, data)
    assert report.complete
    assert sample_of(store, pictures[0])["caption"] == first
    check_text(sample_of(store, pictures[0]), pictures[0], "flux", torch.float32)
    assert any("1 caption has several lines" in remark or "1 caption file has other words" in remark for remark in report.remarks)
    assert not any("each whole text is one caption" in remark for remark in report.remarks)


def test_a_manifests_caption_of_several_lines_is_whole_for_sd_scripts_too(data, store):
    (data / "rows.jsonl").write_text(json.dumps({"image": ONE[0].reference, "caption": "one\ntwo"}))
    write_sd_scripts(data, "flux", [dataclasses.replace(ONE[0], caption="one\ntwo")])
    bring("sd-scripts", data, store, data / "rows.jsonl")
    assert sample_of(store, ONE[0])["caption"] == "one\ntwo"


def test_text_of_simpletuner_is_found_with_the_spaces_and_line_ends_that_it_digests(tmp_path, data, store):
    texts = [" a cat \r\n", "a dog  ", "a bird\n"]
    digested = [" a cat \r", "a dog  ", "a bird"]
    for picture, text in zip(PICTURES, texts, strict=True):
        (data / f"{picture.stem}.txt").write_bytes(text.encode())
    pictures = [dataclasses.replace(one, caption=text) for one, text in zip(PICTURES, digested, strict=True)]
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", pictures)
    report = bring("simpletuner", tmp_path / "text", store, data)
    assert (report.complete, report.report.encoded, report.unmatched) == (True, 4, ())
    assert [sample_of(store, one)["caption"] for one in PICTURES] == ["a cat", "a dog", "a bird"]


def test_pictures_that_their_exif_data_turn_are_reported_of_sd_scripts(data, store):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (80, 100)).save(data / "turned.jpg", exif=exif)
    write_sd_scripts(data, "flux", [*PICTURES, trainers.Picture("turned.jpg", "", (100, 80), (6, 8))])
    report = bring("sd-scripts", data, store, data)
    assert report.complete
    assert any("1 picture (turned.jpg) is turned by EXIF data" in remark for remark in report.remarks)


def test_videos_beside_the_pictures_are_counted_and_no_option_is_named_that_an_import_lacks(data, store):
    write_sd_scripts(data, "sdxl")
    (data / "clip.mp4").write_bytes(b"never opened")
    assert "1 video is ignored (the cache holds nothing of videos)" in bring("sd-scripts", data, store, data).remarks


def test_a_folder_with_nothing_of_the_source_is_an_error_that_shows_both(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", PICTURES[2:])
    (tmp_path / "data" / "a" / "three.v2.png").unlink()
    with pytest.raises(BadInput, check=tells_of(tmp_path / "vae", "'a/one.png'")):
        bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")


def test_provenance_stands_in_every_entry_and_in_the_recipe_and_no_claim_shares_a_key(data, store):
    write_sd_scripts(data, "flux", ONE)
    bring("sd-scripts", data, store, data)
    bring("sd-scripts", data, store, data, name="other", claims={"model": "another"})
    latents, about = entry(store, ONE[0])
    assert (about["provenance"], about["encoder"]) == (IMPORTED, "latents")
    assert about["input_digest"] == digest_bytes((data / ONE[0].reference).read_bytes())
    assert about["imported"]["file"] == "a/one_0100x0080_flux.npz"
    recipes = cs.CachedDataset(store).recipes
    assert {recipe.make["provenance"] for recipe in recipes.values()} == {IMPORTED}
    assert recipes["latents"].make["claimed"] == CLAIMS
    assert recipes["latents"].fingerprint != cs.CachedDataset(store, "other").recipes["latents"].fingerprint
    assert len(list(cs.open(store).keys())) == 4
    assert "sample" in latents


def test_a_second_import_reads_nothing_and_a_third_takes_only_what_changed(data, store):
    write_sd_scripts(data, "flux")
    first = bring("sd-scripts", data, store, data)
    second = bring("sd-scripts", data, store, data)
    assert (second.report.encoded, second.report.reused, second.report.generation) == (0, 6, first.report.generation)
    path = sd_latents_path(data, ONE[0], "flux")
    arrays = dict(np.load(path))
    np.savez(path, **{name: value + 1 if name.startswith("latents_6") else value for name, value in arrays.items()})
    third = bring("sd-scripts", data, store, data)
    assert (third.report.encoded, third.report.reused) == (1, 5)
    assert torch.equal(sample_of(store, ONE[0])["latents"], trainers.latents_of(ONE[0], "flux") + 1)


def test_files_of_no_sample_are_listed_and_samples_without_files_are_failures(data, store):
    write_sd_scripts(data, "flux")
    (data / "two.png").unlink()
    (data / "four.png").write_bytes((data / "a/one.png").read_bytes())
    report = bring("sd-scripts", data, store, data)
    assert report.unmatched == ("two_0064x0064_flux.npz", "two_flux_te.npz")
    assert {failure["sample"] for failure in report.report.failures} == {"four.png"}
    assert len(cs.CachedDataset(store)) == 2


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "no readable npz"),
        (lambda path: path.write_bytes(b""), "no readable npz file (BadZipFile"),
        (lambda path: np.savez(path, latents_6x8=np.array([{"a": 1}], object)), "holds objects"),
        (lambda path: np.savez(path, nothing=np.zeros(3)), "has no latents"),
        (lambda path: np.savez(path, latents_6x8=np.zeros((4, 6, 8), np.float32)), "4 channels"),
        (lambda path: np.savez(path, latents_6x8=np.full((16, 6, 8), np.nan, np.float32)), "NaN"),
        (lambda path: np.savez(path, latents_6x8=np.zeros(5, np.float32)), "expected"),
        (lambda path: np.savez(path, latents_6x8=np.zeros((16, 6, 8), "U3")), "cannot be stored"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_hides_nobody(data, store, damage, reason):
    write_sd_scripts(data, "flux")
    damage(sd_latents_path(data, ONE[0], "flux"))
    report = bring("sd-scripts", data, store, data)
    assert [failure["sample"] for failure in report.report.failures] == [ONE[0].reference]
    assert "one_0100x0080_flux.npz" in report.report.failures[0]["reason"]
    assert reason in report.report.failures[0]["reason"]
    assert len(cs.CachedDataset(store)) == 2


def test_an_import_goes_on_where_it_was_stopped(data, store):
    write_sd_scripts(data, "flux")
    late = sd_latents_path(data, ONE[0], "flux")
    kept = late.read_bytes()
    late.write_bytes(b"")
    assert bring("sd-scripts", data, store, data).report.failed == 1
    late.write_bytes(kept)
    report = bring("sd-scripts", data, store, data)
    assert (report.complete, report.report.encoded, report.report.reused) == (True, 1, 5)


def test_text_and_latents_of_one_name_may_come_one_after_the_other(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "flux")
    bring("simpletuner", tmp_path / "text", store, data)
    assert set(cs.CachedDataset(store).recipes) == {"text"}
    bring("simpletuner", tmp_path / "vae", store, data, family="flux")
    assert set(cs.CachedDataset(store).recipes) == {"text", "latents"}
    assert len(cs.CachedDataset(store)) == 3


def test_a_name_in_use_is_not_taken_over_unless_asked(data, store):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    with pytest.raises(RecipeMismatch, check=asks_for("name")):
        bring("sd-scripts", data, store, data, claims={"model": "another"})
    bring("sd-scripts", data, store, data, claims={"model": "another"}, replace=True)
    assert cs.CachedDataset(store).recipes["text"].make["claimed"] == {"model": "another"}


@pytest.mark.parametrize("replace", [False, True])
def test_what_a_program_published_is_never_taken_over(data, store, replace):
    write_sd_scripts(data, "flux")
    key = cs.key("importing", "own")
    with cs.open(store, mode="a") as own, own.session("train") as session:
        session.put(key, {"x": np.ones(2)})
        session.set("cat", x=key)
    with pytest.raises(BadInput, check=asks_for("name")):
        bring("sd-scripts", data, store, data, replace=replace)
    with cs.open(store) as own:
        assert list(own.dataset("train")) == ["cat"]


def test_what_made_a_cache_must_be_given(data, store):
    write_sd_scripts(data, "flux")
    with pytest.raises(BadInput, check=asks_for("model")):
        bring("sd-scripts", data, store, data, claims=None)


def test_two_families_in_a_folder_must_be_told_apart(data, store):
    write_sd_scripts(data, "flux")
    write_sd_scripts(data, "sdxl")
    with pytest.raises(BadInput, check=asks_for("family")):
        bring("sd-scripts", data, store, data)
    report = bring("sd-scripts", data, store, data, family="sdxl")
    assert report.report.encoded == 6
    assert len(report.unmatched) == 6


def test_a_family_that_nothing_tells_must_be_given(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "flux")
    with pytest.raises(BadInput, check=asks_for("family")):
        bring("simpletuner", tmp_path / "vae", store, data)


def test_the_model_tells_the_family_of_latents_whose_names_do_not(tmp_path, data, store, monkeypatch):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "flux")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    monkeypatch.setattr("cachestore.jobs.plan.encoders.encoders_of", lambda *_request, **_rise: ())
    report = bring("simpletuner", tmp_path / "vae", store, data, claims=None, model=tmp_path / "model", encode=["latents"])
    assert (report.family, report.report.encoded) == ("flux", 3)


def test_a_text_encoder_alone_is_not_taken_for_the_maker_of_latents(tmp_path, data, store, monkeypatch):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "flux")
    encoder = SimpleNamespace(recipe=Recipe("text", {"pipeline": "FluxPipeline"}, {}))
    monkeypatch.setattr("cachestore.jobs.plan.encoders.encoders_of", lambda *_request, **_rise: (encoder,))
    with pytest.raises(BadInput, check=asks_for("vae")):
        bring("simpletuner", tmp_path / "vae", store, data, claims=None, model=tmp_path / "model")
    assert not store.exists()


def test_a_name_that_two_pictures_share_is_nobodys(tmp_path, data, store):
    """musubi's cache is flat: files of one name say nothing of the folder."""
    write_musubi(tmp_path / "cache", "flux")
    shutil.copy(data / "two.png", data / "a" / "two.png")
    report = bring("musubi", tmp_path / "cache", store, data)
    assert any("'two'" in remark for remark in report.remarks)
    assert {failure["sample"] for failure in report.report.failures if failure["encoder"] == "latents"} == {"two.png", "a/two.png"}


def test_text_that_says_it_is_of_another_caption_is_refused(tmp_path, data, store):
    write_musubi(tmp_path / "cache", "flux")
    (data / "two.txt").write_text("a caption that was edited")
    report = bring("musubi", tmp_path / "cache", store, data)
    assert [(one["sample"], one["encoder"]) for one in report.report.failures] == [("two.png", "text")]
    assert "ein grüner Vogel" in report.report.failures[0]["reason"]


def test_text_of_ai_toolkit_is_of_its_caption_or_of_nobody(data, store):
    write_ai_toolkit(data, "flux")
    (data / "two.txt").write_text("a caption that was edited")
    report = bring("ai-toolkit", data, store, data)
    assert report.unmatched == (str(aitk_paths(data, PICTURES[1], "flux")[1].relative_to(data)),)
    assert [(one["sample"], one["encoder"]) for one in report.report.failures] == [("two.png", "text")]


def test_latents_that_say_they_are_another_models_are_refused(data, store):
    write_ai_toolkit(data, "flux")
    path = aitk_paths(data, ONE[0], "flux")[0]
    save_file(load_file(path), path, metadata={"latent_space_version": '"sd3"', "format": "pt"})
    report = bring("ai-toolkit", data, store, data, encode=["latents"])
    assert [one["sample"] for one in report.report.failures] == [ONE[0].reference]
    assert "'sd3'" in report.report.failures[0]["reason"]


def test_files_older_than_what_they_are_of_are_reported(data, store):
    write_sd_scripts(data, "flux")
    after = sd_latents_path(data, ONE[0], "flux").stat().st_mtime + 60
    os.utime(data / ONE[0].reference, (after, after))
    os.utime(data / "two.txt", (after, after))
    assert bring("sd-scripts", data, store, data).stale == ("a/one_0100x0080_flux.npz", "two_flux_te.npz")


def test_scaled_latents_are_never_handed_out_as_raw(data, store):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    with pytest.raises(BadInput, check=asks_for("latents", "another trainer")):
        cs.CachedDataset(store, latents="raw")
    with pytest.raises(BadInput, check=asks_for("latents", "sample")):
        cs.CachedDataset(store, latents="mean")


def test_a_batch_of_imported_samples_is_what_its_samples_are(data, store):
    write_sd_scripts(data, "flux", [*ONE, PICTURES[1]])
    bring("sd-scripts", data, store, data)
    data_set = cs.CachedDataset(store)
    straight, collated = data_set.read_batch([0]), data_set.collate([data_set[0]])
    assert straight.keys() == collated.keys()
    assert all(torch.equal(straight[name], collated[name]) for name in straight if isinstance(straight[name], torch.Tensor))


def test_repair_and_verify_know_that_a_model_cannot_make_imported_values(data, store, capsys):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    assert cs.verify(store).ok
    with pytest.raises(cs.BadInput, check=asks_for("recompute", "latents", "'train'", "imported")):
        cs.verify(store, recompute=3)
    next((store / "segments").rglob("*.safetensors")).unlink()
    assert main(["repair", str(store), "--refill"]) == ERROR
    assert "cachestore import" in capsys.readouterr().err


def test_the_command_tells_what_the_function_returns(data, store, capsys):
    write_sd_scripts(data, "flux")
    arguments = ["import", "sd-scripts", str(data), "--store", str(store), "--data", str(data), "--claim", "model=x", "--json"]
    assert main(arguments) == OK
    reported = json.loads(capsys.readouterr().out)
    assert (reported["imported"], reported["complete"], reported["format"], reported["family"]) == (6, True, "sd-scripts", "flux")
    sd_latents_path(data, ONE[0], "flux").write_bytes(b"")
    (data / "stray.npz").write_bytes(b"")
    assert main(arguments[:-1]) == FAILURES
    words = capsys.readouterr().out
    assert "one_0100x0080_flux.npz" in words
    assert "1 file of no sample: stray.npz" in words
    assert main(["import", "nobody", *arguments[2:]]) == ERROR


def test_files_that_match_nobody_count_where_the_declared_model_has_widths_of_its_own():
    plain = family_named("sdxl")
    family = dataclasses.replace(plain, widths={**plain.widths, "text_encoder": Width(1, 1)})
    request = ImportRequest("sd-scripts", "folder", "store", "data")
    files: Any = [("cat_te_outputs.npz", 1, 1)]
    nothing: Any = None
    found = CacheScan(request, imported_format("sd-scripts"), nothing, files, nothing, (), Matches(None))
    assert list(found.kinds_to_import(family)) == ["text"]


def test_a_picture_whose_captions_cannot_be_used_fails_alone_in_an_import_too(data, store):
    write_sd_scripts(data, "sdxl")
    (data / PICTURES[0].reference).with_suffix(".txt").write_bytes(b"nul \0")
    report = bring("sd-scripts", data, store, data)
    refused = [failure["sample"] for failure in report.report.failures if failure["encoder"] == "source"]
    assert (refused, report.complete) == ([PICTURES[0].reference], False)
    assert PICTURES[0].reference not in [*cs.CachedDataset(store).ids]
