"""The whole job: `precompute` and `fill`, two callers of one loop.

What either does around it: who this process is, what is asked for, where it runs, and what the report is held to.
"""

import logging
import os
import secrets
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, cast

from cachestore.core.arguments import as_many, as_mapping, as_pairs, as_place, as_switch, as_whole, check_calls, check_function, refuse
from cachestore.core.errors import BadInput, EncodeFailed, Incomplete, WriteFailed, naming_extras
from cachestore.core.keys import Json, Key, Recipe, by_key
from cachestore.core.ranks import Placement, discover
from cachestore.encode.needs import NOT_MADE
from cachestore.encode.unit import Encoder, Prepared, Read, Resolved, Result
from cachestore.files.marker import noticing_its_end
from cachestore.files.opening import look_at
from cachestore.files.paths import Layout
from cachestore.jobs.pass_loop import Job, OnProgress, Report, count_start, key_without_reading, numbered, run_pass, start_of
from cachestore.jobs.planning import (
    LOADED,
    PrecomputeRequest,
    Wanted,
    check_listing,
    compare,
    list_request,
    look_at_request,
    needs_of_request,
)
from cachestore.jobs.processes import LISTING, Care, gpu_count, joined_report, processors, run_child, run_children
from cachestore.jobs.reconcile import Reconciler
from cachestore.jobs.worker import Cancel
from cachestore.source.combined import Brought, as_sources, files_of_brought, gather_all
from cachestore.source.listing import Listing
from cachestore.source.memory import write_rows
from cachestore.storage.commit import create_store
from cachestore.storage.listing_numbers import listing_number, number_if_there
from cachestore.storage.snapshot import load_snapshot, open_layout
from cachestore.store.reader import AnyKey
from cachestore.store.writer import Store
from cachestore.work.agreement import Intent, in_words, is_same_launch, who_differs
from cachestore.work.passes import PassRef, list_passes, read_done
from cachestore.work.plan import is_published, plan_of_keys, publish_plan
from cachestore.work.progress import Observer
from cachestore.work.workers import Beat, host_name

if TYPE_CHECKING:
    from cachestore.encode.loaded import LoadedModel
    from cachestore.jobs.forecast import Forecast

FILL_BATCH: Final = 16
"""`fill` hands over so many items at once where the caller does not say."""

READ_THREADS: Final = 16
"""Threads that read and decode at most, where the caller does not say; else this process's part of the processors less one."""

_log = logging.getLogger("cachestore")

Say = Callable[[str], None]


# precompute


@naming_extras()
def precompute(
    data: object,
    *,
    model: object,
    store: str | Path,
    encode: Sequence[str] = ("text", "latents"),
    encode_args: Mapping[str, Json] | None = None,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    inline: bool = False,
    **options: object,
) -> Report:
    """Encode a data set into a store, on any number of ranks; what is there already is not made again.

    Args:
        data: the path of a folder of images or videos, a manifest `.jsonl`, a list of prompts `.txt`, or tars; a sequence of `cs.Sample`
            or a data set of Hugging Face, whose pictures in memory this process hands to the workers while it waits for them; a `cs.Source`
            around any of these; or a list of sources and paths, which are one data set (docs/sources.md).
        model: a diffusers folder or hub id, or a transformers text encoder; the denoiser's weights are never read. Or a model in memory: a
            diffusers pipeline, or a mapping such as `{"_class_name": "FluxPipeline", "text_encoder": module, "tokenizer": ...}`. It is
            used here (`inline`) as it is, on its device and in its dtype, told by what it holds (docs/numerics.md), and left as it
            was; nothing of it is kept.
        store: the store's folder; made if it does not exist.
        encode: "text", "latents" or both; in place of "text" some of the model's text encoders by name ("text_encoder_2"), where its
            family can call them alone.
        encode_args: arguments for the pipeline's `encode_prompt`.
        max_failures: how many units may fail (a count, or a share such as "2%") before `complete` is false for it.
        on_progress: called in the calling thread, about once a second and at the end, with units published so far over all ranks:
            `{"plan", "pass", "reused", "encoded", "failed", "total"}`.
        cancel: anything with `is_set()`; set, it ends the work after the present batch: what is encoded is published, and Incomplete
            raised.
        inline: encode in this process. Otherwise `python -m cachestore` is started (one for each rank of a launcher, else as many as
            `procs` says, else one for each GPU), so that no thread, no GPU memory and no tokenizer of ours stays in the caller. Where
            nothing is to be encoded no process is started, and this one does the rest, without torch. The workers stop when this
            process dies.
        **options: every other option of `cachestore precompute`, with underscores: resolution (a number, or several of
            them), variants, crop, crop_seed, flip, bucket_step, no_upscale, frames (a number, or several), fps, clips, name,
            captions ("first", "all" or a CaptionPolicy: what the data set may ask for under it is encoded), caption_lines, caption,
            vae, text_encoder, revision, variant, text_dtype, vae_dtype, latents, procs, device, batch_size, compile, workers, rank,
            world_size, strict, replace.

    Returns:
        The report of the pass, the same on every rank.

    Raises:
        BadInput: a source, model or option that cannot be used. BadUsage: a source with nothing to encode; with `strict` a model
            that is trained with more than is made here.
        RecipeMismatch: the name is used for another model or resolution.
        EncodeFailed: with `strict`, if a unit failed.
        Incomplete: cancelled, or every worker died; the same call goes on from there.
        Superseded: another run listed the source later and has published it; what was encoded stays in the store.
        MissingExtra: a package of the extra [encode] is not installed.
        WriteFailed: the disk refuses.
    """
    known = {one.name for one in fields(PrecomputeRequest)}
    if unknown := sorted(set(options) - known):
        raise BadInput(f"precompute has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    check_calls(on_progress, cancel)
    loaded = None if isinstance(model, str | os.PathLike) else _read_loaded(model)
    named = as_place("model", cast("object", model), "a path or a hub id") if loaded is None else f"{LOADED}{loaded.class_name or 'model'})"
    path, sources, held = as_sources(data)
    fixed = {
        "data": path,
        "sources": sources,
        "model": named,
        "store": as_place("store", store),
        "encode": tuple(as_many("encode", encode, 'a list of names, such as ("text", "latents")')),
        "encode_arg": {} if encode_args is None else dict(as_mapping("encode_args", encode_args, "a mapping of arguments")),
    }
    values: dict[str, Any] = {**fixed, "max_failures": str(max_failures), **{name: _plain(value) for name, value in options.items()}}
    if isinstance(values.get("frames"), int):
        values["frames"] = (values["frames"],)
    request = PrecomputeRequest(**values)
    request.check()
    find_placement(request.rank, request.world_size)  # refused now, before a store is made
    return _precompute(request, held, loaded, inline=inline, on_progress=on_progress, cancel=cancel)


def _precompute(
    request: PrecomputeRequest,
    held: Mapping[int, object],
    loaded: "LoadedModel | None",
    *,
    inline: bool,
    on_progress: OnProgress | None,
    cancel: Cancel | None,
) -> Report:
    """Do a request that was checked, here or in processes of its own. `held` are the sources in memory, by number."""
    observer = Observer(Layout.at(request.store))
    tell = observer.following(on_progress) if on_progress else None
    with number_if_there(Layout.at(request.store), request.name) as number:
        brought = gather_all(request.sources, held, caption_lines=request.caption_lines, caption=request.caption)
        if loaded is not None:
            with loaded.evaluating(), _as_it_was(os.environ):
                report = precompute_here(request, on_progress=tell, cancel=cancel, loaded=loaded, brought=brought, number=number)
        elif inline:
            report = precompute_here(request, on_progress=tell, cancel=cancel, brought=brought, number=number)
        else:
            report = _from_processes(request, Care(observer.look_at, on_progress, cancel), brought, number)
    if on_progress and (ended := observer.newest(report.plan)) is not None:
        on_progress(ended.counts())
    return report


def _plain(value: object) -> object:
    """An option as a request holds it: a path as text, numpy's numbers as Python's, several of them as a tuple."""
    match value:
        case _ if type(value).__name__ in {"bool", "bool_"}:  # numpy's too
            return bool(value)
        case os.PathLike():
            return os.fspath(cast("os.PathLike[str]", value))
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case list() | tuple() | range():
            return tuple(map(_plain, cast("Sequence[object]", value)))
        case _:
            return value


def _read_loaded(model: object) -> "LoadedModel":
    from cachestore.encode.loaded import read_loaded

    return read_loaded(model)


def _from_processes(request: PrecomputeRequest, care: Care, brought: Brought, number: int) -> Report:
    """Let processes of their own encode: one that stands for this rank of a launch, or several that are a launch of their own.

    Where nothing is to be encoded none is started. Of sources in memory they get the rows as files, and the rest by asking.
    """
    placement = find_placement(request.rank, request.world_size)
    launch = _launch(placement)
    wanted = _look_first(request, placement, launch, brought)
    if wanted is not None and (report := _if_all_is_there(request, wanted, brought, number)) is not None:
        return report
    count = process_count(request)
    layout = wanted.layout if wanted is not None else open_for_pass(request.store)
    with _written(layout, request, brought) as written:
        arguments = replace(written, procs=None).arguments()
        care = replace(care, pictures=files_of_brought(brought) if brought else None)
        told = handed_on(layout) | {LISTING: str(number)}
        if request.procs is None and count == 1:
            launch = launch if wanted is None else numbered(launch, start_of(wanted.layout, wanted.plan, placement))
            children = run_child(arguments, _own_place(placement, launch) | told, care)
        else:
            children = run_children(arguments, count, care, told)
    report = Report.from_json(joined_report(children))
    count_start((Path(request.store).absolute(), report.plan, placement.rank))
    return _held_to(report, request)


@contextmanager
def _written(layout: Layout, request: PrecomputeRequest, brought: Brought) -> Generator[PrecomputeRequest]:
    """The request with the rows of sources in memory as files, which are removed afterwards."""
    sources, paths = list(request.sources), list[Path]()
    try:
        for number, listing in brought.items():
            path = write_rows(layout, listing, str(number))
            paths.append(path)
            sources[number] = replace(sources[number], data=str(path))
        yield replace(request, sources=tuple(sources))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def process_count(request: PrecomputeRequest) -> int:
    """How many processes to start: as asked, else one for each GPU, and none beside those of a launcher. Raises BadInput."""
    if request.procs is not None:
        if request.procs < 1 or (request.procs > 1 and request.rank is not None):
            raise BadInput(f"--procs starts local ranks, from 1 on, and does not go with --rank; got {request.procs}")
        return request.procs
    is_launched = request.rank is not None or find_placement(None, None).found_in != "single process"
    return 1 if is_launched or request.device != "auto" else max(1, gpu_count())


def _look_first(request: PrecomputeRequest, placement: Placement, launch: str, brought: Brought) -> Wanted | None:
    """Look at a request in the caller's process; None where a model would have to be downloaded: the hub's client starts threads."""
    from cachestore.encode.hub import is_here

    allowed_failures(request.max_failures, 0)  # refused now, not after a source was listed
    listing = _list_first(request, brought)
    models = [name for name in (request.model, request.vae, request.text_encoder) if name is not None]
    if not all(is_here(name, request.revision) for name in models):
        return None
    if request.strict:
        needs_of_request(request)  # refused now, before a store is made
    layout = open_for_pass(request.store)
    with _as_it_was(os.environ), Beat(layout, "", 0, launch, placement.rank, placement.world_size) as beat:
        return look_at_request(layout, request, beat=beat, brought=brought, listing=listing)


def _list_first(request: PrecomputeRequest, brought: Brought | None) -> Listing | None:
    """List the sources if there is no store yet, so that none is made for a source that cannot be used; None if there is a store.

    Raises BadInput, BadUsage.
    """
    if look_at(Layout.at(request.store).marker) is not None:
        return None
    listing = list_request(request, brought)
    check_listing(request, listing)
    return listing


def _if_all_is_there(request: PrecomputeRequest, wanted: Wanted, brought: Brought, number: int) -> Report | None:
    """The report of a pass with nothing to encode, made in this process without torch; None where something is to be encoded.

    Ranks that look while others still work get None too: to wait is a worker's business.
    """
    if _unknown(wanted)[1]:
        return None
    with _as_it_was(os.environ):
        try:
            store_id = wanted.layout.store_id
            return precompute_here(request, cancel=_BeforeAnyWork(), brought=brought, number=number, store_id=store_id)
        except Incomplete:
            return None


class _BeforeAnyWork:
    """Cancels what would encode or wait: a pass with nothing to do never asks."""

    def is_set(self) -> bool:
        """Always."""
        return True


@contextmanager
def _as_it_was(environment: MutableMapping[str, str]) -> Generator[None]:
    """Leave the environment as it was: what our libraries want is no business of the caller's."""
    before = dict(environment)
    try:
        yield
    finally:
        for name in {*environment} - {*before}:
            del environment[name]
        environment.update({name: value for name, value in before.items() if environment.get(name) != value})


def _unknown(wanted: Wanted) -> tuple[Reconciler, list[int]]:
    """The units not known to be present in the pass that a run would join or begin, which is not begun here."""
    numbers = list_passes(wanted.layout, wanted.plan.name)
    ref = PassRef(wanted.plan.name, numbers[-1] if numbers else 0)
    if numbers and read_done(wanted.layout, ref) is not None:
        ref = PassRef(ref.plan, ref.number + 1)
    reconciler = Reconciler(wanted.layout, wanted.plan, ref, wanted.listing, "", key_without_reading(wanted.encoders))
    with closing(load_snapshot(wanted.layout, for_planning=True)) as snapshot:
        return reconciler, reconciler.unknown(snapshot)


def _own_place(placement: Placement, launch: str) -> dict[str, str]:
    """What a worker started for this process's own rank is told: its launch and rank, which it could not find out by itself.

    Its parent is this process and not the agent, and where only rank 0 prints, another rank would get no report.
    """
    if placement.rank is None or placement.found_in == "single process":
        return {"CACHESTORE_LAUNCH": launch}
    place = {"CACHESTORE_RANK": str(placement.rank), "CACHESTORE_WORLD_SIZE": str(placement.world_size)}
    return {"CACHESTORE_LAUNCH": launch, **place}


_STORE: Final = "CACHESTORE_STORE"
"""The variable that says which store a started worker works on: its id, a space and its path. The worker's own children may use others."""


def handed_on(layout: Layout) -> dict[str, str]:
    """The variables for workers that are started for a store: if it is gone by then, they must not make another one in its place."""
    return {_STORE: f"{layout.store_id} {layout.root}"}


def open_for_pass(place: str, store_id: str = "") -> Layout:
    """Open the store at a path, or make one. If the store is known already, by its id or from the starting process, open only that one.

    Raises ReadFailed where that one is not there any more; otherwise as `create_store`.
    """
    layout = Layout.at(place)
    told, _, root = os.environ.get(_STORE, "").partition(" ")
    known = store_id or (told if root == str(layout.root) else "")
    return open_layout(replace(layout, store_id=known)) if known else create_store(layout.root)


def _to_log(line: str) -> None:
    """Log a command's line for a caller in Python. What is not made is a warning, so that it shows without logging being set up."""
    _log.log(logging.WARNING if line.startswith(NOT_MADE) else logging.INFO, "%s", line)


def precompute_here(
    request: PrecomputeRequest,
    *,
    say: Say = _to_log,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    loaded: "LoadedModel | None" = None,
    brought: Brought | None = None,
    number: int | None = None,
    store_id: str = "",
) -> Report:
    """Do one worker's part of `precompute` in this process. `say` gets lines for a person.

    `loaded` stands in for the request's model; `brought` are the listings of its sources that are in memory. `number` is that of the
    caller's listing; without one this process takes a number of its own. With a `store_id` only that store is written, and none is made.
    """
    from cachestore.encode.environment import set_library_defaults

    allowed_failures(request.max_failures, 0)  # refused now, not after the work
    set_library_defaults(os.environ)
    if request.strict:
        needs_of_request(request, loaded)  # refused now, before a store is made
    listing = _list_first(request, brought)
    layout = open_for_pass(request.store, store_id)
    placement = find_placement(request.rank, request.world_size)
    _say_conflict(placement, say)
    launch = _launch(placement)
    if listing is not None:  # it was listed before there was a store
        number = number or 0
    numbered = nullcontext(number) if number is not None else listing_number(layout, request.name)
    beating = Beat(layout, "", 0, launch, placement.rank, placement.world_size)
    with noticing_its_end(layout), numbered as listed, beating as beat:
        wanted = look_at_request(layout, request, beat=beat, loaded=loaded, brought=brought, listing=listing)
        _check_agreement(layout, wanted.intent, beat, say, strict=request.strict)

        def tell(reconciler: Reconciler, ref: PassRef) -> None:
            if placement.rank in (0, None):
                _tell_beforehand(layout, wanted, reconciler, ref, say)

        job = Job(
            layout,
            wanted.plan,
            wanted.encoders,
            wanted.listing,
            placement,
            launch,
            request=wanted.request.hints(),
            threads=_threads(request.workers, placement.local_world_size),
            cancel=cancel,
            on_progress=on_progress,
            on_open=tell,
            on_loaded=lambda reconciler, encoder: _look_again(layout, wanted, reconciler, encoder, say),
            beat=beat,
            listing=listed,
            compare=partial(compare, wanted.plan, replace_allowed=request.replace),
        )
        return replace(_held_to(run_pass(job), request), not_made_here=wanted.not_made_here)


def _check_agreement(layout: Layout, intent: Intent, beat: Beat, say: Say, *, strict: bool) -> None:
    """Hold what this start means against what others are doing. Raises BadInput within one launch or if `strict`, else says it."""
    for other in who_differs(layout, intent, worker=beat.worker):
        words = in_words(layout, intent, other)
        if strict or is_same_launch(other["launch"], beat.launch):
            raise BadInput(f"{words}. Every rank must be given the same source and model; nothing was encoded by this one")
        say(f"another run works on the same data set: {words}. Both go on; the one that listed its source last publishes the data set")


def look_ahead(request: PrecomputeRequest) -> "Forecast":
    """What `precompute` would do, looking at all captions and headers; opens no pass. Raises as `precompute`."""
    from cachestore.encode.environment import set_library_defaults
    from cachestore.jobs.forecast import make_forecast

    layout = open_for_pass(request.store)
    set_library_defaults(os.environ)
    wanted = look_at_request(layout, request)
    reconciler, missing = _unknown(wanted)
    return make_forecast(layout, wanted, reconciler, missing, look_at_all=True)


def _tell_beforehand(layout: Layout, wanted: Wanted, reconciler: Reconciler, ref: PassRef, say: Say) -> None:
    """Say what will be done, and refuse what the disk cannot hold."""
    from cachestore.jobs.forecast import in_words, make_forecast

    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        missing = reconciler.unknown(snapshot)
    looked = make_forecast(layout, wanted, reconciler, missing, look_at_all=False)
    if ref.number > 1 or looked.present:
        say(f"{looked.present} of {looked.wanted} units are present already; nothing of them is made again")
    for line in in_words(looked, layout.root):
        say(line)
    _check_room(layout, looked)


def _look_again(layout: Layout, wanted: Wanted, reconciler: Reconciler, encoder: Encoder, say: Say) -> None:
    """Where only loading shows what an entry takes: say what is needed now, and refuse what the disk cannot hold."""
    from cachestore.jobs.forecast import make_forecast, room_in_words

    if getattr(encoder, "found_bytes", None) is None:
        return
    with closing(load_snapshot(layout, for_planning=True)) as snapshot:
        missing = reconciler.unknown(snapshot)
    looked = make_forecast(layout, wanted, reconciler, missing, look_at_all=False)
    say(f"now that the text encoder is loaded: {room_in_words(looked, layout.root)}")
    _check_room(layout, looked)


def _check_room(layout: Layout, looked: "Forecast") -> None:
    if looked.estimated_bytes > looked.free_bytes:
        need = f"about {looked.estimated_bytes} bytes are needed, {looked.free_bytes} are free"
        raise WriteFailed(f"{need} at {layout.root}; make room, then run the same command again")


def _held_to(report: Report, request: PrecomputeRequest) -> Report:
    """Apply `max_failures` and `strict` to a report."""
    allowed = allowed_failures(request.max_failures, report.wanted)
    if report.failed > allowed and request.strict:
        named = "; ".join(f"{failure['sample']!r} ({failure['encoder']}): {failure['reason']}" for failure in report.failures[:3])
        raise EncodeFailed(f"{report.failed} of {report.wanted} units could not be encoded: {named}")
    return replace(report, complete=report.missing == 0 and report.failed <= allowed)


def allowed_failures(text: str, units: int) -> int:
    """How many units may fail: a count, or a share of the units such as `2%`. Raises BadInput."""
    number, share = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number) if share else int(number)
    except ValueError:
        value = -1
    if not value >= 0 or (share and value > 100):
        raise BadInput(f"--max-failures is a count or a share such as 2%, not {text!r}")
    return int(units * value / 100) if share else int(value)


def find_placement(rank: int | None, world_size: int | None) -> Placement:
    """Who this process is, as its environment says now. torch.distributed counts only where it is imported and initialised already."""
    found: tuple[int, int] | None = None
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found = (distributed.get_rank(), distributed.get_world_size())
    return discover(os.environ, rank=rank, world_size=world_size, distributed=found)


_said: set[str] = set()
"""What was said of contradictions in the environment of this process: once is enough."""


def _say_conflict(placement: Placement, say: Say) -> None:
    if placement.conflict and placement.conflict not in _said:
        _said.add(placement.conflict)
        say(placement.conflict)


def _launch(placement: Placement) -> str:
    """The launch's name; under torchrun without a run id the agent's process tells launches apart, alone a name of its own."""
    if placement.launch:
        return placement.launch
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"agent:{host_name()}:{os.getppid()}:{_started(os.getppid())}"
    return f"own:{secrets.token_hex(8)}"


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _threads(asked: int | None, local_world_size: int) -> int:
    """How many threads read and decode: as asked, else by the processors that each process of this machine has for itself."""
    if asked is not None and asked < 0:
        raise BadInput(f"--workers is a number of threads from 0 on, not {asked}")
    return max(1, min(READ_THREADS, processors() // local_world_size - 1)) if asked is None else asked


# fill


@dataclass(slots=True)
class _CallerEncoder:
    """The caller's own `encode`, as an encoder of the loop. A unit's id is its key."""

    recipe: Recipe
    items: Mapping[Key, Any]
    function: Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]
    limit: int
    group_by: Callable[[Any], Hashable] | None

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        """The key is the request."""
        del read
        key = Key.parse(request["key"])
        return Resolved(key, self.items[key], {}, {"encoder": self.recipe.encoder})

    def prepare(self, resolved: Resolved) -> Prepared:
        """The item itself, grouped as the caller says."""
        return Prepared(resolved.item, self.group_by(resolved.item) if self.group_by else None)

    @property
    def window(self) -> int:
        """A batch: the items are the caller's."""
        return self.limit

    def batch_limit(self, group: Hashable) -> int:
        """The caller's batch size."""
        del group
        return self.limit

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Call the caller's function, now and here; its keys may be in any form."""
        made = by_key(self.function(list(batch)))
        return lambda: made

    def close(self) -> None:
        """The caller's model is the caller's."""


class _NoSource:
    """`fill` has no files: items are the caller's."""

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Never called."""
        raise OSError(f"fill reads no files, but {reference!r} was asked for")

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, tuple[int, int]]]:
        """Never called."""
        raise OSError(f"fill reads no files, but {reference!r} was asked for")

    def stat(self, reference: str) -> tuple[int, int] | None:
        """Nothing to look at."""
        del reference
        return None


def fill(
    store: Store,
    wanted: Iterable[tuple[AnyKey, Any]],
    encode: Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]],
    *,
    batch_size: int | Literal["auto"] = "auto",
    group_by: Callable[[Any], Hashable] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    strict: bool = False,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
) -> Report:
    """Make values of your own, on any number of ranks; what the store holds is not made again.

    Args:
        store: open with `mode="a"`; it shows the new entries afterwards.
        wanted: (key, item) pairs; every rank passes the same keys. None at all is fine. Of equal keys the first item counts.
        encode: called in this process and thread with a list of (key, item); returns `{key: {name: tensor}}` for exactly these
            keys, torch tensors or numpy arrays. If it raises, the batch is tried in halves, and what fails alone is a failure;
            BadInput says that nothing can be encoded like this, and ends the run.
        batch_size: items in one call at most; "auto" is 16, halved for a group that runs out of memory.
        group_by: items of one call have equal `group_by(item)`.
        rank: this process's rank, with `world_size`; found in the environment where not given.
        world_size: the number of ranks.
        strict: raise if a unit failed.
        max_failures: how many may fail (a count, or a share such as "2%").
        on_progress: called in this thread, about once a second and at the end, with units published so far over all ranks:
            `{"plan", "pass", "reused", "encoded", "failed", "total"}`.
        cancel: anything with `is_set()`; set, it ends the work after the present batch.

    Returns:
        The report of the pass, the same on every rank.

    Raises:
        BadInput: a malformed key or option.
        EncodeFailed: with `strict`, if a unit failed.
        Incomplete: cancelled, or stuck; the same call goes on from there.
        WriteFailed: the disk refuses.
    """
    if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        refuse("store", 'what cs.open(path, mode="a") returned', store)
    check_function("encode", encode)
    if group_by is not None:
        check_function("group_by", group_by)
    check_calls(on_progress, cancel)
    strict = as_switch("strict", strict)
    limit = FILL_BATCH if batch_size == "auto" else as_whole("batch_size", batch_size, least=1)
    _ = store.snapshot  # raises where the store is closed
    if store.mode != "a":
        raise BadInput(f'{store.layout.root} is open for reading; open it with mode="a" to fill it')
    allowed_failures(str(max_failures), 0)  # refused now, not after the work
    items: dict[Key, Any] = {}
    for key, item in as_pairs("wanted", wanted):
        items.setdefault(Key.parse(key), item)
    encoder = _CallerEncoder(Recipe("values", {"kind": "values"}), items, encode, limit, group_by)
    placement = find_placement(rank, world_size)
    plan = plan_of_keys(encoder.recipe, items)
    if not is_published(store.layout, plan.name):
        publish_plan(store.layout, plan)
    _say_conflict(placement, _log.warning)
    observer = Observer(store.layout)
    tell = observer.following(on_progress) if on_progress else None
    job = Job(store.layout, plan, [encoder], _NoSource(), placement, _launch(placement), cancel=cancel, on_progress=tell)
    with noticing_its_end(store.layout), Beat(store.layout, "", 0, job.launch, placement.rank, placement.world_size) as beat:
        intent = Intent(plan.request, {}, plan.content, plan.name)
        beat.detail = intent.as_json()
        beat.write()
        # Two trainers that fill one store with values of their own are no mismatch: only ranks of one launch are held to one plan.
        _check_agreement(store.layout, intent, beat, _log.debug, strict=False)
        report = run_pass(replace(job, beat=beat))
    store.refresh()
    if on_progress and (ended := observer.newest(report.plan)) is not None:
        on_progress(ended.counts())
    return _held_to(report, PrecomputeRequest("", "", "", strict=strict, max_failures=str(max_failures)))
