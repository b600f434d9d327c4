"""diffusion-pipe's cache in a store: against a stand-in that has its functions at the plug points, with bodies of our own."""

# The trainer's modules are a stand-in.
# pyright: basic, reportMissingImports=false
import pickle

import pytest
import torch

import cachestore as cs
from cachestore import live
from tests.trainers.live_stand_ins import armed_here

CACHE = """
class Cache:
    def __init__(self, path, fingerprint, shard_size_gb=1):
        raise AssertionError("its own cache")
"""
DATASET = """
import torch
from utils.cache import Cache

def _map_and_cache(dataset, map_fn, cache_dir, cache_file_prefix=""):
    return Cache(cache_dir / cache_file_prefix.strip("_"), dataset._fingerprint, shard_size_gb=10)

class TextEmbeddingDataset:
    def __init__(self, te_dataset, flattened_captions):
        self.te_dataset = te_dataset

class SizeBucketDataset:
    def __getitem__(self, idx):
        entry = self.iteration_order[idx]
        ret = self.latent_dataset[entry["latents_idx"]]
        return ret | self.text_embedding_datasets[0].te_dataset[0]

class DatasetManager:
    def cache(self, unload_models=True):
        return unload_models

class Dataset:
    def _collate(self, examples):
        return {name: [one[name] for one in examples] for name in examples[0]} | {
            name: torch.stack([one[name] for one in examples]) for name, value in examples[0].items() if torch.is_tensor(value)
        }
"""
SOURCES = {"utils/cache.py": CACHE, "utils/dataset.py": DATASET}


def armed(monkeypatch, tmp_path, old="", new=""):
    sources = {name: text.replace(old, new) for name, text in SOURCES.items()}
    return armed_here(monkeypatch, tmp_path, "cachestore.trainers.diffusion_pipe.live", sources)


def cache_of(tmp_path, fingerprint="one"):
    from utils import dataset

    return dataset.Cache(tmp_path / "cache_1x1" / "latents", fingerprint)


def items(count):
    return [{"latents": torch.full((2, 3), number), "spec": (None, f"{number}.png"), "sizes": [1, (0.1, True)]} for number in range(count)]


def filled(tmp_path, several, fingerprint="one"):
    cache = cache_of(tmp_path, fingerprint)
    for item in several:
        cache.add(item)
    cache.finalize_current_shard()


def test_items_come_back_in_their_order_with_their_tuples(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path):
        filled(tmp_path, items(3))
        cache = cache_of(tmp_path)
        assert len(cache) == 3
        for read, item in zip([cache[2], cache[0]], [items(3)[2], items(3)[0]], strict=True):
            assert torch.equal(read.pop("latents"), item.pop("latents"))
            assert read == item
        assert not (tmp_path / "cache_1x1").exists()


def test_a_cache_goes_on_where_it_was_left_and_another_fingerprint_begins_anew(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path):
        filled(tmp_path, items(2))
        cache = cache_of(tmp_path)
        cache.add(items(3)[2])
        cache.finalize_current_shard()
        assert len(cache_of(tmp_path)) == 3
        assert len(cache_of(tmp_path, "two")) == 0
        assert len(cache_of(tmp_path)) == 3
        filled(tmp_path, items(1), "two")
        assert [len(cache_of(tmp_path, one)) for one in ("one", "two")] == [0, 1]


def test_clear_takes_other_values_of_the_same_fingerprint(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path):
        filled(tmp_path, items(2))
        cache = cache_of(tmp_path)
        cache.clear()
        cache.add({"latents": torch.full((2, 3), 7)})
        cache.finalize_current_shard()
        assert [item["latents"][0, 0].item() for item in cache_of(tmp_path)] == [7]


def test_a_cache_can_be_sent_to_another_process(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path) as here:
        filled(tmp_path, items(2))
        monkeypatch.setitem(__import__("sys").modules, here.module.__name__, here.module)
        cache = pickle.loads(pickle.dumps(cache_of(tmp_path)))
        assert [len(cache), cache[1]["spec"]] == [2, (None, "1.png")]


def test_it_counts_what_was_there_and_what_was_encoded(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path) as here:
        filled(tmp_path, items(2))
        cache_of(tmp_path)
        assert here.counts() == {"latents": [0, 2]}
    with armed(monkeypatch, tmp_path) as here:
        cache_of(tmp_path)
        assert here.counts() == {"latents": [2, 0]}
        (name,) = cs.open(here.store).names()
        assert name.startswith("trainer/files/cache_1x1-")
        assert name.endswith("/latents")


def test_the_self_test_runs_before_it_forks_a_process_that_encodes(monkeypatch, tmp_path):
    with armed(monkeypatch, tmp_path, 'entry["latents_idx"]]', 'entry["latents_idx"]]; ret["latents"] = ret["latents"].mT'):
        from utils import dataset

        with pytest.raises(live.Refused, match="SizeBucketDataset"):
            dataset.DatasetManager().cache()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("import Cache", "import Cache as Shards", "Cache"),
        ('entry["latents_idx"]]', 'entry["latents_idx"]]; ret["latents"] = ret["latents"].mT', "SizeBucketDataset"),
        ("dataset._fingerprint", '"one"', "another fingerprint"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_by_name(monkeypatch, tmp_path, old, new, words):
    with armed(monkeypatch, tmp_path, old, new) as here, pytest.raises(live.Refused, match=words) as refused:
        cache_of(tmp_path)
    assert refused.value.code == 2
    assert not here.store.exists()
