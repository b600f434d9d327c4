"""`cachestore status`: how far running and unfinished passes are. It works from another shell."""

import argparse
from typing import TYPE_CHECKING

from cachestore.cli import add_store, tell
from cachestore.core.words import plural

if TYPE_CHECKING:
    from cachestore.work.progress import PassStatus, RankStatus

HELP = "show the progress of runs that are under way, and of runs that did not finish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the newest pass of every plan."""
    from cachestore.maintain.status import status

    found = status(arguments.store)
    lines = [line for one in found.plans for line in _in_words(one)]
    return tell(arguments, found.as_json(), lines or ["no pass has been started here"])


def _in_words(status: "PassStatus") -> list[str]:
    """Return the lines about a pass and its current workers; for a pass that has ended only the counts."""
    from cachestore.cli.progress import in_a_line

    title = f"{status.name or 'fill'} (plan {status.plan[:8]}, pass {status.number})"
    title += f" with {plural(status.prompts, 'prompt')} for validation" if status.prompts else ""
    if status.complete:
        ended = "ended, `cachestore why` says what failed" if status.failed else "complete"
        return [f"{title}: {ended}", f"  {status.reused} reused, {status.encoded} encoded, {status.failed} failed"]
    open_now = f"{status.finished} of {plural(status.partitions, 'partition')} finished"
    lines = [f"{title}: {open_now}" + (f", round {status.round}" if status.round else ""), f"  {in_a_line(status)}"]
    if not status.at_work:
        lines.append("  no worker is running: run the same command again, it continues where it stopped")
    running = {one.launch for one in status.at_work}
    return lines + [f"  {_of_rank(one)}" for one in status.ranks if one.launch in running]


def _of_rank(one: "RankStatus") -> str:
    rank = f"rank {'-' if one.rank is None else one.rank} on {one.host} (pid {one.pid})"
    if one.phase == "ended" or one.alive is False:
        return f"{rank}: {'ended' if one.phase == 'ended' else 'gone'}, {one.done} done"
    heard = f"silent for {one.still_seconds:.0f} s" if one.is_silent else f"last heartbeat {one.beat_age_seconds} s ago"
    life = "" if one.alive else ", on another machine"
    return f"{rank}: {one.phase}, {one.done} done, {one.rate}/s, {heard}{life}"
