"""A sample of the campaigns that strike calls, cut the power, exchange entries and take the root away, and of the mutants."""

import json
import os
import subprocess
import sys

import pytest

from tests.fakes import ROOT
from tests.torture.mutants import MUTANTS, bare_copy

pytestmark = pytest.mark.processes


def play(*arguments, timeout=58):
    """The script as a program without threads, as it forks: its exit code and the object it prints."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])}
    command = [sys.executable, "-c", "import sys; from chaos import torture; sys.exit(torture.main())", "--json", *arguments]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout, env=surroundings
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


SAMPLED = (
    "kills",
    "errors",
    "flips",
    "crashes",
    "exchange",
    "gone",
    "overtaking",
    "transfers",
    "caches",
    "tars",
    "sources",
    "publish",
    "files",
)


@pytest.mark.parametrize("names", [SAMPLED[::2], SAMPLED[1::2]], ids=" ".join)
def test_a_few_points_of_each_campaign_find_nothing(names):
    only = [word for name in names for word in ("--only", name)]
    code, body = play(*only, "--count", "8", "--seed", "1")
    assert (code, body["violations"]) == (0, {name: [] for name in names})
    assert all(row["points"] > 0 for row in body["rows"])


def test_a_sample_of_wrong_answers_damaged_copies_and_full_disks_finds_nothing():
    code, body = play("--only", "answers", "--count", "10", "--seed", "1")
    assert (code, body["violations"]) == (0, {"answers": []})
    assert body["rows"][0]["points"] == 10


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_mutant_lacks_stands_in_the_package_once(tmp_path, name):
    bare_copy(MUTANTS[name], tmp_path)
    assert (tmp_path / "cachestore" / MUTANTS[name].file).read_text() != (ROOT / "cachestore" / MUTANTS[name].file).read_text()


def test_a_passage_that_is_not_there_makes_no_mutant(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.torture.mutants.ROOT", tmp_path)
    file = tmp_path / "cachestore" / MUTANTS["checksum"].file
    file.parent.mkdir(parents=True)
    file.write_text("nothing")
    with pytest.raises(ValueError, match="up to date"):
        bare_copy(MUTANTS["checksum"], tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("kills", 300),
        ("errors", 300),
        ("flips", 300),
        ("crashes", 1000),
        ("exchange", 224),
        ("gone", 400),
        ("overtaking", 400),
        ("transfers", 600),
        ("answers", 800),
        ("caches", 2000),
        ("tars", 2000),
        ("sources", 2000),
        ("publish", 1000),
        ("files", 1000),
        ("forks", 300),
    ],
)
def test_a_campaign_finds_nothing(name, count):
    code, body = play("--only", name, "--count", str(count), timeout=580)
    assert (code, body["violations"]) == (0, {name: []})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_mutant_is_found_and_nothing_in_the_whole_package():
    code, body = play("--mutants", timeout=580)
    assert (code, body["found"], body["of"]) == (0, len(MUTANTS), len(MUTANTS))
