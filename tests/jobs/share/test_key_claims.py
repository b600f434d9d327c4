"""Claims on keys: one worker gets each, and that of a dead one is taken over."""

import pytest

from cachestore.core.keys import Key, key
from cachestore.jobs.share.claims import TORN_SECONDS
from cachestore.jobs.share.key_claims import KeyClaims
from cachestore.jobs.share.workers import SILENT_SECONDS, Heartbeat, Watch
from tests.fakes import Clock

ONE, TWO = Key.parse(key("one")), Key.parse(key("two"))


def heartbeat(layout):
    return Heartbeat(layout, "", 0, "", None, 1)


def claims_of(layout, worker, clock=None):
    return KeyClaims(layout, worker, Watch(layout, clock or Clock()))


def left(layout):
    return sorted(path.name for path in layout.temporary.iterdir())


def test_of_two_workers_one_gets_a_key_until_it_is_released(layout):
    with heartbeat(layout) as mine, heartbeat(layout) as theirs:
        one, other = claims_of(layout, mine.worker), claims_of(layout, theirs.worker)
        assert one.take(ONE)
        assert not other.take(ONE)
        assert other.take(TWO)
        one.release([ONE, TWO])
        assert other.take(ONE)
        other.release([ONE, TWO])
    assert left(layout) == []


def test_a_claim_of_a_worker_that_ended_is_taken_over_by_one_and_both_are_removed(layout):
    with heartbeat(layout) as dead:
        assert claims_of(layout, dead.worker).take(ONE)
    with heartbeat(layout) as mine, heartbeat(layout) as theirs:
        one, other = claims_of(layout, mine.worker), claims_of(layout, theirs.worker)
        assert one.take(ONE)
        assert not other.take(ONE)
        assert len(left(layout)) == 2
        one.release([ONE])
    assert left(layout) == []


def test_a_worker_that_is_silent_loses_its_claim_and_removes_no_other(layout):
    clock = Clock()
    with heartbeat(layout) as slow, heartbeat(layout) as mine:
        before, after = claims_of(layout, slow.worker), claims_of(layout, mine.worker, clock)
        assert before.take(ONE)
        assert not after.take(ONE)
        clock.now += SILENT_SECONDS
        assert after.take(ONE)
        before.release([ONE])
        assert len(left(layout)) == 1
        after.release([ONE])
    assert left(layout) == []


@pytest.mark.parametrize("data", [b"", b"{}", b'{"body": {"worker": "../../x"}}'])
def test_a_claim_that_cannot_be_read_is_waited_for_a_moment(layout, data):
    clock = Clock()
    with heartbeat(layout) as mine:
        one, two = claims_of(layout, mine.worker), claims_of(layout, mine.worker, clock)
        assert one.take(ONE)
        [name] = left(layout)
        (layout.temporary / name).write_bytes(data)
        assert not two.take(ONE)
        clock.now += TORN_SECONDS
        assert two.take(ONE)
        assert two.holder(ONE) == "a process whose claim cannot be read"


def test_a_message_names_the_worker_that_holds_a_key(layout):
    with heartbeat(layout) as theirs:
        claims_of(layout, theirs.worker).take(ONE)
        other = claims_of(layout, "f" * 32)
        assert not other.take(ONE)
        assert f"pid {theirs.now().pid}" in other.holder(ONE)
