"""The rows of families: the `read` blocks that they give, and the rows held against the installed diffusers."""

import inspect

import pytest

from cachestore.core.errors import BadInput
from cachestore.core.keys import canonical, digest_bytes
from cachestore.encode.families import lookup as families
from cachestore.encode.families.lookup import form_names
from cachestore.encode.families.row import CONNECTORS, DEFAULT_OF_CALL, MAX_LENGTH_ARG, PAST_LIMIT, ZERO_ROWS
from cachestore.encode.families.text import PLAIN, TEXT_FAMILIES
from cachestore.encode.families.vae import VAE_FAMILIES
from tests.encode import tiny

ROWS = sorted(TEXT_FAMILIES)
LACKING = [other for row in TEXT_FAMILIES.values() for other in (*row.without.values(), *row.configured.values())]
BATCH_ARGS = {"device", "num_images_per_prompt", "num_videos_per_prompt", "do_classifier_free_guidance", "batch_size"}

CONFIGURED = {"image_embed_interleave"}
"""Arguments for which `__call__` has None, and takes a value by the configuration of the denoiser, as `configured` does here."""


def signature(class_name, method):
    return inspect.signature(getattr(tiny.of_diffusers(class_name), method)).parameters


@pytest.mark.torch
def test_a_test_is_skipped_with_an_older_diffusers_alone_and_fails_with_the_pinned_one():
    installed = tiny.library("diffusers").__version__
    with pytest.raises(pytest.skip.Exception, match=f"^diffusers {installed} has no FuturePipeline$"):
        tiny.diffusers_lacks("FuturePipeline", pinned=f"{installed}.1")
    with pytest.raises(pytest.fail.Exception, match=f"^diffusers {installed} has no FuturePipeline$"):
        tiny.diffusers_lacks("FuturePipeline", pinned=installed)


@pytest.mark.torch
@pytest.mark.parametrize("class_name", sorted({*TEXT_FAMILIES, *VAE_FAMILIES}))
def test_the_pinned_diffusers_has_every_class_of_the_tables(class_name):
    assert tiny.of_diffusers(class_name).__name__ == class_name


@pytest.mark.parametrize("row", [PLAIN, *TEXT_FAMILIES.values(), *LACKING], ids=lambda row: row.name)
def test_a_row_fits_together(row):
    assert set(row.outputs) <= {*row.returns, *(["audio_prompt_embeds"] if CONNECTORS in row.components else [])}
    assert set(row.rows) <= set(row.outputs)
    assert {rows.component for rows in row.rows.values()} <= set(row.components)
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
    args = TEXT_FAMILIES[pipeline].args
    assert set(args) <= set(encoded)
    assert all(name in called or encoded[name].default is inspect.Parameter.empty for name in args)
    given = {name: value for name, value in args.items() if name in called and name not in CONFIGURED}
    differing = {name: value for name, value in given.items() if not is_default(called[name].default, value)}
    if differing:  # a row's arguments are passed whatever the default is, so that one key means one value
        tiny.diffusers_lacks(f"{differing} among the defaults of {pipeline}")


def is_default(default, value):
    if isinstance(value, dict):
        return digest_bytes(canonical(default)) == value[DEFAULT_OF_CALL]
    return (list(default) if isinstance(default, tuple) else default) == value


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
    parameters, defaults = signature(class_name, "__init__"), VAE_FAMILIES[class_name].defaults
    for name in defaults.keys() & parameters.keys():
        assert is_default(parameters[name].default, defaults[name])
    if lacking := sorted(defaults.keys() - parameters.keys()):
        tiny.diffusers_lacks(f"{', '.join(lacking)} of {class_name}")


def test_an_unknown_class_is_refused_with_the_known_ones():
    with pytest.raises(BadInput):
        families.text_family("NoPipeline")
    with pytest.raises(BadInput):
        families.vae_family("NoVae")


def test_a_vae_whose_config_lacks_what_has_no_default_is_refused():
    with pytest.raises(BadInput):
        families.latents_read(VAE_FAMILIES["AutoencoderKLCosmos"], {}, "mean")


def test_a_vaes_read_block_takes_what_its_config_says_and_the_defaults_for_the_rest():
    row = VAE_FAMILIES["AutoencoderKL"]
    old = families.latents_read(row, {"block_out_channels": [128, 256, 512, 512]}, "moments")
    assert (old["scaling_factor"], old["shift_factor"], old["spatial_factor"], old["channels"]) == (0.18215, None, 8, 4)
    new = families.latents_read(
        row, {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latent_channels": 16, "latents_mean": None}, "mean"
    )
    assert (new["scaling_factor"], new["shift_factor"], new["channels"], new["stored"]) == (0.3611, 0.1159, 16, "mean")
