"""The options and the report of an import, and why a name cannot be used for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from cachestore.core.errors import RecipeMismatch
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import in_short, plural
from cachestore.files.paths import Access
from cachestore.jobs.share.report import Report
from cachestore.sources.reading import CaptionLines
from cachestore.store.format.catalog import IMPORTED, Catalog


@dataclass(frozen=True, slots=True, repr=False)
class ImportReport:
    """The result of an import, as `cachestore import --json` prints it."""

    report: Report
    """The report of the pass; its `encoded` counts imported values."""
    format: str
    family: str
    fingerprints: Mapping[str, str]
    """By encoder."""
    unmatched: tuple[str, ...]
    """Files of the cache that belong to no sample."""
    stale: tuple[str, ...]
    """Files older than their picture or caption."""
    remarks: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every sample's values were found and read, or no more failed than was allowed."""
        return self.report.complete

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the report of the pass, with the fields of the import added."""
        own = {name: list(getattr(self, name)) for name in ("unmatched", "stale", "remarks")}
        facts = {"format": self.format, "family": self.family, "fingerprints": dict(self.fingerprints)}
        return {**self.report.as_json(), "imported": self.report.encoded, **facts, **own}


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """All options of `import`: one field for each option of the command."""

    format: str
    folder: str
    store: str
    data: str = ""
    """Empty for tars, which hold what their values were made from."""
    model: str | None = None
    claims: Mapping[str, Json] = field(default_factory=dict[str, Json])
    family: str | None = None
    name: str = "train"
    encode: tuple[str, ...] = ()
    """`text`, `latents` or both; empty: what the folder holds."""
    captions: Literal["first", "all"] = "first"
    caption_lines: CaptionLines = "whole"
    caption: str | None = None
    trigger_word: str | None = None
    fps: float | None = None
    vae: str | None = None
    text_encoder: str | None = None
    encode_arg: Mapping[str, Json] = field(default_factory=dict[str, Json])
    replace: bool = False
    access: Access | None = None

    def hints(self) -> dict[str, Json]:
        """Return what a catalog's header keeps of the request; paths are absolute."""
        body: dict[str, Json] = {name: value for name, value in asdict(self).items() if name not in {"store", "replace", "access"}}
        for name in ("folder", "data", "model", "vae", "text_encoder"):
            if body[name] is not None and Path(body[name]).exists():
                body[name] = str(Path(body[name]).absolute())
        return {**body, "encode": list(self.encode), IMPORTED: self.format}


def made_otherwise(name: str, encoder: str) -> RecipeMismatch:
    """Return the error for a data set that has other values of an encoder."""
    fault = f"the data set {name!r} has {encoder} already, made, imported or declared otherwise"
    return RecipeMismatch(f"{fault}: {_another_name()}", option="name")


def has_no_sample_of(previous: Catalog, source: str) -> RecipeMismatch:
    """Return the error for a data set that has none of the samples of a source."""
    fault = f"the data set {previous.name!r} has {plural(len(previous.ids), 'sample')}, and none of them is in {source}"
    return RecipeMismatch(f"{fault}: {_another_name()}", option="name")


def _another_name() -> str:
    return f"pass another {option('name')}, or {option('replace', value=True)} to replace it"
