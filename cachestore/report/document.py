"""The page as one static file: it has its style inside, no script, and no links to other addresses."""

import base64
from collections.abc import Sequence
from itertools import islice
from typing import Final

from cachestore.core.words import first_of, listed
from cachestore.jobs.share.history import Pass, RankNumbers
from cachestore.jobs.start.forecast import left_out_in_words
from cachestore.report.charts import bar, histogram, neighbours, segment_map
from cachestore.report.html import (
    DASH,
    LONGEST_TEXT,
    NOTHING,
    Html,
    attribute,
    count,
    duration,
    element,
    in_percent,
    join,
    note,
    plural,
    prose,
    size,
    table,
    words,
)
from cachestore.report.numbers import Captions, ColumnNumbers, Damage, Gallery, Picture, ReportNumbers, Thumbnail
from cachestore.report.style import STYLE
from cachestore.sources.unused import REASONS
from cachestore.store.format.catalog import HAVE_SOURCES, MADE

MOST_ROWS: Final = 50
"""The most findings, failures or buckets in a table; the page counts the rest."""
MOST_PASSES: Final = 10
MOST_NAMES: Final = 10
_SHORT: Final = 90
"""Characters of text in a narrow cell."""
_SMALL: Final = (2, 4, 8)
"""The batch sizes for which a sentence says what is left out; a table has the others."""
_SAME: Final = 0.005
"""A scale that is so near to 1 is none."""
_LONGEST_SIDE: Final = 192
"""Of a picture as it is shown, in pixels; it shrinks with the page."""
_COUNTS: Final = (("Encoded", "n"), ("Reused", "n"), ("Failed", "n"))
_SHARED_INPUTS: Final = "Equal captions are one entry, and so are files with equal bytes: each was encoded once, and is stored once."
_SHARED_ROWS: Final = "Rows that name the same key share its entry, which is stored once."
_NO_RECORD: Final = Html("There is no record here of a run that ended.")
_NOT_CHECKED: Final = "What lies at an address is not checked here: `cachestore pull` compares every byte while it brings it."


def make_page(numbers: ReportNumbers, gallery: Gallery) -> bytes:
    """Return the whole report as UTF-8. If the store has no entries or no data set, the page says so."""
    kinds, are_clips = [one for one in numbers.kinds if one.cells], {one.is_clip for one in gallery.thumbnails}
    shown = "Clips" if are_clips == {True} else "Pictures and clips" if True in are_clips else "Pictures"
    of_data_set = [
        ("pictures", shown, _pictures(gallery)),
        ("failures", "Not encoded", _failures(numbers)),
        ("unused", "Not used", _unused(numbers)),
        ("buckets", "Buckets", _buckets(numbers)),
        ("captions", "Captions", _captions(numbers.captions)),
        ("shared", "Shared entries", _sharing(kinds, _SHARED_INPUTS)),
        ("work", "Throughput", _work(numbers.passes)),
    ]
    if numbers.made not in HAVE_SOURCES:
        of_data_set = [("shared", "Shared entries", _sharing(kinds, _SHARED_ROWS))]
    of_store = [("sizes", "Size by kind", _sizes(numbers, kinds)), ("damage", "Damage map", _damage(numbers.damage))]
    parts = [*of_data_set, *of_store] if numbers.name else of_store
    links = join(Html(f'<li><a href="#{anchor}">{title}</a></li>') for anchor, title, _body in parts)
    sections = join(Html(f'<section id="{anchor}"><h2>{title}</h2>{body}</section>') for anchor, title, body in parts)
    title = attribute(f"{_name_of(numbers) or 'no data set'} · cachestore report")
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="cachestore {attribute(numbers.version)}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
{_head(numbers)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
{sections}
<footer>Made by cachestore {attribute(numbers.version)}; this file needs no other one.</footer>
</main>
</body>
</html>
"""
    return page.encode("utf-8")


def _name_of(numbers: ReportNumbers) -> str:
    return numbers.name or next((one.name for one in numbers.unfinished), "")


def _head(numbers: ReportNumbers) -> Html:
    name, damage = _name_of(numbers), numbers.damage
    generation = f", generation {numbers.generation:,}" if numbers.name else ""
    generation += f", {MADE[numbers.made]}" if numbers.name and numbers.made != "precompute" else ""
    others = NOTHING
    if numbers.other_names:
        more = len(numbers.other_names) - MOST_NAMES
        names = join((words(other, _SHORT) for other in numbers.other_names[:MOST_NAMES]), ", ")
        others = Html(f"<br>Other data sets here: {names}" + (f" and {count(more)} more" if more > 0 else ""))
    unfinished = join(element("p", prose(f"{one.words[:1].upper()}{one.words[1:]}."), "about") for one in numbers.unfinished)
    rows = "Samples" if numbers.made in HAVE_SOURCES else "Rows"
    samples = _tile(rows, count(numbers.samples), Html(f"{in_percent(numbers.complete, numbers.samples)} complete"))
    if not numbers.name and numbers.unfinished:
        one = numbers.unfinished[0]
        samples = _tile("Values", Html(f"{count(one.done)} of {count(one.total)}"), Html("not finished"))
    about_entries = f"{count(numbers.others)} not of this data set" if numbers.others and numbers.name else "all of this data set"
    entries = _tile("Entries", count(numbers.entries), Html(about_entries if numbers.name else "in the store"))
    on_disk = _tile("On disk", size(numbers.bytes), plural(numbers.segments, "segment"))
    checked = _tile("Verify", Html("not checked"), Html("a store at an address"), css="wide")
    if damage is not None:
        verdict = "no damage found" if damage.ok else plural(len(damage.findings), "finding")
        level = "every byte read" if damage.level == "full" else "only names, sizes and headers read"
        marked = Html(f'<span class="{"good" if damage.ok else "bad"}">{verdict}</span>')
        checked = _tile("Verify", marked, Html(level), css="wide")
    return Html(
        f'<header><p class="kicker">cachestore report</p><h1>{words(name) if name else "No data set"}</h1><p class="about">'
        f"{words(numbers.store)}{generation} · {attribute(numbers.written)}{others}</p>{unfinished}"
        f'<dl class="tiles">{join([samples, entries, on_disk, checked])}</dl></header>'
    )


def _tile(title: str, figure: Html, about: Html, css: str = "") -> Html:
    return Html(f'<div class="{css}"><dt>{title}</dt><dd>{figure}</dd><dd class="small">{about}</dd></div>')


def _damage(damage: Damage | None) -> Html:
    if damage is None:
        return note(prose(_NOT_CHECKED))
    if not damage.map and not damage.findings:
        return note(Html("There are no segments yet."))
    text = "every byte was read" if damage.level == "full" else "only names, sizes and headers were read (--full reads every byte)"
    total = f"{plural(len(damage.map), 'segment')}, {plural(damage.entries, 'entry', 'entries')}, {size(damage.bytes)}: {text}"
    states = {segment.state for segment in damage.map}
    legend = [state for state in ("sound", "damaged", "unreadable", "gone") if state == "sound" or state in states]
    keys = join(Html(f'<li><span class="key {state}"></span>{state}</li>') for state in legend)
    rows = [
        [words(found.kind), words(found.message, 2 * LONGEST_TEXT), DASH if found.sample is None else words(found.sample, _SHORT)]
        for found in damage.findings[:MOST_ROWS]
    ]
    each = neighbours(len(damage.map))
    square = "a segment" if each == 1 else f"{each} segments, and shows the one in the worst state"
    parts = [
        note(Html(f"{total}. Each square is {square}.")),
        segment_map(damage.map) if damage.map else NOTHING,
        Html(f'<ul class="legend">{keys}</ul>'),
        table("What verify found", [("Kind", "k"), ("What", "t"), ("Sample", "k")], rows),
        _more(len(damage.findings), "`cachestore verify` lists all"),
    ]
    return join(parts)


def _more(found: int, where: str) -> Html:
    left = found - MOST_ROWS
    return note(prose(f"and {left:,} more; {where}.")) if left > 0 else NOTHING


def _buckets(numbers: ReportNumbers) -> Html:
    found = [one for one in numbers.buckets if one.samples]
    if not found:
        return note(Html("No complete sample has a picture."))
    shown: list[Html] = []
    for one in found:
        where = f" at {one.resolution}" if len(found) > 1 else ""
        text = f"{plural(one.samples, 'complete sample')}{where} in {plural(len(one.buckets), 'bucket')}."
        most = one.buckets[0].samples
        rows = [
            [
                words(each.name or "size unknown"),
                bar((each.samples / most, "fill")),
                count(each.samples),
                in_percent(each.samples, one.samples),
            ]
            for each in one.buckets[:MOST_ROWS]
        ]
        buckets = table(f"Samples by bucket{where}", [("Bucket", "k"), ("", "bar"), ("Samples", "n"), ("Share", "n")], rows)
        shown += [note(Html(text)), buckets, _more(len(one.buckets), "smaller buckets are not shown")]
        if one.read_here:
            left_out = {loss.batch_size: loss.left_over for loss in one.losses if loss.batch_size in {*_SMALL, numbers.batch_size}}
            none = f"cachestore's loader leaves out no sample with batch sizes of {first_of(left_out)}"
            sentence = next(iter(left_out_in_words(left_out)), none)
            sizes = [[count(loss.batch_size), count(loss.batches), count(loss.left_over)] for loss in one.losses]
            columns = [("Batch size", "k"), ("Batches", "n"), ("Left out", "n")]
            other = table(f"Full batches of one bucket each, on one rank{where}", columns, sizes)
            shown += [note(prose(f"{sentence}.")), Html(f"<details><summary>All batch sizes</summary>{other}</details>")]
    return join(shown)


def _captions(captions: Captions | None) -> Html:
    if captions is None or not captions.captions:
        return note(Html("No sample has a caption."))
    cut = ""
    if captions.limit is not None:
        longer = "none is longer."
        if captions.truncated:
            longer = f"{count(captions.truncated)} ({in_percent(captions.truncated, captions.distinct)}) are longer, so they are truncated."
        cut = f" The encoder reads {count(captions.limit)} {captions.unit}; {longer}"
    text = (
        f"{plural(captions.captions, 'caption')} of {plural(captions.samples, 'sample')}, {count(captions.distinct)} of them"
        f" different, {count(captions.empty)} empty. The median length is {count(captions.median)} {captions.unit}, the longest"
        f" caption has {count(captions.most)}.{cut}"
    )
    drawn = histogram(captions.bins, captions.unit, captions.limit) if captions.bins else NOTHING
    filled = [one for one in captions.bins if one.captions]
    rows = [[Html(f"{one.low:,}&ndash;{one.high:,}"), count(one.captions), in_percent(one.captions, captions.distinct)] for one in filled]
    lengths = table("Lengths of different captions", [(captions.unit.capitalize(), "k"), ("Captions", "n"), ("Share", "n")], rows)
    longest = [[words(one.sample, _SHORT), count(one.length), words(one.caption)] for one in captions.longest]
    cuts = table("The longest truncated captions", [("Sample", "k"), (captions.unit.capitalize(), "n"), ("Caption", "t")], longest)
    folded = Html(f"<details><summary>The same as a table</summary>{lengths}</details>") if lengths else NOTHING
    return join([note(Html(text)), drawn, folded, cuts])


def _sizes(numbers: ReportNumbers, kinds: Sequence[ColumnNumbers]) -> Html:
    if not kinds and not numbers.others:
        return note(Html("There are no entries yet."))
    most = max([one.bytes for one in kinds] + [numbers.others_bytes]) or 1

    def row(name: Html, css: str, entries: int, total: int, about: Html) -> list[Html]:
        each = size(total / entries) if entries else DASH
        return [name, bar((total / most, css)), count(entries), size(total), each, about]

    rows: list[list[Html]] = []
    for one in kinds:
        missing = f' <span class="bad">{plural(one.missing, "cell")} not made</span>' if one.missing else ""
        recipe = f" <code>{attribute(one.fingerprint[:12])}</code>" if one.fingerprint else ""
        about = Html(f"{words(one.about if one.fingerprint else MADE[numbers.made])}{recipe}{missing}")
        rows.append(row(words(one.name), "fill", one.entries, one.bytes, about))
    if numbers.others:
        about = Html("other data sets, older inputs, the empty caption, prompts for validation, entries written by a script")
        rows.append(
            row(Html("not of this data set" if numbers.name else "all entries"), "other", numbers.others, numbers.others_bytes, about)
        )
    columns = [("Kind", "k"), ("", "bar"), ("Entries", "n"), ("Bytes", "n"), ("Each", "n"), ("Made by", "t")]
    text = "Bytes of tensors. Headers, alignment and second copies take another"
    overhead = max(0, numbers.bytes - numbers.tensor_bytes)
    return join([note(Html(f"{text} {size(overhead)}.")), table("Entries and bytes by encoder", columns, rows)])


def _sharing(kinds: Sequence[ColumnNumbers], text: str) -> Html:
    if not kinds:
        return note(Html("There are no values yet."))
    bars = [bar((one.entries / max(1, one.cells), "fill"), (one.shared / max(1, one.cells), "other")) for one in kinds]
    rows = [
        [words(one.name), drawn, count(one.cells), count(one.entries), count(one.shared), size(one.saved_bytes)]
        for one, drawn in zip(kinds, bars, strict=True)
    ]
    columns = [("Kind", "k"), ("", "bar"), ("Named", "n"), ("Entries", "n"), ("Shared", "n"), ("Saved", "n")]
    repeats = [[words(one.name), count(repeat.cells), words(repeat.what)] for one in kinds for repeat in one.repeats]
    shown = table("The most shared entries", [("Kind", "k"), ("Times", "n"), ("What", "t")], repeats)
    return join([note(Html(text)), table("Values of samples, and stored entries", columns, rows), shown])


def _work(passes: Sequence[Pass]) -> Html:
    if not passes:
        return note(_NO_RECORD)
    rows = [
        [
            Html(f"{words(one.plan[:8])} / {one.number}"),
            Html("ended" if one.complete else "unfinished"),
            *_counts(one),
            duration(one.seconds) if one.complete else DASH,
            Html(f"{one.encoded / one.seconds:,.1f}") if one.complete and one.seconds and one.encoded else DASH,
            Html(f"{size(one.bytes / one.seconds)}/s") if one.complete and one.seconds and one.bytes else DASH,
        ]
        for one in passes[:MOST_PASSES]
    ]
    columns = [("Plan / pass", "k"), ("State", "k"), *_COUNTS, ("Time", "n"), ("Units/s", "n"), ("Bytes", "n")]
    busiest = [one for one in passes if one.stages][:1]
    manned = [one for one in passes if any(rank.encoded for rank in one.ranks)][:1]
    return join([table("Passes, newest first", columns, rows), *map(_stages, busiest), *map(_ranks, manned)])


def _counts(one: Pass | RankNumbers) -> list[Html]:
    return [count(one.encoded), count(one.reused), count(one.failed)]


def _stages(one: Pass) -> Html:
    bars = [bar((stage.share, "lost" if stage.name == one.limiting else "fill")) for stage in one.stages]
    rows = [
        [words(stage.name), drawn, in_percent(stage.share, 1), duration(stage.busy_seconds), duration(stage.wait_seconds)]
        for stage, drawn in zip(one.stages, bars, strict=True)
    ]
    named = Html(f"{words(one.plan[:8])} / {one.number}")
    text = Html(f"How busy the threads of each stage were in pass {named}; bottleneck: {words(one.limiting)}.")
    columns = [("Stage", "k"), ("", "bar"), ("Busy", "n"), ("Working", "n"), ("Waiting", "n")]
    return join([note(text), table("Stages of encoding, over all ranks", columns, rows)])


def _ranks(one: Pass) -> Html:
    most = max(rank.encoded for rank in one.ranks) or 1
    rows = [
        [
            DASH if rank.rank is None else count(rank.rank),
            bar((rank.encoded / most, "fill")),
            *_counts(rank),
            Html(f"{rank.encoded / rank.seconds:,.1f}") if rank.seconds > 0 else DASH,
            Html(f"{words(rank.host, _SHORT)}, pid {rank.pid}"),
            words(rank.phase),
        ]
        for rank in one.ranks[:MOST_ROWS]
    ]
    columns = [("Rank", "k"), ("", "bar"), *_COUNTS, ("Units/s", "n"), ("Process", "t"), ("State", "k")]
    return join([table(f"Ranks of pass {one.plan[:8]} / {one.number}", columns, rows), _more(len(one.ranks), "the first ones are shown")])


def _failures(numbers: ReportNumbers) -> Html:
    if not any(one.complete for one in numbers.passes):
        return note(_NO_RECORD)
    if not numbers.failures:
        return note(Html("Nothing failed in the newest run."))
    alike: dict[tuple[str, str], list[str]] = {}
    for one in numbers.failures:
        alike.setdefault((one.sample, one.reason), []).append(one.encoder)
    rows = [[words(sample, _SHORT), words(first_of(encoders)), words(why)] for (sample, why), encoders in islice(alike.items(), MOST_ROWS)]
    shown = table("Samples that could not be encoded", [("Sample", "k"), ("Encoder", "k"), ("Reason", "t")], rows)
    return join([shown, _more(len(alike), "`cachestore why` lists all")])


def _unused(numbers: ReportNumbers) -> Html:
    if not any(one.complete for one in numbers.passes):
        return note(_NO_RECORD)
    if not numbers.unused:
        return note(Html("The newest run recorded no file of the source that it did not use."))
    rows = [
        [words(one.reason), count(one.count), words(first_of(one.examples), _SHORT), words(REASONS.get(one.reason, ""))]
        for one in numbers.unused
    ]
    return table("Files of the source that are not used", [("Reason", "k"), ("Files", "n"), ("First", "k"), ("What it says", "t")], rows)


def _pictures(gallery: Gallery) -> Html:
    if not gallery.thumbnails:
        return note(Html("There are no latents of pictures or clips to show."))
    kinds = {one.is_clip for one in gallery.thumbnails}
    text = [f"{plural(len(gallery.thumbnails), 'sample')}, chosen arbitrarily from {count(gallery.samples)}."]
    if False in kinds:
        text += [f"{'Left: the part that was encoded. Right:' if gallery.has_originals else 'Shown is'} a rough picture of the latents."]
    if True in kinds:
        of = "Of a clip" if False in kinds else "Of each clip"
        how = "above as encoded, below" if gallery.has_originals else "as"
        text += [f"{of}, the first, middle and last frame: {how} a rough picture of the latents."]
    figures = join(_figure(one, has_originals=gallery.has_originals) for one in gallery.thumbnails)
    css = "gallery pairs" if gallery.has_originals or True in kinds else "gallery"
    return join([note(Html(" ".join([*text, *(words(one) for one in gallery.colours)]))), Html(f'<div class="{css}">{figures}</div>')])


def _figure(one: Thumbnail, *, has_originals: bool) -> Html:
    framing = one.framing
    source = words(one.source or framing.sample, _SHORT)
    caption = words(one.caption) if one.caption else element("i", Html("no caption"))
    made = [_image(each, f"{framing.sample}, made from its latents: {one.caption or 'no caption'}") for each in one.latents]
    originals = [_image(each, f"{framing.sample}, the original") for each in one.originals]
    if has_originals and not originals:
        originals = [element("span", words(one.why_none), "missing")]
    rows = [originals, made] if one.is_clip else [[*originals, *made]]
    shown = join(Html(f'<div class="row of{max(len(row), len(made))}">{join(row)}</div>') for row in rows if row)
    return Html(
        f'<figure>{shown}<figcaption><span class="source">{source}</span> <span class="small">{words(_in_words(one))}</span>'
        f'<span class="caption">{caption}</span></figcaption></figure>'
    )


def _in_words(one: Thumbnail) -> str:
    framing, latents = one.framing, one.latents[0]
    bucket = "x".join(map(str, framing.bucket[:2]))
    parts = ["x".join(map(str, framing.size))] if framing.size else []
    if framing.within:
        parts.append(f"of which {list(framing.within)} is used")
    parts.append(f"bucket {bucket}" if bucket else f"{latents.width}x{latents.height} latents")
    if framing.scale is not None:
        way = "not scaled" if abs(framing.scale - 1) < _SAME else "scaled up" if framing.scale > 1 else "scaled down"
        parts.append(way + {"scaled up": f" {framing.scale:.2f} times", "scaled down": f" to {framing.scale:.2f}"}.get(way, ""))
    if framing.cut is not None:
        percent = f"{100 * framing.cut:.0f}\u00a0%" if framing.cut >= 0.01 else "less than 1\u00a0%"
        parts.append(f"{percent} cut at {listed(framing.cut_at)}" if framing.cut_at else "nothing cut")
    if len(framing.bucket) > 2:
        frames = framing.bucket[2]
        if framing.fps:
            parts += [f"{plural(frames, 'frame')} at {framing.fps:.4g} a second", f"{frames / framing.fps:.1f} s"]
        else:
            parts.append(plural(frames, "frame"))
        if framing.file is not None and framing.file.repeated:
            parts.append(f"{framing.file.repeated} of them repeated: the file has {framing.file.rate:.4g} a second")
        if framing.file is not None:
            parts.append("sound: not encoded" if framing.file.has_sound else "sound: none")
    return ", ".join(parts)


def _image(one: Picture, about: str) -> Html:
    data = base64.b64encode(one.data).decode("ascii")
    scale = _LONGEST_SIDE / max(one.width, one.height)
    width, height = (max(1, round(scale * side)) for side in (one.width, one.height))
    return Html(f'<img width="{width}" height="{height}" alt="{attribute(about)}" src="data:image/{one.kind};base64,{data}">')
