"""How far a pass is, seen from outside."""

from contextlib import closing

import pytest

from cachestore.storage.commit import create_store
from cachestore.storage.snapshot import load_snapshot
from cachestore.work.passes import PassRef, join_pass
from cachestore.work.progress import all_status, pass_status
from cachestore.work.workers import Beat
from cachestore.worker import Task, Worker
from tests import fakes
from tests.fakes import FakeEncoder, captions


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


def begun(root, samples, encoder):
    """A pass that is open, with nothing done."""
    one = fakes.job(root, samples, [encoder])
    ref = join_pass(one.layout, one.plan.name, one.launch)
    with closing(load_snapshot(one.layout)) as snapshot:
        fakes.reconciler(one).open_pass(snapshot)
    return one, ref


def test_a_store_in_which_nothing_was_ever_begun_has_no_status(root):
    assert all_status(create_store(root)) == []


def test_a_plan_without_a_pass_has_no_status(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    assert all_status(one.layout) == []


def test_a_pass_that_is_not_begun_has_no_partitions(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    ref = join_pass(one.layout, one.plan.name, "launch")
    status = pass_status(one.layout, ref)
    assert (status.partitions, status.finished, status.claimed, status.total, status.complete) == (0, 0, 0, 2, False)


def test_an_open_pass_says_what_is_finished_and_what_is_claimed(root):
    one, ref = begun(root, captions("a", "b", "c"), FakeEncoder())
    with Beat(one.layout, one.plan.name, 1, "launch", 3, 4) as beat:
        worker = Worker(Task(one.layout, one.plan, ref, one.encoders, one.source, 0, 1, "launch"), beat)
        for partition in range(2):
            worker.claims.take(0, (0, partition))
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
