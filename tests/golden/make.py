"""Makes the golden store of this version's formats: `python tests/golden/make.py FOLDER`. It is made once for each format, and kept.

One data set of two samples with text and latents and of two prompts, made by a pass, a value of a writer's own, an index, a recipe, a list
of what is to go, and a list of what was lost and put again.
"""

import sys
from contextlib import closing
from pathlib import Path

import numpy as np

import cachestore as cs
from cachestore.files.paths import Layout
from cachestore.maintain.collect import collect, drop
from cachestore.storage.repair import repair_store
from cachestore.storage.snapshot import load_snapshot
from tests import fakes
from tests.storage.stores import flip

PROMPTS = (("a dog", "blurred"), ("a dog", ""))
"""What format 2 of catalogs is for."""


def make(root: Path) -> None:
    """Make the store in an empty folder."""
    fakes.run(root, fakes.captions("a cat"), fakes.FakeEncoder(), launch="golden 0")
    drop(root, "train")
    collect(root, apply=True)
    files = {"a.png": b"picture a", "b.png": b"picture b"}
    encoders = (fakes.FakeEncoder("text"), fakes.FakeEncoder("latents"))
    fakes.run(root, fakes.pictures(*files), *encoders, source=fakes.Pictures(files), prompts=PROMPTS, launch="golden 1")
    for _time in range(2):
        with cs.open(root, mode="a") as store, store.writer() as writer:
            writer.put(cs.key("golden"), {"wide": np.arange(4, dtype=np.float32), "flag": np.array([True, False])}, {"note": "ünïcöde"})
        if _time == 0:
            with closing(load_snapshot(Layout(root))) as snapshot:
                [[location]] = snapshot.find([cs.key("golden")])
            flip(Layout(root).segment(location.segment.digest), location.offset)
            repair_store(root)
    with cs.open(root, mode="a") as store:
        store.commit()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
