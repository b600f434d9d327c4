"""`cs.exported`: paths, pickling and errors. That its values are those that an export writes, each test of an export asks (caches.send)."""

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest

import cachestore as cs
from cachestore.core.errors import BadInput, CacheStoreError, CorruptEntry, EncodeFailed, MissingEntry
from tests.fakes import asks_for
from tests.trainers import trainers
from tests.trainers.ai_toolkit.files import write_ai_toolkit
from tests.trainers.caches import bits, bring, check_written, of_mapping
from tests.trainers.sd_scripts.files import write_sd_scripts
from tests.trainers.trainers import PICTURES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]

TEXT = "a/one_flux_te.npz"
FORMATS = ("sd-scripts", "simpletuner", "musubi", "ai-toolkit", "nemo-automodel")


@pytest.fixture
def flux(data, store):
    write_sd_scripts(data, "flux", is_flipped=False)
    bring("sd-scripts", data, store, data)
    return store


@pytest.mark.parametrize("kind", FORMATS)
def test_a_data_set_gives_what_the_export_of_its_store_writes(flux, out, kind):
    report = cs.export_cache(flux, format=kind, folder=out)
    check_written(cs.exported(cs.CachedDataset(flux), kind), out, report)
    check_written(cs.exported(flux, kind, name="train", generation=1), out, report)


def test_nothing_is_written_and_no_entry_is_read_before_a_file_is_asked_for(data, flux, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in (*flux.rglob("*"), *data.rglob("*"))}
    with cs.open(flux) as reader:
        files = cs.exported(reader, "sd-scripts")
        keys: list[object] = []
        own = reader.get_raw
        monkeypatch.setattr(reader, "get_raw", lambda asked: [keys.extend(asked), own(asked)][1])
        assert (len(files), TEXT in files, len(list(files)), keys) == (6, True, 6, [])
        assert len(files[TEXT]) == 5
        assert len(keys) == 1
    assert {path: path.stat().st_mtime_ns for path in (*flux.rglob("*"), *data.rglob("*"))} == before


def test_a_path_is_found_as_text_and_path_relative_and_beside_its_picture(data, flux, out, monkeypatch):
    monkeypatch.chdir(out.parent)
    files = cs.exported(flux, "sd-scripts")
    wanted = {name: bits(value) for name, value in files[TEXT].items()}
    for path in (Path(TEXT), data / TEXT, str(data / "a" / ".." / TEXT), f"./{TEXT}"):
        assert path in files
        assert {name: bits(value) for name, value in files[path].items()} == wanted
    elsewhere = cs.exported(flux, "sd-scripts", folder="cache")
    assert out.parent / "cache" / TEXT in elsewhere
    assert data / TEXT not in elsewhere
    assert 3 not in files
    assert files.get("nothing.npz") is None
    assert files.get("nothing.npz", 1) == 1


def test_a_picture_is_found_in_the_folder_of_its_own_source(tmp_path, store):
    from tests.trainers.test_exporting_variants import Wanted, make_store

    make_store(store, Wanted(sources=("one", "two")))
    files = cs.exported(store, "sd-scripts")
    roots = [root for root, _tree in files._roots]
    assert {path.split("/")[0] for path in files} == {"one", "two"}
    for root, label in ((root, root.name) for root in roots):
        own = next(path for path in files if path.startswith(f"{label}/"))
        assert root / own.removeprefix(f"{label}/") in files


def test_the_values_are_the_callers_own(flux):
    files = cs.exported(flux, "sd-scripts")
    first = files[TEXT]
    before = bits(first["t5_attn_mask"])
    for value in first.values():
        value[...] = 0
    assert bits(files[TEXT]["t5_attn_mask"]) == before
    assert not any(one is other for one in files[TEXT].values() for other in files[TEXT].values() if one is not other)


@pytest.mark.parametrize("kind", ["sd-scripts", "ai-toolkit"])
def test_a_pickled_one_reads_the_generation_that_it_was_made_of(data, flux, kind):
    files = cs.exported(flux, kind)
    path = next(iter(files))
    wanted = of_mapping(files, path)
    (data / "two.txt").write_text("another caption")
    bring("sd-scripts", data, flux, data)
    again = pickle.loads(pickle.dumps(files))
    assert (again.generation, [*again], of_mapping(again, path)) == (1, [*files], wanted)
    assert repr(again) == repr(files)


def _read(files, path, answers):
    answers.put(of_mapping(files, path))


def test_a_forked_process_reads_the_same(flux):
    files = cs.exported(flux, "sd-scripts")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_read, args=(files, TEXT, answers))
    process.start()
    assert answers.get() == of_mapping(files, TEXT)
    process.join(30)
    assert process.exitcode == 0


def test_a_part_of_a_data_set_has_the_files_of_its_samples(flux):
    files = cs.exported(cs.CachedDataset(flux).select(["two.png"]), "sd-scripts")
    assert sorted(files) == ["two_0064x0064_flux.npz", "two_flux_te.npz"]


def test_a_store_at_an_address_is_read_too(flux, tmp_path):
    files = cs.exported(cs.CachedDataset(f"file://{flux}", local=tmp_path / "local"), "sd-scripts")
    there = cs.exported(flux, "sd-scripts")
    assert {path: of_mapping(files, path) for path in files} == {path: of_mapping(there, path) for path in there}


def test_captions_buckets_and_metadata_are_told_by_path(flux):
    files = cs.exported(flux, "musubi")
    assert files.caption("one_fk_te.safetensors") == PICTURES[0].caption
    assert files.metadata("one_fk_te.safetensors")["caption1"] == PICTURES[0].caption
    assert cs.exported(flux, "sd-scripts").buckets("two_0064x0064_flux.npz") == {(64, 64)}
    assert cs.exported(flux, "sd-scripts").metadata(TEXT) == {}
    assert cs.exported(flux, "nemo-automodel").metadata(next(iter(cs.exported(flux, "nemo-automodel"))))["model_type"] == "flux"


def test_a_file_that_is_not_there_is_named_with_what_to_run(flux):
    files = cs.exported(flux, "sd-scripts")
    with pytest.raises(MissingEntry, match=r"two_flux_te\.npz'.*--again --store"):
        files["two_flux_tee.npz"]
    with pytest.raises(MissingEntry, match="cachestore relocate"):
        files["/elsewhere/two_flux_te.npz"]
    with pytest.raises(MissingEntry):
        files.metadata("nothing.npz")


def test_a_path_of_two_samples_is_nobodys(data, store):
    write_ai_toolkit(data, "flux")
    pictures = [trainers.Picture("b/two.png", "another", (64, 64), (8, 8))]
    (data / "b").mkdir()
    trainers.make_source(data, pictures)
    write_ai_toolkit(data, "flux", pictures)
    bring("ai-toolkit", data, store, data)
    files = cs.exported(store, "musubi")
    assert {one["sample"] for one in files.failures} == {"two.png"}
    assert "two_fk_te.safetensors" not in files
    with pytest.raises(EncodeFailed, match="rename one"):
        files["two_fk_te.safetensors"]


def test_a_file_that_cannot_be_made_is_named(flux):
    files = cs.exported(flux, "musubi")
    path = "two_0064x0064_fk.safetensors"
    with pytest.raises(EncodeFailed, match=f"{path}, as musubi would have it: .*`control`"):
        files[path]


def test_a_damaged_entry_is_never_returned(flux):
    for path in (flux / "segments").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-70_000:] = bytes(70_000)
        path.chmod(0o644)
        path.write_bytes(data)
    with pytest.raises(CorruptEntry):
        [cs.exported(flux, "sd-scripts")[path] for path in cs.exported(flux, "sd-scripts")]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"format": "kohya"}, "format"),
        ({"format": "webdataset"}, "format"),
        ({"format": "diffusion-pipe"}, "format"),
        ({"name": "trian"}, "name"),
        ({"generation": 7}, "generation"),
        ({"family": "fluxx"}, "family"),
        ({"family": "sd3"}, "family"),
        ({"leave_out": ["text"]}, "leave_out"),
        ({"resolution_only": 512}, "resolution_only"),
        ({"folder": 3}, "folder"),
    ],
)
def test_a_wrong_argument_is_named(flux, arguments: Any, named):
    every: dict[str, Any] = {"format": "sd-scripts", **arguments}
    with pytest.raises(BadInput, check=asks_for(named)):
        cs.exported(flux, **every)


def test_a_data_set_knows_its_name_and_generation(flux):
    of: Any = cs.exported
    for more in ({"name": "train"}, {"generation": 1}):
        with pytest.raises(BadInput, check=asks_for(next(iter(more)))):
            of(cs.CachedDataset(flux), "sd-scripts", **more)
    with pytest.raises(BadInput, check=asks_for("data")):
        of(3, "sd-scripts")


def test_a_data_set_that_a_program_published_has_no_files(tmp_path):
    with cs.open(tmp_path / "store", mode="a") as store:
        store.put(cs.key("a"), {"x": trainers.noise("a", shape=(2,))})
        store.publish("own", {"a": {"dino": cs.key("a")}})
    with pytest.raises(CacheStoreError, match="a program published it"):
        cs.exported(tmp_path / "store", "sd-scripts", name="own")


def test_the_list_holds_json_that_an_export_notes(flux, out):
    """The paths of an export's note, but for the trainer's own lists."""
    cs.export_cache(flux, format="simpletuner", folder=out)
    noted = json.loads((out / ".cachestore-export.json").read_text())["files"]
    assert {path for path in noted if not path.endswith(".json")} == {*cs.exported(flux, "simpletuner")}
