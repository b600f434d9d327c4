"""Two users of a group share a store: each goes on where the other one stopped, was killed, or left something to remove."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.files.paths import Layout, Mode
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.store.read.snapshot import list_segments, open_layout
from tests import fakes
from tests.shares import share

GROUP, A, B, STRANGER = 52_001, 52_101, 52_102, 52_103

pytestmark = pytest.mark.processes


def as_user(uid, act, *, umask=0o002, groups=(GROUP,)):
    """Do something in a child that is another user, with a group of their own and perhaps the shared one.

    Returns what it returned, how it failed, or the signal that killed it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.umask(umask)
            os.setgroups([uid, *groups])
            os.setgid(uid)
            os.setuid(uid)
            answer = act()
        except BaseException as error:  # noqa: BLE001 - the boundary of a process: what went wrong is told to the test
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(answer) if code == 0 else signal.Signals(-code).name


@pytest.fixture(autouse=True)
def all_imported(tmp_path, makers, monkeypatch):
    """The other users may not be able to enter Python's own folder, so nothing is left to be imported by them."""
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    monkeypatch.setattr("cachestore.encode.models.hub._cached", lambda _name, _revision: None)
    fakes.warm_up()
    fakes.numbered_pictures(tmp_path / "data", 2)
    assert precompute(tmp_path, makers)() == [True, 3]
    store = tmp_path / "store"
    damage(next(store.glob("segments/*/*")))
    command("verify", store)()
    next((tmp_path / "data").glob("*.png")).unlink()
    for words in (["status"], ["repair"], ["repair", "--refill"], ["compact"], ["gc", "--apply", "--grace", 0], ["drop", "train"]):
        command(words[0], store, *words[1:])()
    makers.encoded()


@pytest.fixture
def folder(tmp_path_factory, makers):
    """A setgid folder of the group, with 12 pictures."""
    folder = tmp_path_factory.mktemp("group")
    for path in folder.parents:
        with suppress(OSError):
            if not path.stat().st_mode & 0o001 and path != Path("/"):
                path.chmod(path.stat().st_mode | 0o011)
    fakes.numbered_pictures(folder / "data", 12)
    os.chown(folder, A, GROUP)
    folder.chmod(0o2775)
    makers.options["limit"] = 2
    return folder


@pytest.fixture
def root(folder):
    return folder / "store"


def precompute(folder, makers, said=None, *, dies_at=None, **options):
    """A run in this process, which kills itself when it has encoded so many batches."""

    def act():
        def before_encode(_items):
            if dies_at is not None and sum(len(encoder.batches) for encoder in makers.made) > dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        makers.options["before_encode"] = before_encode
        say = (lambda _line: None) if said is None else said.append
        report = precompute_here(PrecomputeRequest(str(folder / "data"), "model", str(folder / "store"), workers=1, **options), say=say)
        return [report.complete, report.encoded, *(line for line in said or () if "shared" in line)]

    return act


def command(*arguments):
    def act():
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([str(one) for one in arguments])
        return code if code == OK else f"{code}: {out.getvalue()} {err.getvalue()}"

    return act


def damage(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    path.chmod(0o444)


def check_bits(root):
    for path in root.rglob("*"):
        status = path.stat()
        assert status.st_gid == GROUP, path
        assert status.st_mode & 0o7777 in ({0o2775} if path.is_dir() else {0o664, 0o444}), path


def test_each_of_two_users_goes_on_where_the_other_was_killed(folder, root, makers):
    assert as_user(A, precompute(folder, makers, dies_at=3)) == "SIGKILL"
    assert open_layout(Layout(root)).mode is Mode.GROUP
    check_bits(root)
    assert as_user(B, command("status", root)) == OK
    assert as_user(B, precompute(folder, makers)) == [True, 13]
    for n in range(90, 98):
        (folder / "data" / f"{n}.png").write_bytes(b"picture %d" % n)
        os.utime(folder / "data" / f"{n}.png", (n, n))
    assert as_user(B, precompute(folder, makers, dies_at=2)) == "SIGKILL"
    assert as_user(A, precompute(folder, makers)) == [True, 8]
    assert as_user(B, precompute(folder, makers)) == [True, 0]
    assert as_user(B, command("verify", root)) == OK
    check_bits(root)


def test_each_removes_and_repairs_what_the_other_made(folder, root, makers):
    assert as_user(A, precompute(folder, makers)) == [True, 13]
    for digest in list_segments(Layout(root)):
        damage(Layout(root).segment(digest))
    assert as_user(B, command("repair", root)).startswith("4: "), "some entries are lost"
    assert as_user(B, command("repair", root, "--refill")) == OK
    next((folder / "data").glob("*.png")).unlink()
    assert as_user(A, precompute(folder, makers))[0] is True
    for user in (B, A):
        assert as_user(user, command("gc", root, "--apply", "--grace", 0, "--keep", 1)) == OK
    assert as_user(B, command("compact", root)) == OK
    assert as_user(A, command("drop", root, "train")) == OK
    for user in (B, A):
        assert as_user(user, command("gc", root, "--apply", "--grace", 0)) == OK
    assert not list_segments(Layout(root))
    check_bits(root)


def test_a_stranger_reads_and_writes_nothing(folder, root, makers):
    assert as_user(A, precompute(folder, makers)) == [True, 13]
    assert as_user(STRANGER, command("verify", root), groups=()) == OK
    assert as_user(STRANGER, precompute(folder, makers, resolution=512), groups=()).startswith("WriteFailed")


@pytest.mark.parametrize(
    "case",
    share(
        [
            (0o002, 0o2775, None, "group"),
            (0o007, 0o2770, None, "group"),
            (0o022, 0o2775, None, "private"),
            (0o002, 0o775, None, "private"),
            (0o022, 0o2775, "group", "group"),
            (0o002, 0o2775, "private", "private"),
        ],
        2,
    ),
)
def test_a_new_store_takes_over_who_may_write_it_unless_that_is_asked_for(folder, root, makers, case):
    umask, bits, asked, found = case
    folder.chmod(bits)
    said = []
    answer = as_user(A, precompute(folder, makers, said, access=asked), umask=umask)
    assert answer[:2] == [True, 13]
    assert len(answer) == 2 + (found == "group"), "a line tells of it"
    assert open_layout(Layout(root)).mode.value == found
    is_done = as_user(B, precompute(folder, makers, resolution=512, replace=True), umask=umask)
    assert (is_done[0] is True) == (found == "group"), is_done


def test_a_folder_that_another_user_has_made_must_let_the_group_write(folder, root, makers):
    root.mkdir()
    os.chown(root, A, GROUP)
    root.chmod(0o2755)
    assert as_user(B, precompute(folder, makers, access="group")).startswith("WriteFailed")
    root.chmod(0o777)  # what B makes would not be the group's
    refused = as_user(B, precompute(folder, makers, access="group"))
    assert refused.startswith("WriteFailed")
    assert f"chmod g+rwxs {root}" in refused
    root.chmod(0o2775)
    assert as_user(B, precompute(folder, makers, access="group"))[0] is True
    assert as_user(A, precompute(folder, makers)) == [True, 0]


def test_a_folder_whose_bits_a_killed_process_did_not_set_is_opened_by_its_owner(folder, root, makers):
    assert as_user(A, precompute(folder, makers)) == [True, 13]
    for path in (root / "segments").iterdir():
        path.chmod(0o755)
    assert as_user(A, precompute(folder, makers, resolution=512, replace=True))[0] is True
    assert as_user(A, command("gc", root, "--apply", "--grace", 0)) == OK


@pytest.mark.slow
def test_the_command_itself_is_gone_on_with_by_the_other_user(folder, root):
    """With the right to read what others may not, as Python itself may be in a folder of root's; it gives no right to write."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    asked = [sys.executable, "-m", "cachestore", "precompute", folder / "data", "--model", "model", "--store", root, "--json"]
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    own = {**os.environ, "PYTHONPATH": fakes.PATHS, "PYTHONDONTWRITEBYTECODE": "1", "FAKE_ENCODERS": "1", "HOME": str(folder)}

    def ended(user, *more):
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={GROUP}", *reading, "--"]
        return subprocess.run([*become, *asked, *more], capture_output=True, text=True, check=False, env=own, umask=0o002)

    first = ended(A)
    assert json.loads(first.stdout)["encoded"] == 13, first.stderr
    assert "is shared with the group" in first.stderr
    second = ended(B, "--resolution", "512", "--replace")
    assert json.loads(second.stdout)["encoded"] == 12, second.stderr
    assert cs.verify(root).ok
