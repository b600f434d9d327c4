"""Whole jobs in which units kill, ranks are paused, fail or wait: what the pass makes of it, and what it costs."""

import os
import signal
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.core.errors import EncodeFailed, Incomplete
from cachestore.files.paths import Layout
from cachestore.jobs.run.claiming import STUCK_SECONDS
from cachestore.jobs.run.pass_loop import _end_round
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.passes import join_pass, list_rounds, publish_done
from cachestore.jobs.share.workers import SILENT_SECONDS, Heartbeat, Watch, host_name
from cachestore.store.read.snapshot import load_snapshot
from tests import fakes
from tests.fakes import Clock, FakeEncoder, Gate, adds_up, captions, encode, names, tells_of

pytestmark = pytest.mark.processes


def fill_with(root, *items, function=encode, **options):
    with cs.open(root, mode="a") as store:
        return cs.fill(store, [(cs.key(name), name) for name in items], function, **options)


# Units that kill


def test_of_four_ranks_two_die_of_a_unit_that_kills_and_the_others_finish_without_it(root, zygote):
    jobs = [{"store": str(root), "fill": names(200), "options": {"rank": rank, "world_size": 4}} for rank in range(4)]
    zygote.begin(*jobs, **{fakes.POISON: "name 77", "CACHESTORE_LAUNCH": "one launch"})
    ended = zygote.end()
    assert sorted(code for code, _report in ended) == [-signal.SIGSEGV, -signal.SIGSEGV, 0, 0]
    reports = [report for _code, report in ended if report]
    for report in reports:
        assert (report["complete"], report["wanted"], report["encoded"], report["failed"]) == (False, 200, 199, 1)
        [failure] = report["failures"]
        assert failure["reason"].startswith("two workers died encoding it: pid ")
        assert failure["reason"].count(host_name()) == 2
    with cs.open(root) as store:
        assert set(store.keys()) == {cs.key(name) for name in names(200)} - {cs.key("name 77")}
    zygote.log()
    [(code, report)] = zygote.run({"store": str(root), "fill": names(200)})
    assert (code, report["complete"], report["encoded"], report["reused"]) == (0, True, 1, 199)
    assert [key for _pid, _encoder, key in zygote.log()] == [str(cs.key("name 77"))]
    assert verify(root).ok


def test_a_rank_that_is_started_again_each_time_it_dies_ends_the_third_time(root, zygote):
    """As under a launcher that starts the whole job again: each start is a launch of its own, and joins the pass."""
    one = {"store": str(root), "fill": names(40)}
    codes, report = [], None
    for _start in range(3):
        [(code, report)] = zygote.run(dict(one), **{fakes.POISON: "name 7"})
        codes.append(code)
    assert codes == [-signal.SIGSEGV, -signal.SIGSEGV, 0]
    assert (report["encoded"], report["failed"], report["missing"]) == (39, 1, 0)
    [(code, report)] = zygote.run(one)
    assert (report["complete"], report["encoded"], report["reused"]) == (True, 1, 39)


# Pauses


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_rank_that_is_paused_until_others_have_done_its_work_adds_nothing_wrong_when_it_wakes(root, zygote, tmp_path, monkeypatch):
    gate = Gate(tmp_path / "gate")
    zygote.begin({"store": str(root), "fill": names(5), "environment": {fakes.GATE: str(gate.folder)}}, CACHESTORE_LAUNCH="one launch")
    monkeypatch.setenv("CACHESTORE_LAUNCH", "one launch")
    monkeypatch.setattr("cachestore.jobs.share.workers.SLOW_SECONDS", 0.1)
    monkeypatch.setattr("cachestore.jobs.share.workers.FIRST_BATCH_SECONDS", 0.01)
    with stopped(gate.wait()):
        report = fill_with(root, *names(5))
    assert (report.complete, report.encoded, report.encoded_here) == (True, 5, 5)
    gate.open()
    [(code, woken)] = zygote.end()
    assert (code, woken["complete"], woken["encoded"]) == (0, True, 5)
    assert not list(root.glob("plans/*/*/attempts")), "it was slow, not dead"
    assert verify(root).ok
    with cs.open(root) as store:
        assert set(store.keys()) == {cs.key(name) for name in names(5)}


# Waiting for who reconciles


class Closing:
    """A pass whose only round is done, and a worker that would reconcile it, by a clock that sleeping moves."""

    def __init__(self, root, sleep):
        self.job, self.clock = fakes.job(root, captions("a"), [FakeEncoder()], rank=1, world=2), Clock()
        self.ref = fakes.open_pass(self.job)
        self.sleep = sleep

    def close(self, **options):
        job = replace(self.job, **options)
        with (
            self.heartbeat() as heartbeat,
            closing(Worker(job, self.ref, heartbeat, clock=self.clock, sleep=lambda _seconds: self.sleep(self))) as worker,
        ):
            return _end_round(self.job, self.ref, fakes.reconciler(self.job), worker, 0)

    def heartbeat(self):
        return Heartbeat(self.job.layout, self.job.plan.name, 1, "launch", 0, 2, clock=self.clock)

    def claim(self, worker):
        folder = self.ref.folder(self.job.layout)
        assert Claims(self.job.layout, folder, worker, Watch(self.job.layout)).take(0, 1, range(1))


def test_waiting_for_who_reconciles_lasts_as_long_as_he_moves(root):
    def sleep(one):
        one.clock.sleep(100)
        other.rise()
        if one.clock.now > 1000 + 3 * STUCK_SECONDS:
            publish_done(one.job.layout, one.ref, fakes.ending(one.ref.plan), ["launch"])

    closing_one = Closing(root, sleep)
    with closing_one.heartbeat() as other:
        closing_one.claim(other.worker)
        assert closing_one.close().report["complete"]


def test_waiting_for_who_reconciles_ends_when_nothing_moves_and_says_for_whom(root, monkeypatch):
    monkeypatch.setattr("cachestore.jobs.share.claims.Claims.take", lambda *_arguments, **_options: None)
    closing_one = Closing(root, lambda one: one.clock.sleep(30))
    with closing_one.heartbeat() as other:
        monkeypatch.undo()
        closing_one.claim(other.worker)
        monkeypatch.setattr("cachestore.jobs.share.claims.Claims.take", lambda *_arguments, **_options: None)
        with pytest.raises(Incomplete, match="no progress for 30 minutes") as ended:
            closing_one.close()
    assert f"the check at the end held by rank 0, pid {os.getpid()} on {host_name()}, last heartbeat" in str(ended.value)
    assert closing_one.clock.now < 1000 + STUCK_SECONDS + 2 * SILENT_SECONDS


def test_waiting_for_who_reconciles_can_be_cancelled(root):
    class Soon:
        def is_set(self):
            return closing_one.clock.now > 1100

    closing_one = Closing(root, lambda one: one.clock.sleep(30))
    with closing_one.heartbeat() as other:
        closing_one.claim(other.worker)
        with pytest.raises(Incomplete, match="stopped on request"):
            closing_one.close(cancel=Soon())


def test_the_reconciling_of_a_silent_worker_is_taken_over(root):
    closing_one = Closing(root, lambda one: one.clock.sleep(30))
    with closing_one.heartbeat() as other:
        closing_one.claim(other.worker)
        assert closing_one.close() is None, "the only unit is missing: another round"
    assert list_rounds(join_pass(closing_one.job.layout, closing_one.job.plan.name, "launch").folder(closing_one.job.layout)) == [0, 1]


# Failures


TRANSIENT = [OSError("gone for now"), MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")]


@pytest.mark.parametrize("error", TRANSIENT)
def test_what_fails_for_now_is_tried_twice_more(root, error):
    tried = Counter()

    def fail(items):
        tried.update(items)
        if "b" in items or ("a" in items and tried["a"] < 3):
            raise error

    report = fakes.run(root, captions("a", "b"), FakeEncoder(limit=1, before_encode=fail))
    assert tried == {"a": 3, "b": 3}
    assert (report.encoded, report.failed, report.missing) == (1, 1, 0)
    assert adds_up(report)


@pytest.mark.parametrize("error", [ValueError("odd"), EncodeFailed("refused"), RuntimeError("a fault")])
def test_what_fails_for_good_is_tried_once_in_a_pass_and_again_in_the_next(root, error):
    tried = []

    def fail(items):
        tried.extend(items)
        raise error

    for passes in (1, 2):
        assert fakes.run(root, captions("a"), FakeEncoder(before_encode=fail)).failed == 1
        assert tried == ["a"] * passes


def refuses_some(batch):
    if any(item.startswith("bad") for _key, item in batch):
        raise ValueError("no value for it")
    return encode(batch)


@pytest.mark.parametrize("allowed", [2, "40%"])
def test_failures_that_are_allowed_leave_a_report_complete_also_when_it_is_strict(root, allowed):
    items = ["a", "b", "c", "bad one", "bad two"]
    report = fill_with(root, *items, function=refuses_some, max_failures=allowed, strict=True)
    assert (report.complete, report.failed, report.encoded) == (True, 2, 3)


@pytest.mark.parametrize("allowed", [1, "39%", "0%"])
def test_one_failure_more_than_is_allowed_is_one_too_many(root, allowed):
    items = ["a", "b", "c", "bad one", "bad two"]
    assert not fill_with(root, *items, function=refuses_some, max_failures=allowed).complete
    with pytest.raises(EncodeFailed, check=tells_of("2 of 5")):
        fill_with(root, *items, function=refuses_some, max_failures=allowed, strict=True)
    with closing(load_snapshot(Layout(root))) as snapshot:
        assert len(list(snapshot.keys())) == 3, "strict loses nothing that was made"


def test_an_interrupted_fill_keeps_what_it_made_and_the_next_makes_the_rest(root):
    made = []

    def interrupted(batch):
        if len(made) >= 20:
            raise KeyboardInterrupt
        made.extend(item for _key, item in batch)
        return encode(batch)

    with pytest.raises(KeyboardInterrupt):
        fill_with(root, *names(50), function=interrupted, batch_size=10)
    with closing(load_snapshot(Layout(root))) as snapshot:
        assert len(list(snapshot.keys())) == 20
    report = fill_with(root, *names(50))
    assert (report.complete, report.encoded, report.encoded_here) == (True, 50, 30)
