"""Runs a trainer's own data set, readers and DataLoader over a store that `precompute --buckets TRAINER` made, and writes no cache file.

    python3 scripts/conformance/live_read_only.py sd-scripts --checkout ~/sd-scripts

For each case: tiny models encode pictures; `export` writes them for a copy of the pictures, which the trainer loads from its own files.
Then `python -m cachestore.live TRAINER --read train` starts the trainer's code over the store itself: every tensor must be equal to the
bit, in this process and in forked DataLoader workers, with nothing encoded and no file written. Of a trainer that caches beside the
pictures, a new picture and an edited caption must be refused by name. Ends with 1 at the first difference.
"""

import argparse
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from conformance.trainers import DRIVERS, Case, Driver, differing, make_source, manifest, quiet, tiny_model
from conformance.trainers_code import use_checkout

ADAPTERS = ("sd-scripts", "musubi", "ai-toolkit")
_LOADERS = ("fork",)
"""Workers of other start methods would need the stand-ins of modules, which they do not import."""
_PATHS = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, _PATHS))}


def _driver(trainer: str, checkout: Path) -> Driver:
    import transformers.utils as of_transformers

    of_transformers.is_torchvision_available()  # asked before there are stand-ins, and remembered
    for name in ("transformers.image_utils", "transformers.models.clip.modeling_clip", "diffusers.models.autoencoders.autoencoder_kl"):
        importlib.import_module(name)
    driver: Driver = importlib.import_module(DRIVERS[trainer]).DRIVER
    use_checkout(trainer, checkout, [*_LACKING, *driver.stand_ins])
    importlib.import_module("torchvision.transforms")
    vars(importlib.import_module("imagesize"))["get"] = _size_of
    return driver


def _size_of(path: str) -> tuple[int, int]:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.size


_NO_CACHE = {".aitk_size.json"}
"""What trainers note about the pictures themselves."""
_LACKING = ("toml", "voluptuous", "torchvision", "imagesize", "einops")


def inside(trainer: str, checkout: Path, case_name: str, *paths: Path) -> None:
    """Run in a process that is armed: load by the trainer's code what the store has."""
    folder, cache, out = paths
    driver = _driver(trainer, checkout)
    case = next(one for one in driver.cases if one.name == case_name)
    before = {path for path in folder.rglob("*") if path.is_file()}
    driver.encoded = 0
    loaded = driver.read(case, folder, cache, 1)
    of_workers: dict[str, float] = {}
    for method in _LOADERS if trainer == "sd-scripts" else ():
        of_workers[method] = _by_workers(driver, case, folder, method)
    written = sorted(str(path) for path in {path for path in folder.rglob("*") if path.is_file()} - before if path.name not in _NO_CACHE)
    out.write_bytes(pickle.dumps({"loaded": loaded, "encoded": driver.encoded, "written": written, "workers": of_workers}))


def _by_workers(driver: Any, case: Case, folder: Path, method: str) -> float:
    """Load each batch by DataLoader workers, and compare with this process. Returns the seconds."""
    import torch

    dataset = driver._dataset(case, folder, 1)
    begun = time.perf_counter()
    loader = torch.utils.data.DataLoader(dataset, None, shuffle=False, num_workers=2, multiprocessing_context=method)
    for number, batch in enumerate(loader):
        own = dataset[number]
        for name in ("latents", "text_encoder_outputs_list"):
            pairs = zip(batch[name], own[name], strict=True) if batch[name] is not None else ()
            if not all(torch.equal(one, other) for one, other in pairs):
                sys.exit(f"{case.name}: {method}: batch {number} differs in {name}")
    return time.perf_counter() - begun


def run_case(trainer: str, checkout: Path, case: Case, driver: Driver, folder: Path) -> list[str]:
    """Return a row of the table for a case. Ends the program at a difference."""
    import cachestore as cs

    data, store = folder / "data", folder / "store"
    sizes = (driver.resolution // 2, 2 * driver.resolution)
    make_source(data, 6, masks=case.masks, controls=case.controls, sizes=sizes, lines=False)
    model = tiny_model(case.pipeline, folder / "model")
    asked: dict[str, Any] = {"resolution": driver.resolution, "buckets": trainer, "latents": "sample", "flip": case.flips, "inline": True}
    asked |= {name: case.importing[name] for name in ("caption_lines", "captions") if name in case.importing} | dict(case.precompute)
    with quiet():
        made = cs.precompute(
            manifest(data, case), model=model, store=store, encode=case.kinds, vae_dtype="float32", text_dtype="float32", **asked
        )
    assert made.complete, made
    copy = shutil.copytree(data, folder / "copy")
    written = copy if driver.is_beside else folder / "cache"
    cs.export_cache(store, format=trainer, folder=written, family=case.family)
    arguments = [__file__, trainer, "--checkout", str(checkout), "--inside", case.name]
    plain = [sys.executable, *arguments, str(copy), str(written), str(folder / "out.pickle")]
    wanted = _run(case, plain, folder / "out.pickle")[0]["loaded"]
    cache = data if driver.is_beside else data / "cache"
    live = [sys.executable, "-m", "cachestore.live", trainer, "--store", str(store), "--read", "train"]
    command = [*live, *arguments, str(data), str(cache), str(folder / "out.pickle")]
    begun = time.perf_counter()
    its, last = _run(case, command, folder / "out.pickle")
    seconds = time.perf_counter() - begun
    if unequal := differing(wanted, its["loaded"]):
        sys.exit(f"{case.name}: {unequal}")
    if its["encoded"] or its["written"] or len(its["loaded"]) != len(wanted):
        sys.exit(f"{case.name}: {its['encoded']} encoded, written: {its['written']}")
    refused = "; ".join(_refused(command, case, data, trainer)) if driver.is_beside else "-"
    print(last, file=sys.stderr)
    return [case.name, str(len(wanted)), "0", "0", "0", " ".join(its["workers"]) or "-", f"{seconds:.1f}", refused]


def _run(case: Case, command: list[str], out: Path) -> tuple[dict[str, Any], str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=_ENVIRONMENT)
    if done.returncode:
        sys.exit(f"{case.name}: ended with {done.returncode}\n{done.stderr[-4000:]}")
    made = pickle.loads(out.read_bytes())  # noqa: S301 - of this script
    return made, next((line for line in done.stderr.splitlines()[::-1] if "cachestore.live:" in line), "")


def _refused(command: list[str], case: Case, data: Path, trainer: str) -> list[str]:
    """Change the source in three ways, each of which must be refused by the file's name."""
    found: list[str] = []
    changes = [("a new picture", "000.png", "new.png")]
    changes += [("an edited caption", "", "000.txt")] if "text" in case.kinds else []
    for what, source, name in changes:
        path = data / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes((data / source).read_bytes() if source else b"other words")
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=_ENVIRONMENT)
        reported = next((line for line in done.stderr.splitlines() if "cachestore.live: error:" in line), "")  # behind a bar of progress
        if done.returncode != 2 or f"/{Path(name).stem}_" not in reported or "--again" not in reported:
            sys.exit(f"{trainer} {case.name}: {what} was not refused ({done.returncode}): {reported or done.stderr[-2000:]}")
        print(f"{what}: {reported}", file=sys.stderr)
        found.append(what)
        path.unlink() if before is None else path.write_bytes(before)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=ADAPTERS)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--case", action="append")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside is not None:
        case, *paths = chosen.inside
        inside(chosen.trainer, chosen.checkout, case, *map(Path, paths))
        return
    driver: Driver = importlib.import_module(DRIVERS[chosen.trainer]).DRIVER
    rows = [["case", "samples", "different", "encoded", "files written", "workers", "seconds", "refused"]]
    for case in driver.cases:
        if case.videos or case.is_import_only or (chosen.case and case.name not in chosen.case):
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_case(chosen.trainer, chosen.checkout.resolve(), case, driver, Path(folder).resolve()))
    for row in rows:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
