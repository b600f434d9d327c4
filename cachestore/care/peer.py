"""`doctor --peer`: run on two machines at the same time, it reports what each sees of the other on a shared store, and how late.

Each side behaves like a worker: it holds a lock and replaces its heartbeat several times a second. It also creates small files in `tmp/`,
finds those of the other side by listing, and confirms them in its heartbeat. It uses only its own clock. The files of the heartbeat and
the lock stay until `gc` removes them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from cachestore.care.doctor import NOTE, OK, PROBLEM, Check
from cachestore.files import in_use
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.files.publish import note
from cachestore.jobs.share.workers import Heartbeat, is_held, read_heartbeats

PEER_SECONDS: Final = 30.0
"""How long one side runs at most."""

_LAUNCH: Final = "doctor --peer"
_POLL_SECONDS: Final = 0.1
_STEP_SECONDS: Final = 0.5
_ENOUGH: Final = 8
"""A side is done when the other one has confirmed this many of its files."""
_LATE_SECONDS: Final = 3.0


@dataclass(slots=True)
class _Peer:
    """Another machine, as this one sees it."""

    name: str
    shown: str
    """The first heartbeat that was seen, as text. If it never changes, the other side has left."""
    met_at: int | None = None
    """How many files this side had made when the other one was first seen running. Only the delays of later files are measured."""
    seen: int = 0
    """How many of its files were listed here."""
    answered: int = 0
    """How many files of this side it has confirmed."""
    delays: list[float] = field(default_factory=list[float])
    """Seconds from creating a file here to seeing it confirmed."""
    is_held: bool | None = None
    """Whether this side sees that its lock is held."""
    has_enough: bool = False
    """Whether it reports that it has seen enough."""

    @property
    def is_known(self) -> bool:
        """Whether this side has seen enough of it."""
        return len(self.delays) >= _ENOUGH and self.seen >= _ENOUGH

    def checks(self) -> list[Check]:
        if not self.delays or not self.seen:
            what = f"files of {self.name} are not visible here" if not self.seen else f"{self.name} does not see the files made here"
            advice = "mount the folder without a cache of names, or try again after that cache has expired"
            return [Check("peer files", PROBLEM, f"{what} within {PEER_SECONDS:.0f} s", advice), self._locks()]
        late, longest = median(self.delays), max(self.delays)
        found = f"a file made here is seen by {self.name} and answered after {late:.1f} s (median), {longest:.1f} s at most"
        is_late = longest > _LATE_SECONDS
        advice = "ranks wait that long for each other at the end of each round; a shorter attribute cache (`actimeo`) helps"
        return [Check("peer files", NOTE if is_late else OK, found, advice if is_late else ""), self._locks()]

    def _locks(self) -> Check:
        if self.is_held:
            return Check("peer locks", OK, f"the lock of {self.name} is visible here")
        advice = "nothing is lost by that; the part of a rank that was killed there is taken over after minutes instead of at once"
        return Check("peer locks", NOTE, f"the lock that {self.name} holds is not visible here", advice)


def meet(layout: Layout, seconds: float = PEER_SECONDS) -> list[Check]:
    """Look for other machines that run this at the same time, for at most `seconds`.

    Returns a check of files and one of locks for each that was met, or one problem if none was. Raises WriteFailed if nothing can be
    written.
    """
    end = time.monotonic() + seconds
    made: list[float] = []
    peers: dict[str, _Peer] = {}
    with Heartbeat(layout, "", 0, _LAUNCH, None, 1) as heartbeat:
        try:
            while time.monotonic() < end and not _is_over(peers):
                if not made or time.monotonic() - made[-1] >= _STEP_SECONDS:
                    note(layout, _file(layout, heartbeat.worker, len(made)), b"")
                    made.append(time.monotonic())
                _read_others(layout, heartbeat, made, peers)
                time.sleep(_POLL_SECONDS)
        finally:
            for number in range(len(made)):
                in_use.unlink(_file(layout, heartbeat.worker, number), missing_ok=True)
    if found := _met(peers):
        return [check for peer in found for check in peer.checks()]
    command = f"cachestore doctor {layout.root} --peer"
    advice = f"run `{command}` on both machines at the same time; if you did, they do not share this folder, or see changes too late"
    return [Check("peer", PROBLEM, f"no other machine ran this on the store within {seconds:.0f} s", advice)]


def _met(peers: Mapping[str, _Peer]) -> list[_Peer]:
    return [peer for peer in peers.values() if peer.met_at is not None]


def _is_over(peers: Mapping[str, _Peer]) -> bool:
    found = _met(peers)
    return bool(found) and all(peer.is_known and peer.has_enough for peer in found)


def _file(layout: Layout, worker: str, number: int) -> Path:
    """Return the path of the n-th file of a side in `tmp/`. The other side can compute it too."""
    return layout.new_temporary(f"{number:08x}{worker[8:]}")


def _read_others(layout: Layout, heartbeat: Heartbeat, made: Sequence[float], peers: dict[str, _Peer]) -> None:
    """Read the heartbeats and files of the others once, and confirm them in this side's heartbeat."""
    names = {*names_in(layout.temporary)}
    for shown in read_heartbeats(layout):
        worker = shown.worker
        if shown.launch != _LAUNCH or worker == heartbeat.worker:
            continue
        peer = peers.setdefault(worker, _Peer(str(shown), repr(shown)))
        if peer.met_at is None and repr(shown) != peer.shown:
            peer.met_at = len(made)
        while _file(layout, worker, peer.seen).name in names:
            peer.seen += 1
        answer: Mapping[str, Any] = shown.detail.get("answers", {}).get(heartbeat.worker, {"seen": 0, "enough": False})
        first = max(peer.answered, len(made) if peer.met_at is None else peer.met_at)
        peer.delays += [time.monotonic() - at for at in made[first : answer["seen"]]]
        peer.answered, peer.has_enough = answer["seen"], answer["enough"]
        if not shown.has_ended:
            peer.is_held = is_held(layout, worker)
    heartbeat.detail = {"answers": {worker: {"seen": peer.seen, "enough": peer.is_known} for worker, peer in peers.items()}}
    heartbeat.write()
