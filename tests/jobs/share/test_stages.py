"""Clocks of the stages, and their sum over workers."""

import pytest

from cachestore.jobs.share.stages import STAGES, Stages, stage_fractions, stages_in_words, sum_stages
from tests.fakes import Clock


def heartbeat(**stages):
    return {stage: stages.get(stage, (0.0, 0.0)) for stage in STAGES}


def refuse_after(seconds, stages, clock):
    with stages.busy("append"):
        clock.sleep(seconds)
        raise OSError("the disk refuses")


def test_where_nothing_was_done_there_is_nothing_to_tell():
    assert Stages(Clock()).seconds() == {}
    assert sum_stages([]) == {}
    assert sum_stages([{}, {}]) == {}
    assert stages_in_words({}) == ""


def test_a_stage_is_busy_while_something_is_done_however_it_ends_and_waits_for_the_rest_of_the_stretch():
    clock = Clock()
    stages = Stages(clock)
    with stages.stretch(1):
        with stages.busy("encode"):
            clock.sleep(3)
        with pytest.raises(OSError, match="refuses"):
            refuse_after(1, stages, clock)
        clock.sleep(6)
    assert stages.seconds() == {"read": (0.0, 10.0), "prepare": (0.0, 10.0), "encode": (3.0, 7.0), "append": (1.0, 9.0)}


def test_reading_and_preparing_share_threads_and_so_wait_together():
    clock = Clock()
    stages = Stages(clock)
    with stages.stretch(2), stages.busy("read"), stages.busy("prepare"):
        clock.sleep(5)
    with stages.stretch(4):
        clock.sleep(1)
    assert stages.seconds()["read"] == stages.seconds()["prepare"] == (5.0, 4.0)


def test_the_limiting_stage_is_the_one_whose_threads_wait_least():
    one = heartbeat(encode=(60.0, 40.0), append=(10.0, 90.0), read=(20.0, 330.0), prepare=(50.0, 330.0))
    assert sum_stages([one])["limiting"] == "encode"
    summed = sum_stages([one, heartbeat(encode=(10.0, 90.0), append=(5.0, 95.0), read=(100.0, 20.0), prepare=(280.0, 20.0))])
    assert summed["prepare"] == {"busy_seconds": 330.0, "wait_seconds": 350.0}
    assert summed["limiting"] == "prepare"
    assert sum_stages([heartbeat(append=(9.0, 1.0), encode=(8.0, 2.0))])["limiting"] == "append"


def test_a_worker_whose_heartbeat_tells_of_no_stages_is_passed_over():
    assert sum_stages([{}, heartbeat(encode=(1.0, 1.0))])["encode"] == {"busy_seconds": 1.0, "wait_seconds": 1.0}


def test_a_person_is_told_of_fractions_and_of_what_limits():
    summed = sum_stages([heartbeat(read=(1.0, 40.0), prepare=(9.0, 40.0), encode=(45.0, 5.0), append=(5.0, 45.0))])
    assert stages_in_words(summed) == "the slowest part was encoding, busy 90% of the time (reading files 2%, preparing 18%, writing 10%)"


def test_the_fraction_of_a_stage_is_of_the_time_its_threads_had_and_those_that_are_shared_share_it():
    summed = sum_stages([heartbeat(read=(10.0, 60.0), prepare=(30.0, 60.0), encode=(25.0, 75.0), append=(0.0, 0.0))])
    assert stage_fractions(summed) == {"read": 0.1, "prepare": 0.3, "encode": 0.25}
    assert stage_fractions({}) == {}
