"""How files become visible: complete, durable, with the store's bits, or not at all."""

import errno
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError, RemoteFailed, WriteFailed
from cachestore.files import publish as publishing
from cachestore.files.checksum import digest_file, digest_of
from cachestore.files.locks import LifeLock
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout, Mode
from cachestore.files.publish import make_folder, make_root, move, note, overwrite, publish, publish_file, publish_pieces, write_outside
from tests.fakes import raising, refusing

CONTENT = [b"one ", bytearray(b"two "), memoryview(b"three")]
WHOLE = b"one two three"
SYNCED_FILE = "fsync of the temporary file"
NO_LINKS = [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL]


@pytest.fixture
def layout(tmp_path):
    """A folder that looks like a store: `tmp/` and a folder to publish in."""
    layout = Layout(tmp_path / "store")
    make_root(layout)
    make_folder(layout, layout.temporary)
    make_folder(layout, layout.recipes)
    return layout


@pytest.fixture
def final(layout):
    return layout.recipe("0" * 64)


def path_of(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def nothing_is_left(layout):
    return names_in(layout.temporary) == [] and names_in(layout.recipes) == []


@pytest.fixture
def calls(monkeypatch):
    """The calls that matter for durability, in order, with what they were made on."""
    seen = []

    def watch(name, describe):
        real = getattr(os, name)

        def watched(*arguments, **named):
            seen.append((name, describe(*arguments)))
            return real(*arguments, **named)

        monkeypatch.setattr(os, name, watched)

    def of(path):
        return Path(path).parent.name if str(path).endswith(".tmp") else Path(path).name

    watch("write", lambda descriptor, _data: of(path_of(descriptor)))
    watch("fsync", lambda descriptor: of(path_of(descriptor)))
    watch("link", lambda _source, target, **_named: of(target))
    watch("unlink", of)
    watch("chmod", lambda path, _bits: of(path))
    watch("mkdir", lambda path, _bits=None: of(path))
    return seen


def test_no_chunks_make_an_empty_file(layout, final):
    assert publish(layout, final, []) is True
    assert final.read_bytes() == b""


def test_what_is_published_is_what_was_given(layout, final):
    assert publish(layout, final, (chunk for chunk in CONTENT)) is True
    assert final.read_bytes() == WHOLE
    assert names_in(layout.temporary) == []


@given(chunks=st.lists(st.binary(max_size=50), max_size=5))
def test_any_chunks_are_published_as_given(chunks, tmp_path_factory):
    layout = Layout(tmp_path_factory.mktemp("store"))
    layout.temporary.mkdir()
    final = layout.root / "file"
    assert publish(layout, final, chunks) is True
    assert final.read_bytes() == b"".join(chunks)
    assert digest_file(final) == digest_of(chunks)


def test_what_reads_back_as_something_else_than_the_digest_is_not_published(layout, final):
    with pytest.raises(WriteFailed):
        publish(layout, final, CONTENT, digest=digest_of([b"another"]))
    assert not final.exists()
    assert publish(layout, final, CONTENT, digest=digest_of(CONTENT)) is True


@given(chunks=st.lists(st.integers(0, 25).flatmap(lambda size: st.binary(min_size=size, max_size=size)), max_size=9))
def test_blocks_are_of_one_size_but_for_the_last_and_hold_the_bytes_of_all_chunks(chunks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_BLOCK_BYTES", 8)
        blocks = [bytes(block) for block in publishing._blocks(chunks)]
    assert b"".join(blocks) == b"".join(chunks)
    assert {len(block) for block in blocks[:-1]} <= {8}
    assert all(blocks)


def test_large_and_small_chunks_are_written_in_their_order_in_blocks_that_begin_at_multiples_of_their_size(layout, final, monkeypatch):
    large, sizes = bytes(range(256)) * (5 * 4096), []
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: sizes.append(len(data)) or real(descriptor, data))
    publish(layout, final, [b"head", large, b"small", b"", large, b"tail"])
    assert final.read_bytes() == b"head" + large + b"small" + large + b"tail"
    assert {*sizes[:-1]} == {256 * 1024}


def test_a_taken_name_is_left_as_it_is(layout, final):
    publish(layout, final, [b"first"])
    assert publish(layout, final, [b"second"]) is False
    assert final.read_bytes() == b"first"
    assert names_in(layout.temporary) == []


def test_a_name_taken_by_a_link_is_left_as_it_is(layout, final):
    final.symlink_to("nothing")
    assert publish(layout, final, CONTENT) is False
    assert final.is_symlink()
    assert not (final.parent / "nothing").exists()


def test_a_link_that_was_made_although_the_answer_was_that_it_exists_counts_as_made(layout, final, monkeypatch):
    real = os.link

    def retransmitted(*arguments, **named):
        real(*arguments, **named)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", retransmitted)
    assert publish(layout, final, CONTENT) is True


def test_the_order_of_calls_is_the_one_that_survives_a_power_cut(layout, final, calls):
    publish(layout, final, [WHOLE])
    assert calls == [
        ("write", "tmp"),
        ("chmod", "tmp"),
        ("fsync", "tmp"),
        ("link", final.name),
        ("unlink", "tmp"),
        ("fsync", "recipes"),
        ("unlink", "tmp"),
    ]


def test_a_taken_name_is_made_durable_too(layout, final, calls):
    publish(layout, final, CONTENT)
    calls.clear()
    publish(layout, final, CONTENT)
    assert ("fsync", "recipes") in calls


def test_short_writes_are_put_together(layout, final, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:2]))
    publish(layout, final, CONTENT)
    assert final.read_bytes() == WHOLE


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("call", ["write", "fsync", "link", "open", "chmod"])
def test_a_refused_call_is_a_write_failed_that_leaves_nothing(layout, final, monkeypatch, call, code):
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing(code))
        with pytest.raises(WriteFailed) as caught:
            publish(layout, final, CONTENT)
    if (call, code) != ("link", errno.EPERM):
        assert caught.value.errno == code
    assert str(final) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert nothing_is_left(layout)
    assert publish(layout, final, CONTENT) is True


def test_missing_folders_are_made(layout):
    layout.temporary.rmdir()
    path = layout.segments / "ab" / "file"
    assert publish(layout, path, CONTENT) is True
    assert path.read_bytes() == b"".join(CONTENT)
    assert names_in(layout.temporary) == []


def test_a_failed_sync_is_not_tried_again_on_the_same_file(layout, final, monkeypatch):
    synced = []

    def fail(descriptor):
        synced.append(path_of(descriptor))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    for _attempt in range(2):
        with pytest.raises(WriteFailed):
            publish(layout, final, CONTENT)
    assert len(synced) == len(set(synced)) == 2


def test_a_failed_sync_of_the_folder_is_not_acknowledged(layout, final, monkeypatch):
    real = os.fsync

    def fail(descriptor):
        if path_of(descriptor).is_dir():
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteFailed):
        publish(layout, final, CONTENT)
    assert names_in(layout.temporary) == []


def test_an_interrupt_leaves_no_temporary_file(layout, final, monkeypatch):
    monkeypatch.setattr(os, "fsync", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        publish(layout, final, CONTENT)
    assert nothing_is_left(layout)


@pytest.mark.parametrize("damage", [lambda data: bytes(reversed(data)), lambda data: bytes(data[:-1]) + b"?"], ids=["order", "last byte"])
def test_bytes_that_read_back_differently_are_not_published(layout, final, monkeypatch, damage):
    real = os.write

    def bad_memory(descriptor, data):
        real(descriptor, damage(data))
        return len(data)

    monkeypatch.setattr(os, "write", bad_memory)
    with pytest.raises(WriteFailed):
        publish(layout, final, CONTENT)
    assert nothing_is_left(layout)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def bits(path):
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("mode", Mode)
def test_permission_bits_come_from_the_store_and_not_from_the_umask(tmp_path, mode, umask):
    layout = Layout(tmp_path / "a" / "store", mode)
    folder = layout.plans / "p" / "0"
    make_root(layout)
    make_folder(layout, layout.temporary)
    make_folder(layout, folder)
    publish(layout, folder / "small", CONTENT)
    publish(layout, folder / "segment", CONTENT, read_only=True)
    note(layout, folder / "note", b"x")
    overwrite(layout, folder / "heartbeat", b"x")
    built = layout.new_temporary()
    built.write_bytes(b"x")
    publish_file(layout, built, folder / "index")
    assert {bits(path) for path in (layout.root, layout.plans, folder.parent, folder)} == {mode.folder_bits}
    assert {bits(folder / name) for name in ("small", "note", "heartbeat")} == {mode.file_bits}
    assert {bits(folder / name) for name in ("segment", "index")} == {0o444}


class TestWithoutLinks:
    """File systems that know no hard links: check, then rename, with a claim on the name."""

    @pytest.fixture(params=["no os.link", *NO_LINKS], autouse=True)
    def no_links(self, request, monkeypatch):
        if isinstance(request.param, str):
            monkeypatch.delattr(os, "link")
        else:
            monkeypatch.setattr(os, "link", refusing(request.param))

    def test_what_is_published_is_what_was_given(self, layout, final):
        assert publish(layout, final, CONTENT) is True
        assert final.read_bytes() == WHOLE
        assert names_in(layout.temporary) == []

    def test_a_taken_name_is_left_as_it_is(self, layout, final):
        publish(layout, final, [b"first"])
        assert publish(layout, final, [b"second"]) is False
        assert final.read_bytes() == b"first"
        assert names_in(layout.temporary) == []

    def test_a_lock_that_is_not_free_is_passed_over(self, layout, final):
        layout.lock("rename").parent.mkdir()
        with LifeLock(layout.lock("rename")):
            assert publish(layout, final, CONTENT) is True

    def test_of_two_that_publish_at_once_one_wins_and_its_file_stays(self, layout, final, monkeypatch):
        """Each is stopped between its look and its rename, for longer than the other waits."""
        monkeypatch.setattr(publishing, "_CLAIM_SECONDS", 0.05)
        monkeypatch.setattr(publishing, "_CLAIM_PAUSE", 0.01)
        other: list[object] = []

        def rename_late(temporary, target):
            if not other:
                other.append(None)
                with pytest.raises(WriteFailed, match="if none is at work any more") as caught:
                    publish(layout, final, [b"other"])
                other.append(caught.value)
            return renamed(temporary, target)

        renamed = publishing.in_use.rename
        monkeypatch.setattr(publishing.in_use, "rename", rename_late)
        assert publish(layout, final, CONTENT) is True
        assert len(other) == 2
        assert publish(layout, final, [b"other"]) is False
        assert final.read_bytes() == WHOLE
        assert names_in(layout.temporary) == []

    def test_many_threads_that_publish_one_name_make_one_file(self, layout, final):
        won: list[bytes] = []

        def work(number):
            text = b"%d" % number
            if publish(layout, final, [text]):
                won.append(text)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert won == [final.read_bytes()]
        assert names_in(layout.temporary) == []

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux proves that another process has ended")
    @pytest.mark.parametrize("is_there", [False, True])
    def test_what_a_killed_process_claimed_is_free_for_the_next(self, layout, final, is_there, monkeypatch):
        renamed = publishing.in_use.rename

        def rename_and_die(temporary, target):
            if is_there:
                renamed(temporary, target)
            os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            monkeypatch.setattr(publishing.in_use, "rename", rename_and_die)
            publish(layout, final, [b"killed"])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert final.exists() is is_there
        assert publish(layout, final, CONTENT) is not is_there
        assert final.read_bytes() == (b"killed" if is_there else WHOLE)

    def test_a_claim_without_proof_of_death_ends_the_call_and_is_named(self, layout, final, monkeypatch):
        monkeypatch.setattr(publishing, "_CLAIM_SECONDS", 0.05)
        publish(layout, final.with_name("other"), CONTENT)
        claim = layout.new_temporary(digest_of([str(final.relative_to(layout.root)).encode()]))
        for mark in (b"", b"another-boot pid:[1] 1 1", b"7"):
            claim.write_bytes(mark)
            with pytest.raises(WriteFailed, match=claim.name):
                publish(layout, final, CONTENT)
            assert claim.read_bytes() == mark
            assert not final.exists()
        claim.unlink()
        assert publish(layout, final, CONTENT) is True

    def test_a_file_moves(self, layout, final):
        publish(layout, final, CONTENT)
        move(layout, final, layout.root / "moved")
        assert (layout.root / "moved").read_bytes() == WHOLE
        assert names_in(layout.recipes) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_is_fine(layout, final, monkeypatch, code):
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: refusing(code)() if path_of(descriptor).is_dir() else real(descriptor))
    assert publish(layout, final, CONTENT) is True


def test_a_system_that_opens_no_folders_is_fine(layout, final, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECTORY")
    assert publish(layout, final, CONTENT) is True
    make_folder(layout, layout.workers)


def test_a_folder_above_the_store_that_may_not_be_listed_is_not_synced(layout, monkeypatch):
    monkeypatch.setattr(publishing, "_durable", set())
    really, refuse = os.open, refusing(errno.EACCES)
    monkeypatch.setattr(os, "open", lambda path, *rest, **named: (refuse if path == layout.root.parent else really)(path, *rest, **named))
    make_folder(layout, layout.plans)
    assert layout.plans.is_dir()


def test_nothing_is_acknowledged_in_a_folder_of_the_store_that_may_not_be_listed(layout, final, monkeypatch):
    monkeypatch.setattr(publishing, "_durable", set())
    really, refuse = os.open, refusing(errno.EACCES)
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest, **named: (refuse if flags & os.O_DIRECTORY else really)(path, flags, *rest, **named)
    )
    with pytest.raises(WriteFailed):
        publish(layout, final, CONTENT)
    with pytest.raises(WriteFailed):
        make_folder(layout, layout.plans)


class TestFolders:
    def test_one_that_exists_is_fine(self, layout):
        make_folder(layout, layout.recipes)
        make_folder(layout, layout.recipes)
        assert layout.recipes.is_dir()

    def test_each_new_one_is_synced_in_its_parent_before_the_next_is_made(self, layout, calls):
        make_folder(layout, layout.plans / "p")
        assert calls == [("mkdir", "plans"), ("chmod", "plans"), ("fsync", "store"), ("mkdir", "p"), ("chmod", "p"), ("fsync", "plans")]

    def test_one_made_by_a_process_that_died_before_syncing_it_is_synced(self, layout, calls):
        (layout.plans / "p").mkdir(parents=True)
        calls.clear()
        make_folder(layout, layout.plans / "p")
        assert calls == [("fsync", "store"), ("fsync", "plans")]
        calls.clear()
        make_folder(layout, layout.plans / "p")
        assert calls == []

    def test_one_that_somebody_makes_at_the_same_time_is_fine(self, layout, monkeypatch):
        real = Path.mkdir

        def slower(path, *arguments, **named):
            real(path)
            return real(path, *arguments, **named)

        monkeypatch.setattr(Path, "mkdir", slower)
        make_folder(layout, layout.plans / "p")
        assert (layout.plans / "p").is_dir()

    def test_a_file_in_its_place_is_a_write_failed(self, layout):
        layout.plans.write_bytes(b"")
        with pytest.raises(WriteFailed):
            make_folder(layout, layout.plans)

    @pytest.mark.parametrize("call", ["mkdir", "chmod", "open", "fsync"])
    def test_a_refused_call_is_a_write_failed_that_names_the_folder(self, layout, monkeypatch, call):
        monkeypatch.setattr(os, call, refusing(errno.ENOSPC))
        with pytest.raises(WriteFailed) as caught:
            make_folder(layout, layout.plans)
        assert caught.value.errno == errno.ENOSPC


class TestBuiltFiles:
    def build(self, layout):
        built = layout.new_temporary()
        built.write_bytes(WHOLE)
        return built

    def test_it_is_published_and_its_temporary_name_is_gone(self, layout, final):
        assert publish_file(layout, self.build(layout), final) is True
        assert final.read_bytes() == WHOLE
        assert names_in(layout.temporary) == []

    def test_a_taken_name_is_left_as_it_is(self, layout, final):
        publish(layout, final, [b"first"])
        assert publish_file(layout, self.build(layout), final) is False
        assert final.read_bytes() == b"first"
        assert names_in(layout.temporary) == []

    def test_it_is_synced_before_it_is_published(self, layout, final, calls):
        built = self.build(layout)
        calls.clear()
        publish_file(layout, built, final)
        assert calls[:3] == [("chmod", "tmp"), ("fsync", "tmp"), ("link", final.name)]

    @pytest.mark.parametrize("call", ["fsync", "link", "chmod", "open"])
    def test_a_refused_call_is_a_write_failed_that_leaves_nothing(self, layout, final, monkeypatch, call):
        built = self.build(layout)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(errno.EIO))
            with pytest.raises(WriteFailed):
                publish_file(layout, built, final)
        assert nothing_is_left(layout)


class TestNotes:
    def test_one_is_made_once(self, layout, final):
        assert note(layout, final, b"first") is True
        assert note(layout, final, b"second") is False
        assert final.read_bytes() == b"first"
        assert names_in(layout.temporary) == []

    def test_one_costs_no_sync(self, layout, final, calls):
        note(layout, final, b"x")
        assert "fsync" not in [name for name, _path in calls]

    @pytest.mark.parametrize("call", ["write", "link", "chmod", "open"])
    def test_a_refused_call_is_a_write_failed_that_leaves_nothing(self, layout, final, monkeypatch, call):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(errno.ENOSPC))
            with pytest.raises(WriteFailed):
                note(layout, final, b"x")
        assert nothing_is_left(layout)


class TestHeartbeats:
    def test_a_newer_one_replaces_an_older_one(self, layout, final):
        overwrite(layout, final, b"first")
        overwrite(layout, final, b"second")
        assert final.read_bytes() == b"second"
        assert names_in(layout.temporary) == []

    def test_a_link_is_replaced_and_not_written_through(self, layout, final, tmp_path):
        target = tmp_path / "target"
        target.write_bytes(b"precious")
        final.symlink_to(target)
        overwrite(layout, final, b"x")
        assert target.read_bytes() == b"precious"
        assert final.read_bytes() == b"x"

    @pytest.mark.parametrize("call", ["write", "replace", "chmod", "open"])
    def test_a_refused_call_is_a_write_failed_that_keeps_the_older_one(self, layout, final, monkeypatch, call):
        overwrite(layout, final, b"first")
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(errno.ENOSPC))
            with pytest.raises(WriteFailed):
                overwrite(layout, final, b"second")
        assert final.read_bytes() == b"first"
        assert names_in(layout.temporary) == []


class TestMoving:
    def test_a_file_gets_its_new_name_and_loses_the_old_one(self, layout, final):
        publish(layout, final, CONTENT)
        move(layout, final, layout.root / "moved")
        assert (layout.root / "moved").read_bytes() == WHOLE
        assert not final.exists()

    def test_the_new_name_is_durable_before_the_old_one_goes(self, layout, final, calls):
        publish(layout, final, CONTENT)
        calls.clear()
        move(layout, final, layout.workers.parent / "moved")
        assert calls == [("link", "moved"), ("fsync", "store"), ("unlink", final.name), ("fsync", "recipes")]

    def test_a_taken_name_is_left_and_nothing_is_lost(self, layout, final):
        publish(layout, final, CONTENT)
        (layout.root / "moved").write_bytes(b"first")
        move(layout, final, layout.root / "moved")
        assert (layout.root / "moved").read_bytes() == b"first"
        assert final.read_bytes() == WHOLE

    def test_a_link_moves_as_a_link(self, layout, final, tmp_path):
        (tmp_path / "target").write_bytes(b"precious")
        final.symlink_to(tmp_path / "target")
        move(layout, final, layout.root / "moved")
        assert (layout.root / "moved").is_symlink()
        assert not final.is_symlink()

    def test_a_folder_moves(self, layout, final):
        final.mkdir()
        move(layout, final, layout.root / "moved")
        assert (layout.root / "moved").is_dir()
        assert not final.exists()

    @pytest.mark.parametrize("call", ["link", "unlink", "fsync"])
    def test_a_refused_call_is_a_write_failed_that_keeps_the_file(self, layout, final, monkeypatch, call):
        publish(layout, final, CONTENT)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(errno.EIO))
            with pytest.raises(WriteFailed):
                move(layout, final, layout.root / "moved")
        assert final.read_bytes() == WHOLE


def test_a_file_outside_of_a_store_takes_the_place_of_what_stood_there(tmp_path):
    write_outside(tmp_path / "new folder" / "page.html", b"one")
    write_outside(tmp_path / "new folder" / "page.html", b"two")
    assert (tmp_path / "new folder" / "page.html").read_bytes() == b"two"
    assert names_in(tmp_path / "new folder") == ["page.html"]


def test_a_file_that_cannot_be_written_outside_leaves_what_stood_there(tmp_path, monkeypatch):
    write_outside(tmp_path / "page.html", b"one")
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(WriteFailed):
        write_outside(tmp_path / "page.html", b"two")
    assert (tmp_path / "page.html").read_bytes() == b"one"
    assert names_in(tmp_path) == ["page.html"]


def test_pieces_become_a_read_only_file_of_their_digest(layout):
    pieces = [b"one", b"", b"two"]
    final = layout.segment(digest_of(pieces))
    make_folder(layout, layout.temporary, final.parent)
    assert publish_pieces(layout, final, iter(pieces), digest=digest_of(pieces)) is True
    assert publish_pieces(layout, final, iter(pieces), digest=digest_of(pieces)) is False
    assert final.read_bytes() == b"onetwo"
    assert final.stat().st_mode & 0o777 == 0o444


def test_pieces_of_another_digest_are_not_published(layout):
    final = layout.segment(digest_of([b"one"]))
    make_folder(layout, layout.temporary, final.parent)
    with pytest.raises(FormatError):
        publish_pieces(layout, final, iter([b"two"]), digest=digest_of([b"one"]))
    assert os.listdir(final.parent) == os.listdir(layout.temporary) == []


def test_what_the_pieces_raise_is_raised_and_nothing_is_left(layout):
    final = layout.segment(digest_of([b"one"]))
    make_folder(layout, layout.temporary, final.parent)

    def pieces():
        yield b"o"
        raise RemoteFailed("no answer")

    with pytest.raises(RemoteFailed):
        publish_pieces(layout, final, pieces(), digest=digest_of([b"one"]))
    assert os.listdir(final.parent) == os.listdir(layout.temporary) == []
