"""What `precompute` may be asked, in each of its spellings: the command line, TOML, Python, JSON, and the hints of a catalog."""

import argparse
import json
from dataclasses import fields
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.cli import _with_hyphens, make_parser
from cachestore.cli.precompute import request_from
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput
from cachestore.core.keys import canonical
from cachestore.jobs.plan.option_types import allowed_failures
from cachestore.jobs.plan.options import Options, PrecomputeRequest, option_of, read_value
from cachestore.store.write.commit import create_store
from tests.core.test_captions import policies
from tests.fakes import asks_for, examples, planned


def asked(data="data", store="store", **options):
    return PrecomputeRequest(str(data), options.pop("model", "model"), str(store), **options)


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
paths = words.map("no such place/{}".format)
json_values = st.recursive(st.booleans() | st.integers() | words, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
requests = st.builds(
    PrecomputeRequest,
    data=paths,
    model=paths,
    store=paths,
    encode=st.sampled_from([("text", "latents"), ("text",), ("latents",)]),
    resolution=st.integers(1, 4096) | st.lists(st.integers(1, 4096), min_size=2, max_size=3).map(tuple),
    crop=st.just("random"),
    variants=st.integers(1, 3),
    crop_seed=st.integers(0, 9),
    flip=st.booleans(),
    buckets=st.sampled_from(["cachestore", "sd-scripts"]),
    bucket_step=st.sampled_from([None, 8, 64]),
    no_upscale=st.booleans(),
    frames=st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple),
    fps=st.none() | st.sampled_from([16, 23.976, 60.0]),
    clips=st.integers(1, 5),
    name=words,
    captions=st.sampled_from(["first", "all", "random"]) | policies,
    caption_lines=st.sampled_from(["whole", "each", "first"]),
    caption=st.none() | words | st.sampled_from(["", "-1", "--name", "-x y"]),
    vae=st.none() | paths,
    text_encoder=st.none() | paths,
    revision=st.none() | words,
    variant=st.none() | words,
    encode_arg=st.dictionaries(words.filter(lambda name: name and "=" not in name), json_values, max_size=2),
    text_dtype=st.sampled_from(["auto", "bfloat16"]),
    latents=st.sampled_from(["moments", "mean", "sample"]),
    procs=st.none() | st.integers(1, 9),
    device=st.sampled_from(["auto", "cuda:1"]),
    batch_size=st.sampled_from(["auto", 1, 64]),
    workers=st.none() | st.integers(0, 9),
    rank=st.none() | st.integers(0, 3),
    world_size=st.none() | st.integers(1, 4),
    strict=st.booleans(),
    max_failures=st.sampled_from(["0", "3", "2%"]),
    replace=st.booleans(),
)


PARSER = make_parser()


def spell(request):
    arguments = ["precompute", request.data]
    for one in fields(request):
        value, option = getattr(request, one.name), "--" + one.name.replace("_", "-")
        if one.name in {"data", "sources", "prompts"} or value is None or value is False:
            continue
        if one.name == "encode_arg":
            arguments += [f"{option}={name}={canonical(given).decode()}" for name, given in value.items()]
        elif value is True:
            arguments.append(option)
        else:
            is_several = isinstance(value, tuple)
            text = canonical(value.as_json()).decode() if isinstance(value, CaptionPolicy) else str(value)
            arguments.append(f"{option}={','.join(map(str, value)) if is_several else text}")
    return arguments


@given(requests)
@examples(50)
def test_the_command_line_says_what_a_request_holds(request):
    assert request_from(PARSER.parse_args(_with_hyphens(spell(request)))) == request


@given(requests)
@examples(50)
def test_a_request_survives_the_way_to_a_worker(request):
    assert PrecomputeRequest.from_json(json.loads(json.dumps(request.as_json()))) == request


def test_sources_survive_the_way_to_a_worker():
    request = asked("", sources=(cs.Source("a"), cs.Source("b", name="b", repeats=2)))
    assert PrecomputeRequest.from_json(json.loads(json.dumps(request.as_json()))) == request


def test_prompts_survive_the_way_to_a_worker_and_are_read_from_their_file_once(tmp_path):
    (tmp_path / "p.txt").write_text("a cat --n ugly\na dog\n")
    request = PrecomputeRequest.from_json({"data": "d", "model": "m", "store": "s", "prompts": tmp_path / "p.txt"})
    (tmp_path / "p.txt").unlink()
    assert request.prompts == (("a cat", "ugly"), ("a dog", ""))
    assert PrecomputeRequest.from_json(json.loads(json.dumps(request.as_json()))) == request
    assert PrecomputeRequest.from_json({**request.as_json(), "prompts": [["a cat", "ugly"], "a dog"]}) == request


def test_every_default_is_a_value_that_its_option_takes():
    for one in fields(PrecomputeRequest):
        if one.name not in {"data", "model", "store", "encode_arg"}:
            assert read_value(one, one.default, one.name) == one.default, one.name


def test_python_has_every_option_by_its_name():
    written_out = {"data", "model", "store", "encode", "encode_arg", "max_failures", "sources"}
    assert set(get_type_hints(Options)) == {one.name for one in fields(PrecomputeRequest)} - written_out


@pytest.mark.parametrize("given", ["text,latents", " text , latents", ["text", "latents"]])
def test_what_to_encode_may_be_spelt_as_on_the_command_line(given):
    assert PrecomputeRequest.from_json({"data": "d", "model": "m", "store": "s", "encode": given}).encode == ("text", "latents")
    for refused in ("", ",", "txt", b"text"):
        with pytest.raises(BadInput, check=asks_for("encode")):
            PrecomputeRequest.from_json({"data": "d", "model": "m", "store": "s", "encode": refused})


def test_what_decides_what_is_made_is_a_hint_and_what_only_changes_how_is_not():
    assert {one.name for one in fields(PrecomputeRequest) if not option_of(one).is_hint} == {
        *(
            "store",
            "procs",
            "rank",
            "world_size",
            "device",
            "batch_size",
            "compile",
            "workers",
            "strict",
            "max_failures",
            "replace",
            "recheck",
            "access",
        )
    }


@pytest.mark.parametrize(
    ("text", "units", "allowed"),
    [("0", 10, 0), ("3", 10, 3), ("0%", 10, 0), ("2%", 1000, 20), ("2%", 10, 0), ("100%", 7, 7), ("1.5%", 200, 3)],
)
def test_failures_may_be_allowed_as_a_count_or_in_percent(text, units, allowed):
    assert allowed_failures(text, units) == allowed


def test_every_field_of_a_request_is_an_option_of_the_command():
    [commands] = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    options = {action.dest for action in commands.choices["precompute"]._actions}
    assert {one.name for one in fields(PrecomputeRequest)} <= options


# As hints in a catalog


@given(requests)
@examples(50)
def test_hints_ask_for_the_same_keys_again(request):
    again = PrecomputeRequest.from_hints(json.loads(json.dumps(request.hints())), store="elsewhere")
    local = {"store", "procs", "rank", "world_size", "device", "batch_size", "workers", "strict", "max_failures", "replace"}
    assert again.store == "elsewhere"
    assert {one.name: getattr(again, one.name) for one in fields(again) if one.name not in local} == {
        one.name: getattr(request, one.name) for one in fields(request) if one.name not in local
    }


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"variants": 2}, "crop"),
        ({"fps": 16}, "frames"),
        ({"clips": 2}, "frames"),
        ({"prompts": (("a cat", ""),), "encode": ("latents",)}, "prompts"),
        ({"pixels": "as-trainer"}, "buckets"),
        ({"buckets": "diffusers", "bucket_step": 8}, "bucket_step"),
        ({"buckets": "diffusers", "bucket_min": 8}, "bucket_min"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(tmp_path, options, changed):
    with pytest.raises(BadInput, check=asks_for(changed)):
        planned(create_store(tmp_path / "store"), asked(tmp_path, tmp_path / "store", **options))


def test_hints_name_existing_paths_absolutely_and_leave_hub_names_alone(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    hints = asked("data", model="some/model").hints()
    assert (hints["data"], hints["model"]) == (str(tmp_path / "data"), "some/model")


def test_hints_of_a_newer_version_are_passed_over():
    assert PrecomputeRequest.from_hints({**asked().hints(), "of_tomorrow": 1}, store="s") == asked(store="s")


def test_a_catalog_that_precompute_did_not_make_cannot_be_asked_for_again():
    with pytest.raises(BadInput):
        PrecomputeRequest.from_hints({}, store="s")
