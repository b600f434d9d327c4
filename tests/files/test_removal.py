"""Removing: one regular file of ours at a time, never through a link."""

import os

import pytest

from cachestore.core.errors import FormatError, WriteFailed
from cachestore.files import removal
from cachestore.files.paths import Layout
from cachestore.files.removal import age_seconds, is_older, remove_file, remove_folder
from tests.fakes import raising


@pytest.fixture(params=[True, False], ids=["by descriptor", "by path"])
def layout(tmp_path, monkeypatch, request):
    monkeypatch.setattr(removal, "_HAS_DESCRIPTORS", removal._HAS_DESCRIPTORS and request.param)
    (tmp_path / "store" / "a" / "b").mkdir(parents=True)
    return Layout(tmp_path / "store")


def test_a_file_goes_and_its_bytes_are_reported(layout):
    path = layout.root / "a" / "b" / "file"
    path.write_bytes(b"12345")
    assert remove_file(layout, path) == 5
    assert not path.exists()


def test_what_is_gone_already_frees_nothing(layout):
    assert remove_file(layout, layout.root / "a" / "nothing") == 0
    assert remove_file(layout, layout.root / "nothing" / "at all") == 0
    assert not remove_folder(layout, layout.root / "nothing")


def test_an_empty_folder_goes_and_one_that_holds_anything_stays(layout):
    assert not remove_folder(layout, layout.root / "a")
    assert remove_folder(layout, layout.root / "a" / "b")
    assert remove_folder(layout, layout.root / "a")


@pytest.mark.parametrize(
    "make", [lambda path, target: path.symlink_to(target), lambda path, _target: os.mkfifo(path)], ids=["link", "fifo"]
)
def test_what_is_no_regular_file_is_refused_and_stays(layout, tmp_path, make):
    (tmp_path / "precious").write_text("precious")
    path = layout.root / "a" / "file"
    make(path, tmp_path / "precious")
    with pytest.raises(FormatError):
        remove_file(layout, path)
    assert path.is_symlink() or path.exists()
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_on_the_way_is_not_followed(layout, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    (layout.root / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError):
        remove_file(layout, layout.root / "link" / "file")
    with pytest.raises(FormatError):
        remove_folder(layout, layout.root / "link")
    assert (tmp_path / "elsewhere" / "file").exists()


def test_what_the_system_refuses_is_one_clean_error(layout, monkeypatch):
    path = layout.root / "a" / "file"
    path.write_text("x")
    monkeypatch.setattr(os, "unlink", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(WriteFailed) as caught:
        remove_file(layout, path)
    assert caught.value.errno == 13


def test_only_a_regular_file_has_an_age(layout):
    path = layout.root / "a" / "file"
    path.write_text("x")
    os.utime(path, (100, 100))
    assert age_seconds(path, 107.0) == 7.0
    assert age_seconds(layout.root, 107.0) is None
    assert age_seconds(layout.root / "nothing", 107.0) is None
    assert [is_older(path, seconds, now=107.0) for seconds in (6.0, 7.0)] == [True, False]
    assert not is_older(layout.root, 0.0, now=107.0)
