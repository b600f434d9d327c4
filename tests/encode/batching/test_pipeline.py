"""Threads that prefetch, and one that puts away behind."""

import threading

import pytest

from cachestore.encode.batching.pipeline import Behind, prefetch


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("cachestore-")}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_of_no_items_there_are_no_results_and_no_thread(count):
    assert list(prefetch(str, iter([]), threads=count, depth=4)) == []
    assert threads() == set()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_come_in_the_order_of_their_items(count):
    assert list(prefetch(str, iter(range(50)), threads=count, depth=4)) == [str(n) for n in range(50)]


def test_so_many_items_are_prefetched_and_no_more_and_in_the_callers_thread():
    taken = []

    def items():
        for number in range(20):
            taken.append(threading.current_thread())
            yield number

    looks = prefetch(str, items(), threads=2, depth=5)
    next(looks)
    assert len(taken) == 6
    assert set(taken) == {threading.current_thread()}
    looks.close()
    assert threads() == set()


@pytest.mark.parametrize(("weight", "most"), [(0, 5), (1, 5), (2, 4), (3, 2), (5, 2), (100, 2)])
def test_no_more_is_begun_while_what_waits_is_heavy(weight, most):
    begun = []

    def items():
        for number in range(12):
            begun.append(number)
            yield number

    taken = []
    for number in prefetch(lambda number: number, items(), threads=2, depth=5, weigh=lambda _number: weight, most=5):
        taken.append(number)
        assert len(begun) - len(taken) <= most
    assert taken == begun == list(range(12))
    assert threads() == set()


def test_the_first_results_come_before_all_that_may_wait_is_begun():
    taken = []
    looks = prefetch(taken.append, iter(range(100)), threads=2, depth=50, weigh=lambda _nothing: 1, most=1000)
    begun = []
    for number, _result in enumerate(looks):
        begun.append(taken[-1] + 1 - number)
        if number == 60:
            break
    looks.close()
    assert begun[0] <= 5
    assert max(begun) <= 51


def test_a_result_that_is_too_heavy_alone_comes_all_the_same():
    assert list(prefetch(str, iter(range(4)), threads=3, depth=9, weigh=lambda _text: 10, most=1)) == ["0", "1", "2", "3"]
    assert list(prefetch(str, iter(()), threads=3, depth=9, weigh=lambda _text: 10, most=1)) == []


def test_without_threads_nothing_is_made_before_it_is_asked_for():
    made = []
    looks = prefetch(made.append, iter(range(5)), threads=0, depth=5)
    assert made == []
    next(looks)
    assert made == [0]


@pytest.mark.parametrize("heavy", [{}, {"weigh": lambda _number: 3, "most": 4}], ids=["light", "heavy"])
def test_an_error_is_raised_when_its_turn_comes_and_ends_the_threads(heavy):
    def half(number):
        if number == 2:
            raise ValueError(number)
        return number

    looks = prefetch(half, iter(range(9)), threads=2, depth=9, **heavy)
    assert [next(looks), next(looks)] == [0, 1]
    with pytest.raises(ValueError):
        next(looks)
    assert threads() == set()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_work_is_done_in_order_and_its_results_come_in_order(depth):
    done = []
    with Behind(depth) as behind:
        assert behind.wait() == []
        reported = [result for n in range(20) for result in behind.hand(lambda n=n: done.append(n) or n)]
        reported += behind.wait()
    assert reported == done == list(range(20))
    assert threads() == set()


def test_who_hands_over_goes_on_until_so_many_wait():
    gate = threading.Event()
    with Behind(2) as behind:
        assert behind.hand(gate.wait) == []
        assert behind.hand(gate.is_set) == []
        handed = threading.Thread(target=lambda: behind.hand(gate.is_set))
        handed.start()
        handed.join(0.05)
        assert handed.is_alive()
        gate.set()
        handed.join(30)
        assert not handed.is_alive()


def test_an_error_is_raised_to_who_asks_next_and_the_thread_ends():
    gate = threading.Event()

    def fail():
        gate.wait(30)
        raise OSError("the disk refuses")

    def use():
        with Behind(9) as behind:
            behind.hand(fail)
            behind.hand(gate.is_set)
            gate.set()
            behind.wait()

    with pytest.raises(OSError):
        use()
    assert threads() == set()


def test_without_a_thread_it_is_done_at_once_and_here():
    assert Behind(0).hand(threading.current_thread) == [threading.current_thread()]


def test_it_can_be_used_again():
    behind = Behind(1)
    for _time in range(2):
        with behind:
            assert [*behind.hand(lambda: 1), *behind.wait()] == [1]
