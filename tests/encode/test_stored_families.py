"""A family's entries through a store: precomputed, read as a trainer reads them."""

import pytest
from PIL import Image

pytestmark = pytest.mark.torch


def test_entries_without_rows_and_of_one_frame_come_back_as_a_batch(built, tmp_path):
    """HunyuanVideo 1.5 keeps no row of a caption that quotes nothing, and latents with an axis of frames."""
    import cachestore as cs

    data = tmp_path / "data"
    data.mkdir()
    for name, caption in (("a", "a cat"), ("b", 'a longer caption with a "SIGN" on it')):
        Image.new("RGB", (64, 64), (200, 30, len(caption))).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text(caption)
    store = tmp_path / "store"
    report = cs.precompute(str(data), model=str(built("hunyuanvideo15").folder), store=str(store), resolution=64, inline=True)
    assert (report.complete, report.encoded, report.failed) == (True, 5, 0)
    dataset = cs.CachedDataset(str(store), latents="mean")
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["latents"].shape == (2, 4, 1, 16, 16)
    assert batch["prompt_embeds"].shape[1] == batch["prompt_embeds_mask"].sum(dim=1).max()
    assert batch["prompt_embeds_2"].shape == (2, 256, 32)
    assert batch["prompt_embeds_mask_2"].any(dim=1).tolist() == [False, True]
    assert dataset.mask_name == "prompt_embeds_mask"
    assert dataset.prompt("")["prompt_embeds_2"].shape == (1, 256, 32)


def test_one_text_encoder_of_several_comes_back_under_its_own_name_and_is_verified(built, tmp_path):
    import cachestore as cs
    from cachestore.cli.lines import training_lines

    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    store, model = str(tmp_path / "store"), str(built("sdxl").folder)
    report = cs.precompute(str(tmp_path / "prompts.txt"), model=model, store=store, encode=("text_encoder_2",), inline=True)
    assert (report.complete, report.encoded) == (True, 3)
    dataset = cs.CachedDataset(store)
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["prompt_embeds.text_encoder_2"].shape[:2] == (2, 77)
    assert batch["pooled_prompt_embeds"].shape[0] == 2
    assert "prompt_embeds" not in batch
    assert "prompt_embeds.text_encoder_2" in "\n".join(training_lines(report))
    verified = cs.verify(store, recompute=3)
    assert verified.ok
    again = cs.precompute(str(tmp_path / "prompts.txt"), model=model, store=store, encode=("text_encoder_2",), inline=True)
    assert (again.encoded, again.reused) == (0, 3)
