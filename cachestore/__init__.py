"""cachestore: the store in which trainers of diffusion models keep their text embeddings and VAE latents.

Names are imported when they are first used, so that `import cachestore` starts nothing and loads neither torch nor numpy.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachestore.core.captions import CaptionPolicy as CaptionPolicy
    from cachestore.core.errors import BadInput as BadInput
    from cachestore.core.errors import BadUsage as BadUsage
    from cachestore.core.errors import CacheStoreError as CacheStoreError
    from cachestore.core.errors import CorruptEntry as CorruptEntry
    from cachestore.core.errors import EncodeFailed as EncodeFailed
    from cachestore.core.errors import FormatError as FormatError
    from cachestore.core.errors import Incomplete as Incomplete
    from cachestore.core.errors import LockTimeout as LockTimeout
    from cachestore.core.errors import MissingEntry as MissingEntry
    from cachestore.core.errors import MissingExtra as MissingExtra
    from cachestore.core.errors import ReadFailed as ReadFailed
    from cachestore.core.errors import RecipeMismatch as RecipeMismatch
    from cachestore.core.errors import StoreNotFound as StoreNotFound
    from cachestore.core.errors import Superseded as Superseded
    from cachestore.core.errors import WriteFailed as WriteFailed
    from cachestore.core.keys import Key as Key
    from cachestore.core.keys import Recipe as Recipe
    from cachestore.core.keys import key as key
    from cachestore.core.samples import Sample as Sample
    from cachestore.core.samples import Source as Source
    from cachestore.files.fingerprints import fingerprint as fingerprint
    from cachestore.interop.exporting import export_cache as export_cache
    from cachestore.interop.importing import import_cache as import_cache
    from cachestore.jobs.fill import fill as fill
    from cachestore.jobs.precompute import precompute as precompute
    from cachestore.loading.batches import BucketBatchSampler as BucketBatchSampler
    from cachestore.loading.dataset import CachedDataset as CachedDataset
    from cachestore.loading.loader import make_loader as make_loader
    from cachestore.loading.mixed import MixedDataset as MixedDataset
    from cachestore.maintain.recompute import repair as repair
    from cachestore.maintain.recompute import verify as verify
    from cachestore.storage.stats import stats as stats
    from cachestore.store.read_through import ReadThrough as ReadThrough
    from cachestore.store.writer import open_store as open  # noqa: A004, F401 - the contract's name  # pyright: ignore[reportUnusedImport]

_HOMES = {
    "BadInput": "core.errors",
    "BadUsage": "core.errors",
    "BucketBatchSampler": "loading.batches",
    "CacheStoreError": "core.errors",
    "CachedDataset": "loading.dataset",
    "CaptionPolicy": "core.captions",
    "CorruptEntry": "core.errors",
    "EncodeFailed": "core.errors",
    "FormatError": "core.errors",
    "Incomplete": "core.errors",
    "Key": "core.keys",
    "LockTimeout": "core.errors",
    "MissingEntry": "core.errors",
    "MissingExtra": "core.errors",
    "MixedDataset": "loading.mixed",
    "ReadFailed": "core.errors",
    "ReadThrough": "store.read_through",
    "Recipe": "core.keys",
    "RecipeMismatch": "core.errors",
    "Sample": "core.samples",
    "Source": "core.samples",
    "StoreNotFound": "core.errors",
    "Superseded": "core.errors",
    "WriteFailed": "core.errors",
    "export_cache": "interop.exporting",
    "fill": "jobs.fill",
    "fingerprint": "files.fingerprints",
    "import_cache": "interop.importing",
    "key": "core.keys",
    "make_loader": "loading.loader",
    "open": "store.writer",
    "precompute": "jobs.precompute",
    "repair": "maintain.recompute",
    "stats": "storage.stats",
    "verify": "maintain.recompute",
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
        raise AttributeError(f"module 'cachestore' has no attribute {name!r}")
    from cachestore.core.errors import naming_extras

    with naming_extras():
        value = getattr(import_module(f"cachestore.{_HOMES[name]}"), _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
