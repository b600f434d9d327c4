"""`cachestore status` for a person: what is done, who works on it, and what to do when nobody does."""

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.files.records import decode_record, encode_record
from cachestore.jobs.share.workers import FORMAT, VERSION, Heartbeat
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.fakes import FakeEncoder, captions


@pytest.fixture
def one(tmp_path):
    """A pass over two units that was begun, with nothing done."""
    one = fakes.job(tmp_path / "store", captions("a", "b"), [FakeEncoder()])
    fakes.open_pass(one)
    return one


def words(root, capsys):
    assert main(["status", str(root)]) == OK
    return capsys.readouterr().out


def test_a_store_in_which_nothing_was_begun_says_so(tmp_path, capsys):
    create_store(tmp_path / "store")
    assert words(tmp_path / "store", capsys) == "no run has been started here\n"


def test_a_pass_that_nobody_works_on_says_what_to_do(one, capsys):
    reported = words(one.layout.root, capsys)
    assert reported.startswith("train: not finished\n  0 of 2 values: 0 reused, 0 encoded, 0 failed")
    assert "no process is working on it: run the same command again, or `cachestore precompute --again" in reported


def test_of_a_data_set_that_a_program_fills_it_names_no_command(tmp_path, capsys):
    def encode(batch):
        if len(batch) > 1:
            raise cs.BadInput("no")
        return {key: {"x": np.zeros(1)} for key, _item in batch}

    wanted = [(cs.key(item), item) for item in "abc"]
    with cs.open(tmp_path / "store", mode="a") as store:
        cs.fill(store, wanted[:1], encode, batch_size=2, publish_as="own")
        with pytest.raises(cs.BadInput):
            cs.fill(store, wanted, encode, batch_size=2, publish_as="own")
    reported = words(tmp_path / "store", capsys)
    assert "run the same command again; it continues where it stopped" in reported


def test_a_rank_at_work_is_shown_with_its_phase_and_one_that_died_as_gone(one, capsys):
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 0, 2), Heartbeat(one.layout, one.plan.name, 1, "launch", 1, 2) as dead:
        path = one.layout.worker(dead.worker)
        body = decode_record(FORMAT, VERSION, path.read_bytes(), where=path)
        dead._lock.release()
        path.write_bytes(encode_record(FORMAT, VERSION, body | {"encoded": 1}))
        reported = words(one.layout.root, capsys)
    assert "1 of 2 values: 0 reused, 1 encoded, 0 failed" in reported
    assert "planning, 0 done, 0.0/s, last heartbeat " in reported
    assert "rank 1 has stopped, others do its work" in reported
    assert ": gone, 1 done" in reported
    assert "nobody" not in reported
    assert reported.startswith("train: a run is working on it\n")


def test_a_pass_that_ended_with_a_failure_is_not_called_complete(tmp_path, capsys):
    def refuse(batch):
        raise ValueError("not today")

    fakes.run(tmp_path / "store", captions("a"), FakeEncoder(before_encode=refuse))
    reported = words(tmp_path / "store", capsys)
    assert ", generation 1: ended, `cachestore why` says what failed\n  1 of 1 value: 0 reused, 0 encoded, 1 failed" in reported


def test_a_pass_that_ended_is_its_counts_alone(one, capsys):
    fakes.run_pass(one)
    reported = words(one.layout.root, capsys)
    assert "complete" in reported
    assert "0 reused, 2 encoded, 0 failed" in reported
    assert "rank" not in reported
