"""Exports for NeMo Automodel: the files that its datasets open, by the lists that they read."""

import json

import pytest
import torch

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.raw_tensors import Latents, Text
from cachestore.core.tensors import to_raw
from cachestore.trainers.exported import ExportVariant, Named
from cachestore.trainers.families import family_named
from cachestore.trainers.matching import ClipFrames
from cachestore.trainers.nemo import format as nemo
from tests.fakes import asks_for
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import aitk_info, aitk_paths, write_ai_toolkit
from tests.trainers.caches import bring, equal, send
from tests.trainers.trainers import PICTURES, noise

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

KIND = "nemo-automodel"


@pytest.fixture
def flux(data, store):
    write_ai_toolkit(data, "flux")
    assert bring("ai-toolkit", data, store, data).complete
    return store


def read(folder):
    """What its dataset reads: the lists, then each file that they name, which must lie in the folder."""
    lists = json.loads((folder / "metadata.json").read_text())["shards"]
    items = [item for name in lists for item in json.loads((folder / name).read_text())]
    assert all(item["cache_file"].startswith(f"{folder}/") for item in items)
    return [(item, torch.load(item["cache_file"], weights_only=True)) for item in items]


def test_each_picture_has_one_file_with_its_latents_and_text_which_the_list_names(data, flux, out):
    report = send(KIND, flux, out)
    assert report.complete
    found = {item["image_path"]: (item, values) for item, values in read(out)}
    assert found.keys() == {str(data / picture.reference) for picture in PICTURES}
    for picture in PICTURES:
        item, values = found[str(data / picture.reference)]
        text, (height, width) = trainers.text_of(picture.caption, "flux", torch.bfloat16), picture.latent
        assert equal(values["latent"], trainers.latents_of(picture, "flux", torch.bfloat16))
        assert equal(values["prompt_embeds"], text["prompt"][None])
        assert equal(values["pooled_prompt_embeds"], text["pooled"][None])
        info = aitk_info(picture, "flux")
        assert values["crop_offset"] == [info["crop_x"], info["crop_y"]]
        for one in (item, values):
            assert (one["prompt"], one["bucket_resolution"]) == (picture.caption, [8 * width, 8 * height])
            assert one["original_resolution"] == list(picture.size)
    again = send(KIND, flux, out)
    assert (again.written, again.unchanged) == (0, report.written)


def test_a_data_set_without_text_or_latents_is_refused_and_an_import_too(tmp_path, data, store, out):
    write_ai_toolkit(data, "flux")
    for kind in ("latents", "text"):
        bring("ai-toolkit", data, tmp_path / kind, data, family="flux", encode=[kind])
        with pytest.raises(BadInput):
            send(KIND, tmp_path / kind, out)
    assert not out.exists()
    with pytest.raises(BadInput, check=asks_for("format")):
        bring(KIND, data, store, data)
    with pytest.raises(BadInput, check=asks_for("format", "'nemo-automodel'")):
        send("nemo", tmp_path / "text", out)


def test_a_sample_without_text_fails_and_is_not_in_the_list(data, store, out):
    write_ai_toolkit(data, "flux")
    aitk_paths(data, PICTURES[1], "flux")[1].unlink()
    assert len(bring("ai-toolkit", data, store, data).report.failures) == 1
    (failure,) = send(KIND, store, out).failures
    assert failure["sample"] == "two.png"
    assert len(read(out)) == len(PICTURES) - 1


def test_clips_of_wan_are_grouped_by_bucket_alone_and_their_text_has_226_rows():
    wan, (raw,) = family_named("wan"), to_raw({"latents": noise("clip", shape=(16, 3, 4, 6))}).values()
    named = Named("a.mp4", "a caption", (100, 80), (48, 32), ClipFrames(0, 9), resized=(48, 39), crop=(0, 3, 48, 35))
    path, contents = (
        nemo.latents_path(wan, named),
        nemo.latents_file(wan, [ExportVariant(named, Latents(raw, is_scaled=True, kind="mean"))]),
    )
    assert path.startswith("48x32/")
    assert path.endswith(".meta")
    assert contents.tensors["video_latents"][1] == (1, 16, 3, 4, 6)
    assert contents.values["num_frames"] == 9
    for count in (3, 226, 227):
        text = Text(to_raw({"prompt_embeds": noise("text", shape=(count, 8))}))
        if count > 226:
            with pytest.raises(EncodeFailed):
                nemo.text_file(wan, named, text)
        else:
            assert nemo.text_file(wan, named, text).tensors["text_embeddings"][1] == (1, 226, 8)
