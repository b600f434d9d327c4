"""Every command knows data sets that programs published as it knows those of `precompute`: by name, with rows, parts and what made them."""

import json

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import DAMAGE, ERROR, OK, main
from cachestore.store.format.catalog import rows_with_parts
from cachestore.store.read.stats import stats
from cachestore.store.write.folding import make_table
from tests import fakes
from tests.fakes import FakeEncoder, captions

NAMES = ["empty", "files", "table", "train", "train/dino"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store with a data set of each kind, and one that was dropped."""
    root = tmp_path_factory.mktemp("published") / "store"
    fakes.run(root, captions("a", "b"), FakeEncoder())
    keys = [cs.key("published", str(number)) for number in range(3)]
    with cs.open(root, mode="a") as store:
        with store.writer() as writer:
            for number, key in enumerate(keys):
                writer.put(key, {"x": np.full(4, number, np.float32)})
        ids = list(store.dataset("train"))
        store.publish("table", cs.Rows(ids, {"vector": keys[:2]}, {"score": [0.5, 0.25]}))
        with store.session("train/dino") as session:
            session.set(ids[0], dino=keys[2], near=keys[:2])
        session = store.session("train/dino")  # its rows are not in a table
        session.set("only here", dino=keys[0])
        session.flush()
        with store.files("files") as files:
            files.save("a/b", {"x": np.ones(3, np.float32)}, {"size": [1, 2]})
        with store.session("empty"):
            pass
        with store.session("gone") as gone:
            gone.set("x", x=keys[0])
        assert main(["drop", str(root), "gone"]) == OK
    return root


@pytest.fixture
def run(built, capsys):
    def call(command, *arguments, code=OK):
        assert main([command, str(built), *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if "--json" in arguments else out + err

    return call


def test_all_commands_have_the_same_names(built, run):
    assert cs.open(built).names() == NAMES
    assert [one["name"] for one in run("stats", "--json")["catalogs"]] == NAMES
    assert list(dict.fromkeys(one["name"] for one in run("ls", "--samples", "--json")["samples"])) == NAMES[1:]  # one has no sample
    assert list(run("why", "--json", code=DAMAGE)["unused"]) == NAMES
    found = run("status", "--json")
    assert sorted([*found["without_runs"], *(one["name"] for one in found["plans"])]) == NAMES
    assert [one["name"] for one in run("show", "--command", "--json")["data_sets"]] == NAMES
    report = run("report", "--name", "train", "-o", built.parent / "page.html", "--json")
    assert sorted([report["name"], *report["other_names"]]) == NAMES


ON_ONE = (["stats"], ["ls", "--samples"], ["show", "--command"], ["why"], ["status"], ["report"], ["drop", "--dry-run"])


@pytest.mark.parametrize("command", ON_ONE)
def test_a_dropped_one_is_not_there(run, command):
    assert "'gone'" in run(*command, "--name", "gone", code=ERROR)


def test_stats_says_rows_parts_and_what_made_them(run):
    lines = run("stats").splitlines()
    assert "table: 2 rows, 2 of them with all their values (vector), generation 2, published by a program" in lines
    assert "train/dino: 2 rows, 1 of them with all their values (dino, near), generation 3, published by a program" in lines
    assert "files: 1 row, 1 of them with all their values (file), generation 2, saved as files by a program" in lines
    assert "empty: 0 rows, 0 of them with all their values (no part), generation 1, published by a program" in lines
    assert {one["name"]: one["made"] for one in run("stats", "--json")["catalogs"]}["files"] == "files"


def test_ls_lists_rows_with_their_parts_and_columns(run):
    lines = run("ls", "--samples", "--name", "train/dino").splitlines()
    assert [line.split("  ")[2:4] for line in lines] == [["dino, near (2)", "ready"], ["dino", "NOT READY"]]
    [first, _second] = run("ls", "--samples", "--name", "table", "--json")["samples"]
    assert (first["parts"], first["columns"], first["made"]) == ({"vector": 1}, {"score": 0.5}, "published")
    assert len(run("ls", "--name", "train/dino", "--keys").splitlines()) == 3


def test_show_and_why_tell_of_a_row_in_each_data_set(built, run):
    [sample] = [one for one in cs.open(built).dataset("train/dino") if one != "only here"]
    shown = run("show", sample)
    assert all(f"data set {name} (generation" in shown for name in ("train", "train/dino", "table"))
    assert "  score: 0.5" in shown.splitlines()
    told = run("why", sample)
    assert not any(line.strip().endswith("/: present") for line in told.splitlines())
    cells = {cell["encoder"]: cell for one in run("why", sample, "--json")["in"] for cell in one["cells"]}
    assert (cells["dino"]["recipe"], cells["dino"]["input_digest"]) == (None, None)
    assert cells["dino"]["key"] is not None
    assert run("show", "only here", "--json")["in"][0]["made"] == "published"
    assert run("show", "a/b", "--json")["in"][0]["entries"]["file"][0]["meta"]["size"] == [1, 2]


def test_show_tells_of_a_file_what_was_saved_with_it_and_near_ones_below_a_path(run):
    assert "size: [1, 2]" in run("show", "a/b", "--name", "files")
    assert "'a/b'" in run("show", "a", "--name", "files", code=ERROR)
    assert "programs that save files" in run("status")


def test_the_page_of_a_published_data_set_has_no_section_about_pictures_and_runs(built, run):
    page = built.parent / "page.html"
    for name in NAMES:
        run("report", "--name", name, "-o", page)
        text = page.read_text(encoding="utf-8")
        assert ('id="sizes"' in text, 'id="captions"' in text) == (True, name == "train")
        assert "dino of " not in text


def test_what_no_command_made_is_said_to_be_that(run):
    found = {one["name"]: one for one in run("show", "--command", "--json")["data_sets"]}
    assert all("program" in found[name]["notes"][0] for name in NAMES if name != "train")
    assert "program" in run("show", "--command", "--name", "files", code=ERROR)


def test_encoding_again_leaves_out_what_programs_published(run):
    refused = run("verify", "--recompute", "3", "--name", "table", code=ERROR)
    assert "published by a program" in refused


def test_gc_and_compact_and_repair_leave_everything_there(built, run):
    before = {name: dict(rows_of(built, name)) for name in NAMES}
    run("gc")
    run("compact", "--dry-run")
    run("gc", "--apply")
    run("compact")
    run("repair")
    run("verify")
    assert {name: dict(rows_of(built, name)) for name in NAMES} == before


def rows_of(root, name):
    with cs.open(root) as store:
        rows = store.dataset(name)
        for sample in rows:
            yield sample, rows[sample]


def test_a_data_set_of_which_nothing_can_be_read_is_named_by_every_command(tmp_path, capsys):
    with cs.open(tmp_path / "store", mode="a") as store:
        store.publish("own", {})
        for path in store.layout.catalog_folder("own").iterdir():
            path.unlink() if path.suffix == ".changes" else None
        for path in store.layout.catalog_folder("own").iterdir():
            path.chmod(0o600)
            path.write_bytes(b"nonsense")
    for command in (["stats"], ["ls", "--samples"], ["why"]):
        code = main([command[0], str(tmp_path / "store"), *command[1:]])
        assert code == (DAMAGE if command == ["why"] else OK)
        assert "'own' cannot be read" in capsys.readouterr().out
        if command != ["stats"]:
            assert main([command[0], str(tmp_path / "store"), *command[1:], "--name", "own"]) != OK
            assert "'own' cannot be read" in capsys.readouterr().err


def test_an_older_generation_is_not_shown_without_a_word(tmp_path, capsys):
    with cs.open(tmp_path / "store", mode="a") as store:
        session = store.session("own")
        session.put(cs.key("older", "a"), {"x": np.ones(2, np.float32)})
        for sample in "abc":
            session.set(sample, x=cs.key("older", "a"))
            session.flush()
        shown = make_table(store.layout, "own")
        for sample in "de":
            session.set(sample, x=cs.key("older", "a"))
            session.flush()
        store.layout.entry("own", shown + 1).unlink()
    for command in (["stats"], ["ls", "--samples"], ["why"], ["why", "a"], ["show", "a"]):
        main([command[0], str(tmp_path / "store"), *command[1:]])
        assert f"'own' cannot be read as it is now, so generation {shown} is shown" in capsys.readouterr().out


def test_a_row_without_a_key_of_a_part_is_not_ready_and_says_which(built, run):
    told = run("why", "only here", code=DAMAGE)
    assert "no key of the part 'near': set it, or remove this row" in told
    assert "1 of 2 rows is not ready" in run("why", "--name", "train/dino", code=DAMAGE)


@pytest.mark.parametrize("fails", [1, 3])
def test_a_row_that_could_not_be_encoded_is_not_ready_and_says_why(tmp_path, fails, capsys):
    wanted = [(cs.key(name), name) for name in "abc"]

    def encode(batch):
        if any(item in "abc"[:fails] for _key, item in batch):
            raise ValueError("no such layer")
        return {key: {"x": np.zeros(1)} for key, _item in batch}

    with cs.open(tmp_path / "s", mode="a") as store:
        cs.fill(store, wanted, encode, publish_as="own")
        if fails == len(wanted):  # nothing was published: rows without any part
            store.publish("own", {name: {} for name in "abc"})
        catalog = store.dataset("own").catalog
    [counted] = stats(tmp_path / "s").catalogs
    assert (counted.samples, counted.complete) == (3, 3 - fails)
    assert (
        [catalog.is_complete(row) for row in range(3)] == rows_with_parts(catalog).tolist() == [name not in "abc"[:fails] for name in "abc"]
    )
    assert main(["why", str(tmp_path / "s"), "a"]) == DAMAGE
    assert "ValueError: no such layer" in capsys.readouterr().out
