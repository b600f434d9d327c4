"""numpy for a trainer whose cache is npz: it means the store where it gets the name of a value."""

import numpy as np
import pytest

import cachestore as cs
from cachestore import live
from cachestore.live import arming
from cachestore.live import run as runs
from cachestore.live.adapter import Refused

FILES = live.NpzFiles()
NUMPY = FILES.numpy(np)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(arming, "_armed", [(arming.Setting("a", str(tmp_path / "store"), "toy/one"), live.Adapter("toy"))])
    monkeypatch.setattr(runs, "_runs", [])
    FILES.drop()
    return live.current().store


def name_of(text):
    return live.ValueName(cs.key(text), f"cachestore:{text}")


def test_what_was_saved_is_held_until_it_is_taken_into_the_store(store):
    name = name_of("a")
    NUMPY.savez(name, rows=np.arange(3), flag=True)
    assert FILES.is_held(name)
    assert NUMPY.load(name)["rows"].tolist() == [0, 1, 2]
    taken = FILES.take("Strategy", [name], lambda name: [NUMPY.load(name)["rows"]])
    assert not FILES.is_held(name)
    store.put(name.key, taken[name.key])
    with NUMPY.load(name) as its:
        assert ("flag" in its, "lacking" in its, sorted(its.files), bool(its["flag"])) == (True, False, ["flag", "rows"], True)
        with pytest.raises(KeyError):
            _ = its["lacking"]


def test_a_name_that_is_not_in_the_store_is_an_error(store):
    with pytest.raises(cs.MissingEntry):
        NUMPY.load(name_of("lacking"))


def test_paths_are_files_as_ever(tmp_path):
    NUMPY.savez(tmp_path / "a.npz", np.arange(2), b=np.ones(1))
    NUMPY.savez_compressed(str(tmp_path / "b.npz"), b=np.ones(1))
    assert sorted(NUMPY.load(tmp_path / "a.npz", allow_pickle=False).files) == ["arr_0", "b"]
    assert (NUMPY.float32, FILES.numpy(NUMPY)) == (np.float32, NUMPY)


def test_a_value_that_was_not_saved_ends_the_run(store):
    with pytest.raises(Refused):
        FILES.take("Strategy", [name_of("a")], list)


def test_a_reader_that_returns_something_else_ends_the_run_before_it_is_taken(store):
    name = name_of("a")
    NUMPY.savez(name, rows=np.arange(6).reshape(2, 3))
    with pytest.raises(Refused):
        FILES.take("Strategy", [name], lambda name: [NUMPY.load(name)["rows"].T])


def test_made_up_values_learn_how_a_reader_calls_them():
    given = [np.arange(6.0).reshape(2, 3)]
    FILES.test_writer(
        "Strategy",
        "latents",
        given,
        lambda name, suffix: NUMPY.savez(name, **{f"latents{suffix}": given[0]}),
        lambda name: [NUMPY.load(name)["latents_2x3"]],
    )


READERS = {
    "it does not ask numpy": lambda _name: [np.ones(2)],
    "it returns other numbers": lambda name: [NUMPY.load(name)["latents"] + 1],
}


@pytest.mark.parametrize("how", READERS)
def test_made_up_values_that_do_not_come_back_end_the_run(how):
    with pytest.raises(Refused):
        FILES.test_writer("Strategy", "latents", [np.ones(2)], lambda name, _suffix: NUMPY.savez(name, latents=np.ones(2)), READERS[how])


def test_the_first_value_that_lacks_is_compared_and_held(store):
    names = [name_of("a"), name_of("b")]
    store.put(names[0].key, {"rows": np.zeros(1)})
    items = [(name, number) for number, name in enumerate(names)]
    made = {1: np.arange(2)}
    FILES.test_encoder(
        "Strategy", items, made.get, lambda item: NUMPY.savez(names[item], rows=made[item]), lambda name: NUMPY.load(name)["rows"]
    )
    assert FILES.is_held(names[1])
    FILES.drop()
    assert not FILES.is_held(names[1])


def test_if_nothing_lacks_the_first_value_is_read(store):
    name = name_of("a")
    store.put(name.key, {"rows": np.arange(6).reshape(2, 3)})
    FILES.test_encoder("Strategy", [(name, 0)], pytest.fail, pytest.fail, lambda name: [NUMPY.load(name)["rows"]])
    with pytest.raises(Refused):
        FILES.test_encoder("Strategy", [(name, 0)], pytest.fail, pytest.fail, lambda name: [NUMPY.load(name)["rows"].T])
