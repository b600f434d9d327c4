"""`relocate`: sources that moved are recorded anew, and nothing else changes."""

import json
import signal

import pytest

import cachestore as cs
from cachestore.care import relocate as module
from cachestore.care.relocate import relocate
from cachestore.care.verify import verify
from cachestore.cli import main
from cachestore.core.errors import BadInput, FormatError, StoreNotFound, WriteFailed
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.store.format.catalog import list_generations
from cachestore.store.write.catalog_writer import publish_draft
from tests import fakes
from tests.fakes import asks_for, catalog


def precompute(data, root, name="train", **options):
    return precompute_here(PrecomputeRequest(str(data), "model", str(root), name=name, **options))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "disk").mkdir()
    return fakes.captioned(tmp_path / "disk" / "pictures", 3)


@pytest.fixture
def store(root, data, makers):
    precompute(data, root)
    return root


@pytest.fixture
def moved(store, data, tmp_path):
    return data.rename(tmp_path / "pics")


def add_one(folder):
    (folder / "3.png").write_bytes(b"picture 3")


def paths(root, name="train"):
    return {hints["data"] for hints in catalog(root, name).request.values()}


def test_a_moved_source_is_recorded_in_a_next_generation_of_the_same_digest(store, data, moved):
    before = catalog(store)
    report = relocate(store, {data: moved})
    after = catalog(store)
    assert (report.generations, report.paths) == ({"train": before.generation + 1}, {str(data): str(moved)})
    assert (after.generation, after.digest, list(after.ids)) == (before.generation + 1, before.digest, list(before.ids))
    assert after.listing == before.listing
    assert paths(store) == {str(moved)}
    assert {hints["model"] for hints in after.request.values()} == {"model"}
    assert verify(store).ok


def test_relocating_again_changes_nothing(store, data, moved):
    relocate(store, {data: moved})
    again = relocate(store, {data: moved})
    assert (again.generations, again.paths) == ({}, {})
    assert list_generations(Layout(store), "train") == [1, 2]


def test_a_lost_entry_is_refilled_from_the_new_path_without_being_told(store, data, moved):
    fakes.flip_entry(store, "1.png", "latents")
    relocate(store, {data: moved})
    report = cs.repair(store, refill=True)
    assert (report.missing, report.refilled) == (0, 1)
    assert verify(store).ok


def test_a_precompute_after_it_makes_no_generation(store, data, moved):
    relocate(store, {data: moved})
    assert precompute(moved, store).generation == 2


def test_a_folder_above_moves_every_source_below_it(store, data, tmp_path):
    other = fakes.captioned(tmp_path / "disk" / "other", 2)
    precompute(other, store, "other")
    new = (tmp_path / "disk").rename(tmp_path / "new")
    report = relocate(store, {tmp_path / "disk": new})
    assert report.generations == {"other": 2, "train": 2}
    assert (paths(store), paths(store, "other")) == ({str(new / "pictures")}, {str(new / "other")})


def test_only_the_named_data_set_is_moved(store, data, tmp_path):
    precompute(data, store, "other")
    moved = data.rename(tmp_path / "pics")
    assert relocate(store, {data: moved}, name="other").generations == {"other": 2}
    assert paths(store) == {str(data)}


def test_one_of_several_sources_is_moved_and_keeps_its_label(root, data, tmp_path, makers):
    other = fakes.captioned(tmp_path / "other", 2)
    sources = (cs.Source(str(data), name="a"), cs.Source(str(other), name="b"))
    precompute("", root, sources=sources)
    moved = data.rename(tmp_path / "pics")
    before = catalog(root)
    relocate(root, {data: moved})
    after = catalog(root)
    assert after.digest == before.digest
    for hints in after.request.values():
        assert [(source["data"], source["name"]) for source in hints["sources"]] == [(str(moved), "a"), (str(other), "b")]


def test_a_path_that_no_data_set_was_made_from_is_refused_with_those_that_are(store, data, tmp_path):
    with pytest.raises(BadInput, check=asks_for("source", f"{data}s", f"'{data}'")):
        relocate(store, {f"{data}s": tmp_path / "pics"})


def test_a_new_path_at_which_nothing_is_or_something_else_is_refused(store, data, tmp_path):
    with pytest.raises(BadInput, check=asks_for("source")):
        relocate(store, {data: tmp_path / "nowhere"})
    with pytest.raises(BadInput, check=asks_for("source")):
        relocate(store, {data: tmp_path})
    assert list_generations(Layout(store), "train") == [1]


def test_a_data_set_that_is_misspelt_is_refused_with_the_one_that_was_meant(store, data, moved):
    with pytest.raises(BadInput, check=asks_for("name")):
        relocate(store, {data: moved}, name="trian")


def test_where_there_is_no_store_it_is_reported(tmp_path):
    with pytest.raises(StoreNotFound):
        relocate(tmp_path, {"a": "b"})


def test_a_damaged_or_lost_newest_catalog_stops_it_and_no_older_one_takes_its_number(store, data, moved):
    relocate(store, {data: moved})
    add_one(moved)
    precompute(moved, store)
    newest = Layout(store).catalog("train", 3)
    newest.chmod(0o644)
    raw = newest.read_bytes()
    newest.write_bytes(raw[:-1])
    with pytest.raises(FormatError):
        relocate(store, {moved: data.parent})
    newest.unlink()
    with pytest.raises(FormatError):
        relocate(store, {moved: data.parent})
    assert list_generations(Layout(store), "train") == [1, 2]


def test_a_generation_that_is_published_meanwhile_is_the_one_that_is_moved(store, data, moved, monkeypatch):
    def late(layout, draft, *, after):
        monkeypatch.setattr(module, "publish_draft", publish_draft)
        add_one(moved)
        precompute(moved, store, replace=True)  # generation 2, of four samples
        return publish_draft(layout, draft, after=after)

    monkeypatch.setattr(module, "publish_draft", late)
    assert relocate(store, {data: moved}).generations == {"train": 2}
    assert len(catalog(store)) == 4
    assert paths(store) == {str(moved)}


def test_a_write_that_fails_leaves_the_old_generation(store, data, moved, monkeypatch):
    def refuse(*_arguments, **_options):
        raise WriteFailed("the disk is full")

    monkeypatch.setattr(module, "publish_draft", refuse)
    with pytest.raises(WriteFailed):
        relocate(store, {data: moved})
    assert list_generations(Layout(store), "train") == [1]


@pytest.mark.processes
@pytest.mark.parametrize("point", ["catalog.before_publish", "publish.before_fsync", "catalog.after_publish"])
def test_after_dying_the_store_is_sound_and_the_same_command_goes_on(store, data, moved, point):
    before = catalog(store)
    died = fakes.command("relocate", str(store), "--source", f"{data}={moved}", CACHESTORE_FAILPOINT=f"{point}:1")
    died.communicate(timeout=50)
    assert died.returncode == -signal.SIGKILL
    assert (catalog(store).digest, verify(store).ok) == (before.digest, True)
    relocate(store, {data: moved})
    assert (catalog(store).generation, catalog(store).digest, paths(store)) == (2, before.digest, {str(moved)})


def test_the_command_prints_what_it_recorded(store, data, moved, capsys):
    assert main(["relocate", str(store), "--source", f"{data}={moved}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"generations": {"train": 2}, "paths": {str(data): str(moved)}}
    assert main(["relocate", str(store), "--source", f"{data}={moved}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nothing to do")
    assert str(data) in out
    assert str(moved) in out


def test_the_command_takes_paths_that_contain_an_equals_sign(store, data, tmp_path, capsys):
    moved = data.rename(tmp_path / "day=1")
    assert main(["relocate", str(store), "--source", f"{data}={moved}"]) == 0
    assert paths(store) == {str(moved)}


@pytest.mark.parametrize("given", ["", "=", "a", "a=", "=b"])
def test_a_move_without_two_paths_is_a_usage_error(store, given):
    with pytest.raises(SystemExit) as ended:
        main(["relocate", str(store), f"--source={given}"])
    assert ended.value.code == 2
