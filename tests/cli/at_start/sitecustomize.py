"""Runs when a Python starts with this folder on its path: plugs fake encoders into `precompute`, so that processes need no torch."""

import os

if "FAKE_ENCODERS" in os.environ:
    from cachestore.jobs.plan import planning
    from tests import fakes

    planning.PLAN_SECONDS = float(os.environ.get("FAKE_PLAN_SECONDS", planning.PLAN_SECONDS))  # pyright: ignore[reportConstantRedefinition]
    fakes.plug_in({"before_encode": fakes.at_the_gate, "limit": 2} if fakes.GATE in os.environ else {})
