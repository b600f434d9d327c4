"""What the site makes of the pages of docs/, as a hook of mkdocs: links, help texts and the first page.

Pages are plain Markdown that can be read in the repository. There a page is named as `docs/loading.md`; here that becomes a link.
A line that is only `cachestore COMMAND --help` becomes what that command prints. The README is the first page.
"""

import contextlib
import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"(?<!\[)`docs/([\w/-]+\.md)`")
HELP = re.compile(r"^`cachestore ([a-z]+) --help`$", re.MULTILINE)
COLUMNS = "80"


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001 - mkdocs passes them by name
    """Link the pages that a page names, and put in the help texts. Code blocks stay as they are."""
    source = page.file.src_uri
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _with_help(with_links(part, source)) for part in parts)


def with_links(text: str, source: str) -> str:
    """`docs/X.md` as a link to that page, from the page `source`. If there is no such page, mkdocs warns of the link."""
    folder = posixpath.dirname(source)
    return PAGE.sub(lambda found: f"[`docs/{found[1]}`]({posixpath.relpath(found[1], folder or '.')})", text)


def help_of(command: str) -> str:
    """What `cachestore COMMAND --help` prints on a terminal of 80 columns."""
    from cachestore.cli import main

    printed = io.StringIO()
    before = dict(os.environ)
    os.environ |= {"COLUMNS": COLUMNS, "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue()


def _with_help(text: str) -> str:
    return HELP.sub(lambda found: f"```text\n{help_of(found[1]).rstrip()}\n```", text)
