"""The self-test: what was written comes back, to the bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cachestore import live
from cachestore.live.adapter import Refused
from cachestore.live.self_test import called_once, check_among, round_trip

pytestmark = pytest.mark.torch
VALUE = {"rows": np.arange(6.0).reshape(2, 3), "mask": np.array([True, False]), "flag": np.array(True), "ids": np.arange(3)}


def test_a_store_returns_arrays_of_each_kind_as_they_are():
    live.check_same("a store", VALUE, round_trip(VALUE))


SAME = [
    (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    (torch.tensor(0.5), np.array(0.5, np.float32)),
    ((np.ones(2), [1, 2], None, "text"), [np.ones(2), (1, 2), None, "text"]),
    ({"a": np.array([np.nan])}, {"a": np.array([np.nan])}),
    ([], ()),
]


@pytest.mark.parametrize(("written", "read"), SAME)
def test_equal_values_pass(written, read):
    live.check_same("it", written, read)


OTHER = [
    (np.ones((2, 2)), np.ones((2, 2), np.float32), "float32"),
    (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, "[3, 2]"),
    (np.arange(4).reshape(2, 2), np.arange(4).reshape(2, 2).T, "other numbers"),
    (np.array([0.0]), np.array([-0.0]), "other numbers"),
    ([1, 2], [1], "1 parts"),
    ({"a": 1}, {"b": 1}, "'b'"),
    ([None, 1], [1, None], "[0]"),
    ({"a": ["x"]}, {"a": ["y"]}, "['a'][0]"),
]


@pytest.mark.parametrize(("written", "read", "word"), OTHER)
def test_a_difference_ends_the_run_and_is_named(written, read, word, capsys):
    with pytest.raises(Refused) as error:
        live.check_same("Cache.load", written, read)
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert "Cache.load" in said
    assert word in said


@pytest.mark.parametrize("read", [[VALUE["ids"], VALUE["rows"]], [None, True], [], [[0, 1, 2]]])
def test_parts_that_were_written_pass(read):
    check_among("it", VALUE, read)


@pytest.mark.parametrize("read", [[VALUE["rows"].T], [VALUE["rows"], np.zeros(3)], [VALUE["ids"].astype(np.int32)]])
def test_a_part_that_was_not_written_ends_the_run(read):
    with pytest.raises(Refused):
        check_among("it", VALUE, read)


def test_a_method_is_called_once_within_the_block_and_as_ever_after_it():
    class Thing:
        def __init__(self):
            self.calls = 0

        def make(self):
            self.calls += 1
            return self.calls

    thing = Thing()
    with called_once(thing, "make"):
        assert [thing.make(), thing.make()] == [1, 1]
    assert (thing.make(), vars(thing)) == (2, {"calls": 2})
    own = SimpleNamespace(make=lambda: 7)
    with called_once(own, "make"):
        own.make()
    assert own.make() == 7
