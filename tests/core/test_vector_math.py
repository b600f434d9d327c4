"""The first vector math of a process: computed by one thread, whoever asks first."""

import json
import subprocess
import sys

import pytest

FIRST_CALLS = """
import json
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Noted(TorchDispatchMode):
    def __torch_dispatch__(self, called, types, arguments=(), options=None):
        seen = [[one.numel(), str(one.dtype), str(one.device)] for one in arguments if isinstance(one, torch.Tensor)]
        noted.append([called.overloadpacket.__name__, *seen])
        return called(*arguments, **(options or {}))


noted = []
torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"), Noted():
    __import__(sys.argv[1])
print(json.dumps(noted))
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("module", ["cachestore.train.dataset", "cachestore.encode.models.modules"])
def test_a_module_that_computes_asks_for_one_number_first(module):
    """What follows where several threads ask first: pytorch issue 188792. The default dtype and device are none that would do."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS, module], capture_output=True, text=True, check=True)

    assert ["exp", [1, "torch.float32", "cpu"]] in json.loads(done.stdout)
