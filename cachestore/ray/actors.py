"""Ranks as Ray actors: start them, watch them, start dead ones again, and end them."""

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from cachestore.core.errors import WRONG_FIELDS, CacheStoreError, Incomplete
from cachestore.core.keys import Json
from cachestore.core.words import plural
from cachestore.jobs.run.task import Cancel, OnProgress
from cachestore.jobs.share.report import Report
from cachestore.jobs.start.processes import STOP_SECONDS, UNSEEN_SECONDS, Child, joined_report

ray: Any = import_module("ray")
"""The package of the extra [ray], which has no complete types."""

Work = Callable[[Cancel, OnProgress], Report]
"""One rank's part of the job."""

RESTARTS: Final = 2
"""How often dead ranks are started again while nothing is encoded in between: a model may kill every process that loads it."""
START_SECONDS: Final = 1800.0
"""How long Ray may take until the first rank runs: an autoscaler may have to start machines."""
START_WARN_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0
_STATUS_KEY: Final = "__autoscaling_status"
"""Where Ray's autoscaler writes every few seconds what it sees, as JSON; `ray status` prints it."""
_OWN_TYPE: Final = re.compile(r"node_[0-9a-f]+")
"""What it calls a node where it knows no types of nodes that it could start."""

_log = logging.getLogger("cachestore")


class Rank:
    """The actor of one rank. Two of its methods can run at the same time, so that it answers while it works."""

    def __init__(self, launch: str) -> None:
        os.environ["CACHESTORE_LAUNCH"] = launch
        self._cancel = threading.Event()
        self._counts: Mapping[str, Json] = {}

    def run(self, work: Work) -> tuple[dict[str, Any], Mapping[str, Json]]:
        """Do the work. Returns the report as JSON, or an error as a worker process prints it; and the last counts."""
        try:
            report = work(self._cancel, self._see).as_json()
        except CacheStoreError as error:
            report = {"error": str(error), "kind": type(error).__name__}
        return report, self._counts

    def _see(self, counts: Mapping[str, Json]) -> None:
        self._counts = counts

    def counts(self) -> Mapping[str, Json]:
        """Return the counts of the pass over all ranks, as this rank last saw them; empty before it began."""
        return self._counts

    def stop(self) -> None:
        """Stop after the current batch."""
        self._cancel.set()


@dataclass(slots=True)
class _Ranks:
    """The actors of one call, as the driver sees them."""

    works: Sequence[Work]
    start: Callable[[], Any]
    """Starts an actor and returns its handle."""
    asks: Mapping[str, float]
    """What each rank asks of its node: numbers of GPUs and CPUs."""
    actors: dict[int, Any] = field(default_factory=dict[int, Any])
    running: dict[Any, int] = field(default_factory=dict[Any, int])
    """The rank behind each pending `run`."""
    asked: dict[Any, int] = field(default_factory=dict[Any, int])
    """The rank behind each pending `counts`."""
    ended: list[Child] = field(default_factory=list[Child])
    newest: Mapping[str, Json] = field(default_factory=dict[str, Json])
    deaths: int = 0
    """Deaths in a row, with nothing encoded between them."""
    has_started: bool = False
    """Whether a rank has answered."""
    warn_after: float = START_WARN_SECONDS
    moved_at: float = field(default_factory=time.monotonic)

    def begin(self, rank: int) -> None:
        actor = self.actors[rank] = self.start()
        self.running[actor.run.remote(self.works[rank])] = rank

    def follow(self) -> bool:
        """Wait up to a second for ranks to end, and ask the others for their counts. Returns whether the counts have changed."""
        done, _ = ray.wait(list(self.running), timeout=LOOK_SECONDS)
        for ref in done:
            self._note_end(self.running.pop(ref), ref)
        for rank in {*self.running.values()} - {*self.asked.values()}:
            self.asked[self.actors[rank].counts.remote()] = rank
        before = self.newest
        for ref in ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0)[0] if self.asked else ():
            del self.asked[ref]
            try:
                counts: Mapping[str, Json] = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # the actor died; its `run` reports that
            if not self.has_started:
                self.has_started, self.moved_at = True, time.monotonic()
            if _made(counts) > _made(self.newest):
                self.newest, self.moved_at, self.deaths = counts, time.monotonic(), 0
        return self.newest != before

    def _note_end(self, rank: int, ref: Any) -> None:
        try:
            report, counts = ray.get(ref)
        except ray.exceptions.RayTaskError:  # raised by the caller's own functions
            raise
        except ray.exceptions.RayError as error:
            self.deaths += 1
            how = f"died: {' '.join(str(error).split())[:500]}"
            if self.deaths <= RESTARTS:
                _log.warning("rank %d %s; it is started again, and meanwhile the others do its work", rank, how)
                self.begin(rank)
            else:
                self.ended.append(Child(0, -9, None, "", rank, how))
            return
        self.ended.append(Child(0, 0, report, "", rank, ""))
        self.newest = counts or self.newest

    def check_bounds(self) -> None:
        """Raise Incomplete if no rank can start, or if for too long none has started, or nothing has been encoded."""
        still = time.monotonic() - self.moved_at
        if self.has_started:
            if still > UNSEEN_SECONDS:
                raise Incomplete(f"no rank encoded anything for {still:.0f} s; run the same call again: it continues where it stopped")
            return
        if is_fixed() and not fits(self.asks, nodes := _nodes()):
            raise Incomplete(f"no rank can ever start: {self._in_words(nodes)}; ask for less, or add a node and run the same call again")
        if still > self.warn_after:
            self.warn_after = float("inf")
            _log.warning("no rank runs yet, as Ray has found no room for one: %s", self._in_words(_nodes()))
        if still > START_SECONDS:
            raise Incomplete(f"Ray started no rank within {still:.0f} s: {self._in_words(_nodes())}; ask for less, or see `ray status`")

    def _in_words(self, nodes: Sequence[Mapping[str, float]]) -> str:
        asks, largest = self.asks, {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in self.asks}
        has = ", ".join(f"{name}={number:g}" for name, number in largest.items())
        each = f"each of {len(self.works)} ranks asks for num_gpus={asks['GPU']:g} and num_cpus={asks['CPU']:g} on one node"
        return f"{each}, and the most that one of the cluster's {plural(len(nodes), 'node')} has is {has}"

    def stop(self) -> None:
        """Ask the ranks to publish what they have encoded, and wait for that a while."""
        for rank in self.running.values():
            self.actors[rank].stop.remote()
        if self.running and self.has_started:
            ray.wait(list(self.running), num_returns=len(self.running), timeout=STOP_SECONDS)

    def end(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)


def run_ranks(works: Sequence[Work], *, num_gpus: float | None, num_cpus: float, on_progress: OnProgress | None) -> Report:
    """Let one actor do each of `works` until one of them has the report, then end the others.

    Starts Ray on this machine if the driver is connected to no cluster. Without `num_gpus`, a rank takes one GPU if the cluster has any.
    Raises the ranks' error if none of them has the report.
    """
    if not ray.is_initialized():
        ray.init()
    gpus = num_gpus
    if gpus is None:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        if not gpus:
            _log.warning("the cluster has no GPU, so the ranks encode on CPUs; pass num_gpus=1 to wait for nodes that have one")
    launch = f"ray:{ray.get_runtime_context().get_job_id()}:{secrets.token_hex(4)}"
    actor = ray.remote(max_concurrency=2, num_gpus=gpus, num_cpus=num_cpus)(Rank)
    ranks = _Ranks(works, lambda: actor.remote(launch), {"GPU": gpus, "CPU": num_cpus})
    try:
        for rank in range(len(works)):
            ranks.begin(rank)
        while ranks.running and not any(child.is_well for child in ranks.ended):
            if ranks.follow() and on_progress is not None:
                on_progress(ranks.newest)
            ranks.check_bounds()
    except BaseException as error:
        ranks.stop()
        if isinstance(error, KeyboardInterrupt):
            _log.warning("stopped; what was encoded is in the store. Run the same call again to continue")
        raise
    finally:
        ranks.end()
    if on_progress is not None and ranks.newest:
        on_progress(ranks.newest)
    return Report.from_json(joined_report(ranks.ended))


def _made(counts: Mapping[str, Any]) -> int:
    return sum(counts.get(name, 0) for name in ("reused", "encoded", "failed"))


def fits(asks: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> bool:
    """Return whether one of these nodes has all that a rank asks for."""
    return any(all(node.get(name, 0.0) >= number for name, number in asks.items()) for node in nodes)


def _nodes() -> list[Mapping[str, float]]:
    found: list[Mapping[str, Any]] = ray.nodes()
    return [node["Resources"] for node in found if node["Alive"]]


def is_fixed() -> bool:
    """Return whether the cluster cannot grow by itself, as far as Ray's autoscaler has said yet; False if it says nothing."""
    store = import_module("ray.experimental.internal_kv")
    raw: bytes | None = store._internal_kv_get(_STATUS_KEY) if store._internal_kv_initialized() else None  # noqa: SLF001 - `ray status` does it
    return raw is not None and grows_never(raw)


def grows_never(status: bytes) -> bool:
    """Return whether the autoscaler's status says that it has no types of nodes to start: then it calls each node after itself."""
    try:
        nodes: Mapping[str, Any] = json.loads(status)["autoscaler_report"]["active_nodes"]
    except WRONG_FIELDS:
        return False
    return bool(nodes) and all(_OWN_TYPE.fullmatch(name) for name in nodes)
