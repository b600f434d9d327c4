"""Processes for scenarios, started once a session."""

import pytest

from tests.fakes import LOG, logged
from tests.scenarios.crowd import Crowd


@pytest.fixture(scope="session")
def one_crowd(tmp_path_factory):
    crowd = Crowd(tmp_path_factory.mktemp("crowd"), "tests.scenarios.parts")
    yield crowd
    crowd.close()


@pytest.fixture
def crowd(one_crowd, tmp_path, monkeypatch):
    """Processes without torch, whose encoders all log to one file; `crowd.made()` tells what they made since it was last asked."""
    log = tmp_path / "log"
    monkeypatch.setattr(one_crowd, "folder", tmp_path)

    def made():
        found = logged(log)
        log.unlink(missing_ok=True)
        return found

    really = Crowd.begin
    one_crowd.made = made
    monkeypatch.setattr(one_crowd, "begin", lambda part, *bodies, **more: really(one_crowd, part, *bodies, **{LOG: str(log), **more}))
    return one_crowd
