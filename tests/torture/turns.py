"""Processes that take turns at calls of the file system: one goes on for so many calls, then another one, in an order by a seed.

So only one of them runs at a time, what they note down is in the order in which it happened, and a round is the same whenever it is played.
One of them may be struck: killed at a call, or refused one.
"""

import json
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import cachestore as cs
from tests.torture.calls import Point, Strike, _Striker, say_to
from tests.torture.campaign import HANG_SECONDS, waited_seconds
from tests.torture.watching import Call, watch

TURNS: Final = (1, 2, 4, 8, 16, 40, 100, 400, 1_000)
"""So many calls, one of these, a process makes in its turn."""
STRIKES: Final = (
    *(Strike(kill=kill) for kill in ("before", "within", "after")),
    *(Strike(kill=kill) for kill in ("before", "within", "after")),
    *(Strike(error=error, is_sticky=is_sticky) for error in ("ENOSPC", "EIO", "EACCES") for is_sticky in (False, True)),
)

Note = Mapping[str, Any]
"""A line of the log: `e` says what happened, `p` to which process."""


@dataclass(frozen=True, slots=True)
class Blow:
    """Which process is struck, how, and from which of its calls on; nobody if it makes fewer."""

    player: int
    number: int
    strike: Strike

    @classmethod
    def drawn(cls, random: Random, calls: Sequence[int]) -> "Blow | None":
        """One by chance, or none; `calls` are how many calls each process makes, about."""
        if random.random() < 0.1:
            return None
        player = random.randrange(len(calls))
        return cls(player, random.randrange(calls[player]), random.choice(STRIKES))


@dataclass(frozen=True, slots=True)
class Sleep:
    """A process sleeps after so many of its calls, until all others have ended: for days, if days pass meanwhile."""

    player: int
    after: int
    is_first: bool = False
    """Whether it goes on to there before any other process does anything."""


@dataclass(frozen=True, slots=True)
class Round:
    """What happens in a round follows from its seed."""

    template: str
    writers: int
    seed: int
    blow: Blow | None
    sleep: Sleep | None


@dataclass(slots=True)
class Seat:
    """A process's own side: how it waits for its turn, and notes down what happens."""

    number: int
    root: Path
    random: Random
    reporting: int
    taking: int
    striker: _Striker | None
    write: Callable[[str], None]
    read: Callable[[int, int], bytes] = os.read
    tell: Callable[[int, bytes], int] = os.write
    """Both as they were before they were watched."""
    left: int = 0

    def say(self, event: str, /, **more: Any) -> None:
        """Note something down."""
        self.write(json.dumps({"e": event, "p": self.number, **more}) + "\n")

    def __call__(self, call: Call, real: Callable[..., Any]) -> Any:
        """Make a call in one's turn. A link that was made is noted down in the same moment."""
        if not self.left:
            self.tell(self.reporting, b".")
            self.left = int.from_bytes(self.read(self.taking, 4), "big")
        self.left -= 1

        def make(*other: Any) -> Any:
            found = real(*other)
            if call.name == "link":
                self.say("link", path=call.other.removeprefix(f"{self.root}/"))
            return found

        return self.striker(call, make) if self.striker is not None else make()


@dataclass(slots=True)
class Player:
    """A process as its parent sees it."""

    pid: int
    reading: int
    granting: int
    code: int | None = None
    """Its exit code once it has ended."""
    made: int = 0
    """So many calls it may have made."""

    def go_on(self, calls: int) -> None:
        """Let it make so many calls. Raises TimeoutError if it hangs."""
        self.made += calls
        os.write(self.granting, calls.to_bytes(4, "big"))
        self.wait()

    def wait(self) -> None:
        """Wait until it has made its calls, or has ended."""
        began = time.monotonic()
        while not select.select([self.reading], [], [], 1.0)[0]:
            if time.monotonic() - began > HANG_SECONDS + waited_seconds(self.pid):
                raise TimeoutError
        if not os.read(self.reading, 1):
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """End it, wherever it is."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.reading)
        os.close(self.granting)


def _seat(number: int, act: Callable[[Seat], None], root: Path, log: Path, blow: Blow | None, seed: int) -> Player:
    reports, grants = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(reports[1])
        os.close(grants[0])
        return Player(pid, reports[0], grants[1])
    code = 1
    try:
        random = Random(f"{seed} {number}")
        secrets.token_hex = lambda nbytes=None: random.randbytes(nbytes or 32).hex()
        is_struck = blow is not None and blow.player == number
        striker = _Striker(Point("", 0, number, blow.number, blow.strike), log.with_suffix(".struck")) if blow and is_struck else None
        seat = Seat(number, root, random, reports[1], grants[0], striker, say_to(log))
        watch(root, seat)
        try:
            act(seat)
            seat.say("ended")
        except cs.CacheStoreError as error:
            seat.say("refused for good", text=f"{type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - the boundary of a process: this is what a user would see a traceback of
            seat.say("raised", text=f"{type(error).__name__}: {error}", where=_where(error))
        code = 0
    finally:
        os._exit(code)


def _where(error: BaseException) -> str:
    lines: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        lines.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(lines[-6:]))


@dataclass(slots=True)
class Played:
    """What became of a round."""

    notes: list[Note] = field(default_factory=list[Note])
    violations: list[str] = field(default_factory=list[str])
    struck: str = ""
    """The call that was struck; empty if none was."""


def play(acts: Sequence[Callable[[Seat], None]], root: Path, seed: int, blow: Blow | None, sleep: Sleep | None = None) -> Played:
    """Let processes act on the store at `root` in turns. What was noted down, and how processes ended that should not have ended so."""
    random = Random(f"turns {seed}")
    log = root.with_name(f"{root.name}.log")
    log.touch()
    played = Played()
    players = [_seat(number, act, root, log, blow, seed) for number, act in enumerate(acts)]
    try:
        for each in players:
            each.wait()
        if sleep and sleep.is_first:
            players[sleep.player].go_on(sleep.after)
        while going := [each for each in players if each.code is None]:
            left = {each.pid: sleep.after - each.made for each in going if sleep and each is players[sleep.player] and len(going) > 1}
            one = random.choice([each for each in going if left.get(each.pid, 1) > 0])
            one.go_on(min(random.choice(TURNS), left.get(one.pid, TURNS[-1])))
    except TimeoutError:
        played.violations.append("a process hangs")
    finally:
        for each in players:
            each.end()
    struck = log.with_suffix(".struck")
    played.struck = struck.read_text().replace(str(root), "STORE") if struck.exists() else ""
    played.notes = [json.loads(line) for line in log.read_text().splitlines()]
    for number, each in enumerate(players):
        is_killed = each.code == -signal.SIGKILL and blow is not None and blow.player == number and blow.strike.kill is not None
        if each.code and not is_killed and not played.violations:
            played.violations.append(f"process {number} ended with {each.code}")
    for note in played.notes:
        is_struck = played.struck and blow is not None and blow.player == note["p"]
        if note["e"] == "raised" or (note["e"] == "refused for good" and not is_struck):
            played.violations.append(f"process {note['p']} {note['e']}: {note['text']} {note.get('where', '')}")
    return played
