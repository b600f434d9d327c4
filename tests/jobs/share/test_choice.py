"""What a worker takes next: free partitions first, fewer towards the end; then what the dead and the slow hold."""

from hypothesis import given
from hypothesis import strategies as st

from cachestore.files.paths import PARTITION_LIMIT, ClaimName
from cachestore.jobs.share.choice import (
    GROUP_PARTITIONS,
    GROUP_UNITS,
    POLL_SECONDS,
    Held,
    choose,
    group_size,
    parts_to_take,
    poll_seconds,
    ranges_of,
)
from cachestore.jobs.share.workers import Life


def held(*partitions, life=Life.LIVE, still=0.0, is_slow=False, holder="one", claim=None):
    name = claim or ClaimName(0, 0, partitions[0], partitions[-1], 0)
    return Held(name, partitions, holder, life, still, is_slow)


def taken(*claims, each=1, world=1):
    """The partitions that may be taken over, as ranges, and how many of them at once."""
    takeover = parts_to_take(claims, each=each, workers=world, world_size=world)
    return [[*partitions] for _claim, partitions in takeover.parts], takeover.most


def chosen(ranges, *, finished=(), claimed=(), start=0, each=1, world=1):
    return choose(ranges, finished=finished, claimed=claimed, start=start, each=each, world_size=world)


# Ranges


@given(st.integers(0, PARTITION_LIMIT), st.integers(1, 300), st.integers(1, 600))
def test_ranges_are_all_partitions_in_order_and_never_larger_towards_the_end(count, each, world):
    ranges = ranges_of(count, each=each, workers=world)
    assert [p for partitions in ranges for p in partitions] == list(range(count))
    sizes = [*map(len, ranges)]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) <= max(GROUP_PARTITIONS, GROUP_UNITS)


@given(st.integers(0, PARTITION_LIMIT), st.integers(1, 300), st.integers(1, 600), st.integers(1, 600))
def test_ranges_of_two_world_sizes_are_apart_or_one_contains_the_other(count, each, world, other):
    for one in ranges_of(count, each=each, workers=world):
        assert one.start % len(one) == 0
        assert len(one) & (len(one) - 1) == 0
    owners = {p: one for one in ranges_of(count, each=each, workers=other) for p in one}
    for one in ranges_of(count, each=each, workers=world):
        assert {owners[p] for p in one if len(owners[p]) >= len(one)} <= {owners[one.start]}


# Free partitions


def test_of_nothing_nothing_is_taken():
    choice = choose([], finished=(), claimed=(), start=0, each=0, world_size=1)
    assert (list(choice.free), list(choice.held)) == ([], [])


def test_with_everything_finished_nothing_is_left():
    choice = chosen([range(2)], finished={0, 1}, claimed={0})
    assert (list(choice.free), list(choice.held)) == ([], [])


def test_what_others_hold_comes_only_after_all_that_is_free():
    ranges = [range(2, 4), range(2)]
    assert chosen(ranges, finished={3}, claimed={0}).free == [range(2, 3), range(1, 2)]
    assert chosen(ranges, finished={3}, claimed={0}).held == []
    assert chosen(ranges, finished={3}, claimed={0, 1, 2}) == chosen(ranges, finished={3}, claimed={0, 1, 2, 9})
    assert chosen(ranges, finished={3}, claimed={0, 1, 2}).held == [2, 0, 1]
    assert chosen(ranges, finished={3}, claimed={0, 1, 2}, start=1).held == [0, 1, 2]


def test_the_largest_free_range_comes_first_and_each_rank_takes_another():
    ranges = [range(2), range(2, 4), range(4, 8), range(8, 12)]
    assert [chosen(ranges, start=rank, world=3).free for rank in range(3)] == [[range(4, 8)], [range(8, 12)], [range(4, 8)]]
    assert [chosen(ranges, claimed={8}, start=rank, world=3).free for rank in range(3)] == [[range(4, 8)]] * 3


@given(st.integers(0, 3000), st.integers(1, 600), st.integers(0, PARTITION_LIMIT))
def test_a_pool_is_never_empty_and_never_leaves_the_others_without_work(each, world, free):
    size = group_size(each, free, world)
    assert 1 <= size <= max(GROUP_PARTITIONS, GROUP_UNITS)
    if world > 1:
        assert size == 1 or size * 2 * world <= free


@given(st.integers(0, 300), st.integers(1, 20), st.data())
def test_whoever_asks_in_turn_all_partitions_are_taken_once(partitions, world, data):
    """Also where some believe in another world size."""
    claimed = set()
    while True:
        start, believed = data.draw(st.integers(0, world - 1)), data.draw(st.sampled_from([world, 3 * world]))
        free = chosen(ranges_of(partitions, each=1, workers=world), claimed=claimed, start=start, world=believed).free
        free = [p for some in free for p in some]
        assert claimed.isdisjoint(free)
        if not free:
            break
        claimed.update(free)
    assert claimed == set(range(partitions))


# What others hold


def test_with_nothing_held_there_is_nothing_to_take_over():
    assert taken() == ([], 1)


def test_a_claim_whose_holder_lives_and_moves_is_left_alone():
    assert taken(held(1), held(2, still=5.0)) == ([], 1)


def test_claims_of_one_dead_or_silent_worker_come_before_those_of_the_slow():
    gone = [held(3, life=Life.SILENT), held(5, life=Life.DEAD, holder="other"), held(2, life=Life.SILENT)]
    assert taken(held(1, still=99.0, is_slow=True, holder="slow"), *gone)[0] == [[3], [2]]


@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 20))
def test_of_the_dead_as_many_are_taken_at_once_as_of_free_partitions(count, each, world):
    parts, most = taken(held(*range(count), life=Life.DEAD), each=each, world=world)
    assert [p for partitions in parts for p in partitions] == list(range(count))
    assert len(parts[0]) <= most == group_size(each, count, world)


def test_what_a_dead_worker_held_is_cut_in_the_same_places_whatever_is_left_of_it():
    """So that two workers that take over at once try the same names, and each gets another."""
    claim = ClaimName(0, 0, 64, 127, 0)
    whole, _most = taken(held(*range(64, 128), life=Life.DEAD, claim=claim), world=4)
    rest, _most = taken(held(*range(70, 128), life=Life.DEAD, claim=claim), world=4)
    assert whole[0] == [*range(64, 72)]
    assert rest == [[70, 71], *whole[1:]]


def test_of_the_slow_only_the_one_that_stood_still_longest_is_done_over_from_its_end():
    slow = [held(1, still=20.0, is_slow=True), held(2, 3, 4, still=30.0, is_slow=True), held(5, still=40.0)]
    assert taken(*slow) == ([[4]], 1)


def test_idle_workers_of_a_large_world_look_less_often():
    assert poll_seconds(1) == poll_seconds(8) == POLL_SECONDS
    assert poll_seconds(512) == 2.0
