"""Runs a trainer's own caching and loading code with its cache files in a store, and compares with its own files.

    python3 scripts/conformance/live_shallow.py musubi --checkout ~/musubi-tuner

Nothing of the trainer is kept here: name a checkout, in an environment that has what its code imports. Its models are replaced by small
stand-ins that make values from pixels and captions (`trainers.py`). For each case:

1. The trainer caches pictures in its own files and loads them in batches: what is compared with.
2. The same run by `python -m cachestore.live`, into an empty store: equal to the bit, and no cache file is on the disk.
3. Once more: nothing is encoded, and the losses of four steps are equal to the bit.
4. A DataLoader with no workers, and with persistent ones by fork and by spawn.
5. One caption is changed and one picture: what the trainer's own rules then encode again, and no more.

Then `ls`, `status`, `verify`, `gc` and `push` on the store; a checkout with a plug point renamed, and one whose reader transposes.
Prints what it saw, and ends with 1 if anything differs.
"""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

import argparse
import ast
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

import numpy as np
import torch

TRAINERS = {"musubi": "live_musubi", "ai-toolkit": "live_ai_toolkit", "diffusion-pipe": "live_diffusion_pipe"}
STEPS = 4
PATHS = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))


@dataclass
class Seen:
    """What one run of the trainer's code said."""

    values: dict[str, np.ndarray]
    encoded: int
    losses: list[str]
    loaders: list[str]
    """How DataLoaders read other batches than the dataset itself."""
    code: int
    text: str

    @property
    def line(self) -> str:
        """The line of ours at the end."""
        found = [line for line in self.text.splitlines() if "encoded (data set" in line or "no cached value" in line]
        return found[-1].removeprefix("cachestore.live: ") if found else ""


@dataclass
class Run:
    """Where the checks of one trainer work."""

    trainer: str
    checkout: Path
    folder: Path
    pictures: int
    problems: list[str] = field(default_factory=list)

    def say(self, what: str, is_good: bool, figures: str = "") -> None:
        """Print one row, and keep it if it is a problem."""
        print(f"{'ok      ' if is_good else 'PROBLEM '} {what}{': ' if figures else ''}{figures}", flush=True)
        if not is_good:
            self.problems.append(what)

    def ask(self, what: str, root: Path, *, store: Path) -> Any:
        """Call `read_epochs` of a trainer's module in a process of its own, by `cachestore.live`, and return what it returns."""
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        live = ["-m", "cachestore.live", self.trainer, "--store", str(store), str(Path(__file__).resolve()), self.trainer]
        options = [
            "--checkout",
            str(self.checkout),
            "--step",
            what,
            "--root",
            str(root),
            "--out",
            str(out),
            "--pictures",
            str(self.pictures),
        ]
        environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *live, *options], env=environment, check=True)
        return json.loads((out / f"{what}.json").read_text())

    def step(self, cases: list[str], root: Path, *options: str, store: Path | None = None, checkout: Path | None = None) -> dict[str, Seen]:
        """Run the trainer's code once in a process of its own: by `cachestore.live` with a store, else plainly."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        live = [] if store is None else ["-m", "cachestore.live", self.trainer, "--store", str(store)]
        own = [str(Path(__file__).resolve()), self.trainer, "--checkout", str(checkout or self.checkout)]
        steps = [word for case in cases for word in ("--step", case)]
        command = [sys.executable, *live, *own, *steps, "--root", str(root), "--out", str(out), *options]
        environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        text, seen = done.stdout + done.stderr, dict[str, Seen]()
        for case in cases:
            seen[case] = Seen({}, 0, [], [], done.returncode, text)
            if (out / f"{case}.json").exists():
                reported = json.loads((out / f"{case}.json").read_text())
                with np.load(out / f"{case}.npz") as values:
                    arrays = {name: values[name] for name in values.files}
                seen[case] = Seen(arrays, reported["encoded"], reported["losses"], reported["loaders"], done.returncode, text)
        return seen


def differing(one: Seen, two: Seen) -> list[str]:
    """Return which arrays are not equal to the bit, or missing."""
    if one.values.keys() != two.values.keys() or not one.values:
        return [f"{len(one.values)} and {len(two.values)} arrays"]
    pairs = ((name, value, two.values[name]) for name, value in one.values.items())
    return [name for name, a, b in pairs if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes())]


def cache_files(module: ModuleType, root: Path) -> list[Path]:
    """Return the trainer's cache files on the disk."""
    return [path for path in root.rglob("*") if path.is_file() and re.search(module.CACHE_FILE, str(path))]


def train(batches: Callable[[], Iterator[dict[str, Any]]]) -> list[str]:
    """Take four steps on what a trainer loads, and return the losses to the bit."""
    weight = torch.full((), 0.5, requires_grad=True)
    optimizer, losses = torch.optim.SGD([weight], lr=0.1), list[str]()
    for number, batch in enumerate(batches()):
        if number == STEPS:
            break
        tensors = [value.float() for _name, value in sorted(flat(batch).items()) if torch.is_floating_point(value)]
        noise = torch.Generator().manual_seed(number)
        loss = torch.zeros(()) + sum(((weight * tensor - torch.randn(tensor.shape, generator=noise)) ** 2).mean() for tensor in tensors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss).hex())
    return losses


def flat(batch: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by name, whatever lists and mappings they are in."""
    if torch.is_tensor(batch):
        return {name: batch}
    pairs = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    return {key: tensor for one, value in pairs for key, tensor in flat(value, f"{name}/{one}").items()}


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array that tells dtype, shape and bits."""
    return np.frombuffer(
        f"{tensor.dtype} {list(tensor.shape)} ".encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), np.uint8
    )


def use_trainer(trainer: str, checkout: Path) -> ModuleType:
    """Make a trainer's modules importable, with stand-ins for what is not installed, and return its module of these checks."""
    from conformance.trainers_code import use_checkout
    from transformers.utils import import_utils

    for name in ("torchvision", "bitsandbytes", "torchaudio", "peft"):  # asked before there are stand-ins, and remembered
        getattr(import_utils, f"is_{name}_available", lambda: None)()
    if importlib.util.find_spec("torchvision") is None:
        importlib.import_module("conformance.live_torchvision").use_stand_in()
    module = importlib.import_module(f"conformance.{TRAINERS[trainer]}")
    use_checkout(trainer, checkout, (*module.DRIVER.stand_ins, *module.STAND_INS))
    return module


def one_step(asked: argparse.Namespace) -> None:
    """In a process of its own: let the trainer cache and load, and write down what came of it."""
    module = use_trainer(asked.trainer, asked.checkout)
    driver = module.DRIVER
    driver.resolution = module.RESOLUTION
    if asked.step == ["epochs"]:
        (asked.out / "epochs.json").write_text(json.dumps(module.read_epochs(asked)))
    for case in (case for case in module.CASES if case.name in asked.step):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        driver.encoded = 0
        batches = module.prepare(driver, case, asked.root / case.name / "data", asked)
        encoded = driver.encoded
        plain = sorted(batches(None, 0), key=lambda batch: batch.get("name", ""))
        named = ((batch.get("name", number), batch) for number, batch in enumerate(plain))
        values = {f"{where}{name}": as_bytes(tensor) for where, batch in named for name, tensor in flat(batch).items()}
        again, chosen = list_of(batches(None, 0)), module.LOADERS[: None if case.name == asked.step[0] else 2] if asked.loaders else ()
        loaders = [f"{method} {workers}" for method, workers in chosen if list_of(batches(method, workers)) != again]
        np.savez(asked.out / f"{case.name}.npz", allow_pickle=False, **values)
        reported = {"encoded": encoded, "losses": train(lambda plain=plain: iter(plain)), "loaders": loaders}
        (asked.out / f"{case.name}.json").write_text(json.dumps(reported))


def list_of(batches: Any) -> list[dict[str, bytes]]:
    """Return the tensors of batches as bytes."""
    return [{name: as_bytes(tensor).tobytes() for name, tensor in flat(batch).items()} for batch in batches]


def check_cases(run: Run, module: ModuleType, cases: list[Any], folder: Path, count: int) -> None:
    """Compare cases, all of them in one store."""
    from conformance.trainers import make_source, make_videos

    sizes = (module.RESOLUTION // 2, 2 * module.RESOLUTION)
    own_root, live_root, store, names = folder / "own", folder / "live", folder / "store", [case.name for case in cases]
    for case in cases:
        if case.videos:
            make_videos(own_root / case.name / "data", count, sizes)
        else:
            lines = not (case.masks or case.controls)
            make_source(own_root / case.name / "data", count, masks=case.masks, controls=case.controls, sizes=sizes, lines=lines)
    shutil.copytree(own_root, live_root)
    own = run.step(names, own_root)
    first = run.step(names, live_root, store=store)
    for name in names:
        if own[name].code or first[name].code:
            run.say(f"{name}: its own files, and live", False, own[name].text[-1500:] * bool(own[name].code) + first[name].text[-2500:])
            return
        unequal, there = differing(own[name], first[name]), cache_files(module, live_root / name)
        is_same = not unequal and not there and own[name].encoded == first[name].encoded > 0
        figures = f"{len(own[name].values)} tensors, {own[name].encoded} and {first[name].encoded} encodings, {len(there)} cache files"
        run.say(f"{name}: live as its own", is_same, figures + str(unequal[:3] or ""))
    print(f"         first start: {first[names[0]].line}")
    second = run.step(names, live_root, "--loaders", store=store)
    third = run.step(names, live_root, store=store)
    for name in names:
        methods = ", ".join(f"{method or 'no workers'}" for method, _workers in module.LOADERS[: None if name == names[0] else 2])
        losses = [seen[name].losses for seen in (own, first, second, third)]
        is_same = all(one == losses[0] for one in losses) and len(losses[0]) > 0 and not second[name].code
        figures = f"{second[name].encoded} encodings, {len(losses[0])} losses {'equal' if is_same else 'differ'}"
        run.say(
            f"{name}: second start",
            is_same and second[name].encoded == third[name].encoded == 0,
            figures + second[name].text[-800:] * (not is_same),
        )
        run.say(f"{name}: loaders with {methods}", not second[name].loaders, ", ".join(second[name].loaders))
    print(f"         second start: {second[names[0]].line}")
    check_store(run, store)
    for case in [case for case in cases if not case.videos][:1]:
        check_edits(run, module, case.name, folder)


def check_edits(run: Run, module: ModuleType, name: str, folder: Path) -> None:
    """Change a caption and a picture of both, and compare what is encoded."""
    for what, change in (("caption", _edit_caption), ("picture", _edit_picture)):
        seen = []
        for where, store in ((folder / "own", None), (folder / "live", folder / "store")):
            change(where / name / "data")
            seen.append(run.step([name], where, *module.EDITED, store=store)[name])
        unequal = differing(*seen)
        figures = f"{seen[0].encoded} and {seen[1].encoded} encodings; {seen[1].line}{unequal[:3] or ''}"
        run.say(f"{name}: one {what} edited, by the trainer's own rules", not unequal and seen[0].encoded == seen[1].encoded, figures)


def _edit_caption(data: Path) -> None:
    next(iter(sorted(data.glob("*.txt")))).write_text("another caption")


def _edit_picture(data: Path) -> None:
    from PIL import Image

    path = sorted(data.glob("*.png"))[1]
    with Image.open(path) as picture:
        picture.rotate(180).save(path)


def check_store(run: Run, store: Path) -> None:
    """Run commands on the store."""
    other = store.parent / "pushed"
    commands = (
        ("ls", ["ls", str(store)]),
        ("ls --samples", ["ls", str(store), "--samples", "--name", _name_in(store)]),
        ("status", ["status", str(store)]),
        ("verify", ["verify", str(store)]),
        ("gc", ["gc", str(store)]),
        ("push", ["push", str(store), f"file://{other}", "--name", _name_in(store)]),
    )
    for name, command in commands:
        done = subprocess.run([sys.executable, "-m", "cachestore", *command], capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        run.say(
            name, done.returncode == 0, (f"{len(lines)} lines, " + lines[-1][:110]) if not done.returncode and lines else done.stderr[-600:]
        )


def _name_in(store: Path) -> str:
    import cachestore as cs

    with cs.open(store) as opened:
        return opened.names()[0]


FILE_CALLS = """
    open stat lstat getsize getmtime getctime samefile exists isfile isdir islink access lexists is_file is_dir listdir scandir walk glob
    iglob rglob iterdir touch remove unlink rmdir rename move copy copy2 copyfile copytree rmtree link symlink load save savez memmap
    fromfile tofile read_bytes write_bytes read_text write_text load_file save_file safe_open mem_eff_save_file MemoryEfficientSafeOpen
    load_safetensors load_split_weights find_keys find_key mkdir Cache
"""
"""Functions and methods that look for, read, list or change a file, by the last part of their names."""


def check_scan(run: Run, module: ModuleType) -> None:
    """Read all of the checkout, and name each call that does something to a cache file's path past the adapter."""
    calls, past, known = 0, list[str](), set(FILE_CALLS.split())
    for path in sorted({path for pattern in module.SCANNED for path in run.checkout.glob(pattern)}):
        name = path.relative_to(run.checkout).as_posix()
        try:
            tree = ast.parse(path.read_text())
        except SyntaxError as error:
            print(f"         scan: {name} cannot be read: {str(error.msg)[:60]}")
            continue
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and name not in module.LEFT_OUT):
            function = ast.unparse(node.func)
            receiver, _dot, last = function.rpartition(".")
            values = [ast.unparse(one) for one in (*node.args, *(keyword.value for keyword in node.keywords))]
            if last in known and (last == "Cache" or any(re.search(module.CACHE_PATH, one) for one in (*values, receiver))):
                calls += 1
                if function not in module.REPLACED:
                    past.append(f"{name}:{node.lineno} {ast.unparse(node)[:80]}")
    run.say(f"scan: {calls} calls with the path of a cache file, all replaced", calls > 0 and not past, "; ".join(past))


def check_refusals(run: Run, module: ModuleType, folder: Path, count: int) -> None:
    """Change a copy of the checkout, and see that it is refused by name before anything is encoded."""
    from conformance.trainers import make_source

    case = module.CASES[0]
    make_source(
        folder / case.name / "data", count, masks=False, controls=False, sizes=(module.RESOLUTION // 2, 2 * module.RESOLUTION), lines=False
    )
    for what, file, pattern, new, words in module.CHANGES:
        copy = folder / "checkout"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run.checkout, copy, ignore=shutil.ignore_patterns(".git", "docs", "assets", "ui"))
        text = (copy / file).read_text()
        changed = re.sub(pattern, new, text, flags=re.MULTILINE)
        if changed == text:
            run.say(f"checkout in which {what}", False, "the change is not in this checkout")
            continue
        (copy / file).write_text(changed)
        seen = run.step([case.name], folder, store=folder / "store", checkout=copy)[case.name]
        reported = next((line for line in seen.text.splitlines() if "cachestore.live: error" in line), seen.text[-300:])
        is_good = seen.code == 2 and all(word in reported for word in words) and not cache_files(module, folder / case.name)
        run.say(f"checkout in which {what}", is_good, f"exit code {seen.code}, {reported.removeprefix('cachestore.live: error: ')[:200]}")


def main() -> int:
    """Run the cases of a trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the trainer")
    parser.add_argument("--case", action="append", help="run only this case")
    parser.add_argument("--pictures", type=int, default=12, help="how many pictures")
    parser.add_argument("--only", choices=("cases", "scan", "refusals", "more"), help="run only these")
    parser.add_argument("--step", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loaders", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.step:
        one_step(asked)
        return 0
    from conformance.trainers_code import commit_of

    module = importlib.import_module(f"conformance.{TRAINERS[asked.trainer]}")
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(asked.trainer, asked.checkout.resolve(), Path(temporary), asked.pictures)
        print(f"{asked.trainer} {commit_of(asked.checkout)}")
        if asked.only in {None, "cases"}:
            cases = [case for case in module.CASES if not asked.case or case.name in asked.case]
            check_cases(run, module, cases, Path(temporary, "cases"), asked.pictures)
        if asked.only in {None, "scan"}:
            check_scan(run, module)
        if asked.only in {None, "refusals"}:
            check_refusals(run, module, Path(temporary, "refusals"), 2)
        if asked.only in {None, "more"} and hasattr(module, "check_more"):
            module.check_more(run, Path(temporary, "more"))
    print(f"{len(run.problems)} problems")
    return int(bool(run.problems))


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "__mp_main__" and "--step" in sys.argv:  # in a worker that was started by spawn or forkserver
    use_trainer(sys.argv[1], Path(sys.argv[3]))
