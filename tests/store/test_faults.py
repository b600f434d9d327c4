"""The n-th call of the file system fails, for every n: SQLite's method.

Whatever is refused, once or from then on, the caller gets one clean error, what was acknowledged stays, nothing wrong becomes
visible, and the same work done again goes through.
"""

import errno
import os
import shutil
from contextlib import closing

import pytest

from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.errors import ReadFailed, WriteFailed
from cachestore.core.keys import Recipe
from cachestore.files import publish as publishing
from cachestore.files.opening import names_in
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.format.findings import HARMLESS
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.append import Appender
from cachestore.store.write.commit import commit, create_store, publish_recipe
from tests.fakes import publish_catalog
from tests.store.stores import flip, key_of, put, read, tensors_of

CALLS = ("open", "write", "fsync", "link", "chmod", "mkdir", "unlink")
RECIPE = Recipe("own", {})


class Faults:
    """Makes the n-th of all watched calls fail, and those after it where it is sticky. Reading is not watched."""

    def __init__(self, patch, nth, code, *, sticky):
        self.count, self.nth, self.code, self.sticky = 0, nth, code, sticky
        for name in CALLS:
            patch.setattr(os, name, self.watched(getattr(os, name), name))

    def watched(self, real, name):
        def call(*arguments, **named):
            if name != "open" or arguments[1] & (os.O_CREAT | os.O_DIRECTORY):
                self.count += 1
                if self.count == self.nth or (self.sticky and self.count > self.nth):
                    raise OSError(self.code, os.strerror(self.code))
            return real(*arguments, **named)

        return call

    @property
    def struck(self):
        return self.count >= self.nth


def refusal(action, *arguments) -> ReadFailed | WriteFailed | None:
    """The one error that an action may end with; ReadFailed where the look whether the store is still there was refused."""
    try:
        action(*arguments)
    except (ReadFailed, WriteFailed) as error:
        return error
    return None


def write(root, acknowledged):
    """A little of everything that is written; says which entries were acknowledged."""
    layout = create_store(root)
    publish_recipe(layout, RECIPE)
    appender = Appender(layout)
    for n in (1, 2):
        appender.put(key_of(n), tensors_of(n), {"n": n})
        appender.close_segment()
        acknowledged.add(n)
        commit(layout).close()
    column = make_column("own", "caption", RECIPE.fingerprint, {}, [[Cell(key_of(1))]])
    publish_catalog(layout, Catalog("train", {}, {RECIPE.fingerprint: RECIPE}, ["a"], [0, 0], [], {}, ["{}"], (column,)))


@pytest.fixture(autouse=True)
def _each_run_is_a_new_process(monkeypatch):
    """Which folders were synced is remembered for a process's life."""
    monkeypatch.setattr(publishing, "_durable", set())


def each_call(*ways):
    """Ways to refuse calls, with numbers of calls: each call in one of the ways, and each in all of them as `slow`."""
    words = {way: f"{errno.errorcode[way[0]]} {'from then on' if way[1] else 'once'}" for way in ways}
    one = [pytest.param(*way, range(first, 1000, len(ways)), id=words[way]) for first, way in enumerate(ways, 1)]
    return [*one, *(pytest.param(*way, range(1, 1000), id=f"{words[way]}, each call", marks=pytest.mark.slow) for way in ways)]


@pytest.mark.parametrize(
    ("code", "sticky", "numbers"), each_call((errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False), (errno.EIO, True))
)
def test_a_refused_call_while_writing_is_one_clean_error_and_loses_nothing(tmp_path, monkeypatch, code, sticky, numbers):
    for nth in numbers:
        root, acknowledged = tmp_path / str(nth), set()
        publishing._durable.clear()
        with monkeypatch.context() as patch:
            faults = Faults(patch, nth, code, sticky=sticky)
            error = refusal(write, root, acknowledged)
        assert error is None or (error.errno == code and str(tmp_path) in str(error))
        if (root / "cachestore.json").exists():
            assert {finding.kind for finding in verify(root).findings} <= HARMLESS
            layout = create_store(root)
            assert all(read(layout, n) == tensors_of(n) for n in acknowledged)
            assert sticky or len(names_in(layout.temporary)) <= 1
        else:
            assert acknowledged == set()
        write(root, acknowledged)
        assert verify(root).ok
        if not faults.struck:
            assert nth > 40
            return
    pytest.fail("it never ends")


@pytest.mark.parametrize(("code", "sticky", "numbers"), each_call((errno.ENOSPC, False), (errno.ENOSPC, True)))
def test_a_refused_call_while_repairing_is_one_clean_error_and_loses_no_valid_entry(tmp_path, monkeypatch, code, sticky, numbers):
    template = create_store(tmp_path / "template")
    put(template, 1, 2, 3)
    commit(template).close()
    with closing(load_snapshot(template)) as snapshot:
        [[location]] = snapshot.find([key_of(2)])
    flip(template.segment(location.segment.digest), location.offset)
    for nth in numbers:
        root = tmp_path / str(nth)
        shutil.copytree(template.root, root)
        publishing._durable.clear()
        layout = create_store(root)
        with monkeypatch.context() as patch:
            faults = Faults(patch, nth, code, sticky=sticky)
            error = refusal(repair, root)
        assert error is None or error.errno == code
        assert [read(layout, n) for n in (1, 3)] == [tensors_of(1), tensors_of(3)]
        repair(root)
        assert [read(layout, n) for n in (1, 3)] == [tensors_of(1), tensors_of(3)]
        left = [finding for finding in verify(root).findings if finding.kind not in HARMLESS]
        assert {(finding.kind, finding.key) for finding in left} == {("missing-entry", str(key_of(2)))}
        if not faults.struck:
            assert nth > 20
            return
    pytest.fail("it never ends")
