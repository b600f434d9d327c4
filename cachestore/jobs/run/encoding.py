"""Encodes units in batches and appends the results to segments.

While one batch is encoded, the results of the batch before it are fetched, and a thread appends earlier ones.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from cachestore.core.errors import BadInput, EncodeFailed, Incomplete
from cachestore.core.inputs import references_of
from cachestore.core.keys import Key
from cachestore.core.tensors import fill_their_memory, to_raw
from cachestore.core.words import plural
from cachestore.encode.batching.batches import Batches
from cachestore.encode.batching.budget import is_lack_of_memory
from cachestore.encode.batching.pipeline import Behind
from cachestore.encode.batching.unit import LOADING, Encoder, Result
from cachestore.jobs.run.known_entries import KnownEntries
from cachestore.jobs.run.task import DecodedUnit, Job, PartitionGroup, outcome_of, words_of
from cachestore.jobs.share.ledgers import Outcome
from cachestore.jobs.share.passes import PassRef
from cachestore.jobs.share.stages import Stages
from cachestore.jobs.share.workers import COUNTS, Heartbeat
from cachestore.store.format.line import FILLED
from cachestore.store.write.append import Acknowledged, Appender

T = TypeVar("T")

APPEND_DEPTH: Final = 2
"""The most batches that wait to be appended: their tensors are in memory."""


@dataclass(slots=True)
class EncoderState:
    """An encoder within a worker, with its open batches."""

    recipe: int
    encoder: Encoder
    batches: Batches[DecodedUnit]
    is_warm: bool = False
    """Whether it got a batch since it was last closed: the first batch loads its model."""
    only: Sequence[int] | None = None
    """The partitions to do, as a trainer needs them now; None for all."""


@dataclass(slots=True)
class _Pending:
    state: EncoderState
    group: PartitionGroup
    batch: Sequence[DecodedUnit]
    result: Result | Exception
    """The function that waits for the tensors, or the error with which the encoder refused the batch."""
    seconds: float
    """How long submitting it took."""
    was_warm: bool


@dataclass(slots=True)
class _Appended:
    """What the thread that appends returns to the one that encodes."""

    then: Callable[[], None]
    acknowledged: list[Acknowledged] = field(default_factory=list[Acknowledged])
    after: int = 0
    """`then` is called once so many segments of this worker are durable."""


class Encoding:
    """Encodes units and publishes them. For use in the worker's thread; inside `with behind()`, other threads append the results."""

    def __init__(
        self, job: Job, ref: PassRef, heartbeat: Heartbeat, known: KnownEntries, stages: Stages, *, clock: Callable[[], float]
    ) -> None:
        self._job = job
        self._ref = ref
        self._heartbeat = heartbeat
        self._known = known
        self._stages = stages
        self._clock = clock
        self._appender = Appender(job.layout, origin=ref.origin, clock=clock)
        self._behind: Behind[_Appended] = Behind(APPEND_DEPTH if job.threads > 0 or job.appends_beside else 0)
        self._waiting: deque[_Appended] = deque()
        """Appended batches, and ends of groups, whose `then` is not called yet."""
        self._durable = 0
        """How many segments of this worker are durable."""
        self._under_way: deque[_Pending | Callable[[], None]] = deque()
        """Batches that are being encoded, and functions to call once the batches before them have ended."""
        self._encoder = ""
        """The encoder of the batches so far: all are published before another's begin."""
        self._promised: set[Key] = set()
        """Keys that are being encoded; another unit with such a key counts as found."""

    @contextmanager
    def behind(self) -> Generator[None]:
        """A context in which other threads append the results and write segments, if the job may use threads. They end with it."""
        with self._appender if self._behind.depth > 0 else nullcontext(), self._behind:  # who appends ends before who writes
            yield

    def discard(self) -> None:
        """Discard entries that are not acknowledged."""
        self._appender.discard()
        self._waiting.clear()

    def report_progress(self) -> None:
        """Call `on_progress` with this worker's counts."""
        if self._job.on_progress:
            counts = {name: getattr(self._heartbeat, name) for name in COUNTS}
            self._job.on_progress({"plan": self._ref.plan, "pass": self._ref.number, **counts})

    def check_cancelled(self) -> None:
        """If the job is cancelled, publish what is encoded and raise Incomplete."""
        if self._job.cancel is None or not self._job.cancel.is_set():
            return
        self.publish_pending()
        raise Incomplete(f"stopped on request; what was encoded is in {self._job.layout.root}. Run the same command again to continue")

    def add(self, state: EncoderState, group: PartitionGroup, unit: DecodedUnit | Outcome) -> None:
        """Record a unit that is finished, or found because another unit makes its key; put any other into a batch."""
        if isinstance(unit, Outcome):
            group.outcomes[unit.unit] = unit
            if unit.result == "failed":
                self._show_failure(unit.unit, unit.reason)
            elif unit.result == "made" and unit.key is not None and self._known.is_own(unit.key):
                group.repeated += 1
        elif unit.key in self._promised or self._known.is_own(unit.key):
            group.outcomes[unit.unit.index] = outcome_of(unit.unit, "found", unit.resolved, unit.stat, unit.facts)
        else:
            self._promised.add(unit.key)
            if batch := state.batches.add(unit.prepared, unit):
                self._encode(state, group, batch)

    def encode_rest(self, state: EncoderState, group: PartitionGroup) -> None:
        """Begin the batches that are not full."""
        for batch in state.batches.rest():
            self._encode(state, group, batch)

    def _show_failure(self, index: int, reason: str) -> None:
        """Show in the heartbeat that a unit failed, named by its caption or pictures."""
        plan = self._job.plan
        request = plan.unit(index).request
        named = ", ".join([repr(request["caption"])] if "caption" in request else references_of(request)) or plan.unit_ids[index].hex()
        self._heartbeat.has_failed(f"{named} ({plan.recipes[plan.recipe_of(index)].encoder})", reason)

    def after_all(self, then: Callable[[], None]) -> None:
        """Publish the open segment once the batches so far have ended; call `then` when it is durable."""
        self._under_way.append(lambda: self._take_in(self._behind.hand(partial(self._end_segment, then))))

    def finish(self) -> None:
        """Wait for all batches that are under way."""
        self.land(0)
        self._heartbeat.rise(doing="writing")
        self._publish_rest()

    def land(self, left: int) -> None:
        """End the batches and functions that are under way, in order, until `left` of them are left."""
        while len(self._under_way) > left:
            first = self._under_way.popleft()
            if isinstance(first, _Pending):
                self._end(first)
            else:
                first()

    def publish_pending(self) -> None:
        """Publish what is encoded, even if its partitions are not finished: the worker that takes them over finds it."""
        pending = [one for one in self._under_way if isinstance(one, _Pending)]
        self._under_way.clear()
        for one in pending:
            with suppress(Exception):  # this worker stops, so a failed batch is not tried again
                tensors = _made(one)
                self._take_in(self._behind.hand(partial(self._append, one.group, one.batch, tensors)))
        self._publish_rest()

    def rescue(self) -> None:
        """Publish what is encoded after an error, such as one of the caller's `on_progress`, which is not called again. Raises nothing."""
        self._job = replace(self._job, on_progress=None)
        with suppress(Exception):  # the error that ended the work is raised next, and counts
            self.publish_pending()

    def _publish_rest(self) -> None:
        self._take_in(self._behind.wait())
        self._take_in(self._behind.hand(self._close_segment))
        self._take_in(self._behind.wait())

    def _encode(self, state: EncoderState, group: PartitionGroup, batch: Sequence[DecodedUnit]) -> None:
        """Begin a batch, then end the one before it: its results are fetched while the GPU computes this one."""
        begun = self._begin(state, group, batch)
        self._under_way.append(begun)
        self.land(0 if isinstance(begun.result, Exception) else 1)  # a failure is handled before another batch of this size is tried
        self.check_cancelled()

    def _begin(self, state: EncoderState, group: PartitionGroup, batch: Sequence[DecodedUnit]) -> _Pending:
        """Submit a batch to the encoder. An error is handled when the batch ends, after the batches before it."""
        was_warm, state.is_warm = state.is_warm, True
        self._encoder = state.encoder.recipe.encoder
        if not was_warm:
            self._heartbeat.rise(phase="loading", doing=f"loading {self._encoder}")
        begun, token = self._clock(), LOADING.set(lambda component: self._heartbeat.rise(doing=f"loading {component}"))
        try:
            result = self._tried(lambda: state.encoder.submit([(unit.key, unit.prepared.payload) for unit in batch]))
        finally:
            LOADING.reset(token)
        seconds = self._clock() - begun
        self._heartbeat.rise(phase="working", doing=f"encoding {self._encoder}")
        if self._job.on_loaded is not None and not was_warm and not isinstance(result, Exception):
            self._job.on_loaded(state.encoder)
        return _Pending(state, group, batch, result, seconds, was_warm)

    def _end(self, one: _Pending) -> None:
        """Wait for a batch and hand its entries on. A batch that fails is tried in halves, so that only the bad units fail."""
        begun = self._clock()
        tensors = self._tried(lambda: _made(one))
        del one.result  # frees the memory that it holds
        if isinstance(tensors, Exception):
            batch, is_memory = one.batch, is_lack_of_memory(tensors)
            if len(batch) > 1:
                half = one.state.batches.did_not_fit(batch[0].prepared.group, len(batch)) if is_memory else len(batch) // 2
                for part in (batch[:half], batch[half:]):
                    self._end(self._begin(one.state, one.group, part))
            else:
                self._fail(one.group, batch[0], words_of(tensors), is_transient=is_memory or isinstance(tensors, OSError))
            return
        if one.was_warm:  # the first batch also loads the model: counted as slowest, it would hide for minutes that this worker hangs
            self._heartbeat.batch_took(one.seconds + self._clock() - begun)
        self._heartbeat.has_finished(self._encoder, unpublished=len(one.batch))
        self._take_in(self._behind.hand(partial(self._append, one.group, one.batch, tensors)))

    def _tried(self, work: Callable[[], T]) -> T | Exception:
        """Return what an encoder returns or the error that it raises. Raises BadInput, such as for a model that cannot be loaded.

        The error has no traceback: its frames would hold the memory that the halves of the batch need.
        """
        with self._stages.busy("encode"):
            try:
                return work()
            except BadInput:
                raise
            except Exception as error:  # noqa: BLE001 - encoders may be the caller's own: any error is an outcome
                return error.with_traceback(None)

    def _fail(self, group: PartitionGroup, unit: DecodedUnit, reason: str, *, is_transient: bool = False) -> None:
        group.outcomes[unit.unit.index] = Outcome(unit.unit.index, "failed", unit.key, reason=reason, is_transient=is_transient)
        self._show_failure(unit.unit.index, reason)
        self._promised.discard(unit.key)

    def _append(self, group: PartitionGroup, batch: Sequence[DecodedUnit], tensors: Mapping[Key, Mapping[str, Any]]) -> _Appended:
        """Append the entries of a batch to the open segment. Runs in the appending thread, and uses only the appender."""
        refused: dict[int, str] = {}
        appended = _Appended(partial(self._note, group, batch, refused))
        # A caller of `fill`, which reads with no thread, may change what it returned.
        put = self._appender.hold if self._job.threads > 0 and fill_their_memory(tensors.values()) else self._appender.put
        with self._stages.busy("append"):
            for unit in batch:
                try:
                    meta = {**unit.resolved.meta, **unit.prepared.facts}
                    appended.acknowledged += put(unit.key, to_raw(tensors[unit.key]), meta)
                except BadInput as error:
                    refused[unit.unit.index] = str(error)
            if self._appender.is_due:
                appended.acknowledged += self._appender.end_segment()
        return appended

    def _note(self, group: PartitionGroup, batch: Sequence[DecodedUnit], refused: Mapping[int, str]) -> None:
        """Record the outcomes of an appended batch; units in `refused` could not be stored."""
        for unit in batch:
            if (reason := refused.get(unit.unit.index)) is not None:
                self._heartbeat.has_finished(self._encoder, unpublished=-1)
                self._fail(group, unit, reason)
            else:
                group.outcomes[unit.unit.index] = outcome_of(unit.unit, "made", unit.resolved, unit.stat, unit.facts)

    def _end_segment(self, then: Callable[[], None]) -> _Appended:
        """Begin to publish the open segment. Runs in the appending thread; `then` is called in the thread that encodes."""
        with self._stages.busy("append"):
            return _Appended(then, self._appender.end_segment(), self._appender.ended)

    def _close_segment(self) -> _Appended:
        """Publish the open segment and wait for it, and for those before it. Runs in the appending thread."""
        with self._stages.busy("append"):
            return _Appended(lambda: None, self._appender.close_segment())

    def _take_in(self, batches: Iterable[_Appended]) -> None:
        """Record the segments that are durable now, and call what waits for them, in order."""
        for appended in batches:
            self._waiting.append(appended)
            for segment in appended.acknowledged:
                keys = segment.keys
                self._durable += 1
                self._known.add(segment)
                self._promised.difference_update(keys)
                self._heartbeat.encoded += len(keys)
                self._heartbeat.has_finished(self._encoder, units=len(keys), unpublished=-len(keys))
                self._heartbeat.write()
                self.report_progress()
            while self._waiting and self._waiting[0].after <= self._durable:
                self._waiting.popleft().then()


def _made(one: _Pending) -> Mapping[Key, Mapping[str, Any]]:
    """Wait for the tensors of a batch and check their keys. Raises EncodeFailed, or any error of the encoder."""
    if isinstance(one.result, Exception):
        raise one.result
    answer, encoder = one.result(), one.state.encoder.recipe.encoder
    who = "`encode`" if encoder == FILLED else f"the encoder {encoder!r}"
    if set(answer) != {unit.key for unit in one.batch}:
        raise EncodeFailed(
            f"{who} returned {plural(len(answer), 'key')}, not exactly the {plural(len(one.batch), 'key')} that it was asked for: let it"
            " return {key: {name: tensor}} with the keys of its batch, as it got them"
        )
    if not all(_are_named(tensors) for tensors in answer.values()):
        raise EncodeFailed(f"{who} returned something other than tensors with names: let it return {{name: tensor}} for each key")
    return answer


def _are_named(tensors: Any) -> bool:
    if not isinstance(tensors, Mapping):
        return False
    names = [*cast("Mapping[object, object]", tensors)]
    return bool(names) and all(isinstance(name, str) for name in names)
