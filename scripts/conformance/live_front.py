"""Run a toy trainer by every launcher, with every kind of DataLoader worker and pool of processes, and show that each process is armed.

    python3 scripts/conformance/live_front.py

It needs torch and accelerate in this Python, and prints a row for each launcher: in how many processes, and in what kinds of workers, the
trainer's functions were those of the adapter. Exit code 1 at the first that differs.
"""

import os
import subprocess
import sys
import tempfile
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
import os, sys
from toylib import Cache, plain
import multiprocessing, torch
from concurrent.futures import ProcessPoolExecutor
class Rows(torch.utils.data.Dataset):
    def __init__(self): self.cache = Cache()
    def __len__(self): return 4
    def __getitem__(self, i): return f"{self.cache.load(str(i))} {plain(i)}"
WANT = [f"ours {i} {i + 1}" for i in range(4)]
def check(name, got):
    if got != WANT: sys.exit(f"{name}: {got}")
def row(i): return Rows()[i]
def spawned(rank): check("torch.multiprocessing.spawn", [row(i) for i in range(4)])
if __name__ == "__main__":
    kinds = []
    for kind in (None, "fork", "spawn", "forkserver"):
        for persistent in (False, True) if kind else (False,):
            loader = torch.utils.data.DataLoader(
                Rows(), num_workers=1 if kind else 0, multiprocessing_context=kind, persistent_workers=persistent, batch_size=None)
            for epoch in range(2): check(f"DataLoader {kind} {persistent}", list(loader))
            kinds.append(f"{kind or 'no worker'}{' persistent' if persistent else ''}")
        if kind:
            context = multiprocessing.get_context(kind)
            with context.Pool(1) as pool: check(f"Pool {kind}", pool.map(row, range(4)))
            with ProcessPoolExecutor(1, mp_context=context) as pool: check(f"ProcessPoolExecutor {kind}", list(pool.map(row, range(4))))
    torch.multiprocessing.spawn(spawned, nprocs=1)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "1") == "0"
    print("ARMED", ", ".join(kinds), "with pools and torch.multiprocessing.spawn", flush=True)
    if "--restart" in sys.argv and first: sys.exit(9)
""",
}
LIVE = ["-m", "cachestore.live", "toyadapter", "--store", "store"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
ACCELERATE = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
]
WRITTEN = [sys.executable, "-m", "cachestore", "live", "toyadapter", "--store", "store", "--"]
ROWS = {
    "python script": ([sys.executable, *LIVE, "toytrain.py"], 1),
    "python -m": ([sys.executable, *LIVE, "-m", "toytrain"], 1),
    "cachestore live -- python": ([*WRITTEN, sys.executable, "toytrain.py"], 1),
    "torchrun, 2 ranks": ([*TORCHRUN, "29611", *LIVE, "toytrain.py"], 2),
    "torchrun, a module": ([*TORCHRUN, "29612", *LIVE, "-m", "toytrain"], 2),
    "torchrun, restarted once": ([*TORCHRUN, "29613", "--max-restarts", "1", *LIVE, "toytrain.py", "--restart"], 4),
    "accelerate, 1 process": ([*ACCELERATE, "--num_processes", "1", *LIVE, "toytrain.py"], 1),
    "accelerate, 2 ranks": ([*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "29614", *LIVE, "toytrain.py"], 2),
    "accelerate, a module": ([*ACCELERATE, "--num_processes", "1", *LIVE, "-m", "toytrain"], 1),
    "cachestore live -- accelerate": ([*WRITTEN, *ACCELERATE, "--num_processes", "1", "toytrain.py"], 1),
}


def main() -> int:
    """Run each row. Returns 1 at the first whose processes are not all armed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    print("| launcher | processes armed | lines at the end | kinds of workers in each |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text)
        for name, (command, processes) in ROWS.items():
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)
            armed = [line for line in done.stdout.splitlines() if line.startswith("ARMED ")]
            ends = done.stderr.count("cachestore.live: the trainer asked for no cached value")
            if done.returncode or len(armed) != processes or ends != (2 if "restarted" in name else 1):
                print(f"{name}: exit code {done.returncode}, {len(armed)} of {processes} armed, {ends} lines\n{done.stdout}\n{done.stderr}")
                return 1
            print(f"| {name} | {processes} of {processes} | {ends} | {armed[0].removeprefix('ARMED ')} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
