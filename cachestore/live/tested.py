"""A self-test that runs once in each process, before the first value is looked for, with a store of its own."""

import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import parent_process

from cachestore.live.adapter import refuse
from cachestore.live.run import trial


class SelfTest:
    """Call it where a run could begin to look for values: the first call runs the self-test, others wait for that and do nothing.

    The self-test gets an empty folder, saves and loads in it by the trainer's own functions, and calls `live.check_same`. While it runs,
    `live.current().store` is an empty store, which goes afterwards. A worker of a DataLoader runs none. If it raises an error, or a
    file is in the folder at the end, the run ends with exit code 2.
    """

    def __init__(self, test: Callable[[str], None], *, after: Callable[[], None] = lambda: None) -> None:
        """`after` is called at the end of the self-test, before its store goes."""
        self._test, self._after = test, after
        self._lock = threading.RLock()
        self._was_run = False
        self.is_running = False

    def __call__(self) -> None:
        """Run the self-test, unless this process has done so."""
        if self._was_run:
            return
        with self._lock:
            if self._was_run or self.is_running:
                return
            if parent_process() is None:
                self.is_running = True
                try:
                    self._run()
                finally:
                    self.is_running = False
            self._was_run = True

    def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="cachestore-self-test-") as folder, trial():
            try:
                self._test(folder)
            except Exception as error:  # noqa: BLE001 - of the trainer's own code, which may be any
                refuse(f"self-test: {type(error).__name__}: {error}")
            finally:
                self._after()
            if written := [name for _folder, _folders, names in os.walk(folder) for name in names]:
                refuse(f"self-test: the trainer wrote {written[0]} to the disk, past the adapter")
