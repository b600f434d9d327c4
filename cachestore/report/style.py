"""The CSS of the page, for light mode, dark mode and paper. Figures are tabular, so that digits stand in columns."""

from typing import Final

STYLE: Final = """
:root { --paper: #fff; --ink: #1c2430; --soft: #5a6573; --line: #e2e6ea; --fill: #4a7aa8; --other: #b3bfca; --lost: #c9691c;
  --sound: #93b5a7; --gone: #8a6bb0; --good: #2f6b54; --bad: #a8400b; --tint: #f5f7f8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15191e; --ink: #e4e8ec; --soft: #9ba7b4; --line: #2c333b; --fill: #6fa0cd; --other: #55616d; --lost: #e0924f;
    --sound: #4d7867; --gone: #a78bcb; --good: #83c2a8; --bad: #f09a62; --tint: #1c2127; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums lining-nums; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.2; font-weight: 600; letter-spacing: -0.015em; margin: 0; }
h2 { font-size: 1.2rem; font-weight: 600; margin: 0 0 .4rem; }
p { margin: 0; }
a { color: inherit; text-decoration-color: var(--other); text-underline-offset: .2em; }
code { font: .85em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; color: var(--soft); }
.kicker { color: var(--soft); font-size: .85rem; margin-bottom: .2rem; }
.about, .note, .small, footer { color: var(--soft); }
.about { margin-top: .3rem; }
.small, footer { font-size: .85rem; }
.note { max-width: 46rem; margin-bottom: 1rem; } .scroll + .note { margin-top: 1.3rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr) 1.5fr; gap: 1.5rem; margin: 1.8rem 0 0; padding: 1.2rem 0;
  border: solid var(--line); border-width: 1px 0; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.45rem; line-height: 1.3; font-weight: 600; letter-spacing: -0.01em; }
.tiles dd.small { font-size: .85rem; font-weight: 400; letter-spacing: 0; line-height: 1.5; }
nav ul, .legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: 1rem 0 0; font-size: .9rem; }
section { margin-top: 3.2rem; }
.scroll { overflow-x: auto; margin-top: 1.3rem; container-type: inline-size; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; max-width: 100cqw; }
th, td { text-align: left; vertical-align: baseline; font-weight: 400; padding: .32rem 0 .32rem 1.1rem;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { padding-left: 0; }
thead th { color: var(--soft); font-size: .85rem; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; width: 1%; }
.k { width: 1%; min-width: 7rem; overflow-wrap: break-word; } thead .k { white-space: nowrap; } .k code { white-space: nowrap; }
.t { min-width: 11rem; }
.bar { min-width: 5rem; }
svg { display: block; }
svg.bar { width: 100%; height: .62rem; position: relative; top: .05rem; }
svg.map { width: 100%; height: auto; }
svg.histogram { width: 100%; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); }
.fill { fill: var(--fill); } .lost { fill: var(--lost); } .other { fill: var(--other); }
.sound { fill: var(--sound); background: var(--sound); } .damaged { fill: var(--lost); background: var(--lost); }
.unreadable { fill: var(--other); background: var(--other); } .gone { fill: var(--gone); background: var(--gone); }
.sign { stroke: var(--paper); stroke-width: 1.4; } .axis { stroke: var(--line); } .limit { stroke: var(--lost); stroke-dasharray: 3 3; }
svg .limit-text { fill: var(--bad); }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .4rem; }
details { margin-top: .8rem; } summary { color: var(--soft); font-size: .9rem; cursor: pointer; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 1.6rem 1.2rem; margin-top: 1.4rem; }
.gallery.pairs { grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
.row { display: flex; gap: .5rem; align-items: flex-start; } .row + .row { margin-top: .5rem; }
.of2 > * { max-width: calc(50% - .25rem); } .of3 > * { max-width: calc((100% - 1rem) / 3); } .of3 > .missing { max-width: 100%; }
.missing { width: 12rem; min-height: 6rem; align-self: stretch; display: grid; place-content: center; text-align: center; padding: .5rem;
  border: 1px dashed var(--other); color: var(--soft); font-size: .85rem; line-height: 1.4; }
figure { margin: 0; break-inside: avoid; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .85rem; line-height: 1.4; margin-top: .5rem; }
.source { font-weight: 600; } .caption { display: block; color: var(--soft); margin-top: .1rem; }
footer { margin-top: 4rem; border-top: 1px solid var(--line); padding-top: 1rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.7rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 1.1rem; }
  section { margin-top: 2.4rem; }
  table { font-size: .85rem; } th, td { padding-left: .45rem; } .k { min-width: 4rem; } .bar { min-width: 2rem; }
  .fold, .fold tbody { display: block; } .fold thead { display: none; } .fold caption { display: block; }
  .fold tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .fold th, .fold td { padding: 0; border: 0; width: auto; min-width: 0; } .fold th { font-weight: 600; }
  .fold th, .fold .bar { flex: 0 0 100%; } .fold td[data-of]::before { content: attr(data-of) " "; color: var(--soft); }
  .gallery:not(.pairs) { grid-template-columns: 1fr 1fr; gap: 1.2rem .9rem; }
}
@media print {
  :root { --paper: #fff; --ink: #000; --soft: #444; --line: #ccc; --fill: #4a7aa8; --other: #b3bfca; --lost: #c9691c; --sound: #93b5a7;
    --gone: #8a6bb0; --good: #000; --bad: #a8400b; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  nav, summary { display: none; } section { margin-top: 1.6rem; } tr { break-inside: avoid; } h2 { break-after: avoid; }
  .scroll { overflow: visible; break-inside: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
  .gallery { grid-template-columns: repeat(4, 1fr); } .gallery.pairs { grid-template-columns: 1fr 1fr; }
}
"""
