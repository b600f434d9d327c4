"""Every command names a data set alike; an unfinished one is called so; `--again`; and questions on a terminal."""

import json
import os
import shlex
import sys
from dataclasses import fields

import pytest

import cachestore as cs
from cachestore.cli import COMMANDS, DAMAGE, ERROR, FAILURES, OK, USAGE, failed_samples, main, make_parser
from cachestore.cli.terminal import question
from cachestore.core.errors import BadInput
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest, in_command, switched_off
from tests import fakes
from tests.fakes import FakeEncoder, asks_for, captions

pytestmark = pytest.mark.processes

WITHOUT_NAME = {"doctor", "compact", "bench", "cache"}
"""Commands that are about a store or a machine."""


@pytest.fixture
def data(tmp_path):
    return fakes.captioned(tmp_path / "data", 3)


@pytest.fixture
def store(tmp_path, data, makers):
    """A store with the data set `flux`."""
    cs.precompute(data, model="m", store=tmp_path / "store", name="flux", flip=True, inline=True)
    return tmp_path / "store"


@pytest.fixture
def begun(tmp_path):
    """A store in which the first run over `train` was begun, with 0 of 2 values."""
    fakes.open_pass(fakes.job(tmp_path / "begun", captions("a", "b"), [FakeEncoder()]))
    return tmp_path / "begun"


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return call


@pytest.mark.parametrize("command", sorted({*COMMANDS} - WITHOUT_NAME))
def test_every_command_of_data_sets_takes_a_name(run, command):
    assert "--name NAME" in run(command, "--help")[1]


ON_ONE = {
    "report": ["-o", "page.html"],
    "export": ["--format", "webdataset", "-o", "tars"],
    "show": ["--command"],
    "why": [],
    "ls": ["--samples"],
    "stats": [],
    "status": [],
    "verify": [],
    "repair": ["--refill", "--dry-run"],
    "gc": ["--keep", "1"],
    "drop": ["--dry-run"],
    "forget": ["0.png", "--dry-run"],
}


@pytest.mark.parametrize("command", ON_ONE)
def test_a_name_chooses_and_one_that_is_not_there_is_an_error_that_lists_what_is(run, store, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(command, store, *ON_ONE[command], "--name", "flux")
    assert code == OK, err
    code, out, err = run(command, store, *ON_ONE[command], "--name", "flx")
    assert (code, "'flux'" in err + out) == (ERROR, True)


@pytest.mark.parametrize("command", ["report", "export", "show", "why", "ls", "stats"])
def test_without_a_name_the_only_data_set_is_meant_whatever_it_is_called(run, store, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    code, out, _err = run(command, store, *ON_ONE[command])
    assert (code, "flux" in out) == (OK, True)


@pytest.mark.parametrize("command", ["report", "export"])
def test_of_several_data_sets_one_must_be_named(run, store, data, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    cs.precompute(data, model="m", store=store, inline=True)
    code, _out, err = run(command, store, *ON_ONE[command])
    assert (code, "--name with flux or train" in err) == (ERROR, True)
    assert list(tmp_path.glob("tars*")) == []


def test_export_means_the_only_data_set_that_has_sources(run, store, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with cs.open(store, mode="a") as opened:
        opened.publish("dino", {})
    assert run("export", store, *ON_ONE["export"])[0] == OK
    assert "'flux'" in run("drop", store)[2]
    table = Layout.at(store).catalog("flux", 1)
    table.chmod(0o644)
    table.write_bytes(table.read_bytes()[:100])  # it may be the one that is meant
    code, _out, err = run("export", store, *ON_ONE["export"])
    assert (code, "flux" in err) == (ERROR, True)
    code, _out, err = run("export", store, *ON_ONE["export"], "--name", "dino")
    assert (code, "'dino'" in err) == (ERROR, True)


def test_export_says_which_data_sets_there_are_if_none_has_sources(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with cs.open(tmp_path / "own", mode="a") as opened:
        opened.publish("a", {})
        opened.publish("b", {})
    code, _out, err = run("export", tmp_path / "own", *ON_ONE["export"])
    assert (code, "--name with a or b" in err) == (ERROR, True)


@pytest.mark.parametrize("command", ["export", "drop"])
def test_the_older_position_stays_and_two_different_names_are_refused(run, store, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    assert run(command, store, "flux", *ON_ONE[command])[0] == OK
    assert run(command, store, "flux", *ON_ONE[command], "--name", "flux")[0] == OK
    assert run(command, store, "flux", *ON_ONE[command], "--name", "train")[0] == USAGE


def test_nothing_is_dropped_that_was_not_named(run, store):
    code, _out, err = run("drop", store)
    assert (code, "'flux'" in err) == (USAGE, True)
    assert f"delete the folder {store}" in run("drop", store, "--name", "flux")[1]


def test_entries_of_one_data_set_are_those_it_needs(run, store, data):
    before = run("ls", store, "--keys", "--name", "flux")[1].splitlines()
    cs.precompute(data, model="other", store=store, inline=True)
    assert run("ls", store, "--keys", "--name", "flux")[1].splitlines() == before
    assert len(run("ls", store, "--keys")[1].splitlines()) > len(before)


def test_verify_of_one_data_set_reads_the_bytes_of_its_segments_alone(run, store, data):
    cs.precompute(data, model="other", store=store, inline=True)
    fakes.flip_entry(store, "1.png", "latents", name="flux")
    assert run("verify", store, "--name", "train")[0] == OK
    assert run("verify", store, "--name", "flux")[0] == run("verify", store)[0] == DAMAGE


def test_gc_keeps_the_generations_of_other_data_sets(run, store, data):
    for number in range(2):
        for name in ("flux", "train"):
            (data / "0.txt").write_text(f"caption {number}")
            cs.precompute(data, model="m", store=store, name=name, flip=True, inline=True)
    _code, out, _err = run("gc", store, "--keep", "1", "--name", "flux", "--apply", "--json")
    assert json.loads(out)["generations"] == {"flux": 1, "train": 2}
    assert run("gc", store, "--name", "flux")[0] == ERROR


# Unfinished


@pytest.mark.parametrize("command", ["export", "show", "report", "stats", "ls", "why", "status", "drop", "verify", "push"])
def test_an_unfinished_data_set_is_called_so_with_how_far_it_is(run, begun, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    others = {"show": ["a"], "drop": ["train", "--dry-run"], "ls": [], "push": ["s3://bucket/c", "--name", "train"]}
    more = others.get(command, ON_ONE.get(command, []))
    _code, out, err = run(command, begun, *more)
    assert "0 of 2" in out + err
    if command != "drop":
        assert f"cachestore precompute --again --store {begun}" in out + err


def test_a_trainer_is_told_that_the_data_set_is_not_finished(begun):
    with pytest.raises(BadInput, check=asks_for("name", "'train'", "0 of 2", "--again")):
        cs.CachedDataset(begun)
    with pytest.raises(BadInput, check=asks_for("name", "other")):
        cs.CachedDataset(begun, name="other")


def test_machines_get_unfinished_data_sets_too(run, begun):
    unfinished = [{"name": "train", "done": 0, "total": 2, "at_work": False}]
    assert json.loads(run("stats", begun, "--json")[1])["unfinished"] == unfinished
    for more in ([], ["--samples"]):
        assert json.loads(run("ls", begun, *more, "--json")[1])["unfinished"] == unfinished


# Again


def test_again_repeats_the_command_with_what_is_given_now(run, store, data, makers):
    code, out, err = run("precompute", "--again", "--store", store, "--json")
    assert (code, json.loads(out)["encoded"], "--flip" in err) == (OK, 0, True)
    fakes.captioned(data.parent / "more", 5)
    code, out, _err = run("precompute", data.parent / "more", "--again", "--store", store, "--plan-only", "--json")
    assert (code, json.loads(out)["samples"]) == (OK, 5)
    code, out, _err = run("precompute", "--again", "--store", store, "--resolution", "256", "--plan-only", "--json")
    assert (code, "--resolution 1024" in json.loads(out)["error"]) == (ERROR, True)


def test_again_takes_a_file_over_what_is_remembered_and_the_command_line_over_both(store, tmp_path):
    from cachestore.cli.precompute import request_from

    (tmp_path / "c.toml").write_text('resolution = 256\nname = "flux"\ncaption = "x"\n')
    arguments = ["precompute", "--again", "--store", str(store), "--config", str(tmp_path / "c.toml"), "--caption", "y", "--quiet"]
    request = request_from(make_parser(["precompute"]).parse_args(arguments))
    assert (request.name, request.resolution, request.caption, request.flip) == ("flux", 256, "y", True)


@pytest.mark.parametrize("switch", [one.name for one in fields(PrecomputeRequest) if isinstance(one.default, bool)])
def test_every_switch_of_the_last_command_can_be_taken_back(switch):
    from cachestore.cli.precompute import request_from

    on, off = in_command(switch), switched_off(in_command(switch))
    parser = make_parser(["precompute"])
    for given, value in (([on], True), ([on, off], False), ([], False)):
        found = request_from(parser.parse_args(["precompute", "data", "--model", "m", "--store", "s", *given]))
        assert getattr(found, switch) is value


def test_one_rank_alone_says_what_is_repeated_and_a_switch_is_taken_back(store, capsys, monkeypatch):
    from cachestore.cli.precompute import request_from

    arguments = make_parser(["precompute"]).parse_args(["precompute", "--again", "--store", str(store), "--no-flip"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert request_from(arguments).flip is False
    assert capsys.readouterr().err.count("again: ") == 1


def test_the_command_that_is_shown_is_one_line_that_gives_the_same(run, store):
    code, out, _err = run("show", store, "--name", "flux", "--command")
    assert (code, out.count("\n")) == (OK, 1)
    code, again, _err = run(*shlex.split(out)[1:], "--json")
    assert (code, json.loads(again)["encoded"]) == (OK, 0)
    shown = json.loads(run("show", store, "--command", "--json")[1])["data_sets"]
    assert [(one["name"], one["commands"]) for one in shown] == [("flux", [out.strip()])]


@pytest.mark.parametrize("arguments", [["--command", "0.png"], [], ["--command", "--png", "x.png"]])
def test_show_is_about_one_thing(run, store, arguments):
    assert run("show", store, *arguments)[0] == USAGE


# A second data set


class Terminal:
    """A standard stream that is a terminal."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def isatty(self):
        return True


@pytest.fixture
def types(monkeypatch):
    """Let a person type an answer; None for one that never comes."""

    def answer(text):
        monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin))
        monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
        monkeypatch.setattr(question, "_SECONDS", 0.05)
        read, write = os.pipe()
        if text is not None:
            os.write(write, text.encode())
        monkeypatch.setattr(question, "_INPUT", read)
        return write

    return answer


def test_without_a_terminal_a_second_data_set_is_said(run, store, data):
    command = ["precompute", data, "--model", "m", "--store", store, "--plan-only"]
    code, _out, err = run(*command)
    assert (code, "this makes a second data set 'train' beside 'flux'; --name flux adds to that one" in err) == (OK, True)
    cs.precompute(data, model="m", store=store, inline=True)
    assert "second data set" not in run(*command)[2]


@pytest.mark.parametrize(("typed", "chosen"), [("a\n", "flux"), ("n\n", "train"), ("\n", "train"), ("x\n", "train"), (None, "train")])
def test_on_a_terminal_it_is_asked_for(store, data, types, capsys, typed, chosen):
    from cachestore.cli.precompute import _named, request_from

    types(typed)
    arguments = make_parser(["precompute"]).parse_args(["precompute", str(data), "--model", "m", "--store", str(store)])
    assert _named(arguments, request_from(arguments)).name == chosen
    asked = " ".join(capsys.readouterr().err.split())
    assert "There is a data set 'flux' here. Add to it (a), or make a new one called 'train' (n)?" in asked


def test_a_name_that_is_given_is_never_asked_about(store, data, types, capsys):
    from cachestore.cli.precompute import _named, request_from

    types("a\n")
    arguments = make_parser(["precompute"]).parse_args(["precompute", str(data), "--model", "m", "--store", str(store), "--name", "new"])
    assert (_named(arguments, request_from(arguments)).name, capsys.readouterr().err) == ("new", "")


# Once


def test_what_one_file_is_needed_for_fails_in_one_line():
    failures = [("a", "latents", "why"), ("b", "latents", "why"), ("a", "mask", "why"), ("a", "text", "other")]
    assert failed_samples(failures) == ["failed: a (latents, mask): why", "failed: b (latents): why", "failed: a (text): other"]
    assert failed_samples([]) == []


@pytest.mark.slow
def test_a_broken_file_is_one_line_once(run, data, tmp_path, makers):
    (data / "1.png").write_bytes(b"undecodable")
    code, out, err = run("precompute", data, "--model", "m", "--store", tmp_path / "s", "--flip")
    assert (code, (out + err).count("this is no picture")) == (FAILURES, 1)


def test_gc_says_what_is_freed_and_when(run, store):
    assert f"delete its folder {store}" in run("gc", store)[1]
    assert run("drop", store, "--name", "flux")[0] == OK
    assert " 24 h later: run it with --apply, and then once more" in run("gc", store)[1]
    assert "more if it runs again with --apply from 20" in run("gc", store, "--apply")[1]
    assert "marked earlier from 20" in run("gc", store)[1]
