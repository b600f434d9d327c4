"""What is shown: counts of published units over all ranks, who is silent or gone, and rows that fit the terminal."""

import io
import re
import sys
from dataclasses import replace

import pytest

from cachestore.cli.terminal import progress
from cachestore.cli.terminal.progress import Progress, in_a_line, style_for
from cachestore.files.records import decode_record, encode_record
from cachestore.jobs.share.passes import join_pass
from cachestore.jobs.share.progress import LaunchStatus, pass_status
from cachestore.jobs.share.workers import FORMAT, VERSION, Heartbeat
from tests import fakes
from tests.fakes import FakeEncoder, captions, raising
from tests.jobs.share.test_pace import EMPTY, rank, status


def show(one, heartbeat, **changes):
    path = one.layout.worker(heartbeat.worker)
    body = decode_record(FORMAT, VERSION, path.read_bytes(), where=path)
    path.write_bytes(encode_record(FORMAT, VERSION, body | changes))


def shown(one, **changes):
    """The line about a pass while rank 1's heartbeat has these changes."""
    ref = join_pass(one.layout, one.plan.name, "launch")
    fakes.open_pass(one)
    with (
        Heartbeat(one.layout, one.plan.name, ref.number, "launch", 0, 2),
        Heartbeat(one.layout, one.plan.name, ref.number, "launch", 1, 2) as other,
    ):
        show(one, other, **changes)
        return in_a_line(pass_status(one.layout, ref))


def killed(one, **changes):
    changes = {"launch": "launch", "rank": 2, "phase": "working", **changes}
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 2, 3) as heartbeat:
        pass
    show(one, heartbeat, **changes)


@pytest.fixture
def one(root):
    return fakes.job(root, captions("a", "b"), [FakeEncoder()])


# One line, for status and for plain output


def test_units_that_are_encoded_but_not_written_yet_are_shown_as_progress():
    one = replace(status("encoding text", text=(600, 0, 300)), total=600)
    assert "0 of 600 values: 0 reused, 0 encoded, 0 failed, 300 to be written" in in_a_line(one)
    *_rest, drawn, _after = rows(80, 24, LaunchStatus((), one, "l"))
    assert " 50%  0 of 600 values  300 to be written" in drawn[0]


def test_a_rank_that_is_silent_is_named_with_what_it_does(one):
    assert "; rank 1 silent " in (reported := shown(one, at=-1e6))
    assert "(planning)" in reported


def test_a_rank_without_a_claim_waits_and_is_not_silent(one):
    assert "silent" not in shown(one, at=-1e6, phase="working")


def test_a_rank_that_is_gone_is_named_and_one_that_ended_is_not(one):
    killed(one, phase="ended")
    assert "has stopped" not in shown(one)
    killed(one)
    assert "; rank 2 has stopped, others do its work" in shown(one)


def test_nobody_of_a_launch_that_is_over_is_gone(one):
    killed(one, launch="an earlier one", encoded=1)
    reported = shown(one)
    assert "has stopped" not in reported
    assert "1 of 2 values: 0 reused, 1 encoded" in reported


def test_a_rank_that_was_started_again_is_not_gone(one):
    killed(one, rank=1)
    assert "has stopped" not in shown(one)


def test_workers_without_a_rank_are_told_apart_by_their_processes(one):
    assert "; worker 77 on " in shown(one, rank=None, pid=77, at=-1e6, started=-1.0)


def test_the_slowest_rank_is_named_where_there_are_several(one):
    assert "; slowest rank 0 (0.0/s" in shown(one, encoded=7, lived=1.0)


def test_rates_of_workers_with_one_rank_add_up(one):
    reported = shown(one, rank=0, encoded=2, lived=100.0)
    assert "0.02/s, " in reported
    assert "slowest rank 0 (0.0/s" in reported


# Which style


@pytest.mark.parametrize(
    ("is_terminal", "term", "style"), [(True, "xterm", "bar"), (True, "dumb", "plain"), (True, "", "plain"), (False, "xterm", "plain")]
)
def test_a_bar_needs_a_terminal_that_can_move_its_cursor(monkeypatch, is_terminal, term, style):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", term)
    assert style_for("auto") == style
    assert style_for("none") == "none"
    assert style_for("bar") == "bar"


def test_without_a_stderr_the_style_is_plain_and_disturbs_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert style_for("auto") == "plain"
    with Progress(tmp_path, "plain", "listing photos/") as one:
        one.show(LaunchStatus())
        one.words("lost")


# Plain lines


def launch(seen, *ranks):
    return LaunchStatus(ranks or seen.ranks, seen, "l")


def test_plain_lines_begin_at_once_and_come_when_the_pause_is_over(tmp_path, capsys, monkeypatch):
    clock = fakes.Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with Progress(tmp_path, "plain", "listing photos/") as one:
        assert capsys.readouterr().err == "listing photos/\n"
        clock.now += 29
        one.show(launch(replace(status("encoding text", text=(10, 3)), total=10, encoded=3)))
        assert capsys.readouterr().err == ""
        clock.now += 2
        one.show(launch(replace(status("encoding text", text=(10, 4)), total=10, encoded=4)))
        assert capsys.readouterr().err == "4 of 10 values: 0 reused, 4 encoded, 0 failed; encoding text\n"


def test_before_there_is_a_pass_a_plain_line_says_what_the_ranks_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress(tmp_path, "plain", "listing photos/") as one:
        one.show(LaunchStatus((rank("planning"), rank("planning"), rank("loading vae"))))
    assert capsys.readouterr().err == "listing photos/\n2 planning, 1 loading vae\n"


def test_with_no_progress_only_words_are_printed(tmp_path, capsys):
    with Progress(tmp_path, "none", "listing photos/") as one:
        one.show(launch(replace(status("encoding text", text=(10, 3)), total=10)))
        one.words("12 samples\n")
    assert capsys.readouterr().err == "12 samples\n"


@pytest.mark.parametrize("style", ["plain", "bar"])
def test_failures_of_this_launch_are_printed_once_each_where_no_result_lists_them(tmp_path, capsys, style):
    why = "this is no picture"
    failing = replace(rank("encoding latents"), failures=(f"a.png (latents): {why}", f"a.png (mask): {why}"), failures_seen=2)
    earlier = replace(failing, worker="earlier", launch="an earlier one", failures=("old.png: why",))

    def shown(**how):
        with Progress(tmp_path, style, "starting", **how) as one:
            one.show(launch(EMPTY, failing, earlier))
            one.show(launch(EMPTY, failing, earlier, replace(failing, worker="the next", failures=failing.failures * 2, failures_seen=4)))
            one.show(launch(EMPTY, replace(failing, failures=("b.png: why",), failures_seen=9), earlier))
        return capsys.readouterr().err

    assert "failed:" not in shown()
    err = shown(result_lists_failures=False)
    assert err.count(f"failed: a.png (latents, mask): {why}") == err.count("a.png") == 1
    assert err.count("failed: b.png: why") == 1
    assert "old.png" not in err


@pytest.mark.parametrize(("failed", "ending"), [((), "0 failed"), (("b",), "0 failed; 1 more failed, and the next run tries them again")])
def test_where_an_error_ends_the_command_the_last_line_says_how_far_the_pass_is(one, capsys, failed, ending):
    fakes.open_pass(one)
    with Heartbeat(one.layout, one.plan.name, 1, "launch", 0, 1) as heartbeat:
        heartbeat.encoded = 1
        for what in failed:
            heartbeat.has_failed(f"{what} (text)", "why")
    seen = pass_status(one.layout, join_pass(one.layout, one.plan.name, "launch"))

    def interrupted():
        with Progress(one.layout.root, "plain", "listing photos/") as shown:
            shown.show(LaunchStatus(seen.ranks, seen, "launch"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    *_first, last = lines = capsys.readouterr().err.splitlines()
    assert last == f"1 of 2 values: 0 reused, 1 encoded, {ending}"
    assert [line for line in lines if line.startswith("failed")] == [f"failed: {what} (text): why" for what in failed]


# The bar


def rows(width, height, *seen):
    """The rows of a terminal after each look."""
    import pyte

    screen = pyte.Screen(width, height)
    stream = pyte.Stream(screen)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", written := io.StringIO())
        patch.setenv("COLUMNS", str(width))
        patch.setenv("LINES", str(height))
        with Progress(fakes.ROOT, "bar", "listing photos/") as one:
            for each in (None, *seen):
                if each is not None:
                    one.show(each)
                stream.feed(written.getvalue().replace("\n", "\r\n"))
                written.seek(0)
                written.truncate()
                found.append([row.rstrip() for row in screen.display if row.strip()])
        stream.feed(written.getvalue().replace("\n", "\r\n"))
    return [*found, [row.rstrip() for row in screen.display if row.strip()]]


MANY = tuple(replace(rank("encoding latents" if n > 1 else "loading vae"), rank=n, worker=str(n), done=1000 * n) for n in range(64))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("count", [1, 3, 64])
def test_at_any_width_each_row_is_one_that_was_meant_and_nothing_is_left(width, count):
    seen = replace(status("", latents=(12_300, 8_204)), total=12_300, encoded=8_201, failed=3, ranks=MANY[:count])
    first, before, drawn, after = rows(width, 24, LaunchStatus(MANY[:count], None), LaunchStatus(MANY[:count], seen, "l"))
    assert first == ["listing photos/  0:00"[: width - 3] if width > 23 else first[0]]
    assert before[0].startswith("rank 0  loading")
    assert len(drawn) == min(count, 20) + 1, "the bar, and a row for each rank that fits"
    assert re.match(r"[━╸╺]+ 66%", drawn[0])
    assert all(len(row) <= width - 3 for row in [*first, *before, *drawn])
    assert after == []
    if count == 64:
        assert drawn[-1].startswith("and 45 more: 45")
    if width >= 80:
        assert "8,204 of 12,300 values" in drawn[0]
        assert "3 failed" in drawn[0]


def test_while_no_worker_does_anything_it_says_why_with_a_clock_of_its_own(monkeypatch):
    clock, stopped = fakes.Clock(), []
    monkeypatch.setattr(progress.time, "monotonic", clock)
    monkeypatch.setattr(progress._Bar, "_safely", lambda _bar, _act: None)
    working = replace(status("encoding text", text=(10, 3)), total=10, encoded=10)
    ended = replace(working, ranks=tuple(replace(one, phase="ended", alive=False) for one in working.ranks))
    drawn = []
    monkeypatch.setattr(progress, "_drawn", lambda _seen, _pace, idle, **_size: drawn.append(idle))
    with Progress(fakes.ROOT, "bar", "starting workers", lambda: bool(stopped)) as one:
        for seconds, seen in ((5, LaunchStatus()), (60, launch(working)), (0, launch(ended)), (3, launch(ended))):
            clock.now += seconds
            one.show(seen)
        stopped.append(True)
        for seconds in (0, 2):
            clock.now += seconds
            one.show(launch(ended))
    assert [drawn[0], drawn[1], *drawn[3:]] == [
        "starting workers  0:00",
        "starting workers  0:05",
        "finishing  0:00",
        "finishing  0:03",
        "stopping  0:00",
        "stopping  0:02",
    ]


def test_the_bar_of_workers_that_have_ended_stands_above_finishing():
    seen = replace(status("", latents=(601, 601)), total=601, encoded=601, ranks=())
    *_rest, drawn, _after = rows(40, 24, LaunchStatus((), seen, "l"))
    assert drawn[0].endswith("100%  601 of 601 values")
    assert drawn[1:] == ["finishing  0:00"]


def test_words_of_a_worker_come_above_the_bar_in_whole_lines():
    import pyte

    screen = pyte.Screen(80, 10)
    stream = pyte.Stream(screen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", written := io.StringIO())
        patch.setenv("COLUMNS", "80")
        with Progress(fakes.ROOT, "bar", "listing photos/") as one:
            one.words("12 sam")
            one.words("ples\nLoading: 10%\rLoading: 100%\nand a colour \x1b[31mred\x1b[0m\nno end")
            stream.feed(written.getvalue().replace("\n", "\r\n"))
            meanwhile = [row.rstrip() for row in screen.display if row.strip()]
            done = len(written.getvalue())
        stream.feed(written.getvalue()[done:].replace("\n", "\r\n"))
    words = ["12 samples", "Loading: 100%", "and a colour red"]
    assert meanwhile == [*words, "listing photos/  0:00"]
    assert [row.rstrip() for row in screen.display if row.strip()] == [*words, "no end"]


def test_a_bar_that_nobody_can_read_any_more_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "write", raising(BrokenPipeError))
    with Progress(tmp_path, "bar", "listing photos/") as one:
        one.show(launch(status("encoding text", text=(10, 3))))
        one.words("lost\n")


def test_a_rank_that_stopped_and_one_that_is_silent_have_rows_of_their_own():
    ranks = (
        rank("encoding latents"),
        replace(rank("loading vae"), rank=1, worker="v", count=2, still_seconds=40.0),
        replace(rank("encoding latents"), rank=2, worker="x", alive=False),
    )
    seen = replace(status("", latents=(10, 3)), total=10, ranks=ranks)
    *_rest, drawn, _after = rows(80, 24, LaunchStatus(ranks, seen, "l"))
    assert drawn[1:] == [
        "rank 0  encoding latents",
        "rank 1  silent for 40 s (loading vae)",
        "rank 2  has stopped; others do its work",
    ]
