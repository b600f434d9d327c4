"""Options in messages."""

import pytest

from cachestore.core.spelling import for_command_line, option


@pytest.mark.parametrize(
    ("name", "value", "typed", "called"),
    [
        ("bucket_step", None, "--bucket-step", "bucket_step"),
        ("data", None, "DATA", "data"),
        ("flip", True, "--flip", "flip=True"),
        ("crop", "random", "--crop random", 'crop="random"'),
        ("variants", 2, "--variants 2", "variants=2"),
        ("vae", "PATH", "--vae PATH", "vae=PATH"),
        ("encode_arg", "NAME=VALUE", "--encode-arg NAME=VALUE", "encode_args=NAME=VALUE"),
    ],
)
def test_an_option_is_spelled_as_its_caller_writes_it(name, value, typed, called):
    assert option(name, value) == called
    with for_command_line():
        assert option(name, value) == typed
    assert option(name, value) == called


def test_data_is_spelled_as_its_command_takes_it():
    with for_command_line("--data"):
        assert option("data") == "--data"
    with for_command_line():
        assert option("data") == "DATA"
