"""How a child is started: whose code it finds, what of the environment it gets, and what is known of one that fails."""

import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from cachestore.children import start as starting
from cachestore.children.kinds import CALL_HELPER, HELPER, KINDS, PICKLE_READER, TORCH_PROBE, TRAINER_CHECK, WORKER
from cachestore.children.start import absolute_entries, command_of, environment_of, last_line, reason_of, run, start
from tests.children.hostile import make_hostile, ran
from tests.fakes import ROOT
from tests.leaks import held

pytestmark = pytest.mark.processes

ARGUMENTS = {
    WORKER: ["--version"],
    HELPER: [os.getpid(), 1, 1, 1],
    CALL_HELPER: [os.getpid()],
    PICKLE_READER: [],
    TORCH_PROBE: [],
    TRAINER_CHECK: ["nothing", os.sep],
}
"""With these, and nothing on stdin, a child ends well by itself."""


@pytest.fixture
def talking(tmp_path, monkeypatch):
    """Makes a kind of child whose `main` is this source."""
    (tmp_path / "talking").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "talking"))

    def make(source, kind=TORCH_PROBE):
        (tmp_path / "talking" / "says.py").write_text(source)
        return replace(kind, module="says")

    return make


TELLS = """
import os, sys
def main(arguments):
    import cachestore
    found = [cachestore.__file__, dict(os.environ), os.getcwd(), os.listdir("/proc/self/fd"), sys.flags.isolated]
    sys.stdout.write(repr(found))
"""


def told(kind):
    code, words = run(kind, seconds=50)
    assert code == 0, words
    names = ("package", "environment", "folder", "descriptors", "is_isolated")
    return dict(zip(names, eval(words), strict=True))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.torch, pytest.mark.slow] if kind in {PICKLE_READER, TORCH_PROBE} else []) for kind in KINDS],
    ids=lambda kind: kind.name,
)
def test_no_child_runs_code_of_the_current_folder(tmp_path, monkeypatch, kind):
    """Though PYTHONPATH names that folder in each way that is no absolute path."""
    folder = make_hostile(tmp_path / "hostile", tmp_path / "marker")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", "../hostile", "", str(ROOT), ""]))
    with start(kind, *ARGUMENTS[kind], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        assert child.wait(50) == 0, reason_of(child)
    assert ran(tmp_path / "marker") == []


@pytest.mark.parametrize("kind", [WORKER, PICKLE_READER], ids=lambda kind: kind.name)
def test_a_child_imports_the_package_of_its_parent_whatever_else_is_called_so(talking, tmp_path, monkeypatch, kind):
    (tmp_path / "talking" / "cachestore.py").write_text("raise AssertionError")
    assert told(talking(TELLS, kind))["package"] == str(ROOT / "cachestore" / "__init__.py")


def test_a_child_imports_the_package_from_the_zip_that_its_parent_has_it_from(talking, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        for path in (ROOT / "cachestore").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT))
    monkeypatch.setattr(starting, "__file__", str(tmp_path / "app.pyz" / "cachestore" / "children" / "start.py"))
    assert told(talking(TELLS))["package"] == str(tmp_path / "app.pyz" / "cachestore" / "__init__.py")


def test_an_isolated_child_gets_no_credentials_and_nothing_else_that_it_does_not_need(talking, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PYTHONSTARTUP", "LD_PRELOAD_X", "ANYTHING"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    kind = talking(TELLS, PICKLE_READER)
    with open(os.devnull) as inheritable:
        os.set_inheritable(inheritable.fileno(), True)
        found = told(kind)
    assert "a secret" not in found["environment"].values()
    assert found["environment"]["LC_ALL"] == "C.UTF-8"
    assert (found["is_isolated"], found["folder"]) == (1, "/")
    assert len(found["descriptors"]) == 4, "its pipes, and the folder that is listed"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_child_is_given_a_prompt_or_a_folder_that_is_not_absolute(kind):
    given = {"PYTHONSTARTUP": "/x.py", "PYTHONINSPECT": "1", "PYTHONPATH": ":", "PYTHONHOME": ".", "PYTHONUSERBASE": "x", "PATH": "/bin:."}
    given |= {"PYTHONPYCACHEPREFIX": "cache", "LD_LIBRARY_PATH": ":/lib:", "PYTHONSAFEPATH": ""}
    assert environment_of(kind, given) == {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONSAFEPATH": "1"}


def test_a_child_is_as_strict_as_its_parent(monkeypatch):
    program = "from cachestore.children import kinds, start; print(start.command_of(kinds.WORKER)[1:-4])"
    for flags, expected in ((("-I",), ["-E", "-s"]), (("-E",), ["-E"]), ((), [])):
        path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        ended = subprocess.run([sys.executable, *flags, "-c", path + program], capture_output=True, text=True, check=True)
        assert ended.stdout.strip().startswith(repr([*expected, "-c"])[:-1]), flags


@pytest.mark.parametrize("where", ["", "frozen"])
def test_a_program_that_does_not_know_its_python_starts_nothing(monkeypatch, where):
    monkeypatch.setattr(sys, "frozen", True, raising=False) if where else monkeypatch.setattr(sys, "executable", "")
    before = held()
    with pytest.raises(FileNotFoundError):
        start(WORKER)
    assert held() - before == set()


def test_a_python_that_is_gone_is_an_error_that_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    before = held()
    with pytest.raises(FileNotFoundError):
        start(WORKER)
    assert held() - before == set()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def main(_arguments):\n    raise MemoryError('too large')", "exit code 1: MemoryError: too large"),
        ("def main(_arguments):\n    raise ZeroDivisionError('a fault of ours')", "exit code 1: ZeroDivisionError: a fault of ours"),
        ("import os\ndef main(_arguments):\n    os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_how_a_child_failed_is_said_in_one_line_without_a_traceback(talking, source, reason):
    code, words = run(talking(source), seconds=50)
    assert (code != 0, words) == (True, reason)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        (
            "Traceback (most recent call last):\n  File x\n    y\nValueError: no\n\nDuring it:\n\nTraceback (…):\n  z\nKeyError: k\n",
            "KeyError: k",
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            "terminate called after throwing an instance of 'std::bad_alloc'",
        ),
        (
            "Fatal Python error: no codec\nPython runtime state: core\n\nCurrent thread 0x1 (first):\n<no Python frame>\n",
            "Fatal Python error: no codec",
        ),
    ],
)
def test_the_last_line_says_what_went_wrong(words, line):
    assert last_line(words) == line


def test_a_child_that_takes_too_long_is_ended(talking):
    with pytest.raises(TimeoutError):
        run(talking("import time; time.sleep(50)"), seconds=0.5)


@pytest.mark.parametrize(("paths", "kept"), [("", ""), (":/a::b:/c/d:", "/a:/c/d"), (".", ""), ("~/a:/b", "/b")])
def test_a_path_variable_keeps_its_absolute_entries(paths, kept):
    assert absolute_entries(paths) == kept


def test_the_folders_of_pythonpath_are_the_arguments_of_an_isolated_child(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":/one:two:/three")
    monkeypatch.setattr(starting.site, "ENABLE_USER_SITE", False)
    assert "/one:/three" in command_of(PICKLE_READER)
    assert "/one:/three" not in command_of(WORKER)
