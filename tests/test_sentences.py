"""What messages name exists: options, data sets that may have been meant; and they name it in words, never as objects of Python."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import cachestore
from cachestore.cli import COMMANDS, HIDDEN, main, make_parser
from tests.fakes import asks_for
from tests.syntax import nodes_in, nodes_of
from tests.train import stores

PACKAGE = Path(cachestore.__file__).parent
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")
_COMMAND = re.compile(r"`[^`]*`")

OTHERS = frozenset({"dereference", "version"})
"""Options of other programs that messages name, and of `cachestore` without a command."""
STYLES = ("report/style.py", "report/charts.py", "report/document.py", "report/html.py")
"""In style sheets, names begin with two hyphens too."""
SHARED = ("core", "files", "store", "jobs/share", "remote")
"""Rooms whose messages come out of commands that have not all the same options."""
NAMED_IN_SHARED = {
    ("core/ranks.py", "rank"): "one of the pair is given",
    ("core/ranks.py", "world-size"): "the other one",
    ("core/raw_tensors.py", "model"): "it says to import again",
    ("jobs/share/report.py", "max-failures"): "only what encodes holds a report to it",
    ("store/write/commit.py", "access"): "it was given",
    ("store/read/unfinished.py", "name"): "only commands on one data set raise it, and all of them have it",
}


def options() -> dict[str, set[str]]:
    """The options of each command, without hyphens in front."""
    parser = make_parser((*COMMANDS, *HIDDEN), spelled={*COMMANDS, *HIDDEN})
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        name: {one[2:] for action in sub._actions for one in action.option_strings if one.startswith("--")}
        for name, sub in commands.choices.items()
    }


@cache
def texts_in(path: Path) -> tuple[str, ...]:
    """The texts of a file of the package."""
    return tuple(texts_of(nodes_in(path)))


def texts_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every text of a file that is no docstring, and every option that `option(...)` spells.

    The parts of an f-string are one text, with X for its values.
    """
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (inner | docs):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option":
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value != "data":
                yield f"--{str(name.value).replace('_', '-')}"


def named_in(text: str) -> set[str]:
    """The options that a message names for the command that was given: those in backticks, or behind a command, are of that command."""
    return set() if text.split(" ", maxsplit=1)[0] in COMMANDS else set(_OPTION.findall(_COMMAND.sub("", text)))


def arguments() -> set[str]:
    """The arguments of the public calls, spelled as options: a message names one by `option(...)` where only Python has it."""
    public = [getattr(cachestore, name) for name in cachestore.__all__]
    calls = [call for each in public if callable(each) for call in (each, *vars(each).values()) if inspect.isroutine(call) or call is each]
    named: set[str] = set()
    for call in calls:
        try:
            named |= {name.replace("_", "-") for name in inspect.signature(call).parameters}
        except (TypeError, ValueError):  # a class of Python's own
            continue
    return named


@pytest.mark.torch
def test_every_option_that_a_message_names_exists():
    known = OTHERS.union(arguments(), *options().values())
    found = {
        (str(path.relative_to(PACKAGE)), option)
        for path in PACKAGE.rglob("*.py")
        for text in texts_in(path)
        for option in _OPTION.findall(text)
        if option not in known and str(path.relative_to(PACKAGE)) not in STYLES
    }
    assert not found


def test_messages_that_commands_share_name_no_option_that_only_some_of_them_have():
    of_commands = options()
    both, known = of_commands["push"] & of_commands["pull"], set[str]().union(*of_commands.values())
    found = {
        (str(path.relative_to(PACKAGE)), option)
        for room in SHARED
        for path in (PACKAGE / room).rglob("*.py")
        for text in texts_in(path)
        for option in (named_in(text) & known) - (both if room == "remote" else set())  # others are arguments of Python alone
    }
    assert found == set(NAMED_IN_SHARED)


def test_an_option_in_a_shared_message_is_found_and_one_of_a_command_in_backticks_is_not():
    source = '"""Not this: --store."""\nraise E(f"{root} is full: pass another --store, or run `cachestore gc {root} --apply`")'
    (text,) = texts_of(nodes_of(source))
    assert named_in(text) == {"store"}
    assert "--world-size" in texts_of(nodes_of("""raise E(f"pass {option('world_size')}")"""))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(stores.make_store(tmp_path_factory.mktemp("made") / "store", [stores.Row("a.png")], stores.recipes(None, "sample")))


@pytest.mark.parametrize(
    "command",
    [
        ["drop", "STORE", "trian"],
        ["why", "STORE", "a.png", "--name", "trian"],
        ["ls", "STORE", "--samples", "--name", "trian"],
        ["report", "STORE", "--name", "trian", "-o", "OUT"],
        ["relocate", "STORE", "--source", "OUT=OUT", "--name", "trian"],
        ["export", "STORE", "trian", "--format", "sd-scripts", "-o", "OUT"],
        ["export", "STORE", "trian", "--format", "webdataset", "-o", "OUT"],
        ["push", "STORE", "file://OUT", "--name", "trian"],
    ],
    ids=lambda command: " ".join(command[:2] if command[0] != "export" else command[:5:2]),
)
def test_a_misspelt_data_set_is_named_with_the_one_that_may_be_meant(store, tmp_path, capsys, command):
    if command[0] == "push":
        pytest.importorskip("obstore")
    out = str(tmp_path / "out")
    assert main([part.replace("STORE", store).replace("OUT", out) for part in command]) != 0
    said = capsys.readouterr().err
    assert "did you mean 'train'?" in said
    assert "Path(" not in said


@pytest.mark.torch
def test_a_misspelt_data_set_is_named_in_training_too(store):
    with pytest.raises(cachestore.BadInput, check=asks_for("name", "'train'")):
        cachestore.CachedDataset(store, "trian")


def called_in_braces(nodes):
    """The texts outside f-strings in which braces hold a call, as in an f-string."""
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in inside]
    return [text for text in texts if isinstance(text, str) and re.search(r"\{\w+\([^{}]*\)\}", text)]


def test_no_message_shows_the_call_that_should_have_filled_it():
    assert [text for path in PACKAGE.rglob("*.py") for text in called_in_braces(nodes_in(path))] == []
    assert called_in_braces(nodes_of("say(\"pass {option('fps', 16)}\")"))
    assert not called_in_braces(nodes_of("say(f\"pass {option('fps', 16)}\")"))
