"""Text, numbers and tables as HTML. Text from outside must go through `words` or `attribute`; `Html` marks what is safe."""

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, NewType

from cachestore.core import words as plain
from cachestore.core.words import human_bytes

Html = NewType("Html", str)
"""Markup that is safe to put into a page."""

NOTHING: Final = Html("")
DASH: Final = Html("&ndash;")
LONGEST_TEXT: Final = 280


def words(text: str, limit: int = LONGEST_TEXT) -> Html:
    """Return any text as HTML: escaped, cut after `limit` characters, with signs for control characters and its own text direction."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    shown = ""
    for char in cut:
        # Controls, lone surrogates and unassigned ones must not be in a page. Joiners stay: emoji and Persian need them.
        is_unprintable = unicodedata.category(char) in {"Cc", "Cs", "Cn"}
        shown += "↵ " if char == "\n" else "\N{REPLACEMENT CHARACTER}" if is_unprintable else char
    return Html(f"<bdi>{html.escape(shown, quote=True)}</bdi>")


def prose(text: str) -> Html:
    """Like `words`, for whole sentences: what stands in backticks is set as code."""
    return Html(re.sub("`([^`]*)`", r"<code>\1</code>", words(text, 2 * LONGEST_TEXT)))


def attribute(text: str, limit: int = LONGEST_TEXT) -> Html:
    """Like `words`, for quoted attributes and `title` elements, which cannot contain elements."""
    return Html(words(text, limit).removeprefix("<bdi>").removesuffix("</bdi>"))


def count(number: int) -> Html:
    """Return a whole number with separators."""
    return Html(f"{number:,}")


def plural(number: int, one: str, many: str = "") -> Html:
    """Return a count with its noun, such as `2 segments`."""
    return Html(plain.plural(number, one, many, form=","))


def in_percent(part: float, whole: float) -> Html:
    """Return a part in per cent; a dash if the whole is 0."""
    if not whole:
        return DASH
    percent = 100 * part / whole
    return Html("&lt;0.1&nbsp;%" if 0 < percent < 0.1 else f"{percent:.1f}&nbsp;%")


def size(size_bytes: float) -> Html:
    """Return bytes in a readable unit."""
    return Html(human_bytes(size_bytes).replace(" ", "&nbsp;"))


def duration(seconds: float) -> Html:
    """Return seconds in readable units."""
    if seconds < 60:
        return Html(f"{seconds:.1f}&nbsp;s")
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return Html(f"{minutes}&nbsp;min&nbsp;{rest:02}&nbsp;s")
    return Html(f"{minutes // 60}&nbsp;h&nbsp;{minutes % 60:02}&nbsp;min")


def join(parts: Iterable[Html], between: str = "") -> Html:
    """Join parts of a page."""
    return Html(between.join(parts))


def element(name: str, inside: Html, css: str = "") -> Html:
    """Return one element; `css` names its classes."""
    return Html(f'<{name} class="{css}">{inside}</{name}>' if css else f"<{name}>{inside}</{name}>")


def note(inside: Html) -> Html:
    """Return a sentence to stand beside a chart."""
    return element("p", inside, "note")


Column = tuple[str, str]
"""A column's title and class: `n` for numbers, `bar` for charts, `t` for text, `k` for short names."""


_MOST_COLUMNS: Final = 5
"""As many columns of numbers as fit on a phone. A row of a table with more, or with text, is folded there: its cells say their columns."""


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Html]]) -> Html:
    """Return a table with a caption, whose first column names its rows; empty without rows."""
    if not rows:
        return NOTHING
    is_wide = len(columns) > _MOST_COLUMNS or any(css == "t" for _name, css in columns)
    heads = join(Html(f'<th scope="col" class="{css}">{attribute(name)}</th>') for name, css in columns)
    of = [f' data-of="{attribute(name)}"' if name and is_wide else "" for name, _css in columns]
    body: list[Html] = []
    for first, *others in rows:
        cells = [Html(f'<th scope="row" class="{columns[0][1]}">{first}</th>')]
        for (_name, css), name, cell in zip(columns[1:], of[1:], others, strict=True):
            cells.append(Html(f'<td class="{css}"{name}>{cell}</td>'))
        body.append(element("tr", join(cells)))
    caption = element("caption", attribute(title))
    css = ' class="fold"' if is_wide else ""
    return Html(f'<div class="scroll"><table{css}>{caption}<thead><tr>{heads}</tr></thead><tbody>{join(body)}</tbody></table></div>')
