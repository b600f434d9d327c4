"""What the processes of scenarios do. Each part takes a mapping and returns something that JSON can hold."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cachestore as cs
import cachestore.jobs.run.reconcile
from cachestore.jobs.share.claims import Claims
from tests import fakes
from tests.fakes import FakeEncoder


def value_of(name):
    """What belongs to a key of a scenario: large enough to be torn."""
    return np.frombuffer(bytes(cs.key(name)) * 1024, np.uint8)


def encode_names(batch):
    """An `encode` for `fill` that logs what it makes."""
    fakes.encode_and_log(batch)
    return {key: {"value": value_of(name)} for key, name in batch}


def fill(body: Mapping[str, Any], encode: Any = encode_names):
    with cs.open(body["store"], mode="a") as store:
        wanted = [(cs.key(name), name) for name in body["names"]]
        return cs.fill(store, wanted, encode, rank=body["rank"], world_size=body["world_size"]).as_json()


def read_until_all_is_there(body: Mapping[str, Any]):
    """Read beside the writers until every name has its value. Returns how many looks found nothing yet; anything else is an error."""
    wanted, looks = list(body["names"]), 0
    while not (Path(body["store"]) / "cachestore.json").exists():
        looks += 1
    with cs.open(body["store"]) as store:
        while wanted:
            store.refresh()
            left = []
            for name in wanted:
                try:
                    read = store.get(cs.key(name), as_numpy=True)["value"]
                except cs.MissingEntry:
                    left.append(name)
                    looks += 1
                else:
                    assert read.tobytes() == value_of(name).tobytes(), f"{name} has another value"
            wanted = left
    return looks


def fill_without_being_first_to_reconcile(body: Mapping[str, Any]):
    """One rank that only takes over what another has begun to reconcile, so that this other is there to be killed."""
    really = Claims.take

    def take(self, number, recipe, partitions, *, after=None):
        if recipe == 1 and after is None:
            return None
        return really(self, number, recipe, partitions, after=after)

    Claims.take = take  # pyright: ignore[reportAttributeAccessIssue]
    return fill(body)


def fill_and_die_after_done(body: Mapping[str, Any]):
    """One rank that is killed once it has ended the pass."""
    really = cachestore.jobs.run.reconcile.publish_done

    def publish_and_die(*arguments):
        really(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    cachestore.jobs.run.reconcile.publish_done = publish_and_die  # pyright: ignore[reportPrivateImportUsage]
    return fill(body)


@dataclass
class Bucketed(FakeEncoder):
    """A fake encoder of pictures that come in so many buckets."""

    buckets: int = 1

    def prepare(self, resolved):
        return replace(super().prepare(resolved), group=sum(resolved.item) % self.buckets)


def precompute(body: Mapping[str, Any]):
    """One rank of a `precompute` over pictures, in as many buckets as it is told."""
    from cachestore.jobs.plan import planning as request
    from cachestore.jobs.plan.options import PrecomputeRequest
    from cachestore.jobs.start.here import precompute_here

    def encoders(_layout, asked, **_how):
        return (Bucketed("latents", model=asked.model, limit=16, buckets=body["buckets"]),)

    request.make_encoders = encoders  # pyright: ignore[reportAttributeAccessIssue]
    ranks = {"rank": body["rank"], "world_size": body["world_size"]}
    asked = PrecomputeRequest(body["data"], "model", body["store"], encode=("latents",), name=body["name"], **ranks)
    return precompute_here(asked).as_json()
