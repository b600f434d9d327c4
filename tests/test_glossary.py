"""The words of docs/glossary.md: each is defined once, and what it names is there."""

import re
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

GLOSSARY = Path(__file__).resolve().parent.parent / "docs" / "glossary.md"


def words(text):
    return re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)


def twice(text):
    return [word for word, count in Counter(map(str.casefold, words(text))).items() if count > 1]


def named(text):
    return sorted(set(re.findall(r"`(cachestore(?:\.\w+)+)`", text)))


def is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is a class
        return False


def imported(name):
    """The module, class or attribute of a dotted name. Raises AttributeError for one that is not there."""
    if is_module(name):
        return import_module(name)
    parent, _dot, last = name.rpartition(".")
    return getattr(imported(parent), last)


def missing(text):
    def is_missing(name):
        try:
            imported(name)
        except AttributeError:
            return True
        return False

    return [name for name in named(text) if is_missing(name)]


@pytest.mark.torch
def test_every_name_in_the_glossary_can_be_imported():
    text = GLOSSARY.read_text(encoding="utf-8")
    assert len(named(text)) > 50
    assert missing(text) == []


def test_the_check_sees_a_name_that_does_not_exist():
    there = "`cachestore.core.keys` `cachestore.core.keys.Key` `cachestore.core.keys.Key.parse`"
    assert missing(f"{there} `cachestore.core.keys.Lock` `cachestore.core.nothing` `cachestore.x.Y.z`") == [
        "cachestore.core.keys.Lock",
        "cachestore.core.nothing",
        "cachestore.x.Y.z",
    ]


def test_no_word_is_defined_twice():
    text = GLOSSARY.read_text(encoding="utf-8")
    assert len(words(text)) > 50
    assert twice(text) == []


def test_the_check_sees_a_word_that_is_defined_twice():
    assert twice("- **unit**: one\n- **key**: two\n- **Unit**: three\n") == ["unit"]


def test_every_word_names_a_class_or_module():
    entries = re.split(r"^(?:- |## )", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [entry.partition(":")[0] for entry in entries if entry.startswith("**") and not named(entry)] == []
