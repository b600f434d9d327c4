"""What callers pass wrongly: refused where it enters, by an error of ours that names the argument, what it should be and what it is."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import OK, USAGE, main
from cachestore.core.arguments import as_many, as_number, as_pairs, as_path, as_switch, as_whole, refuse
from tests.fakes import encode, raising


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
    with pytest.raises(cs.BadInput, match="n must be a whole number of at least 3"):
        as_whole("n", given, least=3)


@pytest.mark.parametrize("given", [1, 0.5, np.float32(0.5), np.int64(1)])
def test_a_number_of_numpy_is_one_of_python_too(given):
    assert type(as_number("x", given)) in {int, float}


@pytest.mark.parametrize(("given", "meant"), [(True, True), (0, False), (np.True_, True)])
def test_a_switch_is_a_bool_of_python_or_numpy_or_a_bit(given, meant):
    assert as_switch("shuffle", given) is meant


@pytest.mark.parametrize("given", ["no", None, 2, 0.0])
def test_a_switch_is_nothing_else(given):
    with pytest.raises(cs.BadInput, match="shuffle must be True or False"):
        as_switch("shuffle", given)


@pytest.mark.parametrize("given", ["a/b", Path("a/b")])
def test_a_path_is_a_text_or_a_path(given):
    assert as_path("path", given) == Path("a/b")


@pytest.mark.parametrize("given", [None, "", b"a", 5])
def test_nothing_else_is_a_path_nor_is_the_empty_text_the_current_folder(given):
    with pytest.raises(cs.BadInput, match="path must be a path"):
        as_path("path", given)


def test_pairs_come_from_a_list_or_a_generator_and_none_at_all_is_fine():
    assert list(as_pairs("wanted", (pair for pair in [("a", 1), ["b", 2]]))) == [("a", 1), ("b", 2)]
    assert list(as_pairs("wanted", [])) == []


@pytest.mark.parametrize("given", ["text", b"bytes", {"a": 1}, None, 5])
def test_what_is_not_several_is_refused(given):
    with pytest.raises(cs.BadInput, match="keys must be several keys"):
        as_many("keys", given, "several keys")


# Public names


@pytest.mark.parametrize("given", [None, "", b"store", 5])
@pytest.mark.parametrize("call", [cs.open, cs.stats, cs.verify, cs.repair])
def test_what_is_no_path_of_a_store_is_an_error_that_says_so(call, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cs.BadInput, match="path must be a path"):
        call(given)


def test_no_store_is_made_under_the_name_of_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing: Any = None
    for given in (nothing, ""):
        with pytest.raises(cs.BadInput, match="path must be a path"):
            cs.open(given, mode="a")
        with pytest.raises(cs.BadInput, match="store must be a path"):
            cs.precompute("prompts.txt", model="model", store=given)
        with pytest.raises(cs.BadInput, match="store must be a path"):
            cs.import_cache("sd-scripts", "cache", store=given, data="data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "w"}, 'mode must be "r" or "a", not \'w\''),
        ({"mode": ["r"]}, 'mode must be "r" or "a"'),
        ({"verify": None}, 'verify must be "first", "always" or "never", not None'),
        ({"io": "read"}, 'io must be "pread" or "mmap"'),
        ({"access": "all"}, 'access must be "private" or "group"'),
    ],
    ids=str,
)
def test_a_store_is_opened_with_options_that_are_known(options: Any, says, store):
    with pytest.raises(cs.BadInput, match=says):
        cs.open(store.layout.root, **options)


@pytest.mark.parametrize("given", [None, 5, ["a"], np.int64(5)])
def test_a_key_is_made_of_texts_and_bytes(given):
    """bytes(5) would be five zeros: the key of another value."""
    with pytest.raises(cs.BadInput, match="a part of a key must be a text or bytes"):
        cs.key("clip", given)


def test_a_path_is_a_part_of_a_key_by_its_text():
    assert cs.key("clip", Path("a")) == cs.key("clip", b"a")


@pytest.mark.parametrize("given", [None, 5, ("a",)])
def test_what_is_no_key_is_refused_by_every_call_that_takes_one(given, store):
    for call in [cs.Key, cs.Key.parse, store.get, store.describe, store.__contains__, lambda key: store.get_many([key])]:
        with pytest.raises(cs.BadInput, match="key"):
            call(given)


@pytest.mark.parametrize("keys", [None, 5, "ab"])
def test_several_keys_are_no_single_one(keys, store):
    with pytest.raises(cs.BadInput, match="keys must be several keys"):
        store.get_many(keys)


@pytest.mark.parametrize(
    ("tensors", "meta", "says"),
    [
        (None, None, "tensors must be a mapping"),
        (np.zeros(2), None, "tensors must be a mapping"),
        ({1: np.zeros(2)}, None, "the name of a tensor must be a text, not 1"),
        ({"a": np.zeros(2)}, ["note"], "meta must be a mapping"),
    ],
    ids=str,
)
def test_what_is_put_is_named_tensors_and_a_small_value(tensors, meta, says, store):
    with store.writer() as writer, pytest.raises(cs.BadInput, match=says):
        writer.put(cs.key("a"), tensors, meta)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"store": "cache/"}, "store must be what cs.open(path, mode=\"a\") returned, not 'cache/'"),
        ({"wanted": [1, 2]}, "wanted[0] must be a (key, item) pair, not 1"),
        ({"wanted": [(cs.key("a"), 1), "ab"]}, "wanted[1] must be a (key, item) pair, not 'ab'"),
        ({"wanted": {"a": 1}}, "for a mapping, pass its items()"),
        ({"wanted": None}, "wanted must be (key, item) pairs, not None"),
        ({"encode": None}, "encode must be a function, not None"),
        ({"group_by": "size"}, "group_by must be a function"),
        ({"batch_size": "8"}, "batch_size must be a whole number of at least 1, not '8'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"rank": "0", "world_size": 1}, "rank must be a whole number, not '0'"),
        ({"strict": "no"}, "strict must be True or False"),
        ({"on_progress": 5}, "on_progress must be a function"),
        ({"cancel": True}, "cancel must be an object with is_set()"),
    ],
    ids=str,
)
def test_what_fill_cannot_use_is_refused_before_anything_is_done(options: Any, says, store):
    asked: Any = {"store": store, "wanted": [(cs.key("a"), 1)], "encode": raising(AssertionError("it was called")), **options}
    with pytest.raises(cs.BadInput) as refused:
        cs.fill(**asked)
    assert says in str(refused.value)


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
    with pytest.raises(cs.BadInput, match="encode returned something that is not a key"):
        cs.fill(store, [(cs.key("a"), 1)], lambda _batch: {1: {"value": np.zeros(1)}})


def test_what_a_read_through_cannot_use_is_refused(store):
    wrong: Any = (("cache/", encode), (store, 5), (store, encode, ["raise"]))
    for arguments in wrong:
        with pytest.raises(cs.BadInput, match=r"store must be|encode|on_miss must be"):
            cs.ReadThrough(*arguments)
    answer: Any = None
    with cs.ReadThrough(store, lambda _batch: answer, on_miss="encode") as read:
        unusable: Any = (None, [1])
        for wanted in unusable:
            with pytest.raises(cs.BadInput, match="wanted"):
                read(wanted)
        with pytest.raises(cs.EncodeFailed, match="of the type NoneType"):
            read([(cs.key("a"), 1)])


@pytest.mark.parametrize("files", ["model.safetensors", None, [None]])
def test_a_fingerprint_is_of_several_files(files):
    with pytest.raises(cs.BadInput, match=r"files must be a list of paths|a file must be a path"):
        cs.fingerprint(files=files)


@pytest.mark.parametrize("options", [{"captions": None}, {"images": ["a.png"]}, {"extras": ["a"]}], ids=str)
def test_a_sample_of_something_else_is_named(options: Any, tmp_path):
    given: Any = {"id": "a", "captions": ("a cat",), **options}
    samples = [cs.Sample(**given)]
    with pytest.raises(cs.BadInput, match=rf"sample 0 \('a'\): {next(iter(options))} must be "):
        cs.precompute(samples, model="model", store=tmp_path / "store", encode=("text",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": ""}, "data must be a path"),
        ({"rank": "0", "world_size": 1}, "rank must be a whole number"),
        ({"on_progress": 5}, "on_progress must be a function"),
        ({"cancel": 5}, "cancel must be an object with is_set()"),
    ],
    ids=str,
)
def test_what_precompute_cannot_use_is_refused_before_anything_is_looked_at(options: Any, says, tmp_path):
    asked: Any = {"data": tmp_path / "gone", "model": "model", "store": tmp_path / "store", "inline": True, **options}
    with pytest.raises(cs.BadInput) as refused:
        cs.precompute(**asked)
    assert says in str(refused.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15", "mps", "xpu", "xpu:1"])
def test_a_device_that_torch_may_have_is_asked_of_torch_alone(device, tmp_path):
    with pytest.raises(cs.BadInput, match="gone"):
        cs.precompute(tmp_path / "gone", model="model", store=tmp_path / "store", inline=True, device=device)


@pytest.mark.parametrize(
    "options", [{"resolution": np.int64(64)}, {"resolution": range(64, 65)}, {"batch_size": np.int64(2)}, {"frames": np.int64(17)}], ids=str
)
def test_numbers_of_numpy_are_options_too(options: Any, tmp_path):
    with pytest.raises(cs.BadInput, match="gone"):
        cs.precompute(tmp_path / "gone", model="model", store=tmp_path / "store", inline=True, **options)


# Verify and repair


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": "fast"}, 'level must be "full" or "quick"'),
        ({"subset": "1/2"}, "subset must be \\(n, t\\)"),
        ({"subset": (1.0, 2)}, "a number of subset must be a whole number"),
        ({"recompute": "3"}, "recompute must be a whole number of at least 0"),
        ({"source": "data"}, "source needs recompute=N"),
        ({"model": "model"}, "model needs recompute=N"),
        ({"on_finding": 5}, "on_finding must be a function"),
    ],
    ids=str,
)
def test_what_verify_cannot_use_is_refused(options: Any, says, store):
    with pytest.raises(cs.BadInput, match=says):
        cs.verify(store.layout.root, **options)


@pytest.mark.parametrize("name", ["model", "vae", "text_encoder"])
def test_of_a_model_for_a_repair_that_encodes_nothing_it_is_reported_that_nothing_looks_at_it(name: Any, store, caplog):
    moved: Any = {name: "elsewhere"}
    with caplog.at_level(logging.WARNING):
        assert cs.repair(store.layout.root, **moved).missing == 0
    assert f"{name} needs `--refill`" in caplog.text


def test_a_source_for_a_repair_without_refill_counts_for_lost_catalogs_alone_and_that_is_reported(store, caplog):
    with caplog.at_level(logging.WARNING):
        assert cs.repair(store.layout.root, source="elsewhere").missing == 0
    assert "--source without `--refill`" in caplog.text


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
