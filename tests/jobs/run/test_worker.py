"""One worker's part of a pass: claims, batches, failures, ledgers."""

import os

import pytest

from cachestore.core.errors import BadInput, Incomplete
from cachestore.files.paths import ClaimName
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.ledgers import list_ledgers
from cachestore.jobs.share.workers import Watch, host_name, read_heartbeats
from tests import fakes
from tests.fakes import Clock, FakeEncoder, Pictures, captions, pictures
from tests.jobs.bench import AfterSome, Bench, results
from tests.leaks import held

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
    heartbeat = bench.work(threads=threads)
    outcomes = bench.outcomes()
    assert sorted(outcomes) == list(range(150))
    assert {outcome.result for outcome in outcomes.values()} == {"made"}
    assert bench.present() == {outcome.key for outcome in outcomes.values()}
    assert (heartbeat.encoded, heartbeat.reused, heartbeat.failed) == (150, 0, 0)


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


def test_a_heartbeat_tells_how_busy_each_stage_was(root):
    clock = Clock()
    encoder = FakeEncoder(before_encode=lambda items: clock.sleep(5))
    bench = Bench(root, captions("a", "b"), encoder)
    bench.work(clock=clock)
    (heartbeat,) = read_heartbeats(bench.job.layout)
    assert heartbeat.stages["encode"] == (5.0, 0.0)
    assert heartbeat.stages["prepare"] == (0.0, 5.0)


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
    indices = {item: outcome.unit for item, outcome in bench.by_item().items()}
    assert sorted(named) == sorted([(item, [index]) for item, index in indices.items()] * 2)
    assert {len(batch) for batch in encoder.batches} == {1}
    assert set(results(bench).values()) == {"made"}
    assert bench.attempts() == {}


@pytest.mark.parametrize("threads", [0, 2])
def test_a_unit_that_two_workers_died_on_is_a_failure_and_not_run_again(root, threads):
    bench = Bench(root, captions(*map(str, range(9))), FakeEncoder())
    deadly = bench.opened.partition(0, bench.killed()[0][1])[0]
    assert len(bench.killed(on=deadly)) == 9
    encoder = FakeEncoder()
    heartbeat = bench.work(encoders=[encoder], threads=threads)
    outcomes = bench.outcomes()
    assert {index for index, outcome in outcomes.items() if outcome.result == "failed"} == {deadly}
    assert not outcomes[deadly].is_transient
    here = f"pid {os.getpid()} on {host_name()}"
    assert outcomes[deadly].reason.startswith(f"two workers died encoding it: {here} with it among others, {here} with it alone")
    assert sorted(encoder.encoded) == sorted(item for item, outcome in bench.by_item().items() if outcome.unit != deadly)
    assert (heartbeat.encoded, heartbeat.failed) == (8, 1)


def test_a_unit_that_the_only_proved_dead_was_on_alone_is_a_failure_too(root):
    """The first one's heartbeat is gone, so its death is no longer proved."""
    bench = Bench(root, captions("a"), FakeEncoder())
    bench.killed()
    bench.killed(on=0)
    first = bench.job.layout.worker(
        Claims(bench.job.layout, bench.ref.folder(bench.job.layout), "", Watch(bench.job.layout)).holder(ClaimName(0, 0, 0, 0, 0))
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
            holder.heartbeat.batch_took(0.1)
            holder.heartbeat.write()
        if how == "unreadable":
            assert len(slots) == 3
            for path in holder.claims.folder.claims.iterdir():
                path.write_bytes(b"?")
        if how == "own":
            holder.do_round(bench.opened)
        elif how != "ended":
            bench.work(encoders=[encoder], clock=clock, sleep=lambda _seconds: clock.sleep(200))
    if how == "ended":
        bench.work(encoders=[encoder])
    assert sorted(encoder.encoded) == ["a", "b", "c"]
    assert set(results(bench).values()) == {"made"}
    assert {path.name for path in holder.attempts.folder.attempts.iterdir()} <= {f"{holder.heartbeat.worker}.0.0"}


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


# Stopping


def test_a_worker_that_is_cancelled_beforehand_encodes_nothing(root):
    encoder = FakeEncoder()
    bench = Bench(root, captions("a"), encoder)
    with pytest.raises(Incomplete):
        bench.work(cancel=AfterSome(encoder, 0))
    assert encoder.encoded == []


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


def test_no_thread_outlives_a_worker(root):
    before = held()
    Bench(root, captions(*map(str, range(100))), FakeEncoder()).work(threads=4)
    assert not held() - before


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
