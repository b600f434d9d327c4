"""The site of docs/ is built without a broken link, loads nothing from other hosts, and can be read in a browser."""

import ast
import functools
import json
import queue
import re
import shutil
import subprocess
import threading
from dataclasses import fields
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import build_site
import pytest
import site_pages

import cachestore as cs
from cachestore.cli import COMMANDS
from cachestore.jobs.plan.options import PrecomputeRequest
from tests.fakes import ROOT
from tests.syntax import nodes_in

DOCS = ROOT / "docs"


def literals(folder):
    """Every text in the code, with `…` in place of what is filled in."""
    found = []
    for path in folder.rglob("*.py"):
        for node in nodes_in(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
    return "\n".join(found)


_OPTION = r"(?<![\w-])--[a-z][a-z-]+"


def unknown(messages, code):
    """The parts of messages that are in no text of the code. `{}` of a template is `…` too.

    Options are left out, as code spells them, and so are semicolons, at which code joins what it says.
    """
    code = re.sub(rf"\{{\}}|%\w|{_OPTION}", "…", code)
    parts = [part.strip(" :;,.()[]") for message in messages for part in re.split(rf"…|; |{_OPTION}", message)]
    return [part for part in parts if len(part) > 3 and part not in code]


def messages(page):
    """The messages in the first column of the page's tables, and those that a symptom begins with."""
    rows = re.findall(r"^\| (`.*?) \| |^\*\*(`[^`]*…[^`]*`)", page, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", "".join(row))]


def test_a_message_that_the_code_does_not_have_would_be_seen():
    assert unknown(["cannot write …", "the moon is …, and full"], "cannot write …: …\nthe moon is {}") == ["and full"]


def test_each_message_of_the_page_about_faults_is_in_the_code():
    found = messages((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(found) > 30
    assert unknown(found, literals(ROOT / "cachestore")) == []


def test_the_reference_has_every_public_name_once():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: cachestore\.(\w+)$", text, re.MULTILINE)) == sorted(cs.__all__)


def test_the_page_of_commands_has_each_of_them():
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (\S+)\n\n`cachestore \1 --help`$", text, re.MULTILINE)) == COMMANDS


def test_a_page_that_is_named_becomes_a_link_from_every_folder():
    assert site_pages.with_links("see `docs/design/files.md`", "start.md") == "see [Files](design/files.md)"
    assert site_pages.with_links("see `docs/start.md`", "design/files.md") == "see [Start](../start.md)"
    assert site_pages.with_links("[`docs/start.md`](start.md)", "loading.md") == "[`docs/start.md`](start.md)"


def test_the_table_of_options_has_each_of_them():
    rows = site_pages.options_table().splitlines()[2:]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == [one.name for one in fields(PrecomputeRequest)]


def test_an_address_that_a_page_loads_is_found_and_a_plain_link_is_none(tmp_path):
    (tmp_path / "page.html").write_text('<a href="https://a"></a><script src="https://b"></script><img src="c.png"><link href="//d">')
    assert [address for _page, address in build_site.foreign_addresses(tmp_path)] == ["https://b", "//d"]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
PAGES = ("index", "start", "troubleshooting", "how-it-works", "reference", "commands", "options", "glossary", "benchmarks")
WIDTHS = (400, 1400)
SCHEMES = ("default", "slate")
DRAWINGS = sorted(path.name for path in DOCS.glob("*.svg"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    assert build_site.build(folder) == 0
    return folder


def looked_at(folder, pages, profile):
    """What `look.js` finds wrong on the pages of a folder, which is served for this; one browser looks at all of them."""
    script = Path(__file__).with_name("look.js").read_text(encoding="utf-8")
    asked = json.dumps({"pages": pages, "widths": WIDTHS, "schemes": SCHEMES})
    (folder / "look.html").write_text(f"<!DOCTYPE html><body><script>const ASKED = {asked};\n{script}</script>", encoding="utf-8")
    answers = queue.Queue()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):  # noqa: A002 - named so by http.server
            pass

        def do_POST(self):
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/look.html"
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return json.loads(answers.get(timeout=200))
        finally:
            browser.terminate()
            browser.wait(timeout=30)
            server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_broken_link_and_loads_nothing_from_other_hosts(site):
    assert build_site.foreign_addresses(site) == []
    assert all((site / f"{page}.html").is_file() for page in PAGES)
    assert "--resolution R[,R]" in (site / "commands.html").read_text()
    rendered = set(re.findall(r'id="cachestore\.(\w+)"', (site / "reference.html").read_text()))
    assert set(cs.__all__) <= rendered


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", ["[x](nowhere.md)", "[x](start.md#nowhere)", "`docs/nowhere.md`", "![x](nowhere.svg)"])
def test_a_broken_link_or_anchor_ends_the_build(tmp_path, monkeypatch, line):
    for name in ("docs", "scripts", "cachestore"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "docs/start.md").write_text(f"# Start\n\n{line}\n")
    monkeypatch.setattr(build_site, "CONFIG", tmp_path / "scripts/site/mkdocs.yml")
    assert build_site.build(tmp_path / "site") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium or google-chrome to open a page in")
def test_a_browser_sees_no_overflow_and_enough_contrast_at_two_widths_and_in_two_colours(site, tmp_path):
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "look.html")
    found = looked_at(site, pages + DRAWINGS, tmp_path)
    assert found["looked"] == len(pages) * len(WIDTHS) * len(SCHEMES) + len(DRAWINGS)
    assert found["texts"] > 1000
    assert found["faults"] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium or google-chrome to open a page in")
def test_a_page_that_is_too_wide_or_too_pale_would_be_seen(tmp_path):
    (tmp_path / "wide.html").write_text("<!DOCTYPE html><body><div style='width:1500px'>wide</div>")
    (tmp_path / "pale.html").write_text("<!DOCTYPE html><body style='background:#fff'><p style='color:#bbb'>pale</p>")
    card, text = '<rect class="card" width="90" height="30" fill="#fff"/>', '<text y="15" fill="#ddd">longer than its box</text>'
    box = f'<g class="box"><rect width="20" height="20" fill="#fff"/>{text}</g>'
    (tmp_path / "out.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 30" width="90">{card}{box}</svg>')
    faults = looked_at(tmp_path, ["wide.html", "pale.html", "out.svg"], tmp_path / "profile")["faults"]
    wide = [f"wide.html {width} {scheme}" for width in WIDTHS for scheme in SCHEMES]
    pale = [f"pale.html {width} {scheme}" for width in WIDTHS for scheme in SCHEMES]
    assert [fault.partition(":")[0] for fault in faults] == [*wide, *pale, "out.svg", "out.svg"]
