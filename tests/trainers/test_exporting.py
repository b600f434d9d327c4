"""Export: what each trainer's reader takes, bit for bit or by the stated cast; nobody's file is overwritten."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.cli import ERROR, FAILURES, NO_STORE, OK, main
from cachestore.core.errors import BadInput
from cachestore.trainers.export_target import NOTE
from tests.fakes import asks_for
from tests.train import stores
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_hash, read_ai_toolkit, write_ai_toolkit
from tests.trainers.caches import bring, equal, send
from tests.trainers.musubi.files import read_musubi, write_musubi
from tests.trainers.sd_scripts.files import read_sd_scripts, sd_latents_path, write_sd_scripts
from tests.trainers.simpletuner.files import read_simpletuner, st_latents_path, st_text, st_text_path, write_simpletuner
from tests.trainers.trainers import PICTURES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

SCALES = {"sdxl": (0.13025, 0.0), "sd3": (1.5305, 0.0609), "flux": (0.3611, 0.1159)}


def bucket(picture):
    return 8 * picture.latent[1], 8 * picture.latent[0]


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_sd_scripts_takes_back_what_it_had_cached_bit_for_bit(data, store, out, family):
    write_sd_scripts(data, family)
    bring("sd-scripts", data, store, data)
    report = send("sd-scripts", store, out)
    assert (report.complete, report.written, report.casts) == (True, 6, ())
    for picture in PICTURES:
        before = read_sd_scripts(data, picture, family, bucket(picture))
        for was, now in zip(before, read_sd_scripts(out, picture, family, bucket(picture)), strict=True):
            assert was.keys() == now.keys()
            assert all(was[name].dtype == now[name].dtype and np.array_equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_simpletuner_takes_back_what_it_had_cached_bit_for_bit(tmp_path, data, store, out, family):
    text, vae = tmp_path / "cache" / "text", tmp_path / "cache" / "vae"
    write_simpletuner(text, vae, family)
    bring("simpletuner", text, store, data)
    bring("simpletuner", vae, store, data, family=family)
    report = send("simpletuner", store, out)
    assert (report.complete, report.casts) == (True, ())
    for picture in PICTURES:
        latents, record = read_simpletuner(out / "text", out / "vae", picture, family)
        was, reported = read_simpletuner(text, vae, picture, family)
        assert equal(latents, was)
        assert record.keys() == reported.keys()
        assert all(equal(record[name], reported[name]) for name in reported)
    known = json.loads((out / "aspect_ratio_bucket_metadata_train.json").read_text())
    assert known[str(data / "two.png")]["original_size"] == [64, 64]


def test_simpletuner_gets_the_empty_caption_to_which_it_drops_others(tmp_path, data, store, out):
    (data / "a" / "three.v2.png").unlink()  # the picture without a caption
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", PICTURES[:2])
    bring("simpletuner", tmp_path / "text", store, data)
    assert send("simpletuner", store, out).written == 3
    record = torch.load(st_text_path(out / "text", "", "sdxl"), weights_only=True)
    assert equal(record["prompt_embeds"], st_text("", "sdxl")["prompt_embeds"])


@pytest.mark.parametrize("family", ["flux", "wan", "qwen-image", "z-image"])
def test_musubi_takes_back_what_it_had_cached_bit_for_bit(tmp_path, data, store, out, family):
    write_musubi(tmp_path / "cache", family, dtype=torch.bfloat16)
    bring("musubi", tmp_path / "cache", store, data)
    report = send("musubi", store, out)
    assert (report.complete, report.casts) == (True, ())
    for picture in PICTURES:
        for was, now in zip(read_musubi(tmp_path / "cache", picture, family), read_musubi(out, picture, family), strict=True):
            assert was.keys() == now.keys()
            assert all(equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_ai_toolkit_takes_back_what_it_had_cached_bit_for_bit(data, store, out, family):
    write_ai_toolkit(data, family)
    bring("ai-toolkit", data, store, data)
    report = send("ai-toolkit", store, out)
    assert (report.complete, report.casts) == (True, ())
    for picture in PICTURES:
        for was, now in zip(read_ai_toolkit(data, picture, family), read_ai_toolkit(out, picture, family), strict=True):
            assert was.keys() == now.keys()
            assert all(equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_scaling_is_converted_and_the_report_says_how(data, store, out, family):
    """sd-scripts keeps SDXL and SD3 raw, ai-toolkit keeps all scaled; of FLUX both are scaled, so nothing changes."""
    write_sd_scripts(data, family, is_flipped=False)
    bring("sd-scripts", data, store, data)
    report = send("ai-toolkit", store, out)
    scale, shift = SCALES[family]
    for picture in PICTURES:
        latents = read_ai_toolkit(out, picture, family)[0]["latent"]
        raw = trainers.latents_of(picture, family)
        assert torch.equal(latents, raw if family == "flux" else (raw - shift) * scale)
    assert report.casts == (
        () if family == "flux" else ("latents: they are normalised, as this trainer has them; computed in float32 and rounded to F32",)
    )


def test_undoing_a_scale_gives_the_raw_latents_up_to_rounding(data, store, out):
    write_ai_toolkit(data, "sdxl", dtype=torch.float32)
    bring("ai-toolkit", data, store, data)
    report = send("sd-scripts", store, out)
    latents, text = read_sd_scripts(out, PICTURES[0], "sdxl", bucket(PICTURES[0]))
    assert np.allclose(latents["latents"] * np.float32(0.13025), trainers.latents_of(PICTURES[0], "sdxl").numpy(), rtol=1e-6)
    assert np.array_equal(text["hidden_state1"], trainers.text_of(PICTURES[0].caption, "sdxl")["prompt"][:, :768].numpy())
    assert report.casts == ("latents: they are not normalised, as this trainer has them; computed in float32 and rounded to F32",)


def test_bfloat16_becomes_float32_in_npz_and_that_is_reported(data, store, out):
    write_ai_toolkit(data, "flux")
    bring("ai-toolkit", data, store, data)
    report = send("sd-scripts", store, out)
    latents, text = read_sd_scripts(out, PICTURES[0], "flux", bucket(PICTURES[0]))
    assert torch.equal(torch.from_numpy(latents["latents_6x8"]), trainers.latents_of(PICTURES[0], "flux", torch.bfloat16).float())
    assert torch.equal(torch.from_numpy(text["t5_out"]), trainers.text_of(PICTURES[0].caption, "flux", torch.bfloat16)["prompt"].float())
    assert all("BF16 as F32" in cast for cast in report.casts)
    assert {cast.partition(":")[0] for cast in report.casts} == {"latents", "prompt_embeds", "pooled_prompt_embeds"}


@pytest.mark.parametrize(
    ("text", "digested"), [("cat, looking up\n", "cat,  looking up\n"), ("one, two \r\n", "one,  two \n"), ("\n", "\n"), ("", "")]
)
def test_ai_toolkit_finds_text_by_the_caption_file_as_it_reads_it(data, store, out, text, digested):
    """The store has captions without the white space around them; another trainer's cache of the same pictures is exported."""
    (data / "two.txt").write_bytes(text.encode())
    pictures = [PICTURES[0], replace(PICTURES[1], caption=text.strip()), PICTURES[2]]
    write_sd_scripts(data, "flux", pictures, is_flipped=False)
    bring("sd-scripts", data, store, data)
    report = send("ai-toolkit", store, out)
    assert report.failures == ()
    info = {"caption": digested, "text_embedding_space_version": "flux", "text_embedding_version": 1}
    assert (out / "_t_e_cache" / f"two_{aitk_hash(info)}.safetensors").is_file()
    assert not any("captions have no caption file here" in remark for remark in report.remarks)


def test_captions_whose_files_say_other_words_now_are_counted_and_end_with_3(data, store, out, capsys):
    write_sd_scripts(data, "flux", is_flipped=False)
    bring("sd-scripts", data, store, data, encode=["text"])
    (data / "two.txt").write_text("a caption that was edited")
    (data / "a" / "one.txt").unlink()
    assert main(["export", str(store), "--format", "ai-toolkit", "-o", str(out)]) == FAILURES
    words = capsys.readouterr().out
    assert "ai-toolkit reads other text from the files of 1 caption, and encodes that again itself (two.png)" in words
    assert "1 caption has no caption file here" in words


@pytest.mark.parametrize("options", [{}, {"trigger_word": "sks"}])
def test_a_cache_of_ai_toolkit_with_a_trigger_word_goes_back_under_its_names(data, store, out, options):
    trigger = f"{options['trigger_word']} " if options else ""
    (data / "two.txt").write_text("a bird,\n")
    encoded = [trigger + text for text in (PICTURES[0].caption, "a bird,\n", "")]
    pictures = [replace(one, caption=text) for one, text in zip(PICTURES, encoded, strict=True)]
    write_ai_toolkit(data, "flux", pictures)
    bring("ai-toolkit", data, store, data, **options)
    assert send("ai-toolkit", store, out).complete
    for picture in pictures:
        read_ai_toolkit(out, picture, "flux")


def test_a_cache_of_simpletuner_with_white_space_in_captions_goes_back_under_its_names(tmp_path, data, store, out):
    for picture, text in zip(PICTURES, [" a cat \r\n", "a dog  ", "a bird\n"], strict=True):
        (data / f"{picture.stem}.txt").write_bytes(text.encode())
    pictures = [replace(one, caption=text) for one, text in zip(PICTURES, [" a cat \r", "a dog  ", "a bird"], strict=True)]
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", pictures)
    bring("simpletuner", tmp_path / "text", store, data)
    assert send("simpletuner", store, out).complete
    assert {path.name for path in (out / "text").iterdir()} == {path.name for path in (tmp_path / "text").iterdir()}


def test_latents_of_qwen_image_go_back_to_simpletuner_without_an_axis_of_frames(tmp_path, data, store, out):
    for picture in PICTURES:
        path = st_latents_path(tmp_path / "vae", picture)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trainers.latents_of(picture, "qwen-image"), path)
    bring("simpletuner", tmp_path / "vae", store, data, family="qwen-image")
    assert send("simpletuner", store, out).complete
    for picture in PICTURES:
        now = torch.load(st_latents_path(out / "vae", picture), weights_only=True)
        assert equal(now, trainers.latents_of(picture, "qwen-image"))


@pytest.mark.parametrize(
    ("size", "latent", "crop"),
    [
        ((384, 255), (48, 80), [30, 0, 30 + 384 * 384 / 255, 384]),
        ((384, 384), (64, 64), [0, 0, 512, 512]),
        ((600, 1000), (152, 104), [51, 0, 51 + 1216 * 0.6, 1216]),
        ((900, 1600), (160, 96), [24, 0, 744, 1280]),
    ],
)
def test_crop_ltrb_is_in_pixels_of_the_bucket_as_sd_scripts_notes_it(tmp_path, data, store, out, size, latent, crop):
    """Where the picture would lie inside of its bucket: what is right of it is what is left of its mirrored side."""
    picture = trainers.Picture("large.png", "", size, latent)
    trainers.make_source(data, [picture])
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", [picture])
    bring("simpletuner", tmp_path / "vae", store, data, family="sdxl")
    send("sd-scripts", store, out)
    npz = np.load(sd_latents_path(out, picture, "sdxl"))
    assert npz["crop_ltrb"].dtype == np.float64
    assert np.allclose(npz["crop_ltrb"], crop)
    assert npz["original_size"].tolist() == list(size)


@pytest.mark.parametrize("stored", ["moments", "mean", "sample"])
def test_what_precompute_made_is_exported_as_a_training_would_see_it(tmp_path, out, stored):
    """A store of ours: raw moments, a mean or a sample, of which SimpleTuner keeps one normalised sample."""
    made = stores.recipes(stores.FLUX, stored, scaling_factor=0.3611, shift_factor=0.1159)
    made = replace(made, text=None, latents=replace(made.latents, make={**made.latents.make, "family": "flux"}))
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png"), stores.Row("b/c.png")], made)
    report = send("simpletuner", store, out)
    assert (report.complete, report.written) == (True, 4)
    for sample in cs.CachedDataset(store, seed=0):
        picture = trainers.Picture(sample["sample_id"], "", (640, 480), (6, 8))
        latents = torch.load(st_latents_path(out / "vae", picture), weights_only=True)
        assert torch.allclose(latents, sample["latents"], rtol=0, atol=1e-6)
    assert any(stored in cast for cast in report.casts) == (stored != "sample")


def test_latents_alone_are_of_the_only_family_with_their_constants_or_of_the_one_that_is_given(tmp_path, out):
    made = stores.recipes(None, "sample", scaling_factor=0.13025, shift_factor=None)
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png")], made)
    send("sd-scripts", store, out)
    assert [path.name for path in out.glob("*.npz")] == ["a_0640x0480_sdxl.npz"]
    made = stores.recipes(None, "sample", scaling_factor=0.5, shift_factor=None)
    store = stores.make_store(tmp_path / "others", [stores.Row("a.png")], made)
    with pytest.raises(BadInput, check=asks_for("family")):
        send("sd-scripts", store, out)
    assert send("sd-scripts", store, out, family="sd15").written == 1


def test_a_second_export_writes_nothing_and_a_third_what_is_missing(data, store, out):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    send("sd-scripts", store, out)
    report = send("sd-scripts", store, out)
    assert (report.written, report.unchanged) == (0, 6)
    (out / "two_flux_te.npz").unlink()
    report = send("sd-scripts", store, out)
    assert (report.written, report.unchanged) == (1, 5)
    assert not [path for path in out.rglob("*") if path.name.endswith("cachestore-tmp")]


def test_a_strangers_file_is_left_alone_until_replacing_is_asked_for(data, store, out):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    out.mkdir()
    (out / "two_flux_te.npz").write_bytes(b"a stranger's")
    report = send("sd-scripts", store, out)
    assert (report.complete, report.foreign, report.written) == (False, ("two_flux_te.npz",), 5)
    assert (out / "two_flux_te.npz").read_bytes() == b"a stranger's"
    assert send("sd-scripts", store, out, replace=True).complete
    read_sd_scripts(out, PICTURES[1], "flux", bucket(PICTURES[1]))


def test_what_an_earlier_export_wrote_is_brought_up_to_date(data, store, out):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    send("sd-scripts", store, out)
    path = sd_latents_path(data, PICTURES[0], "flux")
    arrays = dict(np.load(path))
    np.savez(path, **{name: value + 1 if name.startswith("latents_6") else value for name, value in arrays.items()})
    bring("sd-scripts", data, store, data)
    report = send("sd-scripts", store, out)
    assert (report.complete, report.written, report.unchanged) == (True, 1, 5)


def test_a_damaged_note_makes_every_other_file_a_strangers(data, store, out):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    send("sd-scripts", store, out)
    (out / NOTE).write_text("{")
    (out / "two_flux_te.npz").write_bytes(b"edited")
    assert send("sd-scripts", store, out).foreign == ("two_flux_te.npz",)


def test_text_that_is_not_all_of_the_familys_is_a_failure_of_its_sample(tmp_path, out):
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png")], stores.recipes(stores.FLUX, None))
    report = send("sd-scripts", store, out, family="sdxl")
    assert [(one["sample"], one["encoder"]) for one in report.failures] == [("a.png", "text")]
    assert "needs prompt_embeds.text_encoder" in report.failures[0]["reason"]


def test_an_empty_data_set_exports_nothing(tmp_path, out):
    store = stores.make_store(tmp_path / "store", [], stores.recipes(stores.FLUX, None))
    report = send("sd-scripts", store, out, family="flux")
    assert (report.complete, report.samples, report.written) == (True, 0, 0)


def test_pictures_that_would_share_a_file_are_named(tmp_path, data, store, out):
    """musubi's folder is flat."""
    write_ai_toolkit(data, "flux")
    (data / "b").mkdir()
    pictures = [replace(PICTURES[1], reference="b/two.png", caption="another")]
    trainers.make_source(data, pictures)
    write_ai_toolkit(data, "flux", pictures)
    bring("ai-toolkit", data, store, data)
    report = send("musubi", store, out)
    texts = [failure for failure in report.failures if failure["encoder"] == "text"]
    assert [failure["sample"] for failure in texts] == ["two.png"]
    assert "'b/two.png'" in texts[0]["reason"]
    assert report.written == 3


def test_text_that_has_no_files_in_a_format_is_left_out_and_named_and_latents_are_written(tmp_path, data, store, out):
    write_musubi(tmp_path / "cache", "z-image")
    bring("musubi", tmp_path / "cache", store, data)
    report = send("simpletuner", store, out)
    assert report.complete
    assert len([path for path in out.rglob("*.pt") if "vae" in path.parts]) == len(list(out.rglob("*.pt"))) == len(PICTURES)
    (text,) = report.left_out
    assert "simpletuner's files" in text
    assert "not of z-image" in text


@pytest.mark.parametrize(("kind", "family"), [("ltx", "ltx2"), ("musubi", "hunyuanvideo"), ("simpletuner", "flux"), ("sd-scripts", "sd15")])
def test_latents_of_one_family_are_not_written_as_those_of_another_that_was_named(tmp_path, data, store, out, kind, family):
    write_musubi(tmp_path / "cache", "wan")
    bring("musubi", tmp_path / "cache", store, data)
    with pytest.raises(BadInput, check=asks_for("family")):
        send(kind, store, out, family=family)
    assert not out.exists()
    assert send("musubi", store, out, family="wan").complete


@pytest.mark.parametrize(("family", "is_right"), [("flux", True), ("z-image", True), ("sd3", False), ("flux2", False), ("wan", False)])
def test_a_named_family_must_have_the_vae_of_latents_that_do_not_say_their_family(tmp_path, out, family, is_right):
    made = stores.recipes(None, "sample", scaling_factor=0.3611, shift_factor=0.1159)
    made = replace(made, latents=replace(made.latents, read={**made.latents.read, "channels": 16}))
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png")], made)
    with nullcontext() if is_right else pytest.raises(BadInput, check=asks_for("family")):
        assert send("simpletuner", store, out, family=family).written


def test_latents_that_fit_several_models_are_refused_with_the_lines_to_run(tmp_path, out):
    made = stores.recipes(None, "sample", scaling_factor=0.3611, shift_factor=0.1159)
    made = replace(made, latents=replace(made.latents, read={**made.latents.read, "channels": 16}))
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png")], made)
    line = f"cachestore export {store} --name train --format ai-toolkit -o {out} --family"
    with pytest.raises(BadInput, check=asks_for("family", f"`{line} flux`", f"`{line} z-image`")):
        send("ai-toolkit", store, out)
    assert not out.exists()


def test_where_nothing_but_such_text_is_there_nothing_is_exported(tmp_path, data, store, out):
    write_musubi(tmp_path / "cache", "z-image")
    bring("musubi", tmp_path / "cache", store, data, encode=["text"])
    with pytest.raises(BadInput):
        send("simpletuner", store, out)
    assert not out.exists()


def test_a_path_that_leads_out_of_the_folder_is_refused(tmp_path, out):
    made = stores.recipes(None, "sample", scaling_factor=0.3611, shift_factor=0.1159)
    made = replace(made, latents=replace(made.latents, make={**made.latents.make, "family": "flux"}))
    store = stores.make_store(tmp_path / "ours", [stores.Row("../../../a.png")], made)
    assert "leads out of" in send("simpletuner", store, out / "deep").failures[0]["reason"]
    assert not list(tmp_path.rglob("*.pt"))


def test_what_has_no_form_in_a_format_is_refused_before_anything_is_written(tmp_path, data, store, out):
    write_musubi(tmp_path / "cache", "wan")
    bring("musubi", tmp_path / "cache", store, data)
    with pytest.raises(BadInput, check=asks_for("family")):
        send("sd-scripts", store, out)
    with pytest.raises(BadInput, check=asks_for("format")):
        send("diffusion-pipe", store, out)
    with pytest.raises(
        BadInput,
        match=r"'kohya' is not known; .* is sd-scripts, simpletuner, .*, webdataset; did you mean 'sd-scripts'\?$",
    ):
        send("kohya", store, out)
    with pytest.raises(BadInput, check=asks_for("family")):
        send("musubi", store, out, family="wam")
    with pytest.raises(BadInput):
        send("musubi", store, out, name="other")
    assert not out.exists()


def test_the_command_tells_what_the_function_returns(data, store, out, capsys):
    write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    arguments = ["export", str(store), "train", "--format", "sd-scripts", "-o", str(out)]
    assert main([*arguments, "--json"]) == OK
    reported = json.loads(capsys.readouterr().out)
    assert (reported["written"], reported["complete"], reported["casts"]) == (6, True, [])
    (out / "two_flux_te.npz").write_bytes(b"edited")
    assert main(arguments) == FAILURES
    assert "two_flux_te.npz" in capsys.readouterr().out
    assert main(["export", str(store), "other", "--format", "sd-scripts", "-o", str(out)]) == ERROR
    assert main(["export", str(store / "no"), "train", "--format", "sd-scripts", "-o", str(out)]) == NO_STORE


@pytest.mark.parametrize("format", ["webdataset", "musubi", "nemo-automodel"])
def test_what_a_program_published_has_no_form_in_a_trainers_cache(store, out, format):  # noqa: A002
    with cs.open(store, mode="a") as own, own.session("dino") as session:
        session.put(bytes(16 * [1]), {"features": np.ones(2)})
        session.set("cat", dino=bytes(16 * [1]))
    with pytest.raises(BadInput, check=asks_for("name")):
        cs.export_cache(store, name="dino", format=format, folder=out)
    assert not out.exists()


@pytest.mark.parametrize(("name", "generation", "option"), [("trian", None, "name"), ("train", 2, "generation")])
def test_another_name_or_generation_than_those_that_are_there_is_refused(tmp_path, out, name, generation, option):
    store = stores.make_store(tmp_path / "store", [stores.Row("one.png", ("a fox",))], stores.recipes())
    with pytest.raises(BadInput, check=asks_for(option)):
        cs.export_cache(store, name, generation=generation, format="musubi", folder=out)
    assert not out.exists()
