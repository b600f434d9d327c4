"""Claims: create-only, numbered, and taken over from the dead."""

from typing import Any

import pytest

from cachestore.files.paths import ClaimName
from cachestore.work.claims import Claims
from cachestore.work.passes import join_pass
from cachestore.work.workers import SILENT_SECONDS, SLOW_BATCHES, SLOW_SECONDS, Heartbeat, Life, Watch
from tests.fakes import Clock

PLAN = "0" * 32


def heartbeat(layout, **options):
    return Heartbeat(layout, PLAN, 1, "launch", 0, 1, **options)


def claims_of(layout, worker, clock=None) -> Any:
    return Claims(layout, join_pass(layout, PLAN, "launch").folder(layout), worker, Watch(layout, clock or Clock()))


def test_without_claims_there_is_nothing_to_look_at(layout):
    claims = claims_of(layout, "a" * 32)
    assert claims.newest(0) == {}
    assert claims.look_at([]) == []
    assert claims.died_before(0, (0, 0)) == []


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
    with heartbeat(layout) as living:
        claim = claims_of(layout, living.worker).take(0, (0, 7))
        assert claims_of(layout, "b" * 32).life(claim) is Life.LIVE


def test_how_long_each_holder_stood_still_is_told_by_this_workers_clock(layout):
    clock = Clock()
    with heartbeat(layout) as one, heartbeat(layout) as other:
        first = claims_of(layout, one.worker).take(0, (0, 1))
        second = claims_of(layout, other.worker).take(0, (0, 2))
        watching = claims_of(layout, "c" * 32, clock)
        watching.look_at([first])
        clock.sleep(5)
        watching.look_at([second])
        clock.sleep(7)
        assert [(held.claim, held.still_seconds) for held in watching.look_at([second, first])] == [(second, 7.0), (first, 12.0)]


@pytest.mark.parametrize(("slowest", "patience"), [(0.001, SLOW_SECONDS), (4.0, SLOW_BATCHES * 4.0)])
def test_a_claim_is_slow_only_after_ten_seconds_or_five_of_its_slowest_batches(layout, slowest, patience):
    clock = Clock()
    with heartbeat(layout) as one:
        one.batch_took(slowest)
        one.write()
        claim = claims_of(layout, one.worker).take(0, (0, 1))
        watching = claims_of(layout, "c" * 32, clock)
        watching.life(claim)
        clock.sleep(patience - 0.1)
        assert not watching.look_at([claim])[0].is_slow
        clock.sleep(0.2)
        assert watching.look_at([claim])[0].is_slow


def test_a_holder_of_many_claims_is_looked_at_once(layout, monkeypatch):
    claims = claims_of(layout, "a" * 32)
    names = [claims.take(0, (0, p)) for p in range(9)]
    watching, looked = claims_of(layout, "b" * 32), []
    watching.watch.read = lambda _layout, worker: looked.append(worker)
    assert [held.claim for held in watching.look_at(names)] == names
    assert looked == ["a" * 32]


# Who died with a partition


def died(layout):
    """A worker that took a partition and was killed: its lock yields and its heartbeat says nothing of an end."""
    one = heartbeat(layout)
    one.__enter__()
    one._lock.release()
    return one.worker


def successor(layout, *holders, slot=(0, 7)):
    """A worker that took a partition after these."""
    claim = None
    for holder in holders:
        claim = claims_of(layout, holder).take(0, slot, after=claim)
    claims = claims_of(layout, "f" * 32)
    assert claims.take(0, slot, after=claim)
    return claims


def test_nobody_died_before_the_first_claim(layout):
    assert successor(layout).died_before(0, (0, 7)) == []


def test_all_who_were_proved_dead_with_a_partition_are_named_in_order(layout):
    first, second = died(layout), died(layout)
    with heartbeat(layout) as living:
        claims = successor(layout, first, living.worker, second, first)
        assert claims.died_before(0, (0, 7)) == [first, second]
        assert claims.died_before(0, (0, 8)) == claims.died_before(1, (0, 7)) == []


def test_a_worker_that_ended_in_order_did_not_die_with_what_it_held(layout):
    with heartbeat(layout) as ended:
        pass
    claims = successor(layout, ended.worker)
    assert claims.life(ClaimName(0, 0, 7, 0)) is Life.DEAD
    assert claims.died_before(0, (0, 7)) == []


def test_neither_a_silent_worker_nor_a_damaged_claim_nor_this_worker_itself_is_a_proof_of_death(layout):
    with heartbeat(layout) as silent:
        claims = successor(layout, silent.worker, "f" * 32, "e" * 32)
        claims.folder.claim(ClaimName(0, 0, 7, 2)).write_bytes(b"?")
        claims.life(ClaimName(0, 0, 7, 0))
        claims.watch.clock.sleep(SILENT_SECONDS)
        assert claims.life(ClaimName(0, 0, 7, 0)) is Life.SILENT
        assert claims.life(ClaimName(0, 0, 7, 2)) is Life.DEAD
        assert claims.died_before(0, (0, 7)) == []
