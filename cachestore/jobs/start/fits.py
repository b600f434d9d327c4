"""What does not fit well: pictures of which the crop cuts off much, those that are scaled up much, and clips that repeat frames."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

import numpy as np

from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.core.words import plural
from cachestore.encode.pictures.variants import Fit
from cachestore.jobs.share.plan import Plan
from cachestore.store.format.arrays import numbers

LEAST_KEPT: Final = 2 / 3
"""The share of a picture's area that the crop must keep, else it is said."""
MOST_SCALED: Final = 1.5
"""How many times longer the sides of a picture may become before it is said."""
_WORST: Final = 5


class Repeats(NamedTuple):
    """A clip with fewer frames a second than are asked for."""

    fraction: float
    """The part of its frames that are the same as the one before, 0 to 1."""
    rate: float
    """The frames a second of its file."""
    fps: float
    """Those asked for."""


class Worst(NamedTuple):
    """How badly a sample fits its bucket, or the rate that is asked for."""

    sample: str
    amount: float
    """The share of the area that is cut off, 0 to 1; how many times longer its sides become; or the share of frames that repeat."""
    fit: Fit | Repeats

    def as_json(self) -> dict[str, Json]:
        """Return the sample, the amount, and the sizes [width, height] in pixels of its picture and its bucket, or the two rates."""
        fit, found = self.fit, dict[str, Json](sample=self.sample, amount=round(self.amount, 3))
        if isinstance(fit, Repeats):
            return {**found, "rate": round(fit.rate, 3), "fps": round(fit.fps, 3)}
        return {**found, "size": list(fit.size), "bucket": list(fit.bucket)}


@dataclass(frozen=True, slots=True)
class Misfits:
    """Samples that fit their bucket badly in one way: how many, and the worst five."""

    count: int = 0
    worst: tuple[Worst, ...] = ()

    def as_json(self) -> dict[str, Json]:
        """Return the count and the worst ones as JSON."""
        return {"count": self.count, "worst": [one.as_json() for one in self.worst]}


@dataclass(frozen=True, slots=True)
class Fits:
    """How the pictures and clips that a pass encodes fit their buckets."""

    cut: Misfits = field(default_factory=Misfits)
    """Samples that lose more than a third of their area to the crop."""
    scaled_up: Misfits = field(default_factory=Misfits)
    """Samples whose sides become more than 1.5 times as long."""
    repeated_frames: Misfits = field(default_factory=Misfits)
    """Clips with fewer frames a second than are asked for, so that some are taken more than once."""

    def as_json(self) -> dict[str, Json]:
        """Return what fits badly as JSON, by how."""
        return {one.name: getattr(self, one.name).as_json() for one in fields(self)}

    def in_words(self, about: str = "") -> list[str]:
        """Return a line for each way in which samples fit badly. `about` comes before a count that is an estimate."""
        lines: list[str] = []
        if self.cut.count:
            worst = ", ".join(f"{one.sample} {one.amount:.0%} {_sizes(one.fit)}" for one in self.cut.worst)
            many = plural(self.cut.count, "sample loses", "samples lose")
            most = f"{about}{many} more than a third of the picture to the crop, the most: {worst}"
            lines.append(f"{most}; once encoded, `cachestore ls STORE --samples` shows all")
        if self.scaled_up.count:
            worst = ", ".join(f"{one.sample} {one.amount:.1f} times {_sizes(one.fit)}" for one in self.scaled_up.worst)
            many = plural(self.scaled_up.count, "sample is", "samples are")
            most = f"{about}{many} scaled up more than {MOST_SCALED} times, the most: {worst}"
            lines.append(f"{most}; {option('no_upscale', value=True)} gives small pictures small buckets")
        if self.repeated_frames.count:
            worst = ", ".join(f"{one.sample} {one.amount:.0%} {_sizes(one.fit)}" for one in self.repeated_frames.worst)
            many = plural(self.repeated_frames.count, "clip has", "clips have")
            most = f"{about}{many} fewer frames a second than {option('fps')}, so frames are repeated, the most: {worst}"
            lines.append(f"{most}; a lower {option('fps')} avoids that")
        return lines


def _sizes(fit: Fit | Repeats) -> str:
    if isinstance(fit, Repeats):
        fps = float(f"{fit.fps:.4g}")
        return f"({fit.rate:.4g} a second at {option('fps', int(fps) if fps.is_integer() else fps)})"
    return f"({fit.size.width}x{fit.size.height} to {fit.bucket.width}x{fit.bucket.height})"


def fits_of(plan: Plan, found: Iterable[tuple[int, Fit, Repeats | None]]) -> Fits:
    """Return how samples fit, from what is known of units by index. A sample with several units counts once, by its worst."""
    units = list(found)
    return Fits(
        _misfits(plan, [(index, 1 - fit.kept, fit) for index, fit, _repeats in units if fit.kept < LEAST_KEPT]),
        _misfits(plan, [(index, fit.scale, fit) for index, fit, _repeats in units if fit.scale > MOST_SCALED]),
        _misfits(plan, [(index, repeats.fraction, repeats) for index, _fit, repeats in units if repeats is not None]),
    )


def _misfits(plan: Plan, found: Sequence[tuple[int, float, Fit | Repeats]]) -> Misfits:
    worst: dict[str, Worst] = {}
    names = samples_of(plan, [index for index, _amount, _fit in found])
    for index, amount, fit in sorted(found, key=lambda one: -one[1]):
        for sample in names.get(index, ()):
            worst.setdefault(sample, Worst(sample, amount, fit))
    return Misfits(len(worst), tuple(list(worst.values())[:_WORST]))


def samples_of(plan: Plan, units: Sequence[int]) -> dict[int, list[str]]:
    """Return the ids of the samples that each of these units belongs to, in the order of the rows."""
    names: dict[int, list[str]] = {}
    for at, of in plan.cells if units else ():
        for cell in np.flatnonzero(np.isin(numbers(of), units)).tolist():
            row = int(np.searchsorted(numbers(at), cell, side="right")) - 1
            listed = names.setdefault(of[cell], [])
            if plan.ids[row] not in listed[-1:]:
                listed.append(plan.ids[row])
    return names
