"""How lines fit a terminal: broken between words. A command to copy stays whole, as a terminal copies what it breaks itself as one line."""

import re
import shutil
from typing import IO, Final

_WORD: Final = re.compile(r"(\s*)((?:To copy|Continue with|Run it again with): .*|[^\s`]*(?:`[^`]*`[^\s`]*)+|\S+)")
"""A word with the spaces before it; what stands between backticks is one word, and so is the end of a line that is to be copied."""


def folded(text: str, stream: IO[str] | None) -> str:
    """Return a text for a stream: with lines broken between words if that is a terminal, else as it is, so that lines can be searched."""
    if stream is None or not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(fold(line, width) for line in text.split("\n"))


def fold(line: str, width: int) -> str:
    """Return a line broken between words, the rest of it indented by two columns more."""
    if len(line) <= width or line.startswith("cachestore "):
        return line
    margin = " " * (len(line) - len(line.lstrip()) + 2)
    rows = [""]
    for spaces, word in _WORD.findall(line):
        if rows[-1].strip() and len(rows[-1] + spaces + word) > width:
            rows.append(margin + word)
        else:
            rows[-1] += spaces + word
    return "\n".join(rows)
