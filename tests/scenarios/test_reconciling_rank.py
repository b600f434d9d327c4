"""The rank that reconciles is killed: nobody depends on it."""

import signal
from collections import Counter

import pytest

import cachestore as cs
from cachestore.care.verify import verify
from cachestore.files.failpoints import VARIABLE

pytestmark = pytest.mark.processes

NAMES = [f"name {number}" for number in range(120)]


def killed_while_reconciling(crowd, root, **victim):
    """Rank 0 reconciles and is killed; three others finish. Returns how everybody ended."""
    ranks = [{"store": str(root), "names": NAMES, "rank": rank, "world_size": 4} for rank in range(4)]
    ranks[0] |= {"part": "tests.scenarios.parts:fill", **victim}
    return crowd.run("tests.scenarios.parts:fill_without_being_first_to_reconcile", *ranks, CACHESTORE_LAUNCH="one launch")


def finished_by_the_others(crowd, root, ended):
    """Whether rank 0 was killed, the others say that all is there, and nothing was made twice for it."""
    assert [code for code, _report in ended] == [-signal.SIGKILL, 0, 0, 0]
    assert {(report["complete"], report["wanted"], report["encoded"]) for _code, report in ended if report} == {(True, 120, 120)}
    assert set(Counter(key for _pid, _encoder, key in crowd.made()).values()) == {1}
    with cs.open(root) as store:
        assert set(store.keys()) == {cs.key(name) for name in NAMES}
    return verify(root).ok


@pytest.mark.parametrize(
    "point", ["reconcile.before_commit", "commit.before_index", "commit.after_index", "reconcile.after_commit", "reconcile.before_done"]
)
def test_when_the_reconciling_rank_is_killed_the_others_finish(crowd, tmp_path, point):
    """accelerate #2236 and LlamaFactory #360: the main process dies while the others stand in a barrier, until that times out."""
    ended = killed_while_reconciling(crowd, tmp_path / "store", environment={VARIABLE: point})
    assert finished_by_the_others(crowd, tmp_path / "store", ended)


def test_when_the_reconciling_rank_is_killed_after_the_end_the_others_return_its_report(crowd, tmp_path):
    """The same, a moment later: what it published is what everybody returns."""
    ended = killed_while_reconciling(crowd, tmp_path / "store", part="tests.scenarios.parts:fill_and_die_after_done")
    assert finished_by_the_others(crowd, tmp_path / "store", ended)
