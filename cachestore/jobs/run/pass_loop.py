"""The loop of every job: join a pass, work on its rounds until it has ended, return its report.

All processes that run it on the same store and plan share the work, no matter how and when they were started.
"""

from contextlib import closing, nullcontext
from dataclasses import replace

from cachestore.core.errors import Incomplete
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.jobs.run.claiming import Patience
from cachestore.jobs.run.reconcile import Reconciler, key_without_reading
from cachestore.jobs.run.task import Job
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.agreement import wait_for_rank_0
from cachestore.jobs.share.invocations import count_invocation, invocation_of, numbered
from cachestore.jobs.share.passes import Done, PassRef, join_pass, list_rounds, read_done, read_round
from cachestore.jobs.share.report import Report
from cachestore.jobs.share.workers import Heartbeat, Life
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.commit import publish_recipe


def run_pass(job: Job) -> Report:
    """Take part in a pass until it has ended. Every process that takes part returns the same report.

    Raises Incomplete if cancelled or stuck, WriteFailed if writing fails, Superseded if another run has listed the source later and
    published the data set. What is published stays, and a later call continues.
    """
    own = Heartbeat(job.layout, "", 0, job.launch, job.rank_info.rank, job.rank_info.world_size)
    context = own if job.heartbeat is None else nullcontext(job.heartbeat)
    with noticing_its_end(job.layout), context as heartbeat:
        for recipe in job.plan.recipes:
            publish_recipe(job.layout, recipe)
        report = _take_part(job, heartbeat)
    check_for_reading(job.layout)  # if another store took its place, the report may be of a pass there over the same plan
    return report


def _take_part(job: Job, heartbeat: Heartbeat) -> Report:
    invocation = invocation_of(job.layout, job.plan.name, job.rank_info)
    job = replace(job, launch=numbered(job.launch, invocation))
    ref = join_pass(job.layout, job.plan.name, job.launch)
    if (done := read_done(job.layout, ref)) is not None:  # others of this launch were faster
        heartbeat.launch = job.launch
        if job.on_open:
            job.on_open()
        count_invocation(invocation)
        return Report.from_json(done.report, encoded_here=0)
    heartbeat.join(ref.plan, ref.number, job.launch)
    reconciler = Reconciler(job, ref, key_without_reading(job.encoders), heartbeat.rise, heartbeat.pass_seconds)
    with closing(Worker(job, ref, heartbeat)) as worker:
        heartbeat.show(doing="checking what is in the store")
        if heartbeat.rank not in {0, None}:
            heartbeat.show(doing="waiting for rank 0")
            wait_for_rank_0(job.layout, heartbeat, lambda: bool(list_rounds(ref.folder(job.layout))))
        reconciler.open_pass(worker.snapshot)
        if job.on_open:
            job.on_open()
        heartbeat.rise(phase="working", doing="looking for work")
        while (done := read_done(job.layout, ref)) is None:
            opened = read_round(job.layout, ref, job.plan, _newest_round(job, ref))
            worker.do_round(opened)
            if (done := _close(job, ref, reconciler, worker, opened.number)) is not None:
                break
    count_invocation(invocation)
    return Report.from_json(done.report, encoded_here=heartbeat.encoded)


def _newest_round(job: Job, ref: PassRef) -> int:
    """Return the number of the newest round. Raises ReadFailed if the store is gone, Incomplete if only the pass is gone."""
    rounds = list_rounds(ref.folder(job.layout))
    if not rounds:
        check_for_reading(job.layout)
        raise Incomplete(f"pass {ref.number} over the plan {ref.plan[:8]} was removed meanwhile; run the same command again")
    return rounds[-1]


def _close(job: Job, ref: PassRef, reconciler: Reconciler, worker: Worker, number: int) -> Done | None:
    """Reconcile a round, or wait for the worker that does: rank 0 begins at once, others a moment later or when that worker has died.

    Return None if another round was opened. Raises Incomplete if cancelled or if no progress is made any more.
    """
    slot = (len(job.plan.recipes), 0)
    is_first = job.rank_info.rank in (0, None)
    waits = Patience()

    def is_closed_or_claimed() -> bool:
        return read_done(job.layout, ref) is not None or _newest_round(job, ref) > number or slot in worker.claims.newest(number)

    while True:
        if (done := read_done(job.layout, ref)) is not None:
            return done
        if _newest_round(job, ref) > number:
            return None
        claim = worker.claims.newest(number).get(slot)
        is_free = is_first if claim is None else worker.claims.life(claim) is not Life.LIVE
        if is_free and worker.claims.take(number, slot[0], range(1), after=claim):
            worker.heartbeat.rise(phase="reconciling", doing="checking and writing the data set")
            with closing(load_snapshot(job.layout, earlier=worker.snapshot, for_planning=True)) as snapshot:
                return reconciler.close_round(read_round(job.layout, ref, job.plan, number), snapshot)
        if not is_first:  # rank 0 may still be printing its forecast, and has in memory what reconciling needs
            is_first = True
            wait_for_rank_0(job.layout, worker.heartbeat, is_closed_or_claimed)
        worker.wait(waits, None, {slot: claim} if claim else {})
