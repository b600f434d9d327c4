"""Lines on a terminal are broken between words, and what is to be copied stays whole."""

import io

import pytest

from cachestore.cli import COMMANDS, main
from cachestore.cli.terminal.folding import fold, folded


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_is_broken_between_words_and_goes_on_further_in():
    assert fold("  one two  three", 9) == "  one two\n    three"
    assert fold("short", 9) == "short"
    assert fold("averylongword and more", 9) == "averylongword\n  and\n  more"


@pytest.mark.parametrize("kept", ["`cachestore repair store --refill`,", "To copy: cachestore precompute a b", "Continue with: a b c d"])
def test_what_is_to_be_copied_is_not_broken(kept):
    assert fold(f"it failed: {kept}", 20) == f"it failed:\n  {kept}"
    assert fold("cachestore precompute photos --model sdxl", 20).count("\n") == 0


def test_only_a_terminal_gets_broken_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    line = "a line of more than twenty columns"
    assert folded(line, io.StringIO()) == folded(line, None) == line
    assert folded(line, Terminal()) == "a line of more than\n  twenty columns"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_no_help_is_wider_than_80_columns_or_breaks_an_option(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"] if command else ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 or line.endswith("-")] == []
