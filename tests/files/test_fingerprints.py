"""Fingerprints of model files."""

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.files.fingerprints import digest_file, fingerprint

YEAR_2000 = 946_684_800


def old_file(path, content=b"weights"):
    """A file that was not modified lately, so its digest may be remembered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (YEAR_2000, YEAR_2000))
    return path


def test_no_files_and_no_settings_have_a_fixed_fingerprint():
    assert fingerprint() == fingerprint(files=[])
    assert len(fingerprint()) == 64


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_files_digest_is_its_sha256(tmp_path, size):
    content = b"x" * size
    assert digest_file(old_file(tmp_path / "f", content), {}) == hashlib.sha256(content).hexdigest()


def test_an_unchanged_file_is_read_once(tmp_path):
    path, cache = old_file(tmp_path / "f"), {}
    digest_file(path, cache)
    assert len(cache) == 1
    cache[next(iter(cache))] = "from the cache"
    assert digest_file(path, cache) == "from the cache"


@pytest.mark.parametrize("content", [b"Weights", b"longer weights"])
def test_a_changed_file_is_read_again(tmp_path, content):
    path, cache = old_file(tmp_path / "f"), {}
    first = digest_file(path, cache)
    old_file(path, content)
    os.utime(path, (YEAR_2000 + 1, YEAR_2000 + 1))
    assert digest_file(path, cache) == hashlib.sha256(content).hexdigest() != first


def test_a_file_modified_just_now_is_not_remembered(tmp_path):
    path, cache = tmp_path / "f", {}
    path.write_bytes(b"weights")
    assert digest_file(path, cache) == hashlib.sha256(b"weights").hexdigest()
    assert cache == {}


@pytest.mark.parametrize("name", ["missing", "folder", "file/below"])
def test_what_is_no_file_is_bad_input(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(BadInput):
        digest_file(tmp_path / name, {})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput):
        fingerprint(files=[tmp_path / "missing"])


def test_a_moved_model_keeps_its_fingerprint(tmp_path):
    for folder in ("here", "there/deeper"):
        old_file(tmp_path / folder / "model" / "config.json", b"{}")
        old_file(tmp_path / folder / "model" / "sub" / "weights", b"w")
    here, there = tmp_path / "here" / "model", tmp_path / "there" / "deeper" / "model"
    assert fingerprint(files=[here]) == fingerprint(files=[there])
    assert fingerprint(files=[here / "config.json"]) == fingerprint(files=[str(there / "config.json")])


def test_names_contents_order_and_settings_all_count(tmp_path):
    a, b, renamed = old_file(tmp_path / "a", b"1"), old_file(tmp_path / "b", b"2"), old_file(tmp_path / "c", b"1")
    folder = old_file(tmp_path / "folder" / "a", b"1").parent
    deeper = old_file(tmp_path / "other" / "x" / "a", b"1").parents[1]
    asked = [
        fingerprint(files=[a, b]),
        fingerprint(files=[b, a]),
        fingerprint(files=[a]),
        fingerprint(files=[renamed]),
        fingerprint(files=[deeper]),
        fingerprint(files=[a], dtype="bf16"),
        fingerprint(files=[a], dtype="fp32"),
        fingerprint(dtype="fp32"),
        fingerprint(files=[folder, b]),
    ]
    assert len({*asked}) == len(asked) - 1
    assert asked[0] == asked[-1]  # a folder counts by what is in it, as a file of that name does


def test_what_download_tools_leave_behind_does_not_count(tmp_path):
    folder = old_file(tmp_path / "config.json").parent
    before = fingerprint(files=[folder])
    old_file(tmp_path / ".cache" / "huggingface" / "config.json.metadata")
    old_file(tmp_path / ".gitattributes")
    assert fingerprint(files=[folder]) == before


def test_settings_that_are_not_json_are_bad_input():
    with pytest.raises(BadInput):
        fingerprint(thing=object())


@given(st.dictionaries(st.text().filter(lambda name: name != "files"), st.one_of(st.none(), st.booleans(), st.integers(), st.text())))
def test_the_order_of_settings_does_not_count(settings):
    backwards = dict(reversed(settings.items()))
    assert fingerprint(**settings) == fingerprint(**backwards)


def test_fingerprinting_imports_no_torch():
    program = "import sys, cachestore.files.fingerprints as d; d.fingerprint(files=[]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_folder_without_files_and_one_that_cannot_be_listed_have_no_fingerprint(tmp_path, monkeypatch):
    (tmp_path / "model/hidden").mkdir(parents=True)
    (tmp_path / "model/.note").touch()
    with pytest.raises(BadInput):
        fingerprint(files=[tmp_path / "model"])
    (tmp_path / "model/weights").touch()
    assert len(fingerprint(files=[tmp_path / "model"])) == 64
    real = os.scandir

    def scandir(path):
        if os.path.basename(path) == "hidden":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadInput):
        fingerprint(files=[tmp_path / "model"])
