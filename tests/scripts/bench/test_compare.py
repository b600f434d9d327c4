"""The comparison with other stores: what it finds is true on small data, and its tables and plot show what was found."""

import json
import subprocess
from typing import Any
from xml.etree import ElementTree as ET

import environment
import pytest
from bench import compare, compared_page
from bench.compared_ways import WAYS, inspect, raw, sample

from tests.shares import share

SMALL = 32
PLAIN = [name for name, way in WAYS.items() if compare.is_installed(way)]


LOOKED: dict[str, Any] = {"right": 7, "wrong": 0, "missing": 0, "errors": 0, "error": None, "check": None}
ROUND: dict[str, Any] = {"left": LOOKED, "again": {"written": 1}, "after": LOOKED}


def figures(**changed: Any) -> dict[str, Any]:
    """What one way has, made up."""
    epochs = {"0": {"first": 100.0, "next": 100.0}, "2": {"first": 50.0, "next": 400.0}}
    found: dict[str, Any] = {
        "version": "1.0",
        "syncs": False,
        "write": {"written": 8, "seconds": 2.0, "sync_seconds": 0.5},
        "bytes": 10**9,
        "files": 3,
        "read": {"open_ms": 1.0, "get_us": 2.0, "batch_ms": 3.0, "epochs": epochs},
        "flip": LOOKED,
        "kill": {"samples": 8, "rounds": [ROUND]},
    }
    return found | changed


def result(**ways):
    machine = dict.fromkeys(("processor", "processors", "memory_gib", "file_system", "system", "python", "torch", "load_before"), 1)
    return {"machine": machine, "samples": 8, "seconds": 1, "ways": ways}


def test_the_number_of_workers_is_that_of_the_shorter_two_epochs():
    assert compared_page.best_epoch(figures()) == ("0", pytest.approx(100.0))


@pytest.mark.parametrize(
    ("looked", "seen", "check"),
    [
        ({"wrong": 1}, "a wrong value, silently", "none"),
        ({"errors": 1, "error": "BadZipFile: Bad CRC-32"}, "`BadZipFile`", "none"),
        ({"check": ["entry 12 is damaged"]}, "the right value", "finds it"),
        ({"check": []}, "the right value", "finds nothing"),
    ],
)
def test_the_table_of_the_flipped_bit_says_what_a_reader_got(looked, seen, check):
    way = figures(flip=LOOKED | looked)
    assert f"| other | {seen} | {check} |" in compared_page.tables_of(result(other=way))


def test_the_table_of_kills_counts_a_command_that_fails():
    left = LOOKED | {"right": 2, "errors": 1}
    rounds = [{"left": left, "again": {"error": "BadZipFile: it is torn"}, "after": left}, ROUND]
    tables = compared_page.tables_of(result(other=figures(kill={"samples": 8, "rounds": rounds})))
    assert "| other | 2 | 2 to 7 of 8 | 0 to 1 | 1 of 2 fail: `BadZipFile` | 2 to 7 of 8 | 0 to 1 |" in tables


def test_the_plot_is_xml_with_a_bar_for_each_way_and_panel():
    root = ET.fromstring(compared_page.svg_of(result(cachestore=figures(), other=figures())))
    bars = [element.get("class") for element in root.iter() if element.get("class") in {"bar", "ours"}]
    assert bars == ["ours", "bar"] * len(compared_page.PANELS)


def test_a_page_takes_new_tables_between_its_marks_and_keeps_the_rest():
    page = f"before\n{compared_page.BEGIN}\nold\n{compared_page.END}\nafter\n"
    assert (
        compared_page.put_into(page, "new")
        == f"before\n{compared_page.BEGIN}\n\n{compared_page.PLOT}\n\nnew\n\n{compared_page.END}\nafter\n"
    )
    with pytest.raises(ValueError, match="the page has no"):
        compared_page.put_into("a page without marks", "new")


def test_the_page_has_its_marks():
    page = (compare.DOCS / "compared.md").read_text(encoding="utf-8")
    assert compared_page.put_into(page, "x") != page


@pytest.mark.torch
def test_two_samples_share_no_tensor():
    assert len({raw(name, number) for name in ("latents", "prompt_embeds") for number in range(50)}) == 100
    with pytest.raises(ValueError, match="no more than"):
        sample(10**6)


@pytest.mark.torch
@pytest.mark.parametrize("name", share(PLAIN, 2))
def test_a_way_gives_back_what_it_wrote_and_a_flipped_bit_is_an_error_or_a_wrong_value(tmp_path, name):
    way = WAYS[name]
    assert way.write(tmp_path / "samples", SMALL) == SMALL
    assert inspect(way, tmp_path / "samples", SMALL)["right"] == SMALL
    compare.flip(tmp_path / "samples", way.stored(SMALL // 2))
    found = inspect(way, tmp_path / "samples", SMALL)
    assert (found["right"], found["wrong"] + found["errors"], found["missing"]) == (SMALL - 1, 1, 0)
    assert found["check"] is None or found["check"]


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not environment.COMPARED.stamp.exists(), reason="python3 scripts/bench/compare.py makes .venv-peers")
def test_the_whole_comparison_runs_on_few_samples(tmp_path):
    command = ["scripts/bench/compare.py", "--count", "320", "--folder", str(tmp_path), "--json"]
    ended = subprocess.run([environment.COMPARED.python, *command], cwd=environment.ROOT, capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    assert found["ways"].keys() == WAYS.keys()
    ours = found["ways"]["cachestore"]
    assert (ours["flip"]["wrong"], len(ours["flip"]["check"])) == (0, 2)  # the damage, and that no other copy is there
    assert all(one["after"]["right"] == 320 and one["left"]["errors"] == 0 for one in ours["kill"]["rounds"])
