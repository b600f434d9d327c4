"""The documents name tests, commands and files; these tests hold them to what is there."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import tomllib

from cachestore.cli import make_parser
from cachestore.core.captions import CaptionPolicy
from cachestore.jobs.plan.options import PrecomputeRequest, in_command
from tests import pages

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def existing():
    return set(re.findall(r"def (test_\w+)", "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))))


def missing(text):
    return sorted(set(re.findall(r"`(test_\w+)`", text)) - existing())


def test_the_check_sees_a_test_that_does_not_exist():
    assert missing("`test_nobody_wrote_this`") == ["test_nobody_wrote_this"]


def test_every_invariant_names_tests_that_exist():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE)
    assert len(rows) == 19
    assert all("`test_" in row for row in rows)
    assert missing(text) == []


def promises():
    """The rows of the table of promises in docs/reliability.md: what is promised, and the tests that are named for it."""
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8").partition("## The promises")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\| .*$", text, re.MULTILINE)]
    return [(promise, re.findall(r"`(test_\w+)`", tests)) for promise, tests in rows if promise != "promise"]


def test_every_promise_names_tests_that_exist():
    assert len(promises()) >= 10
    assert all(tests for _promise, tests in promises())
    assert {name for _promise, tests in promises() for name in tests} <= existing()


def wrong_installs(text):
    """Lines that install this project otherwise than from a clone, or with an extra that it does not have."""
    lines = re.findall(r"pip install (?!-)([^`\n#]+)", text)
    return [
        line
        for line in lines
        if re.search(r"\bcachestore\b", line.partition("in a clone")[0])
        or ((extras := re.match(r"'?\.\[([\w,{}]+)\]", line)) is not None and not {*extras[1].split(",")} <= {*EXTRAS, "{extra}"})
    ]


def test_the_check_sees_another_project_and_an_extra_that_does_not_exist():
    text = "pip install cachestore\npip install '.[everything]'\n`pip install '.[encode,video]'` in a clone of cachestore\npip install ."
    assert wrong_installs(text) == ["cachestore", "'.[everything]'"]


def test_every_line_that_installs_does_it_as_the_first_one_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install '.[encode]'" in readme.partition("```")[2].partition("```")[0]
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "cachestore").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): wrong_installs(path.read_text(encoding="utf-8")) for path in texts}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_every_command_line_of_the_pages_is_understood():
    parser, wrong, count = make_parser(), [], 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for words in pages.commands(page.read_text(encoding="utf-8")):
            count += 1
            try:
                parser.parse_args(words)
            except SystemExit as error:
                if error.code:
                    wrong.append(f"{page.name}: {words}")
    assert count > 90
    assert wrong == []


def test_each_option_in_the_table_for_users_of_a_trainer_is_one_of_precompute():
    text = (ROOT / "docs/coming-from/settings.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)
    named = [shlex.split(code) for cell in cells for code in re.findall(r"`(--[^`]+)`", cell)]
    assert len(named) > 25
    others = {"--config", "--n"}  # of the command alone, and in a file of prompts
    assert {name for name, *_values in named} <= others | {in_command(one.name) for one in fields(PrecomputeRequest)}
    policies = [value for name, *values in named for value in values if name == "--captions"]
    assert len([CaptionPolicy.parse(json.loads(value) if value.startswith("{") else value) for value in policies]) >= 5
