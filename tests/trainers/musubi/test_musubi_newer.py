"""musubi-tuner's FLUX.2, HunyuanVideo and HunyuanVideo 1.5: files made by hand, there and back, and what a tiny model makes."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import cachestore as cs
from cachestore.core.errors import BadInput
from cachestore.core.keys import Recipe
from cachestore.trainers.export_layout import ExportLayout
from cachestore.trainers.table import load_format
from tests.encode import tiny_families
from tests.fakes import asks_for
from tests.trainers import trainers
from tests.trainers.caches import bring, equal, send
from tests.trainers.trainers import PICTURES, noise

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

NAMES = {
    "flux2": ("f2d", "flux_2_dev"),
    "flux2-klein-4b": ("f2k4b", "flux_2_klein_4b"),
    "flux2-klein-9b": ("f2k9b", "flux_2_klein_9b"),
    "hunyuanvideo": ("hv", "hunyuan_video"),
    "hunyuanvideo15": ("hv15", "hunyuan_video_1_5"),
}
CHANNELS = {"hunyuanvideo": 16, "hunyuanvideo15": 32}


def latents_of(picture, family):
    """Of FLUX.2 folded, so that a latent pixel has 16 x 16 pixels."""
    shape = (CHANNELS[family], 1, *picture.latent) if family in CHANNELS else (128, *picture.latent)
    return noise(picture.reference, family, shape=shape, dtype=torch.bfloat16)


def rows_of(picture, family):
    return noise(picture.caption, family, shape=(3, 16), dtype=torch.bfloat16)


def write(folder, family):
    folder.mkdir()
    arch, full = NAMES[family]
    for picture in PICTURES:
        stem, (height, width), latents = picture.stem.rpartition("/")[2], picture.latent, latents_of(picture, family)
        prefix = "latents_1x" if family in CHANNELS else "latents_"
        tensors = {f"{prefix}{height}x{width}_bfloat16": latents}
        if family.startswith("flux2"):
            tensors[f"latents_control_0_{height}x{width}_bfloat16"] = latents + 1
        known = {"architecture": full, "format_version": "1.0.1"}
        sizes = {"width": f"{picture.size[0]}", "height": f"{picture.size[1]}"}
        save_file(tensors, folder / f"{stem}_{picture.size[0]:04d}x{picture.size[1]:04d}_{arch}.safetensors", known | sizes)
        save_file(text_of(picture, family), folder / f"{stem}_{arch}_te.safetensors", known | {"caption1": picture.caption})
    return folder


def text_of(picture, family):
    rows = rows_of(picture, family)
    if family == "hunyuanvideo":
        mask = (torch.arange(256) < 3).long()
        pooled = {"clipL_bfloat16": rows[0].clone(), "clipL_mask": torch.ones(77, dtype=torch.int64)}
        return {"llm_bfloat16": torch.nn.functional.pad(rows, (0, 0, 0, 253)), "llm_mask": mask, **pooled}
    return {"varlen_vl_embed_bfloat16" if family == "hunyuanvideo15" else "ctx_vec_bfloat16": rows}


@pytest.mark.parametrize("family", NAMES)
def test_what_it_cached_comes_in_and_goes_out_bit_for_bit(tmp_path, data, store, out, family):
    cache, kinds = write(tmp_path / "cache", family), ["latents"] if family == "hunyuanvideo15" else ["text", "latents"]
    report = bring("musubi", cache, store, data, encode=kinds)
    assert (report.complete, report.family) == (True, family)
    ours = cs.CachedDataset(store, latents="raw" if family in CHANNELS else "sample")
    for picture in PICTURES:
        sample = ours[ours.index(picture.reference)]
        assert equal(sample["latents"], latents_of(picture, family))
        assert kinds == ["latents"] or equal(sample["prompt_embeds"], rows_of(picture, family))
    assert send("musubi", store, out).complete
    theirs = {path.name: load_file(path) for path in cache.iterdir() if "text" in kinds or not path.name.endswith("_te.safetensors")}
    written = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert theirs.keys() == written.keys()
    for name, tensors in theirs.items():
        assert tensors.keys() == written[name].keys()
        assert all(equal(tensor, written[name][key]) for key, tensor in tensors.items()), name


def test_buckets_of_flux2_are_those_of_its_pictures(tmp_path, data, store):
    bring("musubi", write(tmp_path / "cache", "flux2"), store, data)
    wanted = {(16 * picture.latent[1], 16 * picture.latent[0]) for picture in PICTURES}
    assert set(cs.CachedDataset(store).buckets) == wanted


def test_rows_of_padding_between_others_are_refused(tmp_path, data, store):
    cache = write(tmp_path / "cache", "hunyuanvideo")
    path = cache / "two_hv_te.safetensors"
    tensors = load_file(path)
    tensors["llm_mask"][1] = 0
    save_file(tensors, path, {"architecture": "hunyuan_video", "caption1": PICTURES[1].caption})
    (failure,) = bring("musubi", cache, store, data).report.failures
    assert (failure["sample"], "llm_mask are not ones, followed by zeros" in failure["reason"]) == ("two.png", True)


def test_text_of_hunyuanvideo15_is_refused_because_it_is_made_of_another_template(tmp_path, data, store):
    cache = write(tmp_path / "cache", "hunyuanvideo15")
    with pytest.raises(BadInput, check=asks_for("encode")):
        bring("musubi", cache, store, data)
    assert not store.exists()


@pytest.mark.parametrize(("kind", "is_open"), [("musubi", True), ("simpletuner", False)])
def test_the_size_of_flux2_klein_must_be_named_where_the_files_of_both_differ(kind, is_open):
    recipe, own = Recipe("text", {"pipeline": "Flux2KleinPipeline"}), SimpleNamespace(fingerprint="1")
    catalog = SimpleNamespace(columns=[], recipes={"1": recipe}, name="train")
    layout: Any = SimpleNamespace(given=None, format=load_format(kind), catalog=catalog, command="cachestore export STORE")
    line = "`cachestore export STORE --family flux2-klein-4b` or `"
    with pytest.raises(BadInput, check=asks_for("family", line)) if is_open else nullcontext():
        assert ExportLayout.family(layout, cast("Any", own)).name.startswith("flux2-klein")


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    """A tiny FLUX.2 klein, pictures with sides that its buckets keep, and a store that was encoded with it."""
    folder = tmp_path_factory.mktemp("klein")
    tiny_families.save(tiny_families.FAMILIES["flux2klein"], tiny_families.FAMILIES["flux2klein"].build(), folder / "model")
    pictures = [trainers.Picture(f"{n}.png", f"picture {n}", (64 + 16 * n, 64), (4, 4)) for n in range(3)]
    trainers.make_source(folder / "data", pictures)
    for picture in pictures:
        coarse = torch.randint(0, 255, (4, 4, 3), generator=torch.Generator().manual_seed(len(picture.caption)), dtype=torch.uint8)
        Image.fromarray(coarse.numpy()).resize(picture.size).save(folder / "data" / picture.reference)
    wanted: Any = {"encode": ["latents"], "resolution": 64, "buckets": "musubi", "latents": "mean", "vae_dtype": "float32"}
    assert cs.precompute(folder / "data", model=folder / "model", store=folder / "store", inline=True, **wanted).complete
    return folder


def test_latents_of_flux2_are_exported_folded_as_the_denoiser_takes_them_and_verified_after_an_import(klein, out, store):
    ours = cs.CachedDataset(klein / "store", latents="mean")
    assert send("musubi", klein / "store", out, family="flux2-klein-9b").complete
    for number, name in enumerate(ours.ids):
        (path,) = out.glob(f"{name.removesuffix('.png')}_*x*_f2k9b.safetensors")
        ((key, tensor),) = load_file(path).items()
        assert key == f"latents_{tensor.shape[1]}x{tensor.shape[2]}_float32"
        assert equal(tensor, ours[number]["latents"])
    assert bring("musubi", out, store, klein / "data", claims=None, model=klein / "model").complete
    assert cs.verify(store, recompute=10).recomputed["wrong"] == 0
    back = cs.CachedDataset(store)
    assert back.buckets.keys() == ours.buckets.keys()
    assert all(equal(back[back.index(name)]["latents"], ours[number]["latents"]) for number, name in enumerate(ours.ids))
