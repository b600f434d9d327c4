"""The documents name tests, commands and files; these tests hold them to what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def existing():
    return set(re.findall(r"def (test_\w+)", "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))))


def missing(text):
    return sorted(set(re.findall(r"`(test_\w+)`", text)) - existing())


def test_the_check_sees_a_test_that_does_not_exist():
    assert missing("`test_nobody_wrote_this`") == ["test_nobody_wrote_this"]


def test_every_invariant_names_tests_that_exist():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE)
    assert len(rows) == 14
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
