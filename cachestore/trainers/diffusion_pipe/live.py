"""diffusion-pipe: a data set of the store for each folder in which it would keep a cache (`utils/cache.py`), with the items in its order.

Its fingerprint of the folder's files and settings says what is out of date.
"""

# pyright: basic, reportMissingImports=false
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cachestore as cs
from cachestore import live

adapter = live.Adapter("diffusion-pipe", data_set="files", tested={"utils.dataset": ["dd8a5c3c5811"]})
_FLUSH_SECONDS = 30
_there, _encoded = {"latents": 0, "text": 0}, {"latents": live.SharedCount(), "text": live.SharedCount()}  # by a forked process


class _Cache:
    """What `utils.cache.Cache` is to the trainer: a list that grows. What was added is visible when it is finalized, or after 30 s."""

    def __init__(self, path: Any, fingerprint: str, shard_size_gb: float = 1) -> None:  # noqa: ARG002 - as the trainer calls it
        _self_test()
        folder_of_cache, last = os.path.split(os.path.abspath(path))
        self.name = f"{live.current().name}/{os.path.basename(folder_of_cache)}-{str(cs.key(folder_of_cache))[:8]}/{last}"
        self.fingerprint, self.part = fingerprint, "latents" if last.startswith("latents") else "text"
        self.session, self.due = None, 0.0
        self.items: list[cs.Key] = []
        store = live.current().store
        if self.name in store.names():
            rows = store.dataset(self.name)
            keys = dict(zip(rows.ids, rows.keys("item"), strict=True)) if rows.parts else {}
            self.items += [cs.Key(bytes(keys[name])) for name in itertools.takewhile(keys.__contains__, map(self._id, itertools.count()))]
        if not _self_test.is_running:
            _there[self.part] += len(self.items)
            encoded = _encoded[self.part].value
            live.current().counts[self.part] = [max(_there[self.part] - encoded, 0), encoded]

    def _id(self, index: int) -> str:
        return f"{self.fingerprint}/{index:08d}"

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, idx: int) -> Any:
        return live.unpack(live.current().reader.get(self.items[idx]))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"session": None}

    def add(self, item: Any) -> None:
        if not self.items:
            self.clear()  # items of another fingerprint
        if self.session is None:
            self.session, self.due = live.current().store.session(self.name), time.monotonic() + _FLUSH_SECONDS
        tensors = live.pack(item)
        key = live.key_of("diffusion-pipe", tensors=tensors)
        self.session.put(key, tensors)
        self.session.set(self._id(len(self.items)), item=key)
        self.items.append(key)
        _encoded[self.part].add(not _self_test.is_running)
        if time.monotonic() >= self.due:
            self.session.flush()
            self.due = time.monotonic() + _FLUSH_SECONDS

    def clear(self) -> None:
        store = live.current().store
        if self.name in store.names() and len(store.dataset(self.name).ids):
            store.publish(self.name, {})
        self.items = []

    def finalize_current_shard(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None


def _test(folder: str) -> None:
    import torch
    from utils import dataset

    class MadeUpBucket(dataset.SizeBucketDataset):
        def __init__(self) -> None:
            spec, (self.latent_dataset, text) = (None, "a picture.png"), caches
            self.iteration_order = [{"latents_idx": 0, "image_spec": spec, "caption": "a caption", "caption_number": 0}]
            self.text_embedding_datasets = [dataset.TextEmbeddingDataset(text, {"image_spec": [spec]})]
            self.uncond_text_embeddings = [text]

        __getattr__ = lambda _self, _name: None  # noqa: E731 - all else

    def cache_of(prefix: str, fingerprint: str = "one") -> Any:
        return dataset._map_and_cache(SimpleNamespace(_fingerprint=fingerprint), None, Path(folder), prefix)

    latents, text, pooled = torch.arange(96.0).view(4, 4, 6), torch.arange(15.0).view(3, 5).bfloat16(), torch.tensor(2.5)
    items = {"latents_": {"latents": latents, "mask": None, "size": (4, [6, 0.1])}, "text_embeddings_1_": {"text": text, "pooled": pooled}}
    for cache, item in zip(map(cache_of, items), items.values(), strict=True):
        cache.add(item)
        cache.finalize_current_shard()
    caches = [cache_of(prefix) for prefix in items]
    batch = dataset.Dataset._collate(None, [MadeUpBucket()[0]])
    wanted = {"latents": latents[None], "text": text[None], "pooled": pooled[None], "size": [(4, [6, 0.1])]}
    live.check_same("utils.dataset.SizeBucketDataset", wanted, {name: batch.get(name) for name in wanted})
    live.check_same("utils.dataset._map_and_cache of another fingerprint", 0, len(cache_of("latents_", "other")))


_self_test = live.SelfTest(_test)


@adapter.replace("utils.dataset", "DatasetManager.cache")
def _cache(own: Any, self: Any, unload_models: bool = True) -> Any:
    _self_test()  # here: the process that it forks to encode could not end this one
    return own(self, unload_models)


adapter.change("utils.dataset", "Cache")(lambda _own: _Cache)
