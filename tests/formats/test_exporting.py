"""Export: what each trainer's reader takes, bit for bit or by the stated cast; nobody's file is overwritten."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.cli import ERROR, FAILURES, NO_STORE, OK, main
from cachestore.errors import BadInput
from cachestore.exporting import NOTE
from tests.formats import trainers
from tests.formats.caches import bring, equal, send
from tests.formats.trainers import PICTURES
from tests.loading import stores

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

SCALES = {"sdxl": (0.13025, 0.0), "sd3": (1.5305, 0.0609), "flux": (0.3611, 0.1159)}


def bucket(picture):
    return 8 * picture.latent[1], 8 * picture.latent[0]


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_sd_scripts_takes_back_what_it_had_cached_bit_for_bit(data, store, out, family):
    trainers.write_sd_scripts(data, family)
    bring("sd-scripts", data, store, data)
    report = send("sd-scripts", store, out)
    assert (report.complete, report.written, report.casts) == (True, 6, ())
    for picture in PICTURES:
        before = trainers.read_sd_scripts(data, picture, family, bucket(picture))
        after = trainers.read_sd_scripts(out, picture, family, bucket(picture))
        for was, now in zip(before, after, strict=True):
            assert was.keys() == now.keys()
            assert all(was[name].dtype == now[name].dtype and np.array_equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_simpletuner_takes_back_what_it_had_cached_bit_for_bit(tmp_path, data, store, out, family):
    text, vae = tmp_path / "cache" / "text", tmp_path / "cache" / "vae"
    trainers.write_simpletuner(text, vae, family)
    bring("simpletuner", text, store, data)
    bring("simpletuner", vae, store, data, family=family)
    report = send("simpletuner", store, out)
    assert (report.complete, report.casts) == (True, ())
    for picture in PICTURES:
        latents, record = trainers.read_simpletuner(out / "text", out / "vae", picture, family)
        was, said = trainers.read_simpletuner(text, vae, picture, family)
        assert equal(latents, was)
        assert record.keys() == said.keys()
        assert all(equal(record[name], said[name]) for name in said)
    known = json.loads((out / "aspect_ratio_bucket_metadata_train.json").read_text())
    assert known[str(data / "two.png")]["original_size"] == [64, 64]


def test_simpletuner_gets_the_empty_caption_to_which_it_drops_others(tmp_path, data, store, out):
    (data / "a" / "three.v2.png").unlink()  # the picture without a caption
    trainers.write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", PICTURES[:2])
    bring("simpletuner", tmp_path / "text", store, data)
    assert send("simpletuner", store, out).written == 3
    record = torch.load(trainers.st_text_path(out / "text", "", "sdxl"), weights_only=True)
    assert equal(record["prompt_embeds"], trainers.st_text("", "sdxl")["prompt_embeds"])


@pytest.mark.parametrize("family", ["flux", "wan", "qwen-image", "z-image"])
def test_musubi_takes_back_what_it_had_cached_bit_for_bit(tmp_path, data, store, out, family):
    trainers.write_musubi(tmp_path / "cache", family, dtype=torch.bfloat16)
    bring("musubi", tmp_path / "cache", store, data)
    report = send("musubi", store, out)
    assert (report.complete, report.casts) == (True, ())
    for picture in PICTURES:
        for was, now in zip(
            trainers.read_musubi(tmp_path / "cache", picture, family), trainers.read_musubi(out, picture, family), strict=True
        ):
            assert was.keys() == now.keys()
            assert all(equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_ai_toolkit_takes_back_what_it_had_cached_bit_for_bit(data, store, out, family):
    trainers.write_ai_toolkit(data, family)
    bring("ai-toolkit", data, store, data)
    report = send("ai-toolkit", store, out)
    assert (report.complete, report.casts) == (True, ())
    for picture in PICTURES:
        for was, now in zip(trainers.read_ai_toolkit(data, picture, family), trainers.read_ai_toolkit(out, picture, family), strict=True):
            assert was.keys() == now.keys()
            assert all(equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_scaling_is_converted_and_the_report_says_how(data, store, out, family):
    """sd-scripts keeps SDXL and SD3 raw, ai-toolkit keeps all scaled; of FLUX both are scaled, so nothing changes."""
    trainers.write_sd_scripts(data, family, is_flipped=False)
    bring("sd-scripts", data, store, data)
    report = send("ai-toolkit", store, out)
    scale, shift = SCALES[family]
    for picture in PICTURES:
        latents = trainers.read_ai_toolkit(out, picture, family)[0]["latent"]
        raw = trainers.latents_of(picture, family)
        assert torch.equal(latents, raw if family == "flux" else (raw - shift) * scale)
    assert report.casts == (() if family == "flux" else ("latents: normalised in float32, then in the stored dtype F32",))


def test_undoing_a_scale_gives_the_raw_latents_up_to_rounding(data, store, out):
    trainers.write_ai_toolkit(data, "sdxl", dtype=torch.float32)
    bring("ai-toolkit", data, store, data)
    report = send("sd-scripts", store, out)
    latents, text = trainers.read_sd_scripts(out, PICTURES[0], "sdxl", bucket(PICTURES[0]))
    assert np.allclose(latents["latents"] * np.float32(0.13025), trainers.latents_of(PICTURES[0], "sdxl").numpy(), rtol=1e-6)
    assert np.array_equal(text["hidden_state1"], trainers.text_of(PICTURES[0].caption, "sdxl")["prompt"][:, :768].numpy())
    assert report.casts == ("latents: normalising undone in float32, then in the stored dtype F32",)


def test_bfloat16_becomes_float32_in_npz_and_that_is_said(data, store, out):
    trainers.write_ai_toolkit(data, "flux")
    bring("ai-toolkit", data, store, data)
    report = send("sd-scripts", store, out)
    latents, text = trainers.read_sd_scripts(out, PICTURES[0], "flux", bucket(PICTURES[0]))
    assert torch.equal(torch.from_numpy(latents["latents_6x8"]), trainers.latents_of(PICTURES[0], "flux", torch.bfloat16).float())
    assert torch.equal(torch.from_numpy(text["t5_out"]), trainers.text_of(PICTURES[0].caption, "flux", torch.bfloat16)["prompt"].float())
    assert all("BF16 as F32" in cast for cast in report.casts)
    assert {cast.partition(":")[0] for cast in report.casts} == {"latents", "prompt_embeds", "pooled_prompt_embeds"}


@pytest.mark.parametrize("stored", ["moments", "mean", "sample"])
def test_what_precompute_made_is_exported_as_a_training_would_see_it(tmp_path, out, stored):
    """A store of ours: raw moments, a mean or a sample, of which SimpleTuner keeps one normalised sample."""
    made = stores.recipes(stores.FLUX, stored, scaling_factor=0.3611, shift_factor=0.1159)
    made = replace(made, text=None, latents=replace(made.latents, make={**made.latents.make, "family": "flux"}))
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png"), stores.Row("b/c.png")], made)
    report = send("simpletuner", store, out)
    assert (report.complete, report.written) == (True, 4)
    data = cs.CachedDataset(store, seed=0)
    for sample in data:
        picture = trainers.Picture(sample["sample_id"], "", (640, 480), (6, 8))
        latents = torch.load(trainers.st_latents_path(out / "vae", picture), weights_only=True)
        assert torch.allclose(latents, sample["latents"], rtol=0, atol=1e-6)
    assert any(stored in cast for cast in report.casts) == (stored != "sample")


def test_latents_alone_are_of_the_only_family_with_their_constants_or_of_the_one_that_is_said(tmp_path, out):
    made = stores.recipes(None, "sample", scaling_factor=0.13025, shift_factor=None)
    store = stores.make_store(tmp_path / "ours", [stores.Row("a.png")], made)
    send("sd-scripts", store, out)
    assert [path.name for path in out.glob("*.npz")] == ["a_0640x0480_sdxl.npz"]
    made = stores.recipes(None, "sample", scaling_factor=0.5, shift_factor=None)
    store = stores.make_store(tmp_path / "others", [stores.Row("a.png")], made)
    with pytest.raises(BadInput, match="pass --family"):
        send("sd-scripts", store, out)
    assert send("sd-scripts", store, out, family="sd15").written == 1


def test_a_second_export_writes_nothing_and_a_third_what_is_missing(data, store, out):
    trainers.write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    send("sd-scripts", store, out)
    report = send("sd-scripts", store, out)
    assert (report.written, report.unchanged) == (0, 6)
    (out / "two_flux_te.npz").unlink()
    report = send("sd-scripts", store, out)
    assert (report.written, report.unchanged) == (1, 5)
    assert not [path for path in out.rglob("*") if path.name.endswith("cachestore-tmp")]


def test_a_strangers_file_is_left_alone_until_replacing_is_asked_for(data, store, out):
    trainers.write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    out.mkdir()
    (out / "two_flux_te.npz").write_bytes(b"a stranger's")
    report = send("sd-scripts", store, out)
    assert (report.complete, report.foreign, report.written) == (False, ("two_flux_te.npz",), 5)
    assert (out / "two_flux_te.npz").read_bytes() == b"a stranger's"
    assert send("sd-scripts", store, out, replace=True).complete
    trainers.read_sd_scripts(out, PICTURES[1], "flux", bucket(PICTURES[1]))


def test_what_an_earlier_export_wrote_is_brought_up_to_date(data, store, out):
    trainers.write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    send("sd-scripts", store, out)
    path = trainers.sd_latents_path(data, PICTURES[0], "flux")
    arrays = dict(np.load(path))
    np.savez(path, **{name: value + 1 if name.startswith("latents_6") else value for name, value in arrays.items()})
    bring("sd-scripts", data, store, data)
    report = send("sd-scripts", store, out)
    assert (report.complete, report.written, report.unchanged) == (True, 1, 5)


def test_a_damaged_note_makes_every_other_file_a_strangers(data, store, out):
    trainers.write_sd_scripts(data, "flux")
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


def test_an_empty_data_set_exports_nothing(tmp_path, store, out):
    (tmp_path / "nothing").mkdir()
    bring("sd-scripts", tmp_path / "nothing", store, tmp_path / "nothing")
    report = send("sd-scripts", store, out)
    assert (report.complete, report.samples, report.written) == (True, 0, 0)


def test_pictures_that_would_share_a_file_are_named(tmp_path, data, store, out):
    """musubi's folder is flat."""
    trainers.write_ai_toolkit(data, "flux")
    (data / "b").mkdir()
    pictures = [replace(PICTURES[1], reference="b/two.png", caption="another")]
    trainers.make_source(data, pictures)
    trainers.write_ai_toolkit(data, "flux", pictures)
    bring("ai-toolkit", data, store, data)
    report = send("musubi", store, out)
    assert {failure["sample"] for failure in report.failures} == {"two.png"}
    assert "'b/two.png'" in report.failures[0]["reason"]
    assert report.written == 6


def test_a_path_that_leads_out_of_the_folder_is_refused(tmp_path, out):
    made = stores.recipes(None, "sample", scaling_factor=0.3611, shift_factor=0.1159)
    made = replace(made, latents=replace(made.latents, make={**made.latents.make, "family": "flux"}))
    store = stores.make_store(tmp_path / "ours", [stores.Row("../../../a.png")], made)
    report = send("simpletuner", store, out / "deep")
    assert "leads out of" in report.failures[0]["reason"]
    assert not list(tmp_path.rglob("*.pt"))


def test_what_has_no_form_in_a_format_is_refused_before_anything_is_written(tmp_path, data, store, out):
    trainers.write_musubi(tmp_path / "cache", "wan")
    bring("musubi", tmp_path / "cache", store, data)
    with pytest.raises(BadInput, match="caches of wan are not known of sd-scripts"):
        send("sd-scripts", store, out)
    with pytest.raises(BadInput, match="text of wan has no form in simpletuner"):
        send("simpletuner", store, out)
    with pytest.raises(BadInput, match="can be imported, not exported"):
        send("diffusion-pipe", store, out)
    with pytest.raises(BadInput, match=r"'kohya' is not known; what can be exported is sd-scripts, simpletuner, musubi, ai-toolkit$"):
        send("kohya", store, out)
    with pytest.raises(BadInput, match="the family 'wam' are not known"):
        send("musubi", store, out, family="wam")
    with pytest.raises(BadInput, match="has no data set 'other'"):
        send("musubi", store, out, name="other")
    assert not out.exists()


def test_the_command_tells_what_the_function_returns(data, store, out, capsys):
    trainers.write_sd_scripts(data, "flux")
    bring("sd-scripts", data, store, data)
    arguments = ["export", str(store), "train", "--format", "sd-scripts", "-o", str(out)]
    assert main([*arguments, "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert (told["written"], told["complete"], told["casts"]) == (6, True, [])
    (out / "two_flux_te.npz").write_bytes(b"edited")
    assert main(arguments) == FAILURES
    assert "two_flux_te.npz" in capsys.readouterr().out
    assert main(["export", str(store), "other", "--format", "sd-scripts", "-o", str(out)]) == ERROR
    assert main(["export", str(store / "no"), "train", "--format", "sd-scripts", "-o", str(out)]) == NO_STORE
