"""`cachestore live`: the command of a trainer with the front door in it, and a check of the trainer's checkout."""

import json
import os
import subprocess
import sys

import pytest

from cachestore.cli import main
from tests import fakes

ADAPTER = """
from cachestore import live
adapter = live.Adapter("toy", tested={"toytrainer.cache": ["000"]})
@adapter.replace("toytrainer.cache", "load")
def load(own, path): return "ours"
@adapter.replace("toytrainer.kind_*", "encode", optional=True)
def encode(own, text): return "ours"
@adapter.replace("toytrainer.cache", "Cache.save")
def save(own, self, path): return None
"""
CACHE = "print('imported')\ndef load(path): return 'theirs'\nclass Cache:\n    def save(self, path): pass\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with an adapter, and a trainer's checkout in trainer/."""
    files = {
        "toyadapter.py": ADAPTER,
        "trainer/src/toytrainer/cache.py": CACHE,
        "trainer/src/toytrainer/kind_a.py": "def encode(text): pass",
    }
    files |= {"trainer/train.py": "import sys\nsys.path.append('trainer/src')\nfrom toytrainer.cache import load\nsys.exit(load('') + '!')"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        try:
            code = main(["live", *map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.processes
def test_the_command_is_shown_and_its_end_is_the_trainers(place):
    words = ["live", "toyadapter", "--store", "my store", "--", sys.executable, "trainer/train.py", "--learning_rate", "1", "--", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(fakes.ROOT)}
    done = subprocess.run([sys.executable, "-m", "cachestore", *words], env=environment, capture_output=True, text=True, check=False)
    written = f"{sys.executable} -m cachestore.live toyadapter --store 'my store' trainer/train.py --learning_rate 1 -- --json"
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == f"cachestore: running {written}"
    assert "ours!" in done.stderr.splitlines()


def test_the_trainers_own_options_are_left_as_they_are(place, monkeypatch, run):
    became = []
    monkeypatch.setattr(os, "execvp", lambda _file, words: became.append(words) or sys.exit(7))
    line = ["toy", "--store=s", "--name", "n", "--read", "d", "--", "python", "-u", "a.py", "--batch_size=2", "--dry-run"]
    assert run(*line)[0] == 7
    assert " ".join(became[0]) == "python -u -m cachestore.live toy --store s --name n --read d a.py --batch_size=2 --dry-run"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["toy"], "the trainer's command is missing"),
        (["toy", "--store", "s"], "the trainer's command is missing"),
        (["toy", "--store", "s", "--"], "the trainer's command is missing"),
        (["toy", "--", "python", "a.py"], "--store is missing"),
        (["toy", "--store", "", "--", "python", "a.py"], "--store is missing"),
        (["toy", "python", "--store", "s"], "python belongs to --check"),
        (["toy", "python", "a.py", "--store", "s"], "the trainer's command stands after --"),
        (["toy", "--store", "s", "accelerate", "launch", "--num_processes", "2", "a.py"], "the trainer's command stands after --"),
        (["toy", "--json", "--store", "s", "--", "python", "a.py"], "--json belongs to --check"),
        (["toy", "--stroe", "s", "--", "python", "a.py"], "did you mean '--store'?"),
        (["toy", "--store", "s", "--", "./train.sh"], "-m cachestore.live toy --store s"),
        (["toy", "--store", "s", "--", "./nothing/python", "a.py"], "./nothing/python cannot be started"),
        (["toy", "--check", "--store", "s"], "--check starts nothing"),
        (["toy", "--check", "--", "python", "a.py"], "--check starts nothing"),
        (["toy", "--check", "nothing"], "nothing is not a folder"),
    ],
)
def test_what_cannot_be_run_ends_with_2(place, run, arguments, says):
    code, out, err = run(*arguments)
    assert (code, bool(out)) == (2, "--json" in arguments)
    assert says in " ".join(err.split())


@pytest.mark.processes
def test_a_check_lists_each_plug_point_and_what_nobody_tested(place, run):
    code, out, _err = run("toyadapter", "--check", "trainer")
    lines = out.splitlines()
    assert code == 0
    assert lines[:3] == [
        "toytrainer.cache load: there",
        "toytrainer.kind_a encode: there",
        "toytrainer.cache Cache.save: there",
    ]
    assert lines[3].startswith("note: toytrainer.cache is not in a version")
    assert lines[4:] == ["the adapter fits this checkout"]


@pytest.mark.processes
def test_a_check_tells_apart_what_is_missing_what_takes_other_parameters_and_what_cannot_be_imported(place, run):
    (place / "trainer/src/toytrainer/cache.py").write_text("def load(path, dtype): pass\n")
    (place / "trainer/src/toytrainer/kind_a.py").write_text("import nowhere_at_all\n")
    code, out, _err = run("toyadapter", "--check", "trainer", "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (2, False)
    assert [(point["module"], point["name"], point["state"]) for point in found["points"]] == [
        ("toytrainer.cache", "load", "takes (path, dtype), not (path)"),
        ("toytrainer.kind_a", "encode", f"cannot be told: the package 'nowhere_at_all' is not installed here ({sys.executable})"),
        ("toytrainer.cache", "Cache.save", "is missing"),
    ]


@pytest.mark.processes
def test_a_check_of_no_adapter_or_of_another_folder_ends_with_2(place, run):
    assert run("nothing", "--check", "trainer")[0] == 2
    assert "there is no adapter" in run("nothing", "--check", "trainer")[2]
    code, out, _err = run("toyadapter", "--check")
    assert code == 2
    assert out.splitlines() == [
        "toytrainer.cache load: is not in .: give the folder of a checkout of toy",
        "toytrainer.kind_* encode: no module has such a name, and none needs it",
        "toytrainer.cache Cache.save: is not in .: give the folder of a checkout of toy",
        "the adapter does not fit this checkout: a run would end with 2",
    ]


@pytest.mark.processes
def test_a_check_blames_no_package_for_an_import_error_that_names_none(place, run):
    (place / "trainer/src/toytrainer/kind_a.py").write_text("raise ModuleNotFoundError('a lazy module failed')\n")
    code, out, _err = run("toyadapter", "--check", "trainer")
    assert code == 2
    assert "toytrainer.kind_a encode: cannot be imported: ModuleNotFoundError: a lazy module failed" in out


@pytest.mark.processes
def test_a_check_without_the_trainers_packages_says_that_it_cannot_be_told(place, run):
    for module in ("cache", "kind_a"):
        (place / f"trainer/src/toytrainer/{module}.py").write_text("import nowhere_at_all\n")
    code, out, _err = run("toyadapter", "--check", "trainer")
    assert code == 2
    assert out.splitlines()[-1].startswith("it cannot be told here whether the adapter fits")
