"""`.precomputed` of LTX-2's trainer, imported and exported: its layout, its padding, its scaling state, and what is refused."""

import tarfile
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cachestore as cs
from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Key, Recipe
from cachestore.core.raw_tensors import Latents, Text
from cachestore.core.tensors import to_raw, to_torch
from cachestore.files.paths import Layout
from cachestore.store.read.rows import newest_catalog
from cachestore.trainers.export_layout import families_of_vae, families_with_vae
from cachestore.trainers.exported import ExportVariant, Named
from cachestore.trainers.families import family_named
from cachestore.trainers.ltx import format as ltx
from cachestore.trainers.matching import ClipFrames
from cachestore.trainers.torch_files import write_torch
from tests.fakes import asks_for
from tests.trainers.caches import bring, equal, send
from tests.trainers.trainers import PICTURES, make_source, noise

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

ROWS, REAL = 12, 5
FAMILY = family_named("ltx2")


def read_back(contents) -> dict[str, Any]:
    """What the trainer loads of a file with these contents."""
    return torch.load(BytesIO(write_torch(contents.tensors, contents.values)), weights_only=True)


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
    with pytest.raises(cs.BadInput, check=asks_for("latents", "another trainer")):
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


def recorded(folder):
    """The pictures, the cache that the trainer's functions wrote, and what its loader returned."""
    with tarfile.open(Path(__file__).with_name("recorded.tar.xz")) as tar:
        tar.extractall(folder, filter="data")
    return folder / "ltx2"


def test_a_cache_of_the_trainer_comes_out_with_the_same_tensors_and_numbers(tmp_path):
    folder = recorded(tmp_path)
    bring("ltx", folder / "cache", tmp_path / "store", folder / "data", family="ltx2")
    written = send("ltx", tmp_path / "store", tmp_path / "out")
    assert (written.complete, written.written, written.casts, written.remarks) == (True, 6, (), ())
    for path in sorted((folder / "cache").rglob("*.pt")):
        theirs, ours = (torch.load(root / path.relative_to(folder / "cache")) for root in (folder / "cache", tmp_path / "out"))
        assert theirs.keys() == ours.keys()
        assert all(equal(ours[name], one) if torch.is_tensor(one) else ours[name] == one for name, one in theirs.items()), path


def test_a_store_of_exported_files_has_the_same_entries_and_writes_the_same_files(tmp_path):
    folder = recorded(tmp_path)
    places = [tmp_path / str(number) for number in range(3)]
    caches, stores = [folder / "cache", places[0] / "cache", places[1] / "cache"], [place / "store" for place in places]
    for cache, store, out in zip(caches, stores, [*caches[1:], places[2] / "cache"], strict=True):
        assert bring("ltx", cache, store, folder / "data", family="ltx2").complete
        assert send("ltx", store, out).complete
    assert {path.name for path in caches[1].iterdir()} == {"latents", "conditions", ".cachestore-export.json"}
    files = [{path.relative_to(cache): path.read_bytes() for path in cache.rglob("*.pt")} for cache in caches[1:]]
    assert files[0] == files[1]
    first, second, third = (newest_catalog(Layout.at(store), "train") for store in stores)
    assert [[*one.keys] for one in second.columns] == [[*one.keys] for one in third.columns]
    with cs.open(stores[0]) as one, cs.open(stores[1]) as other:
        for ours, theirs in zip(first.columns, second.columns, strict=True):
            assert one.get_raw(list(map(Key, ours.keys))) == other.get_raw(list(map(Key, theirs.keys)))


def text_here(rows, **others) -> Text:
    return Text(to_raw({"prompt_embeds": noise("rows", shape=(rows, 4), dtype=torch.bfloat16)}), to_raw(others))


def test_text_that_was_encoded_here_is_padded_on_the_left_to_the_rows_of_the_trainer():
    made = read_back(ltx.text_file(FAMILY, named := Named("a/dog.b.png"), text := text_here(3)))
    assert ltx.text_path(FAMILY, named) == "conditions/a/dog.b.pt"
    assert equal(made["video_prompt_embeds"][-3:], to_torch(text.tensors)["prompt_embeds"])
    assert not made["video_prompt_embeds"][:-3].any()
    assert made["prompt_attention_mask"].tolist() == [0] * 1021 + [1] * 3
    assert made["audio_prompt_embeds"].data_ptr() == made["video_prompt_embeds"].data_ptr(), "it is written once"


def test_text_of_ltx_2_3_has_rows_of_its_own_for_sound():
    sound = noise("sound", shape=(3, 2), dtype=torch.bfloat16)
    made = read_back(ltx.text_file(FAMILY, Named("dog.png"), text_here(3, audio_prompt_embeds=sound)))
    assert equal(made["audio_prompt_embeds"][-3:], sound)
    assert [len(made[name]) for name in made] == [1024] * 3


def test_text_with_more_rows_than_the_trainer_takes_is_refused():
    with pytest.raises(EncodeFailed):
        ltx.text_file(FAMILY, Named("dog.png"), text_here(1025))


def variant(reference="dog.mp4", info=None, **named):
    latents = Latents(to_raw({"": torch.zeros(128, 2, 3, 4)})[""], is_scaled=True, kind="mean")
    return [ExportVariant(Named(reference, info=info or {}, **named), latents)]


@pytest.mark.parametrize(
    ("of", "fps"),
    [
        ({}, 1.0),
        ({"span": ClipFrames(0, 9)}, 24.0),
        ({"span": ClipFrames(0, 9), "fps": 30.0}, 30.0),
        ({"fps": 30.0, "info": {"fps": 12.5}}, 12.5),
        ({"fps": 30.0, "info": {"fps": "fast"}}, 30.0),
        ({"fps": 30.0, "info": {"fps": 10**400}}, 30.0),
    ],
)
def test_latents_are_written_with_their_sizes_and_their_rate(of, fps):
    made = read_back(ltx.latents_file(FAMILY, variant(**of)))
    assert (ltx.latents_path(FAMILY, variant(**of)[0].named), made.pop("latents").shape) == ("latents/dog.pt", (128, 2, 3, 4))
    assert made == {"num_frames": 2, "height": 3, "width": 4, "fps": fps}


@pytest.mark.parametrize(
    "of", [{"span": ClipFrames(4, 9)}, {"reference": "a/latent_1.png"}], ids=["not the beginning", "a name of its older version"]
)
def test_what_the_trainer_would_not_load_as_it_is_fails(of):
    with pytest.raises(EncodeFailed):
        ltx.latents_path(FAMILY, variant(**of)[0].named)


def test_latents_of_the_older_ltx_video_are_not_taken_for_those_of_ltx_2():
    """Their VAEs have the same number of channels and the same factor."""
    of = [
        Recipe("latents", {"components": {"vae": f"diffusers.{name}"}}, {"channels": 128, "scaling_factor": 1.0, "shift_factor": None})
        for name in ("AutoencoderKLLTX2Video", "AutoencoderKLLTXVideo")
    ]
    assert list(families_of_vae(of[0])) == [FAMILY]
    assert list(families_of_vae(of[1])) == list(families_with_vae(of[1])) == []


def test_an_export_of_latents_alone_says_that_the_trainer_uses_none_without_text(tmp_path):
    data = make_cache(tmp_path / "data")
    bring("ltx", data / ".precomputed", tmp_path / "store", data, family="ltx2", encode=["latents"])
    written = send("ltx", tmp_path / "store", tmp_path / "out")
    assert not written.complete
    assert written.not_taken == (
        "ltx uses only what has both text and latents, and this data set has no text: add it with `cachestore precompute`",
    )


def test_a_store_has_what_the_trainer_loads_of_a_cache_that_its_own_functions_wrote(tmp_path):
    folder = recorded(tmp_path)
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
    assert send("ltx", tmp_path / "store", tmp_path / "out").failures == ()
    written = torch.load(tmp_path / "out/latents/dog.pt")
    assert equal(written.pop("latents"), tensor)
    assert written == {"num_frames": 2, "height": 2, "width": 3, "fps": 24.0}
