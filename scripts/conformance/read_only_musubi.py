"""A small adapter of musubi-tuner for `live_read_only.py`: its cache files are read from a data set of `precompute --buckets musubi`."""
# The trainer's modules are in its checkout.
# pyright: basic, reportMissingImports=false

from types import SimpleNamespace
from typing import Any

from cachestore import live

adapter = live.Adapter("musubi")


def _files() -> Any:
    return live.current().exported


class _Open:
    def __init__(self, path: Any, *_options: Any, **_more: Any) -> None:
        self.path = path

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def metadata(self) -> Any:
        return _files().metadata(self.path)

    def keys(self) -> list[str]:
        return _files().keys(self.path)

    def get_tensor(self, name: str) -> Any:
        return _files().load(self.path)[name]


def _system(own: Any) -> Any:
    path = SimpleNamespace(**{**vars(own.path), "exists": lambda one: _files().exists(one) or own.path.exists(one)})
    return SimpleNamespace(**{**vars(own), "path": path, "remove": lambda one: _files().remove(one)})


adapter.change("musubi_tuner.dataset.bucket", "load_file")(lambda _own: lambda path, *_more, **_options: _files().load(path))
adapter.change("musubi_tuner.dataset.cache_io", "save_file")(lambda _own: lambda _tensors, path, *_more, **_options: _files().save(path))
adapter.change("musubi_tuner.utils.safetensors_utils", "MemoryEfficientSafeOpen")(lambda _own: _Open)
adapter.change("musubi_tuner.dataset.cache_io", "os")(_system)
adapter.change("musubi_tuner.dataset.image_video_dataset", "os")(_system)
adapter.change("musubi_tuner.dataset.image_video_dataset", "glob")(
    lambda own: SimpleNamespace(**{**vars(own), "glob": lambda pattern: _files().glob(pattern) or own.glob(pattern)})
)
