// The contrast of every visible text with what is behind it, as WCAG 2 computes it; those under 4.5 are returned.
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
const over = (top, below) => top.slice(0, 3).map((value, i) => value * top[3] + below[i] * (1 - top[3]));
const light = ([r, g, b]) => [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const solid = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
const poor = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, element = node.parentElement;
  if (!node.nodeValue.trim() || element.closest(".sr, dialog:not([open]), noscript, script, .flame, thead") || !element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  let behind = [], at = element;
  while (at) { behind.push(solid(getComputedStyle(at).backgroundColor)); at = at.parentElement; }
  let back = [255, 255, 255];
  for (const layer of behind.reverse()) back = over(layer, back);
  const front = over(solid(element.namespaceURI.endsWith("svg") ? style.fill : style.color), back);
  const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.tagName}.${element.className} ${node.nodeValue.trim().slice(0, 30)}`);
}
return [...new Set(poor)];
