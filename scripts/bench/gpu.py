"""How near each encoder comes to what the card can do: `python3 scripts/bench/gpu.py [--tiny] [--json FILE]`.

One command of at most 8 minutes on a machine with torch and an NVIDIA GPU. Models have random weights and real sizes; nothing is
downloaded. Each is measured as `precompute` runs it today, and in other ways: another layout in memory, TF32, bfloat16, compiled. For each
way: samples a second of the encoder alone and of the whole, TFLOP/s of the encoder alone, their share of the card's peak, and how far its
values are from today's. FLOPs are counted once for each model, in today's way. The peak is measured here: the product of two square
matrices in the same dtype.

A row is printed, and with `--json` written to the file, as soon as it is measured. A way that fails is named, and the others go on.
With `--tiny` everything is small and runs on the CPU; its figures mean nothing.

The script runs with the Python that starts it if that has torch, as no environment can be made on a machine without a package index;
what else is missing there, pip's message names.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

if __name__ == "__main__" and find_spec("torch") is None:
    environment.enter()
sys.path.insert(0, str(environment.ROOT))

import argparse
import gc
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import torch
from bench.models import MODELS, tiny
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cachestore.care.bench import CAPTIONS, PHOTOS, Kept, Passes, Work
from cachestore.core.keys import Key
from cachestore.encode.batching.environment import set_library_defaults
from cachestore.encode.families.resamplers import RESAMPLERS
from cachestore.encode.models.random_model import RandomModel, RandomSize, random_model
from cachestore.encode.pictures import vae

MINUTES: Final = 7.0
"""After them no further row is begun."""
SECONDS: Final = 1.5
"""How long the largest pass of a row, and the encoder alone, take at least."""
PEAK_SIDE, TINY_SIDE = 8192, 256
"""Rows and columns of the matrices that measure the peak."""
TINY_RESOLUTION: Final = 128
TERA: Final = 1e12


@contextmanager
def tf32() -> Generator[None]:
    """Let products of float32 matrices use TF32; convolutions do so anyway."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class ChannelsLast(vae.Vae):
    """A VAE whose weights and pixels have the channels last."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._memory_format = torch.channels_last
        for module in self._vae.modules():
            for weight in module.parameters(recurse=False):
                if weight.ndim in _LAST:
                    weight.data = weight.data.to(memory_format=_LAST[weight.ndim])


_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Formats by the number of dimensions."""


def channels_last() -> AbstractContextManager[Any]:
    """Load VAEs with channels last."""
    return mock.patch.object(vae, "Vae", ChannelsLast)


def normalise(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """Return GroupNorm of x [N, C, H, W] with channels last, which the result has too. Statistics are in float32.

    A group's variance is the mean of its channels' variances plus the variance of their means, as all channels have as many pixels.
    """
    count, channels, height, width = x.shape
    rows = x.permute(0, 2, 3, 1).reshape(count, height * width, channels).float()
    variances, means = torch.var_mean(rows, dim=1, correction=0)
    of_groups = means.view(count, groups, -1)
    mean = of_groups.mean(dim=-1, keepdim=True)
    variance = (variances.view(count, groups, -1) + (of_groups - mean).square()).mean(dim=-1, keepdim=True)
    scale = weight.float().view(1, groups, -1) * (variance + eps).rsqrt()
    shift = bias.float().view(1, groups, -1) - mean * scale
    made = rows * scale.reshape(count, 1, channels) + shift.reshape(count, 1, channels)
    return made.to(x.dtype).view(count, height, width, channels).permute(0, 3, 1, 2)


def _compiled(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """Compile for a GPU. On a CPU the function is traced alone: no compiler is needed, and nothing gets faster."""
    backend = "inductor" if torch.cuda.is_available() else "eager"
    return torch.compile(function, dynamic=dynamic, backend=backend)


@contextmanager
def kept_by_norm(model: RandomModel) -> Generator[None]:
    """As `channels_last`, with GroupNorms that keep the layout: torch's own answers with channels first on a GPU."""
    fast = _compiled(normalise, dynamic=True)
    norms = [module for module in model.parts["vae"].modules() if isinstance(module, nn.GroupNorm)]
    if not norms:
        raise NotForIt("it has no GroupNorm")

    def forward_of(norm: nn.GroupNorm) -> Callable[[Tensor], Tensor]:
        weight, bias = norm.weight.detach(), norm.bias.detach()  # for parameters of each size torch would compile anew

        def forward(x: Tensor) -> Tensor:
            if x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
                return nn.GroupNorm.forward(norm, x)
            return fast(x, weight, bias, norm.num_groups, norm.eps)

        return forward

    with channels_last(), ExitStack() as stack:
        for norm in norms:
            stack.enter_context(_forward(norm, forward_of(norm)))
        yield


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Give a module another forward; the old one comes back."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _compiled_at(module: nn.Module, size: int) -> AbstractContextManager[None]:
    """Compile a module's forward for batches of one size. All others, such as a probe's, run as they are."""
    slow, fast = module.forward, _compiled(module.forward)

    def forward(*given: Any, **named: Any) -> Any:
        first = given[0] if given else next(iter(named.values()))
        return (fast if len(first) == size else slow)(*given, **named)

    return _forward(module, forward)


def compiled_encoder(model: RandomModel, size: int) -> AbstractContextManager[None]:
    """Compile the VAE's encoder for batches of one size."""
    return _compiled_at(model.parts["vae"].encoder, size)


@contextmanager
def compiled_blocks(model: RandomModel, size: int) -> Generator[None]:
    """Compile one block of each text encoder for batches of one size; all blocks of an encoder run the same code."""
    texts = [part for name, part in model.parts.items() if name != "vae" and isinstance(part, nn.Module)]
    lists = [[one for one in text.modules() if isinstance(one, nn.ModuleList) and len(one) > 1] for text in texts]
    blocks = [block for found in lists for block in max(found, key=_weights)]
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_compiled_at(block, size))
        yield


def _weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


class NotForIt(Exception):
    """A way does not concern a model, or the time is over."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run an encoder."""

    name: str
    kinds: tuple[str, ...]
    apply: Callable[[RandomModel, int], AbstractContextManager[Any]]
    """Gets the model and the number of samples in a batch."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Of the encoders for which it is measured."""
    runs_in: torch.dtype | None = None
    """The dtype to which the encoder's weights are converted; None: as they are."""
    is_tf32: bool = False


WAYS: Final = (
    Way("today", ("latents", "text"), lambda _model, _size: nullcontext()),
    Way("TF32", ("latents", "text"), lambda _model, _size: tf32(), (torch.float32,), is_tf32=True),
    Way("channels last", ("latents",), lambda _model, _size: channels_last()),
    Way("channels last, GroupNorm keeps it", ("latents",), lambda model, _size: kept_by_norm(model)),
    Way("compiled VAE", ("latents",), compiled_encoder),
    Way("one block compiled", ("text",), compiled_blocks),
    Way("bfloat16", ("text",), lambda _model, _size: nullcontext(), (torch.float32,), torch.bfloat16),
)

KINDS: Final[Mapping[str, tuple[Work, ...]]] = {
    "sdxl": (PHOTOS, CAPTIONS),
    "flux": (PHOTOS, CAPTIONS),
    "wan": (PHOTOS, CAPTIONS),
    "lumina2": (CAPTIONS,),
    "krea2": (CAPTIONS,),
}
"""What is measured of each model. The VAEs of Lumina 2 and Krea 2 are those of FLUX.1 and nearly Wan's."""


@dataclass(slots=True)
class Row:
    """One way to run one encoder; `reason` says why it was not measured."""

    model: str
    work: str
    way: str
    dtype: str = ""
    """The one whose peak counts: `bfloat16`, `float32` or `tf32`."""
    batch: int = 0
    encoder_per_second: float = 0.0
    whole_per_second: float = 0.0
    gflop_each: float = 0.0
    tflops: float = 0.0
    """Of the encoder alone."""
    peak_fraction: float = 0.0
    difference: float = 0.0
    """Root mean square of the difference to today's values, divided by that of today's values."""
    limiting: str = ""
    seconds: float = 0.0
    """What measuring took, with loading and compiling."""
    reason: str = ""

    @property
    def line(self) -> str:
        """The row in the table under HEAD."""
        if self.reason:
            return f"| {self.model} | {self.work} | {self.way} | not measured: {self.reason} |||||||"
        rates = f"{self.encoder_per_second:.1f}/s", f"{self.whole_per_second:.1f}/s", f"{self.gflop_each:,.4g}", f"{self.tflops:.1f}"
        peak, far = f"{100 * self.peak_fraction:.0f} % of {self.dtype}", f"{self.difference:.1e}"
        return f"| {' | '.join((self.model, self.work, self.way, str(self.batch), *rates, peak, far))} |"


HEAD = (
    "| model | work | way | batch | encoder alone | whole | GFLOP each | TFLOP/s | share of the peak | difference |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def measured_peaks(device: torch.device, side: int) -> dict[str, float]:
    """FLOP/s of the product of two square matrices, by dtype: the best of ten."""
    return {
        "bfloat16": _product(device, side, torch.bfloat16),
        "float32": _product(device, side, torch.float32),
        "tf32": _product(device, side, torch.float32, tf32()),
    }


def _product(device: torch.device, side: int, dtype: torch.dtype, within: AbstractContextManager[None] | None = None) -> float:
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    times: list[float] = []
    with within or nullcontext():
        for _time in range(10):
            _wait(device)
            began = time.perf_counter()
            torch.mm(matrix, matrix)
            _wait(device)
            times.append(time.perf_counter() - began)
    return 2 * side**3 / min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Bench:
    """Measures rows, prints them and keeps them in a file."""

    device: torch.device
    folder: Path
    resample: Any
    options: dict[str, Any]
    """More options of `precompute`, by name."""
    seconds: float
    until: float
    """On time.monotonic: after it no row is begun."""
    about: dict[str, Any]
    peaks: Mapping[str, float]
    file: Path | None = None
    rows: list[Row] = field(default_factory=list[Row])
    failed: list[Row] = field(default_factory=list[Row])

    def measure(self, size: RandomSize, work: Work) -> None:
        """Measure all ways of a model that concern this work."""
        loaded = _Loaded(size.vae_dtype if work.kind == "latents" else size.text_dtype)
        for way in WAYS:
            if work.kind not in way.kinds or loaded.own_dtype not in way.dtypes:
                continue
            row, began = Row(size.name, work.name, way.name), time.monotonic()
            if began > self.until:
                row.reason = "the time was over"
            elif loaded.today is None and way is not WAYS[0]:
                row.reason = "today's way failed"
            else:
                self._try(row, way, loaded, size, work)
            row.seconds = round(time.monotonic() - began, 1)
            self._add(row)

    def _try(self, row: Row, way: Way, loaded: "_Loaded", size: RandomSize, work: Work) -> None:
        try:
            loaded.make(size, work, way.runs_in or loaded.own_dtype, self.device)
            self._measure(row, way, loaded, work)
        except NotForIt as error:
            row.reason = str(error)
        except Exception as error:  # noqa: BLE001 - a compiler or a model may raise anything; the other rows are still measured
            row.reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            self.failed.append(row)
        finally:
            torch.compiler.reset()
            _free()

    def _measure(self, row: Row, way: Way, loaded: "_Loaded", work: Work) -> None:
        """Fill in a row. Today's way finds the size of its batches in a pass; the others have batches of the same size.

        What they compile is compiled before a pass, in which it would count.
        """
        today, model = loaded.today, loaded.model
        assert model is not None
        size = 0 if today is None else today.batch
        options = self.options | ({"batch_size": size} if size else {})
        with TemporaryDirectory(dir=self.folder) as name, model.evaluating(), way.apply(model, size):
            passes = Passes(
                Path(name), model, str(self.device), self.resample, Kept, _say, threading.Event(), options=options, seconds=self.seconds
            )
            whole = passes.measure(work) if today is None else None
            alone = passes.measure_alone(work)
            whole = whole or passes.measure(work)
            encoder, batch = passes.ready_batch(work)
            values = _values(encoder, batch)
            today = today or _Today(len(batch), _gflop(encoder, batch[:1]), values)
            passes.close()
        loaded.today = today
        row.dtype = "tf32" if _uses_tf32(work, way, loaded.dtype) else str(loaded.dtype).removeprefix("torch.")
        row.batch, row.limiting = len(batch), whole.limiting
        row.encoder_per_second, row.whole_per_second = alone.per_second, whole.per_second
        row.gflop_each = round(today.gflop, 4)
        row.tflops = round(today.gflop * 1e9 * alone.per_second / TERA, 4)
        row.peak_fraction = round(row.tflops * TERA / self.peaks[row.dtype], 4)
        row.difference = _difference(values, today.values)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.line, flush=True)
        if self.file is not None:
            text = json.dumps({**self.about, "peaks": self.peaks, "rows": [asdict(one) for one in self.rows]}, indent=1)
            self.file.with_name(f".{self.file.name}").write_text(text + "\n", encoding="utf-8")
            self.file.with_name(f".{self.file.name}").replace(self.file)


@dataclass(frozen=True, slots=True)
class _Today:
    """What today's way says of an encoder."""

    batch: int
    gflop: float
    """Of one sample."""
    values: Mapping[str, Tensor]


@dataclass(slots=True)
class _Loaded:
    """The part of a model that does one work."""

    own_dtype: torch.dtype
    """The one in which `precompute` runs it."""
    model: RandomModel | None = None
    dtype: torch.dtype | None = None
    """Of the model's weights."""
    today: _Today | None = None

    def make(self, size: RandomSize, work: Work, dtype: torch.dtype, device: torch.device) -> None:
        """Make the model, unless it is there in this dtype."""
        if self.model is not None and self.dtype == dtype:
            return
        self.model = None
        _free()
        names = [name for name in size.modules if (name == "vae") == (work.kind == "latents")]
        part = replace(size, modules={name: size.modules[name] for name in names}, text_dtype=dtype, vae_dtype=dtype)
        self.model, self.dtype = random_model(part, device), dtype


def _uses_tf32(work: Work, way: Way, dtype: torch.dtype | None) -> bool:
    """Whether the peak of TF32 counts: torch uses it for float32 convolutions, which are most of a VAE."""
    return dtype == torch.float32 and (way.is_tf32 or work.kind == "latents")


def _values(encoder: Kept, batch: Sequence[tuple[Key, Any]]) -> dict[str, Tensor]:
    """The first entry of a batch, in float32."""
    entry = encoder.submit(batch)()[batch[0][0]]
    return {name: value.float() for name, value in entry.items() if isinstance(value, Tensor) and value.is_floating_point()}


def _difference(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest of the entry's tensors. Raises KeyError or RuntimeError if names or shapes differ."""
    ratios = [(values[name] - other).square().mean().sqrt() / other.square().mean().sqrt() for name, other in others.items()]
    return float(max(ratios))


def _gflop(encoder: Kept, batch: Sequence[tuple[Key, Any]]) -> float:
    """1e9 floating-point operations of one sample: products of matrices, convolutions and attention, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        encoder.submit(batch)()
    return counter.get_total_flops() / len(batch) / 1e9


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _digest(name: str, module: nn.Module) -> str:
    """In place of the SHA-256 of random weights, which takes seconds for each gigabyte."""
    return f"{name} of {_weights(module)} random numbers"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print. Ends with 1 if a row that concerns its model was not measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU: whether everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all rows here, written anew after each")
    parser.add_argument("--only", choices=KINDS, action="append", help="this model alone; may be repeated")
    parser.add_argument("--resample", choices=RESAMPLERS, default="bicubic", help="default: %(default)s, which every torch has")
    parser.add_argument("--folder", type=Path, help="where temporary files lie (default: TMPDIR)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after them no further row is begun (default: %(default)s)")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    if not asked.tiny and not torch.cuda.is_available():
        sys.exit("torch sees no NVIDIA GPU here; `--tiny` shows on the CPU that everything runs")
    set_library_defaults(os.environ)
    device = torch.device("cpu" if asked.tiny else "cuda")
    card = "CPU, tiny models" if asked.tiny else torch.cuda.get_device_name(device)
    about = {"card": card, "torch": torch.__version__, "resample": asked.resample}
    peaks = measured_peaks(device, TINY_SIDE if asked.tiny else PEAK_SIDE)
    print(f"{card}, torch {torch.__version__}, --resample {asked.resample}")
    print("peaks:", ", ".join(f"{name} {rate / TERA:.2f} TFLOP/s" for name, rate in peaks.items()))
    print("", *HEAD, sep="\n", flush=True)
    with (
        TemporaryDirectory(prefix="cachestore-gpu-", dir=asked.folder) as folder,
        mock.patch("cachestore.encode.models.loaded.digest_state", _digest),
    ):
        options, seconds = ({"resolution": TINY_RESOLUTION}, 0.0) if asked.tiny else ({}, SECONDS)
        until = began + 60 * asked.minutes
        bench = Bench(device, Path(folder), asked.resample, options, seconds, until, about, peaks, asked.json)
        for name, works in KINDS.items():
            if name in (asked.only or KINDS):
                for work in works:
                    bench.measure(tiny(MODELS[name]) if asked.tiny else MODELS[name], work)
    print(f"\n{len(bench.rows)} rows in {time.monotonic() - began:.0f} s", flush=True)
    if bench.failed:
        sys.exit(f"{len(bench.failed)} rows could not be measured; each says why")


if __name__ == "__main__":
    main()
