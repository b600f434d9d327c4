"""Reconcile: what a pass begins with, what a round reopens, and what the catalog of its end holds."""

from contextlib import closing
from dataclasses import replace

import pytest

from cachestore.core.errors import RecipeMismatch, Superseded
from cachestore.core.inputs import combined_digest, digests_of
from cachestore.core.keys import digest_bytes
from cachestore.files.paths import Layout, LedgerName
from cachestore.jobs.run import catalog_maker
from cachestore.jobs.run.worker import Worker
from cachestore.jobs.share.ledgers import Ledger, Outcome, publish_ledger, read_ledgers
from cachestore.jobs.share.passes import PassRef, join_pass, list_rounds, read_done, read_round
from cachestore.jobs.share.plan import read_plan
from cachestore.jobs.share.workers import Heartbeat
from cachestore.store.format.catalog import list_generations
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write.listing_numbers import listing_number, listing_numbers
from tests import fakes
from tests.fakes import FakeEncoder, Pictures, as_launch, captions, catalog, open_pass, pictures, run_pass, tells_of
from tests.jobs.bench import edits, failed, seeing, worked_on


def fetch(one, number=None):
    """Round and outcomes of a job's newest pass."""
    reconciler = fakes.reconciler(one, number)
    rounds = list_rounds(reconciler.ref.folder(one.layout))
    return read_round(one.layout, reconciler.ref, one.plan, rounds[-1]), reconciler.outcomes()


def close_round(one):
    opened, _ = fetch(one)
    with closing(load_snapshot(one.layout)) as snapshot:
        return fakes.reconciler(one).close_round(opened, snapshot)


def record(one, number, *outcomes, partition=0, launch=None):
    """A ledger for a partition of a round, as a worker of a launch would write it."""
    folder = fakes.reconciler(one).ref.folder(one.layout)
    publish_ledger(one.layout, folder, Ledger(LedgerName(number, 0, partition, partition), "w" * 32, launch or one.launch, outcomes))


# How a pass begins


def test_a_pass_over_nothing_begins_and_ends(root):
    one = fakes.job(root, [], [FakeEncoder()])
    open_pass(one)
    done = close_round(one)
    assert done is not None
    assert (done.report["complete"], done.report["wanted"], done.report["samples"]) == (True, 0, 0)
    assert len(catalog(root)) == 0


def test_the_first_pass_works_on_everything(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    open_pass(one)
    assert worked_on(one) == {"a", "b"}


def test_opening_a_pass_twice_changes_nothing(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    open_pass(one)
    open_pass(as_launch(one, "another"))
    assert fetch(one)[0].launch == "launch"


def test_the_second_pass_works_on_nothing(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    run_pass(one)
    again = as_launch(one, "again")
    open_pass(again)
    assert worked_on(again) == set()


def test_a_pass_works_on_what_is_new_and_on_what_was_lost(root):
    encoders = [FakeEncoder(limit=1)]
    fakes.run(root, captions("a"), *encoders)
    fakes.run(root, captions("a", "b"), *encoders)
    one = fakes.job(root, captions("a", "b", "c"), encoders, launch="third")
    with closing(load_snapshot(one.layout)) as snapshot:
        [lost] = [p.segment for p in snapshot.find([FakeEncoder().resolve({"caption": "b"}, None).key])[0]]
    one.layout.segment(lost.digest).unlink()
    open_pass(one)
    assert worked_on(one) == {"b", "c"}


# Rounds


def test_a_round_in_which_all_was_made_ends_the_pass(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    report = run_pass(one)
    assert report.complete
    assert list_rounds(PassRef(one.plan.name, 1).folder(one.layout)) == [0]


def test_a_unit_that_failed_for_good_is_not_tried_again(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    open_pass(one)
    record(one, 0, failed())
    done = close_round(one)
    assert done is not None
    assert done.report["failures"] == [{"sample": "0000", "encoder": "text", "reason": "it failed"}]


def test_a_unit_that_failed_for_now_is_tried_three_times(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    open_pass(one)
    for number in range(2):
        record(one, number, failed(is_transient=True))
        assert close_round(one) is None
    record(one, 2, failed(is_transient=True))
    assert close_round(one).report["failed"] == 1


def test_a_ledger_is_not_believed_where_the_entry_is_gone(root):
    """A ledger says "look there", never "present"."""
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    open_pass(one)
    key = FakeEncoder().resolve({"caption": "a"}, None).key
    for number in range(2):
        record(one, number, Outcome(0, "made", key))
        assert close_round(one) is None
    record(one, 2, Outcome(0, "made", key))
    done = close_round(one)
    assert (done.report["failed"], done.report["complete"]) == (1, False)
    assert done.report["failures"][0]["reason"]


def test_the_units_of_a_damaged_ledger_come_back(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    open_pass(one)
    record(one, 0, failed(0), partition=0)
    record(one, 0, failed(1), partition=1)
    fakes.reconciler(one).ref.folder(one.layout).ledger(LedgerName(0, 0, 1, 1)).write_bytes(b"?")
    assert close_round(one) is None
    assert [list(units) for units in fetch(one)[0].units] == [[1]]


def test_an_invocation_that_joins_a_pass_tries_its_failed_units_again(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    open_pass(one)
    record(one, 0, failed())
    assert close_round(as_launch(one, "later")) is None


def test_two_launches_at_once_try_a_failing_unit_once_more_each_and_then_end(root):
    """Whoever of them works and whoever reconciles: rounds do not go on for ever."""
    one = fakes.job(root, captions("a"), [FakeEncoder()], launch="worker's")
    open_pass(one)
    number = 0
    for number in range(10):
        record(one, number, failed(), launch="worker's")
        if close_round(as_launch(one, "reconciler's")) is not None:
            break
    assert number == 1


def test_of_two_ledgers_the_later_rounds_counts(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    open_pass(one)
    record(one, 0, failed(is_transient=True))
    close_round(one)
    record(one, 1, failed())
    assert not fetch(one)[1].transient[0]


# Sources that change


def half(root, source, names, *, launch="killed"):
    """A pass over pictures in which one worker recorded everything and died before it reconciled."""
    return left(root, source, pictures(*names), FakeEncoder("latents"), launch=launch)


def left(root, source, samples, encoder, *, launch="killed"):
    """A pass in which one worker recorded everything and died before it reconciled."""
    one = fakes.job(root, samples, [encoder], source=source, launch=launch)
    ref = open_pass(one)
    with Heartbeat(one.layout, one.plan.name, 1, launch, 0, 1) as heartbeat, closing(Worker(one, ref, heartbeat)) as worker:
        worker.do_round(fetch(one)[0])
    return one


def test_a_picture_replaced_since_an_unfinished_pass_recorded_it_is_encoded_again(root):
    source = Pictures({"a.png": b"one", "b.png": b"two"})
    one = half(root, source, ["a.png", "b.png"])
    source.files["a.png"], source.times["a.png"] = b"ONE", 5
    encoder = FakeEncoder("latents")
    report = run_pass(as_launch(one, "later", encoders=[encoder]))
    assert encoder.encoded == [b"ONE"]
    assert (report.complete, report.wanted, report.encoded) == (True, 2, 2)
    found = catalog(root)
    assert [cell.input.hex() for row in range(2) for cell in found.columns[0].row_cells(row)] == [
        fakes.digest_bytes(b"ONE"),
        fakes.digest_bytes(b"two"),
    ]


def test_a_picture_that_was_only_touched_since_is_read_but_not_encoded_and_its_new_time_is_kept(root):
    source = Pictures({"a.png": b"one"})
    one = half(root, source, ["a.png"])
    source.times["a.png"] = 5
    encoder = FakeEncoder("latents")
    report = run_pass(as_launch(one, "later", encoders=[encoder]))
    assert encoder.encoded == []
    assert report.complete
    assert catalog(root).columns[0].cell(0).stat == (3, 5)


def test_a_picture_that_disappeared_since_is_a_failure(root):
    source = Pictures({"a.png": b"one", "b.png": b"two"})
    one = half(root, source, ["a.png", "b.png"])
    del source.files["a.png"]
    report = run_pass(as_launch(one, "later"))
    assert (report.failed, report.encoded) == (1, 1)
    assert "No such file" in report.failures[0]["reason"]


# Captions that are shown images


def test_a_caption_is_another_unit_beside_other_images(root):
    source = Pictures({"a.png": b"a", "b.png": b"b", "same as a.png": b"a"})
    encoder = seeing()
    report = fakes.run(
        root, edits(("a.png",), ("b.png",), ("a.png", "b.png"), ("b.png", "a.png"), ("same as a.png",)), encoder, source=source
    )
    assert (report.wanted, report.encoded, report.reused) == (5, 4, 1)
    column = catalog(root).column("text", "caption")
    assert len({column.row_keys(row)[0] for row in range(5)}) == 4
    assert column.cell(0).stat == (1, fakes.YEAR_2000)
    assert column.cell(2).input == bytes.fromhex(
        combined_digest(digests_of({"caption": "redder", "images": {"control": ["", ""]}}, [digest_bytes(b"a"), digest_bytes(b"b")]))
    )


def test_an_image_replaced_since_an_unfinished_pass_recorded_its_text_makes_it_anew(root):
    source = Pictures({"a.png": b"a", "b.png": b"b"})
    one = left(root, source, edits(("a.png", "b.png")), seeing())
    source.files["b.png"], source.times["b.png"] = b"B", 5
    encoder = seeing()
    run_pass(as_launch(one, "later", encoders=[encoder]))
    assert encoder.encoded == ["redder"]


# Catalogs


def test_a_catalog_equal_to_the_newest_is_not_published_again(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    generations = {run_pass(as_launch(one, f"launch {n}")).generation for n in range(3)}
    assert generations == {1}


def test_a_damaged_catalog_costs_looking_not_encoding(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    run_pass(one)
    path = one.layout.catalog("train", 1)
    path.chmod(0o644)
    path.write_bytes(b"?")
    encoder = FakeEncoder()
    report = run_pass(as_launch(one, "again", encoders=[encoder]))
    assert encoder.encoded == []
    assert (report.complete, report.reused, report.generation) == (True, 2, 2)


def test_a_catalog_that_is_damaged_while_a_pass_builds_on_it_is_done_without(root):
    one = fakes.job(root, captions("a", "b"), [FakeEncoder()])
    run_pass(one)
    again = as_launch(one, "again")
    open_pass(again)
    path = one.layout.catalog("train", 1)
    path.chmod(0o644)
    path.write_bytes(b"?")
    report = run_pass(again)
    assert (report.complete, report.reused) == (True, 2)
    assert all(key is not None for row in range(2) for key in catalog(root).columns[0].row_keys(row))


# Reports


def test_the_end_names_every_launch_that_took_part(root):
    one = half(root, Pictures({"a.png": b"one"}), ["a.png"], launch="first")
    run_pass(as_launch(one, "second"))
    assert set(read_done(one.layout, PassRef(one.plan.name, 1)).launches) == {"first", "second"}


def test_the_index_covers_everything_at_the_end(root):
    one = fakes.job(root, captions(*map(str, range(20))), [FakeEncoder()])
    run_pass(one)
    with closing(load_snapshot(one.layout)) as snapshot:
        assert snapshot.uncovered == {}
        assert len(snapshot) == 20
    assert list_segments(one.layout)


def lasting(root):
    """The files of a store that outlive a pass."""
    return {path for name in ("segments", "index", "catalogs", "recipes") for path in (root / name).rglob("*")}


def test_a_pass_that_adds_nothing_adds_no_file_but_its_own_end(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()])
    run_pass(one)
    before = lasting(root)
    run_pass(as_launch(one, "again"))
    assert lasting(root) == before
    assert list_generations(one.layout, "train") == [1]
    assert list(read_ledgers(PassRef(one.plan.name, 2).folder(one.layout), 0)) == []


# Which listing of the source is the newest


def listed(catalog):
    return list(catalog.ids), catalog.generation, catalog.listing


def test_an_older_listing_never_takes_the_place_of_a_newer_one_and_its_entries_stay(root):
    older = fakes.job(root, captions("a", "b"), [FakeEncoder()], listing_number=1)
    fakes.run(root, captions("a", "b", "c"), FakeEncoder(), listing_number=2)
    with pytest.raises(Superseded, check=tells_of("generation 1", "3 samples", "lists 2")):
        run_pass(older)
    assert listed(catalog(root)) == (["0000", "0001", "0002"], 1, 2)
    other = fakes.job(root, captions("x"), [FakeEncoder()], listing_number=1)
    with pytest.raises(Superseded):
        run_pass(other)
    with closing(load_snapshot(other.layout)) as snapshot:
        assert len(snapshot) == 4, "what the superseded run encoded is gone"


def test_a_superseded_run_publishes_what_it_lists_anew(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()], listing_number=1)
    fakes.run(root, captions("a", "b"), FakeEncoder(), listing_number=2)
    with pytest.raises(Superseded):
        run_pass(one)
    run_pass(as_launch(one, "again", listing_number=3))
    assert listed(catalog(root)) == (["0000"], 2, 3)


def test_an_older_listing_of_the_same_rows_adds_its_encoder(root):
    text, images = FakeEncoder(), FakeEncoder("latents")
    samples = pictures("a.png")
    fakes.run(root, samples, images, listing_number=2)
    one = fakes.job(root, samples, [text], listing_number=1)
    run_pass(replace(one, plan=read_plan(one.layout, one.plan.name)))
    assert {column.encoder for column in catalog(root).columns} == {"text", "latents"}
    assert listed(catalog(root)) == (["a.png"], 2, 2)


def test_a_generation_published_between_comparison_and_publication_is_compared_too(root, monkeypatch):
    real, compared = catalog_maker.publish_draft, []

    def overtaken(layout, draft, **named):
        monkeypatch.setattr(catalog_maker, "publish_draft", real)
        fakes.run(root, captions("b"), FakeEncoder(), listing_number=1)
        return real(layout, draft, **named)

    monkeypatch.setattr(catalog_maker, "publish_draft", overtaken)
    fakes.run(root, captions("a"), FakeEncoder(), listing_number=2, compare=lambda previous: compared.append(list(previous.captions)))
    assert compared == [["b"]]
    assert listed(catalog(root))[1:] == (2, 2)


def test_a_catalog_that_comparison_refuses_is_not_published(root):
    def refuse(previous):
        raise RecipeMismatch(f"generation {previous.generation} was made otherwise")

    one = fakes.job(root, captions("a"), [FakeEncoder()], listing_number=2, compare=refuse)
    fakes.run(root, captions("b"), FakeEncoder(), listing_number=1)
    with pytest.raises(RecipeMismatch, check=tells_of("generation 1")):
        run_pass(one)
    assert list_generations(one.layout, "train") == [1]


def test_an_equal_catalog_is_published_where_an_older_listing_may_still_come(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()], listing_number=1)
    run_pass(one)
    with listing_number(one.layout, "train"), listing_number(one.layout, "train") as second, listing_number(one.layout, "train") as third:
        run_pass(as_launch(one, "third", listing_number=third))
        assert listed(catalog(root)) == (["0000"], 2, third)
        stale = fakes.job(root, captions("a", "b"), [FakeEncoder()], listing_number=second)
        with pytest.raises(Superseded):
            run_pass(stale)
    assert list_generations(one.layout, "train") == [1, 2]


def test_a_rebuilt_generation_keeps_the_number_of_its_listing(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()], listing_number=5)
    report = run_pass(one)
    one.layout.catalog("train", 1).unlink()
    done = read_done(one.layout, PassRef(one.plan.name, 1))
    assert fakes.reconciler(one, 1).rebuild_catalog(1, report.catalog_digest, done.report["listing"])
    assert listed(catalog(root)) == (["0000"], 1, 5)


def test_an_older_listing_of_the_same_names_never_replaces_what_a_newer_one_made(root):
    samples = captions("a", "b")
    fakes.run(root, samples, FakeEncoder(model="new"), listing_number=2)
    one = fakes.job(root, samples, [FakeEncoder(model="old")], listing_number=1)
    with pytest.raises(Superseded):
        run_pass(replace(one, plan=read_plan(one.layout, one.plan.name)))
    assert listed(catalog(root)) == (["0000", "0001"], 1, 2)


def test_an_older_listing_that_would_publish_what_is_there_ends_well(root):
    samples = captions("a")
    fakes.run(root, samples, FakeEncoder(), listing_number=2)
    report = fakes.run(root, samples, FakeEncoder(), listing_number=1)
    assert (report.complete, report.generation, list_generations(Layout(root), "train")) == (True, 1, [1])


def test_a_second_run_of_one_data_set_after_the_other_publishes_nothing_and_leaves_no_number(root):
    one = fakes.job(root, captions("a"), [FakeEncoder()], listing_number=0)
    for number in range(4):
        with listing_number(one.layout, "train") as listing:
            assert run_pass(as_launch(one, f"launch {number}", listing_number=listing)).generation == 1
    assert listing_numbers(one.layout, "train") == []


def test_two_listings_of_one_number_have_no_order_where_the_folder_of_numbers_was_lost(root):
    older = fakes.job(root, captions("a"), [FakeEncoder()], listing_number=1)
    fakes.run(root, captions("a", "b"), FakeEncoder(), listing_number=1)
    with pytest.raises(Superseded):
        run_pass(older)


def test_a_round_has_the_units_that_are_asked_for_first_and_then_the_rest(root):
    one = fakes.job(root, captions("a", "b", "c", "d", "e"), [FakeEncoder()])
    ref = join_pass(one.layout, one.plan.name, one.launch)
    with closing(load_snapshot(one.layout)) as snapshot:
        fakes.reconciler(one).open_pass(snapshot, [3, 1])
    opened = read_round(one.layout, ref, one.plan, 0)
    assert list(opened.units[0]) == [3, 1, 0, 2, 4]
    assert [list(opened.partition(0, number)) for number in range(2)] == [[3], [1]]
    assert run_pass(one).encoded == 5
