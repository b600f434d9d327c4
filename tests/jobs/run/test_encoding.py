"""Batches through the encoders and into segments: what they share, what fails, what is published when."""

import threading
import weakref

import numpy as np
import pytest

from cachestore.core.errors import BadInput, EncodeFailed, Incomplete, WriteFailed
from cachestore.core.keys import Key
from cachestore.encode.batching.unit import LOADING
from cachestore.jobs.share.choice import GROUP_UNITS
from cachestore.jobs.share.workers import read_heartbeats
from cachestore.store.write.append import Appender
from tests import fakes
from tests.fakes import Clock, FakeEncoder, Pictures, captions, pictures
from tests.jobs.bench import AfterSome, Bench, results
from tests.leaks import held


def test_batches_are_filled_across_partitions(root):
    encoder = FakeEncoder(limit=8)
    Bench(root, captions(*map(str, range(GROUP_UNITS))), encoder).work()
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
    files = {f"{n:03}.png": b"same" for n in range(3 * GROUP_UNITS)}
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
    files = {f"{n}.png": b"picture %d" % n for n in range(GROUP_UNITS)}
    encoder = Heavy("latents", limit=4, before_encode=lambda items: most.append(len(alive)))
    encoder.batches = NothingKept()
    Bench(root, pictures(*files), encoder, source=Pictures(files)).work()
    assert len(most) == GROUP_UNITS // 4
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


@pytest.mark.torch
@pytest.mark.parametrize(("threads", "beside", "held"), [(1, False, True), (0, True, False), (0, False, False)])
def test_what_an_encoder_of_precompute_made_is_held_and_what_a_caller_of_fill_made_is_copied(root, monkeypatch, threads, beside, held):
    import torch

    used: set[str] = set()
    for name in ("put", "hold"):
        real = getattr(Appender, name)
        monkeypatch.setattr(Appender, name, lambda *args, name=name, real=real: used.add(name) or real(*args))
    encoder = FakeEncoder(answer=lambda batch: {key: {"x": torch.zeros(1 << 16)} for key, _item in batch})
    bench = Bench(root, captions(*map(str, range(6))), encoder)
    bench.work(threads=threads, appends_beside=beside)
    assert used == {"hold" if held else "put"}
    assert set(results(bench).values()) == {"made"}


# Failures


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

    monkeypatch.setattr("cachestore.store.write.append.publish", full)
    with pytest.raises(WriteFailed):
        bench.work()
    assert bench.outcomes() == {}


# Signs of life


def test_a_worker_shows_that_it_loads_a_model_before_it_does_and_that_it_has_one_after(root):
    shown = []
    bench = Bench(root, captions("a", "b"), FakeEncoder())

    def look(_items):
        [heartbeat] = read_heartbeats(bench.job.layout)
        shown.append((heartbeat.phase, heartbeat.count))

    heartbeat = bench.work(encoders=[FakeEncoder(limit=1, before_encode=look)])
    assert [phase for phase, _count in shown] == ["loading", "working"]
    assert shown[1][1] > shown[0][1] > 0
    assert heartbeat.phase == "ended"


def test_a_worker_says_which_component_it_loads_and_what_it_encodes(root):
    shown = []
    bench = Bench(root, captions("a", "b"), FakeEncoder())

    def load(_items):
        LOADING.get()("text_encoder_2")
        shown.extend(heartbeat.doing for heartbeat in read_heartbeats(bench.job.layout))

    def look(items):
        shown.extend(heartbeat.doing for heartbeat in read_heartbeats(bench.job.layout)) if shown else load(items)

    bench.work(encoders=[FakeEncoder(limit=1, before_encode=look)])
    assert shown == ["loading text_encoder_2", "encoding text"]
    LOADING.get()("nothing is heard any more")


def test_failures_are_shown_with_what_they_are_of_before_their_partition_is_finished(root):
    shown = []
    source = fakes.Pictures({"bad.png": b"undecodable", "good.png": b"a"})
    bench = Bench(root, fakes.pictures("bad.png", "good.png"), FakeEncoder("latents"), source=source)

    def look(_items):
        [heartbeat] = read_heartbeats(bench.job.layout)
        shown.append((bench.job.plan.unit_count, heartbeat.failed))

    heartbeat = bench.work(encoders=[FakeEncoder("latents", before_encode=look)])
    assert (heartbeat.failures, heartbeat.failures_seen) == (["bad.png (latents): this is no picture"], 1)
    assert shown == [(2, 0)]


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_what_a_heartbeat_counts_adds_up_also_where_pictures_have_equal_bytes(root, limit):
    source = fakes.Pictures({f"{n}.png": b"picture %d" % (n % 3) for n in range(12)})
    bench = Bench(root, fakes.pictures(*source.files), FakeEncoder("latents", limit=limit), source=source)
    heartbeat = bench.work()
    assert (heartbeat.encoded, heartbeat.reused, heartbeat.failed) == (3, 9, 0)
    assert heartbeat.units == {"latents": [12, 0]}


def test_the_batch_that_loads_the_model_is_not_the_slowest(root):
    """Five times as long as loading takes nobody would do over what a hung worker holds."""
    clock, seconds = Clock(), [100.0, 2.0, 3.0]
    encoder = FakeEncoder(limit=1, before_encode=lambda _items: clock.sleep(seconds.pop(0)))
    heartbeat = Bench(root, captions("a", "b", "c"), encoder).work(clock=clock)
    assert heartbeat.slowest_batch == 3.0


# Stopping


def test_a_cancelled_worker_publishes_what_it_has_encoded(root):
    encoder = FakeEncoder(limit=4)
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    with pytest.raises(Incomplete, match="Run the same command again"):
        bench.work(cancel=AfterSome(encoder, 3))
    assert len(encoder.encoded) == 12
    assert len(bench.present()) == 12
    again = FakeEncoder()
    bench.work(encoders=[again])
    assert sorted(again.encoded + encoder.encoded) == sorted(map(str, range(40)))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_interrupt_in_the_callers_encode_publishes_what_is_encoded_and_passes(root, stop, threads):
    def interrupt(items):
        if len(encoder.batches) == 3:
            raise stop

    before = held()
    encoder = FakeEncoder(limit=4, before_encode=interrupt)
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    with pytest.raises(stop) as caught:
        bench.work(threads=threads)
    assert caught.value.__traceback__ is not None  # its frames still hold what they held, and yet no thread is left
    assert not held() - before
    assert len(bench.present()) == 12
    again = FakeEncoder()
    bench.work(encoders=[again])
    assert sorted(again.encoded + encoder.encoded) == sorted(map(str, range(40)))


@pytest.mark.parametrize("where", ["on_progress", "encode"])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_the_callers_own_functions_publishes_what_is_encoded_and_passes(root, where, threads):
    clock = Clock()

    class Wrong(BadInput):
        pass

    def on_progress(now):
        if now["encoded"] >= 4 and where == "on_progress":
            raise Wrong("as a bar that was closed")

    def before_encode(items):
        clock.sleep(100)  # so that each batch is a segment
        if len(encoder.batches) == 3 and where == "encode":
            raise Wrong("ends the run")

    encoder = FakeEncoder(limit=4, before_encode=before_encode)
    bench = Bench(root, captions(*map(str, range(40))), encoder)
    with pytest.raises(Wrong):
        bench.work(threads=threads, on_progress=on_progress, clock=clock)
    assert len(bench.present()) == len(encoder.encoded) > 4
    again = FakeEncoder()
    bench.work(encoders=[again])
    assert sorted(again.encoded + encoder.encoded) == sorted(map(str, range(40)))


def test_progress_is_reported_with_what_is_published(root):
    reported = []
    bench = Bench(root, captions(*map(str, range(100))), FakeEncoder())
    bench.work(on_progress=reported.append)
    assert [one["encoded"] for one in reported] == sorted(one["encoded"] for one in reported)
    assert (reported[-1]["encoded"], reported[-1]["reused"], reported[-1]["failed"]) == (100, 0, 0)
