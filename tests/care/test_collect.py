"""Upkeep: what nothing needs goes, in two steps; what anything needs never does, whoever runs at the same time."""

import os
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care import collect as upkeep
from cachestore.care.collect import collect, compact, drop
from cachestore.care.doctor import examine
from cachestore.care.repair import repair
from cachestore.care.soundness import good_entries
from cachestore.care.verify import verify
from cachestore.core.errors import BadInput, FormatError, StoreNotFound
from cachestore.core.ranks import RankInfo
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.task import Job
from cachestore.jobs.share.passes import PassRef, list_passes
from cachestore.jobs.share.plan import publish_plan, read_plan
from cachestore.jobs.share.workers import Heartbeat
from cachestore.store.format.catalog import list_generations, list_names
from cachestore.store.format.entry import make_entry
from cachestore.store.format.findings import HARMLESS
from cachestore.store.format.marked import list_marked, marked_segments
from cachestore.store.format.segment import read_contents
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_indexes, list_segments, load_snapshot
from cachestore.store.read.stats import stats
from cachestore.store.write.append import publish_segment
from cachestore.store.write.commit import commit, create_store
from tests import fakes
from tests.fakes import FakeEncoder, asks_for, captions, examples, open_pass, overtaken, tells_of
from tests.store.stores import entry_of, flip, key_of, put

DAY = 86_400
MODULES = (
    "cachestore.jobs.run.worker",
    "cachestore.jobs.run.reconcile",
    "cachestore.care.gc",
    "cachestore.care.compact",
    "cachestore.store.write.append",
    "cachestore.store.write.commit",
    "cachestore.store.write.catalog_writer",
)
"""Modules whose failpoints the interleavings stop at."""


def job(root, *texts, name="train", encoder=None):
    """A pass over captions under a name, of a launch of its own."""
    encoders: list[Any] = [encoder or FakeEncoder(limit=1)]
    source: Any = fakes.Pictures()
    layout, plan = create_store(root), fakes.plan_of(captions(*texts), encoders, name=name)
    publish_plan(layout, plan)
    plan = read_plan(layout, plan.name)
    return Job(layout, plan, encoders, source, RankInfo(0, 1), f"launch {os.urandom(4).hex()}", listing_number=next(fakes.LISTINGS))


def run(root, *texts, **options):
    return run_pass(job(root, *texts, **options))


def key(text):
    return FakeEncoder().resolve({"caption": text}, None).key


def readable(root, *texts):
    """Which of these captions' entries can be read, as they were made."""
    found = []
    with Reader(root, verify="always") as reader:
        for text in texts:
            if key(text) in reader:
                assert reader.get(key(text), as_numpy=True)["value"].tobytes() == bytes(key(text))
                found.append(text)
    return found


def present(layout, *texts):
    """Which of these captions a planner would count on."""
    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        return [text for text in texts if key(text) in snapshot]


def sweep(root):
    """Both steps at once, as two runs a long time apart would do them."""
    return [collect(root, apply=True, grace_seconds=0) for _step in range(2)]


def age(path, days):
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def age_all(layout, days):
    for path in layout.root.rglob("*"):
        age(path, days)


def is_ok(root):
    return {finding.kind for finding in verify(root).findings} <= HARMLESS


# What goes, and what never does


def test_an_empty_store_has_nothing_to_collect_or_compact(layout):
    for step in (collect(layout.root), *sweep(layout.root)):
        assert (step.condemned.segments, step.removed.segments, step.freed_bytes, step.files, step.plans) == (0, 0, 0, (), ())
    assert compact(layout.root).segments == 0


WITHOUT_STORE = {
    "gc": collect,
    "compact": compact,
    "drop": lambda root: drop(root, "train"),
    "verify": verify,
    "repair": repair,
    "stats": stats,
    "doctor": examine,
}


@pytest.mark.parametrize("action", WITHOUT_STORE.values(), ids=WITHOUT_STORE)
def test_where_there_is_no_store_it_is_reported(tmp_path, action):
    with pytest.raises(StoreNotFound):
        action(tmp_path)


def test_what_a_data_set_needs_stays(root):
    run(root, "a", "b")
    for step in sweep(root):
        assert (step.condemned.segments, step.removed.segments) == (0, 0)
    assert readable(root, "a", "b") == ["a", "b"]


def test_the_empty_caption_of_a_data_set_stays_though_no_row_names_it(root):
    run(root, "a", "")
    run(root, "a")
    compact(root)
    sweep(root)
    assert readable(root, "a", "") == ["a", ""]


def test_without_apply_nothing_is_changed_and_the_same_is_reported(root):
    run(root, "a")
    drop(root, "train")
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    reported = collect(root)
    assert not reported.applied
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
    assert collect(root, apply=True).condemned == reported.condemned


def test_what_is_marked_counts_as_absent_for_planners_and_stays_readable(root):
    run(root, "a", "b")
    drop(root, "train")
    assert collect(root, apply=True).condemned.entries == 2
    assert readable(root, "a", "b") == ["a", "b"]
    assert present(Layout(root), "a", "b") == []


def test_what_is_marked_goes_by_a_later_run_and_not_before_its_grace_is_over(root):
    run(root, "a")
    drop(root, "train")
    assert collect(root, apply=True).removed.segments == 0
    early = collect(root, apply=True)
    assert (early.removed.segments, early.waiting.segments) == (0, 1)
    assert readable(root, "a") == ["a"]
    late = collect(root, apply=True, grace_seconds=0)
    assert (late.removed.segments, late.removed.entries, late.copied) == (1, 1, 0)
    assert readable(root, "a") == []
    assert (list_segments(Layout(root)), is_ok(root)) == (frozenset(), True)


def test_a_list_goes_once_none_of_its_segments_is_there(root):
    run(root, "a")
    drop(root, "train")
    sweep(root)
    assert len(list_marked(Layout(root))) == 1
    collect(root, apply=True, grace_seconds=0)
    assert list_marked(Layout(root)) == []


def test_what_is_needed_again_within_the_grace_is_encoded_again(root):
    run(root, "a", "b")
    drop(root, "train")
    collect(root, apply=True)
    encoder = FakeEncoder(limit=1)
    report = run(root, "a", "c", name="other", encoder=encoder)
    assert (report.complete, sorted(encoder.encoded)) == (True, ["a", "c"])
    sweep(root)
    assert readable(root, "a", "b", "c") == ["a", "c"]
    assert is_ok(root)


def test_what_is_named_by_a_catalog_after_all_is_copied_before_its_segment_goes(root):
    run(root, "a", "b")
    digests = list_segments(Layout(root))
    upkeep.mark(Layout(root), digests)  # as of somebody who looked before the catalog stood
    step = collect(root, apply=True, grace_seconds=0)
    assert (step.removed.segments, step.copied) == (len(digests), 2)
    assert list_segments(Layout(root)).isdisjoint(digests)
    assert readable(root, "a", "b") == ["a", "b"]
    assert is_ok(root)


def test_two_collectors_at_once_both_end_and_what_is_needed_is_there(root, monkeypatch):
    run(root, "a", "b")
    upkeep.mark(Layout(root), list_segments(Layout(root)))
    others = []
    overtaken(monkeypatch, upkeep, "remove_marked", lambda: others.append(collect(root, apply=True, grace_seconds=0)))
    collect(root, apply=True, grace_seconds=0)
    assert [other.copied for other in others] == [2]
    assert readable(root, "a", "b") == ["a", "b"]
    assert is_ok(root)


def test_a_copy_in_a_marked_segment_lets_no_other_go(root):
    run(root, "a")
    layout = Layout(root)
    with closing(load_snapshot(layout)) as snapshot:
        [ref] = snapshot.segments()
    [copy] = [publish_segment(layout, [entry], origin=ref.origin + "1").digest for entry in entries_of(layout, ref.digest)]
    upkeep.mark(layout, [ref.digest])
    upkeep.mark(layout, [copy])
    collect(root, apply=True, grace_seconds=0)
    assert readable(root, "a") == ["a"]
    assert list_segments(layout).isdisjoint({ref.digest, copy})


def entries_of(layout, digest):
    path = layout.segment(digest)
    return good_entries(path, read_contents(path).entries)


def test_a_damaged_copy_lets_no_marked_segment_go_without_another(root):
    run(root, "a")
    layout = Layout(root)
    [old] = list_segments(layout)
    [copy] = [publish_segment(layout, [entry], origin="").digest for entry in entries_of(layout, old)]
    flip(layout.segment(copy), layout.segment(copy).stat().st_size - 1)
    upkeep.mark(layout, [old])
    assert collect(root, apply=True, grace_seconds=0).copied == 1
    with Reader(root, verify="always") as reader:
        assert reader.get(key("a"), as_numpy=True)["value"].tobytes() == bytes(key("a"))


def test_a_damaged_segment_that_is_needed_stays_for_repair(root):
    run(root, "a")
    layout = Layout(root)
    [old] = list_segments(layout)
    flip(layout.segment(old), layout.segment(old).stat().st_size - 1)
    upkeep.mark(layout, [old])
    step = collect(root, apply=True, grace_seconds=0)
    assert (step.removed.segments, list_segments(layout)) == (0, {old})
    assert "repair" in step.remarks[0]


def test_values_of_ones_own_and_those_of_fill_never_go(root):
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            writer.put(key("own"), {"value": np.frombuffer(bytes(key("own")), np.uint8)}, {"input_digest": "mine"})
        cs.fill(store, [(key("filled"), 1)], lambda batch: {k: {"value": np.frombuffer(bytes(k), np.uint8)} for k, _ in batch})
    run(root, "a")
    drop(root, "train")
    age_all(Layout(root), 60)
    sweep(root)
    assert readable(root, "own", "filled", "a") == ["own", "filled"]
    compact(root)
    sweep(root)
    assert readable(root, "own", "filled") == ["own", "filled"]


def test_what_fill_made_stays_even_without_its_plan(root):
    with cs.open(root, mode="a") as store:
        cs.fill(store, [(key("filled"), 1)], lambda batch: {k: {"value": np.frombuffer(bytes(k), np.uint8)} for k, _ in batch})
    shutil.rmtree(Layout(root).plans)
    sweep(root)
    compact(root)
    sweep(root)
    assert readable(root, "filled") == ["filled"]


def test_what_fill_found_among_what_a_precompute_made_stays(root):
    run(root, "a", "b")
    with cs.open(root, mode="a") as store:
        cs.fill(store, [(key("a"), 1)], lambda batch: {})
    drop(root, "train")
    sweep(root)
    assert "a" in readable(root, "a", "b")


def test_what_is_unknown_stays(layout):
    put(layout, 1, origin="repair")
    put(layout, 2, origin="f" * 32 + "/1")  # says no digest of its input
    publish_segment(layout, [entry_of(3)], origin="not a pass")
    sweep(layout.root)
    with Reader(layout.root) as reader:
        assert set(reader.keys()) == {key_of(1), key_of(2), key_of(3)}


def test_the_work_of_an_unfinished_pass_stays_and_the_pass_goes_on(root):
    calls = []

    def stop(items):
        calls.append(items)
        if len(calls) == 3:
            raise KeyboardInterrupt

    one = job(root, "a", "b", "c", encoder=FakeEncoder(limit=1, before_encode=stop))
    with pytest.raises(KeyboardInterrupt):
        run_pass(one)
    made = readable(root, "a", "b", "c")
    assert made
    sweep(root)
    assert readable(root, "a", "b", "c") == made
    encoder = FakeEncoder(limit=1)
    assert run(root, "a", "b", "c", encoder=encoder).complete
    assert sorted(encoder.encoded) == sorted({"a", "b", "c"} - {*made})


def test_a_pass_that_nobody_touched_for_a_month_holds_nothing_back(root):
    one = job(root, "a")
    ref = open_pass(one)
    publish_segment(one.layout, [made("a")], origin=ref.origin)
    assert collect(root).condemned.segments == 0
    age_all(one.layout, 31)
    assert collect(root).condemned.segments == 1


def made(text):
    return make_entry(key(text), {"value": ("U8", (16,), bytes(key(text)))}, {"input_digest": "00"})


# When it cannot be told what is needed


def test_a_damaged_catalog_stops_it_as_nobody_can_tell_what_is_needed(root):
    run(root, "a")
    path = Layout(root).catalog("train", 1)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9])
    for action in (collect, compact):
        with pytest.raises(FormatError):
            action(root)


def test_a_newest_catalog_that_is_gone_stops_it_and_is_named(root):
    run(root, "a")
    run(root, "a", "b")
    Layout(root).catalog("train", 2).unlink()
    with pytest.raises(FormatError, check=tells_of("generation 2", "'train'")):
        collect(root, apply=True)


# Other files


def test_stale_temporary_files_of_our_own_go_and_nothing_else_does(layout, tmp_path):
    ours, fresh, foreign, link = (
        layout.temporary / name for name in ("a" * 32 + ".tmp", "b" * 32 + ".tmp", "notes.txt", "c" * 32 + ".tmp")
    )
    (tmp_path / "precious").write_text("precious")
    link.symlink_to(tmp_path / "precious")
    for path in (ours, fresh, foreign):
        path.write_text("x")
    for path in (ours, foreign, tmp_path / "precious"):
        age(path, 2)
    assert collect(layout.root, apply=True).files == (f"tmp/{ours.name}",)
    assert sorted(names_in(layout.temporary)) == sorted([fresh.name, foreign.name, link.name])
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_folder_that_became_a_link_is_not_followed(root, tmp_path):
    run(root, "a")
    drop(root, "train")
    collect(root, apply=True)
    layout = Layout(root)
    [digest] = list_segments(layout)
    folder = layout.segment(digest).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert collect(root, apply=True, grace_seconds=0).removed.segments == 0
    assert (tmp_path / "elsewhere" / f"{digest}.safetensors").exists()


def test_generations_behind_the_newest_three_go_after_a_month_and_their_values_after_them(root):
    for text in "abcde":
        run(root, text)
    layout = Layout(root)
    assert collect(root).files == ()
    age_all(layout, 31)
    step = collect(root, apply=True)
    assert {name for name in step.files if name.startswith("catalogs/")} == {"catalogs/train/1.safetensors", "catalogs/train/2.safetensors"}
    assert list_generations(layout, "train") == [3, 4, 5]
    sweep(root)
    assert readable(root, *"abcde") == ["c", "d", "e"]


def test_keep_keeps_so_many_generations_of_any_age(root):
    for text in "abc":
        run(root, text)
    assert collect(root, apply=True).files == ()
    step = collect(root, apply=True, keep=2)
    assert [name for name in step.files if name.startswith("catalogs/")] == ["catalogs/train/1.safetensors"]
    assert list_generations(Layout(root), "train") == [2, 3]
    sweep(root)
    assert readable(root, *"abc") == ["b", "c"]
    assert collect(root, keep=5).files == collect(root, keep=2).files


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "1"])
def test_at_least_one_generation_is_kept(root, keep):
    run(root, "a")
    with pytest.raises(BadInput, check=asks_for("keep")):
        collect(root, keep=keep)


def test_it_says_how_much_only_older_generations_need_and_keeping_one_frees_that(root):
    for text in "abc":
        run(root, text)
    step = collect(root)
    assert (step.generations, step.condemned.segments, step.held.segments, step.held.entries) == ({"train": 3}, 0, 2, 2)
    assert collect(root, keep=1).condemned == step.held
    sweep(root)
    assert collect(root).held == step.held, "without keep they stay"
    collect(root, apply=True, keep=1)
    assert collect(root, apply=True, grace_seconds=0).removed == step.held
    assert (collect(root).generations, collect(root).held.bytes) == ({"train": 1}, 0)


def test_of_entries_that_share_a_segment_with_needed_ones_it_says_that_compact_is_needed(root):
    run(root, "a", "b", encoder=FakeEncoder(limit=2))
    run(root, "b")
    step = collect(root)
    assert (step.held.segments, step.held_partly.segments, step.held_partly.entries) == (0, 1, 1)


def test_it_says_from_when_on_marked_segments_can_be_removed(root):
    run(root, "a")
    drop(root, "train")
    assert collect(root).removable_from is None
    collect(root, apply=True)
    [marked] = list_marked(Layout(root))
    assert collect(root, grace_seconds=DAY).removable_from == marked.written + DAY
    assert collect(root, grace_seconds=0).removable_from is None


def test_it_says_that_an_unfinished_pass_keeps_its_entries(root):
    open_pass(job(root, "a"))
    assert collect(root).remarks[-1].startswith("the values of 1 unfinished run stay")


def test_a_plan_goes_with_its_catalogs_and_not_before(root):
    for text in "abcd":
        run(root, text)
    layout = Layout(root)
    plans = set(names_in(layout.plans))
    age_all(layout, 31)
    first = collect(root, apply=True)
    assert len(first.plans) == 1
    assert set(names_in(layout.plans)) == plans - {*first.plans}
    assert collect(root, apply=True).plans == ()
    assert run(root, "a").complete


def test_index_files_behind_the_newest_three_go(root):
    for text in "abcde":
        run(root, text)
    layout = Layout(root)
    for name in list_indexes(layout):
        age(layout.index(name), 2)
    newest = list_indexes(layout)[:3]
    with Reader(root) as reader:
        collect(root, apply=True)
        assert key("a") in reader
    assert list_indexes(layout) == newest


def test_workers_that_ended_a_month_ago_are_forgotten_and_living_ones_are_not(layout):
    with Heartbeat(layout, "", 0, "launch", 0, 1) as gone:
        pass
    with Heartbeat(layout, "", 0, "launch", 0, 1) as living:
        age(layout.worker(gone.worker), 31)
        age(layout.worker_lock(gone.worker), 31)
        age(layout.worker(living.worker), 31)
        age(layout.worker_lock(living.worker), 31)
        collect(layout.root, apply=True)
        assert names_in(layout.workers) == sorted([f"{living.worker}.json", f"{living.worker}.lock"])


def test_what_is_marked_waits_while_a_worker_that_began_before_is_at_work(root):
    run(root, "a")
    drop(root, "train")
    with Heartbeat(Layout(root), "", 0, "launch", 0, 1):
        collect(root, apply=True)
        step = collect(root, apply=True, grace_seconds=0)
        assert (step.removed.segments, step.waiting.segments) == (0, 1)
        assert f"pid {os.getpid()}" in step.remarks[0]
    assert collect(root, apply=True, grace_seconds=0).removed.segments == 1


# Readers


def test_a_reader_that_stays_open_reads_on_while_segments_are_compacted_and_go(root):
    for text in "abc":
        run(root, text, name=text)
    with Reader(root, verify="always") as reader:
        assert len(reader.snapshot.segments()) == 3
        compact(root)
        sweep(root)
        assert [reader.get(key(text), as_numpy=True)["value"].tobytes() for text in "abc"] == [bytes(key(text)) for text in "abc"]
    assert len(list_segments(Layout(root))) == 1


# Compacting


def test_small_segments_become_one_and_every_value_stays(root):
    for n in range(10):
        run(root, f"text {n}", name=str(n))
    done = compact(root)
    assert (done.segments, done.written, done.entries) == (10, 1, 10)
    assert present(Layout(root), *[f"text {n}" for n in range(10)]) == [f"text {n}" for n in range(10)]
    sweep(root)
    assert len(list_segments(Layout(root))) == 1
    assert len(readable(root, *[f"text {n}" for n in range(10)])) == 10
    assert is_ok(root)


def test_compacting_again_changes_nothing(root):
    for text in "abc":
        run(root, text, name=text)
    compact(root)
    assert compact(root).segments == 0
    sweep(root)
    assert compact(root).segments == 0


def test_compacting_leaves_behind_what_nothing_needs(root):
    run(root, "a", "b", encoder=FakeEncoder(limit=8))
    run(root, "a", name="other")
    drop(root, "train")
    assert collect(root).partly.entries == 1
    done = compact(root)
    assert (done.segments, done.entries) == (1, 1)
    sweep(root)
    assert readable(root, "a", "b") == ["a"]


def test_own_values_are_never_merged_with_those_of_passes(root):
    run(root, "a")
    with cs.open(root, mode="a") as store, store.writer() as writer:
        writer.put(key("own"), {"value": np.frombuffer(bytes(key("own")), np.uint8)})
    assert compact(root).segments == 0


def test_a_damaged_segment_is_left_to_repair_and_the_others_are_compacted(root):
    for text in "abc":
        run(root, text, name=text)
    layout = Layout(root)
    with closing(load_snapshot(layout)) as snapshot:
        [location] = snapshot.find([key("a")])[0]
    flip(layout.segment(location.segment.digest), location.offset)
    done = compact(root)
    assert (done.segments, len(done.remarks)) == (2, 1)
    assert location.segment.digest not in marked_segments(layout)


def test_compacting_says_beforehand_what_it_would_do_and_does_nothing(root):
    for text in "abc":
        run(root, text, name=text)
    reported = compact(root, apply=False)
    assert (reported.segments, reported.entries, reported.applied) == (3, 3, False)
    assert marked_segments(Layout(root)) == frozenset()


# Dropping


def test_dropping_removes_catalogs_and_plans_and_no_value(root):
    run(root, "a")
    run(root, "b", name="other")
    done = drop(root, "train")
    assert (done.generations, len(done.plans)) == ((1,), 1)
    assert [name for name in list_names(Layout(root)) if list_generations(Layout(root), name)] == ["other"]
    assert readable(root, "a", "b") == ["a", "b"]
    assert is_ok(root)


def test_a_generation_of_a_dropped_data_set_is_never_another_one(root):
    run(root, "a")
    drop(root, "train")
    assert run(root, "b").generation == 2
    drop(root, "train")
    assert run(root, "b").generation == 3
    assert is_ok(root)
    assert cs.stats(root).catalogs[0].generation == 3


def test_a_data_set_that_is_not_there_cannot_be_dropped(root):
    run(root, "a")
    with pytest.raises(BadInput, check=asks_for("name", "'b'", "'train'")):
        drop(root, "b")


def test_a_data_set_that_somebody_works_on_is_not_dropped(root):
    one = job(root, "a")
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 0, 1), pytest.raises(BadInput):
        drop(root, "train")
    assert drop(root, "train").plans == (one.plan.name,)


def test_a_dropped_data_set_can_be_made_anew_while_its_values_are_marked(root):
    """Its plan has the same name, and its first pass the same number: the same bytes would come to lie under a marked name."""
    run(root, "a")
    drop(root, "train")
    collect(root, apply=True)
    assert run(root, "a").complete
    assert present(Layout(root), "a") == ["a"]
    sweep(root)
    assert readable(root, "a") == ["a"]
    assert is_ok(root)


# Whatever is done in whatever order

NAMES, TEXTS = st.sampled_from(["one", "two"]), st.lists(st.sampled_from("abcd"), unique=True, max_size=4)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), NAMES, TEXTS),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.sampled_from(["gc", "compact", "repair", "commit", "forget the index", "put", "let a month pass"])),
)


@examples(25)
@given(actions=st.lists(ACTIONS, max_size=12))
def test_whatever_is_made_dropped_collected_and_compacted_what_is_named_can_be_read(tmp_path_factory, actions):
    root = tmp_path_factory.mktemp("any") / "store"
    layout = create_store(root)
    named, own = {}, set()
    for number, (action, *arguments) in enumerate(actions):
        if action == "run":
            name, texts = arguments
            report = run(root, *texts, name=name)
            assert report.complete
            named[name, report.generation] = texts
        elif action == "drop" and list_generations(layout, arguments[0]):
            drop(root, arguments[0])
        elif action == "gc":
            collect(root, apply=True, grace_seconds=0)
        elif action == "compact":
            compact(root)
        elif action == "repair":
            assert cs.repair(root).missing == 0
        elif action == "commit":
            commit(layout).close()
        elif action == "forget the index":
            for index in list_indexes(layout):
                layout.index(index).unlink()
        elif action == "put":
            put(layout, number)
            own.add(number)
        elif action == "let a month pass":
            age_all(layout, 31)
        needed = {text for name in list_names(layout) for n in list_generations(layout, name) for text in named[name, n]}
        assert needed <= set(readable(root, *"abcd"))
        with Reader(root, verify="always") as reader:
            assert [len(reader.get_raw([key_of(n)])) for n in own] == [1] * len(own)
        assert is_ok(root)
    for _again in range(3):
        age_all(layout, 31)
        sweep(root)
        compact(root)
    needed = {text for name in list_names(layout) for n in list_generations(layout, name) for text in named[name, n]}
    assert set(readable(root, *"abcd")) == needed


# Whoever runs at the same time


class Turns:
    """Lets two threads take turns at the failpoints of some modules, as a schedule says; each is one that the other cannot see stopped."""

    def __init__(self, monkeypatch):
        self.waiting, self.going, self.local = {}, {}, threading.local()
        self.changed = threading.Condition()
        for module in MODULES:
            monkeypatch.setattr(f"{module}.failpoint", self.at)

    def at(self, point):
        who = getattr(self.local, "who", None)
        if who is None:
            return
        with self.changed:
            self.waiting[who] = point
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.going.get(who, 0) > 0, 30)
            self.going[who] -= 1
            del self.waiting[who]

    def start(self, who, action):
        def play():
            self.local.who = who
            try:
                self.at("start")
                self.ended[who] = action()
            except BaseException as error:  # noqa: BLE001 - told to the test
                self.ended[who] = error
            finally:
                with self.changed:
                    self.changed.notify_all()

        self.ended = getattr(self, "ended", {})
        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        return thread

    def step(self, who):
        """Let one go on to its next failpoint, or its end; returns where it stands, None at the end."""
        with self.changed:
            assert self.changed.wait_for(lambda: who in self.waiting or who in self.ended, 30)
            if who in self.ended:
                return None
            self.going[who] = self.going.get(who, 0) + 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: not self.going[who] and (who in self.waiting or who in self.ended), 30)
            return self.waiting.get(who)

    def until(self, who, point):
        while (stands := self.step(who)) != point:
            assert stands is not None, f"{who} never came to {point}"

    def finish(self, *names):
        for who in names:
            while self.step(who) is not None:
                pass


def play(root, monkeypatch, schedule, *, collector=None):
    """A data set is made of what a dropped one left while two runs of gc go by; returns the report."""
    run(root, "a", "b", name="old", encoder=FakeEncoder(limit=2))
    drop(root, "old")
    one = job(root, "a", "b", "c", name="new")
    turns = Turns(monkeypatch)
    threads = [turns.start("planner", lambda: run_pass(one)), turns.start("gc", collector or (lambda: sweep(root)))]
    schedule(turns)
    turns.finish("gc", "planner")
    for thread in threads:
        thread.join(30)
    for ended in turns.ended.values():
        if isinstance(ended, BaseException):
            raise ended
    return turns.ended["planner"]


@pytest.fixture
def unprotected(monkeypatch):
    """Without what only saves work: workers do not hold gc back, and ledgers say nothing. What is left is the argument of `gc`."""
    monkeypatch.setattr(upkeep, "at_work", lambda *_args, **_named: [])
    monkeypatch.setattr(upkeep, "keys_of_passes", lambda *_args: iter(()))


@examples(40)
@given(steps=st.lists(st.sampled_from(["planner", "gc"]), max_size=40))
def test_however_a_pass_and_gc_take_turns_nothing_needed_is_ever_gone(tmp_path_factory, steps):
    root = tmp_path_factory.mktemp("turns") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upkeep, "at_work", lambda *_args, **_named: [])
        patch.setattr(upkeep, "keys_of_passes", lambda *_args: iter(()))
        report = play(root, patch, lambda turns: [turns.step(who) for who in steps])
        assert (report.complete, report.failed) == (True, 0)
        assert readable(root, "a", "b", "c") == ["a", "b", "c"]
        assert is_ok(root)
        sweep(root)
        assert readable(root, "a", "b", "c") == ["a", "b", "c"]
        assert is_ok(root)


def counted_then_removed(turns):
    """The planner counts a key as present; its segment is marked and removed; then the planner goes on."""
    turns.until("planner", "reconcile.before_commit")
    turns.finish("gc")


def named_after_gc_looked(turns):
    """gc looks what is needed and is about to remove; the planner, who counted before it was marked, publishes its catalog."""
    turns.until("planner", "reconcile.after_commit")
    turns.until("gc", "gc.before_removal")
    turns.finish("planner")


@pytest.mark.usefixtures("unprotected")
@pytest.mark.parametrize("schedule", [counted_then_removed, named_after_gc_looked])
def test_a_key_that_was_counted_as_present_and_then_removed_is_made_again(root, monkeypatch, schedule):
    assert play(root, monkeypatch, schedule).complete
    assert readable(root, "a", "b", "c") == ["a", "b", "c"]
    assert is_ok(root)


@pytest.mark.usefixtures("unprotected")
@pytest.mark.parametrize("schedule", [counted_then_removed, named_after_gc_looked])
def test_a_pass_that_does_not_look_again_loses_it(root, monkeypatch, schedule):
    """The tests above can fail."""
    monkeypatch.setattr("cachestore.jobs.run.reconcile.visible_segments", lambda _layout: AnySet())
    play(root, monkeypatch, schedule)
    assert readable(root, "a", "b", "c") == ["c"]


class AnySet:
    """Holds everything."""

    def __ge__(self, _other):
        return True


def test_a_pass_is_listed_as_over_only_once_it_has_ended(root):
    run(root, "a")
    layout = Layout(root)
    [plan] = names_in(layout.plans)
    assert list_passes(layout, plan) == [1]
    assert PassRef(plan, 1) not in upkeep.open_passes(layout, now=time.time())
    assert Path(layout.pass_folder(plan, 1) / "done.json").exists()
