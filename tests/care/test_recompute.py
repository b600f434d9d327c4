"""Repair with refill: what was lost is made again, with the source and the model that it was made with."""

import json
import os
import shutil

import pytest

import cachestore as cs
from cachestore.care import refill
from cachestore.care.collect import drop
from cachestore.cli import ERROR, OK, main
from cachestore.core.errors import BadInput, Incomplete, RecipeMismatch, StoreNotFound
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.store.read.snapshot import list_segments
from tests import fakes
from tests.fakes import asks_for, catalog, flip_entry


@pytest.fixture
def data(tmp_path):
    return fakes.captioned(tmp_path / "data", 4)


@pytest.fixture
def store(tmp_path, data, makers):
    """A store of text and latents, in which each recipe has its own segment."""
    for encode in (("text",), ("latents",)):
        precompute_here(PrecomputeRequest(str(data), "model", str(tmp_path / "store"), encode=encode))
    makers.encoded()
    return tmp_path / "store"


def test_where_there_is_no_store_there_is_nothing_to_repair(tmp_path):
    with pytest.raises(StoreNotFound):
        cs.repair(tmp_path, refill=True)


def test_a_whole_store_stays_as_it_is(store, makers):
    before = list_segments(Layout(store))
    report = cs.repair(store, refill=True)
    assert (report.salvaged, report.quarantined, report.missing, report.refilled) == (0, (), 0, 0)
    assert list_segments(Layout(store)) == before
    assert makers.encoded() == []


def test_a_store_without_data_sets_is_repaired_without_asking_anybody(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store, store.writer() as writer:
        import numpy as np

        writer.put(cs.key("a"), {"x": np.ones(2)})
    assert cs.repair(tmp_path / "store", refill=True).refilled == 0


def test_without_refill_a_lost_entry_is_counted_as_missing(store, makers):
    flip_entry(store, "2.png", "latents")
    report = cs.repair(store)
    assert (report.salvaged, report.missing, report.refilled, len(report.quarantined)) == (3, 1, 0, 1)
    assert makers.made == []


def test_with_refill_exactly_the_lost_entry_is_made_again(store, makers):
    key = flip_entry(store, "2.png", "latents")
    told = []
    report = cs.repair(store, refill=True, on_progress=told.append)
    assert {"done", "total", "doing", "rate", "seconds_left"} <= set(told[-1])
    assert makers.encoded() == [b"picture 2"]
    assert (report.salvaged, report.missing, report.refilled) == (3, 0, 1)
    assert cs.verify(store).ok
    with cs.open(store) as opened:
        assert opened.get(key, as_numpy=True)["value"].tobytes() == bytes(key)


def test_a_refill_that_is_stopped_keeps_what_it_has_encoded_and_the_same_call_goes_on(store, makers):
    for name in ("1.png", "2.png"):
        flip_entry(store, name, "latents")
    makers.options["limit"] = 1

    class AfterOne:
        def is_set(self):
            return bool(makers.made and makers.made[-1].encoded)

    with pytest.raises(Incomplete):
        cs.repair(store, refill=True, cancel=AfterOne())
    assert len(makers.encoded()) == 1
    assert cs.repair(store, refill=True).refilled == 1
    assert cs.verify(store).ok


@pytest.mark.parametrize("encoder", ["text", "latents"])
def test_each_encoder_is_refilled_by_the_request_that_made_it(store, makers, encoder):
    """Text and latents were asked for apart."""
    flip_entry(store, "1.png", encoder)
    assert cs.repair(store, refill=True).refilled == 1
    assert cs.verify(store).ok
    found = catalog(store)
    assert {column.encoder for column in found.columns} == {"text", "latents"}
    assert all(key is not None for column in found.columns for row in range(4) for key in column.row_keys(row))


def test_captions_that_a_policy_made_are_refilled_as_they_were(tmp_path, makers):
    policy = cs.CaptionPolicy(choose="random", dropout=0.1, shuffle_tags=True, variants=3, prefix="sks, ")
    (tmp_path / "m.jsonl").write_text(json.dumps({"id": "x", "caption": ["a, b, c", "d"]}) + "\n")
    root = tmp_path / "of captions"
    cs.precompute(tmp_path / "m.jsonl", model="m", store=root, encode=("text",), captions=policy, inline=True)
    assert sorted(set(makers.encoded())) == sorted({"", *policy.texts(["a, b, c", "d"])})
    before = catalog(root)
    layout = Layout(root)
    for digest in list_segments(layout):
        layout.segment(digest).unlink()
    assert cs.repair(root, refill=True).refilled == 5
    assert (catalog(root).digest, catalog(root).texts) == (before.digest, policy.encoding())
    assert cs.verify(root).ok


def test_a_deleted_segment_is_refilled(store, makers):
    layout = Layout(store)
    for digest in list_segments(layout):
        layout.segment(digest).unlink()
    report = cs.repair(store, refill=True)
    assert (report.missing, report.refilled) == (0, 9)
    assert cs.verify(store).ok


def test_a_dry_run_changes_and_encodes_nothing_and_refilling_twice_makes_it_once(store, makers):
    flip_entry(store, "2.png", "latents")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    report = cs.repair(store, refill=True, dry_run=True)
    assert (report.salvaged, report.dry_run, len(report.quarantined)) == (3, True, 1)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert makers.encoded() == []
    cs.repair(store, refill=True)
    assert cs.repair(store, refill=True).refilled == 0


def test_a_source_that_moved_is_named(store, data, makers, tmp_path):
    flip_entry(store, "2.png", "latents")
    data.rename(tmp_path / "moved")
    for dry_run in (True, False):
        with pytest.raises(BadInput, check=asks_for("source")):
            cs.repair(store, refill=True, dry_run=dry_run)
    assert cs.repair(store, refill=True, source=tmp_path / "moved").refilled == 1
    assert cs.verify(store).ok


def test_a_store_that_moved_is_refilled_where_it_is(store, makers, tmp_path):
    flip_entry(store, "2.png", "latents")
    moved = store.rename(tmp_path / "moved store")
    assert cs.repair(moved, refill=True).refilled == 1
    assert cs.verify(moved).ok
    assert not store.exists()


def test_another_model_is_refused_and_nothing_is_encoded(store, makers):
    flip_entry(store, "2.png", "latents")
    with pytest.raises(RecipeMismatch):
        cs.repair(store, refill=True, model="other")
    assert makers.encoded() == []


def half_mounted(data):
    """Two of four pictures are away; the one to be encoded again is there."""
    for n in (0, 1):
        (data / f"{n}.png").unlink()
        (data / f"{n}.txt").unlink()


def added(data):
    (data / "9.png").write_bytes(b"picture 9")


def edited(data):
    (data / "1.txt").write_text("another caption")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([half_mounted], r"2 samples are no longer listed.*0\.png, 1\.png"),
        ([added], r"1 new sample.*9\.png"),
        ([edited], "1 caption changed"),
        ([half_mounted, added], r"1 new sample.*2 samples are no longer listed"),
        ([shutil.rmtree, lambda data: data.mkdir()], "4 samples are no longer listed"),
    ],
)
def test_a_source_that_lists_something_else_is_refused_and_the_data_set_stays(tmp_path, data, makers, capsys, change, says):
    root = tmp_path / "store"
    precompute_here(PrecomputeRequest(str(data), "model", str(root)))
    makers.encoded()
    flip_entry(root, "2.png", "latents")
    before = (catalog(root).generation, catalog(root).digest)
    for each in change:
        each(data)
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match=f"{says}.*`cachestore precompute`"):
        cs.repair(root, refill=True, dry_run=True)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == files
    with pytest.raises(BadInput, check=asks_for("source")):
        cs.repair(root, refill=True)
    assert main(["repair", str(root), "--refill"]) == ERROR
    assert (catalog(root).generation, catalog(root).digest) == before
    assert makers.encoded() == []
    assert [finding.sample for finding in cs.verify(root).findings] == ["2.png"]


def test_a_dry_run_asks_for_no_source_of_a_data_set_that_lacks_nothing(store, data, makers):
    half_mounted(data)
    assert cs.repair(store, refill=True, dry_run=True).missing == 0


def test_a_source_that_changes_while_refilling_publishes_no_other_data_set(store, data, makers, monkeypatch):
    """The second listing is of the source that is encoded: it is held to the data set too."""
    flip_entry(store, "2.png", "latents")
    plan = refill.plan_request

    def plan_and_add(*arguments, **named):
        found = plan(*arguments, **named)
        added(data)
        return found

    monkeypatch.setattr(refill, "plan_request", plan_and_add)
    before = catalog(store).digest
    with pytest.raises(BadInput, check=asks_for("source")):
        cs.repair(store, refill=True)
    assert catalog(store).digest == before


def test_a_picture_that_changed_since_is_encoded_as_it_is_now_and_the_lost_value_leaves(store, data, makers):
    """The data set never pairs a sample with what its picture was before."""
    flip_entry(store, "2.png", "latents")
    (data / "2.png").write_bytes(b"PICTURE 2")
    os.utime(data / "2.png", (99, 99))
    cs.repair(store, refill=True)
    assert catalog(store).column("latents", "image").row_cells(2)[0].input.hex() == fakes.digest_bytes(b"PICTURE 2")
    assert makers.encoded("latents") == [b"PICTURE 2"]


def test_every_data_set_of_a_store_is_refilled(store, data, makers):
    precompute_here(PrecomputeRequest(str(data), "second model", str(store), encode=("latents",), name="other"))
    layout = Layout(store)
    for digest in list_segments(layout):
        layout.segment(digest).unlink()
    assert cs.repair(store, refill=True).refilled == 13
    assert cs.verify(store).ok


def test_of_many_faults_at_once_only_what_is_truly_damaged_is_encoded_again(tmp_path, makers):
    """Index and catalog deleted, three segments damaged, one cut short, one renamed, and a file that is not ours."""
    root, names = tmp_path / "store", [f"set{n}" for n in range(6)]
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        for n in range(3):
            (folder / f"{n}.png").write_bytes(f"picture {n} of {name}".encode())
            os.utime(folder / f"{n}.png", (n, n))
        precompute_here(PrecomputeRequest(str(folder), "model", str(root), encode=("latents",), name=name))
    makers.encoded()
    layout = Layout(root)
    values = {name: [catalog(root, name).columns[0].keys[row] for row in range(3)] for name in names}
    with cs.open(root) as opened:
        segments = {name: root / opened.describe(keys[0]).segment for name, keys in values.items()}
        assert len(set(segments.values())) == len(names)
        offsets = opened.locate(values["set4"]).offsets
        last, cut = offsets.index(max(offsets)), max(offsets)
    for name in ("set1", "set2", "set3"):
        flip_entry(root, "1.png", "latents", name)
    segments["set4"].chmod(0o644)
    os.truncate(segments["set4"], cut)
    segments["set5"].rename(segments["set5"].with_name("copy of a segment.safetensors"))
    for path in (root / "index").iterdir():
        path.unlink()
    shutil.rmtree(layout.catalog("set0", 0).parent)
    foreign = root / "segments" / "notes.txt"
    foreign.write_text("mine")

    assert not cs.verify(root).ok
    cs.repair(root, refill=True)
    assert cs.verify(root).ok
    assert sorted(makers.encoded()) == sorted([*(f"picture 1 of set{n}".encode() for n in (1, 2, 3)), f"picture {last} of set4".encode()])
    assert foreign.read_text() == "mine"
    for name, keys in values.items():
        with cs.open(root) as opened:
            assert [opened.get(key, as_numpy=True)["value"].tobytes() for key in keys] == keys
        assert list(catalog(root, name).ids) == ["0.png", "1.png", "2.png"]


@pytest.fixture
def several(tmp_path, data, makers):
    """A store of two sources, of which the first has no name, the second one and twice the weight; all latents are lost."""
    (tmp_path / "faces.v1").mkdir()
    (tmp_path / "faces.v1" / "5.png").write_bytes(b"picture 5")
    root = tmp_path / "store of several"
    sources = [cs.Source(data), cs.Source(tmp_path / "faces.v1", name="faces", repeats=2)]
    cs.precompute(sources, model="m", store=root, encode=("latents",), inline=True)
    makers.encoded()
    for digest in list_segments(Layout(root)):
        Layout(root).segment(digest).unlink()
    return root


def test_each_of_several_sources_that_moved_is_found_by_its_name_and_keeps_it(tmp_path, data, several, makers):
    """A folder that is called otherwise now is still the source `data`, which references and the batch name."""
    before = catalog(several).digest
    data.rename(tmp_path / "elsewhere.v2")
    (tmp_path / "faces.v1").rename(tmp_path / "portraits")
    report = cs.repair(several, refill=True, source={"data": tmp_path / "elsewhere.v2", "faces": tmp_path / "portraits"})
    assert (report.missing, report.refilled) == (0, 5)
    assert sorted(makers.encoded()) == [b"picture 0", b"picture 1", b"picture 2", b"picture 3", b"picture 5"]
    assert catalog(several).digest == before
    assert cs.verify(several).ok


def test_a_source_that_did_not_move_is_not_named(tmp_path, several):
    (tmp_path / "faces.v1").rename(tmp_path / "portraits")
    assert main(["repair", str(several), "--refill", "--source", f"faces={tmp_path / 'portraits'}"]) == OK
    assert cs.verify(several).ok


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["elsewhere"], "2 sources (data, faces): pass --source NAME=PATH"),
        (["data=x", "fases=y"], "no data set here was made from a source called 'fases'; sources are data, faces"),
        (["data=x", "y"], "--source 'y' has no name"),
        (["data=x", "data=y"], "several paths for one source"),
        (["data="], "NAME=PATH"),
    ],
)
def test_what_says_of_no_source_where_it_is_is_refused(several, capsys, given, says):
    assert main(["repair", str(several), "--refill", *(f"--source={one}" for one in given)]) == ERROR
    assert says in capsys.readouterr().err


def test_a_path_with_an_equals_sign_that_is_there_is_a_path(tmp_path, store, data, makers):
    data.rename(tmp_path / "a=b")
    flip_entry(store, "2.png", "latents")
    assert main(["repair", str(store), "--refill", "--source", str(tmp_path / "a=b")]) == OK
    assert makers.encoded() == [b"picture 2"]


def damaged(store):
    return flip_entry(store, "2.png", "latents")


def deleted(store):
    """The segment of all latents goes, so that nobody notes what was in it."""
    with cs.open(store) as opened:
        key = catalog(store).column("latents", "image").row_keys(2)[0]
        path = store / opened.describe(key).segment
    path.unlink()
    return key


@pytest.fixture(params=[damaged, deleted])
def unmade(request, store, data):
    """The key of an entry that was lost, and that refilling could not make again, as its picture is none any more."""
    key = request.param(store)
    (data / "2.png").write_bytes(b"undecodable")
    report = cs.repair(store, refill=True)
    assert (report.missing, [finding.kind for finding in report.findings]) == (1, ["missing-entry"])
    return str(key)


class TestWhatCannotBeMadeAgain:
    def test_it_stays_missing_under_its_samples_name(self, store, data, unmade):
        for _time in range(2):
            [finding] = cs.verify(store).findings
            assert (finding.kind, finding.key, finding.sample) == ("missing-entry", unmade, "2.png")
            assert cs.repair(store).missing == cs.repair(store, dry_run=True).missing == 1
            precompute_here(PrecomputeRequest(str(data), "model", str(store)))

    def test_it_is_there_again_once_the_picture_is(self, store, data, unmade):
        (data / "2.png").write_bytes(b"picture 2")
        precompute_here(PrecomputeRequest(str(data), "model", str(store)))
        assert cs.verify(store).findings == ()

    def test_it_is_forgotten_once_the_sample_was_made_of_another_picture(self, store, data, unmade):
        (data / "2.png").write_bytes(b"another picture")
        precompute_here(PrecomputeRequest(str(data), "model", str(store)))
        assert cs.verify(store).findings == ()

    def test_it_is_forgotten_once_the_sample_left_the_data_set(self, store, data, unmade):
        (data / "2.png").unlink()
        (data / "2.txt").unlink()
        precompute_here(PrecomputeRequest(str(data), "model", str(store)))
        assert cs.verify(store).findings == ()

    def test_it_is_forgotten_once_the_data_set_was_dropped(self, store, unmade):
        drop(store, "train")
        assert cs.verify(store).findings == ()


@pytest.mark.parametrize("way", ["gone from the folder", "still in the manifest"])
def test_samples_whose_pictures_are_gone_stay_in_the_data_set_and_are_reported(tmp_path, data, makers, way):
    root, source = tmp_path / "store of one", data
    if way == "still in the manifest":
        source = tmp_path / "m.jsonl"
        source.write_text("".join(json.dumps({"id": f"{n}.png", "image": f"data/{n}.png"}) + "\n" for n in range(4)))
    precompute_here(PrecomputeRequest(str(source), "model", str(root), encode=("latents",)))
    flip_entry(root, "2.png", "latents")
    (data / "2.png").unlink()
    with pytest.raises(BadInput, check=asks_for("source", "2.png")):
        cs.repair(root, refill=True)
    assert list(catalog(root).ids) == [f"{n}.png" for n in range(4)]
    assert {finding.kind for finding in cs.verify(root).findings} == {"missing-entry"}
