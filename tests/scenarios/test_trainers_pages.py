"""The lines of README.md, docs/commands.md and the pages for users of a trainer, run one after the other where what they name lies."""

import contextlib
import io
import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomllib
from PIL import Image

import cachestore as cs
from cachestore.cli import main
from tests import pages
from tests.trainers import trainers
from tests.trainers.diffusion_pipe.files import write_diffusion_pipe, write_diffusion_pipe_wan

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(180),  # one of them may be the first test that imports diffusers
    pytest.mark.usefixtures("torch_files_read_here"),
]

PHOTOS = (
    trainers.Picture("fox.png", "a red fox, in snow", (640, 480), (48, 64)),
    trainers.Picture("bird.png", "ein grüner Vogel", (240, 240), (30, 30)),
    trainers.Picture("dog.png", "a dog", (300, 400), (40, 30)),
)
CLIPS = {"dog.mkv": "a dog runs"}
CLIP_SIZE, CLIP_FRAMES = (96, 64), 33
WIDTH = 32
"""Of the text of tiny models."""
MODELS = {
    "sdxl": "sdxl",
    "stable-diffusion-xl-base-1.0": "sdxl",
    "flux": "flux",
    "z-image": "zimage",
    "wan": "wan",
    "Wan2.1-T2V-1.3B-Diffusers": "wan",
}
"""The family of each model that a page names."""
NOT_RUN = {
    "git clone … && cd cachestore": "test_start_page.py does it in a new environment",
    "pip install '.[encode]'": "test_start_page.py does it in a new environment",
    "CACHESTORE=cache/ accelerate launch train_from_store.py": "SimpleTuner is not installed; `conformance/trainers.py` runs its code",
    "python3 scripts/conformance/trainers.py simpletuner --checkout ~/SimpleTuner --live": "it needs a clone of SimpleTuner",
}
FILES = {
    "README.md": {"report.html": 1},
    "into-a-diffusers-script.md": {},
    "commands.md": {},
    "coming-from/sd-scripts.md": {"photos/*_sdxl.npz": 3, "photos/*_te_outputs.npz": 3},
    "coming-from/ai-toolkit.md": {"photos/_latent_cache/*.safetensors": 4, "photos/_t_e_cache/*.safetensors": 3},
    "coming-from/simpletuner.md": {"exported/text/*.pt": 4, "exported/vae/*.pt": 3, "exported/aspect_ratio_bucket_*_train.json": 2},
    "coming-from/musubi-tuner.md": {"exported/*_zi.safetensors": 3, "exported/*_zi_te.safetensors": 3},
    "coming-from/diffusion-pipe.md": {},
}
"""What each page makes beside stores, and how many."""
ALWAYS = "coming-from/sd-scripts.md"
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Builds a model of a few kilobytes, whose VAE makes pictures smaller as real ones do."""
    import tiny_models
    import torch

    from tests.encode import tiny_families

    folder = tmp_path_factory.mktemp("models")

    def build(family):
        if not (folder / family).exists():
            torch.manual_seed(0)
            made = tiny_families.FAMILIES[family]
            with contextlib.redirect_stderr(io.StringIO()):
                tiny_families.save(made, made.build(), folder / family)
        return folder / family

    with pytest.MonkeyPatch.context() as patch:
        small = partial(tiny_models.vae, widths=(4, 4, 4, 4), mid_block_add_attention=False)
        patch.setattr(tiny_families.tiny, "vae", small)
        yield build


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with photographs, in which `precompute` encodes in this process."""
    from cachestore.jobs.start.here import precompute_here

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "cachestore.jobs.start.launching.run_workers", lambda request, *_others, **_named: precompute_here(request).as_json()
    )
    for number, picture in enumerate(PHOTOS):
        path = trainers.make_source(tmp_path / "photos", [picture]) / picture.reference
        noise = np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(noise).resize(picture.size).save(path)
    return tmp_path


def lay_out_clips(folder):
    from tests.encode.footage import moving, write

    folder.mkdir()
    for number, (name, caption) in enumerate(CLIPS.items()):
        frames = [np.roll(frame, 9 * number, axis=1) for frame in moving(CLIP_FRAMES, CLIP_SIZE)]
        (folder / name).write_bytes(write(frames, rate=16))
        (folder / name).with_suffix(".txt").write_text(caption)


def prepare(line, model):
    """Lay out what a line names and the page does not make: models, videos, and the caches of trainers."""
    for word in line:
        name = word.rstrip("/")
        if name in MODELS and not Path(name).exists():
            Path(name).symlink_to(model(MODELS[name]))
        if name == "videos" and not Path(name).exists():
            lay_out_clips(Path(name))
    if line[:3] == ["cachestore", "import", "simpletuner"]:  # as after the section above it: the page says what to copy
        shutil.copytree("exported", "cache_folder")
        for path in Path("exported").glob("aspect_ratio_bucket_*.json"):
            shutil.copy(path, "photos")
    if "photos/cache/flux" in line:
        write_diffusion_pipe(Path("photos/cache/flux"), "flux", PHOTOS, width=WIDTH)
    if "videos/cache/wan" in line:
        for name, caption in CLIPS.items():
            write_diffusion_pipe_wan(Path("videos/cache/wan"), name, caption, CLIP_FRAMES, CLIP_SIZE, width=WIDTH)


def lay_out(page, model, capsys):
    """Lay out what a whole page supposes."""
    if page == "README.md":  # it trains with batches of 8
        copy_bird("photos", 7)
    if page == "coming-from/ai-toolkit.md":  # for whom used another trainer before, with the same folder and store
        run(ALWAYS, model, capsys)
    if page == "commands.md":  # it repeats a command
        copy_bird("more-photos", 1)
        cs.precompute("photos/", model=model("flux"), store="cache/", name="flux", resolution=64, inline=True)


def copy_bird(folder, count):
    Path(folder).mkdir(exist_ok=True)
    for number in range(count):
        for ending in ("png", "txt"):
            shutil.copy(f"photos/bird.{ending}", f"{folder}/bird-{number}.{ending}")


def lines_for_a_shell(page):
    return [line for kind, lines in pages.blocks(pages.text_of(page)) if kind in pages.SHELL for line in pages.shell_lines(lines)]


def run(page, model, capsys):
    """Run what a page has for a shell, but not the lines that cannot run here; and the Python that `precompute` prints at its end."""
    for line in lines_for_a_shell(page):
        if line not in NOT_RUN:
            words = shlex.split(line)
            assert words[0] == "cachestore", f"{line}: run it, or add it to NOT_RUN"
            prepare(words, model)
            assert main(words[1:]) == 0, line
            _counts, found, lines = capsys.readouterr().out.partition("import cachestore as cs\n")
            assert bool(found) == (words[1] == "precompute")
            exec(found + lines, {})


def test_the_lines_that_are_not_run_stand_in_a_page():
    assert NOT_RUN.keys() <= {line for page in FILES for line in lines_for_a_shell(page)}


@pytest.mark.parametrize("page", [ALWAYS, *(pytest.param(page, marks=SLOW) for page in FILES if page != ALWAYS)])
def test_the_lines_of_a_page_run_one_after_the_other_and_make_what_it_says(page, here, model, capsys):
    lay_out(page, model, capsys)
    photos = len([*here.glob("*photos/*.png")])
    run(page, model, capsys)
    for _kind, lines in pages.blocks(pages.text_of(page), "python") if page == "README.md" else ():
        exec(lines, {"train_step": lambda latents, embeds: float((latents.mean() + embeds.mean()).isfinite())})
    assert {glob: len([*here.glob(glob)]) for glob in FILES[page]} == FILES[page]
    for store in {path.parent for path in here.glob("*/cachestore.json")}:
        assert cs.verify(store).ok
        for one in cs.stats(store).catalogs:
            assert one.samples == (len(CLIPS) if one.name == "videos" else photos)
    for kind, lines in pages.blocks(pages.text_of(page), "json", "toml"):
        named = paths_in(json.loads(lines) if kind == "json" else tomllib.loads(lines))
        assert named
        assert [path for path in named if not Path(path).is_dir()] == []
    for folder in {path.parent for path in here.rglob(".cachestore-export.json")}:
        assert main(["export", "--remove", str(folder)]) == 0
    assert [path for glob in FILES[page] for path in here.glob(glob) if path.name != "report.html"] == []


def paths_in(found: Any) -> list[str]:
    """The folders that a trainer's configuration names."""
    if isinstance(found, dict | list):
        return [path for one in (found.values() if isinstance(found, dict) else found) for path in paths_in(one)]
    return [found] if isinstance(found, str) and "/" in found else []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("title", ["SDXL", "FLUX"])
def test_the_lines_for_a_diffusers_script_train_its_denoiser_under_accelerate(title, here, model):
    import torch
    from accelerate import Accelerator
    from diffusers import FluxPipeline

    torch.manual_seed(0)
    folder = model(title.lower())
    cs.precompute("photos/", model=folder, store="cache/", resolution=128, inline=True)
    opening, loading, *loop = pages.python_by_title("into-a-diffusers-script.md")[title]
    names: dict[str, Any] = {"torch": torch, "weight_dtype": torch.float32}
    names["args"] = SimpleNamespace(train_data_dir="cache/", instance_data_dir="cache/", train_batch_size=1)
    exec(opening + loading, names)
    accelerator = Accelerator(cpu=True)
    denoiser = tiny_denoiser(title)
    denoiser, optimizer, loader = accelerator.prepare(denoiser, torch.optim.SGD(denoiser.parameters(), 0.1), names["train_dataloader"])
    names |= {"unet": denoiser, "transformer": denoiser, "guidance": None}
    losses = []
    for batch in loader:
        latents = batch["latents"]
        count, _channels, height, width = latents.shape
        noise = torch.randn_like(latents)
        names |= {"batch": batch, "timesteps": torch.full((count,), 500.0), "noisy_model_input": latents + noise}
        if title == "FLUX":
            noise = FluxPipeline._pack_latents(noise, *latents.shape)
            names["packed_noisy_model_input"] = FluxPipeline._pack_latents(latents, *latents.shape) + noise
            names["latent_image_ids"] = FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32)
        exec("".join(loop), names)
        assert names["model_input"].equal(latents)
        loss = torch.nn.functional.mse_loss(names["model_pred"], noise)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == len(PHOTOS)
    assert all(np.isfinite(losses))


def tiny_denoiser(title):
    """What takes the latents and the text of the tiny models."""
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel

    if title == "FLUX":
        heads: Any = {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "axes_dims_rope": (4, 4, 8),
        }
        return FluxTransformer2DModel(in_channels=64, joint_attention_dim=32, pooled_projection_dim=32, **heads)
    sizes: Any = {"block_out_channels": (32,), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 32 + 48}
    blocks: Any = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    added: Any = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 48 + 6 * 8}
    return UNet2DConditionModel(**sizes, **blocks, **added)
