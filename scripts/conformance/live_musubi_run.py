"""Runs the real scripts of musubi-tuner for Wan 2.1, caching and training, with its cache in a store, and compares with its own files.

Usage: python scripts/conformance/live_musubi_run.py CHECKOUT [--work FOLDER] [--packages FOLDER ...]

Models are tiny and random: a copy of the checkout has smaller numbers in it, and nothing else is changed. `--packages` are folders that go
on PYTHONPATH: the versions that the trainer's pyproject.toml asks for, and torchvision (`pip install --no-deps --target`). Caching runs by
`python -m cachestore.live`, training by `cachestore live -- accelerate launch`. Prints what it saw, and exits 1 at the first difference.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import numpy as np
import torch
from conformance import live_sd_scripts_models as models
from PIL import Image
from safetensors.torch import load_file

import cachestore as cs

_MODULES = "src/musubi_tuner/wan/modules"
SIZES = {
    f"{_MODULES}/t5.py": [
        (r"vocab_size=256384", "vocab_size=300"),
        (r"dim=4096", "dim=32"),
        (r"dim_attn=4096", "dim_attn=32"),
        (r"dim_ffn=10240", "dim_ffn=64"),
        (r"num_heads=64", "num_heads=2"),
        (r"encoder_layers=24", "encoder_layers=2"),
    ],
    f"{_MODULES}/vae.py": [(r"dim=96", "dim=8")],
    f"{_MODULES}/model.py": [(r"text_dim=4096", "text_dim=32")],
    "src/musubi_tuner/wan/configs/wan_t2v_1_3B.py": [
        (r"dim = 1536", "dim = 48"),
        (r"ffn_dim = 8960", "ffn_dim = 64"),
        (r"num_heads = 12", "num_heads = 2"),
        (r"num_layers = 30", "num_layers = 2"),
    ],
}
PICTURES, STEPS = 8, 4


class Differs(Exception):
    """Something is not as it must be."""


@dataclass
class Seen:
    """What one start did: caching latents, caching text, training."""

    losses: list[str]
    batches: list[Any]
    latents: int
    """How many were encoded."""
    text: int
    lines: list[str]
    """What we say at the end of each script."""

    def encoded(self) -> tuple[int, int]:
        """Return how many latents and texts were encoded."""
        return self.latents, self.text


@dataclass
class Bench:
    """A folder with everything that runs need."""

    work: Path
    packages: Sequence[str]
    number: int = 0

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of a run."""
        path = os.pathsep.join([*self.packages, str(self.work / "checkout" / "src"), str(HERE.parents[1])])
        fixed = {"PYTHONPATH": path, "HF_HOME": str(self.work / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return os.environ | fixed | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "ACCELERATE_USE_CPU": "true"} | more

    def prepare(self, checkout: Path) -> None:
        """Make the copy of the checkout, models, tokenizers and pictures."""
        models.shrink(checkout, self.work / "checkout", SIZES)
        for name, seed in (("models", "0"), ("models2", "1")):
            make = [sys.executable, str(HERE / "live_musubi_watch.py"), "--models", str(self.work / name), seed]
            subprocess.run(make, env=self.environment(), check=True)
        make = [sys.executable, "-c", "import sys; from live_sd_scripts_models import *; make_tokenizers(Path(sys.argv[1]))"]
        subprocess.run([*make, str(self.work / "tokenizers")], env=self.environment(), cwd=HERE, check=True)
        hub = self.work / "hub" / "hub" / "models--Wan-AI--Wan2.1-T2V-14B"
        shutil.copytree(self.work / "tokenizers" / "google_t5-v1_1-xxl", hub / "snapshots" / "0" / "google" / "umt5-xxl")
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text("0")
        models.make_pictures(self.work / "pictures", PICTURES)

    def data(self, name: str) -> Path:
        """Return the configuration of a new data set with pictures."""
        folder = self.work / "data" / name
        shutil.copytree(self.work / "pictures", folder / "pictures")
        general = '[general]\nresolution = [128, 128]\ncaption_extension = ".txt"\nbatch_size = 1\nenable_bucket = true\n'
        dataset = f'[[datasets]]\nimage_directory = "{folder}/pictures"\ncache_directory = "{folder}/cache"\n'
        (folder / "cats.toml").write_text(general + dataset)
        return folder / "cats.toml"

    def command(self, config: Path, what: str, of: Path, *extra: str) -> list[str]:
        """Return the words of a script: latents, text or train."""
        scripts = {"latents": "wan_cache_latents.py", "text": "wan_cache_text_encoder_outputs.py", "train": "wan_train_network.py"}
        script = [str(HERE / "live_musubi_watch.py"), str(self.work / "checkout" / scripts[what]), "--dataset_config", str(config)]
        if what != "train":
            models_of = {"latents": ["--vae", str(of / "vae.safetensors")], "text": ["--t5", str(of / "t5.safetensors")]}[what]
            return [*script, *models_of, "--batch_size", "1", *extra]
        options: Mapping[str, Any] = {
            "dit": of / "dit.safetensors",
            "task": "t2v-1.3B",
            "mixed_precision": "no",
            "network_module": "networks.lora_wan",
            "network_dim": 2,
            "optimizer_type": "AdamW",
            "learning_rate": "1e-3",
            "max_train_steps": STEPS,
            "seed": 7,
            "max_data_loader_n_workers": 2,
            "output_dir": self.work / "out" / str(self.number),
            "output_name": "x",
        }
        return [*script, *(f"--{name}={value}" for name, value in options.items()), "--sdpa", "--persistent_data_loader_workers"]

    def begin(
        self, config: Path, what: str, store: Path | None, *extra: str, models_of: str = "models", **watch: str
    ) -> "subprocess.Popen[str]":
        """Start a script: with its own cache if `store` is None."""
        self.number += 1
        out = self.work / "out" / str(self.number)
        out.mkdir(parents=True)
        words = self.command(config, what, self.work / models_of, *extra)
        front = [] if store is None else ["-m", "cachestore.live", "musubi", "--store", str(store)]
        command = [sys.executable, *front, *words]
        if what == "train":
            launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
            written = [] if store is None else [sys.executable, "-m", "cachestore", "live", "musubi", "--store", str(store), "--"]
            command = [*written, sys.executable, *launch, "--dynamo_backend=no", *words]
        environment = self.environment(WATCH=str(out), **watch)
        folder = self.work / "checkout"
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, config: Path, what: str, store: Path | None, *extra: str, **how: Any) -> tuple[Mapping[str, Any], str]:
        """Run a script to its end, and return what was seen and our line."""
        process = self.begin(config, what, store, *extra, **how)
        out, log = self.work / "out" / str(self.number), process.communicate()[0]
        if process.returncode:
            raise Differs(f"{what}: exit code {process.returncode}:\n" + "\n".join(log.splitlines()[-30:]))
        found = [line for line in log.splitlines() if line.startswith("cachestore.live: ")]
        return json.loads((out / "seen-0.json").read_text()), found[-1].removeprefix("cachestore.live: ") if found else ""

    def start(self, config: Path, store: Path | None, *extra: str, **how: Any) -> Seen:
        """Cache latents and text, and train."""
        latents, first = self.run(config, "latents", store, *extra, **how)
        text, second = self.run(config, "text", store, *extra, **how)
        trained, third = self.run(config, "train", store)
        there = list((config.parent / "cache").rglob("*.safetensors"))
        if store is not None and there:
            raise Differs(f"cache files on the disk: {there[:2]}")
        encoded = latents["encoded"]["latents"], text["encoded"]["text"]
        return Seen(trained["losses"], trained["batches"], *encoded, [first, second, third])


def expect(what: str, found: object, wanted: object) -> None:
    """Raise Differs unless both are equal."""
    if found != wanted:
        raise Differs(f"{what}: {found!r:.600}, and not {wanted!r:.600}")


def same_files(config: Path, store: Path) -> int:
    """Compare each tensor of the trainer's own cache files with the store's; return how many."""
    count = 0
    with cs.open(store) as opened:
        files = opened.files("musubi/files")
        found = {Path(path).name: path for path in opened.dataset("musubi/files").ids}
        own = {path.name: load_file(path) for path in (config.parent / "cache").glob("*.safetensors")}
        expect("names of files", sorted(found), sorted(own))
        for name, theirs in own.items():
            ours = files.load(found[name])
            expect(f"tensors of {name}", sorted(ours), sorted(theirs))
            for part, tensor in theirs.items():
                expect(f"{part} of {name}", ours[part].dtype, tensor.dtype)
                expect(f"{part} of {name} is equal", torch.equal(ours[part], tensor), True)
                count += 1
    return count


SKIP = "--skip_existing"


def case_bits(bench: Bench) -> str:
    """First and second start against its own."""
    theirs, ours, store = bench.data("own"), bench.data("live"), bench.work / "store"
    own, again = bench.start(theirs, None, SKIP), bench.start(theirs, None, SKIP)
    first, second = bench.start(ours, store, SKIP), bench.start(ours, store, SKIP)
    expect("own: encoded", (own.encoded(), again.encoded()), ((PICTURES, PICTURES), (0, 0)))
    expect("live: encoded", (first.encoded(), second.encoded()), ((PICTURES, PICTURES), (0, 0)))
    expect("first start", (first.losses, first.batches), (own.losses, own.batches))
    expect("second start", (second.losses, second.batches), (again.losses, again.batches))
    expect("number of losses", len(second.losses), STEPS)
    count = same_files(theirs, store)
    losses = ", ".join(f"{float.fromhex(one):.4f}" for one in second.losses)
    return f"{count} tensors equal to its files; second start: 0 encodes, 0 cache files, {STEPS} losses equal ({losses}); {second.lines}"


def case_changes(bench: Bench) -> str:
    """What each change makes both encode: the trainer's own rules, which look at names alone."""
    both, reported = [(bench.data("changes-own"), None), (bench.data("changes-live"), bench.work / "store-changes")], list[str]()
    for config, store in both:
        bench.start(config, store, SKIP)

    def after(what: str, latents: int, text: int, *extra: str, **how: Any) -> None:
        own, ours = (bench.start(config, store, *extra, **how) for config, store in both)
        expect(f"encoded after {what}", (own.encoded(), ours.encoded()), ((latents, text),) * 2)
        expect(f"trained after {what}", (ours.losses, ours.batches), (own.losses, own.batches))
        reported.append(f"{what}: {latents} + {text}")

    for config, store in both:
        (config.parent / "pictures" / "picture_003.txt").write_text("another caption")
        remove(config, store, "picture_003_wan_te.safetensors")
    after("one caption, and its file removed", 0, 1, SKIP)
    for config, store in both:
        make_picture(config.parent / "pictures" / "picture_006.png", (140, 130), 9)
        remove(config, store, "picture_006_0140x0130_wan.safetensors")
    after("one picture, and its file removed", 1, 0, SKIP)
    for config, _store in both:
        make_picture(config.parent / "pictures" / "picture_006.png", (130, 150), 9)
    after("one picture of another size", 1, 0, SKIP)
    for config, _store in both:
        (config.parent / "pictures" / "picture_004.txt").write_text("yet another caption")
        make_picture(config.parent / "pictures" / "picture_005.png", (70, 200), 10)
    after(f"a caption and a picture with {SKIP}", 0, 0, SKIP)
    after("the same without", PICTURES, PICTURES)
    after(f"another VAE and T5 with {SKIP}", 0, 0, SKIP, models_of="models2")
    after("the same without", PICTURES, PICTURES, models_of="models2")
    for config, store in both:
        made = bench.run(config, "latents", store, "--vae_dtype=float32", models_of="models2")[0]
        expect("encoded in another precision", made["encoded"]["latents"], PICTURES)
    after("another precision of the VAE", 0, 0, SKIP)
    return f"latents + text encoded by both, trained alike, after {'; '.join(reported)}"


def make_picture(path: Path, size: tuple[int, int], seed: int) -> None:
    """Make a picture of a width and a height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)


def remove(config: Path, store: Path | None, name: str) -> None:
    """Remove a cache file, as a user would."""
    path = config.parent / "cache" / name
    if store is None:
        path.unlink()
    else:
        subprocess.run([sys.executable, "-m", "cachestore", "forget", str(store), str(path)], check=True, stdout=subprocess.DEVNULL)


def case_killed(bench: Bench) -> str:
    """Four processes cache at once, as its ranks would, and one is killed while it does: nothing is torn, and all is there."""
    config, store, reported = bench.data("killed"), bench.work / "store-killed", list[str]()
    for what in ("latents", "text"):
        kills = [{}, {}, {}, {"WATCH_KILL": what}]
        processes = [bench.begin(config, what, store, **kill) for kill in kills]
        logs = [process.communicate(timeout=400)[0] for process in processes]
        codes = [process.returncode for process in processes]
        if codes[:3] != [0, 0, 0]:
            raise Differs(f"exit codes {codes}:\n" + "\n".join(logs[0].splitlines()[-30:]))
        expect("exit code of the fourth", codes[3], -signal.SIGKILL)
        with cs.open(store) as opened:
            there = [path for path in opened.dataset("musubi/files").ids if path.endswith("_te.safetensors") == (what == "text")]
            reported.append(f"{what}: {sum(bool(opened.files('musubi/files').load(path)) for path in there)} of {PICTURES} there")
            expect(f"{what} after the kill", len(there), PICTURES)
    verify = subprocess.run([sys.executable, "-m", "cachestore", "verify", str(store)], capture_output=True, text=True, check=False)
    expect("verify", verify.returncode, 0)
    again = bench.start(config, store, SKIP)
    expect("encoded by the next start", again.encoded(), (0, 0))
    expect("losses", len(again.losses), STEPS)
    return f"one of 4 killed while it caches: {'; '.join(reported)}, 0 torn; next start: 0 encodes, {STEPS} losses"


CASES: dict[str, Callable[[Bench], str]] = {"bits": case_bits, "changes": case_changes, "killed": case_killed}


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--work", type=Path, default=Path("live-musubi"))
    parser.add_argument("--packages", nargs="*", default=[], type=os.path.abspath)
    parser.add_argument("--only", nargs="*", choices=sorted(CASES))
    chosen = parser.parse_args()
    bench = Bench(chosen.work.resolve(), chosen.packages)
    bench.prepare(chosen.checkout)
    for name, case in ((name, CASES[name]) for name in CASES if not chosen.only or name in chosen.only):
        begun = time.monotonic()
        try:
            reported = case(bench)
        except Differs as error:
            print(f"{name:8} DIFFERS {error}", flush=True)
            return 1
        print(f"{name:8} ok      {reported} [{time.monotonic() - begun:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
