"""What a worker knows of the store while it works."""

from contextlib import closing

import cachestore.jobs.run.known_entries
import cachestore.store.read.snapshot
import cachestore.store.write.commit
from cachestore.jobs.share.choice import GROUP_UNITS
from cachestore.store.read.snapshot import load_snapshot
from tests import fakes
from tests.fakes import FakeEncoder, captions
from tests.jobs.bench import Bench, results


def test_what_the_store_holds_is_neither_prepared_nor_encoded(root):
    fakes.run(root, captions("a", "b"), FakeEncoder())
    encoder = FakeEncoder()
    bench = Bench(root, captions("a", "b", "c"), encoder)
    bench.opened = type(bench.opened)(0, (range(3),), "launch", 0.0)
    bench.work()
    assert encoder.encoded == ["c"]
    assert encoder.prepared == 1
    assert results(bench) == {"a": "found", "b": "found", "c": "made"}


def test_facts_of_what_was_made_earlier_come_from_its_entry(root):
    fakes.run(root, captions("two words"), FakeEncoder())
    bench = Bench(root, captions("two words", "x"), FakeEncoder())
    bench.opened = type(bench.opened)(0, (range(2),), "launch", 0.0)
    bench.work()
    assert bench.by_item()["two words"].facts["tokens"] == 2


def test_what_a_dead_worker_of_this_pass_published_counts_as_made(root):
    """Its entry is in a segment of this pass, so the pass encoded it, whoever writes the ledger."""
    bench = Bench(root, captions("a"), FakeEncoder())
    bench.work()
    for path in bench.ref.folder(bench.job.layout).ledgers.iterdir():
        path.unlink()
    encoder = FakeEncoder()
    bench.work(encoders=[encoder])
    assert encoder.encoded == []
    assert results(bench) == {"a": "made"}


def test_many_new_segments_are_committed_while_the_work_goes_on(root, monkeypatch):
    monkeypatch.setattr(cachestore.jobs.run.known_entries, "UNCOVERED_LIMIT", 2)
    monkeypatch.setattr(cachestore.store.write.commit, "UNCOVERED_LIMIT", 2)
    bench = Bench(root, captions(*map(str, range(6 * GROUP_UNITS))), FakeEncoder(limit=16))
    bench.work(threads=2)
    with closing(load_snapshot(bench.job.layout)) as snapshot:
        assert snapshot.index is not None
        assert len(snapshot.index) >= 3 * GROUP_UNITS


def test_a_pass_parses_no_header_that_it_wrote(root, monkeypatch):
    parsed = []
    monkeypatch.setattr(cachestore.store.read.snapshot, "read_contents", parsed.append)
    assert fakes.run(root, captions("a", "b"), FakeEncoder()).encoded == 2
    assert parsed == []
