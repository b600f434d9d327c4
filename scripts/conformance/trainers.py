"""Runs another trainer's own caching and loading code against `cachestore import` and `cachestore export`.

    python3 scripts/conformance/trainers.py sd-scripts --checkout ~/sd-scripts

Nothing of the trainer is kept here: name a checkout, in an environment that has what its code imports. Its models are replaced by small
stand-ins that make values from pixels and captions. For each case:

1. The trainer caches pictures; `import` takes them; each sample is compared bit for bit with what the trainer's own loader returns for it.
2. `export` writes them into a fresh folder; the trainer loads batches of 1 and 4 from there. It must not encode anything.
3. `precompute --buckets TRAINER` encodes the pictures with a tiny model, `export` writes them, and the trainer loads them in the same way.

Of a trainer whose cache is not imported, only the third step is run.

`--sizes 600` compares buckets of so many sizes, and pixels, with the trainer's own instead. `--live` trains four steps from a store.
`--keep FILE.tar.xz` keeps what the trainer wrote and loaded, for recorded.tar.xz in the trainer's folder of tests/trainers/.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import logging
import random
import shutil
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from conformance.trainers_code import commit_of, use_checkout
from PIL import Image

import cachestore as cs

Loaded = dict[tuple[str, bool], dict[str, np.ndarray]]
"""What a trainer's loader returns: arrays by the picture's name without extension, and whether it is mirrored."""

WORDS = ("a red fox", "snow", "ein grüner Vogel", "looking up", "猫", "1girl", "forest at night", "cinematic light")


@dataclass(frozen=True)
class Case:
    """What is cached."""

    name: str
    family: str
    pipeline: str
    """The tiny pipeline of tests/encode/tiny_families.py that encodes here."""
    kinds: tuple[str, ...] = ("text", "latents")
    flips: bool = False
    masks: bool = False
    controls: bool = False
    videos: bool = False
    precompute: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More options of `precompute`."""
    importing: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of `import_cache`."""
    is_import_only: bool = False
    """Whether nothing is exported: what the trainer caches there is of inputs that a data set has no column for."""
    left_out: str = ""
    """Why an import leaves mirrored pictures out; empty if it takes them."""


class Driver(Protocol):
    """Runs one trainer's code."""

    stand_ins: tuple[str, ...]
    """Modules that are replaced by empty ones."""
    cases: tuple[Case, ...]
    resolution: int
    is_beside: bool
    """Whether the trainer caches beside the pictures."""
    encoded: int
    """How often the stand-ins of its models were called."""

    def write(self, case: Case, data: Path, cache: Path) -> None:
        """Let the trainer cache the pictures in `data`."""
        ...

    def read(self, case: Case, data: Path, cache: Path, batch_size: int) -> Loaded:
        """Let the trainer load its cache in batches."""
        ...

    def ours(self, case: Case, sample: Mapping[str, Any], its: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return what the trainer should load for a sample of ours; `its` has the shapes."""
        ...


@dataclass
class Outcome:
    """The result of one step of one case."""

    case: str
    step: str
    pictures: int
    unequal: list[str] = field(default_factory=list[str])
    """Samples whose tensors differ, or that are missing."""
    encoded_again: int = 0
    remarks: list[str] = field(default_factory=list[str])

    @property
    def works(self) -> bool:
        """Whether everything is equal, and nothing was encoded again."""
        return not self.unequal and not self.encoded_again


def make_source(folder: Path, count: int, *, masks: bool, controls: bool, sizes: tuple[int, int], lines: bool) -> None:
    """Write pictures of random sizes with captions of several words, commas, spaces and lines; masks as alpha and as files."""
    draw = random.Random(5)
    folder.mkdir(parents=True)
    for number in range(count):
        width, height = draw.randint(*sizes), draw.randint(*sizes)
        coarse = np.random.default_rng(number).integers(0, 256, (3, 3, 3), np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
        if masks:
            alpha = Image.fromarray(np.random.default_rng(number).integers(0, 2, (3, 3), np.uint8) * 255).resize((width, height))
            picture.putalpha(alpha)
            (folder.parent / f"{folder.name}_masks").mkdir(exist_ok=True)
            alpha.save(folder.parent / f"{folder.name}_masks" / f"{number:03d}.png")
        picture.save(folder / f"{number:03d}.png", compress_level=1)
        if controls:
            (folder.parent / f"{folder.name}_controls").mkdir(exist_ok=True)
            picture.rotate(180).save(folder.parent / f"{folder.name}_controls" / f"{number:03d}.png")
        caption = ", ".join(draw.sample(WORDS, draw.randint(1, 4))) + f" {number}"
        caption += draw.choice(["", "\n", "  ", "\nsecond line", "\r\n"]) if lines else ""
        (folder / f"{number:03d}.txt").write_bytes(caption.encode())


def make_videos(folder: Path, count: int, sizes: tuple[int, int]) -> None:
    """Write lossless videos of random sizes and lengths, with captions."""
    from tests.encode.footage import moving, write

    draw = random.Random(5)
    folder.mkdir(parents=True)
    for number in range(count):
        frames = moving(draw.randint(9, 24), (2 * draw.randint(*sizes) // 2, 2 * draw.randint(*sizes) // 2))
        (folder / f"{number:03d}.mp4").write_bytes(write(frames, kind="mp4", codec="libx264rgb", pix_fmt="rgb24", options={"qp": "0"}))
        (folder / f"{number:03d}.txt").write_text(", ".join(draw.sample(WORDS, draw.randint(1, 4))) + f" {number}", encoding="utf-8")


def manifest(folder: Path, case: Case) -> Path:
    """Return a manifest of a folder's pictures with their masks or control images, or the folder itself if there are none."""
    if not (case.masks or case.controls):
        return folder
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.png")):
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").split("\n")[0].strip()
        row: dict[str, Any] = {"id": path.name, "image": path.name, "caption": caption}
        row |= {"mask": f"../{folder.name}_masks/{path.name}"} if case.masks else {}
        row |= {"control": f"../{folder.name}_controls/{path.name}"} if case.controls else {}
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def tiny_model(pipeline: str, folder: Path) -> Path:
    """Save a tiny pipeline whose VAE has the real one's factor of 8."""
    import tiny_models

    from tests.encode import tiny_families

    torch.manual_seed(0)
    family = tiny_families.FAMILIES[pipeline]
    tiny_families.tiny.vae = partial(tiny_models.vae, widths=(8, 8, 8, 8))
    made = family.build()
    folder.mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):
        tiny_families.save(family, made, folder)
    return folder


def values_of(driver: Driver, case: Case, store: Path, its: Loaded) -> Loaded:
    """Return what a store holds for the samples of `its`, as the trainer names it."""
    captions = cs.CaptionPolicy.parse(case.precompute.get("captions", "first") if store.name == "encoded" else "first")
    data = cs.CachedDataset(store, captions=captions)
    raw = None if data.recipes["latents"].read.get("scaled") else cs.CachedDataset(store, latents="raw", captions=captions)
    sides = _both_sides(store) if any(is_flipped for _name, is_flipped in its) else {}
    found: Loaded = {}
    clips = _clips(store) if case.videos else {}
    for (name, is_flipped), arrays in its.items():
        if name in clips:
            row, latents, as_stored = clips[name]
            found[name, is_flipped] = dict(driver.ours(case, {**data[data.index(row)], "latents": latents, "raw": as_stored}, arrays))
            continue
        index = next((number for number, one in enumerate(data.ids) if Path(one).stem == name), None)
        if index is None:
            continue
        sample: dict[str, Any] = dict(data[index])
        if raw is not None:
            sample["raw"] = raw[index]["latents"]
        if name in sides:  # a data set draws one of them
            sample["latents"] = sample["raw"] = sides[name][is_flipped]
            read = data.recipes["latents"].read
            if not read.get("scaled"):
                shift, factor = read.get("shift_factor") or 0.0, read["scaling_factor"]
                sample["latents"] = (sample["raw"].float() - shift) * factor
        found[name, is_flipped] = dict(driver.ours(case, sample, arrays))
    return found


def _both_sides(store: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the plain and the mirrored latents of each picture: of its two cells, or both stored in one."""
    from cachestore.files.paths import Layout
    from cachestore.store.read.rows import newest_catalog

    catalog = newest_catalog(Layout.at(store), "train")
    assert catalog is not None
    column = next(one for one in catalog.columns if one.role == "image")
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with cs.open(store) as reader:
        for row, name in enumerate(catalog.ids):
            entries = [dict(reader.get(key)) for key in column.row_keys(row) if key is not None]
            own = [one for one in entries[0] if "flipped" in one]
            plain = next(tensor for one, tensor in entries[0].items() if "flipped" not in one and tensor.ndim == 3)
            found[Path(name).stem] = (plain, entries[0][own[0]] if own else next(iter(entries[-1].values())))
    return found


def clip_name(stem: str, start: int, frames: int) -> str:
    """Return by what a clip is known in `Loaded`."""
    return f"{stem}_{start:05d}-{frames:03d}"


def _clips(store: Path) -> dict[str, tuple[str, torch.Tensor, torch.Tensor]]:
    """Return of each clip, by its name: its sample, its latents as a data set returns them, and as they are stored."""
    from cachestore.core.read_block import parse_latents
    from cachestore.files.paths import Layout
    from cachestore.store.read.rows import newest_catalog
    from cachestore.train.latents import read_latents

    catalog = newest_catalog(Layout.at(store), "train")
    assert catalog is not None
    column = next(one for one in catalog.columns if one.role == "video")
    block, (_at, references) = parse_latents(catalog.recipes[column.fingerprint]), catalog.images["video"]
    found: dict[str, tuple[str, torch.Tensor, torch.Tensor]] = {}
    with cs.open(store) as reader:
        for row, sample in enumerate(catalog.ids):
            for cell in column.row_cells(row):
                if cell.key is not None:
                    name = clip_name(Path(references[row]).stem, cell.facts["start"][0], cell.facts["bucket"][2])
                    mean, raw = (read_latents(block, form, dict(reader.get(cell.key)), 0) for form in ("mean", "raw"))
                    found[name] = sample, mean, raw
    return found


def noise_of(text: str, what: str, *shape: int) -> torch.Tensor:
    """Return float32 values that follow from a text. They are few, and rows differ by sign and size alone: files of them are small."""
    seed = int.from_bytes(hashlib.sha256(f"{what} {text}".encode()).digest()[:6], "little")
    row = torch.randint(-8, 9, shape[-1:], generator=torch.Generator().manual_seed(seed)) / 8
    numbers = torch.arange(int(np.prod(shape[:-1]))).reshape(*shape[:-1], 1)
    return row * (1 - 2 * (numbers % 2)) * 0.5 ** (numbers // 2 % 3)


def latents_of(pixels: torch.Tensor, channels: int) -> torch.Tensor:
    """Return latents of pixels [B, 3, H, W]: the mean of 8 x 8, mixed into the channels, in steps of 1/64."""
    mix = torch.randn(channels, 3, 1, 1, generator=torch.Generator().manual_seed(7))
    return (torch.nn.functional.conv2d(torch.nn.functional.avg_pool2d(pixels.float(), 8), mix) * 64).round() / 64


def clip_latents_of(pixels: torch.Tensor, channels: int, factor: int) -> torch.Tensor:
    """Return latents of pixels [B, 3, F, H, W]: those of the first frame, then of the mean of each `factor` frames."""
    parts = [pixels[:, :, :1], *(pixels[:, :, 1:].split(factor, 2) if pixels.shape[2] > 1 else ())]  # nothing is split into one empty part
    return torch.stack([latents_of(part.float().mean(2), channels) for part in parts], 2)


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which numpy lacks, as the whole numbers of its bits."""
    return (tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.contiguous()).numpy()


def differing(its: Loaded, other: Loaded) -> list[str]:
    """Return the samples whose arrays are not equal bit for bit, with the array's name, and those that are missing."""
    found: list[str] = []
    for name, arrays in its.items():
        if name not in other:
            found.append(f"{name[0]}: missing")
            continue
        for key, array in arrays.items():
            one = other[name].get(key)
            if one is None or one.shape != array.shape or one.dtype != array.dtype or one.tobytes() != array.tobytes():
                found.append(f"{name[0]}{' mirrored' if name[1] else ''}: {key} {array.dtype}{list(array.shape)}")
    return found


def run_case(driver: Driver, case: Case, trainer: str, folder: Path, *, count: int, keep: Path | None) -> Iterator[Outcome]:
    """Run one case and yield the result of each step."""
    from cachestore.trainers.table import load_format

    sizes = (driver.resolution // 2, 2 * driver.resolution)
    data, cache = folder / "data", folder / ("data" if driver.is_beside else "cache")
    if case.videos:
        make_videos(data, count, sizes)
    else:
        make_source(data, count, masks=case.masks, controls=case.controls, sizes=sizes, lines=not (case.masks or case.controls))
    if load_format(trainer).reads is None:
        yield from _encoded(driver, case, trainer, folder)
        return
    with quiet():
        driver.write(case, data, cache)
        driver.encoded = 0
        its = driver.read(case, data, cache, 1)
    if case.left_out:
        its = {name: arrays for name, arrays in its.items() if not name[1]}
    if keep is not None:
        arrays: dict[str, Any] = {
            f"{name} {int(is_flipped)} {key}": one for (name, is_flipped), some in its.items() for key, one in some.items()
        }
        for path in dict.fromkeys((data, cache)):
            shutil.copytree(path, keep / case.name / path.name, ignore=shutil.ignore_patterns("cache"))
        np.savez(keep / case.name / "loaded.npz", **arrays)  # not compressed, so that xz finds the same bytes in the cache
    options: dict[str, Any] = {"claims": {"model": "stand-ins"}, "encode": case.kinds, **case.importing}
    report = cs.import_cache(trainer, cache, store=folder / "imported", data=data, family=case.family, **options)
    outcome = Outcome(case.name, "it writes, we import", len(its), encoded_again=driver.encoded, remarks=list(report.remarks))
    outcome.remarks += [case.left_out] if case.left_out else []
    outcome.unequal += [f"{failure['sample']}: {failure['reason']}" for failure in report.report.failures]
    outcome.unequal += differing(its, values_of(driver, case, folder / "imported", its))
    yield outcome
    if case.is_import_only or not _is_exported(trainer):
        return
    if not case.left_out:
        yield from _exported(driver, case, trainer, folder, "imported", its=its)
    yield from _encoded(driver, case, trainer, folder)


def _encoded(driver: Driver, case: Case, trainer: str, folder: Path) -> Iterator[Outcome]:
    """Encode the pictures with a tiny model, export them, and let the trainer load them."""
    store = folder / "encoded"
    model = tiny_model(case.pipeline, folder / "model")
    asked: dict[str, Any] = {"resolution": driver.resolution, "buckets": trainer, "latents": "sample", "flip": case.flips, "inline": True}
    asked |= {name: case.importing[name] for name in ("caption_lines", "captions") if name in case.importing} | dict(case.precompute)
    asked |= {"vae_dtype": "float32", "text_dtype": "float32"}
    with quiet():
        made = cs.precompute(manifest(folder / "data", case), model=model, store=store, encode=case.kinds, **asked)
    assert made.complete, made
    yield from _exported(driver, case, trainer, folder, "encoded", its=None)


def _is_exported(trainer: str) -> bool:
    from cachestore.trainers.table import load_format

    return load_format(trainer).writing is not None


def _exported(driver: Driver, case: Case, trainer: str, folder: Path, store: str, *, its: Loaded | None) -> Iterator[Outcome]:
    """Export a store, and let the trainer load it in batches of 1 and 4."""
    data = folder / "data"
    if driver.is_beside:
        data = folder / f"data for {store}"
        data.mkdir()
        for path in (folder / "data").iterdir():
            if path.suffix in {".png", ".txt"}:
                shutil.copy2(path, data / path.name)
    cache = data if driver.is_beside else folder / f"cache for {store}"
    report = cs.export_cache(folder / store, format=trainer, folder=cache, family=case.family)
    for size in (1, 4):
        driver.encoded = 0
        with quiet():
            loaded = driver.read(case, data, cache, size)
        wanted = values_of(driver, case, folder / store, loaded) if its is None else its
        step = f"{'we import and export' if its is not None else 'we encode and export'}, it reads batches of {size}"
        outcome = Outcome(case.name, step, len(loaded), differing(wanted, loaded), driver.encoded, [*report.not_taken, *report.remarks])
        outcome.unequal += [f"{failure['sample']}: {failure['reason']}" for failure in report.failures]
        yield outcome


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep the trainer's own output away, unless it fails."""
    text = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception:
        print(text.getvalue()[-3000:], file=sys.stderr)
        raise
    finally:
        logging.disable(logging.NOTSET)


DRIVERS = {
    "sd-scripts": "conformance.trainer_sd_scripts",
    "musubi": "conformance.trainer_musubi",
    "simpletuner": "conformance.trainer_simpletuner",
    "ai-toolkit": "conformance.trainer_ai_toolkit",
    "diffusion-pipe": "conformance.trainer_diffusion_pipe",
    "ltx": "conformance.trainer_ltx",
    "nemo-automodel": "conformance.trainer_nemo",
}


def _pictures(trainer: str, checkout: Path, count: int) -> int:
    """Compare buckets and pixels with the trainer's own. Returns 1 if a bucket differs."""
    from conformance.record_buckets import RECORDERS
    from conformance.trainer_pixels import compare_pixels, compare_sizes

    use_checkout(trainer, checkout, RECORDERS[trainer][1])
    print(f"{trainer} {commit_of(checkout)}")
    with tempfile.TemporaryDirectory() as folder, quiet():  # first: some recorders replace what resizes
        pixels = list(compare_pixels(trainer, Path(folder, "pictures")))
    print(*pixels, sep="\n")
    with quiet():
        sizes = list(compare_sizes(trainer, count, seed=random.SystemRandom().randrange(1 << 30)))
    print(*sizes, sep="\n")
    return int(any(one.differing for one in sizes))


def main() -> int:
    """Run the cases of a trainer and print their results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainer", choices=DRIVERS)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the trainer")
    parser.add_argument("--case", action="append", help="run only this case")
    parser.add_argument("--pictures", type=int, default=40, help="how many pictures")
    parser.add_argument("--resolution", type=int, help="in place of the trainer's usual one")
    parser.add_argument("--keep", type=Path, help="a .tar.xz to write: pictures, caches and what was loaded")
    parser.add_argument("--sizes", type=int, metavar="N", help="compare the buckets of N random sizes, and pixels, instead")
    parser.add_argument("--live", action="store_true", help="of simpletuner: train from a store by the code of its page")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    return _pictures(asked.trainer, asked.checkout, asked.sizes) if asked.sizes else _run(asked)


def _run(asked: argparse.Namespace) -> int:
    driver: Driver = importlib.import_module(DRIVERS[asked.trainer]).DRIVER
    if _is_exported(asked.trainer):
        importlib.import_module("tests.encode.tiny_families")  # before a checkout that has a package `tests` of its own
    driver.resolution = asked.resolution or driver.resolution
    replaced = use_checkout(asked.trainer, asked.checkout, driver.stand_ins)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        for number, case in enumerate(driver.cases):
            if asked.case and case.name not in asked.case:
                continue
            (Path(folder) / str(number)).mkdir()
            for outcome in _outcomes(driver, case, asked, Path(folder, str(number)), kept):
                outcomes.append(outcome)
                if not asked.json:
                    _print(outcome)
            shutil.rmtree(Path(folder, str(number)))
        if asked.keep:
            _pack(kept, asked.keep)
    result = {"trainer": asked.trainer, "commit": commit_of(asked.checkout), "replaced": replaced}
    if asked.json:
        print(json.dumps({**result, "outcomes": [asdict(one) | {"works": one.works} for one in outcomes]}, indent=1))
    else:
        print(f"commit {result['commit']}; replaced by empty modules: {', '.join(replaced) or 'none'}")
    return 0 if all(one.works for one in outcomes) else 1


def _outcomes(driver: Driver, case: Case, asked: argparse.Namespace, folder: Path, kept: Path) -> Iterator[Outcome]:
    if asked.live and asked.trainer != "simpletuner":
        sys.exit("--live is for simpletuner")
    if asked.live:
        return importlib.import_module("trainer_simpletuner_live").run_live(case, folder, asked.pictures)
    return run_case(driver, case, asked.trainer, folder, count=asked.pictures, keep=kept if asked.keep else None)


def _pack(folder: Path, path: Path) -> None:
    """Write a folder as a .tar.xz without times and owners."""
    with tarfile.open(path, "w:xz", preset=9) as tar:
        for one in sorted(folder.rglob("*")):
            info = tar.gettarinfo(one, str(one.relative_to(folder)))
            info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
            with contextlib.ExitStack() as stack:
                tar.addfile(info, stack.enter_context(one.open("rb")) if one.is_file() else None)


def _print(outcome: Outcome) -> None:
    words = "works" if outcome.works else f"{len(outcome.unequal)} unequal ({'; '.join(outcome.unequal[:3])})"
    print(f"{outcome.case}: {outcome.step}: {outcome.pictures} pictures, {outcome.encoded_again} encoded again, {words}", flush=True)
    for remark in outcome.remarks:
        print(f"    {remark}")


if __name__ == "__main__":
    sys.exit(main())
