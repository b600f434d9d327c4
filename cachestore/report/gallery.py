"""Chooses the samples that a page shows, and makes their pictures: the part that was encoded, and what the latents hold of it."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from cachestore.core.inputs import WITHIN, framing_of
from cachestore.report.numbers import Framing, Gallery, Picture, Thumbnail
from cachestore.report.originals import Original, SampleLatents, find_originals, longest_side
from cachestore.report.png import encode_png
from cachestore.report.previews import Colours, choose_rows, find_colours, picture_columns, read_samples, reduce
from cachestore.sources.combined import Moved
from cachestore.store.format.catalog import Catalog, KeyColumn
from cachestore.store.read.reader import Reader
from cachestore.train.facts import cut_of

if TYPE_CHECKING:
    from cachestore.core.keys import Json

LONGEST_SIDE: Final = 128
"""Of a picture from latents, in pixels: 20 of them take at most 1.4 MB of the page. The frames of a clip have as many together."""
_WHY_NONE: Final = {
    "missing": "The original was not found.",
    "changed": "The original has changed since it was encoded.",
    "unreadable": "The original cannot be read: ",
}


def make_gallery(reader: Reader, catalog: Catalog, source: Moved | None) -> Gallery:
    """Return the gallery of a data set. Without latents of pictures or clips it is empty. `source` is as for `find_originals`."""
    columns = picture_columns(catalog)
    rows = choose_rows(catalog, columns)
    made: dict[int, Thumbnail] = {}
    states: dict[str, str] = {}
    colours: list[Colours] = []
    for column in columns:
        shown = read_samples(reader, catalog, column, [row for row in rows if rows[row] is column])
        if not shown:
            continue
        originals = find_originals(catalog, column, shown, source)
        colours.append(find_colours(shown, originals))
        states |= {one.sample: original.state for one, original in zip(shown, originals, strict=True)}
        made |= {one.row: _thumbnail(catalog, column, one, original, colours[-1]) for one, original in zip(shown, originals, strict=True)}
    if not made:
        return Gallery()
    thumbnails = tuple(made[row] for row in rows if row in made)
    about: dict[str, Json] = {
        "shown": len(made),
        "originals": list(states.values()).count("found"),
        "changed": [sample for sample, state in states.items() if state == "changed"],
        "fitted_to": sum(one.fitted_to for one in colours),
        "explained": round(min(one.explained for one in colours), 4),
        "samples": [asdict(one.framing) for one in thumbnails],
    }
    return Gallery(
        samples=len(catalog),
        has_originals=any(state != "missing" for state in states.values()),
        colours=tuple(dict.fromkeys(one.in_words() for one in colours)),
        thumbnails=thumbnails,
        about=about,
    )


def _thumbnail(catalog: Catalog, column: KeyColumn, one: SampleLatents, original: Original, colours: Colours) -> Thumbnail:
    facts, (numerator, denominator) = one.cell.facts, one.cell.facts.get("fps", (0, 0))
    scale, cut, cut_at = cut_of(one.cell)
    framing = Framing(
        one.sample,
        facts.get("bucket", ()),
        facts.get("size", ()),
        scale,
        cut,
        cut_at,
        tuple(framing_of(json.loads(catalog.extras[one.row])).get(WITHIN, ())),
        numerator / denominator if numerator and denominator else None,
        original.footage,
    )
    side = longest_side(LONGEST_SIDE, len(one.latents))
    painted = [reduce(colours.paint(latents), side) for latents in one.latents]
    return Thumbnail(
        framing=framing,
        source=next(iter(catalog.row_images(one.row).get(column.role, ())), ""),
        caption=next(iter(catalog.row_captions(one.row)), ""),
        latents=tuple(Picture("png", encode_png(pixels), pixels.shape[1], pixels.shape[0]) for pixels in painted),
        originals=original.shown,
        why_none=_WHY_NONE.get(original.state, "") + original.reason,
    )
