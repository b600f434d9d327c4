"""The table of all processes that cachestore starts. `docs/design/processes.md` shows it, and a test compares the two.

`start` is the only function that starts one. ruff refuses other ways to start a process anywhere else in the package.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ChildKind:
    """One kind of child process."""

    name: str
    module: str
    """The module whose `main` gets the arguments and does the work."""
    started_by: str
    """The file of the package that starts it."""
    is_isolated: bool = False
    """Whether it reads what strangers wrote: Python then runs with `-I`, and the environment is an allow-list (`start.KEPT`)."""
    keeps_folder: bool = True
    """Whether it runs in the caller's current folder, as relative paths need; otherwise in the root folder."""


WORKER: Final = ChildKind("worker", "cachestore.cli", "jobs/start/processes.py")
HELPER: Final = ChildKind("helper", "cachestore.remote.reading_helper", "remote/downloads.py")
CALL_HELPER: Final = ChildKind("helper of a call", "cachestore.remote.transfer_helper", "remote/call.py")
PICKLE_READER: Final = ChildKind(
    "reader of pickles", "cachestore.trainers.pickle_reader", "trainers/sandbox.py", is_isolated=True, keeps_folder=False
)
TORCH_PROBE: Final = ChildKind("probe of torch", "cachestore.care.torch_probe", "care/doctor.py", keeps_folder=False)
TRAINER_CHECK: Final = ChildKind("check of a trainer", "cachestore.live.check", "cli/live.py")

KINDS: Final = (WORKER, HELPER, CALL_HELPER, PICKLE_READER, TORCH_PROBE, TRAINER_CHECK)
