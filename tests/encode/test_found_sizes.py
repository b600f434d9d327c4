"""What the entries of a pipeline without a row take: guessed beforehand, and held against the room once its text encoder is loaded."""

import json

import pytest

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.core.errors import WriteFailed
from tests.encode import tiny_families
from tests.encode.encoders import encoder_of, entries_of

pytestmark = pytest.mark.torch


@pytest.fixture
def ltx2(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    return tiny_families.save_ltx2(tmp_path / "model")


def asked_for(model, tmp_path, *more):
    prompts, store = str(tmp_path / "prompts.txt"), str(tmp_path / "store")
    given = ["--encode", "text", "--device", "cpu", "--encode-arg", "max_sequence_length=64"]
    return ["precompute", prompts, "--model", str(model), "--store", store, *given, *more]


def test_a_guess_is_called_one_and_the_bytes_are_reported_anew_once_the_encoder_is_loaded(ltx2, tmp_path, capsys):
    asked = asked_for(ltx2, tmp_path)
    assert main([*asked, "--plan-only", "--json"]) == OK
    planned = json.loads(capsys.readouterr().out)
    assert (planned["is_guess"], planned["estimated_bytes"]) == (True, 3 * (64 * 32 * 4 + 32 * 4))
    assert main([*asked, "--plan-only"]) == OK
    assert "24.4 KiB needed (a guess" in capsys.readouterr().out
    assert main([*asked, "--json"]) == OK
    reported = capsys.readouterr()
    made = 3 * (64 * 7 * 32 * 4 + 64 * 8)
    assert f"now that the text encoder is loaded: {made / 1024:.1f} KiB needed, " in reported.err
    assert made <= json.loads(reported.out)["bytes"] <= 1.01 * made


def test_a_pass_that_would_not_fit_ends_when_the_encoder_is_loaded_and_stores_nothing(ltx2, tmp_path, monkeypatch):
    monkeypatch.setattr("cachestore.jobs.forecast.free_bytes", lambda _path: 100_000)
    with pytest.raises(WriteFailed, match=r"about 173568 bytes are needed, 100000 are free at .*make room"):
        cs.precompute(
            tmp_path / "prompts.txt",
            model=ltx2,
            store=tmp_path / "store",
            encode=["text"],
            encode_args={"max_sequence_length": 64},
            device="cpu",
            inline=True,
        )
    assert len(cs.open(tmp_path / "store")) == 0


@pytest.mark.parametrize("name", sorted(tiny_families.FAMILIES))
def test_the_forecast_of_a_family_of_the_table_is_what_is_stored_of_its_longest_captions(built, name, digest):
    encoder, caption = encoder_of(built(name), digest, "text"), 'a "word" ' * 300
    reported = encoder.entry_bytes(encoder.count_tokens([caption])[0])
    made = sum(tensor.nbytes for tensor in entries_of(encoder, [caption])[caption].values())
    assert not encoder.is_guessing
    assert 0.9 * made <= reported <= 1.5 * made  # of SD3 CLIP has fewer rows than T5
