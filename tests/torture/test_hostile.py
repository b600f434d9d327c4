"""Samples of the campaigns of damage, of damage under open readers, of strangers' things and of fuzzing; that each can find something;
and more, as `slow`.
"""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from cachestore.cli import OK
from cachestore.jobs.share.workers import Beat
from cachestore.store.read.fetch import Fetcher
from tests.torture import campaign, damage, fuzz, hostile, model, readers
from tests.torture.campaign import judged, scratch
from tests.torture.damage import Damage, choose_damages, kind_of
from tests.torture.template import build_template

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def template():
    with scratch() as folder:
        yield build_template(folder)


def struck(template, *damages):
    return [violation for _damage, found in judged(damages, partial(damage.judge, template)) for violation in found]


def test_the_template_has_two_files_of_each_kind_that_can_change_places(template):
    files = damage.files_of(template.store)
    assert {kind for kind, names in files.items() if len(names) >= 2} >= set(damage.KINDS) - {"marker", "temporary"}
    assert files["marker"]


def test_a_file_of_no_known_kind_is_not_overlooked():
    with pytest.raises(LookupError):
        kind_of("notes/new.bin")


def test_few_damages_strike_every_kind(template):
    kinds = {one.kind for one in choose_damages(template, 200, 1)}
    assert kinds == {kind for kind, names in damage.files_of(template.store).items() if names} | {"folder"}


def test_no_damages_find_nothing(template):
    assert list(choose_damages(template, 0, 1)) == struck(template) == fuzz.parsed(template.store, 0, 1) == []


def test_a_sample_of_damages_finds_nothing(template):
    assert struck(template, *choose_damages(template, 4, 7)) == []


def test_every_byte_of_a_segment_is_under_a_checksum_that_verify_looks_at(template):
    path = damage.files_of(template.store)["segment"][0]
    assert struck(template, *(Damage("segment", path, way, 2) for way in ("flip", "grow"))) == []


def test_a_store_without_checksums_is_found_out(template, monkeypatch):
    [path] = damage.files_of(template.store)["segment"][:1]
    monkeypatch.setattr(Fetcher, "_check", lambda *_arguments: None)
    monkeypatch.setattr(damage, "_repaired", lambda *_arguments: ())
    found = struck(template, *(Damage("segment", path, "noise", number) for number in range(4)))
    assert any("a wrong value" in violation for violation in found)


def test_a_verify_that_says_ok_is_found_out(template, monkeypatch):
    class Fine:
        ok = True

    monkeypatch.setattr(damage, "verify", lambda _store: Fine())
    monkeypatch.setattr(damage, "_repaired", lambda *_arguments: ())
    path = damage.files_of(template.store)["segment"][0]
    assert struck(template, Damage("segment", path, "flip", 1)) == ["verify says that this is ok"]


@pytest.mark.torch
def test_a_sample_of_damages_under_open_readers_finds_nothing():
    assert readers.play(4, 3).violations == ()


@pytest.mark.slow
@pytest.mark.torch
def test_a_reader_that_checks_nothing_is_found_out(monkeypatch):
    monkeypatch.setattr(Fetcher, "_check", lambda *_arguments: None)
    monkeypatch.setattr(readers, "WAYS", ("noise",))
    monkeypatch.setattr(readers, "STRANGE", ())
    assert readers.play(30, 3).violations  # a few may all strike headers, which are checked elsewhere


def test_a_sample_of_fuzzed_files_finds_nothing(template):
    assert fuzz.parsed(template.store, 300, 5) == []


def test_a_parser_that_believes_what_it_reads_is_found_out(template, monkeypatch):
    monkeypatch.setattr(Beat, "parse", lambda body: Beat(**{each.name: body.get(each.name) for each in fields(Beat)}))
    monkeypatch.setattr(fuzz, "PARSERS", {"worker": fuzz.PARSERS["worker"]})
    assert any("TypeError" in violation for violation in fuzz.parsed(template.store, 100, 5))


def test_every_kind_of_file_that_is_parsed_is_fuzzed():
    assert set(damage.KINDS) - set(fuzz.PARSERS) == {"attempt", "dropped", "listing", "lock", "quarantined", "temporary"}, (
        "these are names alone"
    )


# Things of strangers


@pytest.fixture(scope="module")
def normal(template):
    return hostile.look_at_normal(template)


def faced(normal, *points):
    return [violation for _point, found in judged(points, partial(hostile.judge, normal), each=8) for violation in found]


def test_the_table_has_each_thing_in_place_of_each_kind_before_each_command():
    table = hostile.points(has_devices=True)
    assert len({(point.thing, point.kind, point.command) for point in table}) == len(table) == hostile.WHOLE
    assert {point.kind for point in table} == {*damage.KINDS, hostile.FOLDER}
    assert {point.command.split()[0] for point in table} >= {*damage.READ_ONLY, "precompute", "report", "export", "read"} - {"drop"}
    assert "device" not in {point.thing for point in hostile.points(has_devices=False)}


def test_no_strangers_find_nothing(normal):
    assert hostile.chosen(0, 1, has_devices=True) == faced(normal) == []


def test_a_sample_of_strangers_finds_nothing(normal, tmp_path):
    assert faced(normal, *hostile.chosen(24, 3, has_devices=hostile.can_make_devices(tmp_path))) == []


def test_what_is_newer_is_refused_or_passed_over_and_never_repaired(normal):
    """Every kind before `repair`, and before one of those that only look; the whole table has it before every command."""
    kinds = sorted({*damage.KINDS} - hostile.UNVERSIONED)
    commands = [("repair", ("verify", "read")[number % 2]) for number in range(len(kinds))]
    points = [hostile.Point("newer", kind, command) for kind, some in zip(kinds, commands, strict=True) for command in some]
    assert [(point, found) for point, found in judged(points, partial(hostile.judge, normal), each=13) if found] == []


def trusting(arguments):
    """A command that does what a terminal, a program and a fifo tell it."""
    store = Path(arguments.store)
    for path in store.rglob("copy of *"):
        path.unlink()
    if any(path.is_fifo() and path.read_bytes() for path in store.iterdir()):
        raise AssertionError
    for path in store.iterdir():
        print(path.name)
    json.loads((store / "cachestore.json").read_bytes() or "nothing")
    return OK


@pytest.mark.parametrize(
    ("thing", "reported"),
    [
        ("escape", "it printed"),
        ("stranger", "is gone"),
        ("empty", "JSONDecodeError"),
        ("fifo", "Hang"),
    ],
)
def test_a_command_that_trusts_what_it_finds_is_found_out(normal, monkeypatch, thing, reported):
    monkeypatch.setattr("cachestore.cli.stats.run", trusting)
    monkeypatch.setattr(campaign, "HANG_SECONDS", 0.5)
    assert reported in "; ".join(faced(normal, hostile.Point(thing, "marker", "stats")))


# More of each


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_hundred_damages_find_nothing():
    assert damage.play(300, 2).violations == ()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_a_hundred_damages_under_open_readers_find_nothing():
    assert readers.play(100, 2).violations == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_stranger_anywhere_finds_anything():
    assert hostile.play(hostile.WHOLE, 2).violations == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_fuzzed_files_find_nothing():
    assert fuzz.play(10_000, 2).violations == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_long_runs_against_the_model_find_nothing():
    assert model.play(200, 2).violations == ()
