"""What an export says must be set in the trainer's configuration: by the data set's own settings, in the trainer's own syntax."""

import json
import os
from typing import Any

import numpy as np
import pytest
import tomllib
from PIL import Image

import cachestore as cs
from cachestore.cli import FAILURES, main
from cachestore.trainers.exported import Block
from cachestore.trainers.ltx import format as ltx

yaml = pytest.importorskip("yaml")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.usefixtures("torch_files_read_here"),
]
ENCODED: dict[str, Any] = {"encode": ("latents",), "vae_dtype": "float32", "latents": "sample", "inline": True}


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, size in enumerate([(150, 90), (97, 150)]):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)).save(folder / f"{seed}.png")
        os.utime(folder / f"{seed}.png", (9, 9))
    return folder


@pytest.fixture
def settings(built, data, tmp_path):
    """Encodes with a tiny model, exports for a trainer, and returns the lines."""

    def call(trainer, family="flux", **options):
        model = built("zimage" if trainer == "musubi" else "flux").folder
        made = cs.precompute(options.pop("sources", data), model=model, store=tmp_path / "store", **ENCODED | options)
        assert made.complete
        out = data if trainer in ("sd-scripts", "ai-toolkit") else tmp_path / "out"
        report = cs.export_cache(tmp_path / "store", format=trainer, folder=out, family=family)
        assert report.as_json()["trainer_settings"] == list(report.trainer_settings)
        return report

    return call


def without_comments(lines):
    return "\n".join(line for line in lines if not line.startswith("#"))


def test_sd_scripts_is_told_resolution_limits_steps_and_flips(settings, data):
    limits: dict[str, Any] = {"bucket_step": 16, "bucket_min": 32, "bucket_max": 256}
    report = settings("sd-scripts", buckets="sd-scripts", resolution=(96, 128), flip=True, **limits)
    assert report.complete
    blocks = tomllib.loads(without_comments(report.trainer_settings))["datasets"]
    assert [block["resolution"] for block in blocks] == [96, 128]
    for block in blocks:
        assert {"enable_bucket": True, "min_bucket_reso": 32, "max_bucket_reso": 256, "bucket_reso_steps": 16}.items() <= block.items()
        assert block["bucket_no_upscale"] is False
        assert block["subsets"] == [{"image_dir": str(data), "caption_extension": ".txt", "flip_aug": True}]
    assert report.trainer_settings[-1] == "# on the command line: --cache_latents_to_disk"


def test_limits_that_sd_scripts_ignores_still_suit_the_resolution(settings):
    report = settings("sd-scripts", buckets="sd-scripts", resolution=128, bucket_step=16, no_upscale=True)
    (block,) = tomllib.loads(without_comments(report.trainer_settings))["datasets"]
    assert block["bucket_no_upscale"] is True
    assert block["min_bucket_reso"] <= 128 <= block["max_bucket_reso"]


def test_musubi_is_told_its_folders_in_toml(settings, data, tmp_path):
    report = settings("musubi", "z-image", buckets="musubi", resolution=128)
    (block,) = (made := tomllib.loads(without_comments(report.trainer_settings)))["datasets"]
    assert made["general"] == {"caption_extension": ".txt", "enable_bucket": True}
    folders = {"image_directory": str(data), "cache_directory": str(tmp_path / "out")}
    assert block == {**folders, "resolution": [128, 128], "bucket_no_upscale": False}


def test_simpletuner_is_told_its_backends_in_json(settings, data, tmp_path):
    report = settings("simpletuner", buckets="simpletuner", bucket_step=16, resolution=(64, 128))
    backends = json.loads(without_comments(report.trainer_settings))
    assert [(one["id"], one["resolution"]) for one in backends] == [("train-64", 64), ("train-128", 128)]
    assert [one["cache_dir_vae"] for one in backends] == [str(tmp_path / "out" / size / "vae") for size in ("64", "128")]
    assert all((tmp_path / "out" / size / "vae").is_dir() for size in ("64", "128"))
    assert "# in the general configuration: aspect_bucket_alignment = 16" in report.trainer_settings
    assert backends[0]["instance_data_dir"] == str(data)


def test_ai_toolkit_is_told_all_resolutions_of_a_folder_in_yaml(settings, data):
    report = settings("ai-toolkit", buckets="ai-toolkit", bucket_step=32, resolution=(64, 128))
    (block,) = yaml.safe_load(without_comments(report.trainer_settings))["datasets"]
    assert block == {"folder_path": str(data), "caption_ext": "txt", "resolution": [64, 128], "cache_latents_to_disk": True}


def test_buckets_that_no_setting_gives_are_said_to_be_so(settings, data, capsys, tmp_path):
    report = settings("ai-toolkit", resolution=128, bucket_step=64)
    assert not report.complete
    assert report.trainer_settings[-1].startswith("# no settings of ai-toolkit give all these buckets")
    command = ["export", tmp_path / "store", "--format", "ai-toolkit", "-o", data, "--family", "flux"]
    assert main([*map(str, command)]) == FAILURES
    assert "precompute with --buckets ai-toolkit, under another --name" in capsys.readouterr().out


def test_files_apart_from_their_pictures_are_said_to_need_them(data, built, tmp_path):
    assert cs.precompute(
        data, model=built("flux").folder, store=tmp_path / "store", buckets="ai-toolkit", **ENCODED, resolution=64
    ).complete
    report = cs.export_cache(tmp_path / "store", format="ai-toolkit", folder=tmp_path / "apart", family="flux")
    assert any(str(data) in line and str(tmp_path / "apart") in line for line in report.trainer_settings)


def test_ltx_is_told_its_one_folder(tmp_path):
    block = Block("train-64", "data", str(tmp_path / "64"), str(tmp_path), "video", None, None)
    assert yaml.safe_load("\n".join(ltx.settings([block]))) == {"data": {"preprocessed_data_root": str(tmp_path)}}
