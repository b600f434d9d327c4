"""The blocks of the pages of docs/, for tests that run them."""

import re
import shlex
from collections.abc import Iterator

from tests.fakes import ROOT

_TITLE = re.compile(r"^## ([^\n]*)$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash")
_IN_SYNOPSES = re.compile(r"…|\.\.\.|[|\[(]|\bCOMMAND\b")


def text_of(page: str) -> str:
    """What a page says; README.md is found too."""
    return (ROOT / (page if page == "README.md" else f"docs/{page}")).read_text(encoding="utf-8")


def blocks(text: str, *kinds: str) -> list[tuple[str, str]]:
    """(kind, lines) of each block of these kinds, or of all."""
    return [(kind, lines) for kind, lines in _BLOCK.findall(text) if not kinds or kind in kinds]


def python_by_title(page: str) -> dict[str, list[str]]:
    """The blocks of Python under each title that has some."""
    found = {title: [lines for _kind, lines in blocks(body, "python")] for title, body in _TITLE.findall(text_of(page))}
    return {title: some for title, some in found.items() if some}


def shell_lines(lines: str) -> Iterator[str]:
    """The lines of a block for a shell, without comments, continued ones joined."""
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield re.sub(r" +", " ", re.sub(r"\s+#.*", "", line)).strip()


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `cachestore …` in the blocks for a shell and in sentences.

    Not those that stand for several command lines, and not the bare name of a command. A lone N is some number.
    """
    in_blocks = (line for _kind, lines in blocks(text, *SHELL) for line in shell_lines(lines))
    in_sentences = re.findall(r"`([^`]+)`", _BLOCK.sub("", text))
    for line in [*in_blocks, *in_sentences]:
        words = shlex.split(line) if line.startswith("cachestore ") and not _IN_SYNOPSES.search(line) else []
        if len(words) > 2:
            yield ["1" if word == "N" else word for word in words[1:]]
