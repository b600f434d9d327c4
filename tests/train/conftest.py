"""What tests of loading share."""

import pytest

from cachestore.remote import downloads
from tests.remote import streams
from tests.remote.server import served


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def server(monkeypatch):
    with served() as (state, url):
        for name, value in {**streams.KEYS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        yield state


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(downloads, "_LIMITS", streams.SHORT)


@pytest.fixture
def bucket(path, server, short):
    """A store in a bucket, and the same in a folder."""
    streams.serve_folder(server, streams.make(path))
    return server
