"""Many ranks make few prompts, and readers are beside them."""

from collections import Counter

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from tests.scenarios.crowd import Crowd

pytestmark = pytest.mark.processes

PROMPTS = [f"prompt {number}" for number in range(25)]
RANKS = 8


def play_round(crowd, root, number, *, fill="tests.scenarios.parts:fill"):
    """Eight ranks fill and two readers look; every key is made once, and no reader ever sees anything but nothing or the value."""
    ranks = [{"store": str(root), "names": PROMPTS, "rank": rank, "world_size": RANKS, "part": fill} for rank in range(RANKS)]
    readers = [{"store": str(root), "names": PROMPTS}] * 2
    ended = crowd.run("tests.scenarios.parts:read_until_all_is_there", *readers, *ranks, CACHESTORE_LAUNCH=f"round {number}")
    assert [code for code, _result in ended] == [0] * (RANKS + 2)
    reports = [report for _code, report in ended[2:]]
    assert {(report["complete"], report["wanted"], report["encoded"]) for report in reports} == {(True, 25, 25)}
    assert Counter(key for _pid, _encoder, key in crowd.made()) == Counter(str(cs.key(name)) for name in PROMPTS)
    assert verify(root).ok


@pytest.mark.parametrize("number", [*range(2), *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 50))])
def test_eight_ranks_make_25_prompts_once_and_readers_beside_them_see_nothing_torn(crowd, tmp_path, number):
    """SimpleTuner #1147: eight ranks write text embeddings; readers find files without a central directory, and writers die silently."""
    play_round(crowd, tmp_path / "store", number)


@pytest.mark.slow
@pytest.mark.torch
def test_the_same_with_a_real_model_in_every_rank(tmp_path_factory):
    """SimpleTuner #1147, with a text encoder of transformers; three rounds."""
    folder = tmp_path_factory.mktemp("model")
    crowd = Crowd(folder, "tests.scenarios.models", CACHESTORE_TINY=str(folder))
    try:
        for number in range(3):
            ranks = [
                {"store": str(folder / f"store {number}"), "names": PROMPTS, "rank": rank, "world_size": RANKS} for rank in range(RANKS)
            ]
            ended = crowd.run("tests.scenarios.models:fill", *ranks, CACHESTORE_LAUNCH=f"round {number}")
            assert [(code, report["complete"], report["encoded"]) for code, report in ended] == [(0, True, 25)] * RANKS
            assert verify(folder / f"store {number}").ok
    finally:
        crowd.close()
