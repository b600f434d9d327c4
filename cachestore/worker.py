"""One worker's part of a pass: claim partitions, resolve units, encode what is missing, append, and write ledgers.

It waits for nobody while there is anything to do, and what it waits for then is bounded. Rank and world size only order the work.
"""

import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol, cast

from cachestore.encode.unit import Encoder, Prepared, Resolved
from cachestore.errors import BadInput, CorruptEntry, EncodeFailed, FormatError, Incomplete
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import ClaimName, Layout, LedgerName
from cachestore.keys import Json, Key
from cachestore.storage.append import Acknowledged, Appender
from cachestore.storage.commit import commit_if_due
from cachestore.storage.segment import read_contents
from cachestore.storage.snapshot import load_snapshot
from cachestore.tensors import to_raw
from cachestore.work.attempts import Attempts
from cachestore.work.choice import choose, claims_to_take, poll_seconds
from cachestore.work.claims import Claims, Slot
from cachestore.work.ledgers import NO_STAT, Ledger, Outcome, list_ledgers, publish_ledger
from cachestore.work.partition import order_for
from cachestore.work.passes import PassRef, Round
from cachestore.work.plan import Plan, Unit
from cachestore.work.workers import Beat, Watch

STUCK_SECONDS: Final = 1800.0
"""Without any sign of progress for so long, waiting ends with an error that says for whom."""

_MEMORY_WORDS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "not enough memory")


class Source(Protocol):
    """Reads what units refer to."""

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Bytes and (size, mtime_ns) of a reference. Raises OSError."""
        ...


class Cancel(Protocol):
    """Anything like a `threading.Event`: set, it ends the work after the batch that is being encoded."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker works on."""

    layout: Layout
    plan: Plan
    ref: PassRef
    encoders: Sequence[Encoder]
    source: Source
    rank: int | None
    world_size: int
    launch: str
    threads: int = 0
    """Threads that read and prepare units; 0 does it in the caller's. They end with each pool."""
    cancel: Cancel | None = None
    on_progress: Callable[[Mapping[str, Json]], None] | None = None


@dataclass(frozen=True, slots=True)
class _Looked:
    """A unit after it was read: ready to be encoded, found in the store, or failed."""

    unit: Unit
    resolved: Resolved | None
    prepared: Prepared | None
    outcome: Outcome | None
    stat: tuple[int, int] = NO_STAT


@dataclass(slots=True)
class _Pool:
    """The partitions a worker holds at once, and what became of their units so far."""

    slots: list[Slot]
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    waiting: dict[Hashable, list[_Looked]] = field(default_factory=dict[Hashable, "list[_Looked]"])
    promised: set[Key] = field(default_factory=set[Key])
    """Keys that this pool encodes; further units with such a key are found. The keys alone: a pool may hold 2,000 pictures of 4 MB."""
    unacknowledged: int = 0


class Worker:
    """Does a worker's share of rounds. One process, one thread of its own beside the short-lived ones that read."""

    def __init__(
        self, task: Task, beat: Beat, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Looks at the store; starts nothing."""
        self.task = task
        self.beat = beat
        self.claims = Claims(task.layout, task.ref.folder(task.layout), beat.worker, Watch(task.layout, clock))
        self.attempts = Attempts(task.layout, self.claims.folder, beat.worker)
        self.snapshot = load_snapshot(task.layout, check_sizes=True)
        self._appender = Appender(task.layout, origin=task.ref.origin, clock=clock)
        self._own: dict[Key, str] = {}
        self._caps: dict[tuple[int, Hashable], int] = {}
        self._tokens: dict[str, dict[Key, Json]] = {}
        self._warm: set[int] = set()
        self._clock = clock
        self._sleep = sleep

    def close(self) -> None:
        """Give back models and files; what is gathered and not acknowledged is forgotten."""
        self._appender.discard()
        for encoder in self.task.encoders:
            encoder.close()
        self.snapshot.close()

    def pause(self) -> None:
        """Idle for one poll. Raises Incomplete when cancelled."""
        self._check_cancelled()
        self._tell()
        self._sleep(poll_seconds(self.task.world_size))

    def do_round(self, opened: Round) -> None:
        """Work until every partition of a round has a ledger, whoever wrote it.

        Raises Incomplete when cancelled or when nothing moves any more, WriteFailed when the disk refuses.
        """
        recipes = range(len(self.task.plan.recipes))
        waits = self.patience()
        if opened.number > 0:  # it was opened because something is missing: look at what is there, and believe nothing remembered
            self._own.clear()
            self._tokens.clear()
            self._look_again()
        while True:
            worked = False
            for recipe in recipes:
                while taken := self._take(opened, recipe):
                    self._do_pool(opened, recipe, taken)
                    worked = True
                self.task.encoders[recipe].close()
                self._warm.discard(recipe)
            finished = list_ledgers(self.claims.folder, opened.number)
            missing = [(recipe, p) for recipe in recipes for p in range(opened.partition_count(recipe)) if (recipe, p) not in finished]
            if not missing:
                return
            if not worked:
                newest = self.claims.newest(opened.number)
                self.wait(waits, len(finished), {slot: newest[slot] for slot in missing if slot in newest})

    def patience(self) -> "Patience":
        """Bounds a wait that begins now."""
        return Patience(self._clock)

    def wait(self, waits: "Patience", state: object, claims: Mapping[Slot, ClaimName]) -> None:
        """Idle for one poll: others hold all that is left. No claims at all are fine.

        Raises Incomplete when cancelled, or when neither `state` nor the claims nor the count of any holder moved for too long.
        """
        holders = [holder for claim in claims.values() if (holder := self.claims.holder(claim)) is not None]
        still = min((self.claims.watch.still_seconds(holder) for holder in holders), default=float("inf"))
        bound = max((2 * self.claims.watch.patience(holder) for holder in holders), default=0.0)
        waits.look((state, tuple(sorted(claims.values()))), still, max(STUCK_SECONDS, bound), lambda: self._waits_for(claims))
        self.pause()

    def _waits_for(self, claims: Mapping[Slot, ClaimName]) -> str:
        """Whom this worker waits for: the first few partitions, with their owners and what they said last."""
        named = [f"{self._name_of(slot)} held by {self._owner(claim)}" for slot, claim in list(claims.items())[:3]]
        what = f"{len(claims)} partitions: {'; '.join(named)}" if named else "partitions that nobody claims"
        return f"pass {self.task.ref.origin} of {self.task.layout.root} waits for {what}"

    def _name_of(self, slot: Slot) -> str:
        recipe, partition = slot
        if recipe == len(self.task.plan.recipes):
            return "the reconciling of its round"
        return f"partition {partition} of recipe {recipe} ({self.task.plan.recipes[recipe].encoder})"

    def _owner(self, claim: ClaimName) -> str:
        holder = self.claims.holder(claim)
        return "nobody (the claim cannot be read)" if holder is None else f"{self.claims.watch.last_beat(holder)} (worker {holder})"

    def _take(self, opened: Round, recipe: int) -> list[Slot]:
        """Claim the next partitions of a recipe: free ones, those of the dead, and when idle the slowest one of the living."""
        count, world = opened.partition_count(recipe), self.task.world_size
        order = order_for(self.task.rank, world, count, seed=int(self.beat.worker[:8], 16))
        each = len(opened.units[recipe]) // max(1, count)
        lost: set[int] = set()  # taken by others though no listing shows it yet: on NFS that takes up to a minute
        while True:
            finished = {p for of, p in list_ledgers(self.claims.folder, opened.number) if of == recipe}
            newest = {p: claim for (of, p), claim in self.claims.newest(opened.number).items() if of == recipe}
            choice = choose(order, finished=finished, claimed=lost.union(newest), each=each, world_size=world)
            if not choice.free:
                return self._take_over(opened, [newest[p] for p in choice.held if p in newest])
            if taken := [(recipe, p) for p in choice.free if self.claims.take(opened.number, (recipe, p))]:
                return taken
            lost.update(choice.free)
            self._check_cancelled()

    def _take_over(self, opened: Round, claims: Sequence[ClaimName]) -> list[Slot]:
        """With nothing free, take one claim of a dead or silent worker, else do the slowest one over: at worst a duplicate."""
        for claim in claims_to_take(self.claims.look_at(claims)):
            slot = (claim.recipe, claim.partition)
            if self.claims.take(opened.number, slot, after=claim):
                self._look_again()
                return [slot]
        return []

    def _look_again(self) -> None:
        """See what the dead have acknowledged before doing their work over."""
        before = self.snapshot
        self.snapshot = load_snapshot(self.task.layout, earlier=before, check_sizes=True)
        before.close()

    def _do_pool(self, opened: Round, recipe: int, slots: list[Slot]) -> None:
        pool = _Pool(slots)
        encoder = self.task.encoders[recipe]
        units = [self.task.plan.unit(place) for _recipe, p in slots for place in opened.partition(recipe, p)]
        dead = list(dict.fromkeys(worker for slot in slots for worker in self.claims.died_before(opened.number, slot)))
        self.beat.rise(phase="working")
        try:
            if dead:
                self._do_one_by_one(pool, encoder, units, dead)
            else:
                self._do_in_batches(pool, encoder, units)
        except (KeyboardInterrupt, SystemExit):
            self._publish_gathered()
            raise
        self._acknowledge(pool, self._appender.close_segment())
        failpoint("worker.before_ledger")
        self._write_ledgers(opened, recipe, pool)
        self.snapshot = commit_if_due(self.task.layout, self.snapshot)

    def _do_in_batches(self, pool: _Pool, encoder: Encoder, units: Sequence[Unit]) -> None:
        with closing(self._look_at_all(encoder, units)) as looks:  # its threads end here, however this ends
            for looked in looks:
                self._check_cancelled()
                self._sort_in(pool, encoder, looked)
                self.beat.rise(phase="working")
        self._encode_waiting(pool, encoder)

    def _do_one_by_one(self, pool: _Pool, encoder: Encoder, units: Sequence[Unit], dead: Sequence[str]) -> None:
        """Do what somebody died of without dying of it: each unit alone, named before it is read, and none that a dead one named."""
        deadly = self._deadly(dead)
        try:
            for unit in units:
                self._check_cancelled()
                if unit.place in deadly:
                    pool.outcomes[unit.place] = Outcome(unit.place, "failed", reason=deadly[unit.place])
                    continue
                self.attempts.begin(unit.place)
                self._sort_in(pool, encoder, self._look_at(encoder, unit))
                self._encode_waiting(pool, encoder)
                self.beat.rise(phase="working")
        finally:
            self.attempts.end()

    def _deadly(self, dead: Sequence[str]) -> dict[int, str]:
        """The units that dead workers were on when they died, each with how that came about."""
        named = self.attempts.last_units()
        return {named[worker]: self._how_they_died(dead, worker) for worker in dead if worker in named}

    def _how_they_died(self, dead: Sequence[str], alone: str) -> str:
        watch, others = self.claims.watch, [worker for worker in dead if worker != alone]
        if not others:
            return f"a worker died encoding it alone: {watch.name_of(alone)}; the next pass tries it again"
        among = f"{watch.name_of(others[0])} with it among others, {watch.name_of(alone)} with it alone"
        return f"two workers died encoding it: {among}; the next pass tries it again"

    def _encode_waiting(self, pool: _Pool, encoder: Encoder) -> None:
        for group in list(pool.waiting):
            self._encode(pool, encoder, pool.waiting.pop(group))

    def _write_ledgers(self, opened: Round, recipe: int, pool: _Pool) -> None:
        for slot in pool.slots:
            outcomes = tuple(pool.outcomes[place] for place in opened.partition(recipe, slot[1]))
            name = LedgerName(opened.number, *slot)
            publish_ledger(self.task.layout, self.claims.folder, Ledger(name, self.beat.worker, self.task.launch, outcomes))
        self.beat.reused += sum(1 for outcome in pool.outcomes.values() if outcome.result == "found")
        self.beat.failed += sum(1 for outcome in pool.outcomes.values() if outcome.result == "failed")
        self.beat.write()
        self._tell()

    def _tell(self) -> None:
        if self.task.on_progress:
            counts = {"reused": self.beat.reused, "encoded": self.beat.encoded, "failed": self.beat.failed}
            self.task.on_progress({"plan": self.task.ref.plan, "pass": self.task.ref.number, **counts})

    def _look_at_all(self, encoder: Encoder, units: Sequence[Unit]) -> Generator[_Looked]:
        """Read and prepare units in order, a few ahead in threads that end with this pool."""
        if self.task.threads <= 0:
            yield from (self._look_at(encoder, unit) for unit in units)
            return
        with ThreadPoolExecutor(self.task.threads, thread_name_prefix="cachestore-read") as threads:
            yield from _ahead(threads, lambda unit: self._look_at(encoder, unit), units, self.task.threads * 2)

    def _look_at(self, encoder: Encoder, unit: Unit) -> _Looked:
        """Resolve a unit, and prepare it if the store does not hold its key. Called from reading threads; touches only what they may."""
        stats: list[tuple[int, int]] = []

        def read(reference: str) -> bytes:
            data, stat = self.task.source.read(reference)
            stats.append(stat)
            return data

        try:
            resolved = encoder.resolve(unit.request, read)
            stat = stats[0] if len(stats) == 1 else NO_STAT
            if found := self._found(unit, resolved, stat):
                return _Looked(unit, resolved, None, found, stat)
            return _Looked(unit, resolved, encoder.prepare(resolved), None, stat)
        except BadInput:
            raise  # the request or the model itself is wrong: every unit would fail alike
        except EncodeFailed as error:
            return _Looked(unit, None, None, Outcome(unit.place, "failed", reason=str(error)))
        except (OSError, MemoryError) as error:
            return _Looked(unit, None, None, Outcome(unit.place, "failed", reason=_words(error), is_transient=True))

    def _found(self, unit: Unit, resolved: Resolved, stat: tuple[int, int]) -> Outcome | None:
        """The outcome of a unit whose key the store holds, or this worker has acknowledged."""
        if digest := self._own.get(resolved.key):
            facts = resolved.facts or self._stored_facts(resolved.key, digest)
            return _outcome(unit, "made", resolved, stat, facts)
        places = self.snapshot.find([resolved.key])[0]
        if not places:
            return None
        facts = resolved.facts or self._stored_facts(resolved.key, places[0].segment.digest)
        was_made_here = any(place.segment.origin == self.task.ref.origin for place in places)
        return _outcome(unit, "made" if was_made_here else "found", resolved, stat, facts)

    def _stored_facts(self, key: Key, digest: str) -> dict[str, Json]:
        """Facts known only when a caption was encoded, from its entry's JSON value."""
        if digest not in self._tokens:
            try:
                contents = self.snapshot.uncovered.get(digest) or read_contents(self.task.layout.segment(digest))
            except (FormatError, CorruptEntry, OSError):
                return {}
            self._tokens[digest] = {entry.key: entry.meta["tokens"] for entry in contents.entries if "tokens" in entry.meta}
        tokens = self._tokens[digest].get(key)
        return {} if tokens is None else {"tokens": tokens}

    def _sort_in(self, pool: _Pool, encoder: Encoder, looked: _Looked) -> None:
        """Put a unit where it belongs: finished, waiting for a batch of its group, or found because another unit makes its key."""
        if looked.outcome is not None or looked.resolved is None or looked.prepared is None:
            assert looked.outcome is not None
            pool.outcomes[looked.unit.place] = looked.outcome
            return
        if looked.resolved.key in pool.promised:
            pool.outcomes[looked.unit.place] = _outcome(looked.unit, "found", looked.resolved, looked.stat, _facts(looked))
            return
        pool.promised.add(looked.resolved.key)
        group = looked.prepared.group
        batch = pool.waiting.setdefault(group, [])
        batch.append(looked)
        if len(batch) >= self._limit(encoder, group):
            self._encode(pool, encoder, pool.waiting.pop(group))

    def _limit(self, encoder: Encoder, group: Hashable) -> int:
        return min(encoder.batch_limit(group), self._caps.get((id(encoder), group), 1 << 30))

    def _encode(self, pool: _Pool, encoder: Encoder, batch: Sequence[_Looked]) -> None:
        """Encode one batch and gather its entries. What fails together is tried in halves, so that nobody's neighbour suffers."""
        if not batch:
            return
        started = self._clock()
        was_warm = self._warm_up(encoder)
        tensors: Mapping[Key, Mapping[str, Any]] = {}
        failure: Exception | None = None
        try:
            tensors = _encode_checked(encoder, batch)
        except BadInput:
            raise  # as when preparing: a model that cannot be loaded would fail a million samples one by one
        except Exception as error:  # noqa: BLE001 - the boundary to encoders, which are the caller's own: any error is an outcome
            # Without its traceback, and outside this handler: its frames hold the memory that the halves will need.
            failure = error.with_traceback(None)
        self.beat.rise(phase="working")
        if failure is not None:
            self._fall_back(pool, encoder, batch, failure)
            return
        if was_warm:  # else it took as long as loading the model does, and nobody would notice for minutes that this worker hangs
            self.beat.batch_took(self._clock() - started)
        self._gather(pool, batch, tensors)
        if self._appender.is_due:
            self._acknowledge(pool, self._appender.close_segment())
        self._check_cancelled()

    def _gather(self, pool: _Pool, batch: Sequence[_Looked], tensors: Mapping[Key, Mapping[str, Any]]) -> None:
        """Put the entries of a batch into the open segment. One that cannot be stored is a failure of its unit alone."""
        for looked in batch:
            assert looked.resolved is not None
            meta = {**looked.resolved.meta, **(looked.prepared.facts if looked.prepared else {})}
            try:
                acknowledged = self._appender.put(looked.resolved.key, to_raw(tensors[looked.resolved.key]), meta)
            except BadInput as error:
                pool.outcomes[looked.unit.place] = Outcome(looked.unit.place, "failed", looked.resolved.key, reason=str(error))
                continue
            pool.outcomes[looked.unit.place] = _outcome(looked.unit, "made", looked.resolved, looked.stat, _facts(looked))
            pool.unacknowledged += 1
            self._acknowledge(pool, acknowledged)

    def _warm_up(self, encoder: Encoder) -> bool:
        """Whether this encoder has made a batch already; if not, show at once that it may be loading its model now."""
        number = next(number for number, one in enumerate(self.task.encoders) if one is encoder)
        if number in self._warm:
            return True
        self._warm.add(number)
        self.beat.rise(phase="loading")
        return False

    def _fall_back(self, pool: _Pool, encoder: Encoder, batch: Sequence[_Looked], error: Exception) -> None:
        is_memory = _is_memory(error)
        if len(batch) > 1:
            assert batch[0].prepared is not None
            half = max(1, len(batch) // 2)
            if is_memory:
                self._caps[(id(encoder), batch[0].prepared.group)] = half
            self._encode(pool, encoder, batch[:half])
            self._encode(pool, encoder, batch[half:])
            return
        place = batch[0].unit.place
        key = batch[0].resolved.key if batch[0].resolved else None
        pool.outcomes[place] = Outcome(place, "failed", key, reason=_words(error), is_transient=is_memory or isinstance(error, OSError))

    def _acknowledge(self, pool: _Pool, acknowledged: Iterable[Acknowledged]) -> None:
        for segment in acknowledged:
            self._own.update(dict.fromkeys(segment.places, segment.digest))
            self.beat.encoded += len(segment.places)
            pool.unacknowledged = 0
            self.beat.write()
            self._tell()

    def _check_cancelled(self) -> None:
        if self.task.cancel is None or not self.task.cancel.is_set():
            return
        self._publish_gathered()
        message = f"stopped on request; what is encoded is published in {self.task.layout.root}, and the same command goes on from there"
        raise Incomplete(message)

    def _publish_gathered(self) -> None:
        """Acknowledge what is encoded, though its partitions are not finished; who takes them over finds it. Nothing gathered is fine."""
        for segment in self._appender.close_segment():
            self.beat.encoded += len(segment.places)


@dataclass(slots=True)
class Patience:
    """Bounds a wait: something must change within a while."""

    clock: Callable[[], float]
    _last: object = None
    _since: float = 0.0

    def look(self, state: object, still_seconds: float, bound_seconds: float, who: Callable[[], str]) -> None:
        """Raise Incomplete if neither `state` nor any holder's count moved for longer than the bound."""
        if state != self._last:
            self._last, self._since = state, self.clock()
        if min(self.clock() - self._since, still_seconds) > bound_seconds:
            message = (
                f"{who()}; nothing moved for {bound_seconds / 60:.0f} minutes: look at `cachestore status`, then run the same command again"
            )
            raise Incomplete(message)


def _ahead(threads: ThreadPoolExecutor, function: Callable[[Unit], _Looked], units: Sequence[Unit], depth: int) -> Iterator[_Looked]:
    """Results in order, with at most `depth` units being worked on ahead."""
    remaining = iter(units)
    queue: list[Future[_Looked]] = [threads.submit(function, unit) for unit in islice(remaining, depth)]
    try:
        while queue:
            looked = queue.pop(0).result()
            queue += [threads.submit(function, unit) for unit in islice(remaining, 1)]
            yield looked
    finally:
        for future in queue:
            future.cancel()


def _encode_checked(encoder: Encoder, batch: Sequence[_Looked]) -> Mapping[Key, Mapping[str, Any]]:
    """Encode, and hold the answer against the question: exactly the keys that were asked for, by set equality."""
    asked = [(looked.resolved.key, looked.prepared.payload) for looked in batch if looked.resolved and looked.prepared]
    answer = encoder.encode(asked)
    if set(answer) != {key for key, _payload in asked}:
        message = f"the encoder {encoder.recipe.encoder!r} returned {len(answer)} keys that are not the {len(asked)} it was asked for"
        raise EncodeFailed(message)
    for tensors in answer.values():
        _check_names(encoder, tensors)
    return answer


def _check_names(encoder: Encoder, tensors: Any) -> None:
    is_mapping = isinstance(tensors, Mapping)
    if not is_mapping or not all(isinstance(name, str) for name in cast("Mapping[object, object]", tensors)):
        message = f"the encoder {encoder.recipe.encoder!r} returned no tensors by name for a key"
        raise EncodeFailed(message)


def _outcome(unit: Unit, result: str, resolved: Resolved, stat: tuple[int, int], facts: Mapping[str, Json]) -> Outcome:
    digests = list(resolved.inputs.values())
    return Outcome(unit.place, "made" if result == "made" else "found", resolved.key, digests[0] if len(digests) == 1 else "", stat, facts)


def _facts(looked: _Looked) -> dict[str, Json]:
    assert looked.resolved is not None
    return {**looked.resolved.facts, **(looked.prepared.facts if looked.prepared else {})}


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY_WORDS)


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, EncodeFailed | BadInput | OSError) else f"{type(error).__name__}: {text}"
