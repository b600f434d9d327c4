"""What encoders made is looked at: faults are found, half precision gets a second try in float32, and weights come back as they were."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import key
from cachestore.encode.batching import outputs
from cachestore.encode.batching.outputs import Made, find_fault, in_float32
from cachestore.encode.batching.transfer import Transfer
from cachestore.encode.recipes import ModelRequest, encoders_for
from tests.encode import tiny
from tests.fakes import tells_of

pytestmark = pytest.mark.torch

ONE, TWO = key("one"), key("two")


def tensor(*numbers, dtype="float32"):
    return torch.tensor(numbers, dtype=getattr(torch, dtype))


def find(name="x", may_be_flat=(), **tensors):
    return find_fault(tensors, may_be_flat)


def test_no_tensors_and_tensors_without_numbers_are_sound():
    assert find() is None
    assert find(x=tensor()) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ((1.0, 2.0), None),
        ((1.0, math.nan), "NaN in 'x'"),
        ((math.nan, math.nan), "NaN in 'x'"),
        ((1.0, math.inf), "infinite numbers in 'x'"),
        ((-math.inf, 1.0), "infinite numbers in 'x'"),
        ((math.inf, math.inf), "infinite numbers in 'x'"),
        ((3.5, 3.5), "only the number 3.5 in 'x'"),
        ((0.0, 0.0, -0.0), "only the number 0 in 'x'"),
    ],
)
def test_what_is_not_finite_or_never_varies_is_found_and_named(numbers, fault, dtype):
    assert find(y=tensor(1, 2, dtype=dtype), x=tensor(*numbers, dtype=dtype)) == fault


def test_items_of_a_batch_are_looked_at_together():
    batch = torch.ones(4, 2, 3)
    batch[1, 0, 2], batch[3, 1, 1] = math.nan, -math.inf
    assert outputs.finite_items([batch, torch.ones(4, dtype=torch.int64)], 4).tolist() == [True, False, True, False]
    assert outputs.finite_items([[batch[0], batch[1], batch[2, :1], batch[0]], batch], 4).tolist() == [True, False, True, False]
    assert outputs.finite_items([torch.zeros(2, 0)], 2).tolist() == [True, True]
    assert outputs.finite_items([], 2).tolist() == [True, True]


def test_of_an_entry_that_is_finite_only_constants_are_looked_for():
    assert find_fault(Made({"x": tensor(1, 2)}, is_finite=True)) is None
    assert find_fault(Made({"x": torch.tensor([[5.0, 5.0], [5.0, 6.0]])}, is_finite=True)) is None
    assert find_fault(Made({"x": torch.full((3, 4), 5.0)}, is_finite=True)) == "only the number 5 in 'x'"
    assert find_fault(Made({"x": torch.full((3, 1), 5.0), "y": tensor(7.0)}, is_finite=True)) == "only the number 5 in 'x'"


def test_on_a_gpu_what_is_not_finite_is_told_with_the_results():
    transfer = Transfer(torch.device("cpu"))
    given = {"x": torch.tensor([[1.0, 2.0], [math.nan, 1.0]]), "mask": torch.ones(2)}
    moved, finite = outputs.fetch(transfer, given, ["x"], 2)()
    assert (set(moved), list(finite)) == ({"x", "mask"}, [False, False])
    transfer = AsOfAGpu(torch.device("cpu"))
    moved, finite = outputs.fetch(transfer, given, ["x"], 2)()
    assert (set(moved), list(finite)) == ({"x", "mask"}, [True, False])


class AsOfAGpu(Transfer):
    @property
    def is_gpu(self):
        return True


def test_a_single_number_and_whole_numbers_may_be_constant():
    assert find(x=tensor(3.0), y=tensor(1, 1, 1, dtype="int64"), z=tensor(1, 1, dtype="bool")) is None


def test_what_may_be_flat_may_be_zero_or_one_and_nothing_else_that_never_varies():
    """A mask is one throughout where a caption fills its length."""
    assert find(x=tensor(0, 0), may_be_flat=("x",)) is None
    assert find(x=tensor(1, 1), may_be_flat=("x",)) is None
    assert find(x=tensor(2, 2), may_be_flat=("x",)) == "only the number 2 in 'x'"
    assert find(x=tensor(math.nan, 0), may_be_flat=("x",)) == "NaN in 'x'"


class Doubler:
    """Doubles numbers in the dtype of its weight; notes what it is asked for, and in which dtype."""

    def __init__(self, dtype="float16"):
        self.module = torch.nn.Linear(1, 1).to(getattr(torch, dtype)).requires_grad_(requires_grad=False)
        self.asked: list[Any] = []

    def make(self, batch):
        dtype = self.module.weight.dtype
        self.asked.append((len(batch), dtype))
        return {name: Made({"x": (torch.tensor(numbers, dtype=dtype) * 2)}) for name, numbers in batch}

    def make_sound(self, batch):
        from cachestore.encode.batching.outputs import make_sound

        return make_sound("the doubler", batch, self.make(batch), self.make, [self.module])


def test_nothing_is_made_of_nothing():
    assert Doubler().make_sound([]) == {}


def test_a_sound_batch_is_made_once():
    doubler = Doubler()
    assert set(doubler.make_sound([(ONE, [1, 2]), (TWO, [3, 4])])) == {ONE, TWO}
    assert doubler.asked == [(2, torch.float16)]


def test_what_overflows_is_made_again_in_float32_and_nothing_else_is():
    doubler = Doubler()
    made = doubler.make_sound([(ONE, [1, 2]), (TWO, [60_000, 4])])
    assert doubler.asked == [(2, torch.float16), (1, torch.float32)]
    assert made[ONE]["x"].dtype == torch.float16
    assert made[TWO]["x"].tolist() == [120_000, 8]
    assert doubler.module.weight.dtype == torch.float16


def test_what_is_not_sound_in_float32_either_is_refused_by_name():
    with pytest.raises(EncodeFailed, check=tells_of("NaN", "'x'", TWO, "float32")):
        Doubler().make_sound([(ONE, [1, 2]), (TWO, [math.nan, 4])])


def test_float32_is_not_tried_twice():
    doubler = Doubler("float32")
    with pytest.raises(EncodeFailed, check=tells_of("infinite numbers", "'x'", ONE)):
        doubler.make_sound([(ONE, [math.inf, 2])])
    assert len(doubler.asked) == 1


def test_weights_and_buffers_come_back_in_their_own_dtypes_bit_by_bit_even_after_an_error():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8).half(), torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 8))
    module.register_buffer("count", torch.tensor([3]))
    module.requires_grad_(requires_grad=False)
    before = deepcopy(module.state_dict())

    def use_and_fail():
        with in_float32([module, module]):
            assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}
            raise MemoryError

    with pytest.raises(MemoryError):
        use_and_fail()
    after = module.state_dict()
    assert all(after[name].dtype == before[name].dtype and after[name].equal(before[name]) for name in before)


# Through the encoders


def half_vae(folder, digest):
    """A VAE in float16 whose picture's activations leave the range of float16, but not that of float32."""
    tiny.vae(force_upcast=False).save_pretrained(folder)
    encoder: Any = encoders_for(ModelRequest(model=str(folder), encode=["latents"], vae_dtype="float16"), digest)[0]
    encoder.submit([(ONE, picture(1))])()
    convolution = encoder._vae._vae.encoder.conv_in
    with torch.no_grad():
        convolution.weight.fill_(6e4)
    return encoder


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def test_a_vae_that_overflows_in_half_precision_gives_finite_latents_and_goes_on_in_half(tmp_path, digest):
    encoder = half_vae(tmp_path, digest)
    weights = {name: tensor.clone() for name, tensor in encoder._vae._vae.state_dict().items()}
    made = encoder.submit([(ONE, picture(1)), (TWO, picture(2))])()
    assert all(entry["moments"].isfinite().all() and entry["moments"].dtype == torch.float16 for entry in made.values())
    after = encoder._vae._vae.state_dict()
    assert all(after[name].dtype == torch.float16 and after[name].equal(weights[name]) for name in weights)


def test_the_overflow_is_real_without_the_second_try(tmp_path, digest, monkeypatch):
    monkeypatch.setattr(outputs, "_HALVES", ())
    with pytest.raises(EncodeFailed):
        half_vae(tmp_path, digest).submit([(ONE, picture(1))])()


def test_a_text_encoder_that_says_the_same_of_everything_is_refused(plain_model, digest):
    encoder: Any = encoders_for(ModelRequest(model=str(plain_model[0]), encode=["text"]), digest)[0]
    resolved = encoder.resolve({"caption": "a cat"}, None)
    payload = encoder.prepare(resolved).payload
    encoder.submit([(resolved.key, payload)])()
    last = encoder._modules._modules[0].encoder.layer[-1].output.LayerNorm
    with torch.no_grad():
        last.weight.zero_()
        last.bias.zero_()
    with pytest.raises(EncodeFailed, check=tells_of("only the number 0", "'prompt_embeds'", resolved.key)):
        encoder.submit([(resolved.key, payload)])()
