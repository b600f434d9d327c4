import errno
import json
import os
import tempfile
import threading

import pytest

from cachestore.core.errors import BadInput, WriteFailed
from cachestore.remote.client import PIECE_BYTES
from cachestore.remote.transfer import (
    FileRef,
    Mover,
    TransferReport,
    TransferRequest,
    UploadedFile,
    requests_down,
    requests_up,
    working_folder,
)


def test_every_item_is_done_by_no_more_threads_than_jobs():
    lock, running, most, done = threading.Lock(), [0], [0], []
    meeting = threading.Barrier(3)

    def act(item):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        meeting.wait(10)
        with lock:
            running[0] -= 1
        done.append(item)

    Mover(3, 0, None).each("moving", range(9), act)
    assert sorted(done) == list(range(9))
    assert most[0] == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cachestore-transfer")]


def test_one_failure_stops_the_others_and_is_raised():
    failing, begun = threading.Event(), []
    mover = Mover(2, 0, None)

    def act(item):
        begun.append(item)
        if item == 0:
            failing.set()
            raise BadInput("no")
        assert failing.wait(10)
        while True:
            mover.go_on()

    with pytest.raises(BadInput, match="no"):
        mover.each("moving", range(100), act)
    assert len(begun) <= 3


def test_nothing_to_move_is_fine():
    shown = []
    Mover(2, 0, lambda *given: shown.append(given)).each("moving", [], lambda item: item)
    assert shown == [("moving", 0, 0)]


def test_a_file_that_is_read_again_counts_once(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    mover = Mover(1, 10, None)
    with (tmp_path / "file").open("rb") as file:
        uploaded = UploadedFile(file.fileno(), mover)
        assert uploaded.read(4) == b"0123"
        assert uploaded.seek(0) == 0
        assert (uploaded.read(), uploaded.read(5)) == (b"0123456789", b"")
    assert mover.bytes == 10


@pytest.mark.parametrize(("size", "up", "down"), [(0, 1, 1), (PIECE_BYTES, 1, 1), (PIECE_BYTES + 1, 4, 2)])
def test_requests_follow_from_the_size(size, up, down):
    assert (requests_up(FileRef("x", size)), requests_down(FileRef("x", size))) == (up, down)


@pytest.mark.parametrize(
    "given", [{"generation": 1}, {"name": "train", "generation": 0}, {"jobs": 0}, {"name": 3}, {"check": "no"}, {"on_progress": 3}]
)
def test_arguments_are_checked(given):
    arguments = {"name": None, "generation": None, "jobs": 8, "check": False, "dry_run": False, "on_progress": None} | given
    with pytest.raises(BadInput):
        TransferRequest.checked(arguments.pop("name"), arguments.pop("generation"), arguments.pop("jobs"), **arguments)


def test_a_report_reads_as_one_line_and_as_json():
    report = TransferReport("store", "s3://bucket", {"train": (1,)}, 2, 3)
    assert repr(report).startswith("TransferReport(store='store', address='s3://bucket'")
    printed = json.loads(json.dumps(report.as_json()))
    assert printed["generations"] == {"train": [1]}
    assert TransferReport.from_json(printed) == report


@pytest.fixture
def above(tmp_path, monkeypatch):
    """A folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_full_disk_for_temporary_files_is_named_with_what_helps(above, monkeypatch):
    with (
        pytest.raises(WriteFailed, match=r"cannot write .+: No space left on device; make room there, or set TMPDIR") as said,
        working_folder(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert said.value.errno == errno.ENOSPC
    with pytest.raises(BadInput), working_folder():
        raise BadInput("as it is")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(WriteFailed, match="set TMPDIR"), working_folder():
        pass
