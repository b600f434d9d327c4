"""What is one trainer's own is in its folder: shared code asks a trainer's format, and never for its name."""

import ast
import re
from pathlib import Path

import pytest

import cachestore
from cachestore.interop.table import EXPORTED, IMPORTED, WEBDATASET, load_formats

INTEROP = Path(cachestore.__file__).parent / "interop"
COMMANDS = [INTEROP.parent / "cli" / f"{name}.py" for name in ("import_", "export")]
NAMES = re.compile(
    r"(?i)sd[-_]?scripts|kohya|simple[-_]?tuner|musubi|ai[-_]?toolkit|ostris|diffusion[-_]?pipe(?!line)|nemo|(?<![a-z])ltx(?![a-z0-9])"
)


def names_in(text):
    """The trainers that code names, outside of the docstrings that say to users what may be passed."""
    tree = ast.parse(text)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name in {"import_cache", "export_cache"}]
    told = {number for one in calls for number in range(one.body[0].lineno, (one.body[0].end_lineno or 0) + 1)}
    return {found for number, line in enumerate(text.splitlines(), 1) if number not in told for found in NAMES.findall(line)}


@pytest.mark.parametrize("path", [*INTEROP.glob("*.py"), *COMMANDS], ids=lambda path: path.name)
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
    assert len([*INTEROP.glob("*/format.py")]) == len([*INTEROP.glob("*/families.py")]) == len(load_formats())
