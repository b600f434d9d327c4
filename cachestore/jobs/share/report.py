"""The report of a pass, which every rank returns, and whether it counts as complete."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from cachestore.core.errors import EncodeFailed
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import in_short, plural


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """How a pass ended, the same for every rank: what `cachestore precompute --json` prints."""

    complete: bool
    samples: int
    """Samples that the source lists, and its rows or files that cannot be used."""
    wanted: int
    """Units of the plan: distinct captions and images, for each recipe; and each row or file of the source that cannot be used."""
    reused: int
    encoded: int
    failed: int
    missing: int
    encoded_here: int
    """Entries that this run published."""
    seconds: float
    bytes: int
    """The size of the entries that the pass made."""
    store: str
    name: str
    plan: str
    generation: int
    """The number of the catalog's version; for `fill`, of the index's."""
    failures: tuple[Mapping[str, Json], ...] = ()
    changed: tuple[str, ...] = ()
    """Up to 100 files that were replaced or removed during the pass: the next call reads them again."""
    stages: Mapping[str, Json] = field(default_factory=dict[str, Json])
    catalog_digest: str = ""
    usable: int | None = None
    """Samples of the data set for which every encoder succeeded, also in earlier passes: `len` of a CachedDataset. None for `fill`."""
    not_made_here: tuple[str, ...] = ()
    """Descriptions of inputs that the model is trained with but that are not made here."""
    without_picture: str = ""
    """How many samples have no picture, and which; empty if none, or if only text was asked for."""
    masks: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """If there are masks: of how many samples the mask is black everywhere (`empty`), or has colours (`coloured`), with up to 100 names
    of each (`empty_names`, `coloured_names`). With `alpha="mask"` also of how many samples the picture's or video's own `alpha` is the
    mask, and how many of these are `varying`: they leave a part out."""
    unused: tuple[Mapping[str, Json], ...] = ()
    """The files that are not used of the source: `reason` (docs/sources.md), `count`, and the first as `examples`."""
    encoded_earlier: int = 0
    """Entries among the encoded ones that runs published which ended before this launch began: the pass had been stopped."""
    rechecked: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """With `recheck`: `samples` whose files were read again, and how many of them had `changed`, with up to 100 `names`; `model_files`
    that were read again, and `model_files_changed`: those with other bytes than the data set was made with. Otherwise empty."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the report as one JSON object."""
        several = {name: list(getattr(self, name)) for name in ("changed", "not_made_here")}
        rows = {name: [dict(row) for row in getattr(self, name)] for name in ("failures", "unused")}
        return asdict(self) | rows | several

    @classmethod
    def from_json(cls, body: Mapping[str, Any], *, encoded_here: int | None = None) -> "Report":
        """Return the report from the result of `as_json`; unknown fields of a newer version are left out."""
        known = {one.name: body[one.name] for one in fields(cls) if one.name in body}
        known |= {name: tuple(body.get(name, ())) for name in ("failures", "changed", "not_made_here", "unused")}
        known["encoded_here"] = body.get("encoded_here", 0) if encoded_here is None else encoded_here
        return cls(**known)


def held_to(report: Report, allowed: int, *, strict: bool) -> Report:
    """Return the report, complete if at most `allowed` units failed. Raises EncodeFailed if more failed and the run is strict."""
    if report.failed > allowed and strict:
        named = "; ".join(f"{failure['sample']!r} ({failure['encoder']}): {failure['reason']}" for failure in report.failures[:3])
        counts = f"{report.failed} of {plural(report.wanted, 'caption or picture', 'captions and pictures')} could not be encoded"
        raise EncodeFailed(
            f"{counts}, such as {named}. Mend or remove them and run the same command again, or pass {option('max_failures')}"
        )
    return replace(report, complete=report.missing == 0 and report.failed <= allowed)
