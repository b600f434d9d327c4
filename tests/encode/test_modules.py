"""Giving back what was loaded."""

import weakref

import pytest
import torch

from cachestore.core.errors import BadInput
from cachestore.encode import modules
from cachestore.encode.models import Component
from tests.encode.tiny import of_diffusers

pytestmark = pytest.mark.torch


def loaded(folder):
    vae = of_diffusers("AutoencoderKL")(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1)
    vae.save_pretrained(folder)
    return modules.load_module(Component("vae", "diffusers", "AutoencoderKL", folder, {}), "float32", torch.device("cpu"))


class TestFreeingMemory:
    def test_nothing_loaded_is_nothing_to_free(self):
        modules.free_memory()

    @pytest.mark.parametrize("holds_itself", [False, True])
    def test_a_module_that_nobody_holds_is_gone_at_once(self, tmp_path, holds_itself):
        module = loaded(tmp_path)
        module.itself = [module] if holds_itself else []
        left = weakref.ref(module)
        del module
        modules.free_memory()
        assert left() is None

    def test_a_module_that_is_still_in_use_stays(self, tmp_path):
        module = loaded(tmp_path)
        modules.free_memory()
        assert next(module.parameters()).numel() > 0


def test_a_gpu_that_is_not_there_is_refused_with_what_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInput, match="finds 1 CUDA device "):
        modules.choose_device("cuda:1")
