"""Checksums of files and of what goes into them."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError
from cachestore.files import checksum
from cachestore.files.checksum import Checksum, digest_file, digest_of, read_blocks
from cachestore.files.opening import opened


def test_nothing_has_a_digest_of_its_own(tmp_path):
    (tmp_path / "f").touch()
    assert digest_file(tmp_path / "f") == digest_of([]) == digest_of([b"", b""]) == Checksum().hexdigest()


@given(chunks=st.lists(st.binary(max_size=20), max_size=5))
def test_the_digest_of_chunks_is_that_of_the_whole(chunks):
    assert digest_of([memoryview(bytearray(chunk)) for chunk in chunks]) == xxhash.xxh3_128(b"".join(chunks)).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 35])
def test_a_file_is_read_in_blocks_and_digested_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(checksum, "_BLOCK_BYTES", 10)
    content = bytes(range(size))
    (tmp_path / "f").write_bytes(content)
    with opened(tmp_path / "f") as (descriptor, _status):
        blocks = [(offset, bytes(block)) for offset, block in read_blocks(descriptor)]
    assert blocks == [(offset, content[offset : offset + 10]) for offset in range(0, size, 10)]
    assert digest_file(tmp_path / "f") == xxhash.xxh3_128(content).hexdigest()


def test_a_link_has_no_digest(tmp_path):
    (tmp_path / "f").symlink_to("/etc/hostname")
    with pytest.raises(FormatError):
        digest_file(tmp_path / "f")
