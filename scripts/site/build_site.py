"""Build the site of docs/: `python3 scripts/site/build_site.py [FOLDER] [--serve PORT]`.

The site is written to build/site, or to FOLDER. Exit 0 only if no link and no anchor is broken, every page has its place in the
navigation, and no page loads anything from another host. Makes `.venv` by itself the first time; needs no network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__":
    environment.enter()

import argparse
import functools
import os
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

CONFIG = environment.ROOT / "scripts" / "site" / "mkdocs.yml"
FOLDER = environment.ROOT / "build" / "site"
ADDRESSES = ("http:", "https:", "//")
LOADED_BY = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Elements that make a browser load something, and the attribute that says from where."""


def main() -> int:
    """Build, check, and serve if asked to; 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description="Build the site of docs/.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where to write it (default: build/site)")
    parser.add_argument("--serve", type=int, metavar="PORT", help="then serve it on this port of this machine, until Ctrl-C")
    arguments = parser.parse_args()
    status = build(arguments.folder)
    loaded = [f"{page.relative_to(arguments.folder)}: {address}" for page, address in foreign_addresses(arguments.folder)]
    print("\n".join(["loaded from other hosts:", *loaded]) if loaded else f"the site is in {arguments.folder}")
    if arguments.serve and not status:
        serve(arguments.folder, arguments.serve)
    return status or int(bool(loaded))


def build(folder: Path) -> int:
    """Build the site into `folder`, whose old contents go; mkdocs' exit status. A broken link is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(CONFIG), "--site-dir", str(folder.absolute())]
    path = os.pathsep.join([str(environment.ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}).returncode


def foreign_addresses(folder: Path) -> list[tuple[Path, str]]:
    """(page, address) for all that the pages in `folder` load from other hosts. Plain links are not loaded."""
    found: list[tuple[Path, str]] = []
    for page in sorted(folder.rglob("*.html")):
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        found += [(page, address) for address in loads.addresses if address.startswith(ADDRESSES)]
    return found


class _Loads(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Take the address of an element that loads something."""
        self.addresses += [value for name, value in attrs if name == LOADED_BY.get(tag) and value]


def serve(folder: Path, port: int) -> None:
    """Serve the folder until Ctrl-C."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
