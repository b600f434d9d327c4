"""`cachestore status`: how far running and unfinished passes are. It works from another shell."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cachestore.cli import add_store, tell
from cachestore.cli.data_sets import add_name, choose
from cachestore.core.words import first_of, noun, plural

if TYPE_CHECKING:
    from cachestore.jobs.share.progress import PassStatus, RankStatus

HELP = "show the progress of runs that are under way, and of runs that did not finish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    add_name(parser, "only the runs over this data set (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Print the newest pass of every plan."""
    from cachestore.care.status import status
    from cachestore.files.paths import Layout

    found = status(arguments.store)
    if arguments.name is not None:
        plans = tuple(one for one in found.plans if one.name == arguments.name)
        found = replace(found, plans=plans, without_runs=tuple(one for one in found.without_runs if one == arguments.name))
        if not found.plans:
            choose(Layout.at(arguments.store), arguments.name)  # raises if there is no such data set
    shown = sorted(found.plans, key=lambda one: (one.complete, one.name, one.generation))
    lines = [line for one in shown for line in _in_words(one, Path(arguments.store))]
    if others := found.without_runs:
        no_run = f"no run is recorded of the {noun(len(others), 'data set', 'data sets')} {first_of(map(repr, others))}"
        lines.append(f"{no_run}; programs that save files or flush a session are not shown")
    return tell(arguments, found.as_json(), lines or ["no run has been started here"])


def _is_of_a_program(store: Path, name: str) -> bool:
    """Whether a program publishes this data set, which no command can repeat."""
    from cachestore.files.paths import Layout
    from cachestore.store.read.unfinished import list_data_sets
    from cachestore.store.write.made import has_sources

    layout = Layout.at(store)
    return name in list_data_sets(layout) and not has_sources(layout, name, if_damaged=True)


def _in_words(status: "PassStatus", store: Path) -> list[str]:
    from cachestore.cli.terminal.progress import counts_in_words, failed_once, in_a_line
    from cachestore.store.read.unfinished import again_in

    title = status.name or "values of your own (cs.fill)"
    title += f" with {plural(status.prompts, 'prompt')} for validation" if status.prompts else ""
    if status.complete:
        ended = "ended, `cachestore why` says what failed" if status.failed else "complete"
        return [f"{title}, generation {status.generation}: {ended}", f"  {counts_in_words(status)}"]
    lines = [f"{title}: {'a run is working on it' if status.at_work else 'not finished'}", f"  {in_a_line(status)}"]
    if not status.at_work:
        again = f", or {again_in(store, status.name)}" if status.name and not _is_of_a_program(store, status.name) else ""
        lines.append(f"  no process is working on it: run the same command again{again}; it continues where it stopped")
    lines += [f"  {line}" for line in failed_once(failure for one in status.ranks for failure in one.failures)]
    running = {one.launch for one in status.at_work}
    return lines + [f"  {_of_rank(one)}" for one in status.ranks if one.launch in running]


def _of_rank(one: "RankStatus") -> str:
    rank = f"rank {'-' if one.rank is None else one.rank} on {one.host} (pid {one.pid})"
    if one.phase == "ended" or one.alive is False:
        return f"{rank}: {'ended' if one.phase == 'ended' else 'gone'}, {one.done} done"
    heard = f"silent for {one.still_seconds:.0f} s" if one.is_silent else f"last heartbeat {one.beat_age_seconds} s ago"
    life = "" if one.alive else ", on another machine"
    return f"{rank}: {one.doing}, {one.done} done, {one.rate}/s, {heard}{life}"
