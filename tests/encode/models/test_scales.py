"""Weights in 8 bits with scales, and tensors that no module takes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cachestore.core.errors import BadInput
from cachestore.encode.recipes import ModelRequest, encoders_for
from cachestore.encode.scripts import unlike_script
from tests.encode.encoders import batch_for, latents
from tests.encode.tiny import library
from tests.fakes import tells_of

pytestmark = pytest.mark.torch

TEXT, VAE = "model.safetensors", "diffusion_pytorch_model.safetensors"
CAPTIONS = ["a cat", ""]
FORMS = {
    "whole": lambda weight: (),
    "one": lambda weight: (1,),
    "rows": lambda weight: (len(weight),),
    "column": lambda weight: (len(weight), 1),
}
"""Shapes of scales, by the weight."""


def load(path: Path):
    from safetensors.torch import load_file

    return load_file(path)


def save(path: Path, tensors):
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return path


def is_matrix(name, tensor):
    return name.endswith(".weight") and tensor.ndim > 1 and "shared" not in name and "embed" not in name


def in_eight_bits(tensors, *, form="whole", suffix="scale_weight", to="float8_e4m3fn"):
    """(tensors with matrices in 8 bits and their scales, the tensors for which they stand)."""
    import torch

    found, plain = {}, {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        found[name] = plain[name] = tensor
        if is_matrix(name, tensor):
            shape = FORMS[form](tensor)
            scale = torch.linspace(0.001, 0.003, max(1, len(tensor)))[: shape[0] if shape else 1].reshape(shape) * (1 + number / 7)
            rows = scale.reshape(-1, *[1] * (tensor.ndim - 1)) if scale.ndim else scale
            found[name] = (tensor / rows).clamp(-440, 440).to(getattr(torch, to))
            plain[name] = found[name].float() * rows
            found[f"{name.removesuffix('.weight')}.{suffix}"] = scale
    return found, plain


def encoder_of(folder, digest, encode, **options) -> Any:
    return next(one for one in encoders_for(ModelRequest(str(folder), encode=(encode,), **options), digest) if one.recipe.encoder == encode)


def made_by(encoder):
    return latents(encoder) if encoder.recipe.encoder == "latents" else encoder.submit(batch_for(encoder, CAPTIONS))()


def assert_equal_values(found, expected):
    import torch

    for one, other in zip(found.values(), expected.values(), strict=True):
        assert {name: torch.equal(tensor, other[name]) for name, tensor in one.items()} == dict.fromkeys(other, True)


def with_weights(folder, place, component, tensors):
    """A copy of a model with other weights for one component."""
    copy = shutil.copytree(folder, place)
    path = next(path for path in (copy / component).glob("*.safetensors"))
    save(path, tensors)
    return copy


def in_shards(folder, tensors, stem=TEXT):
    """Put weights into two files with an index: what belongs together is in different ones."""
    names = sorted(tensors)
    parts = {f"{stem.removesuffix('.safetensors')}-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    (folder / stem).unlink()
    for file, some in parts.items():
        save(folder / file, {name: tensors[name] for name in some})
    index = {"metadata": {}, "weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))


# Scales


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_with_scales_encodes_text_as_the_weights_for_which_they_stand(tiny_model, digest, tmp_path, form):
    folder = tiny_model("flux").folder
    scaled, plain = in_eight_bits(load(folder / "text_encoder_2" / TEXT), form=form)
    found, expected = (with_weights(folder, tmp_path / n, "text_encoder_2", some) for n, some in (("scaled", scaled), ("plain", plain)))
    made = made_by(encoder_of(found, digest, "text"))
    assert_equal_values(made, made_by(encoder_of(expected, digest, "text")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("suffix", "to"), [("weight_scale", "float8_e4m3fn"), ("scale_weight", "float8_e5m2")])
def test_both_names_of_scales_and_both_floats_of_8_bits_are_known_in_each_dtype(tiny_model, digest, tmp_path, suffix, to, dtype):
    folder = tiny_model("flux").folder
    scaled, plain = in_eight_bits(load(folder / "text_encoder_2" / TEXT), suffix=suffix, to=to)
    found, expected = (with_weights(folder, tmp_path / n, "text_encoder_2", some) for n, some in (("scaled", scaled), ("plain", plain)))
    made = made_by(encoder_of(found, digest, "text", text_dtype=dtype))
    assert_equal_values(made, made_by(encoder_of(expected, digest, "text", text_dtype=dtype)))


def test_what_comes_with_scales_is_left_out(tiny_model, digest, tmp_path):
    import torch

    folder = tiny_model("flux").folder
    scaled, plain = in_eight_bits(load(folder / "text_encoder_2" / TEXT))
    form = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    layers = [name.removesuffix(".scale_weight") for name in scaled if name.endswith(".scale_weight")]
    more = {f"{layers[0]}.scale_input": torch.tensor(3.0), f"{layers[1]}.input_scale": torch.tensor(3.0), f"{layers[2]}.comfy_quant": form}
    more |= {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    found = with_weights(folder, tmp_path / "scaled", "text_encoder_2", {**scaled, **more})
    expected = with_weights(folder, tmp_path / "plain", "text_encoder_2", plain)
    assert_equal_values(made_by(encoder_of(found, digest, "text")), made_by(encoder_of(expected, digest, "text")))


def test_a_scale_may_be_in_another_shard_than_its_weight(tiny_model, digest, tmp_path):
    folder = tiny_model("flux").folder
    scaled, plain = in_eight_bits(load(folder / "text_encoder_2" / TEXT))
    found, expected = (with_weights(folder, tmp_path / n, "text_encoder_2", some) for n, some in (("scaled", scaled), ("plain", plain)))
    in_shards(found / "text_encoder_2", scaled)
    assert_equal_values(made_by(encoder_of(found, digest, "text")), made_by(encoder_of(expected, digest, "text")))


def test_a_vaes_folder_with_scales_makes_the_latents_of_the_weights_for_which_they_stand(tiny_model, digest, tmp_path):
    folder = tiny_model("sd15").folder
    scaled, plain = in_eight_bits(load(folder / "vae" / VAE))
    found, expected = (with_weights(folder, tmp_path / n, "vae", some) for n, some in (("scaled", scaled), ("plain", plain)))
    assert_equal_values(made_by(encoder_of(found, digest, "latents")), made_by(encoder_of(expected, digest, "latents")))


@pytest.mark.parametrize(("model", "component"), [("flux", "text_encoder_2"), ("sdxl", "text_encoder")])
@pytest.mark.parametrize("prefix", ["", "text_encoders.t5xxl.transformer."])
def test_a_single_file_with_scales_encodes_as_the_weights_for_which_they_stand(tiny_model, digest, tmp_path, model, component, prefix):
    folder = tiny_model(model).folder
    scaled, plain = in_eight_bits(load(folder / component / TEXT))
    file = save(tmp_path / "scaled.safetensors", {prefix + name: tensor for name, tensor in scaled.items()})
    expected = with_weights(folder, tmp_path / "plain", component, plain)
    made = made_by(encoder_of(folder, digest, "text", text_encoder=str(file)))
    assert_equal_values(made, made_by(encoder_of(expected, digest, "text")))


def test_a_vaes_single_file_with_scales_makes_the_latents_of_the_weights_for_which_they_stand(tiny_model, digest, tmp_path):
    folder = tiny_model("sd15").folder
    scaled, plain = in_eight_bits(load(folder / "vae" / VAE))
    expected = with_weights(folder, tmp_path / "plain", "vae", plain)
    encoder = encoder_of(folder, digest, "latents", vae=str(save(tmp_path / "vae.safetensors", scaled)))
    assert_equal_values(made_by(encoder), made_by(encoder_of(expected, digest, "latents")))


def test_a_changed_scale_changes_the_keys(tiny_model, digest, tmp_path):
    folder = tiny_model("flux").folder
    scaled, _plain = in_eight_bits(load(folder / "text_encoder_2" / TEXT))
    scale = next(name for name in scaled if name.endswith(".scale_weight"))
    one = with_weights(folder, tmp_path / "one", "text_encoder_2", scaled)
    other = with_weights(folder, tmp_path / "other", "text_encoder_2", {**scaled, scale: scaled[scale] * 2})
    assert encoder_of(one, digest, "text").recipe.fingerprint != encoder_of(other, digest, "text").recipe.fingerprint


def without_one(scaled):
    gone = next(name for name in scaled if name.endswith(".scale_weight"))
    return {name: tensor for name, tensor in scaled.items() if name != gone}, gone.removesuffix(".scale_weight")


def with_odd_shape(scaled):
    import torch

    name = next(name for name in scaled if name.endswith(".scale_weight"))
    return {**scaled, name: torch.ones(3)}, name.removesuffix(".scale_weight")


def with_odd_form(scaled):
    import torch

    name = next(name for name in scaled if name.endswith(".scale_weight")).replace(".scale_weight", ".comfy_quant")
    return {**scaled, name: torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)}, "nvfp4"


def with_a_scale_of_nothing(scaled):
    import torch

    return {**scaled, "no.such.layer.scale_weight": torch.ones(())}, "no.such.layer.scale_weight"


def with_blocks(scaled):
    import torch

    return {**scaled, "encoder.block.0.layer.0.SelfAttention.q.weight_scale_inv": torch.ones(1, 1)}, "weight_scale_inv"


@pytest.mark.parametrize("wrong", [without_one, with_odd_shape, with_odd_form, with_a_scale_of_nothing, with_blocks])
@pytest.mark.parametrize("is_folder", [True, False])
def test_scales_that_are_not_understood_are_refused_and_named(tiny_model, digest, tmp_path, wrong, is_folder):
    folder = tiny_model("flux").folder
    tensors, named = wrong(in_eight_bits(load(folder / "text_encoder_2" / TEXT))[0])
    if is_folder:
        encoder = encoder_of(with_weights(folder, tmp_path / "model", "text_encoder_2", tensors), digest, "text")
    else:
        encoder = encoder_of(folder, digest, "text", text_encoder=str(save(tmp_path / "file.safetensors", tensors)))
    with pytest.raises(BadInput) as refused:
        made_by(encoder)
    assert named in str(refused.value)


def test_weights_in_8_bits_without_scales_are_used_at_their_values_and_the_run_says_so(tiny_model, digest, tmp_path):
    import torch

    folder = tiny_model("flux").folder
    eight = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load(folder / "text_encoder_2" / TEXT).items()}
    plain = {name: tensor.float() for name, tensor in eight.items()}
    found, expected = (with_weights(folder, tmp_path / n, "text_encoder_2", some) for n, some in (("eight", eight), ("plain", plain)))
    encoder = encoder_of(found, digest, "text")
    assert_equal_values(made_by(encoder), made_by(encoder_of(expected, digest, "text")))
    assert [words for words in unlike_script(encoder) if "text_encoder_2" in words and "8 bits" in words]
    assert not [words for words in unlike_script(encoder_of(folder, digest, "text")) if "8 bits" in words]


def test_weights_that_a_library_has_quantised_are_its_own_business_and_named_if_it_cannot_read_them(tiny_model, digest, tmp_path):
    folder = shutil.copytree(tiny_model("flux").folder, tmp_path / "model")
    path = folder / "text_encoder_2/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(BadInput):
        made_by(encoder_of(folder, digest, "text"))


# Tensors that no module takes


@pytest.mark.parametrize(
    ("model", "component"), [("sd15", "text_encoder"), ("sdxl", "text_encoder_2"), ("flux", "text_encoder_2"), ("sd15", "vae")]
)
def test_a_folders_tensor_that_no_module_takes_is_refused_and_named(tiny_model, digest, tmp_path, model, component):
    import torch

    folder = tiny_model(model).folder
    weights = next(path for path in (folder / component).glob("*.safetensors"))
    changed = with_weights(folder, tmp_path / "model", component, {**load(weights), "aaa.bbb.weight": torch.zeros(2)})
    with pytest.raises(BadInput):
        made_by(encoder_of(changed, digest, "latents" if component == "vae" else "text"))


def test_a_shards_tensor_that_no_module_takes_is_refused_and_named(tiny_model, digest, tmp_path):
    import torch

    folder = shutil.copytree(tiny_model("flux").folder, tmp_path / "model")
    tensors = load(folder / "text_encoder_2" / TEXT)
    in_shards(folder / "text_encoder_2", {**tensors, "aaa.bbb.weight": torch.zeros(2)})
    with pytest.raises(BadInput):
        made_by(encoder_of(folder, digest, "text"))


def test_a_folders_tensor_of_another_shape_is_refused_and_named(tiny_model, digest, tmp_path):
    import torch

    folder = tiny_model("flux").folder
    tensors = load(folder / "text_encoder_2" / TEXT)
    name = next(name for name in sorted(tensors) if is_matrix(name, tensors[name]))
    changed = with_weights(folder, tmp_path / "model", "text_encoder_2", {**tensors, name: torch.zeros(3, 3)})
    with pytest.raises(BadInput, check=tells_of(name)):
        made_by(encoder_of(changed, digest, "text"))


def small(config, **more):
    return config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **more)


def t5(name, **more):
    config = getattr(library("transformers"), f"{name}Config")(
        vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4, **more
    )
    return getattr(library("transformers"), f"{name}ForConditionalGeneration")(config)


def whole_clip():
    clip = library("transformers")
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 16}
    text, seen = {**shared, "vocab_size": 64}, {**shared, "image_size": 32, "patch_size": 8}
    return clip.CLIPModel(clip.CLIPConfig(text_config=text, vision_config=seen, projection_dim=16))


WHOLE: dict[str, Any] = {
    "T5EncoderModel": lambda: t5("T5"),
    "UMT5EncoderModel": lambda: t5("UMT5"),
    "MT5EncoderModel": lambda: t5("MT5"),
    "BertModel": lambda: library("transformers").BertForPreTraining(small(library("transformers").BertConfig)),
    "LlamaModel": lambda: library("transformers").LlamaForCausalLM(small(library("transformers").LlamaConfig)),
    "Qwen2Model": lambda: library("transformers").Qwen2ForCausalLM(small(library("transformers").Qwen2Config, num_key_value_heads=2)),
    "XLMRobertaModel": lambda: library("transformers").XLMRobertaForSequenceClassification(small(library("transformers").XLMRobertaConfig)),
    "CLIPTextModel": whole_clip,
    "CLIPTextModelWithProjection": whole_clip,
    "CLIPVisionModelWithProjection": whole_clip,
}
"""By the class that is loaded: a model that has more than it."""


@pytest.mark.parametrize(
    ("class_name", "is_declared"),
    [*((name, True) for name in WHOLE), *((name, False) for name in WHOLE if name != "XLMRobertaModel")],  # only config.json knows its head
)
def test_an_encoder_is_taken_from_a_checkpoint_of_the_whole_model(tmp_path, class_name, is_declared):
    """Heads, decoders and other encoders are left out, also where config.json is that of the encoder alone."""
    import torch

    from cachestore.encode.models import modules
    from cachestore.encode.models.folders import module, read_json

    whole = WHOLE[class_name]()
    whole.save_pretrained(tmp_path)
    if not is_declared:
        config = read_json(tmp_path / "config.json")
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [class_name]}))
    found = modules.load_module(module("part", tmp_path, "transformers", class_name, None), "float32", torch.device("cpu"))
    own, state = whole.state_dict(), found.state_dict()
    shared = [name for name in state if name in own]
    assert len(shared) > len(state) / 2 or class_name not in ("T5EncoderModel", "UMT5EncoderModel", "MT5EncoderModel")
    assert all(torch.equal(state[name], own[name]) for name in shared)


@pytest.mark.parametrize("name", ["text_model.embeddings.position_ids", "encoder.rotary_emb.inv_freq"])
def test_buffers_that_older_versions_saved_are_left_out(tiny_model, digest, tmp_path, name):
    import torch

    folder = tiny_model("sd15").folder
    tensors = load(folder / "text_encoder" / TEXT)
    changed = with_weights(folder, tmp_path / "model", "text_encoder", {**tensors, name: torch.arange(77)})
    assert_equal_values(made_by(encoder_of(changed, digest, "text")), made_by(encoder_of(folder, digest, "text")))
