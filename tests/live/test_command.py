"""The front door written into a command: before the script, whatever launches it, whichever options with values stand before."""

import re
import shlex
import sys
from types import ModuleType, SimpleNamespace

import pytest

from cachestore.core.errors import BadUsage
from cachestore.live.command import with_front

FRONT = ["toy", "--store", "s"]
LIVE = "cachestore.live toy --store s"


def written(line):
    return shlex.join(with_front(shlex.split(line), FRONT))


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("python a.py --x 1", f"python -m {LIVE} a.py --x 1"),
        ("python3.11 -u -X dev -W ignore a.py", f"python3.11 -u -X dev -W ignore -m {LIVE} a.py"),
        ("/opt/venv/bin/python -uXdev -Wignore a.py -m b", f"/opt/venv/bin/python -uXdev -Wignore -m {LIVE} a.py -m b"),
        ("python --check-hash-based-pycs never -- -a.py", f"python --check-hash-based-pycs never -m {LIVE} -a.py"),
        ("python -m pkg.train --x", f"python -m {LIVE} -m pkg.train --x"),
        ("python -um pkg.train", f"python -um {LIVE} -m pkg.train"),
        ("python -mpkg.train", f"python -m {LIVE} -m pkg.train"),
        ("env A=1 numactl -N 0 python a.py", f"env A=1 numactl -N 0 python -m {LIVE} a.py"),
        ("python a.py python b.py -- c", f"python -m {LIVE} a.py python b.py -- c"),
    ],
)
def test_it_stands_before_the_script_of_python(line, becomes):
    assert written(line) == becomes


@pytest.mark.torch
@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        (
            "accelerate launch --num_processes 2 --mixed_precision bf16 --gpu_ids 0,1 a.py --x 1",
            f"accelerate launch --num_processes 2 --mixed_precision bf16 --gpu_ids 0,1 -m {LIVE} a.py --x 1",
        ),
        (
            "accelerate launch --num-processes=2 --multi_gpu --module pkg.train --module",
            f"accelerate launch --num-processes=2 --multi_gpu --module {LIVE} -m pkg.train --module",
        ),
        ("accelerate-launch -m pkg.train", f"accelerate-launch -m {LIVE} -m pkg.train"),
        (
            "python -m accelerate.commands.launch --config_file c.yaml a.py",
            f"python -m accelerate.commands.launch --config_file c.yaml -m {LIVE} a.py",
        ),
        (
            "python -m accelerate.commands.accelerate_cli launch --cpu a.py",
            f"python -m accelerate.commands.accelerate_cli launch --cpu -m {LIVE} a.py",
        ),
        (
            "torchrun --nproc_per_node 8 --rdzv-backend c10d --standalone a.py --nproc_per_node 3",
            f"torchrun --nproc_per_node 8 --rdzv-backend c10d --standalone -m {LIVE} a.py --nproc_per_node 3",
        ),
        ("torchrun -m pkg.train", f"torchrun -m {LIVE} -m pkg.train"),
        (
            "srun python -u -m torch.distributed.run --nnodes 2 a.py",
            f"srun python -u -m torch.distributed.run --nnodes 2 -m {LIVE} a.py",
        ),
        (
            "python -m torch.distributed.launch --use-env --nproc-per-node 2 a.py",
            f"python -m torch.distributed.launch --use-env --nproc-per-node 2 -m {LIVE} a.py",
        ),
    ],
)
def test_it_stands_before_the_script_of_a_launcher_as_the_launcher_itself_parses_its_options(line, becomes):
    assert written(line) == becomes


def deepspeed_with(parsed):
    """The modules of a launcher that is not installed here; its `parse_args` returns this."""
    names = ("deepspeed", "deepspeed.launcher", "deepspeed.launcher.runner")
    modules = {name: ModuleType(name) for name in names}
    vars(modules[names[-1]])["parse_args"] = lambda _words: parsed
    return modules


@pytest.mark.parametrize(("module", "becomes"), [(False, f"-m {LIVE} a.py"), (True, f"{LIVE} -m a.py")])
def test_it_asks_deepspeed_where_the_script_stands(monkeypatch, module, becomes):
    parsed = SimpleNamespace(user_script="a.py", user_args=["--x"], module=module, no_python=False)
    for name, one in deepspeed_with(parsed).items():
        monkeypatch.setitem(sys.modules, name, one)
    assert written("deepspeed --include localhost:0 a.py --x") == f"deepspeed --include localhost:0 {becomes} --x"


@pytest.mark.parametrize(
    "line",
    [
        "./train.sh",
        "python",
        "python -",
        "python -c 'import a'",
        "python -u",
        "python -m",
        "accelerate config",
        "accelerate",
        "deepspeed a.py",  # not installed here
        "uv run a.py",
    ],
)
def test_a_command_without_a_script_that_can_be_found_is_refused_with_what_to_write(line):
    with pytest.raises(BadUsage, match=re.escape(f"-m {LIVE}")):
        written(line)


@pytest.mark.torch
@pytest.mark.parametrize(
    "line", ["torchrun", "torchrun --no-python a.py", "torchrun --nproc", "accelerate launch", "accelerate launch --no_python a"]
)
def test_so_is_a_command_that_its_launcher_does_not_understand(line):
    with pytest.raises(BadUsage, match=re.escape(f"-m {LIVE}")):
        written(line)


def test_a_command_that_has_the_front_door_is_left_alone():
    with pytest.raises(BadUsage):
        written("python -m cachestore.live toy --store s a.py")
