"""Work that two threads share: each piece once, and nobody at work when the call is over."""

import _thread
import os
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.store.read import side_by_side
from cachestore.store.read.side_by_side import run_side_by_side
from tests.fakes import examples, raising

WAIT_SECONDS = 30


class Pieces:
    """Work of numbered pieces, taken by whoever comes: what it did, in which thread."""

    def __init__(self, count, do=lambda _number: None):
        self.left = iter(range(count))
        self.do = do
        self.done = []
        self.running = 0

    def __call__(self):
        self.running += 1
        try:
            for number in self.left:
                self.do(number)
                self.done.append((number, threading.get_ident()))
        finally:
            self.running -= 1

    def numbers(self):
        return sorted(number for number, _thread in self.done)


class Meeting:
    """Two threads that have to be at work at the same time."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=WAIT_SECONDS)

    def __call__(self, _number):
        self.barrier.wait()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = _thread._count()
    yield
    deadline = time.monotonic() + WAIT_SECONDS
    while _thread._count() > before and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread that has said that it ends needs an instant more
    assert _thread._count() == before


def test_without_work_both_threads_return():
    work = Pieces(0)
    run_side_by_side(work)
    assert (work.done, work.running) == ([], 0)


@given(st.integers(0, 40))
@examples(30)
def test_each_piece_is_done_once_and_nobody_is_at_work_afterwards(count):
    work = Pieces(count)
    run_side_by_side(work)
    assert work.numbers() == list(range(count))
    assert work.running == 0


def test_two_threads_are_at_work_at_once():
    work = Pieces(2, Meeting())
    run_side_by_side(work)
    assert len({thread for _number, thread in work.done}) == 2


def test_what_the_other_thread_raises_is_raised_here():
    met, here = Meeting(), threading.get_ident()

    def fail_there(number):
        met(number)
        if threading.get_ident() != here:
            raise ValueError(number)

    with pytest.raises(ValueError):
        run_side_by_side(Pieces(2, fail_there))


def test_what_both_raise_is_raised_once():
    met, here = Meeting(), threading.get_ident()

    def fail(number):
        met(number)
        raise ValueError("here" if threading.get_ident() == here else "there")

    with pytest.raises(ValueError, match="here"):
        run_side_by_side(Pieces(2, fail))


def test_an_error_here_is_raised_when_the_other_thread_has_ended():
    met, here = Meeting(), threading.get_ident()

    def fail_here(number):
        met(number)
        if threading.get_ident() == here:
            raise ValueError("here")
        time.sleep(0.2)

    work = Pieces(2, fail_here)
    with pytest.raises(ValueError, match="here"):
        run_side_by_side(work)
    assert work.running == 0


def test_where_no_thread_can_be_started_all_is_done_here(monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", raising(RuntimeError("can't start new thread")))
    work = Pieces(3)
    run_side_by_side(work)
    assert work.done == [(number, threading.get_ident()) for number in range(3)]


def test_a_child_that_was_forked_inside_of_the_call_says_so_and_does_not_wait_for_a_thread_it_does_not_have():
    here, met, forked, children = threading.get_ident(), Meeting(), threading.Event(), []

    def fork_here(number):
        met(number)
        if threading.get_ident() != here:
            assert forked.wait(WAIT_SECONDS)
            return
        children.append(os.fork())
        if children[0]:
            forked.set()

    code = 1
    try:
        run_side_by_side(Pieces(2, fork_here))
        code = 2
    except RuntimeError as error:
        code = 0 if "was forked" in str(error) else 3
    finally:
        if children == [0]:
            os._exit(code)
    assert code == 2, "the parent has all"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


class Interrupted(Exception):
    """What a signal's handler raises."""


def interrupt(*_arguments):
    raise Interrupted


def test_an_interruption_while_waiting_is_raised_when_the_other_thread_has_ended():
    here, met = threading.get_ident(), Meeting()

    def take_long_there(number):
        met(number)
        if threading.get_ident() == here:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            time.sleep(0.5)

    work = Pieces(2, take_long_there)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            run_side_by_side(work)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert work.running == 0
    assert here not in {thread for _number, thread in work.done[-1:]}


def test_whenever_an_interruption_comes_nobody_is_at_work_when_it_is_raised():
    seen, before = 0, signal.signal(signal.SIGALRM, interrupt)
    try:
        for trial in range(300):
            work = Pieces(40, lambda _number: time.sleep(0.00002))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + trial * 0.00001)
                run_side_by_side(work)
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert work.numbers() == list(range(40))
            except Interrupted:
                seen += 1
            assert work.running == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen > 0


@pytest.mark.processes
def test_of_two_signals_at_once_neither_leaves_somebody_at_work():
    here, met = threading.get_ident(), Meeting()

    def take_long_there(number):
        met(number)
        if threading.get_ident() != here:
            time.sleep(0.3)

    def send_both():
        time.sleep(0.1)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)

    before = [signal.signal(number, interrupt) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        for _trial in range(5):
            work, sender = Pieces(2, take_long_there), threading.Thread(target=send_both)
            sender.start()
            with pytest.raises(Interrupted):
                run_side_by_side(work)
            assert work.running == 0
            sender.join()
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_an_error_of_a_signals_handler_is_not_taken_for_a_thread_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(side_by_side._thread, "start_new_thread", raising(RuntimeError("DataLoader worker exited unexpectedly")))
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        run_side_by_side(Pieces(3))


@pytest.mark.parametrize("is_running", [False, True], ids=["before the thread runs", "while it runs"])
def test_an_interruption_right_after_the_start_leaves_nobody_at_work(monkeypatch, is_running):
    began, real = threading.Event(), _thread.start_new_thread
    hold = threading.Event()

    def start_and_interrupt(function, arguments):
        def run():
            if not is_running:
                assert hold.wait(WAIT_SECONDS)
            function()

        real(run, arguments)
        if is_running:
            assert began.wait(WAIT_SECONDS)
        raise Interrupted

    def slow(_number):
        began.set()
        time.sleep(0.2)

    monkeypatch.setattr(side_by_side._thread, "start_new_thread", start_and_interrupt)
    work = Pieces(1, slow)
    with pytest.raises(Interrupted):
        run_side_by_side(work)
    assert work.running == 0
    done = list(work.done)
    hold.set()
    time.sleep(0.3)
    assert work.done == done  # a thread that comes too late does nothing
