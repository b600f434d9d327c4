"""Named points in the code where a test can kill the process. They do nothing unless the environment names one.

`CACHESTORE_FAILPOINT=publish.after_link:3` kills this process with SIGKILL the third time it reaches that point.
"""

import os
import signal

VARIABLE = "CACHESTORE_FAILPOINT"
_reached: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Kill this process if the environment names this point."""
    point, _, count = os.environ.get(VARIABLE, "").partition(":")
    if point != name:
        return
    _reached[name] = _reached.get(name, 0) + 1
    if _reached[name] >= int(count or 1):
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
