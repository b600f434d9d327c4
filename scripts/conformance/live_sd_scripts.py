"""Runs the real training scripts of kohya's sd-scripts with their cache in a store, and compares with their own cache, to the bit.

Usage: python scripts/conformance/live_sd_scripts.py CHECKOUT [--work FOLDER] [--packages FOLDER ...] [--only WORD ...]

Models are tiny and random: a copy of the checkout has smaller numbers in it, and nothing else is changed. `--packages` are folders that go
on PYTHONPATH: the versions that the trainer's requirements.txt asks for (`pip install --no-deps --target`), and stand-ins for what is not
installed. Prints what it saw, and exits 1 at the first difference.
"""

import argparse
import json
import multiprocessing.process
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from conformance import live_sd_scripts_models as models

import cachestore as cs

SCRIPTS = {"flux": "flux_train_network.py", "sdxl": "sdxl_train_network.py"}
PICTURES = 8
STEPS = 4
_SECONDS = 400
"""How long a run may take."""


class Differs(Exception):
    """Something is not as it must be."""


@dataclass
class Seen:
    """What one run did."""

    code: int
    line: str
    seen: list[Mapping[str, Any]]
    """By rank: losses, digests of what was trained on, and what was encoded."""
    log: str
    seconds: float

    def counts(self) -> dict[str, tuple[int, int]]:
        """By part: values reused and encoded, as the last line says."""
        return {part: (int(one), int(two)) for part, one, two in re.findall(r"(\w+): (\d+) reused, (\d+) encoded", self.line)}

    def encoded(self) -> dict[str, int]:
        """By class of encoder: how much all ranks encoded."""
        kinds = {kind for one in self.seen for kind in one["encoded"]}
        return {kind: sum(one["encoded"].get(kind, 0) for one in self.seen) for kind in sorted(kinds)}

    def trained(self) -> list[Any]:
        """What must be equal to the bit: losses and what was trained on."""
        return [[one["losses"], one["latents"], one["text"]] for one in self.seen]


@dataclass
class Bench:
    """A folder with everything that runs need."""

    work: Path
    packages: Sequence[str]
    accelerate: bool = True
    """Whether the first case runs by `accelerate launch`. The others fork from a process that has the big packages imported."""
    python: str = sys.executable
    number: int = 0
    checkout: Path = field(default_factory=Path)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of a run."""
        path = os.pathsep.join([*self.packages, str(HERE.parents[1])])
        fixed = {
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return {**os.environ, **fixed, **more}

    def data(self, name: str, like: str | None = None) -> Path:
        """Return a new folder of pictures, without a cache."""
        folder = self.work / "data" / name
        if like is None:
            models.make_pictures(folder / "1_thing", PICTURES)
        else:
            shutil.copytree(self.work / "data" / like, folder, ignore=shutil.ignore_patterns("*.npz"))
        return folder

    def arguments(
        self, family: str, data: Path | None, out: Path, *, weights: str = "models", precision: str = "no", tokens: int = 32
    ) -> list[str]:
        """Return the arguments of a script."""
        of = self.work / weights
        made = {
            **({} if data is None else {"train_data_dir": data, "caption_extension": ".txt", "resolution": "128,128"}),
            "min_bucket_reso": 64,
            "max_bucket_reso": 192,
            "bucket_reso_steps": 64,
            "output_dir": out,
            "output_name": "x",
            "tokenizer_cache_dir": self.work / "tokenizers",
            "max_train_steps": STEPS,
            "train_batch_size": 1,
            "vae_batch_size": 1,
            "seed": 7,
            "network_dim": 2,
            "learning_rate": "1e-3",
            "optimizer_type": "AdamW",
            "lr_scheduler": "constant",
            "save_model_as": "safetensors",
            "mixed_precision": precision,
        }
        if family == "flux":
            made |= {
                "pretrained_model_name_or_path": of / "flux.safetensors",
                "clip_l": of / "clip_l.safetensors",
                "ae": of / "ae.safetensors",
            }
            made |= {"t5xxl": of / "t5xxl.safetensors", "network_module": "networks.lora_flux", "t5xxl_max_token_length": tokens}
            made |= {"guidance_scale": 1, "timestep_sampling": "shift", "text_encoder_batch_size": 1}
        else:
            made |= {"pretrained_model_name_or_path": of / "sdxl.safetensors", "network_module": "networks.lora"}
        flags = ["enable_bucket", "no_metadata", "network_train_unet_only", "cache_text_encoder_outputs", "cache_latents", "sdpa"]
        return [f"--{name}={value}" for name, value in made.items()] + [f"--{name}" for name in flags]

    def run(
        self,
        family: str,
        data: Path | None,
        store: Path | None,
        *extra: str,
        ranks: int = 1,
        workers: int = 0,
        start: str = "",
        checkout: Path | None = None,
        launcher: str = "",
        kill: str = "",
        in_memory: bool = False,
        variables: Mapping[str, str] = {},
        **how: Any,
    ) -> Seen:
        """Run a script, with its own cache if `store` is None: by accelerate, by torchrun, or forked from here."""
        self.number += 1
        out = self.work / "out" / str(self.number)
        out.mkdir(parents=True)
        folder = checkout or self.checkout
        script = [str(HERE / "live_sd_scripts_watch.py"), str(folder / SCRIPTS[family]), *self.arguments(family, data, out, **how), *extra]
        script += [f"--max_data_loader_n_workers={workers}"]
        script += [] if in_memory else ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
        front = [] if store is None else ["-m", "cachestore.live", "sd-scripts", "--store", str(store), "--name", f"sd-scripts/{family}"]
        watch = {"WATCH": str(out), "WATCH_START": start, "WATCH_KILL": kill, "ACCELERATE_USE_CPU": "true", **variables}
        begun = time.monotonic()
        if launcher:
            launch = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1", f"--nproc_per_node={ranks}"]
            watch |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else gloo's ranks look for those of before a restart, whatever they run
            if launcher == "accelerate":
                launch = ["-m", "accelerate.commands.launch", "--num_machines=1", "--dynamo_backend=no", f"--num_processes={ranks}"]
                launch += [f"--mixed_precision={how.get('precision', 'no')}", f"--main_process_port={free_port()}"]
                launch += ["--cpu"] if ranks == 1 else ["--multi_gpu"]  # torch's launcher, and its ranks are on CPUs
            with (out / "log-0").open("w") as log:
                command = [self.python, *launch, *front, *script]
                codes = [subprocess.call(command, cwd=folder, env=self.environment(**watch), stdout=log, stderr=log, timeout=_SECONDS)]
        else:
            watch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            watch |= {"ACCELERATE_MIXED_PRECISION": str(how.get("precision", "no"))}
            of = [watch | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else watch for rank in range(ranks)]
            started = [forked([*front, *script], self.environment(**one), folder, out / f"log-{n}") for n, one in enumerate(of)]
            codes = ended_within(started, _SECONDS)
        log = (out / "log-0").read_text(errors="replace")
        line = next((line for line in reversed(log.splitlines()) if line.startswith("cachestore.live: ")), "")
        seen = [json.loads(path.read_text()) for path in sorted(out.glob("seen-*.json"))]
        return Seen(codes[0], line, seen, log, time.monotonic() - begun)


def ended_within(started: Sequence[int], seconds: float) -> list[int]:
    """Wait for processes, and return their exit codes. Raises Differs if one still runs then."""
    codes, deadline = dict[int, int](), time.monotonic() + seconds
    while len(codes) < len(started):
        for pid in [pid for pid in started if pid not in codes]:
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in [pid for pid in started if pid not in codes]:
                os.kill(pid, signal.SIGKILL)
            raise Differs(f"{len(started) - len(codes)} of {len(started)} processes still run after {seconds:.0f} s")
        time.sleep(0.05)
    return [codes[pid] for pid in started]


def forked(arguments: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> int:
    """Start what `python ARGUMENTS` would, in a process that has the big packages imported already. Returns its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        processes: Any = multiprocessing.process
        processes.ORIGINAL_DIR = str(folder)  # where workers that are spawned begin
        sys.path.insert(0, str(Path(arguments[0]).parent))  # Python puts a folder there, which is replaced
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            from cachestore.live.front import main as front

            code = front(arguments[2:])
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the log has it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm_up(packages: Sequence[str]) -> None:
    """Import what the trainer needs of other packages, once."""
    sys.path[:0] = packages
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"})
    import accelerate
    import cv2
    import diffusers
    import torch
    import transformers

    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    _ = [getattr(transformers, name) for name in ("CLIPTextModel", "T5EncoderModel", "Gemma2Model", "Qwen2_5_VLForConditionalGeneration")]
    _ = [getattr(diffusers, name) for name in ("AutoencoderKL", "StableDiffusionPipeline", "DDPMScheduler", "UNet2DConditionModel")]
    _ = accelerate.Accelerator, transformers.CLIPTokenizer, transformers.T5TokenizerFast


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def expect(what: str, found: object, wanted: object) -> None:
    """Raise Differs unless both are equal."""
    if found != wanted:
        raise Differs(f"{what}: {found!r:.600}, and not {wanted!r:.600}")


def no_cache_files(data: Path) -> None:
    """Raise Differs if the trainer wrote a cache file."""
    expect("cache files", sorted(str(path) for path in data.rglob("*.npz")), [])


def ended(run: Seen) -> Seen:
    """Return a run that ended well."""
    if run.code:
        raise Differs(f"exit code {run.code}:\n" + "\n".join(run.log.splitlines()[-30:]))
    return run


def same_values(data: Path, store: Path, family: str) -> int:
    """Compare each array of the trainer's npz with the store's; return how many."""
    count = 0
    with cs.open(store) as opened:
        for part, ending in (("latents", f"_{family}.npz"), ("text", {"flux": "_flux_te.npz", "sdxl": "_te_outputs.npz"}[family])):
            rows = opened.dataset(f"sd-scripts/{family}/{part}")
            for name in rows.ids:
                stem = Path(name).with_suffix("").name
                [path] = [one for one in data.rglob(f"{stem}*{ending}") if ("_te" in one.name) == (part == "text")]
                value = rows[name]["value"]
                [key] = value if isinstance(value, list) else [value]
                ours, theirs = opened.get(key, as_numpy=True), np.load(path)
                expect(f"names of {path.name}", sorted(ours), sorted(theirs.files))
                for array in theirs.files:
                    one, two = ours[array], theirs[array]
                    expect(
                        f"{array} of {path.name}", (str(one.dtype), one.shape, one.tobytes()), (str(two.dtype), two.shape, two.tobytes())
                    )
                    count += 1
    return count


# ---------------------------------------------------------------------------------------------------------------- cases


def case_bits(bench: Bench, family: str) -> str:
    """First and second start against the trainer's own."""
    theirs, ours, store = bench.data(f"own-{family}"), bench.data(f"live-{family}"), bench.work / f"store-{family}"
    how: dict[str, Any] = {"launcher": "accelerate" if bench.accelerate else ""}
    own = [ended(bench.run(family, theirs, None, **how)) for _ in range(2)]
    first, second = ended(bench.run(family, ours, store, **how)), ended(bench.run(family, ours, store, **how))
    expect("first start", first.trained(), own[0].trained())
    expect("encoded by the first start", first.encoded(), own[0].encoded())
    expect("second start", second.trained(), own[1].trained())
    expect("encoded by the second start", second.encoded(), {})
    expect("counts", second.counts(), {"latents": (PICTURES, 0), "text": (PICTURES, 0)})
    no_cache_files(ours)
    count = same_values(theirs, store, family)
    losses = ", ".join(f"{float.fromhex(one):.4f}" for one in second.seen[0]["losses"][:STEPS])
    return f"{count} arrays equal to its npz; second start: 0 encodes, 0 cache files, {STEPS} losses equal ({losses})"


def case_changes(bench: Bench, family: str) -> str:
    """What a change makes encode again, alone."""
    data, store = bench.data(f"changes-{family}", like=f"live-{family}"), bench.work / f"store-{family}"
    reported = []

    def after(what: str, latents: int, text: int, *extra: str, **how: Any) -> None:
        run = ended(bench.run(family, data, store, *extra, **how))
        expect(f"encoded after {what}", {part: made for part, (_, made) in run.counts().items()}, {"latents": latents, "text": text})
        reported.append(f"{what}: {latents} + {text}")

    after("nothing", 0, 0)
    (data / "1_thing" / "picture_003.txt").write_text("another caption\n")
    after("one caption", 0, 1)
    shutil.copy(data / "1_thing" / "picture_000.png", data / "1_thing" / "picture_006.png")
    noisy = np.random.default_rng(9).integers(0, 256, (130, 140, 3), np.uint8)
    import cv2

    cv2.imwrite(str(data / "1_thing" / "picture_006.png"), noisy)
    after("one picture", 1, 0)
    if family == "flux":
        models_of = bench.work / "mixed"
        shutil.copytree(bench.work / "models", models_of)
        shutil.copy(bench.work / "models2" / "ae.safetensors", models_of / "ae.safetensors")
        after("another VAE", PICTURES, 0, weights="mixed")
        after("token length", 0, PICTURES, tokens=48)
        after("attention mask", 0, PICTURES, "--apply_t5_attn_mask")
    else:
        after("token length", 0, PICTURES, "--max_token_length=150")
        after("weighted captions", 0, PICTURES, "--weighted_captions")
    after("precision", PICTURES, PICTURES, precision="bf16")
    after("resolution", 3, 0, "--resolution=192,192")  # the long pictures stay in their bucket
    after("flips", PICTURES, 0, "--flip_aug")
    after("all as before", 0, 0)
    after("cache in memory alone", 0, 0, in_memory=True)
    no_cache_files(data)
    return "latents + text encoded after: " + "; ".join(reported)


def case_workers(bench: Bench, family: str) -> str:
    """DataLoader's workers, by each way to start them."""
    theirs, data, store = bench.work / "data" / f"own-{family}", bench.work / "data" / f"live-{family}", bench.work / f"store-{family}"
    reported = []
    own = ended(bench.run(family, theirs, None, workers=2, start="fork"))
    for start, extra in product(("fork", "spawn", "forkserver"), ([], ["--persistent_data_loader_workers"])):
        run = ended(bench.run(family, data, store, *extra, workers=2, start=start))
        expect(f"{start}", run.trained(), own.trained())
        expect("encoded", run.encoded(), {})
        reported.append(" ".join([start, *(["persistent"] if extra else [])]))
    return f"losses and batches equal to its own with {', '.join(reported)}"


def case_ranks(bench: Bench, family: str) -> str:
    """Two ranks by each launcher, and one that is killed while torchrun caches: it starts both again."""
    theirs = bench.work / "data" / f"own-{family}"
    own = ended(bench.run(family, theirs, None, ranks=2))
    reported = []
    for launcher, kill in (("", ""), ("accelerate", ""), ("torchrun", ""), ("torchrun", "T5EncoderModel")):
        name = f"{launcher or 'no launcher'}{', rank 1 killed' if kill else ''}"
        data, store = bench.data(f"ranks-{name}-{family}", like=f"live-{family}"), bench.work / f"store-{name}"
        run = ended(bench.run(family, data, store, ranks=2, launcher=launcher, kill=kill))
        expect(name, run.trained(), own.trained())
        again = ended(bench.run(family, data, store, ranks=2, launcher=launcher))
        expect(f"encoded by the second start, {name}", again.encoded(), {})
        no_cache_files(data)
        reported.append(f"{name}: latents {' + '.join(str(one['encoded'].get('AutoEncoder', 0)) for one in run.seen)}")
    return f"losses and batches equal to its own, second start 0 encodes, with {'; '.join(reported)}"


def case_killed(bench: Bench, family: str) -> str:
    """Four ranks, one of which is killed while it makes latents, and one while it makes text: the others finish all."""
    theirs = bench.work / "data" / f"own-{family}"
    own, reported = ended(bench.run(family, theirs, None, ranks=4)), []
    for kind, parts in (("AutoEncoder", ["latents"]), ("T5EncoderModel", ["latents", "text"])):
        data, store = bench.data(f"killed-{kind}-{family}", like=f"live-{family}"), bench.work / f"store-killed-{kind}"
        killed = bench.run(family, data, store, ranks=4, kill=kind)
        expect(f"ranks that were killed in {kind}", 4 - len(killed.seen), 1)
        with cs.open(store) as opened:
            for part in parts:
                rows = opened.dataset(f"sd-scripts/{family}/{part}")
                keys = [rows[name]["value"] for name in rows.ids]
                expect(f"{part} after the kill in {kind}", sum(not isinstance(key, list) and key in opened for key in keys), PICTURES)
        verify = subprocess.run([bench.python, "-m", "cachestore", "verify", str(store)], capture_output=True, text=True, check=False)
        expect("verify", verify.returncode, 0)
        after = ended(bench.run(family, data, store, ranks=4))
        expect(f"after the kill in {kind}", after.trained(), own.trained())
        made = {part: made for part, (_, made) in after.counts().items()}
        expect("encoded after the kill", made, {"latents": 0, "text": 0 if "text" in parts else PICTURES})
        again = ended(bench.run(family, data, store, ranks=4))
        expect("encoded by the start after that", again.encoded(), {})
        no_cache_files(data)
        reported.append(f"in {kind}: {PICTURES} of {PICTURES} {' and '.join(parts)} there, 0 torn, then encoded {made}, then nothing")
    return f"rank 1 of 4 killed {'; '.join(reported)}"


def case_tokenizers(bench: Bench, family: str) -> str:
    """Encoded and trained in one process with parallel tokenizers, and workers by each way to start them: none hangs."""
    theirs, reported = bench.work / "data" / f"own-{family}", []
    how: dict[str, Any] = {"workers": 2, "variables": {"TOKENIZERS_PARALLELISM": "true"}}
    own = ended(bench.run(family, theirs, None, workers=2, start="fork"))
    for start in ("fork", "spawn", "forkserver"):
        for extra in ([], ["--persistent_data_loader_workers"]):
            data, store = bench.data(f"{start}-{len(extra)}", like=f"live-{family}"), bench.work / f"store-{start}-{len(extra)}"
            run = ended(bench.run(family, data, store, "--text_encoder_batch_size=4", *extra, start=start, **how))
            expect(f"{start} latents", [one["latents"] for one in run.seen], [one["latents"] for one in own.seen])
            expect(f"{start} encoded", run.counts(), {"latents": (0, PICTURES), "text": (0, PICTURES)})
            reported.append(f"{' '.join([start, *(['persistent'] if extra else [])])} {run.seconds:.0f} s")
    return f"encoded and trained in one process with TOKENIZERS_PARALLELISM=true, workers by {', '.join(reported)}"


def case_datasets(bench: Bench, family: str) -> str:
    """Two resolutions, flips, masks, repeats, a validation split, metadata of fine-tuning, and a masked data set."""
    data = bench.data(f"sets-{family}", like=f"live-{family}") / "1_thing"
    (bench.work / "masks").mkdir()
    for path in data.glob("*.png"):
        shutil.copy(path, bench.work / "masks" / path.name)
    meta: dict[str, dict[str, Any]] = {str(path): {"caption": f"of {path.stem}", "image_size": None} for path in sorted(data.glob("*.png"))}
    import cv2

    for path, its in meta.items():
        picture = cv2.imread(path)
        if picture is None:
            raise Differs(f"{path} cannot be read")
        height, width = picture.shape[:2]
        its["image_size"] = [width, height]
    (bench.work / "meta.json").write_text(json.dumps(meta))
    shared = "enable_bucket = true\nmin_bucket_reso = 64\nmax_bucket_reso = 256\nbucket_reso_steps = 64\nbatch_size = 1\n"
    folder = f'[[datasets.subsets]]\nimage_dir = "{data}"\ncaption_extension = ".txt"\n'
    first, second = (f"[[datasets]]\nresolution = {size}\n" for size in (128, 192))
    second += f"{shared}{folder}num_repeats = 2\nresize_interpolation = 'lanczos'\n"
    tables = {
        "two resolutions, flips, masks, validation": (
            f"{first}validation_split = 0.25\nvalidation_seed = 3\n{shared}{folder}flip_aug = true\nalpha_mask = true\n{second}",
            ["--validate_every_n_steps=2"],
        ),
        "fine-tuning metadata": (
            f'{first}{shared}[[datasets.subsets]]\nimage_dir = "{data}"\nmetadata_file = "{bench.work}/meta.json"\n',
            [],
        ),
        "masked by conditioning pictures": (
            f'{first}{shared}{folder}conditioning_data_dir = "{bench.work}/masks"\n',
            ["--masked_loss"],
        ),
    }
    reported = []
    for name, (table, extra) in tables.items():
        config = bench.work / f"{name.split()[0]}.toml"
        config.write_text(table)
        for path in data.glob("*.npz"):
            path.unlink()
        run = ended(bench.run(family, None, bench.work / "store-sets", f"--dataset_config={config}", *extra))
        no_cache_files(data)
        again = ended(bench.run(family, None, bench.work / "store-sets", f"--dataset_config={config}", *extra))
        own = ended(bench.run(family, None, None, f"--dataset_config={config}", *extra))
        expect(name, run.trained(), own.trained())
        expect(f"{name} again", [again.trained(), again.encoded()], [own.trained(), {}])
        reported.append(f"{name} ({', '.join(f'{part} {made}' for part, (_, made) in run.counts().items())})")
    return "equal to its own: " + "; ".join(reported)


def case_refused(bench: Bench, family: str) -> str:
    """Checkouts that do not fit."""
    data = bench.work / "data" / f"live-{family}"
    changes: list[tuple[str, str, Callable[[str], str], str]] = [
        (
            "renamed",
            "library/train_util.py",
            lambda text: text.replace("new_cache_latents", "cache_latents_v3"),
            ".new_cache_latents",
        ),
        (
            "transposed latents",
            "library/strategy_base.py",
            lambda text: text.replace("return latents, original_size", "return latents.swapaxes(1, 2), original_size"),
            "the reader of FluxLatentsCachingStrategy",
        ),
        (
            "transposed text",
            "library/strategy_flux.py",
            lambda text: text.replace('t5_out = data["t5_out"]', 't5_out = data["t5_out"].T'),
            "the reader of FluxTextEncoderOutputsCachingStrategy",
        ),
        (
            "unknown field",
            "library/strategy_flux.py",
            lambda text: text.replace("self.warn_fp8_weights = False", "self.warn_fp8_weights = False; self.hook = lambda x: x"),
            "FluxTextEncoderOutputsCachingStrategy.hook",
        ),
        (
            "another field of pictures",
            "library/strategy_flux.py",
            lambda text: text.replace(
                "captions = [info.caption for info in infos]", "captions = [info.caption + str(info.num_repeats) for info in infos]"
            ),
            "num_repeats",
        ),
    ]
    reported = []
    for name, file, change, message in changes:
        copy = bench.work / f"checkout-{name.replace(' ', '-')}"
        shutil.copytree(bench.checkout, copy)
        for path in [copy / file] if name != "renamed" else sorted(copy.rglob("*.py")):
            text = path.read_text()
            path.write_text(change(text))
        if (copy / file).read_text() == (bench.checkout / file).read_text():
            raise Differs(f"{file} is not as this script expects")
        stores = [bench.work / "store-refused", bench.work / f"store-{family}"]
        error = ""
        for store in stores[:1] if name == "another field of pictures" else stores:  # it is read while a value is encoded
            run = bench.run(family, data, store, checkout=copy)
            expect(f"exit code of {name}", run.code, 2)
            error = next((line for line in run.log.splitlines() if "cachestore.live: error" in line), "")
            if message not in error:
                raise Differs(f"{name}: {error or run.log[-2000:]}")
        no_cache_files(data)
        reported.append(f"{name}: {error.removeprefix('cachestore.live: error: ').split('(')[0].strip()[:110]}")
    return "exit 2 each, with an empty and (but for the last) a full store: " + " | ".join(reported)


CASES = {
    "bits": case_bits,
    "refused": case_refused,
    "changes": case_changes,
    "datasets": case_datasets,
    "ranks": case_ranks,
    "killed": case_killed,
    "tokenizers": case_tokenizers,
    "workers": case_workers,
}
FAMILIES = {"bits": ("flux", "sdxl"), "changes": ("flux", "sdxl")}


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--work", type=Path, default=Path("live-sd-scripts"))
    parser.add_argument("--packages", nargs="*", default=[], type=os.path.abspath)
    parser.add_argument("--no-accelerate", action="store_true", help="fork in the first case too")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES))
    chosen = parser.parse_args()
    bench = Bench(chosen.work.resolve(), chosen.packages, not chosen.no_accelerate)
    warm_up(chosen.packages)
    bench.checkout = bench.work / "checkout"
    bench.work.mkdir(parents=True)
    models.shrink(chosen.checkout, bench.checkout)
    for number, name in enumerate(("models", "models2")):
        make = [bench.python, str(HERE / "live_sd_scripts_models.py"), str(bench.work / name), str(number)]
        subprocess.run(make, cwd=bench.checkout, env=bench.environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for family in SCRIPTS:
        for name, case in CASES.items():
            if family not in FAMILIES.get(name, ("flux",)) or (chosen.only and name not in chosen.only and name != "bits"):
                continue
            begun = time.monotonic()
            try:
                reported = case(bench, family)
            except Differs as error:
                print(f"{name:9} {family:5} DIFFERS {error}", flush=True)
                return 1
            print(f"{name:9} {family:5} ok      {reported} [{time.monotonic() - begun:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
