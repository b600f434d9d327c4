"""One worker's part of a pass: claims, batches, failures, ledgers."""

import os
import threading
import time
import weakref
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cachestore.jobs.known_entries
import cachestore.storage.commit
import cachestore.work.claims
from cachestore.core.errors import BadInput, EncodeFailed, Incomplete, WriteFailed
from cachestore.core.keys import Key
from cachestore.core.ranks import Placement
from cachestore.files.paths import ClaimName
from cachestore.jobs.claiming import STUCK_SECONDS
from cachestore.jobs.worker import Worker
from cachestore.storage.append import Appender
from cachestore.storage.snapshot import load_snapshot
from cachestore.work.attempts import Attempts
from cachestore.work.choice import POOL_UNITS
from cachestore.work.claims import Claims
from cachestore.work.ledgers import list_ledgers, read_ledgers
from cachestore.work.passes import join_pass, read_round
from cachestore.work.workers import SILENT_SECONDS, SLOW_BATCHES, SLOW_SECONDS, Beat, Watch, host_name, read_beats
from tests import fakes
from tests.fakes import Clock, FakeEncoder, Pictures, captions, pictures


class Bench:
    """An open pass, and workers on it."""

    def __init__(self, root, samples, *encoders, source=None, number=0):
        self.job = fakes.job(root, samples, list(encoders), source=source)
        self.ref = join_pass(self.job.layout, self.job.plan.name, "launch")
        with closing(load_snapshot(self.job.layout)) as snapshot:
            fakes.reconciler(self.job).open_pass(snapshot)
        self.opened = read_round(self.job.layout, self.ref, self.job.plan, number)

    @contextmanager
    def worker(self, *, rank=0, world=1, clock: Any = None, **options):
        clock = clock or Clock()
        sleep = options.pop("sleep", None) or clock.sleep
        job = replace(self.job, placement=Placement(rank, world), **options)
        beat = Beat(self.job.layout, self.job.plan.name, 1, "launch", rank, world)
        with beat, closing(Worker(job, self.ref, beat, clock=clock, sleep=sleep)) as worker:
            yield worker

    def work(self, **options):
        with self.worker(**options) as worker:
            worker.do_round(self.opened)
            return worker.beat

    def do(self, worker, slots):
        """Let a worker do partitions that it took."""
        worker._do_group(worker._states[0], worker._claiming.group_of(self.opened, slots))

    def killed(self, *, on=None):
        """A worker that took what it could and was killed: its lock yields and its beat names no end; `on` is the unit it was on."""
        beat = Beat(self.job.layout, self.job.plan.name, 1, "launch", 0, 1)
        beat.__enter__()
        with closing(Worker(self.job, self.ref, beat)) as worker:
            slots = worker._claiming.take(self.opened, 0)
            if on is not None:
                worker.attempts.begin(on)
        beat._lock.release()
        return slots

    def attempts(self):
        """The unit that each worker named last."""
        return Attempts(self.job.layout, self.ref.folder(self.job.layout), "").last_units()

    def outcomes(self):
        ledgers = read_ledgers(self.ref.folder(self.job.layout), 0)
        return {outcome.unit: outcome for ledger in ledgers for outcome in ledger.outcomes}

    def by_item(self):
        """Outcomes by caption or reference."""
        plan = self.job.plan
        return {next(iter(plan.unit(place).request.values())): outcome for place, outcome in self.outcomes().items()}

    def present(self):
        with closing(load_snapshot(self.job.layout)) as snapshot:
            return set(snapshot.keys())


def results(bench):
    return {item: outcome.result for item, outcome in bench.by_item().items()}


# Nothing, and everything


def test_a_round_of_nothing_ends_at_once_and_touches_no_encoder(root):
    encoder = FakeEncoder()
    bench = Bench(root, [], encoder)
    bench.work()
    assert encoder.prepared == 0
    assert bench.outcomes() == {}


@pytest.mark.parametrize("threads", [0, 3])
def test_every_unit_gets_an_entry_and_a_line_in_a_ledger(root, threads):
    encoder = FakeEncoder()
    bench = Bench(root, captions(*(f"caption {n}" for n in range(150))), encoder)
    beat = bench.work(threads=threads)
    outcomes = bench.outcomes()
    assert sorted(outcomes) == list(range(150))
    assert {outcome.result for outcome in outcomes.values()} == {"made"}
    assert bench.present() == {outcome.key for outcome in outcomes.values()}
    assert (beat.encoded, beat.reused, beat.failed) == (150, 0, 0)


def test_an_outcome_holds_the_digest_the_time_and_the_facts_of_what_was_read(root):
    source = Pictures({"a.png": b"picture"}, {"a.png": 77})
    bench = Bench(root, pictures("a.png"), FakeEncoder("latents"), source=source)
    bench.work()
    outcome = bench.by_item()["a.png"]
    assert outcome.input == fakes.digest_bytes(b"picture")
    assert outcome.stat == (7, 77)
    assert outcome.facts["bucket"] == [4, 4]


def test_facts_that_only_preparing_tells_are_kept_too(root):
    bench = Bench(root, captions("three little words"), FakeEncoder())
    bench.work()
    assert bench.by_item()["three little words"].facts["tokens"] == 3


def test_text_is_made_before_latents(root):
    order = []
    text = FakeEncoder("text", before_encode=lambda items: order.append("text"))
    latents = FakeEncoder("latents", before_encode=lambda items: order.append("latents"))
    source = Pictures({f"{n}.png": str(n).encode() for n in range(9)})
    Bench(root, pictures(*source.files), text, latents, source=source).work()
    assert order == sorted(order, reverse=True)
    assert set(order) == {"text", "latents"}


def test_batches_are_filled_across_partitions(root):
    encoder = FakeEncoder(limit=8)
    Bench(root, captions(*map(str, range(POOL_UNITS))), encoder).work()
    assert {len(batch) for batch in encoder.batches} == {8}


def test_units_of_different_groups_share_no_batch(root):
    class Grouped(FakeEncoder):
        def prepare(self, resolved):
            prepared = super().prepare(resolved)
            return type(prepared)(prepared.payload, len(resolved.item), prepared.facts)

    encoder = Grouped(limit=4)
    Bench(root, captions(*(f"{'x' * (n % 3)}{n:02}" for n in range(30))), encoder).work()
    assert all(len({len(item) for item in batch}) == 1 for batch in encoder.batches)
    assert len(encoder.encoded) == 30


def test_two_pictures_of_equal_bytes_are_encoded_once(root):
    encoder = FakeEncoder("latents")
    bench = Bench(root, pictures("a.png", "b.png"), encoder, source=Pictures({"a.png": b"same", "b.png": b"same"}))
    bench.work()
    assert encoder.encoded == [b"same"]
    assert sorted(results(bench).values()) == ["found", "made"]


def test_pictures_of_equal_bytes_in_different_pools_are_encoded_once_too(root):
    files = {f"{n:03}.png": b"same" for n in range(3 * POOL_UNITS)}
    encoder = FakeEncoder("latents")
    bench = Bench(root, pictures(*files), encoder, source=Pictures(files))
    bench.work()
    assert encoder.encoded == [b"same"]
    assert len({outcome.key for outcome in bench.outcomes().values()}) == 1


def test_what_was_encoded_a_minute_ago_is_published_though_its_partitions_are_not_finished(root):
    clock, published = Clock(), []
    encoder = FakeEncoder(limit=4, before_encode=lambda items: clock.sleep(25))
    bench = Bench(root, captions(*map(str, range(20))), encoder)
    bench.work(clock=clock, on_progress=lambda counts: published.append(counts["encoded"]))
    assert published[0] == 16  # the fourth batch came 75 s after the first entry was gathered, the third 50 s
    assert published[-1] == 20


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


def test_what_was_encoded_is_not_kept_until_its_partitions_are_finished(root):
    """A pool may hold 2,000 pictures of 4 MB each."""

    class Pixels:
        pass

    class Heavy(FakeEncoder):
        def prepare(self, resolved):
            prepared = super().prepare(resolved)
            pixels = Pixels()
            alive.add(pixels)
            return type(prepared)(pixels, prepared.group)

    alive: weakref.WeakSet[Pixels] = weakref.WeakSet()
    most = []
    files = {f"{n}.png": b"picture %d" % n for n in range(POOL_UNITS)}
    encoder = Heavy("latents", limit=4, before_encode=lambda items: most.append(len(alive)))
    encoder.batches = NothingKept()
    Bench(root, pictures(*files), encoder, source=Pictures(files)).work()
    assert len(most) == POOL_UNITS // 4
    assert max(most) <= 8


class NothingKept(list):
    """A list of batches that forgets them."""

    def append(self, batch):
        del batch


# Beside each other


class Device(FakeEncoder):
    """Its results come only once the next batch was handed over, as if a GPU were at it; the last one's come at once."""

    def __init__(self, limit, batches_in_all):
        super().__init__(limit=limit)
        self.waited: list[int] = []
        self.batches_in_all = batches_in_all

    def submit(self, batch):
        made, number = self.encode(batch), len(self.batches)

        def wait():
            self.waited.append(len(self.batches))
            assert len(self.batches) > number or number == self.batches_in_all
            return made

        return wait


@pytest.mark.parametrize("threads", [0, 2])
def test_the_next_batch_is_begun_before_the_results_of_the_last_one_are_waited_for(root, threads):
    encoder = Device(limit=4, batches_in_all=5)
    bench = Bench(root, captions(*map(str, range(20))), encoder)
    bench.work(threads=threads)
    assert encoder.waited == [2, 3, 4, 5, 5]
    assert set(results(bench).values()) == {"made"}


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("NaN")])
def test_an_error_that_comes_with_the_results_moves_nobody_either(root, error):
    class Late(FakeEncoder):
        def submit(self, batch):
            def wait():
                if len(batch) > 1 and any(item == "7" for _key, item in batch):
                    raise error
                return self.encode(batch)

            return wait

    bench = Bench(root, captions(*map(str, range(20))), Late(limit=4))
    bench.work(threads=2)
    assert set(results(bench).values()) == {"made"}


def test_batches_are_encoded_while_earlier_ones_are_written(root, monkeypatch):
    """The appender waits in the middle of a segment until two more batches were encoded."""
    encoder, enough = FakeEncoder(limit=4), threading.Event()
    encoder.before_encode = lambda items: enough.set() if len(encoder.batches) == 3 else None
    put = Appender.put

    def slow(self, *entry):
        assert enough.wait(30)
        return put(self, *entry)

    monkeypatch.setattr(Appender, "put", slow)
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    bench.work(threads=1)
    assert set(results(bench).values()) == {"made"}


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
    bench = Bench(root, captions(*map(str, range(6 * POOL_UNITS))), encoder)
    (first, *ahead) = pools_taken(bench, encoder, threads=1)
    assert first == (POOL_UNITS, 0)
    assert ahead[0][0] == POOL_UNITS
    assert 0 < ahead[0][1] < POOL_UNITS
    assert sum(units for units, _encoded in [first, *ahead]) == len(encoder.encoded) == 6 * POOL_UNITS


def test_where_little_is_left_nothing_is_claimed_before_all_that_was_taken_is_encoded(root):
    """Else a worker would sit on what another could do now."""
    encoder = FakeEncoder(limit=1)
    bench = Bench(root, captions(*map(str, range(12))), encoder)
    done = 0
    for units, encoded in pools_taken(bench, encoder, threads=2, world=3):
        assert encoded == done
        done += units
    assert done == 12


def test_many_new_segments_are_committed_while_the_work_goes_on(root, monkeypatch):
    monkeypatch.setattr(cachestore.jobs.known_entries, "UNCOVERED_LIMIT", 2)
    monkeypatch.setattr(cachestore.storage.commit, "UNCOVERED_LIMIT", 2)
    bench = Bench(root, captions(*map(str, range(6 * POOL_UNITS))), FakeEncoder(limit=16))
    bench.work(threads=2)
    with closing(load_snapshot(bench.job.layout)) as snapshot:
        assert snapshot.index is not None
        assert len(snapshot.index) >= 3 * POOL_UNITS


def test_a_beat_tells_how_busy_each_stage_was(root):
    clock = Clock()
    encoder = FakeEncoder(before_encode=lambda items: clock.sleep(5))
    bench = Bench(root, captions("a", "b"), encoder)
    bench.work(clock=clock)
    (beat,) = read_beats(bench.job.layout)
    assert beat["stages"]["encode"] == [5.0, 0.0]
    assert beat["stages"]["prepare"] == [0.0, 5.0]


# Failures


def test_a_unit_that_cannot_be_decoded_moves_nobody(root):
    files = {f"{n}.png": (b"undecodable" if n == 5 else str(n).encode()) for n in range(12)}
    bench = Bench(root, pictures(*files), FakeEncoder("latents", limit=4), source=Pictures(files))
    bench.work()
    for name, outcome in bench.by_item().items():
        assert outcome.result == ("failed" if name == "5.png" else "made")
        if outcome.result == "made":
            assert outcome.input == fakes.digest_bytes(files[name])
    failed = bench.by_item()["5.png"]
    assert (failed.reason, failed.is_transient) == ("this is no picture", False)


@pytest.mark.parametrize("threads", [0, 2])
def test_every_entry_holds_what_was_made_of_its_own_input(root, threads):
    """With some undecodable, some alike and some unreadable among them, nothing is paired by position."""
    files = {f"{n}.png": (b"undecodable" if n % 7 == 3 else b"same" if n % 5 == 0 else f"picture {n}".encode()) for n in range(60)}
    source = Pictures(files, failing={"4.png": 1, "9.png": 1})
    bench = Bench(root, pictures(*files), FakeEncoder("latents", limit=3), source=source)
    bench.work(threads=threads)
    for name, outcome in bench.by_item().items():
        if outcome.result != "failed":
            assert outcome.input == fakes.digest_bytes(files[name])
            assert outcome.key == FakeEncoder("latents").resolve({"image": name, "role": "image"}, files.get).key
    assert {name for name, outcome in bench.by_item().items() if outcome.is_transient} == {"4.png", "9.png"}


def refuses(*bad):
    def before(items):
        if set(bad) & set(items):
            raise ValueError(f"cannot encode {items}")

    return before


def test_a_unit_that_the_encoder_refuses_is_found_by_halving_and_fails_alone(root):
    encoder = FakeEncoder(limit=16, before_encode=refuses("5", "11"))
    bench = Bench(root, captions(*map(str, range(16))), encoder)
    bench.work()
    assert {item for item, result in results(bench).items() if result == "failed"} == {"5", "11"}
    assert bench.by_item()["5"].reason == "ValueError: cannot encode ['5']"
    assert len(encoder.encoded) == 14


@pytest.mark.parametrize("error", [EncodeFailed("not finite"), ValueError("odd"), KeyError("x"), AssertionError()])
def test_an_encoders_error_is_permanent(root, error):
    def fail(items):
        raise error

    bench = Bench(root, captions("a"), FakeEncoder(before_encode=fail))
    bench.work()
    assert (bench.by_item()["a"].result, bench.by_item()["a"].is_transient) == ("failed", False)
    assert bench.by_item()["a"].reason


@pytest.mark.parametrize("error", [OSError("gone for now"), MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate")])
def test_lack_of_memory_and_io_errors_are_transient(root, error):
    def fail(items):
        raise error

    bench = Bench(root, captions("a"), FakeEncoder(before_encode=fail))
    bench.work()
    assert bench.by_item()["a"].is_transient


def too_many(most):
    def before(items):
        if len(items) > most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return before


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_a_batch_that_does_not_fit_is_halved_until_all_are_encoded(root, most):
    encoder = FakeEncoder(limit=8, before_encode=too_many(most))
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    bench.work()
    assert set(results(bench).values()) == {"made"}
    assert max(map(len, encoder.batches)) <= most


def test_after_a_batch_did_not_fit_smaller_ones_are_tried_at_once(root):
    tried = []

    def before(items):
        tried.append(len(items))
        too_many(4)(items)

    encoder = FakeEncoder(limit=8, before_encode=before)
    Bench(root, captions(*map(str, range(32))), encoder).work()
    assert tried.count(8) == 1


def test_nothing_of_a_batch_that_did_not_fit_is_kept_while_its_halves_are_tried(root):
    """The traceback of a failed batch holds its activations: retried from inside the handler, the halves would not fit either."""

    class Activations:
        pass

    alive = []

    def before(items):
        import weakref

        assert all(reference() is None for reference in alive)
        activations = Activations()
        alive.append(weakref.ref(activations))
        too_many(1)(items)

    bench = Bench(root, captions(*map(str, range(4))), FakeEncoder(limit=4, before_encode=before))
    bench.work()
    assert {outcome.reason for outcome in bench.outcomes().values()} == {""}


WRONG = {
    "nothing": lambda keys: None,
    "no keys": lambda keys: {},
    "one too few": lambda keys: {key: {"value": np.zeros(1)} for key in keys[1:]},
    "one too many": lambda keys: {key: {"value": np.zeros(1)} for key in [*keys, Key(bytes(16))]},
    "a list": lambda keys: [np.zeros(1) for _key in keys],
    "no names": lambda keys: {key: np.zeros(1) for key in keys},
    "no tensors": lambda keys: {key: {"value": [1, 2]} for key in keys},
    "nothing for a key": dict.fromkeys,
    "a name that is no text": lambda keys: {key: {3: np.zeros(1)} for key in keys},
    "an unknown dtype": lambda keys: {key: {"value": np.zeros(1, "datetime64[s]")} for key in keys},
    "an empty name": lambda keys: {key: {"": np.zeros(1)} for key in keys},
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_encoder_that_returns_something_else_fails_its_units_and_ends_nothing(root, kind):
    bench = Bench(root, captions("a", "b", "c"), FakeEncoder(answer=lambda batch: WRONG[kind]([key for key, _item in batch])))
    bench.work()
    assert {(outcome.result, outcome.is_transient) for outcome in bench.outcomes().values()} == {("failed", False)}
    assert all(outcome.reason for outcome in bench.outcomes().values())
    assert bench.present() == set()


def test_a_disk_that_refuses_ends_the_work_and_leaves_no_ledger(root, monkeypatch):
    bench = Bench(root, captions("a", "b"), FakeEncoder())

    def full(*_args, **_options):
        raise WriteFailed("disk full")

    monkeypatch.setattr("cachestore.storage.append.publish", full)
    with pytest.raises(WriteFailed):
        bench.work()
    assert bench.outcomes() == {}


# Sharing


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


def test_a_worker_begins_with_its_own_partitions(root):
    encoder = FakeEncoder(limit=1)
    bench = Bench(root, captions(*map(str, range(64))), FakeEncoder())
    with bench.worker(rank=3, world=8, encoders=[encoder]) as worker:
        own = worker._claiming.take(bench.opened, 0)
    assert own
    assert all(partition % 8 == 3 for _recipe, partition in own)


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


def test_a_claim_that_cannot_be_read_holds_nobody_up(root):
    bench = Bench(root, captions("a", "b", "c"), FakeEncoder())
    with bench.worker() as living:
        for slot in living._claiming.take(bench.opened, 0):
            path = bench.ref.folder(bench.job.layout).claims / f"0.{slot[0]}.{slot[1]}.0"
            path.write_bytes(b"?")
        bench.work()
    assert set(results(bench).values()) == {"made"}


@pytest.mark.parametrize(("slowest_batch", "patience"), [(0.0, SILENT_SECONDS), (0.1, SLOW_SECONDS), (4.0, SLOW_BATCHES * 4.0)])
def test_an_idle_worker_does_the_claims_of_one_that_stands_still_over(root, slowest_batch, patience):
    bench = Bench(root, captions("a", "b"), FakeEncoder())
    clock, encoder = Clock(), FakeEncoder()
    with bench.worker() as slow:
        slow.beat.batch_took(slowest_batch)
        slow.beat.write()
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
            living.beat.rise()
            living.beat.write()
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
        beat = silent.beat
        monkeypatch.setattr("cachestore.jobs.claiming.claims_to_take", lambda _held: [])
        with pytest.raises(Incomplete) as ended:
            bench.work(clock=clock, sleep=lambda _seconds: clock.sleep(30))
    owner = f"rank 0, pid {os.getpid()} on {host_name()}, last beat 'planning' with count 0, unchanged for"
    assert f"partition 0 of recipe 0 (text) held by {owner}" in str(ended.value)
    assert beat.worker in str(ended.value)
    assert "cachestore status" in str(ended.value)
    assert STUCK_SECONDS <= clock.now - 1000.0 <= STUCK_SECONDS + 60


def test_a_wait_lasts_as_long_as_any_holder_moves_or_may_be_in_its_slowest_batch(root, monkeypatch):
    bench = Bench(root, captions("a"), FakeEncoder())
    clock = Clock()
    with bench.worker() as slow:
        slow._claiming.take(bench.opened, 0)
        slow.beat.batch_took(1000.0)  # silent after 3,000 s
        slow.beat.write()
        monkeypatch.setattr("cachestore.jobs.claiming.claims_to_take", lambda _held: [])

        def sleep(_seconds):
            clock.sleep(30)
            if clock.now < 9000:
                slow.beat.rise()
                slow.beat.write()

        with pytest.raises(Incomplete, match="nothing moved for 100 minutes"):
            bench.work(clock=clock, sleep=sleep)
    assert 8970 + 6000 <= clock.now <= 9000 + 6060


def test_a_claim_that_cannot_be_taken_though_no_listing_shows_it_is_left_for_the_next_poll(root, monkeypatch):
    """On NFS a listing may be a minute old; trying again at once would keep a processor and a server busy."""
    bench = Bench(root, captions("a", "b"), FakeEncoder())
    clock, polls = Clock(), []
    with bench.worker() as other:
        taken = other._claiming.take(bench.opened, 0)
        really = other.claims.folder.claims
        names = cachestore.work.claims.names_in
        monkeypatch.setattr("cachestore.work.claims.names_in", lambda folder: [] if len(polls) < 3 and folder == really else names(folder))

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
    monkeypatch.setattr("cachestore.work.claims.note", lambda *_arguments: False)
    with pytest.raises(Incomplete, match="partitions that nobody claims"):
        bench.work(clock=clock, sleep=lambda _seconds: clock.sleep(30))


# Units that kill


def test_what_a_dead_worker_held_is_done_unit_by_unit_each_named_before_it_is_prepared(root):
    class Watched(FakeEncoder):
        def prepare(self, resolved):
            named.append((resolved.item, sorted(bench.attempts().values())))
            return super().prepare(resolved)

    named = []
    encoder = Watched(limit=16, before_encode=lambda items: named.append((items[0], sorted(bench.attempts().values()))))
    bench = Bench(root, captions("a", "b", "c"), FakeEncoder())
    held = bench.killed()
    assert len(held) == 3
    bench.work(encoders=[encoder])
    places = {item: outcome.unit for item, outcome in bench.by_item().items()}
    assert sorted(named) == sorted([(item, [place]) for item, place in places.items()] * 2)
    assert {len(batch) for batch in encoder.batches} == {1}
    assert set(results(bench).values()) == {"made"}
    assert bench.attempts() == {}


@pytest.mark.parametrize("threads", [0, 2])
def test_a_unit_that_two_workers_died_on_is_a_failure_and_not_run_again(root, threads):
    bench = Bench(root, captions(*map(str, range(9))), FakeEncoder())
    first = bench.killed()
    [(_recipe, partition)] = bench.killed(on=bench.opened.partition(0, first[0][1])[0])
    deadly = bench.opened.partition(0, partition)[0]
    encoder = FakeEncoder()
    beat = bench.work(encoders=[encoder], threads=threads)
    outcomes = bench.outcomes()
    assert {place for place, outcome in outcomes.items() if outcome.result == "failed"} == {deadly}
    assert not outcomes[deadly].is_transient
    here = f"pid {os.getpid()} on {host_name()}"
    assert outcomes[deadly].reason.startswith(f"two workers died encoding it: {here} with it among others, {here} with it alone")
    assert sorted(encoder.encoded) == sorted(item for item, outcome in bench.by_item().items() if outcome.unit != deadly)
    assert (beat.encoded, beat.failed) == (8, 1)


def test_a_unit_that_the_only_proved_dead_was_on_alone_is_a_failure_too(root):
    """The first one's beat is gone, so its death is no longer proved."""
    bench = Bench(root, captions("a"), FakeEncoder())
    bench.killed()
    bench.killed(on=0)
    first = bench.job.layout.worker(
        Claims(bench.job.layout, bench.ref.folder(bench.job.layout), "", Watch(bench.job.layout)).holder(ClaimName(0, 0, 0, 0))
    )
    first.unlink()
    bench.work()
    assert bench.by_item()["a"].reason.startswith(f"a worker died encoding it alone: pid {os.getpid()} on")


@pytest.mark.parametrize("how", ["ended", "silent", "slow", "unreadable", "own"])
def test_a_claim_of_one_that_was_not_proved_dead_changes_nothing_else(root, how):
    """Also where it named a unit: only who was proved dead has died of it."""
    bench = Bench(root, captions("a", "b", "c"), FakeEncoder())
    encoder, clock = FakeEncoder(limit=16), Clock()
    with bench.worker(encoders=[encoder]) as holder:
        slots = holder._claiming.take(bench.opened, 0)
        holder.attempts.begin(0)
        if how == "slow":
            holder.beat.batch_took(0.1)
            holder.beat.write()
        if how == "unreadable":
            for recipe, partition in slots:
                (holder.claims.folder.claims / f"0.{recipe}.{partition}.0").write_bytes(b"?")
        if how == "own":
            holder.do_round(bench.opened)
        elif how != "ended":
            bench.work(encoders=[encoder], clock=clock, sleep=lambda _seconds: clock.sleep(200))
    if how == "ended":
        bench.work(encoders=[encoder])
    assert sorted(encoder.encoded) == ["a", "b", "c"]
    assert set(results(bench).values()) == {"made"}
    assert {path.name for path in holder.attempts.folder.attempts.iterdir()} <= {f"{holder.beat.worker}.0.0"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, BadInput])
def test_a_worker_that_stops_while_it_does_units_alone_names_none(root, error):
    """It did not die of the unit, though its lock yields from now on."""

    def stop(items):
        raise error

    bench = Bench(root, captions("a", "b"), FakeEncoder())
    bench.killed()
    with pytest.raises(error):
        bench.work(encoders=[FakeEncoder(before_encode=stop)])
    assert bench.attempts() == {}
    bench.work()
    assert set(results(bench).values()) == {"made"}


# Signs of life


def test_a_worker_shows_that_it_loads_a_model_before_it_does_and_that_it_has_one_after(root):
    shown = []
    bench = Bench(root, captions("a", "b"), FakeEncoder())

    def look(_items):
        [beat] = read_beats(bench.job.layout)
        shown.append((beat["phase"], beat["count"]))

    beat = bench.work(encoders=[FakeEncoder(limit=1, before_encode=look)])
    assert [phase for phase, _count in shown] == ["loading", "working"]
    assert shown[1][1] > shown[0][1] > 0
    assert beat.phase == "ended"


def test_the_batch_that_loads_the_model_is_not_the_slowest(root):
    """Five times as long as loading takes nobody would do over what a hung worker holds."""
    clock, seconds = Clock(), [100.0, 2.0, 3.0]
    encoder = FakeEncoder(limit=1, before_encode=lambda _items: clock.sleep(seconds.pop(0)))
    beat = Bench(root, captions("a", "b", "c"), encoder).work(clock=clock)
    assert beat.slowest_batch == 3.0


# Stopping


class AfterSome:
    """A cancel token that is set once an encoder has made so many batches."""

    def __init__(self, encoder, batches):
        self.encoder, self.batches = encoder, batches

    def is_set(self):
        return len(self.encoder.batches) >= self.batches


def test_a_worker_that_is_cancelled_beforehand_encodes_nothing(root):
    encoder = FakeEncoder()
    bench = Bench(root, captions("a"), encoder)
    with pytest.raises(Incomplete):
        bench.work(cancel=AfterSome(encoder, 0))
    assert encoder.encoded == []


def test_a_cancelled_worker_publishes_what_it_has_encoded(root):
    encoder = FakeEncoder(limit=4)
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    with pytest.raises(Incomplete, match="goes on from there"):
        bench.work(cancel=AfterSome(encoder, 3))
    assert len(encoder.encoded) == 12
    assert len(bench.present()) == 12
    again = FakeEncoder()
    bench.work(encoders=[again])
    assert sorted(again.encoded + encoder.encoded) == sorted(map(str, range(40)))


def test_an_idle_worker_can_be_cancelled(root):
    bench = Bench(root, captions("a"), FakeEncoder())
    idle = FakeEncoder()
    polls = []

    class Soon:
        def is_set(self):
            polls.append(1)
            return len(polls) > 5

    with bench.worker() as living:
        living._claiming.take(bench.opened, 0)
        with pytest.raises(Incomplete):
            bench.work(cancel=Soon(), encoders=[idle])
    assert idle.encoded == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_interrupt_in_the_callers_encode_publishes_what_is_encoded_and_passes(root, stop, threads):
    def interrupt(items):
        if len(encoder.batches) == 3:
            raise stop

    before = threading.active_count()
    encoder = FakeEncoder(limit=4, before_encode=interrupt)
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    with pytest.raises(stop) as caught:
        bench.work(threads=threads)
    assert caught.value.__traceback__ is not None  # its frames still hold what they held, and yet no thread is left
    assert threading.active_count() == before
    assert len(bench.present()) == 12
    again = FakeEncoder()
    bench.work(encoders=[again])
    assert sorted(again.encoded + encoder.encoded) == sorted(map(str, range(40)))


def test_progress_is_told_with_what_is_published(root):
    told = []
    bench = Bench(root, captions(*map(str, range(100))), FakeEncoder())
    bench.work(on_progress=told.append)
    assert [one["encoded"] for one in told] == sorted(one["encoded"] for one in told)
    assert (told[-1]["encoded"], told[-1]["reused"], told[-1]["failed"]) == (100, 0, 0)


def test_no_thread_outlives_a_worker(root):
    before = threading.active_count()
    Bench(root, captions(*map(str, range(100))), FakeEncoder()).work(threads=4)
    assert threading.active_count() == before


def test_an_error_of_a_reading_thread_reaches_the_caller(root):
    class Broken(FakeEncoder):
        def prepare(self, resolved):
            raise RuntimeError("a fault in the encoder's own code")

    bench = Bench(root, captions(*map(str, range(20))), Broken())
    with pytest.raises(RuntimeError, match="own code"):
        bench.work(threads=2)
    assert list_ledgers(bench.ref.folder(bench.job.layout), 0) == frozenset()


@pytest.mark.parametrize("step", ["resolve", "prepare", "encode"])
def test_a_model_that_cannot_be_used_ends_the_run_and_fails_no_unit(root, step):
    encoder = FakeEncoder()

    def refuse(*_arguments):
        raise BadInput("cannot load vae")

    setattr(encoder, step, refuse)
    bench = Bench(root, captions("a", "b", "c"), encoder)
    with pytest.raises(BadInput, match="cannot load vae"):
        bench.work()
    assert bench.outcomes() == {}
