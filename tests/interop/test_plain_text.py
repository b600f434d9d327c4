"""Families whose text is one tensor, as SimpleTuner and ai-toolkit cache them: made by hand, there and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cachestore as cs
from cachestore.core.errors import BadInput
from cachestore.core.raw_tensors import Text
from cachestore.core.tensors import to_raw, to_torch
from cachestore.interop.formats import ai_toolkit, simpletuner
from cachestore.interop.formats.families import AI_TOOLKIT, FAMILIES, family_named
from cachestore.interop.formats.matching import Named
from tests.interop import trainers
from tests.interop.caches import bring, equal, send
from tests.interop.trainers import PICTURES, noise

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

ST = {"sd15": "sd1x", "wan": "wan", "flux2": "flux2", "flux2-klein-4b": "flux2", "qwen-image": "qwen_image"}
AITK = {"sd15": "sd1", "wan": "wan21", "qwen-image": "qwen_image", "z-image": "zimage"}
CASES = [*(("simpletuner", family) for family in ST), *(("ai-toolkit", family) for family in AITK)]
CHANNELS = {"sd15": (4,), "wan": (16, 1), "flux2": (128,), "flux2-klein-4b": (128,), "qwen-image": (16,), "z-image": (16,)}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Let `trainers` know how the two name these families."""
    monkeypatch.setattr(trainers, "ST_FAMILY", ST)
    monkeypatch.setattr(trainers, "AITK_SPACE", AITK)
    monkeypatch.setattr(trainers, "AITK_TEXT_SPACE", AITK)


def rows_of(caption, family):
    count, width = {"sd15": (77, 768), "flux2": (512, 8), "flux2-klein-4b": (512, 8)}.get(family, (2 + len(caption) % 3, 8))
    return noise(caption, family, shape=(count, width), dtype=torch.bfloat16)


def filled(rows, length=512):
    return torch.nn.functional.pad(rows, (0, 0, 0, length - len(rows)))[None]


def text_of(kind, family, caption):
    """What the trainer caches of a caption."""
    rows, key = rows_of(caption, family), "prompt_embeds" if kind == "simpletuner" else "text_embed"
    match kind, family:
        case "simpletuner", "wan":  # it keeps the text of the empty caption as a mask
            made = {key: filled(rows), "attention_masks": filled(rows_of("", family))}
        case "simpletuner", "qwen-image":
            made = {key: filled(rows, 6), "attention_masks": (torch.arange(6) < len(rows)).long()[None]}
        case "simpletuner", "flux2" | "flux2-klein-4b":
            made = {key: rows[None], "attention_mask": (torch.arange(512) < 9).long()[None]}
        case _, "wan":
            made = {key: filled(rows)}
        case _, "qwen-image":
            made = {key: rows[None], "attention_mask": torch.ones(1, len(rows), dtype=torch.int64)}
        case _, "z-image":
            made = {f"{key}_0": rows}
        case _:
            made = {key: rows[None]}
    return made


def latents_of(picture, family):
    return noise(picture.reference, family, shape=(*CHANNELS[family], *picture.latent), dtype=torch.bfloat16)


def write(kind, family, folder, data):
    """Cache the pictures as the trainer does; return the folder of its cache."""
    for picture in PICTURES:
        text, latents = text_of(kind, family, picture.caption), latents_of(picture, family)
        if kind == "simpletuner":
            paths = trainers.st_latents_path(folder / "vae", picture), trainers.st_text_path(folder / "text", picture.caption, family)
        else:
            paths = trainers.aitk_paths(data, picture, family)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "simpletuner":
            torch.save(latents, paths[0])
            torch.save(text, paths[1])
        else:
            info = {name: json.dumps(value) for name, value in trainers.aitk_info(picture, family).items()}
            save_file({"latent": latents}, paths[0], info | {"format": "pt", "software": "{}"})
            save_file({name: tensor.contiguous() for name, tensor in text.items()}, paths[1])
    return folder if kind == "simpletuner" else data


def loaded(path: Path) -> dict[str, torch.Tensor]:
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return found if isinstance(found, dict) else {"value": found}


def files_of(folder):
    paths = [path for path in folder.rglob("*") if path.suffix in {".pt", ".safetensors"}]
    return {str(path.relative_to(folder)): loaded(path) for path in paths}


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_what_was_cached_comes_in_and_goes_out_bit_for_bit(tmp_path, data, store, out, kind, family):
    cache = write(kind, family, tmp_path / "cache", data)
    report = bring(kind, cache, store, data, family=family)
    assert (report.complete, report.unmatched) == (True, ()), report.report.failures
    ours = cs.CachedDataset(store)
    for picture in PICTURES:
        sample = ours[ours.index(picture.reference)]
        assert equal(sample["latents"].reshape(latents_of(picture, family).shape), latents_of(picture, family))
        real = rows_of(picture.caption, family)
        assert equal(sample["prompt_embeds"][: len(real)], real)
        assert not sample["prompt_embeds"][len(real) :].any()
    sent = send(kind, store, out)
    assert not sent.failures
    theirs, written = files_of(cache), files_of(out)
    assert theirs.keys() == written.keys()
    for name, tensors in theirs.items():
        assert tensors.keys() == written[name].keys()
        assert all(equal(tensor, written[name][key]) for key, tensor in tensors.items()), name


def test_files_whose_name_several_models_share_are_imported_only_for_a_named_family(tmp_path, data, store):
    cache = write("simpletuner", "flux2", tmp_path / "cache", data)
    with pytest.raises(BadInput, match="flux2 or flux2-klein-4b or flux2-klein-9b"):
        bring("simpletuner", cache, store, data)
    assert not store.exists()


def test_text_of_flux2_whose_padding_was_cut_off_is_refused(tmp_path, data, store):
    cache = write("simpletuner", "flux2", tmp_path / "cache", data)
    path = trainers.st_text_path(cache / "text", PICTURES[1].caption, "flux2")
    torch.save({name: tensor[:, :9].clone() for name, tensor in loaded(path).items()}, path)
    (failure,) = bring("simpletuner", cache, store, data, family="flux2").report.failures
    assert (failure["sample"], "it has 9 rows, but simpletuner makes 512" in failure["reason"]) == ("two.png", True)


def test_text_that_was_encoded_here_gets_the_tensors_that_simpletuner_writes_itself():
    for family, name, has_ones in (("wan", "attention_masks", False), ("flux2", "attention_mask", True)):
        rows = rows_of("a caption", family)
        path, contents = simpletuner.text_file(family_named(family), Named("a.png", "a caption"), Text(to_raw({"prompt_embeds": rows})))
        assert path.endswith(f"-{family}.pt")
        made = to_torch({key: (raw[0], raw[1], bytearray(raw[2])) for key, raw in contents.tensors.items()})
        assert equal(made["prompt_embeds"], filled(rows))
        assert equal(made[name], torch.ones(1, 512, dtype=torch.int64) if has_ones else filled(rows))


def test_every_family_of_a_trainer_has_a_state_and_every_one_of_ai_toolkit_a_step():
    for family in FAMILIES:
        assert family.names.keys() == family.states.keys(), family.name
        assert family.text <= family.names.keys(), family.name
    assert ai_toolkit._STEPS.keys() == {family.name for family in FAMILIES if AI_TOOLKIT in family.names}
