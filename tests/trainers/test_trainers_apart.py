"""What is one trainer's own is in its folder: shared code asks a trainer's format, and never for its name."""

import ast
import re
from pathlib import Path

import pytest

import cachestore
from cachestore.trainers.table import EXPORTED, IMPORTED, WEBDATASET, load_formats

TRAINERS = Path(cachestore.__file__).parent / "trainers"
COMMANDS = [TRAINERS.parent / "cli" / f"{name}.py" for name in ("import_", "export")]
NAMES = re.compile(
    r"(?i)sd[-_]?scripts|kohya|simple[-_]?tuner|musubi|ai[-_]?toolkit|ostris|diffusion[-_]?pipe(?!line)|nemo|(?<![a-z])ltx(?![a-z0-9])"
)


def names_in(text):
    """The trainers that code names, outside of the docstrings that say to users what may be passed."""
    tree = ast.parse(text)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name in {"import_cache", "export_cache", "exported"}]
    told = {number for one in calls for number in range(one.body[0].lineno, (one.body[0].end_lineno or 0) + 1)}
    return {found for number, line in enumerate(text.splitlines(), 1) if number not in told for found in NAMES.findall(line)}


@pytest.mark.parametrize("path", [*TRAINERS.glob("*.py"), *COMMANDS], ids=lambda path: path.name)
def test_shared_code_names_no_trainer(path):
    if path.name != "table.py":
        assert names_in(path.read_text(encoding="utf-8")) == set()


def test_a_name_is_found():
    assert names_in("if trainer == LTX or name in ('sd-scripts', 'ltx2'): pass") == {"LTX", "sd-scripts"}


def test_the_table_says_of_each_trainer_what_its_format_can():
    formats = load_formats()
    assert [one.name for one in formats if one.reads is not None] == [name for name in IMPORTED if name != WEBDATASET]
    assert [one.name for one in formats if one.writing is not None] == [name for name in EXPORTED if name != WEBDATASET]
    assert all(one.why_not_written for one in formats if one.writing is None)


def test_each_folder_of_a_trainer_is_in_the_table():
    assert len([*TRAINERS.glob("*/format.py")]) == len(load_formats())


def typed_options(text):
    """The options that messages of code spell as they are typed, outside of commands in backticks."""
    tree = ast.parse(text)
    strings = [one for one in ast.walk(tree) if isinstance(one, ast.JoinedStr)]
    parts = {id(part) for one in strings for part in one.values}
    docs = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    plain = [one for one in ast.walk(tree) if isinstance(one, ast.Constant) and id(one) not in parts | docs and isinstance(one.value, str)]
    said = ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in one.values) for one in strings]
    said += [str(one.value) for one in plain if " " in str(one.value)]
    return [found for one in said for found in re.findall(r"--[a-z][a-z-]+", re.sub(r"`[^`]*`", "", one))]


@pytest.mark.parametrize("path", sorted(TRAINERS.rglob("*.py")), ids=lambda path: str(path.relative_to(TRAINERS)))
def test_messages_spell_options_as_their_caller_does(path):
    assert typed_options(path.read_text(encoding="utf-8")) == []


def test_a_typed_option_is_found():
    text = '"""--none"""\nraise E(f"{x}: pass --family", "run `cachestore why --name x`", "--name")'
    assert typed_options(text) == ["--family"]
