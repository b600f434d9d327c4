"""What every test gets without asking: no waiting for disks, and no deadlines for generated examples."""

import os

import pytest
from hypothesis import settings

settings.register_profile("cachestore", deadline=None, max_examples=60)
settings.load_profile("cachestore")


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks():
    """A sync costs 10 ms and no test cuts the power. Tests about syncing count or fail the calls; programs in subprocesses do sync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield
