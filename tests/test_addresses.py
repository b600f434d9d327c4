"""An address such as `s3://bucket/cache` where a folder is meant: refused with a sentence, before anything is made."""

import re
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.cli import ERROR, USAGE, main
from cachestore.core.arguments import as_path, as_path_str
from tests.fakes import asks_for, tells_of

ADDRESS = "s3://bucket/cache"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with a picture and a store: nothing else may be in it afterwards."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a cat")
    (tmp_path / "data" / "a.png").write_bytes(b"picture")
    with cs.open(tmp_path / "store", mode="a"):
        pass
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "store"]


@pytest.mark.parametrize("given", ["s3a://b", "abfs://b/c", "https://x/y", "made-up+1.x://y", Path("hf://a/b"), "hdfs:/b/c"])
def test_an_address_is_no_path(given):
    with pytest.raises(cs.BadInput, check=asks_for("path", "mount")):
        as_path("path", given)


@pytest.mark.parametrize("given", [ADDRESS, "S3://b", "gs://b/c", "az://b/c", Path(ADDRESS), "s3:/b/c"])
def test_what_push_and_pull_know_is_to_be_pulled(given):
    with pytest.raises(cs.BadInput, check=asks_for("path", "`cachestore pull ")):
        as_path("path", given)


def test_of_a_file_address_the_path_is_wanted():
    with pytest.raises(cs.BadInput, check=asks_for("path", "file:///data/cache")):
        as_path("path", "file:///data/cache")


@pytest.mark.parametrize(
    "given", ["org/name", "data:/x", "C:/models", r"C:\models", "c://x", "a:b/c", "/data/s3://x", "./s3:/x", "//share/x"]
)
def test_what_only_looks_like_one_is_a_path(given):
    assert as_path_str("model", given, "a path or a hub id") == given


@pytest.mark.parametrize(
    "call",
    [
        lambda: cs.open(ADDRESS, mode="a"),
        lambda: cs.open(Path(ADDRESS), mode="a"),
        lambda: cs.open(ADDRESS),
        pytest.param(lambda: cs.CachedDataset(Path(ADDRESS)), marks=pytest.mark.torch),
        lambda: cs.verify(ADDRESS),
        lambda: cs.repair(ADDRESS),
        lambda: cs.stats(ADDRESS),
        lambda: cs.precompute("data", model="m", store=ADDRESS),
        lambda: cs.precompute(ADDRESS, model="m", store="new"),
        lambda: cs.precompute(["data", ADDRESS], model="m", store="new"),
        lambda: cs.precompute("data", model=ADDRESS, store="new"),
        lambda: cs.precompute("data", model="m", vae=ADDRESS, store="new"),
        lambda: cs.precompute("data", model="m", text_encoder=ADDRESS, store="new"),
        lambda: cs.Source(ADDRESS),
        lambda: cs.Source(Path(ADDRESS)),
    ],
    ids=lambda call: f"line {call.__code__.co_firstlineno}",
)
def test_python_refuses_it_where_a_folder_is_meant(call):
    with pytest.raises(cs.BadInput, match=r"is the address 's3:/.+ folders of this machine"):
        call()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        *((f"{command} {ADDRESS}", USAGE) for command in ("status", "verify", "repair", "gc", "compact", "doctor")),
        *((f"{command} {ADDRESS} x", USAGE) for command in ("show", "why", "drop")),
        (f"report store -o {ADDRESS}", ERROR),
        (f"report store -o page.html --source {ADDRESS}", ERROR),
        (f"export {ADDRESS} train --format sd-scripts --into out", USAGE),
        (f"verify store --recompute 1 --model {ADDRESS}", ERROR),
        (f"repair store --refill --source data={ADDRESS}", ERROR),
        (f"precompute data --model m --store {ADDRESS}", USAGE),
        (f"precompute {ADDRESS} --model m --store new", USAGE),
        (f"precompute data --model {ADDRESS} --store new", USAGE),
        (f"precompute data --model m --vae {ADDRESS} --store new", USAGE),
        (f"precompute data --model m --text-encoder {ADDRESS} --store new", USAGE),
        (f"precompute --config {ADDRESS} --model m --store new", USAGE),
        (f"import sd-scripts data --data data --claim a=b --store {ADDRESS}", ERROR),
        (f"import sd-scripts {ADDRESS} --data data --claim a=b --store new", ERROR),
        (f"import sd-scripts data --data {ADDRESS} --claim a=b --store new", ERROR),
    ],
)
def test_commands_refuse_it_too(line, code, capsys):
    try:
        ended = main(line.split())
    except SystemExit as stopped:
        ended = stopped.code
    reported = capsys.readouterr().err
    assert (ended, bool(re.search(r"is the address 's3://bucket/cache', but cachestore reads and writes folders", reported))) == (
        code,
        True,
    ), reported


def test_a_config_that_names_one_is_refused(here, tmp_path_factory, capsys):
    config = tmp_path_factory.mktemp("config") / "c.toml"
    config.write_text(f'model = "m"\nstore = "new"\n[[source]]\ndata = "{ADDRESS}"\n')
    assert main(["precompute", "--config", str(config)]) == USAGE
    assert "[[source]] 1: data of a source is the address" in capsys.readouterr().err


def test_a_store_that_is_not_there_names_the_folder_that_a_relative_path_was_looked_up_from(here):
    with pytest.raises(cs.StoreNotFound, check=tells_of(here)):
        cs.open("nothing")
    with pytest.raises(cs.StoreNotFound) as reported:
        cs.open(here.parent.parent / "nothing")
    assert "relative" not in str(reported.value)
