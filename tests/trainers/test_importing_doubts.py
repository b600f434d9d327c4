"""Import where a file's name fits a sample and something else tells that it is another's: it is nobody's, in words, and hides nobody."""

import dataclasses
import json
import os
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import cachestore as cs
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.samples import Sample
from cachestore.trainers.diffusion_pipe import format as diffusion_pipe
from cachestore.trainers.matching import FileLocation, Matches
from tests.fakes import asks_for
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_hash, aitk_info, aitk_paths, write_ai_toolkit
from tests.trainers.caches import bring, equal
from tests.trainers.diffusion_pipe.files import write_diffusion_pipe, write_shards
from tests.trainers.musubi.files import musubi_text, write_musubi
from tests.trainers.sd_scripts.files import sd_latents_path, write_sd_scripts
from tests.trainers.simpletuner.files import write_simpletuner, write_st_sizes
from tests.trainers.trainers import PICTURES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

FOX, BIRD, OTHER = PICTURES


def failures_of(report, encoder):
    return {one["sample"]: one["reason"] for one in report.report.failures if one["encoder"] == encoder}


def latents_by_sample(store):
    return {sample["sample_id"]: sample["latents"] for sample in cs.CachedDataset(store)}


def texts_of(store, caption, made=None):
    """Of each sample with this caption, whether its text is what an encoder made of it."""
    made = trainers.text_of(caption, "flux")["prompt"] if made is None else made
    return [equal(sample["prompt_embeds"], made) for sample in cs.CachedDataset(store) if sample["caption"] == caption]


def write_one(root, picture, caption="a fish", size=(64, 64)):
    made = trainers.Picture(picture, caption, size, (8, 8))
    trainers.make_source(root, [made])
    return made


# Another picture of the same name


@pytest.mark.parametrize("kind", ["sd-scripts", "musubi"])
def test_latents_whose_name_tells_another_size_than_the_picture_has_now_are_of_an_earlier_picture(tmp_path, data, store, kind):
    folder = data if kind == "sd-scripts" else tmp_path / "cache"
    (write_sd_scripts if kind == "sd-scripts" else write_musubi)(folder, "flux")
    Image.new("RGB", (48, 80)).save(data / BIRD.reference)
    os.utime(data / BIRD.reference, (1e9, 1e9))  # as a copy keeps an older time
    failed = failures_of(bring(kind, folder, store, data), "latents")
    assert failed.keys() == {BIRD.reference}
    assert "is of a picture of 64 x 64 pixels, but it has 48 x 80: the file may be of an earlier" in failed[BIRD.reference]
    assert len(cs.CachedDataset(store)) == 2


def test_a_picture_on_its_side_is_of_the_size_that_its_header_or_its_eye_tells(data, store):
    """sd-scripts takes the size from the header alone, older and newer ones before and after turning."""
    exif = Image.Exif()
    exif[0x0112] = 6
    write_sd_scripts(data, "flux")
    Image.new("RGB", FOX.size).save(data / FOX.reference, exif=exif)
    assert bring("sd-scripts", data, store, data).complete


def test_a_note_of_simpletuner_about_a_picture_of_another_size_is_of_an_earlier_one(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    write_st_sizes(data, "train")
    Image.new("RGB", (48, 80)).save(data / BIRD.reference)
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    assert failures_of(report, "latents").keys() == {BIRD.reference}
    assert "says that the picture has 64 x 64 pixels, but it has 48 x 80" in failures_of(report, "latents")[BIRD.reference]


def write_older(data, size):
    """The bird's latents under sd-scripts' older name, with this `original_size`."""
    write_sd_scripts(data, "sdxl", [BIRD])
    path = sd_latents_path(data, BIRD, "sdxl")
    arrays: dict[str, Any] = {**np.load(path), "original_size": size}
    np.savez(data / "two.npz", **arrays)
    path.unlink()


SIZES = {
    "float64": np.array([64.0, 64.0]),
    "three": np.array([64, 64, 3]),
    "nothing": np.array([0, 64]),
    "negative": np.array([-64, 64], np.int16),
    "flag": np.array([True, True]),
    "huge": np.array([2**63, 64], np.uint64),
}


@pytest.mark.parametrize("size", SIZES)
def test_an_older_file_of_sd_scripts_whose_size_makes_no_sense_is_taken_without_it(data, store, size):
    write_older(data, SIZES[size])
    bring("sd-scripts", data, store, data, family="sdxl", encode=["latents"])
    assert cs.CachedDataset(store)[0]["original_size"].tolist() == [64, 64]


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint64])
def test_the_size_in_an_older_file_of_sd_scripts_is_read_in_any_whole_number(data, store, kind):
    write_older(data, np.array([32, 48], kind))
    report = bring("sd-scripts", data, store, data, family="sdxl", encode=["latents"])
    assert "32 x 48" in failures_of(report, "latents")[BIRD.reference]


# Files under a name that is not their own


def test_latents_of_ai_toolkit_that_say_another_pictures_name_are_not_taken(data, store):
    write_ai_toolkit(data, "flux")
    mine, others = (aitk_paths(data, picture, "flux")[0] for picture in (FOX, OTHER))
    shutil.copy(others, mine.with_name(others.name.replace("three.v2_", "one_")))
    mine.unlink()
    report = bring("ai-toolkit", data, store, data, encode=["latents"])
    assert failures_of(report, "latents").keys() == {FOX.reference}
    assert "says it is of 'three.v2.png'" in failures_of(report, "latents")[FOX.reference]


def test_latents_of_ai_toolkit_of_the_mirrored_picture_alone_are_not_the_pictures(data, store):
    write_ai_toolkit(data, "flux")
    plain, mirrored = (aitk_paths(data, BIRD, "flux", is_flipped=is_flipped)[0] for is_flipped in (False, True))
    stated = {name: json.dumps(value) for name, value in (aitk_info(BIRD, "flux") | {"flip_x": True}).items()}
    save_file({"latent": load_file(plain)["latent"].flip(-1).contiguous()}, mirrored, metadata=stated)
    plain.unlink()
    report = bring("ai-toolkit", data, store, data, encode=["latents"])
    assert failures_of(report, "latents").keys() == {BIRD.reference}
    assert "mirrored" in failures_of(report, "latents")[BIRD.reference]


def write_more(data, picture, latent, **stated):
    """One more file of ai-toolkit's, of this size."""
    info = aitk_info(dataclasses.replace(picture, latent=latent), "flux") | stated
    path = aitk_paths(data, picture, "flux")[0].with_name(f"{picture.stem}_{aitk_hash(info)}.safetensors")
    latents = trainers.noise(str(info), shape=(16, *latent))
    save_file({"latent": latents}, path, metadata={name: json.dumps(value) for name, value in info.items()})
    return latents


def test_of_several_resolutions_that_ai_toolkit_cached_of_a_picture_the_largest_counts(data, store):
    """Its example configuration has three, and with mirrored pictures each has two files."""
    write_ai_toolkit(data, "flux")
    write_more(data, BIRD, (4, 4))
    largest = write_more(data, BIRD, (16, 16))
    write_more(data, BIRD, (16, 16), flip_x=True)
    report = bring("ai-toolkit", data, store, data, encode=["latents"])
    assert (report.complete, report.unmatched[:-3]) == (True, ())
    assert report.remarks == ("1 picture (two.png) has latents of several resolutions; the largest are imported",)
    assert equal(latents_by_sample(store)["two.png"], largest)


def test_of_two_latents_of_ai_toolkit_of_one_size_that_were_cut_otherwise_none_is_taken(data, store):
    write_ai_toolkit(data, "flux")
    write_more(data, BIRD, BIRD.latent, crop_x=1)
    report = bring("ai-toolkit", data, store, data, encode=["latents"])
    assert failures_of(report, "latents").keys() == {BIRD.reference}
    assert "and have the same size: keep only the right one" in failures_of(report, "latents")[BIRD.reference]


def test_of_several_resolutions_that_diffusion_pipe_cached_of_a_picture_the_largest_counts(tmp_path, data, store):
    write_diffusion_pipe(tmp_path / "flux")
    larger = trainers.noise("larger", shape=(16, 16, 16), dtype=torch.bfloat16)
    spec = (None, f"/elsewhere/data/{BIRD.reference}")
    item = {"latents": larger, "mask": None, "image_spec": spec, "caption": [BIRD.caption]}
    write_shards(tmp_path / "flux" / "cache_128x128x1" / "latents", [item])
    assert bring("diffusion-pipe", tmp_path / "flux", store, data).complete
    assert equal(latents_by_sample(store)["two.png"], larger)


def test_where_all_latents_may_be_several_files_the_reason_is_given_once_and_for_each(data, store):
    pictures = [trainers.Picture(f"{number}.png", "a fish", (64, 64), (8, 8)) for number in range(4)]
    data = trainers.make_source(data / "many", pictures)
    write_sd_scripts(data, "flux", pictures)
    for picture in pictures:
        path = sd_latents_path(data, picture, "flux")
        shutil.copy(path, path.with_name(path.name.replace("0064x0064", "0032x0032")))
    report = bring("sd-scripts", data, store, data, encode=["latents"])
    assert failures_of(report, "latents").keys() == {picture.reference for picture in pictures}
    assert all("keep only the right one" in reason for reason in failures_of(report, "latents").values())
    assert [remark.partition(")")[0] for remark in report.remarks] == ["latents of 4 pictures (0.png, 1.png, 2.png, …"]


def test_of_two_latents_that_simpletuner_named_for_one_picture_the_newer_name_counts(tmp_path, data, store):
    """SimpleTuner itself looks for the digest alone since names are digests."""
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    torch.save(trainers.latents_of(FOX, "sdxl") + 1, tmp_path / "vae" / "two.pt")
    assert bring("simpletuner", tmp_path / "vae", store, data, family="sdxl").unmatched == ("two.pt",)
    assert equal(latents_by_sample(store)["two.png"], trainers.latents_of(BIRD, "sdxl", torch.bfloat16))


def test_of_several_latents_of_one_picture_in_simpletuners_folders_none_is_taken(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    shutil.copytree(tmp_path / "vae", tmp_path / "vae" / "vae")
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl", encode=["latents"])
    assert failures_of(report, "latents").keys() == {picture.reference for picture in PICTURES}
    assert any("keep only the right one" in remark for remark in report.remarks)


def test_a_folder_of_pictures_named_as_an_export_names_latents_pairs_nobody_wrongly(tmp_path, data, store):
    """`vae/` may be the source's own folder, or the one in which an export puts latents of all."""
    inner = write_one(data, "vae/two.png")
    write_simpletuner(tmp_path / "cache" / "text", tmp_path / "cache" / "vae", "sdxl")
    report = bring("simpletuner", tmp_path / "cache", store, data, family="sdxl", encode=["latents"])
    assert inner.reference in failures_of(report, "latents")
    assert "two.png" in failures_of(report, "latents")
    assert any("two.png or vae/two.png, so it is not used" in remark for remark in report.remarks)


@pytest.mark.parametrize("kind", ["sd-scripts", "ai-toolkit"])
@pytest.mark.parametrize("outer", ["source", "cache"])
def test_a_cache_beside_pictures_is_not_taken_from_a_folder_above_or_below_the_source(tmp_path, data, store, kind, outer):
    """`two.png` is at the top, and another of its name in a folder: relative to the wrong folder one has the other's name."""
    write_one(data, "a/two.png")
    inner = [trainers.Picture("two.png", BIRD.caption, BIRD.size, BIRD.latent)]
    {"sd-scripts": write_sd_scripts, "ai-toolkit": write_ai_toolkit}[kind](data / "a", "flux", inner)
    folder, source = (data / "a", data) if outer == "source" else (data, data / "a")
    if outer == "cache":
        {"sd-scripts": write_sd_scripts, "ai-toolkit": write_ai_toolkit}[kind](data, "flux", inner)
    with pytest.raises(BadInput, check=asks_for("folder", data / "a", f"{folder} as data")):
        bring(kind, folder, store, source, encode=["latents"])
    assert not store.exists()


def test_a_manifest_is_not_told_to_be_a_folder_of_pictures(data, store):
    write_sd_scripts(data / "a", "flux", [trainers.Picture("two.png", BIRD.caption, BIRD.size, BIRD.latent)])
    write_one(data, "a/two.png")
    with pytest.raises(BadInput, check=asks_for("folder", data)):
        bring("sd-scripts", data / "a", store, write_rows(data, ["one", "two", "three"]))


def test_an_older_name_of_sd_scripts_that_is_another_pictures_newer_one_is_nobodys(data, store):
    """`two_0064x0064_sdxl.npz` is of `two.png` by the newer rule, and of a picture of that very name by the older one."""
    write_one(data, "two_0064x0064_sdxl.png")
    write_sd_scripts(data, "sdxl")
    report = bring("sd-scripts", data, store, data, encode=["latents"])
    assert failures_of(report, "latents").keys() == {"two.png", "two_0064x0064_sdxl.png"}
    assert any("two.png or two_0064x0064_sdxl.png, so it is not used" in remark for remark in report.remarks)


# Paths of another machine


def test_a_value_of_diffusion_pipe_from_a_folder_that_the_source_lacks_is_not_its_namesakes(tmp_path, data, store):
    """`b/two.png` was cached, and is gone; `two.png`, which was not, has the end of its path."""
    write_diffusion_pipe(tmp_path / "flux", pictures=[FOX, dataclasses.replace(BIRD, reference="b/two.png"), OTHER])
    report = bring("diffusion-pipe", tmp_path / "flux", store, data)
    assert failures_of(report, "latents").keys() == {"two.png"}
    assert "3 values are of pictures that the source does not have" in report.remarks


def test_values_of_diffusion_pipe_come_from_wherever_the_source_lay(tmp_path, data, store):
    """All of it from a folder of a folder: nothing says that the source lay higher up."""
    moved = [dataclasses.replace(picture, reference=f"deep/down/{picture.reference}") for picture in PICTURES]
    write_diffusion_pipe(tmp_path / "flux", pictures=moved)
    assert bring("diffusion-pipe", tmp_path / "flux", store, data).complete


def test_a_note_of_simpletuner_from_a_folder_that_the_source_lacks_says_nothing_of_its_namesake(tmp_path, data, store):
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl")
    bring("simpletuner", tmp_path / "vae", store, data, family="sdxl", name="without")
    write_st_sizes(data, "train", [FOX, dataclasses.replace(BIRD, reference="b/two.png"), OTHER])
    assert bring("simpletuner", tmp_path / "vae", store, data, family="sdxl").complete
    one, other = (cs.CachedDataset(store, name) for name in ("train", "without"))
    crops = [data_set[data_set.index("two.png")]["crop_top_left"].tolist() for data_set in (one, other)]
    assert crops[0] == crops[1] != [3, 10]


def test_a_note_of_simpletuner_that_may_be_of_two_pictures_leaves_neither_with_a_crop_that_nobody_knows(tmp_path, store):
    pictures = [trainers.Picture(reference, "a fish", (64, 64), (8, 8)) for reference in ("0.png", "512/0.png", "1.png")]
    data = trainers.make_source(tmp_path / "two", pictures)
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", pictures)
    write_st_sizes(data, "train", pictures[:1], root="/old/512")
    report = bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    assert failures_of(report, "latents").keys() == {"0.png", "512/0.png"}
    assert "may be of 512/0.png or 0.png, so nothing is taken" in failures_of(report, "latents")["0.png"]
    assert any("1 path of" in remark and "may be of 512/0.png or 0.png" in remark for remark in report.remarks)
    assert bring("simpletuner", tmp_path / "text", store, data, family="sdxl", name="text").complete


def test_values_of_diffusion_pipe_that_may_be_of_two_pictures_are_not_said_to_be_of_pictures_that_lack(tmp_path, store):
    pictures = [trainers.Picture(reference, reference, (64, 64), (8, 8)) for reference in ("0.png", "512/0.png")]
    data = trainers.make_source(tmp_path / "two", pictures)
    write_diffusion_pipe(tmp_path / "flux", pictures=pictures[1:])
    report = bring("diffusion-pipe", tmp_path / "flux", store, data)
    for encoder in ("text", "latents"):
        assert failures_of(report, encoder).keys() == {"0.png", "512/0.png"}
        assert all("may be of 512/0.png or 0.png" in reason for reason in failures_of(report, encoder).values())
    assert not any("does not have" in remark for remark in report.remarks)


# Captions that changed, or that several pictures have


def test_of_several_texts_of_one_caption_one_that_is_older_than_its_caption_does_not_count(data, store):
    """The first picture's caption became what the second's was all the time: its file is of what it was before."""
    write_sd_scripts(data, "flux")
    (data / "a" / "one.txt").write_text(BIRD.caption, encoding="utf-8")
    path = data / "a" / "one_flux_te.npz"
    os.utime(path, (path.stat().st_mtime - 60,) * 2)
    report = bring("sd-scripts", data, store, data)
    assert (report.complete, report.stale) == (True, ("a/one_flux_te.npz",))
    assert texts_of(store, BIRD.caption) == [True, True]


def test_files_of_one_caption_are_told_apart_without_comparing_each_with_all(tmp_path, store, monkeypatch):
    """A trigger word alone may be the caption of every picture."""
    pictures = [trainers.Picture(f"{number:02}.png", "a fish", (64, 64), (8, 8)) for number in range(20)]
    data = trainers.make_source(tmp_path / "many", pictures)
    write_sd_scripts(data, "flux", pictures)
    for picture in pictures[::2]:
        os.utime(data / f"{picture.stem}_flux_te.npz", (1e9, 1e9))
    compared: list[FileLocation] = []
    monkeypatch.setattr(FileLocation, "__eq__", lambda self, other: compared.append(self) or self is other)
    report = bring("sd-scripts", data, store, data)
    assert (report.complete, len(report.stale)) == (True, 10)
    assert len(compared) <= len(pictures)


def write_rows(data, captions):
    """A manifest in which these pictures have these captions, beside no files of captions."""
    rows = [{"image": picture.reference, "caption": caption} for picture, caption in zip(PICTURES, captions, strict=True)]
    (data / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return data / "rows.jsonl"


def test_of_two_texts_of_one_caption_that_differ_nobody_gets_either(data, store):
    """The first picture's caption was another when it was cached, and nothing tells that."""
    write_sd_scripts(data, "flux")
    report = bring("sd-scripts", data, store, write_rows(data, [BIRD.caption, BIRD.caption, OTHER.caption]), encode=["text"])
    failed = failures_of(report, "text")
    assert failed.keys() == {FOX.reference, BIRD.reference}
    assert "a/one_flux_te.npz and two_flux_te.npz all belong to its caption, but hold different values" in failed[FOX.reference]


@pytest.mark.parametrize("off", [0.0, 0.01])
def test_of_three_texts_of_one_caption_the_two_that_agree_up_to_rounding_count(data, store, off):
    write_sd_scripts(data, "flux", [FOX, BIRD, dataclasses.replace(OTHER, caption=BIRD.caption)])
    path = data / "two_flux_te.npz"
    arrays = dict(np.load(path))
    np.savez(path, **{name: value * (1 + off) if name in {"t5_out", "l_pooled"} else value for name, value in arrays.items()})
    assert bring("sd-scripts", data, store, write_rows(data, [BIRD.caption] * 3), encode=["text"]).complete
    assert texts_of(store, BIRD.caption) == [True] * 3


def test_of_several_texts_of_one_caption_one_that_says_it_is_of_another_does_not_count(tmp_path, data, store):
    write_musubi(tmp_path / "cache", "flux")
    (data / "a" / "one.txt").write_text(BIRD.caption, encoding="utf-8")
    assert bring("musubi", tmp_path / "cache", store, data).complete
    assert texts_of(store, BIRD.caption, musubi_text(BIRD, "flux", torch.float32)) == [True, True]


def test_text_of_diffusion_pipe_beside_latents_that_say_another_caption_is_not_taken(tmp_path, data, store):
    write_diffusion_pipe(tmp_path / "flux")
    (data / "two.txt").write_text("a caption that was edited")
    report = bring("diffusion-pipe", tmp_path / "flux", store, data)
    assert failures_of(report, "text").keys() == {"two.png"}
    assert "ein grüner Vogel" in failures_of(report, "text")["two.png"]
    assert failures_of(report, "latents") == {}


@pytest.mark.parametrize(("stated", "is_taken"), [("one", True), (["one", "other"], True), (["another", "other"], False), ([], True)])
def test_text_of_diffusion_pipe_is_taken_where_its_latents_name_no_caption_or_the_pictures_too(stated, is_taken):
    location = FileLocation("cache/latents/shard_0.bin")
    values = {f"caption.{number}": one for number, one in enumerate(stated)} if isinstance(stated, list) else {"caption": stated}
    items = [
        diffusion_pipe.Item(location, {"image_spec.1": "/x/1.png", **values}),
        diffusion_pipe.Item(FileLocation("cache/text_embeddings_1/shard_0.bin"), {"image_spec.1": "/x/1.png"}),
    ]
    matches = Matches(None)
    diffusion_pipe.match_items(items, [Sample("1", {"image": ("1.png",)}, ("one",))], matches)
    assert ("one" in matches.text, "one" in matches.doubtful) == (is_taken, not is_taken)


# What is kept, and handed out by no data set


def test_an_import_says_what_of_a_file_no_data_set_hands_out(tmp_path, data, store):
    write_sd_scripts(data, "flux")
    stated = [remark for remark in bring("sd-scripts", data, store, data).remarks if "data sets do not return" in remark]
    assert len(stated) == 2
    assert any(remark.startswith("alpha_mask of 3 pictures") and "for masks in training" in remark for remark in stated)
    assert any(remark.startswith("latents_flipped of 3 pictures") for remark in stated)


def test_controls_and_further_resolutions_that_are_kept_are_reported_too(tmp_path, data, store):
    write_musubi(tmp_path / "cache", "flux", [FOX])
    report = bring("musubi", tmp_path / "cache", store, data)
    assert ["latents_control of 1 picture" in remark for remark in report.remarks if "data sets do not return" in remark] == [True]
    write_sd_scripts(data, "flux", [FOX], is_flipped=False)
    path = sd_latents_path(data, FOX, "flux")
    np.savez(path, **np.load(path), latents_2x4=np.ones((16, 2, 4), np.float32))
    report = bring("sd-scripts", data, tmp_path / "other", data)
    assert ["latents of 1 picture" in remark for remark in report.remarks if "data sets do not return" in remark] == [True]


def test_a_table_of_diffusion_pipe_with_names_that_are_no_utf8_is_refused(tmp_path):
    """SQLite names such a table in its error, which Python cannot decode."""
    write_diffusion_pipe(tmp_path / "flux")
    for table in tmp_path.rglob("metadata.db"):
        table.write_bytes(table.read_bytes().replace(b"CREATE TABLE shard", b"CREATE TABLX shard").replace(b"shard_0", b"shard_\xf3"))
        with pytest.raises(EncodeFailed):
            diffusion_pipe.locations_in(tmp_path, str(table.relative_to(tmp_path)))
