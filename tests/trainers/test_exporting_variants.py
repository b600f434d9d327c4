"""Export of several resolutions, mirrored pictures, crops, masks and sources: what each reader takes, and what has no place."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import cachestore as cs
from cachestore.cli import FAILURES, OK, main
from cachestore.core.errors import BadInput
from cachestore.encode.pictures import buckets
from cachestore.encode.pictures.buckets import Size, choose, crop_box
from cachestore.encode.pictures.masks import mask_recipe
from cachestore.files.paths import Layout
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.read.rows import newest_catalog
from cachestore.store.write.writer import open_store
from tests.fakes import asks_for, publish_catalog
from tests.train import stores
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_paths
from tests.trainers.caches import bring, send
from tests.trainers.musubi.files import read_musubi
from tests.trainers.sd_scripts.files import sd_latents_path, write_sd_scripts
from tests.trainers.simpletuner.files import read_simpletuner, write_simpletuner

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

SIZES = {"a/one.png": (600, 480), "two.png": (512, 512)}
MASKED = "a/one.png"


@dataclass(frozen=True)
class Wanted:
    """What a data set has: the options of its columns of pictures."""

    resolutions: tuple[int, ...] = (256, 512)
    options: Any = None
    masks: bool = False
    sources: tuple[str, ...] = ()
    family: str = "flux"
    text_family: str = "flux"
    captions: tuple[str, ...] = ("a fox",)
    controls: int = 0


def sides_and_crops(wanted):
    options = wanted.options or {}
    return 2 if options.get("flip") else 1, options.get("variants", 1)


def picture_of(name, resolution, family="flux"):
    """A picture as the trainers' readers know it, at one resolution."""
    bucket = choose(Size(*SIZES[name]), resolution, 64)
    return trainers.Picture(name, "a fox", SIZES[name], (bucket.height // 8, bucket.width // 8))


def value(name, resolution, number, family="flux"):
    """The latents of one variant; a mirrored one is not the mirrored picture's, so that no test can mistake them."""
    return trainers.noise(name, resolution, number, shape=(trainers.CHANNELS[family], *picture_of(name, resolution).latent))


def control_of(name, resolution, number):
    return value(name, resolution, 100 + number)


def mask_of(name, resolution):
    height, width = picture_of(name, resolution).latent
    return np.arange(height * width, dtype=np.uint64).reshape(1, height, width).astype(np.uint8)


def make_store(path, wanted=Wanted()):
    """A data set of two pictures, one of them with a mask, in each of the sources."""
    made = stores.recipes(stores.FLUX, "sample", scaling_factor=0.3611, shift_factor=0.1159)
    latents = replace(
        made.latents, make={**made.latents.make, "family": wanted.family, "kind": "imported"}, read={**made.latents.read, "scaled": True}
    )
    made = replace(made, text=replace(made.text, make={**made.text.make, "family": wanted.text_family}))
    masks = mask_recipe(8)
    rows = [(source, name) for source in wanted.sources or ("",) for name in SIZES]
    sides, crops = sides_and_crops(wanted)
    images: list[list[Cell]] = []
    columns = [
        make_column(
            "text",
            "caption",
            made.text.fingerprint,
            {},
            [[Cell(stores.caption_key(made.text, one)) for one in wanted.captions]] * len(rows),
        )
    ]
    with open_store(path, mode="a") as store:
        with store.writer() as writer:
            for caption in ("", *wanted.captions):
                writer.put(stores.caption_key(made.text, caption), stores.stored_text(made.text, caption))
            for resolution in wanted.resolutions:
                images, covers = [], []
                for source, name in rows:
                    bucket = Size(*(8 * side for side in reversed(picture_of(name, resolution).latent)))
                    box = crop_box(Size(*SIZES[name]), bucket)
                    facts = {"size": SIZES[name], "bucket": bucket, "resized": box.resized, "crop": box.crop}
                    keys = [cs.key(source, name, str(resolution), str(number)) for number in range(sides * crops)]
                    for number, key in enumerate(keys):
                        writer.put(key, {"sample": value(name, resolution, number, wanted.family)})
                    images.append([Cell(key, facts=facts) for key in keys])
                    covers.append([cs.key("mask", name, str(resolution))] * len(keys) if wanted.masks and name == MASKED else [])
                    for key in covers[-1][:1]:
                        writer.put(key, {"mask": mask_of(name, resolution)})
                options = {"resolution": resolution, "step": 64, **(wanted.options or {})}
                columns.append(make_column("latents", "image", latents.fingerprint, options, images))
                if wanted.controls:
                    shown = [[cs.key("control", name, str(resolution), str(n)) for n in range(wanted.controls)] for _source, name in rows]
                    for (_source, name), keys in zip(rows, shown, strict=True):
                        for number, key in enumerate(keys):
                            writer.put(key, {"sample": control_of(name, resolution, number)})
                    columns.append(
                        make_column("latents", "control", latents.fingerprint, options, [[Cell(key) for key in keys] for keys in shown])
                    )
                if wanted.masks:
                    columns.append(
                        make_column("mask", "mask", masks.fingerprint, options, [[Cell(key) for key in those] for those in covers])
                    )
        store.commit()
        count, captions = len(rows), len(wanted.captions)
        hints = {"data": "/pictures", "sources": [{"data": f"/{source}", "name": source} for source in wanted.sources]}
        catalog = Catalog(
            name="train",
            request={"latents": hints, "text": hints},
            recipes={recipe.fingerprint: recipe for recipe in (made.text, latents, *([masks] if wanted.masks else []))},
            ids=["/".join(filter(None, row)) for row in rows],
            captions_at=list(range(0, captions * count + 1, captions)),
            captions=[*wanted.captions] * count,
            images={"image": (list(range(count + 1)), ["/".join(filter(None, row)) for row in rows])},
            extras=[json.dumps({"source": source} if source else {}) for source, _name in rows],
            columns=tuple(columns),
        )
        publish_catalog(store.layout, catalog)
    return path


def same(array, tensor):
    return torch.equal(torch.from_numpy(np.asarray(array)), tensor)


def test_sd_scripts_finds_all_resolutions_sides_and_masks_of_a_picture_in_one_file(tmp_path, out):
    report = send("sd-scripts", make_store(tmp_path / "store", Wanted(options={"flip": True}, masks=True)), out)
    assert (report.complete, report.written) == (True, 4)
    for name, own in SIZES.items():
        for resolution in (256, 512):
            picture = picture_of(name, resolution)
            height, width = picture.latent
            npz = np.load(sd_latents_path(out, picture, "flux"), allow_pickle=False)
            size = f"_{height}x{width}"
            assert same(npz[f"latents{size}"], value(name, resolution, 0))
            assert same(npz[f"latents_flipped{size}"], value(name, resolution, 1))
            assert npz[f"original_size{size}"].tolist() == list(own)
            assert (f"alpha_mask{size}" in npz) == (name == MASKED)
            if name == MASKED:
                alpha = npz[f"alpha_mask{size}"]
                assert (alpha.dtype, alpha.shape) == (np.float32, (8 * height, 8 * width))
                shrunk = torch.nn.functional.interpolate(torch.from_numpy(alpha)[None, None], (height, width), mode="area")
                assert torch.allclose(shrunk[0, 0], torch.from_numpy(mask_of(name, resolution)[0]) / 255)
    assert [cast.partition(":")[0] for cast in report.casts] == ["masks"]


def test_a_file_of_several_resolutions_that_was_imported_goes_back_as_it_was(tmp_path, out):
    data, store = trainers.make_source(tmp_path / "data", trainers.PICTURES[:1]), tmp_path / "store"
    write_sd_scripts(data, "flux", trainers.PICTURES[:1])
    path = sd_latents_path(data, trainers.PICTURES[0], "flux")
    small = {f"{name.rpartition('_')[0]}_2x4": array for name, array in np.load(path).items()}
    small["latents_2x4"] = small["latents_flipped_2x4"] = np.ones((16, 2, 4), np.float32)
    before = {**np.load(path), **small}
    np.savez(path, **before)
    bring("sd-scripts", data, store, data, encode=["latents"])
    send("sd-scripts", store, out)
    after = dict(np.load(sd_latents_path(out, trainers.PICTURES[0], "flux")))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_simpletuner_gets_a_folder_for_each_resolution_and_one_of_text_for_all(tmp_path, out):
    report = send("simpletuner", make_store(tmp_path / "store"), out)
    assert (report.complete, report.casts) == (True, ())
    assert len(list((out / "text").iterdir())) == 2
    for resolution in (256, 512):
        tree = out / str(resolution)
        for name in SIZES:
            latents, _text = read_simpletuner(out / "text", tree / "vae", picture_of(name, resolution), "flux")
            assert torch.equal(latents, value(name, resolution, 0))
        known = json.loads((tree / f"aspect_ratio_bucket_metadata_train-{resolution}.json").read_text())
        height, width = picture_of("two.png", resolution).latent
        assert known["/pictures/two.png"]["target_size"] == [8 * width, 8 * height]


def test_musubi_gets_a_cache_folder_for_each_resolution_with_text_and_control_images_in_each(tmp_path, out):
    report = send("musubi", make_store(tmp_path / "store", Wanted(controls=1)), out)
    assert (report.complete, report.written, report.left_out) == (True, 8, ())
    for resolution in (256, 512):
        for name in SIZES:
            latents, text = read_musubi(out / str(resolution), picture_of(name, resolution), "flux")
            assert torch.equal(latents["latents"], value(name, resolution, 0))
            assert set(text) == {"t5_vec", "clip_l_pooler"}
            assert torch.equal(latents["latents_control"], control_of(name, resolution, 0))


def test_more_control_images_than_musubi_takes_are_a_failure_of_their_sample(tmp_path, out):
    report = send("musubi", make_store(tmp_path / "store", Wanted((256,), controls=2)), out)
    assert {(one["sample"], one["encoder"]) for one in report.failures} == {("a/one.png", "latents"), ("two.png", "latents")}
    assert "2 control images, but musubi-tuner takes one for flux" in report.failures[0]["reason"]


def in_words(reported):
    return " ".join(reported)


def test_latents_that_ai_toolkit_would_not_look_for_are_counted_and_end_with_3(tmp_path, out, capsys):
    """Its bucket of 600x480 at 512 is another than ours; of 512x512 it is the same."""
    store = make_store(tmp_path / "store", Wanted((512,)))
    assert main(["export", str(store), "--format", "ai-toolkit", "-o", str(out)]) == FAILURES
    assert "ai-toolkit will not find 1 of 2 latents" in capsys.readouterr().out


def test_groups_that_musubi_cannot_stack_are_counted_and_end_with_3(tmp_path, out, monkeypatch):
    """Two aspect ratios that are of one bucket there and of two here. Latents of control images part its groups, so they need none."""
    monkeypatch.setattr(
        "tests.trainers.test_exporting_variants.SIZES", {"a/one.png": (550, 500), "two.png": (580, 500), "c.png": (300, 600)}
    )
    report = send("musubi", without_text(make_store(tmp_path / "store", Wanted((512,), family="z-image"))), out)
    assert (report.complete, report.failures, report.written) == (False, (), 3)
    assert in_words(report.not_taken).startswith("1 of 2 groups from which musubi makes batches holds latents of several shapes (2 files)")


def test_groups_that_simpletuner_cannot_stack_are_counted(tmp_path, out, monkeypatch):
    """Without enlarging, small pictures have buckets of their own sizes, and some of one aspect ratio."""
    monkeypatch.setattr("tests.trainers.test_exporting_variants.SIZES", {"a/one.png": (128, 128), "two.png": (192, 192)})
    monkeypatch.setattr("tests.trainers.test_exporting_variants.choose", partial(buckets.choose, upscales=False))
    report = send("simpletuner", make_store(tmp_path / "store", Wanted((512,))), out)
    assert not report.complete
    assert in_words(report.not_taken).startswith("1 of 1 group from which simpletuner makes batches")


def test_latents_of_other_buckets_than_sd_scripts_would_take_are_counted(tmp_path, out):
    """Of an imported data set, which knows no resolution: that follows from its largest bucket."""
    pictures = [trainers.Picture("a.png", "a", (600, 600), (64, 64)), trainers.Picture("b.png", "b", (384, 255), (52, 78))]
    data = trainers.make_source(tmp_path / "data", pictures)
    write_simpletuner(tmp_path / "text", tmp_path / "vae", "sdxl", pictures)
    bring("simpletuner", tmp_path / "vae", tmp_path / "store", data, family="sdxl")
    report = send("sd-scripts", tmp_path / "store", out)
    assert (report.complete, report.written) == (False, 2)
    assert in_words(report.not_taken).startswith("sd-scripts will not find 1 of 2 latents")
    assert "(b.png)" in report.not_taken[0]


def test_flux_without_control_images_is_refused_for_musubi_which_trains_kontext(tmp_path, out):
    report = send("musubi", make_store(tmp_path / "store", Wanted((256,))), out)
    assert not report.complete
    assert {(one["sample"], one["encoder"]) for one in report.failures} == {("a/one.png", "latents"), ("two.png", "latents")}
    assert "is FLUX.1 Kontext, which is also trained on latents of control images, but this sample has none" in report.failures[0]["reason"]
    assert not list(out.glob("*x*_fk.safetensors"))


def test_ai_toolkit_finds_resolutions_and_sides_by_their_digests(tmp_path, out):
    report = send("ai-toolkit", make_store(tmp_path / "store", Wanted(options={"flip": True})), out)
    assert (report.failures, report.written) == ((), 2 * (2 * 2 + 1))
    for resolution in (256, 512):
        for name in SIZES:
            for number in (0, 1):
                path = aitk_paths(out, picture_of(name, resolution), "flux", is_flipped=bool(number))[0]
                assert torch.equal(load_file(path)["latent"], value(name, resolution, number))


@pytest.mark.parametrize(
    ("kind", "wanted", "choice"),
    [
        ("simpletuner", Wanted(options={"flip": True}), {"leave_out": ["flips"]}),
        ("musubi", Wanted(options={"flip": True}, controls=1), {"leave_out": ["flips"]}),
        ("simpletuner", Wanted(masks=True), {"leave_out": ["masks"]}),
        ("ai-toolkit", Wanted(masks=True), {"leave_out": ["masks"]}),
        (
            "sd-scripts",
            Wanted((512,), options={"crop": "random", "seed": 0, "variants": 2}),
            {"variant_only": 1},
        ),
        ("sd-scripts", Wanted(family="sdxl"), {"resolution_only": 512}),
    ],
)
def test_what_a_trainer_has_no_place_for_is_refused_and_the_choice_that_is_named_exports(tmp_path, out, kind, wanted, choice):
    store = make_store(tmp_path / "store", wanted)
    if wanted.family == "sdxl":
        store = without_text(store)
    with pytest.raises(BadInput, check=asks_for(*choice)):
        send(kind, store, out)
    assert not out.exists()
    report = send(kind, store, out, **choice)
    assert not report.failures
    assert report.written


def without_text(store):
    layout = Layout(Path(store))
    catalog = newest_catalog(layout, "train")
    assert catalog is not None
    publish_catalog(layout, replace(catalog, columns=tuple(column for column in catalog.columns if column.encoder != "text")))
    return store


def test_the_chosen_crop_and_resolution_alone_are_written(tmp_path, out):
    store = make_store(tmp_path / "store", Wanted(options={"crop": "random", "seed": 0, "variants": 2, "flip": True}))
    send("sd-scripts", store, out, resolution_only=256, variant_only=1)
    npz = np.load(sd_latents_path(out, picture_of("two.png", 256), "flux"))
    assert same(npz["latents_32x32"], value("two.png", 256, 2))
    assert same(npz["latents_flipped_32x32"], value("two.png", 256, 3))
    assert "latents_64x64" not in npz


def test_drawn_crops_are_never_found_by_ai_toolkit(tmp_path, out):
    store = make_store(tmp_path / "store", Wanted(options={"crop": "random", "seed": 0}))
    with pytest.raises(BadInput, check=asks_for("name")):
        send("ai-toolkit", store, out)


def test_choices_that_cannot_be_made_are_refused(tmp_path, out):
    store = make_store(tmp_path / "store")
    with pytest.raises(BadInput, check=asks_for("resolution_only")):
        send("musubi", store, out, resolution_only=1024)
    with pytest.raises(BadInput, check=asks_for("leave_out")):
        send("musubi", store, out, leave_out=["faces"])
    with pytest.raises(BadInput, check=asks_for("variant_only")):
        send("musubi", store, out, variant_only=1)
    assert not out.exists()


@pytest.mark.parametrize(("kind", "trees"), [("sd-scripts", ""), ("ai-toolkit", ""), ("musubi", "256"), ("simpletuner", "256")])
def test_each_of_several_sources_has_a_tree_of_its_own(tmp_path, out, kind, trees):
    report = send(kind, make_store(tmp_path / "store", Wanted(sources=("photos", "faces"), controls=1)), out)
    assert (report.failures, report.samples) == ((), 4)
    for source in ("photos", "faces"):
        tree, picture = out / source / trees, picture_of("a/one.png", 256)
        match kind:
            case "sd-scripts":
                assert sd_latents_path(tree, picture, "flux").is_file()
            case "ai-toolkit":
                assert all(path.is_file() for path in aitk_paths(tree, picture, "flux"))
            case "musubi":
                read_musubi(tree, picture, "flux")
            case _:
                read_simpletuner(out / "text", tree / "vae", picture, "flux")
                known = json.loads((tree / f"aspect_ratio_bucket_metadata_train-{source}-256.json").read_text())
                assert set(known) == {f"/{source}/a/one.png", f"/{source}/two.png"}


def test_what_needs_no_choice_and_has_no_place_is_reported(tmp_path, out, capsys):
    store = make_store(tmp_path / "store", Wanted((256,), captions=("a fox", "another"), controls=1))
    report = send("ai-toolkit", store, out)
    assert report.left_out == ("latents of 2 control images", "2 captions after the first one of their picture")
    assert main(["export", str(store), "--format", "ai-toolkit", "-o", str(out), "--resolution-only", "256", "--leave-out", "masks"]) == OK
    assert "not exported: 2 captions" in capsys.readouterr().out


def test_a_variant_that_was_not_made_is_a_failure_of_its_sample(tmp_path, out, capsys):
    store = make_store(tmp_path / "store", Wanted(controls=1))
    layout = Layout(Path(store))
    catalog = newest_catalog(layout, "train")
    assert catalog is not None
    column = next(column for column in catalog.columns if column.options.get("resolution") == 512)
    cells = [[Cell(None)], *([cell] for cell in column.row_cells(1))]
    lacking = make_column(column.encoder, column.role, column.fingerprint, column.options, cells)
    publish_catalog(layout, replace(catalog, columns=tuple(lacking if one is column else one for one in catalog.columns)))
    assert main(["export", str(store), "--format", "musubi", "-o", str(out)]) == FAILURES
    assert "latents of 'a/one.png': it was not encoded" in capsys.readouterr().out
    assert len(list((out / "512").glob("*_fk.safetensors"))) == 1


def test_ltx_finds_all_resolutions_and_sources_in_one_folder(store, out, monkeypatch):
    """Its trainer takes one folder, and reads all that is below `latents`."""
    shape = lambda name, resolution: (128, 1, *picture_of(name, resolution).latent)  # noqa: E731
    monkeypatch.setattr(
        f"{__name__}.value", lambda name, resolution, *more: trainers.noise(name, resolution, *more, shape=shape(name, resolution))
    )
    of_ltx: Any = {"family": "ltx2", "text_family": "ltx2"}
    make_store(store, Wanted(sources=("x", "y"), **of_ltx))
    written = send("ltx", store, out)
    assert written.complete, written
    paths = {str(path.relative_to(out)) for path in out.rglob("*.pt")}
    stems = [f"{source}/{side}/{stem}.pt" for source in "xy" for side in (256, 512) for stem in ("a/one", "two")]
    assert paths == {f"{kind}/{stem}" for kind in ("latents", "conditions") for stem in stems}
    assert written.remarks == ("the latents have 3 shapes, and ltx puts any samples into one batch: train with a batch size of 1",)
    with pytest.raises(BadInput, check=asks_for("leave_out")):
        send("ltx", make_store(out / "flipped", Wanted(options={"flip": True}, **of_ltx)), out)
