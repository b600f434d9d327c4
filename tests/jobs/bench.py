"""Open passes, and workers on them."""

from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from cachestore.core.ranks import RankInfo
from cachestore.core.samples import Sample
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.attempts import Attempts
from cachestore.jobs.share.ledgers import Outcome, read_ledgers
from cachestore.jobs.share.passes import join_pass, read_round
from cachestore.jobs.share.workers import Heartbeat
from cachestore.store.read.snapshot import load_snapshot
from tests import fakes
from tests.fakes import Clock, FakeEncoder


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
        job = replace(self.job, rank_info=RankInfo(rank, world), **options)
        heartbeat = Heartbeat(self.job.layout, self.job.plan.name, 1, "launch", rank, world)
        with heartbeat, closing(Worker(job, self.ref, heartbeat, clock=clock, sleep=sleep)) as worker:
            yield worker

    def work(self, **options):
        with self.worker(**options) as worker:
            worker.do_round(self.opened)
            return worker.heartbeat

    def do(self, worker, slots):
        """Let a worker do partitions that it took."""
        worker._do_group(worker._states[0], worker._claiming.group_of(self.opened, slots))

    def killed(self, *, on=None):
        """A worker that took what it could and was killed: its lock yields and its heartbeat names no end; `on` is the unit it was on."""
        heartbeat = Heartbeat(self.job.layout, self.job.plan.name, 1, "launch", 0, 1)
        heartbeat.__enter__()
        with closing(Worker(self.job, self.ref, heartbeat)) as worker:
            slots = worker._claiming.take(self.opened, 0)
            if on is not None:
                worker.attempts.begin(on)
        heartbeat._lock.release()
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
        return {next(iter(plan.unit(index).request.values())): outcome for index, outcome in self.outcomes().items()}

    def present(self):
        with closing(load_snapshot(self.job.layout)) as snapshot:
            return set(snapshot.keys())


def results(bench):
    return {item: outcome.result for item, outcome in bench.by_item().items()}


class AfterSome:
    """A cancel token that is set once an encoder has made so many batches."""

    def __init__(self, encoder, batches):
        self.encoder, self.batches = encoder, batches

    def is_set(self):
        return len(self.encoder.batches) >= self.batches


def failed(unit=0, *, is_transient=False):
    return Outcome(unit, "failed", reason="it failed", is_transient=is_transient)


def worked_on(one, number=None):
    """The units that round 0 of a pass worked on, by caption or reference."""
    reconciler = fakes.reconciler(one, number)
    opened = read_round(one.layout, reconciler.ref, one.plan, 0)
    return {next(iter(one.plan.unit(index).request.values())) for units in opened.units for index in units}


def edits(*control, caption="redder"):
    """One sample for each tuple of control images."""
    return [Sample(f"{number}", {"control": references}, (caption,)) for number, references in enumerate(control)]


def seeing():
    return FakeEncoder("text", shown="control")
