"""`cachestore status`: a running or unfinished pass, seen from another shell."""

import argparse
from pathlib import Path

from cachestore.cli import OK, add_store, print_json, printable

HELP = "how far running and unfinished passes are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the newest pass of every plan."""
    from cachestore.files.paths import Layout
    from cachestore.storage.snapshot import open_layout
    from cachestore.work.progress import all_status

    layout = open_layout(Layout(Path(arguments.store).absolute()))
    found = all_status(layout)
    if arguments.json:
        print_json({"plans": [status.as_json() for status in found]})
        return OK
    if not found:
        print("no pass was ever begun here")
    for status in found:
        end = "complete" if status.complete else f"{status.finished} of {status.partitions} partitions finished, {status.claimed} claimed"
        print(printable(f"{status.name or 'fill'} (plan {status.plan[:8]}, pass {status.number}): {end}"))
        print(f"  {status.reused} reused, {status.encoded} encoded, {status.failed} failed")
        for rank in status.ranks:
            life = {True: "alive", False: "gone", None: "unknown"}[rank.alive]
            place = "-" if rank.rank is None else rank.rank
            pace = f"{rank.done} done, {rank.rate}/s, {life}, last beat {rank.beat_age_seconds} s ago"
            print(printable(f"  rank {place} on {rank.host} (pid {rank.pid}): {rank.phase}, {pace}"))
    return OK
