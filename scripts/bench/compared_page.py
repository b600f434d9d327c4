"""What `compare.py` found, as the tables and the plot of docs/compared.md. Pure functions from its JSON object to text."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Final

BEGIN: Final = "<!-- figures: python3 scripts/bench/compare.py --page -->"
END: Final = "<!-- end of figures -->"
PLOT: Final = "![Bars of the main figures](compared.svg)"
KIB: Final = 147.5
"""What a sample holds."""

OURS: Final = "cachestore"
STYLE: Final = """
  .page { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .small { fill: #59636e } .bar { fill: #8c959f } .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .small { fill: #9198a1 } .bar { fill: #656c76 } .ours { fill: #4493f8 }
  }
"""
LEFT, WIDTH, ROW, PANEL_WIDTH = 150, 170, 20, 400


def best_epoch(way: Mapping[str, Any]) -> tuple[str, float]:
    """With which number of workers two epochs took the least time, and how many samples a second they had together."""
    rates = {workers: 2 / (1 / epoch["first"] + 1 / epoch["next"]) for workers, epoch in way["read"]["epochs"].items()}
    workers = max(rates, key=lambda name: rates[name])
    return workers, rates[workers]


def written(way: Mapping[str, Any]) -> float:
    """Seconds until all is durable."""
    return way["write"]["seconds"] + way["write"]["sync_seconds"]


PANELS: Final[tuple[tuple[str, str, Callable[[Mapping[str, Any]], float], Callable[[float], str]], ...]] = (
    ("An epoch, samples a second", "more is better", lambda way: best_epoch(way)[1], lambda value: f"{value:,.0f}"),
    ("A random batch of 16, milliseconds", "less is better", lambda way: way["read"]["batch_ms"], lambda value: f"{value:.2f}"),
    ("One sample, microseconds", "less is better", lambda way: way["read"]["get_us"], lambda value: f"{value:.0f}"),
    ("Written and synced, seconds", "less is better", written, lambda value: f"{value:.1f}"),
)


def tables_of(result: Mapping[str, Any]) -> str:
    """The machine, the figures, what a kill leaves, what a flipped bit does: Markdown."""
    ways, machine = result["ways"], result["machine"]
    where = (
        f"{result['samples']:,} samples of {KIB} KiB; {machine['processors']} cores ({machine['processor']}), {machine['memory_gib']} GiB,"
        f" {machine['file_system']}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}; load"
        f" {machine['load_before']} before the run, which took {result['seconds']} s. All files are in the page cache; torch uses"
        " one thread in each process."
    )
    parts = [
        where,
        _table(
            ("", "version", "written (of it, sync)", "on disk", "files", "open", "one sample", "batch of 16", "epoch (workers)"),
            [(_bold(name), way["version"], *_figures(way)) for name, way in ways.items()],
        ),
        _table(
            ("writer killed", "kills", "whole after it", "torn", "the same command again", "whole then", "torn then"),
            [(_bold(name), *_kills(way["kill"])) for name, way in ways.items()],
        ),
        _table(
            ("one flipped bit", "a reader gets", "its own check"),
            [(_bold(name), *_flip(way["flip"])) for name, way in ways.items()],
        ),
    ]
    return "\n\n".join(parts)


def _bold(name: str) -> str:
    return f"**{name}**" if name == OURS else name


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _figures(way: Mapping[str, Any]) -> tuple[str, ...]:
    read, (workers, rate) = way["read"], best_epoch(way)
    sync = "its own" if way["syncs"] else f"{way['write']['sync_seconds']:.1f} s"
    return (
        f"{written(way):.1f} s ({sync})",
        f"{way['bytes'] / 1e9:.2f} GB",
        f"{way['files']:,}",
        f"{read['open_ms']:.1f} ms",
        f"{read['get_us']:.0f} µs",
        f"{read['batch_ms']:.2f} ms",
        f"{rate:,.0f} samples/s ({workers})",
    )


def _kills(kill: Mapping[str, Any]) -> tuple[str, ...]:
    rounds = kill["rounds"]
    errors = [one["again"]["error"] for one in rounds if "error" in one["again"]]
    return (
        str(len(rounds)),
        _span([one["left"]["right"] for one in rounds], kill["samples"]),
        _span([one["left"]["errors"] + one["left"]["wrong"] for one in rounds]),
        f"{len(errors)} of {len(rounds)} fail: `{errors[0].split(':')[0]}`" if errors else "completes",
        _span([one["after"]["right"] for one in rounds], kill["samples"]),
        _span([one["after"]["errors"] + one["after"]["wrong"] for one in rounds]),
    )


def _span(counts: list[int], of: int | None = None) -> str:
    """From the lowest to the highest."""
    low, high = min(counts), max(counts)
    return (f"{low:,}" if low == high else f"{low:,} to {high:,}") + (f" of {of:,}" if of else "")


def _flip(flip: Mapping[str, Any]) -> tuple[str, str]:
    if flip["wrong"]:
        seen = "a wrong value, silently"
    elif flip["errors"] or flip["missing"]:
        seen = f"`{(flip['error'] or 'an error').split(':')[0]}`"
    else:
        seen = "the right value"
    if flip["check"] is None:
        return seen, "none"
    return seen, "finds it" if flip["check"] else "finds nothing"


def put_into(page: str, tables: str) -> str:
    """The page with other figures between its marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{PLOT}\n\n{tables}\n\n{END}{after}"


def svg_of(result: Mapping[str, Any]) -> str:
    """Bars of the main figures, two panels in a row; light or dark as the reader's screen is."""
    ways = result["ways"]
    panel_height = ROW * len(ways) + 60
    width, height = 2 * PANEL_WIDTH, 2 * panel_height + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>cachestore and other ways to keep {result['samples']:,} samples</title><style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    for number, (title, better, value_of, text_of) in enumerate(PANELS):
        values = {name: value_of(way) for name, way in ways.items()}
        x, y = PANEL_WIDTH * (number % 2), panel_height * (number // 2) + 10
        parts += [
            f'<text class="title" x="{x + 16}" y="{y + 18}">{escape(title)}</text>',
            f'<text class="small" x="{x + 16}" y="{y + 36}">{escape(better)}</text>',
        ]
        for row, (name, value) in enumerate(values.items()):
            parts += _bar(x, y + 46 + ROW * row, (name, text_of(value)), max(1.0, WIDTH * value / max(values.values())))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(x: int, y: int, labels: tuple[str, str], length: float) -> list[str]:
    """A name, its bar, and its value."""
    name, value = (escape(label) for label in labels)
    style = "ours" if name == OURS else "bar"
    return [
        f'<text x="{x + LEFT - 8}" y="{y + 13}" text-anchor="end">{name}</text>',
        f'<rect class="{style}" x="{x + LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 6}" rx="2"/>',
        f'<text class="small" x="{x + LEFT + length + 6:.1f}" y="{y + 13}">{value}</text>',
    ]
