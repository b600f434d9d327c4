"""How many threads torch uses where pictures are prepared, and that no other thread notices."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from cachestore.encode.batching.pipeline import is_prefetching, prefetch
from cachestore.encode.batching.torch_threads import keep_number, use_this_thread_alone
from cachestore.encode.pictures.buckets import Size
from cachestore.encode.pictures.resizing import fit

pytestmark = pytest.mark.torch
NUMBER = 3


@pytest.fixture(autouse=True)
def number():
    """Let torch use three threads in this thread and in new ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUMBER)
    yield
    torch.set_num_threads(before)


def in_new_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_thread_that_is_alone_keeps_one_and_others_keep_theirs():
    is_alone, go_on = threading.Event(), threading.Event()

    def alone():
        use_this_thread_alone()
        use_this_thread_alone()
        first = torch.get_num_threads()
        is_alone.set()
        go_on.wait(10)
        return first, torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(alone)
        is_alone.wait(10)
        others = in_new_thread(torch.get_num_threads), torch.get_num_threads()
        go_on.set()
        assert found.result() == (1, 1)
    assert others == (NUMBER, NUMBER)


def test_many_threads_that_want_to_be_alone_at_once_leave_the_number_of_others():
    together = threading.Barrier(8)

    def alone():
        together.wait(10)
        use_this_thread_alone()
        return torch.get_num_threads()

    with ThreadPoolExecutor(8) as pool:
        assert [one.result() for one in [pool.submit(alone) for _thread in range(8)]] == [1] * 8
    assert in_new_thread(torch.get_num_threads) == torch.get_num_threads() == NUMBER


def test_a_number_that_is_kept_is_not_changed_by_another_thread():
    def kept():
        keep_number()
        in_new_thread(lambda: torch.set_num_threads(1))
        return torch.get_num_threads()

    assert in_new_thread(kept) == NUMBER


@pytest.mark.parametrize("threads", [0, 2])
def test_threads_that_prefetch_resize_alone_and_the_callers_thread_does_not(threads):
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)

    def resized(_item):
        made = fit(pixels, Size(128, 128), None, "lanczos")
        return made.tobytes(), torch.get_num_threads(), is_prefetching()

    expected = fit(pixels, Size(128, 128), None, "lanczos").tobytes()
    found = set(prefetch(resized, iter(range(6)), threads=threads, depth=6))
    assert found == {(expected, 1, True) if threads else (expected, NUMBER, False)}
    assert torch.get_num_threads() == in_new_thread(torch.get_num_threads) == NUMBER
    assert not is_prefetching()
