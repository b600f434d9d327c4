"""Charts as inline SVG. Colours come from the page's CSS classes, so one drawing works in light mode, in dark mode and on paper."""

from collections.abc import Sequence
from itertools import count as count_from_0
from typing import Final

from cachestore.core.words import plural
from cachestore.report.html import Html, attribute, join
from cachestore.report.numbers import Bin, Segment, State

_ACROSS: Final = 60
_SIDE: Final = 12
"""Side of a square of the map, with the gap to the next one, in pixels."""
MOST_SQUARES: Final = 960
_WORST: Final[Sequence[State]] = ("sound", "gone", "unreadable", "damaged")
_HEIGHT: Final = 150
_BASE: Final = 122
"""The bottom of a histogram's bars, in pixels from the top."""
_TICKS: Final = 6


def bar(*parts: tuple[float, str]) -> Html:
    """Return a bar of parts, each (part of the full width, class). Screen readers skip it, because the same numbers are beside it."""
    start, drawn = 0.0, list[Html]()
    for width, css in parts:
        if width > 0:
            drawn.append(Html(f'<rect x="{_percent(start)}" width="{_percent(width)}" height="100%" class="{css}"/>'))
        start += width
    return Html(f'<svg class="bar" aria-hidden="true">{join(drawn)}</svg>')


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def neighbours(segments: int) -> int:
    """Return how many segments share a square of the map."""
    return -(-segments // MOST_SQUARES) or 1


def segment_map(segments: Sequence[Segment]) -> Html:
    """Return a map with a square for each segment, in the order of names. Of many segments, several share a square that shows the worst."""
    each = neighbours(len(segments))
    groups = [segments[at : at + each] for at in range(0, len(segments), each)]
    across = min(_ACROSS, max(1, len(groups)))
    down = -(-len(groups) // across) or 1
    squares = join(_square(group, number % across, number // across) for number, group in enumerate(groups))
    damaged = sum(1 for segment in segments if segment.state != "sound")
    title = f"Map of {plural(len(segments), 'segment', form=',')}, {damaged:,} of them damaged or missing"
    box = f'viewBox="0 0 {across * _SIDE} {down * _SIDE}" style="max-width:{across * _SIDE}px"'
    return Html(f'<svg class="map" role="img" aria-label="{title}" {box}>{squares}</svg>')


def _square(group: Sequence[Segment], x: int, y: int) -> Html:
    worst = max(group, key=lambda segment: _WORST.index(segment.state))
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    entries = plural(sum(segment.entries for segment in group), "entry", form=",")
    title = f"<title>{attribute(worst.digest[:12])}…{more}: {worst.state}, {entries}</title>"
    left, top, side = x * _SIDE, y * _SIDE, _SIDE - 2
    square = f'<rect x="{left}" y="{top}" width="{side}" height="{side}" rx="1.5" class="{worst.state}"/>'
    # a sign besides the colour, for print and colour-blind readers
    sign = "" if worst.state == "sound" else f'<path d="M{left + 3} {top + 3}l4 4m0-4l-4 4" class="sign"/>'
    return Html(f"<g>{title}{square}{sign}</g>")


def histogram(bins: Sequence[Bin], unit: str, limit: int | None) -> Html:
    """Return bars over lengths, with a line at the encoder's limit; bars above it have another colour. Needs at least one bin."""
    first, last = bins[0].low, bins[-1].high + 1
    most = max(one.captions for one in bins) or 1
    drawn: list[Html] = []
    for one in bins:
        height = round((_BASE - 22) * one.captions / most, 1)
        height = max(height, 1.0) if one.captions else 0.0
        x, width = _percent((one.low - first) / (last - first)), _percent(0.86 * (one.high + 1 - one.low) / (last - first))
        where = f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}"
        css = "lost" if limit is not None and one.low > limit else "fill"
        column = f'<rect x="{x}" width="{width}" y="{_BASE - height}" height="{height}" class="{css}">'
        drawn.append(Html(f"{column}<title>{where}: {one.captions:,}</title></rect>"))
    drawn.append(Html(f'<line x1="0" x2="100%" y1="{_BASE}" y2="{_BASE}" class="axis"/>'))
    steps = (digit * 10**power for power in count_from_0() for digit in (1, 2, 5))
    step = next(step for step in steps if (last - first) / step <= _TICKS)
    for value in range(-(-first // step) * step, last, step):
        part = (value - first) / (last - first)
        anchor = "start" if part < 0.04 else "end" if part > 0.96 else "middle"
        drawn.append(Html(f'<text x="{_percent(part)}" y="{_BASE + 17}" text-anchor="{anchor}">{value:,}</text>'))
    if limit is not None and first < limit + 1 < last:
        x = _percent((limit + 1 - first) / (last - first))
        anchor, offset = ("end", "-6") if limit > (first + last) / 2 else ("start", "6")
        drawn.append(Html(f'<line x1="{x}" x2="{x}" y1="2" y2="{_BASE}" class="limit"/>'))
        drawn.append(Html(f'<text x="{x}" dx="{offset}" y="12" text-anchor="{anchor}" class="limit-text">limit {limit:,}</text>'))
    label = f"Lengths of captions in {unit}, from {first:,} to {last - 1:,}"
    return Html(f'<svg class="histogram" role="img" aria-label="{label}" height="{_HEIGHT}">{join(drawn)}</svg>')
