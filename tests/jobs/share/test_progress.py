"""How far a pass is, seen from outside."""

import os
from contextlib import closing

import pytest

from cachestore.core.errors import FormatError
from cachestore.files.records import decode_record, encode_record
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share import progress
from cachestore.jobs.share.passes import PassRef, Round, join_pass, publish_round
from cachestore.jobs.share.progress import LaunchStatus, Observer, all_status, pass_status
from cachestore.jobs.share.workers import FORMAT, VERSION, Heartbeat
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.fakes import Clock, FakeEncoder, captions, pictures


def begun(root, samples, encoder):
    one = fakes.job(root, samples, [encoder])
    ref = join_pass(one.layout, one.plan.name, one.launch)
    with closing(load_snapshot(one.layout)) as snapshot:
        fakes.reconciler(one).open_pass(snapshot)
    return one, ref


def test_a_store_in_which_nothing_was_ever_begun_has_no_status(root):
    assert all_status(create_store(root)) == []


def test_a_plan_without_a_pass_has_no_status(root):
    assert all_status(fakes.job(root, captions("a"), [FakeEncoder()]).layout) == []


def test_a_pass_that_is_not_begun_has_no_partitions(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    status = pass_status(one.layout, join_pass(one.layout, one.plan.name, "launch"))
    assert (status.partitions, status.finished, status.claimed, status.total, status.complete) == (0, 0, 0, 2, False)


def test_an_open_pass_says_what_is_finished_and_what_is_claimed(root):
    one, ref = begun(root, captions("a", "b", "c"), FakeEncoder())
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 3, 4) as heartbeat:
        worker = Worker(one, ref, heartbeat)
        for partition in range(2):
            worker.claims.take(0, 0, range(partition, partition + 1))
        status = pass_status(one.layout, ref)
        worker.close()
        [rank] = status.ranks
    assert (status.partitions, status.finished, status.claimed, status.complete) == (3, 0, 2, False)
    assert (rank.rank, rank.alive, rank.done, rank.phase) == (3, True, 0, "planning")


def test_an_ended_pass_says_what_its_report_says(root):
    one = fakes.job(root, captions("a", "b", "a"), [FakeEncoder()])
    fakes.run_pass(one)
    [status] = all_status(one.layout)
    assert status.complete
    assert (status.reused, status.encoded, status.failed, status.total) == (0, 2, 0, 2)
    assert [rank.alive for rank in status.ranks] == [False]


def test_units_that_were_there_before_the_pass_count_as_reused_at_once(root):
    samples = captions("a", "b", "c")
    fakes.run(root, samples[:2], FakeEncoder())
    one, ref = begun(root, samples, FakeEncoder())
    status = pass_status(one.layout, ref)
    assert (status.units, status.reused, status.total) == (1, 2, 3)


def test_only_the_newest_pass_of_a_plan_is_shown(root):
    for _ in range(3):
        fakes.run(root, captions("a"), FakeEncoder())
    [status] = all_status(create_store(root))
    assert status.number == 3


def test_the_json_names_the_pass_as_the_contract_does(root):
    fakes.run(root, captions("a"), FakeEncoder())
    body = all_status(create_store(root))[0].as_json()
    assert {"plan", "pass", "partitions", "finished", "claimed", "encoded", "failed", "complete", "ranks"} <= set(body)
    assert {"rank", "host", "pid", "rate", "done", "beat_age_seconds"} <= set(body["ranks"][0])


def test_a_damaged_plan_is_passed_over(root):
    fakes.run(root, captions("a"), FakeEncoder())
    fakes.run(root, captions("b"), FakeEncoder())
    layout = create_store(root)
    path = next(layout.plans.glob("*/plan.safetensors"))
    path.chmod(0o644)
    path.write_bytes(b"?")
    assert len(all_status(layout)) == 1


def test_a_pass_of_another_plan_is_not_mixed_in(root):
    fakes.run(root, captions("a"), FakeEncoder())
    one, ref = begun(root, captions("b"), FakeEncoder())
    assert pass_status(one.layout, PassRef(one.plan.name, ref.number)).ranks == ()


# Looking again


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def three(root):
    """(job, pass, observer) of three units of which nothing is done."""
    return begun(root, captions("a", "b", "c"), FakeEncoder())


def heartbeat_of(one, **options):
    return Heartbeat(one.layout, one.plan.name, 1, options.get("launch", "launch"), options.get("rank", 0), 2)


def show(one, heartbeat, **changes):
    path = one.layout.worker(heartbeat.worker)
    path.write_bytes(encode_record(FORMAT, VERSION, decode_record(FORMAT, VERSION, path.read_bytes(), where=path) | changes))


def test_the_rows_of_a_plan_are_never_read_and_its_header_and_rounds_once(three, monkeypatch):
    one, ref = three
    observer = Observer(one.layout)
    assert observer.status(ref).total == 3
    monkeypatch.setattr("cachestore.jobs.share.plan.read_table", None)
    monkeypatch.setattr(progress, "read_outline", None)
    monkeypatch.setattr(progress, "read_round_record", None)
    assert observer.status(ref).units == 3


def test_the_heartbeats_of_those_that_ended_are_read_once(three, monkeypatch):
    one, ref = three
    with heartbeat_of(one) as heartbeat:
        heartbeat.encoded = 2
    observer = Observer(one.layout)
    observer.status(ref)
    monkeypatch.setattr(progress, "read_heartbeat", None)
    assert observer.status(ref).encoded == 2


def test_a_count_that_stands_still_is_silent_by_the_observers_own_clock(three, clock):
    one, ref = three
    observer = Observer(one.layout, clock)
    with heartbeat_of(one) as heartbeat:
        show(one, heartbeat, at=-1e6)
        assert [rank.rank for rank in observer.status(ref).silent] == [0], "at one look there is only the age of the heartbeat"
        clock.now += 29
        assert observer.status(ref).silent == ()
        clock.now += 2
        assert [rank.still_seconds for rank in observer.status(ref).silent] == [31.0]
        heartbeat.count += 1
        heartbeat.write()
        assert observer.status(ref).silent == ()


def test_who_holds_an_open_claim_is_silent_and_who_holds_none_waits(three, clock):
    one, ref = three
    observer = Observer(one.layout, clock)
    with heartbeat_of(one) as busy, heartbeat_of(one, rank=1) as idle:
        worker = Worker(one, ref, busy)
        worker.claims.take(0, 0, range(1))
        busy.rise(phase="working")
        idle.rise(phase="working")
        assert {rank.phase for rank in observer.status(ref).ranks} == {"working"}
        clock.now += 31
        status = observer.status(ref)
        worker.close()
    assert {rank.rank: rank.phase for rank in status.ranks} == {0: "working", 1: "waiting"}
    assert [rank.rank for rank in status.silent] == [0]


def test_a_rate_falls_while_a_worker_stands_still(three, clock):
    one, ref = three
    observer = Observer(one.layout, clock)
    with heartbeat_of(one) as heartbeat:
        show(one, heartbeat, encoded=2, lived=1.0)
        observer.status(ref)
        assert observer.status(ref).ranks[0].rate == 2.0
        clock.now += 3
        assert observer.status(ref).ranks[0].rate == 0.5


@pytest.mark.parametrize(
    ("heartbeats", "number", "expected"),
    [
        ([], 0, (0, 0, 0)),
        ([(1, 1, 1)], 0, (1, 1, 1)),
        ([(0, 2, 0), (0, 2, 0)], 0, (0, 3, 0)),  # a slow claim was done over
        ([(0, 2, 1), (0, 0, 1)], 1, (0, 2, 1)),  # a failure was tried again
        ([(3, 0, 0), (1, 0, 0)], 0, (3, 0, 0)),
        ([(0, 0, 4)], 0, (0, 0, 3)),
    ],
)
def test_work_done_twice_counts_once(three, heartbeats, number, expected):
    one, ref = three
    for done in range(number):
        publish_round(one.layout, ref, one.plan, Round(done + 1, ([0],), "launch", 0.0))
    for reused, encoded, failed in heartbeats:
        with heartbeat_of(one) as heartbeat:
            heartbeat.reused, heartbeat.encoded, heartbeat.failed = reused, encoded, failed
    status = pass_status(one.layout, ref)
    assert (status.reused, status.encoded, status.failed) == expected
    assert (status.round, status.units) == (number, 1 if number else 3)


def test_processes_are_found_by_their_numbers_and_not_by_those_of_others(three):
    one, _ref = three
    observer = Observer(one.layout)
    nothing = LaunchStatus()
    assert observer.status_of_processes([1]) == nothing
    with heartbeat_of(one) as heartbeat:
        show(one, heartbeat, pid=77)
        assert observer.status_of_processes([1]) == observer.status_of_processes([]) == nothing
        seen = observer.status_of_processes([1, 77])
        assert (seen.status.plan, seen.launch, [rank.pid for rank in seen.ranks]) == (one.plan.name, "launch", [77])
        show(one, heartbeat, pid=77, lived=60.0)
        assert observer.status_of_processes([77]) == nothing, "another process had that number before"
        show(one, heartbeat, pid=77, host="elsewhere")
        assert observer.status_of_processes([77]) == nothing


def test_processes_say_what_they_do_before_there_is_a_pass(layout):
    observer = Observer(layout)
    with Heartbeat(layout, "", 0, "launch", 0, 1) as heartbeat:
        heartbeat.show(doing="listing photos/")
        seen = observer.status_of_processes([os.getpid()])
        assert (seen.status, seen.launch, [rank.doing for rank in seen.ranks]) == (None, "", ["listing photos/"])
    assert [rank.phase for rank in observer.status_of_processes([os.getpid()]).ranks] == ["ended"]


def test_a_worker_that_joins_the_pass_during_a_look_is_seen_once(three, monkeypatch):
    one, _ref = three
    read = Observer._status_or_none

    def join_first(observer, ref):
        late.join(ref.plan, ref.number, "launch")
        return read(observer, ref)

    monkeypatch.setattr(Observer, "_status_or_none", join_first)
    with heartbeat_of(one, rank=0), Heartbeat(one.layout, "", 0, "launch", 1, 2) as late:
        seen = Observer(one.layout).status_of_processes([os.getpid()])
    assert {rank.rank for rank in seen.ranks} == {0, 1}, "in either order if they started within a millisecond"


def test_each_encoder_has_its_own_counts_and_only_running_workers_have_units_that_are_not_published(root):
    one = fakes.job(root, pictures("a", "b", "c"), [FakeEncoder(), FakeEncoder("latents")])
    ref = fakes.open_pass(one)
    with heartbeat_of(one) as gone:
        gone.has_finished("text", units=2, unpublished=1)
    with heartbeat_of(one) as running:
        running.has_finished("latents", units=1, unpublished=9)
        running.write()
        found = [(it.encoder, it.total, it.done, it.unpublished) for it in pass_status(one.layout, ref).encoders]
    assert found == [("text", 3, 2, 0), ("latents", 3, 1, 2)]


def test_a_launch_can_be_left_out(three):
    one, ref = three
    for launch, encoded in (("before", 2), ("mine", 1)):
        with heartbeat_of(one, launch=launch) as heartbeat:
            heartbeat.encoded = encoded
    assert pass_status(one.layout, ref).encoded == 3
    assert pass_status(one.layout, ref, without="mine").encoded == 2


def test_a_worker_on_another_machine_may_live_and_one_not_heard_of_for_long_does_not_count(three, clock):
    one, ref = three
    observer = Observer(one.layout, clock)
    with heartbeat_of(one) as heartbeat:
        show(one, heartbeat, host="elsewhere")
        [rank] = observer.status(ref).at_work
        assert rank.alive is None
        clock.now += 181
        assert observer.status(ref).at_work == ()


def test_the_counts_of_one_worker_become_those_of_all_at_most_once_a_second(three, clock):
    one, ref = three
    reported = []
    tell = Observer(one.layout, clock).following(reported.append)
    with heartbeat_of(one) as heartbeat:
        heartbeat.encoded = 2
        heartbeat.write()
        tell({"plan": ref.plan, "pass": 1, "encoded": 0})
        tell({"plan": ref.plan, "pass": 1, "encoded": 0})
        clock.now += 1
        tell({"plan": "0" * 32, "pass": 1})
    counts = {"plan": ref.plan, "pass": 1, "reused": 0, "encoded": 2, "failed": 0, "total": 3}
    assert [one.counts() for one in reported] == [{**counts, "done": 2, "doing": "planning"}]


def test_a_round_of_other_recipes_is_refused_and_has_no_status(three):
    one, ref = three
    body = {"plan": ref.plan, "pass": 1, "round": 1, "units": [None, None], "launch": "", "started": 0.0, "generation": None, "workers": 1}
    ref.folder(one.layout).round(1).write_bytes(encode_record("cachestore-round", 1, body))
    with pytest.raises(FormatError, match="2 recipes, but its plan has 1"):
        pass_status(one.layout, ref)
    assert all_status(one.layout) == []
