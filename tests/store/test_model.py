"""A store against a model: a dict of the copies that were acknowledged, and of those that were damaged since.

Whatever is appended, committed, damaged, deleted, repaired, compacted, collected and cut off in whatever order, every read is what was
stored or the right error, verify finds exactly the damage there is, and neither repair nor gc nor compact loses a valid entry.
"""

import shutil
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachestore.care import compact as compact_module
from cachestore.care import gc
from cachestore.care import repair as repair_module
from cachestore.care.collect import collect, compact
from cachestore.care.losses import read_lost
from cachestore.care.repair import repair
from cachestore.care.verify import verify
from cachestore.core.errors import CorruptEntry, MissingEntry
from cachestore.files import publish
from cachestore.store.format.entry import split
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.write import append
from cachestore.store.write import commit as commit_module
from cachestore.store.write.append import Appender
from cachestore.store.write.commit import commit, create_store
from tests.fakes import examples
from tests.store.stores import flip, key_of, plain, tensors_of

NUMBERS = st.integers(0, 5)


class Died(BaseException):
    """What a process that is killed raises: nobody catches it."""


@contextmanager
def dying_at(nth):
    """From the n-th failpoint on that anything passes, the process is dead: nothing that comes after is done."""
    passed = 0

    def failpoint(_name):
        nonlocal passed
        passed += 1
        if passed == nth:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        for module in (append, commit_module, compact_module, gc, publish, repair_module):
            patch.setattr(module, "failpoint", failpoint)
        yield


class StoreMachine(RuleBasedStateMachine):
    """Two readers look on: one that is opened for each look, and one that stays open all the time."""

    @initialize()
    def create(self):
        self.folder = Path(tempfile.mkdtemp())
        self.layout = create_store(self.folder / "store")
        self.appender = Appender(self.layout)
        self.gathered = {}
        self.good = {}
        """(segment, n) -> the variant that is stored there."""
        self.bad = set()
        """(segment, n) of damaged copies."""
        self.lost = set()
        """Numbers that repair noted as lost."""
        self.stays = Reader(self.layout.root, verify="always")

    def teardown(self):
        if hasattr(self, "folder"):
            self.stays.close()
            shutil.rmtree(self.folder)

    def values_of(self, n):
        return [plain(tensors_of(n, variant)) for (_segment, m), variant in self.good.items() if m == n]

    @rule(n=NUMBERS, variant=st.integers(0, 1))
    def gather(self, n, variant):
        self.appender.put(key_of(n), tensors_of(n, variant), {"n": n})
        self.gathered.setdefault(n, variant)

    @rule()
    def close_segment(self):
        for each in self.appender.close_segment():
            self.good |= {(each.digest, n): variant for n, variant in self.gathered.items()}
        self.gathered = {}

    @rule(action=st.sampled_from(["close_segment", "commit", "repair", "compact", "collect"]), nth=st.integers(1, 6))
    def crash(self, action, nth):
        """The process dies at the n-th failpoint, what it gathered with it; another one opens the store."""
        actions = {
            "close_segment": self.appender.close_segment,
            "commit": lambda: commit(self.layout).close(),
            "repair": lambda: repair(self.layout.root),
            "compact": lambda: compact(self.layout.root),
            "collect": lambda: collect(self.layout.root, apply=True, grace_seconds=0),
        }
        gathered, expected = self.gathered, {n: self.values_of(n) for n in range(6)}
        with dying_at(nth), suppress(Died):
            actions[action]()
        if action == "close_segment":  # acknowledged or not, it may be there
            for n, variant in gathered.items():
                expected[n] = [*expected[n], plain(tensors_of(n, variant))]
        elif action == "repair":  # what was damaged may be in quarantine already, and be noted as lost
            noted = {key for path in self.layout.quarantine.glob("*.lost.json") for key in read_lost(path)}
            self.lost |= {n for n in range(6) if key_of(n) in noted}
        self.reopen()
        self.look_what_is_there(expected, may_be_new=gathered if action == "close_segment" else {})

    @rule()
    def reopen(self):
        self.stays.close()
        self.appender = Appender(self.layout)
        self.gathered = {}
        self.stays = Reader(self.layout.root, verify="always")

    @rule()
    def compact(self):
        expected = {n: self.values_of(n) for n in range(6)}
        compact(self.layout.root)
        self.look_what_is_there(expected)

    @rule()
    def collect(self):
        expected = {n: self.values_of(n) for n in range(6)}
        collect(self.layout.root, apply=True, grace_seconds=0)
        self.look_what_is_there(expected)

    def look_what_is_there(self, expected, may_be_new=()):
        """Copies may stand elsewhere now; of no key has the last good one gone, and none holds anything else."""
        there = list_segments(self.layout)
        self.bad = {(segment, n) for segment, n in self.bad if segment in there}
        self.good = {}
        with Reader(self.layout.root, verify="always") as reader:
            for n, locations in enumerate(reader.snapshot.find([key_of(n) for n in range(6)])):
                for location in locations:
                    if (location.segment.digest, n) not in self.bad:
                        value = self.value_at(reader, n, location)
                        assert value in expected[n]
                        self.good[location.segment.digest, n] = next(v for v in (0, 1) if plain(tensors_of(n, v)) == value)
        held = {n for _segment, n in self.good}
        assert {n for n, values in expected.items() if values} - held <= set(may_be_new)

    @rule()
    def forget(self):
        self.appender.discard()
        self.gathered = {}

    @rule()
    def commit(self):
        commit(self.layout).close()

    @rule()
    def look_again(self):
        self.stays.refresh()

    @rule(number=st.integers(0, 3))
    def delete_an_index(self, number):
        for name in list_indexes(self.layout)[number : number + 1]:
            self.layout.index(name).unlink()

    @rule(number=st.integers(0, 3), offset=st.integers(0, 10_000))
    def damage_an_index(self, number, offset):
        """In a copy of the file: what LMDB has mapped is not changed under it, as nothing could be promised then."""
        for name in list_indexes(self.layout)[number : number + 1]:
            path = self.layout.index(name)
            shutil.copy(path, self.folder / "copy")
            flip(self.folder / "copy", offset % path.stat().st_size)
            (self.folder / "copy").replace(path)

    @rule(choice=st.integers(0, 10), offset=st.integers(0, 100))
    def damage_an_entry(self, choice, offset):
        if not self.good:
            return
        segment, n = sorted(self.good)[choice % len(self.good)]
        with closing(load_snapshot(self.layout)) as snapshot:
            [location] = [location for location in snapshot.find([key_of(n)])[0] if location.segment.digest == segment]
        flip(self.layout.segment(segment), location.offset + offset % location.size_bytes)
        del self.good[segment, n]
        self.bad.add((segment, n))

    @rule()
    def verify(self):
        report = verify(self.layout.root)
        corrupt = [finding for finding in report.findings if finding.kind == "corrupt-entry"]
        damaged = {(Path(finding.path).stem, entry.key) for finding in corrupt for entry in finding.entries}
        assert len(corrupt) == len({segment for segment, _key in damaged})
        assert damaged == {(segment, str(key_of(n))) for segment, n in self.bad}
        missing = {finding.key for finding in report.findings if finding.kind == "missing-entry"}
        assert missing == {str(key_of(n)) for n in self.lost if not self.values_of(n)}
        assert {finding.kind for finding in report.findings} <= {"corrupt-entry", "missing-entry", "bad-index"}

    @rule()
    def repair(self):
        expected = {n: self.values_of(n) for n in range(6)}
        report = repair(self.layout.root)
        damaged = {segment for segment, _n in self.bad}
        assert {Path(path).stem for path in report.quarantined if path.startswith("segments/")} == damaged
        assert report.salvaged == sum(segment in damaged for segment, _n in self.good)
        self.lost |= {n for _segment, n in self.bad}
        self.bad = set()
        variants = {}
        with Reader(self.layout.root, verify="always") as reader:
            found = reader.snapshot.find([key_of(n) for n in range(6)])
            for n, locations in enumerate(found):
                for location in locations:
                    value = self.value_at(reader, n, location)
                    assert value in expected[n]
                    variants[location.segment.digest, n] = next(v for v in (0, 1) if plain(tensors_of(n, v)) == value)
        assert {n for _segment, n in variants} == {n for n, values in expected.items() if values}
        self.good = variants

    def value_at(self, reader, n, location):
        return plain(split(location.specs, reader._fetcher.fetch(key_of(n), location)))

    @invariant()
    def every_read_is_what_was_stored_or_the_right_error(self):
        if not hasattr(self, "folder"):
            return
        with Reader(self.layout.root, verify="always") as fresh:
            assert set(fresh.keys()) == {key_of(n) for _segment, n in {*self.good, *self.bad}}
            for reader in (fresh, self.stays):
                for n in range(6):
                    self.read(reader, n)
        assert list_segments(self.layout) == {segment for segment, _n in {*self.good, *self.bad}}
        assert {path.name for path in self.folder.iterdir()} <= {"store", "copy"}

    def read(self, reader, n):
        if values := self.values_of(n):
            assert plain(reader.get_raw([key_of(n)])[0]) in values
        elif any(m == n for _segment, m in self.bad):
            with pytest.raises(CorruptEntry):
                reader.get_raw([key_of(n)])
        else:
            with pytest.raises(MissingEntry):
                reader.get_raw([key_of(n)])


StoreMachine.TestCase.settings = settings(examples(40), stateful_step_count=25)
TestStoreAgainstModel = StoreMachine.TestCase
