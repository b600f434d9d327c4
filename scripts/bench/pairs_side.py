"""One side of bench/pairs.py: measures rows with the `cachestore` that PYTHONPATH leads to, this commit's or an older one's.

Reads a JSON object `{"row": NAME, "part": "ours" | "beside"}` from each line of stdin, and answers with `{"rate": RATE}` in a line. Uses
only what both commits have: `cs.precompute`, `cs.open`, `cs.key`, and the two classes that hold loaded models, which it replaces by one
that costs nothing. Start-up is taken off: a small pass is subtracted from a large one.
"""

import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, Literal
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

import cachestore as cs

Part = Literal["ours", "beside"]
MIB: Final = 1 << 20
FEW: Final = 8
"""Samples of the small pass."""
QUALITY: Final = 92
CAPTION_WORDS, VOCABULARY = 72, 2_000
T5_ROWS, T5_WIDTH = 512, 4096
VAE_TIMES: Final = 15.0
"""What the VAE costs, in pictures that are decoded and resized."""
VAE_WIDTHS: Final = ((4, 4, 4, 4), (4, 8, 8, 8), (8, 8, 8, 8), (8, 8, 16, 16), (8, 16, 16, 16), (12, 16, 16, 16), (16, 16, 32, 32))
MAP_BYTES: Final = 1 << 32
ENTRIES_IN_SEGMENT: Final = 4_096
BYTES_IN_SEGMENT: Final = 64 << 20
"""A segment ends with either. They are said here, as an earlier commit may not have them."""
SYNCS_OF_STORE, SYNCS_OF_SEGMENT, SYNCS_OF_TRANSACTION = 6, 3, 2
"""How often a new store, a segment, and a transaction of LMDB sync."""


@dataclass(slots=True)
class Side:
    """Where one side works. `common` is the folder of both sides, `own` this side's, `memory` its folder on tmpfs."""

    common: Path
    own: Path
    memory: Path
    made: dict[str, Any] = field(default_factory=dict[str, Any])
    """What rows use again."""

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned the first time."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


def seconds(work: Callable[[], object]) -> float:
    """How long a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# Passes


@contextmanager
def free_model() -> Generator[None]:
    """Within the block models cost nothing: they give the same tensors for every unit of a size."""
    from cachestore.encode.pictures import vae
    from cachestore.encode.text import prompts

    before = vae.Vae, prompts.TextModules
    vae.Vae, prompts.TextModules = _Free, _Free
    try:
        yield
    finally:
        vae.Vae, prompts.TextModules = before


class _Free:
    is_single = is_whole = False
    found_bytes = None

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self._made: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

    def submit(self, batch: Sequence[tuple[Any, Any]], _took: Any = None) -> Callable[[], dict[Any, Any]]:
        shape = T5_ROWS, T5_WIDTH
        if isinstance(batch[0][1], np.ndarray):
            height, width, _colours = batch[0][1].shape
            shape = 32, height // 8, width // 8
        if shape not in self._made:
            self._made[shape] = {"values": torch.randn(shape).bfloat16()}
        return lambda: dict.fromkeys((key for key, _payload in batch), self._made[shape])


def pass_seconds(source: Path, model: Path, kind: str, folder: Path, expected: int) -> float:
    """How long a pass into a new store takes. Raises RuntimeError if it did not encode everything.

    The store's segments are removed. Its small files stay: while thousands are newly deleted, ext4 takes up to 0.6 ms instead of 0.02 to
    make another.
    """
    store = Path(mkdtemp(prefix="store-", dir=folder)) / "store"
    try:
        began = time.perf_counter()
        report = cs.precompute(source, model=model, store=store, encode=(kind,), device="cpu", inline=True)
        took = time.perf_counter() - began
    finally:
        shutil.rmtree(store / "segments", ignore_errors=True)
    if report.failures or report.encoded < expected:
        raise RuntimeError(f"{report.encoded} of {expected} were encoded: {report.failures[:1]}")
    return took


def grown(folder: Path, model: Path, kind: str, sources: tuple[Path, Path], more: int) -> float:
    """Samples a second: `more` is how many samples the second source has beyond the FEW of the first."""
    few, many = sources
    small = pass_seconds(few, model, kind, folder, FEW)
    return more / (pass_seconds(many, model, kind, folder, FEW + more) - small)


def pictures(side: Side, width: int, height: int, count: int) -> Path:
    """A folder of JPEGs, all of different bytes, about as large as photographs of their size."""
    folder = side.common / f"{width}x{height}-{count}"
    if not folder.exists():
        folder.mkdir()
        coarse = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        first = folder / "first"
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(first, "JPEG", quality=QUALITY)
        data = first.read_bytes()
        first.unlink()
        for number in range(count):
            comment = b"%08d" % number
            marked = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
            (folder / f"{number:06}.jpg").write_bytes(data[:2] + marked + data[2:])
    return folder


def vae_folder(side: Side, widths: Sequence[int] = VAE_WIDTHS[0]) -> Path:
    """A small VAE with random weights, saved."""
    folder = side.common / "vae-{}".format("-".join(map(str, widths)))
    if not folder.exists():
        _vae(widths).save_pretrained(folder)
    return folder


def _vae(widths: Sequence[int]) -> Any:
    import diffusers

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "block_out_channels": tuple(widths),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 16,
        "mid_block_add_attention": False,
    }
    return diffusers.AutoencoderKL(**shape).eval()


def text_folder(side: Side) -> Path:
    """A small T5 with a tokenizer of whole words, saved."""
    folder = side.common / "text"
    if not folder.exists():
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

        vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(VOCABULARY)}}
        words: Any = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=T5_ROWS, **special).save_pretrained(folder)
        config = T5Config(
            vocab_size=len(vocabulary), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
        )
        T5EncoderModel(config).eval().save_pretrained(folder)
    return folder


def captions(side: Side, count: int) -> Path:
    """A list of different prompts."""
    path = side.common / f"captions-{count}.txt"
    if not path.exists():
        draw = random.Random(0)
        lines = [" ".join(f"w{draw.randrange(VOCABULARY)}" for _word in range(CAPTION_WORDS)) for _caption in range(count)]
        path.write_text("\n".join(lines) + "\n")
    return path


def host_pictures(side: Side, _part: Part, *, width: int, height: int, more: int, pillow: bool = False) -> float:
    """JPEGs a second with a VAE that costs nothing."""
    from cachestore.encode.pictures import images

    sources = pictures(side, width, height, FEW), pictures(side, width, height, FEW + more)
    with free_model(), patch.object(images, "_fast_decoder", lambda: None) if pillow else nullcontext():
        return grown(side.own, vae_folder(side), "latents", sources, more)


def host_captions(side: Side, part: Part, *, on_disk: bool, more: int) -> float:
    """MiB a second of captions with a text encoder that costs nothing; beside it `dd` with one sync writes the same bytes."""
    folder, mib = side.own if on_disk else side.memory, T5_ROWS * T5_WIDTH * 2 / MIB
    if part == "beside":
        path, blocks = folder / "dd", round(more * mib / 4)
        try:
            command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={blocks}", "conv=fsync"]
            return blocks * 4 / seconds(lambda: subprocess.run(command, check=True, stderr=subprocess.DEVNULL))
        finally:
            path.unlink(missing_ok=True)
    with free_model():
        return mib * grown(folder, text_folder(side), "text", (captions(side, FEW), captions(side, FEW + more)), more)


def whole_pictures(side: Side, part: Part, *, more: int) -> float:
    """JPEGs of 1024x1024 a second with a VAE that costs 15 times what decoding and resizing one does; beside it the VAE alone."""
    sources = pictures(side, 1024, 1024, FEW), pictures(side, 1024, 1024, FEW + more)
    widths = _fitting(side, sources[0])
    if part == "ours":
        model = vae_folder(side, widths)
        side.once("libraries loaded", lambda: pass_seconds(sources[0], model, "latents", side.own, FEW))
        return grown(side.own, model, "latents", sources, more)
    vae = side.once("vae", lambda: _vae(widths).to(memory_format=torch.channels_last))
    batch = torch.rand(1, 3, 1024, 1024) * 2 - 1
    with torch.inference_mode():
        vae.encode(batch)
        return more / seconds(lambda: [vae.encode(batch).latent_dist.parameters for _picture in range(more)])


def _fitting(side: Side, few: Path) -> Sequence[int]:
    """The widths of the smallest VAE that costs VAE_TIMES pictures. The first side that asks decides for both."""
    chosen = side.common / "fitting.json"
    if not chosen.exists():
        from cachestore.encode.pictures import images

        data = next(few.iterdir()).read_bytes()
        decode = min(seconds(partial(images.decode, data)) for _time in range(9))
        batch, times, widths = torch.rand(1, 3, 1024, 1024), 0.0, VAE_WIDTHS[0]
        for widths in VAE_WIDTHS:
            vae = _vae(widths).to(memory_format=torch.channels_last)
            with torch.inference_mode():
                times = min(seconds(lambda vae=vae: vae.encode(batch)) for _time in range(3)) / decode
            if times >= VAE_TIMES:
                break
        chosen.write_text(json.dumps({"widths": widths, "times": round(times, 1)}))
    return json.loads(chosen.read_text())["widths"]


# Small entries


def write_entries(side: Side, part: Part, *, size: int, few: int, more: int) -> float:
    """Entries a second that are written; beside them LMDB with transactions that sync as often.

    The time of a store of `few` is taken off. Each call runs in a process of its own, as LMDB is faster where malloc has kept memory from
    earlier work.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(_write_rate, side.own / "written", part, size, few, more).result()


def _write_rate(folder: Path, part: Part, size: int, few: int, more: int) -> float:
    values = [random.Random(number).randbytes(size) for number in range(512)]
    keys = [cs.key(str(number)) for number in range(few + more)]

    def write(count: int) -> float:
        segments = -(-count // min(ENTRIES_IN_SEGMENT, BYTES_IN_SEGMENT // size))
        transactions = (SYNCS_OF_STORE + SYNCS_OF_SEGMENT * segments) // SYNCS_OF_TRANSACTION
        put = partial(_put_in_lmdb, transactions=transactions) if part == "beside" else _put
        return seconds(lambda: put(folder / str(count), keys[:count], values))

    try:
        write(1)  # imports
        startup = write(few)
        return more / (write(few + more) - startup)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(folder: Path, keys: Sequence[Any], values: Sequence[bytes], shape: tuple[int, ...] = (-1,)) -> None:
    arrays = [np.frombuffer(value, dtype=np.float16).reshape(shape) for value in values]
    with cs.open(folder, mode="a") as store, store.writer() as writer:
        for number, key in enumerate(keys):
            writer.put(key, {"x": arrays[number % len(arrays)]})


def _put_in_lmdb(folder: Path, keys: Sequence[Any], values: Sequence[bytes], transactions: int = 1) -> None:
    import lmdb

    folder.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(folder), map_size=MAP_BYTES) as environment:
        at_once = -(-len(keys) // transactions)
        for start in range(0, len(keys), at_once):
            with environment.begin(write=True) as transaction:
                for number in range(start, min(len(keys), start + at_once)):
                    transaction.put(bytes(keys[number]), values[number % len(values)])


def get_entries(side: Side, part: Part, *, size: int, count: int) -> float:
    """Entries a second that are read one by one as tensors; beside them values of LMDB, whose bytes are copied too.

    Each read of ours is followed by one of LMDB, so that neither finds the processor's cache as it left it. Rates are of the median time.
    """
    ready: dict[str, float] = side.made.setdefault(f"gets {size}", {})
    if part not in ready:
        ready.update(_get_both(side.own, size, count))
    return ready.pop(part)


def _get_both(folder: Path, size: int, count: int) -> dict[str, float]:
    import lmdb

    keys = [cs.key(str(number)) for number in range(count)]
    shape = 4, size // 512, 64  # of the tensor in 16 bits
    ours, theirs = folder / f"got {size}", folder / f"got {size} by LMDB"
    if not ours.exists():
        values = [random.Random(number).randbytes(size) for number in range(512)]
        _put(ours, keys, values, shape)
        _put_in_lmdb(theirs, keys, values)
    with cs.open(ours) as store, lmdb.open(str(theirs), lock=False, readonly=True, readahead=False, max_spare_txns=1) as environment:

        def get(key: Any) -> dict[str, torch.Tensor]:
            with environment.begin(buffers=True) as reading:
                raw = bytearray(reading.get(bytes(key), b""))
            flat = torch.frombuffer(raw, dtype=torch.float16)
            return {"x": flat[: int(np.prod(shape))].view(shape)}

        for key in keys:
            store.get(key)
            get(key)
        order = random.Random(1).choices(keys, k=4 * count)
        times = [(seconds(lambda key=key: store.get(key)), seconds(lambda key=key: get(key))) for key in order]
    return {"ours": 1 / statistics.median(one for one, _ in times), "beside": 1 / statistics.median(other for _, other in times)}


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured."""

    unit: str
    measure: Callable[[Side, Part], float]
    beside: str = ""
    """What is measured beside it; empty for nothing."""
    warms_up: bool = True
    """Whether a first pair is left out. A long row has no need of one, as its start-up is taken off."""


PHOTOS: Final = {"width": 3000, "height": 2000, "more": 40}
ROWS: Final = {
    "jpeg 3000x2000 to 1216x832": Row("pictures/s", partial(host_pictures, **PHOTOS)),
    "the same, decoded by Pillow": Row("pictures/s", partial(host_pictures, **PHOTOS, pillow=True)),
    "jpeg 2048x2048 to 1024x1024": Row("pictures/s", partial(host_pictures, width=2048, height=2048, more=40)),
    "jpeg 1024x1024": Row("pictures/s", partial(host_pictures, width=1024, height=1024, more=320)),
    "captions of 512x4096 bf16, disk": Row("MiB/s", partial(host_captions, on_disk=True, more=240), "dd bs=4M conv=fsync"),
    "captions of 512x4096 bf16, tmpfs": Row("MiB/s", partial(host_captions, on_disk=False, more=240), "dd bs=4M conv=fsync"),
    "pictures with a VAE": Row("pictures/s", partial(whole_pictures, more=600), "the VAE alone", warms_up=False),
    "write 32 KiB": Row("entries/s", partial(write_entries, size=32 << 10, few=8_192, more=24_576), "LMDB, as many syncs"),
    "write 1.5 KiB": Row("entries/s", partial(write_entries, size=3 << 9, few=40_960, more=122_880), "LMDB, as many syncs"),
    "get 32 KiB": Row("entries/s", partial(get_entries, size=32 << 10, count=2_048), "LMDB value"),
    "get 1.5 KiB": Row("entries/s", partial(get_entries, size=3 << 9, count=4_096), "LMDB value"),
}


def decoder() -> str:
    """What decodes JPEGs here."""
    from cachestore.encode.pictures import images

    return "Pillow" if vars(images)["_fast_decoder"]() is None else "simplejpeg"


def main(arguments: Sequence[str]) -> int:
    """Answer each line of stdin. What libraries print goes to stderr."""
    common, own, memory = map(Path, arguments)
    side = Side(common, own, memory)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print(json.dumps({"package": str(Path(cs.__file__).parent), "decoder": decoder()}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            rate = ROWS[asked["row"]].measure(side, asked["part"])
            print(json.dumps({"rate": rate}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
