"""forget: samples go from all data sets, with `now` at once with their values and all that names them, and nothing else is lost."""

import json
import os
import shutil
import signal
import tempfile
import unicodedata
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore as cs
from cachestore.care import forget as module
from cachestore.care.collect import collect, compact
from cachestore.care.forget import forget
from cachestore.core.errors import BadInput, FormatError, LockTimeout, MissingEntry, StoreNotFound, Superseded
from cachestore.core.ranks import RankInfo
from cachestore.files.locks import locked
from cachestore.files.paths import Layout
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.task import Job
from cachestore.jobs.share.passes import list_passes
from cachestore.jobs.share.plan import publish_plan
from cachestore.jobs.share.workers import Heartbeat
from cachestore.store.format.catalog import Catalog, Cell, list_generations, make_column, read_catalog, rows_of, without_rows
from cachestore.store.format.line import list_line
from cachestore.store.format.marked import list_marked
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write import link
from cachestore.store.write.catalog_writer import draft_of
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.care.test_collect import age_all, is_ok
from tests.fakes import FakeEncoder, Pictures, asks_for, overtaken, pictures, tells_of
from tests.store.stores import flip

CAT, CAPTION = "photos/cat of mine.png", "caption of photos/cat of mine.png"
OTHERS = ["dog.png", "bird.png"]


class Telling(FakeEncoder):
    """Says in each value which caption it is of, as the encoders of text do."""

    def resolve(self, request, read):
        resolved = super().resolve(request, read)
        return replace(resolved, meta={**resolved.meta, **{name: request[name] for name in ("caption",) if name in request}})


def encoders():
    return Telling("text"), FakeEncoder("latents")


def job_of(root, *ids, name="train", both: Any = None, **options):
    """A pass over pictures of these names. Each lists its source after those before it."""
    both = both or encoders()
    layout = create_store(root)
    plan = fakes.plan_of(pictures(*ids), both, name=name, extra=[(0, {"caption": ""})])
    publish_plan(layout, plan)
    source: Any = Pictures({one: f"bytes of {one}".encode() for one in ids})
    options.setdefault("listing_number", max(listing_of(layout, name), 100) + 1)
    return Job(layout, plan, both, source, RankInfo(0, 1), f"launch {os.urandom(4).hex()}", **options)


def listing_of(layout, name):
    generations = list_generations(layout, name)
    return read_catalog(layout.catalog(name, generations[-1]), generation=generations[-1]).listing if generations else 0


def made(root, *ids, **options):
    return run_pass(job_of(root, *ids, **options))


def key(text):
    return cs.key("forget", text)


def published(root, name="own"):
    """A data set of a session, with entries above its table and below, in which the cat was set twice."""
    with cs.open(root, mode="a") as store, store.session(name) as session:
        for sample, text in (("dog.png", "dog"), (CAT, "first cat"), ("bird.png", "bird"), (CAT, "cat")):
            session.put(key(text), {"x": np.full(8, len(text), np.float32)}, {"of": sample})
            session.set(sample, x=key(text))
            session.flush()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Two data sets of passes and one of a session, all with the cat; it has two values in each of the first, and had two in the last."""
    root = tmp_path_factory.mktemp("forget") / "store"
    made(root, "dog.png", CAT)
    made(root, "dog.png", CAT, "bird.png")
    made(root, "dog.png", CAT, name="other")
    published(root)
    return root


@pytest.fixture
def root(template, tmp_path):
    return copied(template, tmp_path / "store")


def copied(template, root):
    shutil.copytree(template, root)
    return root


def files_with(root, *texts):
    """The files of a store that contain one of these texts, as it is or as JSON has it."""
    spelt = [each.encode() for text in texts for each in (text, json.dumps(text)[1:-1])]
    contents = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return sorted(str(path.relative_to(root)) for path, content in contents.items() if any(one in content for one in spelt))


def rows(root, name, generation=None):
    with cs.open(root) as store:
        table = store.dataset(name, generation)
        return {sample: table[sample] for sample in table.ids}


def values(root):
    """The bytes of each value in a store."""
    with Reader(root, verify="always") as reader:
        return {one: {name: array.tobytes() for name, array in reader.get(one, as_numpy=True).items()} for one in list(reader.keys())}


def keys_of(root, sample, *names):
    found = set()
    for name in names:
        for generation in list_generations(Layout(root), name):
            for cells in rows(root, name, generation).get(sample, {}).values():
                found.update(cells if isinstance(cells, list) else [cells])
    return found


def is_forgotten(root, before):
    """Whether nothing names the cat any more and its values are gone, while all others are there as they were."""
    after = values(root)
    rest = {one: value for one, value in before.items() if one in after}
    assert files_with(root, CAT, CAPTION) == []
    assert rest == after
    assert is_ok(root)
    for name in ("train", "other", "own"):
        assert CAT not in rows(root, name)
        assert "dog.png" in rows(root, name)
        for cells in rows(root, name).values():
            assert set(cells.values()) <= set(after)
    return before.keys() - after.keys()


# Without `now`


def test_each_data_set_is_published_without_the_sample_and_its_values_go_with_its_generations(root):
    before = values(root)
    whole = rows(root, "train")
    report = forget(root, [CAT])
    assert (dict(report.generations), report.values, report.left) == (
        {"other": 2, "own": list_generations(Layout(root), "own")[-1], "train": 3},
        0,
        (),
    )
    assert (report.older["train"], report.older["other"], len(report.plans)) == ((1, 2), (1,), 3)
    assert rows(root, "train") == {sample: cells for sample, cells in whole.items() if sample != CAT}
    assert (values(root), is_ok(root)) == (before, True)
    assert rows(root, "train", 2) == whole
    assert forget(root, [CAT]).generations == {}
    for _time in range(3):
        age_all(Layout(root), 40)
        collect(root, apply=True, grace_seconds=0, keep=1)
        compact(root)
    assert len(before.keys() - values(root).keys()) == 4
    assert is_ok(root)


def test_a_dry_run_changes_nothing_and_says_the_same(root):
    there = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    dry = forget(root, [CAT], now=True, apply=False)
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == there
    report = forget(root, [CAT], now=True)
    assert (dry.values, dry.generations, dry.plans, dict(dry.kept)) == (report.values, report.generations, report.plans, dict(report.kept))


def test_a_later_pass_over_the_source_makes_it_again_and_says_so_before(root):
    assert "precompute" in forget(root, [CAT]).remarks[0]
    assert CAT not in rows(root, "train")
    made(root, "dog.png", CAT, "bird.png")
    assert CAT in rows(root, "train")


def test_a_run_that_listed_its_source_before_does_not_put_the_sample_back(root):
    one = replace(job_of(root, "dog.png", CAT, "bird.png", "new.png"), listing_number=1)
    forget(root, [CAT])
    with pytest.raises(Superseded):
        run_pass(one)
    assert CAT not in rows(root, "train")


def test_one_data_set_alone_can_be_meant(root):
    report = forget(root, [CAT], name="other", now=True)
    assert (list(report.generations), report.values) == (["other"], 0)
    assert len(report.kept) == 2
    assert all("'train'" in who for who in report.kept.values())
    assert [CAT in rows(root, name) for name in ("other", "train", "own")] == [False, True, True]


# With `now`


def test_nothing_names_it_and_its_values_are_gone_at_once(root):
    before, going = values(root), keys_of(root, CAT, "train", "other", "own")
    assert files_with(root, CAT, CAPTION)
    report = forget(root, [CAT], now=True)
    assert is_forgotten(root, before) == {*going, key("first cat")}
    assert (report.values, report.left, dict(report.kept)) == (4, (), {})
    assert report.copied > 0
    with pytest.raises(BadInput, check=asks_for("samples", CAT)):
        forget(root, [CAT], now=True)
    made(root, *OTHERS)
    assert sorted(rows(root, "train")) == sorted(OTHERS)


def test_a_sample_may_be_named_in_any_unicode_form(root):
    with cs.open(root, mode="a") as store:
        store.publish("own", {"é": {"x": key("cat")}}, update=True)
    assert list(forget(root, [unicodedata.normalize("NFD", "é")], name="own").generations) == ["own"]
    assert "é" not in rows(root, "own")


def test_several_go_together_and_a_data_set_may_become_empty(root):
    report = forget(root, [CAT, "dog.png"], now=True)
    assert files_with(root, CAT, "dog.png") == []
    assert [sorted(rows(root, name)) for name in ("train", "other", "own")] == [["bird.png"], [], ["bird.png"]]
    assert (report.left, is_ok(root)) == ((), True)


def test_a_generation_that_does_not_name_it_stays_as_it_was(tmp_path):
    root = tmp_path / "store"
    made(root, "dog.png")
    made(root, "dog.png", CAT)
    first = rows(root, "train", 1)
    forget(root, [CAT], now=True)
    assert list_generations(Layout(root), "train") == [1, 3]
    assert rows(root, "train", 1) == first == rows(root, "train")
    with pytest.raises(BadInput):
        rows(root, "train", 2)


def test_a_value_that_another_sample_needs_stays_and_who_needs_it_is_named(root):
    with cs.open(root, mode="a") as store:
        store.publish("twins", {"twin.png": {"x": key("cat")}})
    report = forget(root, [CAT], now=True)
    assert list(report.kept) == [str(key("cat"))]
    assert "'twin.png' of 'twins'" in report.kept[str(key("cat"))]
    assert key("cat") in values(root)
    assert files_with(root, CAPTION) == []


def test_what_fill_made_stays_and_what_a_writer_put_for_it_goes(root):
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            writer.put(key("put"), {"x": np.ones(3, np.float32)})
            writer.put(key("apart"), {"x": np.ones(4, np.float32)})
        cs.fill(store, [(key("filled"), 1)], lambda batch: {one: {"x": np.ones(2, np.float32)} for one, _item in batch})
        store.publish("mine", {CAT: {"x": key("put"), "y": key("filled")}, "dog.png": {"x": key("dog")}})
    report = forget(root, [CAT], now=True)
    assert {name: name in values(root) for name in (key("put"), key("filled"), key("apart"))} == {
        key("put"): False,
        key("filled"): True,
        key("apart"): True,
    }
    assert "fill" in report.kept[str(key("filled"))]
    assert is_ok(root)


def test_a_caption_that_another_sample_has_keeps_its_value(tmp_path):
    root = tmp_path / "store"
    samples = [replace(one, captions=("the same",)) for one in pictures(CAT, "dog.png")]
    source = Pictures({one.id: one.id.encode() for one in samples})
    fakes.run(root, samples, *encoders(), source=source, listing_number=1)
    report = forget(root, [CAT], now=True)
    assert (report.values, len(report.kept)) == (1, 1)
    assert files_with(root, CAT) == []
    assert is_ok(root)


def test_an_unfinished_run_that_lists_it_is_given_up_and_what_it_made_goes(tmp_path):
    root = tmp_path / "store"
    one = job_of(root, CAT, both=(Telling("text", limit=1), FakeEncoder("latents", before_encode=fakes.raising(KeyboardInterrupt))))
    with pytest.raises(KeyboardInterrupt):
        run_pass(one)
    assert values(root)
    report = forget(root, [CAT], now=True)
    assert (len(report.plans), report.generations) == (1, {})
    assert files_with(root, CAT, CAPTION) == []
    assert list_passes(Layout(root), one.plan.name) == []


def test_a_pass_that_took_units_from_a_removed_generation_ends_all_the_same(root):
    one = job_of(root, "dog.png", "bird.png", "new.png")
    fakes.open_pass(one)
    forget(root, [CAT], now=True)
    again = replace(job_of(root, "dog.png", "bird.png", "new.png"), listing_number=5000)
    assert run_pass(again).complete
    assert sorted(rows(root, "train")) == ["bird.png", "dog.png", "new.png"]
    assert is_ok(root)


def test_an_open_reader_finds_the_others_and_misses_the_forgotten(root):
    before, going = values(root), keys_of(root, CAT, "train", "own")
    with Reader(root) as reader:
        forget(root, [CAT], now=True)
        for one in before:
            if one in going or one == key("first cat"):
                with pytest.raises(MissingEntry):
                    reader.get(one, as_numpy=True)
            else:
                assert {name: array.tobytes() for name, array in reader.get(one, as_numpy=True).items()} == before[one]


def test_a_session_that_lives_goes_on_and_may_set_the_sample_again(root):
    with cs.open(root, mode="a") as store:
        session = store.session("own")
        session.set("late.png", x=key("dog"))
        forget(root, [CAT], now=True)
        session.flush()
        assert sorted(rows(root, "own")) == ["bird.png", "dog.png", "late.png"]
        session.set(CAT, x=key("cat"))
        with pytest.raises(BadInput):  # its value is gone
            session.flush()
        files = store.files("files")
        files.save(CAT, {"x": np.ones(2, np.float32)})
        files.save("dog", {"x": np.zeros(2, np.float32)})
        forget(root, [CAT], now=True)
        assert files.glob() == ["dog"]
        assert files.keys("dog") == ["x"]
    assert files_with(root, CAT) == []


# Races


@pytest.mark.parametrize("moment", ["mark", "tidy_line"])
def test_a_name_that_comes_before_or_after_the_mark_keeps_the_value(root, monkeypatch, moment):
    """Who publishes a name looks at the marks afterwards, and `forget` reads names after its fences: one of them sees the other."""

    def publish_late():
        with cs.open(root, mode="a") as store:
            store.publish("late", {"late.png": {"x": key("cat")}})

    overtaken(monkeypatch, module, moment, publish_late)
    report = forget(root, [CAT], now=True)
    assert str(key("cat")) in report.kept
    assert key("cat") in values(root)
    assert is_ok(root)


def test_a_flush_that_had_checked_its_keys_before_the_mark_checks_them_again(root, monkeypatch):
    with cs.open(root, mode="a") as store, store.session("late") as session:
        session.set("late.png", x=key("cat"))
        overtaken(monkeypatch, link, "publish", lambda: forget(root, [CAT], now=True))
        with pytest.raises(BadInput, check=asks_for("rows", "late.png")):
            session.flush()
        session.remove("late.png")
    assert (rows(root, "late"), is_ok(root)) == ({}, True)


@pytest.mark.parametrize("moment", ["mark", "tidy_line", "remove_marked"])
def test_a_sample_that_is_published_again_meanwhile_is_whole_or_told_of(root, monkeypatch, moment):
    def set_again():
        with cs.open(root, mode="a") as store, store.session("own") as session:
            session.put(key("cat"), {"x": np.full(8, 3, np.float32)})
            session.set(CAT, x=key("cat"))

    overtaken(monkeypatch, module, moment, set_again)
    report = forget(root, [CAT], now=True)
    assert "again" in report.left[0]
    assert rows(root, "own")[CAT] == {"x": key("cat")}
    assert key("cat") in values(root)
    assert is_ok(root)
    monkeypatch.undo()
    assert forget(root, [CAT], now=True).left == ()
    assert files_with(root, CAT, CAPTION) == []


def test_a_copy_that_compact_makes_meanwhile_goes_too(root, monkeypatch):
    overtaken(monkeypatch, module, "mark", lambda: compact(root))
    before = values(root)
    assert forget(root, [CAT], now=True).left == ()
    assert len(is_forgotten(root, before)) == 4


def test_a_collection_meanwhile_loses_nothing(root, monkeypatch):
    before = values(root)
    overtaken(monkeypatch, module, "plan_removal", lambda: collect(root, apply=True, grace_seconds=0))
    forget(root, [CAT], now=True)
    assert len(is_forgotten(root, before)) == 4
    for _time in range(2):
        age_all(Layout(root), 40)
        collect(root, apply=True, grace_seconds=0)
    assert list_marked(Layout(root)) == []
    is_forgotten(root, before)


def test_another_forget_waits_and_then_says_so(root, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.05)
    with locked(Layout(root).lock("forget"), seconds=1), pytest.raises(LockTimeout):
        forget(root, [CAT])


def test_it_is_refused_while_a_worker_works_on_a_plan_that_lists_it(root):
    one = job_of(root, CAT, "dog.png", "bird.png", "new.png")
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 0, 1), pytest.raises(BadInput):
        forget(root, [CAT])
    assert CAT in rows(root, "train")
    with Heartbeat(one.layout, "", 0, "launch", 0, 1):
        forget(root, [CAT])


# Deaths and damage


def died_at(root, number, *, within=False):
    """Whether a process that forgets the cat died at its n-th call that changes something."""
    from tests.torture.watching import watch

    pid = os.fork()
    if pid == 0:
        numbers = count(1)

        def around(call, real):
            if call.changes and next(numbers) == number:
                if within and call.name == "write":
                    real(bytes(call.data)[: len(call.data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real()

        try:
            watch(root, around)
            forget(root, [CAT], now=True)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def check_deaths(template, folder, numbers):
    before = values(template)
    for number in numbers:
        root = copied(template, folder / f"{number}")
        if not died_at(root, number, within=number % 2 == 1):
            return number
        assert is_ok(root), number
        with suppress(BadInput):  # it died after its last step
            assert forget(root, [CAT], now=True).left == (), number
        assert len(is_forgotten(root, before)) == 4, number
        shutil.rmtree(root)
    return None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_killed_at_some_calls_the_same_command_ends_it(template, tmp_path):
    assert check_deaths(template, tmp_path, range(3, 400, 41)) is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_killed_at_every_call_the_same_command_ends_it(template, tmp_path):
    assert (check_deaths(template, tmp_path, count(1)) or 0) > 100


def test_a_damaged_segment_keeps_the_names_until_it_is_repaired(root):
    before, layout = values(root), Layout(root)
    with closing(load_snapshot(layout)) as snapshot:
        [[location]] = snapshot.find([key("cat")])
    path = layout.segment(location.segment.digest)
    flip(path, path.stat().st_size - 1)
    flip(path, 20)
    report = forget(root, [CAT], now=True)
    assert "repair" in report.left[0]
    assert CAT not in rows(root, "own")
    cs.repair(root)
    again = forget(root, [CAT], now=True)
    assert key("cat") not in values(root)
    assert all(line.startswith("quarantine/") for line in again.left)
    shutil.rmtree(layout.quarantine)
    assert files_with(root, CAT, CAPTION) == []
    assert values(root).items() <= before.items()


def test_a_damaged_catalog_stops_it_before_anything_is_changed(root):
    path = Layout(root).catalog("other", 1)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9])
    segments = list_segments(Layout(root))
    with pytest.raises(FormatError):
        forget(root, [CAT], now=True)
    assert (list_generations(Layout(root), "train"), list_segments(Layout(root))) == ([1, 2], segments)


def test_leftovers_of_a_dropped_data_set_go(root):
    layout = Layout(root)
    entry = next(layout.catalog_folder("own").glob("*.changes"))
    kept = entry.read_bytes()
    cs.drop(root, "own")
    entry.write_bytes(kept)  # as of a drop that was interrupted
    assert list_line(layout, "own").entries == []
    forget(root, [CAT], now=True)
    assert [name for name in files_with(root, CAT) if not name.startswith("segments/")] == []


# What is asked for


def test_what_is_not_there_is_refused_and_nothing_asked_for_does_nothing(root, tmp_path):
    with pytest.raises(BadInput, check=asks_for("samples", "'absent.png'")):
        forget(root, [CAT, "absent.png"])
    assert CAT in rows(root, "train")
    with pytest.raises(BadInput, check=asks_for("samples")):
        forget(root, CAT)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInput, check=tells_of("'trian'")):
        forget(root, [CAT], name="trian")
    with pytest.raises(StoreNotFound):
        forget(tmp_path / "nowhere", [CAT])
    assert forget(root, []).generations == {}


# The rows of a catalog


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=8), st.sets(st.integers(0, 7)))
def test_a_catalog_without_rows_is_the_one_that_was_made_of_the_others(described, gone):
    def catalog_of(numbers):
        cells = [
            [Cell(cs.Key(bytes([n, c] * 8)), bytes([n] * 32), (n, c), {"size": (n, c)}) for c in range(described[n][0])] for n in numbers
        ]
        texts = [[f"caption {n}.{c}" for c in range(described[n][1])] for n in numbers]
        masks = [[f"mask {n}"] if described[n][2] else [] for n in numbers]
        at, masks_at = (np.cumsum([0, *map(len, lists)]).tolist() for lists in (texts, masks))
        column = make_column("latents", "image", "f" * 64, {}, cells)
        images = {"mask": (masks_at, [*chain(*masks)])}
        return Catalog("train", {}, {}, [f"{n}" for n in numbers], at, [*chain(*texts)], images, ["{}"] * len(texts), (column,))

    def bytes_of(catalog):
        return b"".join(map(bytes, draft_of(catalog).chunks(1)))

    whole, rest = catalog_of(range(len(described))), [n for n in range(len(described)) if n not in gone]
    table = read_table_of(whole, bytes_of(whole))
    assert rows_of(table, {f"{n}" for n in gone}) == [n for n in range(len(described)) if n in gone]
    for catalog in (whole, table):
        found = without_rows(catalog, {f"{n}" for n in gone})
        if len(rest) == len(described):
            assert found is None
            continue
        wanted = catalog_of(rest)
        facts = {name: wanted.columns[0].facts.get(name, []) for name in whole.columns[0].facts}
        assert found is not None
        assert bytes_of(found) == bytes_of(replace(wanted, columns=(replace(wanted.columns[0], facts=facts),)))


def read_table_of(catalog, content):
    """A catalog as it is read from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / catalog.name / "1.safetensors"
        path.parent.mkdir()
        path.write_bytes(content)
        return read_catalog(path, generation=1)


def test_a_picture_s_files_are_forgotten_with_it(tmp_path):
    """Its cache had a folder for the picture, and forgetting the picture said that nothing names it."""
    with cs.open(tmp_path / "store", mode="a") as store, store.files("trainer") as files, store.session("own") as session:
        for number, path in enumerate(("cat.png/1024x768", "cat.png/512x512", "cat.png", "cat.png2", "dog.png/512x512")):
            files.save(path, {"x": np.full(2, number, np.float32)})
        files.remove("cat.png/512x512")
        session.put(cs.key("own"), {"x": np.ones(3, np.float32)})
        session.set("cat.png/row", x=cs.key("own"))
        session.flush()
        shown = forget(store.layout.root, ["cat.png"], now=True, apply=False)
        done = forget(store.layout.root, ["cat.png"], now=True)
        assert set(shown.samples) == set(done.samples) == {"cat.png", "cat.png/1024x768", "cat.png/512x512"}
        assert (shown.values, done.values) == (3, 3)
        assert files.glob() == ["cat.png2", "dog.png/512x512"]
        assert len(cs.open(store.layout.root)) == 3
        assert list(store.dataset("own").ids) == ["cat.png/row"]


def test_a_value_that_was_forgotten_before_goes_with_the_next_that_is_forgotten_at_once(tmp_path):
    """With what named the second one, all that named the first was removed: so nothing could remove its value any more."""
    with cs.open(tmp_path / "store", mode="a") as store, store.files("trainer") as files:
        for number, path in enumerate(("a", "b", "c")):
            files.save(path, {"x": np.full(2, number, np.float32)})
        forget(store.layout.root, ["a"])
        assert len(cs.open(store.layout.root)) == 3
        done = forget(store.layout.root, ["b"], now=True)
        assert (done.left, done.kept) == ((), {})
        assert len(cs.open(store.layout.root)) == 1
        assert files.load("c")["x"].tolist() == [2, 2]
        assert is_ok(store.layout.root)
