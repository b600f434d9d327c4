"""Forecasts what a pass will do: counts, buckets, truncated captions, bytes and time. Encodes nothing."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestore.core.errors import EncodeFailed, FormatError, WriteFailed
from cachestore.core.inputs import LIKE, READ_HERE, cells_each, clips_each, is_trained_on, references_of, sides_each
from cachestore.core.keys import Json
from cachestore.core.ranks import RankInfo
from cachestore.core.samples import CAPTION, IMAGE, VIDEO, role_of
from cachestore.core.words import NAMED, first_of, human_bytes, in_short, listed, plural
from cachestore.encode.batching.environment import set_library_defaults
from cachestore.encode.batching.unit import Encoder
from cachestore.files.opening import free_bytes
from cachestore.files.paths import Layout
from cachestore.files.scratch import scratch_folder
from cachestore.jobs.plan.options import LATENTS, PrecomputeRequest
from cachestore.jobs.plan.planning import Planned, list_request, plan_request, publish_if_new
from cachestore.jobs.run.pass_counts import list_failed, list_refused, recheck_in_words
from cachestore.jobs.run.reconcile import Reconciler, reconciler_of_next, unknown_units
from cachestore.jobs.run.task import Job, words_of
from cachestore.jobs.share.outcomes import FAILED
from cachestore.jobs.share.passes import list_rounds
from cachestore.jobs.share.plan import Plan, PlanColumn
from cachestore.jobs.share.progress import pass_status
from cachestore.jobs.share.workers import Heartbeat, read_heartbeats
from cachestore.jobs.start.fits import Fits, Repeats, fits_of, samples_of
from cachestore.jobs.start.ranks import Say, open_for_pass, threads_for
from cachestore.sources.combined import InMemory
from cachestore.sources.files import SourceFiles
from cachestore.sources.unused import unused_in_words
from cachestore.store.format.arrays import Mask, Numbers
from cachestore.store.read.snapshot import load_snapshot

if TYPE_CHECKING:
    from cachestore.encode.models.loaded import LoadedModel
    from cachestore.encode.pictures.bucket_rules import PixelReading
    from cachestore.encode.pictures.buckets import Size
    from cachestore.encode.pictures.variants import Fit
    from cachestore.encode.pictures.videos import Video

HEADER_BYTES: Final = 256 * 1024
TRAINING_BATCH: Final = 8
"""The batch size in the lines of Python that are printed, as an example."""
_BATCH_SIZES: Final = (2, 4, 8, 16)
"""The batch sizes for which a forecast says how many samples are left out; only the user knows the real one."""

MAX_INSPECTED: Final = 2000
"""The most captions and picture headers that are read before a run; the rest is estimated."""
_NAMED_FAILURES: Final = 100
_SHOWN_FAILURES: Final = 5
MAX_LOOKUPS: Final = 100_000
"""The most captions that are looked up by their keys, which takes about a second."""


@dataclass(frozen=True, slots=True, repr=False)
class Forecast:
    """What `cachestore precompute --plan-only` prints."""

    samples: int
    wanted: int
    present: int
    """Units that are present by catalog and ledgers; their bytes are not read."""
    to_encode: int
    """All other units. An upper bound, as some may turn out to be present."""
    estimated_bytes: int
    estimated_seconds: float | None
    """By the rate of earlier workers in this store; None if there were none."""
    free_bytes: int
    buckets: Mapping[str, int]
    """Samples by bucket: `<width>x<height>`, for videos `<width>x<height>x<frames>`. A sample has a bucket at each resolution."""
    truncated_captions: int
    distinct_captions: int
    is_estimate: bool
    """Whether only a part of the units was looked at."""
    remarks: tuple[str, ...] = ()
    """Remarks from listing the sources: missing captions, captions of several lines, new samples, samples no longer listed."""
    is_guess: bool = False
    """Whether the bytes are a guess: text of a pipeline without a row in docs/families.md may take much more, known once it is loaded."""
    not_made_here: tuple[str, ...] = ()
    """Descriptions of inputs that the model is trained with but that are not made here, such as conditions or audio."""
    published: int = 0
    """Units that an unfinished pass has published or found, as `cachestore status` counts them; 0 without such a pass. Units of
    unfinished partitions count here and in `to_encode`; they are found when the pass continues."""
    left: int = 0
    """`to_encode` without the published units of unfinished partitions: what the bar and `cachestore status` have left."""
    is_bound: bool = False
    """Whether some units may turn out to be present: a picture's key is known only when it is read."""
    unused: tuple[Mapping[str, Json], ...] = ()
    """As in the report of `precompute`: the files that are not used of the source, by reason."""
    prompts: int = 0
    """Prompts for validation. Their texts are among the units."""
    rechecked: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """With `recheck`: as in the report of `precompute`."""
    fits: Fits = field(default_factory=Fits)
    """The samples of those to encode that lose much to the crop, are scaled up much, or repeat frames."""
    left_out: Mapping[int, int] = field(default_factory=dict[int, int])
    """How many samples an epoch of cachestore's loader leaves out, by batch size. Empty for trainers that read caches of their own."""
    truncated_samples: tuple[str, ...] = ()
    """The first samples whose captions are truncated."""
    will_fail: tuple[Mapping[str, Json], ...] = ()
    """Up to 100 samples whose files cannot be opened, or are too short for every count of `--frames`: `sample` and `reason` of each."""
    will_fail_count: int = 0
    """How many such samples there are among those that were looked at."""
    failed: int = 0
    """Rows and files of the source that cannot be used. They count in `samples` and `wanted`: `wanted = present + to_encode + failed`."""
    failures: tuple[Mapping[str, Json], ...] = ()
    """These, as in the report of `precompute`."""
    made_of: tuple[str, ...] = ()
    """What the units are made of, in words: "30 pictures, each also mirrored", "7 captions"."""
    memory: tuple[Mapping[str, Json], ...] = ()
    """What the encoders that have something to encode take of a GPU: `encoder`, `weights`, and `working` for a batch of one, in bytes."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the forecast as JSON."""
        lists = {
            name: list(getattr(self, name))
            for name in ("remarks", "not_made_here", "truncated_samples", "will_fail", "failures", "made_of")
        }
        lists["unused"] = [dict(row) for row in self.unused]
        # one is loaded after the other
        needed = max((one["weights"] + one["working"] for one in self.memory), default=0)
        ways: list[Json] = [{"way": "resident", "bytes": needed, "per_second": None, "exact": True}] if needed else []
        rest = {"memory": list(self.memory), "fits": ways}
        return {one.name: getattr(self, one.name) for one in fields(self)} | lists | self.fits.as_json() | rest


def forecast_of(request: PrecomputeRequest, loaded: "LoadedModel | None" = None, in_memory: InMemory | None = None) -> Forecast:
    """Return what `precompute` would do. Reads all captions and headers; opens no pass. Raises as `precompute`.

    If there is no store yet, it uses an empty temporary one, so that nothing is left behind.
    """
    set_library_defaults(os.environ)
    root = Path(request.store).absolute()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        layout = open_for_pass(request.store, access=request.access)
        return _whole_forecast(publish_if_new(plan_request(layout, request, list_request(request, in_memory), loaded=loaded)))
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    with scratch_folder() as scratch:
        layout = open_for_pass(str(scratch))
        forecast = _whole_forecast(plan_request(layout, request, list_request(request, in_memory), loaded=loaded))
        return replace(forecast, free_bytes=shutil.disk_usage(there).free)


def _whole_forecast(planned: Planned) -> Forecast:
    """Return what a run would do, of all units. With `recheck` every file is read again."""
    if not planned.request.recheck:
        return make_forecast(planned, *unknown_units(_job_for(planned), lambda: None), look_at_all=True)
    reconciler = reconciler_of_next(_job_for(planned), lambda: None)
    with closing(load_snapshot(planned.layout, for_planning=True)) as snapshot:
        missing, found = reconciler.read_again(snapshot, threads_for(planned.request.workers, 1))
    return make_forecast(planned, reconciler, missing, look_at_all=True, rechecked={**found, **planned.model_files})


def tell_beforehand(planned: Planned, heartbeat: Heartbeat, say: Say, warn: Say, complete: Reconciler | None = None) -> None:
    """Print what the launch of this worker has to do; raise WriteFailed if the disk has not enough space.

    `complete` is the reconciler that has just found every unit present, if one has.
    """
    from cachestore.encode.needs import in_words as not_made

    if planned.not_made_here:
        warn(not_made(planned.not_made_here))
    forecast = _forecast_of_launch(planned, heartbeat, complete)
    for line in in_words(forecast, planned.layout.root, with_reasons=False):
        say(line)
    if heartbeat.plan:  # else others have ended the pass already, and nothing has to be written
        _check_room(planned.layout, forecast)


def check_room_again(planned: Planned, heartbeat: Heartbeat, say: Say, encoder: Encoder) -> None:
    """If only loading shows an entry's size, print the bytes needed; raise WriteFailed if the disk has not enough space."""
    if getattr(encoder, "found_bytes", None) is not None:
        forecast = _forecast_of_launch(planned, heartbeat)
        say(f"now that the text encoder is loaded: {room_in_words(forecast, planned.layout.root)}")
        _check_room(planned.layout, forecast)


def _forecast_of_launch(planned: Planned, heartbeat: Heartbeat, complete: Reconciler | None = None) -> Forecast:
    launch = heartbeat.launch
    reconciler, missing = unknown_units(_job_for(planned), heartbeat.rise, launch) if complete is None else (complete, list[int]())
    return make_forecast(planned, reconciler, missing, look_at_all=False)


def _job_for(planned: Planned) -> Job:
    return Job(planned.layout, planned.plan, planned.encoders, planned.files, RankInfo(), "", is_recheck=planned.request.recheck)


def _check_room(layout: Layout, forecast: Forecast) -> None:
    if forecast.estimated_bytes > forecast.free_bytes:
        need = f"about {human_bytes(forecast.estimated_bytes)} are needed, {human_bytes(forecast.free_bytes)} are free"
        raise WriteFailed(f"{need} at {layout.root}; make room, then run the same command again")


def make_forecast(
    wanted: Planned, reconciler: Reconciler, missing: Sequence[int], *, look_at_all: bool, rechecked: Mapping[str, Json] | None = None
) -> Forecast:
    """Return the forecast of a pass. `missing` are the indices of the units that are not known to be present.

    The workers of the launch that the reconciler ignores are left out: while rank 0 makes the forecast, other ranks work already.

    Files that cannot be opened are named (`will_fail`). One that is damaged further on is found by the pass alone.
    """
    layout, plan = wanted.layout, wanted.plan
    by_encoder: dict[str, Any] = {encoder.recipe.encoder: encoder for encoder in wanted.encoders}
    limit = len(missing) if look_at_all else MAX_INSPECTED
    held = _held(reconciler, _units_by(plan, missing, "text"))
    missing = [index for index in missing if index not in held]
    captions = _units_by(plan, missing, "text")
    images = {name: _units_by(plan, missing, name) for name in dict.fromkeys(recipe.encoder for recipe in plan.recipes) if name != "text"}
    files, refused, repeats = Glances(wanted.files), dict[int, str](), dict[int, Repeats]()
    facts = {name: _fits_of(plan, units, limit, files, refused=refused, repeats=repeats) for name, units in images.items()}
    will_fail = list({(one["sample"], one["reason"]): one for one in list_failed(plan, refused)}.values())
    is_trained_on = _first_units_of(plan)
    trained_on = [(index, fit) for found in facts.values() for index, fit in found.items() if is_trained_on[index]]
    buckets = Counter((*fit.bucket, *frames) for _index, (fit, *frames) in trained_on)
    buckets.update(_known_buckets(reconciler, missing, is_trained_on))
    tokens = _count(by_encoder.get("text"), [plan.unit(index).request for index in captions[:limit]])
    limit_tokens = getattr(by_encoder.get("text"), "max_tokens", 0)
    truncated = [index for index, count in zip(captions, tokens, strict=False) if count > limit_tokens]
    # The bytes of the units that were looked at, scaled up to all.
    size = sum(_bytes_of_pictures(by_encoder.get(name), list(facts[name].values()), len(units)) for name, units in images.items())
    if tokens:
        size += sum(by_encoder["text"].entry_bytes(count) for count in tokens) * len(captions) // len(tokens)
    published, ignored = _published(layout, reconciler), reconciler.ignored_launch
    left = min(len(missing), plan.unit_count - published - len(held)) if published else len(missing)
    return Forecast(
        samples=len(plan.ids) + plan.refused_count,
        wanted=plan.unit_count + plan.refused_count,
        present=plan.unit_count - len(missing),
        to_encode=len(missing),
        estimated_bytes=size,
        estimated_seconds=_seconds(layout, left, ignored, {name for name, units in ({"text": captions} | images).items() if units}),
        free_bytes=free_bytes(layout.root),
        buckets={"x".join(map(str, bucket)): count for bucket, count in sorted(buckets.items())},
        truncated_captions=len(truncated),
        distinct_captions=_distinct_captions(plan),
        is_estimate=len(missing) > limit,
        remarks=(*wanted.remarks, *(wanted.how if missing else ())),
        is_guess=bool(captions) and getattr(by_encoder.get("text"), "is_guessing", False),
        not_made_here=wanted.not_made_here,
        unused=wanted.unused,
        published=published,
        left=left,
        is_bound=any(images.values()),
        prompts=len(plan.prompts),
        rechecked=rechecked or {},
        fits=fits_of(plan, ((index, fit, repeats.get(index)) for index, (fit, *_frames) in trained_on)),
        left_out=_left_out(buckets.values()) if wanted.request.buckets in READ_HERE else {},
        truncated_samples=tuple(sample for names in samples_of(plan, truncated[:NAMED]).values() for sample in names)[:NAMED],
        will_fail=tuple({"sample": one["sample"], "reason": one["reason"]} for one in will_fail[:_NAMED_FAILURES]),
        will_fail_count=len({one["sample"] for one in will_fail}),
        failed=plan.refused_count,
        failures=tuple(list_refused(plan)),
        made_of=tuple(_made_of(plan)),
        memory=tuple(_memory_of(wanted, {"text": tokens} if captions else {}, facts)) if look_at_all else (),
    )


def _made_of(plan: Plan) -> Iterable[str]:
    """Yield what the units of a plan are made of: a phrase for each kind of picture, for captions, and for texts of no sample."""
    found: dict[tuple[str, ...], tuple[int, list[str]]] = {}
    for column, (_at, units) in zip(plan.columns, plan.cells, strict=True):
        count = int(_marked(plan, units).sum()) // cells_each(column.options)
        kind = _kind_of(column)
        most, sizes = found.get(kind, (0, []))
        found[kind] = (max(most, count), [*sizes, *([str(column.options["resolution"])] if "resolution" in column.options else [])])
    for (one, many, *ways), (count, sizes) in sorted(found.items(), key=lambda kind: kind[0][0] == "caption"):
        if count:
            yield ", ".join([plural(count, one, many), *([f"each at {listed(sizes)}"] if len(sizes) > 1 else []), *ways])
    alone = np.flatnonzero(~_marked(plan, *(units for _at, units in plan.cells))).tolist()
    texts = {str(plan.unit(index).request.get(CAPTION, "")) for index in alone}
    if others := len(texts - {""}):
        yield f"{plural(others, 'text')} of prompts for validation"
    if "" in texts:
        yield "the empty caption"


def _kind_of(column: PlanColumn) -> tuple[str, ...]:
    """What a column's units are made of: one, several, and in which ways each of them is encoded."""
    clips, variants = clips_each(column.options), int(column.options.get("variants", 1))
    named = {CAPTION: "caption", IMAGE: "picture", VIDEO: "clip" if clips == 1 else "video"}
    one = named.get(column.role, column.role.replace("_", " ") + ("" if column.role.endswith("_frame") else " picture"))
    if column.encoder not in ("text", LATENTS):  # masks, and conditions, which have names of their own
        one = column.encoder
    ways = [f"{clips} clips of each"] if clips > 1 else []
    ways += [f"{variants} crops of each"] if variants > 1 else []
    ways += ["each also mirrored"] if sides_each(column.options) > 1 else []
    return one, one if one.endswith("s") else "", *ways


def _memory_of(
    wanted: Planned, texts: Mapping[str, Sequence[int]], facts: Mapping[str, Mapping[int, tuple[Any, ...]]]
) -> Iterator[Mapping[str, Json]]:
    """Yield what each encoder takes that has something to encode: `texts` has the tokens of captions, `facts` the buckets of pictures."""
    from cachestore.encode.memory import memory_of

    for encoder in wanted.encoders:
        name = encoder.recipe.encoder
        buckets = [(*fit.bucket, *frames) for fit, *frames in facts.get(name, {}).values()]
        if not buckets and name not in texts:
            continue
        if (found := memory_of(encoder, max(buckets, key=prod, default=()), max(texts.get(name, ()), default=0))) is not None:
            yield asdict(found)


def _published(layout: Layout, reconciler: Reconciler) -> int:
    """Units that `status` counts as published or found in a pass; 0 if it was not begun or cannot be read."""
    if not list_rounds(reconciler.ref.folder(layout)):
        return 0
    try:
        status = pass_status(layout, reconciler.ref, without=reconciler.ignored_launch)
    except (FormatError, OSError):
        return 0
    return status.reused + status.encoded


def _units_by(plan: Plan, indices: Sequence[int], encoder: str) -> list[int]:
    return [index for index in indices if plan.recipes[plan.recipe_of(index)].encoder == encoder]


def _held(reconciler: Reconciler, captions: Sequence[int]) -> set[int]:
    """The captions that other passes over the store have made. A picture's key is not known before it is read."""
    with closing(load_snapshot(reconciler.job.layout, for_planning=True)) as snapshot:
        return set(reconciler.held_elsewhere(captions[:MAX_LOOKUPS], snapshot)) if len(snapshot) else set()


def _distinct_captions(plan: Plan) -> int:
    """How many different captions the samples have: counts the units of a caption column, if there is one."""
    found = (units for column, (_at, units) in zip(plan.columns, plan.cells, strict=True) if column.role == CAPTION)
    units = next(found, None)
    return len(set(plan.captions)) if units is None else int(_marked(plan, units).sum())


def _left_out(buckets: Collection[int]) -> dict[int, int]:
    left_out = {size: sum(count % size for count in buckets) for size in _BATCH_SIZES}
    return left_out if any(left_out.values()) else {}


def _first_units_of(plan: Plan) -> Mask:
    """Mask of each sample's first unit in columns of what is trained on: variants share a bucket. A picture in two roles is two units."""
    columns = zip(plan.columns, plan.cells, strict=True)
    first: list[Numbers] = []
    for column, (at, units) in columns:
        starts = np.asarray(at, np.int64)
        if is_trained_on(column.role, column.options):
            first.append(np.asarray(units, np.int64)[starts[:-1][starts[1:] > starts[:-1]]])
    return _marked(plan, *first)


def _marked(plan: Plan, *cells: "Sequence[int] | Numbers") -> Mask:
    is_used = np.zeros(plan.unit_count, np.bool_)
    for units in cells:
        is_used[np.asarray(units, np.int64)] = True
    return is_used


def _fits_of(
    plan: Plan, indices: Iterable[int], limit: int, files: "Glances", *, refused: dict[int, str], repeats: dict[int, Repeats]
) -> "dict[int, tuple[Fit] | tuple[Fit, int]]":
    """How pictures and videos to encode fit their buckets, from their headers, by unit index; for a clip also its frames.

    A mask has its picture's bucket. Puts why a unit will fail into `refused`, and the clips that repeat frames into `repeats`. A video's
    header is trusted if it says nothing against the file; the pass checks all packets.
    """
    from cachestore.encode.pictures.clips import clip_of
    from cachestore.encode.pictures.variants import fit_of, reading_of

    found: dict[int, tuple[Fit] | tuple[Fit, int]] = {}
    for index in indices:
        request = plan.unit(index).request
        if len(found) + len(refused) >= limit:
            break
        try:
            # a mask has the bucket of its picture, and a first frame that of its video; any other image one by its own size
            role = role_of(str(request.get("role", IMAGE)))
            decides = str(request[VIDEO if VIDEO in request else LIKE if role.is_cut_alike else "image"])
            if VIDEO in request or (role.is_cut_alike and role.follows == VIDEO):
                video = files.glance(decides)
                try:
                    frames, start, rate = clip_of(request, video.timeline)
                except EncodeFailed:  # by its header it is too short: what counts are its frames
                    video = files.read_video(decides)
                    frames, start, rate = clip_of(request, video.timeline)
                if rate is not None and (again := frames - len(set(video.timeline.take(rate, start, frames)))):
                    repeats[index] = Repeats(again / frames, float(video.rate), float(rate))
                found[index] = (fit_of(request, video.size), frames)
            else:
                found[index] = (fit_of(request, files.measure(decides, reading_of(request))),)
        except (EncodeFailed, OSError) as error:
            refused[index] = words_of(error)
    return found


class Glances:
    """What the headers of files say, each read once, as one file may have many units."""

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self.glance, self.read_video, self.measure = cache(self._glance), cache(self._read_video), cache(self._measure)

    def _glance(self, reference: str) -> "Video":
        from cachestore.encode.pictures import videos

        with self._files.open(reference) as (file, _stat):
            return videos.estimate(file)

    def _read_video(self, reference: str) -> "Video":
        from cachestore.encode.pictures import videos

        with self._files.open(reference) as (file, _stat):
            return videos.measure(file)

    def _measure(self, reference: str, reading: "PixelReading | None") -> "Size":
        """A picture's size from the first 256 KiB of its file, or from the whole file if its header is longer."""
        from cachestore.encode.pictures.images import measure

        try:
            with self._files.open(reference) as (file, _stat):
                return measure(file.read(HEADER_BYTES), reading)
        except EncodeFailed:
            return measure(self._files.read(reference)[0], reading)


def _known_buckets(reconciler: Reconciler, missing: Sequence[int], is_trained_on: Mask) -> Counter[tuple[int, ...]]:
    known = reconciler.outcomes()
    if "bucket" not in known.facts:
        return Counter()
    counted = (known.states != FAILED) & is_trained_on
    counted[missing] = False
    buckets, counts = np.unique(known.facts["bucket"][counted], axis=0, return_counts=True)
    found = zip(buckets.tolist(), counts.tolist(), strict=True)
    return Counter({tuple(side for side in bucket if side > 0): count for bucket, count in found if bucket[0] > 0})


def _count(encoder: Encoder | None, requests: Sequence[Mapping[str, Json]]) -> list[int]:
    """The tokens of each caption, plus about those of the images that the encoder sees with it."""
    count = getattr(encoder, "count_tokens", None)
    if count is None or not requests:
        return []
    image_tokens: int = getattr(encoder, "image_tokens", 0)
    caption_of: Callable[[Mapping[str, Json]], str] = getattr(encoder, "counted_caption", lambda request: str(request["caption"]))
    counted: list[int] = count(list(map(caption_of, requests)))
    return [tokens + image_tokens * len(references_of(request)) for tokens, request in zip(counted, requests, strict=True)]


def _bytes_of_pictures(encoder: Any, fits: "Sequence[tuple[Fit] | tuple[Fit, int]]", images: int) -> int:
    return sum(encoder.entry_bytes(fit.bucket, *frames) for fit, *frames in fits) * images // len(fits) if fits else 0


def _seconds(layout: Layout, units: int, ignored: str, encoders: AbstractSet[str]) -> float | None:
    """A rough guess: units divided by the rate of earlier workers in this store, once their model was loaded.

    None without workers that had no other encoders than these: pictures say nothing about captions.
    """
    if units == 0:
        return 0.0
    rates: list[float] = []
    for shown in read_heartbeats(layout):
        did = {name for name, (done, _unpublished) in shown.units.items() if done}
        seconds = sum(shown.stages.get("encode", ()))
        if shown.encoded and seconds and did <= encoders and shown.launch != ignored:
            rates.append(shown.encoded / seconds)
    return round(units / (sum(rates) / len(rates)), 1) if rates else None


def in_words(forecast: Forecast, root: Path, *, with_reasons: bool = True) -> list[str]:
    """Return the forecast as lines for a person, but for the inputs that are not made (`needs.in_words`).

    Without the reasons why samples fail if the end of the run will give them.
    """
    about, most = "about " if forecast.is_estimate else "", "at most " if forecast.left and forecast.is_bound else ""
    wanted = forecast.wanted - forecast.failed
    there = wanted - forecast.left
    unfinished = ""
    if forecast.published > forecast.present:
        unfinished = f",{'' if forecast.published >= there else f' {forecast.published} of them'} from a run that did not finish"
    samples = plural(forecast.samples - forecast.failed, "sample")
    parts = [*forecast.made_of] if any(part.split()[0] == samples.split()[0] for part in forecast.made_of) else [samples, *forecast.made_of]
    values = f"{plural(wanted, 'value')}, {there or 'none'} of them in the store already{unfinished}; {most}{forecast.left} to encode"
    lines = [recheck_in_words(forecast.rechecked)] if forecast.rechecked else []
    lines += _failures_in_words(forecast, with_reasons=with_reasons)
    made_of = ", and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    lines += [*forecast.remarks, *unused_in_words(forecast.unused), f"{made_of}: {values}"]
    if forecast.buckets:
        filled = ", ".join(f"{count} of {name}" for name, count in forecast.buckets.items())
        lines.append(f"{plural(len(forecast.buckets), 'bucket')}: {filled}")
        lines += left_out_in_words(forecast.left_out, about)
    lines += forecast.fits.in_words(about)
    if forecast.truncated_captions:
        long = plural(forecast.truncated_captions, "caption is", "captions are")
        named = f" ({first_of(forecast.truncated_samples)})" if forecast.truncated_samples else ""
        lines.append(f"{about}{long} longer than the encoder reads, and truncated{named}")
    if forecast.will_fail and not with_reasons:
        named = first_of(dict.fromkeys(one["sample"] for one in forecast.will_fail))
        will = f"{about}{plural(forecast.will_fail_count, 'sample')} will fail ({named})"
        lines.append(f"{will}: the end says why, and `cachestore precompute --plan-only` does now")
    elif forecast.will_fail:
        named = "; ".join(f"{one['sample']}: {one['reason']}" for one in forecast.will_fail[:_SHOWN_FAILURES])
        more = f"; and {forecast.will_fail_count - _SHOWN_FAILURES} more" if forecast.will_fail_count > _SHOWN_FAILURES else ""
        lines.append(f"{about}{plural(forecast.will_fail_count, 'sample')} will fail: {named}{more}")
    if forecast.left:
        seconds = "" if forecast.estimated_seconds is None else f", about {forecast.estimated_seconds:.0f} s at the rate of earlier runs"
        lines.append(f"{room_in_words(forecast, root)}{seconds}")
    return lines


def left_out_in_words(left_out: Mapping[int, int], about: str = "") -> list[str]:
    """Return a sentence, without a full stop, on the samples that cachestore's loader leaves out by batch size; none if it keeps all."""
    some = [(size, count) for size, count in left_out.items() if count]
    shown = [f"{plural(count, 'sample')} with a batch size of {size}" for size, count in some[:1]]
    shown += [f"{count} with {size}" for size, count in some[1:]]
    none = [f"none with {size}" for size, count in left_out.items() if not count][-1:]
    return [f'cachestore\'s loader leaves out {about}{", ".join(shown + none)}; `tail="pad"` keeps all'] if shown else []


def memory_in_words(memory: Sequence[Mapping[str, Json]]) -> list[str]:
    """Return a line with the memory that encoding takes of a GPU at least, and the smallest usual card that has it. Empty for no model."""
    from cachestore.encode.memory import CARDS, KEPT_FREE

    if not memory:
        return []
    each = [
        f"{one['encoder']} {human_bytes(one['weights'])} of weights and about {human_bytes(one['working'])} for a batch of one"
        for one in memory
    ]
    most = max(one["weights"] + one["working"] for one in memory)
    card = next((size for size in CARDS if most + KEPT_FREE <= size), None)
    after = "; one after the other" if len(each) > 1 else ""
    fits = f"a card of {card >> 30} GB has enough" if card else f"more than a card of {CARDS[-1] >> 30} GB has"
    small = "" if card in CARDS[:2] else " (docs/models.md says what to do with a smaller one)"
    return [f"memory of a GPU, at least: {'; '.join(each)}{after}: {fits}{small}"]


def _failures_in_words(forecast: Forecast, *, with_reasons: bool) -> list[str]:
    """How many rows fail alone, and with the reasons a line for each of the first ones."""
    if not forecast.failed:
        return []
    cannot = f"{plural(forecast.failed, 'row or file', 'rows or files')} of the source cannot be used, and the run goes on without them"
    if not with_reasons:
        return [f"{cannot} (listed at the end)"]
    cannot += ":"
    shown = [f"  {failure['sample']}: {failure['reason']}" for failure in forecast.failures[:_SHOWN_FAILURES]]
    more = forecast.failed - len(shown)
    return [cannot, *shown, *([f"  and {more} more (--plan-only --json names them)"] if more else [])]


def room_in_words(forecast: Forecast, root: Path) -> str:
    """Return a line with the bytes that are needed and those that are free."""
    about = "about " if forecast.is_estimate else ""
    guess = (
        (
            " (a guess: this pipeline has no row in docs/families.md, and its text may take many times more; the real size is known"
            " once the model is loaded)"
        )
        if forecast.is_guess
        else ""
    )
    return f"{about}{human_bytes(forecast.estimated_bytes)} needed{guess}, {human_bytes(forecast.free_bytes)} free at {root}"
