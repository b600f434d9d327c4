"""A trainer's cache files over a data set that `precompute` made: by the trainer's paths, and never written."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import cachestore as cs
from cachestore import live
from cachestore.core.errors import BadInput
from cachestore.live.arming import Setting
from cachestore.live.front import main
from cachestore.live.read_only import ReadOnlyFiles
from cachestore.live.run import Run
from tests.trainers import trainers
from tests.trainers.caches import bits, bring
from tests.trainers.sd_scripts.files import write_sd_scripts
from tests.trainers.test_exporting_variants import Wanted, make_store
from tests.trainers.trainers import PICTURES

pytestmark = [pytest.mark.torch]

TEXT = "a/one_flux_te.npz"


@pytest.fixture
def data(tmp_path):
    return trainers.make_source(tmp_path / "data")


@pytest.fixture
def store(tmp_path, data):
    write_sd_scripts(data, "flux", is_flipped=False)
    bring("sd-scripts", data, tmp_path / "store", data)
    return str(tmp_path / "store")


def all_bits(arrays):
    return {name: bits(value) for name, value in arrays.items()}


def test_files_are_found_beside_their_pictures_by_every_spelling_of_the_path(tmp_path, data, store, monkeypatch):
    for path in data.rglob("*.npz"):
        path.unlink()
    (tmp_path / "link").symlink_to(data)
    monkeypatch.chdir(data)
    files = ReadOnlyFiles("sd-scripts", store, "train")
    wanted = all_bits(cs.exported(store, "sd-scripts")[TEXT])
    for path in (data / TEXT, TEXT, f"./{TEXT}", tmp_path / "link" / TEXT, f"{data}//a/../{TEXT}"):
        assert files.exists(path), path
        assert all_bits(files.load(path)) == wanted
    assert files.caption(TEXT) == PICTURES[0].caption
    assert files.buckets(data / "two_0064x0064_flux.npz") == {(64, 64)}
    assert files.keys(TEXT) == sorted(wanted)
    assert files.metadata(TEXT) == {}
    assert files.glob(str(data / "a" / "*_te.npz")) == [str(data / "a" / f"{name}_flux_te.npz") for name in ("one", "three.v2")]
    monkeypatch.chdir(data / "a")
    assert not files.exists("two_flux_te.npz"), "another folder's file of that name"
    assert not files.exists(tmp_path / "elsewhere" / TEXT)


def test_files_of_a_cache_folder_are_found_by_their_names_in_one_folder(tmp_path, store, capsys):
    files = ReadOnlyFiles("musubi", store, "train")
    cache = tmp_path / "cache [1]"
    name = "one_fk_te.safetensors"
    assert files.exists(cache / name)
    assert all_bits(files.load(cache / name)) == all_bits(cs.exported(store, "musubi")[name])
    listed = [str(cache / f"{one}_fk_te.safetensors") for one in ("one", "three.v2", "two")]
    assert files.glob(f"{cache}/*_fk_te.safetensors") == listed
    assert files.glob(f"{str(cache).replace('[', '[[]')}/*_fk_te.safetensors") == listed
    assert files.glob(f"{cache}/*_wan.safetensors") == []
    assert not files.exists(cache / "no_fk_te.safetensors")
    with pytest.raises(live.Refused):
        files.exists(tmp_path / "another" / name)
    assert str(tmp_path / "another") in capsys.readouterr().err


def test_each_of_several_resolutions_has_the_folder_of_that_name(tmp_path):
    make_store(tmp_path / "store", Wanted(options={"buckets": "musubi"}, controls=1))
    files = ReadOnlyFiles("musubi", str(tmp_path / "store"), "train")
    cache = tmp_path / "cache"
    small, large = (files.glob(f"{cache}/{resolution}/*_fk.safetensors") for resolution in (256, 512))
    assert [Path(path).name for path in small] == [Path(path).name for path in large] != []
    assert all_bits(files.load(small[0])) != all_bits(files.load(large[0]))
    assert files.glob(f"{cache}/*_fk.safetensors") == []
    assert not files.exists(cache / Path(small[0]).name)


def test_what_would_encode_or_write_is_refused_by_name_with_what_to_run(data, store, capsys):
    files = ReadOnlyFiles("sd-scripts", store, "train")
    for call in (lambda: files.save(data / "new_flux_te.npz", {}), lambda: files.remove(data / TEXT), lambda: files.load(data / "new.npz")):
        with pytest.raises(live.Refused) as caught:
            call()
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert "cachestore precompute --again --store" in said
        assert str(data) in said or "new.npz" in said


def test_a_data_set_for_other_buckets_is_refused(tmp_path):
    make_store(tmp_path / "store", Wanted(resolutions=(512,), masks=False))
    with pytest.raises(BadInput, match="--buckets sd-scripts"):
        ReadOnlyFiles("sd-scripts", str(tmp_path / "store"), "train")


def test_what_has_no_file_is_told(tmp_path, data, store):
    (data / "b").mkdir()
    trainers.make_source(data, pictures := [trainers.Picture("b/two.png", "another", (64, 64), (8, 8))])
    write_sd_scripts(data, "flux", pictures, is_flipped=False)
    bring("sd-scripts", data, store, data)
    assert "two.png" in ReadOnlyFiles("musubi", store, "train").lacking
    assert ReadOnlyFiles("musubi", store, "train", 1).lacking == "", "as it was before"


def test_a_run_that_reads_opens_its_store_for_nothing_else(store, monkeypatch, capsys):
    trainer = ModuleType("a_trainer")
    trainer.adapter = live.Adapter("sd-scripts", reads_exports=True)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "a_trainer", trainer)
    before = sorted(Path(store).rglob("*"))
    run = Run(Setting("a_trainer", store, "mine", "train", 1))
    assert run.exported is not None
    assert len(run.exported.keys(os.path.join(store, "..", "data", TEXT))) == 5
    with pytest.raises(live.Refused):
        run.store  # noqa: B018 - asking is refused
    assert "cachestore precompute --again" in capsys.readouterr().err
    assert "'train', which was only read" in run.last_line()
    assert Run(Setting("a_trainer", store, "mine")).exported is None
    assert sorted(Path(store).rglob("*")) == before


@pytest.mark.parametrize(("store_name", "name"), [("store", "trian"), ("nowhere", "train")])
def test_a_data_set_that_is_not_there_ends_with_2_before_the_script(tmp_path, store, monkeypatch, capsys, store_name, name):
    trainer = ModuleType("a_trainer")
    trainer.adapter = live.Adapter("sd-scripts", reads_exports=True)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "a_trainer", trainer)
    with pytest.raises(SystemExit) as ended:
        main(["a_trainer", "--store", str(tmp_path / store_name), "--read", name, __file__])
    assert ended.value.code == 2
    assert (f"no data set {name!r}" if store_name == "store" else "there is no store") in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_a_forked_child_reads_what_its_parent_listed(data, store, monkeypatch):
    from cachestore.live import run as of_run

    trainer = ModuleType("a_trainer")
    trainer.adapter = live.Adapter("sd-scripts", reads_exports=True)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "a_trainer", trainer)
    monkeypatch.setattr(of_run, "armed", lambda: Setting("a_trainer", store, "mine", "train", 1))
    monkeypatch.setattr(of_run, "_runs", [])
    own = of_run.current()
    listed = own.exported
    own.pid = -1  # as it is in a child
    assert of_run.current() is not own
    assert of_run.current().exported is listed
    assert listed is not None
    assert listed.exists(data / TEXT)


def test_an_adapter_that_reads_no_such_data_set_refuses_it_before_the_script(store, monkeypatch):
    trainer = ModuleType("a_trainer")
    trainer.adapter = live.Adapter("simpletuner")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "a_trainer", trainer)
    with pytest.raises(SystemExit) as ended:
        main(["a_trainer", "--store", str(store), "--read", "train", __file__])
    assert ended.value.code == 2
