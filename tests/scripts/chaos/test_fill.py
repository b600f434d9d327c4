"""The chaos harness: what a seed decides, a small sample of seeds, and that wrong workers lose keys in it."""

import json
import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from chaos import fill
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.files.paths import Layout
from cachestore.store.read.snapshot import list_segments
from tests.fakes import ROOT
from tests.shares import share

pytestmark = pytest.mark.processes


def run(*arguments, timeout=58):
    """The harness as a program: its exit code and the object it prints."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])}
    command = [sys.executable, "-c", "import sys; from chaos import fill; sys.exit(fill.main())", "--json", "--jobs", "1", *arguments]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout, env=own)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


# What a seed decides


@given(st.integers(0, 10**6), st.sampled_from(["", *fill.BUGS]))
def test_a_seed_keeps_to_its_limits_and_is_the_same_each_time(seed, variant):
    trial = fill.trial_for(seed, variant=variant)
    assert trial == fill.trial_for(seed, variant=variant)
    assert trial.faults.kills <= fill.MOST_KILLS
    assert trial.faults.stops <= fill.MOST_STOPS
    assert trial.workers <= fill.MOST_WORKERS
    assert trial.keys <= fill.MOST_KEYS


def test_thirty_seeds_have_each_kind_of_fault_and_both_kinds_of_view():
    trials = [fill.trial_for(seed) for seed in range(1, 31)]
    for kind in ("kills", "stops", "joins", "deletions", "cuts", "flips"):
        assert any(getattr(trial.faults, kind) for trial in trials), kind
    assert {trial.views for trial in trials} == {1, 2}


def test_seeds_are_a_range_with_both_ends():
    assert list(fill.parse_seeds("3-5")) == [3, 4, 5]
    assert list(fill.parse_seeds("7")) == [7]


@pytest.mark.parametrize("text", ["", "a", "5-3", "-"])
def test_what_names_no_seed_is_refused(text):
    with pytest.raises(ValueError, match=r"seed|literal"):
        fill.parse_seeds(text)


def test_without_bindfs_the_reason_is_reported(monkeypatch):
    monkeypatch.setattr(fill.shutil, "which", lambda _name: None)
    assert fill.why_no_views() == "bindfs is not installed"


def test_a_patch_of_something_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match=r"bring scripts/chaos/fill.py up to date"):
        fill._patch(fill.worker, "NO_SUCH_CONSTANT", 1)


# What is done to segments


@pytest.fixture
def damage(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store, store.writer() as writer:
        for number in range(8):
            writer.put(fill.key_of(number), fill.value_of(number))
    return fill.Damage(Layout(tmp_path / "store"), Random(1))


@pytest.mark.parametrize("what", ["delete", "shorten", "flip"])
def test_without_segments_there_is_nothing_to_damage(tmp_path, what):
    damage = fill.Damage(Layout(tmp_path), Random(1))
    getattr(damage, what)()
    assert (damage.deleted, damage.expected()) == (0, set())


@pytest.mark.parametrize("what", ["delete", "shorten", "flip"])
def test_what_was_damaged_is_what_verify_names(damage, what):
    getattr(damage, what)()
    found = fill.named(verify(damage.layout.root).findings)
    assert found == damage.expected()
    assert bool(found) == (what != "delete")
    assert len(list_segments(damage.layout)) == (0 if what == "delete" else 1)


def test_values_differ_from_key_to_key():
    one, other = fill.value_of(1), fill.value_of(2)
    assert not np.array_equal(one["long"], other["long"])


# Seeds


def test_a_small_seed_is_complete():
    """Kills, stops, joins and flipped bits, on one folder."""
    code, body = run("--seeds", "3", "--keys", "200", "--views", "one")
    [seen] = body["seeds"]
    assert (code, seen["complete"], seen["lost"], seen["wrong"], seen["remarks"]) == (0, True, 0, 0, [])
    assert seen["kills"] > 0
    assert seen["stops"] > 0
    assert seen["workers"] > 3


@pytest.mark.parametrize("variant", share(["ledger-first", "trust-ledgers"], 2))
def test_workers_that_trust_their_ledgers_lose_keys_in_it(variant):
    code, body = run("--seeds", "1", "--keys", "200", "--variant", variant)
    [seen] = body["seeds"]
    assert code == 1
    assert seen["lost"] > 0
    assert not seen["complete"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(1, 31))
def test_a_seed_is_complete(seed):
    code, body = run("--seeds", str(seed), timeout=220)
    assert code == 0, body


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("variant", fill.BUGS)
def test_wrong_workers_lose_keys(seed, variant):
    code, body = run("--seeds", str(seed), "--variant", variant, timeout=220)
    assert code == 1
    assert body["seeds"][0]["lost"] > 0
