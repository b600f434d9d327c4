"""`fill`: keys and an encoder of the caller's."""

import threading
import unicodedata
from collections import Counter

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.core.errors import BadInput, EncodeFailed, Incomplete
from cachestore.jobs.run import reconcile
from cachestore.store.format.line import list_line, read_entry
from cachestore.store.write import session as sessions
from tests import fakes
from tests.care.test_lines import collected
from tests.fakes import FakeEncoder, asks_for, captions, encode, fill_with, holds, names


def test_filling_with_nothing_is_complete_and_calls_nobody(root):
    with cs.open(root, mode="a") as store:
        report = cs.fill(store, [], lambda batch: pytest.fail("called"))
    assert (report.complete, report.wanted, report.samples, report.encoded) == (True, 0, 0, 0)
    assert verify(root).ok


def test_fill_shows_the_new_entries_in_the_store_that_was_filled(root):
    with cs.open(root, mode="a") as store:
        report = fill_with(store, "a", "b")
        assert store.get(cs.key("a"), as_numpy=True)["value"].tobytes() == bytes(cs.key("a"))
        assert len(store) == 2
    assert (report.complete, report.wanted, report.encoded, report.encoded_here) == (True, 2, 2, 2)


def test_a_second_fill_calls_nobody(root):
    with cs.open(root, mode="a") as store:
        fill_with(store, "a", "b")
        report = fill_with(store, "a", "b", function=lambda batch: pytest.fail("called"))
    assert (report.encoded, report.reused, report.encoded_here) == (0, 2, 0)


def test_of_equal_keys_the_first_item_counts(root):
    seen = []

    def look(batch):
        seen.extend(item for _key, item in batch)
        return encode(batch)

    with cs.open(root, mode="a") as store:
        report = cs.fill(store, [(cs.key("a"), "first"), (cs.key("a"), "second")], look)
    assert seen == ["first"]
    assert report.wanted == 1


def test_keys_may_come_and_go_in_any_form(root):
    def answer(batch):
        return {str(key) if number else bytes(key): value for number, (key, value) in enumerate(encode(batch).items())}

    with cs.open(root, mode="a") as store:
        report = cs.fill(store, [(str(cs.key("a")), 1), (bytes(cs.key("b")), 2)], answer)
    assert report.complete
    assert holds(root, ["a", "b"])


def test_items_of_one_call_share_their_group_and_are_at_most_a_batch(root):
    calls = []

    def look(batch):
        calls.append([item for _key, item in batch])
        return encode(batch)

    with cs.open(root, mode="a") as store:
        fill_with(store, *names(25), function=look, batch_size=4, group_by=lambda name: int(name[5:]) % 3)
    assert all(len(call) <= 4 and len({int(name[5:]) % 3 for name in call}) == 1 for call in calls)
    assert sorted(name for call in calls for name in call) == sorted(names(25))


def test_a_report_tells_how_busy_each_stage_was_over_all_workers_and_nothing_where_nothing_was_done(root):
    first = fakes.run(root, captions("a", "b"), FakeEncoder(), threads=2)
    assert set(first.stages) == {"read", "prepare", "encode", "append", "limiting"}
    assert sum(first.stages["append"].values()) > 0
    assert fakes.run(root, captions("a", "b"), FakeEncoder()).stages == {}


def test_fill_calls_in_the_callers_thread(root):
    seen = set()

    def look(batch):
        seen.add(threading.get_ident())
        return encode(batch)

    with cs.open(root, mode="a") as store:
        fill_with(store, *names(40), function=look)
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": -1}, {"rank": 0}, {"rank": 2, "world_size": 2}, {"max_failures": "some"}, {"max_failures": -1}],
)
def test_options_that_cannot_be_used_are_refused_before_anything_is_encoded(root, options):
    with cs.open(root, mode="a") as store, pytest.raises(BadInput):
        fill_with(store, "a", function=lambda batch: pytest.fail("called"), **options)


def test_a_malformed_key_is_refused(root):
    with cs.open(root, mode="a") as store, pytest.raises(BadInput):
        cs.fill(store, [("no key", 1)], encode)


def test_a_store_opened_for_reading_cannot_be_filled(root):
    cs.open(root, mode="a").close()
    with cs.open(root) as store, pytest.raises(BadInput, check=asks_for("store")):
        fill_with(store, "a")


def test_a_failure_is_in_the_report_and_with_strict_an_error(root):
    def refuse(batch):
        if any(item == "bad" for _key, item in batch):
            raise ValueError("no value for bad")
        return encode(batch)

    with cs.open(root, mode="a") as store:
        report = fill_with(store, "a", "bad", "b", function=refuse)
        assert (report.complete, report.failed, report.encoded) == (False, 1, 2)
        assert "no value for bad" in report.failures[0]["reason"]
        assert report.failures[0]["sample"] == str(cs.key("bad"))
        assert fill_with(store, "a", "bad", "b", function=refuse, max_failures=1).complete
        with pytest.raises(EncodeFailed):
            fill_with(store, "a", "bad", "b", function=refuse, strict=True)


def test_fill_tells_how_far_all_ranks_are_in_the_callers_thread_and_at_the_end(root):
    reported, threads = [], set()

    def tell(counts):
        reported.append(counts)
        threads.add(threading.get_ident())

    with cs.open(root, mode="a") as store:
        report = fill_with(store, *names(40), on_progress=tell)
    assert threads == {threading.get_ident()}
    counts = {"plan": report.plan, "pass": 1, "reused": 0, "encoded": 40, "failed": 0, "total": 40, "done": 40, "doing": ""}
    assert reported[-1] == {**counts, "rate": None, "seconds_left": 0.0}


def test_what_contradicts_itself_in_the_environment_is_reported_once(root, monkeypatch, caplog):
    monkeypatch.setattr("cachestore.jobs.start.ranks._reported", set())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with cs.open(root, mode="a") as store:
        for number in range(2):
            assert fill_with(store, f"name {number}").complete
    assert [record.levelname for record in caplog.records if "rank None of 4" in record.getMessage()] == ["WARNING"]


def test_a_new_pass_tries_failures_again(root):
    with cs.open(root, mode="a") as store:
        assert fill_with(store, "a", function=lambda batch: {}).failed == 1
        assert fill_with(store, "a").complete


def test_a_cancelled_fill_goes_on_from_there(root):
    stop, made = threading.Event(), []

    def count(batch):
        made.extend(item for _key, item in batch)
        if len(made) >= 8:
            stop.set()
        return encode(batch)

    with cs.open(root, mode="a") as store:
        with pytest.raises(Incomplete):
            fill_with(store, *names(40), function=count, batch_size=4, cancel=stop)
        assert len(made) == 8
        report = fill_with(store, *names(40), function=count)
    assert Counter(made) == Counter(names(40))
    assert (report.wanted, report.encoded, report.encoded_here) == (40, 40, 32)


def test_torch_tensors_and_arrays_may_be_returned_but_torch_is_not_imported(tmp_path):
    source = """
import sys, numpy, cachestore as cs
with cs.open(sys.argv[1], mode="a") as store:
    cs.fill(store, [(cs.key("a"), 1)], lambda batch: {key: {"x": numpy.ones(3)} for key, _ in batch})
print([name for name in ("torch", "transformers", "diffusers") if name in sys.modules])
"""
    out, err = fakes.program(source, tmp_path / "store").communicate(timeout=50)
    assert out == "[]\n", err


# fill(publish_as=)


def caption_keys(**captions):
    """(key, item) pairs of samples by id, each with its captions."""
    listed = [(sample, text) for sample, texts in captions.items() for text in ([texts] if isinstance(texts, str) else texts)]
    return [(cs.key("caption", text), {"id": sample, "text": text}) for sample, text in listed]


def published(store, name="texts"):
    found = store.dataset(name)
    return {sample: found[sample].get("value") for sample in found}


def test_what_was_wanted_becomes_the_table_of_a_data_set_and_nothing_else_stays_in_it(root):
    with cs.open(root, mode="a") as store:
        report = cs.fill(store, caption_keys(a="one", b=["two", "three"]), encode, publish_as="texts")
        two, three = cs.key("caption", "two"), cs.key("caption", "three")
        assert published(store) == {"a": cs.key("caption", "one"), "b": [two, three]}
        assert (report.complete, report.name, report.samples, report.encoded) == (True, "texts", 2, 3)
        assert list(store.dataset("texts", report.generation)) == ["a", "b"]
        assert store.describe(two).meta == {"encoder": "values", "owner": "texts"}
        again = cs.fill(store, caption_keys(b=["two", "three"], c="one"), encode, publish_as="texts")
        assert (again.encoded, again.reused) == (0, 3)
        assert published(store) == {"b": [two, three], "c": cs.key("caption", "one")}


@pytest.mark.parametrize("item", ["a", {"id": "a"}, cs.Sample("a", {}, ("x",))], ids=["text", "mapping", "attribute"])
def test_an_item_says_the_id_of_its_row(root, item):
    with cs.open(root, mode="a") as store:
        cs.fill(store, [(cs.key("k"), item)], lambda batch: encode([(key, "x") for key, _item in batch]), publish_as="texts")
        assert published(store) == {"a": cs.key("k")}


def test_an_id_in_two_unicode_forms_is_refused_and_one_is_kept_in_nfc(root):
    composed, decomposed = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    with cs.open(root, mode="a") as store:
        with pytest.raises(BadInput, check=asks_for("wanted")):
            cs.fill(store, caption_keys(**{composed: "one"}) + caption_keys(**{decomposed: "two"}), encode, publish_as="texts")
        cs.fill(store, caption_keys(**{decomposed: ["one", "two"]}), encode, publish_as="texts")
        assert published(store) == {composed: [cs.key("caption", "one"), cs.key("caption", "two")]}


def test_a_key_of_zeros_is_refused_before_anything_is_encoded(root):
    with cs.open(root, mode="a") as store, pytest.raises(BadInput, check=asks_for("wanted")):
        cs.fill(store, [(bytes(16), "a")], lambda batch: pytest.fail("called"), publish_as="texts")


@pytest.mark.parametrize("item", [7, None, {"name": "a"}, {"id": ""}, {"id": 7}, ""], ids=repr)
def test_an_item_without_an_id_is_refused_before_anything_is_encoded(root, item):
    with cs.open(root, mode="a") as store:
        with pytest.raises(BadInput, check=asks_for("wanted")):
            cs.fill(store, [(cs.key("k"), item)], lambda batch: pytest.fail("called"), publish_as="texts")
        assert store.names() == []
        assert not names_of_plans(root)


def names_of_plans(root):
    return [path.name for path in root.glob("plans/*")]


def test_the_same_again_publishes_nothing_and_one_edit_is_one_entry(root):
    with cs.open(root, mode="a") as store:
        first = cs.fill(store, caption_keys(a="one", b="two"), encode, publish_as="texts")
        again = cs.fill(store, caption_keys(a="one", b="two"), encode, publish_as="texts")
        assert again.generation == first.generation
        edited = cs.fill(store, caption_keys(a="one", b="2"), encode, publish_as="texts")
        entry = read_entry(store.layout, "texts", edited.generation)
    assert (edited.generation, list(entry.changes)) == (first.generation + 1, ["b"])


def test_a_row_of_several_keys_of_which_one_failed_has_none(root):
    def some(batch):
        if any(item["text"] == "bad" for _key, item in batch):
            raise ValueError("cannot be encoded")
        return encode(batch)

    with cs.open(root, mode="a") as store:
        report = cs.fill(store, caption_keys(a="one", b=["two", "bad"], c="bad"), some, publish_as="texts")
        assert published(store) == {"a": cs.key("caption", "one"), "b": None, "c": None}
    assert (report.complete, [row["sample"] for row in report.failures]) == (False, ["b", "c"])


@pytest.mark.parametrize("made", ["precompute", "files"])
def test_it_refuses_the_name_of_another_kind_of_data_set(root, made):
    fakes.run(
        root,
        captions("a"),
        FakeEncoder(),
    ) if made == "precompute" else cs.open(root, mode="a").files("train").save("x", {})
    with cs.open(root, mode="a") as store, pytest.raises(BadInput, check=asks_for("name")):
        cs.fill(store, caption_keys(a="one"), encode, publish_as="train")


def test_an_interrupted_one_leaves_the_table_as_it_was_and_the_same_call_goes_on(root):
    stop = threading.Event()

    def once(batch):
        stop.set()
        return encode(batch)

    with cs.open(root, mode="a") as store:
        cs.fill(store, caption_keys(a="one"), encode, publish_as="texts")
        wanted = caption_keys(**{f"s{number}": str(number) for number in range(5)})
        with pytest.raises(Incomplete):
            cs.fill(store, wanted, once, batch_size=1, cancel=stop, publish_as="texts")
        assert list(published(store)) == ["a"]
        report = cs.fill(store, wanted, encode, publish_as="texts")
        assert (report.complete, list(published(store))) == (True, [f"s{number}" for number in range(5)])


def test_ranks_share_the_work_and_one_publishes(root):
    cs.open(root, mode="a").close()
    wanted, reports = caption_keys(**{f"s{number}": str(number) for number in range(40)}), []

    def work(rank):
        with cs.open(root, mode="a") as store:
            reports.append(cs.fill(store, wanted, encode, rank=rank, world_size=3, publish_as="texts"))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({(report.generation, report.encoded, report.name) for report in reports}) == 1
    with cs.open(root) as store:
        assert published(store) == {item["id"]: key for key, item in wanted}
        assert list_line(store.layout, "texts").highest == reports[0].generation == 2


def test_a_pass_that_dies_once_its_rows_are_published_is_finished_by_the_same_call(root, monkeypatch):
    with cs.open(root, mode="a") as store:
        fakes.overtaken(monkeypatch, reconcile, "publish_done", fakes.raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cs.fill(store, caption_keys(a="one"), encode, publish_as="texts")
        assert list(published(store)) == ["a"]
        number = list_line(store.layout, "texts").highest
        report = cs.fill(store, caption_keys(a="one"), encode, publish_as="texts")
        assert (report.generation, report.encoded) == (number, 1)


def test_rows_that_somebody_else_publishes_meanwhile_are_compared_again(root, monkeypatch):
    other = {"other": {"value": cs.key("caption", "one")}}
    with cs.open(root, mode="a") as store:
        cs.fill(store, caption_keys(a="one"), encode, publish_as="texts")
        fakes.overtaken(monkeypatch, sessions, "link_next", lambda: store.publish("texts", other))
        cs.fill(store, caption_keys(a="one", b="two"), encode, publish_as="texts")
        assert published(store) == {"a": cs.key("caption", "one"), "b": cs.key("caption", "two")}


def keys_after_edits(root, times, **options):
    """The keys that are left after so many edits of one of three captions, a fold and `gc --apply`; then after `compact` and another."""
    left = []
    with cs.open(root, mode="a") as store:
        for number in range(times):
            cs.fill(store, caption_keys(a="one", b="two", c=f"edit {number}"), encode, **options)
        for _time in range(2):
            collected(store)
            left.append(set(store.keys()))
            cs.compact(root)
    return left


def test_after_edits_of_a_caption_what_is_named_is_left_and_plain_fill_keeps_all(root):
    named = {key for key, _item in caption_keys(a="one", b="two", c="edit 3")}
    with_neighbour = {*named, cs.key("caption", "edit 0")}  # it shares a segment with values that are needed
    assert keys_after_edits(root, 4, publish_as="texts") == [with_neighbour, named]
    assert list(map(len, keys_after_edits(root.with_name("plain"), 2))) == [4, 4]
