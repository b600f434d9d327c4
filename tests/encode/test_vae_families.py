"""The rows of VAEs, held against the installed diffusers."""

import pytest

from cachestore.encode.vae_families import VAE_FAMILIES
from tests.encode import tiny
from tests.encode.test_text_families import is_default, signature


@pytest.mark.torch
@pytest.mark.parametrize("class_name", sorted(VAE_FAMILIES))
def test_a_vaes_defaults_are_those_of_its_class(class_name):
    parameters, defaults = signature(class_name, "__init__"), VAE_FAMILIES[class_name].defaults
    for name in defaults.keys() & parameters.keys():
        assert is_default(parameters[name].default, defaults[name])
    if lacking := sorted(defaults.keys() - parameters.keys()):
        tiny.diffusers_lacks(f"{', '.join(lacking)} of {class_name}")
