"""Claims: create-only, numbered, and taken over from the dead."""

from typing import Any

import pytest

from cachestore.files.paths import ClaimName
from cachestore.storage.commit import create_store
from cachestore.work.claims import Claims
from cachestore.work.passes import join_pass
from cachestore.work.workers import FIRST_BATCH_SECONDS, SLOW_BATCHES, SLOW_SECONDS, Beat, Life, Watch
from tests.fakes import Clock

PLAN = "0" * 32


@pytest.fixture
def layout(tmp_path):
    return create_store(tmp_path / "store")


def beat(layout, **options):
    return Beat(layout, PLAN, 1, "launch", 0, 1, **options)


def claims_of(layout, worker, clock=None) -> Any:
    folder = join_pass(layout, PLAN, "launch").folder(layout)
    return Claims(layout, folder, worker, Watch(layout, clock or Clock()))


def test_without_claims_there_is_nothing_to_look_at(layout):
    claims = claims_of(layout, "a" * 32)
    assert claims.newest(0) == {}
    assert claims.slowest([]) is None


def test_of_two_workers_that_claim_a_partition_the_first_gets_it(layout):
    one, other = claims_of(layout, "a" * 32), claims_of(layout, "b" * 32)
    assert one.take(0, (0, 7)) == ClaimName(0, 0, 7, 0)
    assert other.take(0, (0, 7)) is None
    assert other.holder(ClaimName(0, 0, 7, 0)) == "a" * 32


def test_a_claim_is_taken_over_by_the_next_number_and_only_once(layout):
    one, other, third = (claims_of(layout, letter * 32) for letter in "abc")
    first = one.take(0, (0, 7))
    second = other.take(0, (0, 7), after=first)
    assert second == ClaimName(0, 0, 7, 1)
    assert third.take(0, (0, 7), after=first) is None
    assert third.newest(0) == {(0, 7): second}


def test_the_newest_claim_is_the_one_with_the_highest_number(layout):
    claims = claims_of(layout, "a" * 32)
    claim = claims.take(0, (0, 7))
    for _ in range(11):
        claim = claims.take(0, (0, 7), after=claim)
    assert claims.newest(0)[0, 7].n == 11


def test_claims_belong_to_a_round_and_a_recipe(layout):
    claims = claims_of(layout, "a" * 32)
    for slot in ((0, 7), (1, 7)):
        assert claims.take(0, slot)
    assert claims.take(1, (0, 7))
    assert set(claims.newest(0)) == {(0, 7), (1, 7)}
    assert set(claims.newest(1)) == {(0, 7)}


def test_a_file_of_another_name_is_no_claim(layout):
    claims = claims_of(layout, "a" * 32)
    (claims.folder.claims / "0.0.0.x").write_text("?")
    assert claims.newest(0) == {}


@pytest.mark.parametrize("content", [b"", b"{}", b"not json"])
def test_a_claim_that_cannot_be_read_is_a_dead_ones(layout, content):
    claims = claims_of(layout, "a" * 32)
    claim = claims.take(0, (0, 7))
    claims.folder.claim(claim).write_bytes(content)
    assert claims_of(layout, "b" * 32).life(claim) is Life.DEAD


def test_a_worker_may_take_up_its_own_earlier_claim(layout):
    claims = claims_of(layout, "a" * 32)
    assert claims.life(claims.take(0, (0, 7))) is Life.DEAD


def test_the_claim_of_a_living_worker_is_alive(layout):
    with beat(layout) as living:
        claim = claims_of(layout, living.worker).take(0, (0, 7))
        assert claims_of(layout, "b" * 32).life(claim) is Life.LIVE


def test_the_slowest_claim_is_the_one_whose_holder_stood_still_longest(layout):
    clock = Clock()
    with beat(layout) as one, beat(layout) as other:
        first = claims_of(layout, one.worker).take(0, (0, 1))
        second = claims_of(layout, other.worker).take(0, (0, 2))
        watching = claims_of(layout, "c" * 32, clock)
        assert watching.life(first) is Life.LIVE
        clock.sleep(5)
        assert watching.life(second) is Life.LIVE
        clock.sleep(SLOW_BATCHES * FIRST_BATCH_SECONDS)
        assert watching.slowest([second, first]) == first


def test_a_claim_is_slow_only_after_ten_seconds_or_five_of_its_slowest_batches(layout):
    clock = Clock()
    with beat(layout) as one:
        one.batch_took(4.0)
        one.write()
        claim = claims_of(layout, one.worker).take(0, (0, 1))
        watching = claims_of(layout, "c" * 32, clock)
        watching.life(claim)
        clock.sleep(SLOW_BATCHES * 4.0 - 0.1)
        assert watching.slowest([claim]) is None
        clock.sleep(0.2)
        assert watching.slowest([claim]) == claim


def test_a_fast_workers_claim_is_not_slow_before_ten_seconds(layout):
    clock = Clock()
    with beat(layout) as one:
        one.batch_took(0.001)
        one.write()
        claim = claims_of(layout, one.worker).take(0, (0, 1))
        watching = claims_of(layout, "c" * 32, clock)
        watching.life(claim)
        clock.sleep(SLOW_SECONDS - 0.1)
        assert watching.slowest([claim]) is None
