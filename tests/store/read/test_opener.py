"""A store is opened by its path or address; what reads addresses is loaded for an address alone."""

import subprocess
import sys

import pytest

import cachestore as cs
from cachestore.store.read.opener import is_address, open_reader

_FOLDER = """
import sys
import cachestore as cs
with cs.open(sys.argv[1], mode="a"):
    pass
from cachestore.store.read.opener import open_reader, open_whole
open_reader(sys.argv[1], verify="first", io="pread", local=None, limit=None).close()
with open_whole(sys.argv[1]) as reader:
    assert len(reader) == 0
assert not [name for name in sys.modules if name.startswith(("cachestore.remote", "cachestore.remote", "cachestore.store.remote"))]
"""


def test_paths_are_no_addresses():
    assert is_address("s3://bucket/cache")
    assert is_address("file:///x")
    assert not is_address("cache/")
    assert not is_address("C:/cache")
    assert not is_address(None)


def test_a_store_in_a_folder_is_opened_without_what_reads_addresses(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", _FOLDER, str(tmp_path / "store")], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("options", [{"local": "copies"}, {"limit": "1GB"}], ids=lambda options: next(iter(options)))
def test_what_is_for_addresses_is_refused_for_a_folder(tmp_path, options):
    with cs.open(tmp_path / "store", mode="a"), pytest.raises(cs.BadInput) as refused:
        open_reader(tmp_path / "store", verify="first", io="pread", **{"local": None, "limit": None, **options})
    assert refused.value.option == next(iter(options))
