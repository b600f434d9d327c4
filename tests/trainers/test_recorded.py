"""Caches that the trainers' own code wrote (`scripts/conformance/trainers.py --keep`), imported and exported again, bit for bit.

`recorded.tar.xz` in a trainer's folder has a folder for each case: the pictures, the cache, and in `loaded.npz` what the trainer's own
loader returned.
"""

import importlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cachestore as cs
from tests.trainers.caches import bring, equal, send

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

MODULES = {"sd-scripts": "sd_scripts", "musubi": "musubi", "simpletuner": "simpletuner", "ai-toolkit": "ai_toolkit"}
IMPORTED = {**MODULES, "diffusion-pipe": "diffusion_pipe"}


def every_case(modules, *, is_exported=False):
    for trainer, module in modules.items():
        driver = importlib.import_module(f"conformance.trainer_{module}").DRIVER
        cases = [case for case in driver.cases if not (is_exported and case.is_import_only)]
        yield from (pytest.param(trainer, driver, case, id=f"{trainer} {case.name}") for case in cases)


def unpacked(trainer, case, folder) -> tuple[Path, Path, Any]:
    """The pictures, the cache, and what the trainer loaded, by (name, whether it is mirrored)."""
    with tarfile.open(Path(__file__).parent / IMPORTED[trainer] / "recorded.tar.xz") as tar:
        tar.extractall(folder, [one for one in tar if one.name.startswith(f"{case.name}/")], filter="data")
    found: Any = {}
    with np.load(folder / case.name / "loaded.npz") as arrays:
        for name, array in arrays.items():
            stem, is_flipped, key = name.split(" ", 2)
            found.setdefault((stem, is_flipped == "1"), {})[key] = array
    data = folder / case.name / "data"
    return data, cache if (cache := folder / case.name / "cache").is_dir() else data, found


def imported(trainer, case, data, cache, store):
    report = bring(trainer, cache, store, data, family=case.family, encode=case.kinds, **case.importing)
    assert report.complete, report.report.failures
    return report


@pytest.mark.parametrize(("trainer", "driver", "case"), list(every_case(IMPORTED)))
def test_a_store_has_what_the_trainer_loads_for_each_picture(trainer, driver, case, tmp_path):
    from conformance.trainers import differing, values_of

    data, cache, loaded = unpacked(trainer, case, tmp_path)
    assert len(loaded) >= 3 if case.videos else len(loaded) == (6 if case.flips and not case.left_out else 3)
    report = imported(trainer, case, data, cache, tmp_path / "store")
    assert differing(loaded, values_of(driver, case, tmp_path / "store", loaded)) == []
    words = f"in the buckets of {trainer} at the resolution"
    assert trainer not in MODULES or [one for one in report.remarks if words in one], "the settings are learned from the files"


@pytest.mark.parametrize(("trainer", "driver", "case"), list(every_case(MODULES, is_exported=True)))
def test_an_export_has_the_files_and_tensors_of_the_trainer(trainer, driver, case, tmp_path):
    data, cache, _loaded = unpacked(trainer, case, tmp_path)
    imported(trainer, case, data, cache, tmp_path / "store")
    written = send(trainer, tmp_path / "store", tmp_path / "out", family=case.family)
    assert written.complete, written
    theirs, ours = files_of(cache), files_of(tmp_path / "out")
    if case.left_out or "text" not in case.kinds:  # files of mirrored pictures, and of text that is not imported
        theirs = {name: tensors for name, tensors in theirs.items() if name in ours}
    assert theirs.keys() == ours.keys()
    assert len(theirs) >= 3
    for name, tensors in theirs.items():
        assert tensors.keys() == ours[name].keys(), name
        assert not [one for one, tensor in tensors.items() if not equal(tensor, ours[name][one])], name


def files_of(folder) -> dict[str, Any]:
    """The tensors of each file of a cache, by its path."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
        elif path.suffix == ".safetensors":
            found[name] = load_file(path)
        elif path.suffix == ".pt":
            value = torch.load(path, weights_only=True)
            found[name] = value if isinstance(value, dict) else {"value": value}
    return found


def test_the_empty_caption_that_diffusion_pipe_cached_of_no_picture_is_imported(tmp_path):
    from conformance.trainers import noise_of

    driver = importlib.import_module("conformance.trainer_diffusion_pipe").DRIVER
    data, cache, _loaded = unpacked("diffusion-pipe", driver.cases[0], tmp_path)
    report = imported("diffusion-pipe", driver.cases[0], data, cache, tmp_path / "store")
    found = cs.CachedDataset(tmp_path / "store").prompt("")
    for name, wanted in {
        "prompt_embeds": noise_of("", "t5_embed", 8, 4096),
        "pooled_prompt_embeds": noise_of("", "clip_embed", 768),
    }.items():
        assert torch.equal(found[name].squeeze(0), wanted.to(torch.bfloat16))
    assert not report.unmatched
    assert not [remark for remark in report.remarks if "the source does not have" in remark]


def test_a_changed_number_is_seen(tmp_path):
    from conformance.trainers import differing

    loaded = {("000", False): {"latents": np.zeros(3, np.float32)}}
    other = {("000", False): {"latents": np.array([0, 0, 1e-9], np.float32)}}
    assert differing(loaded, other) == ["000: latents float32[3]"]
    assert differing(loaded, {}) == ["000: missing"]
    assert differing(loaded, loaded) == []


def test_pictures_that_were_turned_round_pair_with_no_other_file(tmp_path):
    """The text of another picture under this one's name is refused, where the file says its caption."""
    driver = importlib.import_module("conformance.trainer_musubi").DRIVER
    case = driver.cases[0]
    data, cache, _loaded = unpacked("musubi", case, tmp_path)
    shutil.copy(cache / "001_zi_te.safetensors", cache / "000_zi_te.safetensors")
    report = bring("musubi", cache, tmp_path / "store", data, family=case.family)
    assert [failure["sample"] for failure in report.report.failures] == ["000.png"]
