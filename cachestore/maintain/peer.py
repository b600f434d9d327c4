"""`doctor --peer`: two machines that look at one store at the same time say what each sees of the other, and how late.

Each side shows itself as workers do: by a beat, which is replaced several times a second, and by a lock that it holds. Meanwhile it
creates small files in `tmp/`, finds those of the other side by listing, and answers in its beat. Only its own clock is used. The files
of the beat and the lock stay until `gc` removes them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.files.publish import note
from cachestore.maintain.doctor import NOTE, OK, PROBLEM, Check
from cachestore.work.progress import ENDED
from cachestore.work.workers import Beat, is_held, read_beats

PEER_SECONDS: Final = 30.0
"""How long one side looks at most."""

_LAUNCH: Final = "doctor --peer"
_POLL_SECONDS: Final = 0.1
_STEP_SECONDS: Final = 0.5
_ENOUGH: Final = 8
"""Files of each side that the other one has answered."""
_LATE_SECONDS: Final = 3.0


@dataclass(slots=True)
class _Peer:
    """Another side, as this one sees it."""

    name: str
    shown: str
    """The first beat that was seen of it, as a text: one that never changes belongs to somebody who has left."""
    met_at: int | None = None
    """How many files this side had made when the other one was known to be there: only later ones show how late it sees them."""
    seen: int = 0
    """How many of its files were listed here."""
    answered: int = 0
    """How many of this side's files it has listed."""
    delays: list[float] = field(default_factory=list[float])
    """Seconds from making a file here to seeing the answer."""
    is_held: bool | None = None
    """Whether its lock is seen held."""
    has_enough: bool = False
    """Whether it says that it knows enough of this side."""

    @property
    def is_known(self) -> bool:
        """Whether this side knows enough of it."""
        return len(self.delays) >= _ENOUGH and self.seen >= _ENOUGH

    def checks(self) -> list[Check]:
        """What was found."""
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
    """Look for other sides that run this at the same time, for `seconds` at most. Raises WriteFailed where nothing can be written.

    Returns a check of files and one of locks for each side that was met; a problem where none was.
    """
    end = time.monotonic() + seconds
    made: list[float] = []
    peers: dict[str, _Peer] = {}
    with Beat(layout, "", 0, _LAUNCH, None, 1) as beat:
        try:
            while time.monotonic() < end and not _is_over(peers):
                if not made or time.monotonic() - made[-1] >= _STEP_SECONDS:
                    note(layout, _file(layout, beat.worker, len(made)), b"")
                    made.append(time.monotonic())
                _look(layout, beat, made, peers)
                time.sleep(_POLL_SECONDS)
        finally:
            for number in range(len(made)):
                _file(layout, beat.worker, number).unlink(missing_ok=True)
    if found := _met(peers):
        return [check for peer in found for check in peer.checks()]
    command = f"cachestore doctor {layout.root} --peer"
    advice = f"run `{command}` on both machines at the same time; if you did, they do not share this folder, or see changes too late"
    return [Check("peer", PROBLEM, f"no other machine ran this on the store within {seconds:.0f} s", advice)]


def _met(peers: Mapping[str, _Peer]) -> list[_Peer]:
    return [peer for peer in peers.values() if peer.met_at is not None]


def _is_over(peers: Mapping[str, _Peer]) -> bool:
    """Whether all sides that were met know enough of each other."""
    found = _met(peers)
    return bool(found) and all(peer.is_known and peer.has_enough for peer in found)


def _file(layout: Layout, worker: str, number: int) -> Path:
    """The n-th file of a side: a name in `tmp/` that the other side knows."""
    return layout.new_temporary(f"{number:08x}{worker[8:]}")


def _look(layout: Layout, beat: Beat, made: Sequence[float], peers: dict[str, _Peer]) -> None:
    """Look once at everything that the others show, and answer."""
    names = {*names_in(layout.temporary)}
    for shown in read_beats(layout):
        worker = shown["worker"]
        if shown["launch"] != _LAUNCH or worker == beat.worker:
            continue
        peer = peers.setdefault(worker, _Peer(f"pid {shown['pid']} on {shown['host']}", str(shown)))
        if peer.met_at is None and str(shown) != peer.shown:
            peer.met_at = len(made)
        while _file(layout, worker, peer.seen).name in names:
            peer.seen += 1
        answer: Mapping[str, Any] = shown.get("answers", {}).get(beat.worker, {"seen": 0, "enough": False})
        first = max(peer.answered, len(made) if peer.met_at is None else peer.met_at)
        peer.delays += [time.monotonic() - at for at in made[first : answer["seen"]]]
        peer.answered, peer.has_enough = answer["seen"], answer["enough"]
        if shown["phase"] != ENDED:
            peer.is_held = is_held(layout, worker)
    beat.detail = {"answers": {worker: {"seen": peer.seen, "enough": peer.is_known} for worker, peer in peers.items()}}
    beat.write()
