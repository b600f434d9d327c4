"""cachestore: the store in which trainers of diffusion models keep their text embeddings and VAE latents.

Names are imported when they are first used, so that `import cachestore` starts nothing and loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

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
    from cachestore.core.errors import NewerFormat as NewerFormat
    from cachestore.core.errors import RanksDiffer as RanksDiffer
    from cachestore.core.errors import ReadFailed as ReadFailed
    from cachestore.core.errors import RecipeMismatch as RecipeMismatch
    from cachestore.core.errors import RemoteFailed as RemoteFailed
    from cachestore.core.errors import StoreNotFound as StoreNotFound
    from cachestore.core.errors import Superseded as Superseded
    from cachestore.core.errors import WriteFailed as WriteFailed
    from cachestore.core.keys import Key as Key
    from cachestore.core.keys import Recipe as Recipe
    from cachestore.core.keys import key as key
    from cachestore.core.samples import Sample as Sample
    from cachestore.core.samples import Source as Source
    from cachestore.files.fingerprints import fingerprint as fingerprint
    from cachestore.interop.exporting import ExportReport as ExportReport
    from cachestore.interop.exporting import export_cache as export_cache
    from cachestore.interop.import_request import ImportReport as ImportReport
    from cachestore.interop.importing import import_cache as import_cache
    from cachestore.jobs.fill import fill as fill
    from cachestore.jobs.forecast import Forecast as Forecast
    from cachestore.jobs.pass_loop import Report as Report
    from cachestore.jobs.precompute import plan as plan
    from cachestore.jobs.precompute import precompute as precompute
    from cachestore.loading.batches import BucketBatchSampler as BucketBatchSampler
    from cachestore.loading.dataset import CachedDataset as CachedDataset
    from cachestore.loading.features import Feature as Feature
    from cachestore.loading.loader import make_loader as make_loader
    from cachestore.loading.mixed import MixedDataset as MixedDataset
    from cachestore.maintain.collect import CompactReport as CompactReport
    from cachestore.maintain.collect import DropReport as DropReport
    from cachestore.maintain.collect import GcReport as GcReport
    from cachestore.maintain.collect import collect as gc  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from cachestore.maintain.collect import compact as compact
    from cachestore.maintain.collect import drop as drop
    from cachestore.maintain.relocate import RelocateReport as RelocateReport
    from cachestore.maintain.relocate import relocate as relocate
    from cachestore.maintain.repair import RepairReport as RepairReport
    from cachestore.maintain.repair import repair as repair
    from cachestore.maintain.status import StatusReport as StatusReport
    from cachestore.maintain.status import status as status
    from cachestore.maintain.verify import VerifyReport as VerifyReport
    from cachestore.maintain.verify import verify as verify
    from cachestore.remote.pull import pull as pull
    from cachestore.remote.push import push as push
    from cachestore.remote.transfer import TransferReport as TransferReport
    from cachestore.storage.findings import DamagedEntry as DamagedEntry
    from cachestore.storage.findings import Finding as Finding
    from cachestore.storage.stats import CatalogStats as CatalogStats
    from cachestore.storage.stats import StoreStats as StoreStats
    from cachestore.storage.stats import stats as stats
    from cachestore.store.writer import Store as Store
    from cachestore.store.writer import open_store as open  # noqa: A004, F401 - public as `cs.open`  # pyright: ignore[reportUnusedImport]
    from cachestore.through.read_through import ModelReadThrough as ModelReadThrough
    from cachestore.through.read_through import ReadThrough as ReadThrough
    from cachestore.work.progress import PassStatus as PassStatus
    from cachestore.work.progress import RankStatus as RankStatus

_NAMES = {
    "core.captions": "CaptionPolicy",
    "core.errors": (
        "BadInput BadUsage CacheStoreError CorruptEntry EncodeFailed FormatError Incomplete LockTimeout "
        "MissingEntry MissingExtra NewerFormat RanksDiffer ReadFailed RecipeMismatch RemoteFailed StoreNotFound Superseded WriteFailed"
    ),
    "core.keys": "Key Recipe key",
    "core.samples": "Sample Source",
    "files.fingerprints": "fingerprint",
    "interop.exporting": "ExportReport export_cache",
    "interop.import_request": "ImportReport",
    "interop.importing": "import_cache",
    "jobs.fill": "fill",
    "jobs.forecast": "Forecast",
    "jobs.pass_loop": "Report",
    "jobs.precompute": "plan precompute",
    "loading.batches": "BucketBatchSampler",
    "loading.dataset": "CachedDataset",
    "loading.features": "Feature",
    "loading.loader": "make_loader",
    "loading.mixed": "MixedDataset",
    "maintain.collect": "CompactReport DropReport GcReport compact drop gc",
    "maintain.relocate": "RelocateReport relocate",
    "maintain.repair": "RepairReport repair",
    "maintain.status": "StatusReport status",
    "maintain.verify": "VerifyReport verify",
    "remote.pull": "pull",
    "remote.push": "push",
    "remote.transfer": "TransferReport",
    "storage.findings": "DamagedEntry Finding",
    "storage.stats": "CatalogStats StoreStats stats",
    "store.writer": "Store open",
    "through.read_through": "ModelReadThrough ReadThrough",
    "work.progress": "PassStatus RankStatus",
}
"""The public names, by module."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_NAMES_THERE = {"open": "open_store", "gc": "collect"}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] - one list; a test calls every name in it


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cachestore' has no attribute {name!r}")
    from cachestore.core.errors import importing

    with importing(f"cachestore.{name}"):
        value = getattr(import_module(f"cachestore.{_HOMES[name]}"), _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
