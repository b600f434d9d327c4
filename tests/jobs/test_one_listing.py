"""An invocation lists its source once and plans once, in however many processes; what its parent has planned, a worker takes over."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import cachestore as cs
from cachestore.cli import main
from cachestore.core.errors import Incomplete
from cachestore.core.ranks import RankInfo
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.planning import Planned
from cachestore.jobs.share.progress import Observer
from cachestore.jobs.share.workers import PLANNING, Heartbeat
from cachestore.jobs.start.launching import precompute_in_processes
from cachestore.jobs.start.processes import Care
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.fakes import planned
from tests.shares import share

pytestmark = pytest.mark.processes


@pytest.fixture
def data(tmp_path):
    return fakes.numbered_pictures(tmp_path / "data", 3)


@pytest.fixture
def calls(monkeypatch, tmp_path, makers):
    """Returns (listings, plans) over all processes since it was called last."""
    monkeypatch.setattr("cachestore.encode.models.hub._cached", lambda name, _revision: None if name == "far-away" else Path(name))
    monkeypatch.setenv(fakes.CALLS, str(tmp_path / "calls"))
    fakes.log_calls(monkeypatch.setattr)

    def counted():
        names = (tmp_path / "calls").read_text().split()
        (tmp_path / "calls").write_text("")
        return sum(name != "build_plan" for name in names), names.count("build_plan")

    return counted


# Without an option a call starts what a command does without one.
@pytest.mark.parametrize("how", [pytest.param({}, marks=pytest.mark.slow), {"procs": 2}, {"inline": True}, {"model": "far-away"}], ids=str)
def test_a_call_lists_and_plans_once(data, root, calls, how):
    asked: dict[str, Any] = {"model": "model", "store": root, **how}
    cs.precompute(data, **asked)
    assert calls() == (1, 1)
    cs.precompute(data, **asked)
    assert calls() == (1, 0), "the plan is there"
    (data / "more.png").write_bytes(b"another picture")
    assert cs.precompute(data, **asked).encoded == 1
    assert calls() == (1, 1)


def test_a_call_with_several_sources_lists_each_of_them_once(data, root, calls, tmp_path):
    other = fakes.numbered_pictures(tmp_path / "other", 2)
    cs.precompute([cs.Source(data, name="a"), cs.Source(other, name="b")], model="model", store=root)
    assert calls() == (1, 1)


def test_a_forecast_lists_and_plans_once(data, root, calls, capsys):
    cs.plan(data, model="model", store=root)
    assert calls() == (1, 1)
    assert main(["precompute", str(data), "--model", "model", "--store", str(root), "--plan-only"]) == 0
    assert calls() == (1, 1)


@pytest.mark.parametrize("more", share([[], ["--procs", "2"], ["--rank", "0", "--world-size", "1"], ["--recheck"]], 2), ids=str)
def test_a_command_lists_and_plans_once(data, root, calls, capfd, more):
    line = ["precompute", str(data), "--model", "model", "--store", str(root), "--quiet", *more]
    for expected in ((1, 1), (1, 0)):
        assert main(line) == 0
        assert calls() == expected
    (data / "more.png").write_bytes(b"another picture")
    assert main(line) == 0
    assert calls() == (1, 1)


@pytest.mark.parametrize(
    ("procs", "has_two"),
    [(None, True), (2, False), *(pytest.param(*way, marks=pytest.mark.slow) for way in ((None, False), (2, True)))],
)
def test_samples_in_memory_are_listed_and_planned_once(data, root, calls, procs, has_two, monkeypatch):
    rows = [cs.Sample(path.name, {"image": path.read_bytes() + b"!"}, ("a caption",)) for path in sorted(data.iterdir())]
    samples = [cs.Source(rows, name="a"), cs.Source(data, name="b")] if has_two else rows
    monkeypatch.setattr("cachestore.sources.memory.write_rows", lambda *_arguments: pytest.fail("rows were written for a worker to list"))
    report = cs.precompute(samples, model="model", store=root, procs=procs)
    assert (report.complete, report.encoded_here) == (True, report.wanted)
    assert calls() == (1, 1)
    assert cs.precompute(samples, model="model", store=root, procs=procs).encoded == 0
    assert calls() == (1, 0)


@pytest.mark.parametrize("procs", share([2, 1], 2))
def test_workers_that_download_the_model_list_and_plan_themselves(data, root, calls, procs):
    samples = [cs.Sample(path.name, {"image": path.read_bytes()}, ("a caption",)) for path in sorted(data.iterdir())]
    for source in (data, samples):
        assert cs.precompute(source, model="far-away", store=root, procs=procs, name=type(source).__name__).complete
        listings, plans = calls()
        assert procs <= listings <= procs + 1
        assert 1 <= plans <= procs


def test_what_the_calling_process_plans_is_shown_until_its_workers_begin(data, root, calls):
    create_store(root)
    seen: list[Any] = []
    care = Care(Observer(Layout.at(root)).status_of_processes, lambda found: seen.extend(found.ranks))
    assert precompute_in_processes(PrecomputeRequest(str(data), "model", str(root)), RankInfo(), care, 0).complete
    own = [one for one in seen if one.pid == os.getpid()]
    assert {f"listing {data}", "reading the model's files", PLANNING} <= {one.doing for one in own}
    assert {one.phase for one in own} == {PLANNING}


def test_a_plan_is_passed_on_as_it_was_made_and_not_if_the_model_is_another_or_the_plan_is_gone(data, root, makers):
    request = PrecomputeRequest(str(data), "model", str(root))
    layout = create_store(root)
    before = planned(layout, request)
    body = json.loads(json.dumps(before.as_json()))
    with Heartbeat(layout, "", 0, "launch", 0, 1) as heartbeat:
        found = Planned.from_json(layout, before.request, body, heartbeat)
        assert found.plan.name == before.plan.name
        for name in ("intent", "remarks", "unused", "how", "not_made_here", "model_files"):
            assert getattr(found, name) == getattr(before, name)
        assert found.files.read("00.png") == before.files.read("00.png")
        with pytest.raises(Incomplete, match="the plan is gone"):
            Planned.from_json(layout, before.request, {**body, "plan": "0" * 64}, heartbeat)
        makers.options["model"] = "another"
        with pytest.raises(Incomplete, match="the model's files have changed"):
            Planned.from_json(layout, before.request, body, heartbeat)


def test_a_plan_that_cannot_be_read_from_the_store_is_not_passed_on(data, root, calls):
    asked: dict[str, Any] = {"model": "model", "store": root}
    cs.precompute(data, **asked)
    [path] = root.glob("plans/*/plan.safetensors")
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    (data / "00.png").write_bytes(b"another picture of the same name")
    calls()
    assert cs.precompute(data, **asked).complete
    listings, plans = calls()
    assert (listings, plans) == (2, 2), "the worker cannot read it either"
