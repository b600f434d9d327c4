"""The command of a data set: recorded, printed in one line that gives the same, and run again."""

import json
import shlex
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.cli import make_parser
from cachestore.cli.precompute import request_from
from cachestore.core.errors import BadInput
from cachestore.files.paths import Layout
from cachestore.jobs.plan import remembered
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.remembered import name_all, remember, remember_one, say_rest
from cachestore.jobs.plan.typed import in_line, typed, without_chosen
from tests import fakes

PARSER = make_parser(["precompute"])
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": TEXTS.filter(lambda text: not text.startswith("-")),
        "encode": st.sampled_from([("text",), ("latents",), ("text", "latents"), ("text_encoder_2", "latents")]),
        "captions": st.sampled_from(["all", cs.CaptionPolicy(prefix="it's, ", dropout=0.5)]),
        "caption": TEXTS,
        "caption_lines": st.sampled_from(["whole", "each"]),
        "prompts": st.lists(st.tuples(TEXTS, st.one_of(st.just(""), TEXTS)), min_size=1, max_size=2, unique=True).map(tuple),
        "resolution": st.sampled_from([512, (512, 768)]),
        "flip": st.booleans(),
        "frames": st.sampled_from([(17,), (17, 49)]),
        "no_upscale": st.booleans(),
        "bucket_step": st.sampled_from([None, 32, 64]),
        "resample": st.sampled_from([None, "lanczos", "area", "pillow"]),
        "vae": st.sampled_from([None, "a vae", "-vae"]),
        "encode_arg": st.dictionaries(st.sampled_from(["clip_skip", "a"]), st.one_of(st.integers(), TEXTS, st.booleans()), max_size=2),
        "sources": st.sampled_from([(), (cs.Source("a dir"), cs.Source("b")), (cs.Source("c", name="x", repeats=3, caption="it's"),)]),
    },
)


@given(OPTIONS)
def test_a_line_that_is_typed_is_read_as_the_same_request(options):
    if options.get("encode") == ("latents",):
        options.pop("prompts", None)
    asked: dict[str, Any] = {"data": "" if options.get("sources") else "my pictures", "model": "m", "store": "s", **options}
    request = PrecomputeRequest(**asked)
    read = request_from(PARSER.parse_args(["precompute", *typed(request)]))
    assert without_chosen(read) == without_chosen(request)
    line = in_line(typed(request))
    assert line.isprintable()
    if "$'" not in line:  # Python's shlex knows no such quotes
        assert shlex.split(line) == typed(request)


def test_a_line_end_is_written_as_the_shell_reads_it(tmp_path):
    words = in_line(["a\n\t'\\\u200b"])
    said = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, check=True)
    assert said.stdout.decode() == "a\n\t'\\\u200b"


@pytest.fixture
def data(tmp_path):
    return fakes.captioned(tmp_path / "data", 3)


@pytest.fixture
def made(tmp_path, data, makers):
    """Encode the data set into the store, with options."""

    def encode(source: object = data, **options: Any):
        return cs.precompute(source, model="m", store=tmp_path / "store", inline=True, **options)

    return encode


def commands(store, name="train"):
    return remember(Layout(store), name)


def test_what_is_printed_gives_the_same_again(tmp_path, made, data, makers):
    made(flip=True, resolution=(512, 768), captions=cs.CaptionPolicy(prefix="sks, "), prompts=["a cat"], name="it's")
    [line] = commands(tmp_path / "store", "it's").lines()
    makers.encoded()
    request = request_from(PARSER.parse_args(shlex.split(line)[1:]))
    again = made(str(request.data), **{name: getattr(request, name) for name in ("flip", "resolution", "captions", "prompts", "name")})
    assert (again.encoded, again.wanted, makers.encoded()) == (0, again.reused, [])
    assert request == without_chosen(request)


def test_a_first_run_that_was_stopped_is_remembered_and_so_is_a_later_one(tmp_path, made, makers):
    def stopped(_items):
        raise KeyboardInterrupt

    makers.options["before_encode"] = stopped
    with pytest.raises(KeyboardInterrupt):
        made(resolution=256, flip=True)
    first = commands(tmp_path / "store")
    assert (first.is_finished, name_all(Layout(tmp_path / "store"))) == (False, ["train"])
    assert (first.requests[0].resolution, first.requests[0].flip) == (256, True)
    makers.options.clear()
    made(resolution=256, flip=True)
    assert commands(tmp_path / "store").is_finished
    makers.options["before_encode"] = stopped
    with pytest.raises(KeyboardInterrupt):
        made(resolution=512, replace=True)
    assert (commands(tmp_path / "store").is_finished, commands(tmp_path / "store").requests[0].resolution) == (False, 512)


def test_text_and_latents_made_one_after_the_other_are_one_command(tmp_path, made):
    made(encode="text")
    made(encode="latents")
    [request] = commands(tmp_path / "store").requests
    assert request.encode == ("text", "latents")


def test_two_commands_are_two_lines_the_last_first(tmp_path, made):
    made(encode="latents", resolution=256)
    made(encode="text", caption_lines="each")
    found = commands(tmp_path / "store")
    assert [request.encode for request in found.requests] == [("text",), ("latents",)]
    assert "--encode latents" in say_rest(found)


def test_hints_of_an_older_version_lack_newer_options(tmp_path):
    hints = {"data": str(tmp_path / "data"), "model": "m", "encode": ["text", "latents"], "resolution": 256, "unknown": 1}
    [joined] = remembered._together([hints, dict(hints)])
    request = PrecomputeRequest.from_hints(joined, store="s")
    assert (request.resolution, request.flip, request.sources) == (256, False, ())


@pytest.mark.parametrize(
    "hints",
    [
        {"imported": "sd-scripts", "folder": "/x"},
        {},
        {"data": "", "model": "m", "sources": [{"data": "(in memory)"}]},
        {"data": "d", "model": "(loaded X)"},
    ],
)
def test_what_no_command_made_is_an_error(layout, hints):
    one = replace(fakes.job(layout.root, fakes.captions("a"), [fakes.FakeEncoder()]), request=hints)
    fakes.run_pass(one)
    with pytest.raises(BadInput):
        remember(layout, "train")


def test_without_a_name_the_only_data_set_is_meant_and_several_are_listed_with_their_lines(tmp_path, made):
    made(name="flux", flip=True)
    layout = Layout(tmp_path / "store")
    assert remember_one(layout, None).name == "flux"
    made(name="sdxl", resolution=256)
    with pytest.raises(BadInput) as refused:
        remember_one(layout, None)
    assert all(f"precompute --again --store {layout.root} --name {name}`" in str(refused.value) for name in ("flux", "sdxl"))
    with pytest.raises(BadInput):
        remember_one(layout, "other")


def test_options_of_running_are_not_remembered(tmp_path, made):
    made(workers=2, batch_size=3, recheck=True, max_failures="5%", access="private")
    [request] = commands(tmp_path / "store").requests
    assert (request.workers, request.batch_size, request.recheck, request.max_failures, request.access) == (None, "auto", False, "0", None)
    assert json.loads(json.dumps(request.hints())) == request.hints()
