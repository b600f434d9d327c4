"""Which partitions a worker takes, and how long it waits for those of others."""

import os
import threading
import time

import pytest

import cachestore.jobs.share.claims
from cachestore.core.errors import Incomplete
from cachestore.jobs.run.claiming import STUCK_SECONDS
from cachestore.jobs.share.choice import GROUP_UNITS, Takeover
from cachestore.jobs.share.workers import SILENT_SECONDS, SLOW_BATCHES, SLOW_SECONDS, host_name
from cachestore.store.read.snapshot import list_segments
from tests.fakes import Clock, FakeEncoder, captions
from tests.jobs.bench import Bench, results


def pools_taken(bench, encoder, **options):
    """How many units each claim of a worker's held, with how many it had encoded by then."""
    taken = []
    with bench.worker(**options) as worker:
        pool_of = worker._claiming.group_of

        def note(opened, slots):
            taken.append((sum(len(opened.partition(*slot)) for slot in slots), len(encoder.encoded)))
            return pool_of(opened, slots)

        worker._claiming.group_of = note
        worker.do_round(bench.opened)
    return taken


def test_where_plenty_is_left_the_next_partitions_are_claimed_while_the_last_are_encoded(root):
    encoder = FakeEncoder(limit=4)
    bench = Bench(root, captions(*map(str, range(6 * GROUP_UNITS))), encoder)
    (first, *rest) = pools_taken(bench, encoder, threads=1)
    assert first == (GROUP_UNITS, 0)
    assert rest[0][0] == GROUP_UNITS
    assert 0 < rest[0][1] < GROUP_UNITS
    assert sum(units for units, _encoded in [first, *rest]) == len(encoder.encoded) == 6 * GROUP_UNITS


def test_where_little_is_left_nothing_is_claimed_before_all_that_was_taken_is_encoded(root):
    """Else a worker would sit on what another could do now."""
    encoder = FakeEncoder(limit=1)
    bench = Bench(root, captions(*map(str, range(12))), encoder)
    done = 0
    for units, encoded in pools_taken(bench, encoder, threads=2, world=3):
        assert encoded == done
        done += units
    assert done == 12


def test_two_workers_do_no_partition_twice(root):
    samples = captions(*map(str, range(300)))
    one, other = FakeEncoder(), FakeEncoder()
    bench = Bench(root, samples, FakeEncoder())
    real = {"world": 2, "clock": time.monotonic, "sleep": time.sleep}
    threads = [threading.Thread(target=bench.work, kwargs={"rank": n, "encoders": [e], **real}) for n, e in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.encoded + other.encoded) == sorted(map(str, range(300)))


def test_ranks_that_begin_together_take_different_ranges(root, monkeypatch):
    bench = Bench(root, captions(*map(str, range(1000))), FakeEncoder())
    monkeypatch.setattr("cachestore.jobs.share.claims.names_in", lambda _folder: [])  # as if all had listed before the first one claimed
    taken = []
    for rank in range(8):
        with bench.worker(rank=rank, world=8) as worker:
            taken += worker._claiming.take(bench.opened, 0)
    assert len(set(taken)) == len(taken) == 8 * 32
    assert len(list(bench.ref.folder(bench.job.layout).claims.iterdir())) == 8


def test_a_worker_leaves_some_partitions_to_the_others(root):
    bench = Bench(root, captions(*map(str, range(64))), FakeEncoder())
    with bench.worker(rank=0, world=8) as worker:
        sizes = []
        while sum(sizes) < 64:
            sizes.append(len(worker._claiming.take(bench.opened, 0)))
    assert sum(sizes) == 64
    assert max(sizes) <= 4
    assert sizes[-1] == 1


def test_the_claim_of_a_dead_worker_is_taken_over(root):
    bench = Bench(root, captions("a", "b", "c"), FakeEncoder())
    with bench.worker() as dead:
        assert len(dead._claiming.take(bench.opened, 0)) == 3
    bench.work()
    assert set(results(bench).values()) == {"made"}


def test_what_a_stopped_worker_held_is_done_in_full_batches_and_one_segment(root):
    encoder = FakeEncoder(limit=8)
    bench = Bench(root, captions(*map(str, range(32))), FakeEncoder())
    with bench.worker() as stopped:
        assert len(stopped._claiming.take(bench.opened, 0)) == 32
    bench.work(encoders=[encoder])
    assert [len(batch) for batch in encoder.batches] == [8] * 4
    assert len(list_segments(bench.job.layout)) == 1


def test_what_a_killed_worker_held_is_done_unit_by_unit_and_in_one_segment(root):
    encoder = FakeEncoder(limit=8)
    bench = Bench(root, captions(*map(str, range(32))), FakeEncoder())
    assert len(bench.killed()) == 32
    bench.work(encoders=[encoder])
    assert [len(batch) for batch in encoder.batches] == [1] * 32
    assert len(list_segments(bench.job.layout)) == 1


def test_workers_share_what_a_stopped_one_held(root):
    bench = Bench(root, captions(*map(str, range(64))), FakeEncoder())
    with bench.worker() as stopped:
        assert len(stopped._claiming.take(bench.opened, 0)) == 64
    with bench.worker(rank=0, world=4) as first, bench.worker(rank=1, world=4) as second:
        assert [len(one._claiming.take(bench.opened, 0)) for one in (first, second)] == [8, 7]


def test_a_claim_that_cannot_be_read_holds_nobody_up(root):
    bench = Bench(root, captions("a", "b", "c"), FakeEncoder())
    with bench.worker() as living:
        assert len(living._claiming.take(bench.opened, 0)) == 3
        for path in living.claims.folder.claims.iterdir():
            path.write_bytes(b"?")
        bench.work()
    assert set(results(bench).values()) == {"made"}


@pytest.mark.parametrize(("slowest_batch", "patience"), [(0.0, SILENT_SECONDS), (0.1, SLOW_SECONDS), (4.0, SLOW_BATCHES * 4.0)])
def test_an_idle_worker_does_the_claims_of_one_that_stands_still_over(root, slowest_batch, patience):
    bench = Bench(root, captions("a", "b"), FakeEncoder())
    clock, encoder = Clock(), FakeEncoder()
    with bench.worker() as slow:
        slow.heartbeat.batch_took(slowest_batch)
        slow.heartbeat.write()
        held = slow._claiming.take(bench.opened, 0)
        bench.work(clock=clock, sleep=lambda _seconds: clock.sleep(1), encoders=[encoder])
    assert len(held) == 2
    assert sorted(encoder.encoded) == ["a", "b"]
    assert patience <= clock.now - 1000.0 <= patience + 2


def test_the_claim_of_a_worker_that_lives_and_moves_is_left_alone(root):
    """Until the other finishes, the idle one waits; it never takes what moves."""
    bench = Bench(root, captions("a", "b"), FakeEncoder())
    encoder, clock = FakeEncoder(), Clock()
    with bench.worker() as living:
        slots = living._claiming.take(bench.opened, 0)

        def sleep(seconds):
            clock.sleep(20)
            living.heartbeat.rise()
            living.heartbeat.write()
            if clock.now > 3000:
                bench.do(living, slots)

        bench.work(clock=clock, sleep=sleep, encoders=[encoder])
    assert encoder.encoded == []
    assert set(results(bench).values()) == {"made"}


def test_two_segments_of_a_doubled_claim_are_harmless(root):
    bench = Bench(root, captions("a", "b"), FakeEncoder())
    with bench.worker() as slow:
        slots, clock = slow._claiming.take(bench.opened, 0), Clock()
        bench.work(clock=clock, sleep=lambda _seconds: clock.sleep(30))
        bench.do(slow, slots)
    assert set(results(bench).values()) == {"made"}
    assert len(bench.present()) == 2


def test_a_wait_without_any_sign_of_life_ends_and_says_for_whom(root, monkeypatch):
    bench = Bench(root, captions("a"), FakeEncoder())
    clock = Clock()
    with bench.worker() as silent:
        silent._claiming.take(bench.opened, 0)
        heartbeat = silent.heartbeat
        monkeypatch.setattr("cachestore.jobs.run.claiming.parts_to_take", lambda _held, **_of: Takeover([], 1))
        with pytest.raises(Incomplete) as ended:
            bench.work(clock=clock, sleep=lambda _seconds: clock.sleep(30))
    owner = f"rank 0, pid {os.getpid()} on {host_name()}, last heartbeat: 'planning' with count 0, unchanged for"
    assert f"part 0 of text held by {owner}" in str(ended.value)
    assert heartbeat.worker in str(ended.value)
    assert "cachestore status" in str(ended.value)
    assert STUCK_SECONDS <= clock.now - 1000.0 <= STUCK_SECONDS + 60


def test_a_wait_lasts_as_long_as_any_holder_moves_or_may_be_in_its_slowest_batch(root, monkeypatch):
    bench = Bench(root, captions("a"), FakeEncoder())
    clock = Clock()
    with bench.worker() as slow:
        slow._claiming.take(bench.opened, 0)
        slow.heartbeat.batch_took(1000.0)  # silent after 3,000 s
        slow.heartbeat.write()
        monkeypatch.setattr("cachestore.jobs.run.claiming.parts_to_take", lambda _held, **_of: Takeover([], 1))

        def sleep(_seconds):
            clock.sleep(30)
            if clock.now < 9000:
                slow.heartbeat.rise()
                slow.heartbeat.write()

        with pytest.raises(Incomplete, match="no progress for 100 minutes"):
            bench.work(clock=clock, sleep=sleep)
    assert 8970 + 6000 <= clock.now <= 9000 + 6060


def test_a_claim_that_cannot_be_taken_though_no_listing_shows_it_is_left_for_the_next_poll(root, monkeypatch):
    """On NFS a listing may be a minute old; trying again at once would keep a processor and a server busy."""
    bench = Bench(root, captions("a", "b"), FakeEncoder())
    clock, polls = Clock(), []
    with bench.worker() as other:
        taken = other._claiming.take(bench.opened, 0)
        really = other.claims.folder.claims
        names = cachestore.jobs.share.claims.names_in
        seen = lambda folder: [] if len(polls) < 3 and folder == really else names(folder)  # noqa: E731
        monkeypatch.setattr("cachestore.jobs.share.claims.names_in", seen)

        def sleep(seconds):
            polls.append(clock.sleep(seconds))
            if len(polls) == 5:
                bench.do(other, taken)

        bench.work(clock=clock, sleep=sleep, encoders=[FakeEncoder()])
    assert len(polls) == 5
    assert set(results(bench).values()) == {"made"}


def test_where_nobody_claims_what_cannot_be_taken_the_wait_ends_too(root, monkeypatch):
    clock = Clock()
    bench = Bench(root, captions("a"), FakeEncoder())
    monkeypatch.setattr("cachestore.jobs.share.claims.create", lambda *_arguments: False)
    with pytest.raises(Incomplete, match="work that no process has claimed"):
        bench.work(clock=clock, sleep=lambda _seconds: clock.sleep(30))
