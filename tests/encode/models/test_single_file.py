"""Single weight files: recognised by their headers, loaded as their folders would be, in the layouts that are in use."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestore.core.errors import BadInput
from cachestore.encode.models import single_file
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.encode.encoders import batch_for, latents

CAPTIONS = ["", "a cat", "a dog in the rain"]
VAE_WEIGHTS, TEXT_WEIGHTS = "diffusion_pytorch_model.safetensors", "model.safetensors"


def encoder_of(folder, digest, encode, **options) -> Any:
    return encoders_for(ModelRequest(str(folder), encode=[encode], device="cpu", **options), digest)[0]


def texts(encoder):
    return encoder.submit(batch_for(encoder, CAPTIONS))()


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for key, tensors in expected.items():
        assert {name: found[key][name].equal(tensor) for name, tensor in tensors.items()} == dict.fromkeys(tensors, True)


def save(path: Path, tensors):
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    return path


def load(path: Path):
    from safetensors.torch import load_file

    return load_file(path)


def without_weights(folder: Path, tmp_path: Path, component: str):
    """A copy of a model whose component has a config.json alone."""
    shutil.copytree(folder, tmp_path / "model")
    for path in (tmp_path / "model" / component).glob("*.safetensors"):
        path.unlink()
    return tmp_path / "model"


def original_vae(tensors):
    """The names of the tiny VAE as Stable Diffusion's own code has them."""
    import re

    levels = 2

    def renamed(name):
        name = re.sub(r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)", r"encoder.down.\1.block.\2", name)
        name = re.sub(r"encoder\.down_blocks\.(\d+)\.downsamplers\.0", r"encoder.down.\1.downsample", name)
        name = re.sub(r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}.block.{m[2]}", name)
        name = re.sub(r"decoder\.up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"decoder.up.{levels - 1 - int(m[1])}.upsample", name)
        name = re.sub(r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_shortcut", "nin_shortcut")
        for own, original in {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}.items():
            name = re.sub(rf"(attn_1\.){re.escape(own)}\b", rf"\g<1>{original}", name)
        return name.replace("conv_norm_out", "norm_out")

    linear = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
    return {renamed(name): tensor[..., None, None] if name.endswith(linear) else tensor for name, tensor in tensors.items()}


def open_clip(tensors):
    """A CLIP text encoder with a projection by the names of OpenCLIP, whose attention keeps query, key and value in one."""
    import torch

    plain = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    found = {
        "token_embedding.weight": plain["embeddings.token_embedding.weight"],
        "positional_embedding": plain["embeddings.position_embedding.weight"],
        "ln_final.weight": plain["final_layer_norm.weight"],
        "ln_final.bias": plain["final_layer_norm.bias"],
        "text_projection": plain["text_projection.weight"].T,
        "logit_scale": torch.tensor(4.6),
    }
    parts = {
        "self_attn.out_proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
    }
    for layer in {name.split(".")[2] for name in plain if name.startswith("encoder.layers.")}:
        own, original = f"encoder.layers.{layer}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            found |= {f"{original}{there}.{kind}": plain[f"{own}{here}.{kind}"] for here, there in parts.items()}
            joined = torch.cat([plain[f"{own}self_attn.{which}_proj.{kind}"] for which in "qkv"])
            found[f"{original}attn.in_proj_{kind}"] = joined
    return found


# What is told without torch


def test_a_file_without_tensors_is_refused(tmp_path):
    (tmp_path / "empty.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(BadInput):
        single_file.read_shapes(tmp_path / "empty.safetensors")


@pytest.mark.parametrize("content", [b"", b"no weights at all", (100).to_bytes(8, "little") + b"{"])
def test_a_file_that_is_damaged_is_refused_and_named(tmp_path, content):
    (tmp_path / "vae.safetensors").write_bytes(content)
    with pytest.raises(BadInput):
        single_file.read_shapes(tmp_path / "vae.safetensors")


def test_a_file_that_is_not_there_is_refused_and_named(tmp_path, digest):
    for name in ("vae", "text_encoder"):
        options: dict[str, Any] = {name: str(tmp_path / "no.safetensors")}
        with pytest.raises(BadInput):
            encoders_for(ModelRequest(str(tiny.look_alike(tmp_path / name)), **options), digest)
    with pytest.raises(BadInput):
        encoder_of("no.safetensors", digest, "text")


def header(path: Path, **shapes):
    """A file of these tensors, all zeros."""
    from safetensors.numpy import save_file

    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["conditioner.embedders.0.transformer.x", "model.diffusion_model.x"], r"StableDiffusionXLPipeline as P; P\.from_single_file"),
        (["cond_stage_model.transformer.x", "first_stage_model.x"], "StableDiffusionPipeline as P"),
        (["model.diffusion_model.joint_blocks.0.x", "text_encoders.clip_l.x"], "StableDiffusion3Pipeline as P"),
        (["encoder.conv_in.weight", "decoder.conv_in.weight"], "give it as vae"),
        (["shared.weight", "encoder.block.0.x"], "give it as text_encoder"),
        (["double_blocks.0.img_attn.x"], "is a denoiser alone"),
        (["lora_unet_down_blocks_0.lora_down.weight"], "is an adapter"),
        (["something.else"], r"such as something\.else"),
    ],
)
def test_a_single_file_as_model_is_refused_with_what_it_is_and_what_to_do(tmp_path, digest, names, message):
    file = header(tmp_path / "model.safetensors", **dict.fromkeys(names, (2,)))
    with pytest.raises(BadInput, match=message):
        encoder_of(file, digest, "text")


def test_planning_with_single_files_imports_no_torch(tmp_path, digest):
    import subprocess
    import sys

    folder = tiny.look_alike(tmp_path / "model")
    tiny.write(folder / "text_encoder/config.json", {"model_type": "clip_text_model", "vocab_size": 9, "hidden_size": 4})
    vae = header(tmp_path / "vae.safetensors", **{"encoder.conv_in.weight": (1,)})
    text = header(tmp_path / "clip.safetensors", **{"text_model.embeddings.token_embedding.weight": (9, 4)})
    program = (
        "import sys; from cachestore.encode.recipes import ModelRequest, encoders_for\n"
        f"encoders_for(ModelRequest({str(folder)!r}, vae={str(vae)!r}, text_encoder={str(text)!r}), lambda path: '0' * 64)\n"
        "print([name for name in ('torch', 'transformers', 'diffusers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# What is loaded


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vaes_file_makes_what_its_folder_makes_under_the_same_keys(tiny_model, digest, tmp_path, dtype):
    folder = tiny_model("sd15").folder
    expected = encoder_of(folder, digest, "latents", vae_dtype=dtype)
    file = tmp_path / "elsewhere" / "renamed.safetensors"
    file.parent.mkdir()
    shutil.copyfile(folder / "vae" / VAE_WEIGHTS, file)
    found = encoder_of(without_weights(folder, tmp_path, "vae"), digest, "latents", vae=str(file), vae_dtype=dtype)
    assert found.recipe == expected.recipe
    assert_equal(latents(found), latents(expected))


@pytest.mark.torch
@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_a_vae_in_its_original_layout_makes_what_its_folder_makes(tiny_model, digest, tmp_path, prefix):
    import torch

    folder = tiny_model("sd15").folder
    own = load(folder / "vae" / VAE_WEIGHTS)
    renamed = original_vae(own)
    assert set(renamed) & set(own) < set(own)
    others = {"model.diffusion_model.input_blocks.0.weight": torch.zeros(2)} if prefix else {}
    file = save(tmp_path / "original.safetensors", {**{prefix + name: tensor for name, tensor in renamed.items()}, **others})
    expected, found = encoder_of(folder, digest, "latents"), encoder_of(folder, digest, "latents", vae=str(file))
    assert found.recipe.fingerprint != expected.recipe.fingerprint
    assert_equal(latents(found), latents(expected))


def original_wan():
    """The names that diffusers' conversion of Wan's VAE knows, by those it gives them."""
    conversion = tiny.library("diffusers.loaders.single_file_utils").convert_wan_vae_to_diffusers
    ends = [f"{part}.{kind}" for part in ("residual.2", "residual.6", "shortcut", "resample.1", "time_conv") for kind in ("weight", "bias")]
    ends += ["residual.0.gamma", "residual.3.gamma"]
    blocks = [*(f"encoder.downsamples.{at}" for at in range(11)), *(f"decoder.upsamples.{at}" for at in range(15))]
    blocks += [f"{side}.middle.{at}" for side in ("encoder", "decoder") for at in (0, 2)]
    names = [f"{block}.{end}" for block in blocks for end in ends]
    parts = [
        "conv1",
        "conv2",
        *(f"{side}.{part}" for side in ("encoder", "decoder") for part in ("conv1", "head.2", "middle.1.to_qkv", "middle.1.proj")),
    ]
    names += [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    names += [f"{side}.{part}.gamma" for side in ("encoder", "decoder") for part in ("head.0", "middle.1.norm")]
    return {own: original for original in names for own in conversion({original: 0})}


@pytest.mark.torch
def test_wans_vae_in_its_original_layout_makes_what_its_folder_makes(digest, tmp_path):
    if "AutoencoderKLWan" not in tiny.library("diffusers.loaders.single_file_model").SINGLE_FILE_LOADABLE_CLASSES:
        tiny.diffusers_lacks("conversion of Wan's VAE")
    folder = tmp_path / "vae"  # of four levels like the real one: the conversion knows no other
    tiny.library("diffusers").AutoencoderKLWan(base_dim=4, z_dim=4).save_pretrained(folder)
    names, own = original_wan(), load(folder / VAE_WEIGHTS)
    file = save(tmp_path / "wan_2.1_vae.safetensors", {names[name]: tensor for name, tensor in own.items()})
    assert len(set(load(file)) & set(own)) < len(own) / 10
    found, expected = (encoder_of(folder, digest, "latents", **options) for options in ({"vae": str(file)}, {}))
    assert_equal(latents(found), latents(expected))


@pytest.mark.torch
def test_a_vaes_file_that_does_not_fit_names_its_first_tensor(tiny_model, digest, tmp_path):
    import torch

    folder = tiny_model("sd15").folder
    own = load(folder / "vae" / VAE_WEIGHTS)
    first = "decoder.conv_in.weight"
    cases = {
        "lack 1 tensor, such as decoder.conv_in.weight": {name: tensor for name, tensor in own.items() if name != first},
        "does not have, such as aaa.weight": {**own, "aaa.weight": torch.zeros(2)},
        first: {**own, first: torch.zeros(3, 3)},
        "neither in the layout of diffusers nor in the original one": {"bbb.weight": torch.zeros(2)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        encoder = encoder_of(folder, digest, "latents", vae=str(save(tmp_path / f"{number}.safetensors", tensors)))
        with pytest.raises(BadInput, match=message):
            latents(encoder)


@pytest.mark.torch
def test_a_vae_that_diffusers_converts_from_no_other_layout_says_so(built, digest, tmp_path):
    import torch

    folder = built("qwenimage").folder
    encoder = encoder_of(folder, digest, "latents", vae=str(save(tmp_path / "x.safetensors", {"encoder.conv1.weight": torch.zeros(2)})))
    with pytest.raises(BadInput):
        latents(encoder)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "component"), [("sd15", "text_encoder"), ("sdxl", "text_encoder_2"), ("flux", "text_encoder_2")])
def test_a_text_encoders_file_takes_the_place_of_the_one_it_was_saved_for(tiny_model, digest, tmp_path, name, component):
    folder = tiny_model(name).folder
    file = tmp_path / "encoder.safetensors"
    shutil.copyfile(folder / component / TEXT_WEIGHTS, file)
    expected = encoder_of(folder, digest, "text")
    found = encoder_of(without_weights(folder, tmp_path, component), digest, "text", text_encoder=str(file))
    assert found.recipe == expected.recipe
    assert_equal(texts(found), texts(expected))


@pytest.mark.torch
@pytest.mark.parametrize("prefix", ["", "text_model.", "conditioner.embedders.0.transformer.text_model."])
def test_clip_is_read_with_and_without_the_prefixes_in_use(tiny_model, digest, tmp_path, prefix):
    import torch

    folder = tiny_model("sdxl").folder
    plain = {name.removeprefix("text_model."): tensor for name, tensor in load(folder / "text_encoder" / TEXT_WEIGHTS).items()}
    tensors = {prefix + name: tensor for name, tensor in plain.items()} | {"logit_scale": torch.tensor(4.6)}
    found = encoder_of(folder, digest, "text", text_encoder=str(save(tmp_path / "clip_l.safetensors", tensors)))
    assert_values_equal(texts(found), texts(encoder_of(folder, digest, "text")))


@pytest.mark.torch
@pytest.mark.parametrize("prefix", ["", "conditioner.embedders.1.model."])
def test_clip_in_the_layout_of_openclip_makes_what_its_folder_makes(tiny_model, digest, tmp_path, prefix):
    folder = tiny_model("sdxl").folder
    tensors = open_clip(load(folder / "text_encoder_2" / TEXT_WEIGHTS))
    file = save(tmp_path / "clip_g.safetensors", {prefix + name: tensor for name, tensor in tensors.items()})
    found = encoder_of(folder, digest, "text", text_encoder=str(file))
    assert_values_equal(texts(found), texts(encoder_of(folder, digest, "text")))


def assert_values_equal(found, expected):
    """Equal tensors in equal order, under whatever keys."""
    assert_equal(dict(enumerate(found.values())), dict(enumerate(expected.values())))


@pytest.mark.torch
def test_weights_of_eight_bits_are_taken_at_the_values_they_have(tiny_model, digest, tmp_path):
    import torch

    folder = tiny_model("flux").folder
    eight = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load(folder / "text_encoder_2" / TEXT_WEIGHTS).items()}
    sixteen = {name: tensor.to(torch.bfloat16) for name, tensor in eight.items()}
    files = [save(tmp_path / f"{number}.safetensors", tensors) for number, tensors in enumerate((eight, sixteen))]
    found, expected = (texts(encoder_of(folder, digest, "text", text_encoder=str(file))) for file in files)
    assert_values_equal(found, expected)


@pytest.mark.torch
def test_a_text_encoders_file_that_does_not_fit_names_its_first_tensor(tiny_model, digest, tmp_path):
    import torch

    folder = tiny_model("sd15").folder
    own = load(folder / "text_encoder" / TEXT_WEIGHTS)
    first = next(name for name in sorted(own) if name.endswith("layers.0.mlp.fc1.weight"))
    cases = {
        "lack 1 tensor, such as .*fc1.weight": {name: tensor for name, tensor in own.items() if name != first},
        "does not have, such as aaa.weight": {**own, "aaa.weight": torch.zeros(2)},
        "with another shape, such as .*fc1.weight": {**own, first: torch.zeros(3, 3)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        encoder = encoder_of(folder, digest, "text", text_encoder=str(save(tmp_path / f"{number}.safetensors", tensors)))
        with pytest.raises(BadInput, match=message):
            texts(encoder)


@pytest.mark.torch
def test_a_file_that_is_no_one_encoder_of_the_model_is_refused_when_planning(tiny_model, digest, tmp_path):
    folder = tiny_model("sdxl").folder
    one, two = (load(folder / name / TEXT_WEIGHTS) for name in ("text_encoder", "text_encoder_2"))
    both = {f"conditioner.embedders.0.transformer.{name}": tensor for name, tensor in one.items()}
    both |= {f"conditioner.embedders.1.model.{name}": tensor for name, tensor in open_clip(two).items()}
    with pytest.raises(BadInput):
        encoder_of(folder, digest, "text", text_encoder=str(save(tmp_path / "whole.safetensors", both)))
    other = save(tmp_path / "vae.safetensors", load(folder / "vae" / VAE_WEIGHTS))
    with pytest.raises(BadInput):
        encoder_of(folder, digest, "text", text_encoder=str(other))


@pytest.mark.torch
def test_a_plain_text_encoders_file_is_read_by_the_config_of_its_folder(plain_model, digest, tmp_path):
    folder = plain_model[0]
    file = tmp_path / "bert.safetensors"
    shutil.copyfile(folder / TEXT_WEIGHTS, file)
    found, expected = encoder_of(folder, digest, "text", text_encoder=str(file)), encoder_of(folder, digest, "text")
    assert found.recipe == expected.recipe
    assert_equal(texts_one_by_one(found), texts_one_by_one(expected))


def texts_one_by_one(encoder):
    made = {}
    for caption in CAPTIONS:
        resolved = encoder.resolve({"caption": caption}, None)
        made |= encoder.submit([(resolved.key, encoder.prepare(resolved).payload)])()
    return made


def test_a_file_for_a_model_without_such_a_part_is_refused(tmp_path, digest):
    vae = header(tmp_path / "vae.safetensors", **{"encoder.conv_in.weight": (1,)})
    with pytest.raises(BadInput):
        encoder_of(tiny.look_alike_text(tmp_path / "text"), digest, "latents", vae=str(vae))
    with pytest.raises(BadInput):
        encoder_of(tiny.look_alike_vae(tmp_path / "vae"), digest, "text", text_encoder=str(vae))
