"""cachestore: the store in which trainers of diffusion models keep their text embeddings and VAE latents.

Names are imported when they are first used, so that `import cachestore` starts nothing and loads neither torch nor numpy.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachestore.captions import CaptionPolicy as CaptionPolicy
    from cachestore.digests import fingerprint as fingerprint
    from cachestore.errors import BadInput as BadInput
    from cachestore.errors import BadUsage as BadUsage
    from cachestore.errors import CacheStoreError as CacheStoreError
    from cachestore.errors import CorruptEntry as CorruptEntry
    from cachestore.errors import EncodeFailed as EncodeFailed
    from cachestore.errors import FormatError as FormatError
    from cachestore.errors import Incomplete as Incomplete
    from cachestore.errors import LockTimeout as LockTimeout
    from cachestore.errors import MissingEntry as MissingEntry
    from cachestore.errors import MissingExtra as MissingExtra
    from cachestore.errors import ReadFailed as ReadFailed
    from cachestore.errors import RecipeMismatch as RecipeMismatch
    from cachestore.errors import StoreNotFound as StoreNotFound
    from cachestore.errors import Superseded as Superseded
    from cachestore.errors import WriteFailed as WriteFailed
    from cachestore.exporting import export_cache as export_cache
    from cachestore.importing import import_cache as import_cache
    from cachestore.keys import Key as Key
    from cachestore.keys import Recipe as Recipe
    from cachestore.keys import key as key
    from cachestore.loading.batches import BucketBatchSampler as BucketBatchSampler
    from cachestore.loading.dataset import CachedDataset as CachedDataset
    from cachestore.loading.loader import make_loader as make_loader
    from cachestore.loading.mixed import MixedDataset as MixedDataset
    from cachestore.readthrough import ReadThrough as ReadThrough
    from cachestore.recompute import repair as repair
    from cachestore.recompute import verify as verify
    from cachestore.run import fill as fill
    from cachestore.run import precompute as precompute
    from cachestore.samples import Sample as Sample
    from cachestore.samples import Source as Source
    from cachestore.storage.stats import stats as stats
    from cachestore.store import open_store as open  # noqa: A004, F401 - the contract's name  # pyright: ignore[reportUnusedImport]

_HOMES = {
    "BadInput": "errors",
    "BadUsage": "errors",
    "BucketBatchSampler": "loading.batches",
    "CacheStoreError": "errors",
    "CachedDataset": "loading.dataset",
    "CaptionPolicy": "captions",
    "CorruptEntry": "errors",
    "EncodeFailed": "errors",
    "FormatError": "errors",
    "Incomplete": "errors",
    "Key": "keys",
    "LockTimeout": "errors",
    "MissingEntry": "errors",
    "MissingExtra": "errors",
    "MixedDataset": "loading.mixed",
    "ReadFailed": "errors",
    "ReadThrough": "readthrough",
    "Recipe": "keys",
    "RecipeMismatch": "errors",
    "Sample": "samples",
    "Source": "samples",
    "StoreNotFound": "errors",
    "Superseded": "errors",
    "WriteFailed": "errors",
    "export_cache": "exporting",
    "fill": "run",
    "fingerprint": "digests",
    "import_cache": "importing",
    "key": "keys",
    "make_loader": "loading.loader",
    "open": "store",
    "precompute": "run",
    "repair": "recompute",
    "stats": "storage.stats",
    "verify": "recompute",
}
_NAMES_THERE = {"open": "open_store"}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - one list; a test calls every name in it


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name == "__version__":
        try:
            return version("cachestore")
        except PackageNotFoundError:
            return "0"
    if name not in _HOMES:
        message = f"module 'cachestore' has no attribute {name!r}"
        raise AttributeError(message)
    from cachestore.errors import naming_extras

    with naming_extras():
        value = getattr(import_module(f"cachestore.{_HOMES[name]}"), _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
