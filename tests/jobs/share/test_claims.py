"""Claims: create-only, numbered, and taken over from the dead."""

import os
import sys
from contextlib import contextmanager
from typing import Any

import pytest

from cachestore.files.paths import ClaimName
from cachestore.jobs.share.claims import TORN_SECONDS, Claims
from cachestore.jobs.share.passes import join_pass
from cachestore.jobs.share.workers import SILENT_SECONDS, SLOW_BATCHES, SLOW_SECONDS, Heartbeat, Life, Watch
from tests.fakes import Clock

PLAN = "0" * 32
SEVEN = range(7, 8)


def heartbeat(layout, **options):
    return Heartbeat(layout, PLAN, 1, "launch", 0, 1, **options)


def claims_of(layout, worker, clock=None) -> Any:
    return Claims(layout, join_pass(layout, PLAN, "launch").folder(layout), worker, Watch(layout, clock or Clock()))


@contextmanager
def named_calls():
    """The calls that name a file, as Python tells them."""
    calls, names = [], {"open", "os.link", "os.rename", "os.remove", "os.listdir", "os.scandir", "os.mkdir", "os.chmod"}
    is_on = [True]
    sys.addaudithook(lambda event, of: calls.append(event) if is_on and event in names and not isinstance(of[0], int) else None)
    yield calls
    is_on.clear()


def test_without_claims_there_is_nothing_to_look_at(layout):
    claims = claims_of(layout, "a" * 32)
    assert claims.newest(0) == {}
    assert claims.judge({}) == []
    assert claims.died_before(0, 0, [0]) == []


def test_of_two_workers_that_claim_a_partition_the_first_gets_it(layout):
    one, other = claims_of(layout, "a" * 32), claims_of(layout, "b" * 32)
    assert one.take(0, 0, SEVEN) == ClaimName(0, 0, 7, 7, 0)
    assert other.take(0, 0, SEVEN) is None
    assert other.holder(ClaimName(0, 0, 7, 7, 0)) == "a" * 32


def test_a_claim_is_taken_over_by_the_next_number_and_only_once(layout):
    one, other, third = (claims_of(layout, letter * 32) for letter in "abc")
    first = one.take(0, 0, SEVEN)
    second = other.take(0, 0, SEVEN, after=first)
    assert second == ClaimName(0, 0, 7, 7, 1)
    assert third.take(0, 0, SEVEN, after=first) is None
    assert third.newest(0) == {(0, 7): second}


def test_the_newest_claim_is_the_one_with_the_highest_number(layout):
    claims = claims_of(layout, "a" * 32)
    claim = claims.take(0, 0, SEVEN)
    for _ in range(11):
        claim = claims.take(0, 0, SEVEN, after=claim)
    assert claims.newest(0)[0, 7].n == 11


def test_claims_belong_to_a_round_and_a_recipe(layout):
    claims = claims_of(layout, "a" * 32)
    for recipe in range(2):
        assert claims.take(0, recipe, SEVEN)
    assert claims.take(1, 0, SEVEN)
    assert set(claims.newest(0)) == {(0, 7), (1, 7)}
    assert set(claims.newest(1)) == {(0, 7)}


def test_a_file_of_another_name_is_no_claim(layout):
    claims = claims_of(layout, "a" * 32)
    (claims.folder.claims / "0.0.0-0.x").write_text("?")
    assert claims.newest(0) == {}


@pytest.mark.parametrize("content", [b"", b"{}", b"not json"])
def test_a_claim_that_cannot_be_read_is_a_dead_ones_after_a_moment(layout, content):
    claims, clock = claims_of(layout, "a" * 32), Clock()
    claim = claims.take(0, 0, SEVEN)
    claims.folder.claim(claim).write_bytes(content)
    watching = claims_of(layout, "b" * 32, clock)
    assert watching.life(claim) is Life.LIVE
    clock.sleep(TORN_SECONDS)
    assert watching.life(claim) is Life.DEAD


def test_a_claim_that_is_seen_before_it_is_written_is_its_writers_afterwards(layout):
    with heartbeat(layout) as living:
        claims, clock = claims_of(layout, living.worker), Clock()
        claim = claims.take(0, 0, SEVEN)
        content = claims.folder.claim(claim).read_bytes()
        claims.folder.claim(claim).write_bytes(b"")
        watching = claims_of(layout, "b" * 32, clock)
        assert watching.holder(claim) is None
        claims.folder.claim(claim).write_bytes(content)
        clock.sleep(TORN_SECONDS)
        assert watching.life(claim) is Life.LIVE
        assert watching.holder(claim) == living.worker


def test_a_claim_covers_a_range_and_part_of_it_may_be_taken_over(layout):
    one, other = claims_of(layout, "a" * 32), claims_of(layout, "b" * 32)
    whole = one.take(0, 0, range(4, 8))
    part = other.take(0, 0, range(6, 8), after=whole)
    assert other.newest(0) == {(0, 4): whole, (0, 5): whole, (0, 6): part, (0, 7): part}
    third = claims_of(layout, "c" * 32)
    assert [(held.claim, held.partitions, held.holder) for held in third.judge(third.newest(0))] == [
        (whole, [4, 5], "a" * 32),
        (part, [6, 7], "b" * 32),
    ]


def test_who_died_with_a_range_died_with_each_part_of_it(layout):
    dead = died(layout)
    whole = claims_of(layout, dead).take(0, 0, range(4, 8))
    claims = claims_of(layout, "f" * 32)
    assert claims.take(0, 0, range(6, 8), after=whole)
    assert claims.died_before(0, 0, [6]) == claims.died_before(0, 0, [6, 7]) == [dead]
    assert claims.died_before(0, 0, [5]) == []


@pytest.mark.parametrize("bits", [0o022, 0o077])
def test_a_claim_is_one_call_on_names_and_readable_by_who_may_read_the_store(layout, bits):
    claims = claims_of(layout, "a" * 32)
    before = os.umask(bits)
    try:
        with named_calls() as calls:
            claim = claims.take(0, 0, SEVEN)
    finally:
        os.umask(before)
    assert calls == ["open"]
    assert claims.folder.claim(claim).stat().st_mode & 0o777 == layout.mode.file_bits


def test_a_worker_may_take_up_its_own_earlier_claim(layout):
    claims = claims_of(layout, "a" * 32)
    assert claims.life(claims.take(0, 0, SEVEN)) is Life.DEAD


def test_the_claim_of_a_living_worker_is_alive(layout):
    with heartbeat(layout) as living:
        claim = claims_of(layout, living.worker).take(0, 0, SEVEN)
        assert claims_of(layout, "b" * 32).life(claim) is Life.LIVE


def test_how_long_each_holder_stood_still_is_told_by_this_workers_clock(layout):
    clock = Clock()
    with heartbeat(layout) as one, heartbeat(layout) as other:
        first = claims_of(layout, one.worker).take(0, 0, range(1, 2))
        second = claims_of(layout, other.worker).take(0, 0, range(2, 3))
        watching = claims_of(layout, "c" * 32, clock)
        watching.judge({(0, 1): first})
        clock.sleep(5)
        watching.judge({(0, 2): second})
        clock.sleep(7)
        judged = watching.judge({(0, 2): second, (0, 1): first})
        assert [(held.claim, held.still_seconds) for held in judged] == [(second, 7.0), (first, 12.0)]


@pytest.mark.parametrize(("slowest", "patience"), [(0.001, SLOW_SECONDS), (4.0, SLOW_BATCHES * 4.0)])
def test_a_claim_is_slow_only_after_ten_seconds_or_five_of_its_slowest_batches(layout, slowest, patience):
    clock = Clock()
    with heartbeat(layout) as one:
        one.batch_took(slowest)
        one.write()
        claim = claims_of(layout, one.worker).take(0, 0, range(1, 2))
        watching = claims_of(layout, "c" * 32, clock)
        watching.life(claim)
        clock.sleep(patience - 0.1)
        assert not watching.judge({(0, 1): claim})[0].is_slow
        clock.sleep(0.2)
        assert watching.judge({(0, 1): claim})[0].is_slow


def test_a_holder_of_many_claims_is_looked_at_once(layout, monkeypatch):
    claims = claims_of(layout, "a" * 32)
    names = {(0, p): claims.take(0, 0, range(p, p + 1)) for p in range(9)}
    watching, looked = claims_of(layout, "b" * 32), []
    watching.watch.read = lambda _layout, worker: looked.append(worker)
    assert [held.claim for held in watching.judge(names)] == list(names.values())
    assert looked == ["a" * 32]


# Who died with a partition


def died(layout):
    """A worker that took a partition and was killed: its lock yields and its heartbeat says nothing of an end."""
    one = heartbeat(layout)
    one.__enter__()
    one._lock.release()
    return one.worker


def successor(layout, *holders):
    """A worker that took a partition after these."""
    claim = None
    for holder in holders:
        claim = claims_of(layout, holder).take(0, 0, SEVEN, after=claim)
    claims = claims_of(layout, "f" * 32)
    assert claims.take(0, 0, SEVEN, after=claim)
    return claims


def test_nobody_died_before_the_first_claim(layout):
    assert successor(layout).died_before(0, 0, [7]) == []


def test_all_who_were_proved_dead_with_a_partition_are_named_in_order(layout):
    first, second = died(layout), died(layout)
    with heartbeat(layout) as living:
        claims = successor(layout, first, living.worker, second, first)
        assert claims.died_before(0, 0, [7]) == [first, second]
        assert claims.died_before(0, 0, [8]) == claims.died_before(1, 0, [7]) == []


def test_a_worker_that_ended_in_order_did_not_die_with_what_it_held(layout):
    with heartbeat(layout) as ended:
        pass
    claims = successor(layout, ended.worker)
    assert claims.life(ClaimName(0, 0, 7, 7, 0)) is Life.DEAD
    assert claims.died_before(0, 0, [7]) == []


def test_neither_a_silent_worker_nor_a_damaged_claim_nor_this_worker_itself_is_a_proof_of_death(layout):
    with heartbeat(layout) as silent:
        claims = successor(layout, silent.worker, "f" * 32, "e" * 32)
        claims.folder.claim(ClaimName(0, 0, 7, 7, 2)).write_bytes(b"?")
        claims.life(ClaimName(0, 0, 7, 7, 0))
        claims.watch.clock.sleep(SILENT_SECONDS)
        assert claims.life(ClaimName(0, 0, 7, 7, 0)) is Life.SILENT
        assert claims.life(ClaimName(0, 0, 7, 7, 2)) is Life.LIVE
        claims.watch.clock.sleep(TORN_SECONDS)
        assert claims.life(ClaimName(0, 0, 7, 7, 2)) is Life.DEAD
        assert claims.died_before(0, 0, [7]) == []
