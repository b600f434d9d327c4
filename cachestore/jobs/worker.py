"""One worker's part of a pass: claim partitions, resolve units, encode what is missing, append, and write ledgers.

It waits for nobody while there is anything to do, and what it waits for then is bounded. Rank and world size only order the work.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Final, Protocol, cast

from cachestore.core.errors import BadInput, CorruptEntry, EncodeFailed, FormatError, Incomplete
from cachestore.core.inputs import NO_STAT, combined_digest, combined_stat
from cachestore.core.keys import Json, Key
from cachestore.core.tensors import to_raw
from cachestore.encode.batches import Batches
from cachestore.encode.budget import is_lack_of_memory
from cachestore.encode.pipeline import Behind, ahead
from cachestore.encode.unit import Encoder, Prepared, Resolved, Result
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import ClaimName, Layout, LedgerName
from cachestore.storage.append import Acknowledged, Appender
from cachestore.storage.commit import UNCOVERED_LIMIT, commit_if_due
from cachestore.storage.segment import read_contents
from cachestore.storage.snapshot import Snapshot, load_snapshot
from cachestore.work.attempts import Attempts
from cachestore.work.choice import POOL_UNITS, choose, claims_to_take, poll_seconds
from cachestore.work.claims import Claims, Slot
from cachestore.work.ledgers import Ledger, Outcome, list_ledgers, publish_ledger
from cachestore.work.partition import order_for
from cachestore.work.passes import PassRef, Round
from cachestore.work.plan import Plan, Unit
from cachestore.work.stages import Stages
from cachestore.work.workers import Beat, Watch

STUCK_SECONDS: Final = 1800.0
"""Without any sign of progress for so long, waiting ends with an error that says for whom."""

APPEND_DEPTH: Final = 2
"""Batches that wait to be appended, at most: their tensors are in memory."""
WAITING_BYTES: Final = 1 << 30
"""While prepared units take more memory than this, no further one is begun: of videos a few do."""
WINDOWS: Final = 4
"""How many times what may wait for a batch (`Encoder.window`) a worker likes to have claimed."""


class Source(Protocol):
    """Reads what units refer to."""

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Bytes and (size, mtime_ns) of a reference. Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, tuple[int, int]]]:
        """The same to be read in places. Raises OSError."""
        ...

    def stat(self, reference: str) -> tuple[int, int] | None:
        """(size, mtime_ns) now; None where the file is gone."""
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
    """Threads that read and prepare units, beside one that appends; 0 does all of it in the caller's. They end before a call returns."""
    cancel: Cancel | None = None
    on_progress: Callable[[Mapping[str, Json]], None] | None = None
    on_loaded: Callable[[Encoder], None] | None = None
    """Called when an encoder has taken its first batch, for which it loads its model. What it raises ends the work."""


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
    """Partitions that a worker claimed together, and what became of their units so far."""

    opened: Round
    slots: list[Slot]
    dead: list[str]
    """Workers that died with one of these partitions."""
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])


@dataclass(slots=True)
class _Station:
    """An encoder at work."""

    recipe: int
    encoder: Encoder
    batches: Batches[_Looked]
    is_warm: bool = False
    """Whether it was given a batch since it was last closed: the first one loads its model."""


@dataclass(slots=True)
class _Flight:
    """A batch that was handed to an encoder."""

    station: _Station
    pool: _Pool
    batch: Sequence[_Looked]
    is_warm: bool
    result: Result | None = None
    failure: Exception | None = None
    seconds: float = 0.0
    """That handing it over took."""


@dataclass(slots=True)
class _Kept:
    """What the thread that appends tells the one that encodes."""

    pool: _Pool | None
    batch: Sequence[_Looked]
    acknowledged: list[Acknowledged] = field(default_factory=list[Acknowledged])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Why entries of units cannot be stored."""
    then: Callable[[], None] | None = None


class Worker:
    """Does a worker's share of rounds. Belongs to one thread; those that read ahead and append behind it end before a call returns."""

    def __init__(
        self, task: Task, beat: Beat, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Looks at the store; starts nothing."""
        self.task = task
        self.beat = beat
        self.claims = Claims(task.layout, task.ref.folder(task.layout), beat.worker, Watch(task.layout, clock))
        self.attempts = Attempts(task.layout, self.claims.folder, beat.worker)
        self.snapshot = load_snapshot(task.layout, for_planning=True)
        self._appender = Appender(task.layout, origin=task.ref.origin, clock=clock)
        self._behind: Behind[_Kept] = Behind(APPEND_DEPTH if task.threads > 0 else 0)
        self._flights: deque[_Flight | Callable[[], None]] = deque()
        """Batches that are being encoded, and what is to be done after those before it."""
        self._stations = [_Station(n, encoder, Batches(encoder.batch_limit)) for n, encoder in enumerate(task.encoders)]
        self._stages = Stages(clock)
        self._own: dict[Key, str] = {}
        """Segments of the keys that this worker has published."""
        self._promised: set[Key] = set()
        """Keys that are being encoded; further units with such a key are found."""
        self._published = 0
        """Segments since the snapshot was taken."""
        self._stale: list[Snapshot] = []
        """Earlier snapshots, into which reading threads may still look."""
        self._tokens: dict[str, dict[Key, Json]] = {}
        self._clock = clock
        self._sleep = sleep

    def close(self) -> None:
        """Give back models and files; what is gathered and not acknowledged is forgotten."""
        self._appender.discard()
        for encoder in self.task.encoders:
            encoder.close()
        self._close_stale()
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
            for station in self._stations:
                worked |= self._do_recipe(opened, station)
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

    def _take(self, opened: Round, recipe: int, *, is_ahead: bool = False) -> list[Slot]:
        """Claim the next partitions of a recipe: free ones, those of the dead, and when idle the slowest one of the living.

        With `is_ahead`, while others are still being done, free ones only and none unless plenty is left.
        """
        count, world = opened.partition_count(recipe), self.task.world_size
        order = order_for(self.task.rank, world, count, seed=int(self.beat.worker[:8], 16))
        each = len(opened.units[recipe]) // max(1, count)
        units = max(POOL_UNITS, WINDOWS * self.task.encoders[recipe].window)
        lost: set[int] = set()  # taken by others though no listing shows it yet: on NFS that takes up to a minute
        while True:
            finished = {p for of, p in list_ledgers(self.claims.folder, opened.number) if of == recipe}
            newest = {p: claim for (of, p), claim in self.claims.newest(opened.number).items() if of == recipe}
            choice = choose(order, finished=finished, claimed=lost.union(newest), each=each, world_size=world, units=units)
            if is_ahead and not choice.is_plenty:
                return []
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
        self.snapshot = load_snapshot(self.task.layout, earlier=before, for_planning=True)
        before.close()

    def _do_recipe(self, opened: Round, station: _Station) -> bool:
        """Work on a recipe until nothing of it is left to take; whether there was anything."""
        worked = False
        while taken := self._take(opened, station.recipe):
            worked = True
            self._do_taken(opened, station, self._pool_of(opened, taken))
        station.encoder.close()
        station.is_warm = False
        return worked

    def _pool_of(self, opened: Round, slots: list[Slot]) -> _Pool:
        dead = dict.fromkeys(worker for slot in slots for worker in self.claims.died_before(opened.number, slot))
        return _Pool(opened, slots, list(dead))

    def _do_taken(self, opened: Round, station: _Station, pool: _Pool) -> None:
        """Do a pool of partitions, and while plenty is free what comes after them."""
        self.beat.rise(phase="working")
        with self._behind, self._stages.stretch(max(1, self.task.threads)):
            try:
                if pool.dead:
                    self._do_one_by_one(station, pool)
                else:
                    self._do_in_batches(opened, station, pool)
                self._land(0)
                self._take_in(self._behind.wait())
            except (KeyboardInterrupt, SystemExit):
                self._publish_gathered()
                raise
        self._close_stale()
        self.beat.stages = self._stages.as_json()
        self.beat.write()

    def _do_in_batches(self, opened: Round, station: _Station, pool: _Pool) -> None:
        encoder, threads = station.encoder, self.task.threads
        looks = ahead(
            partial(self._look, encoder),
            self._units(opened, station, pool),
            threads=threads,
            depth=max(2 * threads, encoder.window),
            weigh=_waiting_bytes,
            most=WAITING_BYTES,
        )
        with closing(looks):  # its threads end here, however this ends
            for of, looked in looks:
                self._check_cancelled()
                if looked is None:
                    self._finish(station, of)
                else:
                    self._sort_in(station, of, looked)
                self.beat.rise(phase="working")

    def _units(self, opened: Round, station: _Station, pool: _Pool) -> Iterator[tuple[_Pool, Unit | None]]:
        """The units of a pool, its end, then those of the next one, which is claimed when somebody asks for them."""
        while True:
            for _recipe, p in pool.slots:
                yield from ((pool, self.task.plan.unit(place)) for place in opened.partition(station.recipe, p))
            yield pool, None
            taken = self._take(opened, station.recipe, is_ahead=True)
            if not taken:
                return
            pool = self._pool_of(opened, taken)

    def _look(self, encoder: Encoder, step: tuple[_Pool, Unit | None]) -> tuple[_Pool, _Looked | None]:
        pool, unit = step
        return pool, None if unit is None else self._look_at(encoder, unit)

    def _do_one_by_one(self, station: _Station, pool: _Pool) -> None:
        """Do what somebody died of without dying of it: each unit alone, named before it is read, and none that a dead one named."""
        deadly = self._deadly(pool.dead)
        try:
            for place in (place for _recipe, p in pool.slots for place in pool.opened.partition(station.recipe, p)):
                self._check_cancelled()
                if place in deadly:
                    pool.outcomes[place] = Outcome(place, "failed", reason=deadly[place])
                    continue
                self.attempts.begin(place)
                self._sort_in(station, pool, self._look_at(station.encoder, self.task.plan.unit(place)))
                for batch in station.batches.rest():
                    self._encode(station, pool, batch)
                self._land(0)
                self.beat.rise(phase="working")
            self._finish(station, pool)
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

    def _finish(self, station: _Station, pool: _Pool) -> None:
        """Encode what waits, then let the segment be closed, as every unit of the pool was looked at."""
        for batch in station.batches.rest():
            self._encode(station, pool, batch)
        self._flights.append(partial(self._close_pool, station, pool))

    def _close_pool(self, station: _Station, pool: _Pool) -> None:
        self._take_in(self._behind.hand(partial(self._close_segment, partial(self._write_ledgers, station, pool))))

    def _write_ledgers(self, station: _Station, pool: _Pool) -> None:
        """Say what became of the units of a pool. Their entries are acknowledged."""
        failpoint("worker.before_ledger")
        for slot in pool.slots:
            outcomes = tuple(pool.outcomes[place] for place in pool.opened.partition(station.recipe, slot[1]))
            name = LedgerName(pool.opened.number, *slot)
            publish_ledger(self.task.layout, self.claims.folder, Ledger(name, self.beat.worker, self.task.launch, outcomes))
        self.beat.reused += sum(1 for outcome in pool.outcomes.values() if outcome.result == "found")
        self.beat.failed += sum(1 for outcome in pool.outcomes.values() if outcome.result == "failed")
        self.beat.write()
        self._tell()
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        """Commit when many segments are uncovered. Reading threads may still look into the snapshot that was; it is closed later."""
        before = self.snapshot
        if self._published > UNCOVERED_LIMIT:
            self._published = 0
            self.snapshot = load_snapshot(self.task.layout, earlier=before, for_planning=True)
            self._stale.append(before)
        newer = commit_if_due(self.task.layout, self.snapshot)
        if newer is not self.snapshot:
            self._stale.append(self.snapshot)
            self.snapshot = newer

    def _close_stale(self) -> None:
        """Close the snapshots that nobody looks into any more."""
        while self._stale:
            self._stale.pop().close()

    def _tell(self) -> None:
        if self.task.on_progress:
            counts = {"reused": self.beat.reused, "encoded": self.beat.encoded, "failed": self.beat.failed}
            self.task.on_progress({"plan": self.task.ref.plan, "pass": self.task.ref.number, **counts})

    def _look_at(self, encoder: Encoder, unit: Unit) -> _Looked:
        """Resolve a unit, and prepare it if the store does not hold its key. Called from reading threads; touches only what they may."""
        reading = _Reading(self.task.source)
        try:
            with self._stages.busy("read"):
                resolved = encoder.resolve(unit.request, reading)
                stat = combined_stat(list(reading.stats))
                found = self._found(unit, resolved, stat)
            if found is not None:
                return _Looked(unit, resolved, None, found, stat)
            with self._stages.busy("prepare"):
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

    def _sort_in(self, station: _Station, pool: _Pool, looked: _Looked) -> None:
        """Put a unit where it belongs: finished, waiting for a batch of its group, or found because another unit makes its key."""
        if looked.outcome is not None or looked.resolved is None or looked.prepared is None:
            assert looked.outcome is not None
            pool.outcomes[looked.unit.place] = looked.outcome
            return
        key = looked.resolved.key
        if key in self._promised or key in self._own:
            pool.outcomes[looked.unit.place] = _outcome(looked.unit, "found", looked.resolved, looked.stat, _facts(looked))
            return
        self._promised.add(key)
        if batch := station.batches.add(looked.prepared, looked):
            self._encode(station, pool, batch)

    def _encode(self, station: _Station, pool: _Pool, batch: Sequence[_Looked]) -> None:
        """Begin a batch, then end the one before it: while a GPU is at this one, that one's results are put away."""
        flight = self._begin(station, pool, batch)
        self._flights.append(flight)
        self._land(0 if flight.failure is not None else 1)  # before another of its size is tried
        self._check_cancelled()

    def _land(self, left: int) -> None:
        """End what is under way, in order, until so much is left."""
        while len(self._flights) > left:
            first = self._flights.popleft()
            if isinstance(first, _Flight):
                self._end(first)
            else:
                first()

    def _begin(self, station: _Station, pool: _Pool, batch: Sequence[_Looked]) -> _Flight:
        """Hand a batch to the encoder. Whatever it raises is told when the flight ends, so that those before it end first."""
        flight = _Flight(station, pool, batch, is_warm=station.is_warm)
        if not station.is_warm:
            station.is_warm = True
            self.beat.rise(phase="loading")
        begun = self._clock()
        with self._stages.busy("encode"):
            try:
                flight.result = station.encoder.submit(_asked(batch))
            except BadInput:
                raise  # as when preparing: a model that cannot be loaded would fail a million samples one by one
            except Exception as error:  # noqa: BLE001 - the boundary to encoders, which are the caller's own: any error is an outcome
                # Without its traceback, and outside this handler: its frames hold the memory that the halves will need.
                flight.failure = error.with_traceback(None)
        flight.seconds = self._clock() - begun
        self.beat.rise(phase="working")
        if self.task.on_loaded is not None and not flight.is_warm and flight.failure is None:
            self.task.on_loaded(station.encoder)
        return flight

    def _end(self, flight: _Flight) -> None:
        """Wait for a batch and hand its entries on. What fails together is tried in halves, so that nobody's neighbour suffers."""
        tensors: Mapping[Key, Mapping[str, Any]] = {}
        begun = self._clock()
        if flight.result is not None:
            with self._stages.busy("encode"):
                try:
                    tensors = _checked(flight.station.encoder, _asked(flight.batch), flight.result())
                except BadInput:
                    raise  # as above
                except Exception as error:  # noqa: BLE001 - the same boundary
                    flight.failure = error.with_traceback(None)
            flight.result = None
        if flight.failure is not None:
            self._fall_back(flight.station, flight.pool, flight.batch, flight.failure)
            return
        if flight.is_warm:  # else it took as long as loading the model does, and nobody would notice for minutes that this worker hangs
            self.beat.batch_took(flight.seconds + self._clock() - begun)
        self._take_in(self._behind.hand(partial(self._append, flight.pool, flight.batch, tensors)))

    def _fall_back(self, station: _Station, pool: _Pool, batch: Sequence[_Looked], error: Exception) -> None:
        is_memory = is_lack_of_memory(error)
        if len(batch) > 1:
            assert batch[0].prepared is not None
            half = station.batches.did_not_fit(batch[0].prepared.group, len(batch)) if is_memory else len(batch) // 2
            for part in (batch[:half], batch[half:]):
                self._end(self._begin(station, pool, part))
            return
        looked = batch[0]
        key = looked.resolved.key if looked.resolved else None
        self._fail(
            pool,
            looked,
            Outcome(looked.unit.place, "failed", key, reason=_words(error), is_transient=is_memory or isinstance(error, OSError)),
        )

    def _fail(self, pool: _Pool, looked: _Looked, outcome: Outcome) -> None:
        pool.outcomes[looked.unit.place] = outcome
        if outcome.key is not None:
            self._promised.discard(outcome.key)

    def _append(self, pool: _Pool, batch: Sequence[_Looked], tensors: Mapping[Key, Mapping[str, Any]]) -> _Kept:
        """Put the entries of a batch into the open segment. Runs beside the thread that encodes, and touches the appender alone."""
        kept = _Kept(pool, batch)
        with self._stages.busy("append"):
            for looked in batch:
                assert looked.resolved is not None
                meta = {**looked.resolved.meta, **(looked.prepared.facts if looked.prepared else {})}
                try:
                    kept.acknowledged += self._appender.put(looked.resolved.key, to_raw(tensors[looked.resolved.key]), meta)
                except BadInput as error:
                    kept.refused[looked.unit.place] = str(error)
            if self._appender.is_due:
                kept.acknowledged += self._appender.close_segment()
        return kept

    def _close_segment(self, then: Callable[[], None] | None = None) -> _Kept:
        """Publish what is gathered. Runs where `_append` does; `then` is called in the thread that encodes."""
        with self._stages.busy("append"):
            return _Kept(None, (), self._appender.close_segment(), then=then)

    def _take_in(self, told: Iterable[_Kept]) -> None:
        """Remember what was put away: outcomes of units, and segments that are durable now."""
        for kept in told:
            for looked in kept.batch:
                assert kept.pool is not None
                assert looked.resolved is not None
                if (reason := kept.refused.get(looked.unit.place)) is not None:
                    self._fail(kept.pool, looked, Outcome(looked.unit.place, "failed", looked.resolved.key, reason=reason))
                else:
                    kept.pool.outcomes[looked.unit.place] = _outcome(looked.unit, "made", looked.resolved, looked.stat, _facts(looked))
            for segment in kept.acknowledged:
                self._own.update(dict.fromkeys(segment.places, segment.digest))
                self._promised.difference_update(segment.places)
                self._published += 1
                self.beat.encoded += len(segment.places)
                self.beat.write()
                self._tell()
            if kept.then is not None:
                kept.then()

    def _check_cancelled(self) -> None:
        if self.task.cancel is None or not self.task.cancel.is_set():
            return
        self._publish_gathered()
        raise Incomplete(
            f"stopped on request; what is encoded is published in {self.task.layout.root}, and the same command goes on from there"
        )

    def _publish_gathered(self) -> None:
        """Acknowledge what is encoded, though its partitions are not finished; who takes them over finds it. Nothing gathered is fine."""
        flights = [flight for flight in self._flights if isinstance(flight, _Flight)]
        self._flights.clear()
        for flight in flights:
            with suppress(Exception):  # what failed is not tried again: that is not what stopping means
                if flight.result is not None:
                    tensors = _checked(flight.station.encoder, _asked(flight.batch), flight.result())
                    self._take_in(self._behind.hand(partial(self._append, flight.pool, flight.batch, tensors)))
        self._take_in(self._behind.wait())
        self._take_in(self._behind.hand(self._close_segment))
        self._take_in(self._behind.wait())


def _waiting_bytes(step: tuple[_Pool, _Looked | None]) -> int:
    """What a prepared unit takes while it waits for its batch: the bytes of an array, nothing of what is small."""
    looked = step[1]
    return 0 if looked is None or looked.prepared is None else int(getattr(looked.prepared.payload, "nbytes", 0))


class _Reading:
    """What one unit is read from, and what that was. Implements `unit.Read`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._opened: dict[str, tuple[int, int] | None] = {}
        self.stats: list[tuple[int, int]] = []
        """(size, mtime_ns) of what was read, in order; of what was opened twice once."""

    def __call__(self, reference: str, /) -> bytes:
        data, stat = self._source.read(reference)
        self.stats.append(stat)
        return data

    @contextmanager
    def open(self, reference: str) -> Generator[BinaryIO]:
        found = self._source.stat(reference)
        if self._opened.get(reference, found) != found:
            raise OSError(f"{reference} changed while it was read")
        with self._source.open(reference) as (file, stat):
            if reference not in self._opened:
                self._opened[reference] = found
                self.stats.append(stat)
            yield file


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
            raise Incomplete(
                f"{who()}; nothing moved for {bound_seconds / 60:.0f} minutes: look at `cachestore status`, then run the same command again"
            )


def _asked(batch: Sequence[_Looked]) -> list[tuple[Key, Any]]:
    return [(looked.resolved.key, looked.prepared.payload) for looked in batch if looked.resolved and looked.prepared]


def _checked(
    encoder: Encoder, asked: Sequence[tuple[Key, Any]], answer: Mapping[Key, Mapping[str, Any]]
) -> Mapping[Key, Mapping[str, Any]]:
    """Hold an answer against the question: exactly the keys that were asked for, by set equality."""
    if set(answer) != {key for key, _payload in asked}:
        raise EncodeFailed(
            f"the encoder {encoder.recipe.encoder!r} returned {len(answer)} keys that are not the {len(asked)} it was asked for"
        )
    for tensors in answer.values():
        _check_names(encoder, tensors)
    return answer


def _check_names(encoder: Encoder, tensors: Any) -> None:
    is_mapping = isinstance(tensors, Mapping)
    if not is_mapping or not all(isinstance(name, str) for name in cast("Mapping[object, object]", tensors)):
        raise EncodeFailed(f"the encoder {encoder.recipe.encoder!r} returned no tensors by name for a key")


def _outcome(unit: Unit, result: str, resolved: Resolved, stat: tuple[int, int], facts: Mapping[str, Json]) -> Outcome:
    digest = combined_digest(resolved.inputs)
    return Outcome(unit.place, "made" if result == "made" else "found", resolved.key, digest, stat, facts)


def _facts(looked: _Looked) -> dict[str, Json]:
    assert looked.resolved is not None
    return {**looked.resolved.facts, **(looked.prepared.facts if looked.prepared else {})}


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, EncodeFailed | BadInput | OSError) else f"{type(error).__name__}: {text}"
