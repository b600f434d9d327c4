"""Ranks as actors on a cluster of three nodes in one machine: nodes that are killed, models that cannot be loaded, and the interrupt."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from tests.encode import tiny_families
from tests.scenarios.trainers import run_script

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed; the extra [ray] brings it (79 MB)"),
]


def on_a_cluster(test):
    """It takes ten seconds to begin, and each actor imports all that encodes."""
    return pytest.mark.slow(pytest.mark.timeout(400)(test))


CLUSTER = """
import atexit, json, logging, os, pathlib, signal, sys, threading, time
import numpy
import ray
from ray.cluster_utils import Cluster
import cachestore as cs
import cachestore.ray

STORE, MODEL, DATA = sys.argv[1:4]
logging.basicConfig(level=logging.WARNING)
small = {"object_store_memory": 80 << 20}
atexit.register(lambda: (ray.shutdown(), cluster.shutdown()))  # whatever ends the program: Ray's processes would outlive it
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(3)]
ray.init(address=cluster.address, log_to_driver=False)
where = {"num_gpus": 0, "num_cpus": 1}

def units(counts):
    return counts.get("encoded", 0)

def killing(after):
    "Kills a node, once, when so many units are there; counts what is reported."
    reported = []
    def tell(counts):
        reported.append(units(counts))
        if len(nodes) == 3 and units(counts) >= after:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    tell.reported = reported
    return tell

def job():
    def encode(items):
        time.sleep(0.1)
        return {key: {"x": numpy.full(1000, number, dtype=numpy.float32)} for key, number in items}
    return cs.open(STORE, mode="a"), [(cs.key("number", str(number)), number) for number in range(400)], encode

def show(**values):
    print("RESULT " + json.dumps(values))
"""


def on_cluster(folder, program, *arguments, **options):
    """Run a program on a cluster of its own; returns what it showed, its file is left in the folder."""
    given = [*map(str, arguments), *["-"] * (3 - len(arguments))]
    reported = run_script(folder, CLUSTER + program, *given, seconds=300, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", **options)
    return json.loads(reported.split("RESULT ")[1].splitlines()[0])


@on_a_cluster
def test_fill_loses_nothing_when_a_node_is_killed_and_makes_nothing_twice_that_was_published(tmp_path):
    found = on_cluster(
        tmp_path,
        """
tell = killing(after=60)
began = time.monotonic()
report = cachestore.ray.fill(job, workers=3, batch_size=4, on_progress=tell, **where)
show(report=report.as_json(), reported=tell.reported, nodes=len(nodes), seconds=time.monotonic() - began)
""",
        tmp_path / "store",
    )
    report = found["report"]
    assert (report["complete"], report["wanted"], report["encoded"], report["failed"]) == (True, 400, 400, 0)
    assert found["nodes"] == 2  # one was killed in the middle
    assert found["reported"] == sorted(found["reported"])
    assert found["reported"][-1] == 400
    assert cs.verify(tmp_path / "store").ok
    with cs.open(tmp_path / "store") as store:
        for number in (0, 199, 399):
            assert np.all(store.get(cs.key("number", str(number)))["x"].numpy() == number)


@on_a_cluster
def test_precompute_loses_nothing_when_a_node_is_killed(tmp_path):
    family = tiny_families.FAMILIES["sdxl"]
    tiny_families.save(family, family.build(), tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    for number in range(60):
        noise = np.random.default_rng(number).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "pictures" / f"{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text(f"picture {number}")
    found = on_cluster(
        tmp_path,
        """
tell = killing(after=10)
options = {"model": MODEL, "store": STORE, "resolution": 64, "batch_size": 1, **where}
report = cachestore.ray.precompute(DATA, workers=3, on_progress=tell, **options)
again = cachestore.ray.precompute(DATA, workers=2, **options)
show(report=report.as_json(), again=again.as_json(), nodes=len(nodes))
""",
        "store",  # made absolute here: the actors run elsewhere
        "model",
        "pictures",
    )
    report, again = found["report"], found["again"]
    assert (report["complete"], report["wanted"], report["encoded"], report["failed"]) == (True, 121, 121, 0)
    assert (again["encoded"], again["reused"]) == (0, 121)
    assert found["nodes"] == 2
    assert cs.verify(tmp_path / "store").ok
    assert len(cs.CachedDataset(tmp_path / "store")) == 60


@on_a_cluster
def test_a_model_that_cannot_be_loaded_is_one_error_however_it_fails(tmp_path):
    found = on_cluster(
        tmp_path,
        """
loads = os.path.abspath("loads")
def refused():
    open(loads, "a").write("refused\\n")
    raise cs.BadInput("the weights are not there")
def killed():
    open(loads, "a").write("killed\\n")
    os.kill(os.getpid(), signal.SIGKILL)
reported = {}
for make_job, workers in ((refused, 3), (killed, 1)):
    try:
        cachestore.ray.fill(make_job, workers=workers, **where)
    except cs.CacheStoreError as error:
        reported[make_job.__name__] = [type(error).__name__, str(error)]
show(reported=reported)
""",
    )
    assert found["reported"]["refused"] == ["BadInput", "the weights are not there"]
    assert found["reported"]["killed"][0] == "Incomplete"
    loads = (tmp_path / "loads").read_text().split()
    assert loads.count("refused") <= 3
    assert loads.count("killed") == 3


@on_a_cluster
def test_an_interrupt_ends_the_actors_and_what_they_encoded_stays(tmp_path):
    found = on_cluster(
        tmp_path,
        """
def interrupt(counts):
    if 0 < units(counts) < 300:
        signal.raise_signal(signal.SIGINT)
try:
    cachestore.ray.fill(job, workers=2, batch_size=4, on_progress=interrupt, **where)
    ended = "reached the end"
except KeyboardInterrupt:
    ended = "interrupted"
def actors():
    "Processes of ranks, which Ray names after the method that they run."
    named = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    return [name.decode() for name in named if name.startswith(b"ray::Rank")]
deadline = time.monotonic() + 30
while (left := actors()) and time.monotonic() < deadline:
    time.sleep(0.2)
report = cachestore.ray.fill(job, workers=2, batch_size=16, **where)
show(ended=ended, left=left, report=report.as_json())
""",
        tmp_path / "store",
    )
    assert found["ended"] == "interrupted"
    assert found["left"] == []
    assert found["report"]["complete"]
    assert found["report"]["encoded"] == 400
    assert found["report"]["encoded_here"] < 400


@on_a_cluster
def test_ranks_take_no_gpu_where_there_is_none_and_what_no_node_has_is_refused_within_seconds(tmp_path):
    found = on_cluster(
        tmp_path,
        """
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("cachestore").addHandler(Lines())
report = cachestore.ray.fill(job, workers=2, num_cpus=1, batch_size=50)
refused, said = {}, list(lines)
for asked in ({"num_gpus": 1, "num_cpus": 1}, {"num_cpus": 2}):
    try:
        cachestore.ray.fill(job, workers=2, **asked)
    except cs.Incomplete as error:
        refused[next(iter(asked))] = str(error)
show(encoded=report.encoded, said=said, refused=refused)
""",
        tmp_path / "store",
    )
    assert found["encoded"] == 400
    assert any("no GPU" in line for line in found["said"])
    assert "num_gpus=1" in found["refused"]["num_gpus"]
    assert "GPU=0, CPU=1" in found["refused"]["num_gpus"]
    assert "num_cpus=2" in found["refused"]["num_cpus"]


@on_a_cluster
def test_where_a_cluster_may_grow_the_wait_is_bounded_and_says_what_was_asked(tmp_path):
    found = on_cluster(
        tmp_path,
        """
import cachestore.ray.actors
cachestore.ray.actors.START_SECONDS = 3.0
cachestore.ray.actors.is_fixed = lambda: False
try:
    cachestore.ray.fill(job, workers=2, num_gpus=1, num_cpus=1)
except cs.Incomplete as error:
    show(reported=str(error))
""",
        tmp_path / "store",
    )
    assert "num_gpus=1" in found["reported"]


def test_a_status_with_types_of_nodes_or_none_at_all_is_no_proof_that_a_cluster_cannot_grow():
    from cachestore.ray.actors import grows_never

    def status(*names):
        return json.dumps({"autoscaler_report": {"active_nodes": dict.fromkeys(names, 1)}}).encode()

    assert grows_never(status(f"node_{'0a' * 28}", f"node_{'1b' * 28}"))
    assert not grows_never(status("ray.head.default", f"node_{'1b' * 28}"))
    assert not grows_never(status())
    assert not grows_never(b'{"autoscaler_report": null}')
    assert not grows_never(b"?")
