"""What `ls`, `push` and `pull` of an address say before anything comes."""

import pytest

import cachestore as cs
from cachestore.cli import ERROR, main
from cachestore.remote.client import ClientLimits
from tests.fakes import raising

ADDRESS = "s3://bucket/cache"


@pytest.mark.parametrize("arguments", [["ls", ADDRESS], ["ls", ADDRESS, "--json"], ["pull", ADDRESS, "new", "--progress", "plain"]])
def test_who_is_asked_and_how_long_an_answer_is_waited_for_is_said_at_once(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    for call in ("remote.listing.list_address", "remote.pull.pull"):
        monkeypatch.setattr(f"cachestore.{call}", raising(cs.RemoteFailed("no answer")))
    assert main(arguments) == ERROR
    asked, failed = capsys.readouterr().err.splitlines()
    assert (ADDRESS in asked, f"{ClientLimits().longest_seconds:.0f} s" in asked, "no answer" in failed) == (True, True, True)
