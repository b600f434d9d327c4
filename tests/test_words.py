"""The words of docs/glossary.md: no name that is defined here, and no message, uses a word that was given up for one of them."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.fakes import ROOT
from tests.syntax import nodes_in

GIVEN_UP = {
    **dict.fromkeys(("beat", "beats", "beating"), "heartbeat"),
    **dict.fromkeys(("condemn", "condemned"), "marked for deletion"),
    **dict.fromkeys(("view", "views"), "variant"),
    **dict.fromkeys(("share", "shares"), "batch slice, or fraction"),
    "ahead": "prefetch",
    **dict.fromkeys(("place", "places", "placed", "placing", "placement"), "unit index, row, location, path, rank, or crop box"),
    **dict.fromkeys(("told", "said", "tells"), "metadata, or reported"),
    "looked": "decoded unit, or checked",
    "flight": "pending batch",
    "station": "encoder state",
    "pool": "partition group",
    **dict.fromkeys(("gathered", "brought"), "in memory"),
    "asking": "the source pipe",
}
"""Words, and what is said instead. In names that a file defines, but for those below."""
NAMES = {"Start": "Invocation", "count_start": "count_invocation", "is_kept": "is_hint", "Asked": "PipeFiles", "ASK": "PIPE"}
"""Whole names of which each part alone may be used."""
ALLOWED = (
    "care/collect.py:condemned",  # a field of `gc --json`
    "core/samples.py:share",  # public, of cs.Source
    "jobs/share/history.py:share",  # a field of `report --json`
    "train/dataset.py:share",  # public, of CachedDataset.split
    "scripts/bench/encode.py:share_of_matmul",  # a field of its --json
    "jobs/share/progress.py:beat_age_seconds",  # a field of `status --json`
    "jobs/share/workers.py:Beat",  # one record; `Heartbeat` is what writes it
    "train/loader.py:ahead",  # the public parameter of make_loader
    # of memory, as numpy has it
    *(f"{name}.py:view" for name in ("encode/batching/compare", "files/opening", "files/publish", "files/table")),
    *(f"{name}.py:view" for name in ("train/assemble", "train/buffers", "store/format/entry", "store/read/fetch")),
    *(f"scripts/chaos/fill.py:{name}" for name in ("view", "views", "views_of", "why_no_views")),  # a folder as two machines see it
    "encode/batching/pipeline.py:pool",  # of threads
    "train/prefetch.py:_pool",
)
IN_MESSAGES = re.compile(r"\b(beats?|condemned|gathered|brought|nobody|whoever|likewise|(is|are|stays?) told)\b")


def words_of(name: str) -> set[str]:
    """The words of a name: those between underlines, and between humps."""
    return {part.casefold() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def defined(path: Path) -> Iterator[str]:
    """The names that a file defines, its own first."""
    yield path.stem
    for node in nodes_in(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                yield name
            case _:
                pass


def messages(path: Path) -> Iterator[str]:
    """The sentences that a file hands to a call or raises: messages, warnings and help."""
    for node in nodes_in(path):
        if isinstance(node, ast.Raise | ast.Call):
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
            yield from (text for text in texts if " " in text)


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def given_up(files: Iterable[Path]) -> list[str]:
    """Where a name uses a word that was given up, and what to say instead."""
    found: set[str] = set()
    for path in files:
        for name in set(defined(path)):
            if not any(f"{path}:{name}".endswith(f"/{one}") for one in ALLOWED):
                instead = {GIVEN_UP[word] for word in words_of(name) & GIVEN_UP.keys()} | ({NAMES[name]} if name in NAMES else set())
                found |= {f"{path.name}: {name}: say {one}" for one in instead}
    return sorted(found)


def in_messages(files: Iterable[Path]) -> list[str]:
    return sorted({f"{path.name}: {text}" for path in files for text in messages(path) if IN_MESSAGES.search(text)})


def test_no_name_uses_a_word_that_was_given_up():
    assert given_up(python_files("cachestore", "scripts")) == []


@pytest.mark.parametrize(
    "name", ["beat", "lastBeats", "Placement", "_place", "told_elsewhere", "views", "join_shares", "look_ahead", "Start"]
)
def test_the_check_sees_a_name_that_uses_one(tmp_path, name):
    (tmp_path / "one.py").write_text(f"def f({name}, replace, heartbeat):\n    pass\n")
    assert len(given_up([tmp_path / "one.py"])) == 1


def test_no_message_uses_a_word_that_was_given_up():
    assert in_messages(python_files("cachestore")) == []


def test_the_check_sees_a_message_that_uses_one(tmp_path):
    (tmp_path / "one.py").write_text("raise ValueError('it is told to nobody')\n")
    assert len(in_messages([tmp_path / "one.py"])) == 1


def test_no_class_of_the_package_bears_the_name_of_another():
    names = [node.name for path in python_files("cachestore") for node in nodes_in(path) if isinstance(node, ast.ClassDef)]
    assert sorted({name for name in names if names.count(name) > 1}) == []
