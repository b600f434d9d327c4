"""A source for import and export, and folders to work in."""

import pytest


@pytest.fixture
def data(tmp_path):
    from tests.trainers import trainers

    return trainers.make_source(tmp_path / "data")


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"
