"""The run of an armed process."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

import cachestore as cs
from cachestore import live
from cachestore.live import arming
from cachestore.live import run as runs
from cachestore.live.adapter import Refused


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(arming, "_armed", [(arming.Setting("a", str(tmp_path / "store"), "toy/one"), live.Adapter("toy"))])
    monkeypatch.setattr(runs, "_runs", [])
    return live.current()


def encode(batch):
    return {key: {"value": np.full(2, len(item))} for key, item in batch}


def test_fill_makes_what_lacks_and_publishes_it_under_the_name_of_the_run(run, tmp_path):
    wanted = [(cs.key(item), item) for item in ("a", "bb")]
    run.fill("latents", wanted[:1], encode, batch_size=2)
    run.fill("latents", wanted, encode, batch_size=2)
    assert run.get(live.ValueName(wanted[1][0]))["value"].tolist() == [2, 2]
    assert run.last_line().startswith("latents: 1 reused, 2 encoded (")
    with cs.open(tmp_path / "store") as store:
        assert sorted(store.names()) == ["toy/one/latents", "toy/one/latents-2"]


def test_it_says_how_far_it_is(run, monkeypatch, capsys):
    monkeypatch.setattr(runs, "_SAYS_SECONDS", 0.0)
    run.fill("text", [(cs.key("a"), "a")], encode, batch_size=1)
    assert "text: 1 of 1" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "size"), [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_of_several_ranks_the_first_says_how_far_it_is(run, monkeypatch, variable, size):
    told = []
    monkeypatch.setattr(
        runs, "fill", lambda *_args, on_progress, **_options: told.append(on_progress) or SimpleNamespace(reused=0, encoded=0)
    )
    monkeypatch.setenv(size, "2")
    for rank in "01":
        monkeypatch.setenv(variable, rank)
        run.fill("text", [], dict, batch_size=1)
    assert [one is None for one in told] == [False, True]


def test_one_that_fails_is_an_error_and_the_last_line_says_what_ended_early(run):
    def fails(batch):
        raise ValueError("no")

    with pytest.raises(cs.EncodeFailed):
        run.fill("text", [(cs.key("a"), "a")], fails, batch_size=1)
    assert run.last_line().startswith("text: ended before all was there; start the same again")


def test_of_a_part_that_is_made_in_a_trainers_loop_the_last_line_says_what_ended_early(run):
    def stopped(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.make("text", [(cs.key("a"), {"id": "a"})], stopped)
    assert run.last_line().startswith("text: ended before all was there; start the same again")


def test_a_refusal_while_encoding_ends_the_run_and_nothing_is_kept(run, tmp_path):
    def refuses(batch):
        raise live.Refused("no")

    with pytest.raises(Refused):
        run.fill("text", [(cs.key("a"), "a")], refuses, batch_size=1)
    with cs.open(tmp_path / "store") as store:
        assert len(store) == 0


def test_a_run_that_asked_for_nothing_says_so(run):
    assert "no cached value" in run.last_line()


def test_a_forked_child_has_a_run_of_its_own(run, monkeypatch):
    assert live.current() is run
    monkeypatch.setattr(os, "getpid", lambda: run.pid + 1)
    assert live.current() is not run


def test_there_is_no_run_in_a_process_that_is_not_armed(monkeypatch):
    monkeypatch.setattr(arming, "_armed", [])
    with pytest.raises(Refused):
        live.current()
