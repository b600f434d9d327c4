"""The lines of `docs/into-a-diffusers-script.md` and `docs/into-your-own-loop.md`, run where a store of a few samples stands."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cachestore as cs
from tests.fakes import captioned
from tests.pages import python_by_title
from tests.train.encoders import ReadableEncoder
from tests.train.stores import FLUX, SDXL, Row, make_store, recipes, recipes_of_model

pytestmark = pytest.mark.torch

ROWS = [Row(f"{number}.png", (f"caption {number}",)) for number in range(8)]


class Denoiser:
    """Takes what a script hands to its denoiser."""

    def __call__(self, *given, **named):
        self.given, self.named = given, named
        return [None]


def test_the_lines_that_log_the_encoding_give_counts_rate_and_time_left(caplog):
    [lines] = python_by_title("into-your-own-loop.md")["Log the encoding"]
    counts: dict[str, Any] = {"done": 3, "total": 9, "doing": "encoding latents", "rate": None, "seconds_left": None}

    def precompute(*_data, on_progress, **_options):
        on_progress(counts)
        on_progress(counts | {"rate": 1.5, "seconds_left": 4.0})

    with caplog.at_level("INFO", "encode"):
        exec(lines, {"cs": SimpleNamespace(precompute=precompute)})
    assert caplog.messages == [
        "3 of 9 values, 0.0 a second, an unknown time left: encoding latents",
        "3 of 9 values, 1.5 a second, 4 s left: encoding latents",
    ]


@pytest.mark.parametrize(("title", "family"), [("SDXL", SDXL), ("FLUX", FLUX)])
def test_the_lines_for_a_diffusers_script_hand_its_denoiser_what_was_encoded_in_its_dtype(tmp_path, title, family):
    store = make_store(tmp_path / "cache", ROWS, recipes(family))
    args = SimpleNamespace(train_data_dir=store, instance_data_dir=store, train_batch_size=2)
    denoiser = Denoiser()
    names: dict[str, Any] = {"torch": torch, "args": args, "weight_dtype": torch.bfloat16, "unet": denoiser, "transformer": denoiser}
    names |= {"noisy_model_input": 1, "packed_noisy_model_input": 1, "timesteps": 1000, "guidance": None, "latent_image_ids": None}
    opening, loading, *loop = python_by_title("into-a-diffusers-script.md")[title]
    exec(opening + loading, names)
    names["batch"] = batch = next(iter(names["train_dataloader"]))
    exec("".join(loop), names)
    assert names["model_input"].dtype == torch.bfloat16
    found = denoiser.named
    if title == "SDXL":
        found = {"encoder_hidden_states": denoiser.given[2], "pooled_projections": found["added_cond_kwargs"]["text_embeds"], **found}
        assert found["added_cond_kwargs"]["time_ids"].tolist() == [[480, 640, 2, 3, 48, 64]] * 2
        assert found["added_cond_kwargs"]["time_ids"].dtype == torch.bfloat16
    else:
        assert found["txt_ids"].shape == (batch["prompt_embeds"].shape[1], 3)
        assert found["txt_ids"].dtype == torch.bfloat16
    assert found["encoder_hidden_states"] is batch["prompt_embeds"]
    assert found["pooled_projections"] is batch["pooled_prompt_embeds"]
    assert {value.dtype for value in (batch["prompt_embeds"], batch["pooled_prompt_embeds"])} == {torch.bfloat16}


def test_the_lines_that_encode_while_they_train_do_so_in_the_first_epoch_alone(tmp_path, monkeypatch, makers):
    monkeypatch.chdir(tmp_path)
    makers.make = ReadableEncoder
    captioned(tmp_path / "photos", 8)
    encoded = []
    names: dict[str, Any] = {"epochs": 3, "device": "cpu", "cs": cs, "torch": torch}
    names["train_step"] = lambda latents, noise, embeds: encoded.append(len(makers.encoded()))
    exec(python_by_title("into-your-own-loop.md")["Encode while training"][0], names)
    assert (len(encoded), sum(encoded[:2]), encoded[2:]) == (6, 17, [0] * 4)
    assert names["data"].report.encoded == 17


def test_the_lines_for_a_loop_of_your_own_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "cache", ROWS, recipes_of_model(tmp_path / "path/of/the/model"))
    seen = []
    names: dict[str, Any] = {"epochs": 2, "device": "cpu"}
    names["train_step"] = lambda latents, noise, embeds: seen.append((latents.dtype, noise.shape == latents.shape, len(embeds)))
    lines = python_by_title("into-your-own-loop.md")
    assert list(lines) == ["Train", "Encode while training", "Log the encoding"]
    exec(lines["Train"][0], names)
    assert seen == [(torch.float32, True, 4)] * 4
