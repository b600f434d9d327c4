"""Ends a pass of which every unit is present. Encodes nothing, starts nothing and waits for nobody who encodes; runs without torch."""

from contextlib import closing

from cachestore.files.marker import check_for_reading
from cachestore.jobs.run.reconcile import Reconciler, key_without_reading
from cachestore.jobs.run.task import Job
from cachestore.jobs.share.agreement import wait_for_rank_0
from cachestore.jobs.share.claims import Claims
from cachestore.jobs.share.invocations import count_invocation, invocation_of
from cachestore.jobs.share.ledgers import list_ledgers
from cachestore.jobs.share.passes import Done, PassRef, join_pass, list_rounds, read_done, read_round
from cachestore.jobs.share.report import Report
from cachestore.jobs.share.workers import Heartbeat, Life, Watch
from cachestore.store.read.snapshot import load_snapshot
from cachestore.store.write.commit import publish_recipe


def complete_report(job: Job, heartbeat: Heartbeat) -> Report | None:
    """Take part in a pass in which nothing seems to be missing, and return its report.

    None if something is missing after all, or while another process works on the pass: a worker then encodes it, or waits for that one.
    """
    layout = job.layout
    for recipe in job.plan.recipes:
        publish_recipe(layout, recipe)
    ref = join_pass(layout, job.plan.name, job.launch)
    done = read_done(layout, ref)  # others of this launch may be faster
    if done is None:
        heartbeat.join(ref.plan, ref.number, job.launch)
        if heartbeat.rank not in {0, None}:
            wait_for_rank_0(layout, heartbeat, lambda: read_done(layout, ref) is not None)
        done = read_done(layout, ref) or _end(job, ref, heartbeat)
    elif job.on_open:
        job.on_open()
    if done is None:
        return None
    count_invocation(invocation_of(layout, job.plan.name, job.rank_info))
    check_for_reading(layout)  # if another store took its place, the report may be of a pass there over the same plan
    return Report.from_json(done.report, encoded_here=0)


def _end(job: Job, ref: PassRef, heartbeat: Heartbeat) -> Done | None:
    """Open the pass if it is not open, and end it; None if a partition of its newest round has no ledger, or if another process ends it."""
    layout, folder = job.layout, ref.folder(job.layout)
    reconciler = Reconciler(job, ref, key_without_reading(job.encoders), heartbeat.rise, heartbeat.pass_seconds)
    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        reconciler.open_pass(snapshot)
        if job.on_open:
            job.on_open()
        opened = read_round(layout, ref, job.plan, list_rounds(folder)[-1])
        finished = list_ledgers(folder, opened.number)
        partitions = ((recipe, number) for recipe in range(len(opened.units)) for number in range(opened.partition_count(recipe)))
        if not all(slot in finished for slot in partitions):
            return None
        slot, claims = (len(job.plan.recipes), 0), Claims(layout, folder, heartbeat.worker, Watch(layout))
        claim = claims.newest(opened.number).get(slot)
        is_free = claim is None or claims.life(claim) is not Life.LIVE
        if not (is_free and claims.take(opened.number, slot[0], range(1), after=claim)):
            return None
        heartbeat.show(doing="checking and writing the data set")  # still planning, so that other ranks wait for the end
        return reconciler.close_round(opened, snapshot)
