"""Cache files by path, as safetensors and os give them, in a store."""

import os

import pytest
import torch

from cachestore import live
from cachestore.live import arming, run

TENSORS = {
    "bf16": torch.arange(6.0).view(2, 3).bfloat16(),
    "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "number": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def armed(monkeypatch, tmp_path):
    monkeypatch.setattr(arming, "_armed", [(arming.Setting("none", str(tmp_path / "store"), "trainer/files"), live.Adapter("none"))])
    monkeypatch.setattr(run, "_runs", [])
    monkeypatch.setattr("sys.addaudithook", lambda hook: None)


@pytest.fixture
def files(armed, tmp_path):
    made = files_in(tmp_path / "cache")
    yield made
    made.close()


def files_in(folder, self_test=lambda folder: None):
    return live.NamedFiles(
        live.Adapter("none"),
        holds=lambda one: one == str(folder),
        part=lambda _folder, name: "text" if "_te." in name else None if name.startswith("lora") else "latents",
        self_test=self_test,
    )


def test_tensors_and_texts_come_back_to_the_bit(files, tmp_path):
    path = tmp_path / "cache" / "a.safetensors"
    files.save_file(TENSORS, path, metadata={"caption": "ein Bär"})
    read = files.load_file(str(path))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in read.items()} == {n: (t.dtype, t.shape) for n, t in TENSORS.items()}
    assert all(bits(read[name]) == bits(tensor) for name, tensor in TENSORS.items())
    with files.safe_open(path, framework="pt", device="cpu") as opened:
        assert opened.metadata() == {"caption": "ein Bär"}
        assert opened.keys() == sorted(TENSORS)
        assert torch.equal(opened.get_tensor("bf16"), TENSORS["bf16"])
        assert opened.get_tensor("bf16", dtype=torch.float32).dtype == torch.float32


def test_a_loaded_tensor_belongs_to_the_trainer(files, tmp_path):
    path = tmp_path / "cache" / "a.safetensors"
    files.save_file(TENSORS, path)
    files.load_file(path)["bf16"].add_(1)
    assert torch.equal(files.load_file(path)["bf16"], TENSORS["bf16"])


def test_a_file_without_texts_has_none_and_a_missing_file_is_not_found(files, tmp_path):
    path = tmp_path / "cache" / "a.safetensors"
    files.save_file({"one": torch.zeros(1)}, path)
    assert files.safe_open(path).metadata() is None
    files.remove(path)
    for ask in (files.load_file, files.safe_open, files.remove, files.keys, files.metadata):
        with pytest.raises(FileNotFoundError):
            ask(path)


def test_only_paths_of_cache_files_are_its_own(files, tmp_path):
    there = tmp_path / "cache"
    own = [there / "a.safetensors", f"{there}/x/../a.safetensors"]
    others = [there / "lora.safetensors", there / "a.png", tmp_path / "a.safetensors", 3, b"a.safetensors", None]
    assert [files.owns(path) for path in own] == [True, True]
    assert [files.owns(path) for path in others] == [False] * 6


def test_patterns_match_names_in_one_folder_sorted(files, tmp_path):
    there = tmp_path / "cache"
    for name in ("b_wan", "a_wan", "c_te"):
        files.save_file({"one": torch.zeros(1)}, there / f"{name}.safetensors")
    assert files.glob(f"{there}/*_wan.safetensors") == [f"{there}/a_wan.safetensors", f"{there}/b_wan.safetensors"]
    assert files.glob(f"{tmp_path}/*.safetensors") == []


def test_a_relative_path_is_that_of_the_working_folder(files, tmp_path, monkeypatch):
    files.save_file({"one": torch.zeros(1)}, tmp_path / "cache" / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    assert files.owns("cache/a.safetensors")
    assert files.exists("cache/a.safetensors")
    assert files.glob("cache/*.safetensors") == ["cache/a.safetensors"]


def test_each_file_is_counted_once_by_what_became_of_it(files, tmp_path):
    old, new, gone = (tmp_path / "cache" / f"{name}.safetensors" for name in ("old", "new_te", "gone"))
    files.save_file({"one": torch.zeros(1)}, old)
    files._counted.clear()
    run.current().counts.clear()
    assert [files.exists(path) for path in (old, old, new, gone)] == [True, True, False, False]
    for path in (new, new, gone):
        files.save_file({"one": torch.ones(1)}, path)
        files.load_file(path)
    files.remove(gone)
    assert run.current().counts == {"latents": [1, 0], "text": [0, 1]}
    files.save_file({"one": torch.ones(1)}, old)
    assert run.current().counts == {"latents": [0, 1], "text": [0, 1]}


def test_the_self_test_runs_once_in_a_store_of_its_own(armed, tmp_path):
    calls = []

    def self_test(folder):
        calls.append((folder, run.current().setting.store))
        files.save_file({"one": torch.zeros(1)}, f"{folder}/a.safetensors")

    files = files_in(tmp_path / "cache", self_test)
    assert not files.exists(tmp_path / "cache" / "a.safetensors")
    files.save_file({"one": torch.zeros(1)}, tmp_path / "cache" / "a.safetensors")
    ((folder, store),) = calls
    assert store != run.current().setting.store
    assert not os.path.exists(folder)
    assert not os.path.exists(store)
    assert run.current().store.files("trainer/files").glob() == [str(tmp_path / "cache" / "a.safetensors")]
    files.close()


@pytest.mark.parametrize("fault", ["error", "file", "difference"])
def test_a_self_test_that_fails_ends_the_run_and_makes_no_store(armed, tmp_path, fault):
    def self_test(folder):
        if fault == "error":
            raise AttributeError("no such thing")
        if fault == "difference":
            live.check_same("load_file", [1], [2])
        with open(f"{folder}/a.safetensors", "w") as file:
            file.write("past the adapter")

    with pytest.raises(live.Refused) as refused:
        files_in(tmp_path / "cache", self_test).exists(tmp_path / "cache" / "a.safetensors")
    assert refused.value.code == 2
    assert not (tmp_path / "store").exists()


class Exported:
    """What a run that reads a data set of `precompute` has in place of files of the store."""

    def __init__(self, path):
        self.path = path

    def exists(self, path):
        return path == self.path

    def load(self, _path):
        return {"latents": torch.ones(2)}

    def save(self, path, *_tensors):
        raise live.Refused(f"{path}: this run only reads")

    remove = save

    def glob(self, _pattern):
        return [self.path]

    def close(self):
        pass


def test_a_run_that_reads_a_data_set_of_precompute_finds_its_files_and_changes_none(files, tmp_path):
    path = str(tmp_path / "cache" / "a_latents.safetensors")
    vars(live.current())["exported"] = Exported(path)
    assert files.exists(path)
    assert not files.exists(path.replace("a_", "b_"))
    assert files.load_file(path)["latents"].tolist() == [1, 1]
    assert files.glob(str(tmp_path / "cache" / "*.safetensors")) == [path]
    for change in (lambda: files.save_file({"latents": torch.zeros(2)}, path), lambda: files.remove(path)):
        with pytest.raises(live.Refused):
            change()
    assert live.current().counts == {"latents": [1, 0]}
    assert not (tmp_path / "store").exists()
