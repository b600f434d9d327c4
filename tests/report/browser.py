"""A browser without a window: what it makes of a page, and where a page overflows or cannot be read."""

import html
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium or google-chrome to open a page in")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"

MEASURE = """
const hue = text => text.match(/[0-9.]+/g).map(Number);
const light = rgb => rgb.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const contrast = (one, other) => (Math.max(light(one), light(other)) + .05) / (Math.min(light(one), light(other)) + .05);
function measure(frame) {
  const view = frame.contentWindow, page = frame.contentDocument;
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = hue(view.getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  const faint = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || ['STYLE', 'TITLE', 'title'].includes(node.tagName)) continue;
    const style = view.getComputedStyle(node);
    const ratio = contrast(hue(node instanceof view.SVGElement ? style.fill : style.color), behind(node));
    if (ratio < 4.5) faint.push(texts.currentNode.data.slice(0, 40) + ' ' + ratio.toFixed(1));
  }
  const whole = page.documentElement, overflow = whole.scrollWidth - whole.clientWidth;
  const right = node => node.getBoundingClientRect().right;
  const cut = [...page.querySelectorAll('.scroll *, figure *')].filter(
    node => node.checkVisibility() && right(node) > right(node.closest('.scroll, figure')) + .5);
  return {width: view.innerWidth, background: behind(page.body).slice(0, 3), overflow, faint, cut: cut.map(node => node.textContent)};
}
window.onload = () => { document.title = JSON.stringify([...document.querySelectorAll('iframe')].map(measure)); };
"""


def look_at(page, folder, *flags):
    """(the page as the browser has it, what it wrote to its console)."""
    command = [str(BROWSER), *FLAGS, *flags, f"--user-data-dir={folder}", "--dump-dom", page.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


def measure(page, folder, widths, scheme) -> list[dict[str, Any]]:
    """At each width: by how many pixels a page overflows, texts with a contrast below 4.5 to 1, what a scrolling box or a figure cuts."""
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(f'<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{text}"></iframe>' for width in widths)
    host = folder / "host.html"
    folder.mkdir(exist_ok=True)
    host.write_text(f"<!DOCTYPE html><meta charset='utf-8'><title></title><script>{MEASURE}</script>{frames}", encoding="utf-8")
    dom, _console = look_at(host, folder / "profile", scheme)
    found = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))
