"""A small adapter of sd-scripts for `live_read_only.py`: reads its latents and text from a data set of `precompute`."""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

from types import SimpleNamespace
from typing import Any

from cachestore import live

adapter = live.Adapter("sd-scripts")


def _files() -> Any:
    return live.current().exported


class _Numpy:
    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def load(self, file: Any, *rest: Any, **options: Any) -> Any:
        files = _files()
        return files.load(file) if files.exists(file) else self.own.load(file, *rest, **options)

    def savez(self, file: Any, *_arrays: Any, **_named: Any) -> None:
        _files().save(file)


def _system(own: Any) -> Any:
    path = SimpleNamespace(**{**vars(own.path), "exists": lambda one: _files().exists(one) or own.path.exists(one)})
    return SimpleNamespace(**{**vars(own), "path": path})


for module in ("library.strategy_base", "library.strategy_*"):
    adapter.change(module, "np", optional=True)(lambda own: own if isinstance(own, _Numpy) else _Numpy(own))
    adapter.change(module, "os", optional=True)(lambda own: own if isinstance(own, SimpleNamespace) else _system(own))


@adapter.replace("library.train_util", "BaseDataset.new_cache_latents")
def latents(_own: Any, self: Any, model: Any, accelerator: Any) -> None:
    """In place of making the latents that are not cached."""
    from library.strategy_base import LatentsCachingStrategy

    del model, accelerator
    strategy, files = LatentsCachingStrategy.get_strategy(), _files()
    for info in self.image_data.values():
        subset, path = self.image_to_subset[info.image_key], strategy.get_latents_npz_path(info.absolute_path, info.image_size)
        if not files.exists(path) or tuple(info.bucket_reso) not in files.buckets(path):
            files.refuse(path, f"sd-scripts wants latents of the bucket {tuple(info.bucket_reso)}")
        if not strategy.is_disk_cached_latents_expected(info.bucket_reso, path, subset.flip_aug, subset.alpha_mask):
            files.refuse(path, "sd-scripts does not take what is in it")
        info.latents_npz = path
        live.current().count("latents", reused=1)


@adapter.replace("library.train_util", "BaseDataset.new_cache_text_encoder_outputs")
def text(_own: Any, self: Any, models: Any, accelerator: Any) -> None:
    """In place of making the text of the pictures that are not cached."""
    from library.strategy_base import TextEncoderOutputsCachingStrategy

    del models, accelerator
    strategy, files = TextEncoderOutputsCachingStrategy.get_strategy(), _files()
    for info in self.image_data.values():
        path = strategy.get_outputs_npz_path(info.absolute_path)
        if not files.exists(path) or files.caption(path) != info.caption:
            files.refuse(path, f"sd-scripts wants the text of the caption {info.caption!r}")
        if not strategy.is_disk_cached_outputs_expected(path):
            files.refuse(path, "sd-scripts does not take what is in it")
        info.text_encoder_outputs_npz = path
        live.current().count("text", reused=1)
