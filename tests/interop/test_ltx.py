"""`.precomputed` of LTX-2's trainer, imported: its layout, its padding, its scaling state, and files that are refused."""

import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.files.paths import Layout
from cachestore.storage.catalog import newest_catalog
from tests.interop.caches import bring
from tests.interop.trainers import PICTURES, make_source, noise

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

ROWS, REAL = 12, 5


def latents_of(picture) -> dict[str, Any]:
    """The trainer's numbers of a picture: a frame of 128 channels."""
    tensor = noise(picture.reference, "ltx2", shape=(128, 1, 2, 3), dtype=torch.bfloat16)
    return {"latents": tensor, "num_frames": 1, "height": 2, "width": 3, "fps": 1.0}


def text_of(picture) -> dict[str, Any]:
    """A caption's rows, with padding on the left; one projection for pictures and sound."""
    rows = noise(picture.caption, shape=(ROWS, 16), dtype=torch.bfloat16)
    rows[: ROWS - REAL] = 0
    mask = torch.tensor([0] * (ROWS - REAL) + [1] * REAL)
    return {"video_prompt_embeds": rows, "prompt_attention_mask": mask, "audio_prompt_embeds": rows.clone()}


def write(root, folder, picture, value):
    path = root / ".precomputed" / folder / f"{picture.stem}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def make_cache(root):
    for picture in PICTURES:
        write(root, "latents", picture, latents_of(picture))
        write(root, "conditions", picture, text_of(picture))
        write(root, "audio_latents", picture, {"latents": torch.zeros(8, 4, 16), "num_time_steps": 4})
    return make_source(root)


def test_a_store_has_the_latents_and_the_text_without_its_padding(tmp_path):
    data = make_cache(tmp_path / "data")
    report = bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2")
    assert report.complete, report.report.failures
    assert report.report.encoded == 2 * len(PICTURES)
    found = cs.CachedDataset(tmp_path / "store")
    for picture in PICTURES:
        sample = found[found.index(picture.reference)]
        assert torch.equal(sample["latents"], latents_of(picture)["latents"])
        assert torch.equal(sample["prompt_embeds"], text_of(picture)["video_prompt_embeds"][-REAL:])


def test_latents_are_known_to_be_normalised(tmp_path):
    data = make_cache(tmp_path / "data")
    bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2", encode=["latents"])
    with pytest.raises(cs.BadInput, match="as another trainer normalised them"):
        _ = cs.CachedDataset(tmp_path / "store", latents="raw")[0]


@pytest.mark.parametrize(
    ("folder", "change", "reason"),
    [
        ("conditions", {"audio_prompt_embeds": torch.ones(ROWS, 16)}, "as those of LTX-2.3 do"),
        ("conditions", {"prompt_attention_mask": torch.tensor([1, 0] * (ROWS // 2))}, "are not one range"),
        ("conditions", {"prompt_attention_mask": torch.zeros(ROWS)}, "are not one range"),
        ("conditions", {"prompt_attention_mask": torch.ones(ROWS - 1)}, "are not one range"),
        ("latents", {"latents": torch.ones(6, 128)}, "an older version of the trainer"),
        ("latents", {"num_frames": 2}, "its num_frames, height, width are"),
        ("latents", {"latents": torch.full((128, 1, 2, 3), torch.nan)}, "NaN"),
        ("latents", {"fps": Fraction(1, 2)}, "torch cannot read the file"),
    ],
)
def test_a_file_that_is_not_as_the_trainer_writes_it_fails_its_sample_alone(tmp_path, folder, change, reason):
    data = make_cache(tmp_path / "data")
    made = latents_of(PICTURES[0]) if folder == "latents" else text_of(PICTURES[0])
    write(data, folder, PICTURES[0], made | change)
    report = bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2")
    assert [failure["sample"] for failure in report.report.failures] == [PICTURES[0].reference]
    assert reason in report.report.failures[0]["reason"]


def test_text_of_an_older_version_is_refused(tmp_path):
    data = make_cache(tmp_path / "data")
    for picture in PICTURES:
        write(data, "conditions", picture, {"prompt_embeds": torch.ones(ROWS, 16), "prompt_attention_mask": torch.ones(ROWS)})
    report = bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2", encode=["text"])
    assert "it has no video_prompt_embeds" in report.report.failures[0]["reason"]


def test_an_export_says_that_the_form_is_only_read(tmp_path):
    data = make_cache(tmp_path / "data")
    bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2")
    with pytest.raises(cs.BadInput, match="ltx can be imported, but not exported: its files can only be read here so far"):
        cs.export_cache(tmp_path / "store", format="ltx", folder=tmp_path / "out", family="ltx2")
    assert not (tmp_path / "out").exists()


def test_a_store_has_what_the_trainer_loads_of_a_cache_that_its_own_functions_wrote(tmp_path):
    with tarfile.open(Path(__file__).with_name("recorded") / "ltx.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    folder = tmp_path / "ltx2"
    assert bring("ltx", folder / "cache", tmp_path / "store", folder / "data", family="ltx2").complete
    found = cs.CachedDataset(tmp_path / "store")
    assert len(found) == 3
    with np.load(folder / "loaded.npz") as loaded:
        for name in ("000", "001", "002"):
            sample, is_real = found[found.index(f"{name}.png")], loaded[f"{name} mask"] != 0
            assert np.array_equal(sample["latents"].float().numpy(), loaded[f"{name} latents"])
            assert np.array_equal(sample["prompt_embeds"].float().numpy(), loaded[f"{name} video"][is_real])


def test_latents_of_a_video_are_those_of_its_first_frames(tmp_path):
    from tests.encode.footage import moving
    from tests.encode.footage import write as film

    data = tmp_path / "data"
    cache = data / ".precomputed" / "latents"
    cache.mkdir(parents=True)
    (data / "dog.mkv").write_bytes(film(moving(12, (96, 64))))
    (data / "dog.txt").write_text("a dog")
    tensor = noise("dog", shape=(128, 2, 2, 3), dtype=torch.bfloat16)
    torch.save({"latents": tensor, "num_frames": 2, "height": 2, "width": 3, "fps": 24.0}, cache / "dog.pt")
    report = bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2", encode=["latents"])
    assert report.complete, report.report.failures
    found = cs.CachedDataset(tmp_path / "store")
    sample = found[found.index("dog.mkv")]
    assert torch.equal(sample["latents"], tensor)
    catalog = newest_catalog(Layout.at(tmp_path / "store"), "train")
    (recipe,) = catalog.recipes.values()
    assert (recipe.read["spatial_factor"], recipe.read["temporal_factor"]) == (32, 8)
