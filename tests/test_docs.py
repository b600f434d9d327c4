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
    assert len(rows) == 12
    assert all("`test_" in row for row in rows)
    assert missing(text) == []
