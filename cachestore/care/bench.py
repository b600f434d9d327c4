"""`cachestore bench`: how many pictures and captions this machine encodes in a second, and which stage limits it.

There are three kinds of rates: of the host with an encoder that costs nothing, of the encoder alone, and of the whole. The first and the
last come from real passes over made-up samples into temporary stores. What a pass does once (planning, the catalog) is taken off: the
times of a small and a large pass are subtracted. Loads torch.
"""

import os
import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, Final, Literal

from cachestore.care.bench_samples import list_captions, list_pictures, write_jpeg
from cachestore.core.errors import BadInput, EncodeFailed, Incomplete
from cachestore.core.keys import KEY_BYTES, Json, Key, Recipe
from cachestore.core.ranks import RankInfo
from cachestore.encode.batching.environment import set_library_defaults
from cachestore.encode.batching.unit import Encoder, Prepared, Read, Resolved, Result
from cachestore.encode.families.resamplers import DEFAULT, Resample
from cachestore.files.opening import free_bytes
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.plan.options import LOADED, PrecomputeRequest
from cachestore.jobs.plan.planning import Planned, plan_request, publish_if_new
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.task import Cancel, Job, UnitReader
from cachestore.jobs.share.report import Report
from cachestore.jobs.share.workers import host_name
from cachestore.jobs.start.processes import processors
from cachestore.jobs.start.ranks import Say, threads_for
from cachestore.store.write.commit import create_store
from cachestore.store.write.model_digests import load_digests, publish_digests

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel

Kind = Literal["latents", "text"]

SECONDS: Final = 4.0
"""Passes grow until one takes this long."""
FIRST_COUNT: Final = 8
"""Samples of the smallest pass."""
MOST_BYTES: Final = 1 << 30
"""About the most bytes that one pass writes; never more than a quarter of the free space."""
BATCH: Final = 8
"""Pictures or captions in a batch of the encoder that costs nothing."""
CAPTION_WORDS: Final = 72
MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Work:
    """What a row measures."""

    name: str
    kind: Kind
    size: tuple[int, int] = (0, 0)
    """(width, height) of the JPEGs, which are encoded at a resolution of 1024."""


PHOTOS: Final = Work("jpeg 3000x2000 to 1216x832", "latents", (3000, 2000))
CAPTIONS: Final = Work("captions", "text")
T5_CAPTIONS: Final = Work("captions of 512x4096 bf16", "text")
HOST: Final = (
    PHOTOS,
    Work("jpeg 2048x2048 to 1024x1024", "latents", (2048, 2048)),
    Work("jpeg 1024x1024", "latents", (1024, 1024)),
    T5_CAPTIONS,
)
T5_SHAPE: Final = (512, 4096)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured rate."""

    work: str
    per_second: float
    cores: int
    """Processors that this process may use."""
    limiting: str = ""
    """The stage that was busiest; empty for an encoder alone."""
    bytes_each: int = 0
    """Bytes of an entry; 0 for an encoder alone."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What `cachestore bench --json` prints."""

    model: str
    """What was measured; empty for the host alone."""
    device: str
    host: tuple[Row, ...]
    encoder: tuple[Row, ...]
    whole: tuple[Row, ...]
    limiting: str
    """The stage that limits photographs, or captions if the model has no VAE: in the whole, or in the host if it alone was measured."""
    million: Mapping[str, float]
    """What a million photographs with one caption each take: `hours` on one device, and `bytes`."""
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Json]:
        """Return the report as one JSON object."""
        return asdict(self) | {"remarks": list(self.remarks)}


def bench(
    model: str | None,
    *,
    device: str,
    host_only: bool,
    folder: Path | None,
    say: Say,
    cancel: Cancel,
    resample: Resample = DEFAULT,
) -> BenchReport:
    """Measure this machine. Temporary files lie in `folder`, else in TMPDIR, and are removed. `say` gets lines about the progress.

    Without a `model`, one with random weights is measured: FLUX.1's real sizes on a GPU with room for them, else a tiny one. Pictures are
    resized by `resample`.

    Raises BadInput for a model or device that cannot be used, MissingExtra without the extra [encode], Incomplete once `cancel` is set.
    """
    set_library_defaults(os.environ)
    from cachestore.encode.models import random_model
    from cachestore.encode.models.modules import choose_device

    cpu, chosen = choose_device("cpu"), choose_device("cpu" if host_only else device)
    with scratch_folder(folder) as scratch:
        given = None if model is None else Passes(scratch, model, str(chosen), resample, Kept, say, cancel)
        if given is not None:
            given.works()  # raises now, before anything is measured
        tiny = random_model.random_model(random_model.TINY, cpu)
        with tiny.evaluating():
            host = [Passes(scratch, tiny, "cpu", resample, _Free, say, cancel).measure(work) for work in HOST]
        if host_only:
            return _report("", "cpu", host, ([], [], []))
        if given is not None:
            return _report(str(model), str(chosen), host, given.measure_model())
        size = random_model.fitting(chosen)
        loaded = tiny if size is random_model.TINY and chosen == cpu else random_model.random_model(size, chosen)
        label = f"{size.name}{'; its rates say nothing about a real model' if size is random_model.TINY else ''}"
        measured = bench_model(loaded, device=str(chosen), folder=scratch, say=say, cancel=cancel, resample=resample)
        return replace(measured, model=label, host=tuple(host))


def bench_model(model: "LoadedModel", *, device: str, folder: Path | None, say: Say, cancel: Cancel, resample: Resample) -> BenchReport:
    """Measure a model in memory, on its device, as `bench` does; the host alone is left out."""
    with scratch_folder(folder) as scratch, model.evaluating():
        return _report("", device, (), Passes(scratch, model, device, resample, Kept, say, cancel).measure_model())


_OfModel = tuple[list[Row], list[Row], list[str]]
"""The rows of the encoder alone, those of the whole, and remarks."""


def _report(model: str, device: str, host: Sequence[Row], of_model: _OfModel) -> BenchReport:
    """Return the report. A pass encodes its captions and then its pictures, so their times add up."""
    encoder, whole, remarks = of_model
    rows = {row.work: row for row in whole or host}
    photos, captions = rows.get(PHOTOS.name), rows.get(CAPTIONS.name) or rows.get(T5_CAPTIONS.name)
    both = [row for row in (photos, captions) if row is not None]
    hours = sum(MILLION / row.per_second for row in both) / 3600
    million = {"hours": round(hours, 2), "bytes": MILLION * sum(row.bytes_each for row in both)}
    return BenchReport(model, device, tuple(host), tuple(encoder), tuple(whole), both[0].limiting, million, tuple(remarks))


@dataclass(slots=True)
class Kept:
    """An encoder whose model stays loaded from pass to pass: `close` does nothing."""

    real: Encoder
    recipe: Recipe = field(init=False)

    def __post_init__(self) -> None:
        self.recipe = self.real.recipe

    @property
    def window(self) -> int:
        """As the real encoder's."""
        return self.real.window

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """As the real encoder's."""
        return self.real.resolve(request, read)

    def prepare(self, resolved: Resolved) -> Prepared:
        """As the real encoder's."""
        return self.real.prepare(resolved)

    def batch_limit(self, group: Hashable, /) -> int:
        """As the real encoder's."""
        return self.real.batch_limit(group)

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """As the real encoder's."""
        return self.real.submit(batch)

    def close(self) -> None:
        """Keep the model."""


@dataclass(slots=True)
class _Free(Kept):
    """The encoder that costs nothing: it reads and prepares as the real one, then gives the same tensors for every unit of a size."""

    made: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict[tuple[int, ...], dict[str, Any]])
    """Tensors by shape."""

    def batch_limit(self, _group: Hashable, /) -> int:
        return BATCH

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        shape = T5_SHAPE
        if self.recipe.encoder == "latents":
            height, width, _colours = batch[0][1].shape
            shape = (32, height // 8, width // 8)
        if shape not in self.made:
            from cachestore.encode.models.random_model import noise

            self.made[shape] = {"values": noise(shape)}
        return lambda: {key: self.made[shape] for key, _payload in batch}


@dataclass(slots=True)
class _Pass:
    """A pass that has ended."""

    report: Report
    seconds: float


@dataclass(slots=True)
class Passes:
    """Measures with one model. The model is loaded once, in the first pass."""

    folder: Path
    model: "LoadedModel | str"
    device: str
    resample: Resample
    wrap: Callable[[Encoder], Kept]
    say: Say
    cancel: Cancel
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """More options of `precompute`, by name."""
    seconds: float = field(default_factory=lambda: SECONDS)
    """How long the largest pass and the encoder alone take at least."""
    kept: dict[str, Kept] = field(default_factory=dict[str, Kept])
    """Encoders by fingerprint."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Digests of the model's files."""

    def works(self) -> tuple[list[Work], list[str]]:
        """Return what the model encodes of photographs and captions, and why not the rest. Raises BadInput if it encodes neither."""
        found: list[Work] = []
        refused: list[BadInput] = []
        for work in (PHOTOS, CAPTIONS):
            with TemporaryDirectory(dir=self.folder) as name:
                try:
                    self._wanted(Path(name), work, 1)
                    found.append(work)
                except BadInput as error:  # such as a VAE, which encodes no captions
                    refused.append(error)
        if not found:
            raise refused[0]
        return found, list(map(str, refused))

    def measure_model(self) -> _OfModel:
        """Measure the encoder alone and the whole. Raises as `works`."""
        alone: list[Row] = []
        whole: list[Row] = []
        works, remarks = self.works()
        for work in works:
            whole.append(self.measure(work))
            alone.append(self.measure_alone(work))
            self.close()
        return alone, whole, remarks

    def close(self) -> None:
        """Release the memory of what is loaded; the next pass loads it again."""
        for encoder in self.kept.values():
            encoder.real.close()

    def measure(self, work: Work) -> Row:
        """Return the rate of passes: their growth divided by the time that it took."""
        self.say(f"measuring {work.name}: {'the whole' if self.wrap is Kept else 'the host alone'} …")
        self._run(work, 1)  # loads the model
        first = self._run(work, FIRST_COUNT)
        last, count = first, FIRST_COUNT
        each = first.report.bytes // first.report.encoded
        most = min(MOST_BYTES, free_bytes(self.folder) // 4)
        while last is first or (last.seconds < self.seconds and 2 * count * each <= most):
            count *= 2
            last = self._run(work, count)
        more, longer = last.report.encoded - first.report.encoded, last.seconds - first.seconds
        rate = more / longer if longer > 0 else last.report.encoded / last.seconds  # a short pass on a busy machine
        return Row(work.name, round(rate, 2), processors(), str(last.report.stages.get("limiting", "")), each)

    def measure_alone(self, work: Work) -> Row:
        """Return the rate of the encoder on batches that are ready, one of them ahead as in a pass."""
        self.say(f"measuring {work.name}: the encoder alone …")
        encoder, batch = self.ready_batch(work)
        encoder.submit(batch)()
        began, batches, pending = time.perf_counter(), 1, encoder.submit(batch)
        while time.perf_counter() - began < self.seconds:
            if self.cancel.is_set():
                raise Incomplete("stopped on request; the temporary files are removed")
            following = encoder.submit(batch)
            pending()
            pending, batches = following, batches + 1
        pending()
        rate = batches * len(batch) / (time.perf_counter() - began)
        return Row(work.name.rpartition(" to ")[2], round(rate, 2), processors())

    def ready_batch(self, work: Work) -> tuple[Kept, list[tuple[Key, Any]]]:
        """Return an encoder and a batch to submit to it: one sample under as many keys as a batch may hold now."""
        self._write_jpeg(work)
        with TemporaryDirectory(dir=self.folder) as name:
            wanted = self._wanted(Path(name), work, 1)
        units = map(wanted.plan.unit, range(wanted.plan.unit_count))
        unit = next(unit for unit in units if unit.request.get("caption") != "")
        encoder = self._kept(wanted)[unit.recipe]
        prepared = encoder.prepare(encoder.resolve(unit.request, UnitReader(wanted.files)))
        keys = [Key(number.to_bytes(KEY_BYTES, "big")) for number in range(encoder.batch_limit(prepared.group))]
        return encoder, [(key, prepared.payload) for key in keys]

    def _run(self, work: Work, count: int) -> _Pass:
        """Run a pass into a store of its own. Raises EncodeFailed if a sample failed.

        Its segments are removed. Small files stay until all is measured: while thousands of files are newly deleted, ext4 takes up to 0.6
        ms instead of 0.02 to make another.
        """
        self._write_jpeg(work)
        began = time.perf_counter()
        wanted = self._wanted(Path(mkdtemp(dir=self.folder)), work, count)
        launch = f"bench:{secrets.token_hex(8)}"
        encoders, threads = self._kept(wanted), threads_for(None, 1)
        job = Job(wanted.layout, wanted.plan, encoders, wanted.files, RankInfo(), launch, threads=threads, cancel=self.cancel)
        report = run_pass(job)
        seconds = time.perf_counter() - began
        rmtree(wanted.layout.segments, ignore_errors=True)
        if report.failures or not report.encoded:
            raise EncodeFailed(
                f"{work.name} cannot be measured: {report.failures[0]['reason'] if report.failures else 'nothing to encode'}"
            )
        return _Pass(report, seconds)

    def _write_jpeg(self, work: Work) -> None:
        if work.kind == "latents" and not self._jpeg(work).exists():
            write_jpeg(self._jpeg(work), *work.size)

    def _jpeg(self, work: Work) -> Path:
        return self.folder / "{}x{}.jpg".format(*work.size)

    def _kept(self, wanted: Planned) -> list[Kept]:
        return [self.kept.setdefault(one.recipe.fingerprint, self.wrap(one)) for one in wanted.encoders]

    def _wanted(self, folder: Path, work: Work, count: int) -> Planned:
        from cachestore.encode.models.random_model import WORDS

        layout = create_store(folder / "store")
        publish_digests(layout, host_name(), self.digests)
        jpeg = self._jpeg(work)
        listing = list_pictures(jpeg, count) if work.kind == "latents" else list_captions(jpeg, count, CAPTION_WORDS, WORDS)
        loaded = None if isinstance(self.model, str) else self.model
        named = self.model if isinstance(self.model, str) else f"{LOADED}{self.model.class_name})"
        asked = {
            "data": "bench",
            "model": named,
            "store": str(layout.root),
            "encode": [work.kind],
            "device": self.device,
            "resample": self.resample,
            **self.options,
        }
        wanted = publish_if_new(plan_request(layout, PrecomputeRequest.from_json(asked), listing, loaded=loaded))
        self.digests = load_digests(layout, host_name())
        return wanted
