"""A clock that is set, forwards or back, changes no duration: of a pass, of a worker, or since its last heartbeat."""

import time

import pytest

from cachestore.core.errors import Incomplete
from cachestore.jobs.share.passes import PassRef, join_pass
from cachestore.jobs.share.progress import Observer, pass_status
from cachestore.jobs.share.workers import Heartbeat, seconds_of_pass
from cachestore.jobs.start.processes import hangs
from tests import fakes
from tests.fakes import Clock, FakeEncoder, captions

YEAR = 34_560_000.0


@pytest.fixture
def wall(monkeypatch):
    """The machine's clock: `wall.step` is how far it was set."""

    class Wall:
        step = 0.0

    real, made = time.time, Wall()
    monkeypatch.setattr(time, "time", lambda: real() + made.step)
    return made


class Stepping(FakeEncoder):
    """Sets the clock while it encodes."""

    def __init__(self, wall, step, **options):
        super().__init__(**options)
        self._wall, self._step = wall, step

    def submit(self, batch):
        self._wall.step = self._step
        return super().submit(batch)


@pytest.mark.parametrize("step", [YEAR, -YEAR])
def test_a_pass_takes_no_longer_for_a_clock_that_is_set(tmp_path, wall, step):
    report = fakes.run(tmp_path / "store", captions("a", "b", "c"), Stepping(wall, step))
    assert report.encoded == 3
    assert 0 < report.seconds < 600


def test_a_pass_of_nothing_takes_no_time_to_speak_of(tmp_path):
    assert 0 <= fakes.run(tmp_path / "store", [], FakeEncoder()).seconds < 600


def test_the_seconds_of_a_pass_go_on_from_those_before_a_pause_and_do_not_count_it_or_add_up(tmp_path):
    one = fakes.job(tmp_path / "store", captions("a"), [FakeEncoder()])
    ref = join_pass(one.layout, one.plan.name, "launch")
    clock = Clock()

    def joined(launch):
        heartbeat = Heartbeat(one.layout, "", 0, launch, None, 1, clock)
        heartbeat.__enter__()
        heartbeat.join(ref.plan, ref.number, launch)
        return heartbeat

    assert seconds_of_pass(one.layout, ref.plan, ref.number) == 0
    first = joined("first")
    clock.now += 100
    first.rise(phase="working")
    second = joined("second")  # beside the first, by hand
    clock.now += 20
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert seconds_of_pass(one.layout, ref.plan, ref.number) == 120
    clock.now += 5_000  # interrupted
    third = joined("third")
    clock.now += 7
    assert third.pass_seconds() == 127
    third.__exit__(None, None, None)
    assert seconds_of_pass(one.layout, ref.plan, ref.number + 1) == 0


def test_an_interrupted_pass_reports_the_seconds_of_both_runs(tmp_path, monkeypatch):
    class Once:
        is_cancelled = True

        def is_set(self):
            return self.is_cancelled

    cancel = Once()
    one = fakes.job(tmp_path / "store", captions("a", "b"), [FakeEncoder()], cancel=cancel)
    with pytest.raises(Incomplete):
        fakes.run_pass(one)
    ref = PassRef(one.plan.name, 1)
    before = seconds_of_pass(one.layout, ref.plan, ref.number)
    cancel.is_cancelled = False
    assert fakes.run_pass(fakes.as_launch(one, "the next")).seconds >= round(before, 3) > 0


@pytest.mark.parametrize("step", [YEAR, -YEAR])
def test_a_worker_is_neither_silent_nor_slow_nor_lost_as_the_clock_was_set(tmp_path, wall, step):
    one = fakes.job(tmp_path / "store", captions("a"), [FakeEncoder()])
    ref = join_pass(one.layout, one.plan.name, "launch")
    fakes.open_pass(one)
    observer = Observer(one.layout)
    with Heartbeat(one.layout, "", 0, "launch", 0, 1) as heartbeat:
        heartbeat.join(ref.plan, ref.number, "launch")
        heartbeat.encoded = 5
        heartbeat.rise(phase="working")
        rate = pass_status(one.layout, ref).ranks[0].rate
        wall.step = step
        [rank] = pass_status(one.layout, ref).ranks
        assert (rank.beat_age_seconds < 600, rank.still_seconds < 600, rank.is_silent) == (True, True, False)
        assert hangs(rank, 1.0) == ""
        assert observer.status_of_processes([rank.pid]).status is not None
        heartbeat.write()
        assert 0 < pass_status(one.layout, ref).ranks[0].rate <= rate
