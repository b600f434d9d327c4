"""What tests of import and export share: a source, and folders to work in."""

import pytest


@pytest.fixture
def torch_files_read_here(monkeypatch):
    """The process that reads files with pickles is test_untrusted's: starting one takes seconds."""
    from cachestore.interop.formats.torch_files import read_torch

    monkeypatch.setattr("cachestore.interop.sandbox.TorchFiles.read", lambda _files, data: read_torch(data))


@pytest.fixture
def data(tmp_path):
    from tests.interop import trainers

    return trainers.make_source(tmp_path / "data")


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"
