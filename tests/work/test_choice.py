"""What a worker takes next: free partitions first, fewer towards the end; then what the dead and the slow hold."""

from hypothesis import given
from hypothesis import strategies as st

from cachestore.files.paths import ClaimName
from cachestore.work.choice import GROUP_PARTITIONS, GROUP_UNITS, POLL_SECONDS, Held, choose, claims_to_take, group_size, poll_seconds
from cachestore.work.partition import PARTITION_LIMIT, order_for
from cachestore.work.workers import Life


def held(partition, life=Life.LIVE, still=0.0, *, is_slow=False, holder="one"):
    return Held(ClaimName(0, 0, partition, 0), holder, life, still, is_slow)


def taken(*claims, each=1, world=1):
    """The partitions that may be taken over, and how many of them at once."""
    takeover = claims_to_take(claims, each=each, world_size=world)
    return [claim.partition for claim in takeover.claims], takeover.most


# Free partitions


def test_of_nothing_nothing_is_taken():
    choice = choose([], finished=(), claimed=(), each=0, world_size=1)
    assert (list(choice.free), list(choice.held)) == ([], [])


def test_with_everything_finished_nothing_is_left():
    choice = choose([0, 1], finished={0, 1}, claimed={0}, each=1, world_size=1)
    assert (list(choice.free), list(choice.held)) == ([], [])


def test_free_partitions_are_taken_in_order_and_what_others_hold_only_after_them():
    order = [2, 3, 0, 1]
    assert choose(order, finished={3}, claimed={0}, each=1, world_size=1).free == [2, 1]
    assert choose(order, finished={3}, claimed={0}, each=1, world_size=1).held == []
    assert choose(order, finished={3}, claimed={0, 1, 2}, each=1, world_size=1) == choose(
        order, finished={3}, claimed={0, 1, 2, 9}, each=1, world_size=1
    )
    assert choose(order, finished={3}, claimed={0, 1, 2}, each=1, world_size=1).held == [2, 0, 1]


@given(st.integers(0, 3000), st.integers(1, 600), st.integers(0, PARTITION_LIMIT))
def test_a_pool_is_never_empty_and_never_leaves_the_others_without_work(each, world, free):
    size = group_size(each, free, world)
    assert 1 <= size <= max(GROUP_PARTITIONS, GROUP_UNITS)
    if world > 1:
        assert size == 1 or size * 2 * world <= free


@given(st.integers(0, 300), st.integers(1, 20), st.data())
def test_whoever_asks_in_turn_all_partitions_are_taken_once(partitions, world, data):
    claimed = set()
    while True:
        order = order_for(data.draw(st.integers(0, world - 1)), world, partitions, seed=0)
        free = choose(order, finished=(), claimed=claimed, each=1, world_size=world).free
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
    gone = [held(3, Life.SILENT), held(5, Life.DEAD, holder="other"), held(2, Life.SILENT)]
    assert taken(held(1, still=99.0, is_slow=True, holder="slow"), *gone)[0] == [3, 2]


@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 20))
def test_of_the_dead_as_many_are_taken_at_once_as_of_free_partitions(count, each, world):
    claims, most = taken(*(held(p, Life.DEAD) for p in range(count)), each=each, world=world)
    assert claims == list(range(count))
    assert most == group_size(each, count, world)


def test_of_the_slow_only_the_one_that_stood_still_longest_is_done_over():
    assert taken(held(1, still=20.0, is_slow=True), held(2, still=30.0, is_slow=True), held(3, still=40.0)) == ([2], 1)


def test_idle_workers_of_a_large_world_look_less_often():
    assert poll_seconds(1) == poll_seconds(8) == POLL_SECONDS
    assert poll_seconds(512) == 2.0
