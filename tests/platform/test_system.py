"""What asks for Windows, as far as one call shows it."""

import ast
import errno
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachestore.core import system
from cachestore.core.errors import BadInput
from cachestore.files import in_use
from cachestore.files.paths import Layout
from cachestore.files.portable import check_new_name, why_refused
from tests.fakes import asks_for

PACKAGE = Path(system.__file__).parents[1]
WINDOWS_ONLY = {"core/system.py", "files/in_use.py"}


def refusal(winerror):
    error = PermissionError(errno.EACCES, "Access is denied")
    error.winerror = winerror
    return error


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(system, "IS_WINDOWS", True)


@pytest.mark.parametrize("winerror", [5, 32, 33, 1224])
def test_a_call_that_is_refused_as_a_file_is_in_use_is_tried_again(windows, winerror):
    answers = [refusal(winerror), refusal(winerror), "done"]

    def call():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert in_use.patiently(call) == "done"


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), refusal(19), OSError(errno.ENOSPC, "full")])
def test_any_other_refusal_is_raised_at_once(windows, error):
    calls = []

    def call():
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        in_use.patiently(call)
    assert len(calls) == 1


def test_a_file_that_stays_in_use_is_raised_in_bounded_time_with_words(windows, monkeypatch):
    monkeypatch.setattr(in_use, "PATIENCE_SECONDS", 0.1)

    def call():
        raise refusal(32)

    with pytest.raises(PermissionError) as raised:
        in_use.patiently(call)
    assert "has it open" in in_use.why_in_use(raised.value)


def test_elsewhere_nothing_is_tried_again(monkeypatch):
    monkeypatch.setattr(system, "IS_WINDOWS", False)
    calls = []

    def call():
        calls.append(1)
        raise refusal(32)

    with pytest.raises(PermissionError):
        in_use.patiently(call)
    assert len(calls) == 1


def test_a_read_only_file_is_replaced_and_removed_on_windows(windows, tmp_path, monkeypatch):
    real = os.unlink

    def unlink(path, **_folder):
        if not os.stat(path).st_mode & 0o200:
            raise refusal(5)
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    path = tmp_path / "a"
    path.touch()
    path.chmod(0o444)
    in_use.unlink(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "name", ["con", "NUL", "aux.txt", "Com1", "lpt9.x.y", "com¹", "CONOUT$", "train.", "train ", "a:b", "a?", "a\tb", "con .x"]
)
def test_windows_refuses(name):
    assert why_refused(name)


@pytest.mark.parametrize("name", ["train", "console", "com", "com10", "nullify", "a.con", "lpt", ".hidden", "a b"])
def test_windows_takes(name):
    assert not why_refused(name)


@pytest.mark.parametrize("name", ["nul", "CON", "train.", "aux.v2"])
def test_a_new_data_set_gets_no_name_that_windows_refuses(name):
    with pytest.raises(BadInput):
        check_new_name(name, ())


@pytest.mark.parametrize(("known", "name"), [("train", "Train"), ("Straße", "STRAßE"), ("a b", "A B")])
def test_a_new_data_set_differs_from_others_by_more_than_case(known, name):
    with pytest.raises(BadInput, check=asks_for("name", known)):
        check_new_name(name, [known])


def test_a_name_in_use_and_names_of_any_language_are_taken():
    check_new_name("train", ["train", "other"])
    check_new_name("写真: 猫?", ["train"])


def test_a_path_that_windows_refuses_is_told_when_the_store_is_named(windows, tmp_path):
    with pytest.raises(BadInput, match="259"):
        Layout.at(tmp_path / ("a" * 200))
    Layout.at(Path("/short"))
    with pytest.raises(BadInput, match="259"):
        Layout(Path("/" + "a" * 100)).catalog_folder("b" * 180)


def test_no_path_is_too_long_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "IS_WINDOWS", False)
    assert not in_use.refused_length(tmp_path / ("a" * 200), 120)


def test_the_longest_path_of_a_store_is_no_longer_than_what_is_asked_for():
    from cachestore.files.paths import _LONGEST, AttemptName, PassFolder

    where = PassFolder(Layout(Path("/s")).pass_folder("0" * 32, 10**6)).attempt(AttemptName("0" * 32, 10**6, 10**9))
    assert len(str(where)) - len("/s") <= _LONGEST


def test_a_file_is_synced_by_the_call_that_empties_the_cache_of_the_disk_where_there_is_one(tmp_path, monkeypatch):
    calls = []

    def full(descriptor, number):
        calls.append(number)
        if len(calls) == 2:
            raise OSError(errno.ENOTSUP, "not there")

    monkeypatch.setattr(in_use, "_FULL_SYNC", 51)
    monkeypatch.setattr(in_use, "fcntl", SimpleNamespace(fcntl=full))
    monkeypatch.setattr(os, "fsync", lambda _descriptor: calls.append("fsync"))
    (tmp_path / "a").touch()
    in_use.sync_file(tmp_path / "a", 0o444)
    in_use.sync(0)
    assert calls == [51, 51, "fsync"]


def test_a_command_line_is_quoted_for_the_shell_of_windows(windows):
    assert system.in_shell(["cachestore", "verify", r"C:\my data\cache"]) == r'cachestore verify "C:\my data\cache"'


def test_a_child_of_a_virtual_environment_is_one_process_on_windows(windows, monkeypatch):
    monkeypatch.setattr(system.sys, "_base_executable", "/base/python", raising=False)
    program, variables = system.interpreter()
    assert (program, variables) == ("/base/python", {"__PYVENV_LAUNCHER__": system.sys.executable})


@cache
def nodes_of(path):
    """The nodes of a file that has one of the words looked for."""
    text = path.read_text(encoding="utf-8")
    return list(ast.walk(ast.parse(text))) if WORDS.search(text) else []


def calls_in(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, node
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node


WORDS = re.compile(r"os\.name|os\.fork|truncate|pwrite|select\.|unlink|rename|relative_to")
FORBIDDEN = {"os.name", "os.fork", "os.link_", "os.truncate", "os.pwrite", "select.select"}


def test_only_two_modules_ask_for_the_system_and_remove_or_replace_files():
    found, seen = [], set()
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        for name, node in calls_in(path):
            removes = isinstance(node, ast.Call) and name in {"unlink", "rename"} and not ast.unparse(node).startswith("in_use.")
            if name in FORBIDDEN or removes:
                seen.add(where)
                found += [f"{where}:{node.lineno}: {ast.unparse(node)}"] if where not in WINDOWS_ONLY else []
    assert not found
    assert seen == WINDOWS_ONLY, "the check sees nothing"


def test_no_path_below_a_store_is_told_with_the_separators_of_its_system():
    found = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and "relative_to(" in ast.unparse(node)
    ]
    assert not found
