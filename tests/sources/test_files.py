"""Files behind references."""

import os

import pytest

from cachestore.core.inputs import NO_STAT
from cachestore.files.stat_record import stat_of
from cachestore.sources.files import IMAGE_SUFFIXES, TEXT_SUFFIXES, UNREAD_SUFFIXES, VIDEO_SUFFIXES, Routed, SourceFiles
from cachestore.sources.folders import list_source
from tests.sources.sources import folder, listed


def test_a_file_comes_with_its_stat_record(tmp_path):
    folder(tmp_path, {"a.png": "bytes"})
    os.utime(tmp_path / "a.png", ns=(5, 1_000_000_007))
    assert listed(tmp_path).read("a.png") == (b"bytes", stat_of((tmp_path / "a.png").stat()))


def test_the_time_of_a_file_that_was_modified_just_now_is_not_trusted(tmp_path):
    folder(tmp_path, {"a.png": "bytes"})
    assert listed(tmp_path).read("a.png") == (b"bytes", NO_STAT)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    folder(tmp_path, {"a.png": "bytes"})
    listing = listed(tmp_path)
    really, seen = os.fstat, []

    def fstat(descriptor):
        seen.append(descriptor)
        if len(seen) == 3:  # after it was seen to be a regular file, and looked at before it is read
            os.utime(tmp_path / "a.png", ns=(7, 7))
        return really(descriptor)

    monkeypatch.setattr("cachestore.sources.files.os.fstat", fstat)
    with pytest.raises(OSError):
        listing.read("a.png")


def test_a_file_is_read_in_parts(tmp_path):
    folder(tmp_path, {"a.png": "0123456789"})
    with listed(tmp_path).open("a.png") as (file, _stat):
        assert file.read(4) == b"0123"


def test_references_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    folder(tmp_path / "data", {"a.png": "bytes"})
    monkeypatch.chdir(tmp_path)
    listing = listed("data")
    monkeypatch.chdir("/")
    assert listing.read("a.png")[0] == b"bytes"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_that_a_manifest_names_cannot_be_read_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "m.jsonl").write_text('{"image": "x.png", "caption": "a"}\n')
    listing = list_source(tmp_path / "m.jsonl")
    with pytest.raises(OSError):
        listing.read("x.png")
    with pytest.raises(OSError), listing.open("x.png"):
        pass


def test_each_holder_is_asked_for_what_is_its_own(tmp_path):
    def route(reference: str) -> tuple[SourceFiles, str]:
        label, _slash, own = reference.partition("/")
        return holders[label], own

    holders = {label: listed(folder(tmp_path / label, {"x.png": label})) for label in ("a", "b")}
    together = Routed(route)
    assert [together.read(f"{label}/x.png")[0] for label in "ab"] == [b"a", b"b"]
    with together.open("b/x.png") as (file, _stat):
        assert file.read() == b"b"
    assert together.stat("a/gone.png") is None


def test_every_ending_of_a_picture_is_one_that_pillow_decodes_as_a_format_that_is_opened():
    from PIL import Image

    from cachestore.encode.pictures.images import FORMATS

    Image.init()
    opened = {suffix for suffix, form in Image.registered_extensions().items() if form in FORMATS}
    others = {".pfm"}  # floating-point pictures are refused
    assert opened - others <= IMAGE_SUFFIXES
    assert IMAGE_SUFFIXES - opened <= {".jif", ".mpo", ".heic", ".heif", ".hif", ".jxl"}


def test_no_ending_has_two_meanings():
    kinds = (IMAGE_SUFFIXES, VIDEO_SUFFIXES, UNREAD_SUFFIXES, TEXT_SUFFIXES)
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
