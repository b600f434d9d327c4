"""`--config FILE.toml`."""

import json

import pytest

from cachestore.cli import make_parser
from cachestore.cli.precompute import request_from
from cachestore.core.errors import BadInput
from cachestore.core.samples import Source
from tests.fakes import asks_for

WHOLE = """
model = "m"
store = "cache/"
encode = ["text"]
resolution = 512
batch-size = 4
max_failures = "2%"
strict = true
captions = {choose = "all", prefix = "sks, "}
encode_arg = {clip_skip = 1}

[[source]]
data = "photos/"

[[source]]
data = "faces.tar"
name = "faces"
resolution = 768
repeats = 10
weight = 0.5
caption = "a face"
"""


def asked(tmp_path, text, *arguments):
    path = tmp_path / "train.toml"
    path.write_text(text)
    return request_from(make_parser().parse_args(["precompute", "--config", str(path), *arguments]))


def test_a_file_says_what_the_command_line_would(tmp_path):
    request = asked(tmp_path, WHOLE)
    assert (request.model, request.store, request.encode, request.resolution, request.strict) == ("m", "cache/", ("text",), 512, True)
    assert (request.batch_size, request.max_failures, request.encode_arg) == (4, "2%", {"clip_skip": 1})
    assert (request.policy.choose, request.policy.prefix) == ("all", "sks, ")
    assert request.sources == (
        Source("photos/"),
        Source("faces.tar", name="faces", resolution=768, repeats=10, weight=0.5, caption="a face"),
    )


def test_options_that_are_given_have_precedence_wherever_they_stand(tmp_path):
    request = asked(tmp_path, WHOLE, "--resolution", "1024", "--encode", "text,latents", "elsewhere/")
    assert (request.resolution, request.encode, request.data, request.sources) == (1024, ("text", "latents"), "elsewhere/", ())


def test_one_plain_table_is_one_path(tmp_path):
    request = asked(tmp_path, 'model = "m"\nstore = "s"\n[[source]]\ndata = "d"\n')
    assert (request.data, request.sources) == ("d", ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('model = "m"\nstore = "s"', "DATA is missing"),
        ("model = ", "is not TOML"),
        ("rank = 1", "unknown field 'rank'"),
        ("[[sources]]\ndata = 'x'", "unknown field 'sources' (did you mean [[source]]?); known fields are"),
        ("resolutions = 1", "unknown field 'resolutions' (did you mean resolution?); known fields are"),
        ("[[source]]\nDATA = 'x'", "[[source]] 1: unknown field 'DATA' (did you mean data?); known fields are data"),
        ("model = 1", "train.toml: model must be a path or a hub id, not 1"),
        ('model = "m"\nstore = "s"\n[captions]\ndropped = 1\n[[source]]\ndata = "d"', "dropped"),
        ('source = "photos"', "write [[source]]"),
        ("[source]\ndata = 'x'", "write [[source]]"),
        ("[[source]]\nname = 'x'", "train.toml, [[source]] 1: data must be a path, and is missing"),
        ("[[source]]\ndata = 'x'\n[[source]]\ndata = 'y'\nresoluton = 5", "train.toml, [[source]] 2: unknown field 'resoluton'"),
        (
            "[[source]]\ndata = 'x'\nrepeats = 0",
            "train.toml, [[source]] 1: repeats of a source must be a whole number of at least 1, not 0",
        ),
    ],
)
def test_what_a_file_cannot_mean_is_named_by_file_table_and_field(tmp_path, text, says):
    with pytest.raises(BadInput) as refused:
        asked(tmp_path, text)
    assert says in str(refused.value)


def test_several_paths_are_several_sources():
    arguments = ["precompute", "a", "b", "--model", "m", "--store", "s"]
    request = request_from(make_parser().parse_args(arguments))
    assert (request.data, request.sources) == ("", (Source("a"), Source("b")))


@pytest.mark.parametrize("text", ["x", "[1]", '[{"name": "x"}]', '[{"data": "x", "repeats": 0}]', '[{"data": "x", "unknown": 0}]'])
def test_sources_that_are_no_list_of_objects_are_refused(text):
    with pytest.raises(BadInput, check=asks_for("sources")):
        request_from(make_parser().parse_args(["precompute", "--sources", text, "--model", "m", "--store", "s"]))


def test_paths_and_sources_at_once_are_refused():
    sources = json.dumps([{"data": "x"}])
    with pytest.raises(BadInput, check=asks_for("sources")):
        request_from(make_parser().parse_args(["precompute", "d", "--sources", sources, "--model", "m", "--store", "s"]))


def test_options_of_pictures_are_taken_as_they_stand(tmp_path):
    options = 'resolution = [512, 768]\nbucket_step = 32\nvariants = 2\ncrop = "random"\nflip = true'
    text = f'model = "m"\nstore = "s"\n{options}\n[[source]]\ndata = "d"'
    request = asked(tmp_path, text)
    assert (request.resolution, request.bucket_step, request.variants, request.flip) == ((512, 768), 32, 2, True)
