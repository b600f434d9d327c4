"""Watched settings: what an encoder reads is known, or refused by name."""

import argparse
from types import SimpleNamespace

import pytest

from cachestore.live.adapter import Refused
from cachestore.live.watching import watched
from tests.fakes import tells_of


def test_what_is_known_can_be_read_and_what_is_not_is_refused():
    settings = argparse.Namespace(known=1, other=2)
    with watched([settings], ["known"], ["more"]):
        assert settings.known == 1
        assert getattr(settings, "absent", 5) == 5
        settings.known = 3
        with pytest.raises(Refused, check=tells_of("other")):
            _ = settings.other
    assert settings.other == 2
    assert settings.known == 3
    assert type(settings) is argparse.Namespace


def test_blocks_in_blocks_and_one_object_twice_are_watched_once():
    settings = argparse.Namespace(known=1, other=2)
    with watched([settings, settings, None], ["known"]), watched([settings], ["other"]), pytest.raises(Refused):
        _ = settings.other
    assert type(settings) is argparse.Namespace


def test_an_error_ends_the_watch():
    settings = argparse.Namespace(known=1)
    with pytest.raises(ZeroDivisionError), watched([settings], ["known"]):
        _ = 1 / 0
    assert type(settings) is argparse.Namespace


def test_settings_that_cannot_be_watched_are_refused():
    with pytest.raises(Refused, check=tells_of("SimpleNamespace")), watched([SimpleNamespace()], []):
        pass
