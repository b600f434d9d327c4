"""Archives of arrays that state what is not true: they are refused, and take no memory for what they state."""

import bz2
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from cachestore.core.errors import EncodeFailed
from cachestore.trainers import containers
from cachestore.trainers.containers import read_npz, read_safetensors, write_npz

MIB = 1 << 20
BOMB_BYTES = 512 * MIB


def member(name, packed, *, kind, unpacked, crc=0):
    """(header and bytes of a member, its entry in the list), with sizes that need not be true."""
    raw = name.encode()
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, kind, 0, 0, crc, len(packed), unpacked, len(raw), 0) + raw + packed
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, kind, 0, 0, crc, len(packed), unpacked, len(raw), 0, 0, 0, 0, 0, 0)
    return local, entry, raw


def archive(*members, at=None):
    """A zip of such members; `at` is where all of them should begin."""
    body, entries = b"", b""
    for local, entry, raw in members:
        entries += entry[:-4] + struct.pack("<L", len(body) if at is None else at) + raw
        body += local
    return body + entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(members), len(members), len(entries), len(body), 0)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def headed(shape, *, descr: object = "<f4", data=bytes(24), order=False):
    """An .npy whose header states any shape."""
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


def stored(name, data, **stated):
    return member(name, data, kind=0, **{"unpacked": len(data), "crc": zlib.crc32(data), **stated})


def deflated(name, data, **stated):
    packer = zlib.compressobj(9, wbits=-15)
    return member(name, packer.compress(data) + packer.flush(), kind=8, **{"unpacked": len(data), "crc": zlib.crc32(data), **stated})


def bomb(packer):
    """Half a gigabyte of zeros, packed without ever having them."""
    return b"".join([*(packer.compress(bytes(MIB)) for _ in range(BOMB_BYTES // MIB)), packer.flush()])


ONE = npy(np.arange(6, dtype=np.float32))

FORGED = {
    "less than there is": archive(deflated("a.npy", ONE, unpacked=100)),
    "more than there is": archive(deflated("a.npy", ONE, unpacked=len(ONE) + 1)),
    "more than there is, as it is": archive(stored("a.npy", ONE, unpacked=len(ONE) + 1)),
    "another checksum": archive(stored("a.npy", ONE, crc=1)),
    "two of one name": archive(stored("a.npy", ONE), stored("a.npy", ONE)),
    "two of one array": archive(stored("a.npy", ONE), stored("a", ONE)),
    "two in one place": archive(stored("a.npy", ONE), stored("b.npy", ONE), at=0),
    "one beyond the end": archive(stored("a.npy", ONE), at=1 << 20),
    "bzip2": archive(member("a.npy", bz2.compress(ONE), kind=12, unpacked=len(ONE), crc=zlib.crc32(ONE))),
    "an unknown packing": archive(member("a.npy", ONE, kind=99, unpacked=len(ONE), crc=zlib.crc32(ONE))),
    "objects": archive(stored("a.npy", npy(np.array([{}], object)))),
    "a shape of 2^80 numbers": archive(stored("a.npy", headed((1 << 40, 1 << 40)))),
    "a shape whose size wraps round to 0": archive(stored("a.npy", headed((1 << 32, 1 << 32)))),
    "a negative shape": archive(stored("a.npy", headed((-1, -6)))),
    "a shape of fewer numbers": archive(stored("a.npy", headed((5,)))),
    "a giant type": archive(stored("a.npy", headed((1,), descr="V2000000000"))),
    "a type within types": archive(stored("a.npy", headed((1,), descr=[("a", "<f4", (1 << 20, 1 << 20))]))),
    "a header nested without end": archive(stored("a.npy", headed("(" * 9000))),
    "a long header": archive(stored("a.npy", headed("(6," + " " * 20_000 + ")"))),
    "no array": archive(stored("a.npy", b"no array")),
    "an archive in an archive": archive(stored("a.npy", archive(stored("a.npy", ONE)))),
    "a comment": archive(stored("a.npy", ONE))[:-2] + b"\1\0x",
    "a list of 64 bits": archive(stored("a.npy", ONE))[:-22] + b"PK\6\7" + bytes(16) + archive(stored("a.npy", ONE))[-22:],
}


@pytest.mark.parametrize("forgery", FORGED)
def test_an_archive_that_does_not_hold_what_it_states_is_refused(forgery):
    with pytest.raises(EncodeFailed):
        read_npz(FORGED[forgery])


def test_a_list_of_arrays_longer_than_any_is_refused_before_it_is_read():
    with pytest.raises(EncodeFailed):
        read_npz(archive(*[stored("a" * 1000, b"")] * 1100))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_array_that_numpy_writes_is_read(save):
    arrays = {
        "plain": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "by_columns": np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
        "big_endian": np.arange(5, dtype=">f4"),
        "none": np.zeros((0, 3), np.float16),
        "one": np.array(7, np.uint8),
    }
    buffer = io.BytesIO()
    save(buffer, **arrays)
    read = read_npz(buffer.getvalue()).tensors
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name][1:] == (array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes())
    assert read_npz(write_npz(arrays)).tensors == read


def test_an_empty_archive_holds_nothing():
    assert dict(read_npz(archive()).tensors) == {}


def test_the_limit_holds_for_all_arrays_together(monkeypatch):
    monkeypatch.setattr(containers, "LARGEST_BYTES", 2 * len(ONE) - 1)
    assert len(read_npz(archive(stored("a.npy", ONE))).tensors) == 1
    with pytest.raises(EncodeFailed):
        read_npz(archive(stored("a.npy", ONE), deflated("b.npy", ONE)))


def test_a_header_of_safetensors_longer_than_any_is_refused():
    with pytest.raises(EncodeFailed):
        read_safetensors((1 << 40).to_bytes(8, "little") + b"{}")


_LIMITED = """
import resource, sys
from cachestore.core.errors import EncodeFailed
from cachestore.trainers.containers import read_npz
data = sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_npz(data)
except EncodeFailed:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def mebibytes_to_refuse(data):
    done = subprocess.run([sys.executable, "-c", _LIMITED], input=data, capture_output=True, timeout=50, check=True)
    return int(done.stdout)


def test_a_forged_size_takes_no_memory():
    """64 MiB of zeros in 64 KiB that state 100 bytes."""
    packer = zlib.compressobj(9, wbits=-15)
    packed = packer.compress(bytes(64 * MIB)) + packer.flush()
    assert mebibytes_to_refuse(archive(member("a.npy", packed, kind=8, unpacked=100))) < 16


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packer"), [(8, zlib.compressobj(9, wbits=-15)), (12, bz2.BZ2Compressor(9))], ids=["deflate", "bzip2"])
def test_half_a_gigabyte_behind_a_forged_size_takes_no_memory(kind, packer):
    assert mebibytes_to_refuse(archive(member("a.npy", bomb(packer), kind=kind, unpacked=100))) < 16
