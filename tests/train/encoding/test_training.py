"""Two processes train from an empty store, with a tiny SDXL that encodes while they do. A sample of this is in `test_dataset`."""

import json

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import main
from cachestore.files.paths import Layout
from cachestore.store.read.snapshot import list_segments
from tests.encode import tiny
from tests.fakes import program

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 24
CAPTIONS = 7
UNITS = COUNT + CAPTIONS + 1
TRAINING = """
import json, sys
import cachestore as cs
from cachestore.files.paths import Layout
from cachestore.store.read.snapshot import list_segments

model, photos, store = sys.argv[1:]
data = cs.ReadThrough.of(model, store=store, resolution=64, batch_size=4).open(photos)
loader = cs.make_loader(data, batch_size=4)


def epoch():
    read = [[batch["sample_id"], float(batch["prompt_embeds"].sum()), list(batch["latents"].shape)] for batch in loader]
    return read, sorted(list_segments(Layout.at(store)))


(first, before), report, (second, after) = epoch(), data.report, epoch()
print(json.dumps({"epochs": [first, second], "same": before == after, **report.as_json()}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny SDXL, and photographs of which several share a caption."""
    found = tmp_path_factory.mktemp("training")
    tiny.sdxl().save_pretrained(found / "model")
    (found / "photos").mkdir()
    draw = np.random.default_rng(0)
    for n in range(COUNT):
        width, height = ((96, 64), (64, 96), (64, 64))[n % 3]
        Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(found / "photos" / f"{n:02}.png")
        (found / "photos" / f"{n:02}.txt").write_text(f"a photograph, number {n % CAPTIONS}")
    return found


def train(folder, store, world):
    """Train as so many ranks of one launch; returns what each printed at its end."""
    ranks = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        program(
            TRAINING,
            str(folder / "model"),
            str(folder / "photos"),
            str(store),
            **({**ranks, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "one"} if world > 1 else {}),
        )
        for rank in range(world)
    ]
    ended = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0] * world, ended
    return [json.loads(out.splitlines()[-1]) for out, _err in ended]


def test_two_ranks_from_an_empty_store_encode_each_unit_once_and_read_what_two_ranks_of_a_full_store_read(folder, tmp_path):
    ranks = train(folder, tmp_path / "store", 2)
    for rank in ranks:
        assert (rank["wanted"], rank["encoded"], rank["failed"], rank["generation"]) == (UNITS, UNITS, 0, 1)
        assert rank["same"]  # nothing was written in the second epoch
    assert sum(rank["encoded_here"] for rank in ranks) == UNITS
    full = tmp_path / "full"
    cs.precompute(folder / "photos", model=folder / "model", store=full, resolution=64, batch_size=4, inline=True)
    assert sorted(cs.open(full).keys()) == sorted(cs.open(tmp_path / "store").keys())
    data = cs.CachedDataset(full)
    for number, rank in enumerate(ranks):
        sampler = cs.BucketBatchSampler(data, 4, rank=number, num_replicas=2)
        for epoch in rank["epochs"]:
            wanted = [data.read_batch(indices) for indices in sampler]
            assert [ids for ids, _sum, _shape in epoch] == [batch["sample_id"] for batch in wanted]
            assert [shape for _ids, _sum, shape in epoch] == [list(batch["latents"].shape) for batch in wanted]
            for (_ids, total, _shape), batch in zip(epoch, wanted, strict=True):
                assert total == pytest.approx(float(batch["prompt_embeds"].sum()), rel=1e-3, abs=1e-2)
    assert main(["verify", str(tmp_path / "store")]) == 0


def test_one_process_that_trains_again_over_the_same_store_writes_nothing(folder, tmp_path):
    [first] = train(folder, tmp_path / "store", 1)
    segments = list_segments(Layout.at(tmp_path / "store"))
    [again] = train(folder, tmp_path / "store", 1)
    assert again["epochs"] == first["epochs"]
    assert (again["encoded_here"], list_segments(Layout.at(tmp_path / "store"))) == (0, segments)
