"""Attempts: the note that says which unit a worker was on when it died."""

from cachestore.jobs.share.attempts import Attempts
from cachestore.jobs.share.passes import join_pass


def attempts(layout, letter):
    return Attempts(layout, join_pass(layout, "0" * 32, "launch").folder(layout), letter * 32)


def test_without_attempts_nobody_named_a_unit(layout):
    one = attempts(layout, "a")
    assert one.last_units() == {}
    one.end()
    assert not one.folder.attempts.exists()


def test_the_unit_that_a_worker_is_on_is_there_for_all_to_see(layout):
    attempts(layout, "a").begin(7)
    attempts(layout, "b").begin(9)
    assert attempts(layout, "c").last_units() == {"a" * 32: 7, "b" * 32: 9}


def test_what_a_worker_was_on_before_is_withdrawn(layout):
    one = attempts(layout, "a")
    for unit in range(12):
        one.begin(unit)
        assert len(list(one.folder.attempts.iterdir())) == 1
    assert one.last_units() == {"a" * 32: 11}
    one.end()
    assert one.last_units() == {}


def test_of_notes_that_could_not_be_withdrawn_the_one_with_the_highest_number_counts(layout, monkeypatch):
    one = attempts(layout, "a")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda *_args, **_options: (_ for _ in ()).throw(OSError("busy")))
        for unit in range(11, 0, -1):
            one.begin(unit)
    assert len([path for path in one.folder.attempts.iterdir() if path.name.startswith("a" * 32)]) == 11
    assert one.last_units() == {"a" * 32: 1}


def test_a_file_of_another_name_is_no_attempt(layout):
    one = attempts(layout, "a")
    one.begin(3)
    (one.folder.attempts / f"{'b' * 32}.1.x").touch()
    assert one.last_units() == {"a" * 32: 3}
