"""Ranks that would train on batches that do not belong together are told so, on every rank, before the first batch."""

import inspect
from importlib.util import find_spec
from itertools import count
from typing import Any

import pytest

import cachestore as cs
from cachestore.train import peers
from tests.shares import share
from tests.train import ranks
from tests.train.ranks import BATCH_SIZE

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.timeout(180)]

WITH_LIGHTNING = (
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed; the dependency group `lightning` brings it"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def store(folder):
    return ranks.write_store(folder / "store")


@pytest.fixture(scope="module")
def again(folder):
    """An equal store, made apart, as on another node's disk."""
    return ranks.write_store(folder / "again")


@pytest.fixture(scope="module")
def smaller(folder):
    return ranks.write_store(folder / "smaller", 20)


MEETINGS = count()


@pytest.fixture
def train(torch_crowd, store, folder):
    """Let so many ranks do a part; `own` has what differs on the ranks it names. Returns what each says."""

    def run(world=2, part="loop", own: Any = None, **body):
        common = {"store": store, "world_size": world, "meeting": str(folder / f"meeting {next(MEETINGS)}"), "environment": {}, **body}
        bodies = [{**common, "rank": rank, **(own or {}).get(rank, {})} for rank in range(world)]
        ended = torch_crowd.run(f"tests.train.ranks:{part}", *bodies)
        assert [code for code, _said in ended] == [0] * world
        return [said for _code, said in ended]

    return run


@pytest.fixture(scope="module")
def expected(store):
    """What one process gets in an epoch."""
    return ranks.ids(cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, "single"))


def errors(said):
    return [one["error"] for one in said]


def in_turn(said, epoch=0):
    return [batch for turn in zip(*(one["epochs"][epoch] for one in said), strict=True) for batch in turn]


# What they read


def test_stores_of_which_one_lacks_samples_are_an_error_on_every_rank_that_names_both(train, store, smaller):
    said = train(3, own={2: {"store": smaller}})
    assert errors(said) == ["RanksDiffer"] * 3
    assert len({one["message"] for one in said}) == 1
    for word in (store, smaller, "rank 0", "rank 2"):
        assert word in said[0]["message"]


@pytest.mark.slow
def test_equal_stores_made_apart_are_one_training(train, again, expected):
    said = train(own={1: {"store": again}})
    assert in_turn(said) == expected[: len(expected) // 2 * 2]


def test_ranks_that_agree_say_nothing(train):
    said = train(4, epochs=2)
    assert errors(said) == [None] * 4
    assert all(not [line for line in one["said"] if "rank" in line and "leaves out" not in line] for one in said)


DIFFERENCES = {
    "captions": {"data": {"captions": "first"}},
    "seed of the draws": {"data": {"seed": 5}},
    "latents": {"data": {"latents": "mean"}},
    "fields": {"data": {"fields": ["latents"], "captions": None}},
    "dtype": {"data": {"dtype": "bfloat16"}},
    "seed of the order": {"options": {"seed": 5}},
    "shuffle": {"options": {"shuffle": False}},
    "tail": {"options": {"tail": "pad"}},
    "epoch": {"epoch": 1},
}


@pytest.mark.parametrize("difference", share(DIFFERENCES, 9, 1))
def test_options_that_differ_on_one_rank_are_an_error_on_every_rank(train, difference):
    assert errors(train(own={1: DIFFERENCES[difference]})) == ["RanksDiffer"] * 2


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("a DataLoader of its own", marks=pytest.mark.slow),
        pytest.param("accelerate", marks=pytest.mark.slow),
        pytest.param("fabric", marks=WITH_LIGHTNING),
    ],
)
def test_stores_that_differ_are_an_error_in_each_way_of_training(train, smaller, kind):
    ways: Any = {
        "a DataLoader of its own": {"by_hand": True, "options": {"split": "found"}},
        "accelerate": {"wrapper": "accelerate", "options": {"framework": "accelerate"}},
        "fabric": {"wrapper": "fabric"},
    }
    assert errors(train(**ways[kind], own={1: {"store": smaller}})) == ["RanksDiffer"] * 2


def test_a_rank_that_alone_resumes_is_an_error_on_every_rank(train, store):
    loader = cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, "single")
    state = {**loader.state_dict(), "consumed": 4}
    assert errors(train(own={1: {"state": state}})) == ["RanksDiffer"] * 2
    assert errors(train(state=state)) == [None] * 2


@pytest.mark.slow
def test_ranks_that_resume_at_different_places_later_are_an_error(train):
    assert errors(train(part="resume_later")) == ["RanksDiffer"] * 2


@pytest.mark.slow
def test_what_differs_on_purpose_is_not_asked_for(train, smaller):
    assert errors(train(options={"check_ranks": False}, own={1: {"store": smaller}})) == [None] * 2
    assert errors(train(options={"framework": "single"}, own={1: {"store": smaller}})) == [None] * 2


# Loaders of some ranks alone


def test_validation_on_one_rank_alone_is_a_warning_and_waits_once(train, store):
    said = train(part="validate_alone", deadline=0.3)
    assert errors(said) == [None] * 2
    assert [len(one["epochs"]) for one in said] == [3, 1]
    assert said[0]["epochs"][1] == said[0]["epochs"][2] != []
    assert sum("rank 1" in line for line in said[0]["said"]) == 1
    assert not [line for line in said[1]["said"] if "did not begin" in line]


@pytest.mark.slow
def test_a_rank_that_says_nothing_is_an_error_if_it_must_be_compared(train):
    said = train(part="validate_alone", deadline=0.3, options={"check_ranks": True})
    assert errors(said) == ["RanksDiffer", None]


def test_loaders_begun_in_other_orders_are_not_taken_for_one_another(train, store):
    said = train(part="in_other_orders", deadline=0.3)
    assert errors(said) == [None] * 2
    for number, seed in enumerate((3, 4)):
        whole = ranks.ids(cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, "single", seed=seed))
        assert in_turn(said, number) == whole[: len(whole) // 2 * 2]


def test_without_a_process_group_ranks_that_must_be_compared_are_an_error(store):
    loader = cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, check_ranks=True)
    with pytest.raises(cs.BadInput):
        next(iter(loader))


def test_a_loader_is_the_one_of_the_same_lines_however_a_rank_was_started():
    """Lightning calls rank 0 through its launcher, and the others not."""
    origins, lines = [], "def call(make):\n    return make()\n"
    for started_by in ("lightning.fabric.launchers", "lightning.pytorch.trainer.call", "__main__"):
        module: dict[str, Any] = {"__name__": started_by}
        exec(lines, module)
        origins.append(module["call"](lambda: peers.origin_of(inspect.currentframe())))
    assert origins[0] == origins[1] != origins[2]


# Who deals


@pytest.mark.parametrize(
    "way",
    share([{"options": {"framework": "ddp"}}, {"by_hand": True, "options": {"split": "found"}}, {"by_hand": True}], 3),
    ids=["make_loader", "found", "given"],
)
def test_ranks_and_accelerate_that_both_deal_are_an_error(train, way):
    given = {} if "options" in way else {rank: {"options": {"rank": rank, "num_replicas": 2}} for rank in range(2)}
    assert errors(train(wrapper="accelerate", **way, own=given)) == ["BadInput"] * 2


OUTSIDE = {"by hand": {"by_hand": True, "options": {"split": "outside"}}, "make_loader": {"options": {"framework": "accelerate"}}}


@pytest.mark.parametrize("wrapper", [None, pytest.param("fabric", marks=WITH_LIGHTNING)], ids=["plain", "fabric"])
@pytest.mark.parametrize("way", share(OUTSIDE, 2))
def test_batches_that_nobody_deals_are_an_error(train, wrapper, way):
    assert errors(train(wrapper=wrapper, **OUTSIDE[way])) == ["BadInput"] * 2


@pytest.mark.parametrize("option", share(["split_batches", "dispatch_batches", "use_stateful_dataloader"], 3))
def test_options_of_accelerate_that_would_spoil_batches_are_an_error_that_names_them(train, option):
    said = train(wrapper="accelerate", accelerate={option: True}, options={"framework": "accelerate"})
    assert errors(said) == ["BadInput"] * 2
    assert all(option in one["message"] for one in said)


@pytest.mark.slow
def test_accelerate_may_leave_batches_uneven(train, expected):
    said = train(3, wrapper="accelerate", accelerate={"even_batches": False}, options={"framework": "accelerate"})
    assert in_turn(said) == expected[: len(expected) // 3 * 3]


def test_ranks_that_all_take_every_batch_are_an_error_unless_it_is_meant(train, expected):
    alone = {"rank": 0, "num_replicas": 1}
    for way in ({"by_hand": True}, {}):
        assert errors(train(**way, options=alone)) == ["RanksDiffer"] * 2
    said = train(options={"framework": "single"})
    assert [one["epochs"][0] for one in said] == [expected, expected]
    assert errors(train(options={**alone, "check_ranks": False})) == [None] * 2


@pytest.mark.slow
def test_numbers_that_leave_out_a_part_or_count_one_twice_are_an_error(train):
    twice = {rank: {"options": {"rank": 0, "num_replicas": 2}} for rank in range(2)}
    assert errors(train(own=twice)) == ["RanksDiffer"] * 2
    uneven = {rank: {"options": {"rank": rank // 2, "num_replicas": 2}} for rank in range(3)}
    assert errors(train(3, own=uneven)) == ["RanksDiffer"] * 3


# Ranks that share batches


MESHES = {"2 x 2 x 1": (2, 2, 1), "1 x 2 x 2": (1, 2, 2)}
WAYS: Any = {
    "mesh": lambda shape: {"mesh": {"shape": shape, "names": ["dp", "cp", "tp"]}},
    "name": lambda shape: {"mesh": {"shape": shape, "names": ["replicas", "cp", "tp"], "data": "replicas"}},
    "names": lambda shape: {"mesh": {"shape": (*shape, 1), "names": ["dp_replicate", "cp", "tp", "dp_shard"]}},
    "group": lambda shape: {"mesh": {"shape": shape, "names": ["dp", "cp", "tp"], "data": "group"}},
    "accelerate": lambda shape: {
        "mesh": {"shape": shape, "names": ["dp_shard", "cp", "tp"]},
        "wrapper": "accelerate",
        "options": {"framework": "accelerate"},
    },
}


@pytest.mark.parametrize("way", share(WAYS, 5))
@pytest.mark.parametrize("shape", share(MESHES, 2))
def test_ranks_of_a_mesh_get_batches_by_their_data_dimension_alone(train, shape, way, expected):
    """Bit for bit, draws and captions too, over two epochs and after a resume."""
    parts = MESHES[shape][0]
    whole = train(4, "peers", **WAYS[way](MESHES[shape]), epochs=2)
    assert errors(whole) == [None] * 4
    for said in (whole, train(4, "peers", **WAYS[way](MESHES[shape]), state=whole[0]["state"])):
        by_part = [said[rank] for rank in range(0, 4, 4 // parts)]
        assert all(said[rank]["digests"] == by_part[rank * parts // 4]["digests"] for rank in range(4))
    assert in_turn([whole[rank] for rank in range(0, 4, 4 // parts)]) == expected[: len(expected) // parts * parts]
    assert whole[0]["digests"][1][3:] == said[0]["digests"][0]


def test_explicit_numbers_make_ranks_share_batches_and_a_mesh_says_that_it_is_meant(train):
    numbers = {rank: {"options": {"rank": rank // 2, "num_replicas": 2}} for rank in range(4)}
    said = train(4, "peers", own=numbers)
    assert errors(said) == [None] * 4
    assert said[0]["digests"] == said[1]["digests"] != said[2]["digests"] == said[3]["digests"]
    assert sum("mesh=" in line for one in said for line in one["said"]) == 1


@pytest.mark.parametrize(
    "mesh",
    share(
        [
            {"shape": (2, 1), "names": ["x", "tp"]},
            {"shape": (2, 1), "names": ["dp", "tp"], "data": "cp"},
            {"shape": (2,), "names": ["tp"]},
        ],
        3,
    ),
)
def test_a_mesh_whose_data_dimension_is_unclear_is_an_error(train, mesh):
    assert errors(train(mesh=mesh)) == ["BadInput"] * 2


@pytest.mark.parametrize(
    "options",
    [{"mesh": "dp"}, {"mesh": (1, 2, 3)}, {"mesh": object(), "rank": 0}, {"rank": 0}],
    ids=["a name", "three numbers", "a mesh and a rank", "a rank alone"],
)
def test_what_is_no_mesh_or_half_a_rank_is_an_error(store, options):
    with pytest.raises(cs.BadInput):
        cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, **options)


def test_a_process_that_takes_all_has_no_mesh(store):
    with pytest.raises(cs.BadInput):
        cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, "single", mesh=object())


@pytest.mark.parametrize("framework", ["single", "accelerate", "fabric", "lightning"])
def test_ranks_go_with_no_framework_that_deals_itself(store, framework):
    with pytest.raises(cs.BadInput):
        cs.make_loader(cs.CachedDataset(store, generation=1), BATCH_SIZE, framework, rank=0, num_replicas=2)


# Other collates


@pytest.mark.slow
def test_the_trainer_of_transformers_is_told_what_makes_a_batch(train, tmp_path, expected):
    said = train(part="trainer_of_transformers", is_ours=False, folder=str(tmp_path))
    assert errors(said) == ["BadInput"] * 2
    assert "data.collate" in said[0]["message"]
    said = train(part="trainer_of_transformers", is_ours=True, folder=str(tmp_path))
    assert in_turn(said) == expected[: len(expected) // 2 * 2]
