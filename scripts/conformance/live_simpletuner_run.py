"""Runs SimpleTuner's caching and reading code once, from its own files or through `cachestore.live`, for `live_simpletuner.py`.

Usage: python live_simpletuner_run.py CHECKOUT FOLDER, and for each start a line of JSON: task (train, text or many), folder, out, settings

FOLDER has `data` (pictures with captions) and `model` (a tiny SDXL pipeline); cache files would be in `cache`. OUT.json and OUT.npz say
what was seen. Draws of the VAE follow from one state of the generator for each picture, so two runs draw alike.
"""
# The trainer's modules are in its checkout.
# pyright: reportMissingImports=false

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
import numpy as np
import torch
from conformance.live_simpletuner_stands import use_simpletuner
from conformance.trainer_simpletuner import SimpleTuner, captions_of
from conformance.trainers import Case, as_bits

SETTINGS: dict[str, Any] = {}
CASE = Case("sdxl", "sdxl", "sdxl")
counts = {"text": 0, "latents": 0}


class Driver(SimpleTuner):
    """Sets SimpleTuner's caches up, with its own class of SDXL and a tiny pipeline's modules."""

    resolution = 128

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[Any] = []

    def _settings(self, case: Case, cache: Path) -> Any:
        made = vars(super()._settings(case, cache)) | {"model_family": "sdxl", "model_flavour": None, "model_type": "lora"}
        made |= {"tokenizer_max_length": 77, "t5_padding": "unmodified", "weight_dtype": torch.float32, **SETTINGS.get("config", {})}
        made |= {"text_encoder_1_precision": "no_change"}
        return argparse.Namespace(**made)

    def _model(self, case: Case) -> Any:
        from diffusers import AutoencoderKL
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from simpletuner.helpers.models.sdxl.model import SDXL
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

        own_sample = DiagonalGaussianDistribution.sample

        def sample(self: Any, generator: Any = None) -> Any:
            counts["latents"] += len(self.mean)
            return own_sample(self, torch.Generator().manual_seed(7))

        if own_sample.__name__ != "sample" or "counts" not in own_sample.__code__.co_names:
            DiagonalGaussianDistribution.sample = sample
        its = self.folder / "model"
        settings = self._settings(case, self.folder / "cache")
        vae = AutoencoderKL.from_pretrained(its / SETTINGS.get("vae", "vae"))
        encoders = [
            CLIPTextModel.from_pretrained(its / "text_encoder"),
            CLIPTextModelWithProjection.from_pretrained(its / "text_encoder_2"),
        ]
        tokenizers = [CLIPTokenizer.from_pretrained(its / name) for name in ("tokenizer", "tokenizer_2")]

        base: Any = SDXL

        class Model(base):
            """The trainer's model class, with modules that are there already."""

            def __init__(self) -> None:
                self.config, self.vae, self.text_encoders, self.tokenizers = settings, vae, encoders, tokenizers
                self.accelerator = argparse.Namespace(device=torch.device("cpu"))

            def get_vae(self) -> Any:
                return vae

            def _encode_prompts(self, prompts: list[str], is_negative_prompt: bool = False) -> Any:
                counts["text"] += len(prompts)
                getattr(self.config, SETTINGS.get("reads", "model_family"))
                time.sleep(SETTINGS.get("slow", 0) * random.random())
                return super()._encode_prompts(prompts, is_negative_prompt)

        return Model()

    @contextmanager
    def running(self, ranks: int = 1, rank: int = 0, wait: Any = None) -> Any:
        """Yield metadata backend, VAE cache, text cache and picture backend, for one rank of several."""
        from simpletuner.helpers.training.state_tracker import StateTracker

        with self._running(CASE, self.folder / "data", self.folder / "cache") as parts:
            accelerator = parts[1].accelerator

            @contextmanager
            def split(some: list[Any]) -> Any:
                yield _part_of(some, ranks, rank)

            vars(accelerator).update(num_processes=ranks, process_index=rank, is_main_process=rank == 0, is_local_main_process=rank == 0)
            accelerator.split_between_processes, accelerator.wait_for_everyone = split, wait or (lambda: None)
            StateTracker.set_accelerator(accelerator)
            StateTracker.vae_dtype = getattr(torch, SETTINGS.get("vae_dtype", "float32"))
            yield parts


def _part_of(some: list[Any], ranks: int, rank: int) -> list[Any]:
    """Return a rank's part, as accelerate splits."""
    each, more = divmod(len(some), ranks)
    start = rank * each + min(rank, more)
    return some[start : start + each + (rank < more)]


def train(driver: Driver, out: Path) -> None:
    """Encode what is missing, and read all by the trainer's own readers."""
    found: dict[str, Any] = {}
    with driver.running() as (metadata, vae_cache, text_cache, images):
        metadata.refresh_buckets()
        vae_cache.vae_batch_size = text_cache.text_encoder_batch_size = 1  # of several in a batch, the last bits depend on the others
        vae_cache.discover_all_files()
        paths = sorted((driver.folder / "data").glob("*.png"))
        vae_cache.build_vae_cache_filename_map([str(path) for path in paths])
        unprocessed = len(vae_cache.discover_unprocessed_files())
        vae_cache.process_buckets()
        text_cache.discover_all_files()
        text_cache.encode_dropout_caption()
        captions = {path: captions_of(images, path) for path in paths}
        records = [
            {"prompt": one, "key": one, "metadata": {"dataset_relative_path": path.name}} for path in paths for one in captions[path]
        ]
        text_cache.compute_embeddings_for_prompts(records, return_concat=False, load_from_cache=False)
        text_cache.compute_embeddings_for_prompts(["a validation"], is_validation=True, load_from_cache=False)
        text_cache.encode_validation_negative_prompt("blurry")
        vae_cache.vae = None  # as when it begins to train
        text_cache.text_encoders = text_cache.tokenizers = []
        text_cache.model.text_encoders = text_cache.model.tokenizers = None
        for path in paths:
            found[f"latents {path.name}"] = as_bits(vae_cache.retrieve_from_cache(str(path)))
        for prompt in [*(one for some in captions.values() for one in some), "", "a validation", "blurry"]:
            loaded = text_cache.compute_prompt_embeddings_with_model([{"prompt": prompt, "key": prompt, "metadata": {}}])
            found |= {f"text {prompt!r} {name}": as_bits(one) for name, one in loaded.items() if isinstance(one, torch.Tensor)}
    np.savez(f"{out}.npz", **{name.replace("/", "_"): one for name, one in found.items()})
    files = [str(path) for path in (driver.folder / "cache").rglob("*") if path.is_file() and "state" not in path.parts]
    Path(f"{out}.json").write_text(json.dumps({"encoded": counts, "files": len(files), "unprocessed": unprocessed}))


def _text_rank(driver: Driver, rank_of: tuple[int, int], prompts: list[str], answers: Path, wait: Any) -> None:
    """One rank of a launch makes its part, then reads all, as training begins to. `wait` is the barrier, where no rank is killed."""
    rank, ranks = rank_of
    found: dict[str, str] = {}
    with driver.running(ranks, rank) as (_metadata, _vae_cache, text_cache, _images):
        text_cache.discover_all_files()
        wait()
        records: list[dict[str, Any]] = [{"prompt": one, "key": one, "metadata": {}} for one in prompts]
        text_cache.compute_embeddings_for_prompts(records, return_concat=False, load_from_cache=False)
        wait()
        for record in records:
            try:
                loaded = text_cache.compute_prompt_embeddings_with_model([dict(record)])
                found[record["prompt"]] = loaded["prompt_embeds"].numpy().tobytes().hex()[:32]
            except Exception as error:  # noqa: BLE001 - what a trainer would die of
                found[record["prompt"]] = f"lacks {type(error.__cause__ or error).__name__}"
    beside = answers / f"{rank}.tmp"  # a queue's lock would stay with a rank that is killed
    beside.write_text(json.dumps([rank, counts["text"], found]))
    beside.rename(answers / f"{rank}.json")


def text(driver: Driver, out: Path) -> None:
    """SEED CASE: 25 prompts on 8 processes, of which one is killed at a random time; then all are started again."""
    import shutil

    ranks, prompts = SETTINGS["ranks"], [f"a prompt {number} of {SETTINGS['prompts']}" for number in range(SETTINGS["prompts"])]
    context, rows = get_context("fork"), []
    for number in range(SETTINGS["rounds"]):
        draw = random.Random(number)
        shutil.rmtree(driver.folder / "cache", ignore_errors=True)
        if SETTINGS.get("store"):  # its files are removed, the store stays: other prompts
            prompts = [f"a prompt {one} of round {number}" for one in range(SETTINGS["prompts"])]
        row: dict[str, Any] = {"round": number, "killed": 0}
        for launch in ("first", "again"):
            answers, wait = driver.folder / f"answers {number} {launch}", context.Barrier(ranks).wait if launch == "again" else int
            answers.mkdir()
            started = [context.Process(target=_text_rank, args=(driver, (rank, ranks), prompts, answers, wait)) for rank in range(ranks)]
            for one in started:
                one.start()
            if launch == "first":
                time.sleep(draw.uniform(0.1, SETTINGS["within"]))
                if (victim := draw.choice(started)).is_alive():
                    os.kill(victim.pid or 0, signal.SIGKILL)
                    row["killed"] = 1
            deadline = time.monotonic() + 240
            while any(one.is_alive() for one in started):
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    row["hung"] = [one.pid for one in started if one.is_alive()]
                    for one in started:
                        one.kill()
                    break
            got = [json.loads(path.read_text()) for path in sorted(answers.glob("*.json"))]
            shutil.rmtree(answers)
            lacks = [value for _rank, _encoded, found in got for value in found.values() if value.startswith("lacks")]
            row[launch] = {
                "ranks": len(got),
                "encoded": sum(encoded for _rank, encoded, _found in got),
                "whole": sum(
                    len(found) == len(prompts) and not any(v.startswith("lacks") for v in found.values()) for _r, _e, found in got
                ),
                "lacks": len(lacks),
                "torn": sum("FileNotFound" not in one and "MissingEntry" not in one for one in lacks),
                "kinds": sorted(set(lacks)),
                "differ": sum(len({f[p] for _r, _e, f in got if p in f and not f[p].startswith("lacks")}) > 1 for p in prompts),
            }
        rows.append(row)
        Path(f"{out}.json").write_text(json.dumps(rows))


def _many_rank(driver: Driver, rank: int, ranks: int, barrier: Any, answers: Any) -> None:
    try:
        with driver.running(ranks, rank, barrier.wait) as (metadata, vae_cache, _text_cache, _images):
            metadata.reload_cache(set_config=False)
            metadata.split_buckets_between_processes(gradient_accumulation_steps=1)
            vae_cache.vae_batch_size = SETTINGS.get("batch", 16)
            if rank == 0:
                vae_cache.discover_all_files()
            barrier.wait()
            paths = [str(path) for path in sorted((driver.folder / "data").glob("*.png"))]
            from simpletuner.helpers.training.state_tracker import StateTracker

            StateTracker.set_image_files([("", [], paths)], data_backend_id=vae_cache.id)
            StateTracker.set_vae_cache_files([], data_backend_id=vae_cache.id)
            vae_cache.build_vae_cache_filename_map(paths)
            unprocessed, began = len(vae_cache.discover_unprocessed_files()), time.monotonic()
            vae_cache.process_buckets()
            seconds, lacks = time.monotonic() - began, 0
            for path in paths:
                with suppress(Exception):
                    vae_cache.retrieve_from_cache(path)
                    continue
                lacks += 1
            answers.put((rank, counts["latents"], unprocessed, lacks, seconds))
    except BaseException:
        traceback.print_exc()
        raise


def many(driver: Driver, out: Path) -> None:
    """SEED CASE: many small pictures on several processes."""
    ranks, context = SETTINGS["ranks"], get_context("fork")
    with driver.running() as (metadata, *_rest):
        metadata.refresh_buckets()
        metadata.save_cache()
    rows = []
    for _launch in range(2):
        barrier, answers = context.Barrier(ranks), context.SimpleQueue()
        started = [context.Process(target=_many_rank, args=(driver, rank, ranks, barrier, answers)) for rank in range(ranks)]
        for one in started:
            one.start()
        got = []
        while any(one.is_alive() for one in started) or not answers.empty():
            while not answers.empty():
                got.append(answers.get())
            time.sleep(0.05)
        rows.append(sorted(got))
    Path(f"{out}.json").write_text(json.dumps(rows))


def _run(command: dict[str, Any]) -> int:
    """Run one start in a process of its own, and return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        reported = os.open(f"{command['out']}.err", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(reported, 1)
        os.dup2(reported, 2)
        SETTINGS.clear()
        SETTINGS.update(command["settings"])
        Driver.resolution = int(SETTINGS.get("resolution", Driver.resolution))
        {"train": train, "text": text, "many": many}[command["task"]](Driver(Path(command["folder"])), Path(command["out"]))
        if "cachestore.live" in sys.modules:
            print(import_module("cachestore.live").current().last_line())
        code = 0
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:  # noqa: BLE001 - whatever it is, this process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Load SimpleTuner once, then run each start that a line of standard input asks for, as JSON, in a forked process."""
    checkout, folder = sys.argv[1:3]
    torch.set_num_threads(1)
    use_simpletuner(Path(checkout))
    import logging

    logging.disable(logging.ERROR)
    with Driver(Path(folder)).running():
        if "cachestore.live" in sys.modules:  # so that all that a rank needs is loaded before it is forked
            import_module("cachestore.train.encoding.encode_once")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(_run(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
