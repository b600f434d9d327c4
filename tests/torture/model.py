"""The state machine of `tests/store/test_model.py`, played longer: a store against a dict of what was acknowledged."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.store.test_model import StoreMachine
from tests.torture.campaign import Campaign, Outcome, judged
from tests.torture.template import without_waiting

A_PROCESS: Final = 25
"""Runs that one process makes."""
STEPS: Final = 40


def judge(seed: int, numbers: range) -> list[str]:
    """So many runs from one seed. One that fails raises, with the steps to play it again."""
    machine = hypothesis.seed(seed * 1_000_003 + numbers.start)(type("Seeded", (StoreMachine,), {}))
    options = hypothesis.settings(
        max_examples=len(numbers),
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
    with without_waiting():
        run_state_machine_as_test(machine, settings=options)
    return []


def _batches(count: int) -> Iterator[range]:
    return (range(start, min(count, start + A_PROCESS)) for start in range(0, count, A_PROCESS))


def play(count: int, seed: int) -> Outcome:
    """So many runs."""
    found = [violation for _batch, each in judged(_batches(count), partial(judge, seed)) for violation in each]
    return Outcome(count, tuple(found), (f"{STEPS} steps each, at most",))


CAMPAIGNS: Final = {"model": Campaign(play, 2_000)}
