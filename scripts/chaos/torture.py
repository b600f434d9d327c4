"""Proof that faults find nothing: `python3 scripts/chaos/torture.py [--only NAME] [--count N] [--seed N] [--mutants] [--json]`.

Plays the campaigns of `tests/torture/`, one after the other, and prints one table: points, violations, seconds, seed. A violation is
an acknowledged entry that is lost, a wrong value, a signal that nobody sent, a hang, an error that is not ours, or a store that the same
command does not finish. Every point follows from the seed. `--only` (more than once) chooses campaigns, `--count` how many points
of each. Exit 0 only without a violation.

With `--mutants` one protection after the other is taken out of a copy of the package, and a campaign must notice: exit 0 only if all are
found, and if the same campaigns find nothing in a whole copy.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import environment

FOLDER: Final = environment.ROOT / "tests/torture"
NAMED: Final = 5
"""So many violations of a campaign are printed."""

if TYPE_CHECKING:
    from tests.torture.campaign import Campaign, Outcome


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    campaign: str
    points: int
    violations: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class MutantRow:
    """A line of the table of mutants."""

    without: str
    campaign: str
    points: int
    violations: int
    seconds: float


def find_campaigns() -> dict[str, "Campaign"]:
    """Every campaign by name: of all modules of the folder that have some."""
    if str(environment.ROOT) not in sys.path:
        sys.path.insert(0, str(environment.ROOT))
    modules = [import_module(f"tests.torture.{path.stem}") for path in sorted(FOLDER.glob("*.py")) if not path.stem.startswith("test_")]
    found: dict[str, Campaign] = {}
    for module in modules:
        found |= getattr(module, "CAMPAIGNS", {})
    return found


def play(name: str, campaign: "Campaign", *, count: int | None, seed: int) -> "tuple[Row, Outcome]":
    """Play one campaign, whole or so many points of it."""
    began = time.monotonic()
    outcome = campaign.play(campaign.count if count is None else count, seed)
    return Row(name, outcome.points, len(outcome.violations), round(time.monotonic() - began, 1), seed), outcome


def table(rows: Sequence[Row]) -> str:
    """The table, as Markdown has them. No rows are a heading."""
    lines = ["| campaign | points | violations | seconds | seed |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {r.campaign} | {r.points:,} | {r.violations} | {r.seconds:.0f} | {r.seed} |" for r in rows)])


def play_all(campaigns: "Mapping[str, Campaign]", *, count: int | None, seed: int, as_json: bool) -> int:
    """Play campaigns and print what became of them; 0 without a violation and with at least one point in each."""
    rows: list[Row] = []
    found: dict[str, Outcome] = {}
    for name, campaign in campaigns.items():
        row, found[name] = play(name, campaign, count=count, seed=seed)
        rows.append(row)
        for violation in found[name].violations[:NAMED]:
            print(f"VIOLATION in {name}: {violation}", file=sys.stderr, flush=True)
        for remark in found[name].remarks:
            print(f"{name}: {remark}", file=sys.stderr, flush=True)
    if as_json:
        print(
            json.dumps({"rows": [asdict(row) for row in rows], "violations": {name: list(one.violations) for name, one in found.items()}})
        )
    else:
        print(table(rows))
    return int(any(row.violations or not row.points for row in rows))


def play_mutants(*, seed: int, as_json: bool) -> int:
    """Let campaigns look at mutants, and at the package as it is; 0 if every mutant is found, and nothing else."""
    from tests.torture.mutants import MUTANTS, Mutant, play

    trials: list[tuple[str, Mutant | None, str, int]] = [(name, each, each.campaign, each.points) for name, each in MUTANTS.items()]
    trials += [("nothing", None, *whole) for whole in sorted({(campaign, points) for _name, _mutant, campaign, points in trials})]
    rows: list[MutantRow] = []
    for name, mutant, campaign, points in trials:
        began = time.monotonic()
        seen = play(mutant, campaign, points, seed)
        rows.append(MutantRow(name, campaign, seen.points, len(seen.violations), round(time.monotonic() - began, 1)))
        if (not seen.violations) != (mutant is None):
            print(
                f"{'SURVIVED' if mutant else 'VIOLATION'}: without {name}, {campaign}: {seen.violations[:1]}", file=sys.stderr, flush=True
            )
    found = sum(row.violations > 0 for row in rows if row.without != "nothing")
    if as_json:
        print(json.dumps({"mutants": [asdict(row) for row in rows], "found": found, "of": len(MUTANTS)}))
    else:
        print("| without | campaign | points | violations | seconds |\n|---|---|---|---|---|")
        print("\n".join(f"| {r.without} | {r.campaign} | {r.points:,} | {r.violations} | {r.seconds:.0f} |" for r in rows))
        print(f"{found} of {len(MUTANTS)} mutants found")
    return int(found < len(MUTANTS) or any(row.violations for row in rows if row.without == "nothing"))


def parser() -> argparse.ArgumentParser:
    """Read the command line. Knows no campaign, so that `--help` needs no environment."""
    made = argparse.ArgumentParser(description="Campaigns of faults against a store, and mutants that they must find.")
    made.add_argument("--only", action="append", metavar="NAME", help="a campaign; a name that is none lists them all")
    made.add_argument("--count", type=int, metavar="N", help="points of each campaign; else the whole")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="default 1")
    made.add_argument("--mutants", action="store_true", help="take out one protection after the other, which must be noticed")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what the command line asks for; 0 if nothing was found, and of mutants everything."""
    asked = parser().parse_args(arguments)
    if not hasattr(os, "fork"):
        print("torture.py forks: it needs a POSIX system", file=sys.stderr)
        return 2
    if asked.mutants:
        return play_mutants(seed=asked.seed, as_json=asked.json)
    campaigns = find_campaigns()
    if unknown := sorted({*(asked.only or ())} - campaigns.keys()):
        parser().error(f"there is no campaign {unknown[0]!r}; known are {', '.join(sorted(campaigns))}")
    chosen = {name: campaign for name, campaign in campaigns.items() if asked.only is None or name in asked.only}
    return play_all(chosen, count=asked.count, seed=asked.seed, as_json=asked.json)


if __name__ == "__main__":
    parser().parse_args()  # --help, and what is misspelt, before an environment is made
    environment.enter()
    sys.exit(main())
