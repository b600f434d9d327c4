"""The seam between tensors and bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.core.tensors import fill_their_memory, to_numpy, to_raw, to_torch
from cachestore.files.container import DTYPE_BYTES, size_bytes
from tests.fakes import tells_of

NUMPY_DTYPES = ["bool", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8"]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def writable(raw):
    """What a fetch hands out: the same bytes in a buffer of its own."""
    return {name: (dtype, shape, memoryview(bytearray(buffer))) for name, (dtype, shape, buffer) in raw.items()}


def counting(shape, dtype):
    return np.arange(int(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)


def test_no_tensors_are_no_bytes():
    assert to_raw({}) == to_numpy({}) == {}


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@given(shape=shapes)
def test_an_array_comes_back(dtype, shape):
    array = counting(shape, dtype)
    raw = to_raw({"x": array})
    name, found_shape, buffer = raw["x"]
    assert (found_shape, len(buffer)) == (shape, size_bytes(name, shape))
    back = to_numpy(writable(raw))["x"]
    assert (back.dtype, back.shape) == (array.dtype, shape)
    assert np.array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "view",
    [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::-1], np.asfortranarray, lambda a: a[1:1], lambda a: np.broadcast_to(a[0], (3, 5))],
    ids=["turned", "every second", "backwards", "Fortran's order", "nothing", "broadcast"],
)
def test_an_array_that_is_not_contiguous_comes_back(view):
    array = view(np.arange(20.0).reshape(4, 5))
    assert np.array_equal(to_numpy(writable(to_raw({"x": array})))["x"], array)


def test_an_array_of_the_other_byte_order_is_stored_little_endian():
    dtype, shape, buffer = to_raw({"x": np.array([1, 256], ">i2")})["x"]
    assert (dtype, shape, bytes(buffer)) == ("I16", (2,), b"\x01\x00\x00\x01")


def test_buffers_of_any_element_are_taken_as_bytes():
    wide = memoryview(bytearray(range(8))).cast("Q")
    dtype, shape, buffer = to_raw({"x": ("U16", (2, 2), wide)})["x"]
    assert (dtype, shape, bytes(buffer), len(buffer)) == ("U16", (2, 2), bytes(range(8)), 8)


def test_a_tuple_is_not_copied():
    memory = bytearray(4)
    buffer = to_raw({"x": ("U8", (4,), memory)})["x"][2]
    memory[0] = 9
    assert buffer[0] == 9


@pytest.mark.parametrize(
    "value",
    [
        ("U8", (1,)),
        ("U8", (1,), "a"),
        ("U8", (1,), memoryview(bytes(4))[::2]),
        ("U8", (True,), b"1"),
        ("U8", (1.0,), b"1"),
        ("U8", [1], b"1"),
        ("U8", 1, b"1"),
        (["U8"], (1,), b"1"),
    ],
    ids=[
        "without bytes",
        "text",
        "gaps between its bytes",
        "True as a size",
        "1.0 as a size",
        "a list as its shape",
        "a number as its shape",
        "a list as its dtype",
    ],
)
def test_a_tuple_is_refused_with(value):
    with pytest.raises(BadInput, check=tells_of("'x'")):
        to_raw({"x": value})


def test_a_contiguous_array_is_not_copied():
    array = np.zeros(4, np.uint8)
    buffer = to_raw({"x": array})["x"][2]
    array[0] = 9
    assert bytes(buffer) == b"\x09\0\0\0"


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        1.5,
        "text",
        b"bytes",
        None,
        np.float32(1),
        np.array(["a"]),
        np.array([object()]),
        np.zeros(2, "f8,i4"),
        np.zeros(2, "c16"),
        np.zeros(2, "M8[s]"),
        np.ma.masked_array([1.0, 2.0], [False, True]),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_what_is_no_tensor_that_safetensors_knows_is_refused_by_name(value):
    with pytest.raises(BadInput):
        to_raw({"x": value})


def test_bfloat16_and_float8_are_numbers_of_their_width_in_numpy():
    raw = {"a": ("BF16", (2,), bytearray(4)), "b": ("F8_E4M3", (3,), bytearray(3)), "c": ("F8_E5M2", (0, 2), bytearray())}
    assert {name: (each.dtype.name, each.shape) for name, each in to_numpy(raw).items()} == {
        "a": ("uint16", (2,)),
        "b": ("uint8", (3,)),
        "c": ("uint8", (0, 2)),
    }


def test_numpy_reads_every_dtype_that_is_stored():
    for dtype, width in DTYPE_BYTES.items():
        assert to_numpy({"x": (dtype, (3,), bytearray(3 * width))})["x"].nbytes == 3 * width


@pytest.mark.torch
class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        """torch is the subject here, and imported by nothing else in this file."""
        import torch

        return torch

    def dtypes(self, torch):
        return [
            torch.bool,
            *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
        ]

    def test_every_dtype_comes_back_bit_by_bit(self, torch):
        names = set()
        for dtype in self.dtypes(torch):
            tensor = torch.arange(6).reshape(2, 3).to(dtype)
            raw = to_raw({"x": tensor})
            names.add(raw["x"][0])
            back = to_torch(writable(raw))["x"]
            assert (back.dtype, back.shape) == (dtype, tensor.shape)
            assert torch.equal(back.view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert names == set(DTYPE_BYTES)

    def test_empty_tensors_and_scalars_come_back(self, torch):
        for dtype in self.dtypes(torch):
            for shape in ((0,), (3, 0, 2), ()):
                back = to_torch(writable(to_raw({"x": torch.zeros(shape, dtype=dtype)})))["x"]
                assert (back.dtype, tuple(back.shape)) == (dtype, shape)

    def test_tensors_that_are_not_plain_come_back(self, torch):
        base = torch.randn(4, 5)
        views = {
            "turned": base.T,
            "every second": base[::2],
            "broadcast": base[0].expand(3, 5),
            "with gradient": torch.nn.Parameter(base),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
            "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
            "channels last": torch.randn(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        }
        back = to_torch(writable(to_raw(views)))
        for name, tensor in views.items():
            assert torch.equal(back[name], tensor.detach()), name
            assert back[name].is_contiguous()

    def test_tensors_are_contiguous_writable_and_share_the_buffer(self, torch):
        buffer = bytearray(8)
        to_torch({"x": ("F32", (2,), memoryview(buffer))})["x"].fill_(1.0)
        assert bytes(buffer) == b"\0\0\x80?" * 2

    def test_a_buffer_that_cannot_be_written_is_copied(self, torch):
        back = to_torch({"x": ("F32", (2,), memoryview(bytes(8)))})["x"]
        back.fill_(1.0)
        assert back.tolist() == [1.0, 1.0]

    def test_a_contiguous_tensor_is_not_copied(self, torch):
        tensor = torch.zeros(4, dtype=torch.uint8)
        buffer = to_raw({"x": tensor})["x"][2]
        tensor[0] = 9
        assert bytes(buffer) == b"\x09\0\0\0"

    def test_what_cannot_be_stored_is_refused_by_name(self, torch):
        dense = torch.zeros(2, 2)
        values = [torch.zeros(2, dtype=torch.complex128), dense.to_sparse(), dense.to_mkldnn(), torch.zeros(2, device="meta")]
        values += [torch.nn.parameter.UninitializedParameter(), torch.nested.as_nested_tensor([dense, dense[:1]], layout=torch.jagged)]
        with pytest.warns(match="deprecated"):
            values += [torch.quantize_per_tensor(dense, 1.0, 0, torch.qint8)]
        for value in values:
            with pytest.raises(BadInput, match="'x'"):
                to_raw({"x": value})
            fill_their_memory([{"x": value}])  # is asked first, and raises nothing

    def test_torch_and_numpy_write_the_same_bytes(self, torch):
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        one, other = to_raw({"x": array})["x"], to_raw({"x": torch.from_numpy(array)})["x"]
        assert one == other


@pytest.mark.torch
def test_tensors_fill_their_memory_unless_most_of_what_they_keep_is_not_used():
    import torch

    batch = torch.zeros(4, 10, 3)
    assert fill_their_memory([{"x": item} for item in batch])
    assert fill_their_memory([{"x": item[:5]} for item in batch])
    assert not fill_their_memory([{"x": item[:4]} for item in batch])
    assert fill_their_memory([{"x": batch[0], "y": torch.ones(40)}, {"x": batch[1], "y": torch.ones(0)}])
    assert fill_their_memory([])
    assert not fill_their_memory([{"x": np.zeros(3)}])
    assert not fill_their_memory([{"x": torch.zeros(3).to_sparse()}])


def test_a_tensor_without_values_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(BadInput, match="meta"):
        to_raw({"x": torch.zeros(2, device="meta")})
