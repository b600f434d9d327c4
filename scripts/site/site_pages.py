"""What the site makes of the pages of docs/, as a hook of mkdocs: links, help texts and the first page.

Pages are plain Markdown that can be read in the repository. There a page is named as `docs/loading.md`; here that becomes a link.
The link bears the title of that page. A line that is only `cachestore COMMAND --help` becomes what that command prints, and a line that
is only `cs.precompute(**options)` a table of the options. The README is the first page.
"""

import contextlib
import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"(?<!\[)`docs/([\w/-]+\.md)`")
OPTIONS = re.compile(r"^`cs\.precompute\(\*\*options\)`$", re.MULTILINE)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
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
    return "".join(part if part.startswith("```") else _with_code(with_links(part, source)) for part in parts)


def with_links(text: str, source: str) -> str:
    """`docs/X.md` as a link to that page, from the page `source`. If there is no such page, mkdocs warns of the link."""
    folder = posixpath.dirname(source) or "."
    return PAGE.sub(lambda found: f"[{_title(found[1])}]({posixpath.relpath(found[1], folder)})", text)


def _title(page: str) -> str:
    path = ROOT / "docs" / page
    found = TITLE.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found[1] if found else page


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


def options_table() -> str:
    """The options of `precompute`: their names, their defaults, and what they do."""
    from dataclasses import fields

    from cachestore.jobs.plan.options import PrecomputeRequest, option_of, spelled

    rows = ["| option | default | what it does |", "|---|---|---|"]
    for one in fields(PrecomputeRequest):
        words = option_of(one).help.replace("|", "\\|")
        default = spelled(one.default)
        rows.append(f"| `{one.name}` | {f'`{default}`' if default else ''} | {words} |")
    return "\n".join(rows)


def _with_code(text: str) -> str:
    text = HELP.sub(lambda found: f"```text\n{help_of(found[1]).rstrip()}\n```", text)
    return OPTIONS.sub(lambda _found: options_table(), text)
