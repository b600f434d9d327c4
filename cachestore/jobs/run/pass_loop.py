"""The loop of every job: join a pass, work on its rounds until it has ended, return its report. Where nothing is missing, just end it.

All processes that run it on the same store and plan share the work, no matter how and when they were started.
"""

from contextlib import closing, nullcontext
from dataclasses import replace

from cachestore.core.errors import Incomplete
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.paths import ClaimName
from cachestore.jobs.run.claiming import Patience
from cachestore.jobs.run.reconcile import Reconciler, key_without_reading
from cachestore.jobs.run.task import Job
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.agreement import wait_for_rank_0
from cachestore.jobs.share.claims import Claims, end_slot
from cachestore.jobs.share.invocations import count_invocation, invocation_of, numbered
from cachestore.jobs.share.ledgers import list_ledgers
from cachestore.jobs.share.passes import Done, PassRef, join_pass, list_rounds, read_done, read_round
from cachestore.jobs.share.report import Report
from cachestore.jobs.share.workers import Heartbeat, Life, Watch
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.commit import publish_recipe


def run_pass(job: Job) -> Report:
    """Take part in a pass until it has ended. Every process that takes part returns the same report.

    Raises Incomplete if cancelled or stuck, WriteFailed if writing fails, Superseded if another run has listed the source later and
    published the data set. What is published stays, and a later call continues.
    """
    layout = job.layout
    job = replace(job, launch=numbered(job.launch, invocation_of(layout, job.plan.name, job.rank_info)))
    own = Heartbeat(layout, "", 0, job.launch, job.rank_info.rank, job.rank_info.world_size)
    with noticing_its_end(layout), own if job.heartbeat is None else nullcontext(job.heartbeat) as heartbeat:
        ref, done = _join(job, heartbeat)
        if done is None:
            reconciler = Reconciler(job, ref, key_without_reading(job.encoders), heartbeat.rise, heartbeat.pass_seconds)
            with closing(Worker(job, ref, heartbeat)) as worker:
                heartbeat.show(doing="checking what is in the store")
                if heartbeat.rank not in {0, None}:
                    heartbeat.show(doing="waiting for rank 0")
                    wait_for_rank_0(layout, heartbeat, lambda: bool(list_rounds(ref.folder(layout))))
                reconciler.open_pass(worker.snapshot)
                if job.on_open:
                    job.on_open()
                heartbeat.rise(phase="working", doing="looking for work")
                done = read_done(layout, ref)
                while done is None:
                    opened = read_round(layout, ref, job.plan, _newest_round(job, ref))
                    worker.do_round(opened)
                    done = _end_round(job, ref, reconciler, worker, opened.number)
    return _report_of(job, done, heartbeat.encoded)


def end_complete_pass(job: Job, heartbeat: Heartbeat, reconciler: Reconciler) -> Report | None:
    """Take part in a pass in which nothing seems to be missing, by its reconciler, and return its report.

    None if something is missing after all, or while another process works on the pass: a worker then encodes it, or waits for that one.
    Encodes nothing, starts nothing, and does not wait for workers that encode; runs without torch.
    """
    layout = job.layout
    ref, done = _join(job, heartbeat)
    if done is None and heartbeat.rank not in {0, None}:
        wait_for_rank_0(layout, heartbeat, lambda: read_done(layout, ref) is not None)
    done = done or read_done(layout, ref)
    if done is None:
        if reconciler.ref != ref:  # another process has begun or ended a pass meanwhile
            reconciler = Reconciler(job, ref, key_without_reading(job.encoders), heartbeat.rise)
        reconciler.seconds = heartbeat.pass_seconds
        with closing(load_snapshot(layout, for_planning=True)) as snapshot:
            reconciler.open_pass(snapshot)
            if job.on_open:
                job.on_open()
            opened = read_round(layout, ref, job.plan, _newest_round(job, ref))
            finished = list_ledgers(ref.folder(layout), opened.number)
            partitions = ((recipe, number) for recipe in range(len(opened.units)) for number in range(opened.partition_count(recipe)))
            claims = Claims(layout, ref.folder(layout), heartbeat.worker, Watch(layout))
            claim = claims.newest(opened.number).get(end_slot(job.plan))
            if not all(slot in finished for slot in partitions) or not _take_end(claims, job, opened.number, claim):
                return None
            heartbeat.show(doing="checking and writing the data set")  # still planning, so that other ranks wait for the end
            done = reconciler.close_round(opened, snapshot)
    return None if done is None else _report_of(job, done, 0)


def _join(job: Job, heartbeat: Heartbeat) -> tuple[PassRef, Done | None]:
    """Join a pass, and show that; also return how it ended, if others of this launch were faster."""
    for recipe in job.plan.recipes:
        publish_recipe(job.layout, recipe)
    ref = join_pass(job.layout, job.plan.name, job.launch)
    done = read_done(job.layout, ref)
    if done is None:
        heartbeat.join(ref.plan, ref.number, job.launch)
    else:
        heartbeat.launch = job.launch
        if job.on_open:
            job.on_open()
    return ref, done


def _report_of(job: Job, done: Done, encoded_here: int) -> Report:
    count_invocation(invocation_of(job.layout, job.plan.name, job.rank_info))
    check_for_reading(job.layout)  # if another store took its place, the report may be of a pass there over the same plan
    return Report.from_json(done.report, encoded_here=encoded_here)


def _newest_round(job: Job, ref: PassRef) -> int:
    """Return the number of the newest round. Raises ReadFailed if the store is gone, Incomplete if only the pass is gone."""
    rounds = list_rounds(ref.folder(job.layout))
    if not rounds:
        check_for_reading(job.layout)
        raise Incomplete(f"pass {ref.number} over the plan {ref.plan[:8]} was removed meanwhile; run the same command again")
    return rounds[-1]


def _end_round(job: Job, ref: PassRef, reconciler: Reconciler, worker: Worker, number: int) -> Done | None:
    """Reconcile a round, or wait for the worker that does: rank 0 begins at once, others a moment later or when that worker has died.

    Return None if another round was opened. Raises Incomplete if cancelled or if no progress is made any more.
    """
    slot = end_slot(job.plan)
    may_begin = job.rank_info.rank in (0, None)
    waits = Patience()

    def is_closed_or_claimed() -> bool:
        return read_done(job.layout, ref) is not None or _newest_round(job, ref) > number or slot in worker.claims.newest(number)

    while True:
        if (done := read_done(job.layout, ref)) is not None:
            return done
        if _newest_round(job, ref) > number:
            return None
        claim = worker.claims.newest(number).get(slot)
        if (may_begin or claim is not None) and _take_end(worker.claims, job, number, claim):
            worker.heartbeat.rise(phase="reconciling", doing="checking and writing the data set")
            with closing(worker.newer_snapshot()) as snapshot:
                return reconciler.close_round(read_round(job.layout, ref, job.plan, number), snapshot)
        if not may_begin:  # rank 0 may still be printing its forecast, and has in memory what reconciling needs
            may_begin = True
            wait_for_rank_0(job.layout, worker.heartbeat, is_closed_or_claimed)
        worker.wait(waits, None, {slot: claim} if claim else {})


def _take_end(claims: Claims, job: Job, number: int, claim: ClaimName | None) -> bool:
    """Claim the reconciling of a round, unless the worker of its newest claim lives. Return whether this worker has it."""
    recipe, _partition = end_slot(job.plan)
    is_free = claim is None or claims.life(claim) is not Life.LIVE
    return is_free and claims.take(number, recipe, range(1), after=claim) is not None
