"""The table of families, held against the installed diffusers."""

import inspect

import pytest

from cachestore.encode import families
from cachestore.encode.families import PLAIN, TEXT_FAMILIES, VAE_FAMILIES, form_names
from cachestore.encode.family import DEFAULT_OF_CALL, MAX_LENGTH_ARG, PAST_LIMIT, ZERO_ROWS
from cachestore.errors import BadInput
from cachestore.keys import canonical, digest_bytes

ROWS = sorted(TEXT_FAMILIES)
LACKING = [lacking for row in TEXT_FAMILIES.values() for lacking in row.without.values()]
BATCH_ARGS = {"device", "num_images_per_prompt", "num_videos_per_prompt", "do_classifier_free_guidance", "batch_size"}


def signature(pipeline, method):
    import diffusers

    return inspect.signature(getattr(getattr(diffusers, pipeline), method)).parameters


def test_an_unknown_class_is_refused_with_the_known_ones():
    with pytest.raises(BadInput, match="FluxPipeline"):
        families.text_family("NoPipeline")
    with pytest.raises(BadInput, match="AutoencoderKL"):
        families.vae_family("NoVae")


@pytest.mark.parametrize("row", [PLAIN, *TEXT_FAMILIES.values(), *LACKING], ids=lambda row: row.name)
def test_a_row_fits_together(row):
    assert set(row.outputs) <= set(row.returns)
    assert set(row.pad) <= set(row.outputs)
    assert row.tokenizer in row.components
    assert set(row.trims) <= set(row.pad)
    assert set(row.trims.values()) <= {*row.returns, ZERO_ROWS, PAST_LIMIT}
    assert not row.is_masked or (MAX_LENGTH_ARG in row.args and "prompt_embeds" in row.pad and row.length_step is None)
    assert row.mask in {None, *row.outputs, *(pad["mask"] for pad in row.pad.values())}
    assert all(constant["like"] in row.outputs for constant in row.constants.values())
    for name, form in row.outputs.items():
        assert set(form) - {"widen"} in ({"from"}, {"join", "dim"})
        assert form.get("widen") in {None, *row.components, *row.asks}
        if "join" in form:
            assert all(part.removeprefix(f"{name}.") in row.components for part in form_names(form))


@pytest.mark.torch
@pytest.mark.parametrize("pipeline", ROWS)
def test_a_rows_components_are_arguments_of_its_pipeline(pipeline):
    assert set(TEXT_FAMILIES[pipeline].components) < set(signature(pipeline, "__init__"))


@pytest.mark.torch
@pytest.mark.parametrize("pipeline", ROWS)
def test_a_rows_arguments_are_the_defaults_of_call(pipeline):
    called, encoded = signature(pipeline, "__call__"), signature(pipeline, "encode_prompt")
    for name, value in TEXT_FAMILIES[pipeline].args.items():
        assert name in encoded
        default = called[name].default
        if isinstance(value, dict):
            assert digest_bytes(canonical(default)) == value[DEFAULT_OF_CALL]
        else:
            assert (list(default) if isinstance(default, tuple) else default) == value


@pytest.mark.torch
@pytest.mark.parametrize("pipeline", ROWS)
def test_every_default_in_which_call_and_encode_prompt_differ_stands_in_the_row(pipeline):
    called, encoded = signature(pipeline, "__call__"), signature(pipeline, "encode_prompt")
    shared = set(called) & set(encoded) - BATCH_ARGS - {"prompt", "self"}
    required = inspect.Parameter.empty
    differing = {name for name in shared if encoded[name].default is not required and called[name].default != encoded[name].default}
    # Where pictures are shown, captions are not cut: test_shown_pictures holds the pipelines to that.
    ignored = {MAX_LENGTH_ARG} if TEXT_FAMILIES[pipeline].pictures else set()
    assert differing - ignored <= set(TEXT_FAMILIES[pipeline].args)


@pytest.mark.torch
@pytest.mark.parametrize("class_name", sorted(VAE_FAMILIES))
def test_a_vaes_defaults_are_those_of_its_class(class_name):
    parameters = signature(class_name, "__init__")
    for name, value in VAE_FAMILIES[class_name].defaults.items():
        default = parameters[name].default
        assert (list(default) if isinstance(default, tuple) else default) == value


def test_a_vaes_read_block_takes_what_its_config_says_and_the_defaults_for_the_rest():
    row = VAE_FAMILIES["AutoencoderKL"]
    old = families.latents_read(row, {"block_out_channels": [128, 256, 512, 512]}, "moments")
    assert (old["scaling_factor"], old["shift_factor"], old["spatial_factor"], old["channels"]) == (0.18215, None, 8, 4)
    new = families.latents_read(
        row, {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latent_channels": 16, "latents_mean": None}, "mean"
    )
    assert (new["scaling_factor"], new["shift_factor"], new["channels"], new["stored"]) == (0.3611, 0.1159, 16, "mean")
