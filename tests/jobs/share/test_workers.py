"""Beats, and how the living are told from the dead without comparing two clocks."""

import fcntl
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from cachestore.core.errors import WriteFailed
from cachestore.files.records import encode_record
from cachestore.jobs.share.workers import (
    FORMAT,
    SILENT_SECONDS,
    VERSION,
    Beat,
    Heartbeat,
    Life,
    Watch,
    boot_id,
    heartbeat_seconds,
    host_name,
    is_proved_dead,
    read_heartbeat,
    read_heartbeats,
    slow_after,
)
from tests.fakes import ROOT, Clock, program, raising

PLAN = "0" * 32


def heartbeat(layout, **options):
    return Heartbeat(layout, PLAN, 1, "launch", 0, options.pop("world", 1), **options)


def show(layout, worker, **changes):
    """A heartbeat as another machine would show it."""
    shown = Beat(
        worker=worker, host="elsewhere", boot="another boot", pid=1, rank=0, world_size=2, launch="launch", plan=PLAN, pass_number=1
    )
    layout.workers.mkdir(exist_ok=True)
    shown = replace(shown, **{"phase": "working", "count": 1, **changes})
    layout.worker(worker).write_bytes(encode_record(FORMAT, VERSION, shown.as_json()))
    return worker


# Beats


def test_without_workers_there_are_no_heartbeats(layout):
    assert read_heartbeats(layout) == []
    assert read_heartbeat(layout, "0" * 32) is None


def test_a_heartbeat_says_in_words_what_its_worker_does(layout):
    with heartbeat(layout) as one:
        for act, phase, doing in (
            (lambda: one.rise(phase="loading", doing="loading vae"), "loading", "loading vae"),
            (lambda: one.show(doing="waiting for other ranks"), "loading", "waiting for other ranks"),
            (lambda: one.rise(phase="working"), "working", "working"),
        ):
            act()
            [shown] = read_heartbeats(layout)
            assert (shown.phase, shown.doing) == (phase, doing)
    [shown] = read_heartbeats(layout)
    assert shown.has_ended


def test_waiting_does_not_raise_the_count(layout):
    with heartbeat(layout) as one:
        one.show(doing="waiting for other ranks")
        assert one.count == 0


def test_only_the_newest_failures_are_shown_and_long_ones_are_cut(layout):
    with heartbeat(layout) as one:
        for number in range(9):
            one.has_failed(f"{number}.png", "x" * 1000)
        one.write()
        shown = read_heartbeat(layout, one.worker)
    assert (shown.failures_seen, [failure[:5] for failure in shown.failures]) == (9, [f"{n}.png" for n in range(4, 9)])
    assert max(map(len, shown.failures)) == 300


def test_a_worker_is_shown_only_after_its_lock_is_held(layout, monkeypatch):
    """Who sees a heartbeat may probe its lock at once."""
    held = []
    monkeypatch.setattr("cachestore.jobs.share.workers.overwrite", lambda *_: held.append(list(layout.workers.glob("*.lock"))))
    with heartbeat(layout):
        assert [len(locks) for locks in held] == [1]


def test_a_heartbeat_tells_who_works_on_what(layout):
    with heartbeat(layout) as one:
        shown = read_heartbeat(layout, one.worker)
    assert (shown.host, shown.boot, shown.plan, shown.pass_number, shown.launch) == (host_name(), boot_id(), PLAN, 1, "launch")


def test_the_heartbeats_of_other_plans_and_damaged_ones_are_left_out(layout):
    show(layout, "a" * 32)
    show(layout, "b" * 32, plan="1" * 32)
    assert [shown.worker for shown in read_heartbeats(layout, plan=PLAN)] == ["a" * 32]
    assert len(read_heartbeats(layout)) == 2
    layout.worker("b" * 32).write_bytes(b"{")
    assert [shown.worker for shown in read_heartbeats(layout)] == ["a" * 32]


def test_the_count_rises_with_work_and_is_written_at_most_every_second(layout):
    clock = Clock()
    with heartbeat(layout, clock=clock) as one:
        for _ in range(5):
            one.rise()
        assert read_heartbeat(layout, one.worker).count == 0
        clock.sleep(1.0)
        one.rise()
        assert read_heartbeat(layout, one.worker).count == 6


def test_in_a_large_world_heartbeats_are_written_less_often(layout):
    clock = Clock()
    with heartbeat(layout, clock=clock, world=512) as one:
        clock.sleep(7.0)
        one.rise()
        assert read_heartbeat(layout, one.worker).count == 0
        clock.sleep(1.0)
        one.rise()
        assert read_heartbeat(layout, one.worker).count == 2


def test_another_phase_is_written_at_once(layout):
    with heartbeat(layout, clock=Clock()) as one:
        one.rise(phase="reconciling")
        assert read_heartbeat(layout, one.worker).phase == "reconciling"


def test_the_slowest_batch_is_remembered(layout):
    with heartbeat(layout) as one:
        for seconds in (2.0, 9.0, 3.0):
            one.batch_took(seconds)
        one.write()
        assert read_heartbeat(layout, one.worker).slowest_batch == 9.0


def test_a_worker_that_ends_says_so_and_gives_its_lock_back(layout):
    with heartbeat(layout) as one:
        pass
    assert read_heartbeat(layout, one.worker).phase == "ended"
    assert Watch(layout, Clock()).life_of(one.worker) is Life.DEAD


def test_a_worker_gives_its_lock_back_even_if_its_last_heartbeat_cannot_be_written(layout, monkeypatch):
    with pytest.raises(OSError, match="disk full"), heartbeat(layout) as one:
        monkeypatch.setattr("cachestore.jobs.share.workers.overwrite", raising(OSError("disk full")))
    assert Watch(layout, Clock()).life_of(one.worker) is Life.DEAD


def test_a_last_heartbeat_that_cannot_be_written_hides_no_error_that_came_before(layout, monkeypatch):
    one = heartbeat(layout)

    def fail():
        with one:
            monkeypatch.setattr("cachestore.jobs.share.workers.overwrite", raising(WriteFailed("disk full")))
            raise KeyError("first")

    with pytest.raises(KeyError):
        fail()
    assert Watch(layout, Clock()).life_of(one.worker) is Life.DEAD


# Who lives


def test_a_worker_that_was_never_seen_is_watched_from_now_on(layout):
    clock = Clock()
    watch = Watch(layout, clock)
    assert watch.life_of("f" * 32) is Life.LIVE
    clock.sleep(SILENT_SECONDS)
    assert watch.life_of("f" * 32) is Life.SILENT


def test_the_holder_of_its_lock_lives(layout):
    with heartbeat(layout) as one:
        assert Watch(layout, Clock()).life_of(one.worker) is Life.LIVE


KILLED = """
import os, signal, sys
from cachestore.files.paths import Layout
from cachestore.jobs.share.workers import Heartbeat
from pathlib import Path
heartbeat = Heartbeat(Layout(Path(sys.argv[1])), "0" * 32, 1, "launch", 0, 1)
heartbeat.__enter__()
print(heartbeat.worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_of_this_boot_is_proved_dead_at_once(layout):
    worker = program(KILLED, layout.root).communicate(timeout=50)[0].strip()
    assert len(worker) == 32
    assert Watch(layout, Clock()).life_of(worker) is Life.DEAD


def test_a_worker_of_an_earlier_boot_of_this_machine_is_proved_dead(layout):
    worker = show(layout, "a" * 32, host=host_name(), boot="the boot before")
    assert Watch(layout, Clock(), boot="this boot").life_of(worker) is Life.DEAD


def test_where_the_system_names_no_boot_an_earlier_one_proves_nothing(layout):
    worker = show(layout, "a" * 32, host=host_name(), boot="")
    assert Watch(layout, Clock(), boot="").life_of(worker) is Life.LIVE


def test_a_lock_that_yields_proves_nothing_of_a_worker_on_another_machine(layout):
    """Locks may not reach over machines."""
    with heartbeat(layout) as one:
        worker = one.worker
    show(layout, worker)
    assert Watch(layout, Clock()).life_of(worker) is Life.LIVE


def test_a_lock_that_was_seen_held_and_now_yields_proves_death_on_any_machine(layout):
    watch = Watch(layout, Clock(), host="observer", boot="its boot")
    with heartbeat(layout) as one:
        assert watch.life_of(one.worker) is Life.LIVE
    assert watch.life_of(one.worker) is Life.DEAD


def test_once_proved_dead_is_dead_forever(layout):
    watch = Watch(layout, Clock())
    with heartbeat(layout) as one:
        pass
    assert watch.life_of(one.worker) is Life.DEAD
    show(layout, one.worker, count=99)
    assert watch.life_of(one.worker) is Life.DEAD


@pytest.mark.parametrize(("slowest", "patience"), [(0.0, 180.0), (1.0, 180.0), (60.0, 180.0), (61.0, 183.0), (600.0, 1800.0)])
def test_a_silent_worker_is_presumed_dead_after_180_seconds_or_three_of_its_slowest_batches(layout, slowest, patience):
    clock = Clock()
    watch = Watch(layout, clock)
    worker = show(layout, "a" * 32, slowest_batch=slowest)
    assert watch.life_of(worker) is Life.LIVE
    clock.sleep(patience - 0.5)
    assert watch.life_of(worker) is Life.LIVE
    clock.sleep(0.5)
    assert watch.life_of(worker) is Life.SILENT


def test_a_count_that_rises_is_life_again(layout):
    clock = Clock()
    watch = Watch(layout, clock)
    worker = show(layout, "a" * 32, count=1)
    watch.life_of(worker)
    clock.sleep(1000)
    assert watch.life_of(worker) is Life.SILENT
    show(layout, worker, count=2)
    assert watch.life_of(worker) is Life.LIVE
    assert watch.still_seconds(worker) == 0.0


def test_times_that_a_worker_writes_are_never_compared(layout):
    clock = Clock()
    watch = Watch(layout, clock)
    worker = show(layout, "a" * 32, updated=4e9, started=4e9)
    watch.life_of(worker)
    clock.sleep(10)
    assert watch.still_seconds(worker) == 10


@pytest.mark.parametrize("break_heartbeat", [lambda path: path.unlink(), lambda path: path.write_bytes(b"?")], ids=["gone", "damaged"])
def test_a_worker_whose_heartbeat_is_gone_or_damaged_is_watched_as_if_its_count_stood_still(layout, break_heartbeat):
    clock = Clock()
    watch = Watch(layout, clock)
    worker = show(layout, "a" * 32)
    watch.life_of(worker)
    break_heartbeat(layout.worker(worker))
    clock.sleep(SILENT_SECONDS - 1)
    assert watch.life_of(worker) is Life.LIVE
    clock.sleep(1)
    assert watch.life_of(worker) is Life.SILENT


def test_a_worker_whose_lock_file_was_deleted_is_only_presumed_dead(layout):
    clock = Clock()
    watch = Watch(layout, clock)
    with heartbeat(layout) as one:
        layout.worker_lock(one.worker).unlink()
        assert watch.life_of(one.worker) is Life.LIVE
        clock.sleep(SILENT_SECONDS)
        assert watch.life_of(one.worker) is Life.SILENT


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux names its boots")
def test_this_boot_has_a_name():
    assert boot_id()


# Proofs of death, one by one

HEARTBEATS = {
    "this boot": Beat(worker="a" * 32, host="here", boot="now"),
    "an earlier boot": Beat(worker="a" * 32, host="here", boot="before"),
    "a boot without a name": Beat(worker="a" * 32, host="here", boot=""),
    "another host": Beat(worker="a" * 32, host="there", boot="now"),
    "no heartbeat": None,
}


@pytest.mark.parametrize(
    ("ran", "held", "was_held", "dead"),
    [
        ("this boot", False, False, True),  # it yields although it ran here
        ("this boot", True, True, False),
        ("this boot", None, False, False),  # the file system has no locks, or the lock's file is gone
        ("this boot", None, True, False),
        ("an earlier boot", False, False, True),
        ("an earlier boot", None, False, True),
        ("an earlier boot", True, False, False),  # another machine of the same name
        ("a boot without a name", False, False, False),
        ("a boot without a name", None, False, False),
        ("a boot without a name", False, True, True),  # seen held, and now yields
        ("another host", False, False, False),
        ("another host", None, True, False),
        ("another host", False, True, True),
        ("another host", True, True, False),
        ("no heartbeat", None, True, False),
        ("no heartbeat", False, True, False),
    ],
)
def test_death_is_proved_by_a_lock_that_was_held_and_yields_by_one_of_this_boot_that_yields_or_by_an_earlier_boot(
    ran, held, was_held, dead
):
    assert is_proved_dead(HEARTBEATS[ran], held=held, was_held=was_held, host="here", boot="now") is dead


@pytest.mark.parametrize(("held", "dead"), [(None, False), (True, False), (False, True)])
def test_where_no_boot_has_a_name_only_the_lock_proves_a_death_here(held, dead):
    assert is_proved_dead(HEARTBEATS["a boot without a name"], held=held, was_held=False, host="here", boot="") is dead


def test_a_worker_that_does_not_know_its_boot_proves_nothing_by_it():
    assert not is_proved_dead(HEARTBEATS["an earlier boot"], held=None, was_held=False, host="here", boot="")


def test_the_living_are_not_proved_dead_where_every_lock_is_granted_to_everybody(layout, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda _descriptor, _operation: None)
    with heartbeat(layout) as one:
        watch = Watch(layout, Clock())
        assert watch.life_of(one.worker) is watch.life_of(one.worker) is Life.LIVE
        assert not watch.has_died(one.worker)


def test_two_observers_at_once_do_not_prove_the_living_dead_where_no_lock_is_granted(layout, monkeypatch):
    """An observer that took the lock to look at it would be seen as its holder by the other, and then as having died."""
    with heartbeat(layout, clock=Clock()) as one:
        one._lock.release()  # as if the file system had forgotten it
        show(layout, one.worker, host="another machine")
        watch, other = Watch(layout, Clock()), Watch(layout, Clock())
        really, inside = watch.probe, []

        def probe(layout, worker):
            with layout.worker_lock(worker).open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # the other one's probe, not finished yet
                inside.append(other.life_of(worker))
                return really(layout, worker)

        watch.probe = probe
        assert watch.life_of(one.worker) is Life.LIVE
        watch.probe = really
        assert inside == [Life.LIVE]
        assert watch.life_of(one.worker) is other.life_of(one.worker) is Life.LIVE


def test_a_worker_that_ends_between_the_looks_at_its_heartbeat_and_at_its_lock_did_not_die(layout):
    watch, one = Watch(layout, Clock()), heartbeat(layout)
    one.__enter__()
    really = watch.probe

    def probe(layout, worker):
        one.__exit__()
        return really(layout, worker)

    watch.probe = probe
    assert watch.life_of(one.worker) is Life.DEAD
    assert not watch.has_died(one.worker)


def test_a_killed_worker_died_also_when_its_heartbeat_is_gone_by_now(layout):
    worker = program(KILLED, layout.root).communicate(timeout=50)[0].strip()
    watch = Watch(layout, Clock())
    assert watch.has_died(worker)
    layout.worker(worker).unlink()
    assert watch.has_died(worker)
    assert not Watch(layout, Clock()).has_died(worker)


PAUSED = """
import sys
from cachestore.files.paths import Layout
from cachestore.jobs.share.workers import Heartbeat
from pathlib import Path
with Heartbeat(Layout(Path(sys.argv[1])), "0" * 32, 1, "launch", 0, 1) as heartbeat:
    print(heartbeat.worker, flush=True)
    sys.stdin.readline()
    heartbeat.rise()
    heartbeat.write()
    print("awake", flush=True)
    sys.stdin.readline()
"""


def test_a_paused_worker_is_silent_and_never_dead_and_lives_again_when_it_wakes(layout):
    clock = Clock()
    watch = Watch(layout, clock)
    with subprocess.Popen(
        [sys.executable, "-c", PAUSED, str(layout.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as paused:
        worker = paused.stdout.readline().strip()
        assert watch.life_of(worker) is Life.LIVE
        paused.send_signal(signal.SIGSTOP)
        clock.sleep(SILENT_SECONDS)
        assert watch.life_of(worker) is Life.SILENT
        assert not watch.has_died(worker)
        paused.send_signal(signal.SIGCONT)
        paused.stdin.write("\n")
        paused.stdin.flush()
        assert paused.stdout.readline() == "awake\n"
        assert watch.life_of(worker) is Life.LIVE
        paused.stdin.write("\n")
    assert watch.life_of(worker) is Life.DEAD
    assert not watch.has_died(worker)


@pytest.mark.parametrize("world", [1, 16, 64, 512])
def test_a_heartbeat_that_is_not_written_yet_makes_nobody_slow(layout, world):
    clock = Clock()
    assert slow_after(0.001, world) >= 2 * heartbeat_seconds(world)
    with heartbeat(layout, clock=clock, world=world) as one:
        for _ in range(2):
            clock.sleep(heartbeat_seconds(world))
            before = read_heartbeat(layout, one.worker).count
            one.rise()
            assert read_heartbeat(layout, one.worker).count > before


def test_messages_name_a_worker_by_rank_process_host_and_last_heartbeat(layout):
    clock = Clock()
    watch = Watch(layout, clock)
    worker = show(layout, "a" * 32, pid=77, host="there", rank=3, count=9)
    watch.life_of(worker)
    clock.sleep(12)
    assert watch.name_of(worker) == "pid 77 on there"
    assert watch.last_heartbeat(worker) == "rank 3, pid 77 on there, last heartbeat: 'working' with count 9, unchanged for 12 s"
    assert "without a rank" in watch.last_heartbeat(show(layout, "b" * 32, rank=None))
    assert watch.last_heartbeat("c" * 32) == f"worker {'c' * 32} (heartbeat gone)"
