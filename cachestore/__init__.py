"""cachestore: the store in which trainers of diffusion models keep their text embeddings and VAE latents.

Names are imported when they are first used, so that `import cachestore` starts nothing and loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cachestore.care.collect import CompactReport as CompactReport
    from cachestore.care.collect import DropReport as DropReport
    from cachestore.care.collect import GcReport as GcReport
    from cachestore.care.collect import collect as gc  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from cachestore.care.collect import compact as compact
    from cachestore.care.collect import drop as drop
    from cachestore.care.forget import ForgetReport as ForgetReport
    from cachestore.care.forget import forget as forget
    from cachestore.care.relocate import RelocateReport as RelocateReport
    from cachestore.care.relocate import relocate as relocate
    from cachestore.care.repair import RepairReport as RepairReport
    from cachestore.care.repair import repair as repair
    from cachestore.care.status import StatusReport as StatusReport
    from cachestore.care.status import status as status
    from cachestore.care.verify import VerifyReport as VerifyReport
    from cachestore.care.verify import verify as verify
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
    from cachestore.jobs.share.progress import PassStatus as PassStatus
    from cachestore.jobs.share.progress import RankStatus as RankStatus
    from cachestore.jobs.share.report import Report as Report
    from cachestore.jobs.start.fill import fill as fill
    from cachestore.jobs.start.forecast import Forecast as Forecast
    from cachestore.jobs.start.precompute import plan as plan
    from cachestore.jobs.start.precompute import precompute as precompute
    from cachestore.remote.pull import pull as pull
    from cachestore.remote.push import push as push
    from cachestore.remote.transfer import TransferReport as TransferReport
    from cachestore.store.format.findings import DamagedEntry as DamagedEntry
    from cachestore.store.format.findings import Finding as Finding
    from cachestore.store.read.rows import Rows as Rows
    from cachestore.store.read.stats import CatalogStats as CatalogStats
    from cachestore.store.read.stats import StoreStats as StoreStats
    from cachestore.store.read.stats import stats as stats
    from cachestore.store.write.writer import Store as Store
    from cachestore.store.write.writer import open_store as open  # noqa: A004, F401 - public as `cs.open`  # pyright: ignore[reportUnusedImport]
    from cachestore.train.batches import BucketBatchSampler as BucketBatchSampler
    from cachestore.train.dataset import CachedDataset as CachedDataset
    from cachestore.train.encoding.encode_once import EncodeOnce as EncodeOnce
    from cachestore.train.encoding.fill_dataset import FillSample as FillSample
    from cachestore.train.encoding.fill_dataset import fill_dataset as fill_dataset
    from cachestore.train.encoding.read_through import ModelReadThrough as ModelReadThrough
    from cachestore.train.encoding.read_through import ReadThrough as ReadThrough
    from cachestore.train.features import Feature as Feature
    from cachestore.train.loader import make_loader as make_loader
    from cachestore.train.mixed import MixedDataset as MixedDataset
    from cachestore.trainers.exported_files import ExportedFiles as ExportedFiles
    from cachestore.trainers.exported_files import exported as exported
    from cachestore.trainers.exporting import ExportReport as ExportReport
    from cachestore.trainers.exporting import export_cache as export_cache
    from cachestore.trainers.import_request import ImportReport as ImportReport
    from cachestore.trainers.importing import import_cache as import_cache

_NAMES = {
    "core.captions": "CaptionPolicy",
    "core.errors": (
        "BadInput BadUsage CacheStoreError CorruptEntry EncodeFailed FormatError Incomplete LockTimeout "
        "MissingEntry MissingExtra NewerFormat RanksDiffer ReadFailed RecipeMismatch RemoteFailed StoreNotFound Superseded WriteFailed"
    ),
    "core.keys": "Key Recipe key",
    "core.samples": "Sample Source",
    "files.fingerprints": "fingerprint",
    "trainers.exported_files": "ExportedFiles exported",
    "trainers.exporting": "ExportReport export_cache",
    "trainers.import_request": "ImportReport",
    "trainers.importing": "import_cache",
    "jobs.start.fill": "fill",
    "jobs.start.forecast": "Forecast",
    "jobs.share.report": "Report",
    "jobs.start.precompute": "plan precompute",
    "train.batches": "BucketBatchSampler",
    "train.dataset": "CachedDataset",
    "train.features": "Feature",
    "train.loader": "make_loader",
    "train.mixed": "MixedDataset",
    "care.collect": "CompactReport DropReport GcReport compact drop gc",
    "care.forget": "ForgetReport forget",
    "care.relocate": "RelocateReport relocate",
    "care.repair": "RepairReport repair",
    "care.status": "StatusReport status",
    "care.verify": "VerifyReport verify",
    "remote.pull": "pull",
    "remote.push": "push",
    "remote.transfer": "TransferReport",
    "store.format.findings": "DamagedEntry Finding",
    "store.read.rows": "Rows",
    "store.read.stats": "CatalogStats StoreStats stats",
    "store.write.writer": "Store open",
    "train.encoding.encode_once": "EncodeOnce",
    "train.encoding.fill_dataset": "FillSample fill_dataset",
    "train.encoding.read_through": "ModelReadThrough ReadThrough",
    "jobs.share.progress": "PassStatus RankStatus",
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
