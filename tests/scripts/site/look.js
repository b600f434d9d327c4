// Opens each of ASKED.pages at each width and in each colour scheme, and posts what is wrong with it, as JSON.
const found = {looked: 0, texts: 0, faults: []};

function parsed(colour) {
  const parts = (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
}

function over(top, bottom) {
  return [0, 1, 2].map(i => top[i] * top[3] + bottom[i] * (1 - top[3])).concat(1);
}

function luminance(colour) {
  const [r, g, b] = colour.slice(0, 3).map(part => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function background(element, view) {
  const layers = [];
  for (let each = element; each; each = each.parentElement) layers.push(parsed(view.getComputedStyle(each).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
}

function opacity(element, view) {
  let all = 1;
  for (let each = element; each; each = each.parentElement) all *= Number(view.getComputedStyle(each).opacity);
  return all;
}

// Texts that can be seen. What appears only under the mouse (opacity 0) is left out.
function* texts(document, view) {
  const walker = document.createTreeWalker(document.body, view.NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, style, noscript, svg")) continue;
    const style = view.getComputedStyle(element);
    if (!element.checkVisibility({checkOpacity: true, checkVisibilityCSS: true}) || opacity(element, view) < 0.05) continue;
    yield [walker.currentNode.data.trim(), element, style];
  }
}

function lookAtPage(name, frame) {
  const view = frame.contentWindow, document = frame.contentDocument, root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.faults.push(`${name}: ${root.scrollWidth} wide, but ${root.clientWidth} fit`);
  const pale = new Map();
  for (const [text, element, style] of texts(document, view)) {
    found.texts += 1;
    const below = background(element, view), ink = parsed(style.color);
    ink[3] *= opacity(element, view);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const ratio = contrast(over(ink, below), below);
    if (ratio < (isLarge ? 3 : 4.5)) {
      const kind = `${element.tagName.toLowerCase()}.${element.className} ${style.color} on ${below.slice(0, 3).map(Math.round)}`;
      if (!pale.has(kind)) pale.set(kind, `${name}: contrast ${ratio.toFixed(2)} of "${text.slice(0, 30)}" (${kind})`);
    }
  }
  found.faults.push(...pale.values());
}

// Each text of a drawing lies on its card, and one in a box within the box; both are opaque.
function lookAtDrawing(name, source) {
  const holder = document.createElement("div");
  holder.innerHTML = source.replace(/^<\?xml.*?\?>/, "");
  document.body.append(holder);
  for (const text of holder.querySelectorAll("text")) {
    found.texts += 1;
    const rect = (text.closest("g.box") || holder).querySelector("rect"), inner = text.getBBox(), outer = rect.getBBox();
    const isInside = inner.x >= outer.x + 1 && inner.x + inner.width <= outer.x + outer.width - 1 &&
      inner.y >= outer.y && inner.y + inner.height <= outer.y + outer.height;
    if (!isInside) found.faults.push(`${name}: "${text.textContent}" leaves its box`);
    const ratio = contrast(parsed(getComputedStyle(text).fill), parsed(getComputedStyle(rect).fill));
    if (ratio < 4.5) found.faults.push(`${name}: contrast ${ratio.toFixed(2)} of "${text.textContent}"`);
  }
  holder.remove();
}

async function look() {
  for (const page of ASKED.pages) {
    if (page.endsWith(".svg")) {
      lookAtDrawing(page, await (await fetch(page)).text());
      found.looked += 1;
      continue;
    }
    for (const width of ASKED.widths) {
      const frame = document.createElement("iframe");
      frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
      const loaded = new Promise(done => frame.addEventListener("load", done, {once: true}));
      frame.src = page;
      document.body.append(frame);
      await loaded;
      for (const scheme of ASKED.schemes) {
        frame.contentDocument.body.setAttribute("data-md-color-scheme", scheme);
        const still = frame.contentDocument.createElement("style");
        still.textContent = "* { transition: none !important; animation: none !important }";
        frame.contentDocument.head.append(still);
        lookAtPage(`${page} ${width} ${scheme}`, frame);
        found.looked += 1;
      }
      frame.remove();
    }
  }
}

look().catch(error => found.faults.push(String(error))).finally(() => fetch("look.html", {method: "POST", body: JSON.stringify(found)}));
