"""Training under Ray Train, and Ray Data over a data set."""

import json
from importlib.util import find_spec

import pytest

from tests.scenarios.trainers import data_set, run_script

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,  # Ray and two of its workers begin, each importing torch
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed; the dependency group `ray` brings it (79 MB)"),
]

TRAIN = """
import json, os, sys
import ray
import ray.train
import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader

STORE, OUT = map(os.path.abspath, sys.argv[1:])


def loop(config):
    import cachestore as cs

    data = cs.CachedDataset(STORE, generation=1)
    make = lambda: cs.make_loader(data, batch_size=2, seed=3)
    found = {"whole": [batch["sample_id"] for batch in make()]}

    loader = make()
    batches = iter(loader)
    begun = [next(batches)["sample_id"] for _ in range(2)]
    state = loader.state_dict()
    del batches
    again = make()
    again.load_state_dict(state)
    found["resumed"] = begun + [batch["sample_id"] for batch in again]

    prepared = prepare_data_loader(make(), add_dist_sampler=False)
    found["prepared"] = [batch["sample_id"] for batch in prepared]
    try:
        list(prepare_data_loader(make()))
    except cs.BadInput as error:
        found["rebuilt"] = str(error)
    with open(f"{OUT}/{ray.train.get_context().get_world_rank()}.json", "w") as file:
        json.dump(found, file)


ray.init(address="local", num_cpus=3, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=OUT + "/ray")).fit()
"""

DATA = """
import json, os, sys
import numpy
import ray
import cachestore as cs

STORE = os.path.abspath(sys.argv[1])
ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
# the page's eight lines
class Read:
    def __init__(self):
        self.data = cs.CachedDataset(STORE, generation=1)

    def __call__(self, rows):
        batch = self.data.read_batch(rows["id"].tolist())
        return {"sample_id": batch["sample_id"], "latents": batch["latents"].numpy()}

count = len(cs.CachedDataset(STORE, generation=1))
samples = ray.data.range(count).map_batches(Read, batch_size=1, concurrency=1)
# their end
rows = samples.take_all()
print("RESULT " + json.dumps({"ids": [row["sample_id"] for row in rows], "shapes": [row["latents"].shape for row in rows]}))
"""

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1"}


def test_two_workers_of_ray_train_share_the_batches_and_resume_where_they_were(tmp_path):
    data_set(tmp_path / "store")
    (tmp_path / "out").mkdir()
    run_script(tmp_path, TRAIN, "store", "out", seconds=300, **ENVIRONMENT)
    ranks = [json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in range(2)]
    seen = [{name for batch in rank["whole"] for name in batch} for rank in ranks]
    assert len(ranks[0]["whole"]) == len(ranks[1]["whole"]) > 0
    assert seen[0].isdisjoint(seen[1])
    assert len(seen[0] | seen[1]) == 24
    for rank in ranks:
        assert rank["resumed"] == rank["whole"]
        assert rank["prepared"] == rank["whole"]
        assert "add_dist_sampler=False" in rank["rebuilt"]


def test_ray_data_reads_a_data_set(tmp_path):
    data_set(tmp_path / "store")
    reported = run_script(tmp_path, DATA, "store", seconds=300, **ENVIRONMENT)
    found = json.loads(reported.split("RESULT ")[1].splitlines()[0])
    assert len(found["ids"]) == len(set(found["ids"])) == 24
