"""Lets torch compute in the calling thread alone, for threads that prepare pictures beside each other. Imports torch.

torch divides an operation among as many threads as there are processors, and each calling thread has such threads of its own. Two that
resize pictures on two processors then wait for each other's: half as many pictures a second as with one thread for each operation.

`torch.set_num_threads` sets the number of the calling thread, and that of threads which use torch for the first time later. So a second
thread sets the latter again. Where torch is not built with OpenMP, the number is that of the process, and is left alone.
"""

import threading

import torch

_LOCK = threading.Lock()
"""Held while new threads would get the number of another."""
_THREAD = threading.local()


def use_this_thread_alone() -> None:
    """From now on torch uses one thread for the operations of the calling thread. Other threads keep their number."""
    if getattr(_THREAD, "is_alone", False):
        return
    _THREAD.is_alone = True
    if not torch.backends.openmp.is_available():
        return
    with _LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(before,), name="cachestore-threads")
        restoring.start()
        restoring.join()


def keep_number() -> None:
    """Fix how many threads torch uses for the operations of the calling thread, so that no other thread changes it."""
    with _LOCK:
        torch.get_num_threads()
