"""Threads that prefetch inputs, and one that stores results, while another thread encodes. A slow stage makes earlier ones wait."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

Item = TypeVar("Item")
Result = TypeVar("Result")
_THREAD = threading.local()


def is_prefetching() -> bool:
    """Return whether the calling thread is one of those that `prefetch` runs."""
    return getattr(_THREAD, "is_prefetching", False)


def _mark() -> None:
    _THREAD.is_prefetching = True


def prefetch(
    function: Callable[[Item], Result],
    items: Iterator[Item],
    *,
    threads: int,
    depth: int,
    weigh: Callable[[Result], int] | None = None,
    most: int = 0,
) -> Generator[Result]:
    """Yield the results of a function, in the order of its items. `threads` threads prefetch up to `depth` of them.

    With 0 threads each is made when it is needed. Items are taken in the caller's thread. The threads end when the generator ends or is
    closed. An error of the function is raised when its turn comes.

    With `weigh`, `threads` items are begun at first, and two for each result until `depth` are waiting, so that the first results come
    early. No further item is begun while the waiting results weigh more than `most`; one that is still being made counts as much as the
    heaviest so far. At least one is always being made.
    """
    if threads <= 0:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="cachestore-read", initializer=_mark) as pool:
        waiting: deque[Future[Result]] = deque()
        heaviest, limit = 0, max(1, depth) if weigh is None else threads

        def fill() -> None:
            while len(waiting) < limit and _is_light(waiting, weigh, heaviest, most):
                begun = [pool.submit(function, item) for item in islice(items, 1)]
                if not begun:
                    return
                waiting.extend(begun)

        fill()
        try:
            while waiting:
                result = waiting.popleft().result()
                if weigh is not None:
                    heaviest, limit = max(heaviest, weigh(result)), min(max(1, depth), limit + 1)
                fill()
                yield result
        finally:
            for future in waiting:
                future.cancel()


def _is_light(waiting: "deque[Future[Result]]", weigh: Callable[[Result], int] | None, heaviest: int, most: int) -> bool:
    """Return whether the waiting results weigh at most `most`. Failed ones weigh nothing."""
    if weigh is None or heaviest * len(waiting) <= most:
        return True
    return sum((weigh(one.result()) if one.exception() is None else 0) if one.done() else heaviest for one in waiting) <= most


class Behind(Generic[Result]):
    """Runs pieces of work in order in one thread, while the caller goes on. With `depth` 0 the caller's thread runs them at once.

    A `with` statement starts and ends the thread: then all is finished, or after an error, what has not begun is dropped.
    """

    def __init__(self, depth: int) -> None:
        """Let at most `depth` pieces of work wait; `hand` with one more waits for the first. Starts no thread."""
        self.depth = depth
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[Result]] = deque()

    def __enter__(self) -> "Self":
        if self.depth > 0:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cachestore-append")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=error is not None)
        self._thread = None
        self._under_way.clear()

    def hand(self, work: Callable[[], Result]) -> list[Result]:
        """Add a piece of work. Returns the results that are ready, in order. Raises the error of the first that failed."""
        if self._thread is None:
            return [work()]
        self._under_way.append(self._thread.submit(work))
        return self._taken(self.depth)

    def wait(self) -> list[Result]:
        """Wait for all work, and return the results not yet returned, in order. Raises the error of the first that failed."""
        return self._taken(0)

    def _taken(self, left: int) -> list[Result]:
        taken: list[Result] = []
        while self._under_way and (len(self._under_way) > left or self._under_way[0].done()):
            taken.append(self._under_way[0].result())
            self._under_way.popleft()
        return taken
