"""What callers pass wrongly: refused where it enters, by an error of ours that names the argument, what it should be and what it is."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import OK, USAGE, main
from cachestore.core.arguments import as_many, as_number, as_pairs, as_path, as_switch, as_whole, refuse
from tests.fakes import asks_for, encode, raising, tells_of


@pytest.fixture
def store(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as opened:
        yield opened


# Kinds of arguments


def test_a_refusal_names_the_argument_what_is_wanted_and_what_was_given():
    with pytest.raises(cs.BadInput, match=r"^batch_size must be a whole number of at least 1, not '8'$"):
        refuse("batch_size", "a whole number of at least 1", "8")


@pytest.mark.parametrize("given", [object(), list(range(1000)), np.zeros((9, 9))], ids=lambda given: type(given).__name__)
def test_of_what_is_long_or_says_nothing_a_refusal_names_the_type(given):
    with pytest.raises(cs.BadInput, match=f"^a must be b, not a value of the type {type(given).__name__}$"):
        refuse("a", "b", given)


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_of_numpy_is_one_of_python(given):
    assert type(as_whole("n", given, least=3)) is int


@pytest.mark.parametrize("given", [2, -1, True, np.True_, 3.0, np.float32(3), "3", None])
def test_what_is_no_whole_number_or_too_small_is_refused(given):
    with pytest.raises(cs.BadInput, check=asks_for("n")):
        as_whole("n", given, least=3)


@pytest.mark.parametrize("given", [1, 0.5, np.float32(0.5), np.int64(1)])
def test_a_number_of_numpy_is_one_of_python_too(given):
    assert type(as_number("x", given)) in {int, float}


@pytest.mark.parametrize(("given", "meant"), [(True, True), (0, False), (np.True_, True)])
def test_a_switch_is_a_bool_of_python_or_numpy_or_a_bit(given, meant):
    assert as_switch("shuffle", given) is meant


@pytest.mark.parametrize("given", ["no", None, 2, 0.0])
def test_a_switch_is_nothing_else(given):
    with pytest.raises(cs.BadInput, check=asks_for("shuffle")):
        as_switch("shuffle", given)


@pytest.mark.parametrize("given", ["a/b", Path("a/b")])
def test_a_path_is_a_text_or_a_path(given):
    assert as_path("path", given) == Path("a/b")


@pytest.mark.parametrize("given", [None, "", b"a", 5])
def test_nothing_else_is_a_path_nor_is_the_empty_text_the_current_folder(given):
    with pytest.raises(cs.BadInput, check=asks_for("path")):
        as_path("path", given)


def test_pairs_come_from_a_list_or_a_generator_and_none_at_all_is_fine():
    assert list(as_pairs("wanted", (pair for pair in [("a", 1), ["b", 2]]))) == [("a", 1), ("b", 2)]
    assert list(as_pairs("wanted", [])) == []


@pytest.mark.parametrize("given", ["text", b"bytes", {"a": 1}, None, 5])
def test_what_is_not_several_is_refused(given):
    with pytest.raises(cs.BadInput, check=asks_for("keys")):
        as_many("keys", given, "several keys")


# Public names


@pytest.mark.parametrize("given", [None, "", b"store", 5])
@pytest.mark.parametrize("call", [cs.open, cs.stats, cs.verify, cs.repair])
def test_what_is_no_path_of_a_store_is_an_error_that_says_so(call, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cs.BadInput, check=asks_for("path")):
        call(given)


def test_no_store_is_made_under_the_name_of_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing: Any = None
    for given in (nothing, ""):
        with pytest.raises(cs.BadInput, check=asks_for("path")):
            cs.open(given, mode="a")
        with pytest.raises(cs.BadInput, check=asks_for("store")):
            cs.precompute("prompts.txt", model="model", store=given)
        with pytest.raises(cs.BadInput, check=asks_for("store")):
            cs.import_cache("sd-scripts", "cache", store=given, data="data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "w"},
        {"mode": ["r"]},
        {"verify": None},
        {"io": "read"},
        {"access": "all"},
    ],
    ids=str,
)
def test_a_store_is_opened_with_options_that_are_known(options: Any, store):
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(options)))):
        cs.open(store.layout.root, **options)


@pytest.mark.parametrize("given", [None, 5, ["a"], np.int64(5)])
def test_a_key_is_made_of_texts_and_bytes(given):
    """bytes(5) would be five zeros: the key of another value."""
    with pytest.raises(cs.BadInput):
        cs.key("clip", given)


def test_a_path_is_a_part_of_a_key_by_its_text():
    assert cs.key("clip", Path("a")) == cs.key("clip", b"a")


@pytest.mark.parametrize("given", [None, 5, ("a",)])
def test_what_is_no_key_is_refused_by_every_call_that_takes_one(given, store):
    for call in [cs.Key, cs.Key.parse, store.get, store.describe, store.__contains__, lambda key: store.get_many([key])]:
        with pytest.raises(cs.BadInput):
            call(given)


@pytest.mark.parametrize("keys", [None, 5, "ab"])
def test_several_keys_are_no_single_one(keys, store):
    with pytest.raises(cs.BadInput, check=asks_for("keys")):
        store.get_many(keys)


@pytest.mark.parametrize(
    ("tensors", "meta", "option"),
    [
        (None, None, "tensors"),
        (np.zeros(2), None, "tensors"),
        ({1: np.zeros(2)}, None, ""),
        ({"a": np.zeros(2)}, ["note"], "meta"),
    ],
    ids=str,
)
def test_what_is_put_is_named_tensors_and_a_small_value(tensors, meta, option, store):
    with store.writer() as writer, pytest.raises(cs.BadInput, check=asks_for(option)):
        writer.put(cs.key("a"), tensors, meta)


@pytest.mark.parametrize(
    "options",
    [
        {"store": "cache/"},
        {"wanted": [1, 2]},
        {"wanted": [(cs.key("a"), 1), "ab"]},
        {"wanted": {"a": 1}},
        {"wanted": None},
        {"encode": None},
        {"group_by": "size"},
        {"batch_size": "8"},
        {"batch_size": 0},
        {"rank": "0", "world_size": 1},
        {"strict": "no"},
        {"on_progress": 5},
        {"cancel": True},
    ],
    ids=str,
)
def test_what_fill_cannot_use_is_refused_before_anything_is_done(options: Any, store):
    asked: Any = {"store": store, "wanted": [(cs.key("a"), 1)], "encode": raising(AssertionError("it was called")), **options}
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(options)))):
        cs.fill(**asked)


@pytest.mark.parametrize("answer", [None, [1]])
def test_an_answer_that_is_no_mapping_is_a_failure_in_words(answer: Any, store):
    report = cs.fill(store, [(cs.key("a"), 1)], lambda _batch: answer)
    assert report.failures[0]["reason"].startswith("encode must return {key: {name: tensor}}")


def test_an_answer_that_leaves_a_key_out_costs_that_one_alone(store):
    def forgetful(batch):
        return {key: tensors for (key, item), tensors in zip(batch, encode(batch).values(), strict=True) if item != 3}

    wanted = [(cs.key(str(n)), n) for n in range(6)]
    report = cs.fill(store, wanted, forgetful)
    assert (report.encoded, [failure["sample"] for failure in report.failures]) == (5, [str(wanted[3][0])])


def test_an_answer_under_what_is_no_key_ends_the_run(store):
    with pytest.raises(cs.BadInput):
        cs.fill(store, [(cs.key("a"), 1)], lambda _batch: {1: {"value": np.zeros(1)}})


def test_what_a_read_through_cannot_use_is_refused(store):
    wrong: Any = (("cache/", encode), (store, 5), (store, encode, ["raise"]))
    for arguments in wrong:
        with pytest.raises(cs.BadInput):
            cs.ReadThrough(*arguments)
    answer: Any = None
    with cs.ReadThrough(store, lambda _batch: answer, on_miss="encode") as read:
        unusable: Any = (None, [1])
        for wanted in unusable:
            with pytest.raises(cs.BadInput, check=asks_for("wanted")):
                read(wanted)
        with pytest.raises(cs.EncodeFailed):
            read([(cs.key("a"), 1)])


@pytest.mark.parametrize("files", ["model.safetensors", None, [None]])
def test_a_fingerprint_is_of_several_files(files):
    with pytest.raises(cs.BadInput):
        cs.fingerprint(files=files)


@pytest.mark.parametrize("options", [{"captions": None}, {"images": ["a.png"]}, {"extras": ["a"]}], ids=str)
def test_a_sample_of_something_else_is_named(options: Any, tmp_path):
    given: Any = {"id": "a", "captions": ("a cat",), **options}
    samples = [cs.Sample(**given)]
    with pytest.raises(cs.BadInput, check=tells_of("sample 0 ('a')", next(iter(options)))):
        cs.precompute(samples, model="model", store=tmp_path / "store", encode=("text",))


@pytest.mark.parametrize(
    "options",
    [
        {"data": ""},
        {"rank": "0", "world_size": 1},
        {"on_progress": 5},
        {"cancel": 5},
    ],
    ids=str,
)
def test_what_precompute_cannot_use_is_refused_before_anything_is_looked_at(options: Any, tmp_path):
    asked: Any = {"data": tmp_path / "gone", "model": "model", "store": tmp_path / "store", "inline": True, **options}
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(options)))):
        cs.precompute(**asked)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15", "mps", "xpu", "xpu:1"])
def test_a_device_that_torch_may_have_is_asked_of_torch_alone(device, tmp_path):
    with pytest.raises(cs.BadInput, check=tells_of(tmp_path / "gone")):
        cs.precompute(tmp_path / "gone", model="model", store=tmp_path / "store", inline=True, device=device)


@pytest.mark.parametrize(
    "options", [{"resolution": np.int64(64)}, {"resolution": range(64, 65)}, {"batch_size": np.int64(2)}, {"frames": np.int64(17)}], ids=str
)
def test_numbers_of_numpy_are_options_too(options: Any, tmp_path):
    with pytest.raises(cs.BadInput, check=tells_of(tmp_path / "gone")):
        cs.precompute(tmp_path / "gone", model="model", store=tmp_path / "store", inline=True, **options)


# Verify and repair


@pytest.mark.parametrize(
    "options",
    [
        {"level": "fast"},
        {"subset": "1/2"},
        {"subset": (1.0, 2)},
        {"recompute": "3"},
        {"source": "data"},
        {"model": "model"},
        {"on_finding": 5},
    ],
    ids=str,
)
def test_what_verify_cannot_use_is_refused(options: Any, store):
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(options)))):
        cs.verify(store.layout.root, **options)


@pytest.mark.parametrize("name", ["model", "vae", "text_encoder"])
def test_of_a_model_for_a_repair_that_encodes_nothing_it_is_reported_that_nothing_looks_at_it(name: Any, store, caplog):
    moved: Any = {name: "elsewhere"}
    with caplog.at_level(logging.WARNING):
        assert cs.repair(store.layout.root, **moved).missing == 0
    assert f"{name} needs refill=True" in caplog.text


def test_a_source_for_a_repair_without_refill_counts_for_lost_catalogs_alone_and_that_is_reported(store, caplog):
    with caplog.at_level(logging.WARNING):
        assert cs.repair(store.layout.root, source="elsewhere").missing == 0
    assert "source without refill=True" in caplog.text


@pytest.mark.parametrize("option", [["--seed", "1"], ["--source", "x"], ["--model", "m"]], ids=str)
def test_an_option_of_recompute_without_it_is_a_usage_error(option, store, capsys):
    assert main(["verify", str(store.layout.root), *option]) == USAGE
    assert f"{option[0]} needs --recompute N" in capsys.readouterr().err
    assert main(["verify", str(store.layout.root)]) == OK


@pytest.mark.parametrize("command", ["stats", "verify", "gc", "ls"])
def test_a_store_of_no_name_is_a_usage_error_and_not_the_current_folder(command, store, monkeypatch):
    monkeypatch.chdir(store.layout.root)
    with pytest.raises(SystemExit) as ended:
        main([command, ""])
    assert ended.value.code == USAGE
