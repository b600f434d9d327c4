"""Makes the golden store of this version's formats: `python -m tests.golden.make tests/golden/format-1.zip`.

It is made once for each format number. Until the first release binds the formats, it is made again when one changes.

One data set of two samples with text and latents and of two prompts, made by a pass, a value of a writer's own, an index, a recipe, a list
of what is to go, and a list of what was lost and put again.
"""

import sys
import tempfile
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np

import cachestore as cs
from cachestore.care.collect import collect, drop
from cachestore.care.repair import repair
from cachestore.files.paths import Layout
from cachestore.store.read.snapshot import list_indexes, load_snapshot
from tests import fakes
from tests.store.stores import flip

PROMPTS = (("a dog", "blurred"), ("a dog", ""))


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
            repair(root)
    with cs.open(root, mode="a") as store:
        store.commit()


def pack(root: Path, target: Path) -> None:
    """Put a store into a zip file, without workers and older indexes."""
    newest = Layout(root).index(list_indexes(Layout(root))[0])
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.parent.name != "workers"]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for path in files:
            if path.suffix != ".lmdb" or path == newest:
                file.write(path, path.relative_to(root))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        pack(Path(folder), Path(sys.argv[1]))
