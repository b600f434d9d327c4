"""The whole job without torch: `fill` and `run_pass`, in one process and in many, killed anywhere and run again."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.core.errors import Incomplete
from cachestore.files.failpoints import VARIABLE
from cachestore.files.paths import Layout
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.passes import list_passes
from cachestore.jobs.share.report import Report
from cachestore.store.read.snapshot import list_segments, load_snapshot
from tests import fakes
from tests.fakes import Clock, FakeEncoder, Gate, Pictures, adds_up, captions, examples, fill_with, holds, names, overtaken, pictures
from tests.leaks import held
from tests.shares import share

# Reports


def test_a_report_is_the_same_from_its_json():
    report = Report(True, 1, 2, 1, 1, 0, 0, 1, 0.5, 10, "s", "n", "p", 3, ({"sample": "x", "encoder": "e", "reason": "r"},))
    assert Report.from_json(report.as_json()) == report
    assert Report.from_json({**report.as_json(), "of tomorrow": 1}) == report


@examples(40)
@given(st.lists(st.lists(st.sampled_from(["a", "b", "c", "bad", "same", "equal"]), max_size=6), min_size=1, max_size=4), st.integers(1, 4))
def test_wanted_is_always_reused_and_encoded_and_failed_and_missing(tmp_path_factory, runs, limit):
    """Over runs with other samples, doubles and failures; and what is complete holds an entry for each wanted unit."""
    root = tmp_path_factory.mktemp("runs") / "store"

    def refuse(items):
        if "bad" in items:
            raise ValueError("bad")

    for wanted in runs:
        encoder = FakeEncoder(limit=limit, before_encode=refuse)
        report = fakes.run(root, captions(*wanted), encoder)
        assert adds_up(report)
        assert report.samples == len(wanted)
        assert report.wanted == len(set(wanted))
        assert report.failed == ("bad" in wanted)
        assert report.encoded == report.encoded_here == len(encoder.encoded)
        assert report.complete == ("bad" not in wanted)
    assert verify(root).ok


# One pass, many workers


def as_threads(*jobs):
    """Run jobs at once, each in a thread; their reports, or what they raised."""
    found: list = [None] * len(jobs)

    def go(number, one):
        try:
            found[number] = run_pass(one)
        except Exception as error:  # noqa: BLE001 - handed to the test
            found[number] = error

    threads = [threading.Thread(target=go, args=(number, one)) for number, one in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ranks(root, samples, world, *, make=FakeEncoder, **options):
    return [fakes.job(root, samples, [make()], rank=rank, world=world, **options) for rank in range(world)]


def test_ten_thousand_samples_with_one_caption_on_eight_ranks_encode_two_units(root):
    """The caption and the empty one."""
    samples, encoders = captions(*["the caption"] * 10_000), [FakeEncoder() for _rank in range(8)]
    jobs = [fakes.job(root, samples, [encoder], rank=rank, world=8, extra=[(0, {"caption": ""})]) for rank, encoder in enumerate(encoders)]
    reports = as_threads(*jobs)
    assert sorted(item for encoder in encoders for item in encoder.encoded) == ["", "the caption"]
    assert {(report.samples, report.wanted, report.encoded) for report in reports} == {(10_000, 2, 2)}


def test_every_rank_returns_the_same_report_but_for_its_own_part(root):
    reports = as_threads(*ranks(root, captions(*names(200)), 4))
    same = [{name: value for name, value in report.as_json().items() if name != "encoded_here"} for report in reports]
    assert all(one == same[0] for one in same)
    assert sum(report.encoded_here for report in reports) == reports[0].encoded == 200


def test_more_ranks_than_units_is_fine(root):
    assert {(report.complete, report.encoded) for report in as_threads(*ranks(root, captions("a", "b"), 6))} == {(True, 2)}


def test_a_rank_that_comes_when_all_is_done_gets_the_report_of_its_launch(root):
    one, late = ranks(root, captions("a", "b"), 2)
    report = run_pass(one)
    assert run_pass(late) == Report.from_json(report.as_json(), encoded_here=0)
    assert late.encoders[0].batches == []
    assert list_passes(one.layout, one.plan.name) == [1]


def test_a_second_call_within_one_launch_looks_again(root):
    """A trainer that adds files between two calls gets no old report."""
    source = fakes.Pictures({"a": b"1"})
    first = fakes.run(root, fakes.pictures("a"), FakeEncoder("latents"), source=source, launch="one")
    source.files["a"] = b"2"
    source.times["a"] = fakes.YEAR_2000 + 1
    second = fakes.run(root, fakes.pictures("a"), FakeEncoder("latents"), source=source, launch="one")
    assert (first.encoded, second.encoded) == (1, 1)


def test_files_that_change_while_the_pass_goes_on_are_named(root):
    source = fakes.Pictures({"a": b"1", "b": b"2", "c": b"3"})

    def replace(_items):
        source.files["a"], source.times["a"] = b"4", fakes.YEAR_2000 + 1
        source.files.pop("b", None)

    report = fakes.run(root, fakes.pictures("a", "b", "c"), FakeEncoder("latents", before_encode=replace), source=source)
    assert report.complete
    assert report.changed == ("a", "b")
    assert fakes.run(root, fakes.pictures("c"), FakeEncoder("latents"), source=source).changed == ()


def test_ranks_that_believe_in_other_worlds_share_the_work(root):
    """A wrong rank and two world sizes at once cost time, never an entry."""
    samples = captions(*names(100))
    jobs = [fakes.job(root, samples, [FakeEncoder()], rank=rank, world=world) for rank, world in ((1, 2), (1, 2), (1, 7), (None, 1))]
    assert {report.complete for report in as_threads(*jobs)} == {True}
    assert sorted(item for one in jobs for item in one.encoders[0].encoded) == sorted(names(100))


def test_two_runs_at_once_share_the_work_and_agree(root):
    samples = captions(*names(150))
    jobs = [fakes.job(root, samples, [FakeEncoder()], launch=launch) for launch in ("one", "other")]
    assert {(report.complete, report.encoded, report.reused) for report in as_threads(*jobs)} == {(True, 150, 0)}
    assert sorted(item for one in jobs for item in one.encoders[0].encoded) == sorted(names(150))


def test_a_unit_that_fails_for_good_is_tried_once(root):
    tried = []

    def refuse(items):
        tried.extend(items)
        raise ValueError("no")

    report = fakes.run(root, captions("bad"), FakeEncoder(before_encode=refuse))
    assert tried == ["bad"]
    assert report.failed == 1


def test_a_unit_that_fails_for_now_is_tried_three_times(root):
    source = Pictures({"a.png": b"one", "b.png": b"two"}, failing={"a.png": 99, "b.png": 2})
    report = fakes.run(root, pictures("a.png", "b.png"), FakeEncoder("latents"), source=source)
    assert Counter(source.reads) == {"a.png": 3, "b.png": 3}
    assert (report.encoded, report.failed) == (1, 1)
    assert report.failures == ({"sample": "a.png", "encoder": "latents", "reason": "a.png: input/output error"},)


def test_running_out_of_memory_at_a_batch_of_eight_ends_with_all_encoded(root):
    def before(items):
        if len(items) > 3:
            raise MemoryError

    report = fakes.run(root, captions(*names(50)), FakeEncoder(limit=8, before_encode=before))
    assert (report.complete, report.encoded) == (True, 50)


def test_a_unit_of_another_order_in_which_a_double_fails_first_is_still_encoded(root):
    """Two pictures of equal bytes wait for one encoding; when that fails for now, both come back."""
    failures = []

    def once(items):
        if not failures:
            failures.append(items)
            raise MemoryError

    source = Pictures({"a.png": b"same", "b.png": b"same"})
    report = fakes.run(root, pictures(*source.files), FakeEncoder("latents", before_encode=once), source=source)
    assert (report.complete, report.encoded, report.reused) == (True, 1, 1)


# Runs again


def test_a_second_run_encodes_nothing_and_touches_no_encoder(root):
    source = Pictures({f"{n}.png": str(n).encode() for n in range(10)})
    encoders = [FakeEncoder("text"), FakeEncoder("latents")]
    first = fakes.run(root, pictures(*source.files), *encoders, source=source)
    source.reads.clear()
    again = [FakeEncoder("text"), FakeEncoder("latents")]
    second = fakes.run(root, pictures(*source.files), *again, source=source)
    assert [encoder.prepared for encoder in again] == [0, 0]
    assert source.reads == []
    assert (second.encoded, second.reused, second.generation) == (0, first.wanted, first.generation)


def test_ten_pictures_added_are_ten_units_encoded(root):
    source = Pictures({f"{n}.png": str(n).encode() for n in range(30)})
    fakes.run(root, pictures(*list(source.files)[:20]), FakeEncoder("latents"), source=source)
    report = fakes.run(root, pictures(*source.files), FakeEncoder("latents"), source=source)
    assert (report.encoded, report.reused, report.samples) == (10, 20, 30)


def test_a_picture_replaced_by_one_of_the_same_size_is_encoded_again_and_a_touched_one_is_not(root):
    source = Pictures({"a.png": b"one", "b.png": b"two", "c.png": b"six"})
    fakes.run(root, pictures(*source.files), FakeEncoder("latents"), source=source)
    source.files["a.png"], source.times["a.png"], source.times["b.png"] = b"ONE", 5, 5
    encoder = FakeEncoder("latents")
    report = fakes.run(root, pictures(*source.files), encoder, source=source)
    assert encoder.encoded == [b"ONE"]
    assert (report.encoded, report.reused) == (1, 2)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "emptied"])
def test_what_a_damaged_or_deleted_segment_held_is_encoded_again(root, damage):
    layout = Layout(root)
    fakes.run(root, captions(*names(5)), FakeEncoder())
    [before] = list_segments(layout)
    fakes.run(root, captions(*names(9)), FakeEncoder())
    path = layout.segment(before)
    path.chmod(0o644)
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncated" else b"")
    encoder = FakeEncoder()
    report = fakes.run(root, captions(*names(9)), encoder)
    assert sorted(encoder.encoded) == names(5)
    assert (report.complete, report.encoded, report.reused) == (True, 5, 4)


def half_done(root, samples, count):
    """A pass that was cancelled after so many batches of four."""
    encoder = FakeEncoder(limit=4)

    class Stop:
        def is_set(self):
            return len(encoder.batches) >= count

    with pytest.raises(Incomplete):
        fakes.run(root, samples, encoder, cancel=Stop())
    return encoder.encoded


@pytest.mark.parametrize("victim", ["index", "workers", "claims", "ledgers", "locks", "tmp", "digests", "all of them"])
def test_deleting_what_is_derived_or_advisory_loses_nothing(root, victim, monkeypatch):
    clock = Clock()  # without its heartbeat, the holder of a claim can only be waited for
    monkeypatch.setitem(Worker.__init__.__kwdefaults__, "clock", clock)
    monkeypatch.setitem(Worker.__init__.__kwdefaults__, "sleep", lambda _seconds: clock.sleep(10))
    samples = captions(*names(40))
    fakes.run(root, captions(*names(10)), FakeEncoder())
    made = half_done(root, samples, 3)
    everything = ["index", "workers", "claims", "ledgers", "locks", "tmp", "digests"]
    for name in everything if victim == "all of them" else [victim]:
        for folder in [root / name, *root.glob(f"plans/*/*/{name}")]:
            if folder.exists():
                for path in folder.iterdir():
                    path.unlink()
    encoder = FakeEncoder()
    assert fakes.run(root, samples, encoder).complete
    assert sorted(encoder.encoded + made) == sorted(names(40)[10:])
    assert verify(root).ok


def test_deleting_the_folders_themselves_loses_nothing_either(root):
    samples = captions(*names(40))
    made = half_done(root, samples, 3)
    for folder in [root / "index", root / "workers", root / "tmp", *root.glob("plans/*/*/*s")]:
        shutil.rmtree(folder, ignore_errors=True)
    encoder = FakeEncoder()
    assert fakes.run(root, samples, encoder).complete
    assert sorted(encoder.encoded + made) == sorted(names(40))


def test_a_ledger_that_is_damaged_while_its_writer_lives_changes_no_count_and_no_fact(root):
    """Its units come back in the next round, where the worker finds what it has made itself."""

    def damage(_counts):
        for path in root.glob("plans/*/1/ledgers/0.*"):
            path.write_bytes(b"?")

    report = fakes.run(root, captions("two words", "three more words"), FakeEncoder(), on_progress=damage)
    assert (report.complete, report.encoded, report.reused) == (True, 2, 0)
    column = fakes.catalog(root).columns[0]
    assert [column.row_cells(row)[0].facts["tokens"] for row in range(2)] == [(2,), (3,)]


def test_a_unit_without_a_ledger_after_three_rounds_is_a_failure_that_says_so(root):
    def damage(_counts):
        for path in root.glob("plans/*/1/ledgers/*"):
            path.write_bytes(b"?")

    report = fakes.run(root, captions("a"), FakeEncoder(), on_progress=damage)
    assert (report.complete, report.failed) == (False, 1)
    assert report.failures[0]["reason"] == "no worker could finish it"
    assert fakes.run(root, captions("a"), FakeEncoder()).complete


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_a_segment_that_is_lost_while_the_pass_runs_is_made_again(root, damage):
    """Neither what a worker remembers of its own segments nor the index of its start is believed in a later round."""
    layout, encoder = Layout(root), FakeEncoder()
    fakes.run(root, captions(*names(3)), FakeEncoder())
    lost = []

    def lose(_counts):
        for digest in list_segments(layout) if not lost and encoder.batches else ():
            lost.append(digest)
            layout.segment(digest).chmod(0o644)
            if damage == "deleted":
                layout.segment(digest).unlink()
            else:
                layout.segment(digest).write_bytes(layout.segment(digest).read_bytes()[:-1])

    report = fakes.run(root, captions(*names(6)), encoder, on_progress=lose)
    assert len(lost) == 2
    assert (report.complete, report.wanted) == (True, 6)
    assert Counter(encoder.encoded) == Counter(names(6)[:3]) + Counter(names(6)[3:] * 2)
    with cs.open(root) as store:
        assert len(store.get_many([FakeEncoder().resolve({"caption": name}, None).key for name in names(6)], as_numpy=True)) == 6


@pytest.mark.parametrize("victim", ["rounds/0.json", "done.json", "plan.safetensors"])
def test_a_damaged_file_of_the_plan_stands_in_nobodys_way(root, victim):
    """They are synced before anything builds on them, so only a failing disk does this; the command must still get through."""
    samples = captions(*names(12))
    fakes.run(root, samples, FakeEncoder())
    half_done(root, captions(*names(40)), 3)
    for path in root.glob(f"plans/*/**/{victim}"):
        path.chmod(0o644)
        path.write_bytes(b"?")
    for wanted in (captions(*names(40)), samples):
        assert fakes.run(root, wanted, FakeEncoder()).complete
    assert {finding.kind for finding in verify(root).findings} <= {"bad-plan"}


def test_a_stopped_run_resumed_with_another_world_size_encodes_only_the_rest(root):
    samples = captions(*names(60))
    made = half_done(root, samples, 4)
    jobs = ranks(root, samples, 3, launch="resumed")
    reports = as_threads(*jobs)
    assert sorted(made + [item for one in jobs for item in one.encoders[0].encoded]) == sorted(names(60))
    assert {(report.complete, report.wanted, report.encoded) for report in reports} == {(True, 60, 60)}


# Processes that die


@pytest.mark.processes
def test_four_processes_fill_1003_keys_and_one_that_is_killed_costs_its_own_claim_alone(root, zygote, tmp_path):
    gate = Gate(tmp_path / "gate")
    jobs: list[dict[str, Any]] = [
        {"store": str(root), "fill": names(1003), "options": {"rank": rank, "world_size": 4}} for rank in range(4)
    ]
    jobs[1]["environment"] = {fakes.GATE: str(gate.folder)}
    zygote.begin(*jobs, CACHESTORE_LAUNCH="one launch")
    os.kill(gate.wait(), signal.SIGKILL)
    ended = zygote.end()
    assert [code for code, _report in ended] == [0, -signal.SIGKILL, 0, 0]
    made = Counter(key for _pid, _encoder, key in zygote.log())
    assert set(made) == {str(cs.key(name)) for name in names(1003)}
    assert set(made.values()) == {1}, "it was killed before it encoded anything"
    reports = [report for _code, report in ended if report]
    assert {(report["complete"], report["wanted"], report["encoded"]) for report in reports} == {(True, 1003, 1003)}
    assert holds(root, names(1003))


@pytest.mark.processes
def test_a_process_killed_in_the_middle_of_its_claim_costs_what_it_had_not_published(root, zygote, tmp_path):
    """It is killed once others have seen its claim, with a batch encoded: those units are encoded twice, no others."""
    [(code, _)] = zygote.run({"store": str(root), "fill": names(300), "environment": {VARIABLE: "publish.before_link:4"}})
    assert code == -signal.SIGKILL
    lost = {key for _pid, _encoder, key in zygote.log()}
    ended = zygote.run(*({"store": str(root), "fill": names(300), "options": {"rank": rank, "world_size": 2}} for rank in range(2)))
    assert [code for code, _report in ended] == [0, 0]
    made = Counter(key for _pid, _encoder, key in zygote.log())
    assert set(made.values()) == {1}
    assert set(made) >= lost
    assert holds(root, names(300))


POINTS = [
    *(f"publish.{point}:{count}" for point in ("before_fsync", "after_link") for count in range(1, 9)),
    *(f"publish.{point}:{count}" for point in ("after_fsync", "before_link", "after_folder_fsync") for count in (2, 4, 5, 6, 7)),
    "worker.before_ledger",
    "segment.published",
    "segment.published:2",
    "commit.before_index",
    "commit.after_index",
    "catalog.before_publish",
    "catalog.after_publish",
    "reconcile.before_commit",
    "reconcile.after_commit",
    "reconcile.before_done",
]


@pytest.mark.processes
@pytest.mark.parametrize("point", share(POINTS, 2))
def test_a_run_killed_anywhere_is_finished_by_the_next(root, zygote, tmp_path, point):
    """At every failpoint of the way; afterwards the data set is whole, paired, and nothing acknowledged was made twice."""
    data = tmp_path / "data"
    data.mkdir()
    for n in range(6):
        (data / f"{n}.png").write_bytes(b"picture %d" % n)
        (data / f"{n}.txt").write_text(f"caption {n}")
        os.utime(data / f"{n}.png", (n, n))
    one = {"store": str(root), "precompute": str(data)}
    [(code, _)] = zygote.run({**one, "environment": {VARIABLE: point}})
    assert code in (0, -signal.SIGKILL)
    present = set()
    if list_segments(Layout(root)):
        with cs.open(root) as store:
            present = set(map(str, store.keys()))
    zygote.log()
    [(code, report)] = zygote.run(one)
    assert code == 0
    assert (report["complete"], report["wanted"], report["samples"]) == (True, 13, 6)
    assert {key for _pid, _encoder, key in zygote.log()}.isdisjoint(present)
    assert verify(root).ok
    with cs.open(root) as store:
        assert len(store) == 13
    [(code, report)] = zygote.run(one)
    assert (code, report["encoded"], report["reused"]) == (0, 0, 13)


def test_the_points_to_die_at_are_all_that_a_run_passes():
    """A failpoint that is added to the way of a run is to be listed above."""
    source = "".join(path.read_text() for path in (fakes.ROOT / "cachestore").rglob("*.py"))
    named = {line.partition('failpoint("')[2].partition('"')[0] for line in source.splitlines() if 'failpoint("' in line}
    elsewhere = {point for point in named if point.startswith(("repair.", "gc.", "compact.", "forget."))}
    assert named - elsewhere == {point.partition(":")[0] for point in POINTS}


def test_ranks_that_make_the_store_at_the_same_moment_share_it(root, monkeypatch):
    """The other rank's store appears after this one has looked for it and before it looks at what else is there."""
    from cachestore.store.write import commit

    overtaken(monkeypatch, commit, "names_in", lambda: cs.open(root, mode="a").close())
    cs.open(root, mode="a").close()
    assert verify(root).ok


@pytest.mark.processes
def test_an_interrupted_worker_leaves_no_lock_behind(root, zygote):
    [(code, _)] = zygote.run({"store": str(root), "fill": names(50), "environment": {VARIABLE: "worker.before_ledger"}})
    assert code == -signal.SIGKILL
    with cs.open(root, mode="a") as store:
        report = fill_with(store, *names(50), function=lambda batch: pytest.fail("it is published"))
    assert (report.complete, report.encoded, report.encoded_here) == (True, 50, 0)


# Starting


def test_the_whole_job_without_torch_starts_in_a_moment(tmp_path):
    """Counted in modules, as time depends on the machine: none of the heavy ones is loaded for a job with an encoder passed in."""
    source = """
import sys, cachestore as cs, numpy
with cs.open(sys.argv[1], mode="a") as store:
    cs.fill(store, [(cs.key("a"), 1)], lambda batch: {key: {"x": numpy.ones(3)} for key, _ in batch})
heavy = {"torch", "transformers", "diffusers", "accelerate", "PIL", "multiprocessing", "asyncio", "concurrent.futures.process"}
print(sorted(heavy & set(sys.modules)))
"""
    out, err = fakes.program(source, tmp_path / "store").communicate(timeout=50)
    assert out == "[]\n", err


def test_a_filled_store_leaves_no_thread_and_no_child(root):
    before = held()
    with cs.open(root, mode="a") as store:
        fill_with(store, *names(20))
    assert not held() - before
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
    assert Path(root).is_dir()


def test_a_segment_that_no_index_covers_yet_is_looked_at_again_too(root):
    """A worker that remembers its header from before still sees that it was cut short."""
    layout = Layout(root)
    with cs.open(root, mode="a") as store, store.writer() as writer:
        writer.put(cs.key("a"), {"value": np.zeros(4)})
    with closing(load_snapshot(layout, for_planning=True)) as before:
        assert cs.key("a") in before
        [digest] = list_segments(layout)
        layout.segment(digest).chmod(0o644)
        layout.segment(digest).write_bytes(layout.segment(digest).read_bytes()[:-1])
        with closing(load_snapshot(layout, earlier=before, for_planning=True)) as after:
            assert cs.key("a") not in after
