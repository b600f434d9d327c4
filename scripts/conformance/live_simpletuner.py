"""Runs SimpleTuner's own caching and reading code from its own files and through `cachestore.live`, and compares.

    python3 scripts/conformance/live_simpletuner.py ~/SimpleTuner [--rounds 30] [--pictures 2392] [--only ROW]

Prints a row for each thing that was looked at, and ends with 1 if one is not as it should be. Models are tiny and random. Small stand-ins
take the place of packages that are not installed (scripts/conformance/live_simpletuner_stands.py). No GPU is needed. The row `trainer`
starts its whole script, which wants more of what it imports (scripts/conformance/live_simpletuner_train.py): install that, or give
`--packages FOLDER`, made with `pip install --no-deps --target FOLDER torchvision trainingsample atomicwrites peft torchao …`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
import numpy as np

RUN, TRAIN = (Path(__file__).parent / name for name in ("live_simpletuner_run.py", "live_simpletuner_train.py"))
_OWN_FILES = 16
_SAMPLES, _PROMPTS = 6, 10
"""Pictures, and captions with those that SimpleTuner adds."""
Row = tuple[str, bool, str]


class Runs:
    """Starts of SimpleTuner over one folder: each in a process of its own, forked from one that has loaded the trainer."""

    def __init__(self, checkout: Path, folder: Path, packages: Sequence[Path] = (), store: str = "store") -> None:
        self.checkout, self.folder, self.packages, self.store, self.count = checkout, folder, packages, store, 0
        self.code, self.reported = 0, ""
        self._loaded: dict[bool, subprocess.Popen[str]] = {}

    def _start(self, live: bool) -> "subprocess.Popen[str]":
        reported = (self.folder / f"reported {self.store} {live}").open("w")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": reported}
        command = [*self._command(live, RUN), str(self.folder)]
        started = self._loaded[live] = subprocess.Popen(command, **pipes, text=True, env=_environment(*self.packages), cwd=self.folder)
        assert started.stdout is not None
        if started.stdout.readline() != "ready\n":
            self.code, self.reported = started.wait(), Path(reported.name).read_text()
        return started

    def _command(self, live: bool, script: Path) -> list[str]:
        front = ["-m", "cachestore.live", "simpletuner", "--store", str(self.folder / self.store), "--name", "run"] if live else []
        return [sys.executable, *front, str(script), str(self.checkout)]

    def train(self, *options: str, live: bool) -> Any:
        """Run the trainer's own script, and return what its steps saw; None if it ended otherwise."""
        out = self.folder / "trained.json"
        out.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "output", ignore_errors=True)
        command = [*self._command(live, TRAIN), str(self.folder), str(out), *options]
        done = subprocess.run(command, text=True, env=_environment(*self.packages), cwd=self.folder, capture_output=True, check=False)
        self.code, self.reported = done.returncode, done.stdout + done.stderr
        return None if self.code else json.loads(out.read_text())

    def __call__(self, task: str, *, live: bool, folder: Path | None = None, **settings: Any) -> Any:
        """Run a task, and return what its JSON says; None if it ended otherwise."""
        self.count += 1
        self.code, self.reported = 0, ""
        process = self._loaded.get(live) or self._start(live)
        if self.code:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        out = self.folder / f"out {self.store} {self.count}"
        command = {
            "task": task,
            "folder": str(folder or self.folder),
            "out": str(out),
            "settings": settings | ({"store": True} if live else {}),
        }
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        self.code = int(process.stdout.readline() or "1")
        self.reported = Path(f"{out}.err").read_text() if Path(f"{out}.err").exists() else ""
        if self.code or not Path(f"{out}.json").exists():
            return None
        found = json.loads(Path(f"{out}.json").read_text())
        return found | {"values": f"{out}.npz"} if task == "train" else found

    def close(self) -> None:
        """End what is loaded."""
        for process in self._loaded.values():
            process.communicate()
        self._loaded.clear()


def _environment(*folders: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), *map(str, folders), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "SIMPLETUNER_SHUFFLE_ASPECTS": "false", "OMP_NUM_THREADS": "1"}


def differing(one: str, other: str) -> list[str]:
    """Return the names of values that are not equal to the bit in both files, and those that one lacks."""
    with np.load(one) as a, np.load(other) as b:
        names = sorted({*a.files} | {*b.files})
        return [
            name
            for name in names
            if name not in a.files
            or name not in b.files
            or (a[name].dtype, a[name].shape, a[name].tobytes()) != (b[name].dtype, b[name].shape, b[name].tobytes())
        ]


def values(runs: Runs) -> Iterator[Row]:
    """Values, second starts, and what a change changes."""
    from conformance.trainers import make_source, tiny_model

    make_source(runs.folder / "data", _SAMPLES, masks=False, controls=False, sizes=(96, 256), lines=True)
    model = tiny_model("sdxl", runs.folder / "model")
    own = runs("train", live=False)
    yield "its own files", own is not None and own["files"] == _OWN_FILES, f"{own}"
    if own is None:
        return
    shutil.rmtree(runs.folder / "cache")
    first = runs("train", live=True)
    yield "first start: all encoded, no cache file", first is not None and _counts(first) == (_PROMPTS, _SAMPLES, 0), _shown(first, runs)
    if first is None:
        return
    yield (
        "values are those of its own files, bit for bit",
        differing(own["values"], first["values"]) == [],
        f"{len(np.load(own['values']).files)} arrays",
    )
    second = runs("train", live=True)
    if second is None:
        yield "second start", False, runs.reported[-800:]
        return
    yield "second start: 0 encodes, 0 cache files", _counts(second) == (0, 0, 0), _shown(second, runs)
    yield "values are those of the first start", differing(first["values"], second["values"]) == [], ""
    caption = runs.folder / "data" / "002.txt"
    caption.write_text("another caption")
    edited = runs("train", live=True)
    yield "one caption edited: 1 text encode", _counts(edited) == (1, 0, 0), _shown(edited, runs)
    picture = runs.folder / "data" / "003.png"
    before = picture.read_bytes()
    _mirror(picture)
    replaced = runs("train", live=True)
    changed = differing(edited["values"], replaced["values"])
    yield "one picture replaced: its latents alone", _counts(replaced) == (0, 1, 0) and changed == ["latents 003.png"], f"{changed}"
    picture.write_bytes(before)
    back = runs("train", live=True)
    yield "the picture put back: 0 encodes", _counts(back) == (0, 0, 0) and differing(edited["values"], back["values"]) == [], ""
    yield from _other_settings(runs, model, edited)


def _other_settings(runs: Runs, model: Path, before: Any) -> Iterator[Row]:
    other = _another_vae(model)
    changes: tuple[tuple[str, dict[str, Any], tuple[int, int, int]], ...] = (
        ("another VAE: latents alone", {"vae": str(other / "vae")}, (0, _SAMPLES, 0)),
        ("another precision of the VAE: latents alone", {"vae_dtype": "bfloat16"}, (0, _SAMPLES, 0)),
        ("another length of tokens: text alone", {"config": {"tokenizer_max_length": 64}}, (_PROMPTS, 0, 0)),
        ("another resolution: latents alone", {"resolution": 64}, (0, _SAMPLES, 0)),
    )
    for what, settings, expected in changes:
        for path in (runs.folder / "data").glob("aspect_ratio_bucket_*.json"):
            path.unlink()
        made = runs("train", live=True, **settings)
        shown = _shown(made, runs)
        shutil.rmtree(runs.folder / "cache", ignore_errors=True)
        for path in (runs.folder / "data").glob("aspect_ratio_bucket_*.json"):
            path.unlink()
        own = runs("train", live=False, **settings)
        yield what, made is not None and _counts(made) == expected and differing(own["values"], made["values"]) == [], shown
        shutil.rmtree(runs.folder / "cache", ignore_errors=True)
    for path in (runs.folder / "data").glob("aspect_ratio_bucket_*.json"):
        path.unlink()
    again = runs("train", live=True)
    yield "the first settings again: 0 encodes", _counts(again) == (0, 0, 0) and differing(before["values"], again["values"]) == [], ""
    unknown = runs("train", live=True, reads="a_new_setting", config={"a_new_setting": 5, "t5_padding": "zero"})
    yield (
        "a setting that is not known is refused by name",
        unknown is None and runs.code == 2 and "a_new_setting" in runs.reported,
        runs.reported[-300:],
    )


_UNFIT = (
    ("a plug point renamed", "text_embeds.py", "def encode_dropout_caption", "def encode_empty_caption", "encode_dropout_caption"),
    ("a plug point of latents renamed", "vae.py", "def encode_images(", "def encode_pictures(", "encode_images"),
    (
        "a reader of text that transposes",
        "text_embeds.py",
        "return self.model.unpack_text_embeddings_from_cache(result)",
        "return {name: one.transpose(-1, -2) for name, one in self.model.unpack_text_embeddings_from_cache(result).items()}",
        "self-test",
    ),
    (
        "a reader of latents that transposes",
        "vae.py",
        "return self.encode_images([None], [filepath])[0]",
        "return self.encode_images([None], [filepath])[0].transpose(-1, -2)",
        "self-test",
    ),
)
"""Checkouts that do not fit: (what, file, old text, new text, word of the message)."""


def refusals(runs: Runs, *, whole: bool = False) -> Iterator[Row]:
    """Checkouts that do not fit, and with `whole` the trainer's own script from them."""
    for what, file, old, new, word in _UNFIT:
        copy = runs.folder / "checkout"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(runs.folder / "refused", ignore_errors=True)
        for part in ("simpletuner", "simpletuner/helpers"):  # links to all but what is changed, and what says where it is
            (copy / part).mkdir(parents=True)
            for path in (runs.checkout / part).iterdir():
                if path.name not in {"helpers", "caching", "train.py"}:
                    (copy / part / path.name).symlink_to(path)
        shutil.copy(runs.checkout / "simpletuner/train.py", copy / "simpletuner/train.py")
        shutil.copytree(runs.checkout / "simpletuner/helpers/caching", copy / "simpletuner/helpers/caching")
        changed = copy / "simpletuner" / "helpers" / "caching" / file
        text = changed.read_text()
        assert old in text, old
        changed.write_text(text.replace(old, new))
        theirs = Runs(copy, runs.folder, runs.packages, "refused")
        made = theirs.train(live=True) if whole else theirs("train", live=True)
        theirs.close()
        entries, words = len(list((runs.folder / "refused").glob("segments/*/*"))), _last_error(theirs.reported)
        good = made is None and theirs.code == 2 and word in theirs.reported and not entries
        yield f"{'its script, ' * whole}{what}: refused with 2, by name, and nothing encoded", good, f"{entries} segments; {words}"


def killed(runs: Runs, rounds: int) -> Iterator[Row]:
    """SEED CASE: 25 prompts on 8 processes, one of them killed."""
    asked: dict[str, Any] = {"ranks": 8, "prompts": 25, "rounds": rounds, "within": 1.0, "slow": 0.1}
    for live in (False, True):
        shutil.rmtree(runs.folder / "cache", ignore_errors=True)
        rows = runs("text", live=live, **asked)
        if rows is None:
            yield "25 prompts on 8 processes", False, runs.reported[-500:]
            return
        launches = [row[launch] for row in rows for launch in ("first", "again")]
        kinds, hung = sorted({kind for one in launches for kind in one["kinds"]}), sum("hung" in row for row in rows)
        sums = {what: [sum(row[launch][what] for row in rows) for launch in ("first", "again")] for what in ("lacks", "encoded", "torn")}
        incomplete = [sum(row[launch]["whole"] < row[launch]["ranks"] for row in rows) for launch in ("first", "again")]
        shown = (
            f"{rounds} rounds, {sum(row['killed'] for row in rows)} killed; rounds in which a rank lacked text when it had made its part:"
            f" {incomplete[0]} ({sums['lacks'][0]} reads), and when all were started again: {incomplete[1]} ({sums['lacks'][1]}); {kinds};"
            f" torn {sums['torn']}; hung {hung}; encoded {sums['encoded']}"
        )
        good = not live or (incomplete == [0, 0] and hung == 0 and not any(one["differ"] for one in launches))
        yield f"25 prompts on 8 processes, {'through live' if live else 'its own files'}", good, shown


def trainer(runs: Runs) -> Iterator[Row]:
    """The trainer's own script, four steps: losses, and what a change changes."""
    runs.folder.mkdir()
    model = _source(runs.folder)
    other = _another_vae(model)
    own = [runs.train(live=False) for _start in range(2)]
    for number, (one, expected) in enumerate(zip(own, ((_PROMPTS, _SAMPLES, _OWN_FILES), None), strict=True), 1):
        yield f"its script, its own files, start {number}", one is not None and expected in (None, _counts(one)), f"{one}"
        if one is None:
            return
    shutil.rmtree(runs.folder / "cache")
    for number, (one, expected) in enumerate(zip(own, ((_PROMPTS, _SAMPLES, 0), (0, 0, 0)), strict=True), 1):
        made = runs.train(live=True)
        good = made is not None and _counts(made) == expected and made["losses"] == one["losses"]
        yield f"its script, start {number}: no cache file, and the losses of its own files, bit for bit", good, _shown(made, runs)
    (runs.folder / "data" / "002.txt").write_text("another caption")
    changes: tuple[tuple[str, tuple[str, ...], tuple[int, int, int]], ...] = (
        ("one caption edited: 1 text encode", (), (1, 0, 0)),
        ("one picture replaced: its latents alone", (), (0, 1, 0)),
        ("another VAE: latents alone", (f"--pretrained_vae_model_name_or_path={other}",), (0, _SAMPLES, 0)),
        ("another precision of the VAE: latents alone", ("--vae_dtype=bf16",), (0, _SAMPLES, 0)),
        ("another length of tokens: text alone", ("--tokenizer_max_length=64",), (_PROMPTS, 0, 0)),
        ("the first settings again: 0 encodes", (), (0, 0, 0)),
    )
    for number, (what, options, expected) in enumerate(changes):
        if number == 1:
            _mirror(runs.folder / "data" / "003.png")
        made = runs.train(*options, live=True)
        yield f"its script, {what}", made is not None and _counts(made) == expected, _shown(made, runs)
    yield from refusals(runs, whole=True)


def _source(folder: Path) -> Path:
    """Make pictures with captions, and a tiny model with a network to train. Returns the model's folder."""
    import torch
    from conformance.trainer_simpletuner_live import UNET
    from conformance.trainers import make_source, tiny_model
    from diffusers import UNet2DConditionModel
    from transformers import AutoConfig

    make_source(folder / "data", _SAMPLES, masks=False, controls=False, sizes=(96, 256), lines=True)
    model = tiny_model("sdxl", folder / "model")
    one, two = (AutoConfig.from_pretrained(model / name) for name in ("text_encoder", "text_encoder_2"))
    torch.manual_seed(0)
    widths = {"cross_attention_dim": one.hidden_size + two.hidden_size}
    widths["projection_class_embeddings_input_dim"] = two.projection_dim + 6 * UNET["addition_time_embed_dim"]
    UNet2DConditionModel(sample_size=16, **widths, **UNET).save_pretrained(model / "unet")
    return model


def _another_vae(model: Path) -> Path:
    from safetensors.torch import load_file, save_file

    [weights] = shutil.copytree(model / "vae", model.parent / "other" / "vae").glob("*.safetensors")
    state = load_file(weights)
    state["encoder.conv_in.weight"] = state["encoder.conv_in.weight"] * 1.5
    save_file(state, weights)
    return model.parent / "other"


def _mirror(picture: Path) -> None:
    from PIL import Image

    with Image.open(picture) as image:
        image.load()
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(picture, compress_level=1)


def pictures(runs: Runs, count: int) -> Iterator[Row]:
    """SEED CASE: many small pictures on 4 processes."""
    from PIL import Image

    data = runs.folder / "many" / "data"
    data.mkdir(parents=True)
    (runs.folder / "many" / "model").symlink_to(runs.folder / "model")
    draw = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(draw.integers(0, 256, (64, 64 if number % 3 else 96, 3), np.uint8)).save(
            data / f"{number:05d}.png", compress_level=1
        )
    for live in (False, True):
        shutil.rmtree(runs.folder / "many" / "cache", ignore_errors=True)
        launches = runs("many", live=live, folder=runs.folder / "many", ranks=4, resolution=64)
        if launches is None:
            yield f"{count} pictures on 4 processes", False, runs.reported[-500:]
            return
        made, lacks = [sum(row[1] for row in rows) for rows in launches], [sum(row[3] for row in rows) for rows in launches]
        good = not live or (made == [count, 0] and lacks == [0, 0] and all(len(rows) == 4 for rows in launches))
        yield (
            f"{count} pictures on 4 processes, {'through live' if live else 'its own files'}",
            good,
            f"encoded {made[0]}, then {made[1]}; lacking {lacks}; at most {max(row[4] for row in launches[0]):.0f} s",
        )


def _counts(run: Any) -> tuple[int, int, int] | None:
    return None if run is None else (run["encoded"]["text"], run["encoded"]["latents"], run["files"])


def _shown(run: Any, runs: Runs) -> str:
    if run is None:
        return runs.reported[-800:]
    found = re.search(r"((latents|text): \d+ reused, \d+ encoded(; )?)+", runs.reported)
    return found[0] if found else ""


def _last_error(reported: str) -> str:
    return next((line for line in reversed(reported.splitlines()) if "error:" in line), reported[-300:])[:200]


def main() -> int:
    """Run the rows. Returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of SimpleTuner")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pictures", type=int, default=2392)
    parser.add_argument("--only", choices=("values", "trainer", "refusals", "killed", "pictures"))
    parser.add_argument("--packages", type=Path, action="append", default=[], help="a folder with packages that the trainer imports")
    parser.add_argument("--keep", type=Path, help="work in this folder, and keep it")
    chosen = parser.parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True, parents=True)
    runs = Runs(chosen.checkout.resolve(), folder, chosen.packages)
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "values": lambda: values(runs),
        "trainer": lambda: trainer(Runs(runs.checkout, folder / "trainer", runs.packages)),
        "refusals": lambda: refusals(runs),
        "killed": lambda: killed(runs, chosen.rounds),
        "pictures": lambda: pictures(runs, chosen.pictures),
    }
    bad = 0
    try:
        if chosen.only not in (None, "values", "trainer"):
            from conformance.trainers import make_source, tiny_model

            if not (folder / "model").exists():
                make_source(folder / "data", _SAMPLES, masks=False, controls=False, sizes=(96, 256), lines=True)
                tiny_model("sdxl", folder / "model")
        for name, part in parts.items():
            if chosen.only in (None, name):
                for what, good, shown in part():
                    bad += not good
                    print(f"{'ok ' if good else 'BAD'}  {what}: {shown}", flush=True)
    finally:
        runs.close()
        if chosen.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
