"""Run a toy trainer by every launcher, with every kind of DataLoader worker and pool of processes, and show that each process is armed.

    python3 scripts/conformance/live_front.py

It needs torch and accelerate in this Python. The toy has an Accelerator, as trainers do, and prepares its DataLoaders by it. Prints a row
for each launcher: how many ranks found each other and were armed, and in what kinds of workers the trainer's functions were those of the
adapter. Exit code 1 at the first that differs. Pools of `multiprocess` (of which dill is the pickle) are tried where that is installed,
and MPI where `mpirun` is on PATH (`pip install mpich` brings it): without it, accelerate starts one process on CPUs, whatever number is
asked for, or 2 by torch's launcher with `--multi_gpu` and ACCELERATE_USE_CPU.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "toyadapter.py": """
from cachestore import live
adapter = live.Adapter("toy")
@adapter.replace("toylib", "Cache.load")
def load(own, self, path): return "ours " + path
@adapter.replace("toylib", "plain")
def plain(own, x): return own(x) + 1
""",
    "toylib.py": """
def plain(x): return x
class Cache:
    def load(self, path): return "theirs " + path
""",
    "toytrain.py": """
import os, signal, sys
from toylib import Cache, plain
import multiprocessing, torch, accelerate
from concurrent.futures import ProcessPoolExecutor
class Rows(torch.utils.data.Dataset):
    def __init__(self): self.cache = Cache()
    def __len__(self): return 4
    def __getitem__(self, i): return f"{self.cache.load(str(i))} {plain(i)}"
WANT = [f"ours {i} {i + 1}" for i in range(4)]
def check(name, got, want=WANT):
    if got != want: sys.exit(f"{name}: {got}")
def row(i): return Rows()[i]
def first(rows): return rows[0]
def spawned(rank): check("torch.multiprocessing.spawn", [row(i) for i in range(4)])
def pools(library, kind):
    with library.get_context(kind).Pool(1) as pool: check(f"{library.__name__} {kind}", pool.map(row, range(4)))
if __name__ == "__main__":
    accelerator = accelerate.Accelerator()
    rank, world, restarted = accelerator.process_index, accelerator.num_processes, os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
    check("ranks", accelerator.gather(torch.tensor([rank])).tolist(), list(range(world)))
    if "--kill" in sys.argv and rank == 1 and not restarted: os.kill(os.getpid(), signal.SIGKILL)
    kinds = []
    for kind in (None, "fork", "spawn", "forkserver"):
        for persistent in (False, True) if kind else (False,):
            loader = accelerator.prepare(torch.utils.data.DataLoader(
                Rows(), num_workers=1 if kind else 0, multiprocessing_context=kind, persistent_workers=persistent, collate_fn=first))
            for epoch in range(2): check(f"DataLoader {kind} {persistent}", list(loader), WANT[rank::world])
            kinds.append(f"{kind or 'no worker'}{' persistent' if persistent else ''}")
        if kind:
            pools(multiprocessing, kind)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(kind)) as pool:
                check(f"ProcessPoolExecutor {kind}", list(pool.map(row, range(4))))
    kinds += ["pools by each", "torch.multiprocessing.spawn"]
    torch.multiprocessing.spawn(spawned, nprocs=1)
    try: import multiprocess
    except ImportError: pass
    else:
        for kind in ("fork", "spawn", "forkserver"): pools(multiprocess, kind)
        kinds.append("pools of multiprocess by each")
    print("ARMED", rank, "of", world, ", ".join(kinds), flush=True)
    accelerator.end_training()
""",
    "hosts": "localhost:2\n",
    "cpu.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 1\nuse_cpu: true\n",
}
LIVE = ["-m", "cachestore.live", "toyadapter", "--store", "store"]
PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port"]
RESTARTING = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--max-restarts=1"]
ACCELERATE = [PYTHON, "-m", "accelerate.commands.launch"]
PLAIN = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
TWO = [*ACCELERATE, *PLAIN, "--multi_gpu", "--num_processes=2", "--main_process_port"]
MPI = [*ACCELERATE, *PLAIN, "--cpu", "--num_processes=2", "--mpirun_hostfile=hosts", "--main_process_port"]
WRITTEN = [PYTHON, "-m", "cachestore", "live", "toyadapter", "--store", "store", "--"]
TOY = "toytrain.py"


@dataclass
class Row:
    """A command that starts the toy."""

    command: list[str]
    ranks: int = 1
    code: int = 0
    says: str = ""
    """What stands on stderr."""


ROWS = {
    "python, a script": Row([PYTHON, *LIVE, TOY]),
    "python, a module": Row([PYTHON, *LIVE, "-m", "toytrain"]),
    "cachestore live -- python": Row([*WRITTEN, PYTHON, TOY]),
    "torchrun, 2 ranks": Row([*TORCHRUN, "29611", *LIVE, TOY], 2),
    "torchrun, a module": Row([*TORCHRUN, "29612", *LIVE, "-m", "toytrain"], 2),
    "torchrun, a rank is killed, all start again": Row([*RESTARTING, *LIVE, TOY, "--kill"], 2),
    "cachestore live -- torchrun": Row([*WRITTEN, *TORCHRUN, "29614", TOY], 2),
    "accelerate, 1 process": Row([*ACCELERATE, *PLAIN, "--num_processes=1", *LIVE, TOY]),
    "accelerate --cpu --num_processes=2": Row([*ACCELERATE, *PLAIN, "--cpu", "--num_processes=2", *LIVE, TOY]),
    "accelerate, MULTI_CPU in a config file": Row([*ACCELERATE, "--config_file=cpu.yaml", *LIVE, TOY]),
    "accelerate, 2 ranks by torch's launcher": Row([*TWO, "29615", *LIVE, TOY], 2),
    "accelerate, 2 ranks, a module": Row([*TWO, "29616", *LIVE, "-m", "toytrain"], 2),
    "cachestore live -- accelerate, 2 ranks": Row([*WRITTEN, *TWO, "29617", TOY], 2),
    "accelerate, 2 ranks by mpirun": Row([*MPI, "29618", *LIVE, TOY], 2),
    "cachestore live -- accelerate by mpirun": Row([*WRITTEN, *MPI, "29619", TOY], 2),
    "cachestore live -- accelerate --no_python": Row([*WRITTEN, *ACCELERATE, "--no_python", TOY], 0, 2, "does not understand it"),
    "cachestore live -- python -c": Row([*WRITTEN, PYTHON, "-c", "import toytrain"], 0, 2, "the program of -c is no script"),
}


def main() -> int:
    """Run each row. Returns 1 at the first whose processes are not all armed, or that is not refused as it should be."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo's ranks look for those of before a restart, whatever they run
    print("| launcher | ranks armed | kinds of workers in each |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text)
        for name, row in ROWS.items():
            if "mpirun" in name and not shutil.which("mpirun"):
                print(f"| {name} | mpirun is not here | |")
                continue
            done = subprocess.run(row.command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)
            armed = sorted(line for line in done.stdout.splitlines() if line.startswith("ARMED "))
            there = [line.removeprefix(f"ARMED {rank} of {row.ranks} ") for rank, line in enumerate(armed)]
            ends = done.stderr.count("cachestore.live: the trainer asked for no cached value")
            first = there[0] if there else "refused with exit code 2"
            fits = len(there) == row.ranks and all(one == first for one in there) and (row.ranks == 0 or ends == 1)
            if not fits or done.returncode != row.code or row.says not in done.stderr:
                print(f"{name}: exit code {done.returncode}, {armed}, {ends} lines at the end\n{done.stdout}\n{done.stderr}")
                return 1
            print(f"| {name} | {f'{row.ranks} of {row.ranks}' if row.ranks else 'none started'} | {first} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
