"""What an option of `precompute` cannot be: the same sentence from Python, from a file and on the command line, before anything is made.

What only one of the spellings can get wrong is tested beside it.
"""

import json
from typing import Any

import pytest

import cachestore as cs
from cachestore.cli import USAGE, main

WHOLE = "a whole number of at least 1"
SIZES = f"{WHOLE}, or several of them"
DTYPE = "auto or one of float32, fp32, bfloat16, bf16, float16, fp16"
DEVICE = "one of auto, cpu, cuda, cuda:N, mps, xpu, xpu:N"
CAPTIONS = "first, all, random, or a CaptionPolicy (as JSON, or as a table)"
FAILURES = "a count or a share such as 2%"

EVERYWHERE = [
    *(("resolution", value, SIZES) for value in ((), (64, 0), "big", "64,", "64;32", "-1", 64.0, "")),
    ("frames", (17, 0), SIZES),
    *((name, value, WHOLE) for name in ("variants", "bucket_step", "clips", "procs") for value in (0, "wide")),
    ("crop_seed", -1, "a whole number of at least 0"),
    ("workers", -1, "a number of threads, 0 or more"),
    *(("batch_size", value, f"auto or {WHOLE}") for value in (0, -1, "big")),
    *(("fps", value, "a number of frames a second") for value in (0, "fast")),
    ("crop", "left", "center or random"),
    ("latents", "all", "moments, mean or sample"),
    *(("caption_lines", value, "whole, each or first") for value in ("some", "all")),
    *(("device", value, DEVICE) for value in ("tpu", "cuda:x")),
    *((name, "int4", DTYPE) for name in ("text_dtype", "vae_dtype")),
    *((name, "", "a path or a hub id") for name in ("model", "vae", "text_encoder")),
    *(("max_failures", value, FAILURES) for value in ("", "x", "-1", "1.5", "101%", "-2%", "%", "nan%", "inf%")),
    ("encode", ",", "a list of names"),
    *(("captions", value, CAPTIONS) for value in ("last", "{", "[]", '{"droput": 0.1}')),
]
TYPED = [
    ("resolution", True, SIZES),
    ("variants", 2.0, WHOLE),
    *((name, value, "true or false") for name in ("flip", "no_upscale", "strict", "replace") for value in ("yes", 2)),
    ("caption", 5, "a text"),
    ("name", 5, "a text"),
    ("encode", (1,), "a list of names"),
]
"""On a command line these would be other values, or options that take none."""
IN_PYTHON = [
    ("resolution", "64", SIZES),
    ("resolution", [64, "32"], SIZES),
    *((name, "2", WHOLE) for name in ("variants", "procs")),
    ("batch_size", "8", f"auto or {WHOLE}"),
    ("fps", float("nan"), "a number of frames a second"),
    ("encode_args", [1], "a mapping of arguments"),
    ("name", None, "a text"),
    ("rank", "0", "a whole number of at least 0"),
]
"""A file and a command line are texts, in which numbers are texts too."""


@pytest.fixture
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert {path.name for path in tmp_path.iterdir()} <= {"train.toml"}, "something was made"


def rows(*tables):
    return pytest.mark.parametrize(
        ("name", "value", "wanted"), [pytest.param(*row, id=f"{row[0]}={row[1]!r}") for table in tables for row in table]
    )


@pytest.mark.usefixtures("_here")
@rows(EVERYWHERE, TYPED, IN_PYTHON)
def test_python_refuses_it(name, value: Any, wanted):
    asked: Any = {"data": "gone", "model": "m", "store": "store", "inline": True, name: value}
    with pytest.raises(cs.BadInput) as refused:
        cs.precompute(**asked)
    assert str(refused.value).startswith(f"{name} must be {wanted}")


@pytest.mark.usefixtures("_here")
@rows(EVERYWHERE, TYPED)
def test_a_file_refuses_it(tmp_path, capsys, name, value, wanted):
    fields = {"model": "m", "store": "store", name: value}
    lines = [f"{field} = {json.dumps(given)}" for field, given in fields.items()]  # what is JSON here is TOML
    (tmp_path / "train.toml").write_text("\n".join([*lines, "[[source]]", 'data = "gone"']))
    assert main(["precompute", "--config", "train.toml"]) == USAGE
    assert f"train.toml: {name} must be {wanted}" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
@rows(EVERYWHERE)
def test_the_command_line_refuses_it(capsys, name, value, wanted):
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    option = f"--{name.replace('_', '-')}"
    assert main(["precompute", "gone", "--model", "m", "--store", "store", f"{option}={text}"]) == USAGE
    assert f"{option} must be {wanted}" in capsys.readouterr().err
